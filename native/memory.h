// When to write past the caches.
#pragma once

#include <cstdint>

#include "isa.h"

namespace bs {

// Outputs of this many bytes or more would push everything else out of the caches before anyone reads them.
constexpr int64_t kStreamBytes = int64_t(16) << 20;

// Streaming stores want whole aligned lines; a view into the middle of a storage may not have them.
inline bool should_stream(const void* out, int64_t nbytes) {
    return nbytes >= kStreamBytes && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

// Streaming stores are not ordered with later ones; whoever made some calls this before it says that it is done.
inline void fence() {
#if BS_X86
    _mm_sfence();
#endif
}

}  // namespace bs
