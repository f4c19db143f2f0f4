"""Memory that ranks have in common: the same for all, or for none."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.transport import shared_memory
from mpiad.transport.shared_memory import shared_vectors

WORLD = MPI.COMM_WORLD


def test_all_see_what_one_has_written(rank: int, size: int) -> None:
    found = shared_vectors(WORLD, size, 1001)
    assert found is not None and found.shape == (size, 1001) and not found.any()
    WORLD.Barrier()  # all have looked
    found[rank] = 10.0 * rank + np.arange(1001)
    WORLD.Barrier()
    assert np.array_equal(found, 10.0 * np.arange(size)[:, None] + np.arange(1001))
    last = found[-1]
    del found
    assert np.array_equal(last, 10.0 * (size - 1) + np.arange(1001))  # a view keeps it


@pytest.mark.parametrize("name, module", [("open", os), ("posix_fallocate", os), ("mmap", mmap), ("ftruncate", os)])
def test_none_has_it_where_one_can_not(
    name: str, module: Any, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a rank is refused, all learn it, no name stays in the file system, and no file stays open."""
    paths: list[str] = []
    opened = os.open
    refused = 0 if name == "ftruncate" else size - 1  # one rank alone sets the length

    def noted(path: str, *rest: Any) -> int:
        paths.append(path)
        return opened(path, *rest)

    def refuse(*given: Any) -> None:
        raise OSError("refused")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", noted)
    if rank == refused:
        monkeypatch.setattr(module, name, refuse)
    assert shared_vectors(WORLD, 3, 500) is None
    monkeypatch.undo()
    WORLD.Barrier()
    assert not any(os.path.exists(path) for path in paths)
    assert len(os.listdir("/proc/self/fd")) == before
    assert shared_vectors(WORLD, 3, 500) is not None


def test_half_of_the_room_stays_free(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(shared_memory._FOLDER)
    room = found.f_bavail * found.f_frsize
    assert shared_vectors(WORLD, 6, room // 80) is None
