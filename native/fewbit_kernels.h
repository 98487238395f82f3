// Few-bit codes of an activation's derivative. Compiled once per instruction set by foreach_isa.h.
//
// Floats are compared as integers that have their order (a key): the 16-bit ones then need no conversion and fill a
// register with twice as many. There are no intrinsics: these are loops that compilers turn into vector code.

#include "fields.h"

// The codes of n elements, how many keys each exceeds, 0 for infinities and NaN; returns how many are that. At most kRun elements, so
// that their number fits I.
template <int thresholds, class I>
inline int64_t find_codes(const I* x, int64_t n, I infinity, const int32_t* keys, uint8_t* codes) {
    constexpr I largest = std::numeric_limits<I>::max();
    I key[thresholds];
    for (int j = 0; j < thresholds; ++j) key[j] = I(keys[j]);
    I count = 0;
    for (int64_t i = 0; i < n; ++i) {
        const I own = x[i] < 0 ? I(x[i] ^ largest) : x[i];
        const I nonfinite = I((x[i] & largest) >= infinity);
        I code = 0;
#pragma GCC unroll 15  // else the compiler makes vectors of thresholds instead of elements
        for (int j = 0; j < thresholds; ++j) code = I(code + (own > key[j]));
        codes[i] = uint8_t(code & I(nonfinite - 1));
        count = I(count + nonfinite);
    }
    return count;
}

template <class I>
inline int64_t find_codes(const FewbitEncodeJob& job, const I* x, int64_t n, uint8_t* codes) {
    switch (job.bits) {
        case 1: return find_codes<1, I>(x, n, I(job.infinity), job.keys, codes);
        case 2: return find_codes<3, I>(x, n, I(job.infinity), job.keys, codes);
        case 3: return find_codes<7, I>(x, n, I(job.infinity), job.keys, codes);
        default: return find_codes<15, I>(x, n, I(job.infinity), job.keys, codes);
    }
}

// 3 bits: eight fields in eight bytes fold to three bytes, halves at a time, where the stream of fields.h goes bit by bit.
inline void pack_threes(const uint8_t* codes, int64_t n, uint8_t* packed) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8, packed += 3) {
        uint64_t group = load_at<uint64_t>(codes + i, 0);
        group = (group | group >> 5) & 0x003f003f003f003f;
        group = (group | group >> 10) & 0x00000fff00000fff;
        group |= group >> 20;
        std::memcpy(packed, &group, 3);
    }
    encode_stream(codes + i, n - i, 3, 0, packed);
}
inline void unpack_threes(const uint8_t* packed, int64_t n, uint8_t* codes) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 8, packed += 3) {  // four bytes are loaded, of which the masks leave three
        uint64_t group = load_at<uint32_t>(packed, 0);
        group = (group | group << 20) & 0x00000fff00000fff;
        group = (group | group << 10) & 0x003f003f003f003f;
        group = (group | group << 5) & 0x0707070707070707;
        store_at<uint64_t>(codes + i, 0, group);
    }
    decode_stream(packed, n - i, 3, 0, codes + i);
}

template <class I>
inline int64_t encode_derivative_as(const FewbitEncodeJob& job, int64_t begin, int64_t end) {
    const I* x = static_cast<const I*>(job.x);
    uint8_t codes[kRun];
    int64_t nonfinite = 0;
    for (int64_t i = begin; i < end; i += kRun) {
        const int64_t count = std::min(end - i, kRun);
        prefetch_ahead(x + i, count);
        nonfinite += find_codes<I>(job, x + i, count, codes);
        uint8_t* to = job.packed + i / 8 * job.bits;
        if (job.bits == 3) pack_threes(codes, count, to);
        else encode_fields(codes, count, job.bits, 0, to);
    }
    return nonfinite;
}

int64_t encode_derivative(const FewbitEncodeJob& job, int64_t begin, int64_t end) {
    return job.width == 2 ? encode_derivative_as<int16_t>(job, begin, end)
                          : encode_derivative_as<int32_t>(job, begin, end);
}

template <bool stream, class U>
inline void decode_derivative_range(const FewbitDecodeJob& job, int64_t begin, int64_t end) {
    constexpr int64_t line = 64 / sizeof(U);
    U values[16], run[kRun];
    uint8_t codes[kRun];
    for (int j = 0; j < 16; ++j) values[j] = U(job.values[j & ((1 << job.bits) - 1)]);
    U* out = static_cast<U*>(job.out);
    for (int64_t i = begin; i < end; i += kRun) {
        const int64_t count = std::min(end - i, kRun);
        const uint8_t* from = job.packed + i / 8 * job.bits;
        if (job.bits == 3) unpack_threes(from, count, codes);
        else decode_fields(from, count, job.bits, 0, codes);
        U* to = stream ? run : out + i;
        look_up<U>(codes, count, values, to);
        if (!stream) continue;
        int64_t k = 0;
        for (; k + line <= count; k += line) copy_line<stream>(run + k, out + i + k);
        std::memcpy(out + i + k, run + k, size_t(count - k) * sizeof(U));
    }
}

template <class U>
inline void decode_derivative_as(const FewbitDecodeJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) {
        decode_derivative_range<true, U>(job, begin, end);
        fence();
    } else {
        decode_derivative_range<false, U>(job, begin, end);
    }
}

void decode_derivative(const FewbitDecodeJob& job, int64_t begin, int64_t end) {
    if (job.width == 2) decode_derivative_as<uint16_t>(job, begin, end);
    else decode_derivative_as<uint32_t>(job, begin, end);
}

// The values of n codes, at most kRun. A bit chooses between two registers; doubles, which no few-bit code stands for,
// are looked up one by one.
template <class U>
inline void values_of(const uint8_t* packed, int64_t n, int bits, const U* table, U* values) {
    if (bits == 1) {
        int64_t i = 0;
        for (; i + kWord <= n; i += kWord) blend<false, U>(load_word(packed, i), table[1], table[0], values + i);
        if (i < n) blend<false, U>(load_last_word(packed, i, n - i), table[1], table[0], values + i);
        return;
    }
    uint8_t codes[kRun];
    if (bits == 3) unpack_threes(packed, n, codes);
    else decode_fields(packed, n, bits, 0, codes);
    if constexpr (sizeof(U) == 4) {
        look_up<U>(codes, n, table, values);
    } else {
        for (int64_t i = 0; i < n; ++i) values[i] = table[codes[i]];
    }
}

// The product goes through a buffer: where `out` is x, compilers would not make vector code of a loop from one to the
// other.
template <bool stream, class F, class U>
inline void scale_range(const ScaleJob& job, int64_t begin, int64_t end) {
    constexpr int64_t line = 64 / sizeof(U);
    const F* x = static_cast<const F*>(job.x);
    U* out = static_cast<U*>(job.out);
    U table[16], values[kRun];
    for (int j = 0; j < 16; ++j) table[j] = static_cast<const U*>(job.table)[j & ((1 << job.bits) - 1)];
    for (int64_t i = begin; i < end; i += kRun) {
        const int64_t count = std::min(end - i, kRun);
        prefetch_ahead(x + i, count);
        values_of<U>(job.packed + i / 8 * job.bits, count, job.bits, table, values);
        for (int64_t k = 0; k < count; ++k) {
            F value;
            std::memcpy(&value, values + k, sizeof value);
            value = x[i + k] * value;
            std::memcpy(values + k, &value, sizeof value);
        }
        int64_t k = 0;
        for (; stream && k + line <= count; k += line) copy_line<stream>(values + k, out + i + k);
        std::memcpy(out + i + k, values + k, size_t(count - k) * sizeof(U));
    }
}

template <class F, class U>
inline void scale_as(const ScaleJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) {
        scale_range<true, F, U>(job, begin, end);
        fence();
    } else {
        scale_range<false, F, U>(job, begin, end);
    }
}

void scale_by_codes(const ScaleJob& job, int64_t begin, int64_t end) {
    if (job.width == 4) scale_as<float, uint32_t>(job, begin, end);
    else scale_as<double, uint64_t>(job, begin, end);
}
