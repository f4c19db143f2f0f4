"""Jobs whose MPI can revoke a communicator: Open MPI 5, started by ``mpiexec --with-ft ulfm``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import launch
import pytest
from mpi4py import MPI

VENDOR, VERSION = MPI.get_vendor()

with_ulfm = [
    pytest.mark.launches,
    pytest.mark.skipif(
        VENDOR != "Open MPI" or VERSION < (5,),
        reason=f"only Open MPI 5 can revoke a communicator, and this is {VENDOR}: make test MPI=openmpi",
    ),
]


@pytest.fixture
def ft_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mpirun: Callable[..., CompletedProcess]
) -> Callable[..., CompletedProcess]:
    """`mpirun` under a launcher that lets a job outlive its ranks."""
    launcher = tmp_path / "mpiexec-with-ft"
    launcher.write_text(f'#!/bin/sh\nexec "{launch.find_mpiexec()}" --with-ft ulfm "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(launcher))
    return mpirun
