// Element types, codes shared with Python, and words of 64 mask bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace bs {

#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the planes are little-endian, and so are the kernels");
#endif

// 16-bit floats as they are stored. Both are compared as float32, as torch does.
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};
// torch.bool: any byte but 0 counts as true.
struct Boolean {
    uint8_t byte;
};

inline float to_float(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float to_float(Half x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    uint32_t bits;
    if (rest >= 0x7c00) {  // infinity, NaN
        bits = 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x0400) {  // normal: the exponent's bias is 15 here and 127 there
        bits = (rest << 13) + ((127u - 15u) << 23);
    } else {  // zero, subnormal: `rest` times 2^-24, exactly
        const float magnitude = float(rest) * 0x1p-24f;
        std::memcpy(&bits, &magnitude, sizeof bits);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }

// Codes of saved.Test, in its order.
enum class Test : int { NotLe = 0, Gt = 1, Inside = 2, NotOutside = 3, Closed = 4, Nonzero = 5 };

// Codes of ops/cpu/planes.py.
enum class Float : int { F32 = 0, F64 = 1, F16 = 2, BF16 = 3 };
enum class Integer : int { I64 = 0, I32 = 1, I16 = 2, I8 = 3, U8 = 4, Bool = 5 };

// A mask is handled in words of 64 bits; element i is bit i % 64 of word i / 64, which is byte order and bit order of
// the planes because they are little-endian.
using Word = uint64_t;
constexpr int kWord = 64;
constexpr int64_t kZvcChunk = 4096;  // ops.schema.ZVC_CHUNK

// The lowest `count` bits, 0 <= count < 64.
inline Word low_bits(int64_t count) { return (Word(1) << count) - 1; }

inline Word load_word(const uint8_t* mask, int64_t element) {
    Word word;
    std::memcpy(&word, mask + element / 8, sizeof word);
    return word;
}
inline void store_word(uint8_t* mask, int64_t element, Word word) {
    std::memcpy(mask + element / 8, &word, sizeof word);
}

// The last word of a mask, of which only `count` < 64 elements, and so (count + 7) / 8 bytes, exist.
inline Word load_last_word(const uint8_t* mask, int64_t element, int64_t count) {
    Word word = 0;
    std::memcpy(&word, mask + element / 8, size_t(count + 7) / 8);
    return word & low_bits(count);
}
inline void store_last_word(uint8_t* mask, int64_t element, int64_t count, Word word) {
    std::memcpy(mask + element / 8, &word, size_t(count + 7) / 8);
}

}  // namespace bs
