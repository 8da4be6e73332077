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

  // Call this before this rank writes what the peers may read from the next round on. Returns when this rank is not too far ahead
  // of the slowest rank: fewer than `window_rounds` rounds.
  void make_room(const Wait& wait);
  // Arrives at the next round, and returns when all ranks have arrived.
  void round(const Wait& wait);
  // In a one-way round, a rank calls arrive(), and then one of the other functions if it needs data. awaited_alone: whether the
  // ranks that need data wait for this rank alone, not for all ranks.
  void arrive(bool awaited_alone);
  void wait_for_all_alone(const Wait& wait);
  void wait_for(int rank, const Wait& wait);
  // Returns the most recent round at which this rank has arrived.
  uint64_t last_round() const { return round_; }
  // Wakes all ranks that are sleeping at the gate, so that they call Wait::look().
  void ring() const;
  uint64_t partings() const { return parting_.number(); }

 private:
  using Bell = Control::Common::Bell;
  // Which ranks wait for the same ranks as this one. The lowest of them prints notices. arrived: those that have arrived at this
  // rank's round.
  enum class Beside { nobody, arrived, room };
  // The ranks from `begin` to `end` are awaited at a round.
  struct Awaited {
    uint64_t round;
    int begin, end;
    Beside beside;
  };

  bool has_arrived(int rank, uint64_t round) const { return control_.slot(rank).line(round).arrived.load() >= round; }
  // Returns whether all awaited ranks have arrived. Removes the first ones of them that have.
  bool open(Awaited& awaited) const;
  std::vector<int> missing(const Awaited& awaited) const;
  bool speaks(Beside beside) const;
  void wait_for(Awaited awaited, Bell& bell, const Wait& wait);
  void sleep(Awaited& awaited, Bell& bell, const Wait& wait) const;

  const Control control_;
  const int rank_;
  const bool spin_;
  uint64_t round_ = 0;
  uint64_t all_arrived_ = 0;  // a round at which all ranks are known to have arrived
  Parting parting_;
};

}  // namespace mscomm
