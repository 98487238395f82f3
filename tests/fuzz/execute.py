"""Runs a program with plain torch and under a Session, and says how the outcomes differ."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from backstash import Policy, Session
from tests.fuzz import pieces
from tests.fuzz.program import Program
from tests.fuzz.render import program_code
from tests.gradients.gradient_checks import Everything, Remake

FAILURES = ("values differ", "Session raises", "plain raises", "errors differ", "left over")
"""Kinds of failures. ``Session raises`` where plain does not, ``plain raises`` where the Session does not."""

IN_PLACE = "modified by an inplace operation"
VIEW_CHANGED = "has been modified inplace"
_POLICIES: dict[str, Callable[[], Policy]] = {"everything": Everything, "remake": Remake}


@dataclass(frozen=True)
class Failure:
    """How a program's outcome under a Session differs from plain torch's.

    Attributes:
        kind: one of ``FAILURES``.
        detail: one line that says what differs.
        plain_error: type of the error that plain torch raised, if any.
        session_error: type of the error that the Session raised, if any.
    """

    kind: str
    detail: str
    plain_error: str = ""
    session_error: str = ""

    def resembles(self, other: Failure | None) -> bool:
        """Whether it is a failure of the same kind."""
        return other is not None and (self.kind, self.plain_error, self.session_error) == (
            other.kind,
            other.plain_error,
            other.session_error,
        )


@dataclass(frozen=True)
class Result:
    """What came of one program: a failure, or that it was skipped as plain torch does not repeat itself.

    Attributes:
        failure: how the outcomes differ; None where they do not.
        skipped: whether plain torch does not repeat itself.
        plain_error: type of the error that plain torch raised, if any.
        named: how many saved tensors the last Session has looked at in its last step.
        recognised: how many of these it has recognised from earlier steps.
    """

    failure: Failure | None = None
    skipped: bool = False
    plain_error: str = ""
    named: int = 0
    recognised: int = 0


@dataclass
class _Outcome:
    seen: list[Any] = field(default_factory=list)
    error: Exception | None = None


def compile_program(program: Program) -> Callable[[Any, list[Any]], None]:
    """The function ``program(session, seen)``."""
    names: dict[str, Any] = {
        **vars(pieces), "torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "suppress": suppress
    }  # fmt: skip
    exec(compile(program_code(program), "<program>", "exec"), names)
    function: Callable[[Any, list[Any]], None] = names["program"]
    return function


def check(program: Program, policy: Policy | None = None) -> Result:
    """Run the program both ways and compare all that it can observe.

    Args:
        program: the program.
        policy: used in place of the policy that the program names.
    """
    function = compile_program(program)
    if policy is None:
        policy = _POLICIES[program.policy]() if program.policy in _POLICIES else None
    sessions: list[Session] = []

    def session() -> AbstractContextManager[Any]:
        if program.sessions == "each" or not sessions:
            sessions.append(Session(program.policy if policy is None else policy, min_nbytes=program.min_nbytes))
        return sessions[-1]

    plain = _run(function, nullcontext)
    under_session = _run(function, session)
    failure = _compare(plain, under_session) or _left_over(under_session, sessions)
    plain_error = "" if plain.error is None else type(plain.error).__name__
    if failure is None:
        if not sessions:
            return Result(plain_error=plain_error)
        report = sessions[-1].report()
        return Result(plain_error=plain_error, named=report.named, recognised=report.recognised)
    again = [_run(function, nullcontext) for _ in range(2)]
    if any(_compare(plain, other) for other in again):
        return Result(skipped=True, plain_error=plain_error)
    under_hooks = _run(function, lambda: saved_tensors_hooks(lambda x: x, lambda x: x))
    if _compare(under_hooks, under_session) is None and _left_over(under_session, sessions) is None:
        return Result(skipped=True, plain_error=plain_error)  # the difference is torch's own
    return Result(failure, plain_error=plain_error)


def run_plain(program: Program) -> None:
    """Run the program with plain torch, whatever it raises."""
    _run(compile_program(program), nullcontext)


def _run(function: Callable[[Any, list[Any]], None], session: Callable[[], AbstractContextManager[Any]]) -> _Outcome:
    outcome = _Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(session, outcome.seen)
        except Exception as error:
            _break_cycles(error)
            outcome.error = error.with_traceback(None)
    if outcome.error is not None:
        # What autograd has not run after an error, it holds until its next backward.
        torch.ones(1, requires_grad=True).sum().backward()
    return outcome


def _break_cycles(error: Exception) -> None:
    """Do what the end of the program would have done, so that values that hold each other are freed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "program":
            frame.f_locals["kept"].clear()
            if "optimizer" in frame.f_locals:
                frame.f_locals["optimizer"].zero_grad()


def _compare(plain: _Outcome, under_session: _Outcome) -> Failure | None:
    expected, got = plain.error, under_session.error
    names = "" if expected is None else type(expected).__name__, "" if got is None else type(got).__name__
    if expected is None and got is not None:
        return Failure("Session raises", f"plain raises nothing, the Session {_first_line(got)}", *names)
    if expected is not None and got is None:
        return Failure("plain raises", f"the Session raises nothing, plain {_first_line(expected)}", *names)
    if expected is not None and got is not None and not _is_same_error(expected, got):
        return Failure("errors differ", f"plain {_first_line(expected)}; the Session {_first_line(got)}", *names)
    if plain.seen != under_session.seen:
        return Failure("values differ", _first_difference(plain.seen, under_session.seen), *names)
    return None


def _is_same_error(expected: Exception, got: Exception) -> bool:
    """Whether the Session's error is caught by whoever catches plain torch's, and tells of the same cause."""
    # A change in place has two messages: of what was saved, and of a view whose history it would have to rewrite.
    of_changes = [any(cause in str(error) for cause in (IN_PLACE, VIEW_CHANGED)) for error in (expected, got)]
    return isinstance(got, type(expected)) and of_changes[0] is of_changes[1]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:240]


def _first_difference(expected: list[Any], got: list[Any]) -> str:
    """Where the first difference lies: a loss, or a gradient or another value after a step."""
    step = 0
    for one, other in zip(expected, got, strict=False):
        after_step = len(one) == 2
        if one != other:
            if not after_step:
                return f"a loss of step {step} differs"
            for name, ours, theirs in (("gradient", one[0], other[0]), ("value after the optimizer", one[1], other[1])):
                if ours != theirs:
                    if len(ours) != len(theirs):
                        return f"step {step}: {len(ours)} kept values, but {len(theirs)} under the Session"
                    where = [number for number, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
                    return f"step {step}: {name} {where[0]} differs ({len(where)} of {len(ours)} differ)"
        step += after_step
    return f"{len(expected)} records, but {len(got)} under the Session"


def _left_over(outcome: _Outcome, sessions: list[Session]) -> Failure | None:
    """What the Sessions still hold. After an error, tracebacks and autograd may hold values legitimately."""
    if outcome.error is not None:
        return None
    gc.collect()
    for session in sessions:
        stored = session.stores["device"].usage().nbytes
        if stored or session._live.saved or session._live.nbytes:
            live = session._live
            return Failure("left over", f"{stored} B stored, {live.saved} saved tensors, {live.nbytes} B live")
    return None
