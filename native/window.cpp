// C interface of window. Layout: codecs/narrow/windows/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"
#include "planes.h"

namespace bs {

// A pooling in three spatial dimensions; with fewer, the first ones are of size 1.
struct Window {
    int64_t inner;  // elements between spatial neighbours in memory
    int64_t input[3], output[3], kernel[3], stride[3], padding[3], dilation[3];
    int bits;
    bool flat;      // nothing happens in the first dimension
    bool distinct;  // no two positions of a window are at the same distance from its origin in the flat input

    // From a window's origin to the position with this code, in the flat input. Digits of a code that no encoder
    // writes wrap, as in the reference.
    int64_t distance(int64_t code) const {
        int64_t offset[3];
        for (int k = 2; k >= 0; --k) {
            offset[k] = code % kernel[k] * dilation[k];
            code /= kernel[k];
        }
        return (offset[0] * input[1] + offset[1]) * input[2] + offset[2];
    }
};

struct WindowEncodeJob {
    const int64_t* indices;
    const Window* window;
    uint8_t* packed;
};

struct WindowDecodeJob {
    const uint8_t* packed;
    const Window* window;
    const int64_t* distances;  // of every code; null: too many to tabulate
    int64_t* out;
};

struct WindowScatterJob {
    const uint8_t* packed;
    const Window* window;
    const int64_t* distances;  // as above
    const void* grad;
    void* out;
    bool wide;  // float64
};

// `geometry`: input, output, kernel, stride, padding, dilation, three numbers each.
inline Window make_window(int64_t inner, const int64_t* geometry, int bits) {
    Window w;
    w.inner = inner;
    int64_t* const fields[] = {w.input, w.output, w.kernel, w.stride, w.padding, w.dilation};
    for (int f = 0; f < 6; ++f) std::copy_n(geometry + 3 * f, 3, fields[f]);
    w.bits = bits;
    w.flat = w.input[0] == 1 && w.output[0] == 1 && w.kernel[0] == 1 && w.padding[0] == 0;
    const auto narrower = [&](int k) { return (w.kernel[k] - 1) * w.dilation[k] < w.input[k]; };
    // The bound keeps every distance and coordinate in 32 bits. Padding beyond the input's size is no pooling of torch.
    bool small = double(w.input[0]) * double(w.input[1]) * double(w.input[2]) < double(1 << 28);
    for (int k = 0; k < 3; ++k)
        small = small && w.padding[k] < 1 << 28 && w.output[k] * w.stride[k] < 1 << 28;
    w.distinct = small && narrower(0) && narrower(1) && narrower(2);
    return w;
}

}  // namespace bs

#define BS_KERNELS "window_kernels.h"
#include "foreach_isa.h"

namespace bs {
constexpr int64_t kBlock = 1 << 16;  // elements; a multiple of kRun
constexpr int kTabulatedBits = 12;
}

// Returns how many indices are in no position of their window.
BS_EXPORT int64_t bs_window_encode(const int64_t* indices, int64_t n, int64_t inner, const int64_t* geometry, int bits,
                                   uint8_t* packed, int threads) {
    const bs::Window window = bs::make_window(inner, geometry, bits);
    const bs::WindowEncodeJob job{indices, &window, packed};
    const auto encode = BS_PICK(encode_windows);
    bs::Sum bad;
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { bad.add(encode(job, begin, end)); });
    return bad.value();
}

BS_EXPORT void bs_window_decode(const uint8_t* packed, int64_t inner, const int64_t* geometry, int bits, int64_t* out,
                                int64_t n, int threads) {
    const bs::Window window = bs::make_window(inner, geometry, bits);
    int64_t distances[int64_t(1) << bs::kTabulatedBits];
    const bool tabulated = bits <= bs::kTabulatedBits;
    if (tabulated)
        for (int64_t code = 0; code < int64_t(1) << bits; ++code) distances[code] = window.distance(code);
    const bs::WindowDecodeJob job{packed, &window, tabulated ? distances : nullptr, out};
    const auto decode = BS_PICK(decode_windows);
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { decode(job, begin, end); });
}

namespace bs {

struct WindowPlanes {
    int64_t inner, bits, geometry[18];
};

}  // namespace bs

BS_EXPORT BsEncodePlanes bs_window_encode_planes;
BS_EXPORT BsDecodePlanes bs_window_decode_planes;

int64_t bs_window_encode_planes(const void* x, int64_t n, const void* how, void* planes, int threads) {
    const auto& windows = *static_cast<const bs::WindowPlanes*>(how);
    return bs_window_encode(static_cast<const int64_t*>(x), n, windows.inner, windows.geometry, int(windows.bits),
                            static_cast<uint8_t*>(planes), threads);
}

void bs_window_decode_planes(const void* planes, int64_t n, const void* how, void* out, int threads) {
    const auto& windows = *static_cast<const bs::WindowPlanes*>(how);
    bs_window_decode(static_cast<const uint8_t*>(planes), windows.inner, windows.geometry, int(windows.bits),
                     static_cast<int64_t*>(out), n, threads);
}

// The gradient of a max pooling's input, of float32 or float64 (`wide`), from its output's, n elements in memory order.
BS_EXPORT void bs_window_scatter(const uint8_t* packed, int64_t inner, const int64_t* geometry, int bits, const void* grad,
                                 int64_t n, int wide, void* out, int threads) {
    const bs::Window window = bs::make_window(inner, geometry, bits);
    int64_t distances[int64_t(1) << bs::kTabulatedBits];
    const bool tabulated = bits <= bs::kTabulatedBits;
    if (tabulated)
        for (int64_t code = 0; code < int64_t(1) << bits; ++code) distances[code] = window.distance(code);
    const bs::WindowScatterJob job{packed, &window, tabulated ? distances : nullptr, grad, out, wide != 0};
    const auto scatter = BS_PICK(scatter_windows);
    const int64_t parts = n / (window.output[0] * window.output[1] * window.output[2] * inner);
    bs::for_blocks(parts, 1, threads, [&](int64_t begin, int64_t end) { scatter(job, begin, end); });
}
