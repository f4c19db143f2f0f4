"""Kernels as CUDA C: one trajectory in each thread. The same text is C++, where a loop takes the threads' place."""
