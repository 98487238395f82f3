// What the observer of torch functions does around each of them, without the interpreter: see capture/observer.py.
//
// Most functions of a step save nothing and are none that could be repeated. For these there is a clock to move on
// and a question whether something was saved. Of what is rare the Watch says so, and it is left to the method in
// Python.
#include "slots.h"

namespace backstash {
namespace {

// What a Watch holds, in the order in which it is given:
// listener: see observer.CallListener.
// kinds: by function a number, see observer._number_of; the others are rare.
// rare: what is returned where nothing was done yet, and the method has to do it.
// random_state: see calls.random_state.
// results: types of results that can be noted.
// effects: SideEffect by number.
#define BACKSTASH_WATCHED(X) X(listener) X(kinds) X(rare) X(random_state) X(results) X(effects)

struct Watch {
    PyObject_HEAD
#define BACKSTASH_MEMBER(name) PyObject* name;
    BACKSTASH_WATCHED(BACKSTASH_MEMBER)
#undef BACKSTASH_MEMBER
};

enum Kind : long { EFFECT = 3, CHEAP = 4, MAY_DRAW = 8, INPLACE_AT = 16 };

Watch* watch_of(PyObject* self) { return reinterpret_cast<Watch*>(self); }

int watch_traverse(PyObject* self, visitproc visit, void* arg) {
    Watch* watch = watch_of(self);
    Py_VISIT(Py_TYPE(self));
#define BACKSTASH_VISIT(name) Py_VISIT(watch->name);
    BACKSTASH_WATCHED(BACKSTASH_VISIT)
#undef BACKSTASH_VISIT
    return 0;
}

int watch_clear(PyObject* self) {
    Watch* watch = watch_of(self);
#define BACKSTASH_CLEAR(name) Py_CLEAR(watch->name);
    BACKSTASH_WATCHED(BACKSTASH_CLEAR)
#undef BACKSTASH_CLEAR
    return 0;
}

void watch_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// See side_effects._is_set.
bool is_set(PyObject* flag) { return flag != nullptr && flag != Py_None && flag != Py_False; }

// What a call does to its arguments' memory, as a number of SideEffect; -1 with an error set. See side_effect_of.
long effect_of(long kind, PyObject* args, PyObject* kwargs) {
    const long effect = kind & EFFECT;
    if (effect != 0) return effect;
    if (kwargs != nullptr) {
        PyObject* out = PyDict_GetItemWithError(kwargs, s_out);
        if (out != nullptr ? out != Py_None : PyErr_Occurred() != nullptr) return out == nullptr ? -1 : 1;
        PyObject* inplace = PyDict_GetItemWithError(kwargs, s_inplace);
        if (inplace == nullptr && PyErr_Occurred()) return -1;
        if (is_set(inplace)) return 1;
    }
    const long position = kind / INPLACE_AT - 1;
    if (position < 0 || PyTuple_Size(args) <= position) return 0;
    return is_set(PyTuple_GetItem(args, position));
}

// Whether an argument may be an object that stands for tensors, or hold some: of what is no plain tensor and no constant.
bool may_stand_for_tensors(PyObject* args) {
    for (Py_ssize_t index = 0; index < PyTuple_Size(args); ++index) {
        PyObject* arg = PyTuple_GetItem(args, index);
        const bool is_constant = arg == Py_None || PyBool_Check(arg) || PyLong_CheckExact(arg) || PyFloat_CheckExact(arg);
        if (!is_plain(arg) && !is_constant) return true;
    }
    return false;
}

// Tells the listener of a side effect, if anything leans on what a function may change; returns whether that went well.
bool tell_effect(Watch* watch, long effect, PyObject* args, PyObject* kwargs) {
    Owned leaning(get(watch->listener, FIELD(forward, _leaning)));
    Owned values(leaning ? get(leaning.get(), FIELD(leaning, _values)) : nullptr);
    if (!values) return false;
    if (PyDict_Size(values.get()) == 0 && !may_stand_for_tensors(args)) return true;
    Owned context(PyObject_CallNoArgs(no_function));
    if (!context || !Owned(PyObject_CallMethodObjArgs(context.get(), s___enter__, nullptr))) return false;
    Owned none(kwargs == nullptr ? PyDict_New() : Py_NewRef(kwargs));
    PyObject* named = PyTuple_GetItem(watch->effects, effect);
    Owned told(nullptr);
    PyObject* listener = watch->listener;
    if (none) told.reset(PyObject_CallMethodObjArgs(listener, s_before_side_effect, named, args, none.get(), nullptr));
    give_back(context.get(), s___exit__, Py_None);
    return static_cast<bool>(told);
}

// A function is about to run: moves the clock on, and has what is due looked at. See Forward.before_function.
bool begin(PyObject* listener) {
    Owned pending(get(listener, FIELD(forward, _pending)));
    if (!pending) return false;
    const long long clock = integer(pending.get(), FIELD(pending, clock)) + 1;
    if (clock <= 0 && PyErr_Occurred()) return false;
    Owned now(PyLong_FromLongLong(clock));
    if (!now || !assign(pending.get(), FIELD(pending, clock), now.get())) return false;
    Owned due(get(pending.get(), FIELD(pending, due)));
    if (!due) return false;
    PyObject* looks = PyDict_GetItemWithError(due.get(), now.get());
    if (looks == nullptr) return !PyErr_Occurred();
    return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(listener, s_look_at_due, nullptr)));
}

// The function has returned, or raised (then there is no result): has what it has saved named, if there is anything.
bool end(PyObject* listener, PyObject* result) {
    const long long depth = integer(listener, FIELD(forward, depth)) - 1;
    if (PyErr_Occurred() || !set_integer(listener, FIELD(forward, depth), depth)) return false;
    if (depth != 0) return true;
    Owned unnamed(get(listener, FIELD(forward, unnamed)));
    if (!unnamed) return false;
    if (PyList_Size(unnamed.get()) == 0) return true;
    const int named = name_saved(listener, result);
    if (named != 0) return named > 0;
    return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(listener, s_after_function, result, nullptr)));
}

// The place of a call that is about to run; None where it need not be noted. See Names.call_place and Noting.place.
PyObject* call_place(PyObject* names, PyObject* func) {
    Owned frames(get(names, FIELD(names, frames)));
    PyObject* frame = frames ? PyList_GetItem(frames.get(), PyList_Size(frames.get()) - 1) : nullptr;
    Owned counts(frame != nullptr ? get(frame, FIELD(frame, counts)) : nullptr);
    if (!counts) return nullptr;
    PyObject* before = PyDict_GetItemWithError(counts.get(), func);
    if (before == nullptr && PyErr_Occurred()) return nullptr;
    Owned number(before != nullptr ? Py_NewRef(before) : PyLong_FromLong(0));
    Owned after(number ? PyLong_FromLongLong(PyLong_AsLongLong(number.get()) + 1) : nullptr);
    if (!after || PyDict_SetItem(counts.get(), func, after.get()) != 0) return nullptr;
    Owned label(get(frame, FIELD(frame, label)));
    Owned learned(label ? get(names, FIELD(names, learned)) : nullptr);
    Owned noting(learned ? get(learned.get(), FIELD(learned, noting)) : nullptr);
    Owned places(noting ? get(noting.get(), FIELD(noting, _places)) : nullptr);
    Owned index(places ? PyTuple_Pack(3, label.get(), func, number.get()) : nullptr);
    if (!index) return nullptr;
    PyObject* known = PyDict_GetItemWithError(places.get(), index.get());
    const int used = known != nullptr ? is_true(known, FIELD(call_place, is_used)) : 0;
    if (used < 0 || PyErr_Occurred()) return nullptr;
    if (used) return Py_NewRef(known);
    return PyObject_CallMethodObjArgs(noting.get(), s_place, label.get(), func, number.get(), nullptr);
}

// Whether the listener wants to know of a call that is about to run: 1 or 0, or -1 with an error. See Forward.counts.
int counts_call(PyObject* listener, PyObject* func) {
    Owned names(get(listener, FIELD(forward, _names)));
    Owned place(names ? call_place(names.get(), func) : nullptr);
    if (!place || !assign(listener, FIELD(forward, _call_place), place.get())) return -1;
    return place.get() != Py_None;
}

// Calls the function as the observer does, whose kind is known.
PyObject* call(Watch* watch, long kind, PyObject* func, PyObject* args, PyObject* kwargs) {
    PyObject* listener = watch->listener;
    if (!begin(listener)) return nullptr;
    const int recomputes = is_true(listener, FIELD(forward, recomputes));
    if (recomputes < 0) return nullptr;
    if (recomputes) {
        const long effect = effect_of(kind, args, kwargs);
        if (effect < 0 || (effect != 0 && !tell_effect(watch, effect, args, kwargs))) return nullptr;
    }
    const int has_graph = has_grad_mode();
    if (has_graph < 0) return nullptr;
    if (!has_graph) return PyObject_Call(func, args, kwargs);
    const long long depth = integer(listener, FIELD(forward, depth));
    if (depth == -1 && PyErr_Occurred()) return nullptr;
    bool is_noted = recomputes && depth == 0 && (kind & CHEAP);
    const int replaced = is_noted ? may_be_replaced() : 0;  // Note: [modes that replace]
    if (replaced < 0) return nullptr;
    is_noted = is_noted && !replaced;
    Owned before(Py_NewRef(Py_None));
    if (is_noted) {
        const int counts = counts_call(listener, func);
        if (counts < 0) return nullptr;
        is_noted = counts;
    }
    if (is_noted && (kind & MAY_DRAW)) {
        Owned none(kwargs == nullptr ? PyDict_New() : Py_NewRef(kwargs));
        if (!none) return nullptr;
        before.reset(PyObject_CallFunctionObjArgs(watch->random_state, func, args, none.get(), nullptr));
        if (!before) return nullptr;
    }
    if (!set_integer(listener, FIELD(forward, depth), depth + 1)) return nullptr;
    Owned result(PyObject_Call(func, args, kwargs));
    if (!result) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        if (end(listener, Py_None)) {
            PyErr_Restore(type, error, trace);
        } else {  // as an error in a finally block, which stands for the first
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
        }
        return nullptr;
    }
    if (!end(listener, result.get())) return nullptr;
    if (!is_noted) return result.release();
    const int is_result = PySet_Contains(watch->results, type_of(result.get()));
    if (is_result < 0) return nullptr;
    if (is_result) {
        Owned none(kwargs == nullptr ? PyDict_New() : Py_NewRef(kwargs));
        if (!none) return nullptr;
        NoTorchFunction unseen(result.get());
        if (!unseen) return nullptr;
        const int told_already = before.get() == Py_None ? note_made(listener, args, none.get(), result.get()) : 0;
        if (told_already < 0) return nullptr;
        if (told_already > 0) return result.release();
        PyObject *made = result.get(), *state = before.get();
        const Owned told(PyObject_CallMethodObjArgs(listener, s_made, func, args, none.get(), made, state, nullptr));
        if (!told) return nullptr;
    }
    return result.release();
}

// Whether the listener wants what only the method tells it: 1 or 0, or -1 with an error set.
int wants_more(PyObject* listener) {
    const int more = is_true(listener, FIELD(forward, remakes_anything));
    return more != 0 ? more : is_true(listener, FIELD(forward, is_timing));
}

PyObject* watch_call(PyObject* self, PyObject* given, PyObject*) {
    Watch* watch = watch_of(self);
    if (PyTuple_Size(given) != 3) {
        PyErr_SetString(PyExc_TypeError, "a Watch takes a function, its arguments and its keyword arguments");
        return nullptr;
    }
    PyObject *func = PyTuple_GetItem(given, 0), *args = PyTuple_GetItem(given, 1), *kwargs = PyTuple_GetItem(given, 2);
    if (kwargs == Py_None || (PyDict_CheckExact(kwargs) && PyDict_Size(kwargs) == 0)) kwargs = nullptr;
    if (!PyTuple_CheckExact(args) || (kwargs != nullptr && !PyDict_CheckExact(kwargs))) return Py_NewRef(watch->rare);
    PyObject* known = PyDict_GetItemWithError(watch->kinds, func);
    if (known == nullptr) {  // not seen yet, or one that cannot be hashed
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return nullptr;
        PyErr_Clear();
        return Py_NewRef(watch->rare);
    }
    const int traced = is_traced();
    const int more = traced == 0 ? wants_more(watch->listener) : traced;
    if (more < 0) return nullptr;
    return more ? Py_NewRef(watch->rare) : call(watch, PyLong_AsLong(known), func, args, kwargs);
}

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(watch_dealloc)}, {Py_tp_traverse, reinterpret_cast<void*>(watch_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(watch_clear)},     {Py_tp_call, reinterpret_cast<void*>(watch_call)},
    {0, nullptr},
};

PyType_Spec specification = {
    "backstash.stash._held.Watch", sizeof(Watch), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots,
};

PyTypeObject* watch_type = nullptr;

}  // namespace

bool make_watch_type() {
    watch_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&specification));
    return watch_type != nullptr;
}

PyObject* make_watch(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (!takes(number, 6, "watch takes six objects")) return nullptr;
    PyObject* made = reinterpret_cast<allocfunc>(PyType_GetSlot(watch_type, Py_tp_alloc))(watch_type, 0);
    if (made == nullptr) return nullptr;
    Watch* watch = watch_of(made);
#define BACKSTASH_TAKE(name) watch->name = Py_NewRef(*args++);
    BACKSTASH_WATCHED(BACKSTASH_TAKE)
#undef BACKSTASH_TAKE
    return made;
}

}  // namespace backstash
