"""Runs random programs until the time is up; see ``python -m tests.fuzz --help``.

``python -m tests.fuzz interrupts`` interrupts trainings instead; see ``python -m tests.fuzz interrupts --help``.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from backstash import Policy
from backstash.capture import learned, worth
from backstash.replay import replaying
from tests.fuzz import interrupts
from tests.fuzz.execute import Failure, check, run_plain
from tests.fuzz.generate import BY_NAME, SHARE_CHANGING, SMALL, generate
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
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["interrupts"]:
        return interrupts.main(given[1:])
    options = _options(given)
    if options.replay:
        learned.EQUAL_PASSES, replaying.PERIOD = 0, 5
        worth.Worth.is_open = lambda self, step: False  # type: ignore[method-assign]
    torch.set_num_threads(1)
    folder = Path(options.failures or tempfile.mkdtemp(prefix="fuzz-failures-"))
    folder.mkdir(parents=True, exist_ok=True)
    campaign = _Campaign(folder, options.minimise_minutes)
    if options.program:
        campaign.run(parse(Path(options.program).read_text()), policy)
    else:
        campaign = _supervise(campaign, options, policy)
    print(campaign.summary())
    return 1 if campaign.failures else 0


def _supervise(campaign: _Campaign, options: argparse.Namespace, policy: Policy | None) -> _Campaign:
    """Run random programs in a child process. Should a program kill it, go on with the next one in another child."""
    end = time.monotonic() + 60 * options.minutes
    state = campaign.folder / "state.pickle"
    gc.collect()
    try:
        while time.monotonic() < end and campaign.programs != options.programs:
            status = _in_child(lambda: campaign.run_all(options, policy, end, state))  # noqa: B023
            if state.exists():
                campaign = pickle.loads(state.read_bytes())
                state.unlink()
            if not os.WIFSIGNALED(status):
                break
            campaign.note_crash(generate_by(options, options.seed + campaign.programs), os.WTERMSIG(status))
    except KeyboardInterrupt:
        print("interrupted")
    return campaign


def _in_child(function: Callable[[], None]) -> int:
    """Call the function in a child process, and return the status that ``os.waitpid`` gives."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # a program's garbage is looked for again and again, and what was there before is not among it
        exit_code = 1
        try:
            function()
            exit_code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(exit_code)
    return os.waitpid(pid, 0)[1]


def generate_by(options: argparse.Namespace, seed: int) -> Program:
    """The program of that seed with the features, the policy and the shape that the command line asks for."""
    program = generate(
        seed,
        features=options.only,
        off=options.off,
        policy=options.policy,
        shape=options.shape,
        changing=options.changing,
    )
    if not options.replay:
        return program
    if len(program.pattern) > 1:
        return replace(program, steps=2 * program.steps, pattern=2 * program.pattern)
    return replace(program, steps=max(program.steps, 5))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    optional = [name for name in FEATURES if name not in COMMON]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to run (default: %(default)s)")
    parser.add_argument("--programs", type=int, default=-1, help="how many programs to run at most")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program (default: %(default)s)")
    parser.add_argument("--policy", choices=BY_NAME, help="policy of all programs (default: a random one for each)")
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
    parser.add_argument(
        "--changing",
        action=argparse.BooleanOptionalAction,
        help=f"only programs whose steps differ, or none (default: {100 * SHARE_CHANGING:.0f} %% of the programs)",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="passes are written down at once and replayed from then on, and programs have more steps",
    )
    parser.add_argument("--shape", type=int, nargs=4, default=SMALL, metavar="SIZE", help="N C H W of all values")
    parser.add_argument("--minimise-minutes", type=float, default=0.5, help="at most, for each failure")
    options = parser.parse_args(arguments)
    options.shape = tuple(options.shape)
    return options


class _Campaign:
    """Runs programs, minimises and saves what fails, and counts."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.minutes = folder, minutes
        self.started = time.monotonic()
        self.programs = self.steps = self.statements = self.skipped = self.raising = 0
        self.failures: Counter[str] = Counter()
        self.saved: Counter[tuple[str, ...]] = Counter()

    def run_all(self, options: argparse.Namespace, policy: Policy | None, end: float, state: Path) -> None:
        """Run the programs that are left, and write the counts to ``state`` after each."""
        while time.monotonic() < end and self.programs != options.programs:
            self.run(generate_by(options, options.seed + self.programs), policy)
            state.write_bytes(pickle.dumps(self))

    def run(self, program: Program, policy: Policy | None = None) -> None:
        """Run one program; if it fails, minimise and save it, unless a failure of the same statements was saved."""
        result = check(program, policy)
        self.programs += 1
        self.steps += program.steps
        self.statements += program.steps * sum(1 for _ in program.statements())
        self.skipped += result.skipped
        self.raising += bool(result.plain_error)
        if result.failure is not None:
            self.failures[result.failure.kind] += 1
            self.report(program, result.failure, policy)

    def note_crash(self, program: Program, signal: int) -> None:
        """Count and save a program that killed its process, unless plain torch does so too."""
        self.programs += 1
        if os.WIFSIGNALED(_in_child(lambda: run_plain(program))):
            self.skipped += 1
            return
        self.failures["crash"] += 1
        summary = f"crash: signal {signal} ends the process"
        (self.folder / f"crash_{program.seed}.py").write_text(standalone(program, summary, "values differ"))
        (self.folder / f"crash_{program.seed}.txt").write_text(to_text(program))
        self.saved["crash", str(program.seed)] += 1
        print(f"--- seed {program.seed}, {program.policy}: {summary}\n", flush=True)

    def report(self, program: Program, failure: Failure, policy: Policy | None) -> None:
        """Minimise the program, print it, and save it."""
        smallest = minimise(program, lambda smaller: failure.resembles(check(smaller, policy).failure), self.minutes)
        last = check(smallest, policy).failure or failure
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
            f"{self.skipped} programs skipped, as plain torch does not repeat itself or ends the process",
            f"{self.failures.total()} failures, {len(self.saved)} distinct"
            + "".join(f"\n  {number} x {kind}" for kind, number in self.failures.most_common()),
        ]
        if self.failures:
            lines.append(f"minimised failures are in {self.folder}")
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
