"""Any value can be made again: convolutions, products, attention, whatever made it, and each of them once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Remake, differences
from test_op_db import EXCEPTIONS, OPS, QUICK_SAMPLES, SAMPLES, Forward, by_part, gradients, op_forwards, outcome, part
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from backstash import Keep, Policy, Recompute, Session, policies, repeatable
from backstash.capture import observer
from backstash.ops import backends
from backstash.proofs import proofs
from backstash.remake import fused, repeating
from backstash.remake.recipes import Recipe
from backstash.saved import is_odd
from backstash.torch_internals import in_filled_memory

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def squared(forward: Forward) -> Forward:
    """The same forward pass, whose floating results are saved once more by a function that reads their values."""

    def square(x: Any) -> Any:
        return x * x if isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided else x

    return lambda take: tree_map(square, forward(take))


QUICK = ("nn_functional_conv", "linear", "nn_functional_linear", "matmul", "bmm", "addmm", "scaled_dot", "embedding")
"""Ops that ``make test`` runs begin so."""


UNSTEADY = dict.fromkeys(
    ("linalg_lstsq", "linalg_lstsq_grad_oriented"), "plain PyTorch's own gradients of it differ from run to run"
)


def cases() -> Iterator[Any]:
    for op in OPS:
        marks = () if op.formatted_name.startswith(QUICK) else (pytest.mark.slow,)
        yield pytest.param(op, id=op.formatted_name, marks=marks)


@by_part
@pytest.mark.parametrize("op", list(cases()))
def test_op(op: Any, which: str) -> None:
    if op.formatted_name in EXCEPTIONS | UNSTEADY:
        pytest.skip((EXCEPTIONS | UNSTEADY)[op.formatted_name])
    for forward in part(op_forwards(op, SAMPLES), which, QUICK_SAMPLES):
        for drop in (False, True):
            expected, error = outcome(lambda: gradients(squared(forward), None, drop))  # noqa: B023
            session = Session(Remake(), min_nbytes=0)
            got, got_error = outcome(lambda: gradients(squared(forward), session, drop, times=2))  # noqa: B023
            assert got_error == error, op.formatted_name
            assert not differences([*expected, *expected], got), op.formatted_name


# -- what is remade, and how often -----------------------------------------------------------------------------------


def trained(make: Callable[[], nn.Module], x: Tensor, session: Session | None, steps: int = 2) -> list[Tensor]:
    """Gradients of ``steps`` steps."""
    torch.manual_seed(3)
    model, found = make(), []
    for number in range(steps):
        model.zero_grad()
        torch.manual_seed(number)
        with session or nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def check(make: Callable[[], nn.Module], x: Tensor) -> dict[str, str]:
    """Compares the gradients; returns the codec of each row of the report."""
    session = Session(Remake(), min_nbytes=64)
    assert not differences(trained(make, x, None), trained(make, x, session))
    return {row.key: row.codec for row in session.report().rows}


class Attends(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(50, 32), dropout
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 50), nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (part.view(2, 40, 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        logits: Tensor = self.out(x + y.transpose(1, 2).reshape(2, 40, 32))
        return logits


class Recurrent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(12, 12), inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.first(x))[0]
        return result


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 40)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), torch.arange(16), label_smoothing=0.1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        causal = torch.tril(torch.ones(16, 16)).bool() & (torch.arange(16) < 12)
        scores = self.layer(x).masked_fill(~causal, -1e4).softmax(dim=-1)
        values, _ = scores.topk(5, dim=-1)
        return torch.einsum("bij,bkj->bik", values, values)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.Tanh(), nn.Conv1d(8, 4, 3), nn.GELU()),
        torch.ones(2, 4, 30),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.ELU(), nn.ConvTranspose3d(4, 2, 3)),
        torch.ones(2, 2, 6, 6, 6),
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(20, 40), nn.SiLU(), nn.Linear(40, 20), nn.LayerNorm(20)),
        torch.ones(8, 20),
    ),
    "bilinear upsampling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Tanh(), nn.AvgPool2d(2), nn.Tanh()
        ),
        torch.ones(2, 3, 12, 12),
    ),
    "norms in place": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.Hardswish(inplace=True)
        ),
        torch.ones(2, 3, 12, 12),
    ),
    "attention": (Attends, torch.arange(80).reshape(2, 40) % 50),
    "multi-head attention": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        torch.ones(2, 20, 32),
    ),
    "attention with dropout": (lambda: Attends(0.2), torch.arange(80).reshape(2, 40) % 50),
    "lstm": (lambda: Recurrent(nn.LSTM(12, 16, 2, dropout=0.3, batch_first=True)), torch.ones(4, 10, 12)),
    "gru": (lambda: Recurrent(nn.GRU(12, 16, batch_first=True, bidirectional=True)), torch.ones(4, 10, 12)),
    "loss": (lambda: Loss(), torch.ones(16, 12)),
    "masks": (lambda: Masked(), torch.ones(4, 16, 16)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(20, 40), nn.Dropout(0.3), nn.Tanh(), nn.Linear(40, 20), nn.Tanh()),
        torch.ones(8, 20),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_and_something_costly_is_remade(name: str) -> None:
    make, x = MODELS[name]
    codecs = check(make, x * 0.5 if x.is_floating_point() else x)
    assert "recompute" in codecs.values()


class Counted(nn.Module):
    """A chain of layers; ``calls`` counts the linear functions that have run."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_chain_runs_once_in_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from backstash.remake import repeating

    model, x = Counted(12), torch.randn(8, 16)
    session = Session(Remake(), min_nbytes=64)
    trained(lambda: model, x, session)  # proves the calls
    repeated: list[str] = []
    original = repeating.repeat

    def noted(call: Any, function: Any, tensors: list[Tensor]) -> Tensor:
        repeated.append(call.name)
        return original(call, function, tensors)

    for module in ("backstash.remake.repeating", "backstash.remake.recipes"):
        monkeypatch.setattr(f"{module}.repeat", noted)
    trained(lambda: model, x, session, steps=1)
    assert repeated.count("linear") <= 12


class Normed(nn.Module):
    """Two batch norms with an activation, the second one after a sum, which a single kernel makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 8), (8, 4)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = torch.relu(self.norms[1](self.second(x)) + x)
        last: Tensor = self.last(x)
        return last


def test_fused_kernels_are_tried_alone_when_a_chain_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    if not backends.has_own_kernel("affine", "cpu"):
        pytest.skip("there is no fused kernel")
    ways: list[bool] = []
    original = Recipe.run

    def noted(self: Recipe, *args: Any) -> Tensor:
        if self.call.name == "relu":
            ways.append(self.fused)
        return original(self, *args)

    model, x = Normed(), torch.randn(2, 3, 12, 12)
    trained(lambda: model, x, Session("lossless", min_nbytes=64), steps=1)
    if all(known.answer != "fused" for known in proofs._known.values()):
        pytest.skip("torch's kernels for this processor round batch norms in another way than the fused kernel")
    monkeypatch.setattr(Recipe, "run", noted)
    session = Session(Remake(), min_nbytes=64)
    proofs.forget()
    trained(lambda: model, x, session, steps=1)
    assert ways
    assert all(ways)  # the other way would take as much memory again
    ways.clear()
    assert not differences(trained(lambda: model, x, None, steps=1), trained(lambda: model, x, session, steps=1))
    assert ways
    assert all(ways)


def test_a_fused_kernel_that_makes_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fused.affine

    def wrong(*args: Any) -> Tensor | None:
        made = original(*args)
        runs.append(made is not None)
        return None if made is None else made + 1.0

    runs: list[bool] = []
    monkeypatch.setattr(fused, "affine", wrong)
    proofs.forget()
    model, x = Normed(), torch.randn(2, 3, 12, 12)
    session = Session(Remake(), min_nbytes=64)
    assert not differences(trained(lambda: model, x, None), trained(lambda: model, x, session))
    tried = len(runs)
    assert not differences(trained(lambda: model, x, None), trained(lambda: model, x, session))
    assert len(runs) == tried > 0
    proofs.forget()


def test_chains_may_be_longer_than_the_stack_of_python_allows() -> None:
    codecs = check(lambda: Counted(600), torch.randn(2, 16))
    assert list(codecs.values()).count("recompute") >= 590


def test_backward_may_run_twice() -> None:
    def gradients_of(session: Session | None) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = Counted(5), torch.randn(8, 16)
        with session or nullcontext():
            loss = model(x).sum()
        return [
            gradient
            for retain in (True, False)
            for gradient in torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain)
        ]

    assert not differences(gradients_of(None), gradients_of(Session(Remake(), min_nbytes=64)))


def test_a_weight_that_changes_before_backward_is_an_error_and_no_other_gradient() -> None:
    model, x = Counted(4), torch.randn(8, 16)
    session = Session(Remake(), min_nbytes=64)
    with session:
        loss = model(x).sum()
    with torch.no_grad():
        model.layers[1].weight.mul_(2)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_a_weight_that_changes_unseen_is_an_error_and_no_other_gradient() -> None:
    model, x = Counted(4), torch.randn(8, 16)
    with Session(Remake(), min_nbytes=64):
        loss = model(x).sum()
    model.layers[1].weight.data.mul_(2)  # type: ignore[union-attr,operator]
    with pytest.raises(RuntimeError, match="other bits"):
        loss.backward()


def test_a_weight_that_changes_unseen_inside_the_session_has_its_values_stored_first() -> None:
    def gradients_of(session: Session | None) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = Counted(4), torch.randn(8, 16)
        if session is not None:
            session.__enter__()
        loss = model(x).sum()
        model.layers[1].weight.data.mul_(2)  # type: ignore[union-attr,operator]
        if session is not None:
            session.__exit__(None, None, None)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    assert not differences(gradients_of(None), gradients_of(Session(Remake(), min_nbytes=64)))


class Codebook(nn.Module):
    """Vector quantization with a codebook that follows what it was given, in the same forward pass."""

    def __init__(self, update: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(32, 16))
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        codes: Tensor = self.codes  # type: ignore[assignment]
        nearest = torch.cdist(x, codes).argmin(1)
        quantized = F.embedding(nearest, codes)
        with torch.no_grad():
            self.update(codes, 0.9 * codes)
        return x + (quantized - x).detach() + F.mse_loss(x, quantized.detach())


@pytest.mark.parametrize(
    "update",
    [
        lambda codes, others: codes.data.copy_(others),
        lambda codes, others: setattr(codes, "data", others),
        lambda codes, others: codes.copy_(others),
        lambda codes, others: codes.detach().numpy().__setitem__(slice(None), others.numpy()),
    ],
    ids=["through data", "data assigned", "with a version", "through numpy"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_buffer_that_is_changed_before_anything_is_made_of_it(
    update: Callable[[Tensor, Tensor], Any], inside: bool
) -> None:
    def gradients_of(session: Session | None) -> list[Tensor]:
        torch.manual_seed(1)
        model, x = nn.Sequential(nn.Linear(16, 16), Codebook(update), nn.Linear(16, 16)), torch.randn(24, 16)
        found: list[Tensor] = []
        for _ in range(3):
            with session or contextlib.nullcontext():
                loss = model(x).square().sum()
                found += torch.autograd.grad(loss, list(model.parameters())) if inside else []
            found += [] if inside else torch.autograd.grad(loss, list(model.parameters()))
        return found

    assert not differences(gradients_of(None), gradients_of(Session(Remake(), min_nbytes=64)))


class Renormalised(nn.Module):
    """Divides by a running deviation before the norm that keeps it, as training for quantization does."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(16, 1)), norm

    def forward(self, x: Tensor) -> Tensor:
        deviation = torch.sqrt(self.norm.running_var + 1e-5)
        return self.norm(x * (self.weight / deviation[:, None])).tanh() * (self.weight / deviation[:, None])


@pytest.mark.parametrize("policy", ["lossless", Remake()], ids=["lossless", "remake"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, track_running_stats=True)])
def test_running_statistics_have_no_version(norm: Callable[[int], nn.Module], policy: str | Policy) -> None:
    def gradients_of(session: Session | None) -> list[Tensor]:
        torch.manual_seed(1)
        model, found = Renormalised(norm(16)).eval(), list[Tensor]()
        for step in range(5):
            model.train(step > 2)  # what was proven of statistics that stay is used when they do not
            with session or contextlib.nullcontext():
                loss = (model(torch.randn(8, 16, 4)) * model(torch.randn(8, 16, 4))).square().sum()
            found += torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        return found

    assert not differences(gradients_of(None), gradients_of(Session(policy, min_nbytes=0)))


def test_a_batch_that_is_overwritten_is_plain_pytorchs_error() -> None:
    model, batch = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(8, 16)
    with Session(Remake(), min_nbytes=64):
        loss = model(batch).sum()
    batch.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_batch_that_is_overwritten_unseen_is_an_error_and_no_other_gradient() -> None:
    model, batch = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(8, 16)
    with Session(Remake(), min_nbytes=64):
        loss = model(batch).sum()
    batch.numpy()[:] = 0
    with pytest.raises(RuntimeError, match="other bits"):
        loss.backward()


def test_a_batch_that_the_program_lets_go_of_stays_as_long_as_it_is_needed() -> None:
    def gradients_of(session: Session | None) -> list[Tensor]:
        torch.manual_seed(1)
        model, batch = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(8, 16)
        with session or nullcontext():
            loss = model(batch).sum()
        del batch
        torch.randn(8, 16)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    assert not differences(gradients_of(None), gradients_of(Session(Remake(), min_nbytes=64)))


def test_costly_functions_are_not_repeated_for_a_policy_that_does_not_ask_for_it() -> None:
    session = Session("lossless", min_nbytes=64)
    trained(lambda: Counted(4), torch.randn(8, 16), session)
    assert not any("linear" in row.reason for row in session.report().rows if row.codec == "recompute")


def test_random_state_changing_and_unfilled_functions_are_not_repeatable() -> None:
    for function in (torch.empty_like, F.rrelu, F.gumbel_softmax, torch.multinomial, F.batch_norm, F.ctc_loss):
        assert function in repeatable.CHEAP or not repeatable.is_repeatable(function), function
    for function in (F.conv2d, F.linear, torch.bmm, Tensor.matmul, F.embedding, F.max_pool2d, torch.einsum, Tensor.sum):
        assert repeatable.is_repeatable(function), function
    assert repeatable.may_change_state(F.embedding, (None, None, None, 1.0), {})
    assert not repeatable.is_repeatable(torch.instance_norm)  # whose arguments come in another order
    mean = torch.zeros(2)
    assert repeatable.may_change_state(F.instance_norm, (None, mean, mean), {})
    assert repeatable.may_change_state(F.instance_norm, (None,), {"running_mean": mean, "running_var": mean})
    assert not repeatable.may_change_state(F.instance_norm, (None, None, None, mean, mean), {"use_input_stats": True})
    assert repeatable.draws(F.scaled_dot_product_attention, (None,), {"dropout_p": 0.1})


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norms_are_made_again_if_they_keep_no_statistics(dims: int, tracks: bool) -> None:
    conv, norm = (
        (nn.Conv1d, nn.InstanceNorm1d),
        (nn.Conv2d, nn.InstanceNorm2d),
        (nn.Conv3d, nn.InstanceNorm3d),
    )[dims - 1]

    def make() -> nn.Module:
        norms = (norm(4, affine=True, track_running_stats=tracks) for _ in range(2))
        layers = [layer for each in norms for layer in (conv(4, 4, 3, padding=1), each, nn.LeakyReLU(0.1))]
        return nn.Sequential(*layers, conv(4, 4, 1))

    x = torch.randn(2, 4, *(8,) * dims)
    expected = trained(make, x, None)
    session = Session(Remake(), min_nbytes=64)
    assert not differences(expected, trained(make, x, session))
    remade = [row.reason for row in session.report().rows if row.codec == "recompute"]
    assert any("instance_norm" in reason for reason in remade) is not tracks


def test_a_recompute_of_any_producer_has_no_bounds() -> None:
    with pytest.raises(ValueError, match="any_producer"):
        Recompute(within=frozenset({"x"}), any_producer=True)


@pytest.mark.parametrize("name", ["dropout", "norms in place", "lstm"])
def test_the_generator_is_where_plain_training_leaves_it(name: str) -> None:
    make, x = MODELS[name]
    states = []
    for session in (None, Session(Remake(), min_nbytes=64)):
        trained(make, x, session)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_policy_with_rules_asks_for_any_producer_where_a_rule_does() -> None:
    rules = policies.Rules((("*", Recompute(any_producer=True)),), otherwise=policies.get("lossless"))
    assert rules.remakes_anything
    assert not policies.Rules((("*", Keep()),), otherwise=policies.get("lossless")).remakes_anything


class Windows(nn.Module):
    """Attention step by step, whose queries are a slice of what one linear layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 64, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * 32**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return x + (weights @ v).transpose(1, 2).reshape(-1, 64, 64)


def test_a_temporary_of_another_layout_than_the_result_is_not_written_over() -> None:
    """A product of matrices adds up in another order if it reads other strides."""
    x = torch.randn(16, 64, 64, generator=torch.Generator().manual_seed(0))
    layouts = []

    class Looking(Windows):
        def forward(self, x: Tensor) -> Tensor:
            q = self.qkv(x).view(-1, 64, 3, 2, 32).permute(2, 0, 3, 1, 4)[0]
            layouts.append((q.stride(), (q * 2).stride()))
            return super().forward(x)

    def make() -> nn.Module:
        return nn.Sequential(Windows(), nn.LayerNorm(64), Looking())

    expected = trained(make, x, None)
    assert layouts[0][0] != layouts[0][1]
    assert not differences(expected, trained(make, x, Session(Remake(), min_nbytes=0)))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_network_is_repeated_once_however_many_tensors_it_saves_inside(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backstash.remake import repeating

    repeated: list[str] = []
    original = repeating.repeat

    def noted(call: Any, *args: Any) -> Tensor:
        repeated.append(call.name)
        return original(call, *args)

    monkeypatch.setattr(repeating, "repeat", noted)
    numbers = []
    for length in (5, 20):
        model, x = kind(8, 16, batch_first=True, bidirectional=True), torch.randn(4, length, 8)
        for session in (None, Session(Remake(), min_nbytes=0)):
            repeated.clear()
            with session or contextlib.nullcontext():
                loss = model(x)[0].square().mean()
            found = torch.autograd.grad(loss, list(model.parameters()))
            if session is None:
                expected = found
        assert not differences(expected, found)
        numbers.append(len(repeated))
    assert max(numbers) < 10


@pytest.fixture
def ctc_loss_is_tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody knew that ctc_loss saves a table of which it fills only what the lengths of the texts need."""
    monkeypatch.setattr(repeatable, "_UNREPEATABLE", repeatable._UNREPEATABLE - {"ctc_loss"})
    monkeypatch.setattr(observer, "_kinds", {})
    repeatable.is_repeatable.cache_clear()
    proofs.forget()
    yield
    repeatable.is_repeatable.cache_clear()


@pytest.mark.usefixtures("ctc_loss_is_tried")
@pytest.mark.parametrize("samples", [2, 256])  # tables of 24 KiB and 3 MiB: of the heap, and of pages that are zeros
def test_what_saves_memory_that_nobody_has_filled_fails_its_proof(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it passes where the memory happens to hold the same bits twice, and other bits when it is read."""
    symbols = torch.randn(50, samples, 20).log_softmax(-1).requires_grad_()
    texts, lengths = torch.randint(1, 20, (samples, 30)), torch.randint(1, 31, (samples,))
    lengths[0] = 30

    def gradient(context: Any) -> Tensor:
        with context:
            loss = F.ctc_loss(symbols, texts, torch.full((samples,), 50), lengths)
        return torch.autograd.grad(loss, symbols)[0]

    saved: list[Any] = []
    expected = gradient(torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x))  # type: ignore[func-returns-value]
    table = saved.index((samples, 50, 61))
    ask, answers = proofs.ask, []

    def asked(operation: str, *args: Any, **kwargs: Any) -> Any:
        answers.append((operation, ask(operation, *args, **kwargs)))
        return answers[-1][1]

    monkeypatch.setattr(proofs, "ask", asked)
    session = Session(Remake(), min_nbytes=0)
    for _ in range(3):
        assert torch.equal(gradient(session), expected)
    same = [answer.split() for operation, answer in answers if operation == "saved inside"]
    assert same
    assert not any(str(table) in each for each in same)


@pytest.mark.usefixtures("ctc_loss_is_tried")
def test_memory_that_an_earlier_proof_has_filled_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function's own memory has the bits by which a proof recognises what nobody has written."""

    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.symbols = nn.Parameter(torch.randn(50, 2, 20).log_softmax(-1))

        def forward(self, texts: Tensor) -> Tensor:
            return F.ctc_loss(self.symbols, texts, torch.full((2,), 50), torch.tensor([30, 3]))

    tables: list[Tensor] = []
    repeats_inside, proven = repeating.repeats_inside, []

    def tried(call: Any, tensors: list[Tensor], saved: dict[int, Tensor]) -> frozenset[int]:
        same = repeats_inside(call, tensors, saved)
        number = next(number for number, x in saved.items() if x.shape == (2, 50, 61))
        tables.append(saved[number].isnan().any())
        proven.append(number in same)
        return same

    monkeypatch.setattr(repeating, "repeats_inside", tried)
    model, texts = Texts(), torch.randint(1, 20, (2, 30))
    session = Session(Remake(), min_nbytes=0)
    for _ in range(4):
        proofs.forget()
        left = [torch.full((2, 50, 61), torch.nan) for _ in range(32)]
        with session:
            left.clear()  # the heap hands it out again
            loss = model(texts)
        loss.backward()
    assert any(tables)
    assert not any(proven)


def test_a_mask_that_is_true_is_made_again() -> None:
    """It has the bits of memory that nobody has written, and was written."""

    class Chooses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wave = x.sin()
            return torch.where(wave < 9, wave.exp(), x)

    model, x = Chooses(), torch.randn(64, 64, requires_grad=True)

    def gradient(session: Session | None) -> Tensor:
        with session or contextlib.nullcontext():
            loss = model(x).square().sum()
        return torch.autograd.grad(loss, x)[0]

    session = Session(Remake(), min_nbytes=64)
    for _ in range(2):
        assert torch.equal(gradient(session), gradient(None))
    codecs = {row.key: row.codec for row in session.report().rows}
    assert next(codec for key, codec in codecs.items() if "condition" in key) == "recompute", codecs


UNFILLED = {
    **UNSTEADY,
    "nn_functional_ctc_loss": "nobody fills all of the table that it saves",
    "nn_functional_rrelu": "nobody fills the noise that it saves where it draws none",
    **dict.fromkeys(("empty_like", "new_empty", "new_empty_strided"), "nobody fills its result"),
}


@pytest.mark.cases(20)
@by_part
@pytest.mark.parametrize("op", OPS, ids=[op.formatted_name for op in OPS])
def test_filled_memory_has_no_op_compute_anything_else(op: Any, which: str) -> None:
    """Else a function would fail its proof for another reason than that it leaves memory unfilled."""
    if op.formatted_name in EXCEPTIONS | UNFILLED:
        pytest.skip((EXCEPTIONS | UNFILLED)[op.formatted_name])

    def made(forward: Forward) -> list[Tensor | None]:
        found: list[Tensor | None] = []

        def note(x: Any) -> Any:
            if isinstance(x, Tensor) and x.layout is torch.strided and not is_odd(x):
                found.append(x.detach().clone())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            # Copies, because some ops change running averages that they are given.
            tree_map(note, forward(lambda x: x.detach().clone().requires_grad_(x.requires_grad)))
        return found

    for forward in part(op_forwards(op, SAMPLES), which, QUICK_SAMPLES):
        expected, error = outcome(lambda: made(forward))  # noqa: B023
        got, got_error = outcome(lambda: in_filled_memory("cpu", lambda: made(forward)))  # noqa: B023
        assert got_error == error
        assert not differences(expected, got)


def test_memory_is_filled_inside_a_proof_and_settings_are_as_before() -> None:
    for before in (False, True):
        torch.use_deterministic_algorithms(before, warn_only=before)
        try:
            assert in_filled_memory("cpu", lambda: torch.empty(1 << 20)).isnan().all()
            assert torch.are_deterministic_algorithms_enabled() is before
            assert torch.is_deterministic_algorithms_warn_only_enabled() is before
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("error")
def test_an_index_of_several_tensors_is_made_again_as_it_was_given() -> None:
    """As a tuple: torch warns of lists."""
    model, x, rows = nn.Linear(64, 64), torch.randn(16, 32, 64), torch.arange(16)

    def step() -> Tensor:
        hidden = model(x)
        picked = hidden[rows, rows * 2 % 32] + hidden[rows, :16, rows].sum()
        return (picked * picked.sigmoid()).sum()

    step().backward()
    expected = model.weight.grad
    model.zero_grad()
    with Session(Remake(), min_nbytes=0):
        loss = step()
    loss.backward()
    assert model.weight.grad is not None and expected is not None
    assert torch.equal(model.weight.grad, expected)


def test_a_value_that_is_seen_as_complex_is_not_made_again_as_it_was_made() -> None:
    x = torch.randn(64, 64, 2, requires_grad=True)

    def run() -> Tensor:
        half = torch.view_as_complex(torch.sin(x * 2.0))
        (gradient,) = torch.autograd.grad((half * half).abs().sum(), x)
        return gradient

    expected = run()
    with Session(Remake(), min_nbytes=0):
        found = run()
    assert not differences([expected], [found])
