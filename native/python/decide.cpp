// Looks at values that are pending, and decides about those that nobody but autograd holds: see stash/pending.py.
#include "slots.h"

#include <algorithm>

namespace backstash {
namespace {

constexpr long long SETTLED = 16;  // as in place.py

// See Place.still_held: the age at which it is looked at next, or 0; -1 with an error set.
long long still_held(PyObject* place, long long age) {
    const long long held = number_at(place, layout::place.held), gone = number_at(place, layout::place.gone);
    if (PyErr_Occurred() || !set_number(place, layout::place.held, std::max(held, age))) return -1;
    return gone > age ? gone : 0;
}

// See Place.let_go; returns whether that went well.
bool let_go(PyObject* place, long long age) {
    long long held = number_at(place, layout::place.held);
    const long long gone = number_at(place, layout::place.gone);
    const long long before = number_at(place, layout::place.settled);
    long long settled = age == gone && gone == held + 1 ? before + 1 : 0;
    if (age <= held || settled == SETTLED) held = settled = 0;
    const long long delay = std::max(1LL, held + (age - held + 1) / 2);
    return !PyErr_Occurred() && set_number(place, layout::place.held, held) &&
           set_number(place, layout::place.settled, settled) && set_number(place, layout::place.gone, age) &&
           set_number(place, layout::place.delay, delay);
}

// Has a value decided on without a graph; returns whether that went well.
bool decide_without_graph(PyObject* pending, PyObject* value) {
    Owned decide(Py_NewRef(at(pending, layout::pending._decide)));
    const int has_graph = has_grad_mode();
    if (has_graph < 0) return false;
    if (!has_graph)
        return static_cast<bool>(Owned(PyObject_CallFunctionObjArgs(decide.get(), value, nullptr)));
    if (access != nullptr) {
        access->set_grad_mode(0);
        const Owned decided(PyObject_CallFunctionObjArgs(decide.get(), value, nullptr));
        access->set_grad_mode(1);
        return static_cast<bool>(decided);
    }
    const Owned off(PyObject_CallFunctionObjArgs(set_grad_mode, Py_False, nullptr));
    const Owned decided(off ? PyObject_CallFunctionObjArgs(decide.get(), value, nullptr) : nullptr);
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    // Once more where there was no memory for the call itself: else the program would go on without grad mode.
    for (int calls = 0; calls < 2 && !Owned(PyObject_CallFunctionObjArgs(set_grad_mode, Py_True, nullptr)); ++calls)
        PyErr_Clear();
    PyErr_Restore(type, error, trace);
    return static_cast<bool>(decided);
}

// A value is still held by somebody: looks at it later; returns whether that went well.
bool look_later(PyObject* pending, PyObject* value, PyObject* look) {
    const long long born = number_at(value, layout::value.born);
    const long long age = number_at(pending, layout::pending.clock) - born;
    if (PyErr_Occurred()) return false;
    long long later = age + std::max(1LL, age / 4);
    PyObject* place = at(value, layout::value.place);
    if (place != Py_None) {
        const long long known = still_held(place, age);
        if (known < 0) return false;
        later = known != 0 ? known : later;
    }
    return look_again(pending, born + later, look);
}

bool are_of_pending(PyObject* pending, const char* what) {
    const bool are = is_a(pending, layout::pending) && own_references != nullptr;
    if (!are) PyErr_SetString(PyExc_TypeError, what);
    return are;
}

}  // namespace

// See Pending._look_again; returns whether that went well.
bool look_again(PyObject* pending, long long clock, PyObject* look) {
    PyObject* due = at(pending, layout::pending.due);
    Owned when(PyLong_FromLongLong(clock));
    PyObject* looks = when ? PyDict_GetItemWithError(due, when.get()) : nullptr;
    if (looks != nullptr) return PyList_Append(looks, look) == 0;
    if (PyErr_Occurred()) return false;
    Owned alone(PyList_New(1));
    if (!alone) return false;
    PyList_SetItem(alone.get(), 0, Py_NewRef(look));
    return PyDict_SetItem(due, when.get(), alone.get()) == 0;
}

int decide_on(PyObject* pending, PyObject* value) {
    static const long own = PyLong_AsLong(own_references);
    Owned cdata(Py_NewRef(at(value, layout::value.cdata)));
    const int is_pending = PyDict_Contains(at(pending, layout::pending._values), cdata.get());
    const int orphaned = is_pending == 1 ? held_by_nobody_else(value, own) : is_pending;
    if (orphaned <= 0) return orphaned;
    if (PyDict_DelItem(at(pending, layout::pending._values), cdata.get()) != 0) return -1;  // decided about once
    PyObject* place = at(value, layout::value.place);
    if (place != Py_None) {
        const long long clock = number_at(pending, layout::pending.clock);
        if (!let_go(place, clock - number_at(value, layout::value.born))) return -1;
    }
    if (!decide_without_graph(pending, value)) return -1;
    set(value, layout::value.storage, Py_None);
    return 1;
}

// See Pending.decide_if_orphaned. It takes the Pending and the value.
PyObject* decide_if_orphaned(PyObject*, PyObject* const* args, Py_ssize_t number) {
    const char* what = "decide_if_orphaned takes a Pending and a Value";
    if (!takes(number, 2, what) || !are_of_pending(args[0], what)) return nullptr;
    if (!is_a(args[1], layout::value)) return PyErr_SetString(PyExc_TypeError, what), nullptr;
    const int decided = decide_on(args[0], args[1]);
    return decided < 0 ? nullptr : PyBool_FromLong(decided);
}

// See Pending.look_at. It takes the Pending and a list of weak references to values.
PyObject* look_at(PyObject*, PyObject* const* args, Py_ssize_t number) {
    const char* what = "look_at takes a Pending and a list";
    if (!takes(number, 2, what) || !are_of_pending(args[0], what)) return nullptr;
    if (!PyList_CheckExact(args[1])) return PyErr_SetString(PyExc_TypeError, what), nullptr;
    for (Py_ssize_t index = 0; index < PyList_Size(args[1]); ++index) {
        Owned look(Py_NewRef(PyList_GetItem(args[1], index)));
        Owned value(referent(look.get()));
        if (!value) return nullptr;
        if (value.get() == Py_None || is_none_at(value.get(), layout::value.storage)) continue;
        const int decided = decide_on(args[0], value.get());
        if (decided < 0 || (!decided && !look_later(args[0], value.get(), look.get()))) return nullptr;
    }
    Py_RETURN_NONE;
}

}  // namespace backstash
