// Takes a few bits of a value that is going to be made again: see stash/sample.py.
#include "slots.h"

#include <algorithm>
#include <cstring>

namespace backstash {
namespace {

constexpr long long ELEMENTS = 64;         // as in sample.py
constexpr long long SPREAD = 0x9E3779B1;   // as in sample.py
constexpr long long MOST_STEPS = 1 << 30;  // times SPREAD is still a long long

// How many of the elements from the first one on, that far apart, there are: at most so many.
long long fitting_elements(long long begin, long long step, long long there, long long most) {
    const long long fitting = begin < there && step > 0 ? (there - begin + step - 1) / step : 0;
    return fitting < most ? fitting : most;
}

// The bytes of elements of ``size`` bytes at even distances, of as many as are there.
PyObject* elements_at(const void* data, long long there, long long size, long long begin, long long step,
                      long long most) {
    const char* from = static_cast<const char*>(data);
    const long long many = fitting_elements(begin, step, there, most);
    Owned bytes(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size * many)));
    if (!bytes) return nullptr;
    char* to = PyBytes_AsString(bytes.get());
    for (long long index = 0; index < many; ++index)
        std::memcpy(to + index * size, from + (begin + index * step) * size, static_cast<std::size_t>(size));
    return bytes.release();
}

}  // namespace

// The bytes of elements of a plain tensor on CPU that is dense in memory: see sample.Sample. It takes the tensor,
// the first element, how far they are apart, and how many there are at most.
PyObject* elements(PyObject*, PyObject* const* args, Py_ssize_t number) {
    if (number != 4 || !is_plain(args[0])) {
        PyErr_SetString(PyExc_TypeError, "elements takes a plain tensor and three numbers");
        return nullptr;
    }
    NoTorchFunction unseen(args[0]);
    const void* from = unseen ? address_of(args[0]) : nullptr;
    if (!unseen || PyErr_Occurred()) return nullptr;
    const long long there = numel_of(args[0]), size = there < 0 ? -1 : itemsize_of(args[0]);
    if (size < 0) return nullptr;
    const long long begin = PyLong_AsLongLong(args[1]), step = PyLong_AsLongLong(args[2]);
    const long long most = PyLong_AsLongLong(args[3]);
    return PyErr_Occurred() ? nullptr : elements_at(from, there, size, begin, step, most);
}

// See Sample.of: the sample of a value with that spec that is made again bit for bit.
PyObject* sample(PyObject* remaking, PyObject* whole, PyObject* spec) {
    PyObject* full = at(remaking, layout::remaking._full);
    const long long step_number = number_at(remaking, layout::remaking._number);
    const int on_cpu = is_on_cpu(whole);
    if (on_cpu < 0 || PyErr_Occurred()) return nullptr;
    if (full == Py_True || !on_cpu || step_number > MOST_STEPS) {
        PyObject* number = at(remaking, layout::remaking._number);
        PyObject* rows = at(remaking, layout::remaking._rows);
        return PyObject_CallFunctionObjArgs(sample_of, whole, number, full, Py_None, rows, nullptr);
    }
    const void* data = address_of(whole);
    const long long size = PyErr_Occurred() ? -1 : itemsize_of(whole);
    if (size <= 0) return nullptr;
    const long long there = number_at(spec, layout::spec.nbytes) / size;
    const long long step = std::max(1LL, there / ELEMENTS), begin = step_number * SPREAD % step;
    Owned made(make(layout::sample.type));
    if (!made) return nullptr;
    PyObject* bits = elements_at(data, there, size, begin, step, ELEMENTS);
    if (bits == nullptr) return nullptr;
    give(made.get(), layout::sample.bits, bits);
    const auto& at_ = layout::sample;
    for (Py_ssize_t none : {at_.checksum, at_.allows, at_.rows, at_.slab, at_.picked}) set(made.get(), none, Py_None);
    const bool is_whole =
        set_number(made.get(), layout::sample.begin, begin) && set_number(made.get(), layout::sample.step, step);
    return is_whole ? made.release() : nullptr;
}

// Whether a plain tensor has the elements of a Sample: 1, or 0 where it may have others, or -1 with an error set.
int has_elements(PyObject* x, PyObject* sample) {
    PyObject* bits = at(sample, layout::sample.bits);
    if (!PyBytes_CheckExact(bits) || !is_none_at(sample, layout::sample.checksum)) return 0;
    const int is_here = is_on_cpu(x);
    if (is_here <= 0) return is_here;
    const char* from = static_cast<const char*>(address_of(x));
    if (PyErr_Occurred()) return -1;
    const long long there = numel_of(x), size = there < 0 ? -1 : itemsize_of(x);
    if (size < 0) return -1;
    const long long begin = number_at(sample, layout::sample.begin), step = number_at(sample, layout::sample.step);
    const long long most = ELEMENTS;
    if (PyErr_Occurred()) return -1;
    const long long many = fitting_elements(begin, step, there, most);
    if (size * many != PyBytes_Size(bits)) return 0;
    const char* known = PyBytes_AsString(bits);
    for (long long index = 0; index < many; ++index)
        if (std::memcmp(known + index * size, from + (begin + index * step) * size, static_cast<std::size_t>(size)) != 0)
            return 0;
    return 1;
}

}  // namespace backstash
