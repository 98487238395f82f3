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
    inline PyObject* ask_##name(PyObject* x) { \
        const Attribute& asked = of_tensor::name; \
        return is_plain(x) ? asked.get(asked.object, x, type_of(x)) : PyObject_GetAttr(x, s_##name); \
    }
#define BACKSTASH_CALL_METHOD(name) \
    inline PyObject* ask_##name(PyObject* x) { \
        if (!is_plain(x)) return PyObject_CallMethodObjArgs(x, s_##name, nullptr); \
        return PyObject_CallFunctionObjArgs(of_tensor::name, x, nullptr); \
    }
BACKSTASH_ATTRIBUTES_OF_TENSORS(BACKSTASH_ASK_ATTRIBUTE)
BACKSTASH_METHODS_OF_TENSORS(BACKSTASH_CALL_METHOD)
#undef BACKSTASH_ASK_ATTRIBUTE
#undef BACKSTASH_CALL_METHOD

// Whether a tensor's facts can be read at once, which they are then.
inline bool read_facts(PyObject* x, Facts& facts) { return access != nullptr && is_plain(x) && access->facts(x, &facts); }

// Whether a tensor's class is known, so that torch can be asked about it.
inline bool is_known(PyObject* x) { return access != nullptr && is_plain(x); }

inline PyObject* tensor_device(PyObject* x) { return ask_device(x); }
inline PyObject* tensor_shape(PyObject* x) { return ask_shape(x); }
inline PyObject* tensor_stride(PyObject* x) { return ask_stride(x); }
inline PyObject* tensor_layout(PyObject* x) { return ask_layout(x); }

inline PyObject* tensor_dtype(PyObject* x) {
    Facts facts;
    return read_facts(x, facts) ? Py_NewRef(facts.dtype) : ask_dtype(x);
}

inline PyObject* tensor_detach(PyObject* x) { return is_known(x) ? access->detach(x) : ask_detach(x); }

inline PyObject* tensor_untyped_storage(PyObject* x) { return is_known(x) ? access->storage(x) : ask_untyped_storage(x); }

// The following are -1 with an error set, unless they are addresses.
inline long long as_number(PyObject* answer) {
    const Owned owned(answer);
    return answer != nullptr ? PyLong_AsLongLong(answer) : -1;
}

inline long long version_of(PyObject* x) {
    Facts facts;
    if (read_facts(x, facts) && facts.version >= 0) return facts.version;
    return as_number(ask__version(x));  // which may raise
}

inline PyObject* tensor__version(PyObject* x) {
    const long long version = version_of(x);
    return PyErr_Occurred() ? nullptr : PyLong_FromLongLong(version);
}

inline long long numel_of(PyObject* x) {
    Facts facts;
    return read_facts(x, facts) && facts.is_strided ? facts.numel : as_number(ask_numel(x));
}

inline long long itemsize_of(PyObject* x) {
    Facts facts;
    return read_facts(x, facts) ? facts.itemsize : as_number(ask_itemsize(x));
}

inline long long dimensions_of(PyObject* x) {
    Facts facts;
    return read_facts(x, facts) && facts.is_strided ? facts.dim : as_number(ask_dim(x));
}

inline long long offset_of(PyObject* x) {
    Facts facts;
    return read_facts(x, facts) && facts.is_strided ? facts.offset : as_number(ask_storage_offset(x));
}

inline long long nbytes_of_tensor(PyObject* x) {
    Facts facts;
    return read_facts(x, facts) && facts.is_strided ? facts.nbytes : integer(x, s_nbytes);
}

inline void* address_of(PyObject* x) {
    if (is_known(x)) return access->data(x);
    const Owned address(ask_data_ptr(x));
    return address ? PyLong_AsVoidPtr(address.get()) : nullptr;
}

// Whether it is on a CPU: 1 or 0, or -1 with an error set.
inline int is_on_cpu(PyObject* x) {
    Facts facts;
    if (read_facts(x, facts)) return facts.is_cpu;
    const Owned answer(ask_is_cpu(x));
    return answer ? answer.get() == Py_True : -1;
}

// Whether sizes, or strides, are those of a tuple; false with an error set where that does not hold numbers.
inline bool are_numbers(PyObject* tuple, const int64_t* numbers, int64_t dim) {
    if (PyTuple_Size(tuple) != dim) return false;
    for (int64_t index = 0; index < dim; ++index)
        if (PyLong_AsLongLong(PyTuple_GetItem(tuple, index)) != numbers[index]) return false;
    return true;
}

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
    if (is_plain_storage && access != nullptr) return access->storage_nbytes(storage);
    Owned nbytes(is_plain_storage ? PyObject_CallFunctionObjArgs(of_tensor::nbytes_of_storage, storage, nullptr)
                                  : PyObject_CallMethodObjArgs(storage, s_nbytes, nullptr));
    return nbytes ? PyLong_AsLongLong(nbytes.get()) : -1;
}

// Bytes of the storage of a tensor: -1 with an error set.
inline long long storage_nbytes(PyObject* x) {
    Facts facts;
    if (read_facts(x, facts) && facts.storage != nullptr) return facts.storage_nbytes;
    Owned storage(tensor_untyped_storage(x));
    return storage ? nbytes_of(storage.get()) : -1;
}

// Whether a tensor is dense in torch's sense, not sparse: 1 or 0, or -1 with an error set.
inline int is_strided(PyObject* x) {
    Facts facts;
    if (read_facts(x, facts)) return facts.is_strided;
    Owned layout(tensor_layout(x));
    return layout ? layout.get() == strided : -1;
}

// Whether a tensor has that version: 1 or 0, or -1 with an error set.
inline int has_version(PyObject* x, PyObject* version) {
    const long long now = version_of(x);
    return PyErr_Occurred() ? -1 : now == PyLong_AsLongLong(version);
}

// The address of a storage, by which Python knows it: a new reference.
inline PyObject* cdata_of(PyObject* storage) {
    const bool is_known = access != nullptr && type_of(storage) == storage_type;
    return is_known ? PyLong_FromVoidPtr(const_cast<void*>(access->storage_address(storage)))
                    : PyObject_GetAttr(storage, s__cdata);
}

// Whether a storage's object is that of the storage at an address: 1 or 0, or -1 with an error set.
inline int is_storage_at(PyObject* storage, const void* address) {
    if (access != nullptr && type_of(storage) == storage_type) return access->storage_address(storage) == address;
    const Owned cdata(PyObject_GetAttr(storage, s__cdata));
    return cdata ? PyLong_AsVoidPtr(cdata.get()) == address : -1;
}

// How many references there are to the storage at that address, its object among them: -1 with an error set.
inline long long uses_of(PyObject* cdata) {
    if (access != nullptr) return access->use_count(PyLong_AsVoidPtr(cdata));
    return as_number(PyObject_CallFunctionObjArgs(storage_use_count, cdata, nullptr));
}

}  // namespace backstash
