// Scan and exscan over the mesh, along the chain of ranks. Window by window, each rank receives the combined data of the ranks
// before it, combines this data with its own x, and passes the result on. While a rank combines one window, the next one is
// already being sent to it. The call takes n-1 latencies, and each link carries the message once, in the accumulator type.
#include "algo/mesh_steps.h"
#include "algo/order.h"
#include "base/reduce.h"

namespace mscomm {

void scan_chain(const Call& call, const Ranks& ranks, const Wait& wait) {
  Mesh& mesh = *ranks.mesh;
  const int n = mesh.size(), me = mesh.rank();
  const bool inclusive = call.signature.what == Collective::scan;
  const Reduction& row = reduction(call.signature.dtype, call.signature.op);

  const size_t count = call.signature.count, window = window_bytes / row.accumulator_bytes;  // both in elements
  char* const before = ranks.scratch_of(2 * window_bytes);
  char* const with_mine = before + window_bytes;
  std::vector<Piece> out, in;
  for (size_t k = 0; k < windows(count, window); k++) {
    const Range now = piece(count, window, k);  // in elements
    const char* const x = call.in() + now.begin * row.element_bytes;
    char* const result = call.result() + now.begin * row.element_bytes;
    const size_t elements = now.bytes(), bytes = elements * row.accumulator_bytes;
    in.clear();
    if (me > 0) in.push_back({me - 1, before, bytes});
    mesh.exchange(out, in, wait);
    // Read x before writing the result, which may overwrite x.
    if (me == 0) {
      row.widen(x, with_mine, elements);
    } else {
      copy(with_mine, before, bytes);
      row.fold(with_mine, x, elements);
    }
    if (inclusive) row.finish(with_mine, 1, result, elements);
    else if (me > 0) row.finish(before, 1, result, elements);
    out.clear();
    if (me + 1 < n) out.push_back({me + 1, with_mine, bytes});
  }
  mesh.exchange(out, {}, wait);
  if (!inclusive && me == 0) write_identity(call);
}

}  // namespace mscomm
