// When to write past the caches.
#pragma once

#include <cstdint>

#include "isa.h"

namespace bs {

// Whether an output is so large that it would push everything else out of the caches and still not be there when it is
// read. Measured with 32 MiB of third-level cache: decoding and then reading 16 MiB is 9 % faster through the caches,
// 24 MiB 3 % faster past them.
inline bool exceeds_caches(int64_t nbytes) { return nbytes >= int64_t(24) << 20; }

// Streaming stores want whole aligned lines; a view into the middle of a storage may not have them.
inline bool should_stream(const void* out, int64_t nbytes) {
    return exceeds_caches(nbytes) && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

// Streaming stores are not ordered with later ones; whoever made some calls this before it says that it is done.
inline void fence() {
#if BS_X86
    _mm_sfence();
#endif
}

// Asks for what a loop over x reads in a while. The hardware's own prefetching stops at the end of every 4 KiB page; with
// this, one Zen 5 core reads 45 instead of 37 GB/s. Past the end of x it does nothing.
template <class T>
inline void prefetch_ahead(const T* x, int64_t count) {
    constexpr int64_t ahead = 8192;
    const char* bytes = reinterpret_cast<const char*>(x) + ahead;
    for (int64_t line = 0; line < count * int64_t(sizeof(T)); line += 64) __builtin_prefetch(bytes + line);
}

}  // namespace bs
