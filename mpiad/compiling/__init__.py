"""Scalar programs and loops over arrays, compiled to machine code by LLVM."""
