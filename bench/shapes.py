"""Plans of lengths that were never profiled, beside their steps: ``python -m bench.shapes [--lengths N]``.

Three or four lengths of each program are profiled. Then plans are made at once for each of some random lengths: one for
its first step, in which calls are proven, and one for the steps after it. Budgets are drawn between the least for which
there is a first step and the plain peak. Steps run under the plans, and their bytes are counted. Reported is how many
steps passed the budget, how far predictions lie above what was reached, and, for some lengths, the time of the plan
beside that of a plan from a profile of its own, both by the times of that profile. Bytes are exact on a loaded machine.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.planning.model.peak import PeakModel
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.model.shapes import ShapeFamily
from backstash.planning.search.planner import ROUNDING, Planner
from backstash.report.meter import CountedPeak
from bench.results import Results
from bench.rounds import table

FORMAT = 2
"""Version of the JSON's layout."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Program:
    """A network and the steps of any length.

    Attributes:
        model: the network.
        step: makes a step of a length.
        sizes: the sizes of that step's inputs.
        profiled: the lengths that are profiled.
        drawn: from which other lengths are drawn.
    """

    model: nn.Module
    step: Callable[[int], Step]
    sizes: Callable[[int], tuple[int, ...]]
    profiled: tuple[int, ...]
    drawn: range


class Convolutions(nn.Sequential):
    """Two convolutions, each with a batch norm and a relu."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Two levels down and up again, with what was there beside what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(3, 16), Convolutions(16, 32)])
        self.lowest = Convolutions(32, 64)
        self.larger = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.up = nn.ModuleList([Convolutions(64, 32), Convolutions(32, 16)])
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a number for each pixel and class."""
        left = []
        for block in self.down:
            x = block(x)
            left.append(x)
            x = F.max_pool2d(x, 2)
        x = self.lowest(x)
        for larger, block in zip(self.larger, self.up, strict=True):
            x = block(torch.cat([larger(x), left.pop()], 1))
        found: Tensor = self.last(x)
        return found


class Detector(nn.Module):
    """A pyramid of features, and for each place of each level some classes and a box."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Convolutions(3, 32), Convolutions(32, 64), Convolutions(64, 64)])
        self.lateral = nn.ModuleList([nn.Conv2d(64, 32, 1), nn.Conv2d(64, 32, 1)])
        self.head = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3 * 9, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the rows of all levels, [N, places, 9]."""
        levels = []
        for stage in self.stages:
            x = F.max_pool2d(stage(x), 2)
            levels.append(x)
        top = self.lateral[1](levels[2])
        below = self.lateral[0](levels[1]) + F.interpolate(top, scale_factor=2)
        rows = [self.head(each).permute(0, 2, 3, 1).reshape(len(x), -1, 9) for each in (below, top)]
        return torch.cat(rows, 1)


def _llama() -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return _text(model, False)


def _bert() -> Program:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes["attn_implementation"] = "eager"  # which saves the scores
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4))
    return _text(model, True)


def _text(model: nn.Module, has_padding: bool) -> Program:
    def step(length: int) -> Step:
        words = torch.randint(0, 512, (4, length))
        kept = torch.ones(4, length, dtype=torch.long)
        kept[1:, length - length // 4 :] = 0
        more = {"attention_mask": kept} if has_padding else {}
        return lambda: model(input_ids=words, labels=words, **more).loss.backward()

    return Program(model, step, lambda length: (4, length), (64, 128, 256), range(64, 257))


def _images(model: nn.Module, per_pixel: bool) -> Program:
    def step(width: int) -> Step:
        x, y = torch.randn(4, 3, width, width), torch.randint(0, 4, (4, width, width))
        if per_pixel:
            return lambda: F.cross_entropy(model(x), y).backward()
        return lambda: model(x).square().mean().backward()

    return Program(model, step, lambda width: (4, 3, width, width), (32, 64, 128), range(32, 129, 8))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "Llama-like": _llama,
    "BERT with padding": _bert,
    "U-Net": lambda: _images(UNet(), True),
    "detector": lambda: replace(_images(Detector(), False), profiled=(32, 64, 96, 128)),
}


@dataclass(frozen=True)
class Row:
    """What became of one program's plans.

    Attributes:
        name: the program.
        values: how many values are planned.
        lengths: how many lengths were drawn, and for how many there was a plan.
        above: first steps of a length that passed the budget, and later ones that did.
        least: the least peak of a first step over that of later ones, the median.
        first_room: what first steps reached below the predicted peak, as a share of it: least, median and most.
        room: the same of later steps.
        slower: the plan's time over that of a plan of its own, by the times of a profile of its own: median and most.
        milliseconds: time of the processor to make a plan, the median.
    """

    name: str
    values: int
    lengths: tuple[int, int]
    above: tuple[int, int]
    least: float
    first_room: tuple[float, float, float]
    room: tuple[float, float, float]
    slower: tuple[float, float]
    milliseconds: float


def measure(name: str, lengths: int, owned: int, seed: int = 0) -> Row:
    """Profiles three lengths of a program, and runs steps of others under plans.

    Args:
        name: of :data:`PROGRAMS`.
        lengths: how many are drawn.
        owned: how many of them are profiled as well, for a plan of their own.
        seed: of the lengths and budgets.
    """
    torch.manual_seed(0)
    program, draw = PROGRAMS[name](), random.Random(seed)
    program.model.train()
    profiles = [bs.profile(program.step(length), program.model) for length in program.profiled]
    planners = [Planner(StepProfile.from_json(profile.to_json())) for profile in profiles]  # that runs no steps
    for planner in planners:
        assert planner.solutions
    family = ShapeFamily(
        [program.sizes(length) for length in program.profiled], [planner.profile for planner in planners]
    )
    program.step(program.profiled[0])()  # from now on gradients are there
    rooms: tuple[list[float], list[float]] = ([], [])
    least, slower, times, above, planned = [], [], [], [0, 0], 0
    for number in range(lengths):
        length = draw.choice(program.drawn)
        began = time.process_time()
        predicted = family.profile(program.sizes(length))
        if predicted is None:
            continue
        planner = Planner(predicted, others=planners)
        low, plain = planner.least_first_nbytes, predicted.plain_peak_nbytes
        budget = int(low + draw.uniform(0.0, 0.95) * (plain - low))
        first_plan, first_nbytes = planner.first_plan(budget)
        plan = planner.plan_so_far(budget - ROUNDING)
        times.append(time.process_time() - began)
        planned += 1
        least.append(low / planner.known_solutions[0].peak_nbytes)
        first = _reached(program, length, first_plan)
        if plan.decisions != first_plan.decisions:
            _reached(program, length, plan)  # proves what only this plan does
        reached = _reached(program, length, plan)
        above[0] += first > budget
        above[1] += reached > budget
        rooms[0].append(1 - first / first_nbytes)
        rooms[1].append(1 - reached / (plan.peak_nbytes + ROUNDING))
        if number < owned:
            slower.append(_slower(bs.profile(program.step(length), program.model), plan))
    first_room, room = ((min(each), median(each), max(each)) for each in (found or [0.0] for found in rooms))
    found = median(slower or [1.0]), max(slower, default=1.0)
    counts = (lengths, planned), (above[0], above[1]), median(least or [1.0])
    return Row(name, len(profiles[-1].values), *counts, first_room, room, found, 1000 * median(times or [0.0]))


def _reached(program: Program, length: int, plan: Plan) -> int:
    """The counted peak of a step under a plan, with gradients there."""
    step = program.step(length)
    with CountedPeak() as counted, bs.Session(plan, model=program.model):
        step()
    return counted.peak_nbytes


def _slower(own: StepProfile, plan: Plan) -> float:
    """The time of a plan over that of a plan that was made of the step's own profile, within what the former takes."""
    ways = {each.key: each.choice for each in plan.decisions}
    names = [[choice.name for choice in value.choices] for value in own.values]
    asked = [ways.get(value.key, "keep") for value in own.values]
    chosen = [known.index(way) if way in known else 0 for known, way in zip(names, asked, strict=True)]
    found = PeakModel(own).evaluate(chosen)
    best = Planner(StepProfile.from_json(own.to_json())).at_most(max(found.peak_nbytes, plan.peak_nbytes))
    return found.seconds / best.seconds


def rows(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's rows."""
    return [
        (
            each.name,
            str(each.values),
            f"{each.lengths[1]} of {each.lengths[0]}",
            str(each.above[0]),
            str(each.above[1]),
            f"{each.least:.2f}",
            " / ".join(f"{share:.1%}" for share in each.first_room),
            " / ".join(f"{share:.1%}" for share in each.room),
            " / ".join(f"{share:.3f}" for share in each.slower),
            f"{each.milliseconds:.0f}",
        )
        for each in found
    ]


HEADER = (
    "program",
    "values",
    "planned",
    "first above",
    "later above",
    "least, first / later",
    "first room, least / median / most",
    "room",
    "time / own",
    "CPU ms",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m bench.shapes", description=(__doc__ or "").strip())
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--lengths", type=int, default=200, help="how many lengths of each program")
    parser.add_argument("--owned", type=int, default=10, help="of how many of them a profile of their own is taken")
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), help="which programs")
    asked = parser.parse_args(arguments)
    results = Results("bench.shapes", asked.json, arguments, format=FORMAT)
    warnings.simplefilter("ignore")
    found: list[Row] = []
    for name in asked.programs:
        found.append(measure(name, asked.lengths, asked.owned))
        print(rows(found)[-1], flush=True)
        results.write(programs=found)
    print(table(HEADER, rows(found)))
    print(results.close())


if __name__ == "__main__":
    main()
