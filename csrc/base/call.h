// The description of one collective call: what all ranks must agree on (Signature), and what belongs to this rank alone (Call).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/types.h"

namespace mscomm {

inline constexpr int max_dims = 12;

// What all ranks of a call must agree on. Ranks compare signatures field by field or by their fingerprints. They copy signatures
// bytewise into slots and headers, so a Signature has no padding and no pointers.
struct Signature {
  uint64_t number = 0;  // the place of the call in the order of the group's calls, counting from 1
  Collective what = Collective::barrier;
  Dtype dtype = Dtype::uint8;
  Op op = Op::sum;
  uint8_t dims = 0;
  int32_t root = -1;   // -1 if the call has no root
  uint64_t count = 0;  // the number of elements, which is the product of shape
  // The shape of x. This field must be the same on all ranks. So in an uneven call, the length of axis 0 is the sum of the
  // lengths of all ranks' parts, or 0 if the call is an all_to_all (see src/calls.cc).
  uint64_t shape[max_dims] = {};
  uint64_t digest = 0;  // a hash of a fused call's dtypes and shapes, or of an uneven call's counts; 0 for other calls
  Function function = Function::barrier;
  // 1 if this call is a head. A head carries only the counts or the shape of the next call, which carries the data.
  uint8_t head = 0;
  uint8_t device = 0;  // 1 if the arrays are on a device
  uint8_t zero[5] = {};

  bool operator==(const Signature&) const = default;
  bool valid() const {
    return static_cast<size_t>(what) < collectives.size() && static_cast<size_t>(dtype) < dtypes.size() &&
           static_cast<size_t>(op) < ops.size() && static_cast<size_t>(function) < functions.size() && dims <= max_dims &&
           head <= 1 && device <= 1;
  }
  // Returns a 64-bit hash of all fields. If two signatures have the same `dims` and differ in a single 64-bit word, their hashes
  // always differ. Any other two different signatures have the same hash with a probability of about one in 2^64.
  uint64_t fingerprint() const;
  // Returns the call as text, such as "all_reduce #17 (float32[1024, 3], sum)".
  std::string text() const;
};
static_assert(sizeof(Signature) == 136);

struct Call {
  Signature signature;
  const void* x = nullptr;  // nullptr if this rank sends nothing
  size_t x_bytes = 0;
  void* out = nullptr;  // nullptr if this rank receives nothing
  size_t out_bytes = 0;
  // Empty unless the call is uneven. The number of elements in each rank's part or, in an uneven all_to_all, a square matrix of
  // such numbers with one row for each sender. All ranks have the same counts. The counts add up to signature.count, except in an
  // all_to_all whose signature.count is 0.
  std::vector<uint64_t> counts{};
  // Empty unless the call is an all_to_all in which each rank knows only its own counts. recv_counts then holds the number of
  // elements that this rank receives from each rank, and counts has only one row: the numbers that this rank sends. The ranks
  // compare these numbers before they use any data.
  std::vector<uint64_t> recv_counts{};
  // The caller's stream. The call runs on the device after the work that is already on this stream. nullopt if the arrays are in
  // CPU memory.
  std::optional<void*> stream{};
  // Whether the call runs on the group's own stream. If so, work that is enqueued on `stream` later need not wait for the call.
  bool beside = false;

  size_t element_bytes() const { return size_of(signature.dtype); }
  // Returns the size in bytes of signature.count elements.
  size_t bytes() const { return signature.count * element_bytes(); }
  const char* in() const { return static_cast<const char*>(x); }
  char* result() const { return static_cast<char*>(out); }
};

// Checks a call on one rank of a group of `size` ranks. This is the last check before memory is touched: the algorithms trust a
// call that passes it. Throws Error("ValueError") unless x and out have exactly the sizes that the collective reads and writes on
// this rank. Also throws it if the counts do not add up, if the root is not a rank of the group, or if the operation is not
// defined on the type. In broadcast and scatter, x may be missing on ranks other than the root, because they do not read it.
void check(const Call& call, int rank, int size);

// Thrown when this rank notices that ranks made different calls. calls: the ranks and their calls, as far as this rank knows
// them.
struct Differs {
  std::vector<std::pair<int, Signature>> calls;
};

// Returns the error for ranks that made different calls. who: for example "the ranks of group pair". callers: each call as text,
// with the ranks that made it. The call of the lowest rank must come first, because Error::ranks lists the ranks of all later
// calls.
Error mismatch(const std::string& who, const std::vector<std::pair<std::string, std::vector<int>>>& callers);

// Returns the error for two ranks of an all_to_all if `source` sends a different number of elements than `destination` expects.
// The ranks are job ranks.
Error counts_differ(const Signature& call, int source, uint64_t sent, int destination, uint64_t expected);

// Whether this CPU is an AMD Zen 3 or Zen 4. On these, `rep movsb` takes up to 14 times as long if `to` is 1 to 31 bytes above
// `from`, modulo the page size (glibc bug 30994). The kernel uses it in all copies, and memcpy uses it in copies that are longer
// than 2 KiB and shorter than the L2 cache. A long array of NumPy begins 16 bytes above a page, and staging begins at a page.
// Tests change this value.
extern bool slow_movsb;
// Returns whether `rep movsb` is slow for these addresses.
inline bool copies_slowly(uintptr_t to, uintptr_t from) { return slow_movsb && (to - from) % 4096 - 1 < 31; }
// Copies without `rep movsb`. bytes: at least 128.
void copy_by_vectors(void* to, const void* from, size_t bytes);

// Copies `bytes` bytes. Does nothing if `bytes` is 0, or if `to` and `from` are the same.
inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0 || to == from) return;
  if (bytes > 2048 && copies_slowly(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from)))
    return copy_by_vectors(to, from, bytes);
  std::memcpy(to, from, bytes);
}

// Returns a number of bytes as text: "4 MiB", "7 B".
std::string in_units(uint64_t bytes);

}  // namespace mscomm
