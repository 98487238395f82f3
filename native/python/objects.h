// What the compiled functions share: references, names of attributes, and torch's objects. Of Python only the
// limited API of 3.11 is used, and of torch nothing but the attributes of its tensors: one library fits every Python
// from there on, and every torch.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace backstash {

// Of torch and of the package, by the names under which Python hands them over; see configure() in held.cpp.
#define BACKSTASH_OBJECTS(X) \
    X(tensor_type) X(parameter_type) X(strided) X(no_function) X(count_modes) X(running_node) \
    X(functorch_level) X(is_jit_tracing) X(count_dispatch_modes) X(has_tracing_mode) X(has_replacing_mode) \
    X(is_grad_enabled) X(read_reference) X(hold_traced) X(held_parameter) X(slot_type) \
    X(storage_use_count) X(getrefcount) X(frame_type) X(set_grad_mode) X(perf_counter) X(own_references) X(no_errors) \
    X(need_shape) X(need_sign) X(need_index) X(need_value) X(keep_type) X(recompute_type) X(stash_type) \
    X(follow_original) X(whole_of) X(sample_of) X(guard_leaf) X(unknown_call)

// Names of attributes, made once.
#define BACKSTASH_NAMES(X) \
    X(__enter__) X(__exit__) X(__name__) X(_base) X(_buffers) X(_call) X(_call_place) X(_cdata) X(_contents) \
    X(_cycles) X(_forward) X(_found) X(_forget) X(_is_zerotensor) X(_add_up) X(_leaning) X(_modules) X(_names) X(_pack_large) \
    X(_parameters) X(_pending) X(_places) X(_recognised) X(_state) X(_values) X(_version) X(action) X(after_function) X(any_producer) X(args) \
    X(asked) X(before) X(bound) X(before_side_effect) X(chosen) X(clock) X(codec) X(codecs) X(counted) X(counts) X(data) X(data_ptr) X(dense) \
    X(decide) X(depth) X(detach) X(device) X(dim) X(dtype) X(due) X(exact_roots) X(fqn) X(frames) X(guard) X(in_place) X(include) X(inplace) \
    X(as_strided) X(is_conj) X(is_cpu) X(is_exact) X(key) X(lack) X(is_idle) X(is_inference) X(is_leaf) X(is_meta) X(is_neg) X(is_nested) X(is_plain) X(is_quantized) \
    X(is_simple) X(is_timing) X(is_used) X(itemsize) X(kind) X(kwargs) X(label) X(layout) X(learned) X(look_at_due) \
    X(made) X(max_depth) X(max_inputs) X(members) X(min_nbytes) X(modified) X(nbytes) X(next_functions) X(noting) X(numel) X(of_matrix) \
    X(of_nodes) X(of_weight) X(offset) X(original) X(otherwise) X(out) X(parameters) X(place) X(preserves) X(reason) X(recipe) X(recomputes) \
    X(remakes_anything) X(requires_grad) X(result) X(roles) X(shape) X(small) X(spec) X(specs) X(step) X(storage) X(store) \
    X(storage_offset) X(stride) X(tensor) X(unnamed) X(untyped_storage) X(value) X(version)

#define BACKSTASH_DECLARE_OBJECT(name) inline PyObject* name = nullptr;
#define BACKSTASH_DECLARE_NAME(name) inline PyObject* s_##name = nullptr;
BACKSTASH_OBJECTS(BACKSTASH_DECLARE_OBJECT)
BACKSTASH_NAMES(BACKSTASH_DECLARE_NAME)
#undef BACKSTASH_DECLARE_OBJECT
#undef BACKSTASH_DECLARE_NAME

// A reference that is given up at the end of the block.
class Owned {
public:
    explicit Owned(PyObject* object) : object_(object) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }
    PyObject* release() {
        PyObject* object = object_;
        object_ = nullptr;
        return object;
    }
    void reset(PyObject* object) {
        Py_XDECREF(object_);
        object_ = object;
    }

private:
    PyObject* object_;
};

inline PyObject* type_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// Whether a tensor is of a class that no torch function of a subclass can see.
inline bool is_plain(PyObject* x) { return type_of(x) == tensor_type || type_of(x) == parameter_type; }

// Inside, no torch function mode and no subclass sees what is asked of a tensor. An error that is set stays set.
class NoTorchFunction {
public:
    explicit NoTorchFunction(PyObject* x) {
        if (is_plain(x)) {
            Owned modes(PyObject_CallNoArgs(count_modes));
            if (!modes) return;
            is_set_ = PyLong_AsLong(modes.get()) == 0;
            if (is_set_) return;
        }
        context_.reset(PyObject_CallNoArgs(no_function));
        if (!context_) return;
        const Owned inside(PyObject_CallMethodObjArgs(context_.get(), s___enter__, nullptr));
        is_set_ = entered_ = static_cast<bool>(inside);
    }
    ~NoTorchFunction() {
        if (!entered_) return;
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        Owned(PyObject_CallMethodObjArgs(context_.get(), s___exit__, Py_None, Py_None, Py_None, nullptr));
        PyErr_Restore(type, error, trace);
    }
    explicit operator bool() const { return is_set_; }

private:
    Owned context_{nullptr};
    bool entered_ = false, is_set_ = false;
};

// Whether an attribute is True: 1 or 0, or -1 with an error set.
inline int is_true(PyObject* object, PyObject* name) {
    Owned found(PyObject_GetAttr(object, name));
    return found ? found.get() == Py_True : -1;
}

// Whether an attribute is that very object: 1 or 0, or -1 with an error set.
inline int is_same(PyObject* object, PyObject* name, PyObject* other) {
    Owned found(PyObject_GetAttr(object, name));
    return found ? found.get() == other : -1;
}

// An attribute that is an integer: -1 with an error set where it is none.
inline long long integer(PyObject* object, PyObject* name) {
    Owned found(PyObject_GetAttr(object, name));
    return found ? PyLong_AsLongLong(found.get()) : -1;
}

// Makes an attribute an integer; returns whether that went well.
inline bool set_integer(PyObject* object, PyObject* name, long long number) {
    Owned made(PyLong_FromLongLong(number));
    return made && PyObject_SetAttr(object, name, made.get()) == 0;
}

// Adds a number to an element of a list of numbers; returns whether that went well.
inline bool add_to(PyObject* list, Py_ssize_t index, PyObject* number) {
    PyObject* before = PyList_GetItem(list, index);
    PyObject* sum = before == nullptr ? nullptr : PyNumber_Add(before, number);
    return sum != nullptr && PyList_SetItem(list, index, sum) == 0;  // which takes the reference
}

// How many dispatch modes are active: -1 with an error set.
inline long dispatch_modes() {
    Owned modes(PyObject_CallNoArgs(count_dispatch_modes));
    return modes ? PyLong_AsLong(modes.get()) : -1;
}

// See has_replacing_mode in torch_internals.py: 1 or 0, or -1 with an error set.
inline int may_be_replaced() {
    Owned functions(PyObject_CallNoArgs(count_modes));
    const long modes = functions ? dispatch_modes() : -1;
    if (modes < 0) return -1;
    if (modes == 0 && PyLong_AsLong(functions.get()) == 0) return 0;
    Owned found(PyObject_CallNoArgs(has_replacing_mode));
    return found ? found.get() == Py_True : -1;
}

// See is_traced in torch_internals.py: 1 or 0, or -1 with an error set.
inline int is_traced() {
    Owned level(PyObject_CallNoArgs(functorch_level));
    if (!level || level.get() != Py_None) return level ? 1 : -1;
    Owned tracing(PyObject_CallNoArgs(is_jit_tracing));
    if (!tracing || tracing.get() == Py_True) return tracing ? 1 : -1;
    const long modes = dispatch_modes();
    if (modes <= 0) return static_cast<int>(modes);
    Owned found(PyObject_CallNoArgs(has_tracing_mode));
    return found ? found.get() == Py_True : -1;
}

// Whether a function was given as many arguments as it takes; an error is set where it was not.
inline bool takes(Py_ssize_t number, Py_ssize_t wanted, const char* what) {
    if (number != wanted) PyErr_SetString(PyExc_TypeError, what);
    return number == wanted;
}

// What the other files have for the module in held.cpp.
PyObject* make_watch(PyObject*, PyObject* const* args, Py_ssize_t number);  // observer.cpp
bool make_watch_type();
PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t number);  // pack.cpp

// patterns.cpp
PyObject* fitting(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* is_odd_tensor(PyObject*, PyObject* x);
PyObject* looks_like_spec(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* state_of(PyObject*, PyObject* const* args, Py_ssize_t number);
int looks_like(PyObject* x, PyObject* spec);  // whether a tensor has that TensorSpec: 1 or 0, or -1 with an error set
int is_odd(PyObject* x);                      // see saved.is_odd: 1 or 0, or -1 with an error set

// decide.cpp
PyObject* look_at(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* decide_if_orphaned(PyObject*, PyObject* const* args, Py_ssize_t number);
int decide_on(PyObject* pending, PyObject* value);  // 1 or 0, or -1 with an error set

// encode.cpp
PyObject* encode(PyObject*, PyObject* const* args, Py_ssize_t number);
int has_error(PyObject* stash);  // see encode.has_error: 1 or 0, or -1 with an error set

// recipes.cpp: see Remaking.recipe, which it returns the answer of.
PyObject* recipe_of(PyObject* remaking, PyObject* value, PyObject* strongest, PyObject* whole, PyObject* action);

// sample.cpp
PyObject* elements(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* sample(PyObject* remaking, PyObject* whole, PyObject* spec);  // see Sample.of, of a value with that spec

// saved.cpp
int held_by_nobody_else(PyObject* value, long own);  // see pending._is_orphaned: 1 or 0, or -1 with an error set
PyObject* unchanged_of(PyObject* value, PyObject* follow);  // see encode._unchanged
PyObject* find(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* fits_node(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* is_orphaned(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* references_of(PyObject*, PyObject* value);
PyObject* unchanged(PyObject*, PyObject* const* args, Py_ssize_t number);

// modules.cpp
PyObject* enter_module(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* leave_module(PyObject*, PyObject* session);

PyObject* hold_in(PyObject* x);  // held.cpp: the tuple of held.hold

}  // namespace backstash
