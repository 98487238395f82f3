"""The head and the loss of a language model in chunks: equal numbers, changes that it follows, and undoing."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from backstash import Session
from backstash.errors import RewriteError
from backstash.report.meter import CountedPeak
from backstash.rewrites import LogitRows, chunked_loss, chunked_rows
from backstash.rewrites.cross_entropy import ChunkedCrossEntropy


class Words(nn.Module):
    """A tiny language model whose head may share the embedding's weight."""

    def __init__(self, words: int = 101, width: int = 16, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, width)
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.lm_head = nn.Linear(width, words, bias=bias)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.body(self.embedding(words)))  # type: ignore[no-any-return]


def words(shape: tuple[int, ...] = (3, 20), count: int = 101) -> Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, loss: Callable[[Tensor], Tensor], ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    value = loss(model(ids))
    value.backward()
    return [value.detach(), *[parameter.grad for parameter in model.parameters() if parameter.grad is not None]]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each loss that was computed in chunks."""
    seen: list[int] = []
    original = ChunkedCrossEntropy.apply

    def apply(hidden: Tensor, *rest: object) -> Tensor:
        seen.append(hidden.shape[0])
        return original(hidden, *rest)  # type: ignore[no-any-return]

    monkeypatch.setattr(ChunkedCrossEntropy, "apply", apply)
    return seen


IDS = words()
LABELS = torch.where(words() % 7 == 0, -100, words())

SHIFT = torch.linspace(-1, 1, 101).unsqueeze(0)

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda logits: F.cross_entropy(logits.view(-1, logits.size(-1)), LABELS.view(-1)),
    "reshaped": lambda logits: F.cross_entropy(logits.reshape(60, -1), LABELS.view(-1)),
    "flattened": lambda logits: F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()),
    "shifted": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.shape[-1]), LABELS[:, 1:].reshape(-1)
    ),
    "in float32": lambda logits: F.cross_entropy(logits.float().view((-1, 101)), LABELS.view(-1)),
    "to": lambda logits: F.cross_entropy(logits.to(torch.float32).view(-1, 101), LABELS.view(-1), reduction="mean"),
    "summed": lambda logits: F.cross_entropy(logits.view(-1, 101), LABELS.view(-1), reduction="sum") / 60,
    "module": lambda logits: nn.CrossEntropyLoss(ignore_index=3)(logits.view(-1, 101), IDS.view(-1)),
    "smoothed": lambda logits: F.cross_entropy(logits.view(-1, 101), LABELS.view(-1), label_smoothing=0.1),
    "spread": lambda logits: (
        F.cross_entropy(logits.view(-1, 101), IDS.view(-1), label_smoothing=1.0, reduction="sum") / 9
    ),
    "one sequence": lambda logits: F.cross_entropy(logits[1], IDS[1]),
    "scaled": lambda logits: F.cross_entropy((0.5 * logits * 3).view(-1, 101), LABELS.view(-1)),
    "divided": lambda logits: F.cross_entropy(torch.div(logits, 3).view(-1, 101), LABELS.view(-1), label_smoothing=0.1),
    "capped": lambda logits: F.cross_entropy(3.0 * torch.tanh(logits.float() / 3.0).view(-1, 101), LABELS.view(-1)),
    "capped at the end": lambda logits: F.cross_entropy(logits.view(-1, 101).mul(2).tanh(), LABELS.view(-1)),
    "of the first classes": lambda logits: F.cross_entropy(
        logits[..., :90].view(-1, 90), torch.where(LABELS < 90, LABELS, -100).view(-1)
    ),
    "moved": lambda logits: F.cross_entropy((logits + SHIFT.to(logits.dtype)).view(-1, 101), LABELS.view(-1)),
    "weighted": lambda logits: F.cross_entropy(
        logits.view(-1, 101), LABELS.view(-1), weight=SHIFT.squeeze(0).abs().to(logits.dtype), label_smoothing=0.2
    ),
    "each": lambda logits: F.cross_entropy(logits.view(-1, 101), LABELS.view(-1), reduction="none").mean(),
    "each, weighted": lambda logits: (
        F.cross_entropy(
            logits.view(-1, 101),
            LABELS.view(-1),
            weight=SHIFT.squeeze(0).abs().to(logits.dtype),
            label_smoothing=0.2,
            reduction="none",
        )
        * torch.linspace(0, 1, 60)
    ).mean(),
    "classes second": lambda logits: F.cross_entropy(logits.transpose(1, 2), LABELS),
    "classes second, each": lambda logits: F.cross_entropy(
        (2.0 * logits.permute(0, 2, 1)).contiguous(), IDS, reduction="none"
    )[0].sum(),
    "by names": lambda logits: F.cross_entropy(
        input=logits.contiguous(memory_format=torch.contiguous_format).transpose(dim0=1, dim1=-1), target=LABELS
    ),
    "where a mask is": lambda logits: F.cross_entropy(logits[LABELS != -100], LABELS[LABELS != -100]),
    "of some sequences": lambda logits: F.cross_entropy(
        logits[torch.tensor([2, 0])].to(dtype=logits.dtype).flatten(0, 1), LABELS[[2, 0]].flatten()
    ),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "capped with the classes second": lambda logits: (logits.permute(0, 2, 1) + SHIFT.view(-1, 1)).square().mean(),
    "by taking rows of classes": lambda logits: logits[IDS[:, 0] % 3, IDS[:, 1] % 20, IDS[:, 2]].square().mean(),
    "some classes": lambda logits: logits[..., :50].square().sum(),
    "by hand": lambda logits: -logits.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).mean(),
    "in numbers": lambda logits: (2 * logits + 1).mean() + logits.view(-1)[3],
    "scaled by a tensor": lambda logits: (logits * SHIFT).sum() + (logits + logits).square().mean(),
    "another operator": lambda logits: (1.0 / (logits + 10.0)).sum() + torch.add(logits, SHIFT, alpha=2).tanh().sum(),
    "more by names": lambda logits: (
        logits.add(SHIFT, alpha=2).square().mean() + logits.permute(dims=(2, 0, 1)).square().sum()
    ),
    "flattened whole": lambda logits: logits.flatten().square().mean(),
    "probabilities": lambda logits: F.cross_entropy(logits.view(-1, 101), torch.full((60, 101), 1 / 101)),
}


@pytest.mark.parametrize("chunk_nbytes", [1, 404 * 7, 1 << 20])
@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"bias": True}])
@pytest.mark.parametrize("name", LOSSES)
def test_the_same_sum(name: str, kind: dict[str, bool], chunk_nbytes: int) -> None:
    model = Words(**kind).double()
    model_in_float = Words(**kind)
    for one, close in ((model, 1e-13 if name not in ("in float32", "to", "capped") else 1e-6), (model_in_float, 1e-5)):
        expected = step(one, LOSSES[name], IDS)
        with chunked_loss(one, chunk_nbytes=chunk_nbytes) as rewrite:
            got = step(one, LOSSES[name], IDS)
        assert (rewrite.losses, rewrite.whole) == (1, ())
        for a, b in zip(expected, got, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(b, a, rtol=close, atol=close)


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_gets_the_logits(name: str, chunks: list[int]) -> None:
    model = Words()
    expected = step(model, OTHERS[name], IDS)
    with chunked_loss(model):
        got = step(model, OTHERS[name], IDS)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not chunks


def test_logits_can_be_looked_at() -> None:
    model = Words()
    with chunked_loss(model):
        logits = model(IDS)
        assert logits.shape == (3, 20, 101)
        assert logits.dtype is torch.float32
        loss = F.cross_entropy(logits.view(-1, 101), IDS.view(-1))
        best = logits.argmax(-1)
        assert torch.equal(logits[0, 0].detach(), logits.detach()[0, 0])
        assert "grad_fn" in repr(logits)
        loss.backward()
        with torch.no_grad():
            assert type(model(IDS)) is Tensor
    assert torch.equal(best, model(IDS).argmax(-1))


def test_autocast() -> None:
    model = Words()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, LOSSES["in float32"], IDS)
        with chunked_loss(model):
            got = step(model, LOSSES["in float32"], IDS)
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-3)


def test_everything_ignored_is_nan_as_ever() -> None:
    model = Words()
    none = torch.full((60,), -100)
    with chunked_loss(model):
        loss = F.cross_entropy(model(IDS).view(-1, 101), none)
    assert loss.isnan() and F.cross_entropy(model(IDS).view(-1, 101), none).isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_zeros_where_no_row_counts(reduction: str) -> None:
    """So a batch of padding does not spoil the gradients of others with which it is added up."""
    model = Words(bias=True)
    with chunked_loss(model) as rewrite:
        found = step(
            model,
            lambda logits: F.cross_entropy(
                logits.view(-1, 101), torch.full((60,), -100), reduction=reduction, label_smoothing=0.1
            ).sum(),
            IDS,
        )
    assert rewrite.losses == 1 and len(found) == 1 + len(list(model.parameters()))
    assert all(torch.equal(x, torch.zeros_like(x)) for x in found[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_scale_is_not_known_when_gradients_are_computed(reduction: str, dtype: torch.dtype) -> None:
    """A GradScaler multiplies a loss, which is float32 under autocast, by 65,536."""
    model, ids = Words(words=400, width=8), words((4, 50), 400)
    scale = 65536.0 if reduction == "mean" else 64.0

    def loss(logits: Tensor) -> Tensor:
        found = F.cross_entropy(logits.view(-1, 400), ids.view(-1), reduction=reduction)
        assert found.dtype is torch.float32
        return (found.mean() if reduction == "none" else found) * scale

    exact = step(model, loss, ids)
    with torch.autocast("cpu", dtype):
        plain = step(model, loss, ids)
        with chunked_loss(model, chunk_nbytes=400 * 4 * 30):
            found = step(model, loss, ids)
    for a, b, c in zip(exact, plain, found, strict=True):
        assert (c - a).norm() <= max(2.0 * (b - a).norm().item(), 1e-3 * a.norm().item())


def test_a_sum_over_rows_that_float16_cannot_hold() -> None:
    head, hidden = nn.Linear(4, 3), torch.full((3000, 4), 60.0)
    expected = torch.autograd.grad(F.cross_entropy(head(hidden), torch.zeros(3000, dtype=torch.int64)), head.weight)
    with torch.autocast("cpu", torch.float16), chunked_loss(head, ""):
        loss = F.cross_entropy(head(hidden), torch.zeros(3000, dtype=torch.int64))
    torch.testing.assert_close(torch.autograd.grad(loss, head.weight), expected, rtol=2e-2, atol=1e-2)


def test_a_copy_has_a_head_of_its_own() -> None:
    model = Words()
    expected = step(model, LOSSES["flat"], IDS)
    with chunked_loss(model) as rewrite:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with torch.no_grad():
            model.lm_head.weight.zero_()
    assert rewrite.losses == 0
    for other in copies:
        for a, b in zip(step(other, LOSSES["flat"], IDS), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_logits_of_logits_that_have_changed_since_are_refused() -> None:
    model = Words()
    with chunked_loss(model):
        logits = model(IDS)
        flat = logits.view(-1, 101)
        logits.div_(2.0)  # which flat would see
        for read in (torch.argmax, lambda x: F.cross_entropy(x, IDS.view(-1)), lambda x: chunked_rows(x)):
            with pytest.raises(RewriteError, match="those that they were made from were changed in place since"):
                read(flat)
        changed = F.cross_entropy(logits.view(-1, 101), IDS.view(-1))
    assert torch.equal(changed, F.cross_entropy(model(IDS).div_(2.0).view(-1, 101), IDS.view(-1)))


def test_logits_that_were_computed_without_gradients_have_none() -> None:
    model = Words()
    with chunked_loss(model, evaluation=True) as rewrite:
        with torch.no_grad():
            logits = model(IDS)
        for each in (logits, model(IDS).detach()):
            for reduction in ("mean", "none"):
                assert not F.cross_entropy(each.view(-1, 101), IDS.view(-1), reduction=reduction).requires_grad
            assert not chunked_rows(each).normaliser.requires_grad
        assert F.cross_entropy(model(IDS).clone().view(-1, 101), IDS.view(-1)).requires_grad
    assert not rewrite.whole


def test_without_gradients_none_are_computed() -> None:
    model = Words()
    with chunked_loss(model, evaluation=True):
        for with_grad in (False, True):
            with torch.set_grad_enabled(with_grad), Results() as results:
                LOSSES["flat"](model(IDS))
            assert (torch.ops.aten.addmm_.default in results.functions) == with_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gradients_are_refused(reduction: str) -> None:
    model = Words()
    with chunked_loss(model):
        loss = F.cross_entropy(model(IDS).view(-1, 101), IDS.view(-1), reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="with create_graph=True, but their gradients have no gradients"):
            torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("with_loss", [False, True])
def test_in_a_checkpoint(with_loss: bool, use_reentrant: bool, evaluation: bool) -> None:
    model, start = Words(), torch.zeros(16, requires_grad=True)

    def logits(start: Tensor) -> Tensor:
        return model.lm_head(model.body(model.embedding(IDS) + start))  # type: ignore[no-any-return]

    def run() -> list[Tensor]:
        model.zero_grad()
        if with_loss:
            loss = checkpoint(lambda start: LOSSES["flat"](logits(start)), start, use_reentrant=use_reentrant)
        else:
            loss = LOSSES["flat"](checkpoint(logits, start, use_reentrant=use_reentrant))
        loss.backward()
        return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    expected = run()
    with chunked_loss(model, evaluation=evaluation):
        found = run()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


class WithLoss(nn.Module):
    """A model that returns its loss and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.words(words)
        return LOSSES["flat"](logits), logits


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_under_data_parallelism(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # to put back: torch replaces it for good
    model = WithLoss()
    expected = step(model.words, LOSSES["flat"], IDS)[1:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with chunked_loss(model, "words.lm_head") as rewrite:
            parallel = DistributedDataParallel(model, **options)
            for _ in range(2):
                model.zero_grad()
                parallel(IDS)[0].backward()
        # Gloo's thread takes the GIL to free what it has done, and who ends the group waits for it with the GIL.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert rewrite.losses == 2 and bool(rewrite.whole) == bool(options)  # which ask for the logits' grad_fn
    for a, b in zip([x.grad for x in model.parameters()], expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("inside", [False, True], ids=["model", "step"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_between_compiled_graphs(inside: bool) -> None:
    model = Words(bias=True)

    def run(compiled: Callable[..., Any]) -> list[Tensor]:
        model.zero_grad()
        loss = compiled(lambda: LOSSES["scaled"](model(IDS)))() if inside else LOSSES["scaled"](compiled(model)(IDS))
        loss.backward()
        return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    expected = run(lambda function: function)
    torch._dynamo.reset()
    with chunked_loss(model) as rewrite:
        found = run(lambda function: torch.compile(function, backend="aot_eager"))
    torch._dynamo.reset()
    assert (rewrite.losses, rewrite.whole) == (1, ())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_only_the_bias_trains() -> None:
    model = Words(bias=True).requires_grad_(False)
    assert model.lm_head.bias is not None
    model.lm_head.bias.requires_grad_()
    expected = step(model, LOSSES["flat"], IDS)
    with chunked_loss(model) as rewrite:
        found = step(model, LOSSES["flat"], IDS)
    assert rewrite.losses == 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


class Results(TorchDispatchMode):
    """Notes all functions and the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()
        self.functions: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.functions.add(func)
        self.shapes |= {x.shape for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


@pytest.mark.parametrize("name", ["mean", "none", "rows", "plain"])
def test_a_step_of_ten_billion_logits_never_has_them(name: str) -> None:
    """In shapes alone, for 65,536 tokens and 152,064 words, which a plain step in bfloat16 holds in 20 GB."""
    tokens, width, classes, chunk_nbytes = 65536, 3584, 152064, 1 << 31
    with torch.device("meta"):
        head = nn.Linear(width, classes, bias=False, dtype=torch.bfloat16)
        hidden = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        target = torch.empty(tokens, dtype=torch.int64)
    rewritten = nullcontext() if name == "plain" else chunked_loss(head, "", chunk_nbytes=chunk_nbytes)
    with Results() as results, rewritten:
        logits = (30.0 * torch.tanh(head(hidden) / 30.0)).view(-1, classes)
        if name == "rows":
            rows = chunked_rows(logits, target=target, chunk_nbytes=chunk_nbytes)
            loss = (rows.entropy - log_probs_of(rows)).mean()
        else:
            loss = F.cross_entropy(logits, target, reduction="none" if name == "none" else "mean").mean()
        loss.backward()
    assert hidden.grad is not None and head.weight.grad is not None
    largest = max(shape.numel() for shape in results.shapes)
    weight = width * classes
    if name == "plain":
        assert largest == tokens * classes > 18 * weight
    else:
        assert largest <= max(weight, chunk_nbytes // 2)


@pytest.mark.parametrize("autocasts", [False, True])
def test_in_fake_tensors(autocasts: bool) -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        model, target = Words(), torch.zeros(60, dtype=torch.int64)
        with chunked_loss(model) as rewrite:
            for reduction in ("mean", "none"):
                F.cross_entropy(model(words()).view(-1, 101), target, reduction=reduction).sum().backward()
            chunked_rows(model(words()).view(-1, 101), target=target).entropy.sum().backward()
    assert rewrite.losses == 2 and not rewrite.whole and model.lm_head.weight.grad is not None


def log_probs_of(rows: LogitRows) -> Tensor:
    assert rows.log_probs is not None
    return rows.log_probs


def test_a_target_that_is_no_class() -> None:
    model = Words()
    with chunked_loss(model), pytest.raises(IndexError, match="Target 101 is out of bounds"):
        F.cross_entropy(model(IDS).view(-1, 101), torch.full((60,), 101))


def test_a_second_backward_is_refused() -> None:
    model = Words()
    with chunked_loss(model):
        loss = LOSSES["flat"](model(IDS))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second time, but its gradients were computed in the forward pass"):
            loss.backward()


def test_a_frozen_head() -> None:
    model = Words()
    model.lm_head.weight.requires_grad_(False)
    expected = step(model, LOSSES["flat"], IDS)
    with chunked_loss(model):
        got = step(model, LOSSES["flat"], IDS)
    assert len(expected) == len(got)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a)


def test_whoever_looks_without_gradients_does_not_take_them_away() -> None:
    model = Words()
    expected = step(model, LOSSES["flat"], IDS)
    with chunked_loss(model):
        model.zero_grad()
        logits = model(IDS)
        with torch.no_grad():
            logits.argmax(-1)
        LOSSES["flat"](logits).backward()
    for a, b in zip(expected[1:], [p.grad for p in model.parameters() if p.grad is not None], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("read", [lambda logits: logits.argmax(-1), LOSSES["flat"], chunked_rows])
def test_logits_of_weights_that_have_changed_since_are_refused(read: Callable[[Tensor], object]) -> None:
    model = Words()
    with chunked_loss(model):
        logits = model(IDS)
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        with pytest.raises(RewriteError, match="were changed in place since the head was called"):
            read(logits)


def test_an_evaluation_has_no_logits_either() -> None:
    model = Words(words=2000)
    ids = words((8, 64), 2000)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).view(-1, 2000), ids.view(-1))
        with chunked_loss(model, evaluation=True, chunk_nbytes=1 << 18) as rewrite, CountedPeak() as counter:
            loss = F.cross_entropy(model(ids).view(-1, 2000), ids.view(-1))
            best = model(ids[:1, :2]).argmax(-1)
    torch.testing.assert_close(loss, expected)
    assert counter.peak_nbytes < 8 * 64 * 2000 * 4 and not loss.requires_grad
    assert (rewrite.losses, rewrite.whole) == (1, ("argmax",)) and best.shape == (1, 2)


def test_hundreds_of_parts_of_a_gradient_in_bfloat16_lose_nothing() -> None:
    model = Words(words=33, width=8).bfloat16()
    ids = words((1, 1500), 33)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, 33), ids.view(-1), reduction="sum")

    exact = Words(words=33, width=8).double()
    exact.load_state_dict(model.state_dict())
    expected, plain = (step(each, loss, ids)[-1].double() for each in (exact, model))
    with chunked_loss(model, chunk_nbytes=1):
        found = step(model, loss, ids)[-1].double()
    assert (found - expected).norm() <= 1.05 * (plain - expected).norm() < 0.01 * expected.norm()


def test_a_step_proves_it() -> None:
    model = Words(tied=True)
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def once() -> Tensor:
        loss = LOSSES["capped"](model(IDS))
        loss.backward()
        return loss.detach()

    with chunked_loss(model, step=once) as rewrite:
        assert rewrite.losses == 1 and 0.0 < rewrite.distance < 1e-5 and "gradient" in rewrite.where
        assert str(rewrite).startswith(
            "the logits of 'lm_head' in chunks, sums in another order; the numbers of a step"
        )
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_would_gain_nothing_is_refused() -> None:
    model = Words()
    with pytest.raises(RewriteError, match=r"no loss of 'lm_head' was computed in chunks: square reads all logits"):
        chunked_loss(model, step=lambda: model(IDS).square().mean().backward())
    with pytest.raises(RewriteError, match=r"is \d\S* of its length away then, where 1e-12 is allowed"):
        chunked_loss(model, step=lambda: LOSSES["flat"](model(IDS)).backward(), tolerance=1e-12)
    with pytest.raises(RewriteError, match="tolerance=-1, but it is the largest relative distance"):
        chunked_loss(model, step=lambda: None, tolerance=-1)
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("LlamaForCausalLM", {}),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 4}),
        ("Gemma2ForCausalLM", {"head_dim": 8, "final_logit_softcapping": 2.0}),
        ("CohereForCausalLM", {"logit_scale": 0.25}),
        ("GraniteForCausalLM", {"logits_scaling": 4.0}),
        ("GPTNeoXForCausalLM", {}),
        (
            "T5ForConditionalGeneration",
            {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0},
        ),
        ("BartForConditionalGeneration", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}),
        ("BertForMaskedLM", {}),
        ("EsmForMaskedLM", {"mask_token_id": 1}),
        ("MambaForCausalLM", {"state_size": 4}),
    ],
)
def test_heads_of_transformers_families(name: str, more: dict[str, float]) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 97, "pad_token_id": 0}
    if name not in ("T5ForConditionalGeneration", "BartForConditionalGeneration", "GPT2LMHeadModel"):
        sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, **more)).double().eval()
    if "final_logits_bias" in dict(model.named_buffers()):
        model.final_logits_bias.uniform_(-1.0, 1.0)
    ids = torch.randint(3, 97, (2, 9))
    labels = ids.masked_fill(ids % 5 == 0, -100)

    def once() -> Tensor:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    with chunked_loss(model, step=once, chunk_nbytes=97 * 8 * 3) as rewrite:
        assert rewrite.losses == 1 and not rewrite.whole and rewrite.distance < 1e-6


def test_under_a_session_and_undone() -> None:
    model = Words()
    expected = step(model, LOSSES["flat"], IDS)
    rewrite = chunked_loss(model)
    with Session(min_nbytes=0):
        for a, b in zip(expected, step(model, LOSSES["flat"], IDS), strict=True):
            torch.testing.assert_close(b, a)
    rewrite.undo()
    rewrite.undo()
    assert "forward" not in vars(model.lm_head)
    assert all(torch.equal(a, b) for a, b in zip(expected, step(model, LOSSES["flat"], IDS), strict=True))


def test_the_logits_are_never_there() -> None:
    model = Words(words=2000)
    ids = words((8, 64), 2000)

    def once() -> None:
        F.cross_entropy(model(ids).view(-1, 2000), ids.view(-1)).backward()

    once()
    with CountedPeak() as plain:
        once()
    with chunked_loss(model, chunk_nbytes=1 << 18):
        once()
        with CountedPeak() as chunked:
            once()
    logits = 8 * 64 * 2000 * 4
    assert plain.peak_nbytes > 2 * logits
    assert chunked.peak_nbytes < logits


def test_what_is_refused() -> None:
    model = Words()
    with pytest.raises(RewriteError, match=r"the head 'head' of Words, .*linear layers end with body.1, lm_head"):
        chunked_loss(model, "head")
    with pytest.raises(RewriteError, match="that is a GELU with a forward of its own"):
        chunked_loss(model, "body.2")
    with pytest.raises(RewriteError, match="chunks of 0 bytes"):
        chunked_loss(model, chunk_nbytes=0)
    with chunked_loss(model), pytest.raises(RewriteError, match="a forward of its own"):
        chunked_loss(model)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("where", ["head", "model", "everywhere", "elsewhere"])
def test_backward_hooks_see_whole_logits(where: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    words, seen = torch.arange(12), list[Any]()
    if where == "everywhere":
        register = getattr(nn.modules.module, kind.replace("register_", "register_module_"))
    else:
        register = getattr({"head": model[1], "model": model, "elsewhere": nn.Linear(8, 20)}[where], kind)
    handle = register(lambda module, *gradients: seen.append(type(module)))
    try:
        F.cross_entropy(model(words), words).backward()
        expected = [parameter.grad for parameter in model.parameters()]
        called = list(seen)
        model.zero_grad()
        with chunked_loss(model, "1") as rewrite:
            F.cross_entropy(model(words), words).backward()
    finally:
        handle.remove()
    assert seen == called * 2
    if where == "elsewhere":
        assert rewrite.losses == 1
    else:
        assert rewrite.losses == 0 and rewrite.whole == ("a backward hook of a module",)
        assert all(
            torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected, strict=True)
        )
