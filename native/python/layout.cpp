// Takes where the slots of the package's classes lie: see slots.h, and compiled.lay_out in stash/compiled.py.
#include "slots.h"

#include <cstring>

namespace backstash {
namespace {

// Notes one offset; returns whether Python has said it.
bool take_offset(PyObject* offsets, const char* name, Py_ssize_t& offset) {
    PyObject* found = PyDict_GetItemString(offsets, name);
    if (found == nullptr) {
        PyErr_Format(PyExc_ValueError, "the class has no slot %s", name);
        return false;
    }
    offset = PyLong_AsSsize_t(found);
    return offset > 0;
}

}  // namespace

// It takes a class and a dict of the offsets of its slots, and returns whether the compiled functions know the class.
PyObject* lay_out(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 2, "lay_out takes a class and a dict of offsets") || !PyDict_CheckExact(args[1])) return nullptr;
    Owned name(PyObject_GetAttr(args[0], s___name__));
    const char* text = name ? PyUnicode_AsUTF8AndSize(name.get(), nullptr) : nullptr;
    if (text == nullptr) return nullptr;
#define BACKSTASH_TAKE_OFFSET(slot) \
    if (!take_offset(args[1], #slot, known.slot)) return nullptr;
#define BACKSTASH_TAKE_LAYOUT(class_name, in_python, SLOTS) \
    if (std::strcmp(text, #in_python) == 0) { \
        auto& known = layout::class_name; \
        SLOTS(BACKSTASH_TAKE_OFFSET) \
        known.type = Py_NewRef(args[0]); \
        Py_RETURN_TRUE; \
    }
    BACKSTASH_CLASSES(BACKSTASH_TAKE_LAYOUT)
#undef BACKSTASH_TAKE_LAYOUT
#undef BACKSTASH_TAKE_OFFSET
    Py_RETURN_FALSE;
}

}  // namespace backstash
