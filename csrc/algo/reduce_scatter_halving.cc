// Reduce-scatter over the mesh with few messages (see recursive.h). In each step, a leaf keeps the blocks of half of the leaves
// with which it has not exchanged yet, and sends the blocks of the others. So it takes log2(p) latencies, and the least bytes.
#include "algo/mesh_steps.h"
#include "algo/recursive.h"

namespace mscomm {

namespace {

// The blocks in such an order that in each step, those that a leaf keeps lie side by side: leaves whose numbers have the same
// lowest bits are neighbours. The blocks of a leaf's ranks are in the order of the ranks.
class Order {
 public:
  Order(const Recursive& leaves, const Blocks& blocks)
      : leaves_(leaves.leaves()), bits_(std::countr_zero(static_cast<unsigned>(leaves_))) {
    size_t end = 0;
    for (int place = 0; place < leaves_; place++) {
      starts_.push_back(end);
      for (const int rank : leaves.members(place_of(place))) {
        ranks_.push_back(rank);
        end += blocks.bytes(rank);
      }
    }
    starts_.push_back(end);
  }

  // Returns the place of a leaf, and the leaf at a place: the number with its bits in the reverse order.
  int place_of(int leaf) const {
    int place = 0;
    for (int bit = 0; bit < bits_; bit++) place |= (leaf >> bit & 1) << (bits_ - 1 - bit);
    return place;
  }
  // Returns where the blocks are of all leaves whose numbers have the same `low` lowest bits as this one.
  Range alike(int leaf, int low) const {
    const int many = leaves_ >> low, first = place_of(leaf) & -many;
    return {starts_[first], starts_[first + many]};
  }
  int bits() const { return bits_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  const int leaves_, bits_;
  std::vector<int> ranks_;
  std::vector<size_t> starts_;
};

}  // namespace

Cost reduce_scatter_halving_cost(const Layout& layout, double bytes) {
  const int hosts = static_cast<int>(layout.hosts.size()), leaves = leaves_of(layout.hosts.size()), pairs = hosts - leaves;
  const double steps = doublings_of_leaves(layout), more = folds(layout), block = bytes / hosts;
  // The first leaf receives most, because leaves of two hosts come first. At the end, it sends the second host its block.
  double received = pairs ? bytes : 0;
  for (int kept = leaves / 2, apart = 2; kept > 0; kept /= 2, apart *= 2)
    received += (kept + (pairs + apart - 1) / apart) * block;
  return {
      .latencies = steps + more, .messages = steps + more, .bytes = received + (pairs ? block : 0), .copied = received + bytes};
}

void reduce_scatter_halving(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const Blocks blocks = Blocks::of(call, mesh.size());
  Recursive leaves(call, ranks, wait, blocks.total(), blocks.total());
  const Order order(leaves, blocks);
  char* at = leaves.spare();
  for (const int rank : order.ranks()) {
    copy(at, call.in() + blocks.begin(rank), blocks.bytes(rank));
    at += blocks.bytes(rank);
  }
  leaves.begin(leaves.spare(), blocks.total());
  if (!leaves.acts()) {
    const Piece result{leaves.members()[0], call.result(), blocks.bytes(mesh.rank())};
    return mesh.exchange({}, {&result, 1}, wait);
  }
  const int leaf = leaves.leaf();
  for (int bit = 0; bit < order.bits(); bit++)
    leaves.combine(1 << bit, order.alike(leaf ^ 1 << bit, bit + 1), order.alike(leaf, bit + 1));
  // Now this leaf has the results of its own ranks.
  std::vector<Piece> results;
  Range range = order.alike(leaf, order.bits());
  char* to = leaves.raw();
  for (const int rank : leaves.members()) {
    range.end = range.begin + blocks.bytes(rank);
    leaves.finish(range, rank == mesh.rank() ? call.result() : to);
    if (rank != mesh.rank()) results.push_back({rank, to, range.bytes()});
    to += range.bytes(), range.begin = range.end;
  }
  mesh.exchange(results, {}, wait);
}

}  // namespace mscomm
