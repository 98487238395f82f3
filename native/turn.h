// Images in channels last, which a graph's planes have channel by channel. Included inside a namespace by the kernels that
// need it.

// Turns `rows` by `columns` elements into columns by rows. Rows begin `from_step` and `to_step` elements apart.
template <class U>
inline void turn(const U* from, int64_t from_step, int64_t rows, int64_t columns, U* to, int64_t to_step) {
    constexpr int64_t side = 16;
    int64_t row = 0;
    for (; row + side <= rows; row += side) {
        int64_t column = 0;
        for (; column + side <= columns; column += side) {
            U block[side][side], turned[side][side];
            for (int64_t r = 0; r < side; ++r)
                std::memcpy(block[r], from + (row + r) * from_step + column, sizeof block[r]);
            for (int64_t c = 0; c < side; ++c)
                for (int64_t r = 0; r < side; ++r) turned[c][r] = block[r][c];
            for (int64_t c = 0; c < side; ++c) std::memcpy(to + (column + c) * to_step + row, turned[c], sizeof turned[c]);
        }
        for (; column < columns; ++column)
            for (int64_t r = row; r < row + side; ++r) to[column * to_step + r] = from[r * from_step + column];
    }
    for (; row < rows; ++row)
        for (int64_t c = 0; c < columns; ++c) to[c * to_step + row] = from[row * from_step + c];
}

// Tiles of channels by positions are made in a buffer in the first-level cache, and written the other way around.
// `decode(from, to, values)` makes the elements [from, to) in order; `begin` to `end` are positions of all images.
template <class U, class Decode>
inline void turn_spans(const Decode& decode, int64_t channels, int64_t area, int64_t begin, int64_t end, U* out) {
    alignas(64) U tile[kChannels][kTile];
    for (int64_t pixel = begin; pixel < end;) {
        const int64_t image = pixel / area, at = pixel - image * area;
        const int64_t many = std::min({kTile, area - at, end - pixel});
        for (int64_t channel = 0; channel < channels; channel += kChannels) {
            const int64_t wide = std::min(kChannels, channels - channel);
            for (int64_t c = 0; c < wide; ++c) {
                const int64_t from = (image * channels + channel + c) * area + at;
                decode(from, from + many, tile[c]);
            }
            turn(tile[0], kTile, wide, many, out + pixel * channels + channel, channels);
        }
        pixel += many;
    }
}
