"""The repetition of a call, and the proof that it makes the same bits.

Note: [proven calls]
    A recipe that begins from what is held can be tried as a whole when its value is let go of. A recipe that begins
    from values that are themselves remade cannot: trying it would make all of them again. So where any producer may be
    repeated, each call is repeated on the spot, when its arguments are at hand; recipes are then made of proven calls.
    A call that works in place has overwritten what it has read, so both ways run on random numbers instead. The proof
    is not repeated in later steps, where it would take memory that a budget has not planned for: there samples watch
    the bits. Nor is it repeated in a process that reads a plan from a file (Note: [proofs that travel] in proofs.py).

    Some functions save memory that they have not filled. Where a system hands out zeros, that memory has the same bits
    twice, and others later. So a proof runs in memory that is filled with other bits, and such a function fails it.
    Memory that a proof has given back may still be filled when the program's own call gets it. So what has the bits of
    filled memory is not proven, but for masks: they are full of them, and no function leaves any of a mask unwritten.

Note: [as called]
    Which kernels a function runs depends on more than its arguments' numbers and layouts. A product of matrices is
    folded into one ``mm`` if autograd follows its second operand, and is a ``bmm`` else; attention runs its plain
    kernels where autograd follows the mask; ``max_pool1d`` and ``embedding_bag`` have other kernels where nothing is
    recorded. These may round in another way. But what is made again begins from tensors that autograd does not follow,
    in a backward pass that records nothing, perhaps below a ``__torch_dispatch__``, in inference mode or under another
    autocast. So a costly call is repeated as it was called: with grad mode, at the top level of dispatch, under its own
    autocast, and autograd follows the inputs that it followed then. Hooks take what the call saves, so that its graph
    holds nothing, and the graph dies with the result that is returned without it. The proof repeats the call likewise.
    Cheap functions that save nothing inside run the same kernels in every state, which tests/gradients/
    test_kernel_choice.py asserts of all functions of torch's databases. Their recipes are proven in the state in which
    backward runs them: detached, and without grad mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash import accelerator, graphs, repeatable
from backstash.codecs.base import flat
from backstash.ops.bits import bits_of
from backstash.proofs import Answer, proofs
from backstash.remake.calls import INPUT, Call
from backstash.saved import TensorSpec
from backstash.torch_internals import (
    as_if_outermost,
    has_filling,
    hooks_are_enabled,
    in_filled_memory,
    in_vmap,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    recording,
    saved_tensor_hooks,
    set_grad_mode,
    tree_map_only,
    under_autocast,
    undoing,
    without_gradients,
)

OVERWRITES: dict[str, Callable[..., Any]] = {
    "relu": lambda x, *args, **kwargs: torch.relu_(x),
    "relu6": lambda x, *args, **kwargs: F.hardtanh_(x, 0.0, 6.0),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, *args, **kwargs: F.hardtanh_(x, min_val, max_val),
    "leaky_relu": lambda x, negative_slope=0.01, *args, **kwargs: F.leaky_relu_(x, negative_slope),
    "sigmoid": lambda x, *args, **kwargs: torch.sigmoid_(x),
    "tanh": lambda x, *args, **kwargs: torch.tanh_(x),
    "add": Tensor.add_,
    "mul": Tensor.mul_,
}
"""Functions that write over their first argument, for where that is a temporary of the recipe."""


_Autocast = tuple[str, torch.dtype | None] | None
"""Where what it makes is cast to which dtype, None to none; None as everywhere."""


def _hold_nothing(x: Tensor) -> None:
    """What is held of a tensor that is saved by a call that is repeated for its result alone."""


def repeat(
    call: Call,
    function: Callable[..., Any],
    tensors: list[Tensor],
    take: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Runs a function with the arguments of a call, in whose tensors' places come others.

    Args:
        call: the call.
        function: what is called.
        tensors: what is read in the places of the call's tensors.
        take: of a call that has saved tensors inside: is given all of them with their numbers.

    Returns:
        What the call makes, without a graph. If ``take`` is given, what the function has returned.
    """
    if take is None and call.group is not None and call.saved is not None:
        found = repeat_inside(call, function, tensors, {call.saved, *call.group.wanted()})
        made = found.pop(call.saved)
        call.group.made = found
        return made
    try:
        return _repeat(call, function, tensors, take)
    except Warning:  # a filter makes an error of it, and the program's own call has warned before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _repeat(call, function, tensors, take)


def _repeat(
    call: Call,
    function: Callable[..., Any],
    tensors: list[Tensor],
    take: Callable[[int, Tensor], None] | None,
) -> Tensor:
    needs_grad = call.needs_grad
    if needs_grad:
        tensors = [x.detach().requires_grad_() if each else x for x, each in zip(tensors, needs_grad, strict=True)]
    args, kwargs = _arguments(call, tensors)
    device = call.spec.device.type
    autocast: _Autocast = call.autocast
    if autocast is None and torch.is_autocast_enabled(device):
        autocast = device, None
    if not needs_grad:
        return _output(call, _as_drawn(call, lambda: _under(autocast, lambda: function(*args, **kwargs))))

    def run(pack: Callable[[Tensor], None] = _hold_nothing) -> Any:
        return _as_drawn(call, lambda: as_called(function, args, kwargs, autocast, pack))

    if take is not None:
        return _output(call, run(_numbered(take)))
    return _output(call, run()).detach()


def _arguments(call: Call, tensors: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments with these tensors in the places of its own."""
    places = None if call.pattern is None else call.pattern.places
    if places is not None:
        args = list(call.args)
        for place, x in zip(places, tensors, strict=True):
            args[place] = x
        return args, call.kwargs
    given = iter(tensors)
    args = [_with_tensors(arg, given) for arg in call.args]
    return args, {key: _with_tensors(arg, given) for key, arg in call.kwargs.items()}


def repeat_inside(
    call: Call, function: Callable[..., Any], tensors: list[Tensor], wanted: Collection[int]
) -> dict[int, Tensor]:
    """Calls a function once more for what it saves inside.

    Note: [saved inside]
        Attention with dropout, a loss or a recurrent network are single functions to the program, and save tensors that
        no function returns. They are the n-th that the function saves. So it is called with hooks that count, and all
        of them that are wanted are taken at once, because their readers are neighbours. If it is called for its result,
        which may be long before, they are not taken.

    Args:
        call: the call that has saved something inside.
        function, tensors: as for :func:`repeat`.
        wanted: the numbers of those that are taken, that of the call among them.

    Returns:
        What was saved, by its number. Another one than the call's may be missing.
    """
    found: dict[int, Tensor] = {}

    def take(number: int, x: Tensor) -> None:
        if number in wanted:
            found[number] = x.detach()

    repeat(call, function, tensors, take)
    if call.saved not in found:
        raise RuntimeError(f"{call.name} has saved fewer tensors inside than it had when it was called first")
    return found


def as_called(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    autocast: _Autocast = None,
    pack: Callable[[Tensor], None] = _hold_nothing,
) -> Any:
    """Runs a function that autograd records (Note: [as called]).

    Args:
        function, args, kwargs: what is called with what.
        autocast: the call's.
        pack: is given what the function saves, of which its graph holds nothing.
    """
    if torch.is_inference_mode_enabled() or not hooks_are_enabled():

        def recorded() -> Any:
            return as_called(function, *tree_map_only(Tensor, _recordable, (args, kwargs, autocast, pack)))

        return recording(recorded)
    was_on = torch.is_grad_enabled()

    def begin() -> None:
        set_grad_mode(True)
        push_saved_tensor_hooks(pack, _no_unpack)

    def call() -> Any:
        with as_if_outermost():
            return _under(autocast, lambda: function(*args, **kwargs))

    def undo() -> None:  # calls nothing that needs more frames than begin()
        set_grad_mode(was_on)
        top = saved_tensor_hooks(True)
        if top is not None and top[0] is pack:
            pop_saved_tensor_hooks()

    return undoing(begin, call, undo)


def _under(autocast: _Autocast, function: Callable[[], Any]) -> Any:
    return function() if autocast is None else under_autocast(*autocast, function)


def _recordable(x: Tensor) -> Tensor:
    """The tensor; a copy of one that was made in inference mode, which autograd does not save."""
    return x.clone().detach().requires_grad_(x.requires_grad) if x.is_inference() else x


def _numbered(take: Callable[[int, Tensor], None]) -> Callable[[Tensor], None]:
    """Has ``take`` be given what is saved with the number of the save."""
    numbers = count()
    return lambda x: take(next(numbers), x)


def _output(call: Call, made: Any) -> Tensor:
    result: Tensor = made if call.output is None else made[call.output]
    return result


def _no_unpack(packed: None) -> Tensor:
    raise AssertionError("nobody runs backward through a call that was repeated for what it saves")


def is_repeated(call: Call, tensors: list[Tensor], result: Tensor) -> bool:
    """Whether the call makes the same bits once more; known for all calls that differ in their numbers alone."""
    facts = (
        call.function,
        repr(call.args),
        repr(call.kwargs),
        tuple([TensorSpec.of(x) for x in tensors]),
        call.spec,
        call.autocast,
        call.output,
        call.saved,
        call.needs_grad,
    )

    tensors = [x.detach() for x in tensors]  # as backward will have them

    def prove() -> bool:
        if not call.in_place:
            try:
                again = repeat(call, call.function, tensors)
            except RuntimeError:  # it cannot be called once more with what it was called with
                return False
            return _is_same(again, result)
        # What it has read is gone, so both ways run on other numbers.
        numbers = torch.Generator(call.spec.device).manual_seed(0)  # the program's own generator stays as it is
        before = [
            torch.empty_like(x).uniform_(generator=numbers) if x.is_floating_point() else x.clone() for x in tensors
        ]
        beside = repeat(call, call.function, before)
        return _equal_memory(beside, repeat(call, _in_place(call), before))

    return _proven("call", facts, prove, call.spec.device.type)


def repeats_inside(call: Call, tensors: list[Tensor], saved: Mapping[int, Tensor]) -> frozenset[int]:
    """Which of the tensors that a call has saved inside have the same bits when it is made once more.

    The call runs once for all of them: a recurrent network saves some for each of its steps.

    Args:
        call: a call of the group, whichever of them.
        tensors: what it has read.
        saved: what it has saved inside, by the number of the save.
    """
    facts = (
        call.function,
        repr(call.args),
        repr(call.kwargs),
        tuple([TensorSpec.of(x) for x in tensors]),
        tuple([(number, TensorSpec.of(x)) for number, x in saved.items()]),
        call.autocast,
        call.needs_grad,
    )

    tensors = [x.detach() for x in tensors]  # as backward will have them

    def prove() -> str:
        same: list[int] = []

        def compare(number: int, again: Tensor) -> None:
            if number in saved and _is_same(again.detach(), saved[number]):
                same.append(number)

        try:
            repeat(call, call.function, tensors, compare)
        except RuntimeError:  # it cannot be called once more with what it was called with
            return ""
        return " ".join(map(str, same))

    answer = _proven("saved inside", facts, prove, call.spec.device.type)
    return frozenset(map(int, answer.split()))


def _proven(kind: str, facts: tuple[Any, ...], prove: Callable[[], Answer], device: str) -> Answer:
    """What a proof has answered, which is run where nobody has asked for it before."""
    run = partial(in_filled_memory, device, prove)
    return proofs.ask(kind, facts, lambda: without_gradients(run), device_type=device)


def _in_place(call: Call) -> Callable[..., Any]:
    """The function that the program has called, which has worked in place."""
    if "inplace" in call.kwargs:
        return lambda *args, **kwargs: call.function(*args, **{**kwargs, "inplace": True})
    function: Callable[..., Any] = getattr(Tensor, f"{call.name}_")
    return function


def _is_same(again: Tensor, before: Tensor) -> bool:
    """Whether what was made in filled memory has the bits that were made before, and surely has written them."""
    return _equal_memory(again, before) and (before.dtype is torch.bool or not has_filling(before))


def _equal_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have equal bits, laid out alike."""
    return TensorSpec.of(x) == TensorSpec.of(y) and torch.equal(bits_of(flat(x)), bits_of(flat(y)))


def norm_from_statistics(call: Call, tensors: list[Tensor]) -> Tensor:
    """Batch norm of an input that has errors, with the statistics that were saved of the exact input."""
    assert call.statistics is not None
    given = dict(zip((name for name, arg in call.kwargs.items() if arg is INPUT), tensors, strict=True))
    mean, invstd = (held.get() for held in call.statistics)
    eps = call.kwargs.get("eps", 1e-5)
    variance = (invstd.double().pow(-2) - eps).clamp_(min=0.0).to(invstd.dtype)
    return F.batch_norm(given["input"], mean, variance, given.get("weight"), given.get("bias"), eps=eps)


def _as_drawn(call: Call, function: Callable[[], Any]) -> Any:
    """What a function returns where the generator is in the state that it had at the call, and is not changed by it.

    An attention without dropout reads nothing of the generator, and may move it on all the same.
    """
    state, device = call.random_state, call.spec.device
    if state is None and (not repeatable.may_draw(call.function) or graphs.capture() is not None):
        return function()
    now = accelerator.rng_state(device)

    def begin() -> None:
        if state is not None:
            accelerator.set_rng_state(state, device)

    # Gradients that are batched all read one value, and vmap would refuse to draw random numbers.
    with as_if_outermost() if in_vmap() else nullcontext():
        return undoing(begin, function, lambda: accelerator.set_rng_state(now, device))


def _with_tensors(arg: Any, tensors: Iterator[Tensor]) -> Any:
    """``arg`` with the next tensors in the places of inputs."""
    if arg is INPUT:
        return next(tensors)
    if type(arg) in (list, tuple):
        return type(arg)([next(tensors) if item is INPUT else item for item in arg])
    return arg
