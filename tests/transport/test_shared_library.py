"""Loading of shared libraries, and the MPI library that they call."""

import pytest
from shared_libraries import compiled

from mpiad.extend import library


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match=r"mpiad\.extend\.library: .*absent\.so can't be loaded: .*No such file"):
        library(tmp_path / "absent.so")


def test_a_file_that_is_no_library(tmp_path):
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(OSError, match=r"text\.so can't be loaded"):
        library(tmp_path / "text.so")


def test_a_library_without_mpi(tmp_path):
    library(compiled("double one(void) { return 1.0; }", ".c", tmp_path, mpi=False)).symbol("one")


def test_a_library_that_calls_another_mpi_is_refused(tmp_path):
    """Both define the same name, so the order of loading would decide which one is called."""
    other = compiled("int MPI_Comm_rank(void *c, int *r) { *r = 7; return 0; }", ".c", tmp_path, mpi=False)
    inner = tmp_path / "user"
    inner.mkdir()
    source = "int MPI_Comm_rank(void *, int *); int rank(void) { int r; MPI_Comm_rank(0, &r); return r; }"
    path = compiled(source, ".c", inner, str(other), f"-Wl,-rpath,{other.parent}", mpi=False)
    with pytest.raises(
        RuntimeError, match=rf"{path} calls the MPI library {other}, but mpi4py calls .*link .* to that of mpi4py"
    ):
        library(path)
