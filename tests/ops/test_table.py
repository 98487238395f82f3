"""Every row of the table of kernels keeps its promises, and CONTRIBUTING.md describes a new row truly."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from native_checks import reference
from torch.library import opcheck

from backstash.ops.backends import FILES, Kernels, has_own_kernel, kernels, serving
from backstash.ops.cpu import library
from backstash.ops.layout import ZVC_CHUNK
from backstash.ops.registration import kernel
from backstash.ops.table import TABLE, check_flat

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
BACKENDS = {"cpu", "triton"}
UTILITIES = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
REGISTERED = [name for name, row in TABLE.items() if row.schema is not None]
INTEGERS_ONLY = ("narrow_encode", "narrow_decode", "window_encode", "window_decode")
FLOAT32_ONLY = ("affine", "batch_norm_pixels")


def arguments(kernel: str, n: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns arguments of the kernel for ``n`` elements, which the tests of its family have."""
    family = importlib.import_module(f"test_{TABLE[kernel].family}")
    examples: dict[str, tuple[Any, ...]] = family.examples(n, dtype)
    return examples[kernel]


def source_of(module: str) -> Path | None:
    """Returns the file of a module, or None if there is none; a package's is its ``__init__``."""
    path = SOURCE.joinpath(*module.split("."))
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return files[0] if files else None


def built(backend: str) -> bool:
    return library.available() if backend == "native" else find_spec("triton") is not None


@pytest.mark.cases(1000)
@pytest.mark.parametrize("kernel", TABLE)
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_backend_has_the_kernel_or_the_row_says_why_not(backend: str, kernel: str) -> None:
    row = TABLE[kernel]
    path = source_of(f"{row.package}.{FILES[backend]}")
    there = path is not None and f"\ndef {kernel}(" in path.read_text()
    assert there != (backend in row.without)
    assert row.without.get(backend, "a reason").strip()
    assert set(row.without) < {"native", "triton"}, "only the reference has it"
    if there and built(backend):
        function = getattr(kernels(backend), kernel)
        assert function.__module__ == f"{row.package}.{FILES[backend]}"
        assert list(inspect.signature(function).parameters) == list(inspect.signature(row.reference).parameters)
    elif built(backend) and not kernels(backend).has(kernel):
        assert getattr(kernels(backend), kernel) is row.reference


@pytest.mark.cases(1000)
@pytest.mark.parametrize("kernel", TABLE)
def test_every_kernel_has_examples_and_a_docstring(kernel: str) -> None:
    row = TABLE[kernel]
    assert row.reference.__doc__
    assert row.reference.__module__ == f"{row.package}.reference"
    result = row.reference(*arguments(kernel, 16, torch.float32))
    assert (result is None) == (row.schema is not None and row.schema.endswith("-> ()"))


def test_a_family_is_a_folder_whose_files_have_the_names_of_backends() -> None:
    families = {row.package: row.family for row in TABLE.values()}
    assert len(set(families.values())) == len(families), "a test file has the name of one family"
    for package in families:
        assert source_of(f"{package}.reference") is not None, package
    found = {
        ".".join(path.relative_to(SOURCE).parent.parts)
        for room in ("codecs", "ops")
        for path in (SOURCE / "backstash" / room).rglob("reference.py")
    }
    assert found == set(families), "a folder with a reference is a family, and is imported with backstash"
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).with_suffix("").parts
        module = module[:-1] if module[-1] == "__init__" else module
        if module[1:2] in (("codecs",), ("ops",)) and module[-1] in BACKENDS and module[-2:-1] != ("ops",):
            assert ".".join(module[:-1]) in families, path
    assert {f"test_{family}.py" for family in families.values()} <= {
        path.name for path in Path(__file__).parent.glob("*.py")
    }


def test_a_kernel_that_is_added_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(x: torch.Tensor) -> int:
        """Counts elements."""
        return x.numel()

    later.__module__ = "somebody.else.reference"
    served = Kernels("native")
    with pytest.raises(AttributeError, match="no kernel is called 'later'"):
        served.later  # noqa: B018
    with monkeypatch.context() as patch:
        patch.setitem(TABLE, "later", None)  # which is taken out again
        kernel(None, without={"native": "it is one line", "triton": "it is one line"})(later)
        assert served.later is later and vars(served)["later"] is later
        assert TABLE["later"].package == "somebody.else" and TABLE["later"].family == "else"


def test_a_fallback_is_for_callers_that_ask_first() -> None:
    for name, row in TABLE.items():
        text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "reference.py")
        assert row.fallback is None or re.search(rf"has_own_kernel\(\"{name.rsplit('_', 1)[0]}", text), name


def test_which_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving("meta").backend == "reference"
    assert not has_own_kernel("affine", "meta")
    assert has_own_kernel("affine", "cpu") == (serving("cpu").backend == "native")
    with pytest.raises(AttributeError, match="no kernel is called 'window_shop'"):
        Kernels("reference").window_shop  # noqa: B018


@pytest.mark.cases(20)
@pytest.mark.parametrize("n", [16, 0])
@pytest.mark.parametrize("kernel", REGISTERED)
def test_opcheck(kernel: str, n: int) -> None:
    if n or kernel not in FLOAT32_ONLY:  # a batch norm of no images has no layout
        opcheck(_op(kernel).default, arguments(kernel, n, torch.float32), test_utils=UTILITIES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kernel", [kernel for kernel in REGISTERED if kernel not in (*INTEGERS_ONLY, *FLOAT32_ONLY)])
def test_opcheck_of_other_dtypes(kernel: str, dtype: torch.dtype) -> None:
    opcheck(_op(kernel).default, arguments(kernel, ZVC_CHUNK + 4, dtype), test_utils=UTILITIES[:2])


@pytest.mark.parametrize("kernel", [kernel for kernel in REGISTERED if TABLE[kernel].check is check_flat])
def test_what_is_not_flat_is_refused(kernel: str) -> None:
    given = arguments(kernel, 16, torch.float32)
    first = given[0]
    for wrong in (first.view(1, -1), first.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match=f"backstash::{kernel} asked for a flat contiguous tensor, got shape"):
            _op(kernel)(wrong, *given[1:])


@pytest.mark.parametrize("kernel", FLOAT32_ONLY)
def test_images_of_another_layout_or_dtype_are_refused(kernel: str) -> None:
    x, *given = arguments(kernel, 16, torch.float32)
    vectors = [i for i, tensor in enumerate(given) if isinstance(tensor, torch.Tensor) and tensor.dim() == 1]
    replaced = [*given]
    replaced[vectors[0]] = given[vectors[0]].double()
    for wrong in ((x.double(), *given), (x[:, ::2], *given), (x[0], *given), (x, *replaced)):
        with pytest.raises(ValueError, match=f"backstash::{kernel} asked for float32 images"):
            _op(kernel)(*wrong)


def _op(kernel: str) -> Any:
    return getattr(torch.ops.backstash, kernel)


def test_adding_a_codec_with_a_kernel_takes_the_files_that_are_named() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("## Add a codec with a kernel\n")[2].partition("\n## ")[0]
    items = re.findall(r"^\d+\. (.*)", section, re.MULTILINE)
    paths = [path for item in items for path in re.findall(r"`((?:src|native|tests)/[^`]*)`", item)]
    folder = "src/backstash/codecs/<family>/"
    assert len(items) == len(paths) <= 7
    assert [path for path in paths if not path.startswith((folder, "native/", "tests/"))] == []
    for family in ("exponents", "szp"):
        assert all(list(ROOT.glob(path.replace("<family>", family))) for path in paths)


def test_references_are_called_by_their_rows() -> None:
    rows: dict[str, Callable[..., Any]] = {name: row.reference for name, row in TABLE.items()}
    assert all(getattr(reference, name) is function for name, function in rows.items())
