// Runs the ranks of a job as threads of one process. The ranks share one mapping of each heap, so that each byte has only one
// address. If each rank had a mapping of its own, ThreadSanitizer would miss the races between ranks.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/founding.h"

namespace mscomm {

// Holds the heaps of a job's ranks, and what each rank knows about the other ranks.
class ThreadJob {
 public:
  static constexpr size_t heap_bytes = 128u << 20;  // untouched pages of a heap use no memory

  // hosts: the host of each rank. If `hosts` is empty, all ranks are on one host.
  explicit ThreadJob(int size, std::vector<int> hosts = {});

  int size() const { return static_cast<int>(heaps_.size()); }
  Heap& heap(int rank) const { return *heaps_[static_cast<size_t>(rank)]; }
  const std::shared_ptr<Peers>& peers(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  std::vector<int> all() const;

 private:
  std::vector<Mapping> memory_;
  std::vector<std::shared_ptr<Heap>> heaps_;
  std::vector<std::shared_ptr<Peers>> peers_;
};

// Returns a call without counts.
Call make_call(Collective what, Dtype dtype, int root, const void* x, size_t x_count, void* out, size_t out_count, size_t count);

struct ThreadRank {
  int rank;  // the rank's number in the group
  Communicator* group;
  Heap* heap;

  void all_reduce(const float* x, float* out, size_t count, double timeout_s = 60) const;
  void broadcast(const float* x, float* out, size_t count, int root, double timeout_s = 60) const;
  void barrier(double timeout_s = 60) const;
};

// A group of some or all ranks of a job. Every collective that the given algorithm implements uses this algorithm. If the group's
// layout needs a mesh, socket pairs connect the ranks.
class ThreadGroup {
 public:
  ThreadGroup(const ThreadJob& job, std::vector<int> ranks, const std::string& algorithm, bool spin);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  Layout layout() const { return {hosts(), 0}; }
  ThreadRank at(int rank) const { return {rank, &groups_[rank]->communicator(), &job_.heap(in_job(rank))}; }
  // Converts a rank of the job to a rank of the group. Returns -1 if the group does not contain the rank.
  int place_of(int rank) const;
  // Runs body for each rank, on a thread of its own.
  void run(const std::function<void(const ThreadRank&)>& body) const;

 private:
  int in_job(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  int host_of(int rank) const { return job_.peers(rank)->hosts[static_cast<size_t>(rank)]; }
  // Returns the host of each rank. The hosts are numbered in the order of their lowest ranks in the group.
  std::vector<int> hosts() const;

  const ThreadJob& job_;
  std::vector<int> ranks_;
  struct Control {
    Heap* heap = nullptr;
    int size = 0;
    uint64_t offset = 0;
  };
  std::map<size_t, Control> controls_;  // for each host, the control memory of its arena
  std::vector<std::unique_ptr<Founded>> groups_;
};

// Creates a job and its world, and runs body for each rank, on a thread of its own.
void on_threads(int size, const std::string& algorithm, bool spin, const std::function<void(const ThreadRank&)>& body,
                std::vector<int> hosts = {});

}  // namespace mscomm
