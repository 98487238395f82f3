// Batch norm's backward pass.
#include <algorithm>
#include <cstdint>

#include "elements.h"
#include "isa.h"
#include "parallel.h"

namespace bs {

struct NormJob {
    const float *grad, *x;
    float* out;  // the gradient of x; may be the memory of `grad`
    const float *mean, *invstd, *weight;  // per channel; weight or null
    int64_t outer, channels, inner, count;  // images, channels, pixels of one; pixels of all
    float *weight_grad, *bias_grad;         // results, or
    const float *k, *grad_mean;             // what they are needed for: see input_gradient
};

}  // namespace bs

#define BS_KERNELS "norm_kernels.h"
#include "foreach_isa.h"

// Of contiguous [outer, channels, inner]: all three gradients, rounded and summed up as ATen's kernel does; the caller
// proves it. Returns how many channels' sums are not finite: of these, only a NaN for the weight's gradient is written.
BS_EXPORT int64_t bs_batch_norm_channels(const float* grad, const float* x, const float* mean, const float* invstd,
                                         const float* weight, int64_t outer, int64_t channels, int64_t inner,
                                         float* out, float* weight_grad, float* bias_grad, int threads) {
    const bs::NormJob job{grad,     x,     out,           mean,        invstd,    weight,  outer,
                          channels, inner, outer * inner, weight_grad, bias_grad, nullptr, nullptr};
    const auto some = BS_PICK(norm_channels);
    bs::Sum left;
    bs::for_blocks(channels, 1, threads, [&](int64_t begin, int64_t end) { left.add(some(job, begin, end)); });
    return left.value();
}

// Of [pixels, channels]: the input's gradient, from k = sum((x - mean) * dY) * invstd**2 / pixels and the mean of dY.
BS_EXPORT void bs_batch_norm_pixels(const float* grad, const float* x, const float* mean, const float* invstd,
                                    const float* weight, const float* k, const float* grad_mean, int64_t pixels,
                                    int64_t channels, float* out, int threads) {
    const bs::NormJob job{grad,     x,      out,    mean,    invstd,  weight, 1,
                          channels, pixels, pixels, nullptr, nullptr, k,      grad_mean};
    const auto some = BS_PICK(norm_pixels);
    const int64_t block = std::max<int64_t>(1, (int64_t(1) << 14) / channels);
    bs::for_blocks(pixels, block, threads, [&](int64_t begin, int64_t end) { some(job, begin, end); });
}
