"""Stores hold planes between the forward and the backward pass: on the device, on the host, on a disk, or in tiers."""

from backstash.stores.base import Store, Ticket, Usage
from backstash.stores.device import DeviceStore
from backstash.stores.disk import DiskStore
from backstash.stores.host import HostStore
from backstash.stores.tiers import TierStore

__all__ = ["DeviceStore", "DiskStore", "HostStore", "Store", "Ticket", "TierStore", "Usage"]
