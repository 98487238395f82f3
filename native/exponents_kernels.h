// Exponents as codes into a window. Compiled once per instruction set by foreach_isa.h.
//
// All kernels work on whole blocks; the last one, where it is shorter, goes through memory of its own, with zeros behind
// it, which have code 0. There are no intrinsics: these are loops over bytes that compilers turn into vector code.

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

// The sum of the bytes, of which none is above 16 and all together are below 65536.
inline int sum_of(const uint8_t* counts) {
    constexpr uint64_t even = 0x00ff00ff00ff00ff;
    uint64_t sum = 0;
    for (int i = 0; i < kLanes; i += 8) {
        uint64_t word;
        std::memcpy(&word, counts + i, sizeof word);
        sum += (word & even) + (word >> 8 & even);
    }
    return int(sum * 0x0001000100010001 >> 48);
}

// What the window of a block begins after: see _windows in ops/reference/exponents.py.
template <int bits>
inline int window_of(const uint8_t* exponents) {
    constexpr int width = (1 << bits) - 2;
    uint8_t largest[kLanes] = {};
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t lane = 0; lane < kLanes; ++lane)
            largest[lane] = std::max(largest[lane], exponents[row * kLanes + lane]);
    uint8_t high = 0, before = 255;  // the smallest one less 1, so that a lane of zeros has 255
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        high = std::max(high, largest[lane]);
        before = std::min(before, uint8_t(largest[lane] - 1));
    }
    const int low = before + 1, tops[4] = {high, low + 2, low + 1, low};
    int bases[4], most = -1, chosen = 0;
    uint8_t first[4], counts[4][kLanes] = {};
    for (int k = 0; k < 4; ++k) {
        bases[k] = std::min(std::max(tops[k] - width, 0), 255 - width);
        first[k] = uint8_t(bases[k] + 1);
    }
    for (int k = 0; k < 4; ++k)
        for (int64_t row = 0; row < kRows; ++row)
            for (int64_t lane = 0; lane < kLanes; ++lane)
                counts[k][lane] += uint8_t(uint8_t(exponents[row * kLanes + lane] - first[k]) < width);
    for (int k = 0; k < 4; ++k) {
        const int inside = sum_of(counts[k]);
        if (inside > most) {
            most = inside;
            chosen = bases[k];
        }
    }
    return chosen;
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
    for (int64_t i = 0; i < kSize / 8; ++i) {
        uint32_t three = 0;
        std::memcpy(&three, codes + 3 * i, 3);
        words[i] = three;
    }
    for (int64_t i = 0; i < kSize / 8; ++i) {
        uint64_t word = words[i];
        word = (word | word << 20) & 0x00000fff00000fff;
        word = (word | word << 10) & 0x003f003f003f003f;
        words[i] = (word | word << 5) & 0x0707070707070707;
    }
    std::memcpy(block.wide, words, sizeof words);
}

// Sixteen packed codes, of which those that are escapes have their lowest bit set in the result and no other bit.
template <int bits>
inline uint64_t escapes_of(const uint8_t* codes, int64_t group) {
    constexpr uint64_t lowest = bits == 4 ? 0x1111111111111111 : 0x0000249249249249;
    uint64_t word = 0;
    std::memcpy(&word, codes + group * 2 * bits, 2 * bits);
    word &= word >> 1;
    return (bits == 4 ? word & word >> 2 : word & word >> 1) & lowest;
}

template <int bits>
inline int64_t count_escapes(const uint8_t* codes) {
    int64_t count = 0;
    for (int64_t group = 0; group < kSize / 16; ++group) count += __builtin_popcountll(escapes_of<bits>(codes, group));
    return count;
}

// Fills everything of the block but its escapes, and returns its base.
template <int bits, class U>
inline int code_block(const U* x, Block<bits>& block) {
    constexpr uint8_t escape = (1 << bits) - 1;
    split(x, block);
    const int base = window_of<bits>(block.exponents);
    const uint8_t first = uint8_t(base + 1);
    for (int64_t i = 0; i < kSize; ++i) {
        const uint8_t exponent = block.exponents[i], above = uint8_t(exponent - first);
        const uint8_t code = above < escape - 1 ? uint8_t(above + 1) : escape;
        block.wide[i] = exponent == 0 ? uint8_t(0) : code;
    }
    pack_codes(block);
    return base;
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

// First pass: all planes of chunks [begin, end), and in `offsets` how many escapes each has.
template <bool stream, int bits, class U>
inline void code_range(const ExponentsEncodeJob& job, int64_t begin, int64_t end) {
    const U* x = static_cast<const U*>(job.x);
    constexpr bool has_lower = sizeof(U) == 4;
    uint8_t* const lower = job.fractions;
    uint8_t* const upper = job.fractions + (has_lower ? 2 * job.n : 0);
    Block<bits> block;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        int64_t count = 0;
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
        for (int64_t i = chunk * kZvcChunk; i < last; i += kSize) {
            uint8_t* const codes = job.codes + i / 8 * bits;
            if (last - i >= kSize) {
                prefetch_ahead(x + i, kSize);
                job.bases[i / kSize] = uint8_t(code_block<bits>(x + i, block));
                copy_lines<stream>(block.fractions, upper + i, kSize);
                copy_lines<stream>(block.codes, codes, kSize * bits / 8);
                if (has_lower) copy_lines<stream>(block.lower, lower + 2 * i, 2 * kSize);
            } else {
                const size_t rest = size_t(last - i);
                U padded[kSize] = {};
                std::memcpy(padded, x + i, rest * sizeof(U));
                job.bases[i / kSize] = uint8_t(code_block<bits>(padded, block));
                std::memcpy(upper + i, block.fractions, rest);
                std::memcpy(codes, block.codes, (rest * bits + 7) / 8);
                if (has_lower) std::memcpy(lower + 2 * i, block.lower, 2 * rest);
            }
            count += count_escapes<bits>(block.codes);
        }
        job.offsets[chunk] = count;
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
    if (job.width == 2) return job.bits == 4 ? code_as<4, uint16_t>(job, begin, end) : code_as<3, uint16_t>(job, begin, end);
    return job.bits == 4 ? code_as<4, uint32_t>(job, begin, end) : code_as<3, uint32_t>(job, begin, end);
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
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        int64_t at = job.offsets[chunk];
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
        for (int64_t i = chunk * kZvcChunk; i < last; i += kSize) {
            const uint8_t* codes = codes_of<bits>(job.codes, i, job.n, own);
            for (int64_t group = 0; group < kSize / 16; ++group) {
                uint64_t found = escapes_of<bits>(codes, group);
                for (; found != 0 && at < job.room; found &= found - 1, ++at)
                    job.escapes[at] = uint8_t(upper_of(x[i + group * 16 + __builtin_ctzll(found) / bits]) >> 7);
            }
        }
    }
}

void gather(const ExponentsEncodeJob& job, int64_t begin, int64_t end) {
    if (job.width == 2) return job.bits == 4 ? gather_as<4, uint16_t>(job, begin, end) : gather_as<3, uint16_t>(job, begin, end);
    return job.bits == 4 ? gather_as<4, uint32_t>(job, begin, end) : gather_as<3, uint32_t>(job, begin, end);
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
            count += count_escapes<bits>(codes_of<bits>(job.codes, i, job.n, own));
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
    for (int64_t group = 0; group < kSize / 16; ++group) {
        uint64_t found = escapes_of<bits>(codes, group);
        for (; found != 0; found &= found - 1)
            block.exponents[group * 16 + __builtin_ctzll(found) / bits] = *escapes++;
    }
    return escapes;
}

inline void join(const uint8_t* exponents, const uint8_t* fractions, const uint16_t*, uint16_t* out) {
    for (int64_t i = 0; i < kSize; ++i)
        out[i] = uint16_t((fractions[i] & 0x80) << 8 | exponents[i] << 7 | (fractions[i] & 0x7f));
}
inline void join(const uint8_t* exponents, const uint8_t* fractions, const uint16_t* lower, uint32_t* out) {
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
        if (has_lower) std::memcpy(block.lower, lower + 2 * i, size_t(2 * count));
        if (count == kSize) {
            prefetch_ahead(fractions, kSize);
            join(block.exponents, fractions, block.lower, joined);
            copy_lines<stream>(joined, out + i, int64_t(sizeof joined));
        } else {
            std::memcpy(block.fractions, fractions, size_t(count));
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
    if (job.width == 2) return job.bits == 4 ? decode_as<4, uint16_t>(job, begin, end) : decode_as<3, uint16_t>(job, begin, end);
    return job.bits == 4 ? decode_as<4, uint32_t>(job, begin, end) : decode_as<3, uint32_t>(job, begin, end);
}
