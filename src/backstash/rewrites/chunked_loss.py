"""Computes the head of a language model and its cross entropy together, for a few rows of logits at a time.

With 50,257 words the logits of 1,024 tokens take 206 MB, and a plain step holds them several times: as logits, as
log-probabilities, and as their gradient. Here the logits of some rows are computed, turned into these rows' share of
the loss and of the gradients, and freed. No product of matrices is computed twice.

The result is the same sum in another order: equal mathematically, but not bit for bit. What becomes of a program's
logits on the way to its loss is in deferred.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.arguments import check_count, check_model, check_step
from backstash.capture import modules
from backstash.errors import RewriteError
from backstash.rewrites.deferred import HeadCall, Tally
from backstash.rewrites.differences import Beyond, beyond_another_order, check_tolerance, largest_distance
from backstash.rewrites.trials import Trials, Undoable
from backstash.torch_internals import break_graphs_at

CHUNK_NBYTES = 16 << 20
"""Bytes of logits that exist at a time, by default."""

HEAD = "lm_head"
"""The path of most models' heads."""


class ChunkedLoss(Undoable):
    """The result of :func:`chunked_loss`. As a context manager it undoes the rewrite on leaving.

    Attributes:
        head: path of the layer whose logits are computed in chunks.
        distance: the largest relative distance between the numbers of a plain and of a rewritten step; NaN if no step
            was given.
        where: the tensor with that distance.
    """

    def __init__(self, head: str, layer: nn.Linear, chunk_nbytes: int, evaluation: bool) -> None:
        self.head = head
        self.distance, self.where = math.nan, ""
        self._layer: nn.Linear | None = layer
        self._tally = Tally()
        layer.forward = _HeadForward(layer, chunk_nbytes, evaluation, self._tally)  # type: ignore[method-assign,assignment]

    @property
    def losses(self) -> int:
        """How many losses were computed in chunks so far."""
        return self._tally.chunked

    @property
    def whole(self) -> tuple[str, ...]:
        """The functions that got all logits at once, because they read something else of them."""
        return tuple(self._tally.whole)

    def undo(self) -> None:
        """Lets the head return logits again. A second call does nothing."""
        if self._layer is not None:
            del self._layer.forward
            self._layer = None

    def __str__(self) -> str:
        proven = f"; the numbers of a step are at most {self.distance:.2g} apart ({self.where})" if self.where else ""
        return f"the logits of {self.head!r} in chunks, sums in another order{proven}"


@dataclass(eq=False)
class _HeadForward:
    """The forward of a rewritten head. A copy of the model, also by pickle, has one of its own."""

    layer: nn.Linear
    chunk_nbytes: int
    evaluation: bool
    tally: Tally

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        read = (x for x in (hidden, weight, bias) if x is not None)
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in read)
        if not (trains or self.evaluation):
            return F.linear(hidden, weight, bias)
        if _has_backward_hooks():
            self.tally.whole.setdefault("a backward hook of a module")
            return F.linear(hidden, weight, bias)
        return HeadCall.defer(hidden, weight, bias, self.chunk_nbytes, self.tally)


def _has_backward_hooks() -> bool:
    """Whether a module in whose call the head runs has some: torch puts a node of its own behind what that returns."""
    everywhere = nn.modules.module
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        return True
    running = modules.calls_in_progress(threading.get_ident())
    return any(module._backward_hooks or module._backward_pre_hooks for module, _ in running)


break_graphs_at(_HeadForward.__call__, "a head whose logits come in chunks is called between compiled graphs")


def chunked_loss(
    model: nn.Module,
    head: str | None = None,
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    evaluation: bool = False,
    step: Callable[[], object] | None = None,
    tolerance: float | None = None,
) -> ChunkedLoss:
    """Computes the logits of a model's head and their cross entropy for a few rows at a time.

    This holds for ``cross_entropy`` (``nn.CrossEntropyLoss``) with class indices, any reduction, ``weight``,
    ``ignore_index`` and ``label_smoothing``, with the classes last or second, also if the program takes some rows of
    the logits before, scales them, caps them, or adds a bias without a gradient. Every other function of the logits is
    computed as before, from all of them. For what other losses read of each row there is :func:`chunked_rows`, which
    takes the head's result.

    Under autocast the products are computed in the dtype that autocast asks for, and the loss is float32. The gradients
    are computed in the forward pass, so ``backward`` can run once: ``retain_graph`` ends in an error. With the
    reduction "none" they are computed in backward, with the logits once more. ``create_graph`` is an error in either
    case. A head's gradient in bfloat16 or float16 is added up in float32. Where no row counts, gradients are 0.

    A copy of the model, also one by pickle, computes its logits in chunks as well, and ``undo`` does not reach it.
    ``torch.compile`` ends a graph at the head and at the loss, so that ``fullgraph=True`` is an error. In a reentrant
    checkpoint, whose forward pass has no gradients, the logits are whole. ``DistributedDataParallel`` has to wrap the
    loss as well, as it does for models of transformers, if it is asked for ``find_unused_parameters`` or
    ``static_graph``.

    Args:
        model: the model.
        head: path of the ``nn.Linear`` that computes the logits; ``""`` for the model itself. By default what
            ``model.get_output_embeddings()`` returns, as models of transformers have it, or else ``"lm_head"``.
        chunk_nbytes: bytes of logits that may exist at a time. It is at least one row.
        evaluation: whether the same is done without gradients: for the loss of an evaluation, or for a teacher.
        step: one forward and backward pass over ``model``, without the optimizer's step, as a proof: it runs twice as
            it is and once with the rewrite, from the same state, and its result, gradients and buffers are compared.
        tolerance: the largest relative distance between them. By default the square root of the dtype's ``eps``, of
            the coarsest dtype in which the step computes, such as that of autocast. If that is coarser than the
            gradients' own, what the step returns may be 2 ``eps`` away, and all gradients together 4 ``eps``.

    Returns:
        The rewrite, which can be undone.

    Raises:
        RewriteError: there is no such layer, it is no plain ``nn.Linear``, or ``chunk_nbytes`` is less than 1; or the
            step computes other numbers, or has no loss that is computed in chunks.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
        >>> words = torch.arange(50)
        >>> with chunked_loss(model, "1", chunk_nbytes=1000):
        ...     loss = F.cross_entropy(model(words), words)
        >>> loss.backward()
    """
    check_count(chunk_nbytes, "chunk_nbytes", "bytes", "chunked_loss")
    if chunk_nbytes < 1:
        raise RewriteError(f"chunked_loss was asked for chunks of {chunk_nbytes} bytes, but it needs at least 1.")
    check_model(model, "chunked_loss")
    path, layer = _head_of(model, head)
    if step is None:
        return ChunkedLoss(path, layer, chunk_nbytes, evaluation)
    check_step(step, "chunked_loss")
    check_tolerance(tolerance, "chunked_loss", RewriteError)
    return _proven(model, step, tolerance, lambda: ChunkedLoss(path, layer, chunk_nbytes, evaluation))


def _proven(
    model: nn.Module, step: Callable[[], object], tolerance: float | None, begin: Callable[[], ChunkedLoss]
) -> ChunkedLoss:
    """Returns a rewrite under which a step computes the same up to rounding."""
    trials = Trials(model, step, None, "chunked_loss")
    rewrite: ChunkedLoss | None = None
    try:
        trials.establish()
        trials.repeat()
        rewrite = begin()
        found = trials.run()
        rewrite.distance, rewrite.where = largest_distance(trials.plain, found)
        asked = f"chunked_loss was asked to try a step of {type(model).__name__}"
        if not rewrite.losses:
            got = f"{', '.join(rewrite.whole[:3])} reads all logits" if rewrite.whole else "the step has none"
            raise RewriteError(
                f"{asked}, but no loss of {rewrite.head!r} was computed in chunks: {got}. Use cross_entropy, or "
                f"chunked_rows for what another loss reads of each row; and let the step return the loss alone."
            )
        if tolerance is None:
            beyond = beyond_another_order(trials.plain, found, trials.computed)
        else:
            beyond = Beyond(rewrite.where, rewrite.distance, tolerance) if rewrite.distance > tolerance else None
        if beyond is not None:
            raise RewriteError(
                f"{asked}, but {beyond.where} is {beyond.distance:.2g} of its length away then, where "
                f"{beyond.limit:.2g} is allowed for another order of sums. {_advice(trials.computed, tolerance)}"
            )
    except BaseException:
        if rewrite is not None:
            rewrite.undo()
        raise
    finally:
        trials.close()
    return rewrite


def _advice(computed: torch.dtype | None, tolerance: float | None) -> str:
    """Returns what to do where a step computes other numbers in chunks."""
    if tolerance is not None:
        return "Allow more by tolerance=, or do without the rewrite."
    if computed not in (torch.bfloat16, torch.float16):
        return "Do without the rewrite, and report this as an error of backstash."
    found = f"The step computes in {str(computed).removeprefix('torch.')}"
    if computed is torch.float16:  # which has no numbers below 6e-8
        found += ", in which small gradients vanish unless the loss is scaled, as a GradScaler does"
    return (
        f"{found}. Prove it on a step in float32, without autocast. If that is refused too, do without the rewrite, "
        f"and report this as an error of backstash."
    )


def _head_of(model: nn.Module, head: str | None) -> tuple[str, nn.Linear]:
    """Returns the path of a model's head, and the head."""
    layers = dict(model.named_modules())
    if head is None:
        outputs = getattr(model, "get_output_embeddings", None)
        found = outputs() if callable(outputs) else None
        head = next((path for path, module in layers.items() if module is found), HEAD)
    layer = layers.get(head) if isinstance(head, str) else None
    if layer is None:
        linear = [path for path, module in layers.items() if isinstance(module, nn.Linear)]
        raise RewriteError(
            f"chunked_loss was asked for the head {head!r:.80} of {type(model).__name__}, but there is no such layer. "
            f"Its linear layers end with {', '.join(linear[-3:]) or 'none'}."
        )
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        raise RewriteError(
            f"chunked_loss was asked for the head {head!r}, but that is a {type(layer).__name__} with a forward of its "
            f"own. It rewrites a plain nn.Linear."
        )
    return head, layer
