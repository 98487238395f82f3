// Batch norm, a sum and an activation remade in one pass over memory: see stash/fused.py, which has the other cases.
#include "kernels.h"

#include <vector>

namespace backstash {
namespace {

// The recipe of one of the inputs and its view, where that input is made; else nulls.
struct Made {
    PyObject *recipe = nullptr, *view = nullptr;
    explicit operator bool() const { return recipe != nullptr; }
};

// The parts of a recipe of the form: activation(batch_norm(source) [+ residual]).
struct Parts {
    int activation = 0;
    double lo = 0.0, hi = 0.0;
    PyObject *norm = nullptr, *source = nullptr;
    PyObject* residual = nullptr;  // a leaf, or a tuple of a recipe and a view; null where nothing is added
};

// Whether there is one: there is, there is none, the reference has to tell, or an error.
enum class Form { it, none, left, error };

PyObject* call_of(PyObject* recipe) { return at(recipe, layout::recipe.call); }

bool is_called(PyObject* call, const char* name) {
    return PyUnicode_CompareWithASCIIString(at(call, layout::call.name), name) == 0;
}

// Whether two specs are equal: 1 or 0, or -1 with an error set. Those of tensors that look alike are mostly one object.
int is_same_spec(PyObject* spec, PyObject* other) { return PyObject_RichCompareBool(spec, other, Py_EQ); }

// What a recipe gives as the input of that number, where all of it is given: see fused.fills.
Made filling(PyObject* recipe, Py_ssize_t number) {
    PyObject* given = PyTuple_GetItem(at(recipe, layout::recipe.inputs), number);
    if (given == nullptr || !PyTuple_CheckExact(given)) return {};
    Made made{PyTuple_GetItem(given, 0), PyTuple_GetItem(given, 1)};
    if (number_at(made.view, layout::view.offset) != 0) return {};
    const int fills = is_same_spec(at(made.view, layout::view.spec), at(call_of(made.recipe), layout::call.spec));
    return fills == 1 ? made : Made{};
}

// See fused._activation, of a call that is one.
Form find_activation(PyObject* call, Parts& parts) {
    PyObject *args = at(call, layout::call.args), *kwargs = at(call, layout::call.kwargs);
    const bool is_relu = is_called(call, "relu"), is_first = PyTuple_Size(args) == 1;
    if (is_relu && is_first && PyTuple_GetItem(args, 0) == input_marker) {
        const Py_ssize_t named = PyDict_Size(kwargs);
        if (named == 0 || (named == 1 && PyDict_Contains(kwargs, s_inplace) == 1)) {
            parts.activation = 1, parts.lo = 0.0, parts.hi = Py_HUGE_VAL;
            return Form::it;
        }
    }
    if (PyErr_Occurred()) return Form::error;
    Owned numbers(PyObject_CallFunctionObjArgs(activation_of, call, nullptr));
    if (!numbers) return Form::error;
    if (numbers.get() == Py_None) return Form::none;
    parts.activation = static_cast<int>(PyLong_AsLong(PyTuple_GetItem(numbers.get(), 0)));
    parts.lo = PyFloat_AsDouble(PyTuple_GetItem(numbers.get(), 1));
    parts.hi = PyFloat_AsDouble(PyTuple_GetItem(numbers.get(), 2));
    return PyErr_Occurred() ? Form::error : Form::it;
}

// See fused._norm_and_residual.
void find_norm(PyObject* recipe, Parts& parts) {
    PyObject* call = call_of(recipe);
    parts.norm = recipe;
    PyObject *args = at(call, layout::call.args), *kwargs = at(call, layout::call.kwargs);
    const bool has_two = PyTuple_Size(args) == 2 && PyDict_Size(kwargs) == 0;
    const bool is_sum = has_two && is_called(call, "add") && PyTuple_Size(at(recipe, layout::recipe.inputs)) == 2;
    for (Py_ssize_t number = 0; is_sum && number < 2; ++number) {
        const Made summand = filling(recipe, number);
        if (PyErr_Occurred()) return;
        if (!summand || !is_called(call_of(summand.recipe), "batch_norm")) continue;
        parts.norm = summand.recipe;
        parts.residual = PyTuple_GetItem(at(recipe, layout::recipe.inputs), 1 - number);
        return;
    }
}

// See fused.parts_of.
Form find_parts(PyObject* recipe, Parts& parts) {
    PyObject* call = call_of(recipe);
    PyObject *inside = recipe, *spec = at(call, layout::call.spec);
    const int is_activation = PyDict_Contains(activations, at(call, layout::call.name));
    if (is_activation < 0) return Form::error;
    if (is_activation) {
        const Form found = find_activation(call, parts);
        if (found == Form::error) return found;
        if (found == Form::it) {
            const Made only = PyTuple_Size(at(recipe, layout::recipe.inputs)) == 1 ? filling(recipe, 0) : Made{};
            if (!only) return PyErr_Occurred() ? Form::error : Form::none;
            inside = only.recipe;
        }
    }
    find_norm(inside, parts);
    PyObject* norm = call_of(parts.norm);
    if (PyErr_Occurred()) return Form::error;
    if (is_none_at(norm, layout::call.statistics)) return Form::none;
    if (parts.residual != nullptr && is_a(parts.residual, layout::held)) return Form::none;
    PyObject* settings = at(call, layout::call.settings);
    for (PyObject* each : {call_of(inside), norm})
        if (at(each, layout::call.settings) != settings) return Form::none;
    if (at(spec, layout::spec.dtype) != float32) return Form::none;
    if (!is_none_at(norm, layout::call.autocast) || !is_none_at(call, layout::call.autocast)) return Form::none;
    parts.source = PyTuple_GetItem(at(parts.norm, layout::recipe.inputs), 0);
    return parts.source != nullptr && is_a(parts.source, layout::leaf) ? Form::it : Form::none;
}

// See Call.named_input, and what is held there: a borrowed reference to a Held, None where there is none, or null.
PyObject* held_input(PyObject* recipe, PyObject* name) {
    PyObject *call = call_of(recipe), *kwargs = at(call, layout::call.kwargs), *args = at(call, layout::call.args);
    Py_ssize_t before = 0, position = 0;
    for (Py_ssize_t index = 0; index < PyTuple_Size(args); ++index)
        before += PyTuple_GetItem(args, index) == input_marker;
    PyObject *key, *arg;
    while (PyDict_Next(kwargs, &position, &key, &arg)) {
        if (arg != input_marker) continue;
        const int same = key == name ? 1 : PyObject_RichCompareBool(key, name, Py_EQ);
        if (same < 0) return nullptr;
        if (same) {
            PyObject* found = PyTuple_GetItem(at(call, layout::call.inputs), before);
            return found == nullptr || is_a(found, layout::held) ? found : Py_None;
        }
        ++before;
    }
    return Py_None;
}

// A tensor of one number per channel, and where its elements begin.
struct Vector {
    Owned tensor{nullptr};
    const void* data = nullptr;
};

// Takes a vector that is held; whether a kernel takes it, 1 or 0, or -1 with an error set. None is no vector.
int take_vector(PyObject* held, PyObject* shape, Vector& vector) {
    if (held == nullptr) return -1;
    if (held == Py_None) return 1;
    vector.tensor.reset(get_held(held));
    if (!vector.tensor || !is_plain(vector.tensor.get())) return vector.tensor ? 0 : -1;
    Facts facts;
    if (read_facts(vector.tensor.get(), facts)) {
        if (facts.dtype != float32 || !facts.is_strided || !are_numbers(shape, facts.sizes, facts.dim)) return 0;
        vector.data = data_of(vector.tensor.get());
        return PyErr_Occurred() ? -1 : facts.strides[0] == 1 || facts.sizes[0] == 1;
    }
    Owned dtype(tensor_dtype(vector.tensor.get()));
    Owned own(dtype ? tensor_shape(vector.tensor.get()) : nullptr);
    Owned stride(own ? tensor_stride(vector.tensor.get()) : nullptr);
    if (!stride) return -1;
    if (dtype.get() != float32) return 0;
    const int same = PyObject_RichCompareBool(own.get(), shape, Py_EQ);
    if (same <= 0) return same;
    const bool is_dense = PyLong_AsLongLong(PyTuple_GetItem(stride.get(), 0)) == 1 ||
                          PyLong_AsLongLong(PyTuple_GetItem(shape, 0)) == 1;
    vector.data = data_of(vector.tensor.get());
    return PyErr_Occurred() ? -1 : is_dense;
}

using Numbers = std::vector<int64_t>;

// The numbers of a tuple.
Numbers numbers_of(PyObject* tuple) {
    Numbers numbers;
    for (Py_ssize_t index = 0; index < PyTuple_Size(tuple); ++index)
        numbers.push_back(PyLong_AsLongLong(PyTuple_GetItem(tuple, index)));
    return numbers;
}

// Whether memory has the dimensions in that order, the last one of neighbours.
bool is_ordered(const Numbers& shape, const Numbers& stride, const std::vector<size_t>& order) {
    int64_t expected = 1;
    for (auto dimension = order.rbegin(); dimension != order.rend(); ++dimension) {
        if (shape[*dimension] == 1) continue;
        if (stride[*dimension] != expected) return false;
        expected *= shape[*dimension];
    }
    return true;
}

struct Images {
    int64_t outer = 0, channels = 0, inner = 0;
};

// See layout.images; without channels where memory is in another order, or there is no element.
Images images(PyObject* spec) {
    const Numbers shape = numbers_of(at(spec, layout::spec.shape)), stride = numbers_of(at(spec, layout::spec.stride));
    if (shape.size() < 2) return {};
    int64_t numel = 1;
    std::vector<size_t> order, channels_last{0};
    for (size_t dimension = 0; dimension < shape.size(); ++dimension) {
        numel *= shape[dimension];
        order.push_back(dimension);
        if (dimension > 1) channels_last.push_back(dimension);
    }
    channels_last.push_back(1);
    if (numel <= 0) return {};
    if (is_ordered(shape, stride, order)) return {shape[0], shape[1], numel / shape[0] / shape[1]};
    const bool has_format = shape.size() == 4 || shape.size() == 5;
    if (has_format && is_ordered(shape, stride, channels_last)) return {numel / shape[1], shape[1], 1};
    return {};
}

// Whether a tensor is what the kernel takes for images laid out like a spec: 1 or 0, or -1 with an error set.
int is_image(PyObject* x, PyObject* spec) {
    if (!is_plain(x)) return 0;
    Owned dtype(tensor_dtype(x));
    if (!dtype) return -1;
    return dtype.get() == float32 ? has_layout(x, spec) : 0;
}

// What is added: a new reference, or null with an error set.
PyObject* fetch_residual(PyObject* residual, PyObject* known) {
    if (is_a(residual, layout::leaf)) return fetch_leaf(residual, known);
    return run_recipe(PyTuple_GetItem(residual, 0), nullptr, known);
}

// Memory for a result: that of a value which is made as all of it, if there is one.
PyObject* memory_like(PyObject* spec, PyObject* value) {
    PyObject* recipe = value == nullptr ? Py_None : at(value, layout::value.recipe);
    const int whole = recipe == Py_None ? 0 : is_same_spec(at(call_of(recipe), layout::call.spec), spec);
    if (whole < 0) return nullptr;
    return whole ? take_memory(value, spec) : empty_like(spec);
}

// Runs the kernel on what the parts are now: a new reference, to None where it does not take them.
PyObject* run_kernel(const Parts& parts, const Images& sizes, PyObject* spec, PyObject* value, PyObject* known) {
    Owned y(nullptr);  // It is fetched before x: if it is made from other values, these would lie beside x.
    if (parts.residual != nullptr) {
        y.reset(fetch_residual(parts.residual, known));
        const int fits = y ? is_image(y.get(), spec) : -1;
        if (fits <= 0) return fits < 0 ? nullptr : Py_NewRef(Py_None);
    }
    Owned x(fetch_leaf(parts.source, known));
    int fits = x ? is_image(x.get(), spec) : -1;
    if (fits <= 0) return fits < 0 ? nullptr : Py_NewRef(Py_None);
    PyObject* statistics = at(call_of(parts.norm), layout::call.statistics);
    Owned channels(Py_BuildValue("(L)", static_cast<long long>(sizes.channels)));
    Vector mean, invstd, weight, bias;
    if (!channels) return nullptr;
    fits = take_vector(PyTuple_GetItem(statistics, 0), channels.get(), mean);
    if (fits > 0) fits = take_vector(PyTuple_GetItem(statistics, 1), channels.get(), invstd);
    if (fits > 0) fits = take_vector(held_input(parts.norm, s_weight), channels.get(), weight);
    if (fits > 0) fits = take_vector(held_input(parts.norm, s_bias), channels.get(), bias);
    if (fits <= 0) return fits < 0 ? nullptr : Py_NewRef(Py_None);
    Owned result(memory_like(spec, value));
    if (!result) return nullptr;
    const long long nbytes = number_at(spec, layout::spec.nbytes);
    const int threads = threads_for(nbytes);
    if (PyErr_Occurred()) return nullptr;
    const void* source = data_of(x.get());
    const void* added = y && !PyErr_Occurred() ? data_of(y.get()) : nullptr;
    void* target = PyErr_Occurred() ? nullptr : data_of(result.get());
    if (PyErr_Occurred()) return nullptr;
    std::vector<float> scratch(2 * sizes.channels);
    const WithoutGil running(nbytes);
    kernel::bs_affine(source, added, mean.data, invstd.data, weight.data, bias.data, scratch.data(), sizes.outer,
                      sizes.channels, sizes.inner, parts.activation, parts.lo, parts.hi, nullptr, target, threads);
    return result.release();
}

}  // namespace

PyObject* run_affine(PyObject* recipe, PyObject* value, PyObject* known) {
    PyObject* spec = at(call_of(recipe), layout::call.spec);
    Owned type(PyObject_GetAttr(at(spec, layout::spec.device), s_type));
    if (!type) return nullptr;
    const bool is_served = kernel::bs_affine != nullptr && PyUnicode_CompareWithASCIIString(type.get(), "cpu") == 0;
    Parts parts;
    Images sizes;
    Form form = is_served ? find_parts(recipe, parts) : Form::left;
    if (form == Form::it && (sizes = images(spec)).channels == 0) form = Form::left;
    if (PyErr_Occurred()) return nullptr;
    if (form == Form::it) return run_kernel(parts, sizes, spec, value, known);
    if (form == Form::none) return Py_NewRef(Py_None);
    Owned memory(memory_for(value));
    if (!memory) return nullptr;
    return PyObject_CallMethodObjArgs(fused_module, s_affine, recipe, fetch_function, memory.get(), nullptr);
}

}  // namespace backstash
