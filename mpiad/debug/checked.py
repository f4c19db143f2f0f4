"""`checked`: a part of the program in which communication is watched, as by ``MPIAD_DEBUG=1`` in all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpiad.transport import channel
from mpiad.transport.guarded import switch, watch_settings
from mpiad.transport.guarded.watch_settings import DEBUG_TIMEOUT, Settings

__all__ = ["checked"]


@contextmanager
def checked(call_sites: bool = True, timeout: float | None = None) -> Iterator[None]:
    """Watch the communication of a part of the program: the ranks compare what they are about to do.

    Parameters
    ----------
    call_sites : bool
        Whether the ranks must make a collective call without a root from the same line.
    timeout : float, optional
        Seconds that a wait may take; 0 for no limit. By default that of ``MPIAD_TIMEOUT``, else 300.

    Raises
    ------
    CommunicationMismatch
        Inside, on all ranks of a communicator that are about to do different things; where a message differs from what it
        is received into (`MessageMismatch`).
    DeadlockError
        Inside, where a wait takes longer.
    ValueError
        Where `timeout` isn't a number of seconds.

    Ranks
    -----
    All ranks of the world enter it, at the same place among their communication, and leave it.

    Examples
    --------
    >>> with mpiad.debug.checked():  # mismatches raise in here
    ...     J, gradient = mpiad.value_and_grad(mpiad.mpi_allreduce)(1.0)
    """
    channel(None, "checked")  # raises before the start and after the end of MPI
    before = watch_settings.present()
    limit = before.timeout or DEBUG_TIMEOUT if timeout is None else watch_settings.seconds_of(timeout, "checked: timeout")
    switch.apply(Settings(True, limit, call_sites))
    try:
        yield
    finally:
        switch.restore(before)
