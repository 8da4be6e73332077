// All-reduce over the mesh in two steps, each of which takes one network latency. In the first step, every rank receives its part
// of the message from all other ranks, and reduces the part in the canonical order. In the second step, every rank sends its
// result to all other ranks. Each rank sends 2 (n-1)/n times the size of the message, as in a ring (see "pairwise" in Thakur,
// Rabenseifner, Gropp 2005). A rank queues all its input at the start. It queues the result of each window as soon as the window
// is reduced. So the rank sends and receives without interruption from the first byte to the last.
//
// A small message takes only one latency, because every rank sends its whole message to every other rank.
#include "algo/mesh_steps.h"

namespace mscomm {

Cost all_reduce_direct_cost(const Layout& layout, double bytes) {
  const int n = layout.size;
  const double others = n - 1, part = bytes / n;
  if (in_one_latency(n, static_cast<size_t>(bytes)))
    return {
        .latencies = 1, .messages = others, .bytes = others * bytes, .crowded = crowded(n, others * bytes), .copied = n * bytes};
  return {.latencies = 2,
          .messages = 2 * others,
          .bytes = 2 * others * part,
          .crowded = crowded(n, 2 * others * part),
          .copied = bytes};
}

void all_reduce_direct(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  if (in_one_latency(n, call.bytes())) return reduce_in_one_latency(call, ranks, wait);

  const Blocks parts = Blocks::parts(call.bytes(), n);
  char* mine = call.result() + parts.begin(me);
  send_blocks(call, mesh, parts);
  for (size_t k = 0; k < windows(parts.bytes(me), window_bytes); k++) {
    const Range now = piece(parts.bytes(me), window_bytes, k);
    reduce_window(call, ranks, parts, k, mine + now.begin, wait);
    std::vector<Piece> out;
    for (int i = 1; i < n; i++) out.push_back({(me + i) % n, mine + now.begin, now.bytes()});
    mesh.send(out);
  }
  // x and out may be the same array, because a result that arrives from a peer overwrites only data of x that the peer has
  // already received from this rank. exchange() also sends all data that is still queued.
  std::vector<Piece> in;
  for (int from = 0; from < n; from++)
    if (from != me) in.push_back({from, call.result() + parts.begin(from), parts.bytes(from)});
  mesh.exchange({}, in, wait);
}

}  // namespace mscomm
