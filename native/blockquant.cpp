// C interface of integers of few bits between each group's extremes. Definition: codecs/blockquant/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"
#include "tiles.h"

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

// Planes of a compiled graph: a group's codes are a row. The bytes of a row have the fields of several groups (`across`),
// which lie `byte_rows` apart, or of one group's several parts. Extremes have planes of their own.
struct BlockQuantRows {
    BlockQuantJob job;
    void *low, *high;
    int64_t n, byte_rows, byte_columns;
    bool across;
    int64_t channels, area;  // of images in channels last; 0 for elements in order
};

inline BlockQuantRows rows_of(const BlockQuantJob& job, int64_t n, bool across, void* low, void* high, int64_t channels,
                              int64_t area) {
    const int64_t count = (n + job.group_size - 1) / job.group_size, fields = 8 / job.bits;
    const int64_t rows = across ? count / fields : count, columns = across ? job.group_size : job.group_size / fields;
    return {job, low, high, n, rows, columns, across, channels, area};
}

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

// `channels` and `area` (pixels of an image) where x is images in channels last, of whole groups and, across, of a number
// that is a multiple of the fields in a byte; 0 where it lies in order.
BS_EXPORT void bs_blockquant_encode_rows(void* x, int64_t n, int type, int bits, int64_t group_size, int stochastic,
                                         uint32_t seed, int across, int64_t channels, int64_t area, uint8_t* codes,
                                         void* low, void* high, int threads) {
    const bs::BlockQuantJob job{x, bs::Float(type), bits, group_size, stochastic != 0, seed, codes, nullptr, false};
    const bs::BlockQuantRows all = bs::rows_of(job, n, across != 0, low, high, channels, area);
    const int64_t together = across != 0 ? 8 / bits : 1;  // groups, or images, whose codes share bytes
    if (channels != 0) {
        const auto encode = BS_PICK(encode_images);
        const int64_t images = n / (channels * area) / together;
        const int64_t some = std::max<int64_t>(images / (threads * 4), 1);  // a thread's memory serves several images
        bs::for_blocks(images, some, threads, [&](int64_t begin, int64_t end) { encode(all, begin, end); });
        return;
    }
    const auto encode = BS_PICK(encode_rows);
    const int64_t block = std::max<int64_t>(bs::kGroupBlock / group_size / together, 1);
    bs::for_blocks(all.byte_rows, block, threads, [&](int64_t begin, int64_t end) { encode(all, begin, end); });
}

// `channels` and `area` as there, for the result; any images will do.
BS_EXPORT void bs_blockquant_decode_rows(uint8_t* codes, void* low, void* high, int bits, int64_t group_size, int across,
                                         void* out, int64_t n, int type, int64_t channels, int64_t area, int threads) {
    const bs::BlockQuantJob job{out, bs::Float(type), bits, group_size, false, 0, codes, nullptr, false};
    const bs::BlockQuantRows all = bs::rows_of(job, n, across != 0, low, high, channels, area);
    if (channels == 0) {
        const auto decode = BS_PICK(decode_rows);
        bs::for_blocks(n, bs::kGroupBlock, threads, [&](int64_t begin, int64_t end) { decode(all, begin, end); });
        return;
    }
    const auto decode = BS_PICK(decode_pixels);
    bs::for_blocks(n / channels, bs::kTurned, threads, [&](int64_t begin, int64_t end) { decode(all, begin, end); });
}
