#include "communicator.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace fake {

namespace {

constexpr std::chrono::milliseconds look_again{3};

// With FAKE_ONE_AT_A_TIME=1, a device runs one launch at a time, in the order in which the host issued the launches. If two ranks
// issue the launches of two communicators in different orders, they always hang. Without this setting, they hang only sometimes.
class Turns {
 public:
  explicit Turns(int device) : device_(device) {
    std::lock_guard lock(mutex());
    mine_ = next()++;
    waiting()[device].insert(mine_);
  }
  ~Turns() {
    std::lock_guard lock(mutex());
    waiting()[device_].erase(mine_);
  }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  bool has_come() const {
    static const bool counts = number("FAKE_ONE_AT_A_TIME", 0) != 0;
    std::lock_guard lock(mutex());
    return !counts || *waiting()[device_].begin() == mine_;
  }

 private:
  static std::mutex& mutex() {
    static auto& one = *new std::mutex;
    return one;
  }
  static std::map<int, std::set<uint64_t>>& waiting() {
    static auto& all = *new std::map<int, std::set<uint64_t>>;
    return all;
  }
  static uint64_t& next() {
    static uint64_t number = 0;
    return number;
  }

  const int device_;
  uint64_t mine_;
};

// Protects a map that records, for each communicator, which thread is inside a call on the communicator, and how many nested
// calls this thread has made.
std::mutex inside_mutex;
std::map<const Communicator*, std::pair<std::thread::id, int>>& inside() {
  static auto& all = *new std::map<const Communicator*, std::pair<std::thread::id, int>>;
  return all;
}

}  // namespace

Communicator::Communicator(Engine& engine, const std::string& id, int size, int rank, int device, int fault, int lost)
    : size(size), rank(rank), device(device), id(id), engine_(engine), meeting_(id, size, rank), fault_(fault), lost_(lost) {}

Communicator::~Communicator() = default;

Meeting::Watch Communicator::watch() {
  return {[this] { return stopped_.load(); },
          [this](int) {
            int none = 0;
            error.compare_exchange_strong(none, lost_);
          }};
}

uint64_t Communicator::take_number() {
  std::lock_guard lock(mutex_);
  return next_++;
}

void Communicator::finish(uint64_t number) {
  std::lock_guard lock(mutex_);
  early_.insert(number);
  while (early_.erase(done_)) ++done_;
  changed_.notify_all();
}

void Communicator::launch(std::vector<Operation> operations) {
  std::vector<std::shared_ptr<Stream>> streams;
  for (const Operation& operation : operations)
    if (std::find(streams.begin(), streams.end(), operation.stream) == streams.end()) streams.push_back(operation.stream);
  auto first = streams.front();
  for (size_t i = 1; i < streams.size(); ++i) engine_.wait_for(*first, {streams[i], streams[i]->tail(), false});
  auto self = shared_from_this();
  auto work = std::make_shared<const std::vector<Operation>>(std::move(operations));
  if (first->capturing()) {
    // A graph can run this work repeatedly, so the work takes a new number each time it runs.
    first->enqueue([self, work] {
      const uint64_t number = self->take_number();
      self->run(*work, number);
      self->finish(number);
    });
    return;
  }
  // If two threads issue launches at the same time, class Inside counts a violation, but does not stop them. Without this lock,
  // the launch with the later number could come first on a stream, and would wait there for the earlier number forever.
  std::lock_guard lock(issuing_);
  const uint64_t number = take_number();
  // The stream releases this turn when the launch has completed.
  const std::shared_ptr<Turns> turn(new Turns(device), [self, number](Turns* own) {
    delete own;
    self->finish(number);
  });
  const uint64_t place = first->enqueue([self, work, number, turn] {
    while (!turn->has_come() && !self->stopped_) std::this_thread::sleep_for(look_again / 3);
    self->run(*work, number);
  });
  for (size_t i = 1; i < streams.size(); ++i) engine_.wait_for(*streams[i], {first, place, false});
}

void Communicator::run(const std::vector<Operation>& operations, uint64_t number) {
  {
    std::unique_lock lock(mutex_);
    while (done_ != number) {
      if (stopped_) return;
      changed_.wait_for(lock, look_again);
    }
    if (stopped_) return;
    ++running_;
  }
  execute(operations, watch());
  std::lock_guard lock(mutex_);
  --running_;
  changed_.notify_all();
}

bool Communicator::execute(const std::vector<Operation>& operations, const Meeting::Watch& watch) {
  const auto for_ever = [&] {
    while (!watch.stopped()) std::this_thread::sleep_for(look_again);
    return false;
  };
  const auto fault = [&] {
    int none = 0;
    error.compare_exchange_strong(none, fault_);
    return false;
  };
  for (const Operation& operation : operations) {
    if (operation.dies) kill(getpid(), SIGKILL);
    if (operation.fails_later) error = operation.fails_later;
    if (operation.hangs || operation.fails_later) return for_ever();
  }
  std::vector<std::shared_ptr<char>> opened;
  const auto open = [&](const Buffer& buffer) {
    opened.push_back(engine_.open(buffer, device));
    return opened.back().get();
  };
  std::vector<Message> messages;
  for (const Operation& operation : operations) {
    char* send = open(operation.send);
    char* receive = open(operation.receive);
    if (!send || !receive) return fault();
    if (!operation.collective) {
      messages.push_back({operation.sends, operation.peer, operation.sends ? send : receive,
                          operation.sends ? operation.send.bytes : operation.receive.bytes, operation.signature.type});
      continue;
    }
    const Call call{operation.signature, send, receive, operation.scaled, operation.factor};
    if (!meeting_.run(call, watch)) return false;
  }
  return messages.empty() || meeting_.run(std::move(messages), watch);
}

bool Communicator::drain() {
  std::unique_lock lock(mutex_);
  while (done_ != next_) {
    if (stopped_) return false;
    changed_.wait_for(lock, look_again);
  }
  return true;
}

bool Communicator::idle() {
  std::lock_guard lock(mutex_);
  return done_ == next_;
}

void Communicator::stop() {
  stopped_ = true;
  std::unique_lock lock(mutex_);
  while (running_) changed_.wait_for(lock, look_again);
}

Communicator::Inside::Inside(Engine* engine, Communicator* communicator) : communicator_(communicator) {
  if (!communicator) return;
  const auto me = std::this_thread::get_id();
  std::lock_guard lock(inside_mutex);
  for (const auto& [other, who] : inside()) {
    if (who.first == me) continue;
    if (other == communicator) engine->violation("threads", "two threads were inside calls on one communicator at once");
    else if (other->device == communicator->device)
      engine->violation("device_threads", "two threads were inside calls on communicators of device " +
                                              std::to_string(communicator->device) + " at once");
  }
  auto& mine = inside()[communicator];
  if (!mine.second || mine.first == me) {
    mine.first = me;
    ++mine.second;
  } else {
    communicator_ = nullptr;  // the destructor of this Inside then does nothing, because the other thread is still inside
  }
}

Communicator::Inside::~Inside() {
  if (!communicator_) return;
  std::lock_guard lock(inside_mutex);
  const auto found = inside().find(communicator_);
  if (found != inside().end() && !--found->second.second) inside().erase(found);
}

int inject(Operation& operation, int rank) {
  const int nth = called(operation.name);
  if (const Injection* die = injected("FAKE_DIE", operation.name, nth, rank)) {
    if (!die->code) kill(getpid(), SIGKILL);
    operation.dies = true;  // with "all_reduce:3:1", the process dies when the device reaches the operation
  }
  if (injected("FAKE_HANG", operation.name, nth, rank)) operation.hangs = true;
  if (const Injection* later = injected("FAKE_ASYNC_FAIL", operation.name, nth, rank)) operation.fails_later = later->code;
  const Injection* now = injected("FAKE_FAIL", operation.name, nth, rank);
  return now ? now->code : 0;
}

Engine* find_engine(std::initializer_list<const char*> sonames, const void* inside_this_library) {
  void* library = nullptr;
  for (const char* soname : sonames)
    if (!library) library = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
  Dl_info self{};
  if (!library && dladdr(inside_this_library, &self) && self.dli_fname) {
    const std::string path = self.dli_fname;
    const std::string folder = path.substr(0, path.find_last_of('/'));
    for (const char* soname : sonames)
      for (const std::string& beside : {folder + "/" + soname, folder + "/../" + soname})
        if (!library && !access(beside.c_str(), R_OK)) library = dlopen(beside.c_str(), RTLD_NOW);
  }
  for (const char* soname : sonames)
    if (!library) library = dlopen(soname, RTLD_NOW);
  if (!library) return nullptr;
  const auto find = reinterpret_cast<Engine* (*)()>(dlsym(library, "fake_engine"));
  return find ? find() : nullptr;
}

}  // namespace fake
