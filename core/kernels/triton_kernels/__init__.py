"""Kernels in Triton, one operation a file; imported by the operators when they first run, for it takes a second."""
