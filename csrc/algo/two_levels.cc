#include "algo/two_levels.h"

#include <algorithm>
#include <string>

#include "algo/arena_steps.h"

namespace mscomm {

const Reduction& row_of_partials(const Signature& signature) {
  return reduction(signature.dtype, signature.op == Op::avg ? Op::sum : signature.op);
}

void add_up(const Reduction& sum, std::span<const void* const> in, char* to, size_t count) {
  if (sum.accumulator_bytes == sum.element_bytes) return sum.reduce(in.data(), static_cast<int>(in.size()), 1, to, count);
  constexpr size_t block = 1024;  // in elements; small enough to stay in the cache while all inputs are added to it
  for (size_t at = 0; at < count; at += block) {
    const size_t now = std::min(block, count - at);
    for (size_t i = 0; i < in.size(); i++) {
      const char* from = static_cast<const char*>(in[i]) + at * sum.element_bytes;
      if (i == 0) sum.widen(from, to + at * sum.accumulator_bytes, now);
      else sum.fold(to + at * sum.accumulator_bytes, from, now);
    }
  }
}

void AtHome::look(const Deadline& deadline, const Missing& missing) {
  mesh_.last_look();
  mesh_.progress();
  // last_look() and progress() are fast. The look() of the call's own watch is slower and may need the GIL, so it is called less
  // often.
  if (!broken() && seconds_since(looked_) < longest_sleep_ms * 1e-3) return;
  looked_ = Clock::now();
  mesh_.need_unsent();
  wait_.watch.look(deadline, {[&] { return renumbered(missing(), layout_.at_home()); }, missing.by_memory, missing.speaks});
}

void Away::look(const Deadline& deadline, const Missing& missing) {
  home_.look_at_arrivals();
  wait_.watch.look(deadline, missing);
}

Home::Home(const Call& call, const Ranks& ranks, const Wait& wait, bool one_way)
    : call_(call),
      layout_(ranks.layout),
      arena_(ranks.arena),
      mesh_(*ranks.mesh),
      wait_(wait),
      watch_(wait, ranks.layout, *ranks.mesh),
      away_(wait, *this),
      first_(arena_ ? arena_->steps() : 0) {
  static_assert(chunk_bytes / most_on_two_levels >= 64);
  if (layout_.size > most_on_two_levels)  // MSCOMM_ALGO has forced it
    throw Error("ValueError",
                "MSCOMM_ALGO: hierarchical is for groups of at most " + std::to_string(most_on_two_levels) + " ranks");
  wait_.deadline.start();  // round() copies the deadline, and all copies must have the same start
  if (arena_) one_way ? arena_->post_one_way(call_, wait_) : arena_->post(call_, wait_);
}

void Home::round() {
  if (!arena_) return;
  arena_->round(at_home());
  if (met_ || arena_->agreed()) {
    met_ = true;
    return;
  }
  Differs differs;
  for (int place = 0; place < size(); place++) differs.calls.emplace_back(ranks()[place], arena_->posted(place).signature);
  throw differs;
}

void Home::pass_on(int from, char* data, size_t bytes) {
  if (!arena_) return;
  const char* const x = place() == from ? data : nullptr;
  if (auto differs = meet_one_way(x, bytes, bytes, call_, from, *arena_, at_home())) {
    for (auto& [rank, call] : differs->calls) rank = ranks()[rank];
    throw *differs;
  }
  met_ = true;
  if (place() != from) copy(data, arena_->tiny(from, bytes), bytes);
}

void Home::look_at_arrivals() const {
  if (!arena_ || met_) return;
  for (int other = 0; other < size(); other++)
    if (arena_->has_arrived_with_another(other))
      throw Differs{{{ranks()[place()], call_.signature}, {ranks()[other], arena_->posted(other).signature}}};
}

std::vector<char*> Home::arrays(size_t bytes, uint64_t Post::* offset) const {
  std::vector<char*> found(size());
  for (int place = 0; place < size() && arena_; place++) found[place] = arena_->at(place, arena_->posted(place).*offset, bytes);
  return found;
}

void Home::end(size_t steps, std::span<char* const> read) {
  if (!arena_) return;
  if (std::ranges::any_of(read, [](const char* one) { return one != nullptr; })) {
    confirm_reads();
    round();
  }
  arena_->steps() += steps;
}

}  // namespace mscomm
