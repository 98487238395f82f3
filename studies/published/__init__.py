"""Writes every table and every number of README.md and docs/ that was measured, from docs/results.

``python -m studies.published`` rewrites the pages in place; with ``--check`` it writes nothing, and fails where a
page differs. A page says where a figure belongs with comments that Markdown does not show:

* ``<!-- table: NAME -->`` and ``<!-- end -->`` around a table,
* ``<!-- n: NAME -->`` and ``<!-- /n -->`` around a number in a sentence,
* ``<!-- file: KIND -->`` and ``<!-- /file -->`` around a link to the newest results of a kind.

Nothing here imports torch or backstash: pages can be checked on a machine that has neither.
"""
