"""Computes the head of a language model and its cross entropy together, for a few rows of logits at a time.

With 50,257 words the logits of 1,024 tokens take 206 MB, and a plain step holds them several times: as logits, as
log-probabilities, and as their gradient. Here the logits of some rows are computed, turned into these rows' share of
the loss and of the gradients, and freed. No product of matrices is computed twice.

The result is the same sum in another order: equal mathematically, but not bit for bit.

Note: [deferred logits]
    Under the rewrite the head returns a tensor whose numbers are not computed yet. It follows the views and conversions
    that programs apply between a head and its loss, and its ``cross_entropy`` is computed in chunks. Any other function
    gets the logits, computed as the head would have computed them. So a program that reads the logits gets them, and
    pays for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.arguments import check_model
from backstash.errors import RewriteError
from backstash.torch_internals import no_torch_function_subclass

CHUNK_NBYTES = 16 << 20
"""Bytes of logits that exist at a time, by default."""


class ChunkedLoss:
    """The result of :func:`chunked_loss`. As a context manager it undoes the rewrite on leaving.

    Attributes:
        head: path of the layer whose logits are computed in chunks.
    """

    def __init__(self, head: str, layer: nn.Linear, chunk_nbytes: int) -> None:
        self.head = head
        self._layer: nn.Linear | None = layer

        def forward(hidden: Tensor) -> Tensor:
            if not torch.is_grad_enabled() or not (hidden.requires_grad or layer.weight.requires_grad):
                return F.linear(hidden, layer.weight, layer.bias)
            return _Deferred(hidden, layer.weight, layer.bias, chunk_nbytes)

        layer.forward = forward  # type: ignore[method-assign,assignment]

    def undo(self) -> None:
        """Lets the head return logits again. A second call does nothing."""
        if self._layer is not None:
            del self._layer.forward
            self._layer = None

    def __enter__(self) -> ChunkedLoss:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def chunked_loss(model: nn.Module, head: str = "lm_head", *, chunk_nbytes: int = CHUNK_NBYTES) -> ChunkedLoss:
    """Computes the logits of a model's head and their cross entropy for a few rows at a time.

    This holds for ``cross_entropy`` (``nn.CrossEntropyLoss``) with class indices and the reduction "mean" or "sum",
    with or without ``ignore_index`` and ``label_smoothing``. Every other function of the logits is computed as
    before, from all of them. For what other losses read of each row there is :func:`chunked_rows`.

    Under autocast the products are computed in the dtype that autocast asks for. The gradients are computed in the
    forward pass, so ``backward`` can run once: ``retain_graph`` and ``create_graph`` end in an error.

    Args:
        model: the model.
        head: path of the ``nn.Linear`` that computes the logits; ``""`` for the model itself.
        chunk_nbytes: bytes of logits that may exist at a time. It is at least one row.

    Returns:
        The rewrite, which can be undone.

    Raises:
        RewriteError: there is no such layer, it is no plain ``nn.Linear``, or ``chunk_nbytes`` is less than 1.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
        >>> words = torch.arange(50)
        >>> with chunked_loss(model, "1", chunk_nbytes=1000):
        ...     loss = F.cross_entropy(model(words), words)
        >>> loss.backward()
    """
    if chunk_nbytes < 1:
        raise RewriteError(f"chunked_loss was asked for chunks of {chunk_nbytes} bytes, but it needs at least 1.")
    check_model(model, "chunked_loss")
    layers = dict(model.named_modules())
    layer = layers.get(head) if isinstance(head, str) else None
    if layer is None:
        linear = [path for path, module in layers.items() if isinstance(module, nn.Linear)]
        raise RewriteError(
            f"chunked_loss was asked for the head {head!r:.80} of {type(model).__name__}, but there is no such layer. "
            f"Its linear layers end with {', '.join(linear[-3:]) or 'none'}."
        )
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        raise RewriteError(
            f"chunked_loss was asked for the head {head!r}, but that is a {type(layer).__name__} with a forward of its "
            f"own. It rewrites a plain nn.Linear."
        )
    return ChunkedLoss(head, layer, chunk_nbytes)  # type: ignore[arg-type]


class _Deferred(Tensor):
    """Logits that are not computed yet (Note: [deferred logits]).

    Attributes:
        hidden: the head's input, [..., d].
        weight: the head's weight, [classes, d].
        bias: the head's bias, [classes], or None.
        chunk_nbytes: bytes of logits that may exist at a time.
        logits: the logits, if a function has needed them, [..., classes].
        product: the dtype in which the product is computed.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk_nbytes: int
    logits: Tensor | None
    product: torch.dtype

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_nbytes: int,
        dtype: torch.dtype | None = None,
        product: torch.dtype | None = None,
    ) -> _Deferred:
        device = hidden.device.type
        if product is None:
            product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        deferred: _Deferred = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (*hidden.shape[:-1], weight.shape[0]), dtype=dtype or product, device=hidden.device
        )
        deferred.hidden, deferred.weight, deferred.bias = hidden, weight, bias
        deferred.chunk_nbytes, deferred.product, deferred.logits = chunk_nbytes, product, None
        return deferred

    def compute(self) -> Tensor:
        """The logits, which are computed at the first call."""
        if self.logits is None:
            with torch.autocast(self.device.type, dtype=self.product, enabled=self.product is not self.weight.dtype):
                self.logits = F.linear(self.hidden, self.weight, self.bias).to(self.dtype)
        return self.logits

    def of(self, hidden: Tensor, dtype: torch.dtype | None = None) -> _Deferred:
        """The deferred logits of other rows, or in another dtype."""
        return _Deferred(hidden, self.weight, self.bias, self.chunk_nbytes, dtype or self.dtype, self.product)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with no_torch_function_subclass():
                return func(*args, **kwargs)
        follow = _FOLLOWED.get(func)
        if follow is not None and isinstance(args[0], _Deferred) and args[0].logits is None:
            followed = follow(*args, **kwargs)
            if followed is not None:
                return followed
        return func(*_computed(args), **{key: _compute(arg) for key, arg in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # calls that reach C++ without a torch function
        return func(*_computed(args), **{key: _compute(arg) for key, arg in (kwargs or {}).items()})


def _compute(arg: Any) -> Any:
    """An argument with computed logits in place of deferred ones, one level of lists deep."""
    if isinstance(arg, _Deferred):
        return arg.compute()
    if isinstance(arg, (list, tuple)) and any(isinstance(item, _Deferred) for item in arg):
        return type(arg)(_computed(arg))
    return arg


def _computed(args: Any) -> Iterator[Any]:
    return (_compute(arg) for arg in args)


_FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_cuda", "is_nested", "is_quantized")
    ),
}
"""Functions that read no number of the logits."""


def _view(logits: _Deferred, *shape: Any) -> _Deferred | None:
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    classes = logits.weight.shape[0]
    if sizes[-1] == -1:  # view infers this size, which must be the number of classes
        others = 1
        for size in sizes[:-1]:
            others *= size
        sizes[-1] = classes if others > 0 and others * classes == logits.numel() else 0
    if sizes[-1] != classes:
        return None
    return logits.of(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _flatten(logits: _Deferred, start_dim: int = 0, end_dim: int = -1) -> _Deferred | None:
    last = end_dim % logits.dim()
    return logits.of(logits.hidden.flatten(start_dim, last)) if last < logits.dim() - 1 else None


def _index(logits: _Deferred, index: Any) -> _Deferred | None:
    """Indexes ``hidden`` in the same way, if the index takes all classes."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (slice, int)) or part is Ellipsis for part in parts):
        return None
    explicit = sum(part is not Ellipsis for part in parts)
    reaches_classes = Ellipsis in parts or explicit == logits.dim()
    if reaches_classes and not (parts[-1] is Ellipsis or parts[-1] == slice(None)):
        return None
    return logits.of(logits.hidden[index])


def _to(logits: _Deferred, *args: Any, **kwargs: Any) -> _Deferred | None:
    if kwargs or len(args) != 1:
        return None
    dtype, device = (args[0], None) if isinstance(args[0], torch.dtype) else (None, args[0])
    if dtype is not None:
        return logits.of(logits.hidden, dtype) if dtype.is_floating_point else None
    return logits if isinstance(device, (str, torch.device)) and torch.device(device) == logits.device else None


def _cross_entropy(
    logits: _Deferred,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    plain = weight is None and size_average is None and reduce is None and 0.0 <= label_smoothing <= 1.0
    if not plain or reduction not in ("mean", "sum") or logits.dim() != 2 or isinstance(target, _Deferred):
        return None
    if target.dtype is not torch.int64 or target.shape != logits.shape[:1]:
        return None
    classes = logits.weight.shape[0]
    outside = (target != ignore_index) & ((target < 0) | (target >= classes))
    if target.device.type == "cpu" and bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")  # the message of cross_entropy
    loss: Tensor = _CrossEntropy.apply(
        logits.hidden,
        logits.weight,
        logits.bias,
        target,
        ignore_index,
        reduction == "mean",
        max(1, logits.chunk_nbytes // (classes * logits.dtype.itemsize)),
        logits.product,
        logits.dtype,
        label_smoothing,
    )
    return loss


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.flatten: _flatten,
    Tensor.__getitem__: _index,
    Tensor.float: lambda logits: logits.of(logits.hidden, torch.float32),
    Tensor.to: _to,
    Tensor.contiguous: lambda logits: logits,
    F.cross_entropy: _cross_entropy,
}
"""Functions that programs apply between a head and its loss, and how deferred logits follow them.

Each returns deferred logits or the loss, or None if it cannot follow the call.
"""


class _CrossEntropy(torch.autograd.Function):
    """Computes the loss, and its gradients in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        mean: bool,
        rows: int,
        product: torch.dtype,
        dtype: torch.dtype,
        smoothing: float,
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            ctx: holds the gradients for ``backward``.
            hidden: the head's input, [n, d].
            weight: the head's weight, [classes, d].
            bias: the head's bias, [classes], or None.
            target: indices of classes, [n].
            ignore_index: the target of rows that do not count.
            mean: whether the loss is the mean over the rows that count, and not their sum.
            rows: number of rows whose logits exist at a time.
            product: the dtype of the products.
            dtype: the dtype of the logits.
            smoothing: the share of each target that is spread over all classes.
        """
        wanted = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            kept = target != ignore_index
            safe = torch.where(kept, target, 0)
            precise = torch.float64 if dtype is torch.float64 else torch.float32
            factor = 1.0 / kept.sum().to(precise) if mean else torch.ones((), dtype=precise, device=hidden.device)
            cast = weight.to(product)
            cast_bias = bias.to(product) if bias is not None else None
            hidden_grad = torch.empty_like(hidden) if wanted[0] else None
            weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None
            bias_grad = torch.zeros_like(bias) if wanted[2] and bias is not None else None
            loss = torch.zeros((), dtype=precise, device=hidden.device)
            for begin in range(0, hidden.shape[0], rows):
                part = slice(begin, begin + rows)
                x, classes = hidden[part].to(product), safe[part].unsqueeze(1)
                logits = F.linear(x, cast, cast_bias).to(dtype).to(precise)
                normaliser = logits.logsumexp(1, keepdim=True)
                chosen = logits.gather(1, classes)
                if smoothing:
                    chosen = chosen.lerp(logits.mean(1, keepdim=True), smoothing)
                loss += ((normaliser - chosen).squeeze(1) * kept[part]).sum()
                # From here on the logits' memory holds their gradient.
                gradient = logits.sub_(normaliser).exp_()
                if smoothing:
                    gradient -= smoothing / gradient.shape[1]
                gradient.scatter_add_(1, classes, torch.full_like(normaliser, smoothing - 1.0))
                gradient *= (kept[part] * factor).unsqueeze(1)
                gradient = gradient.to(product)
                if hidden_grad is not None:
                    hidden_grad[part] = gradient @ cast
                if weight_grad is not None and product is weight.dtype:
                    weight_grad.addmm_(gradient.t(), x)
                elif weight_grad is not None:
                    weight_grad += gradient.t() @ x
                if bias_grad is not None:
                    bias_grad += gradient.sum(0)
                del logits, gradient
        ctx.gradients = [hidden_grad, weight_grad, bias_grad]
        return (loss * factor).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, weight and bias, times the gradient of the loss."""
        if ctx.gradients is None:
            raise RuntimeError(
                "backward was asked to go through a chunked loss a second time, but its gradients were computed in the "
                "forward pass and are gone. Compute the loss again, or undo the rewrite for what needs retain_graph."
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if x is None else x.mul_(outer[0].to(x.dtype)) for x in gradients]
        gradients.clear()
        return (*scaled, *[None] * 7)
