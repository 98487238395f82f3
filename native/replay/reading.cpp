// What backward reads of a value: decoded, made again, or as it was held. See stash/decode.py, which says why.
#include "run.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace backstash::replay {
namespace {

constexpr int MANY = 8;                // as in decode.py
constexpr int64_t ROOM = 8, DENSER = 4;  // as in decode.py
constexpr int64_t ROWS = 64;           // as in sample.py

using Clock = std::chrono::steady_clock;

double since(Clock::time_point started) { return std::chrono::duration<double>(Clock::now() - started).count(); }

// How many elements the input of the node that runs has whose gradient goes over that edge, counted from the last one;
// -1 where it does not say so. A linear layer's last input is its weight, and the one before is what it multiplies.
int64_t numel_behind(int edge) {
    const auto node = torch::autograd::get_current_node();
    if (!node || node->num_outputs() <= static_cast<size_t>(edge)) return -1;
    const auto& next = node->next_edge(node->num_outputs() - 1 - edge);
    if (!next.is_valid()) return -1;
    const auto& metadata = next.function->input_metadata(next.input_nr);
    if (metadata.is_nested_tensor()) return -1;
    int64_t numel = 1;
    for (const c10::SymInt& size : metadata.shape_as_dim_vector()) numel *= size.maybe_as_int().value_or(-1);
    return numel;
}

int64_t number_named(PyObject* names, const char* name) {
    PyObject* found = names == nullptr ? nullptr : PyDict_GetItemString(names, name);
    return found == nullptr ? 0 : PyLong_AsLongLong(found);
}

bool may_claim_weight(int64_t itemsize) {  // the first question of linear.claim_weight
    const int64_t input = numel_behind(1);
    return input < 0 || input * itemsize >= number_named(Table, "LARGE");
}

Object number_of(double number) { return Object::taken(PyFloat_FromDouble(number)); }
Object number_of(int64_t number) { return Object::taken(PyLong_FromLongLong(number)); }

int64_t storage_nbytes(const at::Tensor& x) { return static_cast<int64_t>(x.storage().nbytes()); }

at::Tensor empty(const Layout& layout) {
    const auto options = at::TensorOptions().dtype(layout.dtype).device(layout.device);
    return at::empty_strided(layout.sizes, layout.strides, options);
}

at::Tensor seen_as(const at::Tensor& whole, const Layout& layout) {
    if (whole.storage_offset() == layout.offset && layout.has_shape(whole)) return detached(whole);
    return whole.as_strided(layout.sizes, layout.strides, layout.offset);
}

// Tells the prefetcher that a saved tensor is read: see _inner in stash/unpack.py.
void tell(const Packed* packed) {
    const Fetching fetching = packed->script->fetching;
    if (fetching == Fetching::nothing || packed->save->read_as.is_none()) return;
    const Slot* slot = packed->slot.get();
    const bool is_moved = slot != nullptr && slot->state == State::stored && slot->value.is_moved();
    if (fetching == Fetching::place && is_moved) return;
    call(packed->session->told.get(), packed->save->read_as.get());
}

// Holds what was made for who reads it next; an undefined tensor: no longer.
void hold_made(Slot& slot, const at::Tensor& whole) {
    Session& session = *slot.session;
    if (slot.made.defined()) session.remade_nbytes -= storage_nbytes(slot.made);
    slot.made = whole;
    if (whole.defined()) session.remade_nbytes += storage_nbytes(whole);
}

void begin_round(Slot& slot) {
    ++slot.round;
    slot.unread = static_cast<int>(slot.members.size());
}

void has_read(Packed* packed, Slot& slot) {
    if (packed->round == slot.round) return;
    packed->round = slot.round;
    --slot.unread;
}

bool is_sampled_alike(const Slot& slot, const at::Tensor& whole) {
    const int64_t size = static_cast<int64_t>(whole.itemsize()), there = whole.numel();
    const char* from = static_cast<const char*>(whole.const_data_ptr());
    const char* known = slot.sample.data();
    int64_t index = 0;
    for (int64_t at = slot.begin; at < there && index < ELEMENTS; at += slot.step, ++index)
        if (std::memcmp(known + index * size, from + at * size, static_cast<size_t>(size)) != 0) return false;
    return index * size == static_cast<int64_t>(slot.sample.size());
}

// Has it compared at the end of the backward pass that runs, on the device, for which the host does not wait.
void compare_later(Slot& slot, const at::Tensor& whole) {
    Session& session = *slot.session;
    const at::Tensor elements = sampled(slot, whole);
    const bool is_alike = whole.scalar_type() == slot.device_sample.scalar_type() &&
                          elements.sizes() == slot.device_sample.sizes();
    const int64_t number = torch::autograd::get_current_graph_task_id();
    const Object spec = slot.value.whole.spec;
    if (!is_alike || number == -1) {
        const Object text = Object::taken(PyUnicode_FromString(slot.value.text.c_str()));
        call(session.compare.get(), wrapped(elements).get(), wrapped(slot.device_sample).get(), slot.value.key.get(),
             spec.get(), text.get());
        return;
    }
    at::Tensor found = std::exchange(slot.picked, {});
    if (!found.defined()) {
        found = session.rows.take(whole, elements.numel());
        found.copy_(elements);
    }
    const int64_t stream = stream_of(whole);
    auto& all = session.comparisons[number];
    if (all.empty() || session.compared_stream != stream)
        call(session.compare.get(), number_of(number).get(), Py_None, Py_None, Py_None, Py_None);
    session.compared_stream = stream;
    all.push_back({found, slot.device_sample, slot.value.key, spec});
}

// Raises where what was made again is not what there was: see comparing.check_sample.
void check_sample(Slot& slot, const at::Tensor& whole) {
    if (slot.device_sample.defined()) {
        if (slot.device_sample.numel() != 0) compare_later(slot, whole);
    } else if (!is_sampled_alike(slot, whole)) {
        const Object text = Object::taken(PyUnicode_FromString(slot.value.text.c_str()));
        call(slot.session->distrust.get(), slot.value.key.get(), slot.value.whole.spec.get(), text.get());
        throw python_error();  // which the call has raised
    }
}

const std::shared_ptr<const Inputs>& inputs_of(const Slot& slot, int number) {
    for (const auto& each : slot.inputs)
        if (each.first == number) return each.second;
    TORCH_CHECK(false, "a value is made again by a call that was not noted");
}

at::Tensor memory_for(Slot& slot, const Layout& layout, bool is_own) {
    const bool is_pooled = is_own && !slot.value.shares;
    return is_pooled ? slot.session->take(layout, layout.dtype) : empty(layout);
}

// What a call has read: a copy, or a parameter where it is, which must not have been changed.
at::Tensor input_at(const Slot& slot, const Inputs& inputs, int number) {
    const at::Tensor& x = inputs.tensors[number];
    const int64_t version = inputs.versions[number];
    if (version >= 0 && (static_cast<int64_t>(x._version()) != version || x.storage().nbytes() == 0))
        call(slot.session->check_reference.get(), wrapped(x).get(), number_of(version).get());
    return x;
}

// See fused.may_mix_nans: of float32 vectors on a CPU.
bool may_mix_nans(std::initializer_list<at::Tensor> vectors) {
    for (const at::Tensor& each : vectors) {
        const float* from = each.defined() ? static_cast<const float*>(each.const_data_ptr()) : nullptr;
        const int64_t count = each.defined() ? each.numel() : 0;
        if (!std::all_of(from, from + count, [](float x) { return std::isfinite(x); })) return true;
    }
    return false;
}

// See fused.affine: undefined where the kernel does not take what the leaves are now.
at::Tensor run_affine(Slot& slot, const Affine& affine, const Layout& whole, bool is_own, uint64_t settings) {
    at::Tensor y;  // it is fetched before x: if it is made from other values, these would lie beside x
    if (affine.has_residual) {
        if (affine.residual.from == Given::From::value) {
            y = fetch(slot, affine.residual);
        } else {
            y = run_tree(slot, affine.inner, false, settings);
        }
        if (y.scalar_type() != at::kFloat || !whole.has_shape(y)) return {};
    }
    const at::Tensor x = fetch(slot, affine.source);
    if (x.scalar_type() != at::kFloat || !whole.has_shape(x)) return {};
    const Inputs& inputs = *inputs_of(slot, affine.norm);
    const auto vector = [&](int number) { return number < 0 ? at::Tensor() : input_at(slot, inputs, number); };
    const at::Tensor weight = vector(affine.weight), bias = vector(affine.bias);
    if (!affine.kernel.is_none()) {
        const auto object = [](const at::Tensor& t) { return t.defined() ? wrapped(t) : Object(Py_None); };
        const auto packed = [&](const Inputs& of, int of_weight, int of_bias) {
            const auto own = [&](int number) { return number < 0 ? at::Tensor() : input_at(slot, of, number); };
            return Object::taken(PyTuple_Pack(4, wrapped(of.mean).get(), wrapped(of.invstd).get(),
                                              object(own(of_weight)).get(), object(own(of_bias)).get()));
        };
        const Object vectors = packed(inputs, affine.weight, affine.bias);
        const Object others = affine.second < 0 ? Object::taken(PyTuple_New(0))
                                                : packed(*inputs_of(slot, affine.second), affine.second_weight,
                                                         affine.second_bias);
        const Object numbers = Object::taken(Py_BuildValue("(iddLL)", affine.activation, affine.lo, affine.hi,
                                                           static_cast<long long>(affine.outer),
                                                           static_cast<long long>(affine.inside)));
        Object sample(Py_None);
        if (is_own && slot.device_sample.defined() && slot.device_sample.numel() != 0) {
            slot.picked = slot.session->rows.take(slot.device_sample, slot.device_sample.numel());
            sample = Object::taken(Py_BuildValue("(NLL)", THPVariable_Wrap(slot.picked), static_cast<long long>(slot.begin),
                                                 static_cast<long long>(slot.step)));
        }
        const Object found = call(slot.session->affine.get(), affine.kernel.get(), wrapped(x).get(), vectors.get(),
                                  object(y).get(), numbers.get(), whole.spec.get(), sample.get(), others.get());
        return THPVariable_Unpack(found.get());
    }
    if (may_mix_nans({inputs.mean, inputs.invstd, weight, bias})) return {};
    at::Tensor out = memory_for(slot, whole, is_own);
    const auto data = [](const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
    const void *from = data(x), *added = data(y), *mean = data(inputs.mean), *invstd = data(inputs.invstd);
    void* to = out.data_ptr();
    std::vector<float> scratch(2 * affine.channels);
    const int threads = threads_for(whole.nbytes);
    const WithoutGil running(whole.nbytes);
    kernels.affine(from, added, mean, invstd, data(weight), data(bias), scratch.data(), affine.outer, affine.channels,
                   affine.inside, affine.activation, affine.lo, affine.hi, nullptr, to, threads);
    return out;
}

// See onepass.make_in_one_pass: undefined where the kernel does not take what the operands are now.
at::Tensor run_one_pass(Slot& slot, const OnePass& pass, const Layout& whole, bool is_own) {
    const Object tensors = Object::taken(PyList_New(0));
    for (const auto& operand : pass.operands) {
        at::Tensor x;
        if (operand.call < 0) {
            x = fetch(slot, operand.value);
        } else {
            const Inputs& inputs = *inputs_of(slot, operand.call);
            x = operand.place >= 0 ? input_at(slot, inputs, operand.place) : operand.place == -1 ? inputs.mean : inputs.invstd;
        }
        if (!x.defined() || PyList_Append(tensors.get(), wrapped(x).get()) != 0) {
            if (PyErr_Occurred()) throw python_error();
            return {};
        }
    }
    const at::Tensor out = memory_for(slot, whole, is_own);
    const Object is_filled = call(pass.make.get(), tensors.get(), wrapped(out).get());
    return is_filled.get() == Py_True ? out : at::Tensor();
}

at::Tensor run_calls(Slot& slot) { return run_tree(slot, slot.value.tree, true, settings_now()); }

// See making.remake: a kernel was not proven on all numbers, so the calls have the last word.
at::Tensor make_again(Slot& slot) {
    at::Tensor whole = run_calls(slot);
    if (!slot.is_unfused && !slot.device_sample.defined() && !is_sampled_alike(slot, whole)) {
        slot.is_unfused = true;
        whole = at::Tensor();  // there may be no room for both
        whole = run_calls(slot);
    }
    check_sample(slot, whole);
    return whole;
}

// What is encoded, in memory that the pool gives; or a view of a plane, for a reader that borrows it.
at::Tensor decoded(const std::shared_ptr<Slot>& owner, bool borrows, Clock::time_point& started) {
    Slot& slot = *owner;
    const Value& value = slot.value;
    if (borrows && value.has_view) {
        const Object planes = planes_in(slot);
        started = Clock::now();
        const Object view = call(slot.session->view.get(), value.ways.get(), planes.get());
        const at::Tensor whole = THPVariable_Unpack(view.get());
        if (!value.is_moved() || slot.unread > 1) slot.session->buffers.lend(owner, whole);  // else held until it is read
        return whole;
    }
    at::Tensor out = slot.session->take(value.whole, value.decoded.dtype);
    if (slot.is_mask) {
        call(slot.session->decode_bits.get(), slot.bits_of->mask.get(), wrapped(slot.bits).get(), wrapped(out).get());
    } else if (value.kernel) {
        const void* planes = slot.planes.const_data_ptr();
        void* to = out.data_ptr();
        const auto nbytes = static_cast<int64_t>(out.nbytes());
        const WithoutGil running(nbytes);
        value.kernel->decode(planes, out.numel(), value.kernel->how.data(), to, threads_for(nbytes));
    } else if (value.zvc) {
        const void *mask = slot.planes.const_data_ptr(), *offsets = slot.offsets.const_data_ptr();
        const void* values = slot.values.const_data_ptr();
        void* to = out.data_ptr();
        const int64_t numel = out.numel(), stored = slot.values.numel();
        const int width = static_cast<int>(out.itemsize()), threads = threads_for(numel * width);
        int is_damaged = 0;
        {
            const WithoutGil running(numel * width);
            is_damaged = kernels.zvc_decode(mask, offsets, values, stored, to, numel, width, threads);
        }
        if (is_damaged != 0) call(slot.session->damaged.get(), number_of(stored).get());
    } else {
        const Object planes = planes_in(slot);
        started = Clock::now();  // what was waited for is counted apart
        call(slot.session->decode.get(), value.ways.get(), planes.get(), wrapped(out).get());
    }
    return out;
}

// See decode._is_held.
bool is_held(const Slot& slot, const at::Tensor& whole) {
    constexpr int FEW = 2;  // as in decode.py
    Session& session = *slot.session;
    const auto nbytes = static_cast<int64_t>(whole.nbytes());
    if (slot.unread <= 1 || nbytes >= (whole.is_cpu() && !session.buffers.is_planned ? LARGE : SMALLEST)) return false;
    if (slot.unread > FEW || !whole.is_cpu()) return nbytes < SMALLEST || !session.has_room(nbytes);
    return nbytes < SMALLEST && session.has_room(nbytes);
}

// See decode._made.
at::Tensor made(const std::shared_ptr<Slot>& slot, bool ahead, bool borrows) {
    Session& session = *slot->session;
    begin_round(*slot);
    auto started = Clock::now();
    at::Tensor whole;
    if (slot->state == State::remade) {
        whole = make_again(*slot);
        if (!ahead || session.has_room(storage_nbytes(whole))) hold_made(*slot, detached(whole));
        for (const auto& leaf : slot->leaves) {
            if (leaf->state != State::remade || leaf->made.defined()) continue;
            session.buffers.shrink();  // there was no room for them
            break;
        }
    } else {
        whole = decoded(slot, borrows, started);
        const bool is_view = borrows && slot->value.has_view;
        const int64_t nbytes = static_cast<int64_t>(whole.nbytes());
        const bool is_early = ahead && slot->unread != 0 && session.has_room(2 * nbytes);
        if (!is_view && (is_held(*slot, whole) || is_early)) hold_made(*slot, detached(whole));
    }
    session.buffers.filled(slot, whole);
    slot->taken().decode_seconds += since(started);
    ++slot->taken().decodes;
    return whole;
}

[[noreturn]] void raise_modified(const Packed* packed, int64_t now) {
    const Object facts = packed->save->facts.is_none() ? Object(Py_None) : packed->save->facts;
    const Object at = number_of(now), expected = number_of(packed->version);
    call(packed->session->modified.get(), packed->save->layout.spec.get(), facts.get(), at.get(), expected.get());
    throw python_error();
}

// See decode.check_version.
void check_version(Packed* packed) {
    if (packed->dense.defined()) {
        const auto now = static_cast<int64_t>(packed->dense._version());
        if (now != packed->version) raise_modified(packed, now);
    } else if (packed->save->kind == Kind::shape) {
        const auto now = static_cast<int64_t>(packed->counter.current_version());
        if (now != packed->version) raise_modified(packed, now);
    }
    if (packed->slot == nullptr) return;
    for (const auto& [counter, version] : packed->slot->written) {
        const auto now = static_cast<int64_t>(counter._version());
        if (now != version) raise_modified(packed, packed->version + now - version);
    }
}

bool wants(const Packed* packed, Claim claim) {
    if (claim != Claim::if_no_room) return claim == Claim::always;
    return !packed->session->has_room(ROOM * packed->save->layout.nbytes);
}

// A claim for a saved tensor where a kernel of the package backward is going to read it; else nothing.
Object claimed(Packed* packed) {
    const Save& save = *packed->save;
    if (at::GradMode::is_enabled() || !is_in_backward()) return {};
    bool is_wanted = false;
    if (packed->slot != nullptr) {
        const bool is_held = packed->dense.defined();
        const Claim claim = is_held                         ? save.as_held
                            : packed->slot->bits.defined() ? save.as_bits
                                                            : save.as_stored;
        is_wanted = wants(packed, claim);
    }
    if (!is_wanted && !(save.may_claim_input && may_await_large_weight())) return {};
    const Object node = number_of(packed->node), only = Object(is_wanted ? Py_False : Py_True);
    Object found = call(packed->session->claim.get(), reinterpret_cast<PyObject*>(packed), save.layout.spec.get(),
                        node.get(), only.get());
    return found.is_none() ? Object() : found;
}

Object original_of(const Packed* packed) {
    auto original = packed->has_original ? packed->original.lock() : c10::intrusive_ptr<at::TensorImpl>();
    return original ? wrapped(at::Tensor(std::move(original))) : Object(Py_None);
}

PyObject* unpack_held(Packed* packed) {
    Session& session = *packed->session;
    const Save& save = *packed->save;
    check_version(packed);
    if (save.kind != Kind::parameter && was_assigned(packed)) {
        const Object held = wrapped(packed->dense), original = original_of(packed);
        return call(session.assigned.get(), held.get(), original.get()).release();
    }
    const bool has_memory = !packed->dense.has_storage() || packed->dense.storage().nbytes() != 0;
    if (!has_memory && packed->nbytes != 0 && is_in_backward())
        call(session.freed.get(), wrapped(packed->dense).get(), number_of(packed->nbytes).get(),
             save.facts.is_none() ? Py_None : save.facts.get());
    Object held = wrapped(packed->dense);
    if (!is_in_backward() || at::GradMode::is_enabled()) return held.release();
    if (save.kind == Kind::parameter) {
        const bool may_claim = save.may_claim_weight && may_claim_weight(static_cast<int64_t>(packed->dense.itemsize()));
        return may_claim ? call(session.claim_weight.get(), held.get()).release() : held.release();
    }
    if (packed->slot == nullptr) {
        const bool may_claim = save.may_claim_input && may_await_large_weight();
        return may_claim ? call(session.claim_input.get(), held.get()).release() : held.release();
    }
    Object claim = claimed(packed);
    return claim.get() != nullptr ? claim.release() : held.release();
}

}  // namespace

at::Tensor Rows::take(const at::Tensor& like, int64_t number) {
    const int64_t current = stream_of(like);  // what is freed is used again by its own stream
    const bool fits = slab.defined() && used < ROWS && current == stream && slab.scalar_type() == like.scalar_type() &&
                      slab.device() == like.device();
    if (!fits) {
        slab = at::empty({ROWS * ELEMENTS}, at::TensorOptions().dtype(like.scalar_type()).device(like.device()));
        used = 0;
        stream = current;
    }
    return slab.as_strided({number}, {1}, used++ * ELEMENTS);
}

int64_t stream_of(const at::Tensor& x) {
    return c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device()).id();
}

at::Tensor sampled(const Slot& slot, const at::Tensor& whole) {
    const int64_t left = whole.numel() - slot.begin;
    const int64_t number = std::min(ELEMENTS, std::max<int64_t>(0, (left + slot.step - 1) / slot.step));
    return whole.as_strided({number}, {slot.step}, whole.storage_offset() + slot.begin);
}

Object planes_in(const Slot& slot) {
    if (!slot.value.is_moved()) return slot.encoded;
    const Object found = call(slot.session->fetch.get(), slot.encoded.get());
    TORCH_CHECK(PyTuple_CheckExact(found.get()) && PyTuple_GET_SIZE(found.get()) == 2, "fetch returns planes and seconds");
    slot.taken().stall_seconds += PyFloat_AsDouble(PyTuple_GET_ITEM(found.get(), 1));
    return Object(PyTuple_GET_ITEM(found.get(), 0));
}

// Whether the program's own tensor has got other memory, by an assignment to its data: plain PyTorch reads that.
bool was_assigned(const Packed* packed) {
    if (!packed->has_original) return false;
    const auto original = packed->original.lock();
    if (!original || original->layout() != at::kStrided || !original->has_storage()) return false;
    return original->storage().unsafeGetStorageImpl() != packed->dense.storage().unsafeGetStorageImpl();
}

bool is_in_backward() { return torch::autograd::get_current_node() != nullptr; }

PyObject *Accumulation = nullptr, *Table = nullptr;

int64_t least_large_weight() {
    const int64_t widest = number_named(Accumulation, "WIDEST");
    return widest == 0 ? 0 : number_named(Accumulation, "LARGE") / widest;
}

bool may_await_weight_of(int64_t least) {  // the first question of accumulation.awaits_large_weight
    const int64_t numel = numel_behind(0);
    return numel >= 0 && numel >= least;
}

bool may_await_large_weight() { return may_await_weight_of(least_large_weight()); }

namespace {

// Whether a saved tensor has yet to read what was made, or a value that has yet to be made from it.
bool is_awaited(const Slot& slot) {
    if (slot.unread > 0) return true;
    return std::any_of(slot.children.begin(), slot.children.end(), [](const auto& each) {
        const auto child = each.lock();
        return child != nullptr && child->state == State::remade && child->round == 0;
    });
}

// Holds what was made no longer, unless somebody waits for it.
void let_go_of_made(Slot& slot) {
    const bool is_held = slot.state == State::remade && slot.value.shares ? is_awaited(slot) : slot.unread > 0;
    if (!is_held) hold_made(slot, {});
}

// The same of what a value was made from.
void let_go_of_leaves(const Slot& slot) {
    for (const auto& leaf : slot.leaves)
        if (leaf->state == State::remade && leaf->value.shares) let_go_of_made(*leaf);
}

// See making.shared: it runs in a loop, because the chain may have any length.
at::Tensor shared(const std::shared_ptr<Slot>& slot) {
    if (slot->made.defined()) return slot->made;
    Session& session = *slot->session;
    std::vector<std::shared_ptr<Slot>> waiting{slot};
    at::Tensor whole;
    while (!waiting.empty()) {
        const std::shared_ptr<Slot> latest = waiting.back();
        if (latest->made.defined() && latest != slot) {
            waiting.pop_back();
            continue;
        }
        const size_t before = waiting.size();
        for (const auto& leaf : latest->leaves)
            if (leaf->state == State::remade && leaf->value.shares && !leaf->made.defined()) waiting.push_back(leaf);
        if (waiting.size() != before) continue;
        const auto started = Clock::now();
        begin_round(*latest);
        session.buffers.shrink(session.buffers.nbytes());  // of what nobody awaits: fresh memory is taken now
        whole = make_again(*latest);
        hold_made(*latest, detached(whole));
        let_go_of_leaves(*latest);
        latest->taken().decode_seconds += since(started);
        ++latest->taken().decodes;
        waiting.pop_back();
    }
    return whole;
}

}  // namespace

at::Tensor whole_of(const std::shared_ptr<Slot>& slot, bool ahead, bool borrows) {
    if (slot->state == State::remade && slot->value.shares) return shared(slot);
    if (slot->made.defined()) return slot->made;
    at::Tensor there = slot->session->buffers.holding(*slot);
    return there.defined() ? there : made(slot, ahead, borrows);
}

at::Tensor fetch(const Slot& reader, const Given& given) {
    for (const auto& leaf : reader.leaves) {
        if (leaf->number != given.number) continue;
        if (leaf->state != State::held) return seen_as(whole_of(leaf, true, true), given.layout);
        if (static_cast<int64_t>(leaf->guard._version()) != leaf->guard_version) {
            const Save& save = reader.script->saves[leaf->value.strongest];
            const Object now = number_of(static_cast<int64_t>(leaf->guard._version())),
                         expected = number_of(leaf->guard_version);
            call(reader.session->modified.get(), save.layout.spec.get(), save.facts.get(), now.get(), expected.get());
            throw python_error();
        }
        return seen_as(leaf->guard, given.layout);
    }
    TORCH_CHECK(false, "a value is made again from one that is not there");
}

namespace {

// What a function has saved inside; whatever else of that has yet to be made again is held with it. See Note: [saved
// inside] in repeating.py, and making.shared.
at::Tensor made_inside(Slot& slot, const Tree& tree, const Inputs& inputs, const Object& tensors) {
    std::vector<std::shared_ptr<Slot>> others;
    if (&tree == &slot.value.tree)
        for (const auto& each : inputs.inside) {
            auto other = each.lock();
            const bool is_awaited = other != nullptr && other->state == State::remade && other->round == 0;
            if (is_awaited && other.get() != &slot) others.push_back(std::move(other));
        }
    const auto size = static_cast<Py_ssize_t>(others.size());
    const Object numbers = Object::taken(PyTuple_New(size + 1));
    PyTuple_SET_ITEM(numbers.get(), 0, number_of(static_cast<int64_t>(tree.inside)).release());
    for (Py_ssize_t index = 0; index < size; ++index)
        PyTuple_SET_ITEM(numbers.get(), index + 1, number_of(static_cast<int64_t>(others[index]->value.tree.inside)).release());
    const Object found = call(slot.session->repeat_inside.get(), tree.as_called.get(), tree.function.get(), tensors.get(),
                              inputs.random_state.is_none() ? Py_None : inputs.random_state.get(), numbers.get());
    for (Py_ssize_t index = 0; index < size; ++index) {
        PyObject* made = PyList_GET_ITEM(found.get(), index + 1);
        if (made == Py_None) continue;
        Slot& other = *others[index];
        const at::Tensor& whole = THPVariable_Unpack(made);
        begin_round(other);
        check_sample(other, whole);
        hold_made(other, detached(whole));
        let_go_of_leaves(other);
        ++other.taken().decodes;
    }
    return THPVariable_Unpack(PyList_GET_ITEM(found.get(), 0));
}

// Inside, the settings are those under which a call was noted.
class UnderSettings {
  public:
    UnderSettings(Slot& slot, const Object& wanted)
        : session_(*slot.session),
          context_(call(session_.enter_settings.get(), wanted.get(), slot.value.whole.spec.get())) {}
    ~UnderSettings() {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        Py_XDECREF(PyObject_CallFunctionObjArgs(session_.leave_settings.get(), context_.get(), nullptr));
        PyErr_Restore(type, error, trace);
    }

  private:
    Session& session_;
    const Object context_;
};

// What the function returns; see repeating.repeat, which has more to do for some calls.
at::Tensor called(const Tree& tree, PyObject* tensors) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tree.args.get());
    const Object args = Object::taken(PyTuple_New(size));
    for (Py_ssize_t index = 0; index < size; ++index)
        PyTuple_SET_ITEM(args.get(), index, Py_NewRef(PyTuple_GET_ITEM(tree.args.get(), index)));
    for (size_t index = 0; index < tree.places.size(); ++index)
        PyTuple_SetItem(args.get(), tree.places[index], Py_NewRef(PyList_GET_ITEM(tensors, index)));
    const Object result = Object::taken(PyObject_Call(tree.function.get(), args.get(), tree.kwargs.get()));
    return THPVariable_Unpack(result.get());
}

}  // namespace

at::Tensor run_tree(Slot& slot, const Tree& tree, bool is_own, uint64_t settings) {
    const Noted& noted = slot.script->noted(tree.call);
    if (noted.settings != settings) {
        const UnderSettings entered(slot, noted.wanted);
        return run_tree(slot, tree, is_own, noted.settings);
    }
    if (tree.affine != nullptr && !slot.is_unfused) {
        at::Tensor made = run_affine(slot, *tree.affine, tree.result, is_own, settings);
        if (made.defined()) return made;
    }
    if (tree.one_pass != nullptr && !slot.is_unfused) {
        at::Tensor made = run_one_pass(slot, *tree.one_pass, tree.result, is_own);
        if (made.defined()) return made;
    }
    const Inputs& inputs = *inputs_of(slot, tree.call);
    const Object tensors = Object::taken(PyList_New(0));
    for (size_t index = 0; index < tree.given.size(); ++index) {
        const Given& given = tree.given[index];
        at::Tensor x;
        switch (given.from) {
            case Given::From::copy: x = input_at(slot, inputs, given.number); break;
            case Given::From::value: x = fetch(slot, given); break;
            case Given::From::call:
                x = run_tree(slot, tree.inner[given.number], false, settings);
                if (x.storage_offset() != given.layout.offset || !given.layout.has_shape(x))
                    x = x.as_strided(given.layout.sizes, given.layout.strides, given.layout.offset);
                break;
        }
        if (PyList_Append(tensors.get(), wrapped(x).get()) != 0) throw python_error();
    }
    const bool is_all = !tree.args.is_none() && !at::autocast::is_autocast_enabled(tree.result.device.type());
    if (is_all) return called(tree, tensors.get());
    if (tree.inside >= 0) return made_inside(slot, tree, inputs, tensors);
    const Object result = call(slot.session->repeat.get(), tree.as_called.get(), tree.function.get(), tensors.get(),
                               inputs.random_state.is_none() ? Py_None : inputs.random_state.get());
    return THPVariable_Unpack(result.get());
}

namespace {

// Has it hold the data of its storage: see decode._hold.
void hold_whole(Packed* packed, const at::Tensor& whole) {
    const Layout& layout = packed->save->layout;
    packed->dense = whole.as_strided(layout.sizes, layout.strides, layout.offset).detach();
    packed->version = static_cast<int64_t>(packed->dense._version());
    packed->has_original = false;
}

}  // namespace

void hold_again(const std::shared_ptr<Slot>& slot) {
    at::Tensor whole = whole_of(slot, false, false).detach();
    Session& session = *slot->session;
    hold_made(*slot, {});
    session.buffers.part_with(whole);
    slot->encoded = Object();
    slot->planes = slot->offsets = slot->values = slot->bits = at::Tensor();
    slot->sample.clear();
    slot->device_sample = slot->picked = at::Tensor();
    slot->state = State::held;
    slot->round = slot->unread = 0;
    slot->inputs.clear();
    slot->leaves.clear();
    for (Packed* packed : slot->members) {
        packed->round = 0;
        if (packed->modified < 0) hold_whole(packed, whole);
    }
    slot->guard = whole;
    slot->guard_version = static_cast<int64_t>(whole._version());
    const int64_t nbytes = storage_nbytes(whole);
    session.add(nbytes - slot->held_nbytes);
    slot->held_nbytes = nbytes;
}

// See decode._keep_mask. A mask that is apart stays when the planes are gone.
bool keep_mask(Slot& slot, const at::Tensor& whole, bool is_apart = false) {
    if (slot.unread > MANY) return false;
    const Save* reader = nullptr;
    for (const Packed* each : slot.members) {
        if (each->round == slot.round) continue;
        const bool is_same = reader == nullptr || reader->mask.get() == each->save->mask.get();
        if (!each->save->reads_sign || !is_same) return false;
        reader = each->save;
    }
    if (reader == nullptr) return false;
    const bool is_stored = slot.state == State::stored && slot.value.mask.get() == reader->mask.get();
    const bool is_known = slot.bits_of != nullptr && slot.bits_of->mask.get() == reader->mask.get();
    if ((is_apart || !is_stored) && !is_known) {
        const Object found = call(slot.session->encode_bits.get(), wrapped(whole).get(), reader->mask.get());
        if (found.is_none()) return false;
        slot.bits = THPVariable_Unpack(found.get());
        slot.bits_of = reader;
    }
    return true;
}

// See decode._is_read_again.
bool is_read_again(const Slot& slot, const at::Tensor& whole) {
    const Buffers& buffers = slot.session->buffers;
    const bool is_small = static_cast<int64_t>(whole.nbytes()) < LARGE && !buffers.is_planned;
    const bool is_stored = slot.state == State::stored && whole.is_cpu() && !slot.made.defined();
    return is_stored && is_small && !buffers.holding(slot).defined();
}

PyObject* read_whole(Packed* packed) {
    if (packed->dense.defined()) {
        check_version(packed);
        return THPVariable_Wrap(packed->dense);
    }
    const std::shared_ptr<Slot> slot = packed->slot;
    const Layout& layout = packed->save->layout;
    at::Tensor whole = whole_of(slot, false, packed->save->is_builtin && is_in_backward());
    has_read(packed, *slot);
    let_go_of_made(*slot);
    if (slot->unread > 0 && is_read_again(*slot, whole)) keep_mask(*slot, whole);
    if (!packed->save->is_builtin) {  // may write into it
        hold_made(*slot, {});
        slot->session->buffers.part_with(whole);
        at::Tensor counter = at::empty({0}, whole.options());
        counter.unsafeGetTensorImpl()->set_version_counter(whole.unsafeGetTensorImpl()->version_counter());
        slot->written.emplace_back(counter, static_cast<int64_t>(whole._version()));
    }
    return THPVariable_Wrap(seen_as(whole, layout));
}

void release(const std::shared_ptr<Slot>& slot) {
    Session& session = *slot->session;
    if (slot->state == State::remade && slot->value.shares) return let_go_of_made(*slot);
    if (slot->unread > 0) {
        const at::Tensor whole = slot->made.defined() ? slot->made : session.buffers.holding(*slot);
        if (whole.defined() && !keep_mask(*slot, whole)) return;
    }
    if (slot->unread <= 0 && !slot->is_mask) {
        slot->bits = at::Tensor();
        slot->bits_of = nullptr;
    }
    hold_made(*slot, {});
    session.buffers.release(*slot);
}

// See decode.hand_over.
void hand_over(const std::shared_ptr<Slot>& slot, const at::Tensor& read) {
    Session& session = *slot->session;
    const Value& value = slot->value;
    if (slot->state != State::stored || slot->is_mask || value.is_moved() || value.has_view || !value.is_exact_form) return;
    if (torch::autograd::get_current_graph_task_keep_graph() || session.buffers.is_planned) return;
    if (session.has_room(ROOM * value.whole.nbytes)) return;
    const at::Tensor whole = read.as_strided(value.whole.sizes, value.whole.strides, 0);
    const std::vector<Packed*> members = slot->members;
    const bool is_nearly_dense = DENSER * slot->held_nbytes >= (DENSER - 1) * value.whole.nbytes;
    const auto waits = [&](const Packed* each) { return each->round != slot->round && !is_nearly_dense; };
    const bool any_waits = std::any_of(members.begin(), members.end(), waits);
    if (any_waits && !keep_mask(*slot, whole, true)) return;
    std::shared_ptr<Slot> rest;  // of which a mask is left
    if (any_waits) {
        rest = std::make_shared<Slot>(slot->script, slot->session, value, slot->number);
        rest->state = State::stored;
        rest->is_pending = false;
        rest->is_mask = true;
        rest->bits = std::move(slot->bits);
        rest->bits_of = std::exchange(slot->bits_of, nullptr);
        rest->all_taken = slot->all_taken;
        rest->written = slot->written;
        rest->held_nbytes = storage_nbytes(rest->bits);
        session.add(rest->held_nbytes);
    }
    slot->members.clear();
    for (Packed* each : members) {
        if (each->modified >= 0) continue;  // it raises when it is read
        if (waits(each)) {
            each->round = 0;
            each->slot = rest;
            rest->members.push_back(each);
            continue;
        }
        hold_whole(each, whole);
        each->slot = nullptr;
    }
}

PyObject* unpack(Packed* packed) {
    Session& session = *packed->session;
    if (packed->delegate != nullptr) return call(session.read.get(), packed->delegate).release();
    if (!session.is_unpacked && is_in_backward() && !at::GradMode::is_enabled()) call(session.begin_backward.get());
    if (packed->delegate != nullptr) return call(session.read.get(), packed->delegate).release();
    const Unheard unheard;  // what makes a value again is no call of the program, which may look at what is saved in its pass
    const Locked locked(session.lock.get());
    tell(packed);
    if (packed->modified >= 0) raise_modified(packed, packed->modified);
    if (packed->dense.defined()) return unpack_held(packed);
    check_version(packed);
    if (packed->slot == nullptr) return call(session.stand_in.get(), packed->save->layout.spec.get()).release();
    Object claim = claimed(packed);
    if (claim.get() != nullptr) return claim.release();
    if (!at::GradMode::is_enabled()) {
        const std::shared_ptr<Slot> slot = packed->slot;
        const Object whole = Object::taken(read_whole(packed));
        if (is_in_backward()) hand_over(slot, THPVariable_Unpack(whole.get()));
        return Object(whole).release();
    }
    const at::NoGradGuard unrecorded;
    if (!is_in_backward()) return read_whole(packed);
    hold_again(packed->slot);  // Note: [backward with a graph] in stash/decode.py
    return THPVariable_Wrap(packed->dense);
}

}  // namespace backstash::replay
