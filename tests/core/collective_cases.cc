#include "collective_cases.h"

#include <cstring>
#include <random>

#include "algo/order.h"
#include "base/reduce.h"
#include "check.h"

namespace mscomm {

Inputs::Inputs(const Layout& layout, Dtype dtype, size_t count)
    : dtype_(dtype), x_(static_cast<size_t>(layout.size)), sum_(count), sums_(1) {
  std::vector<const void*> in;
  for (size_t rank = 0; rank < x_.size(); rank++) {
    std::minstd_rand random(static_cast<unsigned>(rank + 1));
    x_[rank].resize(count);
    for (uint32_t& element : x_[rank]) {
      // The floats have very different magnitudes, so that adding them in a different order gives a different sum. For integer
      // dtypes, any values will do.
      const float value = static_cast<float>(random() % 2000) * (random() % 2 ? 1e-4f : 1e3f) - 500;
      std::memcpy(&element, &value, 4);
    }
    in.push_back(x_[rank].data());
  }
  Signature signature;
  signature.dtype = dtype;
  signature.op = Op::sum;
  reduce_in_order(signature, layout, in.data(), sum_.data(), 4 * count);
  sums_[0].resize(count);  // an empty sum is 0
  sums_.push_back(x_[0]);
  for (size_t rank = 1; rank < x_.size(); rank++) {
    const void* both[] = {sums_.back().data(), in[rank]};
    std::vector<uint32_t> next(count);
    reduction(dtype, Op::sum).reduce(both, 2, 1, next.data(), count);
    sums_.push_back(std::move(next));
  }
}

static size_t sum_of(const std::vector<size_t>& row, size_t end) {
  size_t total = 0;
  for (size_t i = 0; i < end; i++) total += row[i];
  return total;
}

std::vector<Amounts> amounts(size_t n, size_t size) {
  const auto matrix = [n](auto&& of) {
    std::vector<std::vector<size_t>> rows(n, std::vector<size_t>(n));
    for (size_t s = 0; s < n; s++)
      for (size_t d = 0; d < n; d++) rows[s][d] = of(s, d);
    return rows;
  };
  const size_t each = (size + n - 1) / n;
  return {
      {"even", true, matrix([&](size_t, size_t) { return each; })},
      // About a third of the amounts are 0. The amounts from s to d and from d to s can differ, but each rank receives as much in
      // total as it sends.
      {"circulant", false, matrix([&](size_t s, size_t d) {
         const size_t k = (d + n - s) % n;
         return k % 3 == 1 ? 0 : each / 2 + each * k / n + k % 2;
       })},
      // s and d send each other the same amount, so an in-place call can exchange parts without a copy of x.
      {"symmetric", false, matrix([&](size_t s, size_t d) { return (s + d) % 3 == 2 ? 0 : each / 2 + (s + d) % 5 * each / 5; })},
      {"one has all", false, matrix([&](size_t, size_t d) { return d + 1 == n ? size : 0; })},
  };
}

bool has_root(Collective what) {
  return what == Collective::broadcast || what == Collective::reduce || what == Collective::gather || what == Collective::scatter;
}

bool has_parts(Collective what) {
  return what != Collective::all_reduce && what != Collective::reduce && what != Collective::broadcast && !scans(what);
}

Case::Case(Collective what, const Inputs& inputs, const Amounts& amounts, int root, int rank)
    : what_(what), inputs_(inputs), amounts_(amounts), root_(root), me_(static_cast<size_t>(rank)) {
  n_ = amounts.from_to.size();
  const auto& parts = amounts.from_to[0];  // the sizes of the parts that a collective scatters or gathers
  const size_t whole = sum_of(parts, n_), own = parts[me_], begin = sum_of(parts, me_);
  const bool at_root = rank == root;
  switch (what) {
    case Collective::all_reduce:
      give(me_, 0, whole), expect(inputs.sum(), whole);
      break;
    case Collective::scan:
      give(me_, 0, whole), expect(inputs.sum_of_first(me_ + 1), whole);
      break;
    case Collective::exscan:
      give(me_, 0, whole), expect(inputs.sum_of_first(me_), whole);
      break;
    case Collective::reduce:
      give(me_, 0, whole);
      if (at_root) expect(inputs.sum(), whole);
      break;
    case Collective::broadcast:
      give(me_, 0, whole), expect(inputs.x(static_cast<size_t>(root)), whole);
      break;
    case Collective::reduce_scatter:
      give(me_, 0, whole), expect(inputs.sum() + begin, own);
      offset_of_out_ = begin;
      break;
    case Collective::scatter:
      if (at_root) give(me_, 0, whole), offset_of_out_ = begin;
      expect(inputs.x(static_cast<size_t>(root)) + begin, own);
      break;
    case Collective::all_gather:
    case Collective::gather:
      give(me_, 0, own);
      if (what == Collective::gather && !at_root) break;
      offset_of_x_ = begin;
      for (size_t rank_of = 0; rank_of < n_; rank_of++) expect(inputs.x(rank_of), parts[rank_of]);
      break;
    case Collective::all_to_all:
      give(me_, 0, sum_of(amounts.from_to[me_], n_));
      for (size_t source = 0; source < n_; source++)
        expect(inputs.x(source) + sum_of(amounts.from_to[source], me_), amounts.from_to[source][me_]);
      break;
    case Collective::barrier:
      break;
  }
}

bool Case::fits_in_place() const {
  if (!gives_ || !gets_) return false;
  return what_ != Collective::all_to_all || x_count_ == expected_.size();
}

void Case::run(const ThreadRank& me, bool x_in_heap, bool out_in_heap, bool in_place) {
  run_once(me, x_in_heap, out_in_heap, in_place, false);
  if (what_ == Collective::all_to_all && !amounts_.even) run_once(me, x_in_heap, out_in_heap, in_place, true);
}

namespace {

// An array of one rank, in its heap or elsewhere.
template <class T>
struct Array {
  Array(Heap* heap, size_t count, bool in_heap) : heap(in_heap ? heap : nullptr), own(in_heap ? 0 : count) {
    data = in_heap ? static_cast<T*>(heap->allocate(sizeof(T) * count)) : own.data();
    CHECK(!in_heap || data);
  }
  ~Array() {
    if (heap) heap->release(data);
  }
  Heap* heap;
  std::vector<T> own;
  T* data;
};

}  // namespace

void Case::run_once(const ThreadRank& me, bool x_in_heap, bool out_in_heap, bool in_place, bool own_counts) {
  const size_t x_room = x_count_ + offset_of_x_, out_room = expected_.size() + offset_of_out_;
  in_place &= fits_in_place();
  Array<uint32_t> given(me.heap, in_place ? std::max(x_room, out_room) : x_count_, x_in_heap);
  Array<uint32_t> taken(me.heap, in_place ? 0 : expected_.size(), out_in_heap);
  uint32_t* x = in_place ? given.data + offset_of_x_ : given.data;
  uint32_t* out = in_place ? given.data + offset_of_out_ : taken.data;
  if (x_count_) std::memcpy(x, x_, 4 * x_count_);
  me.group->run(own_counts ? with_own_counts(call(x, out)) : call(x, out), 60);
  const bool right = expected_.empty() || std::memcmp(out, expected_.data(), 4 * expected_.size()) == 0;
  // If the call is not in place, x must be unchanged.
  const bool kept = in_place || x_count_ == 0 || std::memcmp(x, x_, 4 * x_count_) == 0;
  if (!CHECK(right) || !CHECK(kept))
    std::fprintf(stderr, "  %s, %zu ranks, %s, %zu of rank %zu, root %d%s%s%s%s\n", std::string(name(what_)).c_str(), n_,
                 amounts_.name.c_str(), x_count_, me_, root_, x_in_heap ? ", x in heap" : "", out_in_heap ? ", out in heap" : "",
                 in_place ? ", in place" : "", own_counts ? ", own counts" : "");
}

Call Case::with_own_counts(Call call) const {
  call.counts.assign(amounts_.from_to[me_].begin(), amounts_.from_to[me_].end());
  for (const auto& row : amounts_.from_to) call.recv_counts.push_back(row[me_]);
  call.signature.digest = 0;
  return call;
}

Call Case::call(const uint32_t* x, uint32_t* out) const {
  const auto& parts = amounts_.from_to[0];
  const bool gathers = what_ == Collective::all_gather || what_ == Collective::gather;
  const size_t count = gathers && amounts_.even ? parts[0] : sum_of(parts, n_);
  Call call = make_call(what_, inputs_.dtype(), root_, gives_ ? x : nullptr, x_count_, gets_ ? out : nullptr, expected_.size(),
                        what_ == Collective::all_to_all && !amounts_.even ? 0 : count);
  if (amounts_.even || !has_parts(what_)) return call;
  if (what_ == Collective::all_to_all)
    for (const auto& row : amounts_.from_to) call.counts.insert(call.counts.end(), row.begin(), row.end());
  else call.counts.assign(parts.begin(), parts.end());
  call.signature.digest = 1 + call.counts.back();
  return call;
}

std::vector<int> sizes_of_groups() { return test::only_races ? std::vector{2, 3} : std::vector{1, 2, 3, 5, 8}; }

std::vector<Collective> collectives_by(const std::string& algorithm) {
  std::vector<Collective> all;
  for (const Algorithm& row : algorithms())
    if (row.name == algorithm && row.what != Collective::barrier) all.push_back(row.what);
  return all;
}

void every_case(const ThreadRank& me, const std::string& algorithm, const Inputs& inputs, const std::vector<size_t>& sizes,
                const std::vector<Memory>& memories) {
  const int n = me.group->size();
  std::minstd_rand random(static_cast<unsigned>(me.rank + 1));  // seeded by rank, so each rank makes its own choices
  int root = 0;
  for (size_t size : sizes)
    for (const Amounts& some : amounts(static_cast<size_t>(n), size))
      for (Collective what : collectives_by(algorithm)) {
        if ((!some.even && !has_parts(what)) || (scans(what) && n > 3)) continue;  // test_conformance.py tests more ranks
        root = (root + 1) % n;
        for (Memory memory : memories) {
          for (int place : {0, 1, 2}) {  // 2: each rank chooses
            if (place == 2 ? memory != memories.back() : test::only_races) continue;
            const bool in_place = place == 2 ? random() % 64 < 32 : place == 1;
            const auto heap = [&] { return memory == Memory::mixed ? random() % 64 < 32 : memory == Memory::heap; };
            const bool x_in_heap = heap(), out_in_heap = heap();
            Case(what, inputs, some, has_root(what) ? root : -1, me.rank).run(me, x_in_heap, out_in_heap, in_place);
          }
        }
      }
  me.barrier();
}

}  // namespace mscomm
