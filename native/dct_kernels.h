// 8x8 cosine transforms. Compiled once per instruction set by foreach_isa.h.

#include "dense.h"

// The largest finite magnitude of each image that has an outer index in [begin, end); returns how many elements are not
// finite.
template <class F>
inline int64_t scale_as(const DctJob& job, int64_t begin, int64_t end) {
    const auto* x = static_cast<const typename Dense<F>::U*>(job.dense);
    const int64_t pixels = job.height * job.width;
    int64_t strange = 0;
    for (int64_t image = begin; image < end; ++image) {
        float* const __restrict scales = job.scales + image * job.inner;
        std::fill(scales, scales + job.inner, 0.0f);
        // One image after the other in memory, or one pixel of all images.
        const int64_t runs = job.inner == 1 ? 1 : pixels, length = job.inner == 1 ? pixels : job.inner;
        for (int64_t run = 0; run < runs; ++run) {
            const auto* from = x + (image * runs + run) * length;
            int32_t largest = 0;
            for (int64_t i = 0; i < length; ++i) {
                const int32_t rest = int32_t(Dense<F>::widen(from[i]) & kMagnitude);
                const int32_t other = -int32_t(rest >= int32_t(kInfinity));
                strange -= other;
                const int32_t known = rest & ~other;
                if (job.inner == 1) largest = std::max(largest, known);
                else scales[i] = std::max(scales[i], float_of(uint32_t(known)));
            }
            if (job.inner == 1) scales[0] = float_of(uint32_t(largest));
        }
    }
    return strange;
}

// Where a block is.
struct DctPlace {
    int64_t image, row, column, rows, columns, first;  // `first`: of its elements
};

inline DctPlace place_of(const DctJob& job, int64_t block) {
    const int64_t column = block % job.columns(), row = block / job.columns() % job.rows();
    const int64_t image = block / (job.columns() * job.rows());
    const int64_t pixel = (image / job.inner * job.height + row * 8) * job.width + column * 8;
    return {image, row, column, std::min<int64_t>(8, job.height - row * 8),
            std::min<int64_t>(8, job.width - column * 8), pixel * job.inner + image % job.inner};
}

// to[i][j] = sum over k of from[i][k] * by[k][j], and the same from the other side, added up from k = 0 on.
__attribute__((noinline)) void multiply(const float* __restrict from, const float* __restrict by, float* __restrict to) {
    for (int i = 0; i < 8; ++i) {
        float sum[8];
        for (int j = 0; j < 8; ++j) sum[j] = from[8 * i] * by[j];
        for (int k = 1; k < 8; ++k)
            for (int j = 0; j < 8; ++j) sum[j] += from[8 * i + k] * by[8 * k + j];
        for (int j = 0; j < 8; ++j) to[8 * i + j] = sum[j];
    }
}

inline void transpose(const float* from, float* to) {
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) to[8 * j + i] = from[8 * i + j];
}

template <class F>
inline void transform_as(const DctJob& job, int64_t begin, int64_t end) {
    const auto* x = static_cast<const typename Dense<F>::U*>(job.dense);
    float forward[64], block[64], along[64], both[64];
    transpose(job.basis, forward);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        int64_t count = 0;
        for (int64_t i = chunk * kDctChunk; i < std::min((chunk + 1) * kDctChunk, job.blocks()); ++i) {
            const DctPlace place = place_of(job, i);
            const float scale = job.scales[place.image], divisor = scale > 0.0f ? scale : 1.0f;
            std::fill(block, block + 64, 0.0f);
            for (int64_t r = 0; r < place.rows; ++r)
                for (int64_t c = 0; c < place.columns; ++c) {
                    const uint32_t bits = Dense<F>::widen(x[place.first + (r * job.width + c) * job.inner]);
                    const float v = (bits & kMagnitude) < kInfinity ? float_of(bits) : 0.0f;
                    block[8 * r + c] = v / divisor * 127.0f;
                }
            multiply(block, forward, along);
            multiply(job.basis, along, both);
            uint8_t* const codes = job.codes + i * 64;
            Word word = 0;
            for (int k = 0; k < 64; ++k) {
                const float clamped = std::min(std::max(both[k] * job.steps[k], -127.0f), 127.0f);
                constexpr float shift = 0x1.8p23f;  // the processor rounds: to nearest, ties to even
                codes[k] = uint8_t(int32_t(clamped + shift - shift));
            }
            for (int k = 0; k < 64; ++k) word |= Word(codes[k] != 0) << k;
            store_word(job.mask, i * 64, word);
            count += __builtin_popcountll(word);
        }
        job.offsets[chunk] = count;
    }
}

template <class F>
inline void restore_as(const DctJob& job, int64_t begin, int64_t end) {
    auto* out = static_cast<typename Dense<F>::U*>(job.dense);
    float backward[64], both[64], along[64], block[64];
    transpose(job.basis, backward);
    constexpr float unit = float(1.0 / 127);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const uint8_t* value = job.values + job.offsets[chunk];
        for (int64_t i = chunk * kDctChunk; i < std::min((chunk + 1) * kDctChunk, job.blocks()); ++i) {
            uint8_t codes[64];
            value = scalar::expand<false, uint8_t>(load_word(job.mask, i * 64), value, codes);
            for (int k = 0; k < 64; ++k) both[k] = float(int8_t(codes[k])) * job.steps[k];
            multiply(backward, both, along);
            multiply(along, job.basis, block);
            const DctPlace place = place_of(job, i);
            const float scale = job.scales[place.image];
            for (int64_t r = 0; r < place.rows; ++r)
                for (int64_t c = 0; c < place.columns; ++c) {
                    const float v = std::min(std::max(block[8 * r + c] * unit, -1.0f), 1.0f) * scale;
                    out[place.first + (r * job.width + c) * job.inner] = rounded<F>(bits_of(v));
                }
        }
    }
}

template <class Body>
inline auto with_dense(Float type, Body body) {
    switch (type) {
        case Float::F32: return body(float());
        case Float::F16: return body(Half());
        default: return body(BFloat16());
    }
}

int64_t dct_scale(const DctJob& job, int64_t begin, int64_t end) {
    return with_dense(job.type, [&](auto f) { return scale_as<decltype(f)>(job, begin, end); });
}
void dct_transform(const DctJob& job, int64_t begin, int64_t end) {
    with_dense(job.type, [&](auto f) { transform_as<decltype(f)>(job, begin, end); });
}
void dct_restore(const DctJob& job, int64_t begin, int64_t end) {
    with_dense(job.type, [&](auto f) { restore_as<decltype(f)>(job, begin, end); });
}
