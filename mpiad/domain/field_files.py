"""Fields in files: one array in NumPy's format, in which each rank writes or reads its block."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain.decomposition import Decomposition, checked_block
from mpiad.primitives import stop_gradient
from mpiad.transport.core.agreement import raising_together, require_same
from mpiad.transport.core.array_files import Layout, read_block, write_block
from mpiad.transport.devices.device_arrays import is_device_array


def save(domain: Decomposition, path: str | PathLike[str], u: LocalArray) -> None:
    """See `Domain.save`."""
    call = "Domain.save"
    with raising_together(domain._channel, Exception):
        if is_device_array(stop_gradient(u)):
            raise TypeError(f"{call}: expected an array on the host. Copy it with mpiad.device.to_host.")
        block = np.ascontiguousarray(stop_gradient(checked_block(domain, u, call)))
        if block.dtype.kind in "OV":
            kind = "Python objects" if block.dtype.hasobject else f"structures, {block.dtype}"
            raise TypeError(f"{call}: expected numbers, but got an array of {kind}.")
        file = Path(path)
    lead = block.shape[: block.ndim - len(domain.shape)]
    # Ranks with different shapes would overwrite each other's blocks.
    require_same(domain._channel, f"path={str(file)!r}, leading axes {lead}, dtype {block.dtype.str}", call)
    write_block(domain._channel, file, (*lead, *domain.shape), _starts(domain, len(lead)), block, call)


def load(domain: Decomposition, path: str | PathLike[str]) -> LocalArray:
    """See `Domain.load`."""
    call = "Domain.load"

    def start_and_memory(layout: Layout) -> tuple[tuple[int, ...], np.ndarray]:
        lead = max(0, len(layout.shape) - len(domain.shape))
        if layout.shape[lead:] != domain.shape:
            raise ValueError(f"it contains an array of shape {layout.shape}, but the grid has shape {domain.shape}")
        return _starts(domain, lead), np.empty((*layout.shape[:lead], *domain.local_shape), layout.dtype)

    with raising_together(domain._channel, Exception):
        file = Path(path)
    return read_block(domain._channel, file, start_and_memory, call)


def _starts(domain: Decomposition, lead: int) -> tuple[int, ...]:
    return (0,) * lead + tuple(cells.start for cells in domain.owned)
