"""The coarsest dtype in which a step computes, read off the graph that its backward pass runs through.

Parameters and gradients may be float32 while products round to bfloat16: under autocast, around the whole step or
inside the model, with casts that the program writes itself, or where small float32 layers train beside frozen bfloat16
ones. Each node of autograd's graph knows the dtypes of what its function has returned, so a look at the graph when
backward begins sees all of them, and costs the step nothing. A mode that sees each call would keep compiled code from
running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from backstash.torch_internals import autocast_of, hide_from_dynamo, nodes_behind, wrapped_backward_engine

_COMPILED = "CompiledFunction"
"""How the nodes of compiled graphs are called, of which only the results at their ends are seen."""


class StepDtypes:
    """The dtypes of all results through which backward passes run, as long as they are noted.

    Attributes:
        dtypes: those that are seen so far.
    """

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self._of_autocast: set[torch.dtype] = set()
        self._seen_compiled = False
        self._is_over = False

    @property
    def coarsest(self) -> torch.dtype | None:
        """The one with the largest ``eps``; None before a backward pass."""
        found = self.dtypes | (self._of_autocast if self._seen_compiled else set())
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    def note_autocast(self, device: str) -> None:
        """Notes the dtype of autocast, if it is on for a type of device. A compiled graph may compute in it unseen."""
        autocast = autocast_of(device)
        if autocast is not None:
            self._of_autocast.add(autocast[1])

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, it looks at each backward pass that begins."""
        try:
            with wrapped_backward_engine(self._go_backward):
                yield
        finally:
            self._is_over = True

    def _go_backward(
        self, engine: Callable[..., Any], roots: Sequence[Tensor | GradientEdge], *args: Any, **named: Any
    ) -> Any:
        if not self._is_over:
            self._look(roots)
        return engine(roots, *args, **named)

    def _look(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        for node in nodes_behind(root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots):
            self._seen_compiled |= node.name().startswith(_COMPILED)
            found = (getattr(result, "dtype", None) for result in node._input_metadata)
            self.dtypes.update(dtype for dtype in found if dtype is not None and dtype.is_floating_point)


hide_from_dynamo(StepDtypes._go_backward)
hide_from_dynamo(StepDtypes._look, and_all_below=True)
