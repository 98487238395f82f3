"""Runs programs that are not written for backstash: an unchanged training script, and the C library's allocator."""
