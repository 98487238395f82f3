// C interface of small floating-point formats, on their own and behind zero-value compression. Layouts: ops/reference.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

// A format as ops/formats.py has it. A code is handled in a type of its own, `fields` of them are stored in a Stored.
template <int exponent_, int mantissa_, int bias_, uint32_t top_, bool subnormals_, class Code_, class Stored_,
          int fields_>
struct Format {
    static constexpr int mantissa = mantissa_, bias = bias_, bits = 1 + exponent_ + mantissa_, fields = fields_;
    static constexpr uint32_t top = top_, nan = (1u << (bits - 1)) - 1, least = subnormals_ ? 1 : 1u << mantissa;
    static constexpr bool subnormals = subnormals_;
    using Code = Code_;
    using Stored = Stored_;
};
using Fp8 = Format<4, 3, 7, 0x7e, false, uint8_t, uint8_t, 1>;
using Fp10 = Format<5, 4, 15, 0x1ef, false, uint16_t, uint32_t, 3>;
using Fp16 = Format<5, 10, 15, 0x7bff, false, uint16_t, uint16_t, 1>;
using E4M3 = Format<4, 3, 7, 0x7e, true, uint8_t, uint8_t, 1>;
using E5M2 = Format<5, 2, 15, 0x7b, true, uint8_t, uint8_t, 1>;
using Brain = Format<8, 7, 127, 0x7f7f, true, uint16_t, uint16_t, 1>;

// Codes of ops/formats.py.
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

struct ZvcMiniJob {
    void* dense;  // x, which is only read, or out
    Float type;
    Mini format;
    int64_t n;
    const uint8_t* mask;
    const int64_t* offsets;
    void* values;
    int64_t stored;  // codes
    bool stream;
};

}  // namespace bs

#define BS_KERNELS "minifloat_kernels.h"
#include "foreach_isa.h"

namespace bs {

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

// After bs_zvc_mark: fills `values` with the codes. From the end of x on, as bs_zvc_gather.
BS_EXPORT void bs_zvc_minifloat_gather(void* x, int64_t n, int type, const uint8_t* mask, const int64_t* offsets,
                                       int format, void* values, int64_t stored, int threads) {
    const bs::ZvcMiniJob job{x,       bs::Float(type), bs::Mini(format), n, mask, offsets, values, stored,
                             bs::exceeds_caches(bs::mini_bytes(format, stored))};
    const auto gather = BS_PICK(gather_mini);
    const int64_t chunks = (n + bs::kZvcChunk - 1) / bs::kZvcChunk;
    bs::for_blocks(
        chunks, bs::kMiniChunks, threads, [&](int64_t begin, int64_t end) { gather(job, begin, end); },
        bs::Order::Backward);
}

// Fills `out`. Returns 0, or -1 with `out` untouched where mask, offsets and `words`, the elements of `values`,
// disagree.
BS_EXPORT int bs_zvc_minifloat_decode(const uint8_t* mask, const int64_t* offsets, void* values, int64_t words,
                                      int format, void* out, int64_t n, int type, int threads) {
    const int64_t chunks = (n + bs::kZvcChunk - 1) / bs::kZvcChunk;
    if (chunks == 0) return words == 0 ? 0 : -1;
    const int64_t last = offsets[chunks - 1];
    if (offsets[0] != 0 || last < 0 || last > n) return -1;
    const int fields = bs::Mini(format) == bs::Mini::Fp10 ? 3 : 1;
    bs::ZvcMiniJob job{out,    bs::Float(type), bs::Mini(format), n, mask, offsets, values, 0,
                       bs::should_stream(out, n * bs::float_bytes(type))};
    job.stored = last + bs::scalar::count_mask(job.mask, chunks - 1, n);
    if ((job.stored + fields - 1) / fields != words) return -1;
    const auto disagreements = BS_PICK(mini_disagreements);
    bs::Sum wrong;
    bs::for_blocks(chunks, bs::kMiniChunks, threads,
                   [&](int64_t begin, int64_t end) { wrong.add(disagreements(job, begin, end)); });
    if (wrong.value() != 0) return -1;
    const auto scatter = BS_PICK(scatter_mini);
    bs::for_blocks(chunks, bs::kMiniChunks, threads, [&](int64_t begin, int64_t end) { scatter(job, begin, end); });
    return 0;
}
