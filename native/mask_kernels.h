// bitmask and binary: one bit per element, and back. Compiled once per instruction set by foreach_isa.h.

#include "fill_mask.h"

template <Test test, class F, class Bound>
struct Passes {
    Bound lo, hi;
    Word operator()(const F* x, Word) const { return passes<test, F, Bound>(x, lo, hi); }
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

template <class F, class U, class Bound>
inline void encode_floats(const TestJob& job, int64_t begin, int64_t end) {
    const F* x = static_cast<const F*>(job.x);
    const Bound lo = Bound(job.lo), hi = Bound(job.hi);
    switch (job.test) {
#define BS_CASE(test)                                   \
    case test: {                                        \
        Passes<test, F, Bound> predicate{lo, hi};       \
        return fill_mask(x, begin, end, job.mask, predicate); \
    }
        BS_CASE(Test::NotLe)
        BS_CASE(Test::Gt)
        BS_CASE(Test::Inside)
        BS_CASE(Test::NotOutside)
        BS_CASE(Test::Closed)
#undef BS_CASE
        case Test::Nonzero: {
            Nonzero<U> predicate;
            return fill_mask(static_cast<const U*>(job.x), begin, end, job.mask, predicate);
        }
    }
}

void encode_test(const TestJob& job, int64_t begin, int64_t end) {
    switch (job.type) {
        case Float::F32: return encode_floats<float, uint32_t, float>(job, begin, end);
        case Float::F64: return encode_floats<double, uint64_t, double>(job, begin, end);
        case Float::F16: return encode_floats<Half, uint16_t, float>(job, begin, end);
        case Float::BF16: return encode_floats<BFloat16, uint16_t, float>(job, begin, end);
    }
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
