"""The values that a forward graph saves for its backward graph: one for each memory, and all that reads it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from backstash.compile.graph.layout import hint as hint
from backstash.compile.graph.layout import memory_order
from backstash.compile.graph.reading import SUMS, Reader, is_elementwise, is_view, operator_name, readers
from backstash.saved import TensorSpec


@dataclass(frozen=True)
class Member:
    """One tensor that the forward graph hands to the backward graph."""

    node: fx.Node
    placeholder: fx.Node


@dataclass
class SavedValue:
    """One memory that is saved, by one or more tensors that view it.

    Attributes:
        base: the node of the forward graph that computes it.
        members: the tensors, in the order of the forward graph's results.
        refused: why nothing can be done with it; empty if something can.
    """

    base: fx.Node
    members: list[Member] = field(default_factory=list)
    refused: str = ""

    @property
    def tensor(self) -> torch.Tensor:
        """The fake tensor of the whole memory."""
        found: torch.Tensor = self.base.meta["val"]
        return found

    @property
    def fake_mode(self) -> Any:
        """The mode of the graph's fake tensors."""
        return self.base.meta["val"].fake_mode

    def readers(self) -> list[Reader]:
        """Every operator of the backward graph that reads one of the members."""
        return [reader for member in self.members for reader in readers(member.placeholder)]

    def spec(self) -> TensorSpec:
        """The memory's facts. Symbolic sizes are those that the graph was compiled for."""
        return spec_of(self.tensor)

    @property
    def fqn(self) -> str:
        """Path of the module that computes the value, as Dynamo noted it; empty outside modules."""
        return module_path(self.base)

    @property
    def op(self) -> str:
        """The operator that computes the value."""
        node = self.base
        source = node.args[0] if operator_name(node) == "getitem" else node
        return operator_name(source if isinstance(source, fx.Node) else node).split("::")[-1]


@dataclass
class Split:
    """A forward and a backward graph, and what goes from the one to the other.

    Attributes:
        outputs: how many results of the forward graph are not for the backward graph.
        twins: for nodes of the backward graph the node of the forward graph that has the same value.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int
    twins: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Both graphs were extracted from one joint graph, whose names they have kept.
        names = {node.name: node for node in self.forward.graph.nodes if node.op != "output"}
        for node in self.backward.graph.nodes:
            twin = names.get(node.name)
            if twin is not None and (node.op == "placeholder" or node.target == twin.target):
                self.twins[node] = twin

    @property
    def has_short_floats(self) -> bool:
        """Whether they have numbers of 16 bits, which a compiler computes in 32 and rounds where a loop stores them."""
        values = (node.meta.get("val") for node in (*self.forward.graph.nodes, *self.backward.graph.nodes))
        return any(isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) for x in values)

    @property
    def adds_up_in_loops(self) -> bool:
        """Whether backward adds up numbers that a compiler computes in the loop that adds them.

        The order of additions is that of the loop, and a compiler chooses a loop by all that it computes there.
        """
        for node in self.backward.graph.nodes:
            if operator_name(node) in SUMS:
                added = node.args[0]
                while is_view(added):
                    added = added.args[0]
                if is_elementwise(added):
                    return True
        return False

    @property
    def results(self) -> list[Any]:
        """The results of the forward graph."""
        (output,) = self.forward.graph.find_nodes(op="output")
        return list(output.args[0])

    def values(self) -> list[SavedValue]:
        """What is computed in the forward graph and saved, in the order of saving. Inputs that are saved are not."""
        placeholders = {node.name: node for node in self.backward.graph.find_nodes(op="placeholder")}
        bases = _bases(self.forward.graph)
        held = {storage_of(node) for node in self.results[: self.outputs] if is_tensor_node(node)}
        found: dict[int, SavedValue] = {}
        for node in self.results[self.outputs :]:
            if not is_tensor_node(node) or node.name not in placeholders:
                continue
            storage = storage_of(node)
            base = bases.get(storage, node)
            if base.op == "placeholder":
                continue
            value = found.setdefault(storage, SavedValue(base))
            value.members.append(Member(node, placeholders[node.name]))
            if storage in held:
                value.refused = "the program holds it too: it is a result of the graph, or shares a result's memory"
        for value in found.values():
            value.refused = value.refused or _refuses(value)
        return list(found.values())


def module_path(node: fx.Node) -> str:
    """The path of the module in which a node was traced."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    # Dynamo writes where it found the model, such as L['self'] or L['fn'] for the compiled module itself.
    path = re.sub(r"^L\['(self|fn|model)'\]|^(self|fn)\b", "", path)
    return re.sub(r"L\['(\w+)'\]", r"\1", path).replace("._modules['", ".").replace("']", "").strip(".")


def spec_of(x: torch.Tensor) -> TensorSpec:
    """The facts of a fake tensor, with hints in the place of symbols."""
    shape, stride = tuple(map(hint, x.shape)), tuple(map(hint, x.stride()))
    numel = 1
    for size in shape:
        numel *= size
    return TensorSpec(shape, stride, x.dtype, x.device, numel * x.element_size())


def depends_on_data(x: torch.Tensor) -> bool:
    """Whether a fake tensor's sizes are not known before the graph runs."""
    return any(not isinstance(size, int) and size.node.hint is None for size in x.shape)


def _refuses(value: SavedValue) -> str:
    if type(value.tensor).__name__ != "FakeTensor" or any(
        type(member.node.meta["val"]).__name__ != "FakeTensor" for member in value.members
    ):
        return "it is of a tensor subclass"
    tensor = value.tensor
    if depends_on_data(tensor):
        return "its size depends on the data"
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_sparse:
        return "it is lazily conjugated or negated, quantized or sparse"
    if memory_order(tensor) is None:
        return "its memory has gaps, or overlaps"
    for member in value.members:
        view = member.node.meta["val"]
        if view.dtype != tensor.dtype:
            return "it is also read as another type of element"
    return ""


def _bases(forward: fx.Graph) -> dict[int, fx.Node]:
    """For each memory the first node that has it."""
    found: dict[int, fx.Node] = {}
    for node in forward.nodes:
        if is_tensor_node(node):
            found.setdefault(storage_of(node), node)
    return found


def is_tensor_node(node: Any) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def storage_of(node: fx.Node) -> int:
    """A number for the memory of a node's value; views of one memory have the same."""
    try:
        number: int = node.meta["val"].untyped_storage()._cdata
    except NotImplementedError:  # a sparse tensor or a subclass has no memory of its own
        return id(node)
    return number


def after_last_use(value: SavedValue, inputs: Collection[fx.Node]) -> fx.Node:
    """The node of the forward graph before which the value can be encoded.

    Nothing but the graph's results reads the value's memory after it, and all of ``inputs`` are computed before it.
    """
    storage = storage_of(value.base)
    aliases = dict.fromkeys(
        [value.base, *(node for node in inputs if is_tensor_node(node) and storage_of(node) == storage)]
    )
    waiting, readers = list(aliases), {value.base, *inputs}
    for alias in waiting:  # grows on the way
        readers.update(alias.users)
        for user in alias.users:
            if user not in aliases and is_tensor_node(user) and storage_of(user) == storage:
                aliases[user] = None
                waiting.append(user)
    last = next(node for node in reversed(value.base.graph.nodes) if node.op != "output" and node in readers)
    following: fx.Node = last.next
    while following.op == "placeholder":  # an input may be needed: calls stand behind all inputs
        following = following.next
    return following
