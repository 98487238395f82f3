"""Deletes whatever a failure does not need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.kinds import KINDS
from tests.fuzz.program import SECTIONS, Program, Statement

MINUTES = 1.0
"""After which a program is as small as it gets."""


def minimise(program: Program, fails: Callable[[Program], bool], minutes: float = MINUTES) -> Program:
    """The smallest program found that still fails, by trying every single deletion until none is left.

    Args:
        program: a program that fails.
        fails: whether a program fails in the same way.
        minutes: when to stop.
    """
    end = time.monotonic() + 60 * minutes
    tried: set[Program] = {program}
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            if candidate in tried:
                continue
            tried.add(candidate)
            if time.monotonic() > end:
                return program
            if fails(candidate):
                program, smaller = candidate, True
                break
    return renumbered(program)


def _candidates(program: Program) -> Iterator[Program]:
    """Programs that are simpler by one step, setting or statement."""
    for steps in range(1, program.steps):
        yield replace(program, steps=steps)
    for number in range(len(program.pattern) if len(program.pattern) > 1 else 0):
        shorter = program.pattern[:number] + program.pattern[number + 1 :]
        yield replace(program, pattern=shorter, steps=max(1, program.steps - 1))
    yield from _without_half(program)
    for section in SECTIONS:
        for statements in _shorter(getattr(program, section)):
            changed = replace(program, **{section: statements[0]})
            yield changed
            removed, substitute = statements[1:]
            if removed and substitute:
                yield _renamed(changed, removed, substitute)
            if removed:
                yield _without_name(changed, removed)
    settings: dict[str, object] = {
        "batches": program.batches[:1],
        "inside": False,
        "sessions": "same",
        "optimizer": "SGD",
        "policy": "lossless",
        "min_nbytes": 0,
        "twice": "",
    }
    for name, value in settings.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})


def _without_half(program: Program) -> Iterator[Program]:
    """Without the setup, and without each half of the forward pass, whose values are replaced by the first one."""
    if program.setup:
        yield replace(program, setup=())
    statements = program.forward
    middle = len(statements) // 2
    for removed in (statements[2:middle], statements[middle:-1]):
        names = [inner.out for statement in removed for inner in statement.walk() if inner.out.startswith("v")]
        changed = replace(program, forward=tuple(other for other in statements if other not in removed))
        for name in names:
            changed = _renamed(changed, name, statements[0].out)
        if removed:
            yield changed


_Shorter = tuple[tuple[Statement, ...], str, str]


def _shorter(statements: tuple[Statement, ...]) -> Iterator[_Shorter]:
    """The statements without one of them, the name that it assigned, and a name that can stand for it."""
    for number in reversed(range(len(statements))):
        statement = statements[number]
        before, after = statements[:number], statements[number + 1 :]
        substitute = statement.operands[0] if statement.operands else ""
        if statement.out and not substitute:
            substitute = statements[0].out if number else ""
        yield (*before, *after), statement.out, substitute
        if statement.block:
            yield (*before, *statement.block, *after), "", ""
            for inner, removed, other in _shorter(statement.block):
                if inner:
                    yield (*before, replace(statement, block=inner), *after), removed, other
        elif KINDS[statement.kind].each and len(statement.operands) > 1:
            for operand in statement.operands:
                rest = tuple(name for name in statement.operands if name != operand)
                yield (*before, replace(statement, operands=rest), *after), "", ""


def _renamed(program: Program, name: str, other: str) -> Program:
    """The program with another name in place of one; a value that would be dropped twice is dropped once."""
    changed = _mapped(program, lambda operand: other if operand == name else operand)
    sections = {}
    for section in SECTIONS:
        dropped: set[str] = set()
        sections[section] = tuple(
            kept for statement in getattr(changed, section) if (kept := _dropped_once(statement, dropped)) is not None
        )
    return replace(changed, **sections)


def _dropped_once(statement: Statement, dropped: set[str]) -> Statement | None:
    if statement.kind != "drop":
        return statement
    operands = tuple(dict.fromkeys(name for name in statement.operands if name not in dropped))
    dropped.update(operands)
    return replace(statement, operands=operands) if operands else None


def _without_name(program: Program, name: str) -> Program:
    """The program without the operands of that name, and without the statements that have no other."""

    def without(statements: tuple[Statement, ...]) -> Iterator[Statement]:
        for statement in statements:
            block = tuple(without(statement.block))
            if statement.block and not block:
                continue
            operands = statement.operands
            if name in operands:
                operands = tuple(operand for operand in operands if operand != name)
                if not (KINDS[statement.kind].each and operands):
                    continue
            yield replace(statement, operands=operands, block=block)

    return replace(program, **{section: tuple(without(getattr(program, section))) for section in SECTIONS})


def _mapped(program: Program, new_name: Callable[[str], str], outs: bool = False) -> Program:
    """The program with each operand's name, and each assigned name if asked, replaced."""

    def mapped(statement: Statement) -> Statement:
        operands = tuple(new_name(name) for name in statement.operands)
        if KINDS[statement.kind].each:
            operands = tuple(dict.fromkeys(operands))
        out = new_name(statement.out) if outs and statement.out else statement.out
        return replace(statement, out=out, operands=operands, block=tuple(map(mapped, statement.block)))

    return replace(program, **{section: tuple(map(mapped, getattr(program, section))) for section in SECTIONS})


def renumbered(program: Program) -> Program:
    """The program with its values named v0, v1, ... in the order in which they are assigned."""
    names: dict[str, str] = {}
    for statement in program.statements():
        if statement.out.startswith("v"):
            names.setdefault(statement.out, f"v{len(names)}")
    return _mapped(program, lambda name: names.get(name, name), outs=True)
