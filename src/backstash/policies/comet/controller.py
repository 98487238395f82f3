"""COMET's closed loop: inputs of layers stored to within bounds that follow the gradients while training runs."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backstash.codecs import Codec, Signed, Sz, Szp
from backstash.codecs.sz import KeptModel
from backstash.errors import UnknownNameError
from backstash.policies.base import Action, Outcome, Policy, Recompute, Sources, Stash
from backstash.policies.comet.allotment import Allotment, Value, allot
from backstash.policies.comet.bound import bound_for
from backstash.policies.comet.collection import Reading, collector
from backstash.policies.comet.layers import (
    LAYERS,
    WEIGHTS,
    layer_of,
    mean_gain,
    overlap,
    pattern,
    uses_running_statistics,
    weight_of,
)
from backstash.policies.comet.momentum import Momentum
from backstash.policies.comet.record import Known, Record
from backstash.policies.lossless import Lossless
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
    the momentum all the same. Use one Comet for each model; it may go through several Sessions.

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
            magnitude serves.
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
        # Of the collecting step, by the value's key: the keys of its readers, and the value; the bound of its error.
        self._values: dict[str, tuple[tuple[str, ...], Value]] = {}
        self._applied: dict[str, float] = {}
        self._readings: dict[str, Reading] = {}
        # Names of several layers, as modules that are called one by one have: no bound is that of all, so none has one.
        self._shared: set[str] = set()
        self._sampled: frozenset[str] = frozenset()
        self._step = 0
        self._due = self._interval = every
        self._collecting = False
        self._warned = False

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
            self._apply(saved.key, smallest)
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
        if not self._collecting or key not in self._applied:
            return
        if outcome.codec == "recompute":
            self._apply(key, 0.0)
        elif outcome.codec == "recompute within":
            gains = self._values[key][1].gains
            self._apply(key, math.hypot(*(gain * self._applied.get(source, 0.0) for source, gain in gains.items())))

    def trace(self, saved: SavedTensor, readers: Sequence[SavedTensor], sources: Sources) -> None:
        """In a collecting step, note from which other values a value could be remade."""
        if not self._collecting:
            return
        keys = tuple(reader.key for reader in readers if reader.need is Need.VALUE)
        reading = self._readings.get(keys[0]) if keys else None
        if reading is None or not all(key in self._readings for key in keys):
            return
        gains = {
            source: mean_gain(gain, reading.shares) * math.sqrt(self._overlap(source, reading))
            for source, gain in (sources() or {}).items()
        }
        value = Value(saved.spec.numel, float(reading.shares.mean()), float(reading.spread), None, gains)
        self._values[saved.key] = keys, value

    def _overlap(self, source: str, reading: Reading) -> float:
        """Returns the share of the elements read that can have an error of this source, because both are not zero."""
        keys = self._values[source][0] if source in self._values else ()
        return overlap(self._readings[keys[0]].pattern, reading.pattern) if keys else 1.0

    def _apply(self, key: str, bound: float) -> None:
        self._applied[key] = bound
        for reader in self._values[key][0] if key in self._values else ():
            self._readings[reader].applied = bound

    def begin_step(self) -> None:
        """Evaluate what the last step collected, and decide whether this step collects."""
        if self._readings:
            self._evaluate()
        self._step += 1
        self._collecting = self._step >= self._due
        bounded = sorted(self.bounds, key=lambda key: self._known[key].sampled)
        self._sampled = frozenset(bounded[: self.samples] if self._collecting else ())
        if self._collecting:
            self._values, self._applied = {}, {}
            self._momentum.watch(self._readings)

    def watch(self, saved: SavedTensor, node: Any, x: Tensor) -> None:
        """In a collecting step, hook the node of a layer, so that its gradients are noted when it runs."""
        if not self._collecting or (saved.op, saved.role) not in self._readers or not x.is_floating_point():
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
            reading = self._readings.setdefault(saved.key, Reading(parameter, layer.shares, spread, pattern(x)))
            reading.keep_below(_COARSEST * spread)
            exact = x.detach().clone() if saved.key in self._sampled else None
        node.register_hook(collector(reading, layer, self.sigma, WEIGHTS[saved.op], exact))

    # -- evaluating a collection ---------------------------------------------------------------------------------------

    def _bound(self, key: str) -> float | None:
        layer = self._known.get(key)
        return None if layer is None else layer.bound

    def _smallest_bound(self, readers: Sequence[str]) -> float | None:
        """Returns the smallest bound of these readers, or None if a reader has none."""
        bounds = [bound for key in readers if (bound := self._bound(key)) is not None]
        return min(bounds) if bounds and len(bounds) == len(readers) else None

    def _evaluate(self) -> None:
        readings, self._readings = self._readings, {}
        self._revision = object()
        complete = {
            key: reading for key, reading in readings.items() if reading.energy is not None and key not in self._shared
        }
        if not complete:  # no backward ran, so the next step collects
            return
        before = self.bounds
        doubted = False
        for key, reading in complete.items():
            layer = self._known.setdefault(key, Known())
            caution = layer.caution
            self.history.append(self._update(key, layer, reading))
            doubted |= layer.caution < caution
        self.allotment = allot(
            {key: replace(value, bound=self._smallest_bound(keys)) for key, (keys, value) in self._values.items()}
        )
        moves = [max(bound / before[key], before[key] / bound) for key, bound in self.bounds.items() if key in before]
        if not moves or doubted:  # first or smaller bounds: the next step measures their effect
            self.collect_next()
            return
        is_steady = max(moves) <= 2.0
        halved = max(self._interval // 2, min(_SMALLEST_INTERVAL, self.every))
        self._interval = min(self._interval * 2, self.every) if is_steady else halved
        self._due = self._step + self._interval

    def _update(self, key: str, layer: Known, reading: Reading) -> Record:
        """Set the layer's bound by a reading, and return the record. If a number is not finite, the bound stays."""
        assert reading.energy is not None
        norms = reading.energy.double().sqrt()
        norm = float(norms.square().mean().sqrt())
        target = self.sigma * self._magnitude(layer, reading)
        record = Record(self._step, key, layer.bound, target)
        if not (math.isfinite(norm) and math.isfinite(target)):
            return replace(record, note="its gradients are not finite: the bound stays")
        if reading.applied:
            passed = self.sigma * reading.applied / float(reading.limit)
            record = replace(record, predicted=reading.applied * norm / math.sqrt(3), passed=passed)
        if reading.error is not None:
            layer.sampled = self._step
            record = self._compare(layer, record, math.sqrt(float(reading.error)), float(reading.cosine))
        if target == 0.0 or norm == 0.0:
            layer.bound = None
            return replace(record, bound=None, note="no gradient or no momentum: stored exactly")
        bound = min(bound_for(target, norms) * layer.ratio, float(reading.coarsest)) * layer.caution
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

    def _magnitude(self, layer: Known, reading: Reading) -> float:
        """Returns the mean magnitude of the weight's momentum, or of its gradients if it has no momentum.

        See Note: [gradients on the way to the optimizer].
        """
        if reading.scale is not None and 0.0 < float(reading.scale) < math.inf:
            layer.scale = float(reading.scale)
        momentum = self._momentum.of(reading.parameter)
        if momentum is not None:
            return momentum / layer.scale
        now = float(reading.magnitude)
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
