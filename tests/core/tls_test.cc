// Tests encrypted links: that bytes arrive, that nothing but the right key is accepted, and that no wait sleeps through an event.
#include "net/tls.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "check.h"
#include "tcp_pair.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"

using namespace mscomm;

namespace {

using Ends = std::array<int, 2>;
using Bytes = std::vector<char>;

Ends unix_pair() {
  Ends ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) < 0) throw system_error("socketpair", errno);
  return ends;
}

// The kernel accepts so few bytes at once that most sends are partial.
Ends tiny_pair() {
  const Ends ends = tcp_pair();
  constexpr int little = 4 << 10;
  for (const int end : ends) CHECK(setsockopt(end, SOL_SOCKET, SO_SNDBUF, &little, sizeof little) == 0);
  return ends;
}

Secret secret(bool connects, uint8_t first = 1) {
  Secret made{.connects = connects};
  std::iota(made.key.begin(), made.key.end(), first);
  return made;
}

std::array<Stream, 2> streams(const Ends& ends) {
  return {Stream(ends[0], "rank 1", secret(true)), Stream(ends[1], "rank 0", secret(false))};
}

Bytes random_bytes(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  std::ranges::generate(bytes, [&] { return static_cast<char>(random()); });
  return bytes;
}

constexpr size_t longest_handshake = 4000;  // since OpenSSL 3.5, a handshake has about 1600 bytes in each direction

constexpr int patience_ms = 60'000;  // a wait that takes this long has slept through an event

// Waits as the transports do, until bytes can move.
void wait_for(const Stream& stream, bool receives, bool sends) {
  Poll links;
  links.add(stream, receives, sends);
  CHECK(links.wait(patience_ms) != 0);
}

// Sends `out` and receives `in.size()` bytes, at most `piece` bytes at a time.
void exchange(Stream& stream, const Bytes& out, Bytes& in, size_t piece = 1 << 20) {
  size_t sent = 0, got = 0;
  while (sent < out.size() || got < in.size()) {
    size_t moved = 0;
    if (got < in.size()) moved += stream.receive(in.data() + got, std::min(piece, in.size() - got));
    got += moved;
    if (sent < out.size()) {
      const size_t now = stream.send(out.data() + sent, std::min(piece, out.size() - sent));
      sent += now;
      moved += now;
    }
    if (moved == 0) wait_for(stream, got < in.size(), sent < out.size());
  }
}

// Sends and receives until the link ends. Returns why it ended.
std::string ending(Stream& stream, const Bytes& out, size_t bytes_in) {
  try {
    Bytes in(bytes_in);
    exchange(stream, out, in);
    return "";
  } catch (const Stream::Broken& broken) {
    return broken.why;
  }
}

bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "no \"%s\" in \"%s\"\n", part.c_str(), text.c_str());
  return found;
}

void bytes_arrive_in_both_directions(Ends (*pair)(), size_t bytes, size_t piece) {
  auto [a, b] = streams(pair());
  const Bytes from_a = random_bytes(bytes, 1), from_b = random_bytes(bytes + 77, 2);
  Bytes at_a(from_b.size()), at_b(from_a.size());
  std::thread other([&, &b = b] { exchange(b, from_b, at_b, piece); });
  exchange(a, from_a, at_a, piece);
  other.join();
  CHECK(at_a == from_b);
  CHECK(at_b == from_a);
}

// A rank that only sends takes part in the handshake, too, and so does a rank that only receives.
void bytes_arrive_in_one_direction(bool from_client) {
  auto ends = streams(tcp_pair());
  Stream &from = ends[from_client ? 0 : 1], &to = ends[from_client ? 1 : 0];
  const Bytes sent = random_bytes(3 << 20, 3);
  Bytes got(sent.size()), none;
  std::thread other([&] { exchange(to, {}, got); });
  exchange(from, sent, none);
  other.join();
  CHECK(got == sent);
}

// Forwards bytes in both directions. `alter` may change them: it gets the direction (0: from the client), the position of the
// first byte in the stream, and the bytes. If it returns false, the relay closes both links.
class Relay {
 public:
  using Alter = std::function<bool(int direction, size_t at, char* bytes, size_t count)>;
  explicit Relay(Alter alter) : alter_(std::move(alter)), left_(tcp_pair()), right_(tcp_pair()), thread_([this] { run(); }) {}
  ~Relay() {
    for (const int end : {left_[1], right_[1]}) ::shutdown(end, SHUT_RDWR);
    thread_.join();
    close(left_[1]);
    close(right_[1]);
  }
  Ends ends() const { return {left_[0], right_[0]}; }

 private:
  void run() {
    const Ends inner{left_[1], right_[1]};
    std::array<size_t, 2> at{};
    std::array<bool, 2> open{true, true};
    while (open[0] || open[1]) {
      std::array<pollfd, 2> polled{pollfd{open[0] ? inner[0] : -1, POLLIN, 0}, pollfd{open[1] ? inner[1] : -1, POLLIN, 0}};
      if (poll(polled.data(), 2, -1) < 0) return;
      for (int i = 0; i < 2; i++) {
        if (!polled[i].revents) continue;
        char bytes[4096];
        const ssize_t count = recv(inner[i], bytes, sizeof bytes, 0);
        if (count > 0 && !alter_(i, at[i], bytes, static_cast<size_t>(count))) {
          for (const int end : inner) ::shutdown(end, SHUT_RDWR);
          return;
        }
        if (count <= 0 || ::send(inner[1 - i], bytes, static_cast<size_t>(count), MSG_NOSIGNAL) != count) {
          ::shutdown(inner[1 - i], SHUT_WR);
          open[i] = false;
          continue;
        }
        at[i] += static_cast<size_t>(count);
      }
    }
  }

  const Alter alter_;
  const Ends left_, right_;
  std::thread thread_;
};

// A rank that leaves says so in an encrypted record of 19 bytes.
void nothing_readable_is_on_the_wire() {
  std::string wire;
  {
    const Relay relay([&](int direction, size_t, char* bytes, size_t count) {
      if (direction == 0) wire.append(bytes, count);
      return true;
    });
    auto [a, b] = streams(relay.ends());
    const std::string text = "a secret text";
    const Bytes out(text.begin(), text.end());
    Bytes in(out.size()), none;
    std::thread other([&, &b = b] {
      exchange(b, {}, in);
      CHECK(ending(b, {}, 1) == "closed by the other side");
    });
    exchange(a, out, none);
    CHECK(a.close_for_writing());
    other.join();
    CHECK(in == out);
  }
  CHECK(wire.size() > 100 && wire.substr(wire.size() - 24, 5) == std::string("\x17\x03\x03\x00\x13", 5));
  CHECK(wire.find("secret") == std::string::npos);
}

// Whichever byte of the handshake or of the data is altered, the link ends, and no wrong byte is returned. The places leave out
// the length of a record: if it is too large, the receiver waits for more bytes, as if someone held them back.
void an_altered_byte_ends_the_link() {
  int refused = 0;
  const std::vector<size_t> places{0, 6, 20, 50, 100, 150, 200, 230, 300, 500, 1000, 20'000, 60'000};
  for (const int direction : {0, 1})
    for (const size_t place : places) {
      bool altered = false;
      const Relay relay([&](int from, size_t at, char* bytes, size_t count) {
        if (from == direction && place >= at && place < at + count) bytes[place - at] ^= 0x10, altered = true;
        return true;
      });
      auto ends = streams(relay.ends());
      const Bytes data = random_bytes(100'000, 4);
      std::array<std::string, 2> why;
      std::array<Bytes, 2> got;
      const auto run = [&](size_t i) {
        size_t sent = 0;
        try {
          while (got[i].size() < data.size() || sent < data.size()) {
            Bytes piece(5000);
            const size_t count = ends[i].receive(piece.data(), piece.size());
            got[i].insert(got[i].end(), piece.data(), piece.data() + count);
            const size_t now = sent < data.size() ? ends[i].send(data.data() + sent, data.size() - sent) : 0;
            sent += now;
            if (count + now == 0) wait_for(ends[i], true, sent < data.size());
          }
        } catch (const Stream::Broken& broken) {
          why[i] = broken.why;
        }
        ends[i].shut_down();
      };
      std::thread other(run, 1);
      run(0);
      other.join();
      for (const Bytes& bytes : got) CHECK(bytes.size() <= data.size() && std::equal(bytes.begin(), bytes.end(), data.begin()));
      CHECK(altered);
      const std::string& seen = why[1 - direction];  // what the receiver of the altered byte saw
      refused += CHECK(!seen.empty());
      if (place > longest_handshake) CHECK(has(seen, "TLS: cannot decrypt: decryption failed or bad record mac"));
    }
  CHECK(refused == static_cast<int>(2 * places.size()));
}

void a_link_that_is_cut_ends_with_an_error() {
  for (const size_t place : {size_t{100}, size_t{5000}, size_t{50'000}}) {
    const Relay relay([&](int from, size_t at, char*, size_t) { return from == 1 || at < place; });
    auto [a, b] = streams(relay.ends());
    std::string at_b;
    std::thread other([&, &b = b] { at_b = ending(b, {}, 1 << 20); });
    CHECK(ending(a, random_bytes(1 << 20, 5), 1) != "");
    other.join();
    CHECK(has(at_b, place < 1000 ? "closed by the other side in the TLS handshake" : "closed by the other side"));
  }
}

void another_key_is_refused() {
  for (const bool tcp : {true, false}) {
    const Ends ends = tcp ? tcp_pair() : unix_pair();
    Stream a(ends[0], "rank 1", secret(true, 1)), b(ends[1], "rank 0", secret(false, 2));
    std::string at_b;
    std::thread other([&] { at_b = ending(b, {}, 1); });
    CHECK(has(ending(a, Bytes(100), 0), "TLS: the handshake failed: "));
    other.join();
    CHECK(has(at_b, "binder does not verify"));
    CHECK(has(at_b, "Both sides need the same key"));
    CHECK(ending(b, {}, 1) == at_b);  // once failed, the link stays so
    CHECK(ending(b, Bytes(1), 0) == at_b);
  }
}

void two_clients_or_two_servers_do_not_agree() {
  const Ends ends = tcp_pair();
  Stream a(ends[0], "rank 1", secret(true)), b(ends[1], "rank 0", secret(true));
  std::string at_b;
  std::thread other([&] { at_b = ending(b, {}, 1); });
  CHECK(has(ending(a, {}, 1), "TLS"));
  other.join();
  CHECK(has(at_b, "TLS"));
}

void plain_bytes_are_refused(bool connects) {
  const Ends ends = tcp_pair();
  Stream a(ends[0], "rank 1", secret(connects)), plain(ends[1], "rank 0");
  CHECK(plain.send("MSCM, and some more bytes", 25) == 25);
  CHECK(has(ending(a, {}, 1), "TLS: the handshake failed: "));
  CHECK(has(ending(a, Bytes(1), 0), "TLS: the handshake failed: "));
  if (!connects) return;
  // A peer without a key sees the bytes of a handshake, in which there is no header.
  Bytes got(32);
  exchange(plain, {}, got);
  CHECK(std::memcmp(got.data(), "MSCM", 4) != 0);
}

// Bytes that were read from the socket together with earlier ones are no event for poll().
void bytes_that_were_read_ahead_wake_the_poll() {
  for (const size_t piece : {size_t{1}, size_t{1000}, size_t{16 << 10}, size_t{20'000}}) {
    auto [a, b] = streams(tcp_pair());
    const Bytes sent = random_bytes(piece == 1 ? 300 : 200'000, 6);
    Bytes got, none;
    std::thread other([&, &a = a] { exchange(a, sent, none); });
    while (got.size() < sent.size()) {
      wait_for(b, true, false);
      Bytes part(piece);
      const size_t count = b.receive(part.data(), std::min(piece, sent.size() - got.size()));
      got.insert(got.end(), part.data(), part.data() + count);
    }
    other.join();
    CHECK(got == sent);
    CHECK(!b.pending());
  }
}

// What was sent arrives, even if the sender closes its end at once. Then the receiver sees the end.
void closing_delivers_what_was_sent(Ends (*pair)()) {
  const Bytes sent = random_bytes(1 << 20, 7);
  Bytes got(sent.size());
  auto [a, b] = streams(pair());
  std::string after;
  std::thread other([&, &b = b] {
    exchange(b, {}, got);
    after = ending(b, {}, 1);
  });
  Bytes none;
  exchange(a, sent, none);
  std::vector<std::optional<Stream>> leaving;
  leaving.emplace_back(std::move(a));
  deliver_all(std::move(leaving), 60);
  other.join();
  CHECK(got == sent);
  CHECK(after == "closed by the other side");
}

// A peer that reads nothing holds up nobody who leaves: not longer than the timeout.
void closing_does_not_wait_for_ever() {
  auto [a, b] = streams(tiny_pair());
  Bytes hello(1), none;
  std::thread other([&, &b = b] { exchange(b, {}, hello); });
  exchange(a, Bytes(1), none);
  other.join();
  const Bytes data(1 << 20);
  while (a.send(data.data(), data.size()) > 0) {
  }
  std::vector<std::optional<Stream>> leaving;
  leaving.emplace_back(std::move(a));
  const auto began = Clock::now();
  deliver_all(std::move(leaving), 0.2);
  CHECK(seconds_since(began) < 30);
}

// The sender changes its key after 2^16 records. A record with a key update has 22 bytes, and a record with one byte of data
// has 18.
void keys_are_changed() {
  std::string wire;
  Bytes sent(140'000), got(sent.size()), none;
  {
    const Relay relay([&](int direction, size_t, char* bytes, size_t count) {
      if (direction == 0) wire.append(bytes, count);
      return true;
    });
    auto [a, b] = streams(relay.ends());
    for (size_t i = 0; i < sent.size(); i++) sent[i] = static_cast<char>(i * 7);
    std::thread other([&, &b = b] { exchange(b, {}, got); });
    exchange(a, sent, none, 1);  // one record for each byte
    other.join();
  }
  CHECK(got == sent);
  size_t updates = 0;
  for (size_t at = 0; at + 5 <= wire.size();) {
    const size_t length = static_cast<uint8_t>(wire[at + 3]) * 256u + static_cast<uint8_t>(wire[at + 4]);
    updates += length == 22;
    at += 5 + length;
  }
  CHECK(updates == sent.size() >> 16);
}

void shake_hands_completes_handshakes() {
  auto [a, b] = streams(tcp_pair());
  CHECK(a.waits_for_reader());
  Stream* const one[] = {&a};
  std::thread other([&, &b = b] {
    Stream* const it[] = {&b};
    shake_hands(it, Deadline(60));
  });
  shake_hands(one, Deadline(60));
  other.join();
  CHECK(!a.waits_for_reader());
  // Now, a send needs nobody who waits for it.
  CHECK(a.send("whole", 5) == 5);
  Bytes got(5);
  exchange(b, {}, got);
  CHECK(std::memcmp(got.data(), "whole", 5) == 0);
}

void a_forked_child_leaves_the_link_alone() {
  auto [a, b] = streams(tcp_pair());
  Bytes first(3), none;
  std::thread other([&, &b = b] { exchange(b, {}, first); });
  exchange(a, Bytes{'o', 'n', 'e'}, none);
  other.join();
  const pid_t child = fork();
  if (child == 0) {
    a.abandon();
    b.abandon();
    _exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  Bytes second(3);
  std::thread again([&, &b = b] { exchange(b, {}, second); });
  exchange(a, Bytes{'t', 'w', 'o'}, none);
  again.join();
  CHECK((second == Bytes{'t', 'w', 'o'}));
}

struct Patient final : Watch {
  void look(const Deadline& deadline, const Missing&) override {
    if (deadline.passed()) throw Error("CollectiveTimeout", "deadline");
  }
  bool broken() const override { return false; }
};

// Each rank sends to all others and receives from them, and then leaves.
void a_mesh_is_encrypted() {
  constexpr size_t size = 3, bytes = (2 << 20) + 5;
  std::array<std::vector<std::optional<Stream>>, size> links;
  for (auto& of_rank : links) of_rank.resize(size);
  for (size_t a = 0; a < size; a++)
    for (size_t b = a + 1; b < size; b++) {
      const Ends ends = tiny_pair();
      links[a][b].emplace(ends[0], "rank " + std::to_string(b), secret(false));
      links[b][a].emplace(ends[1], "rank " + std::to_string(a), secret(true));
    }
  const auto run = [&](int rank) {
    Mesh mesh({0, 1, 2}, rank, 0, false, std::move(links[static_cast<size_t>(rank)]), [](uint64_t) { return std::nullopt; });
    Patient watch;
    for (uint64_t number = 1; number <= 3; number++) {
      Signature call;
      call.number = number;
      mesh.begin(call);
      Bytes out(bytes, static_cast<char>(rank + 1));
      std::array<Bytes, size> in;
      std::vector<Piece> sends, receives;
      for (int peer = 0; peer < static_cast<int>(size); peer++) {
        if (peer == rank) continue;
        in[peer].resize(bytes);
        sends.push_back({peer, out.data(), bytes});
        receives.push_back({peer, in[peer].data(), bytes});
      }
      mesh.exchange(sends, receives, {watch, Deadline(120)});
      for (int peer = 0; peer < static_cast<int>(size); peer++)
        if (peer != rank) CHECK(in[peer] == Bytes(bytes, static_cast<char>(peer + 1)));
    }
    mesh.close(60);
  };
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < static_cast<int>(size); rank++) ranks.emplace_back(run, rank);
  for (std::thread& rank : ranks) rank.join();
}

// A rank that only sends waits for nobody, so headers and pieces of several calls arrive together, and in parts.
void calls_of_all_sizes_follow_one_another(bool encrypted) {
  const Ends ends = tiny_pair();
  const auto run = [&](int rank) {
    std::vector<std::optional<Stream>> links(2);
    links[1 - rank].emplace(ends[rank], "the other rank", encrypted ? std::optional(secret(rank == 0)) : std::nullopt);
    Mesh mesh({0, 1}, rank, 0, rank == 0, std::move(links), [](uint64_t) { return std::nullopt; });
    Patient watch;
    const Wait wait{watch, Deadline(120)};
    std::mt19937 both(3), own(rank);  // both ranks draw the same numbers from `both`
    const std::vector<size_t> sizes{0, 1, 100, 3000, 3928, 3929, 5000, 16 << 10, (16 << 10) + 1, 50'000};
    std::deque<Bytes> kept;  // what may still be queued
    int sender = 0;          // 2: both ranks send
    for (uint64_t number = 1; number <= (test::only_races ? 100 : 600); number++) {
      if (both() % 16 == 0) sender = static_cast<int>(both() % 3);
      Signature call;
      call.number = number;
      mesh.begin(call);
      for (size_t exchanges = 1 + both() % 3; exchanges > 0; exchanges--) {
        const size_t bytes = sizes[both() % sizes.size()];
        const auto seed = static_cast<unsigned>(3 * number + exchanges);
        if (sender != 1 - rank) {
          const Piece out{1 - rank, kept.emplace_back(random_bytes(bytes, seed)).data(), bytes};
          mesh.send({&out, 1});
        }
        if (own() % 4 == 0) mesh.progress();
        if (sender == rank) continue;
        Bytes got(bytes);
        const Piece in{1 - rank, got.data(), bytes};
        mesh.receive({&in, 1}, wait);
        if (!CHECK(got == random_bytes(bytes, seed))) return;
      }
      if (own() % 8 == 0) mesh.last_look();
      mesh.exchange({}, {}, wait);
    }
    mesh.close(60);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}

// A link that has taken nothing takes the same bytes again, also if more bytes follow now.
void parts_may_grow() {
  auto [a, b] = streams(tiny_pair());
  Bytes first(168, 'a'), second(168, 'b'), third(8000, 'c'), got(4096);
  const std::vector<iovec> parts{{first.data(), 168}, {second.data(), 168}, {third.data(), third.size()}};
  const Deadline deadline(60);
  std::array<Stream*, 2> both{&a, &b};
  shake_hands(both, deadline);
  while (a.send(std::span(parts).first(2)) > 0) {
  }
  size_t sent = 0;
  while (sent == 0 && CHECK(!deadline.passed())) {
    b.receive(got.data(), got.size());
    sent = a.send(parts);
  }
  CHECK(sent >= 336);
}

void messages_are_encrypted() {
  const Ends ends = tiny_pair();
  Mailbox from({0, 1}, 0, 7, true), to({0, 1}, 1, 7, true);
  from.add_link(true, 1, Stream(ends[0], "rank 1", secret(false)));
  to.add_link(false, 0, Stream(ends[1], "rank 0", secret(true)));
  Patient watch;
  const std::vector<size_t> sizes{0, 1, 1000, 16 << 10, 3 << 20, 5};
  std::thread other([&] {
    for (const size_t bytes : sizes) {
      Bytes out(bytes);
      to.wait(to.start({false, 0, 4, Dtype::int8, out.data(), bytes}), {watch, Deadline(120)});
      CHECK(out == random_bytes(bytes, 9));
    }
  });
  for (const size_t bytes : sizes) {
    Bytes x = random_bytes(bytes, 9);
    from.wait(from.start({true, 1, 4, Dtype::int8, x.data(), bytes}), {watch, Deadline(120)});
  }
  from.close(60);
  other.join();
}

}  // namespace

SUITE(tls) {
  CHECK(tls_version().starts_with("OpenSSL 3"));
  for (auto* const pair : {tcp_pair, unix_pair, tiny_pair})
    for (const size_t piece : {size_t{1} << 20, size_t{10'000}}) bytes_arrive_in_both_directions(pair, 4 << 20, piece);
  bytes_arrive_in_both_directions(tcp_pair, 3000, 1);
  for (const bool from_client : {true, false}) bytes_arrive_in_one_direction(from_client);
  nothing_readable_is_on_the_wire();
  an_altered_byte_ends_the_link();
  a_link_that_is_cut_ends_with_an_error();
  another_key_is_refused();
  two_clients_or_two_servers_do_not_agree();
  for (const bool connects : {true, false}) plain_bytes_are_refused(connects);
  bytes_that_were_read_ahead_wake_the_poll();
  for (auto* const pair : {tcp_pair, unix_pair, tiny_pair}) closing_delivers_what_was_sent(pair);
  closing_does_not_wait_for_ever();
  keys_are_changed();
  shake_hands_completes_handshakes();
  a_forked_child_leaves_the_link_alone();
  a_mesh_is_encrypted();
  for (const bool encrypted : {false, true}) calls_of_all_sizes_follow_one_another(encrypted);
  parts_may_grow();
  messages_are_encrypted();
}
