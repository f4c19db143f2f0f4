"""Kernels as CUDA C: one trajectory in each thread. The same text is C++, with a loop in place of the threads."""
