// Sets up a group's carriers: its arena and its mesh.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "algo/algorithm.h"
#include "backend/host.h"
#include "base/descriptor.h"
#include "comm/peers.h"
#include "transport/mesh.h"

namespace mscomm {

// What was decided about a group when it was founded. All its ranks have the same values, except for members that concern only
// this rank.
struct Founding {
  std::vector<int> ranks;  // the job ranks of the group's ranks
  Layout layout;
  Forced forced;
  uint32_t epoch = 0;
  // The job ranks of the group's ranks on this host, if they share an arena. Otherwise empty.
  std::vector<int> at_home;
  uint64_t control = 0;  // the offset of the arena's memory in the heap of the lowest rank in at_home
  bool spin = false;
  // This rank's sockets to the other ranks of the group, with -1 for this rank itself. found() takes ownership of them. Empty if
  // there is no mesh.
  std::vector<Descriptor> links;
};

// Sets up the arena and the mesh. recorded: see Mesh.
std::unique_ptr<HostBackend> found(Founding founding, const Peers& peers, Mesh::Recorded recorded);

}  // namespace mscomm
