#include "transport/pulls.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/error.h"

namespace mscomm {

bool Pulls::possible(Gate& gate, const Wait& wait) {
  if (possible_ != Tried::not_yet) return known_possible();
  bool all = true;
  for (int rank = 0; rank < control_.size(); rank++) all = all && can_read(control_.slot(rank).introduction);
  control_.slot(rank_).reads_all.store(all, std::memory_order_relaxed);
  gate.round(wait);
  for (int rank = 0; rank < control_.size(); rank++) all = all && control_.slot(rank).reads_all.load(std::memory_order_relaxed);
  possible_ = all ? Tried::yes : Tried::no;
  return all;
}

void Pulls::offer(const Call& call, Pulled pulled, Post& post) {
  post.x_address = readable(call.x, call.x_bytes, x_);
  if (pulled == Pulled::x_and_out) post.out_address = readable(call.out, call.out_bytes, out_);
}

// Returns the address of `memory`, or 0 if other processes cannot read this memory. They cannot read memory that a driver has
// mapped, for example. Tests only the first and the last byte.
uint64_t Pulls::readable(const void* memory, size_t bytes, Tested& last) const {
  if (bytes == 0 || possible_ == Tried::no) return 0;
  if (const Tested now{memory, bytes}; now != last) {
    const auto* first = static_cast<const char*>(memory);
    char ends[2];
    const iovec here{ends, 2};
    const iovec there[2] = {{const_cast<char*>(first), 1}, {const_cast<char*>(first + bytes - 1), 1}};
    if (process_vm_readv(getpid(), &here, 1, there, 2, 0) != 2) return 0;
    last = now;
  }
  return reinterpret_cast<uint64_t>(memory);
}

void Pulls::pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const {
  if (read_process(control_.slot(rank).introduction, address, to, bytes) == bytes) return;
  const int error = errno;
  const std::string what = "reading the array of rank " + std::to_string(ranks_[rank]);
  wait.look({[rank] { return std::vector<int>{rank}; }, true});  // if the rank was lost, throws an error that says how
  if (error == ESRCH) throw peer_lost(ranks_[rank], what + ": its process is gone");
  throw system_error(what, error);
}

}  // namespace mscomm
