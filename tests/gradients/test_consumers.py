"""Kernels that read the stash themselves and write over gradients: the bits, who may be overwritten, what is held.

The file is long because every kernel is held to the same table of cases.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, Keeps, differences
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backstash import Session, policies
from backstash.codecs import Binary
from backstash.codecs.base import FLOATS
from backstash.errors import NeedNotMetError
from backstash.ops import cpu
from backstash.ops.backends import serving
from backstash.policies.base import Action, Outcome, Stash
from backstash.redeem import accumulation, claims, exclusive, norms, pointwise, table
from backstash.report.meter import CountedPeak
from backstash.saved import Need, SavedTensor
from backstash.stash.decode import StashedTensor
from backstash.torch_internals import saved_tensor_hooks

native = pytest.mark.skipif(not cpu.available(), reason="the native kernels are not built")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.ReLU6(),
        nn.MaxPool2d(3, 1, 1),
        nn.ConvTranspose2d(8, 4, 2),
        nn.GELU(),
        nn.Threshold(0.1, -1.0),
        nn.Conv2d(4, 4, 1),
        nn.Softmax(-1),
        nn.SiLU(),
        nn.Flatten(),
        nn.LazyLinear(96),
        nn.ReLU(),
        nn.Linear(96, 5, bias=False),
        nn.Tanh(),
    )


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, x: Tensor, backward: Callable[[Tensor], None] = Tensor.backward) -> list[Tensor]:
    model.zero_grad()
    backward(model(x).square().sum())
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The arguments of every use of mask bits: the incoming gradient, and what it was written to."""
    seen: list[tuple[Any, Any]] = []
    original = serving("cpu").mask_select

    def select(x: Tensor, mask: Tensor, out: Tensor) -> None:
        seen.append((x.data_ptr(), out.data_ptr()))
        original(x, mask, out)

    monkeypatch.setattr(serving("cpu"), "mask_select", select)
    return seen


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored"])
def test_bits(policy: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    model = network()
    model(batch())
    model = model.to(dtype=dtype, memory_format=layout)
    x = batch().to(dtype=dtype, memory_format=layout).requires_grad_()
    expected = [*gradients(model, x), x.grad]
    for _ in range(2):
        x.grad = None
        with Session(policy, min_nbytes=0):
            got = gradients(model, x)
        assert not differences(expected, [*got, x.grad])


@native
def test_every_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this version of torch every reader hands its claim on to its kernel."""
    with Session():
        assert set(exclusive._alone) == {(call, viewed) for call in exclusive.CALLS for viewed in (False, True)}
    redeemed: set[str] = set()
    for op, entry in claims._kernels.items():

        def kernel(claim: Any, *args: Any, original: Any = entry.kernel) -> Any:
            if isinstance(claim.stashed, StashedTensor):
                redeemed.add(claim.stashed.saved.tensor.op)
            return original(claim, *args)

        monkeypatch.setitem(claims._kernels, op, replace(entry, kernel=kernel))
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    model = network()
    gradients(model, batch())
    with Session(Everything(), min_nbytes=0):
        gradients(model, batch())
    x = torch.randn(37, 53, requires_grad=True)
    with Session(BinaryFirst(), min_nbytes=0):
        for function in (*POINTWISE.values(), F.dropout):
            (function(x * 2.0) * 3.0).sin().sum().backward()
    with Session("keep", min_nbytes=0):
        for function in (lambda x: F.batch_norm(x, None, None, training=True), lambda x: F.group_norm(x, 1)):
            (function(x[None] * 2.0) * 3.0).sin().sum().backward()
        (F.layer_norm(x * 2.0, (53,)) * 3.0).sin().sum().backward()
    # On a CPU dropout is a product with its noise; the accelerators' own node is tried in tests/device.
    assert redeemed == {op for op, _ in table.CLAIMED} - {"NativeDropout"}


@dataclass(frozen=True)
class BinaryFirst(Everything):
    """Encodes all that can be encoded, what has two values in a bit per element."""

    def decide(self, saved: SavedTensor) -> Action:
        action = super().decide(saved)
        assert isinstance(action, Stash)
        return Stash((Binary(), *action.codecs)) if Need.VALUE is saved.need and saved.spec.dtype in FLOATS else action


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64))


@native
def test_a_linear_layers_input_is_gone_before_its_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = perceptron(), torch.randn(8192, 64)
    products: list[tuple[int, int]] = []
    original = accumulation.deferring_mm
    session = Session(policies.lossless(recompute=False), min_nbytes=0)

    def mm(aten: Any, a: Tensor, b: Tensor) -> Tensor:
        products.append((a.shape[0], session._live.buffers.nbytes))  # not those that other tests have left
        return original(aten, a, b)

    monkeypatch.setattr(accumulation, "deferring_mm", mm)
    with session:
        loss = model(x).square().mean()
    products.clear()
    loss.backward()
    decoded = 8192 * 64 * 4  # a relu's output, which is stored in another form; the batch is not
    assert products == [(64, decoded), (8192, 0), (64, decoded), (8192, 0), (64, 0)]


@native
@pytest.mark.parametrize("shape", [(96, 64), (4, 24, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["all", "input", "weight", "frozen weight", "no input", "twice", "transposed"])
def test_linear_layers_in_every_way(shape: tuple[int, ...], dtype: torch.dtype, wanted: str) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).clamp(min=0).to(dtype)
    if wanted == "transposed":
        x = x.mT.contiguous().mT
    model = perceptron().to(dtype)
    x.requires_grad_(wanted != "no input")
    if wanted == "frozen weight":
        model[2].weight.requires_grad_(False)

    def step() -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        y = model(x)
        loss = (y.square().sum() + model[2](y).sum()) if wanted == "twice" else y.square().sum()
        if wanted == "input":
            return list(torch.autograd.grad(loss, [x]))
        if wanted == "weight":
            return list(torch.autograd.grad(loss, [model[2].weight]))
        loss.backward()
        return [one.grad for one in (*model.parameters(), x) if one.grad is not None]

    expected = [one.clone() for one in step()]
    with Session(policies.lossless(recompute=False), min_nbytes=0):
        for _ in range(2):
            assert not differences(expected, step())


@native
def test_a_gradient_that_nobody_else_holds_is_overwritten(calls: list[tuple[Any, Any]]) -> None:
    x = torch.randn(512, 512, requires_grad=True)  # a smaller one's mask is decoded
    with Session(min_nbytes=0):
        (x * 2.0).relu().mul(3.0).sum().backward()
    assert [grad == out for grad, out in calls] == [True]


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu_": lambda x: F.leaky_relu_(x * 1.0, 0.2),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "elu_": lambda x: F.elu_(x * 1.0),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "threshold": lambda x: F.threshold(x, 0.3, -0.5),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax of another dimension": lambda x: F.softmax(x, 0),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax in float64": lambda x: F.log_softmax(x, -1, dtype=torch.float64),
}


@pytest.mark.cases(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POINTWISE)
def test_what_is_written_over_gradients(name: str, dtype: torch.dtype) -> None:
    def run(session: Any) -> Tensor | None:
        x = torch.randn(37, 53, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        weights = torch.randn(37, 53, generator=torch.Generator().manual_seed(1)).to(dtype)
        with session:
            (POINTWISE[name](x * 2.0) * weights).sum().backward()
        return x.grad

    expected = run(torch.enable_grad())
    for policy in ("lossless", "keep"):
        assert not differences([expected], [run(Session(policy, min_nbytes=0))])


def test_every_kernel_writes_over_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    written: set[Any] = set()
    for op, entry in claims._kernels.items():

        def kernel(claim: Any, aten: Any, args: Any, *rest: Any, original: Any = entry.kernel) -> Any:
            made = original(claim, aten, args, *rest)
            if made is args[0]:
                written.add(aten)
            return made

        monkeypatch.setitem(claims._kernels, op, replace(entry, kernel=kernel))
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    for activation in POINTWISE.values():
        x = torch.randn(37, 53, requires_grad=True)
        with Session("keep", min_nbytes=0):
            (activation(x * 2.0) * 3.0).sum().backward()
    assert written == set(pointwise._OUT)


def sent_both_ways(x: Tensor, keep: list[Tensor]) -> Tensor:
    return (x * 1.0).relu() + (x * 2.0).relu()


def hooked(x: Tensor, keep: list[Tensor]) -> Tensor:
    y = x.relu()
    y.register_hook(keep.append)
    return y


def retained(x: Tensor, keep: list[Tensor]) -> Tensor:
    y = x.relu()
    y.retain_grad()
    keep.append(y)
    return y


def node_hooked(x: Tensor, keep: list[Tensor]) -> Tensor:
    y = x.relu()
    y.grad_fn.register_hook(lambda inputs, outputs: keep.extend((*inputs, *outputs)))  # type: ignore[union-attr]
    return y


def node_hooked_before(x: Tensor, keep: list[Tensor]) -> Tensor:
    y = x.relu()
    y.grad_fn.register_prehook(lambda outputs: keep.extend(outputs))  # type: ignore[union-attr]
    return y


def viewed(x: Tensor, keep: list[Tensor]) -> Tensor:
    return Keeps.apply(x.relu(), keep)  # type: ignore[no-any-return]


HOLDERS = [sent_both_ways, hooked, retained, node_hooked, node_hooked_before, viewed]


ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.relu,
    F.gelu,
    F.silu,
    torch.tanh,
    lambda x: F.log_softmax(x, -1),
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: F.layer_norm(x, (32,)),
    lambda x: F.group_norm(x, 2),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_somebody_holds_is_not(
    holder: Callable[[Tensor, list[Tensor]], Tensor],
    activation: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(session: Session | None) -> list[Tensor]:
        x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        keep: list[Tensor] = []
        monkeypatch.setattr(norms, "_LARGE", 0)
        monkeypatch.setattr(norms, "_CHUNK", 256)
        monkeypatch.setattr(Tensor, "relu", lambda self: activation(self))
        with session or nullcontext():
            y = holder(x, keep)
            (y * y.detach() * 3.0).sum().backward()
        return [x.grad, *[one if one.grad_fn is None else one.grad for one in keep if one is not None]]  # type: ignore[list-item]

    assert not differences(run(None), run(Session(min_nbytes=0)))


def test_the_callers_gradient_and_those_in_between_are_not() -> None:
    def run(session: Any) -> list[Tensor]:
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        given = torch.ones(32, 32)
        with session:
            y = (x * 2.0).relu()
            y.backward(given, retain_graph=True)
            z = y.tanh().relu()
            between = torch.autograd.grad((z * 2.0).sum(), [z, y, x])
        return [given, x.grad, *between]  # type: ignore[list-item]

    assert not differences(run(torch.enable_grad()), run(Session(min_nbytes=0)))


def test_twice_through_one_graph() -> None:
    """What is let go of after the weight gradient is there again the second time."""
    model = network()
    model(batch())

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    expected = gradients(model, batch(), twice)
    with Session(min_nbytes=0):
        got = gradients(model, batch(), twice)
    assert not differences(expected, got)


def test_two_convolutions_and_a_relu_read_one_value() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.norm(self.first(x)))
            return self.a(y) * self.b(y) + y  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Fork()
    x = torch.randn(4, 4, 12, 12)
    expected = gradients(model, x)
    for policy in ("lossless", "lossless_stored"):
        with Session(policy, min_nbytes=0):
            assert not differences(expected, gradients(model, x))


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("way", ["dispatch mode", "anomaly", "vmap", "create_graph", "checkpoint", "reentrant"])
def test_other_ways_to_run_backward(way: str) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for arg in args:  # reads what it is given
                if isinstance(arg, Tensor) and arg.is_floating_point():
                    arg.abs().sum()
            return func(*args, **(kwargs or {}))

    model = network()
    x = batch()
    model(x)

    def run() -> list[Tensor]:
        model.zero_grad()
        parameters = list(model.parameters())
        if way in ("checkpoint", "reentrant"):
            y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=way == "reentrant")
        else:
            y = model(x)
        loss = y.square().sum()
        if way == "dispatch mode":
            with Seen():
                return list(torch.autograd.grad(loss, parameters))
        if way == "anomaly":
            with torch.autograd.detect_anomaly():
                return list(torch.autograd.grad(loss, parameters))
        if way == "vmap":
            return list(torch.autograd.grad([loss], parameters, [torch.ones(2)], is_grads_batched=True))
        if way == "create_graph":
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            return [*first, *torch.autograd.grad(sum(one.square().sum() for one in first), parameters)]
        loss.backward()
        return [parameter.grad for parameter in parameters]  # type: ignore[misc]

    expected = run()
    with Session(min_nbytes=0):
        got = run()
    assert not differences(expected, got)


def test_a_hook_that_looks_at_another_node_sees_data() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    seen = []
    with Session("lossless_stored", min_nbytes=0):
        y = (x * 2.0).relu()
        z = y.mul(3.0)
        z.register_hook(lambda grad: seen.append(y.grad_fn._saved_result.clone()))  # type: ignore[union-attr]
        z.sum().backward()
    assert torch.equal(seen[0] > 0, x * 2.0 > 0)


def test_nothing_is_registered_with_torch() -> None:
    """Graphs of a Session that was left have their backward to come, and the dispatcher is as it always was."""
    ops = ("mm", "mul.Tensor", "convolution_backward", "threshold_backward", "native_layer_norm_backward")
    before = [torch._C._dispatch_dump(f"aten::{op}") for op in ops]
    model = network()
    expected = gradients(model, batch())
    with Session(min_nbytes=0) as session:
        loss = model(batch()).square().sum()
        with pytest.raises(Exception, match="inside another"), Session():
            pass
        assert [torch._C._dispatch_dump(f"aten::{op}") for op in ops] == before
    model.zero_grad()
    loss.backward()
    assert not differences(expected, [parameter.grad for parameter in model.parameters()])
    with pytest.raises(ZeroDivisionError), session:
        1 / 0  # noqa: B018
    assert [torch._C._dispatch_dump(f"aten::{op}") for op in ops] == before


def installed() -> tuple[int, ...]:
    """How many hooks and modes of the kinds that a Session installs there are."""
    module = nn.modules.module
    hooks = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    return (*hooks, torch._C._len_torch_function_stack(), saved_tensor_hooks(True) is not None)


class Wrong:
    """Its error shows when the last value is encoded, which is when the Session is left."""

    def decide(self, saved: SavedTensor) -> Action:
        return Stash("bitmask")

    def observe(self, outcome: Outcome) -> None:
        pass


def test_an_error_on_leaving_leaves_nothing_installed() -> None:
    before = installed()
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(NeedNotMetError), Session(Wrong(), min_nbytes=0):
        y = (x * 2.0).tanh().sum()
    assert installed() == before
    del y
    with Session(min_nbytes=0):
        (x * 2.0).tanh().sum().backward()


@pytest.mark.parametrize("failing", ["_enter_root", "_finish", "_forward.take", "_forward.name"])
def test_an_error_inside_a_session_leaves_nothing_installed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = installed()
    session = Session(min_nbytes=0)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        *path, name = failing.split(".")
        patch.setattr(type(getattr(session, path[0])) if path else session, name, fail)
        with pytest.raises(ZeroDivisionError), session:
            network()(batch()).sum()
    assert installed() == before
    with session:
        network()(batch()).sum().backward()


@pytest.mark.parametrize("failing", ["backstash.capture.observer.Observer", "backstash.capture.modules.listen"])
def test_an_error_on_entering_leaves_nothing_installed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = installed()
    session = Session(min_nbytes=0)

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(failing, fail)
        with pytest.raises(ZeroDivisionError), session:
            pass
    assert installed() == before
    with session:
        network()(batch()).sum().backward()


def test_backward_on_another_thread() -> None:
    model = network()
    expected = gradients(model, batch())
    model.zero_grad()
    with Session(min_nbytes=0):
        loss = model(batch()).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert not differences(expected, [parameter.grad for parameter in model.parameters()])


@native
def test_the_input_is_gone_before_its_gradient_is_made() -> None:
    """Weight gradient first: input, incoming and outgoing gradient are never there together."""
    conv = nn.Conv2d(16, 16, 1, bias=False).to(memory_format=torch.channels_last)
    for parameter in conv.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(8, 16, 64, 64).to(memory_format=torch.channels_last).requires_grad_()
    whole = 8 * 16 * 64 * 64 * 4

    def peak_of_backward(session: Any) -> int:
        with session:
            y = (x * 2.0).relu()
            loss = conv(y).sum()
            del y
            with CountedPeak() as counter:
                torch.autograd.grad(loss * 1.0, [x, *conv.parameters()])
        return counter.peak_nbytes

    session = Session("lossless_stored")
    peak_of_backward(session)
    gc.collect()
    # Gradient of conv's output (expanded, then made dense), of its input, and once more what backward needs itself.
    assert peak_of_backward(session) < 2.6 * whole


def test_nothing_is_held_after_backward() -> None:
    model = network()
    session = Session(min_nbytes=0)
    with session:
        gradients(model, batch())
        gc.collect()
        assert session._live.buffers.nbytes == 0
        assert session._live.remade_nbytes == 0


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("way", ["autograd.grad", "torch.func", "jacobian"])
@pytest.mark.parametrize("drawn", [nn.Dropout(0.2), nn.AlphaDropout(0.2)], ids=str)
def test_batched_gradients_of_what_was_drawn(drawn: nn.Module, way: str, steps: int) -> None:
    """It is made again once for all of the batch, with the numbers that were drawn."""

    def gradients(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), drawn, nn.Linear(16, 4))
        parameters, found = list(layers.parameters()), []
        for _ in range(steps):
            x = torch.randn(8, 16)
            if way == "jacobian":
                with context:
                    found += [torch.autograd.functional.jacobian(lambda x: layers(x).mean(0), x, vectorize=True)]
                continue
            with context:
                y = layers(x).mean(0)
            if way == "autograd.grad":
                found += torch.autograd.grad(y, parameters, torch.eye(4), is_grads_batched=True)
            else:
                found += torch.func.vmap(partial(torch.autograd.grad, y, parameters, retain_graph=True))(torch.eye(4))
            found.append(torch.get_rng_state())
        return found

    expected = gradients(nullcontext())
    assert not differences(expected, gradients(Session("lossless", min_nbytes=0)))
