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

// Returns the whole pages of [begin, end). There are none if the first number is not smaller than the second.
std::pair<uint64_t, uint64_t> whole_pages(uint64_t begin, uint64_t end) { return {round_up(begin, page), end / page * page}; }
}  // namespace

Heap::Heap(Mapping mapping)
    : owner_(getpid()),
      mapping_(std::move(mapping)),
      most_kept_(std::min<uint64_t>(mapping_.bytes() / kept_share, most_kept_bytes)) {
  free_.add(0, mapping_.bytes());
}

void* Heap::allocate(size_t bytes) {
  if (getpid() != owner_) return nullptr;
  try {
    if (void* const memory = allocate_once(bytes)) return memory;
    if (!hand_back_kept()) return nullptr;
  } catch (const Error&) {  // the host has no memory for the pages
    if (!hand_back_kept()) throw;
  }
  return allocate_once(bytes);
}

void* Heap::allocate_once(size_t bytes) {
  const uint64_t unit = bytes > unshared_bytes ? page : line;
  const uint64_t need = round_up(bytes ? bytes : 1, unit);
  std::optional<uint64_t> start;
  {
    const std::lock_guard lock(mutex_);
    if (!shared_ || bytes > mapping_.bytes()) return nullptr;
    if (const auto kept = reuse(need, bytes)) return mapping_.begin() + *kept;
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
    if (bytes >= give_back_from) {
      releases_++;
      if (shared_ && withdrawn.empty() && bytes <= most_kept_) kept_.push_back({shared.front(), releases_}), shared.clear();
      const auto dropped = drop_kept(false);
      shared.insert(shared.end(), dropped.begin(), dropped.end());
    } else {
      for (const auto& [begin, end] : shared) {
        free_.add(begin, end);
        paged_.add(begin, end);
      }
      shared = drop_paged(!shared_);
    }
  }
  for (const auto& [begin, end] : withdrawn) madvise(mapping_.begin() + begin, end - begin, MADV_DONTNEED);
  hand_back(shared);
}

// Returns the offset of a kept range that fits an array of `need` bytes, and marks it as used. The range may be up to an eighth
// larger than the array.
std::optional<uint64_t> Heap::reuse(uint64_t need, size_t asked) {
  const auto excess = [&](const Kept& one) {
    const bool fits = one.bytes() >= need && one.bytes() - need <= need / 8 && (one.bytes() >= huge_page) == (need >= huge_page);
    return fits ? one.bytes() - need : UINT64_MAX;
  };
  const auto best = std::ranges::min_element(kept_, {}, excess);
  if (best == kept_.end() || excess(*best) == UINT64_MAX) return std::nullopt;
  const uint64_t begin = best->range.first;
  used_[begin] = {best->bytes(), asked};
  kept_.erase(best);
  return begin;
}

// Removes from kept_ what exceeds the limits, or everything, and returns it.
std::vector<Heap::Range> Heap::drop_kept(bool all) {
  std::vector<Range> dropped;
  uint64_t total = 0;
  for (const Kept& one : kept_) total += one.bytes();
  auto end = kept_.begin();
  for (; end != kept_.end() && (all || total > most_kept_ || end->release + kept_releases < releases_); ++end) {
    total -= end->bytes();
    dropped.push_back(end->range);
  }
  kept_.erase(kept_.begin(), end);
  return dropped;
}

std::vector<Heap::Range> Heap::drop_paged(bool all) {
  std::vector<Range> pages;
  if (!all && paged_.page_bytes() < std::min<uint64_t>(most_kept_, most_paged_bytes)) return pages;
  // The free part of a page that an array uses stays in paged_.
  for (const auto& [begin, bytes] : paged_.all())
    if (const Range whole = whole_pages(begin, begin + bytes); whole.first < whole.second) pages.push_back(whole);
  for (const auto& [begin, end] : pages) {
    free_.cut(begin, end);
    paged_.cut(begin, end);
  }
  return pages;
}

void Heap::hand_back(const std::vector<Range>& ranges) {
  for (const auto& [begin, end] : ranges) {
    // Small arrays or control memory may use these pages next, and should not get huge pages.
    if (end - begin >= huge_page) want_huge_pages(mapping_.begin() + begin, end - begin, false);
    give_pages_back(begin, end);
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [begin, end] : ranges) free_.add(begin, end);
}

bool Heap::hand_back_kept() {
  std::vector<Range> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped = drop_kept(true);
    const auto pages = drop_paged(true);
    dropped.insert(dropped.end(), pages.begin(), pages.end());
  }
  hand_back(dropped);
  return !dropped.empty();
}

uint64_t Heap::reserve(size_t bytes) {
  if (const auto start = reserve_once(bytes)) return *start;
  hand_back_kept();
  if (const auto start = reserve_once(bytes)) return *start;
  throw Error("MemoryError", "no room for a group's control memory in the shared heap");
}

std::optional<uint64_t> Heap::reserve_once(size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::erase_if(reserved_, [this](const auto& one) {
    const auto& [begin, memory] = one;
    if (!memory.unused || !memory.unused()) return false;
    give_pages_back(begin, begin + memory.bytes);  // fast, because only the part that was used has pages
    free_.add(begin, begin + memory.bytes);
    return true;
  });
  // Reserve at least give_back_from bytes, so that the pages are returned to the kernel when the memory is released.
  const uint64_t need = round_up(std::max<uint64_t>(bytes, give_back_from), page);
  const auto start = take(need, page);
  if (!start) return std::nullopt;
  // Small arrays may have left their contents in this range, so clear it.
  if (madvise(mapping_.begin() + *start, need, MADV_REMOVE) < 0) std::memset(mapping_.begin() + *start, 0, need);
  reserved_[*start] = {need};
  return start;
}

void Heap::release_when(uint64_t offset, std::function<bool()> unused) {
  const std::lock_guard lock(mutex_);
  reserved_.at(offset).unused = std::move(unused);
}

std::optional<uint64_t> Heap::take(uint64_t need, uint64_t alignment) {
  for (const auto& [offset, room] : free_.all()) {
    const uint64_t start = round_up(offset, alignment);
    if (start + need > offset + room) continue;
    free_.cut(start, start + need);
    paged_.cut(start, start + need);
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
  const auto [first, last] = whole_pages(begin, end);
  if (first >= last) return;
  if (madvise(mapping_.begin() + first, last - first, MADV_REMOVE) < 0)
    madvise(mapping_.begin() + first, last - first, MADV_DONTNEED);
}

void Heap::Ranges::add(uint64_t begin, uint64_t end) {
  auto next = bytes_.lower_bound(begin);
  if (next != bytes_.end() && next->first == end) end += next->second, next = erase(next);
  if (next != bytes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) begin = before->first, erase(before);
  }
  insert(begin, end);
}

void Heap::Ranges::cut(uint64_t begin, uint64_t end) {
  auto one = bytes_.upper_bound(begin);
  if (one != bytes_.begin() && std::prev(one)->first + std::prev(one)->second > begin) --one;
  while (one != bytes_.end() && one->first < end) {
    const uint64_t first = one->first, last = first + one->second;
    one = erase(one);
    if (first < begin) insert(first, begin);
    if (end < last) insert(end, last);
  }
}

Heap::Ranges::Places::iterator Heap::Ranges::erase(Places::iterator one) {
  const auto [first, last] = whole_pages(one->first, one->first + one->second);
  if (first < last) page_bytes_ -= last - first;
  return bytes_.erase(one);
}

void Heap::Ranges::insert(uint64_t begin, uint64_t end) {
  bytes_[begin] = end - begin;
  const auto [first, last] = whole_pages(begin, end);
  if (first < last) page_bytes_ += last - first;
}

void Heap::retire() {
  {
    const std::lock_guard lock(mutex_);
    shared_ = false;
  }
  hand_back_kept();
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

size_t Heap::kept() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (const Kept& one : kept_) total += one.bytes();
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
