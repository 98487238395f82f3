"""Kernels in CUDA C++ (``native/onepass/kernels.cu``), and a launcher of our own for them and for Triton's cubins.

``setup.py`` compiles the fatbin where nvcc is, and the launcher where a C++ compiler is. Where one of them is missing,
or a first launch does not give the right bits, whoever asked does without: torch's calls are repeated one by one.
"""
