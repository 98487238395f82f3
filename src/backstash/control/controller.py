"""COMET's closed loop: inputs of layers stored to within bounds that follow the gradients while training runs."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from backstash.codecs import Codec, Signed, Sz, Szp
from backstash.control.bound import bound_for, channel_norms, coverage
from backstash.control.plan import Plan, Value, plan
from backstash.errors import UnknownNameError
from backstash.needs import op_of
from backstash.policies import Lossless
from backstash.policy import Action, Outcome, Recompute, Stash
from backstash.saved import Need, SavedTensor
from backstash.torch_internals import no_torch_function

LAYERS: dict[str, frozenset[tuple[str, str]]] = {
    "conv": frozenset({("Convolution", "input")}),
    "linear": frozenset({("Addmm", "mat1"), ("Mm", "self")}),
    "norm": frozenset({("NativeBatchNorm", "input"), ("CudnnBatchNorm", "input")}),
}
"""Kinds of layers, and what their autograd nodes save their input as."""

CODECS: dict[str, Callable[[float], tuple[Codec, ...]]] = {
    "szp": lambda bound: (Szp(bound),),
    "sz": lambda bound: (Sz(bound), Signed(Sz(bound, nonzero=True)), Szp(bound)),  # the first where no relu reads it
}

_WEIGHTS = {"Convolution": 1, "Addmm": 2, "Mm": 1, "NativeBatchNorm": 1, "CudnnBatchNorm": 1}
"""Which of its node's inputs a layer's weight is."""

_CAUTION = 0.5
_LARGEST_RATIO = 4.0
_COARSEST = 0.5
"""The largest bound, as a share of the root mean square of what is not zero: with steps that are coarser, errors go
with the values, and the model and the loop, which takes errors to grow with the bound, no longer hold."""

_SMALLEST_INTERVAL = 4
_dispatch: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Record:
    """What one collection told of one layer.

    Attributes:
        step: when.
        key: of the layer's input.
        bound: from now on; None: stored exactly.
        target: the standard deviation that its weight gradient's error is wanted to have.
        predicted: the one that it should have had in this step by the error model; None where it was exact.
        measured: the one that it had; None where the layer was not sampled.
        cosine: between the weight gradient and the one of the exact input; None where the layer was not sampled.
        note: what was done about it, if anything out of the ordinary.
    """

    step: int
    key: str
    bound: float | None
    target: float
    predicted: float | None = None
    measured: float | None = None
    cosine: float | None = None
    note: str = ""


@dataclass(slots=True)
class _Reading:
    """A layer in a collecting step. A module that runs twice adds up, as its weight gradients do."""

    parameter: nn.Parameter
    shares: Tensor  # of the input's elements that are not zero, by channel
    spread: Tensor
    applied: float = 0.0  # the bound that the input was stored or made again within
    coarsest: Tensor | float = math.inf  # bound
    energy: Tensor | None = None  # by channel: what the error's variance is 3 / bound**2 times, [channels]
    magnitude: Tensor | float = 0.0  # mean magnitude of the weight gradient
    error: Tensor | float | None = None  # mean square of the weight gradient's difference from the exact one
    cosine: Tensor | float = 1.0

    def keep_below(self, bound: Tensor) -> None:
        """Make sure that the bound is not above that."""
        self.coarsest = torch.minimum(torch.as_tensor(self.coarsest, device=bound.device), bound)


@dataclass(slots=True)
class _Known:
    """What is known of a layer from one collection to the next."""

    bound: float | None = None
    magnitude: float | None = None
    ratio: float = 1.0  # of the predicted to the measured sigma
    caution: float = 1.0
    sampled: int = 0


class Comet:
    """Stores the inputs of layers to within bounds, by which their weight gradients are off by a wanted deviation.

    That is a share, ``sigma``, of the mean magnitude of the weight's momentum. How a bound and a deviation go together
    is told by the error model (``control.bound``), for which the gradients of the layers' outputs are looked at every
    so many steps. These steps also measure the deviation in a few layers, of whose inputs they keep exact copies, and
    correct what the model says by it; where the weight gradient points elsewhere, the layer's bound is halved, which a
    warning says once.

    Of a batch norm the gradient of its input is off as well, by a product of the error and of what the weight's
    gradient has per element: its bound is also so small that this is no more than the share ``sigma`` of the gradient.
    It goes on to the layers below, where such errors add up as the root of their squares.

    A convolution's input that a batch norm and a relu made of a bounded value, and perhaps a sum, is made again from
    it, with the relu's mask exact in a bit per element, where that takes less: then the one bound serves both layers.

    Everything else is exact as with the policy ``lossless``: what is read by others than the layers and relus, layers
    whose weight is no parameter itself, a layer of which nothing is known, and all of the first steps. What can be
    made again from what is held is not stored at all.

    A step is a forward pass under a Session. Where several add up their gradients, so do the errors: as the square
    root of their number. Where the loss is scaled (torch.amp.GradScaler) the momentum is not, so pass no optimizer.
    Use one Comet for each model; it may go through several Sessions.

    Args:
        layers: ``"conv"``, ``"linear"``, ``"norm"`` (batch norms that use the batch's statistics), or several:
            ``"conv+norm"``.
        sigma: the share.
        every: steps between collections, and the number of exact steps at first. Where a bound moves by more than
            twice they are halved, down to 4, and doubled again when the bounds have settled.
        codec: ``"szp"``, or ``"sz"``: smaller and slower, with a bit per element (codecs.Signed) where a relu reads the
            value as well.
        optimizer: whose state has the momentum (SGD's, or the first one of Adam and its kind). Without it, or where it
            has none, a running mean of the weight gradient's magnitude serves.
        cosine: between the weight gradient and the exact one, below which a layer's bound is halved.
        samples: how many layers a collection measures.
        recompute: whether values are made again.

    Attributes:
        history: what was found and decided, a Record for each layer and collection, the latest 4,096.
        plan: by keys of values what is stored within which bound, and what is made again from it.

    Raises:
        ValueError: a number is out of its range, or there are no such layers or codec.

    Source: COMET (PVLDB 15(4), 2022). Ours has another error model, without a fitted constant, and measures; a layer
        is exact where COMET had no statistics.

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
        self.history: deque[Record] = deque(maxlen=4096)
        self.recomputes = recompute
        self._exact = Lossless(recompute=recompute)
        self._readers = frozenset().union(*(LAYERS[kind] for kind in kinds))
        self._known: dict[str, _Known] = {}
        self.plan = Plan()
        self._made: dict[str, tuple[tuple[str, ...], Value]] = {}  # in the collecting step: keys of readers, and value
        self._applied: dict[str, float] = {}
        self._readings: dict[str, _Reading] = {}
        self._sampled: frozenset[str] = frozenset()
        self._step = 0
        self._due = self._interval = every
        self._collecting = False
        self._warned = False

    def __repr__(self) -> str:
        return f"comet(layers={self.layers!r}, sigma={self.sigma}, every={self.every}, codec={self.codec!r})"

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that layers ask for, by the key of the layer's input; what several read has the smallest."""
        return {key: layer.bound for key, layer in self._known.items() if layer.bound is not None}

    # -- what a Session asks -------------------------------------------------------------------------------------------

    def decide(self, saved: SavedTensor) -> Action:
        """As if nobody else read the value."""
        return self.decide_together(saved, (saved,))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """A bound where all who read the value are layers that have one: the smallest of these, or a smaller one."""
        exact = self._exact.decide(saved)
        bounds = [self._bound(reader.key) for reader in readers if reader.need is Need.VALUE]
        smallest = min((bound for bound in bounds if bound is not None), default=None)
        if saved.need is not Need.VALUE or smallest is None or None in bounds:
            return exact
        stash = exact.otherwise if isinstance(exact, Recompute) else exact
        if not isinstance(stash, Stash):
            return exact
        smallest = min(smallest, self.plan.bounds.get(saved.key, smallest))
        if self._collecting:
            self._apply(saved.key, smallest)
        bounded = Stash((*CODECS[self.codec](smallest), *stash.codecs), stash.store)
        if not isinstance(exact, Recompute):
            return bounded
        return replace(exact, otherwise=bounded, within=self.plan.within.get(saved.key, frozenset()))

    def observe(self, outcome: Outcome) -> None:
        """In a collecting step, note how far a value that was made again may be off."""
        key = outcome.saved.key
        if not self._collecting or key not in self._applied:
            return
        if outcome.codec == "recompute":
            self._apply(key, 0.0)
        elif outcome.codec == "recompute within":
            gains = self._made[key][1].gains
            self._apply(key, math.hypot(*(gain * self._applied.get(source, 0.0) for source, gain in gains.items())))

    def trace(
        self,
        saved: SavedTensor,
        readers: Sequence[SavedTensor],
        sources: Callable[[], dict[str, Tensor] | None],
    ) -> None:
        """In a collecting step, find out from which others a value could be made again."""
        if not self._collecting:
            return
        keys = tuple(reader.key for reader in readers if reader.need is Need.VALUE)
        reading = self._readings.get(keys[0]) if keys else None
        if reading is None or not all(key in self._readings for key in keys):
            return
        gains = {source: _mean_gain(gain, reading.shares) for source, gain in (sources() or {}).items()}
        value = Value(saved.spec.numel, float(reading.shares.mean()), float(reading.spread), None, gains)
        self._made[saved.key] = keys, value

    def _apply(self, key: str, bound: float) -> None:
        self._applied[key] = bound
        for reader in self._made[key][0] if key in self._made else ():
            self._readings[reader].applied = bound

    def begin_step(self) -> None:
        """Take in what the last step has collected, and see whether this one has to."""
        if self._readings:
            self._take_in()
        self._step += 1
        self._collecting = self._step >= self._due
        bounded = sorted(self.bounds, key=lambda key: self._known[key].sampled)
        self._sampled = frozenset(bounded[: self.samples] if self._collecting else ())
        if self._collecting:
            self._made, self._applied = {}, {}

    def watch(self, saved: SavedTensor, node: Any, x: Tensor) -> None:
        """In a collecting step, have the node tell of its gradients when it runs."""
        if not self._collecting or (saved.op, saved.role) not in self._readers or not x.is_floating_point():
            return
        parameter = _parameter(node)
        by_running_statistics = not getattr(node, "_saved_training", True)  # a batch norm in evaluation mode
        if parameter is None or by_running_statistics:
            self._known.pop(saved.key, None)
            return
        with torch.no_grad():
            layer = _layer(node, x)
            spread = layer.spread(x)
            reading = self._readings.setdefault(saved.key, _Reading(parameter, layer.shares, spread))
            reading.keep_below(_COARSEST * spread)
            exact = x.detach().clone() if saved.key in self._sampled else None
        node.register_hook(_collector(reading, layer, self.sigma, _WEIGHTS[saved.op], exact))

    # -- what becomes of it --------------------------------------------------------------------------------------------

    def _bound(self, key: str) -> float | None:
        layer = self._known.get(key)
        return None if layer is None else layer.bound

    def _asked(self, readers: Sequence[str]) -> float | None:
        """The smallest bound of these readers, if all have one."""
        bounds = [bound for key in readers if (bound := self._bound(key)) is not None]
        return min(bounds) if bounds and len(bounds) == len(readers) else None

    def _take_in(self) -> None:
        readings, self._readings = self._readings, {}
        complete = {key: reading for key, reading in readings.items() if reading.energy is not None}
        if not complete:  # no backward: the next step collects
            return
        before = self.bounds
        doubted = False
        for key, reading in complete.items():
            layer = self._known.setdefault(key, _Known())
            caution = layer.caution
            self.history.append(self._update(key, layer, reading))
            doubted |= layer.caution < caution
        self.plan = plan({key: replace(value, bound=self._asked(keys)) for key, (keys, value) in self._made.items()})
        moves = [max(bound / before[key], before[key] / bound) for key, bound in self.bounds.items() if key in before]
        if not moves or doubted:  # the first bounds, or smaller ones: see at once what they do
            self._due = self._step + 1
            return
        settled = max(moves) <= 2.0
        halved = max(self._interval // 2, min(_SMALLEST_INTERVAL, self.every))
        self._interval = min(self._interval * 2, self.every) if settled else halved
        self._due = self._step + self._interval

    def _update(self, key: str, layer: _Known, reading: _Reading) -> Record:
        """The layer's new bound; the one that it has stays where the step's numbers are none."""
        assert reading.energy is not None
        norms = reading.energy.double().sqrt()
        norm = float(norms.square().mean().sqrt())
        target = self.sigma * self._magnitude(layer, reading)
        record = Record(self._step, key, layer.bound, target)
        if not (math.isfinite(norm) and math.isfinite(target)):
            return replace(record, note="its gradients are not finite: the bound stays")
        if reading.applied:
            record = replace(record, predicted=reading.applied * norm / math.sqrt(3))
        if reading.error is not None:
            layer.sampled = self._step
            record = self._compare(layer, record, math.sqrt(float(reading.error)), float(reading.cosine))
        if target == 0.0 or norm == 0.0:
            layer.bound = None
            return replace(record, bound=None, note="no gradient or no momentum: stored exactly")
        bound = min(bound_for(target, norms) * layer.ratio, float(reading.coarsest)) * layer.caution
        layer.bound = bound if 0.0 < bound < math.inf else None
        return replace(record, bound=layer.bound)

    def _compare(self, layer: _Known, record: Record, measured: float, cosine: float) -> Record:
        """Correct the model by what was measured."""
        record = replace(record, measured=measured, cosine=cosine)
        if not math.isfinite(measured):
            return replace(record, note="its weight gradient is not finite")
        if measured == 0.0:
            return replace(record, note="it was made again or stored exactly")
        if record.predicted:
            ratio = math.sqrt(layer.ratio * record.predicted / measured)  # half way: it does not quite stay the same
            layer.ratio = min(max(ratio, 1 / _LARGEST_RATIO), _LARGEST_RATIO)
        if cosine >= self.cosine:
            if 1.0 - cosine <= (1.0 - self.cosine) * _CAUTION**2:  # twice the bound takes four times as much off it
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

    def _magnitude(self, layer: _Known, reading: _Reading) -> float:
        """The mean magnitude of the weight's momentum, or what stands in for it."""
        state = self.optimizer.state.get(reading.parameter, {}) if self.optimizer is not None else {}
        for name in ("momentum_buffer", "exp_avg"):
            if isinstance(state.get(name), Tensor):
                return float(state[name].detach().abs().mean(dtype=torch.float32))
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
    """The policy :class:`Comet`."""
    return Comet(layers, sigma, every, codec, optimizer, **more)


# -- autograd nodes ----------------------------------------------------------------------------------------------------


def _parameter(node: Any) -> nn.Parameter | None:
    """The layer's weight, where its gradient goes to a parameter and nowhere else."""
    following, _ = node.next_functions[_WEIGHTS[op_of(node)]]
    while following is not None and type(following).__name__ in ("TBackward0", "ToCopyBackward0"):
        following, _ = following.next_functions[0]
    return following.variable if type(following).__name__ == "AccumulateGrad" else None


@dataclass(frozen=True, slots=True)
class _Linear:
    """What a collecting step has to know of a layer: here of a linear one, of which a weight reads each sample once.

    Attributes:
        shape: of the input.
        shares: of the input's elements that are not zero, by channel.
    """

    shape: tuple[int, ...]
    shares: Tensor

    @property
    def share(self) -> Tensor:
        """Of all."""
        return self.shares.mean()

    def spread(self, x: Tensor) -> Tensor:
        """How large the numbers are that the codec has to tell apart."""
        norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
        return norm / (self.share * max(x.numel(), 1)).clamp(min=1).sqrt()

    def energy(self, grad: Tensor, weight: Tensor) -> Tensor:
        """What the error's variance is 3 / bound**2 times, by channel, for the output's gradient."""
        return channel_norms(grad, -1).square() * self.share

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """As the node computes it; of ``weight`` only the layout is read."""
        return x.T @ grad

    def coarsest(self, sigma: float, made: Tensor | None, weight_grad: Tensor, weight: Tensor) -> Tensor | None:
        """The bound by which the input's gradient, ``made``, is off by its share ``sigma``; None where it never is."""
        return None


@dataclass(frozen=True, slots=True)
class _Convolution(_Linear):
    """A convolution, of which some of a weight's taps fall into the padding."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def energy(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See :func:`backstash.control.bound.coverage`."""
        spatial = self.shape[2:], grad.shape[2:], weight.shape[2:]
        covered = coverage(*spatial, self.stride, self.padding, self.dilation, self.transposed)
        return channel_norms(grad).square() * (self.share * covered)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """As the node computes it."""
        where = self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        made: Tensor = _dispatch.convolution_backward(grad, x, weight, None, *where, [False, True, False])[1]
        return made


@dataclass(frozen=True, slots=True)
class _BatchNorm(_Linear):
    """A batch norm, of which the gradient of the input is off too.

    The weight's gradient is the sum of dY * (x - mean) * scale, and the input's

        weight * scale * (dY - mean of dY - (x - mean) * scale * weight's gradient / n)

    of which only the last term reads ``x``. Mean and scale are stored apart, and exact.

    Attributes:
        mean: of each channel.
        scale: one over the deviation of each channel, as the node has it.
    """

    mean: Tensor
    scale: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """The deviation within channels."""
        return self.scale.square().reciprocal().mean().sqrt()

    def energy(self, grad: Tensor, weight: Tensor) -> Tensor:
        """That of the normalised numbers' errors."""
        return (channel_norms(grad) * self.scale).square()

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """As the node computes it, but for rounding."""
        channels = [1, -1, *[1] * (x.dim() - 2)]
        normalised = (x.float() - self.mean.view(channels)) * self.scale.view(channels)
        return (normalised * grad).sum([0, *range(2, x.dim())])

    def coarsest(self, sigma: float, made: Tensor | None, weight_grad: Tensor, weight: Tensor) -> Tensor | None:
        """By the last term above: errors of all elements are independent, their deviation bound / sqrt(3)."""
        if made is None:
            return None
        count = made.numel() / weight.numel()
        slope = torch.linalg.vector_norm(weight * self.scale.square() * weight_grad, dtype=torch.float32)
        wanted = sigma * torch.linalg.vector_norm(made, dtype=torch.float32)
        limit: Tensor = wanted * (math.sqrt(3 * count) / slope)
        return limit


def _mean_gain(gain: Tensor, shares: Tensor) -> float:
    """In the root mean square over what is not zero."""
    square = gain.square()
    if square.numel() != shares.numel():  # seen through another view
        return float(square.mean().sqrt())
    return float(((square * shares).sum() / shares.sum().clamp(min=torch.finfo(shares.dtype).tiny)).sqrt())


def _layer(node: Any, x: Tensor) -> _Linear:
    op, shape = op_of(node), tuple(x.shape)
    others = [dim for dim in range(x.dim()) if dim != 1]
    shares = x.count_nonzero(others) / max(x.numel() // max(x.shape[1], 1), 1)
    if op == "Convolution":
        return _Convolution(
            shape,
            shares,
            tuple(node._saved_stride),
            tuple(node._saved_padding),
            tuple(node._saved_dilation),
            node._saved_transposed,
            tuple(node._saved_output_padding),
            node._saved_groups,
        )
    if "BatchNorm" in op:
        eps = node._saved_epsilon if op == "CudnnBatchNorm" else node._saved_eps
        variance, mean = torch.var_mean(x.float(), [0, *range(2, x.dim())], correction=0)
        return _BatchNorm(shape, shares, mean, (variance + eps).rsqrt())
    return _Linear(shape, shares)


def _collector(
    reading: _Reading, layer: _Linear, sigma: float, place: int, exact: Tensor | None
) -> Callable[[Any, Any], None]:
    """A hook for when the node has run, whose weight is its input at ``place``: adds its gradients to the reading."""

    def collect(made: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
        grad, weight_grad = incoming[0], made[place]
        if grad is None or weight_grad is None:
            return
        with no_torch_function(), torch.no_grad():
            grad, weight_grad, weight = grad.detach(), weight_grad.detach(), reading.parameter.detach()
            energy = layer.energy(grad, weight)
            reading.energy = energy if reading.energy is None else reading.energy + energy
            reading.magnitude = reading.magnitude + weight_grad.abs().mean(dtype=torch.float32)
            coarsest = layer.coarsest(sigma, made[0], weight_grad, weight)
            if coarsest is not None:
                reading.keep_below(coarsest)
            if exact is not None:
                truth = layer.weight_gradient(grad, exact, torch.empty_like(weight_grad)).float()
                error = (weight_grad.float() - truth).square().mean()
                cosine = torch.cosine_similarity(weight_grad.float().flatten(), truth.flatten(), dim=0)
                reading.error = error if reading.error is None else reading.error + error
                reading.cosine = torch.minimum(torch.as_tensor(reading.cosine, device=cosine.device), cosine)

    return collect
