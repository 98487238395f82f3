"""Puts the weights of a model's convolutions into channels last, if a step then computes the same numbers.

In channels last (NHWC), the channels of a pixel are neighbours in memory. On CPU the kernels of convolutions compute in
such layouts anyway, and for a tensor in NCHW they first make a reordered copy of the input, of the gradient and of the
result. These copies are often the peak of a step. A convolution whose weight is in channels last gives its result in
channels last, and most functions keep the layout, so changing the weights changes the whole network.

Note: [another order of sums]
    A convolution's sums are added up in another order in another layout, so the numbers differ in their last bits.
    Therefore a proof can only say that nothing else differs. A model that takes the order of memory for the order of
    dimensions (``as_strided``, a ``view`` after a permutation, code that writes through pointers) computes other
    numbers altogether, or raises an error. So the distance of all numbers of a step is compared with what rounding
    explains: the square root of the smallest relative difference that the dtype has. That is the coarsest dtype in
    which the step computes (see step_dtypes.py): under autocast products round to bfloat16, and gradients are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from backstash.arguments import check_model, check_session, check_step
from backstash.errors import RewriteError
from backstash.rewrites.differences import check_tolerance, largest_distance, rounding_limit
from backstash.rewrites.trials import Trials, Undoable
from backstash.session import Session

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)
"""Modules whose weights have another layout afterwards."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class ChannelsLast(Undoable):
    """The result of :func:`channels_last`. As a context manager it restores the layouts on leaving.

    Attributes:
        changed: paths of the convolutions whose weights are in channels last now.
        distance: the largest relative distance between the numbers of a step in the two layouts.
        where: the tensor with that distance.
        steps: number of steps that the proof took.
    """

    def __init__(self, weights: Sequence[_Weight], distance: float, where: str, steps: int) -> None:
        self.changed = tuple(weight.path for weight in weights)
        self.distance, self.where, self.steps = distance, where, steps
        self._weights = list(weights)

    def undo(self) -> None:
        """Restores the layouts. The weights keep the numbers that they have by then. A second call does nothing."""
        for weight in self._weights:
            weight.restore()
        self._weights.clear()

    def __str__(self) -> str:
        return (
            f"{len(self.changed)} convolutions in channels last, proven in {self.steps} steps: the numbers of a step "
            f"are at most {self.distance:.2g} apart ({self.where or 'their bits are equal'})"
        )


def channels_last(
    model: nn.Module,
    step: Callable[[], object],
    *,
    session: Session | None = None,
    tolerance: float | None = None,
) -> ChannelsLast:
    """Puts the weights of a model's convolutions into channels last, if a step computes the same up to rounding.

    The step runs twice as it is and twice in channels last. Its result, the gradients of parameters and of the model's
    inputs, and the buffers are compared: the two plain steps bit for bit, likewise the other two, and the layouts
    with each other (Note: [another order of sums]). Parameters, buffers, gradients, training flags and the random
    states of Python, NumPy and torch are restored before each step and at the end. After an error the layouts are
    restored as well.

    Parameters and their gradients stay the objects that they are, so an optimizer need not know of it. A model's input
    may stay in NCHW. Call it before the model is given to DistributedDataParallel, whose buckets have fixed strides.

    Args:
        model: the model. Its convolutions' weights are parameters of their own.
        step: one forward and backward pass over ``model``, without the optimizer's step. It leaves the parameters'
            ``.grad`` behind. Its result, the loss, is compared as well. It must not open ``session`` itself.
        session: the Session that the model will be trained under, or one like it. The steps run inside of it.
        tolerance: the largest relative distance between the layouts. Default: the square root of the dtype's ``eps``,
            of the coarsest dtype in which the step computes, such as that of autocast. Roundings to bfloat16 or float16
            add up to more in deep networks: prove those on a step in float32.

    Returns:
        The convolutions that were changed, and how far apart the layouts are.

    Raises:
        RewriteError: there is no convolution in another layout, the step leaves no gradients, changes parameters or
            computes other numbers each time, or it computes other numbers in channels last, or fails there.
        ValueError: the tolerance is negative or no number.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> images = torch.ones(2, 3, 16, 16)
        >>> with channels_last(model, lambda: model(images).square().mean().backward()) as rewrite:
        ...     rewrite.changed, model(images).is_contiguous(memory_format=torch.channels_last)
        (('0', '2'), True)
        >>> model(images).is_contiguous()
        True
    """
    check_tolerance(tolerance, "channels_last", ValueError)
    check_model(model, "channels_last")
    check_step(step, "channels_last")
    check_session(session, "channels_last")
    weights = [_Weight(path, module) for path, module in model.named_modules() if _can_change(module)]
    if not weights:
        raise RewriteError(
            f"channels_last was asked to change the layout of {type(model).__name__}, but no convolution among its "
            f"{sum(1 for _ in model.modules())} modules has a weight in another layout. There is nothing to gain."
        )
    trials = Trials(model, step, session, "channels_last")
    rewrite = ChannelsLast(weights, math.inf, "", 0)
    try:
        trials.establish()
        trials.repeat()
        limit = rounding_limit(trials.plain.values(), trials.computed) if tolerance is None else tolerance
        plain, trials.plain = trials.plain, {}
        for weight in weights:
            weight.change()
        trials.plain = _attempt(trials)
        rewrite.distance, rewrite.where = largest_distance(plain, trials.plain)
        if rewrite.distance > limit:
            raise RewriteError(
                f"channels_last was asked to change the layout of {type(model).__name__}, but {rewrite.where} is "
                f"{rewrite.distance:.2g} of its length away then, where {limit:.2g} is allowed for rounding. "
                f"{_advice(trials.computed)}"
            )
        trials.repeat()
    except BaseException:
        rewrite.undo()
        raise
    finally:
        trials.close()
    for weight in weights:
        weight.change_gradient()
    rewrite.steps = trials.steps
    return rewrite


def _attempt(trials: Trials) -> dict[str, Tensor | None]:
    try:
        return trials.run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise RewriteError(
            f"channels_last was asked to change the layout of {type(trials.model).__name__}, but its step raises "
            f"{type(error).__name__} then: {str(error).partition(chr(10))[0]}. Use reshape instead of view in the "
            f"model, or keep the layout."
        ) from error


def _advice(computed: torch.dtype | None) -> str:
    """Returns what is wrong, and what to do, where a step computes other numbers in channels last."""
    reads = "function of the model reads memory in the order of NCHW: keep the layout, or find that function."
    if computed not in (torch.bfloat16, torch.float16):
        return f"Some {reads}"
    return (
        f"The step computes in {str(computed).removeprefix('torch.')}, of which the roundings may add up to that in a "
        f"deep network. Prove it on a step in float32, without autocast. If that is refused too, some {reads}"
    )


def _can_change(module: nn.Module) -> bool:
    if not isinstance(module, CONVOLUTIONS) or isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and not weight.is_contiguous(memory_format=_FORMATS[weight.dim()])


class _Weight:
    """A convolution's weight, and the layout that it had."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.parameter = module.get_parameter("weight")
        self._stride = self.parameter.stride()

    def change(self) -> None:
        """Puts the weight into channels last."""
        self.parameter.data = _in_channels_last(self.parameter.detach())

    def change_gradient(self) -> None:
        """Puts the weight's gradient into channels last as well, or autograd would warn that it is slower to add to."""
        grad = self.parameter.grad
        if grad is not None and grad.layout is torch.strided:
            grad.data = _in_channels_last(grad.detach())

    def restore(self) -> None:
        """Puts the weight, and its gradient if there is one, into the layout that the weight had."""
        grad = self.parameter.grad
        for x in (self.parameter, grad):
            if x is not None and x.layout is torch.strided and x.stride() != self._stride:
                x.data = x.detach().new_empty_strided(x.shape, self._stride).copy_(x.detach())


def _in_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_FORMATS[x.dim()])
