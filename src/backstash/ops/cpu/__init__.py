"""The kernels in C++ (``native/``), called through ctypes.

A family's ``cpu.py`` has its functions; ``library`` finds the compiled code, and ``planes`` is what they share. Every
plane is byte-identical to the reference's. What the C++ does not take, a function hands to the reference; the head of
each file says what that is.

Outputs of a decoder belong to the caller: whoever allocates one calls ``backends.advise_huge`` on it first.
"""

from backstash.ops.cpu.library import available as available
from backstash.ops.cpu.library import build_info as build_info
from backstash.ops.cpu.library import isa as isa
from backstash.ops.cpu.library import set_isa as set_isa
