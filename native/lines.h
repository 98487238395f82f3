// Where a pass compresses to. Included inside a namespace by the kernels that need it.

// A buffer in the first-level cache, a chunk at a time, from which whole lines go on to memory past the caches. So no
// line of memory is read before it is overwritten, the vector code has room for its last register, and nothing outside
// the values of this block is written, which matters because other threads write the values on both sides.
template <class U>
class Lines {
public:
    explicit Lines(U* to) : to_(to), skip_(int64_t(reinterpret_cast<uintptr_t>(to) % 64 / sizeof(U))), end_(buffer_ + skip_) {
        to_ -= skip_;
    }

    // Room for a chunk, and the end of what is there.
    U*& end() { return end_; }

    // Writes the whole lines; keeps the rest.
    template <bool stream>
    void flush() {
        const U* from = buffer_;
        if (skip_ > 0 && end_ - from >= kLine) {  // the first line belongs to two blocks
            std::memcpy(to_ + skip_, from + skip_, size_t(kLine - skip_) * sizeof(U));
            from += kLine;
            to_ += kLine;
            skip_ = 0;
        }
        for (; end_ - from >= kLine; from += kLine, to_ += kLine) copy_line<stream>(from, to_);
        std::memmove(buffer_, from, 64);
        end_ = buffer_ + (end_ - from);
    }

    // Writes the rest.
    void finish() {
        const int64_t rest = end_ - buffer_ - skip_;
        if (rest > 0) std::memcpy(to_ + skip_, buffer_ + skip_, size_t(rest) * sizeof(U));
    }

private:
    static constexpr int64_t kLine = 64 / sizeof(U);
    U* to_;         // an aligned line
    int64_t skip_;  // elements of that line that belong to the block before
    U* end_;
    alignas(64) U buffer_[kZvcChunk + 2 * kLine + kWord];
};
