// Reads the memory of another process on this host (process_vm_readv), if the kernel allows it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace mscomm {

// What a process tells another one that may read its memory: its id, and where a random number is in its memory.
struct Introduction {
  pid_t process = 0;
  uint64_t token_address = 0, token = 0;
};

// Returns the Introduction of this process.
Introduction introduction();
// Returns whether this process can read the memory of the process that has introduced itself. If that process is in another pid
// namespace, its id may refer to a different process in ours. Then the random number does not match.
bool can_read(const Introduction& other);
// Copies `bytes` bytes from `address` in the process that has introduced itself to `to`. Returns the number of bytes copied. If
// this is less than `bytes`, sets errno: EFAULT if the rest cannot be read, for example because a driver has mapped it, or ESRCH
// if the process has ended. Its id may belong to another process meanwhile, which does not have the random number.
size_t read_process(const Introduction& owner, uint64_t address, void* to, size_t bytes);

}  // namespace mscomm
