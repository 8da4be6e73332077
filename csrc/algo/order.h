// The canonical order in which a reduction combines the values of all ranks. Among the algorithms for all_reduce, reduce and
// reduce_scatter, only the rings use a different order.
#pragma once

#include <cstddef>

#include "base/call.h"

namespace mscomm {

struct Layout;

// Reduces in[rank] over all ranks in the canonical order: first the ranks of each host in rank order, then the hosts in the order
// of their lowest ranks. Partial results have the accumulator type. out may be one of the inputs.
void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes);

// Fills out with the operation's identity. This is the result of exscan on rank 0, which has no rank before it.
void write_identity(const Call& call);

}  // namespace mscomm
