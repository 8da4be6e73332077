#include "transport/heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace mscomm {

namespace {
constexpr uint64_t line = 64;
constexpr uint64_t huge_page = 2u << 20;
const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));

constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

Heap::Heap(Mapping mapping) : owner_(getpid()), mapping_(std::move(mapping)) { free_[0] = mapping_.bytes(); }

void* Heap::allocate(size_t bytes) {
  const uint64_t unit = bytes > unshared_bytes ? page : line;
  const uint64_t need = round_up(bytes ? bytes : 1, unit);
  std::optional<uint64_t> start;
  {
    const std::lock_guard lock(mutex_);
    if (!shared_ || bytes > mapping_.bytes()) return nullptr;
    start = take(need, need >= huge_page ? huge_page : unit);
    if (!start) return nullptr;
    used_[*start] = {need, bytes};
  }
  void* const memory = mapping_.begin() + *start;
  if (need >= huge_page) want_huge_pages(memory, need, true);
  try {
    // populate() takes a long time, and calls need the mutex to look up their arrays. So the mutex is not held here.
    populate(memory, need);
  } catch (...) {
    release(memory);
    throw;
  }
  return memory;
}

void Heap::release(void* memory) {
  if (getpid() != owner_) return;
  const auto offset = static_cast<uint64_t>(static_cast<char*>(memory) - mapping_.begin());
  std::vector<Range> shared, withdrawn;
  {
    const std::lock_guard lock(mutex_);
    const auto found = used_.find(offset);
    if (found == used_.end()) return;
    const uint64_t bytes = found->second.bytes;
    split(offset, offset + bytes, shared, withdrawn);
    used_.erase(found);
    // Small arrays or control memory may use these pages next, and should not get huge pages.
    if (bytes >= huge_page) want_huge_pages(memory, bytes, false);
  }
  // The mutex is not held during the next two loops, because madvise() takes a long time. The range is now in neither used_ nor
  // free_, so no other thread touches it.
  for (const auto& [begin, end] : withdrawn) madvise(mapping_.begin() + begin, end - begin, MADV_DONTNEED);
  for (const auto& [begin, end] : shared) give_pages_back(begin, end);
  const std::lock_guard lock(mutex_);
  for (const auto& [begin, end] : shared) give(begin, end);
}

uint64_t Heap::reserve(size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::erase_if(reserved_, [this](const auto& one) {
    const auto& [begin, memory] = one;
    if (!memory.unused || !memory.unused()) return false;
    give_pages_back(begin, begin + memory.bytes);  // fast, because only the part that was used has pages
    give(begin, begin + memory.bytes);
    return true;
  });
  // Reserve at least give_back_from bytes, so that the pages are returned to the kernel when the memory is released.
  const uint64_t need = round_up(std::max<uint64_t>(bytes, give_back_from), page);
  const auto start = take(need, page);
  if (!start) throw Error("MemoryError", "no room for a group's control memory in the shared heap");
  // Small arrays may have left their contents in this range, so clear it.
  if (madvise(mapping_.begin() + *start, need, MADV_REMOVE) < 0) std::memset(mapping_.begin() + *start, 0, need);
  reserved_[*start] = {need};
  return *start;
}

void Heap::release_when(uint64_t offset, std::function<bool()> unused) {
  const std::lock_guard lock(mutex_);
  reserved_.at(offset).unused = std::move(unused);
}

std::optional<uint64_t> Heap::take(uint64_t need, uint64_t alignment) {
  for (auto [offset, room] : free_) {
    const uint64_t start = round_up(offset, alignment);
    if (start + need > offset + room) continue;
    free_.erase(offset);
    if (start > offset) free_[offset] = start - offset;
    if (offset + room > start + need) free_[start + need] = offset + room - (start + need);
    return start;
  }
  return std::nullopt;
}

// Splits a range into its shared and its withdrawn parts, and appends them to `shared` and `withdrawn`. Withdrawn pages are never
// used again, because peers do not see what is written to them.
void Heap::split(uint64_t begin, uint64_t end, std::vector<Range>& shared, std::vector<Range>& withdrawn) const {
  for (const auto& [first, last] : withdrawn_) {
    if (end <= first || last <= begin) continue;
    withdrawn.emplace_back(first, last);
    if (begin < first) split(begin, first, shared, withdrawn);
    if (last < end) split(last, end, shared, withdrawn);
    return;
  }
  shared.emplace_back(begin, end);
}

void Heap::give_pages_back(uint64_t begin, uint64_t end) const {
  if (end - begin < give_back_from) return;
  const uint64_t first = round_up(begin, page), last = end / page * page;
  if (madvise(mapping_.begin() + first, last - first, MADV_REMOVE) < 0)
    madvise(mapping_.begin() + first, last - first, MADV_DONTNEED);
}

void Heap::give(uint64_t begin, uint64_t end) {
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == end) end += next->second, next = free_.erase(next);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) begin = before->first;
  }
  free_[begin] = end - begin;
}

void Heap::retire() {
  const std::lock_guard lock(mutex_);
  shared_ = false;
}

std::optional<uint64_t> Heap::find(const void* memory, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const std::optional<uint64_t> offset = exclusive(memory, bytes);
  const auto touches = [&](const Range& range) { return *offset < range.second && range.first < *offset + bytes; };
  return offset && shared_ && !std::ranges::any_of(withdrawn_, touches) ? offset : std::nullopt;
}

std::optional<uint64_t> Heap::exclusive(const void* memory, size_t bytes) const {
  const auto* at = static_cast<const char*>(memory);
  if (at < mapping_.begin() || at >= mapping_.begin() + mapping_.bytes()) return std::nullopt;
  const auto offset = static_cast<uint64_t>(at - mapping_.begin());
  auto after = used_.upper_bound(offset);
  if (after == used_.begin()) return std::nullopt;
  const auto& [start, room] = *std::prev(after);
  const uint64_t end = offset + bytes, last = start + room.asked;
  // Whether the range ends where its allocation ends, and nothing else is on the last page.
  const bool to_the_end = end == last && (start + room.bytes) % page == 0;
  return offset % page == 0 && end <= last && (end % page == 0 || to_the_end) ? std::optional(offset) : std::nullopt;
}

void Heap::withdraw(const void* memory, size_t bytes, bool keep) {
  const std::lock_guard lock(mutex_);
  const std::optional<uint64_t> first = exclusive(memory, bytes);
  if (!first || bytes == 0) return;
  const uint64_t length = round_up(bytes, page);
  char* const pages = mapping_.begin() + *first;
  void* fresh = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) throw system_error("mmap of private memory for the heap", errno);
  if (keep) std::memcpy(fresh, pages, bytes);
  if (mremap(fresh, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, pages) == MAP_FAILED) {
    const int error = errno;
    munmap(fresh, length);
    throw system_error("mremap of the heap", error);
  }
  withdrawn_.emplace_back(*first, *first + length);
}

size_t Heap::in_use() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (const auto& [offset, room] : used_) total += room.bytes;
  return total;
}

char* Heaps::at(int rank, uint64_t offset, size_t bytes) const {
  const Mapping& heap = rank == rank_ ? mine_->mapping() : others_[rank];
  if (offset > heap.bytes() || bytes > heap.bytes() - offset)
    throw Error("Error", "rank " + std::to_string(rank) + " of this host posted memory outside its heap: offset " +
                             std::to_string(offset) + ", " + std::to_string(bytes) + " bytes");
  return heap.begin() + offset;
}

}  // namespace mscomm
