// Test cases for every collective. A case says what each rank passes in, what it must get back, and where its arrays are. All
// cases of a test use the same inputs. The expected results are parts of these inputs or of their sums, and are compared bit by
// bit.
#pragma once

#include <string>
#include <vector>

#include "thread_group.h"

namespace mscomm {

// Holds each rank's elements, and their sum over all ranks, added in the canonical order (algo/order.h). For each k, it also
// holds the sum over the first k ranks, added in rank order.
class Inputs {
 public:
  Inputs(const Layout& layout, Dtype dtype, size_t count);

  Dtype dtype() const { return dtype_; }
  const uint32_t* x(size_t rank) const { return x_[rank].data(); }
  const uint32_t* sum() const { return sum_.data(); }
  const uint32_t* sum_of_first(size_t ranks) const { return sums_[ranks].data(); }

 private:
  Dtype dtype_;
  std::vector<std::vector<uint32_t>> x_;
  std::vector<uint32_t> sum_;
  std::vector<std::vector<uint32_t>> sums_;
};

// Says how many elements each rank sends to every rank. from_to has one row per sender. If `even` is true, all amounts are equal
// and the call has no counts.
struct Amounts {
  std::string name;
  bool even;
  std::vector<std::vector<size_t>> from_to;
};

// Returns several patterns of amounts, with about `size` elements per sender.
std::vector<Amounts> amounts(size_t n, size_t size);

bool has_root(Collective what);
bool has_parts(Collective what);

enum class Memory { ours, heap, mixed };

// Makes one rank's call of a collective with the given amounts, and checks its result.
class Case {
 public:
  Case(Collective what, const Inputs& inputs, const Amounts& amounts, int root, int rank);

  // Returns whether x and out can lie in one array in this case.
  bool fits_in_place() const;

  // Makes an uneven all_to_all twice: with the counts of all ranks, and with only this rank's counts.
  void run(const ThreadRank& me, bool x_in_heap, bool out_in_heap, bool in_place);

  Call call(const uint32_t* x, uint32_t* out) const;

 private:
  void run_once(const ThreadRank& me, bool x_in_heap, bool out_in_heap, bool in_place, bool own_counts);
  Call with_own_counts(Call call) const;
  void give(size_t rank, size_t from, size_t count) { gives_ = true, x_ = inputs_.x(rank) + from, x_count_ = count; }
  void expect(const uint32_t* values, size_t count) { gets_ = true, expected_.insert(expected_.end(), values, values + count); }

  Collective what_;
  const Inputs& inputs_;
  const Amounts& amounts_;
  int root_;
  size_t n_, me_;
  bool gives_ = false, gets_ = false;
  const uint32_t* x_ = nullptr;
  size_t x_count_ = 0;
  std::vector<uint32_t> expected_;
  size_t offset_of_x_ = 0, offset_of_out_ = 0;  // where x and out of an in-place call begin in their common array
};

// Returns the numbers of ranks with which the tests of the collectives run. ThreadSanitizer needs only
// 2 and 3 ranks: with these, every algorithm in shared memory takes all its branches, such as "is the next rank also the previous
// one?" and "is it a power of 2?". Trees need 4 ranks until one forwards, but their ranks are linked by sockets.
std::vector<int> sizes_of_groups();

// Returns the collectives for which the registry has an algorithm of this name, except barrier.
std::vector<Collective> collectives_by(const std::string& algorithm);

// Runs this rank's calls of every collective that `algorithm` implements, with every pattern of amounts, in each kind of
// memory, in place and out of place. With the last kind in `memories`, each call runs a third time. In this third call, each rank
// chooses at random whether it passes its arrays in place.
void every_case(const ThreadRank& me, const std::string& algorithm, const Inputs& inputs, const std::vector<size_t>& sizes,
                const std::vector<Memory>& memories);

}  // namespace mscomm
