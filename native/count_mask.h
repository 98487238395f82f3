// Included inside a namespace by the kernels that need it.

// How many bits of the elements of a chunk are set, of n elements in all.
inline int64_t count_mask(const uint8_t* mask, int64_t chunk, int64_t n) {
    const int64_t last = std::min((chunk + 1) * kZvcChunk, n);
    int64_t count = 0, i = chunk * kZvcChunk;
    for (; i + kWord <= last; i += kWord) count += __builtin_popcountll(load_word(mask, i));
    if (i < last) count += __builtin_popcountll(load_last_word(mask, i, last - i));
    return count;
}
