// Tests the vendor backend on a device that is simulated by threads. The tests check which library operations make up a call, how
// calls are watched, and how groups are aborted and freed.
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/communicator.h"
#include "no_backend.h"

using namespace mscomm;

namespace {

// How many more threads this thread can start before the system refuses one. -1 means that it refuses none.
thread_local int threads_until_failure = -1;

}  // namespace

// Replaces the function that std::thread calls.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                              void* argument) noexcept {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_until_failure >= 0 && threads_until_failure-- == 0) return EAGAIN;
  return real(thread, attributes, function, argument);
}

namespace {

using Task = std::function<void()>;

// Runs the enqueued tasks in order, on the queue's own thread.
class Queue {
 public:
  Queue() : thread_([this] { work(); }) {}
  ~Queue() {
    push([this] { stopping_ = true; });
    thread_.join();
  }
  uint64_t push(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
    return ++pushed_;
  }
  uint64_t pushed() const {
    const std::lock_guard lock(mutex_);
    return pushed_;
  }
  bool reached(uint64_t number) const {
    const std::lock_guard lock(mutex_);
    return done_ >= number;
  }
  void wait(uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }
  void drain() { wait(pushed()); }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
      done_++;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0, done_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

struct Event {
  Queue* queue = nullptr;
  uint64_t number = 0;
  std::shared_ptr<std::atomic<int>> waits =
      std::make_shared<std::atomic<int>>(0);  // streams that have yet to reach a wait for it
};

// Keeps threads waiting while it is closed.
class Gate {
 public:
  void close() { set(true); }
  void open() { set(false); }
  void pass() {
    std::unique_lock lock(mutex_);
    inside++;
    changed_.wait(lock, [this] { return !closed_; });
    inside--;
  }
  std::atomic<int> inside{0};  // threads that wait

 private:
  void set(bool closed) {
    const std::lock_guard lock(mutex_);
    closed_ = closed;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
};

// Waits until `condition` holds. Returns false if it does not hold within 20 s.
bool soon(const std::function<bool()>& condition) {
  const Deadline deadline(20);
  while (!condition() && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

class Device final : public Runtime {
 public:
  std::string version() const override { return "threads"; }
  int devices() const override { return 1; }
  std::string device_name(int) const override { return "thread"; }
  std::string uuid(int) const override { return "T"; }
  void use(int) override {}
  StreamHandle make_stream() override {
    alive++;
    return new Queue;
  }
  void destroy_stream(StreamHandle stream) noexcept override {
    alive--;
    delete queue(stream);
  }
  EventHandle make_event() override {
    alive++;
    return new Event;
  }
  void destroy_event(EventHandle event) noexcept override {
    alive--;
    if (!events_can_be_used_again()) CHECK(*static_cast<Event*>(event)->waits == 0);
    delete static_cast<Event*>(event);
  }
  void record(EventHandle event, StreamHandle stream) override {
    auto* const recorded = static_cast<Event*>(event);
    recorded->queue = queue(stream), recorded->number = queue(stream)->pushed();
  }
  void wait(StreamHandle stream, EventHandle event) override {
    driver.pass();
    const Event seen = *static_cast<Event*>(event);
    ++*seen.waits;
    queue(stream)->push([seen] {
      seen.queue->wait(seen.number);
      --*seen.waits;
    });
  }
  bool passed(EventHandle event) override {
    driver.pass();
    if (breaks) throw std::runtime_error("no query");
    const auto* seen = static_cast<Event*>(event);
    return seen->queue->reached(seen->number);
  }
  void clear(void* memory, size_t bytes, StreamHandle stream) override {
    queue(stream)->push([=] { std::memset(memory, 0, bytes); });
  }
  void copy(void* to, const void* from, size_t bytes, StreamHandle stream) override {
    queue(stream)->push([=] { std::memcpy(to, from, bytes); });
  }
  bool events_can_be_used_again() const override { return reuses; }
  void leave_captures_alone() override {  // called by the watcher's threads alone
    if (unusable) throw std::runtime_error("no device");
  }
  int device_of(const void*) override { return 0; }
  void* allocate(size_t bytes) override { return new char[bytes]; }
  void free(void* memory) noexcept override { delete[] static_cast<char*>(memory); }
  bool captures(StreamHandle) override { return capturing; }

  static Queue* queue(StreamHandle stream) { return static_cast<Queue*>(stream); }
  std::atomic<int> alive{0};
  std::atomic<bool> capturing{false}, reuses{true}, breaks{false}, unusable{false};
  Gate driver;  // a thread that waits or queries passes through it

 private:
  bool push(int) override { return false; }
  void pop() noexcept override {}
};

// Lets the operations of a group's ranks wait for each other. The n-th operations of all ranks form one joint operation.
class Hall {
 public:
  explicit Hall(int size) : size_(static_cast<size_t>(size)) {}

  struct Part {
    const void* x = nullptr;
    void* out = nullptr;
    std::map<int, std::pair<void*, size_t>> sends{}, receives{};  // keyed by peer
  };
  // A stream's thread calls meet(), which waits until all ranks have arrived. The last rank to arrive calls `act` with the parts
  // of all ranks. Returns false if this rank was aborted before all ranks had arrived.
  bool meet(uint64_t number, int rank, Part part, const std::function<void(std::map<int, Part>&)>& act) {
    std::unique_lock lock(mutex_);
    auto& here = meetings_[number];
    here[rank] = std::move(part);
    if (here.size() == size_) {
      act(here);
      done_.insert(number);
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return aborted_.contains(rank) || done_.contains(number); });
    return done_.contains(number);
  }
  void abort(int rank) {
    const std::lock_guard lock(mutex_);
    aborted_.insert(rank);
    changed_.notify_all();
  }

 private:
  const size_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::map<int, Part>> meetings_;
  std::set<uint64_t> done_;
  std::set<int> aborted_;
};

// Tells all groups of a test how to behave, and counts what they do.
struct Conditions {
  std::atomic<bool> busy{false};  // what busy() returns
  std::atomic<int> error{0};      // if not 0, busy() throws
  std::atomic<int> groups{0};     // groups that exist
  std::atomic<int> inside{0};     // threads that are enqueueing an operation
  std::atomic<int> crowded{0};    // how often a thread began while another was inside
  std::atomic<int> aborts{0}, finishes{0};
  std::function<void()> at_abort;  // called by the thread that aborts a group
};

class Inside {
 public:
  explicit Inside(Conditions& at) : at_(at) {
    if (++at_.inside > 1) at_.crowded++;
  }
  ~Inside() { --at_.inside; }

 private:
  Conditions& at_;
};

class GroupOfThreads final : public VendorGroup {
 public:
  GroupOfThreads(Conditions& at, std::shared_ptr<Hall> hall, int rank) : at_(at), hall_(std::move(hall)), rank_(rank) {
    at_.groups++;
  }
  ~GroupOfThreads() override { at_.groups--; }

  void all_reduce(const void* x, void* out, size_t count, Dtype, Op, StreamHandle stream) override {
    enqueue(stream, {x, out}, [count](std::map<int, Hall::Part>& parts) {
      std::vector<int32_t> total(count);
      for (const auto& [rank, part] : parts)
        for (size_t i = 0; i < count; i++) total[i] += static_cast<const int32_t*>(part.x)[i];
      for (const auto& [rank, part] : parts) std::memcpy(part.out, total.data(), 4 * count);
    });
  }
  void reduce(const void* x, void* out, size_t count, Dtype, Op, int root, StreamHandle stream) override {
    enqueue(stream, {x, out}, [count, root](std::map<int, Hall::Part>& parts) {
      std::vector<int32_t> total(count);
      for (const auto& [rank, part] : parts)
        for (size_t i = 0; i < count; i++) total[i] += static_cast<const int32_t*>(part.x)[i];
      std::memcpy(parts[root].out, total.data(), 4 * count);
    });
  }
  void reduce_scatter(const void*, void*, size_t, Dtype, Op, StreamHandle) override { CHECK(false); }
  void all_gather(const void*, void*, size_t, StreamHandle) override { CHECK(false); }
  void broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) override {
    enqueue(stream, {x, out}, [bytes, root](std::map<int, Hall::Part>& parts) {
      for (const auto& [rank, part] : parts)
        if (part.out != parts[root].x) std::memcpy(part.out, parts[root].x, bytes);
    });
  }
  void exchange(std::span<const mscomm::Part> parts, StreamHandle stream) override {
    Hall::Part mine;
    for (const mscomm::Part& part : parts) (part.sends ? mine.sends : mine.receives)[part.peer] = {part.data, part.bytes};
    enqueue(stream, mine, [](std::map<int, Hall::Part>& everybody) {
      for (auto& [rank, part] : everybody)
        for (const auto& [peer, to] : part.receives) {
          const auto from = everybody[peer].sends[rank];
          if (CHECK(from.second == to.second)) std::memcpy(to.first, from.first, to.second);
        }
    });
  }
  void batch(const std::function<void()>& calls) override { calls(); }
  bool busy() override {
    if (at_.error) throw Error("Error", "the device failed");
    return at_.busy;
  }
  void abort(bool) noexcept override {
    if (at_.at_abort) at_.at_abort();
    at_.aborts++;
    hall_->abort(rank_);
  }
  void finish() override { at_.finishes++; }

 private:
  void enqueue(StreamHandle stream, Hall::Part part, std::function<void(std::map<int, Hall::Part>&)> act) {
    const Inside inside(at_);
    Device::queue(stream)->push(
        [hall = hall_, rank = rank_, part, act, number = ++number_] { hall->meet(number, rank, part, act); });
  }

  Conditions& at_;
  const std::shared_ptr<Hall> hall_;
  const int rank_;
  uint64_t number_ = 0;
};

class ThreadVendor final : public Vendor {
 public:
  std::string_view name() const override { return "threads"; }
  std::string version() const override { return "1"; }
  const std::string& path() const override { return path_; }
  const std::string& origin() const override { return path_; }
  std::string refuses(Dtype dtype, Op) const override { return dtype == Dtype::int32 ? "" : "int32 alone"; }
  std::string make_id() override { return std::to_string(ids_++); }
  std::unique_ptr<VendorGroup> join(const std::string& id, int size, int rank, std::shared_ptr<Runtime>, int) override {
    const std::lock_guard lock(mutex_);
    auto& hall = halls_[id];
    if (!hall) hall = std::make_shared<Hall>(size);
    return std::make_unique<GroupOfThreads>(at, hall, rank);
  }

  Conditions at;

 private:
  const std::string path_ = "here";
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Hall>> halls_;
  int ids_ = 0;
};

// Holds one rank of a job, and the user's stream.
struct Rank {
  Rank(std::shared_ptr<ThreadVendor> vendor, std::shared_ptr<Device> device, const std::string& id, int size, int rank)
      : device(device) {
    std::vector<std::string> names;
    for (int i = 0; i < size; i++) names.push_back("rank " + std::to_string(i) + " (here)");
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    auto peers = std::make_shared<Peers>(names, ranks, std::vector<Descriptor>(names.size()), nullptr);
    Communicator::Hooks hooks{{}, {}, [this] { told++; }};
    group = std::make_unique<Communicator>("world", ranks, rank, peers, std::make_unique<NoBackend>(), 7, true, recorder, hooks);
    group->add_device(std::make_unique<VendorBackend>(vendor, device, 0, id, size, rank, Deadline(60), [] {}));
  }

  Call call(Collective what, const std::vector<int32_t>& x, std::vector<int32_t>& out, size_t count, int root = -1,
            std::vector<uint64_t> counts = {}) {
    Call call;
    Signature& signature = call.signature;
    signature.what = what;
    signature.function = static_cast<Function>(what);
    signature.dtype = Dtype::int32;
    signature.root = root;
    signature.dims = 1;
    signature.shape[0] = signature.count = count;
    signature.device = 1;
    call.x = x.data(), call.x_bytes = 4 * x.size();
    call.out = out.data(), call.out_bytes = 4 * out.size();
    call.counts = std::move(counts);
    call.stream = &stream;
    return call;
  }

  const std::shared_ptr<Device> device;
  Recorder recorder;
  std::atomic<int> told{0};
  Queue stream;
  std::unique_ptr<Communicator> group;
};

// Creates a job of `size` ranks in this process.
struct Job {
  explicit Job(int size) : vendor(std::make_shared<ThreadVendor>()), device(std::make_shared<Device>()) {
    const std::string id = vendor->make_id();
    for (int rank = 0; rank < size; rank++) ranks.push_back(std::make_unique<Rank>(vendor, device, id, size, rank));
  }
  void each(const std::function<void(Rank&, int)>& part) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks.size(); i++) threads.emplace_back([&, i] { part(*ranks[i], static_cast<int>(i)); });
    for (std::thread& thread : threads) thread.join();
  }

  const std::shared_ptr<ThreadVendor> vendor;
  const std::shared_ptr<Device> device;
  std::vector<std::unique_ptr<Rank>> ranks;
};

using Numbers = std::vector<int32_t>;

void test_composed_collectives() {
  Job job(3);
  job.each([](Rank& rank, int me) {
    Numbers mine(4, me), parts{10 * me, 10 * me + 1, 10 * me + 2}, all(12), gathered(12), part(1), exchanged(3), sum(4);
    rank.group->run(rank.call(Collective::all_reduce, mine, sum, 4), 60);
    Numbers nothing;
    rank.group->run(rank.call(Collective::gather, mine, me == 1 ? gathered : nothing, 4, 1), 60);
    rank.group->run(rank.call(Collective::scatter, me == 2 ? parts : nothing, part, 3, 2), 60);
    rank.group->run(rank.call(Collective::all_to_all, parts, exchanged, 3), 60);
    // The ranks have 1, 2 and 0 elements.
    const std::vector<uint64_t> counts{1, 2, 0};
    Numbers rows(counts[static_cast<size_t>(me)], me), uneven(3), reduced(rows.size());
    rank.group->run(rank.call(Collective::all_gather, rows, uneven, 3, -1, counts), 60);
    rank.group->run(rank.call(Collective::reduce_scatter, parts, reduced, 3, -1, counts), 60);
    rank.stream.drain();
    CHECK(sum == Numbers(4, 3));
    if (me == 1) CHECK(gathered == Numbers{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2});
    CHECK(part == Numbers{20 + me});
    CHECK(exchanged == Numbers{me, 10 + me, 20 + me});
    CHECK(uneven == Numbers{0, 1, 1});
    CHECK(reduced == (me == 0 ? Numbers{30} : me == 1 ? Numbers{33, 36} : Numbers{}));
    rank.group->close();
  });
  CHECK(job.device->alive == 0 && job.vendor->at.groups == 0 && job.vendor->at.finishes == 3 && job.vendor->at.aborts == 0);
}

void test_calls_beside_and_their_order() {
  Job job(2);
  job.each([](Rank& rank, int me) {
    Numbers x(8), out(8);
    rank.stream.push([&] {  // slow work; the call on the group's own stream must wait for it
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      x.assign(8, me + 1);
    });
    const auto work = rank.group->start(rank.call(Collective::all_reduce, x, out, 8), 60);
    rank.group->device().order(work->number(), &rank.stream);
    Numbers seen;
    rank.stream.push([&] { seen = out; });
    rank.stream.drain();
    CHECK(seen == Numbers(8, 3));
    CHECK(work->wait(60) && !work->error());
    rank.group->device().order(work->number(), &rank.stream);  // the call has completed, so there is nothing to wait for
    rank.group->close();
  });
  CHECK(job.device->alive == 0);
}

void test_a_call_after_a_pause_is_seen() {
  Job job(1);
  Rank& rank = *job.ranks[0];
  Numbers x(8, 1), out(8);
  // When the second call is made, the watcher thread is still polling the device. By the third call, it has gone to sleep.
  for (const int pause_ms : {0, 5, 300}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    const auto work = rank.group->start(rank.call(Collective::all_reduce, x, out, 8), 60);
    CHECK(work->wait(60) && !work->error());
  }
  rank.group->close();
}

void test_a_missing_rank_ends_at_the_deadline() {
  Job job(2);
  Rank& rank = *job.ranks[0];
  Numbers x(8), out(8);
  const auto work = rank.group->start(rank.call(Collective::all_reduce, x, out, 8), 0.1);
  CHECK(work->wait(60));
  const auto error = work->error();
  CHECK(error && error->kind == "CollectiveTimeout" &&
        std::string(error->what()).find("rank 0 (here): all_reduce #1 (32 B): it was enqueued, but did not end on the device") ==
            0);
  CHECK(soon([&] { return rank.told > 0; }));
  try {
    rank.group->run(rank.call(Collective::all_reduce, x, out, 8), 60);
    CHECK(false);
  } catch (const Error& again) {
    CHECK(again.kind == "CollectiveTimeout");
  }
  rank.stream.drain();  // returns because the abort has let the stream continue
  rank.group->close();
  CHECK(job.vendor->at.aborts > 0);
}

void test_an_error_of_the_device_breaks_the_group() {
  Job job(2);
  Rank& rank = *job.ranks[0];
  Numbers x(8), out(8);
  rank.group->run(rank.call(Collective::all_reduce, x, out, 8), 60);
  job.vendor->at.error = 1;
  const Deadline deadline(60);
  while (!rank.group->failure() && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(rank.group->failure() && std::string(rank.group->failure()->error.what()).find("the device failed") != std::string::npos);
  job.vendor->at.error = 0;
  rank.stream.drain();
}

void test_the_end_of_the_watching_thread_breaks_the_group() {
  Job job(2);
  Rank& rank = *job.ranks[0];
  Numbers x(8), out(8);
  rank.group->run(rank.call(Collective::all_reduce, x, out, 8), 60);
  job.device->breaks = true;
  CHECK(soon([&] { return rank.group->failure().has_value(); }));
  CHECK(rank.group->failure() &&
        std::string(rank.group->failure()->error.what()).find("the thread that watches the device has failed: no query") !=
            std::string::npos);
  rank.stream.drain();  // returns because the other thread has aborted the group
}

void test_abort_ends_a_call_that_cannot_be_enqueued() {
  Job job(2);
  Rank& rank = *job.ranks[0];
  Numbers x(8), out(8);
  job.vendor->at.busy = true;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    rank.group->abort({Error("Aborted", "enough", {1}), true});
  });
  try {
    rank.group->run(rank.call(Collective::all_reduce, x, out, 8), 60);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(std::string(error.what()) == "enough");
  }
  other.join();
  job.vendor->at.busy = false;
  rank.stream.drain();
}

// Another thread of the process is in the driver, which waits for the call on the device. All calls of the driver wait for it.
// Only an abort ends the call.
void test_abort_ends_a_call_that_blocks_the_driver() {
  Job job(2);
  Rank& rank = *job.ranks[0];
  job.vendor->at.at_abort = [&] { job.device->driver.open(); };
  Numbers x(8), out(8);
  const auto work = rank.group->start(rank.call(Collective::all_reduce, x, out, 8), 60);
  job.device->driver.close();
  std::thread orders([&] { rank.group->device().order(work->number(), &rank.stream); });
  CHECK(soon([&] { return job.device->driver.inside == 2; }));  // the watcher, too
  std::atomic<bool> told{false};
  std::thread aborts([&] {
    rank.group->abort({Error("PeerLost", "rank 1 is lost", {1}), true});
    told = rank.group->failure().has_value();
  });
  CHECK(soon([&] { return told && job.vendor->at.aborts == 1; }));
  job.device->driver.open();  // lets the test end if there was no abort
  aborts.join();
  orders.join();
  CHECK(work->wait(60) && work->error() && work->error()->kind == "PeerLost");
  rank.stream.drain();
  rank.group->close();
}

// The library may keep the thread that aborts a group for long.
void test_a_group_that_cannot_be_joined_is_aborted_by_another_thread() {
  const auto vendor = std::make_shared<ThreadVendor>();
  std::atomic<std::thread::id> aborted_by{};
  vendor->at.busy = true;
  vendor->at.at_abort = [&] { aborted_by = std::this_thread::get_id(); };
  try {
    const VendorBackend backend(vendor, std::make_shared<Device>(), 0, vendor->make_id(), 2, 0, Deadline(60),
                                [] { throw Error("PeerLost", "rank 1 is lost"); });
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind == "PeerLost");
  }
  CHECK(vendor->at.aborts == 1 && vendor->at.groups == 0 && aborted_by.load() != std::this_thread::get_id());
}

// If the system refuses one of the watcher's threads, or the threads cannot use the device, the join fails at once and says why.
void test_a_group_cannot_be_joined_without_its_threads() {
  const auto device = std::make_shared<Device>();
  for (const bool busy : {false, true})  // whether the library's join never ends
    for (const int started : {0, 1, 2}) {
      const auto vendor = std::make_shared<ThreadVendor>();
      vendor->at.busy = busy;
      device->unusable = started == 2;
      threads_until_failure = started == 2 ? -1 : started;
      const auto began = Clock::now();
      std::string error;
      try {
        const VendorBackend backend(vendor, device, 0, vendor->make_id(), 2, 0, Deadline(10), [] {});
      } catch (const Error& caught) {
        error = caught.what();
      }
      threads_until_failure = -1;
      CHECK(error.find(started == 2 ? "the thread that watches the device has failed: no device" : "cannot start a thread") == 0);
      CHECK(seconds_since(began) < aborts_within_s / 2);  // no thread was waited for in vain
      CHECK(vendor->at.groups == 0);
    }
}

// An abort may come while the device joins, or before.
void test_a_device_that_joins_a_broken_group_is_aborted() {
  const auto vendor = std::make_shared<ThreadVendor>();
  auto peers = std::make_shared<Peers>(std::vector<std::string>{"rank 0"}, std::vector{0}, std::vector<Descriptor>(1), nullptr);
  Recorder recorder;
  Communicator group("world", {0}, 0, peers, std::make_unique<NoBackend>(), 7, true, recorder, {});
  group.abort({Error("Aborted", "enough", {0}), true});
  group.add_device(
      std::make_unique<VendorBackend>(vendor, std::make_shared<Device>(), 0, vendor->make_id(), 1, 0, Deadline(60), [] {}));
  CHECK(soon([&] { return vendor->at.aborts == 1; }));
}

// A thread stays in the library, so the group is aborted beside it. Then its handle must not be used again.
void test_an_aborted_group_is_not_asked() {
  const auto vendor = std::make_shared<ThreadVendor>();
  SharedGroup group(vendor);
  group.join(vendor->make_id(), 1, 0, std::make_shared<Device>(), 0);
  Gate library;
  library.close();
  std::thread caller([&] { group.ask([&](VendorGroup&) { library.pass(); }); });
  CHECK(soon([&] { return library.inside == 1; }));
  group.abort();
  CHECK(vendor->at.aborts == 1);
  library.open();
  caller.join();
  vendor->at.error = 1;  // a question would throw
  group.look();
}

// Without aclrtCreateEventExWithFlag, AscendCL's events cannot be used again. A stream may reach its wait for an event long after
// the event has passed.
void test_an_event_lives_until_no_stream_waits_for_it() {
  Job job(1);
  job.device->reuses = false;
  Rank& rank = *job.ranks[0];
  Numbers x(8, 1), out(8);
  Gate slow;
  for (int turn = 0; turn < 3; turn++) {
    slow.close();
    for (int i = 0; i < 3; i++) {
      const auto work = rank.group->start(rank.call(Collective::all_reduce, x, out, 8), 60);
      if (i == 0) rank.stream.push([&] { slow.pass(); });
      rank.group->device().order(work->number(), &rank.stream);
      if (i == 0) CHECK(work->wait(60));  // the event has passed, and the stream has not reached the wait
    }
    slow.open();
    rank.stream.drain();
    CHECK(soon([&] { return rank.group->device().pending() == 0; }));
  }
  // What is left: the group's stream, and the pairs of events of the last turn.
  CHECK(soon([&] { return job.device->alive <= 1 + 2 * 3; }));
  rank.group->close();
  CHECK(job.device->alive == 0);
}

void test_two_groups_on_one_device_are_not_in_the_library_at_once() {
  const auto vendor = std::make_shared<ThreadVendor>();
  const auto device = std::make_shared<Device>();
  std::vector<std::unique_ptr<Rank>> groups;
  for (int i = 0; i < 2; i++) groups.push_back(std::make_unique<Rank>(vendor, device, vendor->make_id(), 1, 0));
  std::vector<std::thread> threads;
  for (auto& group : groups)
    threads.emplace_back([&group] {
      Numbers x(8, 1), out(8);
      for (int i = 0; i < 200; i++) group->group->run(group->call(Collective::all_reduce, x, out, 8), 60);
      group->stream.drain();
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(vendor->at.crowded == 0);
  for (auto& group : groups) group->group->close();
  CHECK(device->alive == 0);
}

void test_the_end_with_calls_under_way() {
  Job job(2);
  Numbers x(8), out(8);
  job.ranks[0]->group->run(job.ranks[0]->call(Collective::all_reduce, x, out, 8), 60);
  job.ranks[0]->group.reset();  // the destructor aborts the library's group
  CHECK(job.vendor->at.aborts > 0);
  job.ranks[0]->stream.drain();
}

void test_a_captured_call_is_not_watched() {
  Job job(1);
  Rank& rank = *job.ranks[0];
  Numbers x(8, 5), out(8);
  job.device->capturing = true;
  const auto work = rank.group->start(rank.call(Collective::all_reduce, x, out, 8), 60);
  CHECK(work->done());
  job.device->capturing = false;
  rank.stream.drain();
  CHECK(out == x);
  rank.group->close();
  CHECK(job.device->alive == 0);
}

void test_what_the_library_refuses() {
  Job job(1);
  Rank& rank = *job.ranks[0];
  Numbers x(8), out(8);
  Call call = rank.call(Collective::all_reduce, x, out, 8);
  call.signature.dtype = Dtype::float32;
  try {
    rank.group->run(std::move(call), 60);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("int32 alone") != std::string::npos);
  }
}

}  // namespace

SUITE(vendor) {
  test_composed_collectives();
  test_calls_beside_and_their_order();
  test_a_call_after_a_pause_is_seen();
  test_a_missing_rank_ends_at_the_deadline();
  test_an_error_of_the_device_breaks_the_group();
  test_the_end_of_the_watching_thread_breaks_the_group();
  test_abort_ends_a_call_that_cannot_be_enqueued();
  test_abort_ends_a_call_that_blocks_the_driver();
  test_a_group_that_cannot_be_joined_is_aborted_by_another_thread();
  test_a_group_cannot_be_joined_without_its_threads();
  test_a_device_that_joins_a_broken_group_is_aborted();
  test_an_aborted_group_is_not_asked();
  test_an_event_lives_until_no_stream_waits_for_it();
  test_two_groups_on_one_device_are_not_in_the_library_at_once();
  test_the_end_with_calls_under_way();
  test_a_captured_call_is_not_watched();
  test_what_the_library_refuses();
}
