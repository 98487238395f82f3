"""``python -m backstash``: the command line."""

from backstash.cli import main

main()
