"""Hugging Face ``Trainer``: a Session around the forward pass and the loss of each training step.

The trainer enters ``compute_loss_context_manager()`` around the forward pass and the loss. A callback alone could not
open a Session there: the trainer calls none between forward and backward. So the method is replaced on this one
trainer. The same method serves evaluation, so it opens a Session only for a model in training mode with grad mode on.

With a budget it is ``compute_loss`` that is replaced, because there the batch is known, by whose shapes a step is
recognised, and the forward pass can be repeated when an allocation has failed in it.

Note: [trainers that pass by]
    A class derived from ``Trainer`` may run its step, or its whole loop, without either method: TRL's OnlineDPOTrainer
    generates, calls the model, a reference model and functions of rewards, and starts the backward pass, all inside of
    its ``training_step``. There the Session opens for each training call of the model, as :func:`backstash.wrap` does
    it. It is not opened around ``training_step`` as a whole: generation would run inside of it, a forward pass with
    its backward pass could not be repeated when an allocation has failed, and whether the model is in training mode
    and what it is called with is known no earlier.

    The calls of a model are followed only where the code of the class says that the method is passed by, and no longer
    than until the method is entered. In an ordinary trainer generation may come first, and be compiled: its model is
    to be what it is without us. The code is read for the names that it uses, so the forecast can be wrong. That is
    found out at the first optimizer step, which is warned of if no Session was opened before it.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import DynamoBackend
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from backstash.capture import modules
from backstash.errors import IntegrationError
from backstash.integrations.attaching import figures, is_training, session_for
from backstash.integrations.loop import TrainingWindow
from backstash.planning.run.budgeted import Budgeted
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.stash.ledger import Report
from backstash.torch_internals import COMPILED_CALL, MODULE_CALL

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
        self._calls: _ModelCalls | None = None  # where the method is passed by
        self._has_opened = self._is_told = False  # in this training

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
        self._ignore_calls()
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
            self._enter_method()
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
        self._enter_method()
        return session.call(model, self._original, model, inputs, *args, **kwargs)

    def _enter_method(self) -> None:
        """The replaced method is entered for training, so the calls of the model need not be followed."""
        if not self._has_opened:
            self._ignore_calls()
        self._has_opened = True

    def enter_call(self) -> Session | Budgeted:
        """A training call of the model begins that no method of the trainer has opened a Session for."""
        self._has_opened = True
        return self.session

    def _follow_calls(self) -> bool:
        """Has each training call of the model open the Session. Returns False if its calls cannot be followed."""
        self._ignore_calls()
        model: Any = self._trainer.model  # another one in each trial of a search
        if not isinstance(model, nn.Module) or MODULE_CALL in model.__dict__ or getattr(model, COMPILED_CALL, None):
            return False
        if self._trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            return False
        self._calls = model.__dict__[MODULE_CALL] = _ModelCalls(model, self)
        return True

    def _ignore_calls(self) -> None:
        calls, self._calls = self._calls, None
        model = None if calls is None else calls.model
        if model is not None and model.__dict__.get(MODULE_CALL) is calls:
            del model.__dict__[MODULE_CALL]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks at the settings once more: they may have changed since the trainer was attached."""
        _check_settings(args)
        self._has_opened = self._is_told = False
        self._ignore_calls()
        if _passes_by(self._trainer, self._method):
            self._follow_calls()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warns if no Session was opened before the first optimizer step.

        Raises:
            IntegrationError: the same, under a strict budget.
        """
        if self._has_opened or self._is_told or modules.is_active():  # a Session around the training sees it all
            return
        self._is_told = True
        trainer, model = type(self._trainer).__name__, type(self._trainer.model).__name__
        kept = "The step took the memory of plain PyTorch"
        if isinstance(self.session, Budgeted):
            kept += f", and budget={self.session.budget!r} is not kept"
        said = (
            f"attach was asked to run the training steps of {trainer} under a Session, but the first optimizer step "
            f"came and no Session had been opened: this trainer has neither entered {self._method}() nor, as far as "
            f"can be seen, called its {model} as a whole, in training mode and with grad mode on. {kept}. In "
            f"training_step, call self.compute_loss(...) inside of `with self.compute_loss_context_manager():`, or "
            f"leave attach out and put a backstash.Session around what it calls."
        )
        if isinstance(self.session, Budgeted) and self.session.strict:
            raise IntegrationError(said)
        if self._calls is None and self._follow_calls():
            said += f" From now on calls of the whole {model} open a Session."
        warnings.warn(said, stacklevel=2)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The same for a loop that calls back only after the optimizer's step.

        Raises:
            IntegrationError: as :meth:`on_pre_optimizer_step`.
        """
        self.on_pre_optimizer_step(args, state, control, **kwargs)

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
        self._ignore_calls()
        if isinstance(self.session, Budgeted):
            self.session.close()
        if self._print_report and state.is_world_process_zero:
            print(self.report())


class _ModelCalls(TrainingWindow):
    """Stands for the ``_call_impl`` of a trainer's model: its training calls open the trainer's Session.

    Copies of the model, such as averages of its weights that a callback makes, are called as they are.

    Args:
        model: the model; None where a copy is read.
        attachment: that of the trainer; None for a copy.
    """

    def __init__(self, model: nn.Module | None = None, attachment: TrainerAttachment | None = None) -> None:
        super().__init__(model, "keep", None, {})
        # Weak, as the model: where training was interrupted, the model is not to hold the trainer and its optimizer.
        self._attachment = None if attachment is None else weakref.ref(attachment)

    def session_for_call(self, model: nn.Module) -> Session | Budgeted | None:
        """Returns the Session of the trainer; None for a copy of its model, and where the trainer is gone."""
        attachment = None if self._attachment is None else self._attachment()
        return attachment.enter_call() if attachment is not None and model is self.model else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModelCalls:
        return _ModelCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModelCalls, ()


def attach(
    trainer: Any,
    policy: str | Policy = "lossless",
    budget: int | str | None = None,
    *,
    print_report: bool = True,
    **options: Any,
) -> TrainerAttachment:
    """Has a trainer run the forward pass and the loss of each training step under a Session.

    Where a class derived from Trainer calls its model without ``compute_loss_context_manager`` (with a budget, without
    ``compute_loss``), the Session is open during these calls (Note: [trainers that pass by]).

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
        UserWarning: ``torch_compile`` is set, so that a Session finds little to store; or later, no Session was open
            before the first optimizer step. If the budget is ``strict``, that is an IntegrationError of ``train()``.
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


def _passes_by(trainer: Trainer, method: str) -> bool:
    """Returns whether the code of a trainer names no way to a method (Note: [trainers that pass by])."""
    return not (_leads_to(trainer, "training_step", method) and _leads_to(trainer, "train", "_inner_training_loop"))


def _leads_to(trainer: Trainer, name: str, goal: str) -> bool:
    """Returns whether a method, or the one of a base class that it calls by ``super()``, names the other one."""
    own: Any = trainer.__dict__.get(name)
    found = [own] if own is not None else []
    for kind in type(trainer).__mro__:
        if kind is Trainer:
            break
        found += [vars(kind)[name]] if name in vars(kind) else []
    for each in found:
        code = getattr(inspect.unwrap(each), "__code__", None)
        names = () if code is None else code.co_names
        if goal in names:
            return True
        if name not in names or "super" not in names:  # `model.train()` is another one
            return False
    return True


def _check_settings(args: TrainingArguments) -> None:
    """Refuses settings with which a Session would see nothing, or would switch something off."""
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
