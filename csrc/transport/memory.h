// Memory that processes of one host share: files in memory, mapped whole, without a name in any file system.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace mscomm {

// Makes memory of that size and returns its descriptor, which is close-on-exec. The memory is sparse: a page is allocated when it
// is first touched. It is a memfd, sealed against shrinking and growing. If own_tmpfs, and the kernel denies memfds huge pages
// but allows a tmpfs of our own, it is a file there instead.
int make_memory(const char* label, size_t bytes, bool own_tmpfs = true);

// Tells which of the two it would be, and whether it has huge pages: "memfd, huge pages (shmem_enabled: advise)".
std::string describe_memory(bool own_tmpfs);

// The size of memory that a peer sent, after checking what it is: a memfd that is sealed against shrinking, so that reading it
// cannot raise SIGBUS; or a nameless file of this user in a tmpfs, which cannot be sealed.
size_t check_memory(int fd);

// Makes sure that the pages of [begin, begin + bytes) exist. If memory is short this throws MemoryError, instead of a later
// SIGBUS.
void populate(void* begin, size_t bytes);

// Sets whether pages of [begin, begin + bytes) that do not exist yet become huge, if the kernel can do that. Without this they do
// not: a huge page for every few bytes would cost more memory than it is worth.
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
  // A mapping of the same memory at the same address, which this object still owns: for tests in which the ranks are threads.
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
