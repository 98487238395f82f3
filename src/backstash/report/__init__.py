"""Measuring and showing: the real peak of a step, tables, charts."""
