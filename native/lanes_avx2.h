// 256-bit registers of U and F. Included inside namespace bs::avx2 by foreach_isa.h.

template <class U>
struct Whole256 {
    using Register = __m256i;
    static constexpr int kCount = 32 / sizeof(U);
    static constexpr Word kMask = (Word(1) << kCount) - 1;
    static Register load(const U* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
    static void store(U* out, Register v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v); }
    static void stream(U* out, Register v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(out), v); }
};

template <class U>
struct Lanes;

template <>
struct Lanes<uint8_t> : Whole256<uint8_t> {  // no compress and expand
    static Register splat(uint8_t v) { return _mm256_set1_epi8(char(v)); }
    static Word differs(Register a, Register b) { return ~uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b))); }
    static Register blend(Word m, Register set, Register clear) {
        // Byte i of the register gets byte i / 8 of the mask, then looks at its own bit in it.
        const Register bytes = _mm256_shuffle_epi8(
            _mm256_set1_epi32(int(uint32_t(m))),
            _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
        const Register bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
        const Register flags = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
        return _mm256_blendv_epi8(clear, set, flags);
    }
};

// Half a register: eight lanes are what one byte of mask, and so the tables, serve.
template <>
struct Lanes<uint16_t> {
    using Register = __m128i;
    static constexpr int kCount = 8;
    static constexpr Word kMask = 0xff;
    static Register load(const uint16_t* x) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)); }
    static void store(uint16_t* out, Register v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), v); }
    static void stream(uint16_t* out, Register v) { _mm_stream_si128(reinterpret_cast<__m128i*>(out), v); }
    static Register splat(uint16_t v) { return _mm_set1_epi16(short(v)); }
    static Word differs(Register a, Register b) {
        const Register equal = _mm_cmpeq_epi16(a, b);
        return ~unsigned(_mm_movemask_epi8(_mm_packs_epi16(equal, equal))) & 0xff;
    }
    static Register flags(Word m) {
        const Register bit = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(short(m)), bit), bit);
    }
    static Register permute(Register v, uint64_t lanes) {
        // Lane number j becomes the byte numbers 2 j and 2 j + 1.
        const Register wide = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(int64_t(lanes)));
        const Register bytes = _mm_add_epi16(_mm_mullo_epi16(wide, _mm_set1_epi16(0x0202)), _mm_set1_epi16(0x0100));
        return _mm_shuffle_epi8(v, bytes);
    }
    static Register blend(Word m, Register set, Register clear) { return _mm_blendv_epi8(clear, set, flags(m)); }
    static Register compress(Word m, Register v) { return permute(v, kPermutations.compress[m]); }
    static Register expand(Word m, Register v) {
        return _mm_and_si128(permute(v, kPermutations.expand[m]), flags(m));
    }
};

template <>
struct Lanes<uint32_t> : Whole256<uint32_t> {
    static Register splat(uint32_t v) { return _mm256_set1_epi32(int(v)); }
    static Word differs(Register a, Register b) {
        return ~unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)))) & 0xff;
    }
    static Register flags(Word m) {
        const Register bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(m)), bit), bit);
    }
    static Register permute(Register v, uint64_t lanes) {
        return _mm256_permutevar8x32_epi32(v, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(lanes))));
    }
    static Register blend(Word m, Register set, Register clear) { return _mm256_blendv_epi8(clear, set, flags(m)); }
    static Register compress(Word m, Register v) { return permute(v, kPermutations.compress[m]); }
    static Register expand(Word m, Register v) {
        return _mm256_and_si256(permute(v, kPermutations.expand[m]), flags(m));
    }
};

template <>
struct Lanes<uint64_t> : Whole256<uint64_t> {
    static Register splat(uint64_t v) { return _mm256_set1_epi64x(int64_t(v)); }
    static Word differs(Register a, Register b) {
        return ~unsigned(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(a, b)))) & 0xf;
    }
    static Register flags(Word m) {
        const Register bit = _mm256_setr_epi64x(1, 2, 4, 8);
        return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(int64_t(m)), bit), bit);
    }
    static Register permute(Register v, uint64_t lanes) {
        // Lane number j becomes the 32-bit lane numbers 2 j and 2 j + 1.
        const Register wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int(uint32_t(lanes))));
        const Register low = _mm256_slli_epi64(wide, 1);
        const Register high = _mm256_or_si256(_mm256_slli_epi64(wide, 33), _mm256_set1_epi64x(int64_t(1) << 32));
        return _mm256_permutevar8x32_epi32(v, _mm256_or_si256(low, high));
    }
    static Register blend(Word m, Register set, Register clear) { return _mm256_blendv_epi8(clear, set, flags(m)); }
    static Register compress(Word m, Register v) { return permute(v, kPermutations.compress[m]); }
    static Register expand(Word m, Register v) {
        return _mm256_and_si256(permute(v, kPermutations.expand[m]), flags(m));
    }
};

// 8 float32, also the register in which the 16-bit floats are compared.
struct Single256 {
    using Register = __m256;
    static constexpr int kCount = 8;
    static Register splat(float v) { return _mm256_set1_ps(v); }
    template <int predicate>
    static Word compare(Register a, Register b) {
        return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, predicate)));
    }
};

template <class F>
struct Floats;

template <>
struct Floats<float> : Single256 {
    static Register load(const float* x) { return _mm256_loadu_ps(x); }
};

template <>
struct Floats<Half> : Single256 {
    static Register load(const Half* x) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    }
};

template <>
struct Floats<BFloat16> : Single256 {
    static Register load(const BFloat16* x) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
};

template <>
struct Floats<double> {
    using Register = __m256d;
    static constexpr int kCount = 4;
    static Register splat(double v) { return _mm256_set1_pd(v); }
    static Register load(const double* x) { return _mm256_loadu_pd(x); }
    template <int predicate>
    static Word compare(Register a, Register b) {
        return unsigned(_mm256_movemask_pd(_mm256_cmp_pd(a, b, predicate)));
    }
};

// look_up of lanes_scalar.h: permutations of registers, where compilers would gather.
inline void look_up_line(const uint8_t* codes, const uint32_t* table, uint32_t* out) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(table);
    const __m256i low = _mm256_loadu_si256(halves), high = _mm256_loadu_si256(halves + 1);
    for (int i = 0; i < 16; i += 8) {
        const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        const __m256i above = _mm256_cmpgt_epi32(code, _mm256_set1_epi32(7));
        const __m256i found = _mm256_blendv_epi8(_mm256_permutevar8x32_epi32(low, code),
                                                 _mm256_permutevar8x32_epi32(high, code), above);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), found);
    }
}
inline void look_up_line(const uint8_t* codes, const uint16_t* table, uint16_t* out) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(table);
    const __m128i first = _mm_loadu_si128(halves), second = _mm_loadu_si128(halves + 1);
    const __m128i byte = _mm_set1_epi16(0xff);
    const __m128i low = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
    const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i lows = _mm_shuffle_epi8(low, code), highs = _mm_shuffle_epi8(high, code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi8(lows, highs));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), _mm_unpackhi_epi8(lows, highs));
}

// plane_of and from_planes of lanes_scalar.h.
inline uint32_t plane_of(const uint32_t* fields, int bit) {
    const __m128i to_top = _mm_cvtsi32_si128(31 - bit);
    uint32_t plane = 0;
    for (int i = 0; i < 32; i += 8) {
        const __m256i field = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(fields + i));
        plane |= uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_sll_epi32(field, to_top)))) << i;
    }
    return plane;
}
inline void from_planes(const uint32_t* planes, int count, uint32_t highest, uint32_t* fields) {
    const __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < 32; i += 8) {
        const auto flags = [&](uint32_t plane) {
            return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(plane >> i)), own), own);
        };
        __m256i field = _mm256_slli_epi32(flags(highest), 31);
        for (int bit = 0; bit < count; ++bit)
            field = _mm256_or_si256(field, _mm256_and_si256(flags(planes[bit]), _mm256_set1_epi32(int(1u << bit))));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(fields + i), field);
    }
}
