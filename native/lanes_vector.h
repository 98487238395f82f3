// Words of 64 elements in vector registers: the functions of lanes_scalar.h in terms of Lanes<U> and Floats<F>,
// which lanes_avx2.h or lanes_avx512.h has just defined. Included inside a namespace by foreach_isa.h.

constexpr bool kStreams = true;

template <class U>
inline Word differs(const U* x, U value) {
    using L = Lanes<U>;
    const auto other = L::splat(value);
    Word word = 0;
    for (int i = 0; i < kWord; i += L::kCount) word |= Word(L::differs(L::load(x + i), other)) << i;
    return word;
}

// The predicates are the quiet ones; N.. is true for NaN (not less or equal), O.. is false for NaN.
template <Test test, class V>
inline Word passes_vector(typename V::Register x, typename V::Register lo, typename V::Register hi) {
    switch (test) {
        case Test::NotLe: return V::template compare<_CMP_NLE_UQ>(x, lo);
        case Test::Gt: return V::template compare<_CMP_GT_OQ>(x, lo);
        case Test::Inside: return V::template compare<_CMP_GT_OQ>(x, lo) & V::template compare<_CMP_LT_OQ>(x, hi);
        case Test::NotOutside:
            return V::template compare<_CMP_NLE_UQ>(x, lo) & V::template compare<_CMP_NGE_UQ>(x, hi);
        default: return V::template compare<_CMP_GE_OQ>(x, lo) & V::template compare<_CMP_LE_OQ>(x, hi);
    }
}

template <Test test, class F, class Bound>
inline Word passes(const F* x, Bound lo, Bound hi) {
    using V = Floats<F>;
    const auto low = V::splat(lo), high = V::splat(hi);
    Word word = 0;
    for (int i = 0; i < kWord; i += V::kCount) word |= passes_vector<test, V>(V::load(x + i), low, high) << i;
    return word;
}

// A streaming store goes past the caches: no line is read before it is overwritten. `out` must then be aligned to 64.
template <bool stream, class U>
inline void put(U* out, typename Lanes<U>::Register value) {
    if (stream) Lanes<U>::stream(out, value);
    else Lanes<U>::store(out, value);
}

template <bool stream, class U>
inline void blend(Word word, U if_set, U if_clear, U* out) {
    using L = Lanes<U>;
    const auto set = L::splat(if_set), clear = L::splat(if_clear);
    for (int i = 0; i < kWord; i += L::kCount) put<stream>(out + i, L::blend(word >> i, set, clear));
}

template <class U>
inline void select(Word word, const U* x, U* out) {
    using L = Lanes<U>;
    const auto zero = L::splat(0);
    for (int i = 0; i < kWord; i += L::kCount) L::store(out + i, L::blend(word >> i, L::load(x + i), zero));
}

// Compresses in the register and stores all of it: the element behind the last one is garbage until the next store, so
// 64 elements must fit at `to` however few bits are set. (On Zen 4 and 5 a compressing store to memory is microcode,
// and many times slower.)
template <class U>
inline U* compress(const U* x, Word word, U* to) {
    using L = Lanes<U>;
    for (int i = 0; i < kWord; i += L::kCount) {
        const Word part = word >> i & L::kMask;
        L::store(to, L::compress(part, L::load(x + i)));
        to += __builtin_popcountll(part);
    }
    return to;
}

// Compresses the elements that are not zero, as above; returns where they are. The masks need not leave their registers.
template <class U>
inline Word compress_nonzero(const U* x, U*& to) {
    using L = Lanes<U>;
    const auto zero = L::splat(0);
    Word word = 0;
    for (int i = 0; i < kWord; i += L::kCount) {
        const auto value = L::load(x + i);
        const Word part = L::differs(value, zero);
        L::store(to, L::compress(part, value));
        to += __builtin_popcountll(part);
        word |= part << i;
    }
    return word;
}

// Loads whole registers: 64 elements must be readable at `from`, however few bits are set. The loads must stay apart
// from the expansion: compilers like to fuse the two into an expanding load, which on Zen 4 and 5 is microcode.
template <bool stream, class U>
inline const U* expand(Word word, const U* from, U* out) {
    using L = Lanes<U>;
    for (int i = 0; i < kWord; i += L::kCount) {
        const Word part = word >> i & L::kMask;
        auto packed = L::load(from);
        asm("" : "+v"(packed));
        put<stream>(out + i, L::expand(part, packed));
        from += __builtin_popcountll(part);
    }
    return from;
}

template <class U>
inline void look_up(const uint8_t* codes, int64_t n, const U* table, U* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) look_up_line(codes + i, table, out + i);
    for (; i < n; ++i) out[i] = table[codes[i]];
}

// 64 bytes.
template <bool stream, class U>
inline void copy_line(const U* from, U* to) {
    for (int i = 0; i < int(64 / sizeof(U)); i += Lanes<U>::kCount) put<stream>(to + i, Lanes<U>::load(from + i));
}
