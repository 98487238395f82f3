// C interface of zero-value compression. Layout: codecs/zvc/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

struct ZvcEncodeJob {
    const void* x;
    int64_t n;
    int width;  // bytes per element
    uint8_t* mask;
    int64_t* offsets;
    void* values;  // second pass only
    bool stream;
};

struct ZvcDecodeJob {
    const uint8_t* mask;
    const int64_t* offsets;
    const void* values;
    int64_t stored;
    void* out;
    int64_t n;
    int width;
    bool stream;
};

}  // namespace bs

#define BS_KERNELS "zvc_kernels.h"
#include "foreach_isa.h"

namespace bs {

inline int64_t chunks(int64_t n) { return (n + kZvcChunk - 1) / kZvcChunk; }

// Chunks in a block: few enough for all threads to have some, many enough that what starts and ends a block is little.
inline int64_t block_of(int64_t chunks) { return chunks >= 1024 ? 64 : 16; }

}  // namespace bs

// First pass of encode: fills `mask` and `offsets`. Returns how many values there are, so that the caller can allocate
// exactly these; a plane allocated for the worst case would be stashed with its slack.
BS_EXPORT int64_t bs_zvc_mark(const void* x, int64_t n, int width, uint8_t* mask, int64_t* offsets, int threads) {
    const bs::ZvcEncodeJob job{x, n, width, mask, offsets, nullptr, false};
    const auto mark = BS_PICK(mark);
    const int64_t chunks = bs::chunks(n);
    bs::for_blocks(chunks, bs::block_of(chunks), threads, [&](int64_t begin, int64_t end) { mark(job, begin, end); });
    return bs::sums_before(offsets, chunks);
}

// Second pass of encode: fills `values`. It starts at the end of x, because that is what the first pass has left in the
// caches.
BS_EXPORT void bs_zvc_gather(const void* x, int64_t n, int width, uint8_t* mask, int64_t* offsets, void* values,
                             int64_t stored, int threads) {
    const bs::ZvcEncodeJob job{x, n, width, mask, offsets, values, bs::exceeds_caches(stored * width)};
    const auto gather = BS_PICK(gather);
    const int64_t chunks = bs::chunks(n);
    bs::for_blocks(
        chunks, bs::block_of(chunks), threads, [&](int64_t begin, int64_t end) { gather(job, begin, end); },
        bs::Order::Backward);
}

// Fills `out`. Returns 0, or -1 with `out` untouched where mask, offsets and `stored` disagree.
BS_EXPORT int bs_zvc_decode(const uint8_t* mask, const int64_t* offsets, const void* values, int64_t stored, void* out,
                            int64_t n, int width, int threads) {
    const bs::ZvcDecodeJob job{mask, offsets, values, stored, out, n, width, bs::should_stream(out, n * width)};
    const int64_t chunks = bs::chunks(n);
    if (chunks == 0) return stored == 0 ? 0 : -1;
    if (offsets[0] != 0) return -1;
    const auto disagreements = BS_PICK(disagreements);
    bs::Sum wrong;
    bs::for_blocks(chunks, bs::block_of(chunks), threads,
                   [&](int64_t begin, int64_t end) { wrong.add(disagreements(job, begin, end)); });
    if (wrong.value() != 0) return -1;
    const auto scatter = BS_PICK(scatter);
    bs::for_blocks(chunks, bs::block_of(chunks), threads, [&](int64_t begin, int64_t end) { scatter(job, begin, end); });
    return 0;
}
