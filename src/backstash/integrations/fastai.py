"""fastai: a callback that has the learner's model open a Session whenever it is called for training."""

from __future__ import annotations

from typing import Any

from fastai.callback.core import Callback

from backstash.errors import IntegrationError
from backstash.integrations.attaching import session_for
from backstash.integrations.loop import session_of, unwrap, wrap
from backstash.planning.run.budgeted import Budgeted
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.stash.ledger import Report


class BackstashCallback(Callback):  # type: ignore[misc]
    """Wraps the learner's model while it is fitted: ``Learner(..., cbs=BackstashCallback())``.

    Validation and prediction run without a Session. fastai calls nothing after a fit that an error or Ctrl-C has ended,
    so the model stays wrapped then, which changes nothing but its training calls; the next fit goes on with it.

    Args:
        policy: a policy's name or a Policy.
        budget: as for :func:`backstash.wrap`.
        print_report: whether the report is printed when a fit ends.
        options: further arguments of :func:`backstash.wrap`, such as ``min_nbytes``.

    Raises:
        IntegrationError: a budget is given together with a policy.
        PlanError: the budget means nothing.
        UnknownNameError: no policy has that name.
    """

    def __init__(
        self,
        policy: str | Policy = "lossless",
        budget: int | str | None = None,
        *,
        print_report: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        session_for(policy, budget, **options)  # so that wrong arguments raise here and not in fit
        self._arguments = policy, budget, options
        self._print_report = print_report
        self._model: Any = None  # while it is wrapped
        self.session: Session | Budgeted | None = None

    def report(self) -> Report:
        """The accounts of the last training step.

        Raises:
            IntegrationError: nothing was fitted yet.
        """
        if self.session is None:
            raise IntegrationError("a report was asked for, but nothing was fitted yet. Call learn.fit first.")
        return self.session.report()

    def before_fit(self) -> None:
        """Wraps the model."""
        model = self.learn.model
        if self._model is not None and self._model is not model:
            unwrap(self._model)
        if self._model is not model:
            policy, budget, options = self._arguments
            self._model = wrap(model, policy, budget=budget, **options)
        self.session = session_of(model)

    def after_fit(self) -> None:
        """Unwraps it, and prints the report of the last step."""
        if self._model is None:
            return
        self._model = None
        unwrap(self.learn.model)
        if self._print_report:
            print(self.report())
