"""The proofs that a plan's recipes rest on, in the plan's file: who reads it has no room to repeat them."""

from __future__ import annotations

from typing import Any

from backstash.errors import PlanError
from backstash.planning.sealed import shown
from backstash.proofs import environment, proofs

_FIELD = "proofs"


def with_proofs(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain data of a plan, with what this process has proven (Note: [proofs that travel])."""
    return {**content, _FIELD: {"environment": environment(), "answers": proofs.travelling()}}


def without_proofs(content: Any) -> Any:
    """Believes the proofs in a plan's data if they are this environment's, and returns the data without them.

    Raises:
        PlanError: what is there is no proofs.
    """
    if not isinstance(content, dict) or _FIELD not in content:
        return content
    found = content[_FIELD]
    answers = found.get("answers") if isinstance(found, dict) else None
    if not isinstance(answers, dict) or not all(_is_names(names) for names in answers.values()):
        raise PlanError(
            f"a Plan was asked for with its proofs, but got {shown(found)}. Make the file again with this backstash."
        )
    if found.get("environment") == environment():
        proofs.believe(answers)
    return {name: data for name, data in content.items() if name != _FIELD}


def _is_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)
