// Levels: the instruction sets for which the loops of reduce_loops.h and compress.cc are compiled. The level is chosen at run
// time (see levels() in reduce.h). A loop is written once, without intrinsics, as a function with the attribute always_inline.
// The compiler inlines it into one function for each level. The arithmetic is IEEE arithmetic without contraction (fused
// multiply-add), so all levels give the same bits.
#pragma once

namespace mscomm {

struct Baseline {
  template <auto body, class... Args>
  static void run(Args... args) {
    body(args...);
  }
};

// MSCOMM_LEVELS is the number of levels that are compiled. A build with a sanitizer defines MSCOMM_BASELINE_ONLY: all levels
// access the same memory, so the other levels would only take long to compile.
#if defined(__x86_64__) && !defined(MSCOMM_BASELINE_ONLY)
#define MSCOMM_LEVELS 3

struct Avx2 {
  template <auto body, class... Args>
  [[gnu::target("avx2")]] static void run(Args... args) {
    body(args...);
  }
};

struct Avx512 {
  template <auto body, class... Args>
  [[gnu::target("avx512f,avx512bw,avx512vl")]] static void run(Args... args) {
    body(args...);
  }
};
#else
#define MSCOMM_LEVELS 1

// These two levels are never used.
using Avx2 = Baseline;
using Avx512 = Baseline;
#endif

}  // namespace mscomm
