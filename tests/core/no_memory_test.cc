// Tests what happens when memory runs out.
//
// Calls and messages must end with an error. A call must not take a call number and leave it unused: all later calls would wait
// for the call with that number. A thread that fails while it waits for a message must not stop the threads that wait after it.
// A group that breaks must break completely, and no thread of the core may end the process.
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <numeric>

#include "check.h"
#include "comm/communicator.h"
#include "no_backend.h"
#include "ring_memory.h"
#include "transport/mailbox.h"

namespace {

// How many more allocations of this thread succeed before one fails. -1 means that none fails.
thread_local int fails_in = -1;
// Whether all later allocations fail, too, until fails_in is set to -1.
thread_local bool stays_out = false;

}  // namespace

void* operator new(std::size_t bytes) {
  if (fails_in > 0) {
    fails_in--;
  } else if (fails_in == 0) {
    if (!stays_out) fails_in = -1;
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

using namespace mscomm;

namespace {

// Starts a call in which an allocation fails after `allocation` allocations have succeeded. Checks that a later call does not
// wait for the failed call. Returns false if no allocation failed.
bool start_fails_at(int allocation) {
  auto peers = std::make_shared<Peers>(std::vector<std::string>{"rank 0"}, std::vector{0}, std::vector<Descriptor>(1), nullptr);
  Recorder recorder;
  Communicator group("world", {0}, 0, peers, std::make_unique<NoBackend>(), 0, true, recorder, {});
  Call barrier;
  barrier.signature.what = Collective::barrier;
  barrier.signature.function = Function::barrier;
  bool failed = false;
  fails_in = allocation;
  try {
    const auto work = group.start(barrier, 60);
    fails_in = -1;
    CHECK(work->wait(60) && !work->error());
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  fails_in = -1;
  std::string after;
  try {
    group.run(Call(barrier), 0.5);
  } catch (const Error& error) {
    after = error.kind;
  }
  CHECK(after != "CollectiveTimeout");
  return failed;
}

struct TestWatch : Watch {
  void look(const Deadline& deadline, const Missing&) override {
    if (deadline.passed()) throw Error("CollectiveTimeout", "deadline");
  }
  bool broken() const override { return false; }
};

// Waits in vain for a message, while an allocation fails after `allocation` allocations have succeeded. Meanwhile, a message that
// nobody receives arrives, and needs memory. Checks that the next message arrives, or that its receiver is told why not. Returns
// false if no allocation failed.
bool wait_fails_at(int allocation) {
  TestWatch watch;
  const RingMemory memory = ring_memory();
  Mailbox receiver({0, 1}, 0, 7, false), sender({0, 1}, 1, 7, false);
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) < 0) throw system_error("socketpair", errno);
  Stream sends(ends[0], "rank 0"), receives(ends[1], "rank 1");
  sends.share(memory.get(), 0);
  receives.opens_shared([&](uint64_t) { return memory.get(); });
  sender.add_link(true, 0, std::move(sends));
  receiver.add_link(false, 1, std::move(receives));
  int64_t sent = 5, out = 0;
  const auto send = [&](int64_t tag) {
    sender.wait(sender.start({true, 0, tag, Dtype::int64, &sent, sizeof sent}), {watch, Deadline(5)});
  };
  const auto recv = [&](double timeout_s) {
    receiver.wait(receiver.start({false, 1, 0, Dtype::int64, &out, sizeof out}), {watch, Deadline(timeout_s)});
  };
  send(0);
  recv(5);
  send(1);
  bool failed = false;
  fails_in = allocation;
  try {
    recv(0);
  } catch (const std::bad_alloc&) {
    failed = true;
  } catch (const Error& error) {
    failed = error.kind == "MemoryError";
  }
  fails_in = -1;
  std::string after;
  try {
    sent = 6;
    send(0);
    recv(5);
    CHECK(out == 6);
  } catch (const Error& error) {
    after = error.kind;
  }
  CHECK(after != "CollectiveTimeout");
  receiver.close(0);
  sender.close(0);
  return failed;
}

std::shared_ptr<Peers> two_peers() {
  return std::make_shared<Peers>(std::vector<std::string>{"rank 0 on a host with a long name", "rank 1 on another host"},
                                 std::vector{0, 1}, std::vector<Descriptor>(2), nullptr);
}

// An abort ends all calls and messages, even if no allocation succeeds.
void an_abort_needs_no_memory() {
  Recorder recorder;
  Communicator group("world", {0, 1}, 0, two_peers(), std::make_unique<NoBackend>(), 0, true, recorder, {});
  group.expect_incoming(1);
  int64_t out = 0;
  std::vector<std::shared_ptr<Work>> works;
  for (const int source : {1, any_source, 1})
    works.push_back(group.start({false, source, 7, Dtype::int64, &out, sizeof out}, Deadline(60)));
  Failure failure{Error("CollectiveTimeout", "a reason that is longer than a short text", {1}), false};
  stays_out = true, fails_in = 0;
  group.abort(std::move(failure));
  fails_in = -1;
  for (const auto& work : works) CHECK(work->wait(60) && work->error());
  CHECK(group.failure() && group.failure()->error.kind == "CollectiveTimeout");
}

// A rank that cannot make the calls for which it has reserved numbers breaks the group, whichever allocation fails.
void numbers_are_given_up_without_memory() {
  for (int allocation = 0; allocation < 10; allocation++) {
    Recorder recorder;
    Communicator group("world", {0, 1}, 0, two_peers(), std::make_unique<NoBackend>(), 0, true, recorder, {});
    {
      const CallNumbers numbers(group, 2);
      stays_out = allocation % 2, fails_in = allocation / 2;
    }
    fails_in = -1;
    CHECK(group.failure());
  }
}

// A queued call fails, and no memory is left to describe why. Its Work ends with an error nevertheless, and the group is broken.
void a_queued_call_fails_without_memory() {
  struct Fails final : NoBackend {
    void run(const Call&, const Wait&) override {
      Error error("CollectiveTimeout", "a reason that is longer than a short text", {1});
      stays_out = true, fails_in = 0;  // on the worker thread
      throw error;
    }
  };
  Recorder recorder;
  const Communicator::Hooks hooks{{}, {}, [] { fails_in = -1; }};
  Communicator group("world", {0, 1}, 0, two_peers(), std::make_unique<Fails>(), 0, true, recorder, hooks);
  Call barrier;
  barrier.signature.what = Collective::barrier;
  barrier.signature.function = Function::barrier;
  const auto work = group.start(barrier, 60);
  CHECK(work->wait(60) && work->error() && group.failure());
}

}  // namespace

int main() {
  for (const bool stays : {false, true})
    for (const auto& fails_at : {start_fails_at, wait_fails_at}) {
      stays_out = stays;
      int allocation = 0;
      while (fails_at(allocation)) allocation++;
      CHECK(allocation > 0);
    }
  an_abort_needs_no_memory();
  numbers_are_given_up_without_memory();
  a_queued_call_fails_without_memory();
  return test::failed();
}
