"""A joint graph as a planner sees it: what each value is computed from, its bytes, and the time to compute it again.

Views are not values of their own: whoever reads a view reads the value behind it. Values are numbered in the order of
the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from backstash.compile.forms.saved_inputs import copied_inputs
from backstash.compile.graph.convolutions import convolved_images, looks_convolved
from backstash.compile.graph.effect import gradient_nodes
from backstash.compile.graph.image_calls import can_call_twice
from backstash.compile.graph.image_gradients import is_in_rows, is_split, scratch_nbytes
from backstash.compile.graph.reading import (
    MOVES,
    RANDOM,
    arguments_of,
    is_elementwise,
    is_view,
    is_write,
    operator_name,
    reads_fused,
    written_inputs,
)
from backstash.compile.graph.repeated import is_light
from backstash.compile.graph.sums import added_product, early_products, reused_summand, stored_sums
from backstash.compile.graph.values import hint, is_tensor_node, spec_of

BYTES_PER_SECOND, FLOPS_PER_SECOND = 10e9, 100e9
"""Of two cores with AVX-512. Only their ratio matters: it says how many bytes a recomputed product is worth."""

_SECONDS_PER_RANDOM_NUMBER = 5e-9

PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::convolution",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
"""Operators for which a compiler calls a library, the same one in forward and backward."""

_CASTING = frozenset(
    f"aten::{name}" for name in ("add", "div", "mul", "native_dropout", "native_dropout_backward", "pow", "sub")
)
"""Operators that copy arguments of another dtype on a CPU."""

_HEAVY = frozenset(f"aten::{name}" for name in ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"))
"""Functions that Inductor does not compute twice on a CPU."""


class Joint:
    """A joint graph, with its values numbered.

    Attributes:
        outputs: how many results of the graph are the forward pass's.
        changed: inputs that are written to in the forward pass, so that nothing is computed from them again.
        early: the sums whose product takes less memory than a gradient that it is computed from.
        is_apart: whether these products are computed before they are added.
        nodes: the node of each value.
        reads: for each value the values that it is computed from.
        nbytes: bytes of each value; 0 for inputs, for what is no tensor, and for calls with several results.
        is_gradient: whether it depends on an incoming gradient.
        is_forward: whether a result of the forward pass depends on it.
        is_input: whether it is an input of the graph.
        fuses: whether a compiler computes it inside the kernel of whoever reads it.
        is_image: whether one call decodes it, if it is saved in few bits.
        is_heavy: whether a compiler that fuses stores its result rather than compute it for each of several readers.
        is_light: whether a kernel that reads it may compute it for itself.
        reads_fused: whether a compiler reads others' results without their ever being stored.
        stored: sums of gradients that the compiler is told to store.
        scratch: bytes that a library holds while it computes the value.
        repeats_light: whether each kernel computes light values for itself.
        counts_on_it: whether an estimate ends such values early.
        is_part: whether it is one of the results of a call that returns all of them together, and is seen to be.
        in_rows: for calls that need their images in another order these images.
        copied: bytes of the inputs that the compiler copies for convolutions.
        saves_copies: whether these copies are saved, and not the inputs themselves.
        takes_over: for sums that are computed in the memory of a summand that summand.
        is_on_cpu: whether every tensor is in the memory of the CPU.
        results: the values that the forward pass returns to the program.
        gradients: the values that the backward pass returns.

    Args:
        outputs: how many results of the graph are the forward pass's.
        is_apart: whether products that take less memory than their operands are computed before they are added.
        stores_sums: whether sums of gradients that several operators read are stored.
    """

    def __init__(
        self, graph: fx.Graph, outputs: int, fuses: bool, is_apart: bool = False, stores_sums: bool = False
    ) -> None:
        self.graph, self.outputs, self.changed = graph, outputs, written_inputs(graph)
        self.compiler_fuses = fuses
        self.early = early_products(graph) if fuses else frozenset()
        self.is_apart = is_apart
        self.nodes: list[fx.Node] = []
        self.reads: list[tuple[int, ...]] = []
        self._numbers: dict[fx.Node, int] = {}
        dependent = gradient_nodes(graph)
        for node in graph.nodes:
            if node.op == "output":
                continue
            if _is_alias(node):
                behind = self.number(node.args[0])
                if behind is not None:
                    self._numbers[node] = behind
                    continue
            if _is_number(node):
                continue
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
            self.reads.append(tuple(dict.fromkeys(self._all(node.all_input_nodes))))
        (output,) = graph.find_nodes(op="output")
        returned = list(output.args[0])
        self.results = frozenset(self._all(returned[:outputs]))
        self.gradients = frozenset(self._all(returned[outputs:]))
        self.is_gradient = [node in dependent for node in self.nodes]
        self.is_input = [node.op in ("placeholder", "get_attr") for node in self.nodes]
        self.nbytes = [
            0 if is_input else _nbytes(node) for is_input, node in zip(self.is_input, self.nodes, strict=True)
        ]
        sums = self._sums()
        self.reads_fused = [fuses and reads_fused(node) and node not in sums for node in self.nodes]
        # A constant is filled in by the kernel that reads it, or is the memory that an index_put writes to.
        constants = {"aten::full"} if fuses else set()
        self.nbytes = [
            0 if operator_name(node) in constants else nbytes
            for node, nbytes in zip(self.nodes, self.nbytes, strict=True)
        ]
        splits = fuses and (stores_sums or can_call_twice())
        held_by = scratch_nbytes if splits else _cast_nbytes
        self.scratch = [0 if fuses and not splits else held_by(node) for node in self.nodes]
        self.in_rows: dict[int, int] = {}
        if splits:
            self._split_convolutions()
        copied = copied_inputs(graph) if fuses else set()
        self.copied = {self._numbers[node]: spec_of(node.meta["val"]).nbytes for node in copied}
        self.saves_copies = True
        self.is_on_cpu = all(node.meta["val"].device.type == "cpu" for node in self.nodes if is_tensor_node(node))
        # Where values are rounded, neither repeating them nor seeing results early lowers a peak, but for a depthwise
        # convolution's: ResNet-50's four-bit peak is 225 MiB with both, 199 without. And repeated values end somewhat
        # later than a search would like to believe: its exact peak is 305 MiB where they are counted on, and else 280.
        is_rounded = stores_sums and not self.in_rows
        self.repeats_light, self.counts_on_it = fuses and not is_rounded, bool(self.in_rows)
        self.is_part = [
            not is_rounded and node.target is operator.getitem and len(reads) == 1 and not self.is_input[number]
            for number, (node, reads) in enumerate(zip(self.nodes, self.reads, strict=True))
        ]
        self.takes_over: dict[int, int] = {}
        for node, product in sums.items():  # one call of a library computes both, when the other summand is there
            number, source = self._numbers[node], self._numbers[product]
            others = (each for each in self.reads[number] if each != source)
            self.reads[number] = tuple(dict.fromkeys((*self.reads[source], *others)))
            self.reads[source], self.nbytes[source] = (), 0
            reused = reused_summand(node) if self.is_gradient[number] else None
            if reused is not None and self.is_gradient[self._numbers[reused]]:
                self.takes_over[number] = self._numbers[reused]
        stored = stored_sums(graph) if fuses and stores_sums else []
        self.stored = frozenset(self._numbers[node] for node in stored)
        self.is_shared = [len(node.users) > 1 for node in self.nodes]
        images = convolved_images(graph) if fuses else []
        self.is_image = [is_tensor_node(node) and looks_convolved(node.meta["val"], images) for node in self.nodes]
        self.is_heavy = [_is_heavy(node) for node in self.nodes]
        self.is_light = [
            not is_gradient and is_light(node) for is_gradient, node in zip(self.is_gradient, self.nodes, strict=True)
        ]
        self.fuses = [fuses and is_elementwise(node) and node not in sums for node in self.nodes]
        self.is_forward = [False] * len(self.nodes)
        for number in self.ancestors(number for number in self.results if not self.is_gradient[number]):
            self.is_forward[number] = True
        self.seconds = [self._seconds(number) for number in range(len(self.nodes))]
        kept = self._kept_by_checkpoints()
        self._repeats: list[bool] = []
        for number, node in enumerate(self.nodes):
            parent = self.reads[number][0] if node.target is operator.getitem else number
            whole = parent == number or self._repeats[parent]
            again = whole and (self.is_input[number] or node_repeats(node, fuses))
            if number in kept or parent in kept:
                again = not kept.get(parent, kept.get(number))
            self._repeats.append(again and not any(self.nodes[read] in self.changed for read in self.reads[number]))

    def _split_convolutions(self) -> None:
        """Lets the images' gradient read what its call reads when it comes, and the weight's gradient no weight."""
        for number, node in enumerate(self.nodes):
            call = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
            if isinstance(call, fx.Node) and is_split(call):
                first, gradient, weight = (self.number(each) for each in (call, call.args[0], call.args[2]))
                assert first is not None and gradient is not None and weight is not None
                self.reads[first] = tuple(each for each in self.reads[first] if each != weight)
                self.reads[number] = (first, gradient, weight)
                images = self.number(call.args[1])
                if images is not None and is_in_rows(call):
                    self.in_rows[first] = images

    def _sums(self) -> dict[fx.Node, fx.Node]:
        """The additions that one call of a library computes together with a product, and these products."""
        pairs = {node: added_product(node) for node in self.nodes} if self.compiler_fuses else {}
        apart = self.early if self.is_apart else frozenset()
        return {node: pair[0] for node, pair in pairs.items() if pair is not None and node not in apart}

    def number(self, node: Any) -> int | None:
        """The number of the value that a node returns or views; None if it is no tensor."""
        return self._numbers.get(node)

    def must_be_saved(self, number: int) -> bool:
        """Whether the backward pass cannot compute the value again, whatever is saved."""
        return not self._repeats[number]

    def ancestors(self, numbers: Iterable[int]) -> set[int]:
        """The values, and all that they are computed from."""
        found: set[int] = set()
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.reads[number]
        return found

    def _kept_by_checkpoints(self) -> dict[int, bool]:
        """For the values that a checkpoint inside the model speaks of: whether they are to be saved."""
        found: dict[int, bool] = {}
        for node in self.graph.nodes:
            number, tag = self.number(node), getattr(node.meta.get("recompute"), "name", "")
            if number is not None and tag == "MUST_SAVE":
                found[number] = True
            elif tag in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE") and number is not None and self.nodes[number] is node:
                found.setdefault(number, False)
        return found

    def _all(self, nodes: Iterable[Any]) -> Iterator[int]:
        for node in nodes:
            number = self.number(node) if isinstance(node, fx.Node) else None
            if number is not None:
                yield number

    def _seconds(self, number: int) -> float:
        node = self.nodes[number]
        if self.is_input[number] or node.target is operator.getitem:
            return 0.0
        if operator_name(node) in RANDOM:
            return spec_of(node.meta["val"]).numel * _SECONDS_PER_RANDOM_NUMBER
        if self.fuses[number]:  # it is computed where its result is read
            return 0.5 * self.nbytes[number] / BYTES_PER_SECOND
        moved = sum(_nbytes(each) for each in (node, *node.all_input_nodes))
        return moved / BYTES_PER_SECOND + _flops(node) / FLOPS_PER_SECOND


def node_repeats(node: fx.Node, fuses: bool) -> bool:
    """Whether an operator gives the same bits when it is called again with the same arguments.

    Under a compiler that fuses, a sum may be added up in another order inside another kernel.
    """
    if node.target is operator.getitem:
        return True
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    name = operator_name(node)
    if name.partition("::")[0] not in ("aten", "prims"):
        return False
    return not fuses or is_elementwise(node) or is_view(node) or name in PRODUCTS | MOVES | RANDOM


def _is_heavy(node: fx.Node) -> bool:
    return operator_name(node) in _HEAVY and is_tensor_node(node) and node.meta["val"].device.type == "cpu"


def _is_alias(node: fx.Node) -> bool:
    return is_view(node) and isinstance(node.args[0], fx.Node)


def _is_number(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _nbytes(node: fx.Node) -> int:
    return spec_of(node.meta["val"]).nbytes if is_tensor_node(node) and not is_write(node) else 0


def _cast_nbytes(node: fx.Node) -> int:
    """Bytes of the copies that ATen makes on a CPU of arguments of another dtype than that in which it computes."""
    vals = [each.meta["val"] for each in node.all_input_nodes if is_tensor_node(each)]
    tensors = [each for each in vals if each.dim()]  # others promote nothing of their kind
    if operator_name(node) not in _CASTING or not tensors or any(each.device.type != "cpu" for each in tensors):
        return 0
    if operator_name(node) == "aten::native_dropout":  # its mask is a result
        return spec_of(tensors[0]).nbytes if arguments_of(node)["train"] is not False else 0
    dtype = tensors[0].dtype
    for each in tensors[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    return sum(spec_of(each).numel * dtype.itemsize for each in tensors if each.dtype is not dtype)


def _flops(node: fx.Node) -> int:
    from torch.utils.flop_counter import flop_registry  # it imports triton

    count: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return hint(count(*args, **kwargs, out_val=node.meta["val"]))
