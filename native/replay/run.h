// A forward pass that goes as an earlier one went, and what backward reads of it.
#pragma once

#include "program.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace backstash::replay {

constexpr int64_t ELEMENTS = 64;       // of a sample, as in sample.py
constexpr int64_t SMALLEST = 1 << 18, LARGE = 1 << 20;  // as in buffers.py
constexpr int64_t HUGE_FROM = 4 << 20;  // as in ops/cpu/library.py

struct Slot;
struct Session;

// What autograd holds in the place of a tensor that it saves.
struct Packed {
    PyObject_HEAD
    std::shared_ptr<const Script> script;
    std::shared_ptr<Session> session;
    std::shared_ptr<Slot> slot;  // null where the tensor is held as it is and by no value
    const Save* save;
    at::Tensor dense;            // where it is held as it is
    c10::VariableVersion counter;  // of one of which only the shape is held
    c10::weak_intrusive_ptr<at::TensorImpl> original;
    bool has_original;
    int64_t version, modified;   // and the version at which it was found, -1 for none
    int64_t nbytes;              // of the tensor when it was saved
    int64_t node;                // the number of the node that has saved it
    int round;
    PyObject* delegate;          // a Saved that has taken its place
};

extern PyTypeObject packed_type;
inline bool is_packed(PyObject* object) { return Py_TYPE(object) == &packed_type; }

// What the calls of a tree have read, each by itself.
struct Inputs {
    std::vector<at::Tensor> tensors;  // copies, in the order of what the call reads; others are undefined
    std::vector<int64_t> versions;    // of those that are parameters where they are; -1 for copies
    bool is_stale = false;            // one of these was changed since
    at::Tensor mean, invstd;
    Object random_state;
    mutable std::vector<std::weak_ptr<Slot>> inside;  // values that the call saves inside, which it is to make again
};

enum class State { held, stored, remade };

// What a value has taken in a pass.
struct Taken {
    bool is_there = false;
    bool is_given_back = false;  // to the long way, which accounts for it
    double encode_seconds = 0.0, decode_seconds = 0.0, stall_seconds = 0.0;
    long decodes = 0;
    int64_t nbytes = -1;         // of its planes, wherever they are; -1 for none
};

// A value: the data of one storage, and the tensors that autograd has saved of it.
struct Slot : std::enable_shared_from_this<Slot> {
    Slot(std::shared_ptr<const Script> script, std::shared_ptr<Session> session, const Value& value, int number)
        : script(std::move(script)), session(std::move(session)), value(value), number(number) {}
    ~Slot();

    std::shared_ptr<const Script> script;
    std::shared_ptr<Session> session;
    const Value& value;
    int number;
    State state = State::held;
    std::vector<Packed*> members;
    c10::StorageImpl* storage = nullptr;  // as long as it is pending
    bool is_pending = true, is_asked = false;  // is_asked: on the long way, in this pass alone
    bool is_queued = false;               // to be looked at
    bool is_unfused = false;              // a kernel's result had other bits than its sample
    long born = 0;
    at::Tensor guard;                     // what others are made from, where it is held as it is
    int64_t guard_version = 0;
    int64_t held_nbytes = 0;
    Object encoded;                       // or a Form, whose planes are in another store
    at::Tensor planes;                    // in one piece; or the mask of zvc, whose other planes these are
    at::Tensor offsets, values;
    at::Tensor bits;                      // the mask of what was decoded, for those who read no more
    bool is_mask = false;                 // nothing else is left of it
    const Save* bits_of = nullptr;
    std::vector<std::shared_ptr<Slot>> leaves;             // by the number of their value
    std::vector<std::weak_ptr<Slot>> children;             // values that are made from it, which share
    std::vector<std::pair<int, std::shared_ptr<const Inputs>>> inputs;  // by the number of the call
    std::string sample;
    at::Tensor device_sample, picked;     // on an accelerator; and the same elements of what a kernel has made again
    int64_t begin = 0, step = 1;
    at::Tensor made;
    int round = 0, unread = 0;
    std::vector<std::pair<at::Tensor, int64_t>> written;
    std::shared_ptr<std::vector<Taken>> all_taken;
    Taken& taken() const { return (*all_taken)[number]; }
};

// A piece of memory that values are decoded into: see stash/buffers.py.
struct Buffer {
    at::Tensor memory, whole;
    std::weak_ptr<Slot> owner;
    bool has_owner = false;
    int64_t version = 0;
    int64_t nbytes() const { return memory.numel(); }
    bool is_free() const;
    bool is_awaited() const;
};

class Buffers {
public:
    at::Tensor take(const Layout& layout, at::ScalarType dtype, bool waits);
    at::Tensor holding(const Slot& owner) const;
    void filled(const std::shared_ptr<Slot>& owner, const at::Tensor& whole);
    void forget(const Slot& owner);
    void part_with(const at::Tensor& whole);
    void release(const Slot& owner);
    void lend(const std::shared_ptr<Slot>& owner, const at::Tensor& whole);
    void adopt(const at::Tensor& dead);
    void shrink(int64_t keeps = 0);
    void clear();
    bool is_empty() const { return buffers_.empty(); }
    bool is_planned = false;  // as in stash/buffers.py
    int64_t nbytes() const;

private:
    std::vector<Buffer> buffers_;
    int64_t keeps_ = 0;
    std::weak_ptr<Slot> borrower_;  // what it holds in memory of its own is lent, until the next one or the next decoding
    at::Tensor lent_;
    int64_t lent_version_ = 0;
};

// Functions of Python, by their names; see replay/replaying.py.
#define BACKSTASH_CALLBACKS(X) \
    X(take_in) X(read) X(begin_backward) X(claim) X(claim_weight) X(claim_input) X(modified) X(freed) X(assigned) X(stand_in) \
    X(encode) X(decode) X(planes_nbytes) X(encode_bits) X(decode_bits) X(distrust) X(repeat) X(repeat_inside) X(enter_settings) \
    X(leave_settings) X(take_back) X(name) X(random_state) X(number_of) X(compare) X(rare) X(before_end) X(affine) X(others) \
    X(check_reference) X(fetch) X(view) X(told) X(damaged) X(touched)

// Memory for samples on an accelerator, many in one allocation.
struct Rows {
    at::Tensor slab;
    int64_t used = 0, stream = -1;
    at::Tensor take(const at::Tensor& like, int64_t number);
};

// A sample that is compared at the end of a backward pass: see comparing.py.
struct Comparison {
    at::Tensor found, expected;
    Object key, spec;
};

// What forward passes of one Session share, and what outlives it.
struct Session {
#define BACKSTASH_DECLARE(name) Object name;
    BACKSTASH_CALLBACKS(BACKSTASH_DECLARE)
#undef BACKSTASH_DECLARE
    Object lock;
    int64_t nbytes = 0, remade_nbytes = 0, peak_nbytes = 0, stashed_nbytes = 0, others_nbytes = 0;
    int64_t alive = 0;
    std::atomic<bool> is_unpacked = false;
    bool stops = false;  // the policy says something else from now on
    // By the storage of what the program may still change, in this pass or later, the values that are made again from it;
    // and whether there are such values on the long way.
    std::unordered_map<const void*, std::vector<std::weak_ptr<Slot>>> leaning;
    bool tells = false;
    Buffers buffers;
    Rows rows;                                // of what the backward pass that runs makes again
    std::map<int64_t, std::vector<Comparison>> comparisons;  // by the number of the backward pass
    int64_t compared_stream = -1;             // on which the latest one was put aside

    void add(int64_t more);
    bool has_room(int64_t more);
    at::Tensor take(const Layout& layout, at::ScalarType dtype);  // as decode.take_memory
};

// What a storage held at one version.
struct Register {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    int64_t version = -1;
    bool is_known = false, is_bad = false;
};

struct Snapshot {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Layout layout;
    int64_t version;
    at::Tensor copy;
};

// What autograd saves in a known call, as it is then: see saving.cpp.
struct Kept {
    Kept() = default;
    Kept(const Kept&) = delete;
    ~Kept();
    const Save* save = nullptr;
    at::Tensor dense;
    c10::weak_intrusive_ptr<at::TensorImpl> original{c10::intrusive_ptr<at::TensorImpl>()};
    bool has_original = false;
    bool is_unsure = false;        // whether it is a parameter: what it is a part of tells
    int64_t version = 0, nbytes = 0, node = 0;
    std::atomic<PyObject*> packed = nullptr;  // what has taken its place since
    PyObject* unpack = nullptr;    // reads that, where it is no Packed
};

struct Opened;

// A forward pass in progress.
struct Run {
    std::shared_ptr<const Script> script;
    std::shared_ptr<Session> session;
    int64_t number = 0;  // of the step, which decides on samples
    size_t next_save = 0, next_call = 0;
    long clock = 0;
    bool in_call = false, is_broken = false, has_copied = false;
    bool differs = false;     // what was saved last is not what the script says
    Opened* opened = nullptr;  // the call in progress, which puts aside what is saved in it
    Rows rows;
    std::vector<std::weak_ptr<Slot>> values;  // which their saved tensors hold, and what is made from them
    std::shared_ptr<std::vector<Taken>> taken = std::make_shared<std::vector<Taken>>();
    std::vector<Register> registers;
    std::vector<std::shared_ptr<const Inputs>> inputs;
    std::map<long, std::vector<int>> due;
    std::vector<int> order;  // of the values that are decided on
    std::vector<Object> current;  // packed in the call in progress
    std::unordered_map<const void*, int> pending;
    std::unordered_map<const void*, std::vector<Snapshot>> snapshots;
    std::unordered_map<const void*, std::vector<std::weak_ptr<Inputs>>> referenced;
    std::unordered_set<const void*> escaped;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> kept;  // so that no address of `escaped` is given away
};

// reading.cpp
at::Tensor whole_of(const std::shared_ptr<Slot>& slot, bool ahead, bool borrows);  // of a value that is not held
at::Tensor fetch(const Slot& reader, const Given& given);
Object planes_in(const Slot& slot);  // of what is encoded, from wherever they are
at::Tensor run_tree(Slot& slot, const Tree& tree, bool is_own, uint64_t settings);  // which those of now are
void hold_again(const std::shared_ptr<Slot>& slot);  // dense, and nothing else of it
PyObject* unpack(Packed* packed);
PyObject* read_whole(Packed* packed);
void release(const std::shared_ptr<Slot>& slot);
bool is_in_backward();
bool was_assigned(const Packed* packed);
int64_t least_large_weight();          // elements of the smallest one
bool may_await_weight_of(int64_t least);
bool may_await_large_weight();
extern PyObject *Accumulation, *Table;  // the names of redeem/accumulation.py and redeem/table.py

// kernels of the library, by their addresses
struct Kernels {
    void (*affine)(const void*, const void*, const void*, const void*, const void*, const void*, void*, int64_t, int64_t,
                   int64_t, int, double, double, const void*, void*, int) = nullptr;
    int (*advise_huge)(void*, int64_t) = nullptr;
    void (*look)(const void*, int, int64_t, int64_t, int64_t, int64_t*, int64_t*) = nullptr;
    int64_t (*zvc_mark)(const void*, int64_t, int, void*, void*, int) = nullptr;
    void (*zvc_gather)(const void*, int64_t, int, const void*, const void*, void*, int64_t, int) = nullptr;
    int (*zvc_decode)(const void*, const void*, const void*, int64_t, void*, int64_t, int, int) = nullptr;
};
extern Kernels kernels;

inline void advise_huge(const at::Tensor& fresh) {  // see ops/cpu/library.advise_huge
    const auto nbytes = static_cast<int64_t>(fresh.nbytes());
    if (nbytes >= HUGE_FROM && kernels.advise_huge != nullptr) kernels.advise_huge(fresh.data_ptr(), nbytes);
}

int64_t stream_of(const at::Tensor& x);                         // the current one's number, on its device
at::Tensor sampled(const Slot& slot, const at::Tensor& whole);  // the elements that its sample is of

class WithoutGil {
public:
    explicit WithoutGil(int64_t nbytes) : state_(nbytes >= (64 << 10) ? PyEval_SaveThread() : nullptr) {}
    ~WithoutGil() {
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }

private:
    PyThreadState* state_;
};

// What runs as long as it is there is told to no function mode: see torch_internals.no_torch_function.
class Unheard {
public:
    Unheard() { Modes::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
    ~Unheard() { Modes::set_disabled_state(before_); }

private:
    using Modes = at::impl::PythonTorchFunctionTLS;
    at::impl::TorchFunctionDisabledState before_ = Modes::get_disabled_state();
};

class Locked {
public:
    explicit Locked(PyObject* lock);
    ~Locked();

private:
    PyObject* lock_;
};

inline c10::StorageImpl* storage_of(const at::Tensor& x) { return x.storage().unsafeGetStorageImpl(); }

inline int64_t version_of(const at::Tensor& x) { return static_cast<int64_t>(x._version()); }

inline Object wrapped(const at::Tensor& x) { return Object::taken(THPVariable_Wrap(x)); }

using NodePointer = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;  // another one in each torch

// What x.detach() returns, without a way through torch's dispatcher.
inline at::Tensor detached(const at::Tensor& x) {
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

inline int threads_for(int64_t nbytes) { return nbytes < (256 << 10) ? 1 : at::get_num_threads(); }

}  // namespace backstash::replay
