// What an idle Session does: tensors are held as they are, and read as they were. See stash/held.py, which is asked for
// whatever is not the common case. These are the most frequent calls of all.
#include "replayer.h"
#include "transforms.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace backstash::replay {
namespace {

PyObject* name_of(const char* text) {
    PyObject* name = PyUnicode_InternFromString(text);
    if (name == nullptr) throw python_error();
    return name;
}

Object attribute(PyObject* object, PyObject* name) { return Object::taken(PyObject_GetAttr(object, name)); }

bool is_common(const at::Tensor& x) {
    return x.layout() == at::kStrided && !x.is_nested() && !x.is_inference() && x.has_storage();
}

bool is_common(PyObject* object) { return is_plain(object) && is_common(THPVariable_Unpack(object)); }

void add_to(PyObject* counted, Py_ssize_t index, int64_t more) {
    const int64_t now = PyLong_AsLongLong(PyList_GET_ITEM(counted, index)) + more;
    if (PyList_SetItem(counted, index, PyLong_FromLongLong(now)) != 0) throw python_error();
}

// What is held is nothing for the garbage collector: it refers to nothing that could refer to it.
PyObject* untracked(PyObject* tuple) {
    if (tuple != nullptr) PyObject_GC_UnTrack(tuple);
    return tuple;
}

// Whether a tensor that is held is what it was when it was saved, and needs no further look.
bool is_as_it_was(PyObject* packed) {
    PyObject *held = PyTuple_GET_ITEM(packed, 0), *weak = PyTuple_GET_ITEM(packed, 2);
    if (!is_common(held)) return false;
    const at::Tensor& x = THPVariable_Unpack(held);
    if (static_cast<int64_t>(x._version()) != PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1))) return false;
    if (reinterpret_cast<PyObject*>(Py_TYPE(held)) == ParameterClass) return true;
    if (x.storage().nbytes() == 0) return false;
    if (weak == Py_None) return true;
    PyObject* original = PyWeakref_GetObject(weak);
    if (original == Py_None) return true;
    if (!is_common(original)) return false;
    return THPVariable_Unpack(original).storage().unsafeGetStorageImpl() == x.storage().unsafeGetStorageImpl();
}

// What the hooks of an idle Session share, and what outlives it.
struct Sharing {
    ~Sharing() {
        if (unpack == nullptr || !Py_IsInitialized()) return;
        const WithGil locked;
        Py_DECREF(unpack);
    }
    std::atomic<bool> is_ready = false;   // nothing has to be called before a tensor is held
    std::atomic<bool> is_simple = false;  // as of Reading
    std::atomic<int64_t> count = 0, nbytes = 0;
    std::atomic<int64_t> large = 0;       // elements of the smallest weight whose layer may be given a claim
    PyObject* unpack = nullptr;
};

// The pack hook of an idle Session. Torch calls it where HoldingHook does not do.
struct Holder {
    PyObject_HEAD
    PyObject* holding;
    std::shared_ptr<Sharing> shared;
};

Holder& holder_of(PyObject* object) { return *reinterpret_cast<Holder*>(object); }

// What autograd has in the place of a tensor that an idle Session holds: the same without an object of Python.
class HoldingHook final : public torch::autograd::SavedVariableHooks {
public:
    explicit HoldingHook(std::shared_ptr<Sharing> shared) : shared_(std::move(shared)) {}

    ~HoldingHook() override {
        if (packed_ == nullptr || !Py_IsInitialized()) return;
        const WithGil locked;
        Py_DECREF(packed_);
    }

    void call_pack_hook(const at::Tensor& x) override {
        if (!shared_->is_ready || !is_plain(x) || !is_common(x) || is_traced()) {
            const WithGil locked;
            const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack.top();
            packed_ = call(hooks.first.ptr(getPyInterpreter()), wrapped(x).get()).release();
            return;
        }
        shared_->count.fetch_add(1, std::memory_order_relaxed);
        shared_->nbytes.fetch_add(static_cast<int64_t>(x.nbytes()), std::memory_order_relaxed);
        version_ = version_of(x);
        is_itself_ = is_leaf_of_graph(x);
        held_ = is_itself_ ? x : detached(x);
        if (!is_itself_) original_ = c10::weak_intrusive_ptr<at::TensorImpl>(x.getIntrusivePtr());
    }

    at::Tensor call_unpack_hook() override {
        if (packed_ == nullptr && shared_->is_simple && is_as_it_was()) {
            const bool may_be_claimed = held_.dim() == 2 && is_in_backward() && may_await_weight_of(shared_->large);
            if (!may_be_claimed) return held_;
        }
        const WithGil locked;
        Object original;
        const Object packed = as_packed(original);
        const Object read = call(shared_->unpack, packed.get());
        TORCH_CHECK_TYPE(THPVariable_Check(read.get()), "a saved tensor was unpacked to something else than a tensor");
        return THPVariable_Unpack(read.get());
    }

    std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
        const WithGil locked;
        Object original;
        Object packed = as_packed(original);
        return std::make_pair(shared_with_torch(Object(shared_->unpack)), shared_with_torch(std::move(packed)));
    }

private:
    // As hold returns it. The object of the original has to be there as long as that is read.
    Object as_packed(Object& original) const {
        if (packed_ != nullptr) return Object(packed_);
        Object weak(Py_None);
        if (auto impl = is_itself_ ? c10::intrusive_ptr<at::TensorImpl>() : original_.lock()) {
            original = wrapped(at::Tensor(std::move(impl)));
            weak = Object::taken(PyWeakref_NewRef(original.get(), nullptr));
        }
        const Object version = Object::taken(PyLong_FromLongLong(version_));
        return Object::taken(untracked(PyTuple_Pack(3, wrapped(held_).get(), version.get(), weak.get())));
    }

    bool is_as_it_was() const {
        if (version_of(held_) != version_) return false;
        if (class_of(held_) == ParameterClass) return true;
        if (held_.storage().nbytes() == 0) return false;
        const auto impl = is_itself_ ? c10::intrusive_ptr<at::TensorImpl>() : original_.lock();
        if (!impl) return true;
        const at::Tensor original(impl);
        return is_plain(original) && is_common(original) && storage_of(original) == storage_of(held_);
    }

    std::shared_ptr<Sharing> shared_;
    at::Tensor held_;
    c10::weak_intrusive_ptr<at::TensorImpl> original_{c10::intrusive_ptr<at::TensorImpl>()};
    int64_t version_ = 0;
    bool is_itself_ = false;
    PyObject* packed_ = nullptr;  // what Python holds in its place
};

PyObject* make_holder(PyTypeObject* type, PyObject* args, PyObject*) {
    HANDLE_TH_ERRORS
    PyObject *holding, *unpack;
    if (!PyArg_ParseTuple(args, "OO", &holding, &unpack)) return nullptr;
    Object made = Object::taken(type->tp_alloc(type, 0));
    Holder& holder = holder_of(made.get());
    new (&holder.shared) std::shared_ptr<Sharing>(std::make_shared<Sharing>());
    holder.holding = Py_NewRef(holding);
    holder.shared->unpack = Py_NewRef(unpack);
    return made.release();
    END_HANDLE_TH_ERRORS
}

int traverse_holder(PyObject* object, visitproc visit, void* arg) {
    const Holder& holder = holder_of(object);
    Py_VISIT(holder.holding);
    if (holder.shared != nullptr && holder.shared.use_count() == 1) Py_VISIT(holder.shared->unpack);
    return 0;
}

int clear_holder(PyObject* object) {
    Py_CLEAR(holder_of(object).holding);
    const auto shared = std::move(holder_of(object).shared);
    return 0;
}

void free_holder(PyObject* object) {
    PyObject_GC_UnTrack(object);
    clear_holder(object);
    holder_of(object).shared.~shared_ptr();
    Py_TYPE(object)->tp_free(object);
}

PyObject* call_holder(PyObject* self, PyObject* args, PyObject*) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(PyTuple_GET_SIZE(args) == 1, "a pack hook takes a tensor");
    return hold(holder_of(self).holding, PyTuple_GET_ITEM(args, 0));
    END_HANDLE_TH_ERRORS
}

// How many tensors were held since this was asked last, and their bytes.
PyObject* held_since(PyObject* self, PyObject*) {
    Sharing& shared = *holder_of(self).shared;
    return Py_BuildValue("(LL)", static_cast<long long>(shared.count.exchange(0)),
                         static_cast<long long>(shared.nbytes.exchange(0)));
}

PyObject* tell_holder(PyObject* self, PyObject* args) {
    Sharing& shared = *holder_of(self).shared;
    PyObject *is_ready, *is_simple;
    if (!PyArg_ParseTuple(args, "OO", &is_ready, &is_simple)) return nullptr;
    shared.is_ready = is_ready == Py_True;
    shared.is_simple = is_simple == Py_True;
    shared.large = least_large_weight();
    Py_RETURN_NONE;
}

PyMethodDef holder_methods[] = {
    {"held_since", held_since, METH_NOARGS, "How many tensors were held since this was asked last, and their bytes."},
    {"tell", tell_holder, METH_VARARGS, "Whether nothing is to be called before a tensor is held, and all reads are simple."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyTypeObject holder_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool make_holder_type() {
    holder_type.tp_name = "backstash.interpreter._replay.Holder";
    holder_type.tp_basicsize = sizeof(Holder);
    holder_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    holder_type.tp_new = make_holder;
    holder_type.tp_dealloc = free_holder;
    holder_type.tp_traverse = traverse_holder;
    holder_type.tp_clear = clear_holder;
    holder_type.tp_call = call_holder;
    holder_type.tp_methods = holder_methods;
    return PyType_Ready(&holder_type) == 0;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> hook_that_holds() {
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    if (hooks.stack.empty() || hooks.is_tracing) return nullptr;
    PyObject* const pack = hooks.stack.top().first.ptr(getPyInterpreter());
    return Py_TYPE(pack) == &holder_type ? std::make_unique<HoldingHook>(holder_of(pack).shared) : nullptr;
}

PyObject *HoldReference = nullptr, *ReadReference = nullptr;

bool is_traced() {
    if (has_transform()) return true;
    using Modes = c10::impl::TorchDispatchModeTLS;
    if (Modes::stack_len() == 0) return false;
    using Key = c10::impl::TorchDispatchModeKey;
    for (int key = 0; key < static_cast<int>(Key::NUM_MODE_KEYS); ++key)
        if (Modes::get_mode(static_cast<Key>(key)).has_value()) return true;
    return false;
}

PyObject* hold(PyObject* holding, PyObject* object) {
    static PyObject *before_name = name_of("before"), *counted_name = name_of("counted");
    const Object before = attribute(holding, before_name);
    if (!before.is_none() || !is_common(object) || is_traced()) return call(HoldReference, holding, object).release();
    const at::Tensor& x = THPVariable_Unpack(object);
    const Object counted = attribute(holding, counted_name);
    add_to(counted.get(), 0, 1);
    add_to(counted.get(), 1, static_cast<int64_t>(x.nbytes()));
    const Object version = Object::taken(PyLong_FromLongLong(static_cast<int64_t>(x._version())));
    if (x.requires_grad() && x.is_leaf()) return untracked(PyTuple_Pack(3, object, version.get(), Py_None));
    const Object alias = wrapped(detached(x));
    const Object original = Object::taken(PyWeakref_NewRef(object, nullptr));
    return untracked(PyTuple_Pack(3, alias.get(), version.get(), original.get()));
}

PyObject* read(PyObject* reading, PyObject* packed) {
    static PyObject *is_simple = name_of("is_simple"), *otherwise = name_of("otherwise");
    static PyObject *of_nodes = name_of("of_nodes"), *of_matrix = name_of("of_matrix");
    const bool is_held = PyTuple_CheckExact(packed) && PyTuple_GET_SIZE(packed) == 3;
    if (!is_held || attribute(reading, is_simple).get() != Py_True)
        return call(attribute(reading, otherwise).get(), packed).release();
    if (!is_as_it_was(packed)) return call(ReadReference, reading, packed).release();
    PyObject* held = PyTuple_GET_ITEM(packed, 0);
    const auto node = torch::autograd::get_current_node();
    if (!node || THPVariable_Unpack(held).dim() != 2 || !may_await_large_weight()) return Py_NewRef(held);
    const Object name = Object::taken(PyUnicode_FromString(node->name().c_str()));
    const int is_asked = PySequence_Contains(attribute(reading, of_nodes).get(), name.get());
    if (is_asked < 0) throw python_error();
    return is_asked ? call(attribute(reading, of_matrix).get(), held).release() : Py_NewRef(held);
}

}  // namespace backstash::replay
