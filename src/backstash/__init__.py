"""Train bigger networks in the memory you have: saved tensors, stored smaller."""

from backstash import codecs, policies
from backstash.codecs import Codec, Encoded, register_codec
from backstash.errors import BackstashError
from backstash.integrations.loop import unwrap, wrap
from backstash.policies.base import Keep, Policy, Recompute, Stash
from backstash.report.meter import measure
from backstash.saved import Need
from backstash.session import Session
from backstash.stores import Store
from backstash.version import __version__ as __version__

__all__ = [
    "BackstashError",
    "Codec",
    "Encoded",
    "Keep",
    "Need",
    "Policy",
    "Recompute",
    "Session",
    "Stash",
    "Store",
    "codecs",
    "measure",
    "policies",
    "register_codec",
    "unwrap",
    "wrap",
]
