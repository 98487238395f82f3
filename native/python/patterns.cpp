// Whether a call is like the one that was noted at its place in an earlier step: see stash/patterns.py.
#include "slots.h"

#include <cstring>
#include <initializer_list>

namespace backstash {
namespace {

// What a method of a tensor without arguments says: 1 or 0, or -1 with an error set.
int says(PyObject* x, PyObject* method) {
    Owned answer(PyObject_CallMethodObjArgs(x, method, nullptr));
    return answer ? answer.get() == Py_True : -1;
}

bool fits(PyObject* arg, PyObject* known, PyObject* storage, bool aliases, PyObject* found, int depth);

bool fits_slot(PyObject* arg, PyObject* slot, PyObject* storage, bool aliases, PyObject* found) {
    if (at(slot, layout::slot.kind) != type_of(arg)) return false;
    Facts facts;
    if (read_facts(arg, facts)) {
        if (!facts.is_strided || facts.is_odd || facts.offset != number_at(slot, layout::slot.offset)) return false;
        if (is_storage_at(storage, facts.storage) != aliases) return false;
        return looks_like(arg, at(slot, layout::slot.spec)) == 1 && PyList_Append(found, arg) == 0;
    }
    if (is_strided(arg) != 1) return false;
    Owned memory(tensor_untyped_storage(arg));
    if (!memory || (memory.get() == storage) != aliases) return false;
    if (looks_like(arg, at(slot, layout::slot.spec)) != 1 || is_odd(arg) != 0) return false;
    if (offset_of(arg) != number_at(slot, layout::slot.offset) || PyErr_Occurred()) return false;
    return PyList_Append(found, arg) == 0;
}

bool fits_items(PyObject* arg, PyObject* known, PyObject* storage, PyObject* found, int depth) {
    const Py_ssize_t number = PySequence_Size(known);
    if (number < 0 || PySequence_Size(arg) != number) return false;
    for (Py_ssize_t index = 0; index < number; ++index) {
        Owned item(PySequence_GetItem(arg, index));
        Owned other(item ? PySequence_GetItem(known, index) : nullptr);
        if (!other || !fits(item.get(), other.get(), storage, false, found, depth + 1)) return false;
    }
    return true;
}

// Whether an argument is like the known one. An error may be set where it is not.
bool fits(PyObject* arg, PyObject* known, PyObject* storage, bool aliases, PyObject* found, int depth) {
    if (type_of(known) == slot_type) return fits_slot(arg, known, storage, aliases, found);
    if (type_of(arg) != type_of(known)) return false;
    if (PyTuple_CheckExact(known) || PyList_CheckExact(known))
        return depth < 2 && fits_items(arg, known, storage, found, depth);
    if (arg == known) return true;
    if (PyFloat_CheckExact(known)) {
        const double number = PyFloat_AsDouble(arg), other = PyFloat_AsDouble(known);
        return std::memcmp(&number, &other, sizeof number) == 0;
    }
    return PyObject_RichCompareBool(arg, known, Py_EQ) == 1;
}

bool fits_named(PyObject* given, PyObject* known, PyObject* storage, PyObject* found) {
    if (PyDict_Size(given) != PyDict_Size(known)) return false;
    Py_ssize_t at = 0, other_at = 0;
    PyObject *key, *other_key, *arg, *other;
    while (PyDict_Next(given, &at, &key, &arg)) {
        if (!PyDict_Next(known, &other_at, &other_key, &other)) return false;
        if (key != other_key && PyObject_RichCompareBool(key, other_key, Py_EQ) != 1) return false;
        if (!fits(arg, other, storage, false, found, 0)) return false;
    }
    return true;
}

// Whether the result fills its storage as the known one did.
bool fits_result(PyObject* pattern, PyObject* result, PyObject* storage) {
    PyObject* spec = at(pattern, layout::pattern.result);
    if (looks_like(result, spec) != 1) return false;
    if (offset_of(result) != 0) return false;
    return number_at(spec, layout::spec.nbytes) == nbytes_of(storage) && !PyErr_Occurred();
}

bool fits_call(PyObject* pattern, PyObject* args, PyObject* kwargs, PyObject* storage, PyObject* found) {
    PyObject *known = at(pattern, layout::pattern.args), *named = at(pattern, layout::pattern.kwargs);
    const bool in_place = is_true_at(pattern, layout::pattern.in_place);
    if (PyTuple_Size(args) != PyTuple_Size(known)) return false;
    for (Py_ssize_t index = 0; index < PyTuple_Size(args); ++index) {
        const bool aliases = in_place && index == 0;
        PyObject *arg = PyTuple_GetItem(args, index), *other = PyTuple_GetItem(known, index);
        if (!fits(arg, other, storage, aliases, found, 0)) return false;
    }
    return fits_named(kwargs, named, storage, found);
}

}  // namespace

int looks_like(PyObject* x, PyObject* spec) {
    if (!is_a(spec, layout::spec)) {
        PyErr_SetString(PyExc_TypeError, "looks_like takes a tensor and a TensorSpec");
        return -1;
    }
    const auto& known = layout::spec;
    Facts facts;
    if (read_facts(x, facts) && facts.is_strided)
        return facts.dtype == at(spec, known.dtype) && are_numbers(at(spec, known.shape), facts.sizes, facts.dim) &&
               are_numbers(at(spec, known.stride), facts.strides, facts.dim) && access->is_on(x, at(spec, known.device));
    Owned own(tensor_dtype(x));
    if (!own) return -1;
    if (own.get() != at(spec, known.dtype)) return 0;
    own.reset(tensor_shape(x));
    int same = own ? PyObject_RichCompareBool(own.get(), at(spec, known.shape), Py_EQ) : -1;
    if (same <= 0) return same;
    own.reset(tensor_stride(x));
    same = own ? PyObject_RichCompareBool(own.get(), at(spec, known.stride), Py_EQ) : -1;
    if (same <= 0) return same;
    own.reset(tensor_device(x));
    return own ? PyObject_RichCompareBool(own.get(), at(spec, known.device), Py_EQ) : -1;
}

int is_odd(PyObject* x) {
    Facts facts;
    if (read_facts(x, facts)) return facts.is_odd;
    for (PyObject* name : {s_is_quantized, s_is_meta, s_is_nested}) {
        const int odd = is_true(x, name);
        if (odd != 0) return odd;
    }
    for (PyObject* method : {s_is_conj, s_is_neg, s_is_inference, s__is_zerotensor}) {
        const int odd = says(x, method);
        if (odd != 0) return odd;
    }
    return 0;
}

PyObject* is_odd_tensor(PyObject*, PyObject* x) {
    const int odd = is_odd(x);
    return odd < 0 ? nullptr : PyBool_FromLong(odd);
}

PyObject* looks_like_spec(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 2 || !is_a(args[1], layout::spec)) {
        PyErr_SetString(PyExc_TypeError, "looks_like takes a tensor and a TensorSpec");
        return nullptr;
    }
    const int same = looks_like(args[0], args[1]);
    return same < 0 ? nullptr : PyBool_FromLong(same);
}

// See patterns.fitting_reference.
PyObject* fitting(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 5 || !PyTuple_CheckExact(args[1]) || !PyDict_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "fitting takes a Pattern, arguments, a result and its storage");
        return nullptr;
    }
    Owned found(PyList_New(0));
    if (!found) return nullptr;
    if (!fits_result(args[0], args[3], args[4]) || !fits_call(args[0], args[1], args[2], args[4], found.get())) {
        const bool is_answer = !PyErr_Occurred() || (PyErr_ExceptionMatches(PyExc_Exception) &&
                                                     !PyErr_ExceptionMatches(PyExc_MemoryError));
        if (!is_answer) return nullptr;  // Ctrl-C, for example
        PyErr_Clear();  // what cannot be asked does not fit
        Py_RETURN_NONE;
    }
    Owned chosen(PyObject_GetAttr(args[0], s_chosen));
    if (!chosen) return nullptr;
    if (chosen.get() == Py_None) return found.release();
    const Py_ssize_t many = PyTuple_Size(chosen.get());
    Owned read(PyList_New(many));
    if (!read) return nullptr;
    for (Py_ssize_t index = 0; index < many; ++index) {
        const Py_ssize_t from = PyLong_AsSsize_t(PyTuple_GetItem(chosen.get(), index));
        PyObject* x = from < 0 ? nullptr : PyList_GetItem(found.get(), from);
        if (x == nullptr) return nullptr;
        PyList_SetItem(read.get(), index, Py_NewRef(x));
    }
    return read.release();
}

// The weak references of all storages of a module's parameters and buffers, by address: see parameters._state_storages.
// None where a tensor is not plain.
PyObject* state_of(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 2 || !PyDict_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "state_of takes a module and what is known of storages");
        return nullptr;
    }
    Owned found(PyDict_New()), modules(PyList_New(0));
    if (!found || !modules || PyList_Append(modules.get(), args[0]) != 0) return nullptr;
    for (Py_ssize_t index = 0; index < PyList_Size(modules.get()); ++index) {
        PyObject* module = PyList_GetItem(modules.get(), index);
        for (PyObject* name : {s__parameters, s__buffers}) {
            Owned tensors(PyObject_GetAttr(module, name));
            if (!tensors) return nullptr;
            if (!PyDict_Check(tensors.get())) Py_RETURN_NONE;
            Py_ssize_t at = 0;
            PyObject *key, *x;
            while (PyDict_Next(tensors.get(), &at, &key, &x)) {
                if (x == Py_None) continue;
                if (!is_plain(x)) Py_RETURN_NONE;
                const int dense = is_strided(x);
                if (dense < 0) return nullptr;
                if (!dense) continue;
                Owned storage(tensor_untyped_storage(x));
                Owned cdata(storage ? cdata_of(storage.get()) : nullptr);
                if (!cdata) return nullptr;
                PyObject* known = PyDict_GetItemWithError(args[1], cdata.get());
                if (known == nullptr && PyErr_Occurred()) return nullptr;
                Owned reference(known == nullptr ? PyWeakref_NewRef(storage.get(), nullptr) : Py_NewRef(known));
                if (!reference || PyDict_SetItem(found.get(), cdata.get(), reference.get()) != 0) return nullptr;
            }
        }
        Owned children(PyObject_GetAttr(module, s__modules));
        if (!children) return nullptr;
        if (!PyDict_Check(children.get())) Py_RETURN_NONE;
        Py_ssize_t at = 0;
        PyObject *key, *child;
        while (PyDict_Next(children.get(), &at, &key, &child))
            if (child != Py_None && PyList_Append(modules.get(), child) != 0) return nullptr;
    }
    return found.release();
}

}  // namespace backstash
