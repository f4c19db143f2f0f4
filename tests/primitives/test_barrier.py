import time

import pytest
from autograd.extend import defvjp, primitive

import mpiad


def test_nobody_leaves_before_the_last_has_come(rank, size):
    if rank == size - 1:
        time.sleep(0.05)
    came = time.monotonic()
    assert mpiad.mpi_barrier() is None
    left = time.monotonic()
    assert mpiad.mpi_allgather(left).min() >= mpiad.mpi_allgather(came).max()


@pytest.mark.interpreted  # a program runs an adjoint's Python only when it is traced
def test_its_place_in_the_reverse_order(rank, size):
    """What comes after it on the last rank is undone before what comes before it on any rank."""
    times = {}

    @primitive
    def noted(x, name):
        return x

    def note(ans, x, name):
        def vjp(g):
            if name == "after" and rank == size - 1:
                time.sleep(0.05)
            times[name] = time.monotonic()
            return g

        return vjp

    defvjp(noted, note)

    def fun(x):
        x = noted(x, "before")
        mpiad.mpi_barrier()
        return noted(x, "after") ** 2

    assert mpiad.grad(fun, objective="sum")(3.0) == 6.0
    assert mpiad.mpi_allgather(times["before"]).min() >= mpiad.mpi_allgather(times["after"]).max()


def test_a_rank_without_traced_values_takes_part(rank):
    def fun(x):
        mpiad.mpi_barrier()
        return x**2 if rank == 0 else None

    assert mpiad.grad(fun)(3.0) == (6.0 if rank == 0 else 0.0)
    assert mpiad.hvp(fun)(3.0, 1.0) == (2.0 if rank == 0 else 0.0)
