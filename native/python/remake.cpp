// Runs recipes: see Recipe.run in stash/recipes.py, repeat in stash/repeating.py, and agree in numerics.py.
//
// Each function here does the common case. Where a recipe is another one, it calls what is written in Python, before it
// has changed anything.
#include "slots.h"

namespace backstash {
namespace {

// Whether autograd followed an input of a call that is repeated as it was called (Note: [as called]).
bool is_followed(PyObject* call) { return PyTuple_Size(at(call, layout::call.needs_grad)) != 0; }

// Whether a call draws no numbers, saves nothing inside, and autocast is off and was. 1 or 0, or -1 with an error set.
int is_simple(PyObject* call) {
    if (!is_none_at(call, layout::call.group) || !is_none_at(call, layout::call.random_state)) return 0;
    if (!is_none_at(call, layout::call.autocast)) return 0;
    const int casts = has_autocast();
    return casts < 0 ? -1 : !casts;
}

// An argument with the next tensors in the places of inputs: a new reference. See repeating._with_tensors.
PyObject* with_tensors(PyObject* arg, PyObject* tensors, Py_ssize_t& next) {
    if (arg == input_marker) return Py_XNewRef(PyList_GetItem(tensors, next++));
    const bool is_list = PyList_CheckExact(arg);
    if (!is_list && !PyTuple_CheckExact(arg)) return Py_NewRef(arg);
    Owned items(PySequence_List(arg));
    if (!items) return nullptr;
    for (Py_ssize_t index = 0; index < PyList_Size(items.get()); ++index) {
        if (PyList_GetItem(items.get(), index) != input_marker) continue;
        PyObject* x = PyList_GetItem(tensors, next++);
        if (x == nullptr || PyList_SetItem(items.get(), index, Py_NewRef(x)) != 0) return nullptr;
    }
    return is_list ? items.release() : PyList_AsTuple(items.get());
}

// A call's arguments with these tensors in the places of its own: a new reference. See repeating._arguments.
PyObject* arguments(PyObject* call, PyObject* tensors, Py_ssize_t& next) {
    PyObject* known = at(call, layout::call.args);
    const Py_ssize_t number = PyTuple_Size(known);
    Owned args(PyTuple_New(number));
    if (!args) return nullptr;
    for (Py_ssize_t index = 0; index < number; ++index) {
        PyObject* arg = with_tensors(PyTuple_GetItem(known, index), tensors, next);
        if (arg == nullptr || PyTuple_SetItem(args.get(), index, arg) != 0) return nullptr;
    }
    return args.release();
}

// As arguments, of those that are given by their names.
PyObject* named_arguments(PyObject* call, PyObject* tensors, Py_ssize_t next) {
    PyObject* known = at(call, layout::call.kwargs);
    if (next == PyList_Size(tensors)) return Py_NewRef(known);  // there is no tensor among them
    Owned kwargs(PyDict_Copy(known));
    Py_ssize_t at_key = 0;
    PyObject *key, *arg;
    while (kwargs && PyDict_Next(known, &at_key, &key, &arg)) {
        Owned other(with_tensors(arg, tensors, next));
        if (!other || PyDict_SetItem(kwargs.get(), key, other.get()) != 0) return nullptr;
    }
    return kwargs.release();
}

// The tensors, of which autograd follows those that it followed when they were read first: a new reference.
PyObject* as_followed(PyObject* tensors, PyObject* needs_grad) {
    const Py_ssize_t number = PyTuple_Size(needs_grad);
    Owned found(PyList_GetSlice(tensors, 0, number));
    for (Py_ssize_t index = 0; found && index < number; ++index) {
        if (PyTuple_GetItem(needs_grad, index) != Py_True) continue;
        PyObject* x = PyList_GetItem(tensors, index);
        Owned leaf(x == nullptr ? nullptr : tensor_detach(x));
        if (!leaf || PyObject_SetAttr(leaf.get(), s_requires_grad, Py_True) != 0) return nullptr;
        if (PyList_SetItem(found.get(), index, leaf.release()) != 0) return nullptr;
    }
    return found.release();
}

// See repeating.repeat.
PyObject* repeat(PyObject* call, PyObject* function, PyObject* tensors) {
    const int simple = is_simple(call);
    if (simple < 0) return nullptr;
    if (!simple) return PyObject_CallMethodObjArgs(repeating_module, s_repeat, call, function, tensors, nullptr);
    const bool followed = is_followed(call);
    Owned given(followed ? as_followed(tensors, at(call, layout::call.needs_grad)) : Py_NewRef(tensors));
    if (!given) return nullptr;
    Py_ssize_t next = 0;
    Owned args(arguments(call, given.get(), next));
    Owned kwargs(args ? named_arguments(call, given.get(), next) : nullptr);
    if (!kwargs) return nullptr;
    Owned made(followed ? PyObject_CallFunctionObjArgs(as_called, function, args.get(), kwargs.get(), nullptr)
                        : PyObject_Call(function, args.get(), kwargs.get()));
    PyObject* output = at(call, layout::call.output);
    if (made && output != Py_None) made.reset(PyObject_GetItem(made.get(), output));
    return made && followed ? tensor_detach(made.get()) : made.release();
}

// The recipe of the input with that number; null where that input is none.
PyObject* inner(PyObject* recipe, Py_ssize_t number) {
    PyObject* given = PyTuple_GetItem(at(recipe, layout::recipe.inputs), number);
    return PyTuple_CheckExact(given) ? PyTuple_GetItem(given, 0) : nullptr;
}

bool is_norm(PyObject* recipe) { return !is_none_at(at(recipe, layout::recipe.call), layout::call.statistics); }

// Whether fused.affine may have a kernel for the recipe, as far as the calls tell: the statistics of a batch norm are
// there, below an activation or a sum perhaps. 1 or 0, or -1 with an error set.
int may_be_affine(PyObject* recipe) {
    Py_ssize_t number = PyTuple_Size(at(recipe, layout::recipe.inputs));
    PyObject* name = at(at(recipe, layout::recipe.call), layout::call.name);
    const int is_activation = PyDict_Contains(activations, name);
    if (is_activation < 0) return -1;
    if (is_activation) {
        recipe = number == 1 ? inner(recipe, 0) : nullptr;
        if (recipe == nullptr) return 0;
        number = PyTuple_Size(at(recipe, layout::recipe.inputs));
        name = at(at(recipe, layout::recipe.call), layout::call.name);
    }
    if (is_norm(recipe)) return 1;
    if (number != 2 || PyUnicode_CompareWithASCIIString(name, "add") != 0) return 0;
    for (Py_ssize_t index = 0; index < number; ++index) {
        PyObject* summand = inner(recipe, index);
        if (summand != nullptr && is_norm(summand)) return 1;
    }
    return 0;
}

// The tensor of one input of a recipe: see Recipe._input.
PyObject* input(PyObject* given, PyObject* out, PyObject* known) {
    if (is_a(given, layout::held)) return get_held(given);
    if (is_a(given, layout::leaf)) return fetch_leaf(given, known);
    PyObject* view = PyTuple_GetItem(given, 1);
    Owned result(run_recipe(PyTuple_GetItem(given, 0), out, known));
    if (!result) return nullptr;
    PyObject *spec = at(view, layout::view.spec), *offset = at(view, layout::view.offset);
    const int is_all = PyLong_AsLongLong(offset) == 0 ? has_layout(result.get(), spec) : 0;
    if (is_all != 0) return is_all < 0 ? nullptr : result.release();
    return as_strided(result.get(), spec, offset);
}

// The function by which a call is repeated: that which writes over its first argument, if that is a temporary of the
// recipe and laid out as the result. A borrowed reference; null with an error set.
PyObject* function_of(PyObject* recipe, PyObject* tensors) {
    PyObject *call = at(recipe, layout::recipe.call), *function = at(call, layout::call.function);
    PyObject* args = at(call, layout::call.args);
    if (PyList_Size(tensors) == 0 || PyTuple_Size(args) == 0 || PyTuple_GetItem(args, 0) != input_marker) return function;
    if (inner(recipe, 0) == nullptr || is_followed(call)) return function;
    PyObject* other = PyDict_GetItemWithError(overwriting, at(call, layout::call.name));
    if (other == nullptr) return PyErr_Occurred() ? nullptr : function;
    const int alike = looks_like(PyList_GetItem(tensors, 0), at(call, layout::call.spec));
    if (alike < 0) return nullptr;
    return alike ? other : function;
}

// See Recipe._run. The settings are the recipe's.
PyObject* run_under(PyObject* recipe, PyObject* out) {
    PyObject *call = at(recipe, layout::recipe.call), *inputs = at(recipe, layout::recipe.inputs);
    PyObject* known = at(call, layout::call.settings);
    if (is_true_at(recipe, layout::recipe.from_statistics)) {
        Owned memory(memory_for(out));
        return memory ? PyObject_CallMethodObjArgs(recipe, s__run, fetch_function, memory.get(), nullptr) : nullptr;
    }
    const int affine = is_true_at(recipe, layout::recipe.fused) ? may_be_affine(recipe) : 0;
    if (affine < 0) return nullptr;
    if (affine) {
        Owned made(run_affine(recipe, out, known));
        if (!made || made.get() != Py_None) return made.release();
    }
    Owned tensors(PyList_New(0));
    if (!tensors) return nullptr;
    for (Py_ssize_t index = 0; index < PyTuple_Size(inputs); ++index) {
        Owned tensor(input(PyTuple_GetItem(inputs, index), index == 0 ? out : nullptr, known));
        if (!tensor || PyList_Append(tensors.get(), tensor.get()) != 0) return nullptr;
    }
    PyObject* function = function_of(recipe, tensors.get());
    return function == nullptr ? nullptr : repeat(call, function, tensors.get());
}

// Whether the readers of settings return these: 1 or 0, or -1 with an error set.
int agree_all(PyObject* readers, PyObject* wanted) {
    const Py_ssize_t number = PyTuple_Size(readers);
    if (PyTuple_Size(wanted) != number) return 0;
    for (Py_ssize_t index = 0; index < number; ++index) {
        Owned now(PyObject_CallNoArgs(PyTuple_GetItem(readers, index)));
        const int same = now ? PyObject_RichCompareBool(now.get(), PyTuple_GetItem(wanted, index), Py_EQ) : -1;
        if (same <= 0) return same;
    }
    return 1;
}

}  // namespace

// What makes memory for a value, as Python is given it: a new reference, None where there is no value.
PyObject* memory_for(PyObject* value) {
    return value == nullptr ? Py_NewRef(Py_None) : PyObject_CallFunctionObjArgs(memory_of, value, nullptr);
}

// See Held.get: a new reference.
PyObject* get_held(PyObject* held) {
    PyObject* tensor = at(held, layout::held.tensor);
    int is_common = is_plain(tensor) ? has_version(tensor, at(held, layout::held.version)) : 0;
    if (is_common > 0) is_common = is_strided(tensor);
    const long long nbytes = is_common > 0 ? storage_nbytes(tensor) : is_common;
    if (nbytes < 0) return nullptr;
    return nbytes > 0 ? Py_NewRef(tensor) : PyObject_CallMethodObjArgs(held, s_get, nullptr);  // which may raise
}

int are_settings(PyObject* wanted, PyObject* device) {
    Owned type(PyObject_GetAttr(device, s_type));
    if (!type) return -1;
    const bool is_cpu = PyUnicode_CompareWithASCIIString(type.get(), "cpu") == 0;
    PyObject* readers = PyDict_GetItemString(settings_readers, is_cpu ? "cpu" : "");
    if (readers == nullptr || !PyTuple_CheckExact(readers) || !PyTuple_CheckExact(wanted)) return 0;
    return agree_all(readers, wanted);
}

// See numerics.agree_reference.
PyObject* agree(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 2 || !PyTuple_CheckExact(args[0]) || !PyTuple_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "agree takes a tuple of functions and a tuple of values");
        return nullptr;
    }
    const int same = agree_all(args[0], args[1]);
    return same < 0 ? nullptr : PyBool_FromLong(same);
}

PyObject* run_recipe(PyObject* recipe, PyObject* out, PyObject* known) {
    PyObject* call = at(recipe, layout::recipe.call);
    PyObject* wanted = at(call, layout::call.settings);
    if (wanted != known) {
        const int agreed = are_settings(wanted, at(at(call, layout::call.spec), layout::spec.device));
        if (agreed < 0) return nullptr;
        if (!agreed) {
            Owned memory(memory_for(out));
            return memory ? PyObject_CallMethodObjArgs(recipe, s_run, fetch_function, memory.get(), nullptr) : nullptr;
        }
    }
    return run_under(recipe, out);
}

int has_layout(PyObject* x, PyObject* spec) {
    Facts facts;
    if (read_facts(x, facts) && facts.is_strided)
        return are_numbers(at(spec, layout::spec.shape), facts.sizes, facts.dim) &&
               are_numbers(at(spec, layout::spec.stride), facts.strides, facts.dim);
    Owned own(tensor_shape(x));
    const int same = own ? PyObject_RichCompareBool(own.get(), at(spec, layout::spec.shape), Py_EQ) : -1;
    if (same <= 0) return same;
    own.reset(tensor_stride(x));
    return own ? PyObject_RichCompareBool(own.get(), at(spec, layout::spec.stride), Py_EQ) : -1;
}

PyObject* as_strided(PyObject* x, PyObject* spec, PyObject* offset) {
    PyObject *shape = at(spec, layout::spec.shape), *stride = at(spec, layout::spec.stride);
    return PyObject_CallMethodObjArgs(x, s_as_strided, shape, stride, offset, nullptr);
}

}  // namespace backstash
