// Norms, curves and dropout in one pass over memory, in pieces that stay in a cache. Compiled once per instruction set by
// foreach_isa.h: what is written for one element in onepass/bodies.h becomes vector code here.
#define BS_BODY inline __attribute__((always_inline))
#include "onepass/bodies.h"
#undef BS_BODY

constexpr int64_t kPiece = 1024;  // elements of a piece: 4 KiB of float32

template <class T>
inline void widen_as(const void* x, int64_t at, int64_t n, float* __restrict to) {
    const T* __restrict from = static_cast<const T*>(x) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = widened(from[i]);
}

template <class T>
inline void narrow_as(const float* __restrict from, int64_t n, uint16_t nan, void* out, int64_t at) {
    T* __restrict to = static_cast<T*>(out) + at;
    for (int64_t i = 0; i < n; ++i) narrow(from[i], nan, to[i]);
}

// Elements as float32: in place where they are, else in `room`.
inline const float* wide(const void* x, Float type, int64_t at, int64_t n, float* room) {
    switch (type) {
        case Float::BF16: widen_as<BFloat16>(x, at, n, room); return room;
        case Float::F16: widen_as<Half>(x, at, n, room); return room;
        default: return static_cast<const float*>(x) + at;
    }
}

inline void store(const float* from, Float type, int64_t n, uint16_t nan, void* out, int64_t at) {
    switch (type) {
        case Float::BF16: return narrow_as<BFloat16>(from, n, nan, out, at);
        case Float::F16: return narrow_as<Half>(from, n, nan, out, at);
        default: return narrow_as<float>(from, n, nan, out, at);
    }
}

// Rounds to a type and back.
inline void round_to(float* x, Float type, int64_t n, uint16_t nan) {
    uint16_t room[kPiece];
    if (type == Float::F32) return;
    store(x, type, n, nan, room, 0);
    wide(room, type, 0, n, x);
}

template <Order order>
inline void weigh(float* __restrict x, const float* __restrict weight, const float* __restrict bias, int64_t n) {
    if (weight == nullptr && bias == nullptr) return;
    if (weight == nullptr) {
        for (int64_t i = 0; i < n; ++i) x[i] = weighted(x[i], 1.0f, bias[i], order);
    } else if (bias == nullptr) {
        for (int64_t i = 0; i < n; ++i) x[i] *= weight[i];
    } else {
        for (int64_t i = 0; i < n; ++i) x[i] = weighted(x[i], weight[i], bias[i], order);
    }
}

// Of a row: weight and bias of its elements from `at`, as float32.
struct Vectors {
    const float *weight, *bias;
};

inline void normalise(const RowJob& job, float* __restrict x, float mean, float rstd, Vectors of, int64_t n) {
    if (job.order == int(Order::Scaled)) {
        for (int64_t i = 0; i < n; ++i) {
            const float weight = of.weight ? of.weight[i] : 1.0f, bias = of.bias ? of.bias[i] : 0.0f;
            x[i] = on_line(x[i], line_of(mean, rstd, weight, bias));
        }
        return;
    }
    if (job.mean != nullptr && job.order == int(Order::Shifted)) {
        const float shift = -(rstd * mean);
        for (int64_t i = 0; i < n; ++i) x[i] = shifted(x[i], shift, rstd);
    } else if (job.mean != nullptr) {
        for (int64_t i = 0; i < n; ++i) x[i] = centred(x[i], mean, rstd);
    } else {
        for (int64_t i = 0; i < n; ++i) x[i] *= rstd;
    }
    switch (Order(job.order)) {
        case Order::Normalized:
        case Order::Shifted: return weigh<Order::Normalized>(x, of.weight, of.bias, n);
        case Order::Rounded: round_to(x, job.out_type, n, job.nan); [[fallthrough]];
        default: return weigh<Order::Separate>(x, of.weight, of.bias, n);
    }
}

// Rows begin to end of [rows, width].
void norm_rows(const RowJob& job, int64_t begin, int64_t end) {
    float x[kPiece], room[kPiece], weights[kPiece], biases[kPiece];
    for (int64_t first = 0; first < job.width; first += kPiece) {
        const int64_t n = std::min(kPiece, job.width - first);
        const float* weight = job.weight ? wide(job.weight, job.weight_type, first, n, weights) : nullptr;
        const float* bias = job.bias ? wide(job.bias, job.weight_type, first, n, biases) : nullptr;
        for (int64_t row = begin; row < end; ++row) {
            const int64_t at = row * job.width + first;
            const float* from = wide(job.x, job.type, at, n, room);
            if (from != x) std::memcpy(x, from, size_t(n) * sizeof(float));
            if (job.residual != nullptr) {
                const float* added = wide(job.residual, job.type, at, n, room);
                for (int64_t i = 0; i < n; ++i) x[i] += added[i];
                round_to(x, job.type, n, job.nan);
            }
            normalise(job, x, job.mean ? job.mean[row] : 0.0f, job.rstd[row], {weight, bias}, n);
            store(x, job.out_type, n, job.nan, job.out, at);
        }
    }
}

// The line of each channel of each image.
void group_lines(const GroupJob& job, int64_t begin, int64_t end) {
    const int64_t each = job.channels / job.groups;
    for (int64_t image = begin; image < end; ++image) {
        for (int64_t c = 0; c < job.channels; ++c) {
            float weight = 1.0f, bias = 0.0f;
            if (job.weight != nullptr) weight = *wide(job.weight, job.weight_type, c, 1, &weight);
            if (job.bias != nullptr) bias = *wide(job.bias, job.weight_type, c, 1, &bias);
            const int64_t group = image * job.groups + c / each;
            const Line line = line_of(job.mean[group], job.rstd[group], weight, bias);
            job.scale[image * job.channels + c] = line.scale;
            job.shift[image * job.channels + c] = line.shift;
        }
    }
}

template <Curve curve>
inline void bend(float* __restrict x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = curved(x[i], curve);
}

inline void bend_as(float* x, int64_t n, int curve) {
    if (curve == int(Curve::Silu)) bend<Curve::Silu>(x, n);
    if (curve == int(Curve::Gelu)) bend<Curve::Gelu>(x, n);
}

// Calls body(begin, end, table, is_tail) for the parts of [begin, end) in which ATen runs vectors, and for the rest.
template <class Body>
inline void for_parts(const Table& table, int64_t total, int64_t begin, int64_t end, Body body) {
    if (table.step == 0) return body(begin, end, table.whole, false);
    while (begin < end) {
        const int64_t first = begin / table.chunk * table.chunk, last = std::min(first + table.chunk, total);
        const int64_t tail = first + (last - first) / table.step * table.step;
        const int64_t vectors = std::min(end, std::max(begin, tail)), stop = std::min(end, last);
        if (begin < vectors) body(begin, vectors, table.whole, false);
        if (vectors < stop) body(vectors, stop, table.tail, true);
        begin = stop;
    }
}

inline void look_up_part(const uint16_t* codes, int64_t n, const uint16_t* table, uint16_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = table[codes[i]];
}

// Rows begin to end: a channel's pixels of one image, or, in channels last, the channels of one pixel.
void group_rows(const GroupJob& job, int64_t begin, int64_t end) {
    const bool is_last = job.inner == 1;
    const int64_t length = is_last ? job.channels : job.inner;
    float x[kPiece], room[kPiece];
    uint16_t codes[kPiece];
    for (int64_t row = begin; row < end; ++row) {
        const int64_t line = is_last ? row / job.pixels * job.channels : row;
        const float *scale = job.scale + line, *shift = job.shift + line;
        for (int64_t first = 0; first < length; first += kPiece) {
            const int64_t n = std::min(kPiece, length - first), at = row * length + first;
            const float* __restrict from = wide(job.x, job.type, at, n, room);
            if (is_last) {
                for (int64_t i = 0; i < n; ++i) x[i] = on_line(from[i], {scale[first + i], shift[first + i]});
            } else {
                for (int64_t i = 0; i < n; ++i) x[i] = on_line(from[i], {*scale, *shift});
            }
            if (job.normed != nullptr) store(x, job.type, n, job.nan, job.normed, at);
            if (job.table.whole != nullptr) {
                store(x, job.type, n, job.nan, codes, 0);
                const auto look_up = [&](int64_t from_, int64_t to, const uint16_t* table, bool) {
                    look_up_part(codes + (from_ - at), to - from_, table, static_cast<uint16_t*>(job.out) + from_);
                };
                for_parts(job.table, job.total, at, at + n, look_up);
                continue;
            }
            if (job.curve != int(Curve::None)) {
                round_to(x, job.type, n, job.nan);
                bend_as(x, n, job.curve);
            }
            store(x, job.type, n, job.nan, job.out, at);
        }
    }
}

// As group_rows, of a batch norm, a sum and an activation, each of which is rounded.
void channel_rows(const ChannelJob& job, int64_t begin, int64_t end) {
    const bool is_last = job.inner == 1;
    const int64_t length = is_last ? job.channels : job.inner;
    float x[kPiece], room[kPiece];
    for (int64_t row = begin; row < end; ++row) {
        const int64_t line = is_last ? 0 : row % job.channels;
        const float *scale = job.scale + line, *shift = job.shift + line;
        for (int64_t first = 0; first < length; first += kPiece) {
            const int64_t n = std::min(kPiece, length - first), at = row * length + first;
            const float* __restrict from = wide(job.x, job.type, at, n, room);
            if (is_last) {
                for (int64_t i = 0; i < n; ++i) x[i] = on_line(from[i], {scale[first + i], shift[first + i]});
            } else {
                for (int64_t i = 0; i < n; ++i) x[i] = on_line(from[i], {*scale, *shift});
            }
            if (job.residual != nullptr) {
                round_to(x, job.type, n, job.nan);
                const float* __restrict added = wide(job.residual, job.type, at, n, room);
                for (int64_t i = 0; i < n; ++i) x[i] += added[i];
            }
            if (job.activation != 0) {
                round_to(x, job.type, n, job.nan);
                for (int64_t i = 0; i < n; ++i) x[i] = activated(x[i], job.activation, job.lo, job.hi);
            }
            store(x, job.type, n, job.nan, job.out, at);
        }
    }
}

void channel_lines(const float* mean, const float* invstd, const float* weight, const float* bias, int64_t channels,
                   float* scale, float* shift) {
    for (int64_t c = 0; c < channels; ++c) {
        const Line line = line_of(mean[c], invstd[c], weight ? weight[c] : 1.0f, bias ? bias[c] : 0.0f);
        scale[c] = line.scale, shift[c] = line.shift;
    }
}

// Elements begin to end: out = silu(gate) * up, each result rounded.
void gated_elements(const GatedJob& job, int64_t begin, int64_t end) {
    float x[kPiece], room[kPiece], others[kPiece];
    uint16_t codes[kPiece];
    const auto part = [&](int64_t from_, int64_t to, const uint16_t* table, bool is_tail) {
        const uint16_t nan = is_tail ? job.table.tail_nan : job.nan;
        for (int64_t at = from_; at < to; at += kPiece) {
            const int64_t n = std::min(kPiece, to - at);
            if (table != nullptr) {
                look_up_part(static_cast<const uint16_t*>(job.gate) + at, n, table, codes);
                wide(codes, job.type, 0, n, x);
                if (job.inner != nullptr) std::memcpy(static_cast<uint16_t*>(job.inner) + at, codes, size_t(n) * 2);
            } else {
                std::memcpy(x, wide(job.gate, job.type, at, n, room), size_t(n) * sizeof(float));
                bend<Curve::Silu>(x, n);
                if (job.inner != nullptr) store(x, job.type, n, nan, job.inner, at);
                round_to(x, job.type, n, nan);
            }
            const float* __restrict up = wide(job.up, job.type, at, n, others);
            for (int64_t i = 0; i < n; ++i) x[i] *= up[i];
            store(x, job.type, n, nan, job.out, at);
        }
    };
    for_parts(job.table, job.total, begin, end, part);
}

// Elements begin to end: a function of one number, computed or looked up.
void curve_elements(const CurveJob& job, int64_t begin, int64_t end) {
    if (job.table.whole != nullptr) {
        const auto* codes = static_cast<const uint16_t*>(job.x);
        auto* out = static_cast<uint16_t*>(job.out);
        const auto look_up = [&](int64_t from_, int64_t to, const uint16_t* table, bool) {
            look_up_part(codes + from_, to - from_, table, out + from_);
        };
        return for_parts(job.table, job.total, begin, end, look_up);
    }
    float x[kPiece], room[kPiece];
    for (int64_t at = begin; at < end; at += kPiece) {
        const int64_t n = std::min(kPiece, end - at);
        std::memcpy(x, wide(job.x, job.type, at, n, room), size_t(n) * sizeof(float));
        bend_as(x, n, job.curve);
        store(x, job.type, n, job.nan, job.out, at);
    }
}

// Elements begin to end, of which begin is a multiple of 8: x times the scale where a bit is set, else times zero.
void dropout_elements(const DropoutJob& job, int64_t begin, int64_t end) {
    float x[kPiece], room[kPiece];
    for (int64_t at = begin; at < end; at += kPiece) {
        const int64_t n = std::min(kPiece, end - at);
        const float* __restrict from = wide(job.x, job.type, at, n, room);
        const uint8_t* __restrict bits = job.mask + at / 8;
        for (int64_t i = 0; i < n; ++i) x[i] = dropped(from[i], bits[i / 8] >> (i % 8) & 1, job.scale);
        store(x, job.type, n, job.nan, job.out, at);
    }
}
