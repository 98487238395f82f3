"""Who may import whom: the package's layers, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "backstash"
MODULES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "util", "common", "core", "helpers", "config", "manager"}
COMMAND_LINE = {"__main__", "cli", "commands"}
OUTER = {"report", "integrations", "testing", "rewrites", "planning", "control"} | COMMAND_LINE

# A unit is a module or a package right below backstash. What may be imported beside itself:
ALLOWED = {
    "errors": set(),
    "saved": set(),
    "effects": {"saved"},
    "needs": {"effects", "saved"},
    "ops": {"errors", "saved"},
    "codecs": {"errors", "saved", "ops"},
    "stores": {"errors", "saved", "codecs.base"},
    "policy": {"errors", "saved", "codecs"},
    "policies_offload": {"saved", "codecs", "policy"},
    "policies": {"errors", "saved", "codecs", "policy", "policies_offload"},
    "torch_internals": set(),
    "stash": {
        "errors",
        "saved",
        "needs",
        "ops",
        "codecs",
        "stores",
        "policy",
        "torch_internals",
    },
    "proofs": {"torch_internals"},
    "backward": {"saved", "ops", "codecs", "proofs", "torch_internals"},
    "capture": {"saved", "stash", "torch_internals"},
}


def unit(path: Path) -> str:
    """``codecs`` for src/backstash/codecs/zvc.py, ``""`` for the package itself."""
    first = path.relative_to(SOURCE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Modules of the package that ``path`` imports anywhere, without ``backstash.``; not those for types only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("backstash.") for name in names if name.split(".")[0] == "backstash")


def within(name: str, allowed: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in allowed)


def identifier(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_layers(path: Path) -> None:
    here = unit(path)
    found = {name for name in imports(path) if name.split(".")[0] != here}
    if here in ALLOWED:
        assert {name for name in found if not within(name, ALLOWED[here])} == set()
    elif here and here not in OUTER:
        assert {name for name in found if name.split(".")[0] in OUTER} == set()


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_only_the_command_line_imports_the_command_line(path: Path) -> None:
    if unit(path) not in COMMAND_LINE:
        assert not {name for name in imports(path) if name.split(".")[0] in COMMAND_LINE}


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_planning_measures_nothing_and_only_reports_read_it(path: Path) -> None:
    found = {name.split(".")[0] for name in imports(path)}
    if unit(path) == "planning":
        assert not found & {"report", "integrations", "testing", "control"}
    elif unit(path) not in {"", "report"} | COMMAND_LINE:
        assert "planning" not in found


def test_a_codec_knows_of_no_store_session_or_policy() -> None:
    for path in (SOURCE / "codecs").glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"stores", "session", "policy", "policies"}, path


def test_a_store_never_decodes() -> None:
    for path in (SOURCE / "stores").glob("*.py"):
        assert not [name for name in imports(path) if within(name, {"codecs"}) and not within(name, {"codecs.base"})]
        called = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        assert not [node for node in called if node.attr in ("encode", "decode")], path


def test_hooks_are_installed_by_the_session_and_capture_alone() -> None:
    texts = ("saved_tensors_hooks(", "register_module_forward_hook", "register_module_forward_pre_hook")
    for path in MODULES:
        if unit(path) not in ("session", "capture", *OUTER):
            assert not [text for text in texts if text in path.read_text()], path


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_names_say_what_is_inside(path: Path) -> None:
    parts = {part.removesuffix(".py") for part in path.relative_to(SOURCE).parts}
    assert not parts & FORBIDDEN_NAMES


def test_every_package_has_an_init() -> None:
    for folder in {path.parent for path in MODULES}:
        assert (folder / "__init__.py").exists(), folder
