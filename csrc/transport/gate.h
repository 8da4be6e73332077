// The ranks of an arena wait for each other at its gate, in rounds.
#pragma once

#include <cstdint>
#include <vector>

#include "net/wait.h"
#include "transport/control.h"
#include "transport/parting.h"

namespace mscomm {

class Gate {
 public:
  // spin: whether the host has a CPU for each rank; all ranks must pass the same value.
  Gate(const Control& control, int rank, bool spin) : control_(control), rank_(rank), spin_(spin), parting_(control, rank) {}

  // Arrives at the next round, and returns when all ranks have arrived.
  void round(const Wait& wait);
  // Returns the most recent round at which this rank has arrived.
  uint64_t last_round() const { return round_; }
  // Returns the ranks that have not yet arrived at this rank's current round.
  std::vector<int> missing() const;
  // Wakes all ranks that are sleeping at the gate, so that they call Wait::look().
  void ring() const;
  uint64_t partings() const { return parting_.number(); }

 private:
  // Returns whether all ranks have arrived at this rank's current round.
  bool open();
  void sleep(const Wait& wait);

  const Control control_;
  const int rank_;
  const bool spin_;
  uint64_t round_ = 0;
  int here_ = 0;  // all ranks below this number are known to have arrived at the current round
  Parting parting_;
};

}  // namespace mscomm
