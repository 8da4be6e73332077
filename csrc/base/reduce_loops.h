// The reduction loops, one for each pair of element format and operation. All loops are compiled once for each instruction set,
// and the instruction set is chosen at run time (reduce.cc).
//
// Every reduction loop is an instance of loop(), which has no intrinsics. For each instruction set (a "level", see levels.h), the
// body of loop() is inlined into a function that is compiled for that instruction set. The loops of a level take ten seconds to
// compile. So each level has a source file of its own, and two levels are compiled at the same time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/levels.h"
#include "base/numbers.h"
#include "base/reduce.h"

namespace mscomm {

// One row of operations for each dtype. A cell is empty if the operation is not defined on the dtype.
using Row = std::array<Reduction, ops.size()>;
using Reductions = std::array<Row, dtypes.size()>;

// The reductions at each level above the baseline.
extern const Reductions avx2_reductions, avx512_reductions;

// These functions have internal linkage, because each source file compiles them for its own level.
namespace {

// The number of elements in a block of accumulators. For most dtypes, a block and its inputs fit into the L1 cache together.
constexpr size_t block_elements = 1024;

template <class T>
struct Complex {
  T re, im;
};

template <class T>
constexpr bool is_complex = false;
template <class T>
constexpr bool is_complex<Complex<T>> = true;

template <class T>
[[gnu::always_inline]] inline T one_nan(T x) {
  if constexpr (is_complex<T>) return {mscomm::one_nan(x.re), mscomm::one_nan(x.im)};
  else if constexpr (std::floating_point<T>) return mscomm::one_nan(x);
  else return x;
}

template <class T>
[[gnu::always_inline]] inline T minus(T x) {
  return std::bit_cast<T>(std::bit_cast<Bits<T>>(x) ^ std::bit_cast<Bits<T>>(T{-0.0}));
}

// Operations. combine() merges two accumulators, finish() turns the final accumulator into the value that is then rounded,
// and identity is the neutral value of combine(). computes: whether combine() computes a new value, so that a NaN in the result
// must be replaced with one_nan().

template <class T>
struct Arithmetic {
  static constexpr bool computes = true;
  [[gnu::always_inline]] static T finish(T x, int) { return x; }
};

template <class T>
struct Select {
  static constexpr bool computes = false;
  [[gnu::always_inline]] static T finish(T x, int) { return x; }
};

template <class T>
struct Sum : Arithmetic<T> {
  static constexpr T identity = T{};
  [[gnu::always_inline]] static T combine(T a, T b) { return static_cast<T>(a + b); }
};

template <class T>
struct Avg : Sum<T> {
  [[gnu::always_inline]] static T finish(T x, int divisor) { return x / static_cast<T>(divisor); }
};

template <class T>
struct Prod : Arithmetic<T> {
  static constexpr T identity = T{1};
  [[gnu::always_inline]] static T combine(T a, T b) {
    if constexpr (is_complex<T>) {
      // The real part is a.re * b.re - a.im * b.im. It is written without a minus sign, because GCC 12 would compile the
      // subtraction to vfmaddsub, even with -ffp-contract=off.
      return {a.re * b.re + minus(a.im) * b.im, a.re * b.im + a.im * b.re};
    } else if constexpr (std::unsigned_integral<T>) {
      return static_cast<T>(1u * a * b);  // without 1u, uint16 * uint16 is a signed int, which can overflow
    } else {
      return a * b;
    }
  }
};

template <class T>
struct Min : Select<T> {
  static constexpr T identity =
      std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
  [[gnu::always_inline]] static T combine(T a, T b) {
    if constexpr (std::floating_point<T>) return choose((a < b) | (a != a), a, b);
    return a < b ? a : b;
  }
};

template <class T>
struct Max : Select<T> {
  static constexpr T identity =
      std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
  [[gnu::always_inline]] static T combine(T a, T b) {
    if constexpr (std::floating_point<T>) return choose((a > b) | (a != a), a, b);
    return a > b ? a : b;
  }
};

template <class T>
struct And : Select<T> {
  static constexpr T identity = static_cast<T>(~T{});
  [[gnu::always_inline]] static T combine(T a, T b) { return a & b; }
};

template <class T>
struct Or : Select<T> {
  static constexpr T identity = T{};
  [[gnu::always_inline]] static T combine(T a, T b) { return a | b; }
};

template <class T>
struct Xor : Select<T> {
  static constexpr T identity = T{};
  [[gnu::always_inline]] static T combine(T a, T b) { return a ^ b; }
};

// Element formats. An element in memory consists of `parts` values of type Part. A complex number has two such values, the real
// and the imaginary one, except in a product, in which it is a single value of type Complex. Each value is accumulated in the
// type Accumulator. Wide is the format of an element whose values have the type Accumulator. narrow() rounds an accumulator to an
// element. computed: whether the accumulator was computed, so that a NaN must be replaced with one_nan().

template <class T, size_t parts_ = 1>
struct Plain {
  static constexpr size_t parts = parts_;
  using Part = T;
  using Accumulator = T;
  using Wide = Plain;
  [[gnu::always_inline]] static T widen(T x) { return x; }
  template <bool computed>
  [[gnu::always_inline]] static T narrow(T x) {
    return computed ? one_nan(x) : x;
  }
};

struct Bool : Plain<uint8_t> {
  using Wide = Bool;
  [[gnu::always_inline]] static uint8_t widen(uint8_t x) { return x != 0; }
  // Keeps only the lowest bit: true is stored as 1, but the identity of And has all bits set.
  template <bool computed>
  [[gnu::always_inline]] static uint8_t narrow(uint8_t x) {
    return x & 1;
  }
};

// Numbers of 16 bits (see numbers.h).
template <class T>
struct Half {
  static constexpr size_t parts = 1;
  using Part = T;
  using Accumulator = float;
  using Wide = Plain<float>;
  [[gnu::always_inline]] static float widen(T x) { return mscomm::widen(x); }
  template <bool computed>
  [[gnu::always_inline]] static T narrow(float x) {
    return mscomm::narrow<T>(computed ? one_nan(x) : x);
  }
};

// Two bfloat16 in one word. A loop over such words takes less time than one over single bfloat16, because all its values have 32
// bits. So no instructions are needed that distribute the elements of one vector over two vectors of floats, or pack them again.
struct Two {
  float low, high;
};

struct TwoBfloat16 {
  static constexpr size_t parts = 1;
  using Part = uint32_t;
  using Accumulator = Two;
  static constexpr uint32_t high = 0xffff0000;
  [[gnu::always_inline]] static Two widen(uint32_t x) { return {std::bit_cast<float>(x << 16), std::bit_cast<float>(x & high)}; }
  template <bool computed>
  [[gnu::always_inline]] static uint32_t narrow(Two x) {
    return round_to_bfloat16<computed>(x.low) >> 16 | (round_to_bfloat16<computed>(x.high) & high);
  }
};

// Loops over elements. load() and store() access part i of a buffer that need not be aligned.

template <class T>
[[gnu::always_inline]] inline T load(const void* from, size_t i) {
  T x;
  std::memcpy(&x, static_cast<const unsigned char*>(from) + i * sizeof(T), sizeof(T));
  return x;
}

template <class T>
[[gnu::always_inline]] inline void store(void* to, size_t i, T x) {
  std::memcpy(static_cast<unsigned char*>(to) + i * sizeof(T), &x, sizeof(T));
}

enum class As { element, accumulator };

template <template <class> class Operation, class T>
[[gnu::always_inline]] inline T combine(T a, T b) {
  if constexpr (!std::same_as<T, Two>) return Operation<T>::combine(a, b);
  else return {Operation<float>::combine(a.low, b.low), Operation<float>::combine(a.high, b.high)};
}

template <template <class> class Operation, class T>
[[gnu::always_inline]] inline T finished(T x, int divisor) {
  if constexpr (!std::same_as<T, Two>) return Operation<T>::finish(x, divisor);
  else return {Operation<float>::finish(x.low, divisor), Operation<float>::finish(x.high, divisor)};
}

// out = first op rest[0] op rest[1] ..., from value `begin` to `end`, where first and out hold elements or accumulators, and rest
// holds elements.
template <class Format, template <class> class Operation, As from, As to, class... Rest>
[[gnu::always_inline]] inline void loop(void* out, const void* first, int divisor, size_t begin, size_t end,
                                        const Rest*... rest) {
  using Part = typename Format::Part;
  using Accumulator = typename Format::Accumulator;
  // ivdep: out may be one of the inputs, but no iteration depends on another one.
#pragma GCC ivdep
  for (size_t i = begin; i < end; ++i) {
    Accumulator x;
    if constexpr (from == As::element) {
      x = Format::widen(load<Part>(first, i));
    } else {
      x = load<Accumulator>(first, i);
    }
    ((x = combine<Operation>(x, Format::widen(load<Part>(rest, i)))), ...);
    if constexpr (to == As::element) {
      store<Part>(out, i, Format::template narrow<Operation<Accumulator>::computes>(finished<Operation>(x, divisor)));
    } else {
      store<Accumulator>(out, i, x);
    }
  }
}

// The same for `count` elements.
template <class Format, template <class> class Operation, As from, As to, class... Rest>
[[gnu::always_inline]] inline void pass(void* out, const void* first, int divisor, size_t count, const Rest*... rest) {
  // GCC does not vectorise loops that load or store accumulators of the type Two.
  if constexpr (std::same_as<Format, Half<Bfloat16>> && from == As::element && to == As::element) {
    loop<TwoBfloat16, Operation, from, to>(out, first, divisor, 0, count / 2, rest...);
    if (count % 2) loop<Format, Operation, from, to>(out, first, divisor, count - 1, count, rest...);
  } else {
    loop<Format, Operation, from, to>(out, first, divisor, 0, count * Format::parts, rest...);
  }
}

template <class Format, template <class> class Operation>
[[gnu::always_inline]] inline void reduce(const void* const* in, int n, int divisor, void* out, size_t count) {
  using enum As;
  constexpr size_t element_bytes = sizeof(typename Format::Part) * Format::parts;
  if (n == 1) return pass<Format, Operation, element, element>(out, in[0], divisor, count);
  if (n == 2) return pass<Format, Operation, element, element>(out, in[0], divisor, count, in[1]);
  if (n == 3) return pass<Format, Operation, element, element>(out, in[0], divisor, count, in[1], in[2]);
  if (n == 4) return pass<Format, Operation, element, element>(out, in[0], divisor, count, in[1], in[2], in[3]);
  alignas(64) typename Format::Accumulator block[block_elements * Format::parts];
  for (size_t begin = 0; begin < count; begin += block_elements) {
    const size_t length = std::min(block_elements, count - begin);
    const auto at = [&](int k) { return static_cast<const unsigned char*>(in[k]) + begin * element_bytes; };
    // Start with three or four inputs, so that the number of remaining inputs is even. Each later pass takes two more inputs. The
    // last pass writes to out.
    int k = n % 2 ? 3 : 4;
    if (n % 2) {
      pass<Format, Operation, element, accumulator>(block, at(0), divisor, length, at(1), at(2));
    } else {
      pass<Format, Operation, element, accumulator>(block, at(0), divisor, length, at(1), at(2), at(3));
    }
    for (; k + 2 < n; k += 2) {
      pass<Format, Operation, accumulator, accumulator>(block, block, divisor, length, at(k), at(k + 1));
    }
    void* const to = static_cast<unsigned char*>(out) + begin * element_bytes;
    pass<Format, Operation, accumulator, element>(to, block, divisor, length, at(k), at(k + 1));
  }
}

template <class Format>
[[gnu::always_inline]] inline void widen(const void* in, void* accumulator, size_t count) {
  pass<Format, Select, As::element, As::accumulator>(accumulator, in, 1, count);
}

template <class Format, template <class> class Operation>
[[gnu::always_inline]] inline void fold(void* accumulator, const void* in, size_t count) {
  pass<Format, Operation, As::accumulator, As::accumulator>(accumulator, accumulator, 1, count, in);
}

template <class Format, template <class> class Operation>
[[gnu::always_inline]] inline void finish(const void* accumulator, int divisor, void* out, size_t count) {
  pass<Format, Operation, As::accumulator, As::element>(out, accumulator, divisor, count);
}

template <class Format, template <class> class Operation>
void identity(void* out, size_t count) {
  using Accumulator = typename Format::Accumulator;
  const auto none = Format::template narrow<false>(Operation<Accumulator>::identity);
  for (size_t i = 0; i < count * Format::parts; i++) store(out, i, none);
}

template <class Level, class Format, template <class> class Operation>
constexpr Reduction cell() {
  return {
      .element_bytes = sizeof(typename Format::Part) * Format::parts,
      .accumulator_bytes = sizeof(typename Format::Accumulator) * Format::parts,
      .reduce = Level::template run<reduce<Format, Operation>>,
      .widen = Level::template run<widen<Format>>,
      .fold = Level::template run<fold<Format, Operation>>,
      .merge = Level::template run<fold<typename Format::Wide, Operation>>,
      .finish = Level::template run<finish<Format, Operation>>,
      .identity = identity<Format, Operation>,
  };
}

// The cells are in the order of the enum Op: sum, prod, min, max, avg, band, bor, bxor.
template <class Level>
constexpr Row bool_row() {
  constexpr Reduction all = cell<Level, Bool, And>(), any = cell<Level, Bool, Or>();
  return {any, all, all, any, {}, all, any, cell<Level, Bool, Xor>()};
}

// Some operations give the same bits for signed and for unsigned integers, so the two types share one loop. The loop uses the
// unsigned type, because this type wraps on overflow.
template <class Level, class T>
constexpr Row integer_row() {
  using U = Plain<std::make_unsigned_t<T>>;
  return {cell<Level, U, Sum>(), cell<Level, U, Prod>(), cell<Level, Plain<T>, Min>(), cell<Level, Plain<T>, Max>(), {},
          cell<Level, U, And>(), cell<Level, U, Or>(),   cell<Level, U, Xor>()};
}

template <class Level, class Format>
constexpr Row float_row() {
  return {cell<Level, Format, Sum>(), cell<Level, Format, Prod>(), cell<Level, Format, Min>(), cell<Level, Format, Max>(),
          cell<Level, Format, Avg>()};
}

// Real and imaginary parts are reduced separately, except in a product.
template <class Level, class T>
constexpr Row complex_row() {
  using Pair = Plain<T, 2>;
  return {cell<Level, Pair, Sum>(), cell<Level, Plain<Complex<T>>, Prod>(), {}, {}, cell<Level, Pair, Avg>()};
}

template <class Level>
constexpr Reductions reductions = {
    bool_row<Level>(),
    integer_row<Level, int8_t>(),
    integer_row<Level, int16_t>(),
    integer_row<Level, int32_t>(),
    integer_row<Level, int64_t>(),
    integer_row<Level, uint8_t>(),
    integer_row<Level, uint16_t>(),
    integer_row<Level, uint32_t>(),
    integer_row<Level, uint64_t>(),
    float_row<Level, Half<Float16>>(),
    float_row<Level, Half<Bfloat16>>(),
    float_row<Level, Plain<float>>(),
    float_row<Level, Plain<double>>(),
    complex_row<Level, float>(),
    complex_row<Level, double>(),
    // The float8 types have no operations, so their rows are empty.
};

}  // namespace
}  // namespace mscomm
