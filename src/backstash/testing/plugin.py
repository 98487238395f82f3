"""A pytest plugin with the fixture ``verify_saved_tensors``: a test fails where backward does not get forward's bits.

Name it in the root ``conftest.py`` of your tests. It is no entry point, so pytest imports torch for nobody else.

Example:
    ``pytest_plugins = ["backstash.testing.plugin"]``, and in a test
    ``verify_saved_tensors(lambda: model(x).sum().backward())``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from backstash.verifying import Verification, verify

Verifies = Callable[..., Verification]
"""The type of the fixture's value."""


@pytest.fixture
def verify_saved_tensors(request: pytest.FixtureRequest) -> Verifies:
    """Returns a function that verifies a step, as :func:`backstash.verify` does, and fails where something is wrong.

    It takes ``step``, and as ``backstash.verify`` ``model`` and ``tolerance``, and returns the verification. What is
    meant, such as a policy that rounds, is no failure, nor is a kernel that does not repeat itself.
    """

    def check(step: Callable[[], object], model: nn.Module | None = None, **options: Any) -> Verification:
        __tracebackhide__ = True
        found = verify(step, model, name=request.node.name, **options)
        if found.exit_code:
            pytest.fail(str(found), pytrace=False)
        return found

    return check
