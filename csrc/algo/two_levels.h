// What the algorithms for several hosts with several ranks share. They have two levels. The ranks of one host share data in the
// arena. Between hosts, data moves over the mesh, and each byte moves to a host only once. All ranks of a host take part in this,
// so that their links together fill the wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "algo/algorithm.h"
#include "algo/blocks.h"
#include "base/reduce.h"
#include "transport/arena.h"
#include "transport/mesh.h"

namespace mscomm {

// A message is divided among several ranks of a host only if each of them gets at least this many bytes.
inline constexpr size_t least_slice_bytes = 4 << 10;

// Reduces the partial results of the ranks of one host, in the order of `in`, into accumulators. sum: the row of the operation,
// or of sum if the operation is avg: only the final result is divided.
void add_up(const Reduction& sum, std::span<const void* const> in, char* to, size_t count);
// The row that add_up() needs.
const Reduction& row_of_partials(const Signature& signature);

// A rank uses this Watch while it waits in the arena for ranks on its own host. During the wait, look() continues to send data to
// other hosts, and reads the headers that have arrived from them.
class AtHome final : public Watch {
 public:
  AtHome(const Wait& wait, const Layout& layout, Mesh& mesh) : wait_(wait), layout_(layout), mesh_(mesh) {}
  void look(const Deadline& deadline, const Missing& missing) override;
  bool broken() const override {
    if (!mesh_.all_sent()) mesh_.progress();  // the rank polls the arena now, and other hosts may wait for its data
    return wait_.watch.broken();
  }

 private:
  const Wait& wait_;
  const Layout& layout_;
  Mesh& mesh_;
  Clock::time_point looked_;
};

class Home;

// A rank uses this Watch while it waits for other hosts, before the first round of its own host. look() also notices ranks of
// this host that wait in another call.
class Away final : public Watch {
 public:
  Away(const Wait& wait, const Home& home) : wait_(wait), home_(home) {}
  void look(const Deadline& deadline, const Missing& missing) override;
  bool broken() const override { return wait_.watch.broken(); }

 private:
  const Wait& wait_;
  const Home& home_;
};

// The arena's part of a call, on a host with several ranks. If this rank is alone on its host, here() is false.
class Home {
 public:
  // one_way: whether pass_on() is the call's only round.
  Home(const Call& call, const Ranks& ranks, const Wait& wait, bool one_way = false);

  bool here() const { return arena_ != nullptr; }
  const std::vector<int>& ranks() const { return layout_.at_home(); }
  int size() const { return static_cast<int>(ranks().size()); }
  int place() const { return layout_.place; }

  // Arrives at the next round. The first round of the call also checks that all ranks of this host make the same call.
  void round();
  // The rank at place `from` gives its data to the other ranks of this host, and does not wait for them. bytes: at most
  // one_way_bytes.
  void pass_on(int from, char* data, size_t bytes);
  // Throws if a rank of this host has arrived at the first round with another call. Does not wait.
  void look_at_arrivals() const;
  // How to wait for other hosts.
  Wait away() { return {away_, wait_.deadline, wait_.sleep_ms}; }
  // Call this after this rank has read arrays of its peers, and before anybody relies on what it has read.
  void confirm_reads() const {
    if (arena_) arena_->confirm_reads();
  }
  // Returns the staging chunk of a rank for a step of this call.
  char* staged(int place, size_t step) const { return arena_->chunk(place, first_ + step); }
  // Returns whether x or out of this rank must go through staging, because the other ranks cannot access it.
  bool stages_x() const { return arena_ && arena_->posted(place()).x_offset == not_in_heap; }
  bool stages_out() const { return arena_ && arena_->posted(place()).out_offset == not_in_heap; }
  // Returns the x or the out of each rank of this host, or nullptr if it must go through staging. These functions may be called
  // after the first round. bytes: the size of the array, which is the same on all ranks.
  std::vector<char*> xs(size_t bytes) const { return arrays(bytes, &Post::x_offset); }
  std::vector<char*> outs(size_t bytes) const { return arrays(bytes, &Post::out_offset); }
  // Ends the call. steps: how many steps have used staging chunks. read: the arrays of the ranks that may have been read
  // directly; no rank leaves the call before all ranks have read them.
  void end(size_t steps, std::span<char* const> read = {});

 private:
  std::vector<char*> arrays(size_t bytes, uint64_t Post::* offset) const;
  // How to wait for other ranks of this host.
  Wait at_home() { return {watch_, wait_.deadline, mesh_.all_sent() ? longest_sleep_ms : 1}; }

  const Call& call_;
  const Layout& layout_;
  Arena* const arena_;
  Mesh& mesh_;
  const Wait& wait_;
  AtHome watch_;
  Away away_;
  const uint64_t first_;
  bool met_ = false;
};

}  // namespace mscomm
