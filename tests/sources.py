"""The sources of the package, each of which is read and parsed once for all tests of a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "backstash"
MODULES = sorted(SOURCE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, parsed. The tree is everybody's: nobody may change it."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(tree_of(path)))


@cache
def run_nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a file without those that are for type annotations alone."""
    unseen: set[ast.AST] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            unseen.update(inner for statement in node.body for inner in ast.walk(statement))
    return tuple(node for node in nodes_of(path) if node not in unseen)


def dotted(node: ast.AST) -> str:
    """``torch.nn.Module`` of the node that is written so; an empty string of any other."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before else ""
