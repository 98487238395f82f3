// Which instruction sets the kernels are compiled for, and which of them serves.
//
// Every kernel is written once, in a file *_kernels.h, and compiled once per instruction set by foreach_isa.h, into the
// namespaces bs::scalar, bs::avx2 and bs::avx512. The target attribute is applied to all functions between
// BS_TARGET_BEGIN_* and BS_TARGET_END, so no -march flag is needed and one library runs everywhere.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define BS_X86 1
#include <immintrin.h>
#else
#define BS_X86 0
#endif

#define BS_EXPORT extern "C" __attribute__((visibility("default")))

// F16C came before AVX2 on every CPU, so it is not asked for (FMA is: a CPU may lack it); VBMI2 is what compresses 16-bit elements, and whoever has it has VBMI.
#define BS_FEATURES_AVX2 "avx,avx2,bmi,bmi2,popcnt,f16c,fma"
#define BS_FEATURES_AVX512 BS_FEATURES_AVX2 ",avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2"

#define BS_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define BS_PUSH_TARGET(features) BS_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define BS_TARGET_END BS_PRAGMA(clang attribute pop)
#else
#define BS_PUSH_TARGET(features) BS_PRAGMA(GCC push_options) BS_PRAGMA(GCC target(features))
#define BS_TARGET_END BS_PRAGMA(GCC pop_options)
#endif
#define BS_TARGET_BEGIN_AVX2 BS_PUSH_TARGET(BS_FEATURES_AVX2)
#define BS_TARGET_BEGIN_AVX512 BS_PUSH_TARGET(BS_FEATURES_AVX512)

namespace bs {

enum class Isa : int { Scalar = 0, Avx2 = 1, Avx512 = 2 };

// The instruction set that serves: the best one of this CPU, unless BACKSTASH_ISA or bs_set_isa asked for less.
Isa isa();

}  // namespace bs

// The function `name` of the instruction set that serves; all variants have the same type.
#if BS_X86
#define BS_PICK(name) \
    (::bs::isa() == ::bs::Isa::Avx512 ? ::bs::avx512::name \
                                      : ::bs::isa() == ::bs::Isa::Avx2 ? ::bs::avx2::name : ::bs::scalar::name)
#else
#define BS_PICK(name) (::bs::scalar::name)
#endif
