#include "net/stream.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "net/awake.h"
#include "net/ring.h"
#include "net/tls.h"

namespace mscomm {

namespace {
// From Linux's socket.h (5.14), which older C libraries do not have.
constexpr int so_buf_lock = 72, sndbuf_is_locked = 1;

constexpr int unsent_bytes = 128 << 10;

constexpr int longest_poll_ms = 50;  // so that deadlines are noticed

constexpr std::chrono::seconds ask_every{1}, same_wait{3};

bool later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

int option(int fd, int level, int name) {
  int value = 0;
  socklen_t length = sizeof value;
  return getsockopt(fd, level, name, &value, &length) == 0 ? value : 0;
}

// The beginning of the kernel's struct tcp_info (include/uapi/linux/tcp.h), which is longer than that of the C library.
struct LongTcpInfo {
  tcp_info begin;
  uint64_t pacing_rates[2], bytes[2];
  uint32_t segments[2], unsent, min_rtt_us;
};
static_assert(offsetof(LongTcpInfo, min_rtt_us) == 148);

// Limits what the kernel holds for a near host: unacknowledged bytes, and a few more. If this host is so near that the kernel's
// own limit (megabytes) is far above what the wire holds, the bytes wait in the receiver's memory, and have left the caches when
// they are read. Between network namespaces, a call of 1 MiB then takes 2 to 4 times as long with the congestion control BBR. 4
// KiB per us are 33 Gbit/s, which is more than a single connection carries. For a host that is further away, the kernel's limit
// stays. (setsockopt could not exceed net.core.wmem_max, which is 208 KiB by default.) The least limit was measured: with BBR,
// 96 KiB are already as slow as no limit; with cubic, 64 KiB are slower than 128 KiB for data that flows in one direction.
void limit_send_buffer(int fd) {
  constexpr size_t bytes_per_us = 4 << 10, most = 208 << 10;
  int locked = 0;  // whether somebody has already set the size of the buffer
  socklen_t length = sizeof locked;
  if (getsockopt(fd, SOL_SOCKET, so_buf_lock, &locked, &length) == 0 && (locked & sndbuf_is_locked)) return;
  LongTcpInfo info{};
  length = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) < 0 || length < sizeof info) return;
  char control[16] = {};  // the name of the congestion control
  length = sizeof control - 1;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &length) < 0) return;
  const size_t least = std::string_view(control).starts_with("bbr") ? 64 << 10 : 128 << 10;
  const int bytes = static_cast<int>(std::max(info.min_rtt_us * bytes_per_us, least));
  if (info.min_rtt_us * bytes_per_us < most) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

}  // namespace

Stream::Stream(int fd, std::string peer, const std::optional<Secret>& secret)
    : fd_(fd), peer_(std::move(peer)), tls_(secret ? std::make_unique<Tls>(fd, *secret) : nullptr) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw system_error("fcntl of the link to " + peer_, errno);
  // With this option, most unsent data stays in this process rather than in the kernel. So a rank that sends to several peers can
  // decide whose data goes first. Unix sockets do not have this option, so errors are ignored.
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent_bytes, sizeof unsent_bytes);
  limit_send_buffer(fd);
}

Stream::Stream(Stream&&) noexcept = default;

Stream::~Stream() {
  if (!open_) return;
  // This end has received nothing. Open the Ring nevertheless, because its memory is in use until both ends have destroyed it.
  try {
    opened();
  } catch (...) {
    // The link has ended before the offset has arrived.
  }
}

void Stream::share(char* memory, uint64_t offset) {
  if (memory) ring_ = std::make_unique<Ring>(memory, fd(), true);
  // A new socket has room for 8 bytes. If it has ended already, the first receive() says so.
  (void)::send(fd(), &offset, sizeof offset, MSG_NOSIGNAL);
}

void Stream::opens_shared(std::function<char*(uint64_t offset)> open) { open_ = std::move(open); }

// Returns whether the other end has told where the memory is.
bool Stream::opened() {
  while (told_got_ < sizeof told_) {
    const size_t got = receive_plain(reinterpret_cast<char*>(&told_) + told_got_, sizeof told_ - told_got_);
    if (got == 0) return false;
    told_got_ += got;
  }
  if (char* const memory = std::exchange(open_, {})(told_)) ring_ = std::make_unique<Ring>(memory, fd(), false);
  return true;
}

bool Stream::reads_peer() { return ring_ && ring_->reads_maker(); }

bool Stream::read_from_peer(uint64_t address, void* to, size_t bytes) { return ring_->read_from_maker(address, to, bytes); }

size_t Stream::send(const void* data, size_t bytes) {
  if (ring_) return ring_->send(data, bytes);
  if (tls_) [[unlikely]]
    return tls_->send(data, bytes);
  const ssize_t moved = ::send(fd(), data, bytes, MSG_NOSIGNAL);
  if (moved >= 0) return moved;
  if (later(errno)) return 0;
  throw Broken{std::strerror(errno), errno};
}

size_t Stream::send(std::span<const iovec> parts) {
  if (tls_ || ring_) [[unlikely]]
    return send_together(parts);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  const ssize_t moved = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
  if (moved >= 0) return moved;
  if (later(errno)) return 0;
  throw Broken{std::strerror(errno), errno};
}

// The first bytes of all parts share a record. If the link takes nothing, the next call begins with the same record, or a longer
// one.
size_t Stream::send_together(std::span<const iovec> parts) {
  if (parts.size() == 1) return send(parts[0].iov_base, parts[0].iov_len);
  std::array<char, 4096> record;
  size_t filled = 0;
  for (const iovec& part : parts) {
    const size_t now = std::min(part.iov_len, record.size() - filled);
    if (now > 0) std::memcpy(record.data() + filled, part.iov_base, now);
    filled += now;
  }
  size_t moved = send(record.data(), filled), skipped = filled;
  if (moved < filled) return moved;
  for (const iovec& part : parts) {
    const size_t before = std::min(skipped, part.iov_len), left = part.iov_len - before;
    skipped -= before;
    const size_t gone = left > 0 ? send(static_cast<const char*>(part.iov_base) + before, left) : 0;
    moved += gone;
    if (gone < left) break;
  }
  return moved;
}

size_t Stream::receive(void* data, size_t bytes) {
  if (open_ && !opened()) return 0;
  if (ring_) return ring_->receive(data, bytes);
  if (tls_) [[unlikely]]
    return tls_->receive(data, bytes);
  return receive_plain(data, bytes);
}

inline size_t Stream::receive_plain(void* data, size_t bytes) {
  const ssize_t moved = ::recv(fd(), data, bytes, 0);
  if (moved > 0) return moved;
  if (moved == 0) throw Broken{"closed by the other side", 0, true};
  if (later(errno)) return 0;
  throw Broken{std::strerror(errno), errno};
}

bool Stream::pending_in_tls() const { return tls_->pending(); }

bool Stream::shaking_hands() const { return tls_ && !tls_->established(); }

bool Stream::waits_for_reader() const {
  if (shaking_hands()) return true;
  int unacknowledged = 0, unsent = 0;
  // unacknowledged - unsent is the number of bytes on the wire. Query `unacknowledged` first. In this order, bytes that are sent
  // or acknowledged between the two queries can only make the difference too large. So the difference is never zero while bytes
  // are on the wire.
  if (ioctl(fd(), SIOCOUTQ, &unacknowledged) < 0 || ioctl(fd(), SIOCOUTQNSD, &unsent) < 0) return true;
  return unsent > 0 && unacknowledged == unsent;
}

void Stream::check_silence() {
  const auto now = Clock::now(), before = asked_;
  if (now - before < ask_every) return;
  asked_ = now;
  tcp_info info{};
  socklen_t length = sizeof info;
  if (!option(fd(), SOL_SOCKET, SO_KEEPALIVE) || getsockopt(fd(), IPPROTO_TCP, TCP_INFO, &info, &length) < 0) return;
  // Whether the peer's host has not acknowledged the most recent packet from this host, or has left several probes unanswered.
  // Silence counts only while this is true, because a healthy host can be silent, too. It acknowledges each packet, even if the
  // peer does not read. But our kernel sometimes retransmits only every two minutes, and in between, the host has nothing to
  // acknowledge. If the peer does not read, our kernel sends probes to ask whether the peer is reading again. tcpi_probes is the
  // number of unanswered probes. A single unanswered probe may just have been lost.
  const bool unanswered = (info.tcpi_unacked > 0 && info.tcpi_last_data_sent < info.tcpi_last_ack_recv) || info.tcpi_probes > 1;
  const auto acknowledged = now - std::chrono::milliseconds(info.tcpi_last_ack_recv);
  // If the previous query was more than same_wait ago, a new wait has begun. The silence in this wait is measured from now.
  heard_ = now - before > same_wait || !unanswered ? now : std::max(heard_, acknowledged);
  const std::chrono::seconds limit(option(fd(), IPPROTO_TCP, TCP_KEEPIDLE) +
                                   option(fd(), IPPROTO_TCP, TCP_KEEPINTVL) * option(fd(), IPPROTO_TCP, TCP_KEEPCNT));
  if (now - heard_ > limit)
    throw Broken{"its host has acknowledged nothing for " + std::to_string(limit.count()) + " s (MS_NODE_TIMEOUT)"};
}

// Waits until the peer's kernel has received all bytes that were sent, so that closing the socket loses none of them. Returns
// earlier if the link ends or the deadline passes. The caller must have called close_for_writing().
void Stream::deliver(const Deadline& deadline) {
  const bool local = option(fd(), SOL_SOCKET, SO_DOMAIN) == AF_UNIX;
  // If we closed the socket while it held unread bytes from the peer, the kernel would drop any bytes of ours that it has not
  // delivered yet. So read until the peer's kernel has all of our data.
  char scrap[4096];
  try {
    for (int unsent = 1; unsent > 0 && !deadline.passed();) {
      const bool closed = !tls_ || close_for_writing();
      // On a Unix socket, sent data is already in the receiver's queue, so there is nothing to wait for. We would wait for the
      // receiving process, because on a Unix socket the kernel counts data as unsent until the receiver has read it.
      if (closed && local) return;
      while (receive_plain(scrap, sizeof scrap) > 0) {
      }
      if (!closed) {
        pollfd both{fd(), POLLIN | POLLOUT, 0};
        poll(&both, 1, longest_poll_ms);
        continue;
      }
      if (ioctl(fd(), SIOCOUTQ, &unsent) < 0 || unsent == 0) break;
      pollfd one{fd(), POLLIN, 0};
      poll(&one, 1, 1);
    }
  } catch (const Broken&) {
    // The link has ended, so nothing more can be delivered.
  }
}

void shake_hands(std::span<Stream* const> streams, const Deadline& deadline) {
  while (!deadline.passed()) {
    Poll links;
    bool waits = false;
    for (Stream* stream : streams) try {
        if (!stream->tls_ || stream->tls_->shake_hands()) continue;
        links.add(*stream, true, false);
        waits = true;
      } catch (const Stream::Broken&) {
        // The next send() or receive() reports this.
      }
    if (!waits) return;
    links.wait(longest_poll_ms);
  }
}

void deliver_all(std::vector<std::optional<Stream>> streams, double timeout_s) {
  const Deadline deadline(timeout_s);
  for (auto& stream : streams)
    if (stream) stream->close_for_writing();
  for (auto& stream : streams)
    if (stream) stream->deliver(deadline);
}

bool Stream::close_for_writing() {
  if (ring_) ring_->close();
  try {
    if (tls_ && !tls_->close()) return false;
  } catch (const Broken&) {
    // The link has ended, so nothing more can be sent.
  }
  ::shutdown(fd(), SHUT_WR);
  return true;
}

void Stream::shut_down() const {
  if (ring_) ring_->close();
  ::shutdown(fd(), SHUT_RDWR);
}

void Stream::abandon() {
  fd_.close();
  (void)tls_.release();
  (void)ring_.release();
}

size_t Poll::add(const Stream& stream, bool receives, bool sends) {
  streams_++;
  if (stream.ring_) {
    rings_.push_back({stream.ring_.get(), polled_.size(), receives, sends});
    return add(stream.fd());
  }
  if (stream.shaking_hands()) {
    shaking_.push_back(polled_.size());
    // Before the handshake is complete, even a sender has to wait for the peer's bytes.
    receives = true;
    sends = !stream.tls_->flushed();
  }
  if (receives && stream.pending()) pending_.push_back(polled_.size());
  polled_.push_back({stream.fd(), static_cast<short>((receives ? POLLIN : 0) | (sends ? POLLOUT : 0)), 0});
  return polled_.size() - 1;
}

size_t Poll::add(int fd) {
  polled_.push_back({fd, POLLIN, 0});
  return polled_.size() - 1;
}

int Poll::wait(int ms, const std::optional<Awake>& awake) {
  const auto is_ready = [](const Ringed& one) { return one.ring->ready(one.receives, one.sends); };
  const bool sockets = streams_ > rings_.size();
  int ready = 0;
  const auto any_ready = [&] {
    if (sockets) ready = poll(polled_.data(), std::min(polled_.size(), awake->entries), 0);
    return ready != 0 || std::ranges::any_of(rings_, is_ready);
  };
  pending_.reserve(pending_.size() + rings_.size());  // an exception must not leave a ring asleep
  if (awake && streams_ > 0 && pending_.empty() &&
      awaits(awake->spin, any_ready, awake->stopped, sockets ? socket_polls_a_turn : polls_a_turn)) {
    for (const Ringed& one : rings_)
      if (is_ready(one)) pending_.push_back(one.entry);
  } else {
    for (const Ringed& one : rings_)
      if (!one.ring->sleeps(one.receives, one.sends)) pending_.push_back(one.entry);
    ready = poll(polled_.data(), polled_.size(), pending_.empty() ? ms : 0);
    for (const Ringed& one : rings_) one.ring->wakes();
  }
  const int error = ready < 0 ? errno : 0;
  for (const Ringed& one : rings_)
    if (polled_[one.entry].revents) one.ring->heard();
  // For example, poll() refuses more descriptors than ulimit -n allows. The caller would otherwise try again at once, for ever.
  if (error != 0 && error != EINTR) throw system_error("poll of " + std::to_string(polled_.size()) + " descriptors", error);
  for (const size_t entry : pending_) polled_[entry].revents |= POLLIN;
  for (const size_t entry : shaking_)
    if (polled_[entry].revents) polled_[entry].revents |= POLLIN;
  return pending_.empty() ? ready : std::max(ready, static_cast<int>(pending_.size()));
}

}  // namespace mscomm
