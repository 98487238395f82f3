"""Values that functions save inside, and each of several results, are made again in settled passes too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.errors import RecomputedDifferentlyError
from backstash.planning.search.planner import Planner
from backstash.remake import repeating
from backstash.replay import replaying
from backstash.stash import seams
from tests.replay.twins import MIN_NBYTES, STEPS, Twin, costly

HEADS, WIDTH, ROWS = 4, 64, 64


class Network(nn.Module):
    """A layer, a function of its result, and another layer; the functions may have weights of their own.

    Args:
        function: takes the network and [1, ROWS, WIDTH] to anything with as many elements, or fewer.
    """

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.rate = function, 0.1
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.lstm, self.gru, self.rnn = (kind(WIDTH, WIDTH, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [ROWS, WIDTH] to a number."""
        made = self.function(self, self.first(x)[None].tanh() * 1.5)
        return F.gelu(self.last(made.reshape(-1, WIDTH))).square().mean()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)


def attend(x: Tensor, mask: Tensor | None = None, rate: float = 0.0, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), mask, rate, is_causal).transpose(1, 2)


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attention": lambda net, x: attend(x),
    "causal attention": lambda net, x: attend(x, is_causal=True),
    "attention with dropout": lambda net, x: attend(x, rate=net.rate),
    "attention with a mask": lambda net, x: attend(x, mask=x[0, :, :ROWS]),
    "attention twice": lambda net, x: attend(attend(x, rate=0.1).flatten(-2), rate=0.1),
    "attention of a module": lambda net, x: net.attention(x, x, x)[0],
    "weights of attention": lambda net, x: net.attention(x, x, x)[1] * net.weight,
    "lstm": lambda net, x: net.lstm(x.view(ROWS // 4, 4, WIDTH))[0],
    "gru": lambda net, x: net.gru(x.view(ROWS // 4, 4, WIDTH))[0],
    "rnn": lambda net, x: net.rnn(x.view(ROWS // 4, 4, WIDTH))[0],
    "state of an lstm": lambda net, x: net.lstm(x.view(ROWS, 1, WIDTH))[1][0] * net.weight,
    "cross entropy": lambda net, x: x * F.cross_entropy(x[0], torch.arange(ROWS) % WIDTH),
    "dropout": lambda net, x: F.dropout(x, net.rate),
    "alpha dropout": lambda net, x: F.alpha_dropout(x, net.rate),
    "layer norm of short rows": lambda net, x: F.layer_norm(x.reshape(-1, 2), (2,)),
    "group norm": lambda net, x: F.group_norm(x.reshape(ROWS, WIDTH, 1), WIDTH // 2),
    "random slopes": lambda net, x: F.rrelu(x, training=True),
    "distances": lambda net, x: torch.cdist(x, x.flip(1)),
    "selu": lambda net, x: F.selu(x),
}
RESULTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "values of a maximum": lambda net, x: x.view(1, ROWS, -1, 2).max(-1).values.repeat(1, 1, 2) * net.weight,
    "the largest ones": lambda net, x: x.topk(WIDTH // 2, -1)[0].repeat(1, 1, 2) * net.weight,
    "sorted": lambda net, x: x.sort(-1).values * net.weight,
    "least and most": lambda net, x: sum(torch.aminmax(x.view(1, ROWS, -1, 2), dim=-1)).repeat(1, 1, 2) * net.weight,
    "pooled, with indices": lambda net, x: F.max_pool1d(x, 2, return_indices=True)[0].repeat(1, 1, 2) * net.weight,
    "variance and mean": lambda net, x: sum(torch.var_mean(x.view(1, ROWS, -1, 2), -1)).repeat(1, 1, 2) * net.weight,
    "a list": lambda net, x: torch.gradient(x[0])[1] * net.weight,
    "factors": lambda net, x: torch.linalg.qr(x + 4.0 * torch.eye(WIDTH))[0] * net.weight,
}
FUNCTIONS = INSIDE | RESULTS


def rows(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def network(name: str) -> Network:
    torch.manual_seed(0)
    return Network(FUNCTIONS[name])


def planned(model: nn.Module) -> bs.Plan:
    profile = bs.profile(lambda: model(rows()).backward(), model, min_nbytes=MIN_NBYTES)
    model.zero_grad()
    return Planner(profile).at_most(0)


def settled(twin: Twin) -> None:
    for step in range(2 * STEPS):
        twin.step(rows(step))
    assert twin.session._is_replayed, twin.passes.refusal


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that are called once more as autograd records them, from now on."""
    called: list[str] = []
    as_called = repeating.as_called

    def counting(function: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(function.__name__)
        return as_called(function, *args, **kwargs)

    monkeypatch.setattr(repeating, "as_called", counting)
    return called


@pytest.mark.parametrize("is_planned", [False, True], ids=["costly", "planned"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_has_the_bits_of_plain(name: str, is_planned: bool) -> None:
    model = network(name)
    twin = Twin(model, planned(model) if is_planned else costly())
    settled(twin)
    report = twin.session.report()
    assert "Remake(" in report.programs()
    twin.step(rows(99))
    assert twin.session._is_replayed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_made_as_often_and_held_as_long_as_on_the_long_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for replays in (True, False):
        with monkeypatch.context() as patch:
            if not replays:
                patch.setattr(seams, "replays", None)
            twin = Twin(network(name), costly())
            for step in range(2 * STEPS):
                twin.step(rows(step))
            assert twin.session._is_replayed == replays
            called = counted(patch)
            peak = bs.measure(partial(twin.step, rows()), repeats=1).peak_nbytes
            found.append((sorted(called), peak))
    assert found[0][0] == found[1][0]
    assert abs(found[0][1] - found[1][1]) <= 64 * 1024


def test_what_one_call_has_saved_inside_is_made_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(network("attention with dropout"), costly())
    settled(twin)
    asked: list[tuple[int, ...]] = []
    inside = repeating.repeat_inside

    def counting(call: Any, function: Any, tensors: Any, wanted: Any) -> Any:
        asked.append(tuple(wanted))
        return inside(call, function, tensors, wanted)

    monkeypatch.setattr(repeating, "repeat_inside", counting)
    twin.step(rows())
    assert len(asked) == 1 and len(asked[0]) > 1


@pytest.mark.parametrize("which", [0, 1])
def test_other_bits_inside_are_an_error(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    is_off = [False]
    inside = replaying._CALLBACKS["repeat_inside"]

    def differing(*args: Any) -> list[Tensor]:
        made = list(inside(*args))
        if is_off[0]:
            made[which] = made[which] + 1
        return made

    monkeypatch.setitem(replaying._CALLBACKS, "repeat_inside", differing)
    twin = Twin(network("attention with dropout"), costly())
    settled(twin)
    is_off[0] = True
    with twin.session:
        loss = twin.other(rows())
    assert twin.session._is_replayed
    with pytest.raises(RecomputedDifferentlyError):
        loss.backward()


@pytest.mark.parametrize("is_planned", [False, True], ids=["costly", "planned"])
def test_a_call_with_other_arguments_is_noted_anew(is_planned: bool) -> None:
    model = network("attention with dropout")
    twin = Twin(model, planned(model) if is_planned else costly())
    settled(twin)
    twin.change(lambda net: setattr(net, "rate", 0.3))
    settled(twin)


def test_a_frozen_input_is_followed_no_more() -> None:
    twin = Twin(network("attention with a mask"), costly())
    settled(twin)
    twin.change(lambda net: net.first.requires_grad_(False))
    for step in range(2 * STEPS):
        twin.step(rows(step).detach())
    twin.change(lambda net: net.first.requires_grad_(True))
    for step in range(2 * STEPS):
        twin.step(rows(step))


@pytest.mark.parametrize("name", ["attention with dropout", "lstm", "gru", "dropout", "sorted"])
def test_a_graph_may_be_read_twice_and_dropped(name: str) -> None:
    twin = Twin(network(name), costly())
    settled(twin)

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    twin.step(rows(), backward=twice)
    twin.step(rows(), backward=lambda loss: None)
    twin.step(rows())
    assert twin.session._is_replayed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_under_autocast(name: str, dtype: torch.dtype) -> None:
    if name in ("factors", "distances", "random slopes") and dtype is torch.float16:
        pytest.skip("torch has no such function in this precision on a CPU")

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(name)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return self.net(x)

    model = Cast()
    twin = Twin(model, costly())
    for step in range(2 * STEPS):
        twin.step(rows(step))
    assert twin.session._is_replayed, twin.passes.refusal
