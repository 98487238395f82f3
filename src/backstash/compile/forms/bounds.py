"""Error bounds as inputs of a graph: operators through which a graph asks a policy while it runs.

The graph calls ``step`` in front of an encoding, ``coarsest`` behind it, and ``gradients`` where the backward pass has
computed the gradient of a layer's weight. The operators find the policy by a name that is part of the graph, so a graph
that torch has loaded from its cache on disk finds it as well. They read tensors that are in memory anyway, because
convolutions and products are library calls, and return at once where the policy collects nothing.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from backstash.codecs import Szp
from backstash.codecs.base import flat
from backstash.compile.graph.emit import Emitter, GraphValue, from_text, to_text
from backstash.compile.graph.layers import KINDS, ROLES, ForwardHook, Layer
from backstash.compile.graph.layout import inverse
from backstash.ops.layout import groups
from backstash.policies.adapted import Adapted
from backstash.policies.base import Outcome, Policy, Recompute, Stash, Wrapper
from backstash.saved import Effect, Need, SavedTensor, TensorSpec
from backstash.torch_internals import hide_from_dynamo

_LIBRARY = torch.library.Library("backstash_graph", "DEF")
_LIBRARY.define("step(Tensor x, Tensor[] weights, str policy, str graph, str value) -> Tensor")
# The last two write nothing. That they say so keeps compilers from removing or moving them.
_LIBRARY.define("coarsest(Tensor(a!) step, Tensor found, str policy, str graph, str name) -> ()")
_LIBRARY.define("gradients(Tensor(a!) weight, Tensor output, str policy, str graph, str name, int layer) -> ()")
_ops: Any = torch.ops.backstash_graph

BLOCK = 128
"""Neighbours in memory that share a step and an offset: 6 bytes."""


@dataclass(frozen=True)
class BoundedValue:
    """A value of a graph that is held within a bound.

    Attributes:
        policy: the name of the Loop that is asked.
        value: the ValueFacts, as text.
        weights: the inputs of the forward graph that are the weights of the layers that read the value.
    """

    policy: str
    graph: str
    value: str
    weights: tuple[fx.Node, ...] = ()

    @property
    def name(self) -> str:
        """A short name for the value."""
        return _name(self.value)


@dataclass(frozen=True)
class ValueFacts:
    """What a policy is told of a value when the graph runs.

    Attributes:
        saved: the strongest use.
        order: the value's dimensions, the outermost in memory first.
        layers: of each layer that reads it: its kind, the number of the reader, the settings of its autograd node, the
            number of features of its input if it is a product, else 0, and whether its gradients are transposed.
        comparisons: how many outcomes of comparisons are saved beside the codes, a bit per element each.
    """

    saved: SavedTensor
    readers: tuple[SavedTensor, ...]
    order: tuple[int, ...] = ()
    layers: tuple[tuple[str, int, tuple[tuple[str, Any], ...], int, bool], ...] = ()
    bits: int = 8
    comparisons: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the graph saves for the value, whether it has a bound yet or not."""
        count = math.prod(self.saved.spec.shape)
        return blocks_nbytes(count, self.bits) + self.comparisons * groups(count, 8)

    def text(self) -> str:
        """As text, from which :meth:`read` makes the facts again, but for their spec."""
        texts = [[_field(saved, name) for name in _FIELDS] for saved in (self.saved, *self.readers)]
        return to_text([texts, self.order, self.layers, self.bits, self.comparisons])

    @classmethod
    def read(cls, text: str, spec: TensorSpec) -> ValueFacts:
        """The facts of a value with that spec."""
        texts, order, layers, bits, comparisons = from_text(text)
        saved = [
            SavedTensor(key, op, role, fqn, spec, Need[need], effect=Effect(effect), row=row)
            for key, op, role, fqn, need, effect, row in texts
        ]
        found = (
            (kind, number, tuple((name, _frozen(value)) for name, value in settings), features, transposed)
            for kind, number, settings, features, transposed in layers
        )
        return cls(saved[0], tuple(saved[1:]), tuple(order), tuple(found), bits, comparisons)


_FIELDS = ("key", "op", "role", "fqn", "need", "effect", "row")


def _field(saved: SavedTensor, name: str) -> Any:
    value = getattr(saved, name)
    return value.name if isinstance(value, Need) else value.value if isinstance(value, Effect) else value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def blocks_nbytes(count: int, bits: int) -> int:
    """Bytes of the codes of ``count`` elements in whole blocks, and of each block's step and offset."""
    return groups(count, BLOCK) * (BLOCK * bits // 8 + 6)


def facts_of(
    saved: SavedTensor,
    readers: Sequence[SavedTensor],
    layers: Sequence[tuple[int, Layer]],
    order: Sequence[int],
    bits: int = 8,
    comparisons: int = 0,
) -> ValueFacts:
    """The facts of a value.

    Args:
        layers: the layers that read the value, each with the number of its reader.
    """
    found = []
    for number, layer in layers:
        sizes = layer.weight_gradient.meta["val"].shape
        features = 0 if layer.settings else int(sizes[1 if layer.is_transposed else 0])
        settings = tuple((name, _frozen(value)) for name, value in layer.settings)
        found.append((layer.kind, number, settings, features, layer.is_transposed))
    return ValueFacts(saved, tuple(readers), tuple(order), tuple(found), bits, comparisons)


def as_layer(saved: SavedTensor, layer: Layer, number: int) -> SavedTensor:
    """A use as a Session would name it: by the autograd node of the layer that reads the value.

    Args:
        saved: the use, named by the operator of the backward graph.
        number: how many layers of the kind the same module has in front of it.
    """
    role = ROLES[layer.kind]
    key = f"{layer.path}/{layer.kind}#{number}:{role}"
    return replace(saved, key=key, op=layer.kind, role=role, fqn=layer.path)


@dataclass
class Bounded:
    """A value of a graph while the graph runs.

    Attributes:
        facts: what the policy is told.
        revision: the policy's when it was asked last.
        codec: the codec that it named; None if it wants the value exact.
        coarsest: the largest step of a block in the last forward pass, float32 [].
        hooks: by the number of a layer, what waits for its gradients.
        parameters: by the number of a layer, its weight, where that was found in the optimizer.
    """

    facts: ValueFacts
    revision: object | None = None
    codec: Szp | None = None
    coarsest: Tensor | None = None
    hooks: dict[int, list[ForwardHook]] = field(default_factory=dict)
    parameters: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """How far off an element can be that is stored in steps of the coarsest block."""
        # Steps of the 16-bit dtypes are powers of two, so nothing is rounded but to a multiple.
        rounding = 2.0**-9 if self.facts.saved.spec.dtype == torch.float32 else 0.0
        return 0.0 if self.coarsest is None else float(self.coarsest) * (0.5 + rounding)


class Loop:
    """Asks a policy for bounds while graphs run, as a Session asks it: a value that is met again begins a step.

    Args:
        name: the name that graphs know the loop by. It must live as long as the graphs may run.
    """

    def __init__(self, policy: Policy, name: str) -> None:
        self.policy = policy
        self.name = name
        self.values: dict[tuple[str, str], Bounded] = {}
        self._met: set[tuple[str, str]] = set()

    def step(self, x: Tensor, weights: Sequence[Tensor], graph: str, value: str) -> Tensor:
        """The step of a value's codes, float32 [1]; 0 for the finest that there is.

        Args:
            x: the value, contiguous in memory order.
            weights: the weights of the layers that read it.
        """
        place = graph, _name(value)
        bounded = self.values.get(place)
        if bounded is None:
            bounded = self.values[place] = Bounded(ValueFacts.read(value, TensorSpec.of(x)))
        if place in self._met or not self._met:
            self._met.clear()
            self.policy.begin_step()
        self._met.add(place)
        self._watch(bounded, x, weights)
        revision = self.policy.revision
        if revision is None or revision is not bounded.revision:
            bounded.revision = revision
            self._ask(bounded, x)
        if bounded.codec is None:
            return torch.zeros(1, dtype=torch.float32, device=x.device)
        return bounded.codec.grid(flat(x))[1:2].clone()

    def coarsest(self, graph: str, name: str, found: Tensor) -> None:
        """Notes the largest step of a value's blocks."""
        self.values[graph, name].coarsest = found.detach()

    def gradients(self, weight: Tensor, output: Tensor, graph: str, name: str, layer: int) -> None:
        """Hands a layer's gradients to whoever watches the layer."""
        bounded = self.values.get((graph, name))
        hooks = bounded.hooks.pop(layer, ()) if bounded is not None else ()
        for hook in hooks:
            assert bounded is not None
            if bounded.facts.layers[layer][4]:
                weight, output = weight.t(), output.t()
            hook((None, weight), (output,))

    def notes(self) -> list[str]:
        """For a report: the bounds, and where the width of the codes did not hold them."""
        if not self.values:
            return []
        bounds, waiting, missed = [], 0, []
        for bounded in self.values.values():
            error = bounded.error
            if bounded.codec is None:
                waiting += 1
                continue
            bounds.append(bounded.codec.error)
            if bounded.codec.mode == "abs" and error > bounded.codec.error:
                missed.append(f"{bounded.facts.saved.key} (up to {error:.3g} off, bound {bounded.codec.error:.3g})")
        found = []
        if bounds:
            found.append(f"bounds: {len(bounds)} values have bounds from {min(bounds):.3g} to {max(bounds):.3g}")
        if missed:
            found.append(
                f"bounds: the bits of a code did not suffice for every block of {len(missed)} values, whose steps were "
                f"made coarser in the last step: {'; '.join(missed[:4])}{'; ...' if len(missed) > 4 else ''}. More "
                f"bits (bounded_bits) or larger bounds avoid this"
            )
        if waiting:
            found.append(f"bounds: {waiting} values have no bound yet, and the finest steps that their bits allow")
        return found

    def _watch(self, bounded: Bounded, x: Tensor, weights: Sequence[Tensor]) -> None:
        facts, bounded.hooks = bounded.facts, {}
        for layer, (kind, number, settings, features, _) in enumerate(facts.layers):
            node = KINDS[kind](partial(self._parameter, bounded, layer, weights[layer]), settings)
            seen = x.reshape(-1, features) if features else x.permute(inverse(facts.order))
            self.policy.watch(facts.readers[number], node, seen)
            if node.hooks:
                bounded.hooks[layer] = node.hooks

    def _parameter(self, bounded: Bounded, layer: int, weight: Tensor) -> Tensor:
        """The parameter itself, by which an optimizer knows its momentum: a graph may be given a copy of its own.

        Inductor copies the weights of convolutions to another memory format. A copy is recognised by its numbers.
        """
        optimizer = getattr(_innermost(self.policy), "optimizer", None)
        reference = bounded.parameters.get(layer)
        known = None if reference is None else reference()
        if known is not None or optimizer is None:
            return weight if known is None else known
        given: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        alike = [each for each in given if each.shape == weight.shape and each.device == weight.device]
        same = [each for each in alike if each.data_ptr() == weight.data_ptr()]
        same = same or [each for each in alike if torch.equal(each.detach().to(weight.dtype), weight)]
        if len(same) != 1:
            return weight
        bounded.parameters[layer] = weakref.ref(same[0])
        return same[0]

    def _ask(self, bounded: Bounded, x: Tensor) -> None:
        facts, policy = bounded.facts, self.policy
        policy.trace(facts.saved, facts.readers, lambda: None)
        action = policy.decide_together(facts.saved, facts.readers)
        if isinstance(action, Recompute):
            action = action.otherwise
        bounded.codec = szp_of(action)
        label = None if bounded.codec is None else bounded.codec.id
        policy.observe(Outcome(facts.saved, label, facts.nbytes))


_loops: weakref.WeakValueDictionary[str, Loop] = weakref.WeakValueDictionary()


def loop_of(policy: Policy, name: str) -> Loop:
    """The loop of that name, made for this policy if there is none yet."""
    return _loops.setdefault(name, Loop(policy, name))


def moves_bounds(policy: Policy) -> bool:
    """Whether a policy says of any value that it may name another bound later."""
    return getattr(type(_innermost(policy)), "may_bound", Policy.may_bound) is not Policy.may_bound


def _innermost(policy: Policy) -> object:
    """What the user has made: the policy in all wrappers, or the object that was adapted."""
    while isinstance(policy, Wrapper):
        policy = policy.inner
    return policy.policy if isinstance(policy, Adapted) else policy


def szp_of(action: Any) -> Szp | None:
    """The codec within a bound among those of an action; None if there is none."""
    codecs = action.codecs if isinstance(action, Stash) else ()
    return next((codec for codec in codecs if isinstance(codec, Szp)), None)


def emit_step(emit: Emitter, x: GraphValue, place: BoundedValue) -> GraphValue:
    """A call that returns the step for a value: float32 [1]."""
    return emit(_ops.step.default, x, list(place.weights), place.policy, place.graph, place.value)


def emit_coarsest(emit: Emitter, step: GraphValue, found: GraphValue, place: BoundedValue) -> None:
    """A call that notes the largest step of the value's blocks."""
    emit(_ops.coarsest.default, step, found, place.policy, place.graph, place.name)


def emit_gradients(emit: Emitter, layer: Layer, number: int, place: BoundedValue) -> None:
    """A call that hands over a layer's gradients."""
    where = place.policy, place.graph, place.name, number
    emit(_ops.gradients.default, layer.weight_gradient, layer.gradient, *where)


@lru_cache(maxsize=4096)
def _name(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def _loop(name: str) -> Loop:
    loop = _loops.get(name)
    if loop is None:
        raise RuntimeError(
            f"a compiled graph asked for the error bounds of the policy {name}, but compile_options() or "
            f"compile_backend() that it was compiled with is gone. Keep what they returned for as long as the compiled "
            f"model is in use, and compile the model in the process that uses it."
        )
    return loop


def _step(x: Tensor, weights: list[Tensor], policy: str, graph: str, value: str) -> Tensor:
    with torch.no_grad():
        return _loop(policy).step(x, weights, graph, value)


def _coarsest(step: Tensor, found: Tensor, policy: str, graph: str, name: str) -> None:
    _loop(policy).coarsest(graph, name, found)


def _gradients(weight: Tensor, output: Tensor, policy: str, graph: str, name: str, layer: int) -> None:
    _loop(policy).gradients(weight, output, graph, name, layer)


for _function in (_step, _coarsest, _gradients):
    hide_from_dynamo(_function, and_all_below=True)
    _LIBRARY.impl(_function.__name__[1:], _function, "CompositeExplicitAutograd")
torch.library.register_fake("backstash_graph::step", lambda x, *_: x.new_empty(1, dtype=torch.float32), lib=_LIBRARY)
torch.library.register_fake("backstash_graph::coarsest", lambda *_: None, lib=_LIBRARY)
torch.library.register_fake("backstash_graph::gradients", lambda *_: None, lib=_LIBRARY)
