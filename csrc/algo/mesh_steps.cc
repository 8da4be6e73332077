#include "algo/mesh_steps.h"

#include <algorithm>
#include <utility>

#include "algo/order.h"
#include "base/reduce.h"

namespace mscomm {

Tree::Tree(int rank, int size, int root) {
  const int relative = (rank - root + size) % size;  // the number of this rank, counted from the root
  const auto absolute = [&](int r) { return (r + root) % size; };
  int reach = 1;  // the distance to the next child, which is less than the lowest set bit of `relative`
  for (; relative + reach < size && (relative & reach) == 0; reach *= 2) children.push_back(absolute(relative + reach));
  std::ranges::reverse(children);
  if (relative > 0) parent = absolute(relative & (relative - 1));
}

// As window_bytes.
static constexpr double window = window_bytes;

Cost tree_cost(int n, double bytes) {
  const double steps = doublings(n);
  // The root sends a long message to all children in turns, so the last window has a long way, too.
  const double last_window = n > 2 && bytes > window ? window : 0;
  return {.latencies = steps, .messages = steps, .bytes = steps * bytes + (steps - 1) * last_window};
}

Cost chain_cost(int n, double bytes) {
  const double steps = n - 1, before_last = std::max(0, n - 2);
  return {.latencies = steps, .messages = steps, .bytes = bytes + before_last * std::min(bytes, window)};
}

void meet_in_tree(Mesh& mesh, const Tree& tree, const Wait& wait) {
  std::vector<Piece> children;
  for (int child : tree.children) children.push_back({child, nullptr, 0});
  mesh.exchange({}, children, wait);
  if (tree.parent >= 0) {
    const Piece parent{tree.parent, nullptr, 0};
    mesh.exchange({&parent, 1}, {}, wait);
    mesh.exchange({}, {&parent, 1}, wait);
  }
  mesh.exchange(children, {}, wait);
}

void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait) {
  const size_t bytes = call.bytes();
  if (parent < 0) copy(call.out, call.x, bytes);
  std::vector<Piece> down;
  // Only a rank that receives and sends divides the message, so that it does both at the same time.
  const size_t each = parent >= 0 && !children.empty() ? window_bytes : std::max<size_t>(1, bytes);
  for (size_t k = 0; k < windows(bytes, each); k++) {
    const Range window = piece(bytes, each, k);
    char* at = call.result() + window.begin;
    if (parent >= 0) {
      const Piece in{parent, at, window.bytes()};
      mesh.receive({&in, 1}, wait);
    }
    down.clear();
    for (int child : children) down.push_back({child, at, window.bytes()});
    mesh.send(down);
    mesh.progress();
  }
  mesh.exchange({}, {}, wait);
}

void send_blocks(const Call& call, Mesh& mesh, const Blocks& blocks, size_t piece_bytes, size_t k) {
  std::vector<Piece> out;
  for (int i = 1; i < mesh.size(); i++) {
    const int to = (mesh.rank() + i) % mesh.size();
    const Range now = piece(blocks.bytes(to), piece_bytes, k);
    // The first piece is sent even if it is empty, because its header says which call this rank is in.
    if (k == 0 || now.bytes()) out.push_back({to, const_cast<char*>(call.in()) + blocks.begin(to) + now.begin, now.bytes()});
  }
  mesh.send(out);
}

void reduce_in_one_latency(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank(), root = call.signature.root;
  const size_t bytes = call.bytes();
  const bool receives = root < 0 || me == root;
  char* const scratch = receives ? ranks.scratch_of(n * bytes) : nullptr;
  std::vector<Piece> out, in;
  std::vector<const void*> inputs(n, call.x);
  for (int rank = 0; rank < n; rank++) {
    if (rank == me) continue;
    if (root < 0 || rank == root) out.push_back({rank, const_cast<char*>(call.in()), bytes});
    if (!receives) continue;
    in.push_back({rank, scratch + rank * bytes, bytes});
    inputs[rank] = in.back().data;
  }
  mesh.exchange(out, in, wait);
  if (receives) reduce_in_order(call.signature, ranks.layout, inputs.data(), call.out, bytes);
}

void reduce_window(const Call& call, const Ranks& ranks, const Blocks& blocks, size_t k, char* to, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const Range here = piece(blocks.bytes(me), window_bytes, k);
  char* scratch = ranks.scratch_of(n * window_bytes);
  std::vector<Piece> in;
  std::vector<const void*> inputs(n);
  inputs[me] = call.in() + blocks.begin(me) + here.begin;
  for (int i = 1; i < n; i++) {
    const int from = (me - i + n) % n;
    char* at = scratch + from * window_bytes;
    inputs[from] = at;
    if (k == 0 || here.bytes()) in.push_back({from, at, here.bytes()});
  }
  mesh.receive(in, wait);
  reduce_in_order(call.signature, ranks.layout, inputs.data(), to, here.bytes());
}

void reduce_ring(const Call& call, const Ranks& ranks, const Blocks& blocks, char* to, const Wait& wait) {
  // Windows are large, so that the latency of a step is short compared with the time that its data takes to transfer.
  constexpr size_t ring_window_bytes = 1 << 20;
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const int right = (me + 1) % n, left = (me - 1 + n) % n;
  const Reduction& row = reduction(call.signature.dtype, call.signature.op);
  const auto elements = [&](Range range) { return range.bytes() / row.element_bytes; };

  char* held = ranks.scratch_of(2 * (std::min(blocks.largest(), ring_window_bytes) / row.element_bytes * row.accumulator_bytes));
  char* coming = held + std::min(blocks.largest(), ring_window_bytes) / row.element_bytes * row.accumulator_bytes;
  for (size_t k = 0; k < windows(blocks.largest(), ring_window_bytes); k++) {
    const auto slice = [&](int index) {
      const int rank = (index + 2 * n) % n;
      const Range now = piece(blocks.bytes(rank), ring_window_bytes, k);
      return Range{blocks.begin(rank) + now.begin, blocks.begin(rank) + now.end};
    };
    row.widen(call.in() + slice(me - 1).begin, held, elements(slice(me - 1)));
    for (int step = 0; step < n - 1; step++) {
      const Range sent = slice(me - 1 - step), got = slice(me - 2 - step);
      const Piece out{right, held, elements(sent) * row.accumulator_bytes};
      const Piece in{left, coming, elements(got) * row.accumulator_bytes};
      mesh.exchange({&out, 1}, {&in, 1}, wait);
      row.fold(coming, call.in() + got.begin, elements(got));
      std::swap(held, coming);
    }
    row.finish(held, n, to + (slice(me).begin - blocks.begin(me)), elements(slice(me)));
  }
}

Cost gather_bruck_cost(int n, double block_bytes) {
  const double steps = doublings(n);
  // The own block is copied first, and the blocks of all ranks are copied or reduced at the end.
  return {.latencies = steps, .messages = steps, .bytes = (n - 1) * block_bytes, .copied = (n + 1) * block_bytes};
}

void gather_bruck(Mesh& mesh, const Blocks& blocks, char* rotated, const Wait& wait) {
  const int n = mesh.size(), me = mesh.rank();
  // The number of bytes in the first `count` blocks of `rotated`.
  const auto bytes = [&](int count) {
    const int wrapped = me + count - n;
    return wrapped <= 0 ? blocks.begin(me + count) - blocks.begin(me) : blocks.total() - blocks.begin(me) + blocks.begin(wrapped);
  };
  for (int held = 1; held < n; held *= 2) {
    const int more = std::min(held, n - held);
    const Piece out{(me - held + n) % n, rotated, bytes(more)};
    const Piece in{(me + held) % n, rotated + bytes(held), bytes(held + more) - bytes(held)};
    mesh.exchange({&out, 1}, {&in, 1}, wait);
  }
}

void gather_ring(const Call& call, Mesh& mesh, const Blocks& blocks, const Wait& wait) {
  const int n = mesh.size(), me = mesh.rank();
  for (int step = 0; step < n - 1; step++) {
    const int sent = (me - step + n) % n, got = (me - step - 1 + n) % n;
    const Piece out{(me + 1) % n, call.result() + blocks.begin(sent), blocks.bytes(sent)};
    const Piece in{(me - 1 + n) % n, call.result() + blocks.begin(got), blocks.bytes(got)};
    mesh.exchange({&out, 1}, {&in, 1}, wait);
  }
}

}  // namespace mscomm
