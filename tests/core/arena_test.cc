// The arena's protocol with ranks as threads over one mapping: run under ThreadSanitizer and AddressSanitizer by `make test`.
#include <random>
#include <thread>

#include "check.h"
#include "thread_group.h"

using namespace mscomm;

namespace {

// Sizes on both sides of every threshold: tiny messages, one chunk, several chunks, and parts that are not equal.
constexpr size_t counts[] = {0,
                             1,
                             7,
                             1000,
                             tiny_bytes / 4,
                             tiny_bytes / 4 + 1,
                             chunk_in_cache_bytes / 4,
                             chunk_in_cache_bytes / 4 + 3,
                             3 * chunk_in_cache_bytes / 4 + 5,
                             3 * largest_chunk_bytes / 4 + 5};

void calls_in_every_memory(const ThreadRank& me, int size) {
  std::mt19937 random(
      static_cast<unsigned>(me.rank));  // of its own on each rank: who is late, and whose memory is private, varies
  const auto n = static_cast<size_t>(size);
  for (int repeat = 0; repeat < 3; repeat++)
    for (size_t count : counts) {
      std::vector<float> privates(count), private_out(count), private_many(count * n);
      const bool shared_x = random() % 2, shared_out = random() % 2;
      auto* heap_x = static_cast<float*>(me.heap->allocate(4 * count));
      auto* heap_out = static_cast<float*>(me.heap->allocate(4 * count * n));
      float* x = shared_x ? heap_x : privates.data();
      float* out = shared_out ? heap_out : private_out.data();
      float* many = shared_out ? heap_out : private_many.data();
      for (size_t i = 0; i < count; i++) x[i] = static_cast<float>(me.rank + i % 17);
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));

      me.all_reduce(x, out, count, Dtype::float32);
      for (size_t i = 0; i < count; i++) CHECK(out[i] == static_cast<float>(n * (n - 1) / 2 + n * (i % 17)));
      me.run(Collective::all_gather, Dtype::float32, -1, x, many, count);
      for (size_t rank = 0; rank < n; rank++)
        for (size_t i = 0; i < count; i++) CHECK(many[rank * count + i] == static_cast<float>(rank + i % 17));
      me.run(Collective::broadcast, Dtype::float32, size - 1, x, out, count);
      for (size_t i = 0; i < count; i++) CHECK(out[i] == static_cast<float>(n - 1 + i % 17));
      me.run(Collective::barrier, Dtype::uint8, -1, nullptr, nullptr, 0);
      me.all_reduce(x, x, count, Dtype::float32);  // in place
      for (size_t i = 0; i < count; i++) CHECK(x[i] == static_cast<float>(n * (n - 1) / 2 + n * (i % 17)));
      me.heap->release(heap_x);
      me.heap->release(heap_out);
    }
  CHECK(me.arena->lost_wakes() == 0);
}

void mismatch_is_seen_by_all(const ThreadRank& me) {
  float x[5] = {}, out[5];
  for (int again = 0; again < 2; again++) {
    std::string kind, text;
    try {
      if (me.rank == 1) me.run(Collective::broadcast, Dtype::float32, 0, x, out, 5);
      else me.all_reduce(x, out, 4, Dtype::float32);
    } catch (const Error& error) {
      kind = error.kind, text = error.what();
    }
    CHECK(kind == "Mismatch");
    CHECK(text.find("ranks 0, 2 called all_reduce #1 (float32[4], sum); rank 1 called broadcast #1 (float32[5], root 0)") !=
          std::string::npos);
  }
}

void abort_wakes_the_waiters(const ThreadRank& me) {
  if (me.rank == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    me.group->abort({Error("Aborted", "enough", {0}), true});
    return;
  }
  std::thread other([&] {  // as the member thread does when the verdict comes
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    me.group->abort({Error("Aborted", "enough", {0}), true});
  });
  std::string text;
  try {
    me.run(Collective::barrier, Dtype::uint8, -1, nullptr, nullptr, 0);
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
    me.run(Collective::barrier, Dtype::uint8, -1, nullptr, nullptr, 0, 0.2);
  } catch (const Error& error) {
    CHECK(error.kind == "CollectiveTimeout");
    waiting_for = error.waiting_for;
  }
  CHECK(waiting_for == std::vector<int>{2});
}

// A call fails while rank 1 is stopped in the middle of it: what rank 1 writes later must not reach rank 0's array.
void late_writer_is_harmless() {
  const int fd = make_memory("test-heap", 4u << 20);
  const Mapping theirs(fd, 4u << 20);  // rank 1's view of rank 0's heap
  Heap heap(Mapping(fd, 4u << 20));
  close(fd);
  auto* before = static_cast<char*>(heap.allocate(100));
  auto* out = static_cast<char*>(heap.allocate(20000));
  auto* after = static_cast<char*>(heap.allocate(100));
  std::fill(before, before + 100, 'b');
  std::fill(out, out + 20000, 'o');
  std::fill(after, after + 100, 'a');
  const uint64_t offset = *heap.find(out, 20000);
  CHECK(theirs.begin()[offset] == 'o');
  const uint64_t x_offset = *heap.find(after, 100);
  heap.withdraw(out, 20000, false);
  std::fill(theirs.begin() + offset, theirs.begin() + offset + 20000, 'X');
  CHECK(std::count(out, out + 20000, 'X') == 0);
  CHECK(std::count(before, before + 100, 'b') == 100);
  CHECK(std::count(after, after + 100, 'a') == 100);
  auto* x = after;  // read by others in the same call: they must not see what its owner writes afterwards
  heap.withdraw(x, 100, true);
  CHECK(std::count(x, x + 100, 'a') == 100);
  std::fill(x, x + 100, 'n');
  CHECK(theirs.begin()[x_offset] == 'a');
  CHECK(!heap.find(before, 100));
  CHECK(heap.allocate(8) == nullptr);
  heap.release(out);
}

void heap_gives_each_byte_once() {
  const int fd = make_memory("test-heap", 8u << 20);
  Heap heap(Mapping(fd, 8u << 20));
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
      CHECK(heap.find(memory, bytes).has_value());
      live.emplace_back(memory, bytes);
    } else if (!live.empty()) {
      const size_t pick = random() % live.size();
      heap.release(live[pick].first);
      live.erase(live.begin() + static_cast<long>(pick));
    }
  }
  for (auto [memory, bytes] : live) heap.release(memory);
  CHECK(heap.in_use() == 0);
  CHECK(heap.allocate(8u << 20) != nullptr);  // all of it is one piece again
  CHECK(heap.allocate(1) == nullptr);
}

}  // namespace

int main() {
  heap_gives_each_byte_once();
  late_writer_is_harmless();
  for (int size : {2, 3, 4, 8})
    for (bool spin : {false, true})
      on_threads(size, "arena", spin, [size](const ThreadRank& me) { calls_in_every_memory(me, size); });
  on_threads(3, "arena", false, mismatch_is_seen_by_all);
  on_threads(4, "arena", false, abort_wakes_the_waiters);
  on_threads(4, "arena", false, deadline_names_the_missing);
  return test::failed();
}
