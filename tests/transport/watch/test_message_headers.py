"""Messages that differ from what they are received into name both lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import MessageMismatchError

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def neighbours(rank: int, size: int) -> tuple[int, int]:
    """The ranks to send to and to receive from."""
    return (rank + 1) % size, (rank - 1) % size


@pytest.mark.parametrize(
    ("sent", "like"),
    [(np.ones(3), np.ones(3, int)), (np.ones((2, 3)), np.ones((3, 2))), (np.ones(3), np.ones(4)), (1, 1.0)],
)
@pytest.mark.parametrize("source", ["named", "any"])
def test_both_lines_are_named(sent: Any, like: Any, source: str, neighbours: tuple[int, int]) -> None:
    right, left = neighbours
    mpiad.mpi_send(sent, right, tag=4)
    with pytest.raises(MessageMismatchError, match="Give a template") as caught:
        mpiad.mpi_recv(like, left if source == "named" else MPI.ANY_SOURCE, tag=4)
    text = str(caught.value)
    assert f"shape {np.shape(sent)}, dtype {np.result_type(sent)}" in text and f"shape {np.shape(like)}" in text
    assert "sent by mpi_send at test_message_headers.py:" in text
    assert "received by mpi_recv at test_message_headers.py:" in text
    mpiad.mpi_barrier()
    mpiad.mpi_send(1.0, right, tag=4)
    assert mpiad.mpi_recv(0.0, left, tag=4) == 1.0


def test_exchange_and_requests(neighbours: tuple[int, int]) -> None:
    right, left = neighbours
    with pytest.raises(MessageMismatchError, match="sent by mpi_exchange.*received by mpi_exchange"):
        mpiad.mpi_exchange(np.ones(3), right, left, like=np.ones(3, "i8"))
    request = mpiad.mpi_irecv(np.ones(3, "i8"), left)
    mpiad.mpi_wait(mpiad.mpi_isend(np.ones(3), right))
    with pytest.raises(MessageMismatchError, match="received by mpi_irecv at test_message_headers.py"):
        mpiad.mpi_wait(request)


def test_requests_are_waited_for_in_any_order(rank: int, neighbours: tuple[int, int]) -> None:
    right, left = neighbours
    requests = [mpiad.mpi_irecv(np.zeros(k), left) for k in (1, 2, 3)]
    for k in (1, 2, 3):
        mpiad.mpi_send(np.full(k, 1.0 * rank), right)
    for request, k in zip(requests[::-1], (3, 2, 1)):
        assert np.array_equal(mpiad.mpi_wait(request), np.full(k, 1.0 * left))


def test_a_reset_drops_headers_too(rank: int, neighbours: tuple[int, int]) -> None:
    right, left = neighbours
    mpiad.mpi_send(np.ones(2), right)
    mpiad.reset()
    mpiad.mpi_send(np.ones(3, int), right)
    assert mpiad.mpi_recv(np.ones(3, int), left).dtype == int
