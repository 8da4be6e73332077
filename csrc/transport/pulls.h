// In a pull, a rank reads another rank's array directly from that rank's process (process_vm_readv), if the kernel allows it.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/call.h"
#include "base/process_memory.h"
#include "net/wait.h"
#include "transport/control.h"
#include "transport/gate.h"

namespace mscomm {

// Which arrays of a call the peers may read directly from this rank's process.
enum class Pulled { nothing, x, x_and_out };

class Pulls {
 public:
  // ranks: the job rank of each rank of the arena.
  Pulls(const Control& control, int rank, const std::vector<int>& ranks) : control_(control), rank_(rank), ranks_(ranks) {}
  // Tells the peers what they need to read the memory of this process.
  void introduce() { control_.slot(rank_).introduction = introduction(); }

  // Returns whether each rank can read the memory of every other rank. See Arena::can_pull.
  bool possible(Gate& gate, const Wait& wait);
  bool known_possible() const { return possible_ == Tried::yes; }
  // Writes the address of each array named by `pulled` into the post. `pulled` must not be `nothing`.
  void offer(const Call& call, Pulled pulled, Post& post);
  // Copies `bytes` bytes from `address` in the given rank's process to `to`.
  void pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const;

 private:
  // The array that readable() last found to be readable. Most programs reuse the same arrays, which need not be tested again.
  using Tested = std::pair<const void*, size_t>;  // the array's address and its length in bytes
  enum class Tried { not_yet, no, yes };

  uint64_t readable(const void* memory, size_t bytes, Tested& last) const;

  const Control control_;
  const int rank_;
  const std::vector<int>& ranks_;
  std::atomic<Tried> possible_ = Tried::not_yet;
  Tested x_, out_;
};

}  // namespace mscomm
