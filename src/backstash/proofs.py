"""The outcomes of comparing bits on first use, in one bounded cache for the whole process.

Several shortcuts of this package are right only where a library happens to round the same way twice: a recipe that
computes a value again, a product that is computed in slices, a norm's gradient that is computed row by row. No library
documents that. So each shortcut runs once beside the long way, the bits are compared, and the answer is kept here.

Note: [what a proof depends on]
    An answer holds for the operation, its arguments and layouts, the type of the device, the number of threads, and
    torch's settings of precision and determinism. The caller names the first three; :meth:`Proofs.ask` adds the rest
    by itself. A program that changes a setting in the middle of a run is answered by a new proof.

Note: [proofs that travel]
    A proof holds the value and what the shortcut makes of it at the same time. The first step of a plan that was read
    from a file has no room for that. So the file brings the answers of the process that has made the plan, and they are
    believed where all is equal that they depend on: torch, this package, the processor, and the variables that choose
    its kernels. Elsewhere everything is proven anew. A recipe that is believed is still compared, by a checksum of its
    whole value, when it is used for the first time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from backstash import accelerator, graphs
from backstash.numerics import settings
from backstash.version import __version__

Answer = TypeVar("Answer", bool, str)

CAPACITY = 4096
"""How many answers are kept. One takes about half a kilobyte, and a network of 1,000 layers asks for fewer."""

TRAVELLING = frozenset({"call", "saved inside", "recipe", "mm by rows", "batch norm", "layer norm", "group norm"})
"""The operations whose answers travel with a plan: their proofs take some MiB, or as much as a step's values."""

_CHOOSING = ("ATEN_", "BACKSTASH_", "CUBLAS_", "CUDNN_", "DNNL_", "MKL_", "NVIDIA_", "ONEDNN_")
"""How the names of environment variables begin that choose among a library's kernels."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_OBJECT = re.compile(r"(?<!type) object at 0x")


class Counting(Protocol):
    """Counts how often something was proven.

    Attributes:
        proven: questions that were answered by a proof for the first time.
        repeated: questions whose proof was run once more.
    """

    proven: int
    repeated: int


@dataclass(slots=True)
class Counts:
    """A Counting that is nothing else."""

    proven: int = 0
    repeated: int = 0


class _Known:
    """An answer, and how often it was asked for; ``phase`` spreads the repetitions of different questions."""

    __slots__ = ("answer", "phase", "uses")

    def __init__(self, answer: bool | str, phase: int) -> None:
        self.answer, self.phase, self.uses = answer, phase, 1


class Proofs:
    """Answers to questions of the form "does this shortcut give the same bits?", the latest used ones.

    Any thread may ask. A proof runs without the lock, so two threads that ask the same question at the same time may
    both prove it.

    Args:
        capacity: how many answers are kept; the one that was asked for longest ago is forgotten first.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.counts = Counts()
        self._known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()
        self._believed: dict[str, bool | str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def ask(
        self,
        operation: str,
        facts: tuple[Hashable, ...],
        prove: Callable[[], Answer],
        *,
        device_type: str = "cpu",
        again: bool = False,
        repeat_every: int = 0,
        counts: Counting | None = None,
    ) -> Answer:
        """Returns the known answer, or the one that ``prove`` gives now.

        Args:
            operation: what is asked about. Every caller uses a name of its own.
            facts: the arguments, shapes, strides and dtypes on which the answer depends.
            prove: runs the shortcut beside the long way and compares their bits. The false answer (False or ``""``)
                means that the shortcut must not be used.
            device_type: of the tensors, such as ``"cpu"`` or ``"cuda"``: its settings become part of the question.
            again: runs the proof in any case.
            repeat_every: runs the proof of a true answer again at every so many of its uses; 0 for never. Different
                questions are repeated at different uses, so that a step does not repeat all of them.
            counts: counts what this caller proves, beside the process-wide ``Proofs.counts``.

        Returns:
            What ``prove`` returned last for this question. While a step is captured nothing is proven: what is not
            known is answered by False then, and asked again later.
        """
        key = (operation, facts, device_type, settings(device_type))
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                known.uses += 1
                due = repeat_every and known.answer and (known.uses + known.phase) % repeat_every == 0
                if not due and not again:
                    return known.answer  # type: ignore[return-value]
            believed = self._believed.get(_portable(key)) if self._believed and not again else None
            if known is None and believed is not None:
                self._keep(key, believed)
                return believed  # type: ignore[return-value]
        if graphs.capture() is not None:  # a proof would make the host wait
            return known.answer if known is not None else False  # type: ignore[return-value]
        answer = prove()
        with self._lock:
            each: Counting
            for each in (self.counts, counts) if counts is not None else (self.counts,):
                if known is None:
                    each.proven += 1
                else:
                    each.repeated += 1
            if known is not None:
                known.answer = answer
            else:
                self._keep(key, answer)
        return answer

    def forget(self) -> None:
        """Forgets every answer, so that each is proven again."""
        with self._lock:
            self._known.clear()
            self._believed.clear()

    def travelling(self) -> dict[str, list[str]]:
        """Returns what another process may believe (Note: [proofs that travel]): by answer, names of questions."""
        with self._lock:
            answers = {**self._believed, **{_portable(key): known.answer for key, known in self._known.items()}}
        answers.pop("", None)
        found: dict[str, list[str]] = {}
        for name, answer in sorted(answers.items()):
            found.setdefault(answer if isinstance(answer, str) else str(answer), []).append(name)
        return found

    def believe(self, answers: Mapping[str, Sequence[str]]) -> None:
        """Takes the answers that :meth:`travelling` has returned in a process of the same :func:`environment`."""
        with self._lock:
            for answer, names in answers.items():
                meant: bool | str = answer == "True" if answer in ("True", "False") else answer
                self._believed.update(dict.fromkeys(names, meant))
            while len(self._believed) > self.capacity:
                del self._believed[next(iter(self._believed))]

    def _keep(self, key: tuple[object, ...], answer: bool | str) -> None:
        self._known[key] = _Known(answer, zlib.crc32(repr(key[:2]).encode()))
        if len(self._known) > self.capacity:
            self._known.popitem(last=False)


def _portable(key: tuple[object, ...]) -> str:
    """A name of a question that is the same in each process; empty for a question that has no such name."""
    if key[0] not in TRAVELLING:
        return ""
    text = repr(key)
    if _OBJECT.search(text):  # something of this process only
        return ""
    return hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:16]


@cache
def environment() -> str:
    """A hash of all that a proof depends on and that does not change within a process.

    No other process has the same one where a file that it depends on cannot be read, as after the package was removed.
    """
    facts = [__version__, torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability()]
    facts += [platform.machine(), str(os.cpu_count())]
    try:
        facts += _kernels_and_processor()
    except OSError:
        facts.append(uuid.uuid4().hex)
    facts += accelerator.names()
    facts += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_CHOOSING))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _kernels_and_processor() -> list[str]:
    kernels = sorted(Path(__file__).parent.glob("ops/*/*.so"))
    facts = [f"{path.name}: {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in kernels]
    processor = Path("/proc/cpuinfo")
    if processor.is_file():
        lines = processor.read_text(errors="replace").splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "stepping", "Features"))})
    return facts


proofs = Proofs()
"""The answers of this process."""
