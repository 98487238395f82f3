// C interface of exponents. Layout: codecs/exponents/reference.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "isa.h"
#include "memory.h"
#include "parallel.h"

namespace bs {

constexpr int64_t kExponentsBlock = 512;  // ops.layout.EXPONENTS_BLOCK
constexpr int64_t kExponentsLanes = 32;   // ops.layout.EXPONENTS_LANES

struct ExponentsEncodeJob {
    const void* x;
    int64_t n;
    int width;  // bytes per element: 2 or 4
    int bits;
    uint8_t* fractions;
    uint8_t* codes;
    uint8_t* bases;
    int64_t* offsets;
    Slabs* slabs;      // of `scratch`
    uint8_t* scratch;  // escapes that are put aside until their number is known
    int64_t* places;   // of each chunk in `scratch`
    int64_t chunks;
    uint8_t* escapes;  // second pass only, as what follows
    int64_t stored;
    int64_t room;      // of `escapes`
    bool stream;
};

struct ExponentsDecodeJob {
    const uint8_t* fractions;
    const uint8_t* codes;
    const uint8_t* bases;
    const int64_t* offsets;
    const uint8_t* escapes;
    int64_t stored;
    void* out;
    int64_t n;
    int width;
    int bits;
    bool stream;
};

}  // namespace bs

#define BS_KERNELS "exponents_kernels.h"
#include "foreach_isa.h"

namespace bs {

// Chunks in a block of the parallel loop, as in zvc.cpp.
inline int64_t exponents_chunks(int64_t n) { return (n + kZvcChunk - 1) / kZvcChunk; }
inline int64_t exponents_turn(int64_t chunks) { return chunks >= 1024 ? 64 : 16; }

}  // namespace bs

// First pass of encode: everything but the escapes. Returns how many of these there are. They are put aside in `scratch`,
// as far as it has room, and `places` [chunks] says where.
BS_EXPORT int64_t bs_exponents_code(const void* x, int64_t n, int width, int bits, uint8_t* fractions, uint8_t* codes,
                                    uint8_t* bases, int64_t* offsets, uint8_t* scratch, int64_t scratch_room,
                                    int64_t* places, int threads) {
    const bool aligned = (reinterpret_cast<uintptr_t>(fractions) | reinterpret_cast<uintptr_t>(codes)) % 64 == 0 &&
                         (width == 2 || n % 32 == 0);  // of float32, bytes of the upper part begin after 2 n
    const int64_t chunks = bs::exponents_chunks(n);
    bs::Slabs slabs(scratch, scratch_room, std::max(threads, 1));
    bs::ExponentsEncodeJob job{};
    job.x = x, job.n = n, job.width = width, job.bits = bits;
    job.fractions = fractions, job.codes = codes, job.bases = bases, job.offsets = offsets;
    job.slabs = &slabs, job.scratch = scratch, job.places = places, job.chunks = chunks;
    job.stream = aligned && bs::exceeds_caches(n * (width - 1));
    const auto code = BS_PICK(code);
    bs::for_blocks(chunks, bs::exponents_turn(chunks), threads,
                   [&](int64_t begin, int64_t end) { code(job, begin, end); });
    return bs::sums_before(offsets, chunks);
}

// Second pass of encode: the escapes, of which there are `stored`, as far as there is room.
BS_EXPORT void bs_exponents_gather(const void* x, int64_t n, int width, int bits, uint8_t* codes, int64_t* offsets,
                                   uint8_t* scratch, int64_t* places, int64_t stored, uint8_t* escapes, int64_t room,
                                   int threads) {
    const int64_t chunks = bs::exponents_chunks(n);
    bs::ExponentsEncodeJob job{};
    job.x = x, job.n = n, job.width = width, job.bits = bits, job.codes = codes, job.offsets = offsets;
    job.scratch = scratch, job.places = places, job.chunks = chunks;
    job.escapes = escapes, job.stored = stored, job.room = room;
    const auto gather = BS_PICK(gather);
    bs::for_blocks(
        chunks, bs::exponents_turn(chunks), threads, [&](int64_t begin, int64_t end) { gather(job, begin, end); },
        bs::Order::Backward);
}

// Fills `out`. Returns 0, or -1 with `out` untouched where codes, offsets and `stored` disagree.
BS_EXPORT int bs_exponents_decode(const uint8_t* fractions, const uint8_t* codes, const uint8_t* bases,
                                  const int64_t* offsets, const uint8_t* escapes, int64_t stored, void* out, int64_t n,
                                  int width, int bits, int threads) {
    const bs::ExponentsDecodeJob job{fractions, codes, bases, offsets, escapes, stored,
                                     out,       n,     width, bits,    bs::should_stream(out, n * width)};
    const int64_t chunks = bs::exponents_chunks(n), turn = bs::exponents_turn(chunks);
    if (chunks == 0) return stored == 0 ? 0 : -1;
    if (offsets[0] != 0) return -1;
    const auto disagreements = BS_PICK(disagreements);
    bs::Sum wrong;
    bs::for_blocks(chunks, turn, threads,
                   [&](int64_t begin, int64_t end) { wrong.add(disagreements(job, begin, end)); });
    if (wrong.value() != 0) return -1;
    const auto decode = BS_PICK(decode);
    bs::for_blocks(chunks, turn, threads, [&](int64_t begin, int64_t end) { decode(job, begin, end); });
    return 0;
}
