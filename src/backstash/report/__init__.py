"""Measures steps and scripts, and shows the results: real peaks, comparisons of policies, charts, and this machine."""
