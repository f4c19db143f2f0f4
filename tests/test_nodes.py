"""Several nodes, which MPICH plays on one machine; `make test-all` runs all tests so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from mpi4py import MPI


@pytest.mark.launches
@pytest.mark.limit(150)
@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="MPICH plays nodes")
def test_what_knows_of_nodes(mpirun: Callable[..., CompletedProcess], tmp_path: Path) -> None:
    done = mpirun(4, "tests/two_nodes.py", tmp_path, timeout=120, env={"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"})
    assert done.returncode == 0 and done.stdout.count("all is right") == 4, done.stdout + done.stderr
