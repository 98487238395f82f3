// Batch norm's forward pass again, from the statistics that its first one saved, with what often follows in one pass.
// Activations are rounded as ATen rounds; their codes are those of ops/layout.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "parallel.h"

namespace bs {

enum class Activation : int { None = 0, Clamp = 1, LeakyRelu = 2 };

struct AffineJob {
    const float* x;
    const float* residual;  // or null
    const float* alpha;     // per channel
    const float* beta;
    int64_t channels, inner;  // elements of a channel that lie next to each other
    Activation activation;
    float lo, hi;  // of Clamp; of LeakyRelu, lo is the slope
    const uint8_t* mask;  // a bit per element, or null
    float* out;
};

}  // namespace bs

#define BS_KERNELS "affine_kernels.h"
#include "foreach_isa.h"

// out = activation(x * alpha + beta [+ residual]), where alpha = invstd * weight and beta = bias - mean * alpha, rounded as
// ATen's kernel rounds: with one rounding where the processor multiplies and adds in one instruction. The caller proves it.
// x, residual and out have one layout: [outer, channels, inner] in memory order. `scratch` holds 2 * channels floats. With a
// mask, what has no bit in it becomes zero, and of the rest what is less than the smallest normal number becomes that.
BS_EXPORT void bs_affine(const float* x, const float* residual, const float* mean, const float* invstd,
                         const float* weight, const float* bias, float* scratch, int64_t outer, int64_t channels,
                         int64_t inner, int activation, double lo, double hi, const uint8_t* mask, float* out,
                         int threads) {
    float *alpha = scratch, *beta = scratch + channels;
    const bs::AffineJob job{
        x, residual, alpha, beta, channels, inner, bs::Activation(activation), float(lo), float(hi), mask, out};
    BS_PICK(coefficients)(mean, invstd, weight, bias, channels, alpha, beta);
    const auto rows = BS_PICK(affine_rows);
    const int64_t length = inner == 1 ? channels : inner;
    // Whole bytes of the mask belong to so many rows, and to every multiple of these.
    const int64_t rows_of_bytes = length % 8 == 0 ? 1 : 8;
    const int64_t block =
        std::max(rows_of_bytes, (int64_t(1) << 14) / length / rows_of_bytes * rows_of_bytes);
    const auto masked = BS_PICK(keep_masked);
    bs::for_blocks(inner == 1 ? outer : outer * channels, block, threads, [&](int64_t begin, int64_t end) {
        rows(job, begin, end);
        if (mask != nullptr) masked(mask + begin * length / 8, (end - begin) * length, out + begin * length);
    });
}
