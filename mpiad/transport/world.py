"""Start and end of the library in this process: at import, in `mpi_init` and in `mpi_finalize`."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Callable

from mpi4py import MPI

from mpiad.errors import CommunicatorError, DeadlockError
from mpiad.transport import device_settings
from mpiad.transport.abort import is_rank
from mpiad.transport.departure import code_at_end, note_finalize, watch_departures
from mpiad.transport.fault_tolerance import all_have_come, leave_process
from mpiad.transport.guarded import closing, switch, watch_settings
from mpiad.transport.launcher import in_pool, warn_of_separate_worlds
from mpiad.transport.lookup import close_world, open_world
from mpiad.transport.malloc import prepare_memory
from mpiad.transport.pinned import close_pools
from mpiad.transport.polling import Backoff
from mpiad.transport.recovery import interruptible
from mpiad.transport.signals import install_signal_handlers
from mpiad.transport.threads import limit_threads
from mpiad.transport.uncaught import install_hooks

_local: tuple[int, int] | None = None
_TIME_TO_LOAD = 20.0  # seconds; with a slow file system, ranks may load modules at different times
_LONG = 60.0
_log = logging.getLogger("mpiad")
_begins: list[Callable[[], None]] = []
_ends: list[Callable[[], None]] = []


def start(call: str) -> None:
    """Prepare the world, once; collective over all ranks.

    Raises a CommunicatorError after the end of MPI, or on a rank of a task pool, in which not all ranks call this.
    """
    global _local
    if MPI.Is_finalized():
        raise CommunicatorError(f"{call}: called after mpi_finalize. MPI can't be started again in this process.")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    if _local is not None:
        return
    if MPI.COMM_WORLD.size > 1 and in_pool():
        raise CommunicatorError(
            f"{call}: all ranks must call this, but `python -m mpi4py.futures` runs the program on rank 0 alone, and the "
            "others wait for tasks. Run it on all ranks, without `-m mpi4py.futures`, and distribute the tasks "
            "by mpiad.mpi_map, or by mpi4py.futures.MPICommExecutor after the import of mpiad."
        )
    aborts = install_hooks()
    # Before the first duplicate: MPI would wait in it silently for ranks that never import mpiad.
    meet(call)
    open_world()
    warn_of_separate_worlds(MPI.COMM_WORLD.size)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    _local = node.rank, node.size
    node.Free()
    if aborts:
        install_signal_handlers()
        watch_departures()  # after `meet`, too, since it creates a duplicate
    switch.start()
    device_settings.start()
    prepare_memory()
    limit_threads(_local[1])
    for begin in _begins:
        begin()


def meet(call: str) -> None:
    """Wait until all ranks have called this, since MPI alone would wait in silence; `call`: for messages.

    Raises a DeadlockError after ``MPIAD_TIMEOUT``, but not before the time that Python needs to load its modules.
    """
    limit = None
    with contextlib.suppress(ValueError):  # which `switch.start` raises, on all ranks
        asked = watch_settings.from_environment().timeout
        limit = None if asked is None else max(asked, _TIME_TO_LOAD)
    request, patience, warned = MPI.COMM_WORLD.Ibarrier(), Backoff(), False
    while not request.Test():
        waits = (
            f"{call}: rank {MPI.COMM_WORLD.rank} has waited for {patience.seconds:.0f} seconds for other ranks. All ranks "
            "must import mpiad (or call mpi_init, if MPI is initialized later), and no rank may end before it has."
        )
        if limit is not None and patience.seconds > limit:
            raise DeadlockError(waits)
        if not warned and patience.seconds > _LONG:
            _log.warning(waits)
            warned = True
        patience.pause()


def at_start(begin: Callable[[], None]) -> None:
    """Call a collective function when the world is prepared, or at once if it already is."""
    _begins.append(begin)
    if initialized():
        begin()


def at_end(end: Callable[[], None]) -> None:
    """Call a collective function before the world is closed."""
    _ends.append(end)


def any_rank(asks: bool) -> bool:
    """Return whether `asks` is true on any rank; collective. Not every launcher passes variables on to all nodes."""
    return bool(MPI.COMM_WORLD.allreduce(asks, MPI.LOR))


def local_rank() -> int:
    """Return this rank's number among the ranks of its node."""
    if _local is None:
        start("mpi_local_rank")
    return _local[0]  # type: ignore[index]


def initialized() -> bool:
    """Return whether communication is possible: MPI initialized and not finalized, the world prepared."""
    return _local is not None and MPI.Is_initialized() and not MPI.Is_finalized()


def finalized() -> bool:
    """Return whether MPI was finalized."""
    return MPI.Is_finalized()


def finalize() -> None:
    """Complete pending sends and finalize MPI; collective over all ranks. A second call does nothing."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        note_finalize()
        closing.close(_end_world)
        if all_have_come():
            MPI.Finalize()


def level_of_repeats() -> int:
    """Return the level of a warning that nearly all ranks log: INFO on most of them."""
    world = MPI.COMM_WORLD
    return logging.WARNING if not is_rank() or speaks(world.rank, world.size) else logging.INFO


def speaks(rank: int, size: int) -> bool:
    """Return whether a rank logs for others: 0, 1, 2, 4, 8 and so on, and the last one, often at a grid's edge."""
    return rank & (rank - 1) == 0 or rank == size - 1


def _complete_at_exit() -> None:
    if is_rank():
        closing.close_at_exit(_end_world)
        if not all_have_come():
            leave_process(code_at_end())


atexit.register(_complete_at_exit)


def _end_world() -> None:
    for end in _ends:
        end()
    # After a failure, others may wait for this rank; then they all learn of the failure.
    interruptible("the end of the program", close_world)()
    close_pools()


if MPI.Is_initialized() and not MPI.Is_finalized():
    start("import mpiad")
