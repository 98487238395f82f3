"""Trains within budgets in random loops: ``python -m tests.fuzz.budgets``.

What differs from loop to loop: what runs before training, how many backward passes a step has and in which order,
parametrizations of the weights, and the budget. The weights have to have the same bits as in plain PyTorch. No budget
is refused that plain's own peak fits into, and once it has settled a budget is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from backstash.bits import equal_bits
from backstash.errors import BudgetError
from backstash.planning.run.budgeted import Budgeted
from backstash.report.meter import CountedPeak

MOST_STEPS = 600
"""After how many steps a loop has settled, however long its measurements take."""

WIDTH, ROWS = 32, 256

Step = Callable[[], None]
Program = Callable[[], tuple[Callable[[int], None], list[nn.Parameter]]]
"""Makes models, runs them before training, and returns what runs a number of steps, and the weights."""


def tower(last: int = WIDTH, wrap: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> nn.Sequential:
    blocks = wrap(nn.Linear(WIDTH, 4 * WIDTH)), nn.GELU(), wrap(nn.Linear(4 * WIDTH, WIDTH)), nn.ReLU()
    return nn.Sequential(*blocks, nn.Linear(WIDTH, last))


def rows(width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width)


def loop(models: list[nn.Module], passes: Callable[[], Iterator[tuple[Tensor, int]]]) -> tuple[Any, list[nn.Parameter]]:
    """What runs so many steps, each of which yields losses with the number of the model that they train."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]

    def run(steps: int) -> None:
        for _ in range(steps):
            for loss, number in passes():
                loss.backward()
                del loss
                if number >= 0:
                    optimizers[number].step()
                    for model in models:
                        for weight in model.parameters():
                            if weight.grad is not None:
                                weight.grad.zero_()

    return run, [weight for model in models for weight in model.parameters()]


def adversarial(critics: int, before: Callable[..., object], wrap: Any = lambda layer: layer) -> Program:
    def make() -> tuple[Any, list[nn.Parameter]]:
        critic, generator = tower(1, wrap), nn.Sequential(nn.Linear(16, WIDTH), tower())
        before(critic, rows())

        def passes() -> Iterator[tuple[Tensor, int]]:
            for _ in range(critics):
                made = generator(rows(16)).detach()
                yield (critic(made) - critic(rows())).mean(), 0
            yield -critic(generator(rows(16))).mean(), 1

        return loop([critic, generator], passes)

    return make


def single(before: Callable[..., object], wrap: Any = lambda layer: layer, accumulate: int = 1) -> Program:
    def make() -> tuple[Any, list[nn.Parameter]]:
        model = tower(1, wrap)
        before(model, rows())

        def passes() -> Iterator[tuple[Tensor, int]]:
            for number in range(accumulate):
                yield model(rows()).square().mean() / accumulate, 0 if number == accumulate - 1 else -1

        return loop([model], passes)

    return make


def nothing(model: nn.Module, x: Tensor) -> None:
    """Runs nothing."""


def probe(model: nn.Module, x: Tensor) -> None:
    """Looks at the shape of a result, with gradients on."""
    assert model(x[:2]).shape[0] == 2


def check(model: nn.Module, x: Tensor) -> None:
    """Goes backward once, as a sanity check does."""
    model(x).abs().sum().backward()
    for weight in model.parameters():
        weight.grad = None


def find_rate(model: nn.Module, x: Tensor) -> None:
    """Goes backward a few times on batches of other sizes."""
    for size in (2, 4, 8):
        check(model, x[:size])


def summarise(model: nn.Module, x: Tensor) -> None:
    """Runs each layer by itself, and all of them with hooks."""
    hooks = [module.register_forward_hook(lambda *args: None) for module in model.modules()]
    for module in model.children():
        with contextlib.suppress(RuntimeError):
            module(x)
    model(x)
    for hook in hooks:
        hook.remove()


def average(model: nn.Module, x: Tensor) -> None:
    """Runs a copy, as a warm-up of averaged weights does."""
    torch.optim.swa_utils.AveragedModel(model)(x)


def lazy(layer: nn.Linear) -> nn.Module:
    return nn.LazyLinear(layer.out_features)


def run_lazy(model: nn.Module, x: Tensor) -> None:
    """Lets lazy layers learn their shapes."""
    model(x[:1])


def actor_critic() -> tuple[Any, list[nn.Parameter]]:
    actor, critic = tower(4), tower(1)

    def passes() -> Iterator[tuple[Tensor, int]]:
        seen = rows()
        value = critic(seen)
        yield F.mse_loss(value, rows(1)), 1
        yield -(actor(seen).log_softmax(-1)[:, 0] * value.detach()[:, 0]).mean(), 0

    return loop([actor, critic], passes)


def losses() -> tuple[Any, list[nn.Parameter]]:
    trunk, first, second = tower(), tower(1), tower(4)

    def passes() -> Iterator[tuple[Tensor, int]]:
        shared = trunk(rows())
        yield first(shared.detach()).square().mean(), 1
        yield second(shared.detach()).square().mean(), 2
        yield shared.abs().mean(), 0

    return loop([trunk, first, second], passes)


def turns(pattern: str) -> Program:
    """Two models whose passes come in that order."""

    def make() -> tuple[Any, list[nn.Parameter]]:
        models: list[nn.Module] = [tower(1), nn.Sequential(tower(), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Softplus())]

        def passes() -> Iterator[tuple[Tensor, int]]:
            for letter in pattern:
                if letter == "e":  # an evaluation between
                    with torch.no_grad():
                        models[0](rows())
                    continue
                number = "ab".index(letter)
                yield models[number](rows()).square().mean(), number

        return loop(models, passes)

    return make


PROGRAMS: dict[str, tuple[Program, int]] = {
    "gan": (adversarial(1, nothing), 2),
    "gan, spectral norm": (adversarial(1, nothing, spectral_norm), 2),
    "gan, spectral norm, probe": (adversarial(1, probe, spectral_norm), 2),
    "gan, checked": (adversarial(1, check), 2),
    "gan, rates": (adversarial(1, find_rate), 2),
    "gan, summary": (adversarial(1, summarise), 2),
    "gan, 2 critics": (adversarial(2, nothing), 3),
    "gan, 2 critics, spectral norm": (adversarial(2, summarise, spectral_norm), 3),
    "gan, 3 critics, weight norm": (adversarial(3, nothing, weight_norm), 4),
    "spectral norm": (single(nothing, spectral_norm), 1),
    "orthogonal": (single(probe, orthogonal), 1),
    "lazy": (single(run_lazy, lazy), 1),
    "probe": (single(probe), 1),
    "check": (single(check), 1),
    "rates": (single(find_rate), 1),
    "summary": (single(summarise), 1),
    "average": (single(average), 1),
    "accumulate 4": (single(nothing, accumulate=4), 1),
    "accumulate 3, checked": (single(check, accumulate=3), 1),
    "actor and critic": (actor_critic, 2),
    "three losses": (losses, 3),
    "3:2": (turns("aaabb"), 5),
    "2:1 with evaluation": (turns("aaeb"), 3),
    "turns of turns": (turns("abbabaa"), 7),
}
"""Programs, and the backward passes of their steps."""


def trained(program: Program, context: AbstractContextManager[Any], steps: int) -> tuple[list[Tensor], int, int]:
    """The weights after some steps, the counted peak of the last one, and the number of the others.

    Within a budget more steps are run until nothing is measured any more.
    """
    torch.manual_seed(0)
    with context:
        run, weights = program()
        run(steps)
        while isinstance(context, Budgeted) and not context.is_quiet and steps < MOST_STEPS:
            run(1)
            steps += 1
        with CountedPeak() as counted:
            run(1)
    return [weight.detach() for weight in weights], counted.peak_nbytes, steps


def assert_keeps(program: Program, share: int, period: int | None, steps: int) -> Budgeted:
    """Trains within a share of the plain peak: bits are plain's, and once it has settled the budget is kept."""
    run = Budgeted(f"{share}%", min_nbytes=512)
    found, reached, steps = trained(program, run, steps)
    run.close()
    expected, plain, _ = trained(program, contextlib.nullcontext(), steps)
    assert all(equal_bits(x, y) for x, y in zip(expected, found, strict=True)), "other bits"
    assert period is None or run.period == period, f"a period of {run.period}"
    assert run.found.plan is not None, f"no plan after {steps} steps: {run.found}"
    saved = run.found.plain_nbytes - run.found.budget_nbytes
    assert reached <= plain - saved + 0.02 * plain, (reached, plain, run.found)
    assert not torch.autograd._profiler_enabled()
    return run


BEFORE = (nothing, probe, check, find_rate, summarise, average)


def drawn(seed: int) -> tuple[Program, int, str]:
    """A random loop, the share of the plain peak that it may take, and its description."""
    draw = random.Random(seed)
    before, share = draw.choice(BEFORE), draw.choice((80, 85, 90, 95, 100, 110))
    wrap = draw.choice((_as_it_is, _as_it_is, spectral_norm, weight_norm))
    kind = draw.randrange(4)
    names = f"{before.__name__}, {getattr(wrap, '__name__', wrap)}, {share}%"
    if kind == 0:
        critics = draw.randint(1, 6)
        return adversarial(critics, before, wrap), share, f"{critics} critics, {names}"
    if kind == 1:
        accumulate = draw.randint(1, 4)
        return single(before, wrap, accumulate), share, f"{accumulate} accumulated, {names}"
    if kind == 2:
        pattern = "".join(draw.choice("aabbe") for _ in range(draw.randint(1, 7))) + draw.choice("ab")
        return turns(pattern), share, f"turns {pattern}, {share}%"
    chosen = draw.choice((actor_critic, losses))
    return chosen, share, f"{chosen.__name__}, {share}%"


def _as_it_is(layer: nn.Linear) -> nn.Module:
    return layer


def failure(seed: int, steps: int = 16) -> str:
    """Runs a random loop; returns what was wrong with it, or "" if nothing was."""
    program, share, text = drawn(seed)
    try:
        assert_keeps(program, share, None, steps)
    except BudgetError as error:
        is_wrong = share >= 100 or error.smallest_nbytes > getattr(error.plan, "plain_peak_nbytes", 0)
        return f"seed {seed}: {text}: {error}" if is_wrong else ""
    except AssertionError as error:
        return f"seed {seed}: {text}: {error}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs loops until the time is up; returns 0 if none failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.budgets", description=__doc__)
    parser.add_argument("--loops", type=int, default=1000, help="how many to run at most (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first loop (default: %(default)s)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end, number, failures = time.monotonic() + 60 * asked.minutes, 0, 0
    while number < asked.loops and time.monotonic() < end:
        found = failure(asked.seed + number)
        number += 1
        if found:
            failures += 1
            print(found, flush=True)
    print(f"{number} loops from seed {asked.seed} on, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
