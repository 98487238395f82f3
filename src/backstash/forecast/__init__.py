"""A training on a card that is not here: its step is traced without numbers, and what it takes there is computed."""
