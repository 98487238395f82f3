"""A running program kept within a budget."""
