// What the communication libraries of both vendors share: operations that run on streams in the order in which they were issued.
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
  Signature signature;  // the type also of a message
  Buffer send, receive;
  bool scaled = false;
  uint64_t factor = 0;
  bool sends = false;
  int peer = -1;
  std::shared_ptr<Stream> stream;
  // Injected.
  bool hangs = false, dies = false;
  int fails_later = 0;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // fault: what a wrong address is to the vendor; lost: what a dead peer is, if it is noticed.
  Communicator(Engine& engine, const std::string& id, int size, int rank, int device, int fault, int lost);
  virtual ~Communicator();

  const int size, rank, device;
  const std::string id;
  Meeting& meeting() { return meeting_; }
  Meeting::Watch watch();

  // One launch: after all that their streams have now, before what comes to them.
  void launch(std::vector<Operation> operations);
  // Waits until all launches are over. False: stopped.
  bool drain();
  bool idle();
  // Ends what waits, here, and waits until it has ended.
  void stop();
  bool stopped() const { return stopped_; }

  std::atomic<int> error{0};

  // Nested calls of one thread are one.
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
  std::mutex issuing_;  // makes a number and its place in the stream one
  // Protects all below.
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0, done_ = 0;
  std::set<uint64_t> early_;  // over before their turn: stopped
  int running_ = 0;
};

// Does to the operation what the environment says: it can hang, fail later, or end the process. Returns the code to
// fail with now, or 0.
int inject(Operation& operation, int rank);

// The engine of the runtime that is loaded under one of these names, or else lies beside this library or where the loader
// finds it; nullptr if there is none.
Engine* find_engine(std::initializer_list<const char*> sonames, const void* inside_this_library);

}  // namespace fake
