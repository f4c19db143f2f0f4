"""`mpi_print`: print one line for each rank, in the order of ranks."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from autograd.tracer import getval

from mpiad._typing import Comm
from mpiad.transport import channel


def mpi_print(*values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, comm: Comm = None) -> None:
    """Print one line for each rank, in the order of ranks.

    Parameters
    ----------
    *values : object
        Arguments of `print`; traced values are printed as plain values.
    sep, end : str
    file : file, optional
        Stream of rank 0, which writes all lines; standard output by default.
    comm : mpi4py intracommunicator, optional

    Ranks
    -----
    All ranks of `comm` call it.
    """
    used = channel(comm, "mpi_print")
    # One rank prints all lines, because MPI may mix the outputs of several ranks.
    line = sep.join([str(getval(value)) for value in values]) + end
    lines = used.data.gather(line, 0)
    if lines is not None:
        out = sys.stdout if file is None else file
        out.write("".join(lines))
        out.flush()
