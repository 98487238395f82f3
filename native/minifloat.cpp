// C interface of small floating-point formats, on their own and behind zero-value compression. Layouts:
// codecs/minifloat/reference.py, codecs/zvc/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"
#include "tiles.h"

namespace bs {

// A format as codecs/minifloat/formats.py has it. A code is handled in a type of its own, `fields` of them are stored in a Stored.
template <int exponent_, int mantissa_, int bias_, uint32_t top_, bool subnormals_, class Code_, class Stored_,
          int fields_>
struct Format {
    static constexpr int mantissa = mantissa_, bias = bias_, bits = 1 + exponent_ + mantissa_, fields = fields_;
    static constexpr uint32_t top = top_, nan = (1u << (bits - 1)) - 1, least = subnormals_ ? 1 : 1u << mantissa;
    static constexpr bool subnormals = subnormals_;
    using Code = Code_;
    using Stored = Stored_;
};
using Fp8 = Format<4, 3, 7, 0x7d, false, uint8_t, uint8_t, 1>;
using Fp10 = Format<5, 4, 15, 0x1ef, false, uint16_t, uint32_t, 3>;
using Fp16 = Format<5, 10, 15, 0x7bff, false, uint16_t, uint16_t, 1>;
using E4M3 = Format<4, 3, 7, 0x7d, true, uint8_t, uint8_t, 1>;
using E5M2 = Format<5, 2, 15, 0x7b, true, uint8_t, uint8_t, 1>;
using Brain = Format<8, 7, 127, 0x7f7f, true, uint16_t, uint16_t, 1>;

// Codes of codecs/minifloat/formats.py.
enum class Mini : int { Fp8 = 0, Fp10 = 1, Fp16 = 2, E4M3 = 3, E5M2 = 4, Brain = 5 };

constexpr int64_t kCodes = 3072;  // elements at a time: whole lines of every format's plane
constexpr int64_t kCodeBlock = 24 * kCodes;

struct MiniEncodeJob {
    const void* x;
    Float type;
    Mini format;
    bool nonzero;
    void* codes;
    bool stream;
};

struct MiniDecodeJob {
    const void* codes;
    Mini format;
    void* out;
    Float type;
    bool stream;
};

struct ScaledJob {
    void* dense;  // x, which is only read, or out
    Float type;
    Mini format;
    int64_t n, group_size;
    uint8_t* codes;
    float* scales;
    bool stream;
};

struct ZvcMiniEncodeJob {
    const void* x;
    Float type;
    Mini format;
    int64_t n;
    uint8_t* mask;
    int64_t* counts;  // of each chunk; or null
};

struct ZvcMiniDecodeJob {
    const uint8_t* mask;
    const int64_t* offsets;
    const void* values;
    int64_t stored;  // codes
    Mini format;
    void* out;
    Float type;
    int64_t n;
    bool stream;
};

}  // namespace bs

#define BS_KERNELS "minifloat_kernels.h"
#include "foreach_isa.h"

namespace bs {

// The codes of a block, which has stored words of its own, to where they belong: `first` codes come before them.
//
// Where three share a word, only the words between are this block's alone. To the first and the last one it adds its
// codes; they were 0 before. Of `from`, one word behind the last one may be read.
inline void place_codes(const uint8_t* from, Mini format, int64_t count, int64_t first, void* values) {
    if (format != Mini::Fp10) {
        const int64_t width = format == Mini::Fp16 || format == Mini::Brain ? 2 : 1;
        std::memcpy(static_cast<uint8_t*>(values) + first * width, from, size_t(count * width));
        return;
    }
    if (count == 0) return;
    const auto add = [](uint32_t* word, uint32_t bits) { __atomic_fetch_or(word, bits, __ATOMIC_RELAXED); };
    const auto word_at = [&](int64_t i) {
        uint32_t word;
        std::memcpy(&word, from + 4 * i, sizeof word);
        return word;
    };
    uint32_t* to = static_cast<uint32_t*>(values) + first / 3;
    const int missing = int(2 - (first + 2) % 3);  // codes that the word before lacks
    if (missing > 0) add(to++, (word_at(0) & ((1u << 10 * missing) - 1)) << (30 - 10 * missing));
    const int64_t rest = count - missing, words = std::max<int64_t>(rest, 0) / 3;
    const auto shifted = [&](int64_t i) {
        return (word_at(i) >> 10 * missing | word_at(i + 1) << (30 - 10 * missing)) & ((1u << 30) - 1);
    };
    for (int64_t i = 0; i < words; ++i) to[i] = shifted(i);
    if (rest > 3 * words) add(to + words, shifted(words) & ((1u << 10 * (rest - 3 * words)) - 1));
}

// Bytes of a plane of n codes.
inline int64_t mini_bytes(int format, int64_t n) {
    switch (Mini(format)) {
        case Mini::Fp10: return (n + 2) / 3 * 4;
        case Mini::Fp16:
        case Mini::Brain: return n * 2;
        default: return n;
    }
}
inline int float_bytes(int type) { return Float(type) == Float::F32 ? 4 : 2; }

constexpr int64_t kMiniChunks = 16;  // ZVC chunks in a block
constexpr int64_t kMiniBlock = kMiniChunks * kZvcChunk;

// Bytes for the codes of a block, and of what place_codes may read behind them.
constexpr int64_t kMiniBlockBytes = kMiniBlock * 2 + 64;

}  // namespace bs

BS_EXPORT void bs_minifloat_encode(const void* x, int64_t n, int type, int format, int nonzero, void* codes,
                                   int threads) {
    const bs::MiniEncodeJob job{x,     bs::Float(type), bs::Mini(format), nonzero != 0,
                                codes, bs::should_stream(codes, bs::mini_bytes(format, n))};
    const auto encode = BS_PICK(encode_mini);
    bs::for_blocks(n, bs::kCodeBlock, threads, [&](int64_t begin, int64_t end) { encode(job, begin, end); });
}

BS_EXPORT void bs_minifloat_decode(const void* codes, int format, void* out, int64_t n, int type, int threads) {
    const bs::MiniDecodeJob job{codes, bs::Mini(format), out, bs::Float(type),
                                bs::should_stream(out, n * bs::float_bytes(type))};
    const auto decode = BS_PICK(decode_mini);
    bs::for_blocks(n, bs::kCodeBlock, threads, [&](int64_t begin, int64_t end) { decode(job, begin, end); });
}

BS_EXPORT void bs_minifloat_scaled_encode(void* x, int64_t n, int type, int format, int64_t group_size, uint8_t* codes,
                                          float* scales, int threads) {
    const bs::ScaledJob job{x, bs::Float(type), bs::Mini(format), n, group_size, codes, scales, false};
    const auto encode = BS_PICK(encode_scaled);
    const int64_t block = std::max<int64_t>(1, (int64_t(1) << 16) / group_size) * group_size;
    bs::for_blocks(n, block, threads, [&](int64_t begin, int64_t end) { encode(job, begin, end); });
}

BS_EXPORT void bs_minifloat_scaled_decode(uint8_t* codes, float* scales, int format, int64_t group_size, void* out,
                                          int64_t n, int type, int threads) {
    const bs::ScaledJob job{out,   bs::Float(type), bs::Mini(format), n, group_size, codes, scales,
                            bs::should_stream(out, n * bs::float_bytes(type))};
    const auto decode = BS_PICK(decode_scaled);
    const int64_t block = std::max<int64_t>(1, (int64_t(1) << 16) / group_size) * group_size;
    bs::for_blocks(n, block, threads, [&](int64_t begin, int64_t end) { decode(job, begin, end); });
}

// `x` is images in channels last, of `channels` and `area` pixels each, which whole groups fill.
BS_EXPORT void bs_minifloat_images_encode(void* x, int64_t n, int type, int format, int64_t group_size,
                                          int64_t channels, int64_t area, uint8_t* codes, float* scales, int threads) {
    const bs::ScaledJob job{x, bs::Float(type), bs::Mini(format), n, group_size, codes, scales, false};
    if (n == 0) return;
    const auto encode = BS_PICK(encode_scaled_images);
    const int64_t images = n / (channels * area);
    const int64_t some = std::max<int64_t>(images / (threads * 4), 1);  // a thread's memory serves several images
    bs::for_blocks(images, some, threads, [&](int64_t begin, int64_t end) { encode(job, channels, area, begin, end); });
}

// As there, for the result; any images will do.
BS_EXPORT void bs_minifloat_images_decode(uint8_t* codes, float* scales, int format, int64_t group_size,
                                          int64_t channels, int64_t area, void* out, int64_t n, int type, int threads) {
    const bs::ScaledJob job{out, bs::Float(type), bs::Mini(format), n, group_size, codes, scales, false};
    if (n == 0) return;
    const auto decode = BS_PICK(decode_scaled_images);
    bs::for_blocks(n / channels, bs::kTurned, threads,
                   [&](int64_t begin, int64_t end) { decode(job, channels, area, begin, end); });
}

// First half of encode: fills `mask` and `offsets`, and returns how many values there are, so that the caller can
// allocate exactly their codes. x is read once: the codes of a block are put into `scratch`, as far as its `room` (bytes)
// goes, and `places` says where; -1: nowhere.
BS_EXPORT int64_t bs_zvc_minifloat_encode(const void* x, int64_t n, int type, int format, uint8_t* mask,
                                          int64_t* offsets, uint8_t* scratch, int64_t room, int64_t* places,
                                          int threads) {
    const bs::ZvcMiniEncodeJob job{x, bs::Float(type), bs::Mini(format), n, mask, offsets};
    const auto encode = BS_PICK(encode_block);
    const int64_t chunks = (n + bs::kZvcChunk - 1) / bs::kZvcChunk;
    bs::Slabs slabs(scratch, room, threads);
    bs::for_blocks(chunks, bs::kMiniChunks, threads, [&](int64_t begin, int64_t end) {
        alignas(64) uint8_t codes[bs::kMiniBlockBytes];
        const int64_t bytes = bs::mini_bytes(format, encode(job, begin, end, codes));
        const int64_t place = slabs.take(bytes);
        if (place >= 0) std::memcpy(scratch + place, codes, size_t(bytes));
        places[begin / bs::kMiniChunks] = place;
    });
    return bs::sums_before(offsets, chunks);
}

// Second half: fills `values`; what was put nowhere is encoded again, from the end of x on, as bs_zvc_gather.
BS_EXPORT void bs_zvc_minifloat_place(const void* x, int64_t n, int type, int format, uint8_t* mask,
                                      const int64_t* offsets, const uint8_t* scratch, const int64_t* places,
                                      void* values, int64_t stored, int threads) {
    const bs::ZvcMiniEncodeJob job{x, bs::Float(type), bs::Mini(format), n, mask, nullptr};
    const auto encode = BS_PICK(encode_block);
    const int64_t chunks = (n + bs::kZvcChunk - 1) / bs::kZvcChunk;
    if (bs::Mini(format) == bs::Mini::Fp10) {
        // Words of which two blocks or more have codes: each block adds its own.
        uint32_t* const words = static_cast<uint32_t*>(values);
        for (int64_t chunk = 0; chunk < chunks; chunk += bs::kMiniChunks)
            if (offsets[chunk] < stored) words[offsets[chunk] / 3] = 0;
        if (stored > 0) words[(stored - 1) / 3] = 0;
    }
    bs::for_blocks(
        chunks, bs::kMiniChunks, threads,
        [&](int64_t begin, int64_t end) {
            alignas(64) uint8_t codes[bs::kMiniBlockBytes];
            const int64_t place = places[begin / bs::kMiniChunks];
            const int64_t count = (end < chunks ? offsets[end] : stored) - offsets[begin];
            if (place < 0) encode(job, begin, end, codes);
            bs::place_codes(place < 0 ? codes : scratch + place, bs::Mini(format), count, offsets[begin], values);
        },
        bs::Order::Backward);
}

// Fills `out`. Returns 0, or -1 with `out` untouched where mask, offsets and `words`, the elements of `values`,
// disagree.
BS_EXPORT int bs_zvc_minifloat_decode(const uint8_t* mask, const int64_t* offsets, const void* values, int64_t words,
                                      int format, void* out, int64_t n, int type, int threads) {
    const int64_t chunks = (n + bs::kZvcChunk - 1) / bs::kZvcChunk;
    if (chunks == 0) return words == 0 ? 0 : -1;
    const int64_t last = offsets[chunks - 1];
    if (offsets[0] != 0 || last < 0 || last > n) return -1;
    const int fields = bs::Mini(format) == bs::Mini::Fp10 ? 3 : 1;
    const int64_t stored = last + bs::scalar::count_mask(mask, chunks - 1, n);
    if ((stored + fields - 1) / fields != words) return -1;
    const bs::ZvcMiniDecodeJob job{mask, offsets, values, stored, bs::Mini(format), out, bs::Float(type), n,
                                   bs::should_stream(out, n * bs::float_bytes(type))};
    const auto disagreements = BS_PICK(mini_disagreements);
    bs::Sum wrong;
    bs::for_blocks(chunks, bs::kMiniChunks, threads,
                   [&](int64_t begin, int64_t end) { wrong.add(disagreements(job, begin, end)); });
    if (wrong.value() != 0) return -1;
    const auto scatter = BS_PICK(scatter_mini);
    bs::for_blocks(chunks, bs::kMiniChunks, threads, [&](int64_t begin, int64_t end) { scatter(job, begin, end); });
    return 0;
}
