"""Compilation of scalar functions: tracing to programs, differentiation, source text, machine code.

A function is called with `symbols`, which record the operations applied to them as a `Program`, in static single
assignment form. `derivatives` makes programs that compute the derivatives of a program. `source` writes a program as text,
in C++ or in the kernel language: a small typed subset of Python, in which other packages write loops around programs.
`folding` evaluates the static parts of larger kernels, which are Python functions. `translation` turns the kernel language
into LLVM's intermediate representation, and `cache` compiles the latter and stores the result.

This package is independent of ODEs, MPI and autograd's tapes.
"""
