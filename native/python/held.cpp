// Holds and reads saved tensors that nothing else is done with: what stash/held.py does, without the interpreter.
//
// These are the most frequent calls of all: one each for every tensor that an idle Session holds. Reading takes the fast
// way through the common case, and calls the reference in held.py for every other one, so that errors and rare cases are
// written once. Only the limited API of Python 3.11 is used, and
// nothing of torch but the attributes of its tensors: one library fits every Python from there on, and every torch.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace {

// Of torch, and of held.py; set once by configure().
PyObject* tensor_type;     // torch.Tensor
PyObject* parameter_type;  // torch.nn.Parameter
PyObject* strided;         // torch.strided
PyObject* no_function;     // torch._C.DisableTorchFunction
PyObject* count_modes;     // torch._C._len_torch_function_stack
PyObject* running_node;    // torch._C._current_autograd_node
PyObject* read_reference;  // held.read_reference

// Names of attributes, made once.
PyObject *s_before, *s_counted, *s_detach, *s_dim, *s_enter, *s_exit, *s_is_leaf, *s_is_simple, *s_layout, *s_name,
    *s_nbytes, *s_of_matrix, *s_of_nodes, *s_otherwise, *s_requires_grad, *s_storage, *s_version;

// A reference that is given up at the end of the block.
class Owned {
public:
    explicit Owned(PyObject* object) : object_(object) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }
    void reset(PyObject* object) {
        Py_XDECREF(object_);
        object_ = object;
    }

private:
    PyObject* object_;
};

// Inside, no torch function mode and no subclass sees what is asked of a tensor. An error that is set stays set.
class NoTorchFunction {
public:
    explicit NoTorchFunction(PyObject* x) {
        PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
        if (type == tensor_type || type == parameter_type) {  // no subclass that could see anything
            Owned modes(PyObject_CallNoArgs(count_modes));
            if (!modes) return;
            is_set_ = PyLong_AsLong(modes.get()) == 0;
            if (is_set_) return;
        }
        context_.reset(PyObject_CallNoArgs(no_function));
        if (context_) is_set_ = entered_ = static_cast<bool>(Owned(PyObject_CallMethodObjArgs(context_.get(), s_enter, nullptr)));
    }
    ~NoTorchFunction() {
        if (!entered_) return;
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        Owned(PyObject_CallMethodObjArgs(context_.get(), s_exit, Py_None, Py_None, Py_None, nullptr));
        PyErr_Restore(type, error, trace);
    }
    explicit operator bool() const { return is_set_; }

private:
    Owned context_{nullptr};
    bool entered_ = false, is_set_ = false;
};

// Whether an attribute is True: 1 or 0, or -1 with an error set.
int is_true(PyObject* object, PyObject* name) {
    Owned found(PyObject_GetAttr(object, name));
    return found ? found.get() == Py_True : -1;
}

// Whether an attribute is that very object: 1 or 0, or -1 with an error set.
int is_same(PyObject* object, PyObject* name, PyObject* other) {
    Owned found(PyObject_GetAttr(object, name));
    return found ? found.get() == other : -1;
}

// Adds a number to an element of a list of numbers; returns whether that went well.
bool add_to(PyObject* list, Py_ssize_t index, PyObject* number) {
    PyObject* before = PyList_GetItem(list, index);
    PyObject* sum = before == nullptr ? nullptr : PyNumber_Add(before, number);
    return sum != nullptr && PyList_SetItem(list, index, sum) == 0;  // which takes the reference
}

bool count(PyObject* x, PyObject* counted) {
    static PyObject* one = PyLong_FromLong(1);
    if (!add_to(counted, 0, one)) return false;
    const int dense = is_same(x, s_layout, strided);
    if (dense <= 0) return dense == 0;
    Owned nbytes(PyObject_GetAttr(x, s_nbytes));
    return nbytes && add_to(counted, 1, nbytes.get());
}

// See held.hold_reference.
PyObject* hold(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 2) {
        PyErr_SetString(PyExc_TypeError, "hold takes a Holding and a tensor");
        return nullptr;
    }
    PyObject *holding = args[0], *x = args[1];
    Owned before(PyObject_GetAttr(holding, s_before));
    if (!before) return nullptr;
    if (before.get() != Py_None && !Owned(PyObject_CallNoArgs(before.get()))) return nullptr;
    NoTorchFunction unseen(x);
    if (!unseen) return nullptr;
    Owned counted(PyObject_GetAttr(holding, s_counted));
    if (!counted || !count(x, counted.get())) return nullptr;
    Owned version(PyObject_GetAttr(x, s_version));
    const int followed = version ? is_true(x, s_requires_grad) : -1;
    const int leaf = followed == 1 ? is_true(x, s_is_leaf) : followed;
    if (leaf < 0) return nullptr;
    if (leaf == 1) return PyTuple_Pack(3, x, version.get(), Py_None);
    Owned detached(PyObject_CallMethodObjArgs(x, s_detach, nullptr));
    if (!detached) return nullptr;
    Owned reference(PyWeakref_NewRef(x, nullptr));
    return reference ? PyTuple_Pack(3, detached.get(), version.get(), reference.get()) : nullptr;
}

// Whether a held tensor is what it was when it was saved, and needs no further look: 1 or 0, or -1 with an error set.
int is_as_it_was(PyObject* packed) {
    PyObject *tensor = PyTuple_GetItem(packed, 0), *version = PyTuple_GetItem(packed, 1);
    PyObject* reference = PyTuple_GetItem(packed, 2);
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != tensor_type && type != parameter_type) return 0;
    Owned now(PyObject_GetAttr(tensor, s_version));
    const int same_version = now ? PyObject_RichCompareBool(now.get(), version, Py_EQ) : -1;
    if (same_version <= 0 || type == parameter_type) return same_version;
    int is_dense = is_same(tensor, s_layout, strided);
    if (is_dense <= 0) return is_dense;
    Owned storage(PyObject_CallMethodObjArgs(tensor, s_storage, nullptr));
    if (!storage) return -1;
    Owned nbytes(PyObject_CallMethodObjArgs(storage.get(), s_nbytes, nullptr));
    const int has_memory = nbytes ? PyObject_IsTrue(nbytes.get()) : -1;
    if (has_memory <= 0 || reference == Py_None) return has_memory;
    Owned original(PyObject_CallNoArgs(reference));
    if (!original) return -1;
    if (original.get() == Py_None) return 1;
    is_dense = is_same(original.get(), s_layout, strided);
    if (is_dense <= 0) return is_dense;
    Owned memory(PyObject_CallMethodObjArgs(original.get(), s_storage, nullptr));
    return memory ? memory.get() == storage.get() : -1;
}

// What the reader of a matrix is given.
PyObject* read_matrix(PyObject* reading, PyObject* matrix) {
    Owned node(PyObject_CallNoArgs(running_node));
    if (!node) return nullptr;
    if (node.get() == Py_None) return Py_NewRef(matrix);
    Owned name(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(node.get())), s_name));
    Owned names(PyObject_GetAttr(reading, s_of_nodes));
    const int is_asked = name && names ? PySequence_Contains(names.get(), name.get()) : -1;
    if (is_asked < 0) return nullptr;
    if (is_asked == 0) return Py_NewRef(matrix);
    Owned of_matrix(PyObject_GetAttr(reading, s_of_matrix));
    return of_matrix ? PyObject_CallFunctionObjArgs(of_matrix.get(), matrix, nullptr) : nullptr;
}

// See held.read_reference.
PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 2) {
        PyErr_SetString(PyExc_TypeError, "read takes a Reading and what a pack hook has returned");
        return nullptr;
    }
    PyObject *reading = args[0], *packed = args[1];
    const int is_simple = is_true(reading, s_is_simple);
    if (is_simple < 0) return nullptr;
    if (is_simple == 0 || !PyTuple_CheckExact(packed) || PyTuple_Size(packed) != 3) {
        Owned otherwise(PyObject_GetAttr(reading, s_otherwise));
        return otherwise ? PyObject_CallFunctionObjArgs(otherwise.get(), packed, nullptr) : nullptr;
    }
    PyObject* tensor = PyTuple_GetItem(packed, 0);
    NoTorchFunction unseen(tensor);
    const int is_common = unseen ? is_as_it_was(packed) : -1;
    if (is_common < 0) return nullptr;
    if (is_common == 0) return PyObject_CallFunctionObjArgs(read_reference, reading, packed, nullptr);
    Owned dim(PyObject_CallMethodObjArgs(tensor, s_dim, nullptr));
    if (!dim) return nullptr;
    return PyLong_AsLong(dim.get()) == 2 ? read_matrix(reading, tensor) : Py_NewRef(tensor);
}

PyObject* configure(PyObject*, PyObject* args) {
    PyObject** given[] = {&tensor_type, &parameter_type, &strided, &no_function, &count_modes, &running_node, &read_reference};
    const Py_ssize_t number = sizeof(given) / sizeof(*given);
    if (PyTuple_Size(args) != number) {
        PyErr_SetString(PyExc_TypeError, "configure takes seven objects");
        return nullptr;
    }
    for (Py_ssize_t index = 0; index < number; ++index) *given[index] = Py_NewRef(PyTuple_GetItem(args, index));
    Py_RETURN_NONE;
}

bool make_names() {
    const struct {
        PyObject** name;
        const char* text;
    } names[] = {
        {&s_before, "before"},        {&s_counted, "counted"},
        {&s_detach, "detach"},        {&s_dim, "dim"},
        {&s_enter, "__enter__"},      {&s_exit, "__exit__"},
        {&s_is_leaf, "is_leaf"},      {&s_is_simple, "is_simple"},
        {&s_layout, "layout"},        {&s_name, "__name__"},
        {&s_nbytes, "nbytes"},        {&s_of_matrix, "of_matrix"},
        {&s_of_nodes, "of_nodes"},    {&s_otherwise, "otherwise"},
        {&s_requires_grad, "requires_grad"}, {&s_storage, "untyped_storage"},
        {&s_version, "_version"},
    };
    for (const auto& each : names)
        if ((*each.name = PyUnicode_InternFromString(each.text)) == nullptr) return false;
    return true;
}

PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, nullptr},
    {"hold", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(hold)), METH_FASTCALL, nullptr},
    {"read", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(read)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_held", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__held() { return make_names() ? PyModule_Create(&module) : nullptr; }
