"""COMET's closed loop: inputs of layers stored to within bounds that follow the gradients while training runs."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstash.codecs import Codec, Signed, Sz, Szp
from backstash.codecs.base import SINGLES
from backstash.codecs.numbers import Scalars
from backstash.codecs.sz import KeptModel
from backstash.errors import UnknownNameError
from backstash.papers.comet.allotment import Allotment, CollectedValue, allot
from backstash.papers.comet.bound import bound_of
from backstash.papers.comet.collection import LayerReading, collector
from backstash.papers.comet.layers import (
    LAYERS,
    WEIGHTS,
    layer_of,
    mean_gain,
    overlapping,
    pattern,
    share_of,
    uses_running_statistics,
    weight_of,
)
from backstash.papers.comet.momentum import Momentum
from backstash.papers.comet.record import Known, Record
from backstash.policies import Lossless
from backstash.policies.base import (
    Action,
    Outcome,
    Policy,
    Recompute,
    Sources,
    Stash,
    check_count,
    check_number,
    check_switch,
    check_word,
)
from backstash.saved import Need, SavedTensor

Kept = tuple[KeptModel, KeptModel]
"""The models of a place: of its values, and of those of them that are not zero."""

CODECS: dict[str, Callable[[float, Kept], tuple[Codec, ...]]] = {
    "szp": lambda bound, kept: (Szp(bound),),
    # Sz refuses a value whose sign a relu reads, and Signed(Sz) serves it.
    "sz": lambda bound, kept: (
        Sz(bound, kept=kept[0]),
        Signed(Sz(bound, nonzero=True, kept=kept[1])),
        Szp(bound),
    ),
}

_CAUTION = 0.5
"""The factor of a bound after a weight gradient pointed elsewhere."""

_LARGEST_RATIO = 4.0
"""The loop corrects the error model by no more than this factor, in either direction."""

_COARSEST = 0.5
"""The largest bound, as a share of the root mean square of the elements that are not zero.

With coarser steps the errors follow the values. Then the error model does not hold, and neither does the loop, which
assumes that errors grow with the bound.
"""

_SMALLEST_INTERVAL = 4
"""Steps between collections, at least."""


class _Traced(NamedTuple):
    """A value in a collecting step: its numbers on the device, or what ``Scalars`` has them by.

    Attributes:
        readers: keys of its readers.
        numel, share, spread: as in CollectedValue.
        gains: for each value that it could be remade from, by key, the gain, and the counts of :func:`overlapping`.
    """

    readers: tuple[str, ...]
    numel: int
    share: Any
    spread: Any
    gains: dict[str, tuple[Any, tuple[Any, Any] | None]]


class Finding(NamedTuple):
    """The numbers of a LayerReading, with which a layer's bound is computed.

    Attributes:
        norm: root mean square of the norms of the output's gradient, over the channels.
        momentum: mean magnitude of the weight's momentum; None without one.
    """

    norm: Any
    magnitude: Any
    momentum: Any
    scale: Any
    coarsest: Any
    limit: Any
    error: Any
    cosine: Any


class _Collected(NamedTuple):
    """What a collecting step has found, on its way to the host.

    Attributes:
        is_on_cpu: whether the host has them.
        found: of each layer, by key; numbers of ``scalars``.
        values: by key; numbers of ``scalars``.
        applied: keys of values and the bounds of their errors, in the order in which they were decided on.
    """

    step: int
    scalars: Scalars
    is_on_cpu: bool
    found: dict[str, Finding]
    values: dict[str, _Traced]
    applied: list[tuple[str, float | None]]

    def values_on_host(self) -> dict[str, tuple[tuple[str, ...], CollectedValue]]:
        """Returns of each value, by its key, the keys of its readers, and the value without a bound."""
        get = self.scalars.get

        def gain_of(gain: Any, counts: Any) -> float:
            share = 1.0 if counts is None else share_of(*map(get, counts))
            return get(gain) * math.sqrt(share)

        found = {}
        for key, (readers, numel, share, spread, gains) in self.values.items():
            known = {source: gain_of(*each) for source, each in gains.items()}
            found[key] = readers, CollectedValue(numel, get(share), get(spread), None, known)
        return found

    def errors(self, values: Mapping[str, tuple[tuple[str, ...], CollectedValue]]) -> dict[str, float]:
        """Returns the bound within which the input of each layer was stored or remade, by the key of the input."""
        bounds: dict[str, float] = {}
        found: dict[str, float] = {}
        for key, bound in self.applied:
            if bound is None:  # made again of others
                gains = values[key][1].gains
                bound = math.hypot(*(gain * bounds.get(source, 0.0) for source, gain in gains.items()))
            bounds[key] = bound
            found |= dict.fromkeys(values[key][0] if key in values else (), bound)
        return found


class Comet(Policy):
    """Stores the inputs of layers to within bounds, so that the errors of weight gradients have a wanted deviation.

    The deviation is a share, ``sigma``, of the mean magnitude of the weight's momentum. The error model (``bound.py``)
    computes the bound for it from the gradients of the layers' outputs, which are read every so many steps. These
    collecting steps also keep exact copies of a few layers' inputs, measure the deviation with them, and correct the
    model by the result. If a weight gradient points elsewhere, the bound of its layer is halved. A warning says so the
    first time.

    An error in a batch norm's input also reaches the gradient of that input, multiplied by the size of the weight's
    gradient per element. Therefore its bound is small enough to keep that error below the share ``sigma`` of the
    input's gradient. The error goes on to the layers below, where the squares of such errors add up.

    A convolution's input may have been computed from a bounded value by a batch norm, a relu and perhaps a sum. It is
    remade from that value if this takes fewer bytes, with the relu's mask exact in a bit per element. Then a single
    bound serves both layers.

    Everything else is exact, as with the policy ``lossless``: values with other readers than the layers and relus,
    layers whose weight is not itself a parameter, layers without statistics, and all of the first steps. A value that
    can be remade from held values is not stored at all.

    A step is a forward pass under a Session. Gradients may be clipped, unscaled or added up over several passes before
    the optimizer's step: the policy sees what becomes of them there (``momentum.py``), and the deviation is a share of
    the momentum all the same. Use one Comet for each model; it may go through several Sessions. A copy of it, also by
    pickle, begins anew and has no optimizer, because the copy of a model has other weights than the optimizer's.

    Args:
        layers: ``"conv"``, ``"linear"``, ``"norm"`` (batch norms that use the batch's statistics), or several of them:
            ``"conv+norm"``.
        sigma: the wanted deviation, as a share of the momentum's mean magnitude.
        every: steps between collections, and the number of exact steps at first. The interval is halved, down to 4, if
            a bound moves by more than a factor of two, and doubled again, up to ``every``, if no bound does.
        codec: ``"szp"``, or ``"sz"``, which is smaller and slower, with another bit per element (codecs.Signed) if a
            relu reads the value as well.
        optimizer: the optimizer whose state holds the momentum (that of SGD, or the first momentum of Adam and its
            kind). Without an optimizer, or for a weight without momentum, a running mean of the weight gradient's
            magnitude serves, and so it does where the momentum is not made of gradients, as that of RMSprop.
        cosine: if the cosine between the weight gradient and the exact gradient is below this, the bound is halved.
        samples: how many layers a collection measures.
        recompute: whether values are remade.

    Attributes:
        history: the latest 4,096 Records, one for each layer and collection.
        allotment: which values are stored within which bound, and which values are remade from these, by key.

    Raises:
        ValueError: a number is out of its range.
        UnknownNameError: there is no such kind of layers, or no such codec.

    Source: COMET (PVLDB 15(4), 2022). Ours has another error model, without a fitted constant, and measures the error.
        A layer without statistics is exact here.

    Example:
        >>> policy = comet(sigma=0.02, every=100)
        >>> policy
        comet(layers='conv', sigma=0.02, every=100, codec='szp')
    """

    def __init__(
        self,
        layers: str = "conv",
        sigma: float = 0.01,
        every: int = 100,
        codec: str = "szp",
        optimizer: torch.optim.Optimizer | None = None,
        *,
        cosine: float = 0.97,
        samples: int = 2,
        recompute: bool = True,
    ) -> None:
        check_word(layers, "layers", "comet", "conv")
        check_word(codec, "codec", "comet", "szp")
        check_number(sigma, "sigma", "comet", 0.01)
        check_number(cosine, "cosine", "comet", 0.97)
        for name, number in (("every", every), ("samples", samples)):
            if not isinstance(number, int) or isinstance(number, bool):  # one below 0 has an error of its own
                check_count(number, name, "steps" if name == "every" else "samples", "comet")
        check_switch(recompute, "recompute", "comet")
        is_wrapped = hasattr(optimizer, "optimizer")
        if optimizer is not None and not (is_wrapped or isinstance(optimizer, torch.optim.Optimizer)):
            raise TypeError(
                f"comet was asked for optimizer={optimizer!r:.80}, but that is no optimizer. Pass the one that trains, "
                f"such as torch.optim.SGD(...), or None for whichever takes the steps."
            )
        kinds = layers.split("+")
        if not set(kinds) <= set(LAYERS):
            raise UnknownNameError(
                f"comet was asked for layers={layers!r}, but there are {', '.join(LAYERS)}, and several joined by '+'."
            )
        if codec not in CODECS:
            raise UnknownNameError(f"comet was asked for codec={codec!r}, but there are {', '.join(CODECS)}.")
        if not 0.0 < sigma < math.inf:
            raise ValueError(
                f"comet was asked for sigma={sigma}, but it is the error's share of the momentum, a finite number "
                f"above zero such as 0.01. Use the policy 'lossless' where nothing may be off."
            )
        if every < 1 or samples < 0 or not -1.0 <= cosine <= 1.0:
            raise ValueError(
                f"comet was asked for every={every}, samples={samples} and cosine={cosine}, but it takes 1 step or "
                f"more, 0 samples or more, and a cosine."
            )
        self.layers, self.sigma, self.every, self.codec = layers, sigma, every, codec
        self.optimizer, self.cosine, self.samples = optimizer, cosine, samples
        self._momentum = Momentum(optimizer)
        self.history: deque[Record] = deque(maxlen=4096)
        self.recomputes = recompute
        self._exact = Lossless(recompute=recompute)
        self._readers = frozenset().union(*(LAYERS[kind] for kind in kinds))
        self._known: dict[str, Known] = {}
        self._kept: dict[str, Kept] = {}
        self.allotment = Allotment()
        self._revision = object()  # another one after each collection
        # Of the collecting step: values by their keys; the bounds of their errors, None where others' bounds decide.
        self._traced: dict[str, _Traced] = {}
        self._applied: list[tuple[str, float | None]] = []
        self._readings: dict[str, LayerReading] = {}
        self._collected: _Collected | None = None  # which the next step evaluates
        # Names of several layers, as modules that are called one by one have: no bound is that of all, so none has one.
        self._shared: set[str] = set()
        self._sampled: frozenset[str] = frozenset()
        self._step = self._collected_in = 0  # passes; the latest one that has collected
        self._due = self._interval = every
        self._lag = 0  # steps by which what a collection finds is evaluated later than at the next step
        self._collecting = False
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(Comet, cosine=self.cosine, samples=self.samples, recompute=self.recomputes)
        return made, (self.layers, self.sigma, self.every, self.codec)

    def __repr__(self) -> str:
        return f"comet(layers={self.layers!r}, sigma={self.sigma}, every={self.every}, codec={self.codec!r})"

    @property
    def bounds(self) -> dict[str, float]:
        """The bound that each layer needs, by the key of its input. A value with several readers has the smallest."""
        return {key: layer.bound for key, layer in self._known.items() if layer.bound is not None}

    @property
    def revision(self) -> object | None:  # type: ignore[override]  # read-only here
        """The same object between two collections, which alone change the bounds; None in a collecting step."""
        return None if self._collecting else self._revision

    def collect_next(self) -> None:
        """Make the next step a collecting step, whatever the interval says."""
        self._due = self._step + 1

    # -- the contract of a policy --------------------------------------------------------------------------------------

    watches_again = False  # but in collecting steps, which have no revision

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action for a value that has no other reader."""
        return self.decide_together(saved, (saved,))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Returns an action within a bound if every reader of the value is a layer that has a bound, else an exact one.

        The bound is the smallest of the readers' bounds, or smaller if other values are remade from this value.
        """
        exact = self._exact.decide(saved)
        bounds = [self._bound(reader.key) for reader in readers if reader.need is Need.VALUE]
        smallest = min((bound for bound in bounds if bound is not None), default=None)
        if saved.need is not Need.VALUE or smallest is None or None in bounds:
            return exact
        stash = exact.otherwise if isinstance(exact, Recompute) else exact
        if not isinstance(stash, Stash):
            return exact
        smallest = min(smallest, self.allotment.bounds.get(saved.key, smallest))
        if self._collecting:
            self._applied.append((saved.key, smallest))
        kept = self._kept.setdefault(saved.key, (KeptModel(), KeptModel()))
        bounded = Stash((*CODECS[self.codec](smallest, kept), *stash.codecs), stash.store)
        if not isinstance(exact, Recompute):
            return bounded
        return replace(exact, otherwise=bounded, within=self.allotment.within.get(saved.key, frozenset()))

    def may_bound(self, readers: Sequence[SavedTensor]) -> bool:
        """Whether layers are all that reads the value itself."""
        values = [(reader.op, reader.role) for reader in readers if reader.need is Need.VALUE]
        return bool(values) and self._readers.issuperset(values)

    def observe(self, outcome: Outcome) -> None:
        """In a collecting step, note the largest error of a value that will be remade."""
        key = outcome.saved.key
        if not self._collecting or all(key != applied for applied, _ in self._applied):
            return
        if outcome.codec == "recompute":
            self._applied.append((key, 0.0))
        elif outcome.codec == "recompute within":
            self._applied.append((key, None))

    def trace(self, saved: SavedTensor, readers: Sequence[SavedTensor], sources: Sources) -> None:
        """In a collecting step, note from which other values a value could be remade."""
        if not self._collecting:
            return
        keys = tuple(reader.key for reader in readers if reader.need is Need.VALUE)
        reading = self._readings.get(keys[0]) if keys else None
        if reading is None or not all(key in self._readings for key in keys):
            return
        gains = {
            source: (mean_gain(gain, reading.shares), self._overlapping(source, reading))
            for source, gain in (sources() or {}).items()
        }
        self._traced[saved.key] = _Traced(keys, saved.spec.numel, reading.shares.mean(), reading.spread, gains)

    def _overlapping(self, source: str, reading: LayerReading) -> tuple[Tensor, Tensor] | None:
        """Counts the elements read that can have an error of this source, because both are not zero."""
        keys = self._traced[source].readers if source in self._traced else ()
        return overlapping(self._readings[keys[0]].pattern, reading.pattern) if keys else None

    def begin_step(self) -> None:
        """Evaluate what the last step collected, and decide whether this step collects.

        Where gradients of several passes are added up, that waits for the optimizer's step behind them.
        What an accelerator has computed is evaluated a step later, by when the host has the numbers without a wait.
        That step is a part of the interval, so bounds begin in the same step on every device.
        """
        self._momentum.begin_pass()
        collected, self._collected = self._collected, self._gather()
        if self._collected is not None and self._collected.is_on_cpu:
            collected, self._collected = self._collected, None
        if collected is not None:
            self._evaluate(collected)
        self._step += 1
        is_over = self._collected is None and not self._readings
        self._collecting = self._step + self._lag >= self._due and is_over
        bounded = sorted(self.bounds, key=lambda key: self._known[key].sampled)
        self._sampled = frozenset(bounded[: self.samples] if self._collecting else ())
        if self._collecting:
            self._traced, self._applied, self._collected_in = {}, [], self._step
            self._momentum.watch(self._readings)

    def watch(self, saved: SavedTensor, node: Any, x: Tensor) -> None:
        """In a collecting step, hook the node of a layer, so that its gradients are noted when it runs."""
        if (saved.op, saved.role) not in self._readers or x.dtype not in SINGLES:  # others are stored exactly
            return
        self._lag = 0 if x.is_cpu else 1
        if not self._collecting:
            return
        parameter = weight_of(node)
        if parameter is None or uses_running_statistics(node):
            self._known.pop(saved.key, None)
            return
        known = self._readings.get(saved.key)
        if known is not None and known.parameter is not parameter:
            self._shared.add(saved.key)
        if saved.key in self._shared:
            self._known.pop(saved.key, None)
            return
        with torch.no_grad():
            layer = layer_of(node, x, saved.key in self._sampled)
            spread = layer.spread(x)
            reading = self._readings.get(saved.key)
            if reading is None:
                reading = self._readings[saved.key] = LayerReading(parameter, layer.shares, spread, pattern(x))
                self._momentum.listen(reading)
            reading.keep_below(_COARSEST * spread)
            exact = x.detach().clone() if saved.key in self._sampled else None
        node.register_hook(collector(reading, layer, self.sigma, WEIGHTS[saved.op], exact))

    # -- evaluating a collection ---------------------------------------------------------------------------------------

    def _bound(self, key: str) -> float | None:
        layer = self._known.get(key)
        return None if layer is None else layer.bound

    def _smallest_bound(self, readers: Sequence[str]) -> float | None:
        bounds = [bound for key in readers if (bound := self._bound(key)) is not None]
        return min(bounds) if bounds and len(bounds) == len(readers) else None

    def _gather(self) -> _Collected | None:
        """Returns what the latest collecting step has found, once it is known what the optimizer got."""
        if not self._readings:
            return None
        has_run = any(reading.energy is not None for reading in self._readings.values())
        if has_run and self._momentum.is_awaited:
            return None
        readings, self._readings = self._readings, {}
        self._momentum.end()
        self._revision = object()
        scalars = Scalars()
        found = {
            key: Finding(*(None if number is None else scalars.add(number) for number in self._numbers(reading)))
            for key, reading in readings.items()
            if reading.energy is not None and key not in self._shared
        }
        if not found:  # so the next step collects
            return None
        values = {}
        for key, (readers, numel, share, spread, gains) in self._traced.items():
            sent = {
                source: (
                    scalars.add(gain),
                    None if counts is None else (scalars.add(counts[0]), scalars.add(counts[1])),
                )
                for source, (gain, counts) in gains.items()
            }
            values[key] = _Traced(readers, numel, scalars.add(share), scalars.add(spread), sent)
        is_on_cpu = scalars.is_on_cpu
        scalars.send()
        return _Collected(self._collected_in, scalars, is_on_cpu, found, values, self._applied)

    def _numbers(self, reading: LayerReading) -> tuple[Tensor | float | None, ...]:
        """Returns the numbers of a Finding, wherever they are."""
        assert reading.energy is not None
        return (
            reading.energy.double().sqrt().square().mean().sqrt(),
            reading.magnitude,
            self._momentum.mean_of(reading.parameter),
            reading.scale,
            reading.coarsest,
            reading.limit,
            reading.error,
            reading.cosine,
        )

    def _evaluate(self, collected: _Collected) -> None:
        values, get = collected.values_on_host(), collected.scalars.get
        applied = collected.errors(values)
        self._revision = object()
        before = self.bounds
        doubted = False
        for key, finding in collected.found.items():
            layer = self._known.setdefault(key, Known())
            caution = layer.caution
            finding = Finding(*(None if number is None else get(number) for number in finding))
            self.history.append(self._update(collected.step, key, layer, finding, applied.get(key, 0.0)))
            doubted |= layer.caution < caution
        self.allotment = allot(
            {key: replace(value, bound=self._smallest_bound(keys)) for key, (keys, value) in values.items()}
        )
        moves = [max(bound / before[key], before[key] / bound) for key, bound in self.bounds.items() if key in before]
        if not moves or doubted:  # first or smaller bounds: the next step measures their effect
            self.collect_next()
            return
        is_steady = max(moves) <= 2.0
        halved = max(self._interval // 2, min(_SMALLEST_INTERVAL, self.every))
        self._interval = min(self._interval * 2, self.every) if is_steady else halved
        self._due = self._step + self._interval

    def _update(self, step: int, key: str, layer: Known, found: Finding, applied: float) -> Record:
        """Sets the layer's bound by what was found, unless that is not finite. Returns the record."""
        norm = found.norm
        target = self.sigma * self._magnitude(layer, found)
        record = Record(step, key, layer.bound, target)
        if not (math.isfinite(norm) and math.isfinite(target)):
            return replace(record, note="its gradients are not finite: the bound stays")
        if applied:
            passed = self.sigma * applied / found.limit
            record = replace(record, predicted=applied * norm / math.sqrt(3), passed=passed)
        if found.error is not None:
            layer.sampled = step
            record = self._compare(layer, record, math.sqrt(found.error), found.cosine)
        if target == 0.0 or norm == 0.0:
            layer.bound = None
            return replace(record, bound=None, note="no gradient or no momentum: stored exactly")
        bound = min(bound_of(target, norm) * layer.ratio, found.coarsest) * layer.caution
        layer.bound = bound if 0.0 < bound < math.inf else None
        return replace(record, bound=layer.bound)

    def _compare(self, layer: Known, record: Record, measured: float, cosine: float) -> Record:
        """Correct the model of a layer by the measured deviation and cosine, and return the record with both."""
        record = replace(record, measured=measured, cosine=cosine)
        if not math.isfinite(measured):
            return replace(record, note="its weight gradient is not finite")
        if measured == 0.0:
            return replace(record, note="it was made again or stored exactly")
        if record.predicted:
            # The ratio varies between steps, so it moves half of the way.
            ratio = math.sqrt(layer.ratio * record.predicted / measured)
            layer.ratio = min(max(ratio, 1 / _LARGEST_RATIO), _LARGEST_RATIO)
        if cosine >= self.cosine:
            # Twice the bound takes four times as much off the cosine.
            if 1.0 - cosine <= (1.0 - self.cosine) * _CAUTION**2:
                layer.caution = min(1.0, layer.caution / _CAUTION)
            return record
        layer.caution *= _CAUTION
        note = f"cosine {cosine:.4f} below {self.cosine}: the bound is halved"
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"comet: with the input of {record.key} stored to within {record.bound}, its weight gradient has a "
                f"cosine of {cosine:.4f} to the exact one, below {self.cosine}; its bound is halved. A smaller sigma "
                f"avoids this. It is said once; policy.history has the rest.",
                stacklevel=2,
            )
        return replace(record, note=note)

    def _magnitude(self, layer: Known, found: Finding) -> float:
        """Returns the mean magnitude of the weight's momentum, or of its gradients if it has no momentum."""
        if found.scale is not None and 0.0 < found.scale < math.inf:
            layer.scale = found.scale
        if found.momentum is not None:
            momentum: float = found.momentum
            return momentum / layer.scale
        now: float = found.magnitude
        if math.isfinite(now):
            layer.magnitude = now if layer.magnitude is None else (layer.magnitude + now) / 2
        return now if layer.magnitude is None else layer.magnitude


def comet(
    layers: str = "conv",
    sigma: float = 0.01,
    every: int = 100,
    codec: str = "szp",
    optimizer: torch.optim.Optimizer | None = None,
    **more: Any,
) -> Comet:
    """Returns the policy :class:`Comet`."""
    return Comet(layers, sigma, every, codec, optimizer, **more)
