// Words of 64 elements, one element at a time. Included inside a namespace by foreach_isa.h.
//
// The functions differs, passes, blend, select, compress, expand and copy_line are what the kernels are written in;
// lanes_vector.h has the same ones for vector registers. compress and expand here touch nothing outside the elements
// that the mask names, so the vector kernels, too, call them near the end of a plane.

constexpr bool kStreams = false;  // no stores past the caches

// Bit i: x[i] differs from `value`.
template <class U>
inline Word differs(const U* x, U value) {
    Word word = 0;
    for (int i = 0; i < kWord; ++i) word |= Word(x[i] != value) << i;
    return word;
}

template <Test test, class F>
inline bool passes_one(F x, F lo, F hi) {
    switch (test) {
        case Test::NotLe: return !(x <= lo);
        case Test::Gt: return x > lo;
        case Test::Inside: return lo < x && x < hi;
        case Test::NotOutside: return !(x <= lo || x >= hi);
        default: return lo <= x && x <= hi;
    }
}

// Bit i: x[i] passes the test. `lo` and `hi` are already rounded to the type of x.
template <Test test, class F, class Bound>
inline Word passes(const F* x, Bound lo, Bound hi) {
    Word word = 0;
    for (int i = 0; i < kWord; ++i) word |= Word(passes_one<test, Bound>(to_float(x[i]), lo, hi)) << i;
    return word;
}

// out[i] = bit i ? if_set : if_clear.
template <bool stream, class U>
inline void blend(Word word, U if_set, U if_clear, U* out) {
    const U difference = if_set ^ if_clear;  // no branch: a random mask would mispredict every second one
    for (int i = 0; i < kWord; ++i) out[i] = U(if_clear ^ (difference & U(0 - (word >> i & 1))));
}

// out[i] = bit i ? x[i] : 0. `out` may be x.
template <class U>
inline void select(Word word, const U* x, U* out) {
    for (int i = 0; i < kWord; ++i) out[i] = U(x[i] & U(0 - (word >> i & 1)));
}

// Writes the elements whose bit is set to `to`, in order; returns the end of what it wrote.
template <class U>
inline U* compress(const U* x, Word word, U* to) {
    for (; word != 0; word &= word - 1) *to++ = x[__builtin_ctzll(word)];
    return to;
}

// The same of the elements that are not zero, and moves `to`; returns where they are.
template <class U>
inline Word compress_nonzero(const U* x, U*& to) {
    const Word word = differs<U>(x, 0);
    to = compress<U>(x, word, to);
    return word;
}

// The inverse of compress, with zeros between; returns the end of what it read.
template <bool stream, class U>
inline const U* expand(Word word, const U* from, U* out) {
    std::memset(out, 0, kWord * sizeof(U));
    for (; word != 0; word &= word - 1) out[__builtin_ctzll(word)] = *from++;
    return from;
}

// out[i] = table[codes[i]], of 16 entries.
template <class U>
inline void look_up(const uint8_t* codes, int64_t n, const U* table, U* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = table[codes[i]];
}

template <bool stream, class U>
inline void copy_line(const U* from, U* to) {
    std::memcpy(to, from, 64);
}

// Bit `bit` of each of 32 fields.
inline uint32_t plane_of(const uint32_t* fields, int bit) {
    uint32_t plane = 0;
    for (int i = 0; i < 32; ++i) plane |= (fields[i] >> bit & 1) << i;
    return plane;
}

// 32 fields from the planes of their lowest bits and of their highest one.
inline void from_planes(const uint32_t* planes, int count, uint32_t highest, uint32_t* fields) {
    for (int i = 0; i < 32; ++i) fields[i] = (highest >> i & 1) << 31;
    for (int bit = 0; bit < count; ++bit)
        for (int i = 0; i < 32; ++i) fields[i] |= (planes[bit] >> i & 1) << bit;
}
