"""Stores hold planes between forward and backward: on the device, on the host, on a disk, on another rank, in tiers."""

from typing import TYPE_CHECKING

from backstash.facade import on_demand
from backstash.stores.base import Store, Ticket, Usage
from backstash.stores.device import DeviceStore

if TYPE_CHECKING:
    from backstash.stores.disk import DiskStore
    from backstash.stores.host import HostStore
    from backstash.stores.peer import PeerStore
    from backstash.stores.tiers import TierStore

__all__ = ["DeviceStore", "DiskStore", "HostStore", "PeerStore", "Store", "Ticket", "TierStore", "Usage"]

_HOMES = {"DiskStore": "disk", "HostStore": "host", "PeerStore": "peer", "TierStore": "tiers"}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
