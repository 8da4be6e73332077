// Tests the memory of other processes: which shared memory of a peer is accepted, which pages are huge pages, and whose arrays
// are read.
#include "transport/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/process_memory.h"
#include "check.h"
#include "transport/heap.h"

using namespace mscomm;

namespace {

bool refused(int fd) {
  bool thrown = false;
  try {
    check_memory(fd);
  } catch (const Error& error) {
    thrown = std::string(error.what()).find("a peer sent a descriptor that is neither") == 0;
  }
  close(fd);
  return thrown;
}

// The process that has introduced itself has ended, and another process has its id. Its memory at the address of the token may
// hold something else, or may not be readable.
void bytes_without_the_token_are_not_taken() {
  const std::vector<char> there(200 << 10, 'x');
  const auto address = reinterpret_cast<uint64_t>(there.data());
  const Introduction mine = introduction();
  const auto page = reinterpret_cast<uint64_t>(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (const size_t bytes : {size_t{1}, size_t{4096}, there.size()}) {
    std::vector<char> here(bytes);
    const auto read = [&](const Introduction& owner, uint64_t from) {
      errno = 0;
      return read_process(owner, from, here.data(), bytes);
    };
    CHECK(read(mine, address) == bytes && here == std::vector(bytes, 'x'));
    CHECK(read({mine.process, mine.token_address, mine.token + 1}, address) < bytes && errno == ESRCH);
    CHECK(read({mine.process, page, mine.token}, address) < bytes && errno == ESRCH);
    CHECK(read(mine, page) < bytes && errno == EFAULT);
  }
  CHECK(can_read(mine) && !can_read({mine.process, page, mine.token}) &&
        !can_read({mine.process, mine.token_address, mine.token + 1}));
  munmap(reinterpret_cast<void*>(page), 4096);
}

void only_memory_is_taken_from_a_peer() {
  const int fd = make_memory("test-heap", 12345);
  CHECK(check_memory(fd) == 12345);
  close(fd);
  CHECK(refused(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  CHECK(refused(open("/dev/zero", O_RDWR | O_CLOEXEC)));
  char name[] = "/tmp/mscomm-test-XXXXXX";
  const int named = mkostemp(name, O_CLOEXEC);
  CHECK(refused(named));
  unlink(name);
}

// Returns how many kilobytes of [begin, begin + bytes) this process has mapped as huge pages, according to /proc/self/smaps.
size_t huge_kb(const char* begin, size_t bytes) {
  std::ifstream smaps("/proc/self/smaps");
  const auto first = reinterpret_cast<uintptr_t>(begin), last = first + bytes;
  size_t found = 0, low = 0, high = 0, kb = 0;
  for (std::string line; std::getline(smaps, line);) {
    if (std::sscanf(line.c_str(), "%zx-%zx", &low, &high) == 2) continue;
    if (std::sscanf(line.c_str(), "ShmemPmdMapped: %zu", &kb) == 1 && low < last && first < high) found += kb;
  }
  return found;
}

void long_arrays_have_huge_pages_and_short_ones_do_not() {
  // Skip the test on systems where the kernel alone decides about huge pages, or where a huge page is not 2 MiB.
  const std::string kind = describe_memory(true);
  size_t huge_page = 0;
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> huge_page;
  if ((kind.find("a tmpfs") != 0 && kind.find("advise") == std::string::npos) || huge_page != 2u << 20) return;
  constexpr size_t heap_bytes = 1u << 30, bytes = 8u << 20, control = 11u << 20;
  const int fd = make_memory("test-heap", heap_bytes);
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  auto* small = static_cast<char*>(heap.allocate(100'000));
  CHECK(huge_kb(small, 100'000) == 0);
  auto* array = static_cast<char*>(heap.allocate(bytes));
  CHECK(huge_kb(array, bytes) > 0);  // if memory is fragmented, perhaps only a part of the array has huge pages
  heap.release(array);
  CHECK(heap.kept() == bytes && huge_kb(array, bytes) > 0);
  CHECK(heap.allocate(bytes - 4096) == array);  // reuses the array's memory
  heap.release(array);
  // There is no room for so much control memory, except where the array was.
  const char* reserved = heap.mapping().begin() + heap.reserve(heap_bytes - (1u << 20));
  CHECK(reserved < array && heap.kept() == 0);
  for (size_t at = 0; at < control; at += 4096) CHECK(reserved[at] == 0);
  CHECK(huge_kb(reserved, control) == 0);
  heap.release(small);
}

// Returns how many bytes of this file have pages.
size_t pages_of(int fd) {
  struct stat status{};
  fstat(fd, &status);
  return static_cast<size_t>(status.st_blocks) * 512;
}

// The pages of a released array are reused, and then returned: when too much is kept, when a kept array has not been reused for
// a while, and when the heap retires.
void released_memory_is_kept_for_a_while() {
  constexpr size_t heap_bytes = 1u << 30, most = heap_bytes / kept_share, bytes = 1u << 20, large = 5u << 20;
  const int fd = make_memory("test-heap", heap_bytes, false);
  Heap heap(Mapping(fd, heap_bytes));
  auto* array = static_cast<char*>(heap.allocate(bytes));
  array[0] = 'a';
  heap.release(array);
  CHECK(heap.kept() == bytes && heap.in_use() == 0 && pages_of(fd) >= bytes);
  CHECK(heap.allocate(bytes / 2) != array);  // much smaller
  CHECK(heap.allocate(bytes + 1) != array);  // larger
  CHECK(heap.kept() == bytes);
  CHECK(heap.allocate(bytes - bytes / 16) == array && array[0] == 'a' && heap.kept() == 0);
  CHECK(heap.find(array, bytes - bytes / 16));
  heap.release(array);

  // At most a share of the heap is kept, and nothing that is larger than this share.
  std::vector<void*> burst;
  for (int i = 0; i < 20; i++) burst.push_back(heap.allocate(large));
  const size_t in_burst = pages_of(fd);
  for (void* one : burst) heap.release(one);
  CHECK(heap.kept() == most / large * large);
  CHECK(pages_of(fd) == in_burst - 20 * large - bytes + heap.kept());
  void* const huge = heap.allocate(most + 1);
  heap.release(huge);
  CHECK(heap.kept() == most / large * large);

  // What is not reused is returned after some other releases. The array that is reused each time stays.
  for (uint64_t i = 0; i <= kept_releases + 2; i++) heap.release(heap.allocate(bytes));
  CHECK(heap.kept() == bytes);

  // Withdrawn pages are never used again, so they are not kept.
  array = static_cast<char*>(heap.allocate(bytes));
  CHECK(heap.kept() == 0);
  heap.withdraw(array, bytes, false);
  heap.release(array);
  CHECK(heap.kept() == 0 && heap.allocate(bytes) != array);

  heap.release(heap.allocate(large));
  CHECK(heap.kept() == large);
  heap.retire();
  CHECK(heap.kept() == 0);
  close(fd);
}

// The pages of small arrays return to the kernel, too, when free memory has too many of them. Free pages next to an array that is
// in use return, and the array stays as it is.
void pages_of_small_arrays_are_returned() {
  constexpr size_t heap_bytes = 256u << 20, most = heap_bytes / kept_share, bytes = 1000u << 10, count = 100, tiny = 64;
  const int fd = make_memory("test-heap", heap_bytes, false);
  Heap heap(Mapping(fd, heap_bytes));
  std::vector<void*> arrays;
  const auto release_all_but = [&](size_t every) {
    for (size_t i = 0; i < arrays.size(); i++)
      if (i % every != 0) heap.release(arrays[i]);
  };
  for (size_t i = 0; i < count; i++) arrays.push_back(heap.allocate(bytes));
  for (size_t i = 0; i < count; i++) std::memset(arrays[i], static_cast<int>(i), bytes);
  release_all_but(2);
  CHECK(pages_of(fd) < count / 2 * bytes + most);
  for (size_t i = 0; i < count; i += 2) {
    const std::vector<char> whole(bytes, static_cast<char>(i));
    CHECK(std::memcmp(arrays[i], whole.data(), bytes) == 0);
  }
  for (size_t i = 0; i < count; i += 2) heap.release(arrays[i]);
  CHECK(pages_of(fd) < most + bytes);

  // 64 arrays share a page. A page returns only when all of them are gone.
  arrays.clear();
  for (size_t i = 0; i < 3 * most / tiny; i++) arrays.push_back(heap.allocate(tiny));
  CHECK(pages_of(fd) >= 3 * most);
  release_all_but(4096 / tiny);
  CHECK(pages_of(fd) >= 3 * most);
  for (size_t i = 0; i < arrays.size(); i += 4096 / tiny) heap.release(arrays[i]);
  CHECK(heap.in_use() == 0);
  CHECK(pages_of(fd) < 3 * most);
  heap.retire();
  CHECK(pages_of(fd) == 0);
  close(fd);
}

// An array may need the memory that is kept for others.
void kept_memory_is_given_to_an_array_that_needs_it() {
  constexpr size_t heap_bytes = 128u << 20, kept = 2u << 20;
  const int fd = make_memory("test-heap", heap_bytes, false);
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  heap.release(heap.allocate(kept));
  CHECK(heap.kept() == kept);
  void* const whole = heap.allocate(heap_bytes);
  CHECK(whole != nullptr && heap.kept() == 0);
  CHECK(heap.allocate(1) == nullptr);
  heap.release(whole);
}

// Several threads allocate and release at the same time. Each array keeps what its thread wrote to it.
void threads_share_what_is_kept() {
  constexpr size_t heap_bytes = 256u << 20;
  const int fd = make_memory("test-heap", heap_bytes, false);
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; thread++) {
    threads.emplace_back([&heap, thread] {
      for (int i = 0; i < 60; i++) {
        const size_t bytes = (1u << 20) + static_cast<size_t>((i * 7 + thread) % 5) * 100'000;
        auto* array = static_cast<char*>(heap.allocate(bytes));
        array[0] = array[bytes - 1] = static_cast<char>(thread);
        std::this_thread::yield();
        CHECK(array[0] == thread && array[bytes - 1] == thread && heap.find(array, bytes));
        heap.release(array);
      }
    });
  }
  for (std::thread& one : threads) one.join();
  CHECK(heap.in_use() == 0 && heap.kept() <= heap_bytes / kept_share);
}

// The kernel takes a long time to free the pages of a large array. While one thread releases such an array, calls in other
// threads must be able to look up their arrays.
void a_large_release_holds_up_nobody() {
  constexpr size_t heap_bytes = 1u << 30, large = 128u << 20, small = 64u << 10;
  const int fd = make_memory("test-heap", heap_bytes, false);  // small pages, unless the kernel uses huge pages for every memfd
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  void* const kept = heap.allocate(small);
  // The longest time between two results of heap.find(), as a share of the time that the release took. The test takes the
  // smallest share of several tries, because in some tries the thread that calls heap.find() does not get a CPU.
  double smallest_share = 1;
  for (int i = 0; i < 20 && smallest_share > 0.5; i++) {
    void* const array = heap.allocate(large);
    std::atomic<bool> started{false}, over{false};
    double longest_s = 0;
    std::thread looking([&] {
      for (auto last = Clock::now(); !over; started = true) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));  // lets the other thread get the mutex
        CHECK(heap.find(kept, small));
        longest_s = std::max(longest_s, seconds_since(last));
        last = Clock::now();
      }
    });
    while (!started) std::this_thread::yield();
    const auto began = Clock::now();
    heap.release(array);
    const double took_s = seconds_since(began);
    over = true;
    looking.join();
    smallest_share = std::min(smallest_share, longest_s / took_s);
  }
  CHECK(smallest_share < 0.5);
  CHECK(heap.allocate(large) != nullptr);
}

}  // namespace

SUITE(memory) {
  bytes_without_the_token_are_not_taken();
  only_memory_is_taken_from_a_peer();
  long_arrays_have_huge_pages_and_short_ones_do_not();
  released_memory_is_kept_for_a_while();
  if (!test::only_races) pages_of_small_arrays_are_returned();
  kept_memory_is_given_to_an_array_that_needs_it();
  threads_share_what_is_kept();
  a_large_release_holds_up_nobody();
}
