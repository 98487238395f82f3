// Elements of 16 and 32 bits as the bits of float32. Included inside a namespace by the kernels that need it.

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t choose(bool condition, uint32_t yes, uint32_t no) { return condition ? yes : no; }

constexpr uint32_t kInfinity = 0x7f800000, kQuiet = 0x7fc00000, kMagnitude = 0x7fffffff;
constexpr uint32_t kHalfNormal = 0x38800000;  // 2^-14, the smallest normal number of float16

// An element as the bits of float32, and back; back is only asked for what is exact, for infinities and the quiet NaN.
template <class F>
struct Dense;

template <>
struct Dense<float> {
    using U = uint32_t;
    static constexpr uint32_t largest = 0x7f7fffff;
    static uint32_t widen(U x) { return x; }
    static U narrow(uint32_t bits) { return bits; }
};

template <>
struct Dense<BFloat16> {
    using U = uint16_t;
    static constexpr uint32_t largest = 0x7f7fffff;
    static uint32_t widen(U x) { return uint32_t(x) << 16; }
    static U narrow(uint32_t bits) { return U(bits >> 16); }
};

template <>
struct Dense<Half> {
    using U = uint16_t;
    static constexpr uint32_t largest = 0x477fffff;
    static uint32_t widen(U x) {
        const uint32_t rest = x & 0x7fff;
        const uint32_t normal = (rest << 13) + (112u << 23) + choose(rest >= 0x7c00, 112u << 23, 0);
        const uint32_t small = bits_of(float(int32_t(rest)) * 0x1p-24f);
        return choose(rest < 0x400, small, normal) | uint32_t(x & 0x8000) << 16;
    }
    static U narrow(uint32_t bits) {
        const uint32_t rest = bits & kMagnitude;
        const uint32_t odd = 0x7c00 | uint32_t(rest > kInfinity) << 9;  // infinity or the quiet NaN
        const uint32_t normal = choose(rest >= kInfinity, odd, (rest - (112u << 23)) >> 13);
        const uint32_t small = uint32_t(int32_t(float_of(std::min(rest, kHalfNormal)) * 0x1p24f));
        return U(choose(rest < kHalfNormal, small, normal) | (bits >> 16 & 0x8000));
    }
};

// Floats as integers of the same order, and back: an integer's minimum is vector code, a float's is not, because of NaN.
inline int32_t ordered(int32_t bits) { return bits ^ int32_t(uint32_t(bits >> 31) >> 1); }

// The bits of any float32 but NaN to the nearest element, ties to even.
template <class F>
inline typename Dense<F>::U rounded(uint32_t bits);

template <>
inline uint32_t rounded<float>(uint32_t bits) {
    return bits;
}
template <>
inline uint16_t rounded<BFloat16>(uint32_t bits) {
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <>
inline uint16_t rounded<Half>(uint32_t bits) {
    const uint32_t rest = bits & kMagnitude;
    const uint32_t normal = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    const uint32_t small = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);  // the last bit of 0.5 is the smallest subnormal
    const uint32_t magnitude = choose(rest < kHalfNormal, small, std::min(normal, 0x7c00u));
    return uint16_t(magnitude | (bits >> 16 & 0x8000));
}
