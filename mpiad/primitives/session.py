"""Initialization and end of MPI, `reset` of communicators, rank and size; `mpi_print`, `stop_gradient`."""

from __future__ import annotations

import sys
from typing import TextIO

from autograd import tracer
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Rank
from mpiad.pytrees import FIELDS, map_leaves
from mpiad.transport import channel, member, prepare, renew, world
from mpiad.transport.world import start


def mpi_init(comm: Comm = None, *, world: Comm = None) -> None:
    """Start the library, initialize MPI if it isn't initialized, and prepare a communicator for every kind of call.

    Without this call, each rank's first communicating call starts the library, on all ranks of ``MPI.COMM_WORLD``.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        The world by default.
    world : mpi4py intracommunicator, optional
        The communicator that ``comm=None`` means in all functions, by default ``MPI.COMM_WORLD``: the ranks that use the
        library, if the other ranks of the job run another program. It can't be changed after the start of the library.

    Raises
    ------
    TypeError
        If `comm` or `world` isn't a communicator.
    CommunicatorError
        If `comm` or `world` is freed, null or an intercommunicator; if MPI has ended; if a rank of the same node ends
        without such a call, or starts the library with another `world`; if the library has been started with another
        `world`; or if `comm` has ranks outside of `world`.
    DeadlockError
        If ranks are missing after ``MPIAD_TIMEOUT`` seconds.

    Ranks
    -----
    All ranks of `comm` call it, or of `world`. The first call in a program returns when all ranks of the world have started
    the library. Further calls for the same communicator do nothing.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> rank = mpiad.mpi_rank()
    >>> row = MPI.COMM_WORLD.Split(rank // 2)
    >>> mpiad.mpi_init(row)
    >>> print(mpiad.mpi_rank(row) == rank % 2)
    True
    """
    start("mpi_init", world)
    if comm is not None:
        prepare(comm, "mpi_init")


def mpi_initialized() -> bool:
    """Return whether communication is possible: MPI is initialized and not finalized.

    Examples
    --------
    >>> mpiad.mpi_initialized()
    True
    """
    return world.initialized()


def mpi_finalize() -> None:
    """Complete pending sends and finalize MPI; without this call, this happens at the end of the program.

    Ranks
    -----
    All ranks of the world call it. Further calls do nothing.
    """
    world.finalize()


def mpi_finalized() -> bool:
    """Return whether MPI was finalized.

    Examples
    --------
    >>> mpiad.mpi_finalized()
    False
    """
    return world.finalized()


def mpi_rank(comm: Comm = None) -> Rank:
    """Return this process's rank.

    Raises
    ------
    TypeError, CommunicatorError
        If `comm` isn't a communicator, is freed, null or an intercommunicator; if MPI isn't initialized or has ended.

    Examples
    --------
    >>> 0 <= mpiad.mpi_rank() < mpiad.mpi_size()
    True
    """
    return member(comm, "mpi_rank").rank


def mpi_size(comm: Comm = None) -> int:
    """Return the number of ranks; the exceptions are those of `mpi_rank`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> mpiad.mpi_size(MPI.COMM_SELF)
    1
    """
    return member(comm, "mpi_size").size


def mpi_local_rank() -> Rank:
    """Return this process's rank among the ranks of its node, which determines the GPU of the process.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> 0 <= mpiad.mpi_local_rank() <= rank
    True
    """
    return world.local_rank()


def reset(comm: Comm = None) -> None:
    """Renew the library's duplicates of a communicator after an exception left unfinished messages.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        The world by default.

    Raises
    ------
    CommunicatorError
        If `comm` is freed, null or an intercommunicator, or if MPI isn't initialized or has ended.

    Ranks
    -----
    All ranks of `comm` call it, after they have caught the exception.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> comm = MPI.COMM_WORLD.Dup()
    >>> mpiad.mpi_init(comm)
    >>> mpiad.reset(comm)  # after an exception that all ranks have caught
    """
    renew(comm, "reset")


def stop_gradient(x: Array) -> Array:
    """Return the plain value of a traced value; it is a constant in all derivatives.

    Parameters
    ----------
    x : array or number, or a pytree of dict, list and tuple

    Returns
    -------
    array or number, or a pytree of them
        `x` itself if it isn't traced.

    Examples
    --------
    >>> print(mpiad.grad(lambda x: mpiad.stop_gradient(x) * x, objective="sum")(3.0))
    3.0
    """
    getval = tracer.getval  # looked up in each call: traces of compiled ensembles replace it
    return map_leaves(getval, x) if isinstance(x, (dict, list, tuple)) or type(x) in FIELDS else getval(x)


def mpi_print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, comm: Comm = None) -> None:
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
