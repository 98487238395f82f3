"""The way to another memory, as a planner sees it: which store there is, how fast it is, and what of that is hidden.

On a GPU the other memory is the host's. On CPU it is a disk: the host's memory is the device's there.

Note: [hidden transfers]
    A transfer runs beside the step's own functions, but it is not free. Threads of the store copy and add up checksums,
    which slows functions down that use all processors. So it is measured which share of a transfer is hidden while
    something is computed: 1 if the two take no longer than the longer one, 0 if they take turns. A value is given the
    time between its neighbours on the link, in both directions, and what does not fit into that time is not hidden.
    If fewer values are moved there is more time for each of them, so the prediction errs on the slow side.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

import torch

from backstash import accelerator
from backstash.arguments import is_path
from backstash.codecs import Raw
from backstash.errors import PlanError, StoreError
from backstash.planning.model.plan import STAGING, open_store
from backstash.planning.model.queues import Direction
from backstash.stores import DiskStore, Store, Ticket

SMALLEST = 256 << 10
"""Smaller values are not moved: a transfer takes longer than the store needs to begin one."""

SIZES = (1 << 20, 12 << 20)
"""Bytes of the values that are moved to measure a link."""

ROUNDS = 3

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a transfer in one direction takes.

    Attributes:
        latency: seconds of the shortest one.
        seconds_per_byte: what each byte adds.
        hidden: the share of it that is hidden while something is computed (Note: [hidden transfers]).
    """

    latency: float
    seconds_per_byte: float
    hidden: float

    def seconds(self, nbytes: int) -> float:
        """Returns the time of a transfer with nothing beside it."""
        return self.latency + nbytes * self.seconds_per_byte

    def exposed(self, nbytes: int, beside: float) -> float:
        """Returns the time that a transfer adds to a step that computes for ``beside`` seconds meanwhile."""
        seconds = self.seconds(nbytes)
        return seconds - self.hidden * min(seconds, max(0.0, beside))


@dataclass(frozen=True, slots=True)
class Link:
    """A store that values can be moved to.

    Attributes:
        store: its name in a Session, ``"disk"`` or ``"host"``.
        directory: the folder of a disk store's file.
        hand_over: how long the step waits until a value is handed over.
    """

    store: str
    directory: str
    hand_over: Speed
    out: Speed
    back: Speed

    def seconds_out(self, nbytes: int, beside: float) -> float:
        """Returns the time that moving a value adds to a step that computes for ``beside`` seconds until the next."""
        waits = max(0, nbytes - STAGING) if self.store == "disk" else 0  # there is no room for them beside the step
        hidden_at_best = self.out.exposed(nbytes - waits, beside)
        return self.hand_over.seconds(nbytes) + waits * self.out.seconds_per_byte + hidden_at_best

    def directions(self) -> tuple[Direction, Direction]:
        """Returns the way out and the way back, as the simulation of planning/model/queues.py takes them.

        What is handed over while the step waits slows the step down as what is not hidden does.
        """
        handed = self.hand_over.seconds_per_byte / self.out.seconds_per_byte if self.out.seconds_per_byte else 0.0
        out = Direction(self.out.latency, self.out.seconds_per_byte, 1.0 - self.out.hidden + handed)
        return out, Direction(self.back.latency, self.back.seconds_per_byte, 1.0 - self.back.hidden)

    def seconds_back(self, nbytes: int, beside: float) -> float:
        """Returns the time that it adds to bring a value back that was asked for ``beside`` seconds before."""
        return self.back.exposed(nbytes, beside)


def require_path(chosen: str | os.PathLike[str] | None) -> None:
    """Checks that a user's choice of a folder names one.

    Raises:
        PlanError: it does not.
    """
    if chosen is not None and not is_path(chosen):
        raise PlanError(
            f"offloading was asked for to {chosen!r:.80}, but that names no folder. Pass the path of a folder on a "
            f"local disk, or leave offload_to= out."
        )


def folder(chosen: str | os.PathLike[str] | None = None) -> str:
    """Returns the folder of a disk store's file.

    Args:
        chosen: the user's choice. By default the environment variable ``BACKSTASH_OFFLOAD_TO`` says it, else it is the
            system's folder for temporary files, unless that is in memory, else ``~/.cache/backstash``.

    Raises:
        PlanError: the chosen folder is in memory, or no file can be written there.
    """
    require_path(chosen)
    named = chosen or os.environ.get("BACKSTASH_OFFLOAD_TO")
    tried = [Path(named)] if named else [Path(tempfile.gettempdir()), Path.home() / ".cache" / "backstash"]
    reasons = []
    for path in tried:
        reason = _unusable(path)
        if reason is None and not named:
            path.parent.mkdir(parents=True, exist_ok=True)  # a new machine has no ~/.cache
        elif reason is None and not os.path.isdir(path.parent):
            reason = f"would be in {path.parent}, which is not there"
        if reason is None:
            return str(path.absolute())  # the program may change the current folder before a file is opened there
        reasons.append(f"{path} {reason}")
    raise PlanError(
        f"offloading was asked for, and on CPU values are moved to a disk, but {', and '.join(reasons)}. Name a folder "
        f"on a local disk by bs.profile(..., offload_to=...), --offload-to, or the environment variable "
        f"BACKSTASH_OFFLOAD_TO; or leave 'offload' out."
    )


def measured(device: str, offload_to: str | os.PathLike[str] | None = None) -> Link:
    """Returns the link of a device, measured once in a process for each folder and number of threads.

    Raises:
        PlanError: nothing can be moved to.
    """
    return _measured(device, "" if device != "cpu" else folder(offload_to), torch.get_num_threads())


def allowed(tries: Sequence[str], device: str, offload_to: str | os.PathLike[str] | None = None) -> Link | None:
    """Returns the link over which values may be moved; None where they may not.

    Raises:
        PlanError: nothing can be moved to, or a folder was given and nothing may be moved.
    """
    require_path(offload_to)
    if "offload" in tries:
        return measured(device, offload_to)
    if offload_to is None:
        return None
    raise PlanError(
        f"values were asked to be moved to {str(offload_to)!r}, but 'offload' is not among what is allowed: "
        f"{', '.join(tries)}. Add 'offload' to allow, or leave offload_to out."
    )


@lru_cache(maxsize=8)
def _measured(device: str, directory: str, threads: int) -> Link:
    name = "disk" if device == "cpu" else "host"
    try:
        store = open_store(name, directory)
        try:
            return _Measurement(store, device).link(name, directory)
        finally:
            if isinstance(store, DiskStore):
                store.close()
    except StoreError as error:
        raise PlanError(
            f"offloading was asked for, but the speed of {directory or name} could not be measured: {error} Name "
            f"another folder by bs.profile(..., offload_to=...) or --offload-to, or leave 'offload' out."
        ) from error


def of_speed(bytes_per_second: float, latency: float = 0.0, store: str = "host") -> Link:
    """Returns a link that is as fast in each direction, and slows nothing down.

    Raises:
        PlanError: a number is out of its range.
    """
    if not bytes_per_second > 0 or not latency >= 0:
        raise PlanError(
            f"a link was asked for of {bytes_per_second} bytes per second and {latency} seconds of latency, but it "
            f"takes more than none, and 0 or more."
        )
    way = Speed(latency, 1.0 / bytes_per_second, 1.0)
    return Link(store, "", Speed(0.0, 0.0, 1.0), way, way)


class _Measurement:
    """Moves values to a store and back, alone and beside computations."""

    def __init__(self, store: Store, device: str) -> None:
        self.store, self.device = store, device
        self.square = torch.ones(384, 384, dtype=torch.float32, device=device)
        self._compute(1)
        self.unit = self._timed(lambda: self._compute(4)) / 4
        if not self.unit > 0.0:
            raise StoreError("this machine's clock stands still.")
        for nbytes in SIZES:  # the file grows, and threads are started
            self._way(nbytes, 0.0)

    def link(self, name: str, directory: str) -> Link:
        """Returns what was measured: medians of rounds of which each moves a value of each size twice."""
        alone = [self._median(nbytes, (0.0, 0.0, 0.0)) for nbytes in SIZES]
        most = alone[-1]
        together = self._median(SIZES[-1], most)
        hidden = [_hidden(transfer, both) for transfer, both in zip(most[1:], together[1:], strict=True)]
        hand_over, out, back = (tuple(each[part] for each in alone) for part in range(3))
        return Link(name, directory, _speed(hand_over, 0.0), _speed(out, hidden[0]), _speed(back, hidden[1]))

    def _median(self, nbytes: int, beside: tuple[float, float, float]) -> tuple[float, float, float]:
        rounds = [self._way(nbytes, beside[1], beside[2]) for _ in range(ROUNDS)]
        hand_over, out, back = (median(each[part] for each in rounds) for part in range(3))
        return hand_over, out, back

    def _way(self, nbytes: int, beside_out: float, beside_back: float = 0.0) -> tuple[float, float, float]:
        """Moves a value there and back.

        Returns:
            Seconds to hand it over, from then until it is there, and to bring it back. The last two include
            computations of the given times, which begin together with the transfer.
        """
        encoded = Raw().encode(torch.ones(nbytes // 4, dtype=torch.float32, device=self.device))
        started = time.perf_counter()
        ticket = self.store.put(encoded)
        handed = time.perf_counter() - started
        out = self._timed(lambda: self._wait_beside(beside_out))
        back = self._timed(lambda: self._bring_back(ticket, beside_back))
        self.store.drop(ticket)
        return handed, out, back

    def _bring_back(self, ticket: Ticket, beside: float) -> None:
        self.store.prefetch(ticket)
        self._compute(self._rounds(beside))
        self.store.get(ticket)

    def _rounds(self, seconds: float) -> int:
        return round(seconds / self.unit)

    def _compute(self, rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(self.square, self.square)

    def _wait_beside(self, seconds: float) -> None:
        self._compute(self._rounds(seconds))
        if isinstance(self.store, DiskStore):
            self.store.flush()

    def _timed(self, run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        accelerator.synchronize(self.device)
        return time.perf_counter() - started


def _speed(seconds: tuple[float, ...], hidden: float) -> Speed:
    """Returns the line through the times of both sizes."""
    few, many = seconds
    per_byte = max(0.0, many - few) / (SIZES[1] - SIZES[0])
    return Speed(max(0.0, few - SIZES[0] * per_byte), per_byte, hidden)


def _hidden(transfer: float, both: float) -> float:
    """Returns which share of a transfer was hidden beside a computation that takes as long."""
    return min(1.0, max(0.0, (2 * transfer - both) / transfer)) if transfer else 0.0


def _unusable(path: Path) -> str | None:
    """Returns why a folder cannot hold what is moved, or None if it can."""
    # Methods of Path raise an error where a folder above may not be entered.
    existing = next((each for each in (path, *path.parents) if os.path.exists(each)), path)
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
        return "is no folder that can be written to"
    kind = _file_system(existing.resolve())
    return f"is in memory ({kind})" if kind in _IN_MEMORY else None


def _file_system(path: Path) -> str:
    """Returns the type of the file system that a path is in, or nothing where the system does not tell."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kinds = {Path(fields[1]): fields[2] for fields in (line.split() for line in lines) if len(fields) > 2}
    return next((kinds[each] for each in (path, *path.parents) if each in kinds), "")
