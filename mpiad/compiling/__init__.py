"""Functions of numbers made scalar programs, these differentiated, written as text, and compiled to machine code.

A function is called with symbols (`tracing`), which record the operations applied to them: a `Program`, in static single
assignment, of named groups of inputs. Its derivatives are programs (`derivatives`), and `source` writes it, in C or in the
kernel language. That is a small typed part of Python, in which others write loops around programs: `translation` makes
LLVM's intermediate representation of it, `machine_code` functions, and `cache` keeps them for the next process.

Nothing here knows of ODEs, MPI or autograd's tapes.
"""
