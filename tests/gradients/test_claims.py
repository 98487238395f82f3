"""Claims under everything that may stand between a node's formula and our kernels.

The file is long because the same programs run under each thing that may stand in between.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from backstash import Session
from backstash.redeem import claims, exclusive, table
from backstash.redeem.claims import Claim, Unstashed
from backstash.saved import TensorSpec


class Doubles(Tensor):
    """Computes every op itself, in double precision."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Doubles:
        made: Doubles = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    inner: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def wide(x: Tensor) -> Tensor:
            inner = x.inner if isinstance(x, Doubles) else x
            return inner.double() if inner.is_floating_point() else inner

        args, kwargs = tree_map_only(Tensor, wide, (args, kwargs or {}))
        if "dtype" in kwargs and kwargs["dtype"] is torch.float32:
            kwargs["dtype"] = torch.float64
        return tree_map_only(
            Tensor, lambda x: Doubles(x.float() if x.dtype is torch.float64 else x), func(*args, **kwargs)
        )


class Logs(Tensor):
    """Hands every op on, and looks at what it was given."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Logs:
        made: Logs = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Logs, lambda x: x.inner, (args, kwargs or {}))
        logging.getLogger("ops").debug("%s", [float(x.sum()) for x in args if isinstance(x, Tensor) and x.numel()])
        return tree_map_only(Tensor, Logs, func(*args, **kwargs))


class Wrap(torch.autograd.Function):
    """Hands its input on; the gradient becomes a tensor of that class on its way back, and stays one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cls: Any) -> Tensor:
        ctx.cls = cls
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.cls(grad.clone()), None


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 16),
    "linear without bias": lambda: nn.Linear(16, 16, bias=False),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 4, 1), nn.Flatten()),
    "relu": nn.ReLU,
    "dropout": lambda: nn.Dropout(0.3),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "layer norm": lambda: nn.LayerNorm(16),
    "batch norm": lambda: nn.BatchNorm1d(16),
    "softmax": lambda: nn.Softmax(-1),
    "pool": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.Flatten()
    ),
}

AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "dispatch mode": PassOn,
    "function mode": Watch,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic": lambda: deterministic(),
}


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train(
    layer: str, around: str, wrapped: Any, frozen: bool, forward_autocast: bool, session: Session | None
) -> list[Tensor] | str:
    torch.manual_seed(0)
    body, head = nn.Linear(16, 16), nn.Linear(16, 16)
    model = LAYERS[layer]()
    x = torch.randn(32, 16)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_autocast):
            with torch.no_grad() if frozen else nullcontext():
                features = body(x).relu()
            with torch.autocast("cpu", enabled=False):
                y = model(features.float() * 1.0)
                if wrapped is not None:
                    y = Wrap.apply(y, wrapped)
                return head(y).square().sum()

    parameters = [*body.parameters(), *model.parameters(), *head.parameters()]
    try:
        with session or nullcontext():
            loss = forward()
        with AROUND[around]():
            loss.backward()
    except (RuntimeError, TypeError, AttributeError) as error:
        return type(error).__mro__[-3].__name__
    grads = [p.grad for p in parameters if p.grad is not None]
    return [grad.inner if isinstance(grad, (Doubles, Logs)) else grad for grad in grads]


@pytest.mark.cases(30)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("wrapped", [None, Doubles, Logs], ids=["plain", "doubles", "logs"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("layer", LAYERS)
def test_backward_under(layer: str, around: str, wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    for frozen, autocast in itertools.product((False, True), repeat=2):
        expected = train(layer, around, wrapped, frozen, autocast, None)
        for policy in ("lossless", "lossless_stored", "keep"):
            got = train(layer, around, wrapped, frozen, autocast, Session(policy, min_nbytes=0))
            if isinstance(expected, str) or isinstance(got, str):
                assert expected == got, (frozen, autocast, policy)
            else:
                assert not differences(expected, got), (frozen, autocast, policy)


READINGS: dict[str, Callable[[Tensor], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "storage": lambda x: x.untyped_storage().data_ptr(),
    "dlpack": torch.from_dlpack,
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "set_": lambda x: torch.empty(0).set_(x),
    "copy": lambda x: torch.empty(8, 8).copy_(x),
    "view": lambda x: x.view(-1).sum(),
    "as_strided": lambda x: x.as_strided((4,), (2,)).sum(),
    "out": lambda x: torch.mul(x, 2, out=torch.empty(8, 8)),
    "equal": lambda x: torch.equal(x, x),
    "in place": lambda x: torch.zeros(8, 8).add_(x),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_claim_has_no_zeros_to_be_read(name: str) -> None:
    """Whatever reads it gets the data, or an error."""
    x = torch.randn(8, 8)
    claim = Claim(Unstashed(x, overwrites=True), TensorSpec.of(x))
    expected = READINGS[name](x)
    try:
        got = READINGS[name](claim)
    except (RuntimeError, TypeError, ValueError, BufferError, NotImplementedError):
        return
    if isinstance(got, Tensor):
        assert torch.equal(expected, got)
    else:
        assert np.array_equal(expected, got)


# -- who holds a gradient ----------------------------------------------------------------------------------------------

BUFFER = np.zeros((32, 16), dtype=np.float32)


class FromNumpy(torch.autograd.Function):
    """Returns a gradient in memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        BUFFER[:] = grad.numpy()
        return torch.from_numpy(BUFFER)


class FromCapsule(FromNumpy):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        BUFFER[:] = grad.numpy()
        return torch.from_dlpack(BUFFER)


class FromBuffer(FromNumpy):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        BUFFER[:] = grad.numpy()
        return torch.frombuffer(BUFFER, dtype=torch.float32).view(32, 16)


class FromSharedMemory(FromNumpy):
    shared = torch.zeros(32, 16).share_memory_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        FromSharedMemory.shared.copy_(grad)
        return FromSharedMemory.shared.detach()


HOLDERS: dict[str, Callable[[Tensor, list[Any]], Tensor]] = {
    "storage": lambda h, kept: hooked(h, lambda g: kept.append(g.untyped_storage())),
    "typed storage": lambda h, kept: hooked(h, lambda g: kept.append(typed(g))),
    "numpy": lambda h, kept: hooked(h, lambda g: kept.append(g.numpy())),
    "view": lambda h, kept: hooked(h, lambda g: kept.append(g.view(-1)[3:])),
    "detached": lambda h, kept: hooked(h, lambda g: kept.append(g.detach())),
    "dlpack": lambda h, kept: hooked(h, lambda g: kept.append(torch.from_dlpack(g))),
    "memory view": lambda h, kept: hooked(h, lambda g: kept.append(memoryview(g.numpy()))),
    "closure": lambda h, kept: hooked(h, lambda g: kept.append(lambda: g)),
    "node": lambda h, kept: node_hooked(h, lambda g: kept.append(g.untyped_storage())),
    "from_numpy": lambda h, kept: (kept.append(BUFFER), FromNumpy.apply(h))[1],
    "from_dlpack": lambda h, kept: (kept.append(BUFFER), FromCapsule.apply(h))[1],
    "frombuffer": lambda h, kept: (kept.append(BUFFER), FromBuffer.apply(h))[1],
    "shared memory": lambda h, kept: (kept.append(FromSharedMemory.shared), FromSharedMemory.apply(h))[1],
}


def typed(g: Tensor) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=g.untyped_storage(), dtype=g.dtype, _internal=True)


def hooked(h: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
    h.register_hook(keep)
    return h


def node_hooked(h: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda grads: keep(grads[0]))
    return h


def contents(kept: Any) -> Tensor:
    if callable(kept) and not isinstance(kept, Tensor):
        kept = kept()
    if isinstance(kept, torch.storage.TypedStorage):
        kept = kept._untyped_storage
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept, 0, (kept.nbytes() // 4,)).clone()  # type: ignore[call-overload]
    return torch.as_tensor(np.array(kept)) if not isinstance(kept, Tensor) else kept.clone()


@pytest.mark.parametrize("layer", ["relu", "gelu", "tanh", "dropout", "layer norm", "batch norm", "softmax"])
@pytest.mark.parametrize("name", HOLDERS)
def test_memory_that_somebody_keeps_is_not_written_over(name: str, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    monkeypatch.setattr("backstash.redeem.norms._LARGE", 0)
    monkeypatch.setattr("backstash.redeem.norms._CHUNK", 256)

    def run(session: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model, kept = LAYERS[layer](), []  # type: ignore[var-annotated]
        x = torch.randn(32, 16, requires_grad=True)
        with session:
            loss = (HOLDERS[name](model(x * 2.0), kept) * 3.0).cos().sum()
            loss.backward()
        assert x.grad is not None
        return [x.grad, *[contents(one) for one in kept]]

    expected = run(nullcontext())
    for policy in ("lossless", "lossless_stored", "keep"):
        assert not differences(expected, run(Session(policy, min_nbytes=0)))


def test_a_switch_turns_overwriting_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    asked: list[bool] = []
    original = exclusive.is_alone
    monkeypatch.setattr(exclusive, "is_alone", lambda *args: asked.append(original(*args)) or asked[-1])
    for overwrite in (True, False):
        asked.clear()
        x = torch.randn(64, 64, requires_grad=True)
        with Session(min_nbytes=0, overwrite_gradients=overwrite):
            ((x * 2.0).relu() * 3.0).sum().backward()
        assert any(asked) is overwrite


def test_under_a_tracer_nothing_is_written_over_or_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger's trace function may hold what it looks at, and let go of it later."""
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    monkeypatch.setattr(exclusive, "_alone", {})
    monkeypatch.setattr(exclusive, "_measured", 0)
    held: list[Any] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        held.append(dict(frame.f_locals))
        return trace

    alone: list[bool] = []
    original = exclusive.is_alone
    monkeypatch.setattr(exclusive, "is_alone", lambda *args: alone.append(original(*args)) or alone[-1])

    def run() -> None:
        alone.clear()
        x = torch.randn(64, 64, requires_grad=True)
        with Session(min_nbytes=0):
            loss = ((x * 2.0).relu() * 3.0).sum()
        loss.backward()

    for watch in (sys.settrace, sys.setprofile):
        before = sys.gettrace(), sys.getprofile()
        watch(trace)  # type: ignore[operator]
        try:
            run()
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
        assert not any(alone)
        assert not exclusive._alone
        held.clear()
    if before == (None, None):  # and not under a coverage tool
        run()
        assert any(alone)


def test_a_count_that_was_once_smaller_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that held a gradient while the counts were measured can only have raised them."""
    with Session():
        pass
    known = dict(exclusive._alone)
    monkeypatch.setattr(
        exclusive, "_alone", {key: tuple(count + 1 for count in counts) for key, counts in known.items()}
    )
    monkeypatch.setattr(exclusive, "_measured", 0)
    with Session():
        pass
    assert exclusive._alone == known


# -- deferred products -------------------------------------------------------------------------------------------------


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda g: g.detach().numpy().copy(),
    "data_ptr": lambda g: g.data_ptr() and None,
    "storage": lambda g: bytes(g.untyped_storage()),
    "clone": lambda g: g.clone(),
    "norm": lambda g: g.norm().item(),
    "array": lambda g: np.asarray(g).copy(),
    "repr": repr,
    "view": lambda g: g.reshape(-1)[5].item(),
    "isinstance": lambda g: (isinstance(g, Tensor), g.__class__ is Tensor, g.shape, g.stride(), g.dtype),
}


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("where", ["accumulate prehook", "accumulate hook", "transposition", "layer", "tensor"])
def test_a_hook_meets_an_ordinary_gradient(where: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstash.redeem.accumulation.LARGE", 1 << 12)
    monkeypatch.setattr("backstash.redeem.accumulation.CHUNK", 1 << 12)
    monkeypatch.setattr("backstash.redeem.accumulation.ROWS", 8)

    def run(session: Any) -> list[Any]:
        torch.manual_seed(0)
        layer, seen = nn.Linear(64, 64), []  # type: ignore[var-annotated]
        layer.weight.grad = torch.randn(64, 64)
        x = torch.randn(4, 64, requires_grad=True)

        def look(*grads: Any) -> None:
            given = grads[0] if isinstance(grads[0], tuple) else grads
            seen.extend(LOOKS[name](g) for g in given if isinstance(g, Tensor) and g.dim() == 2)

        with session:
            y = layer(x * 2.0)
            transposition = y.grad_fn.next_functions[-1][0]
            leaf = transposition.next_functions[0][0]
            if where == "accumulate prehook":
                leaf.register_prehook(look)
            elif where == "accumulate hook":
                leaf.register_hook(look)
            elif where == "transposition":
                transposition.register_prehook(look)
            elif where == "layer":
                y.grad_fn.register_hook(look)
            else:
                layer.weight.register_hook(look)
            y.square().sum().backward()
        return [layer.weight.grad, *seen]

    expected, got = run(nullcontext()), run(Session(min_nbytes=0))
    assert torch.equal(expected[0], got[0])
    assert len(expected) == len(got)
    for one, other in zip(expected[1:], got[1:], strict=True):
        assert np.array_equal(one, other) if isinstance(one, (Tensor, np.ndarray)) else one == other


def test_finalizers_on_many_threads_lose_no_count() -> None:
    """Graphs of one Session die on several threads at once, while another one saves."""
    session = Session(min_nbytes=0)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with session:
            for _ in range(20):
                losses = []
                for _ in range(8):
                    x = torch.randn(16, 16, requires_grad=True)
                    losses.append((F.relu(x * 2.0) @ x.exp()).tanh().sum())
                threads = [threading.Thread(target=loss.backward) for loss in losses]
                del losses, x
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                del threads, thread
    finally:
        sys.setswitchinterval(switch)
    assert (session._live.saved, session._live.nbytes, session._live.remade_nbytes) == (0, 0, 0)
    assert session._live.buffers.nbytes == 0


def test_a_value_is_claimed_only_where_backward_has_not_freed_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first convolutions that backward comes to are claimed; when there is room, the others are decoded at once."""
    monkeypatch.setattr(table, "LARGE", 1 << 12)
    claimed: list[int] = []
    original = claims.claim
    monkeypatch.setattr(claims, "claim", lambda *args: claimed.append(args[2]) or original(*args))
    images = torch.randn(2, 8, 16, 16)

    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()) for _ in range(24)])
        with session or nullcontext():
            model(images).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    session = Session("keep", min_nbytes=64)
    assert not differences(run(None), run(session))
    few = len(claimed)
    claimed.clear()
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    assert not differences(run(None), run(Session("keep", min_nbytes=64)))
    assert 0 < few < len(claimed)
