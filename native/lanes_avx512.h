// 512-bit registers of U and F. Included inside namespace bs::avx512 by foreach_isa.h.

template <class U>
struct Whole512 {
    using Register = __m512i;
    static constexpr int kCount = 64 / sizeof(U);
    static constexpr Word kMask = ~Word(0) >> (64 - kCount);
    static Register load(const U* x) { return _mm512_loadu_si512(x); }
    static void store(U* out, Register v) { _mm512_storeu_si512(out, v); }
    static void stream(U* out, Register v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(out), v); }
};

template <class U>
struct Lanes;

template <>
struct Lanes<uint8_t> : Whole512<uint8_t> {  // no compress and expand
    static Register splat(uint8_t v) { return _mm512_set1_epi8(char(v)); }
    static Word differs(Register a, Register b) { return _mm512_cmpneq_epi8_mask(a, b); }
    static Register blend(Word m, Register set, Register clear) { return _mm512_mask_blend_epi8(m, clear, set); }
};

template <>
struct Lanes<uint16_t> : Whole512<uint16_t> {
    static Register splat(uint16_t v) { return _mm512_set1_epi16(short(v)); }
    static Word differs(Register a, Register b) { return _mm512_cmpneq_epi16_mask(a, b); }
    static Register blend(Word m, Register set, Register clear) {
        return _mm512_mask_blend_epi16(__mmask32(m), clear, set);
    }
    static Register compress(Word m, Register v) { return _mm512_maskz_compress_epi16(__mmask32(m), v); }
    static Register expand(Word m, Register v) { return _mm512_maskz_expand_epi16(__mmask32(m), v); }
};

template <>
struct Lanes<uint32_t> : Whole512<uint32_t> {
    static Register splat(uint32_t v) { return _mm512_set1_epi32(int(v)); }
    static Word differs(Register a, Register b) { return _mm512_cmpneq_epi32_mask(a, b); }
    static Register blend(Word m, Register set, Register clear) {
        return _mm512_mask_blend_epi32(__mmask16(m), clear, set);
    }
    static Register compress(Word m, Register v) { return _mm512_maskz_compress_epi32(__mmask16(m), v); }
    static Register expand(Word m, Register v) { return _mm512_maskz_expand_epi32(__mmask16(m), v); }
};

template <>
struct Lanes<uint64_t> : Whole512<uint64_t> {
    static Register splat(uint64_t v) { return _mm512_set1_epi64(int64_t(v)); }
    static Word differs(Register a, Register b) { return _mm512_cmpneq_epi64_mask(a, b); }
    static Register blend(Word m, Register set, Register clear) {
        return _mm512_mask_blend_epi64(__mmask8(m), clear, set);
    }
    static Register compress(Word m, Register v) { return _mm512_maskz_compress_epi64(__mmask8(m), v); }
    static Register expand(Word m, Register v) { return _mm512_maskz_expand_epi64(__mmask8(m), v); }
};

// 16 float32, also the register in which the 16-bit floats are compared.
struct Single512 {
    using Register = __m512;
    static constexpr int kCount = 16;
    static Register splat(float v) { return _mm512_set1_ps(v); }
    template <int predicate>
    static Word compare(Register a, Register b) {
        return _mm512_cmp_ps_mask(a, b, predicate);
    }
};

template <class F>
struct Floats;

template <>
struct Floats<float> : Single512 {
    static Register load(const float* x) { return _mm512_loadu_ps(x); }
};

template <>
struct Floats<Half> : Single512 {
    static Register load(const Half* x) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    }
};

template <>
struct Floats<BFloat16> : Single512 {
    static Register load(const BFloat16* x) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
};

template <>
struct Floats<double> {
    using Register = __m512d;
    static constexpr int kCount = 8;
    static Register splat(double v) { return _mm512_set1_pd(v); }
    static Register load(const double* x) { return _mm512_loadu_pd(x); }
    template <int predicate>
    static Word compare(Register a, Register b) {
        return _mm512_cmp_pd_mask(a, b, predicate);
    }
};

// look_up of lanes_scalar.h: a permutation of a register, where compilers would gather.
inline void look_up_line(const uint8_t* codes, const uint32_t* table, uint32_t* out) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(code, _mm512_loadu_si512(table)));
}
inline void look_up_line(const uint8_t* codes, const uint16_t* table, uint16_t* out) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
    const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutexvar_epi16(code, values));
}

// plane_of and from_planes of lanes_scalar.h.
inline uint32_t plane_of(const uint32_t* fields, int bit) {
    const __m512i one = _mm512_set1_epi32(int(1u << bit));
    return uint32_t(_mm512_test_epi32_mask(_mm512_loadu_si512(fields), one)) |
           uint32_t(_mm512_test_epi32_mask(_mm512_loadu_si512(fields + 16), one)) << 16;
}
inline void from_planes(const uint32_t* planes, int count, uint32_t highest, uint32_t* fields) {
    const __m512i top = _mm512_set1_epi32(int(0x80000000));
    __m512i low = _mm512_maskz_mov_epi32(__mmask16(highest), top);
    __m512i high = _mm512_maskz_mov_epi32(__mmask16(highest >> 16), top);
    for (int bit = 0; bit < count; ++bit) {
        const __m512i one = _mm512_set1_epi32(int(1u << bit));
        low = _mm512_mask_or_epi32(low, __mmask16(planes[bit]), low, one);
        high = _mm512_mask_or_epi32(high, __mmask16(planes[bit] >> 16), high, one);
    }
    _mm512_storeu_si512(fields, low);
    _mm512_storeu_si512(fields + 16, high);
}
