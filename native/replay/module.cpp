// The module of Python: what goes as an earlier forward pass went.
#include "replayer.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/python_torch_function_mode.h>
#include <torch/version.h>

namespace backstash {

namespace replay {

PyTypeObject packed_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

constexpr size_t MOST_FAILED = 16;  // backward passes that have not ended, because they failed or go on

PyTypeObject replayer_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Replayer& replayer_of(PyObject* object) { return *reinterpret_cast<Replayer*>(object); }

Packed* packed_of(PyObject* object) {
    if (!is_packed(object)) {
        PyErr_SetString(PyExc_TypeError, "this is asked of what a Replayer has packed");
        throw python_error();
    }
    return reinterpret_cast<Packed*>(object);
}

const std::shared_ptr<Slot>& slot_of(PyObject* object) {
    Packed* packed = packed_of(object);
    TORCH_CHECK(packed->slot != nullptr, "it is of no value");
    return packed->slot;
}

void packed_dealloc(PyObject* object) {
    auto* packed = reinterpret_cast<Packed*>(object);
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (packed->slot != nullptr) {
        Slot& slot = *packed->slot;
        std::erase(slot.members, packed);
        if (packed->round != slot.round) --slot.unread;
    }
    const std::shared_ptr<Session> session = packed->session;
    packed->slot.~shared_ptr();
    packed->script.~shared_ptr();
    packed->session.~shared_ptr();
    packed->dense.~Tensor();
    packed->counter.~VariableVersion();
    packed->original.~weak_intrusive_ptr();
    Py_CLEAR(packed->delegate);
    if (--session->alive == 0) {
        session->buffers.clear();
        session->leaning.clear();
    }
    PyErr_Restore(type, error, trace);
    Py_TYPE(object)->tp_free(object);
}

PyObject* packed_dense(PyObject* object, void*) {
    HANDLE_TH_ERRORS
    auto* packed = reinterpret_cast<Packed*>(object);
    if (packed->delegate != nullptr) return PyObject_GetAttrString(packed->delegate, "dense");
    if (!packed->dense.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(packed->dense);
    END_HANDLE_TH_ERRORS
}

PyObject* packed_unpack(PyObject*, PyObject* packed) {
    HANDLE_TH_ERRORS
    return unpack(packed_of(packed));
    END_HANDLE_TH_ERRORS
}

PyMethodDef packed_methods[] = {
    {"unpack", packed_unpack, METH_O, "The tensor that was packed: of any, as autograd calls a function with what it has."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef packed_attributes[] = {
    {"dense", packed_dense, nullptr, "the tensor, where it is held as it is; None", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyObject* replayer_new(PyTypeObject* type, PyObject*, PyObject* kwargs) {
    HANDLE_TH_ERRORS
    PyObject* made = type->tp_alloc(type, 0);
    if (made == nullptr) return nullptr;
    Replayer& replayer = replayer_of(made);
    new (&replayer.session) std::shared_ptr<Session>(std::make_shared<Session>());
    new (&replayer.run) std::shared_ptr<Run>();
    new (&replayer.taken) std::shared_ptr<std::vector<Taken>>();
    new (&replayer.kinds) Object(Object::taken(PyDict_New()));
    new (&replayer.otherwise) Object();
    new (&replayer.ending) std::shared_ptr<Run>();
    const Object owned = Object::taken(made);
    const auto taken = [&](const char* name) {
        PyObject* found = kwargs == nullptr ? nullptr : PyDict_GetItemString(kwargs, name);
        TORCH_CHECK(found != nullptr, "a Replayer needs ", name);
        return Object(found);
    };
#define BACKSTASH_TAKE(name) replayer.session->name = taken(#name);
    BACKSTASH_CALLBACKS(BACKSTASH_TAKE)
#undef BACKSTASH_TAKE
    replayer.session->lock = taken("lock");
    TORCH_CHECK(Py_TYPE(replayer.session->lock.get()) == &lock_type, "a Replayer needs a Lock");
    replayer.session->buffers.is_planned = taken("is_planned").get() == Py_True;
    return Py_NewRef(made);
    END_HANDLE_TH_ERRORS
}

int replayer_traverse(PyObject* object, visitproc visit, void* arg) {
    Replayer& replayer = replayer_of(object);
    Py_VISIT(replayer.otherwise.get());
    if (replayer.session == nullptr || replayer.session.use_count() > 1) return 0;
#define BACKSTASH_VISIT(name) Py_VISIT(replayer.session->name.get());
    BACKSTASH_CALLBACKS(BACKSTASH_VISIT)
#undef BACKSTASH_VISIT
    return 0;
}

int replayer_clear(PyObject* object) {
    Replayer& replayer = replayer_of(object);
    replayer.run = nullptr;
    replayer.session = nullptr;
    replayer.otherwise = Object();
    return 0;
}

void replayer_dealloc(PyObject* object) {
    PyObject_GC_UnTrack(object);
    Replayer& replayer = replayer_of(object);
    PyTypeObject* type = Py_TYPE(object);
    replayer.run.~shared_ptr();
    replayer.taken.~shared_ptr();
    replayer.session.~shared_ptr();
    replayer.kinds.~Object();
    replayer.otherwise.~Object();
    replayer.ending.~shared_ptr();
    type->tp_free(object);
}

PyObject* replayer_pack(PyObject* self, PyObject* x) {
    HANDLE_TH_ERRORS
    return pack(replayer_of(self), x);
    END_HANDLE_TH_ERRORS
}

PyObject* replayer_unpack(PyObject* self, PyObject* packed) {
    HANDLE_TH_ERRORS
    if (!is_packed(packed)) return call(replayer_of(self).session->read.get(), packed).release();
    return unpack(reinterpret_cast<Packed*>(packed));
    END_HANDLE_TH_ERRORS
}

PyObject* replayer_call(PyObject* self, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 3 && PyTuple_CheckExact(args[1]), "call takes a function, a tuple and a dict");
    PyObject* kwargs = args[2] == Py_None ? nullptr : args[2];
    if (replayer_of(self).run == nullptr) {
        if (concerns_nobody(replayer_of(self), args[0], args[1], kwargs)) return PyObject_Call(args[0], args[1], kwargs);
        const Object otherwise = replayer_of(self).otherwise;
        return call(otherwise.get(), args[0], args[1], args[2]).release();
    }
    return call_function(replayer_of(self), args[0], args[1], kwargs);
    END_HANDLE_TH_ERRORS
}

PyObject *ObserverClass = nullptr, *Dispatch = nullptr, *Compiler = nullptr, *LongWay = nullptr;  // see configure_dispatch

// Whose pass is in progress under the function mode that torch would ask now; null where it is not one of ours.
Replayer* asked_now() {
    static PyObject* const watch_name = PyUnicode_InternFromString("_watch");
    static PyObject* const flag_name = PyUnicode_InternFromString("_is_compiling_flag");
    using Modes = at::impl::PythonTorchFunctionTLS;
    if (!at::impl::torch_function_mode_enabled()) return nullptr;
    PyObject* mode = Modes::get_stack_at(Modes::stack_len() - 1)->ptr(getPyInterpreter());
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != ObserverClass) return nullptr;
    if (PyDict_GetItemWithError(Compiler, flag_name) == Py_True) return nullptr;
    const Object watch = Object::taken(PyObject_GetAttr(mode, watch_name));
    if (!PyCFunction_CheckExact(watch.get()) || Py_TYPE(PyCFunction_GET_SELF(watch.get())) != &replayer_type) return nullptr;
    Replayer& replayer = replayer_of(PyCFunction_GET_SELF(watch.get()));  // the observer holds it
    return replayer.run == nullptr ? nullptr : &replayer;
}

// Whether it is the function in progress, or one of C. Python looks at any other: Note: [patched functions] in
// capture/observer.py.
bool offers_itself(PyObject* function) {
    if (PyCFunction_CheckExact(function)) return true;
    PyFrameObject* const frame = PyEval_GetFrame();
    if (!PyFunction_Check(function) || frame == nullptr) return false;
    const Object code = Object::taken(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    return code.get() == PyFunction_GET_CODE(function);
}

// torch.overrides.handle_torch_function: Note: [functions in Python] in replay/replaying.py.
PyObject* handle_torch_function(PyObject*, PyObject* const* args, Py_ssize_t number, PyObject* names) {
    HANDLE_TH_ERRORS
    Replayer* const replayer = number < 2 || !offers_itself(args[0]) ? nullptr : asked_now();
    if (replayer == nullptr) return PyObject_Vectorcall(Dispatch, args, number, names);
    const Object positional = Object::taken(PyTuple_New(number - 2)), named = Object::taken(PyDict_New());
    for (Py_ssize_t index = 2; index < number; ++index)
        PyTuple_SET_ITEM(positional.get(), index - 2, Py_NewRef(args[index]));
    for (Py_ssize_t index = 0; names != nullptr && index < PyTuple_GET_SIZE(names); ++index)
        if (PyDict_SetItem(named.get(), PyTuple_GET_ITEM(names, index), args[number + index]) != 0) throw python_error();
    Object done;
    {
        const torch::overrides::StashTorchFunctionModeGuard observer;
        done = Object::taken(call_function(*replayer, args[0], positional.get(), named.get()));
    }
    if (done.get() == LongWay) return PyObject_Vectorcall(Dispatch, args, number, names);  // which asks the observer
    return done.release();
    END_HANDLE_TH_ERRORS
}

PyObject* replayer_watch(PyObject* self, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2, "watch takes who watches, and whether the long way rests");
    replayer_of(self).otherwise = Object(args[0]);
    replayer_of(self).rests = args[1] == Py_True;
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* replayer_begin(PyObject* self, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 4, "begin takes a script, the number of the step, bytes, and whether it is to tell of changes");
    auto* script = static_cast<std::shared_ptr<const Script>*>(PyCapsule_GetPointer(args[0], "backstash.script"));
    if (script == nullptr) throw python_error();
    Replayer& replayer = replayer_of(self);
    auto run = std::make_shared<Run>();
    run->script = *script;
    run->session = replayer.session;
    run->number = PyLong_AsLongLong(args[1]);
    replayer.session->others_nbytes = PyLong_AsLongLong(args[2]);
    replayer.session->tells = args[3] == Py_True;
    std::erase_if(replayer.session->leaning, [](const auto& each) {
        return std::all_of(each.second.begin(), each.second.end(), [](const auto& value) { return value.expired(); });
    });
    run->values.resize(run->script->values.size());
    run->registers.resize(run->script->registers);
    run->inputs.resize(2 * run->script->calls.size());  // conversions come behind
    replayer.session->stops = false;
    replayer.session->rows = Rows();  // a graph's memory is its own
    auto& comparisons = replayer.session->comparisons;
    while (comparisons.size() > MOST_FAILED) comparisons.erase(comparisons.begin());
    replayer.session->stashed_nbytes = 0;
    run->taken->resize(run->values.size());
    replayer.taken = run->taken;
    replayer.run = std::move(run);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* replayer_end(PyObject* self, PyObject* is_left) {
    HANDLE_TH_ERRORS
    end_run(replayer_of(self), is_left == Py_True);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* replayer_stop(PyObject* self, PyObject*) {
    HANDLE_TH_ERRORS
    if (replayer_of(self).run != nullptr) break_run(replayer_of(self));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// The policy says something else from now on: the pass goes on the long way when it saves something again.
PyObject* replayer_stop_soon(PyObject* self, PyObject*) {
    replayer_of(self).session->stops = true;
    Py_RETURN_NONE;
}

// A forward pass begins, known or not: what backward reads next ends it, and may be of an earlier one's graph.
PyObject* replayer_begin_forward(PyObject* self, PyObject*) {
    replayer_of(self).session->is_unpacked = false;
    Py_RETURN_NONE;
}

PyObject* replayer_begin_backward(PyObject* self, PyObject* others) {
    HANDLE_TH_ERRORS
    Session& session = *replayer_of(self).session;
    session.is_unpacked = true;
    session.others_nbytes = PyLong_AsLongLong(others);
    session.stashed_nbytes = session.nbytes + session.others_nbytes;
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// What each value of the latest pass has taken: seconds to encode, to decode and to wait, how often it was decoded, bytes
// of its planes; None for one not there, False for one that went the long way.
PyObject* replayer_counts(PyObject* self, PyObject*) {
    HANDLE_TH_ERRORS
    const auto& taken = replayer_of(self).taken;
    if (taken == nullptr) Py_RETURN_NONE;
    const Object all = Object::taken(PyList_New(0));
    for (const Taken& value : *taken) {
        Object each(value.is_given_back ? Py_False : Py_None);
        if (value.is_there && !value.is_given_back)
            each = Object::taken(Py_BuildValue("(dddlL)", value.encode_seconds, value.decode_seconds, value.stall_seconds,
                                               value.decodes, static_cast<long long>(value.nbytes)));
        if (PyList_Append(all.get(), each.get()) != 0) throw python_error();
    }
    return Py_NewRef(all.get());
    END_HANDLE_TH_ERRORS
}

PyObject* replayer_number(PyObject* self, void* which) {
    const Session& session = *replayer_of(self).session;
    const int64_t numbers[] = {session.nbytes, session.remade_nbytes, session.peak_nbytes, session.alive};
    return PyLong_FromLongLong(numbers[reinterpret_cast<intptr_t>(which)]);
}

PyObject* replayer_is_running(PyObject* self, void*) { return PyBool_FromLong(replayer_of(self).run != nullptr); }

// How many tensors the pass that is about to end has saved, and how many of them without those of a call that is not over,
// which are named when it is.
PyObject* replayer_saves_at_end(PyObject* self, void*) {
    const auto& run = replayer_of(self).ending;
    const size_t saves = run == nullptr ? 0 : run->next_save;
    return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(saves),
                         static_cast<Py_ssize_t>(run == nullptr ? 0 : saves - run->current.size()));
}

PyObject* replayer_place(PyObject* self, void*) {
    const auto& run = replayer_of(self).run;
    if (run == nullptr) Py_RETURN_NONE;
    return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(run->next_save), static_cast<Py_ssize_t>(run->next_call));
}

PyObject* replayer_kinds(PyObject* self, void*) { return Py_NewRef(replayer_of(self).kinds.get()); }

PyObject* replayer_comparisons(PyObject* self, PyObject* number) {
    HANDLE_TH_ERRORS
    auto& all = replayer_of(self).session->comparisons;
    const Object found = Object::taken(PyList_New(0));
    const auto ours = all.find(PyLong_AsLongLong(number));
    if (ours == all.end()) return Object(found).release();
    for (const Comparison& each : ours->second) {
        const Object one = Object::taken(Py_BuildValue("(NNOO)", THPVariable_Wrap(each.found), THPVariable_Wrap(each.expected),
                                                       each.key.get(), each.spec.get()));
        if (PyList_Append(found.get(), one.get()) != 0) throw python_error();
    }
    all.erase(ours);
    return Object(found).release();
    END_HANDLE_TH_ERRORS
}

PyMethodDef replayer_methods[] = {
    {"pack", replayer_pack, METH_O, "What autograd holds in the place of a tensor."},
    {"unpack", replayer_unpack, METH_O, "The tensor that was packed."},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(replayer_call)), METH_FASTCALL,
     "Calls a torch function of a pass in progress, or has it watched on the long way."},
    {"begin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(replayer_begin)), METH_FASTCALL,
     "A forward pass begins that is to go as a script says."},
    {"watch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(replayer_watch)), METH_FASTCALL,
     "Takes what watches functions where no pass is in progress, and whether some concern nobody then."},
    {"end", replayer_end, METH_O, "It has ended."},
    {"stop", replayer_stop, METH_NOARGS, "It goes on the long way."},
    {"stop_soon", replayer_stop_soon, METH_NOARGS, "It does when it saves something again."},
    {"begin_forward", replayer_begin_forward, METH_NOARGS, "A forward pass begins."},
    {"begin_backward", replayer_begin_backward, METH_O, "A backward pass begins."},
    {"comparisons", replayer_comparisons, METH_O, "The samples of a backward pass that are to be compared."},
    {"counts", replayer_counts, METH_NOARGS, "What each value of the latest pass has taken."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef replayer_attributes[] = {
    {"nbytes", replayer_number, nullptr, "bytes that values take", reinterpret_cast<void*>(0)},
    {"remade_nbytes", replayer_number, nullptr, "bytes of what was made again", reinterpret_cast<void*>(1)},
    {"peak_nbytes", replayer_number, nullptr, "the most bytes so far", reinterpret_cast<void*>(2)},
    {"alive", replayer_number, nullptr, "how many packed tensors there are", reinterpret_cast<void*>(3)},
    {"is_running", replayer_is_running, nullptr, "whether a pass is in progress", nullptr},
    {"saves_at_end", replayer_saves_at_end, nullptr,
     "how many tensors the pass that is about to end has saved, and how many of them are named", nullptr},
    {"place", replayer_place, nullptr, "how many saves and calls of it there were", nullptr},
    {"kinds", replayer_kinds, nullptr, "of functions", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyObject* make_script(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    auto* script = new std::shared_ptr<const Script>(read_script(given));
    return PyCapsule_New(script, "backstash.script", [](PyObject* capsule) {
        delete static_cast<std::shared_ptr<const Script>*>(PyCapsule_GetPointer(capsule, "backstash.script"));
    });
    END_HANDLE_TH_ERRORS
}

// What tells nodes of one type from those of another; 0 for one that is written in Python.
PyObject* type_of_node(PyObject*, PyObject* node) {
    HANDLE_TH_ERRORS
    if (PyType_GetFlags(Py_TYPE(node)) & Py_TPFLAGS_HEAPTYPE) return PyLong_FromLong(0);
    const auto& found = reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata;
    const auto& each = *found;
    return PyLong_FromVoidPtr(const_cast<char*>(typeid(each).name()));
    END_HANDLE_TH_ERRORS
}

PyObject* whole_of_packed(PyObject*, PyObject* packed) {
    HANDLE_TH_ERRORS
    const Locked locked(packed_of(packed)->session->lock.get());
    return read_whole(packed_of(packed));
    END_HANDLE_TH_ERRORS
}

PyObject* fetch_planes(PyObject*, PyObject* packed) {
    HANDLE_TH_ERRORS
    const auto& slot = slot_of(packed);
    const Locked locked(slot->session->lock.get());
    return planes_in(*slot).release();
    END_HANDLE_TH_ERRORS
}

// How a value is stored: what Python knows of its codec, the planes, or the Form that tells where they are, and whether
// they are a mask that was made of it.
PyObject* planes_of(PyObject*, PyObject* packed) {
    HANDLE_TH_ERRORS
    const auto& slot = slot_of(packed);
    if (slot->bits.defined()) {
        const Object bits = Object::taken(THPVariable_Wrap(slot->bits));
        return Py_BuildValue("(OOO)", slot->bits_of->mask.get(), bits.get(), Py_True);
    }
    if (slot->state != State::stored || slot->value.zvc) Py_RETURN_NONE;  // no reader takes the planes of zvc
    const auto& kernel = slot->value.kernel;
    const Object planes = kernel ? call(kernel->encoded.get(), wrapped(slot->planes).get()) : slot->encoded;
    return Py_BuildValue("(OOO)", slot->value.ways.get(), planes.get(), Py_False);
    END_HANDLE_TH_ERRORS
}

PyObject* release_packed(PyObject*, PyObject* object) {
    HANDLE_TH_ERRORS
    Packed* packed = packed_of(object);
    const std::shared_ptr<Slot> slot = slot_of(object);
    if (packed->round != slot->round) {
        packed->round = slot->round;
        --slot->unread;
    }
    if (!packed->dense.defined()) release(slot);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* adopt_for(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2, "adopt takes what was packed, and a tensor");
    Packed* packed = packed_of(args[0]);
    if (!packed->dense.defined()) packed->session->buffers.adopt(THPVariable_Unpack(args[1]));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* set_delegate(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2, "delegate takes what was packed, and what takes its place");
    Packed* packed = packed_of(args[0]);
    Py_XSETREF(packed->delegate, Py_NewRef(args[1]));
    packed->dense = at::Tensor();
    packed->has_original = false;
    if (packed->slot != nullptr) std::erase(packed->slot->members, packed);
    packed->slot = nullptr;
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* configure(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2, "configure takes a function, and one that returns addresses");
    ScalarOf = Py_NewRef(args[0]);
    const auto address = [&](const char* name) {
        const Object text = Object::taken(PyUnicode_FromString(name));
        const Object found = call(args[1], text.get());
        return found.is_none() ? nullptr : PyLong_AsVoidPtr(found.get());
    };
    kernels.affine = reinterpret_cast<decltype(kernels.affine)>(address("bs_affine"));
    kernels.advise_huge = reinterpret_cast<decltype(kernels.advise_huge)>(address("bs_advise_huge"));
    kernels.look = reinterpret_cast<decltype(kernels.look)>(address("bs_look"));
    kernels.zvc_mark = reinterpret_cast<decltype(kernels.zvc_mark)>(address("bs_zvc_mark"));
    kernels.zvc_gather = reinterpret_cast<decltype(kernels.zvc_gather)>(address("bs_zvc_gather"));
    kernels.zvc_decode = reinterpret_cast<decltype(kernels.zvc_decode)>(address("bs_zvc_decode"));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// Takes what holds and reads tensors that are not as common as here.
PyObject* configure_holding(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2, "configure_holding takes two functions");
    HoldReference = Py_NewRef(args[0]);
    ReadReference = Py_NewRef(args[1]);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// Takes the class of the observer, torch's own handle_torch_function, the names of torch.compiler, and what is returned for
// a call that the observer has to make.
PyObject* configure_dispatch(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 4 && PyDict_Check(args[2]), "configure_dispatch takes a class, a function, a dict and an object");
    ObserverClass = Py_NewRef(args[0]);
    Dispatch = Py_NewRef(args[1]);
    Compiler = Py_NewRef(args[2]);
    LongWay = Py_NewRef(args[3]);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// Takes the names of the modules of redeem/ that say which sizes are large.
PyObject* configure_sizes(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2 && PyDict_Check(args[0]) && PyDict_Check(args[1]), "configure_sizes takes two dicts");
    Accumulation = Py_NewRef(args[0]);
    Table = Py_NewRef(args[1]);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* hold_one(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2, "hold takes a Holding and a tensor");
    return hold(args[0], args[1]);
    END_HANDLE_TH_ERRORS
}

PyObject* read_one(PyObject*, PyObject* const* args, Py_ssize_t number) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(number == 2, "read takes a Reading and what was held");
    return read(args[0], args[1]);
    END_HANDLE_TH_ERRORS
}

PyObject* begin_standing_in(PyObject*, PyObject*) {
    stand_in();
    Py_RETURN_NONE;
}

PyObject* end_standing_in(PyObject*, PyObject*) {
    stand_back();
    Py_RETURN_NONE;
}

PyObject* is_traced_now(PyObject*, PyObject*) { return PyBool_FromLong(is_traced()); }

PyObject* is_odd_tensor(PyObject*, PyObject* x) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(THPVariable_Check(x), "is_odd takes a tensor");
    return PyBool_FromLong(is_odd(THPVariable_Unpack(x)));
    END_HANDLE_TH_ERRORS
}

// Python's object of a storage would stay with it, and count as one who holds it.
PyObject* owns_memory(PyObject*, PyObject* object) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(THPVariable_Check(object), "owns_memory takes a tensor");
    const at::Tensor& x = THPVariable_Unpack(object);
    const c10::Storage& storage = x.storage();
    const bool is_whole = storage.nbytes() == x.nbytes() && storage.resizable();
    if (!x.is_cpu()) return PyBool_FromLong(is_whole && !x.is_cuda());
    return PyBool_FromLong(is_whole && storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter());
    END_HANDLE_TH_ERRORS
}

PyObject* number_of_settings(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(settings_now()); }

#define BACKSTASH_FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))

PyMethodDef functions[] = {
    {"script", make_script, METH_O, "Reads what replay.program has written."},
    {"type_of_node", type_of_node, METH_O, "What tells nodes of one type from those of another."},
    {"settings_now", number_of_settings, METH_NOARGS, "A number that tells the settings of the process from others."},
    {"whole", whole_of_packed, METH_O, "The tensor that was packed, decoded or made again."},
    {"planes", planes_of, METH_O, "How it is stored; None where it is not."},
    {"fetch", fetch_planes, METH_O, "The planes, from wherever they are."},
    {"release", release_packed, METH_O, "Its reader is done."},
    {"adopt", BACKSTASH_FAST(adopt_for), METH_FASTCALL, "Decodes into that memory from now on."},
    {"delegate", BACKSTASH_FAST(set_delegate), METH_FASTCALL, "Puts a Saved in its place."},
    {"configure", BACKSTASH_FAST(configure), METH_FASTCALL, "Takes what it needs of Python."},
    {"configure_holding", BACKSTASH_FAST(configure_holding), METH_FASTCALL, "Takes what holds and reads rare tensors."},
    {"configure_dispatch", BACKSTASH_FAST(configure_dispatch), METH_FASTCALL, "Takes what handle_torch_function needs."},
    {"configure_sizes", BACKSTASH_FAST(configure_sizes), METH_FASTCALL, "Takes the names that say which sizes are large."},
    {"handle_torch_function", BACKSTASH_FAST(handle_torch_function), METH_FASTCALL | METH_KEYWORDS,
     "torch's function of that name, without Python in passes that are known."},
    {"hold", BACKSTASH_FAST(hold_one), METH_FASTCALL, "Holds a tensor with its version: see held.Holding."},
    {"read", BACKSTASH_FAST(read_one), METH_FASTCALL, "Reads what was held: see held.Reading."},
    {"stand_in", begin_standing_in, METH_NOARGS, "Torch asks here for the hooks of an idle Session, until stand_back."},
    {"stand_back", end_standing_in, METH_NOARGS, "It does no longer."},
    {"is_traced", is_traced_now, METH_NOARGS, "See torch_internals.is_traced."},
    {"is_odd", is_odd_tensor, METH_O, "See saved.is_odd."},
    {"owns_memory", owns_memory, METH_O, "See saved.owns_memory."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "_replay", "Forward passes that go as an earlier one went.", -1, functions,
                       nullptr, nullptr, nullptr, nullptr};

bool make_types() {
    packed_type.tp_name = "backstash.interpreter._replay.Packed";
    packed_type.tp_basicsize = sizeof(Packed);
    packed_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    packed_type.tp_dealloc = packed_dealloc;
    packed_type.tp_getset = packed_attributes;
    packed_type.tp_methods = packed_methods;
    replayer_type.tp_name = "backstash.interpreter._replay.Replayer";
    replayer_type.tp_basicsize = sizeof(Replayer);
    replayer_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    replayer_type.tp_new = replayer_new;
    replayer_type.tp_dealloc = replayer_dealloc;
    replayer_type.tp_traverse = replayer_traverse;
    replayer_type.tp_clear = replayer_clear;
    replayer_type.tp_methods = replayer_methods;
    replayer_type.tp_getset = replayer_attributes;
    return PyType_Ready(&packed_type) == 0 && PyType_Ready(&replayer_type) == 0 && make_lock_type() &&
           make_holder_type();
}

}  // namespace
}  // namespace replay
}  // namespace backstash

PyMODINIT_FUNC PyInit__replay() {
    using namespace backstash::replay;
    if (!make_types()) return nullptr;
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    PyObject* nn = PyImport_ImportModule("torch.nn");
    backstash::replay::ParameterClass = nn == nullptr ? nullptr : PyObject_GetAttrString(nn, "Parameter");
    Py_XDECREF(nn);
    const bool is_whole = backstash::replay::ParameterClass != nullptr &&
                          PyModule_AddStringConstant(module, "TORCH", TORCH_VERSION) == 0 &&
                          PyModule_AddObjectRef(module, "Replayer", reinterpret_cast<PyObject*>(&replayer_type)) == 0 &&
                          PyModule_AddObjectRef(module, "Lock", reinterpret_cast<PyObject*>(&lock_type)) == 0 &&
                          PyModule_AddObjectRef(module, "Holder", reinterpret_cast<PyObject*>(&holder_type)) == 0;
    return is_whole ? module : nullptr;
}
