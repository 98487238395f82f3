"""A step traced without numbers: what it computes, which memory it takes, and what autograd saves between its passes.

Note: [steps of a trace]
    A program runs under fake tensors, which have shapes and no numbers, so that neither its model nor its activations
    need memory or time. Four of its steps are looked at. The first one lets the optimizer make its state. The second is
    plain. In the third, hooks let go of all that autograd saves, and hand backward a tensor of the same shape: so what
    dies early is what autograd alone would have held, and when it dies is when autograd alone would have held it. In
    the fourth, each block of the model runs in ``torch.utils.checkpoint``. A step lasts from the end of one backward
    pass to the end of the next, with whatever the optimizer does between them.

Note: [as on a card]
    Programs run on the CPU here. Where torch chooses other kernels there than on CUDA and these take other memory, the
    trace takes CUDA's: attention runs in one kernel, dropout keeps a mask of bytes, optimizers work on all parameters
    at once, and a softmax that autocast computes in float32 reads its input as it is, without a copy in float32.
    Transformers makes masks for attention where it sees fake tensors, which it would not on a card, so it is told that
    there are none.

Note: [steps with numbers]
    Some operations have no shape without numbers: packed sequences, losses over alignments, nested tensors. A program
    that needs them is traced with numbers, if this machine has the memory. Then what the hooks let go of is copied, and
    backward reads the copy, which does not count; and attention is what it is on CPU.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from backstash.capture.naming import saved_attributes
from backstash.errors import MeasureError
from backstash.forecast import answers
from backstash.forecast.checkpoints import without_files
from backstash.forecast.costs import Work
from backstash.forecast.works import aten_name, each_tensor, makes_view, work_of
from backstash.formulas import op_of, requirement_of
from backstash.repeatable import is_repeatable_operation
from backstash.saved import Need, TensorSpec
from backstash.torch_internals import (
    TorchDispatchMode,
    at_end_of_backward,
    backward_engine,
    optimizers_as_on_cuda,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    replace_backward_engine,
    running_node,
    unseen_by_modes,
    without_data,
    without_mkldnn,
    without_numbers,
)

STEPS = ("first", "plain", "dropped", "checkpoint")
"""The steps, in their order (Note: [steps of a trace])."""

# fmt: off
FLOAT32_ON_CUDA = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "group_norm", "cosine_similarity", "logsumexp",
    "softmax", "log_softmax", "cumsum", "cumprod", "prod", "binary_cross_entropy_with_logits",
})
# fmt: on
"""Functions that autocast computes in float32 on CUDA and not on CPU: torch's "CUDA ops that autocast to float32"."""

MOST_ASKED = 2_000
"""Times that a line asks whether something holds, with no step between, until it is taken for an endless loop. A loop
over all weights asks as often as there are weights."""

_TORCH = str(Path(torch.__file__).parent)

Storage = int
"""The number of a piece of memory: each piece that a trace sees has its own."""


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """An operation of a step.

    Attributes:
        module: path of the module that is running; of the node's module in backward it is not known, and empty.
        work: what it asks of a card.
        most_nbytes: bytes that are alive when it has its results.
        reads: the memory that it reads.
        writes: the memory that it writes.
        node: the number of the autograd node that runs it; -1 where none does.
        is_repeatable: whether it gives the same from the same arguments, whenever it is called.
    """

    name: str
    module: str
    is_backward: bool
    work: Work
    most_nbytes: int
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    node: int
    is_repeatable: bool


@dataclass(frozen=True, slots=True)
class SavedUse:
    """A node's use of what it has saved.

    Attributes:
        at: the number of the operation before which it is unpacked.
        op, role: of the node.
        need: how much of it the node reads; of what it reads the sign of, a bit per element suffices.
        module: path of the module that was running when it was saved.
    """

    storage: Storage
    at: int
    node: int
    op: str
    role: str
    need: Need
    spec: TensorSpec
    module: str


@dataclass
class StepTrace:
    """One step.

    Attributes:
        operations: in their order.
        before_nbytes: bytes that are alive before it.
        uses: of saved tensors, where they were looked at.
        died: by memory, the number of the operation before which it was freed.
        nbytes: by memory, its bytes.
    """

    operations: list[TracedOperation] = field(default_factory=list)
    before_nbytes: int = 0
    uses: list[SavedUse] = field(default_factory=list)
    died: dict[Storage, int] = field(default_factory=dict)
    nbytes: dict[Storage, int] = field(default_factory=dict)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that are alive in it."""
        return max((operation.most_nbytes for operation in self.operations), default=self.before_nbytes)

    @property
    def works(self) -> Iterator[Work]:
        """What its operations ask of a card."""
        return (operation.work for operation in self.operations)


@dataclass(frozen=True)
class TracedSteps:
    """The steps of a program.

    Attributes:
        plain, dropped, checkpoint: see Note: [steps of a trace]; the last is None where no block repeats itself, and
            each of the last two where it has failed.
        blocks: how many blocks a checkpoint was put around.
        uncut: why no checkpoint could be put around the blocks; empty where one could.
        guessed: how many numbers modules have asked tensors for, each of which was answered with 1, and how often
            anything was selected by a mask, which was taken to be true.
        unplanned: why no plan can be told; empty where one can.
        computed: why the steps were traced with numbers; empty where they were not.
    """

    plain: StepTrace
    dropped: StepTrace | None
    checkpoint: StepTrace | None
    blocks: int
    guessed: int
    uncut: str = ""
    unplanned: str = ""
    computed: str = ""


class Ended(SystemExit):
    """Ends a program whose steps were traced, or take too much memory."""


class StepTracer(TorchDispatchMode):
    """Traces the steps of whatever runs inside it.

    Args:
        blocks: the modules that a checkpoint recomputes; None for those that repeat themselves (see repeated).
        order: the names of the steps that are looked at, of those in STEPS.
        most_nbytes: bytes that may be alive, where the steps are traced with numbers (Note: [steps with numbers]); None
            for steps without.

    Attributes:
        steps: by their names in STEPS, those that have ended.
        guessed: as in TracedSteps.
        modules: those that the program has called outermost.
        is_too_large: whether more bytes were alive than may be.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module] | None = None,
        order: Sequence[str] = STEPS,
        most_nbytes: int | None = None,
    ) -> None:
        super().__init__()
        self._order, self._most_nbytes, self._computes = order, most_nbytes, most_nbytes is not None
        self.is_too_large = False
        self.steps: dict[str, StepTrace] = {}
        self.guessed = 0
        self.modules: dict[nn.Module, None] = {}
        self._blocks = blocks
        self._wrapped: list[nn.Module] = []
        self._storages: dict[int, Storage] = {}  # by the address of what is alive
        self._watched: dict[Storage, Any] = {}  # weak references to it
        self._next = 0
        self._latest = -1, 0
        self._uncounted: set[Storage] = set()
        self._alive_nbytes = 0
        self._now = StepTrace()
        self._is_in_backward = self._is_dropping = False
        self._is_prepared = True
        self._paths: dict[nn.Module, str] = {}
        self._ran: set[nn.Module] = set()
        self._running: list[str] = []
        self._contexts = ExitStack()
        self._numbers = answers.RealNumbers() if self._computes else answers.KnownNumbers()
        self._mode = _AsOnCuda(self._guess, self._numbers)
        self._fused: set[Storage] = set()  # results of softmaxes that have no copy of their input
        self._stands_for: dict[Storage, Storage] = {}
        self._asked_in_full: set[Storage] = set()  # what the program has cast itself
        self._count = 0
        self._is_loading = False
        self._asked: tuple[object, int] = None, 0  # the line that has asked whether something holds, and how many times
        self._endless: set[object] = set()  # lines of loops that ended when they were told that it does not

    @property
    def is_done(self) -> bool:
        """Whether all steps were traced."""
        return len(self.steps) == len(self._order)

    def found(self, failure: str = "") -> TracedSteps:
        """Returns the steps.

        Args:
            failure: why the step has failed in which blocks run in a checkpoint; empty if it has not.

        Raises:
            MeasureError: the program has ended before.
        """
        if not self.is_done and not failure:
            raise MeasureError(
                f"a forecast was asked for, but the program ended after {len(self.steps)} of the {len(self._order)} "
                f"backward passes that it takes. Let it train for some more steps."
            )
        self._count = 0 if failure else self._count
        is_cut = bool(self._count)
        return TracedSteps(
            self.steps["plain"],
            self.steps.get("dropped"),
            self.steps["checkpoint"] if is_cut else None,
            self._count,
            self.guessed,
            failure,
        )

    @property
    def changed(self) -> str:
        """The name of the step in progress, if the program does not run there as it is; else empty."""
        return "dropped" if self._is_dropping else "checkpoint" if self._wrapped else ""

    def __enter__(self) -> StepTracer:
        self._contexts.enter_context(optimizers_as_on_cuda() if self._computes else without_numbers())
        self._contexts.enter_context(self._mode)
        if self._computes:
            self._contexts.enter_context(without_mkldnn())  # whose memory grows in blocks
        else:
            self._contexts.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", _attention))
        self._contexts.enter_context(mock.patch.object(functional, "dropout", _dropout))
        self._contexts.enter_context(without_data(self._loading))
        self._contexts.enter_context(without_files())
        engine = backward_engine()
        self._contexts.callback(replace_backward_engine, engine)
        replace_backward_engine(partial(self._run_backward, engine))
        handles = (
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
        )
        for handle in handles:
            self._contexts.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keep()
        self._unwrap()
        self._contexts.close()

    def _run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass with the mode, which torch puts away before: a checkpoint computes in it."""
        with self._mode:
            return engine(*args, **kwargs)

    # -- modules -------------------------------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if not self._running and module not in self.modules:
            self.modules[module] = None
            library = sys.modules.get("transformers.utils.import_utils")
            if hasattr(library, "is_fake_tensor"):
                self._contexts.enter_context(mock.patch.object(library, "is_fake_tensor", return_value=False))
            self._paths |= {each: name for name, each in module.named_modules()}
        self._ran.add(module)
        self._running.append(self._paths.get(module, ""))

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        self._running.pop()

    def _wrap(self) -> None:
        blocks = (
            self._blocks
            if self._blocks is not None
            else [each for m in self.modules for each in repeated(m, self._ran)]
        )
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
            self._wrapped.append(block)
        self._count = len(self._wrapped)

    def _unwrap(self) -> None:
        for block in self._wrapped:
            del block.forward
        self._wrapped.clear()

    # -- memory --------------------------------------------------------------------------------------------------------

    def _storage_of(self, x: Tensor) -> Storage:
        """Returns the number of a tensor's memory, which counts as alive from now on if it was not seen before."""
        storage = x.untyped_storage()
        address = storage._cdata
        known = self._storages.get(address)
        if known is not None:
            return known
        number = self._next
        self._next += 1
        nbytes = storage.nbytes()
        self._storages[address] = number
        self._watched[number] = weakref.ref(storage, partial(self._freed, address, number, nbytes))
        self._now.nbytes[number] = nbytes
        self._alive_nbytes += nbytes
        return number

    def _freed(self, address: int, number: Storage, nbytes: int, _: Any) -> None:
        del self._storages[address], self._watched[number]
        if number in self._uncounted:
            self._uncounted.discard(number)
        else:
            self._alive_nbytes -= nbytes
        self._now.died[number] = len(self._now.operations)

    # -- operations ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_done:
            raise Ended(0)
        if self._most_nbytes is not None and self._alive_nbytes > self._most_nbytes:
            self.is_too_large = True
            raise Ended(0)
        if self._computes and any(map(_is_wrapper, types)):
            return NotImplemented  # what it is made of comes here after it
        if (
            torch.is_inference_mode_enabled()
            and (parts := self._parts_of(operation, args, kwargs)) is not NotImplemented
        ):
            return parts
        name = aten_name(operation)
        if self._computes and name in ("_local_scalar_dense", "equal"):
            return operation(*args, **kwargs)
        if name == "_local_scalar_dense":
            known = self._numbers.item(args[0])
            if known is not None:
                return known
            self._guess()
            dtype = args[0].dtype
            return self._answer() if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if name == "equal":
            self._guess()
            return True
        if operation.namespace != "aten" or self._is_loading:
            return self._numbers.computed(operation, name, args, kwargs)
        node = running_node()
        is_backward = node is not None
        if not (is_backward or self._is_prepared):
            self._prepare()
        if is_backward and not self._is_in_backward:
            self._is_in_backward = True
            at_end_of_backward(self._end_step)
        self.guessed += not (is_backward or self._computes) and answers.selects(name, args)
        result = self._numbers.computed(operation, name, args, kwargs)
        work = work_of(operation, args, kwargs, result)
        reads = [self._storage_of(each) for each in each_tensor((args, tuple(kwargs.values())))]
        schema = operation._schema
        writes = [
            self._storage_of(each)
            for given, each in zip(schema.arguments, args, strict=False)
            if given.alias_info is not None and given.alias_info.is_write
            for each in each_tensor(each)
        ]
        if not makes_view(operation):
            writes += [self._storage_of(each) for each in each_tensor(result)]
        module = self._running[-1] if self._running else ""
        self._now.operations.append(
            TracedOperation(
                name,
                module,
                is_backward or self._is_in_backward,
                work,
                self._alive_nbytes,
                tuple(dict.fromkeys(reads)),
                tuple(dict.fromkeys(writes)),
                -1 if node is None else self._number_of(node),
                _is_repeatable(operation, name),
            )
        )
        if name == "_to_copy" and self._mode.casts:
            self._asked_in_full.update(writes)
        self._fuse_casts(args)
        return result

    def _parts_of(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Calls what an operation is made of, which torch leaves to modes in inference; NotImplemented if it is one."""
        if operation.namespace != "aten":
            return NotImplemented
        super().__enter__()
        try:
            return operation.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _guess(self) -> None:
        """A number is asked for; what a loop does with it, which prints it, decides nothing."""
        self.guessed += bool(self._running) and not self._computes

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Inside, operations are none of the step."""
        before, self._is_loading = self._is_loading, True
        try:
            yield
        finally:
            self._is_loading = before

    def _answer(self) -> bool:
        """What a condition is taken for: true, until a line outside of modules has asked again and again."""
        if self._running or self._is_loading:
            return True
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
            frame = frame.f_back
        line, (latest, times) = (frame.f_code, frame.f_lineno), self._asked
        self._asked = line, times + 1 if line == latest else 1
        if self._asked[1] < (2 if line in self._endless else MOST_ASKED):
            return True
        self._endless.add(line)
        self._asked = None, 0
        return False

    def _number_of(self, node: Any) -> int:
        """Returns the number of an autograd node, of which one runs after the other."""
        number: int = node._sequence_nr()
        if number != self._latest[0]:
            self._latest = number, self._latest[1] + 1
        return self._latest[1]

    def _fuse_casts(self, args: tuple[Any, ...]) -> None:
        """Takes a cast away that CUDA's softmax, or its backward, does itself (Note: [as on a card])."""
        operations = self._now.operations
        if len(operations) < 2:
            return
        first, second = operations[-2:]
        if first.name == "_to_copy" and second.name in ("_log_softmax", "_softmax") and first.writes == second.reads:
            if args[0].dtype is torch.float32 and not self._asked_in_full & set(first.writes):
                self._fused.update(second.writes)
                self._leave_out(-2, first.writes[0], replace(first, work=Work(), writes=()))
                source = first.work.nbytes - self._now.nbytes[first.writes[0]]
                fused = replace(second.work, nbytes=second.work.nbytes - self._now.nbytes[first.writes[0]] + source)
                operations[-1] = replace(operations[-1], work=fused, reads=first.reads)
        elif second.name == "_to_copy" and first.name in ("_log_softmax_backward_data", "_softmax_backward_data"):
            results = {self._stands_for.get(each, each) for each in first.reads}
            if first.writes == second.reads and results & self._fused:
                copied = second.work.nbytes - self._now.nbytes[first.writes[0]]
                nbytes = first.work.nbytes - self._now.nbytes[first.writes[0]] + copied
                own = self._now.nbytes[second.writes[0]]
                self._leave_out(-1, first.writes[0], replace(second, work=Work()))
                kept = first.most_nbytes - self._now.nbytes[first.writes[0]] + own
                operations[-2] = replace(first, work=replace(first.work, nbytes=nbytes), most_nbytes=kept)

    def _leave_out(self, at: int, storage: Storage, operation: TracedOperation) -> None:
        """Has memory not count that is alive, and an operation not count that has made or read it."""
        nbytes = self._now.nbytes[storage]
        self._uncounted.add(storage)
        self._alive_nbytes -= nbytes
        for number in {at, -1}:
            each = operation if number == at else self._now.operations[number]
            self._now.operations[number] = replace(each, most_nbytes=each.most_nbytes - nbytes)

    def _end_step(self) -> None:
        """A backward pass has ended, and the next step begins."""
        self._is_in_backward, self._is_prepared = False, False
        self._asked = None, 0
        self.steps[self._order[len(self.steps)]] = self._now
        self._now = StepTrace(before_nbytes=self._alive_nbytes, nbytes=dict(self._now.nbytes))

    def _prepare(self) -> None:
        """The program goes on after a backward pass, whose engine would put hooks away that were pushed in it."""
        self._is_prepared = True
        self._keep()
        self._unwrap()
        following = self._order[len(self.steps)]
        if following == "dropped":
            push_saved_tensor_hooks(self._pack, self._unpack)
            self._is_dropping = True
        elif following == "checkpoint":
            self._wrap()

    def _keep(self) -> None:
        if self._is_dropping:
            pop_saved_tensor_hooks()
            self._is_dropping = False

    # -- what autograd saves -------------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> _Packed | Tensor:
        if x.layout is not torch.strided or x.is_nested or _is_wrapper(type(x)):
            return x
        number = self._storage_of(x)
        copied = unseen_by_modes(lambda: x.detach().clone()) if self._computes else None
        return _Packed(number, TensorSpec.of(x), self._running[-1] if self._running else "", copied)

    def _unpack(self, packed: _Packed | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        node = running_node()
        if node is not None:
            self._note_use(node, packed)
        spec, x = packed.spec, packed.copied
        if x is None:
            x = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
            self._now.operations.pop()  # it is no operation of the step
        number = self._storage_of(x)
        if number not in self._uncounted:  # a copy may be read twice
            self._alive_nbytes -= self._now.nbytes[number]
            self._uncounted.add(number)
        self._stands_for[number] = packed.storage
        return x

    def _note_use(self, node: Any, packed: _Packed) -> None:
        specs: dict[str, TensorSpec] = {}
        role = ""
        for attribute, name in saved_attributes(type(node)):
            raw = getattr(node, attribute)
            for variable in raw if isinstance(raw, (tuple, list)) else (raw,):
                saved = getattr(variable, "data", None)
                if isinstance(saved, _Packed):
                    specs.setdefault(name, saved.spec)
                    role = name if saved is packed else role
        requirement = requirement_of(node, role, packed.spec, specs)
        has_mask = requirement.mask is not None and requirement.mask.fits(packed.spec.dtype)
        need = requirement.need if requirement.need is not Need.SIGN or has_mask else Need.VALUE
        at = len(self._now.operations)
        self._now.uses.append(
            SavedUse(packed.storage, at, self._number_of(node), op_of(node), role, need, packed.spec, packed.module)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """What stands for a saved tensor: its memory, its spec, the module that was running, and any numbers."""

    storage: Storage
    spec: TensorSpec
    module: str
    copied: Tensor | None = None


class _AsOnCuda(TorchFunctionMode):
    """Has functions do what they would on CUDA (Note: [as on a card]), for programs that ask for it and that do not."""

    def __init__(self, guess: Callable[[], None], numbers: answers.KnownNumbers) -> None:
        super().__init__()
        self._guess, self._numbers, self.casts = guess, numbers, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.cuda:
            return args[0]
        if function in answers.READS:
            self._guess()
            return self._numbers.read(function, *args, **kwargs)
        if any(_is_cuda(each) for each in (*args, *kwargs.values())):
            args = tuple("cpu" if _is_cuda(each) else each for each in args)
            kwargs = {name: "cpu" if _is_cuda(each) else each for name, each in kwargs.items()}
        if function not in (Tensor.float, Tensor.to, Tensor.type):
            if getattr(function, "__name__", "") in FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
                args = tuple(each.float() if _is_half(each) else each for each in args)
            return function(*args, **kwargs)
        self.casts += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.casts -= 1


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of a class are made of others, as nested ones are."""
    return hasattr(kind, "__tensor_flatten__")


def _is_half(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dtype in (torch.bfloat16, torch.float16)


def _is_cuda(argument: Any) -> bool:
    return isinstance(argument, (str, torch.device)) and str(argument).partition(":")[0] == "cuda"


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the operation that CUDA's would be."""
    aten: Any = torch.ops.aten
    if query.shape[-3] != key.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        attended: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return attended
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    found = efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)
    attended = found[0]
    return attended


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout by the operation that CUDA's would be."""
    result: Tensor = torch.ops.aten.native_dropout(input, p, training)[0] if training and p else input
    return result


def repeated(model: nn.Module, ran: Collection[nn.Module]) -> list[nn.Module]:
    """Returns the blocks that a model is built of: the outermost modules of which there are several of one class.

    Containers do not count, nor do modules without children.

    Args:
        ran: the modules whose forward has run. Others hold modules that the program calls itself.
    """
    counts = Counter(type(each) for each in model.modules() if each in ran and any(True for _ in each.children()))
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if child in ran and counts[type(child)] > 1 and not isinstance(child, nn.Sequential):
                found.append(child)
            else:
                look(child)

    look(model)
    return found


def _is_repeatable(operation: Any, name: str) -> bool:
    """Whether a call of an operation gives the same again."""
    if torch.Tag.nondeterministic_seeded in operation.tags:
        return False
    return torch.Tag.pointwise in operation.tags or name == "native_batch_norm" or is_repeatable_operation(operation)
