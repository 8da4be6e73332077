// Tests that check() refuses every size, count, root and operation that could make an algorithm fail, and that copy() is
// right for all distances between its two addresses. Also tests the records of calls.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/reduce.h"
#include "check.h"
#include "collective_cases.h"
#include "comm/recorder.h"
#include "thread_group.h"

using namespace mscomm;

namespace {

constexpr int ranks = 4, root = 1;

// Returns the error with which check() refuses the call, or "" if the call passes.
std::string refusal(const Call& call, int rank, int size = ranks) {
  try {
    check(call, rank, size);
  } catch (const Error& error) {
    CHECK(error.kind == "ValueError");
    return error.what();
  }
  return "";
}

bool refused(const Call& call, int rank, const std::string& with = "") {
  const std::string text = refusal(call, rank);
  return !text.empty() && text.find(with) != std::string::npos;
}

// Runs body on every rank's call of every collective: first without counts, then with each pattern of counts.
void on_every_call(const std::function<void(const Call&, int rank)>& body) {
  static uint32_t memory[4096];
  const Inputs inputs(Layout(std::vector<int>(ranks), 0), Dtype::float32, 4096);
  for (const Amounts& some : amounts(ranks, 100))
    for (size_t i = 0; i < collectives.size(); i++)
      for (int rank = 0; rank < ranks; rank++) {
        const auto what = static_cast<Collective>(i);
        if (!some.even && (!has_parts(what) || what == Collective::barrier)) continue;
        if (what == Collective::barrier) body(make_call(what, Dtype::uint8, -1, nullptr, 0, nullptr, 0, 0), rank);
        else body(Case(what, inputs, some, has_root(what) ? root : -1, rank).call(memory, memory), rank);
      }
}

void right_calls_pass() {
  on_every_call([](const Call& call, int rank) {
    const std::string text = refusal(call, rank);
    if (!CHECK(text.empty())) std::fprintf(stderr, "  %s\n", text.c_str());
  });
}

void wrong_sizes_are_refused() {
  on_every_call([](const Call& right, int rank) {
    for (const int more : {-4, -1, 1, 4, INT_MAX}) {
      Call call = right;
      call.x_bytes += static_cast<size_t>(more);
      CHECK(refused(call, rank, "x has "));
      call = right;
      call.out_bytes += static_cast<size_t>(more);
      CHECK(refused(call, rank, "out has "));
    }
    Call call = right;
    if (call.x_bytes) call.x = nullptr, CHECK(refused(call, rank, "no memory"));
    call = right;
    if (call.out_bytes) call.out = nullptr, CHECK(refused(call, rank, "no memory"));
    // A signature whose count differs from the size of the arrays is refused.
    for (const int more : {-1, 1, ranks}) {
      call = right;
      call.signature.count += static_cast<uint64_t>(more);
      CHECK(refused(call, rank, "the product of the shape"));
      call.signature.dims = 1;
      call.signature.shape[0] = call.signature.count;
      CHECK(refused(call, rank));
    }
  });
}

void wrong_counts_are_refused() {
  on_every_call([](const Call& right, int rank) {
    Call call = right;
    const auto n = static_cast<size_t>(ranks);
    if (right.counts.empty()) {
      const Collective what = right.signature.what;
      call.counts.assign(what == Collective::all_to_all ? n * n : n, 1);
      CHECK(refused(call, rank));
      return;
    }
    call.counts.pop_back();
    CHECK(refused(call, rank, "counts, expected "));
    call.counts.insert(call.counts.end(), 2, 0);
    CHECK(refused(call, rank, "counts, expected "));
    for (size_t i = 0; i < right.counts.size(); i++) {
      const bool square = right.signature.what == Collective::all_to_all;
      call = right;
      call.counts[i]++;
      const bool of_others = square && i / n != static_cast<size_t>(rank) && i % n != static_cast<size_t>(rank);
      CHECK(of_others || refused(call, rank));  // in all_to_all, only the sender and the receiver check a count
      call.counts[i] = ~uint64_t{0};
      CHECK(refused(call, rank, "more bytes than"));  // the sum of counts must not wrap around
      call.counts[i] = ~uint64_t{0} / 4 + 1;          // the number of bytes must not wrap around either
      CHECK(refused(call, rank, "more bytes than"));
      // The same counts in another order are refused if the new order changes the size of this rank's own part.
      call = right;
      std::swap(call.counts[i], call.counts[(i + 1) % call.counts.size()]);
      const auto own = static_cast<size_t>(rank);
      CHECK(square || refused(call, rank) == (call.counts[own] != right.counts[own]));
    }
  });
}

// In an all_to_all, a rank may give only its own counts.
void own_counts_are_checked() {
  Call right = make_call(Collective::all_to_all, Dtype::float32, -1, "12345678901234567890", 5, nullptr, 3, 0);
  char out[12];
  right.out = out;
  right.counts = {2, 0, 3}, right.recv_counts = {1, 0, 2};
  const auto refused = [](const Call& call, int rank, const char* with) {
    const std::string text = refusal(call, rank, 3);
    return !text.empty() && text.find(with) != std::string::npos;
  };
  CHECK(refusal(right, 1, 3).empty() && refused(right, 0, "2 elements to itself, but expects 1"));
  Call call = right;
  call.recv_counts.pop_back();
  CHECK(refused(call, 1, "2 receive counts, expected one for each rank"));
  call.counts.clear();
  CHECK(refused(call, 1, "no send counts"));
  for (const uint64_t wrong : {uint64_t{3}, ~uint64_t{0}, ~uint64_t{0} / 4 + 1}) {
    call = right, call.counts[0] = wrong;
    CHECK(refused(call, 1, ""));
    call = right, call.recv_counts[0] = wrong;
    CHECK(refused(call, 1, ""));
  }
  call = right, call.signature.what = Collective::reduce_scatter;
  CHECK(refused(call, 1, "receive counts, expected none"));
  const Error error = counts_differ(right.signature, 3, 2, 1, 0);
  CHECK(error.kind == "Mismatch" && error.ranks == std::vector({3, 1}));
}

void roots_that_are_none_are_refused() {
  on_every_call([](const Call& right, int rank) {
    Call call = right;
    for (const int wrong : {-2, ranks, INT_MAX, INT_MIN}) {
      call.signature.root = wrong;
      CHECK(refused(call, rank, "root "));
    }
    call.signature.root = has_root(right.signature.what) ? -1 : 0;
    CHECK(refused(call, rank, "root "));
    // The head of gather_v is an all_gather of the counts, and its signature holds the root of gather_v. So check() accepts a
    // root in a head even if the head's collective has no root. check() refuses the root only if the head's collective reduces.
    call = right;
    call.signature.head = 1;
    if (!has_root(call.signature.what)) call.signature.root = root;
    CHECK(refused(call, rank) == (reduces(call.signature.what) && !has_root(call.signature.what)));
  });
}

void operations_that_are_not_defined_are_refused() {
  uint8_t x[16] = {};
  for (size_t what = 0; what < collectives.size(); what++)
    for (size_t dtype = 0; dtype < dtypes.size(); dtype++)
      for (size_t op = 0; op < ops.size(); op++) {
        if (!reduces(static_cast<Collective>(what))) continue;
        const auto type = static_cast<Dtype>(dtype);
        const auto operation = static_cast<Op>(op);
        const bool rooted = has_root(static_cast<Collective>(what));
        Call call = make_call(static_cast<Collective>(what), type, rooted ? 0 : -1, x, 1, x, 1, 1);
        call.signature.op = operation;
        const std::string text = refusal(call, 0, 1);
        const bool mean_of_a_scan = scans(static_cast<Collective>(what)) && operation == Op::avg;
        CHECK(text.empty() == (supports(type, operation) && !mean_of_a_scan));
        CHECK(text.empty() || mean_of_a_scan || text.find("is not defined on " + std::string(name(type))) != std::string::npos);
      }
}

void shapes_that_wrap_around_are_refused() {
  uint8_t x[16] = {};
  Call call = make_call(Collective::all_gather, Dtype::float64, -1, x, 0, x, 0, 0);
  call.signature.dims = 2;
  for (const uint64_t extent : {uint64_t{1} << 32, uint64_t{1} << 31, uint64_t{1} << 30}) {
    call.signature.shape[0] = call.signature.shape[1] = extent;
    call.signature.count = extent * extent;
    CHECK(refused(call, 0, extent > 1u << 30 ? "more bytes than" : ""));
  }
  Call unknown = call;
  unknown.signature.dims = max_dims + 1;
  CHECK(refused(unknown, 0, "does not know"));
  unknown = call;
  unknown.signature.dtype = static_cast<Dtype>(dtypes.size());
  CHECK(refused(unknown, 0, "does not know"));
}

// Signatures that differ in one or more fields have different fingerprints.
void fingerprints_tell_signatures_apart() {
  Signature plain;
  plain.number = 7;
  plain.dims = 2;
  plain.shape[0] = 3, plain.shape[1] = 5;
  plain.count = 15;
  std::vector<Signature> all{plain};
  const auto with = [&](const std::function<void(Signature&)>& change) {
    Signature other = plain;
    change(other);
    all.push_back(other);
  };
  for (uint64_t more : {uint64_t{1}, uint64_t{2}, uint64_t{1} << 32, uint64_t{1} << 63}) {
    with([&](Signature& s) { s.number += more; });
    with([&](Signature& s) { s.count += more; });
    with([&](Signature& s) { s.digest += more; });
    for (int i = 0; i < 2; i++) with([&](Signature& s) { s.shape[i] += more; });
  }
  for (int i = 0; i < 9; i++) with([&](Signature& s) { s.root = i; });
  with([](Signature& s) { s.what = Collective::all_reduce; });
  with([](Signature& s) { s.dtype = Dtype::float32; });
  with([](Signature& s) { s.op = Op::max; });
  with([](Signature& s) { s.function = Function::all_reduce_many; });
  with([](Signature& s) { s.head = 1; });
  with([](Signature& s) { s.device = 1; });
  with([](Signature& s) { s.dims = 1; });
  with([](Signature& s) { std::swap(s.shape[0], s.shape[1]); });
  with([](Signature& s) { s.number = s.count, s.count = 7; });
  for (size_t a = 0; a < all.size(); a++)
    for (size_t b = 0; b < all.size(); b++) {
      CHECK((all[a] == all[b]) == (a == b));
      CHECK((all[a].fingerprint() == all[b].fingerprint()) == (a == b));
    }
}

// A refused call sends nothing, uses no call number and does not break the group, whether it was passed to run() or to start().
void a_refused_call_leaves_the_group_whole(const ThreadRank& me) {
  float x[8] = {1, 1}, out[8] = {};
  for (int repeat = 0; repeat < 2; repeat++) {
    for (const bool start : {false, true}) {
      const Call wrong = make_call(Collective::all_reduce, Dtype::float32, -1, x, 2, out, 3, 2);
      std::string text;
      try {
        if (me.rank == 1) start ? (void)me.group->start(wrong, 60) : me.group->run(Call(wrong), 60);
      } catch (const Error& error) {
        text = error.what();
      }
      CHECK(me.rank != 1 || text == "all_reduce on rank 1 of 3: out has 12 bytes, expected 8 (2 of float32)");
    }
    me.all_reduce(x, out, 2);
    CHECK(out[0] == 3 && out[1] == 3);
  }
}

void copies_are_right_at_all_distances(bool slow) {
  const bool here = std::exchange(slow_movsb, slow);
  constexpr size_t page = 4096, most = 300'001;
  std::vector<char> from(most + 2 * page), to(from.size());
  for (size_t i = 0; i < from.size(); i++) from[i] = static_cast<char>(i % 251 + 1);
  for (const size_t distance : {0, 1, 8, 16, 31, 32, 33, 4064, 4095}) {
    char* const begin =
        to.data() + (reinterpret_cast<uintptr_t>(from.data()) + distance - reinterpret_cast<uintptr_t>(to.data())) % page;
    CHECK(copies_slowly(reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(from.data())) ==
          (slow && distance > 0 && distance < 32));
    for (const size_t bytes :
         {size_t{0}, size_t{1}, size_t{1023}, size_t{1024}, size_t{1025}, size_t{2048}, size_t{70'000}, most}) {
      std::ranges::fill(to, 0);
      copy(begin, from.data(), bytes);
      CHECK(std::memcmp(begin, from.data(), bytes) == 0);
      CHECK(static_cast<size_t>(std::ranges::count(to, 0)) == to.size() - bytes);
    }
  }
  slow_movsb = here;
}

void records_have_the_times_of_calls() {
  Recorder recorder;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  const auto record = [&](uint64_t number, bool by_caller) {
    Signature signature;
    signature.number = number;
    recorder.begin(signature);
    pause();
    by_caller ? recorder.done(number) : recorder.end(number, Record::State::failed);
    pause();
  };
  const auto time = [] { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); };
  const double before_s = time();
  record(1, true);
  record(2, false);
  const double after_s = time();
  const std::vector<Record> records = recorder.all();
  CHECK(records.size() == 2 && records[0].state == Record::State::done && records[1].state == Record::State::failed);
  constexpr double pause_s = 0.019;  // the clocks may lie a little apart
  double earliest_s = before_s - 0.001;
  for (const Record& one : records) {
    CHECK(one.began_s >= earliest_s && one.took_s >= pause_s);
    earliest_s = one.began_s + one.took_s + pause_s;
  }
  CHECK(earliest_s <= after_s + 0.001);
}

}  // namespace

SUITE(call) {
  right_calls_pass();
  for (const bool slow : {false, true}) copies_are_right_at_all_distances(slow);
  wrong_sizes_are_refused();
  wrong_counts_are_refused();
  own_counts_are_checked();
  roots_that_are_none_are_refused();
  operations_that_are_not_defined_are_refused();
  shapes_that_wrap_around_are_refused();
  fingerprints_tell_signatures_apart();
  records_have_the_times_of_calls();
  for (const std::string algorithm : {"arena", "direct"}) on_threads(3, algorithm, false, a_refused_call_leaves_the_group_whole);
}
