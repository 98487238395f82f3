"""The decorator that adds a kernel to the table, and to ``torch.ops`` as an op that calls whatever serves a device.

Note: [operations that are heard]
    An operation that is written in Python takes torch's dispatcher 10 us and more, which is as long as many a kernel.
    What the dispatcher adds are fakes for a tensor without data, a node in a graph that is being traced, and a line in
    a profile. So where codecs call a kernel (``ops``) and there is none of these, the function behind the op is called,
    with the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import ArgumentError
from typing import Any, TypeVar

import torch
from torch import Tensor

from backstash.ops.backends import serving
from backstash.ops.table import TABLE, Kernel, check_flat
from backstash.torch_internals import count_dispatch_modes, is_dynamo_compiling, is_traced, profiler_runs

Function = TypeVar("Function", bound=Callable[..., Any])

LIBRARY = torch.library.Library("backstash", "DEF")


def _no_outputs(*args: object) -> None:
    """The fake of a kernel that fills a tensor which it was given."""


def kernel(
    schema: str | None,
    fake: Callable[..., Any] = _no_outputs,
    *,
    check: Callable[[str, Sequence[Any]], None] | None = None,
    without: Mapping[str, str] | None = None,
    fallback: str | None = None,
) -> Callable[[Function], Function]:
    """Adds the decorated reference to the table, and its op to torch; see :class:`~backstash.ops.table.Kernel`.

    The functions of the other backends are looked for beside it: in the modules ``cpu`` and ``triton`` of the package
    in which the reference is defined.
    """

    def add(reference: Function) -> Function:
        name, package = reference.__name__, reference.__module__.rpartition(".")[0]
        TABLE[name] = Kernel(name, package, reference, schema, fake, check or check_flat, without or {}, fallback)
        if schema is not None:
            LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"backstash::{name}", fake, lib=LIBRARY)
            LIBRARY.impl(name, behind(name), "CompositeExplicitAutograd")  # for every kind of device
        return reference

    return add


def behind(name: str) -> Callable[..., Any]:
    """Returns the function behind the op of that name: it checks arguments, and calls what serves their device."""
    row = TABLE[name]

    def call(*args: Any) -> Any:
        row.check(row.name, args)
        try:
            device_type = next(arg.device.type for arg in args if isinstance(arg, Tensor))
            return getattr(serving(device_type), row.name)(*args)
        except ArgumentError as error:  # by which ctypes replaces whatever is raised while it takes an argument
            for kind in (RecursionError, MemoryError):
                if kind.__name__ in str(error):
                    raise kind(str(error)) from error
            raise

    return call


def _is_heard(x: Tensor) -> bool:
    """Whether somebody has to hear of an operation on ``x``, or it has no data to compute with."""
    return (
        is_dynamo_compiling()  # first: what follows is not for Dynamo
        or type(x) is not Tensor
        or x.is_meta
        or count_dispatch_modes() > 0
        or profiler_runs()
        or is_traced()
    )


class Ops:
    """``torch.ops.backstash`` without the dispatcher where nobody hears (Note: [operations that are heard])."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op, function = getattr(torch.ops.backstash, name), behind(name)

        def call(x: Tensor, *rest: Any) -> Any:
            return op(x, *rest) if _is_heard(x) else function(x, *rest)

        setattr(self, name, call)  # found at once from now on
        return call


ops = Ops()
