// The slots of the package's own classes, read and written where they lie in their objects, because to find one by its
// name takes longer than to read it. Python says where they lie: see stash/compiled.py.
#pragma once

#include "tensors.h"

namespace backstash {

#define BACKSTASH_SLOTS_OF_ACCOUNT(X) \
    X(codec) X(decode_seconds) X(decodes) X(encode_seconds) X(facts) X(is_of_region) X(reason) X(remake_seconds) \
    X(saved_nbytes) X(shared_by) X(stall_seconds) X(stash_nbytes) X(store)
#define BACKSTASH_SLOTS_OF_BUFFER(X) X(cdata) X(memory) X(owner) X(storage) X(version) X(whole)
#define BACKSTASH_SLOTS_OF_BUFFERS(X) X(_buffers) X(_keeps) X(_lent)
#define BACKSTASH_SLOTS_OF_CALL(X) \
    X(name) X(function) X(args) X(kwargs) X(inputs) X(spec) X(in_place) X(settings) X(autocast) X(random_state) \
    X(statistics) X(output) X(group) X(saved) X(needs_grad) X(is_cheap) X(is_proven) X(place) X(pattern)
#define BACKSTASH_SLOTS_OF_CALL_PLACE(X) X(is_used) X(latest) X(passes) X(pattern)
#define BACKSTASH_SLOTS_OF_CODER(X) \
    X(codec) X(element) X(hi) X(kind) X(label) X(lo) X(mask) X(min_saving) X(reason) X(test)
#define BACKSTASH_SLOTS_OF_CONTENT(X) X(before) X(call) X(escaped) X(storage) X(value) X(version)
#define BACKSTASH_SLOTS_OF_CONTENTS(X) X(_contents) X(min_nbytes) X(parameters)
#define BACKSTASH_SLOTS_OF_DEVICE_STORE(X) X(_holdings) X(_lock) X(_numbers) X(_values)
#define BACKSTASH_SLOTS_OF_ENCODED(X) X(codec) X(spec) X(planes) X(meta)
#define BACKSTASH_SLOTS_OF_ENCODER(X) X(_knows_room) X(_live) X(_remaking) X(is_fixed) X(only_keep) X(policy) X(stores)
#define BACKSTASH_SLOTS_OF_FORM(X) X(codec) X(mask) X(planes) X(spec) X(store) X(tag) X(ticket)
#define BACKSTASH_SLOTS_OF_FORWARD(X) \
    X(_call) X(_call_place) X(_contents) X(_is_watched) X(_leaning) X(_live) X(_names) X(_pending) X(_rows) X(_shapes) \
    X(counted) X(depth) X(is_idle) X(is_timing) X(parameters) X(recomputes) X(remakes_anything) X(step) X(unnamed)
#define BACKSTASH_SLOTS_OF_FRAME(X) X(counts) X(fqn) X(label)
#define BACKSTASH_SLOTS_OF_HELD(X) X(tensor) X(version) X(is_reference)
#define BACKSTASH_SLOTS_OF_HOLDINGS(X) X(capacity) X(count) X(nbytes) X(peak_nbytes)
#define BACKSTASH_SLOTS_OF_KNOWN_NODE(X) X(asked) X(places) X(roles) X(specs)
#define BACKSTASH_SLOTS_OF_LEARNED(X) X(nodes) X(noting)
#define BACKSTASH_SLOTS_OF_LEAF(X) X(value) X(spec) X(offset)
#define BACKSTASH_SLOTS_OF_LEANING(X) X(_values)
#define BACKSTASH_SLOTS_OF_LIVE(X) \
    X(_losses) X(_nbytes) X(_remade_nbytes) X(_saved) X(buffers) X(comparisons) X(distrusted) X(lock) X(monitor) X(read_with_graph) \
    X(needed_nbytes) X(overwrites) X(peak_nbytes) X(prefetcher) X(stashed_nbytes) X(unpacked) X(watcher)
#define BACKSTASH_SLOTS_OF_NAMES(X) X(_cycles) X(_found) X(_is_fresh) X(frames) X(learned)
#define BACKSTASH_SLOTS_OF_NOTING(X) X(_failing) X(_has_skipped) X(_has_used) X(_limit) X(_places) X(_surprises) X(passes)
#define BACKSTASH_SLOTS_OF_PATTERN(X) X(args) X(call) X(chosen) X(in_place) X(kwargs) X(places) X(result) X(slots)
#define BACKSTASH_SLOTS_OF_PENDING(X) X(_decide) X(_values) X(clock) X(due)
#define BACKSTASH_SLOTS_OF_PLACE(X) \
    X(action) X(answer) X(claimable) X(coders) X(declined) X(delay) X(facts) X(gone) X(held) X(is_dense) \
    X(made_seconds) X(proof) X(proven) X(releases) X(root) X(settled) X(spared) X(told) X(tolerance) X(uses)
#define BACKSTASH_SLOTS_OF_RECIPE(X) \
    X(any_producer) X(call) X(first_use) X(from_statistics) X(fused) X(inputs) X(leaves) X(references) X(sample) \
    X(text) X(tree)
#define BACKSTASH_SLOTS_OF_REMAKING(X) \
    X(_full) X(_leaning) X(_live) X(_noting) X(_number) X(_own) X(_pending) X(_policy) X(_rows) X(_step)
#define BACKSTASH_SLOTS_OF_SAMPLE(X) \
    X(bits) X(begin) X(step) X(checksum) X(allows) X(rows) X(slab) X(picked)
#define BACKSTASH_SLOTS_OF_SAVED(X) \
    X(builtin) X(claimable) X(counter) X(dense) X(live) X(mask) X(modified) X(need) X(node) X(offset) X(original) \
    X(pinned) X(place) X(round) X(spec) X(tensor) X(value) X(version) X(wrapping)
#define BACKSTASH_SLOTS_OF_SLOT(X) X(kind) X(offset) X(spec)
#define BACKSTASH_SLOTS_OF_SPEC(X) X(shape) X(stride) X(dtype) X(device) X(nbytes)
#define BACKSTASH_SLOTS_OF_STEP(X) X(accounts) X(named) X(parameters) X(recognised) X(small)
#define BACKSTASH_SLOTS_OF_STORAGES(X) X(_recognised) X(_state)
#define BACKSTASH_SLOTS_OF_TICKET(X) X(number) X(nbytes)
#define BACKSTASH_SLOTS_OF_VALUE(X) \
    X(account) X(address) X(bits) X(born) X(buffers) X(cdata) X(children) X(content) X(depth) X(errors) X(exact) \
    X(facts) X(form) X(guard) X(has_room) X(height) X(key) X(live) X(members) X(otherwise) X(place) X(recipe) \
    X(remade) X(round) X(sample) X(shares) X(storage) X(unread) X(written)
#define BACKSTASH_SLOTS_OF_VIEW(X) X(content) X(spec) X(offset)

// The name of a class here, its name in Python, and its slots.
#define BACKSTASH_CLASSES(X) \
    X(account, Account, BACKSTASH_SLOTS_OF_ACCOUNT) \
    X(buffer, _Buffer, BACKSTASH_SLOTS_OF_BUFFER) \
    X(buffers, Buffers, BACKSTASH_SLOTS_OF_BUFFERS) \
    X(call, Call, BACKSTASH_SLOTS_OF_CALL) \
    X(call_place, CallPlace, BACKSTASH_SLOTS_OF_CALL_PLACE) \
    X(coder, Coder, BACKSTASH_SLOTS_OF_CODER) \
    X(content, Content, BACKSTASH_SLOTS_OF_CONTENT) \
    X(contents, Contents, BACKSTASH_SLOTS_OF_CONTENTS) \
    X(device_store, DeviceStore, BACKSTASH_SLOTS_OF_DEVICE_STORE) \
    X(encoded, Encoded, BACKSTASH_SLOTS_OF_ENCODED) \
    X(encoder, Encoder, BACKSTASH_SLOTS_OF_ENCODER) \
    X(form, Form, BACKSTASH_SLOTS_OF_FORM) \
    X(forward, Forward, BACKSTASH_SLOTS_OF_FORWARD) \
    X(frame, Frame, BACKSTASH_SLOTS_OF_FRAME) \
    X(held, Held, BACKSTASH_SLOTS_OF_HELD) \
    X(holdings, Holdings, BACKSTASH_SLOTS_OF_HOLDINGS) \
    X(known_node, KnownNode, BACKSTASH_SLOTS_OF_KNOWN_NODE) \
    X(leaf, Leaf, BACKSTASH_SLOTS_OF_LEAF) \
    X(learned, Learned, BACKSTASH_SLOTS_OF_LEARNED) \
    X(live, Live, BACKSTASH_SLOTS_OF_LIVE) \
    X(leaning, Leaning, BACKSTASH_SLOTS_OF_LEANING) \
    X(names, Names, BACKSTASH_SLOTS_OF_NAMES) \
    X(noting, Noting, BACKSTASH_SLOTS_OF_NOTING) \
    X(pattern, Pattern, BACKSTASH_SLOTS_OF_PATTERN) \
    X(pending, Pending, BACKSTASH_SLOTS_OF_PENDING) \
    X(place, Place, BACKSTASH_SLOTS_OF_PLACE) \
    X(recipe, Recipe, BACKSTASH_SLOTS_OF_RECIPE) \
    X(remaking, Remaking, BACKSTASH_SLOTS_OF_REMAKING) \
    X(sample, Sample, BACKSTASH_SLOTS_OF_SAMPLE) \
    X(saved, Saved, BACKSTASH_SLOTS_OF_SAVED) \
    X(slot, Slot, BACKSTASH_SLOTS_OF_SLOT) \
    X(spec, TensorSpec, BACKSTASH_SLOTS_OF_SPEC) \
    X(step, Step, BACKSTASH_SLOTS_OF_STEP) \
    X(storages, ParameterStorages, BACKSTASH_SLOTS_OF_STORAGES) \
    X(ticket, Ticket, BACKSTASH_SLOTS_OF_TICKET) \
    X(value, Value, BACKSTASH_SLOTS_OF_VALUE) \
    X(view, View, BACKSTASH_SLOTS_OF_VIEW)

// For each class an object with its type, null until it is known, and the offsets of its slots.
namespace layout {
#define BACKSTASH_OFFSET(slot) Py_ssize_t slot;
#define BACKSTASH_LAYOUT(name, in_python, SLOTS) \
    struct name##_layout { \
        PyObject* type; \
        SLOTS(BACKSTASH_OFFSET) \
    }; \
    inline name##_layout name{};
BACKSTASH_CLASSES(BACKSTASH_LAYOUT)
#undef BACKSTASH_LAYOUT
#undef BACKSTASH_OFFSET
}  // namespace layout

// Whether an object is of exactly that class.
template <class Layout>
bool is_a(PyObject* object, const Layout& of) { return type_of(object) == of.type; }

inline PyObject*& at(PyObject* object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// Makes a slot refer to an object, whose reference it takes over; what was there goes last, because that may run code.
inline void give(PyObject* object, Py_ssize_t offset, PyObject* taken) {
    PyObject* before = at(object, offset);
    at(object, offset) = taken;
    Py_XDECREF(before);
}

inline void set(PyObject* object, Py_ssize_t offset, PyObject* other) { give(object, offset, Py_NewRef(other)); }

// Makes a slot an integer; returns whether that went well.
inline bool set_number(PyObject* object, Py_ssize_t offset, long long number) {
    PyObject* made = PyLong_FromLongLong(number);
    if (made == nullptr) return false;
    give(object, offset, made);
    return true;
}

inline long long number_at(PyObject* object, Py_ssize_t offset) { return PyLong_AsLongLong(at(object, offset)); }

inline bool is_true_at(PyObject* object, Py_ssize_t offset) { return at(object, offset) == Py_True; }

inline bool is_none_at(PyObject* object, Py_ssize_t offset) { return at(object, offset) == Py_None; }

// A new object of a class of slots alone, none of which refers to anything yet.
inline PyObject* make(PyObject* type) {
    return untracked(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
}

// A slot of a class, and its name: for objects that are mostly of that class, but may be others in its place.
struct Field {
    PyObject* type;
    Py_ssize_t offset;
    PyObject* name;
};

#define FIELD(class_name, slot) \
    Field { layout::class_name.type, layout::class_name.slot, s_##slot }

// A new reference, or null with an error set.
inline PyObject* get(PyObject* object, const Field& field) {
    PyObject* found = type_of(object) == field.type ? at(object, field.offset) : nullptr;
    return found != nullptr ? Py_NewRef(found) : PyObject_GetAttr(object, field.name);
}

// Returns whether that went well.
inline bool assign(PyObject* object, const Field& field, PyObject* other) {
    if (type_of(object) != field.type) return PyObject_SetAttr(object, field.name, other) == 0;
    set(object, field.offset, other);
    return true;
}

// Whether it is that very object: 1 or 0, or -1 with an error set.
inline int is_same(PyObject* object, const Field& field, PyObject* other) {
    Owned found(get(object, field));
    return found ? found.get() == other : -1;
}

inline int is_true(PyObject* object, const Field& field) { return is_same(object, field, Py_True); }

// -1 with an error set where it is no integer.
inline long long integer(PyObject* object, const Field& field) {
    Owned found(get(object, field));
    return found ? PyLong_AsLongLong(found.get()) : -1;
}

inline bool set_integer(PyObject* object, const Field& field, long long number) {
    Owned made(PyLong_FromLongLong(number));
    return made && assign(object, field, made.get());
}

// The value of a Need: the more of a tensor is read, the higher.
inline int rank_of(PyObject* need) {
    return need == need_value ? 3 : need == need_index ? 2 : need == need_sign ? 1 : 0;
}

// What a weak reference refers to, None where that is gone: a new reference.
inline PyObject* referent(PyObject* reference) { return PyObject_CallNoArgs(reference); }

// Holds a lock of Python. An error that is set stays set.
class Locked {
public:
    explicit Locked(PyObject* lock) : lock_(Py_NewRef(lock)) {
        const Owned acquired(PyObject_CallMethodObjArgs(lock_.get(), s_acquire, nullptr));
        is_held_ = static_cast<bool>(acquired);
    }
    ~Locked() {
        if (is_held_) give_back(lock_.get(), s_release);
    }
    explicit operator bool() const { return is_held_; }

private:
    Owned lock_;
    bool is_held_ = false;
};

// decide.cpp
bool look_again(PyObject* pending, long long clock, PyObject* look);

// encode.cpp
bool add_nbytes(PyObject* live, long long nbytes);
long long device_nbytes(PyObject* account);

PyObject* lay_out(PyObject*, PyObject* const* args, Py_ssize_t number);  // layout.cpp

constexpr int WORK = 3;  // as in live.py

// backward.cpp
bool add_up(PyObject* live);
PyObject* decode(PyObject* saved, PyObject* spec, PyObject* value, bool in_backward);  // under the lock
PyObject* fetch_leaf(PyObject* leaf, PyObject* known);  // see decode.fetch; the settings that are known to be those now
int has_room(PyObject* live, long long nbytes);
int is_unchanged(PyObject* saved);
int may_hold(PyObject* live, long long nbytes);
PyObject* make_dense_tensor(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* fetch(PyObject*, PyObject* leaf);

// affine.cpp: see fused.affine; a new reference, to None where the recipe has another form or no kernel takes it. The
// result may take the memory of that value, which may be null.
PyObject* run_affine(PyObject* recipe, PyObject* value, PyObject* known);

// What became of a value that was encoded: the label of its codec, and the bytes of its planes.
struct Encoding {
    Owned label{nullptr};
    long long nbytes = 0;
};

// forms.cpp: see Encoder.form, of a tensor that is all of its storage and has the spec of the place's facts. A new Form;
// or a text, why all codecs have declined it; or None where the reference has to do it, for which nothing has changed.
PyObject* form_of(PyObject* encoder, PyObject* place, PyObject* facts, PyObject* spec, PyObject* action,
                  PyObject* whole, Encoding& found);
PyObject* decode_form(PyObject* value, PyObject* form);  // into new memory; None where the reference has to do it
PyObject* finalize_form(PyObject* form, PyObject*);

// remake.cpp
PyObject* agree(PyObject*, PyObject* const* args, Py_ssize_t number);
PyObject* as_strided(PyObject* x, PyObject* spec, PyObject* offset);
// Whether these are the settings of the process now, for results on a device: 1 or 0, or -1 with an error set.
int are_settings(PyObject* wanted, PyObject* device);
PyObject* get_held(PyObject* held);     // see Held.get: a new reference
PyObject* memory_for(PyObject* value);  // what makes memory for a value, as Python is given it; null is no value
int has_layout(PyObject* x, PyObject* spec);  // whether it has a spec's sizes and strides: 1 or 0, or -1 with an error
PyObject* run_recipe(PyObject* recipe, PyObject* value, PyObject* known);  // the value whose memory it may take, or null

// unpack.cpp
PyObject* finalize(PyObject*, PyObject* const* args, Py_ssize_t number);
int is_large_layer(PyObject* node, bool of_weight, long long itemsize);
PyObject* unpack_saved(PyObject* saved);

}  // namespace backstash
