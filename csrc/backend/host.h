// The cpu backend: picks an algorithm and gives it the arena or the mesh.
#pragma once

#include <memory>
#include <optional>

#include "algo/algorithm.h"
#include "backend/backend.h"

namespace mscomm {

class HostBackend final : public Backend {
 public:
  HostBackend(Layout layout, Forced forced, std::unique_ptr<Arena> arena, std::unique_ptr<Mesh> mesh, std::shared_ptr<Heap> heap);

  void run(const Call& call, const Wait& wait) override;
  void shut_down() override;
  void withdraw(const Call& call) override;
  bool waiters_see_all() const override { return arena_ != nullptr; }
  void last_look() override;
  void close() override;
  void close_descriptors() override;

  // Which algorithm runs each collective, by name.
  std::vector<std::pair<std::string_view, std::string_view>> chosen() const;
  const Arena* arena() const { return arena_.get(); }

 private:
  Layout layout_;
  std::array<const Algorithm*, collectives.size()> chosen_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Mesh> mesh_;
  std::shared_ptr<Heap> heap_;
  std::vector<char> scratch_;
};

}  // namespace mscomm
