// Tests point-to-point messages: which messages arrive, in which order, and how waits end. The ranks are threads connected by
// socket pairs. The tests of a Group run twice: the bytes move over the sockets, and through memory that both ends share.
#include "transport/mailbox.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "check.h"
#include "ring_memory.h"
#include "tcp_pair.h"

using namespace mscomm;

namespace {

struct TestWatch : Watch {
  void look(const Deadline& deadline, const Missing& missing) override {
    if (deadline.passed()) throw Error("CollectiveTimeout", "deadline", {}, missing());
  }
  bool broken() const override { return false; }
};
TestWatch watch;

Wait within(double timeout_s = 120) { return {watch, Deadline(timeout_s)}; }

std::array<int, 2> unix_pair() {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) < 0) throw system_error("socketpair", errno);
  return ends;
}

// How the bytes of a Group move; each_way() sets this. spin: whether each rank counts as having a CPU. If so, long messages move
// through the ring, too. If not, the receiver reads them from the sender's memory.
bool share_memory = false, spin = true;

struct Group {
  explicit Group(int size, bool linked = true, std::array<int, 2> (*pair)() = unix_pair) {
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int rank = 0; rank < size; rank++) boxes.push_back(std::make_unique<Mailbox>(ranks, rank, 7, spin));
    for (int from = 0; from < size && linked; from++)
      for (int to = 0; to < size; to++)
        if (from != to) link(from, to, pair);
  }
  void link(int from, int to, std::array<int, 2> (*pair)() = unix_pair) {
    const auto [out, in] = pair();
    Stream sends(out, "rank " + std::to_string(to)), receives(in, "rank " + std::to_string(from));
    if (share_memory) {
      char* const ring = memory.emplace_back(ring_memory()).get();
      sends.share(ring, 0);
      receives.opens_shared([ring](uint64_t) { return ring; });
    }
    (*this)[from].add_link(true, to, std::move(sends));
    (*this)[to].add_link(false, from, std::move(receives));
  }
  Mailbox& operator[](int rank) { return *boxes[static_cast<size_t>(rank)]; }
  void on_threads(const std::function<void(int, Mailbox&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(boxes.size()); rank++)
      threads.emplace_back([&, rank] { body(rank, (*this)[rank]); });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<RingMemory> memory;  // declared first, because the links use it until they are destroyed
  std::vector<std::unique_ptr<Mailbox>> boxes;
};

using Ints = std::vector<int64_t>;

Ints ints(size_t count, int64_t first) {
  Ints x(count);
  std::iota(x.begin(), x.end(), first);
  return x;
}

std::shared_ptr<Transfer> start_send(Mailbox& box, int dst, const Ints& x, int64_t tag = 0) {
  return box.start({true, dst, tag, Dtype::int64, const_cast<int64_t*>(x.data()), x.size() * 8});
}
std::shared_ptr<Transfer> start_recv(Mailbox& box, int src, Ints& out, int64_t tag = 0) {
  return box.start({false, src, tag, Dtype::int64, out.data(), out.size() * 8});
}
void send(Mailbox& box, int dst, const Ints& x, int64_t tag = 0) { box.wait(start_send(box, dst, x, tag), within()); }
Ints recv(Mailbox& box, int src, size_t count, int64_t tag = 0) {
  Ints out(count);
  box.wait(start_recv(box, src, out, tag), within());
  return out;
}

// Waits until the transfer ends. Returns the kind and text of its error, or "" if it succeeded.
std::string error_of(Mailbox& box, const std::shared_ptr<Transfer>& transfer, double timeout_s = 120) {
  try {
    box.wait(transfer, within(timeout_s));
    return "";
  } catch (const Error& error) {
    return error.kind + ": " + error.what();
  }
}

bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "no \"%s\" in \"%s\"\n", part.c_str(), text.c_str());
  return found;
}

// A number of elements of 8 bytes. A message of this size is announced before its data is sent. It has several pieces
// (piece_bytes in mailbox.cc) and fills a ring and a socket's buffers several times, under ThreadSanitizer, too.
size_t large = 1u << 18;

void messages_of_one_tag_keep_their_order() {
  Group group(2);
  const std::vector<size_t> counts{1, large, 0, 3, 2048, 2049, large, 7};
  group.on_threads([&](int rank, Mailbox& box) {
    for (size_t i = 0; i < counts.size(); i++) {
      const Ints x = ints(counts[i], static_cast<int64_t>(i));
      if (rank == 0) send(box, 1, x, -5);
      if (rank == 1) CHECK(recv(box, 0, counts[i], -5) == x);
    }
  });
}

void tags_are_received_in_any_order() {
  Group group(2);
  for (size_t count : {size_t{4}, large}) {
    group.on_threads([&](int rank, Mailbox& box) {
      if (rank == 0) {
        std::vector<Ints> x;
        std::vector<std::shared_ptr<Transfer>> sends;
        for (int64_t i = 0; i < 20; i++) x.push_back(ints(count, i));
        for (int64_t i = 0; i < 20; i++) sends.push_back(start_send(box, 1, x[static_cast<size_t>(i)], i % 10));
        for (const auto& one : sends) box.wait(one, within());
      } else {
        for (int64_t tag = 9; tag >= 0; tag--)
          for (int64_t i : {tag, tag + 10}) CHECK(recv(box, 0, count, tag) == ints(count, i));
      }
    });
  }
}

// Rank 0 sends more small messages than the window holds, and then one more message with a different tag. Rank 1 receives that
// message first. The program is legal, because rank 0 starts all sends before it waits for any of them.
void a_recv_sees_past_more_than_the_window() {
  Group group(2);
  constexpr int64_t many = 20'000;
  static_assert(many * 800 > 4 * static_cast<int64_t>(eager_window));
  group.on_threads([&](int rank, Mailbox& box) {
    const Ints last = ints(5, -1);
    for (int round = 0; round < 2; round++) {
      if (rank == 0) {
        const Ints x = ints(100 + many, 0);
        std::vector<std::shared_ptr<Transfer>> sends;
        for (int64_t i = 0; i < many; i++)
          sends.push_back(box.start({true, 1, 1, Dtype::int64, const_cast<int64_t*>(x.data()) + i, 800}));
        sends.push_back(start_send(box, 1, last, 2));
        for (const auto& one : sends) box.wait(one, within());
      } else {
        CHECK(recv(box, 0, 5, 2) == last);
        for (int64_t i = 0; i < many; i++) CHECK(recv(box, 0, 100, 1) == ints(100, i));
      }
    }
  });
}

void rings_of_large_messages_do_not_deadlock() {
  Group group(4);
  group.on_threads([&](int rank, Mailbox& box) {
    for (int round = 0; round < 5; round++) {
      const Ints x = ints(large, rank);
      std::vector<Ints> in(4);
      std::vector<std::shared_ptr<Transfer>> all;
      for (int peer = 0; peer < 4; peer++) {
        if (peer == rank) continue;
        in[static_cast<size_t>(peer)].resize(large);
        all.push_back(start_send(box, peer, x));
        all.push_back(start_recv(box, peer, in[static_cast<size_t>(peer)]));
      }
      for (const auto& one : all) box.wait(one, within());
      for (int peer = 0; peer < 4; peer++) CHECK(peer == rank || in[static_cast<size_t>(peer)] == ints(large, peer));
    }
  });
}

void a_rank_sends_to_itself() {
  Group group(1);
  Mailbox& box = group[0];
  for (size_t count : {size_t{0}, size_t{3}, large}) {
    const Ints x = ints(count, 1), y = ints(count, 2), z = ints(count, 3);
    Ints early(count);
    const auto first = start_send(box, 0, x), other = start_send(box, 0, y, 1);
    CHECK(recv(box, 0, count, 1) == y);
    CHECK(recv(box, 0, count) == x);
    box.wait(first, within());
    box.wait(other, within());
    const auto waiting = start_recv(box, 0, early);
    send(box, 0, z);
    box.wait(waiting, within());
    CHECK(early == z);
  }
}

// If a rank sends a message to itself and no recv is waiting, the message is copied. The send then completes, and the caller can
// reuse the memory. The messages stay in order.
void a_send_to_itself_waits_for_nobody() {
  Group group(1);
  Mailbox& box = group[0];
  for (size_t count : {size_t{0}, size_t{3}, large}) {
    Ints x = ints(count, 1);
    send(box, 0, x, 1);
    x.assign(count, -1);
    send(box, 0, x, 2);
    CHECK(recv(box, any_source, count, any_tag) == ints(count, 1));
    CHECK(recv(box, 0, count, 2) == x);
  }
}

// Messages from one source stay in order, and each recv reports the source and the tag of the message that it received.
void any_takes_what_comes() {
  Group group(4);
  for (size_t count : {size_t{3}, large}) {
    group.on_threads([&](int rank, Mailbox& box) {
      if (rank == 3) {
        std::vector<int64_t> next(4);
        for (int i = 0; i < 30; i++) {
          Ints out(count);
          const auto transfer = start_recv(box, any_source, out, any_tag);
          CHECK(transfer->matched().peer == any_source || out.size() == count);
          box.wait(transfer, within());
          const auto source = static_cast<size_t>(transfer->matched().peer);
          CHECK(transfer->matched().tag == next[source] % 5 && out == ints(count, 100 * transfer->matched().peer + next[source]));
          next[source]++;
        }
        CHECK((next == std::vector<int64_t>{10, 10, 10, 0}));
      } else {
        for (int64_t i = 0; i < 10; i++) send(box, 3, ints(count, 100 * rank + i), i % 5);
      }
    });
  }
}

// If several recvs match a message, the recv that was called first gets it. It does not matter whether the recvs name a source
// and a tag or accept any source and any tag.
void the_recv_that_was_called_first_gets_the_message() {
  for (size_t count : {size_t{3}, large}) {
    Group group(3);
    Mailbox& box = group[0];
    const std::vector<std::pair<int, int64_t>> asked{{2, 7}, {any_source, 7}, {1, any_tag}, {any_source, any_tag}, {1, 7}};
    std::vector<Ints> out(asked.size(), Ints(count));
    std::vector<std::shared_ptr<Transfer>> recvs;
    for (size_t i = 0; i < asked.size(); i++) recvs.push_back(start_recv(box, asked[i].first, out[i], asked[i].second));
    std::thread sender([&] {
      for (int64_t i = 1; i < 5; i++) send(group[1], 0, ints(count, i), i == 3 ? 8 : 7);
    });
    for (size_t i = 1; i < 5; i++) {
      box.wait(recvs[i], within());
      CHECK(recvs[i]->matched().peer == 1 && out[i] == ints(count, static_cast<int64_t>(i)));
      CHECK(recvs[i]->matched().tag == (i == 3 ? 8 : 7));
    }
    sender.join();
    CHECK(!recvs[0]->done());
    std::thread last([&] { send(group[2], 0, ints(count, 9), 7); });
    box.wait(recvs[0], within());
    CHECK(out[0] == ints(count, 9));
    last.join();
  }
}

// A recv with any tag never receives the body of an object, whether the recv is called before or after the body arrives.
void any_tag_leaves_the_bodies_of_objects_alone() {
  Group group(2);
  Ints early(3), late(3), body(3);
  const auto before = start_recv(group[0], any_source, early, any_tag);
  send(group[1], 0, ints(3, 1), last_tag + 1);
  send(group[1], 0, ints(3, 2), last_tag);
  group[0].wait(before, within());
  CHECK(early == ints(3, 2) && before->matched().tag == last_tag);
  const auto after = start_recv(group[0], any_source, late, any_tag);
  CHECK(!after->done());
  send(group[1], 0, ints(3, 3));
  group[0].wait(after, within());
  CHECK(late == ints(3, 3) && recv(group[0], 1, 3, last_tag + 1) == ints(3, 1));
}

void a_recv_from_any_outlives_links_and_takes_nothing_when_given_up() {
  Group group(3);
  Ints old(3), late(3);
  CHECK(error_of(group[0], start_recv(group[0], any_source, old, any_tag), 0.1) == "CollectiveTimeout: deadline");
  send(group[1], 0, ints(3, 1));
  group[1].close(30);
  const auto first = start_recv(group[0], any_source, late, any_tag);
  group[0].wait(first, within());
  CHECK(late == ints(3, 1) && old == Ints(3));
  // The link from rank 1 has closed, but the link from rank 2 is still open.
  const auto second = start_recv(group[0], any_source, late, any_tag);
  CHECK(!group[0].ended(2));
  std::thread receiver([&] { group[0].wait(second, within()); });
  while (!group[0].ended(1)) poll(nullptr, 0, 1);
  CHECK(!second->done());
  send(group[2], 0, ints(3, 2));
  receiver.join();
  CHECK(late == ints(3, 2));
  // If a sender gives up on a message that it has announced, the link becomes unusable. Then even a recv from any source must end
  // with an error.
  Ints out(large);
  const Ints x = ints(large, 0);
  CHECK(has(error_of(group[2], start_send(group[2], 0, x), 0.1), "CollectiveTimeout"));
  CHECK(
      has(error_of(group[0], start_recv(group[0], any_source, out, any_tag)), "PeerLost: recv from any rank, any tag: the link"));
}

void a_recv_from_any_of_another_type_is_named() {
  for (size_t count : {size_t{4}, large})
    for (int from : {0, 1}) {  // rank 0 sends over a link, and rank 1 sends to itself
      Group group(2);
      const Ints x = ints(count, 0);
      std::vector<float> out(10);
      auto wrong = group[1].start({false, any_source, any_tag, Dtype::float32, out.data(), 40});
      std::thread sender([&] { send(group[from], 1, x, 6); });
      const std::string expected = "Mismatch: recv from any rank, any tag: expects float32 x 10, rank " + std::to_string(from) +
                                   " sent int64 x " + std::to_string(count) + " with tag 6";
      CHECK(error_of(group[1], wrong) == expected);
      wrong = group[1].start({false, any_source, any_tag, Dtype::float32, out.data(), 40});
      CHECK(error_of(group[1], wrong) == expected);
      CHECK(recv(group[1], any_source, count, 6) == x);
      sender.join();
    }
}

void threads_share_a_mailbox() {
  Group group(2);
  group.on_threads([&](int rank, Mailbox& box) {
    std::vector<std::thread> threads;
    for (int64_t tag = 0; tag < 6; tag++)
      threads.emplace_back([&, tag] {
        for (size_t i = 0; i < 100; i++) {
          const size_t count = i % 10 ? i : 20'000;
          const Ints x = ints(count, tag * 1000 + static_cast<int64_t>(i));
          // On each rank, half of the threads send and the other half receive.
          if ((tag % 2 == 0) == (rank == 0)) send(box, 1 - rank, x, tag);
          else CHECK(recv(box, 1 - rank, count, tag) == x);
        }
      });
    for (std::thread& thread : threads) thread.join();
  });
}

void detached_transfers_end_by_themselves() {
  Group group(2);
  group.on_threads([&](int rank, Mailbox& box) {
    constexpr size_t n = 30;
    std::vector<Ints> x, out(n, Ints(1000 * (n - 1) + 1));
    std::atomic<size_t> ended{0};
    std::atomic<int> errors{0};
    for (size_t i = 0; i < n; i++) {
      x.push_back(ints(i * 1000 + 1, static_cast<int64_t>(i)));
      out[i].resize(x[i].size());
    }
    const auto end = [&](const std::optional<Error>& error) { errors += error.has_value(), ended++, ended.notify_all(); };
    for (size_t i = 0; i < n; i++) {
      box.detach(start_send(box, 1 - rank, x[i], static_cast<int64_t>(i)), within(), end);
      box.detach(start_recv(box, 1 - rank, out[n - 1 - i], static_cast<int64_t>(n - 1 - i)), within(), end);
    }
    // Rank 0 waits for another message while the detached transfers run.
    if (rank == 0) CHECK(recv(box, 1, 2, 99) == ints(2, 1));
    if (rank == 1) send(box, 0, ints(2, 1), 99);
    for (size_t seen = 0; (seen = ended) < 2 * n;) ended.wait(seen);
    box.close(30);  // after close(), the mailbox's thread no longer runs `end`
    CHECK(errors == 0);
    CHECK(out == x);
  });
}

void a_detached_transfer_keeps_its_deadline() {
  std::atomic<bool> ended{false};
  std::string kind;
  Ints out(3);
  Group group(2);  // declared last, because its destructor joins the thread that uses the variables above
  group[0].detach(start_recv(group[0], 1, out), within(0.1), [&](const std::optional<Error>& error) {
    kind = error ? error->kind : "none";
    ended = true;
    ended.notify_all();
  });
  ended.wait(false);
  CHECK(kind == "CollectiveTimeout");
}

// An exception of an unexpected type ends the transfers that the mailbox's thread watches, but not the process.
void a_detached_watch_may_throw_anything() {
  struct Wrong final : Watch {
    void look(const Deadline&, const Missing&) override { throw 7; }
    bool broken() const override { return false; }
  } wrong;
  std::atomic<bool> ended{false};
  std::string kind;
  Ints out(3);
  Group group(2);  // declared last, because its destructor joins the thread that uses the variables above
  group[0].detach(start_recv(group[0], 1, out), {wrong, Deadline(120)}, [&](const std::optional<Error>& error) {
    kind = error ? error->kind : "none";
    ended = true;
    ended.notify_all();
  });
  ended.wait(false);
  CHECK(kind == "Aborted");
}

void a_link_may_come_late() {
  Group group(2, false);
  std::thread receiver([&] { CHECK(recv(group[1], 0, 3) == ints(3, 5)); });
  // After 120 ms, the receiver is usually waiting for the link. If the receiver starts later, the test still passes.
  poll(nullptr, 0, 120);
  group.link(0, 1);
  send(group[0], 1, ints(3, 5));
  receiver.join();
}

void what_was_sent_before_a_close_arrives() {
  for (auto* pair : {unix_pair, tcp_pair}) {
    Group group(2, true, pair);
    const Ints x = ints(1000, 0);
    std::thread receiver([&] { CHECK(recv(group[1], 0, 1000, 99) == x); });
    for (int i = 0; i < 103; i++) send(group[0], 1, x, i);
    receiver.join();
    group[0].close(30);
    group.boxes[0].reset();
    // The receiver now sends credit to a sender that is gone. It must still get the data that is in the kernel's buffers.
    for (int i = 0; i < 99; i++) CHECK(recv(group[1], 0, 1000, i) == x);
    for (int i = 102; i > 99; i--) CHECK(recv(group[1], 0, 1000, i) == x);
    Ints out(1);
    CHECK(has(error_of(group[1], start_recv(group[1], 0, out)), "PeerLost: recv from rank 0, tag 0: the link to rank 0 ended"));
    CHECK(has(error_of(group[1], start_send(group[1], 0, ints(large, 0))), "PeerLost: send to rank 0, tag 0"));
  }
}

void a_peer_that_is_gone_fails_an_announced_message() {
  Group group(2);
  const Ints x = ints(large, 0);
  Ints out(large);
  const auto sending = start_send(group[0], 1, x);
  CHECK(has(error_of(group[0], sending, 0.1), "CollectiveTimeout"));  // the message was announced, and then the sender gave up
  CHECK(has(error_of(group[1], start_recv(group[1], 0, out)), "PeerLost"));
  CHECK(has(error_of(group[0], start_send(group[0], 1, x)), "Aborted: send to rank 1, tag 0: an earlier send was given up"));
}

void a_recv_that_was_given_up_takes_no_message() {
  Group group(2);
  Ints old(3);
  CHECK(has(error_of(group[1], start_recv(group[1], 0, old), 0.1), "CollectiveTimeout"));
  send(group[0], 1, ints(3, 1));
  CHECK(recv(group[1], 0, 3) == ints(3, 1));
  CHECK(old == Ints(3));
}

bool cancels(Mailbox& box, const Mailbox::Shared& recv) { return !box.cancel({&recv, 1}).empty(); }

void only_a_recv_without_a_message_is_cancelled() {
  Group group(2);
  const Ints x = ints(3, 7), long_one = ints(large, 1);
  Ints out(3, -1), other(3, -1), back(large);
  const auto sent = start_send(group[0], 1, long_one, 1);
  const auto here = start_recv(group[1], 0, back, 1), any = start_recv(group[1], any_source, other, 2);
  std::atomic<int> ended{0};
  const auto absent = start_recv(group[1], 0, out);
  group[1].detach(absent, within(), [&](const std::optional<Error>& error) {
    CHECK(error && error->kind == "Cancelled");
    ended++;
  });
  std::thread([&] {  // the announcement has arrived, even if nobody has read it yet
    CHECK(!cancels(group[1], here) && !cancels(group[0], sent));
    const std::vector both{any, here, absent};
    CHECK((group[1].cancel(both) == std::vector{group[1].text(*any), group[1].text(*absent)}));
    CHECK(!cancels(group[1], absent) && ended == 1);
  })
      .join();
  std::thread sender([&] { group[0].wait(sent, within()); });
  group[1].wait(here, within());
  sender.join();
  CHECK(back == long_one && out == Ints(3, -1) && other == out);
  send(group[0], 1, x);
  CHECK(recv(group[1], 0, 3) == x);  // the cancelled recv has not taken it
}

void a_recv_is_cancelled_while_another_thread_waits() {
  Group group(2);
  group.on_threads([&](int rank, Mailbox& box) {
    Ints x(2), never(2);
    std::vector<std::thread> threads;
    if (rank == 0) threads.emplace_back([&] { CHECK(recv(box, 1, 2, 9) == ints(2, 9)); });
    for (int64_t i = 0; i < 50; i++) {
      const auto absent = start_recv(box, 1 - rank, never, 5);
      box.detach(absent, within(), [](const std::optional<Error>&) {});
      send(box, 1 - rank, ints(2, i), 6);
      CHECK(recv(box, 1 - rank, 2, 6) == ints(2, i));
      CHECK(cancels(box, absent) && absent->done());
    }
    if (rank == 1) send(box, 0, ints(2, 9), 9);
    for (std::thread& thread : threads) thread.join();
  });
}

void other_types_and_sizes_are_named() {
  for (size_t count : {size_t{4}, large})
    for (int from : {0, 1}) {  // rank 0 sends over a link, and rank 1 sends to itself
      Group group(2);
      const Ints x = ints(count, 0);
      std::vector<float> out(10);
      // The first recv is called before the message arrives, the second one afterwards.
      auto wrong = group[1].start({false, from, 0, Dtype::float32, out.data(), 40});
      const auto sending = start_send(group[from], 1, x);
      std::thread sender([&] { group[from].wait(sending, within()); });
      const std::string expected = "Mismatch: recv from rank " + std::to_string(from) + ", tag 0: expects float32 x 10, rank " +
                                   std::to_string(from) + " sent int64 x " + std::to_string(count);
      CHECK(error_of(group[1], wrong) == expected);
      wrong = group[1].start({false, from, 0, Dtype::float32, out.data(), 40});
      CHECK(error_of(group[1], wrong) == expected);
      CHECK(recv(group[1], from, count) == x);
      sender.join();
    }
}

void shut_down_ends_all_waits() {
  std::atomic<int> aborted{0}, detached{0};
  std::vector<std::thread> threads;
  std::vector<Ints> memory(4, Ints(large));
  Group group(3);
  for (int i = 0; i < 4; i++)
    threads.emplace_back([&, i] {
      Ints& mine = memory[static_cast<size_t>(i)];
      const auto one = i % 2 ? start_send(group[0], 1, mine, i) : start_recv(group[0], 2, mine, i);
      if (error_of(group[0], one).find("Aborted") == 0) aborted++;
    });
  Ints out(3);
  for (int source : {1, any_source})
    group[0].detach(start_recv(group[0], source, out), within(), [&](const std::optional<Error>& error) {
      CHECK(error && error->kind == "Aborted");
      detached++, detached.notify_all();
    });
  poll(nullptr, 0, 60);
  group[0].shut_down();
  // From here on, the mailbox must not access this memory. The sanitizers would report such an access.
  for (Ints& mine : memory) mine.assign(large, 1);
  for (std::thread& thread : threads) thread.join();
  for (int seen = 0; (seen = detached) < 2;) detached.wait(seen);
  CHECK(aborted == 4);
  CHECK(has(error_of(group[0], start_recv(group[0], 1, out)), "Aborted"));
  CHECK(has(error_of(group[1], start_recv(group[1], 0, out)), "PeerLost"));
}

// poll() fails if it gets more descriptors than the limit of the process allows. A thread that waits must then throw an error,
// and the mailbox's own thread must end its transfers. Neither may call poll() again and again. The mailbox can still be closed.
void a_poll_that_fails_ends_all_waits() {
  constexpr rlim_t limit = 10;  // rank 0 polls 12 descriptors
  std::vector<Descriptor> low;  // descriptors below the limit, which the sanitizers need during the test
  do low.emplace_back(dup(STDERR_FILENO));
  while (low.back().get() < static_cast<int>(limit));
  Group group(12, false);
  for (int rank = 1; rank < 12; rank++) group.link(rank, 0);
  low.clear();
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{limit, before.rlim_max};
  Ints waited(4), detached(4);
  std::promise<std::string> ended;
  setrlimit(RLIMIT_NOFILE, &few);
  const std::string failed = error_of(group[0], start_recv(group[0], any_source, waited), 5);
  group[0].detach(start_recv(group[0], any_source, detached), within(5),
                  [&](const auto& error) { ended.set_value(error ? error->what() : ""); });
  const std::string told = ended.get_future().get();
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK(has(failed, "Error: poll of 12 descriptors: Invalid argument"));
  CHECK(has(told, "poll of 12 descriptors: Invalid argument"));
  group[0].close(5);
}

void close_ends_what_was_left_to_the_thread() {
  std::string kind;
  Ints out(3);
  Group group(2);
  group[0].detach(start_recv(group[0], 1, out), within(),
                  [&](const std::optional<Error>& error) { kind = error ? error->kind : "none"; });
  group[0].close(30);
  CHECK(kind == "Aborted");
  CHECK(has(error_of(group[0], start_recv(group[0], 1, out)), "Aborted: the group was released"));
}

// After shut_down(), x and out belong to the caller, even if the mailbox was moving data when shut_down() was called.
void shut_down_lets_go_of_memory() {
  for (int delay_ms = 0; delay_ms < 10; delay_ms++) {
    Group group(2);
    Ints x(large * 8), out(large * 8);
    std::thread sender([&] { error_of(group[0], start_send(group[0], 1, x)); });
    std::thread receiver([&] { error_of(group[1], start_recv(group[1], 0, out)); });
    poll(nullptr, 0, delay_ms);
    group[0].shut_down();
    x.assign(x.size(), -1);
    group[1].shut_down();
    out.assign(out.size(), -1);
    sender.join();
    receiver.join();
    CHECK(out == Ints(out.size(), -1));
  }
}

// A peer sends a header with one changed byte. Whichever byte it is, the transfer ends with an error. The header never crashes
// the rank and is never mistaken for data.
// A mailbox, and the end of a sender that announces a message at an address of its memory.
struct Announced {
  explicit Announced(const void* address) {
    const auto [out, in] = unix_pair();
    Stream receives(in, "rank 1");
    receives.opens_shared([this](uint64_t) { return ring.get(); });
    box.emplace(std::vector{0, 1}, 0, 7, false);
    box->add_link(false, 1, std::move(receives));
    sender.emplace(out, "rank 0");
    sender->share(ring.get(), 0);
    send(Envelope::Kind::announce, reinterpret_cast<uintptr_t>(address));
  }
  void send(Envelope::Kind kind, uintptr_t address) {
    const Envelope header{
        .kind = kind, .dtype = Dtype::int64, .epoch = 7, .source = 1, .count = large, .id = 1, .address = address};
    CHECK(sender->send(&header, sizeof header) == sizeof header);
  }
  RingMemory ring = ring_memory();
  std::optional<Mailbox> box;
  std::optional<Stream> sender;
};

void a_message_is_sent_if_its_sender_cannot_be_read() {
  Announced one(reinterpret_cast<const void*>(8));
  const Ints x = ints(large, 3);
  Ints out(large);
  std::thread receiver([&] { CHECK(error_of(*one.box, start_recv(*one.box, 1, out)).empty()); });
  Envelope back;
  for (size_t got = 0; got < sizeof back;) one.sender->receive_more(back, got);
  CHECK(back.kind == Envelope::Kind::clear && back.id == 1);
  one.send(Envelope::Kind::data, 0);
  for (size_t sent = 0; sent < large * 8;)
    sent += one.sender->send(reinterpret_cast<const char*>(x.data()) + sent, large * 8 - sent);
  receiver.join();
  CHECK(out == x);
}

// The receiver never moves bytes again after its last recv. So by then it must have told the sender of all messages, although the
// lane for this has room for fewer headers.
void a_recv_ends_when_its_sender_has_been_told() {
  constexpr size_t messages = 300, count = eager_bytes / 8 + 1;
  Group group(2);
  const Ints x = ints(count, 5);
  std::vector<std::shared_ptr<Transfer>> sends;
  for (size_t i = 0; i < messages; i++) sends.push_back(start_send(group[0], 1, x));
  std::thread receiver([&] {
    for (size_t i = 0; i < messages; i++) CHECK(recv(group[1], 0, count) == x);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that the receiver fills the lane
  std::vector<std::string> errors;
  for (const auto& send : sends) errors.push_back(error_of(group[0], send));
  receiver.join();
  for (const std::string& error : errors) CHECK(error.empty());
}

void what_a_sender_has_given_up_is_not_received() {
  const Ints x = ints(large, 3);
  Announced one(x.data());
  one.sender->shut_down();
  Ints out(large);
  CHECK(has(error_of(*one.box, start_recv(*one.box, 1, out)), "PeerLost: recv from rank 1, tag 0: the link to rank 1 ended"));
}

void garbage_is_refused() {
  std::mt19937 random(3);
  constexpr int tries = 400;
  int refused = 0, returns_refused = 0;
  for (int i = 0; i < tries; i++) {
    Envelope header;
    header.kind = i % 2 ? Envelope::Kind::whole : Envelope::Kind::announce;
    header.epoch = 7;
    header.source = 1;
    header.count = 2;
    header.id = 1;
    header.dtype = Dtype::int64;
    auto* bytes = reinterpret_cast<unsigned char*>(&header);
    const size_t at = random() % sizeof header;
    bytes[at] = static_cast<unsigned char>(bytes[at] + 1 + random() % 255);
    const auto [wire, end] = unix_pair();
    Mailbox box({0, 1}, 0, 7, true);
    box.add_link(false, 1, Stream(end, "rank 1"));
    CHECK(::send(wire, bytes, sizeof header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof header));
    close(wire);
    Ints out(2, 42);
    const std::string error = error_of(box, start_recv(box, 1, out));
    refused += !error.empty();
    // If the changed byte is in the kind, type, count, tag or address, the header can still be valid, but this recv does not
    // accept such a message, or the message does not come.
    const bool compared = at < offsetof(Envelope, kind) || (at >= offsetof(Envelope, epoch) && at < offsetof(Envelope, tag)) ||
                          (at >= offsetof(Envelope, id) && at < offsetof(Envelope, address));
    if (compared) CHECK(has(error, "Error: recv from rank 1, tag 0: the link to rank 1 ended: it sent an invalid header"));
    CHECK(out == Ints(2, 42));
  }
  CHECK(refused == tries);
  // A sender refuses a `clear` for a message that it has not announced, and credit for messages that it has not sent. It also
  // refuses an envelope of a kind that only senders send.
  for (Envelope::Kind kind : {Envelope::Kind::clear, Envelope::Kind::credit, Envelope::Kind::whole}) {
    Envelope back;
    back.kind = kind;
    back.epoch = 7;
    back.source = 1;
    back.count = 1;
    back.id = 2;
    const auto [end, wire] = unix_pair();
    Mailbox box({0, 1}, 0, 7, true);
    box.add_link(true, 1, Stream(end, "rank 1"));
    CHECK(::send(wire, &back, sizeof back, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof back));
    returns_refused += has(error_of(box, start_send(box, 1, ints(large, 0))), "Error: send to rank 1, tag 0");
    close(wire);
  }
  CHECK(returns_refused == 3);
}

// If a sender ignores the window, the receiver ends the link before its memory is full.
void the_window_bounds_what_is_kept() {
  const auto [wire, end] = unix_pair();
  Mailbox box({0, 1}, 0, 7, true);
  box.add_link(false, 1, Stream(end, "rank 1"));
  std::thread flood([wire = wire] {
    for (uint64_t id = 1;; id++) {
      std::vector<char> message(sizeof(Envelope) + eager_bytes);
      Envelope header;
      header.epoch = 7;
      header.source = 1;
      header.tag = 1;
      header.count = eager_bytes;
      header.id = id;
      std::memcpy(message.data(), &header, sizeof header);
      if (::send(wire, message.data(), message.size(), MSG_NOSIGNAL) < 0) break;
    }
    close(wire);
  });
  Ints out(1);
  CHECK(has(error_of(box, start_recv(box, 1, out, 2)), "an invalid header"));
  flood.join();
}

// A peer that announces message after message does not fill this rank's memory.
void announcements_are_bounded() {
  const auto [wire, end] = unix_pair();
  Mailbox box({0, 1}, 0, 7, true);
  box.add_link(false, 1, Stream(end, "rank 1"));
  std::thread flood([wire = wire] {
    Envelope header{.kind = Envelope::Kind::announce, .epoch = 7, .source = 1, .tag = 1, .count = large};
    do header.id++;
    while (::send(wire, &header, sizeof header, MSG_NOSIGNAL) > 0);
    close(wire);
  });
  Ints out(1);
  CHECK(has(error_of(box, start_recv(box, 1, out, 2)), "it has sent 65536 messages for which there is no recv"));
  flood.join();
}

void matched_messages_give_credit() {
  const auto [wire, end] = unix_pair();
  Mailbox box({0, 1}, 0, 7, true);
  box.add_link(false, 1, Stream(end, "rank 1"));
  constexpr uint64_t messages = eager_window / 2 / eager_bytes + 1;
  std::thread sender([wire = wire] {
    for (uint64_t id = 1; id <= messages; id++) {
      std::vector<char> message(sizeof(Envelope) + eager_bytes);
      Envelope header;
      header.epoch = 7;
      header.source = 1;
      header.count = eager_bytes;
      header.id = id;
      std::memcpy(message.data(), &header, sizeof header);
      CHECK(::send(wire, message.data(), message.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(message.size()));
    }
  });
  std::vector<char> out(eager_bytes);
  for (uint64_t id = 1; id <= messages; id++) box.wait(box.start({false, 1, 0, Dtype::uint8, out.data(), out.size()}), within());
  sender.join();
  Envelope credit;
  CHECK(::recv(wire, &credit, sizeof credit, MSG_WAITALL) == sizeof credit);
  CHECK(credit.kind == Envelope::Kind::credit && credit.source == 0 && credit.epoch == 7);
  CHECK(credit.count == (messages - 1) * (eager_bytes + sizeof(Envelope)));
  close(wire);
}

// Peers notice that a process has ended even if a child forked from it is still running.
void a_forked_child_lets_go() {
  std::array<int, 2> hold{};
  CHECK(pipe(hold.data()) == 0);
  Ints out(3);
  Group group(2);
  group[0].detach(start_recv(group[0], 1, out), within(), [](const std::optional<Error>& error) { CHECK(error); });
  group[1].detach(start_send(group[1], 0, out, 1), within(), [](const std::optional<Error>& error) { CHECK(!error); });
  // Wait until the mailbox's thread is asleep. The child, which lacks this thread, must not wait for it.
  poll(nullptr, 0, 60);
  const pid_t child = fork();
  if (child == 0) {
    close(hold[1]);
    for (auto& box : group.boxes) box->close_descriptors();
    group.boxes.clear();
    char end;
    _exit(read(hold[0], &end, 1) == 0 ? 0 : 1);
  }
  close(hold[0]);
  group.boxes[0].reset();
  CHECK(has(error_of(group[1], start_recv(group[1], 0, out)), "PeerLost"));
  close(hold[1]);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void more_than_2_GiB() {
  Group group(2);
  const size_t count = (size_t{1} << 28) + 5;  // elements of 8 bytes
  group.on_threads([&](int rank, Mailbox& box) {
    if (rank == 0) send(box, 1, ints(count, 3));
    if (rank == 1) CHECK(recv(box, 0, count) == ints(count, 3));
  });
}

// Calls test for each way in which the bytes of a Group can move.
void each_way(void (*test)()) {
  for (const auto& [shares, spins] : {std::pair{false, true}, {true, true}, {true, false}}) {
    share_memory = shares;
    spin = spins;
    test();
  }
}

}  // namespace

SUITE(mailbox) {
  if (test::only_races) large = 80'000;
  each_way([] {
    messages_of_one_tag_keep_their_order();
    a_recv_ends_when_its_sender_has_been_told();
    tags_are_received_in_any_order();
    a_recv_sees_past_more_than_the_window();
    rings_of_large_messages_do_not_deadlock();
    a_rank_sends_to_itself();
    a_send_to_itself_waits_for_nobody();
    any_takes_what_comes();
    the_recv_that_was_called_first_gets_the_message();
    any_tag_leaves_the_bodies_of_objects_alone();
    a_recv_from_any_outlives_links_and_takes_nothing_when_given_up();
    a_recv_from_any_of_another_type_is_named();
    threads_share_a_mailbox();
    detached_transfers_end_by_themselves();
    a_detached_transfer_keeps_its_deadline();
    a_detached_watch_may_throw_anything();
    a_link_may_come_late();
    what_was_sent_before_a_close_arrives();
    a_peer_that_is_gone_fails_an_announced_message();
    a_recv_that_was_given_up_takes_no_message();
    only_a_recv_without_a_message_is_cancelled();
    a_recv_is_cancelled_while_another_thread_waits();
    other_types_and_sizes_are_named();
    shut_down_ends_all_waits();
    a_poll_that_fails_ends_all_waits();
    close_ends_what_was_left_to_the_thread();
    shut_down_lets_go_of_memory();
    a_forked_child_lets_go();
  });
  garbage_is_refused();
  a_message_is_sent_if_its_sender_cannot_be_read();
  what_a_sender_has_given_up_is_not_received();
  the_window_bounds_what_is_kept();
  announcements_are_bounded();
  matched_messages_give_credit();
}

// Takes 8 GiB of memory. Run it by its name: ctest runs only the suites that have the name of a file.
SUITE(mailbox_large) { each_way(more_than_2_GiB); }
