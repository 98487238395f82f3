"""Models of torchvision and timm, beside plain PyTorch: ``python -m studies.zoo [--library NAME] [--json FILE]``.

Each model of :mod:`studies.zoo_models` is judged in a process of its own, with a limit on its time, on one thread:

1. Four steps of plain PyTorch with an optimizer.
2. The same steps under ``Session("lossless")``, as it is and with ``min_nbytes=0``, which leaves nothing alone, from
   the same weights and seeds. Every gradient of every step, and all parameters and buffers after it, have to have the
   bits of plain's. If they do not, plain's steps are taken once more: what differs between these is not counted.
3. Plans for 60 % of plain's peak and for the smallest budget that there is, as `studies.heldout_plans` judges them:
   equal bits, a counted peak within the budget, and a predicted peak that is never below the counted one.
4. Compiled steps, with the backend that the model's entry names: graphs that are treated, whatever the sizes of their
   values, and graphs within a budget have to have the bits of plain ones.

The exit code is 1 if a model is not as it has to be. A model whose library is not installed is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import backstash as bs
from backstash.bits import row_major_bytes
from backstash.planning.search.planner import Planner
from bench.results import Results
from bench.rounds import mib, table
from studies.heldout_plans import COUNTED_STEPS, Row, Trained, peak_of, plans
from studies.unseen import Program
from studies.zoo_models import LIBRARIES, build

FORMAT = 1
"""Version of the JSON's layout."""

STEPS = 4
"""Steps whose bits are compared."""

SHARE = 0.6
"""The budget of a plan, as a share of plain's peak. The smallest budget that there is comes beside it."""

CHECKS = ("sessions", "plans", "compiled")

WAYS_COMPILED: Mapping[str, Mapping[str, Any]] = {
    "compiled": {"min_nbytes": 0},
    "compiled, budget": {"min_nbytes": 0, "budget": "75%"},
}
"""How graphs are treated."""

Digests = dict[str, bytes]


@dataclass(frozen=True)
class Judged:
    """What was found about one model.

    Attributes:
        library, model: its name here.
        parameters: how many numbers are trained.
        plain_nbytes: the counted peak of a plain step.
        lossless_nbytes: the counted peak of a step under ``lossless``.
        unstable: what plain PyTorch itself computes differently a second time, and what was therefore not compared.
        differing: for each check, what has other bits; empty where all are equal, and absent where it was not done.
        rows: the plans.
        compiled: the backend of the compiled steps, and what torch raised there without backstash, if it did.
        treated: how many values were held in another form in compiled steps, without a budget.
        seconds: the time that all of this took.
        commit: of backstash.
        error: what was raised, if the model could not be judged.
    """

    library: str
    model: str
    parameters: int = 0
    plain_nbytes: int = 0
    lossless_nbytes: int = 0
    unstable: tuple[str, ...] = ()
    differing: dict[str, tuple[str, ...]] | None = None
    rows: tuple[Row, ...] = ()
    compiled: str = ""
    treated: int = 0
    seconds: float = 0.0
    commit: str = ""
    error: str = ""

    def with_earlier(self, earlier: Judged | None) -> Judged:
        """This, with what an earlier run has found by other checks."""
        if earlier is None or self.error:
            return self
        return replace(
            self,
            lossless_nbytes=self.lossless_nbytes or earlier.lossless_nbytes,
            differing=(earlier.differing or {}) | (self.differing or {}),
            rows=self.rows or earlier.rows,
            compiled=self.compiled or earlier.compiled,
            treated=self.treated or earlier.treated,
            seconds=self.seconds + earlier.seconds,
        )

    def lacks(self, checks: Sequence[str]) -> bool:
        """Whether one of these checks has not been done. One that ended with an error is not done again by itself."""
        done = {"sessions": self.lossless_nbytes, "plans": self.rows, "compiled": self.compiled}
        needed = [check for check in checks if check != "compiled" or LIBRARIES[self.library][self.model].compiled]
        return not self.error and not all(done[check] for check in needed)

    @property
    def flaws(self) -> list[str]:
        """What is wrong, in words."""
        found = [self.error.splitlines()[-1]] if self.error else []
        found += [f"{check}: {len(names)} differ" for check, names in (self.differing or {}).items() if names]
        return found + [f"{row.budget}: {flaw}" for row in self.rows for flaw in row.flaws]


class Training(Trained):
    """Steps of a model with an optimizer, each with its own seed.

    Args:
        program: the model.
        session: what its steps run under; None for plain PyTorch.
    """

    def __init__(self, program: Program, session: bs.Session | None = None) -> None:
        super().__init__(program)
        self.session = session
        trained = [p for p in program.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)

    def step(self) -> None:
        """Runs the next step, without its optimizer. The first one finds no gradients, as in most programs."""
        self._optimizer.zero_grad(set_to_none=False)
        super().step()

    def digests(self) -> Digests:
        """Hashes of all gradients of all compared steps, of parameters and buffers afterwards, and of the generator."""
        found: Digests = {}
        model = self.program.model
        for number in range(STEPS):
            self.step()
            found |= {
                f"{name}.grad#{number}": _hash(p.grad) for name, p in model.named_parameters() if p.grad is not None
            }
            found[f"generator#{number}"] = _hash(torch.get_rng_state())
            self._optimizer.step()
        return found | {name: _hash(x) for name, x in (*model.named_parameters(), *model.named_buffers())}

    def peak(self, steps: int = 1) -> int:
        """The counted peak of the next steps."""
        return peak_of(self.step, steps)


def _hash(x: Tensor) -> bytes:
    return hashlib.blake2b(row_major_bytes(x.detach()).numpy().tobytes(), digest_size=16).digest()


def other(expected: Digests, found: Digests) -> tuple[str, ...]:
    """Names of what has other bits, or is in one of them only."""
    return tuple(sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)))


def without(names: Sequence[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """The names that are not left out."""
    return tuple(name for name in names if name not in left_out)


def judge(library: str, name: str, checks: Sequence[str] = CHECKS) -> Judged:
    """Judges one model, in this process.

    Args:
        library, name: the model, as in `studies.zoo_models.LIBRARIES`.
        checks: which of ``CHECKS`` are done.
    """
    started = time.perf_counter()

    def make() -> Program:
        return build(library, name)

    reference = Training(make())
    expected = reference.digests()
    differing: dict[str, tuple[str, ...]] = {}
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in reference.program.model.parameters()),
        "plain_nbytes": reference.peak(),
    }
    del reference
    if "sessions" in checks:
        for label, min_nbytes in (("lossless", None), ("lossless, min_nbytes=0", 0)):
            program = make()
            training = Training(program, bs.Session("lossless", model=program.model, min_nbytes=min_nbytes))
            differing[label] = other(expected, training.digests())
            if min_nbytes is None:
                found["lossless_nbytes"] = training.peak()
    if "plans" in checks:
        found["rows"] = _planned(make, expected, found["plain_nbytes"])
    rows = found.get("rows", ())
    if any(differing.values()) or any(row.differing for row in rows):  # or is it plain PyTorch that varies?
        unstable = found["unstable"] = other(expected, Training(make()).digests())
        differing = {check: without(names, unstable) for check, names in differing.items()}
        found["rows"] = tuple(replace(row, differing=without(row.differing, unstable)) for row in rows)
    backend = LIBRARIES[library][name].compiled
    if "compiled" in checks and backend:
        found["compiled"], found["treated"], compiled = _compiled(make, backend)
        differing |= compiled
    seconds = time.perf_counter() - started
    return Judged(library, name, **found, differing=differing, seconds=seconds)


def _planned(make: Callable[[], Program], expected: Digests, plain_nbytes: int) -> tuple[Row, ...]:
    profiled = Training(make())
    profiled.step()  # gradients are there, as they are in every step but the first
    planner = Planner(bs.profile(profiled.program.step, profiled.program.model))
    rows = []
    for row, plan in plans(planner, plain_nbytes, (SHARE,)):
        if plan is None:
            rows.append(row)
            continue
        training = Training(make(), bs.Session(bs.Plan.from_json(plan.to_json())))
        differing = other(expected, training.digests())
        predicted = plan.peak_nbytes, training.peak(COUNTED_STEPS), plan.seconds / plan.plain_seconds
        rows.append(Row(row.budget, row.budget_nbytes, *predicted, None, differing, plan.reserve_nbytes))
    return tuple(rows)


def _compiled(make: Callable[[], Program], backend: str) -> tuple[str, int, dict[str, tuple[str, ...]]]:
    """Compares compiled steps with and without treatment.

    Returns:
        The backend, and what torch raised with it without backstash, if it did; how many values were held in another
        form, without a budget; and for each way of treating graphs what has other bits, but for what two plain
        compilations do differently.
    """

    def digests(**settings: Any) -> Digests:
        torch._dynamo.reset()
        program = make()
        program.model.compile(**settings)
        return Training(program).digests()

    try:
        expected = digests(backend=backend)
    except Exception as error:  # torch cannot compile it
        return f"{backend}: {type(error).__name__}", 0, {}
    treated, differing = 0, {}
    for way, settings in WAYS_COMPILED.items():
        if backend == "inductor":
            options = bs.compile_options("lossless", **settings)
            differing[way], report = other(expected, digests(options=options)), options.report()
        else:
            ours = bs.compile_backend("lossless", backend, **settings)
            differing[way], report = other(expected, digests(backend=ours)), ours.report()
        if "budget" not in settings:
            treated = sum(row.codec != "kept" for row in report.rows)
    if any(differing.values()):
        unstable = other(expected, digests(backend=backend))
        differing = {way: without(names, unstable) for way, names in differing.items()}
    return backend, treated, differing


def read(found: Any) -> Judged:
    """A model's results from JSON."""
    rows = tuple(Row(**{**row, "differing": tuple(row["differing"])}) for row in found["rows"])
    differing = found["differing"] and {check: tuple(names) for check, names in found["differing"].items()}
    return Judged(**{**found, "unstable": tuple(found["unstable"]), "differing": differing, "rows": rows})


def apart(library: str, name: str, checks: Sequence[str], limit: float) -> Judged:
    """Judges one model in a process of its own, so that one that crashes or hangs does not end the others.

    The process is a fork: it does not import torch and the libraries again. This process has run no backward pass and
    has one thread, so nothing of its state is lost in a fork.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(sender, library, name, checks))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            return Judged(library, name, seconds=limit, error=f"not done after {limit:.0f} s")
        judged: Judged = receiver.recv()
        return judged
    except EOFError:
        process.join()
        return Judged(library, name, error=f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, library: str, name: str, checks: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    try:
        judged = judge(library, name, checks)
    except Exception:  # it is told with the results of the others
        judged = Judged(library, name, error=traceback.format_exc(limit=-8))
    sender.send(judged)


def show(judged: Sequence[Judged]) -> str:
    """A line for each model."""
    header = ("library", "model", "plain MiB", "lossless", "60 %", "smallest", "compiled", "s", "flaws")
    lines = []
    for each in judged:
        reached = {row.budget: mib(row.reached_nbytes) for row in each.rows}
        cells = [each.library, each.model, mib(each.plain_nbytes), mib(each.lossless_nbytes)]
        cells += [reached.get(f"{SHARE:.0%}", ""), reached.get("smallest", ""), each.compiled]
        lines.append((*cells, f"{each.seconds:.0f}", "; ".join(each.flaws)))
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges every model, prints a table, writes the JSON; returns 1 if anything is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.zoo", description="Judges models of other libraries.")
    libraries = list(LIBRARIES)
    parser.add_argument("--library", action="append", choices=libraries, help="this library (default: all)")
    parser.add_argument("--only", action="append", help="this model (may be given several times)")
    parser.add_argument("--check", action="append", choices=CHECKS, help="this check (default: all)")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for a model (default: 400)")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on with what the file has")
    asked = parser.parse_args(arguments)
    chosen, checks = asked.library or libraries, asked.check or CHECKS
    torch.set_num_threads(1)
    command = [] if asked.json is None else ["--json", str(asked.json)]  # without what was chosen: it may be resumed
    results = Results("studies.zoo", asked.json, command, format=FORMAT, resume=asked.resume)
    judged = {(each.library, each.model): each for each in map(read, results.found.get("models", []))}
    for library in chosen:
        if find_spec(library) is None:
            print(f"{library} is not installed: its models are left out.")
            continue
        importlib.import_module(library)
        for name in LIBRARIES[library]:
            earlier = judged.get((library, name))
            if name not in asked.only if asked.only else earlier is not None and not earlier.lacks(checks):
                continue
            found = replace(apart(library, name, checks, asked.limit), commit=results.machine.commit or "")
            judged[library, name] = found.with_earlier(earlier)
            print(show([found]), found.error, flush=True)
            results.write(models=list(judged.values()))
    flawed = [each for each in judged.values() if each.flaws]
    print(f"\n{show(list(judged.values()))}\n\n{len(judged)} models, {len(flawed)} with flaws")
    print(results.close())
    return int(bool(flawed))


if __name__ == "__main__":
    raise SystemExit(main())
