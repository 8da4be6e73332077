#include "algo/order.h"

#include <algorithm>

#include "algo/algorithm.h"
#include "base/reduce.h"

namespace mscomm {

void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes) {
  const Reduction& row = reduction(signature.dtype, signature.op);
  const size_t count = bytes / row.element_bytes;
  const int n = layout.size;
  if (layout.hosts.size() == 1) return row.reduce(in, n, n, out, count);
  constexpr size_t block = 1024;
  alignas(64) char total[block * 16], partial[block * 16];
  for (size_t done = 0; done < count; done += block) {
    const size_t now = std::min(block, count - done);
    for (const std::vector<int>& host : layout.hosts) {
      const bool first_host = &host == &layout.hosts[0];
      char* sum = first_host ? total : partial;
      for (const int rank : host) {
        const char* from = static_cast<const char*>(in[rank]) + done * row.element_bytes;
        rank == host[0] ? row.widen(from, sum, now) : row.fold(sum, from, now);
      }
      if (!first_host) row.merge(total, partial, now);
    }
    row.finish(total, n, static_cast<char*>(out) + done * row.element_bytes, now);
  }
}

void write_identity(const Call& call) {
  reduction(call.signature.dtype, call.signature.op).identity(call.out, call.signature.count);
}

}  // namespace mscomm
