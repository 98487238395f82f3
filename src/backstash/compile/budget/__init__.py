"""A graph under a budget in bytes: its memory at each operator, and the search for what it saves."""
