"""The dot-product test passes transposes and catches what isn't one, or isn't linear."""

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.extend import custom_operator, defadjoint
from mpiad.testing import AdjointError, check_adjoint


def test_a_transpose_passes_to_a_few_roundings(rng, size):
    matrix = rng.standard_normal((4, 3))
    assert check_adjoint(lambda x: mpiad.mpi_allreduce(anp.dot(matrix, x)), np.ones(3)) < 16
    assert check_adjoint(lambda x: mpiad.mpi_bcast(x, size - 1), np.ones(3, np.complex128)) < 16


def test_an_adjoint_given_apart(rng):
    matrix = rng.standard_normal((4, 3))
    assert check_adjoint(lambda x: matrix @ x, np.ones(3), adjoint=lambda y: matrix.T @ y) < 16
    with pytest.raises(AdjointError, match="isn't the transpose"):
        check_adjoint(lambda x: matrix @ x, np.ones(3), adjoint=lambda y: 1.0001 * (matrix.T @ y))


@pytest.mark.mpi(min_size=2)
def test_ghosts_that_are_cropped_are_caught(rank, size):
    # The commonest wrong halo adjoint: it drops what belongs to the neighbours.
    right, left = (rank + 1) % size, (rank - 1) % size

    def halo(u):
        return np.concatenate((mpiad.mpi_exchange(u[-1:], right, left), u))

    operator = custom_operator(halo)
    defadjoint(operator, lambda y: y[1:])
    with pytest.raises(AdjointError, match=rf"over {size} ranks"):
        check_adjoint(operator, np.ones(4))


@pytest.mark.mpi(min_size=2)
def test_the_identity_is_not_the_transpose_of_allreduce(size):
    operator = custom_operator(mpiad.mpi_allreduce)
    defadjoint(operator, lambda y: y)
    with pytest.raises(AdjointError):
        check_adjoint(operator, np.ones(3))


def test_complex_maps_are_transposed_without_conjugation():
    with pytest.raises(AdjointError):
        check_adjoint(lambda x: 1j * x, np.ones(3, np.complex128), adjoint=lambda y: -1j * y)
    assert check_adjoint(lambda x: 1j * x, np.ones(3, np.complex128), adjoint=lambda y: 1j * y) < 16


def test_maps_that_are_not_linear_are_refused():
    for bent in (lambda x: x**2, lambda x: x + 1.0):
        with pytest.raises(AdjointError, match="isn't linear"):
            check_adjoint(bent, np.ones(3))


def test_maps_from_complex_to_real():
    assert check_adjoint(lambda x: anp.real(mpiad.mpi_allreduce(x) * (2.0 + 1j)), np.ones(3, complex)) < 16
    with pytest.raises(AdjointError):
        check_adjoint(lambda x: anp.real(x * (2.0 + 1j)), np.ones(3, complex), adjoint=lambda y: y * (2.0 - 1j))


def test_maps_from_real_to_complex():
    assert check_adjoint(lambda x: mpiad.mpi_allreduce(x) * (2.0 + 1j), np.ones(3)) < 16
    with pytest.raises(AdjointError):
        check_adjoint(lambda x: x * (2.0 + 1j), np.ones(3), adjoint=lambda y: np.real(y))
