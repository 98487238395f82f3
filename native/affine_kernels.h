// x * alpha + beta per channel. Compiled once per instruction set by foreach_isa.h, whose flags vectorise these loops.

void coefficients(const float* mean, const float* invstd, const float* weight, const float* bias, int64_t channels,
                  float* alpha, float* beta) {
    for (int64_t c = 0; c < channels; ++c) {
        alpha[c] = weight != nullptr ? invstd[c] * weight[c] : invstd[c];
        beta[c] = __builtin_fmaf(-mean[c], alpha[c], bias != nullptr ? bias[c] : 0.0f);
    }
}

// Of two zeros and of NaN the second operand of the maximum stays, as in ATen.
inline float rectified(float v) { return v < 0.0f ? 0.0f : v; }

template <bool relu, bool add>
inline void affine_row(const float* __restrict x, const float* __restrict residual, float alpha, float beta, int64_t n,
                       float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) {
        float v = __builtin_fmaf(x[i], alpha, beta);
        if (add) v += residual[i];
        out[i] = relu ? rectified(v) : v;
    }
}

template <bool relu, bool add>
inline void affine_channels(const float* __restrict x, const float* __restrict residual, const float* __restrict alpha,
                            const float* __restrict beta, int64_t n, float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) {
        float v = __builtin_fmaf(x[i], alpha[i], beta[i]);
        if (add) v += residual[i];
        out[i] = relu ? rectified(v) : v;
    }
}

// A row is a channel of one image where that lies together, else all channels of one pixel.
template <bool relu, bool add>
inline void affine_as(const AffineJob& job, int64_t begin, int64_t end) {
    const int64_t length = job.inner == 1 ? job.channels : job.inner;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * length;
        const float* residual = add ? job.residual + at : nullptr;
        if (job.inner == 1) {
            affine_channels<relu, add>(job.x + at, residual, job.alpha, job.beta, length, job.out + at);
        } else {
            const int64_t c = row % job.channels;
            affine_row<relu, add>(job.x + at, residual, job.alpha[c], job.beta[c], length, job.out + at);
        }
    }
}

void affine_rows(const AffineJob& job, int64_t begin, int64_t end) {
    if (job.relu) return job.residual ? affine_as<true, true>(job, begin, end) : affine_as<true, false>(job, begin, end);
    return job.residual ? affine_as<false, true>(job, begin, end) : affine_as<false, false>(job, begin, end);
}
