// An algorithm is a function in a file of its own in this folder. It has one row in the table in registry.cc for each collective
// that it implements. A group's Layout holds the rows that each collective may use, and chooses one of them for a call.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "algo/cost.h"
#include "base/call.h"
#include "net/wait.h"

namespace mscomm {

class Arena;
class Mesh;

struct Layout;

// What a group gives to an algorithm: the carriers that move the data, and scratch memory. The algorithm's row says whether the
// algorithm uses the arena, the mesh or both. The arena contains the group's ranks on this host. An algorithm for the arena alone
// runs only if these are all ranks of the group. An algorithm for both gets nullptr as `arena` if this rank is alone on its host.
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

// Algorithms with both carriers divide a staging chunk among all ranks of the group (see two_levels.h). Larger groups do not use
// them.
inline constexpr int most_on_two_levels = 8192;

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
  // What a call with a message of `bytes` bytes costs. nullptr if the choice does not depend on it.
  Cost (*cost)(const Layout& layout, double bytes) = nullptr;
  // Whether it adds in an order of its own, so that its bits differ from those of the other algorithms. Such an algorithm runs
  // only if MSCOMM_ALGO names it.
  bool own_order = false;
};

std::span<const Algorithm> algorithms();

// For each collective, the algorithm that MSCOMM_ALGO names for it, or an empty string if MSCOMM_ALGO names none.
using Forced = std::array<std::string, collectives.size()>;

// Says on which host each rank of a group runs, and which algorithms and carriers the group therefore uses. A group's layout is
// decided once, when the group is founded. The choice depends only on `host`, `forced` and `prices`, which are the same on all
// ranks, so all ranks choose the same algorithms.
struct Layout {
  // host: for each rank, the number of its host. Hosts are numbered in the order of their lowest ranks. Throws
  // Error("ValueError") if a name in `forced` is unknown. Also throws it if an algorithm for the arena is forced although there
  // are several hosts or an algorithm that uses the mesh is forced for another collective, and if a price is not valid.
  Layout(const std::vector<int>& host, int rank, const Forced& forced = {}, const Prices& prices = {});

  int rank;  // this rank
  int size;
  Prices prices;
  std::vector<std::vector<int>> hosts;  // the ranks of each host, lowest first
  // For each collective, the rows of the table that it may use, in the order of the table.
  std::array<std::vector<const Algorithm*>, collectives.size()> rows;
  // Whether this rank needs an arena, which it shares with the ranks in at_home(), and whether it needs a mesh. A rank that is
  // alone on its host never needs an arena.
  bool arena = false, mesh = false;
  size_t here;                 // the index of this rank's host in `hosts`
  int place = 0;               // the index of this rank in at_home()
  size_t fewest = 0;           // the number of ranks on the host with the fewest ranks
  std::vector<size_t> others;  // the other hosts, starting after this one, so that not all hosts send to the same host first

  const std::vector<int>& at_home() const { return hosts[here]; }
  // Returns the ranks to which this rank has links from the beginning. If the hosts have equally many ranks, and more than one,
  // these are the ranks at the same place on the other hosts, because most algorithms for both carriers use only these links.
  // Otherwise, they are all ranks. If MSCOMM_ALGO forces other algorithms, these set up the links that they need.
  std::vector<int> partners() const;
  // Returns whether mscomm chooses algorithms with this carrier for these hosts. MSCOMM_ALGO can force an algorithm for both
  // carriers even if allows() returns false.
  bool allows(Carrier carrier) const;
  // Returns the algorithm that runs this collective for a message of `bytes` bytes: the first row that fits the size and has no
  // cost, or else the row with the least cost.
  const Algorithm& chosen(Collective what, size_t bytes) const {
    const auto& all = rows[static_cast<size_t>(what)];
    return all.size() == 1 ? *all[0] : cheapest(all, bytes);
  }

 private:
  const Algorithm& cheapest(const std::vector<const Algorithm*>& all, size_t bytes) const;
};

}  // namespace mscomm
