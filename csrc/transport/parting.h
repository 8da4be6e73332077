// If two ranks are waiting on the same CPU, the rank with the higher number moves to another CPU.
#pragma once

#include <cstdint>

#include "base/deadline.h"
#include "transport/control.h"

namespace mscomm {

class Parting {
 public:
  Parting(const Control& control, int rank) : control_(control), rank_(rank) {}

  // Moves this rank to another CPU if a lower rank is waiting on the same CPU. Call this when this rank has polled in vain in the
  // given round.
  void waits_awake(uint64_t round);
  void sleeps() const { control_.slot(rank_).place.store(0, std::memory_order_relaxed); }
  // Returns how often this rank has left a CPU.
  uint64_t number() const { return number_; }

 private:
  const Control control_;
  const int rank_;
  uint64_t number_ = 0;
  Clock::time_point looked_, parted_;  // when this rank last looked for ranks on its CPU, and when it last left a CPU
};

}  // namespace mscomm
