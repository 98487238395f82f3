"""The table of all kernels: schema, fake, argument checks, and why a backend lacks a kernel.

A family of kernels is a package: ``reference.py`` defines them in plain torch, on purpose dull, and runs on any device.
``cpu.py`` and ``triton.py`` beside it have functions of the same names and signatures, which return the same bits.
A kernel enters the table where it is defined: the decorator :func:`backstash.ops.registration.kernel` on its reference
writes its row, when the family is imported. A backend without such a function says why in the row, and the reference
serves in its place. ``tests/ops/test_table.py`` holds every row to this. Families that serve a codec are in
``codecs/``, beside the codec; those that serve ``redeem/`` and ``stash/`` are in ``ops/``.

Every kernel but those that return numbers to the host is also a ``torch.library`` op in the namespace ``backstash``.
Inputs and outputs are flat (1-D, contiguous), because codecs flatten tensors in memory order; the few kernels that
take images say so in their row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row of the table.

    Attributes:
        name: the name of the kernel's functions and of its op.
        package: the package of its family, whose ``reference``, ``cpu`` and ``triton`` have the functions.
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
    package: str
    reference: Callable[..., Any]
    schema: str | None
    fake: Callable[..., Any]
    check: Callable[[str, Sequence[Any]], None]
    without: Mapping[str, str] = field(default_factory=dict)
    fallback: str | None = None

    @property
    def family(self) -> str:
        """The last part of the package's name; with ``test_`` before it, that of the file in ``tests/ops``."""
        return self.package.rpartition(".")[2]


TABLE: dict[str, Kernel] = {}
"""Every kernel by its name. Complete once ``backstash`` is imported, and longer where somebody adds a kernel."""


IN_GRAPHS: Mapping[str, str] = {"triton": "what compiles a graph for CUDA writes such code itself"}
"""Why kernels that compiled graphs call on a CPU alone have no other implementation (``without`` of :func:`kernel`)."""


ON_DEVICES: Mapping[str, str] = {
    "native": "the host knows at once how much there is, and makes the planes as large as that"
}
"""Why kernels that fill planes of a given size have no C++ implementation (``without`` of :func:`kernel`)."""


IN_CUDA: Mapping[str, str] = {
    "triton": "it is written in CUDA C++: the family's cuda.py launches it where it was built"
}
"""Why kernels of which nvcc and g++ compile the same source have no Triton one (``without`` of :func:`kernel`)."""


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
