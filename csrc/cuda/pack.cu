// The kernels that gather many arrays into a bucket, or spread them from it again, in one launch: unchanged, or scaled, cast and
// with error feedback on the way. They are memory-bound: what counts is that all loads and stores are wide and that many are on
// their way at once, whatever the sizes of the parts. batch.h tells which block moves what.
//
// Compiled by nvcc for devices, and by the host's compiler for tests (tests/core/cuda_on_cpu.h); both give the same bits:
// every operation rounds once (--fmad=false), subnormal numbers stay, and a computed NaN is always the same one.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/batch.h"
#include "cuda/numbers.h"

namespace mscomm::cuda {

namespace {

// What one instruction loads or stores. It consists of words, so that the compiler does not split data into bytes that are only
// copied.
template <unsigned bytes>
struct alignas(bytes) Raw {
  using Word = std::conditional_t<bytes % 4 == 0, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>;
  Word words[bytes / sizeof(Word)];
};

template <class T, unsigned width>
struct Vector {
  T at[width];
};

// Which NaN comes out of a computation depends on the machine. As in base/reduce.cc, results always hold this one.
__device__ inline float one_nan(float x) { return x == x ? x : std::bit_cast<float>(0x7fc00000u); }
__device__ inline double one_nan(double x) { return x == x ? x : std::bit_cast<double>(0x7ff8000000000000u); }

// What happens to an element on its way; `owed` is the error feedback kept for it.

template <class T>
struct Copied {
  using From = T;
  using To = T;
  static constexpr bool copies = true, owes = false;
  __device__ explicit Copied(const Batch&) {}
};

template <class From_, class To_ = From_>
struct Scaled {
  using From = From_;
  using To = To_;
  using Wide = decltype(widen(From{}));
  static constexpr bool copies = false, owes = false;
  Wide scale;
  __device__ explicit Scaled(const Batch& batch) : scale(static_cast<Wide>(batch.scale)) {}
  __device__ To operator()(From x, float&) const { return narrow<To>(one_nan(widen(x) * scale)); }
};

// What rounding takes away, and what is beyond `largest`, is added the next time. Infinities and NaN are passed on unchanged, for
// code that looks for them, and nothing is kept for them. python/mscomm/train/buckets.py does the same on the CPU.
template <class To_>
struct Owing {
  using From = float;
  using To = To_;
  static constexpr bool copies = false, owes = true;
  float scale, largest;
  __device__ explicit Owing(const Batch& batch) : scale(static_cast<float>(batch.scale)), largest(batch.largest) {}
  __device__ To operator()(float x, float& owed) const {
    const float whole = one_nan(x * scale + owed);
    const float bounded = whole > largest ? largest : whole < -largest ? -largest : whole;
    const To rounded = narrow<To>(is_finite(whole) ? bounded : whole);
    owed = is_finite(whole) ? whole - widen(rounded) : 0.0f;
    return rounded;
  }
};

// Where a piece comes from and goes to. These are addresses, because Batch is the same for both directions.
struct Sides {
  uint64_t from, to, owed;
};

// Moves `units` units of `width` elements each, from element `first` on. Units from `hole` on lie `skip` units further.
template <unsigned width, class Way>
__device__ inline void move(const Way& way, const Sides& sides, uint32_t first, uint32_t units, uint32_t hole, uint32_t skip) {
  using From = typename Way::From;
  using To = typename Way::To;
  using In = Raw<sizeof(From) * width>;
  using Out = Raw<sizeof(To) * width>;
  using Owed = Raw<sizeof(float) * width>;
  constexpr unsigned depth = 4;  // loads of a thread that are in flight at once
  const auto* const in = reinterpret_cast<const In*>(sides.from + first * sizeof(From));
  auto* const out = reinterpret_cast<Out*>(sides.to + first * sizeof(To));
  auto* const owed = reinterpret_cast<Owed*>(sides.owed + first * sizeof(float));
#pragma unroll 1
  for (uint32_t begin = threadIdx.x; begin < units; begin += depth * threads) {
    In taken[depth];
    Owed kept[depth];
#pragma unroll
    for (unsigned turn = 0; turn < depth; turn++) {
      const uint32_t unit = begin + turn * threads, at = unit < hole ? unit : unit + skip;
      if (unit >= units) continue;
      taken[turn] = in[at];
      if constexpr (Way::owes) kept[turn] = owed[at];
    }
#pragma unroll
    for (unsigned turn = 0; turn < depth; turn++) {
      const uint32_t unit = begin + turn * threads, at = unit < hole ? unit : unit + skip;
      if (unit >= units) continue;
      if constexpr (Way::copies) {
        out[at] = taken[turn];
      } else {
        const auto given = std::bit_cast<Vector<From, width>>(taken[turn]);
        auto owes = std::bit_cast<Vector<float, width>>(kept[turn]);
        Vector<To, width> made;
#pragma unroll
        for (unsigned i = 0; i < width; i++) made.at[i] = way(given.at[i], owes.at[i]);
        out[at] = std::bit_cast<Out>(made);
        if constexpr (Way::owes) owed[at] = std::bit_cast<Owed>(owes);
      }
    }
  }
}

// How many elements come before the first one that is aligned to a vector.
template <class T, unsigned width>
__device__ inline uint32_t before_vectors(uint64_t address) {
  return static_cast<uint32_t>((width - address / sizeof(T) % width) % width);
}

template <class Way>
__device__ inline void run(const Batch& batch) {
  using From = typename Way::From;
  using To = typename Way::To;
  const Piece piece = piece_of(batch, blockIdx.x);
  const Entry& entry = batch.entries[piece.entry];
  const uint64_t part = entry.part + (piece.begin - entry.begin) * (batch.packs ? sizeof(From) : sizeof(To));
  const uint64_t bucket = batch.bucket + piece.begin * (batch.packs ? sizeof(To) : sizeof(From));
  const Sides sides{batch.packs ? part : bucket, batch.packs ? bucket : part, batch.residual + piece.begin * sizeof(float)};
  const auto count = static_cast<uint32_t>(piece.end - piece.begin);

  // Uses vectors of 16 bytes on the wider side, if all sides are aligned to a vector at the same element; otherwise moves one
  // element at a time.
  constexpr unsigned width = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  uint32_t head = before_vectors<To, width>(sides.to);
  const bool together =
      before_vectors<From, width>(sides.from) == head && (!Way::owes || before_vectors<float, width>(sides.owed) == head);
  if (!together || head > count) head = count;
  const uint32_t units = (count - head) / width, whole = units * width;

  const Way way(batch);
  move<1>(way, sides, 0, count - whole, head, whole);  // before the vectors, and after them
  move<width>(way, sides, head, units, units, 0);
}

}  // namespace

// device/kernels.h finds the kernels by these names. The batch stays where the driver puts parameters: no thread has a copy.
#define KERNEL(name, ...) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Batch batch) { run<__VA_ARGS__>(batch); }

KERNEL(copy1, Copied<uint8_t>)
KERNEL(copy2, Copied<uint16_t>)
KERNEL(copy4, Copied<uint32_t>)
KERNEL(copy8, Copied<uint64_t>)
KERNEL(scale_f16, Scaled<Float16>)
KERNEL(scale_bf16, Scaled<Bfloat16>)
KERNEL(scale_f32, Scaled<float>)
KERNEL(scale_f64, Scaled<double>)
KERNEL(pack_f32_f16, Scaled<float, Float16>)
KERNEL(pack_f32_bf16, Scaled<float, Bfloat16>)
KERNEL(unpack_f16_f32, Scaled<Float16, float>)
KERNEL(unpack_bf16_f32, Scaled<Bfloat16, float>)
KERNEL(owe_f32_f16, Owing<Float16>)
KERNEL(owe_f32_bf16, Owing<Bfloat16>)

#undef KERNEL

}  // namespace mscomm::cuda
