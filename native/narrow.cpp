// C interface of narrow. Layout: codecs/narrow/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "parallel.h"
#include "planes.h"

namespace bs {

struct NarrowEncodeJob {
    const void* x;
    Integer type;
    int bits;
    uint64_t base;  // two's complement: differences and sums wrap as int64 does in torch
    uint8_t* packed;
};

struct NarrowDecodeJob {
    const uint8_t* packed;
    int bits;
    uint64_t base;
    void* out;
    Integer type;
};

}  // namespace bs

#define BS_KERNELS "narrow_kernels.h"
#include "foreach_isa.h"

namespace bs {
constexpr int64_t kBlock = 1 << 16;  // elements; a multiple of 8
}

BS_EXPORT void bs_narrow_encode(const void* x, int64_t n, int type, int bits, int64_t base, uint8_t* packed,
                                int threads) {
    const bs::NarrowEncodeJob job{x, bs::Integer(type), bits, uint64_t(base), packed};
    const auto narrow = BS_PICK(narrow);
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { narrow(job, begin, end); });
}

BS_EXPORT void bs_narrow_decode(const uint8_t* packed, int bits, int64_t base, void* out, int64_t n, int type,
                                int threads) {
    const bs::NarrowDecodeJob job{packed, bits, uint64_t(base), out, bs::Integer(type)};
    const auto unnarrow = BS_PICK(unnarrow);
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { unnarrow(job, begin, end); });
}

// Bools alone: of other integers it is not known before they are read how many bits they take.
BS_EXPORT BsEncodePlanes bs_bools_encode_planes;
BS_EXPORT BsDecodePlanes bs_bools_decode_planes;

int64_t bs_bools_encode_planes(const void* x, int64_t n, const void*, void* planes, int threads) {
    bs_narrow_encode(x, n, int(bs::Integer::Bool), 1, 0, static_cast<uint8_t*>(planes), threads);
    return 0;
}

void bs_bools_decode_planes(const void* planes, int64_t n, const void*, void* out, int threads) {
    bs_narrow_decode(static_cast<const uint8_t*>(planes), 1, 0, out, n, int(bs::Integer::Bool), threads);
}
