"""Steps captured in graphs of the fake device, with a Session inside: bits of replays, and what they tell."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash import graphs, policies
from backstash.errors import GraphError, RecomputedDifferentlyError
from backstash.papers.comet import comet
from backstash.planning.search.planner import Planner
from backstash.torch_internals import no_torch_function
from tests.device import fake
from tests.device.networks import MIN_NBYTES, NETWORKS, SIZE, Training, same_bits
from tests.networks import families
from tests.networks.mobilenet import mobilenet_v2
from tests.networks.unet import UNet

LEARNING = 6
"""Eager calls before a capture."""


def _of_pictures(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["pictures"]), batch["classes"])


def _unet() -> Training:
    torch.manual_seed(0)
    batch = {"pictures": torch.randn(2, 3, 32, 32), "classes": torch.randint(3, (2, 32, 32))}
    return Training(UNet(3, width=8, levels=3), batch, _of_pictures)


def _mobilenet() -> Training:
    torch.manual_seed(0)
    batch = {"pictures": torch.randn(2, 3, 64, 64), "classes": torch.randint(10, (2,))}
    return Training(mobilenet_v2(num_classes=10), batch, _of_pictures)


def _vit() -> Training:
    torch.manual_seed(0)
    return Training(*families.vit(SIZE), lambda model, batch: model(**batch).loss)


SIX: dict[str, Callable[[], Training]] = {**NETWORKS, "unet": _unet, "mobilenet": _mobilenet, "vit": _vit}


class _Again(nn.Module):
    """A part of a network whose forward pass a checkpoint repeats."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.part, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _with_checkpoints(model: nn.Module) -> None:
    """Has some of the network's parts checkpointed."""
    lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential)) and len(each) > 1]
    parts = max(lists, key=lambda each: sum(1 for _ in each.modules()))
    for number in range(len(parts) // 2):
        parts[number] = _Again(parts[number])


def _made(network: str, changed: Callable[[nn.Module], None] = lambda model: None) -> Training:
    """A network on the device, without dropout: each replay draws other numbers."""
    training = SIX[network]()
    for module in training.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    changed(training.model)
    return training.to("fake")


def _step(training: Training) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        training.model.zero_grad()
        with torch.autocast("fake", training.autocast or torch.bfloat16, enabled=training.autocast is not None):
            loss = training.loss(training.model, batch)
        loss.backward()
        return loss

    return step


def _batches(training: Training, count: int) -> list[dict[str, Tensor]]:
    """Batches of one shape and different numbers."""
    return [{name: x.roll(number, 0) for name, x in training.batch.items()} for number in range(count)]


def _plan(training: Training) -> bs.Plan:
    """A plan for a small budget, of remakes alone."""
    training.step()
    allow = ("recompute",)
    profile = bs.profile(training.step, training.model, allow=allow, device="fake", min_nbytes=MIN_NBYTES)
    lowest = Planner(profile, allow).solutions[0]
    plan = bs.plan(profile, int(1.1 * lowest.peak_nbytes), allow)
    assert any(decision.kind == "recompute" for decision in plan.decisions)
    return plan


WAYS: dict[str, Callable[[Training], bs.Session | None]] = {
    "plain": lambda training: None,
    "checkpoint": lambda training: training.session("lossless"),
    "lossless": lambda training: training.session("lossless"),
    "quantized": lambda training: training.session(policies.quantized(bits=4)),
    "offload": lambda training: training.session("offload"),
    "plan": lambda training: training.session(_plan(training)),
}
FAST = {(network, "lossless") for network in SIX} | {
    ("gpt2", way) for way in ("plain", "checkpoint", "offload", "plan")
}
CASES = [
    pytest.param(network, way, marks=[] if (network, way) in FAST else [pytest.mark.slow])
    for network in SIX
    for way in WAYS
]


@pytest.mark.parametrize(("network", "way"), CASES)
def test_replays_have_the_bits_of_eager_steps(network: str, way: str) -> None:
    """All gradients, the loss and the buffers, of other numbers in each step; the host launches one graph."""
    changed = _with_checkpoints if way == "checkpoint" else lambda model: None
    training, eager = _made(network, changed), _made(network, changed)
    session, slow = WAYS[way](training), _step(eager)
    eager_session = WAYS[way](eager) if way == "quantized" else None
    for module, other in zip(training.model.modules(), eager.model.modules(), strict=True):
        module.load_state_dict(other.state_dict())  # profiling has run some steps
    fast = bs.graphed(_step(training), session, model=training.model, learning=LEARNING)
    for batch in _batches(training, LEARNING + 4):  # the first one finds no gradients, and is a call of another kind
        loss = fast(batch)
        with eager_session or nullcontext():
            expected = slow(batch)
        assert same_bits([loss.cpu()], [expected.detach().cpu()])
        assert same_bits(training.gradients(), eager.gradients())
    buffers, others = ([x.cpu() for x in each.model.buffers()] for each in (training, eager))
    assert same_bits(buffers, others)
    fast.check()
    assert fast.graphs == 1 and fast.replays >= 3
    with fake.counting() as counts:
        fast(training.batch)
    assert (counts.waits, counts.names["operations", "graph"]) == (0, 1)
    assert counts.operations <= 3 + len(training.batch)


def _small(policy: str | None = "lossless", bias: bool = True) -> tuple[nn.Module, Tensor, Any, bs.Session | None]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)]
    model = nn.Sequential(*layers).to("fake")
    x = torch.randn(4, 3, 16, 16).to("fake")

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return model, x, step, None if policy is None else bs.Session(policy, model=model, min_nbytes=0)


def _grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def test_each_shape_has_a_graph_and_no_more_than_the_limit() -> None:
    model, x, step, session = _small()
    fast = bs.graphed(step, session, graphs=2, learning=3)
    for batch in (4, 3, 4, 3) * 4:
        model.zero_grad()
        fast(x[:batch])
        given = _grads(model)
        model.zero_grad()
        step(x[:batch])
        assert same_bits(given, _grads(model))
    assert (fast.graphs, fast.eager) == (2, 6)
    for _ in range(3):
        model.zero_grad()
        fast(x[:2])
    model.zero_grad()
    with pytest.warns(UserWarning, match="2 graphs, and calls that none of them serves run eagerly"):
        fast(x[:2])
    assert (fast.graphs, fast.eager) == (2, 10)


def test_graphs_of_several_shapes_share_memory() -> None:
    model, x, step, session = _small()
    x = x.repeat(16, 1, 1, 1)
    fast = bs.graphed(step, session, learning=3)
    for _ in range(3):
        for batch in (64, 48):
            model.zero_grad()
            fast(x[:batch])
    reserved = [torch.accelerator.memory_reserved()]
    for batch in (64, 48):
        model.zero_grad()
        fast(x[:batch])
        reserved.append(torch.accelerator.memory_reserved())
    assert fast.graphs == 2
    first, second = reserved[1] - reserved[0], reserved[2] - reserved[1]
    assert second < 0.2 * first


def test_gradients_are_added_to_those_that_are_there() -> None:
    model, x, step, session = _small()
    fast = bs.graphed(step, session, learning=3)
    for _ in range(6):
        model.zero_grad()
        fast(x)
        fast(2 * x)
    assert fast.graphs == 2
    given = _grads(model)
    model.zero_grad()
    step(x)
    step(2 * x)
    assert same_bits(given, _grads(model))


def test_what_a_graph_returns_is_a_copy() -> None:
    _, x, step, session = _small()
    fast = bs.graphed(step, session, learning=3)
    losses = [fast(number * x) for number in range(8)]
    assert len({loss.item() for loss in losses}) == 8 and not any(loss.requires_grad for loss in losses)


def test_weights_that_move_are_captured_again() -> None:
    model, x, step, session = _small()
    fast = bs.graphed(step, session, learning=3)
    for _ in range(4):
        model.zero_grad()
        fast(x)
    assert fast.graphs == 1
    with torch.no_grad():
        model[0].weight.data = 3 * model[0].weight
    model.zero_grad()
    fast(x)
    given = _grads(model)
    model.zero_grad()
    step(x)
    assert same_bits(given, _grads(model))
    assert fast.eager == 4


def test_an_optimizer_steps_inside() -> None:
    def trained(is_graphed: bool) -> list[Tensor]:
        model, x, step, session = _small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

        def training(x: Tensor) -> None:
            optimizer.zero_grad()
            step(x)
            optimizer.step()

        run = bs.graphed(training, session, learning=3) if is_graphed else training
        for number in range(8):
            if number == 6:
                optimizer.param_groups[0]["lr"] = 0.05  # a number, so other steps
            run((1 + number) * x)
        if is_graphed:
            assert (run.graphs, run.replays, run.eager) == (1, 2, 6)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert same_bits(trained(True), trained(False))


def test_an_optimizer_that_counts_on_the_host_is_refused() -> None:
    model, x, step, session = _small()
    optimizer = torch.optim.Adam(model.parameters())

    def training(x: Tensor) -> None:
        optimizer.zero_grad()
        step(x)
        optimizer.step()

    fast = bs.graphed(training, session, learning=1)
    fast(x)
    fast(x)
    with pytest.raises(GraphError, match="Adam, which was made with capturable=False"):
        fast(x)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_wait_in_the_step_is_an_error() -> None:
    model, x, step, session = _small()

    def waiting(x: Tensor) -> float:
        return step(x).item()

    fast = bs.graphed(waiting, session, learning=1)
    fast(x)
    fast(x)
    with pytest.raises(GraphError, match="does what a graph cannot hold: A captured region asked for item"):
        fast(x)
    assert graphs.capture() is None
    assert all(parameter.grad is not None and not parameter.grad.isnan().any() for parameter in model.parameters())


def test_a_draft_that_lacks_room_in_a_replay_is_an_error_that_names_the_value() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False, device="fake")
    session = bs.Session(policies.lossless(recompute=False), model=model, min_nbytes=0)

    def step(x: Tensor) -> None:
        model(x * 1).sum().backward()

    def given(share: float) -> Tensor:
        return torch.where(torch.rand(256, 64, device="fake") < share, 0.0, torch.rand(256, 64, device="fake") + 0.5)

    fast = bs.graphed(step, session, learning=4)
    for _ in range(6):
        model.zero_grad()
        fast(given(0.9))
    fast.check()
    assert fast.graphs == 1
    assert session.report().stash_nbytes < 0.5 * session.report().saved_nbytes
    model.zero_grad()
    fast(given(0.2))
    with pytest.raises(GraphError, match=r"was to encode \S+:self as .*, but it has \d+ values, and room for \d+"):
        fast.check()
    assert fast.graphs == 0
    for _ in range(6):  # by what was learned
        x = given(0.2)
        model.zero_grad()
        fast(x)
        expected = torch.autograd.grad(F.linear(x, model.weight).sum(), model.weight)[0]
        assert model.weight.grad is not None and torch.equal(model.weight.grad, expected)
    fast.check()
    assert fast.graphs == 1


def test_what_changes_unseen_between_forward_and_backward_is_an_error_of_the_next_call() -> None:
    training = _made("resnet50")
    session, found = training.session("lossless"), list[Tensor]()
    convolution = [module for module in training.model.modules() if isinstance(module, nn.Conv2d)][5]
    switch = torch.ones((), device="fake")
    convolution.register_forward_hook(lambda module, given, result: found.append(result.detach()))

    def step(batch: Any) -> None:
        training.model.zero_grad()
        found.clear()
        loss = training.loss(training.model, batch)
        with no_torch_function(), torch.no_grad():
            found.pop().data.mul_(switch)
        loss.backward()

    fast = bs.graphed(step, session, learning=LEARNING)
    for _ in range(LEARNING + 3):
        fast(training.batch)
    fast.check()
    assert fast.graphs == 1
    switch.fill_(2.0)
    fast(training.batch)
    with pytest.raises(RecomputedDifferentlyError, match="other bits than the value had"):
        fast(training.batch)
    assert fast.graphs == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda x: x.cpu(), "takes strided tensors on fake"),
        (lambda x: x.clone().requires_grad_(), "that requires grad"),
        (lambda x: bytearray(1), "was given bytearray"),
    ],
)
def test_arguments_that_a_graph_cannot_read_are_errors(changed: Callable[[Tensor], Any], message: str) -> None:
    _, x, step, session = _small()
    with pytest.raises(GraphError, match=message):
        bs.graphed(step, session)(changed(x))


def test_sessions_that_decide_anew_are_refused() -> None:
    model, _, step, _ = _small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(GraphError, match="changes what it does"):
        bs.graphed(step, bs.Session(comet("conv", optimizer=optimizer), model=model))
    with pytest.raises(GraphError, match="it measures or compares by check=3"):
        bs.graphed(step, bs.Session("lossless", model=model, check=3))


def _free(lane: Any) -> int:
    return sum(sum(space._ends) - sum(space._starts) for _, space in lane.slabs)


def test_a_graph_has_its_places_of_pinned_memory_alone_until_it_is_gone() -> None:
    """Values that are moved while a graph is there do not go where its replays move theirs."""
    model, x, step, session = _small("offload")
    fast = bs.graphed(step, session, learning=3)
    for _ in range(5):
        model.zero_grad()
        fast(x)
    assert fast.graphs == 1
    with session:
        loss = model(2 * x).square().mean()
    model.zero_grad()
    fast(x)
    model.zero_grad()
    loss.backward()
    given = _grads(model)
    model.zero_grad()
    model(2 * x).square().mean().backward()
    assert same_bits(given, _grads(model))
    store = session.stores["host"]
    (lane,) = store._lanes.values()
    free = _free(lane)
    del fast, loss
    gc.collect()
    with session:
        model(x)
    assert _free(lane) > free
