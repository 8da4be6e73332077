#include "meeting.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

namespace fake {

namespace {

constexpr uint64_t file_tag = 0x656b61664d656574;
constexpr const char* file_prefix = "mscomm-fake-";
enum : uint32_t { empty, seated, gone };

uint64_t start_time(pid_t process) {
  // The start time is field 22 of stat. The process's name is in an earlier field and can contain any characters, so count the
  // fields from the end of the name. A zombie counts as dead.
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string all((std::istreambuf_iterator<char>(file)), {});
  const size_t end = all.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(all.substr(end + 1));
  std::string field;
  for (int i = 3; i <= 22 && fields >> field; ++i) {
    if (i == 3 && (field == "Z" || field == "X")) return 0;
    if (i == 22) return std::stoull(field);
  }
  return 0;
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

size_t page_up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

uint64_t hash_of(const void* data, size_t bytes, uint64_t seed) {
  uint64_t hash = seed;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  return hash;
}

std::string hex_id(const void* data, size_t bytes) {
  // The name depends on all bytes of the id. So a rank with a truncated id does not find the other ranks' file.
  char name[33];
  snprintf(name, sizeof name, "%016llx%016llx", static_cast<unsigned long long>(hash_of(data, bytes)),
           static_cast<unsigned long long>(hash_of(data, bytes, 0x9e3779b97f4a7c15)));
  return name;
}

uint64_t this_boot() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  boot += name;
  return hash_of(boot.data(), boot.size());
}

struct Meeting::Head {
  uint64_t tag;
  int32_t size;
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> attached;
};

// The seat of one rank. Only this rank writes to it.
struct alignas(64) Meeting::Seat {
  std::atomic<uint32_t> state;
  int32_t process;
  uint64_t started;
  Card card;
  std::atomic<uint64_t> called;  // how many operations the rank has called; `signature` describes the latest operation
  Signature signature;
  // The last round in which this rank has published data, and the last round in which it has read the data of the other ranks.
  std::atomic<uint64_t> published, taken;
  std::atomic<uint32_t> finished;
};

struct alignas(64) Meeting::Lane {
  std::atomic<uint64_t> put, got;  // how many chunks the sender has written, and how many the receiver has read
  uint64_t message, bytes, type, here;
  char* data() { return reinterpret_cast<char*>(this) + sizeof(Lane); }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

std::string Meeting::folder() { return text("FAKE_DIR", "/dev/shm"); }

Meeting::Meeting(const std::string& id, int size, int rank)
    : id_(id), size_(size), rank_(rank), sent_(static_cast<size_t>(size)), received_(static_cast<size_t>(size)) {
  const auto n = static_cast<size_t>(size);
  chunk_bytes_ = static_cast<size_t>(number("FAKE_CHUNK_KB", 256)) << 10;
  lane_bytes_ = n <= 16 ? 64 << 10 : 4 << 10;
  bytes_ = page_up(sizeof(Head)) + page_up(n * sizeof(Seat)) + n * chunk_bytes_ + n * n * (sizeof(Lane) + lane_bytes_);
  path_ = folder() + "/" + file_prefix + id;
}

Meeting::~Meeting() {
  leave();
  if (memory_) munmap(memory_, bytes_);
  if (file_ >= 0) close(file_);
}

Meeting::Seat& Meeting::seat(int rank) const { return reinterpret_cast<Seat*>(memory_ + page_up(sizeof(Head)))[rank]; }

char* Meeting::chunk(int rank) const {
  return memory_ + page_up(sizeof(Head)) + page_up(static_cast<size_t>(size_) * sizeof(Seat)) +
         static_cast<size_t>(rank) * chunk_bytes_;
}

Meeting::Lane& Meeting::lane(int from, int to) const {
  return *reinterpret_cast<Lane*>(chunk(size_) + static_cast<size_t>(from * size_ + to) * (sizeof(Lane) + lane_bytes_));
}

void Meeting::ring() {
  auto& bell = reinterpret_cast<Head*>(memory_)->bell;
  bell.fetch_add(1);
  futex(bell, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Meeting::wait(const std::function<bool()>& there, const Watch& watch) {
  static const bool tells = number("FAKE_REMOTE_ERROR", 0) != 0;
  auto& bell = reinterpret_cast<Head*>(memory_)->bell;
  for (int i = 0; i < 20; ++i) {
    if (there()) return true;
    sched_yield();
  }
  for (int i = 1;; ++i) {
    const uint32_t heard = bell.load();
    if (there()) return true;
    if (watch.stopped()) return false;
    const timespec some{0, 3'000'000};
    futex(bell, FUTEX_WAIT, heard, &some);
    if (tells && i % 10 == 0 && !told_) {
      for (int peer = 0; peer < size_; ++peer) {
        Seat& of = seat(peer);
        const uint32_t state = of.state.load();
        if (state == empty || peer == rank_) continue;
        if (state == gone || start_time(of.process) != of.started) {
          if (!told_.exchange(true) && watch.lost) watch.lost(peer);
          break;
        }
      }
    }
  }
}

// Deletes the files of meetings that are incomplete and whose ranks have all died.
void Meeting::sweep() {
  DIR* all = opendir(folder().c_str());
  if (!all) return;
  while (const dirent* entry = readdir(all)) {
    const std::string name = entry->d_name;
    if (name.rfind(file_prefix, 0) != 0) continue;
    const std::string path = folder() + "/" + name;
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) continue;
    struct stat status{};
    Head head{};
    if (!flock(file, LOCK_EX | LOCK_NB) && !fstat(file, &status) && status.st_size > 4096 &&
        pread(file, static_cast<void*>(&head), sizeof head, 0) == sizeof head && head.tag == file_tag) {
      bool dead = true;
      for (int rank = 0; rank < head.size; ++rank) {
        // Read only the first fields of a Seat, because a Seat cannot be copied.
        struct {
          uint32_t state;
          int32_t process;
          uint64_t started;
        } one{};
        const auto offset = static_cast<off_t>(page_up(sizeof(Head)) + static_cast<size_t>(rank) * sizeof(Seat));
        if (pread(file, &one, sizeof one, offset) != sizeof one) continue;
        if (one.state == seated && start_time(one.process) == one.started) dead = false;
      }
      if (dead) unlink(path.c_str());
    }
    close(file);
  }
  closedir(all);
}

// Returns false if the rank's seat is taken, or if the other ranks expect a different number of ranks.
bool Meeting::open() {
  while (true) {
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0) {
      fprintf(stderr, "stand-in: %s: %s\n", path_.c_str(), strerror(errno));
      abort();
    }
    while (flock(file_, LOCK_EX) && errno == EINTR) {
    }
    struct stat status{};
    fstat(file_, &status);
    if (status.st_nlink) {
      if (!status.st_size) {
        sweep();
        if (ftruncate(file_, static_cast<off_t>(bytes_))) abort();
      }
      break;
    }
    close(file_);  // another rank deleted the file while this rank opened it
  }
  memory_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0));
  if (memory_ == MAP_FAILED) abort();
  madvise(memory_, bytes_, MADV_DONTDUMP);
  auto& head = *reinterpret_cast<Head*>(memory_);
  bool welcome = true;
  if (head.tag != file_tag) {
    head.tag = file_tag;
    head.size = size_;
  } else if (head.size != size_) {
    welcome = false;
  }
  if (welcome && seat(rank_).state.load() != empty) welcome = false;
  return welcome;
}

bool Meeting::join(const Card& card, const Watch& watch) {
  const bool welcome = open();
  if (welcome) {
    Seat& mine = seat(rank_);
    mine.process = getpid();
    mine.started = start_time(getpid());
    mine.card = card;
    mine.state.store(seated);
    seated_ = true;
    auto& head = *reinterpret_cast<Head*>(memory_);
    if (head.attached.fetch_add(1) + 1 == static_cast<uint32_t>(size_)) unlink(path_.c_str());
  }
  flock(file_, LOCK_UN);
  if (welcome) ring();
  return wait([&] { return welcome && reinterpret_cast<Head*>(memory_)->attached.load() == static_cast<uint32_t>(size_); },
              watch);
}

void Meeting::leave() {
  if (!memory_ || !seated_) return;
  seated_ = false;
  while (flock(file_, LOCK_EX) && errno == EINTR) {
  }
  seat(rank_).state.store(gone);
  if (reinterpret_cast<Head*>(memory_)->attached.load() < static_cast<uint32_t>(size_)) {
    bool last = true;
    for (int peer = 0; peer < size_; ++peer)
      if (seat(peer).state.load() == seated && start_time(seat(peer).process) == seat(peer).started) last = false;
    if (last) unlink(path_.c_str());
  }
  flock(file_, LOCK_UN);
  ring();
}

std::vector<Card> Meeting::cards() const {
  std::vector<Card> all;
  for (int rank = 0; rank < size_; ++rank) all.push_back(seat(rank).card);
  return all;
}

bool Meeting::run(const Call& call, const Watch& watch) {
  const Signature& sig = call.signature;
  Seat& mine = seat(rank_);
  mine.signature = sig;
  mine.called.store(++calls_);
  ring();
  const auto all = [&](auto there) {
    for (int peer = 0; peer < size_; ++peer)
      if (!there(seat(peer))) return false;
    return true;
  };
  if (!wait([&] { return all([&](Seat& of) { return of.called.load() >= calls_; }); }, watch)) return false;
  if (!all([&](Seat& of) { return of.signature == sig; })) {
    wait([] { return false; }, watch);  // waits until stopped
    return false;
  }

  const auto n = static_cast<size_t>(size_);
  const auto me = static_cast<size_t>(rank_);
  const auto root = static_cast<size_t>(sig.root);
  const size_t part = sig.count * size_of(sig.type);
  const bool of_parts = sig.kind == Kind::reduce_scatter;
  const bool of_root = sig.kind == Kind::broadcast;
  const bool to_root = sig.kind == Kind::reduce;
  const bool folds = sig.kind == Kind::all_reduce || sig.kind == Kind::reduce || sig.kind == Kind::reduce_scatter;
  const size_t whole = of_parts ? n * part : part;
  const bool gives = whole && (!of_root || me == root);
  const bool takes = whole && (!to_root || me == root);
  std::vector<char> sum;

  size_t from = 0;
  do {
    const size_t to = std::min(whole, from + chunk_bytes_);
    const uint64_t round = ++rounds_;
    if (!wait([&] { return all([&](Seat& of) { return of.taken.load() >= round - 1; }); }, watch)) return false;
    if (gives) {
      memcpy(chunk(rank_), call.send + from, to - from);
      if (call.scaled) scale(sig.type, chunk(rank_), to - from, &call.factor);
    }
    mine.published.store(round);
    ring();
    if (!wait([&] { return all([&](Seat& of) { return of.published.load() >= round; }); }, watch)) return false;
    // The bytes from `first` to `last` belong to this rank. `at` is where they begin in this rank's result.
    const size_t first = of_parts ? std::max(from, me * part) : from;
    const size_t last = of_parts ? std::min(to, (me + 1) * part) : to;
    if (takes && first < last) {
      const size_t length = last - first, skip = first - from, at = of_parts ? first - me * part : first;
      if (folds) {
        sum.assign(chunk(0) + skip, chunk(0) + skip + length);
        for (int peer = 1; peer < size_; ++peer) fold_into(sig.type, sig.fold, sum.data(), chunk(peer) + skip, length);
        if (sig.fold == Fold::average) divide(sig.type, sum.data(), length, size_);
        memcpy(call.receive + at, sum.data(), length);
      } else if (of_root) {
        memcpy(call.receive + at, chunk(static_cast<int>(root)) + skip, length);
      } else {
        for (int peer = 0; peer < size_; ++peer)
          memcpy(call.receive + static_cast<size_t>(peer) * part + at, chunk(peer) + skip, length);
      }
    }
    mine.taken.store(round);
    ring();
    from = to;
  } while (from < whole);
  return true;
}

bool Meeting::run(std::vector<Message> messages, const Watch& watch) {
  struct Progress {
    Message message;
    uint64_t moved = 0, number = 0;
    bool begun = false, done = false, stuck = false;
  };
  std::vector<Progress> all;
  for (Message& message : messages) all.push_back({message, 0, 0, false, false, false});
  // Messages from the rank to itself: the k-th message that it sends is the k-th message that it receives.
  for (auto& out : all) {
    if (!out.message.sends || out.message.peer != rank_) continue;
    for (auto& in : all) {
      if (in.message.sends || in.message.peer != rank_ || in.done) continue;
      if (in.message.bytes != out.message.bytes || in.message.type != out.message.type) break;
      if (in.message.bytes) memmove(in.message.data, out.message.data, in.message.bytes);
      in.done = out.done = true;
      break;
    }
  }
  for (auto& one : all) {
    const auto peer = static_cast<size_t>(one.message.peer);
    one.number = one.message.sends ? ++sent_[peer] : ++received_[peer];
  }

  // Moves at most one chunk per peer and direction, in the order of the calls. Returns true if any chunk was moved.
  const auto advance = [&] {
    bool moved = false;
    std::vector<bool> busy_out(static_cast<size_t>(size_)), busy_in(static_cast<size_t>(size_));
    for (auto& one : all) {
      const auto peer = static_cast<size_t>(one.message.peer);
      auto busy = one.message.sends ? busy_out[peer] : busy_in[peer];
      if (one.done || busy) continue;
      busy = true;
      if (one.stuck) continue;
      Lane& lane = one.message.sends ? this->lane(rank_, one.message.peer) : this->lane(one.message.peer, rank_);
      const bool full = lane.put.load() != lane.got.load();
      if (one.message.sends) {
        if (full) continue;
        if (one.begun && one.moved == one.message.bytes) {
          one.done = moved = true;  // the receiver has received the whole message
          continue;
        }
        const uint64_t here = std::min<uint64_t>(one.message.bytes - one.moved, lane_bytes_);
        if (here) memcpy(lane.data(), one.message.data + one.moved, here);
        lane.message = one.number;
        lane.bytes = one.message.bytes;
        lane.type = static_cast<uint64_t>(one.message.type);
        lane.here = here;
        one.moved += here;
        one.begun = true;
        lane.put.fetch_add(1);
      } else {
        if (!full) continue;
        if (lane.message != one.number || lane.bytes != one.message.bytes ||
            lane.type != static_cast<uint64_t>(one.message.type)) {
          one.stuck = true;
          continue;
        }
        if (lane.here) memcpy(one.message.data + one.moved, lane.data(), lane.here);
        one.moved += lane.here;
        if (one.moved == one.message.bytes) one.done = true;
        lane.got.fetch_add(1);
      }
      moved = true;
    }
    return moved;
  };
  const auto finished = [&] {
    for (const auto& one : all)
      if (!one.done) return false;
    return true;
  };
  while (!finished()) {
    bool moved = false;
    if (!wait([&] { return moved = advance(); }, watch)) return false;
    if (moved) ring();
  }
  return true;
}

bool Meeting::finish(const std::function<bool(int)>& counts, const Watch& watch) {
  seat(rank_).finished.store(1);
  ring();
  return wait(
      [&] {
        for (int peer = 0; peer < size_; ++peer)
          if (counts(peer) && !seat(peer).finished.load() && seat(peer).state.load() != gone) return false;
        return true;
      },
      watch);
}

const Injection* injected(const char* name, const std::string& operation, int nth, int rank) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, std::vector<Injection>>;
  std::lock_guard lock(mutex);
  const auto [found, fresh] = known.try_emplace(name);
  if (fresh) {
    std::stringstream all(text(name, ""));
    std::string one;
    while (std::getline(all, one, ',')) {
      Injection injection;
      const size_t at = one.find('@');
      if (at != std::string::npos) {
        injection.rank = std::stoi(one.substr(at + 1));
        one.resize(at);
      }
      std::stringstream parts(one);
      std::string nth_text, code;
      std::getline(parts, injection.operation, ':');
      std::getline(parts, nth_text, ':');
      std::getline(parts, code, ':');
      injection.nth = nth_text.empty() ? 1 : std::stoi(nth_text);
      injection.code = code.empty() ? 0 : std::stoi(code);
      found->second.push_back(injection);
    }
  }
  for (const Injection& injection : found->second)
    if (injection.operation == operation && injection.nth == nth && (injection.rank < 0 || injection.rank == rank))
      return &injection;
  return nullptr;
}

int called(const std::string& operation) {
  static std::mutex mutex;
  static auto& counts = *new std::map<std::string, int>;
  std::lock_guard lock(mutex);
  return ++counts[operation];
}

}  // namespace fake
