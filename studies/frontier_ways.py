"""Ways of torch to spend less memory on a step, for `studies.frontier`: checkpoints of all kinds, and a compiler.

Blocks are found by their repetition. Blocks that run one after the other, each on the result of the one before, are a
*chain*; several of them can share one checkpoint. A U-Net has blocks but no chain, because it pools between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bench.cases import recomputed
from tests.networks.unet import UNet

Block = tuple[nn.Module, ...]
"""Modules that run one after the other: mostly a single one, and the layers between two poolings of a VGG."""

Way = Callable[[], AbstractContextManager[object]]
"""Returns a context in which the network's forward pass runs in that way."""

COMPILED_BUDGETS = (1.0, 0.5, 0.2)
"""Settings of torch's ``activation_memory_budget``."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that a user would put checkpoints around: the entries of lists of equal modules, stages apart."""
    return [block for found in _lists_of(model) for block in found]


def _lists_of(model: nn.Module) -> list[list[nn.Module]]:
    named = [(module, type(module)) for module in model.modules()]
    lists_of = (nn.ModuleList, nn.Sequential)
    repeated = [kind for _, kind in named if kind not in lists_of and sum(other is kind for _, other in named) >= 4]
    lists: list[list[nn.Module]] = []
    for module in model.modules():
        is_list = isinstance(module, lists_of) and len(module) >= 2
        if is_list and all(type(child) in repeated and len(list(child.modules())) > 3 for child in module.children()):
            lists.append(list(module.children()))
    inner = [block for found in lists for block in found]
    return [
        found
        for found in lists
        if not any(block in stage.modules() for stage in found for block in inner if block is not stage)
    ]


def chains_of(model: nn.Module) -> list[list[Block]]:
    """The chains of a network: its lists of blocks, or the layers between the poolings of a plain stack."""
    if isinstance(model, UNet):
        return []
    lists = _lists_of(model)
    if lists:
        return [[(block,) for block in found] for found in lists]
    stack = _plain_stack(model)
    if stack is None:
        return []
    chain: list[list[nn.Module]] = [[]]
    for layer in stack:
        chain[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            chain.append([])
    return [[tuple(layers) for layers in chain if layers]]


def _plain_stack(model: nn.Module) -> nn.Sequential | None:
    """The layers of a network without blocks, such as VGG's, that run one after the other."""
    stack = getattr(model, "features", None)
    return stack if isinstance(stack, nn.Sequential) and not _lists_of(model) else None


def ways(model: nn.Module) -> dict[str, Way]:
    """Checkpoints of all kinds that the network allows, by name."""
    chains = chains_of(model)
    if not chains:
        single: list[Block] = [(block,) for block in blocks_of(model)]
        chains = [[block] for block in single]  # nothing is shared
    count = sum(map(len, chains))
    found: dict[str, Way] = {"checkpoint": lambda: together(_groups(chains, 1))}
    if count >= 4:
        found["checkpoint, every second block"] = lambda: together(_groups(chains, 1)[::2])
    group = math.ceil(math.sqrt(count))
    if max(map(len, chains)) >= 2:
        found["checkpoint, sqrt(n) blocks"] = lambda: together(_groups(chains, group))
        found["checkpoint, nested"] = lambda: nested(chains, group)
    if _plain_stack(model) is None:  # torch refuses it where a relu in place follows a convolution
        found["checkpoint, selective"] = lambda: together(_groups(chains, 1), selective=True)
    return found


def _groups(chains: Sequence[Sequence[Block]], size: int) -> list[Block]:
    """Neighbours of each chain together, as many as ``size``."""
    return [
        tuple(module for block in chain[start : start + size] for module in block)
        for chain in chains
        for start in range(0, len(chain), size)
    ]


@contextmanager
def together(groups: Sequence[Block], selective: bool = False) -> Iterator[None]:
    """Inside, the modules of each group run in one checkpoint.

    The first module's call runs all of the group, and the others pass on what they are given.

    Args:
        groups: the groups.
        selective: whether results of products and convolutions are saved, and all others computed again.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _saves_products)
    with ExitStack() as undo:
        for group in groups:
            run = _Run([module.forward for module in group])
            for module in group:
                undo.callback(_restore, module, vars(module).get("forward"))
                module.forward = run.passes_on  # type: ignore[method-assign]
            group[0].forward = partial(checkpoint, run, **settings)  # type: ignore[method-assign]
        yield


@contextmanager
def nested(chains: Sequence[Sequence[Block]], size: int) -> Iterator[None]:
    """Inside, each block runs in a checkpoint, and each group of neighbours in a checkpoint around these."""
    blocks = [module for chain in chains for block in chain for module in block]
    with recomputed(blocks), together(_groups(chains, size)):
        yield


def _restore(module: nn.Module, forward: object) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward  # type: ignore[assignment,method-assign]


class _Run:
    """Calls one after the other, each with the result of the one before in the place of the first argument."""

    def __init__(self, calls: list[Callable[..., Any]]) -> None:
        self._calls = calls
        self._is_tuple = False  # whether a call returns a tuple, of which the first is what goes on

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for call in self._calls:
            found = call(x, *args, **kwargs)
            self._is_tuple = isinstance(found, tuple)
            x = found[0] if self._is_tuple else found
        return found

    def passes_on(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return (x,) if self._is_tuple else x


_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.convolution.default,
    }
)


def _saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def compiled(model: nn.Module) -> dict[str, Way]:
    """The network compiled with each of some budgets for activations, by name. It takes minutes to compile."""
    found: dict[str, Way] = {}
    for share in COMPILED_BUDGETS:
        call = torch.compile(_copy_of(model._call_impl), dynamic=False)
        found[f"torch.compile, activation_memory_budget {share}"] = partial(_compiled, model, call, share)
    return found


def _copy_of(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own code, because the compiler finds what it has compiled by the code."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    run.__code__ = run.__code__.replace()
    return run


@contextmanager
def _compiled(model: nn.Module, call: Callable[..., Any], share: float) -> Iterator[None]:
    from torch._functorch import config

    before: Any = model._compiled_call_impl
    with config.patch(activation_memory_budget=share):  # type: ignore[attr-defined]
        model._compiled_call_impl = call
        try:
            yield
        finally:
            model._compiled_call_impl = before
