// Looks at packed tensors: which nodes have saved them, whether they are what they were, and who else holds their
// memory. See capture/naming.py, stash/encode.py and stash/pending.py.
#include "slots.h"

#include <vector>

namespace backstash {
namespace {

// See value.Saved.is_plain: 1 or 0, or -1 with an error set.
int is_plain_saved(PyObject* saved) {
    Owned dense(PyObject_GetAttr(saved, s_dense));
    if (!dense) return -1;
    if (!is_plain(dense.get())) {  // None, or a class that the reference knows better
        Owned answer(PyObject_GetAttr(saved, s_is_plain));
        return answer ? answer.get() == Py_True : -1;
    }
    const int dense_layout = is_strided(dense.get());
    if (dense_layout <= 0) return dense_layout;
    const int odd = is_odd(dense.get());
    return odd < 0 ? -1 : !odd;
}

// The saved tensors that are yet to be found, and how many of them there still are.
class Wanted {
public:
    void add(PyObject* saved) {
        saved_.push_back(saved);
        ++left_;
    }
    // Whether that object is wanted; it no longer is then.
    bool take(PyObject* object) {
        for (PyObject*& each : saved_) {
            if (each != object) continue;
            each = nullptr;
            --left_;
            return true;
        }
        return false;
    }
    Py_ssize_t left() const { return left_; }
    PyObject* rest() const {
        Owned rest(PyList_New(0));
        for (PyObject* each : saved_)
            if (rest && each != nullptr && PyList_Append(rest.get(), each) != 0) return nullptr;
        return rest.release();
    }

private:
    std::vector<PyObject*> saved_;  // the caller's list holds them
    Py_ssize_t left_ = 0;
};

// Of a saved variable, whether its packed object was wanted, which is noted then; returns whether that went well.
bool look_at_variable(PyObject* variable, PyObject* role, Wanted& wanted, PyObject* found) {
    Owned packed(PyObject_GetAttr(variable, s_data));
    if (!packed) {  // None, or an undefined optional input
        if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
        PyErr_Clear();
        return true;
    }
    if (!wanted.take(packed.get())) return true;
    Owned pair(PyTuple_Pack(2, role, packed.get()));
    return pair && PyList_Append(found, pair.get()) == 0;
}

// Everything wanted that a node has saved, as a list of roles and packed objects.
PyObject* found_in(PyObject* node, PyObject* attributes, Wanted& wanted) {
    Owned found(PyList_New(0));
    if (!found) return nullptr;
    for (Py_ssize_t index = 0; index < PyTuple_Size(attributes) && wanted.left() > 0; ++index) {
        PyObject* attribute = PyTuple_GetItem(attributes, index);
        PyObject* role = PyTuple_GetItem(attribute, 1);
        Owned raw(PyObject_GetAttr(node, PyTuple_GetItem(attribute, 0)));
        if (!raw) {  // an older node, whose backward has run and freed what it saved
            if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return nullptr;
            PyErr_Clear();
            break;
        }
        if (!PyTuple_CheckExact(raw.get()) && !PyList_CheckExact(raw.get())) {
            if (!look_at_variable(raw.get(), role, wanted, found.get())) return nullptr;
            continue;
        }
        for (Py_ssize_t each = 0; each < PySequence_Size(raw.get()); ++each) {
            Owned variable(PySequence_GetItem(raw.get(), each));
            if (!variable || !look_at_variable(variable.get(), role, wanted, found.get())) return nullptr;
        }
    }
    return found.release();
}

// The names of what nodes of a type save: see naming._saved_attributes.
PyObject* attributes_of(PyObject* known, PyObject* node, PyObject* make) {
    PyObject* attributes = PyDict_GetItemWithError(known, type_of(node));
    if (attributes != nullptr) return Py_NewRef(attributes);
    return PyErr_Occurred() ? nullptr : PyObject_CallFunctionObjArgs(make, type_of(node), nullptr);
}

// How many references there are to the Python object of a value's storage, as is_orphaned counts them.
long references(PyObject* value) {
    return static_cast<long>(Py_REFCNT(at(value, layout::value.storage)));
}

bool is_value(PyObject* object) {
    const bool is_value = is_a(object, layout::value);
    if (!is_value) PyErr_SetString(PyExc_TypeError, "this is asked of a Value");
    return is_value;
}

}  // namespace

// See naming.find_reference. It takes the nodes behind a result, the packed objects, what is known of types of
// nodes, and the function that finds that out; and it changes the list of nodes.
PyObject* find(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 4 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) || !PyDict_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "find takes a list of nodes, a list of packed objects, a dict and a function");
        return nullptr;
    }
    PyObject *nodes = args[0], *unnamed = args[1];
    Wanted wanted;
    for (Py_ssize_t index = 0; index < PyList_Size(unnamed); ++index) {
        PyObject* saved = PyList_GetItem(unnamed, index);
        const int plain = is_plain_saved(saved);
        if (plain < 0) return nullptr;
        if (plain) wanted.add(saved);
    }
    Owned answer(PyList_New(0));
    if (!answer) return nullptr;
    Py_ssize_t most = 16 + 8 * wanted.left();
    for (Py_ssize_t index = 0; index < PyList_Size(nodes) && wanted.left() > 0 && most > 0; ++index) {
        PyObject* node = PyList_GetItem(nodes, index);
        if (node == Py_None) continue;
        Owned attributes(attributes_of(args[2], node, args[3]));
        Owned found(attributes ? found_in(node, attributes.get(), wanted) : nullptr);
        if (!found) return nullptr;
        if (PyList_Size(found.get()) > 0) {
            Owned pair(PyTuple_Pack(2, node, found.get()));
            if (!pair || PyList_Append(answer.get(), pair.get()) != 0) return nullptr;
        }
        --most;
        if (wanted.left() == 0 || most == 0) break;
        Owned following(PyObject_GetAttr(node, s_next_functions));
        if (!following) return nullptr;
        for (Py_ssize_t each = 0; each < PyTuple_Size(following.get()); ++each)
            if (PyList_Append(nodes, PyTuple_GetItem(PyTuple_GetItem(following.get(), each), 0)) != 0) return nullptr;
    }
    Owned rest(wanted.rest());
    return rest ? PyTuple_Pack(2, answer.get(), rest.get()) : nullptr;
}

// See names._fits: 1 or 0, or -1 with an error set.
int fits_known(PyObject* known, PyObject* node, PyObject* found, PyObject* scalar_of) {
    const Owned roles(Py_NewRef(at(known, layout::known_node.roles)));
    const Owned specs(Py_NewRef(at(known, layout::known_node.specs)));
    const Owned asked(Py_NewRef(at(known, layout::known_node.asked)));
    const Py_ssize_t many = PyList_Size(found);
    if (PyTuple_Size(roles.get()) != many) return 0;
    for (Py_ssize_t index = 0; index < many; ++index) {
        PyObject* pair = PyList_GetItem(found, index);
        PyObject *role = PyTuple_GetItem(roles.get(), index), *own = PyTuple_GetItem(pair, 0);
        int same = role == own ? 1 : PyObject_RichCompareBool(role, own, Py_EQ);
        if (same <= 0) return same;
        Owned dense(Py_NewRef(at(PyTuple_GetItem(pair, 1), layout::saved.dense)));
        same = looks_like(dense.get(), PyTuple_GetItem(specs.get(), index));
        if (same <= 0) return same;
    }
    for (Py_ssize_t index = 0; index < PyTuple_Size(asked.get()); ++index) {
        PyObject* pair = PyTuple_GetItem(asked.get(), index);
        Owned scalar(PyObject_CallFunctionObjArgs(scalar_of, node, PyTuple_GetItem(pair, 0), nullptr));
        const int same = scalar ? PyObject_RichCompareBool(scalar.get(), PyTuple_GetItem(pair, 1), Py_EQ) : -1;
        if (same <= 0) return same;
    }
    return 1;
}

// It takes what is known of a node, the node, the roles and packed objects, and the function that returns an attribute
// of a node.
PyObject* fits_node(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 4 || !PyList_CheckExact(args[2]) || !is_a(args[0], layout::known_node)) {
        PyErr_SetString(PyExc_TypeError, "fits takes a KnownNode, a node, a list and a function");
        return nullptr;
    }
    const int same = fits_known(args[0], args[1], args[2], args[3]);
    return same < 0 ? nullptr : PyBool_FromLong(same);
}

PyObject* references_of(PyObject*, PyObject* value) {
    const long number = is_value(value) ? references(value) : -1;
    return number < 0 ? nullptr : PyLong_FromLong(number);
}

int held_by_nobody_else(PyObject* value, long own) {
    const long held = references(value);
    if (held < 0 || held > own) return held < 0 ? -1 : 0;
    const long long uses = uses_of(at(value, layout::value.cdata));
    if (uses < 0) return -1;
    Py_ssize_t count = static_cast<Py_ssize_t>(uses) - 1;  // its Python object
    PyObject* members = at(value, layout::value.members);
    const Py_ssize_t many = PyList_Size(members);
    if (count > many) return 0;
    for (Py_ssize_t index = 0; index < many; ++index) {
        Owned saved(referent(PyList_GetItem(members, index)));
        if (!saved) return -1;
        if (saved.get() != Py_None) count -= !is_none_at(saved.get(), layout::saved.dense);
    }
    return count == 0;
}

// See pending._is_orphaned. It takes the value, and what references_of says of one that nobody else holds.
PyObject* is_orphaned(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 2, "is_orphaned takes a Value and a number") || !is_value(args[0])) return nullptr;
    const long own = PyLong_AsLong(args[1]);
    const int orphaned = PyErr_Occurred() ? -1 : held_by_nobody_else(args[0], own);
    return orphaned < 0 ? nullptr : PyBool_FromLong(orphaned);
}

PyObject* unchanged_of(PyObject* value, PyObject* follow) {
    Owned members(Py_NewRef(at(value, layout::value.members))), fresh(PyList_New(0));
    if (!fresh) return nullptr;
    for (Py_ssize_t index = 0; index < PyList_Size(members.get()); ++index) {
        Owned saved(referent(PyList_GetItem(members.get(), index)));
        if (!saved) return nullptr;
        if (saved.get() == Py_None) continue;
        PyObject* reference = at(saved.get(), layout::saved.original);
        if (reference != Py_None) {
            Owned original(referent(reference));
            if (!original) return nullptr;
            if (original.get() != Py_None && !Owned(PyObject_CallFunctionObjArgs(follow, saved.get(), nullptr))) return nullptr;
        }
        if (at(saved.get(), layout::saved.value) != value && saved.get() != at(value, layout::value.guard))
            continue;  // it follows another tensor's memory now
        PyObject* dense = at(saved.get(), layout::saved.dense);
        if (dense == Py_None) continue;
        Owned now(tensor__version(dense));
        const int same =
            now ? PyObject_RichCompareBool(now.get(), at(saved.get(), layout::saved.version), Py_EQ) : -1;
        if (same < 0) return nullptr;
        if (same) {
            if (PyList_Append(fresh.get(), saved.get()) != 0) return nullptr;
            continue;
        }
        set(saved.get(), layout::saved.modified, now.get());
        set(saved.get(), layout::saved.dense, Py_None);
    }
    return fresh.release();
}

// See encode._unchanged. It takes the value, and the function that follows a tensor whose data was assigned.
PyObject* unchanged(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 2, "unchanged takes a Value and a function") || !is_value(args[0])) return nullptr;
    return unchanged_of(args[0], args[1]);
}

}  // namespace backstash
