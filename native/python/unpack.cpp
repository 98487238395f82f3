// What backward is given for a saved tensor that was looked at: see backward/unpack.py, and the questions of
// backward/table.py, accumulation.py and linear.py whether a claim is worth it. Also the finalizers of stash/value.py.
#include "slots.h"

namespace backstash {
namespace {

// The node that runs, asked for once. See torch_internals.running_node.
class Running {
public:
    // A borrowed reference, None outside of backward, or null with an error set.
    PyObject* node() {
        if (!node_) node_.reset(node_that_runs());
        return node_.get();
    }

private:
    Owned node_{nullptr};
};

// The number that a module has under a name now; -1 with an error set.
long long number_in(PyObject* module, PyObject* name) {
    PyObject* number = PyDict_GetItemWithError(module, name);
    return number == nullptr ? -1 : PyLong_AsLongLong(number);
}

// Whether a module has that name in a set: 1 or 0, or -1 with an error set.
int is_in(PyObject* module, PyObject* set, PyObject* name) {
    PyObject* names = PyDict_GetItemWithError(module, set);
    return names == nullptr ? -1 : PySequence_Contains(names, name);
}

// Of a linear layer's node the name under which it has saved its input's sizes, of any other None: a borrowed
// reference, or null with an error set. A type is remembered if it is torch's own, which cannot go.
PyObject* name_of_sizes(PyObject* node) {
    PyObject* type = type_of(node);
    PyObject* found = PyDict_GetItemWithError(known_sizes, type);
    if (found != nullptr || PyErr_Occurred()) return found;
    Owned name(PyObject_GetAttr(type, s___name__));
    if (!name) return nullptr;
    found = PyDict_GetItemWithError(input_sizes, name.get());
    if (found == nullptr) {
        if (PyErr_Occurred()) return nullptr;
        found = Py_None;
    }
    const bool is_own = !(PyType_GetFlags(reinterpret_cast<PyTypeObject*>(type)) & Py_TPFLAGS_HEAPTYPE);
    return is_own && PyDict_SetItem(known_sizes, type, found) != 0 ? nullptr : found;
}

// The product of the sizes that a node has under a name; -1 with an error set.
long long elements_of(PyObject* node, PyObject* name) {
    Owned sizes(PyObject_GetAttr(node, name));
    const Py_ssize_t number = sizes ? PySequence_Size(sizes.get()) : -1;
    if (number < 0) return -1;
    long long product = 1;
    for (Py_ssize_t index = 0; index < number; ++index) {
        Owned size(PySequence_GetItem(sizes.get(), index));
        product *= size ? PyLong_AsLongLong(size.get()) : -1;
        if (PyErr_Occurred()) return -1;
    }
    return product;
}

// See accumulation.awaits_large_weight: 1 or 0, or -1 with an error set.
int awaits_large_weight(PyObject* node) {
    if (node == nullptr) return -1;
    PyObject* name = node == Py_None ? Py_None : name_of_sizes(node);
    if (name == nullptr || name == Py_None) return name == nullptr ? -1 : 0;
    const long long product = elements_of(node, s__saved_mat2_sym_sizes);
    if (PyErr_Occurred()) return -1;
    const long long large = number_in(accumulating, s_LARGE), widest = number_in(accumulating, s_WIDEST);
    if (PyErr_Occurred()) return -1;
    if (product < large / widest) return 0;
    PyObject* reference = PyDict_GetItemWithError(accumulating, s_awaits_large_weight);
    Owned answer(reference == nullptr ? nullptr : PyObject_CallNoArgs(reference));
    return answer ? answer.get() == Py_True : -1;
}

// See decode.has_direct, of the form of an op's kernel: 1 or 0, or -1 with an error set.
int is_direct(PyObject* value, PyObject* op) {
    if (value == Py_None) return 0;
    if (is_none_at(value, layout::value.bits) && is_none_at(value, layout::value.form)) return 0;
    PyObject* forms = PyDict_GetItemWithError(claiming, s_FORMS);
    PyObject* form = forms == nullptr ? nullptr : PyDict_GetItemWithError(forms, op);
    if (form == nullptr) return PyErr_Occurred() ? -1 : 0;
    PyObject* stored = at(value, layout::value.form);
    if (is_none_at(value, layout::value.bits) && is_a(stored, layout::form)) {
        PyObject* codec = type_of(at(stored, layout::form.codec));
        if (codec == zvc_type) return 0;
        if (codec == bitmask_type && form == mask_bits_type) return 1;
    }
    Owned answer(PyObject_CallFunctionObjArgs(has_direct, value, form, nullptr));
    return answer ? answer.get() == Py_True : -1;
}

// See unpack._is_mask.
bool is_mask(PyObject* value) {
    PyObject* form = at(value, layout::value.form);
    if (!is_none_at(value, layout::value.bits) || !is_a(form, layout::form)) return false;
    return type_of(at(form, layout::form.codec)) == bitmask_type;
}

// Whether to claim a value that no kernel reads directly, because it is large: see table.is_worth_a_claim, and what
// unpack._is_claimed asks of a value that has room. 1 or 0, or -1 with an error set.
int is_large(PyObject* saved, PyObject* op, long long nbytes) {
    const long long large = number_in(claiming, s_LARGE);
    if (PyErr_Occurred()) return -1;
    const bool is_small = nbytes < large;
    const long long cheap = number_in(claiming, s_CHEAP_CLAIM);
    if (PyErr_Occurred()) return -1;
    PyObject* own = at(saved, layout::saved.value);
    if (own != Py_None && is_true_at(own, layout::value.has_room)) {
        const int is_faster = nbytes >= cheap ? is_in(claiming, s_FASTER, op) : 0;
        if (is_faster <= 0) return is_faster;
    }
    if (is_small) return 0;
    const int is_never = is_in(claiming, s_NEVER_WHOLE, op);
    if (is_never != 0) return is_never < 0 ? -1 : 0;
    if (nbytes >= cheap) return 1;
    const long long room = number_in(claiming, s_ROOM);
    const int fits = PyErr_Occurred() ? -1 : has_room(at(saved, layout::saved.live), room * nbytes);
    return fits < 0 ? -1 : !fits;
}

// Whether to claim a value of which a kernel reads the planes directly: see table.MASKED. 1 or 0, or -1 with an error
// set.
int is_faster_than_decoding(PyObject* saved, PyObject* op, long long nbytes) {
    const long long large = number_in(claiming, s_LARGE);
    if (PyErr_Occurred()) return -1;
    if (nbytes >= large) return 1;
    const int is_masked = is_in(claiming, s_MASKED, op);
    if (is_masked <= 0) return is_masked < 0 ? -1 : 1;
    const long long tiny = number_in(claiming, s_TINY);
    if (PyErr_Occurred()) return -1;
    if (nbytes < tiny) return 0;
    const long long room = number_in(claiming, s_ROOM);
    const int fits = PyErr_Occurred() ? -1 : has_room(at(saved, layout::saved.live), room * nbytes);
    return fits < 0 ? -1 : !fits;
}

// See unpack._is_claimed: 1 or 0, or -1 with an error set.
int is_claimed(PyObject* saved, long long nbytes, PyObject* value, Running& running) {
    PyObject* facts = at(saved, layout::saved.tensor);
    Owned op(facts == Py_None ? Py_NewRef(no_text) : PyObject_GetAttr(facts, s_op));
    int claimed = op ? is_direct(value, op.get()) : -1;
    if (claimed == 0) claimed = is_large(saved, op.get(), nbytes);
    else if (claimed > 0 && is_mask(value))
        claimed = is_faster_than_decoding(saved, op.get(), nbytes);
    return claimed == 0 ? awaits_large_weight(running.node()) : claimed;
}

// Whether nothing has to be done about a saved tensor that only the reference does: 1 or 0, or -1 with an error set.
int is_common(PyObject* saved) {
    PyObject* live = at(saved, layout::saved.live);
    if (!is_a(live, layout::live) || !is_none_at(saved, layout::saved.wrapping)) return 0;
    if (!is_none_at(live, layout::live.watcher) || !is_none_at(live, layout::live.monitor)) return 0;
    if (!is_none_at(saved, layout::saved.tensor)) {
        Owned moved(PyObject_GetAttr(at(live, layout::live.prefetcher), s__moved));
        const Py_ssize_t number = moved ? PyObject_Size(moved.get()) : -1;
        if (number != 0) return number < 0 ? -1 : 0;
    }
    return is_unchanged(saved);
}

// Whether a tensor that is held by reference has memory, which is that of the program's own tensor while this lives:
// 1 or 0, or -1 with an error set. See decode.follow_original and parameters.check_memory.
int has_memory(PyObject* tensor, PyObject* reference) {
    const int dense = is_plain(tensor) ? is_strided(tensor) : 0;
    if (dense <= 0) return dense;
    Owned storage(tensor_untyped_storage(tensor));
    const long long nbytes = storage ? nbytes_of(storage.get()) : -1;
    if (nbytes <= 0) return static_cast<int>(nbytes);
    if (reference == Py_None) return 1;
    Owned original(referent(reference));
    if (!original || original.get() == Py_None) return original ? 1 : -1;
    const int alike = is_plain(original.get()) ? is_strided(original.get()) : 0;
    if (alike <= 0) return alike;
    Owned memory(tensor_untyped_storage(original.get()));
    return memory ? memory.get() == storage.get() : -1;
}

// See unpack._claim: a new reference, to None where there is none.
PyObject* claim(PyObject* saved) { return PyObject_CallFunctionObjArgs(claim_saved, saved, nullptr); }

// Whether the reference has to note that a backward pass with a graph reads a value, see unpack._note_graph: 1 or 0, or
// -1 with an error set.
int may_note_graph(PyObject* live) {
    if (is_none_at(live, layout::live.read_with_graph)) return 0;
    return has_grad_mode();
}

PyObject* unpack_dense(PyObject* saved, PyObject* dense, Running& running) {
    if (may_note_graph(at(saved, layout::saved.live)) != 0) return nullptr;
    const int common = has_memory(dense, at(saved, layout::saved.original));
    if (common <= 0) return nullptr;
    if (is_true_at(saved, layout::saved.claimable)) {
        const long long nbytes = nbytes_of_tensor(dense);
        const int claimed = PyErr_Occurred() ? -1 : is_claimed(saved, nbytes, Py_None, running);
        if (claimed < 0) return nullptr;
        Owned claimant(claimed ? claim(saved) : Py_NewRef(Py_None));
        if (!claimant || claimant.get() != Py_None) return claimant.release();
    }
    return Py_NewRef(dense);
}

// A finalizer's note of what died: see Live.lose, of a value.
bool lose(PyObject* live, PyObject* loss) {
    return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(at(live, layout::live._losses), s_append, loss, nullptr)));
}

// Whether a pool of buffers holds nothing.
bool are_empty(PyObject* buffers) {
    return is_a(buffers, layout::buffers) && is_none_at(buffers, layout::buffers._lent) &&
           PyList_Size(at(buffers, layout::buffers._buffers)) == 0;
}

// See Saved.__del__.
PyObject* finalize_saved(PyObject* saved, PyObject*) {
    PyObject *value = at(saved, layout::saved.value), *live = at(saved, layout::saved.live);
    if (value != nullptr && value != Py_None &&
        number_at(saved, layout::saved.round) != number_at(value, layout::value.round) &&
        !set_number(value, layout::value.unread, number_at(value, layout::value.unread) - 1))
        return nullptr;
    if (live == nullptr) Py_RETURN_NONE;  // its __init__ has failed
    if (!lose(live, one_saved)) return nullptr;
    if (PyObject_Size(at(live, layout::live._losses)) < number_at(live, layout::live._saved)) Py_RETURN_NONE;
    if (are_empty(at(live, layout::live.buffers))) Py_RETURN_NONE;
    return call_in_finalizer(live, s__free_buffers);
}

// See Value.__del__.
PyObject* finalize_value(PyObject* value, PyObject*) {
    PyObject *live = at(value, layout::value.live), *account = at(value, layout::value.account);
    if (live == nullptr || account == nullptr || at(value, layout::value.written) == nullptr) Py_RETURN_NONE;
    PyObject *remade = at(value, layout::value.remade), *form = at(value, layout::value.form);
    PyObject* buffers = at(value, layout::value.buffers);
    const long long remade_nbytes = remade == Py_None ? 0 : storage_nbytes(remade);
    if (remade_nbytes < 0) return nullptr;
    if (buffers != Py_None && form != Py_None) {
        if (!are_empty(buffers) && !Owned(call_in_finalizer(buffers, s_forget, form))) return nullptr;
    }
    const long long nbytes = device_nbytes(account);
    if (nbytes == 0 && remade_nbytes == 0) Py_RETURN_NONE;
    Owned loss(Py_BuildValue("(iLL)", 0, nbytes, remade_nbytes));
    return loss && lose(live, loss.get()) ? Py_NewRef(Py_None) : nullptr;
}

PyMethodDef finalizers[] = {
    {"__del__", finalize_saved, METH_NOARGS, nullptr},
    {"__del__", finalize_value, METH_NOARGS, nullptr},
    {"__del__", finalize_form, METH_NOARGS, nullptr},
};

}  // namespace

// Gives Saved, Value and Form their finalizers.
PyObject* finalize(PyObject*, PyObject* const* args, Py_ssize_t number) {
    const bool are_known = number == 3 && args[0] == layout::saved.type && args[1] == layout::value.type;
    if (!are_known || args[2] != layout::form.type) {
        PyErr_SetString(PyExc_TypeError, "finalize takes the classes Saved, Value and Form");
        return nullptr;
    }
    for (int index = 0; index < 3; ++index) {
        Owned method(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(args[index]), &finalizers[index]));
        if (!method || PyObject_SetAttr(args[index], s___del__, method.get()) != 0) return nullptr;
    }
    Py_RETURN_NONE;
}

// Whether what a linear layer's node asks of one of its matrices has to be found out: 1 or 0, or -1 with an error set.
// For its weight, of that many bytes an element, as in linear.claim_weight, else as in linear.claim_input.
int is_large_layer(PyObject* node, bool of_weight, long long itemsize) {
    if (!of_weight) return awaits_large_weight(node);
    PyObject* name = name_of_sizes(node);
    if (name == nullptr || name == Py_None) return name == nullptr ? -1 : 0;
    const long long number = elements_of(node, name);
    const long long large = PyErr_Occurred() ? -1 : number_in(claiming, s_LARGE);
    return PyErr_Occurred() ? -1 : number * itemsize >= large;
}

// See unpack.unpack: null without an error where the reference has to do it.
PyObject* unpack_saved(PyObject* saved) {
    const NoTorchFunction unseen;
    const int common = unseen ? is_common(saved) : -1;
    if (common <= 0) return nullptr;
    Running running;
    const Owned dense(Py_NewRef(at(saved, layout::saved.dense)));
    if (dense.get() != Py_None) return unpack_dense(saved, dense.get(), running);
    const Owned value(Py_NewRef(at(saved, layout::saved.value))), spec(Py_NewRef(at(saved, layout::saved.spec)));
    const bool is_stored = is_none_at(saved, layout::saved.modified) && value.get() != Py_None && spec.get() != Py_None;
    if (!is_stored) return nullptr;
    if (is_true_at(saved, layout::saved.claimable)) {
        const int claimed = is_claimed(saved, number_at(spec.get(), layout::spec.nbytes), value.get(), running);
        if (claimed < 0) return nullptr;
        Owned claimant(claimed ? claim(saved) : Py_NewRef(Py_None));
        if (!claimant || claimant.get() != Py_None) return claimant.release();
    }
    const bool in_backward = running.node() != Py_None;
    if (PyErr_Occurred()) return nullptr;
    const Locked locked(at(at(saved, layout::saved.live), layout::live.lock));
    return locked ? decode(saved, spec.get(), value.get(), in_backward) : nullptr;
}

}  // namespace backstash
