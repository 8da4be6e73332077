#include "transport/mailbox.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "base/thread.h"

namespace mscomm {

namespace {

constexpr size_t piece_bytes = 256u << 10;  // the maximum number of bytes that one system call moves while mutex_ is held
constexpr int messages_a_turn = 64;         // the maximum number of messages read from one link before it is the next link's turn
// If no thread waits for a detached transfer, the mailbox's own thread begins to move its bytes after grace_s. Many programs call
// Work.wait() earlier than that, and then moving the bytes takes no other thread. So that detach() need not wake the mailbox's
// thread in such a program, the thread checks every tick_s whether it is needed, until linger_s after the last detach().
constexpr double grace_s = 200e-6, tick_s = 1e-3, linger_s = 50e-3;
constexpr double pass_s = 1;  // how long cancel() reads the links, if other messages keep them busy

// The errors with which transfers and links end without another reason. They exist from the start, because a transfer must end
// even if there is no memory: its array may no longer exist when the message arrives. They are never destroyed, because a thread
// may still use them while the process exits.
const Error& given_up = *new Error("Aborted", "the message was given up");
const Error& shut = *new Error("Aborted", "the group's links for messages were shut down");
const Error& released = *new Error("Aborted", "the group was released");
const Error& thread_failed = *new Error("Error", "the thread for messages failed: out of memory?");
const Error& send_given_up = *new Error("Aborted", "an earlier send was given up in the middle");
const Error& recv_given_up = *new Error("Aborted", "an earlier recv was given up in the middle");

using Kind = Envelope::Kind;

size_t payload_bytes(const Envelope& envelope) {
  return envelope.kind == Kind::announce ? 0 : envelope.count * size_of(envelope.dtype);
}

// Returns how many bytes of the eager window a message uses if it is sent whole.
size_t cost(size_t payload) { return sizeof(Envelope) + payload; }

bool takes(const Transfer& recv, int64_t tag) { return recv.tag == tag || (recv.tag == any_tag && tag <= last_tag); }

}  // namespace

Mailbox::Mailbox(std::vector<int> ranks, int rank, uint32_t epoch, bool spin)
    : ranks_(std::move(ranks)),
      rank_(rank),
      epoch_(epoch),
      spin_(spin),
      linked_(ranks_.size()),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      outgoing_(ranks_.size()),
      incoming_(ranks_.size()) {
  if (wake_fd_.get() < 0) throw system_error("eventfd", errno);
  for (int peer = 0; static_cast<size_t>(peer) < ranks_.size(); peer++) outgoing_[peer].peer = incoming_[peer].peer = peer;
}

Mailbox::~Mailbox() {
  // If the descriptor is closed, the mailbox is already closed or this is a forked child. In a forked child, mutex_ may be locked
  // forever.
  if (wake_fd_.get() < 0) return;
  shut_down();
  stop_thread();
}

// --- adding links ---

void Mailbox::add_link(bool sends, int peer, Stream stream) {
  check_peer(peer);
  const auto lock = enter();
  Link& added = link(sends, peer);
  if (added.stream)
    throw Error("RuntimeError", "a second link for messages " + std::string(sends ? "to " : "from ") + named(peer));
  added.stream.emplace(std::move(stream));
  if (sends) linked_[peer] = true;
  if (shut_) added.stream->shut_down();
  wake_driver();
}

void Mailbox::check_peer(int peer) const {
  if (peer < 0 || static_cast<size_t>(peer) >= ranks_.size())
    throw Error("ValueError", "rank " + std::to_string(peer) + " is not one of the group's " + std::to_string(ranks_.size()));
}

// --- starting transfers, and waiting for them ---

std::shared_ptr<Transfer> Mailbox::start(const Message& message) {
  if (message.sends || message.peer != any_source) check_peer(message.peer);
  auto transfer = std::make_shared<Transfer>(message);
  auto lock = enter();
  if (shut_) finish(transfer, shut_);
  else if (message.sends) begin_send(transfer);
  else begin_recv(transfer);
  // If the send was written whole, the driver has nothing to do for it.
  if (!message.sends || outgoing_[message.peer].writes() || !transfer->done()) wake_driver();
  tell_finished();
  tell_ended(lock);
  return transfer;
}

void Mailbox::begin_send(const Shared& send) {
  if (send->peer != rank_) {
    Outgoing& link = outgoing_[send->peer];
    if (!link.stream) throw Error("RuntimeError", text(*send) + ": there is no link to it yet");
    if (link.ended) return finish(send, lost(*send, link));
    link.queue.push_back(send);
    // As in move_some(), read the returned credit first.
    step(link, [&] { return read_returns(link); });
    step(link, [&] { return write_some(link); });
    return;
  }
  const Envelope header = header_of(*send, Kind::whole);
  if (const Shared recv = match(incoming_[rank_], header)) {
    if (send->bytes) std::memmove(recv->data, send->data, send->bytes);
    finish(recv);
  } else {
    keep(incoming_[rank_], header, std::vector<char>(send->at(0), send->at(send->bytes)));
  }
  finish(send);
}

void Mailbox::begin_recv(const Shared& recv) {
  // Among the messages that have already arrived, find the first one that this recv accepts.
  Incoming* source = nullptr;
  std::deque<Unexpected>::iterator early;
  for (Incoming& from : incoming_) {
    if (recv->peer != any_source && recv->peer != from.peer) continue;
    const auto found =
        std::ranges::find_if(from.unexpected, [&](const Unexpected& message) { return takes(*recv, message.envelope.tag); });
    if (found != from.unexpected.end() && (!source || found->turn < early->turn)) source = &from, early = found;
  }
  if (source) {
    if (!fits(recv, source->peer, early->envelope)) return;
    const Unexpected message = std::move(*early);
    source->unexpected.erase(early);
    if (message.envelope.kind == Kind::whole) {
      copy(recv->data, message.payload.data(), recv->bytes);
      if (source->peer != rank_) give_back(*source, cost(recv->bytes));
      finish(recv);
    } else if (source->ended) {
      finish(recv, lost(*recv, *source));
    } else {
      fetch(*source, recv, message.envelope);
    }
  } else if (recv->peer != any_source && incoming_[recv->peer].ended) {
    finish(recv, lost(*recv, incoming_[recv->peer]));
  } else {
    recv->turn_ = ++last_turn_;
    (recv->peer == any_source ? posted_for_any_ : incoming_[recv->peer].queue).push_back(recv);
  }
}

void Mailbox::wait(const std::shared_ptr<Transfer>& transfer, const Wait& wait) {
  auto lock = enter();
  auto looked = Clock::now();
  waiting_++;
  try {
    while (!transfer->done()) {
      const bool idle = !turn(lock, true);
      tell_ended(lock);
      if (transfer->done() || (!idle && seconds_since(looked) <= longest_sleep_ms * 1e-3)) continue;
      // look() may wait for Python, and meanwhile the mailbox's own thread must move the bytes of the detached transfers.
      leave();
      lock.unlock();
      const auto back = [&] {
        lock.lock();
        waiting_++;
      };
      try {
        wait.look({[&] { return missing(*transfer); }, false});
      } catch (...) {
        back();
        throw;
      }
      back();
      looked = Clock::now();
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    drop(transfer, given_up);
    leave();
    throw;
  }
  leave();
  if (transfer->error_) throw *transfer->error_;
}

void Mailbox::help(const Transfer& transfer, double timeout_s) {
  auto lock = enter();
  const Deadline deadline(timeout_s);
  waiting_++;
  try {
    while (!transfer.done() && !deadline.passed()) {
      const double left_ms = (timeout_s - seconds_since(deadline.start())) * 1e3;
      turn(lock, true, static_cast<int>(std::clamp(std::ceil(left_ms), 0.0, 1.0 * longest_sleep_ms)));
      helped_ = transfer.done();
      tell_ended(lock);
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    leave();
    throw;
  }
  leave();
}

std::vector<std::string> Mailbox::cancel(std::span<const Shared> transfers) {
  const auto waits = [](const Shared& transfer) { return !transfer->sends && !transfer->done() && !transfer->begun_; };
  std::vector<std::pair<Shared, Error>> cancelled;
  std::vector<std::string> texts;
  auto lock = enter();
  const Deadline deadline(pass_s);
  const auto before = idle_passes_;
  waiting_++, cancelling_++;
  const auto back = [&] {
    if (!lock.owns_lock()) lock.lock();
    cancelling_--;
    leave();
  };
  try {
    while (std::ranges::any_of(transfers, waits) && idle_passes_ == before && !deadline.passed()) {
      wake_driver();
      turn(lock, false, driving_ ? longest_sleep_ms : 0);
    }
    // Allocate first. If there is no memory, no recv is cancelled.
    for (const Shared& recv : transfers)
      if (waits(recv)) {
        texts.push_back(text(*recv));
        cancelled.emplace_back(recv, Error("Cancelled", texts.back() + " was cancelled before a message came"));
      }
  } catch (...) {
    back();
    throw;
  }
  for (auto& [recv, error] : cancelled) finish(recv, std::move(error));
  const auto done = [](const Shared& recv) { return recv->done(); };
  for (Incoming& link : incoming_) std::erase_if(link.queue, done);
  std::erase_if(posted_for_any_, done);
  tell_finished();
  wake_driver();  // another thread that waits for one of these recvs may be the driver
  tell_ended(lock);
  back();
  return texts;
}

// Called with mutex_ locked, by a thread that stops waiting.
void Mailbox::leave() {
  changed_->notify_all();  // another thread may become the driver now
  if (--waiting_ > 0 || detached_.empty()) return;
  unattended_since_ = Clock::now();
  if (asleep_) detaching_->notify_one();
}

bool Mailbox::ended(int peer) const {
  const auto lock = enter();
  return incoming_[peer].ended.has_value();
}

void Mailbox::detach(std::shared_ptr<Transfer> transfer, const Wait& wait, Ended ended) {
  auto lock = enter();
  if (transfer->done()) {
    lock.unlock();
    return ended(transfer->error_);
  }
  if (stopping_) throw Error("RuntimeError", text(*transfer) + ": the group was released");
  if (!thread_) thread_ = start_thread([this] { serve(); });
  last_detach_ = Clock::now();
  if (detached_.empty()) unattended_since_ = last_detach_;
  detached_.push_back(std::make_shared<Detached>(Detached{std::move(transfer), wait, std::move(ended)}));
  if (asleep_ || !helped_) detaching_->notify_one();
}

// The main function of the mailbox's own thread. It catches all exceptions, because an uncaught exception would end the process.
void Mailbox::serve() {
  while (true) try {
      return serve_detached();
    } catch (Error& error) {
      const auto lock = enter();
      end_all(std::move(error));
    } catch (...) {
      // Most likely, there was no memory to handle an error. End all transfers, and wake the threads that wait for them.
      const auto lock = enter();
      end_all(thread_failed);
    }
}

// Waits for detached transfers, and calls their callbacks when they have completed. Returns when the mailbox ends.
void Mailbox::serve_detached() {
  Lock lock(mutex_);
  auto looked = Clock::now();
  while (true) {
    if (stopping_)
      for (const auto& one : detached_)
        if (!one->transfer->done())
          drop(one->transfer, or_no_memory([&] {
                 return Error("Aborted", text(*one->transfer) + " had not ended when the group was released");
               }));
    if (tell_ended(lock)) continue;
    if (stopping_) return;
    const bool needed = !detached_.empty() && waiting_ == 0 && seconds_since(unattended_since_) >= grace_s;
    bool idle = false;
    if (needed) helped_ = false, idle = !turn(lock, false);
    else rest(lock);
    if (detached_.empty()) looked = Clock::now();
    if (detached_.empty() || (!idle && seconds_since(looked) <= longest_sleep_ms * 1e-3)) continue;
    // Another thread may remove elements from the list meanwhile.
    const std::vector<std::shared_ptr<Detached>> all(detached_.begin(), detached_.end());
    lock.unlock();
    std::vector<std::pair<Shared, Error>> failed;
    for (const auto& one : all) {
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
    if (!failed.empty()) wake_driver();  // the driver may be in help() for one of these transfers
    changed_->notify_all();
    looked = Clock::now();
  }
}

// Lets the mailbox's own thread sleep while it need not move bytes.
void Mailbox::rest(Lock& lock) {
  changed_->notify_all();  // another thread may become the driver now
  const bool has_work = !detached_.empty();
  const auto sleep = [&](double seconds) { detaching_->wait_for(lock, std::chrono::duration<double>(seconds)); };
  if (has_work && waiting_ == 0) return sleep(std::max(0.0, grace_s - seconds_since(unattended_since_)));
  if (seconds_since(last_detach_) < linger_s) return sleep(tick_s);
  asleep_ = true;
  if (has_work) sleep(longest_sleep_ms * 1e-3);
  else detaching_->wait(lock);
  asleep_ = false;
}

// Takes the detached transfers that have completed out of the list, and calls their callbacks without holding mutex_. Returns
// whether there were any.
bool Mailbox::tell_ended(Lock& lock) {
  if (!std::exchange(unreported_, false)) return false;
  std::list<std::shared_ptr<Detached>> ended;
  for (auto it = detached_.begin(); it != detached_.end();) {
    const auto one = it++;
    if ((*one)->transfer->done()) ended.splice(ended.end(), detached_, one);
  }
  if (ended.empty()) return false;
  lock.unlock();
  for (const auto& one : ended) one->ended(one->transfer->error_);
  ended.clear();
  lock.lock();
  return true;
}

// --- ending the mailbox ---

void Mailbox::shut_down() {
  const auto lock = enter();
  end_all(shut);
}

void Mailbox::close(double timeout_s) {
  stop_thread();
  std::vector<std::optional<Stream>> delivering;
  {
    auto lock = enter();
    // Take out the streams that may still have data to deliver, because end_all() would shut them down.
    for (Outgoing& link : outgoing_) delivering.push_back(std::exchange(link.stream, std::nullopt));
    end_all(released);
    changed_->wait(lock, [this] { return !driving_; });
    for (Incoming& link : incoming_) link.stream.reset();
    // No driver is left, so no thread polls this descriptor.
    wake_fd_.close();
  }
  deliver_all(std::move(delivering), timeout_s);
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
  for (Outgoing& link : outgoing_)
    if (link.stream) link.stream->abandon();
  for (Incoming& link : incoming_)
    if (link.stream) link.stream->abandon();
  wake_fd_.close();
  // Leak the child's copies of these objects. The thread does not exist in the child, and the destructors of the condition
  // variables would wait for threads of the parent.
  (void)thread_.release();
  (void)changed_.release();
  (void)detaching_.release();
}

// --- moving bytes: one waiting thread (the driver) polls for all waiting threads ---

Mailbox::Lock Mailbox::enter() const {
  entering_++;
  Lock lock(mutex_);
  entering_--;
  return lock;
}

void Mailbox::wake_driver() const {
  const uint64_t one = 1;
  woken_ = true;
  // The write fails only when the eventfd's counter is full, and then the driver wakes up anyway.
  if (driving_ && write(wake_fd_.get(), &one, sizeof one) < 0) return;
}

void Mailbox::tell_finished() {
  if (std::exchange(finished_, false)) changed_->notify_all();
}

// Moves the bytes that can move now, for all transfers. If no bytes can move, this thread becomes the driver, and polls until
// bytes can move or another thread wakes it. If another thread is already the driver, only waits until changed_ is notified. Both
// waits take at most sleep_ms. Returns false if nothing happened in that time. awake: whether this thread polls shared memory for
// a while before it sleeps. The mailbox's own thread does not, because the program's threads need the CPU.
bool Mailbox::turn(Lock& lock, bool awake, int sleep_ms) {
  if (driving_) return changed_->wait_for(lock, std::chrono::milliseconds(sleep_ms)) == std::cv_status::no_timeout;
  const bool moved = move_some();
  if (!moved) {
    idle_passes_++;
    if (cancelling_ > 0) changed_->notify_all();
  }
  tell_finished();
  if (moved) {
    lock.unlock();
    for (int i = 0; i < 100 && entering_ > 0; i++) std::this_thread::yield();
    lock.lock();
    return true;
  }
  if (end_silent_links()) return true;
  Poll links;
  const size_t wake = links.add(wake_fd_.get());
  const auto add = [&](const auto& link, bool reads) {
    if (reads || link.writes()) links.add(*link.stream, reads, link.writes());
  };
  for (const Outgoing& link : outgoing_) add(link, link.reads());
  for (const Incoming& link : incoming_) add(link, reads(link));
  driving_ = true;
  woken_ = false;
  lock.unlock();
  int ready = 0;
  try {
    ready = links.wait(sleep_ms, awake ? std::optional(Poll::Awake{spin_, [this] { return woken_.load(); }}) : std::nullopt);
  } catch (...) {
    lock.lock();
    driving_ = false;
    changed_->notify_all();
    throw;
  }
  lock.lock();
  driving_ = false;
  uint64_t wakes;
  if (ready > 0 && links.readable(wake) && read(wake_fd_.get(), &wakes, sizeof wakes) < 0) return true;
  return ready > 0;
}

// Checks each link that a transfer uses, and ends the link if the peer's host is silent. Returns whether any link was ended.
bool Mailbox::end_silent_links() {
  bool ended = false;
  const auto check = [&](Link& link, bool used) {
    ended |= used && step(link, [&] {
               link.stream->check_silence();
               return false;
             });
  };
  for (Outgoing& link : outgoing_) check(link, link.reads());
  for (Incoming& link : incoming_) check(link, reads(link));
  return ended;
}

// Returns the ranks for which the transfer is waiting. A recv from any source waits for all other ranks, or for this rank if the
// group has only one rank.
std::vector<int> Mailbox::missing(const Transfer& transfer) const {
  if (transfer.done()) return {};
  const int peer = transfer.matched_peer_;
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
    Incoming& from = incoming_[(first_ + i) % size];
    Outgoing& to = outgoing_[from.peer];
    try {
      moved |= step(from, [&] { return read_some(from); });
      moved |= step(from, [&] { return read_from_sender(from); });
      moved |= write_returns(from);
      // Before this rank writes, read the credit that the peer has returned. With more credit, more messages can be sent whole.
      moved |= step(to, [&] { return read_returns(to); });
      moved |= step(to, [&] { return write_some(to); });
    } catch (const std::bad_alloc&) {
      // We ran out of memory in the middle of a step: for example, a header was read, but no buffer could be allocated for its
      // payload. So end both the link to this peer and the link from it.
      end(to, Ending(no_memory));
      end(from, Ending(no_memory));
      moved = true;
    }
  }
  return moved;
}

// Calls `step`, which uses the link, and returns what `step` returns. If the connection is broken or the peer violates the
// protocol, ends the link and its transfers, and returns true.
template <typename Step>
bool Mailbox::step(Link& link, const Step& step) {
  try {
    return step();
  } catch (const Stream::Broken& broken) {
    end(link, {"PeerLost", broken.why});
  } catch (const Ending& ending) {
    end(link, ending);
  }
  return true;
}

// --- sending: links to peers ---

Envelope Mailbox::envelope(Kind kind, uint64_t id) const {
  return {.kind = kind, .epoch = epoch_, .source = static_cast<uint32_t>(rank_), .id = id};
}

Envelope Mailbox::header_of(const Transfer& send, Kind kind) const {
  Envelope header = envelope(kind, send.id_);
  header.tag = send.tag;
  header.dtype = send.dtype;
  header.count = send.bytes / size_of(send.dtype);
  return header;
}

bool Mailbox::write_some(Outgoing& link) {
  if (!link.writes()) return false;
  if (!link.current) {
    link.current = std::move(link.queue.front());
    link.queue.pop_front();
    Transfer& send = *link.current;
    const bool whole = send.bytes <= eager_bytes && cost(send.bytes) <= link.credit;
    link.kind = send.cleared_ ? Kind::data : whole ? Kind::whole : Kind::announce;
    if (!send.cleared_) send.id_ = ++link.last_id;
    send.begun_ = true;
    Envelope header = header_of(send, link.kind);
    if (link.kind == Kind::announce) header.address = reinterpret_cast<uintptr_t>(send.data);
    const auto* bytes = reinterpret_cast<const char*>(&header);
    link.head.assign(bytes, bytes + sizeof header);
    if (link.kind == Kind::whole) {
      link.head.insert(link.head.end(), send.at(0), send.at(send.bytes));
      link.credit -= cost(send.bytes);
    }
    link.head_sent = link.payload_sent = 0;
  }
  const Transfer& send = *link.current;
  const size_t payload = link.kind == Kind::data ? send.bytes : 0;
  size_t moved = 0;
  if (link.head_sent < link.head.size()) {
    moved = link.stream->send(link.head.data() + link.head_sent, link.head.size() - link.head_sent);
    link.head_sent += moved;
  } else {
    moved = link.stream->send(send.at(link.payload_sent), std::min(payload - link.payload_sent, piece_bytes));
    link.payload_sent += moved;
  }
  if (link.head_sent < link.head.size() || link.payload_sent < payload) return moved > 0;
  const Shared written = std::exchange(link.current, nullptr);
  if (link.kind == Kind::announce) link.waiting.emplace(written->id_, written);
  else finish(written);
  return true;
}

bool Mailbox::read_returns(Outgoing& link) {
  bool moved = false;
  while (link.reads() && link.stream->receive_more(link.inbox, link.inbox_got)) {
    moved = true;
    if (link.inbox_got == sizeof link.inbox) take_return(link);
  }
  return moved;
}

void Mailbox::take_return(Outgoing& link) {
  const Envelope& back = link.inbox;
  link.inbox_got = 0;
  const auto announced = link.waiting.find(back.id);
  if (valid(back, link.peer) && back.kind == Kind::clear && announced != link.waiting.end()) {
    announced->second->cleared_ = true;
    link.queue.push_back(std::move(announced->second));
    link.waiting.erase(announced);
  } else if (valid(back, link.peer) && back.kind == Kind::taken && announced != link.waiting.end()) {
    finish(announced->second);
    link.waiting.erase(announced);
  } else if (valid(back, link.peer) && back.kind == Kind::credit && back.count <= eager_window - link.credit) {
    link.credit += back.count;
  } else {
    throw Ending{"Error", "it sent an invalid header; the link cannot be trusted any more"};
  }
}

// --- receiving: links from peers ---

bool Mailbox::valid(const Envelope& envelope, int peer) const {
  return envelope.magic == envelope_magic && envelope.wire == wire_version && envelope.epoch == epoch_ &&
         envelope.source == static_cast<uint32_t>(peer) && (envelope.address == 0 || envelope.kind == Kind::announce) &&
         envelope.kind <= Kind::taken && envelope.dtype <= Dtype::object &&
         envelope.count <= std::numeric_limits<size_t>::max() / size_of(envelope.dtype);
}

bool Mailbox::read_some(Incoming& link) {
  bool moved = false;
  size_t left = piece_bytes;
  for (int messages = 0; left > 0 && messages < messages_a_turn && reads(link);) {
    if (link.inbox_got < sizeof link.inbox) {
      if (!link.stream->receive_more(link.inbox, link.inbox_got)) return moved;
    } else {
      char* to = link.current ? link.current->at(link.payload_got) : link.kept.data() + link.payload_got;
      const size_t got = link.stream->receive(to, std::min(payload_bytes(link.inbox) - link.payload_got, left));
      if (got == 0) return moved;
      link.payload_got += got;
      left -= got;
      if (link.payload_got == payload_bytes(link.inbox)) deliver(link);
    }
    moved = true;
    if (link.inbox_got == sizeof link.inbox && link.payload_got == 0) {
      messages++;
      open(link);
    }
  }
  return moved;
}

// Decides where the payload of a message goes. Called when the header is complete.
void Mailbox::open(Incoming& link) {
  const Envelope& header = link.inbox;
  const auto require = [&](bool good) {
    if (!good)
      throw Ending{"Error", "it sent an invalid header (wire " + std::to_string(header.wire) + ", epoch " +
                                std::to_string(header.epoch) + "); the link cannot be trusted any more"};
  };
  require(valid(header, link.peer));
  const size_t bytes = payload_bytes(header);
  if (header.kind == Kind::data) {
    const auto cleared = link.waiting.extract(header.id);
    require(!cleared.empty());
    link.current = cleared.mapped();
    require(link.current->matched_tag_ == header.tag && link.current->dtype == header.dtype && link.current->bytes == bytes);
  } else {
    const bool whole = header.kind == Kind::whole;
    require((whole || header.kind == Kind::announce) && header.id == ++link.last_id);
    require(!whole || (bytes <= eager_bytes && cost(bytes) <= eager_window - link.uncredited));
    const Shared recv = match(link, header);
    if (!whole) {
      link.inbox_got = 0;
      if (recv) fetch(link, recv, header);
      else keep(link, header, {});
      return;
    }
    link.uncredited += cost(bytes);
    link.current = recv;
    if (recv) recv->begun_ = true;
    else link.kept.resize(bytes);
  }
  if (bytes == 0) deliver(link);
}

// Completes the recv of a message, or keeps the message if there is no recv for it. Called when the payload is complete.
void Mailbox::deliver(Incoming& link) {
  link.inbox_got = link.payload_got = 0;
  const size_t bytes = payload_bytes(link.inbox);
  Shared recv = std::exchange(link.current, nullptr);
  std::vector<char> kept = std::move(link.kept);
  link.kept.clear();
  if (!recv) {
    // A matching recv may have been posted while the payload was read.
    recv = match(link, link.inbox);
    if (!recv) return keep(link, link.inbox, std::move(kept));
    copy(recv->data, kept.data(), bytes);
  }
  if (link.inbox.kind == Kind::whole) give_back(link, cost(bytes));
  finish(recv);
}

// Removes the first posted recv that accepts this source and tag, and returns it. Returns nullptr if there is no such recv. A
// recv that expects another type or size fails with Mismatch, and match() then tries the next recv.
std::shared_ptr<Transfer> Mailbox::match(Incoming& link, const Envelope& envelope) {
  const auto first_of = [&](std::deque<Shared>& posted) {
    return std::ranges::find_if(posted, [&](const Shared& recv) { return takes(*recv, envelope.tag); });
  };
  while (true) {
    const auto own = first_of(link.queue), any = first_of(posted_for_any_);
    const bool has_own = own != link.queue.end(), has_any = any != posted_for_any_.end();
    if (!has_own && !has_any) return nullptr;
    const bool takes_own = has_own && (!has_any || (*own)->turn_ < (*any)->turn_);
    const Shared recv = std::move(takes_own ? *own : *any);
    if (takes_own) link.queue.erase(own);
    else posted_for_any_.erase(any);
    if (fits(recv, link.peer, envelope)) return recv;
  }
}

// Matches the recv to the message if both have the same type and size. Otherwise, fails the recv with Mismatch and returns false.
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

void Mailbox::keep(Incoming& link, const Envelope& envelope, std::vector<char> payload) {
  if (link.peer != rank_ && link.unexpected.size() >= most_unexpected)
    throw Ending{"Error", "it has sent " + std::to_string(most_unexpected) + " messages for which there is no recv"};
  link.unexpected.push_back({envelope, ++last_turn_, std::move(payload)});
}

// Gets the payload of an announced message that has been matched to the recv.
void Mailbox::fetch(Incoming& link, const Shared& recv, const Envelope& announced) {
  recv->begun_ = true;
  // If each rank has a CPU, the sender and the receiver copy at the same time, through the ring. This takes three quarters of the
  // time. If ranks share CPUs, one copy takes half the time of two.
  if (!spin_ && announced.address && link.stream->reads_peer()) link.reading.push_back({recv, announced});
  else clear_to_send(link, recv, announced.id);
}

// Reads one piece of an announced message from the memory of its sender. After the last piece, tells the sender, and then
// completes the recv. In this order, because nobody may move the bytes of this mailbox after the recv has completed.
bool Mailbox::read_from_sender(Incoming& link) {
  if (!link.alive() || link.reading.empty()) return false;
  Read& one = link.reading.front();
  bool moved = false;
  if (!one.told) {
    const size_t now = std::min(one.recv->bytes - one.done, piece_bytes);
    if (!link.stream->read_from_peer(one.announced.address + one.done, one.recv->at(one.done), now)) {
      // The kernel does not let this process read that memory. For example, a driver may have mapped it.
      const Read refused = std::move(one);
      link.reading.pop_front();
      clear_to_send(link, refused.recv, refused.announced.id);
      return true;
    }
    one.done += now;
    if (one.done < one.recv->bytes) return true;
    link.outbox.push_back(envelope(Kind::taken, one.announced.id));
    one.told = moved = true;
  }
  moved |= write_returns(link);
  if (!link.outbox.empty() && !link.deaf) return moved;
  const Shared recv = std::move(one.recv);
  link.reading.pop_front();
  finish(recv);
  return true;
}

void Mailbox::clear_to_send(Incoming& link, const Shared& recv, uint64_t id) {
  link.waiting.emplace(id, recv);
  link.outbox.push_back(envelope(Kind::clear, id));
}

// Adds `bytes` to `matched`. When `matched` reaches half of the eager window, returns credit for all these bytes to the sender.
// Returning credit more often would take more headers.
void Mailbox::give_back(Incoming& link, size_t bytes) {
  link.matched += bytes;
  if (link.matched < eager_window / 2) return;
  Envelope credit = envelope(Kind::credit, 0);
  credit.count = link.matched;
  link.outbox.push_back(credit);
  link.uncredited -= std::exchange(link.matched, 0);
}

bool Mailbox::write_returns(Incoming& link) {
  bool moved = false;
  while (link.writes()) {
    try {
      if (!link.stream->send_more(link.outbox.front(), link.outbox_sent)) return moved;
      moved = true;
    } catch (const Stream::Broken&) {
      // The peer no longer accepts headers, but the data that it has already sent can still be read.
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
  finished_ = unreported_ = true;
}

// Ends a transfer, and also its link if the transfer has begun. Called when the thread that waits for the transfer gives up.
void Mailbox::drop(const Shared& transfer, const Error& error) {
  if (transfer->done()) return;
  finish(transfer, error);
  const int peer = transfer->matched_peer_;
  if (transfer->begun_) {
    end(link(transfer->sends, peer), Ending(transfer->sends ? send_given_up : recv_given_up));
  } else {
    std::erase(peer == any_source ? posted_for_any_ : link(transfer->sends, peer).queue, transfer);
  }
}

// Ends a link and its transfers. The peer notices that the link has ended. Needs no memory.
void Mailbox::end(Link& link, const Ending& ending) {
  if (link.stream) link.stream->shut_down();
  if (!link.ended) link.ended.emplace(ending);
  const auto fail = [&](const Shared& transfer) { finish(transfer, or_no_memory([&] { return lost(*transfer, link); })); };
  if (link.current) fail(std::exchange(link.current, nullptr));
  for (const auto& [id, transfer] : link.waiting) fail(transfer);
  for (const Read& read : link.reading) read.told ? finish(read.recv) : fail(read.recv);
  for (const Shared& transfer : link.queue) fail(transfer);
  link.waiting.clear();
  link.reading.clear();
  link.queue.clear();
  // If the peer is lost, a recv from any source may still receive a message from another peer. If the link from a peer ended for
  // another reason, a message for such a recv may have been lost, so the recv fails.
  if (&link != &incoming_[link.peer] || link.ended->kind == "PeerLost") return;
  for (const Shared& recv : posted_for_any_) fail(recv);
  posted_for_any_.clear();
}

// Ends all links and transfers, and wakes all waiting threads. Needs no memory.
void Mailbox::end_all(Error why) {
  if (!shut_) shut_.emplace(std::move(why));
  // Copies of this error need no memory, because it names no ranks and its kind is short.
  Ending ending(or_no_memory([&] { return Error("Aborted", shut_->what()); }));
  ending.kind = "Aborted";
  for (Outgoing& link : outgoing_) end(link, ending);
  for (Incoming& link : incoming_) end(link, ending);
  wake_driver();
  changed_->notify_all();
  detaching_->notify_one();
}

Error Mailbox::lost(const Transfer& transfer, const Link& link) const {
  const std::string& kind = link.ended->kind;
  const std::string why = link.ended->what();
  if (kind == "Aborted") return {"Aborted", text(transfer) + ": " + why};
  return {kind,
          text(transfer) + ": the link to " + (link.stream ? link.stream->peer() : named(link.peer)) + " ended: " + why,
          {ranks_[link.peer]}};
}

std::string Mailbox::text(const Message& message) const {
  return (message.sends ? "send to " : "recv from ") + (message.peer == any_source ? "any rank" : named(message.peer)) + ", " +
         (message.tag == any_tag ? "any tag" : "tag " + std::to_string(message.tag));
}

}  // namespace mscomm
