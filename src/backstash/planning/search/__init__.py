"""The fastest ways to hold a step's values within a budget."""
