"""Every row of formulas.FORMULAS that reads less than the value is proven: the gradients have the same bits.

Each case builds an op that hits one row, on values chosen to go wrong: NaN of both signs and with a payload,
infinities, both zeros, subnormals, the bounds and their neighbours, in numbers that fill vector registers and leave a
tail. It checks that the row was used, and that the gradients are the bits that plain torch computes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, difference, differences
from needs_cases import CASES, FLOATS, IMAGE, LAST, LAST_3D, VOLUME, Case, Key, values
from session_checks import Always
from torch import Tensor

from backstash import Need, Policy, Session, Stash
from backstash.codecs import shape
from backstash.formulas import FORMULAS
from backstash.saved import Mask, TensorSpec, Test
from backstash.stash import decode
from backstash.stash.ledger import Entry
from backstash.torch_internals import clamp_passes_bounds

CODECS = {Need.SHAPE: "shape", Need.SIGN: "bitmask", Need.INDEX: "narrow"}
ROOT = Path(__file__).parents[2]
NARROW = {key: formula for key, formula in FORMULAS.items() if formula.need is not Need.VALUE}
"""The rows that read less than the value."""


# -- the proof -------------------------------------------------------------------------------------------------------


def run(case: Case, dtype: torch.dtype, session: Session | None, seed: int, nan: bool = True) -> list[Tensor]:
    """The gradient of the case's input, once with ones and once with special numbers coming in from above."""
    leaf = values(case.shape, dtype, case.bounds, seed, nan).to(memory_format=case.layout).requires_grad_()
    torch.manual_seed(seed)
    with session or nullcontext():
        output = case.call(leaf.clone()).clone()
    found = []
    for special_cotangent in (False, True):
        shape = tuple(output.shape)
        cotangent = values(shape, dtype, (), seed + 1) if special_cotangent else torch.ones(shape, dtype=dtype)
        (gradient,) = torch.autograd.grad(output, leaf, cotangent, retain_graph=not special_cotangent)
        found.append(gradient)
    return found


def row_of(session: Session, key: Key) -> Entry:
    """The report's row of what ``key`` names."""
    op, role = key
    rows = [row for row in session.report().rows if row.key == f"/{op}#0:{role}"]
    assert len(rows) == 1, [row.key for row in session.report().rows]
    return rows[0]


by_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.cases(120)
@by_case
def test_row(case: Case) -> None:
    """The row was used, and the gradients are the same bits, for every dtype that torch has a kernel for."""
    need = FORMULAS[case.key].need
    nan = need is not Need.SIGN  # see test_row_with_nan
    for dtype in case.dtypes:
        expected = run(case, dtype, None, 1, nan)
        session = Session("lossless", min_nbytes=0)
        got = run(case, dtype, session, 1, nan)
        assert not differences(expected, got), dtype
        row = row_of(session, case.key)
        if leaves_it_to_value(case, dtype):
            assert row.need == "VALUE", dtype
        else:
            assert (row.need, row.codec) == (need.name, CODECS[need]), (dtype, row.reason)


@pytest.mark.cases(60)
@pytest.mark.parametrize("case", [case for case in CASES if FORMULAS[case.key].need is Need.SIGN], ids=str)
def test_row_with_nan(case: Case) -> None:
    """Here a value need not be encoded, but the gradients must be the same bits.

    Note: [NaN by position]
        On CPU, torch's backward of hardtanh, hardshrink and softshrink treats a NaN as outside in its vector loop, and
        as inside (shrinks: as beyond the edge) in the loop over the tail, so that one bit per element cannot tell.
    """
    for dtype in FLOATS:
        expected = run(case, dtype, None, seed=2)
        for policy in ("lossless", Everything()):
            got = run(case, dtype, Session(policy, min_nbytes=0), seed=2)
            assert not differences(expected, got), (dtype, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lossless", "cdma", Always(Stash("zvc"))], ids=["lossless", "cdma", "zvc"])
def test_signs_on_devices_whose_kernels_take_bools(policy: str | Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: what reads a stand-in for relu's result is given a bool, what reads any other one is not."""
    monkeypatch.setattr(decode, "COPIES_BOOLS", frozenset())
    for case in CASES:
        if FORMULAS[case.key].need is not Need.SIGN:
            continue
        for dtype in case.dtypes:
            expected = run(case, dtype, None, 1, nan=False)
            got = run(case, dtype, Session(policy, min_nbytes=0), 1, nan=False)
            assert not differences(expected, got), (case, dtype)


def leaves_it_to_value(case: Case, dtype: torch.dtype) -> bool:
    """Whether the row does not hold: a bound that ``dtype`` does not have, or one that no or every number is beyond."""
    if not case.bounds:
        return False
    if not all(float(torch.tensor(bound, dtype=dtype)) == bound for bound in case.bounds):
        return True
    infinite = [math.isinf(bound) for bound in case.bounds]
    if case.op in ("Clamp", "ClampMin", "ClampMax"):
        has_upper_alone = case.op == "ClampMax" or case.name.startswith("max ")
        return all(infinite) or (has_upper_alone and not clamp_passes_bounds)
    if case.op == "Threshold":
        return case.bounds[0] == math.inf
    return any(infinite)


@pytest.mark.cases(60)
@pytest.mark.parametrize("garbage", [math.nan, -1e30], ids=["NaN", "large"])
@pytest.mark.parametrize("case", [case for case in CASES if FORMULAS[case.key].need is Need.SHAPE], ids=str)
def test_shape_is_enough(case: Case, garbage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients do not depend on the contents of the stand-in's memory."""
    made = []

    def filled(spec: TensorSpec) -> Tensor:
        made.append(torch.full([], 0))
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).fill_(garbage)

    monkeypatch.setattr(shape, "stand_in", filled)
    expected = run(case, torch.float32, None, seed=3)
    got = run(case, torch.float32, Session("lossless", min_nbytes=0), seed=3)
    assert made, "the stand-in was not asked for"
    assert not differences(expected, got)


WINDOWS: dict[str, tuple[dict[str, Any], int]] = {
    "2": ({"kernel_size": 2}, 2),
    "3 overlapping": ({"kernel_size": 3, "stride": 2, "padding": 1}, 3),
    "3 ceil": ({"kernel_size": 3, "stride": 3, "padding": 1, "ceil_mode": True}, 3),
    "2 dilated": ({"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 3}, 2),
}


@pytest.mark.parametrize("fill", [None, -math.inf, math.nan], ids=["numbers", "-inf", "NaN"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize(("options", "kernel"), WINDOWS.values(), ids=WINDOWS)
def test_pool_indices_are_positions_in_their_window(
    options: dict[str, Any], kernel: int, d: int, last: bool, fill: float | None
) -> None:
    """Where nothing in a window is greater than -inf, max_pool3d may point out of it: then they are plain integers."""
    shape = IMAGE if d == 2 else VOLUME
    pool = getattr(F, f"max_pool{d}d")
    layout = (LAST if d == 2 else LAST_3D) if last else torch.contiguous_format
    x = torch.randn(shape) if fill is None else torch.full(shape, fill)
    x = x.contiguous(memory_format=layout).requires_grad_()
    cotangent = torch.randn_like(pool(x, **options))
    expected = torch.autograd.grad(pool(x, **options), x, cotangent)
    with Session("lossless", min_nbytes=0) as session:
        output = pool(x.clone(), **options).clone()
    assert not differences(expected, torch.autograd.grad(output, x, cotangent))
    row = row_of(session, (f"MaxPool{d}DWithIndices", "result1"))
    assert row.codec == "narrow"
    bits = (kernel**d - 1).bit_length()
    in_windows = row.stash_nbytes == (cotangent.numel() * bits + 7) // 8
    assert in_windows or (fill == -math.inf and d == 3)


def test_stand_in_has_the_layout_and_no_memory() -> None:
    for x in (torch.empty(3, 5, 67), torch.empty(2, 3, 4, 5).contiguous(memory_format=LAST), torch.empty(0, 3)):
        for dtype in (*FLOATS, torch.int64, torch.bool, torch.complex64):
            spec = TensorSpec.of(x.to(dtype))
            assert TensorSpec.of(shape.stand_in(spec)) == spec
    expanded = TensorSpec.of(torch.empty(3, 1).expand(3, 1000))
    assert TensorSpec.of(shape.stand_in(expanded)) == expanded


def test_every_row_has_a_case() -> None:
    assert {case.key for case in CASES} == set(NARROW)


def test_every_sign_row_was_really_used_in_every_dtype() -> None:
    """At least one case of each row uses the row in each dtype."""
    for key, row in NARROW.items():
        if row.need is not Need.SIGN or (key[0] == "ClampMax" and not clamp_passes_bounds):
            continue  # where torch's clamp does not pass a gradient at its bound, no mask says "below a bound"
        for dtype in FLOATS:
            assert any(case.key == key and not leaves_it_to_value(case, dtype) for case in CASES), (key, dtype)


# -- what is not in the table ----------------------------------------------------------------------------------------


def test_without_its_row_a_tensor_needs_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (("Relu", "result"), ("AvgPool2D", "self"), ("MaxPool2DWithIndices", "result1")):
        case = next(case for case in CASES if case.key == key)
        expected = run(case, torch.float32, None, seed=4)
        with monkeypatch.context() as patch:
            patch.delitem(FORMULAS, key)
            session = Session("lossless", min_nbytes=0)
            got = run(case, torch.float32, session, seed=4)
        assert row_of(session, key).need == "VALUE"
        assert not differences(expected, got)


UNLISTED: dict[str, Callable[[Tensor], Tensor]] = {
    "Sin:self": torch.sin,
    "Elu:result": lambda x: F.elu_(x * 1),
    "Hardswish:self": F.hardswish,
    "Clamp:self": lambda x: torch.clamp(x, torch.full((67,), -0.5), torch.full((67,), 0.5)),
    "ClampMin:self": lambda x: torch.clamp_min(x, torch.full((67,), -0.5)),
    "ClampMax:self": lambda x: torch.clamp_max(x, torch.full((67,), 0.5)),
    "Maximum:self": lambda x: torch.maximum(x, torch.zeros(67)),
}


@pytest.mark.parametrize(("key", "call"), UNLISTED.items(), ids=UNLISTED)
def test_what_is_not_listed_needs_its_value(key: str, call: Callable[[Tensor], Tensor]) -> None:
    """Overloads too: clamping to tensors is another formula, although its node has the same name."""
    op, role = key.split(":")
    case = Case(op, role, "unlisted", call, (67,))
    expected = run(case, torch.float32, None, seed=5)
    session = Session(Everything(), min_nbytes=0)
    got = run(case, torch.float32, session, seed=5)
    assert not differences(expected, got)
    row = row_of(session, case.key)
    assert (row.need, row.codec) == ("VALUE", "zvc")


def test_clamp_with_impossible_bounds() -> None:
    """NaN, or a lower bound above the upper one: no element is inside."""
    for low, high in ((2.0, 1.0), (math.nan, 1.0), (-1.0, math.nan)):
        case = Case("Clamp", "self", "impossible", lambda x, a=low, b=high: x.clamp(a, b), (67,))
        expected = run(case, torch.float32, None, seed=6)
        got = run(case, torch.float32, Session("lossless", min_nbytes=0), seed=6)
        assert not differences(expected, got)


def test_clamp_at_bounds_and_infinities() -> None:
    """Whether the gradient passes there differs between versions of torch, and between no bound and an infinite one."""
    numbers = torch.tensor([-math.inf, -2.0, -1.0, -0.0, 0.0, 0.5, 2.0, 3.0, math.inf, math.nan])
    bounds = (None, -math.inf, -1.0, 0.0, 2.0, math.inf)
    for low, high in itertools.product(bounds, bounds):
        forms = [] if low is None and high is None else [partial(torch.clamp, min=low, max=high)]
        forms += [partial(torch.clamp_min, min=low)] if low is not None and high is None else []
        forms += [partial(torch.clamp_max, max=high)] if low is None and high is not None else []
        for form in forms:
            gradients = []
            for session in (nullcontext(), Session("lossless", min_nbytes=0)):
                x = numbers.clone().requires_grad_()
                with session:
                    loss = form(x * 1).sum()
                loss.backward()
                gradients.append(x.grad)
            assert not differences(gradients[:1], gradients[1:]), (low, high)


def test_complex_has_no_sign() -> None:
    x = torch.randn(67, dtype=torch.complex64, requires_grad=True)
    expected = torch.autograd.grad(x.clone().abs().sum(), x)
    with Session(Everything(), min_nbytes=0) as session:
        loss = x.clone().abs().sum()
    assert difference(expected[0], torch.autograd.grad(loss, x)[0]) is None
    assert row_of(session, ("Abs", "self")).need == "VALUE"


# -- the table against torch's own formulas --------------------------------------------------------------------------


@cache
def derivatives() -> dict[str, str]:
    """Op, as its autograd node is named, to the text of all formulas of its overloads."""
    torchgen = pytest.importorskip("torchgen")
    yaml = pytest.importorskip("yaml")
    file = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    if not file.exists():
        pytest.skip(f"this torch has no {file.name}")
    texts: dict[str, str] = {}
    for entry in yaml.safe_load(file.read_text()):
        name = re.match(r"\w+", entry["name"])
        assert name is not None
        node = "".join(part.title() for part in name[0].split("_")) + "Backward"
        op = node.replace("ForwardBackward", "Backward").removesuffix("Backward")
        formulas = (
            str(text) for key, text in entry.items() if key not in ("name", "dispatch", "output_differentiability")
        )
        texts[op] = texts.get(op, "") + " | ".join(formulas)
    return texts


@pytest.mark.parametrize("key", NARROW, ids=":".join)
def test_torch_s_formula_reads_the_role(key: Key) -> None:
    op, role = key
    assert op in derivatives(), f"no derivative is called {op}"
    assert re.search(rf"\b{role}\b", derivatives()[op]), f"{op} reads no {role}: {derivatives()[op]}"


# -- the documentation -----------------------------------------------------------------------------------------------


def documented() -> dict[Key, tuple[str, str]]:
    """Rows of the table in docs/understand/needs.md: (op, role) to need and what it is proven for."""
    text = (ROOT / "docs" / "understand" / "needs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) == len({(op, role) for op, role, *_ in rows}), "a row occurs twice"
    return {(op, role): (need, proven) for op, role, need, proven in rows}


def proven(key: Key) -> str:
    """What the cases of a row cover: ``"3-d, 4-d, channels_last; f32 f64 bf16 f16"``."""
    cases = [case for case in CASES if case.key == key]
    dims = [f"{d}-d" for d in sorted({len(case.shape) for case in cases})]
    last = ["channels_last"] if any(case.layout is not torch.contiguous_format for case in cases) else []
    names = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
    dtypes = [name for dtype, name in names.items() if any(dtype in case.dtypes for case in cases)]
    return f"{', '.join(dims + last)}; {' '.join(dtypes)}"


def test_documentation_lists_exactly_the_rows() -> None:
    listed = {key: need for key, (need, _) in documented().items()}
    assert listed == {key: row.need.name for key, row in NARROW.items()}


def test_documentation_says_what_is_proven() -> None:
    assert {key: text for key, (_, text) in documented().items()} == {key: proven(key) for key in NARROW}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_fits_where_torch_changes_no_bound(dtype: torch.dtype) -> None:
    numbers = torch.randn(200, dtype=torch.float64) * 10.0 ** torch.randint(-9, 9, (200,))
    bounds = [
        *numbers.tolist(),
        *numbers.to(dtype).tolist(),
        0.0,
        -0.0,
        1.0,
        6.0,
        0.1,
        65504.0,
        65505.0,
        1e300,
        math.inf,
    ]
    for bound in bounds:
        fits = torch.tensor(bound, dtype=dtype).item() == bound
        assert Mask(Test.NOT_LE, lo=bound).fits(dtype) == fits or math.isinf(bound), bound
    assert not Mask(Test.NOT_LE).fits(torch.float8_e4m3fn)  # which no kernel of a mask takes
