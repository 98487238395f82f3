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

// What is read and written at once: 16 bytes.
template <class T>
struct alignas(16) Line16 {
    static constexpr int kCount = 16 / sizeof(T);
    T at[kCount];
};

template <class T>
__device__ bool is_aligned(const T* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Eight neighbours, or as many as there are; the rest is zero.
template <class T>
__device__ void load_numbers(const T* from, int64_t n, T* to) {
    if (n >= kPack && is_aligned(from)) {
#pragma unroll
        for (int part = 0; part < kPack; part += Line16<T>::kCount) {
            const Line16<T> some = *reinterpret_cast<const Line16<T>*>(from + part);
#pragma unroll
            for (int i = 0; i < Line16<T>::kCount; ++i) to[part + i] = some.at[i];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) to[i] = i < n ? from[i] : T{};
}

template <class T>
__device__ void store_numbers(const T* from, int64_t n, T* to) {
    if (n >= kPack && is_aligned(to)) {
#pragma unroll
        for (int part = 0; part < kPack; part += Line16<T>::kCount) {
            Line16<T> some;
#pragma unroll
            for (int i = 0; i < Line16<T>::kCount; ++i) some.at[i] = from[part + i];
            *reinterpret_cast<Line16<T>*>(to + part) = some;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i)
        if (i < n) to[i] = from[i];
}

// The same as float32.
template <class T>
__device__ void load(const T* from, int64_t n, float* to) {
    T numbers[kPack];
    load_numbers(from, n, numbers);
#pragma unroll
    for (int i = 0; i < kPack; ++i) to[i] = widened(numbers[i]);
}

template <class T>
__device__ void store(const float* from, uint16_t nan, int64_t n, T* to) {
    T numbers[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) narrow(from[i], nan, numbers[i]);
    store_numbers(numbers, n, to);
}

template <class T>
__device__ float rounded_as(float x, uint16_t nan) {
    T number;
    narrow(x, nan, number);
    return widened(number);
}

// A curve of a number: from a table, of which each code has an entry of its own, those of signalling NaN too.
template <class T>
__device__ T of_curve(T number, const uint16_t* table, int curve, uint16_t nan) {
    if (table != nullptr && sizeof(T) == 2) {
        uint16_t code;
        memcpy(&code, &number, sizeof code);
        code = table[code];
        memcpy(&number, &code, sizeof code);
    } else {
        narrow(curved(widened(number), Curve(curve)), nan, number);
    }
    return number;
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
    float scales[kPack], shifts[kPack];
    const bool is_whole = n >= kPack && column + kPack <= width;  // of one row
    if (weight != nullptr && is_whole) load(weight + column, kPack, scales);
    if (bias != nullptr && is_whole) load(bias + column, kPack, shifts);
    float m = mean ? mean[row] : 0.0f, r = rstd[row];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
        if (i >= n) break;
        float value = values[i];
        if (residual != nullptr) value = rounded_as<T>(value + added[i], nan);
        if (!is_whole && weight != nullptr) scales[i] = widened(weight[column]);
        if (!is_whole && bias != nullptr) shifts[i] = widened(bias[column]);
        const float w = weight ? scales[i] : 1.0f, b = bias ? shifts[i] : 0.0f;
        if (order == int(Order::Scaled)) {
            value = on_line(value, line_of(m, r, w, b));
        } else {
            const bool is_shifted = order == int(Order::Shifted);
            value = !mean ? value * r : is_shifted ? shifted(value, -(r * m), r) : centred(value, m, r);
            if (order == int(Order::Rounded)) value = rounded_as<O>(value, nan);
            if (bias != nullptr) value = weighted(value, w, b, Order(order));
            if (bias == nullptr && weight != nullptr) value *= w;
        }
        values[i] = value;
        if (++column == width && i + 1 < n) column = 0, ++row, m = mean ? mean[row] : 0.0f, r = rstd[row];
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
    T numbers[kPack];
    for (int i = 0; i < kPack; ++i) narrow(values[i], nan, numbers[i]);
    if (normed != nullptr) store_numbers(numbers, n, normed + at);
    for (int i = 0; i < kPack && i < n; ++i) numbers[i] = of_curve(numbers[i], table, curve, nan);
    store_numbers(numbers, n, out + at);
}

// Batch norms by channel.
struct Channels {
    const float *mean, *invstd, *weight, *bias;  // weight and bias or null
    __device__ Normed at(int64_t c) const {
        return {mean[c], invstd[c], weight ? weight[c] : 1.0f, bias ? bias[c] : 0.0f};
    }
};

// Which channels a pack's elements are of.
enum class Lies { InOne, InNeighbours, Anyhow };

// Batch norms of the elements of a pack.
template <Lies kLies>
struct PackOfChannels {
    Normed of[kLies == Lies::InOne ? 1 : kPack];

    __device__ PackOfChannels(Channels channels, const int64_t* c) {
        if (kLies == Lies::InNeighbours) {
            float mean[kPack], invstd[kPack], weight[kPack], bias[kPack];
            load(channels.mean + c[0], kPack, mean);
            load(channels.invstd + c[0], kPack, invstd);
            if (channels.weight) load(channels.weight + c[0], kPack, weight);
            if (channels.bias) load(channels.bias + c[0], kPack, bias);
#pragma unroll
            for (int i = 0; i < kPack; ++i)
                of[i] = {mean[i], invstd[i], channels.weight ? weight[i] : 1.0f, channels.bias ? bias[i] : 0.0f};
        } else {
#pragma unroll
            for (int i = 0; i < (kLies == Lies::InOne ? 1 : kPack); ++i) of[i] = channels.at(c[i]);
        }
    }
    __device__ float normed(float x, int i, int rounding) const {
        return batch_normed(x, of[kLies == Lies::InOne ? 0 : i], rounding);
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

    // A thread reads what it has written itself.
    __device__ void look(const T* out, int64_t at, int64_t n) const {
        if (picked == nullptr && known == nullptr) return;
        if (at + n <= begin) return;
        int64_t pick = at <= begin ? 0 : quotient(at - begin + step - 1, step);
        for (; pick < picks && begin + pick * step < at + n; ++pick) {
            const T number = out[begin + pick * step];
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

template <class T, Lies kLies>
__device__ void affine_pack(const T* x, Channels own, const T* residual, Channels of_residual, const uint8_t* mask,
                            T* out, uint8_t* plane, int64_t at, int64_t n, const int64_t* channel, float lo, float hi,
                            int activation, int rounding, uint16_t nan) {
    float values[kPack], added[kPack];
    load(x + at, n, values);
    if (residual != nullptr) load(residual + at, n, added);
    const uint32_t known = mask != nullptr ? mask[at / kPack] : 0;
    const PackOfChannels<kLies> norms(own, channel);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = rounded_as<T>(norms.normed(values[i], i, rounding), nan);
    if (residual != nullptr) {
        if (of_residual.mean != nullptr) {
            const PackOfChannels<kLies> others(of_residual, channel);
#pragma unroll
            for (int i = 0; i < kPack; ++i) added[i] = rounded_as<T>(others.normed(added[i], i, rounding), nan);
        }
#pragma unroll
        for (int i = 0; i < kPack; ++i) values[i] = rounded_as<T>(values[i] + added[i], nan);
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
        values[i] = activated(values[i], activation, lo, hi);
        if (mask != nullptr) values[i] = as_masked(values[i], known >> i & 1);
        bits |= uint32_t(i < n && !(rounded_as<T>(values[i], nan) <= 0.0f)) << i;
    }
    store(values, nan, n, out + at);
    if (plane != nullptr) plane[at / kPack] = uint8_t(bits);
}

// activation(batch_norm(x) [+ residual, or its batch norm]), and the mask of what is above zero, or NaN, in `plane`.
template <class T>
__device__ void affine(const T* x, Channels own, const T* residual, Channels of_residual, const uint8_t* mask, T* out,
                       uint8_t* plane, Sampled<T> sample, int64_t total, int64_t channels, int64_t inner, float lo,
                       float hi, int activation, int rounding, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at < kPack ? total - at : kPack;
    if (n <= 0) return;
    const int64_t row = quotient(at, inner);
    int64_t channel[kPack];
    channel[0] = row - quotient(row, channels) * channels;
    if (inner % kPack == 0) {
        affine_pack<T, Lies::InOne>(x, own, residual, of_residual, mask, out, plane, at, n, channel, lo, hi, activation,
                                    rounding, nan);
    } else if (inner == 1 && channels % kPack == 0) {
        affine_pack<T, Lies::InNeighbours>(x, own, residual, of_residual, mask, out, plane, at, n, channel, lo, hi,
                                           activation, rounding, nan);
    } else {
        int64_t left = (row + 1) * inner - at;  // elements until the next channel begins
#pragma unroll
        for (int i = 1; i < kPack; ++i) {
            channel[i] = channel[i - 1];
            if (--left == 0) channel[i] = channel[i] + 1 == channels ? 0 : channel[i] + 1, left = inner;
        }
        affine_pack<T, Lies::Anyhow>(x, own, residual, of_residual, mask, out, plane, at, n, channel, lo, hi, activation,
                                     rounding, nan);
    }
    sample.look(out, at, n);
}

template <class T>
__device__ void gated(const T* gate, const T* up, const uint16_t* table, T* out, T* inner, int64_t total, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    T numbers[kPack];
    float others[kPack];
    load_numbers(gate + at, n, numbers);
    load(up + at, n, others);
#pragma unroll
    for (int i = 0; i < kPack; ++i) numbers[i] = of_curve(numbers[i], table, int(Curve::Silu), nan);
    if (inner != nullptr) store_numbers(numbers, n, inner + at);
#pragma unroll
    for (int i = 0; i < kPack; ++i) others[i] *= widened(numbers[i]);
    store(others, nan, n, out + at);
}

template <class T>
__device__ void curve_of(const T* x, const uint16_t* table, T* out, int64_t total, int curve, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    T numbers[kPack];
    load_numbers(x + at, n, numbers);
#pragma unroll
    for (int i = 0; i < kPack; ++i) numbers[i] = of_curve(numbers[i], table, curve, nan);
    store_numbers(numbers, n, out + at);
}

template <class T>
__device__ void dropout(const T* x, const uint8_t* mask, T* out, int64_t total, float scale, uint16_t nan) {
    const int64_t at = first_of_pack(), n = total - at;
    if (n <= 0) return;
    float values[kPack];
    load(x + at, n, values);
    const uint32_t bits = mask[at / kPack];
#pragma unroll
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
