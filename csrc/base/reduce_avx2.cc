// Compiles the reductions for AVX2.
#include "base/reduce_loops.h"

#if MSCOMM_LEVELS == 3
namespace mscomm {

constinit const Reductions avx2_reductions = reductions<Avx2>;

}  // namespace mscomm
#endif
