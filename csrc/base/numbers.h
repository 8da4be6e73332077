// Converts float16 and bfloat16, which are held as bits, to float and back, and rounds gradients with error feedback. The same
// code runs on the device (cuda/pack.cu) and on the host (reduce.cc, compress.cc). It rounds to the nearest number, ties to even,
// and keeps subnormal numbers. Code on the device can call constexpr functions (nvcc's option --expt-relaxed-constexpr), so this
// file needs nothing from CUDA.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

namespace mscomm {

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

// Returns the bits of `yes` where the mask has ones, and the bits of `no` elsewhere. It replaces ?:, because GCC compiles chains
// of ?: to jumps, and does not vectorise loops with jumps. Both values are always computed.
template <class T>
constexpr T blend(Bits<T> mask, T yes, T no) {
  return std::bit_cast<T>((std::bit_cast<Bits<T>>(yes) & mask) | (std::bit_cast<Bits<T>>(no) & ~mask));
}

template <class T>
constexpr T choose(bool condition, T yes, T no) {
  // The mask is selected as a T instead of computed as 0 - condition, because SSE2 can compare doubles but not 64-bit integers.
  return blend(std::bit_cast<Bits<T>>(condition ? std::bit_cast<T>(~Bits<T>{0}) : T{}), yes, no);
}

constexpr bool is_finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000) != 0x7f800000; }
constexpr bool is_finite(double x) { return (std::bit_cast<uint64_t>(x) & 0x7ff0000000000000) != 0x7ff0000000000000; }

// The bits of a computed NaN depend on the compiler (the order of operands) and on the machine (the sign). So one_nan() replaces
// every NaN with the same NaN.
constexpr float one_nan(float x) { return choose(x != x, std::bit_cast<float>(0x7fc00000u), x); }
constexpr double one_nan(double x) { return choose(x != x, std::bit_cast<double>(0x7ff8000000000000u), x); }

constexpr float widen(float x) { return x; }
constexpr double widen(double x) { return x; }
constexpr float widen(Bfloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

constexpr float widen(Float16 x) {
  const int32_t magnitude = (x.bits & 0x7fff) << 13;
  const uint32_t bits = static_cast<uint32_t>(magnitude), sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  // The exponent of infinity and NaN is 255 in a float and 31 in a float16, so 224 is added to the exponent. This makes finite
  // numbers 2^112 times too large, which the multiplication corrects.
  const float normal = std::bit_cast<float>(bits + (224u << 23)) * 0x1p-112f;
  // A subnormal number is 2^-14 * (1 + fraction) - 2^-14. The subtraction is exact and normalises the number.
  const float subnormal = std::bit_cast<float>(bits + (113u << 23)) - 0x1p-14f;
  const uint32_t is_subnormal = static_cast<uint32_t>((magnitude - (1 << 23)) >> 31);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(blend(is_subnormal, subnormal, normal)) | sign);
}

template <class To, class From>
constexpr To narrow(From x) {
  return x;  // x already has the type To
}

// Rounds x to a bfloat16, which is in the upper half of the result. positive_nan: whether every NaN gets the same sign.
template <bool positive_nan>
constexpr uint32_t round_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = positive_nan ? 0 : bits & 0x80000000;
  return choose(x != x, sign | 0x7fc00000, bits + 0x7fff + (bits >> 16 & 1));
}

template <>
constexpr Bfloat16 narrow<Bfloat16, float>(float x) {
  return {static_cast<uint16_t>(round_to_bfloat16<false>(x) >> 16)};
}

template <>
constexpr Float16 narrow<Float16, float>(float x) {
  const uint32_t all = std::bit_cast<uint32_t>(x);
  const int32_t magnitude = static_cast<int32_t>(all & 0x7fffffff);
  // This uses ?: instead of std::min, because GCC compiles std::min to a jump here.
  const int32_t bounded = magnitude < (143 << 23) ? magnitude : 143 << 23;  // at most 2^16, which becomes inf
  const int32_t biased = bounded & (255 << 23);
  const int32_t exponent = biased > (113 << 23) ? biased : 113 << 23;  // at least 2^-14: smaller numbers are subnormal
  // `weight` is 2^13 times the power of two in `exponent`. Adding it to the number rounds the number to the precision of a
  // float16.
  const int32_t weight = exponent + (13 << 23);
  const float sum = std::bit_cast<float>(bounded) + std::bit_cast<float>(weight);
  const int32_t fraction = std::bit_cast<int32_t>(sum) - weight;  // includes the leading 1 of a normal number
  const uint32_t number = static_cast<uint32_t>(fraction + (exponent >> 13) - (113 << 10));
  const uint32_t quiet_nan = 0x200 | (all >> 13 & 0x3ff);
  return {static_cast<uint16_t>(number | choose(x != x, quiet_nan, 0u) | (all >> 16 & 0x8000))};
}

// Adds `owed` to x, limits the sum to at most `largest` in magnitude, rounds it, and returns it in the narrow type. On entry,
// `owed` is what earlier calls removed from the same element; on return, it is what the limit and the rounding have removed now.
// If the sum is an infinity or a NaN, so is the result, because programs check results for these values. In this case, `owed`
// becomes 0. (Error feedback: Seide et al., "1-bit stochastic gradient descent", 2014.)
template <class To, class Wide>
constexpr To narrow_and_owe(Wide x, Wide& owed, Wide largest) {
  const Wide whole = one_nan(x + owed);
  const Wide bounded = whole > largest ? largest : whole < -largest ? -largest : whole;
  const To rounded = narrow<To>(static_cast<float>(is_finite(whole) ? bounded : whole));
  owed = is_finite(whole) ? whole - widen(rounded) : Wide{0};
  return rounded;
}

// Returns the largest number of the narrow type that is not above x, which must be positive. For example, a sum over n ranks
// cannot overflow if no rank contributes more than floor_to(largest / n), where `largest` is the type's largest number.
template <class To>
constexpr float floor_to(float x) {
  To made = narrow<To>(x);
  if (widen(made) > x) made.bits--;
  return widen(made);
}

}  // namespace mscomm
