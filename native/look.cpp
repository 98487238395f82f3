// C interface of a look at a sample. Reads a few lines of memory, so there is nothing to vectorise or to share.
#include <cstdint>

#include "isa.h"

namespace bs {

// What a sample shows: elements that are not zero, and different bit patterns, of which no more than 3 are told apart.
template <class U>
void look(const U* x, int64_t runs, int64_t run, int64_t step, int64_t* nonzeros, int64_t* patterns) {
    U first = x[0], second = x[0];
    int64_t set = 0, seen = 1;
    for (int64_t r = 0; r < runs; ++r) {
        for (const U* at = x + r * step; at < x + r * step + run; ++at) {
            set += *at != 0;
            if (*at == first || (seen > 1 && *at == second)) continue;
            if (seen == 1) second = *at;
            if (seen < 3) ++seen;
        }
    }
    *nonzeros = set;
    *patterns = seen;
}

}  // namespace bs

// Looks at `runs` runs of `run` elements (both > 0), each beginning `step` elements after the one before.
BS_EXPORT void bs_look(const void* x, int width, int64_t runs, int64_t run, int64_t step, int64_t* nonzeros,
                       int64_t* patterns) {
    switch (width) {
        case 2: return bs::look(static_cast<const uint16_t*>(x), runs, run, step, nonzeros, patterns);
        case 4: return bs::look(static_cast<const uint32_t*>(x), runs, run, step, nonzeros, patterns);
        default: return bs::look(static_cast<const uint64_t*>(x), runs, run, step, nonzeros, patterns);
    }
}
