"""Checks that backward reads the bits that forward had, under anybody's checkpoint, offloader or compiler.

A step is watched as it is (``watch.py``), and run once more with every saver switched off (``reference.py``). Checksums
are compared, and nothing is held for it. Where something differs, two more runs tell how far and why.
"""

from backstash.verifying.step import verify
from backstash.verifying.verdict import Verification, VerifyFinding

__all__ = ["Verification", "VerifyFinding", "verify"]
