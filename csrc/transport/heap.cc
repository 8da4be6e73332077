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
const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
constexpr uint64_t give_back_from = 1u << 20;  // smaller pieces keep their pages for the next array

constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

Heap::Heap(Mapping mapping) : owner_(getpid()), mapping_(std::move(mapping)) { free_[0] = mapping_.bytes(); }

void* Heap::allocate(size_t bytes) {
  // Who is as large as a page shares none: withdraw() may then exchange its pages while other threads write beside it.
  const uint64_t unit = bytes >= page ? page : line;
  const uint64_t need = round_up(bytes ? bytes : 1, unit);
  const uint64_t alignment = need >= huge_page ? huge_page : unit;
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
  if (getpid() != owner_) return;
  const std::lock_guard lock(mutex_);
  auto offset = static_cast<uint64_t>(static_cast<char*>(memory) - mapping_.begin());
  const auto found = used_.find(offset);
  if (found == used_.end()) return;
  uint64_t bytes = found->second;
  used_.erase(found);
  if (bytes >= give_back_from) {
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

void Heap::withdraw(const void* memory, size_t bytes, bool keep) {
  const std::lock_guard lock(mutex_);
  const auto* const at = static_cast<const char*>(memory);
  const bool given = bytes > 0 && at >= mapping_.begin() && at + bytes <= mapping_.begin() + mapping_.bytes();
  shared_ = false;
  if (!given) return;
  const auto begin = static_cast<uint64_t>(at - mapping_.begin()), end = begin + bytes;
  const uint64_t first = begin / page * page, last = round_up(end, page);
  void* fresh = mmap(nullptr, last - first, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) throw system_error("mmap of private memory for the heap", errno);
  char* const to = static_cast<char*>(fresh);
  if (keep) {
    std::memcpy(to, mapping_.begin() + first, last - first);
  } else {  // only what the same array has beside it
    std::memcpy(to, mapping_.begin() + first, begin - first);
    std::memcpy(to + (end - first), mapping_.begin() + end, last - end);
  }
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
