// Reads torch's own objects for the compiled functions: see native/python/access.h. It is built for one torch, and the
// module has no use but to hand the table over.
#include "../python/access.h"
#include "transforms.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

namespace backstash {
namespace {

const at::Tensor& tensor_of(PyObject* x) { return THPVariable_Unpack(x); }

int facts(PyObject* object, Facts* found) try {
    const at::Tensor& x = tensor_of(object);
    if (x.is_nested()) return 0;  // its sizes are several
    const bool is_strided = x.layout() == at::kStrided;
    *found = Facts{};
    found->is_strided = is_strided;
    found->is_odd = x.is_quantized() || x.is_conj() || x.is_neg() || x.is_meta() || x.is_inference() || x._is_zerotensor();
    found->is_cpu = x.is_cpu();
    found->is_floating = x.is_floating_point();
    found->requires_grad = x.requires_grad();
    found->is_leaf = x.is_leaf();
    found->is_view = x.is_view();
    found->dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(x.scalar_type()));
    found->itemsize = static_cast<int64_t>(x.dtype().itemsize());
    found->version = x.is_inference() ? -1 : static_cast<int64_t>(x._version());
    if (x.has_storage()) {
        c10::StorageImpl* storage = x.storage().unsafeGetStorageImpl();
        found->storage = storage;
        found->storage_nbytes = static_cast<int64_t>(storage->nbytes());
    }
    if (!is_strided) return 1;
    found->dim = x.dim();
    found->sizes = x.sizes().data();
    found->strides = x.strides().data();
    found->offset = x.storage_offset();
    found->numel = x.numel();
    found->nbytes = found->numel * found->itemsize;
    return 1;
} catch (const std::exception&) {
    return 0;
}

int is_on(PyObject* x, PyObject* device) {
    return THPDevice_Check(device) && tensor_of(x).device() == reinterpret_cast<THPDevice*>(device)->device;
}

void* data(PyObject* x) {
    HANDLE_TH_ERRORS
    return tensor_of(x).data_ptr();
    END_HANDLE_TH_ERRORS_RET(nullptr)
}

PyObject* base(PyObject* object) {
    const at::Tensor& x = tensor_of(object);
    if (!x.is_view()) Py_RETURN_NONE;
    return THPVariable_Wrap(at::Tensor(x._base()));
}

template <class Make>
PyObject* made_by(Make make) {
    HANDLE_TH_ERRORS
    return THPVariable_Wrap(make());
    END_HANDLE_TH_ERRORS
}

PyObject* detach(PyObject* x) {
    return made_by([&] { return tensor_of(x).detach(); });
}

PyObject* clone(PyObject* x) {
    return made_by([&] { return tensor_of(x).detach().clone(); });
}

PyObject* storage(PyObject* x) {
    HANDLE_TH_ERRORS
    return THPStorage_Wrap(tensor_of(x).storage());
    END_HANDLE_TH_ERRORS
}

PyObject* as_strided(PyObject* x, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t offset) {
    return made_by([&] {
        return tensor_of(x).as_strided(at::IntArrayRef(sizes, dim), at::IntArrayRef(strides, dim), offset);
    });
}

PyObject* empty(int64_t dim, const int64_t* sizes, const int64_t* strides, PyObject* dtype, PyObject* device) {
    return made_by([&] {
        const auto options = at::TensorOptions()
                                 .dtype(reinterpret_cast<THPDtype*>(dtype)->scalar_type)
                                 .device(reinterpret_cast<THPDevice*>(device)->device);
        return at::empty_strided(at::IntArrayRef(sizes, dim), at::IntArrayRef(strides, dim), options);
    });
}

int64_t storage_nbytes(PyObject* storage) { return static_cast<int64_t>(THPStorage_Unpack(storage).nbytes()); }

const void* storage_address(PyObject* storage) { return THPStorage_Unpack(storage).unsafeGetStorageImpl(); }

int64_t use_count(const void* storage) {
    auto* impl = static_cast<c10::StorageImpl*>(const_cast<void*>(storage));
    return static_cast<int64_t>(c10::raw::intrusive_ptr::use_count(impl));
}

int64_t function_modes() { return at::impl::PythonTorchFunctionTLS::stack_len(); }

int64_t dispatch_modes() { return c10::impl::TorchDispatchModeTLS::stack_len(); }

int is_transformed() { return has_transform(); }

int is_in_backward() { return torch::autograd::get_current_node() != nullptr; }

int has_autocast() {
    for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
        if (at::autocast::is_autocast_enabled(type)) return 1;
    return 0;
}

int has_grad_mode() { return at::GradMode::is_enabled(); }

void set_grad_mode(int is_on) { at::GradMode::set_enabled(is_on != 0); }

Access table{
    ACCESS_NUMBER, facts,          is_on,          data,           base,           detach,        clone,
    storage,       as_strided,     empty,          storage_nbytes, storage_address, use_count,    function_modes,
    dispatch_modes, is_transformed, is_in_backward, has_autocast,   has_grad_mode,  set_grad_mode,
};

}  // namespace

const void* access_table() { return &table; }

}  // namespace backstash
