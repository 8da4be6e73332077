// The kernels that gather many arrays into a bucket, or scatter a bucket to many arrays, in one launch. On the way, they can
// scale, cast and apply error feedback. The kernels are memory-bound, so all loads and stores should be wide, and many should be
// in flight at once, regardless of the sizes of the parts. batch.h describes which block moves what.
//
// nvcc compiles this file for devices, and the host compiler compiles it for tests (tests/core/cuda_on_cpu.h). The kernels
// compute the same bits with both compilers, because every operation rounds once (--fmad=false), subnormal numbers are kept, and
// every computed NaN is replaced with the same NaN.
#include <cstdint>
#include <type_traits>

#include "base/numbers.h"
#include "cuda/batch.h"

namespace mscomm::cuda {

namespace {

// The data that one instruction loads or stores. It consists of words, because the compiler might copy an array of bytes byte by
// byte.
template <unsigned bytes>
struct alignas(bytes) Raw {
  using Word = std::conditional_t<bytes % 4 == 0, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>;
  Word words[bytes / sizeof(Word)];
};

template <class T, unsigned width>
struct Vector {
  T at[width];
};

// The ways to move an element. `owed` is what clamping and rounding have removed from the element so far (error feedback).

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

// Moves an element with error feedback.
template <class To_>
struct Owing {
  using From = float;
  using To = To_;
  static constexpr bool copies = false, owes = true;
  float scale, largest;
  __device__ explicit Owing(const Batch& batch) : scale(static_cast<float>(batch.scale)), largest(batch.largest) {}
  __device__ To operator()(float x, float& owed) const { return narrow_and_owe<To>(x * scale, owed, largest); }
};

// The addresses of a piece: where it is read (`from`), where it is written (`to`), and where its residual is (`owed`). They are
// numbers and not pointers, because one of `from` and `to` is in a part and the other is in the bucket, and their element types
// can differ.
struct Sides {
  uint64_t from, to, owed;
};

// Moves `units` units of `width` elements each, starting at element `first`. After the first `hole` units, `skip` units are left
// out.
template <unsigned width, class Way>
__device__ inline void move(const Way& way, const Sides& sides, uint32_t first, uint32_t units, uint32_t hole, uint32_t skip) {
  using From = typename Way::From;
  using To = typename Way::To;
  using In = Raw<sizeof(From) * width>;
  using Out = Raw<sizeof(To) * width>;
  using Owed = Raw<sizeof(float) * width>;
  constexpr unsigned depth = 4;  // how many loads of a thread are in flight at once
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

// Returns how many elements lie between `address` and the next address that is aligned for a vector of `width` elements, or 0 if
// `address` itself is aligned.
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

  // Move vectors of `width` elements, which have 16 bytes on the side with the wider elements. This is possible only if the
  // number of elements before the first aligned vector is the same on all sides: from, to and, with error feedback, owed.
  // Otherwise, move the elements one at a time.
  constexpr unsigned width = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  uint32_t head = before_vectors<To, width>(sides.to);
  const bool together =
      before_vectors<From, width>(sides.from) == head && (!Way::owes || before_vectors<float, width>(sides.owed) == head);
  if (!together || head > count) head = count;
  const uint32_t units = (count - head) / width, whole = units * width;

  const Way way(batch);
  move<1>(way, sides, 0, count - whole, head, whole);  // the elements before and after the vectors
  move<width>(way, sides, head, units, units, 0);
}

}  // namespace

// The table in device/kernels.h lists the kernels by these names. __grid_constant__ leaves the batch where the driver puts
// parameters, so that threads do not copy the batch.
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
