"""The watch of a program or of a part of it (`watch`, `checked`), and comparison of copies (`assert_replicated`)."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mpiad._typing import Comm, Tree
from mpiad.pytrees import named_leaves
from mpiad.transport import channel
from mpiad.transport.core import lookup
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.exits.abort import end_job
from mpiad.transport.watch import switch, watch_settings
from mpiad.transport.watch.watch_settings import DEBUG_TIMEOUT, Settings
from mpiad.transport.world import start

_USAGE = "usage: mpiexec -n RANKS python -m mpiad.watch (PROGRAM.py | -m MODULE) [ARGUMENTS]"


@contextmanager
def checked(call_sites: bool = True, timeout: float | None = None) -> Iterator[None]:
    """Compare the calls of the ranks before each communication in a part of the program.

    Parameters
    ----------
    call_sites : bool
        Whether collective calls without a root are also compared by line: all ranks must call from the same line.
    timeout : float, optional
        The maximum duration of a wait in seconds; 0 for no limit. By default the current limit (set by
        ``MPIAD_TIMEOUT`` or an outer `checked`), or 300 if there is none.

    Raises
    ------
    CommunicationMismatchError
        Inside the block, on all ranks of the communicator, if their calls differ; a `MessageMismatchError` if a message
        doesn't match the array that receives it.
    DeadlockError
        Inside the block, if a wait takes longer than the timeout.
    ValueError
        If `timeout` isn't a number of seconds.

    Ranks
    -----
    All ranks of the world enter and leave the block, each after the same communication calls.

    Examples
    --------
    >>> with mpiad.debug.checked():  # mismatches raise inside this block
    ...     J, gradient = mpiad.value_and_grad(mpiad.mpi_allreduce)(1.0)
    """
    channel(None, "checked")  # raises before the start and after the end of MPI
    previous = watch_settings.present()
    limit = previous.timeout or DEBUG_TIMEOUT if timeout is None else watch_settings.seconds_of(timeout, "checked: timeout")
    try:
        switch.apply(Settings(True, limit, call_sites))
        yield
    finally:
        switch.restore(previous)


def watch(comm: Comm = None) -> Comm:
    """Watch the program's own calls of mpi4py: end the job, with a table of all ranks' calls, if they wait forever.

    The watch lasts until the end of the program. Under ``MPIAD_DEBUG=1`` the ranks also compare their blocking collectives,
    and raise a CommunicationMismatchError if name, root, reduction, count or type differ.

    Parameters
    ----------
    comm : mpi4py intracommunicator, optional
        By default MPI.COMM_WORLD.

    Returns
    -------
    mpi4py intracommunicator
        A communicator with the same ranks and contexts, on which calls are watched. So are calls on communicators that are
        made from it, and on its requests. It also replaces MPI.COMM_WORLD if `comm` is this communicator.

    Ranks
    -----
    All ranks of the world.

    Notes
    -----
    If a wait can't end, the table comes within two seconds; otherwise after ``MPIAD_TIMEOUT``, 300 seconds by default.

    Examples
    --------
    >>> comm = mpiad.debug.watch()
    >>> comm.Barrier()  # ends the job if another rank doesn't take part
    """
    start("watch")
    return switch.watch_program(lookup.member(comm, "watch"), lambda text: end_job(f"mpiad.watch: {text}\n", 1))


def main(arguments: list[str]) -> None:
    """Run a program or a module under the watch."""
    is_module = arguments[:1] == ["-m"]
    if len(arguments) <= is_module:
        sys.exit(_USAGE)
    watch()
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def assert_replicated(x: Tree, comm: Comm = None, name: str = "x") -> None:
    """Raise on all ranks if the ranks' copies of a value differ.

    Parameters
    ----------
    x : pytree of arrays, numbers and strings
        This rank's copy of the value. For traced arrays the plain values are compared.
    comm : mpi4py intracommunicator, optional
    name : str
        The name of the value in the message.

    Raises
    ------
    ReplicationError
        If the copies differ. The message names the ranks whose copies differ from the most common copy, and for the first
        leaf that differs its path, the index of its first different entry, and the size of its largest difference, or the
        different shapes, dtypes or structures. The error is a ValueError.
    TypeError
        On all ranks, if any rank has a leaf that isn't a number, a string, an array of these, or None.

    Ranks
    -----
    All ranks of `comm` call it. If the copies are equal, the cost is a hash of x and one reduction of 40 bytes.

    Notes
    -----
    Equal means equal in every bit: ``-0.0`` differs from ``0.0``, and a NaN equals only a NaN with the same bits. Lists and
    tuples are equivalent, and the order of a dict's keys doesn't matter.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> mpiad.debug.assert_replicated({"w": np.ones(2)})  # raises if any rank has another value
    """
    group = channel(comm, "assert_replicated")
    require_replicated(group, named_leaves(x, name), f"assert_replicated: {name} must be the same on all ranks")
