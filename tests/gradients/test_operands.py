"""Factors of products are stored as these round them, where the bits of the gradients say that they do.

No processor is asked to have instructions for bfloat16: a product that rounds its operands is imitated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash import numerics
from backstash.bits import equal_bits
from backstash.codecs import Operand
from backstash.codecs.upcast import operand
from backstash.errors import CodecRefusedError, PrecisionChangedError
from backstash.proofs import proofs

MATMUL = torch.backends.mkldnn.matmul


def nearest(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def towards_zero(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def ties_away(x: Tensor) -> Tensor:
    return towards_zero((x.contiguous().view(torch.int32) + 0x8000).view(torch.float32))


@contextmanager
def products_round(by: Callable[[Tensor], Tensor], least: int = 0) -> Iterator[None]:
    """Inside, products of at least so many numbers round their operands by a function where the program asks for it."""

    def mm(a: Tensor, b: Tensor) -> Tensor:
        if numerics.rounds_products() and a.dtype == torch.float32 and a.numel() * b.shape[1] >= least:
            a, b = by(a), by(b)
        return multiplied(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        if numerics.rounds_products() and a.dtype == torch.float32 and a.numel() * b.shape[2] >= least:
            a, b = by(a), by(b)
        return multiplied(a, b)

    def multiplied(a: Tensor, b: Tensor) -> Tensor:  # in float64, which no processor rounds to bfloat16
        zero = torch.zeros(1, 1, 1, dtype=torch.float64)
        return torch.baddbmm(zero, a.double(), b.double(), beta=0).to(a.dtype)

    library = torch.library.Library("aten", "IMPL")
    proofs.forget()
    asked, operand._asked = operand._asked, operand._Asked()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its own kernel is replaced
            library.impl("mm", mm, "CPU")
            library.impl("bmm", bmm, "CPU")
        yield
    finally:
        library._destroy()
        proofs.forget()
        operand._asked = asked


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """Products of bfloat16 are asked for, as by ``set_float32_matmul_precision("medium")``."""
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "bf16"
    yield
    MATMUL.fp32_precision = before


class Block(nn.Module):
    """Layers whose inputs products alone read, one that a gelu reads as well, and one that a relu leaves sparse."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96, bias=bias), nn.Linear(96, 48, bias=bias)
        self.queries, self.keys = nn.Linear(48, 32, bias=bias), nn.Linear(48, 16, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.norm(x))
        z = self.queries(y).sum() + self.keys(y).square().sum()
        return x + self.down(F.gelu(self.up(y))) + self.down(F.relu(self.up(y))) + 1e-3 * z


def train(session: bs.Session | None, bias: bool = True, change: Callable[[], object] = lambda: None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(bias), Block(bias))
    found: list[Tensor] = []
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(64, 48)
        with session or nullcontext():
            loss = model(x).square().mean()
        change()
        loss.backward()
        found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found


def stored(session: bs.Session) -> list[str]:
    return [row.key for row in session.report().rows if row.codec.startswith("operand")]


@pytest.mark.parametrize("by", [nearest, towards_zero])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_what_a_product_rounds_is_stored_rounded_and_gradients_have_the_same_bits(
    bias: bool, recompute: bool, dense: bool, by: Callable[[Tensor], Tensor]
) -> None:
    with products_round(by):
        session = bs.Session(bs.policies.lossless(recompute=recompute, dense=dense), min_nbytes=0)
        plain = train(None, bias)
        assert all(equal_bits(a, b) for a, b in zip(train(session, bias), plain, strict=True))
    rows = [row for row in session.report().rows if row.codec.startswith("operand")]
    assert rows or recompute
    assert all(row.saved_nbytes >= (2.5 if dense else 2) * row.stash_nbytes for row in rows)
    assert all("mm#" in row.key.lower() for row in rows)


class Scores(nn.Module):
    """Products of two values that backward reads, of matrices and of batches of them, in several layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.sin(self.first(x)), torch.sin(self.second(x)) * 2.0
        q, k = (y.unflatten(-1, (2, 8)).transpose(0, 1).contiguous() for y in (a, b))
        scores = torch.bmm(torch.sin(q), torch.sin(k).mT)
        values = torch.bmm(torch.sin(scores), torch.sin(k.mT.contiguous()).mT)
        return values.square().mean() + torch.mm(torch.sin(a).t(), torch.sin(b)).square().mean()


@pytest.mark.parametrize("by", [nearest, towards_zero, ties_away, lambda x: x])
def test_both_factors_of_products_and_of_batches_of_them(by: Callable[[Tensor], Tensor]) -> None:
    def train_scores(session: bs.Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, found = Scores(), []
        for _ in range(2):
            model.zero_grad()
            x = torch.randn(24, 16)
            with nullcontext() if session is None else session:
                loss = model(x)
            loss.backward()
            found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return found

    with products_round(by):
        session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
        plain = train_scores(None)
        assert all(equal_bits(a, b) for a, b in zip(train_scores(session), plain, strict=True))
    roles = {key.rpartition("/")[2].partition("#")[0] + key[key.rindex(":") :] for key in stored(session)}
    expected = {"Bmm:self", "Bmm:mat2", "Mm:self", "Mm:mat2"} if by in (nearest, towards_zero) else set()
    assert roles & {"Bmm:self", "Bmm:mat2", "Mm:self", "Mm:mat2"} == expected


def test_no_more_questions_are_remembered_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was forgotten is taken to be noticed, so a setting that is changed within a step is an error then."""
    threads = torch.get_num_threads()

    def change() -> None:
        torch.set_num_threads(3 - min(2, torch.get_num_threads()))

    monkeypatch.setattr(operand, "MOST_ASKED", 2)
    try:
        with products_round(nearest):
            session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
            plain = train(None)
            assert all(equal_bits(a, b) for a, b in zip(train(session), plain, strict=True))
            assert stored(session) and len(operand._asked.questions) == 2
            with pytest.raises(PrecisionChangedError, match="a setting was changed since"):
                train(session, change=change)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("by", [ties_away, lambda x: x], ids=["ties away", "not at all"])
def test_another_rounding_and_none_are_noticed(by: Callable[[Tensor], Tensor]) -> None:
    with products_round(by):
        session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
        plain = train(None)
        assert all(equal_bits(a, b) for a, b in zip(train(session), plain, strict=True))
    assert not stored(session)


def test_each_shape_is_asked_for() -> None:
    """A library may round the operands of large products alone."""
    with products_round(nearest, least=48 * 64 * 32):
        session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
        plain = train(None)
        assert all(equal_bits(a, b) for a, b in zip(train(session), plain, strict=True))
    kept = [row for row in session.report().rows if "keys" in row.key or "queries" in row.key]
    assert stored(session) and not any(row.codec.startswith("operand") for row in kept)


def test_this_processor_is_asked() -> None:
    """Whatever this processor does, bits are those of plain torch; without the setting nothing is rounded."""
    for precision in ("bf16", "ieee"):
        MATMUL.fp32_precision = precision
        session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
        plain = train(None)
        assert all(equal_bits(a, b) for a, b in zip(train(session), plain, strict=True))
    assert not stored(session)


def test_a_precision_that_is_changed_before_backward_is_an_error() -> None:
    def change() -> None:
        MATMUL.fp32_precision = "ieee"

    with products_round(nearest):
        session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
        with pytest.raises(PrecisionChangedError, match="a setting was changed since .*'ieee' now"):
            train(session, change=change)


def test_other_settings_are_asked_again() -> None:
    threads = torch.get_num_threads()

    def change() -> None:
        torch.set_num_threads(3 - min(2, torch.get_num_threads()))

    try:
        with products_round(nearest):
            session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
            torch.set_num_threads(1)
            plain = train(None, change=change)
            torch.set_num_threads(1)
            assert all(equal_bits(a, b) for a, b in zip(train(session, change=change), plain, strict=True))
            assert stored(session)
    finally:
        torch.set_num_threads(threads)


def test_a_session_whose_precision_is_changed_between_steps_goes_on() -> None:
    with products_round(nearest):
        session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
        for precision in ("bf16", "ieee", "bf16"):
            MATMUL.fp32_precision = precision
            plain = train(None)
            assert all(equal_bits(a, b) for a, b in zip(train(session), plain, strict=True))
            assert not (precision == "ieee" and stored(session))


def test_a_backward_pass_with_a_graph_has_the_same_bits() -> None:
    def penalty(session: bs.Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8))
        with nullcontext() if session is None else session:
            loss = model(torch.sin(torch.randn(40, 32, requires_grad=True) * 2)).square().sum()
        assert session is None or stored(session)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum(gradient.square().sum() for gradient in gradients)
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    with products_round(nearest):
        plain = penalty(None)
        session = bs.Session(bs.policies.lossless(recompute=False), min_nbytes=0)
        for _ in range(2):
            assert all(equal_bits(a, b) for a, b in zip(penalty(session), plain, strict=True))


def test_plans_are_made_of_exact_forms_whoever_reads_them() -> None:
    with products_round(nearest):
        torch.manual_seed(0)
        model, x = nn.Sequential(Block(True), Block(True)), torch.randn(64, 48)
        found = bs.profile(lambda: model(x).square().mean().backward(), model, min_nbytes=0)
    assert not any(choice.name.startswith("operand") for value in found.values for choice in value.choices)


def test_what_no_product_could_round_alike_is_refused() -> None:
    for number in (float("inf"), float("nan"), 3.4e38, 1e-39, 1.17549430e-38):
        x = torch.ones(4, 4)
        x[1, 2] = number
        with pytest.raises(CodecRefusedError, match="not finite, or below the normal numbers"):
            Operand().encode(x)
    x = torch.tensor([0.0, -0.0, 1e-30, -3.0e38])
    assert Operand().decode(Operand().encode(x)).signbit().tolist() == [False, True, False, True]
