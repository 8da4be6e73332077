#include "thread_group.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

namespace mscomm {

ThreadJob::ThreadJob(int size, std::vector<int> hosts) {
  const auto n = static_cast<size_t>(size);
  if (hosts.empty()) hosts.assign(n, 0);
  std::vector<std::string> names;
  for (int rank = 0; rank < size; rank++) {
    names.push_back("rank " + std::to_string(rank));
    const int fd = make_memory("test-heap", heap_bytes);
    memory_.emplace_back(fd, heap_bytes);
    heaps_.push_back(std::make_shared<Heap>(memory_.back().borrow()));
    close(fd);
  }
  for (int rank = 0; rank < size; rank++) {
    std::vector<Mapping> others(n);
    for (size_t other = 0; other < n; other++)
      if (static_cast<int>(other) != rank && hosts[other] == hosts[static_cast<size_t>(rank)])
        others[other] = memory_[other].borrow();
    auto all = std::make_shared<Heaps>(rank, heaps_[static_cast<size_t>(rank)], std::move(others));
    peers_.push_back(std::make_shared<Peers>(names, hosts, std::vector<Descriptor>(n), std::move(all)));
  }
}

std::vector<int> ThreadJob::all() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size(); rank++) ranks.push_back(rank);
  return ranks;
}

Call make_call(Collective what, Dtype dtype, int root, const void* x, size_t x_count, void* out, size_t out_count, size_t count) {
  Call call;
  call.signature.what = what;
  // The first values of Function are equal to the values of Collective.
  call.signature.function = static_cast<Function>(what);
  call.signature.dtype = dtype;
  call.signature.root = root;
  if (what != Collective::barrier) {
    call.signature.dims = 1;
    call.signature.shape[0] = call.signature.count = count;
  }
  call.x = x;
  call.x_bytes = x_count * size_of(dtype);
  call.out = out;
  call.out_bytes = out_count * size_of(dtype);
  return call;
}

void ThreadRank::all_reduce(const float* x, float* out, size_t count, double timeout_s) const {
  group->run(make_call(Collective::all_reduce, Dtype::float32, -1, x, count, out, count, count), timeout_s);
}

void ThreadRank::broadcast(const float* x, float* out, size_t count, int root, double timeout_s) const {
  group->run(make_call(Collective::broadcast, Dtype::float32, root, x, count, out, count, count), timeout_s);
}

void ThreadRank::barrier(double timeout_s) const {
  group->run(make_call(Collective::barrier, Dtype::uint8, -1, nullptr, 0, nullptr, 0, 0), timeout_s);
}

ThreadGroup::ThreadGroup(const ThreadJob& job, std::vector<int> ranks, const std::string& algorithm, bool spin)
    : job_(job), ranks_(std::move(ranks)) {
  const size_t n = ranks_.size();
  const int size = static_cast<int>(n);
  Forced forced;
  for (const Algorithm& row : algorithms())
    if (row.name == algorithm) forced[static_cast<size_t>(row.what)] = algorithm;
  std::vector<Layout> layouts;
  for (int rank = 0; rank < size; rank++) layouts.emplace_back(hosts(), rank, forced);

  const bool linked = layouts[0].mesh;
  std::vector<std::vector<int>> links(n, std::vector<int>(linked ? n : 0, -1));
  for (size_t a = 0; a < n && linked; a++)
    for (size_t b = a + 1; b < n; b++) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) throw system_error("socketpair", errno);
      constexpr int little = 64 << 10;  // small buffers, so that the sockets are often full
      for (const int end : ends) setsockopt(end, SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
      links[a][b] = ends[0], links[b][a] = ends[1];
    }
  for (int rank = 0; rank < size; rank++) {
    Layout& layout = layouts[static_cast<size_t>(rank)];
    uint64_t offset = 0;
    if (layout.arena) {
      int lowest = in_job(rank);
      for (const int other : layout.at_home()) lowest = std::min(lowest, in_job(other));
      Control& control = controls_[layout.here];
      if (!control.heap) {
        control = {&job_.heap(lowest), static_cast<int>(layout.at_home().size())};
        control.offset = Arena::reserve(*control.heap, control.size);
      }
      offset = control.offset;
    }
    const std::vector<int>& mine = links[static_cast<size_t>(rank)];
    Founding founding{"world", ranks_, std::move(layout), 0, offset, spin, {mine.begin(), mine.end()}};
    groups_.push_back(std::make_unique<Founded>(std::move(founding), job_.peers(in_job(rank)), nullptr));
  }
}

ThreadGroup::~ThreadGroup() {
  groups_.clear();
  for (const auto& [host, control] : controls_) Arena::release(*control.heap, control.offset, control.size);
}

int ThreadGroup::place_of(int rank) const {
  const auto found = std::find(ranks_.begin(), ranks_.end(), rank);
  return found == ranks_.end() ? -1 : static_cast<int>(found - ranks_.begin());
}

void ThreadGroup::run(const std::function<void(const ThreadRank&)>& body) const {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); rank++) threads.emplace_back([&, rank] { body(at(rank)); });
  for (std::thread& thread : threads) thread.join();
}

std::vector<int> ThreadGroup::hosts() const {
  std::vector<int> seen, hosts;
  for (int rank : ranks_) {
    const int host = host_of(rank);
    const auto found = std::find(seen.begin(), seen.end(), host);
    hosts.push_back(static_cast<int>(found - seen.begin()));
    if (found == seen.end()) seen.push_back(host);
  }
  return hosts;
}

void on_threads(int size, const std::string& algorithm, bool spin, const std::function<void(const ThreadRank&)>& body,
                std::vector<int> hosts) {
  const ThreadJob job(size, std::move(hosts));
  const ThreadGroup world(job, job.all(), algorithm, spin);
  world.run(body);
}

}  // namespace mscomm
