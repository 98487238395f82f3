"""A Session around a partly compiled model: one report, in which compiled graphs have rows of their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import gradients
from torch import Tensor, nn

from backstash import Session, compile_backend, policies
from backstash.compile.forms.account import GraphAccount, report_of
from backstash.stash.ledger import Entry
from backstash.stash.regions import GraphOutput, Region, RegionCall

pytestmark = pytest.mark.filterwarnings("ignore")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.dropout(F.gelu(self.wide(x)), 0.3))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.middle, self.last = Part(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(self.first(x))))  # type: ignore[no-any-return]


def loss_of(model: Any, rows: int = 128) -> Tensor:
    return model(torch.linspace(-2, 2, rows * 64).view(rows, 64)).square().sum()  # type: ignore[no-any-return]


def built(policy: Any, inner: str = "aot_eager", **settings: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Model()
    ours = compile_backend(policy, inner, min_nbytes=0)
    model.middle.compile(backend=ours, **settings)
    return model, ours


def in_session(model: nn.Module, policy: str = "lossless", rows: int = 128, **settings: Any) -> tuple[list[Any], Any]:
    session = Session(policy, **settings)
    with session:
        torch.manual_seed(3)
        model.zero_grad()
        loss = loss_of(model, rows)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], session.report()


@pytest.mark.parametrize("min_nbytes", [0, 1 << 30])
def test_rows_of_graphs_stand_between_those_of_eager_modules(min_nbytes: int) -> None:
    model, ours = built(policies.get("quantized"))
    found, report = in_session(model, min_nbytes=min_nbytes)
    said = ours.report()
    plain = gradients(model, loss_of)
    assert all(map(torch.equal, found, plain))  # the same graph, so the same errors
    rows = {row.key: row for row in report.rows}
    graph = [row for row in report.rows if "/graph 0/" in row.key]
    assert [row.key for row in graph] == [
        "middle.wide/graph 0/addmm#0:addmm",
        "middle/graph 0/native_dropout#0:getitem",
        "middle/graph 0/native_dropout#1:getitem_1",
    ]
    assert [row.saved_nbytes for row in graph] == [row.saved_nbytes for row in said.rows]
    assert [row.codec.partition(",")[0] for row in graph] == [row.codec for row in said.rows]
    assert all(row.stash_nbytes <= other.stash_nbytes for row, other in zip(graph, said.rows, strict=True))
    if min_nbytes:
        assert [row.stash_nbytes for row in graph] == [row.stash_nbytes for row in said.rows]
    assert "compiled graph 0: 3 of 3 values treated" in report.notes
    assert not [key for key in rows if "?" in key and "saved" in key and "middle" in key and min_nbytes]
    if min_nbytes == 0:
        order = list(rows)
        first, last = order.index("first.0/Addmm#0:mat1"), order.index("last/Addmm#0:mat1")
        assert first < order.index(graph[0].key) < last


def test_the_ratio_counts_everything_once() -> None:
    model, ours = built(policies.get("quantized"))
    _, report = in_session(model, "keep", min_nbytes=0)
    eager = [row for row in report.rows if "graph 0" not in row.key]
    value = 128 * 64 * 4  # the batch, the results of both relus, and that of the last layer
    assert sum(row.saved_nbytes for row in eager) == 4 * value
    assert report.saved_nbytes == 4 * value + ours.report().saved_nbytes
    assert report.stash_nbytes == 4 * value + ours.report().stash_nbytes
    assert report.parameter_nbytes > 0


def test_two_calls_and_a_loop_of_steps() -> None:
    model, _ = built(policies.get("quantized"))
    session = Session("lossless", min_nbytes=0)
    seen = []
    for _ in range(3):
        with session:
            loss = loss_of(model) + loss_of(model.middle)
        loss.backward()
        seen.append(session.report())
    # The input of the second call requires no gradient, so it has a graph of its own.
    graphs = [[row for row in report.rows if "/graph " in row.key] for report in seen]
    assert [len(rows) for rows in graphs] == [6, 6, 6]
    assert len({report.saved_nbytes for report in seen}) == 1


@pytest.mark.slow
def test_sizes_that_are_symbols() -> None:
    model, _ = built(policies.get("quantized"), dynamic=True)
    for rows in (128, 96):
        found, report = in_session(model, rows=rows, min_nbytes=1 << 30)
        torch.manual_seed(3)
        model.zero_grad()
        loss_of(model, rows).backward()
        assert all(torch.equal(a, b.grad) for a, b in zip(found, model.parameters(), strict=True))
        assert len([row for row in report.rows if "graph 0" in row.key]) == 3


def test_a_graph_in_which_nothing_is_treated_says_why() -> None:
    model, _ = built("keep")
    _, report = in_session(model, min_nbytes=0)
    assert any(": 0 of 3 values treated, because: 3 kept because the policy says so" in note for note in report.notes)


def test_nothing_is_announced_behind_a_session_that_was_left() -> None:
    model, _ = built(policies.get("quantized"))
    _, report = in_session(model, min_nbytes=0)
    gradients(model, loss_of)
    session = Session("keep", min_nbytes=0)
    with session:
        loss_of(nn.Linear(64, 64)).backward()
    assert not [row for row in session.report().rows if "graph" in row.key]
    assert report.rows


@pytest.mark.slow
def test_inductor_and_its_cache_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    reports, hits = [], []
    for _ in range(2):
        torch._dynamo.reset()
        model, ours = built(policies.get("quantized"), "inductor")
        _, report = in_session(model, min_nbytes=1 << 30)
        reports.append([row.key for row in report.rows if "graph 0" in row.key])
        hits.append(any("from torch's cache" in note for note in ours.report().notes))
    assert hits == [False, True]
    assert len(reports[0]) >= 2
    assert reports[0] == reports[1], "a graph from the cache says what it saves as well"


def test_graphs_of_two_treatments_have_names_of_their_own() -> None:
    torch.manual_seed(0)
    parts = [Part(), Part()]
    for part, policy in zip(parts, ("lossless", policies.quantized(8)), strict=True):
        part.compile(backend=compile_backend(policy, "aot_eager", min_nbytes=0))
    session = Session("lossless")
    with session:
        loss_of(nn.Sequential(nn.Linear(64, 64), *parts, parts[0])).backward()
    report = session.report()
    graphs = [row.key.split("/")[1] for row in report.rows if "/graph" in row.key]
    assert list(dict.fromkeys(graphs)) == ["graph 0", "graph 0 (2)"]
    assert graphs.count("graph 0") == 2 * graphs.count("graph 0 (2)")
    assert [note.split(":")[0] for note in report.notes][-2:] == ["compiled graph 0", "compiled graph 0 (2)"]


def test_graphs_from_the_cache_have_names_of_their_own() -> None:
    def account(name: str, node: str) -> GraphAccount:
        return GraphAccount(name, (Entry(f"{name}/{node}:{node}", "VALUE", "", 8, 8),), 0)

    report = report_of("", [account("graph 0", "relu")], [account("graph 1", "add"), account("graph 0", "mul")], 2)
    assert [row.key for row in report.rows] == ["graph 0/relu:relu", "graph 1/add:add", "graph 0 (2)/mul:mul"]
    assert [note.split(":")[0] for note in report.notes] == ["graph 0", "graph 1", "graph 0 (2)"]


def test_a_compiled_module_does_not_warn_of_the_hooks_of_a_session() -> None:
    compiled = torch.compile(Part(), backend="aot_eager")
    loss_of(compiled).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Session("lossless"):
            loss_of(compiled).backward()


def test_tensors_of_somebody_else_end_a_call() -> None:
    region = Region("graph 0", (), (GraphOutput(torch.float32, (2, None), 0), GraphOutput(torch.uint8, (4,), 1)), "")
    call = RegionCall(region)
    assert call.next_row(torch.ones(2, 9), "path") == 0
    assert not call.is_over
    assert call.next_row(torch.ones(7), "path") is None
    assert call.is_over


def _by_position(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1))


def _by_name(x: Tensor) -> Tensor:
    return x.unflatten(dim=-1, sizes=(4, -1))


@pytest.mark.parametrize("unflatten", [_by_position, _by_name])
def test_methods_that_call_those_of_their_base_class_are_compiled(unflatten: Any) -> None:
    def loss_of(x: Tensor) -> Tensor:
        return unflatten(x.sin()).cos().sum()

    x = torch.randn(4, 4, 16, requires_grad=True)
    loss_of(x).backward()
    wanted, x.grad = x.grad, None
    torch._dynamo.reset()
    with Session("lossless", min_nbytes=0):
        loss = torch.compile(loss_of, backend="aot_eager", fullgraph=True)(x)
    loss.backward()
    assert x.grad is not None and wanted is not None
    assert x.grad.equal(wanted)
