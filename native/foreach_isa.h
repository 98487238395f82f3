// Compiles the kernels in the file BS_KERNELS once per instruction set, each on top of that set's lanes.
//
// No include guard: every .cpp that has kernels includes this once, after defining BS_KERNELS and including all that
// the kernels use (a standard header must not be read for the first time inside a namespace).
#include "elements.h"
#include "isa.h"
#include "tables.h"

namespace bs::scalar {
#include "lanes_scalar.h"
#include BS_KERNELS
}  // namespace bs::scalar

#if BS_X86
BS_TARGET_BEGIN_AVX2
namespace bs::avx2 {
#include "lanes_avx2.h"
#include "lanes_vector.h"
#include BS_KERNELS
}  // namespace bs::avx2
BS_TARGET_END

#define BS_AVX512 1  // for kernels that have intrinsics of their own
BS_TARGET_BEGIN_AVX512
namespace bs::avx512 {
#include "lanes_avx512.h"
#include "lanes_vector.h"
#include BS_KERNELS
}  // namespace bs::avx512
BS_TARGET_END
#undef BS_AVX512
#endif
