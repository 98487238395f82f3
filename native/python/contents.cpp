// What storages hold, and how that was made, as far as the call is like that of an earlier step: see Contents.of,
// Contents.note_call and Contents._again in stash/contents.py. For whatever is less common it calls these.
#include "slots.h"

#include <initializer_list>

namespace backstash {
namespace {

// See Content.__init__: a new Content of that version, after another one or None.
PyObject* make_content(PyObject* reference, PyObject* version, PyObject* before = Py_None) {
    PyObject* made = make(layout::content.type);
    if (made == nullptr) return nullptr;
    const auto& at_ = layout::content;
    set(made, at_.storage, reference);
    set(made, at_.version, version);
    for (Py_ssize_t none : {at_.call, at_.value}) set(made, none, Py_None);
    set(made, at_.before, before);
    set(made, at_.escaped, before == Py_None ? Py_False : at(before, at_.escaped));
    if (before != Py_None) set(before, at_.before, Py_None);
    return made;
}

// The content of a storage that is known, but of another version: a new reference. See Contents.of.
PyObject* content_after(PyObject* known, PyObject* version) {
    const auto& at_ = layout::content;
    const long long then = number_at(known, at_.version), now = PyLong_AsLongLong(version);
    if (PyErr_Occurred()) return nullptr;
    PyObject* content = make_content(at(known, at_.storage), version, then == now - 1 ? known : Py_None);
    if (content != nullptr) set(content, at_.escaped, at(known, at_.escaped));
    return content;
}

// What Contents._argument returns for a tensor that is no parameter and not what the call has filled.
PyObject* make_view(PyObject* content, PyObject* slot) {
    PyObject* made = make(layout::view.type);
    if (made == nullptr) return nullptr;
    set(made, layout::view.content, content);
    set(made, layout::view.spec, at(slot, layout::slot.spec));
    set(made, layout::view.offset, at(slot, layout::slot.offset));
    return made;
}

// What Contents._argument returns for the tensor that the call has changed: the call has read its content before that.
PyObject* view_before(PyObject* contents, PyObject* x, PyObject* storage, PyObject* cdata, PyObject* slot) {
    Owned after(content_of(contents, x, storage, cdata));
    if (!after) return nullptr;
    Owned before(Py_NewRef(at(after.get(), layout::content.before)));
    set(after.get(), layout::content.before, Py_None);
    if (before.get() == Py_None) {
        Owned version(tensor__version(x));
        Owned earlier(version ? PyLong_FromLongLong(PyLong_AsLongLong(version.get()) - 1) : nullptr);
        before.reset(earlier ? make_content(at(after.get(), layout::content.storage), earlier.get()) : nullptr);
    }
    return before ? make_view(before.get(), slot) : nullptr;
}

// A statistic that a batch norm's node has saved under that name: a new Held, None where it is not held as it is.
PyObject* statistic(PyObject* node, PyObject* name) {
    Owned raw(PyObject_GetAttr(node, name));
    Owned packed(raw ? PyObject_GetAttr(raw.get(), s_data) : nullptr);
    if (!packed) return nullptr;
    if (!PyTuple_CheckExact(packed.get()) || PyTuple_Size(packed.get()) < 2) return Py_NewRef(Py_None);
    PyObject* held = make(layout::held.type);
    if (held == nullptr) return nullptr;
    set(held, layout::held.tensor, PyTuple_GetItem(packed.get(), 0));
    set(held, layout::held.version, PyTuple_GetItem(packed.get(), 1));
    set(held, layout::held.is_reference, Py_False);
    return held;
}

// See calls.statistics_of.
PyObject* statistics(PyObject* named, PyObject* result) {
    Owned node(PyObject_GetAttr(result, s_grad_fn));
    Owned name(node ? PyObject_GetAttr(type_of(node.get()), s___name__) : nullptr);
    PyObject* training = PyDict_GetItemWithError(named, s_training);
    if (!name || PyErr_Occurred()) return nullptr;
    const bool is_known = PyUnicode_CompareWithASCIIString(name.get(), "NativeBatchNormBackward0") == 0;
    if (is_known && training == Py_True) {
        Owned mean(statistic(node.get(), s__raw_saved_result1));
        Owned scale(mean ? statistic(node.get(), s__raw_saved_result2) : nullptr);
        if (!scale) return nullptr;
        if (mean.get() != Py_None && scale.get() != Py_None)
            return untracked(PyTuple_Pack(2, mean.get(), scale.get()));
    }
    return PyObject_CallFunctionObjArgs(statistics_of, named, result, nullptr);
}

// A copy of a tensor, as something held: see Contents._snapshot, of what is small.
PyObject* hold_copy(PyObject* x) {
    Owned detached(is_known(x) ? nullptr : tensor_detach(x));
    Owned copy(is_known(x) ? access->clone(x)
               : detached  ? PyObject_CallMethodObjArgs(detached.get(), s_clone, nullptr)
                           : nullptr);
    Owned version(copy ? tensor__version(copy.get()) : nullptr);
    PyObject* made = version ? make(layout::held.type) : nullptr;
    if (made == nullptr) return nullptr;
    give(made, layout::held.tensor, copy.release());
    give(made, layout::held.version, version.release());
    set(made, layout::held.is_reference, Py_False);
    return made;
}

// Whether a storage is certainly that of no parameter: 1 or 0, or -1 with an error set. See ParameterStorages.include.
int is_no_parameter(PyObject* parameters, PyObject* x, PyObject* cdata) {
    for (const Field& references : {FIELD(storages, _state), FIELD(storages, _recognised)}) {
        Owned known(get(parameters, references));
        const int listed = known ? PyDict_Contains(known.get(), cdata) : -1;
        if (listed != 0) return listed < 0 ? -1 : 0;
    }
    if (type_of(x) != tensor_type) return 0;
    Owned base(access != nullptr ? access->base(x) : PyObject_GetAttr(x, s__base));
    return base ? base.get() == Py_None || type_of(base.get()) == tensor_type : -1;
}

// See Contents._argument, of a tensor whose looks are known. None where the call cannot be repeated.
PyObject* argument(PyObject* contents, PyObject* x, PyObject* made, PyObject* slot, PyObject* parameters,
                   long long smallest) {
    Owned storage(tensor_untyped_storage(x));
    const long long nbytes = storage ? nbytes_of(storage.get()) : -1;
    Owned cdata(nbytes < 0 ? nullptr : cdata_of(storage.get()));
    if (!cdata) return nullptr;
    const bool is_small = nbytes < smallest;
    const long long own_nbytes = is_small ? nbytes_of_tensor(x) : 0;  // which may be more, of what is expanded
    if (PyErr_Occurred()) return nullptr;
    const int is_here = is_small ? is_on_cpu(x) : 0;
    if (is_here < 0) return nullptr;
    if (is_small && own_nbytes < smallest && is_here) return hold_copy(x);
    const int simple = is_small ? 0 : is_no_parameter(parameters, x, cdata.get());
    if (simple < 0) return nullptr;
    if (!simple) return PyObject_CallMethodObjArgs(contents, s__argument, x, made, slot, nullptr);
    if (storage.get() == made) return view_before(contents, x, storage.get(), cdata.get(), slot);
    Owned content(content_of(contents, x, storage.get(), cdata.get()));
    return content ? make_view(content.get(), slot) : nullptr;
}

// See Call.again.
PyObject* call_again(PyObject* like, PyObject* inputs, PyObject* statistics, PyObject* place) {
    PyObject* made = make(layout::call.type);
    if (made == nullptr) return nullptr;
    const auto& at_ = layout::call;
    for (Py_ssize_t same : {at_.name, at_.function, at_.args, at_.kwargs, at_.spec, at_.in_place, at_.settings,
                            at_.autocast, at_.output, at_.is_cheap})
        set(made, same, at(like, same));
    static PyObject* nothing = PyTuple_New(0);
    for (Py_ssize_t none : {at_.random_state, at_.group, at_.saved}) set(made, none, Py_None);
    set(made, at_.needs_grad, nothing);
    set(made, at_.is_proven, Py_False);
    set(made, at_.inputs, inputs);
    set(made, at_.statistics, statistics);
    set(made, at_.place, place);
    set(made, at_.pattern, at(place, layout::call_place.pattern));
    return made;
}

// Whether autocast is what it was for a call: 1 or 0, or -1 with an error set.
int has_own_autocast(PyObject* like, PyObject* spec) {
    PyObject* known = at(like, layout::call.autocast);
    const int is_any = has_autocast();
    if (is_any <= 0) return is_any < 0 ? -1 : known == Py_None;
    Owned type(PyObject_GetAttr(at(spec, layout::spec.device), s_type));
    Owned now(type ? PyObject_CallFunctionObjArgs(autocast_of, type.get(), nullptr) : nullptr);
    return now ? PyObject_RichCompareBool(now.get(), known, Py_EQ) : -1;
}

// Whether the settings of the process are those of the pattern: 1 or 0, or -1 with an error set.
int has_settings(PyObject* like, PyObject* spec) {
    const int same = has_own_autocast(like, spec);
    return same <= 0 ? same : are_settings(at(like, layout::call.settings), at(spec, layout::spec.device));
}

// Whether it is a result that is noted, strided and of floating-point numbers: 1 or 0, or -1 with an error set.
int is_noted(PyObject* result, PyObject* storage, long long smallest) {
    Facts facts;
    if (read_facts(result, facts)) return facts.is_floating && nbytes_of(storage) >= smallest && !facts.is_odd;
    Owned floating(PyObject_CallMethodObjArgs(result, s_is_floating_point, nullptr));
    if (!floating || floating.get() != Py_True) return floating ? 0 : -1;
    const long long nbytes = nbytes_of(storage);
    if (nbytes < smallest) return nbytes < 0 ? -1 : 0;
    const int odd = is_odd(result);
    return odd < 0 ? -1 : !odd;
}

// The call like the one of the pattern; None where it is not like it. See Contents._again.
PyObject* again(PyObject* contents, PyObject* place, PyObject* pattern, PyObject* args, PyObject* kwargs,
                PyObject* result, PyObject* storage, long long smallest) {
    PyObject *like = at(pattern, layout::pattern.call), *spec = at(pattern, layout::pattern.result);
    if (!is_a(like, layout::call) || !is_a(spec, layout::spec)) return Py_NewRef(Py_None);
    const int same = has_settings(like, spec);
    if (same <= 0) return same < 0 ? nullptr : Py_NewRef(Py_None);
    PyObject* given[] = {pattern, args, kwargs, result, storage};
    Owned tensors(fitting(nullptr, given, 5));
    if (!tensors || tensors.get() == Py_None) return tensors.release();
    PyObject* slots = at(pattern, layout::pattern.slots);
    const Py_ssize_t many = PyList_Size(tensors.get());
    Owned parameters(get(contents, FIELD(contents, parameters)));
    Owned inputs(parameters ? untracked(PyTuple_New(many)) : nullptr);
    if (!inputs) return nullptr;
    for (Py_ssize_t index = 0; index < many; ++index) {
        PyObject *x = PyList_GetItem(tensors.get(), index), *slot = PyTuple_GetItem(slots, index);
        PyObject* input = argument(contents, x, storage, slot, parameters.get(), smallest);
        if (input == nullptr) return nullptr;
        if (input == Py_None) return input;
        if (PyTuple_SetItem(inputs.get(), index, input) != 0) return nullptr;
    }
    Owned saved(Py_NewRef(Py_None));
    PyObject* named = at(like, layout::call.kwargs);
    if (PyDict_Size(named) > 0 && PyUnicode_CompareWithASCIIString(at(like, layout::call.name), "batch_norm") == 0)
        saved.reset(statistics(named, result));
    return saved ? call_again(like, inputs.get(), saved.get(), place) : nullptr;
}

}  // namespace

// See Contents.of.
PyObject* content_of(PyObject* contents, PyObject* x, PyObject* storage, PyObject* cdata) {
    Owned version(tensor__version(x));
    Owned all(version ? get(contents, FIELD(contents, _contents)) : nullptr);
    PyObject* known = all ? PyDict_GetItemWithError(all.get(), cdata) : nullptr;
    if (!all || (known == nullptr && PyErr_Occurred())) return nullptr;
    if (known != nullptr && is_a(known, layout::content)) {
        Owned alive(Py_NewRef(known));
        Owned held(referent(at(known, layout::content.storage)));
        if (!held) return nullptr;
        if (held.get() == storage) {
            PyObject* then = at(known, layout::content.version);
            const int same = PyObject_RichCompareBool(then, version.get(), Py_EQ);
            if (same < 0) return nullptr;
            if (same) return alive.release();
            Owned next(content_after(known, version.get()));
            return next && PyDict_SetItem(all.get(), cdata, next.get()) == 0 ? next.release() : nullptr;
        }
    }
    Owned reference(weak_reference(storage));
    Owned content(reference ? make_content(reference.get(), version.get()) : nullptr);
    return content && PyDict_SetItem(all.get(), cdata, content.get()) == 0 ? content.release() : nullptr;
}

// See Forward.made: 1 if the call was noted, or is none that is noted; 0 if that has to do it; -1 with an error set.
int note_made(PyObject* forward, PyObject* args, PyObject* kwargs, PyObject* result) {
    if (type_of(forward) != forward_type || layout::content.type == nullptr || type_of(result) != tensor_type) return 0;
    const int more = is_true(forward, FIELD(forward, remakes_anything));
    const int strides = more == 0 ? is_strided(result) : 0;
    if (more != 0 || strides <= 0) return more < 0 || strides < 0 ? -1 : 0;
    Owned place(get(forward, FIELD(forward, _call_place)));
    if (!place || !is_a(place.get(), layout::call_place)) return place ? 0 : -1;
    Owned pattern(Py_NewRef(at(place.get(), layout::call_place.pattern)));
    if (!is_a(pattern.get(), layout::pattern)) return 0;
    Owned live(get(forward, FIELD(forward, _live)));
    if (!live) return -1;
    const Locked locked(at(live.get(), layout::live.lock));
    Owned contents(locked ? get(forward, FIELD(forward, _contents)) : nullptr);
    const long long smallest = contents ? integer(contents.get(), FIELD(contents, min_nbytes)) : -1;
    if (smallest < 0) return -1;
    Owned storage(tensor_untyped_storage(result));
    const int noted = storage ? is_noted(result, storage.get(), smallest) : -1;
    if (noted <= 0) return noted < 0 ? -1 : 1;
    Owned call(again(contents.get(), place.get(), pattern.get(), args, kwargs, result, storage.get(), smallest));
    if (!call || call.get() == Py_None) return call ? 0 : -1;
    Owned cdata(cdata_of(storage.get()));
    Owned content(cdata ? content_of(contents.get(), result, storage.get(), cdata.get()) : nullptr);
    if (!content) return -1;
    if (is_a(content.get(), layout::content)) {
        const bool escaped = is_true_at(content.get(), layout::content.escaped);
        set(content.get(), layout::content.call, escaped ? Py_None : call.get());
    }
    return 1;
}

}  // namespace backstash
