// The mesh and its algorithms with ranks as threads over socket pairs, and what a peer may send that it should not.
#include <random>

#include "check.h"
#include "thread_group.h"

using namespace mscomm;

namespace {

void calls(const ThreadRank& me, int size) {
  const auto n = static_cast<size_t>(size);
  for (size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}, size_t{300'001}}) {
    std::vector<float> x(count), out(count), many(count * n);
    for (size_t i = 0; i < count; i++) x[i] = static_cast<float>(me.rank + i % 17);
    me.all_reduce(x.data(), out.data(), count, Dtype::float32);
    for (size_t i = 0; i < count; i++) CHECK(out[i] == static_cast<float>(n * (n - 1) / 2 + n * (i % 17)));
    me.run(Collective::all_gather, Dtype::float32, -1, x.data(), many.data(), count);
    for (size_t rank = 0; rank < n; rank++)
      for (size_t i = 0; i < count; i++) CHECK(many[rank * count + i] == static_cast<float>(rank + i % 17));
    for (int root = 0; root < size; root++) {
      me.run(Collective::broadcast, Dtype::float32, root, x.data(), out.data(), count);
      for (size_t i = 0; i < count; i++) CHECK(out[i] == static_cast<float>(root + i % 17));
    }
    me.run(Collective::barrier, Dtype::uint8, -1, nullptr, nullptr, 0);
    me.all_reduce(x.data(), x.data(), count, Dtype::float32);
    for (size_t i = 0; i < count; i++) CHECK(x[i] == static_cast<float>(n * (n - 1) / 2 + n * (i % 17)));
  }
}

// Two ranks that each take the other for the root wait for each other: the greeting that a waiter sends ends it.
void crossed_roots(const ThreadRank& me) {
  float x[3] = {}, out[3];
  std::string kind;
  try {
    me.run(Collective::broadcast, Dtype::float32, 1 - me.rank, x, out, 3);
    me.run(Collective::barrier, Dtype::uint8, -1, nullptr, nullptr, 0);
  } catch (const Error& error) {
    kind = error.kind;
  }
  CHECK(kind == "Mismatch" || kind == "PeerLost");  // without a hub the second one sees only that the link ended
}

struct NeverBroken final : Watch {
  void look(const Deadline& deadline, const Missing&) override {
    if (deadline.passed()) throw Error("CollectiveTimeout", "deadline");
  }
  bool broken() const override { return false; }
};

// Whatever bytes come instead of a header: an Error or Differs, never a crash, never data.
void garbage_is_refused() {
  std::mt19937 random(3);
  int refused = 0;
  constexpr int tries = 400;
  for (int i = 0; i < tries; i++) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    std::vector<std::optional<Stream>> links(2);
    links[1].emplace(ends[0], "rank 1");
    Mesh mesh(0, 0, std::move(links), [](uint64_t) { return std::nullopt; });

    Signature mine;
    mine.number = 5;
    mine.what = Collective::broadcast;
    mine.root = 1;
    mine.count = 16;
    Header header;
    header.source = 1;
    header.payload = 1;
    header.signature = mine;
    auto* bytes = reinterpret_cast<unsigned char*>(&header);
    // One changed byte anywhere before the reserved tail; a number ahead of ours is no mismatch, it is kept for later.
    const size_t at = random() % offsetof(Header, reserved);
    bytes[at] = static_cast<unsigned char>(bytes[at] + 1 + random() % 255);
    CHECK(send(ends[1], bytes, sizeof header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof header));
    close(ends[1]);
    char data[16];
    const Piece piece{1, data, sizeof data};
    NeverBroken watch;
    try {
      mesh.begin(mine);
      mesh.exchange({}, {&piece, 1}, {watch, Deadline(0.2)});
    } catch (const Error&) {
      refused++;
    } catch (const Differs&) {
      refused++;
    }
  }
  CHECK(refused == tries);
}

}  // namespace

int main() {
  for (const char* algorithm : {"direct", "ring", "tree"})
    for (int size : {2, 3, 4, 5, 8}) on_threads(size, algorithm, false, [size](const ThreadRank& me) { calls(me, size); });
  on_threads(5, "direct", false, [](const ThreadRank& me) { calls(me, 5); }, {0, 1, 0, 1, 2});
  on_threads(2, "tree", false, crossed_roots);
  garbage_is_refused();
  return test::failed();
}
