#include "transport/memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <fstream>

#include "base/descriptor.h"
#include "base/error.h"
#include "transport/own_tmpfs.h"

namespace mscomm {

namespace {
constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// MADV_POPULATE_WRITE from linux/mman.h of kernel 5.14. It is repeated here because the build machine's headers may be older.
constexpr int advise_populate_write = 23;

// Returns the kernel's setting for huge pages in memfds, such as "advise", or an empty string if it cannot be read.
std::string shmem_enabled() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string word;
  while (file >> word)
    if (word.front() == '[' && word.back() == ']') return word.substr(1, word.size() - 2);
  return "";
}

struct Opened {
  Descriptor fd;
  bool sealable;
  std::string about;
};

// Opens an in-memory file. If shmem_enabled is "never", which is the kernel's default, a memfd would have only small pages. So if
// own_tmpfs is true, this function first tries a tmpfs of our own. If shmem_enabled is "deny", the administrator has forbidden
// huge pages in all in-memory files, so this function opens a memfd with small pages.
Opened open_memory(const char* label, bool own_tmpfs) {
  const std::string enabled = shmem_enabled();
  const std::string setting = "shmem_enabled: " + (enabled.empty() ? "not known" : enabled);
  std::string why = own_tmpfs ? "" : "; a tmpfs of its own is not allowed by MSCOMM_HUGE_PAGES";
  if (enabled == "never" && own_tmpfs) {
    const int fd = open_in_own_tmpfs(label, why);
    if (fd >= 0) return {Descriptor(fd), false, "a tmpfs of its own, huge pages (" + setting + ")"};
    why = "; " + why;
  }
  const int fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw system_error("memfd_create", errno);
  const bool huge = enabled != "never" && enabled != "deny" && !enabled.empty();
  return {Descriptor(fd), true, std::string("memfd, ") + (huge ? "huge" : "small") + " pages (" + setting + why + ")"};
}

// Returns whether fd could be a file from open_in_own_tmpfs(). The size of such a file cannot be sealed. We accept that, because
// only the current user's ranks have the descriptor, and these ranks could kill each other anyway.
bool own_file_in_tmpfs(int fd, const struct stat& status) {
  struct statfs system{};
  return fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC && status.st_nlink == 0 && status.st_uid == geteuid();
}

}  // namespace

int make_memory(const char* label, size_t bytes, bool own_tmpfs) {
  Opened memory = open_memory(label, own_tmpfs);
  const int fd = memory.fd.get();
  if (ftruncate(fd, static_cast<off_t>(bytes)) < 0 || (memory.sealable && fcntl(fd, F_ADD_SEALS, size_seals) < 0))
    throw system_error("making shared memory of " + std::to_string(bytes) + " bytes", errno);
  return memory.fd.release();
}

std::string describe_memory(bool own_tmpfs) { return open_memory("mscomm-probe", own_tmpfs).about; }

size_t check_memory(int fd) {
  struct stat status{};
  if (fstat(fd, &status) < 0) throw system_error("fstat of a peer's shared memory", errno);
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  if (!S_ISREG(status.st_mode) || !(sealed || (seals == F_SEAL_SEAL && own_file_in_tmpfs(fd, status))))
    throw Error("Error", "a peer sent a descriptor that is neither sealed shared memory nor a file in a tmpfs of its own");
  return static_cast<size_t>(status.st_size);
}

void populate(void* begin, size_t bytes) {
  if (bytes == 0) return;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + bytes + page - 1) / page * page;
  if (madvise(reinterpret_cast<void*>(first), last - first, advise_populate_write) == 0) return;
  if (errno == EINVAL) return;  // Linux before 5.14 does not support this advice; it allocates pages when they are first touched
  throw Error("MemoryError", "shared memory: cannot allocate " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
}

void want_huge_pages(void* begin, size_t bytes, bool wanted) {
  madvise(begin, bytes, wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // fails on a kernel without huge pages, which is fine
}

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) throw system_error("mmap of " + std::to_string(bytes) + " bytes of shared memory", errno);
  begin_ = static_cast<char*>(address);
  // To dump a sparse file, the kernel would allocate all of its pages. So a crash of one rank would fill the memory of the host.
  madvise(begin_, bytes, MADV_DONTDUMP);  // fails if the kernel has no core dumps, which is fine
}

Mapping::~Mapping() {
  if (begin_ && owned_) munmap(begin_, bytes_);
}

}  // namespace mscomm
