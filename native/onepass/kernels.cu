// The one-pass kernels for GPUs: what bodies.h says of an element, for packs of eight neighbours that a thread takes.
//
// Compiled by nvcc without contraction (-fmad=false), so that products and sums are rounded as they are written. A pack
// of eight is a byte of a mask's plane, and 16 bytes of 16-bit numbers.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace bs {

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

#define BS_BODY __device__ __forceinline__
#include "bodies.h"

namespace {

constexpr int kPack = 8, kThreads = 256;

template <class T>
struct alignas(sizeof(T) * 4) Quarter {
    T at[4];
};

template <class T>
__device__ bool is_aligned(const T* p) {
    return reinterpret_cast<uintptr_t>(p) % alignof(Quarter<T>) == 0;
}

// Eight neighbours as float32, or as many as there are; the rest is zero.
template <class T>
__device__ void load(const T* from, int64_t n, float* to) {
    if (n >= kPack && is_aligned(from)) {
        for (int part = 0; part < kPack; part += 4) {
            const Quarter<T> some = *reinterpret_cast<const Quarter<T>*>(from + part);
            for (int i = 0; i < 4; ++i) to[part + i] = widened(some.at[i]);
        }
        return;
    }
    for (int i = 0; i < kPack; ++i) to[i] = i < n ? widened(from[i]) : 0.0f;
}

template <class T>
__device__ void store(const float* from, uint16_t nan, int64_t n, T* to) {
    if (n >= kPack && is_aligned(to)) {
        for (int part = 0; part < kPack; part += 4) {
            Quarter<T> some;
            for (int i = 0; i < 4; ++i) narrow(from[part + i], nan, some.at[i]);
            *reinterpret_cast<Quarter<T>*>(to + part) = some;
        }
        return;
    }
    for (int i = 0; i < kPack && i < n; ++i) narrow(from[i], nan, to[i]);
}

template <class T>
__device__ float rounded_as(float x, uint16_t nan) {
    T number;
    narrow(x, nan, number);
    return widened(number);
}

__device__ int64_t first_of_pack() { return (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kPack; }

// Division of numbers of which most fit 32 bits: 64 bits take longer than the memory does, and much code.
__device__ __noinline__ int64_t long_quotient(int64_t a, int64_t b) { return a / b; }
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    return (a | b) >> 32 ? long_quotient(a, b) : int64_t(uint32_t(a) / uint32_t(b));
}

template <class T, class W, class O>
__device__ void row_norm(const T* x, const T* residual, const float* mean, const float* rstd, const W* weight,
                         const W* bias, O* out, int64_t total, int64_t width, int order, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    float values[kPack], added[kPack];
    load(x + at, n, values);
    if (residual != nullptr) load(residual + at, n, added);
    int64_t row = quotient(at, width), column = at - row * width;
    for (int i = 0; i < kPack && i < n; ++i) {
        float value = values[i];
        if (residual != nullptr) value = rounded_as<T>(value + added[i], nan);
        const float w = weight ? widened(weight[column]) : 1.0f, b = bias ? widened(bias[column]) : 0.0f;
        const float m = mean ? mean[row] : 0.0f, r = rstd[row];
        if (order == int(Order::Scaled)) {
            value = on_line(value, line_of(m, r, w, b));
        } else {
            value = mean ? centred(value, m, r) : value * r;
            if (order == int(Order::Rounded)) value = rounded_as<O>(value, nan);
            if (bias != nullptr) value = weighted(value, w, b, order == int(Order::Normalized) ? Order::Normalized : Order::Separate);
            if (bias == nullptr && weight != nullptr) value *= w;
        }
        values[i] = value;
        if (++column == width) column = 0, ++row;
    }
    store(values, nan, n, out + at);
}

template <class T, class W>
__device__ void grouped_norm(const T* x, const float* mean, const float* rstd, const W* weight, const W* bias,
                             const uint16_t* table, T* out, T* normed, int64_t total, int64_t channels, int64_t inner,
                             int64_t pixels, int64_t groups, int curve, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    float values[kPack];
    load(x + at, n, values);
    const int64_t each = channels / groups, image_size = channels * pixels;
    for (int i = 0; i < kPack && i < n; ++i) {
        const int64_t place = at + i, image = quotient(place, image_size), row = quotient(place, inner);
        const int64_t c = row - quotient(row, channels) * channels, group = image * groups + quotient(c, each);
        const float w = weight ? widened(weight[c]) : 1.0f, b = bias ? widened(bias[c]) : 0.0f;
        values[i] = on_line(values[i], line_of(mean[group], rstd[group], w, b));
    }
    if (normed != nullptr) store(values, nan, n, normed + at);
    for (int i = 0; i < kPack && i < n; ++i) {
        T number;
        narrow(values[i], nan, number);
        if (table != nullptr && sizeof(T) == 2) {
            uint16_t code;
            memcpy(&code, &number, sizeof code);
            code = table[code];
            memcpy(&number, &code, sizeof code);
            values[i] = widened(number);
        } else {
            values[i] = curved(widened(number), Curve(curve));
        }
    }
    store(values, nan, n, out + at);
}

// Batch norms of one pack's channels.
struct Channels {
    const float *mean, *invstd, *weight, *bias;  // weight and bias or null
    __device__ float normed(float x, int64_t c, int rounding) const {
        return batch_normed(x, mean[c], invstd[c], weight ? weight[c] : 1.0f, bias ? bias[c] : 0.0f, rounding);
    }
};

// What becomes of a sample of the result, `picks` elements at even distances in memory: it is copied to `picked`, or
// compared with `known`, and then a difference sets the flag.
template <class T>
struct Sampled {
    T* picked;
    const T* known;
    int* flag;
    int64_t begin, step, picks;

    __device__ void look(const T* numbers, int64_t at, int64_t n) const {
        if (picked == nullptr && known == nullptr) return;
        int64_t pick = at <= begin ? 0 : quotient(at - begin + step - 1, step);
        for (; pick < picks && begin + pick * step < at + n; ++pick) {
            const T number = numbers[begin + pick * step - at];
            if (picked != nullptr) picked[pick] = number;
            if (known != nullptr && memcmp_of(number, known[pick])) *flag = 1;
        }
    }
    __device__ static bool memcmp_of(const T& a, const T& b) {
        uint32_t x = 0, y = 0;
        memcpy(&x, &a, sizeof a);
        memcpy(&y, &b, sizeof b);
        return x != y;
    }
};

// activation(batch_norm(x) [+ residual, or its batch norm]), and the mask of what is above zero, or NaN, in `plane`.
template <class T>
__device__ void affine(const T* x, Channels own, const T* residual, Channels of_residual, const uint8_t* mask, T* out,
                       uint8_t* plane, Sampled<T> sample, int64_t total, int64_t channels, int64_t inner, float lo,
                       float hi, int activation, int rounding, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at < kPack ? total - at : kPack;
    if (n <= 0) return;
    float values[kPack], added[kPack];
    load(x + at, n, values);
    if (residual != nullptr) load(residual + at, n, added);
    const uint32_t known = mask != nullptr ? mask[at / kPack] : 0;
    uint32_t bits = 0;
    T numbers[kPack];
    for (int i = 0; i < kPack && i < n; ++i) {
        const int64_t row = quotient(at + i, inner), c = row - quotient(row, channels) * channels;
        float value = rounded_as<T>(own.normed(values[i], c, rounding), nan);
        if (residual != nullptr) {
            float other = added[i];
            if (of_residual.mean != nullptr) other = rounded_as<T>(of_residual.normed(other, c, rounding), nan);
            value = rounded_as<T>(value + other, nan);
        }
        value = activated(value, activation, lo, hi);
        if (mask != nullptr) value = as_masked(value, known >> i & 1);
        narrow(value, nan, numbers[i]);
        values[i] = value;
        bits |= uint32_t(!(value <= 0.0f)) << i;
    }
    store(values, nan, n, out + at);
    if (plane != nullptr) plane[at / kPack] = uint8_t(bits);
    sample.look(numbers, at, n);
}

template <class T>
__device__ float looked_up(float x, const uint16_t* table) {
    T number;
    narrow(x, 0, number);
    uint16_t code;
    memcpy(&code, &number, sizeof code);
    code = table[code];
    memcpy(&number, &code, sizeof code);
    return widened(number);
}

template <class T>
__device__ void gated(const T* gate, const T* up, const uint16_t* table, T* out, T* inner, int64_t total, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    float values[kPack], others[kPack];
    load(gate + at, n, values);
    load(up + at, n, others);
    for (int i = 0; i < kPack; ++i) {
        const bool has_table = table != nullptr && sizeof(T) == 2;
        values[i] = has_table ? looked_up<T>(values[i], table) : rounded_as<T>(curved(values[i], Curve::Silu), nan);
    }
    if (inner != nullptr) store(values, nan, n, inner + at);
    for (int i = 0; i < kPack; ++i) values[i] *= others[i];
    store(values, nan, n, out + at);
}

template <class T>
__device__ void curve_of(const T* x, const uint16_t* table, T* out, int64_t total, int curve, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    float values[kPack];
    load(x + at, n, values);
    for (int i = 0; i < kPack; ++i) {
        const bool has_table = table != nullptr && sizeof(T) == 2;
        values[i] = has_table ? looked_up<T>(values[i], table) : curved(values[i], Curve(curve));
    }
    store(values, nan, n, out + at);
}

template <class T>
__device__ void dropout(const T* x, const uint8_t* mask, T* out, int64_t total, float scale, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    float values[kPack];
    load(x + at, n, values);
    const uint32_t bits = mask[at / kPack];
    for (int i = 0; i < kPack; ++i) values[i] = dropped(values[i], bits >> i & 1, scale);
    store(values, nan, n, out + at);
}

}  // namespace
}  // namespace bs

using bs::BFloat16;
using bs::Half;

#define BS_ROW_NORM(name, T, W, O)                                                                                       \
    extern "C" __global__ void bs_row_norm_##name(const T* x, const T* residual, const float* mean, const float* rstd,   \
                                                  const W* weight, const W* bias, O* out, int64_t total, int64_t width,  \
                                                  int order, int nan) {                                                  \
        bs::row_norm<T, W, O>(x, residual, mean, rstd, weight, bias, out, total, width, order, uint16_t(nan));           \
    }
BS_ROW_NORM(f32_f32_f32, float, float, float)
BS_ROW_NORM(f32_f32_bf16, float, float, BFloat16)
BS_ROW_NORM(f32_f32_f16, float, float, Half)
BS_ROW_NORM(f32_bf16_bf16, float, BFloat16, BFloat16)
BS_ROW_NORM(f32_f16_f16, float, Half, Half)
BS_ROW_NORM(bf16_f32_bf16, BFloat16, float, BFloat16)
BS_ROW_NORM(bf16_bf16_bf16, BFloat16, BFloat16, BFloat16)
BS_ROW_NORM(f16_f32_f16, Half, float, Half)
BS_ROW_NORM(f16_f16_f16, Half, Half, Half)

#define BS_GROUPED_NORM(name, T, W)                                                                                      \
    extern "C" __global__ void bs_grouped_norm_##name(                                                                   \
        const T* x, const float* mean, const float* rstd, const W* weight, const W* bias, const uint16_t* table, T* out, \
        T* normed, int64_t total, int64_t channels, int64_t inner, int64_t pixels, int64_t groups, int curve, int nan) { \
        bs::grouped_norm<T, W>(x, mean, rstd, weight, bias, table, out, normed, total, channels, inner, pixels, groups,  \
                               curve, uint16_t(nan));                                                                    \
    }
BS_GROUPED_NORM(f32_f32, float, float)
BS_GROUPED_NORM(bf16_f32, BFloat16, float)
BS_GROUPED_NORM(bf16_bf16, BFloat16, BFloat16)
BS_GROUPED_NORM(f16_f32, Half, float)
BS_GROUPED_NORM(f16_f16, Half, Half)

#define BS_AFFINE(name, T)                                                                                               \
    extern "C" __global__ void bs_affine_##name(                                                                         \
        const T* x, const float* mean, const float* invstd, const float* weight, const float* bias, const T* residual,   \
        const float* mean2, const float* invstd2, const float* weight2, const float* bias2, const uint8_t* mask, T* out, \
        uint8_t* plane, T* picked, const T* known, int* flag, int64_t total, int64_t channels, int64_t inner,            \
        int64_t begin, int64_t step, int64_t picks, float lo, float hi, int activation, int rounding, int nan) {         \
        bs::affine<T>(x, {mean, invstd, weight, bias}, residual, {mean2, invstd2, weight2, bias2}, mask, out, plane,     \
                      {picked, known, flag, begin, step, picks}, total, channels, inner, lo, hi, activation, rounding,   \
                      uint16_t(nan));                                                                                    \
    }
BS_AFFINE(f32, float)
BS_AFFINE(bf16, BFloat16)
BS_AFFINE(f16, Half)

#define BS_POINTWISE(name, T)                                                                                            \
    extern "C" __global__ void bs_gated_##name(const T* gate, const T* up, const uint16_t* table, T* out, T* inner,      \
                                               int64_t total, int nan) {                                                 \
        bs::gated<T>(gate, up, table, out, inner, total, uint16_t(nan));                                                 \
    }                                                                                                                    \
    extern "C" __global__ void bs_curve_##name(const T* x, const uint16_t* table, T* out, int64_t total, int curve,      \
                                               int nan) {                                                                \
        bs::curve_of<T>(x, table, out, total, curve, uint16_t(nan));                                                     \
    }                                                                                                                    \
    extern "C" __global__ void bs_dropout_##name(const T* x, const uint8_t* mask, T* out, int64_t total, float scale,    \
                                                 int nan) {                                                              \
        bs::dropout<T>(x, mask, out, total, scale, uint16_t(nan));                                                       \
    }
BS_POINTWISE(f32, float)
BS_POINTWISE(bf16, BFloat16)
BS_POINTWISE(f16, Half)
