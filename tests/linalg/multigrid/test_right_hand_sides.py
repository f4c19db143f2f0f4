"""Several right-hand sides in one solve, compiled and not, against sparse factorisations in one process."""

import numpy as np
import pytest
from diffusion import Diffusion
from elliptic_matrix import blocks, elliptic_matrix, fixed_sides
from scipy.sparse.linalg import splu

import mpiad
import mpiad.linalg.multigrid.hierarchy as levels
import mpiad.linalg.multigrid.preconditioner as preconditioner
from mpiad.domain import Domain
from mpiad.linalg import Multigrid, solve_elliptic

CASES = {
    "jumps": ((29, 34), {"spacing": (1.0, 0.8), "boundary": ("neumann", ("dirichlet", "neumann"))}, False),
    "ring": ((12, 17), {"centred": True}, (True, False)),
    "3-D": ((11, 8, 9), {}, False),
    "1-D": ((37,), {}, False),
}
each_case = pytest.mark.parametrize(("shape", "settings", "periodic"), CASES.values(), ids=CASES)


@pytest.fixture(params=["numpy", "compiled"])
def many_levels(request, monkeypatch):
    monkeypatch.setattr(levels, "_FACTORIZED", {1: 3, 2: 8, 3: 8})
    monkeypatch.setattr(levels, "_SHORTEST", {1: 2, 2: 2, 3: 2})
    monkeypatch.setattr(preconditioner, "are_compiled", lambda points: request.param == "compiled")


@each_case
def test_solutions_are_those_of_factors(shape, settings, periodic, many_levels, rank_rng):
    kappa, b = blocks(shape, rank_rng(100), 4), rank_rng(101).standard_normal((2, 2, *shape))
    b[0, 1], b[1, 0] = 0.0, 1e-6 * b[1, 0]  # each is solved to its own tolerance
    domain = Domain(shape, periodic=periodic)
    mine = (..., *domain.owned)
    multigrid = Multigrid(domain, kappa[domain.owned], 0.01, **settings)
    found = multigrid.solve(b[mine], rtol=1e-11)
    sides = multigrid.operator.sides
    factors = splu(elliptic_matrix(kappa, 0.01, sides.spacing, fixed_sides(sides), sides.centred, periodic).tocsc())
    for index in np.ndindex(2, 2):
        expected = factors.solve(b[index].ravel()).reshape(shape)
        np.testing.assert_allclose(found[index], expected[domain.owned], rtol=1e-7, atol=1e-8 * abs(expected).max())
    assert multigrid.history[0] == pytest.approx(np.linalg.norm(b)) and multigrid.history[-1] < 1e-10 * np.linalg.norm(b)
    # From where it arrived nothing is left to do; from elsewhere it is the same solution.
    again = multigrid.solve(b[mine], rtol=1e-9, x0=found)
    assert len(multigrid.history) == 1
    np.testing.assert_allclose(again, found, rtol=1e-12)


def test_means_are_taken_from_each(many_levels, rank_rng):
    shape = (12, 10)
    domain, b = Domain(shape, periodic=True), rank_rng(101).standard_normal((3, *shape))
    multigrid = Multigrid(domain, 2.0, boundary="neumann", mean_zero=True)
    u = multigrid.solve(b[(..., *domain.owned)], rtol=1e-10)
    means = b.mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(multigrid.matvec(u), (b - means)[(..., *domain.owned)], atol=1e-7)
    for one in u:
        assert abs(domain.sum(one)) < 1e-9


@pytest.mark.not_on(4)
def test_gradients_of_all_together(many_levels, rank_rng):
    shape, rng = (9, 8), rank_rng(100)
    domain, reference = Domain(shape), Diffusion(shape)
    kappa, b, w = np.exp(rng.standard_normal(shape)), rng.standard_normal((3, *shape)), rng.standard_normal(shape)
    mine = (..., *domain.owned)

    def loss(kappa, b):
        u = solve_elliptic(domain, kappa, b, 0.7, rtol=1e-13)
        return domain.dot(w[mine] * np.ones(b.shape), u**2) / 2

    value, found = mpiad.value_and_grad(loss, (0, 1))(kappa[mine], b[mine])
    each = [reference.gradient(kappa, 0.7, one, w) for one in b]
    expected = sum(np.sum(w * reference.solve(kappa, 0.7, one) ** 2) / 2 for one in b)
    np.testing.assert_allclose(value, expected, rtol=1e-8)
    np.testing.assert_allclose(found[0], sum(of_kappa for of_kappa, *_ in each)[mine], rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found[1], np.stack([of_b for *_, of_b in each])[mine], rtol=1e-7, atol=1e-9)


def test_numbers_of_right_hand_sides_that_differ_between_ranks(rank, size):
    domain = Domain((8, 9))
    ones = np.ones(domain.local_shape)
    if size > 1:
        with pytest.raises(ValueError, match="ranks must give the same arguments"):
            solve_elliptic(domain, 1.0, np.stack([ones] * (2 if rank else 3)))
    with pytest.raises(ValueError, match=r"x0 must have the shape of b, \(2, .* but has"):
        Multigrid(domain, 1.0).solve(np.stack([ones] * 2), x0=ones)
    none = np.ones((0, *domain.local_shape))
    assert Multigrid(domain, 1.0).solve(none).shape == Multigrid(domain, 1.0)(none).shape == none.shape
