"""The form that a saved value gets in a graph, by what backward reads, the policy's answer and the forms there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from backstash.codecs import Szp
from backstash.codecs.base import Codec, keeps, mask_of, serves_function
from backstash.compile.forms.bounded import Bounding, GraphSzp
from backstash.compile.forms.bounds import szp_of
from backstash.compile.forms.codecs import GraphCodec, GraphFacts, form_of
from backstash.compile.forms.offload import offloaded
from backstash.compile.graph.effect import Influence, effect_of
from backstash.compile.graph.layers import Layer
from backstash.compile.graph.ranges import limit_of
from backstash.compile.graph.reading import TESTS, Reader, operator_name
from backstash.compile.graph.values import SavedValue, spec_of
from backstash.formulas import neighbours
from backstash.policies.base import Keep, Policy, Recompute
from backstash.saved import Effect, Mask, Need, SavedTensor, TensorSpec

STRENGTH = {Need.SHAPE: 0, Need.SIGN: 1, Need.INDEX: 2, Need.VALUE: 3}


@dataclass(frozen=True)
class FormChoice:
    """The form of one value.

    Attributes:
        codec: the form; None if the value is kept, or if comparisons alone read it.
        tests: comparisons of the backward graph that are computed in the forward graph instead, a bit per element.
        reason: why the value is kept.
        saved: the facts that the policy was asked about; None if it was not asked.
        layers: the layers whose gradients the policy is shown when the graph runs.
    """

    codec: GraphCodec | None
    tests: tuple[fx.Node, ...] = ()
    reason: str = ""
    saved: SavedTensor | None = None
    layers: tuple[Layer, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether nothing is done with the value."""
        return self.codec is None and not self.tests

    @property
    def label(self) -> str:
        """What reports call the form."""
        if self.codec is None:
            return "bits" if self.tests else "kept"
        return f"{self.codec.label}+bits" if self.tests else self.codec.label


def choose_forms(
    value: SavedValue, key: str, policy: Policy, min_nbytes: int, gradients: set[fx.Node], bounding: Bounding
) -> FormChoice:
    """The form that a policy gives a value, as far as there is one in a graph.

    Args:
        key: its key in the report.
        policy: is asked as a Session asks it.
        min_nbytes: smaller values are kept.
        gradients: the nodes of the backward graph that depend on an incoming gradient.
        bounding: gives a value within a bound its place in the graph.
    """
    spec = value.spec()
    if value.refused:
        return FormChoice(None, reason=value.refused)
    if spec.nbytes < max(min_nbytes, 1):
        why = f"it is smaller than min_nbytes={min_nbytes}" if min_nbytes else "it is empty"
        return FormChoice(None, reason=why)
    found = value.readers()
    if not found:
        return FormChoice(None, reason="nothing reads it")
    effects = {reader: effect_of(reader, gradients) for reader in found if reader.need is Need.VALUE}
    if _is_probability(value):
        effects = {reader: replace(each, effect=_sensitive(each.effect)) for reader, each in effects.items()}
    if all(reader.node.target in TESTS and reader.node not in gradients for reader in found):
        return _of_tests(found, spec)
    facts = [_saved(value, reader, key, spec, effects.get(reader)) for reader in found]
    asked, layers = bounding.named(found, facts)
    strongest = _strongest(asked)
    action = policy.decide_together(strongest, asked)
    if isinstance(action, Recompute):
        action = action.otherwise
    if isinstance(action, Keep):
        return FormChoice(None, reason=action.reason, saved=strongest)
    if action.store != "device":
        moved = offloaded(action.store, spec.device)
        return (
            FormChoice(None, reason=moved, saved=strongest)
            if isinstance(moved, str)
            else FormChoice(moved, saved=strongest)
        )
    reasons: dict[str, list[str]] = {}
    # A policy that will name a bound later needs the place for it now.
    codecs = action.codecs if not layers or szp_of(action) else (Szp(), *action.codecs)
    tests = _ordered(effects.values())
    bounded = bounding.form(strongest, asked, layers, value, len(tests))
    for codec in codecs:
        form = _form(codec, value, strongest, facts, bounded)
        if not isinstance(form, str):
            tests = () if form.is_exact else tests
            seen = tuple(layers.values()) if isinstance(form, GraphSzp) else ()
            return FormChoice(form, tests, saved=strongest, layers=seen)
        reasons.setdefault(form, []).append(codec.id)
    text = "; ".join(f"{', '.join(dict.fromkeys(ids))}: {why}" for why, ids in reasons.items())
    return FormChoice(None, reason=text or "the policy names no codec", saved=strongest)


def _is_probability(value: SavedValue) -> bool:
    """Whether the value is an exponential that the forward pass computes for the backward pass alone.

    Of a cross entropy these are the probabilities. One is subtracted from that of the right class, so an error counts
    against a difference that gets small as the model gets sure.
    """
    return operator_name(value.base) == "aten::exp" and all(user.op == "output" for user in value.base.users)


def _sensitive(effect: Effect) -> Effect:
    """The effect of an error that needs more bits than one that is only multiplied with a gradient."""
    return Effect.SENSITIVE if effect is Effect.LINEAR else effect


def _form(
    codec: Codec, value: SavedValue, strongest: SavedTensor, facts: Sequence[SavedTensor], bounded: GraphSzp
) -> GraphCodec | str:
    """The graph's form of a codec, or why it does not serve every reader."""
    refused = codec.accepts(strongest.spec)
    if refused is not None:
        return refused
    form = bounded if isinstance(codec, Szp) else form_of(codec, GraphFacts(strongest.spec.dtype, limit_of(value.base)))
    if isinstance(form, str):
        return form
    if form.nbytes(strongest.spec.shape, strongest.spec.dtype) >= strongest.spec.nbytes:
        return "it takes as many bytes as the value"
    for saved in facts:
        if saved.need is Need.SIGN and saved.mask is not None:
            same = Need.SIGN in codec.preserves and (mask_of(codec) in (None, saved.mask))
            if not same and not keeps(codec, saved.mask):
                return f"{saved.op} reads which side of a threshold an element is on"
        elif saved.need not in codec.preserves:
            return f"it does not preserve the {saved.need.name} that {saved.op} reads"
        elif saved.need is Need.VALUE and not form.is_exact:
            if not serves_function(codec, saved.function):
                return f"{saved.op} reads more than that function's derivative"
            if saved.effect is Effect.UNKNOWN:
                return f"it is not known what an error does to what {saved.op} computes"
    return form


def _of_tests(found: Sequence[Reader], spec: TensorSpec) -> FormChoice:
    """The form of a value that only comparisons read."""
    tests = tuple(dict.fromkeys(reader.node for reader in found))
    nbytes = sum(-(-spec_of(node.meta["val"]).numel // 8) for node in tests)
    if nbytes < spec.nbytes:
        return FormChoice(None, tests)
    return FormChoice(None, reason="the outcomes of the comparisons that read it would take as many bytes")


def _ordered(found: Iterable[Influence]) -> tuple[fx.Node, ...]:
    """The comparisons behind all readers, in the order of the backward graph."""
    tests = {node for each in found for node in each.tests}
    if not tests:
        return ()
    graph = next(iter(tests)).graph
    return tuple(node for node in graph.nodes if node in tests)


def _strongest(facts: Sequence[SavedTensor]) -> SavedTensor:
    """What the policy is asked about: the strongest need. Different tests of one value need its VALUE."""
    strongest = max(facts, key=lambda saved: STRENGTH[saved.need])
    masks: set[Mask | None] = {saved.mask for saved in facts if saved.need is Need.SIGN}
    if strongest.need is Need.SIGN and len(masks) > 1:
        fields = {name: getattr(strongest, name) for name in strongest.__dataclass_fields__}
        return SavedTensor(**fields | {"need": Need.VALUE, "mask": None})
    return strongest


def _saved(value: SavedValue, reader: Reader, key: str, spec: TensorSpec, found: Influence | None) -> SavedTensor:
    effect, row = Effect.UNKNOWN, 0
    if found is not None:
        seen = spec_of(reader.through.meta["val"])
        fastest = next((size for size, stride in zip(seen.shape, seen.stride, strict=True) if stride == 1), 0)
        effect = found.effect
        row = neighbours(seen, found.statistics) if effect is Effect.NORMALISED else fastest
    return SavedTensor(
        f"{key}:{reader.argument}",
        reader.op,
        reader.argument,
        value.fqn,
        spec,
        reader.need,
        reader.mask,
        None,
        reader.function,
        effect,
        row,
    )
