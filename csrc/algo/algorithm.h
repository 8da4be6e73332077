// Each algorithm is one file in this folder and one row in registry.cc. select() lists the rows for a collective, and pick()
// chooses one of them for a call.
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

// Which rank runs on which host. All members except `rank` are equal on all ranks.
struct Layout {
  int rank = 0;
  int size = 1;
  std::vector<int> host;  // the host of each rank; hosts are numbered in the order of their lowest ranks

  int hosts() const;
  // This rank's host.
  int here() const { return host.empty() ? 0 : host[rank]; }
  // Whether there are several hosts, and at least one of them has several ranks.
  bool mixed() const { return hosts() > 1 && hosts() < size; }
};

// What an algorithm may use. Its carrier says whether it uses the arena, the mesh or both. The arena has the ranks of the group
// on this host. Without a mesh, these are all ranks of the group. With a mesh, arena is nullptr if this rank is alone on its
// host.
struct Ranks {
  const Layout& layout;
  Arena* arena;
  Mesh* mesh;
  std::vector<char>& scratch;  // reused from call to call

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
  // Whether this is the best algorithm of its carrier for a message of that many bytes. nullptr: it accepts any size.
  bool (*fits)(const Layout& layout, size_t bytes) = nullptr;
};

std::span<const Algorithm> algorithms();

// The algorithm that MSCOMM_ALGO names for each collective; empty: select() chooses.
using Forced = std::array<std::string, collectives.size()>;

// The rows that a collective may use, in the order in which pick() asks their `fits`. If no other row fits, pick() chooses the
// last row without asking it. select() is pure: all ranks with the same layout and forced names get the same rows. It throws
// Error("ValueError") for a name that is unknown or that the layout does not allow.
using Choice = std::vector<const Algorithm*>;
Choice select(Collective what, const Layout& layout, const Forced& forced);
inline const Algorithm& pick(const Choice& rows, const Layout& layout, size_t bytes) {
  return **std::find_if(rows.begin(), rows.end() - 1, [&](const Algorithm* row) { return row->fits(layout, bytes); });
}

}  // namespace mscomm
