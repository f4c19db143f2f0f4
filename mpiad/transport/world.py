"""Start and end of the library: at the first communicating call or in `mpi_init`, and in `mpi_finalize` or at exit.

The import makes no call of MPI that waits for other ranks. Ranks that wait in their first call detect whether the other
ranks have also made their first call, or have ended without one. Messages or collectives of MPI can't be used for this,
since the program's own ones could match them. So each rank binds a socket, whose name contains the job, the rank and its
state. The other ranks of the node check which sockets can be reached; those of an ended process can't. The sockets are
files in a folder of shared memory to which only this user has access: other users could otherwise bind the name of a rank.
Without such a folder, ranks don't see each other, as on different nodes.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from mpi4py import MPI

from mpiad._typing import Comm, Rank
from mpiad.cache_folder import own_folder, private_folder
from mpiad.errors import CommunicationMismatchError, CommunicatorError, DeadlockError
from mpiad.transport.core import lookup
from mpiad.transport.core.channels import base, live_channels, world_ranks
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, all_ranks_alive, exit_process, flush_streams, lost_ranks
from mpiad.transport.core.polling import Backoff
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices import device_messages, device_settings
from mpiad.transport.devices.node_memory import set_deadline
from mpiad.transport.devices.staging import close_pools
from mpiad.transport.exits.abort import before_abort, end_by, install_hooks, is_rank
from mpiad.transport.exits.departure import (
    await_others,
    code_at_end,
    end_of_program,
    note_finalize,
    prepare_await_others,
    watch_for_exit,
)
from mpiad.transport.exits.recovery import interruptible
from mpiad.transport.exits.signals import install_signal_handlers
from mpiad.transport.launcher import in_pool, warn_of_separate_worlds
from mpiad.transport.resources import limit_threads, prepare_memory
from mpiad.transport.watch import switch, watch_settings
from mpiad.transport.watch.call_agreement import rank_ranges
from mpiad.transport.watch.message_headers import left_over
from mpiad.transport.watch.timed_waits import set_reporter

_local: tuple[int, int] | None = None
_TIME_TO_LOAD = 20.0  # seconds; with a slow file system, ranks may load modules at different times
_WARNING_AFTER = 8.0  # seconds
_BETWEEN_CHECKS = 0.5  # seconds; a check takes 10 µs for each rank of the world
_UNTIL_KILLED, _GRACE = 3.0, 5.0  # seconds
_TAG = 28013  # only a call of Create_group by the program, with this tag, could match
_ADVICE = (
    "The first communicating call starts the library, and all ranks of COMM_WORLD must make it. Call mpiad.mpi_init() on "
    "all ranks at the beginning of the program if some ranks communicate later than others, or never; or "
    "mpiad.mpi_init(world=comm) on the ranks of comm if the others run another program."
)
_starting = threading.RLock()
_log = logging.getLogger("mpiad")
_communicators: dict[tuple[Rank, ...], list[Comm]] = {}  # by ranks: the communicator; empty while a thread makes it
_begins: list[Callable[[], None]] = []
_ends: list[Callable[[], None]] = []


@cache
def prepare_process() -> bool:
    """Make the preparations that need no other rank; return whether an uncaught exception or a signal ends the job."""
    warn_of_separate_worlds(MPI.COMM_WORLD.size)
    prepare_memory()
    ends_job = not in_pool() and install_hooks()
    if ends_job:
        install_signal_handlers()
        watch_for_exit()
    return ends_job


def start(call: str, comm: Comm = None) -> None:
    """Start the library on all ranks of `comm`, by default COMM_WORLD, once; the first communication or `mpi_init` does it.

    A CommunicatorError is raised after the end of MPI, in a task pool, if the library has been started on another
    communicator, or if a rank ends without calling this or calls it for another communicator; collective.
    """
    lookup.refuse_fork(call)
    if MPI.Is_finalized():
        raise CommunicatorError(f"{call}: called after mpi_finalize. MPI can't be started again in this process.")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    if comm is not None:
        lookup.member(comm, f"{call}(world=comm)")
    with _starting:
        if not started():
            _start(call, MPI.COMM_WORLD if comm is None else comm)
        elif comm is not None and comm != lookup.member(None, call):
            raise CommunicatorError(
                f"{call}: the library is already started on another communicator, of {base().size} ranks. Call "
                "mpi_init(world=comm) once, before the first communicating call."
            )


def _start(call: str, comm: Comm) -> None:
    global _local
    if comm.size > 1 and in_pool():
        raise CommunicatorError(
            f"{call}: all ranks must call this, but `python -m mpi4py.futures` runs the program on rank 0 alone, and the "
            "others wait for tasks. Run it on all ranks, without `-m mpi4py.futures`, and distribute the tasks "
            "by mpiad.mpi_map, or by mpi4py.futures.MPICommExecutor."
        )
    ends_job = prepare_process()
    private = await_all_ranks(call, comm)
    lookup.set_world(comm, private)
    # These two raise on all ranks if a variable has an invalid value, and the next call starts again.
    switch.start()
    device_settings.start(private)
    lookup.open_world()
    node = private.Split_type(MPI.COMM_TYPE_SHARED)
    _local = node.rank, node.size
    set_deadline(lambda: watch_settings.present().timeout)
    device_messages.start(node, world_ranks(node), device_settings.may_bring_arrays())
    node.Free()
    if _local[0] == 0:
        _remove_old_sockets()
    if ends_job:
        before_abort.append(device_messages.release_waits)
        prepare_await_others()
    limit_threads(private, _local[1])
    # The calls of these functions aren't part of a program that is being traced.
    traced, tracing.recorder = tracing.recorder, None
    try:
        for begin in _begins:
            begin()
    finally:
        tracing.recorder = traced


def await_all_ranks(call: str, comm: Comm) -> Comm:
    """Return another communicator of the ranks of `comm`, after all have called this; `call`: for messages.

    The call of MPI that makes it can't match a call of the program on other ranks, but waits for them without a message.
    So it is made after all ranks are seen here, or by a second thread if they can't be seen. A CommunicatorError is raised
    if a rank of this node has ended without calling this, or calls it for other ranks; a DeadlockError after
    ``MPIAD_TIMEOUT``, but not before the time that Python needs to load its modules.
    """
    ranks = tuple(world_ranks(comm, MPI.COMM_WORLD))
    if min(ranks) < 0:
        raise CommunicatorError(f"{call}: the world must consist of ranks of MPI.COMM_WORLD, without spawned processes.")
    limit = None
    with contextlib.suppress(ValueError):  # which `switch.start` raises, on all ranks
        asked = watch_settings.from_environment().timeout
        limit = None if asked is None else max(asked, _TIME_TO_LOAD)
    in_thread, made = ranks in _communicators, _communicators.get(ranks, [])
    state = f"{_STARTS} {hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
    _announce(state)
    _announce(_STARTS)
    on_one_node = any(os.environ.get(name) == str(MPI.COMM_WORLD.size) for name in _SIZES_OF_NODE)
    visible = on_one_node and _is_in(state, MPI.COMM_WORLD.rank)
    missing, patience, warned, checked = {*ranks} - {MPI.COMM_WORLD.rank}, Backoff(), False, 0.0
    while not made:
        while missing and _is_in(state, min(missing)):
            missing.remove(min(missing))
        if not in_thread and not (visible and missing):
            in_thread, _communicators[ranks] = True, made
            make = partial(_make_own, comm, made)
            threading.Thread(target=make, name="mpiad-start", daemon=True).start() if missing else make()
        elif patience.seconds > checked + _BETWEEN_CHECKS:
            checked = patience.seconds
            if ended := _ranks_in(_ENDED, ranks):
                raise CommunicatorError(f"{_waits(call, checked)} {_listed(ended)} ended without such a call. {_ADVICE}")
            if FAULT_TOLERANT:
                with contextlib.suppress(MPI.Exception):
                    comm.Iprobe(MPI.ANY_SOURCE, _TAG)  # MPI learns of a death only in such calls
                if died := [ranks[k] for k in lost_ranks(comm)]:
                    raise CommunicatorError(f"{_waits(call, checked)} The process of {_listed(died).lower()} has died.")
            elsewhere = _ranks_in(_STARTS, ranks)  # before their other state, which they announce first
            if elsewhere := sorted({*elsewhere} - {*_ranks_in(state, ranks)}):
                text = f"{_waits(call, checked)} {_listed(elsewhere)} started it for other ranks."
                raise CommunicatorError(f"{text} Call mpiad.mpi_init(world=comm) on all ranks of comm, before other calls.")
            if limit is not None and checked > limit:
                raise DeadlockError(f"{_waits(call, checked)}{_absent(state, ranks)} {_ADVICE}")
            if not warned and checked > _WARNING_AFTER:
                _log.warning(f"{_waits(call, checked)}{_absent(state, ranks)} {_ADVICE}")
                warned = True
        patience.pause()
    return made[0]


def _make_own(comm: Comm, communicators: list[Comm]) -> None:
    if comm.size == 1:
        communicators.append(MPI.COMM_SELF.Dup())
        return
    group = comm.Get_group()
    try:
        communicators.append(MPI.Intracomm.Create_from_group(group, "mpiad"))
    except (NotImplementedError, MPI.Exception):  # before MPI 4, or without support by the launcher
        communicators.append(MPI.COMM_WORLD.Create_group(group, _TAG))
    group.Free()


def _waits(call: str, seconds: float) -> str:
    return (
        f"{call}: rank {MPI.COMM_WORLD.rank} has waited for {seconds:.0f} seconds until all ranks make their first "
        "communicating call of mpiad."
    )


def _absent(state: str, ranks: Sequence[Rank]) -> str:
    """Return a sentence about the ranks that haven't begun to start; "" if they can't be seen."""
    here = _ranks_in(state, ranks)
    absent = [rank for rank in ranks if rank not in here]
    return f" {_listed(absent)} made none so far, or run on another node." if here and absent else ""


def _listed(ranks: Sequence[Rank]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"


_STARTS, _ENDED = "starts", "ended"  # states of a rank
# The same for all ranks of a node, unlike a folder named by an environment variable: MPI's shared memory is there, too.
_SHARED_MEMORY = Path("/dev/shm")
_UNTIL_BOUND = 60.0  # seconds

# Names of launchers' processes from which all ranks of a job on a node descend, and variables that differ between jobs.
_LAUNCHERS = ("hydra_pmi_proxy", "prted", "prterun", "orted", "mpirun", "mpiexec", "slurmstepd", "flux-shell", "palsd")
_SIZES_OF_NODE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # numbers of ranks on this node, set by launchers
_OF_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID", "FLUX_JOB_ID", "PALS_APID")


def _announce(state: str) -> None:
    """Make the state of this rank visible to the other ranks of its node."""
    if MPI.COMM_WORLD.size > 1 and _job():
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):  # it is visible already, or there is no folder
            found.bind(_socket_name(MPI.COMM_WORLD.rank, state))
        found.detach()  # so that it stays open in MPI_Finalize, which mpi4py calls after the end of Python


def _is_in(state: str, rank: Rank) -> bool:
    return _is_bound(_socket_name(rank, state))


def _is_bound(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks, contextlib.suppress(OSError):
        asks.connect(name)
        return True
    return False


def _ranks_in(state: str, ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks of this node in a state; none on systems without such sockets."""
    return [rank for rank in ranks if _is_in(state, rank)]


def _socket_name(rank: Rank, state: str) -> str:
    return f"{_folder()}/{_job()}-{rank}-{state}"  # at most 107 bytes


@cache
def _folder() -> str:
    """Return the folder of this user's sockets on this node; one that doesn't exist if other users could write into it."""
    try:
        return str(private_folder(own_folder(_SHARED_MEMORY)))
    except OSError as error:
        _log.info(f"ranks don't see which others have started, since there is no folder for their sockets: {error}.")
        return os.devnull


def _remove_old_sockets() -> None:
    """Remove the sockets of ended processes, but for those of the last minute, which may be about to be bound."""
    with contextlib.suppress(OSError), os.scandir(_folder()) as entries:  # another job may remove them, too
        for entry in entries:
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _UNTIL_BOUND and not _is_bound(entry.path):
                os.unlink(entry.path)


@cache
def _job() -> str:
    """Return a name that only the ranks of this job on this node have; "" if none can be found."""
    number = os.getpid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while number > 1:
            with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            fields = rest.split()
            if name in _LAUNCHERS:
                variables = [os.environ.get(variable, "") for variable in _OF_JOB]
                text = repr((os.getuid(), number, fields[19], MPI.COMM_WORLD.size, variables))
                return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            number = int(fields[1])
    return ""


def at_start(begin: Callable[[], None]) -> None:
    """Call a collective function when the world is prepared, or at once if it already is."""
    _begins.append(begin)
    if started():
        begin()


def at_end(end: Callable[[], None]) -> None:
    """Call a collective function before the world is closed."""
    _ends.append(end)


def local_rank() -> int:
    """Return this rank's number among the ranks of its node."""
    if not started():
        start("mpi_local_rank")
    return _local[0]  # type: ignore[index]


def started() -> bool:
    """Return whether the library is started on this rank."""
    return _local is not None


def initialized() -> bool:
    """Return whether communication is possible: MPI is initialized and not finalized."""
    return MPI.Is_initialized() and not MPI.Is_finalized()


def finalized() -> bool:
    """Return whether MPI was finalized."""
    return MPI.Is_finalized()


def finalize() -> None:
    """Complete pending sends and finalize MPI; collective over the world. A second call does nothing."""
    lookup.refuse_fork("mpi_finalize")
    if MPI.Is_initialized() and not MPI.Is_finalized():
        note_finalize()
        _announce_end()
        _close()
        if not started() or all_ranks_alive(base()):
            MPI.Finalize()


def level_of_repeats() -> int:
    """Return the level of a warning that nearly all ranks log: INFO on most of them."""
    world = base()
    return logging.WARNING if not is_rank() or logs_for_others(world.rank, world.size) else logging.INFO


def logs_for_others(rank: int, size: int) -> bool:
    """Return whether a rank logs for others: 0, 1, 2, 4, 8 and so on, and the last one, often at a grid's edge."""
    return rank & (rank - 1) == 0 or rank == size - 1


def _complete_at_exit() -> None:
    if is_rank():
        _announce_end()
        is_closed = False
        try:
            is_closed = _close()
        except Exception as error:
            if not watch_settings.present().watches:
                raise
            _end_job(error)  # no caller is left to catch it
        # Ranks that haven't started the library don't know which ranks have, so they can't agree with them.
        if started() and not all_ranks_alive(base()):
            logging.shutdown()
            flush_streams()
            exit_process(code_at_end())  # without `MPI_Finalize`
        if is_closed:
            device_messages.close()
            close_pools()


def _announce_end() -> None:
    # MPI_Finalize waits for all ranks, so this process and its socket exist as long as others wait in `await_all_ranks`.
    if not started():
        _announce(_ENDED)


def _close() -> bool:
    """Wait for the end of the program on all ranks, report pending messages and requests in debug mode, close the world.

    Return False if the ranks have given up waiting for each other.
    """
    watch = watch_settings.present()
    if not watch.watches:
        await_others()
        _end_world()
        return True
    # From now on, other ranks that wait for this rank raise an error.
    switch.announce(*end_of_program())
    # This rank may end long before the others, so its wait has a limit only after an error.
    faulted = any(channel.fault is not None for channel in live_channels())
    given_up = await_others((watch.timeout or _GRACE) if faulted else None)
    sentences = []
    if given_up:
        # After communication was abandoned, ranks aren't synchronized, and MPI_Finalize may wait forever for abandoned
        # communication. So SIGALRM ends the process, unless the program handles this signal itself.
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, _GRACE)
    else:
        set_reporter(None, None)  # without deadlines, since a rank may be here long before the others
        sentences = left_over() if watch.debug else []
        _end_world()
    switch.stop_answering(all_have_left=not given_up)
    if sentences:
        raise CommunicationMismatchError(
            "the program ended with communication left over. Receive what is sent, with its tag and from its sender, and "
            "wait for each request.\n" + "\n".join(sentences)
        )
    return not given_up


def _end_job(error: Exception) -> None:
    # One rank shows the error, which is the same on all.
    if base().rank == 0 or not isinstance(error, CommunicationMismatchError):
        end_by(error)
    else:
        time.sleep(_UNTIL_KILLED)
    flush_streams()
    os._exit(1)


def _end_world() -> None:
    for end in _ends:
        end()
    # After a failure the ranks are interrupted, so that none waits for another.
    interruptible("the end of the program", lookup.close_world)()


atexit.register(_complete_at_exit)
lookup.start_world = start
if initialized():
    prepare_process()
