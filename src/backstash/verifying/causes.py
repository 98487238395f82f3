"""The likely cause of a difference, in one sentence, and what to change where there is a known mend."""

from __future__ import annotations

from dataclasses import dataclass

from backstash.verifying.runlog import RegionLog, ValueDifference

UNSTEADY = "unsteady"
"""The kind of cause of a kernel that does not repeat itself: nobody's fault, and no verdict can be given."""

ROUNDED = "rounded"
"""The kind of cause of hooks that store values with fewer bits."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a value differs.

    Attributes:
        kind: a word for it, such as ``"generator"``; tests and scripts may compare it.
        reason: one sentence.
        fix: what to change, in one line; ``""`` where no mend is known.
    """

    kind: str
    reason: str
    fix: str = ""


def cause_of(difference: ValueDifference, region: RegionLog | None) -> Cause:
    """Returns the likely cause of a difference.

    Args:
        difference: of the first value that differs in its region, or of its owner.
        region: the region that recomputed it; None if none did.
    """
    if region is not None:
        return _of_region(difference, region)
    if difference.owner == "autograd":
        return _of_memory(difference)
    return _of_hooks(difference)


# -- hooks -------------------------------------------------------------------------------------------------------


def _of_memory(found: ValueDifference) -> Cause:
    if found.version:
        return Cause(
            "in place",
            f"it was changed in place after it was saved ({_times(found.version)})",
            "use the operation that is not in place, or clone the value before it is changed",
        )
    return Cause(
        "memory",
        "its memory was written past autograd, which noticed nothing: by .data, .set_(), NumPy or a kernel of its own",
        "write after backward, or clone the value first; x.data is the usual way to get there: use x.detach()",
    )


def _of_hooks(found: ValueDifference) -> Cause:
    way = found.detail.get("way", "")
    who = f"the hooks {found.owner}"
    dtype, shape, _ = _parts(found.got)
    wrong = "shape" if shape != str(found.shape) else "dtype" if dtype != found.dtype else ""
    if found.got and wrong:
        return Cause(
            wrong,
            f"{who} returned {found.got} where {found.dtype} {found.shape} was saved; autograd does not check that",
            f"have the unpack hook return the {wrong} that the pack hook was given",
        )
    if found.got and found.forward_sum == found.backward_sum:
        return Cause(
            "device",
            f"{who} returned the value on another device ({_parts(found.got)[2]})",
            "have the unpack hook move the value back to the device that it came from",
        )
    if found.version:
        return Cause(
            "in place",
            f"it was changed in place after it was saved ({_times(found.version)}), and {who} hide that from autograd",
            "use the operation that is not in place; a pack hook can keep x._version, and the unpack hook compare it",
        )
    if found.same_as is not None:
        return Cause(
            "swapped",
            f"{who} returned the bits of another value, {found.same_as}",
            "let the packed object hold its tensor; a key such as id(), data_ptr() or a counter may come back for "
            "another tensor",
        )
    if way == "order":
        return Cause(
            "view",
            f"{who} returned the same elements in another order: the view was not restored",
            "store x.contiguous(), or the shape, strides and offset of the view with its memory",
        )
    if way == "blank":
        return Cause(
            "unfinished",
            f"{who} returned memory that is not filled: a copy that had not ended, or memory that was freed",
            "wait for the copy before the memory is read (an event, or non_blocking=False)",
        )
    if way == "rounded":
        return Cause(
            ROUNDED,
            f"{who} store values with fewer bits (relative error {found.detail.get('relative', 0.0):.1e})",
            "if that is meant, pass tolerance= (--tolerance) above this error; else store the dtype that was saved",
        )
    return Cause("hooks", f"{who} returned other bits than they were given", "compare pack with unpack on one tensor")


# -- regions -----------------------------------------------------------------------------------------------------


def _of_region(found: ValueDifference, region: RegionLog) -> Cause:
    changed: dict[str, list[list[str]]] = {}
    for each in found.changed:
        changed.setdefault(each[0], []).append(each)
    kind, text = found.operation.get("kind", ""), found.operation.get("text", "")
    subject = found.operation.get("subject", "")
    where = f" ({text})" if text else ""
    foreign = [each for each in changed.get("generator", []) if each[1] in ("python", "numpy")]
    if foreign and kind in ("operation", "numbers", "input", "kernel") and "argument" not in subject:
        return _of_generator(foreign, region, where)
    is_forgotten = "generator" in changed and region.keeps_generators is False and kind in ("operation", "numbers")
    if kind == "seeded" or is_forgotten or (not kind and "generator" in changed):
        return _of_generator(changed.get("generator", []), region, where)
    if "autocast" in changed and kind in ("", "dtype", "operation", "numbers"):
        _, _, before, after = changed["autocast"][0]
        return Cause(
            "autocast",
            f"forward ran under autocast {before}, the recomputation under autocast {after}{where}",
            "enter autocast inside the function that is checkpointed, or around the backward pass as well",
        )
    if kind == "input":
        return _of_input(subject, text, changed)
    if "training" in changed and kind in ("", "operation", "numbers"):
        _, path, before, after = changed["training"][0]
        return Cause(
            "training",
            f"the module {path or 'itself'} was in {before} in forward and in {after} in the recomputation",
            "call train() and eval() after backward",
        )
    if "setting" in changed and kind in ("", "kernel", "layout", "dtype", "operation", "numbers"):
        _, name, before, after = changed["setting"][0]
        return Cause(
            "setting",
            f"{name} was {before} in forward and {after} in the recomputation, and other settings choose other kernels",
            "change settings of the process outside of steps",
        )
    if kind == "dtype":
        return Cause(
            "dtype",
            f"the recomputation ran in another dtype{where}",
            "enter autocast inside the function; torch.autocast(..., cache_enabled=False) if a cast weight was cached",
        )
    if kind in ("operation", "numbers"):
        return _of_way(kind, text, changed, region, found)
    if kind == "layout":
        return Cause(
            "layout",
            text,
            "have the function make its inputs contiguous, and hand them on as they came",
        )
    for word in ("buffer", "parameter", "input"):
        if word in changed:
            return _of_input(f"the {word} {changed[word][0][1]}", "", changed)
    if kind == "kernel":
        if "generator" in changed:
            return _of_generator(changed["generator"], region, where)
        return Cause(
            UNSTEADY, f"{text}: this kernel does not repeat itself", "torch.use_deterministic_algorithms(True)"
        )
    return Cause("recomputed", f"{region.kind} computed other bits{where}")


def _of_generator(moved: list[list[str]], region: RegionLog, where: str) -> Cause:
    names = [each[1] for each in moved]
    foreign = [name for name in names if name in ("python", "numpy")]
    if region.keeps_generators is False:
        return Cause(
            "generator",
            f"torch's generator stood elsewhere in the recomputation: preserve_rng_state=False, and the region draws "
            f"random numbers{where}",
            "pass preserve_rng_state=True to checkpoint",
        )
    if foreign and region.keeps_generators:
        module = {"python": "random", "numpy": "numpy.random"}[foreign[0]]
        return Cause(
            "generator",
            f"the region draws from {module}, whose state no checkpoint restores{where}",
            f"draw by torch, or draw from {module} outside and pass the numbers in as arguments",
        )
    if names:
        return Cause(
            "generator",
            f"the generator {', '.join(names)} stood elsewhere in the recomputation{where}",
            "restore torch.get_rng_state() of forward before the recomputation, as checkpoint does "
            "(preserve_rng_state=True)",
        )
    return Cause(
        "generator",
        f"the region draws from a generator of its own, whose state no checkpoint restores{where}",
        "draw from the default generator, or draw outside and pass the numbers in as arguments",
    )


def _of_input(subject: str, text: str, changed: dict[str, list[list[str]]]) -> Cause:
    for word in ("buffer", "parameter"):
        if f"the {word} " in subject or (word in changed and subject == "a tensor from outside"):
            name = subject.removeprefix(f"the {word} ") if f"the {word} " in subject else changed[word][0][1]
            mend = (
                "step the optimizer after the whole backward pass"
                if word == "parameter"
                else "write the buffer after backward, or pass a clone of it in as an argument"
            )
            return Cause(word, f"the {word} {name} was written between forward and the recomputation", mend)
    if "argument" in subject or "input" in subject:
        return Cause(
            "argument",
            f"{subject.removeprefix('the input ')} was changed in place between forward and the recomputation",
            "clone what the region is called with before it is changed, or use the operation that is not in place",
        )
    if subject.startswith("the result of"):
        return Cause(
            "in place",
            f"{subject} was changed in place inside the region, and differently in the recomputation",
            "use operations that are not in place inside the region",
        )
    where = f" ({text})" if text else ""
    return Cause(
        "closure",
        f"a tensor that the function reads and is not called with has changed since forward{where}",
        "pass it in as an argument, and do not write it before backward",
    )


def _of_way(
    kind: str, text: str, changed: dict[str, list[list[str]]], region: RegionLog, found: ValueDifference
) -> Cause:
    if "grad mode" in changed:
        _, _, before, after = changed["grad mode"][0]
        return Cause(
            "grad mode",
            f"{text}: grad mode was {before} in forward and {after} in the recomputation",
            "use_reentrant=False runs forward with grad mode on, as the recomputation",
        )
    if "mode" in changed:
        return Cause(
            "mode",
            f"{text}: a TorchFunctionMode was active in one of them only",
            "enter the mode inside the function, or by context_fn",
        )
    return Cause(
        "control flow" if kind == "operation" else "numbers",
        f"{text}: the function depends on something in Python that has changed since",
        "pass what decides in as an argument; determinism_check='default' compares shapes and dtypes alone",
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _parts(got: str) -> tuple[str, str, str]:
    """Dtype, shape and device of what backward got."""
    dtype, _, rest = got.partition(" ")
    shape, _, device = rest.partition(" on ")
    return dtype, shape, device
