#include "backend/vendor.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"

namespace mscomm {

namespace {

using namespace std::chrono_literals;

// After a call we ask the library, for this long and without a pause, whether it has set up the call. This is about the time that
// the library needs if it sets up calls in a thread. Only after that do we sleep between questions, because each sleep takes 50
// us longer than asked for.
constexpr auto asks_at_once = 200us;

// Each device of the process has one turn, which a group holds while it enqueues a call, so groups do not enqueue on a device at
// the same time. An abort does not wait for the turn.
Turn& issuing_on(const Runtime* runtime, int device) {
  static std::mutex mutex;                                                 // protects `all`
  static auto& all = *new std::map<std::pair<const Runtime*, int>, Turn>;  // never destroyed: a thread left behind may use a turn
  const std::lock_guard lock(mutex);
  return all[{runtime, device}];
}

Missing nobody() {
  return {[] { return std::vector<int>{}; }, false};
}

}  // namespace

VendorBackend::VendorBackend(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id,
                             int size, int rank, const Deadline& deadline, const std::function<void()>& check)
    : runtime_(std::move(runtime)), device_(device), size_(size), rank_(rank), issuing_(issuing_on(runtime_.get(), device)) {
  const Runtime::Current current(*runtime_, device_);
  group_ = std::make_shared<SharedGroup>(std::move(vendor), id, size, rank, runtime_, device);
  auto pause = 100us;
  while (group_->ask([](VendorGroup& group) { return group.busy(); })) {
    check();
    if (deadline.passed())
      throw Error("CollectiveTimeout", std::string(group_->vendor().name()) + " " + group_->vendor().version() +
                                           ": the ranks did not connect their devices within " +
                                           seconds_text(deadline.timeout_s()));
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, 50ms);
  }
  watcher_ = std::make_shared<Watcher>(runtime_, device, group_);
  thread_ = std::make_unique<std::thread>([watcher = watcher_] { watcher->watch(); });
}

VendorBackend::~VendorBackend() {
  if (!thread_) return;  // in a forked child
  observe(nullptr);
  if (watcher_->stop()) thread_->join();
  else thread_->detach();  // the thread hangs in the library; it shares ownership of all that it uses
}

void VendorBackend::observe(Observer* observer) { watcher_->observe(observer); }

void VendorBackend::run(const Call& call, const Wait& wait) {
  const Runtime::Current current(*runtime_, device_);
  std::unique_lock issuing(issuing_, std::defer_lock);
  take(issuing, wait);

  StreamHandle stream = *call.stream;
  const bool captured = runtime_->captures(stream);
  EventHandle before = nullptr;
  if (call.beside && !captured) {
    const StreamHandle beside = watcher_->beside();
    before = watcher_->take_event();
    runtime_->record(before, stream);
    runtime_->wait(beside, before);
    stream = beside;
  }
  if (call.bytes() || !call.counts.empty()) {
    enqueue(call, stream);
    settle(issuing, wait);
  }
  if (captured) watcher_->captured(call.signature);
  else watcher_->add(call.signature, stream, before, wait.deadline);
}

void VendorBackend::take(std::unique_lock<Turn>& issuing, const Wait& wait) {
  while (!issuing.try_lock_for(std::chrono::milliseconds(longest_sleep_ms))) {
    if (wait.deadline.passed())
      throw Error("CollectiveTimeout", "it could not be enqueued within " + seconds_text(wait.deadline.timeout_s()) +
                                           ": another call on this device is being enqueued");
    wait.look(nobody());
  }
}

// Waits until the library has set up the call. In the first call of a kind the library may connect to other ranks, and these
// ranks may first have to finish a call of another group. So the device's turn is released during the wait.
void VendorBackend::settle(std::unique_lock<Turn>& issuing, const Wait& wait) {
  auto pause = 20us;
  std::optional<Clock::time_point> asked;
  while (group_->ask([](VendorGroup& group) { return group.busy(); })) {
    if (!asked) asked = Clock::now();
    if (Clock::now() - *asked < asks_at_once) {
      if (issuing) issuing.unlock();
      std::this_thread::yield();
      continue;
    }
    if (wait.deadline.passed())
      throw Error("CollectiveTimeout", "it could not be enqueued within " + seconds_text(wait.deadline.timeout_s()) + ": " +
                                           std::string(group_->vendor().name()) + " waits for other ranks");
    if (issuing) issuing.unlock();
    wait.look(nobody());
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, 10ms);
  }
  if (!issuing) take(issuing, wait);
}

void VendorBackend::enqueue(const Call& call, StreamHandle stream) {
  const Signature& signature = call.signature;
  const uint64_t count = signature.count;
  const Dtype dtype = signature.dtype;
  const Op op = signature.op;
  if (reduces(signature.what))
    if (const std::string why = group_->vendor().refuses(dtype, op); !why.empty()) throw Error("ValueError", why);
  switch (signature.what) {
    case Collective::all_reduce:
      return group_->ask([&](VendorGroup& group) { group.all_reduce(call.x, call.out, count, dtype, op, stream); });
    case Collective::reduce:
      return group_->ask([&](VendorGroup& group) { group.reduce(call.x, call.out, count, dtype, op, signature.root, stream); });
    case Collective::broadcast: {
      const void* const x = signature.root == rank_ ? call.x : call.out;
      return group_->ask([&](VendorGroup& group) { group.broadcast(x, call.out, call.bytes(), signature.root, stream); });
    }
    case Collective::reduce_scatter:
      if (call.counts.empty())
        return group_->ask([&](VendorGroup& group) { group.reduce_scatter(call.x, call.out, count / size_, dtype, op, stream); });
      return group_->ask([&](VendorGroup& group) {
        Batch batch(group);
        const char* part = call.in();
        for (int rank = 0; rank < size_; rank++) {
          void* const out = rank == rank_ ? call.out : nullptr;
          if (call.counts[rank]) group.reduce(part, out, call.counts[rank], dtype, op, rank, stream);
          part += call.counts[rank] * call.element_bytes();
        }
        batch.end();
      });
    case Collective::all_gather:
      if (call.counts.empty())
        return group_->ask([&](VendorGroup& group) { group.all_gather(call.x, call.out, call.bytes(), stream); });
      return exchange(call, stream);
    case Collective::gather:
    case Collective::scatter:
    case Collective::all_to_all:
      return exchange(call, stream);
    case Collective::barrier:
      throw Error("Error", "a barrier has no array, and is the CPU's");
    case Collective::scan:
    case Collective::exscan:
      throw Error("Error", "a scan is the CPU's: no vendor's library has one");
  }
}

// The collectives that only move data: each rank sends and receives parts.
void VendorBackend::exchange(const Call& call, StreamHandle stream) {
  const Collective what = call.signature.what;
  const size_t element = call.element_bytes();
  const size_t root = call.signature.root;
  const bool divides = what == Collective::scatter || what == Collective::all_to_all;
  // How many bytes rank `from` sends to rank `to`.
  const auto bytes = [&](size_t from, size_t to) {
    if ((what == Collective::gather && to != root) || (what == Collective::scatter && from != root)) return size_t{0};
    if (call.counts.empty()) return call.bytes() / (divides ? size_ : 1);
    const size_t which = what == Collective::all_to_all ? from * size_ + to : what == Collective::scatter ? to : from;
    return call.counts[which] * element;
  };
  const char* x = call.in();
  char* out = call.result();
  if (what == Collective::all_to_all && x < out + call.out_bytes && out < x + call.x_bytes)
    throw Error("ValueError", "all_to_all on a device: x and out overlap");
  std::vector<Part> parts;
  for (int peer = 0; peer < size_; peer++) {
    const size_t sent = bytes(rank_, peer), received = bytes(peer, rank_);
    if (peer == rank_) {
      if (sent && x != out) runtime_->copy(out, x, sent, stream);
    } else {
      // The library only reads a part that is sent, so the const_cast is safe.
      if (sent) parts.push_back({true, peer, const_cast<char*>(x), sent});
      if (received) parts.push_back({false, peer, out, received});
    }
    if (divides) x += sent;
    out += received;
  }
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
    throw Error("RuntimeError",
                (packing.packs ? "pack" : "unpack") + std::string(": no kernel on device ") + std::to_string(device_) +
                    " scales or casts between " + dtype + " parts and a " + bucket +
                    " bucket like these, and copies cannot. Ask Group.packs before. Kernels: " + runtime_->kernels(device_));
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

bool VendorBackend::converts(Dtype part, Dtype bucket) const { return runtime_->converts(device_, part, bucket); }

std::string VendorBackend::refuses(Dtype dtype, Op op) const { return group_->vendor().refuses(dtype, op); }

size_t VendorBackend::pending() const { return watcher_->pending(); }

void VendorBackend::shut_down() { watcher_->abort(); }

void VendorBackend::close() { watcher_->finish(); }

void VendorBackend::close_descriptors() { (void)thread_.release(); }

}  // namespace mscomm
