// Small floating-point formats. Compiled once per instruction set by foreach_isa.h.
//
// All arithmetic is on the bits of float32, in loops without a branch that compilers turn into vector code.

#include "count_mask.h"
#include "dense.h"
#include "turn.h"

// All bits where `x` is negative, else none. The encoders select with it, with minima and maxima and not by comparing:
// what is chosen in two steps by two masks GCC moves from register to register for longer than all else takes.
inline int32_t if_negative(int32_t x) { return x >> 31; }

// The code of a number that was rounded to less than the smallest normal number in all, where there are no subnormals,
// is 0, or `least` if it is not zero and shall not become so. `rest` is its magnitude.
template <class M, bool nonzero, class Int>
inline Int raised(Int code, Int rest) {
    constexpr int shift = M::subnormals ? 0 : M::mantissa;  // M::least is 1 << shift
    static_assert(M::least == 1 << shift);
    if (nonzero) return std::max(code, Int(std::min(rest, Int(1)) << shift));
    if (M::subnormals) return std::max(code, Int(0));
    return Int(code & ~(Int(code - Int(M::least)) >> (8 * sizeof(Int) - 1)));
}

// Bits of float32 to a code: see codecs/minifloat/reference.py. `odd`: whether there may be infinities and NaNs.
template <class M, bool nonzero, bool odd = true>
inline uint32_t encode_one(uint32_t bits) {
    constexpr int drop = 23 - M::mantissa;
    constexpr uint32_t half = (1u << (drop - 1)) - 1, bias = uint32_t(127 - M::bias) << 23;
    const uint32_t rest = bits & kMagnitude;
    int32_t code = int32_t(rest + (rest >> drop & 1) + (half - bias)) >> drop;
    if (M::subnormals && M::bias != 127) {
        // The processor rounds: where a float32's last bit is as much as the smallest subnormal. What is normal has a
        // code above all of these, what is not has one below. bfloat16's subnormals are float32's, cut.
        constexpr uint32_t at = uint32_t(127 + 24 - M::bias - M::mantissa) << 23;
        const int32_t small = int32_t(bits_of(float_of(rest) + float_of(at)) - at);
        code = std::max(code, std::min(small, int32_t(1) << M::mantissa));
    }
    // One more than the largest code where the number is not finite.
    const int32_t most = int32_t(M::top) - (odd ? if_negative(int32_t(kInfinity - 1 - rest)) : 0);
    code = std::min(raised<M, nonzero>(code, int32_t(rest)), most);
    if (odd) code |= if_negative(int32_t(kInfinity - rest)) & int32_t(M::nan);  // which has all bits of a magnitude
    return uint32_t(code) | (bits >> (32 - M::bits) & (1u << (M::bits - 1)));
}

// The magnitude of a code, as the bits of float32; of NaN's, some number.
template <class M>
inline uint32_t magnitude_of(uint32_t code) {
    const uint32_t rest = code & M::nan;
    const uint32_t normal = (rest << (23 - M::mantissa)) + (uint32_t(127 - M::bias) << 23);
    if (M::bias == 127) return normal;
    uint32_t small = 0;
    if (M::subnormals) {
        constexpr uint32_t step = uint32_t(128 - M::bias - M::mantissa) << 23;
        small = bits_of(float(int32_t(rest)) * float_of(step));
    }
    return choose(rest < 1u << M::mantissa, small, normal);
}

// With what a magnitude lacks: the sign, and what is infinite or NaN.
template <class M>
inline uint32_t finish_one(uint32_t code, uint32_t magnitude) {
    const uint32_t rest = code & M::nan;
    const uint32_t number = choose(rest > M::top, kInfinity, magnitude);
    return choose(rest > M::top + 1, kQuiet, number) | (code >> (M::bits - 1) & 1) << 31;
}

// The least bfloat16 that is rounded to at least `code`, one of the subnormals or the number after them. Half way below it
// is a bfloat16, and ties go to even codes.
template <class M>
constexpr int16_t reaches(int code) {
    const int odd = 2 * code - 1;  // twice what lies half way, in steps of the subnormals
    int exponent = 0;
    while (odd >> (exponent + 1) != 0) ++exponent;
    const int tie = (127 - M::bias - M::mantissa + exponent) << 7 | ((odd << (7 - exponent)) & 0x7f);
    return int16_t(tie + code % 2);
}

// The subnormal that a bfloat16 becomes, or the number after them: how many of their thresholds it reaches.
template <class M, int... below>
inline int16_t subnormal_of(int16_t rest, std::integer_sequence<int, below...>) {
    int16_t code = 0;
    ((code = int16_t(code + (rest >= std::integral_constant<int16_t, reaches<M>(below + 1)>::value))), ...);
    return code;
}

// The same as encode_one of a bfloat16, in the 16 bits it has: twice as many in a register.
template <class M, bool nonzero>
inline uint16_t encode_brain(uint16_t bits) {
    constexpr int drop = 7 - M::mantissa;
    constexpr int half = (1 << (drop - 1)) - 1, bias = (127 - M::bias) << 7;
    const int16_t rest = int16_t(bits & 0x7fff);
    int16_t code = int16_t(int16_t(uint16_t(rest + (rest >> drop & 1) + (half - bias))) >> drop);
    if constexpr (M::subnormals)
        code = std::max(code, subnormal_of<M>(rest, std::make_integer_sequence<int, 1 << M::mantissa>()));
    code = std::min(raised<M, nonzero>(code, rest), int16_t(M::top - (int16_t(0x7f7f - rest) >> 15)));
    code |= int16_t(int16_t(int16_t(0x7f80 - rest) >> 15) & int16_t(M::nan));
    return uint16_t(uint16_t(code) | (bits >> (16 - M::bits) & (1u << (M::bits - 1))));
}

template <class M, class F, bool nonzero>
inline uint32_t encode_element(typename Dense<F>::U x) {
    if constexpr (std::is_same_v<F, BFloat16>) return encode_brain<M, nonzero>(x);
    else return encode_one<M, nonzero>(Dense<F>::widen(x));
}

template <class M, class F>
inline typename Dense<F>::U decode_element(uint32_t code) {
    return Dense<F>::narrow(finish_one<M>(code, magnitude_of<M>(code)));
}

// Not inlined: GCC would forget that the two do not overlap, and give up on vector code.
template <class M, class F, bool nonzero>
__attribute__((noinline)) void encode_codes(const typename Dense<F>::U* __restrict x, int64_t n,
                                            typename M::Code* __restrict codes) {
    for (int64_t i = 0; i < n; ++i) codes[i] = typename M::Code(encode_element<M, F, nonzero>(x[i]));
}

template <class M, class F>
__attribute__((noinline)) void decode_codes(const typename M::Code* __restrict codes, int64_t n,
                                            typename Dense<F>::U* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = decode_element<M, F>(codes[i]);
}

// Fp10: the codes of `words` times three elements, three to a word, and back.
template <class M, class F, bool nonzero>
__attribute__((noinline)) void encode_words(const typename Dense<F>::U* __restrict x, int64_t words,
                                            uint32_t* __restrict to) {
    for (int64_t i = 0; i < words; ++i)
        to[i] = encode_element<M, F, nonzero>(x[3 * i]) | encode_element<M, F, nonzero>(x[3 * i + 1]) << 10 |
                encode_element<M, F, nonzero>(x[3 * i + 2]) << 20;
}
template <class M, class F>
__attribute__((noinline)) void decode_words(const uint32_t* __restrict from, int64_t words,
                                            typename Dense<F>::U* __restrict out) {
    for (int64_t i = 0; i < words; ++i) {
        out[3 * i] = decode_element<M, F>(from[i] & 0x3ff);
        out[3 * i + 1] = decode_element<M, F>(from[i] >> 10 & 0x3ff);
        out[3 * i + 2] = decode_element<M, F>(from[i] >> 20 & 0x3ff);
    }
}

// Copies `n` elements; whole lines past the caches if asked, and then `to` is aligned to one.
template <bool stream, class T>
inline void copy_out(const T* from, int64_t n, T* to) {
    constexpr int64_t line = 64 / sizeof(T);
    int64_t i = 0;
    if (stream)
        for (; i + line <= n; i += line) copy_line<true>(from + i, to + i);
    std::memcpy(to + i, from + i, size_t(n - i) * sizeof(T));
}

template <bool stream, class M, class F, bool nonzero>
inline void encode_range(const MiniEncodeJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    using Stored = typename M::Stored;
    const U* x = static_cast<const U*>(job.x);
    alignas(64) Stored buffer[kCodes / M::fields];
    for (int64_t i = begin; i < end; i += kCodes) {
        const int64_t count = std::min(kCodes, end - i);
        Stored* const out = static_cast<Stored*>(job.codes) + i / M::fields;
        Stored* const to = stream ? buffer : out;
        if constexpr (M::fields > 1) {
            const int64_t words = count / 3;
            encode_words<M, F, nonzero>(x + i, words, to);
            if (count > 3 * words) {
                U last[3] = {};
                std::memcpy(last, x + i + 3 * words, size_t(count - 3 * words) * sizeof(U));
                encode_words<M, F, nonzero>(last, 1, to + words);
            }
        } else {
            encode_codes<M, F, nonzero>(x + i, count, to);
        }
        if (stream) copy_out<true>(buffer, (count + M::fields - 1) / M::fields, out);
    }
}

template <bool stream, class M, class F>
inline void decode_range(const MiniDecodeJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    alignas(64) U buffer[kCodes];
    for (int64_t i = begin; i < end; i += kCodes) {
        const int64_t count = std::min(kCodes, end - i);
        const auto* from = static_cast<const typename M::Stored*>(job.codes) + i / M::fields;
        U* const out = static_cast<U*>(job.out) + i;
        U* const to = stream ? buffer : out;
        if constexpr (M::fields > 1) {
            const int64_t words = count / 3;
            decode_words<M, F>(from, words, to);
            if (count > 3 * words) {
                U last[3];
                decode_words<M, F>(from + words, 1, last);
                std::memcpy(to + 3 * words, last, size_t(count - 3 * words) * sizeof(U));
            }
        } else {
            decode_codes<M, F>(from, count, to);
        }
        if (stream) copy_out<true>(buffer, count, out);
    }
}

// Calls body(M, F) with what a job has; formats of 16 bits come with float32 only.
template <class Body>
inline void with_types(Mini format, Float type, Body body) {
    switch (format) {
        case Mini::Fp16: return body(Fp16(), float());
        case Mini::Brain: return body(Brain(), float());
#define BS_CASE(name)                                                   \
    case Mini::name:                                                    \
        switch (type) {                                                 \
            case Float::F32: return body(name(), float());              \
            case Float::F16: return body(name(), Half());               \
            case Float::BF16: return body(name(), BFloat16());          \
            default: return;                                            \
        }
        BS_CASE(Fp8)
        BS_CASE(Fp10)
        BS_CASE(E4M3)
        BS_CASE(E5M2)
#undef BS_CASE
    }
}

template <bool stream, class M, class F>
inline void encode_as(const MiniEncodeJob& job, int64_t begin, int64_t end) {
    if (job.nonzero) encode_range<stream, M, F, true>(job, begin, end);
    else encode_range<stream, M, F, false>(job, begin, end);
}

void encode_mini(const MiniEncodeJob& job, int64_t begin, int64_t end) {
    with_types(job.format, job.type, [&](auto m, auto f) {
        if (kStreams && job.stream) {
            encode_as<true, decltype(m), decltype(f)>(job, begin, end);
            fence();
        } else {
            encode_as<false, decltype(m), decltype(f)>(job, begin, end);
        }
    });
}

void decode_mini(const MiniDecodeJob& job, int64_t begin, int64_t end) {
    with_types(job.format, job.type, [&](auto m, auto f) {
        if (kStreams && job.stream) {
            decode_range<true, decltype(m), decltype(f)>(job, begin, end);
            fence();
        } else {
            decode_range<false, decltype(m), decltype(f)>(job, begin, end);
        }
    });
}

// The largest magnitude of a group as it is, or of its finite elements.
template <class F, bool odd>
__attribute__((noinline)) uint32_t largest_of(const typename Dense<F>::U* x, int64_t n) {
    int32_t largest = 0;  // signed: AVX2 has no other comparison
    for (int64_t i = 0; i < n; ++i) {
        const int32_t rest = int32_t(Dense<F>::widen(x[i]) & kMagnitude);
        largest = std::max(largest, odd || rest < int32_t(kInfinity) ? rest : 0);
    }
    return uint32_t(largest);
}

// The scale of a group: the smallest power of two by which its largest magnitude fits the format; at least 2^-126.
template <class M>
inline uint32_t scale_of(uint32_t largest) {
    constexpr uint32_t fraction = (M::top & ((1u << M::mantissa) - 1)) << (23 - M::mantissa);
    constexpr int32_t exponent = int32_t(M::top >> M::mantissa) - M::bias;
    // The exponent, one more where the fraction is above that of the format's largest number.
    const int32_t scale = int32_t((largest + (0x7fffff - fraction)) >> 23) - exponent;
    return uint32_t(std::max(scale, 1)) << 23;
}

template <class M, class F, bool odd>
__attribute__((noinline)) void encode_group(const typename Dense<F>::U* __restrict x, int64_t n, uint32_t ceiling,
                                            float reciprocal, uint8_t* __restrict codes) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = Dense<F>::widen(x[i]), rest = bits & kMagnitude;
        uint32_t scaled = bits_of(float_of(std::min(rest, ceiling)) * reciprocal);
        if (odd) scaled = choose(rest >= kInfinity, rest, scaled);
        codes[i] = uint8_t(encode_one<M, false, odd>(scaled | (bits & ~kMagnitude)));
    }
}

template <class M, class F>
inline void encode_scaled_as(const ScaledJob& job, int64_t begin, int64_t end) {
    const auto* x = static_cast<const typename Dense<F>::U*>(job.dense);
    constexpr uint32_t ceiling = Dense<F>::largest >> (23 - M::mantissa) << (23 - M::mantissa);
    for (int64_t i = begin; i < end; i += job.group_size) {
        const int64_t count = std::min(job.group_size, end - i);
        uint32_t largest = largest_of<F, true>(x + i, count);
        const bool odd = largest >= kInfinity;
        if (odd) largest = largest_of<F, false>(x + i, count);
        const uint32_t scale = scale_of<M>(std::min(largest, ceiling));
        job.scales[i / job.group_size] = float_of(scale);
        const float reciprocal = float_of((254u << 23) - scale);
        if (odd) encode_group<M, F, true>(x + i, count, ceiling, reciprocal, job.codes + i);
        else encode_group<M, F, false>(x + i, count, ceiling, reciprocal, job.codes + i);
    }
}

// The elements [begin, end), in order.
template <bool stream, class M, class F>
inline void decode_scaled_span(const ScaledJob& job, int64_t begin, int64_t end, typename Dense<F>::U* out) {
    using U = typename Dense<F>::U;
    alignas(64) U values[kCodes];
    while (begin < end) {
        const int64_t group = begin / job.group_size;
        const float scale = job.scales[group];
        const int64_t last = std::min((group + 1) * job.group_size, end);
        for (; begin < last; begin += kCodes) {
            const int64_t count = std::min(kCodes, last - begin);
            const uint8_t* const __restrict codes = job.codes + begin;
            U* const __restrict to = stream ? values : out;
            for (int64_t k = 0; k < count; ++k)
                to[k] = Dense<F>::narrow(
                    finish_one<M>(codes[k], bits_of(float_of(magnitude_of<M>(codes[k])) * scale)));
            if (stream) copy_out<true>(values, count, out);
            out += count;
        }
        begin = last;
    }
}

template <bool stream, class M, class F>
inline void decode_scaled_range(const ScaledJob& job, int64_t begin, int64_t end) {
    decode_scaled_span<stream, M, F>(job, begin, end, static_cast<typename Dense<F>::U*>(job.dense) + begin);
}

template <class Body>
inline void with_scaled_types(Mini format, Float type, Body body) {
    if (format == Mini::E4M3 || format == Mini::E5M2) with_types(format, type, body);
}

void encode_scaled(const ScaledJob& job, int64_t begin, int64_t end) {
    with_scaled_types(job.format, job.type,
                      [&](auto m, auto f) { encode_scaled_as<decltype(m), decltype(f)>(job, begin, end); });
}

void decode_scaled(const ScaledJob& job, int64_t begin, int64_t end) {
    with_scaled_types(job.format, job.type, [&](auto m, auto f) {
        // A group of 16 elements of 2 bytes is no whole line.
        if (kStreams && job.stream && job.group_size % 32 == 0) {
            decode_scaled_range<true, decltype(m), decltype(f)>(job, begin, end);
            fence();
        } else {
            decode_scaled_range<false, decltype(m), decltype(f)>(job, begin, end);
        }
    });
}

// Images in channels last, which are turned into channels of positions in memory of the thread's own; a group does not
// reach from one image into the next.
template <class M, class F>
inline void encode_scaled_images_as(const ScaledJob& job, int64_t channels, int64_t area, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    const int64_t size = channels * area;
    std::vector<U> turned(static_cast<size_t>(size));
    for (int64_t image = begin; image < end; ++image) {
        const int64_t first = image * size;
        turn(static_cast<const U*>(job.dense) + first, channels, area, channels, turned.data(), area);
        ScaledJob own = job;
        own.dense = turned.data(), own.codes += first, own.scales += first / job.group_size;
        encode_scaled_as<M, F>(own, 0, size);
    }
}

void encode_scaled_images(const ScaledJob& job, int64_t channels, int64_t area, int64_t begin, int64_t end) {
    with_scaled_types(job.format, job.type, [&](auto m, auto f) {
        encode_scaled_images_as<decltype(m), decltype(f)>(job, channels, area, begin, end);
    });
}

// The positions `begin` to `end` of images in channels last.
void decode_scaled_images(const ScaledJob& job, int64_t channels, int64_t area, int64_t begin, int64_t end) {
    with_scaled_types(job.format, job.type, [&](auto m, auto f) {
        using U = typename Dense<decltype(f)>::U;
        const auto decode = [&](int64_t from, int64_t to, U* values) {
            decode_scaled_span<false, decltype(m), decltype(f)>(job, from, to, values);
        };
        turn_spans(decode, channels, area, begin, end, static_cast<U*>(job.dense));
    });
}

// Behind zero-value compression.

// As `disagreements` of ZVC.
int64_t mini_disagreements(const ZvcMiniDecodeJob& job, int64_t begin, int64_t end) {
    int64_t wrong = 0;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t next = (chunk + 1) * kZvcChunk < job.n ? job.offsets[chunk + 1] : job.stored;
        wrong += uint64_t(job.offsets[chunk]) + uint64_t(count_mask(job.mask, chunk, job.n)) != uint64_t(next);
    }
    return wrong;
}

// The elements of a chunk that are not zero, to `to`, which has room for 64 more; returns the end of them. Fills the
// mask.
template <class U>
inline U* mark_and_gather(const ZvcMiniEncodeJob& job, int64_t chunk, U* to) {
    const int64_t end = std::min((chunk + 1) * kZvcChunk, job.n);
    const U* x = static_cast<const U*>(job.x);
    int64_t i = chunk * kZvcChunk;
    for (; i + kWord <= end; i += kWord) {
        prefetch_ahead(x + i, kWord);
        store_word(job.mask, i, compress_nonzero<U>(x + i, to));
    }
    if (i < end) {
        U last[kWord] = {};
        std::memcpy(last, x + i, size_t(end - i) * sizeof(U));
        store_last_word(job.mask, i, end - i, scalar::compress_nonzero<U>(last, to));
    }
    return to;
}

// The codes of chunks [begin, end), as a plane of their own. A chunk at a time: it is compressed in the first-level
// cache and there made codes of. Not the other way round: with half of the elements zero, codes first and then
// vpcompressb takes 1.3 times as long.
template <class M, class F>
inline int64_t encode_block_as(const ZvcMiniEncodeJob& job, int64_t begin, int64_t end, typename M::Stored* to) {
    using U = typename Dense<F>::U;
    constexpr int64_t fields = M::fields;
    alignas(64) U values[fields + kZvcChunk + kWord];
    int64_t total = 0, held = 0;  // values; those of them that are left for the next word
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t count = mark_and_gather<U>(job, chunk, values + held) - values, words = count / fields;
        if (job.counts != nullptr) job.counts[chunk] = count - held;
        total += count - held;
        if constexpr (fields > 1) encode_words<M, F, true>(values, words, to);
        else encode_codes<M, F, true>(values, words, to);
        to += words;
        held = count - words * fields;
        std::memmove(values, values + words * fields, size_t(held) * sizeof(U));
    }
    if constexpr (fields > 1) {
        if (held > 0) {
            std::memset(values + held, 0, size_t(fields - held) * sizeof(U));
            encode_words<M, F, true>(values, 1, to);
        }
    }
    return total;
}

// Returns how many codes there are.
int64_t encode_block(const ZvcMiniEncodeJob& job, int64_t begin, int64_t end, void* codes) {
    int64_t count = 0;
    with_types(job.format, job.type, [&](auto m, auto f) {
        count = encode_block_as<decltype(m), decltype(f)>(job, begin, end,
                                                          static_cast<typename decltype(m)::Stored*>(codes));
    });
    return count;
}

template <bool stream, class M, class F>
inline void scatter_mini_range(const ZvcMiniDecodeJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    constexpr int64_t fields = M::fields;
    alignas(64) U values[kZvcChunk + 2 * fields + kWord];
    U* out = static_cast<U*>(job.out);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n), offset = job.offsets[chunk];
        const int64_t next = last < job.n ? job.offsets[chunk + 1] : job.stored;
        const auto* stored = static_cast<const typename M::Stored*>(job.values) + offset / fields;
        if constexpr (fields > 1) decode_words<M, F>(stored, (next + fields - 1) / fields - offset / fields, values);
        else decode_codes<M, F>(stored, next - offset, values);
        const U* value = values + offset % fields;
        int64_t i = chunk * kZvcChunk;
        for (; i + kWord <= last; i += kWord) value = expand<stream, U>(load_word(job.mask, i), value, out + i);
        if (i < last) {
            U rest[kWord];
            scalar::expand<false, U>(load_last_word(job.mask, i, last - i), value, rest);
            std::memcpy(out + i, rest, size_t(last - i) * sizeof(U));
        }
    }
}

void scatter_mini(const ZvcMiniDecodeJob& job, int64_t begin, int64_t end) {
    with_types(job.format, job.type, [&](auto m, auto f) {
        if (kStreams && job.stream) {
            scatter_mini_range<true, decltype(m), decltype(f)>(job, begin, end);
            fence();
        } else {
            scatter_mini_range<false, decltype(m), decltype(f)>(job, begin, end);
        }
    });
}
