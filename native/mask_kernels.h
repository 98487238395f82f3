// bitmask and binary: one bit per element, and back. Compiled once per instruction set by foreach_isa.h.

#include "fill_mask.h"

template <Test test, class F, class Bound, bool counts_nans>
struct Passes {
    Bound lo, hi;
    int64_t nans = 0;
    Word operator()(const F* x, Word valid) {
        if constexpr (counts_nans) {
            constexpr Bound inf = std::numeric_limits<Bound>::infinity();
            nans += __builtin_popcountll(passes<Test::NotLe, F, Bound>(x, inf, inf) & valid);
        }
        return passes<test, F, Bound>(x, lo, hi);
    }
};

template <class U>
struct Nonzero {
    Word operator()(const U* x, Word) const { return differs<U>(x, 0); }
};

template <class U>
struct Binary {
    U first, second;
    int64_t neither = 0;
    Word operator()(const U* x, Word valid) {
        const Word other = differs<U>(x, first);
        neither += __builtin_popcountll(other & differs<U>(x, second) & valid);
        return other;
    }
};

// Returns how many elements are NaN, where that is asked.
template <class F, class U, class Bound, bool counts_nans>
inline int64_t encode_floats(const TestJob& job, int64_t begin, int64_t end) {
    const F* x = static_cast<const F*>(job.x);
    const Bound lo = Bound(job.lo), hi = Bound(job.hi);
    switch (job.test) {
#define BS_CASE(test)                                          \
    case test: {                                               \
        Passes<test, F, Bound, counts_nans> predicate{lo, hi}; \
        fill_mask(x, begin, end, job.mask, predicate);         \
        return predicate.nans;                                 \
    }
        BS_CASE(Test::NotLe)
        BS_CASE(Test::Gt)
        BS_CASE(Test::Inside)
        BS_CASE(Test::NotOutside)
        BS_CASE(Test::Closed)
#undef BS_CASE
        case Test::Nonzero: break;
    }
    Nonzero<U> predicate;
    fill_mask(static_cast<const U*>(job.x), begin, end, job.mask, predicate);
    return 0;
}

template <bool counts_nans>
inline int64_t encode_test_of(const TestJob& job, int64_t begin, int64_t end) {
    switch (job.type) {
        case Float::F32: return encode_floats<float, uint32_t, float, counts_nans>(job, begin, end);
        case Float::F64: return encode_floats<double, uint64_t, double, counts_nans>(job, begin, end);
        case Float::F16: return encode_floats<Half, uint16_t, float, counts_nans>(job, begin, end);
        default: return encode_floats<BFloat16, uint16_t, float, counts_nans>(job, begin, end);
    }
}

int64_t encode_test(const TestJob& job, int64_t begin, int64_t end) {
    return job.counts_nans ? encode_test_of<true>(job, begin, end) : encode_test_of<false>(job, begin, end);
}

template <class U>
inline int64_t encode_binary_as(const BinaryJob& job, int64_t begin, int64_t end) {
    Binary<U> predicate{U(job.first), U(job.second)};
    fill_mask(static_cast<const U*>(job.x), begin, end, job.mask, predicate);
    return predicate.neither;
}

int64_t encode_binary(const BinaryJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return encode_binary_as<uint16_t>(job, begin, end);
        case 4: return encode_binary_as<uint32_t>(job, begin, end);
        default: return encode_binary_as<uint64_t>(job, begin, end);
    }
}

template <bool stream, class U>
inline void blend_range(const BlendJob& job, int64_t begin, int64_t end) {
    const U set = U(job.if_set), clear = U(job.if_clear);
    U* out = static_cast<U*>(job.out);
    int64_t i = begin;
    for (; i + kWord <= end; i += kWord) blend<stream, U>(load_word(job.mask, i), set, clear, out + i);
    if (i < end) {
        U last[kWord];
        blend<false, U>(load_last_word(job.mask, i, end - i), set, clear, last);
        std::memcpy(out + i, last, size_t(end - i) * sizeof(U));
    }
}

template <class U>
inline void blend_as(const BlendJob& job, int64_t begin, int64_t end) {
    if (kStreams && job.stream) {
        blend_range<true, U>(job, begin, end);
        fence();
    } else {
        blend_range<false, U>(job, begin, end);
    }
}

void blend_block(const BlendJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 1: return blend_as<uint8_t>(job, begin, end);
        case 2: return blend_as<uint16_t>(job, begin, end);
        case 4: return blend_as<uint32_t>(job, begin, end);
        default: return blend_as<uint64_t>(job, begin, end);
    }
}

template <class U>
inline void select_as(const SelectJob& job, int64_t begin, int64_t end) {
    const U* x = static_cast<const U*>(job.x);
    U* out = static_cast<U*>(job.out);
    int64_t i = begin;
    for (; i + kWord <= end; i += kWord) {
        prefetch_ahead(x + i, kWord);
        select<U>(load_word(job.mask, i), x + i, out + i);
    }
    if (i < end) {
        U last[kWord] = {};
        std::memcpy(last, x + i, size_t(end - i) * sizeof(U));
        select<U>(load_last_word(job.mask, i, end - i), last, last);
        std::memcpy(out + i, last, size_t(end - i) * sizeof(U));
    }
}

void select_block(const SelectJob& job, int64_t begin, int64_t end) {
    switch (job.width) {
        case 2: return select_as<uint16_t>(job, begin, end);
        case 4: return select_as<uint32_t>(job, begin, end);
        default: return select_as<uint64_t>(job, begin, end);
    }
}
