"""torchtitan: a converter of the model's configuration, so that the model is built wrapped.

.. code-block:: python

    model_spec=model_registry("8B", converters=[BackstashConverter.Config(budget="60%")])
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torchtitan.protocols.model import ModelConfigConverter

from backstash.integrations.attaching import session_for
from backstash.integrations.loop import wrap


class BackstashConverter(ModelConfigConverter):  # type: ignore[misc]
    """Has the model open a Session by itself whenever it is called for training, as :func:`backstash.wrap` does it.

    The model is wrapped as soon as it is built, before it is sharded, checkpointed, split into stages or compiled. A
    stage of a pipeline is a deep copy, and so has a Session of its own.

    Raises:
        IntegrationError: a budget is given together with a policy.
        PlanError: the budget means nothing.
        UnknownNameError: no policy has that name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """What the converter is told.

        Attributes:
            policy: a policy's name.
            budget: as for :func:`backstash.wrap`; in place of a policy.
            min_nbytes: tensors of fewer bytes are kept; None for what a Session takes by itself.
        """

        policy: str = "lossless"
        budget: int | str | None = None
        min_nbytes: int | None = None

    def __init__(self, config: Config) -> None:
        self._options: dict[str, Any] = {} if config.min_nbytes is None else {"min_nbytes": config.min_nbytes}
        self._arguments = config.policy, config.budget
        session_for(*self._arguments, **self._options)  # so that wrong arguments raise here and not in the first step

    def convert(self, model_config: Any) -> Any:
        """Returns a configuration that builds the same model, wrapped."""
        kind, (policy, budget), options = type(model_config), self._arguments, self._options

        class Wrapped(kind):  # type: ignore[misc, valid-type]
            """The same fields, and another ``build``."""

            __slots__ = ()

            def build(self, **arguments: Any) -> Any:
                return wrap(kind.build(self, **arguments), policy, budget=budget, **options)

        Wrapped.__name__, Wrapped.__qualname__, Wrapped.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        converted = copy.copy(model_config)
        converted.__class__ = Wrapped
        return converted
