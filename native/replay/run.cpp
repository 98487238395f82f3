// A forward pass that goes as an earlier one went: what autograd saves is compared with what it saved then, and each value
// becomes what its program says. Where anything differs, the pass goes on the long way: see replay/replaying.py.
#include "replayer.h"
#include "transforms.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/autocast_mode.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace backstash::replay {
namespace {

constexpr int64_t SNAPSHOT_NBYTES = 1 << 20;  // as in contents.py
constexpr uint64_t SPREAD = 0x9E3779B1;       // as in sample.py

using Clock = std::chrono::steady_clock;

c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const at::Tensor& x) {
    return x.storage().getWeakStorageImpl();
}

// The same content as before, or the first one; else the register is of no use.
void meet(Run& run, int number, const at::Tensor& x, int64_t version) {
    if (number < 0) return;
    Register& known = run.registers[number];
    if (run.escaped.contains(storage_of(x))) known.is_bad = true;
    if (!known.is_known) {
        known.storage = weak_storage(x);
        known.version = version;
        known.is_known = true;
    } else if (known.storage._unsafe_get_target() != storage_of(x) || known.version != version) {
        known.is_bad = true;
    }
}

void look_again(Run& run, int number, long when) { run.due[when].push_back(number); }

// A value is known now, and to be looked at.
void queue(Run& run, const Packed* packed) {
    Slot* slot = packed->slot.get();
    if (slot == nullptr || std::exchange(slot->is_queued, true)) return;
    if (slot->value.program == Program::hold && !slot->is_asked) return;
    run.order.push_back(slot->number);
    look_again(run, slot->number, run.clock + run.script->timings[slot->number].delay);
}

// What was saved in the call that has returned is known now.
void verify(Run& run, Packed* packed) {
    const Save& save = *packed->save;
    if (save.kind == Kind::shape) {
        packed->counter = packed->dense.unsafeGetTensorImpl()->version_counter();
        packed->dense = at::Tensor();
        packed->has_original = false;
    } else if (packed->slot != nullptr) {
        meet(run, packed->slot->value.contents, packed->dense, packed->version);
    }
}

const void* type_of(const torch::autograd::Node& node) { return typeid(node).name(); }

// The result of that number; null where there is none.
PyObject* item_of(PyObject* result, int number) {
    if (!PyTuple_Check(result) && !PyList_Check(result)) return number == 0 ? result : nullptr;
    return number < PySequence_Fast_GET_SIZE(result) ? PySequence_Fast_GET_ITEM(result, number) : nullptr;
}

// The node that has made a result, or that one of several; null where it is none of autograd's.
NodePointer node_behind(PyObject* result, int number) {
    result = item_of(result, number);
    return result != nullptr && is_plain(result) ? THPVariable_Unpack(result).grad_fn() : nullptr;
}

// Whether the nodes behind a result are those that have saved the tensors of a call, each its own.
bool are_nodes(Run& run, const Call& known, PyObject* result) {
    std::vector<NodePointer> nodes;
    for (const NodeCheck& check : known.nodes) {
        auto node = check.behind < 0 ? node_behind(result, check.result) : nodes[check.behind];
        for (const int edge : check.path) {
            if (!node || static_cast<size_t>(edge) >= node->num_outputs()) return false;
            node = node->next_edge(edge).function;
        }
        if (!node || type_of(*node) != check.type) return false;
        nodes.push_back(node);
        for (const int save : check.saves) {
            const size_t index = static_cast<size_t>(save - known.first);
            auto* packed = reinterpret_cast<Packed*>(run.current[index].get());
            if (packed->node != static_cast<int64_t>(node->sequence_nr())) return false;
            if (packed->has_original && packed->save->kind != Kind::parameter) {  // autograd keeps an alias of its result
                const auto original = packed->original.lock();
                if (original) {
                    const at::Tensor x(original);
                    if (x.grad_fn() == node) packed->has_original = false;
                }
            }
        }
        if (PyTuple_GET_SIZE(check.asked.get()) == 0) continue;
        const Object wrapper = Object::taken(torch::autograd::functionToPyObject(node));
        for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(check.asked.get()); ++index) {
            PyObject* pair = PyTuple_GET_ITEM(check.asked.get(), index);
            const Object now = call(ScalarOf, wrapper.get(), PyTuple_GET_ITEM(pair, 0));
            const int same = PyObject_RichCompareBool(now.get(), PyTuple_GET_ITEM(pair, 1), Py_EQ);
            if (same < 0) throw python_error();
            if (!same) return false;
        }
    }
    return true;
}

bool fits(const Argument& known, PyObject* arg, const std::vector<c10::StorageImpl*>& made, bool aliases,
          std::vector<at::Tensor>& found) {
    switch (known.what) {
        case Argument::What::tensor: {
            if (reinterpret_cast<PyObject*>(Py_TYPE(arg)) != known.constant.get() || !is_plain(arg)) return false;
            const at::Tensor& x = THPVariable_Unpack(arg);
            if (!is_ordinary(x) || !known.layout.fits(x)) return false;
            if ((std::find(made.begin(), made.end(), storage_of(x)) != made.end()) != aliases) return false;
            found.push_back(x);
            return true;
        }
        case Argument::What::sequence: {
            if (reinterpret_cast<PyObject*>(Py_TYPE(arg)) != known.constant.get()) return false;
            const Py_ssize_t size = PySequence_Size(arg);
            if (size != static_cast<Py_ssize_t>(known.items.size())) return false;
            for (Py_ssize_t index = 0; index < size; ++index) {
                const Object item = Object::taken(PySequence_GetItem(arg, index));
                if (!fits(known.items[index], item.get(), made, false, found)) return false;
            }
            return true;
        }
        default: break;
    }
    PyObject* constant = known.constant.get();
    if (arg == constant) return true;
    if (Py_TYPE(arg) != Py_TYPE(constant)) return false;
    if (PyFloat_CheckExact(arg)) {
        const double number = PyFloat_AS_DOUBLE(arg), other = PyFloat_AS_DOUBLE(constant);
        return std::memcmp(&number, &other, sizeof number) == 0;
    }
    const int same = PyObject_RichCompareBool(arg, constant, Py_EQ);
    if (same < 0) PyErr_Clear();
    return same == 1;
}

// The tensors that a call has read, if it is like the one that was noted; whether it is.
bool fits_call(const Noted& noted, PyObject* args, PyObject* kwargs, const std::vector<c10::StorageImpl*>& made,
               std::vector<at::Tensor>& read) {
    if (PyTuple_GET_SIZE(args) != static_cast<Py_ssize_t>(noted.args.size())) return false;
    const Py_ssize_t named = kwargs == nullptr ? 0 : PyDict_Size(kwargs);
    if (named != static_cast<Py_ssize_t>(noted.named.size())) return false;
    std::vector<at::Tensor> found;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(args); ++index)
        if (!fits(noted.args[index], PyTuple_GET_ITEM(args, index), made, noted.in_place && index == 0, found)) return false;
    if (named != 0) {
        PyObject *name, *arg;
        size_t index = 0;
        for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &arg); ++index) {
            const int same = PyObject_RichCompareBool(name, noted.names[index].get(), Py_EQ);
            if (same <= 0 || !fits(noted.named[index], arg, made, false, found)) return PyErr_Clear(), false;
        }
    }
    if (noted.is_all) {
        read = std::move(found);
    } else {
        for (const int index : noted.chosen) read.push_back(found.at(index));
    }
    return read.size() == noted.registers.size();
}

// A copy of a tensor that a call reads, as it is now; calls share the copy of a parameter. See Contents._snapshot.
at::Tensor copy_of(Run& run, const at::Tensor& x, bool is_shared);

void keep_copy(Run& run, const at::Tensor& x, at::Tensor copy) {
    Layout layout;
    layout.dtype = x.scalar_type();
    layout.device = x.device();
    layout.sizes = x.sizes().vec();
    layout.strides = x.strides().vec();
    layout.offset = x.storage_offset();
    run.snapshots[storage_of(x)].push_back({weak_storage(x), std::move(layout), version_of(x), std::move(copy)});
}

// Copies what the latest pass has copied by one operation: Note: [copied together] in remake/contents.py.
void copy_together(Run& run, const at::Tensor& wanted) {
    if (run.has_copied) return;
    run.has_copied = true;
    std::vector<at::Tensor> found, flat;
    std::vector<int64_t> sizes;
    for (const auto& each : std::exchange(run.script->copied, {})) {
        const auto alive = each.lock();
        if (!alive) continue;
        at::Tensor x(alive);
        const bool is_alike = x.device() == wanted.device() && x.scalar_type() == wanted.scalar_type();
        if (!is_alike || !is_ordinary(x) || !x.is_contiguous() || x.numel() == 0) continue;
        if (static_cast<int64_t>(x.nbytes()) > SNAPSHOT_NBYTES || x.storage().nbytes() < x.nbytes()) continue;
        flat.push_back(x.dim() == 1 ? x : x.view(-1));
        sizes.push_back(x.numel());
        found.push_back(std::move(x));
    }
    if (found.empty()) return;
    const auto copies = at::cat(flat).split_with_sizes(sizes);
    for (size_t index = 0; index < found.size(); ++index) {
        const at::Tensor& x = found[index];
        keep_copy(run, x, x.dim() == 1 ? copies[index] : copies[index].view(x.sizes()));
        run.script->copied.emplace_back(found[index].getIntrusivePtr());
    }
}

at::Tensor known_copy(Run& run, const at::Tensor& x) {
    for (const Snapshot& each : run.snapshots[storage_of(x)])
        if (each.storage._unsafe_get_target() == storage_of(x) && each.version == version_of(x) && each.layout.fits(x))
            return each.copy;
    return {};
}

at::Tensor copy_of(Run& run, const at::Tensor& x, bool is_shared) {
    if (static_cast<int64_t>(x.nbytes()) > SNAPSHOT_NBYTES) return {};
    if (!is_shared) return x.detach().clone();
    at::Tensor copy = known_copy(run, x);
    if (copy.defined()) return copy;
    if (!x.is_cpu()) {
        copy_together(run, x);
        copy = known_copy(run, x);
        if (copy.defined()) return copy;
        run.script->copied.emplace_back(x.getIntrusivePtr());
    }
    copy = x.detach().clone();
    keep_copy(run, x, copy);
    return copy;
}

bool has_autocast_of(const Noted& noted) {
    const auto type = noted.made.front().layout.device.type();
    if (!at::autocast::is_autocast_enabled(type)) return !noted.has_autocast;
    return noted.has_autocast && at::autocast::get_autocast_dtype(type) == noted.autocast;
}

// What a call that is noted makes: a result, or a tensor that it has saved, as a conversion returned it. Undefined where
// it is not as it was.
at::Tensor made_by(const Run& run, const Made& made, int first, PyObject* result) {
    const Layout& layout = made.layout;
    const auto is_whole = [&](const at::Tensor& x) {
        return is_ordinary(x) && static_cast<int64_t>(x.storage().nbytes()) == layout.nbytes;
    };
    if (made.saved >= 0) {
        const at::Tensor& dense = reinterpret_cast<const Packed*>(run.current[made.saved - first].get())->dense;
        if (!dense.defined() || !is_whole(dense)) return {};
        return dense.as_strided(layout.sizes, layout.strides, layout.offset);
    }
    if (made.output >= 0) result = item_of(result, made.output);
    if (result == nullptr || !is_plain(result)) return {};
    const at::Tensor& x = THPVariable_Unpack(result);
    return is_whole(x) && layout.fits(x) ? x : at::Tensor();
}

// Notes how contents were made, if that is as it was.
void note(Run& run, int call, bool is_cast, PyObject* args, PyObject* kwargs, PyObject* result,
          const Object& random_state) {
    const Call& known = run.script->calls[call];
    const int number = is_cast ? call + static_cast<int>(run.script->calls.size()) : call;
    const Noted& noted = is_cast ? known.cast : known.noted;
    const at::NoGradGuard unrecorded;
    std::vector<at::Tensor> read, made;
    std::vector<c10::StorageImpl*> filled;
    const auto fail = [&] {
        for (const Made& each : noted.made) run.registers[each.contents].is_bad = true;
    };
    for (const Made& each : noted.made) {
        made.push_back(made_by(run, each, known.first, result));
        if (made.back().defined()) filled.push_back(storage_of(made.back()));
    }
    if (!fits_call(noted, args, kwargs, filled, read)) return fail();
    if (settings_now() != noted.settings || !has_autocast_of(noted)) return fail();
    auto inputs = std::make_shared<Inputs>();
    for (size_t index = 0; index < read.size(); ++index) {
        const at::Tensor& x = read[index];
        if (!noted.needs_grad.empty() && x.requires_grad() != (noted.needs_grad[index] != 0)) return fail();
        const bool is_before = noted.in_place && index == 0, is_reference = noted.referenced[index] != 0;
        inputs->versions.push_back(is_reference ? version_of(x) : -1);
        if (is_reference) {
            inputs->tensors.push_back(detached(x));
            run.referenced[storage_of(x)].push_back(inputs);
        } else if (noted.registers[index] < 0) {
            inputs->tensors.push_back(copy_of(run, x, noted.shared[index] != 0));
            if (!inputs->tensors.back().defined()) return fail();
        } else {
            meet(run, noted.registers[index], x, version_of(x) - is_before);
            inputs->tensors.emplace_back();
        }
    }
    if (noted.mean >= 0) {
        for (const auto& [save, target] : {std::make_pair(noted.mean, &inputs->mean), std::make_pair(noted.invstd, &inputs->invstd)}) {
            const auto* packed = reinterpret_cast<const Packed*>(run.current[save - known.first].get());
            if (!packed->dense.defined()) return fail();
            *target = detached(packed->dense);
        }
    }
    inputs->random_state = random_state;
    for (size_t index = 0; index < made.size(); ++index) {
        const int contents = noted.made[index].contents;
        if (made[index].defined()) {
            meet(run, contents, made[index], version_of(made[index]));
        } else {
            run.registers[contents].is_bad = true;
        }
    }
    run.inputs[number] = std::move(inputs);
}

bool is_orphaned(const Slot& slot) {
    size_t own = slot.guard.defined();
    for (const Packed* each : slot.members) {
        if (each->save->is_pinned) return false;  // a leaf is held as it is, in the memory that the program sees
        own += each->dense.defined();
    }
    return c10::raw::intrusive_ptr::use_count(slot.storage) == own;
}

at::Tensor whole_in(const Slot& slot, const at::Tensor& dense) {
    const Layout& whole = slot.value.whole;
    const bool is_itself = slot.value.is_whole && !slot.members.empty();
    return is_itself ? dense : dense.as_strided(whole.sizes, whole.strides, 0);
}

// Lets go of the dense data, which is stored in another form now.
void let_go(Slot& slot, int64_t nbytes) {
    for (Packed* each : slot.members) {
        each->dense = at::Tensor();
        each->has_original = false;
    }
    slot.session->add(nbytes - slot.held_nbytes);
    slot.held_nbytes = nbytes;
}

at::Tensor plane_of(int64_t numel, at::ScalarType dtype) {  // see ops/cpu/planes.new_plane
    at::Tensor plane = at::empty({numel}, dtype);
    advise_huge(plane);
    return plane;
}

// See codecs/zvc/cpu.py. Returns the bytes of the planes; -1 where the codec declines, by a sample.
int64_t encode_zvc(Slot& slot, const Zvc& zvc, const at::Tensor& whole) {
    const int64_t numel = whole.numel();
    const int width = static_cast<int>(whole.itemsize()), threads = threads_for(slot.value.nbytes);
    const void* from = whole.const_data_ptr();
    int64_t nonzeros = 0, patterns = 0, stored = 0;
    kernels.look(from, width, zvc.runs, zvc.run, zvc.step, &nonzeros, &patterns);
    if (nonzeros > zvc.most_nonzeros) return -1;
    slot.planes = plane_of((numel + 7) / 8, at::kByte);
    slot.offsets = at::empty({zvc.chunks}, at::kLong);
    void *mask = slot.planes.data_ptr(), *offsets = slot.offsets.data_ptr();
    {
        const WithoutGil running(slot.value.nbytes);
        stored = kernels.zvc_mark(from, numel, width, mask, offsets, threads);
    }
    slot.values = plane_of(stored, whole.scalar_type());
    void* values = slot.values.data_ptr();
    const WithoutGil running(slot.value.nbytes);
    kernels.zvc_gather(from, numel, width, mask, offsets, values, stored, threads);
    return static_cast<int64_t>(slot.planes.nbytes() + slot.offsets.nbytes() + slot.values.nbytes());
}

bool encode(Slot& slot, const at::Tensor& whole) {
    const Value& value = slot.value;
    int64_t nbytes = 0;
    if (value.kernel) {
        nbytes = value.kernel->nbytes;
        slot.planes = plane_of(nbytes, at::kByte);
        const void* from = whole.const_data_ptr();
        void* to = slot.planes.data_ptr();
        int64_t refused = 0;
        {
            const WithoutGil running(value.nbytes);
            refused = value.kernel->encode(from, whole.numel(), value.kernel->how.data(), to, threads_for(value.nbytes));
        }
        if (refused != 0) return slot.planes = at::Tensor(), false;
    } else if (value.zvc) {
        nbytes = encode_zvc(slot, *value.zvc, whole);
        if (nbytes < 0) return false;
    } else {
        const Object key = value.is_moved() ? value.key : Object(Py_None);
        slot.encoded = call(slot.session->encode.get(), value.ways.get(), wrapped(whole).get(), key.get());
        if (slot.encoded.is_none()) return false;
        const Object number = call(slot.session->planes_nbytes.get(), slot.encoded.get());
        nbytes = PyLong_AsLongLong(number.get());
    }
    slot.state = State::stored;
    slot.guard = at::Tensor();
    slot.taken().nbytes = nbytes;
    let_go(slot, value.is_moved() ? 0 : nbytes);
    return true;
}

bool decide(Run& run, int number);

// Has a recipe begin from a value: it stays as it is as long as that is there. Whether it can.
bool lean(Run& run, Slot& slot, const Given& given) {
    for (const auto& leaf : slot.leaves)
        if (leaf->number == given.number) return true;
    const auto leaf = run.values[given.number].lock();
    if (leaf == nullptr || leaf.get() == &slot) return false;
    if (leaf->is_pending) decide(run, given.number);
    const Register& contents = run.registers[leaf->value.contents];
    if (!contents.is_known || contents.is_bad) return false;
    if (leaf->state == State::stored && !leaf->value.is_exact_form) return false;
    if (leaf->state == State::held && !leaf->guard.defined()) {
        const Packed* holder = nullptr;
        for (const Packed* each : leaf->members)
            if (each->save->reads_value && each->dense.defined() && each->delegate == nullptr) {
                holder = each;
                break;
            }
        if (holder == nullptr || version_of(holder->dense) != holder->version) return false;
        leaf->guard = detached(holder->dense);
        leaf->guard_version = holder->version;
    }
    if (leaf->state == State::held && version_of(leaf->guard) != contents.version) return false;
    slot.leaves.push_back(leaf);
    return true;
}

bool lean_on_call(Run& run, Slot& slot, const Tree& tree) {
    const auto& inputs = run.inputs[tree.call];
    if (inputs == nullptr || inputs->is_stale) return false;
    for (size_t index = 0; index < inputs->tensors.size(); ++index)
        if (inputs->versions[index] >= 0 && version_of(inputs->tensors[index]) != inputs->versions[index]) return false;
    slot.inputs.emplace_back(tree.call, inputs);
    const Noted& noted = run.script->noted(tree.call);
    if (run.registers[noted.made[tree.made].contents].is_bad) return false;
    return std::all_of(noted.registers.begin(), noted.registers.end(), [&](int each) {
        return each < 0 || (run.registers[each].is_known && !run.registers[each].is_bad);
    });
}

bool lean_on_all(Run& run, Slot& slot, const Tree& tree) {
    if (!lean_on_call(run, slot, tree)) return false;
    for (const Given& given : tree.given) {
        if (given.from == Given::From::value && !lean(run, slot, given)) return false;
        if (given.from == Given::From::call && !lean_on_all(run, slot, tree.inner[given.number])) return false;
    }
    return true;
}

void take_sample(Run& run, Slot& slot, const at::Tensor& whole) {
    const int64_t there = whole.numel(), size = static_cast<int64_t>(whole.itemsize());
    slot.step = std::max<int64_t>(1, there / ELEMENTS);
    slot.begin = static_cast<int64_t>(static_cast<uint64_t>(run.number) * SPREAD % static_cast<uint64_t>(slot.step));
    if (!whole.is_cpu()) {
        const at::Tensor elements = sampled(slot, whole);
        slot.device_sample = run.rows.take(whole, elements.numel());
        slot.device_sample.copy_(elements);
        return;
    }
    const char* from = static_cast<const char*>(whole.const_data_ptr());
    slot.sample.clear();
    int64_t index = 0;
    for (int64_t at = slot.begin; at < there && index < ELEMENTS; at += slot.step, ++index)
        slot.sample.append(from + at * size, static_cast<size_t>(size));
}

bool remake(Run& run, Slot& slot, const at::Tensor& whole) {
    const Register& contents = run.registers[slot.value.contents];
    const bool is_known = contents.is_known && !contents.is_bad;
    if (!is_known || !lean_on_all(run, slot, slot.value.tree)) {
        slot.leaves.clear();
        slot.inputs.clear();
        return false;
    }
    take_sample(run, slot, whole);
    if (slot.value.tree.inside >= 0) slot.inputs.front().second->inside.push_back(slot.weak_from_this());
    for (const auto& leaf : slot.leaves)
        if (leaf->state == State::held && leaf->is_pending)
            run.session->leaning[leaf->storage].push_back(slot.weak_from_this());
    for (const auto& [number, inputs] : slot.inputs)
        for (size_t index = 0; index < inputs->tensors.size(); ++index)
            if (inputs->versions[index] >= 0)
                run.session->leaning[storage_of(inputs->tensors[index])].push_back(slot.weak_from_this());
    if (slot.value.shares)
        for (const auto& leaf : slot.leaves) leaf->children.push_back(slot.weak_from_this());
    slot.state = State::remade;
    slot.guard = at::Tensor();
    let_go(slot, 0);
    return true;
}

// Gives a value to the long way, which decides on it.
void take_back(Run& run, Slot& slot, bool is_orphan);

// Decides about a value if nobody but autograd holds it; whether that was so.
bool decide(Run& run, int number) {
    const std::shared_ptr<Slot> slot = run.values[number].lock();
    if (slot == nullptr || !slot->is_pending) return true;
    const bool is_alone = slot->members.empty();  // what has saved it was dropped, and others are made from it
    if (is_alone && !slot->guard.defined()) return true;
    for (const Packed* each : slot->members)
        for (const Object& unknown : run.current)
            if (unknown.get() == reinterpret_cast<const PyObject*>(each)) return false;  // its node is yet to be seen
    if (!is_orphaned(*slot)) return false;
    slot->is_pending = false;
    run.pending.erase(slot->storage);
    run.script->timings[number].let_go(run.clock - slot->born);
    const at::NoGradGuard unrecorded;
    bool is_same = is_alone ? version_of(slot->guard) == slot->guard_version
                            : slot->members.size() == static_cast<size_t>(slot->value.members);
    const at::Tensor* strongest = is_alone ? &slot->guard : nullptr;
    for (const Packed* each : slot->members) {
        is_same = is_same && each->dense.defined() && version_of(each->dense) == each->version;
        if (each->save == &run.script->saves[slot->value.strongest]) strongest = &each->dense;
    }
    if (slot->value.program == Program::hold && (!slot->is_asked || slot->guard.defined())) return true;
    const auto started = Clock::now();
    bool is_done = false;
    if (is_same && strongest != nullptr && slot->value.program != Program::ask && !slot->is_asked) {
        const at::Tensor whole = whole_in(*slot, *strongest);
        is_done = slot->value.program == Program::remake ? remake(run, *slot, whole) : encode(*slot, whole);
    }
    if (!is_done && !slot->guard.defined()) take_back(run, *slot, true);  // else others are made from it, so it stays
    slot->taken().encode_seconds += std::chrono::duration<double>(Clock::now() - started).count();
    return true;
}

void look(Run& run) {
    const auto due = run.due.find(run.clock);
    if (due == run.due.end()) return;
    const std::vector<int> numbers = std::move(due->second);
    run.due.erase(due);
    for (const int number : numbers) {
        const auto slot = run.values[number].lock();
        if (slot == nullptr || !slot->is_pending || decide(run, number)) continue;
        const long age = run.clock - slot->born;
        Timing& timing = run.script->timings[number];
        const long later = timing.still_held(age);
        look_again(run, number, slot->born + (later != 0 ? later : age + std::max(1L, (age - timing.gone) / 4)));
    }
}

// A saved tensor as Python is given it, to make a Saved of it: the object, its tensor, and which save it is of.
Object described(Packed* packed) {
    auto original = packed->has_original ? packed->original.lock() : c10::intrusive_ptr<at::TensorImpl>();
    const Object x = original ? wrapped(at::Tensor(std::move(original))) : Object(Py_None);
    const Object dense = packed->dense.defined() ? wrapped(packed->dense) : Object(Py_None);
    const auto save = static_cast<long long>(packed->save - packed->script->saves.data());
    return Object::taken(Py_BuildValue("(OOOLLL)", reinterpret_cast<PyObject*>(packed), dense.get(), x.get(), save,
                                       static_cast<long long>(packed->version), static_cast<long long>(packed->node)));
}

Object described(const std::vector<Packed*>& all) {
    const Object found = Object::taken(PyList_New(0));
    for (Packed* each : all)
        if (PyList_Append(found.get(), described(each).get()) != 0) throw python_error();
    return found;
}

void take_back(Run& run, Slot& slot, bool is_orphan) {
    slot.is_pending = false;
    run.pending.erase(slot.storage);
    slot.taken().is_given_back = true;
    const Object members = described(slot.members);
    slot.guard = at::Tensor();
    const int64_t nbytes = slot.held_nbytes;
    slot.session->nbytes -= nbytes;
    slot.held_nbytes = 0;
    for (Packed* each : slot.members) each->dense = at::Tensor();
    try {
        call(run.session->take_back.get(), members.get(), Py_None, is_orphan ? Py_True : Py_False);
    } catch (...) {  // of an interrupt: what Python has not taken stays here
        for (Py_ssize_t index = 0; index < PyList_GET_SIZE(members.get()); ++index) {
            PyObject* member = PyList_GET_ITEM(members.get(), index);
            auto* packed = reinterpret_cast<Packed*>(PyTuple_GET_ITEM(member, 0));
            if (packed->delegate == nullptr) packed->dense = THPVariable_Unpack(PyTuple_GET_ITEM(member, 1));
        }
        throw;
    }
    run.session->tells = true;  // it may be made again there
    run.session->others_nbytes = PyLong_AsLongLong(call(run.session->others.get()).get());
    // From here on only the delegates of its members know the value.
}

void hold_each(const std::vector<std::weak_ptr<Slot>>& values) {
    const at::NoGradGuard unrecorded;
    for (const auto& each : values) {
        const auto slot = each.lock();
        if (slot != nullptr && slot->state == State::remade && !slot->members.empty()) hold_again(slot);
    }
}

void hold_all(Session& session) {
    for (const auto& [storage, values] : std::exchange(session.leaning, {})) hold_each(values);
}

// Before memory changes, or is handed to who may change it unseen: nothing is made again from what it was.
void touch(Session& session, Run* run, const at::Tensor& x, bool is_unseen) {
    if (!x.has_storage()) return;
    const void* storage = storage_of(x);
    if (const auto leaning = session.leaning.extract(storage); !leaning.empty()) hold_each(leaning.mapped());
    if (run == nullptr) return;
    run->snapshots.erase(storage);
    const auto referenced = run->referenced.find(storage);
    if (referenced != run->referenced.end()) {
        for (const auto& each : referenced->second)
            if (const auto inputs = each.lock()) inputs->is_stale = true;
        run->referenced.erase(referenced);
    }
    if (!is_unseen || static_cast<int64_t>(x.storage().nbytes()) < run->script->min_nbytes) return;
    if (run->escaped.insert(storage).second) run->kept.push_back(weak_storage(x));
    for (Register& each : run->registers)
        if (each.is_known && each.storage._unsafe_get_target() == storage) each.is_bad = true;
}

enum Kinds : long { EFFECT = 7, CHEAP = 8, MAY_DRAW = 16, IS_ATTRIBUTE = 32, SEEN_INSIDE = 64, INPLACE_AT = 128 };
enum Effect : long { NONE = 0, CHANGES = 1, CHANGES_STATISTICS = 2, CHANGES_SELF = 3, ESCAPES = 4 };

bool is_set(PyObject* flag) { return flag != nullptr && flag != Py_None && flag != Py_False; }

long effect_of(long kind, PyObject* args, PyObject* kwargs) {
    const long effect = kind & EFFECT;
    if (effect != NONE) return effect;
    if (kwargs != nullptr) {
        PyObject* out = PyDict_GetItemString(kwargs, "out");
        if ((out != nullptr && out != Py_None) || is_set(PyDict_GetItemString(kwargs, "inplace"))) return CHANGES;
    }
    const long position = kind / INPLACE_AT - 1;
    if (position < 0 || PyTuple_GET_SIZE(args) <= position) return NONE;
    return is_set(PyTuple_GET_ITEM(args, position)) ? CHANGES : NONE;
}

// Tells what a function is about to do to its arguments; false where one of them may be the memory of anything.
bool touch_all(Session& session, Run* run, long effect, PyObject* args, PyObject* kwargs) {
    if (session.tells && run != nullptr) {  // else the observer tells
        const Object named = kwargs == nullptr ? Object(Py_None) : Object(kwargs);
        const Object number = Object::taken(PyLong_FromLong(effect));
        session.tells = call(session.touched.get(), number.get(), args, named.get()).get() == Py_True;
    }
    const bool is_unseen = effect == ESCAPES || effect == CHANGES_STATISTICS;
    const auto touch_one = [&](PyObject* arg) {
        if (is_plain(arg)) {
            const at::Tensor& x = THPVariable_Unpack(arg);
            if (effect == CHANGES_STATISTICS && (x.requires_grad() || is_parameter(x))) return true;
            touch(session, run, x, is_unseen);
            return true;
        }
        return arg == Py_None || PyBool_Check(arg) || PyLong_CheckExact(arg) || PyFloat_CheckExact(arg) ||
               PyUnicode_CheckExact(arg) || !PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(arg)), "__torch_function__");
    };
    const auto touch_each = [&](PyObject* arg) {
        if (!PyTuple_CheckExact(arg) && !PyList_CheckExact(arg)) return touch_one(arg);
        for (Py_ssize_t index = 0; index < PySequence_Size(arg); ++index)
            if (!touch_one(Object::taken(PySequence_GetItem(arg, index)).get())) return false;
        return true;
    };
    const auto touch_those_of_all = [&] {
        const Py_ssize_t all = PyTuple_GET_SIZE(args), number = effect == CHANGES_SELF ? std::min<Py_ssize_t>(1, all) : all;
        for (Py_ssize_t index = 0; index < number; ++index)
            if (!(effect == CHANGES_STATISTICS && index == 0) && !touch_each(PyTuple_GET_ITEM(args, index))) return false;
        if (kwargs == nullptr || effect == CHANGES_SELF) return true;
        PyObject *name, *arg;
        for (Py_ssize_t at = 0; PyDict_Next(kwargs, &at, &name, &arg);)
            if (!touch_each(arg)) return false;
        return true;
    };
    const bool is_known = touch_those_of_all();
    if (!is_known) hold_all(session);
    return is_known;
}

// What is known of a function, as a number (see replaying._number_of); nothing where only the long way knows it.
std::optional<long> kind_of(Replayer& replayer, PyObject* function) {
    PyObject* known = PyDict_GetItemWithError(replayer.kinds.get(), function);
    if (known != nullptr) return PyLong_AsLong(known);
    PyErr_Clear();
    const Object number = call(replayer.session->number_of.get(), function);
    if (!number.is_none() && PyDict_SetItem(replayer.kinds.get(), function, number.get()) == 0)
        return PyLong_AsLong(number.get());
    PyErr_Clear();
    return std::nullopt;
}

}  // namespace

bool is_odd(const at::Tensor& x) {
    return x.is_quantized() || x.is_conj() || x.is_neg() || x.is_meta() || x.is_nested() || x.is_inference() ||
           x._is_zerotensor();
}

Kernels kernels;
PyObject *ParameterClass = nullptr, *ScalarOf = nullptr;

Slot::~Slot() {
    session->nbytes -= held_nbytes;
    if (made.defined()) session->remade_nbytes -= static_cast<int64_t>(made.storage().nbytes());
    session->buffers.forget(*this);
}

namespace {

void tell_end(Replayer& replayer, const std::shared_ptr<Run>& run, bool is_broken, bool in_call) {
    replayer.ending = run;
    PyObject* told = PyObject_CallFunctionObjArgs(run->session->before_end.get(), is_broken ? Py_True : Py_False,
                                                  in_call ? Py_True : Py_False, nullptr);
    replayer.ending = nullptr;
    Object::taken(told);
}

}  // namespace

void break_run(Replayer& replayer) {
    const std::shared_ptr<Run> run = std::move(replayer.run);
    replayer.run = nullptr;
    take_in_all(*run);
    run->is_broken = true;
    const Locked locked(run->session->lock.get());
    std::vector<Packed*> unnamed;
    for (const Object& each : run->current) {
        auto* packed = reinterpret_cast<Packed*>(each.get());
        const Kind kind = packed->save->kind;
        if (kind != Kind::parameter && kind != Kind::small) unnamed.push_back(packed);
    }
    for (const auto& each_value : run->values) {
        const auto slot = each_value.lock();
        if (slot == nullptr || !slot->is_pending || slot->members.empty()) continue;
        std::vector<Packed*> named;
        for (Packed* each : slot->members)
            if (std::find(unnamed.begin(), unnamed.end(), each) == unnamed.end()) named.push_back(each);
        slot->is_pending = false;
        const bool is_shared = named.size() != slot->members.size();
        if (slot->value.program == Program::hold && !is_shared) continue;
        if (slot->guard.defined() && !is_shared) continue;  // others are made from it, so it stays
        const Object members = described(named);
        slot->session->nbytes -= slot->held_nbytes;
        slot->held_nbytes = 0;
        call(run->session->take_back.get(), members.get(), Py_None, Py_False);
    }
    const Object rest = described(unnamed);
    for (const auto& each : unnamed)
        if (each->slot != nullptr && each->slot->held_nbytes != 0) {
            each->slot->session->nbytes -= each->slot->held_nbytes;
            each->slot->held_nbytes = 0;
        }
    call(run->session->take_back.get(), Py_None, rest.get(), Py_False);
    tell_end(replayer, run, true, run->in_call);
}

namespace {

// What leans on memory that the program may change, of which nobody is told from now on, is held again; but for what costly
// calls make: see Leaning.store_all.
void hold_before_leaving(Session& session, Run* run) {
    std::vector<std::weak_ptr<Slot>> all, found;
    for (const auto& [storage, values] : session.leaning) all.insert(all.end(), values.begin(), values.end());
    for (const auto& each : all) {  // to decide on a leaf may add more
        const auto slot = each.lock();
        if (slot == nullptr || slot->value.shares) continue;
        const bool leans = std::any_of(slot->leaves.begin(), slot->leaves.end(), [&](const auto& leaf) {
            const bool is_here = run != nullptr && run->script == leaf->script && run->values[leaf->number].lock() == leaf;
            if (is_here && leaf->state == State::held && leaf->is_pending) decide(*run, leaf->number);
            return leaf->state == State::held && leaf->is_pending;
        });
        if (leans) found.push_back(each);
    }
    hold_each(found);
}

}  // namespace

void end_run(Replayer& replayer, bool is_left) {
    const std::shared_ptr<Run> run = replayer.run;
    if (run != nullptr) take_in_all(*run);
    {
        const Locked locked(replayer.session->lock.get());
        if (run != nullptr)
            for (const int number : run->order) decide(*run, number);
        if (is_left) hold_before_leaving(*replayer.session, run.get());
    }
    if (run == nullptr) return;
    const bool is_whole = run->next_save == run->script->saves.size() && !run->differs;
    replayer.run = nullptr;
    tell_end(replayer, run, !is_whole, false);
}

bool concerns_nobody(Replayer& replayer, PyObject* function, PyObject* args, PyObject* kwargs) {
    Session& session = *replayer.session;
    if ((session.leaning.empty() && !replayer.rests) || has_transform()) return false;
    const long kind = kind_of(replayer, function).value_or(ESCAPES);
    if (kind < 0) return false;  // it begins a backward pass
    const bool rests = replayer.rests && (kind & IS_ATTRIBUTE || !at::GradMode::is_enabled());
    const long effect = effect_of(kind, args, kwargs);
    if (effect == NONE) return rests;
    const Locked locked(session.lock.get());
    const bool is_known = touch_all(session, nullptr, effect, args, kwargs);
    return rests && is_known && (effect == CHANGES || effect == CHANGES_SELF);
}

PyObject* pack(Replayer& replayer, PyObject* object) {
    if (replayer.run == nullptr || is_in_backward() || has_transform()) {
        replayer.rests = false;
        return call(replayer.session->take_in.get(), object).release();
    }
    const std::shared_ptr<Run> run = replayer.run;
    const auto on_the_long_way = [&] {
        {
            const Unheard unheard;
            break_run(replayer);
        }
        return call(replayer.session->take_in.get(), object).release();
    };
    take_in_all(*run);
    if (run->session->stops || !is_plain(object) || c10::impl::TorchDispatchModeTLS::stack_len() != 0)
        return on_the_long_way();
    Object held = take_next(*run, THPVariable_Unpack(object));
    if (held.is_none()) return on_the_long_way();
    if (!run->in_call) {
        const Unheard unheard;  // a function of the program's own saves outside of all calls
        const at::NoGradGuard unrecorded;
        verify(*run, reinterpret_cast<Packed*>(held.get()));
        queue(*run, reinterpret_cast<Packed*>(held.get()));
        ++run->clock;
        const Locked locked(run->session->lock.get());
        look(*run);
    }
    return held.release();
}

PyObject* call_function(Replayer& replayer, PyObject* function, PyObject* args, PyObject* kwargs) {
    if (kwargs != nullptr && (kwargs == Py_None || PyDict_Size(kwargs) == 0)) kwargs = nullptr;
    const std::shared_ptr<Run> run = replayer.run;
    const auto otherwise = [&] {
        const Object named = kwargs == nullptr ? Object(Py_None) : Object(kwargs);
        return call(run->session->rare.get(), function, args, named.get()).release();
    };
    if (has_transform() || run->in_call) return PyObject_Call(function, args, kwargs);
    const std::optional<long> known = kind_of(replayer, function);
    if (!known.has_value()) {
        {
            const Locked locked(run->session->lock.get());
            touch_all(*run->session, nullptr, ESCAPES, args, kwargs);
        }
        break_run(replayer);
        return otherwise();
    }
    const long kind = *known;
    if (kind < 0) {  // it begins a backward pass
        end_run(replayer, false);
        return otherwise();
    }
    ++run->clock;
    if (const long effect = effect_of(kind, args, kwargs); effect != NONE || run->due.contains(run->clock)) {
        const Locked locked(run->session->lock.get());
        look(*run);
        if (effect != NONE && !touch_all(*run->session, run.get(), effect, args, kwargs)) {
            break_run(replayer);
            return otherwise();
        }
    }
    if (!at::GradMode::is_enabled()) return PyObject_Call(function, args, kwargs);
    const auto& calls = run->script->calls;
    const size_t number = run->next_call;
    const Call* expected = number < calls.size() && calls[number].function.get() == function &&
                                   static_cast<size_t>(calls[number].first) == run->next_save
                               ? &calls[number]
                               : nullptr;
    if (expected == nullptr && (kind & SEEN_INSIDE)) return otherwise();  // which may have its operations asked about
    Object random_state;
    if (expected != nullptr && expected->noted.draws) {
        const Object named = kwargs == nullptr ? Object(Py_None) : Object(kwargs);
        random_state = call(run->session->random_state.get(), function, args, named.get());
    }
    const size_t first = run->next_save;
    run->in_call = true;
    run->current.clear();
    Opened opened(replayer, run, expected);
    PyObject* returned = PyObject_Call(function, args, kwargs);
    Object result;
    if (returned == nullptr) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        opened.end();
        run->in_call = false;
        if (replayer.run == run && run->next_save != first) break_run(replayer);
        if (run->is_broken) call(run->session->name.get(), Py_None);
        PyErr_Restore(type, error, trace);
        return nullptr;
    }
    result = Object::taken(returned);
    opened.end();
    run->in_call = false;
    if (replayer.run != run) {  // it was broken, or has ended
        if (run->is_broken) call(run->session->name.get(), result.get());
        return result.release();
    }
    const size_t saves = run->next_save - first;
    if (expected == nullptr && saves == 0) return result.release();
    const Locked locked(run->session->lock.get());
    const bool is_it = expected != nullptr && saves == static_cast<size_t>(expected->saves) && !run->differs;
    if (!is_it || !are_nodes(*run, *expected, result.get())) {
        if (saves != 0) {
            break_run(replayer);
            call(run->session->name.get(), result.get());
        }
        return result.release();
    }
    ++run->next_call;
    for (const Object& each : run->current) verify(*run, reinterpret_cast<Packed*>(each.get()));
    for (const NodeCheck& node : expected->nodes)  // in the order in which the long way names them
        for (const int save : node.saves) queue(*run, reinterpret_cast<Packed*>(run->current[save - expected->first].get()));
    for (const int save : expected->unknown) queue(*run, reinterpret_cast<Packed*>(run->current[save - expected->first].get()));
    for (const bool is_cast : {true, false})
        if ((is_cast ? expected->cast : expected->noted).is_there)
            note(*run, static_cast<int>(number), is_cast, args, kwargs, result.get(), random_state);
    run->current.clear();
    return result.release();
}

}  // namespace backstash::replay
