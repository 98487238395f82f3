"""Packages that import their public names when these are asked for first."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from fresh import run_fresh

import backstash
from backstash import codecs, ops, policies, stores

PACKAGES = [backstash, codecs, ops, policies, stores]
PUBLISHED = {"backstash.policies": ("backstash.papers", "backstash.planning")}
"""Units that put names of theirs into a package below them (``policies.publish``)."""

ASKED_BY_IPYTHON = {"load_ipython_extension", "unload_ipython_extension"}


def imported_for_annotations(package: ModuleType) -> dict[str, str]:
    """By each name that a package imports below ``if TYPE_CHECKING`` from itself, the module that it is from."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    lines = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    found = {alias.name: node.module or "" for node in lines for alias in node.names}
    return {name: home for name, home in found.items() if not home.startswith(PUBLISHED.get(package.__name__, ()))}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_are_told_what_the_table_says(package: ModuleType) -> None:
    public = package._HOMES.keys() - ASKED_BY_IPYTHON
    homes = {name: f"{package.__name__}.{package._HOMES[name]}" for name in public}
    assert homes == imported_for_annotations(package)
    assert homes.keys() <= set(package.__all__)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_what_its_module_defines(package: ModuleType) -> None:
    for name, home in package._HOMES.items():
        assert getattr(package, name) is getattr(importlib.import_module(f"{package.__name__}.{home}"), name)
    assert set(package.__all__) <= set(dir(package))
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_no_module_has_the_name_of_a_member(package: ModuleType) -> None:
    """Importing it would put the module in the member's place."""
    assert package.__file__ is not None
    modules = {path.stem for path in Path(package.__file__).parent.iterdir()}
    assert not modules & package._HOMES.keys()


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'backstash.codecs' has no attribute 'Huffman'"):
        _ = codecs.Huffman  # type: ignore[attr-defined]
    assert not hasattr(codecs, "__wrapped__")


def test_the_ids_of_codecs_are_known_before_their_classes_are_imported() -> None:
    classes = [getattr(codecs, name) for name in codecs._HOMES]
    assert {codec.id: codec for codec in classes} == {codec.__name__.lower(): codec for codec in classes}
    assert set(codecs.names()) >= {codec.id for codec in classes}


def run(script: str) -> None:
    """Runs a script of Python, in which nothing of the package is imported yet."""
    ran = run_fresh(script)
    assert ran.returncode == 0, ran.stderr


ALONE = f"""
import sys, types
package = types.ModuleType("backstash")  # whose own file would import everything
package.__path__ = [{str(Path(codecs.__file__).parents[1])!r}]
sys.modules["backstash"] = package
"""


def test_only_what_is_used_is_imported() -> None:
    run(
        ALONE
        + """
from backstash import codecs
known = codecs.names()
assert "sz" in known and "backstash.codecs.sz" not in sys.modules
assert codecs.get("zvc").id == "zvc" and "backstash.codecs.sz" not in sys.modules
assert codecs.names() == known
assert codecs.sz.KeptModel.__module__ == "backstash.codecs.sz.codec"
"""
    )


def test_an_id_is_taken_before_its_class_is_imported() -> None:
    run(
        ALONE
        + """
from backstash import codecs
class Other:
    id = "csr"
try:
    codecs.register_codec(Other)
except ValueError as error:
    assert "but that is Csr. Choose another id" in str(error), error
else:
    raise AssertionError
assert codecs.register_codec(codecs.Csr) is codecs.Csr
"""
    )


def test_a_star_import_has_every_public_name() -> None:
    run("from backstash.codecs import *; from backstash.policies import *; Zvc(), Csr(), Lossless(), offload()")


def test_nothing_is_imported_for_names_that_nobody_has_asked_for() -> None:
    """Among it sympy, which a compiler of graphs needs and which takes long to import."""
    run(
        """
import sys, backstash
rooms = ("compile", "integrations", "report", "verifying", "planning.search", "planning.run.budgeted")
assert not {"sympy", *(f"backstash.{room}" for room in rooms)} & sys.modules.keys()
assert backstash.plan.__module__ == "backstash.planning.search.planner"
"""
    )


def test_the_whole_package_knows_every_kernel() -> None:
    run("import torch, backstash; torch.ops.backstash.rle_encode, torch.ops.backstash.zvc_encode")
