// C interface of few-bit codes of an activation's derivative, and of what is multiplied by a code's value. Layout:
// codecs/fewbit/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

struct FewbitEncodeJob {
    const void* x;
    int width;            // bytes per element
    int32_t infinity;     // the bits of positive infinity: what is as large without its sign is not finite
    int bits;             // 1 to 4
    const int32_t* keys;  // of the 2**bits - 1 thresholds, rising
    uint8_t* packed;
};

struct FewbitDecodeJob {
    const uint8_t* packed;
    int bits;
    const uint32_t* values;  // bits of 2**bits values, in the low bytes
    void* out;
    int width;
    bool stream;
};

struct ScaleJob {
    const void* x;
    const uint8_t* packed;
    int bits;           // 1 to 4
    const void* table;  // 2**bits values of the type of x, none of which is NaN
    void* out;          // may be x
    int width;
    bool stream;
};

}  // namespace bs

#define BS_KERNELS "fewbit_kernels.h"
#include "foreach_isa.h"

namespace bs {
constexpr int64_t kBlock = 1 << 16;  // elements; a multiple of kRun
}

// Returns how many elements are not finite.
BS_EXPORT int64_t bs_fewbit_encode(const void* x, int64_t n, int width, int infinity, int bits, const int32_t* keys,
                                   uint8_t* packed, int threads) {
    const bs::FewbitEncodeJob job{x, width, infinity, bits, keys, packed};
    const auto encode = BS_PICK(encode_derivative);
    bs::Sum nonfinite;
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { nonfinite.add(encode(job, begin, end)); });
    return nonfinite.value();
}

BS_EXPORT void bs_fewbit_decode(const uint8_t* packed, int bits, const uint32_t* values, void* out, int64_t n,
                                int width, int threads) {
    const bs::FewbitDecodeJob job{packed, bits, values, out, width, bs::should_stream(out, n * width)};
    const auto decode = BS_PICK(decode_derivative);
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { decode(job, begin, end); });
}

// out[i] = x[i] * table[code i], n float32 or float64. `out` may be x.
BS_EXPORT void bs_scale_by_codes(const void* x, const uint8_t* packed, int bits, const void* table, void* out, int64_t n,
                                 int width, int threads) {
    const bs::ScaleJob job{x, packed, bits, table, out, width, out != x && bs::should_stream(out, n * width)};
    const auto scale = BS_PICK(scale_by_codes);
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { scale(job, begin, end); });
}
