// A list of the asynchronous calls that have completed, for a Python thread that waits for any of several calls.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"

namespace mscomm {

class Completions {
 public:
  Completions() : fd_(eventfd(0, EFD_CLOEXEC)) {
    if (fd_.get() < 0) throw system_error("eventfd", errno);
  }

  // Returns an eventfd that is readable if the list is not empty. A Python thread reads it, and not a function of the core,
  // because such a function could not return while the process is exiting.
  int fd() const { return fd_.get(); }
  // Reserves memory for one more token, so that add() need not allocate. Call this once for each add().
  void expect() {
    const std::lock_guard lock(mutex_);
    tokens_.reserve(++expected_);
  }
  // Adds a token. Any thread may call this. Does not wait and does not throw.
  void add(uint64_t token) {
    {
      const std::lock_guard lock(mutex_);
      tokens_.push_back(token);
    }
    // The write can neither fail nor block, because the counter is far from its limit of 2^64.
    (void)!eventfd_write(fd_.get(), 1);
  }
  // Returns all tokens, and empties the list.
  std::vector<uint64_t> take() {
    std::vector<uint64_t> taken;
    const std::lock_guard lock(mutex_);
    taken.reserve(tokens_.size());
    taken.assign(tokens_.begin(), tokens_.end());
    expected_ -= tokens_.size();
    tokens_.clear();
    return taken;
  }

 private:
  const Descriptor fd_;
  std::mutex mutex_;  // protects the fields below
  std::vector<uint64_t> tokens_;
  size_t expected_ = 0;  // how many tokens are in the list or will still be added
};

}  // namespace mscomm
