"""What started a process is seen by what its launcher left in the environment."""

import pytest
from mpi4py import MPI
from other_launcher import OTHER, run_under

from mpiad.transport.launcher import Launcher, family_of, launcher, mpiexec_of_library

pytestmark = pytest.mark.serial


@pytest.mark.parametrize(
    ("environment", "name", "family", "size", "rank"),
    [
        ({}, "", "", 1, 0),
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "HYDI_CONTROL_FD": "7"}, "Hydra", "mpich", 4, 2),
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "4"}, "Hydra", "mpich", 4, 2),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7", "PMIX_RANK": "7"}, "Open MPI", "openmpi", 8, 7),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "5", "PMIX_RANK": "5"}, "Slurm", "", 16, 5),
        # Slurm starts Hydra's own processes in a step of theirs.
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PMI_SIZE": "4", "PMI_RANK": "3", "HYDI_CONTROL_FD": "7"},
            "Hydra",
            "mpich",
            4,
            3,
        ),
        # A shell inside an allocation, where nothing was launched.
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, "", "", 1, 0),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, "Flux", "", 2, 1),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "PMI", "", 2, 1),
        ({"PMI_SIZE": "nonsense"}, "", "", 1, 0),
    ],
)
def test_launchers(environment, name, family, size, rank):
    found = launcher(environment)
    assert name in found.name and bool(found.name) == bool(name)
    assert found[1:] == Launcher("", family, size, rank)[1:]


def test_this_process_was_started_by_nobody_or_by_the_launcher_of_its_library():
    found = launcher()
    assert found.size == MPI.COMM_WORLD.size
    assert found.family in ("", family_of(MPI.get_vendor()[0]))


def test_the_mpiexec_of_a_library(tmp_path):
    (tmp_path / "bin").mkdir()
    assert mpiexec_of_library(str(tmp_path / "lib" / "libmpi.so.12")) == ""
    (tmp_path / "bin" / "mpiexec").touch()
    assert mpiexec_of_library(str(tmp_path / "lib" / "libmpi.so.12")) == str(tmp_path / "bin" / "mpiexec")


@pytest.mark.launches
@pytest.mark.parametrize("rank", [0, 1])
def test_separate_worlds_are_warned_of_once(rank):
    done = run_under(OTHER, rank, "import mpiad; print(mpiad.mpi_size())")
    assert done.stdout == "1\n", done.stderr
    assert done.stderr.count("each of them is a world of one rank") == (rank == 0)
