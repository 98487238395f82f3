// Takes in what autograd saves, without the interpreter where that is a parameter or a small tensor: see
// Forward.pack in capture/forward.py, and HeldParameter and ParameterStorages in stash/parameters.py.
#include "slots.h"

namespace backstash {
namespace {

// Whether a dict of weak references by address knows that storage: 1 or 0, or -1 with an error set.
int knows(PyObject* parameters, const Field& references, PyObject* cdata, PyObject* storage) {
    Owned known(get(parameters, references));
    if (!known) return -1;
    PyObject* reference = PyDict_GetItemWithError(known.get(), cdata);
    if (reference == nullptr) return PyErr_Occurred() ? -1 : 0;
    Owned alive(PyObject_CallNoArgs(reference));
    return alive ? alive.get() == storage : -1;
}

PyObject* hold_parameter(PyObject* x, PyObject* nbytes) {
    Facts facts;
    const int leaf = read_facts(x, facts) ? facts.is_leaf : is_true(x, s_is_leaf);
    if (leaf < 0) return nullptr;
    Owned held(leaf ? Py_NewRef(x) : tensor_detach(x));
    Owned version(held ? tensor__version(x) : nullptr);
    Owned all(version ? PyTuple_Pack(3, held.get(), version.get(), nbytes) : nullptr);
    if (!all) return nullptr;
    Owned given(PyTuple_Pack(1, all.get()));
    static const newfunc make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    if (!given) return nullptr;
    return untracked(make(reinterpret_cast<PyTypeObject*>(held_parameter), given.get(), nullptr));
}

// Notes bytes under an address in one of the dicts of the step's accounts.
bool note(PyObject* forward, const Field& totals, PyObject* cdata, PyObject* nbytes) {
    Owned step(get(forward, FIELD(forward, step)));
    Owned noted(step ? get(step.get(), totals) : nullptr);
    return noted && PyDict_SetItem(noted.get(), cdata, nbytes) == 0;
}

PyObject* otherwise(PyObject* forward, PyObject* x) {
    return PyObject_CallMethodObjArgs(forward, s_otherwise, x, nullptr);
}

// Whether a tensor is none that needs a closer look: 1 or 0, or -1 with an error set.
int is_common(PyObject* forward, PyObject* x) {
    const int idle = is_true(forward, FIELD(forward, is_idle));
    if (idle != 0) return idle < 0 ? -1 : 0;
    const int outside = is_same(forward, FIELD(forward, _call), Py_None);
    if (outside <= 0) return outside;
    const int traced = is_traced();
    if (traced != 0) return traced < 0 ? -1 : 0;
    return is_strided(x);
}

}  // namespace

PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 2, "pack takes a Forward and a tensor")) return nullptr;
    PyObject *forward = args[0], *x = args[1];
    if (!is_plain(x)) return otherwise(forward, x);
    NoTorchFunction unseen(x);
    const int common = unseen ? is_common(forward, x) : -1;
    if (common < 0) return nullptr;
    Owned base(access != nullptr ? access->base(x) : PyObject_GetAttr(x, s__base));
    if (!base) return nullptr;
    if (!common || (base.get() != Py_None && !is_plain(base.get()))) return otherwise(forward, x);
    Owned storage(tensor_untyped_storage(x));
    const long long in_storage = storage ? nbytes_of(storage.get()) : -1;
    Owned of_storage(in_storage < 0 ? nullptr : PyLong_FromLongLong(in_storage));
    const long long of_tensor = of_storage ? nbytes_of_tensor(x) : -1;
    Owned nbytes(of_tensor < 0 ? nullptr : PyLong_FromLongLong(of_tensor));
    Owned cdata(nbytes ? cdata_of(storage.get()) : nullptr);
    Owned counted(cdata ? get(forward, FIELD(forward, counted)) : nullptr);
    static PyObject* one = PyLong_FromLong(1);
    if (!counted || !add_to(counted.get(), 0, one) || !add_to(counted.get(), 1, nbytes.get())) return nullptr;
    Owned parameters(get(forward, FIELD(forward, parameters)));
    if (!parameters) return nullptr;
    int is_parameter = knows(parameters.get(), FIELD(storages, _state), cdata.get(), storage.get());
    if (is_parameter == 0) {
        is_parameter = knows(parameters.get(), FIELD(storages, _recognised), cdata.get(), storage.get());
        const bool may_be = type_of(x) == parameter_type || type_of(base.get()) == parameter_type;
        if (is_parameter == 0 && may_be) {
            Owned found(PyObject_CallMethodObjArgs(parameters.get(), s_include, x, storage.get(), nullptr));
            is_parameter = found ? found.get() == Py_True : -1;
        }
    }
    if (is_parameter < 0) return nullptr;
    if (is_parameter) {
        const bool is_noted = note(forward, FIELD(step, parameters), cdata.get(), of_storage.get());
        return is_noted ? hold_parameter(x, nbytes.get()) : nullptr;
    }
    Owned contents(get(forward, FIELD(forward, _contents)));
    const long long smallest = contents ? integer(contents.get(), FIELD(contents, min_nbytes)) : -1;
    if (smallest == -1 && PyErr_Occurred()) return nullptr;
    if (PyLong_AsLongLong(of_storage.get()) < smallest)
        return note(forward, FIELD(step, small), cdata.get(), of_storage.get()) ? hold_in(x) : nullptr;
    Owned saved(pack_large(forward, x, base.get()));
    if (!saved || saved.get() != Py_None) return saved.release();
    return PyObject_CallMethodObjArgs(forward, s__pack_large, x, x, Py_None, nullptr);
}

}  // namespace backstash
