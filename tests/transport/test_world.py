"""The start: ranks that wait there for one that doesn't come say so."""

from __future__ import annotations

import logging
import time

import pytest
from mpi4py import MPI

from mpiad.transport import world


@pytest.mark.mpi(min_size=2)
def test_a_long_wait_at_the_start_is_told(rank, size, monkeypatch, caplog):
    monkeypatch.setattr(world, "_LONG", 0.1)
    MPI.COMM_WORLD.Barrier()
    if rank == size - 1:
        time.sleep(0.5)
    with caplog.at_level(logging.WARNING, "mpiad"):
        world.meet("import mpiad")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (rank < size - 1)
    assert all(f"import mpiad: rank {rank} has waited" in text for text in told)
