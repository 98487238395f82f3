"""Axolotl: a plugin that attaches the trainer. The switch is in the yaml file of the training.

.. code-block:: yaml

    plugins: [backstash.integrations.axolotl.BackstashPlugin]
    backstash_budget: 60%
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from backstash.integrations.huggingface import attach


class BackstashSettings(BaseModel):  # type: ignore[misc, unused-ignore]
    """The keys that the plugin adds to a training's yaml file.

    Attributes:
        backstash_policy: a policy's name.
        backstash_budget: as for :func:`backstash.wrap`; in place of a policy.
        backstash_options: further arguments of :func:`backstash.integrations.huggingface.attach`, by name.
    """

    backstash_policy: str = "lossless"
    backstash_budget: int | str | None = None
    backstash_options: dict[str, Any] | None = None


class BackstashPlugin(BasePlugin):  # type: ignore[misc]
    """Attaches every trainer that Axolotl makes: supervised, with preferences or with rewards."""

    def get_input_args(self) -> str:
        """Returns the dotted path of the settings, by which Axolotl checks the yaml file."""
        return f"{BackstashSettings.__module__}.{BackstashSettings.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attaches the trainer with the settings of the yaml file.

        Args:
            cfg: the settings as Axolotl hands them on, by attribute; what the file has not is None.
            trainer: a trainer of Hugging Face.

        Raises:
            IntegrationError, PlanError, UnknownNameError: as :func:`backstash.integrations.huggingface.attach`.
        """
        attach(
            trainer,
            cfg.backstash_policy or "lossless",
            cfg.backstash_budget,
            **(cfg.backstash_options or {}),
        )
