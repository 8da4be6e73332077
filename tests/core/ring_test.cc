// Tests the shared memory of a link: which bytes arrive, that no end sleeps forever, and how the link ends. The ends are two
// Streams, or two Rings, of one process or of a process and its child.
#include "net/ring.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "net/stream.h"
#include "ring_memory.h"

using namespace mscomm;

namespace {

constexpr int a_minute_ms = 60'000;  // longer than any wait of these tests, unless a wake-up is lost

std::array<int, 2> socket_pair() {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) < 0)
    throw system_error("socketpair", errno);
  return ends;
}

// Two Streams that share memory. ends[0] has made the memory, and ends[1] has been told where it is.
struct Pair {
  Pair() {
    const auto [a, b] = socket_pair();
    ends[0].emplace(a, "the other end");
    ends[1].emplace(b, "the end that made the memory");
    ends[0]->share(memory.get(), 42);
    ends[1]->opens_shared([this](uint64_t offset) {
      CHECK(offset == 42);
      return memory.get();
    });
    char none;
    CHECK(ends[1]->receive(&none, 1) == 0);
  }
  RingMemory memory = ring_memory();
  std::array<std::optional<Stream>, 2> ends;
};

// Two Rings. The ring of ends[0] has made the memory.
struct Rings {
  ~Rings() {
    ends[0].reset(), ends[1].reset();
    for (const int fd : fds) close(fd);
  }
  RingMemory memory = ring_memory();
  const std::array<int, 2> fds = socket_pair();
  std::array<std::optional<Ring>, 2> ends{std::optional<Ring>(std::in_place, memory.get(), fds[0], true),
                                          std::optional<Ring>(std::in_place, memory.get(), fds[1], false)};
};

// The byte number `at` of what an end sends.
char byte(uint64_t at, size_t end) { return static_cast<char>(at * 31 + at / 251 + end * 7); }

// Sends or receives the next bytes, at most `bytes`. `total` is the number of bytes that have been moved so far.
template <typename End>
size_t send_next(End& end, size_t which, uint64_t& total, size_t bytes) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; i++) data[i] = byte(total + i, which);
  const size_t moved = end.send(data.data(), bytes);
  total += moved;
  return moved;
}
template <typename End>
size_t receive_next(End& end, size_t from, uint64_t& total, size_t bytes) {
  std::vector<char> data(bytes);
  const size_t moved = end.receive(data.data(), bytes);
  bool good = true;
  for (size_t i = 0; i < moved; i++) good = good && data[i] == byte(total + i, from);
  CHECK(good);
  total += moved;
  return moved;
}

// Returns how the link has ended, or "" if it has not ended.
std::string ending(const std::function<void()>& use) {
  try {
    use();
    return "";
  } catch (const Stream::Broken& broken) {
    return broken.why;
  }
}

void bytes_arrive_in_order() {
  Rings rings;
  std::mt19937 random(1);
  std::array<uint64_t, 2> sent{}, received{};
  for (int i = 0; i < 4000; i++) {
    const size_t end = random() % 2, room = Ring::capacity[end];
    // Most pieces are small. Some are larger than the ring.
    const size_t bytes = random() % (random() % 4 ? room / 16 : room * 2);
    const size_t used = sent[end] - received[end];
    if (random() % 2) {
      CHECK(rings.ends[end]->ready(false, true) == (used < room));
      CHECK(send_next(*rings.ends[end], end, sent[end], bytes) == std::min(bytes, room - used));
    } else {
      CHECK(rings.ends[1 - end]->ready(true, false) == (used > 0));
      CHECK(receive_next(*rings.ends[1 - end], end, received[end], bytes) == std::min<size_t>(bytes, used));
    }
  }
  for (const size_t end : {0, 1}) CHECK(received[end] > 50 * Ring::capacity[end]);
}

// Moves `bytes` bytes in each direction. Sleeps as soon as no bytes can move.
void exchange(Stream& stream, size_t end, uint64_t bytes, size_t most, const std::optional<Poll::Awake>& awake) {
  std::mt19937 random(static_cast<unsigned>(end));
  uint64_t sent = 0, received = 0;
  while (sent < bytes || received < bytes) {
    size_t moved = 0;
    if (sent < bytes) moved += send_next(stream, end, sent, std::min(bytes - sent, 1 + random() % most));
    if (received < bytes) moved += receive_next(stream, 1 - end, received, std::min(bytes - received, 1 + random() % most));
    if (moved > 0) continue;
    Poll poll;
    poll.add(stream, received < bytes, sent < bytes);
    if (!CHECK(poll.wait(a_minute_ms, awake) != 0)) return;
  }
}

void both_ends_sleep_and_wake_each_other() {
  const auto never = [] { return false; };
  const auto at_once = [] { return true; };
  const std::optional<Poll::Awake> waits[]{std::nullopt, Poll::Awake{true, never}, Poll::Awake{false, at_once}};
  for (const auto& awake : waits)
    for (const size_t most : {64u, 3000u, 300'000u}) {
      Pair pair;
      const uint64_t bytes = most == 64 ? 50'000 : 1'000'000;
      std::thread other([&] { exchange(*pair.ends[1], 1, bytes, most, awake); });
      exchange(*pair.ends[0], 0, bytes, most, awake);
      other.join();
    }
}

// Each end sends one byte and then sleeps until the other end has sent one.
void a_byte_goes_to_and_fro() {
  Pair pair;
  constexpr uint64_t rounds = 20'000;
  const auto play = [&](size_t end) {
    uint64_t sent = 0, received = 0;
    while (received < rounds) {
      if (sent < received + (end == 0)) CHECK(send_next(*pair.ends[end], end, sent, 1) == 1);
      while (receive_next(*pair.ends[end], 1 - end, received, 1) == 0) {
        Poll poll;
        poll.add(*pair.ends[end], true, false);
        if (!CHECK(poll.wait(a_minute_ms) != 0)) return;
      }
    }
    if (sent < rounds) send_next(*pair.ends[end], end, sent, 1);
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
}

// A sender that sleeps wakes up as soon as half of the ring is free, and not before.
void a_sender_sleeps_until_half_is_free() {
  for (const size_t end : {0, 1}) {
    Rings rings;
    Ring &from = *rings.ends[end], &to = *rings.ends[1 - end];
    const size_t room = Ring::capacity[end];
    const auto bells = [&] {
      char bytes[8];
      return ::recv(rings.fds[end], bytes, sizeof bytes, MSG_DONTWAIT);
    };
    uint64_t sent = 0, received = 0;
    CHECK(send_next(from, end, sent, room + 1) == room);
    CHECK(from.sleeps(false, true));
    receive_next(to, end, received, room / 2 - 1);
    CHECK(bells() == -1);
    receive_next(to, end, received, 1);
    receive_next(to, end, received, 1);
    CHECK(bells() == 1);
    CHECK(!from.sleeps(false, true));
    from.wakes();
  }
}

using Closes = void (*)(std::optional<Stream>&);
constexpr Closes ways_to_close[]{[](std::optional<Stream>& stream) { CHECK(stream->close_for_writing()); },
                                 [](std::optional<Stream>& stream) { stream->shut_down(); },
                                 [](std::optional<Stream>& stream) { stream.reset(); }};

void what_was_sent_before_the_end_arrives() {
  for (const Closes close : ways_to_close)
    for (const size_t end : {0, 1}) {
      Pair pair;
      uint64_t sent = 0, received = 0, back = 0;
      Stream& to = *pair.ends[1 - end];
      send_next(*pair.ends[end], end, sent, 3000);
      close(pair.ends[end]);
      CHECK(receive_next(to, end, received, 1000) == 1000);
      CHECK(ending([&] { send_next(to, 1 - end, back, 1); }) == "closed by the other side");
      CHECK(receive_next(to, end, received, 3000) == 2000);
      for (int i = 0; i < 2; i++) CHECK(ending([&] { receive_next(to, end, received, 1); }) == "closed by the other side");
      CHECK(received == sent && back == 0);
    }
}

// Receives all bytes, and sleeps while there are none. Returns how the link has ended.
std::string receive_to_the_end(Stream& stream, size_t from, uint64_t& received) {
  return ending([&] {
    while (true) {
      if (receive_next(stream, from, received, 1000) > 0) continue;
      Poll poll;
      poll.add(stream, true, false);
      if (!CHECK(poll.wait(a_minute_ms) != 0)) return;
    }
  });
}

void the_end_wakes_a_thread_that_sleeps() {
  for (const Closes close : ways_to_close)
    for (const size_t end : {0, 1})
      for (const bool sends : {false, true}) {
        Pair pair;
        Stream& other = *pair.ends[1 - end];
        uint64_t sent = 0, received = 0, back = 0;
        send_next(*pair.ends[end], end, sent, 3000);
        std::thread sleeper([&] {
          if (!sends) {
            CHECK(receive_to_the_end(other, end, received) == "closed by the other side" && received == 3000);
            return;
          }
          CHECK(ending([&] {
                  while (true) {
                    if (send_next(other, 1 - end, back, 1000) > 0) continue;
                    Poll poll;
                    poll.add(other, false, true);
                    if (!CHECK(poll.wait(a_minute_ms) != 0)) return;
                  }
                }) == "closed by the other side");
        });
        poll(nullptr, 0, 20);
        close(pair.ends[end]);
        sleeper.join();
      }
}

// The process of the other end is killed while a thread of this process sleeps.
void a_killed_process_ends_the_link() {
  for (const size_t end : {0, 1}) {
    const RingMemory memory = ring_memory();
    const auto fds = socket_pair();
    const auto make = [&](size_t which) {
      close(fds[1 - which]);
      Stream stream(fds[which], "the other process");
      if (which == 0) stream.share(memory.get(), 7);
      else stream.opens_shared([&](uint64_t) { return memory.get(); });
      return stream;
    };
    const pid_t child = fork();
    if (child == 0) {
      Stream stream = make(end);
      uint64_t sent = 0, received = 0;
      while (end == 1 && receive_next(stream, 0, received, 1) == 0) poll(nullptr, 0, 1);
      send_next(stream, end, sent, 3000);
      poll(nullptr, 0, 50);
      send_next(stream, end, sent, 1000);
      kill(getpid(), SIGKILL);
    }
    Stream stream = make(1 - end);
    uint64_t sent = 0, received = 0;
    if (end == 1) send_next(stream, 0, sent, 1);
    CHECK(receive_to_the_end(stream, end, received) != "" && received == 4000);
    CHECK(ending([&] { send_next(stream, 1 - end, sent, 1); }) != "");
    CHECK(!Ring::unused(memory.get()));
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
  }
}

// A forked child has copies of the ends. It neither ends the links nor frees the memory of its parent.
void a_forked_child_is_no_end() {
  for (const bool abandons : {false, true}) {
    Pair pair;
    uint64_t sent = 0, received = 0;
    const pid_t child = fork();
    if (child == 0) {
      for (auto& end : pair.ends) {
        if (abandons) end->abandon();
        end.reset();
      }
      _exit(Ring::unused(pair.memory.get()) || test::failed());
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(send_next(*pair.ends[0], 0, sent, 3000) == 3000 && receive_next(*pair.ends[1], 0, received, 3000) == 3000);
  }
}

// The four counters, as the peer can change them.
struct Counters {
  explicit Counters(const RingMemory& memory) : first(memory.get()) {}
  std::atomic<uint64_t>& written(size_t end) const { return *reinterpret_cast<std::atomic<uint64_t>*>(first + 128 * end); }
  std::atomic<uint64_t>& read(size_t end) const { return *reinterpret_cast<std::atomic<uint64_t>*>(first + 128 * end + 64); }
  char* const first;
};

void damaged_counters_end_the_link() {
  const std::string damaged = "it has damaged the shared memory of the link";
  for (const size_t end : {0, 1}) {
    const size_t room = Ring::capacity[end];
    // How far the peer moves its counter beyond what is possible.
    for (const uint64_t far : {uint64_t{1}, uint64_t{room}, uint64_t{1} << 40, ~uint64_t{0} - 2 * room}) {
      Rings rings;
      const Counters counters(rings.memory);
      uint64_t sent = 0, received = 0;
      std::vector<char> data(3 * room);
      CHECK(send_next(*rings.ends[end], end, sent, room) == room &&
            receive_next(*rings.ends[1 - end], end, received, 100) == 100);
      CHECK(counters.written(end) == room && counters.read(end) == 100);
      counters.written(end) = 100 + room + far;
      CHECK(ending([&] { rings.ends[1 - end]->receive(data.data(), data.size()); }) == damaged);
      counters.read(end) = room + far;
      CHECK(ending([&] { rings.ends[end]->send(data.data(), data.size()); }) == damaged);
    }
  }
}

void random_counters_are_harmless() {
  std::mt19937_64 random(2);
  for (int i = 0; i < 300; i++) {
    Rings rings;
    const Counters counters(rings.memory);
    for (int step = 0; step < 30; step++) {
      const size_t end = random() % 2, bytes = random() % (2 * Ring::capacity[end]);
      auto& counter = random() % 2 ? counters.written(end) : counters.read(end);
      if (random() % 4 == 0) counter = random() % 2 ? random() : counter + random() % (3 * Ring::capacity[end]);
      std::vector<char> data(bytes);
      ending([&] { CHECK(rings.ends[end]->send(data.data(), bytes) <= bytes); });
      ending([&] { CHECK(rings.ends[1 - end]->receive(data.data(), bytes) <= bytes); });
      ending([&] { CHECK(rings.ends[1 - end]->sleeps(true, true) != rings.ends[1 - end]->ready(true, true)); });
    }
  }
}

void the_offset_may_arrive_in_parts() {
  const RingMemory memory = ring_memory();
  const auto [fd, other] = socket_pair();
  Stream to(other, "the end that made the memory");
  uint64_t asked = 0, sent = 0, received = 0;
  to.opens_shared([&](uint64_t offset) {
    asked = offset;
    return memory.get();
  });
  const uint64_t offset = 0x0102030405060708;
  const auto* bytes = reinterpret_cast<const char*>(&offset);
  CHECK(receive_next(to, 0, received, 9) == 0);
  CHECK(::send(fd, bytes, 3, 0) == 3);
  CHECK(receive_next(to, 0, received, 9) == 0 && asked == 0);
  Ring from(memory.get(), fd, true);
  send_next(from, 0, sent, 9);
  CHECK(::send(fd, bytes + 3, 5, 0) == 5);
  CHECK(receive_next(to, 0, received, 9) == 9 && asked == offset);
  close(fd);
}

void without_memory_the_socket_is_used() {
  const auto [a, b] = socket_pair();
  Stream from(a, "the other end"), to(b, "the end that has no memory");
  uint64_t asked = 0, sent[2]{}, received[2]{};
  from.share(nullptr, 7);
  to.opens_shared([&](uint64_t offset) -> char* {
    asked = offset;
    return nullptr;
  });
  for (int i = 0; i < 3; i++) {
    CHECK(send_next(from, 0, sent[0], 1000) == 1000 && receive_next(to, 0, received[0], 2000) == 1000 && asked == 7);
    CHECK(send_next(to, 1, sent[1], 1000) == 1000 && receive_next(from, 1, received[1], 2000) == 1000);
  }
  from.shut_down();
  CHECK(ending([&] { receive_next(to, 0, received[0], 1); }) == "closed by the other side");
}

void a_wrong_offset_ends_the_link() {
  const RingMemory memory = ring_memory();
  const auto [a, b] = socket_pair();
  Stream from(a, "the other end"), to(b, "the end that made the memory");
  from.share(memory.get(), 7);
  to.opens_shared([](uint64_t) -> char* { throw Stream::Broken{"no such memory"}; });
  char data;
  CHECK(ending([&] { to.receive(&data, 1); }) == "no such memory");
}

// The link ends before the other end has learned where the memory is.
void the_end_may_come_before_the_offset() {
  const auto [fd, other] = socket_pair();
  Stream to(other, "the end that made the memory");
  to.opens_shared([](uint64_t) -> char* {
    CHECK(false);
    return nullptr;
  });
  CHECK(::send(fd, "abc", 3, 0) == 3);
  close(fd);
  uint64_t received = 0;
  CHECK(receive_to_the_end(to, 0, received) == "closed by the other side");
}

void memory_is_unused_when_both_ends_are_gone() {
  for (const size_t first : {0, 1}) {
    Pair pair;
    CHECK(!Ring::unused(pair.memory.get()));
    pair.ends[first]->shut_down();
    pair.ends[first].reset();
    pair.ends[1 - first]->shut_down();
    CHECK(!Ring::unused(pair.memory.get()));
    pair.ends[1 - first].reset();
    CHECK(Ring::unused(pair.memory.get()));
  }
}

// The memory is free even if the other end has never received anything. `first`: the end that is destroyed first.
void an_end_that_never_received_frees_the_memory() {
  for (const size_t first : {0, 1}) {
    const RingMemory memory = ring_memory();
    const auto [a, b] = socket_pair();
    std::array<std::optional<Stream>, 2> ends;
    ends[0].emplace(a, "the other end");
    ends[1].emplace(b, "the end that made the memory");
    ends[1]->opens_shared([&](uint64_t) { return memory.get(); });
    ends[0]->share(memory.get(), 7);
    Stream moved = std::move(*ends[1]);
    ends[1].reset();
    CHECK(!Ring::unused(memory.get()));
    ends[1].emplace(std::move(moved));
    ends[1]->shut_down();
    ends[first].reset();
    CHECK(!Ring::unused(memory.get()));
    ends[1 - first].reset();
    CHECK(Ring::unused(memory.get()));
  }
}

}  // namespace

SUITE(ring) {
  a_killed_process_ends_the_link();
  a_forked_child_is_no_end();
  bytes_arrive_in_order();
  both_ends_sleep_and_wake_each_other();
  a_byte_goes_to_and_fro();
  a_sender_sleeps_until_half_is_free();
  what_was_sent_before_the_end_arrives();
  the_end_wakes_a_thread_that_sleeps();
  damaged_counters_end_the_link();
  random_counters_are_harmless();
  the_offset_may_arrive_in_parts();
  without_memory_the_socket_is_used();
  a_wrong_offset_ends_the_link();
  the_end_may_come_before_the_offset();
  memory_is_unused_when_both_ends_are_gone();
  an_end_that_never_received_frees_the_memory();
}
