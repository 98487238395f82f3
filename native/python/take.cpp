// Takes in what autograd has saved, as far as it was seen at the same place of an earlier step: see Forward._pack_large,
// Forward.name and Forward._take in capture/forward.py. For whatever is less common it calls these.
#include "slots.h"

#include <initializer_list>

namespace backstash {
namespace {

PyObject* zero() {
    static PyObject* number = PyLong_FromLong(0);  // which Python has at hand
    return number;
}

// Adds to an attribute that is a number; returns whether that went well.
bool add_to(PyObject* object, const Field& field, PyObject* number) {
    Owned before(get(object, field));
    Owned after(before ? PyNumber_Add(before.get(), number) : nullptr);
    return after && assign(object, field, after.get());
}

// Whether something that has a length has none: 1 or 0, or -1 with an error set.
int is_empty(PyObject* object, const Field& field) {
    Owned found(get(object, field));
    const Py_ssize_t size = found ? PyObject_Size(found.get()) : -1;
    return size < 0 ? -1 : size == 0;
}

// Whether a step may begin with a tensor that is saved: 1 or 0, or -1 with an error set.
int may_begin_step(PyObject* forward, PyObject* live) {
    Owned step(get(forward, FIELD(forward, step)));
    const int fresh = step ? is_empty(step.get(), FIELD(step, accounts)) : -1;
    if (fresh != 0) return fresh;
    if (PyObject_Size(at(live, layout::live._losses)) == 0) return number_at(live, layout::live._saved) == 0;
    Owned number(PyObject_GetAttr(live, s_saved));
    return number ? PyLong_AsLongLong(number.get()) == 0 : -1;
}

// See accounts.Account.__init__, and what Forward._take writes into one.
PyObject* make_account(PyObject* facts, PyObject* nbytes, PyObject* made_seconds) {
    PyObject* made = make(layout::account.type);
    if (made == nullptr) return nullptr;
    const auto& at_ = layout::account;
    set(made, at_.facts, facts);
    set(made, at_.shared_by, Py_None);
    set(made, at_.saved_nbytes, nbytes);
    set(made, at_.stash_nbytes, nbytes);
    set(made, at_.codec, s_kept);
    set(made, at_.store, s_device);
    set(made, at_.reason, held_by_program);
    for (Py_ssize_t seconds : {at_.encode_seconds, at_.decode_seconds, at_.stall_seconds})
        set(made, seconds, no_seconds);
    set(made, at_.remake_seconds, made_seconds);
    set(made, at_.decodes, zero());
    set(made, at_.is_of_region, Py_False);
    return made;
}

// See Account.share; returns whether that went well.
bool share(PyObject* account, PyObject* facts) {
    PyObject *first = at(account, layout::account.facts), *others = at(account, layout::account.shared_by);
    Owned need(PyObject_GetAttr(facts, s_need)), before(need ? PyObject_GetAttr(first, s_need) : nullptr);
    if (!before) return false;
    if (others == Py_None) {
        others = untracked(PyList_New(0));
        if (others == nullptr) return false;
        give(account, layout::account.shared_by, others);
    }
    const bool is_more = rank_of(before.get()) < rank_of(need.get());
    if (PyList_Append(others, is_more ? first : facts) != 0) return false;
    if (is_more) set(account, layout::account.facts, facts);
    return true;
}

// See value.Value.__init__.
PyObject* make_value(PyObject* storage, PyObject* cdata, PyObject* account, PyObject* live, PyObject* place) {
    Owned members(untracked(PyList_New(0)));
    PyObject* made = members ? make(layout::value.type) : nullptr;
    if (made == nullptr) return nullptr;
    const auto& at_ = layout::value;
    for (Py_ssize_t none : {at_.address, at_.form, at_.bits, at_.buffers, at_.content, at_.recipe, at_.remade, at_.sample,
                            at_.children, at_.otherwise, at_.guard, at_.facts, at_.exact, at_.written})
        set(made, none, Py_None);
    for (Py_ssize_t nothing : {at_.unread, at_.round, at_.height, at_.born, at_.depth}) set(made, nothing, zero());
    for (Py_ssize_t no : {at_.shares, at_.has_room}) set(made, no, Py_False);
    set(made, at_.storage, storage);
    set(made, at_.cdata, cdata);
    give(made, at_.members, members.release());
    set(made, at_.account, account);
    set(made, at_.live, live);
    set(made, at_.key, no_text);
    set(made, at_.errors, no_errors);
    set(made, at_.place, place);
    return made;
}

// See Pending.add.
bool queue(PyObject* pending, PyObject* values, PyObject* value, PyObject* place) {
    Owned reference(weak_reference(value));
    PyObject* clock = at(pending, layout::pending.clock);
    if (!reference || PyDict_SetItem(values, at(value, layout::value.cdata), reference.get()) != 0) return false;
    set(value, layout::value.born, clock);
    return look_again(pending, PyLong_AsLongLong(clock) + number_at(place, layout::place.delay), reference.get());
}

// See Forward._take. Of a saved tensor that is neither a leaf nor wrapped, and of a place that is known; `forward` has
// no tensors of compiled regions to come, and no times to note.
bool take(PyObject* forward, PyObject* saved, PyObject* place, PyObject* values, PyObject* pending) {
    const auto& at_ = layout::saved;
    PyObject* facts = at(place, layout::place.facts);  // which the place holds
    Owned need(PyObject_GetAttr(facts, s_need));
    Owned mask(need ? PyObject_GetAttr(facts, s_mask) : nullptr);
    if (!mask) return false;
    Owned shapes(get(forward, FIELD(forward, _shapes)));
    Owned dense(Py_NewRef(at(saved, at_.dense)));
    Owned storage(shapes ? tensor_untyped_storage(dense.get()) : nullptr);
    Owned cdata(storage ? cdata_of(storage.get()) : nullptr);
    if (!cdata) return false;
    const int is_shape = PyDict_Contains(shapes.get(), cdata.get());
    if (is_shape < 0) return false;
    if (is_shape || need.get() == need_shape)
        return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(forward, s__take, saved, place, Py_True, nullptr)));
    const long long begin = offset_of(dense.get());
    Owned offset(PyErr_Occurred() ? nullptr : PyLong_FromLongLong(begin));
    if (!offset) return false;
    set(saved, at_.place, place);
    set(saved, at_.tensor, facts);
    give(saved, at_.need, need.release());
    give(saved, at_.mask, mask.release());
    set(saved, at_.builtin, Py_True);
    give(saved, at_.offset, offset.release());
    PyObject* known = PyDict_GetItemWithError(values, cdata.get());
    if (known == nullptr && PyErr_Occurred()) return false;
    Owned value(known == nullptr ? Py_NewRef(Py_None) : referent(known));
    if (!value) return false;
    if (value.get() != Py_None) {
        if (!share(at(value.get(), layout::value.account), facts)) return false;
    } else {
        const long long bytes = nbytes_of(storage.get());
        Owned nbytes(bytes < 0 ? nullptr : PyLong_FromLongLong(bytes));
        Owned account(nbytes ? make_account(facts, nbytes.get(), at(place, layout::place.made_seconds)) : nullptr);
        Owned step(account ? get(forward, FIELD(forward, step)) : nullptr);
        Owned accounts(step ? get(step.get(), FIELD(step, accounts)) : nullptr);
        if (!accounts || PyList_Append(accounts.get(), account.get()) != 0) return false;
        PyObject* live = at(saved, at_.live);
        if (!add_nbytes(live, PyLong_AsLongLong(nbytes.get()))) return false;
        value.reset(make_value(storage.get(), cdata.get(), account.get(), live, place));
        if (!value || !queue(pending, values, value.get(), place)) return false;
    }
    Owned member(weak_reference(saved));
    if (!member || PyList_Append(at(value.get(), layout::value.members), member.get()) != 0) return false;
    set(saved, at_.value, value.get());
    const int recomputes = is_true(forward, FIELD(forward, recomputes));
    if (recomputes <= 0) return recomputes == 0;
    Owned contents(get(forward, FIELD(forward, _contents)));
    Owned content(contents ? content_of(contents.get(), dense.get(), storage.get(), cdata.get()) : nullptr);
    Owned reference(content ? weak_reference(value.get()) : nullptr);
    if (!reference) return false;
    set(value.get(), layout::value.content, content.get());
    give(content.get(), layout::content.value, reference.release());
    return true;
}

// The op of a node of torch's own, as formulas.op_of; types of other nodes come and go, and are not asked about here.
PyObject* op_of(PyObject* node) {
    PyObject* op = PyDict_GetItemWithError(known_ops, type_of(node));
    if (op != nullptr) return Py_NewRef(op);
    if (PyErr_Occurred()) return nullptr;
    Owned found(PyObject_CallFunctionObjArgs(op_of_node, node, nullptr));
    return found && PyDict_SetItem(known_ops, type_of(node), found.get()) == 0 ? found.release() : nullptr;
}

// The places at which a node has saved tensors, where it is as in an earlier step; None where it is not. See Names.places.
PyObject* places_of(PyObject* names, PyObject* node, PyObject* found) {
    Owned op(op_of(node));
    Owned frames(op ? get(names, FIELD(names, frames)) : nullptr);
    PyObject* frame = frames ? PyList_GetItem(frames.get(), PyList_Size(frames.get()) - 1) : nullptr;
    if (frame == nullptr) return nullptr;
    PyObject* counts = at(frame, layout::frame.counts);
    PyObject* before = PyDict_GetItemWithError(counts, op.get());
    if (before == nullptr && PyErr_Occurred()) return nullptr;
    Owned number(Py_NewRef(before == nullptr ? zero() : before));
    Owned learned(get(names, FIELD(names, learned)));
    Owned nodes(learned ? get(learned.get(), FIELD(learned, nodes)) : nullptr);
    Owned index(nodes ? PyTuple_Pack(3, at(frame, layout::frame.label), type_of(node), number.get()) : nullptr);
    if (!index) return nullptr;
    PyObject* variants = PyDict_GetItemWithError(nodes.get(), index.get());
    if (variants == nullptr) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    Owned all(Py_NewRef(variants));
    for (Py_ssize_t variant = 0; variant < PyTuple_Size(all.get()); ++variant) {
        PyObject* known = PyTuple_GetItem(all.get(), variant);
        const int same = fits_known(known, node, found, scalar_of);
        if (same < 0) return nullptr;
        if (!same) continue;
        Owned after(PyLong_FromLongLong(PyLong_AsLongLong(number.get()) + 1));
        if (!after || PyDict_SetItem(counts, op.get(), after.get()) != 0) return nullptr;
        if (!assign(names, FIELD(names, _is_fresh), Py_False)) return nullptr;
        PyObject* specs = at(known, layout::known_node.specs);
        for (Py_ssize_t each = 0; each < PyList_Size(found); ++each)
            set(PyTuple_GetItem(PyList_GetItem(found, each), 1), layout::saved.spec, PyTuple_GetItem(specs, each));
        return Py_NewRef(at(known, layout::known_node.places));
    }
    return Py_NewRef(Py_None);
}

// Lets go of the program's tensor if the node itself has made it: autograd keeps an alias of that.
bool forget_own_result(PyObject* saved, PyObject* node) {
    PyObject* reference = at(saved, layout::saved.original);
    if (reference == Py_None) return true;
    Owned original(referent(reference));
    if (!original) return false;
    if (original.get() == Py_None) return true;
    const int own = is_same(original.get(), s_grad_fn, node);
    if (own > 0) set(saved, layout::saved.original, Py_None);
    return own >= 0;
}

bool is_role_of_weight(PyObject* role) {
    return PyUnicode_CompareWithASCIIString(role, "weight") == 0 || PyUnicode_CompareWithASCIIString(role, "mat2") == 0;
}

// Shapes of the weights that autocast has copied for a node, if what it has saved may be one; null without an error
// where there is none.
PyObject* copied_shapes(PyObject* node, PyObject* found) {
    if (has_autocast() <= 0) return nullptr;
    for (Py_ssize_t index = 0; index < PyList_Size(found); ++index) {
        if (!is_role_of_weight(PyTuple_GetItem(PyList_GetItem(found, index), 0))) continue;
        Owned shapes(PyObject_CallFunctionObjArgs(weight_copies, node, nullptr));
        return shapes && PyList_Size(shapes.get()) > 0 ? shapes.release() : nullptr;
    }
    return nullptr;
}

// Notes a saved tensor as a parameter if it is a weight's copy: 1 if it is, 0 if not, or -1 with an error set.
int note_copy(PyObject* shapes, PyObject* role, PyObject* saved, PyObject* place, PyObject* step) {
    if (!is_role_of_weight(role)) return 0;
    Owned spec(PyObject_GetAttr(at(place, layout::place.facts), s_spec));
    Owned shape(spec ? PySequence_List(at(spec.get(), layout::spec.shape)) : nullptr);
    if (!shape || PyList_Sort(shape.get()) != 0) return -1;
    const int is_copy = PySequence_Contains(shapes, shape.get());
    if (is_copy <= 0) return is_copy;
    Owned parameters(get(step, FIELD(step, parameters))), index(PyLong_FromVoidPtr(saved));
    if (!parameters || !index) return -1;
    return PyDict_SetItem(parameters.get(), index.get(), at(spec.get(), layout::spec.nbytes)) == 0 ? 1 : -1;
}

// See Forward._take_of_node.
bool take_of_node(PyObject* forward, PyObject* names, PyObject* pending, PyObject* values, PyObject* pair) {
    PyObject *node = PyTuple_GetItem(pair, 0), *found = PyTuple_GetItem(pair, 1);
    Owned places(Py_NewRef(Py_None));
    if (!(PyType_GetFlags(Py_TYPE(node)) & Py_TPFLAGS_HEAPTYPE)) places.reset(places_of(names, node, found));
    if (!places) return false;
    if (places.get() == Py_None)
        return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(forward, s__take_of_node, node, found, nullptr)));
    Owned shapes(copied_shapes(node, found));
    if (PyErr_Occurred()) return false;
    const Py_ssize_t many = PyList_Size(found);
    Py_ssize_t taken = 0;
    Owned sequence(PyObject_CallMethodObjArgs(node, s__sequence_nr, nullptr));
    Owned step(sequence ? get(forward, FIELD(forward, step)) : nullptr);
    if (!step) return false;
    for (Py_ssize_t index = 0; index < many; ++index) {
        PyObject* saved = PyTuple_GetItem(PyList_GetItem(found, index), 1);
        PyObject* place = PyList_GetItem(places.get(), index);
        if (place == nullptr || !forget_own_result(saved, node)) return false;
        const int is_copy = shapes ? note_copy(shapes.get(), PyTuple_GetItem(PyList_GetItem(found, index), 0), saved, place,
                                               step.get())
                                   : 0;
        if (is_copy < 0) return false;
        if (is_copy) continue;
        ++taken;
        if (!take(forward, saved, place, values, pending)) return false;
        set(saved, layout::saved.node, sequence.get());
        set(saved, layout::saved.claimable, at(place, layout::place.claimable));
    }
    Owned number(PyLong_FromSsize_t(taken));
    return number && add_to(step.get(), FIELD(step, named), number.get()) &&
           add_to(step.get(), FIELD(step, recognised), number.get());
}

// Whether everything that was saved is common enough: 1 or 0, or -1 with an error set.
int are_common(PyObject* forward, PyObject* unnamed) {
    for (const Field& field : {FIELD(forward, _is_watched), FIELD(forward, is_timing)}) {
        const int rare = is_true(forward, field);
        if (rare != 0) return rare < 0 ? -1 : 0;
    }
    const int no_rows = is_empty(forward, FIELD(forward, _rows));
    if (no_rows <= 0) return no_rows;
    for (Py_ssize_t index = 0; index < PyList_Size(unnamed); ++index) {
        PyObject* saved = PyList_GetItem(unnamed, index);
        if (!is_a(saved, layout::saved) || is_true_at(saved, layout::saved.pinned)) return 0;
        if (!is_none_at(saved, layout::saved.wrapping)) return 0;
    }
    return 1;
}

// The nodes behind a result; null without an error where it is none that is common.
PyObject* nodes_behind(PyObject* result) {
    Owned nodes(PyList_New(0));
    if (!nodes) return nullptr;
    if (type_of(result) == tensor_type) {
        Owned node(PyObject_GetAttr(result, s_grad_fn));
        return node && PyList_Append(nodes.get(), node.get()) == 0 ? nodes.release() : nullptr;
    }
    if (!PyTuple_CheckExact(result)) return nullptr;
    for (Py_ssize_t index = 0; index < PyTuple_Size(result); ++index) {
        PyObject* each = PyTuple_GetItem(result, index);
        if (each == Py_None) continue;
        if (type_of(each) != tensor_type) return nullptr;
        Owned node(PyObject_GetAttr(each, s_grad_fn));
        if (!node || PyList_Append(nodes.get(), node.get()) != 0) return nullptr;
    }
    return nodes.release();
}

// Takes in everything that was saved, of which the nodes behind the result are known.
bool take_all(PyObject* forward, PyObject* nodes, PyObject* unnamed) {
    Owned names(get(forward, FIELD(forward, _names)));
    Owned pending(names ? get(forward, FIELD(forward, _pending)) : nullptr);
    Owned values(pending ? get(pending.get(), FIELD(pending, _values)) : nullptr);
    PyObject* given[] = {nodes, unnamed, node_attributes, make_node_attributes};
    Owned found(values ? find(nullptr, given, 4) : nullptr);
    if (!found) return false;
    PyObject *named = PyTuple_GetItem(found.get(), 0), *others = PyTuple_GetItem(found.get(), 1);
    for (Py_ssize_t index = 0; index < PyList_Size(named); ++index)
        if (!take_of_node(forward, names.get(), pending.get(), values.get(), PyList_GetItem(named, index))) return false;
    for (Py_ssize_t index = 0; index < PyList_Size(others); ++index) {
        PyObject* saved = PyList_GetItem(others, index);
        if (!Owned(PyObject_CallMethodObjArgs(forward, s__take_of_unknown, saved, nullptr))) return false;
    }
    return true;
}

}  // namespace

// See value.Saved.__init__.
PyObject* make_saved(PyObject* x, PyObject* live) {
    Owned dense(tensor_detach(x));
    Owned original(dense ? weak_reference(x) : nullptr);
    Owned version(original ? tensor__version(x) : nullptr);
    PyObject* made = version ? make(layout::saved.type) : nullptr;
    if (made == nullptr) return nullptr;
    const auto& at_ = layout::saved;
    for (Py_ssize_t none : {at_.counter, at_.tensor, at_.place, at_.spec, at_.value, at_.mask, at_.modified, at_.node,
                            at_.wrapping})
        set(made, none, Py_None);
    for (Py_ssize_t no : {at_.builtin, at_.claimable, at_.pinned}) set(made, no, Py_False);
    give(made, at_.dense, dense.release());
    give(made, at_.original, original.release());
    give(made, at_.version, version.release());
    set(made, at_.need, need_value);
    set(made, at_.offset, zero());
    set(made, at_.round, zero());
    if (!set_number(live, layout::live._saved, number_at(live, layout::live._saved) + 1)) return Py_DECREF(made), nullptr;
    set(made, at_.live, live);  // from now on its finalizer counts
    return made;
}

// See Forward._pack_large, of a plain tensor whose base, None or a tensor, is given. None where that has to do it.
PyObject* pack_large(PyObject* forward, PyObject* x, PyObject* base) {
    if (type_of(forward) != forward_type || layout::saved.type == nullptr) return Py_NewRef(Py_None);
    const long long depth = integer(forward, FIELD(forward, depth));
    if (depth == -1 && PyErr_Occurred()) return nullptr;
    if (depth == 0) return Py_NewRef(Py_None);
    const int in_backward = is_in_backward();
    if (in_backward != 0) return in_backward < 0 ? nullptr : Py_NewRef(Py_None);
    const int more = is_true(forward, FIELD(forward, remakes_anything));
    if (more != 0) return more < 0 ? nullptr : Py_NewRef(Py_None);
    for (PyObject* tensor : {x, base}) {  // see parameters.is_pinned
        if (tensor == Py_None) continue;
        Facts facts;
        const bool is_read = read_facts(tensor, facts);
        const int followed = is_read ? facts.requires_grad : is_true(tensor, s_requires_grad);
        const int pinned = followed != 1 ? followed : is_read ? facts.is_leaf : is_true(tensor, s_is_leaf);
        if (pinned != 0) return pinned < 0 ? nullptr : Py_NewRef(Py_None);
    }
    Owned live(get(forward, FIELD(forward, _live)));
    if (!live) return nullptr;
    const Locked locked(at(live.get(), layout::live.lock));
    const int begins = locked ? may_begin_step(forward, live.get()) : -1;
    if (begins < 0) return nullptr;
    if (begins && !Owned(PyObject_CallMethodObjArgs(forward, s__before_save, nullptr))) return nullptr;
    Owned saved(make_saved(x, live.get()));
    Owned unnamed(saved ? get(forward, FIELD(forward, unnamed)) : nullptr);
    return unnamed && PyList_Append(unnamed.get(), saved.get()) == 0 ? saved.release() : nullptr;
}

// See Forward.name: 1 if it was done, 0 if that has to do it, or -1 with an error set.
int name_saved(PyObject* forward, PyObject* result) {
    if (type_of(forward) != forward_type || layout::saved.type == nullptr) return 0;
    const NoTorchFunction unseen(type_of(result) == tensor_type ? result : Py_None);
    Owned live(unseen ? get(forward, FIELD(forward, _live)) : nullptr);
    if (!live) return -1;
    const Locked locked(at(live.get(), layout::live.lock));
    if (!locked) return -1;
    Owned unnamed(get(forward, FIELD(forward, unnamed)));
    const int common = unnamed ? are_common(forward, unnamed.get()) : -1;
    if (common <= 0) return common;
    Owned nodes(nodes_behind(result));
    if (!nodes) return PyErr_Occurred() ? -1 : 0;
    Owned fresh(PyList_New(0));
    if (!fresh || !assign(forward, FIELD(forward, unnamed), fresh.get())) return -1;
    return take_all(forward, nodes.get(), unnamed.get()) ? 1 : -1;
}

}  // namespace backstash
