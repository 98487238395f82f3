from __future__ import annotations

import itertools
import math

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Encoded, Minifloat, Zvc
from backstash.codecs.base import ErrorBound
from backstash.codecs.masks.reference import passes
from backstash.codecs.minifloat.formats import FORMATS, LEAST_SCALE, SCALED
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.ops.bits import bits_of
from backstash.saved import Mask, Need, TensorSpec, Test
from backstash.testing import check_codec
from backstash.testing.comparison import compare_bounded

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = [Minifloat(format, 0) for format in FORMATS]
GROUPED = [Minifloat(format, group_size) for format in SCALED for group_size in (16, 256)]
TAKEN = [
    (codec, dtype)
    for codec in (*PLAIN, *GROUPED)
    for dtype in FLOATS
    if FORMATS[codec.format].bits < 8 * dtype.itemsize
]
BEHIND_ZVC = [Zvc(values=codec) for codec in PLAIN]


def numbers(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of 16 bits; of float32 every exponent with what lies on ties and one beside them."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    near = [k * (1 << bit) + d for bit in range(10, 23) for k in (0, 1, 3, 5, 7) for d in (-1, 0, 1)]
    mantissas = torch.tensor(sorted({m for m in (*near, (1 << 23) - 1) if 0 <= m < 1 << 23}))
    magnitudes = ((torch.arange(256) << 23)[:, None] | mantissas).view(-1)
    return torch.cat([magnitudes, magnitudes - (1 << 31)]).to(torch.int32).view(torch.float32)


def through(codec: Minifloat | Zvc, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x))


@pytest.mark.parametrize(("codec", "dtype"), TAKEN, ids=str)
def test_every_number_is_within_the_bound(codec: Minifloat, dtype: torch.dtype) -> None:
    x = numbers(dtype)
    compare_bounded(repr(codec), codec.bound, x, through(codec, x))
    if not codec.group_size:
        behind = Zvc(values=codec)
        compare_bounded(repr(behind), behind.bound, x, through(behind, x))
        assert torch.equal(through(behind, x) == 0, x == 0)


@pytest.mark.parametrize("codec", [*PLAIN, *GROUPED, *BEHIND_ZVC], ids=str)
@given(x=tensors.floats(FLOATS))
def test_alone_and_behind_zvc(codec: Minifloat | Zvc, x: Tensor) -> None:
    if codec.accepts(TensorSpec.of(x)) is None and x.numel():
        check_codec(codec, [x])


@pytest.mark.parametrize(("codec", "dtype"), TAKEN, ids=str)
def test_what_was_decoded_is_encoded_to_the_same(codec: Minifloat, dtype: torch.dtype) -> None:
    x = numbers(dtype)
    once = through(codec, x)
    twice = through(codec, once)
    assert torch.equal(bits_of(once), bits_of(twice))
    assert torch.equal(once.signbit(), x.signbit())
    assert torch.equal(once.isnan(), x.isnan())
    assert torch.equal(once.isinf(), x.isinf())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_torch_rounds_the_same(name: str) -> None:
    codec, dtype = Minifloat(name, 0), getattr(torch, name)
    x = numbers(torch.float32)
    x = x[x.isfinite()]
    largest = FORMATS[name].largest
    want = x.clamp(-largest, largest).to(dtype)
    codes = codec.encode(x).planes["codes"]
    assert torch.equal(codes, want.view(codes.dtype))
    assert torch.equal(codec.decode(codec.encode(x)), want.float())


@pytest.mark.parametrize("scale", [LEAST_SCALE, 2.0**-20, 1.0, 2.0**100])
@pytest.mark.parametrize("name", SCALED)
def test_torch_rounds_the_same_in_groups(name: str, scale: float) -> None:
    codec, dtype = Minifloat(name, 16), getattr(torch, name)
    largest = FORMATS[name].largest
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * 10.0 ** -torch.arange(16)
    x[:, 3] = largest
    encoded = codec.encode(x * scale)
    assert encoded.planes["scales"].eq(scale).all()
    assert torch.equal(encoded.planes["codes"].view(dtype), (x * scale / scale).to(dtype).view(-1))


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("fp8", 1 + 1 / 16, 1.0),  # a tie, to even
        ("fp8", 1 + 3 / 16, 1.25),
        ("fp8", 1 + 1 / 16 + 2**-20, 1.125),
        ("fp8", 400.0, 384.0),
        ("fp8", 401.0, 416.0),
        ("fp8", 1e9, 416.0),
        ("fp8", -math.inf, -math.inf),
        ("float8_e4m3fn", 448.0, 416.0),
        ("float8_e4m3fn", math.inf, math.inf),
        ("fp10", math.inf, math.inf),
        ("fp16", math.inf, math.inf),
        ("fp8", 2**-6 * (1 - 1 / 32), 2**-6),  # the tie below the smallest normal number
        ("fp8", 2**-6 * (1 - 1 / 32 - 2**-20), 0.0),
        ("float8_e4m3fn", 2**-6 * (1 - 1 / 32 - 2**-20), 2**-6),
        ("float8_e4m3fn", 2**-7, 2**-7),
        ("float8_e4m3fn", 2**-10, 0.0),
        ("fp10", 1 + 1 / 32, 1.0),
        ("fp10", 7e4, 63488.0),
        ("fp16", 1 + 2**-11, 1.0),
        ("fp16", 65519.0, 65504.0),
        ("fp16", 2**-15, 0.0),
        ("bfloat16", math.inf, math.inf),
        ("bfloat16", torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max),
        ("bfloat16", 2.0**-133, 2.0**-133),
        ("float8_e5m2", math.inf, math.inf),
        ("float8_e5m2", 1e9, 57344.0),
    ],
)
def test_examples(name: str, x: float, want: float) -> None:
    codec = Minifloat(name, 0)
    assert through(codec, torch.tensor([x, -x])).tolist() == [want, -want]
    stays = want or (1 if FORMATS[name].subnormals else 8) * 2.0**-9
    if name in ("fp8", "float8_e4m3fn"):
        assert through(Zvc(values=codec), torch.tensor([x, -x])).tolist() == [stays, -stays]


def test_layout() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, math.nan, -math.nan, 416.0, -math.inf])
    assert Minifloat("fp8").encode(x).planes["codes"].tolist() == [0x38, 0xB8, 0, 0x80, 0x7F, 0xFF, 0x7D, 0xFE]
    words = Minifloat("fp10").encode(x).planes["codes"].tolist()
    assert words == [0xF0 | (0x2F0 << 10), 0x200 | (0x1FF << 10) | (0x3FF << 20), 0x17A | (0x3F0 << 10)]
    assert Minifloat("fp16").encode(x).planes["codes"].view(torch.float16)[:4].tolist() == [1.0, -1.0, 0.0, -0.0]
    planes = Minifloat("float8_e4m3fn").encode(torch.full((300,), 417.0)).planes
    assert planes["scales"].tolist() == [2.0, 2.0]
    assert planes["codes"].unique().tolist() == [0x75]


@pytest.mark.parametrize("n", range(10))
@pytest.mark.parametrize("codec", [*PLAIN, *GROUPED, *BEHIND_ZVC], ids=str)
def test_every_tail(codec: Minifloat | Zvc, n: int) -> None:
    x = torch.arange(1.0, n + 1) / 3
    encoded = codec.encode(x)
    assert encoded.nbytes == codec.nbytes_bound(encoded.spec)
    values = codec if isinstance(codec, Minifloat) else codec.values
    assert ((codec.decode(encoded) - x).abs() <= values.bound.each * x).all()


def test_groups_have_scales_of_their_own() -> None:
    x = torch.cat([torch.full((256,), 1e-12), torch.full((256,), 1e12), torch.zeros(3), torch.tensor([math.inf])])
    got = through(Minifloat("float8_e4m3fn"), x)
    assert ((got - x)[:512].abs() <= 2**-4 * x[:512]).all()
    assert got[512:515].eq(0).all()
    assert got[515] == math.inf
    assert through(Minifloat("fp8"), x)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for codec in (Minifloat(), Zvc(values=Minifloat())):
        with pytest.raises(CodecRefusedError, match=f"takes float32, bfloat16 and float16 only, not {name}"):
            codec.encode(torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize(("name", "dtype"), [*itertools.product(("fp16", "bfloat16"), (torch.float16, torch.bfloat16))])
def test_no_gain_is_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(CodecRefusedError, match=f"a number of {name} takes as many bits as one of"):
        Minifloat(name).encode(torch.zeros(4, dtype=dtype))


def test_parameters() -> None:
    with pytest.raises(ValueError, match=r"asked for format 'fp4', but there are fp8, fp10, fp16, float8_e4m3fn"):
        Minifloat("fp4")
    with pytest.raises(ValueError, match=r"group_size=256 with format 'fp8', but it has no scales"):
        Minifloat("fp8", 256)
    with pytest.raises(ValueError, match=r"group_size=100 with format 'float8_e5m2', but the choices are 0, 16, 32"):
        Minifloat("float8_e5m2", 100)
    with pytest.raises(ValueError, match=r"no groups of neighbours\. Use Minifloat\('float8_e4m3fn', group_size=0\)"):
        Zvc(values=Minifloat("float8_e4m3fn"))
    assert Minifloat("float8_e4m3fn") == Minifloat("float8_e4m3fn", 256)
    assert repr(Minifloat()) == "Minifloat(format='fp8', group_size=0)"
    assert [codec.label for codec in (Minifloat("fp10"), Zvc(), Zvc(values=Minifloat()))] == ["fp10", "zvc", "zvc+fp8"]


def test_the_bound_says_what_the_format_can() -> None:
    assert Minifloat("fp8").bound == ErrorBound(each=2**-4, tiny=2**-6, limit=416.0)
    assert Minifloat("fp10").bound == ErrorBound(each=2**-5, tiny=2**-14, limit=63488.0)
    assert Minifloat("fp16").bound == ErrorBound(each=2**-11, tiny=2**-14, limit=65504.0)
    assert Minifloat("bfloat16").bound.limit == torch.finfo(torch.bfloat16).max
    assert Minifloat("float8_e5m2").bound.group_size == 256
    assert Zvc(values=Minifloat()).bound == Minifloat().bound
    assert Zvc(values=Minifloat()).preserves == {Need.SHAPE, Need.VALUE}
    assert Zvc().bound is None


KEPT = [
    Mask(Test.NOT_LE),
    Mask(Test.GT, 0.0, ternary=True),
    Mask(Test.NOT_LE, -0.0, nan=True),
    Mask(Test.NONZERO),
    Mask(Test.CLOSED, 0.0, math.inf),
    Mask(Test.CLOSED, -math.inf, 0.0),
]
LOST = [
    Mask(Test.NOT_LE, 0.1),
    Mask(Test.GT, -math.inf),
    Mask(Test.INSIDE, 0.0, math.inf),
    Mask(Test.NOT_OUTSIDE, 0.0, math.inf),
    Mask(Test.NOT_OUTSIDE, 0.0, 6.0),
    Mask(Test.CLOSED, -1.0, 1.0),
]


def outcomes(mask: Mask, x: Tensor) -> list[Tensor]:
    passed = passes(x, mask.test.code, mask.lo, mask.hi)
    return [passed, *([x < 0] if mask.ternary else []), *([x.isnan()] if mask.nan else [])]


@pytest.mark.parametrize("codec", BEHIND_ZVC, ids=str)
def test_keeps_tells_the_truth(codec: Zvc) -> None:
    for dtype in FLOATS:
        x = numbers(dtype)
        if codec.accepts(TensorSpec.of(x)) is not None:
            continue
        got = through(codec, x)
        for mask in (*KEPT, *LOST):
            same = all(map(torch.equal, outcomes(mask, x), outcomes(mask, got)))
            assert codec.keeps(mask) <= same, mask
    assert all(codec.keeps(mask) for mask in KEPT)
    assert not any(codec.keeps(mask) for mask in LOST)
    assert all(Zvc().keeps(mask) for mask in (*KEPT, *LOST))


def test_a_dense_tensor_pays_when_its_values_shrink() -> None:
    dense = torch.ones(5000)
    assert Zvc().declines(dense) is not None
    assert Zvc(values=Minifloat("fp8")).declines(dense) is None
    assert Zvc(min_saving=0.8, values=Minifloat("fp8")).declines(dense) is not None
    assert Zvc(values=Minifloat("fp10")).declines(dense.bfloat16()) is None
    assert Zvc(values=Minifloat("fp8")).declines(torch.empty(0)) == "it is empty"


@given(st.integers(1, 9000), st.sampled_from(["fp8", "fp10", "fp16"]), st.data())
def test_damage_behind_zvc(n: int, name: str, data: st.DataObject) -> None:
    codec = Zvc(values=Minifloat(name))
    encoded = codec.encode(torch.arange(n).float() % 3)
    offsets = encoded.planes["offsets"].clone()
    offsets[data.draw(st.integers(0, len(offsets) - 1))] += data.draw(st.sampled_from([-(2**40), -1, 1, 2**40]))
    with pytest.raises(DamagedPlanesError, match="compute the step again"):
        codec.decode(Encoded(encoded.codec, encoded.spec, {**encoded.planes, "offsets": offsets}))


@pytest.mark.parametrize("plane", ["codes", "scales"])
def test_a_plane_too_long_is_damage(plane: str) -> None:
    codec = Minifloat("float8_e5m2", 16)
    encoded = codec.encode(torch.randn(100))
    longer = torch.cat([encoded.planes[plane], encoded.planes[plane][:1]])
    with pytest.raises(DamagedPlanesError, match=f"whose plane '{plane}' has"):
        codec.decode(Encoded(encoded.codec, encoded.spec, {**encoded.planes, plane: longer}))


@pytest.mark.parametrize(
    ("bound", "got", "message"),
    [
        (ErrorBound(each=2**-5), [1.0625, 2.0, math.nan], "where 1.0 became 1.0625"),
        (ErrorBound(each=2**-4), [1.0625, 2.0, 0.0], "where nan became 0.0"),
        (ErrorBound(each=2**-4, limit=1.5), [1.0, 1.75, math.nan], "where 2.0 became 1.75"),
        (ErrorBound(each=2**-4, tiny=1.5), [-0.5, 2.0, math.nan], "where 1.0 became -0.5"),
        (ErrorBound(each=2**-4, share=0.4, group_size=2), [0.0, 2.0, math.nan], "where 1.0 became 0.0"),
    ],
)
def test_a_broken_bound_is_caught(bound: ErrorBound, got: list[float], message: str) -> None:
    x = torch.tensor([1.0, 2.0, math.nan])
    with pytest.raises(AssertionError, match=message):
        compare_bounded("here", bound, x, torch.tensor(got))
    compare_bounded("here", bound, x.clamp(max=bound.limit), x.clamp(max=bound.limit))
