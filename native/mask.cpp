// C interface of bitmask, binary, and of a mask's application. Layouts: codecs/masks/reference.py.
#include <cstdint>
#include <cstring>
#include <limits>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"
#include "planes.h"

namespace bs {

struct TestJob {
    const void* x;
    Float type;
    Test test;
    double lo, hi;  // already rounded to the type of x
    uint8_t* mask;
    bool counts_nans;
};

struct BinaryJob {
    const void* x;
    int width;               // bytes per element
    uint64_t first, second;  // bits of the two values
    uint8_t* mask;
};

struct BlendJob {
    const uint8_t* mask;
    void* out;
    int width;
    uint64_t if_set, if_clear;  // bits of the two values
    bool stream;
};

struct SelectJob {
    const void* x;
    const uint8_t* mask;
    void* out;  // may be x
    int width;
};

}  // namespace bs

#define BS_KERNELS "mask_kernels.h"
#include "foreach_isa.h"

namespace bs {
constexpr int64_t kBlock = 1 << 16;  // elements; a multiple of kWord

inline int64_t encode_tested(const TestJob& job, int64_t n, int threads) {
    const auto encode = BS_PICK(encode_test);
    Sum nans;
    for_blocks(n, kBlock, threads, [&](int64_t begin, int64_t end) { nans.add(encode(job, begin, end)); });
    return nans.value();
}

}  // namespace bs

BS_EXPORT void bs_bitmask_encode(const void* x, int64_t n, int type, int test, double lo, double hi, uint8_t* mask,
                                 int threads) {
    bs::encode_tested({x, bs::Float(type), bs::Test(test), lo, hi, mask, false}, n, threads);
}

// Returns how many elements are neither of the two values.
BS_EXPORT int64_t bs_binary_encode(const void* x, int64_t n, int width, uint64_t first, uint64_t second, uint8_t* mask,
                                   int threads) {
    const bs::BinaryJob job{x, width, first, second, mask};
    const auto encode = BS_PICK(encode_binary);
    bs::Sum neither;
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { neither.add(encode(job, begin, end)); });
    return neither.value();
}

// Fills `out`, n elements of `width` bytes, with one of two values per bit.
BS_EXPORT void bs_mask_decode(const uint8_t* mask, void* out, int64_t n, int width, uint64_t if_set, uint64_t if_clear,
                              int threads) {
    const bs::BlendJob job{mask, out, width, if_set, if_clear, bs::should_stream(out, n * width)};
    const auto blend = BS_PICK(blend_block);
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { blend(job, begin, end); });
}

namespace bs {

struct BitmaskPlanes {
    int type, test;
    double lo, hi;
    int64_t width;  // of what is decoded
    uint64_t if_set, if_clear;
    int64_t refuses_nan;  // whether one would need a plane of its own
};

inline uint64_t bits_at(const void* x, int64_t index, int64_t width) {  // of numbers, the lowest byte first
    uint64_t bits = 0;
    std::memcpy(&bits, static_cast<const char*>(x) + index * width, size_t(width));
    return bits;
}

}  // namespace bs

BS_EXPORT BsEncodePlanes bs_bitmask_encode_planes, bs_binary_encode_planes;
BS_EXPORT BsDecodePlanes bs_bitmask_decode_planes, bs_binary_decode_planes;

int64_t bs_bitmask_encode_planes(const void* x, int64_t n, const void* how, void* planes, int threads) {
    const auto& mask = *static_cast<const bs::BitmaskPlanes*>(how);
    const auto type = bs::Float(mask.type);
    auto* bits = static_cast<uint8_t*>(planes);
    const bs::TestJob job{x, type, bs::Test(mask.test), mask.lo, mask.hi, bits, mask.refuses_nan != 0};
    return bs::encode_tested(job, n, threads);
}

void bs_bitmask_decode_planes(const void* planes, int64_t n, const void* how, void* out, int threads) {
    const auto& mask = *static_cast<const bs::BitmaskPlanes*>(how);
    const int width = int(mask.width);
    bs_mask_decode(static_cast<const uint8_t*>(planes), out, n, width, mask.if_set, mask.if_clear, threads);
}

// `how` is the bytes of an element, int64. The pair lies before the mask: the first element, and the first that differs.
int64_t bs_binary_encode_planes(const void* x, int64_t n, const void* how, void* planes, int threads) {
    const int64_t width = *static_cast<const int64_t*>(how);
    const uint64_t first = bs::bits_at(x, 0, width);
    int64_t other = 1;
    while (other < n && bs::bits_at(x, other, width) == first) ++other;
    if (other == n) return n;  // there is one value, and so no pair
    const uint64_t second = bs::bits_at(x, other, width);
    auto* pair = static_cast<uint8_t*>(planes);
    std::memcpy(pair, &first, size_t(width));
    std::memcpy(pair + width, &second, size_t(width));
    return bs_binary_encode(x, n, int(width), first, second, pair + 2 * width, threads);
}

void bs_binary_decode_planes(const void* planes, int64_t n, const void* how, void* out, int threads) {
    const int64_t width = *static_cast<const int64_t*>(how);
    const auto* mask = static_cast<const uint8_t*>(planes) + 2 * width;
    const uint64_t if_clear = bs::bits_at(planes, 0, width), if_set = bs::bits_at(planes, 1, width);
    bs_mask_decode(mask, out, n, int(width), if_set, if_clear, threads);
}

// out[i] = bit i of the mask ? x[i] : 0, n elements of 2, 4 or 8 bytes. `out` may be x.
BS_EXPORT void bs_mask_select(const void* x, const uint8_t* mask, int64_t n, int width, void* out, int threads) {
    const bs::SelectJob job{x, mask, out, width};
    const auto select = BS_PICK(select_block);
    bs::for_blocks(n, bs::kBlock, threads, [&](int64_t begin, int64_t end) { select(job, begin, end); });
}
