"""A traced graph as it is read and rearranged: its values, their readers and memory order, and calls put into it."""
