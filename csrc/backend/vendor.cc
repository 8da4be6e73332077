#include "backend/vendor.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "algo/moves.h"
#include "base/error.h"
#include "base/thread.h"

namespace mscomm {

namespace {

using namespace std::chrono_literals;

// After we have passed a call to the library, we poll the library until it has set up the call: for this long without sleeping,
// and then with sleeps. A library that sets up calls in a thread of its own needs about this long. A sleep during this time would
// delay the caller, because each sleep takes 50 us longer than requested.
constexpr auto asks_at_once = 200us;

// Returns the device's Turn, which is a mutex. A group holds the Turn while it enqueues a call, so that two groups never enqueue
// on the same device at the same time. An abort does not wait for the Turn.
Turn& issuing_on(const Runtime* runtime, int device) {
  static std::mutex mutex;                                                 // protects `all`
  static auto& all = *new std::map<std::pair<const Runtime*, int>, Turn>;  // never destroyed: threads may use a Turn during exit
  const std::lock_guard lock(mutex);
  return all[{runtime, device}];
}

// Called at intervals while a call waits to be enqueued. Throws at the deadline. why: what the call waits for.
void look(const Wait& wait, const std::string& why) {
  if (wait.deadline.passed())
    throw Error("CollectiveTimeout", "it could not be enqueued within " + seconds_text(wait.deadline.timeout_s()) + ": " + why);
  wait.look({});
}

}  // namespace

VendorBackend::VendorBackend(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, int size, int rank)
    : runtime_(std::move(runtime)),
      device_(device),
      size_(size),
      rank_(rank),
      issuing_(issuing_on(runtime_.get(), device)),
      group_(std::make_shared<SharedGroup>(std::move(vendor))),
      watcher_(std::make_shared<Watcher>(runtime_, device, group_)) {}

// If the body throws, the destructor runs, because the constructor to which this one delegates has returned. So the watcher's
// thread aborts the group, and not this thread, which the library might keep for long. The threads are started first: if one of
// them cannot be started, there is no group to abort.
VendorBackend::VendorBackend(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id,
                             int size, int rank, const Deadline& deadline, const std::function<void()>& check)
    : VendorBackend(std::move(vendor), std::move(runtime), device, size, rank) {
  threads_[0] = start_thread([watcher = watcher_] { watcher->free_group(); });
  threads_[1] = start_thread([watcher = watcher_] { watcher->watch(); });
  const Runtime::Current current(*runtime_, device_);
  group_->join(id, size, rank, runtime_, device_);
  auto pause = 100us;
  while (!watcher_->watches() || group_->busy()) {
    check();
    if (deadline.passed())
      throw Error("CollectiveTimeout", std::string(group_->vendor().name()) + " " + group_->vendor().version() +
                                           ": the ranks did not connect their devices within " +
                                           seconds_text(deadline.timeout_s()));
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, 50ms);
  }
}

VendorBackend::~VendorBackend() {
  if (!threads_[0]) return;  // in a forked child, or the thread could not be started
  observe(nullptr);
  const bool ended = watcher_->stop(threads_[1] != nullptr);
  for (auto& thread : threads_)
    if (thread && ended) thread->join();
    else if (thread) thread->detach();  // a thread hangs in the library; the threads share ownership of all that they use
}

void VendorBackend::run(const Call& call, const Wait& wait) {
  const Runtime::Current current(*runtime_, device_);
  std::unique_lock issuing(issuing_, std::defer_lock);
  take(issuing, wait);

  StreamHandle stream = *call.stream;
  const bool captured = runtime_->captures(stream);
  Watcher::Event before;
  if (call.beside && !captured) {
    const StreamHandle beside = watcher_->beside();
    before = watcher_->take_event();
    runtime_->record(before.get(), stream);
    runtime_->wait(beside, before.get());
    stream = beside;
  }
  if (call.bytes() || !call.counts.empty()) {
    enqueue(call, stream);
    settle(issuing, wait);
  }
  if (captured) watcher_->captured(call.signature);
  else watcher_->add(call.signature, stream, std::move(before), wait.deadline);
}

void VendorBackend::take(std::unique_lock<Turn>& issuing, const Wait& wait) {
  while (!issuing.try_lock_for(std::chrono::milliseconds(longest_sleep_ms)))
    look(wait, "another call on this device is being enqueued");
}

// Waits until the library has set up the call. In the first call of each kind, the library may connect to other ranks. These
// ranks may first have to finish a call of another group. If this rank takes part in the other group's call, another of its
// threads needs the device's Turn to enqueue that call. So the Turn is released during the wait.
void VendorBackend::settle(std::unique_lock<Turn>& issuing, const Wait& wait) {
  auto pause = 20us;
  std::optional<Clock::time_point> asked;
  while (group_->busy()) {
    if (issuing) issuing.unlock();
    if (!asked) asked = Clock::now();
    if (Clock::now() - *asked < asks_at_once) {
      std::this_thread::yield();
      continue;
    }
    look(wait, std::string(group_->vendor().name()) + " waits for other ranks");
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, 10ms);
  }
  if (!issuing) take(issuing, wait);
}

void VendorBackend::enqueue(const Call& call, StreamHandle stream) {
  const Collective what = call.signature.what;
  if (reduces(what))
    if (const std::string why = group_->vendor().refuses(call.signature.dtype, call.signature.op); !why.empty())
      throw Error("ValueError", why);
  const bool in_parts = what == Collective::gather || what == Collective::scatter || what == Collective::all_to_all;
  if (in_parts || (what == Collective::all_gather && !call.counts.empty())) return exchange(call, stream);
  group_->ask([&](VendorGroup& group) { enqueue_whole(group, call, stream); });
}

// Enqueues a collective for which the library has a function, or an uneven reduce_scatter as a batch of reduces.
void VendorBackend::enqueue_whole(VendorGroup& group, const Call& call, StreamHandle stream) {
  const Signature& signature = call.signature;
  const Collective what = signature.what;
  const uint64_t count = signature.count;
  const Dtype dtype = signature.dtype;
  const Op op = signature.op;
  if (what == Collective::barrier) throw Error("Error", "a barrier has no array, so it runs on the CPU");
  if (scans(what)) throw Error("Error", "a scan runs on the CPU: no vendor's library has one");
  if (what == Collective::all_reduce) return group.all_reduce(call.x, call.out, count, dtype, op, stream);
  if (what == Collective::reduce) return group.reduce(call.x, call.out, count, dtype, op, signature.root, stream);
  if (what == Collective::all_gather) return group.all_gather(call.x, call.out, call.bytes(), stream);
  if (what == Collective::broadcast)
    return group.broadcast(signature.root == rank_ ? call.x : call.out, call.out, call.bytes(), signature.root, stream);
  if (what != Collective::reduce_scatter) throw Error("Error", "only exchange() enqueues collectives that move parts");
  if (call.counts.empty()) return group.reduce_scatter(call.x, call.out, count / size_, dtype, op, stream);
  group.batch([&] {
    const char* part = call.in();
    for (int rank = 0; rank < size_; rank++) {
      void* const out = rank == rank_ ? call.out : nullptr;
      if (call.counts[rank]) group.reduce(part, out, call.counts[rank], dtype, op, rank, stream);
      part += call.counts[rank] * call.element_bytes();
    }
  });
}

// Enqueues a gather, a scatter, an all_to_all or an uneven all_gather: each rank sends and receives parts.
void VendorBackend::exchange(const Call& call, StreamHandle stream) {
  const char* const x = call.in();
  char* const out = call.result();
  if (call.signature.what == Collective::all_to_all && x < out + call.out_bytes && out < x + call.x_bytes)
    throw Error("ValueError", "all_to_all on a device: x and out overlap");
  const Moves moves(call, size_, rank_, Moves::Of::this_rank);
  std::vector<Part> parts;
  for (int peer = 0; peer < size_; peer++) {
    const Move sent = moves.between(rank_, peer), received = moves.between(peer, rank_);
    if (peer == rank_) {
      if (sent.bytes && x + sent.from != out + sent.to) runtime_->copy(out + sent.to, x + sent.from, sent.bytes, stream);
    } else {
      // The library only reads a part that is sent, so the const_cast is safe.
      if (sent.bytes) parts.push_back({true, peer, const_cast<char*>(x) + sent.from, sent.bytes});
      if (received.bytes) parts.push_back({false, peer, out + received.to, received.bytes});
    }
  }
  // Do not copy inside ask(), which holds the group's lock. The copy may block while the device is busy, and an abort would have
  // to wait for the lock.
  if (!parts.empty()) group_->ask([&](VendorGroup& group) { group.exchange(parts, stream); });
}

void VendorBackend::order(uint64_t number, StreamHandle stream) {
  const Runtime::Current current(*runtime_, device_);
  watcher_->order(number, stream);
}

void VendorBackend::pack(const Packing& packing, StreamHandle stream) {
  const Runtime::Current current(*runtime_, device_);
  if (runtime_->pack(packing, stream)) return;
  if (!packing.plain()) {
    const std::string dtype(name(packing.dtype)), bucket(name(packing.bucket_dtype));
    throw Error("RuntimeError", (packing.packs ? "pack" : "unpack") + std::string(": no kernel on device ") +
                                    std::to_string(device_) + " scales or casts between " + dtype + " parts and a " + bucket +
                                    " bucket like these, and plain copies cannot do that. Check Group.packs first. Kernels: " +
                                    runtime_->kernels(device_));
  }
  const size_t element = size_of(packing.dtype);
  for (const Packing::Part& part : packing.parts) {
    void* const place = static_cast<char*>(packing.bucket) + part.begin * element;
    if (part.count)
      runtime_->copy(packing.packs ? place : part.data, packing.packs ? part.data : place, part.count * element, stream);
  }
}

void VendorBackend::clear(void* memory, size_t bytes, StreamHandle stream) {
  const Runtime::Current current(*runtime_, device_);
  if (bytes) runtime_->clear(memory, bytes, stream);
}

}  // namespace mscomm
