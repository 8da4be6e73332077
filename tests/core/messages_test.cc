// Tests messages through the communicator: that all waits report the same error, that several waits can run at the same time, and
// how messages end when their group ends. The ranks are threads connected by socket pairs.
#include <poll.h>
#include <sys/socket.h>

#include <numeric>
#include <thread>

#include "check.h"
#include "comm/communicator.h"
#include "no_backend.h"
#include "transport/heap.h"
#include "transport/memory.h"

using namespace mscomm;

namespace {

struct Interrupt {};

struct Rank {
  // heaps: if given, all ranks are on one host; otherwise, each rank is on a host of its own.
  Rank(int rank, int size, std::shared_ptr<Heaps> heaps = nullptr) {
    std::vector<std::string> names;
    for (int i = 0; i < size; i++) names.push_back("rank " + std::to_string(i) + " (here)");
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto hosts = heaps ? std::vector<int>(ranks.size()) : ranks;
    auto peers = std::make_shared<Peers>(names, hosts, std::vector<Descriptor>(names.size()), std::move(heaps));
    Communicator::Hooks hooks{[this] {
                                if (interrupted) throw Interrupt{};
                                if (handler) handler();
                              },
                              {},
                              [this] { told++; }};
    group = std::make_unique<Communicator>("world", ranks, rank, peers, std::make_unique<NoBackend>(), 7, true, recorder, hooks);
  }

  // Runs a send or recv. Returns the kind and text of its error, or "" if it succeeded.
  std::string move(bool sends, int peer, std::vector<int32_t>& data, double timeout_s = 120) {
    try {
      const Message one = message(sends, peer, data);
      group->run({&one, 1}, Deadline(timeout_s));
      return "";
    } catch (const Error& error) {
      return error.kind + ": " + error.what();
    }
  }
  static Message message(bool sends, int peer, std::vector<int32_t>& data) {
    return {sends, peer, 3, Dtype::int32, data.data(), data.size() * 4};
  }

  std::atomic<bool> interrupted{false};
  std::function<void()> handler;  // what a signal handler does
  std::atomic<int> told{0};
  Recorder recorder;
  std::unique_ptr<Communicator> group;
};

void add_link(Rank& from, Rank& to) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) throw system_error("socketpair", errno);
  from.group->add_link(true, to.group->rank(), ends[0]);
  to.group->add_link(false, from.group->rank(), ends[1]);
}

struct Pair {
  Pair() { link(); }
  Pair(std::shared_ptr<Heaps> first, std::shared_ptr<Heaps> second) : ranks{{0, 2, first}, {1, 2, second}} { link(); }
  void link() {
    for (int from : {0, 1}) add_link(ranks[from], ranks[1 - from]);
  }
  Rank ranks[2] = {{0, 2}, {1, 2}};
};

// The heaps of two ranks of one host, each of which has mapped the heap of the other.
struct TwoHeaps {
  explicit TwoHeaps(size_t bytes) {
    for (const size_t rank : {0, 1}) {
      const Descriptor fd(make_memory("mscomm-test", bytes, false));
      heap[rank] = std::make_shared<Heap>(Mapping(fd.get(), bytes));
      others[1 - rank].resize(2);
      others[1 - rank][rank] = Mapping(fd.get(), bytes);
    }
  }
  std::shared_ptr<Heaps> seen_by(int rank) { return std::make_shared<Heaps>(rank, heap[rank], std::move(others[rank])); }

  std::shared_ptr<Heap> heap[2];
  std::vector<Mapping> others[2];
};

using Ints = std::vector<int32_t>;
constexpr size_t large = 1u << 20;

bool is(const std::string& text, const std::string& expected) {
  if (text != expected) std::fprintf(stderr, "\"%s\", expected \"%s\"\n", text.c_str(), expected.c_str());
  return text == expected;
}

void messages_go_both_ways_at_once() {
  Pair pair;
  std::vector<std::thread> threads;
  for (int rank : {0, 1})
    for (bool sends : {true, false})
      threads.emplace_back([&, rank, sends] {
        for (size_t size : {size_t{3}, large, size_t{0}, large / 2}) {
          Ints data(size, sends ? rank : -1);
          CHECK(pair.ranks[rank].move(sends, 1 - rank, data).empty());
          CHECK(data == Ints(size, sends ? rank : 1 - rank));
        }
      });
  for (std::thread& thread : threads) thread.join();
  for (Rank& rank : pair.ranks) rank.group->close();
}

void a_deadline_breaks_the_group_for_all_waits() {
  Pair pair;
  Rank& me = pair.ranks[0];
  const std::string first =
      "CollectiveTimeout: rank 0 (here): recv from rank 1, tag 3 (12 B) did not end within 0.2 s: waiting for rank 1 (here)";
  std::thread other([&] {
    Ints data(large);
    CHECK(is(me.move(true, 1, data), first));
  });
  Ints out(3);
  CHECK(is(me.move(false, 1, out, 0.2), first));
  other.join();
  CHECK(is(me.move(false, 1, out), first));
  CHECK(me.group->failure()->number == -1 && me.group->failure()->error.waiting_for == std::vector<int>{1});
  me.group->close();
}

// An exception of an unexpected type breaks the group. This holds even on the worker thread, where no caller could catch the
// exception.
void a_started_call_may_throw_anything() {
  struct Wrong final : NoBackend {
    void run(const Call&, const Wait&) override { throw 7; }
  };
  Recorder recorder;
  auto peers = std::make_shared<Peers>(std::vector<std::string>{"rank 0"}, std::vector{0}, std::vector<Descriptor>(1), nullptr);
  Communicator group("world", {0}, 0, peers, std::make_unique<Wrong>(), 7, true, recorder, {});
  Call barrier;
  barrier.signature.what = Collective::barrier;
  barrier.signature.function = static_cast<Function>(Collective::barrier);
  const auto work = group.start(barrier, 60);
  CHECK(work->wait(60) && work->error() && work->error()->kind == "Error" && group.failure());
  group.close();
}

void an_abort_ends_started_and_awaited_messages() {
  Pair pair;
  Rank& me = pair.ranks[0];
  Ints started(large), awaited(large);
  const auto work = me.group->start(Rank::message(false, 1, started), Deadline(120));
  std::thread other([&] { CHECK(is(me.move(true, 1, awaited), "Aborted: the reason")); });
  poll(nullptr, 0, 60);
  me.group->abort({Error("Aborted", "the reason"), true});
  while (!work->wait(1)) continue;
  CHECK(work->error() && is(work->error()->what(), "the reason"));
  started.assign(large, 1);  // the mailbox must no longer use this memory
  other.join();
  me.group->close();
  CHECK(me.told == 1);
}

void an_interrupt_passes_and_the_others_learn_why() {
  Pair pair;
  Rank& me = pair.ranks[0];
  me.interrupted = true;
  Ints out(3);
  bool passed = false;
  try {
    const Message one = Rank::message(false, 1, out);
    me.group->run({&one, 1}, Deadline(120));
  } catch (const Interrupt&) {
    passed = true;
  }
  CHECK(passed);
  CHECK(is(me.group->failure()->error.what(), "rank 0 (here): interrupted in recv from rank 1, tag 3 (12 B)"));
}

void a_rank_that_left_ends_a_recv_unless_its_link_is_on_the_way() {
  Rank me(0, 3);
  me.group->expect_incoming(2);
  me.group->left(1);
  me.group->left(2);
  Ints out(3);
  const std::string deadline =
      "CollectiveTimeout: rank 0 (here): recv from rank 2, tag 3 (12 B) did not end within 0.2 s: waiting for rank 2 (here)";
  CHECK(is(me.move(false, 2, out, 0.2), deadline));
  Rank again(0, 3);
  again.group->left(1);
  CHECK(is(again.move(false, 1, out),
           "PeerLost: rank 0 (here): rank 1 (here) has left the job, but recv from rank 1, tag 3 (12 B) "
           "waits for it"));
}

void a_recv_from_any_ends_when_no_rank_can_send() {
  Rank me(0, 4);
  me.group->expect_incoming(3);
  for (int rank : {1, 2}) me.group->left(rank);
  Ints out(3);
  const std::string text = "rank 0 (here): recv from any rank, tag 3 (12 B) did not end within 0.2 s: waiting for any of ";
  CHECK(is(me.move(false, any_source, out, 0.2), "CollectiveTimeout: " + text + "rank 1 (here), rank 2 (here), rank 3 (here)"));
  CHECK((me.group->failure()->error.waiting_for == std::vector{1, 2, 3}));
  // Rank 1 has left. Rank 2 still has a link, which closes when rank 2 leaves.
  Rank again(0, 3);
  again.group->left(1);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) throw system_error("socketpair", errno);
  again.group->add_link(false, 2, ends[0]);
  std::thread leaver([&] {
    poll(nullptr, 0, 120);
    close(ends[1]);
  });
  const auto work = again.group->start(Rank::message(false, any_source, out), Deadline(120));
  CHECK(is(again.move(false, any_source, out),
           "PeerLost: rank 0 (here): rank 1 (here) has left the job, rank 2 (here) has left the job, but recv from any rank, "
           "tag 3 (12 B) waits for a message from one of them"));
  while (!work->wait(1)) continue;
  CHECK(work->error() && work->error()->kind == "PeerLost" && !work->matched());
  leaver.join();
}

// A send and a recv can be started together. If one of them fails, neither of them uses its memory any longer.
void messages_begin_together() {
  Pair pair;
  std::vector<std::thread> threads;
  for (int rank : {0, 1})
    threads.emplace_back([&, rank] {
      Ints x(large, rank), out(large, -1);
      const Message both[] = {Rank::message(false, any_source, out), Rank::message(true, 1 - rank, x)};
      const auto matched = pair.ranks[rank].group->run(both, Deadline(120));
      CHECK(matched.size() == 2 && matched[0].peer == 1 - rank && matched[0].tag == 3);
      CHECK(out == Ints(large, 1 - rank));
    });
  for (std::thread& thread : threads) thread.join();
  Ints x(large), out(3);
  const Message both[] = {Rank::message(false, 1, out), Rank::message(true, 1, x)};
  std::string kind;
  try {
    pair.ranks[0].group->run(both, Deadline(0.2));
  } catch (const Error& error) {
    kind = error.kind;
  }
  CHECK(kind == "CollectiveTimeout");
  x.assign(large, 1), out.assign(3, 1);
  for (Rank& rank : pair.ranks) rank.group->close();
}

void where_tells_of_a_message() {
  Pair pair;
  Rank& me = pair.ranks[0];
  CHECK(is(me.group->where().text, "has made no call yet"));
  Ints out(3), x(3);
  std::thread waiter([&] { CHECK(me.move(false, 1, out).empty()); });
  while (me.group->where().text != "has made no call yet and waits in recv from rank 1, tag 3 (12 B)") poll(nullptr, 0, 1);
  CHECK(pair.ranks[1].move(true, 0, x).empty());
  waiter.join();
  CHECK(is(me.group->where().text, "has made no call yet"));
}

void close_ends_a_recv_of_another_thread() {
  Pair pair;
  Rank& me = pair.ranks[0];
  Ints out(3), late(3);
  std::string how;
  std::thread waiter([&] { how = me.move(false, 1, out); });
  const auto work = me.group->start(Rank::message(false, 1, late), Deadline(120));
  while (me.group->where().text == "has made no call yet") poll(nullptr, 0, 1);
  me.group->close();
  waiter.join();
  CHECK(is(how, "Aborted: rank 0 (here) released the group while a call or a message was running, after the first call"));
  CHECK(work->done() && work->error());
}

void destroyed_without_close_with_a_message_under_way() {
  Pair pair;
  Ints out(3);
  const auto work = pair.ranks[0].group->start(Rank::message(false, 1, out), Deadline(120));
  pair.ranks[0].group.reset();
  CHECK(work->done() && work->error() && work->error()->kind == "Aborted");
}

// A rank that cancels recvs waits once, for all of them, until the links that are being set up exist. Meanwhile it looks at
// signals.
void recvs_are_cancelled_together() {
  Rank ranks[2] = {{0, 2}, {1, 2}};
  Rank& me = ranks[0];
  me.group->expect_incoming(1);
  std::vector<Ints> out(3, Ints(3));
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < 3; i++) {
    Message recv = Rank::message(false, 1, out[i]);
    recv.tag += i;
    works.push_back(me.group->start(recv, Deadline(120)));
  }
  me.interrupted = true;
  bool interrupted = false;
  try {
    (void)me.group->cancel(works);
  } catch (const Interrupt&) {
    interrupted = true;
  }
  CHECK(interrupted);
  for (const auto& work : works) CHECK(!work->done());
  me.interrupted = false;
  int handled = 0;
  Ints x(3, 5);
  me.handler = [&] {
    if (handled++) return;
    add_link(ranks[1], me);
    CHECK(ranks[1].move(true, 0, x).empty());
  };
  CHECK((me.group->cancel(works) == std::vector<std::string>{"recv from rank 1, tag 4", "recv from rank 1, tag 5"}));
  while (!works[0]->done()) me.group->wait(*works[0], {});
  CHECK(handled >= 1 && !works[0]->error() && out[0] == x);
  for (const int i : {1, 2}) CHECK(works[i]->done() && works[i]->error()->kind == "Cancelled");
  CHECK(!me.group->failure());
  for (Rank& rank : ranks) rank.group->close();
}

constexpr size_t heap_bytes = 64u << 20;  // the smallest heap that has rings

// Between ranks of one host, messages move through memory in the sender's heap, which is free when the group has ended on both
// ranks. This holds even if a message was never received.
void messages_use_the_heap_of_the_sender() {
  for (const bool received : {true, false}) {
    TwoHeaps heaps(heap_bytes);
    {
      Pair pair(heaps.seen_by(0), heaps.seen_by(1));
      for (const auto& heap : heaps.heap) CHECK(heap->reserve(1) > 0);
      Ints x(received ? large : 3, 5), out(x.size());
      std::thread sender([&] { CHECK(pair.ranks[0].move(true, 1, x).empty()); });
      if (received) CHECK(pair.ranks[1].move(false, 0, out).empty() && out == x);
      sender.join();
      for (Rank& rank : pair.ranks) rank.group->close();
    }
    for (const auto& heap : heaps.heap) CHECK(heap->reserve(1) == 0);
  }
}

// If a rank's heap is small, the messages move over the socket.
void messages_need_no_heap() {
  TwoHeaps heaps(heap_bytes - 4096);
  Pair pair(heaps.seen_by(0), heaps.seen_by(1));
  for (const int rank : {0, 1}) {
    Ints x(large, 5), out(large);
    std::thread sender([&] { CHECK(pair.ranks[rank].move(true, 1 - rank, x).empty()); });
    CHECK(pair.ranks[1 - rank].move(false, rank, out).empty() && out == x);
    sender.join();
  }
  for (const auto& heap : heaps.heap) CHECK(heap->reserve(1) == 0);
  for (Rank& rank : pair.ranks) rank.group->close();
}

// A rank tells where the shared memory of its link is. The other rank does not use an offset that is wrong.
void wrong_offsets_are_refused() {
  const std::pair<uint64_t, const char*> wrong[] = {{heap_bytes, "posted memory outside its heap"},
                                                    {~uint64_t{0} - 63, "posted memory outside its heap"},
                                                    {heap_bytes - 4096, "posted memory outside its heap"},
                                                    {4, "a wrong offset"}};
  for (const auto& [offset, why] : wrong) {
    TwoHeaps heaps(heap_bytes);
    Rank me(0, 2, heaps.seen_by(0));
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) throw system_error("socketpair", errno);
    me.group->add_link(false, 1, ends[0]);
    CHECK(::send(ends[1], &offset, sizeof offset, MSG_NOSIGNAL) == sizeof offset);
    Ints out(3);
    const std::string error = me.move(false, 1, out);
    CHECK(error.find("PeerLost") == 0 && error.find(why) != std::string::npos);
    close(ends[1]);
  }
}

}  // namespace

SUITE(messages) {
  messages_use_the_heap_of_the_sender();
  messages_need_no_heap();
  wrong_offsets_are_refused();
  a_started_call_may_throw_anything();
  messages_go_both_ways_at_once();
  a_deadline_breaks_the_group_for_all_waits();
  an_abort_ends_started_and_awaited_messages();
  an_interrupt_passes_and_the_others_learn_why();
  a_rank_that_left_ends_a_recv_unless_its_link_is_on_the_way();
  a_recv_from_any_ends_when_no_rank_can_send();
  messages_begin_together();
  recvs_are_cancelled_together();
  where_tells_of_a_message();
  close_ends_a_recv_of_another_thread();
  destroyed_without_close_with_a_message_under_way();
}
