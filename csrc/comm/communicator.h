// A group's communicator: numbers calls, runs them in order, and sends and receives messages beside them (messages.cc). An error
// in a call or a message breaks the group (abort()). From then on every call raises the group's first cause.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/vendor.h"
#include "base/error.h"
#include "comm/peers.h"
#include "comm/recorder.h"
#include "net/wait.h"
#include "transport/mailbox.h"

namespace mscomm {

// Why a group is broken. verdict: whether this is the first cause, as the hub decided or as this rank aborts; otherwise it is
// only a symptom that this rank has seen. number: the call that saw it; -1: no call did.
struct Failure {
  Error error;
  bool verdict;
  int64_t number = -1;
};

// One send or recv, as the user called it. data is read or written until the message has ended.
struct Message {
  bool sends;
  int peer;     // rank in the group, or any_source
  int64_t tag;  // or any_tag
  Dtype dtype;
  void* data;
  size_t bytes;
};

// The source (a rank in the group) and the tag of the message that a recv got.
struct Matched {
  int peer;
  int64_t tag;
};

struct Where {
  uint64_t number;  // the last call
  bool inside;
  std::string text;
};

// A call that runs on the group's worker thread or on the device, or a message that was started.
class Work {
 public:
  Work() = default;
  ~Work();
  uint64_t number() const { return number_; }  // of the call; 0: a message
  // Whether it has ended, with or without an error.
  bool done() const { return done_.load(); }
  // Waits at most that long. Returns whether it has ended.
  bool wait(double timeout_s);
  // The error that it ended with.
  std::optional<Error> error() const;
  // Which message came; only for a recv that has ended without an error.
  std::optional<Matched> matched() const;

 private:
  friend class Communicator;
  void end(std::optional<Error> error, std::optional<Matched> matched = {});

  mutable std::mutex mutex_;  // protects error_ and matched_, and done_ for waiters
  std::unique_ptr<std::condition_variable> ended_ = std::make_unique<std::condition_variable>();
  const int owner_ = getpid();  // a forked child has a copy
  uint64_t number_ = 0;
  std::optional<Error> error_;
  std::optional<Matched> matched_;
  std::atomic<bool> done_{false};
};

class Communicator final : public Watch, private VendorBackend::Observer {
 public:
  // interrupt: called on a caller's thread at each bounded wake, never on the worker's or the mailbox's; may throw. notice: one
  // line for the user. failed: a thread that is not a caller's has broken the group, which nobody may notice otherwise; or
  // stuck() has a number.
  struct Hooks {
    std::function<void()> interrupt;
    std::function<void(const std::string&)> notice;
    std::function<void()> failed;
  };

  // ranks: the group's ranks, as ranks of the job; rank: this rank's place among them. Errors and notices name ranks of the job.
  Communicator(std::string group, std::vector<int> ranks, int rank, std::shared_ptr<Peers> peers,
               std::unique_ptr<Backend> backend, uint32_t epoch, Recorder& recorder, Hooks hooks);
  ~Communicator() override;

  // To be called before the first call. The device's backend runs the calls on its arrays.
  void add_device(std::unique_ptr<VendorBackend> device);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // Takes that many call numbers in a row, for a call that is made of several, and returns the first. Each of them must then be
  // run.
  uint64_t reserve(int count);
  // Runs one collective call from start to end. The signature's number is 0, unless it was reserved. Throws Error, or what the
  // interrupt hook throws; the group is broken then, unless the call was refused before it began.
  void run(Call call, double timeout_s);
  // Runs the call on the worker's thread, in the order of calls. x and out must live until the work has ended. A call on a
  // device's arrays needs no thread: it has been enqueued when this returns.
  std::shared_ptr<Work> start(Call call, double timeout_s);
  // Makes what is enqueued on the stream from now on wait for that call on the device.
  void order(uint64_t number, StreamHandle stream);
  // Pack or clear the device's arrays, on the device.
  void pack(const Packing& packing, StreamHandle stream);
  void clear(void* memory, size_t bytes, StreamHandle stream);
  // Whether pack() scales, and casts if the dtypes differ.
  bool converts(Dtype part, Dtype bucket) const { return device_ && device_->converts(part, bucket); }
  // Whether there is a device whose library can reduce elements of this type by this operation.
  bool reduces_on_device(Dtype dtype, Op op) const { return device_ && device_->refuses(dtype, op).empty(); }

  // Starts these messages together, in this order, and waits until all have ended. Throws as run() for a call. Any number of
  // threads may do it at once, beside the calls. The link to a peer must exist before the first send to it. Returns what was
  // matched to each message.
  std::vector<Matched> run(std::span<const Message> messages, const Deadline& deadline);
  // Starts one message; the mailbox's thread waits for it.
  std::shared_ptr<Work> start(const Message& message, const Deadline& deadline);
  void add_outgoing(int peer, int fd);
  void add_incoming(int peer, int fd);
  // Says that a link from the peer is being made. From now on a recv learns from the end of that link, not from left() or the
  // peer's process, that the peer is gone.
  void expect_incoming(int peer);
  // Throws if the group is broken, or the peer has left or ended.
  void check_peer(int peer) const;

  // Breaks the group. May be called from any thread at any time, and does not wait. The first failure is kept, but a verdict
  // replaces a symptom.
  void abort(Failure failure);
  // Says that this rank of the job ended well. That is no failure until somebody waits for it.
  void left(int rank);
  Where where() const;
  // The number of a call that the device has not ended within a second, so that the caller can check that all ranks make it.
  // Returns each number once; 0: none.
  uint64_t stuck() { return stuck_.exchange(0); }
  std::optional<Failure> failure() const;
  // Compares the last headers from the peers with this rank's own calls; throws as run() does if they differ.
  void last_look();
  // Waits until the device has ended what was enqueued, or the group is broken. It has no deadline, so the loss of a peer must
  // still be reported to this group (abort()) meanwhile.
  void drain() const;
  // Ends this rank's part in the group. If another thread is still in a call, that call fails first.
  void close();

  // Watch
  void look(const Deadline& deadline, const Missing& missing) override;
  bool broken() const override { return broken_.load(std::memory_order_relaxed); }

 private:
  // Counts the threads inside run() and start_on_device(), for close().
  class Caller {
   public:
    // For a message, which takes no number.
    explicit Caller(Communicator& group) : group_(group), in_call_(false), outer_(innermost_) {
      const std::lock_guard lock(group_.turn_mutex_);
      enter();
    }
    // For a call, which gets its number here unless one was reserved.
    Caller(Communicator& group, Signature& call) : group_(group), in_call_(true), outer_(innermost_) {
      const std::lock_guard lock(group_.turn_mutex_);
      const uint64_t first = group_.take_numbers(call.number == 0 ? 1 : 0);
      number_ = call.number = call.number == 0 ? first : call.number;
      its_turn_ = group_.running_ == number_;
      enter();
    }
    ~Caller() {
      innermost_ = outer_;
      group_.leave_caller(ended_ ? number_ : 0);
    }
    // Whether all earlier calls had ended when this one was numbered.
    bool its_turn() const { return its_turn_; }
    // Says that the call has ended well: the next call's turn comes when this thread leaves.
    void ended() { ended_ = true; }
    // Whether this thread is in a call of the group.
    static bool calls(const Communicator& group) {
      for (const Caller* one = innermost_; one; one = one->outer_)
        if (one->in_call_ && &one->group_ == &group) return true;
      return false;
    }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

   private:
    void enter() {
      group_.callers_++;
      innermost_ = this;
    }

    Communicator& group_;
    const bool in_call_;
    uint64_t number_ = 0;
    bool its_turn_ = false, ended_ = false;
    const Caller* const outer_;  // what the same thread was in before: a signal handler may call, too
    static inline thread_local const Caller* innermost_ = nullptr;
  };
  class Delivery;
  // What the interrupt hook threw.
  struct Interrupted {
    std::exception_ptr cause;
  };
  struct Job {
    Call call;
    Deadline deadline;
    std::shared_ptr<Work> work;
  };

  // VendorBackend::Observer
  void ended(uint64_t number) override;
  void failed(const Signature& call, const Error& error) override;
  void waits(const Signature& call, double waited_s) override;

  void leave_caller(uint64_t ended = 0);  // ended: the number of a call that has ended well
  // To be called before any lock is taken, because in a forked child a mutex may be locked for ever; and again under the lock.
  void check_usable() const;
  void check_no_handler() const;
  VendorBackend& device() const;
  uint64_t take_numbers(int count);  // to be called with turn_mutex_; returns the first
  void check(const Call& call) const;
  std::shared_ptr<Work> start_on_device(Call call, double timeout_s);
  Backend& backend_of(const Call& call) const { return call.stream ? static_cast<Backend&>(*device_) : *backend_; }
  std::optional<Error> outcome(const std::function<void()>& part);
  void work();
  void stop_worker();
  void execute(const Call& call, const Deadline& deadline, bool its_turn);
  void queue_for(const Signature& call, const Deadline& deadline);
  [[noreturn]] void fail(const Call& call, const Error& error);
  [[noreturn]] void throw_failure() const;
  // messages.cc
  std::string in_messages() const;
  [[noreturn]] void fail(const Error& error);
  const char* gone(int peer) const;
  bool expects(int peer) const;
  Stream link(int peer, int fd) const;
  Error differing(const Differs& differs) const;
  Error of_device(const Signature& call, const Error& error) const;
  std::string current() const;
  const std::string& name_of(int rank) const { return peers_->names[in_job(rank)]; }
  int in_job(int rank) const { return ranks_[rank]; }
  int host_of(int rank) const { return peers_->hosts[in_job(rank)]; }
  std::vector<int> in_job(std::vector<int> ranks) const;
  std::string named(const std::vector<int>& ranks) const;
  void look_for_the_dead(const std::vector<int>& ranks, const Missing& missing) const;
  void say_waiting(double waited_s, const std::vector<int>& missing, bool by_memory);

  static void before_fork();
  static void after_fork();
  static void in_child();

  const std::string group_;
  const std::vector<int> ranks_;
  const int rank_;
  const std::shared_ptr<Peers> peers_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<VendorBackend> device_;
  Recorder& recorder_;
  Hooks hooks_;

  std::mutex turn_mutex_;  // protects the order of calls: next_, running_, callers_, jobs_, stopping_, and the making of worker_
  std::unique_ptr<std::condition_variable> turn_ = std::make_unique<std::condition_variable>();  // running_ or callers_ changed
  std::unique_ptr<std::condition_variable> job_ = std::make_unique<std::condition_variable>();   // the worker has something to do
  uint64_t next_ = 1;
  uint64_t running_ = 1;  // the number whose turn it is; advances when a call has ended well and its thread has left
  int callers_ = 0;       // threads inside run(), and started calls and messages that have not ended
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::unique_ptr<std::thread> worker_;  // made by the first start()

  mutable std::mutex state_mutex_;  // protects failure_, left_, expected_, delivering_ and on_device_; never held while waiting
  std::optional<Failure> failure_;
  std::vector<bool> left_;
  std::vector<bool> expected_;                           // peers from which a link for messages exists or is being made
  std::list<const Delivery*> delivering_;                // messages that callers wait for, oldest first
  std::map<uint64_t, std::shared_ptr<Work>> on_device_;  // calls that somebody may wait for, by number
  std::atomic<bool> broken_{false};
  bool closed_ = false;  // with state_mutex_

  std::atomic<uint64_t> stuck_{0};
  std::atomic<double> next_notice_s_{0};  // of the running call
  std::atomic<bool> forked_{false};
  Mailbox mailbox_;  // last, so destroyed first: its thread uses everything above
};

}  // namespace mscomm
