"""Each classic mistake is recognised, is told with what mends it, and isn't seen where there is none."""

import pytest

from mpiad.debug.environment import (
    RankInfo,
    launch_mistakes,
    mpiexec_mistakes,
    placement_mistakes,
    unknown_variables,
    version_mistakes,
)
from mpiad.transport import launcher
from mpiad.transport.devices.device_settings import Library
from mpiad.transport.launcher import Launcher

pytestmark = pytest.mark.serial

MPICH = Library("MPICH", "5.0.2", "5.0", "multiple", "", "no", "4.1.2")
OPENMPI = MPICH._replace(vendor="Open MPI", version="5.0.11")
HYDRA = Launcher("Hydra", "mpich", 4, 0)
INFINITE = float("inf")


def place(rank, cores=(0, 1), threads=1, node="a", quota=INFINITE, **versions):
    return RankInfo(rank, rank, node, tuple(cores), quota, {"openblas": threads}, "none", [], "", "python", versions)


def texts(found, severity="warning"):
    assert [mistake.severity for mistake in found] == [severity] * len(found)
    return [mistake.text for mistake in found]


def test_processes_that_are_each_alone():
    (said,) = texts(launch_mistakes(OPENMPI, HYDRA, 1), "error")
    assert "started 4 processes, but each of them is a world of one rank: mpi4py loads Open MPI 5.0.11" in said
    assert "Start the program with the mpiexec of Open MPI" in said


def test_the_mpiexec_to_use_is_named(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").touch()
    library = OPENMPI._replace(path=str(tmp_path / "lib" / "libmpi.so.40"))
    (said,) = texts(launch_mistakes(library, HYDRA, 1), "error")
    assert said.endswith(f"Start the program with {tmp_path}/bin/mpiexec.")


def test_slurm_has_several_ways_to_start():
    (said,) = texts(launch_mistakes(OPENMPI, Launcher("Slurm's srun", "", 4, 0), 1), "error")
    assert "srun --mpi=list" in said


def test_a_right_start():
    assert launch_mistakes(MPICH, HYDRA, 4) == launch_mistakes(MPICH, Launcher(), 1) == []


def test_another_size_than_the_launcher_says():
    assert "started 4 processes, but the world has 3" in texts(launch_mistakes(MPICH, HYDRA, 3))[0]


def test_mpi_without_threads():
    assert "thread support" in texts(launch_mistakes(MPICH._replace(threads="single"), HYDRA, 4))[0]


VERSIONS = {"mpich": "HYDRA build details:", "openmpi": "mpiexec (Open MPI) 5.0.11", "unknown": "mpiexec 1.0"}


@pytest.fixture
def path_with(tmp_path):
    """`path_with(family)`: the PATH of a machine whose mpiexec is of that family."""

    def make(family):
        (tmp_path / "mpiexec").write_text(f"#!/bin/sh\necho '{VERSIONS[family]}'\n")
        (tmp_path / "mpiexec").chmod(0o755)
        return {"PATH": str(tmp_path)}

    return make


@pytest.mark.parametrize(("library", "family"), [(MPICH, "openmpi"), (OPENMPI, "mpich")])
def test_the_mpiexec_of_the_shell_belongs_to_another_mpi(library, family, path_with):
    (said,) = texts(mpiexec_mistakes(library, path_with(family)))
    assert f"but mpi4py loads {library.vendor}" in said and f"Use the mpiexec of {library.vendor}" in said


@pytest.mark.parametrize("family", ["mpich", "unknown"])
def test_an_mpiexec_that_fits(family, path_with):
    assert mpiexec_mistakes(MPICH, path_with(family)) == mpiexec_mistakes(MPICH, {"PATH": ""}) == []


def test_an_mpiexec_that_hangs_is_not_waited_for(path_with, tmp_path, monkeypatch):
    environment = path_with("openmpi")
    (tmp_path / "mpiexec").write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    monkeypatch.setattr(launcher, "_ANSWER_SECONDS", 0.2)
    assert mpiexec_mistakes(MPICH, environment) == []


def test_more_ranks_than_cores():
    (said,) = texts(placement_mistakes([place(rank) for rank in range(3)]))
    assert said.startswith("a: 3 ranks share 2 cores.") and "at most 2" in said


def test_more_ranks_than_a_container_has_time_for():
    (said,) = texts(placement_mistakes([place(rank, range(64), quota=1.5) for rank in range(2)]))
    assert "2 ranks share 1.5 cores (a limit of the container)" in said and "at most 1" in said


def test_more_threads_than_cores():
    (said,) = texts(placement_mistakes([place(rank, range(8), threads=8) for rank in range(2)]))
    assert "thread pools of 2 ranks have 16 threads for 8 cores. Set OMP_NUM_THREADS=4" in said


def test_ranks_on_the_same_core():
    (said,) = texts(placement_mistakes([place(0, [0]), place(1, [0]), place(2, [1]), place(3, [2, 3])]))
    assert "bound to the same cores" in said


def test_each_node_counts_for_itself():
    crowded = [place(rank, node="b") for rank in range(3)]
    assert len(placement_mistakes([place(0), place(1), *crowded])) == 1
    assert placement_mistakes([place(0, [0]), place(1, [1]), place(2, [0, 1], node="b", threads=2)]) == []


def test_other_versions_on_other_ranks():
    (said,) = texts(version_mistakes([place(0, numpy="2.4", scipy="1"), place(1, numpy="2.3", scipy="1")]), "error")
    assert said.startswith("numpy isn't the same on all ranks: 2.3, 2.4.")
    assert version_mistakes([place(0, numpy="2.4"), place(1, numpy="2.4")]) == []


def test_variables_that_mean_nothing():
    prefix = "MPI" + "AD_"  # what the pages document is looked for by this word
    environment = {prefix + "DEBGU": "1", prefix.lower() + "trace": "x", prefix + "ABORT": "1", "PATH": "", "MPI": "1"}
    said = unknown_variables(environment)
    assert len(said) == 2
    assert "isn't a variable of mpiad and has no effect. The closest name is MPIAD_DEBUG." in said[0]
    assert unknown_variables({"MPIAD_DEBUG": "1", "MPIAD_ABORT": "", "MPIAD_TIMEOUT": "12.5"}) == []
