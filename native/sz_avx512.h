// The steps of all 32 coders in two registers. Included by sz_kernels.h, whose encode_step and decode_step say what
// they do, inside the namespace for AVX-512.
//
// A step waits for the one before it: look-ups and products take a few dozen cycles from end to end, in which a processor
// could have begun several of them. So chunks, which do not depend on each other, take their steps in turns: two when
// they are encoded, four when they are decoded. A gather would take longer than all the rest of a step, so tables have no
// more entries than registers hold.

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

// The upper halves of products of 32 bits each.
inline __m512i upper_products(__m512i a, __m512i b) {
    const __m512i even = _mm512_mul_epu32(a, b);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    return _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
}

// Four registers of bytes, of which each lane of `index`, below 256, chooses one.
struct SzBytes {
    explicit SzBytes(const uint8_t* table) {
        for (int i = 0; i < 4; ++i) part[i] = _mm512_load_si512(table + 64 * i);
    }
    __m512i operator[](__m512i index) const {
        constexpr __mmask64 lowest = 0x1111111111111111;
        const __m512i first = _mm512_maskz_permutex2var_epi8(lowest, part[0], index, part[1]);
        const __m512i second = _mm512_maskz_permutex2var_epi8(lowest, part[2], index, part[3]);
        return _mm512_mask_mov_epi32(first, _mm512_test_epi32_mask(index, _mm512_set1_epi32(128)), second);
    }
    __m512i part[4];
};

// The same of 32 numbers of 32 bits.
struct SzNumbers {
    explicit SzNumbers(const uint32_t* table) : part{_mm512_load_si512(table), _mm512_load_si512(table + 16)} {}
    __m512i operator[](__m512i index) const { return _mm512_permutex2var_epi32(part[0], index, part[1]); }
    __m512i part[2];
};

// Which entries are an escape's.
inline __mmask16 escapes_of(__m512i entries) {
    return _mm512_test_epi32_mask(entries, _mm512_set1_epi32(int(kSzEscape)));
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
    const __m512d limit = _mm512_set1_pd(1 << kSzCodeBits);
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

template <bool has_low, int chunks>
inline bool encode_steps_of(const SzSymbols& symbols, int64_t steps, SzEncoding* given) {
    const __m512i half = _mm512_set1_epi32(kSzWindow / 2), window = _mm512_set1_epi32(kSzWindow);
    const __m512i near_half = _mm512_set1_epi32(kSzNear), near_window = _mm512_set1_epi32(2 * kSzNear);
    const __m512i one = _mm512_set1_epi32(1), ones = _mm512_set1_epi32(-1), three_bits = _mm512_set1_epi32(7);
    const __m512i low_mask = _mm512_set1_epi32((1 << symbols.low) - 1);
    const __m128i low = _mm_cvtsi32_si128(symbols.low), high = _mm_cvtsi32_si128(kSzStateBits - symbols.low);
    const __m512i room = _mm512_set1_epi32(kSzStateBits - kSzPrecision), precision = _mm512_set1_epi32(kSzPrecision);
    const __m512i escape = _mm512_set1_epi32(int(kSzEscape));
    const SzBytes near(symbols.near), far(symbols.far);
    const SzNumbers entries(symbols.entries), reciprocals(symbols.reciprocals);
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
        __m512i code[chunks][2], place[chunks][2], entry[chunks][2], reciprocal[chunks][2];
        __m512i any = _mm512_setzero_si512();
        __mmask16 plain[chunks][2];
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c) {
            const int32_t* at = given[c].codes + step * kSzLanes;
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
                code[c][k] = _mm512_loadu_si512(at + 16 * k);
                place[c][k] = has_low ? _mm512_sra_epi32(code[c][k], low) : code[c][k];
                const __m512i index = _mm512_add_epi32(place[c][k], near_half);
                const __mmask16 is_near = _mm512_cmplt_epu32_mask(index, near_window);
                __m512i symbol = near[_mm512_maskz_mov_epi32(is_near, index)];
                if (__builtin_expect(is_near != 0xffff, 0)) {
                    const __m512i other = _mm512_add_epi32(place[c][k], half);
                    const __mmask16 inside = _mm512_cmplt_epu32_mask(other, window);
                    const __m512i found = far[_mm512_srli_epi32(_mm512_maskz_mov_epi32(inside, other), kSzFarWidth)];
                    symbol = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(one, inside, found), is_near, symbol);
                }
                const __mmask16 some = _mm512_test_epi32_mask(code[c][k], code[c][k]);
                symbol = _mm512_maskz_mov_epi32(some, symbol);
                entry[c][k] = entries[symbol];
                reciprocal[c][k] = reciprocals[symbol];
                any = _mm512_or_si512(any, entry[c][k]);
                if (has_low) plain[c][k] = _mm512_mask_testn_epi32_mask(some, entry[c][k], escape);
            }
        }
        if (__builtin_expect(escapes_of(any) != 0, 0)) {
            for (int c = 0; c < chunks; ++c) {
                const int32_t* at = given[c].codes + step * kSzLanes;
                unsigned rest = _mm512_kunpackw(escapes_of(entry[c][1]), escapes_of(entry[c][0]));
                for (; rest != 0; rest &= rest - 1) {
                    std::memcpy(to[c], at + __builtin_ctz(rest), 4);
                    to[c] += 2;
                }
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
            __m512i frequency[2], width[2];
            __mmask16 full[2];
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
                frequency[k] = _mm512_add_epi32(_mm512_srli_epi32(entry[c][k], 24), one);
                width[k] = _mm512_and_si512(_mm512_srli_epi32(entry[c][k], 16), three_bits);
                const __m512i most = _mm512_sllv_epi32(frequency[k], _mm512_sub_epi32(room, width[k]));
                full[k] = _mm512_cmpge_epu32_mask(states[c][k], most);
            }
            to[c] = give(full[0], full[1], states[c], to[c]);
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
                const __m512i state = _mm512_mask_srli_epi32(states[c][k], full[k], states[c][k], 16);
                const __m512i shift = _mm512_and_si512(_mm512_srli_epi32(entry[c][k], 20), _mm512_set1_epi32(15));
                const __m512i product = upper_products(state, reciprocal[c][k]);
                const __m512i quotient = _mm512_srlv_epi32(product, shift);
                // An escape's width is 0, and so is that of the code 0: they have no place.
                const __m512i in_bucket = _mm512_andnot_si512(_mm512_sllv_epi32(ones, width[k]), place[c][k]);
                const __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency[k]));
                const __m512i slot = _mm512_add_epi32(rest, _mm512_maskz_mov_epi16(0x55555555, entry[c][k]));
                const __m512i below = _mm512_add_epi32(slot, _mm512_slli_epi32(in_bucket, kSzPrecision));
                const __m512i above = _mm512_sllv_epi32(quotient, _mm512_add_epi32(width[k], precision));
                states[c][k] = _mm512_add_epi32(above, below);
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

// What codes mean. Where `easy`, a float32 has all digits of the step, and so of a code and an offset, as codes are below
// 2^23. Then a product of these two has all digits in double precision, and a product in single precision is rounded as
// that one is.
struct SzMeaning {
    SzMeaning(double step, double offset)
        : easy(double(float(step)) == step),
          single_step(_mm512_set1_ps(float(step))),
          single_offset(_mm512_set1_ps(float(offset))),
          step(_mm512_set1_pd(step)),
          offset(_mm512_set1_pd(offset)) {}
    bool easy;
    __m512 single_step, single_offset;
    __m512d step, offset;
};

// 16 codes as the numbers that they mean.
template <bool easy>
inline __m512 dequantised(__m512i codes, const SzMeaning& meaning) {
    if (easy) return _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepi32_ps(codes), meaning.single_offset), meaning.single_step);
    const __m512d first = _mm512_cvtepi32_pd(_mm512_castsi512_si256(codes));
    const __m512d second = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(codes, 1));
    const __m256 a = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_add_pd(first, meaning.offset), meaning.step));
    const __m256 b = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_add_pd(second, meaning.offset), meaning.step));
    return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
}

template <bool has_low, bool direct, bool easy, int chunks>
inline bool decode_steps_of(const SzSymbols& symbols, int64_t steps, SzDecoding* given, double step_size,
                            double offset) {
    const __m512i slot_mask = _mm512_set1_epi32(kSzTotal - 1), one = _mm512_set1_epi32(1);
    const __m512i ones = _mm512_set1_epi32(-1), byte = _mm512_set1_epi32(0xff), three_bits = _mm512_set1_epi32(7);
    const __m512i low_mask = _mm512_set1_epi32((1 << symbols.low) - 1);
    const __m128i low = _mm_cvtsi32_si128(symbols.low);
    const SzMeaning meaning(step_size, offset);
    const SzBytes of_slot(symbols.of_slot);
    const SzNumbers entries(symbols.decoding);
    __m512i states[chunks][2];
    const uint16_t* from[chunks];
    for (int c = 0; c < chunks; ++c) {
        for (int k = 0; k < 2; ++k) states[c][k] = _mm512_loadu_si512(given[c].states + 16 * k);
        from[c] = given[c].from;
    }
    for (int64_t step = 0; step < steps; ++step) {
        __m512i code[chunks][2], entry[chunks][2], any = _mm512_setzero_si512();
        __mmask16 plain[chunks][2];
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c)
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
                const __m512i slot = _mm512_and_si512(states[c][k], slot_mask);
                const __m512i symbol = of_slot[slot], found = entries[symbol];
                const __m512i above = _mm512_srli_epi32(states[c][k], kSzPrecision);
                const __m512i width = _mm512_and_si512(_mm512_srli_epi32(found, 16), three_bits);
                const __m512i quotient = _mm512_srlv_epi32(above, width);
                const __m512i most = _mm512_mullo_epi32(_mm512_and_si512(found, byte), quotient);
                const __m512i begin = _mm512_and_si512(_mm512_srli_epi32(found, 8), byte);
                const __m512i place = _mm512_andnot_si512(_mm512_sllv_epi32(ones, width), above);
                states[c][k] = _mm512_add_epi32(_mm512_add_epi32(most, quotient), _mm512_sub_epi32(slot, begin));
                code[c][k] = _mm512_add_epi32(_mm512_srai_epi32(found, 20), place);
                if (has_low) {
                    code[c][k] = _mm512_sll_epi32(code[c][k], low);
                    plain[c][k] = _mm512_cmpgt_epi32_mask(symbol, one);
                }
                entry[c][k] = found;
                any = _mm512_or_si512(any, found);
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
        const int64_t at = step * kSzLanes;
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c)
            for (int k = 0; k < 2; ++k)
                if (direct) _mm512_storeu_ps(given[c].out + at + 16 * k, dequantised<easy>(code[c][k], meaning));
                else _mm512_storeu_si512(given[c].codes + at + 16 * k, code[c][k]);
        if (__builtin_expect(escapes_of(any) == 0, 1)) continue;
        for (int c = 0; c < chunks; ++c) {
            unsigned rest = _mm512_kunpackw(escapes_of(entry[c][1]), escapes_of(entry[c][0]));
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

template <int chunks>
inline bool encode_steps(const SzSymbols& symbols, int64_t steps, SzEncoding* given) {
    return symbols.low ? encode_steps_of<true, chunks>(symbols, steps, given)
                       : encode_steps_of<false, chunks>(symbols, steps, given);
}

template <bool direct, bool easy, int chunks>
inline bool decode_steps_as(const SzSymbols& symbols, int64_t steps, SzDecoding* given, double step, double offset) {
    return symbols.low ? decode_steps_of<true, direct, easy, chunks>(symbols, steps, given, step, offset)
                       : decode_steps_of<false, direct, easy, chunks>(symbols, steps, given, step, offset);
}

template <bool direct, int chunks>
inline bool decode_steps(const SzSymbols& symbols, int64_t steps, SzDecoding* given, double step, double offset) {
    const bool easy = direct && SzMeaning(step, offset).easy;
    return easy ? decode_steps_as<direct, true, chunks>(symbols, steps, given, step, offset)
                : decode_steps_as<direct, false, chunks>(symbols, steps, given, step, offset);
}
