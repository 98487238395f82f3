"""A treated graph says what it saves each time it runs, so that a Session around it accounts for it.

The account is part of the graph, as text. So a graph that torch has loaded from its cache on disk, which no partitioner
has seen in this process, says it as well, and the report of its options lists it once it has run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch
from torch import fx

from backstash.compile.forms.account import GraphAccount
from backstash.compile.forms.rewrite import UNCHECKED
from backstash.compile.graph.emit import GraphEmitter, from_text, to_text
from backstash.compile.graph.values import SavedValue, Split, is_tensor_node
from backstash.stash.ledger import Entry
from backstash.stash.regions import GraphOutput, Region, announce, is_listened_to
from backstash.torch_internals import hide_from_dynamo, keeps_impure_calls

_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
_LIBRARY.define("ran(str name, str account) -> ()")
# Where Inductor would remove, or misplace, a call that writes nothing. It does not write either, but says so.
_LIBRARY.define("ran_beside(Tensor(a!) ticket, str name, str account) -> ()")
_ops: Any = torch.ops.backstash_graph

_accounts: dict[str, tuple[str, GraphAccount, Region]] = {}
"""By the name that a graph's account has: the treatment's identity, the account, and what a Session is told."""

_runs: Counter[str] = Counter()
"""How often each of these graphs has run, by that name."""

_FIELDS = ("key", "need", "spec", "saved_nbytes", "stash_nbytes", "codec", "reason", "shared_by", "store")


def emit_account(split: Split, account: GraphAccount, of_row: dict[fx.Node, int], identity: bytes) -> str:
    """Puts a call in front of the forward graph's results that announces the graph's account.

    Args:
        split: the graphs, treated. Nothing is added to a forward graph that saves nothing of its own.
        of_row: for each saved result the number of its value's row; inputs have none.

    Returns:
        The account's own name; empty if nothing was added.
    """
    results = [node for node in split.results[split.outputs :] if is_tensor_node(node)]
    own = [node for node in results if node.op != "placeholder"]
    if not own:
        return ""
    saved = [
        [str(node.meta["val"].dtype).removeprefix("torch."), _sizes(node), of_row.get(node)]
        for node in results
        if not node.meta.get(UNCHECKED)
    ]
    rows = [[getattr(row, name) for name in _FIELDS] for row in account.rows]
    text = to_text([identity.hex(), account.name, rows, saved, account.input_nbytes, account.note])
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    (output,) = split.forward.graph.find_nodes(op="output")
    value = own[0].meta["val"]
    emit = GraphEmitter(split.forward.graph, output, value.fake_mode)
    if keeps_impure_calls() and not _is_on_cpu(split.forward.graph):
        emit(_ops.ran.default, name, text)
    else:
        ticket = emit(torch.ops.aten.full.default, [1], 0, dtype=torch.int32, device=value.device, pin_memory=False)
        emit(_ops.ran_beside.default, ticket, name, text)
    return name


def _is_on_cpu(graph: fx.Graph) -> bool:
    """Whether a graph computes anything on the CPU.

    Inductor gathers loops for the CPU, and writes them down when the next call on a device comes. A call without
    tensors is on none: it would be written in front of loops that it comes after, and so would the end of what they
    read.
    """
    computed = (node for node in graph.nodes if node.op == "call_function" and is_tensor_node(node))
    return any(node.meta["val"].device.type == "cpu" for node in computed)


def rows_of(values: list[SavedValue], planes: dict[int, list[fx.Node]]) -> dict[fx.Node, int]:
    """The number of the row of each saved result.

    Args:
        values: in the order of the rows.
        planes: by the number of a row, what is saved in the place of its value; nothing where it is kept.
    """
    found: dict[fx.Node, int] = {}
    for number, value in enumerate(values):
        nodes = planes.get(number, [member.node for member in value.members])
        found |= dict.fromkeys(nodes, number)
    return found


def read_account(text: str) -> tuple[str, GraphAccount, Region]:
    """The identity, the account and the region that a graph announces with this text."""
    identity, name, rows, saved, input_nbytes, note = from_text(text)
    entries = tuple(Entry(**dict(zip(_FIELDS, row, strict=True))) for row in rows)
    account = GraphAccount(name, entries, input_nbytes, note)
    tensors = tuple(GraphOutput(getattr(torch, dtype), tuple(sizes), row) for dtype, sizes, row in saved)
    return identity, account, Region(name, entries, tensors, account.outcome)


def runs() -> Counter[str]:
    """How often each graph that announces an account has run in this process."""
    return _runs.copy()


def accounts_since(before: Counter[str], identity: bytes) -> dict[str, GraphAccount]:
    """The accounts of graphs that were treated under that identity and have run since then.

    Args:
        before: what :func:`runs` returned.
        identity: the treatment's fingerprint.
    """
    return {
        name: account
        for name, (treated, account, _) in list(_accounts.items())  # another thread may run a graph meanwhile
        if treated == identity.hex() and _runs[name] > before[name]
    }


def _sizes(node: fx.Node) -> list[int | None]:
    return [size if isinstance(size, int) else None for size in node.meta["val"].shape]


def _ran(name: str, account: str) -> None:
    _runs[name] += 1
    known = _accounts.get(name)
    if known is None:
        known = _accounts[name] = read_account(account)
    if is_listened_to():
        announce(known[2])


hide_from_dynamo(_ran, and_all_below=True)
_LIBRARY.impl("ran", _ran, "CompositeExplicitAutograd")
_LIBRARY.impl("ran_beside", lambda ticket, name, account: _ran(name, account), "CompositeExplicitAutograd")
fx.node.has_side_effect(_ops.ran.default)  # so that compilers do not remove it
for _name in ("ran", "ran_beside"):
    torch.library.register_fake(f"backstash_graph::{_name}", lambda *_: None, lib=_LIBRARY)
