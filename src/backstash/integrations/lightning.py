"""Lightning: a Session around the training step of a ``LightningModule``.

Lightning's strategy enters ``precision_plugin.train_step_context()`` around each training step, and other methods of
the plugin around validation, test and prediction. So a callback that wraps this one method treats training alone. The
backward pass of automatic optimisation runs after the step, that of manual optimisation inside it; a Session serves
either. With a budget another method is wrapped, ``convert_input()``, which is called with each batch between two steps,
also while a ``BatchSizeFinder`` tries batches and calls no callback. For Fabric, whose loop is the program's own, there
is ``backstash.wrap(fabric.setup(model))``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:  # the same library under its other name
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

from backstash.errors import IntegrationError
from backstash.integrations.attaching import figures, is_training, session_for
from backstash.planning.run.budgeted import Budgeted
from backstash.policies.base import Policy
from backstash.session import Session
from backstash.stash.ledger import Report

_METHOD = "train_step_context"
_BETWEEN = "convert_input"


class BackstashCallback(Callback):  # type: ignore[misc]
    """Has Lightning run each training step under a Session.

    ``backstash/stash_mib``, ``backstash/peak_mib`` and ``backstash/ratio`` are logged in every
    ``log_every_n_steps``-th step, and the report is printed when training ends. Whatever ends ``fit``, also an
    exception or Ctrl-C, the precision plugin gets its own method back.

    Args:
        policy: a policy's name or a Policy.
        budget: as for :func:`backstash.wrap`; an allocation that fails is not repeated here. Each process plans for
            itself.
        print_report: whether the first process prints the report when training ends.
        options: further arguments of :func:`backstash.wrap`, such as ``min_nbytes``.

    Attributes:
        session: the Session of the last ``fit``, or what keeps its budget.

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
        self._arguments = policy, budget, options
        self._print_report = print_report
        self.session: Session | Budgeted | None = (
            self._new_session()
        )  # so that wrong arguments raise here and not in fit
        self._plugin: Any = None
        self._batch: Any = None  # that of the step in progress
        self._had: Any = None  # the plugin's own attributes, where the program has replaced the methods itself
        self._had_input: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """For the processes that a strategy starts: each makes a Session of its own."""
        return self.__dict__ | {"session": None, "_plugin": None, "_had": None, "_had_input": None, "_batch": None}

    def report(self) -> Report:
        """The accounts of the last training step.

        Raises:
            IntegrationError: there was no training in this process.
        """
        if self.session is None:
            raise IntegrationError(
                "a report was asked for, but no training ran in this process: the strategy has started others. Read "
                "what each of them has printed or logged."
            )
        return self.session.report()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wraps the method when ``fit`` begins."""
        if stage != "fit":
            return
        self._restore()
        session = self.session = self._new_session()
        self._plugin = plugin = trainer.precision_plugin
        self._had = plugin.__dict__.get(_METHOD)
        original = getattr(plugin, _METHOD)

        @contextmanager
        def train_step_context() -> Iterator[None]:
            with original():
                if not is_training(pl_module):
                    yield
                elif isinstance(session, Budgeted) and self._batch is not None:
                    with session.window(pl_module, self._batch):
                        yield
                else:
                    with session:
                        yield

        setattr(plugin, _METHOD, train_step_context)
        if isinstance(session, Budgeted):
            self._had_input = plugin.__dict__.get(_BETWEEN)
            convert_input = getattr(plugin, _BETWEEN)

            def between_steps(batch: Any) -> Any:
                self._batch = batch
                session.between_steps()
                return convert_input(batch)

            setattr(plugin, _BETWEEN, between_steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the figures of the step."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.session is not None and every and not (batch_idx + 1) % every:
            found = figures(self.session)
            if found:
                pl_module.log_dict(found, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the report of the last step, on the first process."""
        if self._print_report and trainer.is_global_zero:
            print(self.report())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the plugin its own method back."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, when training has failed or was interrupted."""
        self._restore()

    def _restore(self) -> None:
        self._batch = None
        if isinstance(self.session, Budgeted):
            self.session.close()
        if self._plugin is None:
            return
        for method, had in ((_METHOD, self._had), (_BETWEEN, self._had_input)):
            if had is not None:
                setattr(self._plugin, method, had)
            else:
                self._plugin.__dict__.pop(method, None)
        self._plugin = self._had = self._had_input = None

    def _new_session(self) -> Session | Budgeted:
        policy, budget, options = self._arguments
        return session_for(policy, budget, **options)
