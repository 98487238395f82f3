// What is read of a value that is not held dense: see stash/decode.py, Value in stash/value.py, Live in stash/live.py
// and Buffers in stash/buffers.py.
#include "slots.h"

#include <chrono>
#include <initializer_list>

namespace backstash {
namespace {

// See Live.add_remade; returns whether that went well.
bool add_remade(PyObject* live, long long nbytes) {
    return set_number(live, layout::live._remade_nbytes, number_at(live, layout::live._remade_nbytes) + nbytes);
}

// See Value.hold; None for no longer.
bool hold(PyObject* value, PyObject* whole) {
    PyObject *live = at(value, layout::value.live), *before = at(value, layout::value.remade);
    if (before == Py_None && whole == Py_None) return true;
    if (before != Py_None) {
        const long long nbytes = storage_nbytes(before);
        if (nbytes < 0 || !add_remade(live, -nbytes)) return false;
    }
    set(value, layout::value.remade, whole);
    if (whole == Py_None) return true;
    const long long nbytes = storage_nbytes(whole);
    return nbytes >= 0 && add_remade(live, nbytes);
}

// See Value.let_go.
bool let_go(PyObject* value) {
    if (is_true_at(value, layout::value.shares))
        return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(value, s_let_go, nullptr)));
    return number_at(value, layout::value.unread) > 0 || hold(value, Py_None);
}

bool has_same_round(PyObject* saved, PyObject* value) {
    return number_at(saved, layout::saved.round) == number_at(value, layout::value.round);
}

bool count_reader(PyObject* value) {
    return set_number(value, layout::value.unread, number_at(value, layout::value.unread) - 1);
}

// See Saved.has_read.
bool has_read(PyObject* saved, PyObject* value) {
    if (has_same_round(saved, value)) return true;
    set(saved, layout::saved.round, at(value, layout::value.round));
    return count_reader(value);
}

// See Value.begin_round.
bool begin_round(PyObject* value) {
    PyObject* members = at(value, layout::value.members);
    long long unread = 0;
    for (Py_ssize_t index = 0; index < PyList_Size(members); ++index) {
        Owned member(referent(PyList_GetItem(members, index)));
        if (!member) return false;
        unread += member.get() != Py_None;
    }
    return set_number(value, layout::value.round, number_at(value, layout::value.round) + 1) &&
           set_number(value, layout::value.unread, unread);
}

// Whether a weak reference refers to an object: 1 or 0, or -1 with an error set.
int refers_to(PyObject* reference, PyObject* owner) {
    if (reference == Py_None) return 0;
    Owned found(referent(reference));
    return found ? found.get() == owner : -1;
}

// See Buffers.holding: a new reference, to None where it is nothing.
PyObject* holding(PyObject* buffers, PyObject* owner) {
    PyObject *every = at(buffers, layout::buffers._buffers), *lent = at(buffers, layout::buffers._lent);
    for (Py_ssize_t index = 0; index < PyList_Size(every); ++index) {
        PyObject* buffer = PyList_GetItem(every, index);
        PyObject* whole = at(buffer, layout::buffer.whole);
        int is_there = whole == Py_None ? 0 : refers_to(at(buffer, layout::buffer.owner), owner);
        if (is_there > 0) is_there = has_version(whole, at(buffer, layout::buffer.version));
        if (is_there != 0) return is_there < 0 ? nullptr : Py_NewRef(whole);
    }
    if (lent == Py_None) return Py_NewRef(Py_None);
    PyObject* whole = PyTuple_GetItem(lent, 1);
    int is_there = refers_to(PyTuple_GetItem(lent, 0), owner);
    if (is_there > 0) is_there = has_version(whole, PyTuple_GetItem(lent, 2));
    return is_there < 0 ? nullptr : Py_NewRef(is_there ? whole : Py_None);
}

bool are_empty(PyObject* buffers) { return PyList_Size(at(buffers, layout::buffers._buffers)) == 0; }

// See Buffers.shrink, of which nothing is to be kept.
bool shrink(PyObject* buffers) {
    if (!are_empty(buffers)) return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(buffers, s_shrink, nullptr)));
    set(buffers, layout::buffers._lent, Py_None);
    return true;
}

// Gives back memory that nobody reads, if there was no room to hold what a value was made from: see decode.dense.
bool shrink_after(PyObject* recipe, PyObject* buffers) {
    PyObject* leaves = at(recipe, layout::recipe.leaves);
    for (Py_ssize_t index = 0; index < PyTuple_Size(leaves); ++index) {
        PyObject* leaf = PyTuple_GetItem(leaves, index);
        if (!is_none_at(leaf, layout::value.recipe) && is_none_at(leaf, layout::value.remade)) return shrink(buffers);
    }
    return true;
}

// See comparing.check_sample; returns whether the value has the bits that it had. An error is set where it has not.
bool check(PyObject* value, PyObject* whole) {
    PyObject* sample = at(value, layout::value.sample);
    if (sample == Py_None) return true;
    const int same = is_a(sample, layout::sample) && is_plain(whole) ? has_elements(whole, sample) : 0;
    if (same != 0) return same > 0;
    return static_cast<bool>(Owned(PyObject_CallFunctionObjArgs(check_sample, value, whole, nullptr)));
}

// Notes in an account that its value was made, since that time.
bool account_for(PyObject* account, std::chrono::steady_clock::time_point started) {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    const double before = PyFloat_AsDouble(at(account, layout::account.decode_seconds));
    PyObject* seconds = PyFloat_FromDouble(before + taken.count());
    if (seconds == nullptr) return false;
    give(account, layout::account.decode_seconds, seconds);
    return set_number(account, layout::account.decodes, number_at(account, layout::account.decodes) + 1);
}

// See Buffers.filled; returns whether that went well.
bool fill(PyObject* buffers, PyObject* owner, PyObject* whole) {
    return are_empty(buffers) || Owned(PyObject_CallMethodObjArgs(buffers, s_filled, owner, whole, nullptr));
}

// See decode._made, of a value that is encoded: a new reference, to None where the reference has to do it.
PyObject* decoded(PyObject* value, PyObject* form, PyObject* buffers, bool is_ahead) {
    const auto started = std::chrono::steady_clock::now();
    Owned whole(decode_form(value, form));
    if (!whole || whole.get() == Py_None) return whole.release();
    if (!begin_round(value)) return nullptr;
    const long long nbytes = number_at(at(form, layout::form.spec), layout::spec.nbytes);
    const long long unread = number_at(value, layout::value.unread);
    if (PyErr_Occurred()) return nullptr;
    int held = unread > 1 && nbytes < PyLong_AsLongLong(smallest_pooled);
    if (!held && is_ahead && unread != 0) held = may_hold(at(value, layout::value.live), 2 * nbytes);
    if (held < 0) return nullptr;
    if (held) {
        Owned detached(tensor_detach(whole.get()));
        if (!detached || !hold(value, detached.get())) return nullptr;
    }
    if (!fill(buffers, form, whole.get())) return nullptr;
    return account_for(at(value, layout::value.account), started) ? whole.release() : nullptr;
}

// See decode.dense. ``known`` are the settings of the process that are known to be those now, null where none are.
PyObject* dense(PyObject* value, PyObject* ahead, PyObject* borrows, PyObject* known) {
    if (is_true_at(value, layout::value.shares)) return PyObject_CallFunctionObjArgs(make_shared, value, nullptr);
    PyObject *form = at(value, layout::value.form), *remade = at(value, layout::value.remade);
    if (remade != Py_None) return Py_NewRef(remade);
    const Owned owner(Py_NewRef(form == Py_None ? value : form)), buffers(Py_NewRef(at(value, layout::value.buffers)));
    if (!is_a(buffers.get(), layout::buffers)) {
        PyErr_SetString(PyExc_AssertionError, "a value that is not held dense has a pool of buffers");
        return nullptr;
    }
    Owned whole(holding(buffers.get(), owner.get()));
    if (!whole || whole.get() != Py_None) return whole.release();
    const Owned recipe(Py_NewRef(at(value, layout::value.recipe)));
    if (recipe.get() == Py_None && form != Py_None) {
        whole.reset(decoded(value, owner.get(), buffers.get(), ahead == Py_True));
        if (!whole || whole.get() != Py_None) return whole.release();
    }
    const bool is_common = is_a(recipe.get(), layout::recipe) && form == Py_None &&
                           is_none_at(recipe.get(), layout::recipe.first_use);
    if (!is_common) return PyObject_CallFunctionObjArgs(make_dense, value, owner.get(), ahead, borrows, nullptr);
    if (!begin_round(value)) return nullptr;
    const auto started = std::chrono::steady_clock::now();
    whole.reset(run_recipe(recipe.get(), value, known));
    if (!whole || !check(value, whole.get())) return nullptr;
    const long long nbytes = ahead == Py_True ? storage_nbytes(whole.get()) : 0;
    if (nbytes < 0) return nullptr;
    const int held = ahead == Py_True ? may_hold(at(value, layout::value.live), nbytes) : 1;
    if (held < 0) return nullptr;
    if (held) {
        Owned detached(tensor_detach(whole.get()));
        if (!detached || !hold(value, detached.get())) return nullptr;
    }
    if (!shrink_after(recipe.get(), buffers.get())) return nullptr;
    if (!fill(buffers.get(), owner.get(), whole.get())) return nullptr;
    return account_for(at(value, layout::value.account), started) ? whole.release() : nullptr;
}

// A tensor in the layout of a spec, without a graph: a new tensor, or null with an error set.
PyObject* seen_as(PyObject* whole, PyObject* spec, PyObject* offset, bool has_offset) {
    const int alike = has_offset ? has_layout(whole, spec) : 0;
    if (alike < 0) return nullptr;
    return alike ? tensor_detach(whole) : as_strided(whole, spec, offset);
}

bool is_dense(PyObject* value) {
    return is_none_at(value, layout::value.form) && is_none_at(value, layout::value.recipe);
}

}  // namespace

// See Live._add_up.
bool add_up(PyObject* live) {
    PyObject* losses = at(live, layout::live._losses);
    if (PyObject_Size(losses) == 0) return true;
    const Locked locked(at(live, layout::live.lock));
    if (!locked) return false;
    while (PyObject_Size(losses) > 0) {
        Owned loss(PyObject_CallMethodObjArgs(losses, s_popleft, nullptr));
        if (!loss) return false;
        int index = 0;
        for (Py_ssize_t offset : {layout::live._saved, layout::live._nbytes, layout::live._remade_nbytes}) {
            const long long lost = PyLong_AsLongLong(PyTuple_GetItem(loss.get(), index++));
            if (lost != 0 && !set_number(live, offset, number_at(live, offset) - lost)) return false;
        }
    }
    return true;
}

// See Live.may_hold: 1 or 0, or -1 with an error set.
int may_hold(PyObject* live, long long nbytes) {
    if (!add_up(live)) return -1;
    const long long before = number_at(live, layout::live._nbytes) + number_at(live, layout::live._remade_nbytes);
    if (before + nbytes <= number_at(live, layout::live.stashed_nbytes)) return 1;
    return before + nbytes + WORK * nbytes <= number_at(live, layout::live.needed_nbytes);
}

// See Live.has_room: 1 or 0, or -1 with an error set.
int has_room(PyObject* live, long long nbytes) {
    if (!add_up(live)) return -1;
    const long long before = number_at(live, layout::live._nbytes) + number_at(live, layout::live._remade_nbytes);
    return before + nbytes <= number_at(live, layout::live.stashed_nbytes);
}

PyObject* fetch_leaf(PyObject* leaf, PyObject* known) {
    PyObject* value = at(leaf, layout::leaf.value);
    Owned whole(nullptr);
    if (is_dense(value)) {
        PyObject* guard = at(value, layout::value.guard);
        const int is_common = is_a(guard, layout::saved) ? is_unchanged(guard) : 0;
        if (is_common < 0) return nullptr;
        if (!is_common || is_none_at(guard, layout::saved.dense))
            return PyObject_CallFunctionObjArgs(fetch_reference, leaf, nullptr);
        whole.reset(Py_NewRef(at(guard, layout::saved.dense)));
    } else {
        whole.reset(dense(value, Py_True, Py_True, known));
    }
    if (!whole) return nullptr;
    PyObject *spec = at(leaf, layout::leaf.spec), *offset = at(leaf, layout::leaf.offset);
    const long long own = offset_of(whole.get()), wanted = PyLong_AsLongLong(offset);
    return PyErr_Occurred() ? nullptr : seen_as(whole.get(), spec, offset, own == wanted);
}

// Whether a tensor that is held by reference is at the version at which it was saved, and nobody may have written into
// what was decoded: 1, or 0 where the reference has to tell, or -1 with an error set. See decode.check_version.
int is_unchanged(PyObject* saved) {
    PyObject *dense = at(saved, layout::saved.dense), *value = at(saved, layout::saved.value);
    if (value != Py_None && !is_none_at(value, layout::value.written)) return 0;
    PyObject* held = dense != Py_None ? dense : at(saved, layout::saved.counter);
    return held == Py_None ? 1 : has_version(held, at(saved, layout::saved.version));
}

PyObject* decode(PyObject* saved, PyObject* spec, PyObject* value, bool in_backward) {
    const int has_graph = has_grad_mode();
    if (has_graph < 0) return nullptr;
    if (has_graph || !is_true_at(saved, layout::saved.builtin))
        return PyObject_CallFunctionObjArgs(decode_reference, saved, spec, value, nullptr);
    Owned whole(dense(value, Py_False, in_backward ? Py_True : Py_False, nullptr));
    if (!whole || !has_read(saved, value) || !let_go(value)) return nullptr;
    return seen_as(whole.get(), spec, at(saved, layout::saved.offset), true);
}

// See decode.dense_reference.
PyObject* make_dense_tensor(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 3 || !is_a(args[0], layout::value)) {
        PyErr_SetString(PyExc_TypeError, "dense takes a Value and two bools");
        return nullptr;
    }
    return dense(args[0], args[1], args[2], nullptr);
}

// See decode.fetch_reference.
PyObject* fetch(PyObject*, PyObject* leaf) {
    if (!is_a(leaf, layout::leaf)) {
        PyErr_SetString(PyExc_TypeError, "fetch takes a Leaf");
        return nullptr;
    }
    return fetch_leaf(leaf, nullptr);
}

}  // namespace backstash
