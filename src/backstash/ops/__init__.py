"""Kernels: schemas, a plain reference, C++ for CPUs, Triton for GPUs."""
