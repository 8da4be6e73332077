// Tests the kernels of csrc/cuda, compiled for the CPU, against naive arithmetic in double. Also tests how a packing is divided
// into blocks, and that the kernels round numbers in the same way as base/reduce.cc.
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/compress.h"
#include "base/reduce.h"
#include "check.h"
#include "cuda_on_cpu.h"
//
#include "cuda/pack.cu"
#include "device/kernels.h"

using namespace mscomm;

namespace {

constexpr int multiprocessors = 4;
constexpr float infinity = std::numeric_limits<float>::infinity();

std::mt19937_64 random_bits(20261122);

uint64_t random_below(uint64_t end) { return random_bits() % end; }

// Runs a packing as a device would. Returns false if no kernel supports it.
bool run(const Packing& packing) {
  const auto launches = plan(packing, multiprocessors);
  if (!launches) return false;
  for (const Launch& one : *launches) {
    auto* const kernel = reinterpret_cast<void (*)(const cuda::Batch)>(dlsym(RTLD_DEFAULT, kernels[one.kernel].name));
    if (!CHECK(kernel)) return false;
    test::launch<cuda::Batch>(kernel, one.blocks, cuda::threads, one.batch);
  }
  return true;
}

// -- the expected numbers, computed from the definition of each format

struct Format {
  int fraction, least_exponent;
  double largest;
};
constexpr Format of_float16{10, -14, 65504}, of_bfloat16{7, -126, 0x1.fep127};
const Format& format_of(Dtype dtype) { return dtype == Dtype::float16 ? of_float16 : of_bfloat16; }

double value_of(Dtype dtype, const void* at) {
  if (dtype == Dtype::float64) {
    double x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  if (dtype == Dtype::float32) {
    float x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  const Format& format = format_of(dtype);
  const int fraction = bits & ((1 << format.fraction) - 1), exponent = (bits & 0x7fff) >> format.fraction;
  const int top = 0x7fff >> format.fraction;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == top) return fraction ? std::nan("") : sign * infinity;
  const int whole = exponent ? fraction + (1 << format.fraction) : fraction;
  return sign * std::ldexp(whole, std::max(exponent, 1) - 1 + format.least_exponent - format.fraction);
}

// Stores x as a number of this dtype, rounded to the nearest value, ties to even.
void store(Dtype dtype, double x, void* at) {
  if (dtype == Dtype::float64) {
    const auto bits = std::isnan(x) ? 0x7ff8000000000000u : std::bit_cast<uint64_t>(x);
    std::memcpy(at, &bits, sizeof bits);
  } else if (dtype == Dtype::float32) {
    const auto bits = std::isnan(x) ? 0x7fc00000u : std::bit_cast<uint32_t>(static_cast<float>(x));
    std::memcpy(at, &bits, sizeof bits);
  } else {
    const Format& format = format_of(dtype);
    const uint32_t infinite = static_cast<uint32_t>(0x7fff >> format.fraction) << format.fraction;
    uint32_t bits = infinite;
    if (std::isnan(x)) {
      bits |= 1u << (format.fraction - 1);
    } else if (std::isfinite(x) && x != 0) {
      const int exponent = std::max(std::ilogb(x), format.least_exponent);
      const double steps = std::nearbyint(std::ldexp(std::fabs(x), format.fraction - exponent));
      bits = static_cast<uint32_t>(steps) + (static_cast<uint32_t>(exponent - format.least_exponent) << format.fraction);
      if (std::ldexp(steps, exponent - format.fraction) > format.largest) bits = infinite;
    } else if (x == 0) {
      bits = 0;
    }
    const auto made = static_cast<uint16_t>(bits | (std::signbit(x) && !std::isnan(x) ? 0x8000 : 0));
    std::memcpy(at, &made, sizeof made);
  }
}

// -- arrays at any offset, with random numbers

// Holds memory that begins `offset` bytes after a multiple of 16. The margins before and after it must not change.
class Array {
 public:
  Array(size_t bytes, size_t offset) : memory_(bytes + 3 * margin, 0xa5), bytes_(bytes) {
    const size_t over = reinterpret_cast<uintptr_t>(memory_.data()) % 16;
    at_ = margin + (16 + offset - over) % 16;
  }
  Array(const Array&) = delete;
  Array(Array&&) = default;
  unsigned char* data() { return memory_.data() + at_; }
  size_t bytes() const { return bytes_; }
  bool intact() const {
    return std::all_of(memory_.begin(), memory_.begin() + static_cast<ptrdiff_t>(at_), [](auto x) { return x == 0xa5; }) &&
           std::all_of(memory_.begin() + static_cast<ptrdiff_t>(at_ + bytes_), memory_.end(), [](auto x) { return x == 0xa5; });
  }

 private:
  static constexpr size_t margin = 32;
  std::vector<unsigned char> memory_;
  size_t bytes_, at_;
};

// Returns a random number. It can be ordinary, close to a limit of the narrow types, subnormal, zero, infinite or NaN.
double any_number(Dtype dtype) {
  static const float special[] = {0.0f,        -0.0f,       1.0f,          -1.0f,          infinity,   -infinity,
                                  NAN,         65504.0f,    65519.9f,      65520.0f,       -65536.0f,  0x1p-24f,
                                  0x1p-25f,    0x1.8p-25f,  0x1p-14f,      -0x1p-126f,     0x1p-149f,  0x1.fffffep127f,
                                  0x1.fep127f, 0x1.ffp127f, 1.0009765625f, 1.00048828125f, 1.00390625f};
  const uint64_t kind = random_below(8);
  if (kind == 0) return special[random_below(std::size(special))];
  if (kind == 1) return std::bit_cast<float>(static_cast<uint32_t>(random_bits()));
  const double x = std::ldexp(static_cast<double>(random_below(1 << 25)) - (1 << 24), static_cast<int>(random_below(20)) - 34);
  return dtype == Dtype::float64 ? x * 1.0000000000000002 : x;
}

void fill(Array& array, Dtype dtype) {
  const size_t element = size_of(dtype);
  for (size_t i = 0; i + element <= array.bytes(); i += element) {
    if (dtype >= Dtype::float16 && dtype <= Dtype::float64) store(dtype, any_number(dtype), array.data() + i);
    else
      for (size_t k = 0; k < element; k++) array.data()[i + k] = static_cast<unsigned char>(random_bits());
  }
}

std::vector<unsigned char> bytes_of(Array& array) { return {array.data(), array.data() + array.bytes()}; }

// -- tests of every variant of a packing, with arrays at random offsets

struct Variant {
  bool packs;
  Dtype dtype, bucket;
  double scale;
  bool owes = false;
  double largest = std::numeric_limits<double>::infinity();
};

// Computes what `to` and `owed` must hold after a kernel has moved the element at `from` to `to`.
void move_one(const Variant& variant, const void* from, void* to, float* owed) {
  const Dtype in = variant.packs ? variant.dtype : variant.bucket, out = variant.packs ? variant.bucket : variant.dtype;
  if (in == out && variant.scale == 1) {
    std::memcpy(to, from, size_of(in));
    return;
  }
  if (in == Dtype::float64) return store(out, value_of(in, from) * variant.scale, to);
  // Rounded to float, the product or sum of two floats is the same whether it is computed in float or in double.
  const float scaled = static_cast<float>(value_of(in, from) * static_cast<double>(static_cast<float>(variant.scale)));
  if (!variant.owes) return store(out, scaled, to);
  const float whole = static_cast<float>(static_cast<double>(scaled) + static_cast<double>(*owed));
  double largest = std::min(variant.largest, format_of(out).largest);
  if (unsigned char rounded[2]; store(out, largest, rounded), value_of(out, rounded) > largest) {
    uint16_t bits;
    std::memcpy(&bits, rounded, 2);
    bits--;
    largest = value_of(out, &bits);
  } else largest = value_of(out, rounded);
  store(out, std::isfinite(whole) ? std::clamp<double>(whole, -largest, largest) : whole, to);
  *owed = std::isfinite(whole) ? static_cast<float>(static_cast<double>(whole) - value_of(out, to)) : 0.0f;
}

struct Shape {
  std::vector<size_t> counts;
  size_t line = 1;
  std::function<size_t()> offset;  // returns the offset for the next array, in bytes
};

void test_variant(const Variant& variant, const Shape& shape) {
  const size_t part_bytes = size_of(variant.dtype), bucket_bytes = size_of(variant.bucket);
  size_t end = 0;
  Packing packing{variant.packs, variant.dtype, variant.bucket, nullptr, {}, variant.scale, nullptr, variant.largest};
  std::vector<Array> parts;
  const auto offset = [&](size_t element) { return shape.offset() / element * element; };
  for (const size_t count : shape.counts) {
    parts.emplace_back(count * part_bytes,
                       variant.scale == 1 && variant.dtype == variant.bucket ? shape.offset() : offset(part_bytes));
    fill(parts.back(), variant.dtype);
    end = (end + shape.line - 1) / shape.line * shape.line;
    packing.parts.push_back({parts.back().data(), end, count});
    end += count;
  }
  Array bucket(end * bucket_bytes, offset(bucket_bytes)), residual(variant.owes ? end * 4 : 0, offset(4));
  fill(bucket, variant.bucket);
  fill(residual, Dtype::float32);
  packing.bucket = bucket.data();
  if (variant.owes) packing.residual = residual.data();

  std::vector<unsigned char> expected_bucket = bytes_of(bucket), expected_residual = bytes_of(residual);
  std::vector<std::vector<unsigned char>> expected_parts;
  for (size_t i = 0; i < parts.size(); i++) {
    expected_parts.push_back(bytes_of(parts[i]));
    for (size_t k = 0; k < packing.parts[i].count; k++) {
      unsigned char* const part = expected_parts[i].data() + k * part_bytes;
      unsigned char* const place = expected_bucket.data() + (packing.parts[i].begin + k) * bucket_bytes;
      float owed = 0;
      unsigned char* const kept = expected_residual.data() + (packing.parts[i].begin + k) * 4;
      if (variant.owes) std::memcpy(&owed, kept, 4);
      move_one(variant, variant.packs ? part : place, variant.packs ? place : part, &owed);
      if (variant.owes) std::memcpy(kept, &owed, 4);
    }
  }

  bool ok = CHECK(run(packing));
  ok &= CHECK(bytes_of(bucket) == expected_bucket) & CHECK(bucket.intact());
  ok &= CHECK(bytes_of(residual) == expected_residual) & CHECK(residual.intact());
  for (size_t i = 0; i < parts.size(); i++) ok &= CHECK(bytes_of(parts[i]) == expected_parts[i]) & CHECK(parts[i].intact());
  if (!ok)
    std::fprintf(stderr, "  %s: %s parts, %s bucket, scale %g, %zu parts, line %zu\n", variant.packs ? "pack" : "unpack",
                 std::string(name(variant.dtype)).c_str(), std::string(name(variant.bucket)).c_str(), variant.scale,
                 shape.counts.size(), shape.line);
}

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const bool packs : {true, false}) {
    for (size_t i = 0; i < dtypes.size(); i++) all.push_back({packs, static_cast<Dtype>(i), static_cast<Dtype>(i), 1});
    for (const double scale : {0.25, 1.0 / 3, -1e-30}) {
      for (const Dtype dtype : {Dtype::float16, Dtype::bfloat16, Dtype::float32, Dtype::float64})
        all.push_back({packs, dtype, dtype, scale});
    }
    for (const double scale : {1.0, 1.0 / 3}) {
      for (const Dtype bucket : {Dtype::float16, Dtype::bfloat16}) all.push_back({packs, Dtype::float32, bucket, scale});
    }
  }
  for (const Dtype bucket : {Dtype::float16, Dtype::bfloat16}) {
    all.push_back({true, Dtype::float32, bucket, 1, true});
    all.push_back({true, Dtype::float32, bucket, 1.0 / 3, true, format_of(bucket).largest / 3});
  }
  return all;
}

void test_every_variant_at_every_alignment() {
  for (const Variant& variant : variants()) {
    for (size_t first = 0; first < 16; first++) {
      for (const size_t second : {size_t{0}, first}) {
        size_t turn = 0;
        test_variant(variant, {{0, 1, 7, 33, 64, 300}, 1, [&] { return turn++ % 2 ? first : second; }});
      }
    }
    test_variant(variant, {{1, 0, 5, 40, 16}, 16, [] { return size_t{0}; }});
    test_variant(variant, {{3, 5}, 1024, [] { return size_t{0}; }});  // a gap that is too large for one launch
    test_variant(variant, {{}, 1, [] { return size_t{0}; }});
  }
}

void test_few_large_and_many_small_parts() {
  for (const Variant& variant : variants()) {
    if (variant.dtype != variant.bucket && variant.scale == 1) continue;
    std::vector<size_t> counts;
    for (int i = 0; i < 1000; i++) counts.push_back(random_below(3));
    counts[500] = 20'001;
    test_variant(variant, {counts, random_below(2) ? size_t{1} : size_t{8}, [] { return random_below(16); }});
  }
}

// -- tests of error feedback

void test_error_feedback_adds_up() {
  for (const Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
    const double largest = format_of(dtype).largest / 4;
    constexpr size_t count = 300;
    constexpr int steps = 200;
    std::vector<float> gradient(count), residual(count);
    std::vector<uint16_t> bucket(count);
    std::vector<double> given(count), sent(count);
    for (int step = 0; step < steps; step++) {
      for (size_t i = 0; i < count; i++) {
        gradient[i] = static_cast<float>(static_cast<double>(random_below(2001)) - 1000) * 1e-4f;
        if (i == 0 && step == 0) gradient[i] = static_cast<float>(3 * largest);  // larger than what one step can send
        given[i] += gradient[i];
      }
      Packing packing{true, Dtype::float32, dtype, bucket.data(), {{gradient.data(), 0, count}}, 1, residual.data(), largest};
      CHECK(run(packing));
      for (size_t i = 0; i < count; i++) {
        const double x = value_of(dtype, &bucket[i]);
        CHECK(std::fabs(x) <= largest);
        sent[i] += x;
      }
    }
    for (size_t i = 1; i < count; i++) {
      // Each step adds two floats below 1. The sum is below 2, so the step's rounding error is at most 2^-24.
      CHECK(std::fabs(sent[i] + residual[i] - given[i]) <= steps * 0x1p-24);
      CHECK(std::fabs(residual[i]) <= 0x1p-8);
    }
    CHECK(std::fabs(sent[0] + residual[0] - given[0]) <= 1e-5 * given[0] && residual[0] < 1e-2 * given[0]);
  }
}

void test_no_sum_over_ranks_overflows() {
  for (const Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
    for (int ranks = 1; ranks <= 100; ranks++) {
      float gradient[] = {3.4e38f, -3.4e38f}, residual[] = {0, 0};
      uint16_t bucket[2];
      run({true, Dtype::float32, dtype, bucket, {{gradient, 0, 2}}, 1, residual, format_of(dtype).largest / ranks});
      const double x = value_of(dtype, bucket), most = format_of(dtype).largest;
      CHECK(ranks * x <= most && ranks * x > most * 0.98 && value_of(dtype, bucket + 1) == -x);
    }
  }
}

void test_what_is_not_finite_goes_as_it_is_and_leaves_nothing_owed() {
  float gradient[] = {infinity, -infinity, NAN, 3e38f, 1}, residual[] = {1, 2, 3, 3e38f, NAN};
  uint16_t bucket[5];
  run({true, Dtype::float32, Dtype::float16, bucket, {{gradient, 0, 5}}, 1, residual, 100});
  const uint16_t expected[] = {0x7c00, 0xfc00, 0x7e00, 0x7c00, 0x7e00};
  CHECK(std::equal(std::begin(bucket), std::end(bucket), expected));
  CHECK(std::all_of(std::begin(residual), std::end(residual), [](float x) { return x == 0; }));
}

template <class Narrow, class Wide>
void test_the_cpu_compresses_as_the_kernels_do(Dtype wide, Dtype narrow) {
  constexpr size_t count = 100'003;
  constexpr double largest = 1024;
  std::vector<Wide> x(count), residual(count), opened(count);
  for (size_t i = 0; i < count; i++) {
    x[i] = std::bit_cast<float>(static_cast<uint32_t>(random_bits()));  // any float: also infinite, NaN and subnormal
    residual[i] = static_cast<Wide>(random_below(1000)) * static_cast<Wide>(1e-6);
  }
  std::vector<Wide> owed = residual;
  std::vector<Narrow> bucket(count), expected(count);
  if (wide == Dtype::float32) {
    CHECK(run({true, wide, narrow, expected.data(), {{x.data(), 0, count}}, 1, owed.data(), largest}));
  } else {  // no kernel compresses float64
    for (size_t i = 0; i < count; i++) expected[i] = narrow_and_owe<Narrow>(x[i], owed[i], static_cast<Wide>(largest));
  }
  compress({x.data(), wide}, residual.data(), {bucket.data(), narrow}, largest, count);
  CHECK(std::memcmp(bucket.data(), expected.data(), count * sizeof(Narrow)) == 0);
  CHECK(std::memcmp(residual.data(), owed.data(), count * sizeof(Wide)) == 0);
  expand({bucket.data(), narrow}, {opened.data(), wide}, count);
  bool same = true;
  for (size_t i = 0; i < count; i++) {
    const Wide one = widen(bucket[i]);
    same &= std::memcmp(&opened[i], &one, sizeof one) == 0 || (one != one && opened[i] != opened[i]);
  }
  CHECK(same);
}

// -- tests that numbers are converted as in base/reduce.cc

template <class Narrow>
void test_numbers_are_those_of_reductions(Dtype dtype) {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); i++) all[i] = static_cast<uint16_t>(i);
  const Reduction& row = reduction(dtype, Op::max);
  std::vector<float> wide(all.size());
  row.widen(all.data(), wide.data(), all.size());
  bool same = true;
  for (size_t i = 0; i < all.size(); i++)
    same &= std::bit_cast<uint32_t>(widen(Narrow{all[i]})) == std::bit_cast<uint32_t>(wide[i]);
  CHECK(same);

  std::vector<float> numbers;
  for (int i = 0; i < 1 << 18; i++) numbers.push_back(std::bit_cast<float>(static_cast<uint32_t>(random_bits())));
  for (size_t i = 0; i + 1 < all.size(); i++) {  // the midpoint of two neighbours, and the floats next to it
    if (!std::isfinite(wide[i]) || !std::isfinite(wide[i + 1])) continue;
    const auto middle = static_cast<float>((static_cast<double>(wide[i]) + static_cast<double>(wide[i + 1])) / 2);
    for (const float to : {-infinity, middle, infinity}) numbers.push_back(std::nextafterf(middle, to));
  }
  for (const float x : {65519.996f, 65520.0f, 0x1.feffp127f, 0x1.ffp127f, infinity}) numbers.push_back(x), numbers.push_back(-x);
  std::vector<uint16_t> rounded(numbers.size());
  row.finish(numbers.data(), 1, rounded.data(), numbers.size());
  same = true;
  for (size_t i = 0; i < numbers.size(); i++) same &= narrow<Narrow>(numbers[i]).bits == rounded[i];
  CHECK(same);

  for (int i = 0; i < 10'000; i++) {
    const float x = std::fabs(std::bit_cast<float>(static_cast<uint32_t>(random_bits())));
    if (!(x <= format_of(dtype).largest)) continue;
    const float floor = floor_to<Narrow>(x);
    const Narrow next{static_cast<uint16_t>(narrow<Narrow>(floor).bits + 1)};
    CHECK(floor <= x && widen(next) > x);
  }
}

// -- tests of how a packing is divided into launches and blocks

// Checks that the pieces of all blocks, taken in order, cover all parts in order and without gaps.
void test_plan(const Packing& packing, int processors) {
  const auto launches = plan(packing, processors);
  if (!CHECK(launches.has_value())) return;
  size_t part = 0;
  uint64_t done = 0;  // how many bytes of the part are covered so far
  const uint64_t element = size_of(packing.dtype);
  const auto skip_empty = [&] {
    while (part < packing.parts.size() && done == packing.parts[part].count * element) part++, done = 0;
  };
  skip_empty();
  bool ok = true;
  for (const Launch& one : *launches) {
    const cuda::Batch& batch = one.batch;
    const uint64_t unit = packing.plain() ? kernels[one.kernel].part_bytes : element;
    ok &= batch.count > 0 && batch.count <= cuda::Batch::most && one.blocks == batch.first_piece(batch.count);
    uint64_t empty = 0;
    for (uint64_t block = 0; block < one.blocks; block++) {
      const cuda::Piece piece = cuda::piece_of(batch, block);
      const uint64_t bytes = (piece.end - piece.begin) * unit;
      ok &= piece.end >= piece.begin && piece.end - piece.begin <= uint64_t{1} << batch.cell_log2;
      if (!bytes) {
        empty++;
        continue;
      }
      const uint64_t at = (piece.begin - batch.entries[piece.entry].begin) * unit;
      ok &= part < packing.parts.size() && at == done;
      if (!ok) break;
      ok &= batch.entries[piece.entry].part == reinterpret_cast<uintptr_t>(packing.parts[part].data);
      ok &= piece.begin * unit == packing.parts[part].begin * element + done;
      done += bytes;
      skip_empty();
    }
    ok &= empty <= batch.count;
  }
  if (!CHECK(ok && part == packing.parts.size()))
    std::fprintf(stderr, "  %zu parts of %s\n", packing.parts.size(), std::string(name(packing.dtype)).c_str());
}

void* address(uint64_t at) { return reinterpret_cast<void*>(at); }

void test_plans() {
  for (int turn = 0; turn < 200; turn++) {
    Packing packing{true, Dtype::float32, turn % 3 ? Dtype::float32 : Dtype::bfloat16, address(0x1000), {}};
    uint64_t at = 0;
    const uint64_t line = uint64_t{1} << random_below(10), size = uint64_t{1} << random_below(18);
    for (uint64_t i = 0, count = random_below(1100); i < count; i++) {
      at = (at + line - 1) / line * line;
      packing.parts.push_back({address(0x10000 + 16 * i), at, random_below(size) + random_below(2) * random_below(3)});
      at += packing.parts.back().count;
    }
    test_plan(packing, static_cast<int>(1 + random_below(200)));
  }
  // The second part has more than 2^32 bytes.
  test_plan(
      {true, Dtype::float32, Dtype::float32, address(0x1000), {{address(0x10000), 0, 5}, {address(0x20000), 5, 3ull << 30}}},
      132);
}

// Returns the number of blocks of a packing, and the largest number of bytes that any block moves.
std::pair<uint64_t, uint64_t> blocks_and_most(const Packing& packing, int processors) {
  uint64_t blocks = 0, most = 0;
  const auto launches = plan(packing, processors);
  for (const Launch& one : *launches) {
    blocks += one.blocks;
    for (uint64_t block = 0; block < one.blocks; block++) {
      const cuda::Piece piece = cuda::piece_of(one.batch, block);
      most = std::max(most, (piece.end - piece.begin) * kernels[one.kernel].part_bytes);
    }
  }
  return {blocks, most};
}

void test_blocks_fit_the_bytes_and_the_device() {
  const auto one = [](uint64_t count) {
    return Packing{true, Dtype::float32, Dtype::float32, address(0x1000), {{address(0x10000), 0, count}}};
  };
  using Pair = std::pair<uint64_t, uint64_t>;
  CHECK(blocks_and_most(one(1), 132) == Pair(1, 4));
  CHECK(blocks_and_most(one(1 << 18), 132) == Pair(257, 4096));    // 1 MiB: about two blocks for each multiprocessor
  CHECK(blocks_and_most(one(1 << 26), 132) == Pair(8193, 32768));  // 256 MiB
  CHECK(blocks_and_most(one((1 << 26) + 1), 132) == Pair(8193, 32768));
  Packing mixed = one(1 << 22);  // one large part, and many small parts with one block each
  for (uint64_t i = 0; i < 250; i++) mixed.parts.push_back({address(0x10000), (1 << 22) + i, 1});
  CHECK(blocks_and_most(mixed, 132).first <= 16 * 132 + 2 * 251 && plan(mixed, 132)->size() == 1);
  mixed.parts.push_back({address(0x10000), (1 << 22) + 250, 1});
  CHECK(plan(mixed, 132)->size() == 2);
}

std::string kernel_of(const Packing& packing) {
  const auto launches = plan(packing, 1);
  return !launches ? "none" : launches->empty() ? "nothing" : kernels[launches->front().kernel].name;
}

void test_which_kernel() {
  const auto one = [](Dtype dtype, Dtype bucket, uint64_t at, uint64_t count, double scale = 1) {
    return Packing{true, dtype, bucket, address(0x1000), {{address(at), 0, count}}, scale};
  };
  CHECK(kernel_of(one(Dtype::int32, Dtype::int32, 0x1000, 3)) == "copy4");
  CHECK(kernel_of(one(Dtype::int8, Dtype::int8, 0x1000, 16)) == "copy8");
  CHECK(kernel_of(one(Dtype::int8, Dtype::int8, 0x1002, 16)) == "copy2");
  CHECK(kernel_of(one(Dtype::complex128, Dtype::complex128, 0x1000, 1)) == "copy8");
  CHECK(kernel_of(one(Dtype::float32, Dtype::float32, 0x1001, 3)) == "copy1");
  CHECK(kernel_of(one(Dtype::float32, Dtype::float32, 0x1000, 3, 0.5)) == "scale_f32");
  CHECK(kernel_of(one(Dtype::float32, Dtype::float32, 0x1002, 3, 0.5)) == "none");
  CHECK(kernel_of(one(Dtype::float32, Dtype::bfloat16, 0x1004, 3)) == "pack_f32_bf16");
  CHECK(kernel_of(one(Dtype::float32, Dtype::bfloat16, 0x1004, 0)) == "nothing");
  CHECK(kernel_of(one(Dtype::int32, Dtype::int32, 0x1000, 3, 0.5)) == "none");
  CHECK(kernel_of(one(Dtype::float64, Dtype::float32, 0x1000, 3)) == "none");
  Packing back = one(Dtype::float32, Dtype::float16, 0x1000, 3, 0.5);
  back.packs = false;
  CHECK(kernel_of(back) == "unpack_f16_f32");
  Packing owing = one(Dtype::float32, Dtype::float16, 0x1000, 3);
  owing.residual = address(0x2000);
  CHECK(kernel_of(owing) == "owe_f32_f16");
  owing.bucket_dtype = Dtype::float32;
  CHECK(kernel_of(owing) == "none");
  CHECK(kernels_convert(Dtype::float32, Dtype::bfloat16) && kernels_convert(Dtype::float64, Dtype::float64));
  CHECK(!kernels_convert(Dtype::int32, Dtype::int32) && !kernels_convert(Dtype::float64, Dtype::bfloat16));
}

}  // namespace

SUITE(pack) {
  test_the_cpu_compresses_as_the_kernels_do<Float16, float>(Dtype::float32, Dtype::float16);
  test_the_cpu_compresses_as_the_kernels_do<Bfloat16, float>(Dtype::float32, Dtype::bfloat16);
  test_the_cpu_compresses_as_the_kernels_do<Float16, double>(Dtype::float64, Dtype::float16);
  test_the_cpu_compresses_as_the_kernels_do<Bfloat16, double>(Dtype::float64, Dtype::bfloat16);
  test_numbers_are_those_of_reductions<Float16>(Dtype::float16);
  test_numbers_are_those_of_reductions<Bfloat16>(Dtype::bfloat16);
  test_plans();
  test_blocks_fit_the_bytes_and_the_device();
  test_which_kernel();
  test_every_variant_at_every_alignment();
  test_few_large_and_many_small_parts();
  test_error_feedback_adds_up();
  test_no_sum_over_ranks_overflows();
  test_what_is_not_finite_goes_as_it_is_and_leaves_nothing_owed();
}
