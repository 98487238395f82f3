"""Train bigger networks in the memory you have: saved tensors, stored smaller."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from backstash import codecs, policies
from backstash import papers as papers  # whose policies have names from now on
from backstash.codecs import Codec, Encoded, register_codec
from backstash.errors import BackstashError
from backstash.facade import on_demand as _on_demand
from backstash.planning.run import hidden as _hidden  # noqa: F401  # whose policy has a name from now on
from backstash.policies.base import Keep, Policy, Recompute, Stash
from backstash.redeem import install as _readers  # noqa: F401  # what is plugged into every Session: see stash/seams.py
from backstash.remake import remaking as _producer  # noqa: F401
from backstash.replay import replaying as _replays  # noqa: F401
from backstash.saved import Need
from backstash.session import Session
from backstash.stores import Store
from backstash.version import __version__ as __version__

if _TYPE_CHECKING:
    from backstash.compile import compile_backend, compile_options
    from backstash.integrations.graphing import graphed
    from backstash.integrations.loop import unwrap, wrap
    from backstash.planning.measure.profiling import profile
    from backstash.planning.model.plan import Plan
    from backstash.planning.run.batches import fit_batch
    from backstash.planning.run.budgeted import Budgeted
    from backstash.planning.search.planner import plan
    from backstash.report.meter import measure
    from backstash.verifying import verify

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


_HOMES = {
    "Budgeted": "planning.run.budgeted",
    "Plan": "planning.model.plan",
    "compile_backend": "compile",
    "compile_options": "compile",
    "fit_batch": "planning.run.batches",
    "graphed": "integrations.graphing",
    "load_ipython_extension": "integrations.notebook",
    "measure": "report.meter",
    "plan": "planning.search.planner",
    "profile": "planning.measure.profiling",
    "unload_ipython_extension": "integrations.notebook",
    "unwrap": "integrations.loop",
    "verify": "verifying",
    "wrap": "integrations.loop",
}

__getattr__, __dir__ = _on_demand(__name__, _HOMES)
