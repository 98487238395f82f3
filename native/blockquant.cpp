// C interface of integers of few bits between each group's extremes. Definition: ops/reference/blockquant.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

constexpr int64_t kGroupMost = 4096;      // elements of the largest group
constexpr int64_t kGroupBlock = 1 << 16;  // elements that a thread takes at a time

struct BlockQuantJob {
    void* dense;  // x, which is only read, or out
    Float type;
    int bits;
    int64_t group_size;
    bool stochastic;
    uint32_t seed;
    uint8_t* codes;
    void* ranges;
    bool stream;
};

}  // namespace bs

#define BS_KERNELS "blockquant_kernels.h"
#include "foreach_isa.h"

// Returns how many elements and ranges are not finite; if any, the planes are useless.
BS_EXPORT int64_t bs_blockquant_encode(void* x, int64_t n, int type, int bits, int64_t group_size, int stochastic,
                                       uint32_t seed, uint8_t* codes, void* ranges, int threads) {
    const bs::BlockQuantJob job{x, bs::Float(type), bits, group_size, stochastic != 0, seed, codes, ranges, false};
    const auto encode = BS_PICK(encode_groups);
    bs::Sum refused;
    bs::for_blocks(n, bs::kGroupBlock, threads,
                   [&](int64_t begin, int64_t end) { refused.add(encode(job, begin, end)); });
    return refused.value();
}

BS_EXPORT void bs_blockquant_decode(uint8_t* codes, void* ranges, int bits, int64_t group_size, void* out, int64_t n,
                                    int type, int threads) {
    const int64_t width = bs::Float(type) == bs::Float::F32 ? 4 : 2;
    // A group of 16 elements of 2 bytes is no whole line.
    const bool stream = bs::should_stream(out, n * width) && group_size * width % 64 == 0;
    const bs::BlockQuantJob job{out, bs::Float(type), bits, group_size, false, 0, codes, ranges, stream};
    const auto decode = BS_PICK(decode_groups);
    bs::for_blocks(n, bs::kGroupBlock, threads, [&](int64_t begin, int64_t end) { decode(job, begin, end); });
}
