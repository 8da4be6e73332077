// The gate of an arena, where its ranks wait for each other in rounds.
#pragma once

#include <cstdint>
#include <vector>

#include "net/wait.h"
#include "transport/control.h"
#include "transport/parting.h"

namespace mscomm {

class Gate {
 public:
  // spin: whether the host has a CPU for each rank; the same on all ranks.
  Gate(const Control& control, int rank, bool spin) : control_(control), rank_(rank), spin_(spin), parting_(control, rank) {}

  // Arrives at the next round, and returns when all ranks have arrived.
  void round(const Wait& wait);
  // The round that this rank arrived at last.
  uint64_t last_round() const { return round_; }
  // Ranks that have not arrived in that round.
  std::vector<int> missing() const;
  // Wakes every rank that sleeps at the gate, so that it looks around.
  void ring() const;
  uint64_t partings() const { return parting_.number(); }

 private:
  // Whether all have arrived in the current round.
  bool open();
  void sleep(const Wait& wait);

  const Control control_;
  const int rank_;
  const bool spin_;
  uint64_t round_ = 0;
  int here_ = 0;  // all ranks below this number are known to have arrived in the current round
  Parting parting_;
};

}  // namespace mscomm
