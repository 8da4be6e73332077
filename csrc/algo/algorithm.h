// An algorithm is a function in a file of its own in this folder. The table in registry.cc has one row for each collective that
// the function implements. select() returns the rows that a collective may use, and pick() chooses one of them for a call.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/call.h"
#include "net/wait.h"

namespace mscomm {

class Arena;
class Mesh;

// Says on which host each rank of a group runs. `rank` is this rank. All other fields have the same values on all ranks.
struct Layout {
  int rank = 0;
  int size = 1;
  // The number of each rank's host. Hosts are numbered in the order of their lowest ranks. Empty if all ranks are on one host.
  std::vector<int> host;

  int hosts() const;
  // Returns the number of this rank's host.
  int here() const { return host.empty() ? 0 : host[rank]; }
  // Returns whether there are several hosts, and at least one of them has several ranks.
  bool mixed() const { return hosts() > 1 && hosts() < size; }
};

// The carriers through which an algorithm moves data, and its scratch memory. The algorithm's row says whether it uses the arena,
// the mesh or both. The arena contains the group's ranks on this host. If there is no mesh, all ranks of the group are in the
// arena. If there is a mesh, `arena` is nullptr when this rank is alone on its host.
struct Ranks {
  const Layout& layout;
  Arena* arena;
  Mesh* mesh;
  std::vector<char>& scratch;  // a buffer that the calls of a group reuse

  char* scratch_of(size_t bytes) const {
    if (scratch.size() < bytes) scratch.resize(bytes);
    return scratch.data();
  }
};

enum class Carrier { arena, mesh, both };
inline constexpr std::array<std::string_view, 3> carriers{"arena", "mesh", "both"};
inline std::string_view name(Carrier carrier) { return carriers[static_cast<size_t>(carrier)]; }

struct Algorithm {
  std::string_view name;
  Collective what;
  Carrier carrier;
  void (*run)(const Call& call, const Ranks& ranks, const Wait& wait);
  // Returns whether this algorithm should run a call whose message has `bytes` bytes. nullptr if the algorithm accepts any size.
  bool (*fits)(const Layout& layout, size_t bytes) = nullptr;
};

std::span<const Algorithm> algorithms();

// For each collective, the algorithm that MSCOMM_ALGO names for it, or an empty string if MSCOMM_ALGO names none.
using Forced = std::array<std::string, collectives.size()>;

// select() returns the rows of the table that a collective may use. pick() then chooses the first of these rows whose `fits`
// accepts the size. If no row before the last one fits, pick() chooses the last row without calling its `fits`. The result of
// select() depends only on its arguments, so all ranks with the same layout and the same `forced` get the same rows. select()
// throws Error("ValueError") if a name in `forced` is unknown, or if the layout does not allow the forced algorithm.
using Choice = std::vector<const Algorithm*>;
Choice select(Collective what, const Layout& layout, const Forced& forced);
inline const Algorithm& pick(const Choice& rows, const Layout& layout, size_t bytes) {
  return **std::find_if(rows.begin(), rows.end() - 1, [&](const Algorithm* row) { return row->fits(layout, bytes); });
}

}  // namespace mscomm
