// Tests shared memory: which memory of a peer is accepted, and which pages are huge pages.
#include "transport/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
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
  constexpr size_t heap_bytes = 1u << 30, bytes = 8u << 20, control = 9u << 20;
  const int fd = make_memory("test-heap", heap_bytes);
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  auto* small = static_cast<char*>(heap.allocate(100'000));
  CHECK(huge_kb(small, 100'000) == 0);
  auto* array = static_cast<char*>(heap.allocate(bytes));
  CHECK(huge_kb(array, bytes) > 0);  // if memory is fragmented, perhaps only a part of the array has huge pages
  heap.release(array);
  const char* reserved = heap.mapping().begin() + heap.reserve(control);
  CHECK(reserved == array || reserved < array);  // begins at the array's old address or below it
  for (size_t at = 0; at < control; at += 4096) CHECK(reserved[at] == 0);
  CHECK(huge_kb(reserved, control) == 0);
  heap.release(small);
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

int main() {
  only_memory_is_taken_from_a_peer();
  long_arrays_have_huge_pages_and_short_ones_do_not();
  a_large_release_holds_up_nobody();
  return test::failed();
}
