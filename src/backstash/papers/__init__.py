"""The rooms of published systems: the policies that one of them alone uses, and what steers these.

A room imports public names only, so whatever is done here can be done outside of this package. Nothing imports a room
but ``backstash`` itself, and each makes its names known with ``publish`` and ``register`` of :mod:`backstash.policies`.
"""

from backstash.papers import gist as gist  # isort: split

from backstash.papers import cdma as cdma
from backstash.papers import comet as comet
from backstash.papers import layrub as layrub
from backstash.policies import publish

publish(comet=comet)
