// C interface of the upper halves of float32 numbers. Layout: codecs/upcast/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

#define BS_KERNELS "upcast_kernels.h"
#include "foreach_isa.h"

namespace bs {
constexpr int64_t kUpcastBlock = 1 << 16;  // elements; whole lines of the output
}

// Stores the upper halves of x; returns how many of the lower ones are not zero.
BS_EXPORT int64_t bs_upcast_encode(const void* x, int64_t n, uint16_t* upper, int threads) {
    const auto* words = static_cast<const uint32_t*>(x);
    const bool stream = bs::should_stream(upper, n * int64_t(sizeof *upper));
    const auto halve = BS_PICK(halve);
    bs::Sum others;
    bs::for_blocks(n, bs::kUpcastBlock, threads, [&](int64_t begin, int64_t end) {
        others.add(halve(words + begin, end - begin, upper + begin, stream));
    });
    return others.value();
}
