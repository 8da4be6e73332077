// The part of the communicator that sends and receives messages. The mailbox moves the messages. The code in this file decides
// when a wait for a message must end early, describes messages in errors, and breaks the group when a message fails.
#include <poll.h>

#include <algorithm>
#include <list>
#include <utility>

#include "comm/communicator.h"
#include "net/ring.h"
#include "transport/control.h"

namespace mscomm {

// The Watch of a thread that waits for a message. Each message has its own deadline, text and notices, because many threads may
// wait at the same time.
class Communicator::Delivery final : public Watch {
 public:
  // calls_python: whether the waiting thread may call Python. It is true for a caller's thread. It is false for a message that
  // has been started, because the mailbox's thread calls look(), and a call into Python might never return while the process is
  // exiting.
  Delivery(Communicator& group, const Message& message, bool calls_python)
      : group_(group), message_(message), calls_python_(calls_python) {
    if (!calls_python_) return;
    const std::lock_guard lock(group_.state_mutex_);
    place_ = group_.delivering_.insert(group_.delivering_.end(), this);
  }
  ~Delivery() override {
    if (!calls_python_) return;
    const std::lock_guard lock(group_.state_mutex_);
    group_.delivering_.erase(place_);
  }
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  void look(const Deadline& deadline, const Missing& missing) override {
    if (group_.broken()) group_.throw_failure();
    const std::vector<int> peers = missing();
    if (peers.empty()) return;  // the transfer has completed in the meantime
    for (const auto& other : together)
      if (other->done() && other->error()) throw *other->error();
    if (deadline.passed()) throw group_.timed_out(text(), deadline, "waiting for " + named(peers), peers);
    if (!message_.sends) look_for_senders(peers, missing);
    if (calls_python_) group_.interrupt();
    const double waited_s = seconds_since(deadline.start());
    if (waited_s < next_notice_s_) return;
    next_notice_s_ = waited_s >= second_notice_s ? waited_s + notice_every_s : second_notice_s;
    group_.say(group_.in_group() + text() + " has waited " + seconds_text(waited_s) + " for " + named(peers));
  }
  bool broken() const override { return group_.broken(); }

  // Returns the message as text, such as "recv from rank 3, tag 7 (4 MiB)".
  std::string text() const { return group_.mailbox_.text(message_) + " (" + in_units(message_.bytes) + ")"; }

  // The transfers that were started together with the transfer of message_. If one of these transfers fails, the wait for
  // message_ fails with the same error.
  std::span<const std::shared_ptr<Transfer>> together;

 private:
  // Returns the names of the ranks that the message is waiting for. Errors and notices contain these names.
  std::string named(const std::vector<int>& peers) const {
    if (peers == std::vector{group_.rank_}) return group_.name_of(group_.rank_) + ", which is this rank itself";
    return (peers.size() > 1 ? "any of " : "") + group_.named(peers);
  }
  // Throws if none of the peers can send any more. A peer may send the message and then exit. So if a link from a peer exists or
  // is being set up, the peer counts as gone only when the link has ended and all its data has been read. If the recv names such
  // a peer as its source, this function does nothing, because the mailbox ends the recv when the link ends.
  void look_for_senders(const std::vector<int>& peers, const Missing& missing) const {
    std::string how_they_went;
    for (int peer : peers) {
      const char* how = group_.gone(peer);
      if (group_.expects(peer)) how = message_.peer == any_source && group_.mailbox_.ended(peer) ? " has left the job" : nullptr;
      if (!how) return;
      how_they_went += (how_they_went.empty() ? "" : ", ") + group_.name_of(peer) + how;
    }
    if (missing() != peers) return;  // a message has arrived, or the recv has completed, after `peers` was computed
    throw Error("PeerLost",
                how_they_went + ", but " + text() + " waits for " + (peers.size() > 1 ? "a message from one of them" : "it"),
                group_.in_job(peers));
  }

  Communicator& group_;
  const Message message_;
  const bool calls_python_;
  std::list<const Delivery*>::iterator place_;  // the place of this Delivery in delivering_; valid only if calls_python_ is true
  double next_notice_s_ = first_notice_s;
};

std::vector<Matched> Communicator::run(std::span<const Message> messages, const Deadline& deadline) {
  check_usable();
  const Caller inside(*this);
  std::list<Delivery> deliveries;
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::string text;  // describes the current message, for errors
  try {
    for (const Message& message : messages) {
      text = deliveries.emplace_back(*this, message, true).text();
      transfers.push_back(mailbox_.start(message));
    }
    std::vector<Matched> matched;
    auto delivery = deliveries.begin();
    for (const auto& transfer : transfers) {
      text = delivery->text();
      delivery->together = transfers;
      mailbox_.wait(transfer, {*delivery++, deadline});
      matched.push_back(transfer->matched());
    }
    return matched;
  } catch (...) {
    // If one message fails, other messages may still be in progress. fail() ends these messages, so that the mailbox no longer
    // uses their memory.
    fail(nullptr, text);
  }
}

std::shared_ptr<Work> Communicator::start(const Message& message, const Deadline& deadline) {
  check_usable();
  {
    const std::lock_guard lock(turn_mutex_);
    check_usable();
    callers_++;
  }
  try {
    const auto work = std::make_shared<Work>();
    const auto delivery = std::make_shared<Delivery>(*this, message, false);
    const std::shared_ptr<Transfer> transfer = work->transfer_ = mailbox_.start(message);
    mailbox_.detach(transfer, {*delivery, deadline}, [this, work, delivery, transfer](const std::optional<Error>& error) {
      complete(*work, transfer.get(), [&] {
        if (!error) return;
        if (error->kind == "Cancelled") throw *error;
        abort({or_no_memory([&] { return here(*error); }), false});
        throw_failure();
      });
    });
    return work;
  } catch (...) {
    // The transfer may have begun. fail() ends it, so that the mailbox no longer uses the caller's memory.
    leave_caller();
    fail(nullptr, "a message could not be started");
  }
}

std::vector<std::string> Communicator::cancel(std::span<const std::shared_ptr<Work>> works) {
  if (forked_) return {};
  std::vector<Mailbox::Shared> transfers;
  for (const auto& work : works)
    if (work->transfer_) transfers.push_back(work->transfer_);
  // A peer whose link is being set up may have sent the message, and may even have left.
  const auto comes = [&](int peer) {
    const auto waits = [&](const auto& one) {
      return !one->sends && !one->done() && (one->peer == peer || one->peer == any_source);
    };
    return expects(peer) && !mailbox_.has_link_from(peer) && std::ranges::any_of(transfers, waits);
  };
  const Deadline deadline(handshake_s);
  for (int peer = 0; peer < size(); peer++)
    while (comes(peer) && !broken() && !deadline.passed()) {
      if (hooks_.interrupt) hooks_.interrupt();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  auto texts = mailbox_.cancel(transfers);
  // Another thread may still be telling the Works. No signal handler runs meanwhile: its exception would lose the texts.
  const Deadline told(handshake_s);
  for (const auto& work : works)
    while (work->transfer_ && work->transfer_->done() && !work->wait(longest_sleep_ms * 1e-3) && !told.passed()) {
    }
  return texts;
}

void Communicator::check_peer(int peer) const {
  if (broken()) throw_failure();
  if (const char* how = gone(peer)) throw peer_lost(in_job(peer), name_of(peer) + how);
}

// Returns a part of the text that where() returns, such as " and waits in recv from rank 3, tag 7 (4 MiB)".
std::string Communicator::in_messages() const {
  const std::lock_guard lock(state_mutex_);
  return delivering_.empty() ? "" : " and waits in " + delivering_.front()->text();
}

const char* Communicator::gone(int peer) const {
  {
    const std::lock_guard lock(state_mutex_);
    if (left_[peer]) return " has left the job";
  }
  pollfd life{peers_->pidfds[in_job(peer)].get(), POLLIN, 0};
  return poll(&life, 1, 0) > 0 && (life.revents & POLLIN) ? " ended" : nullptr;
}

bool Communicator::expects(int peer) const {
  const std::lock_guard lock(state_mutex_);
  return expected_[peer];
}

void Communicator::add_link(bool sends, int peer, int fd, const std::optional<Secret>& secret) {
  if (!sends) expect_incoming(peer);
  Stream stream(fd, name_of(peer), secret);
  if (peers_->heaps && host_of(peer) == host_of(rank_) && !secret) share_memory(stream, sends, peer);
  Stream* const one = &stream;
  shake_hands({&one, 1}, Deadline(handshake_s));
  mailbox_.add_link(sends, peer, std::move(stream));
}

// A heap that is smaller than this many rings has no rings.
constexpr size_t ring_share = 64;

// Lets the bytes of a link between two ranks of one host move through memory in the heap of the rank that sends messages on it.
void Communicator::share_memory(Stream& stream, bool sends, int peer) {
  if (!sends) {
    return stream.opens_shared([heaps = peers_->heaps, peer = in_job(peer)](uint64_t offset) -> char* {
      if (offset == not_in_heap) return nullptr;
      if (offset % Ring::alignment != 0) throw Stream::Broken{"it has told a wrong offset of shared memory"};
      try {
        return heaps->at(peer, offset, Ring::memory_bytes);
      } catch (const Error& error) {
        throw Stream::Broken{error.what()};
      }
    });
  }
  Heap& heap = peers_->heaps->mine();
  uint64_t offset = not_in_heap;
  char* memory = nullptr;
  try {
    // A heap can be small if the memory of the process is limited. Groups need their control memory more than links need a ring.
    if (heap.mapping().bytes() / ring_share < std::max(Ring::memory_bytes, give_back_from))
      throw Error("MemoryError", "a small heap");
    offset = heap.reserve(Ring::memory_bytes);
    memory = heap.mapping().begin() + offset;
    want_huge_pages(memory, Ring::memory_bytes, false);
    populate(memory, Ring::memory_bytes);
    heap.release_when(offset, [memory] { return Ring::unused(memory); });
  } catch (const Error&) {
    // There is no memory for the ring, so the link uses its socket.
    if (offset != not_in_heap) heap.release_when(std::exchange(offset, not_in_heap), [] { return true; });
    memory = nullptr;
  }
  stream.share(memory, offset);
}

void Communicator::expect_incoming(int peer) {
  const std::lock_guard lock(state_mutex_);
  expected_[peer] = true;
}

}  // namespace mscomm
