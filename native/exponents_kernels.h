// Exponents as codes into a window. Compiled once per instruction set by foreach_isa.h.
//
// All kernels work on whole blocks; the last one, where it is shorter, goes through memory of its own, with zeros behind
// it, which have code 0. Most of these are loops over bytes that compilers turn into vector code.

constexpr int64_t kSize = kExponentsBlock, kRows = kExponentsBlock / kExponentsLanes, kLanes = kExponentsLanes;

// What one block becomes. Of float32 `lower` are the lower 16 bits.
template <int bits>
struct Block {
    alignas(64) uint8_t fractions[kSize];
    alignas(64) uint8_t codes[kSize * bits / 8 + 8];  // packing three bits writes past the last byte
    alignas(64) uint16_t lower[kSize];
    alignas(64) uint8_t exponents[kSize];
    alignas(64) uint8_t wide[kSize];  // codes, one in a byte
};

// The 16 bits that have the sign, the exponent and the upper bits of the fraction.
inline uint16_t upper_of(uint16_t x) { return x; }
inline uint16_t upper_of(uint32_t x) { return uint16_t(x >> 16); }

template <int bits>
inline void split(const uint16_t* x, Block<bits>& block) {
    for (int64_t i = 0; i < kSize; ++i) {
        block.exponents[i] = uint8_t(x[i] >> 7);
        block.fractions[i] = uint8_t((x[i] >> 8 & 0x80) | (x[i] & 0x7f));
    }
}
template <int bits>
inline void split(const uint32_t* x, Block<bits>& block) {
    uint16_t upper[kSize];
    for (int64_t i = 0; i < kSize; ++i) {
        upper[i] = uint16_t(x[i] >> 16);
        block.lower[i] = uint16_t(x[i]);
    }
    split(upper, block);
}

// A byte for each lane. Where a register is smaller, compilers take several.
typedef uint8_t Bytes __attribute__((vector_size(32)));

inline Bytes load_bytes(const uint8_t* x) {
    Bytes bytes;
    std::memcpy(&bytes, x, sizeof bytes);
    return bytes;
}
inline Bytes splat_bytes(uint8_t x) { return Bytes{} + x; }

// The sum of the bytes, of which none is above 16.
inline int sum_of(const Bytes& counts) {
    constexpr uint64_t even = 0x00ff00ff00ff00ff;
    uint64_t words[kLanes / 8], sum = 0;
    std::memcpy(words, &counts, sizeof words);
    for (uint64_t word : words) sum += (word & even) + (word >> 8 & even);
    return int(sum * 0x0001000100010001 >> 48);
}

struct Window {
    int base;     // what it begins after
    int escapes;  // elements out of it, but for exponents of 0
};

// The window of a block: see _windows in codecs/exponents/reference.py.
template <int bits>
inline Window window_of(const uint8_t* exponents) {
    constexpr int width = (1 << bits) - 2;
    const Bytes zero{}, size = splat_bytes(width);
    Bytes largest{}, zeros{};
    for (int64_t row = 0; row < kRows; ++row) {
        const Bytes exponent = load_bytes(exponents + row * kLanes);
        largest = exponent > largest ? exponent : largest;
        zeros -= Bytes(exponent == zero);
    }
    uint8_t lanes[kLanes];
    std::memcpy(lanes, &largest, sizeof lanes);
    uint8_t high = 0, before = 255;  // the smallest one less 1, so that a lane of zeros has 255
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        high = std::max(high, lanes[lane]);
        before = std::min(before, uint8_t(lanes[lane] - 1));
    }
    const int some = int(kSize) - sum_of(zeros);
    int base = std::max(high - width, 0);
    Bytes counts{}, first = splat_bytes(uint8_t(base + 1));
    for (int64_t row = 0; row < kRows; ++row) counts -= Bytes(load_bytes(exponents + row * kLanes) - first < size);
    int most = sum_of(counts);
    if (most == some) return {base, 0};  // no other window can hold more
    int bases[3];
    Bytes firsts[3], others[3] = {};
    for (int k = 0; k < 3; ++k) {
        bases[k] = std::min(std::max(before + 3 - k - width, 0), 255 - width);
        firsts[k] = splat_bytes(uint8_t(bases[k] + 1));
    }
    for (int64_t row = 0; row < kRows; ++row) {
        const Bytes exponent = load_bytes(exponents + row * kLanes);
        for (int k = 0; k < 3; ++k) others[k] -= Bytes(exponent - firsts[k] < size);
    }
    for (int k = 0; k < 3; ++k) {
        const int inside = sum_of(others[k]);
        if (inside > most) {
            most = inside;
            base = bases[k];
        }
    }
    return {base, some - most};
}

// Fields of 4 bits: two bytes fold to one. Of 3 bits: eight bytes fold to three.
inline void pack_codes(Block<4>& block) {
    for (int64_t i = 0; i < kSize / 2; ++i)
        block.codes[i] = uint8_t(block.wide[2 * i] | block.wide[2 * i + 1] << 4);
}
inline void pack_codes(Block<3>& block) {
    uint64_t words[kSize / 8];
    std::memcpy(words, block.wide, sizeof words);
    for (int64_t i = 0; i < kSize / 8; ++i) {
        uint64_t word = words[i];
        word = (word | word >> 5) & 0x003f003f003f003f;
        word = (word | word >> 10) & 0x00000fff00000fff;
        words[i] = word | word >> 20;
    }
    for (int64_t i = 0; i < kSize / 8; ++i) {
        const uint32_t three = uint32_t(words[i]) & 0xffffff;
        std::memcpy(block.codes + 3 * i, &three, sizeof three);
    }
}
inline void unpack_codes(const uint8_t* codes, Block<4>& block) {
    for (int64_t i = 0; i < kSize / 2; ++i) {
        block.wide[2 * i] = codes[i] & 15;
        block.wide[2 * i + 1] = codes[i] >> 4;
    }
}
inline void unpack_codes(const uint8_t* codes, Block<3>& block) {
    uint64_t words[kSize / 8];
    for (int64_t i = 0; i < kSize / 8 - 1; ++i) {
        uint32_t four;
        std::memcpy(&four, codes + 3 * i, sizeof four);
        words[i] = four & 0xffffff;
    }
    uint32_t last;  // nothing behind the codes may be read
    std::memcpy(&last, codes + kSize * 3 / 8 - 4, sizeof last);
    words[kSize / 8 - 1] = last >> 8;
    for (int64_t i = 0; i < kSize / 8; ++i) {
        uint64_t word = words[i];
        word = (word | word << 20) & 0x00000fff00000fff;
        word = (word | word << 10) & 0x003f003f003f003f;
        words[i] = (word | word << 5) & 0x0707070707070707;
    }
    std::memcpy(block.wide, words, sizeof words);
}

// How many codes of a block are escapes.
inline int64_t count_escapes(const uint8_t* codes, const Block<4>*) {
    const Bytes low = splat_bytes(15), high = splat_bytes(0xf0);
    Bytes counts{};
    for (int64_t i = 0; i < kSize / 2; i += kLanes) {
        const Bytes two = load_bytes(codes + i);
        counts -= Bytes((two & low) == low) + Bytes((two & high) == high);
    }
    return sum_of(counts);
}
inline int64_t count_escapes(const uint8_t* codes, const Block<3>*) {
    constexpr int64_t step = 6;  // bytes of sixteen codes
    int64_t count = 0;
    for (int64_t i = 0; i < kSize * 3 / 8; i += step) {
        uint64_t word;
        if (i < kSize * 3 / 8 - step) {
            std::memcpy(&word, codes + i, sizeof word);
        } else {  // nothing behind the codes may be read
            std::memcpy(&word, codes + i - 2, sizeof word);
            word >>= 16;
        }
        count += __builtin_popcountll(word & word >> 1 & word >> 2 & 0x0000249249249249);
    }
    return count;
}

// Calls with the number of each element of the block whose code is an escape, in order.
template <int bits, class Body>
inline void for_escapes(const uint8_t* wide, Body body) {
    for (int64_t i = 0; i < kSize; i += kWord)
        for (Word word = ~differs<uint8_t>(wide + i, (1 << bits) - 1); word != 0; word &= word - 1)
            body(i + __builtin_ctzll(word));
}

// Fills everything of the block but its escapes, and returns its window.
template <int bits, class U>
inline Window code_block(const U* x, Block<bits>& block) {
    constexpr uint8_t escape = (1 << bits) - 1;
    split(x, block);
    const Window window = window_of<bits>(block.exponents);
    const uint8_t first = uint8_t(window.base + 1);
    for (int64_t i = 0; i < kSize; ++i) {
        const uint8_t exponent = block.exponents[i], above = uint8_t(exponent - first);
        const uint8_t code = above < escape - 1 ? uint8_t(above + 1) : escape;
        block.wide[i] = exponent == 0 ? uint8_t(0) : code;
    }
    pack_codes(block);
    return window;
}

template <bool stream>
inline void copy_lines(const void* from, void* to, int64_t nbytes) {
    if (!stream) {
        std::memcpy(to, from, size_t(nbytes));
        return;
    }
    for (int64_t i = 0; i < nbytes; i += 64)
        copy_line<stream>(static_cast<const uint8_t*>(from) + i, static_cast<uint8_t*>(to) + i);
}

// First pass: all planes of chunks [begin, end), in `offsets` how many escapes each has, and in `places` where these are
// put aside; -1 where there is no room for them.
template <bool stream, int bits, class U>
inline void code_range(const ExponentsEncodeJob& job, int64_t begin, int64_t end) {
    const U* x = static_cast<const U*>(job.x);
    constexpr bool has_lower = sizeof(U) == 4;
    uint8_t* const lower = job.fractions;
    uint8_t* const upper = job.fractions + (has_lower ? 2 * job.n : 0);
    Block<bits> block;
    uint8_t found[kZvcChunk];
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        int64_t count = 0;
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
        for (int64_t i = chunk * kZvcChunk; i < last; i += kSize) {
            Window window;
            uint8_t* const codes = job.codes + i / 8 * bits;
            if (last - i >= kSize) {
                prefetch_ahead(x + i, kSize);
                window = code_block<bits>(x + i, block);
                copy_lines<stream>(block.fractions, upper + i, kSize);
                copy_lines<stream>(block.codes, codes, kSize * bits / 8);
                if (has_lower) copy_lines<stream>(block.lower, lower + 2 * i, 2 * kSize);
            } else {
                const size_t rest = size_t(last - i);
                U padded[kSize] = {};
                std::memcpy(padded, x + i, rest * sizeof(U));
                window = code_block<bits>(padded, block);
                std::memcpy(upper + i, block.fractions, rest);
                std::memcpy(codes, block.codes, (rest * bits + 7) / 8);
                if (has_lower) std::memcpy(lower + 2 * i, block.lower, 2 * rest);
            }
            job.bases[i / kSize] = uint8_t(window.base);
            if (window.escapes > 0)
                for_escapes<bits>(block.wide, [&](int64_t at) { found[count++] = block.exponents[at]; });
        }
        job.offsets[chunk] = count;
        job.places[chunk] = job.slabs->take(count);
        if (job.places[chunk] >= 0) std::memcpy(job.scratch + job.places[chunk], found, size_t(count));
    }
}

template <int bits, class U>
inline void code_as(const ExponentsEncodeJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) {
        code_range<true, bits, U>(job, begin, end);
        fence();
    } else {
        code_range<false, bits, U>(job, begin, end);
    }
}

void code(const ExponentsEncodeJob& job, int64_t begin, int64_t end) {
    const bool four = job.bits == 4;
    if (job.width == 2) return four ? code_as<4, uint16_t>(job, begin, end) : code_as<3, uint16_t>(job, begin, end);
    return four ? code_as<4, uint32_t>(job, begin, end) : code_as<3, uint32_t>(job, begin, end);
}

// The codes of a block that begins at element i: where they are, or in `own` with zeros behind them if there are fewer.
template <int bits>
inline const uint8_t* codes_of(const uint8_t* codes, int64_t i, int64_t n, uint8_t* own) {
    codes += i / 8 * bits;
    if (n - i >= kSize) return codes;
    const int64_t used = (n - i) * bits;
    std::memset(own, 0, kSize * bits / 8);
    std::memcpy(own, codes, size_t(used + 7) / 8);
    if (used % 8 != 0) own[used / 8] &= uint8_t((1 << used % 8) - 1);
    return own;
}

// Second pass: the escapes of chunks [begin, end), as far as there is room.
template <int bits, class U>
inline void gather_as(const ExponentsEncodeJob& job, int64_t begin, int64_t end) {
    const U* x = static_cast<const U*>(job.x);
    alignas(64) uint8_t own[kSize * bits / 8];
    Block<bits> block;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        int64_t at = job.offsets[chunk];
        const int64_t stop = std::min(chunk + 1 < job.chunks ? job.offsets[chunk + 1] : job.stored, job.room);
        if (at >= stop) continue;
        if (job.places[chunk] >= 0) {
            std::memcpy(job.escapes + at, job.scratch + job.places[chunk], size_t(stop - at));
            continue;
        }
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
        for (int64_t i = chunk * kZvcChunk; i < last; i += kSize) {
            unpack_codes(codes_of<bits>(job.codes, i, job.n, own), block);
            for_escapes<bits>(block.wide, [&](int64_t k) {
                if (at < stop) job.escapes[at++] = uint8_t(upper_of(x[i + k]) >> 7);
            });
        }
    }
}

void gather(const ExponentsEncodeJob& job, int64_t begin, int64_t end) {
    const bool four = job.bits == 4;
    if (job.width == 2) return four ? gather_as<4, uint16_t>(job, begin, end) : gather_as<3, uint16_t>(job, begin, end);
    return four ? gather_as<4, uint32_t>(job, begin, end) : gather_as<3, uint32_t>(job, begin, end);
}

// How many of the chunks [begin, end) do not announce in their offset and their codes what the next chunk (or the end of
// the escapes) goes on from. With none, and the first offset 0, all offsets are right.
template <int bits>
inline int64_t disagreements_as(const ExponentsDecodeJob& job, int64_t begin, int64_t end) {
    int64_t wrong = 0;
    alignas(64) uint8_t own[kSize * bits / 8];
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
        int64_t count = 0;
        for (int64_t i = chunk * kZvcChunk; i < last; i += kSize)
            count += count_escapes(codes_of<bits>(job.codes, i, job.n, own), static_cast<Block<bits>*>(nullptr));
        const int64_t next = last < job.n ? job.offsets[chunk + 1] : job.stored;
        // Unsigned: an offset of garbage may not overflow the sum.
        wrong += uint64_t(job.offsets[chunk]) + uint64_t(count) != uint64_t(next);
    }
    return wrong;
}

int64_t disagreements(const ExponentsDecodeJob& job, int64_t begin, int64_t end) {
    return job.bits == 4 ? disagreements_as<4>(job, begin, end) : disagreements_as<3>(job, begin, end);
}

// The exponents of a block from its codes and its escapes; returns the end of what it read of these.
template <int bits>
inline const uint8_t* find_exponents(const uint8_t* codes, uint8_t base, const uint8_t* escapes, Block<bits>& block) {
    unpack_codes(codes, block);
    for (int64_t i = 0; i < kSize; ++i)
        block.exponents[i] = block.wide[i] == 0 ? uint8_t(0) : uint8_t(base + block.wide[i]);
    for_escapes<bits>(block.wide, [&](int64_t at) { block.exponents[at] = *escapes++; });
    return escapes;
}

// A plane that comes from a store need not be aligned to 16 bits.
typedef uint16_t Unaligned __attribute__((aligned(1), may_alias));

inline void join(const uint8_t* exponents, const uint8_t* fractions, const Unaligned*, uint16_t* out) {
    for (int64_t i = 0; i < kSize; ++i)
        out[i] = uint16_t((fractions[i] & 0x80) << 8 | exponents[i] << 7 | (fractions[i] & 0x7f));
}
inline void join(const uint8_t* exponents, const uint8_t* fractions, const Unaligned* lower, uint32_t* out) {
    uint16_t upper[kSize];
    join(exponents, fractions, lower, upper);
    for (int64_t i = 0; i < kSize; ++i) out[i] = uint32_t(upper[i]) << 16 | lower[i];
}

template <bool stream, int bits, class U>
inline void decode_range(const ExponentsDecodeJob& job, int64_t begin, int64_t end) {
    U* const out = static_cast<U*>(job.out);
    constexpr bool has_lower = sizeof(U) == 4;
    const uint8_t* const lower = job.fractions;
    const uint8_t* const upper = job.fractions + (has_lower ? 2 * job.n : 0);
    const uint8_t* escapes = job.escapes + job.offsets[begin];
    const int64_t last = std::min(end * kZvcChunk, job.n);
    Block<bits> block;
    alignas(64) U joined[kSize];
    alignas(64) uint8_t own[kSize * bits / 8];
    for (int64_t i = begin * kZvcChunk; i < last; i += kSize) {
        const uint8_t* codes = codes_of<bits>(job.codes, i, job.n, own);
        escapes = find_exponents<bits>(codes, job.bases[i / kSize], escapes, block);
        const int64_t count = std::min(last - i, kSize);
        const uint8_t* fractions = upper + i;
        if (count == kSize) {
            prefetch_ahead(fractions, kSize);
            if (has_lower) prefetch_ahead(lower + 2 * i, 2 * kSize);
            const Unaligned* below = reinterpret_cast<const Unaligned*>(lower + (has_lower ? 2 * i : 0));
            join(block.exponents, fractions, below, stream ? joined : out + i);
            if (stream) copy_lines<stream>(joined, out + i, int64_t(sizeof joined));
        } else {
            std::memcpy(block.fractions, fractions, size_t(count));
            if (has_lower) std::memcpy(block.lower, lower + 2 * i, size_t(2 * count));
            join(block.exponents, block.fractions, block.lower, joined);
            std::memcpy(out + i, joined, size_t(count) * sizeof(U));
        }
    }
}

template <int bits, class U>
inline void decode_as(const ExponentsDecodeJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) {
        decode_range<true, bits, U>(job, begin, end);
        fence();
    } else {
        decode_range<false, bits, U>(job, begin, end);
    }
}

void decode(const ExponentsDecodeJob& job, int64_t begin, int64_t end) {
    const bool four = job.bits == 4;
    if (job.width == 2) return four ? decode_as<4, uint16_t>(job, begin, end) : decode_as<3, uint16_t>(job, begin, end);
    return four ? decode_as<4, uint32_t>(job, begin, end) : decode_as<3, uint32_t>(job, begin, end);
}
