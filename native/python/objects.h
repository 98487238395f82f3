// What the compiled functions share: references, names of attributes, and torch's objects. Of Python only the
// limited API of 3.11 is used, and of torch nothing but the attributes of its tensors: one library fits every Python
// from there on, and every torch.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "access.h"

namespace backstash {

// Of torch and of the package, by the names under which Python hands them over; see configure() in held.cpp.
#define BACKSTASH_OBJECTS(X) \
    X(tensor_type) X(parameter_type) X(strided) X(no_function) X(count_modes) X(running_node) X(functorch_level) \
    X(is_jit_tracing) X(count_dispatch_modes) X(has_tracing_mode) X(has_replacing_mode) X(is_grad_enabled) \
    X(read_reference) X(hold_traced) X(held_parameter) X(slot_type) X(storage_use_count) X(getrefcount) \
    X(any_autocast) X(autocast_of) X(weight_copies) X(need_shape) X(need_value) X(no_errors) X(op_of_node) X(scalar_of) X(node_attributes) \
    X(make_node_attributes) X(forward_type) X(session_type) X(statistics_of) X(storage_type) X(settings_readers) \
    X(repeating_module) X(overwriting) X(input_marker) X(fused_module) X(activations) X(memory_of) X(fetch_function) \
    X(fetch_reference) X(check_sample) X(make_shared) X(make_dense) X(decode_reference) X(claim_saved) X(has_direct) \
    X(claiming) X(accumulating) X(input_sizes) X(claim_input) X(claim_weight) X(set_grad_mode) X(perf_counter) \
    X(own_references) X(need_sign) X(need_index) X(keep_type) X(recompute_type) X(stash_type) X(follow_original) \
    X(whole_of) X(sample_of) X(guard_leaf) X(unknown_call) X(activation_of) X(float32) X(empty) X(empty_strided) \
    X(get_num_threads) X(take_reference) X(smallest_pooled) X(coders_of) X(bitmask_type) X(binary_type) X(zvc_type) \
    X(uint8) X(int64) X(float64) X(mask_bits_type) X(bitmask_id) X(binary_id) X(zvc_id) X(as_called)

// Names of attributes, made once.
#define BACKSTASH_NAMES(X) \
    X(CHEAP_CLAIM) X(FASTER) X(FORMS) X(LARGE) X(MASKED) X(NEVER_WHOLE) X(ROOM) X(TINY) X(WIDEST) X(__del__) \
    X(__enter__) X(__exit__) X(__name__) X(_argument) X(_base) X(_before_save) X(_buffers) X(_call) X(_call_place) \
    X(_cdata) X(_contents) X(_cycles) X(_forget) X(_forward) X(_found) X(_free_buffers) X(_is_fresh) X(_is_watched) \
    X(_is_zerotensor) X(_leaning) X(_live) X(_modules) X(_moved) X(_names) X(_pack_large) X(_parameters) X(_pending) \
    X(_places) X(_raw_saved_result1) X(_raw_saved_result2) X(_recognised) X(_rows) X(_run) X(_saved_mat2_sym_sizes) \
    X(_sequence_nr) X(_shapes) X(_state) X(_take) X(_take_of_node) X(_take_of_unknown) X(_values) X(_version) \
    X(accounts) X(acquire) X(affine) X(after_function) X(any_producer) X(append) X(as_strided) X(awaits_large_weight) \
    X(before) X(before_side_effect) X(bias) X(bound) X(chosen) X(clock) X(clone) X(codec) X(codecs) X(counted) X(cpu) \
    X(counts) X(data) X(data_ptr) X(decide) X(dense) X(depth) X(detach) X(device) X(dim) X(drop) X(dtype) X(due) \
    X(enter_module) X(exact_roots) X(filled) X(forget) X(frames) X(fused) X(get) X(grad_fn) X(if_clear) X(if_set) X(include) \
    X(inplace) X(is_conj) X(is_cpu) X(is_floating_point) X(is_idle) X(is_inference) X(is_leaf) X(is_meta) X(is_neg) \
    X(is_nested) X(is_plain) X(is_quantized) X(is_simple) X(is_timing) X(is_used) X(itemsize) X(kept) X(key) X(label) X(lack) \
    X(layout) X(learned) X(leave_module) X(let_go) X(look_at_due) X(made) X(mask) X(max_depth) X(max_inputs) \
    X(min_nbytes) X(named) X(nan) X(nbytes) X(need) X(next_functions) X(nodes) X(noting) X(numel) X(of) X(of_matrix) \
    X(of_nodes) X(of_weight) X(offsets) X(op) X(otherwise) X(out) X(pair) X(parameters) X(place) X(popleft) \
    X(preserves) X(reason) X(recipe) X(recognised) X(recompute) X(recomputes) X(release) X(remakes_anything) X(repeat) \
    X(requires_grad) X(run) X(saved) X(shape) X(share) X(shrink) X(small) X(spec) X(step) X(storage_offset) X(store) \
    X(stride) X(ternary) X(training) X(type) X(unnamed) X(untyped_storage) X(values) X(weight)

#define BACKSTASH_DECLARE_OBJECT(name) inline PyObject* name = nullptr;
#define BACKSTASH_DECLARE_NAME(name) inline PyObject* s_##name = nullptr;
BACKSTASH_OBJECTS(BACKSTASH_DECLARE_OBJECT)
BACKSTASH_NAMES(BACKSTASH_DECLARE_NAME)
#undef BACKSTASH_DECLARE_OBJECT
#undef BACKSTASH_DECLARE_NAME

// What reads torch's own objects, of plain tensors; null where it was not built for this torch.
inline const Access* access = nullptr;

// Objects that many calls share, made when the module is loaded: see make_constants() in held.cpp.
inline PyObject *no_text = nullptr, *held_by_program = nullptr;             // texts
inline PyObject *no_seconds = nullptr, *one_saved = nullptr;                // 0.0; what dies with a saved tensor
inline PyObject *known_ops = nullptr, *known_sizes = nullptr, *known_arguments = nullptr;  // dicts

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

// The garbage collector does not look at that object from now on, which is new, or null.
//
// Nothing that is held for backward can be in a cycle that the collector sees: it refers to what is older, or weakly, or
// to detached tensors and leaves, and what refers to it are nodes of autograd, which the collector does not see either.
// But thousands of these objects are alive when a forward pass is over, and the collector would take them for objects
// that stay, and look through all objects of the process again and again.
inline PyObject* untracked(PyObject* object) {
    if (object != nullptr) PyObject_GC_UnTrack(object);
    return object;
}

inline PyObject* weak_reference(PyObject* object) { return untracked(PyWeakref_NewRef(object, nullptr)); }

inline PyObject* type_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// Whether a tensor is of a class that no torch function of a subclass can see.
inline bool is_plain(PyObject* x) { return type_of(x) == tensor_type || type_of(x) == parameter_type; }

// Calls a method that gives something back, such as a lock, with an argument three times if there is one. An error that is
// set stays set. Where there was no memory for the call itself, it is called again.
inline void give_back(PyObject* object, PyObject* method, PyObject* argument = nullptr) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    for (int calls = 0; calls < 2; ++calls) {
        if (Owned(PyObject_CallMethodObjArgs(object, method, argument, argument, argument, nullptr))) break;
        PyErr_Clear();
    }
    PyErr_Restore(type, error, trace);
}

// Calls a method from a finalizer, out of which Python lets no error. During a backward pass that is often the first Python
// code for a while, so Ctrl-C arrives there: the method is called again, and Ctrl-C is raised where Python looks next.
inline PyObject* call_in_finalizer(PyObject* object, PyObject* method, PyObject* argument = nullptr) {
    PyObject* result = PyObject_CallMethodObjArgs(object, method, argument, nullptr);
    if (result != nullptr || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) return result;
    PyErr_Clear();
    result = PyObject_CallMethodObjArgs(object, method, argument, nullptr);
    PyErr_SetInterrupt();
    return result;
}

// How many function modes are active: -1 with an error set.
inline long function_modes() {
    if (access != nullptr) return static_cast<long>(access->function_modes());
    Owned modes(PyObject_CallNoArgs(count_modes));
    return modes ? PyLong_AsLong(modes.get()) : -1;
}

// Inside, no torch function mode and no subclass sees what is asked of a tensor. An error that is set stays set.
class NoTorchFunction {
public:
    explicit NoTorchFunction(PyObject* x = nullptr) {  // null for tensors that are all plain
        if (x == nullptr || is_plain(x)) {
            const long modes = function_modes();
            if (modes < 0) return;
            is_set_ = modes == 0;
            if (is_set_) return;
        }
        context_.reset(PyObject_CallNoArgs(no_function));
        if (!context_) return;
        const Owned inside(PyObject_CallMethodObjArgs(context_.get(), s___enter__, nullptr));
        is_set_ = entered_ = static_cast<bool>(inside);
    }
    ~NoTorchFunction() {
        if (entered_) give_back(context_.get(), s___exit__, Py_None);
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

// Whether grad mode is on: 1 or 0, or -1 with an error set.
inline int has_grad_mode() {
    if (access != nullptr) return access->has_grad_mode();
    Owned answer(PyObject_CallNoArgs(is_grad_enabled));
    return answer ? answer.get() == Py_True : -1;
}

// Whether a node of autograd runs on this thread: 1 or 0, or -1 with an error set.
inline int is_in_backward() {
    if (access != nullptr) return access->is_in_backward();
    Owned node(PyObject_CallNoArgs(running_node));
    return node ? node.get() != Py_None : -1;
}

// The node that runs, None where none does: a new reference.
inline PyObject* node_that_runs() {
    return access != nullptr && !access->is_in_backward() ? Py_NewRef(Py_None) : PyObject_CallNoArgs(running_node);
}

// Whether autocast is on for any type of device: 1 or 0, or -1 with an error set.
inline int has_autocast() {
    if (access != nullptr) return access->has_autocast();
    Owned answer(PyObject_CallNoArgs(any_autocast));
    return answer ? answer.get() == Py_True : -1;
}

// How many dispatch modes are active: -1 with an error set.
inline long dispatch_modes() {
    if (access != nullptr) return static_cast<long>(access->dispatch_modes());
    Owned modes(PyObject_CallNoArgs(count_dispatch_modes));
    return modes ? PyLong_AsLong(modes.get()) : -1;
}

// See has_replacing_mode in torch_internals.py: 1 or 0, or -1 with an error set.
inline int may_be_replaced() {
    const long functions = function_modes(), modes = functions < 0 ? -1 : dispatch_modes();
    if (modes < 0) return -1;
    if (modes == 0 && functions == 0) return 0;
    Owned found(PyObject_CallNoArgs(has_replacing_mode));
    return found ? found.get() == Py_True : -1;
}

// See is_traced in torch_internals.py: 1 or 0, or -1 with an error set.
inline int is_traced() {
    if (access != nullptr) {
        if (access->is_transformed()) return 1;
    } else {
        Owned level(PyObject_CallNoArgs(functorch_level));
        if (!level || level.get() != Py_None) return level ? 1 : -1;
        Owned tracing(PyObject_CallNoArgs(is_jit_tracing));
        if (!tracing || tracing.get() == Py_True) return tracing ? 1 : -1;
    }
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
int has_elements(PyObject* x, PyObject* sample);
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
int fits_known(PyObject* known, PyObject* node, PyObject* found, PyObject* scalar_of);  // as fits_node

// take.cpp
PyObject* make_saved(PyObject* x, PyObject* live);
PyObject* pack_large(PyObject* forward, PyObject* x, PyObject* base);
int name_saved(PyObject* forward, PyObject* result);

// contents.cpp
PyObject* content_of(PyObject* contents, PyObject* x, PyObject* storage, PyObject* cdata);
int note_made(PyObject* forward, PyObject* args, PyObject* kwargs, PyObject* result);

// modules.cpp
PyObject* enter_module(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* leave_module(PyObject*, PyObject* session);

PyObject* hold_in(PyObject* x);  // held.cpp: the tuple of held.hold

}  // namespace backstash
