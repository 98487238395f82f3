// C interface of compressed sparse rows. Layout: codecs/csr/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

constexpr int64_t kCsrRow = 256;  // ops.schema.CSR_ROW

struct CsrEncodeJob {
    const void* x;
    int64_t n;
    int width;  // bytes per element
    int32_t* rows;
    uint8_t* columns;  // second pass only, as all that follows
    void* values;
    bool stream_columns, stream_values;
};

struct CsrDecodeJob {
    const uint8_t* columns;
    const int32_t* rows;
    const void* values;
    int64_t stored;
    void* out;
    int64_t n;
    int width;
    bool stream;
};

}  // namespace bs

#define BS_KERNELS "csr_kernels.h"
#include "foreach_isa.h"

namespace bs {

inline int64_t csr_rows(int64_t n) { return (n + kCsrRow - 1) / kCsrRow; }

// Rows in a block: 256 or 1024 KiB of float32, as in zvc.cpp; a multiple of what a kernel flushes at once.
inline int64_t block_of(int64_t rows) { return rows >= 16384 ? 1024 : 256; }

}  // namespace bs

// First pass of encode: fills `rows`. Returns how many values there are, so that the caller can allocate exactly these.
BS_EXPORT int64_t bs_csr_count(const void* x, int64_t n, int width, int32_t* rows, int threads) {
    const bs::CsrEncodeJob job{x, n, width, rows, nullptr, nullptr, false, false};
    const auto count = BS_PICK(count_rows);
    const int64_t total_rows = bs::csr_rows(n);
    bs::for_blocks(total_rows, bs::block_of(total_rows), threads,
                   [&](int64_t begin, int64_t end) { count(job, begin, end); });
    int64_t total = 0;
    rows[0] = 0;
    for (int64_t row = 0; row < total_rows; ++row) {
        total += rows[row + 1];
        rows[row + 1] = int32_t(total);
    }
    return total;
}

// Second pass of encode: fills `columns` and `values`. It starts at the end of x, because that is what the first pass
// has left in the caches.
BS_EXPORT void bs_csr_gather(const void* x, int64_t n, int width, int32_t* rows, uint8_t* columns, void* values,
                             int64_t stored, int threads) {
    const bs::CsrEncodeJob job{x,      n, width, rows, columns, values, bs::exceeds_caches(stored),
                               bs::exceeds_caches(stored * width)};
    const auto gather = BS_PICK(gather_rows);
    const int64_t total_rows = bs::csr_rows(n);
    bs::for_blocks(
        total_rows, bs::block_of(total_rows), threads, [&](int64_t begin, int64_t end) { gather(job, begin, end); },
        bs::Order::Backward);
}

// Fills `out`. Returns 0, or -1 with `out` untouched where rows, columns and `stored` disagree.
BS_EXPORT int bs_csr_decode(const uint8_t* columns, const int32_t* rows, const void* values, int64_t stored, void* out,
                            int64_t n, int width, int threads) {
    const bs::CsrDecodeJob job{columns, rows, values, stored, out, n, width, bs::should_stream(out, n * width)};
    const int64_t total_rows = bs::csr_rows(n), block = bs::block_of(total_rows);
    if (rows[0] != 0 || rows[total_rows] != stored) return -1;
    const auto wrong_rows = BS_PICK(wrong_rows);
    bs::Sum wrong;
    bs::for_blocks(total_rows, block, threads,
                   [&](int64_t begin, int64_t end) { wrong.add(wrong_rows(job, begin, end)); });
    if (wrong.value() != 0) return -1;
    const auto scatter = BS_PICK(scatter_rows);
    bs::for_blocks(total_rows, block, threads, [&](int64_t begin, int64_t end) { scatter(job, begin, end); });
    return 0;
}
