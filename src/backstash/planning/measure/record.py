"""Records the trace of a real step.

torch's profiler reports every allocation and release with its address. It cannot tell which addresses are planes, which
memory values are decoded into, and when autograd reads them. The Session tells that to a watcher, which writes it into
the same record. A recorded step does exactly what it does without being recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor, nn

from backstash import accelerator
from backstash.errors import MeasureError
from backstash.planning.measure.events import Notes, StepRecord, memory_profiler, roots_of
from backstash.planning.model.trace import Buffer, Role, Trace
from backstash.policies.base import Policy
from backstash.saved import MIN_NBYTES
from backstash.session import Session
from backstash.stash.buffers import release_buffers
from backstash.stores import Store
from backstash.torch_internals import gradient_of


def record(
    step: Callable[[], object],
    policy: str | Policy | Session | None = None,
    *,
    model: nn.Module | None = None,
    stores: Mapping[str, Store] | None = None,
    min_nbytes: int = MIN_NBYTES,
    warmup: int = 1,
    device: str = "cpu",
) -> Trace:
    """Runs ``step`` ``warmup + 1`` times under a policy and returns the trace of the last run.

    Args:
        step: one training step, forward and backward.
        policy: a policy, its name, or a Session. The reports of a Session show from then on what was alive at the peak.
            None: plain PyTorch, without a Session.
        model: a model whose parameters, buffers and outlasting gradients are put in the trace as well.
        stores, min_nbytes: as for Session, if ``policy`` is no Session.
        warmup: number of steps that run first, so that gradients and the caches of libraries exist already.
        device: the type of device whose memory is traced, ``"cpu"`` or that of the accelerator, such as ``"cuda"``.

    Returns:
        The trace, with ticks as the unit of time.

    Raises:
        UnknownNameError: no policy has that name.
        MeasureError: the step ran no backward pass, or there is no such device.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> x = torch.ones(8, 64)
        >>> plain = record(lambda: model(x).sum().backward())
        >>> encoded = record(lambda: model(x).sum().backward(), "lossless", min_nbytes=0)
        >>> sorted({buffer.role for buffer in encoded.buffers} - {buffer.role for buffer in plain.buffers})
        ['decoded', 'encoded']
    """
    if not accelerator.is_here(device):
        raise MeasureError(
            f"record was asked for device={device!r}, but it traces 'cpu', and an accelerator where one is "
            f"({accelerator.kind() or 'none'} here)."
        )
    session = policy if isinstance(policy, Session) or policy is None else None
    if session is None and policy is not None:
        session = Session(policy, model=model, stores=stores, min_nbytes=min_nbytes)  # type: ignore[arg-type]

    def once() -> None:
        with session or nullcontext():
            step()

    with nullcontext() if session is None else session.watched_by(Notes()):
        for _ in range(warmup):
            once()
        release_buffers()  # so that the decode buffers are allocated inside the trace
        resident = [] if model is None else list(_resident(model))
        with memory_profiler() as profiled:
            once()
    found = StepRecord(roots_of(profiled), device)
    if found.backward is None:
        raise MeasureError(
            "record was asked for the trace of a training step, but no autograd node ran in it. Call backward() in it."
        )
    trace = found.trace("plain" if session is None else repr(session.policy))
    still = set() if model is None else {memory for _, memory in _resident(model)}
    new = {memory.address for memory in found.memory if memory.end is None}  # where an old gradient may have been
    outlasting = [replace(b, end=trace.end) for b, memory in resident if memory in still and memory[0] not in new]
    trace = replace(trace, buffers=(*trace.buffers, *outlasting))  # at the end: decodes name buffers by number
    if session is not None:
        session.report_peak(trace.at_peak())
    return trace


def _resident(model: nn.Module) -> Iterator[tuple[Buffer, tuple[int, int]]]:
    """Yields the memory of a model, with address and size, which tell whether it is the same memory after the step."""
    named: list[tuple[str, Role, Tensor]] = []
    for name, parameter in model.named_parameters():
        named.append((name, "parameter", parameter))
        gradient = gradient_of(parameter)
        if gradient is not None:
            named.append((name, "gradient", gradient))
    named += [(name, "parameter", buffer) for name, buffer in model.named_buffers()]
    seen = set()
    for name, role, tensor in named:
        storage = tensor.untyped_storage()
        memory = storage.data_ptr(), storage.nbytes()
        if memory not in seen:
            seen.add(memory)
            yield Buffer(name, role, storage.nbytes(), 0, 1), memory
