"""Kernels in CUDA C, which solve one trajectory per thread. The same text is C++, with a loop instead of threads."""
