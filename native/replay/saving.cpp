// What autograd saves in a known pass. In a known call it needs no object of Python and no lock of Python's: what is saved
// is put aside, and taken in when the call has returned. See Note: [saved in known calls] in replay/replaying.py.
#include "replayer.h"
#include "transforms.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>

namespace backstash::replay {
namespace {

bool is_pinned(const at::Tensor& x) {
    return is_leaf_of_graph(x) || (x.is_view() && is_leaf_of_graph(at::Tensor(x._base())));
}

// Whether it looks like a tensor that is saved as that save was; what else has its memory is yet to be compared.
bool looks_like(const Script& script, const Save& save, const at::Tensor& x, bool in_call) {
    if ((save.call >= 0) != in_call) return false;
    if (save.kind == Kind::sparse) return x.layout() != at::kStrided && !is_odd(x);
    if (!is_ordinary(x)) return false;
    const bool is_weight = is_parameter(x);
    if (save.kind == Kind::parameter)
        return storage_of(x) == save.parameter || is_weight || (x.requires_grad() && save.layout.fits(x));
    if (is_weight) return false;
    const auto in_storage = static_cast<int64_t>(x.storage().nbytes());
    if (save.kind == Kind::small) return in_storage < script.min_nbytes;
    return in_storage == save.storage_nbytes && save.layout.fits(x) && is_pinned(x) == save.is_pinned;
}

// Whether its memory is that of the value, or of nobody, as that of the save was.
bool is_of(const Run& run, const Kept& kept) {
    const Save& save = *kept.save;
    if (save.kind == Kind::parameter) return !kept.is_unsure || !run.pending.contains(storage_of(kept.dense));
    if (save.kind != Kind::value) return true;
    auto known = run.pending.find(storage_of(kept.dense));
    if (known != run.pending.end() && run.values[known->second].expired()) known = run.pending.end();
    const bool is_first = run.values[save.value].expired();
    return is_first ? known == run.pending.end() : known != run.pending.end() && known->second == save.value;
}

// Puts a tensor aside.
void put_aside(Kept& kept, const Save& save, const at::Tensor& x) {
    const bool is_itself = is_leaf_of_graph(x) && save.kind != Kind::loose && save.kind != Kind::shape;
    kept.save = &save;
    kept.dense = is_itself || (save.kind == Kind::parameter && x.is_leaf()) ? x : detached(x);
    kept.version = version_of(x);
    kept.nbytes = save.kind == Kind::sparse ? 0 : static_cast<int64_t>(x.nbytes());
    kept.node = static_cast<int64_t>(at::sequence_number::peek()) - save.gap;
    if (!is_itself) kept.original = c10::weak_intrusive_ptr<at::TensorImpl>(x.getIntrusivePtr());
    kept.has_original = !is_itself;
    kept.is_unsure = save.kind == Kind::parameter && storage_of(x) != save.parameter && !is_parameter(x);
}

void join_value(Run& run, Packed* packed) {
    const Save& save = *packed->save;
    auto slot = run.values[save.value].lock();
    if (slot == nullptr) {
        slot = std::make_shared<Slot>(run.script, run.session, run.script->values[save.value], save.value);
        run.values[save.value] = slot;
        slot->all_taken = run.taken;
        slot->taken().is_there = true;
        slot->storage = storage_of(packed->dense);
        slot->held_nbytes = slot->value.nbytes;
        slot->born = run.clock;
        run.session->add(slot->held_nbytes);
        run.pending[slot->storage] = save.value;
        Timing& timing = run.script->timings[save.value];
        if (timing.spares != 0 && --timing.spared <= 0) {
            timing.spared = timing.spares;
            slot->is_asked = true;
        }
    }
    packed->slot = slot;
    slot->members.push_back(packed);
}

// Takes in what was put aside. It belongs to no value where it is not what the script says.
Object take(Run& run, Kept& kept) {
    const bool is_it = !run.differs && is_of(run, kept);
    run.differs = !is_it;
    ++run.next_save;
    const Object made = Object::taken(packed_type.tp_alloc(&packed_type, 0));
    auto* packed = reinterpret_cast<Packed*>(made.get());
    new (&packed->script) std::shared_ptr<const Script>(run.script);
    new (&packed->session) std::shared_ptr<Session>(run.session);
    new (&packed->slot) std::shared_ptr<Slot>();
    new (&packed->dense) at::Tensor(std::move(kept.dense));
    new (&packed->counter) c10::VariableVersion();
    new (&packed->original) c10::weak_intrusive_ptr<at::TensorImpl>(std::move(kept.original));
    packed->save = kept.save;
    packed->has_original = kept.has_original;
    packed->version = kept.version;
    packed->modified = -1;
    packed->nbytes = kept.nbytes;
    packed->node = kept.node;
    packed->round = 0;
    packed->delegate = nullptr;
    ++run.session->alive;
    if (is_it && kept.save->kind == Kind::value) join_value(run, packed);
    if (run.in_call) run.current.push_back(made);
    return made;
}

thread_local Opened* opened = nullptr;  // the known call that runs on this thread

// A parameter or a small tensor, where nothing is to be told and nothing has changed: nobody but autograd knows of it, so
// no lock is needed.
const at::Tensor* read_without_python(PyObject* object) {
    if (!is_packed(object)) return nullptr;
    const auto* packed = reinterpret_cast<const Packed*>(object);
    const Save& save = *packed->save;
    const bool is_weight = save.kind == Kind::parameter;
    if (!(is_weight || save.kind == Kind::small) || save.may_claim_weight || save.may_claim_input) return nullptr;
    if (packed->delegate != nullptr || !packed->dense.defined() || version_of(packed->dense) != packed->version) return nullptr;
    const bool is_told = packed->script->fetching != Fetching::nothing && !save.read_as.is_none();
    if (is_told || (!packed->session->is_unpacked && is_in_backward() && !at::GradMode::is_enabled())) return nullptr;
    if ((!is_weight && was_assigned(packed)) || packed->dense.storage().nbytes() == 0) return nullptr;
    return &packed->dense;
}

// What autograd has in the place of a tensor that it saves in a known call.
class Hook final : public torch::autograd::SavedVariableHooks {
public:
    void call_pack_hook(const at::Tensor& x) override {
        if (opened->keep(x, kept_)) return;
        const WithGil locked;
        const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack.top();
        kept_->unpack = Py_NewRef(hooks.second.ptr(getPyInterpreter()));
        kept_->packed = pack(*opened->replayer, wrapped(x).get());
    }

    at::Tensor call_unpack_hook() override {
        if (kept_->packed == nullptr && opened != nullptr) {  // in its own call
            const WithGil locked;
            take_in_all(*opened->run);
        }
        PyObject* const packed = kept_->packed;
        if (packed == nullptr) return kept_->dense;
        if (const at::Tensor* held = read_without_python(packed)) return *held;
        const WithGil locked;
        const Object read = is_packed(packed) ? Object::taken(replay::unpack(reinterpret_cast<Packed*>(packed)))
                                              : call(kept_->unpack, packed);
        TORCH_CHECK_TYPE(THPVariable_Check(read.get()), "a saved tensor was unpacked to something else than a tensor");
        return THPVariable_Unpack(read.get());
    }

    std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
        const WithGil locked;
        PyObject* const packed = kept_->packed;
        TORCH_CHECK(packed != nullptr, "a saved tensor was asked for before the call that saves it has ended");
        Object function = is_packed(packed) ? Object::taken(PyObject_GetAttrString(packed, "unpack")) : Object(kept_->unpack);
        return std::make_pair(shared_with_torch(std::move(function)), shared_with_torch(Object(packed)));
    }

private:
    std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
};

torch::autograd::Engine* python_engine = nullptr;

// Torch's own engine, but for the hooks that it gives.
class Engine final : public torch::autograd::Engine {
public:
    std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
        if (opened != nullptr && opened->sees()) return std::make_unique<Hook>();
        auto holding = hook_that_holds();
        return holding != nullptr ? std::move(holding) : python_engine->get_default_saved_variable_hooks();
    }

    std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
        return python_engine->make_anomaly_metadata();
    }

    torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                           const torch::autograd::variable_list& inputs, bool keep_graph,
                                           bool create_graph, bool accumulate_grad,
                                           const torch::autograd::edge_list& outputs) override {
        return python_engine->execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    }

    c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<torch::autograd::GraphTask>& task,
                                                                   NodePointer root,
                                                                   torch::autograd::InputBuffer&& buffer) override {
        return python_engine->execute_with_graph_task(task, std::move(root), std::move(buffer));
    }
};

torch::autograd::Engine& engine_here() {
    static auto* const engine = new Engine;  // its threads, of which there are none, would have to end before it
    return *engine;
}

torch::autograd::Engine& engine_of_python() { return *python_engine; }

std::atomic<int> asked_for = 0;  // known calls in progress, and idle Sessions that are entered

}  // namespace

void stand_in() {
    if (python_engine == nullptr) python_engine = &torch::autograd::Engine::get_default_engine();
    if (asked_for++ == 0) torch::autograd::set_default_engine_stub(engine_here);
}

void stand_back() {
    if (--asked_for == 0) torch::autograd::set_default_engine_stub(engine_of_python);
}

Kept::~Kept() {
    if ((packed == nullptr && unpack == nullptr) || !Py_IsInitialized()) return;
    const WithGil locked;
    Py_XDECREF(packed.load());
    Py_XDECREF(unpack);
}

void take_in_all(Run& run) {
    if (run.opened == nullptr) return;
    std::vector<std::shared_ptr<Kept>> all;
    {
        const std::lock_guard<std::mutex> locked(run.opened->mutex);
        run.opened->is_closed = true;
        all.swap(run.opened->kept);
    }
    for (const auto& each : all) {
        Object made = take(run, *each);
        if (each.use_count() > 1) each->packed = made.release();  // else autograd has let go of it
    }
}

Opened::Opened(Replayer& replayer, std::shared_ptr<Run> of, const Call* known)
    : replayer(&replayer), run(std::move(of)), known(known), before(opened) {
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    if (known == nullptr || known->saves == 0 || run->session->stops || hooks.stack.empty()) return;
    PyObject* const pack = hooks.stack.top().first.ptr(getPyInterpreter());
    if (!PyCFunction_CheckExact(pack) || PyCFunction_GET_SELF(pack) != reinterpret_cast<PyObject*>(&replayer)) return;
    depth = hooks.stack.size();
    kept.reserve(known->saves);
    is_closed = false;
    opened = run->opened = this;
    stand_in();
}

void Opened::end() {
    if (run->opened != this) return;
    opened = before;
    stand_back();
    take_in_all(*run);
    run->opened = nullptr;
}

// Hooks that others have installed inside of the call, and what runs there, see what is saved.
bool Opened::sees() const {
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    return !is_closed && hooks.stack.size() == depth && !hooks.is_tracing &&
           c10::impl::TorchDispatchModeTLS::stack_len() == 0 && !is_in_backward() && !has_transform();
}

bool Opened::keep(const at::Tensor& x, const std::shared_ptr<Kept>& fresh) {
    const std::lock_guard<std::mutex> locked(mutex);
    const Script& script = *run->script;
    const size_t number = kept.size();
    const Save* save = number < static_cast<size_t>(known->saves) ? &script.saves[known->first + number] : nullptr;
    is_closed = is_closed || save == nullptr || !is_plain(x) || !looks_like(script, *save, x, true);
    if (is_closed) return false;
    put_aside(*fresh, *save, x);
    kept.push_back(fresh);
    return true;
}

bool is_plain(PyObject* object) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass ||
           reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass;
}

bool is_plain(const at::Tensor& x) { return class_of(x) == THPVariableClass || class_of(x) == ParameterClass; }

bool is_parameter(const at::Tensor& x) {
    return class_of(x) == ParameterClass || (x.is_view() && class_of(at::Tensor(x._base())) == ParameterClass);
}

bool is_ordinary(const at::Tensor& x) {
    return x.layout() == at::kStrided && !x.is_nested() && x.has_storage() && !is_odd(x);
}

Object take_next(Run& run, const at::Tensor& x) {
    if (run.differs || run.next_save >= run.script->saves.size()) return {};
    const Save& save = run.script->saves[run.next_save];
    if (!looks_like(*run.script, save, x, run.in_call)) return {};
    Kept kept;
    put_aside(kept, save, x);
    return is_of(run, kept) ? take(run, kept) : Object();
}

}  // namespace backstash::replay
