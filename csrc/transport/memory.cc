#include "transport/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/error.h"

namespace mscomm {

namespace {
constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// From linux/mman.h of kernel 5.14; the build machine's headers may be older.
constexpr int advise_populate_write = 23;
}  // namespace

int make_memory(const char* label, size_t bytes) {
  const int fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw system_error("memfd_create", errno);
  if (ftruncate(fd, static_cast<off_t>(bytes)) < 0 || fcntl(fd, F_ADD_SEALS, size_seals) < 0) {
    const int cause = errno;
    close(fd);
    throw system_error("making shared memory of " + std::to_string(bytes) + " bytes", cause);
  }
  return fd;
}

size_t check_memory(int fd) {
  struct stat status{};
  if (fstat(fd, &status) < 0) throw system_error("fstat of a peer's shared memory", errno);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (!S_ISREG(status.st_mode) || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw Error("Error", "a peer sent a descriptor that is not sealed shared memory");
  return static_cast<size_t>(status.st_size);
}

void populate(void* begin, size_t bytes) {
  if (bytes == 0) return;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + bytes + page - 1) / page * page;
  if (madvise(reinterpret_cast<void*>(first), last - first, advise_populate_write) == 0) return;
  if (errno == EINVAL) return;  // before Linux 5.14: pages come with their first touch
  throw Error("MemoryError", "shared memory: cannot have " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
}

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) throw system_error("mmap of " + std::to_string(bytes) + " bytes of shared memory", errno);
  begin_ = static_cast<char*>(address);
  madvise(begin_, bytes, MADV_HUGEPAGE);  // where the kernel's shmem_enabled says advise; else without effect
}

Mapping::~Mapping() {
  if (begin_ && owned_) munmap(begin_, bytes_);
}

}  // namespace mscomm
