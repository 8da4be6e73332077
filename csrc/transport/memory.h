// Memory shared by the processes on one host. It is an in-memory file that has no name in any file system. Each process maps the
// whole file.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace mscomm {

// Creates shared memory of `bytes` bytes and returns its descriptor, which is close-on-exec. The memory is sparse: a page is
// allocated when it is first touched. Normally the memory is a memfd that is sealed against shrinking and growing. If
// shmem_enabled is "never" (the kernel's default), memfds cannot have huge pages. In that case, if own_tmpfs is true,
// make_memory() first tries to create a file that can have huge pages, in a tmpfs of our own.
int make_memory(const char* label, size_t bytes, bool own_tmpfs = true);

// Describes whether make_memory() would create a memfd or a file in a tmpfs of our own, and whether the memory would have huge
// pages. Example: "memfd, huge pages (shmem_enabled: advise)".
std::string describe_memory(bool own_tmpfs);

// Checks a shared-memory descriptor that a peer sent, and returns the size of the memory. The descriptor must refer to a memfd
// that is sealed against shrinking, so that reading the memory cannot raise SIGBUS. A nameless file of the current user in a
// tmpfs is also accepted, although such a file cannot be sealed. Throws for everything else.
size_t check_memory(int fd);

// Makes sure that the pages of [begin, begin + bytes) exist. Throws MemoryError if there is not enough memory. Without
// populate(), a lack of memory would cause SIGBUS at a later access.
void populate(void* begin, size_t bytes);

// Sets whether those pages of [begin, begin + bytes) that do not exist yet will be huge pages, if the kernel supports this. Only
// large arrays ask for huge pages, because a huge page for a few bytes would waste memory.
void want_huge_pages(void* begin, size_t bytes, bool wanted);

class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept : begin_(std::exchange(other.begin_, nullptr)), bytes_(other.bytes_), owned_(other.owned_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(begin_, other.begin_), std::swap(bytes_, other.bytes_), std::swap(owned_, other.owned_);
    return *this;
  }
  // Returns a second Mapping of the same memory at the same address; this object still owns the memory. For tests in which the
  // ranks are threads.
  Mapping borrow() const { return Mapping(begin_, bytes_); }

  char* begin() const { return begin_; }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(char* begin, size_t bytes) : begin_(begin), bytes_(bytes), owned_(false) {}

  char* begin_ = nullptr;
  size_t bytes_ = 0;
  bool owned_ = true;
};

}  // namespace mscomm
