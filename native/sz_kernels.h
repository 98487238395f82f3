// Prequantisation, Lorenzo prediction and interleaved range coding. Compiled once per instruction set by foreach_isa.h.
//
// Loops without a branch become vector code; what compilers make none of is written a second time in sz_avx512.h. No
// product is added to anything, so that none is fused and all variants round alike.

#include "dense.h"

// Elements to float, and back to the nearest one, ties to even; of NaN, which is never asked for, to something.
template <class F>
struct Element {
    using U = typename Dense<F>::U;
    static float widen(U x) { return float_of(Dense<F>::widen(x)); }
    static U narrow(float x) { return rounded<F>(bits_of(x)); }
};

template <>
struct Element<float> {
    using U = float;
    static float widen(U x) { return x; }
    static U narrow(float x) { return x; }
};

template <class Body>
inline auto with_element(Float type, Body body) {
    switch (type) {
        case Float::F16: return body(Element<Half>());
        case Float::BF16: return body(Element<BFloat16>());
        default: return body(Element<float>());
    }
}

inline void extremes(const void* x, Float type, int64_t begin, int64_t end, float* found) {
    with_element(type, [=](auto element) {
        using E = decltype(element);
        const typename E::U* from = static_cast<const typename E::U*>(x);
        constexpr float infinity = std::numeric_limits<float>::infinity();
        constexpr int lanes = 32;
        float low[lanes], high[lanes];
        for (int k = 0; k < lanes; ++k) low[k] = infinity, high[k] = -infinity;
        const auto look = [&](int64_t i, int k) {
            const float value = E::widen(from[i]);
            const bool finite = __builtin_fabsf(value) < infinity;
            const float smaller = finite ? value : infinity, larger = finite ? value : -infinity;
            low[k] = smaller < low[k] ? smaller : low[k];
            high[k] = larger > high[k] ? larger : high[k];
        };
        int64_t i = begin;
        for (; i + lanes <= end; i += lanes)
            for (int k = 0; k < lanes; ++k) look(i + k, k);
        for (; i < end; ++i) look(i, 0);
        for (int k = 1; k < lanes; ++k) {
            low[0] = std::min(low[0], low[k]);
            high[0] = std::max(high[0], high[k]);
        }
        found[0] = low[0];
        found[1] = high[0];
    });
}

// The code of an element, 0 for an outlier, and whether it is one.
template <class E>
inline int32_t quantise_one(const SzQuantiseJob& job, typename E::U x, bool& outlier) {
    constexpr double limit = 1 << 27;
    const double value = double(E::widen(x)), scaled = value * job.inverse - job.offset;
    const double code = __builtin_rint(__builtin_fabs(scaled) < limit ? scaled : 0.0);
    const double made = double(E::widen(E::narrow(float((code + job.offset) * job.step))));
    outlier = !(__builtin_fabs(value - made) <= job.bound);
    return outlier ? 0 : int32_t(code);
}

// Returns how many outliers there are.
template <class E>
__attribute__((noinline)) int64_t quantise(const SzQuantiseJob& given, int64_t begin, int64_t n,
                                           int32_t* __restrict codes, uint8_t* __restrict outliers) {
    const SzQuantiseJob job = given;
    const typename E::U* from = static_cast<const typename E::U*>(job.x) + begin;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        bool outlier;
        codes[i] = quantise_one<E>(job, from[i], outlier);
        outliers[i] = outlier;
        count += outlier;
    }
    return count;
}

// Subtracts from each of n integers the one `stride` before it in its block.
inline void difference(int32_t* codes, int64_t n, int64_t stride, int64_t block) {
    for (int64_t first = 0; first < n; first += block) {
        const int64_t end = std::min(n, first + block);
        if (stride == 1) {
            for (int64_t i = end - 1; i > first; --i) codes[i] -= codes[i - 1];
            continue;
        }
        for (int64_t at = first + (end - first - 1) / stride * stride; at > first; at -= stride) {
            int32_t* __restrict to = codes + at;
            const int32_t* __restrict from = codes + at - stride;
            const int64_t count = std::min(stride, end - at);
            for (int64_t i = 0; i < count; ++i) to[i] -= from[i];
        }
    }
}

// The inverse. Damaged codes may overflow, so these are unsigned.
inline void accumulate(uint32_t* codes, int64_t n, int64_t stride, int64_t block) {
    for (int64_t first = 0; first < n; first += block) {
        const int64_t end = std::min(n, first + block);
        if (stride == 1) {
            for (int64_t i = first + 1; i < end; ++i) codes[i] += codes[i - 1];
            continue;
        }
        for (int64_t at = first + stride; at < end; at += stride) {
            uint32_t* __restrict to = codes + at;
            const uint32_t* __restrict from = codes + at - stride;
            const int64_t count = std::min(stride, end - at);
            for (int64_t i = 0; i < count; ++i) to[i] += from[i];
        }
    }
}

inline void predict(int32_t* codes, int64_t n, int axes, const SzBlocks& blocks) {
    if (axes & 1) difference(codes, n, 1, blocks.row);
    if (axes & 2) difference(codes, n, blocks.row, blocks.plane);
    if (axes & 4) difference(codes, n, blocks.plane, blocks.tile);
}
inline void restore(int32_t* codes, int64_t n, int axes, const SzBlocks& blocks) {
    uint32_t* sums = reinterpret_cast<uint32_t*>(codes);
    if (axes & 1) accumulate(sums, n, 1, blocks.row);
    if (axes & 2) accumulate(sums, n, blocks.row, blocks.plane);
    if (axes & 4) accumulate(sums, n, blocks.plane, blocks.tile);
}

// Adds the symbols of x[start : start + count] to the counts, along all combinations of axes.
inline void survey(const SzQuantiseJob& job, const SzBlocks& blocks, int low, int64_t start, int64_t count,
                   int64_t* counts) {
    with_element(job.type, [&](auto element) {
        using E = decltype(element);
        int32_t codes[4][kSzRun + 1];  // from the one before the run on; of it, and of its neighbours on other rows
        uint8_t outliers[kSzRun + 1];
        const int64_t back[4] = {0, blocks.row, blocks.plane, blocks.row + blocks.plane};
        for (int k = 3; k >= 0; --k) {
            const int64_t first = start - 1 - back[k], missing = std::clamp<int64_t>(-first, 0, count + 1);
            for (int64_t i = 0; i < missing; ++i) codes[k][i] = 0;
            outliers[0] = 0;
            quantise<E>(job, first + missing, count + 1 - missing, codes[k] + missing, outliers + missing);
        }
        int32_t left[kSzRun], up[kSzRun], before[kSzRun];  // whether there is such a neighbour
        int64_t in_row = start % blocks.row, in_plane = start % blocks.plane, in_tile = start % blocks.tile;
        for (int64_t i = 0; i < count; ++i) {
            left[i] = in_row >= 1;
            up[i] = in_plane >= blocks.row;
            before[i] = in_tile >= blocks.plane;
            in_row = in_row + 1 == blocks.row ? 0 : in_row + 1;
            in_plane = in_plane + 1 == blocks.plane ? 0 : in_plane + 1;
            in_tile = in_tile + 1 == blocks.tile ? 0 : in_tile + 1;
        }
        int32_t symbols[6][kSzRun];  // along each of AXES in ops/sz.py
        const auto symbol_of = [low](int32_t code) {
            const uint32_t index = uint32_t((code >> low) + kSzWindow / 2);
            const int32_t other = index < uint32_t(kSzWindow) ? int32_t(index) + 2 : 1;
            return code == 0 ? 0 : other;
        };
        for (int64_t i = 0; i < count; ++i) {
            int32_t own[4], less[4];
            for (int k = 0; k < 4; ++k) {
                own[k] = codes[k][i + 1];
                less[k] = own[k] - left[i] * codes[k][i];
            }
            const int32_t y = own[0] - up[i] * own[1], xy = less[0] - up[i] * less[1];
            symbols[0][i] = symbol_of(own[0]);
            symbols[1][i] = symbol_of(less[0]);
            symbols[2][i] = symbol_of(xy);
            symbols[3][i] = symbol_of(xy - before[i] * (less[2] - up[i] * less[3]));
            symbols[4][i] = symbol_of(y);
            symbols[5][i] = symbol_of(y - before[i] * (own[2] - up[i] * own[3]));
        }
        for (int64_t i = 0; i < count; ++i)
            for (int k = 0; k < 6; ++k) {
                ++counts[k * kSzBins + symbols[k][i]];
                counts[k * kSzBins + kSzBins - 1] += outliers[i + 1];
            }
    });
}

// Codes of the first `count` lanes to words, which go to `to`; at most four for each lane, and one more is written over.
inline uint16_t* encode_step(const SzSymbols& symbols, const int32_t* codes, int count, uint32_t* states, uint16_t* to) {
    uint32_t entries[kSzLanes];
    bool plain[kSzLanes];  // neither 0 nor an escape
    for (int i = 0; i < count; ++i) {
        const uint32_t index = uint32_t((codes[i] >> symbols.low) - symbols.base);
        const bool inside = index < uint32_t(symbols.count - 2);
        const uint32_t entry = symbols.entries[codes[i] == 0 ? 0 : inside ? 2 + index : 1];
        entries[i] = entry ? entry : symbols.entries[1];
        plain[i] = codes[i] != 0 && inside && entry;
        if (!plain[i] && entries[i] == symbols.entries[1]) {  // no other symbol's slots begin where its do
            *to++ = uint16_t(codes[i]);
            *to++ = uint16_t(codes[i] >> 16);
        }
    }
    if (symbols.low) {
        const int low = symbols.low;
        for (int i = 0; i < count; ++i) {
            const bool full = plain[i] && states[i] >> (32 - low) != 0;
            *to = uint16_t(states[i]);
            to += full;
            const uint32_t state = full ? states[i] >> 16 : states[i];
            states[i] = plain[i] ? state << low | (uint32_t(codes[i]) & ((1u << low) - 1)) : state;
        }
    }
    for (int i = 0; i < count; ++i) {
        const uint32_t frequency = entries[i] >> 16, begin = entries[i] & 0xffff;
        const bool full = states[i] >> (32 - kSzPrecision) >= frequency;
        *to = uint16_t(states[i]);
        to += full;
        const uint32_t state = full ? states[i] >> 16 : states[i];
        states[i] = (state / frequency << kSzPrecision) + state % frequency + begin;
    }
    return to;
}

// The next words to those of the first `count` lanes that need one. Returns where what is left ends, null where there
// are too few. What is before `begin` is states, so that a word before `from` can always be read.
inline const uint16_t* refill(uint32_t* states, int count, const uint16_t* begin, const uint16_t* from) {
    int needed = 0;
    for (int i = 0; i < count; ++i) needed += states[i] < kSzLeast;
    if (from - begin < needed) return nullptr;
    for (int i = count - 1; i >= 0; --i) {
        const bool few = states[i] < kSzLeast;
        states[i] = few ? states[i] << 16 | from[-1] : states[i];
        from -= few;
    }
    return from;
}

// The inverse of encode_step. Returns where what is left of the words ends, null where there are too few.
inline const uint16_t* decode_step(const SzSymbols& symbols, int32_t* codes, int count, uint32_t* states,
                                   const uint16_t* begin, const uint16_t* from) {
    uint32_t slots[kSzLanes];
    for (int i = 0; i < count; ++i) {
        slots[i] = states[i] & (kSzTotal - 1);
        const uint32_t slot = symbols.slots[slots[i]];
        states[i] = ((slot & 0xfff) + 1) * (states[i] >> kSzPrecision) + (slot >> 12 & 0xfff);
        codes[i] = symbols.codes[slots[i]];
    }
    from = refill(states, count, begin, from);
    if (from == nullptr) return nullptr;
    if (symbols.low) {
        const uint32_t low_mask = (1u << symbols.low) - 1;
        for (int i = 0; i < count; ++i) {
            const bool plain = slots[i] >= symbols.escape_begin + symbols.escape_size;
            codes[i] |= plain ? int32_t(states[i] & low_mask) : 0;
            states[i] = plain ? states[i] >> symbols.low : states[i];
        }
        from = refill(states, count, begin, from);
        if (from == nullptr) return nullptr;
    }
    int escapes = 0;
    for (int i = 0; i < count; ++i) escapes += slots[i] - symbols.escape_begin < symbols.escape_size;
    if (escapes == 0) return from;
    if (from - begin < 2 * escapes) return nullptr;
    for (int i = count - 1; i >= 0; --i) {
        if (slots[i] - symbols.escape_begin >= symbols.escape_size) continue;
        from -= 2;
        codes[i] = int32_t(uint32_t(from[0]) | uint32_t(from[1]) << 16);
    }
    return from;
}

#if defined(BS_AVX512)
#include "sz_avx512.h"
#else
// Steps of all lanes, from the last one to the first. Returns null once there are more than `limit` words.
inline uint16_t* encode_steps(const SzSymbols& symbols, const int32_t* codes, int64_t steps, uint32_t* states,
                              uint16_t* to, const uint16_t* limit) {
    for (int64_t step = steps - 1; step >= 0 && to <= limit; --step)
        to = encode_step(symbols, codes + step * kSzLanes, kSzLanes, states, to);
    return to <= limit ? to : nullptr;
}
inline const uint16_t* decode_steps(const SzSymbols& symbols, int32_t* codes, int64_t steps, uint32_t* states,
                                    const uint16_t* begin, const uint16_t* from) {
    for (int64_t step = 0; step < steps && from != nullptr; ++step)
        from = decode_step(symbols, codes + step * kSzLanes, kSzLanes, states, begin, from);
    return from;
}
#endif

// The words of n codes. Returns their number, -1 where there are more than `most`.
inline int64_t encode_words(const SzSymbols& symbols, const int32_t* codes, int64_t n, uint16_t* words, int64_t most) {
    uint32_t states[kSzLanes];
    for (uint32_t& state : states) state = kSzLeast;
    const int64_t steps = n / kSzLanes;
    uint16_t* to = encode_step(symbols, codes + steps * kSzLanes, int(n % kSzLanes), states, words + kSzStates);
    to = encode_steps(symbols, codes, steps, states, to, words + std::max(most, kSzStates + 4 * kSzLanes));
    if (to == nullptr || to - words > most) return -1;
    std::memcpy(words, states, sizeof states);
    return to - words;
}

inline bool decode_words(const SzSymbols& symbols, int32_t* codes, int64_t n, const uint16_t* words, int64_t count) {
    uint32_t states[kSzLanes];
    std::memcpy(states, words, sizeof states);
    const int64_t steps = n / kSzLanes;
    const uint16_t* begin = words + kSzStates;
    const uint16_t* from = decode_steps(symbols, codes, steps, states, begin, words + count);
    if (from == nullptr) return false;
    from = decode_step(symbols, codes + steps * kSzLanes, int(n % kSzLanes), states, begin, from);
    bool right = from == begin;
    for (const uint32_t state : states) right &= state == kSzLeast;
    return right;
}

inline bool encode_chunk(const SzEncodeJob& job, int64_t chunk, SzScratch& scratch, SzPiece& piece) {
    return with_element(job.quantise.type, [&](auto element) {
        using E = decltype(element);
        using U = typename E::U;
        const int64_t begin = chunk * job.blocks.chunk, n = std::min(job.blocks.chunk, job.n - begin);
        const U* x = static_cast<const U*>(job.quantise.x) + begin;
        const int64_t outliers = quantise<E>(job.quantise, begin, n, scratch.codes, scratch.outliers);
        predict(scratch.codes, n, job.axes, job.blocks);
        // As many bytes as the elements have are too many.
        const int64_t most = (n * int64_t(sizeof(U)) - outliers * int64_t(2 + sizeof(U)) - 1) / 2;
        const int64_t words = most < kSzStates ? -1 : encode_words(*job.symbols, scratch.codes, n, scratch.words, most);
        const bool dense = words < 0;
        piece.count = dense ? 0 : words;
        piece.places = dense ? 0 : outliers;
        piece.values = dense ? n : outliers;
        const size_t bytes = size_t(piece.count + piece.places) * 2 + size_t(piece.values) * sizeof(U);
        piece.words = static_cast<uint16_t*>(std::malloc(bytes));
        if (piece.words == nullptr) return false;
        char* values = reinterpret_cast<char*>(piece.words + piece.count + piece.places);
        if (dense) {
            std::memcpy(values, x, size_t(n) * sizeof(U));
            return true;
        }
        std::memcpy(piece.words, scratch.words, size_t(words) * 2);
        uint16_t* place = piece.words + words;
        for (int64_t i = 0, left = outliers; left > 0; ++i) {
            if (!scratch.outliers[i]) continue;
            *place++ = uint16_t(i);
            std::memcpy(values, x + i, sizeof(U));
            values += sizeof(U);
            --left;
        }
        return true;
    });
}

inline uint64_t weigh_words(const uint16_t* words, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += uint64_t(words[i]) * uint32_t(2 * i + 1);
    return sum;
}

// Whether a chunk's parts are inside their planes, its places inside it, and its checksum is right.
inline bool intact(const SzDecodeJob& job, int64_t chunk, const int64_t* sizes) {
    SzSpan span;
    if (!span_of(job.index, chunk, job.blocks, job.n, sizes, span)) return false;
    const int64_t width = float_width(job.type), places = span.end[1] - span.begin[1];
    const uint16_t* place = job.places + span.begin[1];
    bool inside = true;
    for (int64_t i = 0; i < places; ++i) inside &= place[i] < span.elements;
    const char* values = static_cast<const char*>(job.values) + span.begin[2] * width;
    const uint64_t sum = check_of(
        chunk, weigh_words(job.stream + span.begin[0], span.end[0] - span.begin[0]), weigh_words(place, places),
        weigh_words(reinterpret_cast<const uint16_t*>(values), (span.end[2] - span.begin[2]) * width / 2));
    return inside && sum == uint64_t(job.index[4 + 4 * chunk]);
}

template <class E>
__attribute__((noinline)) void dequantise(const int32_t* __restrict codes, int64_t n, double step, double offset,
                                          typename E::U* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = E::narrow(float((double(codes[i]) + offset) * step));
}

inline bool decode_chunk(const SzDecodeJob& job, int64_t chunk, const int64_t* sizes, SzScratch& scratch) {
    return with_element(job.type, [&](auto element) {
        using E = decltype(element);
        using U = typename E::U;
        SzSpan span;
        if (!span_of(job.index, chunk, job.blocks, job.n, sizes, span)) return false;
        U* out = static_cast<U*>(job.out) + chunk * job.blocks.chunk;
        const U* values = static_cast<const U*>(job.values) + span.begin[2];
        if (span.dense) {
            std::memcpy(out, values, size_t(span.elements) * sizeof(U));
            return true;
        }
        if (!decode_words(*job.symbols, scratch.codes, span.elements, job.stream + span.begin[0],
                          span.end[0] - span.begin[0]))
            return false;
        restore(scratch.codes, span.elements, job.axes, job.blocks);
        dequantise<E>(scratch.codes, span.elements, job.step, job.offset, out);
        const uint16_t* places = job.places + span.begin[1];
        for (int64_t i = 0; i < span.end[1] - span.begin[1]; ++i)
            if (places[i] < span.elements) out[places[i]] = values[i];
        return true;
    });
}
