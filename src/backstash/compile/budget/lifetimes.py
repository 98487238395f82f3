"""The bytes that forward and backward hold at each of their operators, for a set of values saved between them.

The backward pass runs the operators that depend on a gradient in the order of the joint graph, and computes each other
value, saved values decoded among them, right before the first operator that reads it. What a compiler fuses is never in
memory: an elementwise result is stored when the first operator reads it that cannot be fused with it.

What is written here is the reference. Where there is the library of kernels, its C++ makes the same estimates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from backstash.compile.budget.joint import BYTES_PER_SECOND, Joint
from backstash.compile.budget.native_lifetimes import NativeLifetimes
from backstash.compile.graph.repeated import LEAST_NBYTES
from backstash.ops.cpu import library

ROUNDED_BYTES_PER_SECOND = 3.5e9
"""Rounding to integers in groups on a CPU and back, by a kernel and in code that a compiler has generated."""

_MOST_READS = 4
"""A compiler stores an elementwise result of several readers that is computed from more values than this, or by a
function that takes long."""


@dataclass(frozen=True)
class Estimate:
    """What a set of saved values leads to.

    Attributes:
        forward: bytes at each operator of the forward pass.
        backward: bytes around each operator of the backward pass that depends on a gradient.
        seconds: time for computing values again, and for encoding.
        saved: bytes of each value that is held between the passes and read in the second one.
        again: the values of the forward pass that the backward pass computes again.
    """

    forward: np.ndarray
    backward: np.ndarray
    seconds: float
    saved: Mapping[int, int]
    again: frozenset[int]

    @classmethod
    def nothing(cls) -> Estimate:
        """Of a graph that is not known."""
        return cls(np.zeros(0), np.zeros(0), 0.0, {}, frozenset())

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return int(max(self.forward.max(initial=0), self.backward.max(initial=0)))

    def above(self, budget: int) -> float:
        """Bytes above a budget, added up over all operators."""
        over = np.clip(self.forward - budget, 0, None).sum() + np.clip(self.backward - budget, 0, None).sum()
        return float(over)


class PassLifetimes:
    """The lifetimes of one pass.

    Args:
        stored: values that are stored, whoever reads them.
        is_repeated: whether each kernel computes for itself what :mod:`backstash.compile.graph.repeated` says.
    """

    def __init__(self, joint: Joint, stored: Iterable[int] = (), is_repeated: bool = False) -> None:
        self._joint = joint
        self._stored = frozenset(stored)
        self._is_repeated = is_repeated
        self._fused_reads: dict[int, list[int]] = {}
        self._needed: set[int] = set()
        self._touches: dict[int, set[int]] = {}
        self._outcomes: dict[int, int] = {}
        self._encoded: set[int] = set()
        self._heavy: set[int] = set()
        self._births: list[tuple[int, set[int]]] = []
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        self.nbytes: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.moment = 0

    def hold(self, number: int, nbytes: int) -> None:
        """A memory that is there from now on."""
        self.born[number] = self.dies[number] = self.moment
        self.nbytes[number] = nbytes

    def planes(self, number: int, nbytes: int) -> None:
        """The planes of an encoded value, which are there from the start."""
        if number not in self.born:
            self.born[number] = self.dies[number] = 0
            self.nbytes[number] = nbytes

    def encoded(self, number: int, planes: int) -> None:
        """A value that is decoded from planes by whoever reads it."""
        self._touches[number] = {planes}
        self._encoded.add(number)

    def outcome(self, number: int, planes: int) -> None:
        """A comparison whose outcome is in the planes of the value that it would read."""
        self._outcomes[number] = planes

    def decode(self, number: int) -> None:
        """An encoded value is decoded by an operator of its own."""
        self.moment += 1
        self._store(number)

    def compute(self, number: int) -> None:
        """The next operator runs."""
        joint = self._joint
        if joint.is_part[number] and joint.reads[number][0] in self.born:  # it is there when the call returns
            self.hold(number, joint.nbytes[number])
            self.born[number] = self.dies[number] = self.born[joint.reads[number][0]]
            return
        self.moment += 1
        touched: set[int] = set()
        is_heavy = joint.is_heavy[number]
        outcome = self._outcomes.get(number)
        if outcome is not None:
            touched.add(outcome)
        if not joint.reads_fused[number] and any(source in self._encoded for source in joint.reads[number]):
            self._store_before(joint.reads[number])
        for source in joint.reads[number] if outcome is None else ():
            if source in self.born:
                touched.add(source)
                if source in joint.copied and not joint.reads_fused[number] and not self.nbytes[source]:
                    self.copies[self.moment] = self.copies.get(self.moment, 0) + joint.copied[source]
            elif source in self._encoded and joint.is_image[source] and joint.reads_fused[number]:
                touched.add(self._decoded(source))
            elif joint.reads_fused[number]:
                touched |= self._touches.get(source, set())
                is_heavy = is_heavy or source in self._heavy
            elif source in self._encoded:  # it is decoded for each reader
                touched |= self._touches[source]
                self.copies[self.moment] = self.copies.get(self.moment, 0) + joint.nbytes[source]
            else:
                self._store(source)
                touched.add(source)
        self._read(touched, joint.reads_fused[number])
        scratch = joint.scratch[number]
        images = joint.in_rows.get(number)
        if images is not None and images not in self._touches:  # a kernel that computes them has them in that order
            scratch += joint.nbytes[images]
        if scratch:
            self.copies[self.moment] = self.copies.get(self.moment, 0) + scratch
        if not joint.fuses[number]:
            self.hold(number, joint.nbytes[number])
            if number in joint.takes_over:
                self._births.append((number, {joint.takes_over[number]}))
            return
        self._touches[number] = touched
        several = joint.is_shared[number] and (is_heavy or len(touched) > _MOST_READS)
        if several or number in self._stored or number in joint.stored:
            self._store(number)
            self._needed |= {number} & (self._stored | joint.stored)
        elif is_heavy:
            self._heavy.add(number)

    def _store_before(self, sources: Iterable[int]) -> None:
        """What an operator reads beside an encoded value is there when that is decoded."""
        absent = [source for source in sources if source not in self.born and source not in self._encoded]
        for source in absent:
            self._store(source)
        self.moment += bool(absent)

    def _decoded(self, source: int) -> int:
        """An encoded image as one call decodes it, for all operators that fuse with each other."""
        decoded = 2 * len(self._joint.nodes) + source
        if decoded not in self.born:
            self._read(self._touches[source])
            self.hold(decoded, self._joint.nbytes[source])
        return decoded

    def finish(self, kept: Iterable[int]) -> np.ndarray:
        """Bytes at each operator, of which ``kept`` are held until the end."""
        for number in kept:
            if number not in self.born and number in self._touches:
                self._store(number)
            if number in self.born:
                self.dies[number] = self.moment
                self._needed.add(number)
        self._repeat()
        changes = np.zeros(self.moment + 2)
        for number, born in self.born.items():
            nbytes = self.nbytes[number]
            changes[born] += nbytes
            changes[self.dies[number] + 1] -= nbytes
        found = np.cumsum(changes)[: self.moment + 1]
        for moment, nbytes in self.copies.items():
            found[moment] += nbytes
        taken: set[int] = set()
        for number, touched in self._births:  # a fused kernel writes over an input that nobody else reads
            moment, nbytes = self.born[number], self.nbytes[number]
            latest = moment if number in self._joint.takes_over else moment - 1
            for source in sorted(touched - taken):
                if self.nbytes[source] == nbytes and self.dies[source] == moment and self.born[source] <= latest:
                    taken.add(source)
                    found[moment] -= nbytes
                    break
        return found

    def _store(self, number: int) -> None:
        touched = self._touches.get(number, set())
        self._read(touched, True)
        self.hold(number, self._joint.nbytes[number])
        self._births.append((number, touched))

    def _read(self, touched: Iterable[int], is_fused: bool = False) -> None:
        for source in touched:
            if is_fused and self._is_repeated and source in self._touches and self._joint.is_light[source]:
                self._fused_reads.setdefault(source, []).append(self.moment)
            else:
                self.dies[source] = self.moment
                self._needed.add(source)

    def _repeat(self) -> None:
        """Ends lifetimes where later kernels compute the value for themselves, from what is there anyway."""
        for number in sorted(self._fused_reads):
            touched, planes = self._touches[number], len(self._joint.nodes)
            until = min((self.dies[n] for n in touched if self.nbytes[n] >= LEAST_NBYTES), default=self.moment)
            if any(n >= planes for n in touched):
                until = -1  # it is not decoded twice
            late = [moment for moment in self._fused_reads[number] if moment > until]
            self.dies[number] = max([self.dies[number], *late])
            if not late and number not in self._needed:  # every kernel that reads it computes it
                self.nbytes[number] = 0


class Lifetimes:
    """Estimates for a joint graph.

    Args:
        rounded: bytes of values in the form to which a policy rounds them.
        tests: for comparisons whose outcomes are stored beside a value that is rounded that value.
    """

    def __init__(
        self, joint: Joint, rounded: Mapping[int, int] | None = None, tests: Mapping[int, int] | None = None
    ) -> None:
        self.joint = joint
        self._rounded = rounded or {}
        self._tests = tests or {}
        count = len(joint.nodes)
        self._fixed = [number for number in range(count) if joint.is_gradient[number] and not joint.is_input[number]]
        self._forward = [number for number in range(count) if joint.is_forward[number] and not joint.is_input[number]]
        self._native = None
        if library.available():
            self._native = NativeLifetimes(joint, self._rounded, self._tests, _MOST_READS)

    def estimate(self, saved: Mapping[int, int]) -> Estimate:
        """The bytes and the time if these values are saved.

        Args:
            saved: bytes in which each saved value is held. What cannot be computed again is saved in any case.
        """
        joint = self.joint
        if self._native is not None:
            forward, backward, read, again = self._native.passes(saved)
            used = {number: saved.get(number, joint.nbytes[number]) for number in read}
        else:
            backward, again, used, inputs = self._backward(saved)
            forward = self._run_forward(used, inputs)
        encoded = sum(self._seconds(number, held) for number, held in used.items() if held != joint.nbytes[number])
        return Estimate(
            forward, backward, encoded + sum(joint.seconds[number] for number in again), used, frozenset(again)
        )

    def _seconds(self, number: int, held: int) -> float:
        """Time for encoding and decoding a value."""
        nbytes = self.joint.nbytes[number]
        if held == self._rounded.get(number) and self.joint.is_on_cpu:
            return nbytes / ROUNDED_BYTES_PER_SECOND
        return 2 * (nbytes + held) / BYTES_PER_SECOND

    def held(self, number: int, saved: Mapping[int, int]) -> int | None:
        """Bytes in which a value is saved; None if backward computes it."""
        held = saved.get(number)
        return self.joint.nbytes[number] if held is None and self.joint.must_be_saved(number) else held

    def _backward(self, saved: Mapping[int, int]) -> tuple[np.ndarray, list[int], dict[int, int], set[int]]:
        joint = self.joint
        copies = joint.copied if joint.saves_copies else {}
        inputs: set[int] = set()
        run = PassLifetimes(joint, is_repeated=joint.counts_on_it)
        ready: set[int] = set()
        again: list[int] = []
        used: dict[int, int] = {}
        starts = []
        planes = len(joint.nodes)
        for number in (*self._fixed, *sorted(joint.gradients)):
            needed, waiting = [], [number]
            while waiting:
                each = waiting.pop()
                if each in ready:
                    continue
                ready.add(each)
                if joint.is_gradient[each]:
                    needed.append(each)
                    waiting += joint.reads[each]
                    continue
                tested = self._tests.get(each)
                if tested is not None and tested in saved and saved[tested] == self._rounded.get(tested):
                    needed.append(each)
                    used[tested] = saved[tested]
                    run.planes(planes + tested, saved[tested])
                    run.outcome(each, planes + tested)
                    continue
                held = None if joint.is_input[each] else self.held(each, saved)
                if held is None or joint.is_input[each]:
                    needed.append(each)
                    waiting += joint.reads[each]
                    continue
                used[each] = held
                if held == joint.nbytes[each]:
                    run.born[each] = run.dies[each] = 0
                    run.nbytes[each] = held
                    continue
                run.planes(planes + each, held)
                run.encoded(each, planes + each)
                if not joint.compiler_fuses:
                    run.decode(each)
            for each in sorted(needed):
                if joint.is_input[each]:
                    inputs.add(each)
                    run.hold(each, copies.get(each, 0))
                    if each in copies:
                        run.born[each] = 0
                    continue
                run.compute(each)
                if joint.is_forward[each] and not joint.is_gradient[each]:
                    again.append(each)
            starts.append(run.moment + 1)
        found = run.finish(sorted(joint.gradients))
        bounds = [0, *sorted(start for start in set(starts) if start < len(found))]
        # One figure for each operator that depends on a gradient, so that estimates can be compared place by place.
        return np.maximum.reduceat(found, bounds), again, used, inputs

    def _run_forward(self, used: Mapping[int, int], inputs: Collection[int]) -> np.ndarray:
        joint = self.joint
        more = joint.ancestors(number for number in used if not joint.is_forward[number])
        extra = {number for number in more if not joint.is_forward[number] and not joint.is_input[number]}
        order = sorted({*self._forward, *extra}) if extra else self._forward
        plain = [number for number, held in used.items() if held == joint.nbytes[number]]
        by_kernel = [number for number, held in used.items() if joint.is_on_cpu and held == self._rounded.get(number)]
        run = PassLifetimes(joint, [*plain, *(number for number in by_kernel if joint.is_forward[number])])
        for number, is_input in enumerate(joint.is_input):
            if is_input:  # the compiler makes the copies at the start
                run.hold(number, joint.copied.get(number, 0))
        planes = len(joint.nodes)
        for number in order:
            run.compute(number)
            held = used.get(number)
            if held is not None and held != joint.nbytes[number]:
                run.hold(planes + number, held)
        encoded = [planes + number for number, held in used.items() if held != joint.nbytes[number]]
        copies = [number for number in sorted(inputs) if number in joint.copied] if joint.saves_copies else []
        results = [number for number in sorted(joint.results) if not joint.is_gradient[number]]
        return run.finish([*plain, *encoded, *copies, *results])
