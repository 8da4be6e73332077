#include "transport/mailbox.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace mscomm {

namespace {

constexpr size_t piece_bytes = 256u << 10;  // the most bytes that one system call moves, while mutex_ is held
constexpr int messages_a_turn = 64;         // the most messages that are read from one link before other links have their turn

using Kind = Envelope::Kind;

size_t payload_bytes(const Envelope& envelope) {
  return envelope.kind == Kind::announce ? 0 : envelope.count * size_of(envelope.dtype);
}

// How many bytes of the eager window a message uses if it is sent whole.
size_t cost(size_t payload) { return sizeof(Envelope) + payload; }

void end_stream(const std::optional<Stream>& stream) {
  if (stream) stream->shut_down();
}

bool takes(const Transfer& recv, int64_t tag) { return recv.tag == tag || (recv.tag == any_tag && tag <= last_tag); }

void copy(char* to, const char* from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

}  // namespace

Mailbox::Mailbox(std::vector<int> ranks, int rank, uint32_t epoch)
    : ranks_(std::move(ranks)),
      rank_(rank),
      epoch_(epoch),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      changed_(std::make_unique<std::condition_variable>()),
      detaching_(std::make_unique<std::condition_variable>()),
      outgoing_(ranks_.size()),
      incoming_(ranks_.size()) {
  if (wake_fd_ < 0) throw system_error("eventfd", errno);
}

Mailbox::~Mailbox() {
  // The mailbox is closed already, or this is a forked child, in which mutex_ may be locked for ever.
  if (wake_fd_ < 0) return;
  shut_down();
  stop_thread();
  ::close(wake_fd_);
}

// --- adding links ---

void Mailbox::add_outgoing(int peer, Stream stream) {
  check_peer(peer);
  const auto lock = enter();
  Outgoing& link = outgoing_[peer];
  if (link.stream) throw Error("RuntimeError", "a second link for messages to " + named(peer));
  link.stream.emplace(std::move(stream));
  if (shut_) link.stream->shut_down();
}

void Mailbox::add_incoming(int peer, Stream stream) {
  check_peer(peer);
  const auto lock = enter();
  Incoming& link = incoming_[peer];
  if (link.stream) throw Error("RuntimeError", "a second link for messages from " + named(peer));
  link.stream.emplace(std::move(stream));
  if (shut_) link.stream->shut_down();
  wake_driver();
}

void Mailbox::check_peer(int peer) const {
  if (peer < 0 || static_cast<size_t>(peer) >= ranks_.size())
    throw Error("ValueError", "rank " + std::to_string(peer) + " is not one of the group's " + std::to_string(ranks_.size()));
}

// --- starting transfers, and waiting for them ---

std::shared_ptr<Transfer> Mailbox::start_send(int peer, int64_t tag, Dtype dtype, const void* data, size_t bytes) {
  check_peer(peer);
  // A Transfer has the same pointer for both directions; a send only reads the memory.
  auto send = std::make_shared<Transfer>(true, peer, tag, dtype, const_cast<char*>(static_cast<const char*>(data)), bytes);
  const auto lock = enter();
  if (shut_) {
    finish(send, shut_);
  } else if (peer == rank_) {
    Envelope header = envelope(Kind::whole, 0);
    header.tag = tag;
    header.dtype = dtype;
    header.count = bytes / size_of(dtype);
    if (const Shared recv = match(peer, header)) {
      if (bytes) std::memmove(recv->data_, send->data_, bytes);
      finish(recv);
    } else {
      keep(peer, header, std::vector<char>(send->data_, send->data_ + bytes));
    }
    finish(send);
  } else {
    Outgoing& link = outgoing_[peer];
    if (!link.stream) throw Error("RuntimeError", text(*send) + ": there is no link to it yet");
    if (link.ended) finish(send, lost(*send, peer, *link.ended));
    else link.queue.push_back(send);
  }
  wake_driver();
  tell_finished();
  return send;
}

std::shared_ptr<Transfer> Mailbox::start_recv(int peer, int64_t tag, Dtype dtype, void* data, size_t bytes) {
  if (peer != any_source) check_peer(peer);
  auto recv = std::make_shared<Transfer>(false, peer, tag, dtype, static_cast<char*>(data), bytes);
  const auto lock = enter();
  if (shut_) {
    finish(recv, shut_);
    return recv;
  }
  // Among the messages that have already come, find the first one that this recv accepts.
  int source = any_source;
  std::deque<Unexpected>::iterator early;
  for (int from = 0; static_cast<size_t>(from) < ranks_.size(); from++) {
    if (peer != any_source && peer != from) continue;
    auto& kept = incoming_[from].unexpected;
    const auto found =
        std::find_if(kept.begin(), kept.end(), [&](const Unexpected& message) { return takes(*recv, message.envelope.tag); });
    if (found != kept.end() && (source == any_source || found->turn < early->turn)) source = from, early = found;
  }
  if (source != any_source) {
    if (fits(recv, source, early->envelope)) {
      Incoming& link = incoming_[source];
      const Unexpected message = std::move(*early);
      link.unexpected.erase(early);
      if (message.envelope.kind == Kind::whole) {
        copy(recv->data_, message.payload.data(), bytes);
        if (source != rank_) give_back(link, cost(bytes));
        finish(recv);
      } else if (link.ended) {
        finish(recv, lost(*recv, source, *link.ended));
      } else {
        clear_to_send(source, recv, message.envelope.id);
      }
    }
  } else if (peer != any_source && incoming_[peer].ended) {
    finish(recv, lost(*recv, peer, *incoming_[peer].ended));
  } else {
    recv->turn_ = ++last_turn_;
    (peer == any_source ? posted_for_any_ : incoming_[peer].posted).push_back(recv);
  }
  wake_driver();
  tell_finished();
  return recv;
}

void Mailbox::wait(const std::shared_ptr<Transfer>& transfer, const Wait& wait) {
  auto lock = enter();
  auto looked = Clock::now();
  try {
    while (!transfer->done()) {
      const bool idle = driving_ ? !await_change(lock) : !turn(lock);
      if (transfer->done() || (!idle && seconds_since(looked) <= longest_sleep_ms * 1e-3)) continue;
      lock.unlock();
      wait.look({[&] { return missing(*transfer); }, false});
      looked = Clock::now();
      lock.lock();
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    drop(transfer, Error("Aborted", text(*transfer) + " was given up"));
    changed_->notify_all();
    throw;
  }
  changed_->notify_all();  // another thread may become the driver now
  if (transfer->error_) throw *transfer->error_;
}

bool Mailbox::ended(int peer) const {
  const auto lock = enter();
  return incoming_[peer].ended.has_value();
}

void Mailbox::detach(std::shared_ptr<Transfer> transfer, const Wait& wait, Ended ended) {
  const auto lock = enter();
  if (stopping_) throw Error("RuntimeError", text(*transfer) + ": the group was released");
  if (!thread_) thread_ = std::make_unique<std::thread>([this] { serve(); });
  const bool done = transfer->done();
  detached_.push_back({std::move(transfer), wait, std::move(ended)});
  detaching_->notify_one();
  if (!done) return;
  // The transfer had ended before it was put into the list. So wake the mailbox's own thread, which may be waiting for other
  // transfers.
  wake_driver();
  changed_->notify_all();
}

// The main function of the mailbox's own thread. It catches all exceptions, because an uncaught exception would end the process.
void Mailbox::serve() {
  while (true) try {
      return serve_detached();
    } catch (...) {
      // Most likely there was no memory to handle an error. End all transfers, and wake the threads that wait for them.
      shut_down(Error("Error", "the thread for messages failed: out of memory?"));
    }
}

// Waits for detached transfers, and calls their callbacks when they have ended. Returns when the mailbox ends.
void Mailbox::serve_detached() {
  std::unique_lock lock(mutex_);
  auto looked = Clock::now();
  while (true) {
    std::list<Detached> ended;
    for (auto it = detached_.begin(); it != detached_.end();) {
      const auto next = std::next(it);
      if (stopping_) drop(it->transfer, Error("Aborted", text(*it->transfer) + " had not ended when the group was released"));
      if (it->transfer->done()) ended.splice(ended.end(), detached_, it);
      it = next;
    }
    if (!ended.empty()) {
      lock.unlock();
      for (const Detached& one : ended) one.ended(one.transfer->error_);
      ended.clear();
      lock.lock();
      continue;
    }
    if (stopping_) return;
    if (detached_.empty()) {
      changed_->notify_all();  // another thread may become the driver now
      detaching_->wait(lock, [this] { return stopping_ || !detached_.empty(); });
      looked = Clock::now();
      continue;
    }
    const bool idle = driving_ ? !await_change(lock) : !turn(lock);
    if (!idle && seconds_since(looked) <= longest_sleep_ms * 1e-3) continue;
    // Only this thread removes elements from the list, so the pointers stay valid.
    std::vector<Detached*> all;
    for (Detached& one : detached_) all.push_back(&one);
    lock.unlock();
    std::vector<std::pair<Shared, Error>> failed;
    for (Detached* one : all) {
      const Transfer& transfer = *one->transfer;
      try {
        one->wait.look({[&] { return missing(transfer); }, false});
      } catch (const Error& error) {
        failed.emplace_back(one->transfer, error);
      } catch (const std::exception& error) {
        failed.emplace_back(one->transfer, Error("Error", text(transfer) + ": " + error.what()));
      }
    }
    lock.lock();
    for (const auto& [transfer, error] : failed) drop(transfer, error);
    changed_->notify_all();
    looked = Clock::now();
  }
}

// --- ending the mailbox ---

void Mailbox::shut_down() { shut_down(Error("Aborted", "the group's links for messages were shut down")); }

void Mailbox::shut_down(const Error& why) {
  const auto lock = enter();
  if (!shut_) shut_.emplace(why);
  for (int peer = 0; static_cast<size_t>(peer) < ranks_.size(); peer++) {
    end_stream(outgoing_[peer].stream);
    end_stream(incoming_[peer].stream);
    end_outgoing(peer, {"Aborted", shut_->what()});
    end_incoming(peer, {"Aborted", shut_->what()});
  }
  wake_driver();
  changed_->notify_all();
}

void Mailbox::close(double timeout_s) {
  const Deadline deadline(timeout_s);
  stop_thread();
  std::vector<Stream> delivering;
  {
    auto lock = enter();
    if (!shut_) shut_.emplace("Aborted", "the group was released");
    for (int peer = 0; static_cast<size_t>(peer) < ranks_.size(); peer++) {
      end_outgoing(peer, {"Aborted", shut_->what()});
      end_incoming(peer, {"Aborted", shut_->what()});
    }
    wake_driver();
    changed_->notify_all();
    changed_->wait(lock, [this] { return !driving_; });
    for (Outgoing& link : outgoing_) {
      if (link.stream) delivering.push_back(std::move(*link.stream));
      link.stream.reset();
    }
    for (Incoming& link : incoming_) link.stream.reset();
    // No driver is left, so no thread polls this descriptor.
    if (wake_fd_ >= 0) ::close(std::exchange(wake_fd_, -1));
  }
  for (const Stream& stream : delivering) ::shutdown(stream.fd(), SHUT_WR);
  for (Stream& stream : delivering) stream.deliver(deadline);
}

void Mailbox::stop_thread() {
  std::unique_ptr<std::thread> thread;
  {
    const auto lock = enter();
    stopping_ = true;
    thread = std::move(thread_);
    wake_driver();
    changed_->notify_all();
    detaching_->notify_one();
  }
  if (thread) thread->join();
}

void Mailbox::close_descriptors() {
  for (Outgoing& link : outgoing_) link.stream.reset();
  for (Incoming& link : incoming_) link.stream.reset();
  ::close(std::exchange(wake_fd_, -1));
  // Leak the child's copies of these objects. The thread does not exist in the child, and the destructors of the condition
  // variables would wait for threads of the parent.
  (void)thread_.release();
  (void)changed_.release();
  (void)detaching_.release();
}

// --- moving bytes: one of the waiting threads, the driver, polls for all of them ---

std::unique_lock<std::mutex> Mailbox::enter() const {
  entering_++;
  std::unique_lock lock(mutex_);
  entering_--;
  return lock;
}

void Mailbox::wake_driver() const {
  const uint64_t one = 1;
  // The write fails only when the eventfd's count is full, and then the driver wakes anyway.
  if (driving_ && write(wake_fd_, &one, sizeof one) < 0) return;
}

void Mailbox::tell_finished() {
  if (std::exchange(finished_, false)) changed_->notify_all();
}

// Moves the bytes that can move now, for all transfers. If no bytes can move, waits at most longest_sleep_ms until some can, or
// until another thread wakes this one. Returns false if the wait was in vain.
bool Mailbox::turn(std::unique_lock<std::mutex>& lock) {
  const bool moved = move_some();
  tell_finished();
  if (moved) {
    lock.unlock();
    for (int i = 0; i < 100 && entering_ > 0; i++) std::this_thread::yield();
    lock.lock();
    return true;
  }
  if (end_silent_links()) return true;
  std::vector<pollfd> polled{{wake_fd_, POLLIN, 0}};
  const auto add = [&](const auto& link, bool reads) {
    const int events = (reads ? POLLIN : 0) | (link.writes() ? POLLOUT : 0);
    if (events) polled.push_back({link.stream->fd(), static_cast<short>(events), 0});
  };
  for (const Outgoing& link : outgoing_) add(link, link.reads());
  for (const Incoming& link : incoming_) add(link, reads(link));
  driving_ = true;
  lock.unlock();
  const int ready = poll(polled.data(), polled.size(), longest_sleep_ms);
  lock.lock();
  driving_ = false;
  uint64_t wakes;
  if (ready > 0 && (polled[0].revents & POLLIN) && read(wake_fd_, &wakes, sizeof wakes) < 0) return true;
  return ready > 0;
}

// Ends the links that transfers use and whose peer's host is silent. Returns whether there were any.
bool Mailbox::end_silent_links() {
  bool ended = false;
  const auto check = [&](auto& link, bool used, const auto& end) {
    if (!used) return;
    try {
      link.stream->check_silence();
    } catch (const Stream::Broken& broken) {
      end({"PeerLost", broken.why});
      ended = true;
    }
  };
  for (int peer = 0; static_cast<size_t>(peer) < ranks_.size(); peer++) {
    check(outgoing_[peer], outgoing_[peer].reads(), [&](const Ending& why) { end_outgoing(peer, why); });
    check(incoming_[peer], reads(incoming_[peer]), [&](const Ending& why) { end_incoming(peer, why); });
  }
  return ended;
}

// Waits while another thread is the driver. Returns false if changed_ is not notified within longest_sleep_ms.
bool Mailbox::await_change(std::unique_lock<std::mutex>& lock) {
  return changed_->wait_for(lock, std::chrono::milliseconds(longest_sleep_ms)) == std::cv_status::no_timeout;
}

// The ranks for which the transfer waits. A recv from any source waits for all other ranks, or for this rank if it is the only
// one.
std::vector<int> Mailbox::missing(const Transfer& transfer) const {
  if (transfer.done()) return {};
  const int peer = transfer.matched_peer();
  if (peer != any_source) return {peer};
  std::vector<int> others;
  for (int rank = 0; static_cast<size_t>(rank) < ranks_.size(); rank++)
    if (rank != rank_ || ranks_.size() == 1) others.push_back(rank);
  return others;
}

bool Mailbox::move_some() {
  bool moved = false;
  const int size = static_cast<int>(ranks_.size());
  first_ = (first_ + 1) % size;
  for (int i = 0; i < size; i++) {
    const int peer = (first_ + i) % size;
    try {
      moved |= read_some(peer);
      moved |= write_returns(peer);
      // Read returned credit before writing, because with more credit more messages can be sent whole.
      moved |= read_returns(peer);
      moved |= write_some(peer);
    } catch (const std::bad_alloc&) {
      // Memory ran out in the middle of a step: for example, a header was read, but there is no buffer for its payload. So end
      // both the link to this peer and the link from it.
      const Ending ending{"MemoryError", "out of memory"};
      end_stream(outgoing_[peer].stream);
      end_outgoing(peer, ending);
      end_stream(incoming_[peer].stream);
      end_incoming(peer, ending);
      moved = true;
    }
  }
  return moved;
}

// --- sending: links to peers ---

Envelope Mailbox::envelope(Kind kind, uint64_t id) const {
  Envelope envelope;
  envelope.kind = kind;
  envelope.epoch = epoch_;
  envelope.source = static_cast<uint32_t>(rank_);
  envelope.id = id;
  return envelope;
}

bool Mailbox::write_some(int peer) {
  Outgoing& link = outgoing_[peer];
  if (!link.writes()) return false;
  if (!link.current) {
    link.current = std::move(link.queue.front());
    link.queue.pop_front();
    Transfer& send = *link.current;
    const bool whole = send.bytes <= eager_bytes && cost(send.bytes) <= link.credit;
    link.kind = send.cleared_ ? Kind::data : whole ? Kind::whole : Kind::announce;
    if (!send.cleared_) send.id_ = ++link.last_id;
    send.begun_ = true;
    Envelope header = envelope(link.kind, send.id_);
    header.tag = send.tag;
    header.dtype = send.dtype;
    header.count = send.bytes / size_of(send.dtype);
    const auto* bytes = reinterpret_cast<const char*>(&header);
    link.head.assign(bytes, bytes + sizeof header);
    if (link.kind == Kind::whole) {
      link.head.insert(link.head.end(), send.data_, send.data_ + send.bytes);
      link.credit -= cost(send.bytes);
    }
    link.head_sent = link.payload_sent = 0;
  }
  const Transfer& send = *link.current;
  const size_t payload = link.kind == Kind::data ? send.bytes : 0;
  size_t moved = 0;
  try {
    if (link.head_sent < link.head.size()) {
      moved = link.stream->send(link.head.data() + link.head_sent, link.head.size() - link.head_sent);
      link.head_sent += moved;
    } else {
      moved = link.stream->send(send.data_ + link.payload_sent, std::min(payload - link.payload_sent, piece_bytes));
      link.payload_sent += moved;
    }
  } catch (const Stream::Broken& broken) {
    end_outgoing(peer, {"PeerLost", broken.why});
    return true;
  }
  if (link.head_sent < link.head.size() || link.payload_sent < payload) return moved > 0;
  const Shared written = std::exchange(link.current, nullptr);
  if (link.kind == Kind::announce) link.waiting.emplace(written->id_, written);
  else finish(written);
  return true;
}

bool Mailbox::read_returns(int peer) {
  Outgoing& link = outgoing_[peer];
  bool moved = false;
  while (link.reads()) {
    try {
      const size_t got =
          link.stream->receive(reinterpret_cast<char*>(&link.inbox) + link.inbox_got, sizeof link.inbox - link.inbox_got);
      if (got == 0) return moved;
      link.inbox_got += got;
      moved = true;
    } catch (const Stream::Broken& broken) {
      end_outgoing(peer, {"PeerLost", broken.why});
      return true;
    }
    if (link.inbox_got == sizeof link.inbox) take_return(peer);
  }
  return moved;
}

void Mailbox::take_return(int peer) {
  Outgoing& link = outgoing_[peer];
  const Envelope& back = link.inbox;
  link.inbox_got = 0;
  const auto announced = link.waiting.find(back.id);
  if (valid(back, peer) && back.kind == Kind::clear && announced != link.waiting.end()) {
    announced->second->cleared_ = true;
    link.queue.push_back(std::move(announced->second));
    link.waiting.erase(announced);
  } else if (valid(back, peer) && back.kind == Kind::credit && back.count <= eager_window - link.credit) {
    link.credit += back.count;
  } else {
    end_stream(link.stream);
    end_outgoing(peer, {"Error", "it sent a header that is none; the link cannot be trusted any more"});
  }
}

// --- receiving: links from peers ---

bool Mailbox::valid(const Envelope& envelope, int peer) const {
  return envelope.magic == envelope_magic && envelope.wire == wire_version && envelope.epoch == epoch_ &&
         envelope.source == static_cast<uint32_t>(peer) && envelope.kind <= Kind::credit && envelope.dtype <= Dtype::object &&
         envelope.count <= std::numeric_limits<size_t>::max() / size_of(envelope.dtype);
}

bool Mailbox::read_some(int peer) {
  Incoming& link = incoming_[peer];
  bool moved = false;
  size_t left = piece_bytes;
  for (int messages = 0; left > 0 && messages < messages_a_turn && reads(link);) {
    try {
      size_t got = 0;
      if (link.inbox_got < sizeof link.inbox) {
        got = link.stream->receive(reinterpret_cast<char*>(&link.inbox) + link.inbox_got, sizeof link.inbox - link.inbox_got);
        link.inbox_got += got;
      } else {
        char* to = link.current ? link.current->data_ : link.kept.data();
        got = link.stream->receive(to + link.payload_got, std::min(payload_bytes(link.inbox) - link.payload_got, left));
        link.payload_got += got;
        left -= got;
        if (link.payload_got == payload_bytes(link.inbox)) deliver(peer);
      }
      if (got == 0) return moved;
      moved = true;
    } catch (const Stream::Broken& broken) {
      end_incoming(peer, {"PeerLost", broken.why});
      return true;
    }
    if (link.inbox_got == sizeof link.inbox && link.payload_got == 0) {
      messages++;
      if (!open(peer)) return true;
    }
  }
  return moved;
}

// Called when a header is complete. Decides where the payload of the message goes. If the header is invalid, ends the link and
// returns false.
bool Mailbox::open(int peer) {
  Incoming& link = incoming_[peer];
  const Envelope& header = link.inbox;
  bool good = valid(header, peer);
  const size_t bytes = good ? payload_bytes(header) : 0;
  if (good && header.kind == Kind::data) {
    const auto cleared = link.cleared.find(header.id);
    good = cleared != link.cleared.end();
    if (good) {
      link.current = std::move(cleared->second);
      link.cleared.erase(cleared);
      good = link.current->matched_tag_ == header.tag && link.current->dtype == header.dtype && link.current->bytes == bytes;
    }
  } else if (good) {
    const bool whole = header.kind == Kind::whole;
    good = (whole || header.kind == Kind::announce) && header.id == ++link.last_id &&
           (!whole || (bytes <= eager_bytes && cost(bytes) <= eager_window - link.uncredited));
    if (good) {
      const Shared recv = match(peer, header);
      if (whole) {
        link.uncredited += cost(bytes);
        link.current = recv;
        if (recv) recv->begun_ = true;
        else link.kept.resize(bytes);
      } else {
        link.inbox_got = 0;
        if (recv) clear_to_send(peer, recv, header.id);
        else keep(peer, header, {});
        return true;
      }
    }
  }
  if (!good) {
    end_stream(link.stream);
    end_incoming(peer, {"Error", "it sent a header that is none (wire " + std::to_string(header.wire) + ", epoch " +
                                     std::to_string(header.epoch) + "); the link cannot be trusted any more"});
    return false;
  }
  if (bytes == 0) deliver(peer);
  return true;
}

// Called when a payload is complete. Ends the recv of the message, or keeps the message if there is no recv for it.
void Mailbox::deliver(int peer) {
  Incoming& link = incoming_[peer];
  link.inbox_got = link.payload_got = 0;
  const size_t bytes = payload_bytes(link.inbox);
  Shared recv = std::exchange(link.current, nullptr);
  std::vector<char> kept = std::move(link.kept);
  link.kept.clear();
  if (!recv) {
    // A matching recv may have been posted while the payload was read.
    recv = match(peer, link.inbox);
    if (!recv) {
      keep(peer, link.inbox, std::move(kept));
      return;
    }
    copy(recv->data_, kept.data(), bytes);
  }
  if (link.inbox.kind == Kind::whole) give_back(link, cost(bytes));
  finish(recv);
}

// Returns the recv that was posted first among those that accept this source and tag, and removes it from the posted recvs.
// Returns nullptr if there is no such recv. A recv that expects another type or size ends with Mismatch, and the next recv is
// tried.
std::shared_ptr<Transfer> Mailbox::match(int peer, const Envelope& envelope) {
  auto& from_peer = incoming_[peer].posted;
  const auto first_of = [&](std::deque<Shared>& posted) {
    return std::find_if(posted.begin(), posted.end(), [&](const Shared& recv) { return takes(*recv, envelope.tag); });
  };
  while (true) {
    const auto own = first_of(from_peer), any = first_of(posted_for_any_);
    const bool has_own = own != from_peer.end(), has_any = any != posted_for_any_.end();
    if (!has_own && !has_any) return nullptr;
    const bool takes_own = has_own && (!has_any || (*own)->turn_ < (*any)->turn_);
    const Shared recv = std::move(takes_own ? *own : *any);
    if (takes_own) from_peer.erase(own);
    else posted_for_any_.erase(any);
    if (fits(recv, peer, envelope)) return recv;
  }
}

// Matches the recv to the message if both have the same type and size. Otherwise ends the recv with Mismatch and returns false.
bool Mailbox::fits(const Shared& recv, int peer, const Envelope& envelope) {
  const uint64_t expected = recv->bytes / size_of(recv->dtype);
  if (recv->dtype == envelope.dtype && expected == envelope.count) {
    recv->matched_peer_ = peer;
    recv->matched_tag_ = envelope.tag;
    return true;
  }
  finish(recv, Error("Mismatch",
                     text(*recv) + ": expects " + std::string(name(recv->dtype)) + " x " + std::to_string(expected) + ", " +
                         named(peer) + " sent " + std::string(name(envelope.dtype)) + " x " + std::to_string(envelope.count) +
                         (recv->tag == any_tag ? " with tag " + std::to_string(envelope.tag) : ""),
                     {ranks_[peer]}));
  return false;
}

// Keeps the message until a recv takes it.
void Mailbox::keep(int peer, const Envelope& envelope, std::vector<char> payload) {
  incoming_[peer].unexpected.push_back({envelope, ++last_turn_, std::move(payload)});
}

void Mailbox::clear_to_send(int peer, const Shared& recv, uint64_t id) {
  Incoming& link = incoming_[peer];
  recv->begun_ = true;
  link.cleared.emplace(id, recv);
  link.outbox.push_back(envelope(Kind::clear, id));
}

// Counts `bytes` bytes of matched messages. When the count reaches half of the eager window, returns this credit to the sender.
// Returning credit more often would cost more headers.
void Mailbox::give_back(Incoming& link, size_t bytes) {
  link.matched += bytes;
  if (link.matched < eager_window / 2) return;
  Envelope credit = envelope(Kind::credit, 0);
  credit.count = link.matched;
  link.outbox.push_back(credit);
  link.uncredited -= std::exchange(link.matched, 0);
}

bool Mailbox::write_returns(int peer) {
  Incoming& link = incoming_[peer];
  bool moved = false;
  while (link.writes()) {
    try {
      const auto* bytes = reinterpret_cast<const char*>(&link.outbox.front());
      const size_t sent = link.stream->send(bytes + link.outbox_sent, sizeof(Envelope) - link.outbox_sent);
      if (sent == 0) return moved;
      link.outbox_sent += sent;
      moved = true;
    } catch (const Stream::Broken&) {
      // The peer accepts no headers any more, but the data that it sent before can still be read, up to the end of the link.
      link.deaf = true;
      return true;
    }
    if (link.outbox_sent == sizeof(Envelope)) link.outbox.pop_front(), link.outbox_sent = 0;
  }
  return moved;
}

// --- ending transfers and links ---

void Mailbox::finish(const Shared& transfer, std::optional<Error> error) {
  if (transfer->done()) return;
  transfer->error_ = std::move(error);
  transfer->done_ = true;
  finished_ = true;
}

// Called when the thread that waits for the transfer gives up. Ends the transfer. If the transfer has begun, also ends its link.
void Mailbox::drop(const Shared& transfer, const Error& error) {
  if (transfer->done()) return;
  finish(transfer, error);
  if (!transfer->begun_ && transfer->peer == any_source) {
    std::erase(posted_for_any_, transfer);
    return;
  }
  const int peer = transfer->matched_peer();
  if (!transfer->begun_) {
    std::erase(outgoing_[peer].queue, transfer);
    std::erase(incoming_[peer].posted, transfer);
    return;
  }
  const Ending ending{"Aborted",
                      std::string("an earlier ") + (transfer->sends ? "send" : "recv") + " was given up in the middle"};
  end_stream(transfer->sends ? outgoing_[peer].stream : incoming_[peer].stream);
  if (transfer->sends) end_outgoing(peer, ending);
  else end_incoming(peer, ending);
}

void Mailbox::end_outgoing(int peer, Ending ending) {
  Outgoing& link = outgoing_[peer];
  if (!link.ended) link.ended.emplace(std::move(ending));
  const auto fail = [&](const Shared& send) { finish(send, lost(*send, peer, *link.ended)); };
  if (link.current) fail(std::exchange(link.current, nullptr));
  for (const auto& [id, send] : std::exchange(link.waiting, {})) fail(send);
  for (const Shared& send : std::exchange(link.queue, {})) fail(send);
}

void Mailbox::end_incoming(int peer, Ending ending) {
  Incoming& link = incoming_[peer];
  if (!link.ended) link.ended.emplace(std::move(ending));
  const auto fail = [&](const Shared& recv) { finish(recv, lost(*recv, peer, *link.ended)); };
  if (link.current) fail(std::exchange(link.current, nullptr));
  for (const auto& [id, recv] : std::exchange(link.cleared, {})) fail(recv);
  for (const Shared& recv : std::exchange(link.posted, {})) fail(recv);
  // If the peer is lost, a recv from any source may still get a message from another peer. If the link ended for another reason,
  // a message for such a recv may be lost, so the recv fails.
  if (link.ended->kind != "PeerLost")
    for (const Shared& recv : std::exchange(posted_for_any_, {})) fail(recv);
}

Error Mailbox::lost(const Transfer& transfer, int peer, const Ending& ending) const {
  if (ending.kind == "Aborted") return {"Aborted", text(transfer) + ": " + ending.why};
  const auto& stream = transfer.sends ? outgoing_[peer].stream : incoming_[peer].stream;
  return {ending.kind,
          text(transfer) + ": the link to " + (stream ? stream->peer() : named(peer)) + " ended: " + ending.why,
          {ranks_[peer]}};
}

std::string Mailbox::text(const Transfer& transfer) const {
  return (transfer.sends ? "send to " : "recv from ") + (transfer.peer == any_source ? "any rank" : named(transfer.peer)) + ", " +
         (transfer.tag == any_tag ? "any tag" : "tag " + std::to_string(transfer.tag));
}

}  // namespace mscomm
