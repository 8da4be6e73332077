#include "base/compress.h"

#include <array>
#include <stdexcept>
#include <string>

#include "base/levels.h"
#include "base/numbers.h"
#include "base/reduce.h"

namespace mscomm {
namespace {

// The arrays of one call do not overlap, so no iteration of these loops depends on another one (ivdep).

template <class Wide, class Narrow>
[[gnu::always_inline]] inline void compress_all(const void* x, void* residual, void* narrow, double largest, size_t count) {
  const auto* const from = static_cast<const Wide*>(x);
  auto* const owed = static_cast<Wide*>(residual);
  auto* const to = static_cast<Narrow*>(narrow);
#pragma GCC ivdep
  for (size_t i = 0; i < count; i++) to[i] = narrow_and_owe<Narrow>(from[i], owed[i], static_cast<Wide>(largest));
}

template <class Wide, class Narrow>
[[gnu::always_inline]] inline void expand_all(const void* narrow, void* out, size_t count) {
  const auto* const from = static_cast<const Narrow*>(narrow);
  auto* const to = static_cast<Wide*>(out);
#pragma GCC ivdep
  for (size_t i = 0; i < count; i++) to[i] = widen(from[i]);
}

struct Loops {
  Dtype wide, narrow;
  void (*compress)(const void* x, void* residual, void* narrow, double largest, size_t count);
  void (*expand)(const void* narrow, void* out, size_t count);
};

template <class Level, class Wide, class Narrow>
constexpr Loops loops(Dtype wide, Dtype narrow) {
  return {wide, narrow, Level::template run<compress_all<Wide, Narrow>>, Level::template run<expand_all<Wide, Narrow>>};
}

using Table = std::array<Loops, 4>;

template <class Level>
constexpr Table table = {
    loops<Level, float, Float16>(Dtype::float32, Dtype::float16),
    loops<Level, float, Bfloat16>(Dtype::float32, Dtype::bfloat16),
    loops<Level, double, Float16>(Dtype::float64, Dtype::float16),
    loops<Level, double, Bfloat16>(Dtype::float64, Dtype::bfloat16),
};

constexpr const Table* tables[] = {&table<Baseline>, &table<Avx2>, &table<Avx512>};

const Loops& loops_for(Dtype wide, Dtype narrow) {
  for (const Loops& row : *tables[levels() - 1])
    if (row.wide == wide && row.narrow == narrow) return row;
  throw std::logic_error("compress: no conversion between " + std::string(name(wide)) + " and " + std::string(name(narrow)));
}

}  // namespace

void compress(const Elements& x, void* residual, const Elements& narrow, double largest, size_t count) {
  const DefaultFloatMode mode;
  loops_for(x.dtype, narrow.dtype).compress(x.data, residual, narrow.data, largest, count);
}

void expand(const Elements& narrow, const Elements& out, size_t count) {
  const DefaultFloatMode mode;
  loops_for(out.dtype, narrow.dtype).expand(narrow.data, out.data, count);
}

}  // namespace mscomm
