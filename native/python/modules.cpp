// Which module is running, without the interpreter: see capture/names.py, and enter_module in session.py.
#include "slots.h"

namespace backstash {
namespace {

// A new Frame of a path; see names.Frame.
PyObject* make_frame(PyObject* path) {
    Owned counts(PyDict_New());
    PyObject* frame = counts ? make(layout::frame.type) : nullptr;
    if (frame == nullptr) return nullptr;
    set(frame, layout::frame.fqn, path);
    set(frame, layout::frame.label, path);
    give(frame, layout::frame.counts, counts.release());
    return frame;
}

// The path of a module that was entered before; null without an error where that is not known.
PyObject* path_of(PyObject* names, PyObject* module) {
    Owned found(get(names, FIELD(names, _found)));
    Owned id(found ? PyLong_FromVoidPtr(module) : nullptr);
    if (!id) return nullptr;
    PyObject* known = PyDict_GetItemWithError(found.get(), id.get());
    if (known == nullptr) return nullptr;
    Owned alive(PyObject_CallNoArgs(PyTuple_GetItem(known, 0)));
    return alive && alive.get() == module ? Py_NewRef(PyTuple_GetItem(known, 1)) : nullptr;
}

PyObject* enter_otherwise(PyObject* session, PyObject* module) {
    return PyObject_CallMethodObjArgs(session, s_enter_module, module, nullptr);
}

}  // namespace

// See Session.enter_module, which does what is less common.
PyObject* enter_module(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 2, "enter_module takes a Session and a module")) return nullptr;
    if (type_of(args[0]) != session_type) return enter_otherwise(args[0], args[1]);
    Owned names(PyObject_GetAttr(args[0], s__names));
    Owned frames(names ? get(names.get(), FIELD(names, frames)) : nullptr);
    if (!frames) return nullptr;
    if (PyList_Size(frames.get()) == 1) return enter_otherwise(args[0], args[1]);
    Owned forward(PyObject_GetAttr(args[0], s__forward));
    const int idle = forward ? is_true(forward.get(), FIELD(forward, is_idle)) : -1;
    if (idle < 0) return nullptr;
    if (idle) {
        const bool is_entered = PyList_Append(frames.get(), PyList_GetItem(frames.get(), 0)) == 0;
        return is_entered ? Py_NewRef(Py_None) : nullptr;
    }
    const int is_common = is_same(names.get(), FIELD(names, _cycles), Py_None);
    if (is_common < 0) return nullptr;
    Owned path(is_common ? path_of(names.get(), args[1]) : nullptr);
    if (!path) return PyErr_Occurred() ? nullptr : enter_otherwise(args[0], args[1]);
    Owned frame(make_frame(path.get()));
    if (!frame || PyList_Append(frames.get(), frame.get()) != 0) return nullptr;
    Py_RETURN_NONE;
}

// See Session.leave_module.
PyObject* leave_module(PyObject*, PyObject* session) {
    if (type_of(session) != session_type) return PyObject_CallMethodObjArgs(session, s_leave_module, nullptr);
    Owned names(PyObject_GetAttr(session, s__names));
    Owned frames(names ? get(names.get(), FIELD(names, frames)) : nullptr);
    if (!frames) return nullptr;
    const Py_ssize_t depth = PyList_Size(frames.get());
    if (depth > 1 && PyList_SetSlice(frames.get(), depth - 1, depth, nullptr) != 0) return nullptr;
    Py_RETURN_NONE;
}

}  // namespace backstash
