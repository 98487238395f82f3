"""The only place where anything is installed: saved-tensor hooks, the observer of torch functions, module hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from backstash.capture import modules, observer
from backstash.errors import SessionError
from backstash.torch_internals import saved_tensor_hooks


class Listener(modules.Listener, observer.Listener, Protocol):
    """Whoever wants to know what happens in a forward pass."""


def install(listener: Listener, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> ExitStack:
    """Install everything on this thread; closing what is returned takes all of it away.

    Args:
        listener: told about torch functions and modules.
        pack, unpack: the saved-tensor hooks.
    """
    with ExitStack() as installed:
        installed.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        installed.enter_context(observer.Observer(listener))
        installed.callback(modules.listen(listener))
        return installed.pop_all()


def refuse_other_hooks() -> None:
    """Make sure that a Session may be opened here.

    Raises:
        SessionError: another Session or other saved-tensor hooks are active.
    """
    if modules.active() is not None:
        raise SessionError(
            "a Session was opened inside another one, but only the innermost hooks of autograd run, so the outer one "
            "would see nothing. Open one Session around the whole forward pass; for different treatment of parts of "
            "the model use backstash.policies.Rules."
        )
    top = saved_tensor_hooks(True)
    if top is not None:
        where = getattr(top[0], "__qualname__", repr(top[0]))
        checkpointed = "checkpoint" in where or "checkpoint" in getattr(top[0], "__module__", "")
        cause = "a checkpointed function" if checkpointed else f"the saved-tensor hooks {where}"
        raise SessionError(
            f"a Session was opened inside {cause}, but only the innermost hooks of autograd run, so it would switch "
            f"them off. Open the Session outside: a checkpoint inside a Session works."
        )
