// C interface of sz. Layout and terms: codecs/sz/coding.py, codecs/sz/reference.py.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

// As in codecs/sz/coding.py.
constexpr int64_t kSzChunk = 1 << 16;
constexpr int kSzLanes = 32, kSzPrecision = 8, kSzTotal = 1 << kSzPrecision, kSzWindow = 2048, kSzMaxLow = 12;
constexpr int kSzMaxSymbols = 32, kSzMaxWidth = 7, kSzWidthShift = 9, kSzNear = 128, kSzFarWidth = 3;
constexpr int kSzStateBits = 31;  // of the largest state; of the smallest one 16
constexpr uint32_t kSzLeast = 1 << 15;
constexpr int64_t kSzStates = 2 * kSzLanes;  // words
constexpr int kSzBins = 2 + kSzWindow + 1;
constexpr int kSzCodeBits = 23;  // LIMIT
constexpr uint32_t kSzEscape = 1 << 19;  // in an escape's entries
constexpr int64_t kSzRun = 256;
constexpr int64_t kSzChunksAtOnce = 8;
constexpr int64_t kSzAtOnce = 4;  // so many chunks are decoded in turns

// How a tensor is divided, in elements.
struct SzBlocks {
    int64_t row, plane, tile, chunk;
};

inline bool valid(const SzBlocks& blocks) {
    return blocks.row > 0 && blocks.plane > 0 && blocks.tile > 0 && blocks.chunk > 0 && blocks.chunk <= kSzChunk &&
           blocks.plane % blocks.row == 0 && blocks.tile % blocks.plane == 0 && blocks.chunk % blocks.tile == 0;
}

// How codes become symbols, and what coders need of each symbol.
//
// Encoding: `of_code` has the symbol of each code in the window. A vector kernel has 256 of them in four registers: `near`
// are the symbols of the codes from -kSzNear on, and `far` those of all codes, of which 2^kSzFarWidth have one there.
// An entry has, from bit 0 on, the begin of its slots plus a correction of the quotient (16 bits), the width (3), whether it
// is the escape (1), how far the product with the reciprocal is shifted (4), and the frequency - 1 (8).
//
// Decoding: `of_slot` has the symbol of each slot. Its entry has the frequency - 1 and the begin of its slots (8 bits each),
// the width (3), whether it is the escape (1), and the first of its codes (12, signed).
struct SzSymbols {
    int low;
    int count;  // symbols
    alignas(64) uint8_t near[2 * kSzNear];
    alignas(64) uint8_t far[kSzWindow >> kSzFarWidth];
    alignas(64) uint8_t of_slot[kSzTotal];
    alignas(64) uint32_t entries[kSzMaxSymbols];
    alignas(64) uint32_t reciprocals[kSzMaxSymbols];
    alignas(64) uint32_t decoding[kSzMaxSymbols];
    uint8_t of_code[kSzWindow];
};

// What a table says. False where it says nothing that could be decoded.
struct SzTable {
    int frequency[kSzMaxSymbols], width[kSzMaxSymbols], start[kSzMaxSymbols];
};

inline bool read_table(const int16_t* table, int64_t count, int64_t base, int low, SzTable& read) {
    if (count < 2 || count > kSzMaxSymbols || low < 0 || low > kSzMaxLow) return false;
    if (base < -kSzWindow / 2 || base > kSzWindow / 2) return false;
    int begin = 0, start = int(base);
    for (int s = 0; s < int(count); ++s) {
        const int width = table[s] >> kSzWidthShift, frequency = table[s] & ((1 << kSzWidthShift) - 1);
        if (table[s] < 0 || width > (s < 2 ? 0 : kSzMaxWidth) || frequency > kSzTotal - begin) return false;
        read.frequency[s] = frequency;
        read.width[s] = width;
        read.start[s] = s < 2 ? 0 : start;
        start += s < 2 ? 0 : 1 << width;
        begin += frequency;
    }
    return begin == kSzTotal && start <= kSzWindow / 2 && read.frequency[1] > 0;
}

inline bool make_decoding(const int16_t* table, int64_t count, int64_t base, int low, SzSymbols& symbols) {
    SzTable read;
    if (!read_table(table, count, base, low, read)) return false;
    symbols.low = low;
    symbols.count = int(count);
    int begin = 0;
    for (int s = 0; s < int(count); ++s) {
        std::memset(symbols.of_slot + begin, s, size_t(read.frequency[s]));
        symbols.decoding[s] = uint32_t(read.frequency[s] - 1) & 0xff | uint32_t(begin & 0xff) << 8 |
                              uint32_t(read.width[s]) << 16 | (s == 1 ? kSzEscape : 0) | uint32_t(read.start[s]) << 20;
        begin += read.frequency[s];
    }
    return true;
}

// The quotient of a state, which is below 2^31, and a frequency f is the upper half of the state's product with `reciprocal`
// = ceil(2^(31 + shift) / f), shifted to the right by shift - 1, where 2^shift is the first power of two that is not less
// than f (Alverson, 1991). Of 1 there is no such number: the state less 1 is found, and the entry corrects it.
inline bool make_encoding(const int16_t* table, int64_t count, int64_t base, int low, SzSymbols& symbols) {
    SzTable read;
    if (!read_table(table, count, base, low, read)) return false;
    symbols.low = low;
    symbols.count = int(count);
    std::memset(symbols.of_code, 1, sizeof symbols.of_code);
    int begin = 0;
    for (int s = 0; s < int(count); ++s) {
        const int frequency = read.frequency[s], width = read.width[s];
        if (frequency == 0) continue;  // its codes become escapes
        int shift = 0;
        while (1 << shift < frequency) ++shift;
        const bool one = frequency == 1;
        const uint32_t correction = one ? (1u << (kSzPrecision + width)) - 1 : 0;
        symbols.reciprocals[s] =
            one ? ~0u : uint32_t(((uint64_t(1) << (31 + shift)) + uint64_t(frequency) - 1) / uint64_t(frequency));
        symbols.entries[s] = (uint32_t(begin) + correction) | uint32_t(width) << 16 | (s == 1 ? kSzEscape : 0) |
                             uint32_t(one ? 0 : shift - 1) << 20 | uint32_t(frequency - 1) << 24;
        begin += frequency;
        if (s < 2) continue;
        const int at = read.start[s] + kSzWindow / 2;
        const bool is_near = read.start[s] >= -kSzNear && read.start[s] < kSzNear;
        if (at & ((1 << width) - 1) || (!is_near && width < kSzFarWidth)) return false;
        std::memset(symbols.of_code + at, s, size_t(1) << width);
    }
    if (read.frequency[0] == 0) {
        symbols.entries[0] = symbols.entries[1];
        symbols.reciprocals[0] = symbols.reciprocals[1];
    }
    std::memcpy(symbols.near, symbols.of_code + kSzWindow / 2 - kSzNear, sizeof symbols.near);
    for (size_t i = 0; i < sizeof symbols.far; ++i) symbols.far[i] = symbols.of_code[i << kSzFarWidth];
    return true;
}

// Two numbers per 16-bit word add up here: see reference.sz._sum.
inline uint64_t weigh(const uint16_t* words, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += uint64_t(words[i]) * uint32_t(2 * i + 1);
    return sum;
}
inline uint64_t check_of(int64_t index, uint64_t stream, uint64_t places, uint64_t values) {
    return 0x9E3779B97F4A7C15u * uint64_t(index + 2) + stream + 0xD1B54A32D192ED03u * places +
           0x8CB92BA72F3D8DD7u * values;
}

struct SzQuantiseJob {
    const void* x;
    Float type;
    double step, bound, offset;
    double inverse;
};

struct SzEncodeJob {
    SzQuantiseJob quantise;
    int64_t n;
    int axes;
    SzBlocks blocks;
    const SzSymbols* symbols;
};

// What a chunk becomes: its words, then its places, then its values, in one piece of memory.
struct SzPiece {
    uint16_t* words;
    int64_t count, places, values;
};

// An encoded tensor on its way to the planes, whose sizes are only known now.
struct SzPieces {
    explicit SzPieces(int64_t chunks) : pieces(new (std::nothrow) SzPiece[size_t(chunks)]()), count(chunks) {}
    ~SzPieces() {
        for (int64_t i = 0; pieces && i < count; ++i) std::free(pieces[size_t(i)].words);
    }
    std::unique_ptr<SzPiece[]> pieces;
    int64_t count;
    int width;
    uint64_t table_check;
};

struct SzDecodeJob {
    const uint16_t* stream;
    const int64_t* index;
    const uint16_t* places;
    const void* values;
    void* out;
    int64_t n;
    Float type;
    double step, offset;
    int axes;
    SzBlocks blocks;
    const SzSymbols* symbols;
};

// What a thread works in.
struct SzScratch {
    alignas(64) int32_t codes[kSzChunk + kSzLanes];
    int32_t above[kSzChunk + kSzLanes];  // what the elements of the next row are predicted from
    uint8_t outliers[kSzChunk];
    // Fewer than a chunk of float32 has, and then one more step of all lanes: what is longer is not kept.
    uint16_t words[2 * kSzChunk + 8 * kSzLanes];
};

// The memory in which the calling thread works, of four chunks; null where there is none. It is kept for the next call:
// to touch fresh memory of this size costs as much as a fifth of the work in it.
inline SzScratch* sz_scratch() {
    thread_local const std::unique_ptr<SzScratch[]> scratch(new (std::nothrow) SzScratch[kSzAtOnce]);
    return scratch.get();
}

// How many chunks a thread takes at a time: four or eight where there are enough for all threads, else a pair.
inline int64_t sz_at_once(int64_t chunks, int threads) {
    const int64_t fair = chunks / (4 * std::max(threads, 1));
    return fair < kSzAtOnce ? 2 : std::min(fair / kSzAtOnce * kSzAtOnce, kSzChunksAtOnce);
}

// The part of each plane that a chunk has.
struct SzSpan {
    int64_t begin[3], end[3], elements;
    bool dense;
};

// False where it is not inside the planes.
inline bool span_of(const int64_t* index, int64_t chunk, const SzBlocks& blocks, int64_t n, const int64_t* sizes,
                    SzSpan& span) {
    const int64_t* record = index + 1 + 4 * chunk;
    span.elements = std::min(blocks.chunk, n - chunk * blocks.chunk);
    for (int i = 0; i < 3; ++i) {
        span.begin[i] = chunk ? record[i - 4] : 0;
        span.end[i] = record[i];
        if (span.begin[i] < 0 || span.begin[i] > span.end[i] || span.end[i] > sizes[i]) return false;
    }
    const int64_t words = span.end[0] - span.begin[0], places = span.end[1] - span.begin[1],
                  values = span.end[2] - span.begin[2];
    span.dense = words == 0 && places == 0 && values == span.elements;
    return span.dense || (words >= kSzStates && places == values && places <= span.elements);
}

inline int float_width(Float type) { return type == Float::F32 ? 4 : 2; }
inline double inverse_of(double step) { return std::min(1.0 / step, DBL_MAX); }

}  // namespace bs

#define BS_KERNELS "sz_kernels.h"
#include "foreach_isa.h"

// The smallest and the largest finite element, zeros if there is none.
BS_EXPORT void bs_sz_range(const void* x, int64_t n, int type, double* range, int threads) {
    const auto extremes = BS_PICK(extremes);
    constexpr int64_t block = 1 << 16;
    const int64_t blocks = (n + block - 1) / block;
    std::unique_ptr<float[]> found(new float[size_t(2 * blocks)]);
    bs::for_blocks(n, block, threads, [&](int64_t begin, int64_t end) {
        extremes(x, bs::Float(type), begin, end, &found[size_t(begin / block * 2)]);
    });
    float low = std::numeric_limits<float>::infinity(), high = -low;
    for (int64_t i = 0; i < blocks; ++i) {
        low = std::min(low, found[size_t(2 * i)]);
        high = std::max(high, found[size_t(2 * i + 1)]);
    }
    range[0] = low <= high ? double(low) + 0.0 : 0.0;
    range[1] = low <= high ? double(high) + 0.0 : 0.0;
}

// Counts [6, kSzBins], which are zero before.
BS_EXPORT void bs_sz_survey(const void* x, int64_t n, int type, double step, double bound, double offset, int low,
                            const int64_t* blocks, int64_t runs, int64_t run, int64_t* counts) {
    const bs::SzQuantiseJob job{x, bs::Float(type), step, bound, offset, bs::inverse_of(step)};
    const bs::SzBlocks divided{blocks[0], blocks[1], blocks[2], blocks[3]};
    const auto survey = BS_PICK(survey);
    for (int64_t j = 0; j < runs; ++j) {
        const uint64_t share = uint64_t(j) * 0x9E3779B9u & 0xFFFFFFFFu;
        const int64_t start = runs == 1 ? 0 : int64_t((unsigned __int128)(share) * uint64_t(n - run + 1) >> 32);
        for (int64_t done = 0; done < run; done += bs::kSzRun)
            survey(job, divided, low, start + done, std::min(bs::kSzRun, run - done), counts);
    }
}

// Encodes into memory of its own, which bs_sz_collect or bs_sz_free gives back. Fills the number of words, of places and
// of values. Returns null where the memory is not there or the table is none.
BS_EXPORT void* bs_sz_encode(const void* x, int64_t n, int type, const int16_t* table, int64_t symbols, double step,
                             double bound, double offset, int64_t base, int low, int axes, const int64_t* blocks, int64_t* sizes,
                             int threads) {
    const bs::SzBlocks divided{blocks[0], blocks[1], blocks[2], blocks[3]};
    std::unique_ptr<bs::SzSymbols> made(new (std::nothrow) bs::SzSymbols());
    if (!made || !bs::valid(divided) || !bs::make_encoding(table, symbols, base, low, *made))
        return nullptr;
    const bs::SzEncodeJob job{
        {x, bs::Float(type), step, bound, offset, bs::inverse_of(step)}, n, axes, divided, made.get()};
    const int64_t chunks = (n + divided.chunk - 1) / divided.chunk;
    std::unique_ptr<bs::SzPieces> kept(new (std::nothrow) bs::SzPieces(chunks));
    if (!kept || !kept->pieces) return nullptr;
    kept->width = bs::float_width(bs::Float(type));
    kept->table_check = bs::check_of(-1, bs::weigh(reinterpret_cast<const uint16_t*>(table), symbols), 0, 0);
    const auto encode = BS_PICK(encode_chunks);
    bs::Sum failures;
    bs::for_blocks(chunks, bs::sz_at_once(chunks, threads), threads, [&](int64_t begin, int64_t end) {
        bs::SzScratch* const scratch = bs::sz_scratch();
        if (scratch == nullptr || !encode(job, begin, end, scratch, kept->pieces.get())) failures.add(1);
    });
    if (failures.value() != 0) return nullptr;
    sizes[0] = sizes[1] = sizes[2] = 0;
    for (int64_t i = 0; i < chunks; ++i) {
        const bs::SzPiece& piece = kept->pieces[size_t(i)];
        sizes[0] += piece.count;
        sizes[1] += piece.places;
        sizes[2] += piece.values;
    }
    return kept.release();
}

BS_EXPORT void bs_sz_free(void* handle) { delete static_cast<bs::SzPieces*>(handle); }

// Fills the planes of what bs_sz_encode made, and gives its memory back.
BS_EXPORT void bs_sz_collect(void* handle, uint16_t* stream, int64_t* index, uint16_t* places, void* values,
                             int threads) {
    const std::unique_ptr<bs::SzPieces> kept(static_cast<bs::SzPieces*>(handle));
    int64_t end[3] = {0, 0, 0};
    index[0] = int64_t(kept->table_check);
    for (int64_t i = 0; i < kept->count; ++i) {
        const bs::SzPiece& piece = kept->pieces[size_t(i)];
        index[1 + 4 * i] = end[0] += piece.count;
        index[2 + 4 * i] = end[1] += piece.places;
        index[3 + 4 * i] = end[2] += piece.values;
    }
    const auto weigh = BS_PICK(weigh_words);
    bs::for_blocks(kept->count, bs::kSzChunksAtOnce, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const bs::SzPiece& piece = kept->pieces[size_t(i)];
            const int64_t value_words = piece.values * kept->width / 2;
            const uint16_t* from[3] = {piece.words, piece.words + piece.count, piece.words + piece.count + piece.places};
            // A plane without elements may have no memory at all.
            if (piece.count) std::memcpy(stream + (index[1 + 4 * i] - piece.count), from[0], size_t(piece.count) * 2);
            if (piece.places) std::memcpy(places + (index[2 + 4 * i] - piece.places), from[1], size_t(piece.places) * 2);
            if (piece.values)
                std::memcpy(static_cast<char*>(values) + (index[3 + 4 * i] - piece.values) * kept->width, from[2],
                            size_t(value_words) * 2);
            index[4 + 4 * i] = int64_t(bs::check_of(i, weigh(from[0], piece.count), weigh(from[1], piece.places),
                                                    weigh(from[2], value_words)));
        }
    });
}

// Fills `out`. Returns 0, or -1 where the planes do not fit together; if it is their sizes or a checksum, with `out`
// untouched.
BS_EXPORT int bs_sz_decode(const uint16_t* stream, int64_t words, const int16_t* table, int64_t symbols,
                           const int64_t* index, const uint16_t* places, int64_t outliers, const void* values,
                           int64_t stored, double step, double offset, int64_t base, int low, int axes, const int64_t* blocks,
                           void* out, int64_t n, int type, int threads) {
    const bs::SzBlocks divided{blocks[0], blocks[1], blocks[2], blocks[3]};
    std::unique_ptr<bs::SzSymbols> made(new (std::nothrow) bs::SzSymbols());
    if (!made || !bs::valid(divided) || !bs::make_decoding(table, symbols, base, low, *made)) return -1;
    if (uint64_t(index[0]) != bs::check_of(-1, bs::weigh(reinterpret_cast<const uint16_t*>(table), symbols), 0, 0))
        return -1;
    const int64_t chunks = (n + divided.chunk - 1) / divided.chunk, sizes[3] = {words, outliers, stored};
    for (int i = 0; i < 3; ++i)
        if ((chunks ? index[4 * chunks - 3 + i] : 0) != sizes[i]) return -1;
    const bs::SzDecodeJob job{stream, index, places, values, out, n, bs::Float(type), step, offset, axes, divided, made.get()};
    const auto intact = BS_PICK(intact);
    bs::Sum wrong;
    bs::for_blocks(chunks, bs::kSzChunksAtOnce, threads, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) wrong.add(!intact(job, chunk, sizes));
    });
    if (wrong.value() != 0) return -1;
    const auto decode = BS_PICK(decode_chunks);
    bs::for_blocks(chunks, bs::sz_at_once(chunks, threads), threads, [&](int64_t begin, int64_t end) {
        bs::SzScratch* const scratch = bs::sz_scratch();
        wrong.add(scratch == nullptr || decode(job, begin, end, sizes, scratch) != 0);
    });
    return wrong.value() == 0 ? 0 : -1;
}
