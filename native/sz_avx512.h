// The steps of all 32 coders in two registers. Included by sz_kernels.h, whose encode_step and decode_step say what they
// do, inside the namespace for AVX-512.

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
inline __m512i divided(__m512i state, __m512i frequency) {
    const __m512 estimate = _mm512_div_ps(_mm512_cvtepu32_ps(state), _mm512_cvtepi32_ps(frequency));
    __m512i quotient = _mm512_cvttps_epi32(estimate);  // or one more or less: the estimate is off by less than 1/8
    __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency));
    const __m512i one = _mm512_set1_epi32(1);
    const __mmask16 less = _mm512_movepi32_mask(rest);
    quotient = _mm512_mask_sub_epi32(quotient, less, quotient, one);
    rest = _mm512_mask_add_epi32(rest, less, rest, frequency);
    const __mmask16 more = _mm512_cmpge_epi32_mask(rest, frequency);
    quotient = _mm512_mask_add_epi32(quotient, more, quotient, one);
    rest = _mm512_mask_sub_epi32(rest, more, rest, frequency);
    return _mm512_add_epi32(_mm512_slli_epi32(quotient, kSzPrecision), rest);
}

template <bool has_low>
inline uint16_t* encode_steps_of(const SzSymbols& symbols, const int32_t* codes, int64_t steps, uint32_t* held,
                                 uint16_t* to, const uint16_t* limit) {
    const __m512i base = _mm512_set1_epi32(symbols.base), window = _mm512_set1_epi32(symbols.count - 2);
    const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2), zero = _mm512_setzero_si512();
    const __m512i escape = _mm512_set1_epi32(int(symbols.entries[1])), half = _mm512_set1_epi32(0xffff);
    const __m512i low_mask = _mm512_set1_epi32((1 << symbols.low) - 1);
    const __m128i low = _mm_cvtsi32_si128(symbols.low), high = _mm_cvtsi32_si128(32 - symbols.low);
    __m512i states[2] = {_mm512_loadu_si512(held), _mm512_loadu_si512(held + 16)};
    for (int64_t step = steps - 1; step >= 0 && to <= limit; --step) {
        const int32_t* at = codes + step * kSzLanes;
        __m512i entry[2], code[2];
        __mmask16 escapes[2], plain[2];
        for (int k = 0; k < 2; ++k) {
            code[k] = _mm512_loadu_si512(at + 16 * k);
            const __m512i index = _mm512_sub_epi32(_mm512_sra_epi32(code[k], low), base);
            const __mmask16 inside = _mm512_cmplt_epu32_mask(index, window), some = _mm512_test_epi32_mask(code[k], code[k]);
            const __m512i symbol = _mm512_maskz_mov_epi32(some, _mm512_mask_add_epi32(one, inside, index, two));
            entry[k] = _mm512_i32gather_epi32(symbol, symbols.entries, 4);
            entry[k] = _mm512_mask_mov_epi32(entry[k], _mm512_cmpeq_epi32_mask(entry[k], zero), escape);
            escapes[k] = _mm512_cmpeq_epi32_mask(entry[k], escape);
            plain[k] = some & ~escapes[k];
        }
        for (unsigned rest = _mm512_kunpackw(escapes[1], escapes[0]); rest != 0; rest &= rest - 1) {
            std::memcpy(to, at + __builtin_ctz(rest), 4);
            to += 2;
        }
        if (has_low) {
            __mmask16 full[2];
            for (int k = 0; k < 2; ++k)
                full[k] = _mm512_mask_test_epi32_mask(plain[k], _mm512_srl_epi32(states[k], high),
                                                      _mm512_srl_epi32(states[k], high));
            to = give(full[0], full[1], states, to);
            for (int k = 0; k < 2; ++k) {
                states[k] = _mm512_mask_srli_epi32(states[k], full[k], states[k], 16);
                states[k] = _mm512_mask_or_epi32(states[k], plain[k], _mm512_sll_epi32(states[k], low),
                                                 _mm512_and_si512(code[k], low_mask));
            }
        }
        __m512i frequency[2];
        __mmask16 full[2];
        for (int k = 0; k < 2; ++k) {
            frequency[k] = _mm512_srli_epi32(entry[k], 16);
            full[k] = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(states[k], 32 - kSzPrecision), frequency[k]);
        }
        to = give(full[0], full[1], states, to);
        for (int k = 0; k < 2; ++k) {
            states[k] = _mm512_mask_srli_epi32(states[k], full[k], states[k], 16);
            states[k] = _mm512_add_epi32(divided(states[k], frequency[k]), _mm512_and_si512(entry[k], half));
        }
    }
    _mm512_storeu_si512(held, states[0]);
    _mm512_storeu_si512(held + 16, states[1]);
    return to <= limit ? to : nullptr;
}

template <bool narrow, bool has_low>
inline const uint16_t* decode_steps_of(const SzSymbols& symbols, int32_t* codes, int64_t steps, uint32_t* held,
                                       const uint16_t* begin, const uint16_t* from) {
    const __m512i slot_mask = _mm512_set1_epi32(kSzTotal - 1), one = _mm512_set1_epi32(1);
    const __m512i escape_begin = _mm512_set1_epi32(int(symbols.escape_begin));
    const __m512i escape_size = _mm512_set1_epi32(int(symbols.escape_size));
    const __m512i escape_end = _mm512_add_epi32(escape_begin, escape_size);
    const __m512i low_mask = _mm512_set1_epi32((1 << symbols.low) - 1);
    const __m128i low = _mm_cvtsi32_si128(symbols.low);
    __m512i states[2] = {_mm512_loadu_si512(held), _mm512_loadu_si512(held + 16)};
    for (int64_t step = 0; step < steps; ++step) {
        __m512i slot[2], code[2];
        __mmask16 plain[2], escapes[2];
        for (int k = 0; k < 2; ++k) {
            slot[k] = _mm512_and_si512(states[k], slot_mask);
            const __m512i found = _mm512_i32gather_epi32(slot[k], symbols.slots, 4);
            const __m512i frequency = _mm512_add_epi32(_mm512_and_si512(found, slot_mask), one);
            const __m512i place = _mm512_and_si512(_mm512_srli_epi32(found, 12), slot_mask);
            states[k] = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(states[k], kSzPrecision)), place);
            if (!narrow) code[k] = _mm512_i32gather_epi32(slot[k], symbols.codes, 4);
            else code[k] = _mm512_srai_epi32(found, 24);
            if (narrow && has_low) code[k] = _mm512_sll_epi32(code[k], low);
            escapes[k] = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(slot[k], escape_begin), escape_size);
            plain[k] = _mm512_cmpge_epu32_mask(slot[k], escape_end);
        }
        from = take(states, begin, from);
        if (from == nullptr) return nullptr;
        if (has_low) {
            for (int k = 0; k < 2; ++k) {
                code[k] = _mm512_mask_or_epi32(code[k], plain[k], code[k], _mm512_and_si512(states[k], low_mask));
                states[k] = _mm512_mask_srl_epi32(states[k], plain[k], states[k], low);
            }
            from = take(states, begin, from);
            if (from == nullptr) return nullptr;
        }
        int32_t* at = codes + step * kSzLanes;
        _mm512_storeu_si512(at, code[0]);
        _mm512_storeu_si512(at + 16, code[1]);
        unsigned rest = _mm512_kunpackw(escapes[1], escapes[0]);
        if (rest == 0) continue;
        const int words = 2 * __builtin_popcount(rest);
        if (from - begin < words) return nullptr;
        from -= words;
        for (const uint16_t* next = from; rest != 0; rest &= rest - 1, next += 2)
            std::memcpy(at + __builtin_ctz(rest), next, 4);
    }
    _mm512_storeu_si512(held, states[0]);
    _mm512_storeu_si512(held + 16, states[1]);
    return from;
}

inline uint16_t* encode_steps(const SzSymbols& symbols, const int32_t* codes, int64_t steps, uint32_t* states,
                              uint16_t* to, const uint16_t* limit) {
    const auto encode = symbols.low ? encode_steps_of<true> : encode_steps_of<false>;
    return encode(symbols, codes, steps, states, to, limit);
}

inline const uint16_t* decode_steps(const SzSymbols& symbols, int32_t* codes, int64_t steps, uint32_t* states,
                                    const uint16_t* begin, const uint16_t* from) {
    const auto decode = symbols.low ? (symbols.narrow ? decode_steps_of<true, true> : decode_steps_of<false, true>)
                                    : (symbols.narrow ? decode_steps_of<true, false> : decode_steps_of<false, false>);
    return decode(symbols, codes, steps, states, begin, from);
}
