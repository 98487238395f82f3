"""Interrupts trainings at random moments, and goes on with them: ``python -m tests.fuzz interrupts``.

A training catches what has interrupted a step, throws the step away, and runs it once more. In the end its weights
have to have the bits that they have in plain torch, and nothing may be left behind: no hook, no mode, no lock, no
thread, and no Session that could not be opened again. If the forward pass was over when it was interrupted, backward
has to give plain torch's gradients, or an error that says why it cannot.

The interrupts are:

* ``signal``: a timer's signal, whose handler raises KeyboardInterrupt, as Ctrl-C does.
* ``call``: the same at one place, where Python looks for signals: where a function begins, and after a call has
  returned. The places are counted, so each one can be tried.
* ``depth``: the recursion limit is so many frames away.
* ``memory``: so many allocations of Python succeed in a step, and the next one fails.

Each training runs in a forked child, so that a crash is a failure of its own.
"""

from __future__ import annotations

import argparse
import dis
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash
from backstash import Session, interpreter
from backstash.capture import modules, transforms
from backstash.planning.run.budgeted import Budgeted

SOURCE = str(Path(backstash.__file__).parent)
KINDS = ("signal", "call", "depth", "memory")
Stop = (KeyboardInterrupt, RecursionError, MemoryError)
STEPS, STEPS_OF_BUDGETS = 7, 18
"""Steps of a training: within a budget it is measured in the first ten or more, and the others run under a plan."""

BUDGET: dict[str, Any] = {"budget": "90%", "min_nbytes": 1024}

_MOST_FRAMES = 90
"""So many frames are enough for any step."""

_CALLS = {dis.opmap[name] for name in dis.opmap if name.startswith("CALL") or name == "JUMP_BACKWARD"}


def model_of(seed: int = 0) -> nn.Module:
    """A network with values that are masked, remade, encoded and kept."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(32, 5),
    )


class Loop:
    """A training of plain torch, and what trains in the same way under a Session derives from it."""

    def __init__(self) -> None:
        self.model = model_of()
        self.called: Callable[[Tensor], Tensor] = self.model
        self.loss: Tensor | None = None
        self.weights = [*self.model.parameters(), *self.model.buffers()]

    def forward(self, x: Tensor, labels: Tensor) -> None:
        """Sets ``loss``."""
        self.loss = F.cross_entropy(self.called(x), labels)

    def step(self, number: int) -> None:
        """Runs one step."""
        self.loss = None
        x, labels = data_of(number)
        self.forward(x, labels)
        assert self.loss is not None
        loss, self.loss = self.loss, None
        loss.backward()

    def update(self) -> None:
        """Changes the weights, and forgets the gradients."""
        for x in self.weights:
            if x.grad is not None:
                x.data.sub_(x.grad, alpha=0.05)
                x.grad = None

    def leave(self) -> None:
        """The training is over."""


def data_of(number: int) -> tuple[Tensor, Tensor]:
    """Images and labels of a step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(5, (16,), generator=generator)


class PerStep(Loop):
    """A Session that is entered in each step; or a new one for each."""

    def __init__(self, policy: Any = "lossless", new: bool = False, **options: Any) -> None:
        super().__init__()
        self.make = lambda: Session(policy, **{"min_nbytes": 0, **options})
        self.session, self.new = self.make(), new

    def forward(self, x: Tensor, labels: Tensor) -> None:
        """Inside of the Session."""
        if self.new:
            self.session = self.make()
        with self.session:
            self.loss = F.cross_entropy(self.called(x), labels)


class Around(Loop):
    """A Session around the whole training, which catches interrupts inside of it."""

    def __init__(self, opened: Any) -> None:
        super().__init__()
        self.opened = opened
        opened.__enter__()

    def leave(self) -> None:
        """Leaves the Session."""
        self.opened.__exit__(None, None, None)


class Budget(Loop):
    """A budget that is entered in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Budgeted(**BUDGET)

    def forward(self, x: Tensor, labels: Tensor) -> None:
        """Inside of the budget."""
        with self.session:
            self.loss = F.cross_entropy(self.called(x), labels)

    def leave(self) -> None:
        """Stops what is measured."""
        self.session.close()


class Wrapped(Loop):
    """A wrapped model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        backstash.wrap(self.model, **{"min_nbytes": 0, **options})

    def leave(self) -> None:
        """Unwraps it."""
        backstash.unwrap(self.model)


class Compiled(Loop):
    """A compiled model inside of a Session, with a graph that is treated; it is compiled once for all trainings."""

    known: ClassVar[dict[bool, tuple[nn.Module, Any, list[Tensor]]]] = {}

    def __init__(self, treated: bool = True) -> None:
        super().__init__()
        if treated not in self.known:
            options = backstash.compile_options("lossless") if treated else None
            copies = [x.detach().clone() for x in self.weights]
            self.known[treated] = self.model, torch.compile(self.model, options=options), copies
        self.model, self.called, copies = self.known[treated]
        self.weights = [*self.model.parameters(), *self.model.buffers()]
        for x, copy in zip(self.weights, copies, strict=True):
            x.data.copy_(copy)
            x.grad = None
        self.session = Session("lossless", min_nbytes=0) if treated else None

    def forward(self, x: Tensor, labels: Tensor) -> None:
        """Inside of the Session."""
        with nullcontext() if self.session is None else self.session:
            self.loss = F.cross_entropy(self.called(x), labels)


def _recomputing() -> Any:
    rules = (("*", backstash.policies.Recompute(any_producer=True)),)
    return backstash.policies.Rules(rules, otherwise=backstash.policies.get("lossless"))


LOOPS: dict[str, Callable[[], Loop]] = {
    "plain": Loop,
    "lossless": PerStep,
    "new": lambda: PerStep(new=True),
    "sizes": lambda: PerStep(min_nbytes=None),
    "idle": lambda: PerStep("keep"),
    "stored": lambda: PerStep("lossless_stored"),
    "offload": lambda: PerStep("offload"),
    "recompute": lambda: PerStep(_recomputing()),
    "checked": lambda: PerStep("gist_fp16", check=2),
    "around": lambda: Around(Session("lossless", min_nbytes=0)),
    "around idle": lambda: Around(Session("keep", min_nbytes=0)),
    "budget": Budget,
    "around budget": lambda: Around(Budgeted(**BUDGET)),
    "wrap": Wrapped,
    "wrap budget": lambda: Wrapped(**BUDGET),
    "compile": Compiled,
}
"""Trainings by name. Those that round have no bits to be compared with."""

_ROUNDING = ("checked",)


class State:
    """What a step changes: the weights, the buffers and the generator."""

    def __init__(self, loop: Loop) -> None:
        self.copies = [x.detach().clone() for x in loop.weights]
        self.random = torch.get_rng_state()

    def restore(self, loop: Loop) -> None:
        """Throws the step away."""
        loop.loss = None
        for x, copy in zip(loop.weights, self.copies, strict=True):
            x.data.copy_(copy)
            x.grad = None
        torch.set_rng_state(self.random)


# -- interrupts --------------------------------------------------------------------------------------------------------


class Tracer:
    """Raises KeyboardInterrupt at the n-th place where Python looks for signals; counts these places.

    Of frames outside of the package, only their beginnings are places.
    """

    def __init__(self, at: int) -> None:
        self.at, self.places, self.where = at, 0, ""
        self._last: dict[int, int] = {}  # by frame: its last instruction

    def __enter__(self) -> Tracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        self._place(frame)
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last.pop(id(frame), None)
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            if self._last.get(id(frame)) in _CALLS:
                self._place(frame)
            self._last[id(frame)] = frame.f_code.co_code[frame.f_lasti]
        return self._inside

    def _place(self, frame: FrameType) -> None:
        self.places += 1
        if self.places == self.at:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise KeyboardInterrupt


@contextmanager
def limited(frames: int) -> Iterator[None]:
    """Inside, the recursion limit is so many frames away."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class Alarm:
    """Raises KeyboardInterrupt after a time, inside the ``with`` alone."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_armed = seconds, False
        self.where = ""

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.is_armed:
            self.is_armed = False
            self.where = "".join(traceback.format_stack(frame)[-6:])
            raise KeyboardInterrupt

    def __enter__(self) -> Alarm:
        signal.signal(signal.SIGALRM, self._raise)
        self.is_armed = True
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, self.seconds))
        return self

    def __exit__(self, *error: object) -> None:
        self.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


# -- a training with interrupts ----------------------------------------------------------------------------------------


def steps_of(name: str) -> int:
    """How many steps a training has."""
    return STEPS_OF_BUDGETS if "budget" in name else STEPS


def plain_weights(steps: int, compiled: bool = False) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Trains in plain torch. Returns the weights in the end, and each step's gradients."""
    loop = Compiled(treated=False) if compiled else Loop()
    torch.manual_seed(1)
    gradients = []
    for number in range(steps):
        loop.step(number)
        gradients.append([x.grad.clone() for x in loop.weights if x.grad is not None])
        loop.update()
    return [x.detach().clone() for x in loop.weights], gradients


class Trial:
    """A training of which steps are interrupted.

    Args:
        name: of the loop.
        kind: of the interrupts.
        place: a number that tells where each step is interrupted: of a place, of frames or of an allocation, or the
            seed of a random time.
        expected: what plain_weights() returned.
        seconds: what a step takes.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        place: int,
        expected: tuple[list[Tensor], list[list[Tensor]]],
        seconds: float = 0.005,
        only: int | None = None,
    ) -> None:
        self.name, self.kind, self.place, self.expected, self.seconds, self.only = (
            name,
            kind,
            place,
            expected,
            seconds,
            only,
        )
        self.draw = random.Random(place)
        self.interrupted = self.lost = 0
        self.where: list[str] = []
        self.notes: list[str] = []

    def run(self) -> list[str]:
        """Runs the training; returns what is wrong with it."""
        sys.unraisablehook = self._lose
        loop = LOOPS[self.name]()
        torch.manual_seed(1)
        found: list[str] = []
        for number in range(steps_of(self.name)):
            state = State(loop)
            if self._is_tried(number):
                if not self._interrupted(loop, number):
                    loop.update()
                    continue
                found += [f"step {number}: {each}" for each in self._gradients(loop, number)]
                state.restore(loop)
                if not torch.is_grad_enabled():
                    found.append(f"step {number}: grad mode is off")
                    torch.set_grad_enabled(True)
            loop.step(number)
            loop.update()
        loop.leave()
        if self.name not in _ROUNDING:
            for x, wanted in zip(loop.weights, self.expected[0], strict=True):
                if not torch.equal(x.detach(), wanted):
                    found.append("the weights have other bits")
                    break
        del loop
        return found + left_behind()

    def _is_tried(self, number: int) -> bool:
        """Whether that step is interrupted. A budget measures whole steps, so of these come some in between."""
        if self.only is not None:
            return number == self.only
        return "budget" not in self.name or number % 3 == self.place % 3

    def _interrupted(self, loop: Loop, number: int) -> bool:
        """Runs a step that may be interrupted; returns whether it was."""
        tracer: Any = None
        try:
            if self.kind == "signal":
                with Alarm(self.draw.random() * self.seconds) as tracer:
                    loop.step(number)
            elif self.kind == "call":
                with Tracer(self.place) as tracer:
                    loop.step(number)
            elif self.kind == "depth":
                with limited(self.place):
                    loop.step(number)
            else:
                import _testcapi

                try:
                    _testcapi.set_nomemory(self.place, self.place + 1)
                    loop.step(number)
                finally:
                    _testcapi.remove_mem_hooks()
        except Stop:
            self.interrupted += 1
            self.where.append(getattr(tracer, "where", ""))
            return True
        except Exception as error:  # torch tells of such errors in errors of its own
            is_torchs = self.kind == "memory" and not is_own_system_error(error)
            if not is_torchs and "RecursionError" not in str(error):
                raise
            self.interrupted += 1
            return True
        return False

    def _gradients(self, loop: Loop, number: int) -> list[str]:
        """If the forward pass was over, backward gives the right gradients, or a clear error."""
        loss, loop.loss = loop.loss, None
        if loss is None:
            return []
        for x in loop.weights:
            x.grad = None
        try:
            loss.backward()
        except RuntimeError as error:
            return [] if isinstance(error, backstash.errors.BackstashError) else [f"backward raised {error!r}"]
        got = [x.grad for x in loop.weights if x.grad is not None]
        if self.name in _ROUNDING:
            return []
        wanted = self.expected[1][number]
        same = len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        return [] if same else ["the interrupted graph has other gradients"]

    def _lose(self, unraisable: Any) -> None:
        self.lost += 1  # a finalizer was interrupted, and Python lets nothing out of it
        if not isinstance(unraisable.exc_value, Stop):
            self.notes.append(f"a finalizer raised {unraisable.exc_value!r}")


def is_own_system_error(error: Exception) -> bool:
    """Whether a compiled function of the package has gone on with an error set. Functions of torch do so as well."""
    own = [name for name, each in vars(interpreter.module or object()).items() if callable(each)]
    texts = [f"<built-in function {name}>" for name in own] + ["_replay", *(f"'{kind}' objects" for kind in _FINAL)]
    return isinstance(error, SystemError) and any(text in str(error) for text in texts)


_FINAL = ("Saved", "Value", "Form")


def left_behind() -> list[str]:
    """What a training has left behind that plain torch has not."""
    found = []
    if torch._C._len_torch_function_stack():
        found.append("a function mode is left")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("saved-tensor hooks are left")
    if modules.is_active() or modules._listeners or modules._kept or transforms._open:
        found.append("a Session is open")
    globals_of = nn.modules.module
    if globals_of._global_forward_pre_hooks or globals_of._global_forward_hooks:
        found.append("a module hook is left")
    if modules._resting is not None or any("__call__" in vars(kind) for kind in modules._FUSED):
        found.append("modules are waited for that have returned")
    if not torch.is_grad_enabled():
        found.append("grad mode is off")
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled():
        found.append("autocast or inference mode is on")
    if torch.autograd._profiler_enabled():
        found.append("a profiler runs")
    backward = (torch.autograd.backward, torch.autograd.grad)
    gc.collect()
    if any(hasattr(each, "__wrapped__") for each in backward) and not _only_dead_listeners():
        found.append("a wrapper of torch.autograd.backward is left")
    before = threading.active_count()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.ones(4, 8)
    done: list[bool] = []
    try:
        with Session("lossless", min_nbytes=0) as session:
            loss = model(x).sum()

        def elsewhere() -> None:
            loss.backward()  # for which it takes the locks
            done.append(True)

        thread = threading.Thread(target=elsewhere, daemon=True)
        thread.start()
        thread.join(20)
        if not done:
            found.append("backward hangs on another thread")
        elif not session.report().saved_nbytes:
            found.append("a new Session sees nothing")
    except Exception as error:
        found.append(f"no Session can be opened: {error!r}")
    if threading.active_count() > before + (0 if done else 1):
        found.append("a thread is left")
    return found


def _only_dead_listeners() -> bool:
    from backstash.capture import passes

    return not [each for each, _ in passes._listeners if each() is not None]


# -- many trainings ----------------------------------------------------------------------------------------------------


class Counts:
    """What became of many trainings."""

    def __init__(self) -> None:
        self.trainings, self.interrupts, self.lost = Counter[str](), Counter[str](), 0
        self.failures: list[str] = []

    def __str__(self) -> str:
        each = ", ".join(f"{name} {number}" for name, number in sorted(self.interrupts.items()))
        return (
            f"{self.trainings.total()} trainings, {self.interrupts.total()} interrupts ({each}), {self.lost} of them "
            f"in finalizers, {len(self.failures)} failures"
        )


def in_child(function: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What the function returns in a forked child, or a text that says how the child has ended."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        code = 1
        try:
            faulthandler.enable()
            faulthandler.dump_traceback_later(seconds, exit=True)
            # So torch says that a module's hook was interrupted while an error was on its way.
            warnings.filterwarnings("ignore", message="global module forward hook with ``always_call=True`` raised")
            # So a plan says that it does not know what an interrupted pass and the one after it have saved together.
            warnings.filterwarnings("ignore", message="the plan [0-9a-f]+ was asked for")
            found = function()
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(found, pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if status == 0 and text:
        return pickle.loads(text)
    return f"the child ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}"


def prepare(name: str) -> tuple[tuple[list[Tensor], list[list[Tensor]]], float]:
    """Trains without interrupts, so that what is proven on first use is. Returns what plain gives, and seconds."""
    compiled = name == "compile"
    expected = plain_weights(steps_of(name), compiled)
    for _ in range(2):
        trial = Trial(name, "call", -1, expected)
        started = time.perf_counter()
        found = trial.run()
        seconds = (time.perf_counter() - started) / steps_of(name)
        assert not found, (name, found)
    loop = LOOPS[name]()
    seconds = min(seconds, 0.2)
    started = time.perf_counter()
    for number in range(steps_of(name)):
        loop.step(number)
        loop.update()
    seconds = (time.perf_counter() - started) / steps_of(name)
    loop.leave()
    return expected, seconds


def places_of(name: str, step: int) -> int:
    """How many places there are in that step of a training at which it can be interrupted."""
    loop = LOOPS[name]()
    torch.manual_seed(1)
    for number in range(step):
        loop.step(number)
        loop.update()
    with Tracer(-1) as tracer:
        loop.step(step)
    loop.leave()
    return tracer.places


def run_one(name: str, kind: str, place: int, expected: Any, seconds: float, only: int | None, counts: Counts) -> None:
    """Runs one training in a child, and counts what became of it."""

    def run() -> tuple[list[str], int, int, list[str], list[str]]:
        trial = Trial(name, kind, place, expected, seconds, only)
        found = trial.run()
        return found, trial.interrupted, trial.lost, trial.where, trial.notes

    ended = in_child(run)
    counts.trainings[name] += 1
    if isinstance(ended, str):
        counts.failures.append(f"{name}, {kind} {place}, step {only}: {ended}")
        print(counts.failures[-1], flush=True)
        return
    found, interrupted, lost, where, notes = ended
    counts.interrupts[f"{name}/{kind}"] += interrupted
    counts.lost += lost
    if found or notes:
        places = "\n    ".join(where[-1:])
        counts.failures.append(f"{name}, {kind} {place}, step {only}: {'; '.join(found + notes)}\n    {places}")
        print(counts.failures[-1], flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trainings with interrupts until the time is up; returns 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz interrupts", description=__doc__)
    parser.add_argument("--loops", nargs="*", default=list(LOOPS), choices=list(LOOPS), metavar="LOOP")
    parser.add_argument("--kinds", nargs="*", default=["signal"], choices=KINDS, metavar="KIND")
    parser.add_argument("--trainings", type=int, default=100, help="of each loop and kind, at most")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first training (default: %(default)s)")
    parser.add_argument("--step", type=int, help="interrupt that step alone (default: each, at another place)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts, end = Counts(), time.monotonic() + 60 * asked.minutes
    for name in asked.loops:
        expected, seconds = prepare(name)
        gc.collect()
        gc.freeze()
        for kind in asked.kinds:
            for step in [asked.step] if asked.step is not None or kind == "signal" else (0, 2, 5):
                draw = random.Random(f"{name} {kind} {step} {asked.seed}")
                most = {"depth": _MOST_FRAMES, "memory": 1500}.get(kind, 0)
                if kind == "call":
                    most = in_child(lambda name=name, step=step: places_of(name, step or 0))
                for number in range(asked.trainings):
                    if time.monotonic() > end:
                        break
                    place = number + asked.seed
                    if most:
                        place = 1 + (number if most <= asked.trainings else draw.randrange(most))
                        if number >= most:
                            break
                    run_one(name, kind, place, expected, seconds, step, counts)
        print(counts, flush=True)
    return 1 if counts.failures else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
