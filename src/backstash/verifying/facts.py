"""Facts beside its arguments on which the bits of a computed value depend: generators, autocast, modes, settings."""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from backstash import accelerator
from backstash.torch_internals import autocast_of, count_function_modes, deterministic
from backstash.verifying.paths import address_of


@dataclass(frozen=True, slots=True)
class Facts:
    """Settings of the process and of the thread at one moment.

    Attributes:
        generators: digest of the state of each default generator, by its name: ``"python"``, ``"numpy"``, ``"cpu"`` and
            the accelerator's devices.
        autocast: type of device and dtype, for each type of device where autocast is on.
        grad_mode: whether autograd records.
        settings: name and value of what chooses kernels: threads, determinism, precision of products, default dtype.
        modes: how many function modes are active.
    """

    generators: dict[str, str]
    autocast: tuple[tuple[str, str], ...]
    grad_mode: bool
    settings: dict[str, str]
    modes: int

    @classmethod
    def here(cls) -> Facts:
        """The facts of this thread, now. Waits for no device."""
        types = ("cpu", kind) if (kind := accelerator.kind_in_use()) is not None else ("cpu",)
        casts = [autocast_of(each) for each in types]
        return cls(
            generators=generator_digests(),
            autocast=tuple((each[0], _short(each[1])) for each in casts if each is not None),
            grad_mode=torch.is_grad_enabled(),
            settings={
                "torch.get_num_threads()": str(torch.get_num_threads()),
                "torch.are_deterministic_algorithms_enabled()": str(deterministic()),
                "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
                "torch.get_default_dtype()": _short(torch.get_default_dtype()),
                "torch.backends.mkldnn.enabled": str(torch.backends.mkldnn.enabled),
                "torch.backends.cudnn.enabled": str(torch.backends.cudnn.enabled),
                "torch.backends.cudnn.benchmark": str(torch.backends.cudnn.benchmark),
            },
            modes=count_function_modes(),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that differs between forward and recomputation.

    Attributes:
        kind: ``"generator"``, ``"autocast"``, ``"grad mode"``, ``"setting"``, ``"mode"``, ``"training"``, ``"buffer"``,
            ``"parameter"``, ``"input"``.
        name: of the generator, the setting, the buffer ...
        before, after: the fact in forward and in the recomputation, as text.
    """

    kind: str
    name: str
    before: str = ""
    after: str = ""


def changes(before: Facts, after: Facts) -> list[Change]:
    """Returns the facts that differ, the gravest first."""
    found: list[Change] = []
    if before.autocast != after.autocast:
        found.append(Change("autocast", "", _casts(before), _casts(after)))
    if before.grad_mode != after.grad_mode:
        found.append(Change("grad mode", "", _on(before.grad_mode), _on(after.grad_mode)))
    for name, value in before.settings.items():
        if value != after.settings[name]:
            found.append(Change("setting", name, value, after.settings[name]))
    if before.modes != after.modes:
        found.append(Change("mode", "", str(before.modes), str(after.modes)))
    found += [Change("generator", name) for name in moved_generators(before.generators, after.generators)]
    return found


def moved_generators(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names of the generators whose states differ."""
    return [name for name, state in before.items() if after.get(name, state) != state]


def generator_digests() -> dict[str, str]:
    """A digest of the state of each default generator that the process uses."""
    found = {
        "python": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(repr(np.random.get_state(legacy=False)["state"]).encode()),
        "cpu": _digest(torch.get_rng_state().numpy().tobytes()),
    }
    kind = accelerator.kind_in_use()
    if kind is not None:
        for number in range(torch.accelerator.device_count()):
            state = accelerator.rng_state(torch.device(kind, number))
            found[f"{kind}:{number}"] = _digest(state.cpu().numpy().tobytes())
    return found


class Written:
    """Buffers, parameters and inputs of a region, by which it is known later which of them were written."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], inputs: Iterable[tuple[str, Any]] = ()) -> None:
        self._training: list[tuple[str, nn.Module, bool]] = []
        self._versions: list[tuple[str, str, Callable[[], Any], int, int]] = []
        for path, module in modules:
            self._training.append((path, module, module.training))
            for kind, table in (("buffer", module._buffers), ("parameter", module._parameters)):
                for name, x in table.items():
                    self._add(kind, f"{path}.{name}" if path else name, x)
        for name, x in inputs:
            self._add("input", name, x)

    def _add(self, kind: str, name: str, x: Any) -> None:
        if isinstance(x, torch.Tensor) and not x.is_inference():
            held = weakref.ref(x) if kind == "input" else partial(_same, x)  # an input is held by whoever needs it
            self._versions.append((kind, name, held, x._version, address_of(x)))

    def changed(self) -> list[Change]:
        """What was written or switched since."""
        found = [
            Change("training", path, _mode(was), _mode(module.training))
            for path, module, was in self._training
            if module.training != was
        ]
        for kind, name, held, version, address in self._versions:
            x = held()
            if x is None:
                continue
            if x._version != version:
                found.append(Change(kind, name, f"version {version}", f"version {x._version}"))
            elif address and address_of(x) and address_of(x) != address:
                found.append(Change(kind, name, "its memory", "other memory"))
        return found


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _mode(training: bool) -> str:
    return "train()" if training else "eval()"


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


def _casts(facts: Facts) -> str:
    return ", ".join(f"{dtype} on {device}" for device, dtype in facts.autocast) or "off"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
