"""The form in which a graph saves a value: its choice, its encoding and decoding as calls, and the account of it."""
