// A launcher of compiled CUDA kernels: a function of Python's limited API that calls the driver itself.
//
// libcuda is opened when the first kernel is loaded, by its name, so that nothing here needs CUDA to be compiled or
// imported. A kernel belongs to the primary context of its device, which is torch's.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>

namespace {

using Context = void*;
using Module = void*;
using Function = void*;

// Those functions of the driver that are called, with their types.
struct Driver {
    int (*device_get)(int*, int);
    int (*retain_primary)(Context*, int);
    int (*get_current)(Context*);
    int (*set_current)(Context);
    int (*load_data)(Module*, const void*);
    int (*get_function)(Function*, Module, const char*);
    int (*set_attribute)(Function, int, int);
    int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*error_name)(int, const char**);
    bool is_open = false;
} driver;

constexpr int kMaxDynamicShared = 8;          // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int64_t kSharedByDefault = 48 << 10;  // a kernel that needs more has to ask
constexpr size_t kMostArguments = 64;

// A kernel in a context. It is never unloaded: its address is what Python knows it by.
struct Kernel {
    Function function = nullptr;
    Context context = nullptr;
    unsigned threads = 0, shared = 0;
    std::string kinds;  // of the arguments: see launch
};

PyObject* s_data_ptr = nullptr;

bool fails(int code, const char* what) {
    if (code == 0) return false;
    const char* name = nullptr;
    if (driver.error_name == nullptr || driver.error_name(code, &name) != 0 || name == nullptr) name = "unknown error";
    PyErr_Format(PyExc_RuntimeError, "asked the CUDA driver for %s, got error %d (%s)", what, code, name);
    return true;
}

template <class F>
bool find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) PyErr_Format(PyExc_OSError, "asked the CUDA driver for the function %s, which it lacks", name);
    return function != nullptr;
}

// open_driver(path): opens libcuda.
PyObject* open_driver(PyObject*, PyObject* path) {
    PyObject* bytes = PyUnicode_EncodeFSDefault(path);
    if (bytes == nullptr) return nullptr;
    void* library = dlopen(PyBytes_AsString(bytes), RTLD_NOW | RTLD_LOCAL);
    Py_DECREF(bytes);
    if (library == nullptr) return PyErr_Format(PyExc_OSError, "asked for the CUDA driver, got: %s", dlerror());
    Driver found;
    const bool has_all =
        find(library, "cuDeviceGet", found.device_get) &&
        find(library, "cuDevicePrimaryCtxRetain", found.retain_primary) &&
        find(library, "cuCtxGetCurrent", found.get_current) && find(library, "cuCtxSetCurrent", found.set_current) &&
        find(library, "cuModuleLoadData", found.load_data) &&
        find(library, "cuModuleGetFunction", found.get_function) &&
        find(library, "cuFuncSetAttribute", found.set_attribute) &&
        find(library, "cuLaunchKernel", found.launch) && find(library, "cuGetErrorName", found.error_name);
    if (!has_all) return nullptr;
    found.is_open = true;
    driver = found;
    Py_RETURN_NONE;
}

// Makes a context current while the block runs.
class Within {
public:
    explicit Within(Context wanted) {
        if (fails(driver.get_current(&before_), "the current context")) return;
        is_other_ = before_ != wanted;
        is_there_ = !is_other_ || !fails(driver.set_current(wanted), "another current context");
    }
    ~Within() {
        if (is_there_ && is_other_ && before_ != nullptr) driver.set_current(before_);
    }
    explicit operator bool() const { return is_there_; }

private:
    Context before_ = nullptr;
    bool is_other_ = false, is_there_ = false;
};

// load_kernel(image, name, device, threads, shared, kinds): the kernel's address, by which launch knows it.
PyObject* load_kernel(PyObject*, PyObject* args) {
    const char *image, *name, *kinds;
    Py_ssize_t nbytes;
    int device;
    unsigned threads, shared;
    if (!PyArg_ParseTuple(args, "y#siIIs", &image, &nbytes, &name, &device, &threads, &shared, &kinds)) return nullptr;
    if (!driver.is_open) return PyErr_Format(PyExc_RuntimeError, "asked for a kernel before the CUDA driver was opened");
    if (std::strlen(kinds) > kMostArguments || std::strspn(kinds, "pilfd0") != std::strlen(kinds))
        return PyErr_Format(PyExc_ValueError, "asked for arguments of the kinds %s, but there are p, i, l, f, d and 0", kinds);
    int ordinal = 0;
    Context context = nullptr;
    if (fails(driver.device_get(&ordinal, device), "the device")) return nullptr;
    if (fails(driver.retain_primary(&context, ordinal), "the primary context")) return nullptr;
    const Within within(context);
    if (!within) return nullptr;
    Module module = nullptr;
    Function function = nullptr;
    if (fails(driver.load_data(&module, image), "the module of a kernel")) return nullptr;
    if (fails(driver.get_function(&function, module, name), "the kernel")) return nullptr;
    const bool is_large = int64_t(shared) > kSharedByDefault;
    if (is_large && fails(driver.set_attribute(function, kMaxDynamicShared, int(shared)), "more shared memory"))
        return nullptr;
    auto* kernel = new Kernel{function, context, threads, shared, kinds};
    return PyLong_FromVoidPtr(kernel);
}

// launch(kernel, blocks, stream, *arguments): p is a tensor or None, i and l are integers of 32 and 64 bits, f and d
// floats of as many, and 0 is a null pointer that is not given.
PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number < 3) return PyErr_Format(PyExc_TypeError, "launch takes a kernel, blocks, a stream and arguments");
    const auto* kernel = static_cast<const Kernel*>(PyLong_AsVoidPtr(args[0]));
    const unsigned long blocks = PyLong_AsUnsignedLong(args[1]);
    void* stream = PyLong_AsVoidPtr(args[2]);
    if (PyErr_Occurred()) return nullptr;
    if (kernel == nullptr) return PyErr_Format(PyExc_ValueError, "launch was given no kernel");
    if (blocks == 0) Py_RETURN_NONE;  // which the driver refuses
    uint64_t room[kMostArguments];
    void* places[kMostArguments];
    Py_ssize_t next = 3;
    size_t count = 0;
    for (const char kind : kernel->kinds) {
        uint64_t& value = room[count];
        places[count++] = &value;
        value = 0;
        if (kind == '0') continue;
        if (next == number) return PyErr_Format(PyExc_TypeError, "launch was given too few arguments for the kernel");
        PyObject* given = args[next++];
        switch (kind) {
            case 'p': {
                if (given == Py_None) break;
                PyObject* address = PyObject_CallMethodObjArgs(given, s_data_ptr, nullptr);
                if (address == nullptr) return nullptr;
                value = PyLong_AsUnsignedLongLong(address);
                Py_DECREF(address);
                break;
            }
            case 'i': {
                const int32_t integer = int32_t(PyLong_AsLong(given));
                std::memcpy(&value, &integer, sizeof integer);
                break;
            }
            case 'l': {
                const int64_t integer = PyLong_AsLongLong(given);
                std::memcpy(&value, &integer, sizeof integer);
                break;
            }
            case 'f': {
                const float real = float(PyFloat_AsDouble(given));
                std::memcpy(&value, &real, sizeof real);
                break;
            }
            default: {
                const double real = PyFloat_AsDouble(given);
                std::memcpy(&value, &real, sizeof real);
            }
        }
        if (PyErr_Occurred()) return nullptr;
    }
    if (next != number) return PyErr_Format(PyExc_TypeError, "launch was given too many arguments for the kernel");
    const Within within(kernel->context);
    if (!within) return nullptr;
    const int code = driver.launch(kernel->function, unsigned(blocks), 1, 1, kernel->threads, 1, 1, kernel->shared, stream,
                                   places, nullptr);
    if (fails(code, "the launch of a kernel")) return nullptr;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"open_driver", open_driver, METH_O, "Opens libcuda by its path."},
    {"load_kernel", load_kernel, METH_VARARGS, "Loads a kernel of a cubin or fatbin."},
    {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch)), METH_FASTCALL, "Launches a kernel."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_launch", "A launcher of compiled CUDA kernels.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__launch() {
    s_data_ptr = PyUnicode_InternFromString("data_ptr");
    return s_data_ptr == nullptr ? nullptr : PyModule_Create(&definition);
}
