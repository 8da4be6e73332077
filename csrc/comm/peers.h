// The ranks of the job as this process sees them in one epoch. All groups share one Peers object. All vectors are indexed by rank
// of the job.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/heap.h"

namespace mscomm {

struct Peers {
  Peers(int rank, std::vector<std::string> names, std::vector<int> hosts, std::vector<int> pidfds, std::shared_ptr<Heaps> heaps)
      : rank(rank), names(std::move(names)), hosts(std::move(hosts)), pidfds(std::move(pidfds)), heaps(std::move(heaps)) {}
  ~Peers() { close_descriptors(); }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  void close_descriptors() {
    for (int& fd : pidfds)
      if (fd >= 0) ::close(std::exchange(fd, -1));
  }

  const int rank;
  const std::vector<std::string> names;  // the name of each rank, such as "rank 3 (pid 4711 on host b)"
  const std::vector<int> hosts;          // the number of each rank's host
  std::vector<int> pidfds;               // the pidfd of each rank; -1 for this rank and for ranks on other hosts
  const std::shared_ptr<Heaps> heaps;    // nullptr if no other rank is on this host
};

}  // namespace mscomm
