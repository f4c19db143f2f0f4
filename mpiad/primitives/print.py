"""`mpi_print`: one whole line for each rank, in the order of ranks."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from autograd.tracer import getval

from mpiad._typing import Comm
from mpiad.transport import channel


def mpi_print(*values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, comm: Comm = None) -> None:
    """Print one line for each rank, in the order of ranks, none mixed with another.

    Parameters
    ----------
    *values : object
        As `print` takes them; of traced values the plain value is shown.
    sep, end : str
    file : file, optional
        Stream of rank 0, which writes all lines; standard output by default.
    comm : mpi4py intracommunicator, optional

    Ranks
    -----
    All ranks of `comm` call it.
    """
    used = channel(comm, "mpi_print")
    # As one text to one rank: separate outputs of the ranks arrive on a terminal in any order, and in pieces.
    line = sep.join([str(getval(value)) for value in values]) + end
    lines = used.data.gather(line, 0)
    if lines is not None:
        out = sys.stdout if file is None else file
        out.write("".join(lines))
        out.flush()
