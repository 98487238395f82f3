"""``bs.graphed``: a training step that an accelerator runs as one captured graph, with a Session inside.

Note: [what a graph depends on]
    A replay reads and writes the memory that the capture has seen, and runs none of the step's Python. So a graph
    serves the calls that are like the captured one: arguments of the same shapes, dtypes and values, parameters and
    buffers at the same addresses, the same modules in training mode, the same settings of torch, the same numbers in
    the optimizers that step inside. All of that is the *signature* of a call, which is compared before each replay.

Note: [leaves on one stream]
    Autograd adds a gradient on the stream on which its parameter was used first, as long as anything holds the graph of
    that step. A capture has a stream of its own, and breaks if a gradient is added on another one. So what a step
    returns is detached in eager calls as well.

Note: [gradients of a graph]
    The gradients that a captured step makes lie in the graph's memory. They are held with it, and after each replay
    they are the parameters' ``.grad`` again, whatever was assigned in between. A step that adds to gradients which were
    there before needs them where they were at the capture; if they are elsewhere, it is captured again.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from backstash import accelerator, graphs
from backstash.arguments import check_count, check_model
from backstash.errors import GraphError
from backstash.numerics import settings
from backstash.policies.base import STEADY, Policy, knows_room
from backstash.session import Session
from backstash.torch_internals import autocast_of, tree_flatten, tree_map_only, tree_unflatten

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

EAGER = 8
"""How many calls of a new signature run eagerly before one is captured: a Session has settled by then."""

GRAPHS = 8
"""How many graphs there are at most."""

CAPTURES = 3
"""How often a signature is captured again because its gradients were elsewhere, before its calls stay eager."""

AGAIN = 3
"""How many calls run eagerly between an error of a replay and the next capture, so that its cause is learned."""

_Key = tuple[Any, ...]


@dataclass(slots=True)
class _Graph:
    """A captured step.

    Attributes:
        told: what its replays tell.
        inputs: the tensors that it reads its arguments from.
        result: what the step returned, in the graph's memory.
        made: parameters and the gradients that it makes for them.
        added_to: parameters and the gradients that it adds to.
    """

    graph: Any
    told: graphs.Capture
    inputs: list[Tensor]
    result: Any
    made: list[tuple[Tensor, Tensor | None]]
    added_to: list[tuple[Tensor, Tensor]]

    @property
    def finds_its_gradients(self) -> bool:
        """Whether the gradients that it adds to are where they were."""
        return all(parameter.grad is gradient for parameter, gradient in self.added_to)


@dataclass(slots=True)
class _Seen:
    """The calls of one signature: how many ran eagerly, how often one was captured, and the graph that serves them."""

    eager: int = 0
    captures: int = 0
    graph: _Graph | None = None


@dataclass(slots=True)
class _Watched:
    """What a step was seen to use: the modules of its model, and the optimizers that step inside."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def see(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer steps. Called by torch."""
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)

    def state(self) -> _Key:
        """Returns all of a signature but the arguments."""
        tensors: list[Any] = []
        for module in self.modules:
            tensors.append(module.training)
            for parameter in module._parameters.values():
                if parameter is not None:
                    tensors += (parameter.data_ptr(), parameter.requires_grad, parameter.grad is None)
            tensors += [buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None]
        return tuple(tensors), tuple(map(_numbers_of, self.optimizers))

    def parameters(self) -> list[Tensor]:
        """Returns the parameters of the model."""
        found = (each for module in self.modules for each in module._parameters.values() if each is not None)
        return list({id(parameter): parameter for parameter in found}.values())


def _numbers_of(optimizer: torch.optim.Optimizer) -> _Key:
    """The numbers of an optimizer that a graph holds as they are at the capture."""
    groups = optimizer.param_groups
    given = [(name, value) for group in groups for name, value in group.items() if name != "params"]
    return id(optimizer), tuple((name, id(value) if isinstance(value, Tensor) else str(value)) for name, value in given)


class GraphedStep:
    """A training step, captured in graphs of the accelerator; made by :func:`graphed`.

    Attributes:
        replays: how many calls were one replay of a graph.
        eager: how many calls have run the step itself.
    """

    def __init__(
        self, step: Callable[..., Any], session: Session | None, model: nn.Module, most: int, learning: int
    ) -> None:
        self._step, self._session, self._most, self._learning = step, session, most, learning
        self._watched = _Watched(list(model.modules()))
        self._seen: dict[_Key, _Seen] = {}
        self._pool: Any = None
        self._has_said: set[str] = set()
        self.replays = self.eager = 0

    def __repr__(self) -> str:
        session = "no Session" if self._session is None else repr(self._session.policy)
        counts = f"{self.graphs} graphs, {self.replays} replays, {self.eager} eager calls"
        return f"graphed({self._step!r}, {session}): {counts}"

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(seen.graph is not None for seen in self._seen.values())

    def check(self) -> None:
        """Waits for the device, and looks at what all replays until now have told.

        Raises:
            BackstashError: as by a call.
        """
        if self.graphs:
            torch.accelerator.synchronize()
            self._look()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step: eagerly, or by a replay of its graph.

        Returns:
            What the step returns. Its tensors have no graph of autograd, and are copies of those in the device's graph.

        Raises:
            GraphError: the step cannot be captured; or a codec could not take a value in an earlier replay.
            RecomputedDifferentlyError: a value that was remade in an earlier replay had other bits than before.
        """
        leaves, structure = tree_flatten((args, kwargs))
        device = self._device(leaves)
        if device is None:
            return self._run_eagerly(args, kwargs)
        self._look()
        described = tuple([_described(leaf, device) for leaf in leaves])
        with_torch = settings(device.type), autocast_of(device.type), torch.is_grad_enabled()
        key = (structure, described, with_torch, *self._watched.state())
        seen = self._seen.setdefault(key, _Seen())
        if seen.graph is not None and not seen.graph.finds_its_gradients:
            seen.graph = None
        if seen.graph is None:
            if not self._may_capture(seen):
                seen.eager += 1
                return self._run_eagerly(args, kwargs)
            seen.captures += 1
            seen.graph = self._captured(device, leaves, structure)
        return self._replay(seen.graph, leaves)

    def _device(self, leaves: list[Any]) -> torch.device | None:
        found = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_cpu), None)
        if found is None:
            found = next((parameter.device for parameter in self._watched.parameters()), torch.device("cpu"))
        if found.type != "cpu" and accelerator.graph_type(found.type) is not None:
            return found
        self._say(
            f"graphed has nothing to capture: devices of type {found.type!r} have no graphs. The step runs eagerly."
        )
        return None

    def _say(self, text: str) -> None:
        if text not in self._has_said:
            self._has_said.add(text)
            warnings.warn(f"backstash: {text}", stacklevel=4)

    def _may_capture(self, seen: _Seen) -> bool:
        if seen.eager < self._learning:
            return False
        if seen.captures > CAPTURES:
            self._say("graphed finds the gradients that a step adds to in other memory each time, so it runs eagerly.")
            return False
        if self.graphs >= self._most:
            self._say(
                f"graphed has {self._most} graphs, and calls that none of them serves run eagerly. Pass tensors of "
                "fewer shapes and fewer other values, give optimizers a learning rate in a tensor, or raise graphs=."
            )
            return False
        return True

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        self.eager += 1
        return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        handle = register_optimizer_step_pre_hook(self._watched.see)
        try:
            with self._session or nullcontext():
                return tree_map_only(Tensor, Tensor.detach, self._step(*args, **kwargs))
        finally:
            handle.remove()

    def _captured(self, device: torch.device, leaves: list[Any], structure: Any) -> _Graph:
        for optimizer in self._watched.optimizers:
            _check_capturable(optimizer)
        parameters = self._watched.parameters()
        before = [parameter.grad for parameter in parameters]
        given = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(given, structure)
        told = graphs.Capture(device)
        graph = accelerator.graph_type(device.type)()
        current, side = torch.accelerator.current_stream(device), torch.Stream(device)
        self._settle()
        torch.accelerator.synchronize()
        gc.collect()
        torch.accelerator.empty_cache()
        side.wait_stream(current)
        try:
            with side:
                accelerator.begin_graph(graph, self._pool)
                graphs.begin_capture(told)
                try:
                    result = self._run(args, kwargs)
                    told.end()
                except BaseException:
                    with suppress(RuntimeError):  # of a capture that the step has broken
                        graph.capture_end()
                    raise
                finally:
                    graphs.end_capture()
                graph.capture_end()
        except Exception as error:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise GraphError(
                f"graphed was to capture {self._step!r}, but the step does what a graph cannot hold: {error} A "
                "captured step may not wait for the device (item, tolist, print of a tensor, copies to or from "
                "pageable memory) nor ask for a generator's state (checkpoint needs preserve_rng_state=False). Move "
                "that out of the step, or call the step without graphed."
            ) from error
        current.wait_stream(side)
        self._pool = graph.pool() if self._pool is None else self._pool
        made, added_to = [], []
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None and parameter.grad is gradient:
                added_to.append((parameter, gradient))
            else:
                made.append((parameter, parameter.grad))
        return _Graph(graph, told, [each for each in given if isinstance(each, Tensor)], result, made, added_to)

    def _replay(self, graph: _Graph, leaves: list[Any]) -> Any:
        self.replays += 1
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            for inside, given in zip(graph.inputs, tensors, strict=True):
                inside.copy_(given, non_blocking=True)
            self._settle()
            graph.graph.replay()
            for parameter, gradient in graph.made:
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            return tree_map_only(Tensor, Tensor.clone, graph.result)

    def _settle(self) -> None:
        """Has the device's stream wait for what eager steps are still moving."""
        for store in () if self._session is None else self._session.stores.values():
            settle = getattr(store, "settle", None)
            if settle is not None:
                settle()

    def _look(self) -> None:
        """Raises what replays have told until now. A graph that has told of an error is not used again."""
        for seen in self._seen.values():
            if seen.graph is None:
                continue
            try:
                seen.graph.told.check()
            except Exception:
                seen.graph, seen.eager = None, max(0, self._learning - AGAIN)
                raise


def _described(leaf: Any, device: torch.device) -> _Key:
    if not isinstance(leaf, Tensor):
        try:
            hash(leaf)
        except TypeError:
            raise GraphError(
                "graphed takes tensors, and other values that can be compared by their hash, in lists and dicts, but "
                f"was given {type(leaf).__name__}. Pass what changes from call to call as a tensor, and the rest in a "
                "closure."
            ) from None
        return type(leaf), leaf
    if leaf.device != device or leaf.requires_grad or leaf.layout is not torch.strided:
        raise GraphError(
            f"graphed was given a tensor {list(leaf.shape)} on "
            f"{leaf.device}{' that requires grad' * leaf.requires_grad}, but a captured step takes strided tensors on "
            f"{device} that need no gradient. Move it there before the call, and detach it."
        )
    return leaf.dtype, leaf.shape, leaf.stride()


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        name = type(optimizer).__name__
        raise GraphError(
            f"graphed was to capture a step of {name}, which was made with capturable=False, so it counts its steps on "
            f"the host and a replay would not. Make it with capturable=True, or call it outside of the step."
        )


def graphed(
    step: Callable[Arguments, Result],
    session: Session | None = None,
    *,
    model: nn.Module | None = None,
    graphs: int = GRAPHS,
    learning: int = EAGER,
) -> Callable[Arguments, Result]:
    """Captures a training step in a graph of the accelerator, with a Session inside.

    The host then launches the whole step at once: forward, backward and, if it is in the step, the optimizer. Whatever
    a Session does on the host is done when the step is captured. Each kind of call runs eagerly first, in which the
    Session learns the model, and is then captured and replayed. Calls of other shapes have graphs of their own, which
    share memory. Without an accelerator that has graphs the step runs eagerly, and a warning says so once.

    Args:
        step: runs a training step: forward, ``backward()``, perhaps an optimizer. It may not wait for the device.
            Tensors that change from call to call are its arguments. Everything else that it reads stays as it was when
            it was captured, and Python that changes something outside of the device runs in eager calls and captures
            alone.
        session: is opened around each call; None for the step as it is. Its policy has to do the same in each step:
            those of ``comet``, and the guards around plans, do not fit into a graph.
        model: the module whose parameters get gradients; by default the Session's.
        graphs: how many graphs there are at most. Calls that need one more run eagerly.
        learning: how many calls of each kind run eagerly first.

    Returns:
        A function that is called as ``step`` is. Its attributes ``graphs``, ``replays`` and ``eager`` count, and its
        method ``check()`` waits for the device and raises what went wrong, after the last step of a training.

    Raises:
        TypeError: an argument is of another type, or there is no model.
        ValueError: a number is out of its range.
        GraphError: the Session does what a graph cannot hold.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> def step(x):
        ...     model.zero_grad()
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> with warnings.catch_warnings(record=True, action="always") as said:  # there is no accelerator here
        ...     fast = graphed(step, Session("lossless", model=model))
        ...     losses = [fast(torch.ones(8, 64)).item() for _ in range(2)]
        >>> losses[0] == losses[1], str(said[0].message)[:43]
        (True, 'backstash: graphed has nothing to capture: ')
    """
    if not callable(step):
        raise TypeError(f"graphed was asked for the step {step!r:.80}, but that cannot be called. Pass a function.")
    if session is not None and not isinstance(session, Session):
        raise TypeError(
            f"graphed was asked for the Session {session!r:.80}, which is of {type(session).__name__}. Pass a "
            f"backstash.Session, with a plan as its policy where there is a budget."
        )
    check_count(graphs, "graphs", "graphs", "graphed")
    check_count(learning, "learning", "calls", "graphed")
    if session is not None:
        _check_session(session)
        model = session.model if model is None else model
    if model is None:
        raise TypeError(
            "graphed was asked to capture a step without a model, whose gradients lie in its graphs. Pass model=, or "
            "make the Session with it."
        )
    check_model(model, "graphed")
    return GraphedStep(step, session, model, graphs, learning)


def _check_session(session: Session) -> None:
    reason = ""
    if session.is_replanned:
        reason = "it makes plans while the program runs (replan=)"
    elif session.check:
        reason = f"it measures or compares by check={session.check!r}, for which the host waits"
    elif _changes_its_mind(session.policy):
        reason = f"its policy {session.policy!r:.80} changes what it does by what it sees of each step"
    if reason:
        raise GraphError(
            f"graphed was asked to capture steps of a Session, but {reason}, and a graph does the same in each replay. "
            "Use a Session without that, with a policy such as lossless or quantized, or with a plan as it is."
        )


def _changes_its_mind(policy: Policy) -> bool:
    is_steady = policy.revision is None or policy.revision is STEADY
    return not is_steady or (not policy.is_fixed and knows_room(policy))
