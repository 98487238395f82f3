// The lock of a Session: as threading.RLock, and without a way through Python for the interpreter, which takes it twice
// per saved tensor.
#include "replayer.h"

namespace backstash::replay {

PyTypeObject lock_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

struct Lock {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner;  // where the depth is not 0
    long depth;
};

Lock& lock_of(PyObject* object) { return *reinterpret_cast<Lock*>(object); }

// Whether the lock was taken, which one that may wait does in any case.
bool acquire(Lock& lock, bool waits) {
    const unsigned long me = PyThread_get_thread_ident();
    if (lock.depth != 0 && lock.owner == me) {
        ++lock.depth;
        return true;
    }
    if (PyThread_acquire_lock(lock.lock, NOWAIT_LOCK) == 0) {
        if (!waits) return false;
        Py_BEGIN_ALLOW_THREADS;
        PyThread_acquire_lock(lock.lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS;
    }
    lock.owner = me;
    lock.depth = 1;
    return true;
}

void release(Lock& lock) {
    if (--lock.depth == 0) PyThread_release_lock(lock.lock);
}

PyObject* make_lock(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* made = type->tp_alloc(type, 0);
    if (made == nullptr) return nullptr;
    lock_of(made).lock = PyThread_allocate_lock();
    if (lock_of(made).lock != nullptr) return made;
    Py_DECREF(made);
    return PyErr_NoMemory();
}

void free_lock(PyObject* object) {
    if (lock_of(object).lock != nullptr) PyThread_free_lock(lock_of(object).lock);
    Py_TYPE(object)->tp_free(object);
}

PyObject* enter_lock(PyObject* object, PyObject*) { return PyBool_FromLong(acquire(lock_of(object), true)); }

PyObject* acquire_lock(PyObject* object, PyObject* waits) {
    return PyBool_FromLong(acquire(lock_of(object), waits == Py_True));
}

PyObject* exit_lock(PyObject* object, PyObject*) {
    Lock& lock = lock_of(object);
    if (lock.depth == 0 || lock.owner != PyThread_get_thread_ident()) {
        PyErr_SetString(PyExc_RuntimeError, "a lock was released by a thread that has not taken it");
        return nullptr;
    }
    release(lock);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"__enter__", enter_lock, METH_NOARGS, "Waits until no other thread has it, and takes it."},
    {"__exit__", exit_lock, METH_VARARGS, "Gives it back."},
    {"acquire", acquire_lock, METH_O, "Takes it, and waits for it if that is asked; returns whether it was taken."},
    {"release", exit_lock, METH_NOARGS, "Gives it back."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool make_lock_type() {
    lock_type.tp_name = "backstash.interpreter._replay.Lock";
    lock_type.tp_basicsize = sizeof(Lock);
    lock_type.tp_flags = Py_TPFLAGS_DEFAULT;
    lock_type.tp_new = make_lock;
    lock_type.tp_dealloc = free_lock;
    lock_type.tp_methods = methods;
    return PyType_Ready(&lock_type) == 0;
}

Locked::Locked(PyObject* lock) : lock_(lock) { acquire(lock_of(lock_), true); }

Locked::~Locked() { release(lock_of(lock_)); }

}  // namespace backstash::replay
