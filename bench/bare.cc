// The contender "bare" of bench/hosts.py: collectives over plain TCP sockets, for hosts with one rank each. It makes as
// few system calls and copies as possible, has no headers, checks nothing, and waits for ever. So its times are a bound
// for every library that uses TCP. Sums are of float32.

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr size_t kSmall = 64 << 10;  // bytes that a rank sends in all, up to which it sends whole arrays
constexpr size_t kTurn = 64 << 10;   // bytes of a system call, and of the buffer for data that is to be added
constexpr unsigned kYieldAfter = 4;  // passes over the connections
constexpr size_t kLine = 64;         // so that the buffers of two peers do not share a cache line

// One connection in one call. We send `first`, then as much of `second` as is ready. Of what arrives, the first
// `to_add` bytes are added to our sum, and the rest goes to `in`.
struct Peer {
  int fd = -1;
  const char* first = nullptr;
  size_t first_bytes = 0;
  const char* second = nullptr;
  size_t second_bytes = 0;
  size_t to_add = 0;
  char* in = nullptr;
  size_t in_bytes = 0;
  size_t sent = 0, got = 0, held = 0;  // `held` bytes of `got` are in the buffer, and are not a whole element
  char* buffer = nullptr;
  bool readable = false, writable = true;

  size_t to_send() const { return first_bytes + second_bytes - sent; }
  size_t to_get() const { return to_add + in_bytes - got; }
};

struct Call {
  std::vector<Peer>& peers;
  bool spin;
  const float* mine = nullptr;  // our own summand
  float* sum = nullptr;         // may be the same array
  size_t summed = 0;            // how many elements of `sum` hold at least one peer's summand
  Peer* source = nullptr;       // if set, `second` is what this peer sends us; otherwise it is our sum

  size_t ready() const {
    if (source) return source->got;
    size_t least = SIZE_MAX;
    for (const Peer& peer : peers) least = std::min(least, std::min(peer.got, peer.to_add) / sizeof(float) * sizeof(float));
    return least;
  }

  void add(Peer& peer, size_t bytes) {
    const size_t begin = (peer.got - peer.held) / sizeof(float);  // the first element in the buffer
    peer.got += bytes;
    peer.held += bytes;
    const size_t count = peer.held / sizeof(float);
    const float* theirs = reinterpret_cast<const float*>(peer.buffer);
    const size_t old = std::clamp(summed, begin, begin + count) - begin;
    for (size_t i = 0; i < old; i++) sum[begin + i] += theirs[i];
    for (size_t i = old; i < count; i++) sum[begin + i] = mine[begin + i] + theirs[i];
    summed = std::max(summed, begin + count);
    peer.held -= count * sizeof(float);
    std::memmove(peer.buffer, peer.buffer + count * sizeof(float), peer.held);
  }

  // Each returns the bytes moved, or -1 after an error.
  ssize_t send_some(Peer& peer) {
    const bool begins = peer.sent < peer.first_bytes;
    const size_t done = begins ? peer.sent : peer.sent - peer.first_bytes;
    const char* from = (begins ? peer.first : peer.second) + done;
    const size_t can = begins ? peer.first_bytes : std::min(peer.second_bytes, ready());
    const size_t bytes = std::min(kTurn, can - done);
    if (bytes == 0) return 0;
    const ssize_t moved = send(peer.fd, from, bytes, MSG_NOSIGNAL);
    if (moved < 0 && errno != EAGAIN) return -1;
    if (moved < static_cast<ssize_t>(bytes)) peer.writable = spin;
    peer.sent += static_cast<size_t>(std::max<ssize_t>(moved, 0));
    return std::max<ssize_t>(moved, 0);
  }

  ssize_t receive_some(Peer& peer) {
    const bool adds = peer.got < peer.to_add;
    char* into = adds ? peer.buffer + peer.held : peer.in + (peer.got - peer.to_add);
    const size_t bytes = std::min(adds ? std::min(kTurn - peer.held, peer.to_add - peer.got) : peer.to_get(), kTurn);
    const ssize_t moved = recv(peer.fd, into, bytes, 0);
    if (moved == 0 || (moved < 0 && errno != EAGAIN)) return -1;
    if (moved < static_cast<ssize_t>(bytes)) peer.readable = spin;
    if (moved < 0) return 0;
    if (adds) add(peer, static_cast<size_t>(moved));
    else peer.got += static_cast<size_t>(moved);
    return moved;
  }

  int wait() {
    std::vector<pollfd> fds;
    for (Peer& peer : peers) {
      const bool sends = peer.to_send() > 0 && !peer.writable;
      fds.push_back({peer.fd, static_cast<short>((sends ? POLLOUT : 0) | (peer.to_get() > 0 ? POLLIN : 0)), 0});
    }
    if (poll(fds.data(), fds.size(), -1) < 0) return -1;
    for (size_t i = 0; i < peers.size(); i++) {
      peers[i].readable = fds[i].revents & (POLLIN | POLLHUP | POLLERR);
      peers[i].writable = peers[i].writable || fds[i].revents & POLLOUT;
    }
    return 0;
  }

  int run() {
    for (unsigned pass = 1;; pass++) {
      bool done = true;
      ssize_t moved = 0;
      for (Peer& peer : peers) {
        ssize_t out = 0, in = 0;
        if (peer.writable && peer.to_send() > 0) out = send_some(peer);
        if (peer.readable && peer.to_get() > 0) in = receive_some(peer);
        if (out < 0 || in < 0) return -1;
        moved += out + in;
        done = done && peer.to_send() == 0 && peer.to_get() == 0;
      }
      if (done) return 0;
      if (moved > 0) continue;
      if (!spin && wait() < 0) return -1;
      if (spin && pass % kYieldAfter == 0) sched_yield();  // the other rank may be on our CPU
    }
  }
};

enum Collective { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kAllToAll };

}  // namespace

// Makes one call. `fds` has the non-blocking connection to each rank. A part has `bytes` bytes. Rank 0 is the root.
// Returns 0, or -1 after an error, in errno.
extern "C" int bare_call(int collective, const int* fds, int n, int me, int spin, char* x, char* out, size_t bytes) {
  static std::vector<char> space;
  const auto count = static_cast<size_t>(n), self = static_cast<size_t>(me);
  const auto block = [&](size_t r) { return bytes / sizeof(float) * r / count * sizeof(float); };
  const bool small = bytes * (count - 1) <= kSmall;
  const bool whole = collective == kAllReduce && small;
  const size_t room = (whole ? bytes : kTurn) + kLine;
  if (space.size() < room * count) space.resize(room * count);
  std::vector<Peer> peers;
  for (size_t r = 0; r < count; r++) {
    if (r == self) continue;
    Peer peer;
    peer.fd = fds[r];
    peer.buffer = space.data() + room * r;
    peer.readable = spin;
    if (whole) peer.first = x, peer.first_bytes = bytes, peer.in = peer.buffer, peer.in_bytes = bytes;
    else if (collective == kAllReduce) {
      peer.first = x + block(r), peer.first_bytes = block(r + 1) - block(r);
      peer.second = x + block(self), peer.second_bytes = peer.to_add = block(self + 1) - block(self);
      peer.in = x + block(r), peer.in_bytes = peer.first_bytes;
    } else if (collective == kAllGather) {
      peer.first = x, peer.first_bytes = peer.in_bytes = bytes, peer.in = out + bytes * r;
    } else if (collective == kReduceScatter) {
      peer.first = x + bytes * r, peer.first_bytes = peer.to_add = bytes;
    } else if (collective == kAllToAll) {
      peer.first = x + bytes * r, peer.first_bytes = peer.in_bytes = bytes, peer.in = out + bytes * r;
    } else if (small ? self == 0 : r == self + 1) {  // broadcast: the root sends to all, or each rank to the next
      peer.second = x, peer.second_bytes = bytes;
    } else if (small ? r == 0 : r + 1 == self) {
      peer.in = x, peer.in_bytes = bytes;
    }
    peers.push_back(peer);
  }
  Call call{peers, spin != 0};
  Peer root;
  if (collective == kAllReduce) {
    call.mine = reinterpret_cast<float*>(x + block(self)), call.sum = reinterpret_cast<float*>(x + block(self));
  } else if (collective == kReduceScatter) {
    call.mine = reinterpret_cast<float*>(x + bytes * self), call.sum = reinterpret_cast<float*>(out);
  } else if (collective == kBroadcast) {
    root.got = bytes;
    call.source = self == 0 ? &root : &peers[self - 1];  // the peers before us are at their own index
  } else {
    const bool in_parts = collective == kAllToAll;
    std::memcpy(out + bytes * self, in_parts ? x + bytes * self : x, bytes);
  }
  if (call.run() < 0) return -1;
  if (whole) {
    auto* total = reinterpret_cast<float*>(x);
    for (const Peer& peer : peers) {
      const auto* theirs = reinterpret_cast<const float*>(peer.buffer);
      for (size_t i = 0; i < bytes / sizeof(float); i++) total[i] += theirs[i];
    }
  }
  return 0;
}
