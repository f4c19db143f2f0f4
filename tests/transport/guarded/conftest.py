"""All tests here run under watch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mpiad


@pytest.fixture(autouse=True)
def watch() -> Iterator[None]:
    """Compare what the ranks do, with a deadline of a second."""
    with mpiad.debug.checked(timeout=1.0):
        yield
        mpiad.mpi_barrier()
