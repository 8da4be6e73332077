#include "transport/arena.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <exception>
#include <string>

#include "base/error.h"

namespace mscomm {

namespace {

// How long a waiter stays awake before it sleeps; a sleep and its wake cost a few microseconds each. See docs/performance.md.
constexpr double awake_s = 100e-6;
constexpr int polls_a_turn = 64;  // about a microsecond: most partners of a small call arrive within it

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Shared between processes, so without FUTEX_PRIVATE_FLAG.
long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout = nullptr) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

// CLOCK_MONOTONIC: the same for all processes of the host.
int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

size_t page_up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

Arena::Arena(std::vector<int> ranks, int rank, std::shared_ptr<Heaps> heaps, uint64_t control, bool spin)
    : ranks_(std::move(ranks)),
      rank_(rank),
      size_(static_cast<int>(ranks_.size())),
      heaps_(std::move(heaps)),
      control_(heaps_->at(*std::min_element(ranks_.begin(), ranks_.end()), control, control_bytes(size_))),
      spin_(spin) {
  try {
    populate(&slot(rank), sizeof(Slot));
    populate(staging(rank), 2 * tiny_bytes);
  } catch (...) {
    gate().closed.fetch_add(1);  // there will be no destructor to say it
    throw;
  }
}

Arena::~Arena() {
  if (getpid() == owner_) gate().closed.fetch_add(1);
}

uint64_t Arena::reserve(Heap& heap, int size) { return heap.reserve(control_bytes(size)); }

void Arena::release(Heap& heap, uint64_t control, int size) {
  const auto& closed = reinterpret_cast<Gate*>(heap.mapping().begin() + control)->closed;
  heap.release_when(control, [&closed, size] { return closed.load() == static_cast<uint32_t>(size); });
}

size_t Arena::control_bytes(int size) {
  return page_up(sizeof(Gate) + static_cast<size_t>(size) * sizeof(Slot)) + static_cast<size_t>(size) * staging_bytes;
}

char* Arena::staging(int rank) const {
  return control_ + page_up(sizeof(Gate) + static_cast<size_t>(size_) * sizeof(Slot)) + static_cast<size_t>(rank) * staging_bytes;
}

void Arena::post(const Call& call) {
  parity_ = call.signature.number & 1;
  slot(rank_).post[parity_] = {call.signature, offered(call.x, call.x_bytes), offered(call.out, call.out_bytes)};
}

uint64_t Arena::offered(const void* memory, size_t bytes) const {
  return bytes > tiny_bytes ? heaps_->mine().find(memory, bytes).value_or(not_in_heap) : not_in_heap;
}

void Arena::withdraw(const Call& call) {
  std::exception_ptr failed;
  const auto take_back = [&](const void* memory, size_t bytes, bool keep) {
    if (bytes <= tiny_bytes) return;
    try {
      heaps_->mine().withdraw(memory, bytes, keep);
    } catch (...) {
      failed = std::current_exception();
      heaps_->mine().retire();
    }
  };
  take_back(call.out, call.out_bytes, false);
  if (call.x != call.out) take_back(call.x, call.x_bytes, true);
  if (failed) std::rethrow_exception(failed);
}

void Arena::round(const Wait& wait) {
  const auto target = static_cast<uint32_t>(++round_);
  slot(rank_).arrived.store(round_, std::memory_order_relaxed);
  if (gate().arrivals.fetch_add(1) + 1 == round_ * static_cast<uint64_t>(size_)) {
    // Both sides use seq_cst read-modify-writes: either the waiter sees the round, or we see the sleeper.
    gate().round.exchange(target);
    wake(target);
    return;
  }
  // Between turns the CPU is offered to the others, also where every rank has one of its own: the kernel may have put two ranks
  // on the same, and moves them apart only after milliseconds.
  const int polls = spin_ ? polls_a_turn : 1;
  const auto start = Clock::now();
  do {
    for (int i = 0; i < polls; i++) {
      if (open(target)) return;
      pause_briefly();
    }
    sched_yield();
  } while (seconds_since(start) < awake_s && !wait.watch.broken());
  sleep(target, wait);
}

void Arena::wake(uint32_t round) {
  int64_t woken_ns = 0;
  if (gate().sleepers.fetch_add(0) > 0) {
    futex(gate().round, FUTEX_WAKE, INT_MAX);
    woken_ns = now_ns();
  }
  gate().woken_ns.store(woken_ns, std::memory_order_relaxed);
  gate().woken.store(round, std::memory_order_release);
}

bool Arena::open(uint32_t round) const { return static_cast<int32_t>(gate().round.load(std::memory_order_acquire) - round) >= 0; }

void Arena::sleep(uint32_t round, const Wait& wait) {
  constexpr timespec longest{0, longest_sleep_ms * 1'000'000};
  while (!open(round)) {
    wait.look([this] { return missing(); });
    gate().sleepers.fetch_add(1);
    const uint32_t now = gate().round.fetch_add(0);
    if (static_cast<int32_t>(now - round) < 0) {
      const int64_t bound_ns = now_ns() + longest.tv_nsec;  // the sleep ends later than this, or is woken
      const bool timed_out = futex(gate().round, FUTEX_WAIT, now, &longest) < 0 && errno == ETIMEDOUT;
      // A gate that opened at about the bound is no lost wake: its opener may be on the way to us. While this rank counts as a
      // sleeper none has to be seen.
      if (timed_out && gate().woken.load(std::memory_order_acquire) == round &&
          gate().woken_ns.load(std::memory_order_relaxed) < bound_ns)
        lost_wakes_++;
    }
    gate().sleepers.fetch_sub(1);
  }
}

std::vector<int> Arena::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; rank++)
    if (slot(rank).arrived.load(std::memory_order_relaxed) < round_) ranks.push_back(rank);
  return ranks;
}

void Arena::ring() const { futex(gate().round, FUTEX_WAKE, INT_MAX); }

char* Arena::at(int rank, uint64_t offset, size_t bytes) const {
  return offset == not_in_heap ? nullptr : heaps_->at(ranks_[static_cast<size_t>(rank)], offset, bytes);
}

}  // namespace mscomm
