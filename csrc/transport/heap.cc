#include "transport/heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace mscomm {

namespace {
constexpr uint64_t line = 64;
constexpr uint64_t huge_page = 2u << 20;
constexpr uint64_t give_back_from = 1u << 20;  // smaller pieces keep their pages for the next array

constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

void* Heap::allocate(size_t bytes) {
  const uint64_t need = round_up(bytes ? bytes : 1, line);
  const uint64_t alignment = need >= huge_page ? huge_page : line;
  const std::lock_guard lock(mutex_);
  if (!shared_ || bytes > mapping_.bytes()) return nullptr;
  for (auto [offset, room] : free_) {
    const uint64_t start = round_up(offset, alignment);
    if (start + need > offset + room) continue;
    populate(mapping_.begin() + start, need);
    free_.erase(offset);
    if (start > offset) free_[offset] = start - offset;
    if (offset + room > start + need) free_[start + need] = offset + room - (start + need);
    used_[start] = need;
    return mapping_.begin() + start;
  }
  return nullptr;
}

void Heap::release(void* memory) {
  const std::lock_guard lock(mutex_);
  auto offset = static_cast<uint64_t>(static_cast<char*>(memory) - mapping_.begin());
  const auto found = used_.find(offset);
  if (found == used_.end()) return;
  uint64_t bytes = found->second;
  used_.erase(found);
  if (bytes >= give_back_from) {
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t first = round_up(offset, page), last = (offset + bytes) / page * page;
    if (madvise(mapping_.begin() + first, last - first, MADV_REMOVE) < 0)  // a range that was withdrawn is private
      madvise(mapping_.begin() + first, last - first, MADV_DONTNEED);
  }
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) bytes += next->second, next = free_.erase(next);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) offset = before->first, bytes += before->second;
  }
  free_[offset] = bytes;
}

std::optional<uint64_t> Heap::find(const void* memory, size_t bytes) const {
  const auto* at = static_cast<const char*>(memory);
  if (at < mapping_.begin() || at >= mapping_.begin() + mapping_.bytes()) return std::nullopt;
  const auto offset = static_cast<uint64_t>(at - mapping_.begin());
  const std::lock_guard lock(mutex_);
  if (!shared_) return std::nullopt;
  auto after = used_.upper_bound(offset);
  if (after == used_.begin()) return std::nullopt;
  const auto [start, room] = *std::prev(after);
  if (offset + bytes > start + room) return std::nullopt;
  return offset;
}

void Heap::withdraw(void* memory, size_t bytes) {
  const bool given = find(memory, bytes).has_value() && bytes > 0;
  const std::lock_guard lock(mutex_);
  shared_ = false;
  if (!given) return;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto begin = static_cast<uint64_t>(static_cast<char*>(memory) - mapping_.begin()), end = begin + bytes;
  const uint64_t first = begin / page * page, last = round_up(end, page);
  void* fresh = mmap(nullptr, last - first, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) throw system_error("mmap of private memory for the heap", errno);
  // Other arrays may share the first and the last page.
  char* const to = static_cast<char*>(fresh);
  std::memcpy(to, mapping_.begin() + first, begin - first);
  std::memcpy(to + (end - first), mapping_.begin() + end, last - end);
  if (mremap(fresh, last - first, last - first, MREMAP_MAYMOVE | MREMAP_FIXED, mapping_.begin() + first) == MAP_FAILED)
    throw system_error("mremap of the heap", errno);
}

size_t Heap::in_use() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (auto [offset, bytes] : used_) total += bytes;
  return total;
}

}  // namespace mscomm
