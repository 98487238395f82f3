// Images in channels last, which a graph's planes have channel by channel. Included inside a namespace by the kernels that
// need it.

// Turns a square of kSide rows and columns, whose rows begin `from_step` and `to_step` elements apart.
#if defined(BS_AVX512)
inline void turn_words(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step) {
    __m512i pairs[16], fours[16];
    for (int r = 0; r < 16; r += 2) {
        const __m512i even = _mm512_loadu_si512(from + r * from_step), odd = _mm512_loadu_si512(from + (r + 1) * from_step);
        pairs[r] = _mm512_unpacklo_epi32(even, odd);
        pairs[r + 1] = _mm512_unpackhi_epi32(even, odd);
    }
    for (int r = 0; r < 16; r += 4) {  // fours[r + k] has columns k, 4 + k, 8 + k and 12 + k of four rows
        fours[r] = _mm512_unpacklo_epi64(pairs[r], pairs[r + 2]);
        fours[r + 1] = _mm512_unpackhi_epi64(pairs[r], pairs[r + 2]);
        fours[r + 2] = _mm512_unpacklo_epi64(pairs[r + 1], pairs[r + 3]);
        fours[r + 3] = _mm512_unpackhi_epi64(pairs[r + 1], pairs[r + 3]);
    }
    for (int k = 0; k < 4; ++k) {
        const __m512i a = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0xdd);
        _mm512_storeu_si512(to + k * to_step, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_storeu_si512(to + (4 + k) * to_step, _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_storeu_si512(to + (8 + k) * to_step, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_storeu_si512(to + (12 + k) * to_step, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}
#endif

template <class U>
inline void turn_square(const U* from, int64_t from_step, U* to, int64_t to_step) {
    constexpr int64_t side = kSide;
#if defined(BS_AVX512)
    if constexpr (sizeof(U) == 4) {
        turn_words(reinterpret_cast<const uint32_t*>(from), from_step, reinterpret_cast<uint32_t*>(to), to_step);
        return;
    }
#endif
    U square[side][side], turned[side][side];
    for (int64_t r = 0; r < side; ++r) std::memcpy(square[r], from + r * from_step, sizeof square[r]);
    for (int64_t c = 0; c < side; ++c)
        for (int64_t r = 0; r < side; ++r) turned[c][r] = square[r][c];
    for (int64_t c = 0; c < side; ++c) std::memcpy(to + c * to_step, turned[c], sizeof turned[c]);
}

// Turns `rows` by `columns` elements into columns by rows. Rows begin `from_step` and `to_step` elements apart.
template <class U>
inline void turn(const U* from, int64_t from_step, int64_t rows, int64_t columns, U* to, int64_t to_step) {
    int64_t row = 0;
    for (; row + kSide <= rows; row += kSide) {
        int64_t column = 0;
        for (; column + kSide <= columns; column += kSide)
            turn_square(from + row * from_step + column, from_step, to + column * to_step + row, to_step);
        for (; column < columns; ++column)
            for (int64_t r = row; r < row + kSide; ++r) to[column * to_step + r] = from[r * from_step + column];
    }
    for (; row < rows; ++row)
        for (int64_t c = 0; c < columns; ++c) to[c * to_step + row] = from[row * from_step + c];
}

// Tiles of channels by positions are made in a buffer in the first-level cache, and written the other way around.
// `decode(from, to, values)` makes the elements [from, to) in order; `begin` to `end` are positions of all images.
template <class U, class Decode>
inline void turn_spans(const Decode& decode, int64_t channels, int64_t area, int64_t begin, int64_t end, U* out) {
    alignas(64) U tile[kTile];
    const int64_t together = std::min(kChannels, channels), most = kTile / together;
    for (int64_t pixel = begin; pixel < end;) {
        const int64_t image = pixel / area, at = pixel - image * area;
        const int64_t many = std::min({most, area - at, end - pixel});
        for (int64_t channel = 0; channel < channels; channel += together) {
            const int64_t wide = std::min(together, channels - channel);
            for (int64_t c = 0; c < wide; ++c) {
                const int64_t from = (image * channels + channel + c) * area + at;
                decode(from, from + many, tile + c * many);
            }
            turn(tile, many, wide, many, out + pixel * channels + channel, channels);
        }
        pixel += many;
    }
}
