"""The table of all kernels: schema, fake, argument checks, and why a backend lacks a kernel.

A kernel enters the table where it is defined: the decorator :func:`kernel` on its reference implementation in
``ops/reference/<family>.py`` writes its row. ``ops/cpu/<family>.py`` and ``ops/triton/<family>.py`` have functions of
the same name and signature, which return the same bits. A backend without such a function says why in the row, and the
reference serves in its place. ``tests/ops/test_table.py`` holds every row to this.

Every kernel but those that return numbers to the host is also a ``torch.library`` op in the namespace ``backstash``.
Inputs and outputs are flat (1-D, contiguous), because codecs flatten tensors in memory order; the few kernels that
take images say so in their row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

LIBRARY = torch.library.Library("backstash", "DEF")

WINDOW = "int inner, int[] input_size, int[] output_size, int[] kernel, int[] stride, int[] padding, int[] dilation"
"""The arguments that describe a pooling, in a schema."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the table.

    Attributes:
        name: the name of the kernel's functions and of its op.
        family: the name of the file that has it, in ``reference``, ``cpu``, ``triton`` and, with ``test_`` before it,
            in ``tests/ops``.
        reference: the definition, in plain torch.
        schema: the op's schema. None if the kernel returns numbers to the host, and so is no op.
        fake: makes outputs without data from inputs without data.
        check: checks the op's arguments, given its name and them. Callers that go past torch's dispatcher have made
            sure of what it checks, and are spared it.
        without: the backends that lack the kernel (``native``, ``triton``), and why.
        fallback: what a caller does where only the reference would serve, if that is better than calling it. Such a
            caller asks :func:`backstash.ops.backends.has_own_kernel` first.
    """

    name: str
    family: str
    reference: Callable[..., Any]
    schema: str | None
    fake: Callable[..., Any]
    check: Callable[[str, Sequence[Any]], None]
    without: Mapping[str, str] = field(default_factory=dict)
    fallback: str | None = None


TABLE: dict[str, Kernel] = {}
"""Every kernel by its name. Complete once ``ops/backends.py`` is imported."""


def _no_outputs(*args: object) -> None:
    """The fake of a kernel that fills a tensor which it was given."""


IN_GRAPHS: Mapping[str, str] = {"triton": "what compiles a graph for CUDA writes such code itself"}
"""Why kernels that compiled graphs call on a CPU alone have no other implementation (``without`` of :func:`kernel`)."""


ON_DEVICES: Mapping[str, str] = {
    "native": "the host knows at once how much there is, and makes the planes as large as that"
}
"""Why kernels that fill planes of a given size have no C++ implementation (``without`` of :func:`kernel`)."""


def kernel(
    schema: str | None,
    fake: Callable[..., Any] = _no_outputs,
    *,
    check: Callable[[str, Sequence[Any]], None] | None = None,
    without: Mapping[str, str] | None = None,
    fallback: str | None = None,
) -> Callable[[Function], Function]:
    """Adds the decorated reference implementation to the table; see :class:`Kernel` for the arguments."""

    def add(reference: Function) -> Function:
        name, family = reference.__name__, reference.__module__.rsplit(".", 1)[-1]
        TABLE[name] = Kernel(name, family, reference, schema, fake, check or check_flat, without or {}, fallback)
        if schema is not None:
            LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"backstash::{name}", fake, lib=LIBRARY)
        return reference

    return add


def dynamic_size() -> Any:
    """Returns the size of an output that depends on the data, for a fake."""
    return torch.library.get_ctx().new_dynamic_size()


def check_flat(name: str, arguments: Sequence[Any]) -> None:
    """Checks that all tensors among the arguments of an op are 1-D and contiguous.

    Raises:
        ValueError: one is not.
    """
    for x in arguments:
        if isinstance(x, Tensor) and (x.dim() != 1 or not x.is_contiguous()):
            raise ValueError(
                f"backstash::{name} asked for a flat contiguous tensor, got shape {list(x.shape)} with strides "
                f"{list(x.stride())}. Flatten it in memory order first (see codecs.base.flat)."
            )
