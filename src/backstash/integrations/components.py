"""A model that a configuration file names, wrapped: for torchtune's recipes, for Hydra, and for what reads them alike.

Such files name a model by the dotted path of what builds it. Here that path becomes one argument more, and every other
argument goes to the builder as before, so the recipe stays as it is (docs/use/switches.md).
"""

from __future__ import annotations

import pkgutil
from typing import Any

from torch import nn

from backstash.errors import IntegrationError
from backstash.integrations.loop import wrap
from backstash.policies.base import Policy


def wrapped_model(
    *arguments: Any,
    builder: str,
    policy: str | Policy = "lossless",
    budget: int | str | None = None,
    min_nbytes: int | None = None,
    **more: Any,
) -> nn.Module:
    """Returns the model that ``builder`` builds, wrapped as :func:`backstash.wrap` does it.

    Args:
        arguments, more: those of the builder.
        builder: the dotted path of the builder, such as ``"torchtune.models.llama3_2.llama3_2_1b"``.
        policy: a policy's name or a Policy.
        budget: as for :func:`backstash.wrap`.
        min_nbytes: tensors of fewer bytes are kept; None for what a Session takes by itself.

    Raises:
        IntegrationError: nothing has that path, or what it builds is no module; a budget is given with a policy.
        PlanError: the budget means nothing.
        UnknownNameError: no policy has that name.

    Example:
        >>> layer = wrapped_model(4, 2, builder="torch.nn.Linear", bias=False)
        >>> type(layer).__name__, layer.bias
        ('Linear', None)
    """
    try:
        build = pkgutil.resolve_name(builder)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise IntegrationError(
            f"a wrapped model was asked for with builder={builder!r}, but Python finds nothing there: {error}. Give "
            f"the dotted path that stood in the configuration before, such as 'torchtune.models.llama3_2.llama3_2_1b'."
        ) from error
    model = build(*arguments, **more)
    if not isinstance(model, nn.Module):
        raise IntegrationError(
            f"a wrapped model was asked for with builder={builder!r}, but that has returned a {type(model).__name__}. "
            f"Name what builds the torch.nn.Module itself."
        )
    options = {} if min_nbytes is None else {"min_nbytes": min_nbytes}
    return wrap(model, policy, budget=budget, **options)
