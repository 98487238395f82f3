// Attributes and methods of plain tensors, of which the descriptors are known: to look one up by its name takes longer
// than to ask it. A tensor of any other class is asked by the name, because the class may have its own.
#pragma once

#include "objects.h"

namespace backstash {

#define BACKSTASH_ATTRIBUTES_OF_TENSORS(X) X(_version) X(device) X(dtype) X(is_cpu) X(itemsize) X(layout) X(shape)
#define BACKSTASH_METHODS_OF_TENSORS(X) \
    X(data_ptr) X(detach) X(dim) X(numel) X(storage_offset) X(stride) X(untyped_storage)

// A descriptor, and the function by which it is asked.
struct Attribute {
    PyObject* object;
    descrgetfunc get;
};

namespace of_tensor {
#define BACKSTASH_DECLARE_ATTRIBUTE(name) inline Attribute name{};
#define BACKSTASH_DECLARE_METHOD(name) inline PyObject* name = nullptr;
BACKSTASH_ATTRIBUTES_OF_TENSORS(BACKSTASH_DECLARE_ATTRIBUTE)
BACKSTASH_METHODS_OF_TENSORS(BACKSTASH_DECLARE_METHOD)
inline PyObject* nbytes_of_storage = nullptr;
#undef BACKSTASH_DECLARE_ATTRIBUTE
#undef BACKSTASH_DECLARE_METHOD
}  // namespace of_tensor

// Each returns a new reference, or null with an error set: tensor_shape(x) is x.shape, tensor_dim(x) is x.dim().
#define BACKSTASH_ASK_ATTRIBUTE(name) \
    inline PyObject* tensor_##name(PyObject* x) { \
        const Attribute& asked = of_tensor::name; \
        return is_plain(x) ? asked.get(asked.object, x, type_of(x)) : PyObject_GetAttr(x, s_##name); \
    }
#define BACKSTASH_CALL_METHOD(name) \
    inline PyObject* tensor_##name(PyObject* x) { \
        if (!is_plain(x)) return PyObject_CallMethodObjArgs(x, s_##name, nullptr); \
        return PyObject_CallFunctionObjArgs(of_tensor::name, x, nullptr); \
    }
BACKSTASH_ATTRIBUTES_OF_TENSORS(BACKSTASH_ASK_ATTRIBUTE)
BACKSTASH_METHODS_OF_TENSORS(BACKSTASH_CALL_METHOD)
#undef BACKSTASH_ASK_ATTRIBUTE
#undef BACKSTASH_CALL_METHOD

// Finds the descriptors, once torch's classes are known; returns whether all of them are there.
inline bool find_descriptors() {
#define BACKSTASH_FIND_ATTRIBUTE(name) \
    of_tensor::name.object = PyObject_GetAttr(tensor_type, s_##name); \
    if (of_tensor::name.object == nullptr) return false; \
    of_tensor::name.get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(of_tensor::name.object), Py_tp_descr_get)); \
    if (of_tensor::name.get == nullptr) return false;
#define BACKSTASH_FIND_METHOD(name) \
    of_tensor::name = PyObject_GetAttr(tensor_type, s_##name); \
    if (of_tensor::name == nullptr) return false;
    BACKSTASH_ATTRIBUTES_OF_TENSORS(BACKSTASH_FIND_ATTRIBUTE)
    BACKSTASH_METHODS_OF_TENSORS(BACKSTASH_FIND_METHOD)
#undef BACKSTASH_FIND_ATTRIBUTE
#undef BACKSTASH_FIND_METHOD
    of_tensor::nbytes_of_storage = PyObject_GetAttr(storage_type, s_nbytes);
    return of_tensor::nbytes_of_storage != nullptr;
}

// Bytes of a storage: -1 with an error set.
inline long long nbytes_of(PyObject* storage) {
    const bool is_plain_storage = type_of(storage) == storage_type;
    Owned nbytes(is_plain_storage ? PyObject_CallFunctionObjArgs(of_tensor::nbytes_of_storage, storage, nullptr)
                                  : PyObject_CallMethodObjArgs(storage, s_nbytes, nullptr));
    return nbytes ? PyLong_AsLongLong(nbytes.get()) : -1;
}

// Bytes of the storage of a tensor: -1 with an error set.
inline long long storage_nbytes(PyObject* x) {
    Owned storage(tensor_untyped_storage(x));
    return storage ? nbytes_of(storage.get()) : -1;
}

// Whether a tensor is dense in torch's sense, not sparse: 1 or 0, or -1 with an error set.
inline int is_strided(PyObject* x) {
    Owned layout(tensor_layout(x));
    return layout ? layout.get() == strided : -1;
}

// Whether a tensor has that version: 1 or 0, or -1 with an error set.
inline int has_version(PyObject* x, PyObject* version) {
    Owned now(tensor__version(x));
    return now ? PyObject_RichCompareBool(now.get(), version, Py_EQ) : -1;
}

}  // namespace backstash
