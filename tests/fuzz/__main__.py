"""Runs random programs until the time is up; see ``python -m tests.fuzz --help``."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from backstash import Policy
from tests.fuzz.execute import Failure, check
from tests.fuzz.generate import POLICIES, SMALL, generate
from tests.fuzz.kinds import COMMON, FEATURES
from tests.fuzz.minimise import minimise
from tests.fuzz.program import Program, parse, to_text
from tests.fuzz.render import program_code, standalone


def main(arguments: Sequence[str] | None = None, policy: Policy | None = None) -> int:
    """Run the fuzzer.

    Args:
        arguments: of the command line.
        policy: used in place of all named policies; for tests of the fuzzer.

    Returns:
        The exit status: 0 if no program failed, else 1.
    """
    options = _options(arguments)
    torch.set_num_threads(1)
    folder = Path(options.failures or tempfile.mkdtemp(prefix="fuzz-failures-"))
    folder.mkdir(parents=True, exist_ok=True)
    session = _Campaign(folder, policy, options.minimise_minutes)
    gc.collect()
    gc.freeze()
    try:
        if options.program:
            session.run(parse(Path(options.program).read_text()))
        else:
            end = time.monotonic() + 60 * options.minutes
            for seed in count(options.seed):
                if time.monotonic() > end or seed - options.seed == options.programs:
                    break
                session.run(
                    generate(seed, features=options.only, off=options.off, policy=options.policy, shape=options.shape)
                )
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        gc.unfreeze()
    print(session.summary())
    return 1 if session.failures else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    optional = [name for name in FEATURES if name not in COMMON]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to run (default: %(default)s)")
    parser.add_argument("--programs", type=int, default=-1, help="how many programs to run at most")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program (default: %(default)s)")
    parser.add_argument("--policy", choices=POLICIES, help="policy of all programs (default: a random one for each)")
    parser.add_argument("--program", help="run the program in this text file instead of random ones")
    parser.add_argument("--failures", help="folder for minimised failures (default: a temporary folder)")
    parser.add_argument("--off", nargs="*", default=[], choices=list(FEATURES), metavar="FEATURE", help="leave out")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=optional,
        metavar="FEATURE",
        help=f"features of all programs beside {', '.join(COMMON)} (default: a random few of {', '.join(optional)})",
    )
    parser.add_argument("--shape", type=int, nargs=4, default=SMALL, metavar="SIZE", help="N C H W of all values")
    parser.add_argument("--minimise-minutes", type=float, default=0.5, help="at most, for each failure")
    options = parser.parse_args(arguments)
    options.shape = tuple(options.shape)
    return options


class _Campaign:
    """Runs programs, minimises and saves what fails, and counts."""

    def __init__(self, folder: Path, policy: Policy | None, minutes: float) -> None:
        self.folder, self.policy, self.minutes = folder, policy, minutes
        self.started = time.monotonic()
        self.programs = self.steps = self.statements = self.skipped = self.raising = 0
        self.failures: Counter[str] = Counter()
        self.saved: Counter[tuple[str, ...]] = Counter()

    def run(self, program: Program) -> None:
        """Run one program; if it fails, minimise and save it, unless a failure of the same statements was saved."""
        running = self.folder / "running.txt"  # which program it was, should the process die
        running.write_text(to_text(program))
        result = check(program, self.policy)
        self.programs += 1
        self.steps += program.steps
        self.statements += program.steps * sum(1 for _ in program.statements())
        self.skipped += result.skipped
        self.raising += bool(result.plain_error)
        if result.failure is not None:
            self.failures[result.failure.kind] += 1
            self.report(program, result.failure)
        running.unlink()

    def report(self, program: Program, failure: Failure) -> None:
        """Minimise the program, print it, and save it."""
        smallest = minimise(
            program, lambda smaller: failure.resembles(check(smaller, self.policy).failure), self.minutes
        )
        last = check(smallest, self.policy).failure or failure
        signature = (last.kind, *sorted({statement.kind for statement in smallest.statements()}))
        self.saved[signature] += 1
        if self.saved[signature] > 1:
            return
        name = f"{failure.kind.replace(' ', '_')}_{program.seed}"
        summary = f"{failure.kind}: {last.detail}"
        (self.folder / f"{name}.py").write_text(standalone(smallest, summary, failure.kind))
        (self.folder / f"{name}.txt").write_text(to_text(smallest))
        print(f"--- seed {program.seed}, {program.policy}: {summary}\n{program_code(smallest)}\n", flush=True)

    def summary(self) -> str:
        """The counts."""
        minutes = (time.monotonic() - self.started) / 60
        lines = [
            f"{self.programs} programs, {self.steps} steps, {self.statements} statements in {minutes:.1f} minutes "
            f"({self.programs / minutes:.0f} programs per minute)",
            f"{self.raising} programs in which plain torch raises",
            f"{self.skipped} programs skipped, as plain torch does not repeat itself",
            f"{self.failures.total()} failures, {len(self.saved)} distinct"
            + "".join(f"\n  {number} x {kind}" for kind, number in self.failures.most_common()),
        ]
        if self.failures:
            lines.append(f"minimised failures are in {self.folder}")
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
