// The steps of all 32 coders in two registers. Included by sz_kernels.h, whose encode_step and decode_step say what
// they do, inside the namespace for AVX-512.
//
// A step waits for the one before it: a gather and a product, or a division, take a few dozen cycles from end to end,
// in which a processor could have begun several of them. So chunks, which do not depend on each other, take their steps
// in turns: two when they are encoded, four when they are decoded. A gather takes longer than all the rest of an encoder's step, so small tables are kept in registers.

// Writes the lower half of the states in the mask to `to`, in order, and over up to 31 words more.
inline uint16_t* give(__mmask16 first, __mmask16 second, const __m512i* states, uint16_t* to) {
    const __mmask32 mask = _mm512_kunpackw(second, first);
    const __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(states[0])),
                                             _mm512_cvtepi32_epi16(states[1]), 1);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(mask, words));
    return to + __builtin_popcount(mask);
}

// The inverse: the next words to the states that need one.
inline const uint16_t* take(__m512i* states, const uint16_t* begin, const uint16_t* from) {
    const __m512i least = _mm512_set1_epi32(int(kSzLeast));
    const __mmask16 first = _mm512_cmplt_epu32_mask(states[0], least);
    const __mmask16 second = _mm512_cmplt_epu32_mask(states[1], least);
    const __mmask32 mask = _mm512_kunpackw(second, first);
    const int count = __builtin_popcount(mask);
    if (from - begin < count) return nullptr;
    from -= count;
    const __m512i packed = _mm512_maskz_loadu_epi16(_bzhi_u32(~0u, unsigned(count)), from);
    const __m512i words = _mm512_maskz_expand_epi16(mask, packed);
    states[0] = _mm512_mask_or_epi32(states[0], first, _mm512_slli_epi32(states[0], 16),
                                     _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)));
    states[1] = _mm512_mask_or_epi32(states[1], second, _mm512_slli_epi32(states[1], 16),
                                     _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)));
    return from;
}

// state / frequency * 4,096 + state % frequency, where the quotient is below 2^20.
//
// The processor's reciprocal is off by its share of 2^-14 at most, and after a step of Newton's by 2^-28. That step
// aims at less by a share of 2^-21, so that with four roundings, of 2^-24 each, the estimate is never above the
// quotient, and less than 1 below it. So its whole part is the quotient's or one less.
inline __m512i divided(__m512i state, __m512i frequency) {
    const __m512 divisor = _mm512_cvtepi32_ps(frequency), near = _mm512_rcp14_ps(divisor);
    const __m512 reciprocal =
        _mm512_mul_ps(near, _mm512_fnmadd_ps(divisor, near, _mm512_set1_ps(2.0f - 0x1p-21f)));
    const __m512i quotient = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps(state), reciprocal));
    const __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency));
    const __m512i found = _mm512_add_epi32(_mm512_slli_epi32(quotient, kSzPrecision), rest);
    const __mmask16 more = _mm512_cmpge_epi32_mask(rest, frequency);
    return _mm512_mask_add_epi32(found, more, found, _mm512_sub_epi32(_mm512_set1_epi32(kSzTotal), frequency));
}

// What quantise_one needs, in registers.
//
// Where `easy`, 16 numbers of which none is near the middle between two steps, or more than 512 steps from zero, become
// codes in single precision. The product with the inverse and the difference are off by less than 2^-13 of a step then,
// and a number whose rest is below 1/2 - 2^-12 steps has the same nearest multiple. What that decodes to is rounded by
// less than 2^-14 of a step, which leaves it within the bound if the bound is half a step or more. Of normal numbers at
// most one group of 16 in a hundred has a number near the middle.
struct SzGrid {
    explicit SzGrid(const SzQuantiseJob& job)
        : easy(job.step * 0.5 <= job.bound && job.inverse > 1e-30 && job.inverse < 1e30),
          single_inverse(_mm512_set1_ps(float(job.inverse))),
          single_offset(_mm512_set1_ps(float(job.offset))),
          inverse(_mm512_set1_pd(job.inverse)),
          offset(_mm512_set1_pd(job.offset)),
          step(_mm512_set1_pd(job.step)),
          bound(_mm512_set1_pd(job.bound)) {}
    bool easy;
    __m512 single_inverse, single_offset;
    __m512d inverse, offset, step, bound;
};

// The codes of 16 numbers in single precision. False where that is not sure to be right.
inline bool easily_quantised(const SzGrid& grid, __m512 values, __m512i& codes) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512 product = _mm512_mul_ps(values, grid.single_inverse);
    const __m512 scaled = _mm512_sub_ps(product, grid.single_offset), whole = _mm512_roundscale_ps(scaled, nearest);
    const __m512 rest = _mm512_abs_ps(_mm512_sub_ps(scaled, whole));
    const __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(product), _mm512_set1_ps(512.0f), _CMP_LT_OQ);
    const __mmask16 sure = _mm512_mask_cmp_ps_mask(small, rest, _mm512_set1_ps(0.5f - 0x1p-12f), _CMP_LT_OQ);
    codes = _mm512_cvtps_epi32(whole);
    return sure == 0xffff;
}

// As quantise_one, of 16 numbers. `outliers` are marked by bits.
inline __m512i quantised(const SzGrid& grid, __m512 values, __mmask16& outliers) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512d limit = _mm512_set1_pd(1 << 27);
    const __m256 halves[2] = {_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1)};
    __m256i code[2];
    __mmask8 outlier[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
        const __m512d value = _mm512_cvtps_pd(halves[k]);
        const __m512d scaled = _mm512_sub_pd(_mm512_mul_pd(value, grid.inverse), grid.offset);
        const __mmask8 near = _mm512_cmp_pd_mask(_mm512_abs_pd(scaled), limit, _CMP_LT_OQ);
        const __m512d whole = _mm512_maskz_roundscale_pd(near, scaled, nearest);
        const __m512d decoded = _mm512_mul_pd(_mm512_add_pd(whole, grid.offset), grid.step);
        const __m512d made = _mm512_cvtps_pd(_mm512_cvtpd_ps(decoded));
        outlier[k] = _mm512_cmp_pd_mask(_mm512_abs_pd(_mm512_sub_pd(value, made)), grid.bound, _CMP_NLE_UQ);
        code[k] = _mm512_maskz_cvtpd_epi32(__mmask8(~outlier[k]), whole);
    }
    outliers = _mm512_kunpackb(outlier[1], outlier[0]);
    return _mm512_inserti64x4(_mm512_castsi256_si512(code[0]), code[1], 1);
}

// The entries of 32 symbols, out of `tables` times 64 of them.
template <int tables>
inline __m512i entries_of(const uint16_t* table, __m512i symbols) {
    __m512i found[tables];
#pragma GCC unroll 4
    for (int t = 0; t < tables; ++t)
        found[t] = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64 * t), symbols,
                                             _mm512_load_si512(table + 64 * t + 32));
    if (tables == 1) return found[0];
    const __mmask32 odd = _mm512_test_epi16_mask(symbols, _mm512_set1_epi16(64));
    const __m512i first = _mm512_mask_mov_epi16(found[0], odd, found[1 % tables]);
    if (tables == 2) return first;
    const __mmask32 second = _mm512_test_epi16_mask(symbols, _mm512_set1_epi16(128));
    return _mm512_mask_mov_epi16(first, second, _mm512_mask_mov_epi16(found[2 % tables], odd, found[3 % tables]));
}

// What a step needs of its 32 symbols, in two registers.
struct SzEntries {
    __m512i frequency[2], begin[2];
    __mmask32 escapes;
};

// `tables` is 0 where there are too many symbols for registers.
template <int tables>
inline SzEntries look_up(const SzSymbols& symbols, const __m512i* symbol) {
    SzEntries entries;
    if constexpr (tables > 0) {
        const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(symbol[0])),
                                               _mm512_cvtepi32_epi16(symbol[1]), 1);
        const __m512i frequencies = entries_of<tables>(symbols.frequencies, all);
        const __m512i begins = entries_of<tables>(symbols.begins, all);
        // No other symbol's slots begin where the escape's do.
        entries.escapes = _mm512_cmpeq_epi16_mask(begins, _mm512_set1_epi16(int16_t(symbols.escape_begin)));
        entries.frequency[0] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(frequencies));
        entries.frequency[1] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(frequencies, 1));
        entries.begin[0] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(begins));
        entries.begin[1] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(begins, 1));
        return entries;
    }
    const __m512i escape = _mm512_set1_epi32(int(symbols.entries[1]));
    __mmask16 escapes[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
        __m512i entry = _mm512_i32gather_epi32(symbol[k], symbols.entries, 4);
        entry = _mm512_mask_mov_epi32(entry, _mm512_testn_epi32_mask(entry, entry), escape);
        escapes[k] = _mm512_cmpeq_epi32_mask(entry, escape);
        entries.frequency[k] = _mm512_srli_epi32(entry, 16);
        entries.begin[k] = _mm512_and_si512(entry, _mm512_set1_epi32(0xffff));
    }
    entries.escapes = _mm512_kunpackw(escapes[1], escapes[0]);
    return entries;
}

template <bool has_low, int tables, int chunks>
inline bool encode_steps_of(const SzSymbols& symbols, int64_t steps, SzEncoding* given) {
    const __m512i base = _mm512_set1_epi32(symbols.base), window = _mm512_set1_epi32(symbols.count - 2);
    const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2);
    const __m512i low_mask = _mm512_set1_epi32((1 << symbols.low) - 1);
    const __m128i low = _mm_cvtsi32_si128(symbols.low), high = _mm_cvtsi32_si128(32 - symbols.low);
    __m512i states[chunks][2];
    uint16_t* to[chunks];
    for (int c = 0; c < chunks; ++c) {
        for (int k = 0; k < 2; ++k) states[c][k] = _mm512_loadu_si512(given[c].states + 16 * k);
        to[c] = given[c].to;
    }
    bool fits = true;
    for (int64_t step = steps - 1; step >= 0; --step) {
        for (int c = 0; c < chunks; ++c) fits &= to[c] <= given[c].limit;
        if (!fits) return false;
        SzEntries entries[chunks];
        __m512i code[chunks][2];
        __mmask16 plain[chunks][2];
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c) {
            const int32_t* at = given[c].codes + step * kSzLanes;
            __m512i symbol[2];
            __mmask16 some[2];
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
                code[c][k] = _mm512_loadu_si512(at + 16 * k);
                const __m512i high_bits = has_low ? _mm512_sra_epi32(code[c][k], low) : code[c][k];
                const __m512i index = _mm512_sub_epi32(high_bits, base);
                const __mmask16 inside = _mm512_cmplt_epu32_mask(index, window);
                some[k] = _mm512_test_epi32_mask(code[c][k], code[c][k]);
                symbol[k] = _mm512_maskz_mov_epi32(some[k], _mm512_mask_add_epi32(one, inside, index, two));
            }
            entries[c] = look_up<tables>(symbols, symbol);
            plain[c][0] = __mmask16(some[0] & ~entries[c].escapes);
            plain[c][1] = __mmask16(some[1] & ~(entries[c].escapes >> 16));
            for (unsigned rest = entries[c].escapes; __builtin_expect(rest != 0, 0); rest &= rest - 1) {
                std::memcpy(to[c], at + __builtin_ctz(rest), 4);
                to[c] += 2;
            }
        }
        if (has_low) {
#pragma GCC unroll 4
            for (int c = 0; c < chunks; ++c) {
                __mmask16 full[2];
                for (int k = 0; k < 2; ++k) {
                    const __m512i above = _mm512_srl_epi32(states[c][k], high);
                    full[k] = _mm512_mask_test_epi32_mask(plain[c][k], above, above);
                }
                to[c] = give(full[0], full[1], states[c], to[c]);
                for (int k = 0; k < 2; ++k) {
                    states[c][k] = _mm512_mask_srli_epi32(states[c][k], full[k], states[c][k], 16);
                    states[c][k] = _mm512_mask_or_epi32(states[c][k], plain[c][k], _mm512_sll_epi32(states[c][k], low),
                                                        _mm512_and_si512(code[c][k], low_mask));
                }
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c) {
            const __m512i* frequency = entries[c].frequency;
            __mmask16 full[2];
            for (int k = 0; k < 2; ++k)
                full[k] = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(states[c][k], 32 - kSzPrecision), frequency[k]);
            to[c] = give(full[0], full[1], states[c], to[c]);
            for (int k = 0; k < 2; ++k) {
                states[c][k] = _mm512_mask_srli_epi32(states[c][k], full[k], states[c][k], 16);
                states[c][k] = _mm512_add_epi32(divided(states[c][k], frequency[k]), entries[c].begin[k]);
            }
        }
    }
    for (int c = 0; c < chunks; ++c) {
        for (int k = 0; k < 2; ++k) _mm512_storeu_si512(given[c].states + 16 * k, states[c][k]);
        given[c].to = to[c];
        fits &= to[c] <= given[c].limit;
    }
    return fits;
}

// 16 codes as the numbers that they mean.
inline __m512 dequantised(__m512i codes, __m512d step, __m512d offset) {
    const __m512d first = _mm512_cvtepi32_pd(_mm512_castsi512_si256(codes));
    const __m512d second = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(codes, 1));
    const __m256 a = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_add_pd(first, offset), step));
    const __m256 b = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_add_pd(second, offset), step));
    return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
}

template <bool packed, bool has_low, bool direct, int chunks>
inline bool decode_steps_of(const SzSymbols& symbols, int64_t steps, SzDecoding* given, double step_size,
                            double offset) {
    const __m512i slot_mask = _mm512_set1_epi32(kSzTotal - 1), one = _mm512_set1_epi32(1);
    const __m512i field_mask = _mm512_set1_epi32((1 << symbols.field) - 1);
    const __m128i field = _mm_cvtsi32_si128(symbols.field), two_fields = _mm_cvtsi32_si128(2 * symbols.field);
    const __m512i escape_begin = _mm512_set1_epi32(int(symbols.escape_begin));
    const __m512i escape_size = _mm512_set1_epi32(int(symbols.escape_size));
    const __m512i escape_end = _mm512_add_epi32(escape_begin, escape_size);
    const __m512i low_mask = _mm512_set1_epi32((1 << symbols.low) - 1);
    const __m128i low = _mm_cvtsi32_si128(symbols.low);
    const __m512d factor = _mm512_set1_pd(step_size), added = _mm512_set1_pd(offset);
    __m512i states[chunks][2];
    const uint16_t* from[chunks];
    for (int c = 0; c < chunks; ++c) {
        for (int k = 0; k < 2; ++k) states[c][k] = _mm512_loadu_si512(given[c].states + 16 * k);
        from[c] = given[c].from;
    }
    for (int64_t step = 0; step < steps; ++step) {
        __m512i slot[chunks][2], code[chunks][2];
        __mmask16 plain[chunks][2], escapes[chunks][2];
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c)
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
                slot[c][k] = _mm512_and_si512(states[c][k], slot_mask);
                const __m512i found = _mm512_i32gather_epi32(slot[c][k], symbols.slots, 4);
                const __m512i frequency = _mm512_add_epi32(_mm512_and_si512(found, field_mask), one);
                const __m512i place = _mm512_and_si512(_mm512_srl_epi32(found, field), field_mask);
                const __m512i quotient = _mm512_srli_epi32(states[c][k], kSzPrecision);
                states[c][k] = _mm512_add_epi32(_mm512_mullo_epi32(frequency, quotient), place);
                if (!packed) code[c][k] = _mm512_i32gather_epi32(slot[c][k], symbols.codes, 4);
                else code[c][k] = _mm512_sra_epi32(found, two_fields);
                if (packed && has_low) code[c][k] = _mm512_sll_epi32(code[c][k], low);
                escapes[c][k] = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(slot[c][k], escape_begin), escape_size);
                plain[c][k] = _mm512_cmpge_epu32_mask(slot[c][k], escape_end);
            }
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c) {
            from[c] = take(states[c], given[c].begin, from[c]);
            if (from[c] == nullptr) return false;
        }
        if (has_low) {
#pragma GCC unroll 4
            for (int c = 0; c < chunks; ++c) {
                for (int k = 0; k < 2; ++k) {
                    const __m512i bits = _mm512_and_si512(states[c][k], low_mask);
                    code[c][k] = _mm512_mask_or_epi32(code[c][k], plain[c][k], code[c][k], bits);
                    states[c][k] = _mm512_mask_srl_epi32(states[c][k], plain[c][k], states[c][k], low);
                }
                from[c] = take(states[c], given[c].begin, from[c]);
                if (from[c] == nullptr) return false;
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c) {
            const int64_t at = step * kSzLanes;
            unsigned rest = _mm512_kunpackw(escapes[c][1], escapes[c][0]);
            for (int k = 0; k < 2; ++k)
                if (direct) _mm512_storeu_ps(given[c].out + at + 16 * k, dequantised(code[c][k], factor, added));
                else _mm512_storeu_si512(given[c].codes + at + 16 * k, code[c][k]);
            if (__builtin_expect(rest == 0, 1)) continue;
            const int words = 2 * __builtin_popcount(rest);
            if (from[c] - given[c].begin < words) return false;
            from[c] -= words;
            for (const uint16_t* next = from[c]; rest != 0; rest &= rest - 1, next += 2) {
                int32_t escaped;
                std::memcpy(&escaped, next, 4);
                const int64_t i = at + __builtin_ctz(rest);
                if (direct) given[c].out[i] = float((double(escaped) + offset) * step_size);
                else given[c].codes[i] = escaped;
            }
        }
    }
    for (int c = 0; c < chunks; ++c) {
        for (int k = 0; k < 2; ++k) _mm512_storeu_si512(given[c].states + 16 * k, states[c][k]);
        given[c].from = from[c];
    }
    return true;
}

template <bool has_low, int chunks>
inline bool encode_steps_with(const SzSymbols& symbols, int64_t steps, SzEncoding* given) {
    if (symbols.count <= 64) return encode_steps_of<has_low, 1, chunks>(symbols, steps, given);
    if (symbols.count <= 128) return encode_steps_of<has_low, 2, chunks>(symbols, steps, given);
    if (symbols.count <= kSzFew) return encode_steps_of<has_low, 4, chunks>(symbols, steps, given);
    return encode_steps_of<has_low, 0, chunks>(symbols, steps, given);
}

template <int chunks>
inline bool encode_steps(const SzSymbols& symbols, int64_t steps, SzEncoding* given) {
    const auto encode = symbols.low ? encode_steps_with<true, chunks> : encode_steps_with<false, chunks>;
    return encode(symbols, steps, given);
}

template <bool direct, int chunks>
inline bool decode_steps(const SzSymbols& symbols, int64_t steps, SzDecoding* given, double step, double offset) {
    const auto decode =
        symbols.low ? (symbols.packed ? decode_steps_of<true, true, direct, chunks>
                                      : decode_steps_of<false, true, direct, chunks>)
                    : (symbols.packed ? decode_steps_of<true, false, direct, chunks>
                                      : decode_steps_of<false, false, direct, chunks>);
    return decode(symbols, steps, given, step, offset);
}
