#include "engine.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace fake {

using SteadyClock = std::chrono::steady_clock;

namespace {

constexpr size_t grain = 512;  // addresses are multiples of this number, like the addresses from cuMemAlloc
// The first junk_bytes of each allocation are filled with this byte, so code that relies on zeros fails.
constexpr unsigned char junk = 0xA5;
constexpr size_t junk_bytes = 16 << 20;

const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // the host's page size, because mprotect() works on whole pages

size_t up(size_t bytes, size_t to = grain) { return (std::max<size_t>(bytes, 1) + to - 1) / to * to; }

class Queue;

struct Item {
  std::function<void()> work;
  bool delayed = false;
  uint64_t number = 0;
};

// Held while work is enqueued or a stream is added. A device's legacy default stream and its other streams wait for each other's
// earlier work. This lock decides which work is earlier.
std::mutex& order() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

class Queue : public Stream, public std::enable_shared_from_this<Queue> {
 public:
  Queue(int device, bool with_legacy) : device_(device), with_legacy_(with_legacy) {}

  int device() const override { return device_; }
  bool with_legacy() const { return with_legacy_; }

  uint64_t enqueue(std::function<void()> work, bool delayed) override;

  uint64_t push(std::function<void()> work, bool delayed) {
    std::lock_guard lock(mutex_);
    if (capturing_) {
      captured_.push_back({std::move(work), delayed, 0});
      return last_;
    }
    items_.push_back({std::move(work), delayed, ++last_});
    if (!running_) {
      running_ = true;
      spawn([self = shared_from_this()] { self->run(); });
    }
    changed_.notify_all();
    return last_;
  }

  uint64_t tail() const override {
    std::lock_guard lock(mutex_);
    return last_;
  }

  bool reached(uint64_t number) const override {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }

  bool wait(uint64_t number, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    const auto there = [&] { return done_ >= number; };
    if (deadline) return changed_.wait_until(lock, *deadline, there);
    changed_.wait(lock, there);
    return true;
  }

  bool capturing() const override {
    std::lock_guard lock(mutex_);
    return capturing_;
  }

  void set_capturing(bool capturing) {
    std::lock_guard lock(mutex_);
    capturing_ = capturing;
  }

  std::vector<Item> take_captured() {
    std::lock_guard lock(mutex_);
    return std::exchange(captured_, {});
  }

  // The thread ends only when the queue is empty, so work still runs if its stream was destroyed after the work was enqueued.
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  void run() {
    prctl(PR_SET_NAME, "fake-stream");
    const auto delay = std::chrono::microseconds(fake::number("FAKE_DELAY_US", 300));
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !items_.empty() || closed_; });
      if (items_.empty()) break;
      Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      if (item.delayed && delay.count() > 0) std::this_thread::sleep_for(delay);
      item.work();
      item.work = nullptr;  // frees what the work holds before anyone can see that the work is done
      lock.lock();
      done_ = item.number;
      changed_.notify_all();
    }
    running_ = false;
  }

  const int device_;
  const bool with_legacy_;
  // Protects the fields below.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  std::vector<Item> captured_;
  uint64_t last_ = 0, done_ = 0;
  bool running_ = false, closed_ = false, capturing_ = false;
};

struct Allocation {
  size_t bytes = 0;
  uint64_t id = 0;
  int device = -1;
  int users = 0;  // how many running pieces of work use this memory
  bool managed = false;

  size_t room() const { return up(bytes, managed ? page : grain); }
};

struct Device {
  std::shared_ptr<Queue> legacy;
  std::vector<std::weak_ptr<Queue>> queues;
  std::map<Address, size_t> holes;
  std::atomic<bool> broken{false};
};

struct Event {
  int device = -1;
  Mark mark;
};

thread_local int current_device = -1;
thread_local std::map<int, std::shared_ptr<Queue>> own_streams;

class Machine : public Engine {
 public:
  Machine() {
    // The kernel chooses the addresses of this memory, because TSan and ASan need certain ranges for themselves.
    slice_ = static_cast<size_t>(number("FAKE_DEVICE_MB", 16384)) << 20;
    const int64_t devices = std::max<int64_t>(0, std::min<int64_t>(64, number("FAKE_DEVICES", 4)));
    devices_ = std::vector<Device>(static_cast<size_t>(devices));
    if (!devices) return;
    const size_t all = slice_ * static_cast<size_t>(devices);
    const int file = memfd_create("fake-device-memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(all))) die("memfd_create");
    void* shadow = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* seen = mmap(nullptr, all, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (shadow == MAP_FAILED || seen == MAP_FAILED) die("mmap");
    madvise(shadow, all, MADV_DONTDUMP);
    madvise(seen, all, MADV_DONTDUMP);
    file_ = file;
    shadow_ = static_cast<char*>(shadow);
    seen_ = reinterpret_cast<Address>(seen);
    for (size_t i = 0; i < devices_.size(); ++i) {
      devices_[i].legacy = std::make_shared<Queue>(static_cast<int>(i), false);
      devices_[i].holes[seen_ + i * slice_] = slice_;
    }
  }

  int devices() const override { return static_cast<int>(devices_.size()); }

  Uuid uuid(int device) const override {
    // A device has the same UUID in all processes of the host, as a real card does. If FAKE_DEVICE_UUID is set, the devices get
    // different UUIDs, as if they were on another host.
    const std::string name = text("FAKE_DEVICE_UUID", "stand-in") + "#" + std::to_string(device);
    Uuid uuid{};
    uint64_t hash = 1469598103934665603u;
    for (size_t i = 0; i < 64; ++i) {
      hash = (hash ^ static_cast<unsigned char>(name[i % name.size()])) * 1099511628211u;
      uuid[i % 16] ^= static_cast<unsigned char>(hash >> 32);
    }
    return uuid;
  }

  int current() const override { return current_device; }
  void set_current(int device) override { current_device = device; }

  Address allocate(int device, size_t bytes, bool managed) override {
    std::lock_guard lock(mutex_);
    Device& on = devices_[static_cast<size_t>(device)];
    const Allocation allocation{bytes, ++ids_, device, 0, managed};
    const size_t wanted = allocation.room();
    for (auto hole = on.holes.begin(); hole != on.holes.end(); ++hole) {
      const auto [begin, length] = *hole;
      const Address address = managed ? up(begin, page) : begin;
      if (address - begin + wanted > length) continue;
      on.holes.erase(hole);
      if (address > begin) on.holes[begin] = address - begin;
      if (const size_t left = begin + length - address - wanted) on.holes[address + wanted] = left;
      allocations_[address] = allocation;
      if (managed) protect(address, wanted, PROT_READ | PROT_WRITE);
      memset(shadow(address), junk, std::min(bytes, junk_bytes));
      return address;
    }
    return 0;
  }

  bool release(Address address) override {
    std::lock_guard lock(mutex_);
    const auto found = allocations_.find(address);
    if (found == allocations_.end()) return false;
    const Allocation allocation = found->second;
    allocations_.erase(found);
    Device& on = devices_[static_cast<size_t>(allocation.device)];
    if (allocation.managed) protect(address, allocation.room(), PROT_NONE);
    if (allocation.users) {
      // This memory is never reused. If it were, the running work would write into the next owner's data.
      note("freed_in_use", "device memory was freed while work on it was running");
      return true;
    }
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(address - seen_),
              static_cast<off_t>(allocation.room()));
    give_back(on, address, allocation.room());
    return true;
  }

  Buffer find(Address address, size_t bytes) const override {
    std::lock_guard lock(mutex_);
    const auto found = at(address);
    if (found == allocations_.end()) {
      const bool ours = address >= seen_ && address < seen_ + slice_ * devices_.size();
      return {address, bytes, ours ? Where::device : Where::host};
    }
    const Allocation& in = found->second;
    return {address, bytes, Where::device, in.device, in.id, found->first, in.bytes, in.managed};
  }

  std::shared_ptr<char> open(const Buffer& buffer, int device, bool of_any) override {
    if (!buffer.bytes) return {reinterpret_cast<char*>(1), [](char*) {}};
    std::lock_guard lock(mutex_);
    const auto fail = [&](const char* kind, const std::string& text) {
      note(kind, text);
      devices_[static_cast<size_t>(device)].broken = true;
      return std::shared_ptr<char>();
    };
    const auto found = allocations_.find(buffer.start);
    if (!buffer.allocation) return fail("wild_address", "work on memory that is no device's");
    if (found == allocations_.end() || found->second.id != buffer.allocation)
      return fail("use_after_free", "work on memory that was freed before the stream got there");
    if (buffer.address + buffer.bytes > found->first + found->second.bytes)
      return fail("out_of_bounds", "work beyond the end of an allocation: " + std::to_string(buffer.bytes) + " bytes at offset " +
                                       std::to_string(buffer.address - found->first) + " of " +
                                       std::to_string(found->second.bytes));
    if (!of_any && found->second.device != device)
      return fail("wrong_device",
                  "memory of device " + std::to_string(found->second.device) + " in work of device " + std::to_string(device));
    ++found->second.users;
    return {shadow(buffer.address), [this, start = buffer.start, id = buffer.allocation](char*) {
              std::lock_guard lock(mutex_);
              const auto open = allocations_.find(start);
              if (open != allocations_.end() && open->second.id == id) --open->second.users;
            }};
  }

  Handle create_stream(int device, bool with_legacy) override {
    auto queue = std::make_shared<Queue>(device, with_legacy);
    {
      std::lock_guard lock(order());
      devices_[static_cast<size_t>(device)].queues.push_back(queue);
    }
    std::lock_guard lock(mutex_);
    const Handle handle = next_handle();
    streams_[handle] = std::move(queue);
    return handle;
  }

  bool destroy_stream(Handle handle) override {
    std::lock_guard lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return false;
    found->second->close();
    streams_.erase(found);
    return true;
  }

  std::shared_ptr<Stream> stream(Handle handle, int device) override {
    if (handle > 2) {
      std::lock_guard lock(mutex_);
      const auto found = streams_.find(handle);
      return found == streams_.end() ? nullptr : found->second;
    }
    if (device < 0) return nullptr;
    if (handle < 2) return devices_[static_cast<size_t>(device)].legacy;
    auto& own = own_streams[device];
    if (!own) {
      own = std::make_shared<Queue>(device, true);
      std::lock_guard lock(order());
      devices_[static_cast<size_t>(device)].queues.push_back(own);
    }
    return own;
  }

  // Returns all streams of a device except the legacy default stream. The result includes the non-blocking streams, which do not
  // wait for the legacy default stream.
  std::vector<std::shared_ptr<Queue>> queues(int device) {
    std::vector<std::shared_ptr<Queue>> all;
    auto& known = devices_[static_cast<size_t>(device)].queues;
    std::erase_if(known, [&](const std::weak_ptr<Queue>& one) {
      auto queue = one.lock();
      if (queue) all.push_back(queue);
      return !queue;
    });
    return all;
  }

  std::shared_ptr<Queue> legacy(int device) { return devices_[static_cast<size_t>(device)].legacy; }

  void wait_for(Stream& stream, const Mark& mark) override {
    if (!mark.stream) return;
    stream.enqueue([mark] { mark.stream->wait(mark.number); }, false);
  }

  void set_capturing(Stream& stream, bool capturing) override { static_cast<Queue&>(stream).set_capturing(capturing); }

  Handle take_graph(Stream& stream) override {
    std::lock_guard lock(mutex_);
    const Handle handle = next_handle();
    graphs_[handle] = static_cast<Queue&>(stream).take_captured();
    return handle;
  }

  bool launch_graph(Handle graph, Stream& stream) override {
    std::vector<Item> items;
    {
      std::lock_guard lock(mutex_);
      const auto found = graphs_.find(graph);
      if (found == graphs_.end()) return false;
      items = found->second;
    }
    for (Item& item : items) stream.enqueue(std::move(item.work), item.delayed);
    return true;
  }

  bool destroy_graph(Handle graph) override {
    std::lock_guard lock(mutex_);
    return graphs_.erase(graph) > 0;
  }

  Handle create_event(int device) override {
    std::lock_guard lock(mutex_);
    const Handle handle = next_handle();
    events_[handle].device = device;
    return handle;
  }

  bool destroy_event(Handle handle) override {
    std::lock_guard lock(mutex_);
    return events_.erase(handle) > 0;
  }

  int event_device(Handle handle) const override {
    std::lock_guard lock(mutex_);
    const auto found = events_.find(handle);
    return found == events_.end() ? -1 : found->second.device;
  }

  bool record(Handle handle, std::shared_ptr<Stream> stream) override {
    if (event_device(handle) < 0) return false;
    Mark mark;
    mark.captured = stream->capturing();
    mark.number = stream->enqueue([] {}, false);
    mark.stream = std::move(stream);
    std::lock_guard lock(mutex_);
    const auto found = events_.find(handle);
    if (found == events_.end()) return false;
    found->second.mark = std::move(mark);
    return true;
  }

  std::optional<Mark> mark(Handle handle) const override {
    std::lock_guard lock(mutex_);
    const auto found = events_.find(handle);
    if (found == events_.end()) return {};
    return found->second.mark;
  }

  bool broken(int device) const override { return device >= 0 && devices_[static_cast<size_t>(device)].broken; }

  void violation(const std::string& kind, const std::string& text) override {
    std::lock_guard lock(mutex_);
    note(kind, text);
  }

  void count(const std::string& kind, int64_t change) override {
    std::lock_guard lock(mutex_);
    counts_[kind] += change;
  }

  std::string counters() const override {
    std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (const auto& [_, allocation] : allocations_) bytes += allocation.bytes;
    std::ostringstream json;
    json << "{\"devices\": " << devices_.size() << ", \"streams\": " << streams_.size() << ", \"events\": " << events_.size()
         << ", \"graphs\": " << graphs_.size() << ", \"allocations\": " << allocations_.size() << ", \"bytes\": " << bytes;
    for (const auto& [kind, count] : counts_) json << ", \"" << kind << "\": " << count;
    json << ", \"violations\": {";
    const char* comma = "";
    for (const auto& [kind, count] : violations_) {
      json << comma << "\"" << kind << "\": " << count;
      comma = ", ";
    }
    json << "}, \"texts\": [";
    comma = "";
    for (const std::string& one : texts_) {
      json << comma << "\"" << one << "\"";
      comma = ", ";
    }
    json << "]}";
    return json.str();
  }

 private:
  static void die(const char* what) {
    perror(what);
    abort();
  }

  char* shadow(Address address) const { return shadow_ + (address - seen_); }

  // Sets whether the host can read and write managed memory at this address.
  static void protect(Address address, size_t bytes, int how) {
    if (mprotect(reinterpret_cast<void*>(address), bytes, how)) die("mprotect");
  }

  std::map<Address, Allocation>::const_iterator at(Address address) const {
    auto found = allocations_.upper_bound(address);
    if (found == allocations_.begin()) return allocations_.end();
    --found;
    return address < found->first + std::max<size_t>(found->second.bytes, 1) ? found : allocations_.end();
  }

  static void give_back(Device& on, Address address, size_t bytes) {
    auto next = on.holes.lower_bound(address);
    if (next != on.holes.end() && next->first == address + bytes) {
      bytes += next->second;
      next = on.holes.erase(next);
    }
    if (next != on.holes.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == address) {
        before->second += bytes;
        return;
      }
    }
    on.holes[address] = bytes;
  }

  // A handle is never reused, and is not an address. So a stand-in notices when a dead handle is used, and code that dereferences
  // a handle crashes.
  Handle next_handle() { return 0x51000000 + 16 * ++handles_; }

  void note(const std::string& kind, const std::string& text) {
    ++violations_[kind];
    if (texts_.size() < 32) texts_.push_back(kind + ": " + text);
  }

  size_t slice_ = 0;
  int file_ = -1;
  char* shadow_ = nullptr;
  Address seen_ = 0;
  std::vector<Device> devices_;

  // Protects the fields below and each device's free ranges, `holes`. A thread that needs both order() and this lock takes
  // order() first.
  mutable std::mutex mutex_;
  std::map<Address, Allocation> allocations_;
  std::map<Handle, std::shared_ptr<Queue>> streams_;
  std::map<Handle, Event> events_;
  std::map<Handle, std::vector<Item>> graphs_;
  uint64_t ids_ = 0, handles_ = 0;
  std::map<std::string, int64_t> counts_;
  std::map<std::string, int> violations_;
  std::vector<std::string> texts_;
};

Machine& machine() {
  // The machine is never destroyed, because streams can still be running, or waiting forever, when the process ends.
  static auto& machine = *new Machine;
  return machine;
}

uint64_t Queue::enqueue(std::function<void()> work, bool delayed) {
  // The legacy default stream and the device's other streams wait for each other, except for non-blocking streams.
  std::lock_guard lock(order());
  std::vector<std::shared_ptr<Queue>> before;
  const auto legacy = machine().legacy(device_);
  if (!capturing()) {
    if (legacy.get() == this) {
      for (auto& queue : machine().queues(device_))
        if (queue->with_legacy()) before.push_back(queue);
    } else if (with_legacy_) {
      before.push_back(legacy);
    }
  }
  for (auto& queue : before) {
    const uint64_t tail = queue->tail();
    if (!queue->reached(tail)) push([queue, tail] { queue->wait(tail, {}); }, false);
  }
  return push(std::move(work), delayed);
}

}  // namespace

Engine& engine() { return machine(); }

namespace {
std::mutex driver_mutex;  // protects driver_blocks
std::condition_variable driver_free;
int driver_blocks = 0;  // how many calls hold the driver's lock
}  // namespace

void block_driver(std::shared_ptr<Stream> stream) {
  {
    std::lock_guard lock(driver_mutex);
    driver_blocks++;
  }
  spawn([stream, last = stream->tail()] {
    stream->wait(last);
    std::lock_guard lock(driver_mutex);
    driver_blocks--;
    driver_free.notify_all();
  });
}

void enter_driver() {
  std::unique_lock lock(driver_mutex);
  driver_free.wait(lock, [] { return driver_blocks == 0; });
}

}  // namespace fake
