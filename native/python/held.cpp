// Holds and reads saved tensors that nothing else is done with: what stash/held.py does, without the interpreter.
//
// These are the most frequent calls of all: one each for every tensor that an idle Session holds. Reading takes the
// fast way through the common case, and calls the reference in held.py for every other one, so that errors and rare
// cases are written once.
#include "kernels.h"

#include <initializer_list>

namespace backstash {
namespace {

bool count(PyObject* x, PyObject* counted) {
    static PyObject* one = PyLong_FromLong(1);
    if (!add_to(counted, 0, one)) return false;
    const int dense = is_strided(x);
    if (dense <= 0) return dense == 0;
    const long long bytes = nbytes_of_tensor(x);
    Owned nbytes(PyErr_Occurred() ? nullptr : PyLong_FromLongLong(bytes));
    return nbytes && add_to(counted, 1, nbytes.get());
}

// See held.hold_reference.
PyObject* hold(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 2, "hold takes a Holding and a tensor")) return nullptr;
    PyObject *holding = args[0], *x = args[1];
    Owned before(PyObject_GetAttr(holding, s_before));
    if (!before) return nullptr;
    if (before.get() != Py_None && !Owned(PyObject_CallNoArgs(before.get()))) return nullptr;
    NoTorchFunction unseen(x);
    const int traced = unseen ? is_traced() : -1;
    if (traced != 0) return traced < 0 ? nullptr : PyObject_CallFunctionObjArgs(hold_traced, x, nullptr);
    Owned counted(PyObject_GetAttr(holding, s_counted));
    if (!counted || !count(x, counted.get())) return nullptr;
    return hold_in(x);
}

// Whether a held tensor is what it was when it was saved, and needs no further look: 1 or 0, or -1 with an error set.
int is_as_it_was(PyObject* packed) {
    PyObject *tensor = PyTuple_GetItem(packed, 0), *version = PyTuple_GetItem(packed, 1);
    PyObject* reference = PyTuple_GetItem(packed, 2);
    PyObject* type = type_of(tensor);
    if (type != tensor_type && type != parameter_type) return 0;
    const int same_version = has_version(tensor, version);
    if (same_version <= 0 || type == parameter_type) return same_version;
    int is_dense = is_strided(tensor);
    if (is_dense <= 0) return is_dense;
    Owned storage(tensor_untyped_storage(tensor));
    const long long nbytes = storage ? nbytes_of(storage.get()) : -1;
    if (nbytes <= 0 || reference == Py_None) return nbytes < 0 ? -1 : nbytes > 0;
    Owned original(PyObject_CallNoArgs(reference));
    if (!original) return -1;
    if (original.get() == Py_None) return 1;
    is_dense = is_strided(original.get());
    if (is_dense <= 0) return is_dense;
    Owned memory(tensor_untyped_storage(original.get()));
    return memory ? memory.get() == storage.get() : -1;
}

PyObject* read_otherwise(PyObject* reading, PyObject* packed) {
    return PyObject_CallMethodObjArgs(reading, s_otherwise, packed, nullptr);
}

// What the node that runs is given of a matrix: made of it by that function, if the node is a linear layer's.
PyObject* read_matrix(PyObject* reading, PyObject* matrix, PyObject* node, PyObject* function) {
    Owned asked(PyObject_GetAttr(reading, function));
    if (!asked) return nullptr;
    const bool of_weight = asked.get() == claim_weight;
    if ((of_weight || asked.get() == claim_input)) {
        const long long itemsize = of_weight ? itemsize_of(matrix) : 0;
        const int large = itemsize < 0 ? -1 : is_large_layer(node, of_weight, itemsize);
        if (large <= 0) return large < 0 ? nullptr : Py_NewRef(matrix);
    }
    Owned name(PyObject_GetAttr(type_of(node), s___name__));
    Owned names(name ? PyObject_GetAttr(reading, s_of_nodes) : nullptr);
    const int is_asked = names ? PySequence_Contains(names.get(), name.get()) : -1;
    if (is_asked < 0) return nullptr;
    return is_asked ? PyObject_CallMethodObjArgs(reading, function, matrix, nullptr) : Py_NewRef(matrix);
}

// How many dimensions a tensor has: -1 with an error set.
long dimensions(PyObject* tensor) {
    return static_cast<long>(dimensions_of(tensor));
}

// See backward.unpack, of a HeldParameter.
PyObject* read_parameter(PyObject* reading, PyObject* packed) {
    PyObject *tensor = PyTuple_GetItem(packed, 0), *version = PyTuple_GetItem(packed, 1);
    PyObject* nbytes = PyTuple_GetItem(packed, 2);
    NoTorchFunction unseen(tensor);
    if (!unseen) return nullptr;
    if (!is_plain(tensor)) return read_otherwise(reading, packed);
    int is_common = has_version(tensor, version);
    if (is_common > 0) is_common = is_strided(tensor);
    const long long in_memory = is_common > 0 ? storage_nbytes(tensor) : is_common;
    if (in_memory < 0) return nullptr;
    if (in_memory == 0) return read_otherwise(reading, packed);
    const long dim = dimensions(tensor);
    if (dim == -1) return nullptr;
    if (dim != 2) return Py_NewRef(tensor);
    const long long smallest = integer(reading, s_min_nbytes);
    if (PyErr_Occurred()) return nullptr;
    if (PyLong_AsLongLong(nbytes) < smallest) return Py_NewRef(tensor);
    Owned node(node_that_runs());
    if (!node || node.get() == Py_None) return node ? Py_NewRef(tensor) : nullptr;
    return read_matrix(reading, tensor, node.get(), s_of_weight);
}

// See held.read_reference.
PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 2, "read takes a Reading and what a pack hook has returned")) return nullptr;
    PyObject *reading = args[0], *packed = args[1];
    const int is_simple = is_true(reading, s_is_simple);
    if (is_simple < 0) return nullptr;
    if (is_simple != 0 && type_of(packed) == held_parameter) return read_parameter(reading, packed);
    if (is_simple != 0 && is_a(packed, layout::saved)) {
        PyObject* tensor = unpack_saved(packed);
        return tensor != nullptr || PyErr_Occurred() ? tensor : read_otherwise(reading, packed);
    }
    const bool is_held = PyTuple_CheckExact(packed) && PyTuple_Size(packed) == 3;
    if (is_simple == 0 || !is_held) return read_otherwise(reading, packed);
    PyObject* tensor = PyTuple_GetItem(packed, 0);
    NoTorchFunction unseen(tensor);
    const int is_common = unseen ? is_as_it_was(packed) : -1;
    if (is_common < 0) return nullptr;
    if (is_common == 0) return PyObject_CallFunctionObjArgs(read_reference, reading, packed, nullptr);
    const long dim = dimensions(tensor);
    if (dim == -1) return nullptr;
    if (dim != 2) return Py_NewRef(tensor);
    Owned node(node_that_runs());
    if (!node) return nullptr;
    return node.get() == Py_None ? Py_NewRef(tensor) : read_matrix(reading, tensor, node.get(), s_of_matrix);
}

// Takes objects that the compiled functions need, by their names.
PyObject* configure(PyObject*, PyObject*, PyObject* given) {
    if (given == nullptr) Py_RETURN_NONE;
    const struct {
        PyObject** object;
        const char* name;
    } objects[] = {
#define BACKSTASH_OBJECT(name) {&name, #name},
        BACKSTASH_OBJECTS(BACKSTASH_OBJECT)
#undef BACKSTASH_OBJECT
    };
    for (const auto& each : objects) {
        PyObject* found = PyDict_GetItemString(given, each.name);
        if (found != nullptr) *each.object = Py_NewRef(found);
    }
    PyObject* table = PyDict_GetItemString(given, "access");
    if (table == Py_None) {  // attributes are asked, as where the table was not built
        access = nullptr;
    } else if (table != nullptr) {
        const auto* found = static_cast<const Access*>(PyCapsule_GetPointer(table, "backstash.access"));
        if (found == nullptr) return nullptr;
        if (found->number == ACCESS_NUMBER) access = found;
    }
    if (PyDict_GetItemString(given, "tensor_type") != nullptr && !find_descriptors()) return nullptr;
    Py_RETURN_NONE;
}

bool make_names() {
    const struct {
        PyObject** name;
        const char* text;
    } names[] = {
#define BACKSTASH_NAME(name) {&s_##name, #name},
        BACKSTASH_NAMES(BACKSTASH_NAME)
#undef BACKSTASH_NAME
    };
    for (const auto& each : names)
        if ((*each.name = PyUnicode_InternFromString(each.text)) == nullptr) return false;
    return true;
}

bool make_constants() {
    no_text = PyUnicode_InternFromString("");
    held_by_program = PyUnicode_InternFromString("held by the program, kept by reference");
    no_seconds = PyFloat_FromDouble(0.0);
    one_saved = Py_BuildValue("(iii)", 1, 0, 0);
    for (PyObject** each : {&known_ops, &known_sizes, &known_arguments}) *each = PyDict_New();
    for (PyObject* each : {no_text, held_by_program, no_seconds, one_saved, known_ops, known_sizes, known_arguments})
        if (each == nullptr) return false;
    return true;
}

// See is_traced in torch_internals.py.
PyObject* is_traced_now(PyObject*, PyObject*) {
    const int traced = is_traced();
    return traced < 0 ? nullptr : PyBool_FromLong(traced);
}

template <class Function>
PyCFunction as_method(Function function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)); }

PyMethodDef methods[] = {
    {"configure", as_method(configure), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"enter_module", as_method(enter_module), METH_FASTCALL, nullptr},
    {"leave_module", leave_module, METH_O, nullptr},
    {"bind", bind, METH_O, nullptr},
    {"agree", as_method(agree), METH_FASTCALL, nullptr},
    {"dense", as_method(make_dense_tensor), METH_FASTCALL, nullptr},
    {"fetch", fetch, METH_O, nullptr},
    {"finalize", as_method(finalize), METH_FASTCALL, nullptr},
    {"encode", as_method(encode), METH_FASTCALL, nullptr},
    {"look_at", as_method(look_at), METH_FASTCALL, nullptr},
    {"decide_if_orphaned", as_method(decide_if_orphaned), METH_FASTCALL, nullptr},
    {"elements", as_method(elements), METH_FASTCALL, nullptr},
    {"find", as_method(find), METH_FASTCALL, nullptr},
    {"fits_node", as_method(fits_node), METH_FASTCALL, nullptr},
    {"fitting", as_method(fitting), METH_FASTCALL, nullptr},
    {"is_orphaned", as_method(is_orphaned), METH_FASTCALL, nullptr},
    {"references_of", references_of, METH_O, nullptr},
    {"unchanged", as_method(unchanged), METH_FASTCALL, nullptr},
    {"is_traced", is_traced_now, METH_NOARGS, nullptr},
    {"is_odd", is_odd_tensor, METH_O, nullptr},
    {"lay_out", as_method(lay_out), METH_FASTCALL, nullptr},
    {"looks_like", as_method(looks_like_spec), METH_FASTCALL, nullptr},
    {"state_of", as_method(state_of), METH_FASTCALL, nullptr},
    {"hold", as_method(hold), METH_FASTCALL, nullptr},
    {"pack", as_method(pack), METH_FASTCALL, nullptr},
    {"read", as_method(read), METH_FASTCALL, nullptr},
    {"watch", as_method(make_watch), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_held", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

// See held.hold.
PyObject* hold_in(PyObject* x) {
    Owned version(tensor__version(x));
    Facts facts;
    const bool is_read = read_facts(x, facts);
    const int followed = !version ? -1 : is_read ? facts.requires_grad : is_true(x, s_requires_grad);
    const int leaf = followed != 1 ? followed : is_read ? facts.is_leaf : is_true(x, s_is_leaf);
    if (leaf < 0) return nullptr;
    if (leaf == 1) return untracked(PyTuple_Pack(3, x, version.get(), Py_None));
    Owned detached(tensor_detach(x));
    if (!detached) return nullptr;
    Owned reference(weak_reference(x));
    return reference ? untracked(PyTuple_Pack(3, detached.get(), version.get(), reference.get())) : nullptr;
}

}  // namespace backstash

PyMODINIT_FUNC PyInit__held() {
    const bool is_ready = backstash::make_names() && backstash::make_constants() && backstash::make_watch_type();
    return is_ready ? PyModule_Create(&backstash::module) : nullptr;
}
