// Connects the ranks of a communicator through a shared file. The name of the file depends on the unique id. The ranks are
// processes, or threads of one process.
//
// A rank can be killed at any point, and would then never release a lock in shared memory. So the shared memory has no locks,
// only atomic counters. Each wait checks every few milliseconds whether the rank's own communicator was stopped. If a rank never
// arrives, or arrives with a different operation, the others wait forever, as with the real libraries.
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

// Holds what must be the same on all ranks.
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
  uint64_t factor = 0;  // the bits of the factor, which is a number of the signature's type
};

struct Message {
  bool sends = false;
  int peer = 0;
  char* data = nullptr;
  uint64_t bytes = 0;
  Type type = Type::u8;
};

// Tells the other ranks about a rank that joins.
struct Card {
  Uuid device{};
  uint64_t host = 0;
  int version = 0;
};

class Meeting {
 public:
  // Each wait calls `stopped` repeatedly, and ends if `stopped` returns true. With FAKE_REMOTE_ERROR=1, the first wait that finds
  // that a peer has died or left calls `lost`. Without this setting, the stand-in does not look for dead peers.
  struct Watch {
    std::function<bool()> stopped;
    std::function<void(int peer)> lost;
  };

  Meeting(const std::string& id, int size, int rank);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Waits until all ranks have joined. From then on, cards() returns the cards of all ranks. Returns false if the wait was
  // stopped, otherwise true.
  bool join(const Card& card, const Watch& watch);
  std::vector<Card> cards() const;

  // Runs a collective, or a list of messages. Returns false if it was stopped. In this case, the received data is incomplete.
  bool run(const Call& call, const Watch& watch);
  bool run(std::vector<Message> messages, const Watch& watch);
  // Waits until each rank for which `counts` returns true has called finish() or has left. Returns false if the wait was
  // stopped.
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
  std::vector<uint64_t> sent_, received_;  // how many messages this rank has sent to, and received from, each peer
  std::atomic<bool> told_{false};
};

// A failure that the environment requests. "all_reduce:3:2" makes the third all_reduce of this process fail with code 2. "@1" at
// the end restricts the failure to rank 1.
struct Injection {
  std::string operation;
  int nth = 0;
  int code = 0;
  int rank = -1;
};
// Returns the failure that the environment variable `name` requests for the operation's nth call, or nullptr if there is none.
const Injection* injected(const char* name, const std::string& operation, int nth, int rank);
// Counts a call of the operation. Returns how many times this process has called it, including this call.
int called(const std::string& operation);

uint64_t hash_of(const void* data, size_t bytes, uint64_t seed = 1469598103934665603u);
std::string hex_id(const void* data, size_t bytes);
uint64_t this_boot();

}  // namespace fake
