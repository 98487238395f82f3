"""The transforms of torch.func inside a Session, and whatever else traces operations there.

Note: [transforms]
    What a transform of torch.func calls is computed on wrapped tensors, and whatever is called meanwhile would be
    transformed as well, an encoder's operations too. So a Session looks at nothing as long as a transform runs: what
    autograd saves is held as plain PyTorch holds it. The same goes for what writes operations down or runs them on fake
    tensors: torch.jit.trace, make_fx, torch.export. Some transforms, such as ``grad``, ``vjp`` and ``jacrev``, do not
    run at all where saved-tensor hooks are installed: they switch hooks off, and torch refuses that where there are
    any. So the two functions that switch hooks off and on are replaced as long as a Session is open on any thread, and
    a Session's hooks step aside in between. A Session that is opened in between begins so.
"""

from __future__ import annotations

import threading
from typing import Protocol

from backstash.torch_internals import hooks_are_enabled, replace_switches_of_hooks, switches_of_hooks


class InstalledHooks(Protocol):
    """What a Session has installed on a thread."""

    def step_aside(self) -> bool:
        """Take the saved-tensor hooks away if they are the innermost; returns whether they were."""

    def step_back(self) -> None:
        """Put them back."""


_switch_off, _switch_on = switches_of_hooks()
_active = threading.local()  # .hooks, and .aside while they are away
_lock = threading.Lock()
_open: set[InstalledHooks] = set()


def admit(hooks: InstalledHooks) -> None:
    """Have the hooks of this thread step aside for transforms; they are not there yet where one has begun already."""
    _active.hooks, _active.aside = hooks, not hooks_are_enabled()
    with _lock:
        _open.add(hooks)
        replace_switches_of_hooks(switch_off, switch_on)


def dismiss(hooks: InstalledHooks) -> None:
    """End that; nothing happens if they were not admitted."""
    if getattr(_active, "hooks", None) is hooks:
        _active.hooks = None
    with _lock:
        _open.discard(hooks)
        if not _open:
            replace_switches_of_hooks(_switch_off, _switch_on)


def switch_off(error_message: str) -> None:
    """Have saved-tensor hooks raise that error on this thread; raises it now if there are any but a Session's."""
    hooks: InstalledHooks | None = getattr(_active, "hooks", None)
    if hooks is not None and hooks.step_aside():
        _active.aside = True
    _switch_off(error_message)


def switch_on() -> None:
    """Allow saved-tensor hooks on this thread again."""
    _switch_on()
    hooks: InstalledHooks | None = getattr(_active, "hooks", None)
    if hooks is not None and _active.aside:
        _active.aside = False
        hooks.step_back()
