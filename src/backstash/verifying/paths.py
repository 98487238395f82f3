"""Paths of modules, and names of parameters, in a program that nobody has told us its model of."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

from backstash.saved import is_tensor
from backstash.torch_internals import nodes_behind

_MOST_NODES = 200_000


class Stacks(threading.local):
    """A stack for each thread."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


class ModulePaths:
    """Follows which module runs, and names all modules below those that are called outermost.

    Attributes:
        roots: the modules that are called outermost, by the prefix of their paths. The first one's is empty.
        found_root: is called with each of them, before its first forward.
    """

    def __init__(self) -> None:
        self.roots: dict[str, nn.Module] = {}
        self.found_root: Callable[[nn.Module], None] = lambda module: None
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._here = Stacks()
        self._leaves: dict[int, Tensor] = {}

    @property
    def current(self) -> str:
        """The path of the module that runs on this thread; ``""`` for the model itself and outside of modules."""
        stack = self._here.stack
        return stack[-1] if stack else ""

    @property
    def depth(self) -> int:
        """How many modules run inside each other."""
        return len(self._here.stack)

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        stack = self._here.stack
        path = self._paths.get(module)
        if path is None:
            path = self._add(module) if not stack else stack[-1]
        stack.append(path)

    def leave(self) -> None:
        """It has ended."""
        stack = self._here.stack
        if stack:
            stack.pop()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of all parameters, and of other leaves that were found to have gradients."""
        seen: set[int] = set()
        for prefix, root in self.roots.items():
            for name, parameter in root.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield _joined(prefix, name), parameter
        unknown = [leaf for number, leaf in self._leaves.items() if number not in seen]
        for place, leaf in enumerate(unknown):
            yield f"leaf {place}", leaf

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of all buffers."""
        for prefix, root in self.roots.items():
            for name, buffer in root.named_buffers():
                yield _joined(prefix, name), buffer

    def name_of_memory(self, address: int) -> str | None:
        """The parameter or the buffer at an address."""
        for kind, held in (("the buffer", self.buffers()), ("the parameter", self.parameters())):
            for name, x in held:
                if address and address_of(x) == address:
                    return f"{kind} {name}"
        return None

    def note_leaves(self, tensors: Any) -> None:
        """Finds the leaves behind what a backward pass begins from."""
        given = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        for node in islice(nodes_behind(x.grad_fn for x in given if is_tensor(x)), _MOST_NODES):
            leaf = getattr(node, "variable", None)
            if leaf is not None and is_tensor(leaf):
                self._leaves.setdefault(id(leaf), leaf)

    def _add(self, module: nn.Module) -> str:
        prefix = "" if not self.roots else type(module).__name__
        number = 1
        while prefix in self.roots:
            number += 1
            prefix = f"{type(module).__name__}#{number}"
        self.found_root(module)
        self.roots[prefix] = module
        for name, each in module.named_modules():
            if each not in self._paths:
                self._paths[each] = _joined(prefix, name)
        return self._paths[module]


def _joined(prefix: str, name: str) -> str:
    return ".".join(each for each in (prefix, name) if each)


def address_of(x: Tensor) -> int:
    """Where the first element lies; 0 of a tensor without memory."""
    try:
        return x.data_ptr()
    except RuntimeError:  # of a tensor without a storage
        return 0
