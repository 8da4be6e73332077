// The CPU backend picks an algorithm for each call, and gives the algorithm the arena, the mesh or both.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "algo/algorithm.h"
#include "backend/backend.h"
#include "transport/arena.h"
#include "transport/mesh.h"

namespace mscomm {

class HostBackend final : public Backend {
 public:
  // arena, mesh: nullptr if the layout says that this rank needs none.
  HostBackend(Layout layout, std::unique_ptr<Arena> arena, std::unique_ptr<Mesh> mesh)
      : layout_(std::move(layout)), arena_(std::move(arena)), mesh_(std::move(mesh)) {}

  void run(const Call& call, const Wait& wait) override;
  void shut_down() override {
    if (arena_) arena_->give_up();
    if (mesh_) mesh_->shut_down();
  }
  void withdraw(const Call& call) override {
    if (arena_ && algorithm_of(call).carrier != Carrier::mesh) arena_->withdraw(call);
  }
  void last_look() override {
    if (mesh_) mesh_->last_look();
  }
  void close() override {
    constexpr double delivery_s = 5;
    if (mesh_) mesh_->close(delivery_s);
  }
  void close_descriptors() override {
    if (mesh_) mesh_->close_descriptors();
  }

  const Layout& layout() const { return layout_; }
  Mesh* mesh() { return mesh_.get(); }
  const Arena* arena() const { return arena_.get(); }
  // For each carrier, the size in bytes of x and out, summed over all calls that have used it. A call that uses both carriers
  // counts for both.
  struct Carried {
    std::atomic<uint64_t> arena{0}, mesh{0};
  };
  const Carried& carried() const { return carried_; }

 private:
  const Algorithm& algorithm_of(const Call& call) const {
    const Collective what = call.signature.what;
    size_t bytes = call.bytes();
    // In an uneven all_gather or gather, the signature describes the x of all ranks together. So choose the algorithm for an x
    // of average size.
    if (gathers(what) && !call.counts.empty()) bytes /= layout_.size;
    return layout_.chosen(what, bytes);
  }

  Layout layout_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Mesh> mesh_;
  Carried carried_;
  std::vector<char> scratch_;
};

}  // namespace mscomm
