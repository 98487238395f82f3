// The upper halves of 32-bit words. Compiled once per instruction set by foreach_isa.h.

constexpr int64_t kHalves = 1024;  // a tile: whole lines of the output

// Stores the upper halves of so many words; returns how many of the lower ones are not zero.
inline int64_t halve_tile(const uint32_t* x, int64_t count, uint16_t* upper) {
    uint32_t others = 0;
    for (int64_t i = 0; i < count; ++i) {
        upper[i] = uint16_t(x[i] >> 16);
        others += (x[i] & 0xffff) != 0;
    }
    return others;
}

template <bool stream>
inline int64_t halve_tiles(const uint32_t* x, int64_t n, uint16_t* upper) {
    alignas(64) uint16_t tile[kHalves];
    int64_t others = 0, i = 0;
    for (; i + kHalves <= n; i += kHalves) {
        prefetch_ahead(x + i, kHalves);
        others += halve_tile(x + i, kHalves, stream ? tile : upper + i);
        for (int64_t at = 0; stream && at < kHalves; at += 32) copy_line<stream>(tile + at, upper + i + at);
    }
    return others + halve_tile(x + i, n - i, upper + i);
}

int64_t halve(const uint32_t* x, int64_t n, uint16_t* upper, bool stream) {
    if (!(kStreams && stream)) return halve_tiles<false>(x, n, upper);
    const int64_t others = halve_tiles<true>(x, n, upper);
    fence();
    return others;
}
