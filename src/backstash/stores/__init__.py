"""Stores hold planes between forward and backward: on the device, on the host, on a disk, on another rank, in tiers."""

from backstash.stores.base import Store, Ticket, Usage
from backstash.stores.device import DeviceStore
from backstash.stores.disk import DiskStore
from backstash.stores.host import HostStore
from backstash.stores.peer import PeerStore
from backstash.stores.tiers import TierStore

__all__ = ["DeviceStore", "DiskStore", "HostStore", "PeerStore", "Store", "Ticket", "TierStore", "Usage"]
