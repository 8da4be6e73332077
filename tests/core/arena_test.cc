// Tests the arena protocol. The ranks are threads that share one mapping of each heap.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "algo/arena_steps.h"
#include "check.h"
#include "collective_cases.h"
#include "thread_group.h"

namespace mscomm {
void all_reduce_arena(const Call& call, const Ranks& ranks, const Wait& wait);
}

using namespace mscomm;

namespace {

void every_collective_in_every_memory() {
  for (int size : sizes_of_groups())
    for (bool spin : {true, false}) {
      // No algorithm takes another way with more than 5 ranks. test_conformance.py has 8.
      if (size > (spin ? 5 : 3)) continue;
      // With spin, the sizes lie on both sides of every threshold. They give tiny messages, messages of one chunk and of several
      // chunks, and parts of unequal size.
      std::vector<size_t> sizes{
          0, 1, 7, inline_bytes / 4, inline_bytes / 4 + 1, tiny_bytes / 4, tiny_bytes / 4 + 1, 3 * chunk_bytes / 4 + 5};
      if (!spin) sizes = {1000, 2000, chunk_bytes / 4};
      // These sizes are inline, tiny, and two chunks. Without spin, only the waiting differs, not the way of the data.
      if (test::only_races) sizes = {7, 1000, chunk_bytes / 4 + 5};
      if (test::only_races && !spin) sizes = {1000, chunk_bytes / 4};
      if (size == 2 && spin) sizes.push_back((2u << 20) / 4 + 3);  // at this size, all_reduce reads the peer's memory directly
      const ThreadJob job(size);
      const ThreadGroup world(job, job.all(), "arena", spin);
      const Inputs inputs(world.layout(), Dtype::float32, 2 * sizes.back() + 100);
      world.run(
          [&](const ThreadRank& me) { every_case(me, "arena", inputs, sizes, {Memory::ours, Memory::heap, Memory::mixed}); });
      for (int rank = 0; rank < size; rank++) CHECK(job.heap(rank).in_use() == 0);
    }
}

// Three groups use the same heaps. Each rank makes the world's calls in one thread and, at the same time, the calls of its other
// groups in a second thread.
void groups_share_the_heaps() {
  const ThreadJob job(4);
  const ThreadGroup world(job, {0, 1, 2, 3}, "arena", false), three(job, {3, 0, 1}, "arena", false),
      two(job, {2, 3}, "arena", false);
  std::vector<size_t> sizes{5, tiny_bytes, chunk_bytes / 4 + 3};
  if (test::only_races) sizes = {5, tiny_bytes};  // inline, and through staging
  const Inputs of_world(world.layout(), Dtype::float32, 2 * sizes.back() + 100),
      of_three(three.layout(), Dtype::float32, 2 * sizes.back() + 100),
      of_two(two.layout(), Dtype::float32, 2 * sizes.back() + 100);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < job.size(); rank++) {
    threads.emplace_back([&, rank] { every_case(world.at(rank), "arena", of_world, sizes, {Memory::heap, Memory::mixed}); });
    threads.emplace_back([&, rank] {
      if (three.place_of(rank) >= 0)
        every_case(three.at(three.place_of(rank)), "arena", of_three, sizes, {Memory::heap, Memory::mixed});
      if (two.place_of(rank) >= 0) every_case(two.at(two.place_of(rank)), "arena", of_two, sizes, {Memory::heap, Memory::mixed});
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Calls run in the order in which they were started, whether the worker thread or the caller's thread runs them.
void started_calls_keep_their_order(const ThreadRank& me) {
  const size_t count = tiny_bytes;  // `count` floats take more than tiny_bytes, so a call has several rounds
  std::vector<float> a(count), b(count, 1.0f), c(count);
  std::vector<std::shared_ptr<Work>> works;
  for (int repeat = 0; repeat < 10; repeat++) {
    a.assign(count, static_cast<float>(me.rank + repeat));
    works.push_back(
        me.group->start(make_call(Collective::all_reduce, Dtype::float32, -1, a.data(), count, b.data(), count, count), 60));
    works.push_back(
        me.group->start(make_call(Collective::all_reduce, Dtype::float32, -1, b.data(), count, b.data(), count, count), 60));
    me.broadcast(b.data(), c.data(), count, 1);  // runs after both started calls, so b is complete
    const float sum = static_cast<float>(3 * (0 + 1 + 2 + 3 * repeat));
    CHECK(std::count(c.begin(), c.end(), sum) == static_cast<long>(count));
  }
  for (const auto& work : works) {
    CHECK(work->wait(60));
    CHECK(work->done() && !work->error());
  }
}

// A call with a reserved number may be started after calls with higher numbers, and still runs before them.
void a_reserved_call_is_started_late(const ThreadRank& me) {
  const size_t count = 3;
  float a[count] = {1, 2, 3}, b[count] = {}, c[count] = {};
  std::atomic<int> told = 0;
  for (int repeat = 0; repeat < 10; repeat++) {
    Call first = make_call(Collective::all_reduce, Dtype::float32, -1, a, count, b, count, count);
    CallNumbers number(*me.group, 1);
    const auto later = me.group->start(make_call(Collective::all_reduce, Dtype::float32, -1, b, count, c, count, count), 60);
    later->when_ended([&] { told++; });
    if (repeat % 2) CHECK(!later->wait(0.01));
    const auto early = me.group->start(std::move(first), 60, &number);
    CHECK(early->number() + 1 == later->number());
    CHECK(later->wait(60) && early->done() && !later->error() && c[2] == 27);
  }
  const auto ended = me.group->start(make_call(Collective::barrier, Dtype::uint8, -1, nullptr, 0, nullptr, 0, 0), 60);
  CHECK(ended->wait(60));
  ended->when_ended([&] { told++; });  // is called at once
  for (const auto begun = Clock::now(); told < 11 && seconds_since(begun) < 60;) std::this_thread::yield();
  CHECK(told == 11);
}

void started_call_fails_as_the_others(const ThreadRank& me) {
  const size_t count = one_way_bytes;  // as many floats take more bytes, so all ranks wait for each other
  std::vector<float> x(count), out(count);
  std::shared_ptr<Work> work;
  if (me.rank == 1) work = me.group->start(make_call(Collective::barrier, Dtype::uint8, -1, nullptr, 0, nullptr, 0, 0), 60);
  else work = me.group->start(make_call(Collective::broadcast, Dtype::float32, 0, x.data(), count, out.data(), count, count), 60);
  CHECK(work->wait(60));
  CHECK(work->error() && work->error()->kind == "Mismatch");
}

void mismatch_is_seen_by_all(const ThreadRank& me) {
  std::vector<float> x(5000), out(5000);
  for (int again = 0; again < 2; again++) {
    std::string kind, text;
    try {
      if (me.rank == 1) me.broadcast(x.data(), out.data(), 5000, 0);
      else me.all_reduce(x.data(), out.data(), 4);
    } catch (const Error& error) {
      kind = error.kind, text = error.what();
    }
    CHECK(kind == "Mismatch");
    CHECK(text.find("ranks 0, 2 called all_reduce #1 (float32[4], sum); rank 1 called broadcast #1 (float32[5000], root 0)") !=
          std::string::npos);
  }
}

// Two ranks call one collective, and the third rank calls a different one. All three must get a Mismatch. The arrays are larger
// than tiny_bytes, and those of rank 1 are in its heap.
void every_mismatch_is_seen() {
  const std::vector<Collective> all = collectives_by("arena");
  const std::vector<Amounts> some = amounts(3, 3 * tiny_bytes);
  for (size_t i = 0; i < all.size(); i++) {
    const ThreadJob job(3);
    const ThreadGroup world(job, job.all(), "arena", false);
    const Inputs inputs(world.layout(), Dtype::float32, 10 * tiny_bytes);
    world.run([&](const ThreadRank& me) {
      const Collective what = all[(i + (me.rank == 2)) % all.size()];
      std::string kind;
      try {
        Case(what, inputs, some[static_cast<size_t>(me.rank) % 2], has_root(what) ? 0 : -1, me.rank)
            .run(me, me.rank == 1, me.rank == 1, false);
      } catch (const Error& error) {
        kind = error.kind;
      }
      CHECK(kind == "Mismatch");
    });
  }
}

// A call that a rank makes in a test, with messages of `count` floats. root: -1 if the call has none.
struct Rooted {
  Collective what;
  int root;
  size_t count;

  // Returns what rank `source` sends to rank `destination` in step `step` of a test. In a reduce, each rank sends this to the
  // root.
  static float sent(int step, int source, int destination) { return static_cast<float>(step * 64 + source * 8 + destination); }

  void run(const ThreadRank& me, int size, int step) const {
    const size_t all = count * static_cast<size_t>(size);
    std::vector<float> x(all), out(all, -1);
    const bool divides = what == Collective::scatter, from_root = divides || what == Collective::broadcast;
    const bool gathers = what == Collective::gather || what == Collective::all_gather, nothing = what == Collective::barrier;
    const bool needed = root < 0 || me.rank == root;  // whether a rank that is not the root has this x or out, too
    for (size_t i = 0; i < all; i++) x[i] = sent(step, me.rank, divides ? static_cast<int>(i / count) : 0);
    const size_t given = nothing || (from_root && !needed) ? 0 : divides ? all : count;
    const size_t got = nothing || (!from_root && !needed) ? 0 : gathers ? all : count;
    Call call = make_call(what, nothing ? Dtype::uint8 : Dtype::float32, root, given ? x.data() : nullptr, given,
                          got ? out.data() : nullptr, got, divides ? all : count);
    me.group->run(std::move(call), 60);
    float sum = 0;
    for (int rank = 0; rank < size; rank++) sum += sent(step, rank, 0);
    for (size_t i = 0; i < got; i++) {
      const float right = from_root ? sent(step, root, divides ? me.rank : 0)
                          : gathers ? sent(step, static_cast<int>(i / count), 0)
                                    : sum;
      CHECK(out[i] == right);
      if (out[i] != right) return;
    }
  }
};

// The root of a small broadcast does not wait for the other ranks, and the other ranks of a small reduce do not wait for the
// root.
void one_way_calls_run_ahead(const ThreadRank& me) {
  static std::atomic<int> done;
  for (const Collective what : {Collective::broadcast, Collective::scatter, Collective::gather, Collective::reduce}) {
    const bool to_root = what == Collective::gather || what == Collective::reduce;
    me.barrier();
    done = 0;
    me.barrier();
    const bool ahead = to_root ? me.rank != 0 : me.rank == 0;
    const int steps = static_cast<int>(window_rounds) - 1;
    for (const auto begun = Clock::now(); !ahead && done < (to_root ? 2 : 1) * steps && seconds_since(begun) < 60;)
      std::this_thread::yield();
    CHECK(ahead || done == (to_root ? 2 : 1) * steps);
    for (int step = 0; step < steps; step++) {
      // All sizes of buffers: a line, and up to one_way_bytes.
      Rooted{what, 0, step % 3 == 0 ? 2u : what == Collective::scatter ? 300u : 1024u}.run(me, 3, step);
      if (ahead) done++;
    }
  }
}

// A rank that is ahead reuses no memory that another rank still reads.
void one_way_and_other_calls_mix(const ThreadRank& me) {
  std::mt19937 same(1), own(static_cast<unsigned>(me.rank));
  const int size = 4, steps = test::only_races ? 600 : 2000;
  constexpr Collective rooted[] = {Collective::broadcast, Collective::scatter, Collective::gather, Collective::reduce};
  constexpr Collective others[] = {Collective::all_reduce, Collective::all_gather, Collective::barrier};
  constexpr size_t counts[] = {1, 12, 13, 256, 1024, 1025, 4096, 5000};
  unsigned share = 0;  // how many of eight calls have no root; it changes, so that the ranks are sometimes far from each other
  for (int step = 0; step < steps; step++) {
    if (step % 50 == 0) share = same() % 5;
    const bool with_root = same() % 8 >= share;
    const unsigned which = same(), root = same() % size, count = same();
    if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
    Rooted{with_root ? rooted[which % 4] : others[which % 3], with_root ? static_cast<int>(root) : -1, counts[count % 8]}.run(
        me, size, step % 1000);
  }
}

// If ranks make different small calls, at least one of them notices it in this call, in whatever order they arrive.
void every_one_way_mismatch_is_seen() {
  const ThreadJob job(3);
  const std::vector<Rooted> calls{{Collective::broadcast, 0, 3},  {Collective::broadcast, 1, 3}, {Collective::broadcast, 2, 3},
                                  {Collective::reduce, 0, 3},     {Collective::reduce, 1, 3},    {Collective::reduce, 2, 3},
                                  {Collective::gather, 0, 3},     {Collective::scatter, 1, 3},   {Collective::broadcast, 0, 4000},
                                  {Collective::all_reduce, -1, 3}};
  std::mt19937 random(7);
  for (int again = 0; again < (test::only_races ? 100 : 400); again++) {
    const ThreadGroup world(job, job.all(), "arena", false);
    const size_t usual = random() % calls.size(), other = random() % calls.size();
    std::array<size_t, 3> made{usual, other, random() % 2 ? usual : random() % calls.size()};
    std::ranges::shuffle(made, random);
    std::array<int, 3> late{};
    for (int& one : late) one = static_cast<int>(random() % 3);
    const bool same = made[0] == made[1] && made[1] == made[2];
    world.run([&](const ThreadRank& me) {
      std::string kind;
      try {
        std::this_thread::sleep_for(std::chrono::microseconds(100 * late[static_cast<size_t>(me.rank)]));
        calls[made[static_cast<size_t>(me.rank)]].run(me, 3, 1);
        me.barrier();
      } catch (const Error& error) {
        kind = error.kind;
        // This is what the control plane does.
        for (int rank = 0; rank < 3; rank++) world.at(rank).group->abort({error, true});
      }
      CHECK(kind == (same ? "" : "Mismatch"));
    });
  }
}

// A reserved number that no call takes would let all later calls wait for ever.
void numbers_that_are_given_up_break_the_group(const ThreadRank& me) {
  const auto barrier = [&](CallNumbers* numbers) -> std::string {
    try {
      me.group->run(make_call(Collective::barrier, Dtype::uint8, -1, nullptr, 0, nullptr, 0, 0), 60, numbers);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  {
    CallNumbers both(*me.group, 2);
    CHECK(both.next() == 1 && barrier(&both).empty() && barrier(&both).empty());
    CHECK(barrier(&both) == "mscomm: all reserved call numbers have been taken");
  }
  CHECK(barrier(nullptr).empty() && !me.group->failure());
  if (me.rank == 1) {
    CallNumbers both(*me.group, 2);
    CHECK(both.next() == 4 && barrier(&both).empty());
  } else {
    (void)barrier(nullptr);  // fails if rank 1 has given up before this rank has left the barrier
    return;
  }
  const auto failure = me.group->failure();
  CHECK(failure && failure->number == 5 && barrier(nullptr) == "rank 1 was interrupted before call #5");
}

void abort_wakes_the_waiters(const ThreadRank& me) {
  if (me.rank == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    me.group->abort({Error("Aborted", "enough", {0}), true});
    return;
  }
  std::thread other([&] {  // calls abort(), as the control plane's thread does when a verdict arrives
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    me.group->abort({Error("Aborted", "enough", {0}), true});
  });
  std::string text;
  try {
    me.barrier();
  } catch (const Error& error) {
    text = error.what();
  }
  CHECK(text == "enough");
  other.join();
}

void deadline_names_the_missing(const ThreadRank& me) {
  if (me.rank == 2) return;
  std::vector<int> waiting_for;
  try {
    me.barrier(0.2);
  } catch (const Error& error) {
    CHECK(error.kind == "CollectiveTimeout");
    waiting_for = error.waiting_for;
  }
  CHECK(waiting_for == std::vector<int>{2});
}

// The root does not wait for the others until it is too far ahead of one of them.
void a_root_that_is_far_ahead_names_the_slowest(const ThreadRank& me) {
  if (me.rank == 2) return;
  const float x[3] = {1, 2, 3};
  for (uint64_t call = 1; call <= window_rounds; call++) {
    float out[3] = {};
    std::vector<int> waiting_for;
    try {
      me.broadcast(x, out, 3, 0, call < window_rounds ? 60 : 0.2);
      CHECK(out[2] == 3);
    } catch (const Error& error) {
      CHECK(error.kind == "CollectiveTimeout");
      waiting_for = error.waiting_for;
    }
    CHECK(waiting_for == (call < window_rounds ? std::vector<int>{} : std::vector<int>{2}));
  }
}

void deadline_in_the_queue_names_its_own_call(const ThreadRank& me) {
  if (me.rank == 1) return;
  float x[3] = {}, out[3];
  const auto work = me.group->start(make_call(Collective::all_reduce, Dtype::float32, -1, x, 3, out, 3, 3), 60);
  std::string text;
  try {
    me.barrier(0.2);
  } catch (const Error& error) {
    CHECK(error.kind == "CollectiveTimeout");
    text = error.what();
  }
  CHECK(text == "barrier #2 on rank 0 did not end within 0.2 s: waiting for its turn, after all_reduce #1 (12 B)");
  CHECK(work->wait(60) && work->error());
}

// A failed call withdraws its own arrays from the heap, but no other arrays.
void failed_group_leaves_the_others_whole() {
  const ThreadJob job(2);
  const ThreadGroup failing(job, job.all(), "arena", false), whole(job, job.all(), "arena", false);
  // The array consists of whole pages, and so does each of its halves. Rank 1 passes only the first half.
  constexpr size_t count = 32 << 10;
  failing.run([&](const ThreadRank& me) {
    auto* lost = static_cast<float*>(me.heap->allocate(4 * count));
    auto* kept = static_cast<float*>(me.heap->allocate(4 * count));
    std::fill(lost, lost + count, 1.0f);
    std::string kind;
    try {
      me.all_reduce(lost, lost, count / static_cast<size_t>(1 + me.rank));
    } catch (const Error& error) {
      kind = error.kind;
    }
    CHECK(kind == "Mismatch");
    CHECK(!me.heap->find(lost, 4 * count));
    CHECK(me.heap->find(kept, 4 * count).has_value());
    const ThreadRank other = whole.at(me.rank);
    for (float* x : {lost, kept}) {
      std::fill(x, x + count, static_cast<float>(me.rank + 1));
      other.all_reduce(x, x, count);
      CHECK(std::count(x, x + count, 3.0f) == static_cast<long>(count));
    }
    me.heap->release(lost);
    me.heap->release(kept);
  });
}

// A call fails while rank 1 is stopped in the middle of the call. Later, rank 1 continues and writes its data. This data must not
// reach rank 0's array.
void late_writer_is_harmless() {
  constexpr size_t heap_bytes = 4u << 20;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = 4 * page + 3616;
  const int fd = make_memory("test-heap", heap_bytes);
  const Mapping theirs(fd, heap_bytes);  // rank 1's view of rank 0's heap
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  auto* out = static_cast<char*>(heap.allocate(bytes));
  auto* x = static_cast<char*>(heap.allocate(bytes));
  auto* after = static_cast<char*>(heap.allocate(bytes));
  std::fill(out, out + bytes, 'o');
  std::fill(x, x + bytes, 'x');
  std::fill(after, after + bytes, 'a');
  const uint64_t out_offset = *heap.find(out, bytes), x_offset = *heap.find(x, bytes);
  CHECK(theirs.begin()[out_offset] == 'o');
  heap.withdraw(out, bytes, false);
  std::fill(theirs.begin() + out_offset, theirs.begin() + out_offset + bytes, 'X');
  CHECK(std::count(out, out + bytes, 'X') == 0);
  // Other ranks can still be reading x in the failed call. They must not see what this rank writes to x afterwards.
  heap.withdraw(x, bytes, true);
  CHECK(std::count(x, x + bytes, 'x') == static_cast<long>(bytes));
  std::fill(x, x + bytes, 'n');
  CHECK(theirs.begin()[x_offset] == 'x');

  // The pages of out and x are private now. The rest of the heap is still shared.
  CHECK(std::count(after, after + bytes, 'a') == static_cast<long>(bytes));
  CHECK(!heap.find(out, bytes) && !heap.find(x, bytes) && !heap.find(out + page, page));
  CHECK(heap.find(after, bytes));

  // A part of an array can be withdrawn. The rest of the array stays shared. After release(), all memory except the withdrawn
  // pages can be allocated again.
  heap.withdraw(after + page, page, true);
  CHECK(std::count(after, after + bytes, 'a') == static_cast<long>(bytes));
  CHECK(!heap.find(after, bytes) && heap.find(after, page) && heap.find(after + 2 * page, bytes - 2 * page));
  const size_t used = heap.in_use();
  heap.release(out);
  heap.release(x);
  heap.release(after);
  CHECK(heap.in_use() == 0 && used == 3 * 5 * page);
  const auto lost = [&](const char* one) {
    const auto in = [one](const char* begin, size_t length) { return one >= begin && one < begin + length; };
    return in(out, 5 * page) || in(x, 5 * page) || in(after + page, page);
  };
  std::vector<char*> fresh;
  while (auto* one = static_cast<char*>(heap.allocate(64))) {
    CHECK(!lost(one));
    fresh.push_back(one);
  }
  CHECK(fresh.size() == (heap_bytes - 11 * page) / 64);
  for (char* one : fresh) heap.release(one);
  auto* shared = static_cast<char*>(heap.allocate(bytes));
  *shared = 's';
  CHECK(theirs.begin()[heap.find(shared, bytes).value()] == 's');

  heap.retire();
  CHECK(heap.allocate(8) == nullptr);
  CHECK(!heap.find(shared, bytes));
  heap.release(shared);
  CHECK(heap.in_use() == 0);
}

// Only whole pages that belong to a single array are offered to peers. If other pages were offered, a withdrawal would also lose
// the data next to the array.
void views_that_share_a_page_are_not_offered() {
  constexpr size_t heap_bytes = 4u << 20;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const int fd = make_memory("test-heap", heap_bytes);
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  auto* small = static_cast<char*>(heap.allocate(100));
  const size_t bytes = 20 * page + 100;
  auto* array = static_cast<char*>(heap.allocate(bytes));
  CHECK(!heap.find(small, 100));
  CHECK(heap.find(array, bytes));
  CHECK(heap.find(array + page, bytes - page));
  CHECK(heap.find(array + page, 2 * page));
  CHECK(!heap.find(array + 64, bytes - 64));
  CHECK(!heap.find(array, bytes - 4));
  CHECK(!heap.find(array, bytes + 4));
  std::fill(array, array + bytes, 'a');
  heap.withdraw(array, 10 * page + 64, false);  // the range ends inside a page, so nothing is withdrawn
  CHECK(std::count(array, array + bytes, 'a') == static_cast<long>(bytes));
  CHECK(heap.find(array, bytes));
  heap.release(array);
  heap.release(small);
}

void heap_gives_each_byte_once() {
  constexpr size_t heap_bytes = 128u << 20;
  const int fd = make_memory("test-heap", heap_bytes);
  Heap heap(Mapping(fd, heap_bytes));
  close(fd);
  std::mt19937 random(7);
  std::vector<std::pair<unsigned char*, size_t>> live;
  for (int step = 0; step < 3000; step++) {
    if (random() % 3 && live.size() < 60) {
      const size_t bytes = random() % (random() % 4 ? 5000 : 1500000);
      auto* memory = static_cast<unsigned char*>(heap.allocate(bytes));
      if (!memory) continue;
      CHECK(reinterpret_cast<uintptr_t>(memory) % 64 == 0);
      if (bytes) memory[0] = memory[bytes - 1] = static_cast<unsigned char>(live.size());
      for (auto [other, size] : live) CHECK(memory + bytes <= other || other + size <= memory);
      CHECK(bytes <= unshared_bytes || heap.find(memory, bytes));
      live.emplace_back(memory, bytes);
    } else if (!live.empty()) {
      const size_t pick = random() % live.size();
      heap.release(live[pick].first);
      live.erase(live.begin() + static_cast<long>(pick));
    }
  }
  for (auto [memory, bytes] : live) heap.release(memory);
  CHECK(heap.in_use() == 0);
  CHECK(heap.allocate(heap_bytes) != nullptr);  // the whole heap is one free block again
  CHECK(heap.allocate(1) == nullptr);
}

// A job that keeps creating and leaving groups does not use more and more memory.
void thousand_groups() {
  const ThreadJob job(2);
  Heap& heap = job.heap(0);
  const int groups = test::only_races ? 100 : 1000;
  for (int repeat = 0; repeat < groups; repeat++) {
    const ThreadGroup pair(job, job.all(), "arena", true);
    float x = 1, out = 0, other = 0;
    std::thread second([&] { pair.at(1).all_reduce(&x, &other, 1); });
    pair.at(0).all_reduce(&x, &out, 1);
    second.join();
    CHECK(out == 2 && other == 2);
  }
  // The next reservation frees the control memory of every group that all ranks have left.
  const uint64_t next = heap.reserve(1);
  CHECK(next == 0);
  const char* memory = heap.mapping().begin();
  CHECK(std::count(memory, memory + 4096, 0) == 4096);
  void* rest = heap.allocate(ThreadJob::heap_bytes - (2u << 20));
  CHECK(rest != nullptr);  // the free memory is one block
  heap.release(rest);
}

// Control memory is zeroed when it is reserved, even if an array was in that memory before.
void control_memory_is_zero() {
  const ThreadJob job(2);
  Heap& heap = job.heap(0);
  void* array = heap.allocate(1000);
  std::memset(array, 1, 1000);
  heap.release(array);
  const uint64_t offset = heap.reserve(1);
  CHECK(offset == 0);
  CHECK(std::count(heap.mapping().begin(), heap.mapping().begin() + 4096, 0) == 4096);
}

// A group's control memory is reused only after all ranks have left the group.
void control_memory_waits_for_the_last() {
  const ThreadJob job(2);
  Heap& heap = job.heap(0);
  const uint64_t first = Arena::reserve(heap, 2);
  auto one = std::make_unique<Arena>(job.all(), 0, job.peers(0)->heaps, first, true);
  auto other = std::make_unique<Arena>(job.all(), 1, job.peers(1)->heaps, first, true);
  one.reset();
  Arena::release(heap, first, 2);
  const uint64_t second = Arena::reserve(heap, 2);
  CHECK(second != first);
  other.reset();
  const uint64_t third = Arena::reserve(heap, 2);
  CHECK(third == first);
}

// Runs ranks that call the arena's algorithms directly, without a communicator.
struct Bare {
  struct Patient final : Watch {
    void look(const Deadline& deadline, const Missing&) override {
      if (deadline.passed()) throw Error("CollectiveTimeout", "deadline");
    }
    bool broken() const override { return false; }
  };

  explicit Bare(int size, bool spin = false)
      : hosts(static_cast<size_t>(size)), job(size), control(Arena::reserve(job.heap(0), size)) {
    for (int rank = 0; rank < size; rank++)
      arenas.push_back(std::make_unique<Arena>(job.all(), rank, job.peers(rank)->heaps, control, spin));
  }
  void run(const std::function<void(Arena&, const Ranks&, const Wait&)>& body) {
    std::vector<std::thread> threads;
    for (const auto& arena : arenas)
      threads.emplace_back([&, mine = arena.get()] {
        Patient watch;
        std::vector<char> scratch;
        const Layout layout(hosts, mine->rank());
        try {
          body(*mine, {layout, mine, nullptr, scratch}, {watch, Deadline(240)});
        } catch (const Error& error) {
          CHECK(error.what() == std::string());
        }
      });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<int> hosts;  // all ranks are on host 0
  ThreadJob job;
  uint64_t control;
  std::vector<std::unique_ptr<Arena>> arenas;
};

// The last rank to arrive wakes the others. In this test, a rank that is not woken sleeps until its deadline.
void every_sleeper_is_woken() {
  for (const bool spin : {false, true}) {
    Bare ranks(2, spin);
    ranks.run([](Arena& arena, const Ranks&, const Wait& wait) {
      const Wait sleepy{wait.watch, wait.deadline, 300'000};
      std::mt19937 random(static_cast<unsigned>(arena.rank()));
      const int rounds = test::only_races ? 1000 : 3000;
      for (int round = 0; round < rounds; round++) {
        // Arrive at about the time the other rank goes to sleep.
        const auto late = std::chrono::microseconds(random() % 150);
        for (const auto start = Clock::now(); Clock::now() - start < late;) continue;
        arena.round(sleepy);
      }
      CHECK(!wait.deadline.passed());
    });
  }
}

// In a small all_reduce, a rank reads only one cache line of each peer. The line holds both the peer's arrival and the peer's
// data. In this test, rank 1 also offers memory in its heap. If rank 0 read that offer, it would have to wait for another
// round.
void small_calls_do_not_read_posts() {
  Bare ranks(2);
  float sum[2] = {};
  ranks.run([&](Arena& arena, const Ranks& all, const Wait& wait) {
    const float x[2] = {1.0f, 2.0f};
    Call call = make_call(Collective::all_reduce, Dtype::float32, -1, x, 2, sum, 2, 2);
    call.signature.number = 1;
    if (arena.rank() == 0) return all_reduce_arena(call, all, wait);
    void* const offered = ranks.job.heap(1).allocate(64 << 10);
    call.x = call.out = offered;
    call.x_bytes = call.out_bytes = 64 << 10;
    arena.post(call, wait);
    CHECK(arena.x_in_heap(1));
    std::memcpy(arena.tiny(1, sizeof x), x, sizeof x);
    arena.round(wait);
  });
  CHECK(sum[0] == 2.0f && sum[1] == 4.0f);
}

// With many ranks, each rank adds up only its own part of the arrays.
void many_ranks_share_the_adding() {
  Bare ranks(32);
  ranks.run([&](Arena& arena, const Ranks& all, const Wait& wait) {
    constexpr size_t count = (16 << 10) / sizeof(float);
    const std::vector<float> x(count, 1.0f);
    std::vector<float> sum(count);
    Call call = make_call(Collective::all_reduce, Dtype::float32, -1, x.data(), count, sum.data(), count, count);
    call.signature.number = 1;
    all_reduce_arena(call, all, wait);
    CHECK(std::count(sum.begin(), sum.end(), 32.0f) == static_cast<long>(count));
    CHECK(arena.steps() == 1);  // the call used staging, where each rank adds up one part
  });
}

// Each rank reads the other rank's x, which begins 16 bytes below the destination in its own out, modulo the page size.
void pulls_to_slow_addresses_are_right(const ThreadRank& me) {
  constexpr size_t page = 4096, half = 200'001;
  std::vector<char> memory(half + 2 * half + 4 * page);
  char* const x = memory.data() + (page - reinterpret_cast<uintptr_t>(memory.data()) % page);
  char* const out = x + (half / page + 2) * page + 16 - (me.rank == 0 ? half % page : 0);
  for (size_t i = 0; i < half; i++) x[i] = static_cast<char>(me.rank * 100 + i % 97 + 1);
  me.group->run(make_call(Collective::all_gather, Dtype::uint8, -1, x, half, out, 2 * half, half), 60);
  for (size_t i = 0; i < 2 * half; i++) CHECK(out[i] == static_cast<char>(i / half * 100 + i % half % 97 + 1));
}

}  // namespace

SUITE(arena) {
  heap_gives_each_byte_once();
  late_writer_is_harmless();
  views_that_share_a_page_are_not_offered();
  control_memory_is_zero();
  control_memory_waits_for_the_last();
  every_sleeper_is_woken();
  small_calls_do_not_read_posts();
  many_ranks_share_the_adding();
  thousand_groups();
  every_collective_in_every_memory();
  groups_share_the_heaps();
  for (bool spin : {false, true}) on_threads(3, "arena", spin, started_calls_keep_their_order);
  for (bool spin : {false, true}) on_threads(3, "arena", spin, a_reserved_call_is_started_late);
  on_threads(3, "arena", false, started_call_fails_as_the_others);
  on_threads(3, "arena", false, mismatch_is_seen_by_all);
  every_mismatch_is_seen();
  for (bool spin : {false, true}) on_threads(3, "arena", spin, one_way_calls_run_ahead);
  for (bool spin : {false, true}) on_threads(4, "arena", spin, one_way_and_other_calls_mix);
  every_one_way_mismatch_is_seen();
  failed_group_leaves_the_others_whole();
  for (const char* algorithm : {"arena", "direct"}) on_threads(3, algorithm, false, numbers_that_are_given_up_break_the_group);
  on_threads(4, "arena", false, abort_wakes_the_waiters);
  on_threads(4, "arena", false, deadline_names_the_missing);
  on_threads(4, "arena", false, a_root_that_is_far_ahead_names_the_slowest);
  on_threads(2, "arena", false, deadline_in_the_queue_names_its_own_call);
  slow_movsb = true;
  on_threads(2, "arena", false, pulls_to_slow_addresses_are_right);
}
