"""The common part of all frameworks' integrations: the Session, the moment when it opens, and its log."""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any

import torch
from torch import nn

from backstash import accelerator
from backstash.capture import leaving, modules
from backstash.errors import IntegrationError
from backstash.planning.run.budgeted import Budgeted
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.torch_internals import functorch_level, in_backward

PREFIX = "backstash/"
"""Begins the names of all figures that are logged."""


def session_for(policy: str | Policy, budget: int | str | None = None, **options: Any) -> Session | Budgeted:
    """Returns the Session of an integration, or with a budget what opens the Sessions that keep it.

    Args:
        policy: a policy's name or a Policy. With a budget, ``"lossless"``.
        budget: bytes that a step may take above what is held before it, or text such as ``"6GiB"`` or ``"60%"``.
        options: further arguments of :class:`~backstash.Session`; with a budget those of
            :class:`~backstash.planning.run.budgeted.Budgeted`.

    Raises:
        IntegrationError: a budget is given together with another policy, or what says how to keep one without it.
        PlanError: the budget means nothing.
        UnknownNameError: no policy has that name.
    """
    if budget is None:
        own = inspect.signature(Budgeted).parameters.keys() - inspect.signature(Session).parameters.keys()
        if of_budget := sorted(own & options.keys()):
            asked = ", ".join(f"{name}={options[name]!r:.80}" for name in of_budget)
            raise IntegrationError(
                f"{asked} was asked for without a budget, but that says how a budget is kept. Pass budget=..., such as "
                f"'2GiB' or '60%', or leave {', '.join(of_budget)} out."
            )
        return Session(policy, **options)
    if policy != "lossless":
        raise IntegrationError(
            f"budget={budget!r} was asked for together with policy={policy!r:.80}, but a budget is kept by a plan, and "
            f"a plan is a policy of its own. Leave policy= out, and say with allow=(...) what a plan may do."
        )
    return Budgeted(budget, **options)


def is_training(model: nn.Module) -> bool:
    """Returns whether a call of ``model`` would begin a training forward pass, so that a Session may be opened for it.

    It would not in evaluation mode, without grad mode, inside another Session, which treats the values then, and inside
    a backward pass, where a checkpoint runs its part of the forward pass again. A model that is being exported, traced
    or transformed by torch.func is left alone as well: torch knows no saved-tensor hooks there.
    """
    leaving.leave_abandoned()
    return (
        model.training
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not modules.is_active()
        and not in_backward()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and functorch_level() is None
    )


def figures(session: Session | Budgeted) -> dict[str, float]:
    """Returns what is logged of a Session's last step, by name; empty if nothing was saved yet.

    * ``backstash/stash_mib``: MiB that the device holds of saved tensors between forward and backward.
    * ``backstash/ratio``: the MiB that plain PyTorch would hold of them, divided by that.
    * ``backstash/peak_mib``: MiB of the process's peak: of CUDA's allocator, or else of resident memory.
    """
    report = session.report()
    if not report.saved_nbytes:
        return {}
    device_nbytes = report.stash_nbytes - report.moved_nbytes
    found = {"stash_mib": device_nbytes / 2**20, "peak_mib": peak_nbytes() / 2**20}
    ratio = report.saved_nbytes / device_nbytes if device_nbytes else math.inf
    if math.isfinite(ratio):  # else everything was moved, and loggers that write JSON do not know infinity
        found["ratio"] = ratio
    return {PREFIX + name: value for name, value in found.items()}


def peak_nbytes() -> int:
    """Returns the peak of this process in bytes: of CUDA's allocator if CUDA is in use, else of resident memory."""
    if accelerator.kind_in_use():
        return torch.accelerator.max_memory_allocated()
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
