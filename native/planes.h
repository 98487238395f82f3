// How the interpreter of scripts calls a codec's kernels where the planes have one size: they lie one behind the other in
// one piece of memory, and `how` is a structure of the codec's own. See replay/kernels.py, which fills it in.
#pragma once

#include <cstdint>

// Returns how many elements the code cannot hold. Unless there are none, the planes are of no use.
using BsEncodePlanes = int64_t(const void* x, int64_t n, const void* how, void* planes, int threads);

using BsDecodePlanes = void(const void* planes, int64_t n, const void* how, void* out, int threads);
