// Computes reductions as devices do: the result of every step is rounded to the type.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fake {

enum class Type : uint32_t { i8, u8, i16, u16, i32, u32, i64, u64, f16, bf16, f32, f64, e4m3, e5m2 };
enum class Fold : uint32_t { none, sum, prod, max, min, average };

inline size_t size_of(Type type) {
  switch (type) {
    case Type::i8:
    case Type::u8:
    case Type::e4m3:
    case Type::e5m2:
      return 1;
    case Type::i16:
    case Type::u16:
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::i32:
    case Type::u32:
    case Type::f32:
      return 4;
    default:
      return 8;
  }
}

// A float with few bits. If `infinite` is true, the highest exponent means infinity and NaN, as in IEEE 754. Otherwise, there is
// no infinity, and NaN has only ones in its exponent and mantissa.
template <int exponent_bits, int mantissa_bits, bool infinite, typename Bits>
struct Small {
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int top = (1 << exponent_bits) - 1;
  static constexpr unsigned ones = (1u << mantissa_bits) - 1;
  Bits bits;

  operator float() const {
    const int exponent = (bits >> mantissa_bits) & top;
    const unsigned mantissa = bits & ones;
    const float sign = bits >> (exponent_bits + mantissa_bits) ? -1.0f : 1.0f;
    if (infinite && exponent == top) return mantissa ? NAN : sign * INFINITY;
    if (!infinite && exponent == top && mantissa == ones) return NAN;
    if (!exponent) return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
    return sign * std::ldexp(static_cast<float>(mantissa | (ones + 1)), exponent - bias - mantissa_bits);
  }

  static Small from(float value) {
    const Bits sign = static_cast<Bits>(std::signbit(value) ? 1u << (exponent_bits + mantissa_bits) : 0);
    const Bits nan =
        static_cast<Bits>((static_cast<unsigned>(top) << mantissa_bits) | (infinite ? 1u << (mantissa_bits - 1) : ones));
    if (std::isnan(value)) return {nan};
    const double size = std::fabs(static_cast<double>(value));
    const unsigned largest = infinite ? (static_cast<unsigned>(top - 1) << mantissa_bits) | ones
                                      : (static_cast<unsigned>(top) << mantissa_bits) | (ones - 1);
    // Values beyond the largest number become infinite or, if the type has no infinity, the largest number.
    const Bits beyond = static_cast<Bits>(infinite ? static_cast<unsigned>(top) << mantissa_bits : largest);
    if (std::isinf(value)) return {static_cast<Bits>(sign | beyond)};
    if (size == 0) return {sign};
    int exponent = std::max(std::ilogb(size), 1 - bias);
    auto steps = static_cast<unsigned>(std::nearbyint(std::ldexp(size, mantissa_bits - exponent)));  // ties to even
    if (steps > 2 * ones + 1) {
      steps /= 2;
      ++exponent;
    }
    const unsigned made = steps <= ones ? steps : (static_cast<unsigned>(exponent + bias) << mantissa_bits) | (steps & ones);
    return {static_cast<Bits>(sign | (made > largest ? beyond : made))};
  }
};

using E4m3 = Small<4, 3, false, uint8_t>;
using E5m2 = Small<5, 2, true, uint8_t>;

struct Bfloat {
  uint16_t bits;
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static Bfloat from(float value) {
    const auto all = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) return {0x7fc0};
    return {static_cast<uint16_t>((all + 0x7fff + ((all >> 16) & 1)) >> 16)};
  }
};

#ifdef __FLT16_MAX__
struct Half {
  _Float16 value;
  operator float() const { return static_cast<float>(value); }
  static Half from(float value) { return {static_cast<_Float16>(value)}; }
};
#else
using Half = Small<5, 10, true, uint16_t>;
#endif

template <typename T>
T rounded(double value) {
  if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(value);
  else return T::from(static_cast<float>(value));
}

template <typename T>
T folded(Fold fold, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;  // unsigned, because the overflow of signed numbers is undefined
    const auto x = static_cast<uint64_t>(static_cast<Unsigned>(a)), y = static_cast<uint64_t>(static_cast<Unsigned>(b));
    switch (fold) {
      case Fold::prod:
        return static_cast<T>(static_cast<Unsigned>(x * y));
      case Fold::max:
        return std::max(a, b);
      case Fold::min:
        return std::min(a, b);
      default:
        return static_cast<T>(static_cast<Unsigned>(x + y));
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    switch (fold) {
      case Fold::prod:
        return a * b;
      case Fold::max:
        return std::fmax(a, b);
      case Fold::min:
        return std::fmin(a, b);
      default:
        return a + b;
    }
  } else {
    return T::from(folded(fold, static_cast<float>(a), static_cast<float>(b)));
  }
}

template <typename Body>
void with_type(Type type, Body body) {
  switch (type) {
    case Type::i8:
      return body(int8_t{});
    case Type::u8:
      return body(uint8_t{});
    case Type::i16:
      return body(int16_t{});
    case Type::u16:
      return body(uint16_t{});
    case Type::i32:
      return body(int32_t{});
    case Type::u32:
      return body(uint32_t{});
    case Type::i64:
      return body(int64_t{});
    case Type::u64:
      return body(uint64_t{});
    case Type::f16:
      return body(Half{});
    case Type::bf16:
      return body(Bfloat{});
    case Type::f32:
      return body(float{});
    case Type::f64:
      return body(double{});
    case Type::e4m3:
      return body(E4m3{});
    case Type::e5m2:
      return body(E5m2{});
  }
}

// Combines two arrays element by element: into[i] = fold(into[i], with[i]).
inline void fold_into(Type type, Fold fold, char* into, const char* with, size_t bytes) {
  with_type(type, [&]<typename T>(T) {
    for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
      T a, b;
      memcpy(&a, into + i, sizeof(T));
      memcpy(&b, with + i, sizeof(T));
      a = folded(fold, a, b);
      memcpy(into + i, &a, sizeof(T));
    }
  });
}

// Multiplies all numbers by `factor`, which has the same type. Used only for averages of floats, which are scaled before they are
// summed.
inline void scale(Type type, char* data, size_t bytes, const void* factor) {
  with_type(type, [&]<typename T>(T) {
    T by;
    memcpy(&by, factor, sizeof(T));
    for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
      T a;
      memcpy(&a, data + i, sizeof(T));
      a = folded(Fold::prod, a, by);
      memcpy(data + i, &a, sizeof(T));
    }
  });
}

// Divides integers, rounding towards zero. Used to compute an average from a sum of integers.
inline void divide(Type type, char* data, size_t bytes, int by) {
  with_type(type, [&]<typename T>(T) {
    if constexpr (std::is_integral_v<T>) {
      for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
        T a;
        memcpy(&a, data + i, sizeof(T));
        if constexpr (std::is_signed_v<T>) a = static_cast<T>(static_cast<int64_t>(a) / by);
        else a = static_cast<T>(static_cast<uint64_t>(a) / static_cast<uint64_t>(by));
        memcpy(data + i, &a, sizeof(T));
      }
    }
  });
}

inline bool is_integer(Type type) { return type <= Type::u64; }

// Returns eight bytes that begin with 1/n as a number of this type.
inline uint64_t reciprocal(Type type, int n) {
  uint64_t bits = 0;
  with_type(type, [&]<typename T>(T) {
    const T value = rounded<T>(1.0 / n);
    memcpy(&bits, &value, sizeof(T));
  });
  return bits;
}

}  // namespace fake
