"""The first minutes on a GPU: six programs, each at most ten minutes. ``python -m bench.gpu g1`` to ``g6``.

They need nothing from the network. Each writes a JSON file and a page of text, and goes on where it was stopped. They
run on a fake accelerator as well (``--device fake --small``), where times mean nothing.
"""
