"""The report on a program's objective, and that the factors it names are the true ones."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.testing import describe_objective

PROGRAMS = {
    "same": lambda x: mpiad.mpi_allreduce(anp.sum(x**2)),
    "root": lambda x: mpiad.mpi_sum(anp.sum(x**2)),
    "share": lambda x: anp.sum(x**2),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_factors_are_those_of_the_gradients(kind, rng):
    program, x = PROGRAMS[kind], rng.standard_normal(3)
    report = describe_objective(program, x)
    assert report.kind == kind
    assert report.objective in str(report)
    fitting = mpiad.grad(program, objective=report.objective)(x)
    # The objective in each program is the sum of all squares, so the derivative is known.
    np.testing.assert_allclose(fitting, 2 * x, rtol=1e-14)
    for objective, factor in report.factors.items():
        found = mpiad.grad(program, objective=objective)(x)
        if np.isnan(factor):
            assert objective == "root"
        else:
            np.testing.assert_allclose(found, factor * 2 * x, rtol=1e-14)


@pytest.mark.mpi(min_size=2)
def test_another_root(rng, size):
    last = size - 1
    report = describe_objective(lambda x: mpiad.mpi_sum(anp.sum(x**2), last), rng.standard_normal(3), root=last)
    assert report.kind == "root" and f"rank {last}" in report.text


@pytest.mark.mpi(min_size=2)
def test_none_off_the_root(rank):
    assert describe_objective(lambda x: x if rank == 0 else None, 2.0).kind == "root"


def test_arrays_are_refused_on_all_ranks(rank, size):
    with pytest.raises(TypeError, match=f"rank {size - 1}: array"):
        describe_objective(lambda x: x if rank == size - 1 else 1.0, np.ones(2))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("source", [0, -1])
def test_zeros_behind_a_broadcast_are_told(source, rng, size):
    source %= size
    x = rng.standard_normal(3)
    report = describe_objective(lambda x: mpiad.mpi_allreduce(anp.sum(mpiad.mpi_bcast(x, source) ** 2)), x)
    whole = MPI.COMM_WORLD.bcast(2 * size * float(np.max(np.abs(x))), source)
    np.testing.assert_allclose(report.largest, np.where(np.arange(size) == source, whole, 0.0), rtol=1e-14)
    assert f"zero on all ranks except rank {source}" in report.text and "shared=True" in report.text


def test_an_argument_without_influence_is_told(rank, size):
    own = np.ones(2)
    report = describe_objective(lambda x: mpiad.mpi_allreduce(anp.sum(own**2)), np.ones(2))  # own, where x was meant
    assert report.largest == [0.0] * size and "zero on all ranks: the function doesn't depend on it" in report.text
    # One rank has nothing to differentiate by, and takes part in the messages all the same.
    report = describe_objective(lambda x: mpiad.mpi_allreduce(x**2 if x else 0.0), 3.0 if rank == 0 else None)
    assert report.largest == [6.0] + [None] * (size - 1) and report.values == [9.0] * size
    assert "zero" not in report.text
