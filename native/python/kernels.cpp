// See kernels.h.
#include "kernels.h"

namespace backstash {
namespace {

constexpr long long SERIAL_BELOW = 256 << 10;  // as in ops/cpu/planes.py
constexpr long long HUGE_FROM = 4 << 20;       // as in ops/cpu/library.py

// The arguments ``dtype=dtype, device="cpu"``: a borrowed reference, or null with an error set.
PyObject* on_cpu(PyObject* dtype) {
    PyObject* found = PyDict_GetItemWithError(known_arguments, dtype);
    if (found != nullptr || PyErr_Occurred()) return found;
    Owned made(PyDict_New());
    if (!made || PyDict_SetItem(made.get(), s_dtype, dtype) != 0) return nullptr;
    if (PyDict_SetItem(made.get(), s_device, s_cpu) != 0) return nullptr;
    if (PyDict_SetItem(known_arguments, dtype, made.get()) != 0) return nullptr;
    return made.get();
}

}  // namespace

// Takes a function that returns the address of the kernel with that name, or None.
PyObject* bind(PyObject*, PyObject* address_of) {
#define BACKSTASH_BIND(name, result, arguments) \
    { \
        Owned address(PyObject_CallFunction(address_of, "s", #name)); \
        void* at = address && address.get() != Py_None ? PyLong_AsVoidPtr(address.get()) : nullptr; \
        if (PyErr_Occurred()) return nullptr; \
        kernel::name = reinterpret_cast<result(*) arguments>(at); \
    }
    BACKSTASH_KERNELS(BACKSTASH_BIND)
#undef BACKSTASH_BIND
    Py_RETURN_NONE;
}

int threads_for(long long nbytes) {
    if (nbytes < SERIAL_BELOW) return 1;
    Owned number(PyObject_CallNoArgs(get_num_threads));
    return number ? static_cast<int>(PyLong_AsLong(number.get())) : -1;
}

void* data_of(PyObject* x) {
    return address_of(x);
}

PyObject* empty_like(PyObject* spec) {
    PyObject* kwargs = on_cpu(at(spec, layout::spec.dtype));
    if (kwargs == nullptr) return nullptr;
    Owned args(PyTuple_Pack(2, at(spec, layout::spec.shape), at(spec, layout::spec.stride)));
    return args ? PyObject_Call(empty_strided, args.get(), kwargs) : nullptr;
}

PyObject* empty_plane(long long numel, PyObject* dtype) {
    PyObject* kwargs = on_cpu(dtype);
    if (kwargs == nullptr) return nullptr;
    Owned args(Py_BuildValue("(L)", numel));
    Owned made(args ? PyObject_Call(empty, args.get(), kwargs) : nullptr);
    if (!made || numel < HUGE_FROM / 8) return made.release();
    const long long nbytes = nbytes_of_tensor(made.get());
    void* data = nbytes < 0 ? nullptr : data_of(made.get());
    if (PyErr_Occurred()) return nullptr;
    if (nbytes >= HUGE_FROM) kernel::bs_advise_huge(data, nbytes);
    return made.release();
}

PyObject* take_memory(PyObject* value, PyObject* spec) {
    PyObject *buffers = at(value, layout::value.buffers), *live = at(value, layout::value.live);
    const bool is_common = is_a(buffers, layout::buffers) && is_none_at(live, layout::live.watcher);
    const bool is_small = number_at(spec, layout::spec.nbytes) < PyLong_AsLongLong(smallest_pooled);
    if (!is_common || !is_small)
        return PyObject_CallFunctionObjArgs(take_reference, value, spec, at(spec, layout::spec.dtype), nullptr);
    set(buffers, layout::buffers._lent, Py_None);
    return set_number(buffers, layout::buffers._keeps, 0) ? empty_like(spec) : nullptr;
}

}  // namespace backstash
