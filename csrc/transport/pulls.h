// Pulls: a rank reads private memory of another rank in that rank's process, if the kernel lets it (process_vm_readv).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/call.h"
#include "net/wait.h"
#include "transport/control.h"
#include "transport/gate.h"

namespace mscomm {

// Which arrays of a call peers may read in this rank's process, if they are in private memory.
enum class Pulled { nothing, x, x_and_out };

class Pulls {
 public:
  // ranks: those of the arena, as ranks of the job.
  Pulls(const Control& control, int rank, const std::vector<int>& ranks) : control_(control), rank_(rank), ranks_(ranks) {}
  // Tells the peers how to find this process.
  void introduce();

  // Whether each rank can read the memory of every other one. See Arena::can_pull.
  bool possible(Gate& gate, const Wait& wait);
  bool known_possible() const { return possible_ == Tried::yes; }
  // Posts the addresses of those arrays of the call.
  void offer(const Call& call, Pulled pulled, Post& post);
  // Copies so many bytes from that address in that rank's process.
  void pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const;

 private:
  // The array that readable() tested last: most programs use the same arrays again.
  struct Tested {
    const void* memory = nullptr;
    size_t bytes = 0;
    bool operator==(const Tested&) const = default;
  };
  enum class Tried { not_yet, no, yes };

  bool reads_token_of(int rank) const;
  uint64_t readable(const void* memory, size_t bytes, Tested& last) const;

  const Control control_;
  const int rank_;
  const std::vector<int>& ranks_;
  uint64_t token_ = 0;
  std::atomic<Tried> possible_ = Tried::not_yet;
  Tested x_, out_;
};

}  // namespace mscomm
