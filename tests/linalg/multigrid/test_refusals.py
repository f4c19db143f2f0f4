"""What multigrid refuses: on all ranks, with what was wrong and where, and the program can go on."""

from functools import partial

import numpy as np
import pytest

import mpiad
from mpiad.domain import Domain
from mpiad.errors import ConvergenceError, NotFiniteError
from mpiad.inverse import H1
from mpiad.linalg import Elliptic, Multigrid, solve_elliptic

SHAPE = (9, 8)
KINDS = "dirichlet", "neumann"


@pytest.fixture
def domain():
    return Domain(SHAPE)


@pytest.fixture(autouse=True)
def all_ranks_go_on(size):
    yield
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.parametrize("value", [-0.3, 0.0, np.nan, np.inf])
@pytest.mark.parametrize("place", [(0, 2), (8, 5)])
def test_kappa_that_is_not_positive(domain, place, value):
    kappa = np.ones(SHAPE)
    kappa[place] = value
    match = rf"kappa must be positive and finite, but is {value} at point \({place[0]}, {place[1]}\)"
    with pytest.raises(ValueError, match=match) as found:
        Multigrid(domain, kappa[domain.owned])
    assert found.type is (ValueError if np.isfinite(value) else NotFiniteError)
    with pytest.raises(ValueError, match="at 1 of"):
        mpiad.grad(lambda k: domain.sum(solve_elliptic(domain, k, np.ones(domain.local_shape))))(kappa[domain.owned])


def test_negative_c(domain):
    c = np.zeros(SHAPE)
    c[4, 4] = -1
    with pytest.raises(ValueError, match=r"c must be zero or more and finite, but is -1.0 at point \(4, 4\)"):
        Multigrid(domain, 1.0, c[domain.owned])


@pytest.mark.parametrize(
    ("error", "match", "settings"),
    [
        (
            ValueError,
            "singular: no side has boundary='dirichlet' or 'robin', and .* mean_zero=True",
            {"boundary": "neumann"},
        ),
        (ValueError, "mean_zero=True is for singular operators", {"mean_zero": True}),
        (ValueError, "boundary must be .* but got 'mixed'", {"boundary": "mixed"}),
        (ValueError, "boundary has 3 entries for a grid of 2", {"boundary": ("neumann",) * 3}),
        (ValueError, "two sides, but boundary has 3 entries", {"boundary": ("neumann", ("dirichlet",) * 3)}),
        (ValueError, "spacing must be positive and finite, but got -1", {"spacing": -1}),
        (ValueError, "spacing must be positive and finite, but got 0.0", {"spacing": 0.0}),
        (ValueError, r"spacing must be positive and finite, but got \(1.0, inf\)", {"spacing": (1.0, np.inf)}),
        (ValueError, "spacing must have one entry for each of 2 dimensions", {"spacing": (1.0, 2.0, 3.0)}),
        (TypeError, "spacing must be a number, or one for each dimension, but got None", {"spacing": None}),
        (ValueError, r"a number or an array of shape .* but has shape \(2,\)", {"kappa": np.ones(2)}),
        (TypeError, "kappa must be real numbers, but got .* complex128", {"kappa": 1j}),
        (TypeError, "c must be real numbers, but got str", {"c": "no"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments(domain, error, match, settings):
    with pytest.raises(error, match=match):
        Multigrid(domain, **{"kappa": 1.0, **settings})


def test_different_arguments(domain, rank, size):
    if size > 1:
        for different in ({"spacing": 1.0 + rank}, {"boundary": KINDS[rank > 0]}, {"centred": rank > 0}):
            with pytest.raises(ValueError, match="all ranks must give the same arguments"):
                Multigrid(domain, 1.0, 1.0, **different)


def test_settings_that_differ_between_ranks(domain, rank, size):
    b = np.ones(domain.local_shape)
    if size == 1:
        assert np.isfinite(solve_elliptic(domain, 1.0, b, x0=b)).all()
        return
    last = rank == size - 1
    for different in ({"rtol": 1e-3 if last else 1e-8}, {"maxiter": 1 if last else 100}, {"x0": b if last else None}):
        with pytest.raises(ValueError, match="ranks must give the same arguments"):
            solve_elliptic(domain, 1.0, b, **different)
    with pytest.raises(ValueError, match="mean_zero must be the same on all ranks"):
        solve_elliptic(domain, 1.0, b, boundary="neumann", mean_zero=last)


@pytest.mark.parametrize("settings", [{"rtol": -1.0}, {"rtol": np.nan}, {"rtol": 0.0}, {"maxiter": 0}], ids=str)
def test_settings_that_cannot_be_met(domain, settings):
    with pytest.raises(ValueError, match=f"linalg.Multigrid.solve: {next(iter(settings))}"):
        solve_elliptic(domain, 1.0, np.ones(domain.local_shape), **settings)


def test_extreme_contrast_is_called_that(domain, rank, size):
    kappa = np.full(domain.local_shape, 3e-13)
    kappa[0, 0] = 3e-1 if rank == size - 1 else 3e-13
    said = r"maxiter=1 iterations: kappa varies by a factor of 1e\+12, an extreme contrast"
    with pytest.raises(ConvergenceError, match=said):
        solve_elliptic(domain, kappa, np.ones(domain.local_shape), rtol=1e-12, maxiter=1)


def test_odd_ring():
    with pytest.raises(ValueError, match="even number of points, but dimension 1 has 9"):
        Multigrid(Domain((8, 9), periodic=True), 1.0, 1.0)


def test_rings_have_no_sides():
    """Nothing is given on any, whatever the boundary is called: constants are in the kernel."""
    with pytest.raises(ValueError, match="singular"):
        Multigrid(Domain((8, 6), periodic=True), 1.0)


def test_no_domain():
    with pytest.raises(TypeError, match=r"domain must be an mpiad.Domain, but got tuple \(4, 4\)"):
        Elliptic((4, 4))


def test_kinds_of_numbers(domain):
    """Coefficients aren't truncated to the integers of a field, and keep their imaginary parts."""
    u, operator, real = np.ones(domain.local_shape, int), Elliptic(domain), np.ones(domain.local_shape)
    calls = [partial(operator, kappa=k) for k in (0.5, 0.5 * real, operator.faces(0.5))]
    for call in (*calls, Multigrid(domain, 0.5).matvec, H1(domain).apply):
        with pytest.raises(TypeError, match="u must have floats or complex numbers, but has dtype int64"):
            call(u)
    for kappa in (1j, 1j * real, operator.faces(1j * real)):
        with pytest.raises(TypeError, match="kappa is complex, but u has dtype float64"):
            operator(real, kappa)
        np.testing.assert_allclose(operator(real + 0j, kappa), 1j * operator(real, 1.0))


def test_right_hand_side(domain, rank, size):
    multigrid, good = Multigrid(domain, 1.0), np.ones(domain.local_shape)
    for wrong_on in {0, size - 1}:
        bad = np.full_like(good, np.nan) if rank == wrong_on else good
        with pytest.raises(ValueError, match=rf"right-hand side .*is not finite: \d+ .* on rank {wrong_on}"):
            multigrid.solve(bad)
        with pytest.raises(ValueError, match=r"\(2, 2\)"):
            multigrid.solve(np.ones((2, 2)) if rank == wrong_on else good)
        with pytest.raises(TypeError, match="int64"):
            multigrid.solve(good.astype(int) if rank == wrong_on else good)


@pytest.mark.not_on(4)
def test_right_hand_sides_whose_squares_underflow_or_overflow(domain):
    ones = np.ones(domain.local_shape)
    u = solve_elliptic(domain, 1.0, ones)
    for size in (1e-120, 1e-200, 1e200):
        np.testing.assert_allclose(solve_elliptic(domain, 1.0, size * ones), size * u, rtol=1e-6)
    assert not solve_elliptic(domain, 1.0, 0 * ones).any()
    assert not solve_elliptic(domain, 1.0, 0 * ones, x0=ones).any()


def test_traced_where_no_derivative_flows(domain):
    multigrid = Multigrid(domain, 1.0)
    with pytest.raises(TypeError, match="expected a plain array of floats, but got ArrayBox"):
        mpiad.grad(lambda r: domain.sum(multigrid(r)))(np.ones(domain.local_shape))
    with pytest.raises(TypeError, match="kappa is traced.*solve_elliptic, which is differentiable"):
        mpiad.grad(lambda k: domain.sum(Multigrid(domain, k).matvec(k)))(np.ones(domain.local_shape))


def test_iterations_used_up(rank_rng):
    domain = Domain((40, 40))
    b = rank_rng(100).random((40, 40))[domain.owned]
    with pytest.raises(ConvergenceError, match="within maxiter=3 iterations: .* After 3 iterations") as found:
        solve_elliptic(domain, 1.0, b, maxiter=3)
    assert len(found.value.history) == 4 and found.value.history[0] > found.value.history[-1]
