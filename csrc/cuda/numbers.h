// Converts float16 and bfloat16, which are held as bits, to float and back. The same code runs on the device and on the host, and
// tests compare it with base/reduce.cc. It rounds to the nearest number, ties to even, and keeps subnormal numbers. nvcc can call
// constexpr functions on the device (--expt-relaxed-constexpr), so nothing in this file needs CUDA.
#pragma once

#include <bit>
#include <cstdint>

namespace mscomm::cuda {

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

constexpr bool is_nan(float x) { return (std::bit_cast<uint32_t>(x) & 0x7fffffff) > 0x7f800000; }
constexpr bool is_finite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000) != 0x7f800000; }

constexpr float widen(float x) { return x; }
constexpr double widen(double x) { return x; }
constexpr float widen(Bfloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

constexpr float widen(Float16 x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13, sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  // The exponent of infinity and NaN is 255 in a float and 31 in a float16, so 224 is added to the exponent. This makes finite
  // numbers 2^112 times too large, which the multiplication corrects. A subnormal number is 2^-14 * (1 + fraction) - 2^-14. The
  // subtraction is exact and normalises the number.
  const float normal = std::bit_cast<float>(magnitude + (224u << 23)) * 0x1p-112f;
  const float subnormal = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude < (1u << 23) ? subnormal : normal) | sign);
}

template <class To, class From>
constexpr To narrow(From x) {
  return x;  // x already has the type To
}

template <>
constexpr Bfloat16 narrow<Bfloat16, float>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet_nan = (bits >> 16 & 0x8000) | 0x7fc0;
  return {static_cast<uint16_t>(is_nan(x) ? quiet_nan : rounded)};
}

template <>
constexpr Float16 narrow<Float16, float>(float x) {
  const uint32_t all = std::bit_cast<uint32_t>(x), magnitude = all & 0x7fffffff, sign = all >> 16 & 0x8000;
  const uint32_t bounded = magnitude < (143u << 23) ? magnitude : 143u << 23;  // at most 2^16, which becomes inf
  const uint32_t biased = bounded & (255u << 23);
  const uint32_t exponent = biased > (113u << 23) ? biased : 113u << 23;  // 2^-14: smaller numbers are subnormal
  // `weight` is 2^13 times the power of two in `exponent`. Adding it to the number rounds the number to the precision of a
  // float16.
  const uint32_t weight = exponent + (13u << 23);
  const float sum = std::bit_cast<float>(bounded) + std::bit_cast<float>(weight);
  const uint32_t fraction = std::bit_cast<uint32_t>(sum) - weight;  // includes the leading 1 of normal numbers
  const uint32_t rounded = fraction + (exponent >> 13) - (113u << 10), quiet_nan = 0x7e00 | (all >> 13 & 0x3ff);
  return {static_cast<uint16_t>(sign | (is_nan(x) ? quiet_nan : rounded))};
}

// Returns the largest number of the narrow type that is not above x, which must be positive. For example, a sum over n ranks
// cannot overflow if no rank contributes more than floor_to(largest / n), where `largest` is the type's largest number.
template <class To>
constexpr float floor_to(float x) {
  To made = narrow<To>(x);
  if (widen(made) > x) made.bits--;
  return widen(made);
}
}  // namespace mscomm::cuda
