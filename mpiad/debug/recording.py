"""Recordings of all ranks: of a block of the program, or of the whole of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mpiad._typing import Comm
from mpiad.debug.clocks import Clock, read_clock
from mpiad.debug.recorder import MOST, Recorder
from mpiad.debug.trace_file import gather_into, write_part
from mpiad.environment_variables import path
from mpiad.transport import channel, world
from mpiad.transport.abort import last_words

_WITHOUT_TRACE = 100_000  # events: in debug mode few programs ask for a report, and all pay for it
_log = logging.getLogger("mpiad")


class Recording:
    """What all ranks did between `start` and `stop`, both collective.

    `most`: events that each rank keeps. `recorder`: this rank's part.
    """

    def __init__(self, most: int = MOST) -> None:
        self.recorder = Recorder(most)

    def start(self) -> None:
        """Compare the clocks and begin."""
        with _scratch() as comm:
            self.rank = comm.rank
            # At both ends, between which a clock's drift is taken to be even.
            self._first = read_clock(comm)
        self.recorder.start()

    def stop(self) -> None:
        """End it on this rank; what it has recorded stays."""
        if not self.recorder.until:
            self.recorder.stop()

    @contextmanager
    def compared(self) -> Iterator[tuple[Comm, Clock]]:
        """Enter a context with the clock of all ranks, and a communicator to exchange what was recorded; collective."""
        with _scratch() as comm:
            yield comm, Clock(self._first, read_clock(comm))

    def write(self, path: Path) -> None:
        """Write the trace of all ranks; collective."""
        with self.compared() as (comm, clock):
            gather_into(path, comm, self.recorder, clock)

    def write_part(self, path: Path) -> Path:
        """Write the trace of this rank alone, where the others can't be waited for."""
        self.stop()
        # One reading of the clock for both ends: to compare it again the other ranks would be needed.
        return write_part(path, self.rank, self.recorder, Clock(self._first, self._first))


@contextmanager
def _scratch() -> Iterator[Comm]:
    """Enter a context with a duplicate of the world, on which no message of the program's can be met; collective."""
    used = channel(None, "mpiad.debug")
    used.data.Barrier()  # is watched in debug mode, where not all ranks come here
    comm = used.user.Dup()
    yield comm
    comm.Free()  # not after an exception: it is collective


_latest: Recording | None = None


def latest() -> Recording | None:
    """Return what is recorded now, else what was recorded last."""
    return _latest


@contextmanager
def recorded() -> Iterator[None]:
    """Record the communication of a block, for `report`.

    Ranks
    -----
    All ranks of the world enter and leave it.

    Examples
    --------
    >>> import io
    >>> with mpiad.debug.recorded():
    ...     total = mpiad.mpi_allreduce(1.0)
    >>> print(mpiad.debug.report(file=io.StringIO()).rows[0].operation)
    mpi_allreduce
    """
    with _recording():
        yield


@contextmanager
def traced(path: str | os.PathLike) -> Iterator[None]:
    """Record a block of the program and write its timeline to a file, which Perfetto and chrome://tracing open.

    Parameters
    ----------
    path : path
        Of the file, which rank 0 writes, whole or not at all. A rank that leaves the block by an exception writes its own
        part beside it, with ``.rank`` and its number appended.

    Raises
    ------
    OSError
        On all ranks, where the file can't be written.

    Ranks
    -----
    All ranks of the world enter and leave it.

    Examples
    --------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mpiad.debug.traced(f"{folder}/timeline.json"):
    ...         total = mpiad.mpi_allreduce(1.0)
    ...     print(os.path.exists(f"{folder}/timeline.json") == (rank == 0))
    True
    """
    with _recording() as recording:
        try:
            yield
        except BaseException:
            recording.write_part(Path(path))
            raise
        recording.stop()
        recording.write(Path(path))


@contextmanager
def _recording() -> Iterator[Recording]:
    global _latest
    recording = _latest = Recording()
    recording.start()
    try:
        yield recording
    finally:
        recording.stop()


def of_the_program() -> None:
    """Record from now to the end of the program, and write the timeline to the file that MPIAD_TRACE names; collective."""
    global _latest
    with _scratch() as comm:
        named = next(filter(None, comm.allgather(path("MPIAD_TRACE"))), None)
        file = Path(named).absolute() if named else None  # the program may go elsewhere
        if comm.rank == 0 and file is not None and not os.access(file.parent, os.W_OK):
            _log.warning("MPIAD_TRACE=%s: no file can be made in %s; there will be no trace.", named, file.parent)
    recording = _latest = Recording() if file is not None else Recording(_WITHOUT_TRACE)
    recording.start()
    world.at_end(lambda: _finish(recording, file))
    if file is not None:
        # Said before the job is aborted after an exception, where `_finish` isn't reached.
        last_words.append(partial(recording.write_part, file))


def _finish(recording: Recording, file: Path | None) -> None:
    recording.stop()
    if file is None:
        return
    try:
        recording.write(file)
    except OSError as error:
        if recording.rank == 0:  # the program itself came to its end
            _log.warning("mpiad: %s", error)
