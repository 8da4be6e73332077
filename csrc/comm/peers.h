// The ranks of the job as this process sees them in one epoch. All groups of the epoch share one Peers object. All vectors are
// indexed by job rank.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "transport/heap.h"

namespace mscomm {

struct Peers {
  Peers(std::vector<std::string> names, std::vector<int> hosts, std::vector<Descriptor> pidfds, std::shared_ptr<Heaps> heaps)
      : names(std::move(names)), hosts(std::move(hosts)), pidfds(std::move(pidfds)), heaps(std::move(heaps)) {}

  const std::vector<std::string> names;  // the name of each rank, such as "rank 3 (pid 4711 on host b)"
  const std::vector<int> hosts;          // the host number of each rank
  std::vector<Descriptor> pidfds;        // the pidfd of each rank; -1 for this rank and for ranks on other hosts
  const std::shared_ptr<Heaps> heaps;    // nullptr if no other rank is on this host
};

}  // namespace mscomm
