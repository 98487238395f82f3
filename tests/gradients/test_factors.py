"""Gradients multiplied by factors that are read from codes: dropout's noise, and the derivatives of few-bit codes.

The file is long because all factors share the cases and the measuring functions at its beginning.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Keeps, differences
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backstash import Session
from backstash.codecs import Binary, FewBit
from backstash.codecs.fewbit.codec import ACTIVATIONS, BITS
from backstash.errors import DamagedPlanesError
from backstash.ops import cpu
from backstash.ops.backends import serving
from backstash.policies import Lossless
from backstash.policies.base import Action, Outcome, Stash
from backstash.redeem import factors
from backstash.redeem.claims import Claim, Unstashed
from backstash.report.meter import CountedPeak
from backstash.saved import SavedTensor, TensorSpec

native = pytest.mark.skipif(not cpu.available(), reason="the native kernels are not built")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
STORED = Lossless(recompute=False)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every gradient that was multiplied by codes' values: whether it was written over."""
    seen: list[bool] = []
    original = serving("cpu").scale_by_codes

    def scale(x: Tensor, packed: Tensor, table: Tensor, out: Tensor) -> None:
        original(x, packed, table, out)
        seen.append(x.data_ptr() == out.data_ptr())

    monkeypatch.setattr(serving("cpu"), "scale_by_codes", scale)
    return seen


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decodes(session: Session) -> dict[str, int]:
    """How often each codec's values were decoded."""
    counts: dict[str, int] = {}
    for entry in session._forward.step.accounts:
        counts[entry.codec] = counts.get(entry.codec, 0) + entry.decodes
    return counts


def step(function: Callable[[Tensor], Tensor], x: Tensor, policy: Any = STORED) -> tuple[Tensor, Session | None]:
    """The gradient at ``x`` of a function between others, with the same random numbers every time."""
    x = x.detach().requires_grad_()
    session = None if policy is None else Session(policy, min_nbytes=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        with session or torch.enable_grad():
            function(x * 1.5).mul(0.5).cos().sum().backward()
    assert x.grad is not None
    return x.grad, session


def two_valued(x: Tensor) -> Tensor:
    """A mask that nobody but autograd will hold."""
    return (x.detach() > 0.3).to(x.dtype) * 3.0


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "in place": lambda x: F.dropout(x, 0.3, inplace=True),
    "nearly all": lambda x: F.dropout(x, 0.999),
    "nearly none": lambda x: F.dropout(x, 1e-3),
    "none": lambda x: F.dropout(x, 0.0),
    "all": lambda x: F.dropout(x, 1.0),
    "eval": lambda x: F.dropout(x, 0.3, training=False),
    "1d": lambda x: F.dropout1d(x.flatten(2), 0.3),
    "2d": lambda x: F.dropout2d(x, 0.3),
    "3d": lambda x: F.dropout3d(x.unsqueeze(-1), 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "twice": lambda x: F.dropout(F.dropout(x, 0.2), 0.4),
    "of a mask": lambda x: F.dropout(x, 0.3) * two_valued(x),
    "like its own zeros": lambda x: (lambda y: y * (y.detach() != 0).to(y.dtype))(F.dropout(x, 0.3)),
    "by a mask": lambda x: x * two_valued(x),
    "a mask by it": lambda x: two_valued(x) * x,
    "of two numbers, none of them zero": lambda x: x * (two_valued(x) - 1.0),
    "a broadcast mask": lambda x: x * two_valued(x[..., :1]),
    "by another type": lambda x: x * two_valued(x).float(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "gaps": lambda x: torch.cat((x, x), 2)[:, :, ::2],
}


@pytest.mark.cases(60)
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DROPOUTS)
def test_bits_of_dropout(name: str, dtype: torch.dtype, layout: str, policy: str) -> None:
    x = LAYOUTS[layout](random(3, 8, 9, 10, dtype=dtype))
    expected, _ = step(DROPOUTS[name], x, None)
    got, _ = step(DROPOUTS[name], x, policy)
    assert not differences([expected], [got])


@native
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["dropout", "in place", "alpha", "by a mask", "a mask by it"])
def test_nothing_is_decoded_and_the_gradient_is_written_over(
    name: str, dtype: torch.dtype, layout: str, scaled: list[bool]
) -> None:
    session = step(DROPOUTS[name], LAYOUTS[layout](random(3, 8, 16, 16, dtype=dtype)))[1]
    assert scaled == [True]
    assert session is not None
    assert decodes(session)["binary"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_decoded_and_written_over(dtype: torch.dtype, scaled: list[bool]) -> None:
    seen: list[int] = []

    def recording(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: seen.append(grad.data_ptr()))
        y = F.dropout(x, 0.3)
        y.register_hook(lambda grad: seen.append(grad.data_ptr()))
        return y

    step(recording, random(64, 64, dtype=dtype))
    before, after = seen
    assert not scaled
    assert before == after


@pytest.mark.parametrize("numbers", [(0.0, 1.25), (-0.0, 2.0), (float("inf"), 0.0), (float("nan"), 0.0), (-1.0, 1e30)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_any_gradient_and_any_two_factors(numbers: tuple[float, float], dtype: torch.dtype) -> None:
    """Zeros of either sign, infinity times zero, NaN and its payload."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(width)
    weights = (
        torch.randint(info.min, info.max, (4099,), generator=torch.Generator().manual_seed(1)).to(width).view(dtype)
    )
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40]
    weights[: 70 * len(special)] = torch.tensor(special * 70, dtype=dtype)
    chosen = torch.rand(4099, generator=torch.Generator().manual_seed(2)) < 0.5
    pair = torch.tensor(numbers, dtype=dtype)

    def run(session: Any) -> list[Tensor]:
        x, given = random(4099, dtype=dtype).requires_grad_(), weights.clone()
        with session:
            y = (x * 1.0) * torch.where(chosen, pair[0], pair[1])
            y = y.view(4099)
            y.backward(given)
        return [x.grad, given]  # type: ignore[list-item]

    assert not differences(run(torch.enable_grad()), run(Session(STORED, min_nbytes=0)))


# -- who holds the gradient --------------------------------------------------------------------------------------------


def both_ways(x: Tensor, keep: list[Any]) -> Tensor:
    return F.dropout(x * 1.0, 0.3) + F.dropout(x * 2.0, 0.4)


def hooked(x: Tensor, keep: list[Any]) -> Tensor:
    y = F.dropout(x, 0.3)
    y.register_hook(keep.append)
    return y


def retained(x: Tensor, keep: list[Any]) -> Tensor:
    y = F.dropout(x, 0.3)
    y.retain_grad()
    keep.append(y)
    return y


def node_hooked(x: Tensor, keep: list[Any]) -> Tensor:
    y = F.dropout(x, 0.3)
    y.grad_fn.register_hook(lambda inputs, outputs: keep.extend((inputs[0], *outputs)))  # type: ignore[union-attr]
    return y


def node_hooked_before(x: Tensor, keep: list[Any]) -> Tensor:
    y = F.dropout(x, 0.3)
    y.grad_fn.register_prehook(lambda outputs: keep.extend(outputs))  # type: ignore[union-attr]
    return y


def viewed(x: Tensor, keep: list[Any]) -> Tensor:
    return Keeps.apply(F.dropout(x, 0.3), keep)  # type: ignore[no-any-return]


def numpy_held(x: Tensor, keep: list[Any]) -> Tensor:
    y = F.dropout(x, 0.3)
    y.register_hook(lambda grad: keep.append(torch.from_numpy(grad.numpy())))
    return y


def detached(x: Tensor, keep: list[Any]) -> Tensor:
    y = F.dropout(x, 0.3)
    y.register_hook(lambda grad: keep.append(grad.detach()))
    return y


def captured(x: Tensor, keep: list[Any]) -> Tensor:
    """The gradient of a sum is that of both of its terms."""
    y = F.dropout(x, 0.3)
    z = x.sin()
    z.retain_grad()
    keep.append(z)
    return y + z


def factors_that_both_need_gradients(x: Tensor, keep: list[Any]) -> Tensor:
    a, b = ((x.detach() > at).float().requires_grad_() for at in (0.1, 0.4))
    keep += [a, b]
    return (a * 1.0) * (b * 1.0) + x


def squared(x: Tensor, keep: list[Any]) -> Tensor:
    a = (x.detach() > 0.1).float().requires_grad_()
    keep.append(a)
    y = a * 1.0
    return y * y + x


HOLDERS = [
    both_ways,
    hooked,
    retained,
    node_hooked,
    node_hooked_before,
    viewed,
    numpy_held,
    detached,
    captured,
    factors_that_both_need_gradients,
    squared,
]


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_somebody_holds_is_not_written_over(holder: Callable[[Tensor, list[Any]], Tensor]) -> None:
    def run(session: Any) -> list[Tensor]:
        x, keep = random(32, 32).requires_grad_(), []  # type: ignore[var-annotated]
        torch.manual_seed(3)
        with session:
            y = holder(x, keep)
            (y * 3.0).cos().sum().backward()
        return [x.grad, *[one.grad if one.requires_grad else one for one in keep]]  # type: ignore[list-item]

    assert not differences(run(torch.enable_grad()), run(Session(STORED, min_nbytes=0)))


def test_the_callers_gradient_and_those_in_between_are_not_written_over() -> None:
    def run(session: Any) -> list[Tensor]:
        x, given = random(32, 32).requires_grad_(), torch.ones(32, 32)
        torch.manual_seed(3)
        with session:
            y = F.dropout(x * 2.0, 0.3)
            y.backward(given, retain_graph=True)
            z = F.dropout(y.tanh(), 0.4)
            between = torch.autograd.grad((z * 2.0).cos().sum(), [z, y, x])
        return [given, x.grad, *between]  # type: ignore[list-item]

    assert not differences(run(torch.enable_grad()), run(Session(STORED, min_nbytes=0)))


def hook(z: Tensor, keep: list[Any], take: Callable[[Tensor], Any]) -> None:
    z.register_hook(lambda grad: keep.append(take(grad)))


BASES: dict[str, Callable[[Tensor, list[Any]], Any]] = {
    "nobody": lambda z, keep: None,
    "hook": lambda z, keep: hook(z, keep, lambda grad: grad),
    "detached": lambda z, keep: hook(z, keep, lambda grad: grad.detach()),
    "part": lambda z, keep: hook(z, keep, lambda grad: grad[:3]),
    "numpy": lambda z, keep: hook(z, keep, lambda grad: torch.from_numpy(grad.numpy())),
    "dlpack": lambda z, keep: hook(z, keep, lambda grad: torch.from_dlpack(grad)),
    "retained": lambda z, keep: (z.retain_grad(), keep.append(z)),
    "node": lambda z, keep: z.grad_fn.register_hook(lambda after, before: keep.extend((after[0], *before))),  # type: ignore[union-attr]
    "node before": lambda z, keep: z.grad_fn.register_prehook(keep.extend),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(-1,), (4, 2, 128), (8, 128)])
@pytest.mark.parametrize("name", ["dropout", "gelu", "gelu_tanh", "relu"])
def test_who_holds_the_base_of_a_view(name: str, shape: tuple[int, ...], base: str) -> None:
    """A gradient that comes out of a reshape is a view of one that others may hold."""
    function = {**FUNCTIONS, "dropout": DROPOUTS["dropout"], "relu": F.relu}[name]

    def run(session: Any) -> list[Tensor]:
        x, keep = random(32, 32).requires_grad_(), []  # type: ignore[var-annotated]
        torch.manual_seed(3)
        with session:
            z = function(x * 1.5).view(8, 128).view(shape)
            BASES[base](z, keep)
            other = x.sin().view(shape)
            other.retain_grad()
            loss = (z * 3.0).cos().sum() + (z + other).square().sum()
            between = torch.autograd.grad((z + other).sin().sum(), [z, x], retain_graph=True)
            loss.backward()
        held = [one.grad if one.requires_grad else one for one in keep]
        return [x.grad, other.grad, *between, *held]  # type: ignore[list-item]

    assert not differences(run(torch.enable_grad()), run(Session(STORED, min_nbytes=0)))


@native
@pytest.mark.parametrize("base", BASES)
def test_a_view_whose_base_nobody_holds_is_written_over(base: str, scaled: list[bool]) -> None:
    keep: list[Any] = []

    def function(x: Tensor) -> Tensor:
        z = F.dropout(x, 0.3).view(-1)
        BASES[base](z, keep)
        return z

    step(function, random(32, 32))
    assert scaled == [base in ("nobody", "retained")]  # what is retained is a copy


# -- ways to run it ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.first(x)), 0.2)
        return x + F.dropout(self.second(hidden), 0.1)  # type: ignore[no-any-return]


class Reads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_floating_point():
                arg.abs().sum()
        return func(*args, **(kwargs or {}))


WAYS = [
    "backward",
    "retain_graph",
    "dispatch mode",
    "anomaly",
    "vmap",
    "double backward",
    "gradient penalty",
    "checkpoint",
    "reentrant",
    "autocast",
    "outside",
    "hessian",
]


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_run_backward(way: str, policy: str) -> None:
    if way == "vmap":  # which runs nothing random, such as a dropout that is made again
        policy = "lossless_stored"
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    parameters = list(model.parameters())

    def run(session: Any) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        x = random(48, 32).requires_grad_()
        with session:
            if way in ("checkpoint", "reentrant"):
                y = checkpoint(model, x, use_reentrant=way == "reentrant")
            else:
                with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                    y = model(x)
            loss = y.float().square().sum()
            if way == "outside":
                pass
            elif way == "dispatch mode":
                with Reads():
                    return list(torch.autograd.grad(loss, [x, *parameters]))
            elif way == "anomaly":
                with torch.autograd.detect_anomaly():
                    return list(torch.autograd.grad(loss, [x, *parameters]))
            elif way == "vmap":
                return list(torch.autograd.grad([loss], [x, *parameters], [torch.ones(2)], is_grads_batched=True))
            elif way in ("double backward", "hessian"):
                first = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
                second = torch.autograd.grad(
                    sum(one.square().sum() for one in first), parameters, create_graph=way == "hessian"
                )
                return [*first, *second]
            elif way == "gradient penalty":
                (first,) = torch.autograd.grad(loss, x, create_graph=True)  # type: ignore[assignment]
                (loss + first.norm(2)).backward()  # type: ignore[attr-defined]
            else:
                if way == "retain_graph":
                    loss.backward(retain_graph=True)
                loss.backward()
        if way == "outside":
            loss.backward()
        return [x.grad, *[parameter.grad for parameter in parameters]]  # type: ignore[list-item]

    expected = run(torch.enable_grad())
    session = Session(policy, min_nbytes=0)
    for _ in range(2):
        assert not differences(expected, run(session))


def test_other_questions_are_answered_with_data() -> None:
    """A claim of a factor that something else than the product reads is decoded for it."""

    x, y = two_valued(random(8, 8)), random(8, 8, seed=1)
    factor = Claim(Unstashed(x, overwrites=True), TensorSpec.of(x))
    assert (factor.shape, factor.dtype, factor.stride()) == (x.shape, x.dtype, x.stride())
    questions: list[Callable[[Tensor], Tensor]] = [
        lambda one: one + y,
        lambda one: one * y,
        lambda one: y * one,
        lambda one: one * one,
        lambda one: one.conj() * y,
        lambda one: one.double(),
        lambda one: one.t() @ y,
        lambda one: one[2:, ::3],
        lambda one: one.detach().clone(),
        lambda one: torch.cat([one, y, one]),
        lambda one: torch.where(one > 0, y, one),
        lambda one: y[:1] * one,
        lambda one: y.double() * one,
        lambda one: y.to_sparse() * one,
        lambda one: torch.mul(y, one, out=torch.empty(8, 8)),
        lambda one: F.linear(y, one),
        lambda one: one * 2.0,
        lambda one: y.clone().mul_(one),
    ]
    for question in questions:
        got = question(factor)
        assert type(got) is Tensor
        assert not differences([question(x)], [got])


def test_damaged_planes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(64, 64).requires_grad_()
    original = Binary.encode

    def short(self: Binary, x: Tensor) -> Any:
        encoded = original(self, x)
        encoded.planes["mask"].resize_(encoded.planes["mask"].numel() - 1)  # type: ignore[attr-defined]
        return encoded

    monkeypatch.setattr(Binary, "encode", short)
    with Session(STORED, min_nbytes=0), pytest.raises(DamagedPlanesError, match="got 511"):
        F.dropout(x * 1.0, 0.3).cos().sum().backward()


@native
def test_dropout_adds_nothing_to_the_peak_of_backward() -> None:
    whole = 1 << 20

    def peak_of_backward(session: Any) -> int:
        x = torch.randn(whole // 4, requires_grad=True)
        x.grad = torch.zeros_like(x)
        with session:
            y = F.dropout(x * 2.0, 0.1).mul(3.0)
            loss = y.sum()
            del y
            with CountedPeak() as counter:
                (loss * 1.0).backward()
        return counter.peak_nbytes

    session = Session(STORED)
    peak_of_backward(session)
    gc.collect()
    assert peak_of_backward(session) < 1.2 * 2 * whole  # the gradient before and after ``* 3.0``


# -- few-bit codes -----------------------------------------------------------------------------------------------------


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "elu_": lambda x: F.elu(x, inplace=True),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}


@dataclass(frozen=True)
class FewBits:
    """Few-bit codes for what backward reads for a derivative only, a bit for signs, nothing else."""

    bits: int = 3

    def decide(self, saved: SavedTensor) -> Action:
        if saved.function is not None:
            return Stash(FewBit(saved.function, self.bits))
        return Lossless(recompute=False).decide(saved)

    def observe(self, outcome: Outcome) -> None:
        pass


def decoding_first(function: Callable[[Tensor], Tensor], x: Tensor, policy: Any) -> Tensor:
    """The gradient where nothing is read from codes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "scaled", lambda *args: None)
        return step(function, x, policy)[0]


@native
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_few_bits(name: str, bits: int, layout: str, scaled: list[bool]) -> None:
    x = LAYOUTS[layout](random(3, 8, 9, 10))
    got, session = step(FUNCTIONS[name], x, FewBits(bits))
    assert scaled == [True]
    assert session is not None
    assert decodes(session)[FewBit(name, bits).label] == 0
    expected = decoding_first(FUNCTIONS[name], x, FewBits(bits))
    assert len(scaled) == 1
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-8)  # ATen's own kernels differ by that among layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_few_bits_of_16_bits_are_decoded(name: str, dtype: torch.dtype, scaled: list[bool]) -> None:
    x = random(37, 53, dtype=dtype)
    got, _ = step(FUNCTIONS[name], x, FewBits())
    assert not scaled
    assert not differences([decoding_first(FUNCTIONS[name], x, FewBits())], [got])


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_forms_are_decoded(name: str, dtype: torch.dtype, scaled: list[bool]) -> None:
    x = random(37, 53, dtype=dtype).clamp(min=0)  # sparse
    expected, _ = step(FUNCTIONS[name], x, None)
    for policy in ("lossless", "lossless_stored", "keep"):
        assert not differences([expected], [step(FUNCTIONS[name], x, policy)[0]])
    assert not scaled


@native
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slope", [0.2, 1e-2, 0.0, 1.0])
def test_bits_of_leaky_relu(slope: float, dtype: torch.dtype, inplace: bool, scaled: list[bool]) -> None:
    def function(x: Tensor) -> Tensor:
        return F.leaky_relu(x, slope, inplace)

    weights = random(37, 53, seed=5, dtype=dtype)
    weights.view(-1)[::7] = float("nan")
    weights.view(-1)[1::7] = -0.0
    weights.view(-1)[2::7] = float("inf")
    wide = dtype in (torch.float32, torch.float64)
    for x in (random(37, 53, dtype=dtype), random(53, 37, dtype=dtype).t()):
        scaled.clear()
        expected, _ = step(lambda x: function(x) * weights, x, None)
        got, session = step(lambda x: function(x) * weights, x)
        assert not differences([expected], [got])
        assert session is not None
        assert decodes(session)["bitmask"] == (0 if wide else 1)
        assert scaled == ([True] if wide else [])


@pytest.mark.parametrize("holder", [both_ways, hooked, retained, node_hooked, viewed])
@pytest.mark.parametrize("name", ["gelu", "silu", "elu", "tanh"])
def test_a_gradient_that_somebody_holds_is_not_scaled(
    name: str, holder: Callable[[Tensor, list[Any]], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "dropout", lambda x, p: FUNCTIONS[name](x))

    def run(session: Any) -> list[Tensor]:
        x, keep = random(32, 32).requires_grad_(), []  # type: ignore[var-annotated]
        with session:
            y = holder(x, keep)
            (y * 3.0).cos().sum().backward()
        return [x.grad, *[one.grad if one.requires_grad else one for one in keep]]  # type: ignore[list-item]

    got = run(Session(FewBits(), min_nbytes=0))
    monkeypatch.setattr(factors, "scaled", lambda *args: None)
    for one, other in zip(run(Session(FewBits(), min_nbytes=0)), got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
