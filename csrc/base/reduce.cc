// Compiles the reductions for the baseline, and chooses the level for which a reduction runs.
#include "base/reduce.h"

#include <stdexcept>
#include <string>

#include "base/levels.h"
#include "base/reduce_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mscomm {
namespace {

#if MSCOMM_LEVELS == 3
constexpr const Reductions* tables[] = {&reductions<Baseline>, &avx2_reductions, &avx512_reductions};

int detect_levels() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 1;
  if (!__builtin_cpu_supports("avx512f")) return 2;
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 3 : 2;
}
#else
constexpr const Reductions* tables[] = {&reductions<Baseline>};

int detect_levels() { return 1; }
#endif

#if defined(__x86_64__)
constexpr unsigned long default_float_mode = 0x1f80;  // the value of MXCSR after a reset
unsigned long float_mode() { return _mm_getcsr(); }
void set_float_mode(unsigned long mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
constexpr unsigned long default_float_mode = 0;  // the value of FPCR for round to nearest, without flush-to-zero
unsigned long float_mode() {
  unsigned long mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  return mode;
}
void set_float_mode(unsigned long mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
constexpr unsigned long default_float_mode = 0;
unsigned long float_mode() { return 0; }
void set_float_mode(unsigned long) {}
#endif

}  // namespace

bool supports(Dtype dtype, Op op) {
  const auto d = static_cast<size_t>(dtype), o = static_cast<size_t>(op);
  return d < dtypes.size() && o < ops.size() && reductions<Baseline>[d][o].reduce != nullptr;
}

int levels() {
  static const int available = detect_levels();
  return available;
}

const Reduction& reduction_at(Dtype dtype, Op op, int level) {
  const auto d = static_cast<size_t>(dtype), o = static_cast<size_t>(op);
  if (!supports(dtype, op)) {
    const bool named = d < dtypes.size() && o < ops.size();
    throw std::logic_error("reduction: no " + (named ? std::string(name(op)) : "op " + std::to_string(o)) + " on " +
                           (named ? std::string(name(dtype)) : "dtype " + std::to_string(d)));
  }
  if (level < 0 || level >= levels()) {
    throw std::logic_error("reduction: level " + std::to_string(level) + " of " + std::to_string(levels()));
  }
  return (*tables[level])[d][o];
}

const Reduction& reduction(Dtype dtype, Op op) { return reduction_at(dtype, op, levels() - 1); }

DefaultFloatMode::DefaultFloatMode() : saved_(float_mode()) { set_float_mode(default_float_mode); }

DefaultFloatMode::~DefaultFloatMode() { set_float_mode(saved_); }

}  // namespace mscomm
