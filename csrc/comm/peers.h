// The ranks of the job as this process sees them in one epoch. All groups share one Peers object. All vectors are indexed by job
// rank.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/heap.h"

namespace mscomm {

// Descriptors that this object owns. A descriptor whose ownership is passed on is replaced with -1. The destructor closes the
// others.
struct Descriptors {
  explicit Descriptors(std::vector<int> fds) : fds(std::move(fds)) {}
  Descriptors(Descriptors&& other) noexcept : fds(std::exchange(other.fds, {})) {}
  ~Descriptors() {
    for (const int fd : fds)
      if (fd >= 0) ::close(fd);
  }
  std::vector<int> fds;
};

struct Peers {
  Peers(std::vector<std::string> names, std::vector<int> hosts, std::vector<int> pidfds, std::shared_ptr<Heaps> heaps)
      : names(std::move(names)), hosts(std::move(hosts)), pidfds(std::move(pidfds)), heaps(std::move(heaps)) {}
  ~Peers() { close_descriptors(); }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  void close_descriptors() {
    for (int& fd : pidfds)
      if (fd >= 0) ::close(std::exchange(fd, -1));
  }

  const std::vector<std::string> names;  // the name of each rank, such as "rank 3 (pid 4711 on host b)"
  const std::vector<int> hosts;          // the host number of each rank
  std::vector<int> pidfds;               // the pidfd of each rank; -1 for this rank and for ranks on other hosts
  const std::shared_ptr<Heaps> heaps;    // nullptr if no other rank is on this host
};

}  // namespace mscomm
