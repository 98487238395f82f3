"""The same step with everybody's savers switched off: what its gradients are compared with.

Note: [savers switched off]
    Inside :class:`Reference`, pairs of saved-tensor hooks are not installed, so autograd keeps what it saves, also
    inside ``checkpoint(use_reentrant=False)``. ``checkpoint(use_reentrant=True)`` calls its function. A Session
    installs nothing. What torch.compile has compiled runs in eager mode. Kernels that a compiler writes round
    otherwise, though, and draw other random numbers. Where forward has other bits by that, the reference is the same
    program compiled anew without a memory budget, so that its graphs compute as little again as torch ever does.

Note: [functions that recompute]
    A custom autograd function that goes backward in its backward recomputes by itself. Its ``forward`` is called as a
    plain function with grad mode on, and a stand-in for ``ctx``, so that autograd differentiates it.
    ``torch.no_grad()`` in the lines of that ``forward`` itself does nothing then. If the result does not depend on all
    inputs that ask for a gradient, because ``forward`` detaches them, the custom function is called as ever, and the
    log says so. Custom functions that do not go backward by themselves are never replaced: what they return is meant.

Note: [inputs that differ]
    Two runs without savers may give different gradients because kernels do not repeat themselves, or because the
    program reads a clock or draws without a seed. So the log has, in order, checksums of what modules were given and of
    what they returned. If the first that differs was given to a module, all modules before it did repeat themselves.
    Weights count as given with the first call. Of a module that is called by names of arguments, no global hook sees
    them; the modules that it calls stand for it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from backstash.capture.naming import tensors_within
from backstash.saved import is_tensor
from backstash.session import Session
from backstash.torch_internals import (
    ReentrantCheckpoint,
    compiling_without_budgets,
    function_apply,
    nodes_behind,
    push_saved_tensor_hooks,
    remove_saved_tensor_hooks,
)
from backstash.verifying.checksum import Checksum, numbers_of
from backstash.verifying.observing import ObservedRun, is_compiling, name_of_class, replaced, sums_of

_MOST_NODES = 100_000


class Reference(ObservedRun):
    """Inside the ``with``, no saver is at work, and gradients are noted at the end of each backward pass.

    Args:
        recomputing: names of custom autograd functions that recompute (Note: [functions that recompute]).
        keep_pass: as in ObservedRun.
        compiled: whether compiled functions are compiled anew without a budget, and do not run in eager mode.
        copies: whether autograd saves copies, which nobody can change in place.
    """

    def __init__(
        self,
        recomputing: Collection[str] = (),
        keep_pass: int | None = None,
        compiled: bool = False,
        copies: bool = False,
    ) -> None:
        super().__init__(recomputing, keep_pass)
        self._compiled, self._copies = compiled, copies
        self._plain: list[Any] = []
        self._stance: Any = None
        self._calls: list[tuple[int, list[Checksum]]] = []
        self._noted = 0  # how deep the module is whose call is noted; 0 for none
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._thread = threading.get_ident()

    def _install(self, undo: ExitStack) -> None:
        self._compile = torch.compile
        if self._compiled:
            self.log.is_compiled = True
            undo.enter_context(compiling_without_budgets())
        else:
            undo.callback(self._end_stance)
            undo.enter_context(replaced(torch, "compile", self._compiling))
            if "torch._dynamo" in sys.modules:  # else its import would take seconds for nothing
                self._force_eager()
        undo.enter_context(replaced(Session, "__enter__", _enter_nothing))
        undo.enter_context(replaced(torch.no_grad, "__enter__", self._enter_no_grad()))
        if self._copies:
            undo.callback(remove_saved_tensor_hooks, _copy)
            push_saved_tensor_hooks(_copy, _copied)

    def _end_stance(self) -> None:
        if self._stance is not None:
            self._stance.__exit__(None, None, None)

    def _force_eager(self) -> None:
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")  # as a function, it lasts until it is left

    def _compiling(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of ``torch.compile``: what is compiled runs in eager mode."""
        self._force_eager()
        return self._compile(*args, **kwargs)

    # -- savers --------------------------------------------------------------------------------------------------

    def _push(self, pack: Any, unpack: Any) -> None:
        is_compilers = isinstance(pack, torch.fx.GraphModule) or is_compiling()
        self._here.stack.append(is_compilers)
        if is_compilers:
            self._before[0](pack, unpack)

    def _pop(self) -> None:
        stack = self._here.stack
        if not stack or stack.pop():
            self._before[1]()

    def _apply(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = function_apply.__get__(None, cls)
        if is_compiling() or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if cls is ReentrantCheckpoint:
            return args[0](*args[2:])
        name = name_of_class(cls)
        if name not in self._recomputing:
            return original(*args, **kwargs)
        result, reason = self._plainly(cls, args)
        self.log.replaced[name] = reason
        return original(*args, **kwargs) if reason else result

    def _plainly(self, cls: Any, args: Any) -> tuple[Any, str]:
        """The result of a function's ``forward`` as autograd differentiates it; or why there is none."""
        if (
            getattr(cls.forward, "__code__", None) is None
            or cls.setup_context is not torch.autograd.Function.setup_context
        ):
            return None, "its forward has no ctx"
        self._plain.append(cls.forward.__code__)
        try:
            result = cls.forward(_Context(args), *args)
        except (TypeError, AttributeError, RuntimeError) as error:
            return None, f"its forward cannot be called plainly: {type(error).__name__}: {error}"
        finally:
            self._plain.pop()
        given = [each for each in args if is_tensor(each) and each.requires_grad]
        lost = _unreached(result, given)
        return result, f"its forward detaches {lost} of its inputs" if lost else ""

    def _enter_no_grad(self) -> Any:
        original, plain = torch.no_grad.__enter__, self._plain

        def enter(context: Any) -> None:
            original(context)
            if plain and sys._getframe(1).f_code is plain[-1]:
                torch.set_grad_enabled(True)  # its __exit__ restores what there was

        return enter

    # -- modules and passes --------------------------------------------------------------------------------------

    def _entered(self, module: nn.Module, args: Any) -> None:
        if not self._noted and threading.get_ident() == self._thread and any(True for _ in tensors_within(args)):
            self._noted = self.paths.depth
            weights = () if module in self._known else tuple(module.parameters())
            self._known.add(module)
            self._calls.append((1, sums_of((args, weights))))

    def _leaving(self, module: nn.Module, output: Any) -> None:
        if self._noted == self.paths.depth and threading.get_ident() == self._thread:
            self._noted = 0
            self._calls.append((0, sums_of(output)))

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass begins."""
        self.log.calls.append([[kind, *numbers_of(sums)] for kind, sums in self._calls])
        self._calls = []
        super().begin_backward(tensors)


class _Context:
    def __init__(self, args: Any) -> None:
        self.needs_input_grad = tuple(is_tensor(each) and each.requires_grad for each in args)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = self.to_save = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _unreached(result: Any, inputs: list[Tensor]) -> int:
    """How many of the inputs the result does not depend on, as far as autograd knows."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    wanted = {id(x.grad_fn) if x.grad_fn is not None else id(x) for x in inputs}
    for node in islice(nodes_behind(x.grad_fn for x in found if is_tensor(x)), _MOST_NODES if wanted else 0):
        wanted -= {id(node), id(getattr(node, "variable", None))}
        if not wanted:
            break
    return len(wanted)


def _enter_nothing(session: Session) -> Session:
    """In the place of ``Session.__enter__``: what was not entered does nothing when it is left."""
    return session


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


_copy.only_observes = True  # type: ignore[attr-defined]  # so that a Session may be opened inside


def _copied(x: Tensor) -> Tensor:
    return x
