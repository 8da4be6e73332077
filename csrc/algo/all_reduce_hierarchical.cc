// All-reduce, and reduce, over several hosts, some of which have several ranks. On each host, every rank that owns a slice of the
// message reduces this slice in the arena. Then the owners of the same slice on different hosts reduce it over the mesh, as
// all_reduce_direct does. Finally, each owner shares the result with the other ranks on its host. If there are H hosts, each
// host sends 2 (H-1)/H times the size of the message, however many ranks it has. With 16-bit floats, a host sends 1.5 times as
// much, because partial sums are sent as float32.
//
// The message moves in chunks, and the ranks work on several chunks at a time. In step k, the ranks on a host perform four tasks.
// They reduce chunk k and send its partial sums to the other hosts. They merge the partial sums of chunk k-1 that the other hosts
// have sent, and send the result. They receive the results of chunk k-2. They share the results of chunk k-3 with all ranks on
// their host. The first and the fourth task need the arena, and one round of the arena serves both.
#include <algorithm>
#include <array>

#include "algo/mesh_steps.h"
#include "algo/order.h"
#include "algo/two_levels.h"

namespace mscomm {

namespace {

// One half of a staging chunk is for x, and the other half is for results.
constexpr size_t step_bytes = chunk_bytes / 2;
// The number of buffers for partial sums, and also the number of buffers for results. Several buffers of each kind are needed,
// because data of one chunk may still be unsent when the rank works on the next chunks. A host sends its result of chunk k after
// it has received our partial sums of this chunk. So the buffer with these sums is free when the results have arrived, in step
// k+2. A host sends its partial sums of chunk k+3 after it has received our result of chunk k. So the buffer with this result is
// free when those sums have arrived, in step k+4, and four buffers of each kind are enough.
constexpr size_t buffers = 4;
// In one latency, no results arrive that would free a buffer. So such a message has one step.
static_assert(most_in_one_latency <= step_bytes);

class Hierarchy {
 public:
  Hierarchy(const Call& call, const Ranks& ranks, const Wait& wait)
      : call_(call),
        layout_(ranks.layout),
        mesh_(*ranks.mesh),
        wait_(wait),
        home_(call, ranks, wait),
        slices_(static_cast<int>(std::clamp<size_t>(pieces(call.bytes(), least_slice_bytes), 1, layout_.fewest))),
        row_(reduction(call.signature.dtype, call.signature.op)),
        sum_(row_of_partials(call.signature)) {
    // The largest slice is slice 0 of chunk 0, and its largest share is share 0. So buffers of these sizes are large enough for
    // all slices and shares.
    const size_t slice = elements(this->slice(0, 0)), share = in_one_latency() || rooted() ? slice : share_of(slice, 0).count;
    const auto room = [](size_t count, size_t bytes) { return (count * bytes + 63) / 64 * 64; };
    const size_t partial = room(slice, row_.accumulator_bytes), result = room(slice, row_.element_bytes),
                 coming = room(share, row_.accumulator_bytes);
    char* at = ranks.scratch_of(buffers * (partial + result) + hosts() * coming);
    for (char*& one : partial_) one = at, at += partial;
    for (char*& one : result_) one = at, at += result;
    for (size_t host = 0; host < hosts(); host++) coming_.push_back(at), at += coming;
  }

  void run() {
    const size_t steps = std::max<size_t>(1, pieces(call_.bytes(), step_bytes));
    for (size_t k = 0; k < steps + 3; k++) {
      if (k < steps) stage(k);
      if (k >= 3) publish(k - 3, k);
      if (k < steps || k >= 3) home_.round();
      if (k == 0) xs_ = home_.xs(call_.bytes()), outs_ = home_.outs(call_.bytes());
      if (k < steps) add_up(k);
      if (k < steps) home_.confirm_reads();  // before other hosts get the sums
      if (k >= 3) take(k - 3, k);
      // Every rank receives the partial sums of chunk k before the results of chunk k - 1. Data arrives over a link in the order
      // in which it was sent, so every rank must also send in this order.
      if (k < steps) send_partial(k);
      if (k >= 1 && k - 1 < steps) merge(k - 1);
      if (k >= 2 && k - 2 < steps) collect(k - 2);
      mesh_.progress();
    }
    home_.end(steps + 3);
    mesh_.exchange({}, {}, wait_);
  }

 private:
  size_t hosts() const { return layout_.hosts.size(); }
  bool owns() const { return layout_.place < slices_; }
  int owner(size_t host) const { return layout_.hosts[host][layout_.place]; }
  Range chunk(size_t k) const { return piece(call_.bytes(), step_bytes, k); }
  // Returns slice `place` of chunk k as a range of the message. The range is empty if the rank at that place owns no slice.
  Range slice(size_t k, int place) const {
    const Range whole = chunk(k);
    if (place >= slices_) return {whole.begin, whole.begin};
    const Range one = part(whole.bytes(), slices_, place);
    return {whole.begin + one.begin, whole.begin + one.end};
  }
  // Returns whether every host has a non-empty share of each slice of a full chunk. A share can be empty, because slices are cut
  // into shares at multiples of 64 bytes.
  bool shares_are_full() const { return step_bytes / 64 / slices_ >= hosts(); }
  size_t elements(Range range) const { return range.bytes() / row_.element_bytes; }
  bool rooted() const { return call_.signature.root >= 0; }
  bool has_root(size_t host) const { return std::ranges::count(layout_.hosts[host], call_.signature.root) > 0; }
  // Returns whether `host` merges partial sums.
  bool merges(size_t host) const { return !rooted() || has_root(host); }
  bool gets_result(int place) const { return !rooted() || home_.ranks()[place] == call_.signature.root; }
  // Returns whether the message is so small that every host receives the partial sums of all other hosts and merges them itself.
  // No host then sends a result.
  bool in_one_latency() const { return !rooted() && mscomm::in_one_latency(hosts(), call_.bytes()); }
  // A range of elements.
  struct Span {
    size_t begin, count;
  };
  // Returns the elements that `host` merges in this rank's slice of chunk k.
  Span share(size_t k, size_t host) const {
    const size_t all = elements(slice(k, layout_.place));
    if (rooted()) return {0, merges(host) ? all : 0};
    return in_one_latency() ? Span{0, all} : share_of(all, host);
  }
  Span share_of(size_t all, size_t host) const {
    const size_t a = row_.accumulator_bytes;
    const Range bytes = part(all * a, static_cast<int>(hosts()), static_cast<int>(host));
    return {bytes.begin / a, bytes.bytes() / a};
  }
  // Returns the shares of this rank's slice of chunk k that the other hosts merge. begin: the memory of the slice. bytes: the
  // size of one element in this memory. even_empty: whether to return empty shares, too.
  std::vector<Piece> shares(size_t k, char* begin, size_t bytes, bool even_empty) const {
    std::vector<Piece> pieces;
    for (const size_t host : layout_.others) {
      const Span now = share(k, host);
      if ((even_empty && merges(host)) || now.count > 0)
        pieces.push_back({owner(host), begin + now.begin * bytes, now.count * bytes});
    }
    return pieces;
  }

  // Copies chunk k of x into staging, unless x is in this rank's heap. Skips this rank's own slice, which no other rank reads.
  void stage(size_t k) {
    if (!home_.stages_x()) return;
    const Range whole = chunk(k), own = slice(k, layout_.place);
    copy_but(home_.staged(layout_.place, k), call_.in() + whole.begin, whole.bytes(),
             {own.begin - whole.begin, own.end - whole.begin});
  }
  void add_up(size_t k) {
    if (!owns()) return;
    const Range own = slice(k, layout_.place);
    std::vector<const void*> in;
    for (int place = 0; place < home_.size(); place++) {
      if (place == layout_.place) in.push_back(call_.in() + own.begin);
      else if (xs_[place]) in.push_back(xs_[place] + own.begin);
      else in.push_back(home_.staged(place, k) + (own.begin - chunk(k).begin));
    }
    mscomm::add_up(sum_, in, partial_[k % buffers], elements(own));
  }
  void send_partial(size_t k) {
    if (!owns()) return;
    // The pieces of chunk 0 are sent even if they are empty, because the header before them says which call this rank is in.
    mesh_.send(shares(k, partial_[k % buffers], row_.accumulator_bytes, k == 0));
    queued_[k % buffers] = mesh_.queued();
  }
  // This rank owns one slice of chunk k, and each host merges one share of that slice. merge() adds up the partial sums of all
  // hosts for this host's share, and sends the result to the other hosts. If in_one_latency(), every host merges the whole slice,
  // and no result is sent.
  void merge(size_t k) {
    if (!owns() || !merges(layout_.here)) return;
    const Span mine = share(k, layout_.here);
    char* const result = result_[k % buffers];
    std::vector<Piece> in, out;
    for (const size_t host : layout_.others)
      if (k == 0 || mine.count > 0) in.push_back({owner(host), coming_[host], mine.count * row_.accumulator_bytes});
    mesh_.receive(in, wait_);
    // Merge into the memory that holds the sums of host 0. If in_one_latency(), use a copy of our own partial sums, because the
    // sums themselves may still be queued for other hosts.
    char* const own = partial_[k % buffers] + mine.begin * row_.accumulator_bytes;
    if (in_one_latency()) copy(coming_[layout_.here], own, mine.count * row_.accumulator_bytes);
    const auto of = [&](size_t host) { return host == layout_.here && !in_one_latency() ? own : coming_[host]; };
    merge_in_order(row_, hosts(), of, mine.count);
    row_.finish(of(0), layout_.size, result + mine.begin * row_.element_bytes, mine.count);
    if (in_one_latency() || rooted()) return;

    for (const size_t host : layout_.others)
      if (mine.count > 0) out.push_back({owner(host), result + mine.begin * row_.element_bytes, mine.count * row_.element_bytes});
    mesh_.send(out);
  }
  // Receives the results that the other hosts have merged for this rank's slice of chunk k.
  void collect(size_t k) {
    if (!owns() || in_one_latency()) return;
    if (rooted()) return mesh_.wait_until_sent(queued_[k % buffers], wait_);
    const std::vector<Piece> in = shares(k, result_[k % buffers], row_.element_bytes, false);
    // A host sends its result of chunk k after it has received our partial sums of chunk k. So when all these results have
    // arrived, the buffer with our sums is free. But a host with an empty share sends no result. If there may be such hosts, wait
    // until all our data has been sent.
    if (shares_are_full()) mesh_.receive(in, wait_);
    else mesh_.exchange({}, in, wait_);
  }
  // Delivers the result of this rank's slice of chunk k to all ranks on the host. For ranks whose out is not in a heap,
  // publish() puts the result into staging. After the round of step `step`, these ranks call take(), which copies it from
  // staging to out.
  void publish(size_t k, size_t step) {
    if (!owns() || !merges(layout_.here)) return;
    const Range own = slice(k, layout_.place);
    bool staged = false;
    for (int place = 0; place < home_.size(); place++) {
      if (!gets_result(place)) continue;
      char* const out = place == layout_.place ? call_.result() : outs_[place];
      if (out) copy(out + own.begin, result_[k % buffers], own.bytes());
      staged |= !out;
    }
    if (staged) copy(home_.staged(layout_.place, step) + step_bytes, result_[k % buffers], own.bytes());
  }
  void take(size_t k, size_t step) {
    if (!gets_result(layout_.place) || outs_[layout_.place]) return;
    for (int i = 1; i < home_.size(); i++) {
      const int place = (layout_.place + i) % home_.size();
      const Range theirs = slice(k, place);
      copy(call_.result() + theirs.begin, home_.staged(place, step) + step_bytes, theirs.bytes());
    }
  }

  const Call& call_;
  const Layout& layout_;
  Mesh& mesh_;
  const Wait& wait_;
  Home home_;
  // The number of slices of a chunk. On every host, slice i belongs to the rank at place i.
  const int slices_;
  const Reduction &row_, &sum_;
  std::vector<char*> xs_, outs_;  // for each place on this host, the array of the rank there, or nullptr if it is staged
  std::array<char*, buffers> partial_, result_;
  std::array<uint64_t, buffers> queued_{};  // for each buffer of partial sums, what has been sent when it is free
  std::vector<char*> coming_;               // for each host, a buffer for the partial sums that arrive from it
};

}  // namespace

void all_reduce_hierarchical(const Call& call, const Ranks& ranks, const Wait& wait) { Hierarchy(call, ranks, wait).run(); }

}  // namespace mscomm
