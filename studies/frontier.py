"""Peak against the time of a step: ``python -m studies.frontier [--json FILE] [--resume] [--compile]``.

For each network: plain PyTorch; ``torch.utils.checkpoint`` around each block, every second block, sqrt(n) blocks, and
nested; a checkpoint that saves the results of products; saved tensors on the host (``save_on_cpu``); with ``--compile``
the compiler's budgets for activations; the policy ``lossless``; and plans for eight budgets, from 90 % of plain's peak
down to the smallest one for which there is a plan, and for the least peak of the checkpoints. Where the profile offers
bounded choices or offload, there are plans with them for three budgets.

1. The gate: the gradients of each exact candidate have the bits of plain's.
2. The peak of each candidate is counted in a step of its own, above what is held before the step; gradients are there.
   In another step the growth of the process's resident high-water mark is read, after freed memory was given back.
3. The rounds are interleaved: every candidate once per round, each round in another order.

Networks are measured one after the other, and each one that is complete is in the JSON: ``--resume`` goes on behind it.
Beside the JSON there is a chart of each network.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import backstash as bs
from backstash.errors import BudgetError
from backstash.planning.measure.record import record
from backstash.planning.model.problem import StepProfile
from backstash.planning.search.planner import Planner
from backstash.report import meter
from backstash.stash import buffers
from bench import cases, steptime
from bench.cases import SEED, Case, Workload, image_batch
from bench.machine import load
from bench.results import Results, plain
from bench.rounds import Deadline, Effort, Summary, interleave, mib, spread, summarise, table
from bench.step_table import give_back, uncollected
from studies import frontier_ways
from tests.networks.unet import UNet

FORMAT = 2
"""Version of the JSON's layout."""

BUDGETS = 8
"""How many budgets there are plans for, from :data:`LARGEST` of plain's peak down to the smallest."""

LARGEST = 0.9

CASES = (
    Case("resnet50", "resnet50", 8, 224, share=2.0),
    Case("gpt2", "gpt2", 2, 512, share=1.5, needs="transformers"),
    Case("llama", "llama", 2, 512, share=1.5, needs="transformers"),
    Case("vgg16", "vgg16", 4, 224, share=2.0),
    Case("vit_b16", "vit_b16", 4, 224, share=1.5, needs="transformers"),
    Case("convnext_tiny", "convnext_tiny", 4, 224, needs="transformers"),
    Case("unet", "unet", 2, 256),
)


@dataclass(frozen=True)
class Row:
    """One candidate on one network.

    Attributes:
        candidate: its name.
        family: what it is one of: see `studies.frontier_chart`.
        budget_nbytes: for a plan, its budget; else None.
        predicted_nbytes: for a plan, the peak that it predicts; else None.
        peak_nbytes: the counted peak above what is held before the step.
        resident_nbytes: growth of the resident high-water mark in a step; None where the system does not tell.
        seconds: wall time of a step.
        times_plain: the same over plain's in the same round.
        predicted_times_plain: for a plan, the predicted time over plain's; else None.
    """

    candidate: str
    family: str
    budget_nbytes: int | None
    predicted_nbytes: int | None
    peak_nbytes: int
    resident_nbytes: int | None
    seconds: Summary
    times_plain: Summary
    predicted_times_plain: float | None


@dataclass(frozen=True)
class Measured:
    """All candidates on one network.

    Attributes:
        case: the network, and the batch that it was trained on.
        profile_seconds: time to take the profile.
        plan_seconds: time to make all plans, rehearsals included.
        smallest_nbytes: the smallest budget for which there is a plan.
        load_before, load_after: load averages of the machine, 1, 5 and 15 minutes.
        rows: the results, plain first.
    """

    case: Case
    profile_seconds: float
    plan_seconds: float
    smallest_nbytes: int
    load_before: tuple[float, ...]
    load_after: tuple[float, ...]
    rows: tuple[Row, ...]


@dataclass(eq=False)
class Candidate(steptime.Candidate):
    """A way to run a step.

    Attributes:
        family: as in Row.
        plan: the plan that it runs under, if there is one.
        is_exact: whether its gradients have to have the bits of plain's.
    """

    family: str = "plain"
    plan: bs.Plan | None = None
    is_exact: bool = True


def build(case: Case) -> Workload:
    """Makes a network, its gradients and a batch, the same at every call."""
    if case.network == "unet":
        return _unet(case)
    if case.network == "llama":
        return _llama(case)
    return cases.build(case, "cpu")


def _unet(case: Case) -> Workload:
    torch.manual_seed(SEED)
    model = UNet()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    data, images, _ = image_batch(case.batch, case.size)
    labels = torch.randint(4, (case.batch, case.size, case.size))

    def loss() -> Tensor:
        return functional.cross_entropy(model(images), labels)

    return Workload(case, model, "cpu", data, loss, loss, "9 blocks")


def _llama(case: Case) -> Workload:
    """A Llama of 4 layers, 512 wide, with 8,192 words: the sizes of the step table's GPT-2."""
    import transformers

    torch.manual_seed(SEED)
    names: Any = transformers
    config = names.LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=case.size,
        use_cache=False,
    )
    model: Any = names.LlamaForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(config.vocab_size, (case.batch, case.size))
    following = functional.pad(tokens[:, 1:], (0, 1), value=-100).flatten()

    def loss() -> Tensor:
        return functional.cross_entropy(model(tokens).logits.flatten(0, 1), following)

    return Workload(case, model, "cpu", "random tokens", loss, loss, "4 layers")


@dataclass(frozen=True)
class Planned:
    """The plans of a network.

    Attributes:
        candidates: by name.
        profile_seconds, plan_seconds, smallest_nbytes: as in Measured.
    """

    candidates: dict[str, Candidate]
    profile_seconds: float
    plan_seconds: float
    smallest_nbytes: int


def others(workload: Workload, compile: bool) -> dict[str, Candidate]:
    """All candidates but plans, plain first."""
    found = {
        "plain": Candidate(nullcontext),
        "plain again": Candidate(nullcontext),
        "save_on_cpu": Candidate(torch.autograd.graph.save_on_cpu, family="host"),
        "lossless": Candidate(_opening(bs.Session("lossless")), family="lossless"),
    }
    for name, way in frontier_ways.ways(workload.model).items():
        candidate = Candidate(way, family="selective" if "selective" in name else "checkpoint")
        try:
            steptime.step(workload, candidate)
        except RuntimeError as error:  # torch's own checkpoint fails on this network
            print(f"{workload.case.name}: {name} is left out: {str(error).splitlines()[0]:.100}", flush=True)
        else:
            found[name] = candidate
    for name, way in frontier_ways.compiled(workload.model).items() if compile else ():
        found[name] = Candidate(way, family="compiled", is_exact=False)
    return found


def plans(workload: Workload, checkpoint_nbytes: int, budgets: int, also: Sequence[str] = ()) -> Planned:
    """Plans for budgets down to the smallest one, and for the least peak of the checkpoints, 0 if there are none."""
    started = time.perf_counter()
    allow = ("lossless", "recompute", *also)
    profile = bs.profile(lambda: workload.loss().backward(), workload.model, allow=allow)
    profiled = time.perf_counter()
    planner = Planner(profile)
    smallest = _smallest(planner)
    top = max(smallest, int(LARGEST * profile.plain_peak_nbytes))
    wanted = {smallest + (top - smallest) * step // max(1, budgets - 1) for step in range(budgets)}
    found = {}
    for nbytes in sorted(wanted, reverse=True):
        name = "smallest budget" if nbytes == smallest else f"{nbytes / profile.plain_peak_nbytes:.0%}"
        found[f"plan, {name}"] = _candidate(planner.plan(nbytes), "ours")
    if checkpoint_nbytes >= smallest:
        found["plan, the checkpoints' least peak"] = _candidate(planner.plan(checkpoint_nbytes), "ours")
    for family in also:
        if _offers(profile, family):
            wider = Planner(profile, ("lossless", "recompute", family))
            least = _smallest(wider)
            for share in (0.0, 0.3, 0.6):
                plan = wider.plan(int(least + share * (top - least)))
                name = f"plan with {family}, {plan.budget / profile.plain_peak_nbytes:.0%}"
                found[name] = _candidate(plan, family)
    return Planned(found, profiled - started, time.perf_counter() - profiled, smallest)


def _smallest(planner: Planner) -> int:
    """The smallest budget for which there is a plan."""
    try:
        return planner.plan(1).peak_nbytes
    except BudgetError as error:
        return error.smallest_nbytes


def _offers(profile: StepProfile, family: str) -> bool:
    """Whether the profile has choices with an error, or that move values elsewhere."""
    choices = [choice for value in profile.values for choice in value.choices]
    return any(choice.error > 0 if family == "bounded" else choice.kind == family for choice in choices)


def _candidate(plan: bs.Plan, family: str) -> Candidate:
    return Candidate(_opening(bs.Session(plan)), family=family, plan=plan, is_exact=plan.error == 0.0)


def _opening(session: bs.Session) -> Callable[[], bs.Session]:
    """Opens the same Session in each step."""
    return lambda: session


def peak(workload: Workload, candidate: Candidate) -> int:
    """The counted peak of a step, after one step that warms up."""
    return record(lambda: candidate.forward(workload).backward()).peak_nbytes


def resident(workload: Workload, candidate: Candidate) -> int | None:
    """Growth of the resident high-water mark in a step."""
    buffers.release_buffers()
    gc.collect()
    give_back()
    before = meter.resident_nbytes()
    if before is None or not meter.reset_resident_peak():
        return None
    candidate.forward(workload).backward()
    after = meter.resident_peak_nbytes()
    return None if after is None else after - before


def measure(
    case: Case, effort: Effort, budgets: int = BUDGETS, compile: bool = False, also: Sequence[str] = ()
) -> Measured:
    """Measures all candidates on one network.

    Args:
        case: the network and its batch.
        effort: how many rounds.
        budgets: for how many budgets there are plans.
        compile: whether to compile it as well.
        also: what plans of their own may do beside exact forms and making again: "bounded", "offload".

    Raises:
        GateError: an exact candidate has other gradients than plain PyTorch.
    """
    before = load()
    workload = build(case)
    compared = others(workload, compile)
    checkpoints = [peak(workload, one) for one in compared.values() if one.family in ("checkpoint", "selective")]
    planned = plans(workload, min(checkpoints, default=0), budgets, also)
    compared |= planned.candidates
    steptime.gate(workload, {name: one for name, one in compared.items() if one.is_exact})
    peaks = {name: peak(workload, candidate) for name, candidate in compared.items()}
    grown = {name: resident(workload, candidate) for name, candidate in compared.items()}
    with uncollected():
        seconds = interleave(
            {name: partial(steptime.second_step, workload, one) for name, one in compared.items()}, effort
        )
    rows = []
    for name, candidate in compared.items():
        ratios = [own / of_plain for own, of_plain in zip(seconds[name], seconds["plain"], strict=True)]
        plan = candidate.plan
        rows.append(
            Row(
                name,
                candidate.family,
                None if plan is None else plan.budget,
                None if plan is None else plan.peak_nbytes,
                peaks[name],
                grown[name],
                summarise(seconds[name]),
                summarise(ratios),
                None if plan is None else plan.seconds / plan.plain_seconds,
            )
        )
    times = planned.profile_seconds, planned.plan_seconds
    return Measured(case, *times, planned.smallest_nbytes, before, load(), tuple(rows))


def show(networks: Sequence[Any]) -> str:
    """A line for each candidate of each network, as the JSON has them."""
    header = ("network", "candidate", "budget MiB", "predicted", "peak MiB", "resident", "x plain", "predicted x")
    lines = [
        (
            str(Case(**found["case"])),
            row["candidate"],
            mib(row["budget_nbytes"]),
            mib(row["predicted_nbytes"]),
            mib(row["peak_nbytes"]),
            mib(row["resident_nbytes"]),
            spread(Summary(**row["times_plain"]), digits=3),
            "-" if row["predicted_times_plain"] is None else f"{row['predicted_times_plain']:.3f}",
        )
        for found in networks
        for row in found["rows"]
    ]
    return table(header, lines)


def draw(network: Any, made_on: str, results: Path) -> None:
    """Writes the chart of a network beside the results."""
    from studies.frontier_chart import chart

    name = f"{results.stem}-{network['case']['name']}.png"
    chart(network, made_on).savefig(results.with_name(name), dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each network, prints its table, writes the JSON and a chart."""
    parser = argparse.ArgumentParser(prog="python -m studies.frontier", description="Peak against step time.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on with what the file has")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for the rounds of all (default: 3600)")
    parser.add_argument("--rounds", type=int, default=5, help="of each network, at most (default: 5)")
    parser.add_argument("--budgets", type=int, default=BUDGETS, help=f"for how many plans (default: {BUDGETS})")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well, which takes minutes to compile")
    parser.add_argument("--also", action="append", choices=("bounded", "offload"), help="plans with these as well")
    names = [case.name for case in CASES]
    parser.add_argument("--only", action="append", choices=names, help="this network (may be given several times)")
    asked = parser.parse_args(arguments)
    deadline = Deadline.after(asked.seconds)
    results = Results("studies.frontier", asked.json, arguments, format=FORMAT, resume=asked.resume)
    networks: list[Any] = results.found.get("networks", [])
    done = {network["case"]["name"] for network in networks}
    wanted = [case for case in CASES if case.name in (asked.only or names)]
    chosen = [case for case in wanted if case.name not in done and case.absent() is None]
    for index, case in enumerate(chosen):
        part = deadline.part(case.share / sum(other.share for other in chosen[index:]))
        measured = plain(measure(case, Effort(asked.rounds, part), asked.budgets, asked.compile, asked.also or ()))
        networks.append({**measured, "commit": results.machine.commit})  # a file that is resumed may have several
        results.write(networks=networks)
        print(show(networks[-1:]), flush=True)
        if asked.json is not None:
            draw(networks[-1], str(results.machine), asked.json)
    print(f"{show(networks)}\n\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
