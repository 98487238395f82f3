// What native/replay/access.cpp reads of torch's own objects, for the compiled functions: a table of C functions, so that
// these need neither torch's headers nor its libraries, and work without the table, by attributes, on any torch.
#pragma once

#include <Python.h>

#include <cstdint>

namespace backstash {

// Raised whenever the table changes: an older one is not taken.
constexpr int ACCESS_NUMBER = 1;

// Everything about a tensor but its numbers. The tensor holds what is pointed to.
struct Facts {
    const void* storage;  // null where it has none
    int64_t storage_nbytes, nbytes, numel, offset, itemsize, dim;
    const int64_t *sizes, *strides;  // null where it is not strided
    int64_t version;                 // -1 where it has none
    PyObject* dtype;                 // borrowed
    bool is_strided, is_odd, is_cpu, is_floating, requires_grad, is_leaf, is_view;
};

// Each takes a tensor's object where it takes an object, and raises only where it makes one.
struct Access {
    int number;
    int (*facts)(PyObject* x, Facts* facts);                  // whether they are known: not those of every wrapper
    int (*is_on)(PyObject* x, PyObject* device);              // whether its device is that torch.device
    void* (*data)(PyObject* x);                               // where its elements begin, or it raises
    PyObject* (*base)(PyObject* x);                           // what it is a view of; None
    PyObject* (*detach)(PyObject* x);                         // these make a new object, or raise
    PyObject* (*clone)(PyObject* x);                          // of its detached alias
    PyObject* (*storage)(PyObject* x);
    PyObject* (*as_strided)(PyObject* x, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t offset);
    PyObject* (*empty)(int64_t dim, const int64_t* sizes, const int64_t* strides, PyObject* dtype, PyObject* device);
    int64_t (*storage_nbytes)(PyObject* storage);             // of a plain UntypedStorage
    const void* (*storage_address)(PyObject* storage);        // its _cdata
    int64_t (*use_count)(const void* storage);                // by that address
    int64_t (*function_modes)();                              // of this thread
    int64_t (*dispatch_modes)();
    int (*is_transformed)();                                  // by functorch, or recorded by torch.jit.trace
    int (*is_in_backward)();
    int (*has_autocast)();                                    // for any type of device
    int (*has_grad_mode)();
    void (*set_grad_mode)(int);
};

}  // namespace backstash
