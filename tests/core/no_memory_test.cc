// Tests a communicator's calls when memory runs out. Such a call must end with an error. It must not take a call number and leave
// it unused, because all later calls would wait for the call with that number.
#include <cstdlib>
#include <new>
#include <numeric>

#include "check.h"
#include "comm/communicator.h"
#include "no_backend.h"

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
    group.run(barrier, 0.5);
  } catch (const Error& error) {
    after = error.kind;
  }
  CHECK(after != "CollectiveTimeout");
  return failed;
}

}  // namespace

int main() {
  int allocation = 0;
  while (start_fails_at(allocation)) allocation++;
  CHECK(allocation > 0);
  return test::failed();
}
