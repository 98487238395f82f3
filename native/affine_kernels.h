// x * alpha + beta per channel: loops over what onepass/bodies.h says of an element. Compiled once per instruction set by foreach_isa.h, whose flags vectorise these loops.
#define BS_BODY inline __attribute__((always_inline))
#include "onepass/bodies.h"
#undef BS_BODY

void coefficients(const float* mean, const float* invstd, const float* weight, const float* bias, int64_t channels,
                  float* alpha, float* beta) {
    for (int64_t c = 0; c < channels; ++c) {
        const Line line = line_of(mean[c], invstd[c], weight ? weight[c] : 1.0f, bias ? bias[c] : 0.0f);
        alpha[c] = line.scale, beta[c] = line.shift;
    }
}

struct Clamp {
    float lo, hi;
    float operator()(float v) const { return clamped(v, lo, hi); }
};

struct Rectify {
    float operator()(float v) const { return v < 0.0f ? 0.0f : v; }
};

struct LeakyRelu {
    float slope;
    float operator()(float v) const { return leaked(v, slope); }
};

struct Identity {
    float operator()(float v) const { return v; }
};

template <bool add, class F>
inline void affine_row(const float* __restrict x, const float* __restrict residual, float alpha, float beta, int64_t n,
                       F activation, float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) {
        float v = on_line(x[i], {alpha, beta});
        if (add) v += residual[i];
        out[i] = activation(v);
    }
}

template <bool add, class F>
inline void affine_channels(const float* __restrict x, const float* __restrict residual, const float* __restrict alpha,
                            const float* __restrict beta, int64_t n, F activation, float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) {
        float v = on_line(x[i], {alpha[i], beta[i]});
        if (add) v += residual[i];
        out[i] = activation(v);
    }
}

// A row is a channel of one image where that lies together, else all channels of one pixel.
template <bool add, class F>
inline void affine_as(const AffineJob& job, int64_t begin, int64_t end, F activation) {
    const int64_t length = job.inner == 1 ? job.channels : job.inner;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * length;
        const float* residual = add ? job.residual + at : nullptr;
        if (job.inner == 1) {
            affine_channels<add>(job.x + at, residual, job.alpha, job.beta, length, activation, job.out + at);
        } else {
            const int64_t c = row % job.channels;
            affine_row<add>(job.x + at, residual, job.alpha[c], job.beta[c], length, activation, job.out + at);
        }
    }
}

template <class F>
inline void affine_with(const AffineJob& job, int64_t begin, int64_t end, F activation) {
    job.residual ? affine_as<true>(job, begin, end, activation) : affine_as<false>(job, begin, end, activation);
}

void affine_rows(const AffineJob& job, int64_t begin, int64_t end) {
    switch (job.activation) {
        case Activation::None: return affine_with(job, begin, end, Identity{});
        case Activation::LeakyRelu: return affine_with(job, begin, end, LeakyRelu{job.lo});
        case Activation::Clamp: break;
    }
    const bool rectifies = job.lo == 0.0f && job.hi == __builtin_inff();
    rectifies ? affine_with(job, begin, end, Rectify{}) : affine_with(job, begin, end, Clamp{job.lo, job.hi});
}

// Zero where a bit of the mask is clear; elsewhere no less than the smallest normal number. NaN stays.
void keep_masked(const uint8_t* mask, int64_t n, float* out) {
    int64_t i = 0;
#if defined(BS_AVX512)
    for (; i + 16 <= n; i += 16) {
        uint16_t bits;
        __builtin_memcpy(&bits, mask + i / 8, sizeof bits);
        const __m512 kept = _mm512_maskz_max_ps(bits, _mm512_set1_ps(0x1p-126f), _mm512_loadu_ps(out + i));
        _mm512_storeu_ps(out + i, kept);
    }
#endif
    for (; i < n; ++i) {
        out[i] = as_masked(out[i], mask[i / 8] >> (i % 8) & 1);
    }
}
