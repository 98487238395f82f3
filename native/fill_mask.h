// The loop that writes one bit per element. Included inside a namespace by the kernels that need it.

// Elements [begin, end) of x into `mask`; begin is a multiple of 64. `predicate(x + i, valid)` returns the bits of 64
// elements of which those in `valid` exist; it may set others.
template <class T, class Predicate>
inline void fill_mask(const T* x, int64_t begin, int64_t end, uint8_t* mask, Predicate& predicate) {
    int64_t i = begin;
    for (; i + kWord <= end; i += kWord) {
        prefetch_ahead(x + i, kWord);
        store_word(mask, i, predicate(x + i, ~Word(0)));
    }
    if (i < end) {
        T last[kWord] = {};
        std::memcpy(last, x + i, size_t(end - i) * sizeof(T));
        const Word valid = low_bits(end - i);
        store_last_word(mask, i, end - i, predicate(last, valid) & valid);
    }
}
