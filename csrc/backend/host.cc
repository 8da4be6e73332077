#include "backend/host.h"

#include "algo/order.h"
#include "base/reduce.h"

namespace mscomm {

namespace {

// A group keeps its scratch memory for later calls if it is not larger than this. Only an uneven all_to_all in place needs more.
constexpr size_t most_scratch_bytes = 64 << 20;

}  // namespace

void HostBackend::run(const Call& call, const Wait& wait) {
  if (layout_.size == 1) {
    if (call.signature.what == Collective::exscan) write_identity(call);
    else copy(call.out, call.x, call.out_bytes);
    return;
  }
  const DefaultFloatMode mode;
  const Algorithm& algorithm = algorithm_of(call);
  if (algorithm.carrier != Carrier::mesh && arena_) carried_.arena += call.x_bytes + call.out_bytes;
  if (algorithm.carrier != Carrier::arena) {
    carried_.mesh += call.x_bytes + call.out_bytes;
    if (call.recv_counts.empty()) mesh_->begin(call.signature);
    else mesh_->begin(call.signature, call.counts, call.recv_counts);
  }
  algorithm.run(call, {layout_, arena_.get(), mesh_.get(), scratch_}, wait);
  if (scratch_.size() > most_scratch_bytes) std::vector<char>().swap(scratch_);
}

}  // namespace mscomm
