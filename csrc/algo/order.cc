#include "algo/order.h"

#include <algorithm>

#include "algo/algorithm.h"

namespace mscomm {

namespace {

// Reduces `count` elements from the element `first` on, which fit into a buffer. There is one buffer for each level of the tree.
class Block {
 public:
  Block(const Reduction& row, const Layout& layout, const void* const* in, size_t first, size_t count, char* buffers, size_t each)
      : row_(row), layout_(layout), in_(in), first_(first), count_(count), buffers_(buffers), each_(each) {}

  // Reduces the hosts of the leaves [leaf, leaf + leaves) into a buffer. Uses later buffers, too.
  char* tree(int leaf, int leaves, int buffer) const {
    if (leaves == 1) return hosts(hosts_of(layout_.hosts.size(), leaf), buffer);
    char* const sum = tree(leaf, leaves / 2, buffer);
    row_.merge(sum, tree(leaf + leaves / 2, leaves / 2, buffer + 1), count_);
    return sum;
  }
  char* hosts(Range hosts, int buffer) const {
    char* const sum = host(layout_.hosts[hosts.begin], buffer);
    for (size_t i = hosts.begin + 1; i < hosts.end; i++) row_.merge(sum, host(layout_.hosts[i], buffer + 1), count_);
    return sum;
  }

 private:
  char* host(const std::vector<int>& ranks, int buffer) const {
    char* const sum = buffers_ + buffer * each_;
    for (const int rank : ranks) {
      const char* from = static_cast<const char*>(in_[rank]) + first_ * row_.element_bytes;
      rank == ranks[0] ? row_.widen(from, sum, count_) : row_.fold(sum, from, count_);
    }
    return sum;
  }

  const Reduction& row_;
  const Layout& layout_;
  const void* const* in_;
  const size_t first_, count_;
  char* const buffers_;
  const size_t each_;
};

constexpr size_t most_accumulator_bytes = 16;

}  // namespace

void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes) {
  const Reduction& row = reduction(signature.dtype, signature.op);
  const size_t count = bytes / row.element_bytes, hosts = layout.hosts.size();
  const int n = layout.size;
  // Up to three hosts of one rank are combined from left to right.
  if (hosts == 1 || (hosts <= 3 && static_cast<int>(hosts) == n)) return row.reduce(in, n, n, out, count);
  // A subtree of 2^k leaves needs k + 2 buffers. Together, they should fit into the first-level cache.
  const int leaves = leaves_of(hosts), buffers = std::bit_width(static_cast<unsigned>(leaves)) + 1;
  alignas(64) char memory[32 << 10];  // on the stack of the user's thread, which may be small
  const size_t block = std::min<size_t>(1024, sizeof memory / buffers / row.accumulator_bytes / 64 * 64);
  for (size_t done = 0; done < count; done += block) {
    const size_t now = std::min(block, count - done);
    const Block part(row, layout, in, done, now, memory, block * row.accumulator_bytes);
    row.finish(part.tree(0, leaves, 0), n, static_cast<char*>(out) + done * row.element_bytes, now);
  }
}

void add_up_hosts(const Reduction& row, const Layout& layout, Range hosts, const void* const* in, char* to, size_t count) {
  constexpr size_t block = 1024;
  alignas(64) char memory[2 * block * most_accumulator_bytes];
  for (size_t done = 0; done < count; done += block) {
    const size_t now = std::min(block, count - done);
    const Block part(row, layout, in, done, now, memory, block * most_accumulator_bytes);
    copy(to + done * row.accumulator_bytes, part.hosts(hosts, 0), now * row.accumulator_bytes);
  }
}

void write_identity(const Call& call) {
  reduction(call.signature.dtype, call.signature.op).identity(call.out, call.signature.count);
}

}  // namespace mscomm
