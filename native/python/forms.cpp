// Encodes and decodes values by the exact codecs that policies name most often: see stash/coders.py, Encoder.form in
// stash/encode.py, the codecs themselves, and stores/device.py, which holds what was encoded.
#include "kernels.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace backstash {
namespace {

enum Kind { REFUSES, BITMASK, BINARY, ZVC };  // as in stash/coders.py

// The elements of a tensor that fills its storage.
struct Data {
    const void* at = nullptr;
    long long nbytes = 0, numel = 0;
    int width = 0, threads = 1;
};

// What a sample shows: see codecs/sample.py.
struct Look {
    int64_t elements = 0, nonzeros = 0, patterns = 0, runs = 0, run = 0, step = 0;
};

int64_t mask_nbytes(int64_t numel) { return (numel + 7) / 8; }

int64_t zvc_chunks(int64_t numel) { return (numel + 4095) / 4096; }

// Takes how many elements a tensor with that spec has; whether that went well.
bool take_sizes(PyObject* spec, Data& data) {
    data.nbytes = number_at(spec, layout::spec.nbytes);
    data.width = static_cast<int>(integer(at(spec, layout::spec.dtype), s_itemsize));
    if (PyErr_Occurred()) return false;
    data.numel = data.nbytes / data.width;
    data.threads = threads_for(data.nbytes);
    return !PyErr_Occurred();
}

Look look_at_sample(const Data& data) {
    constexpr int64_t WHOLE = 4096, RUN = 32;
    Look look;
    const bool is_whole = data.numel <= WHOLE;
    look.runs = is_whole ? 1 : RUN;
    look.run = is_whole ? data.numel : RUN;
    look.step = is_whole ? 1 : (data.numel - RUN) / (RUN - 1);
    look.elements = look.runs * look.run;
    kernel::bs_look(data.at, data.width, look.runs, look.run, look.step, &look.nonzeros, &look.patterns);
    return look;
}

// The first element of a sample and the first one with other bits, see bitmask._first_two; the former twice where there
// is no other.
template <class Bits>
void first_two(const Data& data, const Look& look, Bits* pair) {
    const Bits* x = static_cast<const Bits*>(data.at);
    pair[0] = pair[1] = x[0];
    for (int64_t run = 0; run < look.runs; ++run)
        for (const Bits* each = x + run * look.step; each < x + run * look.step + look.run; ++each)
            if (*each != pair[0]) {
                pair[1] = *each;
                return;
            }
}

template <class Bits>
void read_pair(const void* from, uint64_t* pair) {
    Bits bits[2];
    std::memcpy(bits, from, sizeof bits);
    pair[0] = bits[0];
    pair[1] = bits[1];
}

// Why a codec declines a tensor by its looks: a new reference, None where it does not, or null with an error set.
PyObject* declined_because(PyObject* coder, const Data& data, const Look& look) {
    const long kind = PyLong_AsLong(at(coder, layout::coder.kind));
    if (kind == REFUSES) return Py_NewRef(at(coder, layout::coder.reason));
    if (kind == BINARY) {
        if (look.patterns == 2) return Py_NewRef(Py_None);
        return PyUnicode_FromString(look.patterns > 2 ? "a sample has more than two values" : "a sample has one value");
    }
    if (kind == ZVC) {
        const double density = static_cast<double>(look.nonzeros) / static_cast<double>(look.elements);
        const double bits = 8.0 * data.width;
        const double saving = 1.0 - density * bits / bits - 1.0 / bits;
        if (saving >= PyFloat_AsDouble(at(coder, layout::coder.min_saving)))
            return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
        char text[64];
        std::snprintf(text, sizeof text, "%.0f%% of a sample is not zero", density * 100.0);
        return PyUnicode_FromString(text);
    }
    return Py_NewRef(Py_None);
}

// A dict of planes by their names, which the garbage collector need not look at, and their bytes.
class Planes {
public:
    Planes() : dict_(PyDict_New()) {}
    // Adds memory for so many elements; where they begin, null with an error set.
    void* add(PyObject* name, long long numel, PyObject* dtype, int width) {
        Owned plane(dict_ ? empty_plane(numel, dtype) : nullptr);
        if (!plane || PyDict_SetItem(dict_.get(), name, plane.get()) != 0) return nullptr;
        nbytes += numel * width;
        return data_of(plane.get());
    }
    PyObject* release() { return untracked(dict_.release()); }

    long long nbytes = 0;

private:
    Owned dict_;
};

bool encode_bitmask(PyObject* coder, const Data& data, Planes& planes) {
    const int element = static_cast<int>(number_at(coder, layout::coder.element));
    const int test = static_cast<int>(number_at(coder, layout::coder.test));
    const double lo = PyFloat_AsDouble(at(coder, layout::coder.lo)), hi = PyFloat_AsDouble(at(coder, layout::coder.hi));
    if (PyErr_Occurred()) return false;
    void* mask = planes.add(s_mask, mask_nbytes(data.numel), uint8, 1);
    if (PyErr_Occurred()) return false;
    const WithoutGil running(data.nbytes);
    kernel::bs_bitmask_encode(data.at, data.numel, element, test, lo, hi, mask, data.threads);
    return true;
}

// Returns whether there were no more than two values, or an error is set.
bool encode_binary(PyObject* dtype, const Data& data, const Look& look, Planes& planes) {
    void* mask = planes.add(s_mask, mask_nbytes(data.numel), uint8, 1);
    if (PyErr_Occurred()) return false;
    void* pair = planes.add(s_pair, 2, dtype, data.width);
    if (PyErr_Occurred()) return false;
    uint64_t bits[2] = {0, 0};
    switch (data.width) {
        case 2: first_two(data, look, static_cast<uint16_t*>(pair)); read_pair<uint16_t>(pair, bits); break;
        case 4: first_two(data, look, static_cast<uint32_t*>(pair)); read_pair<uint32_t>(pair, bits); break;
        default: first_two(data, look, static_cast<uint64_t*>(pair)); read_pair<uint64_t>(pair, bits); break;
    }
    const WithoutGil running(data.nbytes);
    return kernel::bs_binary_encode(data.at, data.numel, data.width, bits[0], bits[1], mask, data.threads) == 0;
}

bool encode_zvc(PyObject* dtype, const Data& data, Planes& planes) {
    const int64_t chunks = zvc_chunks(data.numel);
    void* mask = planes.add(s_mask, mask_nbytes(data.numel), uint8, 1);
    if (PyErr_Occurred()) return false;
    void* offsets = planes.add(s_offsets, chunks, int64, 8);
    if (PyErr_Occurred()) return false;
    int64_t stored = 0;
    {
        const WithoutGil running(data.nbytes);
        stored = kernel::bs_zvc_mark(data.at, data.numel, data.width, mask, offsets, data.threads);
    }
    void* values = planes.add(s_values, stored, dtype, data.width);
    if (PyErr_Occurred()) return false;
    const WithoutGil running(data.nbytes);
    kernel::bs_zvc_gather(data.at, data.numel, data.width, mask, offsets, values, stored, data.threads);
    return true;
}

// See codecs.base.Encoded: a new reference.
PyObject* make_encoded(PyObject* id, PyObject* spec, PyObject* planes) {
    Owned meta(untracked(PyDict_New()));
    PyObject* encoded = planes != nullptr && meta ? make(layout::encoded.type) : nullptr;
    if (encoded == nullptr) return Py_XDECREF(planes), nullptr;
    set(encoded, layout::encoded.codec, id);
    set(encoded, layout::encoded.spec, spec);
    give(encoded, layout::encoded.planes, planes);
    give(encoded, layout::encoded.meta, meta.release());
    return encoded;
}

bool count_in(PyObject* holdings, long long nbytes, long long values) {
    const long long held = number_at(holdings, layout::holdings.nbytes) + nbytes;
    const long long count = number_at(holdings, layout::holdings.count) + values;
    const long long peak = number_at(holdings, layout::holdings.peak_nbytes);
    if (PyErr_Occurred() || !set_number(holdings, layout::holdings.nbytes, held)) return false;
    if (held > peak && !set_number(holdings, layout::holdings.peak_nbytes, held)) return false;
    return set_number(holdings, layout::holdings.count, count);
}

// See DeviceStore.put, of a store without a limit: a new reference to the ticket.
PyObject* put(PyObject* store, PyObject* encoded, long long nbytes) {
    const Locked locked(at(store, layout::device_store._lock));
    Owned number(locked ? PyIter_Next(at(store, layout::device_store._numbers)) : nullptr);
    Owned size(number ? PyLong_FromLongLong(nbytes) : nullptr);
    Owned ticket(size ? make(layout::ticket.type) : nullptr);
    if (!ticket) return nullptr;
    set(ticket.get(), layout::ticket.number, number.get());
    set(ticket.get(), layout::ticket.nbytes, size.get());
    PyObject* values = at(store, layout::device_store._values);
    if (PyDict_SetItem(values, number.get(), encoded) != 0) return nullptr;
    if (count_in(at(store, layout::device_store._holdings), nbytes, 1)) return ticket.release();
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (PyDict_DelItem(values, number.get()) != 0) PyErr_Clear();
    PyErr_Restore(type, error, trace);
    return nullptr;
}

// See stash.value.Form: a new reference.
PyObject* make_form(PyObject* coder, PyObject* spec, PyObject* store, PyObject* ticket) {
    PyObject* form = make(layout::form.type);
    if (form == nullptr) return nullptr;
    set(form, layout::form.codec, at(coder, layout::coder.codec));
    set(form, layout::form.mask, at(coder, layout::coder.mask));
    set(form, layout::form.spec, spec);
    set(form, layout::form.store, store);
    set(form, layout::form.ticket, ticket);
    set(form, layout::form.tag, Py_None);
    set(form, layout::form.planes, Py_None);
    return form;
}

// The coders of an action at a place: a new reference, to None where there are none, or null with an error set.
PyObject* coders_at(PyObject* place, PyObject* facts, PyObject* action) {
    PyObject* known = at(place, layout::place.coders);
    if (known != Py_None && PyTuple_GetItem(known, 0) == action) return Py_NewRef(PyTuple_GetItem(known, 1));
    Owned found(PyObject_CallFunctionObjArgs(coders_of, action, facts, nullptr));
    PyObject* pair = found ? PyTuple_Pack(2, action, found.get()) : nullptr;
    if (pair == nullptr) return nullptr;
    give(place, layout::place.coders, pair);
    return found.release();
}

// Encodes by one coder, whose codec has not declined: a new Form, None where the reference has to do it.
PyObject* encode_by(PyObject* coder, PyObject* spec, const Data& data, const Look& look, PyObject* store,
                    Encoding& found) {
    PyObject *dtype = at(spec, layout::spec.dtype), *id = nullptr;
    Planes planes;
    bool is_encoded = false;
    switch (PyLong_AsLong(at(coder, layout::coder.kind))) {
        case BITMASK: is_encoded = encode_bitmask(coder, data, planes), id = bitmask_id; break;
        case BINARY: is_encoded = encode_binary(dtype, data, look, planes), id = binary_id; break;
        case ZVC: is_encoded = encode_zvc(dtype, data, planes), id = zvc_id; break;
        default: break;
    }
    if (PyErr_Occurred()) return nullptr;
    if (!is_encoded) return Py_NewRef(Py_None);
    Owned encoded(make_encoded(id, spec, planes.release()));
    Owned ticket(encoded ? put(store, encoded.get(), planes.nbytes) : nullptr);
    if (!ticket) return nullptr;
    found.nbytes = planes.nbytes;
    found.label.reset(Py_NewRef(at(coder, layout::coder.label)));
    return make_form(coder, spec, store, ticket.get());
}

// The planes that a form holds on the device, if it is one of those that are known here: borrowed; else null.
PyObject* planes_of(PyObject* form) {
    PyObject* store = at(form, layout::form.store);
    if (!is_none_at(form, layout::form.tag) || !is_a(store, layout::device_store)) return nullptr;
    PyObject* number = at(at(form, layout::form.ticket), layout::ticket.number);
    PyObject* encoded = PyDict_GetItemWithError(at(store, layout::device_store._values), number);
    return encoded == nullptr || !is_a(encoded, layout::encoded) ? nullptr : at(encoded, layout::encoded.planes);
}

// A plane with that many elements, 0 for any number: borrowed, or null.
PyObject* plane_of(PyObject* planes, PyObject* name, long long numel) {
    PyObject* plane = PyDict_Check(planes) ? PyDict_GetItemWithError(planes, name) : nullptr;
    if (plane == nullptr || !is_plain(plane)) return nullptr;
    const long long number = numel_of(plane);
    return number >= 0 && (numel == 0 || number == numel) ? plane : nullptr;
}

// The bits that a stand-in has as an element, of a type whose elements are numbers of C++; whether it is such a type.
bool bits_of(double number, PyObject* dtype, uint64_t& bits) {
    if (number != number) return false;
    if (dtype == float32) {
        const float single = static_cast<float>(number);
        uint32_t half = 0;
        std::memcpy(&half, &single, sizeof half);
        bits = half;
    } else if (dtype == float64) {
        std::memcpy(&bits, &number, sizeof bits);
    } else {
        return false;
    }
    return true;
}

// How to decode a form: the planes' memory, and which kernel reads them.
struct Decoding {
    Kind kind = REFUSES;
    const void *mask = nullptr, *offsets = nullptr, *values = nullptr;
    long long stored = 0;
    uint64_t if_set = 0, if_clear = 0;
};

// Whether a mask is decoded to two numbers, which it tells: 1 or 0, or -1 with an error set.
int take_stand_ins(PyObject* codec, PyObject* dtype, Decoding& found) {
    Owned mask(PyObject_GetAttr(codec, s_mask));
    if (!mask) return -1;
    for (PyObject* name : {s_ternary, s_nan}) {
        const int has_more = is_true(mask.get(), name);
        if (has_more != 0) return has_more < 0 ? -1 : 0;
    }
    Owned set(PyObject_GetAttr(mask.get(), s_if_set));
    Owned clear(set ? PyObject_GetAttr(mask.get(), s_if_clear) : nullptr);
    if (!clear) return -1;
    const double if_set = PyFloat_AsDouble(set.get()), if_clear = PyFloat_AsDouble(clear.get());
    if (PyErr_Occurred()) return -1;
    return bits_of(if_set, dtype, found.if_set) && bits_of(if_clear, dtype, found.if_clear);
}

// Finds out how to decode; the kind is REFUSES where the reference has to do it, or an error is set.
Decoding decoding_of(PyObject* form, const Data& data) {
    Decoding found;
    PyObject *codec = at(form, layout::form.codec), *dtype = at(at(form, layout::form.spec), layout::spec.dtype);
    PyObject *type = type_of(codec), *planes = planes_of(form);
    if (planes == nullptr || (type != zvc_type && type != binary_type && type != bitmask_type)) return found;
    if (data.width != 2 && data.width != 4 && data.width != 8) return found;
    PyObject* mask = plane_of(planes, s_mask, mask_nbytes(data.numel));
    if (mask == nullptr) return found;
    found.mask = data_of(mask);
    if (PyErr_Occurred()) return found;
    if (type == zvc_type) {
        PyObject* offsets = plane_of(planes, s_offsets, zvc_chunks(data.numel));
        PyObject* values = offsets == nullptr ? nullptr : plane_of(planes, s_values, 0);
        const int is_exact = offsets != nullptr && values != nullptr ? is_same(codec, s_values, Py_None) : 0;
        if (is_exact <= 0) return found;
        Owned own(tensor_dtype(values));
        if (!own || own.get() != dtype) return found;
        found.stored = numel_of(values);
        if (PyErr_Occurred()) return found;
        found.offsets = data_of(offsets);
        if (PyErr_Occurred()) return found;
        found.values = data_of(values);
        if (!PyErr_Occurred()) found.kind = ZVC;
    } else if (type == binary_type) {
        PyObject* pair = plane_of(planes, s_pair, 2);
        Owned own(pair == nullptr ? nullptr : tensor_dtype(pair));
        if (!own || own.get() != dtype) return found;
        uint64_t bits[2] = {0, 0};
        const void* from = data_of(pair);
        if (PyErr_Occurred()) return found;
        data.width == 2   ? read_pair<uint16_t>(from, bits)
        : data.width == 4 ? read_pair<uint32_t>(from, bits)
                          : read_pair<uint64_t>(from, bits);
        found.if_clear = bits[0], found.if_set = bits[1], found.kind = BINARY;
    } else {
        const int is_plain_mask = PyDict_Size(planes) == 1 ? take_stand_ins(codec, dtype, found) : 0;
        if (is_plain_mask > 0) found.kind = BITMASK;
    }
    return found;
}

}  // namespace

PyObject* form_of(PyObject* encoder, PyObject* place, PyObject* facts, PyObject* spec, PyObject* action,
                  PyObject* whole, Encoding& found) {
    if (kernel::bs_look == nullptr || !is_plain(whole)) return Py_NewRef(Py_None);
    Owned coders(coders_at(place, facts, action));  // which another thread may replace while a kernel runs
    if (!coders || coders.get() == Py_None) return coders.release();
    Owned store(Py_XNewRef(PyDict_GetItemString(at(encoder, layout::encoder.stores), "device")));
    if (!store || !is_a(store.get(), layout::device_store)) return Py_NewRef(Py_None);
    PyObject* holdings = at(store.get(), layout::device_store._holdings);
    if (!is_none_at(holdings, layout::holdings.capacity)) return Py_NewRef(Py_None);
    Data data;
    if (!take_sizes(spec, data)) return nullptr;
    data.at = data_of(whole);
    if (PyErr_Occurred()) return nullptr;
    Look look;
    Owned reason(nullptr);
    for (Py_ssize_t index = 0; index < PyTuple_Size(coders.get()); ++index) {
        PyObject* coder = PyTuple_GetItem(coders.get(), index);
        const long kind = PyLong_AsLong(at(coder, layout::coder.kind));
        if ((kind == BINARY || kind == ZVC) && look.elements == 0) look = look_at_sample(data);
        Owned why(declined_because(coder, data, look));
        if (!why) return nullptr;
        if (why.get() == Py_None) return encode_by(coder, spec, data, look, store.get(), found);
        reason.reset(PyUnicode_FromFormat("%U: %U", at(coder, layout::coder.label), why.get()));
        if (!reason) return nullptr;
    }
    return reason.release();
}

PyObject* decode_form(PyObject* value, PyObject* form) {
    if (kernel::bs_look == nullptr || !is_a(form, layout::form)) return Py_NewRef(Py_None);
    if (!is_none_at(at(value, layout::value.live), layout::live.watcher)) return Py_NewRef(Py_None);
    PyObject* spec = at(form, layout::form.spec);
    Owned type(PyObject_GetAttr(at(spec, layout::spec.device), s_type));
    if (!type) return nullptr;
    if (PyUnicode_CompareWithASCIIString(type.get(), "cpu") != 0) return Py_NewRef(Py_None);
    Data data;
    if (!take_sizes(spec, data)) return nullptr;
    const Decoding how = decoding_of(form, data);
    if (PyErr_Occurred()) return nullptr;
    if (how.kind == REFUSES) return Py_NewRef(Py_None);
    Owned whole(take_memory(value, spec));
    void* target = whole ? data_of(whole.get()) : nullptr;
    if (PyErr_Occurred()) return nullptr;
    int damage = 0;
    {
        const WithoutGil running(data.nbytes);
        if (how.kind == ZVC)
            damage = kernel::bs_zvc_decode(how.mask, how.offsets, how.values, how.stored, target, data.numel,
                                           data.width, data.threads);
        else
            kernel::bs_mask_decode(how.mask, target, data.numel, data.width, how.if_set, how.if_clear, data.threads);
    }
    return damage == 0 ? whole.release() : Py_NewRef(Py_None);  // the reference says what is damaged
}

// See Form.__del__, and DeviceStore.drop.
PyObject* finalize_form(PyObject* form, PyObject*) {
    PyObject *store = at(form, layout::form.store), *ticket = at(form, layout::form.ticket);
    if (store == nullptr || ticket == nullptr) Py_RETURN_NONE;  // its __init__ has failed
    if (!is_a(store, layout::device_store)) return call_in_finalizer(store, s_drop, ticket);
    PyObject *values = at(store, layout::device_store._values), *number = at(ticket, layout::ticket.number);
    Owned held(nullptr);  // which frees the planes when the lock is free again
    const Locked locked(at(store, layout::device_store._lock));
    if (!locked) return nullptr;
    held.reset(Py_XNewRef(PyDict_GetItemWithError(values, number)));
    if (!held) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    const bool is_gone = PyDict_DelItem(values, number) == 0;
    const long long nbytes = number_at(ticket, layout::ticket.nbytes);
    return is_gone && count_in(at(store, layout::device_store._holdings), -nbytes, -1) ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace backstash
