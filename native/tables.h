// AVX2 has no compress and no expand: a byte of mask looks its permutation up here.
#pragma once

#include <cstdint>

namespace bs {

struct Permutations {
    // Eight bytes in a uint64: byte i is the lane that result lane i comes from.
    uint64_t compress[256];  // the positions of the set bits, in order
    uint64_t expand[256];    // how many bits are set below bit i
};

constexpr Permutations make_permutations() {
    Permutations tables{};
    for (int m = 0; m < 256; ++m) {
        int count = 0;
        for (int bit = 0; bit < 8; ++bit) {
            tables.expand[m] |= uint64_t(count & 7) << (8 * bit);
            if (m >> bit & 1) tables.compress[m] |= uint64_t(bit) << (8 * count++);
        }
    }
    return tables;
}

inline constexpr Permutations kPermutations = make_permutations();  // 4 KiB: stays in the first-level cache

}  // namespace bs
