"""The definition of every kernel, in plain torch and dull on purpose. Runs on any device.

A file holds a family of kernels, each with its row of the table (``ops/table.py``). ``ops/cpu`` and ``ops/triton`` have
files of the same names.
"""

from backstash.ops.reference.bits import bits_of as bits_of
