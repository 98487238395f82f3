// Error-bounded values at a width per block. Compiled once per instruction set by foreach_isa.h.
//
// A chunk's values go through a buffer in the first-level cache. What is done to a block's 32 is in loops without a
// branch, which compilers turn into vector code.

#include "count_mask.h"
#include "dense.h"
#include "lines.h"

template <class F>
__attribute__((noinline)) Extremes extremes_of(const typename Dense<F>::U* x, int64_t n) {
    constexpr int32_t infinity = int32_t(kInfinity), minus = ~infinity;
    int32_t low = infinity, high = minus;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = int32_t(Dense<F>::widen(x[i])), key = ordered(bits);
        const int32_t strange = -int32_t((bits & int32_t(kMagnitude)) >= infinity);  // no condition: GCC would jump
        low = std::min(low, (key & ~strange) | (infinity & strange));
        high = std::max(high, (key & ~strange) | (minus & strange));
    }
    return {float_of(uint32_t(ordered(low))), float_of(uint32_t(ordered(high)))};
}

Extremes extremes(const void* x, Float type, int64_t begin, int64_t end) {
    switch (type) {
        case Float::F32: return extremes_of<float>(static_cast<const uint32_t*>(x) + begin, end - begin);
        case Float::F16: return extremes_of<Half>(static_cast<const uint16_t*>(x) + begin, end - begin);
        default: return extremes_of<BFloat16>(static_cast<const uint16_t*>(x) + begin, end - begin);
    }
}

// The signs and the magnitudes in steps of a block's values, in bits 31 and 0 to 22. Returns the union of them, with
// bit 30 where one cannot be held. Not inlined: see encode_codes of minifloat.
template <class F>
__attribute__((noinline)) uint32_t quantise(const typename Dense<F>::U* __restrict values, const float* grid,
                                            uint32_t* __restrict fields) {
    constexpr float shift = 0x1p23f;  // the processor rounds: to what is added to this, to nearest, ties to even
    const float inverse = grid[0], step = grid[1], limit = grid[2], quarter = step * 0.25f;
    uint32_t all = 0;
    for (int i = 0; i < kSzpBlock; ++i) {
        const uint32_t bits = Dense<F>::widen(values[i]);
        const float magnitude = float_of(bits & kMagnitude);
        const float sum = magnitude * inverse + shift, code = sum - shift;
        const float decoded = code == 0.0f ? quarter : code * step;
        const float difference = float_of(bits_of(decoded - magnitude) & kMagnitude);
        bool good = sum < 2 * shift;
        good &= difference <= limit;
        good &= decoded > 0.0f;
        if (!std::is_same_v<F, float>) good &= Dense<F>::widen(Dense<F>::narrow(bits_of(decoded))) == bits_of(decoded);
        const uint32_t field = (bits_of(sum) & 0x7fffff) | (bits & ~kMagnitude);
        fields[i] = field;
        all |= field | choose(good, 0, 1u << 30);
    }
    return all;
}

// A block as it is stored: that many magnitude words, with a word of signs or without; or the elements' own bits.
struct SzpBlock {
    uint32_t fields[kSzpBlock];
    int planes;
    bool negative, raw;
    int64_t size() const { return planes + negative; }
};

template <class F>
inline void encode_block(const typename Dense<F>::U* values, int64_t count, const float* grid, SzpBlock& block) {
    using U = typename Dense<F>::U;
    constexpr int bits = 8 * sizeof(U);
    U full[kSzpBlock];
    const U* from = values;
    if (count < kSzpBlock) {  // filled up with something that changes nothing
        for (int64_t i = 0; i < kSzpBlock; ++i) full[i] = values[i < count ? i : 0];
        from = full;
    }
    const uint32_t all = quantise<F>(from, grid, block.fields);
    const uint32_t codes = all & 0x7fffff;
    block.planes = codes == 0 ? 0 : 32 - __builtin_clz(codes);
    block.negative = all >> 31 != 0;
    block.raw = (all >> 30 & 1) != 0 || block.planes + block.negative >= bits;
    if (block.raw) {
        block.planes = bits;
        block.negative = false;
        for (int64_t i = 0; i < kSzpBlock; ++i) block.fields[i] = from[i];
    }
    for (int64_t i = count; i < kSzpBlock; ++i) block.fields[i] = 0;
}

template <class U>
inline Word nonzero(const U* x) {
    return differs<U>(x, 0) & differs<U>(x, U(U(1) << (8 * sizeof(U) - 1)));  // -0.0 is zero
}

// The values of a chunk to `to`, which has room for 64 more; returns the end of them.
template <bool marks, class U>
inline U* gather_values(const SzpEncodeJob& job, int64_t chunk, U* to) {
    const U* x = static_cast<const U*>(job.x);
    const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
    int64_t i = chunk * kZvcChunk;
    for (; i + kWord <= last; i += kWord) {
        prefetch_ahead(x + i, kWord);
        const Word word = marks ? nonzero<U>(x + i) : load_word(job.mask, i);
        if (marks) store_word(job.mask, i, word);
        to = compress<U>(x + i, word, to);
    }
    if (i < last) {
        U rest[kWord] = {};
        std::memcpy(rest, x + i, size_t(last - i) * sizeof(U));
        const Word word = marks ? nonzero<U>(rest) : load_last_word(job.mask, i, last - i);
        if (marks) store_last_word(job.mask, i, last - i, word);
        to = scalar::compress<U>(rest, word, to);
    }
    return to;
}

inline int64_t szp_blocks(int64_t values) { return (values + kSzpBlock - 1) / kSzpBlock; }
inline int64_t szp_header(int64_t blocks) { return (blocks + 3) / 4; }

// First pass: the mask of chunks [begin, end), and in `offsets` how many words each takes.
template <class F>
inline void measure_as(const SzpEncodeJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    alignas(64) U values[kZvcChunk + kWord];
    SzpBlock block;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t count = gather_values<true, U>(job, chunk, values) - values;
        int64_t words = szp_header(szp_blocks(count));
        for (int64_t i = 0; i < count; i += kSzpBlock) {
            encode_block<F>(values + i, std::min(kSzpBlock, count - i), job.grid, block);
            words += block.size();
        }
        job.offsets[chunk] = words;
    }
}

void szp_measure(const SzpEncodeJob& job, int64_t begin, int64_t end) {
    switch (job.type) {
        case Float::F32: return measure_as<float>(job, begin, end);
        case Float::F16: return measure_as<Half>(job, begin, end);
        default: return measure_as<BFloat16>(job, begin, end);
    }
}

// Second pass: the words of chunks [begin, end).
template <bool stream, class F>
inline void write_as(const SzpEncodeJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    alignas(64) U values[kZvcChunk + kWord];
    SzpBlock block;
    Lines<uint32_t> lines(job.words + job.offsets[begin]);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t count = gather_values<false, U>(job, chunk, values) - values;
        const int64_t header = szp_header(szp_blocks(count));
        uint8_t* width = reinterpret_cast<uint8_t*>(lines.end());
        std::memset(width, 0, size_t(header) * 4);
        uint32_t* to = lines.end() + header;
        for (int64_t i = 0; i < count; i += kSzpBlock) {
            encode_block<F>(values + i, std::min(kSzpBlock, count - i), job.grid, block);
            *width++ = uint8_t(block.planes | (block.negative ? kSzpSigned : 0));
            for (int bit = 0; bit < block.planes; ++bit) *to++ = plane_of(block.fields, bit);
            if (block.negative) *to++ = plane_of(block.fields, 31);
        }
        lines.end() = to;
        lines.template flush<stream>();
    }
    lines.finish();
}

void szp_write(const SzpEncodeJob& job, int64_t begin, int64_t end) {
    const auto run = [&](auto f) {
        if (kStreams && job.stream) {
            write_as<true, decltype(f)>(job, begin, end);
            fence();
        } else {
            write_as<false, decltype(f)>(job, begin, end);
        }
    };
    switch (job.type) {
        case Float::F32: return run(float());
        case Float::F16: return run(Half());
        default: return run(BFloat16());
    }
}

// How many of the chunks [begin, end) do not end where the next one begins, by the mask and their widths, or have a
// width that there is not.
int64_t szp_disagreements(const SzpDecodeJob& job, int64_t begin, int64_t end) {
    const int bits = job.type == Float::F32 ? 32 : 16;
    int64_t wrong = 0;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = job.offsets[chunk];
        const int64_t next = (chunk + 1) * kZvcChunk < job.n ? job.offsets[chunk + 1] : job.stored;
        const int64_t blocks = szp_blocks(count_mask(job.mask, chunk, job.n));
        if (first < 0 || next > job.stored || first > next || next - first < szp_header(blocks)) {
            ++wrong;
            continue;
        }
        const uint8_t* widths = reinterpret_cast<const uint8_t*>(job.words + first);
        int64_t size = szp_header(blocks);
        bool known = true;
        for (int64_t i = 0; i < blocks; ++i) {
            const int planes = widths[i] & (kSzpSigned - 1), sign = widths[i] / kSzpSigned;
            known &= widths[i] == bits || (planes <= 23 && sign <= 1 && planes + sign < bits);
            size += planes + sign;
        }
        wrong += !known || size != next - first;
    }
    return wrong;
}

// What a block's fields mean.
template <class F>
__attribute__((noinline)) void decode_fields_of(const uint32_t* __restrict fields, float step,
                                                typename Dense<F>::U* __restrict values) {
    const float quarter = step * 0.25f;
    for (int i = 0; i < kSzpBlock; ++i) {
        const uint32_t code = fields[i] & kMagnitude;
        const float product = float(int32_t(code)) * step;
        const float magnitude = code == 0 ? quarter : product;
        values[i] = Dense<F>::narrow(bits_of(magnitude) | (fields[i] & ~kMagnitude));
    }
}

template <bool stream, class F>
inline void read_as(const SzpDecodeJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    constexpr int bits = 8 * sizeof(U);
    alignas(64) U values[kZvcChunk + 2 * kWord];
    alignas(64) uint32_t fields[kSzpBlock];
    U* out = static_cast<U*>(job.out);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t blocks = szp_blocks(count_mask(job.mask, chunk, job.n));
        const uint32_t* from = job.words + job.offsets[chunk];
        const uint8_t* widths = reinterpret_cast<const uint8_t*>(from);
        from += szp_header(blocks);
        for (int64_t block = 0; block < blocks; ++block) {
            const int planes = widths[block] & (kSzpSigned - 1), sign = widths[block] / kSzpSigned;
            from_planes(from, planes, sign != 0 ? from[planes] : 0, fields);
            from += planes + sign;
            U* const to = values + block * kSzpBlock;
            if (planes == bits)
                for (int64_t i = 0; i < kSzpBlock; ++i) to[i] = U(fields[i]);
            else decode_fields_of<F>(fields, job.step, to);
        }
        const U* value = values;
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
        int64_t i = chunk * kZvcChunk;
        for (; i + kWord <= last; i += kWord) value = expand<stream, U>(load_word(job.mask, i), value, out + i);
        if (i < last) {
            U rest[kWord];
            scalar::expand<false, U>(load_last_word(job.mask, i, last - i), value, rest);
            std::memcpy(out + i, rest, size_t(last - i) * sizeof(U));
        }
    }
}

void szp_read(const SzpDecodeJob& job, int64_t begin, int64_t end) {
    const auto run = [&](auto f) {
        if (kStreams && job.stream) {
            read_as<true, decltype(f)>(job, begin, end);
            fence();
        } else {
            read_as<false, decltype(f)>(job, begin, end);
        }
    };
    switch (job.type) {
        case Float::F32: return run(float());
        case Float::F16: return run(Half());
        default: return run(BFloat16());
    }
}
