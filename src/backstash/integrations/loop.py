"""``bs.wrap``: a model opens a Session by itself whenever a training loop calls it.

Note: [where a wrapped model is open]
    The Session is open from the beginning of the outermost training call of the model until this call returns or
    raises. It is not kept open until the backward pass. A Session that outlives a call would lie on the stacks of
    saved-tensor hooks and torch-function modes while the program enters and leaves its own, and an exception between
    forward and backward would leave it there. What the loss saves outside of the call is therefore kept as plain
    PyTorch keeps it. That costs nothing under an exact policy: backward reads these values first, so they are dense at
    the peak in either case (docs/use/frameworks.md).

Note: [a call of a module]
    ``module(x)`` runs the attribute ``_call_impl`` of the instance, which runs the module's hooks and its ``forward``.
    It is this attribute that is replaced, in the instance's dictionary. So the class, ``forward``, the hooks, the
    parameters and the state dict stay what they are, and hooks that others put on the module (DDP, FSDP2, weight norm)
    run inside the Session. torch's forward hooks would not do: those after ``forward`` do not run on Ctrl-C.

Note: [copies that share]
    ``copy.copy(model)`` and DataParallel copy the dictionary, and what was put in it for one object is then called for
    another. An attribute of an instance is called without the instance, so the object that is called is looked up in
    the caller's frame, that of ``torch.nn.Module``. A copy is given a wrapping of its own as soon as it is met. The
    replicas of DataParallel live for one call, on threads that no Session sees: they are called as they are.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from typing import Any, TypeVar

import torch
from torch import nn

from backstash.arguments import check_model
from backstash.errors import IntegrationError
from backstash.integrations.attaching import is_training, session_for
from backstash.planning.run.budgeted import Budgeted
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.torch_internals import COMPILED_CALL, MODULE_CALL, REPLICA, hide_from_dynamo

Model = TypeVar("Model", bound=nn.Module)


class TrainingWindow:
    """Stands for a model's ``_call_impl`` and opens a Session around the outermost training call.

    Args:
        model: the wrapped model; None if it is not there yet, where a copy is read.
        policy, budget, options: as in :func:`wrap`.
    """

    def __init__(
        self, model: nn.Module | None, policy: str | Policy, budget: int | str | None, options: dict[str, Any]
    ) -> None:
        # Weak, because the model holds this object: with a cycle, `del model` would free no memory.
        self._model = weakref.ref(model) if model is not None else None
        self._arguments = policy, budget, options
        self._session: Session | Budgeted | None = None

    @property
    def model(self) -> nn.Module | None:
        """The wrapped model; None if it is gone, and only a copy that shares this object is there."""
        return None if self._model is None else self._model()

    def of(self, model: nn.Module) -> TrainingWindow:
        """The wrapping of a model in whose dictionary this one is (Note: [copies that share])."""
        if self.model is model:
            return self
        own = TrainingWindow(model, *copy.deepcopy(self._arguments))
        model.__dict__[MODULE_CALL] = own
        return own

    @property
    def session(self) -> Session | Budgeted:
        """The Session, or what keeps the budget. It is made when it is first needed: most copies are never trained."""
        if self._session is None:
            policy, budget, options = self._arguments
            self._session = session_for(policy, budget, **options)
        return self._session

    def session_for_call(self, model: nn.Module) -> Session | Budgeted | None:
        """Returns what opens for a training call of a model in whose dictionary this is; None for nothing."""
        return self.of(model).session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        model = self.model
        caller = None if torch.compiler.is_compiling() else sys._getframe(1).f_locals.get("self")
        if caller is not model and isinstance(caller, nn.Module) and caller.__dict__.get(MODULE_CALL) is self:
            model = caller
        assert model is not None, "a copy of a wrapped model was called by other means than model(...)"
        call = getattr(type(model), MODULE_CALL)  # looked up at each call, since FSDP2 changes a model's class
        if getattr(model, REPLICA, False) or not is_training(model):
            return call(model, *args, **kwargs)
        session = self.session_for_call(model)
        if session is None:
            return call(model, *args, **kwargs)
        if isinstance(session, Budgeted):
            return session.call(model, functools.partial(call, model), *args, **kwargs)
        with session:
            return call(model, *args, **kwargs)

    def close(self) -> None:
        """Stops whatever a budget is measuring."""
        if isinstance(self._session, Budgeted):
            self._session.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingWindow:
        copied = None if self.model is None else memo.get(id(self.model))  # None: it is not the model that is copied
        return TrainingWindow(copied, *copy.deepcopy(self._arguments, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        model = self.model
        # A class that says by itself how it is made again, as that of torch.fx does, is not there when this is read.
        is_there = type(model).__reduce__ is object.__reduce__ and type(model).__reduce_ex__ is object.__reduce_ex__
        return TrainingWindow, (model if is_there else None, *self._arguments)


hide_from_dynamo(TrainingWindow.__call__)


def wrap(model: Model, policy: str | Policy = "lossless", *, budget: int | str | None = None, **options: Any) -> Model:
    """Has a model open a Session by itself whenever it is called for training.

    A call opens the Session if the model is in training mode, grad mode is on, and no Session is open: evaluation,
    ``torch.no_grad()`` and text generation are left alone, and of nested wrapped models the outermost opens. What the
    loss saves after the call has returned is kept as plain PyTorch keeps it (Note: [where a wrapped model is open]).

    Args:
        model: the model, also one that DDP, FSDP2 or Fabric has prepared. It is changed in place: its class, its
            parameters, its hooks and its state dict stay what they are. A deep copy, and what is loaded from a pickle,
            is wrapped as well and has a Session of its own.
        policy: a policy's name or a Policy.
        budget: bytes that a step may take above what is held before it, or text such as ``"2GiB"`` or ``"60%"``. The
            first steps are profiled, and from the tenth backward pass on, or some later, a plan keeps the budget. If an
            allocation fails in a call, the call is repeated once in less memory.
        options: further arguments of :class:`~backstash.Session`, such as ``min_nbytes``; with a budget those of
            :class:`~backstash.planning.run.budgeted.Budgeted`, such as ``allow``.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is not a module.
        IntegrationError: the model is wrapped already, a budget is given together with a policy, or what says how to
            keep a budget without one.
        PlanError: the budget means nothing.
        BudgetError: later, from a backward pass, if no plan fits the budget.
        UnknownNameError: no policy has that name.

    Example:
        >>> import torch
        >>> model = wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), min_nbytes=0)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> session_of(model).report().ratio > 1
        True
        >>> hasattr(unwrap(model), "policy")
        False
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"wrap was asked for a {type(model).__name__}, but it wraps a torch.nn.Module. For a function, put a "
            f"Session around the call: with backstash.Session(...): loss = function(x)."
        )
    window = _window(model)
    if window is not None:
        raise IntegrationError(
            f"wrap was asked for a {type(model).__name__} that is wrapped already, with {window.session.policy}. "
            f"Call backstash.unwrap(model) before you wrap it again."
        )
    if MODULE_CALL in model.__dict__ or getattr(model, COMPILED_CALL, None) is not None:
        changed = "compiled in place" if MODULE_CALL not in model.__dict__ else "called by another library's function"
        raise IntegrationError(
            f"wrap was asked for a {type(model).__name__} that is {changed}, so its calls would not pass through the "
            f"wrapping. Wrap the model first, or put a Session around the forward pass."
        )
    window = TrainingWindow(model, policy, budget, options)
    _ = window.session  # so that wrong arguments raise here and not in the first step
    # Past __setattr__, which Fabric's modules pass on to the module inside.
    model.__dict__[MODULE_CALL] = window
    return model


def unwrap(model: Model) -> Model:
    """Undoes :func:`wrap`.

    Args:
        model: the wrapped model itself, not a module that contains it.

    Returns:
        The model, as it was before.

    Raises:
        IntegrationError: the model is not wrapped, or something else has replaced the wrapping.
        TypeError: it is no module.
    """
    _require_window(model, "unwrap").close()
    del model.__dict__[MODULE_CALL]
    return model


def session_of(model: nn.Module) -> Session | Budgeted:
    """Returns the Session of a wrapped model, or what keeps its budget; either makes the report.

    Raises:
        IntegrationError: the model is not wrapped.
        TypeError: it is no module.
    """
    return _require_window(model, "session_of").session


def _window(model: nn.Module) -> TrainingWindow | None:
    found = model.__dict__.get(MODULE_CALL)
    return found.of(model) if isinstance(found, TrainingWindow) else None


def _require_window(model: nn.Module, asked_by: str) -> TrainingWindow:
    check_model(model, asked_by)
    window = _window(model)
    if window is None:
        inside = [name for name, module in model.named_modules() if name and _window(module) is not None]
        found = f"its part {inside[0]!r} is: pass that one" if inside else "call backstash.wrap(model) first"
        raise IntegrationError(f"{asked_by} was asked for a {type(model).__name__} that is not wrapped; {found}.")
    return window
