// Zero-value compression. Compiled once per instruction set by foreach_isa.h.

#include "count_mask.h"
#include "fill_mask.h"
#include "lines.h"

template <class U>
struct CountedNonzero {
    int64_t count = 0;
    Word operator()(const U* x, Word valid) {
        const Word word = differs<U>(x, 0) & valid;
        count += __builtin_popcountll(word);
        return word;
    }
};

// First pass: the mask of chunks [begin, end), and in `offsets` how many elements of each are not zero.
template <class U>
inline void mark_as(const ZvcEncodeJob& job, int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        CountedNonzero<U> predicate;
        const int64_t first = chunk * kZvcChunk, last = std::min(first + kZvcChunk, job.n);
        fill_mask(static_cast<const U*>(job.x), first, last, job.mask, predicate);
        job.offsets[chunk] = predicate.count;
    }
}

void mark(const ZvcEncodeJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return mark_as<uint16_t>(job, begin, end);
        case 4: return mark_as<uint32_t>(job, begin, end);
        default: return mark_as<uint64_t>(job, begin, end);
    }
}

// Second pass: the values of chunks [begin, end).
template <bool stream, class U>
inline void gather_range(const ZvcEncodeJob& job, int64_t begin, int64_t end) {
    const U* x = static_cast<const U*>(job.x);
    Lines<U> lines(static_cast<U*>(job.values) + job.offsets[begin]);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t last = std::min((chunk + 1) * kZvcChunk, job.n);
        int64_t i = chunk * kZvcChunk;
        U* to = lines.end();
        for (; i + kWord <= last; i += kWord) {
            prefetch_ahead(x + i, kWord);
            to = compress<U>(x + i, load_word(job.mask, i), to);
        }
        if (i < last) to = scalar::compress<U>(x + i, load_last_word(job.mask, i, last - i), to);
        lines.end() = to;
        lines.template flush<stream>();
    }
    lines.finish();
}

template <class U>
inline void gather_as(const ZvcEncodeJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) {
        gather_range<true, U>(job, begin, end);
        fence();
    } else {
        gather_range<false, U>(job, begin, end);
    }
}

void gather(const ZvcEncodeJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return gather_as<uint16_t>(job, begin, end);
        case 4: return gather_as<uint32_t>(job, begin, end);
        default: return gather_as<uint64_t>(job, begin, end);
    }
}

// How many of the chunks [begin, end) do not announce in their offset and their mask what the next chunk (or the end of
// the values) goes on from. With none, and the first offset 0, all offsets are right.
int64_t disagreements(const ZvcDecodeJob& job, int64_t begin, int64_t end) {
    int64_t wrong = 0;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t next = (chunk + 1) * kZvcChunk < job.n ? job.offsets[chunk + 1] : job.stored;
        // Unsigned: an offset of garbage may not overflow the sum.
        wrong += uint64_t(job.offsets[chunk]) + uint64_t(count_mask(job.mask, chunk, job.n)) != uint64_t(next);
    }
    return wrong;
}

template <bool stream, class U>
inline void scatter_range(const ZvcDecodeJob& job, int64_t begin, int64_t end) {
    const U* from = static_cast<const U*>(job.values) + job.offsets[begin];
    const U* const stop = static_cast<const U*>(job.values) + job.stored;
    U* out = static_cast<U*>(job.out);
    const int64_t last = std::min(end * kZvcChunk, job.n);
    int64_t i = begin * kZvcChunk;
    for (; i + kWord <= last; i += kWord) {
        const Word word = load_word(job.mask, i);
        from = stop - from >= kWord ? expand<stream, U>(word, from, out + i)
                                    : scalar::expand<false, U>(word, from, out + i);
    }
    if (i < last) {
        U rest[kWord];
        scalar::expand<false, U>(load_last_word(job.mask, i, last - i), from, rest);
        std::memcpy(out + i, rest, size_t(last - i) * sizeof(U));
    }
}

template <class U>
inline void scatter_as(const ZvcDecodeJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) {
        scatter_range<true, U>(job, begin, end);
        fence();
    } else {
        scatter_range<false, U>(job, begin, end);
    }
}

void scatter(const ZvcDecodeJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return scatter_as<uint16_t>(job, begin, end);
        case 4: return scatter_as<uint32_t>(job, begin, end);
        default: return scatter_as<uint64_t>(job, begin, end);
    }
}
