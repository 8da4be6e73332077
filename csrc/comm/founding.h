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

// What was decided about a group when it was founded. Values that do not depend on the rank or its host are the same on all ranks
// of the group.
struct Founding {
  std::vector<int> ranks;  // the job rank of each rank of the group
  Layout layout;
  Forced forced;
  uint32_t epoch = 0;
  // The job rank of each rank of the group on this host. Empty if these ranks do not share an arena.
  std::vector<int> at_home;
  uint64_t control = 0;  // the offset of the arena's memory in the heap of the lowest rank in at_home
  bool spin = false;
  // One socket for each rank of the group, connected to that rank; -1 for this rank itself. found() takes ownership of the
  // sockets. Empty if the group has no mesh.
  std::vector<Descriptor> links;
};

// Sets up the arena and the mesh. recorded: see Mesh.
std::unique_ptr<HostBackend> found(Founding founding, const Peers& peers, Mesh::Recorded recorded);

}  // namespace mscomm
