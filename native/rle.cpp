// C interface of run lengths: between the mask of zero-value compression and tokens. Layout: codecs/rle/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "parallel.h"

namespace bs {
namespace {

constexpr int64_t kLongest = 255;  // codecs.rle.reference.LONGEST
constexpr int64_t kChunks = 16;    // in a block

inline int64_t rle_chunks(int64_t n) { return (n + kZvcChunk - 1) / kZvcChunk; }

// Calls take(i, flips) for every word of elements [first, last): flips has a bit for each element that begins a run. The
// element before the first one counts as clear, because a chunk begins with a run of those, which may be empty.
template <class Take>
inline void for_flips(const uint8_t* mask, int64_t first, int64_t last, Take take) {
    Word before = 0;
    for (int64_t i = first; i < last; i += kWord) {
        const int64_t count = std::min<int64_t>(kWord, last - i);
        const Word word = count == kWord ? load_word(mask, i) : load_last_word(mask, i, count);
        const Word flips = word ^ (word << 1 | before);
        take(i, count == kWord ? flips : flips & low_bits(count));
        before = word >> (kWord - 1);
    }
}

// Tokens beside the first that a run takes.
inline int64_t further_tokens(int64_t length) { return length > kLongest ? (length - 1) / kLongest * 2 : 0; }

inline int64_t count_tokens(const uint8_t* mask, int64_t first, int64_t last) {
    int64_t begin = first, count = 1;
    for_flips(mask, first, last, [&](int64_t i, Word flips) {
        if (flips == 0) return;
        // Of the runs that end in this word only the first one may be longer than the word.
        count += __builtin_popcountll(flips) + further_tokens(i + __builtin_ctzll(flips) - begin);
        begin = i + kWord - 1 - __builtin_clzll(flips);
    });
    return count + further_tokens(last - begin);
}

inline uint8_t* write_run(int64_t length, uint8_t* to) {
    for (; length > kLongest; length -= kLongest) {
        *to++ = uint8_t(kLongest);
        *to++ = 0;
    }
    *to++ = uint8_t(length);
    return to;
}

inline void write_tokens(const uint8_t* mask, int64_t first, int64_t last, uint8_t* to) {
    int64_t begin = first;
    for_flips(mask, first, last, [&](int64_t i, Word flips) {
        for (; flips != 0; flips &= flips - 1) {
            const int64_t end = i + __builtin_ctzll(flips);
            to = write_run(end - begin, to);
            begin = end;
        }
    });
    write_run(last - begin, to);
}

// Bit i of the result: how many of the bits 0 to i are set, modulo 2.
inline Word parities(Word flips) {
    for (int shift = 1; shift < kWord; shift *= 2) flips ^= flips << shift;
    return flips;
}

// The mask of one chunk, from its tokens [from, stop). False where they do not add up to its length.
inline bool mask_chunk(const uint8_t* from, const uint8_t* stop, int64_t first, int64_t last, uint8_t* mask) {
    Word flips[kZvcChunk / kWord + 1] = {};  // one more, for what ends where the chunk does
    const int64_t length = last - first;
    int64_t at = 0, where = 0;
    Word here = 0;  // flips[where], so that a token need not wait until the one before is in memory
    for (; from < stop; ++from) {
        at += *from;
        if (at > length) return false;
        if (at / kWord != where) {
            flips[where] = here;
            here = 0;
            where = at / kWord;
        }
        here ^= Word(1) << at % kWord;
    }
    if (at != length) return false;
    flips[where] = here;
    Word before = 0;
    for (int64_t i = 0; i < length; i += kWord) {
        const Word word = parities(flips[i / kWord]) ^ (Word(0) - before);
        before = word >> (kWord - 1);
        const int64_t count = length - i;
        if (count >= kWord) store_word(mask, first + i, word);
        else store_last_word(mask, first + i, count, word & low_bits(count));
    }
    return true;
}

}  // namespace
}  // namespace bs

// Fills `starts` with the first token of each chunk; returns how many tokens there are.
BS_EXPORT int64_t bs_rle_count(const uint8_t* mask, int64_t n, int64_t* starts, int threads) {
    const int64_t chunks = bs::rle_chunks(n);
    bs::for_blocks(chunks, bs::kChunks, threads, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) {
            const int64_t first = chunk * bs::kZvcChunk, last = std::min(first + bs::kZvcChunk, n);
            starts[chunk] = bs::count_tokens(mask, first, last);
        }
    });
    return bs::sums_before(starts, chunks);
}

// Fills `tokens`.
BS_EXPORT void bs_rle_write(const uint8_t* mask, int64_t n, const int64_t* starts, uint8_t* tokens, int threads) {
    bs::for_blocks(bs::rle_chunks(n), bs::kChunks, threads, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) {
            const int64_t first = chunk * bs::kZvcChunk, last = std::min(first + bs::kZvcChunk, n);
            bs::write_tokens(mask, first, last, tokens + starts[chunk]);
        }
    });
}

// Fills `mask`. Returns 0, or -1 where the tokens and the starts disagree.
BS_EXPORT int bs_rle_mask(const uint8_t* tokens, int64_t stored, const int64_t* starts, int64_t n, uint8_t* mask,
                          int threads) {
    const int64_t chunks = bs::rle_chunks(n);
    if (chunks == 0) return stored == 0 ? 0 : -1;
    if (starts[0] != 0) return -1;
    bs::Sum wrong;
    bs::for_blocks(chunks, bs::kChunks, threads, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) {
            const int64_t first = chunk * bs::kZvcChunk, last = std::min(first + bs::kZvcChunk, n);
            const int64_t from = starts[chunk], stop = chunk + 1 < chunks ? starts[chunk + 1] : stored;
            const bool there = 0 <= from && from <= stop && stop <= stored;
            if (!there || !bs::mask_chunk(tokens + from, tokens + stop, first, last, mask)) wrong.add(1);
        }
    });
    return wrong.value() == 0 ? 0 : -1;
}
