"""All tests here run under watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

import mpiad
from mpiad.transport.watch import switch, watch_settings

NEVER_REACHED = 40.0  # seconds, before the test's own limit; ranks may be late by a second on a busy machine


@pytest.fixture(autouse=True, scope="module")
def kept_watch() -> Iterator[None]:
    """A debug mode around the tests of a file: those of the tests need not prepare all communicators, which takes long."""
    with mpiad.debug.checked(timeout=NEVER_REACHED):
        yield
        mpiad.mpi_barrier()


@pytest.fixture(autouse=True)
def watch() -> Iterator[None]:
    """Compare the ranks' operations, with a deadline for waits that end."""
    with mpiad.debug.checked(timeout=NEVER_REACHED):
        yield
        mpiad.mpi_barrier()


@pytest.fixture
def short_deadline() -> Callable[[], AbstractContextManager[None]]:
    """`with short_deadline():` for waits that don't end, all of which the test takes."""

    @contextmanager
    def shorten() -> Iterator[None]:
        before = watch_settings.present()
        switch.restore(before._replace(timeout=0.6))
        try:
            yield
        finally:
            switch.restore(before)

    return shorten
