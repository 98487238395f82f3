// C interface of error-bounded values at a width per block. Layout: codecs/szp/codec.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

constexpr int64_t kSzpBlock = 32;   // ops.schema.SZP_BLOCK
constexpr int kSzpSigned = 64;      // codecs.szp.reference.SIGNED
constexpr int64_t kSzpChunks = 16;  // chunks that a thread takes at a time

struct SzpEncodeJob {
    const void* x;
    Float type;
    int64_t n;
    const float* grid;  // the inverse of the step, the step, the largest difference
    uint8_t* mask;
    int64_t* offsets;
    uint32_t* words;  // second pass only
    bool stream;
};

struct SzpDecodeJob {
    const uint8_t* mask;
    const int64_t* offsets;
    const uint32_t* words;
    int64_t stored;
    float step;
    void* out;
    Float type;
    int64_t n;
    bool stream;
};

// The smallest and the largest finite element of a block, as float32; none are the other way round.
struct Extremes {
    float low, high;
};

}  // namespace bs

#define BS_KERNELS "szp_kernels.h"
#include "foreach_isa.h"

namespace bs {

inline int64_t szp_chunks(int64_t n) { return (n + kZvcChunk - 1) / kZvcChunk; }

}  // namespace bs

// The smallest and the largest finite element, to range[0] and range[1]; 0 and 0 where there is none. `scratch` holds
// two floats per 65,536 elements.
BS_EXPORT void bs_szp_range(const void* x, int64_t n, int type, float* scratch, float* range, int threads) {
    constexpr int64_t block = 1 << 16;
    const auto extremes = BS_PICK(extremes);
    bs::for_blocks(n, block, threads, [&](int64_t begin, int64_t end) {
        const bs::Extremes found = extremes(x, bs::Float(type), begin, end);
        scratch[begin / block * 2] = found.low;
        scratch[begin / block * 2 + 1] = found.high;
    });
    bs::Extremes all{INFINITY, -INFINITY};
    for (int64_t i = 0; i < (n + block - 1) / block; ++i) {
        all.low = std::min(all.low, scratch[2 * i]);
        all.high = std::max(all.high, scratch[2 * i + 1]);
    }
    const bool any = all.low <= all.high;
    range[0] = any ? all.low + 0.0f : 0.0f;  // -0.0 becomes 0.0
    range[1] = any ? all.high + 0.0f : 0.0f;
}

// First pass of encode: fills `mask` and `offsets`. Returns how many words there are, for the caller to allocate.
BS_EXPORT int64_t bs_szp_measure(const void* x, int64_t n, int type, const float* grid, uint8_t* mask,
                                 int64_t* offsets, int threads) {
    const bs::SzpEncodeJob job{x, bs::Float(type), n, grid, mask, offsets, nullptr, false};
    const auto measure = BS_PICK(szp_measure);
    const int64_t chunks = bs::szp_chunks(n);
    bs::for_blocks(chunks, bs::kSzpChunks, threads, [&](int64_t begin, int64_t end) { measure(job, begin, end); });
    return bs::sums_before(offsets, chunks);
}

// Second pass of encode: fills `words`, from the end of x on, which the first pass has left in the caches.
BS_EXPORT void bs_szp_write(const void* x, int64_t n, int type, const float* grid, uint8_t* mask, int64_t* offsets,
                            uint32_t* words, int64_t stored, int threads) {
    const bs::SzpEncodeJob job{x, bs::Float(type), n, grid, mask, offsets, words, bs::exceeds_caches(stored * 4)};
    const auto write = BS_PICK(szp_write);
    bs::for_blocks(
        bs::szp_chunks(n), bs::kSzpChunks, threads, [&](int64_t begin, int64_t end) { write(job, begin, end); },
        bs::Order::Backward);
}

// Fills `out`. Returns 0, or -1 with `out` untouched where mask, offsets, widths and `stored` disagree.
BS_EXPORT int bs_szp_decode(const uint8_t* mask, const int64_t* offsets, const uint32_t* words, int64_t stored,
                            float step, void* out, int64_t n, int type, int threads) {
    const int64_t width = bs::Float(type) == bs::Float::F32 ? 4 : 2;
    const bs::SzpDecodeJob job{mask,           offsets, words, stored, step, out, bs::Float(type), n,
                               bs::should_stream(out, n * width)};
    const int64_t chunks = bs::szp_chunks(n);
    if (chunks == 0) return stored == 0 ? 0 : -1;
    if (offsets[0] != 0) return -1;
    const auto disagreements = BS_PICK(szp_disagreements);
    bs::Sum wrong;
    bs::for_blocks(chunks, bs::kSzpChunks, threads,
                   [&](int64_t begin, int64_t end) { wrong.add(disagreements(job, begin, end)); });
    if (wrong.value() != 0) return -1;
    const auto read = BS_PICK(szp_read);
    bs::for_blocks(chunks, bs::kSzpChunks, threads, [&](int64_t begin, int64_t end) { read(job, begin, end); });
    return 0;
}
