"""After a profile the training goes on with exactly the bits of a program that has never profiled."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import queue
import random
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import backstash as bs
from backstash.errors import BudgetError, MeasureError
from backstash.planning.measure.survey import KeepForSurvey
from backstash.rewrites import inplace, reached
from backstash.rewrites.state import StepState
from backstash.testing import equal_bits

X, Y = torch.randn(16, 32), torch.randn(16, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))


def frozen(found: Any, seen: dict[int, Any] | None = None) -> Any:
    """Plain data that is equal if and only if all bits of a state are."""
    if isinstance(found, Tensor):
        return ("tensor", str(found.dtype), tuple(found.shape), found.detach().numpy().tobytes(), found.requires_grad)
    if isinstance(found, np.ndarray):
        return found.tobytes()
    if isinstance(found, dict):
        return [(str(key) if not isinstance(key, Tensor) else "", frozen(value)) for key, value in found.items()]
    if isinstance(found, (list, tuple, deque)):
        return [frozen(each) for each in found]
    return repr(found)


def generators() -> list[Any]:
    return [random.getstate(), frozen(list(np.random.get_state())), frozen(torch.get_rng_state())]


Training = Callable[[], tuple[Callable[[], object], nn.Module, Callable[[], Any]]]
"""Makes a training: its step, its model, and what tells its state."""

TRAININGS: dict[str, Training] = {}


def training(make: Training) -> Training:
    TRAININGS[make.__name__] = make
    return make


def with_optimizer(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def build() -> Any:
        model = network()
        optimizer = make(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            (model(X) - Y).square().mean().backward()
            optimizer.step()

        return step, model, lambda: [optimizer.state_dict(), [p.grad for p in model.parameters()]]

    TRAININGS[name] = build


for _name, _make in {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
}.items():
    with_optimizer(_name, _make)


@training
def lbfgs() -> Any:
    model = network().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(X) - Y).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure), model, lambda: optimizer.state_dict()


def with_scheduler(name: str, make: Callable[[torch.optim.Optimizer], Any], metric: bool = False) -> None:
    def build() -> Any:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = make(optimizer)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            loss = (model(X) - Y).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(float(loss.detach())) if metric else scheduler.step()

        told = lambda: [optimizer.state_dict(), {k: v for k, v in vars(scheduler).items() if k != "optimizer"}]  # noqa: E731
        return step, model, lambda: [optimizer.state_dict(), scheduler.state_dict()] if not metric else told()

    TRAININGS[name] = build


for _name, _schedule in {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=12),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SWALR": lambda o: SWALR(o, 0.05, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}.items():
    with_scheduler(_name, _schedule)
with_scheduler("ReduceLROnPlateau", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1), metric=True)


@training
def scaler() -> Any:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(X) - Y).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step, model, lambda: [optimizer.state_dict(), scaler.state_dict()]


@training
def averaged_models() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swa = AveragedModel(model, use_buffers=True)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step() -> None:
        optimizer.zero_grad()
        (model(X) - Y).square().mean().backward()
        optimizer.step()
        swa.update_parameters(model)
        ema.update_parameters(model)

    return step, model, lambda: [swa.state_dict(), ema.state_dict()]


@dataclass
class Trainer:
    """A program's own class, with state of many kinds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shadow: dict[str, Tensor] = field(default_factory=dict)
    micro: int = 0
    best: float = float("inf")
    losses: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=4))
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    seen: set[int] = field(default_factory=set)
    last: Tensor | None = None
    nested: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(epochs=0, running=torch.zeros(3)))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))
    numbers: Any = field(default_factory=lambda: np.random.default_rng(4))
    array: Any = field(default_factory=lambda: np.zeros(5))
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    frozen: bool = False

    total: ClassVar[int] = 0
    history: ClassVar[list[int]] = []

    def accumulate(self, scale: float = 1.0) -> None:
        noise = torch.randn(16, 32, generator=self.generator) * self.numbers.random() * self.draw.random()
        loss = scale * (self.model(X + 0.01 * noise) - Y).square().mean() / 2
        loss.backward()
        self.micro += 1
        self.counts["micro"] += 1
        self.last = loss.detach()
        self.best = min(self.best, self.last.item())
        self.losses.append(self.last.item())
        self.recent.append(self.last.item())
        self.seen.add(self.micro)
        self.nested.epochs += 1
        self.nested.running += self.last
        self.array += 1
        Trainer.total += 1
        Trainer.history.append(self.micro)
        if self.micro % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for name, weight in self.model.named_parameters():
                    if name in self.shadow:
                        self.shadow[name].mul_(0.9).add_(weight, alpha=0.1)
                    else:
                        self.shadow[name] = weight.clone()
        if self.micro % 3 == 0:
            self.frozen = not self.frozen
            self.model[0].weight.requires_grad_(not self.frozen)  # type: ignore[union-attr]
        random.random(), np.random.rand(), torch.rand(1)

    def told(self) -> Any:
        names = [
            name for name in vars(self) if name not in ("model", "optimizer", "nested", "generator", "numbers", "draw")
        ]
        own = [getattr(self, name) for name in sorted(names)]
        drawn = [self.generator.get_state(), repr(self.numbers.bit_generator.state), self.draw.getstate()]
        return [own, vars(self.nested), drawn, Trainer.total, list(Trainer.history), self.optimizer.state_dict()]


def new_trainer() -> Trainer:
    Trainer.total = 0
    Trainer.history = []
    model = network()
    return Trainer(model, torch.optim.Adam(model.parameters(), 0.01))


@training
def own_class() -> Any:
    trainer = new_trainer()
    return trainer.accumulate, trainer.model, trainer.told


@training
def bound_arguments() -> Any:
    trainer = new_trainer()
    return functools.partial(Trainer.accumulate, trainer, scale=0.5), trainer.model, trainer.told


@training
def names_of_a_closure() -> Any:
    model = network()
    optimizer, count, total = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 0, torch.zeros(())

    def step() -> None:
        nonlocal count, total
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean() * (1 + count)
        loss.backward()
        optimizer.step()
        count += 1
        total = total + loss.detach()
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]

    return step, model, lambda: [count, total, getattr(step, "calls", 0), optimizer.state_dict()]


GLOBAL: dict[str, Any] = {}
STEPS = 0


def global_step() -> None:
    global STEPS
    GLOBAL["optimizer"].zero_grad()
    (GLOBAL["model"](X) - Y).square().mean().backward()
    STEPS += 1
    _finish()


def _finish() -> None:
    GLOBAL["optimizer"].step()
    GLOBAL["steps"] = STEPS


@training
def globals_of_a_module() -> Any:
    global STEPS
    STEPS = 0
    GLOBAL.clear()
    model = network()
    GLOBAL.update(model=model, optimizer=torch.optim.Adam(model.parameters()))
    return global_step, model, lambda: [GLOBAL["optimizer"].state_dict(), STEPS, GLOBAL.get("steps")]


@training
def two_models() -> Any:
    torch.manual_seed(0)
    maker, critic = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (maker, critic)]

    def step() -> None:
        made = maker(X[:, :8])
        for loss, optimizer in ((critic(made.detach()).mean() - critic(X).mean(), optimizers[1]),):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizers[0].zero_grad()
        (-critic(made).mean()).backward()
        optimizers[0].step()

    return step, maker, lambda: [[o.state_dict() for o in optimizers], critic.state_dict(), critic[0].weight.grad]


@training
def weights_of_no_module() -> Any:
    torch.manual_seed(0)
    first, second = (torch.randn(*sizes).mul_(0.1).requires_grad_() for sizes in ((32, 64), (64, 4)))
    optimizer = torch.optim.SGD([first, second], 0.1, momentum=0.9)

    def step() -> None:
        (torch.relu(X @ first) @ second - Y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, nn.Linear(1, 1), lambda: [first, second, first.grad, optimizer.state_dict()]


@training
def swapped_memory() -> Any:
    model = network()
    other = [torch.zeros_like(weight) for weight in model.parameters()]

    def step() -> None:
        (model(X) - Y).square().mean().backward()
        for number, weight in enumerate(model.parameters()):
            weight.data, other[number] = other[number] + weight.grad, weight.data
            weight.grad = None

    return step, model, lambda: other


class Counting(nn.Module):
    """A module with a counter, a cache and a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.calls, self.cache, self.norms = 0, None, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.cache is None:
            self.cache = torch.rand(32)
        found: Tensor = self.inner(x * self.cache) * self.calls
        self.norms.append(float(found.detach().norm()))
        return found


@training
def state_of_a_module() -> Any:
    model = Counting()
    return (
        lambda: (model(X) - Y).square().mean().backward(),
        model,
        lambda: [model.calls, model.cache, model.norms],
    )


class Slotted:
    __slots__ = ("count", "model", "velocity")

    def __init__(self) -> None:
        self.count, self.model = 0, network()
        self.velocity = [torch.zeros_like(weight) for weight in self.model.parameters()]

    def __call__(self) -> None:
        self.count += 1
        (self.model(X) - Y).square().mean().backward()
        with torch.no_grad():
            for weight, velocity in zip(self.model.parameters(), self.velocity, strict=True):
                velocity.mul_(0.9).add_(weight.grad)
                weight.sub_(velocity, alpha=0.1 / self.count)
                weight.grad = None


@training
def slots_and_an_optimizer_of_its_own() -> Any:
    step = Slotted()
    return step, step.model, lambda: [step.count, step.velocity]


def run(make: Training, warmup: int, profiled: bool, named: bool) -> Any:
    random.seed(0)
    np.random.seed(0)
    step, model, told = make()
    torch.manual_seed(1)
    for _ in range(warmup):
        step()
    if profiled:
        found = bs.profile(step, model if named else None, min_nbytes=256)
        assert found.rehearse is not None and found.values
        with contextlib.suppress(BudgetError):  # so small a step may fit into no less
            bs.plan(found, "90%")
        found.rehearse(KeepForSurvey())
    before = [
        frozen(told()),
        frozen(dict(model.state_dict())),
        frozen([p.grad for p in model.parameters()]),
        generators(),
    ]
    for _ in range(3):
        step()
    return before, frozen(told()), frozen(dict(model.state_dict())), generators()


AT_FIRST = (
    "adam",
    "lbfgs",
    "OneCycleLR",
    "scaler",
    "averaged_models",
    "own_class",
    "names_of_a_closure",
    "swapped_memory",
)


@pytest.mark.parametrize(("name", "warmup"), [(each, 3) for each in TRAININGS] + [(each, 0) for each in AT_FIRST])
def test_a_profiled_training_has_the_bits_of_one_that_never_profiled(name: str, warmup: int) -> None:
    named = name != "weights_of_no_module"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "the plan|Detected call|.*total_steps")
        expected = run(TRAININGS[name], warmup, False, named)
        found = run(TRAININGS[name], warmup, True, named)
    for first, second in zip(expected, found, strict=True):
        assert first == second


@pytest.mark.parametrize("name", ["adam", "own_class", "two_models", "OneCycleLR", "state_of_a_module"])
def test_the_models_need_not_be_named(name: str) -> None:
    assert run(TRAININGS[name], 2, False, False) == run(TRAININGS[name], 2, True, False)


def test_a_step_that_fails_is_undone_as_well() -> None:
    trainer = new_trainer()
    trainer.accumulate()
    before = frozen(trainer.told()), frozen(dict(trainer.model.state_dict()))

    def step() -> None:
        trainer.accumulate()
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        bs.profile(step, trainer.model)
    assert (frozen(trainer.told()), frozen(dict(trainer.model.state_dict()))) == before
    assert not _global_optimizer_pre_hooks


def test_an_optimizer_that_nothing_leads_to_is_undone() -> None:
    """It is hidden in an object of a library, and so is its scheduler."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    hidden = itertools.repeat((optimizer, scheduler))
    optimizer.step()

    def step() -> None:
        (model(X) - Y).square().mean().backward()
        first, second = next(hidden)
        first.step()
        second.step()

    with_state = frozen([optimizer.state_dict(), scheduler.state_dict()])
    bs.profile(step, model)
    assert frozen([optimizer.state_dict(), scheduler.state_dict()]) == with_state


@pytest.mark.parametrize("kind", ["generator", "list", "enumerate", "DataLoader", "workers"])
def test_items_that_were_taken_from_an_iterator_are_told_of(kind: str) -> None:
    model = network()
    batches = [X] * 200

    def generate() -> Any:
        for batch in batches:  # noqa: UP028
            yield batch

    loader = torch.utils.data.DataLoader(X.repeat(60, 1), batch_size=16, num_workers=2 if kind == "workers" else 0)
    made: dict[str, Callable[[], Any]] = {
        "generator": generate,
        "list": lambda: iter(batches),
        "enumerate": lambda: (each for each in enumerate(batches)),
        "DataLoader": lambda: iter(loader),
        "workers": lambda: iter(loader),
    }
    iterator = made[kind]()

    def step() -> None:
        batch = next(iterator)
        (model(batch if isinstance(batch, Tensor) else batch[1]) - Y).square().mean().backward()

    with pytest.warns(UserWarning, match=r"takes items from iterator, which cannot be put back: the training misses"):
        bs.profile(step, model)
    next(iterator)


def test_an_iterator_of_the_program_is_put_back() -> None:
    class Batches:
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self) -> Batches:
            return self

        def __next__(self) -> Tensor:
            self.position += 1
            return X * self.position

    model, batches = network(), Batches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bs.profile(lambda: model(next(batches)).sum().backward(), model)
    assert batches.position == 0


def _memoised(kind: str) -> Callable[[int], Tensor]:
    if kind == "method":

        class Drawing:
            @functools.lru_cache(maxsize=4)  # noqa: B019
            def numbers(self, count: int) -> Tensor:
                return torch.randn(count)

        return Drawing().numbers
    cached = functools.cache if kind == "cache" else functools.lru_cache(maxsize=2)
    return cached(torch.randn) if kind == "of torch's" else cached(lambda count: torch.randn(count))


@pytest.mark.parametrize("kind", ["cache", "lru_cache", "method", "of torch's"])
def test_what_a_function_remembers_is_drawn_again(kind: str) -> None:
    found = []
    for is_profiled in (False, True):
        model, drawn = network(), _memoised(kind)

        def step(model: nn.Module = model, drawn: Callable[[int], Tensor] = drawn) -> Tensor:
            loss = (model(X) * drawn(4)).square().sum()
            loss.backward()
            return loss

        if is_profiled:
            bs.profile(lambda: step() and None, model)
        found.append([step().item() for _ in range(3)])
    assert found[0] == found[1]


def test_what_is_added_to_what_a_function_remembers_is_told() -> None:
    model, drawn, sizes = network(), functools.cache(torch.randn), iter(range(4, 100))

    def step() -> None:
        model(X).sum().backward()
        drawn(next(sizes))

    drawn(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        bs.profile(step, model)
    assert any("adds to what functools caches of drawn" in str(each.message) for each in told)


ODD: dict[str, Callable[[], Tensor]] = {
    "COO": lambda: torch.eye(300).to_sparse(),
    "CSR": lambda: torch.eye(300).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(300, 300), 0.1, 0, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(
        torch.randn(9, 9), torch.ones(9), torch.zeros(9), 0, torch.quint8
    ),
    "meta": lambda: torch.empty(300, 300, device="meta"),
    "meta parameter": lambda: nn.Parameter(torch.empty(300, 300, device="meta")),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3, 50), torch.randn(5, 50)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(5, 5)], layout=torch.jagged),
    "in oneDNN's layout": lambda: torch.randn(30, 30).to_mkldnn(),
    "conjugated": lambda: torch.randn(30, 30, dtype=torch.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_any_kind_of_tensor_may_be_reached(kind: str) -> None:
    model, held = network(), [ODD[kind]()]

    def step() -> None:
        assert held
        model(X).sum().backward()

    assert bs.profile(step, model).plain_peak_nbytes > 0


def test_gradients_may_be_sparse() -> None:
    """Those of an embedding, of which rows are told; they are held as what they take."""
    model = nn.Sequential(nn.EmbeddingBag(1000, 32, sparse=True), network())
    optimizer, words = torch.optim.SparseAdam(model[0].parameters()), torch.randint(1000, (16, 9))

    def step() -> None:
        model.zero_grad()
        model(words).sum().backward()
        optimizer.step()

    step()
    before = frozen([model.state_dict(), optimizer.state_dict()])
    profile = bs.profile(step, model)
    assert frozen([model.state_dict(), optimizer.state_dict()]) == before
    assert profile.held_nbytes < 2 * 1000 * 32 * 4


def test_large_data_that_a_step_changes_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "MOST_DATA", 0)
    model, data, counts = network(), torch.randn(500, 32), np.zeros(5000)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = frozen([optimizer.state_dict(), dict(model.state_dict())])

    def step(changes: bool = True) -> None:
        if changes:
            data.add_(1)
        model(data).sum().backward()
        optimizer.step()

    with pytest.raises(
        MeasureError, match=r"undo a step, but it changes data in place, of which no copy .* pass a copy"
    ):
        bs.profile(step, model)
    assert frozen([optimizer.state_dict(), dict(model.state_dict())]) == before
    bs.profile(functools.partial(step, changes=False), model)

    def count() -> None:
        counts[0] += 1
        model(X).sum().backward()

    with pytest.raises(MeasureError, match="it changes counts in place"):
        bs.profile(count, model)


def test_what_lives_outside_of_the_training_is_left_alone() -> None:
    model, lock, done, log = network(), threading.Lock(), queue.Queue(), logging.getLogger("of a test")
    session = bs.Session("lossless", min_nbytes=0)

    class Worker(threading.Thread):
        jobs = 0

    worker = Worker()

    def step() -> None:
        with lock, session:
            loss = model(X).sum()
        loss.backward()
        done.put(1)
        worker.jobs += 1
        log.debug("a step")

    with StepState(step, [model]):
        step()
    assert done.qsize() == 1 and worker.jobs == 1 and session.report().steps == 1


def test_a_rewrite_undoes_what_its_steps_change() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    optimizer.step()
    before = frozen(optimizer.state_dict())

    def step() -> None:
        (model(X) - Y).square().mean().backward()
        optimizer.step()

    with inplace(model, step) as rewrite:
        assert rewrite.steps > 2
    assert frozen(optimizer.state_dict()) == before and all(p.grad is None for p in model.parameters())


def test_steps_between_two_undone_ones_find_what_the_first_has_made() -> None:
    """So a profile sees a step in the middle of a training: an optimizer's memory is not allocated in each step."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    told: queue.Queue[int] = queue.Queue()  # which is not put back

    def step() -> None:
        told.put(len(optimizer.state))
        (model(X) - Y).square().mean().backward()
        optimizer.step()

    bs.profile(step, model)
    sizes = [told.get() for _ in range(told.qsize())]
    assert sizes[0] == 0 and set(sizes[1:]) == {len(list(model.parameters()))}
    assert not optimizer.state and copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.01
    assert all(equal_bits(a, b) for a, b in zip(model.parameters(), network().parameters(), strict=True))


class Sized(nn.Module):
    """Gives what it remembers a size in the first step, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.way = nn.Linear(16, 8), way
        self.register_buffer("peak", torch.tensor([]))
        self.shift, self.aside = nn.Parameter(torch.zeros(0)), [torch.zeros(0)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        most = y.detach().amax(0)
        for given in {"buffer": [self.peak], "list": self.aside}.get(self.way, []):
            if not given.numel():
                given.resize_(most.shape).copy_(most)
        if self.way == "parameter" and not self.shift.numel():
            self.shift.data = most
        if self.way == "another" and not self.peak.numel():
            self.peak = most
        return (y.square().mean() + self.peak.sum() + self.shift.sum() + self.aside[0].sum()).square()


@pytest.mark.parametrize("way", ["buffer", "list", "parameter", "another"])
def test_a_tensor_that_the_first_step_gives_its_size_has_none_again(way: str) -> None:
    def train(model: Sized) -> list[Tensor]:
        found = []
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    model, x = Sized(way), torch.randn(32, 16)
    before = model.peak
    bs.profile(lambda: model(x).backward(), model, min_nbytes=0)
    assert model.peak is before and not model.peak.numel() + model.shift.numel() + model.aside[0].numel()
    assert all(map(equal_bits, train(model), train(Sized(way))))


class Decorated:
    """A function whose class answers for its code, as classes of compiled functions do."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.function = function

    @property
    def __code__(self) -> Any:
        return self.function.__code__

    def __call__(self) -> Tensor:
        return self.function()


drawn = Decorated(lambda: torch.from_numpy(np.random.default_rng(0).standard_normal((16, 32))).float())
default_rng = np.random.default_rng  # of a compiled type, which has a descriptor by the name __code__


def test_functions_of_compiled_types_are_no_trouble() -> None:
    model = network()

    def step() -> None:
        x = drawn() + float(default_rng(0).standard_normal())
        model(x).square().mean().backward()

    assert bs.profile(step, model).plain_peak_nbytes > 0
    assert bs.verify(step)


def test_weights_that_are_results_of_operations_have_no_gradient_to_look_at() -> None:
    """As fast weights are, where a library puts them in the place of parameters."""
    model, fast = network(), network()
    steps = [bs.Budgeted("80%", min_nbytes=0), contextlib.nullcontext()]

    def loss() -> Tensor:
        for name, weight in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            fast.get_submodule(module)._parameters[leaf] = weight * 0.9  # type: ignore[assignment]
        found: Tensor = fast(X).square().mean()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for context in steps:
            for _ in range(8):
                with context:
                    outcome = loss()
                outcome.backward()
        bs.profile(lambda: loss().backward(), fast)
        bs.verify(lambda: loss().backward())
