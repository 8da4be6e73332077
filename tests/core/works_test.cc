// Tests Communicator::wait(): on which thread a queued call runs, in which order, and what happens when a signal handler raises
// an exception there. The backend moves no data; each test says what a call does.
#include <poll.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "check.h"
#include "comm/communicator.h"
#include "no_backend.h"

using namespace mscomm;

namespace {

struct Interrupt {};

struct Scripted final : NoBackend {
  explicit Scripted(std::function<void(const Call&, const Wait&)> script) : script(std::move(script)) {}
  void run(const Call& call, const Wait& wait) override { script(call, wait); }
  std::function<void(const Call&, const Wait&)> script;
};

// A group of one rank.
struct Group {
  explicit Group(std::function<void(const Call&, const Wait&)> script)
      : core("world", {0}, 0,
             std::make_shared<Peers>(std::vector<std::string>{"rank 0"}, std::vector{0}, std::vector<Descriptor>(1), nullptr),
             std::make_unique<Scripted>(std::move(script)), 7, true, recorder,
             {[this] { interrupt(); }, {}, [this] { told++; }}) {}

  static Call barrier() {
    Call call;
    call.signature.what = Collective::barrier;
    call.signature.function = static_cast<Function>(Collective::barrier);
    return call;
  }
  std::shared_ptr<Work> start(double timeout_s = 60) { return core.start(barrier(), timeout_s); }
  void wait(Work& work) {
    while (!core.wait(work, {})) continue;
  }

  std::function<void()> interrupt = [] {};
  std::atomic<int> told{0};
  Recorder recorder;
  Communicator core;
};

void sleep_ms(int ms) { poll(nullptr, 0, ms); }

// Tries until the calls of `part` have run on this thread: on a busy machine, the worker may have begun them earlier.
template <typename Part>
void on_this_thread(const Part& part) {
  for (int i = 0; i < 1000; i++)
    if (part()) return;
  CHECK(!"a call that is waited for at once ran on the worker thread 1000 times");
}

void wait_runs_the_queued_calls_in_order() {
  on_this_thread([] {
    std::vector<uint64_t> numbers;
    std::vector<std::thread::id> threads;
    Group group([&](const Call& call, const Wait&) {
      numbers.push_back(call.signature.number);
      threads.push_back(std::this_thread::get_id());
    });
    const auto first = group.start(), second = group.start(), third = group.start();
    group.wait(*second);
    CHECK(first->done() && second->done());
    group.wait(*third);
    CHECK(numbers == (std::vector<uint64_t>{1, 2, 3}));
    group.core.close();
    return threads == std::vector(3, std::this_thread::get_id());
  });
}

void a_call_runs_although_nobody_waits() {
  int ran = 0;
  Group group([&](const Call&, const Wait&) { ran++; });
  for (int i = 1; i <= 3; i++) {
    for (int kind : {0, 1}) {
      const auto work = group.start();
      // A synchronous call leaves the queued calls to the worker.
      if (kind == 1) group.core.run(Group::barrier(), 60);
      while (!work->done()) sleep_ms(1);
      CHECK(!work->error());
    }
    const auto work = group.start();
    while (!group.core.wait(*work, 0.01)) continue;  // a wait with a time limit does, too
    if (i == 2) sleep_ms(100);                       // until the worker sleeps
  }
  CHECK(ran == 12);
  group.core.close();
}

void a_wait_with_a_time_limit_ends_in_time() {
  std::atomic<bool> goes_on{false};
  Group group([&](const Call&, const Wait& wait) {
    while (!goes_on) wait.look({}), sleep_ms(1);
  });
  const auto work = group.start();
  CHECK(!group.core.wait(*work, 0.01));
  goes_on = true;
  group.wait(*work);
  group.core.close();
}

void threads_wait_for_different_calls() {
  std::atomic<int> inside{0}, ran{0};
  Group group([&](const Call& call, const Wait&) {
    CHECK(inside++ == 0 && static_cast<uint64_t>(++ran) == call.signature.number);
    std::this_thread::yield();
    inside--;
  });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; thread++)
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 200; i++) {
        const auto one = group.start(), other = group.start();
        group.wait(thread % 2 ? *one : *other);
        if (i % 10 == 0) group.core.run(Group::barrier(), 60);
        group.wait(thread % 2 ? *other : *one);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(ran == 4 * (400 + 20));
  group.core.close();
}

void a_failure_ends_all_queued_calls() {
  std::atomic<bool> started{false};  // after the failure, start() throws
  Group group([&](const Call& call, const Wait&) {
    started.wait(false);
    if (call.signature.number == 2) throw Error("Aborted", "no more");
  });
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < 4; i++) works.push_back(group.start());
  started = true;
  started.notify_all();
  for (size_t i : {2, 0, 1, 3}) {
    group.wait(*works[i]);
    CHECK(works[i]->error().has_value() == (i > 0));
    if (i > 0) CHECK(std::string(works[i]->error()->what()) == "no more");
  }
  CHECK(group.told > 0);
  group.core.close();
}

void a_call_ends_although_a_handler_raises() {
  on_this_thread([] {
    std::thread::id thread;
    Group group([&](const Call& call, const Wait& wait) {
      thread = std::this_thread::get_id();
      if (call.signature.number == 1)
        for (int i = 0; i < 3; i++) wait.look({});
    });
    int raised = 0;
    group.interrupt = [&] {
      if (raised++ == 0) throw Interrupt{};
    };
    const auto first = group.start(), second = group.start();
    bool thrown = false;
    try {
      group.wait(*second);
    } catch (const Interrupt&) {
      thrown = true;
    }
    CHECK(thrown == (raised > 0));
    group.wait(*second);
    CHECK(first->done() && !first->error() && !second->error() && !group.core.failure());
    group.core.close();
    return thrown;
  });
}

// If the call does not end soon after a handler has raised an exception, or if a handler raises again, the group is broken.
void a_handler_that_raises_breaks_a_call_that_does_not_end() {
  for (const bool twice : {false, true})
    on_this_thread([&] {
      std::atomic<bool> ends{false};
      Group group([&](const Call&, const Wait& wait) {
        while (!ends) wait.look({}), sleep_ms(10);
      });
      int raised = 0;
      group.interrupt = [&] {
        if (raised++ == 0 || twice) throw Interrupt{};
      };
      const auto first = group.start(), second = group.start();
      bool thrown = false;
      try {
        CHECK(!group.core.wait(*first, {}));  // the worker runs the call
      } catch (const Interrupt&) {
        thrown = true;
        CHECK(first->done() && first->error() && group.core.failure() && group.told > 0);
        CHECK(first->error()->what() == std::string("rank 0 was interrupted in barrier #1"));
      }
      ends = true;
      while (!second->wait(1)) continue;
      CHECK(second->error().has_value() == thrown);
      group.core.close();
      return thrown;
    });
}

void a_handler_cannot_wait_for_the_call_that_it_interrupts() {
  on_this_thread([] {
    std::shared_ptr<Work> first, second;
    std::string refused;
    Group group([&](const Call&, const Wait& wait) { wait.look({}); });
    group.interrupt = [&] {
      for (const auto& work : {first, second})
        if (!work->done()) try {
            group.core.wait(*work, {});
          } catch (const Error& error) {
            refused += error.kind + " ";
          }
    };
    first = group.start();
    second = group.start();
    group.wait(*second);
    group.core.close();
    CHECK(!first->error() && !second->error());
    return refused.starts_with("RuntimeError RuntimeError ");
  });
}

// As in a signal handler that interrupts a call and releases the group.
void a_release_inside_a_call_says_so() {
  std::string said;
  Group* self = nullptr;
  Group group([&](const Call&, const Wait&) {
    try {
      self->core.close();
    } catch (const Error& error) {
      said = error.what();
    }
  });
  self = &group;
  try {
    group.core.run(Group::barrier(), 60);
  } catch (const Error& error) {
    CHECK(error.kind == "Aborted");
  }
  CHECK(said == "release: a call is still running on this group");
}

}  // namespace

SUITE(works) {
  a_release_inside_a_call_says_so();
  wait_runs_the_queued_calls_in_order();
  a_call_runs_although_nobody_waits();
  a_wait_with_a_time_limit_ends_in_time();
  threads_wait_for_different_calls();
  a_failure_ends_all_queued_calls();
  a_call_ends_although_a_handler_raises();
  a_handler_that_raises_breaks_a_call_that_does_not_end();
  a_handler_cannot_wait_for_the_call_that_it_interrupts();
}
