import io

import numpy as np
import pytest

import mpiad


def test_one_line_for_each_rank_in_their_order(rank, size, capsys):
    mpiad.mpi_print("rank", rank, np.ones(2))
    expected = "".join(f"rank {r} [1. 1.]\n" for r in range(size)) if rank == 0 else ""
    assert capsys.readouterr().out == expected


def test_separator_end_and_file(rank, size):
    file = io.StringIO()
    mpiad.mpi_print("a", rank, sep="=", end=";", file=file)
    assert file.getvalue() == ("".join(f"a={r};" for r in range(size)) if rank == 0 else "")


@pytest.mark.interpreted
def test_traced_values_are_shown_plain(rank, size, capsys):
    def fun(x):
        mpiad.mpi_print("x =", x)
        return x**2

    mpiad.grad(fun)(1.0 + rank)
    assert capsys.readouterr().out == ("".join(f"x = {1.0 + r}\n" for r in range(size)) if rank == 0 else "")


def test_sub_communicator(rank, size, capsys):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(rank % 2, -rank)
    mpiad.mpi_print(rank, comm=comm)
    members = [r for r in reversed(range(size)) if r % 2 == rank % 2]
    assert capsys.readouterr().out == ("".join(f"{r}\n" for r in members) if rank == members[0] else "")
    comm.Free()
