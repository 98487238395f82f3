"""Train bigger networks in the memory you have: saved tensors, stored smaller."""

from typing import Any as _Any

from backstash import codecs, policies
from backstash import papers as papers  # whose policies have names from now on
from backstash.codecs import Codec, Encoded, register_codec
from backstash.compile import compile_backend, compile_options
from backstash.errors import BackstashError
from backstash.integrations.graphing import graphed
from backstash.integrations.loop import unwrap, wrap
from backstash.planning.measure.profiling import profile
from backstash.planning.model.plan import Plan
from backstash.planning.run import hidden as _hidden  # noqa: F401  # whose policy has a name from now on
from backstash.planning.run.batches import fit_batch
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.search.planner import plan
from backstash.policies.base import Keep, Policy, Recompute, Stash
from backstash.redeem import install as _readers  # noqa: F401  # what is plugged into every Session: see stash/seams.py
from backstash.remake import remaking as _producer  # noqa: F401
from backstash.replay import replaying as _replays  # noqa: F401
from backstash.report.meter import measure
from backstash.saved import Need
from backstash.session import Session
from backstash.stores import Store
from backstash.verifying import verify
from backstash.version import __version__ as __version__

codecs.load_all()  # so that torch knows every kernel as an op from now on

__all__ = [
    "BackstashError",
    "Budgeted",
    "Codec",
    "Encoded",
    "Keep",
    "Need",
    "Plan",
    "Policy",
    "Recompute",
    "Session",
    "Stash",
    "Store",
    "codecs",
    "compile_backend",
    "compile_options",
    "fit_batch",
    "graphed",
    "measure",
    "plan",
    "policies",
    "profile",
    "register_codec",
    "unwrap",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> _Any:
    """The two functions that IPython looks for in an extension, which nobody else needs."""
    if name in ("load_ipython_extension", "unload_ipython_extension"):
        from backstash.integrations import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
