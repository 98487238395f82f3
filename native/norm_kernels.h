// Batch norm's backward pass. Compiled once per instruction set by foreach_isa.h.

// ATen sums in eight lanes on every x86 processor; the compiler makes of them what the instruction set has.
typedef float Eight __attribute__((vector_size(32)));

inline Eight eight(const float* p) {
    Eight v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

inline float sum_of(const float* v) {
    const float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
    return (a + c) + (b + d);
}

struct Sums {
    float grad, dot;  // of dY, and of (x - mean) * dY
};

// In ATen's order: whole vectors first, whose products are rounded, then the rest, whose products are not.
inline Sums row_sums(const float* __restrict dy, const float* __restrict x, float mean, int64_t n) {
    if (n < 8) {
        float grad = dy[0], dot = (x[0] - mean) * dy[0];
        for (int64_t i = 1; i < n; ++i) {
            grad += dy[i];
            dot += (x[i] - mean) * dy[i];
        }
        return {grad, dot};
    }
    Eight grad = eight(dy), dot = (eight(x) - mean) * grad;
    int64_t i = 8;
    for (; i + 8 <= n; i += 8) {
        const Eight g = eight(dy + i);
        grad += g;
        dot += (eight(x + i) - mean) * g;
    }
    float grads[8], dots[8];
    __builtin_memcpy(grads, &grad, sizeof grad);
    __builtin_memcpy(dots, &dot, sizeof dot);
    for (int lane = 0; i < n; ++i, ++lane) {
        grads[lane] += dy[i];
        dots[lane] = __builtin_fmaf(x[i] - mean, dy[i], dots[lane]);
    }
    return {sum_of(grads), sum_of(dots)};
}

inline float input_gradient(float dy, float x, float mean, float k, float grad_mean, float invstd, float weight) {
    return __builtin_fmaf(-(x - mean), k, dy - grad_mean) * invstd * weight;
}

// Channels begin to end of contiguous images. Of those whose sums are not finite, only the weight's gradient
// is written, a NaN; returns how many.
int64_t norm_channels(const NormJob& job, int64_t begin, int64_t end) {
    int64_t left = 0;
    for (int64_t c = begin; c < end; ++c) {
        const float mean = job.mean[c], invstd = job.invstd[c], weight = job.weight ? job.weight[c] : 1.0f;
        double sum = 0, dot = 0;
        for (int64_t image = 0; image < job.outer; ++image) {
            const int64_t at = (image * job.channels + c) * job.inner;
            const Sums part = row_sums(job.grad + at, job.x + at, mean, job.inner);
            sum += part.grad;
            dot += part.dot;
        }
        job.weight_grad[c] = float(dot * invstd);
        job.bias_grad[c] = float(sum);
        const float k = float(dot) * invstd * invstd / float(job.count), grad_mean = float(sum / double(job.count));
        if (!(__builtin_isfinite(k) && __builtin_isfinite(grad_mean))) {
            job.weight_grad[c] = __builtin_nanf("");
            ++left;
            continue;
        }
        for (int64_t image = 0; image < job.outer; ++image) {
            const int64_t at = (image * job.channels + c) * job.inner;
            const float *dy = job.grad + at, *x = job.x + at;
            float* out = job.out + at;
            for (int64_t i = 0; i < job.inner; ++i) {
                out[i] = input_gradient(dy[i], x[i], mean, k, grad_mean, invstd, weight);
            }
        }
    }
    return left;
}

// Pixels begin to end of images in channels last.
void norm_pixels(const NormJob& job, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float *dy = job.grad + row * job.channels, *x = job.x + row * job.channels;
        float* out = job.out + row * job.channels;
        for (int64_t c = 0; c < job.channels; ++c) {
            const float weight = job.weight ? job.weight[c] : 1.0f;
            out[c] = input_gradient(dy[c], x[c], job.mean[c], job.k[c], job.grad_mean[c], job.invstd[c], weight);
        }
    }
}
