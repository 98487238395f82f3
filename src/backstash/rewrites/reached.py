"""The state that the Python code of a step can reach and change, noted so that it can be put back.

Note: [what a step reaches]
    A step is a function: it changes what its code can name. That is followed here: cells of closures, globals that the
    code names, arguments that are bound, attributes of objects, elements of containers, and the functions of the
    program's own classes. Of each container, object and cell the content is noted, of each tensor a copy. So whatever
    holds the state of a training is put back, without a list of kinds: optimizers, schedulers, scalers, averages of
    weights, counters of a class, generators. Objects of libraries are entered if they have a ``state_dict()``. What
    lives outside of Python's memory, such as files, threads and processes, is left alone.
"""

from __future__ import annotations

import functools
import gc
import operator
import random
import sys
import threading
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from backstash.bits import equal_bits
from backstash.saved import PLAIN
from backstash.torch_internals import no_torch_function

SMALL = 4096
"""Bytes of a tensor or an array that is copied whatever it is."""

MOST_DATA = 256 << 20
"""Bytes of tensors and arrays that are copied although they look like data: nothing trained has their shape."""

_ATOMS = (bool, int, float, complex, str, bytes)
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "backstash", "triton", "IPython", "ipykernel"}
_STATEFUL = ("torch.optim.", "torch.amp.", "torch.cuda.amp.")
_ALIVE = (threading.Thread, Queue, types.ModuleType)
_TABLES = ("_parameters", "_buffers", "_modules")

_CACHING = type(functools.lru_cache(len))

_MISSING = object()


class _Content:
    """The content of a container, an object, a class or a cell, and how it is put back."""

    def __init__(self, held: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None], owner: Any) -> None:
        self.held, self.read, self.write, self.owner = held, read, write, owner
        self.before = read(held)

    def undo(self) -> None:
        """Puts all back that has changed."""
        now = self.read(self.held)
        if not _is_same(now, self.before):
            self.write(self.held, self.before)

    def rewind(self) -> None:
        """Puts numbers and texts back, and leaves what the step has allocated or collected."""
        now = self.read(self.held)
        pairs = self.before.items() if isinstance(self.before, dict) else enumerate(self.before)
        if isinstance(now, list) and len(now) != len(self.before):
            return
        changed = False
        for name, value in pairs:
            found = now.get(name, _MISSING) if isinstance(now, dict) else now[name]
            is_number = type(value) in _ATOMS and (found is None or type(found) in _ATOMS)
            if is_number and found is not value:
                now[name] = value
                changed = True
        if changed:
            self.write(self.held, now)


class _Numbers:
    def __init__(self, x: Tensor, path: str, owner: Any) -> None:
        self.x, self.path, self.owner = x, path, owner
        self.is_leaf = x.is_leaf
        self.requires_grad = x.requires_grad
        self.gradient = x.grad if self.is_leaf else None
        # Another tensor on the memory of a batch would look like a holder of it, and a Session would plan otherwise.
        self.memory = x.data if type(x) in PLAIN and x.is_leaf and x.requires_grad else None
        self.where = _where(x)
        self.version = x._version
        self.copy: Tensor | None = None

    def keep(self) -> None:
        """Copies the numbers."""
        if self.copy is None and _is_dense(self.x):
            self.copy = self.x.detach().clone()

    def restore(self) -> None:
        """Puts the memory and the numbers back, and whether it asks for a gradient."""
        x = self.x
        if self.memory is not None:
            restore_memory(x, self.memory)
        elif self.copy is not None and _where(x) != self.where:
            x.data = self.copy.clone()
        if self.is_leaf and x.is_leaf and x.requires_grad != self.requires_grad:
            x.requires_grad_(self.requires_grad)
        if self.copy is not None and not equal_bits(x, self.copy):  # copying would raise the version for nothing
            x.copy_(self.copy)

    def is_lost(self) -> bool:
        """Whether it has changed and was not copied."""
        return self.copy is None and not self.x.is_meta and self.x._version != self.version


class Reached:
    """All that a step can reach and change, as it is now (Note: [what a step reaches]).

    Args:
        known: tensors whose numbers and gradients somebody else puts back.
    """

    def __init__(self, roots: Iterable[object], known: Iterable[Tensor] = ()) -> None:
        self._known = {id(x): x for x in known}
        self._seen: dict[int, object] = {}  # held, because a number is used again when its object is gone
        self._waiting: list[tuple[object, str, Any]] = []
        self._contents: list[_Content] = []
        self._tensors: list[_Numbers] = []
        self._arrays: list[tuple[Any, str, Any, int]] = []
        self._generators: list[tuple[Callable[[Any], None], Any]] = []
        self._iterators: list[tuple[Any, str, Any]] = []
        self._caches: list[tuple[Any, str, Any]] = []
        self._weights: set[tuple[Any, torch.dtype]] = {(x.shape, x.dtype) for x in self._known.values()}
        self._data_nbytes = 0
        for root in roots:
            self._add(root, getattr(root, "__name__", type(root).__name__))
        self._walk()

    # -- putting back --------------------------------------------------------------------------------------------

    def set_gradients_aside(self) -> None:
        """Has a step make gradients of its own."""
        for each in self._tensors:
            if each.gradient is not None:
                each.x.grad = None

    def rewind(self) -> None:
        """Has the next step begin like the last one: numbers, texts and tensors are put back, but no optimizer's.

        What a first step has made and others find, such as an optimizer's memory, stays, so that steps are like those
        in the middle of a training.
        """
        for content in self._contents:
            if content.owner is None:
                content.rewind()
        self._restore(lambda each: each.owner is None)

    def undo(self) -> None:
        """Puts everything back."""
        for content in self._contents:
            content.undo()
        for cache, _, before in self._caches:
            if not before.currsize and cache.cache_info().currsize:
                cache.cache_clear()
        self._restore(lambda each: True)
        for each in self._tensors:
            if each.is_leaf and each.x.grad is not each.gradient:
                each.x.grad = each.gradient

    def _restore(self, is_meant: Callable[[_Numbers], bool]) -> None:
        with torch.no_grad():
            for each in self._tensors:
                if is_meant(each):
                    each.restore()
        for array, _, copy, _ in self._arrays:
            if copy is not None and array.tobytes() != copy.tobytes():
                np.copyto(array, copy)
        for write, state in self._generators:
            write(state)

    def lost(self) -> list[str]:
        """How the step reaches what it has changed and nobody can put back: large tensors and arrays of data."""
        arrays = [path for array, path, copy, check in self._arrays if copy is None and _check(array) != check]
        return [each.path for each in self._tensors if each.is_lost()] + arrays

    def consumed(self) -> list[str]:
        """How the step reaches the iterators from which it has taken something, as far as they tell."""
        moved = [path for iterator, path, before in self._iterators if _progress(iterator) != before]
        return list(dict.fromkeys(moved))  # an iterator and those that it takes its items from have one path

    def filled(self) -> list[str]:
        """How the step reaches the caches of functions to which it has added something, where there was something."""
        return [path for cache, path, was in self._caches if was.currsize and cache.cache_info().misses != was.misses]

    def before_step_of(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: what it remembers is copied, if it was not yet."""
        if id(optimizer) not in self._seen:  # nothing that could be followed leads to it
            self._add(optimizer, type(optimizer).__name__)
            for each in gc.get_objects():
                if issubclass(type(each), LRScheduler) and getattr(each, "optimizer", None) is optimizer:
                    self._add(each, type(each).__name__)
            self._walk()
        with torch.no_grad():
            for each in self._tensors:
                if each.owner is optimizer:
                    each.keep()

    # -- following -----------------------------------------------------------------------------------------------

    def _add(self, found: object, path: str, owner: Any = None) -> None:
        if found is not None and type(found) not in _ATOMS and id(found) not in self._seen:
            self._waiting.append((found, path, owner))

    def _walk(self) -> None:
        first = len(self._tensors)
        while self._waiting:
            found, path, owner = self._waiting.pop()
            if id(found) not in self._seen:
                self._seen[id(found)] = found
                self._enter(found, path, owner)
        for each in self._tensors[first:]:
            if each.owner is None and self._is_state(each.x):
                each.keep()

    def _is_state(self, x: Tensor) -> bool:
        """Whether a tensor's numbers are copied: those of weights, of averages of their shape, and of little data."""
        if not _is_dense(x):
            return False
        if x.nbytes <= SMALL or (x.is_leaf and x.requires_grad) or (x.shape, x.dtype) in self._weights:
            return True
        self._data_nbytes += x.nbytes
        return self._data_nbytes <= MOST_DATA

    def _enter(self, found: Any, path: str, owner: Any) -> None:
        kind = type(found)
        if isinstance(found, Tensor):
            self._enter_tensor(found, path, owner)
        elif isinstance(found, np.ndarray):
            self._enter_array(found, path)
        elif isinstance(found, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            self._generators.append(_state_of(found))
        elif isinstance(found, types.FunctionType):
            self._enter_function(found, path)
        elif isinstance(found, _CACHING):
            self._enter_cache(found, path)
        elif isinstance(found, types.MethodType):
            self._add(found.__func__, path)
            self._add(found.__self__, path.rpartition(".")[0] or path)
        elif isinstance(found, functools.partial):
            for inner in (found.func, found.args, found.keywords):
                self._add(inner, path)
        elif isinstance(found, type):
            self._enter_class(found, path)
        elif hasattr(kind, "__next__") and not _is_of_program(kind):
            self._enter_iterator(found, path)
        elif isinstance(found, (tuple, frozenset)) or kind is types.MappingProxyType:
            self._enter_elements(found, path, owner)
        elif isinstance(found, (dict, list, set, deque)):
            self._enter_container(found, path, owner)
        elif isinstance(found, nn.Module) and not _is_of_program(kind) and kind.__module__.startswith("torch."):
            self._note(found, lambda held: {"training": held.training}, _write_attributes)
            for table in _TABLES:
                self._add(found.__dict__.get(table), path)
        elif _has_state(found):
            self._enter_object(found, path, owner)

    def _enter_tensor(self, x: Tensor, path: str, owner: Any) -> None:
        if id(x) in self._known or x.is_inference() or nn.parameter.is_lazy(x):
            return
        if isinstance(x, nn.Parameter):
            self._weights.add((x.shape, x.dtype))
        self._tensors.append(_Numbers(x, path, owner))

    def _enter_array(self, array: Any, path: str) -> None:
        if array.dtype.hasobject or not array.flags.writeable:
            return
        self._data_nbytes += array.nbytes if array.nbytes > SMALL else 0
        is_copied = array.nbytes <= SMALL or self._data_nbytes <= MOST_DATA
        self._arrays.append((array, path, array.copy() if is_copied else None, 0 if is_copied else _check(array)))

    def _enter_function(self, function: types.FunctionType, path: str) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._note(cell, _read_cell, _write_cell)
            for content in _read_cell(cell):
                self._add(content, name)
        self._add(function.__dict__, path)
        self._add(function.__defaults__, path)
        self._add(function.__kwdefaults__, path)
        if not _is_of_program(function):
            return
        names = _names_in(code)
        found = {name: function.__globals__[name] for name in names if name in function.__globals__}
        self._note(function.__globals__, _reader_of(found), _write_items)
        for name, value in found.items():
            if isinstance(value, types.ModuleType):
                self._enter_module(value, names)
            else:
                self._add(value, name)

    def _enter_cache(self, cache: Any, path: str) -> None:
        """What functools.lru_cache and its like make of a function."""
        inner = cache.__wrapped__
        if not isinstance(inner, types.FunctionType) or _is_of_program(inner):
            self._caches.append((cache, path, cache.cache_info()))
            self._add(inner, path)

    def _enter_module(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """A module of the program, of which only names in the code are reached."""
        if _top(module.__name__) in _LIBRARIES or _is_installed(getattr(module, "__file__", None)):
            return
        found = {name: vars(module)[name] for name in names if name in vars(module)}
        self._note(vars(module), _reader_of(found), _write_items)
        for name, value in found.items():
            if not isinstance(value, types.ModuleType):
                self._add(value, f"{module.__name__}.{name}")

    def _enter_class(self, kind: type, path: str) -> None:
        for each in kind.__mro__:
            if not _is_of_program(each) or (each is not kind and id(each) in self._seen):
                continue
            self._seen[id(each)] = each
            data = {}
            for name, value in vars(each).items():
                inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(inner, (types.FunctionType, _CACHING)):
                    self._add(inner, f"{path}.{name}")
                elif not hasattr(type(value), "__get__") and not (name.startswith("__") and name.endswith("__")):
                    data[name] = value
                    self._add(value, f"{path}.{name}")
            self._note(each, _reader_of(data), _write_attributes)

    def _enter_iterator(self, iterator: Any, path: str) -> None:
        self._iterators.append((iterator, path, _progress(iterator)))
        frame = getattr(iterator, "gi_frame", None)
        inside = gc.get_referents(iterator) if frame is None else list(frame.f_locals.values())
        for each in inside:  # such as what an enumerate() takes its items from
            if hasattr(type(each), "__next__"):
                self._add(each, path)

    def _enter_elements(self, found: Any, path: str, owner: Any) -> None:
        pairs = found.items() if hasattr(found, "items") else enumerate(found)
        for name, value in list(pairs):
            if type(value) not in _ATOMS and value is not None:
                self._add(value, f"{path}[{name!r:.40}]" if type(name) in _ATOMS else path, owner)

    def _enter_container(self, found: Any, path: str, owner: Any) -> None:
        read, write = _CONTAINERS[next(kind for kind in _CONTAINERS if isinstance(found, kind))]
        self._note(found, read, write, owner)
        self._enter_elements(found, path, owner)
        if hasattr(found, "__dict__"):
            self._enter_object(found, path, owner)

    def _enter_object(self, found: Any, path: str, owner: Any) -> None:
        kind = type(found)
        attributes: dict[str, Any] = {}
        if hasattr(found, "__dict__"):
            attributes |= found.__dict__
            self._note(found.__dict__, dict.copy, _write_dict, owner)
        slots = [name for each in kind.__mro__ for name in _slots_of(each) if hasattr(found, name)]
        if slots:
            self._note(found, lambda held: {name: getattr(held, name, _MISSING) for name in slots}, _write_attributes)
            attributes |= {name: getattr(found, name) for name in slots}
        for name, value in attributes.items():
            is_memory = isinstance(found, Optimizer) and name == "state"
            self._add(value, f"{path}.{name}", found if is_memory else owner)
        if _is_of_program(kind):
            self._add(kind, kind.__name__)

    def _note(
        self, held: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None], owner: Any = None
    ) -> None:
        self._contents.append(_Content(held, read, write, owner))


# -- how contents are read and written -------------------------------------------------------------------------------


def _is_same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(before, dict):
        return all(a is b for a, b in zip(now, before, strict=True)) and all(now[key] is before[key] for key in before)
    return all(a is b for a, b in zip(now, before, strict=True))


def _write_dict(held: Any, content: dict[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    kind.clear(held)
    kind.update(held, content)


def _write_list(held: Any, content: list[Any]) -> None:
    list.__setitem__(held, slice(None), content)


def _write_set(held: Any, content: list[Any]) -> None:
    set.clear(held)
    set.update(held, content)


def _write_deque(held: Any, content: list[Any]) -> None:
    deque.clear(held)
    deque.extend(held, content)


def _write_items(held: Any, content: dict[str, Any]) -> None:
    for name, value in content.items():
        if value is _MISSING:
            held.pop(name, None)
        elif held.get(name, _MISSING) is not value:
            held[name] = value


def _write_attributes(held: Any, content: dict[str, Any]) -> None:
    for name, value in content.items():
        if getattr(held, name, _MISSING) is value:
            continue
        if isinstance(held, type):
            setattr(held, name, value)
        elif value is _MISSING:
            object.__delattr__(held, name)
        else:
            object.__setattr__(held, name, value)


def _read_cell(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _write_cell(cell: Any, content: list[Any]) -> None:
    if content:
        cell.cell_contents = content[0]
    else:
        del cell.cell_contents


def _reader_of(names: Iterable[str]) -> Callable[[Any], dict[str, Any]]:
    chosen = tuple(names)

    def read(held: Any) -> dict[str, Any]:
        found = vars(held) if isinstance(held, type) else held
        return {name: found.get(name, _MISSING) for name in chosen}

    return read


_CONTAINERS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    dict: (lambda held: dict(dict.items(held)), _write_dict),
    list: (lambda held: list(list.__iter__(held)), _write_list),
    set: (lambda held: list(set.__iter__(held)), _write_set),
    deque: (lambda held: list(deque.__iter__(held)), _write_deque),
}


# -- what is entered -------------------------------------------------------------------------------------------------


def _top(name: str | None) -> str:
    return (name or "").partition(".")[0]


def _is_installed(file: str | None) -> bool:
    return file is not None and ("site-packages" in file or "dist-packages" in file)


def _is_of_program(found: Any) -> bool:
    if _top(getattr(found, "__module__", None)) in _LIBRARIES:
        return False
    code = getattr(found, "__code__", None)
    if isinstance(code, types.CodeType):  # and not what the class of a compiled function has by that name
        return not _is_installed(code.co_filename)
    return not _is_installed(getattr(sys.modules.get(found.__module__), "__file__", None))


def _has_state(found: Any) -> bool:
    """Whether an object may hold a part of the training's state."""
    kind = type(found)
    if isinstance(found, _ALIVE) or kind.__module__ == "builtins":
        return False
    if kind in (types.SimpleNamespace,) or _is_of_program(kind):
        return True
    if isinstance(found, (Optimizer, LRScheduler)) or f"{kind.__module__}.".startswith(_STATEFUL):
        return True
    says_so = callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
    return _top(kind.__module__) not in _LIBRARIES and says_so


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    mangled = (f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names)
    return [name for name in mangled if name not in ("__dict__", "__weakref__")]


def _names_in(code: types.CodeType) -> set[str]:
    names: set[str] = set()
    waiting = [code]
    while waiting:
        found = waiting.pop()
        names.update(found.co_names)
        waiting += [each for each in found.co_consts if isinstance(each, types.CodeType)]
    return names


def _state_of(generator: Any) -> tuple[Callable[[Any], None], Any]:
    """Returns what puts a generator of random numbers back, and what it is put back to."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda state: setattr(bits, "state", state), bits.state
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    return generator.set_state, generator.get_state()


def _progress(iterator: Any) -> Any:
    """Something that is another when an iterator was advanced, as far as it tells."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, _Same(frame.f_locals.values()))
    yielded = getattr(iterator, "_num_yielded", None)  # of a DataLoader
    if yielded is not None:
        return yielded
    try:
        return operator.length_hint(iterator, -1), repr(iterator)  # the latter of a count()
    except Exception:  # a library's iterator may raise anything
        return None


class _Same:
    def __init__(self, found: Iterable[object]) -> None:
        self.found = list(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and _is_same(self.found, other.found)

    def __hash__(self) -> int:
        return len(self.found)


def _check(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def restore_memory(x: Tensor, memory: Tensor) -> None:
    """Has a tensor lie again where it was, if the program has given it other memory by ``x.data = ...``."""
    if _where(x) != _where(memory):
        x.data = memory


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor has numbers in one piece of memory, so that they can be copied and put back."""
    return x.layout is torch.strided and not (x.is_nested or x.is_meta or x.is_quantized)


def _where(x: Tensor) -> tuple[Any, ...]:
    is_dense = type(x) in PLAIN and _is_dense(x)
    with no_torch_function():  # a Session takes it for code that may change the memory unseen
        return (x.shape, x.dtype, x.stride(), x.data_ptr()) if is_dense else ()
