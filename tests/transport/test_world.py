"""The start: ranks that wait there for one that doesn't come say so."""

from __future__ import annotations

import logging

import pytest
from mpi4py import MPI

from mpiad.transport import world


class _Messenger(logging.Handler):
    """Sends the text of each record to a rank."""

    def __init__(self, dest):
        super().__init__()
        self.dest = dest

    def emit(self, record):
        MPI.COMM_WORLD.send(record.getMessage(), self.dest)


@pytest.mark.mpi(min_size=2)
def test_a_long_wait_at_the_start_is_told(rank, size, monkeypatch, caplog):
    last = size - 1
    logger, messenger = logging.getLogger("mpiad"), _Messenger(last)
    with caplog.at_level(logging.WARNING, "mpiad"):
        if rank == last:  # comes when all others have said that they wait; ends at the time limit if one doesn't
            texts = [MPI.COMM_WORLD.recv(source=source) for source in range(last)]
        else:
            monkeypatch.setattr(world, "_LONG", 0.1)
            logger.addHandler(messenger)
        world.meet("import mpiad")
        logger.removeHandler(messenger)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (rank < last)
    assert all(f"import mpiad: rank {rank} has waited" in text for text in told)
    if rank == last:
        for source, text in enumerate(texts):
            assert f"import mpiad: rank {source} has waited" in text
