// C interface of norms, curves and dropout in one pass over memory: what ops/onepass/reference.py defines.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "parallel.h"

namespace bs {

struct RowJob {
    const void *x, *residual;  // residual or null
    Float type;                // of both
    const float *mean, *rstd;  // per row; mean or null
    const void *weight, *bias;  // per column, or null
    Float weight_type;
    int64_t width;
    int order;
    uint16_t nan;  // bits of a NaN that is rounded to 16 bits
    Float out_type;
    void* out;
};

// A function of 16-bit numbers: its values where ATen runs vectors, and where it does not. ATen cuts `total` elements
// into chunks for its threads, and runs vectors for whole steps of each.
struct Table {
    const uint16_t *whole, *tail;  // or null: the function is computed
    int64_t chunk, step;           // step is 0 where there are no tails
    uint16_t tail_nan;
};

struct GroupJob {
    const void* x;
    Float type;
    const float *mean, *rstd;  // per image and group
    const void *weight, *bias;
    Float weight_type;
    int64_t channels, inner, groups, pixels, total;
    float *scale, *shift;  // per image and channel
    int curve;
    Table table;
    uint16_t nan;
    void *out, *normed;  // normed or null: the norm's own result
};

struct ChannelJob {
    const void *x, *residual;  // residual or null
    Float type;                // of both, and of the result
    int64_t channels, inner;
    const float *scale, *shift;  // per channel
    int activation;
    float lo, hi;
    uint16_t nan;
    void* out;
};

struct GatedJob {
    const void *gate, *up;
    Float type;
    int64_t total;
    Table table;
    uint16_t nan;
    void *out, *inner;  // inner or null: silu(gate)
};

struct CurveJob {
    const void* x;
    Float type;
    int64_t total;
    int curve;
    Table table;
    uint16_t nan;
    void* out;
};

struct DropoutJob {
    const void* x;
    Float type;
    const uint8_t* mask;
    float scale;
    uint16_t nan;
    void* out;
};

constexpr int64_t kElements = 1 << 14;  // that a thread takes at a time, a multiple of 8

inline int64_t rows_of(int64_t length) { return std::max<int64_t>(1, kElements / std::max<int64_t>(1, length)); }

}  // namespace bs

#define BS_KERNELS "onepass_kernels.h"
#include "foreach_isa.h"

BS_EXPORT void bs_norm_rows(const void* x, const void* residual, int type, const float* mean, const float* rstd,
                            const void* weight, const void* bias, int weight_type, int64_t rows, int64_t width,
                            int order, int nan, void* out, int out_type, int threads) {
    const bs::RowJob job{x,     residual, bs::Float(type), mean, rstd, weight, bias, bs::Float(weight_type), width, order,
                         uint16_t(nan), bs::Float(out_type), out};
    const auto some = BS_PICK(norm_rows);
    bs::for_blocks(rows, bs::rows_of(width), threads, [&](int64_t begin, int64_t end) { some(job, begin, end); });
}

// `lines` is room for 2 * images * channels floats.
BS_EXPORT void bs_group_norm(const void* x, int type, const float* mean, const float* rstd, const void* weight,
                             const void* bias, int weight_type, int64_t images, int64_t channels, int64_t pixels,
                             int64_t inner, int64_t groups, int curve, const uint16_t* whole, const uint16_t* tail,
                             int64_t chunk, int64_t step, int nan, float* lines, void* out, void* normed, int threads) {
    const bs::Table table{whole, tail, chunk, step, 0};
    const bs::GroupJob job{x, bs::Float(type), mean, rstd, weight, bias, bs::Float(weight_type), channels, inner, groups,
                           pixels, images * channels * pixels, lines, lines + images * channels, curve, table,
                           uint16_t(nan), out, normed};
    BS_PICK(group_lines)(job, 0, images);
    const auto some = BS_PICK(group_rows);
    const int64_t rows = images * (inner == 1 ? pixels : channels), length = inner == 1 ? channels : inner;
    bs::for_blocks(rows, bs::rows_of(length), threads, [&](int64_t begin, int64_t end) { some(job, begin, end); });
}

// `lines` is room for 2 * channels floats; x, residual and out are [outer, channels, inner] in memory order.
BS_EXPORT void bs_channel_norm(const void* x, const void* residual, int type, const float* mean, const float* invstd,
                               const float* weight, const float* bias, int64_t outer, int64_t channels, int64_t inner,
                               int activation, double lo, double hi, int nan, float* lines, void* out, int threads) {
    const bs::ChannelJob job{x,          residual,  bs::Float(type), channels,      inner, lines, lines + channels,
                             activation, float(lo), float(hi),       uint16_t(nan), out};
    BS_PICK(channel_lines)(mean, invstd, weight, bias, channels, lines, lines + channels);
    const auto some = BS_PICK(channel_rows);
    const int64_t rows = inner == 1 ? outer : outer * channels, length = inner == 1 ? channels : inner;
    bs::for_blocks(rows, bs::rows_of(length), threads, [&](int64_t begin, int64_t end) { some(job, begin, end); });
}

BS_EXPORT void bs_gated(const void* gate, const void* up, int type, int64_t n, const uint16_t* whole,
                        const uint16_t* tail, int64_t chunk, int64_t step, int nan, int tail_nan, void* out, void* inner,
                        int threads) {
    const bs::Table table{whole, tail, chunk, step, uint16_t(tail_nan)};
    const bs::GatedJob job{gate, up, bs::Float(type), n, table, uint16_t(nan), out, inner};
    const auto some = BS_PICK(gated_elements);
    bs::for_blocks(n, bs::kElements, threads, [&](int64_t begin, int64_t end) { some(job, begin, end); });
}

BS_EXPORT void bs_curve(const void* x, int type, int64_t n, int curve, const uint16_t* whole, const uint16_t* tail,
                        int64_t chunk, int64_t step, int nan, void* out, int threads) {
    const bs::CurveJob job{x, bs::Float(type), n, curve, {whole, tail, chunk, step, 0}, uint16_t(nan), out};
    const auto some = BS_PICK(curve_elements);
    bs::for_blocks(n, bs::kElements, threads, [&](int64_t begin, int64_t end) { some(job, begin, end); });
}

BS_EXPORT void bs_dropout(const void* x, int type, int64_t n, const uint8_t* mask, double scale, int nan, void* out,
                          int threads) {
    const bs::DropoutJob job{x, bs::Float(type), mask, float(scale), uint16_t(nan), out};
    const auto some = BS_PICK(dropout_elements);
    bs::for_blocks(n, bs::kElements, threads, [&](int64_t begin, int64_t end) { some(job, begin, end); });
}
