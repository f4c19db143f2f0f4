"""Fields in files: one array of NumPy's format, written and read by all ranks, each its block."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain.decomposition import Decomposition
from mpiad.primitives import stop_gradient
from mpiad.transport.agreement import raising_together, require_same
from mpiad.transport.array_files import Layout, read_block, write_block
from mpiad.transport.device_arrays import is_device_array


class FieldFiles(Decomposition):
    """Reading and writing fields, on any number of ranks."""

    def save(self, path: str | PathLike[str], u: LocalArray) -> None:
        """Write a field atomically to one file, which `numpy.load` reads as the whole array.

        Parameters
        ----------
        path : path
            The same on all ranks, on a disk that all see. ``.npy`` isn't added.
        u : array of shape (..., *local_shape)
            This rank's block, on the host. Its leading axes and its dtype are those of the file.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if `u` isn't such an array on one, or paths, leading axes or dtypes differ.
        OSError
            On all ranks, if it can't be written: an existing file stays unchanged. If `path` names a device, a pipe
            or a folder.

        Ranks
        -----
        All ranks call it. They write a file of a random name in the same folder, which is renamed at the end: of several
        jobs that save at the same time the last one wins.
        """
        call = "Domain.save"
        with raising_together(self._channel, Exception):
            if is_device_array(stop_gradient(u)):
                raise TypeError(f"{call}: expected an array on the host. Copy it with mpiad.device.to_host.")
            block = np.ascontiguousarray(stop_gradient(self._checked(u, self.local_shape, call)))
            if block.dtype.kind in "OV":
                kind = "Python's objects" if block.dtype.hasobject else f"structures, {block.dtype}"
                raise TypeError(f"{call}: expected numbers, but got an array of {kind}.")
            file = Path(path)
        lead = block.shape[: block.ndim - len(self.shape)]
        # Before a byte is written: ranks with other shapes would write over each other's blocks.
        require_same(self._channel, f"path={str(file)!r}, leading axes {lead}, dtype {block.dtype.str}", call)
        write_block(self._channel, file, (*lead, *self.shape), self._starts(len(lead)), block, call)

    def load(self, path: str | PathLike[str]) -> LocalArray:
        """Read this rank's block of a field that `save` or `numpy.save` has written, on any number of ranks.

        Parameters
        ----------
        path : path

        Returns
        -------
        array of shape (..., *local_shape)

        Raises
        ------
        OSError, ValueError
            On all ranks, if there is no such file, it is damaged or truncated, or holds an array of another grid.

        Ranks
        -----
        All ranks call it, and read the same file, if other jobs save to the path meanwhile.
        """
        call = "Domain.load"

        def place(layout: Layout) -> tuple[tuple[int, ...], np.ndarray]:
            lead = max(0, len(layout.shape) - len(self.shape))
            if layout.shape[lead:] != self.shape:
                raise ValueError(f"it holds shape {layout.shape}, but the grid has {self.shape}")
            # Each reads its own block, so no rank ever holds the whole grid.
            return self._starts(lead), np.empty((*layout.shape[:lead], *self.local_shape), layout.dtype)

        with raising_together(self._channel, Exception):
            file = Path(path)
        return read_block(self._channel, file, place, call)

    def _starts(self, lead: int) -> tuple[int, ...]:
        return (0,) * lead + tuple(cells.start for cells in self.owned)
