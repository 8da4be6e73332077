#include "backend/host.h"

#include <algorithm>
#include <cstring>

#include "algo/order.h"
#include "base/error.h"
#include "base/reduce.h"

namespace mscomm {

HostBackend::HostBackend(Layout layout, Forced forced, std::unique_ptr<Arena> arena, std::unique_ptr<Mesh> mesh)
    : layout_(std::move(layout)), arena_(std::move(arena)), mesh_(std::move(mesh)) {
  for (size_t what = 0; what < collectives.size(); what++) {
    choices_[what] = select(static_cast<Collective>(what), layout_, forced);
    if (layout_.size == 1) continue;
    for (const Algorithm* row : choices_[what])
      if (!is_set_up(row->carrier))
        throw Error("Error", std::string(collectives[what]) + " by " + std::string(row->name) +
                                 " was chosen, but its transport was not set up");
  }
}

bool HostBackend::is_set_up(Carrier carrier) const {
  if (carrier == Carrier::arena) return arena_ && !mesh_;
  const auto here = layout_.host.empty() ? layout_.size : std::count(layout_.host.begin(), layout_.host.end(), layout_.here());
  return mesh_ && (carrier == Carrier::mesh || arena_ || here == 1);
}

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
