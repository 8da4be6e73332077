// Compares every reduction, at every level of vector instructions, with naive arithmetic that shares no code with the reductions.
// Integers are computed in __int128, float32 in double, and float16 and bfloat16 by their definition (sign, exponent, fraction).
#include "base/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace mscomm;

namespace {

std::mt19937_64 random_bits(20240607);

int random_below(int end) { return static_cast<int>(random_bits() % static_cast<uint64_t>(end)); }

// Each kind of dtype has a class. The class says how many parts an element has and in which type the parts are accumulated. It
// also implements each operation on two accumulators.

template <class T>
struct Integer {
  static constexpr int parts = 1;
  using Part = T;
  using Wide = T;
  static T widen(T x) { return x; }
  static T narrow(T x) { return x; }
  static bool is_nan(T) { return false; }
  static bool is_quiet(T) { return true; }
  static T average(T x, int) { return x; }
  static T combine(Op op, T a, T b) {
    const __int128 x = a, y = b;
    switch (op) {
      case Op::sum:
        return static_cast<T>(x + y);
      case Op::prod:
        return static_cast<T>(static_cast<unsigned __int128>(x) * static_cast<unsigned __int128>(y));
      case Op::min:
        return static_cast<T>(y < x ? y : x);
      case Op::max:
        return static_cast<T>(y > x ? y : x);
      case Op::band:
        return static_cast<T>(x & y);
      case Op::bor:
        return static_cast<T>(x | y);
      case Op::bxor:
        return static_cast<T>(x ^ y);
      default:
        return 0;
    }
  }
  static T random() { return random_below(8) ? static_cast<T>(random_bits()) : std::numeric_limits<T>::min(); }
};

struct Truth : Integer<uint8_t> {
  static uint8_t widen(uint8_t x) { return x ? 1 : 0; }
  static uint8_t combine(Op op, uint8_t a, uint8_t b) {
    switch (op) {
      case Op::sum:
      case Op::max:
      case Op::bor:
        return a || b;
      case Op::prod:
      case Op::min:
      case Op::band:
        return a && b;
      default:
        return a != b;
    }
  }
  static uint8_t random() { return random_below(2) ? static_cast<uint8_t>(random_bits()) : 0; }
};

template <class T>
struct Real {
  static constexpr int parts = 1;
  using Part = T;
  using Wide = T;
  static T widen(T x) { return x; }
  static T narrow(T x) { return x; }
  static bool is_nan(T x) { return std::isnan(x); }
  static bool is_quiet(T x) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    return std::bit_cast<Bits>(x) >> (std::numeric_limits<T>::digits - 2) & 1;
  }
  // Rounding to double and then to float gives the same float as rounding once, because a double's 53 bits are >= 2 * 24 + 2.
  static T average(T x, int divisor) { return static_cast<T>(static_cast<double>(x) / divisor); }
  static T combine(Op op, T a, T b) {
    const double x = a, y = b;
    switch (op) {
      case Op::sum:
      case Op::avg:
        return static_cast<T>(x + y);
      case Op::prod:
        return static_cast<T>(x * y);
      case Op::min:
        return (a < b || a != a) ? a : b;
      case Op::max:
        return (a > b || a != a) ? a : b;
      default:
        return 0;
    }
  }
  static T random() {
    using Limits = std::numeric_limits<T>;
    const T sign = random_below(2) ? T{1} : T{-1};
    switch (random_below(48)) {
      case 0:
        return std::copysign(T{0}, sign);
      case 1:
        return sign * Limits::infinity();
      case 2:
        return std::copysign(Limits::quiet_NaN(), sign);
      case 3:
        return Limits::signaling_NaN();
      case 4:
        return sign * Limits::max();
      case 5:
        return sign * Limits::min();
      case 6:
        return sign * Limits::denorm_min() * static_cast<T>(1 + random_below(1 << 20));
      default:
        break;
    }
    const T fraction = 1 + static_cast<T>(random_bits() >> 11) * static_cast<T>(0x1p-53);
    return sign * std::ldexp(fraction, random_below(41) - 20);
  }
};

template <class T>
struct ComplexPair : Real<T> {
  static constexpr int parts = 2;
};

template <int fraction_bits, int exponent_bits>
struct Small {
  static constexpr int parts = 1;
  static constexpr int max_exponent = (1 << (exponent_bits - 1)) - 1;
  static constexpr int min_exponent = 1 - max_exponent;
  static constexpr int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
  using Part = uint16_t;
  using Wide = float;

  static float widen(uint16_t x) {
    const int fraction = x & ((1 << fraction_bits) - 1), exponent = (x & infinity) >> fraction_bits;
    double value;
    if (exponent == (1 << exponent_bits) - 1) {
      value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
      value = std::ldexp(fraction, min_exponent - fraction_bits);
    } else {
      value = std::ldexp((1 << fraction_bits) + fraction, exponent - max_exponent - fraction_bits);
    }
    return static_cast<float>(std::copysign(value, x & 0x8000 ? -1.0 : 1.0));
  }

  static uint16_t narrow(float x) {
    const int sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity | 1 << (fraction_bits - 1));
    if (std::isinf(x)) return static_cast<uint16_t>(sign | infinity);
    const int exponent = x == 0 ? min_exponent : std::max(std::ilogb(x), min_exponent);
    const double units = std::nearbyint(std::ldexp(std::fabs(x), fraction_bits - exponent));  // ties to even
    const int bits = ((exponent - min_exponent) << fraction_bits) + static_cast<int>(units);
    return static_cast<uint16_t>(sign | std::min(bits, infinity));
  }

  static bool is_nan(uint16_t x) { return (x & 0x7fff) > infinity; }
  static bool is_quiet(uint16_t x) { return x & (1 << (fraction_bits - 1)); }
  static float average(float x, int divisor) { return Real<float>::average(x, divisor); }
  static float combine(Op op, float a, float b) { return Real<float>::combine(op, a, b); }
  static uint16_t random() {
    if (random_below(4) == 0) return static_cast<uint16_t>(random_bits());  // any bits; in float16, 1 of 32 is inf or NaN
    uint16_t x = narrow(Real<float>::random());
    if (is_nan(x) && random_below(2)) x = static_cast<uint16_t>((x & ~(1 << (fraction_bits - 1))) | 1);  // a signaling NaN
    return x;
  }
};

using Float16 = Small<10, 5>;
using Bfloat16 = Small<7, 8>;

template <class F>
void with_meaning(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::boolean:
      return f.template operator()<Truth>();
    case Dtype::int8:
      return f.template operator()<Integer<int8_t>>();
    case Dtype::int16:
      return f.template operator()<Integer<int16_t>>();
    case Dtype::int32:
      return f.template operator()<Integer<int32_t>>();
    case Dtype::int64:
      return f.template operator()<Integer<int64_t>>();
    case Dtype::uint8:
      return f.template operator()<Integer<uint8_t>>();
    case Dtype::uint16:
      return f.template operator()<Integer<uint16_t>>();
    case Dtype::uint32:
      return f.template operator()<Integer<uint32_t>>();
    case Dtype::uint64:
      return f.template operator()<Integer<uint64_t>>();
    case Dtype::float16:
      return f.template operator()<Float16>();
    case Dtype::bfloat16:
      return f.template operator()<Bfloat16>();
    case Dtype::float32:
      return f.template operator()<Real<float>>();
    case Dtype::float64:
      return f.template operator()<Real<double>>();
    case Dtype::complex64:
      return f.template operator()<ComplexPair<float>>();
    case Dtype::complex128:
      return f.template operator()<ComplexPair<double>>();
    case Dtype::float8_e4m3fn:  // float8 and objects are never reduced
    case Dtype::float8_e4m3fnuz:
    case Dtype::float8_e5m2:
    case Dtype::float8_e5m2fnuz:
    case Dtype::float8_e8m0fnu:
    case Dtype::object:
      return;
  }
}

template <class F>
void for_each_row(F&& f) {
  for (size_t d = 0; d < dtypes.size(); ++d) {
    for (size_t o = 0; o < ops.size(); ++o) {
      if (supports(static_cast<Dtype>(d), static_cast<Op>(o))) f(static_cast<Dtype>(d), static_cast<Op>(o));
    }
  }
}

// Holds a buffer that begins `offset` bytes after an aligned address. The buffer ends where the allocation ends, so
// AddressSanitizer reports any access beyond the buffer.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset) : offset_(offset), bytes_(offset + bytes, 0xa5) {}
  unsigned char* data() { return bytes_.data() + offset_; }
  const unsigned char* data() const { return bytes_.data() + offset_; }
  size_t size() const { return bytes_.size() - offset_; }
  bool operator==(const Buffer& other) const {
    return size() == other.size() && (size() == 0 || std::memcmp(data(), other.data(), size()) == 0);
  }

 private:
  size_t offset_;
  std::vector<unsigned char> bytes_;
};

template <class M>
using Parts = std::vector<typename M::Part>;

template <class M>
Parts<M> parts_of(const Buffer& buffer) {
  Parts<M> parts(buffer.size() / sizeof(typename M::Part));
  if (!parts.empty()) std::memcpy(parts.data(), buffer.data(), buffer.size());
  return parts;
}

template <class M>
Parts<M> reference(Op op, const std::vector<Parts<M>>& in, int divisor) {
  using Wide = typename M::Wide;
  std::vector<Wide> total;
  for (const auto x : in[0]) total.push_back(M::widen(x));
  for (size_t k = 1; k < in.size(); ++k) {
    for (size_t i = 0; i < total.size(); i += M::parts) {
      if constexpr (M::parts == 2) {
        if (op == Op::prod) {
          const auto times = [](Wide a, Wide b) { return M::combine(Op::prod, a, b); };
          const Wide a = total[i], b = total[i + 1], c = in[k][i], d = in[k][i + 1];
          total[i] = M::combine(Op::sum, times(a, c), -times(b, d));
          total[i + 1] = M::combine(Op::sum, times(a, d), times(b, c));
          continue;
        }
      }
      for (size_t j = i; j < i + M::parts; ++j) total[j] = M::combine(op, total[j], M::widen(in[k][j]));
    }
  }
  Parts<M> out;
  for (const Wide x : total) out.push_back(M::narrow(op == Op::avg ? M::average(x, divisor) : x));
  return out;
}

// Returns whether all bits are the same, except that all NaNs count as equal.
template <class M>
bool same(const Parts<M>& actual, const Parts<M>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (M::is_nan(expected[i]) ? M::is_nan(actual[i]) : std::memcmp(&actual[i], &expected[i], sizeof(expected[i])) == 0) {
      continue;
    }
    std::fprintf(stderr, "part %zu: %.17g, expected %.17g\n", i, static_cast<double>(M::widen(actual[i])),
                 static_cast<double>(M::widen(expected[i])));
    return false;
  }
  return true;
}

template <class M>
bool nans_are_quiet(const Parts<M>& x) {
  return std::all_of(x.begin(), x.end(), [](auto part) { return !M::is_nan(part) || M::is_quiet(part); });
}

// What test_reduction() needs to know about a dtype. test_reduction() itself is no template, because it would then take 20
// seconds to compile.
struct Meaning {
  size_t part_bytes, wide_bytes, parts;
  void (*fill)(Buffer&);  // with random elements
  // Returns whether `out` is the reduction of `in`.
  bool (*right)(Op op, const std::vector<Buffer>& in, int divisor, const Buffer& out);
  bool (*nans_are_quiet)(const Buffer&);
};

template <class M>
constexpr Meaning meaning = {
    .part_bytes = sizeof(typename M::Part),
    .wide_bytes = sizeof(typename M::Wide),
    .parts = M::parts,
    .fill =
        [](Buffer& buffer) {
          for (size_t at = 0; at < buffer.size(); at += sizeof(typename M::Part)) {
            const typename M::Part part = M::random();
            std::memcpy(buffer.data() + at, &part, sizeof part);
          }
        },
    .right =
        [](Op op, const std::vector<Buffer>& in, int divisor, const Buffer& out) {
          std::vector<Parts<M>> all;
          for (const Buffer& one : in) all.push_back(parts_of<M>(one));
          return same<M>(parts_of<M>(out), reference<M>(op, all, divisor));
        },
    .nans_are_quiet = [](const Buffer& buffer) { return nans_are_quiet<M>(parts_of<M>(buffer)); },
};

void test_reduction(const Meaning& meaning, Dtype dtype, Op op, int n, size_t count, size_t offset) {
  std::vector<Buffer> buffers;
  for (int k = 0; k < n; ++k) meaning.fill(buffers.emplace_back(count * meaning.parts * meaning.part_bytes, offset));
  std::vector<const void*> pointers;
  for (const Buffer& buffer : buffers) pointers.push_back(buffer.data());
  const std::vector<Buffer> untouched = buffers;
  const int divisor = n + random_below(2);
  const bool keeps_nan = meaning.wide_bytes == meaning.part_bytes && (op == Op::min || op == Op::max);

  bool ok = true;
  Buffer baseline(0, 0);
  for (int level = 0; level < levels(); ++level) {
    const Reduction& row = reduction_at(dtype, op, level);
    ok &= CHECK(row.element_bytes == size_of(dtype));
    ok &= CHECK(row.accumulator_bytes == meaning.wide_bytes * meaning.parts);
    Buffer out(count * row.element_bytes, offset);
    row.reduce(pointers.data(), n, divisor, out.data(), count);
    // The other levels must give the same bits as the baseline, so only the baseline is compared with the reference.
    if (level == 0) ok &= CHECK(meaning.right(op, buffers, divisor, out));
    ok &= CHECK(keeps_nan || meaning.nans_are_quiet(out));
    ok &= CHECK(buffers == untouched);
    if (level == 0) baseline = out;
    ok &= CHECK(out == baseline);

    for (size_t k = 0; k < buffers.size(); ++k) {
      Buffer in_place = buffers[k];
      auto with_out = pointers;
      with_out[k] = in_place.data();
      row.reduce(with_out.data(), n, divisor, in_place.data(), count);
      ok &= CHECK(in_place == out);
    }

    Buffer folded(count * row.accumulator_bytes, offset), merged = folded, other = folded;
    row.widen(pointers[0], folded.data(), count);
    row.widen(pointers[0], merged.data(), count);
    for (size_t k = 1; k < pointers.size(); ++k) {
      row.fold(folded.data(), pointers[k], count);
      row.widen(pointers[k], other.data(), count);
      row.merge(merged.data(), other.data(), count);
    }
    Buffer finished(count * row.element_bytes, offset);
    row.finish(folded.data(), divisor, finished.data(), count);
    ok &= CHECK(finished == out);
    row.finish(merged.data(), divisor, finished.data(), count);
    ok &= CHECK(finished == out);

    // Combining a value with the identity does not change the value, except for -0 in a sum, and for -0 and infinity in a product
    // of complex numbers. So sums, averages and products are not compared here.
    Buffer identity(count * row.element_bytes, offset);
    row.identity(identity.data(), count);
    const void* const with_identity[] = {identity.data(), out.data()};
    row.reduce(with_identity, 2, 1, finished.data(), count);
    if (op != Op::sum && op != Op::prod && op != Op::avg) ok &= CHECK(finished == out);

    if (!ok) {
      std::fprintf(stderr, "  in %s of %s: n = %d, count = %zu, offset = %zu, level = %d\n", std::string(name(op)).c_str(),
                   std::string(name(dtype)).c_str(), n, count, offset, level);
      return;
    }
  }
}

void test_every_reduction() {
  for_each_row([](Dtype dtype, Op op) {
    with_meaning(dtype, [&]<class M>() {
      for (const int n : {1, 2, 3, 4, 5, 8}) {
        for (const size_t count : {0, 1, 7, 1023, 1025}) {
          for (const size_t offset : {0, 1}) test_reduction(meaning<M>, dtype, op, n, count, offset);
        }
      }
    });
  });
}

void test_nan_of_arithmetic_is_always_the_same() {
  const float a = std::bit_cast<float>(0x7fc00001u), b = std::bit_cast<float>(0xffc00002u);
  const void* in[] = {&a, &b};
  for (int level = 0; level < levels(); ++level) {
    for (const Op op : {Op::sum, Op::prod, Op::avg}) {
      float out = 0;
      reduction_at(Dtype::float32, op, level).reduce(in, 2, 2, &out, 1);
      CHECK(std::bit_cast<uint32_t>(out) == 0x7fc00000u);
    }
  }
}

// Rounds all numbers to the format M in one call.
template <class M>
Parts<M> round_all(const Reduction& row, const std::vector<float>& x) {
  Parts<M> out(x.size());
  row.finish(x.data(), 1, out.data(), x.size());
  return out;
}

template <class M>
void test_conversion(Dtype dtype) {
  Parts<M> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);

  std::vector<float> ties;
  for (const uint16_t x : all) {
    if ((x & 0x7fff) >= M::infinity) continue;
    const double low = M::widen(x);
    const bool last = (x & 0x7fff) + 1 == M::infinity;
    const double high = last ? std::copysign(std::ldexp(1, M::max_exponent + 1), low) : M::widen(static_cast<uint16_t>(x + 1));
    const float middle = static_cast<float>((low + high) / 2);
    for (const float to : {-INFINITY, middle, INFINITY}) ties.push_back(std::nextafterf(middle, to));
  }
  std::vector<float> any(1 << 18);
  for (float& x : any) x = std::bit_cast<float>(static_cast<uint32_t>(random_bits()));

  for (int level = 0; level < levels(); ++level) {
    const Reduction& row = reduction_at(dtype, Op::max, level);
    std::vector<float> wide(all.size());
    row.widen(all.data(), wide.data(), all.size());
    const Parts<M> back = round_all<M>(row, wide);
    bool widened = true, returned = true;
    for (size_t i = 0; i < all.size(); ++i) {
      const bool nan = M::is_nan(all[i]);
      const auto expected = std::bit_cast<uint32_t>(M::widen(all[i])), sign = 0x80000000u;
      widened &= nan ? std::isnan(wide[i]) && ((std::bit_cast<uint32_t>(wide[i]) ^ expected) & sign) == 0
                     : std::bit_cast<uint32_t>(wide[i]) == expected;
      returned &= nan ? M::is_nan(back[i]) && M::is_quiet(back[i]) && ((back[i] ^ all[i]) & 0x8000) == 0 : back[i] == all[i];
    }
    CHECK(widened);
    CHECK(returned);

    for (const auto& numbers : {ties, any}) {
      Parts<M> expected;
      for (const float x : numbers) expected.push_back(M::narrow(x));
      const Parts<M> rounded = round_all<M>(row, numbers);
      CHECK(same<M>(rounded, expected));
      CHECK(nans_are_quiet<M>(rounded));
    }
  }
}

void test_supports() {
  for (size_t d = 0; d < dtypes.size(); ++d) {
    const auto dtype = static_cast<Dtype>(d);
    const bool real = dtype >= Dtype::float16 && dtype <= Dtype::float64, complex = dtype >= Dtype::complex64;
    const bool bits = !real && !complex, reduced = dtype <= Dtype::complex128;  // float8 is only moved
    // in the order of Op: sum, prod, min, max, avg, band, bor, bxor
    const auto expected = std::to_array({true, true, !complex, !complex, !bits, bits, bits, bits});
    static_assert(expected.size() == ops.size());
    for (size_t o = 0; o < ops.size(); ++o) CHECK(supports(dtype, static_cast<Op>(o)) == (reduced && expected[o]));
  }
  CHECK(!supports(static_cast<Dtype>(dtypes.size()), Op::sum));
  CHECK(!supports(Dtype::float32, static_cast<Op>(ops.size())));
}

template <class F>
bool throws_logic_error(F&& f) {
  try {
    f();
  } catch (const std::logic_error&) {
    return true;
  }
  return false;
}

void test_what_is_not_there_throws() {
  CHECK(throws_logic_error([] { reduction(Dtype::int32, Op::avg); }));
  CHECK(throws_logic_error([] { reduction(Dtype::complex64, Op::min); }));
  CHECK(throws_logic_error([] { reduction(Dtype::float32, static_cast<Op>(ops.size())); }));
  CHECK(throws_logic_error([] { reduction_at(Dtype::float32, Op::sum, levels()); }));
  CHECK(throws_logic_error([] { reduction_at(Dtype::float32, Op::sum, -1); }));
  CHECK(&reduction(Dtype::float32, Op::sum) == &reduction_at(Dtype::float32, Op::sum, levels() - 1));
}

// Computes 1e-39 + 1e-39, which is subnormal in float32, in the current floating-point mode of this thread.
float twice_a_subnormal() {
  const float x = 1e-39f;
  const void* in[] = {&x, &x};
  float out = 1;
  reduction(Dtype::float32, Op::sum).reduce(in, 2, 1, &out, 1);
  return out;
}

#if defined(__x86_64__)
unsigned long current_mode() { return _mm_getcsr(); }
void set_mode(unsigned long mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
constexpr unsigned long flush_to_zero = 0x8040 | 0x6000;  // FTZ, DAZ, and rounding toward zero
#elif defined(__aarch64__)
unsigned long current_mode() {
  unsigned long mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  return mode;
}
void set_mode(unsigned long mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
constexpr unsigned long flush_to_zero = 1ul << 24 | 3ul << 22;  // FZ, and rounding toward zero
#else
unsigned long current_mode() { return 0; }
void set_mode(unsigned long) {}
constexpr unsigned long flush_to_zero = 0;
#endif

void test_default_float_mode() {
  const unsigned long before = current_mode();
  set_mode(before | flush_to_zero);
  const float outside = twice_a_subnormal();
  const unsigned long flushing = current_mode();
  float inside;
  {
    DefaultFloatMode mode;
    inside = twice_a_subnormal();
  }
  const unsigned long restored = current_mode();
  set_mode(before);
  CHECK(std::bit_cast<uint32_t>(inside) == 2 * std::bit_cast<uint32_t>(1e-39f));
  CHECK(flush_to_zero == 0 || outside == 0);
  CHECK(restored == flushing);
}

}  // namespace

SUITE(reduce) {
  test_supports();
  test_what_is_not_there_throws();
  test_conversion<Float16>(Dtype::float16);
  test_conversion<Bfloat16>(Dtype::bfloat16);
  test_every_reduction();
  test_nan_of_arithmetic_is_always_the_same();
  test_default_float_mode();
}
