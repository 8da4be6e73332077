#include "transport/arena.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <exception>
#include <optional>
#include <random>
#include <string>

#include "base/error.h"

namespace mscomm {

namespace {

// How long a waiter stays awake before it sleeps. See docs/performance.md.
constexpr std::chrono::microseconds awake{100};
// With more ranks than CPUs a yield can be in vain: a rank that has had less than its share of the CPU gets it back at once, or
// keeps it to the end of its time slice, while the rank that all wait for cannot run. Such a rank sleeps after it has yielded in
// vain for as long as a sleep and its wake take.
constexpr std::chrono::microseconds as_long_as_a_sleep{5};
constexpr std::chrono::nanoseconds two_switches{1500};  // a yield that returns sooner than that was in vain
constexpr int polls_a_turn = 64;                        // about a microsecond: most partners of a small call arrive within it

// How often at most a rank looks for others on its CPU, which costs a cache line from each, and leaves that CPU, which takes tens
// of microseconds.
constexpr std::chrono::microseconds look_every{50}, part_every{1000};

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

// Like read(): may return less than asked for, or -1 with errno.
ssize_t read_process(pid_t process, uint64_t address, void* to, size_t bytes) {
  const iovec here{to, bytes}, there{reinterpret_cast<void*>(address), bytes};
  return process_vm_readv(process, &here, 1, &there, 1, 0);
}

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
    std::random_device random;
    token_ = uint64_t{random()} << 32 | random();
    Slot& mine = slot(rank);
    mine.process = getpid();
    mine.token_address = reinterpret_cast<uint64_t>(&token_);
    mine.token = token_;
  } catch (...) {
    gate().closed.fetch_add(1);  // because there will be no destructor to do it
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

void Arena::abandon(Heap& heap, uint64_t control, int size) {
  auto* const gate = reinterpret_cast<Gate*>(heap.mapping().begin() + control);
  try {
    populate(gate, sizeof(Gate));
  } catch (const Error&) {
    return;  // no memory even for that: the range is never used again
  }
  gate->closed.fetch_add(1);
  release(heap, control, size);
}

size_t Arena::control_bytes(int size) {
  return page_up(sizeof(Gate) + static_cast<size_t>(size) * sizeof(Slot)) + static_cast<size_t>(size) * staging_bytes;
}

char* Arena::staging(int rank) const {
  return control_ + page_up(sizeof(Gate) + static_cast<size_t>(size_) * sizeof(Slot)) + static_cast<size_t>(rank) * staging_bytes;
}

void Arena::post(const Call& call, Pulled pulled) {
  parity_ ^= 1;
  Post& post = slot(rank_).post[parity_];
  post = {call.signature, offered(call.x, call.x_bytes), offered(call.out, call.out_bytes)};
  if (pulled != Pulled::nothing) post.x_address = readable(call.x, call.x_bytes, tested_x_);
  if (pulled == Pulled::x_and_out) post.out_address = readable(call.out, call.out_bytes, tested_out_);
  first_round_ = round_ + 1;
  slot(rank_).lines[first_round_ & 1].fingerprint = call.signature.fingerprint();
}

bool Arena::agreed() const {
  const uint64_t mine = slot(rank_).lines[first_round_ & 1].fingerprint;
  bool same = true;
  for (int rank = 0; rank < size_; rank++) same &= slot(rank).lines[first_round_ & 1].fingerprint == mine;
  return same;
}

uint64_t Arena::offered(const void* memory, size_t bytes) const {
  return bytes > unoffered_bytes() ? heaps_->mine().find(memory, bytes).value_or(not_in_heap) : not_in_heap;
}

void Arena::withdraw(const Call& call) {
  std::exception_ptr failed;
  const auto take_back = [&](const void* memory, size_t bytes, bool keep) {
    if (bytes <= unoffered_bytes()) return;
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
  round_++;
  here_ = 0;
  // seq_cst here, in open() and for the sleepers: if one rank arrives while another goes to sleep, at least one of them sees the
  // other.
  slot(rank_).lines[round_ & 1].arrived.store(round_);
  if (open()) {
    if (gate().sleepers.load() > 0) ring();
    return;
  }
  // Between polls this rank yields its CPU to the others. It does so even if there is a CPU for each rank, because the kernel may
  // have put two ranks on one.
  const int polls = spin_ ? polls_a_turn : 1;
  std::optional<Clock::time_point> start;
  Clock::duration in_vain{};  // how long the last yields took, in which nobody else got the CPU
  while (!wait.watch.broken()) {
    for (int i = 0; i < polls; i++) {
      if (open()) return;
      pause_briefly();
    }
    const auto now = Clock::now();
    if (!start) {
      start = now;
      if (spin_) part_from_who_shares_the_cpu();
    }
    if (now - *start > awake || (!spin_ && in_vain > as_long_as_a_sleep)) break;
    sched_yield();
    const auto took = Clock::now() - now;
    in_vain = took < two_switches ? in_vain + took : Clock::duration{};
  }
  slot(rank_).place.store(0, std::memory_order_relaxed);
  sleep(wait);
}

// The kernel separates two ranks on one CPU only after milliseconds, and even later if they yield to each other; see
// docs/performance.md. So the higher rank moves: for a moment its thread is not allowed to run on that CPU.
void Arena::part_from_who_shares_the_cpu() {
  constexpr uint64_t cpu_bits = 16, recent_rounds = 2;
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  slot(rank_).place.store(round_ << cpu_bits | static_cast<uint64_t>(cpu), std::memory_order_relaxed);
  const auto now = Clock::now();
  if (rank_ == 0 || now - looked_ < look_every) return;
  looked_ = now;
  bool shared = false;
  for (int rank = 0; rank < rank_; rank++) {
    const uint64_t place = slot(rank).place.load(std::memory_order_relaxed);
    shared |= place != 0 && (place & 0xffff) == static_cast<uint64_t>(cpu) && (place >> cpu_bits) + recent_rounds >= round_;
  }
  cpu_set_t allowed, elsewhere;
  if (!shared || now - parted_ < part_every || sched_getaffinity(0, sizeof allowed, &allowed) < 0) return;
  elsewhere = allowed;
  CPU_CLR(cpu, &elsewhere);
  if (CPU_COUNT(&elsewhere) == 0 || sched_setaffinity(0, sizeof elsewhere, &elsewhere) < 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);  // the set of a moment ago; if the cpuset has shrunk since, its rest applies
  parted_ = now;
  partings_++;
}

bool Arena::open() {
  while (here_ < size_ && slot(here_).lines[round_ & 1].arrived.load() >= round_) here_++;
  return here_ == size_;
}

void Arena::sleep(const Wait& wait) {
  const timespec longest{wait.sleep_ms / 1000, wait.sleep_ms % 1000 * 1'000'000};
  while (!open()) {
    const uint32_t bell = gate().bell.load();  // first, so that a ring after this line ends the sleep
    wait.look({[this] { return missing(); }, true});
    gate().sleepers.fetch_add(1);
    if (!open()) futex(gate().bell, FUTEX_WAIT, bell, &longest);
    gate().sleepers.fetch_sub(1);
  }
}

std::vector<int> Arena::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; rank++)
    if (slot(rank).lines[round_ & 1].arrived.load(std::memory_order_relaxed) < round_) ranks.push_back(rank);
  return ranks;
}

void Arena::ring() const {
  gate().bell.fetch_add(1);
  futex(gate().bell, FUTEX_WAKE, INT_MAX);
}

bool Arena::can_pull(const Wait& wait) {
  if (pulls_ != Tried::not_yet) return pulls();
  bool all = true;
  for (int rank = 0; rank < size_; rank++) all = all && reads_token_of(rank);
  slot(rank_).reads_all.store(all, std::memory_order_relaxed);
  round(wait);
  for (int rank = 0; rank < size_; rank++) all = all && slot(rank).reads_all.load(std::memory_order_relaxed);
  pulls_ = all ? Tried::yes : Tried::no;
  return all;
}

// In another pid namespace the same process id means another process.
bool Arena::reads_token_of(int rank) const {
  const Slot& other = slot(rank);
  uint64_t token = 0;
  return read_process(other.process, other.token_address, &token, sizeof token) == sizeof token && token == other.token;
}

// The address of memory, or 0 if other processes cannot read it, such as memory that a driver has mapped. Tests only the first
// and the last byte.
uint64_t Arena::readable(const void* memory, size_t bytes, Tested& last) const {
  if (bytes == 0 || pulls_ == Tried::no) return 0;
  if (const Tested now{memory, bytes}; now != last) {
    const auto* first = static_cast<const char*>(memory);
    char ends[2];
    const iovec here{ends, 2};
    const iovec there[2] = {{const_cast<char*>(first), 1}, {const_cast<char*>(first + bytes - 1), 1}};
    if (process_vm_readv(owner_, &here, 1, there, 2, 0) != 2) return 0;
    last = now;
  }
  return reinterpret_cast<uint64_t>(memory);
}

void Arena::pull(int rank, uint64_t address, void* to, size_t bytes, const Wait& wait) const {
  for (size_t done = 0; done < bytes;) {
    const ssize_t now = read_process(slot(rank).process, address + done, static_cast<char*>(to) + done, bytes - done);
    if (now > 0) {
      done += static_cast<size_t>(now);
      continue;
    }
    const int error = now < 0 ? errno : EFAULT, job_rank = ranks_[static_cast<size_t>(rank)];
    const std::string what = "reading the array of rank " + std::to_string(job_rank);
    wait.look({[rank] { return std::vector<int>{rank}; }, true});  // throws how the rank was lost, if it was
    if (error == ESRCH) throw peer_lost(job_rank, what + ": its process is gone");
    throw system_error(what, error);
  }
}

char* Arena::at(int rank, uint64_t offset, size_t bytes) const {
  return offset == not_in_heap ? nullptr : heaps_->at(ranks_[static_cast<size_t>(rank)], offset, bytes);
}

}  // namespace mscomm
