// Finds how a value is made again by cheap calls, where the same recipe was proven in an earlier step: see
// stash/remaking.py, recipes.py and leaves.py. Until the recipe is known nothing is changed but what the reference,
// which is asked in every other case, would change as well.
#include "slots.h"

#include <algorithm>
#include <vector>

namespace backstash {
namespace {

constexpr long long MAX_CALLS = 12;  // as in recipes.py
constexpr long long REPEAT = 256;    // as in remaking.py

// What was found: it, nothing, something that the reference has to look at, or an error.
enum class Found { it, nothing, left, error };

Found found(bool well) { return well ? Found::it : Found::error; }

// What is looked for.
struct Search {
    PyObject* remaking;
    PyObject* root;
    long long max_depth;
    Owned reader_of_unknown{nullptr};  // the name of the call of which nobody knows what made an input
};

// See value.holder: a new reference, or None.
PyObject* holder(PyObject* value) {
    PyObject* members = at(value, layout::value.members);
    for (Py_ssize_t index = 0; index < PyList_Size(members); ++index) {
        Owned saved(referent(PyList_GetItem(members, index)));
        if (!saved) return nullptr;
        if (saved.get() == Py_None || is_none_at(saved.get(), layout::saved.dense)) continue;
        PyObject* need = at(saved.get(), layout::saved.need);
        if (need == need_value || need == need_index) return saved.release();
    }
    return Py_NewRef(Py_None);
}

int are_equal(PyObject* one, PyObject* other) {
    return one == other ? 1 : PyObject_RichCompareBool(one, other, Py_EQ);
}

// The dtype in which a value that is held as it is has a content, in ``dtype``.
Found dtype_of_dense(PyObject* value, PyObject* content, Owned& dtype) {
    PyObject *guard = at(value, layout::value.guard), *version = at(content, layout::content.version);
    const int is_same = guard == Py_None ? 1 : are_equal(at(guard, layout::saved.version), version);
    if (is_same <= 0) return is_same < 0 ? Found::error : Found::nothing;
    Owned member(holder(value));
    if (!member) return Found::error;
    if (member.get() == Py_None) return Found::nothing;
    Owned dense(Py_NewRef(at(member.get(), layout::saved.dense)));
    const int unchanged = has_version(dense.get(), version);
    if (unchanged <= 0) return unchanged < 0 ? Found::error : Found::nothing;
    dtype.reset(tensor_dtype(dense.get()));
    return found(static_cast<bool>(dtype));
}

// The same of a value that is encoded.
Found dtype_of_form(PyObject* form, Owned& dtype) {
    Owned codec(PyObject_GetAttr(form, s_codec));
    Owned preserves(codec ? PyObject_GetAttr(codec.get(), s_preserves) : nullptr);
    const int is_whole = preserves ? PySequence_Contains(preserves.get(), need_value) : -1;
    if (is_whole <= 0) return is_whole < 0 ? Found::error : Found::nothing;
    Owned spec(PyObject_GetAttr(form, s_spec));
    dtype.reset(spec ? PyObject_GetAttr(spec.get(), s_dtype) : nullptr);
    return found(static_cast<bool>(dtype));
}

// Whether it is certain that a value will not be stored with an error: see Remaking._find_leaf.
int stays_exact(PyObject* value) {
    PyObject* place = at(value, layout::value.place);
    if (is_none_at(value, layout::value.storage) || number_at(value, layout::value.height) != 0) return 1;
    if (place != Py_None && !is_none_at(place, layout::place.root)) return 0;
    Owned held(holder(value));
    if (!held) return -1;
    if (held.get() == Py_None || is_none_at(held.get(), layout::saved.tensor)) return 1;
    place = at(held.get(), layout::saved.place);
    if (place == Py_None || at(place, layout::place.facts) != at(held.get(), layout::saved.tensor)) return 0;
    Owned action(Py_NewRef(at(place, layout::place.action)));
    if (type_of(action.get()) == recompute_type) action.reset(PyObject_GetAttr(action.get(), s_otherwise));
    if (!action) return -1;
    if (type_of(action.get()) == keep_type) return 1;
    if (type_of(action.get()) != stash_type) return 0;
    const int has = has_error(action.get());
    return has < 0 ? -1 : !has;
}

// See Remaking._find_leaf. A Leaf is put into ``leaf``.
Found find_leaf(Search& search, PyObject* view, Owned& leaf) {
    PyObject* content = at(view, layout::view.content);
    PyObject* reference = at(content, layout::content.value);
    Owned value(reference == Py_None ? Py_NewRef(Py_None) : referent(reference));
    if (!value) return Found::error;
    const bool is_other = value.get() != Py_None && value.get() != search.root;
    if (is_other && !is_none_at(value.get(), layout::value.storage)) {
        if (decide_on(at(search.remaking, layout::remaking._pending), value.get()) < 0) return Found::error;
    }
    if (!is_none_at(content, layout::content.escaped) && at(content, layout::content.escaped) != Py_False)
        return Found::left;
    if (!is_other || at(value.get(), layout::value.content) != content) return Found::nothing;
    if (at(value.get(), layout::value.errors) != no_errors) return Found::left;
    Owned dtype(nullptr), recipe(Py_NewRef(at(value.get(), layout::value.recipe)));
    Owned form(Py_NewRef(at(value.get(), layout::value.form)));
    Found has = Found::it;
    if (recipe.get() != Py_None) {
        const long long depth = number_at(value.get(), layout::value.depth);
        if (depth + number_at(search.root, layout::value.height) >= search.max_depth) return Found::left;
        PyObject* spec = at(at(recipe.get(), layout::recipe.call), layout::call.spec);
        dtype.reset(Py_NewRef(at(spec, layout::spec.dtype)));
    } else {
        has = form.get() == Py_None ? dtype_of_dense(value.get(), content, dtype) : dtype_of_form(form.get(), dtype);
    }
    if (has != Found::it) return has;
    PyObject* spec = at(view, layout::view.spec);
    if (dtype.get() != at(spec, layout::spec.dtype)) return Found::left;
    const int exact = stays_exact(value.get());
    if (exact <= 0) return exact < 0 ? Found::error : Found::left;
    leaf.reset(make(layout::leaf.type));
    if (!leaf) return Found::error;
    set(leaf.get(), layout::leaf.value, value.get());
    set(leaf.get(), layout::leaf.spec, spec);
    set(leaf.get(), layout::leaf.offset, at(view, layout::view.offset));
    return Found::it;
}

// Adds to a tuple of leaves; that of an input may be the recipe's own as well. Returns whether that went well.
bool add_all(Owned& all, PyObject* more) {
    if (PyTuple_Size(more) == 0) return true;
    all.reset(PyTuple_Size(all.get()) == 0 ? Py_NewRef(more) : PySequence_Concat(all.get(), more));
    return static_cast<bool>(all);
}

// A recipe of the call with these inputs: see Recipe.__init__. Its tree is yet to be known.
PyObject* make_recipe(PyObject* call, PyObject* inputs) {
    static PyObject* nothing = PyTuple_New(0);
    Owned leaves(Py_NewRef(nothing)), recipe(make(layout::recipe.type));
    if (!recipe) return nullptr;
    for (Py_ssize_t index = 0; index < PyTuple_Size(inputs); ++index) {
        PyObject* given = PyTuple_GetItem(inputs, index);
        if (is_a(given, layout::leaf)) {
            Owned alone(untracked(PyTuple_Pack(1, at(given, layout::leaf.value))));
            if (!alone || !add_all(leaves, alone.get())) return nullptr;
        } else if (PyTuple_CheckExact(given)) {
            if (!add_all(leaves, at(PyTuple_GetItem(given, 0), layout::recipe.leaves))) return nullptr;
        }
    }
    set(recipe.get(), layout::recipe.call, call);
    set(recipe.get(), layout::recipe.inputs, inputs);
    set(recipe.get(), layout::recipe.fused, Py_True);
    set(recipe.get(), layout::recipe.from_statistics, Py_False);
    set(recipe.get(), layout::recipe.any_producer, Py_False);
    set(recipe.get(), layout::recipe.first_use, Py_None);
    set(recipe.get(), layout::recipe.leaves, leaves.get());
    set(recipe.get(), layout::recipe.references, nothing);
    set(recipe.get(), layout::recipe.sample, Py_None);
    set(recipe.get(), layout::recipe.text, Py_None);
    set(recipe.get(), layout::recipe.tree, Py_None);
    return recipe.release();
}

Found build(Search& search, PyObject* content, long long& budget, Owned& recipe);

// What a call is given for one of its inputs, in ``input``: something Held, a Leaf, or a recipe with a view.
Found find_input(Search& search, PyObject* call, PyObject* given, long long& budget, Owned& input) {
    if (is_a(given, layout::held)) {
        const int unchanged = has_version(at(given, layout::held.tensor), at(given, layout::held.version));
        if (unchanged <= 0) return unchanged < 0 ? Found::error : Found::left;
        if (at(given, layout::held.is_reference) != Py_False) return Found::left;
        input.reset(Py_NewRef(given));
        return Found::it;
    }
    if (!is_a(given, layout::view)) return Found::left;
    const Found leaf = find_leaf(search, given, input);
    if (leaf != Found::nothing) return leaf;
    if (budget < 1) return Found::left;
    PyObject* content = at(given, layout::view.content);
    const bool has_call = !is_none_at(content, layout::content.call);
    Owned recipe(nullptr);
    const Found inner = build(search, content, budget, recipe);
    if (inner == Found::nothing && !has_call) search.reader_of_unknown.reset(Py_NewRef(at(call, layout::call.name)));
    if (inner != Found::it) return inner;
    PyObject *spec = at(given, layout::view.spec), *made = at(recipe.get(), layout::recipe.call);
    if (at(at(made, layout::call.spec), layout::spec.dtype) != at(spec, layout::spec.dtype)) return Found::left;
    input.reset(untracked(PyTuple_Pack(2, recipe.get(), given)));
    return found(static_cast<bool>(input));
}

// See recipes.build: the recipe that makes a content of cheap calls. Nothing is found where what made it, or an input,
// is not known; the budget goes down by the calls that the recipe makes.
Found build(Search& search, PyObject* content, long long& budget, Owned& recipe) {
    Owned call(Py_NewRef(at(content, layout::content.call)));
    if (call.get() == Py_None || !is_true_at(call.get(), layout::call.is_cheap)) return Found::nothing;
    --budget;
    PyObject* given = at(call.get(), layout::call.inputs);
    const Py_ssize_t many = PyTuple_Size(given);
    Owned inputs(untracked(PyTuple_New(many)));
    if (!inputs) return Found::error;
    for (Py_ssize_t index = 0; index < many; ++index) {
        Owned input(nullptr);
        const Found has = find_input(search, call.get(), PyTuple_GetItem(given, index), budget, input);
        if (has != Found::it) return has;
        if (PyTuple_SetItem(inputs.get(), index, input.release()) != 0) return Found::error;
    }
    recipe.reset(make_recipe(call.get(), inputs.get()));
    return found(static_cast<bool>(recipe));
}

// Whether a recipe has that tree of patterns, which becomes its own then.
bool has_tree(PyObject* recipe, PyObject* tree) {
    PyObject *call = at(recipe, layout::recipe.call), *inputs = at(recipe, layout::recipe.inputs);
    const Py_ssize_t many = PyTuple_Size(inputs);
    if (!PyTuple_CheckExact(tree) || PyTuple_Size(tree) != many + 1) return false;
    PyObject* pattern = at(call, layout::call.pattern);
    if (pattern == Py_None || PyTuple_GetItem(tree, 0) != pattern) return false;
    for (Py_ssize_t index = 0; index < many; ++index) {
        PyObject *given = PyTuple_GetItem(inputs, index), *known = PyTuple_GetItem(tree, index + 1);
        if (PyTuple_CheckExact(given) ? !has_tree(PyTuple_GetItem(given, 0), known) : type_of(given) != known)
            return false;
    }
    set(recipe, layout::recipe.tree, tree);
    return true;
}

// See Recipe.unfused, of a recipe that was made just now.
void run_each_alone(PyObject* recipe) {
    set(recipe, layout::recipe.fused, Py_False);
    PyObject* inputs = at(recipe, layout::recipe.inputs);
    for (Py_ssize_t index = 0; index < PyTuple_Size(inputs); ++index) {
        PyObject* given = PyTuple_GetItem(inputs, index);
        if (PyTuple_CheckExact(given)) run_each_alone(PyTuple_GetItem(given, 0));
    }
}

// Whether the recipe was proven in an earlier step and need not be proven again in this one: see Remaking._way.
Found is_proven(PyObject* place, PyObject* recipe, PyObject* strongest, PyObject* whole) {
    PyObject* proven = at(place, layout::place.proven);  // tree, spec, own, way, text
    if (proven == Py_None || PyTuple_GetItem(proven, 2) != Py_None) return Found::left;
    PyObject* spec = PyTuple_GetItem(proven, 1);
    const bool is_known = whole == at(strongest, layout::saved.dense) && at(strongest, layout::saved.spec) == spec;
    const int is_alike = is_known ? 1 : looks_like(whole, spec);
    if (is_alike <= 0) return is_alike < 0 ? Found::error : Found::left;
    PyObject* way = PyTuple_GetItem(proven, 3);
    const long long uses = number_at(place, layout::place.uses) + 1;
    if (PyErr_Occurred()) return Found::error;
    if (PyUnicode_GetLength(way) == 0 || uses % REPEAT == 0) return Found::left;
    if (!has_tree(recipe, PyTuple_GetItem(proven, 0))) return Found::left;
    if (!set_number(place, layout::place.uses, uses)) return Found::error;
    set(recipe, layout::recipe.text, PyTuple_GetItem(proven, 4));
    if (way != s_fused && PyUnicode_Compare(way, s_fused) != 0) run_each_alone(recipe);
    return Found::it;
}

// See leaves.guard_leaf; returns whether that went well.
bool guard(PyObject* value) {
    if (!is_none_at(value, layout::value.guard) || !is_none_at(value, layout::value.form)) return true;
    if (!is_none_at(value, layout::value.recipe)) return true;
    Owned member(holder(value));
    if (!member) return false;
    if (member.get() == Py_None || is_true_at(member.get(), layout::saved.pinned))  // which may look otherwise now
        return static_cast<bool>(Owned(PyObject_CallFunctionObjArgs(guard_leaf, value, nullptr)));
    PyObject *dense = at(member.get(), layout::saved.dense), *live = at(value, layout::value.live);
    Owned own(make_saved(dense, live));
    if (!own) return false;
    set(own.get(), layout::saved.spec, at(member.get(), layout::saved.spec));
    set(own.get(), layout::saved.offset, at(member.get(), layout::saved.offset));
    set(own.get(), layout::saved.tensor, at(member.get(), layout::saved.tensor));
    set(own.get(), layout::saved.place, at(member.get(), layout::saved.place));
    set(value, layout::value.guard, own.get());
    Owned reference(weak_reference(own.get()));
    return reference && PyList_Append(at(value, layout::value.members), reference.get()) == 0;
}

// See Leaning.watch, of one leaf; returns whether that went well.
bool watch(PyObject* leaning, PyObject* value, PyObject* leaf) {
    if (is_none_at(leaf, layout::value.storage) && is_none_at(leaf, layout::value.address)) return true;
    if (!is_none_at(leaf, layout::value.form) || !is_none_at(leaf, layout::value.recipe)) return true;
    PyObject *values = at(leaning, layout::leaning._values), *cdata = at(leaf, layout::value.cdata);
    Owned reference(weak_reference(value));
    PyObject* known = reference ? PyDict_GetItemWithError(values, cdata) : nullptr;
    if (known != nullptr) return PyList_Append(known, reference.get()) == 0;
    if (PyErr_Occurred()) return false;
    Owned alone(PyList_New(0));
    return alone && PyList_Append(alone.get(), reference.get()) == 0 && PyDict_SetItem(values, cdata, alone.get()) == 0;
}

// See noting._use: the calls of a recipe count from now on.
void use(PyObject* recipe) {
    PyObject* place = at(at(recipe, layout::recipe.call), layout::call.place);
    if (place != Py_None) set(place, layout::call_place.is_used, Py_True);
    PyObject* inputs = at(recipe, layout::recipe.inputs);
    for (Py_ssize_t index = 0; index < PyTuple_Size(inputs); ++index) {
        PyObject* given = PyTuple_GetItem(inputs, index);
        if (PyTuple_CheckExact(given)) use(PyTuple_GetItem(given, 0));
    }
}

// See Noting.lack, of a value of which it is not known what made it, or one of its inputs.
PyObject* lack(const Search& search, PyObject* noting) {
    PyObject *key = at(search.root, layout::value.key), *failing = at(noting, layout::noting._failing);
    if (is_true_at(noting, layout::noting._has_skipped)) {
        PyObject* known = PyDict_GetItemWithError(failing, key);
        if (known != nullptr) return Py_NewRef(known);
        if (PyErr_Occurred()) return nullptr;
    }
    PyObject* reader = search.reader_of_unknown.get();
    Owned reason(reader == nullptr ? Py_NewRef(unknown_call)
                                   : PyUnicode_FromFormat("%U (input of %U)", unknown_call, reader));
    return reason ? PyObject_CallMethodObjArgs(noting, s_lack, key, reason.get(), nullptr) : nullptr;
}

// The recipe of a value, and what there is to do for it; or why there is none, in ``answer``.
Found find(PyObject* remaking, PyObject* value, PyObject* strongest, PyObject* whole, PyObject* action, Owned& answer) {
    PyObject *place = at(strongest, layout::saved.place), *live = at(remaking, layout::remaking._live);
    const int any_producer = is_true(action, s_any_producer);
    const int any_number = any_producer == 0 ? is_same(action, s_max_inputs, Py_None) : any_producer - 1;
    if (any_number <= 0) return any_number < 0 && PyErr_Occurred() ? Found::error : Found::left;
    Owned content(Py_NewRef(at(value, layout::value.content)));
    if (!is_a(content.get(), layout::content) || PySet_Size(at(live, layout::live.distrusted)) != 0) return Found::left;
    PyObject *version = at(content.get(), layout::content.version), *own = at(strongest, layout::saved.version);
    if (are_equal(version, own) != 1) return PyErr_Occurred() ? Found::error : Found::left;
    Search search{remaking, value, integer(action, s_max_depth)};
    if (PyErr_Occurred()) return Found::error;
    Owned noting(PyObject_CallNoArgs(at(remaking, layout::remaking._noting)));
    if (!noting) return Found::error;
    if (!is_a(noting.get(), layout::noting)) return Found::left;
    long long budget = MAX_CALLS;
    const Found built = build(search, content.get(), budget, answer);
    if (built == Found::nothing) {
        answer.reset(lack(search, noting.get()));
        return found(static_cast<bool>(answer));
    }
    const Found proven = built == Found::it ? is_proven(place, answer.get(), strongest, whole) : built;
    if (proven != Found::it) return proven;
    PyObject *recipe = answer.get(), *leaves = at(recipe, layout::recipe.leaves);
    std::vector<PyObject*> begins_from;
    for (Py_ssize_t index = 0; index < PyTuple_Size(leaves); ++index) {
        PyObject* leaf = PyTuple_GetItem(leaves, index);
        if (std::find(begins_from.begin(), begins_from.end(), leaf) == begins_from.end()) begins_from.push_back(leaf);
    }
    for (PyObject* leaf : begins_from)
        if (!guard(leaf)) return Found::error;
    for (PyObject* leaf : begins_from)
        if (!watch(at(remaking, layout::remaking._leaning), value, leaf)) return Found::error;
    PyObject* bits = sample(remaking, whole, PyTuple_GetItem(at(place, layout::place.proven), 1));
    if (bits == nullptr) return Found::error;
    set(recipe, layout::recipe.sample, bits);
    give(value, layout::value.sample, bits);
    set(noting.get(), layout::noting._has_used, Py_True);
    PyObject *failing = at(noting.get(), layout::noting._failing), *key = at(value, layout::value.key);
    const int failed = PyDict_Size(failing) != 0 ? PyDict_Contains(failing, key) : 0;
    if (failed < 0 || (failed && PyDict_DelItem(failing, key) != 0)) return Found::error;
    use(recipe);
    return Found::it;
}

}  // namespace

PyObject* recipe_of(PyObject* remaking, PyObject* value, PyObject* strongest, PyObject* whole, PyObject* action) {
    Owned answer(nullptr);
    const Found has = find(remaking, value, strongest, whole, action, answer);
    if (has == Found::error) return nullptr;
    if (has == Found::it) return answer.release();
    answer.reset(nullptr);
    return PyObject_CallMethodObjArgs(remaking, s_recipe, value, strongest, whole, action, nullptr);
}

}  // namespace backstash
