// The kernels of libbackstash_native.so that the compiled functions call themselves, and memory for what they make.
// Python tells the addresses: see stash/compiled.py. Where that library is not there they are null, and the references
// are called, which know of other kernels.
#pragma once

#include "slots.h"

#include <cstdint>

namespace backstash {

// For each its name, what it returns, and what it takes. See ops/cpu, which has the same signatures.
#define BACKSTASH_KERNELS(X) \
    X(bs_affine, void, (const void*, const void*, const void*, const void*, const void*, const void*, void*, int64_t, \
                        int64_t, int64_t, int, double, double, const void*, void*, int)) \
    X(bs_advise_huge, int, (void*, int64_t)) \
    X(bs_bitmask_encode, void, (const void*, int64_t, int, int, double, double, void*, int)) \
    X(bs_binary_encode, int64_t, (const void*, int64_t, int, uint64_t, uint64_t, void*, int)) \
    X(bs_look, void, (const void*, int, int64_t, int64_t, int64_t, int64_t*, int64_t*)) \
    X(bs_mask_decode, void, (const void*, void*, int64_t, int, uint64_t, uint64_t, int)) \
    X(bs_zvc_decode, int, (const void*, const void*, const void*, int64_t, void*, int64_t, int, int)) \
    X(bs_zvc_gather, void, (const void*, int64_t, int, void*, void*, void*, int64_t, int)) \
    X(bs_zvc_mark, int64_t, (const void*, int64_t, int, void*, void*, int))

namespace kernel {
#define BACKSTASH_DECLARE_KERNEL(name, result, arguments) inline result(*name) arguments = nullptr;
BACKSTASH_KERNELS(BACKSTASH_DECLARE_KERNEL)
#undef BACKSTASH_DECLARE_KERNEL
}  // namespace kernel

// Lets other threads of Python run while a kernel does, if it has so many bytes to work on that they may wait for it.
class WithoutGil {
public:
    explicit WithoutGil(long long nbytes) : state_(nbytes >= LONG ? PyEval_SaveThread() : nullptr) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }

private:
    static constexpr long long LONG = 64 << 10;
    PyThreadState* state_;
};

// kernels.cpp
PyObject* bind(PyObject*, PyObject* address_of);
int threads_for(long long nbytes);         // see planes.threads_for; -1 with an error set
void* data_of(PyObject* x);                // where a tensor's elements begin; an error may be set
PyObject* empty_like(PyObject* spec);                    // new memory laid out like a spec, on a CPU
PyObject* empty_plane(long long numel, PyObject* dtype);  // see planes.new_plane
PyObject* take_memory(PyObject* value, PyObject* spec);  // see decode._take, of elements of the spec's type

}  // namespace backstash
