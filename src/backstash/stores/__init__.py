"""Where planes are held between forward and backward."""

from backstash.stores.base import Store, Ticket, Usage
from backstash.stores.device import DeviceStore

__all__ = ["DeviceStore", "Store", "Ticket", "Usage"]
