// What a Session has of forward passes that go as earlier ones went.
#pragma once

#include "run.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace backstash::replay {

struct Replayer {
    PyObject_HEAD
    std::shared_ptr<Session> session;
    std::shared_ptr<Run> run;        // in progress
    std::shared_ptr<std::vector<Taken>> taken;  // in the latest one
    Object kinds;                    // of functions: see replaying._number_of
    Object otherwise;                // watches functions on the long way
    bool rests;                      // no value on the long way waits, or is made again from what may change
    std::shared_ptr<Run> ending;     // the pass of which Python is being told that it ends
};

extern PyObject *ParameterClass, *ScalarOf, *HoldReference, *ReadReference;

extern PyTypeObject lock_type, holder_type;
bool make_lock_type();
bool make_holder_type();

bool is_plain(PyObject* object);     // a Tensor or a Parameter, of no class of the program
bool is_plain(const at::Tensor& x);
inline bool is_leaf_of_graph(const at::Tensor& x) { return x.requires_grad() && x.is_leaf(); }
bool is_parameter(const at::Tensor& x);  // of the model, or a view of one
bool is_ordinary(const at::Tensor& x);   // of memory in strides, without flags that change what it says
bool is_odd(const at::Tensor& x);    // see saved.is_odd
bool is_traced();                    // see torch_internals.is_traced
PyObject* hold(PyObject* holding, PyObject* object);  // see held.Holding
PyObject* read(PyObject* reading, PyObject* packed);  // see held.Reading

PyObject* pack(Replayer& replayer, PyObject* object);
PyObject* call_function(Replayer& replayer, PyObject* function, PyObject* args, PyObject* kwargs);
// Outside of a pass: what is made again from memory that the function may change, or hands on, is held again. Whether the
// long way need not hear of the call: Note: [between passes] in replay/replaying.py.
bool concerns_nobody(Replayer& replayer, PyObject* function, PyObject* args, PyObject* kwargs);

class WithGil {
public:
    WithGil() : state_(PyGILState_Ensure()) {}
    ~WithGil() { PyGILState_Release(state_); }

private:
    PyGILState_STATE state_;
};

// Python's object of a tensor; null where it has none. Another one in each torch.
template <class Place>
auto object_at(const Place& place, int) -> decltype(place.load_pyobj()) {
    return place.load_pyobj();
}
template <class Place>
PyObject* object_at(const Place& place, long) {
    return place.check_pyobj().value_or(nullptr);
}

// Its class: one that has no object of Python yet would be given a Tensor.
inline PyObject* class_of(const at::Tensor& x) {
    PyObject* object = object_at(*x.unsafeGetTensorImpl()->pyobj_slot(), 0);
    return object == nullptr ? THPVariableClass : reinterpret_cast<PyObject*>(Py_TYPE(object));
}

inline c10::SafePyObject shared_with_torch(Object object) { return {object.release(), getPyInterpreter()}; }

// A known call in progress: what autograd saves in it is put aside.
struct Opened {
    Opened(Replayer& replayer, std::shared_ptr<Run> of, const Call* known);
    ~Opened() { end(); }
    void end();
    bool sees() const;
    bool keep(const at::Tensor& x, const std::shared_ptr<Kept>& fresh);  // false: it takes nothing more

    Replayer* replayer;
    std::shared_ptr<Run> run;
    const Call* known;
    Opened* before;
    size_t depth = 0;
    std::mutex mutex;  // of those below, which another thread may take in
    std::vector<std::shared_ptr<Kept>> kept;
    std::atomic<bool> is_closed = true;
};
// Torch asks for hooks here, between these two.
void stand_in();
void stand_back();
std::unique_ptr<torch::autograd::SavedVariableHooks> hook_that_holds();  // null where no idle Session's are the innermost

void take_in_all(Run& run);                       // what is put aside
Object take_next(Run& run, const at::Tensor& x);  // nothing where it is not what the script says

void break_run(Replayer& replayer);
void end_run(Replayer& replayer, bool is_left);

}  // namespace backstash::replay
