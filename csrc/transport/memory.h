// Memory that processes of one host share: sealed memfds, mapped whole, without a name in any file system.
#pragma once

#include <cstddef>
#include <utility>

namespace mscomm {

// A memfd of that size, sparse: pages come with their first touch. Sealed against shrinking and growing. Close-on-exec.
int make_memory(const char* label, size_t bytes);

// The size of a memfd that a peer sent, after checking that it is a regular memory file and sealed against changing its size,
// so that reading it cannot raise SIGBUS.
size_t check_memory(int fd);

// Makes sure that the pages of [begin, begin + bytes) exist; throws MemoryError's cause (Error) instead of a later SIGBUS.
void populate(void* begin, size_t bytes);

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
  // The same memory at the same address, still owned by this one: for tests in which the ranks are threads.
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
