// The table of algorithms, the choice among them, and what several of them share.
#include <algorithm>
#include <cstring>

#include "algo/algorithm.h"
#include "base/error.h"

namespace mscomm {

using Run = void(const Call&, const Ranks&, const Wait&);
Run all_reduce_arena, all_reduce_direct, all_reduce_ring, all_reduce_tree;
Run all_gather_arena, all_gather_direct, all_gather_ring;
Run broadcast_arena, broadcast_tree, broadcast_ring;
Run barrier_arena, barrier_tree;

namespace {

// For each collective in order of preference: the first whose carrier the layout has is chosen.
constexpr Algorithm table[] = {
    {"arena", Collective::all_reduce, Carrier::arena, all_reduce_arena},
    {"direct", Collective::all_reduce, Carrier::mesh, all_reduce_direct},
    {"ring", Collective::all_reduce, Carrier::mesh, all_reduce_ring},
    {"tree", Collective::all_reduce, Carrier::mesh, all_reduce_tree},
    {"arena", Collective::all_gather, Carrier::arena, all_gather_arena},
    {"direct", Collective::all_gather, Carrier::mesh, all_gather_direct},
    {"ring", Collective::all_gather, Carrier::mesh, all_gather_ring},
    {"arena", Collective::broadcast, Carrier::arena, broadcast_arena},
    {"tree", Collective::broadcast, Carrier::mesh, broadcast_tree},
    {"ring", Collective::broadcast, Carrier::mesh, broadcast_ring},
    {"arena", Collective::barrier, Carrier::arena, barrier_arena},
    {"tree", Collective::barrier, Carrier::mesh, barrier_tree},
};

}  // namespace

std::span<const Algorithm> algorithms() { return table; }

namespace {

const Algorithm* find(Collective what, std::string_view name) {
  for (const Algorithm& row : table)
    if (row.what == what && row.name == name) return &row;
  return nullptr;
}

std::string names_of(Collective what) {
  std::string names;
  for (const Algorithm& row : table)
    if (row.what == what) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

// All collectives of a group go by one carrier, so that ranks that make different calls meet and find out.
Carrier carrier_of(const Layout& layout, const Forced& forced) {
  bool arena = false, mesh = layout.hosts() > 1;
  for (size_t i = 0; i < forced.size(); i++) {
    if (forced[i].empty()) continue;
    const auto what = static_cast<Collective>(i);
    const Algorithm* row = find(what, forced[i]);
    if (!row)
      throw Error("ValueError", "MSCOMM_ALGO: " + std::string(name(what)) + " has no algorithm \"" + forced[i] + "\"; it has " +
                                    names_of(what));
    (row->carrier == Carrier::arena ? arena : mesh) = true;
  }
  if (arena && mesh)
    throw Error("ValueError", "MSCOMM_ALGO: arena needs all ranks on one host, and no collective forced to another carrier");
  return mesh ? Carrier::mesh : Carrier::arena;
}

}  // namespace

const Algorithm& select(Collective what, const Layout& layout, const Forced& forced) {
  const Carrier carrier = carrier_of(layout, forced);
  const std::string& wanted = forced[static_cast<size_t>(what)];
  if (!wanted.empty()) return *find(what, wanted);
  for (const Algorithm& row : table)
    if (row.what == what && row.carrier == carrier) return row;
  throw Error("Error", "no algorithm for " + std::string(name(what)));
}

int Layout::hosts() const { return host.empty() ? 1 : *std::max_element(host.begin(), host.end()) + 1; }

Range part(size_t bytes, int parts, int index) {
  constexpr size_t line = 64;
  const size_t lines = (bytes + line - 1) / line, count = static_cast<size_t>(parts), i = static_cast<size_t>(index);
  const size_t each = lines / count, more = lines % count;  // the first `more` parts have one line more
  const size_t first = i * each + std::min(i, more);
  return {std::min(bytes, first * line), std::min(bytes, (first + each + (i < more ? 1 : 0)) * line)};
}

Range piece(size_t bytes, size_t piece_bytes, size_t index) {
  const size_t begin = std::min(bytes, index * piece_bytes);
  return {begin, std::min(bytes, begin + piece_bytes)};
}

size_t pieces(size_t bytes, size_t piece_bytes) { return (bytes + piece_bytes - 1) / piece_bytes; }

Blocks::Blocks(size_t each_bytes, int n) {
  for (int rank = 1; rank <= n; rank++) ends_.push_back(static_cast<size_t>(rank) * each_bytes);
}

Blocks::Blocks(const uint64_t* counts, int n, size_t stride, size_t element_bytes) {
  size_t end = 0;
  for (size_t rank = 0; rank < static_cast<size_t>(n); rank++) ends_.push_back(end += counts[rank * stride] * element_bytes);
}

size_t Blocks::largest() const {
  size_t most = 0;
  for (size_t rank = 0; rank < ends_.size(); rank++) most = std::max(most, bytes(static_cast<int>(rank)));
  return most;
}

Blocks Blocks::gathered(const Call& call, int n) {
  return call.counts.empty() ? Blocks(call.bytes(), n) : Blocks(call.counts.data(), n, 1, call.element_bytes());
}

Blocks Blocks::divided(const Call& call, int n) {
  return call.counts.empty() ? Blocks(call.bytes() / static_cast<size_t>(n), n)
                             : Blocks(call.counts.data(), n, 1, call.element_bytes());
}

Blocks Blocks::sent_by(const Call& call, int n, int rank) {
  if (call.counts.empty()) return divided(call, n);
  return Blocks(call.counts.data() + static_cast<size_t>(rank) * static_cast<size_t>(n), n, 1, call.element_bytes());
}

Blocks Blocks::got_by(const Call& call, int n, int rank) {
  if (call.counts.empty()) return divided(call, n);
  return Blocks(call.counts.data() + static_cast<size_t>(rank), n, static_cast<size_t>(n), call.element_bytes());
}

void reduce_in_order(const Signature& signature, const Layout& layout, const void* const* in, void* out, size_t bytes) {
  const Reduction& row = reduction(signature.dtype, signature.op);
  const size_t count = bytes / row.element_bytes;
  const int n = layout.size, hosts = layout.hosts();
  if (hosts == 1) {
    row.reduce(in, n, n, out, count);
    return;
  }
  constexpr size_t block = 1024;
  alignas(64) char total[block * 16], partial[block * 16];
  for (size_t done = 0; done < count; done += block) {
    const size_t now = std::min(block, count - done);
    for (int host = 0; host < hosts; host++) {
      char* sum = host == 0 ? total : partial;
      bool first = true;
      for (int rank = 0; rank < n; rank++) {
        if (layout.host[static_cast<size_t>(rank)] != host) continue;
        const char* from = static_cast<const char*>(in[rank]) + done * row.element_bytes;
        first ? row.widen(from, sum, now) : row.fold(sum, from, now);
        first = false;
      }
      if (host > 0) row.merge(total, partial, now);
    }
    row.finish(total, n, static_cast<char*>(out) + done * row.element_bytes, now);
  }
}

void compare_posts(const Arena& arena) {
  const Signature& mine = arena.posted(arena.rank()).signature;
  bool same = true;
  for (int rank = 0; rank < arena.size(); rank++) same &= arena.posted(rank).signature == mine;
  if (same) return;
  Differs differs;
  for (int rank = 0; rank < arena.size(); rank++) differs.calls.emplace_back(rank, arena.posted(rank).signature);
  throw differs;
}

Tree::Tree(int rank, int size, int root) : relative((rank - root + size) % size), span(size), size(size), root(root) {
  const auto absolute = [&](int r) { return (r + root) % size; };
  int reach = 1;  // distance to the next child; ends at the lowest set bit of `relative`
  for (; relative + reach < size && (relative & reach) == 0; reach *= 2) children.push_back(absolute(relative + reach));
  if (relative == 0) return;
  const int low = relative & -relative;
  parent = absolute(relative - low);
  span = std::min(low, size - relative);
}

namespace {
constexpr size_t relay_window_bytes = 256 << 10;
}

void relay(const Call& call, Mesh& mesh, int parent, const std::vector<int>& children, const Wait& wait) {
  const size_t bytes = call.bytes();
  if (parent < 0 && call.out != call.x && bytes) std::memcpy(call.out, call.x, bytes);
  std::vector<Piece> down;
  for (size_t k = 0; k < std::max<size_t>(1, pieces(bytes, relay_window_bytes)); k++) {
    const Range window = piece(bytes, relay_window_bytes, k);
    char* at = call.result() + window.begin;
    if (parent >= 0) {
      const Piece in{parent, at, window.bytes()};
      mesh.exchange({}, {&in, 1}, wait);
    }
    down.clear();
    for (int child : children) down.push_back({child, at, window.bytes()});
    mesh.exchange(down, {}, wait);
  }
}

}  // namespace mscomm
