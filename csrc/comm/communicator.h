// A group's communicator: numbers calls, runs them in order, and is the one place where a failure is caught.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/error.h"
#include "comm/recorder.h"
#include "net/wait.h"

namespace mscomm {

// Why a group is broken. verdict: the hub has said so, so that it is the first cause of the whole job; else this rank's own
// symptom.
struct Failure {
  Error error;
  bool verdict;
};

struct Where {
  uint64_t number;  // the last call
  bool inside;
  std::string text;
};

class Communicator final : public Watch {
 public:
  struct Peers {
    std::vector<std::string> names;  // by rank: "rank 3 (pid 4711 on host b)"
    std::vector<int> pidfds;         // by rank; -1: of another host, or this rank. Taken over.
  };
  // interrupt: called at each bounded wake of the caller's thread, may throw; notice: one line for the user.
  struct Hooks {
    std::function<void()> interrupt;
    std::function<void(const std::string&)> notice;
  };

  Communicator(std::string group, int rank, Peers peers, std::unique_ptr<Backend> backend, Recorder& recorder, Hooks hooks);
  ~Communicator() override;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.names.size()); }

  // One collective call, start to end. shape: of x. Throws Error, and what the interrupt hook throws; after that the group is
  // broken.
  void run(Signature signature, std::span<const uint64_t> shape, const void* x, void* out, double timeout_s);

  // From any thread, at any time, without waiting. The first failure stays, but a verdict replaces a symptom.
  void abort(Failure failure);
  // rank ended well: no failure until somebody waits for it.
  void left(int rank);
  Where where() const;
  std::optional<Failure> failure() const;
  // Compares what the peers said last with this rank's own calls; throws as run() does when they differ.
  void last_look();
  // Ends this rank's part. A call that another thread is in fails first.
  void close();

  // Watch
  void look(const Deadline& deadline, const Missing& missing) override;
  bool broken() const override { return broken_.load(std::memory_order_relaxed); }

 private:
  class Caller;

  void execute(const Call& call, const Deadline& deadline);
  void queue_for(uint64_t number, const Deadline& deadline);
  [[noreturn]] void fail(const Call& call, const Error& error);
  [[noreturn]] void throw_failure() const;
  Error differing(const Differs& differs) const;
  std::string current() const;
  std::string named(const std::vector<int>& ranks) const;
  void look_for_the_dead(const std::vector<int>& ranks, const Missing& missing) const;
  void say_waiting(double waited_s, const std::vector<int>& missing);

  static void before_fork();
  static void after_fork();
  static void in_child();

  const std::string group_;
  const int rank_;
  Peers peers_;
  std::unique_ptr<Backend> backend_;
  Recorder& recorder_;
  Hooks hooks_;

  std::mutex turn_mutex_;  // protects the order of calls: next_, running_, callers_
  std::condition_variable turn_;
  uint64_t next_ = 1;
  uint64_t running_ = 1;  // the number whose turn it is
  int callers_ = 0;       // threads inside run()

  mutable std::mutex state_mutex_;  // protects failure_ and left_; never held while waiting
  std::optional<Failure> failure_;
  std::vector<bool> left_;
  std::atomic<bool> broken_{false};
  bool closed_ = false;  // with state_mutex_

  std::atomic<double> next_notice_s_{0};  // of the running call
  std::atomic<bool> forked_{false};
};

}  // namespace mscomm
