// A communicator belongs to one group. It gives each call of the group a number, and runs the calls in the order of their
// numbers. It also sends and receives messages, independently of the calls (messages.cc). An error in a call or a message breaks
// the group (abort()). From then on, every call throws the first cause of the failure.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
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

// Why a group is broken. is_verdict: true if the hub has decided that the error is the first cause of the failure, or if this
// rank is aborting the job. If false, the error is only a symptom that this rank has observed. number: the number of the call
// that failed with the error, or -1 if the error did not occur in a call. If ranks made different calls, it is the lowest number
// of these calls, which may be lower than the number of the call that noticed the difference.
struct Failure {
  Error error;
  bool is_verdict;
  int64_t number = -1;
};

struct Where {
  uint64_t number;  // the number of the most recent call, or 0 if there was none
  bool inside;
  std::string text;
};

// A call or a message that has been started and may still be in progress. A call runs on the group's worker thread, on a thread
// that waits for it (Communicator::wait()), or on the device.
class Work {
 public:
  Work() = default;
  ~Work();
  uint64_t number() const { return number_; }  // the number of the call; 0 for a message
  // Returns whether the call or message has completed, with or without an error.
  bool done() const { return done_.load(); }
  // Sleeps for at most timeout_s seconds. Returns whether the call or message has completed.
  bool wait(double timeout_s);
  // Returns the error with which the call or message has failed, if any.
  std::optional<Error> error() const { return done() ? error_ : std::nullopt; }
  // Returns the source and the tag of the message. Valid only for a recv that has completed without an error.
  std::optional<Matched> matched() const { return done() ? matched_ : std::nullopt; }
  // Makes the thread that completes the call or message call `after`. If it has already completed, calls `after` at once. `after`
  // must return at once and must not throw, because that thread may hold a lock of the communicator.
  void when_ended(std::function<void()> after);

 private:
  friend class Communicator;
  void end(std::optional<Error> error, std::optional<Matched> matched = {});

  // Held while error_, matched_ and done_ are set, and while after_ is used. After done_ has become true, error_ and matched_ are
  // read without mutex_, because they do not change any more.
  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> ended_ = std::make_unique<std::condition_variable>();
  const int owner_ = getpid();  // the process that created this Work; a forked child has only a copy
  uint64_t number_ = 0;
  std::shared_ptr<Transfer> transfer_;  // nullptr for a call
  std::optional<Error> error_;
  std::optional<Matched> matched_;
  std::atomic<bool> done_{false};
  std::vector<std::function<void()>> after_;
};

class CallNumbers;

class Communicator final : public Watch, private VendorBackend::Observer {
 public:
  // interrupt: called regularly on a caller's thread while that thread waits, but never on the worker thread or the mailbox's
  // thread. May throw, which ends the wait. notice: prints one line for the user. failed: called after one of the core's own
  // threads has broken the group. Without this hook, the process might not notice the failure before its next call. Also called
  // when stuck() has a new number to return.
  struct Hooks {
    std::function<void()> interrupt;
    std::function<void(const std::string&)> notice;
    std::function<void()> failed;
  };

  // ranks: the job rank of each rank of the group. rank: this rank's index in `ranks`. Errors and notices name job ranks. spin:
  // whether the host has a CPU for each rank.
  Communicator(std::string group, std::vector<int> ranks, int rank, std::shared_ptr<Peers> peers,
               std::unique_ptr<Backend> backend, uint32_t epoch, bool spin, Recorder& recorder, Hooks hooks);
  ~Communicator() override;

  // Adds a backend that runs the calls on device arrays. Call this before the group's first call.
  void add_device(std::unique_ptr<VendorBackend> device);

  // Returns the name of a rank of the group in messages, such as "rank 3 (pid 4711 on host a)".
  const std::string& name_of(int rank) const { return peers_->names[in_job(rank)]; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // Throws Error if run() or start() would refuse the call. A refused call does not use up a number.
  void check(const Call& call) const;
  // Runs one collective call. Returns when the call has completed or, for device arrays, when it has been enqueued. The call
  // takes its number from `numbers` or, if `numbers` is nullptr, gets the next number of the group. Throws Error, or whatever the
  // interrupt hook throws. After an exception, the group is broken, unless the call was refused before it began.
  void run(Call&& call, double timeout_s, CallNumbers* numbers = nullptr);
  // Starts a call. If its arrays are on a device, start() itself enqueues it. If not, it runs after all earlier calls of the
  // group: on the worker thread, or in wait(). x and out must live until the returned Work has completed. numbers: as for run().
  // If the number was reserved, calls with higher numbers may have been started before.
  std::shared_ptr<Work> start(Call call, double timeout_s, CallNumbers* numbers = nullptr);
  // Waits for a call or a message, and returns whether it has completed. If timeout_s is nullopt and no thread has begun the
  // call, this thread runs the queued calls up to this one. So a call that is waited for at once needs no other thread.
  // Otherwise, wait() returns after timeout_s or longest_sleep_ms at the latest, so that the caller can check for signals. Throws
  // what the interrupt hook has thrown while this thread ran calls.
  bool wait(Work& work, std::optional<double> timeout_s);
  // Lets the worker thread begin the queued calls now, because no thread may call wait() soon.
  void hurry();
  // Returns the backend of the group's device. Throws if the group is broken or has no device.
  VendorBackend& device() const;
  // Returns whether device().pack() can scale elements with a kernel and, if the dtypes differ, also cast them.
  bool converts(Dtype part, Dtype bucket) const { return device_ && device_->converts(part, bucket); }
  // Returns why the library of the group's device cannot reduce elements of this type with this operation, or "" if it can.
  std::string refuses(Dtype dtype, Op op) const { return device_ ? device_->refuses(dtype, op) : ""; }

  // Starts the messages in the given order, without waiting for one before starting the next. Then waits until all have
  // completed, and returns the source and the tag of each message. Throws the same exceptions as run() for a call. Any number of
  // threads may call this at the same time, even while collective calls are running. The link to a peer must exist before the
  // first send to that peer.
  std::vector<Matched> run(std::span<const Message> messages, const Deadline& deadline);
  // Starts one message and returns. The mailbox's thread and wait() then move its bytes.
  std::shared_ptr<Work> start(const Message& message, const Deadline& deadline);
  // Ends those of the Works that are recvs for which no message has arrived, and returns their descriptions. Such a Work then has
  // an Error of the kind Cancelled, and the group goes on. All other calls and messages go on. May first wait for links that are
  // being set up, for at most handshake_s in all, and then reads the links for a second at most. Throws what the interrupt hook
  // throws, but only before it ends a recv.
  std::vector<std::string> cancel(std::span<const std::shared_ptr<Work>> works);
  // Adds the link for messages to a peer (if `sends` is true) or from a peer. If the link has a secret, waits for at most
  // handshake_s, until the peer has called add_link(), too. Between ranks of one host, the messages move through memory in the
  // sender's heap.
  void add_link(bool sends, int peer, int fd, const std::optional<Secret>& secret = {});
  // Returns whether a message can be sent to the peer without setting up a link.
  bool reaches(int peer) const { return peer == rank_ || mailbox_.has_link_to(peer); }
  // Tells the communicator that a link from the peer is being set up. From then on, a recv considers the peer gone only when that
  // link has ended, even if left() has been called for the peer or the peer's process has exited.
  void expect_incoming(int peer);
  // Throws if the group is broken, if left() was called for the peer, or if the peer's process has exited.
  void check_peer(int peer) const;

  // Breaks the group. Does not wait, and needs no memory. Any thread may call this at any time. If the group is already broken,
  // the first failure is kept, except that a verdict replaces a symptom.
  void abort(Failure failure);
  // Tells the communicator that the given job rank has left the job or has destroyed the group, without an error. This alone
  // does not break the group: only a call or message that waits for that rank fails.
  void left(int rank);
  Where where() const;
  // Returns the number of the oldest call on the device if the device has completed no call for more than a second,
  // otherwise 0. The caller can then check that all ranks have made this call. After stuck() has returned a number, it returns 0
  // until the device backend reports again that a call is stuck.
  uint64_t stuck() { return stuck_.exchange(0); }
  std::optional<Failure> failure() const;
  // Reads the headers that peers have sent since this rank's most recent call began, and compares them with this rank's own
  // calls. Throws the same error as run() if they differ.
  void last_look();
  // Waits until the device has completed all enqueued work, or until the group is broken. drain() has no deadline: if a peer is
  // lost, drain() returns only after another thread has called abort().
  void drain() const;
  // Ends this rank's part in the group. If a call or a message is still running, close() first breaks the group, so that the call
  // or message fails.
  void close();

  // Implements Watch:
  void look(const Deadline& deadline, const Missing& missing) override;
  bool broken() const override { return broken_.load(std::memory_order_relaxed); }

 private:
  friend class CallNumbers;
  // Marks the current thread as being inside the call with this number, until the mark is destroyed. number: 0 for a message.
  class Inside {
   public:
    Inside(const Communicator& group, uint64_t number) : number(number), group_(group), outer_(innermost_) { innermost_ = this; }
    ~Inside() { innermost_ = outer_; }
    // Returns whether this thread is inside a call of the group with at most this number, possibly in a signal handler that has
    // interrupted the call.
    static bool calls(const Communicator& group, uint64_t at_most) {
      for (const Inside* one = innermost_; one; one = one->outer_)
        if (one->number && one->number <= at_most && &one->group_ == &group) return true;
      return false;
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

    uint64_t number;

   private:
    const Communicator& group_;
    // Usually nullptr. If this mark was set in a signal handler that interrupted a call, outer_ is the mark of that call.
    const Inside* const outer_;
    static inline thread_local const Inside* innermost_ = nullptr;
  };
  // Marks the current thread as being inside run() or start_on_device(). close() waits until no thread is a Caller.
  class Caller {
   public:
    // Gives the call its number. For a message, which has no number, `call` is nullptr.
    explicit Caller(Communicator& group, Signature* call = nullptr, CallNumbers* numbers = nullptr)
        : group_(group), inside_(group, 0) {
      const std::lock_guard lock(group_.turn_mutex_);
      uint64_t& next = group_.counter(numbers);
      if (call) {
        inside_.number = call->number = next++;
        its_turn_ = group_.running_ == call->number;
      }
      group_.callers_++;
    }
    ~Caller() { group_.leave_caller(ended_ ? inside_.number : 0); }
    // Returns whether all earlier calls had already completed when this Caller was created.
    bool its_turn() const { return its_turn_; }
    // Records that the call has completed without an error. When this Caller is destroyed, it is the next call's turn.
    void ended() { ended_ = true; }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

   private:
    Communicator& group_;
    Inside inside_;
    bool its_turn_ = false, ended_ = false;
  };
  class Delivery;
  class Patience;
  // Thrown by look() if the interrupt hook throws. cause: what the hook threw.
  struct Interrupted {
    std::exception_ptr cause;
  };
  struct Job {
    Call call;
    Deadline deadline;
    std::shared_ptr<Work> work;
  };

  // Implements VendorBackend::Observer:
  void ended(uint64_t number) override;
  void failed(const Signature& call, const Error& error) override;
  void waits(const Signature& call, double waited_s) override;

  void leave_caller(uint64_t ended = 0);  // ended: the number of the call if it has completed without an error, else 0
  // Throws if this is a forked child or the group is broken. Call this before taking any lock, because in a forked child a mutex
  // may be locked forever. Then call it again while holding the lock, because the group may have been broken in the meantime.
  void check_usable() const;
  void check_no_handler(uint64_t number = UINT64_MAX) const;
  uint64_t& counter(CallNumbers* numbers);
  static uint64_t before(const CallNumbers* numbers);
  std::shared_ptr<Work> start_on_device(Call call, double timeout_s, CallNumbers* numbers);
  Backend& backend_of(const Call& call) const { return call.stream ? static_cast<Backend&>(*device_) : *backend_; }
  void complete(Work& work, const Transfer* message, const std::function<void()>& part);
  void work();
  bool can_begin() const;
  void rest(std::unique_lock<std::mutex>& turn);
  void run_queued(std::unique_lock<std::mutex>& turn, const Work* last, Patience* patience);
  void run_queued(const Work& work);
  void stop_worker();
  void execute(const Call& call, const Deadline& deadline, bool its_turn, Watch& watch);
  void queue_for(const Signature& call, const Deadline& deadline, Watch& watch);
  void look_at_group(const Deadline& deadline, const Missing& missing);
  Failure describe(const Call* call, const std::string& message, std::exception_ptr& interrupted) const;
  [[noreturn]] void fail(const Call* call, const std::string& message);
  void break_off(const Call& call, Failure failure);
  [[noreturn]] void throw_failure() const;
  void interrupt() const;
  void say(const std::string& text) const;
  std::string in_group() const { return group_ == "world" ? "" : "group " + group_ + ": "; }
  // These four functions are in messages.cc:
  void share_memory(Stream& stream, bool sends, int peer);
  std::string in_messages() const;
  const char* gone(int peer) const;
  bool expects(int peer) const;
  Error differing(const Differs& differs) const;
  Error timed_out(const std::string& what, const Deadline& deadline, const std::string& state,
                  const std::vector<int>& ranks = {}) const;
  Error here(const Error& error, const std::string& what = "") const;
  std::string current() const;
  int in_job(int rank) const { return ranks_[rank]; }
  int host_of(int rank) const { return peers_->hosts[in_job(rank)]; }
  std::vector<int> in_job(const std::vector<int>& ranks) const { return renumbered(ranks, ranks_); }
  std::string named(const std::vector<int>& ranks) const;
  void look_for_the_dead(const std::vector<int>& ranks, const Missing& missing) const;
  void say_waiting(double waited_s, const std::vector<int>& ranks, const Missing& missing);

  static void in_child();

  const std::string group_;
  const std::vector<int> ranks_;
  const int rank_;
  const std::shared_ptr<Peers> peers_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<VendorBackend> device_;
  Recorder& recorder_;
  Hooks hooks_;

  // Protects next_, running_, callers_, the creation of worker_, and what belongs to the queue: jobs_ to last_start_.
  std::mutex turn_mutex_;
  // turn_ is notified when running_ or callers_ changes. job_ wakes the worker thread (see rest()).
  std::unique_ptr<std::condition_variable> turn_ = std::make_unique<std::condition_variable>();
  std::unique_ptr<std::condition_variable> job_ = std::make_unique<std::condition_variable>();
  uint64_t next_ = 1;
  // The number of the call whose turn it is. It is incremented when that call's thread leaves the call without an error.
  uint64_t running_ = 1;
  // The number of Callers, plus the number of calls and messages that the worker thread or the mailbox's thread still has to
  // complete.
  int callers_ = 0;
  // The calls that have been started and that no thread has begun, in the order of their numbers. Between two of them, a reserved
  // number may be missing, whose call has not been started yet.
  std::deque<Job> jobs_;
  bool serving_ = false;                 // whether a thread is running queued calls; only one thread does this at a time
  std::atomic<int> in_queue_{0};         // the number of threads that wait for the turn of a call
  bool hurry_ = false;                   // whether a thread that does not run queued calls itself waits for one of them
  bool asleep_ = false;                  // whether the worker thread sleeps until it is notified
  bool waited_ = false;                  // whether the last queued call ran in wait(), not on the worker thread
  bool stopping_ = false;                // whether the worker thread must end when no queued calls are left
  Clock::time_point last_start_;         // when the newest call was queued
  std::unique_ptr<std::thread> worker_;  // created by the first start()

  mutable std::mutex state_mutex_;  // protects failure_, left_, expected_, delivering_ and on_device_; never held while waiting
  std::optional<Failure> failure_;
  std::vector<bool> left_;
  std::vector<bool> expected_;                           // peers from which a link for messages exists or is being set up
  std::list<const Delivery*> delivering_;                // messages that callers are waiting for, oldest first
  std::map<uint64_t, std::shared_ptr<Work>> on_device_;  // call number -> a started call that is still on the device
  std::atomic<bool> broken_{false};
  bool closed_ = false;  // protected by state_mutex_

  std::atomic<uint64_t> stuck_{0};
  std::atomic<double> next_notice_s_{0};  // the running call prints its next notice when it has waited this many seconds
  std::atomic<bool> forked_{false};
  // This must be the last member. C++ destroys the last member first, and the mailbox's thread uses the other members.
  Mailbox mailbox_;
};

// Consecutive call numbers, reserved for an operation that consists of several calls. The first call that gets the CallNumbers
// takes the first number, and so on. No later call of the group can run before the calls with these numbers have run. So if a
// CallNumbers is given up or destroyed before all its numbers have been taken, it breaks the group.
class CallNumbers {
 public:
  // Throws Error if the group is broken.
  CallNumbers(Communicator& group, int count);
  ~CallNumbers() { give_up(); }
  CallNumbers(const CallNumbers&) = delete;
  CallNumbers& operator=(const CallNumbers&) = delete;
  // Returns the number that the next call takes.
  uint64_t next() const { return next_; }
  // Between enter() and leave(), this thread makes the calls. A signal handler that interrupts it there cannot call the group.
  void enter() {
    if (!inside_) inside_.emplace(group_, end_ - 1);
  }
  void leave() { inside_.reset(); }
  void give_up();

 private:
  friend class Communicator;
  Communicator& group_;
  uint64_t next_, end_;  // changed under the group's turn_mutex_, by the thread that makes the calls
  std::optional<Communicator::Inside> inside_;
};

}  // namespace mscomm
