#include "transport/pulls.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <string>

#include "base/error.h"

namespace mscomm {

namespace {

// Reads another process's memory. Like read(), returns the number of bytes read, which may be less than `bytes`, or returns -1
// and sets errno.
ssize_t read_process(pid_t process, uint64_t address, void* to, size_t bytes) {
  const iovec here{to, bytes}, there{reinterpret_cast<void*>(address), bytes};
  return process_vm_readv(process, &here, 1, &there, 1, 0);
}

}  // namespace

void Pulls::introduce() {
  std::random_device random;
  token_ = uint64_t{random()} << 32 | random();
  Control::Slot& mine = control_.slot(rank_);
  mine.process = getpid();
  mine.token_address = reinterpret_cast<uint64_t>(&token_);
  mine.token = token_;
}

bool Pulls::possible(Gate& gate, const Wait& wait) {
  if (possible_ != Tried::not_yet) return known_possible();
  bool all = true;
  for (int rank = 0; rank < control_.size(); rank++) all = all && reads_token_of(rank);
  control_.slot(rank_).reads_all.store(all, std::memory_order_relaxed);
  gate.round(wait);
  for (int rank = 0; rank < control_.size(); rank++) all = all && control_.slot(rank).reads_all.load(std::memory_order_relaxed);
  possible_ = all ? Tried::yes : Tried::no;
  return all;
}

// Returns whether this rank can read the token in the memory of the given rank's process. If that rank is in another pid
// namespace, its process id may refer to a different process in our namespace. In that case, the token does not match.
bool Pulls::reads_token_of(int rank) const {
  const Control::Slot& other = control_.slot(rank);
  uint64_t token = 0;
  return read_process(other.process, other.token_address, &token, sizeof token) == sizeof token && token == other.token;
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

void Pulls::pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) {
  if (!copies_slowly(reinterpret_cast<uintptr_t>(to), address)) return read(rank, address, to, bytes, wait);
  // The kernel's copy is slow for these addresses. Reading into a buffer at a better address, and copying from the buffer to
  // `to`, takes a third of the time.
  constexpr size_t piece = 64 << 10, page = 4096, distance = 64;
  between_.resize(piece + page);
  char* const between = between_.data() + (address + distance - reinterpret_cast<uintptr_t>(between_.data())) % page;
  for (size_t done = 0; done < bytes; done += piece) {
    const size_t now = std::min(piece, bytes - done);
    read(rank, address + done, between, now, wait);
    copy(static_cast<char*>(to) + done, between, now);
  }
}

void Pulls::read(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const {
  const pid_t process = control_.slot(rank).process;
  for (size_t done = 0; done < bytes;) {
    const ssize_t now = read_process(process, address + done, static_cast<char*>(to) + done, bytes - done);
    if (now > 0) {
      done += now;
      continue;
    }
    const int error = now < 0 ? errno : EFAULT;
    const std::string what = "reading the array of rank " + std::to_string(ranks_[rank]);
    wait.look({[rank] { return std::vector<int>{rank}; }, true});  // if the rank was lost, throws an error that says how
    if (error == ESRCH) throw peer_lost(ranks_[rank], what + ": its process is gone");
    throw system_error(what, error);
  }
}

}  // namespace mscomm
