"""Imports between rooms of the package: its layers, read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from sources import MODULES, SOURCE, dotted, nodes_of, run_nodes_of, tree_of

pytestmark = pytest.mark.cases(10_000)  # they take little, and each file has to keep the rules

COMPILE = sorted((SOURCE / "compile").rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "util", "common", "core", "helpers", "config", "manager"}
PAGES = [Path(__file__).parents[1] / "docs" / name for name in ("understand/architecture.md", "architecture.md")]
HOOKS = {"session", "capture", "forecast", "report", "rewrites", "integrations", "planning", "verifying"}
"""Units that may install hooks: the Session's own, and those that observe somebody's program from outside."""

SAID_WITH_THEIR_MODULE = {
    *("attach", "get", "names", "BackstashCallback"),  # of a framework, of a registry
    *("compare", "plan", "profile", "main"),  # of the command line, beside what a command calls
    *("listen", "unlisten", "admit", "dismiss"),  # to modules, passes, regions; of transforms, of checkpoints
}
"""Names that several modules define, all of which are only ever said together with the module's name."""

# A unit is a module or a package right below backstash; "backstash" is the package itself. Its row names what it may
# import of the others. A row names units of rows above it only, so that no unit is reached again from below. The page
# of the architecture shows the same table.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "bits": set(),
    "torch_internals": set(),
    "accelerator": set(),
    "saved": set(),
    "telling": set(),
    "facade": set(),
    "arguments": set(),
    "graphs": {"errors"},
    "numerics": {"torch_internals"},
    "repeatable": {"accelerator", "graphs", "saved"},
    "proofs": {"accelerator", "graphs", "numerics", "version"},
    "ops": {"errors", "facade", "torch_internals"},
    "interpreter": {"saved", "torch_internals", "ops"},
    "codecs": {"arguments", "bits", "errors", "facade", "saved", "numerics", "proofs", "ops"},
    "formulas": {"saved", "torch_internals", "codecs.direct"},
    "stores": {"arguments", "errors", "facade", "graphs", "torch_internals", "codecs.base"},
    "policies": {"arguments", "errors", "facade", "torch_internals", "saved", "numerics", "formulas", "codecs"},
    "papers": {"errors", "saved", "codecs", "policies"},
    "stash": {
        *("errors", "graphs", "torch_internals", "saved", "formulas", "ops", "interpreter", "codecs", "stores"),
        *("policies.base",),
    },
    "redeem": {"graphs", "torch_internals", "saved", "proofs", "formulas", "ops", "interpreter", "codecs", "stash"},
    "capture": {
        *("accelerator", "errors", "torch_internals", "saved", "repeatable", "formulas", "policies.base"),
        *("interpreter", "stash"),
    },
    "remake": {
        *("accelerator", "errors", "graphs", "repeatable", "torch_internals", "numerics", "saved", "proofs"),
        *("ops", "interpreter", "codecs", "policies.base", "stash", "capture"),
    },
    "gradient_error": {"accelerator", "torch_internals", "stash.ledger"},
    "replay": {
        *("errors", "torch_internals", "numerics", "repeatable", "saved", "interpreter", "ops", "codecs"),
        *("stores", "policies.base", "stash", "remake", "redeem", "capture"),
    },
    "session": {
        *("errors", "graphs", "torch_internals", "saved", "stores", "arguments", "policies", "stash"),
        *("capture", "gradient_error"),
    },
    "rewrites": {
        *("accelerator", "bits", "errors", "torch_internals", "saved", "arguments", "capture.modules"),
        *("session",),
    },
    "verifying": {
        *("accelerator", "arguments", "redeem.install", "capture.checkpoints", "capture.naming"),
        *("capture.passes", "capture.transforms", "errors", "policies", "rewrites.state", "saved", "session"),
        *("stash.html", "torch_internals"),
    },
    "testing": {
        *("accelerator", "bits", "errors", "saved", "ops", "codecs", "stores", "policies.base", "stash.ledger"),
        *("session", "verifying"),
    },
    "planning": {
        *("accelerator", "repeatable", "arguments", "bits", "errors", "graphs", "torch_internals", "saved"),
        *("proofs", "codecs", "stores", "policies", "stash", "remake", "redeem", "capture.leaving"),
        *("capture.modules", "capture.names", "capture.naming", "capture.passes", "gradient_error"),
        *("ops.backends", "ops.cpu.library", "session", "rewrites.chunked_loss", "rewrites.state", "telling"),
    },
    "compile": {
        *("arguments", "errors", "torch_internals", "version", "saved", "formulas", "ops.cpu.library"),
        *("ops.layout", "codecs", "policies", "stash.ledger", "stash.regions", "stash.tables"),
        *("planning.model.budget",),
    },
    "integrations": {
        *("accelerator", "arguments", "errors", "graphs", "numerics", "torch_internals", "policies.base"),
        *("stash.ledger", "capture.leaving", "capture.modules", "session", "planning.run.budgeted", "compile"),
    },
    "forecast": {
        *("errors", "formulas", "torch_internals", "saved", "repeatable", "capture.naming", "planning"),
        *("integrations.launcher", "telling"),
    },
    "report": {
        *("accelerator", "arguments", "errors", "version", "torch_internals", "saved", "interpreter", "ops"),
        *("codecs", "policies", "stash", "capture.passes", "session", "testing", "verifying", "integrations"),
        *("planning.model.budget", "planning.model.trace", "planning.search.schedule"),
        *("planning.model.problem", "planning.model.decision"),
    },
    "demos": {
        *("bits", "errors", "session", "stash.buffers", "stash.tables", "planning.measure.profiling"),
        *("planning.model.plan", "planning.search.largest", "planning.search.planner", "policies.offloading"),
        *("report.meter", "stores"),
    },
    "backstash": {
        *("errors", "version", "saved", "facade", "codecs", "stores", "policies", "papers", "redeem.install"),
        *("remake.remaking", "replay.replaying", "session", "planning.run.hidden"),
    },
    "cli": {
        *("errors", "version", "torch_internals", "policies", "stash.ledger", "stash.tables", "compile"),
        *("integrations", "planning", "report", "verifying", "telling", "demos", "forecast"),
    },
    "__main__": {"cli"},
}


_FAMILY = {"arguments", "saved", "codecs", "policies.base", "policies.exact"}

# The same for the modules of policies/, where an entry with a dot is a module beside them.
POLICIES = {
    "": {"facade", "policies"},
    "actions": {"saved", "codecs"},
    "base": {"arguments", "saved", "formulas", "torch_internals", "policies.actions"},
    "adapted": {"saved", "policies.actions", "policies.base"},
    "rules": {"saved", "policies.adapted", "policies.base"},
    "registry": {"errors", "policies.adapted", "policies.base"},
    "exact": {"arguments", "saved", "numerics", "codecs", "policies.base"},
    "quantizing": _FAMILY,
    "slicing": _FAMILY,
    "offloading": _FAMILY,
}

PUBLIC = (
    *("codecs", "codecs.base", "codecs.numbers", "codecs.sz", "policies", "policies.base", "stores", "saved", "errors"),
    *("ops", "ops.cpu.library", "ops.cpu.planes", "ops.triton.launching", "ops.triton.elements"),
)
"""Modules whose public names may be used outside of the package, as those of ``backstash`` itself: see papers/."""

ROOMS = ("graph", "forms", "budget", "inductor")
"""The rooms of compile/, of which each may import those before it, for type annotations as well."""


# The same for the rooms of planning/, of which each may import those above it that its row names.
PLANNING: dict[str, set[str]] = {
    "model": set(),
    "measure": {"model"},
    "search": {"model"},
    "run": {"model", "measure", "search"},
}


def public_names(name: str) -> set[str]:
    """The names in ``__all__`` of a module of the package; of one without, what it defines without an underscore."""
    path = SOURCE.joinpath(*name.split(".")) if name else SOURCE
    body = tree_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).body
    assigned = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    if "__all__" in assigned:
        return set(ast.literal_eval(assigned["__all__"]))
    defined = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))} | set(assigned)
    return {found for found in defined if not found.startswith("_")}


def unit(path: Path) -> str:
    """``codecs`` for src/backstash/codecs/zvc/codec.py, ``backstash`` for the package itself."""
    first = path.relative_to(SOURCE).parts[0]
    return "backstash" if first == "__init__.py" else first.removesuffix(".py")


def module(path: Path) -> str:
    """``codecs.zvc`` for src/backstash/codecs/zvc/codec.py, ``codecs`` for src/backstash/codecs/__init__.py."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, anywhere: bool = True, annotations: bool = False) -> tuple[str, ...]:
    """The modules of the package that a file imports, and the names that it imports from them, without ``backstash.``.

    Args:
        path: the file.
        anywhere: whether imports inside functions count as well.
        annotations: whether imports for type annotations alone count as well, which needs ``anywhere``.
    """
    nodes = nodes_of(path) if annotations else run_nodes_of(path)
    found: list[str] = []
    for node in nodes if anywhere else tree_of(path).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [name.removeprefix("backstash.") for name in names if name.split(".")[0] == "backstash"]
    return tuple(found)


def reached(paths: Iterable[Path], anywhere: bool, annotations: bool = False) -> dict[str, set[str]]:
    """For each of these modules those of them that it imports, and that these import, and so on.

    Args:
        paths: the modules' files.
        anywhere, annotations: as for :func:`imports`.
    """
    of_path = {path: module(path) for path in paths}
    names = set(of_path.values()) - {""}
    direct = {}
    for path, name in of_path.items():
        found = imports(path, anywhere, annotations)
        direct[name] = {name if name in names else name.rpartition(".")[0] for name in found} & names
    everything: dict[str, set[str]] = {}
    for start in direct:
        waiting, seen = list(direct[start]), set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += direct[name]
        everything[start] = seen
    return everything


def within(name: str, allowed: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in allowed)


def identifier(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_layers(path: Path) -> None:
    here = unit(path)
    assert here in ALLOWED, f"{here} has no row in the table of this test"
    found = {name for name in imports(path) if name.split(".")[0] != here}
    assert {name for name in found if not within(name, ALLOWED[here])} == set()


@pytest.mark.parametrize("path", sorted((SOURCE / "policies").rglob("*.py")), ids=identifier)
def test_layers_of_policies(path: Path) -> None:
    first = path.relative_to(SOURCE / "policies").parts[0].removesuffix(".py")
    family = "" if first == "__init__" else first
    beside = {name for name in imports(path) if not within(name, {f"policies.{family}"})}
    assert {name for name in beside if not within(name, POLICIES[family])} == set()


@pytest.mark.parametrize("path", sorted((SOURCE / "papers").rglob("*.py")), ids=identifier)
def test_a_paper_imports_public_names_and_its_own(path: Path) -> None:
    room = path.relative_to(SOURCE / "papers").parts[0]
    own = {"papers"} if room == "__init__.py" else {f"papers.{room}"}
    allowed = {f"{name}.{each}".removeprefix(".") for name in ("", *PUBLIC) for each in public_names(name)}
    assert {name for name in imports(path, annotations=True) if not within(name, own)} <= allowed


def test_nothing_below_imports_papers() -> None:
    found = {module(path) for path in MODULES if "papers" in {name.split(".")[0] for name in imports(path)}}
    assert {name for name in found if not within(name, {"papers"})} == {""}, "the package itself alone"


@pytest.mark.parametrize("path", sorted((SOURCE / "planning").rglob("*.py")), ids=identifier)
def test_layers_of_planning(path: Path) -> None:
    room = path.relative_to(SOURCE / "planning").parts[0]
    allowed = {f"planning.{each}" for each in {room} | PLANNING.get(room, set())}
    beside = {name for name in imports(path, annotations=True) if within(name, {"planning"})}
    assert {name for name in beside if not within(name, allowed)} == set()


def test_every_row_of_the_table_is_a_unit_and_is_needed() -> None:
    assert set(ALLOWED) == {unit(path) for path in MODULES}
    for row, allowed in ALLOWED.items():
        found = {name for path in MODULES if unit(path) == row for name in imports(path)}
        assert {name for name in allowed if not any(within(other, {name}) for other in found)} == set(), row


def test_no_unit_is_reached_again_from_below() -> None:
    above: set[str] = set()
    for row, allowed in ALLOWED.items():
        assert {name.split(".")[0] for name in allowed} <= above, row
        above.add(row)


def test_no_module_is_imported_again_by_what_it_imports() -> None:
    found = reached(MODULES, anywhere=False)
    assert [name for name, seen in found.items() if name in seen] == []


@pytest.mark.parametrize("path", COMPILE, ids=identifier)
def test_a_room_of_compile_imports_those_before_it(path: Path) -> None:
    _, *rest = module(path).split(".")
    found = {name for name in imports(path, annotations=True) if within(name, {"compile"})}
    if not rest:  # the package itself has the names that users call
        allowed = {"inductor.options"}
    elif len(rest) == 1:  # a room itself has none
        allowed = set()
    else:
        allowed = set(ROOMS[: ROOMS.index(rest[0]) + 1])
    assert {name for name in found if not within(name, {f"compile.{room}" for room in allowed})} == set()


def test_compile_has_these_rooms_and_no_other() -> None:
    assert {path.parent.name for path in COMPILE} == {"compile", *ROOMS}
    assert [path.name for path in COMPILE if path.parent.name == "compile"] == ["__init__.py"]


def test_no_module_of_compile_is_imported_again_even_for_annotations() -> None:
    found = reached(COMPILE, anywhere=True, annotations=True)
    assert [name for name, seen in found.items() if name in seen] == []
    assert found["compile"] > {"compile.inductor.partitioner", "compile.graph.emit"}


def test_no_module_of_planning_is_imported_again_even_for_annotations() -> None:
    found = reached(sorted((SOURCE / "planning").rglob("*.py")), anywhere=True, annotations=True)
    assert [name for name, seen in found.items() if name in seen] == []


def test_the_page_of_the_architecture_shows_the_same_table() -> None:
    page = next(page for page in PAGES if page.exists())
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    (table,) = [block for block in blocks if block.startswith("errors:")]
    rows = [line.partition(":") for line in table.splitlines()]
    assert [row for row, _, _ in rows] == list(ALLOWED)
    for row, _, allowed in rows:
        assert {name.strip() for name in allowed.split(",")} - {""} == ALLOWED[row], row


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_private_names_of_torch_are_in_one_file(path: Path) -> None:
    """Private members of tensors and nodes are allowed; private names of torch's own modules are not."""
    if unit(path) == "torch_internals":
        return
    for node in run_nodes_of(path):
        names = []
        if isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            private = [part for part in rest if part.startswith("_") and not part.startswith("__")]
            assert first != "torch" or not private, f"{path} line {getattr(node, 'lineno', '?')}: {name}"


def test_studies_stand_on_benchmarks_and_these_on_the_package() -> None:
    root = SOURCE.parents[1]
    below = {"bench": {"studies"}, "tests/networks": {"studies", "bench"}, "src": {"studies", "bench", "tests"}}
    for folder, forbidden in below.items():
        for path in (root / folder).rglob("*.py"):
            for node in nodes_of(path):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found = {name.split(".")[0] for name in names} & forbidden
                assert not found, f"{path} imports {found}"


def test_a_codec_knows_of_no_store_session_or_policy() -> None:
    for path in (SOURCE / "codecs").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {
            "stores",
            "session",
            "policies.base",
            "policies",
        }, path


def test_a_store_never_decodes() -> None:
    for path in (SOURCE / "stores").glob("*.py"):
        assert not [name for name in imports(path) if within(name, {"codecs"}) and not within(name, {"codecs.base"})]
        called = [node for node in nodes_of(path) if isinstance(node, ast.Attribute)]
        assert not [node for node in called if node.attr in ("encode", "decode")], path


def test_hooks_are_installed_by_the_session_and_capture_alone() -> None:
    texts = ("saved_tensors_hooks(", "register_module_forward_hook", "register_module_forward_pre_hook")
    for path in MODULES:
        if unit(path) not in HOOKS and module(path) != "stash.repeating":  # which counts what a function saves
            assert not [text for text in texts if text in path.read_text()], path


def test_no_two_public_definitions_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        parts = module(path).split(".")
        if not {"reference", "cpu", "triton"} & set(parts) and parts[-1] != "cuda":  # which have the same kernels
            for node in tree_of(path).body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(module(path))
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert shared.keys() == SAID_WITH_THEIR_MODULE, shared


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_names_say_what_is_inside(path: Path) -> None:
    parts = {part.removesuffix(".py") for part in path.relative_to(SOURCE).parts}
    assert not parts & FORBIDDEN_NAMES


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_a_module_says_at_once_what_a_reader_finds(path: Path) -> None:
    first = (ast.get_docstring(tree_of(path)) or "").partition("\n")[0]
    assert first.endswith((".", ":")) and not re.match(r"(What|Which|How|Whether|Who|When|Where|Why|By how)\b", first)


def test_every_package_has_an_init() -> None:
    for folder in {path.parent for path in MODULES}:
        assert (folder / "__init__.py").exists(), folder
