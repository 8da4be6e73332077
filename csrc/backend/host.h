// The cpu backend: picks an algorithm for each call, and gives it the arena, the mesh or both.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "algo/algorithm.h"
#include "backend/backend.h"
#include "transport/arena.h"
#include "transport/mesh.h"

namespace mscomm {

class HostBackend final : public Backend {
 public:
  HostBackend(Layout layout, Forced forced, std::unique_ptr<Arena> arena, std::unique_ptr<Mesh> mesh);

  void run(const Call& call, const Wait& wait) override;
  void shut_down() override;
  void withdraw(const Call& call) override;
  void last_look() override;
  void close() override;
  void close_descriptors() override;

  // The names of all collectives, each with the name of the algorithm that runs it for a message of `bytes` bytes.
  std::vector<std::pair<std::string_view, std::string_view>> chosen(size_t bytes) const;
  const Arena* arena() const { return arena_.get(); }
  // The total size in bytes of the x and out of all calls so far, for each carrier. A call that uses both carriers counts for
  // both carriers.
  struct Carried {
    std::atomic<uint64_t> arena{0}, mesh{0};
  };
  const Carried& carried() const { return carried_; }

 private:
  bool is_set_up(Carrier carrier) const;
  const Algorithm& algorithm_of(const Call& call) const {
    return pick(choices_[static_cast<size_t>(call.signature.what)], layout_, call.bytes());
  }

  Layout layout_;
  std::array<Choice, collectives.size()> choices_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Mesh> mesh_;
  Carried carried_;
  std::vector<char> scratch_;
};

}  // namespace mscomm
