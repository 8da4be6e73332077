// Tests calls and messages when memory runs out. They must end with an error. A call must not take a call number and leave it
// unused, because all later calls would wait for the call with that number. A thread that waits for a message must not stop the
// threads that wait after it.
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

}  // namespace

void* operator new(std::size_t bytes) {
  if (fails_in >= 0 && fails_in-- == 0) throw std::bad_alloc();
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

}  // namespace

int main() {
  for (const auto& fails_at : {start_fails_at, wait_fails_at}) {
    int allocation = 0;
    while (fails_at(allocation)) allocation++;
    CHECK(allocation > 0);
  }
  return test::failed();
}
