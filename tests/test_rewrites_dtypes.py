"""Proofs of rewrites for steps that compute in a coarser dtype than their gradients have: rounding, and real errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewrite_checks import Net, conv
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash.errors import RewriteError
from backstash.rewrites import channels_last, chunked_loss
from backstash.rewrites import cross_entropy as kernels
from backstash.rewrites.differences import StepNumbers, beyond_another_order, first_difference
from backstash.rewrites.step_dtypes import StepDtypes
from backstash.torch_internals import backward_engine

CLASSES = 500
IDS = torch.randint(CLASSES, (256,), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(IDS % 10 == 0, -100, IDS)

Loss = Callable[[nn.Module], Tensor]


class Words(nn.Module):
    """A language model in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Embedding(CLASSES, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh())
        self.lm_head = nn.Linear(32, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.body(words))  # type: ignore[no-any-return]


class Inside(Words):
    """One that has a block of autocast of its own."""

    def forward(self, words: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.lm_head(self.body(words))  # type: ignore[no-any-return]


class Cast(Words):
    """One that casts its head's input, as its head computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.bfloat16().requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.body(words).bfloat16()).float()  # type: ignore[no-any-return]


class Adapted(Words):
    """One of frozen bfloat16 weights, beside which a small float32 layer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(32, 32)

    def forward(self, words: Tensor) -> Tensor:
        x = self.body(words)
        return self.lm_head(x + self.adapter(x.float()).bfloat16())  # type: ignore[no-any-return]


def entropy(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(IDS).float(), LABELS)


def under_autocast(loss: Loss, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Loss:
    def inside(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype):
            return loss(model) * scale

    return inside


def in_checkpoint(model: nn.Module) -> Tensor:
    body = model.get_submodule("body")
    hidden = checkpoint(lambda x: body(x).float(), IDS, use_reentrant=False)
    return F.cross_entropy(model.get_submodule("lm_head")(hidden), LABELS)


def step_of(model: nn.Module, loss: Loss) -> Callable[[], Tensor]:
    def step() -> Tensor:
        value = loss(model)
        value.backward()
        return value.detach()

    return step


STEPS: dict[str, tuple[type[Words], Loss]] = {
    "autocast": (Words, under_autocast(entropy)),
    "float16 and a scale": (Words, under_autocast(entropy, torch.float16, 1024.0)),
    "the loss outside": (Words, lambda model: F.cross_entropy(under_autocast(lambda net: net(IDS))(model), LABELS)),
    "inside the model": (Inside, entropy),
    "a checkpoint": (Words, under_autocast(in_checkpoint)),
    "a cast": (Cast, entropy),
    "an adapter": (Adapted, entropy),
    "summed": (Words, under_autocast(lambda model: F.cross_entropy(model(IDS), LABELS, reduction="sum"))),
    "each": (Words, under_autocast(lambda model: F.cross_entropy(model(IDS), LABELS, reduction="none").mean())),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_rounding_to_a_coarser_dtype_is_no_error(name: str) -> None:
    kind, loss = STEPS[name]
    model = kind()
    with chunked_loss(model, step=step_of(model, loss), chunk_nbytes=64 * CLASSES * 4) as rewrite:
        assert rewrite.losses >= 1 and rewrite.distance < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llama_under_autocast(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=CLASSES, num_hidden_layers=2, **sizes)
    model, words = transformers.LlamaForCausalLM(config), IDS.view(2, 128)
    loss = under_autocast(lambda net: net(input_ids=words, labels=words).loss, dtype, 256.0)
    with chunked_loss(model, step=step_of(model, loss), chunk_nbytes=1 << 17) as rewrite:
        assert 1e-4 < rewrite.distance < 0.03


def weak(apply: Callable[..., Any], **changed: Any) -> Callable[..., Any]:
    """Returns an ``apply`` with other arguments at the places that are named a0, a1, and so on."""

    def changing(*args: Any) -> Any:
        return apply(*(changed.get(f"a{place}", lambda x: x)(arg) for place, arg in enumerate(args)))

    return changing


class Scaled(torch.autograd.Function):
    """Is nothing, but multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0] * ctx.factor, None


MUTATIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "the loss is off by a twentieth": lambda apply: lambda *args: 1.05 * apply(*args),
    "the gradient of the loss is off by a twentieth": lambda apply: lambda *args: Scaled.apply(apply(*args), 1.05),
    "the input has no gradient": lambda apply: weak(apply, a0=Tensor.detach),
    "the weight has no gradient": lambda apply: weak(apply, a1=Tensor.detach),
    "the bias has no gradient": lambda apply: weak(apply, a2=Tensor.detach),
    "the gradient of the bias is off by a tenth": lambda apply: weak(apply, a2=lambda bias: Scaled.apply(bias, 1.1)),
    "the gradient of the input is off by a twentieth": lambda apply: weak(apply, a0=lambda x: Scaled.apply(x, 1.05)),
    "ignored rows count": lambda apply: weak(apply, a3=lambda target: target.clamp(min=0)),
    "one of a hundred rows is another one": lambda apply: weak(
        apply, a3=lambda target: torch.where(torch.arange(len(target)) % 100 == 1, 7, target)
    ),
    "the bias is left out": lambda apply: weak(apply, a2=lambda bias: 0.0 * bias),
    "the last row is left out": lambda apply: weak(
        apply, a3=lambda target: torch.where(torch.arange(len(target)) == len(target) - 1, -100, target)
    ),
}


@pytest.mark.parametrize("mutation", list(MUTATIONS))
@pytest.mark.parametrize("name", ["autocast", "float16 and a scale", "inside the model"])
def test_real_errors_are_found_beside_the_rounding(mutation: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, loss = STEPS[name]
    model = kind()
    changed = MUTATIONS[mutation](kernels.ChunkedCrossEntropy.apply)
    monkeypatch.setattr(kernels.ChunkedCrossEntropy, "apply", changed)
    with pytest.raises(RewriteError, match=r"(of its length away then|is inf).*The step computes in .*float16"):
        chunked_loss(model, step=step_of(model, loss), chunk_nbytes=64 * CLASSES * 4)
    assert "forward" not in vars(model.lm_head)


def test_a_step_in_float32_is_held_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Words()
    off = weak(kernels.ChunkedCrossEntropy.apply, a0=lambda x: Scaled.apply(x, 1.001))
    monkeypatch.setattr(kernels.ChunkedCrossEntropy, "apply", off)
    with pytest.raises(RewriteError, match=r"where 0\.00035 is allowed.*sums\. Do without the rewrite, and report"):
        chunked_loss(model, step=step_of(model, entropy))


def test_a_tolerance_is_no_error_of_backstash() -> None:
    model = Words()
    with pytest.raises(RewriteError, match=r"1e-12 is allowed for another order of sums\. Allow more by") as caught:
        chunked_loss(model, step=step_of(model, entropy), tolerance=1e-12)
    assert "report" not in str(caught.value)


def images(model: nn.Module, dtype: torch.dtype | None) -> Callable[[], Tensor]:
    torch.manual_seed(1)
    batch = torch.randn(8, 4, 16, 16)

    def loss(net: nn.Module) -> Tensor:
        return net(batch).float().square().mean()

    return step_of(model, loss if dtype is None else under_autocast(loss, dtype))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_channels_last_under_autocast(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    with channels_last(model, images(model, dtype)) as rewrite:
        assert len(rewrite.changed) == 2 and rewrite.steps == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_reads_memory_in_order_is_refused_under_autocast(dtype: torch.dtype) -> None:
    def in_memory_order(net: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = net.get_submodule("first")(x)
        return torch.as_strided(y, (y.shape[0], y[0].numel()), (y[0].numel(), 1)).cumsum(1)

    model = Net(in_memory_order, first=conv())
    with pytest.raises(RewriteError, match=r"computes in .*float16.*Prove it on a step in float32.*order of NCHW"):
        channels_last(model, images(model, dtype))
    assert model.get_parameter("first.weight").is_contiguous()


def seen(function: Callable[[], object]) -> torch.dtype | None:
    engine = backward_engine()
    dtypes = StepDtypes()
    with dtypes.noting():
        function()
    assert backward_engine() is engine
    return dtypes.coarsest


def test_the_coarsest_dtype_of_a_step() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def reentrant() -> None:
        with torch.autocast("cpu", torch.float16):
            inside = checkpoint(lambda y: layer(y).float(), x.clone().requires_grad_(), use_reentrant=True)
        inside.sum().backward()

    assert seen(lambda: layer(x).sum().backward()) is torch.float32
    assert seen(lambda: layer(x).double().sum().backward()) is torch.float32
    assert seen(lambda: layer(x.bfloat16().float()).sum().backward()) is torch.float32
    assert seen(lambda: layer(x).half().float().sum().backward()) is torch.float16
    assert seen(lambda: torch.autograd.grad(layer(x).bfloat16().half().sum(), layer.weight)) is torch.bfloat16
    assert seen(reentrant) is torch.float16
    assert seen(lambda: None) is None


def test_a_compiled_graph_computes_in_the_dtype_of_autocast() -> None:
    model = Words()
    whole = torch.compile(lambda ids: F.cross_entropy(model(ids), ids), backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        whole(IDS).backward()  # compiling it looks at its graph, of which a later step shows the loss alone
    found = []
    for is_noted in (False, True):
        dtypes = StepDtypes()
        with dtypes.noting():
            with torch.autocast("cpu", torch.bfloat16):
                if is_noted:
                    dtypes.note_autocast("cpu")
                whole(IDS).backward()
        found.append(dtypes.coarsest)
    assert found == [torch.float32, torch.bfloat16]


def test_a_compiled_step_under_autocast_is_proven() -> None:
    model = nn.Sequential(conv(), nn.ReLU(), conv(), nn.Flatten(), nn.Linear(4 * 16 * 16, 3))
    model.compile(backend="aot_eager")
    step = images(model, torch.bfloat16)
    step()
    with channels_last(model, step) as rewrite:
        assert len(rewrite.changed) == 2


def numbers(scale: float = 1.0, loss: float = 1.0, noise: float = 0.0) -> StepNumbers:
    torch.manual_seed(0)
    gradients = {f"the gradient of {name}": scale * torch.randn(1000) for name in "abc"}
    return {"what the step returns": torch.tensor(loss)} | {
        name: x * (1.0 + noise * torch.randn(1000)) for name, x in gradients.items()
    }


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (numbers(), None),
        (numbers(noise=0.01), None),
        (numbers(noise=0.05), "the vector of all gradients"),
        (numbers(noise=0.2), "the gradient of "),
        (numbers(scale=1.04), "the vector of all gradients"),
        (numbers(loss=1.01), None),
        (numbers(loss=1.02), "what the step returns"),
        (numbers() | {"the gradient of b": None}, "the gradient of b"),
        (numbers() | {"the gradient of b": torch.full((1000,), torch.nan)}, "the gradient of b"),
    ],
)
def test_what_another_order_does_not_explain(other: StepNumbers, where: str | None) -> None:
    beyond = beyond_another_order(numbers(), other, torch.bfloat16)
    assert beyond is None if where is None else beyond is not None and beyond.where.startswith(where)
    strict = beyond_another_order(numbers(), other, torch.float32)
    assert (strict is None) == (first_difference(numbers(), other) is None)
