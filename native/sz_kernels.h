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
    constexpr double limit = 1 << kSzCodeBits;
    const double value = double(E::widen(x)), scaled = value * job.inverse - job.offset;
    const double code = __builtin_rint(__builtin_fabs(scaled) < limit ? scaled : 0.0);
    const double made = double(E::widen(E::narrow(float((code + job.offset) * job.step))));
    outlier = !(__builtin_fabs(value - made) <= job.bound);
    return outlier ? 0 : int32_t(code);
}

// A chunk's coder on its way. The states are read and written back, and so is where the words end.
struct SzEncoding {
    const int32_t* codes;
    uint32_t* states;
    uint16_t* to;
    const uint16_t* limit;  // no step begins behind it
};

struct SzDecoding {
    int32_t* codes;
    float* out;  // what the codes mean is written here, and no codes, where `direct`
    uint32_t* states;
    const uint16_t* begin;
    const uint16_t* from;
};

#if defined(BS_AVX512)
#include "sz_avx512.h"
#include "sz_rows_avx512.h"
constexpr bool kSzWide = true;  // numbers are quantised and dequantised in registers, and several chunks coded in turns
#else
constexpr bool kSzWide = false;
#endif

// Returns how many outliers there are.
template <class E>
__attribute__((noinline)) int64_t quantise(const SzQuantiseJob& given, int64_t begin, int64_t n,
                                           int32_t* __restrict codes, uint8_t* __restrict outliers) {
    const SzQuantiseJob job = given;
    const typename E::U* from = static_cast<const typename E::U*>(job.x) + begin;
    int64_t count = 0, first = 0;
#if defined(BS_AVX512)
    if constexpr (std::is_same_v<E, Element<float>>) {
        const SzGrid grid(job);
        for (; first + 16 <= n; first += 16) {
            __mmask16 marks = 0;
            __m512i found;
            const __m512 values = _mm512_loadu_ps(from + first);
            if (!grid.easy || __builtin_expect(!easily_quantised(grid, values, found), 0))
                found = quantised(grid, values, marks);
            _mm512_storeu_si512(codes + first, found);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(outliers + first), _mm_maskz_set1_epi8(marks, 1));
            count += __builtin_popcount(marks);
        }
    }
#endif
    for (int64_t i = first; i < n; ++i) {
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
        int32_t symbols[6][kSzRun];  // along each of AXES in codecs/sz/coding.py
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
    uint32_t chosen[kSzLanes];
    const int low = symbols.low;
    for (int i = 0; i < count; ++i) {
        const uint32_t index = uint32_t((codes[i] >> low) + kSzWindow / 2);
        const uint32_t other = index < uint32_t(kSzWindow) ? symbols.of_code[index] : 1;
        chosen[i] = codes[i] != 0 ? other : symbols.entries[0] == symbols.entries[1] ? 1 : 0;
        if (chosen[i] == 1) {
            *to++ = uint16_t(codes[i]);
            *to++ = uint16_t(codes[i] >> 16);
        }
    }
    if (low) {
        for (int i = 0; i < count; ++i) {
            const bool full = chosen[i] >= 2 && states[i] >> (kSzStateBits - low) != 0;
            *to = uint16_t(states[i]);
            to += full;
            const uint32_t state = full ? states[i] >> 16 : states[i];
            states[i] = chosen[i] >= 2 ? state << low | (uint32_t(codes[i]) & ((1u << low) - 1)) : state;
        }
    }
    for (int i = 0; i < count; ++i) {
        const uint32_t entry = symbols.entries[chosen[i]], frequency = (entry >> 24) + 1, width = entry >> 16 & 7;
        const bool full = states[i] >= frequency << (kSzStateBits - kSzPrecision - width);
        *to = uint16_t(states[i]);
        to += full;
        const uint32_t state = full ? states[i] >> 16 : states[i];
        const uint32_t quotient = uint32_t(uint64_t(state) * symbols.reciprocals[chosen[i]] >> 32) >> (entry >> 20 & 15);
        const uint32_t place = uint32_t(chosen[i] >= 2 ? codes[i] >> low : 0) & ((1u << width) - 1);
        states[i] = (quotient << (kSzPrecision + width)) + (place << kSzPrecision) + (state - quotient * frequency) +
                    (entry & 0xffff);
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
    uint32_t chosen[kSzLanes];
    const int low = symbols.low;
    int escapes = 0;
    for (int i = 0; i < count; ++i) {
        const uint32_t slot = states[i] & (kSzTotal - 1), above = states[i] >> kSzPrecision;
        chosen[i] = symbols.of_slot[slot];
        const uint32_t entry = symbols.decoding[chosen[i]], width = entry >> 16 & 7;
        states[i] = ((entry & 0xff) + 1) * (above >> width) + slot - (entry >> 8 & 0xff);
        codes[i] = int32_t(uint32_t((int32_t(entry) >> 20) + int32_t(above & ((1u << width) - 1))) << low);
        codes[i] = chosen[i] >= 2 ? codes[i] : 0;
        escapes += chosen[i] == 1;
    }
    from = refill(states, count, begin, from);
    if (from == nullptr) return nullptr;
    if (low) {
        for (int i = 0; i < count; ++i) {
            codes[i] |= chosen[i] >= 2 ? int32_t(states[i] & ((1u << low) - 1)) : 0;
            states[i] = chosen[i] >= 2 ? states[i] >> low : states[i];
        }
        from = refill(states, count, begin, from);
        if (from == nullptr) return nullptr;
    }
    if (escapes == 0) return from;
    if (from - begin < 2 * escapes) return nullptr;
    for (int i = count - 1; i >= 0; --i) {
        if (chosen[i] != 1) continue;
        from -= 2;
        codes[i] = int32_t(uint32_t(from[0]) | uint32_t(from[1]) << 16);
    }
    return from;
}

#if !defined(BS_AVX512)
// Steps of all lanes, from the last one to the first. Returns false once there are more words than fit.
template <int chunks>
inline bool encode_steps(const SzSymbols& symbols, int64_t steps, SzEncoding* given) {
    for (int c = 0; c < chunks; ++c) {
        SzEncoding& one = given[c];
        for (int64_t step = steps - 1; step >= 0 && one.to <= one.limit; --step)
            one.to = encode_step(symbols, one.codes + step * kSzLanes, kSzLanes, one.states, one.to);
        if (one.to > one.limit) return false;
    }
    return true;
}
// The inverse. Returns false where there are too few words.
template <bool direct, int chunks>
inline bool decode_steps(const SzSymbols& symbols, int64_t steps, SzDecoding* given, double, double) {
    static_assert(!direct, "numbers are written in another pass");
    for (int c = 0; c < chunks; ++c) {
        SzDecoding& one = given[c];
        for (int64_t step = 0; step < steps && one.from != nullptr; ++step)
            one.from = decode_step(symbols, one.codes + step * kSzLanes, kSzLanes, one.states, one.begin, one.from);
        if (one.from == nullptr) return false;
    }
    return true;
}
#endif

// The codes of n elements with their neighbours subtracted. Returns how many outliers there are.
template <class E>
inline int64_t predicted(const SzEncodeJob& job, int64_t begin, int64_t n, SzScratch& scratch) {
#if defined(BS_AVX512)
    if (std::is_same_v<E, Element<float>> && goes_by_rows(job.axes, job.blocks)) {
        std::memset(scratch.outliers, 0, size_t(n));
        const int64_t outliers = quantise_rows(job.quantise, begin, n, job.axes, job.blocks, scratch.codes,
                                               scratch.outliers, scratch.above);
        predict(scratch.codes, n, job.axes & 4, job.blocks);
        return outliers;
    }
#endif
    const int64_t outliers = quantise<E>(job.quantise, begin, n, scratch.codes, scratch.outliers);
    predict(scratch.codes, n, job.axes, job.blocks);
    return outliers;
}

// As many bytes as n elements have, in words, are too many beside the outliers.
inline int64_t most_words(int64_t n, int64_t width, int64_t outliers) {
    return (n * width - outliers * (2 + width) - 1) / 2;
}

// What chunks, each of n elements, take as words, to `words`; -1 where that is too many. Without prediction a few
// elements at a time become codes and then words, so that their codes are in the first-level cache when they are asked
// for. Words are made from the end on, against the direction in which the processor would fetch elements by itself.
template <class E, int chunks>
inline void encode_words(const SzEncodeJob& job, int64_t begin, int64_t n, SzScratch* scratch, int64_t* outliers,
                         int64_t* words) {
    constexpr int64_t at_once = 32 * kSzLanes, width = sizeof(typename E::U);
    const bool predicts = job.axes != 0;
    const int64_t steps = n / kSzLanes, tail = steps * kSzLanes;
    uint32_t states[chunks][kSzLanes];
    SzEncoding given[chunks];
    for (int c = 0; c < chunks; ++c) {
        for (uint32_t& state : states[c]) state = kSzLeast;
        int32_t* codes = scratch[c].codes;
        const int64_t from = predicts ? 0 : tail;
        outliers[c] = predicts ? predicted<E>(job, begin + c * n, n, scratch[c])
                               : quantise<E>(job.quantise, begin + c * n + from, n - from, codes, scratch[c].outliers + from);
        uint16_t* to = scratch[c].words + kSzStates;
        to = encode_step(*job.symbols, codes + tail - from, int(n - tail), states[c], to);
        const int64_t most = std::max(most_words(n, width, outliers[c]), kSzStates + 4 * kSzLanes);
        given[c] = {codes, states[c], to, scratch[c].words + most};
    }
    bool fit = predicts ? encode_steps<chunks>(*job.symbols, steps, given) : true;
    for (int64_t end = tail; !predicts && fit && end > 0;) {
        const int64_t first = std::max<int64_t>(end - at_once, 0);
        for (int c = 0; c < chunks; ++c)
            outliers[c] += quantise<E>(job.quantise, begin + c * n + first, end - first, scratch[c].codes,
                                       scratch[c].outliers + first);
        for (int c = 0; c < chunks; ++c) {
            const char* before = static_cast<const char*>(job.quantise.x) + (begin + c * n + first) * width;
            const int64_t next = std::min(at_once, first) * width;
            for (int64_t line = 64; line <= next; line += 64) __builtin_prefetch(before - line);
        }
        fit = encode_steps<chunks>(*job.symbols, (end - first) / kSzLanes, given);
        end = first;
    }
    if constexpr (chunks > 1) {
        for (int c = 0; c < chunks && !fit; ++c)
            encode_words<E, 1>(job, begin + c * n, n, scratch + c, outliers + c, words + c);
        if (!fit) return;
    }
    for (int c = 0; c < chunks; ++c) {
        words[c] = given[c].to - scratch[c].words;
        if (!fit || words[c] > most_words(n, width, outliers[c])) words[c] = -1;
        else std::memcpy(scratch[c].words, states[c], sizeof states[c]);
    }
}

// Where a chunk's words are.
struct SzWords {
    const uint16_t* words;
    int64_t count;
};

// The codes of chunks, each of n elements; where `direct`, what they mean, to `out`. `ready(c, count)` is told how many
// codes of a chunk there are, while the last ones are in the first-level cache.
template <bool direct, int chunks, class Ready>
inline bool decode_words(const SzSymbols& symbols, SzScratch* scratch, float* const* out, int64_t n,
                         const SzWords* words, double step, double offset, Ready ready) {
    constexpr int64_t at_once = 128 / chunks;
    uint32_t states[chunks][kSzLanes];
    SzDecoding given[chunks];
    const int64_t steps = n / kSzLanes, tail = steps * kSzLanes;
    for (int c = 0; c < chunks; ++c) {
        std::memcpy(states[c], words[c].words, sizeof states[c]);
        given[c] = {scratch[c].codes, out[c], states[c], words[c].words + kSzStates, words[c].words + words[c].count};
    }
    for (int64_t done = 0; done < steps;) {
        const int64_t part = std::min(at_once, steps - done);
        if (!decode_steps<direct, chunks>(symbols, part, given, step, offset)) return false;
        done += part;
        for (int c = 0; c < chunks; ++c) {
            given[c].codes += part * kSzLanes;
            given[c].out += direct ? part * kSzLanes : 0;
            ready(c, done * kSzLanes);
        }
    }
    bool right = true;
    for (int c = 0; c < chunks; ++c) {
        int32_t* codes = scratch[c].codes + tail;
        const uint16_t* from = decode_step(symbols, codes, int(n - tail), states[c], given[c].begin, given[c].from);
        right &= from == given[c].begin;
        for (const uint32_t state : states[c]) right &= state == kSzLeast;
        for (int64_t i = 0; direct && i < n - tail; ++i) out[c][tail + i] = float((double(codes[i]) + offset) * step);
        ready(c, n);
    }
    return right;
}

// Puts what a chunk has become into memory of its own. False where there is none.
template <class U>
inline bool keep_piece(const SzScratch& scratch, const U* x, int64_t n, int64_t words, int64_t outliers,
                       SzPiece& piece) {
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
}

// Encodes so many chunks of equal length, from `chunk` on.
template <class E, int chunks>
inline bool encode_as(const SzEncodeJob& job, int64_t chunk, SzScratch* scratch, SzPiece* pieces) {
    using U = typename E::U;
    const int64_t begin = chunk * job.blocks.chunk, n = std::min(job.blocks.chunk, job.n - begin);
    int64_t outliers[chunks], words[chunks];
    encode_words<E, chunks>(job, begin, n, scratch, outliers, words);
    bool kept = true;
    for (int c = 0; c < chunks; ++c) {
        const U* x = static_cast<const U*>(job.quantise.x) + begin + c * n;
        kept &= keep_piece(scratch[c], x, n, words[c], outliers[c], pieces[c]);
    }
    return kept;
}

// Encodes chunks [begin, end), in `scratch`.
inline bool encode_chunks(const SzEncodeJob& job, int64_t begin, int64_t end, SzScratch* scratch, SzPiece* pieces) {
    return with_element(job.quantise.type, [&](auto element) {
        using E = decltype(element);
        bool kept = true;
        for (int64_t chunk = begin; chunk < end && kept;) {
            const bool pair = kSzWide && (chunk + 2) * job.blocks.chunk <= job.n && chunk + 2 <= end;
            if (pair) kept = encode_as<E, 2>(job, chunk, scratch, pieces + chunk);
            else kept = encode_as<E, 1>(job, chunk, scratch, pieces + chunk);
            chunk += 1 + pair;
        }
        return kept;
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

// Decodes so many chunks of equal length, none of which is dense.
template <class E, int chunks>
inline bool decode_as(const SzDecodeJob& job, const SzSpan* spans, typename E::U* out, SzScratch* scratch) {
    using U = typename E::U;
    const int64_t n = spans[0].elements;
    SzWords words[chunks];
    float* floats[chunks] = {};
    for (int c = 0; c < chunks; ++c)
        words[c] = {job.stream + spans[c].begin[0], spans[c].end[0] - spans[c].begin[0]};
    const auto nothing = [](int, int64_t) {};
    bool written = false, decoded = false;
#if defined(BS_AVX512)
    if constexpr (std::is_same_v<U, float>) {
        for (int c = 0; c < chunks; ++c) floats[c] = out + c * n;
        if (job.axes == 0) {
            written = true;
            decoded = decode_words<true, chunks>(*job.symbols, scratch, floats, n, words, job.step, job.offset, nothing);
        } else if (job.axes < 4 && goes_by_rows(job.axes, job.blocks)) {
            written = true;
            int64_t rows[chunks] = {};
            const auto restored = [&](int c, int64_t ready) {
                rows[c] = restore_rows(scratch[c].codes, rows[c], ready, n, job.axes, job.blocks, job.step, job.offset,
                                       scratch[c].above, floats[c]);
            };
            decoded = decode_words<false, chunks>(*job.symbols, scratch, floats, n, words, job.step, job.offset, restored);
        }
    }
#endif
    if (!written)
        decoded = decode_words<false, chunks>(*job.symbols, scratch, floats, n, words, job.step, job.offset, nothing);
    if (!decoded) return false;
    for (int c = 0; c < chunks; ++c) {
        if (!written) {
            restore(scratch[c].codes, n, job.axes, job.blocks);
            dequantise<E>(scratch[c].codes, n, job.step, job.offset, out + c * n);
        }
        const U* values = static_cast<const U*>(job.values) + spans[c].begin[2];
        const uint16_t* places = job.places + spans[c].begin[1];
        for (int64_t i = 0; i < spans[c].end[1] - spans[c].begin[1]; ++i)
            if (places[i] < n) out[c * n + places[i]] = values[i];
    }
    return true;
}

// Decodes chunks [begin, end), in `scratch`. Returns how many are damaged, as far as it has come.
inline int64_t decode_chunks(const SzDecodeJob& job, int64_t begin, int64_t end, const int64_t* sizes,
                             SzScratch* scratch) {
    return with_element(job.type, [&](auto element) {
        using E = decltype(element);
        using U = typename E::U;
        for (int64_t chunk = begin; chunk < end;) {
            SzSpan spans[kSzAtOnce];
            U* out = static_cast<U*>(job.out) + chunk * job.blocks.chunk;
            if (!span_of(job.index, chunk, job.blocks, job.n, sizes, spans[0])) return 1;
            if (spans[0].dense) {
                const U* values = static_cast<const U*>(job.values) + spans[0].begin[2];
                std::memcpy(out, values, size_t(spans[0].elements) * sizeof(U));
                ++chunk;
                continue;
            }
            const int64_t most = kSzWide ? std::min(kSzAtOnce, end - chunk) : 1;
            int64_t count = 1;
            while (count < most && span_of(job.index, chunk + count, job.blocks, job.n, sizes, spans[count]) &&
                   !spans[count].dense && spans[count].elements == spans[0].elements)
                ++count;
            if (count == 3) count = 2;
            const auto decode = count == 4 ? decode_as<E, 4> : count == 2 ? decode_as<E, 2> : decode_as<E, 1>;
            const bool decoded = decode(job, spans, out, scratch);
            if (!decoded) return 1;
            chunk += count;
        }
        return 0;
    });
}
