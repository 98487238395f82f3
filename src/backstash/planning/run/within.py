"""The outcome of a budget, as data and as a line of a report."""

from __future__ import annotations

from dataclasses import dataclass

from backstash.planning.model.plan import Plan
from backstash.stash.tables import amount


@dataclass(frozen=True)
class Within:
    """What became of a budget.

    Attributes:
        budget_nbytes: the budget; 0 as long as no step was planned.
        plain_nbytes: the counted peak of a plain step.
        planned_nbytes: the peak that the plan predicts.
        reached_nbytes: the counted peak of a step under the plan.
        fragmented_nbytes: how many of them could not be used, where the budget is of reserved memory.
        plain_seconds: time of a plain step; 0.0 if none was timed, as of a shape whose plan follows from others, or if
            plain steps have kept their hooks, because something is compiled.
        seconds: usual time of a step under the plan; 0.0 if none was timed.
        measured_passes: how many backward passes ran until all was measured and planned, or so far.
        measured_seconds: how long measuring and planning took beside these passes.
        shapes: how many kinds of steps, by the shapes of their inputs, have a plan of their own.
        predicted: of how many of them the plan was there before their first step, because it followed from others.
        escalated: how many values were held in less than planned, because more than planned was held before them.
        retried: how many forward passes ran once more after an allocation had failed.
        progress: what is done meanwhile, as long as there is no plan.
        trouble: why there is no plan, or why the budget may not be kept, or why a plan does less than is allowed; empty
            where all is well.
    """

    budget_nbytes: int = 0
    plain_nbytes: int = 0
    planned_nbytes: int = 0
    reached_nbytes: int = 0
    fragmented_nbytes: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    measured_passes: int = 0
    measured_seconds: float = 0.0
    plans: int = 0
    plan: Plan | None = None
    shapes: int = 0
    predicted: int = 0
    escalated: int = 0
    retried: int = 0
    progress: str = ""
    trouble: str = ""

    def __str__(self) -> str:
        """Planned, predicted and reached, in a line."""
        if self.plan is None:
            return (
                self.trouble
                or self.progress
                or "training ended before a step could be planned, which takes nine backward passes on inputs of one "
                "shape, or some more where steps are small, outside of an optimizer's closure"
            )
        plain = f" (plain {amount(self.plain_nbytes)})" if self.plain_nbytes else ""
        parts = [f"budget {amount(self.budget_nbytes)}{plain}"]
        over = " (above the budget)" if self.planned_nbytes > self.budget_nbytes else ""
        parts.append(f"planned {amount(self.planned_nbytes)}{over}")
        if self.reached_nbytes:
            over = " (above the budget)" if self.reached_nbytes > self.budget_nbytes else ""
            holes = f", {amount(self.fragmented_nbytes)} of it fragmented" if self.fragmented_nbytes else ""
            parts.append(f"reached {amount(self.reached_nbytes)}{over}{holes}")
        if self.plan.error:
            parts.append(f"gradients predicted to be off by {self.plan.error:.2%} of their length")
        if self.seconds and self.plain_seconds:
            parts.append(f"step {self.seconds / self.plain_seconds:.2f} times plain's")
        if self.measured_seconds:
            parts.append(f"measured and planned in {self.measured_passes} passes and {self.measured_seconds:.2f} s")
        if self.shapes > 1:
            before = f", {self.predicted} of them planned before their first step" if self.predicted else ""
            parts.append(f"{self.shapes} shapes of input{before}")
        if self.escalated:
            parts.append(f"{self.escalated} values held in less than planned")
        if self.retried:
            parts.append(f"{self.retried} forward passes repeated after a failed allocation")
        return ", ".join([*parts, *([self.trouble] if self.trouble else [])])
