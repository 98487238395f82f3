"""Switches activations of a model to run in place, if that changes no bit of a step.

An activation that runs in place writes its output over its input. That saves one buffer: always for a moment, and for
the whole time between forward and backward if its backward pass can read the output instead of the input (LeakyReLU,
RReLU). It is right only if nothing reads the input afterwards. Only running the step can tell that, so each switch is
tried on a real step, and kept if every bit of the step stays the same.

Counted peak of a step of four 3x3 convolutions (16, 16, 32, 32 channels) over float32 [16, 3, 64, 64], plain PyTorch:
from 64.1 to 48.1 MiB with LeakyReLU. With ReLU it stays at 48.1 MiB, because the peak lies in backward there.

Note: [other numbers]
    One step proves the switches for one set of numbers. ``relu(x) + x`` has the same bits with the ReLU in place while
    ``x`` is never negative, and a Hardtanh changes nothing while its input is small. Each set of switches is therefore
    tried twice: once in place, and once with the activations writing elsewhere and other numbers written over their
    inputs as soon as they have run. Code that reads such an input afterwards, in forward or backward, changes the
    gradients then, for any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from backstash.arguments import check_model, check_session, check_step
from backstash.errors import RewriteError
from backstash.rewrites.trials import Trials, Undoable, switch
from backstash.session import Session

OVERWRITING = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.RReLU,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
"""Activations that write their output over their input, without a copy."""

COPYING = (
    nn.Hardtanh,
    nn.Threshold,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Activations whose input or output torch copies even if they run in place. ReLU6 is a Hardtanh."""

_COPIES = "torch makes a copy also when it runs in place, so it would save nothing"


class Inplace(Undoable):
    """The result of :func:`inplace`. As a context manager it switches the activations back on leaving.

    Attributes:
        switched: paths of the activations that run in place now.
        refused: the reasons against the other activations, by path.
        already: paths of the activations that ran in place before. They were not tried.
        steps: number of steps that the proof took.
    """

    def __init__(
        self, switched: Mapping[str, nn.Module], refused: Mapping[str, str], already: Sequence[str], steps: int
    ) -> None:
        self.switched = tuple(switched)
        self.refused = dict(refused)
        self.already = tuple(already)
        self.steps = steps
        self._modules = list(switched.values())
        switch(self._modules, True)

    def undo(self) -> None:
        """Switches the activations back. A second call does nothing."""
        switch(self._modules, False)
        self._modules.clear()

    def __str__(self) -> str:
        lines = [
            f"{len(self.switched)} activations switched to run in place, {len(self.refused)} refused, "
            f"{len(self.already)} ran in place before; proven in {self.steps} steps"
        ]
        lines += [f"  switched {path or '(the model)'}" for path in self.switched]
        lines += [f"  refused  {path or '(the model)'}: {reason}" for path, reason in self.refused.items()]
        return "\n".join(lines)


def inplace(model: nn.Module, step: Callable[[], object], *, session: Session | None = None) -> Inplace:
    """Switches the activations of a model to run in place, if that changes no bit of a step.

    First all activations are switched together. If the step changes, each half of them is tried, and so on until each
    activation is switched or refused. The step's result, the gradients of parameters and of the model's inputs, and the
    buffers are compared bit for bit with those of the original step. All switches that remain were proven together
    (Note: [other numbers]). Parameters, buffers, gradients, training flags and the random states of Python, NumPy and
    torch are restored before each trial and at the end, also after an error. What else the step
    changes, such as an optimizer, is restored at the end only, so the step must compute the same each time.

    Only modules with an ``inplace`` flag are switched (``OVERWRITING``). Functional activations such as ``F.relu(x)``
    are not changed: write ``F.relu_(x)`` where you know that it is right. An activation that runs in place already
    stays as it is.

    A proof holds for the step that it was made with. Another path through the model, ``retain_graph``, or a hook that
    keeps activations can forbid a switch that this step allows. torch raises an error in most of these cases, but not
    in all.

    Args:
        model: the model whose modules are switched.
        step: one forward and backward pass over ``model``, without the optimizer's step. It leaves the parameters'
            ``.grad`` behind. Its result, the loss, is compared as well. It must not open ``session`` itself.
        session: the Session that the model will be trained under, or one like it. The trials run inside of it, and its
            report shows the last trial afterwards. Under a Session more is legal: a tensor of which only the shape was
            saved may be overwritten, although plain PyTorch would keep it.

    Returns:
        The activations that were switched, and the reason against each of the others.

    Raises:
        RewriteError: there is no activation to switch, or the step leaves no gradients, changes parameters, or computes
            other numbers each time.

    The proof takes 4 steps if all switches are legal, and up to about ``2 * log2(n)`` more for each of a few refused
    activations among n. It takes memory for two more copies of the gradients, and one of parameters and buffers.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1), nn.Sigmoid(), nn.Dropout())
        >>> with inplace(model, lambda: model(torch.ones(8, 64)).sum().backward()) as rewrite:
        ...     rewrite.switched, list(rewrite.refused)
        (('1',), ['4'])
        >>> model[1].inplace
        False
    """
    check_model(model, "inplace")
    check_step(step, "inplace")
    check_session(session, "inplace")
    candidates, refused, already = _survey(model)
    if not candidates:
        return Inplace({}, refused, already, 0)
    trials = Trials(model, step, session)
    try:
        refused |= trials.refuse(candidates)
        switched = {path: module for path, module in candidates.items() if path not in refused}
    finally:
        trials.close()
    order = [path for path, _ in model.named_modules() if path in refused]
    return Inplace(switched, {path: refused[path] for path in order}, already, trials.steps)


def _survey(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str], list[str]]:
    """Returns the activations to try, reasons against activations that need no trial, and those in place already."""
    candidates: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    already: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, OVERWRITING + COPYING):
            continue
        if module.inplace:
            already.append(path)
        elif isinstance(module, COPYING):
            refused[path] = _COPIES
        else:
            candidates[path] = module
    if not (candidates or refused or already):
        names = ", ".join(kind.__name__ for kind in OVERWRITING)
        raise RewriteError(
            f"inplace was asked to switch the activations of {type(model).__name__}, but there is none among its "
            f"{sum(1 for _ in model.modules())} modules. It switches {names}; a functional activation has to be made "
            f"a module first."
        )
    return candidates, refused, already
