// The collectives that only move data, in shared memory. Data moves between each pair of ranks in the fastest way available. If
// one rank's array is in a heap, the other rank reads or writes this array directly. If x is in foreign memory, the destination
// reads it directly from the source's process, provided that this is possible and faster than staging. Otherwise, the data goes
// through staging, and both ranks copy it.
#include <algorithm>
#include <optional>

#include "algo/arena_steps.h"
#include "algo/moves.h"

namespace mscomm {

namespace {

// How a rank obtains data from its source. own: the rank itself is the source. read: it reads the source's heap. staged: it reads
// the source's staging. pulled: it reads the source's x directly from the source's process.
enum class Way { own, read, staged, pulled };

struct Plan {
  Move move;
  Way way;
  // The source itself writes the last `share` bytes of the move into the destination's out. The destination copies all other
  // bytes.
  size_t share;
};

// Decides for each pair of ranks how data moves between them. All ranks read the same posts, so all of them make the same
// decisions.
class Ways {
 public:
  // for_all: whether all destinations receive the same data. pull: whether an x in foreign memory is read directly from the
  // source's process, provided that the source has posted the address of x.
  Ways(const Moves& moves, const Arena& arena, bool for_all, bool pull)
      : moves_(moves), arena_(arena), root_(moves.root()), for_all_(for_all), pull_(pull) {
    if (root_ >= 0) look_at_the_root();
    else look_at_all();
  }

  Plan between(int source, int destination) const {
    const Move move = moves_.between(source, destination);
    if (source == destination) return {move, Way::own, 0};
    const bool readable = arena_.x_in_heap(source);
    const bool writable = arena_.posted(destination).out_offset != not_in_heap;
    const bool pullable = pull_ && arena_.posted(source).x_address != 0;
    const Way way = readable ? Way::read : pullable ? Way::pulled : Way::staged;
    if (!writable) return {move, way, 0};
    // If the root sends the same message to all ranks, and its x is in a heap, the root writes only a share of the message into
    // each rank's out, and the rank copies the rest. If the root copied the whole message for every rank, all ranks would wait
    // for the root.
    if (for_all_ && source == root_)
      return {move, way, readable ? part(move.bytes, arena_.size(), arena_.size() - 1).bytes() : 0};
    // In all other cases, either the source or the destination copies all bytes of the move. If both could, the root leaves the
    // copy to the other rank, because the root would have to copy for all ranks.
    return {move, way, !readable || destination == root_ ? move.bytes : 0};
  }
  // Returns the size in bytes of the largest move that goes through staging, or 0 if no move does.
  size_t largest_staged() const { return largest_staged_; }
  // Returns whether any rank may read or write another rank's array directly.
  bool touched() const { return touched_; }

 private:
  // Sets largest_staged_ and touched_ for a collective with a root. In such a collective, data moves only between the root and
  // another rank.
  void look_at_the_root() {
    for (int peer = 0; peer < arena_.size(); peer++)
      for (const auto& [move, way, share] : {between(root_, peer), between(peer, root_)}) {
        if (move.bytes == 0 || way == Way::own) continue;
        if (way == Way::staged && share < move.bytes) largest_staged_ = std::max(largest_staged_, move.bytes);
        else touched_ = true;
      }
  }
  // Sets largest_staged_ and touched_ for a collective without a root. In such a collective, the way in which data moves depends
  // only on what the source offers, and on whether the destination's out can be written. So it is enough to look at each rank
  // once, instead of at all n squared pairs.
  void look_at_all() {
    // How many ranks have data, how many must stage their data, and how many have an out that no other rank can write.
    int sources = 0, staging = 0, fetching = 0;
    bool both = false;  // whether some rank is counted both in staging and in fetching
    size_t largest = 0;
    for (int rank = 0; rank < arena_.size(); rank++) {
      const size_t bytes = moves_.largest_from(rank);
      const bool stages = bytes && !arena_.x_in_heap(rank) && !(pull_ && arena_.posted(rank).x_address != 0);
      const bool fetches = arena_.posted(rank).out_offset == not_in_heap;
      sources += bytes > 0, staging += stages, fetching += fetches, both |= stages && fetches;
      if (stages) largest = std::max(largest, bytes);
    }
    const bool only_itself = staging == 1 && fetching == 1 && both;
    if (fetching > 0 && !only_itself) largest_staged_ = largest;
    touched_ = staging < sources || fetching < arena_.size();
  }

  const Moves& moves_;
  const Arena& arena_;
  const int root_;
  const bool for_all_;
  const bool pull_;
  size_t largest_staged_ = 0;
  bool touched_ = false;
};

// If the kernel allows it, a rank reads foreign memory directly from the owner's process. One copy usually takes less time than
// the two copies through staging. But staging takes less time in two cases: when several ranks need the same data, and when one
// rank would copy all the data while the others wait. In the second case, pulling still takes less time if there are only two
// ranks and the root's x has at most pulled_from_root_bytes. See the measurements in docs/performance.md.
constexpr size_t pulled_from_root_bytes = 1 << 20;

bool worth_pulling(const Call& call, bool for_all, size_t largest_x, int n) {
  if (!for_all) return largest_x / n >= tiny_bytes;
  return n == 2 && (call.signature.root < 0 || largest_x <= pulled_from_root_bytes);
}

// Copies this rank's parts of x of every rank to out. source_x: returns the address of the given rank's x.
template <typename SourceX>
void take(const Call& call, const Moves& moves, int n, int me, const SourceX& source_x) {
  for (int source = 0; source < n; source++) {
    const Move move = moves.between(source, me);
    if (move.bytes) copy(call.result() + move.to, source_x(source) + move.from, move.bytes);
  }
}

// An in-place all_to_all overwrites data that other ranks still need. So this rank does not offer its array, and the data goes
// through staging.
Call as_posted(const Call& call) {
  const bool hidden = call.signature.what == Collective::all_to_all && call.x == call.out;
  return hidden ? Call{.signature = call.signature}
                : Call{.signature = call.signature,
                       .x = call.x,
                       .x_bytes = call.x_bytes,
                       .out = call.out,
                       .out_bytes = call.out_bytes};
}

// Moves messages that are not tiny. met: whether the first round of the call is already over.
void move_large(const Call& call, const Ranks& ranks, const Moves& moves, bool met, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const char* const x = moves.source_array(call, ranks);
  const Blocks blocks = moves.blocks_of(me);
  const bool for_all = blocks.size() == 1;
  const bool pull = worth_pulling(call, for_all, moves.largest_x(), n);
  Staging staging(arena, x, blocks);
  if (!met) staging.enter(as_posted(call), pull ? Pulled::x : Pulled::nothing, wait);
  std::optional<Ways> ways(std::in_place, moves, arena, for_all, false);
  if (pull && ways->largest_staged() > 0 && arena.can_pull(wait)) ways.emplace(moves, arena, for_all, true);

  // Each rank starts with a different peer, so that the ranks do not all write to the same peer at once.
  for (int i = 1; i < n; i++) {
    const int destination = (me + i) % n;
    const auto [move, way, share] = ways->between(me, destination);
    if (!for_all && (way != Way::staged || share == move.bytes)) staging.leave_out(destination);
    if (share == 0) continue;
    const size_t begin = move.bytes - share;
    copy(arena.at(destination, arena.posted(destination).out_offset + move.to, move.bytes) + begin, x + move.from + begin, share);
  }
  const size_t steps = staging.steps(ways->largest_staged());
  if (met && steps > 0) {
    staging.put(0);
    arena.round(wait);
  }
  for (size_t k = 0; k < std::max<size_t>(1, steps); k++) {
    const bool last = k + 1 >= steps;
    if (!last) staging.put(k + 1);
    for (int i = 0; i < n; i++) {
      const int source = (me + i) % n;
      const auto [move, way, share] = ways->between(source, me);
      // Even data that is read directly moves piece by piece, because in an in-place call, this rank must not write a piece of
      // out before it has staged the same piece of x.
      Range now = piece(move.bytes - share, staging.piece_bytes(), k);
      if (last && way != Way::staged) now.end = move.bytes - share;
      if (now.bytes() == 0) continue;
      char* const to = call.result() + move.to + now.begin;
      const Post& post = arena.posted(source);
      if (way == Way::own) copy(to, x + move.from + now.begin, now.bytes());
      else if (way == Way::read) copy(to, arena.at(source, post.x_offset + move.from, move.bytes) + now.begin, now.bytes());
      else if (way == Way::staged) copy(to, staging.at(source, k), now.bytes());
      else arena.pull(source, post.x_address + move.from + now.begin, to, now.bytes(), wait);
    }
    if (!last || ways->touched()) arena.round_after_reads(wait);
  }
  arena.steps() += steps;
}

// An all_to_all in which each rank knows only its own counts. In the first round, every rank shows its counts, followed by its x
// if x is tiny. Then all ranks know the whole table of counts. If some x is not tiny, they continue as in any other all_to_all.
void move_by_own_counts(const Call& call, const Ranks& ranks, const Wait& wait) {
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const size_t row_bytes = n * sizeof(uint64_t), limit = std::max(2 * row_bytes, tiny_bytes);
  if (2 * row_bytes > chunk_bytes)
    throw Error("ValueError", "all_to_all_v with recv_counts: a host has more than " +
                                  std::to_string(chunk_bytes / 2 / sizeof(uint64_t)) + " ranks of the group");
  const uint64_t step = arena.steps();
  char* const shown = arena.chunk(me, step);
  copy(shown, call.counts.data(), row_bytes);
  copy(shown + row_bytes, call.recv_counts.data(), row_bytes);
  if (call.x_bytes <= limit - 2 * row_bytes) copy(shown + 2 * row_bytes, call.x, call.x_bytes);
  arena.post(as_posted(call), wait, worth_pulling(call, false, call.x_bytes, n) ? Pulled::x : Pulled::nothing);
  meet(arena, wait);
  arena.steps()++;

  // Copy the numbers before they are checked, because they are in memory that other ranks can write.
  Call whole = call;
  whole.recv_counts.clear();
  whole.counts.resize(n * n);
  std::vector<uint64_t> expected(n * n);  // expected[d * n + s]: how many elements rank d expects from rank s
  for (int rank = 0; rank < n; rank++) {
    copy(&whole.counts[rank * n], arena.chunk(rank, step), row_bytes);
    copy(&expected[rank * n], arena.chunk(rank, step) + row_bytes, row_bytes);
  }
  for (int source = 0; source < n; source++)
    for (int destination = 0; destination < n; destination++) {
      const uint64_t sends = whole.counts[source * n + destination], expects = expected[destination * n + source];
      if (sends != expects) throw counts_differ(call.signature, arena.in_job(source), sends, arena.in_job(destination), expects);
    }
  check(whole, me, n);
  const Moves moves(whole, n, me, Moves::Of::all_ranks);
  if (moves.largest_x() > limit - 2 * row_bytes) return move_large(whole, ranks, moves, true, wait);
  take(whole, moves, n, me, [&](int source) { return arena.chunk(source, step) + 2 * row_bytes; });
}

}  // namespace

void moves_arena(const Call& call, const Ranks& ranks, const Wait& wait) {
  if (!call.recv_counts.empty()) return move_by_own_counts(call, ranks, wait);
  Arena& arena = *ranks.arena;
  const int n = arena.size(), me = arena.rank();
  const Moves moves(call, n, me, Moves::Of::all_ranks);
  const size_t largest_x = moves.largest_x();
  if (largest_x > tiny_bytes) return move_large(call, ranks, moves, false, wait);
  // A tiny x is copied before out is written, so a call in place needs no copy of its own.
  const void* const x = moves.sends(me) ? call.x : nullptr;
  const size_t x_bytes = moves.blocks_of(me).total();
  if (moves.root() >= 0 && largest_x <= one_way_bytes) {
    arena.post_one_way(call, wait);
    if (const auto differs = meet_one_way(x, x_bytes, largest_x, call, moves.root(), arena, wait)) throw *differs;
  } else {
    meet_with(x, x_bytes, largest_x, as_posted(call), arena, wait);
  }
  take(call, moves, n, me, [&](int source) { return arena.tiny(source, largest_x); });
}

}  // namespace mscomm
