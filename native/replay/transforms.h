// Whether functions are transformed or recorded. The headers of these two need others that torch does not hand out, or are
// long; only whether there is anything is asked.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

namespace at::functorch {
struct DynamicLayer;
TORCH_API std::vector<DynamicLayer>& getDynamicLayerStack();
}  // namespace at::functorch
namespace torch::jit::tracer {
struct TracingState;
TORCH_API const std::shared_ptr<TracingState>& getTracingState();
}  // namespace torch::jit::tracer

namespace backstash {

// By functorch, or recorded by torch.jit.trace.
inline bool has_transform() {
    return !at::functorch::getDynamicLayerStack().empty() || torch::jit::tracer::getTracingState() != nullptr;
}

}  // namespace backstash
