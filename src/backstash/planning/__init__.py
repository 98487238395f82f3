"""Traces of training steps: which buffers are alive when, and the least memory that a static allocator needs."""
