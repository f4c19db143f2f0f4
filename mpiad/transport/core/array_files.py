"""Distributed arrays in one file in NumPy's format, by MPI-IO; each rank needs memory only for its block."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Shape
from mpiad.checkpoint_files import create_part, data_path, remedy, require_regular, sync_folder
from mpiad.transport.core.agreement import FAILURES, agreed, raise_together
from mpiad.transport.core.channels import Channel

# Collective buffering, in which ROMIO sends all data through one rank per node, is slower on local disks.
_HINTS = {"romio_cb_write": "disable", "romio_cb_read": "disable"}
# Attempts to open one file on all ranks while other jobs replace it; many may be needed if there are no hard links.
_ATTEMPTS = 100


class Layout(NamedTuple):
    """Shape, dtype and data offset of a file's array."""

    shape: Shape  # of the whole array
    dtype: np.dtype
    offset: int  # bytes before its first number

    @property
    def end(self) -> int:
        """Return the length of the file in bytes."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def write_block(channel: Channel, path: Path, shape: Shape, starts: Shape, block: np.ndarray, call: str) -> None:
    """Write the ranks' blocks, which begin at `starts`; if an OSError is raised, an older file is kept; collective."""
    head = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(block.dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    layout, begun = Layout(shape, block.dtype, len(head.getvalue())), list[tuple[Path, IO[bytes]]]()

    def make() -> None:
        begun.append(create_part(path))
        data_path(begun[0][0]).open("xb").close()

    def publish() -> None:
        data.replace(path)
        sync_folder(path.parent)

    root = channel.rank == 0
    try:
        _together(channel, path, make if root else None, call)  # not by MPI: MPICH's errors may have no text
        data = Path(channel.data.bcast(str(data_path(begun[0][0])) if root else None))
        with _opened(channel, data, MPI.MODE_WRONLY, call) as file:
            # The ranks agree after each step, since in the next one they would wait for a rank that has failed.
            _together(channel, path, lambda: file.Set_size(layout.end), call)
            _together(channel, path, (lambda: file.Write_at(0, head.getvalue())) if root else None, call)
            _together(channel, path, lambda: _transfer(file, layout, starts, block, file.Write), call)
            _together(channel, path, file.Sync, call)
        _together(channel, path, publish if root else None, call)
    finally:
        _discard(begun)


def _discard(begun: list[tuple[Path, IO[bytes]]]) -> None:
    for part, lock in begun:
        data_path(part).unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        lock.close()


def _layout_in(file: IO[bytes]) -> Layout:
    """Return the layout of a file; raise a ValueError if it isn't in NumPy's format or has the wrong length."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    layout = Layout(shape, dtype, file.tell())
    if fortran and len(shape) > 1:
        raise ValueError("its array is in Fortran's order: save numpy.ascontiguousarray of it")
    if dtype.kind in "OV":
        raise ValueError(f"it holds Python's objects or structures ({dtype})")
    size = os.fstat(file.fileno()).st_size
    if size != layout.end:
        expected = f"a file of {dtype} with shape {shape} has {layout.end}"
        raise ValueError(f"it is truncated or too long: it has {size} bytes, but {expected}")
    return layout


def read_block(
    channel: Channel, path: Path, allocate: Callable[[Layout], tuple[Shape, np.ndarray]], call: str
) -> np.ndarray:
    """Return this rank's block of a file; raise on all ranks; ``allocate(layout)``: its start and memory; collective."""
    for attempt in range(_ATTEMPTS):
        begun, name = list[tuple[Path, IO[bytes]]](), None
        if attempt and channel.rank == 0:
            # Other jobs don't replace a private hard link. Without hard links, the ranks try the original name again.
            with contextlib.suppress(OSError):
                begun.append(create_part(path))
                os.link(path, data_path(begun[0][0]))
                name = str(data_path(begun[0][0]))
        try:
            block = _read_once(channel, Path(channel.data.bcast(name) or path), allocate, call)
        finally:
            _discard(begun)
        if block is not None:
            return block
    text = f"{call}: {path}: other jobs replace it while the ranks open it, or the ranks don't see the same file."
    raise agreed(channel, OSError(text))


def _read_once(
    channel: Channel, path: Path, allocate: Callable[[Layout], tuple[Shape, np.ndarray]], call: str
) -> np.ndarray | None:
    """Return this rank's block, or None on all ranks if they have opened different files."""
    opened = list[tuple[IO[bytes], Layout, Shape, np.ndarray]]()
    with contextlib.ExitStack() as stack:

        def open_and_allocate() -> None:
            require_regular(path)
            held = stack.enter_context(path.open("rb"))
            layout = _layout_in(held)
            opened.append((held, layout, *allocate(layout)))

        _together(channel, path, open_and_allocate, call, reads=True)
        held, layout, starts, block = opened[0]
        file = stack.enter_context(_opened(channel, path, MPI.MODE_RDONLY, call))
        # While a file is open, its inode number isn't reused; so equal numbers mean the same file.
        mine, now = os.fstat(held.fileno()), None
        with contextlib.suppress(OSError):
            now = path.stat()
        same = now is not None and (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)
        every = channel.data.allgather((same, mine.st_ino, mine.st_mtime_ns, layout.end))
        if every != [(True, *every[0][1:])] * channel.size:
            return None
        _together(channel, path, lambda: _transfer(file, layout, starts, block, file.Read), call)
        return block


def _transfer(file: MPI.File, layout: Layout, starts: Shape, block: np.ndarray, method: Callable[[list], None]) -> None:
    """Read or write a block at its position in the file by ``method([memory, number of rows, datatype of a row])``."""
    # The data are bytes, so that any dtype works, in units of rows, since the number of bytes may exceed a C int.
    width = layout.dtype.itemsize
    sizes, inner = [(*whole[:-1], whole[-1] * width) for whole in (layout.shape, block.shape)]
    view = MPI.BYTE.Create_subarray(sizes, inner, (*starts[:-1], starts[-1] * width)).Commit()
    row = MPI.BYTE.Create_contiguous(inner[-1]).Commit()
    try:
        file.Set_view(layout.offset, MPI.BYTE, view)
        method([block, math.prod(inner[:-1]), row])
    finally:
        view.Free()
        row.Free()


@contextlib.contextmanager
def _opened(channel: Channel, path: Path, mode: int, call: str) -> Iterator[MPI.File]:
    """Open a file on all ranks, and close it at the end; raise an OSError on all ranks if any rank can't open it."""
    opened: list[MPI.File] = []
    hints = MPI.Info.Create(_HINTS)
    comm: Comm = getattr(channel.data, "bare", channel.data)  # MPI-IO requires mpi4py's communicator, not a wrapper
    _together(channel, path, lambda: opened.append(MPI.File.Open(comm, path, mode, hints)), call)
    hints.Free()
    try:
        yield opened[0]
    finally:
        opened[0].Close()


def _together(channel: Channel, path: Path, act: Callable[[], object] | None, call: str, reads: bool = False) -> None:
    """Call `act`, unless it is None; raise an error of any rank on all ranks."""
    error: BaseException | None = None
    try:
        if act is not None:
            act()
    except OSError as failure:
        error = OSError(f"{call}: {path}: {failure.strerror or failure}.{'' if reads else f' {remedy(failure, path)}'}")
    except MPI.Exception as failure:
        error = OSError(f"{call}: {path}: {failure.Get_error_string()}")
    except ValueError as failure:
        error = ValueError(f"{call}: {str(path)!r} can't be {'read' if reads else 'written'}: {failure}.")
    except FAILURES as failure:  # the other ranks must not wait for it
        error = failure
    raise_together(channel, error)
