"""The Taylor test passes right derivatives and catches wrong ones: a factor, a sign, a lost term, one rank's."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defjvp, defvjp, primitive

import mpiad
from mpiad.extend import custom_operator
from mpiad.extend import defjvp as operator_jvp
from mpiad.extend import defvjp as operator_vjp
from mpiad.testing import AdjointError, GradientError, check_grads

ROOT = 0


def program(x):
    """Return a nonlinear loss that mixes the ranks."""
    total = mpiad.mpi_allreduce(anp.sin(x))
    return mpiad.mpi_sum(anp.sum(total**2 * x) + anp.prod(x[:2]), ROOT)


def wrong_square(factor):
    """Return x² with an adjoint and a tangent that are off by a factor."""
    square = primitive(lambda x: x**2)
    defvjp(square, lambda ans, x: lambda g: factor * g * 2 * x)
    defjvp(square, lambda g, ans, x: factor * g * 2 * x)
    return square


def test_right_derivatives_pass_with_the_rates_of_theory(rng):
    rates = check_grads(program, rng.standard_normal(3) + 1.0)
    assert set(rates) == {"rev 1", "rev 2", "fwd 1", "fwd 2"}
    for name, rate in rates.items():
        assert rate == pytest.approx(2 if name.endswith("1") else 3, abs=0.2)


@pytest.mark.parametrize("mode", ["rev", "fwd"])
@pytest.mark.parametrize("factor", [1.001, -1.0, 0.0])
def test_a_wrong_factor_is_caught_on_all_ranks(rng, mode, factor):
    square = wrong_square(factor)
    with pytest.raises(GradientError, match="shrinks at rate"):
        check_grads(lambda x: mpiad.mpi_sum(anp.sum(square(x) * x)), rng.standard_normal(3) + 2.0, modes=(mode,), order=1)


@pytest.mark.mpi(min_size=2)
def test_a_term_lost_on_one_rank_is_caught(rng, rank, size):
    lossy = custom_operator(lambda x: x)
    operator_vjp(lossy, lambda ans, x: lambda g: 0.0 * g if rank == size - 1 else g)
    operator_jvp(lossy, lambda g, ans, x: g)
    with pytest.raises(GradientError, match="'rev'"):
        check_grads(lambda x: mpiad.mpi_sum(anp.sum(lossy(x) ** 3)), rng.standard_normal(3) + 2.0, order=1)


def test_wrong_second_derivatives_are_caught(rng):
    # The first derivative is right, but its own rule forgets a term.
    cube = primitive(lambda x: x**3)
    slope = primitive(lambda x: 3 * x**2)
    defvjp(cube, lambda ans, x: lambda g: g * slope(x))
    defjvp(cube, lambda g, ans, x: g * slope(x))
    defvjp(slope, lambda ans, x: lambda g: g * 5 * x)
    defjvp(slope, lambda g, ans, x: g * 5 * x)
    x = rng.standard_normal(3) + 2.0
    loss = lambda x: mpiad.mpi_sum(anp.sum(cube(x)))  # noqa: E731
    assert check_grads(loss, x, order=1)
    for mode in ("rev", "fwd"):
        with pytest.raises(GradientError, match="order 2"):
            check_grads(loss, x, order=2, modes=(mode,))


def test_shared_variables_and_nests(rank):
    params = {"a": np.array([0.7, 1.1]), "b": [1.3]}
    loss = lambda p: mpiad.mpi_sum(anp.sum((rank + 1) * p["a"] ** 3) * p["b"][0] ** 2)  # noqa: E731
    rates = check_grads(loss, params, shared=True)
    assert min(rates.values()) > 1.8


@pytest.mark.mpi(min_size=2)
def test_a_forgotten_shared_is_caught(rank):
    loss = lambda p: mpiad.mpi_sum(anp.sum((rank + 1) * p**3))  # noqa: E731

    def forgets(p):
        # Each rank's gradient is that of its own copy only: not the whole gradient of one shared variable.
        return mpiad.value_and_grad(loss)(p)[0]

    point = np.array([0.7, 1.1])
    direction = np.array([1.0, -0.5])
    value, own = mpiad.value_and_grad(loss)(point)
    step = 1e-4
    there, back = forgets(point + step * direction), forgets(point - step * direction)
    assert abs((there - back) / (2 * step) - own @ direction) > 0.1
    assert check_grads(loss, point, shared=True, order=1)


def test_objectives_and_argnums(rng, rank):
    loss = lambda c, x: c * anp.sum(x**3) * (rank + 1)  # noqa: E731
    for objective in ("sum", "mean"):
        assert check_grads(loss, 2.0, rng.standard_normal(3), argnum=1, objective=objective)
        assert check_grads(loss, 2.0, rng.standard_normal(3), argnum=(0, 1), objective=objective)


def test_linear_objectives_leave_no_remainder(rng):
    rates = check_grads(lambda x: mpiad.mpi_sum(anp.sum(x)), rng.standard_normal(3))
    assert all(rate == np.inf for rate in rates.values())


def test_float32_is_measured_above_its_own_rounding(rng):
    x = (rng.standard_normal(3) + 2.0).astype(np.float32)
    assert check_grads(lambda x: mpiad.mpi_sum(anp.sum(x**3)), x, order=1, step=1.0)["rev 1"] > 1.8


def test_rounding_of_large_terms_that_cancel_is_no_wrong_derivative(rng):
    """A wrong derivative is caught nevertheless."""
    loss = lambda x: mpiad.mpi_allreduce(anp.sum(anp.sin(x)) + 1e4) - 1e4 * mpiad.mpi_size()  # noqa: E731
    for _ in range(6):
        x = rng.standard_normal(3) + 2.0
        assert check_grads(loss, x)["rev 2"] > 2.8
        with pytest.raises(GradientError, match=r"shrinks at rate (1|0\.9)"):
            check_grads(lambda x: loss(wrong_square(1.01)(x)), x, order=1)


@pytest.mark.parametrize("wrong", [{"order": 3}, {"modes": ("reverse",)}, {"modes": ()}])
def test_wrong_arguments(wrong):
    with pytest.raises(ValueError, match="order must be 1 or 2, and modes must contain 'rev', 'fwd' or both"):
        check_grads(program, np.ones(3), **wrong)


@pytest.mark.parametrize("mode", ["rev", "fwd"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_derivatives_that_are_not_finite_raise(mode, value, rank):
    """Those of one rank, of an objective that is finite."""
    scale = custom_operator(lambda x: x**2)
    operator_vjp(scale, lambda ans, x: lambda g: g * (value if rank == 0 else 2 * x))
    operator_jvp(scale, lambda dx, ans, x: dx * (value if rank == 0 else 2 * x))
    with pytest.raises(GradientError, match=f"order 1 in mode '{mode}' along the direction is -?(nan|inf)"):
        check_grads(lambda x: mpiad.mpi_sum(scale(x)), 1.5, order=1, modes=(mode,))
    with pytest.raises(AdjointError, match="Aᵀ y has entries that aren't finite on rank 0"):
        mpiad.testing.check_adjoint(lambda x: 2.0 * x, np.ones(2), adjoint=lambda y: y * (value if rank == 0 else 2.0))
