// Where the ranks of a communicator meet: a shared file named by the unique id. They are separate processes, or threads of one.
//
// A rank may be killed at any place, so there is no lock that it could take along: only counters that one rank writes, and waits
// that look again every few milliseconds whether the rank's own communicator was stopped. Who never comes, or comes with another
// operation, makes the others wait for ever, as the real libraries do.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "numbers.h"

namespace fake {

enum class Kind : uint32_t { all_reduce, all_gather, reduce_scatter, broadcast, reduce };

// What all ranks must agree on.
struct Signature {
  Kind kind = Kind::all_reduce;
  Type type = Type::u8;
  Fold fold = Fold::none;
  uint32_t root = 0;
  uint64_t count = 0;
  bool operator==(const Signature&) const = default;
};

struct Call {
  Signature signature;
  const char* send = nullptr;
  char* receive = nullptr;
  bool scaled = false;
  uint64_t factor = 0;  // a number of the type
};

struct Message {
  bool sends = false;
  int peer = 0;
  char* data = nullptr;
  uint64_t bytes = 0;
  Type type = Type::u8;
};

// What a rank says of itself when it comes.
struct Card {
  Uuid device{};
  uint64_t host = 0;
  int version = 0;
};

class Meeting {
 public:
  // `stopped`: asked in each wait; true ends it. `lost`: a peer was found dead or gone, said at most once; only with
  // FAKE_REMOTE_ERROR=1, since otherwise nobody notices.
  struct Watch {
    std::function<bool()> stopped;
    std::function<void(int peer)> lost;
  };

  Meeting(const std::string& id, int size, int rank);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Waits for all ranks. False when stopped. Then cards() has all.
  bool join(const Card& card, const Watch& watch);
  std::vector<Card> cards() const;

  // All of them: false when stopped, and then what was to be received is unfinished.
  bool run(const Call& call, const Watch& watch);
  bool run(std::vector<Message> messages, const Watch& watch);
  // Waits until every rank that `counts` has said that it is done, or has gone.
  bool finish(const std::function<bool(int)>& counts, const Watch& watch);

  void leave();
  static std::string folder();

 private:
  struct Head;
  struct Seat;
  struct Lane;

  Seat& seat(int rank) const;
  char* chunk(int rank) const;
  Lane& lane(int from, int to) const;
  bool wait(const std::function<bool()>& there, const Watch& watch);
  bool open();
  void ring();
  static void sweep();

  const std::string id_;
  const int size_, rank_;
  std::string path_;
  int file_ = -1;
  size_t bytes_ = 0, chunk_bytes_ = 0, lane_bytes_ = 0;
  char* memory_ = nullptr;
  bool seated_ = false;
  uint64_t calls_ = 0, rounds_ = 0;
  std::vector<uint64_t> sent_, received_;  // messages, by peer
  std::atomic<bool> told_{false};
};

// The environment's wishes: "all_reduce:3:2" is the third all_reduce of this process, and 2; "@1" at the end: only of rank 1.
struct Injection {
  std::string operation;
  int nth = 0;
  int code = 0;
  int rank = -1;
};
// The one of variable `name` for the operation's nth call, if any.
const Injection* injected(const char* name, const std::string& operation, int nth, int rank);
// How often the operation was called in this process, this call included.
int called(const std::string& operation);

uint64_t hash_of(const void* data, size_t bytes, uint64_t seed = 1469598103934665603u);
std::string hex_id(const void* data, size_t bytes);
uint64_t this_boot();

}  // namespace fake
