"""One line for torch.compile: ``torch.compile(model, options=backstash.compile_options("lossless"))``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from backstash import policies
from backstash.arguments import LARGEST
from backstash.compile.budget.splitting import parse_graph_budget
from backstash.compile.forms.bounded import BITS
from backstash.compile.inductor.partitioner import Treatment
from backstash.errors import IntegrationError
from backstash.policies.base import Policy
from backstash.saved import MIN_NBYTES
from backstash.stash.ledger import Report
from backstash.torch_internals import aot_eager_backend, inductor_backend, mode_options, partitioner_base


class CompileOptions(dict[str, Any]):
    """Options for ``torch.compile(options=...)`` that hold a partitioner; other options may be added.

    A copy of the options, as of a module that is compiled with them, is part of the same report.
    """

    @property
    def treatment(self) -> Treatment:
        """What the partitioner does, and has done."""
        found: Treatment = self["custom_partitioner_fn"].treatment
        return found

    def report(self) -> Report:
        """What became of the values that the compiled graphs save."""
        return self.treatment.report()


def compile_options(
    policy: str | Policy = "lossless",
    *,
    budget: int | str | None = None,
    min_nbytes: int | None = None,
    bounded_bits: int = 8,
    **options: Any,
) -> CompileOptions:
    """Options for ``torch.compile`` with which compiled graphs save what backward reads in the form a policy chooses.

    Args:
        policy: a policy's name or a Policy. Of its codecs those are used whose size does not depend on the data.
        budget: bytes at the peak of each graph's step, inputs and parameters excluded, such as ``"600MiB"``, or a share
            of what is estimated for the graph as compiled plain, such as ``"60%"``. Then it is chosen for each value
            whether it is saved, saved in another form, or computed again in the backward pass, so that the estimated
            peak stays below the budget; values are rounded only as far as the budget needs it.
        min_nbytes: smaller values are kept. By default the policy's number, or 16 KiB.
        bounded_bits: 8 or 4, the bits of a code where the policy names an error bound, as ``comet`` does. Where they do
            not suffice for the bound, steps are made coarser, and the report says so.
        options: other options of Inductor, by name.

    Returns:
        A dictionary, with a ``report()``.

    Raises:
        UnknownNameError: no policy has that name.
        TypeError: ``policy`` is neither a name nor a policy.
        ValueError: ``min_nbytes`` is negative, ``budget`` is no number of bytes and no share, or ``bounded_bits`` is
            another number.

    Example:
        >>> import torch
        >>> options = compile_options("lossless")
        >>> model = torch.compile(torch.nn.Linear(4, 4), options=options)  # compiled at its first call
    """
    treatment = _treatment(policy, budget, min_nbytes, bounded_bits, True)
    return CompileOptions(custom_partitioner_fn=_partitioner(treatment), **options)


class CompileBackend:
    """A backend for ``torch.compile(backend=...)``.

    Copies of a module that is compiled with it have the same backend, so that nothing is compiled again for them.

    Attributes:
        treatment: what the partitioner does, and has done.
    """

    def __init__(self, treatment: Treatment, inner: str) -> None:
        self.treatment = treatment
        self._inner = inner
        if inner == "inductor":
            self._compiler = inductor_backend({"custom_partitioner_fn": _partitioner(treatment)})
        else:
            self._compiler = aot_eager_backend(treatment.split)

    def __call__(self, graph: Any, inputs: Any, **keywords: Any) -> Any:
        """Compiles a graph of Dynamo's."""
        return self._compiler(graph, inputs, **keywords)

    def __deepcopy__(self, memo: Any) -> CompileBackend:
        return self

    def __reduce__(self) -> Any:
        return CompileBackend, (self.treatment, self._inner)

    def __repr__(self) -> str:
        return f"compile_backend({self.treatment.policy!r}, inner={self._inner!r})"

    def report(self) -> Report:
        """What became of the values that the compiled graphs save."""
        return self.treatment.report()


def compile_backend(
    policy: str | Policy = "lossless",
    inner: str = "aot_eager",
    *,
    budget: int | str | None = None,
    min_nbytes: int | None = None,
    bounded_bits: int = 8,
) -> CompileBackend:
    """A backend for ``torch.compile(backend=...)`` that saves what backward reads in the form a policy chooses.

    Args:
        policy, budget, min_nbytes, bounded_bits: as for :func:`compile_options`.
        inner: ``"aot_eager"``, which runs the graphs as they are, or ``"inductor"``.

    Raises:
        ValueError: there is no such inner backend; else as for :func:`compile_options`.
    """
    if inner not in ("aot_eager", "inductor"):
        raise ValueError(
            f"compile_backend was asked for inner={inner!r}, but it knows 'aot_eager' and 'inductor'. For another "
            f"backend, pass compile_backend(...).treatment.split as its partition_fn."
        )
    return CompileBackend(_treatment(policy, budget, min_nbytes, bounded_bits, inner == "inductor"), inner)


class Patched:
    """What :func:`patch_compile` yields.

    Attributes:
        options: those that ``torch.compile`` is given; None as long as it has not been called.
    """

    options: CompileOptions | None = None

    def report(self) -> Report | None:
        """What became of the values that compiled graphs save; None if nothing was compiled."""
        return None if self.options is None else self.options.report()


@contextmanager
def patch_compile(policy: str | Policy = "lossless", **settings: Any) -> Iterator[Patched]:
    """Inside the context, whatever is compiled with Inductor is treated, in a program that knows nothing of it.

    Args:
        policy, settings: as for :func:`compile_options`.

    Nothing of Dynamo or Inductor is imported before ``torch.compile`` is called. A call with another backend, or with
    a partitioner of its own among its options, is left as it is.

    Raises:
        UnknownNameError, TypeError, ValueError: as :func:`compile_options`, when ``torch.compile`` is called.
    """
    patched, original = Patched(), torch.compile

    def compile_treated(*args: Any, backend: Any = "inductor", **keywords: Any) -> Any:
        if keywords.get("mode") is not None and keywords.get("options") is not None:
            return original(*args, backend=backend, **keywords)  # which refuses the pair
        given = dict(keywords.get("options") or {})
        if backend == "inductor" and "custom_partitioner_fn" not in given and not keywords.get("disable"):
            if patched.options is None:
                patched.options = compile_options(policy, **settings)
            mode = keywords.pop("mode", None)
            if mode not in (None, "default"):  # torch takes a mode or options, and a mode stands for options
                given = mode_options(mode, keywords.get("dynamic")) | given
            keywords["options"] = given | patched.options
        return original(*args, backend=backend, **keywords)

    torch.compile = compile_treated
    try:
        yield patched
    finally:
        torch.compile = original


def _treatment(
    policy: str | Policy, budget: int | str | None, min_nbytes: int | None, bounded_bits: int, fuses: bool
) -> Treatment:
    found = policies.get(policy)
    if not isinstance(bounded_bits, int) or bounded_bits not in BITS:
        raise ValueError(
            f"compile_options was asked for bounded_bits={bounded_bits!r}, but a code within a bound has "
            f"{' or '.join(map(str, BITS))} bits in a graph. Outside of compiled regions widths follow the bound."
        )
    is_count = isinstance(min_nbytes, int) and not isinstance(min_nbytes, bool)
    if min_nbytes is not None and not (is_count and 0 <= min_nbytes <= LARGEST):
        raise ValueError(
            f"compile_options was asked for min_nbytes={min_nbytes!r}, but it takes a number of bytes from 0 on. Leave "
            f"it out for {MIN_NBYTES}."
        )
    if min_nbytes is None:
        min_nbytes = MIN_NBYTES if found.min_nbytes is None else found.min_nbytes
    if budget is not None:
        nbytes = parse_graph_budget(budget, 1 << 40)  # what means nothing is an error now, not when a graph is compiled
        budget = budget if isinstance(budget, str) and "%" in budget else nbytes
    return Treatment(found, min_nbytes, budget, fuses, bounded_bits)


@cache
def _partitioner_class() -> Callable[[Treatment | None, bytes], Any]:
    """The class of Inductor's partitioners, made when it is first asked for: importing it imports Inductor."""

    class Partitioner(partitioner_base()):  # type: ignore[misc]
        def __init__(self, treatment: Treatment | None, identity: bytes) -> None:
            self._treatment, self._identity = treatment, identity

        @property
        def treatment(self) -> Treatment:
            if self._treatment is None:
                raise IntegrationError(
                    "This was compiled with backstash.compile_options under a policy that moves error bounds or cannot "
                    "be pickled, and then it was pickled, so the policy is not here. Compile the module in it anew: "
                    "torch.compile(compiled._orig_mod, options=backstash.compile_options(policy))."
                )
            return self._treatment

        def __call__(self, joint: Any, inputs: Any, **keywords: Any) -> Any:
            return self.treatment.split(joint, inputs, **keywords)

        def uuid(self) -> bytes:
            return self._identity

        def __reduce__(self) -> Any:
            pickled = None if self._treatment is None else self._treatment.pickled
            return _loaded_partitioner, (self._identity, pickled)

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    return Partitioner


def _partitioner(treatment: Treatment) -> Any:
    return _partitioner_class()(treatment, treatment.identity)


def _loaded_partitioner(identity: bytes, pickled: bytes | None) -> Any:
    """A partitioner from a file or another process."""
    return _partitioner_class()(None, identity) if pickled is None else _partitioner(pickle.loads(pickled))


__all__ = ["CompileBackend", "CompileOptions", "Patched", "compile_backend", "compile_options", "patch_compile"]
