// What a forward pass has taught, as frozen data: which tensors autograd saves in it, in order, which functions save
// them, and what becomes of each value. See replay/program.py, which hands it over.
#pragma once

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include "../planes.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace backstash::replay {

// A reference to an object of Python that data shares.
class Object {
public:
    Object() = default;
    explicit Object(PyObject* borrowed) : object_(Py_XNewRef(borrowed)) {}
    Object(const Object& other) : object_(Py_XNewRef(other.object_)) {}
    Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Object& operator=(Object other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Object() { Py_XDECREF(object_); }
    static Object taken(PyObject* owned) {  // throws where there is none
        if (owned == nullptr) throw python_error();
        Object made;
        made.object_ = owned;
        return made;
    }
    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    bool is_none() const { return object_ == nullptr || object_ == Py_None; }

private:
    PyObject* object_ = nullptr;
};

template <class... Arguments>
Object call(PyObject* function, Arguments... arguments) {
    return Object::taken(PyObject_CallFunctionObjArgs(function, arguments..., nullptr));
}

// How a tensor looks: its TensorSpec, and where it begins in its storage.
struct Layout {
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0, nbytes = 0;
    Object spec;

    bool has_shape(const at::Tensor& x) const { return x.sizes() == sizes && x.strides() == strides; }
    bool fits(const at::Tensor& x) const {
        return x.scalar_type() == dtype && x.storage_offset() == offset && has_shape(x) && x.device() == device;
    }
};

enum class Kind { parameter, small, loose, shape, value, sparse };

// Whether a kernel of the package redeem reads a saved tensor.
enum class Claim { never, always, if_no_room };

// One tensor that autograd saves.
struct Save {
    Kind kind;
    Layout layout;
    int64_t storage_nbytes, gap;  // from the number of the node that saves it to the next one's
    int value, call;              // which value it is of, and in which call it is saved; -1 for none
    bool is_builtin, is_pinned, reads_value, reads_sign, may_claim_weight, may_claim_input;
    Claim as_held, as_stored, as_bits;
    const void* parameter;        // the address of its storage
    Object facts, mask;
    Object read_as;               // the key by which the prefetcher is told that it is read; None: it is told of nothing
};

enum class Program { hold, encode, remake, ask, move };

// What the prefetcher is told: how far backward has come, by what is read on the device, or all that is read.
enum class Fetching { nothing, place, key };

// One input of a call that is repeated: a tensor that was copied, what a value holds, or what another call makes.
struct Given {
    enum class From { copy, value, call } from;
    int number;  // of the copy among the call's inputs, of the value, or of the tree
    Layout layout;
};

struct Affine;
struct OnePass;

// A call that is repeated, and its inputs.
struct Tree {
    int call = 0, made = 0;      // and which of what that makes
    int inside = -1;             // the number of the tensor that it saves inside; -1 for a result
    std::vector<Given> given;
    std::vector<Tree> inner;
    Object function, as_called;  // what is called, and its Call
    Object args, kwargs;         // with which it is called, where that is all that there is to do; else none
    std::vector<int> places;     // of its inputs among the former
    Layout result;
    std::shared_ptr<const Affine> affine;  // how it is made in one pass; null where it is not
    std::shared_ptr<const OnePass> one_pass;
};

// Another value that Python has a kernel for: what it reads, and what fills the result.
struct OnePass {
    struct Operand {
        int call, place;  // -1 for a value; a place of -1 is the call's mean, and of -2 its inverse deviation
        Given value;
    };
    std::vector<Operand> operands;
    Object make;
};

// activation(batch_norm(source) + residual) as one kernel makes it.
struct Affine {
    int norm = 0;                     // the call, whose statistics and copies are read
    int weight = -1, bias = -1;       // among its copies
    Given source, residual;
    bool has_residual = false;
    Tree inner;                       // of the residual, where that is made
    int second = -1, second_weight = -1, second_bias = -1;  // of a residual that is a batch norm too
    int activation = 0;
    double lo = 0.0, hi = 0.0;
    int64_t outer = 0, channels = 0, inside = 0;
    Object kernel;                    // off the CPU
};

// Planes of zvc: the sample that is looked at, how many of its elements may not be zero, and the elements of offsets.
struct Zvc {
    int64_t runs, run, step, most_nonzeros, chunks;
};

// How kernels here make planes that have one size, and read them.
struct PlaneKernel {
    BsEncodePlanes* encode;
    BsDecodePlanes* decode;
    std::string how;
    int64_t nbytes;
    Object encoded;  // makes what readers of planes are given
};

// What becomes of a value.
struct Value {
    Program program;
    int members, strongest, contents;  // how many saves, which is the strongest, and the register of what it holds
    int64_t nbytes;
    bool is_whole, is_exact_form;
    bool shares;                       // what is made again is held for all who read it
    Layout whole, decoded;             // the whole storage, and as it is decoded
    Object key, codec, mask, ways;     // ways: what Python knows of the codec
    std::optional<PlaneKernel> kernel;  // by which it is encoded and decoded here; and by those of zvc
    std::optional<Zvc> zvc;
    bool has_view;                     // whether what is encoded may be read as a view of a plane
    bool is_moved() const { return program == Program::move; }
    Tree tree;
    std::string text;
};

// A node that a call has made, which saves tensors: found from the call's results, and told by its type.
struct NodeCheck {
    int result, behind;  // the call's result, or another one of its nodes, behind which it is found
    std::vector<int> path;
    const void* type;
    std::vector<int> saves;
    Object asked;  // names of scalars, and what they were
};

// An argument of a call: a tensor that looks like that, a sequence of some, or a constant.
struct Argument {
    enum class What { tensor, sequence, constant } what = What::constant;
    Layout layout;
    Object constant;  // or the type of the tensor, or of the sequence
    std::vector<Argument> items;
};

// What a call makes: one of its results, or a tensor that it saves.
struct Made {
    Layout layout;
    int contents;       // the register of what it holds
    int output, saved;  // which of several results it is, and its save; -1 for the only one, and for a result
};

// What a call that makes values again has to be like.
struct Noted {
    bool is_there = false;
    std::vector<Argument> args, named;  // and by which names the latter are given
    std::vector<Object> names;
    std::vector<Made> made;
    bool in_place = false, draws = false;
    bool is_all = true;                 // whether all tensors among the arguments are read
    std::vector<int> chosen, registers;  // which of these are read, and what each holds; -1 for a copy
    std::vector<int> shared;            // whether it is a parameter of the model, whose copies calls share
    std::vector<int> referenced;        // whether it is a parameter that is read where it is
    std::vector<int> needs_grad;        // whether autograd followed it; empty where that makes no difference
    int mean = -1, invstd = -1;        // saves, from the first one of the call
    bool has_autocast = false;
    at::ScalarType autocast = at::kFloat;
    uint64_t settings = 0;  // a number, and as Python knows them
    Object wanted;
};

struct Call {
    Object function;
    int first, saves;
    std::vector<NodeCheck> nodes;
    std::vector<int> unknown;  // saves by nodes that are not found
    Noted noted, cast;  // how its results and what it saves inside are made, and how what it saves is converted
};

// What is known of how long the program holds a value: see stash/place.py. It is learned on.
struct Timing {
    long delay, held, gone, settled;
    long spared, spares;  // in how many passes codecs that have declined the value are asked again, and then; 0 for never
    long still_held(long age);
    void let_go(long age);
};

struct Script {
    mutable std::vector<Timing> timings;  // by value
    mutable std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> copied;  // parameters that the latest pass has copied
    std::vector<Save> saves;
    std::vector<Value> values;
    std::vector<Call> calls;
    int registers = 0;
    int64_t min_nbytes = 0;
    Fetching fetching = Fetching::nothing;
    // The numbers of conversions come behind those of all calls.
    const Noted& noted(int number) const {
        const int count = static_cast<int>(calls.size());
        return number < count ? calls[number].noted : calls[number - count].cast;
    }
};

// Reads what Python hands over; throws where it is not that.
std::shared_ptr<const Script> read_script(PyObject* given);

// A number that is the same as long as nothing has changed on which the bits of results depend.
uint64_t settings_now();

}  // namespace backstash::replay
