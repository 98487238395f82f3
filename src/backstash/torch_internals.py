"""Private functions of torch that the library calls, under names that say what they return.

They are looked up once, when the package is imported. A torch that lacks one of them gets one clear error instead of an
AttributeError in the middle of a training step.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodDescriptorType, SimpleNamespace
from typing import Any, TypeVar, cast
from unittest import mock

import torch
from torch.utils._device import DeviceContext  # which torch itself imports on first use only
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

TESTED = ("2.11.0", "2.13.0", "2.15.0")
"""The versions of torch with which the tests were run, oldest first: docs/use/versions.md shows what each can do."""


def find(path: str) -> Any:
    """A function of torch by its path.

    Raises:
        ImportError: this torch has none of that name.
    """
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise ImportError(
                f"backstash needs torch.{path}, which torch {torch.__version__} does not have. backstash is tested "
                f"with torch {TESTED[0]} to {TESTED[-1]}: install one of these, or a newer backstash."
            )
    return found


storage_use_count: Callable[[int], int] = find("_C._storage_Use_Count")
"""How many references there are to the storage with that ``_cdata``; its Python object counts as one."""

storage_of: Callable[[torch.Tensor], int] = find("_C._storage_address")
"""The ``_cdata`` of a tensor's storage, for which no Python object of the storage is made."""

running_node: Callable[[], Any] = find("_C._current_autograd_node")
"""The autograd node that runs on this thread; None outside the backward pass."""

will_run_node: Callable[[Any], bool] = find("_C._will_engine_execute_node")
"""Whether the backward pass in progress is going to run that node."""

functorch_level: Callable[[], Any] = find("_C._functorch.peek_interpreter_stack")
"""The innermost functorch transform that is active; None where there is none."""

is_jit_tracing: Callable[[], bool] = find("_C._is_tracing")
"""Whether torch.jit.trace records the operations of this thread."""

count_dispatch_modes: Callable[[], int] = find("_C._len_torch_dispatch_stack")
"""How many TorchDispatchModes are active on this thread, torch's own ones included."""

_tracing_mode: Callable[[Any], Any] = find("_C._get_dispatch_mode")
_TRACING_MODES = tuple(find("_C._TorchDispatchModeKey").__members__.values())


def has_tracing_mode() -> bool:
    """Whether one of torch's own dispatch modes is active: they make fake tensors, or write operations down."""
    return any(_tracing_mode(key) is not None for key in _TRACING_MODES)


def is_traced() -> bool:
    """Whether the operations of this thread are transformed or written down: Note: [transforms] in transforms.py."""
    if functorch_level() is not None or is_jit_tracing():
        return True
    return count_dispatch_modes() > 0 and has_tracing_mode()


function_modes: Callable[[], list[Any]] = find("overrides._get_current_function_mode_stack")
"""The TorchFunctionModes that are active on this thread, the innermost last."""


def has_replacing_mode() -> bool:
    """Whether a mode of the program may put something else in the place of an operation (Note: [modes that replace]).

    The one behind ``torch.set_default_device`` tells functions that make tensors where to make them, and no others.
    """
    if count_dispatch_modes():
        return True
    return count_function_modes() > 0 and any(type(mode) is not DeviceContext for mode in function_modes())


dispatch_mode: Callable[[], Any] = find("utils._python_dispatch._get_current_dispatch_mode")
"""The innermost TorchDispatchMode that is active; None where there is none."""

saved_tensor_hooks: Callable[[bool], Any] = find("_C._autograd._top_saved_tensors_default_hooks")
"""The innermost pair of saved-tensor hooks; None where there is none."""

push_saved_tensor_hooks: Callable[[Any, Any], None] = find("_C._autograd._push_saved_tensors_default_hooks")
"""Puts a pair of saved-tensor hooks over all others of this thread."""

pop_saved_tensor_hooks: Callable[[], None] = find("_C._autograd._pop_saved_tensors_default_hooks")
"""Takes the innermost pair of saved-tensor hooks away."""

is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces what asks: it is told True, and anybody else False. With ``compiler._is_compiling_flag``, which
is set while something is exported, this is ``torch.compiler.is_compiling``, without its second call."""

next_sequence_number: Callable[[], int] = find("_C._autograd._get_sequence_nr")
"""The number that autograd gives to the next node that is made on this thread."""

compiler: Any = torch.compiler
find("compiler._is_compiling_flag")

_T = TypeVar("_T")

any_autocast: Callable[[], bool] = find("_C._is_any_autocast_enabled")
"""Whether autocast is on for any type of device."""


def autocast_of(device_type: str) -> tuple[str, torch.dtype] | None:
    """The type of device and the dtype of autocast; None where it is off for that type."""
    if not any_autocast() or not torch.is_autocast_enabled(device_type):
        return None
    return device_type, torch.get_autocast_dtype(device_type)


_nest_autocast: Callable[[], int] = find("autocast_increment_nesting")
_unnest_autocast: Callable[[], int] = find("autocast_decrement_nesting")


def undoing(begin: Callable[[], Any], function: Callable[[], _T], undo: Callable[[], Any]) -> _T:
    """What a function returns in a state that is undone afterwards, also where Ctrl-C raises between any two calls.

    A ``with`` statement does not leave what was interrupted while it was entered or left.

    Args:
        begin: changes the state.
        function: runs in that state.
        undo: puts the state back that there was; may be called again, and where ``begin`` has not run to its end. It
            should need no more frames than ``begin``, because what it undoes may have met the recursion limit.
    """
    try:
        begin()
        return function()
    finally:
        try:
            undo()
        except BaseException:
            undo()
            raise


def under_autocast(device_type: str, dtype: torch.dtype | None, function: Callable[[], _T]) -> _T:
    """What a function returns under autocast to a dtype, or without autocast, and without its cache.

    ``torch.autocast`` does the same in ten times the time.
    """
    before = (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )

    def switch(is_on: bool, dtype: torch.dtype, caches: bool) -> None:
        torch.set_autocast_enabled(device_type, is_on)
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(caches)

    inside = dtype is not None, before[1] if dtype is None else dtype, False
    try:
        _nest_autocast()
        return undoing(lambda: switch(*inside), function, lambda: switch(*before))
    finally:
        if _unnest_autocast() == 0:
            torch.clear_autocast_cache()


set_grad_mode: Callable[[bool], None] = find("_C._set_grad_enabled")
"""Switches grad mode of this thread on or off; ``torch.no_grad()`` does the same in five times the time."""


def without_gradients(function: Callable[[], _T]) -> _T:
    """What a function returns without grad mode. Where ``torch.no_grad()`` is interrupted, grad mode may stay off."""
    before = torch.is_grad_enabled()
    try:  # each of these calls is over before Ctrl-C can raise: see undoing(), which takes longer
        set_grad_mode(False)
        return function()
    finally:
        set_grad_mode(before)


_batch_norm: Callable[..., tuple[torch.Tensor, ...]] = find("_batch_norm_impl_index")


def batch_norm_with_statistics(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch norm in training by the library that ``F.batch_norm`` takes, its mean and inverse standard deviation."""
    return _batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5, torch.backends.cudnn.enabled)[:3]  # type: ignore[return-value]


no_torch_function: Any = find("_C.DisableTorchFunction")
"""A context in which nobody sees the torch functions that are called."""

count_function_modes: Callable[[], int] = find("_C._len_torch_function_stack")
"""How many TorchFunctionModes are active on this thread."""

pop_function_mode: Callable[[], Any] = find("overrides._pop_mode")
"""Takes the innermost TorchFunctionMode away, and returns it."""

push_function_mode: Callable[[Any], None] = find("overrides._push_mode")
"""Puts a TorchFunctionMode over all others of this thread."""

current_function_mode: Callable[[], Any] = find("overrides._get_current_function_mode")
"""The innermost TorchFunctionMode that is active; None where there is none."""


def remove_function_mode(mode: Any) -> bool:
    """Takes a TorchFunctionMode away from wherever it lies on this thread's stack; returns whether it was there."""
    if all(each is not mode for each in function_modes()):
        return False
    above: list[Any] = []
    try:
        while (top := current_function_mode()) is not mode:
            above.append(top)
            pop_function_mode()
        pop_function_mode()
    finally:
        for each in reversed(above):
            push_function_mode(each)
    return True


def remove_saved_tensor_hooks(pack: Any) -> None:
    """Takes the pair of saved-tensor hooks with that pack hook away from wherever it lies on this thread's stack."""
    above: list[tuple[Any, Any]] = []
    try:
        while (top := saved_tensor_hooks(True)) is not None and top[0] is not pack:
            above.append(top)
            pop_saved_tensor_hooks()
        if top is not None:
            pop_saved_tensor_hooks()
    finally:
        for pair in reversed(above):
            push_saved_tensor_hooks(*pair)


no_torch_function_subclass: Any = find("_C.DisableTorchFunctionSubclass")
"""A context in which tensor subclasses do not see the torch functions that are called; modes still do."""

profiler_event: Any = find("_C._profiler._EventType")
"""The kinds of events in the profiler's record: ``TorchOp``, ``Allocation`` and others."""

record_scope: Any = find("_C._profiler.RecordScope")
"""Where an event of the profiler was recorded: ``FUNCTION`` is an operator, others are nodes and user annotations."""

record_operation: Any = find("_C._profiler._RecordFunctionFast")
"""A context of that name which the profiler records as an operator, where ``record_function`` is an annotation."""

profiler_runs: Callable[[], bool] = find("autograd._profiler_enabled")
"""Whether torch's profiler runs; there can only be one at a time."""

for _name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
    find(f"autograd.profiler.{_name}")


def replace_profilers_calls(make: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has torch's profilers call others to get ready, to start and to stop.

    Args:
        make: takes ``"prepare"``, ``"enable"`` or ``"disable"`` and torch's function, and returns what replaces it.
    """
    for event in ("prepare", "enable", "disable"):
        name = f"_{event}_profiler"
        setattr(torch.autograd.profiler, name, make(event, getattr(torch.autograd.profiler, name)))


is_traceable_wrapper_subclass: Callable[[object], bool] = find("utils._python_dispatch.is_traceable_wrapper_subclass")
"""Whether a tensor or a class of tensors wraps other tensors and tells which, through ``__tensor_flatten__``."""

tree_map_only: Callable[..., Any] = find("utils._pytree.tree_map_only")
"""``tree_map_only(type, function, tree)``: nested lists and dicts with ``function`` applied to the leaves of a type."""

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = find("utils._pytree.tree_flatten")
"""The leaves of nested lists and dicts, and their structure."""

tree_unflatten: Callable[[Any, Any], Any] = find("utils._pytree.tree_unflatten")
"""``tree_unflatten(leaves, structure)``: what has these leaves."""

has_kernel: Callable[[str], bool] = find("_C._dispatch_has_kernel")
"""Whether the dispatcher knows an operator of that name."""

has_kernel_for_key: Callable[[str, str], bool] = find("_C._dispatch_has_kernel_for_dispatch_key")
"""Whether an operator has a kernel of its own for a dispatch key."""

operator: Any = find("_ops.OpOverload")
"""The class of an operator such as ``torch.ops.aten.add.Tensor``."""

operator_packet: Any = find("_ops.OpOverloadPacket")
"""The class of all overloads of an operator, such as ``torch.ops.aten.add``."""


def overloads_of(function: Any) -> list[Any]:
    """The operators that a torch function in C, an operator or a packet of overloads may call; empty for others."""
    if isinstance(function, operator):
        return [function]
    is_in_c = isinstance(function, (BuiltinFunctionType, MethodDescriptorType))
    packet = getattr(torch.ops.aten, function.__name__, None) if is_in_c else function
    if not isinstance(packet, operator_packet):
        return []
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [each for each in overloads if not is_in_c or has_kernel(each.name())]  # others are TorchScript's, of lists


def writes_unseen(overload: Any) -> bool:
    """Whether an operator changes tensors among its arguments that have no new version afterwards.

    An operator in place has a kernel that gives a new version, or calls operators that have one. Others have none for
    what they change beside their ``out``: the running statistics of a norm, for example.
    """
    written = [each for each in overload._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    name = overload._schema.name.partition("::")[2]
    if all(each.is_out for each in written) or name.startswith(("_foreach_", "detach_")):
        return False  # of the last two, autograd itself gives the versions
    keys = ("ADInplaceOrView", "CompositeImplicitAutograd") if name.endswith("_") else ()
    return not any(has_kernel_for_key(overload.name(), key) for key in keys)


CODE_OF_CALL: CodeType = find("nn.Module._call_impl").__code__
"""Of the function that calls a module's hooks and its forward."""

MODULE_CALL = "_call_impl"
"""The method that runs a module's hooks and its ``forward``. ``module(...)`` looks it up on the instance."""

find("nn.Module._replicate_for_data_parallel")
REPLICA = "_is_replica"
"""What is True of the copies of a module that ``DataParallel`` makes for one call."""

COMPILED_CALL = "_compiled_call_impl"
"""What ``module(...)`` runs instead after ``module.compile()``; else None, or not there."""

find("autograd._engine_run_backward")
_autograd: Any = torch.autograd
_torchs_backward_engine: Any = torch.autograd.graph._engine_run_backward
find("_C._autograd._saved_tensors_hooks_disable")
find("_C._autograd._saved_tensors_hooks_enable")
_autograd_in_c: Any = find("_C._autograd")


_RUNS_ENGINE = find("autograd.graph._engine_run_backward").__code__


def asked_by_engine() -> bool:
    """Whether the engine itself has called this package, and not a hook of the program that the engine has called.

    On its threads for accelerators nothing of Python is below.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("backstash."):
        frame = frame.f_back
    return frame is None or frame.f_code is _RUNS_ENGINE


def has_hooks(node: Any) -> bool:
    """Whether a node has a hook of Python, or the leaf for which it accumulates has one.

    Torch has no function that tells. But all hooks of a node are in one dict, which the handle of a new one refers to.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(_no_hook)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    leaf = getattr(node, "variable", None)
    return leaf is not None and bool(leaf._backward_hooks)


def _no_hook(*gradients: Any) -> None:
    """Never called."""


def backward_engine() -> Callable[..., Any]:
    """The function by which ``torch.autograd`` starts the engine now: torch's own, or what has replaced it."""
    engine: Callable[..., Any] = _autograd._engine_run_backward
    return engine


def gradient_of(x: torch.Tensor) -> torch.Tensor | None:
    """``x.grad``, without torch's warning where a parameter is the result of operations, as fast weights are."""
    return x.grad if x.is_leaf or x.retains_grad else None


def unheard_gradient(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of one number by ``x``. Nobody hears of its pass who listens to those of ``torch.autograd``."""
    found: tuple[torch.Tensor] = _torchs_backward_engine(
        (y,), (torch.ones_like(y),), False, False, (x,), False, accumulate_grad=False
    )
    return found[0]


def replace_backward_engine(engine: Callable[..., Any]) -> None:
    """Have ``torch.autograd`` start the engine by this function, which takes the same arguments."""
    _autograd._engine_run_backward = engine


@contextmanager
def wrapped_backward_engine(go_backward: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``torch.autograd`` calls ``go_backward(engine, *args, **kwargs)`` where it would call the engine."""
    engine = backward_engine()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return go_backward(engine, *args, **kwargs)

    hide_from_dynamo(wrapped)
    replace_backward_engine(wrapped)
    try:
        yield
    finally:
        if backward_engine() is wrapped:  # else other code has wrapped it meanwhile, and it passes calls on
            replace_backward_engine(engine)


dispatch_to_modes: Callable[..., Any] = find("overrides.handle_torch_function")
"""By this, a function of torch that is written in Python offers a call to the function modes."""

find("nn.functional.handle_torch_function")


def replace_dispatch_to_modes(dispatch: Callable[..., Any]) -> None:
    """Have the functions of ``torch.nn.functional`` offer themselves by this one, which takes the same arguments."""
    torch.nn.functional.handle_torch_function = dispatch  # type: ignore[attr-defined]


def compiled_method(name: str) -> Callable[..., Any] | None:
    """The method of C behind the name of a tensor's method; None if there is none."""
    method: Callable[..., Any] | None = getattr(torch._C.TensorBase, name, None)
    return method


def functions_that_restore() -> frozenset[Any]:
    """The code of those functions of torch which, when they return, put back modes and hooks that they found.

    Each has the arguments that it passes on in a dictionary of its own, ``kwargs``.
    """
    return frozenset((dispatch_to_modes.__code__, _torchs_backward_engine.__code__))


def switches_of_hooks() -> tuple[Callable[[str], None], Callable[[], None]]:
    """The functions by which torch switches saved-tensor hooks off, with an error message, and on again."""
    return _autograd_in_c._saved_tensors_hooks_disable, _autograd_in_c._saved_tensors_hooks_enable


def replace_switches_of_hooks(switch_off: Callable[[str], None], switch_on: Callable[[], None]) -> None:
    """Have torch switch saved-tensor hooks off and on by these functions."""
    _autograd_in_c._saved_tensors_hooks_disable = switch_off
    _autograd_in_c._saved_tensors_hooks_enable = switch_on


def checkpoint_hooks() -> Any:
    """The class of the hooks that a checkpoint without reentrance installs around its function; None if there is none.

    It is made with an object whose ``recompute_fn`` runs the function again.
    """
    from torch.utils import checkpoint

    return getattr(checkpoint, "_checkpoint_hook", None)


CHECKPOINT_RUNNERS = (
    "_checkpoint_impl",
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
"""What runs a checkpoint. From torch 2.14 on, the first and the last have the second run those without reentrance."""

ASKS_FOR_HOOKS = "respect_saved_tensors_hooks"
"""By this parameter a checkpoint is told whether what it keeps goes through saved-tensor hooks (pytorch#191236)."""


def asking_runners() -> dict[str, Any]:
    """The functions of :data:`CHECKPOINT_RUNNERS` that have that parameter, by name; none before torch 2.14."""
    from torch.utils import checkpoint

    found = {name: getattr(checkpoint, name, None) for name in CHECKPOINT_RUNNERS}
    return {name: function for name, function in found.items() if function is not None and _asks_for_hooks(function)}


@cache
def _asks_for_hooks(function: Callable[..., Any]) -> bool:
    return ASKS_FOR_HOOKS in inspect.signature(function).parameters


def replace_checkpoint_runners(runners: Mapping[str, Any]) -> None:
    """Have checkpoints run by these functions."""
    for name, function in runners.items():
        setattr(torch.utils.checkpoint, name, function)


def hooks_around_checkpoints() -> Any:
    """The innermost saved-tensor hooks that are not a checkpoint's own; None if there are none."""
    hooks = saved_tensor_hooks(False)
    while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
        hooks = hooks[0]._user_hooks
    return hooks


def replace_checkpoint_hooks(hooks: Any) -> None:
    """Have checkpoints install hooks of this class."""
    torch.utils.checkpoint._checkpoint_hook = hooks  # type: ignore[misc]


def has_compiled() -> bool:
    """Whether Dynamo has met a frame to compile. Torch imports Dynamo also for programs that compile nothing."""
    converting = sys.modules.get("torch._dynamo.convert_frame")
    return converting is not None and bool(getattr(converting, "FRAME_COUNTER", True))


def may_compile() -> bool:
    """Whether the program has asked Dynamo to compile something, which perhaps has not run yet."""
    running = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(running, "cached_backends", {})
    return has_compiled() or any(backend is not None for backend in backends.values())


def is_inside_compiled() -> bool:
    """Whether a function that Dynamo has compiled runs on this thread, which perhaps was compiled in parts.

    Dynamo puts modes and hooks back there as they were.
    """
    file = getattr(sys.modules.get("torch._dynamo.eval_frame"), "__file__", None)
    frame = sys._getframe() if file is not None else None
    while frame is not None and not (frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == file):
        frame = cast("Any", frame.f_back)
    return frame is not None


def inputs_of_call(module: torch.nn.Module) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a module's call that has begun, those with a keyword too, which no global hook is given."""
    frame = sys._getframe()
    while (frame := cast("Any", frame.f_back)) is not None:
        if frame.f_code is CODE_OF_CALL and frame.f_locals["self"] is module:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
    return (), {}


def ignore_global_hooks_of_compiled_modules() -> None:
    """Have a compiled module not warn that there are global hooks, unless somebody has installed some already.

    Torch warns at each call that the hooks run for the compiled module as well. A program whose warnings are errors
    would end there. The filter stays: to take it away would have Python forget which warnings it has shown.
    """
    if torch.nn.modules.module._has_any_global_hook():
        return
    message = r"Using `torch\.compile\(module\)` when there are global hooks"
    known = (action == "ignore" and getattr(text, "pattern", "") == message for action, text, *_ in warnings.filters)
    if not any(known):
        warnings.filterwarnings("ignore", message, UserWarning)


QUIET_LOGS = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables that keep lines of torch's profiler out of what a script prints. They are read when torch is imported."""


@contextmanager
def without_native_warnings() -> Iterator[None]:
    """Inside, torch's C++ code logs errors alone. Its profiler warns of each thousandth release that it cannot match.

    The variable TORCH_CPP_LOG_LEVEL does the same, but it is read when torch is imported. Where the level is not found,
    nothing changes.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, max(level.value, 2)
    try:
        yield
    finally:
        level.value = before


_starting = threading.RLock()
"""Held while torch's function is replaced, so that another thread does not put back the replaced one."""


@contextmanager
def starting_profiler() -> Iterator[None]:
    """Inside, a profiler that this thread starts records operators alone, and all allocations.

    Of torch's annotations (``record_function``, and those of the optimizers and of asynchronous communication) some
    begin before the profiler or end after it, on another thread too. What ends then is written to memory that the
    profiler has freed. Operators end where they began.

    Torch 2.11 warns that events of earlier cycles are lost; ours have one cycle.
    """
    module, here = torch.autograd.profiler, threading.get_ident()
    with _starting, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        enable: Callable[..., None] = module._enable_profiler  # type: ignore[attr-defined]

        def enable_for_operators(config: Any, activities: Any) -> None:
            if threading.get_ident() == here:
                enable(config, activities, {record_scope.FUNCTION})
            else:
                enable(config, activities)

        with mock.patch.object(module, "_enable_profiler", enable_for_operators):
            yield


def with_numbers(x: torch.Tensor) -> torch.Tensor | None:
    """A tensor with the numbers of another one, which may be it; None for what has a shape alone.

    A number that a program writes down, as in ``torch.tensor(0.5)``, is there where tensors are fake as well.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # a second of imports

    return x.constant if isinstance(x, FakeTensor) else x


_toggle_collection: Callable[[bool, set[Any]], None] = find("autograd.profiler._toggle_collection_dynamic")


@contextmanager
def optimizers_as_on_cuda(*kinds: type[torch.Tensor]) -> Iterator[None]:
    """Inside, optimizers work on all parameters at once, as they do on CUDA; also on parameters of these classes."""
    optimizer = import_module("torch.optim.optimizer")
    types, devices = optimizer._foreach_supported_types, optimizer._get_foreach_kernels_supported_devices
    with (
        mock.patch.object(optimizer, "_foreach_supported_types", [*types, *kinds]),
        mock.patch.object(optimizer, "_get_foreach_kernels_supported_devices", return_value=[*devices(), "cpu"]),
    ):
        yield


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Inside, torch's own kernels serve on CPU. ``torch.backends.mkldnn.flags`` warns of what else it sets."""
    before = _mkldnn_enabled()
    _set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _set_mkldnn_enabled(before)


_mkldnn_enabled: Callable[[], bool] = find("_C._get_mkldnn_enabled")
_set_mkldnn_enabled: Callable[[bool], None] = find("_C._set_mkldnn_enabled")


@contextmanager
def without_numbers() -> Iterator[None]:
    """Inside, tensors are fake: they have shapes and no numbers. Optimizers treat them as they treat CUDA's.

    A module that is cast or moved would swap its fake parameters with others, which torch refuses where anything refers
    to them weakly, as its own table of fake tensors does.
    """

    def swap(parameter: torch.Tensor, other: torch.Tensor) -> None:
        parameter.data = other.detach()

    from torch._subclasses import fake_tensor  # a second of imports
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with (
        mock.patch.object(fake_tensor.log, "disabled", True),  # an operation without a result is told by its error
        optimizers_as_on_cuda(FakeTensor),
        mock.patch.object(torch.utils, "swap_tensors", swap),
        mock.patch.object(FakeTensor, "tolist", torch.Tensor.tolist),  # its own asks for each number, unseen by modes
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextmanager
def without_data(loading: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Inside, loaders load in this process, and numbers of a truncated normal distribution are drawn without a loop.

    Args:
        loading: what is entered around all that a loader does for a batch.
    """
    from torch.utils.data import _utils, dataloader  # with what it needs of multiprocessing

    def iterator(loader: Any) -> Any:
        loader.num_workers, loader.timeout, loader.prefetch_factor = 0, 0, None
        return dataloader._SingleProcessDataLoaderIter(loader)

    def inside(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def fetched(*args: Any) -> Any:
            with loading():
                return fetch(*args)

        return fetched

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_()

    fetch = _utils.fetch
    by_number, in_turn = fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher
    with (
        mock.patch.object(dataloader.DataLoader, "_get_iterator", iterator),
        mock.patch.object(by_number, "fetch", inside(by_number.fetch)),
        mock.patch.object(in_turn, "fetch", inside(in_turn.fetch)),
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", drawn),
    ):
        yield


def record_operators(is_wanted: bool) -> None:
    """Has the profiler that this thread has started record operators from now on, or memory alone."""
    _toggle_collection(is_wanted, {torch.profiler.ProfilerActivity.CPU})


def in_backward() -> bool:
    """Whether autograd runs a node on this thread: what is packed then belongs to the step in progress."""
    return running_node() is not None


def keeps_graph() -> bool:
    """Whether the backward pass that runs on this thread keeps what is saved, for another one; also where none runs."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined,no-any-return]


def graph_task() -> int:
    """The number of the backward pass that runs a node on this thread; -1 where none does."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Has the backward pass that runs a node on this thread call the function when it ends, unless it fails before."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[no-untyped-call]


def hide_from_dynamo(function: Callable[..., Any], and_all_below: bool = False) -> None:
    """Have torch.compile pass over the frames of that function, instead of compiling them.

    Args:
        function: one that torch calls while a compiled region runs.
        and_all_below: also pass over the frames of what it calls, where that is nothing of the program's.

    An observer that is called from a compiled region would be compiled on its own, together with the torch function
    that it calls: other kernels would run than without it, and their bits differ.
    """
    try:
        from torch._C._dynamo.eval_frame import (  # type: ignore[attr-defined]
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # a torch without Dynamo compiles nothing
        return
    below = _FrameAction.SKIP if and_all_below else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, below))


def break_graphs_at(function: Any, reason: str) -> None:
    """Has torch.compile end a graph before a call of that function, which then runs as if nothing were compiled.

    Args:
        function: one that Dynamo cannot trace.
        reason: what ``fullgraph=True`` says of it.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
    hide_from_dynamo(function, and_all_below=True)


_force_dispatch: Callable[[Any, Any], AbstractContextManager[None]] = find("_C._ForceDispatchKeyGuard")
_included_dispatch: Callable[[], Any] = find("_C._dispatch_tls_local_include_set")
_VMAP = find("_C._parse_dispatch_key")("VmapMode")  # None in a torch without it
_outermost_dispatch = _included_dispatch(), find("_C._dispatch_tls_local_exclude_set")()


def in_vmap() -> bool:
    """Whether functions are transformed: by functorch, or by the older vmap of ``torch.autograd.grad``."""
    return functorch_level() is not None or (_VMAP is not None and _included_dispatch().has(_VMAP))


def as_if_outermost() -> AbstractContextManager[None]:
    """Inside, operations are dispatched as at the top level of a program, where autograd records them.

    Below a ``__torch_dispatch__`` it does not, because that runs after autograd. Autocast is off inside.
    """
    return _force_dispatch(*_outermost_dispatch)


_inference_mode: Callable[[bool], AbstractContextManager[None]] = find("_C._InferenceMode")

hooks_are_enabled: Callable[[], bool] = find("_C._autograd._saved_tensors_hooks_is_enabled")
"""Whether saved-tensor hooks can be installed; see ``torch.autograd.graph.disable_saved_tensors_hooks``."""

_enable_hooks: Callable[[], None] = find("_C._autograd._saved_tensors_hooks_enable")
_disable_hooks: Callable[[str], None] = find("_C._autograd._saved_tensors_hooks_disable")
_why_hooks_are_disabled: Callable[[], str | None] = find("_C._autograd._saved_tensors_hooks_get_disabled_error_message")


def recording(function: Callable[[], _T]) -> _T:
    """What a function returns where it is not inference mode, and saved-tensor hooks can be installed.

    A program may have said otherwise.
    """
    message = _why_hooks_are_disabled()
    with _inference_mode(False):
        return undoing(_enable_hooks, function, lambda: None if message is None else _disable_hooks(message))


def _is_asked_nothing(tensors: Any) -> bool:
    """In the place of ``has_torch_function``: no tensor has anything to say."""
    return False


hide_from_dynamo(_is_asked_nothing, and_all_below=True)


def seen_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function of torch.nn.functional which does not offer itself to torch function modes.

    The functions that it calls still do. So an observer sees them as if the program had called them one by one.
    """
    assert isinstance(function, FunctionType)
    seen = {**function.__globals__, "has_torch_function": _is_asked_nothing}
    copy = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _passes_bounds() -> bool:
    with no_torch_function(), find("_C._DisableTorchDispatch")(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        return bool(unheard_gradient(x.clamp_min(0.0), x))


clamp_passes_bounds: bool = _passes_bounds()
"""Whether clamp hands the gradient on where its input equals a bound. Torch does until 2.13, and no more in 2.14."""

deterministic: Callable[[], bool] = find("_C._get_deterministic_algorithms")
set_deterministic: Callable[..., None] = find("_C._set_deterministic_algorithms")
deterministic_warns: Callable[[], bool] = find("_C._get_deterministic_algorithms_warn_only")
_fills: Callable[[], bool] = find("_C._get_deterministic_fill_uninitialized_memory")
_set_fills: Callable[[bool], None] = find("_C._set_deterministic_fill_uninitialized_memory")


def in_filled_memory(device_type: str, function: Callable[[], _T]) -> _T:
    """What a function returns where torch fills what it hands out unwritten on a CPU: with NaN, or the largest integer.

    So a function that returns or saves memory which it has not filled does so with other bits than outside, where the
    system hands out zeros again and again. Torch does this under its setting of determinism, which chooses no other
    kernels on a CPU. On a GPU it does, so nothing changes there. Torch's public setter would import Inductor.
    """
    if device_type != "cpu":
        return function()
    before = deterministic(), deterministic_warns(), _fills()

    def switch(is_deterministic: bool, warns: bool, fills: bool) -> None:
        _set_fills(fills)
        set_deterministic(is_deterministic, warn_only=warns)

    def quietly() -> _T:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that have no deterministic way
            return function()

    return undoing(lambda: switch(True, True, True), quietly, lambda: switch(*before))


def has_filling(x: torch.Tensor) -> bool:
    """Whether any element of a tensor, other than a mask, is what :func:`filled_memory` fills memory with."""
    if not x.is_cpu:
        return False
    if x.is_floating_point() or x.is_complex():
        return bool(x.isnan().any())
    return bool((x == torch.iinfo(x.dtype).max).any())


def partitioner_base() -> type[Any]:
    """The class that Inductor's option ``custom_partitioner_fn`` takes instances of. Imports Inductor."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


SavedValues = Callable[[torch.fx.Graph, list[torch.fx.Node]], list[torch.fx.Node]]
"""Given a joint graph and what torch would save, returns what is saved instead."""


def lays_out_images(graph: torch.fx.Graph) -> bool:
    """Whether Inductor copies the images of a graph to channels last, if it has convolutions."""
    from torch._inductor.graph import GraphLowering

    module: Any = SimpleNamespace(graph=graph)
    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def min_cut_partition(
    choose: SavedValues | None = None, **settings: Any
) -> Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]:
    """Torch's own partitioner of a joint graph into forward and backward, under these settings of AOTAutograd.

    Args:
        choose: is asked what to save, if this torch lets it be asked: see :func:`asks_what_to_save`. It is not asked
            about graphs without a backward pass.
        settings: of AOTAutograd.
    """
    from torch._functorch import config, partitioners

    def partition(joint: torch.fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        original = getattr(partitioners, _CHOICE, None)

        def replaced(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> list[torch.fx.Node]:
            found = original(graph, *args, **kwargs)  # type: ignore[misc]
            return found if choose is None else choose(graph, list(found))

        with config.patch(settings):
            if choose is None or original is None:
                return partitioners.min_cut_rematerialization_partition(joint, inputs, **keywords)
            with mock.patch.object(partitioners, _CHOICE, replaced):
                return partitioners.min_cut_rematerialization_partition(joint, inputs, **keywords)

    return partition


_CHOICE = "choose_saved_values_set"


def asks_what_to_save() -> bool:
    """Whether torch's partitioner can be told which values to save."""
    from torch._functorch import partitioners

    return hasattr(partitioners, _CHOICE)


@contextmanager
def compiling_without_budgets() -> Iterator[None]:
    """Inside, graphs are compiled anew as if their memory budget were 1, whatever the program says."""
    import torch._dynamo
    from torch._functorch import config, partitioners

    original = getattr(partitioners, _CHOICE, None)

    def choose(*args: Any, **kwargs: Any) -> Any:
        assert original is not None
        return original(*args, **({**kwargs, "memory_budget": 1} if "memory_budget" in kwargs else kwargs))

    choosing = nullcontext() if original is None else mock.patch.object(partitioners, _CHOICE, choose)
    torch._dynamo.reset()
    try:
        # A cache would return graphs that were cut under the budget that the program asks for.
        with config.patch(enable_autograd_cache=False, activation_memory_budget=1.0), choosing:
            yield
    finally:
        torch._dynamo.reset()


def view_with_version(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """A view that has the version of its base, also inside an operator of ours, where torch leaves versions out."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.view(sizes)


def aot_eager_backend(partition: Callable[..., Any]) -> Callable[..., Any]:
    """The backend ``aot_eager`` with another partitioner. Imports Dynamo."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )
    return backend


def inductor_backend(patches: dict[str, Any]) -> Callable[..., Any]:
    """The backend ``inductor`` with some of its settings changed. Imports Inductor."""
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        mode = keywords.pop("mode", None)  # torch hands it on to a backend that is no name
        of_mode = {} if mode in (None, "default") else mode_options(mode, None)
        return compile_fx(graph, inputs, config_patches=of_mode | patches | keywords.pop("options", {}), **keywords)

    return backend


@cache
def keeps_impure_calls() -> bool:
    """Whether Inductor keeps a call without results that torch.fx knows to have a side effect. Imports Inductor."""
    from torch._inductor.ir import FallbackKernel

    return "has_side_effects" in vars(FallbackKernel)


def inductor_lowerings() -> Any:
    """The module with Inductor's form of every operator. Imports Inductor."""
    import torch._inductor.lowering as lowering

    return lowering


def lowered_convolutions() -> Any:
    """The module in which Inductor lays out the operands of convolutions' gradients; None if this torch has no such.

    Its function ``aten_convolution_backward_fallback`` then makes the call of the library. Imports Inductor.
    """
    from torch._inductor.kernel import conv

    return conv if hasattr(conv, "aten_convolution_backward_fallback") else None


def lowered_call() -> tuple[torch.fx.Node, list[Any]]:
    """The node for which Inductor writes code now, and what it knows the node's arguments as. Imports Inductor."""
    from torch._inductor.virtualized import V

    node: torch.fx.Node = V.graph.current_node
    return node, [
        V.graph.env.get(argument) if isinstance(argument, torch.fx.Node) else argument for argument in node.args
    ]


def in_rows(x: Any) -> Any:
    """What Inductor knows a tensor as, laid out as a contiguous tensor is: itself, or a copy. Imports Inductor."""
    from torch._inductor.ir import ExternKernel

    return ExternKernel.require_contiguous(x)


def format_of(sizes: Sequence[Any], strides: Sequence[Any]) -> torch.memory_format | None:
    """The memory format that torch's kernels see in a tensor; None if the sizes are no numbers."""
    from torch._prims_common import suggest_memory_format

    if not all(isinstance(each, int) or getattr(each, "is_number", False) for each in (*sizes, *strides)):
        return None
    found: torch.memory_format = suggest_memory_format(
        torch.empty_strided(list(map(int, sizes)), list(map(int, strides)), device="meta")
    )
    return found


def adds_products_by_library() -> bool:
    """Whether Inductor computes a product and its sum with another value by ``addmm`` of torch. Imports Inductor."""
    from torch._inductor import config

    return bool(config.pattern_matcher and not config.max_autotune and not config.max_autotune_gemm)


def mode_options(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """The settings of Inductor that a mode of ``torch.compile`` stands for. Imports Inductor."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


@cache
def offload_operators() -> Any:
    """The namespace of ``offload``, ``reload`` and ``wait_tensor``, which move a tensor of an accelerator; or None."""
    try:
        from torch._functorch._activation_offloading import offload_ops  # noqa: F401  (it registers them)
    except ImportError:
        return None
    return torch.ops.ao


def compile_counters() -> Any:
    """What Dynamo counts, by group and name. Imports Dynamo."""
    from torch._dynamo.utils import counters

    return counters


def size_nodes(graph: torch.fx.Graph, size: torch.SymInt) -> tuple[Any, list[torch.fx.Node]]:
    """A node that computes a symbolic size from the sizes among the graph's inputs, or a number if it is constant.

    Also returned are all nodes that were added, at the graph's insertion point.

    Raises:
        KeyError: no input of the graph has one of the symbols.
    """
    from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expression = size.node.expr
    if expression.is_number:
        return int(expression), []
    inputs = find_symbol_binding_fx_nodes(graph)
    before = set(graph.nodes)
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    symbols = {symbol: torch.fx.Proxy(inputs[symbol], tracer) for symbol in expression.free_symbols}
    found = sympy_interp(PythonReferenceAnalysis, symbols, expression)
    return found.node, [node for node in graph.nodes if node not in before]


_without_dispatch_modes: Any = find("utils._python_dispatch._disable_current_modes")


def unseen_by_modes(function: Callable[[], _T]) -> _T:
    """What a function returns where no mode of the program sees the operations that it calls."""
    with no_torch_function():
        if not count_dispatch_modes():
            return function()
        with _without_dispatch_modes():
            return function()


def replace_hook_pushing(push: Callable[[Any, Any], None], pop: Callable[[], None]) -> None:
    """Has ``saved_tensors_hooks`` call others to install and to remove its pairs of hooks.

    What this package pushes itself goes past them: see :data:`push_saved_tensor_hooks`.
    """
    _autograd_in_c._push_saved_tensors_default_hooks = push
    _autograd_in_c._pop_saved_tensors_default_hooks = pop


def hook_pushing() -> tuple[Callable[[Any, Any], None], Callable[[], None]]:
    """The functions by which ``saved_tensors_hooks`` installs and removes its pairs now."""
    return _autograd_in_c._push_saved_tensors_default_hooks, _autograd_in_c._pop_saved_tensors_default_hooks


find("utils.checkpoint.CheckpointFunction")
find("utils.checkpoint._checkpoint_hook")
find("utils.checkpoint._recomputation_hook")
_checkpointing: Any = torch.utils.checkpoint
ReentrantCheckpoint: Any = _checkpointing.CheckpointFunction
"""The autograd function of ``checkpoint(use_reentrant=True)``."""

REENTRANT = f"{ReentrantCheckpoint.__name__}Backward"
"""Name of its nodes."""

_PUSHED_BY = "._checkpoint_hook.__init__.<locals>.pack_hook"
_PUSHED_AGAIN_BY = "._recomputation_hook.__init__.<locals>.pack_hook"


def checkpoint_frame(pack: Any) -> Any:
    """What ``checkpoint(use_reentrant=False)`` knows of a region, by its pack hook in forward; None of any other hook.

    Its ``recompute_fn`` computes the region again.
    """
    return _in_closure(pack, "frame") if _is_hook(pack, _PUSHED_BY) else None


def recomputed_frame(pack: Any) -> Any:
    """As :func:`checkpoint_frame`, by the pack hook under which the region is computed again."""
    if not _is_hook(pack, _PUSHED_AGAIN_BY):
        return None
    reference = _in_closure(inspect.unwrap(pack), "target_frame_ref")
    return None if reference is None else reference()


def _is_hook(pack: Any, name: str) -> bool:
    module = getattr(pack, "__module__", None)
    return module == _checkpointing.__name__ and f".{getattr(pack, '__qualname__', '')}".endswith(name)


def _in_closure(function: Any, name: str) -> Any:
    cell = _cell(function, name)
    return None if cell is None else cell.cell_contents


def _cell(function: Any, name: str) -> Any:
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)]


def checkpoint_argument(frame: Any, name: str) -> Any:
    """An argument of a region's checkpoint: ``"preserve_rng_state"``, ``"fn"`` or ``"recompute_context"``."""
    return _in_closure(frame.recompute_fn, name)


def replace_recomputed(frame: Any, function: Callable[..., Any]) -> None:
    """Has a region's checkpoint call another function when it computes the region again."""
    cell = _cell(frame.recompute_fn, "fn")
    if cell is not None:
        cell.cell_contents = function


function_apply: Any = torch.autograd.Function.__dict__["apply"]
"""The class method by which a custom autograd function is called, as a descriptor."""


def replace_function_apply(apply: Any) -> None:
    """Has all custom autograd functions called by another class method."""
    _autograd.Function.apply = apply


def checkpointed_arguments() -> list[tuple[str, Any]]:
    """Names and values of what the checkpointed function is called with, asked where its hooks are installed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in CHECKPOINT_RUNNERS:
        frame = frame.f_back
    if frame is None:
        return []
    held = frame.f_locals
    numbered = [(f"argument {place}", each) for place, each in enumerate(held.get("args", ()))]
    return [*numbered, *((f"argument {key!r}", each) for key, each in held.get("kwargs", {}).items())]


is_seeded_tag: Any = torch.Tag.nondeterministic_seeded
"""The tag of operators that draw random numbers."""


def has_own_handler(operators: Iterable[str]) -> bool:
    """Whether DTensor leaves one of these operators, such as ``aten::relu``, to a function of its own at this time.

    Where it is not known which operators these are, it may.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(tensors, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    return handlers is None or not {each.name().partition(".")[0] for each in handlers}.isdisjoint(operators)


def nodes_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields these nodes of autograd's graph and all behind them, each once; None among them is passed over."""
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def default_group_store() -> Any:
    """Returns the store of keys and values that the default process group was made with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
