// Integers of few bits between each group's extremes. Compiled once per instruction set by foreach_isa.h.

#include "dense.h"
#include "fields.h"
#include "turn.h"

struct Range {
    float low, high;  // of what is finite
    int64_t strange;  // elements that are not
};

template <class F>
__attribute__((noinline)) Range range_of(const typename Dense<F>::U* x, int64_t n) {
    constexpr int32_t infinity = int32_t(kInfinity), minus = ~infinity;
    int32_t low = infinity, high = minus, strange = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = int32_t(Dense<F>::widen(x[i])), key = ordered(bits);
        const int32_t other = -int32_t((bits & int32_t(kMagnitude)) >= infinity);  // no condition: GCC would jump
        low = std::min(low, (key & ~other) | (infinity & other));
        high = std::max(high, (key & ~other) | (minus & other));
        strange -= other;
    }
    if (strange == n) return {0.0f, 0.0f, strange};
    // -0.0 becomes 0.0
    return {float_of(uint32_t(ordered(low))) + 0.0f, float_of(uint32_t(ordered(high))) + 0.0f, strange};
}

inline uint32_t mixed(uint32_t word) {
    word = (word ^ word >> 16) * 0x7feb352d;
    word = (word ^ word >> 15) * 0x846ca68b;
    return word ^ word >> 16;
}

// What random numbers of a group are made of.
struct Keys {
    uint32_t index, first, second;
};

template <class F, bool stochastic>
__attribute__((noinline)) void quantise(const typename Dense<F>::U* __restrict x, int64_t n, float low, float span,
                                        float levels, Keys keys, uint8_t* __restrict codes) {
    for (int64_t i = 0; i < n; ++i) {
        float steps = (float_of(Dense<F>::widen(x[i])) - low) / span * levels;
        if (stochastic) {
            uint32_t word = (keys.index + uint32_t(i)) ^ keys.first;
            word = (word ^ word >> 16) * 0x7feb352d;
            word = ((word ^ word >> 15) ^ keys.second) * 0x846ca68b;
            word ^= word >> 16;
            steps += float(int32_t(word >> 8)) * 0x1p-24f;
        } else {
            steps += 0.5f;
        }
        codes[i] = uint8_t(int32_t(steps < levels ? steps : levels));
    }
}

template <class F>
inline int64_t encode_groups_as(const BlockQuantJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    const U* x = static_cast<const U*>(job.dense);
    const float levels = float((1 << job.bits) - 1);
    int64_t refused = 0;
    uint8_t codes[kGroupMost];
    for (int64_t i = begin; i < end; i += job.group_size) {
        const int64_t count = std::min(job.group_size, end - i);
        prefetch_ahead(x + i, count);
        const Range range = range_of<F>(x + i, count);
        const float span = range.high - range.low;
        const bool endless = (bits_of(span) & kMagnitude) >= kInfinity;
        refused += range.strange + endless;
        U* const ranges = static_cast<U*>(job.ranges) + i / job.group_size * 2;
        ranges[0] = Dense<F>::narrow(bits_of(range.low));
        ranges[1] = Dense<F>::narrow(bits_of(range.high));
        if (range.strange != 0 || endless) {
            std::memset(codes, 0, size_t(count));
        } else {
            const float divisor = span > 0.0f ? span : 1.0f;
            const uint32_t first = mixed(bits_of(range.low) ^ job.seed), second = mixed(first ^ bits_of(range.high));
            const Keys keys{uint32_t(i), first, second + uint32_t(uint64_t(i) >> 32)};
            if (job.stochastic) quantise<F, true>(x + i, count, range.low, divisor, levels, keys, codes);
            else quantise<F, false>(x + i, count, range.low, divisor, levels, keys, codes);
        }
        encode_fields(codes, count, job.bits, 0, job.codes + i * job.bits / 8);
    }
    return refused;
}

int64_t encode_groups(const BlockQuantJob& job, int64_t begin, int64_t end) {
    switch (job.type) {
        case Float::F32: return encode_groups_as<float>(job, begin, end);
        case Float::F16: return encode_groups_as<Half>(job, begin, end);
        default: return encode_groups_as<BFloat16>(job, begin, end);
    }
}

// What each of `count` codes stands for. (Arithmetic is faster than a table of the levels, of 16 too.)
template <class F>
__attribute__((noinline)) void levels_of(const uint8_t* __restrict codes, int64_t count, float low, float span,
                                         float unit, typename Dense<F>::U* __restrict values) {
    for (int64_t i = 0; i < count; ++i) {
        const float share = float(int32_t(codes[i])) * unit;
        values[i] = rounded<F>(bits_of(share * span + low));
    }
}

template <bool stream, class F>
inline void decode_groups_as(const BlockQuantJob& job, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    constexpr int64_t line = 64 / sizeof(U);
    const float unit = float(1.0 / double((1 << job.bits) - 1));
    uint8_t codes[kGroupMost];
    alignas(64) U values[kGroupMost];
    for (int64_t i = begin; i < end; i += job.group_size) {
        const int64_t count = std::min(job.group_size, end - i);
        decode_fields(job.codes + i * job.bits / 8, count, job.bits, 0, codes);
        const U* const ranges = static_cast<const U*>(job.ranges) + i / job.group_size * 2;
        const float low = float_of(Dense<F>::widen(ranges[0])), span = float_of(Dense<F>::widen(ranges[1])) - low;
        U* const out = static_cast<U*>(job.dense) + i;
        U* const to = stream ? values : out;
        levels_of<F>(codes, count, low, span, unit, to);
        if (!stream) continue;
        int64_t k = 0;
        for (; k + line <= count; k += line) copy_line<stream>(values + k, out + k);
        std::memcpy(out + k, values + k, size_t(count - k) * sizeof(U));
    }
}

void decode_groups(const BlockQuantJob& job, int64_t begin, int64_t end) {
    const auto run = [&](auto f) {
        if (kStreams && job.stream) {
            decode_groups_as<true, decltype(f)>(job, begin, end);
            fence();
        } else {
            decode_groups_as<false, decltype(f)>(job, begin, end);
        }
    };
    switch (job.type) {
        case Float::F32: return run(float());
        case Float::F16: return run(Half());
        default: return run(BFloat16());
    }
}

// The codes of one group, a byte each with zeros behind the last, and its extremes. A group that holds something that is
// not finite, or whose range is not, gets NaN for both.
template <class F>
inline void encode_group(const BlockQuantRows& rows, int64_t group, const typename Dense<F>::U* x, uint8_t* codes) {
    using U = typename Dense<F>::U;
    const BlockQuantJob& job = rows.job;
    const int64_t begin = group * job.group_size, count = std::min(job.group_size, rows.n - begin);
    prefetch_ahead(x, count);
    const Range range = range_of<F>(x, count);
    const float span = range.high - range.low;
    const bool broken = range.strange != 0 || (bits_of(span) & kMagnitude) >= kInfinity;
    static_cast<U*>(rows.low)[group] = Dense<F>::narrow(broken ? kQuiet : bits_of(range.low));
    static_cast<U*>(rows.high)[group] = Dense<F>::narrow(broken ? kQuiet : bits_of(range.high));
    if (broken) {
        std::memset(codes, 0, size_t(job.group_size));
        return;
    }
    const float levels = float((1 << job.bits) - 1), divisor = span > 0.0f ? span : 1.0f;
    const uint32_t first = mixed(bits_of(range.low) ^ job.seed), second = mixed(first ^ bits_of(range.high));
    const Keys keys{uint32_t(begin), first, second + uint32_t(uint64_t(begin) >> 32)};
    if (job.stochastic) quantise<F, true>(x, count, range.low, divisor, levels, keys, codes);
    else quantise<F, false>(x, count, range.low, divisor, levels, keys, codes);
    std::memset(codes + count, 0, size_t(job.group_size - count));
}

__attribute__((noinline)) void put_field(const uint8_t* __restrict codes, int64_t n, int shift,
                                         uint8_t* __restrict packed) {
    if (shift == 0) {
        std::memcpy(packed, codes, size_t(n));
        return;
    }
    for (int64_t i = 0; i < n; ++i) packed[i] = uint8_t(packed[i] | codes[i] << shift);
}

// Puts the codes of one group, whose first field clears its bytes, where they belong.
template <class F>
inline void put_group(const BlockQuantRows& rows, int64_t group, const typename Dense<F>::U* x) {
    const BlockQuantJob& job = rows.job;
    uint8_t codes[kGroupMost];
    encode_group<F>(rows, group, x, codes);
    if (rows.across) {
        const int64_t field = group / rows.byte_rows, row = group % rows.byte_rows;
        put_field(codes, rows.byte_columns, int(field) * job.bits, job.codes + row * rows.byte_columns);
        return;
    }
    for (int field = 0; field < 8 / job.bits; ++field) {
        uint8_t* const packed = job.codes + group * rows.byte_columns;
        put_field(codes + field * rows.byte_columns, rows.byte_columns, field * job.bits, packed);
    }
}

template <class F>
inline void encode_rows_as(const BlockQuantRows& rows, int64_t begin, int64_t end) {
    const BlockQuantJob& job = rows.job;
    const auto* x = static_cast<const typename Dense<F>::U*>(job.dense);
    for (int64_t row = begin; row < end; ++row) {
        if (!rows.across) put_group<F>(rows, row, x + row * job.group_size);
        for (int field = 0; rows.across && field < 8 / job.bits; ++field) {
            const int64_t group = row + field * rows.byte_rows;
            put_group<F>(rows, group, x + group * job.group_size);
        }
    }
}

// Images in channels last, `begin` to `end`, each with those whose codes share its bytes. An image is turned into
// channels of positions in memory of the thread's own; a group does not reach from one image into the next.
template <class F>
inline void encode_images_as(const BlockQuantRows& rows, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    const BlockQuantJob& job = rows.job;
    const int64_t size = rows.channels * rows.area, groups = size / job.group_size;
    const int64_t apart = rows.byte_rows / groups;  // images from one field to the next
    std::vector<U> turned(static_cast<size_t>(size));
    for (int64_t first = begin; first < end; ++first) {
        for (int field = 0; field < (rows.across ? 8 / job.bits : 1); ++field) {
            const int64_t image = first + field * apart;
            const U* const image_data = static_cast<const U*>(job.dense) + image * size;
            turn(image_data, rows.channels, rows.area, rows.channels, turned.data(), rows.area);
            for (int64_t group = 0; group < groups; ++group)
                put_group<F>(rows, image * groups + group, turned.data() + group * job.group_size);
        }
    }
}

void encode_images(const BlockQuantRows& rows, int64_t begin, int64_t end) {
    switch (rows.job.type) {
        case Float::F32: return encode_images_as<float>(rows, begin, end);
        case Float::F16: return encode_images_as<Half>(rows, begin, end);
        default: return encode_images_as<BFloat16>(rows, begin, end);
    }
}

void encode_rows(const BlockQuantRows& rows, int64_t begin, int64_t end) {
    switch (rows.job.type) {
        case Float::F32: return encode_rows_as<float>(rows, begin, end);
        case Float::F16: return encode_rows_as<Half>(rows, begin, end);
        default: return encode_rows_as<BFloat16>(rows, begin, end);
    }
}

// What the fields of `count` bytes stand for.
template <class F>
__attribute__((noinline)) void levels_of_fields(const uint8_t* __restrict packed, int64_t count, int shift, int most,
                                                float low, float span, float unit,
                                                typename Dense<F>::U* __restrict values) {
    for (int64_t i = 0; i < count; ++i) {
        const float share = float((int32_t(packed[i]) >> shift) & most) * unit;
        values[i] = rounded<F>(bits_of(share * span + low));
    }
}

// The elements [begin, end), in order.
template <class F>
inline void decode_span(const BlockQuantRows& rows, int64_t begin, int64_t end, typename Dense<F>::U* values) {
    using U = typename Dense<F>::U;
    const BlockQuantJob& job = rows.job;
    const int most = (1 << job.bits) - 1;
    const float unit = float(1.0 / double(most));
    while (begin < end) {
        const int64_t group = begin / job.group_size, at = begin - group * job.group_size;
        const int64_t row = rows.across ? group % rows.byte_rows : group, column = at % rows.byte_columns;
        const int64_t field = rows.across ? group / rows.byte_rows : at / rows.byte_columns;
        const int64_t count = std::min(end - begin, rows.byte_columns - column);
        const float low = float_of(Dense<F>::widen(static_cast<const U*>(rows.low)[group]));
        const float span = float_of(Dense<F>::widen(static_cast<const U*>(rows.high)[group])) - low;
        const uint8_t* packed = job.codes + row * rows.byte_columns + column;
        levels_of_fields<F>(packed, count, int(field) * job.bits, most, low, span, unit, values);
        values += count;
        begin += count;
    }
}

void decode_rows(const BlockQuantRows& rows, int64_t begin, int64_t end) {
    const auto run = [&](auto f) {
        using F = decltype(f);
        decode_span<F>(rows, begin, end, static_cast<typename Dense<F>::U*>(rows.job.dense) + begin);
    };
    switch (rows.job.type) {
        case Float::F32: return run(float());
        case Float::F16: return run(Half());
        default: return run(BFloat16());
    }
}

template <class F>
inline void decode_pixels_as(const BlockQuantRows& rows, int64_t begin, int64_t end) {
    using U = typename Dense<F>::U;
    const auto decode = [&](int64_t from, int64_t to, U* values) { decode_span<F>(rows, from, to, values); };
    turn_spans(decode, rows.channels, rows.area, begin, end, static_cast<U*>(rows.job.dense));
}

void decode_pixels(const BlockQuantRows& rows, int64_t begin, int64_t end) {
    switch (rows.job.type) {
        case Float::F32: return decode_pixels_as<float>(rows, begin, end);
        case Float::F16: return decode_pixels_as<Half>(rows, begin, end);
        default: return decode_pixels_as<BFloat16>(rows, begin, end);
    }
}
