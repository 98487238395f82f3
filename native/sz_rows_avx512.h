// Whole rows from numbers to predicted codes and back, in registers. Included by sz_kernels.h, whose quantise, predict,
// restore and dequantise say what they do, inside the namespace for AVX-512.
//
// A pass over codes for each axis, and another one for the numbers, would take as long as the coders. Here an element
// is loaded and stored once. Of the row above only what this row's elements are subtracted from or added to is kept.

constexpr int64_t kSzShortestRow = 6;  // shorter rows leave most of a register idle

inline bool goes_by_rows(int axes, const SzBlocks& blocks) { return (axes & 3) != 0 && blocks.row >= kSzShortestRow; }

inline __mmask16 first_of(int64_t count) { return __mmask16(count >= 16 ? 0xffff : (1 << count) - 1); }

// Quantises n numbers from `begin` on, and subtracts neighbours along the first two axes where `left` and `up` say so.
// Up to 15 elements behind the codes are written over, and the same of `above`. Marks outliers, which are 0 before.
// Returns how many there are.
template <bool left, bool up>
inline int64_t quantise_rows_as(const SzQuantiseJob& job, int64_t begin, int64_t n, const SzBlocks& blocks,
                                int32_t* codes, uint8_t* outliers, int32_t* above) {
    const SzGrid grid(job);
    const float* from = static_cast<const float*>(job.x) + begin;
    int64_t count = 0;
    for (int64_t row = 0, in_plane = 0; row < n; row += blocks.row) {
        const int64_t length = std::min(blocks.row, n - row);
        if (up && in_plane == 0) std::memset(above, 0, size_t(length) * sizeof *above);
        __m512i before = _mm512_setzero_si512();
        for (int64_t i = 0; i < length; i += 16) {
            const __m512 values = row + i + 16 <= n ? _mm512_loadu_ps(from + row + i)
                                                    : _mm512_maskz_loadu_ps(first_of(n - row - i), from + row + i);
            __m512i code;
            if (!grid.easy || __builtin_expect(!easily_quantised(grid, values, code), 0)) {
                __mmask16 marks;
                code = quantised(grid, values, marks);
                marks &= first_of(length - i);
                count += __builtin_popcount(marks);
                for (unsigned rest = marks; rest != 0; rest &= rest - 1) outliers[row + i + __builtin_ctz(rest)] = 1;
            }
            if (left) {
                const __m512i whole = code;
                code = _mm512_sub_epi32(whole, _mm512_alignr_epi32(whole, before, 15));
                before = whole;
            }
            if (up) {
                const __m512i minuend = code;
                code = _mm512_sub_epi32(minuend, _mm512_loadu_si512(above + i));
                _mm512_storeu_si512(above + i, minuend);
            }
            _mm512_storeu_si512(codes + row + i, code);
        }
        in_plane = in_plane + blocks.row == blocks.plane ? 0 : in_plane + blocks.row;
    }
    return count;
}

inline int64_t quantise_rows(const SzQuantiseJob& job, int64_t begin, int64_t n, int axes, const SzBlocks& blocks,
                             int32_t* codes, uint8_t* outliers, int32_t* above) {
    const auto quantise = axes & 1 ? (axes & 2 ? quantise_rows_as<true, true> : quantise_rows_as<true, false>)
                                   : quantise_rows_as<false, true>;
    return quantise(job, begin, n, blocks, codes, outliers, above);
}

// The sums of lanes 0 to k in lane k.
inline __m512i running_sums(__m512i v) {
    // First within four lanes each, then the last sum of the four lanes before, and of the eight lanes before those.
    const __m512i last_before = _mm512_set_epi32(11, 11, 11, 11, 7, 7, 7, 7, 3, 3, 3, 3, 0, 0, 0, 0);
    const __m512i of_half = _mm512_set1_epi32(7), of_first = _mm512_set1_epi32(3);
    const __m512i before = _mm512_mask_mov_epi32(of_half, 0x0fff, of_first);
    v = _mm512_add_epi32(v, _mm512_bslli_epi128(v, 4));
    v = _mm512_add_epi32(v, _mm512_bslli_epi128(v, 8));
    v = _mm512_add_epi32(v, _mm512_maskz_permutexvar_epi32(0xfff0, last_before, v));
    return _mm512_add_epi32(v, _mm512_maskz_permutexvar_epi32(0xff00, before, v));
}

// The inverse, of the rows from `row` on that have all of their codes among the first `ready` of n. Up to 15 codes
// behind them are read. Returns where the first row begins that is left.
template <bool left, bool up, bool easy>
inline int64_t restore_rows_as(const int32_t* codes, int64_t row, int64_t ready, int64_t n, const SzBlocks& blocks,
                               double step, double offset, int32_t* above, float* out) {
    const SzMeaning meaning(step, offset);
    const __m512i last = _mm512_set1_epi32(15);
    int64_t in_plane = row % blocks.plane;
    while (row < ready) {
        const int64_t length = std::min(blocks.row, n - row);
        if (row + length > ready) break;
        if (up && in_plane == 0) std::memset(above, 0, size_t(length) * sizeof *above);
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < length; i += 16) {
            __m512i code = _mm512_loadu_si512(codes + row + i);
            if (left) {
                const __m512i sums = running_sums(code);
                code = _mm512_add_epi32(sums, sum);
                sum = _mm512_add_epi32(sum, _mm512_permutexvar_epi32(last, sums));  // the next one waits for this addition only
            }
            if (up) {
                code = _mm512_add_epi32(code, _mm512_loadu_si512(above + i));
                _mm512_storeu_si512(above + i, code);
            }
            const __m512 values = dequantised<easy>(code, meaning);
            if (__builtin_expect(row + i + 16 <= n, 1)) _mm512_storeu_ps(out + row + i, values);
            else _mm512_mask_storeu_ps(out + row + i, first_of(length - i), values);
        }
        row += length;
        in_plane = in_plane + blocks.row == blocks.plane ? 0 : in_plane + blocks.row;
    }
    return row;
}

template <bool easy>
inline auto restoring(int axes) {
    return axes & 1 ? (axes & 2 ? restore_rows_as<true, true, easy> : restore_rows_as<true, false, easy>)
                    : restore_rows_as<false, true, easy>;
}

inline int64_t restore_rows(const int32_t* codes, int64_t row, int64_t ready, int64_t n, int axes,
                            const SzBlocks& blocks, double step, double offset, int32_t* above, float* out) {
    const auto restore = SzMeaning(step, offset).easy ? restoring<true>(axes) : restoring<false>(axes);
    return restore(codes, row, ready, n, blocks, step, offset, above, out);
}
