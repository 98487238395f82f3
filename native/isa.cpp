// Dispatch state, facts about the build, and advice to the kernel on memory.
#include "isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace bs {
namespace {

Isa best() {
#if BS_X86
    __builtin_cpu_init();
    // Also asks whether the operating system saves the wide registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
    return avx512 ? Isa::Avx512 : avx2 ? Isa::Avx2 : Isa::Scalar;
#else
    return Isa::Scalar;
#endif
}

Isa at_most(Isa cap) { return best() < cap ? best() : cap; }

Isa from_environment() {
    const char* asked = std::getenv("BACKSTASH_ISA");
    if (asked != nullptr && std::strcmp(asked, "scalar") == 0) return Isa::Scalar;
    if (asked != nullptr && std::strcmp(asked, "avx2") == 0) return at_most(Isa::Avx2);
    return best();  // ops/cpu refuses other names with a proper message
}

Isa chosen = from_environment();

}  // namespace

Isa isa() { return chosen; }

}  // namespace bs

BS_EXPORT int bs_isa() { return int(bs::chosen); }

// The number of the interface to Python (INTERFACE in library.py): one more whenever a signature changes, or there is a
// function more that the interpreter of scripts calls.
BS_EXPORT int bs_interface() { return 3; }

// Caps the instruction set (for tests; not while a kernel runs). Returns what serves now, which may be less.
BS_EXPORT int bs_set_isa(int cap) {
    bs::chosen = bs::at_most(bs::Isa(cap < 0 ? 0 : cap > 2 ? 2 : cap));
    return int(bs::chosen);
}

BS_EXPORT const char* bs_compiler() { return "" __VERSION__; }

// 0 where the library was built without OpenMP, so that every kernel is serial.
BS_EXPORT int bs_has_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// Asks for huge pages behind [address, address + nbytes), which must not have been touched yet to gain anything: the
// first touch then costs one fault per 2 MiB instead of one per 4 KiB. Returns 0 where the kernel took the advice.
BS_EXPORT int bs_advise_huge(void* address, int64_t nbytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (uintptr_t(address) + page - 1) & ~(page - 1);
    const uintptr_t end = (uintptr_t(address) + uintptr_t(nbytes)) & ~(page - 1);
    if (begin >= end) return -1;
    return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)nbytes;
    return -1;
#endif
}
