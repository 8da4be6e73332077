#include "backend/host.h"

#include <cstring>

#include "algo/order.h"
#include "base/reduce.h"

namespace mscomm {

void HostBackend::run(const Call& call, const Wait& wait) {
  if (layout_.size == 1) {
    if (call.signature.what == Collective::exscan) write_identity(call);
    else if (call.out && call.out != call.x && call.out_bytes) std::memcpy(call.out, call.x, call.out_bytes);
    return;
  }
  const DefaultFloatMode mode;
  const Algorithm& algorithm = algorithm_of(call);
  if (algorithm.carrier != Carrier::mesh && arena_) carried_.arena += call.x_bytes + call.out_bytes;
  if (algorithm.carrier != Carrier::arena) {
    carried_.mesh += call.x_bytes + call.out_bytes;
    mesh_->begin(call.signature);
  }
  algorithm.run(call, {layout_, arena_.get(), mesh_.get(), scratch_}, wait);
}

void HostBackend::shut_down() {
  if (arena_) arena_->ring();
  if (mesh_) mesh_->shut_down();
}

void HostBackend::withdraw(const Call& call) {
  if (arena_ && algorithm_of(call).carrier != Carrier::mesh) arena_->withdraw(call);
}

void HostBackend::last_look() {
  if (mesh_) mesh_->last_look();
}

void HostBackend::close() {
  constexpr double delivery_s = 5;
  if (mesh_) mesh_->close(delivery_s);
}

void HostBackend::close_descriptors() {
  if (mesh_) mesh_->close_descriptors();
}

}  // namespace mscomm
