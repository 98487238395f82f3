"""A program as data: settings, and statements in three sections. As text it is a few lines of Python syntax.

Example:
    >>> text = '''
    ... settings(seed=3, steps=2)
    ... with forward():
    ...     v0 = leaf()
    ...     v1 = relu(v0)
    ...     loss0 = loss(v1)
    ... with backward():
    ...     backward(loss0, retain=False)
    ... '''
    >>> parse(text).forward[1]
    Statement(kind='relu', out='v1', operands=('v0',), constants=(), block=())
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

SECTIONS = ("setup", "before", "forward", "backward")


@dataclass(frozen=True)
class Statement:
    """One statement.

    Attributes:
        kind: its row in ``kinds.KINDS``.
        out: the name that it assigns, empty if it assigns none.
        operands: names of the values that it reads or changes.
        constants: names and values of its constants.
        block: the statements inside, if it is a ``with`` or an ``if``.
    """

    kind: str
    out: str = ""
    operands: tuple[str, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    block: tuple[Statement, ...] = ()

    def walk(self) -> Iterator[Statement]:
        """This statement and all statements inside it."""
        yield self
        for inner in self.block:
            yield from inner.walk()


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        seed: of the generator, before anything random happens.
        shape: ``[N, C, H, W]`` of every value.
        batches: batch sizes of the steps, used in turn.
        steps: number of training steps.
        optimizer: ``"SGD"``, ``"momentum"`` or ``"Adam"``.
        sessions: ``"each"`` makes a Session for every step, ``"same"`` enters one Session in every step, ``"around"``
            enters one Session around all steps.
        inside: whether backward runs inside the Session.
        policy: name of the policy.
        min_nbytes: of the Session.
        pattern: the variant of each step, one letter a step; statements of the feature ``changing`` read it.
        twice: variants of the steps that consist of two micro-batches, whose gradients add up.
        setup: statements that run once, before the first step.
        before: statements that run in every step before the Session is entered, or inside it if it is entered around
            all steps.
        forward: statements that run in every step inside the Session, up to the losses.
        backward: statements that run in every step from the losses to the optimizer.
    """

    seed: int = 0
    shape: tuple[int, ...] = (2, 4, 6, 8)
    batches: tuple[int, ...] = (2,)
    steps: int = 1
    optimizer: str = "SGD"
    sessions: str = "same"
    inside: bool = False
    policy: str = "lossless"
    min_nbytes: int | None = 0
    pattern: str = "A"
    twice: str = ""
    setup: tuple[Statement, ...] = ()
    before: tuple[Statement, ...] = ()
    forward: tuple[Statement, ...] = ()
    backward: tuple[Statement, ...] = ()

    def statements(self) -> Iterator[Statement]:
        """All statements, those inside blocks too."""
        for section in SECTIONS:
            for statement in getattr(self, section):
                yield from statement.walk()


def to_text(program: Program) -> str:
    """The program as text that ``parse`` reads."""
    settings = [(f.name, getattr(program, f.name)) for f in fields(program) if f.name not in SECTIONS]
    lines = [f"settings({', '.join(f'{name}={value!r}' for name, value in settings)})"]
    for section in SECTIONS:
        statements: tuple[Statement, ...] = getattr(program, section)
        if statements:
            lines += [f"with {section}():", *_lines(statements, "    ")]
    return "\n".join(lines) + "\n"


def _lines(statements: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for statement in statements:
        arguments = [*statement.operands, *(f"{name}={value!r}" for name, value in statement.constants)]
        call = f"{statement.kind}({', '.join(arguments)})"
        if statement.block:
            yield f"{indent}with {call}:"
            yield from _lines(statement.block, indent + "    ")
        else:
            yield f"{indent}{statement.out} = {call}" if statement.out else f"{indent}{call}"


def parse(text: str) -> Program:
    """The program that ``to_text`` wrote.

    Raises:
        ValueError: the text is no program.
    """
    settings: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.With):
            settings[_call(node.items[0].context_expr)[0]] = tuple(_statement(inner) for inner in node.body)
        elif isinstance(node, ast.Expr):
            settings.update(_call(node.value)[2])
        else:
            raise ValueError(f"line {node.lineno} is neither settings(...) nor one of the sections {SECTIONS}.")
    return Program(**settings)


def _statement(node: ast.stmt) -> Statement:
    if isinstance(node, ast.With):
        kind, operands, constants = _call(node.items[0].context_expr)
        return Statement(kind, "", operands, constants, tuple(_statement(inner) for inner in node.body))
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        kind, operands, constants = _call(node.value)
        return Statement(kind, node.targets[0].id, operands, constants)
    if isinstance(node, ast.Expr):
        kind, operands, constants = _call(node.value)
        return Statement(kind, "", operands, constants)
    raise ValueError(f"line {node.lineno} is no statement: write name = kind(...), kind(...) or with kind(...).")


def _call(node: ast.expr) -> tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(f"line {node.lineno} has no call of a statement kind.")
    operands = tuple(argument.id for argument in node.args if isinstance(argument, ast.Name))
    constants = tuple((str(word.arg), ast.literal_eval(word.value)) for word in node.keywords)
    return node.func.id, operands, constants
