// Compressed sparse rows. Compiled once per instruction set by foreach_isa.h.

#include "lines.h"

// First pass: in rows[r + 1] how many elements of row r are not zero.
template <class U>
inline void count_rows_as(const CsrEncodeJob& job, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const U* x = static_cast<const U*>(job.x) + row * kCsrRow;
        const int64_t size = std::min(kCsrRow, job.n - row * kCsrRow);
        int64_t i = 0, count = 0;
        for (; i + kWord <= size; i += kWord) {
            prefetch_ahead(x + i, kWord);
            count += __builtin_popcountll(differs<U>(x + i, 0));
        }
        for (; i < size; ++i) count += x[i] != 0;
        job.rows[row + 1] = int32_t(count);
    }
}

void count_rows(const CsrEncodeJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return count_rows_as<uint16_t>(job, begin, end);
        case 4: return count_rows_as<uint32_t>(job, begin, end);
        default: return count_rows_as<uint64_t>(job, begin, end);
    }
}

// Writes the columns of the set bits to `to`, in order, `first` being that of bit 0; returns the end of what it wrote.
// Stores eight bytes at a time: 64 columns must fit at `to` however few bits are set.
inline uint8_t* place(Word word, int first, uint8_t* to) {
    constexpr uint64_t ones = 0x0101010101010101;
    for (int i = 0; i < kWord; i += 8) {
        const unsigned part = unsigned(word >> i) & 0xff;
        const uint64_t columns = kPermutations.compress[part] + uint64_t(first + i) * ones;  // no byte exceeds 255
        std::memcpy(to, &columns, sizeof columns);
        to += __builtin_popcount(part);
    }
    return to;
}

constexpr int64_t kFlushed = 16;  // rows between two flushes: what Lines has room for

// Second pass: the columns and values of rows [begin, end).
template <bool stream_columns, bool stream_values, class U>
inline void gather_rows_range(const CsrEncodeJob& job, int64_t begin, int64_t end) {
    static_assert(kFlushed * kCsrRow <= kZvcChunk, "Lines has room for a chunk");
    Lines<uint8_t> columns(job.columns + job.rows[begin]);
    Lines<U> values(static_cast<U*>(job.values) + job.rows[begin]);
    for (int64_t group = begin; group < end; group += kFlushed) {
        uint8_t* column = columns.end();
        U* value = values.end();
        for (int64_t row = group; row < std::min(group + kFlushed, end); ++row) {
            const U* x = static_cast<const U*>(job.x) + row * kCsrRow;
            const int64_t size = std::min(kCsrRow, job.n - row * kCsrRow);
            int64_t i = 0;
            for (; i + kWord <= size; i += kWord) {
                prefetch_ahead(x + i, kWord);
                column = place(compress_nonzero<U>(x + i, value), int(i), column);
            }
            for (; i < size; ++i) {
                if (x[i] == 0) continue;
                *column++ = uint8_t(i);
                *value++ = x[i];
            }
        }
        columns.end() = column;
        columns.template flush<stream_columns>();
        values.end() = value;
        values.template flush<stream_values>();
    }
    columns.finish();
    values.finish();
}

template <class U>
inline void gather_rows_as(const CsrEncodeJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream_columns) {  // then there are even more bytes of values
        gather_rows_range<true, true, U>(job, begin, end);
        fence();
    } else if (kStreams && job.stream_values) {
        gather_rows_range<false, true, U>(job, begin, end);
        fence();
    } else {
        gather_rows_range<false, false, U>(job, begin, end);
    }
}

void gather_rows(const CsrEncodeJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return gather_rows_as<uint16_t>(job, begin, end);
        case 4: return gather_rows_as<uint32_t>(job, begin, end);
        default: return gather_rows_as<uint64_t>(job, begin, end);
    }
}

// Whether `count` columns do not rise, of which `readable` bytes may be read.
inline bool falls(const uint8_t* columns, int64_t count, int64_t readable) {
    constexpr int64_t step = 32;  // a fixed number, so that it becomes one comparison of registers
    uint8_t found = 0;
    int64_t i = 0;
    for (; i + 1 < count && i + step < readable; i += step) {
        const uint8_t pairs = uint8_t(std::min(count - 1 - i, step));
        for (uint8_t k = 0; k < step; ++k) found |= uint8_t(columns[i + k] >= columns[i + k + 1]) & uint8_t(k < pairs);
    }
    for (; i + 1 < count; ++i) found |= columns[i] >= columns[i + 1];
    return found != 0;
}

// How many of the rows [begin, end) have pointers that fall or leave the planes, columns that do not rise, or one past
// the end of the tensor. With none, the first pointer 0 and the last one `stored`, all rows are right.
int64_t wrong_rows(const CsrDecodeJob& job, int64_t begin, int64_t end) {
    int64_t wrong = 0;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t first = job.rows[row], last = job.rows[row + 1];
        if (first < 0 || last < first || last > job.stored) {
            ++wrong;
            continue;
        }
        const uint8_t* columns = job.columns + first;
        const int64_t count = last - first, size = std::min(kCsrRow, job.n - row * kCsrRow);
        wrong += falls(columns, count, job.stored - first) || (count > 0 && columns[count - 1] >= size);
    }
    return wrong;
}

template <class U>
inline void scatter_row(const CsrDecodeJob& job, int64_t row, U* out) {
    const int64_t first = job.rows[row], count = job.rows[row + 1] - first;
    const U* values = static_cast<const U*>(job.values) + first;
    const uint8_t* columns = job.columns + first;
    for (int64_t i = 0; i < count; ++i) out[columns[i]] = values[i];
}

// Rows are put together in the first-level cache, 16 KiB at a time: a line is then loaded long after the last store
// into it, which the processor could not forward to a load of more bytes.
template <class U>
inline void scatter_rows_past_caches(const CsrDecodeJob& job, int64_t begin, int64_t end) {
    constexpr int64_t line = 64 / sizeof(U), kTogether = (16 << 10) / (kCsrRow * sizeof(U));
    alignas(64) U together[kTogether * kCsrRow];
    U* out = static_cast<U*>(job.out);
    for (int64_t group = begin; group < end; group += kTogether) {
        const int64_t stop = std::min(group + kTogether, end);
        const int64_t size = std::min(stop * kCsrRow, job.n) - group * kCsrRow;
        std::memset(together, 0, sizeof together);
        for (int64_t row = group; row < stop; ++row) scatter_row<U>(job, row, together + (row - group) * kCsrRow);
        U* to = out + group * kCsrRow;
        int64_t i = 0;
        for (; i + line <= size; i += line) copy_line<true>(together + i, to + i);
        std::memcpy(to + i, together + i, size_t(size - i) * sizeof(U));
    }
    fence();
}

template <class U>
inline void scatter_rows_as(const CsrDecodeJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) return scatter_rows_past_caches<U>(job, begin, end);
    U* out = static_cast<U*>(job.out);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t size = std::min(kCsrRow, job.n - row * kCsrRow);
        std::memset(out + row * kCsrRow, 0, size_t(size) * sizeof(U));
        scatter_row<U>(job, row, out + row * kCsrRow);
    }
}

void scatter_rows(const CsrDecodeJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return scatter_rows_as<uint16_t>(job, begin, end);
        case 4: return scatter_rows_as<uint32_t>(job, begin, end);
        default: return scatter_rows_as<uint64_t>(job, begin, end);
    }
}
