"""Random heads and losses in chunks of rows: the numbers of plain PyTorch in float64, and never all logits.

Each case draws a head, a loss, dtypes, shapes and what happens around them. The loss and all gradients are compared
with those of the same program in float64 that computes all logits. Their relative error stays below ``BOUNDS``, or
below three times the error that plain PyTorch has in the dtypes of the case.

``python -m tests.test_chunked_fuzz --seconds 300 --first 1000`` runs other cases for as long as it is told to.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from backstash import Session
from backstash.rewrites import LogitRows, chunked_loss, chunked_rows
from tests.drawn_cases import run_for_a_while

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}
"""Largest relative error of a loss and of a gradient, by the coarsest dtype of a case."""

DEFAULT_CASES = 120
"""How many cases the tests run, and how many a group has."""
GROUP = 15

FAMILIES = {
    "plain": lambda net, x: x,
    "bias": lambda net, x: x,
    "tied": lambda net, x: x,
    "transformed": lambda net, x: x,
    "masked": lambda net, x: x,
    "capped": lambda net, x: torch.tanh(x / 2.0) * 2.0,
    "times": lambda net, x: 0.5 * x,
    "over": lambda net, x: x / 3.0,
    "moved": lambda net, x: x + net.shift,
    "converted": lambda net, x: x if x.dtype is torch.float64 else x.float(),
    "sliced": lambda net, x: x[..., : net.usable],
}
"""What models do to the result of their head."""

PRECISIONS = (
    *((torch.float64, None),) * 2,
    *((torch.float32, None),) * 2,
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
)
"""The dtype of parameters, and that of autocast or None."""

LOSSES = ("entropy", "entropy", "entropy", "grpo", "dpo", "orpo", "z-loss", "uncertainty", "forward", "reverse")
AROUND = ("", "", "", "checkpoint", "session", "twice", "accumulated", "copied", "pickled", "without gradients")


@dataclass(frozen=True)
class Case:
    """A program that computes a loss of a head's logits.

    Attributes:
        seed: of the numbers.
        dtype: of the parameters.
        autocast: the dtype of autocast, or None.
        family: what the model does to its logits.
        loss: the loss, where "entropy" is ``cross_entropy``.
        around: what happens around the loss.
        shape: of the words.
        width: of the head's input.
        classes: how many.
        rows: how many rows of logits may exist at a time.
        frozen: "head", "body", "weight" or "".
        strided: whether the head's input is not contiguous.
        takes_head: whether ``chunked_rows`` is given the head, and not what the model returns.
        layout: how ``cross_entropy`` is given the logits: "flat" or "second" for classes in the second dimension.
        ignored: the share of ignored targets.
        ignore_index: the ignored target.
        smoothing: of labels.
        weighted: whether classes have weights.
        reduction: of the cross entropy.
        temperature: of the other losses.
    """

    seed: int
    dtype: torch.dtype
    autocast: torch.dtype | None
    family: str
    loss: str
    around: str
    shape: tuple[int, ...]
    width: int
    classes: int
    rows: int
    frozen: str
    strided: bool
    takes_head: bool
    layout: str
    ignored: float
    ignore_index: int
    smoothing: float
    weighted: bool
    reduction: str
    temperature: float

    @classmethod
    def draw(cls, seed: int) -> Case:
        """Returns the case of a seed."""
        draw = random.Random(seed)
        dtype, autocast = draw.choice(PRECISIONS)
        family, loss = draw.choice(list(FAMILIES)), draw.choice(LOSSES)
        shape = draw.choice([(4, 7), (2, 11), (6, 5), (24,), (1, 9), (2, 1), (1,), (0,), (2, 0)])
        count = math.prod(shape)
        flat = len(shape) == 1 or draw.random() < 0.6
        return cls(
            seed=seed,
            dtype=dtype,
            autocast=autocast,
            family=family,
            loss=loss,
            around=draw.choice(AROUND),
            shape=shape,
            width=draw.choice([1, 3, 8]),
            classes=draw.choice([9, 20, 41]),
            rows=draw.choice([1, 3, max(1, count - 1), count + 1]),
            frozen=draw.choice(["", "", "", "head", "body", "weight"]),
            strided=draw.random() < 0.3,
            takes_head=draw.random() < 0.4 and family in ("plain", "bias", "tied", "transformed", "masked"),
            layout="flat" if flat else "second",
            ignored=draw.choice([0.0, 0.3, 0.3, 1.0]),
            ignore_index=draw.choice([-100, -100, 0, 3]),
            smoothing=draw.choice([0.0, 0.0, 0.1, 1.0]) if family != "masked" else 0.0,
            weighted=draw.random() < 0.3,
            reduction=draw.choice(["mean", "mean", "sum", "none"]),
            temperature=draw.choice([1.0, 0.7, 2.0]),
        )

    @property
    def coarsest(self) -> torch.dtype:
        """The coarsest dtype."""
        return self.autocast or self.dtype

    @property
    def splits(self) -> bool:
        """Whether all logits are larger than everything else that exists under the rewrite."""
        count = math.prod(self.shape)
        return 2 * self.rows <= count > 2 and 2 * self.width < min(count, self.classes - 2)


class Net(nn.Module):
    """A language model of a case."""

    shift: Tensor

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.usable = case.classes - 2 if case.family in ("sliced", "masked") else case.classes
        has_bias = case.family in ("bias", "transformed", "masked")
        self.embedding = nn.Embedding(case.classes, case.width)
        self.body = nn.Linear(case.width, case.width)
        self.norm = nn.LayerNorm(case.width) if case.family == "transformed" else nn.Identity()
        self.head = nn.Linear(case.width, case.classes, bias=has_bias)
        if case.family == "tied":
            self.head.weight = self.embedding.weight
        if case.family == "masked":
            with torch.no_grad():
                self.head.bias[self.usable :] = -torch.inf
        self.register_buffer("shift", torch.randn(case.classes))
        for part in {"head": [self.head], "body": [self.embedding, self.body]}.get(case.frozen, []):
            part.requires_grad_(False)
        if case.frozen == "weight":
            self.head.weight.requires_grad_(False)

    def hidden(self, words: Tensor) -> Tensor:
        """Returns the head's input."""
        x = self.norm(F.gelu(self.body(self.embedding(words))))
        if not self.case.strided:
            return x  # type: ignore[no-any-return]
        return torch.stack([x, x + 1.0], dim=-1)[..., 0]

    def forward(self, words: Tensor) -> Tensor:
        return FAMILIES[self.case.family](self, self.head(self.hidden(words)))  # type: ignore[no-any-return]


def products(weights: Tensor, numbers: Tensor) -> Tensor:
    """Returns the sum over classes, where a class that cannot be counts as nothing."""
    return torch.where(weights == 0, 0.0, weights * torch.where(weights == 0, 0.0, numbers)).sum(-1)


def plain_rows(case: Case, logits: Tensor, target: Tensor, teacher: Tensor) -> LogitRows:
    """Returns what losses read of the rows of all logits."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    teacher = teacher.detach().to(logits.dtype)
    logs, others = ((x / case.temperature).log_softmax(-1) for x in (logits, teacher))
    kept = target != case.ignore_index
    log_probs = logs.gather(-1, torch.where(kept, target, 0).unsqueeze(-1)).squeeze(-1) * kept
    normaliser = (logits / case.temperature).logsumexp(-1)
    away, back = products(others.exp(), others - logs), products(logs.exp(), logs - others)
    return LogitRows(log_probs, normaliser, -products(logs.exp(), logs), away, back)


def loss_of_rows(case: Case, rows: LogitRows) -> Tensor:
    assert rows.log_probs is not None and rows.from_teacher is not None and rows.to_teacher is not None
    logs = rows.log_probs
    count = max(1, logs.numel())
    if case.loss == "grpo":
        advantages = torch.linspace(-1, 1, logs.numel(), dtype=logs.dtype).view(logs.shape)
        ratio = (logs - logs.detach() + 0.3 * advantages).exp()
        bounded = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
        return -(bounded + 0.01 * rows.entropy).sum() / count
    if case.loss == "dpo":
        sums = logs.sum(-1) if logs.dim() > 1 else logs
        return -F.logsigmoid(0.1 * (sums[: len(sums) // 2].sum() - sums[len(sums) // 2 :].sum()))
    if case.loss == "orpo":
        means = logs.sum() / count - 0.1
        return -means - F.logsigmoid(means - torch.log1p(-means.exp()))
    return {
        "z-loss": -logs.sum() / count + 0.1 * rows.normaliser.square().sum() / count,
        "uncertainty": (rows.entropy * rows.normaliser).sum() / count,
        "forward": case.temperature**2 * rows.from_teacher.sum() / count,
        "reverse": case.temperature**2 * rows.to_teacher.sum() / count,
    }[case.loss]


@dataclass(frozen=True)
class Data:
    """What the program reads.

    Attributes:
        words, target: [...].
        weight: of the classes.
        each: a factor for each row.
    """

    words: Tensor
    target: Tensor
    weight: Tensor
    each: Tensor


def loss_of(case: Case, net: Net, teacher: Net, data: Data, in_chunks: bool) -> Tensor:
    """Returns the loss of a step."""
    if case.loss == "entropy":
        logits = net(data.words)
        weight = data.weight[: logits.shape[-1]].to(logits.dtype) if case.weighted else None
        options: dict[str, Any] = {
            "ignore_index": case.ignore_index,
            "label_smoothing": case.smoothing,
            "reduction": case.reduction,
            "weight": weight,
        }
        target = data.target
        if case.layout == "flat":
            found = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.flatten(), **options)
        else:
            found = F.cross_entropy(logits.transpose(1, 2), target, **options)
        return (found.flatten() * data.each.to(found.dtype)).sum() if case.reduction == "none" else found
    if not in_chunks:
        return loss_of_rows(case, plain_rows(case, net(data.words), data.target, teacher(data.words)))
    options = {"temperature": case.temperature, "ignore_index": case.ignore_index}
    options["chunk_nbytes"] = case.rows * net.usable * (8 if case.dtype is torch.float64 else 4)
    if case.takes_head:
        pair = teacher.hidden(data.words), teacher.head
        return loss_of_rows(case, chunked_rows(net.hidden(data.words), net.head, data.target, teacher=pair, **options))
    return loss_of_rows(case, chunked_rows(net(data.words), None, data.target, teacher=teacher(data.words), **options))


class Sizes(TorchDispatchMode):
    """Notes the number of elements of the largest result that holds floats."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        floats = (x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point())
        self.largest = max([self.largest, *(x.numel() for x in floats)])
        return result


@contextmanager
def rewritten(net: Net, in_chunks: bool) -> Iterator[Net]:
    """Has the head return logits that are never whole."""
    case = net.case
    nbytes = case.rows * net.usable * (8 if case.dtype is torch.float64 else 4)
    with chunked_loss(net, "head", chunk_nbytes=nbytes, evaluation=True) if in_chunks else nullcontext():
        if in_chunks and case.around == "copied":
            yield copy.deepcopy(net)
        elif in_chunks and case.around == "pickled":
            yield pickle.loads(pickle.dumps(net))
        else:
            yield net


def step(case: Case, net: Net, teacher: Net, data: Data, in_chunks: bool, scale: float) -> dict[str, Tensor]:
    """Returns the loss of a step, and its gradients."""
    with rewritten(teacher, in_chunks) as teacher, rewritten(net, in_chunks) as net:
        net.zero_grad()
        once: Callable[[], Tensor] = partial(loss_of, case, net, teacher, data, in_chunks)
        is_half = case.autocast is not None and next(net.parameters()).dtype is not torch.float64
        around = case.around
        with Session(min_nbytes=0) if around == "session" and in_chunks else nullcontext():
            for _ in range(2 if around == "accumulated" else 1):
                with torch.autocast("cpu", dtype=case.autocast or torch.bfloat16, enabled=is_half):
                    if around == "without gradients":
                        with torch.no_grad():
                            loss = once()
                    elif around == "checkpoint":
                        loss = checkpoint(once, use_reentrant=False)
                    elif around == "twice":
                        loss = once() + 0.5 * once()
                    else:
                        loss = once()
                if loss.requires_grad:
                    ((loss if loss.dtype is torch.float64 else loss.float()) * (scale / 3.0)).backward()
    found = {name: x.grad.double() / scale for name, x in net.named_parameters() if x.grad is not None}
    return {"loss": loss.detach().double(), **found}


def distance(found: Tensor, expected: Tensor, floor: float) -> float:
    """Returns how far numbers are apart, relative to their length.

    Infinities are equal to themselves. A gradient of plain PyTorch is a NaN where the targets' classes all count
    nothing, and any number will do then.
    """
    same = (found == expected) | expected.isnan()
    found, expected = found.masked_fill(same, 0.0), expected.where(~same | expected.isfinite(), 0.0)
    apart = (found - expected.masked_fill(same, 0.0)).norm().item()
    return apart / max(expected.norm().item(), floor) if apart else 0.0


def check(case: Case) -> None:
    """Runs a case.

    Raises:
        AssertionError: numbers are further apart than they may be, or all logits existed.
    """
    torch.manual_seed(case.seed)
    net, teacher = Net(case).to(case.dtype), Net(case).to(case.dtype).requires_grad_(False)
    words, target = (torch.randint(0, net.usable, case.shape) for _ in range(2))
    target[torch.rand(case.shape) < case.ignored] = case.ignore_index
    count = math.prod(case.shape)
    weight = torch.rand(case.classes) * (torch.rand(case.classes) < 0.9)
    data = Data(words, target, weight.to(torch.bfloat16).double(), torch.rand(count).to(torch.bfloat16).double())
    scale = 1024.0 if case.coarsest is torch.float16 else 1.0
    with torch.no_grad():
        exact, exact_teacher = copy.deepcopy(net).double(), copy.deepcopy(teacher).double()
    expected = step(case, exact, exact_teacher, data, False, 1.0)
    plain = step(case, net, teacher, data, False, scale)
    with Sizes() as sizes:
        found = step(case, net, teacher, data, True, scale)
    assert list(found) == list(expected), f"{list(found)} in place of {list(expected)}"
    bound = BOUNDS[case.coarsest]
    for name, value in expected.items():
        floor = 1e-2 * max([1e-1, *(x.norm().item() for x in expected.values() if x.isfinite().all())])
        apart, usual = distance(found[name], value, floor), distance(plain[name], value, floor)
        assert not apart > max(bound, 3.0 * usual), f"{name} is {apart:.3g} apart, and {usual:.3g} in plain PyTorch"
        assert not math.isnan(apart) or math.isnan(usual), f"{name} is no number: {found[name]}"
    if case.splits:
        assert sizes.largest < count * net.usable, "all logits existed"


@pytest.mark.parametrize("group", range(DEFAULT_CASES // GROUP))
def test_a_loss_without_its_logits_has_the_numbers_of_plain_pytorch(group: int) -> None:
    for seed in range(group * GROUP, (group + 1) * GROUP):
        case = Case.draw(seed)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


if __name__ == "__main__":
    run_for_a_while(__doc__, Case.draw, check)
