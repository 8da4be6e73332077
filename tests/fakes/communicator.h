// Declares what the communication libraries of both vendors share. A communicator runs operations on streams, in the order in
// which the host issued them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine.h"
#include "meeting.h"

namespace fake {

struct Operation {
  std::string name;
  bool collective = true;
  Signature signature;  // for a message, only type and count are used
  Buffer send, receive;
  bool scaled = false;
  uint64_t factor = 0;
  bool sends = false;
  int peer = -1;
  std::shared_ptr<Stream> stream;
  // The failures that a test has requested.
  bool hangs = false, dies = false;
  int fails_later = 0;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // fault: the vendor's error code for a wrong address. lost: the vendor's error code for a dead peer, which is used only with
  // FAKE_REMOTE_ERROR=1.
  Communicator(Engine& engine, const std::string& id, int size, int rank, int device, int fault, int lost);
  virtual ~Communicator();

  const int size, rank, device;
  const std::string id;
  Meeting& meeting() { return meeting_; }
  Meeting::Watch watch();

  // Launches these operations together. The launch runs after all work that is already on the operations' streams, and before any
  // later work.
  void launch(std::vector<Operation> operations);
  // Waits until all launches have completed. Returns false if the communicator was stopped.
  bool drain();
  bool idle();
  // Ends this rank's operations that wait for other ranks, and returns when they have ended.
  void stop();
  bool stopped() const { return stopped_; }

  std::atomic<int> error{0};

  // While this object lives, the thread that made it counts as inside a call on the communicator. A thread can nest such objects.
  class Inside {
   public:
    Inside(Engine* engine, Communicator* communicator);
    ~Inside();

   private:
    Communicator* communicator_;
  };

 private:
  void run(const std::vector<Operation>& operations, uint64_t number);
  bool execute(const std::vector<Operation>& operations, const Meeting::Watch& watch);
  uint64_t take_number();
  void finish(uint64_t number);

  Engine& engine_;
  Meeting meeting_;
  const int fault_, lost_;
  std::atomic<bool> stopped_{false};
  std::mutex issuing_;  // held from taking a number until the launch is enqueued, so that numbers are in stream order
  // Protects the fields below.
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0, done_ = 0;
  std::set<uint64_t> early_;  // launches that have ended before their turn, because they were stopped
  int running_ = 0;
};

// Injects the failures that the environment requests. Kills the process at once, or marks the operation. A marked operation then
// hangs, fails later, or ends the process when the operation runs. Returns an error code if the operation must fail immediately,
// otherwise 0.
int inject(Operation& operation, int rank);

// Returns the engine of the vendor's runtime, or nullptr if no runtime is found. If the process has loaded a library whose name
// is in `sonames`, that library is the runtime. Otherwise, this function looks for the runtime next to this library, and then
// lets the loader search for it.
Engine* find_engine(std::initializer_list<const char*> sonames, const void* inside_this_library);

}  // namespace fake
