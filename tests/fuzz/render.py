"""Turns a program into Python code: the function that is executed, and the standalone file that is printed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from tests.fuzz import pieces
from tests.fuzz.kind import HOLE, OPERANDS
from tests.fuzz.kinds import KINDS
from tests.fuzz.program import Program, Statement

_WORD = re.compile(r"[A-Za-z_]\w*")
_PIECES = [name for name, value in vars(pieces).items() if getattr(value, "__module__", "") == pieces.__name__]
_OPTIMIZERS = {
    "SGD": "torch.optim.SGD(parameters, lr=0.1)",
    "momentum": "torch.optim.SGD(parameters, lr=0.1, momentum=0.9)",
    "Adam": "torch.optim.Adam(parameters, lr=0.01)",
}
_POLICIES = {"everything": "Everything()"}
_SCALES = "(0.1, 4.0, 1.0)[step % 3]"

STANDALONE = """\
{imports}

{pieces}
{program}

expected, plain_error = attempt(program, nullcontext)
session = bs.Session({policy}, min_nbytes={min_nbytes})
got, session_error = attempt(program, lambda: {session})
print("plain:  ", plain_error or "no error")
print("Session:", session_error or "no error")
{check}"""


def code_of(statement: Statement, program: Program, indent: str = "") -> str:
    """The Python code of one statement."""
    kind = KINDS[statement.kind]
    holes = {
        "out": statement.out,
        "leaf": "x[: len(d)]" if len(program.batches) > 1 else "x",
        **dict(statement.constants),
    }
    if kind.each:
        holes["all"] = kind.join.join(_fill(kind.each, {"a": name}) for name in statement.operands)
    else:
        holes |= dict(zip(OPERANDS, statement.operands, strict=False))
    lines = [indent + line for line in _fill(kind.code, holes).split("\n")]
    if kind.is_block:
        inner = [code_of(other, program, indent + "    ") for other in statement.block]
        lines += inner or [indent + "    pass"]
    return "\n".join(lines)


def _fill(code: str, holes: dict[str, object]) -> str:
    return HOLE.sub(lambda hole: str(holes[hole.group(1)]), code)


def program_code(program: Program) -> str:
    """The function ``program(session, seen)``, which appends what can be observed to ``seen``."""
    body = [
        code_of(statement, program, "    ")
        for section in (program.setup, program.before, program.forward, program.backward)
        for statement in section
    ]
    words = set(_WORD.findall("\n".join(body)))
    batch, channels, height, width = max(program.batches), *program.shape[1:]
    declared = [name for name in pieces.DECLARATIONS if name in words]
    around = program.sessions == "around"
    lines = ["def program(session, seen):", f"    torch.manual_seed({program.seed})", "    kept = []"]
    lines += [f"    {name} = []" for name in ("accumulates", "earlier") if name in words]
    lines += [f"    {_fill(pieces.DECLARATIONS[name], {'C': channels, 'W': width})}" for name in declared]
    lines.append(f"    x = torch.randn({batch}, {channels}, {height}, {width}).requires_grad_()")
    modules = [name for name in declared if name != "scale"]
    owned = ["x", *(["scale"] if "scale" in declared else []), *(f"*{name}.parameters()" for name in modules)]
    lines.append(f"    parameters = [{', '.join(owned)}]")
    buffers = [f"*{name}.buffers()" for name in modules if name in ("norm", "statistics")]
    lines.append(f"    optimizer = {_OPTIMIZERS[program.optimizer]}")
    lines += [code_of(statement, program, "    ") for statement in program.setup]
    lines += ["", "    def train(step):"]
    deeper = "        "
    if "d" in words:
        size = (
            f"{program.batches}[step % {len(program.batches)}]" if len(program.batches) > 1 else str(program.batches[0])
        )
        lines.append(f"{deeper}d = torch.randn({size}, {channels}, {height}, {width}) * {_SCALES}")
    elif len(program.batches) > 1:
        lines.append(f"{deeper}d = range({program.batches}[step % {len(program.batches)}])")
    if "variant" in words:
        lines.append(f'{deeper}variant = "{program.pattern}"[step % {len(program.pattern)}]')
    lines += [code_of(statement, program, deeper) for statement in program.before]
    if not around:
        lines.append(f"{deeper}with session():")
    inner = deeper if around else deeper + "    "
    lines += list(_forward(program, inner)) or [f"{inner}pass"]
    rest = inner if program.inside else deeper
    lines += [code_of(statement, program, rest) for statement in program.backward]
    lines.append("")
    loop = "        " if around else "    "
    if around:
        lines.append("    with session():")
    lines += [
        f"{loop}for step in range({program.steps}):",
        f"{loop}    optimizer.zero_grad()",
        *_call_of_train(program, f"{loop}    ", "Interrupted" in words),
    ]
    if "Wrap" in words:
        lines += [f"{loop}    for p in parameters:", f'{loop}        p.grad = getattr(p.grad, "held", p.grad)']
    lines.append(f"{loop}    gradients = [snapshot(p.grad) for p in parameters]")
    lines.append(f"{loop}    optimizer.step()")
    observed = ", ".join(["*parameters", *buffers, "*kept", "torch.get_rng_state()"])
    lines.append(f"{loop}    seen.append((gradients, [snapshot(value) for value in ({observed})]))")
    # Gradients that have graphs of their own (create_graph) and hooks that keep values would hold each other alive.
    lines += ["    kept.clear()", "    optimizer.zero_grad()", *(f"    {name}.zero_grad()" for name in modules)]
    return "\n".join(line for number, line in enumerate(lines) if line or number)


def _call_of_train(program: Program, indent: str, interrupted: bool) -> Iterator[str]:
    """The lines that run one training step."""
    if program.twice:
        letter = f'"{program.pattern}"[step % {len(program.pattern)}]'
        yield f'{indent}for _ in range(2 if {letter} in "{program.twice}" else 1):'
        indent += "    "
    if interrupted:
        yield f"{indent}with suppress(Interrupted):"
        indent += "    "
    yield f"{indent}train(step)"


def _forward(program: Program, indent: str) -> Iterator[str]:
    for statement in program.forward:
        yield code_of(statement, program, indent)
        if statement.kind.startswith("loss"):
            yield f"{indent}seen.append(snapshot({statement.out}))"


def standalone(program: Program, summary: str, kind: str) -> str:
    """A file that shows the failure and needs nothing but torch and backstash.

    Args:
        program: the program that fails.
        summary: one line that says what is wrong, which becomes the first line.
        kind: the kind of failure, of ``execute.FAILURES``.
    """
    code = program_code(program)
    used = _used_pieces(code)
    sources = "\n\n".join(inspect.getsource(getattr(pieces, name)) for name in used)
    text = code + sources
    imports = ["import torch", "import torch.nn.functional as F", "import backstash as bs"]
    for line in (
        "import threading",
        "import numpy as np",
        "from collections.abc import Callable",
        "from contextlib import nullcontext",
        "from contextlib import suppress",
        "from typing import Any",
        "from torch import Tensor",
        "from torch import nn",
        "from torch.overrides import TorchFunctionMode",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.utils._pytree import tree_map_only",
        "from torch.utils.checkpoint import checkpoint",
    ):
        if line.split()[-1] in _WORD.findall(text) or "import nullcontext" in line:
            imports.append(line)
    if program.policy in _POLICIES:
        imports.append("from tests.gradients.gradient_checks import Everything")
    policy = _POLICIES.get(program.policy, f'"{program.policy}"')
    new_session = f"bs.Session({policy}, min_nbytes={program.min_nbytes})"
    check = {
        "left over": "import gc\n\ngc.collect()\nassert session._live.saved == 0 and session._live.nbytes == 0\n"
        'assert session.stores["device"].usage().nbytes == 0\n',
        "plain raises": "assert session_error, 'plain raises, the Session does not'\n",
    }.get(kind, "assert not session_error or plain_error, session_error\nassert got == expected\n")
    body = STANDALONE.format(
        imports="\n".join(sorted(imports)),
        pieces="torch.set_num_threads(1)\n\n\n" + sources + "\n",
        program=code,
        policy=policy,
        min_nbytes=program.min_nbytes,
        session=new_session if program.sessions == "each" else "session",
        check=check,
    )
    return f"# {summary}\n{body}"


def _used_pieces(code: str) -> list[str]:
    """Names of the pieces that the code needs, each after those that it needs itself."""
    visited: set[str] = set()
    used: list[str] = []

    def add(text: str) -> None:
        words = set(_WORD.findall(text))
        for name in _PIECES:
            if name in words and name not in visited:
                visited.add(name)
                add(inspect.getsource(getattr(pieces, name)))
                used.append(name)

    add(code + " attempt snapshot")
    return used
