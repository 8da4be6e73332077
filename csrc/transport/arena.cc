#include "transport/arena.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
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

size_t page_up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

Arena::Arena(int rank, int size, Mapping control, std::shared_ptr<Heap> heap, std::vector<Mapping> heaps, bool spin)
    : rank_(rank), size_(size), control_(std::move(control)), heap_(std::move(heap)), heaps_(std::move(heaps)), spin_(spin) {
  if (control_.bytes() < control_bytes(size)) throw Error("Error", "the host's shared control memory is too small for its ranks");
  populate(&slot(rank), sizeof(Slot));
  populate(staging(rank), 2 * tiny_bytes);
}

size_t Arena::control_bytes(int size) {
  return page_up(sizeof(Gate) + static_cast<size_t>(size) * sizeof(Slot)) + static_cast<size_t>(size) * staging_bytes;
}

char* Arena::staging(int rank) const {
  return control_.begin() + page_up(sizeof(Gate) + static_cast<size_t>(size_) * sizeof(Slot)) +
         static_cast<size_t>(rank) * staging_bytes;
}

size_t Arena::out_bytes(const Call& call) const {
  return call.signature.what == Collective::all_gather ? call.bytes() * static_cast<size_t>(size_) : call.bytes();
}

void Arena::post(const Call& call) {
  parity_ = call.signature.number & 1;
  slot(rank_).post[parity_] = {call.signature, heap_->find(call.x, call.bytes()).value_or(not_in_heap),
                               heap_->find(call.out, out_bytes(call)).value_or(not_in_heap)};
}

void Arena::round(const Wait& wait) {
  const auto target = static_cast<uint32_t>(++round_);
  slot(rank_).arrived.store(round_, std::memory_order_relaxed);
  if (gate().arrivals.fetch_add(1) + 1 == round_ * static_cast<uint64_t>(size_)) {
    // Both sides use seq_cst read-modify-writes: either the waiter sees the round, or we see the sleeper.
    gate().round.exchange(target);
    if (gate().sleepers.fetch_add(0) > 0) futex(gate().round, FUTEX_WAKE, INT_MAX);
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

bool Arena::open(uint32_t round) const { return static_cast<int32_t>(gate().round.load(std::memory_order_acquire) - round) >= 0; }

void Arena::sleep(uint32_t round, const Wait& wait) {
  constexpr timespec longest{0, longest_sleep_ms * 1'000'000};
  while (!open(round)) {
    wait.look([this] { return missing(); });
    gate().sleepers.fetch_add(1);
    const uint32_t now = gate().round.fetch_add(0);
    if (static_cast<int32_t>(now - round) < 0) {
      const bool timed_out = futex(gate().round, FUTEX_WAIT, now, &longest) < 0 && errno == ETIMEDOUT;
      if (timed_out && open(round)) lost_wakes_++;
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
  if (offset == not_in_heap) return nullptr;
  const Mapping& heap = heaps_[static_cast<size_t>(rank)];
  if (offset > heap.bytes() || bytes > heap.bytes() - offset)
    throw Error("Error", "rank " + std::to_string(rank) + " of this host posted memory outside its heap: offset " +
                             std::to_string(offset) + ", " + std::to_string(bytes) + " bytes");
  return heap.begin() + offset;
}

}  // namespace mscomm
