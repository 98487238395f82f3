"""Questions that a Session asks of policies, codecs and stores, and the errors that it raises."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Copy, Everything
from session_checks import Always, holds_nothing, hooks_installed, images, network
from torch import Tensor

from backstash import Encoded, Keep, Need, Policy, Session, Stash
from backstash.codecs import Binary, Bitmask, Narrow, Shape, Zvc
from backstash.errors import (
    BackstashError,
    DamagedPlanesError,
    NeedNotMetError,
    UnknownNameError,
)
from backstash.policies import Rules
from backstash.policies.base import Action, Outcome
from backstash.saved import Mask, SavedTensor, Test

SIGN = Bitmask(Mask(Test.NOT_LE))


@pytest.mark.parametrize("codec", [SIGN, Shape()], ids=["bitmask", "shape"])
def test_codec_that_preserves_too_little(codec: Any) -> None:
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(NeedNotMetError, match=r"preserves \{.*\}, but backward of Sin reads the VALUE of its 'self'"):
        with Session(Always(Stash(codec)), min_nbytes=0):
            loss = torch.sin(x * 2).sum()
        loss.backward()
    assert hooks_installed() == []


def test_mask_of_another_op() -> None:
    """A mask of ``x > 0`` does not serve an op that asks whether ``x`` lies between two bounds."""
    x = torch.linspace(-2, 2, 64, requires_grad=True)
    with pytest.raises(NeedNotMetError, match="'bitmask' preserves .*, but backward of Hardtanh reads the SIGN"):
        with Session(Always(Stash((SIGN, Zvc()))), min_nbytes=0):
            F.hardtanh(x * 2).sum()
    assert hooks_installed() == []


def test_unknown_policy_lists_the_names() -> None:
    with pytest.raises(UnknownNameError, match=r"'lossles' was asked for, but there are .*keep.*lossless"):
        Session("lossles")


def test_unknown_store_lists_the_names() -> None:
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(UnknownNameError, match="'attic' was asked for .* there are device"):
        with Session(Always(Stash(Zvc(0.0), store="attic")), min_nbytes=0):
            torch.sin(F.relu(x * 2)).sum()
    assert hooks_installed() == []


def test_unknown_codec_lists_the_names() -> None:
    with pytest.raises(UnknownNameError, match="codec 'zvcc' was asked for, but there are .*zvc"):
        Stash("zvcc")


def test_not_a_policy() -> None:
    with pytest.raises(TypeError, match=r"has no decide\(\) and observe\(\)"):
        Session(42)  # type: ignore[arg-type]


def test_keep_and_rules() -> None:
    model = network()
    rules = Rules((("2/*", Keep("the first relu")),), otherwise=Everything())
    with Session(rules, min_nbytes=0) as session:
        model(images()).sum().backward()
    by_key = {row.key: row for row in session.report().rows}
    assert by_key["2/Relu#0:result"].codec == "kept"
    assert by_key["2/Relu#0:result"].reason == "the first relu"


def test_error_of_a_policy_reaches_the_program() -> None:
    class Failure(Exception):  # noqa: N818
        pass

    @dataclass(frozen=True)
    class Fails:
        def decide(self, saved: SavedTensor) -> Action:
            raise Failure

        def observe(self, outcome: Outcome) -> None:
            pass

    x = torch.randn(64, requires_grad=True)
    session = Session(Fails(), min_nbytes=0)
    with pytest.raises(Failure), session:
        torch.sin(x * 2).sum()
    assert hooks_installed() == []
    assert holds_nothing(session)


def test_policy_hears_what_became_of_every_value() -> None:
    outcomes: list[Outcome] = []

    class Listens(Everything):
        def observe(self, outcome: Outcome) -> None:
            outcomes.append(outcome)

    x = torch.randn(64, requires_grad=True)
    with Session(Listens(), min_nbytes=0) as session:
        loss = torch.tanh(F.relu(x * 2).exp()).sum()
    loss.backward()
    assert [outcome.saved.key for outcome in outcomes] == [row.key for row in session.report().rows]
    assert [outcome.codec for outcome in outcomes] == [row.codec for row in session.report().rows]


PLANES: dict[str, tuple[Callable[[Tensor], Tensor], str, Any]] = {
    "bitmask": (lambda x: F.relu(x * 2), "mask", None),
    "zvc mask": (lambda x: torch.sin(F.relu(x * 2)), "mask", Zvc(0.0)),
    "zvc offsets": (lambda x: torch.sin(F.relu(x * 2)), "offsets", Zvc(0.0)),
    "zvc values": (lambda x: torch.sin(F.relu(x * 2)), "values", Zvc(0.0)),
    "narrow": (lambda x: (x * 2)[torch.arange(64) % 7], "packed", Narrow()),
}


@pytest.mark.parametrize(("forward", "plane", "codec"), PLANES.values(), ids=PLANES)
def test_damaged_planes(forward: Callable[[Tensor], Tensor], plane: str, codec: Any) -> None:
    """A plane that was cut short between forward and backward is noticed."""
    x = torch.randn(64, requires_grad=True)
    policy: str | Policy = "lossless" if codec is None else Always(Stash((codec, Copy())))
    with Session(policy, min_nbytes=0) as session:
        loss = forward(x).sum() * 1
    values = session.stores["device"]._values  # type: ignore[attr-defined]
    (number,) = [number for number, encoded in values.items() if plane in encoded.planes]
    encoded = values[number]
    planes = {**encoded.planes, plane: encoded.planes[plane][:-1]}
    values[number] = Encoded(encoded.codec, encoded.spec, planes, encoded.meta)
    with pytest.raises(DamagedPlanesError, match="overwritten or cut short") as raised:
        loss.backward()
    assert isinstance(raised.value, BackstashError)


def test_damaged_bits_of_zvc() -> None:
    """Flipped bits in the mask disagree with the offsets."""
    x = torch.randn(64, requires_grad=True)
    with Session(Always(Stash((Zvc(0.0), Copy()))), min_nbytes=0) as session:
        loss = torch.sin(F.relu(x * 2)).sum()
    (encoded,) = session.stores["device"]._values.values()  # type: ignore[attr-defined]
    encoded.planes["mask"].fill_(0xFF)
    with pytest.raises(DamagedPlanesError, match="overwritten or cut short"):
        loss.backward()


class Attic:
    """A store that passes everything on to a ``DeviceStore``."""

    puts: ClassVar[int] = 0

    def __init__(self) -> None:
        from backstash.stores import DeviceStore

        self.inner = DeviceStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_another_store() -> None:
    x = torch.randn(64, requires_grad=True)
    attic = Attic()
    with Session(Always(Stash((Binary(), Zvc(0.0)), store="attic")), stores={"attic": attic}, min_nbytes=0) as session:
        loss = torch.sin(F.relu(x * 2)).sum()
    assert attic.usage().count == 1
    assert session.stores["device"].usage().count == 0
    loss.backward()
    del loss
    gc.collect()
    assert attic.usage().nbytes == 0


def test_needs_in_the_report_are_the_table_s() -> None:
    with Session(Everything(), min_nbytes=0) as session:
        loss = network()(images()).sum()
    needs = {
        row.key.split(":")[0].split("#")[0] + ":" + row.key.split(":")[1]: row.need for row in session.report().rows
    }
    assert needs["3/MaxPool2DWithIndices:result1"] == Need.INDEX.name
    assert needs["5/Relu:result"] in (Need.SIGN.name, Need.VALUE.name)
    loss.backward()
