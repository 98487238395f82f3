// Keeps or forgets a value that nobody but autograd holds, under a policy that says the same every time: see
// stash/encode.py. What is to be encoded is left to the reference, and so is everything that is not common.
#include "slots.h"

#include <algorithm>

namespace backstash {
namespace {

// What has become of a value: it was decided on, it is left to the reference, or there was an error.
enum class Done { yes, left, error };

Done done(bool well) { return well ? Done::yes : Done::error; }

// See encode.strength: whether one saved tensor is stronger than the other.
bool is_stronger(PyObject* saved, PyObject* other) {
    const int need = rank_of(at(saved, layout::saved.need)), others = rank_of(at(other, layout::saved.need));
    if (need != others) return need > others;
    if (is_none_at(saved, layout::saved.node)) return false;
    if (is_none_at(other, layout::saved.node)) return true;
    return number_at(saved, layout::saved.node) < number_at(other, layout::saved.node);
}

// The strongest of the saved tensors that view a value, whose facts serve them all; null where more has to be asked.
PyObject* strongest_of(PyObject* fresh) {
    PyObject* strongest = PyList_GetItem(fresh, 0);
    const Py_ssize_t many = PyList_Size(fresh);
    for (Py_ssize_t index = 1; index < many; ++index) {
        PyObject* saved = PyList_GetItem(fresh, index);
        if (is_stronger(saved, strongest)) strongest = saved;
    }
    if (many == 1) return strongest;
    if (at(strongest, layout::saved.need) == need_sign) return nullptr;
    PyObject* spec = at(strongest, layout::saved.spec);
    for (Py_ssize_t index = 0; index < many; ++index) {
        PyObject* other = at(PyList_GetItem(fresh, index), layout::saved.spec);
        if (other == Py_None || spec == Py_None) return nullptr;
        if (at(other, layout::spec.dtype) != at(spec, layout::spec.dtype)) return nullptr;
    }
    return strongest;
}

// See encode.whole_of: the whole storage of a saved tensor, None where it has none of its type, or null.
PyObject* whole_in(PyObject* saved, PyObject* storage) {
    PyObject *spec = at(saved, layout::saved.spec), *place = at(saved, layout::saved.place);
    Owned facts_spec(PyObject_GetAttr(at(place, layout::place.facts), s_spec));
    const long long nbytes = facts_spec ? nbytes_of(storage) : -1;
    if (nbytes < 0) return nullptr;
    const bool fills = nbytes == number_at(spec, layout::spec.nbytes);
    const bool is_dense = facts_spec.get() == spec && is_true_at(place, layout::place.is_dense);
    if (fills && is_dense && number_at(saved, layout::saved.offset) == 0)
        return Py_NewRef(at(saved, layout::saved.dense));
    return PyObject_CallFunctionObjArgs(whole_of, saved, storage, nullptr);
}

// Adds the seconds since ``started`` to those that encoding has taken; returns whether that went well.
bool add_seconds(PyObject* account, PyObject* started) {
    Owned now(PyObject_CallNoArgs(perf_counter));
    if (!now) return false;
    const double seconds = PyFloat_AsDouble(now.get()) - PyFloat_AsDouble(started);
    PyObject* total = PyFloat_FromDouble(PyFloat_AsDouble(at(account, layout::account.encode_seconds)) + seconds);
    if (total == nullptr) return false;
    give(account, layout::account.encode_seconds, total);
    return !PyErr_Occurred();
}

// See Encoder.keep; it takes over the reason, and returns whether that went well.
bool keep(PyObject* account, PyObject* reason) {
    if (reason == nullptr) return false;
    set(account, layout::account.codec, s_kept);
    give(account, layout::account.reason, reason);
    return true;
}

// See Live.will_need; returns whether that went well.
bool will_need(PyObject* live, long long nbytes) {
    if (!add_up(live)) return false;
    const long long needed = number_at(live, layout::live.needed_nbytes), held = number_at(live, layout::live._nbytes);
    return !PyErr_Occurred() &&
           set_number(live, layout::live.needed_nbytes, std::max(needed, held + WORK * nbytes));
}

// See Value.raise_to; returns whether that went well.
bool raise_to(PyObject* value, long long height) {
    const long long before = number_at(value, layout::value.height);
    if (PyErr_Occurred()) return false;
    if (is_true_at(value, layout::value.shares)) return set_number(value, layout::value.height, std::max(before, 1LL));
    if (height <= before) return true;
    if (!set_number(value, layout::value.height, height)) return false;
    PyObject* recipe = at(value, layout::value.recipe);
    PyObject* leaves = recipe == Py_None ? nullptr : at(recipe, layout::recipe.leaves);
    for (Py_ssize_t index = 0; leaves != nullptr && index < PyTuple_Size(leaves); ++index)
        if (!raise_to(PyTuple_GetItem(leaves, index), height + 1)) return false;
    return true;
}

// See Encoder.release, of a value of which so many bytes are stored on the device. It takes over the note, and returns
// whether that went well.
bool release(PyObject* value, PyObject* fresh, PyObject* strongest, PyObject* codec, long long nbytes, PyObject* note,
             PyObject* started) {
    if (note == nullptr) return false;
    for (Py_ssize_t index = 0; index < PyList_Size(fresh); ++index)
        set(PyList_GetItem(fresh, index), layout::saved.dense, Py_None);
    PyObject *account = at(value, layout::value.account), *live = at(value, layout::value.live);
    const long long before = device_nbytes(account);
    give(account, layout::account.reason, note);
    if (PyErr_Occurred() || !set_number(account, layout::account.stash_nbytes, nbytes)) return false;
    set(account, layout::account.codec, codec);
    set(account, layout::account.store, s_device);
    if (!add_nbytes(live, nbytes - before)) return false;
    const bool needs_all = at(strongest, layout::saved.need) == need_value && !is_true_at(value, layout::value.shares);
    if (needs_all && !will_need(live, number_at(account, layout::account.saved_nbytes))) return false;
    return add_seconds(account, started);
}

// See Encoder._forget.
Done forget(PyObject* value, PyObject* fresh, PyObject* strongest, PyObject* recipe, PyObject* started) {
    const bool is_exact = at(value, layout::value.errors) == no_errors;
    if (!is_exact || is_true_at(recipe, layout::recipe.from_statistics)) return Done::left;
    if (is_true_at(recipe, layout::recipe.any_producer)) return Done::left;
    set(value, layout::value.recipe, recipe);
    set(value, layout::value.guard, Py_None);
    set(value, layout::value.shares, Py_False);
    PyObject* leaves = at(recipe, layout::recipe.leaves);
    const Py_ssize_t many = PyTuple_Size(leaves);
    long long depth = 0;
    for (Py_ssize_t index = 0; index < many; ++index)
        depth = std::max(depth, number_at(PyTuple_GetItem(leaves, index), layout::value.depth));
    const long long height = number_at(value, layout::value.height);
    if (PyErr_Occurred() || !set_number(value, layout::value.depth, 1 + depth)) return Done::error;
    for (Py_ssize_t index = 0; index < many; ++index) {
        PyObject* leaf = PyTuple_GetItem(leaves, index);
        const bool is_lower = number_at(leaf, layout::value.height) <= height;
        if (PyErr_Occurred() || (is_lower && !raise_to(leaf, height + 1))) return Done::error;
    }
    return done(release(value, fresh, strongest, s_recompute, 0, PyObject_Str(recipe), started));
}

// Keeps a value that the policy would encode, where its codecs have declined it and need not be asked again: see
// Encoder.store. ``why`` is None, or says why the value is not made again.
Done keep_declined(PyObject* value, PyObject* place, PyObject* action, PyObject* why, PyObject* started) {
    PyObject* declined = at(place, layout::place.declined);
    const long long spared = number_at(place, layout::place.spared);
    if (PyErr_Occurred()) return Done::error;
    if (spared == 0 || declined == Py_None || PyTuple_GetItem(declined, 0) != action) return Done::left;
    const long long height = number_at(value, layout::value.height);
    const int differs = height != 0 ? has_error(action) : 0;  // then it is another action
    if (differs != 0) return differs < 0 ? Done::error : Done::left;
    PyObject* account = at(value, layout::value.account);
    PyObject* reason = PyTuple_GetItem(declined, 1);
    if (!set_number(place, layout::place.spared, spared - 1) || !add_seconds(account, started)) return Done::error;
    return done(keep(account, why == Py_None ? Py_NewRef(reason) : PyUnicode_FromFormat("%U%U", reason, why)));
}

// Encodes a value, or keeps it because all codecs decline it: see Encoder.store. ``why`` is None, or says why the value
// is not made again.
Done store_encoded(PyObject* encoder, PyObject* value, PyObject* fresh, PyObject* strongest, PyObject* whole,
                   PyObject* action, PyObject* why, PyObject* started) {
    constexpr long long SPARED = 8;  // as in encode.py
    PyObject *place = at(strongest, layout::saved.place), *facts = at(strongest, layout::saved.tensor);
    const Done kept = keep_declined(value, place, action, why, started);
    if (kept != Done::left) return kept;
    const bool is_root = number_at(value, layout::value.height) != 0;
    const int differs = is_root ? has_error(action) : 0;  // then it is another action
    if (differs != 0 || PyErr_Occurred()) return differs > 0 ? Done::left : Done::error;
    Owned spec(PyObject_GetAttr(facts, s_spec));
    if (!spec) return Done::error;
    const bool is_all = whole == at(strongest, layout::saved.dense) && spec.get() == at(strongest, layout::saved.spec);
    if (!is_all) return Done::left;
    Encoding found;
    Owned form(form_of(encoder, place, facts, spec.get(), action, whole, found));
    if (!form) return Done::error;
    if (form.get() == Py_None) return Done::left;
    const bool is_declined = !is_a(form.get(), layout::form);
    PyObject* declined = is_declined ? PyTuple_Pack(2, action, form.get()) : Py_NewRef(Py_None);
    if (declined == nullptr) return Done::error;
    give(place, layout::place.declined, declined);
    if (!set_number(place, layout::place.spared, SPARED)) return Done::error;
    PyObject* account = at(value, layout::value.account);
    if (is_declined) {
        PyObject* reason = why == Py_None ? Py_NewRef(form.get()) : PyUnicode_FromFormat("%U%U", form.get(), why);
        return done(keep(account, reason) && add_seconds(account, started));
    }
    set(value, layout::value.form, form.get());
    set(value, layout::value.guard, Py_None);
    PyObject* note = why == Py_None ? Py_NewRef(no_text) : PyUnicode_Substring(why, 2, PyUnicode_GetLength(why));
    return done(release(value, fresh, strongest, found.label.get(), found.nbytes, note, started));
}

// What is left to do with a value that is not made again.
Done store_otherwise(PyObject* encoder, PyObject* value, PyObject* fresh, PyObject* strongest, PyObject* whole,
                     PyObject* action, PyObject* recipe, PyObject* started) {
    Owned why(PyUnicode_FromFormat("; not recomputed: %U", recipe));
    Owned otherwise(why ? PyObject_GetAttr(action, s_otherwise) : nullptr);
    if (!otherwise) return Done::error;
    if (type_of(otherwise.get()) == stash_type) {
        const Done stored =
            store_encoded(encoder, value, fresh, strongest, whole, otherwise.get(), why.get(), started);
        if (stored != Done::left) return stored;
    }
    PyObject* facts = at(strongest, layout::saved.tensor);
    return done(static_cast<bool>(Owned(PyObject_CallMethodObjArgs(encoder, s_store, value, strongest, fresh, facts,
                                                                   whole, otherwise.get(), why.get(), Py_False, started,
                                                                   nullptr))));
}

// Makes again, or stores otherwise, a value of which the policy wants that.
Done recompute(PyObject* encoder, PyObject* value, PyObject* fresh, PyObject* strongest, PyObject* whole,
               PyObject* action) {
    const int exact_roots = is_true(action, s_exact_roots);
    if (exact_roots != 0) return exact_roots < 0 ? Done::error : Done::left;
    PyObject* live = at(encoder, layout::encoder._live);
    set(encoder, layout::encoder.only_keep, Py_False);
    set(value, layout::value.buffers, at(live, layout::live.buffers));
    Owned started(PyObject_CallNoArgs(perf_counter));
    PyObject* otherwise = started ? PyObject_GetAttr(action, s_otherwise) : nullptr;
    if (otherwise == nullptr) return Done::error;
    give(value, layout::value.otherwise, otherwise);
    Owned recipe(recipe_of(at(encoder, layout::encoder._remaking), value, strongest, whole, action));
    if (!recipe) return Done::error;
    if (!is_a(recipe.get(), layout::recipe))
        return store_otherwise(encoder, value, fresh, strongest, whole, action, recipe.get(), started.get());
    const Done forgotten = forget(value, fresh, strongest, recipe.get(), started.get());
    if (forgotten != Done::left) return forgotten;
    PyObject* facts = at(strongest, layout::saved.tensor);
    return done(static_cast<bool>(Owned(PyObject_CallMethodObjArgs(encoder, s__forget, value, fresh, facts, whole,
                                                                   recipe.get(), started.get(), nullptr))));
}

// See Encoder.decide. What is left to it has changed nothing that it would not change as well.
Done decide(PyObject* encoder, PyObject* value, PyObject* fresh) {
    PyObject *live = at(encoder, layout::encoder._live), *storage = at(value, layout::value.storage);
    if (!is_true_at(encoder, layout::encoder.is_fixed) || is_true_at(encoder, layout::encoder._knows_room))
        return Done::left;
    if (!is_none_at(live, layout::live.watcher) || !is_none_at(live, layout::live.monitor)) return Done::left;
    const Py_ssize_t key_size = PyUnicode_GetLength(at(value, layout::value.key));
    if (key_size != 0) return key_size < 0 ? Done::error : Done::left;  // it is decided on once more
    PyObject* strongest = strongest_of(fresh);
    if (strongest == nullptr || storage == Py_None || !is_plain(at(strongest, layout::saved.dense))) return Done::left;
    PyObject *facts = at(strongest, layout::saved.tensor), *place = at(strongest, layout::saved.place);
    if (facts == Py_None || !is_a(place, layout::place) || at(place, layout::place.facts) != facts) return Done::left;
    Owned action(Py_NewRef(at(place, layout::place.action)));
    const bool is_stash = type_of(action.get()) == stash_type;
    const bool is_known = type_of(action.get()) == keep_type || type_of(action.get()) == recompute_type;
    if (!(is_known || is_stash) || !is_a(at(strongest, layout::saved.spec), layout::spec)) return Done::left;
    Owned whole(whole_in(strongest, storage));
    if (!whole) return Done::error;
    if (whole.get() == Py_None) return Done::left;
    PyObject* key = PyObject_GetAttr(facts, s_key);
    if (key == nullptr) return Done::error;
    give(value, layout::value.key, key);
    set(value, layout::value.facts, facts);
    if (type_of(action.get()) == recompute_type)
        return recompute(encoder, value, fresh, strongest, whole.get(), action.get());
    if (is_stash) {
        set(encoder, layout::encoder.only_keep, Py_False);
        set(value, layout::value.buffers, at(live, layout::live.buffers));
        Owned started(PyObject_CallNoArgs(perf_counter));
        if (!started) return Done::error;
        return store_encoded(encoder, value, fresh, strongest, whole.get(), action.get(), Py_None, started.get());
    }
    return done(keep(at(value, layout::value.account), PyObject_GetAttr(action.get(), s_reason)));
}

}  // namespace

// See Account.device_nbytes: -1 with an error set.
long long device_nbytes(PyObject* account) {
    PyObject* store = at(account, layout::account.store);
    const bool on_device = PyUnicode_CompareWithASCIIString(store, "device") == 0;
    return on_device ? number_at(account, layout::account.stash_nbytes) : 0;
}

// See Live.add; returns whether that went well.
bool add_nbytes(PyObject* live, long long nbytes) {
    const long long before = number_at(live, layout::live._nbytes);
    if (PyErr_Occurred() || !set_number(live, layout::live._nbytes, before + nbytes)) return false;
    if (nbytes <= 0) return true;
    if (!add_up(live)) return false;
    const long long held = number_at(live, layout::live._nbytes), peak = number_at(live, layout::live.peak_nbytes);
    return !PyErr_Occurred() && (held <= peak || set_number(live, layout::live.peak_nbytes, held));
}

// See encode.has_error, of a Stash: 1 or 0, or -1 with an error set.
int has_error(PyObject* stash) {
    Owned codecs(PyObject_GetAttr(stash, s_codecs));
    if (!codecs) return -1;
    for (Py_ssize_t index = 0; index < PyTuple_Size(codecs.get()); ++index) {
        const int exact = is_same(PyTuple_GetItem(codecs.get(), index), s_bound, Py_None);
        if (exact <= 0) return exact < 0 ? -1 : 1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

// See Encoder.encode. It takes the Encoder and the value.
PyObject* encode(PyObject*, PyObject* const* args, Py_ssize_t number) {
    const char* what = "encode takes an Encoder and a Value";
    if (!takes(number, 2, what)) return nullptr;
    if (!is_a(args[0], layout::encoder) || !is_a(args[1], layout::value))
        return PyErr_SetString(PyExc_TypeError, what), nullptr;
    Owned fresh(unchanged_of(args[1], follow_original));
    if (!fresh) return nullptr;
    if (PyList_Size(fresh.get()) == 0) Py_RETURN_NONE;
    const Done decided = decide(args[0], args[1], fresh.get());
    if (decided == Done::error) return nullptr;
    if (decided == Done::left) return PyObject_CallMethodObjArgs(args[0], s_decide, args[1], fresh.get(), nullptr);
    Py_RETURN_NONE;
}

}  // namespace backstash
