"""Figures of Gist's paper beside our own: ``python -m studies.gist [--json FILE] [--seconds N]``.

Gist (Jain et al., ISCA 2018) stores activations in fewer bits between forward and backward, and reports a *memory
footprint ratio* (MFR) of five networks at a minibatch of 64, and the time of a step. Three sections:

* networks: stash ratio, MFR, counted peak and time of a step, of the five networks in every stage. The exact stages
  have to compute plain PyTorch's loss and gradients bit for bit before anything is measured.
* layers: of every saved activation of the trained networks its zeros and what it takes as csr, as zvc and as zvc with
  fp8 values, and which of them each policy chose.
* deep: the largest batch of deep ResNets that fits a budget, and how fast it trains.

The networks have their ReLUs in place already, so plain PyTorch has the benefit of that as well. Where a number of the
paper is not known from a source that was read, it is said to be not available.

The file is long because the three sections belong to one result file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

import backstash
from backstash import Session
from backstash.errors import BudgetError
from backstash.planning.measure.record import record
from backstash.planning.model.plan import Plan
from backstash.planning.model.trace import ROLES, Role, Trace
from backstash.planning.run.buckets import Alike
from backstash.planning.search.schedule import memory_footprint_ratio
from backstash.policies import Gist
from bench import step_table
from bench.cases import SEED, Case, Workload, build
from bench.peers import Plain, Stashing, StepPeer
from bench.peers.stash import StashedForward
from bench.results import Results
from bench.rounds import Deadline, Effort, Summary, mib, spread, table
from bench.training import Schedule
from studies import batch_table, layer_table
from studies.batch_table import BatchTable, Question
from studies.layer_table import LayerTable
from tests import networks

FORMAT = 1
"""Version of the JSON's layout."""

NOT_AVAILABLE = "not available"


@dataclass(frozen=True)
class Stage(Stashing):
    """A Session with a policy that has seen a step: in the first one it proves what it will make again.

    Attributes:
        label: the stage's name in the results, where it is not the policy's: the policies of Gist as the paper has
            them, which remake nothing, keep the names of their family.
    """

    label: str = ""

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.label or super().name

    def start(self, workload: Workload) -> StashedForward:
        """One Session for all steps."""
        forward = super().start(workload)
        torch.autograd.backward([forward.loss()])
        return forward


STAGES = (
    Stage(Gist(recompute=False), label="gist_lossless"),
    Stage("lossless_stored"),
    Stage("lossless"),
    *(Stage(Gist(bits, recompute=False), exact=False, label=f"gist_{bits}") for bits in ("fp16", "fp10", "fp8")),
)
"""What is measured beside plain PyTorch: the paper's lossless mode, ours without and with recomputation, and the
paper's reduced precision."""


@dataclass(frozen=True)
class SmallestPlan(Stashing):
    """A Session with the plan of the smallest peak that the planner finds for a network.

    It is made for the batch that is asked for first. Other batches follow it value by value, as new shapes of input do
    when a training is kept within a budget.

    Attributes:
        plans: the plans, by network.
    """

    plans: dict[str, Plan] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """``"plan"``."""
        return "plan"

    def start(self, workload: Workload) -> StashedForward:
        """One Session for all steps, which has seen one."""
        network = workload.case.network
        if network not in self.plans:
            self.plans[network] = _smallest(workload)
        forward = StashedForward(workload, Session(Alike(self.plans[network]), model=workload.model))
        torch.autograd.backward([forward.loss()])
        return forward


def _smallest(workload: Workload) -> Plan:
    """Profiles a step, and asks for a budget that no plan keeps: the error has the smallest plan."""
    profiled = backstash.profile(lambda: torch.autograd.backward([workload.loss()]), model=workload.model)
    try:
        return backstash.plan(profiled, 1)
    except BudgetError as error:
        return cast(Plan, error.plan)


DEEP_STAGES = ("gist_lossless", "lossless", "gist_fp16", "gist_fp8")

MFR_AVERAGE = 1.8
"""What the paper reports for all encodings together, the average over its networks."""

PAPER = {
    "mfr_average": MFR_AVERAGE,
    "mfr_most": 2.0,
    "mfr_most_with_dynamic_allocation_and_optimised_software": 4.1,
    "time_average": 1.04,
    "minibatch": 64,
    "mfr_of_a_network": None,
    "mfr_lossless_average": None,
    "stash_ratio": None,
}
"""What the paper reports, of all encodings together; None: not available to us."""


@dataclass(frozen=True)
class Batch:
    """How many images a step has on CPU.

    Attributes:
        size: the batch.
        why: why it is not the paper's.
    """

    size: int
    why: str = ""


BATCHES = {
    "alexnet": Batch(64),
    "nin": Batch(64),
    "overfeat": Batch(64),
    "vgg16": Batch(16, "a step of 64 images takes 20 s on two cores, and every stage takes six or more"),
    "googlenet": Batch(64),
}
"""The paper's networks, and the batches that fit the default time on two cores; its minibatch has 64 images."""

OTHER_BATCH = Batch(8, "not one of the paper's networks")
QUICK_BATCH = Batch(4, "quick")
QUICK_NETWORKS = ("vgg_small", "resnet_cifar20")

TRAINING = Schedule(steps=12, batch=8, size=112)
QUICK_TRAINING = Schedule(steps=2, batch=4, size=28)

DEEP = tuple(
    Question(f"resnet{3 * sum(blocks) + 2}", 32, 512 << 20, (48, 80), blocks, 16)
    for blocks in ((3, 27, 136, 3), (3, 46, 231, 3), (3, 66, 328, 3), (3, 83, 416, 3))
)
"""ResNets of 509 to 1,517 layers, with the deepest one's share of blocks in each stage. They have a quarter of the
published width, and small images. The batches of the lines are large enough that a step saves more than what a Session
looks at for its bytes alone (Note: [sizes that matter] in capture/learned.py)."""

QUICK_DEEP = (Question("resnet_cifar20", 32, 24 * 2**20, small=(2, 4)),)

LIVE: tuple[Role, ...] = ("stashed", "encoded", "decoded", "recomputed", "immediate", "workspace")
"""Feature maps, gradient maps and workspaces: what grows with the batch, unlike parameters and their gradients."""

SHARES = {"networks": 0.75, "layers": 0.1, "deep": 0.15}
"""The sections, in order, and the share of the time that each gets."""


# -- networks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageRow:
    """One stage of one network.

    Attributes:
        stage: name of the policy, or ``"plain"``.
        exact: whether loss and gradients have the bits of plain's.
        gradient_error: norm of the difference of all gradients over the norm of plain's.
        saved_nbytes: dense bytes of the distinct storages saved, parameters excluded.
        stash_nbytes: bytes held for them.
        ratio: the one over the other; 1 where nobody counts them.
        mfr_static: MFR without parameters and their gradients, with CNTK's static allocator.
        mfr_dynamic: the same with the most bytes alive at once.
        mfr_static_all, mfr_dynamic_all: with parameters and their gradients.
        peak_nbytes: the most bytes alive at once in a real step, above its start.
        peak_ratio: plain's peak over it.
        times_plain: seconds of a step over plain's, round by round.
    """

    stage: str
    exact: bool
    gradient_error: float
    saved_nbytes: int | None
    stash_nbytes: int | None
    ratio: float
    mfr_static: float
    mfr_dynamic: float
    mfr_static_all: float
    mfr_dynamic_all: float
    peak_nbytes: int
    peak_ratio: float
    times_plain: Summary


@dataclass(frozen=True)
class NetworkResult:
    """One network in every stage.

    Attributes:
        network: a key of `networks.NETWORKS`.
        batch: images of a step.
        why: why not the paper's 64, empty where it is.
        case: what the step table says, every round included.
        rows: the stages, plain first; none where the gate failed.
    """

    network: str
    batch: int
    why: str
    case: step_table.CaseResult
    rows: tuple[StageRow, ...] = ()


@dataclass(frozen=True)
class Mean:
    """Geometric means of a stage over the networks.

    Attributes:
        stage: name of the policy.
        networks: how many.
        ratio, mfr_static, mfr_dynamic, mfr_static_all, mfr_dynamic_all, peak_ratio, times_plain: the means.
    """

    stage: str
    networks: int
    ratio: float
    mfr_static: float
    mfr_dynamic: float
    mfr_static_all: float
    mfr_dynamic_all: float
    peak_ratio: float
    times_plain: float


def measure(
    name: str, batch: Batch, stages: Sequence[Stage], effort: Effort, channels_last: bool = False
) -> NetworkResult:
    """Measures one network, unless an exact stage is not exact.

    Args:
        name: a key of `networks.NETWORKS`.
        batch: images of a step.
        stages: what to measure beside plain PyTorch.
        effort: rounds of the timed steps.
        channels_last: as Case has it.
    """
    case = Case(name, name, batch.size, networks.NETWORKS[name].image_size, channels_last)
    deadline = None if effort.deadline is None else effort.deadline.part(0.75)  # the traces come after
    plan = step_table.Plan(Effort(effort.rounds, deadline), resident=False)
    result = step_table.measure(case, "cpu", plan, (Plain(), *stages))
    if result.status != "measured":
        return NetworkResult(name, batch.size, batch.why, result)
    ratios = _footprint_ratios(case, stages)
    plain = result.candidates[0]
    rows = []
    for one in result.candidates:
        static, dynamic, static_all, dynamic_all = ratios[one.name]
        rows.append(
            StageRow(
                stage=one.name,
                exact=one.gate.equal,
                gradient_error=one.gate.error,
                saved_nbytes=one.saved_nbytes,
                stash_nbytes=one.stash_nbytes,
                ratio=one.saved_nbytes / one.stash_nbytes if one.saved_nbytes and one.stash_nbytes else 1.0,
                mfr_static=static,
                mfr_dynamic=dynamic,
                mfr_static_all=static_all,
                mfr_dynamic_all=dynamic_all,
                peak_nbytes=one.peak_nbytes,
                peak_ratio=plain.peak_nbytes / one.peak_nbytes,
                times_plain=one.times_plain,
            )
        )
    return NetworkResult(name, batch.size, batch.why, result, tuple(rows))


def _footprint_ratios(case: Case, stages: Sequence[Stage]) -> dict[str, tuple[float, float, float, float]]:
    """MFR of each stage: static and dynamic without parameters, then with them."""
    workload = build(case, "cpu")

    def step() -> None:
        for parameter in workload.model.parameters():
            parameter.grad = None  # so that a gradient is allocated once, as a static allocator would
        torch.manual_seed(SEED)
        torch.autograd.backward([workload.loss()])

    def ratios(plain: Trace, encoded: Trace, roles: Collection[Role]) -> tuple[float, float]:
        # A static allocator plans by operations. A dynamic one sees each allocation: the temporaries of a convolution's
        # backward take turns, which by operations would be counted together, up to seven of them.
        static = memory_footprint_ratio(plain.by_op(), encoded.by_op(), "groups", roles=roles)
        return static, memory_footprint_ratio(plain, encoded, "dynamic", roles=roles)

    plain = record(step, model=workload.model)
    found = {"plain": (1.0, 1.0, 1.0, 1.0)}
    for stage in stages:
        encoded = record(step, stage.policy, model=workload.model).by_definition()
        found[stage.name] = (*ratios(plain, encoded, LIVE), *ratios(plain, encoded, ROLES))
    return found


def means(results: Iterable[NetworkResult]) -> list[Mean]:
    """Geometric means of each stage over the networks that have it."""
    groups: dict[str, list[StageRow]] = {}
    for result in results:
        for row in result.rows:
            groups.setdefault(row.stage, []).append(row)
    return [
        Mean(
            stage,
            len(rows),
            *(
                statistics.geometric_mean(values)
                for values in (
                    [row.ratio for row in rows],
                    [row.mfr_static for row in rows],
                    [row.mfr_dynamic for row in rows],
                    [row.mfr_static_all for row in rows],
                    [row.mfr_dynamic_all for row in rows],
                    [row.peak_ratio for row in rows],
                    [row.times_plain.median for row in rows],
                )
            ),
        )
        for stage, rows in groups.items()
        if stage != "plain"
    ]


HEADER = (
    "stage",
    "bits",
    "grad error",
    "stash MiB",
    "ratio",
    "MFR static",
    "dynamic",
    "static, all",
    "dynamic, all",
    "peak MiB",
    "ratio",
    "x plain time",
)

LEGEND = """\
bits: loss and gradients against plain's; grad error: norm of the difference over the norm. stash: held between forward
and backward, parameters excluded; ratio: saved dense bytes over it. MFR: footprint of the plain step over this one's,
feature maps, gradient maps and workspaces; all: parameters and their gradients too, which outweigh the rest at a small
batch. static: CNTK's allocator, by operations; dynamic: most bytes alive at once, living as Gist defines it. peak:
counted in a real step above its start, decode buffers included; ratio: plain's over it. Times: median [quartiles]."""


def show(result: NetworkResult) -> str:
    """The table of one network."""
    title = f"{result.case.case}" + (f", not the paper's 64: {result.why}" if result.why else ", as the paper")
    if not result.rows:
        return f"{title}: {result.case.status.upper()}: {result.case.reason}"
    facts = f"{result.case.data}; {result.case.rounds} rounds; parameters {mib(result.case.parameter_nbytes)} MiB"
    return "\n".join([title, facts, table(HEADER, map(_line, result.rows))])


def _line(row: StageRow) -> tuple[str, ...]:
    return (
        row.stage,
        "equal" if row.exact else "differ",
        "0" if row.exact else f"{row.gradient_error:.1e}",
        mib(row.stash_nbytes),
        f"{row.ratio:.2f}",
        f"{row.mfr_static:.2f}",
        f"{row.mfr_dynamic:.2f}",
        f"{row.mfr_static_all:.2f}",
        f"{row.mfr_dynamic_all:.2f}",
        mib(row.peak_nbytes),
        f"{row.peak_ratio:.2f}",
        spread(row.times_plain, digits=3),
    )


def show_means(found: Sequence[Mean]) -> str:
    """The geometric means beside the paper's averages."""
    header = ("stage", "networks", "ratio", "MFR static", "paper", "dynamic", "paper", "x plain time", "paper")
    lines = [_mean_line(one) for one in found]
    note = (
        "The paper's numbers are averages over its networks with all of its encodings, on a GPU. 4.1 is the most with\n"
        "dynamic allocation and optimised software. Its lossless mode and single networks: not available."
    )
    return "\n".join(["geometric means", table(header, lines), note])


def _mean_line(one: Mean) -> tuple[str, ...]:
    if one.stage == "gist_lossless":
        paper = (NOT_AVAILABLE,) * 3
    elif one.stage.startswith("gist_"):
        paper = (f"{MFR_AVERAGE}, up to 2", "up to 4.1", f"{PAPER['time_average']}")
    else:
        paper = ("-",) * 3
    return (
        one.stage,
        str(one.networks),
        f"{one.ratio:.2f}",
        f"{one.mfr_static:.2f}",
        paper[0],
        f"{one.mfr_dynamic:.2f}",
        paper[1],
        f"{one.times_plain:.3f}",
        paper[2],
    )


# -- all of it ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The command line, checked.

    Attributes:
        json: the file to write, None for none.
        seconds: for everything.
        quick: small networks and images, which only show that everything runs.
        names: keys of `networks.NETWORKS`.
        batch: images of a step for all networks, None for those of `BATCHES`.
        sections: keys of `SHARES`.
        channels_last: the networks' layout; else contiguous, which convolutions on CPU make reordered copies of.
        resume: whether stages of deep networks that the file has are not measured again.
    """

    json: Path | None
    seconds: float
    quick: bool
    names: tuple[str, ...]
    batch: int | None
    sections: tuple[str, ...]
    channels_last: bool
    resume: bool

    def batch_of(self, name: str) -> Batch:
        """Images of a step of one network."""
        if self.batch is not None:
            return Batch(self.batch, "" if self.batch == PAPER["minibatch"] else "asked for")
        return QUICK_BATCH if self.quick else BATCHES.get(name, OTHER_BATCH)


def parse(arguments: Sequence[str] | None) -> Asked:
    """The command line as `Asked`; ends the program with a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.gist", description="Gist's measurements, beside backstash's."
    )
    parser.add_argument("--json", type=Path, help="the file to write; a figure is put beside it (default: none)")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for everything (default: 1500)")
    parser.add_argument("--quick", action="store_true", help="small networks: shows that everything runs")
    parser.add_argument("--networks", help=f"which, comma-separated (default: {','.join(BATCHES)})")
    parser.add_argument("--batch", type=int, help="images of a step, for all networks (default: see BATCHES)")
    parser.add_argument("--channels-last", action="store_true", help="the networks in channels_last (default: NCHW)")
    parser.add_argument("--resume", action="store_true", help="go on with the deep networks that the file has")
    parser.add_argument("--only", help=f"sections to run, of {','.join(SHARES)}")
    asked = parser.parse_args(arguments)
    names = tuple(asked.networks.split(",")) if asked.networks else QUICK_NETWORKS if asked.quick else tuple(BATCHES)
    sections = tuple(asked.only.split(",")) if asked.only else tuple(SHARES)
    for what, given, known in (("network", names, networks.NETWORKS), ("section", sections, SHARES)):
        for name in given:
            if name not in known:
                parser.error(
                    f"the {what} {name!r} was asked for; there is no such {what}; use some of {', '.join(known)}"
                )
    if asked.batch is not None and asked.batch < 1:
        parser.error(f"--batch {asked.batch} was asked for; it has to be at least 1")
    return Asked(
        asked.json, asked.seconds, asked.quick, names, asked.batch, sections, asked.channels_last, asked.resume
    )


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Measures everything, prints tables, writes the JSON and the figure; returns 1 where a gate failed, else 0."""
    asked = parse(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler that counts bytes else prints two lines per step
    deadline = Deadline.after(asked.seconds)
    facts: dict[str, Any] = {"quick": asked.quick, "complete": False, "seconds_asked": asked.seconds, "paper": PAPER}
    results = Results("studies.gist", asked.json, arguments, format=FORMAT, resume=asked.resume, **facts)
    measured: list[NetworkResult] = []
    for section in (name for name in SHARES if name in asked.sections):
        left = [name for name in SHARES if name in asked.sections and (name not in results.found or name == "deep")]
        part = deadline.part(SHARES[section] / sum(SHARES[name] for name in left))
        print(f"\n== {section} ==\n", flush=True)
        if section == "networks":
            for one in _networks(asked, stages, part):
                measured.append(one)
                results.write(networks=measured)
            results.write(means=means(measured))
            print(show_means(means(measured)), flush=True)
        elif section == "layers":
            results.write(layers=_layers(asked, stages, part))
        else:
            known = {
                table["question"]["network"]: batch_table.table_of(table) for table in results.found.get("deep", ())
            }
            for tables in _deep(asked, stages, part, known):
                results.write(deep=tables)
    results.write(complete=True)
    print(f"\n{results.close()}")
    if asked.json is not None and any(one.rows for one in measured):
        print(_draw(measured, asked.json.with_suffix(".png"), str(results.machine)))
    return int(any(one.case.status == "failed" for one in measured))


def _networks(asked: Asked, stages: Sequence[Stage], deadline: Deadline) -> Iterator[NetworkResult]:
    print(LEGEND, end="\n\n", flush=True)
    for index, name in enumerate(asked.names):
        effort = Effort(2 if asked.quick else 9, deadline.part(1 / (len(asked.names) - index)))
        one = measure(name, asked.batch_of(name), stages, effort, asked.channels_last)
        print(show(one), end="\n\n", flush=True)
        yield one


def _layers(asked: Asked, stages: Sequence[Stage], deadline: Deadline) -> list[LayerTable]:
    schedule = QUICK_TRAINING if asked.quick else TRAINING
    policies = {stage.name: stage.policy for stage in stages}
    tables = [
        layer_table.measure(name, policies, schedule, deadline.part(1 / (len(asked.names) - index)))
        for index, name in enumerate(asked.names)
    ]
    print(layer_table.show(tables), flush=True)
    return tables


def _deep(
    asked: Asked, stages: Sequence[Stage], deadline: Deadline, known: Mapping[str, BatchTable]
) -> Iterator[list[BatchTable]]:
    """Yields all tables whenever a stage was measured, those of an earlier run among them."""
    questions = QUICK_DEEP if asked.quick else DEEP
    peers: tuple[StepPeer, ...] = (Plain(), *(stage for stage in stages if stage.name in DEEP_STAGES))
    found = dict(known)
    # Plans come last: to make one takes as long as many steps.
    turns = [(question, these) for these in (peers, (*peers, SmallestPlan("plan"))) for question in questions]
    for index, (question, these) in enumerate(turns):
        part = deadline.part(1 / (len(turns) - index))

        def effort(stages_left: int, part: Deadline = part) -> Effort:
            return Effort(1 if asked.quick else 5, part.part(1 / stages_left))

        for result in batch_table.measure(question, these, effort, found.get(question.network)):
            found[question.network] = result
            yield list(found.values())
        print(batch_table.show(found[question.network]), end="\n\n", flush=True)


def _draw(results: Sequence[NetworkResult], path: Path, made_on: str) -> str:
    """Writes the figure and says so, or says why there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no figure: matplotlib is not installed; run: pip install 'backstash[plot]'"
    from studies import gist_chart

    gist_chart.chart(results, means(results), MFR_AVERAGE, made_on).savefig(path, dpi=150)
    return f"the figure is in {path}"


if __name__ == "__main__":
    raise SystemExit(main())
