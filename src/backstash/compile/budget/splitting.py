"""A budget in bytes: what a graph saves, and in which form, so that its peak stays below at the least cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from backstash.compile.budget.joint import Joint
from backstash.compile.budget.lifetimes import Estimate, Lifetimes
from backstash.compile.budget.search import GraphSearch, Options, SearchResult
from backstash.compile.forms.choose import FormChoice
from backstash.compile.graph.convolutions import convolves
from backstash.compile.graph.effect import gradient_nodes
from backstash.compile.graph.values import SavedValue, Split, depends_on_data, is_tensor_node, spec_of
from backstash.planning.model.budget import bytes_in
from backstash.stash.tables import amount
from backstash.torch_internals import SavedValues, asks_what_to_save

STARTS: tuple[dict[str, Any], ...] = (
    {},
    {
        "ban_recompute_used_far_apart": False,
        "ban_recompute_long_fusible_chains": False,
        "ban_recompute_materialized_backward": False,
    },
    {"aggressive_recomputation": True},
)
"""Settings of torch's partitioner whose choices a search starts from, from little to much recomputation."""

GraphPlan = list[tuple[SavedValue, FormChoice]]
GraphPlanner = Callable[[Split], GraphPlan]
Partition = Callable[[dict[str, Any], SavedValues | None], tuple[fx.GraphModule, fx.GraphModule, int]]
"""Splits the joint graph under settings of AOTAutograd, and asks what to save."""


TRIES = 3
"""How many of the ways that searches have found are carried out, until one takes no more than it was found to."""


@dataclass(frozen=True)
class Chosen:
    """One way to split a graph and to hold what it saves.

    Attributes:
        plan: the form of each value.
        estimate: what it leads to.
        saves_copies: whether Inductor may save a copy of a convolution's input in the place of the input.
        keeps_formats: whether a convolution that is computed again must not decide on the memory format of images.
        is_apart: whether products that take less memory than their operands are computed before they are added.
        stores_sums: whether sums of gradients that several operators read are stored.
        repeats_light: whether each kernel computes light values for itself.
    """

    split: Split
    plan: GraphPlan
    estimate: Estimate
    saves_copies: bool = True
    keeps_formats: bool = False
    is_apart: bool = False
    stores_sums: bool = False
    repeats_light: bool = False


@dataclass(frozen=True)
class _Start:
    """What torch's partitioner saves under some settings.

    Attributes:
        settings: the settings.
        held: bytes of each value's exact form, by the name of the node that computes it.
        rounded: bytes of the form of those that the policy rounds.
        tests: for comparisons whose outcomes are stored beside such a form the value.
    """

    settings: dict[str, Any]
    names: frozenset[str]
    held: dict[str, int]
    rounded: dict[str, int]
    tests: dict[str, str]
    convolves: bool


def parse_graph_budget(budget: int | str, plain_peak_nbytes: int) -> int:
    """A budget in bytes.

    Args:
        budget: a number of bytes above zero, a text such as ``"1.5 GiB"``, or a share of a graph's peak such as
            ``"60%"``.
        plain_peak_nbytes: the estimated peak of the graph as compiled plain.

    Raises:
        ValueError: the budget is none of these, or not above zero.

    Example:
        >>> parse_graph_budget("1.5 KiB", 0), parse_graph_budget("60%", 1000)
        (1536, 600)
    """
    nbytes = 0
    if isinstance(budget, str):
        found = bytes_in(budget, plain_peak_nbytes) or bytes_in(f"{budget}B", plain_peak_nbytes)
        nbytes = max(int(found), 1) if found else 0
    elif isinstance(budget, int) and not isinstance(budget, bool):
        nbytes = budget
    if nbytes <= 0:
        raise ValueError(
            f"compile_options was asked for budget={budget!r}, but it takes a number of bytes above zero, such as 600 "
            f"<< 20, text such as '600MiB' or '1.5 GiB', or a share of each graph's plain peak, such as '60%'."
        )
    return nbytes


def cheapest(
    partition: Partition, planned: GraphPlanner, budget: int | str, fuses: bool, lasting: Collection[int] = ()
) -> tuple[Chosen, str]:
    """The cheapest way to stay below a budget, or the one with the lowest peak if none was found; and a note on it.

    Args:
        partition: splits the joint graph; returns the graphs and the number of results that are not for the backward
            graph.
        planned: chooses a form for each value that a split saves.
        budget: bytes at the peak, inputs excluded, or a share of what is estimated for the graph as compiled plain.
        fuses: whether the compiler fuses elementwise operators.
        lasting: positions of the graph's inputs that are parameters or buffers.
    """
    starts, joint, outputs = _starts(partition, planned, fuses)
    if joint is None:
        split = Split(*partition({}, None))
        note = "budget: not kept, because torch's partitioner does not say what it saves in this graph"
        return Chosen(split, planned(split), Estimate.nothing()), note
    options = _options(joint, starts, lasting)
    nbytes = parse_graph_budget(budget, _plain_peak(joint, starts[0]))
    ways = _searched(joint, starts, options, nbytes)
    if ways[0].estimate.peak > nbytes and options.rounded and joint.early:
        # Bits are not kept anyway, so a product need not be added by the call that computes it.
        apart = Joint(joint.graph, outputs, fuses, is_apart=True, stores_sums=True)
        others = _searched(apart, starts, options, nbytes)
        if others[0].estimate.peak < ways[0].estimate.peak:
            joint, ways = apart, others
    tried: list[Chosen] = []
    for way in ways[:TRIES]:  # in the graph that is split a value may be read otherwise, and take another form
        tried.append(_carried_out(joint, way, starts, partition, planned))
        if tried[-1].estimate.peak <= max(nbytes, way.estimate.peak):  # as it was found, and those behind it are higher
            break
    chosen = min(tried, key=lambda each: each.estimate.peak)
    peak = chosen.estimate.peak
    share = f", {budget.strip()} of compiled plain's" if isinstance(budget, str) and "%" in budget else ""
    text = f"a peak of {amount(peak)} is estimated, inputs excluded; asked for {amount(nbytes)}{share}"
    again = sum(node.op == "call_function" for node in chosen.split.twins)
    late = f" and {len(joint.early)} products added later than they are computed" if joint.is_apart else ""
    note = f"budget: {text}, with {again} operators computed again{late}"
    unknown = sum(is_tensor_node(node) and depends_on_data(node.meta["val"]) for node in joint.nodes)
    if unknown:
        note += f". {unknown} values whose sizes depend on the data are not counted"
    return chosen, note if peak <= nbytes else f"{note}. No way was found to stay below the budget"


def _plain_peak(joint: Joint, start: _Start) -> int:
    """The estimated peak of the graph as torch splits it under its own settings, with everything in its own form."""
    plain = Joint(joint.graph, joint.outputs, joint.compiler_fuses)
    numbers = {plain.number(node) for node in plain.graph.nodes if node.name in start.names}
    saved = {n: plain.nbytes[n] for n in numbers if n is not None and not plain.is_input[n]}
    return Lifetimes(plain).estimate(saved).peak


def _searched(joint: Joint, starts: list[_Start], options: Options, budget: int) -> list[SearchResult]:
    """What searches from every start find: first the cheapest that stays below the budget, then the lowest peaks."""
    named = [{joint.number(node) for node in joint.graph.nodes if node.name in start.names} for start in starts]
    saved = [[number for number in options.held if number in numbers] for numbers in named]
    alone = [Lifetimes(joint).estimate({number: options.held[number] for number in each}) for each in saved]
    # To make them once more costs little, but not nothing.
    joint.saves_copies = not joint.copied or alone[0].peak <= budget
    again = [estimate.again for estimate in alone]
    options = replace(options, starts=list(zip(saved, again, strict=True)))
    exact = replace(options, rounded={}, tests={})
    found = [GraphSearch(joint, exact, budget, each).run() for each in saved]
    if options.rounded:
        # Nothing is computed from what is rounded, so a search that may round can end where one that may not goes on.
        for start, each in list(zip(starts, saved, strict=True))[:: max(len(starts) - 1, 1)]:
            # How many bytes a value takes depends on what reads it, and that on what else is saved.
            rounded = {n: start.rounded.get(joint.nodes[n].name, nbytes) for n, nbytes in options.rounded.items()}
            way = replace(options, rounded=rounded)
            found.append(GraphSearch(joint, way, budget, each, is_rounded=True).run())
        found.append(GraphSearch(joint, way, budget, each).run())
    different = {(frozenset(each.saved.items()), frozenset(each.rounded)): each for each in found}

    def rank(each: SearchResult) -> tuple[bool, float]:
        is_above = each.estimate.peak > budget
        return is_above, each.estimate.peak if is_above else each.estimate.seconds

    return sorted(different.values(), key=rank)


def choice_nbytes(value: SavedValue, choice: FormChoice) -> int:
    """Bytes between forward and backward, by the numbers that symbolic sizes stood for."""
    spec = value.spec()
    if choice.is_kept:
        return spec.nbytes
    tests = sum(-(-spec_of(node.meta["val"]).numel // 8) for node in choice.tests)
    return tests + (0 if choice.codec is None else choice.codec.nbytes(spec.shape, spec.dtype))


def _starts(partition: Partition, planned: GraphPlanner, fuses: bool) -> tuple[list[_Start], Joint | None, int]:
    """What torch saves under each of several settings, the graph, and how many results are the forward pass's."""
    starts: list[_Start] = []
    outputs = 0
    asked: list[tuple[fx.Graph, list[fx.Node]]] = []

    def observe(graph: fx.Graph, saved: list[fx.Node]) -> list[fx.Node]:
        asked.append((graph, saved))
        return list(saved)

    for settings in STARTS if asks_what_to_save() else ():
        asked.clear()
        split = Split(*partition(settings, observe))
        outputs = split.outputs
        if not asked:
            break  # torch splits a graph without a backward pass on its own
        names = frozenset(node.name for node in asked[-1][1])
        if names in [start.names for start in starts]:
            continue
        held, rounded = {}, {}
        tests: dict[str, str] = {}
        for value, choice in planned(split):
            name = value.base.name
            held[name] = choice_nbytes(value, choice if is_exact_choice(choice) else _kept(choice))
            if not is_exact_choice(choice):
                rounded[name] = choice_nbytes(value, choice)
                tests |= {test.name: name for test in choice.tests}
        starts.append(_Start(settings, names, held, rounded, tests, convolves(split.backward.graph)))
    # Where nothing is rounded, the peak lies elsewhere, and stored sums only raise it.
    stores = any(start.rounded for start in starts)
    return starts, Joint(asked[-1][0], outputs, fuses, stores_sums=stores) if starts else None, outputs


def _options(joint: Joint, starts: list[_Start], lasting: Collection[int]) -> Options:
    """What may be done with all that torch saves under one setting or another."""
    named = {node.name: number for number, node in enumerate(joint.nodes)}
    saved = {node for node in joint.graph.nodes if any(node.name in start.names for start in starts)}
    numbers = [joint.number(node) for node in saved]
    held = {n: joint.nbytes[n] for n in numbers if n is not None and not joint.is_input[n]}
    rounded: dict[int, int] = {}
    tests: dict[int, int] = {}
    for start in starts:
        held |= {named[name]: nbytes for name, nbytes in start.held.items() if named.get(name) in held}
        rounded |= {named[name]: nbytes for name, nbytes in start.rounded.items() if named.get(name) in held}
        tests |= {named[test]: named[name] for test, name in start.tests.items() if named.get(name) in rounded}
    return Options(held, rounded, set(joint.results) & set(held), _readable(joint, saved, lasting), tests)


def _readable(joint: Joint, saved: Iterable[fx.Node], lasting: Collection[int]) -> set[int]:
    """Inputs that have the same elements in the backward pass: what torch saves, and parameters that nothing writes."""
    among = {joint.number(node) for node in saved if node not in joint.changed}
    inputs = joint.graph.find_nodes(op="placeholder")  # sizes among them, which are no values
    found = {number for number, is_input in enumerate(joint.is_input) if is_input and number in among}
    for position in lasting:
        number = joint.number(inputs[position])
        if number is not None and inputs[position] not in joint.changed:
            found.add(number)
    return found


def _names_of(joint: Joint, starts: list[_Start], found: SearchResult) -> set[str]:
    """The names of the nodes of the joint graph to be saved: every one at which a walk from the gradients may stop."""
    graph, used = joint.graph, found.estimate.saved
    names = {name for start in starts for name in start.names}
    stops = {node for node in graph.nodes if node.name in names and _is_stop(joint, node, used)}
    dependent = gradient_nodes(graph)
    (output,) = graph.find_nodes(op="output")
    waiting = [*dependent, *(node for node in output.all_input_nodes if joint.number(node) in joint.gradients)]
    needed, seen = set[fx.Node](), set(waiting)
    while waiting:
        node = waiting.pop()
        if node.op == "get_attr":  # the function of a branch or a loop, or a constant: either graph has its own
            continue
        number = joint.number(node)
        is_saved = number in used and joint.nodes[number] is node  # type: ignore[index]
        if node not in dependent and (node in stops or is_saved or node.op == "placeholder"):
            needed.add(node)
            continue
        for argument in node.all_input_nodes:
            if argument not in seen:
                seen.add(argument)
                waiting.append(argument)
    # Symbolic sizes cost nothing to save; torch drops those that nothing reads.
    sizes = {node for node in graph.nodes if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))}
    return {node.name for node in needed | (sizes - dependent)}


def _is_stop(joint: Joint, node: fx.Node, used: Iterable[int]) -> bool:
    number = joint.number(node)
    return number is None or number in used or joint.is_input[number]


def _carried_out(
    joint: Joint, found: SearchResult, starts: list[_Start], partition: Partition, planned: GraphPlanner
) -> Chosen:
    """Splits the graph as a search has found, and gives the values their forms."""
    wanted = _names_of(joint, starts, found)

    def choose(graph: fx.Graph, saved: list[fx.Node]) -> list[fx.Node]:
        return [node for node in graph.nodes if node.name in wanted]

    split = Split(*partition({}, choose))
    numbers = {node.name: number for number, node in enumerate(joint.nodes)}
    rounded = {joint.nodes[number].name for number in found.rounded}
    plan, saved = [], {}
    tests: dict[int, int] = {}
    for value, choice in planned(split):
        is_wanted = is_exact_choice(choice) or value.base.name in rounded
        plan.append((value, choice if is_wanted else _kept(choice)))
        number = numbers.get(value.base.name)
        if number is not None:
            saved[number] = choice_nbytes(*plan[-1])
            tests |= {numbers[test.name]: number for test in plan[-1][1].tests if test.name in numbers}
    lifetimes = Lifetimes(joint, {number: saved[number] for number in found.rounded if number in saved}, tests)
    keeps_formats = joint.compiler_fuses and joint.is_on_cpu and not starts[0].convolves
    estimate = lifetimes.estimate(saved)
    return Chosen(
        split,
        plan,
        estimate,
        joint.saves_copies,
        keeps_formats,
        joint.is_apart,
        bool(joint.stored),
        joint.repeats_light,
    )


def is_exact_choice(choice: FormChoice) -> bool:
    """Whether the form of a value keeps gradients' bits."""
    return choice.codec is None or choice.codec.is_exact


def _kept(choice: FormChoice) -> FormChoice:
    return replace(choice, codec=None, tests=(), reason="it fits into the budget as it is")
