// How the communicator sends and receives messages. The mailbox moves the messages. This file watches the waits for messages,
// describes messages in errors, and breaks the group when a message fails.
#include <poll.h>

#include <list>
#include <new>

#include "comm/communicator.h"

namespace mscomm {

// The Watch of a thread that waits for a message. Each message has its own deadline, text and notices, because many threads may
// wait at once.
class Communicator::Delivery final : public Watch {
 public:
  // calls_python: whether the thread that waits may call Python. It is true for a caller's thread. It is false for the mailbox's
  // thread, because a Python function that this thread calls might not return while the process ends.
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
    if (peers.empty()) return;  // the transfer ended meanwhile
    for (const auto& other : together)
      if (other->done() && other->error()) throw *other->error();
    if (deadline.passed())
      throw Error("CollectiveTimeout",
                  text() + " did not end within " + seconds_text(deadline.timeout_s()) + ": waiting for " + named(peers), {},
                  group_.in_job(peers));
    if (!message_.sends) look_for_senders(peers, missing);
    if (calls_python_ && group_.hooks_.interrupt) {
      try {
        group_.hooks_.interrupt();
      } catch (...) {
        throw Interrupted{std::current_exception()};
      }
    }
    const double waited_s = seconds_since(deadline.start());
    if (waited_s < next_notice_s_ || !group_.hooks_.notice) return;
    next_notice_s_ = waited_s >= second_notice_s ? waited_s + notice_every_s : second_notice_s;
    const std::string in_group = group_.group_ == "world" ? "" : "group " + group_.group_ + ": ";
    group_.hooks_.notice("mscomm: rank " + std::to_string(group_.in_job(group_.rank_)) + ": " + in_group + text() +
                         " has waited " + seconds_text(waited_s) + " for " + named(peers));
  }
  bool broken() const override { return group_.broken(); }

  std::shared_ptr<Transfer> begin() const {
    const Message& message = message_;
    return message.sends ? group_.mailbox_.start_send(message.peer, message.tag, message.dtype, message.data, message.bytes)
                         : group_.mailbox_.start_recv(message.peer, message.tag, message.dtype, message.data, message.bytes);
  }

  // The message as text: "recv from rank 3, tag 7 (4 MiB)".
  std::string text() const {
    const std::string peer = message_.peer == any_source ? "any rank" : "rank " + std::to_string(group_.in_job(message_.peer));
    const std::string tag = message_.tag == any_tag ? "any tag" : "tag " + std::to_string(message_.tag);
    return (message_.sends ? "send to " : "recv from ") + peer + ", " + tag + " (" + in_units(message_.bytes) + ")";
  }

  // The transfers that were started together with this one. If one of them fails, the wait for this transfer ends with the error
  // of the failed one.
  std::span<const std::shared_ptr<Transfer>> together;

 private:
  // Returns a text that names the ranks that the message waits for.
  std::string named(const std::vector<int>& peers) const {
    if (peers == std::vector{group_.rank_}) return group_.name_of(group_.rank_) + ", which is this rank itself";
    return (peers.size() > 1 ? "any of " : "") + group_.named(peers);
  }
  // Throws if none of the peers can send any more. If a peer has a link to us, or is making one, the peer counts as gone only
  // when that link has ended and all its data has been read, because the peer may have sent the message before it exited. If the
  // recv names one peer, and that peer has a link, the mailbox ends the recv, and this function does nothing.
  void look_for_senders(const std::vector<int>& peers, const Missing& missing) const {
    std::string how_they_went;
    for (int peer : peers) {
      const char* how = group_.gone(peer);
      if (group_.expects(peer)) how = message_.peer == any_source && group_.mailbox_.ended(peer) ? " has left the job" : nullptr;
      if (!how) return;
      how_they_went += (how_they_went.empty() ? "" : ", ") + group_.name_of(peer) + how;
    }
    if (missing() != peers) return;  // a message has come, or the recv has ended, since `peers` was made
    throw Error("PeerLost",
                how_they_went + ", but " + text() + " waits for " + (peers.size() > 1 ? "a message from one of them" : "it"),
                group_.in_job(peers));
  }

  Communicator& group_;
  const Message message_;
  const bool calls_python_;
  std::list<const Delivery*>::iterator place_;  // the place of this Delivery in delivering_, if calls_python_
  double next_notice_s_ = first_notice_s;
};

std::vector<Matched> Communicator::run(std::span<const Message> messages, const Deadline& deadline) {
  check_usable();
  const Caller inside(*this);
  check_usable();
  std::list<Delivery> deliveries;
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::string text;  // describes the current message, for errors
  try {
    for (const Message& message : messages) {
      text = deliveries.emplace_back(*this, message, true).text();
      transfers.push_back(deliveries.back().begin());
    }
    std::vector<Matched> matched;
    auto delivery = deliveries.begin();
    for (const auto& transfer : transfers) {
      text = delivery->text();
      delivery->together = transfers;
      mailbox_.wait(transfer, {*delivery++, deadline});
      matched.push_back({transfer->matched_peer(), transfer->matched_tag()});
    }
    return matched;
    // If one message fails, others may still be under way. fail() ends them, so that the mailbox no longer uses their memory.
  } catch (const Error& error) {
    fail(error);
  } catch (const std::bad_alloc&) {
    fail(Error("MemoryError", text + ": out of memory"));
  } catch (const Interrupted& interrupted) {
    // As in execute(): a signal handler has raised a Python exception. The caller gets this exception unchanged, and the peers
    // get Aborted.
    try {
      fail(Error("Aborted", "interrupted in " + text, {in_job(rank_)}));
    } catch (const Error&) {
    }
    std::rethrow_exception(interrupted.cause);
  } catch (const std::exception& error) {
    fail(Error("Error", text + ": " + error.what()));
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
    const std::shared_ptr<Transfer> transfer = delivery->begin();
    mailbox_.detach(transfer, {*delivery, deadline}, [this, work, delivery, transfer](const std::optional<Error>& error) {
      std::optional<Error> cause = outcome([&] {
        if (error) fail(*error);
      });
      const bool failed = cause.has_value();
      leave_caller();
      const Matched matched{transfer->matched_peer(), transfer->matched_tag()};
      // This comes after leave_caller(), because a thread that waits for the work may close the group as soon as the work has
      // ended.
      work->end(std::move(cause), failed ? std::nullopt : std::optional(matched));
      if (failed && hooks_.failed) hooks_.failed();
    });
    return work;
  } catch (const std::exception& error) {
    // The transfer may have begun. fail() ends it, so that the mailbox no longer uses the caller's memory.
    leave_caller();
    const auto* known = dynamic_cast<const Error*>(&error);
    fail(known ? *known : Error("Error", std::string("a message could not be started: ") + error.what()));
  }
}

// Breaks the group because a message failed. Throws the first cause that this rank knows of.
void Communicator::fail(const Error& error) {
  abort({Error(error.kind, name_of(rank_) + ": " + error.what(), error.ranks, error.waiting_for), false});
  throw_failure();
}

void Communicator::check_peer(int peer) const {
  if (broken()) throw_failure();
  if (const char* how = gone(peer)) throw peer_lost(in_job(peer), name_of(peer) + how);
}

// A part of the text that where() returns: " and waits in recv from rank 3, tag 7 (4 MiB)".
std::string Communicator::in_messages() const {
  const std::lock_guard lock(state_mutex_);
  return delivering_.empty() ? "" : " and waits in " + delivering_.front()->text();
}

const char* Communicator::gone(int peer) const {
  {
    const std::lock_guard lock(state_mutex_);
    if (left_[peer]) return " has left the job";
  }
  pollfd life{peers_->pidfds[in_job(peer)], POLLIN, 0};
  return poll(&life, 1, 0) > 0 && (life.revents & POLLIN) ? " ended" : nullptr;
}

bool Communicator::expects(int peer) const {
  const std::lock_guard lock(state_mutex_);
  return expected_[peer];
}

Stream Communicator::link(int peer, int fd) const { return {fd, name_of(peer)}; }

void Communicator::add_outgoing(int peer, int fd) { mailbox_.add_outgoing(peer, link(peer, fd)); }

void Communicator::add_incoming(int peer, int fd) {
  expect_incoming(peer);
  mailbox_.add_incoming(peer, link(peer, fd));
}

void Communicator::expect_incoming(int peer) {
  const std::lock_guard lock(state_mutex_);
  expected_[peer] = true;
}

}  // namespace mscomm
