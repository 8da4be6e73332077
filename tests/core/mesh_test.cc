// Tests the mesh and its algorithms. Also tests that a rank refuses invalid data from a peer. The ranks are threads connected by
// socket pairs.
#include <linux/tcp.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "algo/mesh_steps.h"
#include "check.h"
#include "collective_cases.h"
#include "tcp_pair.h"
#include "thread_group.h"

using namespace mscomm;

namespace {

std::vector<Memory> memories(const std::string& algorithm) {
  if (algorithm == "hierarchical" && test::only_races) return {Memory::mixed};
  if (algorithm == "hierarchical") return {Memory::ours, Memory::heap, Memory::mixed};
  return {Memory::ours};
}

void every_collective_by(const std::string& algorithm) {
  for (int size : sizes_of_groups()) {
    // A race is between the threads of one rank or, with the hierarchical algorithm, also between the ranks of one host. For
    // these, hosts_are_added_in_order() has more layouts.
    if (test::only_races && size != 3) continue;
    if (size == 5) continue;  // 3 ranks take the same branches
    // Only the last size is larger than a window. With 3 ranks, each part of an all_reduce of this size spans several windows,
    // which is more than the sockets can buffer.
    std::vector<size_t> sizes{0, 1, 7, 1000, (size == 3 ? 12 : 2) * window_bytes / 4 + 5};
    if (test::only_races) sizes = {7, (size == 3 ? 6 : 2) * window_bytes / 4 + 5};  // two windows in each part
    const auto kinds = size == 3 ? memories(algorithm) : std::vector{memories(algorithm).back()};
    const ThreadJob job(size);
    const ThreadGroup world(job, job.all(), algorithm, false);
    // A ring adds in a different order, which makes no difference for integers.
    const Inputs inputs(world.layout(), algorithm == "ring" ? Dtype::int32 : Dtype::float32, 2 * sizes.back() + 100);
    world.run([&](const ThreadRank& me) { every_case(me, algorithm, inputs, sizes, kinds); });
  }
}

// Numbers are added in rank order within a host. Then the hosts' sums are added in a tree, in the order of the hosts' lowest
// ranks, even if the ranks alternate between hosts.
void hosts_are_added_in_order(const std::string& algorithm) {
  for (const std::vector<int>& hosts :
       {std::vector{0, 1, 0, 1, 2}, std::vector{0, 1, 0, 1}, std::vector{0, 0, 1, 1, 1}, std::vector{0, 0, 0, 0, 1, 2},
        std::vector{0, 1, 2, 3}, std::vector{0, 1, 2, 1, 3, 4, 5}}) {
    // One layout with alternating hosts, and one with consecutive ranks, which takes other branches. The message of two chunks
    // still needs several steps.
    if (test::only_races && (algorithm != "hierarchical" || hosts.size() == 4 || hosts.size() == 7 || hosts[2] == 1)) continue;
    const bool in_a_tree = *std::ranges::max_element(hosts) >= 3;
    const auto reduces = [](Collective what) { return what == Collective::all_reduce || what == Collective::reduce; };
    if (in_a_tree && std::ranges::none_of(collectives_by(algorithm), reduces)) continue;
    const ThreadJob job(static_cast<int>(hosts.size()), hosts);
    const ThreadGroup world(job, job.all(), algorithm, false);
    std::vector<size_t> sizes{7, 1000, 5000};
    if (in_a_tree) sizes = {1000};
    // Several steps. One of the layouts, with hosts of different sizes, is enough.
    if (algorithm == "hierarchical" && hosts.size() == 5 && hosts[4] == 2) sizes.push_back(chunk_bytes / 2 + 5);
    if (test::only_races) sizes = {7, hosts.size() == 5 ? chunk_bytes / 2 : 5000};
    const auto kinds = hosts.size() == 4 ? memories(algorithm) : std::vector{memories(algorithm).back()};
    const Inputs inputs(world.layout(), Dtype::float32, 2 * sizes.back() + 100);
    world.run([&](const ThreadRank& me) { every_case(me, algorithm, inputs, sizes, kinds); });
  }
}

// Sums of small whole numbers are exact in any order. A ring adds in a different order than the other algorithms.
void whole_numbers_are_exact(const ThreadRank& me, size_t count) {
  const auto n = static_cast<size_t>(me.group->size());
  std::vector<float> x(count), out(count);
  for (size_t i = 0; i < count; i++) x[i] = static_cast<float>(me.rank + static_cast<int>(i % 17));
  me.all_reduce(x.data(), out.data(), count);
  for (size_t i = 0; i < count; i++)
    if (!CHECK(out[i] == static_cast<float>(n * (n - 1) / 2 + n * (i % 17)))) return;
}

// A message of two windows, where some ranks act for others.
void windows_follow_one_another(const std::string& algorithm) {
  const ThreadJob job(7, {0, 1, 2, 1, 3, 4, 5});
  ThreadGroup(job, job.all(), algorithm, false).run([](const ThreadRank& me) {
    whole_numbers_are_exact(me, (4 << 20) / 4 + 500);
  });
}

void started_calls_keep_their_order(const ThreadRank& me) {
  constexpr size_t count = 1000;
  std::vector<float> a(count, 1.0f), b(count), c(count);
  for (int repeat = 0; repeat < 20; repeat++) {
    const auto work =
        me.group->start(make_call(Collective::all_reduce, Dtype::float32, -1, a.data(), count, b.data(), count, count), 60);
    me.broadcast(b.data(), c.data(), count, repeat % 3);
    CHECK(std::count(c.begin(), c.end(), 3.0f) == static_cast<long>(count));
    CHECK(work->wait(60) && !work->error());
  }
}

// Each of two ranks thinks that the other is the root, so they wait for each other. Each waiting rank sends a header, from which
// the other rank detects the mismatch.
void crossed_roots(const ThreadRank& me) {
  float x[3] = {}, out[3];
  std::string kind;
  try {
    me.broadcast(x, out, 3, 1 - me.rank);
    me.barrier();
  } catch (const Error& error) {
    kind = error.kind;
  }
  CHECK(kind == "Mismatch" || kind == "PeerLost");  // without a hub, the second rank to fail sometimes sees only a closed link
}

// last_look() reads headers from the links only while no call can be using the links.
void last_look_leaves_running_calls_alone(const ThreadRank& me) {
  constexpr size_t count = 3000;
  std::vector<float> x(count, 1.0f), out(count);
  std::atomic<bool> over{false};
  std::thread looks([&] {
    while (!over) me.group->last_look();
  });
  for (int i = 0; i < 200; i++) me.all_reduce(x.data(), out.data(), count);
  over = true;
  looks.join();
  CHECK(std::count(out.begin(), out.end(), 3.0f) == static_cast<long>(count));
}

struct NeverBroken final : Watch {
  void look(const Deadline& deadline, const Missing&) override {
    if (deadline.passed()) throw Error("CollectiveTimeout", "deadline");
  }
  bool broken() const override { return false; }
};

// The messages that a rank sends in a call, and the bytes that it receives, without headers. In the calls below except broadcast,
// each rank receives as much as it sends.
struct Sent {
  uint64_t messages;
  double bytes;
};

// Runs a call with an x of `bytes` bytes on n ranks, each on a host of its own. Returns what the rank that sends most has sent.
Sent most_sent(const Algorithm& row, int n, size_t bytes) {
  const auto size = static_cast<size_t>(n);
  std::vector<std::vector<std::optional<Stream>>> links(size);
  for (auto& row_of_links : links) row_of_links.resize(size);
  std::vector<std::vector<int>> sockets(size);
  for (size_t a = 0; a < size; a++)
    for (size_t b = a + 1; b < size; b++) {
      const auto ends = tcp_pair();
      links[a][b].emplace(ends[0], "peer"), links[b][a].emplace(ends[1], "peer");
      sockets[a].push_back(ends[0]), sockets[b].push_back(ends[1]);
    }
  std::vector<int> hosts, names;
  for (int rank = 0; rank < n; rank++) hosts.push_back(rank), names.push_back(rank);
  std::vector<Sent> sent(size);
  std::barrier all_returned(n);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < size; rank++)
    threads.emplace_back([&, rank] {
      const int me = static_cast<int>(rank);
      const Layout layout(hosts, me);
      Mesh mesh(names, me, 0, false, std::move(links[rank]), [](uint64_t) { return std::nullopt; });
      const size_t count = row.what == Collective::reduce_scatter ? bytes / size : bytes;
      std::vector<uint8_t> x(bytes), out(row.what == Collective::all_gather ? size * bytes : count);
      const int root = row.what == Collective::broadcast ? 0 : -1;
      Call call = make_call(row.what, Dtype::uint8, root, x.data(), bytes, out.data(), out.size(), bytes);
      call.signature.number = 1;
      std::vector<char> scratch;
      NeverBroken watch;
      mesh.begin(call.signature);
      row.run(call, {layout, nullptr, &mesh, scratch}, {watch, Deadline(60)});
      sent[rank].messages = mesh.queued();
      all_returned.arrive_and_wait();
      for (const int socket : sockets[rank]) {
        tcp_info info{};
        socklen_t length = sizeof info;
        CHECK(getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) == 0);
        if (info.tcpi_bytes_received > 0) sent[rank].bytes += static_cast<double>(info.tcpi_bytes_received - sizeof(Header));
      }
      all_returned.arrive_and_wait();  // the end of a link counts as a byte
      mesh.close(60);
    });
  for (std::thread& thread : threads) thread.join();
  Sent most{};
  for (const Sent& one : sent) most = {std::max(most.messages, one.messages), std::max(most.bytes, one.bytes)};
  return most;
}

// The model of an algorithm is right about its messages and bytes. A message of more than a window counts as several turns, so
// messages are counted only in short calls. In a broadcast, the cost is that of a path through several ranks. It has the messages
// of the root of a tree, and one message of each rank of a chain.
void costs_are_what_is_sent() {
  for (const Algorithm& row : algorithms())
    for (const int n : {3, 8}) {
      if (!row.cost) continue;
      const bool is_broadcast = row.what == Collective::broadcast;
      const double ranks_on_path = row.name == "ring" && is_broadcast ? n - 1 : 1;
      std::vector<int> hosts(static_cast<size_t>(n));
      std::iota(hosts.begin(), hosts.end(), 0);
      // A rank that acts for another one waits for its message first. This rank sends no message then.
      const bool waits = (row.name == "doubling" || row.name == "halving") && !std::has_single_bit(static_cast<unsigned>(n));
      for (const size_t each : {64, 100'032}) {
        const size_t bytes = static_cast<size_t>(n) * each;
        const Cost cost = row.cost(Layout(hosts, 0), static_cast<double>(bytes));
        const Sent sent = most_sent(row, n, bytes);
        if (each <= 4096) CHECK(static_cast<double>(sent.messages) * ranks_on_path + waits == cost.messages);
        // At the end, this rank sends that other rank its result.
        const double result = static_cast<double>(row.what == Collective::reduce_scatter ? each : bytes);
        const double received = sent.bytes + (waits ? result : 0);
        // halving cuts parts again and again, at multiples of 64 bytes.
        const double cuts = row.name == "halving" ? 64 * doublings(n) : 0;
        if (!is_broadcast) CHECK(std::abs(received - cost.bytes) <= 1e-9 * cost.bytes + cuts);
      }
    }
}

// Prices decide the choice, and prices that make no sense are refused.
void prices_decide() {
  const std::vector<int> hosts{0, 1, 2, 3};
  const auto chosen = [&](const Prices& prices) { return Layout(hosts, 0, {}, prices).chosen(Collective::all_reduce, 8).name; };
  CHECK(chosen({}) == "direct");
  CHECK(chosen({.latency_us = 1, .message_us = 20}) == "doubling");
  for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
    std::string kind;
    try {
      chosen({.byte_ns = wrong});
    } catch (const Error& error) {
      kind = error.kind;
    }
    CHECK(kind == "ValueError");
  }
}

// A peer sends a header with one changed byte. Whichever byte it is, the call ends with Error or Differs. The header never
// crashes the rank and is never mistaken for data.
void garbage_is_refused() {
  std::mt19937 random(3);
  int refused = 0;
  constexpr int tries = 400;
  for (int i = 0; i < tries; i++) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    std::vector<std::optional<Stream>> links(2);
    links[1].emplace(ends[0], "rank 1");
    Mesh mesh({0, 1}, 0, 0, false, std::move(links), [](uint64_t) { return std::nullopt; });

    Signature mine;
    mine.number = 5;
    mine.what = Collective::broadcast;
    mine.root = 1;
    mine.count = 16;
    Header header;
    header.source = 1;
    header.payload = 1;
    header.signature = mine;
    auto* bytes = reinterpret_cast<unsigned char*>(&header);
    // Change one byte anywhere. If this makes the header's call number larger than ours, there is no
    // mismatch: the header is kept for a later call, and this call ends with an Error.
    const size_t at = random() % sizeof(Header);
    bytes[at] = static_cast<unsigned char>(bytes[at] + 1 + random() % 255);
    CHECK(send(ends[1], bytes, sizeof header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof header));
    close(ends[1]);
    char data[16];
    const Piece piece{1, data, sizeof data};
    NeverBroken watch;
    try {
      mesh.begin(mine);
      mesh.exchange({}, {&piece, 1}, {watch, Deadline(0.2)});
    } catch (const Error&) {
      refused++;
    } catch (const Differs&) {
      refused++;
    }
  }
  CHECK(refused == tries);
}

// A call that consists of many short steps notices its deadline, even if the data for each step is available immediately.
void deadline_ends_a_call_while_bytes_flow() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  Header header;
  header.source = 1;
  header.payload = 1;
  header.signature.number = 1;
  std::thread peer([&] {
    const std::vector<char> data(1 << 16);
    bool listens = send(ends[1], &header, sizeof header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof header);
    while (listens) listens = send(ends[1], data.data(), data.size(), MSG_NOSIGNAL) > 0;
  });
  std::string kind;
  {
    std::vector<std::optional<Stream>> links(2);
    links[1].emplace(ends[0], "rank 1");
    Mesh mesh({0, 1}, 0, 0, false, std::move(links), [](uint64_t) { return std::nullopt; });
    mesh.begin(header.signature);
    char data[64];
    const Piece piece{1, data, sizeof data};
    NeverBroken watch;
    const Deadline deadline(0.2), far(30);
    try {
      while (!far.passed()) mesh.exchange({}, {&piece, 1}, {watch, deadline});
    } catch (const Error& error) {
      kind = error.kind;
    }
  }
  CHECK(kind == "CollectiveTimeout");
  peer.join();
  close(ends[1]);
}

// A rank sends to its peers in turn. A peer that reads nothing must not keep the other peers from getting their data.
void nobody_waits_behind_a_peer_that_takes_nothing() {
  int first[2], second[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, first) == 0);
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, second) == 0);
  std::vector<char> data(8 << 20, 'x');
  std::thread peers([&, all = sizeof(Header) + data.size()] {
    std::vector<char> got(all);
    CHECK(recv(second[1], got.data(), all, MSG_WAITALL) == static_cast<ssize_t>(all));
    CHECK(recv(first[1], got.data(), all, MSG_WAITALL) == static_cast<ssize_t>(all));
  });
  std::vector<std::optional<Stream>> links(3);
  links[1].emplace(first[0], "rank 1");
  links[2].emplace(second[0], "rank 2");
  Mesh mesh({0, 1, 2}, 0, 0, false, std::move(links), [](uint64_t) { return std::nullopt; });
  Signature call;
  call.number = 1;
  mesh.begin(call);
  std::vector<Piece> out;
  for (int peer : {1, 2}) out.push_back({peer, data.data(), data.size()});
  NeverBroken watch;
  std::string kind;
  try {
    mesh.exchange(out, {}, {watch, Deadline(60)});
  } catch (const Error& error) {
    kind = error.kind;
    mesh.shut_down();
  }
  CHECK(kind == "");
  peers.join();
  close(first[1]);
  close(second[1]);
}

// A peer that reads only a little now and then must not hold up the other peers.
void nobody_waits_behind_a_slow_reader() {
  const auto slow = tcp_pair(), fast = tcp_pair();
  std::vector<char> data(16 << 20, 'x');
  const size_t all = sizeof(Header) + data.size();
  std::atomic<size_t> slow_got{0};
  std::atomic<bool> fast_has_all{false};
  std::thread slow_reader([&] {
    std::vector<char> got(all);
    while (slow_got < all) {
      const size_t now = std::min<size_t>(64 << 10, all - slow_got);
      CHECK(recv(slow[1], got.data(), now, MSG_WAITALL) == static_cast<ssize_t>(now));
      slow_got += now;
      if (!fast_has_all) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  size_t slow_had = all;
  std::thread fast_reader([&] {
    std::vector<char> got(all);
    CHECK(recv(fast[1], got.data(), all, MSG_WAITALL) == static_cast<ssize_t>(all));
    slow_had = slow_got;
    fast_has_all = true;
  });
  std::vector<std::optional<Stream>> links(3);
  links[1].emplace(slow[0], "rank 1");
  links[2].emplace(fast[0], "rank 2");
  Mesh mesh({0, 1, 2}, 0, 0, false, std::move(links), [](uint64_t) { return std::nullopt; });
  Signature call;
  call.number = 1;
  mesh.begin(call);
  std::vector<Piece> out;
  for (int peer : {1, 2}) out.push_back({peer, data.data(), data.size()});
  NeverBroken watch;
  mesh.exchange(out, {}, {watch, Deadline(120)});
  fast_reader.join();
  slow_reader.join();
  CHECK(slow_had < all / 2);
  for (const int end : {slow[1], fast[1]}) close(end);
}

// On a Unix socket, data that was sent still arrives if the sender closes the socket before the receiver reads. So a rank that
// leaves does not wait for the receiver.
void leaving_waits_for_no_reader() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  std::vector<std::optional<Stream>> links(2);
  links[1].emplace(ends[0], "rank 1");
  Mesh mesh({0, 1}, 0, 0, false, std::move(links), [](uint64_t) { return std::nullopt; });
  Signature call;
  call.number = 1;
  mesh.begin(call);
  char data[64] = {1, 2, 3}, got[sizeof(Header) + sizeof data];
  const Piece piece{1, data, sizeof data};
  NeverBroken watch;
  mesh.exchange({&piece, 1}, {}, {watch, Deadline(60)});
  const auto began = Clock::now();
  mesh.close(60);
  CHECK(seconds_since(began) < 30);
  CHECK(recv(ends[1], got, sizeof got, MSG_WAITALL) == static_cast<ssize_t>(sizeof got));
  CHECK(std::memcmp(got + sizeof(Header), data, sizeof data) == 0);
  close(ends[1]);
}

// Sets up links as Python does: when a mesh wants one.
class Dialler {
 public:
  explicit Dialler(const std::vector<Mesh*>& meshes) : thread_([this, meshes] { serve(meshes); }) {}
  ~Dialler() {
    over_ = true;
    thread_.join();
  }
  // The pairs (rank, peer) of all links that were wanted.
  std::vector<std::pair<int, int>> wanted;

 private:
  void serve(const std::vector<Mesh*>& meshes) {
    while (!over_) {
      for (Mesh* mesh : meshes)
        for (const int peer : mesh->wanted()) {
          wanted.emplace_back(mesh->rank(), peer);
          const auto ends = tcp_pair();
          mesh->expect(peer);
          mesh->add(peer, Stream(ends[0], "peer"));
          meshes[static_cast<size_t>(peer)]->add(mesh->rank(), Stream(ends[1], "peer"));
        }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::atomic<bool> over_{false};
  std::thread thread_;
};

std::unique_ptr<Mesh> without_links(int size, int rank) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<Mesh>(ranks, rank, 0, false, std::vector<std::optional<Stream>>(ranks.size()),
                                [](uint64_t) { return std::nullopt; });
}

// All ranks exchange data with all others, over links that do not exist yet. For each link, only the higher rank asks.
void links_are_set_up_when_they_are_needed() {
  constexpr int size = 4;
  constexpr size_t bytes = 300'000;
  std::vector<std::unique_ptr<Mesh>> meshes;
  std::vector<Mesh*> all;
  for (int rank = 0; rank < size; rank++) all.push_back(meshes.emplace_back(without_links(size, rank)).get());
  Dialler dialler(all);
  std::vector<std::thread> threads;
  for (Mesh* const mesh : all)
    threads.emplace_back([mesh] {
      std::vector<char> own(bytes, static_cast<char>(mesh->rank() + 1)), others(bytes * size);
      NeverBroken watch;
      for (uint64_t number = 1; number <= 3; number++) {
        Signature call;
        call.number = number;
        mesh->begin(call);
        std::vector<Piece> out, in;
        for (int peer = 0; peer < size; peer++) {
          if (peer == mesh->rank()) continue;
          out.push_back({peer, own.data(), own.size()});
          in.push_back({peer, &others[static_cast<size_t>(peer) * bytes], bytes});
        }
        mesh->exchange(out, in, {watch, Deadline(60)});
        for (const Piece& piece : in) CHECK(std::count(piece.data, piece.data + bytes, piece.peer + 1) == bytes);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(dialler.wanted.size() == size * (size - 1) / 2);
  for (const auto& [rank, peer] : dialler.wanted) CHECK(rank > peer);
}

// A rank that sends to a higher rank gets a link although that rank makes no call. Both learn from the link that their calls
// differ.
void a_lower_rank_that_waits_asks_for_the_link() {
  const auto low = without_links(2, 0), high = without_links(2, 1);
  Dialler dialler({low.get(), high.get()});
  Signature call;
  call.number = 1;
  call.what = Collective::broadcast;
  low->begin(call);
  char data[64] = {};
  const Piece piece{1, data, sizeof data};
  NeverBroken watch;
  low->exchange({&piece, 1}, {}, {watch, Deadline(60)});
  call.what = Collective::barrier;
  bool differs = false;
  try {
    high->begin(call);
    for (const Deadline soon(60); !soon.passed();) high->last_look();
  } catch (const Differs&) {
    differs = true;
  }
  CHECK(differs);
}

// A rank that waits for a link tells its Watch whether the link is being set up. It stops when the group breaks.
void the_wait_for_a_link_ends() {
  struct Asked final : Watch {
    void look(const Deadline&, const Missing& missing) override {
      CHECK(missing() == std::vector{0});
      linked = missing.linked(0);
      if (++looks == 3) throw Error("Aborted", "enough");
    }
    bool broken() const override { return is_broken; }
    int looks = 0;
    bool linked = true;
    std::atomic<bool> is_broken{false};
  } watch;
  const auto mesh = without_links(2, 1);
  Signature call;
  call.number = 1;
  mesh->begin(call);
  char data[64];
  const Piece piece{0, data, sizeof data};
  for (const bool expected : {false, true}) {
    watch.looks = 0;
    if (expected) mesh->expect(0);
    try {
      mesh->receive({&piece, 1}, {watch, Deadline(60)});
      CHECK(false);
    } catch (const Error&) {
    }
    CHECK(watch.linked == expected);
  }
  watch.looks = 0;
  std::thread aborts([&] {
    watch.is_broken = true;
    mesh->shut_down();
  });
  try {
    mesh->receive({&piece, 1}, {watch, Deadline(60)});
  } catch (const Error&) {
  }
  aborts.join();
  CHECK(watch.looks == 3);
  const auto ends = tcp_pair();
  mesh->add(0, Stream(ends[0], "peer"));  // too late
  CHECK(recv(ends[1], data, 1, 0) == 0);
  close(ends[1]);
}

}  // namespace

SUITE(mesh) {
  std::vector<std::string> names;
  for (const Algorithm& row : algorithms())
    if (row.carrier != Carrier::arena && std::find(names.begin(), names.end(), row.name) == names.end())
      names.emplace_back(row.name);
  for (const std::string& algorithm : names) {
    // A race is between threads of a rank or between ranks of a host, and not in how an algorithm uses its links.
    if (test::only_races && algorithm != "direct" && algorithm != "hierarchical") continue;
    every_collective_by(algorithm);
    if (algorithm != "ring") hosts_are_added_in_order(algorithm);
    on_threads(3, algorithm, false, started_calls_keep_their_order);
  }
  on_threads(5, "ring", false, [](const ThreadRank& me) { whole_numbers_are_exact(me, 400'001); });
  if (!test::only_races)
    for (const char* algorithm : {"doubling", "halving"}) windows_follow_one_another(algorithm);
  on_threads(3, "direct", false, last_look_leaves_running_calls_alone);
  on_threads(2, "tree", false, crossed_roots);
  if (!test::only_races) costs_are_what_is_sent();
  prices_decide();
  garbage_is_refused();
  deadline_ends_a_call_while_bytes_flow();
  nobody_waits_behind_a_peer_that_takes_nothing();
  nobody_waits_behind_a_slow_reader();
  leaving_waits_for_no_reader();
  links_are_set_up_when_they_are_needed();
  a_lower_rank_that_waits_asks_for_the_link();
  the_wait_for_a_link_ends();
}
