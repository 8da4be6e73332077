#include "net/ring.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/call.h"
#include "base/fence.h"
#include "net/stream.h"

namespace mscomm {

namespace {
// A long message moves in pieces, so that one end reads a piece while the other end writes the next.
constexpr size_t piece_bytes = 16 << 10;
}  // namespace

Ring::Ring(char* memory, int fd, bool makes) : memory_(memory), fd_(fd), me_(makes ? 0 : 1) {
  if (makes) shared().maker = introduction();
}

Ring::~Ring() {
  if (getpid() != owner_) return;
  close();
  shared().destroyed.fetch_add(1);
}

bool Ring::unused(const char* memory) { return reinterpret_cast<const Shared*>(memory)->destroyed.load() == 2; }

size_t Ring::send(const void* data, size_t bytes) {
  if (heard_.load(std::memory_order_relaxed)) look_into_socket();
  if (gone_ || peer().closed.load(std::memory_order_relaxed)) throw Stream::Broken{why_, 0, true};
  const size_t room = capacity[me_];
  char* const ring = this->data(me_);
  size_t done = 0;
  while (done < bytes) {
    if (written_ - peer_read_ == room) peer_read_ = out().read.load(std::memory_order_acquire);
    const uint64_t used = written_ - peer_read_;
    if (used > room) throw Stream::Broken{"it has damaged the shared memory of the link"};
    const size_t at = written_ % room;
    const size_t now = std::min({bytes - done, piece_bytes, room - used, room - at});
    if (now == 0) break;
    copy(ring + at, static_cast<const char*>(data) + done, now);
    done += now;
    written_ += now;
    out().written.store(written_);
    ring_for(bytes_to_read);
  }
  return done;
}

size_t Ring::receive(void* data, size_t bytes) {
  if (heard_.load(std::memory_order_relaxed)) look_into_socket();
  const size_t room = capacity[1 - me_];
  const char* const ring = this->data(1 - me_);
  // Load this before `written`: what the peer sent before it closed must still be received.
  const bool ends = gone_ || peer().closed.load(std::memory_order_acquire);
  size_t done = 0;
  while (done < bytes) {
    const uint64_t there = in().written.load(std::memory_order_acquire) - read_;
    if (there > room) throw Stream::Broken{"it has damaged the shared memory of the link"};
    const size_t at = read_ % room;
    const size_t now = std::min({bytes - done, piece_bytes, static_cast<size_t>(there), room - at});
    if (now == 0) break;
    copy(static_cast<char*>(data) + done, ring + at, now);
    done += now;
    read_ += now;
    in().read.store(read_);
    // Do not wake the peer for each piece: it can write more at once when half of the ring is free.
    if (there - now <= room / 2) ring_for(room_to_write);
  }
  if (done == 0 && bytes > 0 && ends) throw Stream::Broken{why_, 0, true};
  return done;
}

bool Ring::reads_maker() {
  if (!reads_maker_) reads_maker_ = can_read(shared().maker);
  return *reads_maker_;
}

bool Ring::read_from_maker(uint64_t address, void* to, size_t bytes) {
  const bool read = read_process(shared().maker, address, to, bytes) == bytes;
  // Before a sender gives up a message, and its program may change the array, it closes the link. So if this end has read a
  // changed byte, it must see `closed` here. The acquire fence keeps the load of `closed` behind the reads, which a load with
  // memory_order_acquire would not do. It pairs with the release fence in close(). ARM needs both.
  fence(std::memory_order_acquire);
  if (peer().closed.load(std::memory_order_relaxed)) throw Stream::Broken{why_, 0, true};
  return read;
}

bool Ring::ready(bool receives, bool sends) const {
  if (heard_.load(std::memory_order_relaxed) || peer().closed.load()) return true;
  if (receives && in().written.load() != in().read.load(std::memory_order_relaxed)) return true;
  return sends && out().written.load(std::memory_order_relaxed) - out().read.load() < capacity[me_];
}

bool Ring::sleeps(bool receives, bool sends) {
  // This store, the loads in ready(), the stores of `written` and `read` and the load in ring_for() are seq_cst. So if one end
  // moves bytes while the other goes to sleep, at least one of the two notices the other.
  mine().wants.store((receives ? bytes_to_read : nothing) | (sends ? room_to_write : nothing));
  return !ready(receives, sends);
}

// Wakes the peer if it sleeps and waits for `what`, which has just happened.
void Ring::ring_for(uint32_t what) {
  if (!(peer().wants.load() & what)) return;
  peer().wants.store(nothing, std::memory_order_relaxed);
  // If the socket is full of bells, one more is not needed. If it has ended, the next look into the socket says so.
  if (::send(fd_, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EAGAIN && errno != EWOULDBLOCK) heard();
}

void Ring::look_into_socket() {
  heard_.store(false, std::memory_order_relaxed);
  char bells[64];
  while (!gone_) {
    const ssize_t got = ::recv(fd_, bells, sizeof bells, MSG_DONTWAIT);
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    gone_ = true;
    if (got < 0) why_ = std::strerror(errno);
  }
}

void Ring::close() {
  mine().closed.store(1);
  fence(std::memory_order_release);  // the program's writes to its arrays come after this; see read_from_maker()
  ring_for(bytes_to_read | room_to_write);
}

}  // namespace mscomm
