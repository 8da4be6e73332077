// A group whose ranks are threads of one process, over one mapping of the arena's memory, so that the sanitizers see all of it.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backend/host.h"
#include "comm/communicator.h"

namespace mscomm {

struct ThreadRank {
  int rank;
  Communicator* group;
  std::shared_ptr<Heap> heap;
  const Arena* arena;

  template <typename T>
  void all_reduce(const T* x, T* out, size_t count, Dtype dtype, double timeout_s = 60) const {
    run(Collective::all_reduce, dtype, -1, x, out, count, timeout_s);
  }
  void run(Collective what, Dtype dtype, int root, const void* x, void* out, size_t count, double timeout_s = 60) const {
    Signature signature;
    signature.what = what;
    signature.dtype = dtype;
    signature.root = root;
    const uint64_t shape[] = {count};
    group->run(signature, {shape, what == Collective::barrier ? size_t{0} : size_t{1}}, x, out, timeout_s);
  }
};

// Runs body on size threads, joined by an arena (algorithm "arena") or by socket pairs; hosts: the host of each rank.
inline void on_threads(int size, const std::string& algorithm, bool spin, const std::function<void(const ThreadRank&)>& body,
                       std::vector<int> hosts = {}) {
  const auto n = static_cast<size_t>(size);
  constexpr size_t heap_bytes = 64u << 20;
  if (hosts.empty()) hosts.assign(n, 0);
  Forced forced;
  for (const Algorithm& row : algorithms())
    if (row.name == algorithm) forced[static_cast<size_t>(row.what)] = algorithm;

  const bool arena = algorithm == "arena";
  const int control_fd = make_memory("test-control", Arena::control_bytes(size));
  const Mapping control(control_fd, Arena::control_bytes(size));
  std::vector<Mapping> heap_memory;
  std::vector<std::shared_ptr<Heap>> heaps;
  for (size_t rank = 0; rank < n; rank++) {
    const int fd = make_memory("test-heap", heap_bytes);
    heap_memory.emplace_back(fd, heap_bytes);
    heaps.push_back(std::make_shared<Heap>(heap_memory.back().borrow()));
    close(fd);
  }
  close(control_fd);

  std::vector<std::vector<std::optional<Stream>>> links(n);
  for (auto& row : links) row.resize(n);
  for (size_t a = 0; a < n && !arena; a++)
    for (size_t b = a + 1; b < n; b++) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) throw system_error("socketpair", errno);
      links[a][b].emplace(ends[0], "rank " + std::to_string(b));
      links[b][a].emplace(ends[1], "rank " + std::to_string(a));
    }

  std::vector<std::unique_ptr<Recorder>> recorders;
  std::vector<std::unique_ptr<Communicator>> groups;
  std::vector<const Arena*> arenas;
  for (size_t rank = 0; rank < n; rank++) {
    recorders.push_back(std::make_unique<Recorder>());
    Recorder& recorder = *recorders.back();
    std::unique_ptr<Arena> own;
    std::unique_ptr<Mesh> mesh;
    if (arena) {
      std::vector<Mapping> mapped;
      for (const Mapping& memory : heap_memory) mapped.push_back(memory.borrow());
      own = std::make_unique<Arena>(static_cast<int>(rank), size, control.borrow(), heaps[rank], std::move(mapped), spin);
    } else {
      mesh = std::make_unique<Mesh>(static_cast<int>(rank), 0, std::move(links[rank]), [&recorder](uint64_t number) {
        const auto record = recorder.find(number);
        return record ? std::optional(record->signature) : std::nullopt;
      });
    }
    arenas.push_back(own.get());
    std::vector<std::string> names;
    for (size_t peer = 0; peer < n; peer++) names.push_back("rank " + std::to_string(peer));
    auto backend = std::make_unique<HostBackend>(Layout{static_cast<int>(rank), size, hosts}, forced, std::move(own),
                                                 std::move(mesh), heaps[rank]);
    groups.push_back(std::make_unique<Communicator>("world", static_cast<int>(rank),
                                                    Communicator::Peers{std::move(names), std::vector<int>(n, -1)},
                                                    std::move(backend), recorder, Communicator::Hooks{}));
  }
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < n; rank++)
    threads.emplace_back([&, rank] { body({static_cast<int>(rank), groups[rank].get(), heaps[rank], arenas[rank]}); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mscomm
