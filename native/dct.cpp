// C interface of 8x8 cosine transforms, quantised and without their zeros. Definition: codecs/dct/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

constexpr int64_t kDctChunk = 64;  // blocks whose codes make a chunk of ZVC

struct DctJob {
    void* dense;  // x, which is only read, or out
    Float type;
    int64_t outer, height, width, inner;
    const float* basis;  // a row per frequency
    const float* steps;  // of the coefficients, or their inverses
    uint8_t* codes;      // of encode: all of them, a block after the other
    uint8_t* mask;
    int64_t* offsets;
    uint8_t* values;
    int64_t stored;
    float* scales;
    int64_t rows() const { return (height + 7) / 8; }
    int64_t columns() const { return (width + 7) / 8; }
    int64_t blocks() const { return outer * inner * rows() * columns(); }
};

}  // namespace bs

#define BS_KERNELS "dct_kernels.h"
#include "foreach_isa.h"

namespace bs {

inline int64_t dct_chunks(const DctJob& job) { return (job.blocks() + kDctChunk - 1) / kDctChunk; }

}  // namespace bs

// First pass of encode: fills `codes`, `mask`, `offsets` and `scales`. Returns how many codes are not zero; and in
// `strange` how many elements are not finite: if any, the planes are useless.
BS_EXPORT int64_t bs_dct_transform(void* x, int type, int64_t outer, int64_t height, int64_t width, int64_t inner,
                                   const float* basis, const float* steps, uint8_t* codes, uint8_t* mask,
                                   int64_t* offsets, float* scales, int64_t* strange, int threads) {
    const bs::DctJob job{x,     bs::Float(type), outer,   height,  width, inner,  basis,
                         steps, codes,           mask,    offsets, nullptr, 0,   scales};
    const auto scale = BS_PICK(dct_scale);
    const auto transform = BS_PICK(dct_transform);
    bs::Sum found;
    bs::for_blocks(outer, 1, threads, [&](int64_t begin, int64_t end) { found.add(scale(job, begin, end)); });
    *strange = found.value();
    const int64_t chunks = bs::dct_chunks(job);
    bs::for_blocks(chunks, 1, threads, [&](int64_t begin, int64_t end) { transform(job, begin, end); });
    return bs::sums_before(offsets, chunks);
}

// Second pass of encode: fills `values` from `codes`.
BS_EXPORT void bs_dct_gather(const uint8_t* codes, const uint8_t* mask, const int64_t* offsets, int64_t blocks,
                             uint8_t* values, int threads) {
    const int64_t chunks = (blocks + bs::kDctChunk - 1) / bs::kDctChunk;
    bs::for_blocks(chunks, 16, threads, [&](int64_t begin, int64_t end) {
        uint8_t* to = values + offsets[begin];
        for (int64_t i = begin * bs::kDctChunk; i < std::min(end * bs::kDctChunk, blocks); ++i)
            to = bs::scalar::compress<uint8_t>(codes + i * 64, bs::load_word(mask, i * 64), to);
    });
}

// Fills `out`. Returns 0, or -1 with `out` untouched where mask, offsets and `stored` disagree.
BS_EXPORT int bs_dct_decode(uint8_t* mask, int64_t* offsets, uint8_t* values, int64_t stored, float* scales,
                            int64_t outer, int64_t height, int64_t width, int64_t inner, const float* basis,
                            const float* steps, void* out, int type, int threads) {
    const bs::DctJob job{out,   bs::Float(type), outer, height,  width,  inner,  basis,
                         steps, nullptr,         mask,  offsets, values, stored, scales};
    const int64_t chunks = bs::dct_chunks(job);
    int64_t total = 0;
    for (int64_t i = 0; i < job.blocks(); ++i) {
        if (i % bs::kDctChunk == 0 && offsets[i / bs::kDctChunk] != total) return -1;
        total += __builtin_popcountll(bs::load_word(mask, i * 64));
    }
    if (total != stored) return -1;
    const auto restore = BS_PICK(dct_restore);
    bs::for_blocks(chunks, 1, threads, [&](int64_t begin, int64_t end) { restore(job, begin, end); });
    return 0;
}
