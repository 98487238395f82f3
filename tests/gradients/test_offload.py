"""Gradients stay bit-equal if saved tensors are moved to another store, and policies move what they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_checks import differences
from offload_checks import Cnn, Transformer, chain, step, trained
from torch import Tensor, nn

from backstash import Encoded, Policy, Session, policies
from backstash.codecs import Raw
from backstash.errors import UnknownNameError
from backstash.papers.cdma import Cdma, Vdnn, VdnnDyn
from backstash.papers.layrub import Layrub
from backstash.policies.base import Action, Keep, Outcome, Recompute, Stash
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stores import HostStore, Store, Ticket

MAKERS: dict[str, Callable[[str], Policy]] = {
    "offload": lambda store: policies.offload(store=store),
    "offload-stored": lambda store: policies.offload(store=store, recompute=False),
    "offload-dense": lambda store: policies.offload(store=store, recompute=False, dense=True),
    "offload-deflate": lambda store: policies.offload("deflate", store),
    "vdnn": lambda store: policies.vdnn(store=store),
    "vdnn-conv": lambda store: policies.vdnn("conv", store),
    "vdnn-dyn-0": lambda store: policies.vdnn("dyn", store, budget=0),
    "vdnn-dyn": lambda store: policies.vdnn("dyn", store, budget=300_000),
    "cdma-zvc": lambda store: policies.cdma(store=store),
    "cdma-rle": lambda store: policies.cdma("rle", store),
    "cdma-deflate": lambda store: policies.cdma("deflate", store),
    "layrub": lambda store: policies.layrub(store),
}


@pytest.mark.cases(10)
@pytest.mark.parametrize("make", [Cnn, Transformer])
@pytest.mark.parametrize("policy", MAKERS)
def test_gradients_are_bit_equal(store: Store, policy: str, make: type[nn.Module]) -> None:
    session = Session(MAKERS[policy]("far"), stores={"far": store}, min_nbytes=0)
    assert not differences(trained(make, None), trained(make, session))
    assert store.usage().nbytes == session._live.nbytes == 0
    if make is Cnn:
        assert store.usage().peak_nbytes > 0
        assert session.report().moved_nbytes > 0 or policy == "vdnn-dyn"


@pytest.mark.parametrize("policy", ["offload", "vdnn", "vdnn_conv", "cdma", "layrub"])
def test_policies_by_name_move_to_the_store_that_every_session_has(policy: str) -> None:
    session = Session(policy, min_nbytes=0)
    assert not differences(trained(Cnn, None), trained(Cnn, session))
    assert session.stores["host"].usage().peak_nbytes > 0


# -- what is moved ---------------------------------------------------------------------------------------------------


def saved(key: str = "a/Relu#0:result", need: Need = Need.VALUE, dtype: torch.dtype = torch.float32) -> SavedTensor:
    op, role = key.partition("/")[2].replace("#0", "").split(":")
    return SavedTensor(key, op, role, "a", TensorSpec.of(torch.zeros(10, dtype=dtype)), need)


def moves(policy: Policy, one: SavedTensor) -> bool:
    action = policy.decide(one)
    assert isinstance(action, (Stash, Keep))
    return isinstance(action, Stash) and action.store == "host"


@pytest.mark.parametrize(
    ("key", "moved_by"),
    [
        ("a/Convolution#0:input", {"all", "conv"}),
        ("a/Relu#0:result", {"all"}),
        ("a/NativeBatchNorm#0:input", {"all"}),
        ("a/Addmm#0:mat1", set()),
        ("a/LogSoftmax#0:result", set()),
    ],
)
def test_vdnn_moves_feature_maps(key: str, moved_by: set[str]) -> None:
    assert {rule for rule in ("none", "conv", "all") if moves(Vdnn(rule), saved(key))} == moved_by  # type: ignore[arg-type]
    assert moves(Cdma(), saved(key)) is ("all" in moved_by)


def test_vdnn_dyn_moves_as_little_as_the_budget_allows() -> None:
    session_sizes = {}
    for budget in (0, 60_000, 1 << 30):
        session = Session(VdnnDyn(budget), min_nbytes=0)
        trained(Cnn, session, steps=1)
        all_of_it = session.report().moved_nbytes
        trained(Cnn, session, steps=2)
        session_sizes[budget] = session.report().moved_nbytes / all_of_it
    assert session_sizes[0] == 1.0
    assert session_sizes[1 << 30] == 0.0


def test_vdnn_dyn_moves_inputs_of_convolutions_if_that_is_enough() -> None:
    conv, session = Session(Vdnn("conv"), min_nbytes=0), Session(VdnnDyn(1), min_nbytes=0)
    trained(Cnn, conv, steps=1)
    rows = [row for row in conv.report().rows if row.reason != "held by the program, kept by reference"]
    moved = [row.stash_nbytes for row in rows if row.store == "host"]
    needed = sum(row.stash_nbytes for row in rows) - sum(moved) + 2 * max(moved)
    assert needed < sum(row.stash_nbytes for row in rows), "the test's model is too small"
    for budget, same in ((needed, True), (needed - 1, False)):
        session = Session(VdnnDyn(budget), min_nbytes=0)
        trained(Cnn, session, steps=2)
        assert (session.report().moved_nbytes == sum(moved)) is same


def test_vdnn_dyn_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="'dyn' takes a budget"):
        policies.vdnn("dyn")
    with pytest.raises(ValueError, match="no other rule does"):
        policies.vdnn("all", budget=1)
    with pytest.raises(ValueError, match="0 or more"):
        VdnnDyn(-1)
    with pytest.raises(ValueError, match="there are none, conv, all"):
        policies.vdnn("some")  # type: ignore[arg-type]


def test_cdma_compresses_with_one_of_three_codecs() -> None:
    action = Cdma("rle").decide(saved())
    assert isinstance(action, Stash)
    assert [codec.id for codec in action.codecs] == ["rle", "raw"]
    with pytest.raises(ValueError, match="it compares zvc, rle, deflate"):
        policies.cdma("lz4")


def test_layrub_leaves_the_ends_where_they_are() -> None:
    session = Session(Layrub(), min_nbytes=0)
    trained(Cnn, session, steps=1)
    first = {row.key: row.store for row in session.report().rows if row.need in ("VALUE", "INDEX")}
    trained(Cnn, session, steps=2)
    rows = {row.key: row for row in session.report().rows}
    stayed = [key for key, store in first.items() if store == "host" and rows[key].store == "device"]
    assert len(stayed) == 3
    assert all(rows[key].reason == "Layrub does not move the first and the last two layers" for key in stayed)
    assert {row.store for row in rows.values() if row.codec == "bitmask"} <= {"host"}


def test_sums_are_moved_and_not_made_again_of_two_moved_values() -> None:
    session = Session(policies.offload(), min_nbytes=0)
    trained(Cnn, session, steps=1)
    rows = [row for row in session.report().rows if "it would begin from 2 stored values" in row.reason]
    assert rows
    assert all(row.store == "host" for row in rows)
    with pytest.raises(ValueError, match="max_inputs=0"):
        Recompute(max_inputs=0)


def test_what_is_moved_as_it_is_is_not_copied() -> None:
    class Noting(HostStore):
        def put(self, encoded: Encoded) -> Ticket:
            addresses.add(encoded.planes["values"].data_ptr())
            return super().put(encoded)

    addresses: set[int] = set()
    made: list[int] = []
    model = chain()
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: made.append(output.data_ptr()))
    session = Session(policies.vdnn(), stores={"host": Noting()}, min_nbytes=0)
    step(session, model, torch.randn(16, 64))
    assert len(addresses) >= 7
    assert addresses <= set(made)


def test_who_may_write_into_a_value_gets_a_copy() -> None:
    """A reader that writes cannot damage the stored value; the next reader raises an error, as in plain PyTorch."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append(x.clone())
            x.zero_()
            return 2 * grad

    seen: list[Tensor] = []
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with Session(Moves(), min_nbytes=0) as session:
        loss = Writes.apply(torch.tanh(layer(x))).sum()
    assert session.report().moved_nbytes > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    assert not differences([torch.tanh(layer(x)).detach()], seen)
    plain = Writes.apply(torch.tanh(layer(x))).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.backward(retain_graph=True)


class Moves:
    """A policy that moves every value without encoding it."""

    recomputes = False

    def decide(self, saved: SavedTensor) -> Action:
        return Stash(Raw(), "host")

    def observe(self, outcome: Outcome) -> None:
        pass


def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"store 'disk' was asked for by .*there are device, host.*stores="):
        trained(Cnn, Session(policies.offload(store="disk"), min_nbytes=0))
