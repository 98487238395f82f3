"""The contract of every codec: check_codec on what hypothesis draws, and what the docstrings say."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from importlib.util import find_spec

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash import codecs
from backstash.codecs import (
    Binary,
    Bitmask,
    BlockQuant,
    Codec,
    Csr,
    Deflate,
    Encoded,
    Exponents,
    FewBit,
    Lz4,
    Minifloat,
    Narrow,
    Operand,
    Raw,
    Rle,
    Shape,
    Signed,
    Sz,
    Szp,
    Upcast,
    Zstd,
    Zvc,
    base,
)
from backstash.codecs.minifloat.formats import FORMATS
from backstash.errors import CodecRefusedError, UnknownNameError
from backstash.saved import Mask, Need, PoolWindow, TensorSpec, Test
from backstash.testing import CodecCheck, check_codec, equal_bits
from studies.jpeg_act import Dct

ANY = st.one_of(tensors.floats(), tensors.two_values(), tensors.integers())
BUILT_IN = {
    "binary": [Binary()],
    "bitmask": [Bitmask(), Bitmask(Mask(Test.GT, ternary=True)), Bitmask(Mask(Test.CLOSED, -1.0, 1.0, 0.5, math.nan))],
    "blockquant": [BlockQuant(), BlockQuant(8, 16, "nearest"), BlockQuant(1, 4096), BlockQuant(4, rounding="nearest")],
    "csr": [Csr(), Csr(min_saving=0.5), Csr(values=Minifloat("fp8")), Csr(values=Minifloat("fp10"))],
    "deflate": [Deflate(), Deflate(level=6)],
    "exponents": [Exponents(), Exponents(3)],
    "fewbit": [FewBit(), FewBit("tanh", 4)],
    "lz4": [Lz4()] if find_spec("lz4") else [],
    "minifloat": [Minifloat(), Minifloat("fp10"), Minifloat("float8_e4m3fn"), Minifloat("float8_e5m2", 16)],
    "narrow": [Narrow()],
    "operand": [Operand(), Operand(Exponents()), Operand(rounding="truncated")],
    "raw": [Raw()],
    "rle": [Rle()],
    "shape": [Shape()],
    "zstd": [Zstd()] if find_spec("zstandard") else [],
    "szp": [Szp(), Szp(0.3), Szp(1e-3, "rel"), Szp(0.1, "rel")],
    "upcast": [Upcast(), Upcast(Exponents(3))],
    "signed": [
        Signed(),
        Signed(BlockQuant(4, 16, "nearest")),
        Signed(Sz(0.1)),
        Signed(Sz(0.1, nonzero=True)),
        Signed(Sz(1e-2, "rel")),
        Signed(Szp(0.3)),
        Signed(Dct()),
    ],
    "sz": [Sz(), Sz(1e-2, "rel"), Sz(0.5), Sz(3e-6, "rel"), Sz(0.3, nonzero=True)],
    "zvc": [Zvc(), Zvc(min_saving=0.5), Zvc(values=Minifloat("fp8")), Zvc(values=Minifloat("fp10"))],
}
EACH = [pytest.param(codec, id=f"{name}{i or ''}") for name, made in BUILT_IN.items() for i, codec in enumerate(made)]
SECTIONS = ("Preserves", "Layout", "Bytes", "Determinism", "Source", "Example")


def checked(codec: Codec, x: Tensor) -> CodecCheck | None:
    """check_codec on one tensor, None where the codec refuses it."""
    try:
        codec.encode(x)
    except CodecRefusedError:
        return None
    return check_codec(codec, (x, torch.zeros(8, dtype=x.dtype)))


def test_every_registered_codec_is_checked_here() -> None:
    assert set(codecs.names()) == set(BUILT_IN)


@pytest.mark.cases(100)
@pytest.mark.parametrize("codec", EACH)
def test_built_in_tensors(codec: Codec) -> None:
    takes_images_only = isinstance(codec, Signed) and isinstance(codec.values, Dct)
    assert check_codec(codec).encoded > (10 if takes_images_only else 50)  # few of these are images


@given(ANY)
def test_shape(x: Tensor) -> None:
    assert checked(Shape(), x)


@given(tensors.floats())
def test_zvc(x: Tensor) -> None:
    assert checked(Zvc(), x)


@given(tensors.floats((torch.float32, torch.bfloat16)), st.sampled_from(BUILT_IN["exponents"]))
def test_exponents(x: Tensor, codec: Codec) -> None:
    assert checked(codec, x)


@given(tensors.floats((torch.bfloat16,)), st.sampled_from(BUILT_IN["upcast"]))
def test_upcast(x: Tensor, codec: Codec) -> None:
    assert checked(codec, x.float()) or x.isnan().any()  # a conversion may change the payload of a NaN


@given(tensors.floats())
def test_csr(x: Tensor) -> None:
    assert checked(Csr(), x)


@pytest.mark.parametrize("codec", [codec for name in ("deflate", "lz4", "zstd") for codec in BUILT_IN[name]])
@given(x=ANY)
def test_general_compressors(codec: Codec, x: Tensor) -> None:
    assert checked(codec, x)


@given(ANY)
def test_raw(x: Tensor) -> None:
    assert checked(Raw(), x)


@given(tensors.floats())
def test_rle(x: Tensor) -> None:
    assert checked(Rle(), x)


@given(tensors.floats((torch.float32, torch.bfloat16, torch.float16)))
def test_minifloat(x: Tensor) -> None:
    assert checked(Minifloat(), x)


@given(tensors.floats((torch.float32, torch.bfloat16, torch.float16)), st.sampled_from(BUILT_IN["sz"]))
def test_sz(x: Tensor, codec: Codec) -> None:
    assert checked(codec, x)


@given(tensors.floats((torch.float32, torch.bfloat16, torch.float16)), st.sampled_from(BUILT_IN["signed"]))
def test_signed(x: Tensor, codec: Signed) -> None:
    """Refuses what its codec of values refuses, and nothing else; the codec itself is not asked what that is."""
    takes_any_number = isinstance(codec.values, (Sz, Szp))
    takes_layout = has_images(x) if isinstance(codec.values, Dct) else True
    must = not takes_layout or not (takes_any_number or x.isfinite().all())
    may = must or (isinstance(codec.values, BlockQuant) and span(x) > torch.finfo(torch.float32).max)
    refused = checked(codec, x) is None
    assert must <= refused <= may, (must, refused, may)


@pytest.mark.parametrize("codec", BUILT_IN["signed"])
def test_signed_takes_layouts_that_its_codec_of_values_takes(codec: Signed) -> None:
    """Every number of dimensions, which few of the tensors above have, and both orders in memory."""
    for dims in range(6):
        x = torch.randn((2, 3, 4, 5, 2)[:dims])
        orders = [x, x.permute(tuple(reversed(range(dims))))]
        if dims == 4:
            orders.append(x.to(memory_format=torch.channels_last))
        for laid_out in orders:
            takes = has_images(laid_out) if isinstance(codec.values, Dct) else True
            assert (codec.accepts(TensorSpec.of(laid_out)) is None) == takes, laid_out.shape
            assert (checked(codec, laid_out) is not None) == takes, laid_out.shape


def has_images(x: Tensor) -> bool:
    """Whether the last two dimensions of a dense tensor are images that lie in memory row by row."""
    if x.dim() < 2 or x.numel() == 0:
        return False
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def span(x: Tensor) -> float:
    """The largest element less the smallest one."""
    return float(x.double().max() - x.double().min()) if x.numel() else 0.0


@given(tensors.two_values())
def test_binary(x: Tensor) -> None:
    assert checked(Binary(), x) or x.numel() == 0


@given(st.one_of(tensors.floats(), tensors.two_values()))
def test_binary_is_exact_or_refuses(x: Tensor) -> None:
    """Refuses three bit patterns or more, takes one or two."""
    patterns = x.view(tensors.BITS[x.element_size()]).unique().numel()
    assert (checked(Binary(), x) is not None) == (patterns in (1, 2)), patterns


@given(tensors.integers())
def test_narrow(x: Tensor) -> None:
    span = int(x.max()) - int(x.min()) if x.numel() else 0
    assert checked(Narrow(), x) or span.bit_length() > 32


@given(tensors.pooled())
def test_narrow_window(case: tuple[PoolWindow, Tensor]) -> None:
    window, indices = case
    if tensors.inside(window, indices):
        assert check_codec(Narrow(window), [indices]).encoded == 1


@given(tensors.floats(), st.sampled_from(BUILT_IN["bitmask"]))
def test_bitmask(x: Tensor, codec: Codec) -> None:
    assert checked(codec, x)


@pytest.mark.cases(10)
@pytest.mark.parametrize("codec", EACH)
@given(x=ANY)
def test_declines_is_a_look(codec: Codec, x: Tensor) -> None:
    if codec.accepts(TensorSpec.of(x)) is None:
        before = x.clone()
        reason = codec.declines(x)
        assert reason is None or reason
        assert equal_bits(x, before)


@pytest.mark.parametrize("codec", EACH)
def test_other_dtypes_and_layouts_are_refused_or_served(codec: Codec) -> None:
    others = [torch.zeros(8).to(dtype) for dtype in tensors.OTHERS]
    gaps = [torch.zeros(8, 4)[:, ::2], torch.zeros(4, 8)[:, 1:], torch.zeros(1).expand(3)]
    for x in (*others, *gaps):
        if codec.accepts(TensorSpec.of(x)):
            with pytest.raises(CodecRefusedError, match=rf"codec '{codec.id}' was asked to encode .*, but "):
                codec.encode(x)
        else:
            assert codec.decode(codec.encode(x)).dtype == x.dtype


@pytest.mark.parametrize("codec", EACH)
@pytest.mark.parametrize(
    "out",
    [
        pytest.param(lambda x: x.new_empty(x.numel()), id="shape"),
        pytest.param(lambda x: x.new_empty(x.shape[::-1]).t(), id="strides"),
        pytest.param(lambda x: torch.empty_like(x, dtype=torch.complex128), id="dtype"),
    ],
)
def test_out_of_another_layout_or_dtype_is_refused(codec: Codec, out: Callable[[Tensor], Tensor]) -> None:
    x = torch.zeros(3, 4, dtype=torch.int32 if codec.id == "narrow" else torch.float32)
    encoded = codec.encode(x)
    with pytest.raises(CodecRefusedError, match=r"decode|out"):
        codec.decode(encoded, out(x))


@pytest.mark.parametrize("name", codecs.names())
def test_docstrings_have_their_lines_in_order(name: str) -> None:
    text = inspect.getdoc(type(codecs.get(name)))
    found = re.findall(r"^([A-Z][a-z]+):", text or "", re.MULTILINE)
    assert [line for line in found if line in SECTIONS] == list(SECTIONS)
    assert found.index("Source") < min((found.index(word) for word in ("Args", "Raises") if word in found), default=99)


@pytest.mark.parametrize("name", codecs.names())
def test_docstrings_name_what_is_preserved(name: str) -> None:
    codec = codecs.get(name)
    words = set(re.findall(r"[A-Z]+", _section(codec, "Preserves").split(" - ")[0].split(", for")[0]))
    assert words & {need.name for need in Need} == {need.name for need in codec.preserves}


def _section(codec: Codec, name: str) -> str:
    text = inspect.getdoc(type(codec)) or ""
    return re.search(rf"^{name}: (.*?)(?=^\S)", text + "\nend", re.MULTILINE | re.DOTALL).group(1).strip()


def _planes(codec: Codec) -> set[str]:
    return set(re.findall(r"``(\w+)``", _section(codec, "Layout")))


def _bytes(codec: Codec, **known: float) -> int:
    """The formula at the beginning of the docstring's Bytes line."""
    formula = re.split(r"[,.](?=\s|$)", _section(codec, "Bytes"), maxsplit=1)[0]
    return int(eval(formula, {"ceil": math.ceil}, known))


def _facts(codec: Codec, x: Tensor, encoded: Encoded) -> dict[str, float]:
    facts = {"n": x.numel(), "itemsize": x.element_size()}
    if "stream" in encoded.planes:
        facts["stream"] = encoded.planes["stream"].numel()
    if codec.id == "rle":
        facts["tokens"] = encoded.planes["tokens"].numel()
    if codec.id in ("csr", "rle", "zvc"):
        facts["nonzeros"] = int(torch.count_nonzero(x.view(tensors.BITS[x.element_size()])))
    minifloat = codec if isinstance(codec, Minifloat) else codec.values if codec.id in ("csr", "zvc") else None  # type: ignore[attr-defined]
    facts |= {"word": x.element_size(), "fields": 1}
    if minifloat is not None:
        form, size = FORMATS[minifloat.format], minifloat.group_size
        facts |= {"word": form.dtype.itemsize, "fields": form.fields, "groups": -(-x.numel() // size) if size else 0}
    if isinstance(codec, Exponents):
        facts |= {"bits": codec.bits, "escapes": encoded.planes["escapes"].numel()}
    if isinstance(codec, FewBit):
        facts["bits"] = codec.bits
    if isinstance(codec, BlockQuant):
        facts |= {"bits": codec.bits, "group_size": codec.group_size}
    if codec.id == "signed":
        facts["positive"] = encoded.planes["positive"].nbytes if "positive" in encoded.planes else 0
        facts["values"] = sum(plane.nbytes for name, plane in encoded.planes.items() if name.startswith("values."))
    if isinstance(codec, Upcast):
        facts["values"] = 2 * x.numel() if codec.values is None else sum(x.nbytes for x in encoded.planes.values())
    if codec.id == "szp":
        facts["words"] = encoded.planes["words"].numel()
    if codec.id == "sz":
        counted = {"stream": "words", "table": "symbols", "places": "places", "values": "values"}
        facts |= {fact: encoded.planes[name].numel() for name, fact in counted.items()}
        facts["chunks"] = (encoded.planes["index"].numel() - 1) // 4
    if codec.id == "narrow":
        facts["bits"] = int(encoded.meta["bits"])  # type: ignore[call-overload]
    return facts


@pytest.mark.cases(100)
@pytest.mark.parametrize("codec", EACH)
@given(x=st.one_of(ANY, tensors.two_values()))
def test_docstrings_bytes_are_the_bytes(codec: Codec, x: Tensor) -> None:
    try:
        encoded = codec.encode(x)
    except CodecRefusedError:
        return
    expected = _bytes(codec, **_facts(codec, x, encoded))
    if isinstance(codec, Bitmask) and codec.mask.ternary:
        assert "twice that if ternary" in _section(codec, "Bytes")
        expected *= 2
    assert encoded.nbytes == expected
    assert {name.split(".")[0] for name in encoded.planes} <= _planes(codec)


@given(tensors.integers())
def test_docstring_of_narrow_tells_the_bits(x: Tensor) -> None:
    formula = re.search(r"bits = (.+?), or", _section(Narrow(), "Bytes")).group(1)
    if x.numel() and x.dtype != torch.bool:
        span = {"max": int(x.max()), "min": int(x.min()), "high": int(x.max()), "low": int(x.min())}
        if span["max"] - span["min"] < 2**32:
            calls = re.sub(r"\bmax\(", "larger(", formula)
            bits = eval(calls, {"ceil": math.ceil, "log2": math.log2, "larger": max}, span)
            assert Narrow().encode(x).meta["bits"] == bits


def test_names_and_parameters() -> None:
    assert codecs.get("zvc", min_saving=0.5) == Zvc(0.5)
    with pytest.raises(UnknownNameError, match=r"'lzma' was asked for, but there are binary, bitmask, .*zvc"):
        codecs.get("lzma")


def test_an_id_is_registered_once() -> None:
    assert codecs.register_codec(Zvc) is Zvc

    class Impostor(Zvc):
        pass

    with pytest.raises(ValueError, match=r"Impostor as 'zvc', but that is Zvc\. Choose another id"):
        codecs.register_codec(Impostor)
    assert codecs.get("zvc") == Zvc()


def test_encoded_counts_a_storage_once() -> None:
    memory = torch.zeros(10)
    planes = {"a": memory[:3], "b": memory[5:], "c": torch.zeros(2, dtype=torch.uint8), "d": torch.empty(0)}
    assert Encoded("x", TensorSpec.of(memory), planes).nbytes == 42


REPEATING = [
    *(Minifloat(name, group_size=0) for name in FORMATS),
    *(kind(values=Minifloat(name)) for kind in (Zvc, Csr) for name in ("fp8", "fp10", "fp16")),
]


@pytest.mark.parametrize("codec", REPEATING, ids=repr)
def test_a_codec_that_repeats_rounds_once(codec: Codec) -> None:
    assert base.repeats(codec)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-30, 34).repeat(64)
    x[::3], x[1], x[2], x[4], x[5] = 0.0, -0.0, math.nan, math.inf, -math.inf
    once = codec.decode(codec.encode(x))
    assert equal_bits(once, codec.decode(codec.encode(once)))


def test_codecs_with_scales_do_not_say_that_they_repeat() -> None:
    assert not any(
        base.repeats(codec) for codec in (Minifloat("float8_e4m3fn"), BlockQuant(), Szp(1e-3), FewBit("gelu"))
    )
    assert base.repeats(Zvc()) and base.repeats(Raw())
