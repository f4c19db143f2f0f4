"""Arrays divided into blocks, in one file of NumPy's format, by MPI-IO: no rank holds more than its block."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Shape
from mpiad.checkpoint_files import remedy
from mpiad.transport.agreement import raise_together
from mpiad.transport.channels import Channel

# ROMIO else sends all numbers through one rank of each node, in exchanges of 16 MiB: several times slower on its own disk.
_HINTS = {"romio_cb_write": "disable", "romio_cb_read": "disable"}


class Layout(NamedTuple):
    """What a file holds."""

    shape: Shape  # of the whole array
    dtype: np.dtype
    offset: int  # bytes before its first number

    @property
    def end(self) -> int:
        """Return how long the file is."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def write_block(used: Channel, path: Path, shape: Shape, starts: Shape, block: np.ndarray, call: str) -> None:
    """Write a file of all ranks' blocks, whole or not at all: under another name, which is changed at the end.

    This rank's block, contiguous and of the dtype of all, begins at `starts` of the whole array, which has the `shape`. All
    ranks of the channel call it: an OSError on all, where it can't be written, and the file that there was stays.
    """
    head = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(block.dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    layout, part = Layout(shape, block.dtype, len(head.getvalue())), path.with_name(path.name + ".part")

    def write(file: MPI.File) -> None:
        # A longer file that an earlier attempt left must not show behind the end.
        file.Set_size(layout.end)
        if used.rank == 0:
            file.Write_at(0, head.getvalue())
        _viewed(file, layout, starts, block, file.Write_all)
        file.Sync()

    try:
        # By rank 0 first, whose error all raise: of MPICH's some ranks have no text where other errors came before.
        _together(used, part, lambda: part.open("wb").close() if used.rank == 0 else None, call)
        _with_file(used, part, MPI.MODE_CREATE | MPI.MODE_WRONLY, write, call)
        _together(used, part, lambda: part.replace(path) if used.rank == 0 else None, call)
    except OSError:
        if used.rank == 0:
            part.unlink(missing_ok=True)
        raise


def layout_in(path: Path) -> Layout:
    """Return what a file holds.

    An OSError or ValueError where it can't be read, isn't of NumPy's format, or is shorter or longer than it says.
    """
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        layout = Layout(shape, dtype, file.tell())
    if fortran and len(shape) > 1:
        raise ValueError("its array is in Fortran's order: save numpy.ascontiguousarray of it")
    if dtype.hasobject:
        raise ValueError("it holds Python's objects")
    size = os.path.getsize(path)
    if size != layout.end:
        wanted = f"an array of {dtype}, shape {shape}, has {layout.end}"
        raise ValueError(f"it is truncated or too long: it has {size} bytes, where {wanted}")
    return layout


def read_block(used: Channel, path: Path, layout: Layout, starts: Shape, out: np.ndarray, call: str) -> None:
    """Read this rank's block of a file; all ranks call it. An OSError on all, where one can't read it."""
    _with_file(used, path, MPI.MODE_RDONLY, lambda file: _viewed(file, layout, starts, out, file.Read_all), call)


def _viewed(file: MPI.File, layout: Layout, starts: Shape, block: np.ndarray, transfer: Callable[[list], None]) -> None:
    """Read or write a block where it belongs."""
    # In bytes, so that MPI needn't know the dtype; in rows, since a count of bytes may be beyond an int.
    width = layout.dtype.itemsize
    sizes, inner = [(*whole[:-1], whole[-1] * width) for whole in (layout.shape, block.shape)]
    view = MPI.BYTE.Create_subarray(sizes, inner, (*starts[:-1], starts[-1] * width)).Commit()
    row = MPI.BYTE.Create_contiguous(inner[-1]).Commit()
    try:
        file.Set_view(layout.offset, MPI.BYTE, view)
        transfer([block, math.prod(inner[:-1]), row])
    finally:
        view.Free()
        row.Free()


def _with_file(used: Channel, path: Path, mode: int, act: Callable[[MPI.File], None], call: str) -> None:
    """Open a file on all ranks, act, and close it; an OSError on all ranks where any of it fails on one."""
    opened: list[MPI.File] = []
    hints = MPI.Info.Create(_HINTS)
    _together(used, path, lambda: opened.append(MPI.File.Open(used.data, path, mode, hints)), call)  # type: ignore[arg-type]
    hints.Free()
    try:
        _together(used, path, lambda: act(opened[0]), call)
    finally:
        opened[0].Close()


def _together(used: Channel, path: Path, act: Callable[[], object], call: str) -> None:
    error: OSError | None = None
    try:
        act()
    except OSError as failure:
        error = OSError(f"{call}: {path}: {failure.strerror or failure}. {remedy(failure, path)}")
    except MPI.Exception as failure:
        error = OSError(f"{call}: {path}: {failure.Get_error_string()}")
    raise_together(used, error)
