"""Forward passes that go as an earlier one went: what a pass has taught is a script, and a settled pass runs it.

:mod:`program` says what a script is, :mod:`recorder` writes one down while a pass goes the long way, and
:mod:`replaying` decides which passes of a Session run it. The interpreter is in native/replay.
"""
