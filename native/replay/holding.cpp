// What an idle Session does: tensors are held as they are, and read as they were. See stash/held.py, which is asked for
// whatever is not the common case. These are the most frequent calls of all.
#include "replayer.h"
#include "transforms.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace backstash::replay {
namespace {

PyObject* name_of(const char* text) {
    PyObject* name = PyUnicode_InternFromString(text);
    if (name == nullptr) throw python_error();
    return name;
}

Object attribute(PyObject* object, PyObject* name) { return Object::taken(PyObject_GetAttr(object, name)); }

bool is_common(PyObject* object) {
    if (!is_plain(object)) return false;
    const at::Tensor& x = THPVariable_Unpack(object);
    return x.layout() == at::kStrided && !x.is_nested() && !x.is_inference() && x.has_storage();
}

void add_to(PyObject* counted, Py_ssize_t index, int64_t more) {
    const int64_t now = PyLong_AsLongLong(PyList_GET_ITEM(counted, index)) + more;
    if (PyList_SetItem(counted, index, PyLong_FromLongLong(now)) != 0) throw python_error();
}

// What is held is nothing for the garbage collector: it refers to nothing that could refer to it.
PyObject* untracked(PyObject* tuple) {
    if (tuple != nullptr) PyObject_GC_UnTrack(tuple);
    return tuple;
}

// Whether a tensor that is held is what it was when it was saved, and needs no further look.
bool is_as_it_was(PyObject* packed) {
    PyObject *held = PyTuple_GET_ITEM(packed, 0), *weak = PyTuple_GET_ITEM(packed, 2);
    if (!is_common(held)) return false;
    const at::Tensor& x = THPVariable_Unpack(held);
    if (static_cast<int64_t>(x._version()) != PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1))) return false;
    if (reinterpret_cast<PyObject*>(Py_TYPE(held)) == ParameterClass) return true;
    if (x.storage().nbytes() == 0) return false;
    if (weak == Py_None) return true;
    PyObject* original = PyWeakref_GetObject(weak);
    if (original == Py_None) return true;
    if (!is_common(original)) return false;
    return THPVariable_Unpack(original).storage().unsafeGetStorageImpl() == x.storage().unsafeGetStorageImpl();
}

}  // namespace

PyObject *HoldReference = nullptr, *ReadReference = nullptr;

bool is_traced() {
    if (has_transform()) return true;
    using Modes = c10::impl::TorchDispatchModeTLS;
    if (Modes::stack_len() == 0) return false;
    using Key = c10::impl::TorchDispatchModeKey;
    for (int key = 0; key < static_cast<int>(Key::NUM_MODE_KEYS); ++key)
        if (Modes::get_mode(static_cast<Key>(key)).has_value()) return true;
    return false;
}

PyObject* hold(PyObject* holding, PyObject* object) {
    static PyObject *before_name = name_of("before"), *counted_name = name_of("counted");
    const Object before = attribute(holding, before_name);
    if (!before.is_none() || !is_common(object) || is_traced()) return call(HoldReference, holding, object).release();
    const at::Tensor& x = THPVariable_Unpack(object);
    const Object counted = attribute(holding, counted_name);
    add_to(counted.get(), 0, 1);
    add_to(counted.get(), 1, static_cast<int64_t>(x.nbytes()));
    const Object version = Object::taken(PyLong_FromLongLong(static_cast<int64_t>(x._version())));
    if (x.requires_grad() && x.is_leaf()) return untracked(PyTuple_Pack(3, object, version.get(), Py_None));
    const Object detached = Object::taken(THPVariable_Wrap(x.detach()));
    const Object original = Object::taken(PyWeakref_NewRef(object, nullptr));
    return untracked(PyTuple_Pack(3, detached.get(), version.get(), original.get()));
}

PyObject* read(PyObject* reading, PyObject* packed) {
    static PyObject *is_simple = name_of("is_simple"), *otherwise = name_of("otherwise");
    static PyObject *of_nodes = name_of("of_nodes"), *of_matrix = name_of("of_matrix");
    const bool is_held = PyTuple_CheckExact(packed) && PyTuple_GET_SIZE(packed) == 3;
    if (!is_held || attribute(reading, is_simple).get() != Py_True)
        return call(attribute(reading, otherwise).get(), packed).release();
    if (!is_as_it_was(packed)) return call(ReadReference, reading, packed).release();
    PyObject* held = PyTuple_GET_ITEM(packed, 0);
    const auto node = torch::autograd::get_current_node();
    if (!node || THPVariable_Unpack(held).dim() != 2 || !may_await_large_weight()) return Py_NewRef(held);
    const Object name = Object::taken(PyUnicode_FromString(node->name().c_str()));
    const int is_asked = PySequence_Contains(attribute(reading, of_nodes).get(), name.get());
    if (is_asked < 0) throw python_error();
    return is_asked ? call(attribute(reading, of_matrix).get(), held).release() : Py_NewRef(held);
}

}  // namespace backstash::replay
