"""Accelerate: a Session around each training call of a model that an ``Accelerator`` has prepared.

Accelerate leaves the loop to the program and has no place of its own between forward and backward, so the prepared
model opens the Session itself, as :func:`backstash.wrap` does it (Note: [where a wrapped model is open] in loop.py says
why the Session is not kept open until ``accelerator.backward``). What this module adds is what the accelerator knows:
settings that cannot be combined, the first process, and its trackers.
"""

from __future__ import annotations

import warnings
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from backstash.errors import IntegrationError
from backstash.integrations import loop
from backstash.integrations.attaching import figures
from backstash.planning.run.budgeted import Budgeted
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.stash.ledger import Report

_UNSEEN = {
    DistributedType.MEGATRON_LM: "Megatron-LM runs forward and backward inside one call of its own",
    DistributedType.XLA: "XLA runs the step as a compiled graph",
}


class AcceleratorAttachment:
    """What connects a prepared model with a Session; :func:`attach` makes it.

    Attributes:
        model: the prepared model, which is wrapped.
        session: its Session, or what keeps its budget.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator = accelerator
        self.model = model
        self.session: Session | Budgeted = loop.session_of(model)

    def report(self) -> Report:
        """The accounts of the last training step of this process."""
        return self.session.report()

    def log(self, step: int | None = None) -> dict[str, float]:
        """Sends the figures of the last step to the accelerator's trackers.

        Args:
            step: the number of the step.

        Returns:
            The figures: ``backstash/stash_mib``, ``backstash/peak_mib`` and ``backstash/ratio``.
        """
        found = figures(self.session)
        if found:
            self._accelerator.log(found, step=step)
        return found

    def print_report(self) -> None:
        """Prints the report, on the first process."""
        self._accelerator.print(self.report())

    def detach(self) -> None:
        """Undoes :func:`attach`.

        Raises:
            IntegrationError: the model is not wrapped any more.
        """
        loop.unwrap(self.model)


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    policy: str | Policy = "lossless",
    budget: int | str | None = None,
    **options: Any,
) -> AcceleratorAttachment:
    """Has a prepared model run each training call under a Session.

    Evaluation and ``torch.no_grad()`` run without one. Gradient accumulation, clipping and mixed precision stay what
    they are.

    Args:
        accelerator: the accelerator.
        model: the model that ``accelerator.prepare`` has returned.
        policy: a policy's name or a Policy.
        budget: as for :func:`backstash.wrap`. Each process plans for itself.
        options: further arguments of :func:`backstash.wrap`, such as ``min_nbytes``.

    Returns:
        The attachment, with the report and :meth:`Attachment.detach`.

    Raises:
        IntegrationError: the model was not prepared, or is attached already; a budget is given with a policy; or a
            setting of the accelerator cannot be combined with a Session (see docs/use/frameworks-accelerate.md).
        UnknownNameError: no policy has that name.

    Warns:
        UserWarning: the accelerator compiles the model, so that a Session finds little to store.
    """
    if not hasattr(accelerator, "distributed_type"):
        raise IntegrationError(
            f"attach was asked for a {type(accelerator).__name__}, but it takes an accelerate.Accelerator and then the "
            f"model. Call attach(accelerator, model)."
        )
    unseen = _UNSEEN.get(accelerator.distributed_type)
    if unseen is not None:
        raise IntegrationError(
            f"attach was asked for an accelerator with distributed_type={accelerator.distributed_type.value!r}, but "
            f"{unseen}, where a Session sees nothing. Train with DDP or FSDP to use backstash."
        )
    if not isinstance(model, nn.Module) or not getattr(model, "_is_accelerate_prepared", False):
        raise IntegrationError(
            f"attach was asked for a {type(model).__name__} that no accelerator has prepared. Call "
            f"model = accelerator.prepare(model) first, and pass what it returns."
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        warnings.warn(
            f"dynamo_backend={accelerator.state.dynamo_plugin.backend.value!r}: a compiled model saves its tensors "
            f"inside the compiled graph, where a Session does not see them, so little will be stored smaller. "
            f"Gradients are the same. Leave dynamo_backend out, and either leave it at that, or call "
            f"model.compile(options=backstash.compile_options()) before prepare in place of attach.",
            stacklevel=2,
        )
    loop.wrap(model, policy, budget=budget, **options)
    return AcceleratorAttachment(accelerator, model)
