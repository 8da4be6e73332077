// Compiles the reductions for AVX-512.
#include "base/reduce_loops.h"

#if MSCOMM_LEVELS == 3
namespace mscomm {

constinit const Reductions avx512_reductions = reductions<Avx512>;

}  // namespace mscomm
#endif
