// Max-pool indices as positions in their windows. Compiled once per instruction set by foreach_isa.h.

#include "fields.h"

// Where the windows of consecutive output elements start: walks the output in memory order, so that only the first
// element of a block costs divisions.
class Walk {
public:
    Walk(const Window& w, int64_t element) : w_(w), inner_(element % w.inner) {
        int64_t position = element / w.inner;
        for (int k = 2; k >= 0; --k) {
            at_[k] = position % w.output[k];
            position /= w.output[k];
        }
    }

    // How many elements from here on have windows in the same row, `step()` apart.
    int64_t run() const { return w_.inner > 1 ? w_.inner - inner_ : w_.output[2] - at_[2]; }
    int64_t step() const { return w_.inner > 1 ? 0 : w_.stride[2]; }

    // With inner > 1: which of the neighbours in memory that share a spatial position this is.
    int64_t column() const { return inner_; }

    // Where the window starts in dimension k of the input; negative in the padding.
    int64_t origin(int k) const { return at_[k] * w_.stride[k] - w_.padding[k]; }
    int64_t flat_origin() const { return (origin(0) * w_.input[1] + origin(1)) * w_.input[2] + origin(2); }

    // Moves on by 1 <= count <= run().
    void advance(int64_t count) {
        if (w_.inner > 1) {
            inner_ += count;
            if (inner_ < w_.inner) return;
            inner_ = 0;
            count = 1;
        }
        at_[2] += count;
        for (int k = 2; k >= 0 && at_[k] == w_.output[k]; --k) {  // past the last: the next channel or sample
            at_[k] = 0;
            if (k > 0) ++at_[k - 1];
        }
    }

private:
    const Window& w_;
    int64_t inner_;
    int64_t at_[3];
};

// The definition: the index's coordinates, minus the origin, in steps of the dilation. Returns whether it is a position
// of the window.
inline bool code_of(const Window& w, int64_t index, const int64_t* origin, int64_t& code) {
    if (index < 0 || index >= w.input[0] * w.input[1] * w.input[2]) return false;
    int64_t where[3];
    for (int k = 2; k >= 0; --k) {
        where[k] = index % w.input[k];
        index /= w.input[k];
    }
    code = 0;
    for (int k = 0; k < 3; ++k) {
        const int64_t distance = where[k] - origin[k], offset = distance / w.dilation[k];
        if (distance < 0 || distance % w.dilation[k] != 0 || offset >= w.kernel[k]) return false;
        code = code * w.kernel[k] + offset;
    }
    return true;
}

// Codes of `count` elements from `walk` on, with divisions, for windows of any shape. Returns how many are in no window.
inline int64_t codes_by_division(const Window& w, Walk& walk, const int64_t* indices, int64_t count, int32_t* codes) {
    int64_t bad = 0;
    for (int64_t done = 0; done < count;) {
        const int64_t run = std::min(walk.run(), count - done);
        int64_t origin[3] = {walk.origin(0), walk.origin(1), walk.origin(2)};
        for (int64_t i = done; i < done + run; ++i, origin[2] += walk.step()) {
            int64_t code;
            const bool good = code_of(w, indices[i], origin, code);
            codes[i] = good ? int32_t(code) : 0;
            bad += !good;
        }
        walk.advance(run);
        done += run;
    }
    return bad;
}

// The state of codes_by_distance: for each of `count` elements, what is left of its distance from the window's origin,
// and the code that the digits found so far make.
struct Distances {
    int32_t rest[kRun], where[3][kRun];  // where[k]: origin in dimension k
    uint32_t wrong[kRun];
};

// The digit of dimension k: how many steps fit into the rest, found by comparing, so that it is vector code. `kernel` is
// the window's size, known at compile time. A digit that leads out of the input is wrong: there the distance wraps around
// the end of a row, and the index is elsewhere.
template <int kernel>
inline void take_digit(const Window& w, int k, int32_t step, int64_t count, Distances& d, int32_t* codes) {
    const int32_t dilation = int32_t(w.dilation[k]);
    const uint32_t input = uint32_t(w.input[k]);
    for (int64_t i = 0; i < count; ++i) {
        int32_t digit = 0;
        for (int j = 1; j < kernel; ++j) digit += d.rest[i] >= j * step;
        d.rest[i] -= digit * step;
        codes[i] = codes[i] * kernel + digit;
        d.wrong[i] |= uint32_t(uint32_t(d.where[k][i] + digit * dilation) >= input);
    }
}

// The same for a size that is not known at compile time.
inline void take_any_digit(const Window& w, int k, int32_t step, int64_t count, Distances& d, int32_t* codes) {
    const int32_t kernel = int32_t(w.kernel[k]), dilation = int32_t(w.dilation[k]);
    for (int64_t i = 0; i < count; ++i) {
        const int32_t digit = std::min(std::max(d.rest[i], 0) / step, kernel - 1);
        d.rest[i] -= digit * step;
        codes[i] = codes[i] * kernel + digit;
        d.wrong[i] |= uint32_t(uint32_t(d.where[k][i] + digit * dilation) >= uint32_t(w.input[k]));
    }
}

// The same for windows whose positions are all different distances from the origin in the flat input
// (Window::distinct): digit by digit, largest step first.
inline int64_t codes_by_distance(const Window& w, Walk& walk, const int64_t* indices, int64_t count, int32_t* codes) {
    Distances d;
    constexpr int64_t far = int64_t(1) << 30;  // of an index of garbage; no distance of a position comes near
    const int first = w.flat ? 1 : 0;
    for (int64_t done = 0; done < count;) {
        const int64_t run = std::min(walk.run(), count - done), flat = walk.flat_origin(), step = walk.step();
        const int64_t* const index = indices + done;
        int32_t* const rest = d.rest + done;
        prefetch_ahead(index, run);
        for (int64_t i = 0; i < run; ++i) rest[i] = int32_t(std::min(std::max(index[i] - flat - i * step, -far), far));
        for (int k = first; k < 3; ++k) {
            const int32_t origin = int32_t(walk.origin(k)), slope = k == 2 ? int32_t(step) : 0;
            int32_t* const where = d.where[k] + done;
            for (int32_t i = 0; i < int32_t(run); ++i) where[i] = origin + i * slope;
        }
        walk.advance(run);
        done += run;
    }
    std::fill_n(d.wrong, count, 0u);
    std::fill_n(codes, count, 0);
    const int64_t flat_step[3] = {w.input[1] * w.input[2], w.input[2], 1};
    for (int k = first; k < 3; ++k) {
        const int32_t step = int32_t(w.dilation[k] * flat_step[k]);
        switch (w.kernel[k]) {
            case 1: take_digit<1>(w, k, step, count, d, codes); break;
            case 2: take_digit<2>(w, k, step, count, d, codes); break;
            case 3: take_digit<3>(w, k, step, count, d, codes); break;
            default: take_any_digit(w, k, step, count, d, codes);
        }
    }
    int64_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t none = d.wrong[i] | uint32_t(d.rest[i] != 0);
        codes[i] = none ? 0 : codes[i];
        bad += none;
    }
    return bad;
}

int64_t encode_windows(const WindowEncodeJob& job, int64_t begin, int64_t end) {
    const Window& w = *job.window;
    Walk walk(w, begin);
    int32_t codes[kRun];
    int64_t bad = 0;
    for (int64_t i = begin; i < end; i += kRun) {  // `begin` and kRun are multiples of 8: whole bytes
        const int64_t count = std::min(kRun, end - i);
        const auto find = w.distinct ? codes_by_distance : codes_by_division;
        bad += find(w, walk, job.indices + i, count, codes);
        encode_fields(codes, count, w.bits, 0, job.packed + i / 8 * w.bits);
    }
    return bad;
}

void decode_windows(const WindowDecodeJob& job, int64_t begin, int64_t end) {
    const Window& w = *job.window;
    Walk walk(w, begin);
    int32_t codes[kRun];
    for (int64_t i = begin; i < end; i += kRun) {
        const int64_t count = std::min(kRun, end - i);
        decode_fields(job.packed + i / 8 * w.bits, count, w.bits, 0, codes);
        for (int64_t done = 0; done < count;) {
            const int64_t run = std::min(walk.run(), count - done), flat = walk.flat_origin(), step = walk.step();
            int64_t* out = job.out + i + done;
            if (job.distances != nullptr) {
                for (int64_t j = 0; j < run; ++j) out[j] = flat + j * step + job.distances[codes[done + j]];
            } else {
                for (int64_t j = 0; j < run; ++j) out[j] = flat + j * step + w.distance(uint32_t(codes[done + j]));
            }
            walk.advance(run);
            done += run;
        }
    }
}

// Zeros of the input's size, then a sum: what each window of parts [begin, end) adds goes where its code says. A part is
// what windows do not cross: a channel of a sample, or with inner > 1 a sample. A part is cleared row by row, just ahead
// of the windows that reach there, so that it is in the cache when they come.
template <class T>
inline void scatter_as(const WindowScatterJob& job, int64_t begin, int64_t end) {
    const Window& w = *job.window;
    const int64_t positions = w.input[0] * w.input[1] * w.input[2];
    const int64_t windows = w.output[0] * w.output[1] * w.output[2] * w.inner;
    const int64_t reach = ((w.kernel[0] - 1) * w.dilation[0] * w.input[1] + (w.kernel[1] - 1) * w.dilation[1] + 1) * w.input[2];
    int32_t codes[kRun];
    for (int64_t part = begin; part < end; ++part) {
        T* const out = static_cast<T*>(job.out) + part * positions * w.inner;
        const T* const grad = static_cast<const T*>(job.grad) + part * windows;
        int64_t cleared = 0;  // positions
        const auto clear = [&](int64_t until) {
            until = std::min(until, positions);
            if (until <= cleared) return;
            std::memset(out + cleared * w.inner, 0, size_t((until - cleared) * w.inner) * sizeof(T));
            cleared = until;
        };
        const int64_t first = part * windows;
        Walk walk(w, first);
        for (int64_t i = 0; i < windows;) {
            const int64_t lead = (first + i) % 8, count = std::min(kRun - lead, windows - i);  // fields begin at whole bytes
            decode_fields(job.packed + (first + i) / 8 * w.bits, lead + count, w.bits, 0, codes);
            for (int64_t done = 0; done < count;) {
                const int64_t run = std::min(walk.run(), count - done), flat = walk.flat_origin(), step = walk.step();
                clear((walk.origin(0) * w.input[1] + walk.origin(1)) * w.input[2] + reach);
                const int32_t* const code = codes + lead + done;
                const T* const from = grad + i + done;
                const int64_t column = walk.column();
                for (int64_t j = 0; j < run; ++j) {
                    const int64_t distance = job.distances != nullptr ? job.distances[code[j]] : w.distance(uint32_t(code[j]));
                    const int64_t position = flat + j * step + distance;
                    // Of a damaged code the position may be anywhere.
                    if (uint64_t(position) < uint64_t(cleared)) out[position * w.inner + (w.inner > 1 ? column + j : 0)] += from[j];
                }
                walk.advance(run);
                done += run;
            }
            i += count;
        }
        clear(positions);
    }
}

void scatter_windows(const WindowScatterJob& job, int64_t begin, int64_t end) {
    if (job.wide) scatter_as<double>(job, begin, end);
    else scatter_as<float>(job, begin, end);
}
