// See program.h.
#include "program.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <functional>

namespace backstash::replay {
namespace {

// An object's attribute, read as what is asked for.
class Reader {
public:
    explicit Reader(PyObject* object) : object_(object) {}
    Object object(const char* name) const { return Object::taken(PyObject_GetAttrString(object_, name)); }
    int64_t integer(const char* name) const { return checked(PyLong_AsLongLong(object(name).get())); }
    int number(const char* name) const { return static_cast<int>(integer(name)); }
    double real(const char* name) const { return checked(PyFloat_AsDouble(object(name).get())); }
    bool flag(const char* name) const { return checked(PyObject_IsTrue(object(name).get())) != 0; }
    uint64_t bits(const char* name) const { return checked(PyLong_AsUnsignedLongLong(object(name).get())); }
    std::string text(const char* name) const {
        const char* found = PyUnicode_AsUTF8(object(name).get());
        if (found == nullptr) throw python_error();
        return found;
    }
    std::vector<int> numbers(const char* name) const {
        std::vector<int> found;
        each(name, [&](PyObject* item) { found.push_back(static_cast<int>(checked(PyLong_AsLongLong(item)))); });
        return found;
    }
    template <class Take>
    void each(const char* name, Take take) const {
        const Object all = Object::taken(PySequence_Tuple(object(name).get()));
        for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(all.get()); ++index) take(PyTuple_GET_ITEM(all.get(), index));
    }

private:
    template <class Number>
    static Number checked(Number number) {
        if (PyErr_Occurred()) throw python_error();
        return number;
    }
    PyObject* object_;
};

std::vector<int64_t> sizes_of(PyObject* spec, const char* name) {
    std::vector<int64_t> found;
    Reader(spec).each(name, [&](PyObject* size) { found.push_back(PyLong_AsLongLong(size)); });
    return found;
}

Layout layout_of(PyObject* spec, int64_t offset) {
    Layout found;
    if (spec == Py_None) return found;
    const Reader read(spec);
    found.spec = Object(spec);
    found.sizes = sizes_of(spec, "shape");
    found.strides = sizes_of(spec, "stride");
    found.nbytes = read.integer("nbytes");
    found.offset = offset;
    const Object dtype = read.object("dtype"), device = read.object("device");
    TORCH_CHECK(THPDtype_Check(dtype.get()) && THPDevice_Check(device.get()));
    found.dtype = reinterpret_cast<THPDtype*>(dtype.get())->scalar_type;
    found.device = reinterpret_cast<THPDevice*>(device.get())->device;
    return found;
}

Layout layout_at(const Reader& read, const char* spec = "spec", const char* offset = "offset") {
    return layout_of(read.object(spec).get(), offset == nullptr ? 0 : read.integer(offset));
}

Given given_of(PyObject* object) {
    const Reader read(object);
    return {static_cast<Given::From>(read.number("source")), read.number("number"), layout_at(read)};
}

std::shared_ptr<const Affine> affine_of(PyObject* object);

std::shared_ptr<const OnePass> one_pass_of(PyObject* object) {
    if (object == Py_None) return nullptr;
    const Reader read(object);
    auto found = std::make_shared<OnePass>();
    found->make = read.object("make");
    read.each("operands", [&](PyObject* item) {
        const Reader operand(item);
        const Object value = operand.object("value");
        found->operands.push_back({operand.number("call"), operand.number("place"), {}});
        if (!value.is_none()) found->operands.back().value = given_of(value.get());
    });
    return found;
}

Tree tree_of(PyObject* object) {
    const Reader read(object);
    Tree tree;
    tree.call = read.number("call");
    tree.made = read.number("made");
    tree.inside = read.number("inside");
    tree.function = read.object("function");
    tree.as_called = read.object("as_called");
    if (!read.object("places").is_none()) {
        const Reader call(tree.as_called.get());
        tree.places = read.numbers("places");
        tree.args = call.object("args");
        tree.kwargs = call.object("kwargs");
    }
    tree.result = layout_at(read, "spec", nullptr);
    tree.affine = affine_of(read.object("affine").get());
    tree.one_pass = one_pass_of(read.object("one_pass").get());
    read.each("given", [&](PyObject* item) { tree.given.push_back(given_of(item)); });
    read.each("inner", [&](PyObject* item) { tree.inner.push_back(tree_of(item)); });
    return tree;
}

std::shared_ptr<const Affine> affine_of(PyObject* object) {
    if (object == Py_None) return nullptr;
    const Reader read(object);
    auto made = std::make_shared<Affine>();
    Affine& found = *made;
    found.norm = read.number("norm");
    found.weight = read.number("weight");
    found.bias = read.number("bias");
    found.source = given_of(read.object("source").get());
    const Object residual = read.object("residual"), inner = read.object("inner");
    found.has_residual = !residual.is_none();
    if (found.has_residual) found.residual = given_of(residual.get());
    if (!inner.is_none()) found.inner = tree_of(inner.get());
    found.second = read.number("second");
    found.second_weight = read.number("second_weight");
    found.second_bias = read.number("second_bias");
    found.activation = read.number("activation");
    found.lo = read.real("lo");
    found.hi = read.real("hi");
    found.outer = read.integer("outer");
    found.channels = read.integer("channels");
    found.inside = read.integer("inside");
    found.kernel = read.object("kernel");
    return made;
}

Save save_of(PyObject* object) {
    const Reader read(object);
    Save save{};
    save.kind = static_cast<Kind>(read.number("kind"));
    save.layout = layout_at(read);
    save.storage_nbytes = read.integer("storage_nbytes");
    save.gap = read.integer("gap");
    save.value = read.number("value");
    save.call = read.number("call");
    save.is_builtin = read.flag("is_builtin");
    save.is_pinned = read.flag("is_pinned");
    save.reads_value = read.flag("reads_value");
    save.reads_sign = read.flag("reads_sign");
    save.may_claim_weight = read.flag("may_claim_weight");
    save.may_claim_input = read.flag("may_claim_input");
    save.as_held = static_cast<Claim>(read.number("as_held"));
    save.as_stored = static_cast<Claim>(read.number("as_stored"));
    save.as_bits = static_cast<Claim>(read.number("as_bits"));
    save.parameter = reinterpret_cast<const void*>(read.bits("parameter"));
    save.facts = read.object("facts");
    save.mask = read.object("mask");
    save.read_as = read.object("read_as");
    return save;
}

Value value_of(PyObject* object) {
    const Reader read(object);
    Value value{};
    value.program = static_cast<Program>(read.number("program"));
    value.members = read.number("members");
    value.strongest = read.number("strongest");
    value.contents = read.number("contents");
    value.nbytes = read.integer("nbytes");
    value.is_whole = read.flag("is_whole");
    value.is_exact_form = read.flag("is_exact_form");
    value.shares = read.flag("shares");
    value.whole = layout_at(read, "whole", nullptr);
    value.decoded = layout_at(read, "decoded", nullptr);
    value.key = read.object("key");
    value.codec = read.object("codec");
    value.mask = read.object("mask");
    value.ways = read.object("ways");
    if (const Object kernel = read.object("kernel"); !kernel.is_none()) {
        const Reader of(kernel.get());
        const Object how = of.object("how");
        char* bytes = nullptr;
        Py_ssize_t size = 0;
        if (PyBytes_AsStringAndSize(how.get(), &bytes, &size) != 0) throw python_error();
        value.kernel = {reinterpret_cast<BsEncodePlanes*>(of.bits("encode")),
                        reinterpret_cast<BsDecodePlanes*>(of.bits("decode")), std::string(bytes, static_cast<size_t>(size)),
                        of.integer("nbytes"), of.object("encoded")};
    }
    if (const Object zvc = read.object("zvc"); !zvc.is_none()) {
        const Reader of(zvc.get());
        value.zvc = {of.integer("runs"), of.integer("run"), of.integer("step"), of.integer("most_nonzeros"),
                     of.integer("chunks")};
    }
    value.has_view = read.flag("has_view");
    if (value.program == Program::remake) value.tree = tree_of(read.object("tree").get());
    value.text = read.text("text");
    return value;
}

NodeCheck node_of(PyObject* object) {
    const Reader read(object);
    return {read.number("result"), read.number("behind"), read.numbers("path"), reinterpret_cast<const void*>(read.bits("type")),
            read.numbers("saves"), read.object("asked")};
}

Argument argument_of(PyObject* object) {
    Argument argument;
    if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
        argument.what = Argument::What::sequence;
        argument.constant = Object(reinterpret_cast<PyObject*>(Py_TYPE(object)));
        for (Py_ssize_t index = 0; index < PySequence_Size(object); ++index)
            argument.items.push_back(argument_of(Object::taken(PySequence_GetItem(object, index)).get()));
    } else if (PyObject_HasAttrString(object, "offset") && PyObject_HasAttrString(object, "kind")) {  // a Slot
        const Reader read(object);
        argument.what = Argument::What::tensor;
        argument.constant = read.object("kind");
        argument.layout = layout_at(read);
    } else {
        argument.constant = Object(object);
    }
    return argument;
}

Noted noted_of(PyObject* object) {
    Noted noted;
    if (object == Py_None) return noted;
    const Reader read(object);
    noted.is_there = true;
    read.each("args", [&](PyObject* item) { noted.args.push_back(argument_of(item)); });
    const Object kwargs = read.object("kwargs");
    PyObject *name, *item;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs.get(), &at, &name, &item);) {
        noted.names.emplace_back(name);
        noted.named.push_back(argument_of(item));
    }
    read.each("made", [&](PyObject* each) {
        const Reader made(each);
        noted.made.push_back({layout_at(made, "spec", nullptr), made.number("register"), made.number("output"), made.number("saved")});
    });
    noted.in_place = read.flag("in_place");
    noted.draws = read.flag("draws");
    noted.is_all = read.object("chosen").is_none();
    if (!noted.is_all) noted.chosen = read.numbers("chosen");
    noted.registers = read.numbers("registers");
    noted.shared = read.numbers("shared");
    noted.referenced = read.numbers("referenced");
    noted.needs_grad = read.numbers("needs_grad");
    noted.mean = read.number("mean");
    noted.invstd = read.number("invstd");
    const Object autocast = read.object("autocast");
    noted.has_autocast = !autocast.is_none();
    if (noted.has_autocast) noted.autocast = reinterpret_cast<THPDtype*>(autocast.get())->scalar_type;
    noted.settings = read.bits("number");
    noted.wanted = read.object("settings");
    return noted;
}

Call call_of(PyObject* object) {
    const Reader read(object);
    Call found{read.object("function"),
               read.number("first"),
               read.number("saves"),
               {},
               read.numbers("unknown"),
               noted_of(read.object("noted").get()),
               noted_of(read.object("cast").get())};
    read.each("nodes", [&](PyObject* node) { found.nodes.push_back(node_of(node)); });
    return found;
}

void mix(uint64_t& all, uint64_t next) { all = (all ^ next) * 0x9E3779B97F4A7C15ULL + (all >> 29); }

}  // namespace

long Timing::still_held(long age) {
    held = std::max(held, age);
    return gone > age ? gone : 0;
}

void Timing::let_go(long age) {
    constexpr long SETTLED = 16;  // as in place.py
    settled = age == gone && gone == held + 1 ? settled + 1 : 0;
    if (age <= held || settled == SETTLED) held = settled = 0;
    gone = age;
    delay = std::max(1L, held + (age - held + 1) / 2);
}

std::shared_ptr<const Script> read_script(PyObject* given) {
    const Reader read(given);
    auto script = std::make_shared<Script>();
    read.each("saves", [&](PyObject* item) { script->saves.push_back(save_of(item)); });
    read.each("values", [&](PyObject* item) {
        const Reader of(item);
        script->values.push_back(value_of(item));
        script->timings.push_back({of.integer("delay"), of.integer("held"), of.integer("gone"), of.integer("settled"),
                                    of.integer("spared"), of.integer("spares")});
    });
    read.each("calls", [&](PyObject* item) { script->calls.push_back(call_of(item)); });
    read.each("copied", [&](PyObject* x) { script->copied.emplace_back(THPVariable_Unpack(x).getIntrusivePtr()); });
    script->registers = read.number("registers");
    script->min_nbytes = read.integer("min_nbytes");
    script->fetching = static_cast<Fetching>(read.number("fetching"));
    return script;
}

uint64_t settings_now() {
    const at::Context& context = at::globalContext();
    uint64_t all = 0;
    volatile double smallest = 5e-324, one = 1.0;
    for (const bool flag : {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
                            context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(),
                            context.userEnabledMathSDP(), context.userEnabledCuDNNSDP(),
                            context.allowFP16BF16ReductionMathSDP(), context.userEnabledMkldnn(),
                            context.deterministicMkldnn(), context.userEnabledNNPACK(),
                            context.allowFP16ReductionCPU(), context.userEnabledCuDNN(), context.deterministicCuDNN(),
                            context.benchmarkCuDNN(), context.allowFP16AccumulationCuBLAS(), smallest * one == 0.0})
        mix(all, flag);
    mix(all, static_cast<uint64_t>(at::get_num_threads()));
    mix(all, static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
    for (const auto backend : {at::Float32Backend::MKLDNN, at::Float32Backend::CUDA})
        for (const auto operation : {at::Float32Op::MATMUL, at::Float32Op::CONV, at::Float32Op::RNN})
            mix(all, static_cast<uint64_t>(at::globalContext().float32Precision(backend, operation)));
    for (const auto backend : at::globalContext().sDPPriorityOrder()) mix(all, static_cast<uint64_t>(backend));
    return all;
}

}  // namespace backstash::replay
