"""Hugging Face ``Trainer``: a Session around the forward pass and the loss of each training step.

The trainer enters ``compute_loss_context_manager()`` around the forward pass and the loss. A callback alone could not
open a Session there: the trainer calls none between forward and backward. So the method is replaced on this one
trainer. The same method serves evaluation, so it opens a Session only for a model in training mode with grad mode on.

With a budget it is ``compute_loss`` that is replaced, because there the batch is known, by whose shapes a step is
recognised, and the forward pass can be repeated when an allocation has failed in it.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from backstash.errors import IntegrationError
from backstash.integrations.attaching import figures, is_training, session_for
from backstash.planning.run.budgeted import Budgeted
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.stash.ledger import Report

_METHOD = "compute_loss_context_manager"
_METHOD_WITHIN = "compute_loss"


class TrainerAttachment(TrainerCallback):  # type: ignore[misc]
    """What connects a trainer with a Session; :func:`attach` makes it.

    Attributes:
        session: the Session, or what keeps the budget, for as long as the trainer is attached and after.
    """

    def __init__(
        self, trainer: Trainer, session: Session | Budgeted, asked: tuple[Any, ...], print_report: bool
    ) -> None:
        self.session = session
        self.asked = asked
        self._trainer = trainer
        self._print_report = print_report
        self._method = _METHOD_WITHIN if isinstance(session, Budgeted) else _METHOD
        self._had = trainer.__dict__.get(self._method)  # where the program has replaced the method itself
        self._original = getattr(trainer, self._method)

    def report(self) -> Report:
        """The accounts of the last training step."""
        return self.session.report()

    def install(self) -> None:
        """Replaces the method of the trainer, and adds the callback before all others."""
        setattr(self._trainer, self._method, self._compute if isinstance(self.session, Budgeted) else self._context)
        # Before the others, which are to find our figures among the logs.
        self._trainer.callback_handler.callbacks.insert(0, self)

    def remove(self) -> None:
        """Puts back what was there before."""
        if isinstance(self.session, Budgeted):
            self.session.close()
        if self._had is None:
            del self._trainer.__dict__[self._method]
        else:
            setattr(self._trainer, self._method, self._had)
        self._trainer.callback_handler.callbacks.remove(self)

    def _context(self) -> ExitStack:
        """What the trainer enters around the forward pass and the loss, in training and in evaluation."""
        stack: ExitStack = self._original()
        model: Any = self._trainer.model  # another one in each trial of a search
        if is_training(model):
            try:
                stack.enter_context(self.session)
            except BaseException:
                stack.close()
                raise
        return stack

    def _compute(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """What the trainer calls for the forward pass and the loss, in training and in evaluation."""
        session: Any = self.session
        training: Any = self._trainer.model
        if not is_training(training):
            return self._original(model, inputs, *args, **kwargs)
        return session.call(model, self._original, model, inputs, *args, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks at the settings once more: they may have changed since the trainer was attached."""
        _check_settings(args)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the figures to what is logged of a training step, also to the trainer's history."""
        if logs is not None and "loss" in logs:
            found = {name: round(value, 4) for name, value in figures(self.session).items()}
            logs.update(found)
            if state.log_history:
                state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prints the report of the last step, on the first process."""
        if isinstance(self.session, Budgeted):
            self.session.close()
        if self._print_report and state.is_world_process_zero:
            print(self.report())


def attach(
    trainer: Any,
    policy: str | Policy = "lossless",
    budget: int | str | None = None,
    *,
    print_report: bool = True,
    **options: Any,
) -> TrainerAttachment:
    """Has a trainer run the forward pass and the loss of each training step under a Session.

    Evaluation, prediction and generation run without one. ``backstash/stash_mib``, ``backstash/peak_mib`` and
    ``backstash/ratio`` are logged with the loss, and the report is printed when training ends. The trainer stays
    attached, also when training is interrupted, until :func:`detach`.

    Args:
        trainer: the trainer, before or after it has trained.
        policy: a policy's name or a Policy.
        budget: as for :func:`backstash.wrap`. Each process plans for itself.
        print_report: whether the first process prints the report when training ends.
        options: further arguments of :func:`backstash.wrap`, such as ``min_nbytes``.

    Returns:
        The attachment, whose ``report()`` is the report of the last step. Attaching once more with equal arguments
        changes nothing and returns the same one.

    Raises:
        IntegrationError: the trainer is attached with other arguments; a budget is given with a policy; or a setting of
            the trainer cannot be combined with a Session (see docs/use/frameworks-huggingface.md).
        UnknownNameError: no policy has that name.

    Warns:
        UserWarning: ``torch_compile`` is set, so that a Session finds little to store.
    """
    asked = (policy, budget, print_report, options)
    existing = _attachment(trainer)
    if existing is not None:
        if existing.asked == asked:
            return existing
        raise IntegrationError(
            f"attach was asked for policy {policy!r}, but this trainer is attached already, with "
            f"{existing.session.policy} and options {existing.asked[3]}. Call "
            f"backstash.integrations.huggingface.detach(trainer) first."
        )
    _check_settings(trainer.args)
    if trainer.args.torch_compile:
        warnings.warn(
            "torch_compile=True: a compiled model saves its tensors inside the compiled graph, where a Session does "
            "not see them, so little will be stored smaller. Gradients are the same. Set torch_compile=False, and "
            "either leave it at that, or call model.compile(options=backstash.compile_options()) in place of attach.",
            stacklevel=2,
        )
    attachment = TrainerAttachment(trainer, session_for(policy, budget, **options), asked, print_report)
    attachment.install()
    return attachment


def detach(trainer: Trainer) -> None:
    """Undoes :func:`attach`.

    Raises:
        IntegrationError: the trainer is not attached.
    """
    attachment = _attachment(trainer)
    if attachment is None:
        raise IntegrationError("detach was asked for a trainer that is not attached. There is nothing to undo.")
    attachment.remove()


class TrainerMixin:
    """Attaches a trainer when it is made: ``class MyTrainer(TrainerMixin, Trainer): ...``.

    Attributes:
        backstash_policy: a policy's name or a Policy, for the class or set before ``__init__`` of the trainer runs.
        backstash_options: further arguments of :func:`attach`, by name.
        backstash: the attachment, whose ``report()`` is the report of the last step.
    """

    backstash_policy: str | Policy = "lossless"
    backstash_options: dict[str, Any] = {}  # noqa: RUF012 - it is only read
    backstash: TrainerAttachment

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backstash = attach(self, self.backstash_policy, **self.backstash_options)


@dataclass
class BackstashArguments:
    """The switch among the arguments of a script: ``HfArgumentParser((BackstashArguments, TrainingArguments))``.

    TRL's ``TrlParser`` takes it as well, also from its yaml file. A class of training arguments may have it as a base.

    Attributes:
        backstash_policy: a policy's name, or ``"plain"`` to leave the trainer as it is.
        backstash_budget: as for :func:`backstash.wrap`; in place of a policy.
    """

    backstash_policy: str = field(
        default="lossless",
        metadata={"help": "What is done with the tensors that backward reads: a policy of backstash; plain for none."},
    )
    backstash_budget: str | None = field(
        default=None,
        metadata={"help": "The memory that a step may take, such as 2GiB or 60%%: backstash plans for it."},
    )

    def attach(self, trainer: Any, **options: Any) -> TrainerAttachment | None:
        """Attaches a trainer as these arguments say; returns None if they say ``plain``.

        Args:
            trainer: the trainer.
            options: further arguments of :func:`attach`.

        Raises:
            IntegrationError, PlanError, UnknownNameError: as :func:`attach`.
        """
        if self.backstash_policy == "plain" and self.backstash_budget is None:
            return None
        return attach(trainer, self.backstash_policy, self.backstash_budget, **options)


def _attachment(trainer: Trainer) -> TrainerAttachment | None:
    if not hasattr(trainer, "callback_handler"):
        raise IntegrationError(
            f"a {type(trainer).__name__} was given, but this works on a transformers.Trainer. Pass the trainer, not "
            f"its model or arguments. For a loop of your own, see backstash.wrap."
        )
    found = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainerAttachment)]
    return found[0] if found else None


def _check_settings(args: TrainingArguments) -> None:
    """Refuses settings with which a Session would see nothing, or would switch something off.

    Raises:
        IntegrationError: there is such a setting.
    """
    if getattr(args, "activation_offloading", False):
        raise IntegrationError(
            "attach was asked for a trainer with activation_offloading=True. It offloads with saved-tensor hooks of "
            "its own around the whole step, and only the innermost hooks of autograd run, so one of the two would do "
            "nothing. Set activation_offloading=False and use backstash's replacement, policy='offload'."
        )
    if args.n_gpu > 1:
        raise IntegrationError(
            f"attach was asked for a trainer with {args.n_gpu} GPUs in one process. It would use "
            f"torch.nn.DataParallel, whose replicas run on threads that a Session does not see. Start one "
            f"process for each GPU with `torchrun --nproc-per-node {args.n_gpu}`, or set CUDA_VISIBLE_DEVICES to one."
        )
