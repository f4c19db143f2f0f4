"""Newton-CG with variables in pieces: minima by closed forms and SciPy, and what it promises as L-BFGS-sharded does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
from device_double import on_device, on_host
from known_problems import PROBLEMS
from mpi4py import MPI

import mpiad
from mpiad.errors import ConvergenceError
from mpiad.optimize.constraints import Box
from mpiad.optimize.sharded.newton_cg import System, truncated_cg

METHOD = "Newton-CG-sharded"
WAYS = ["line search", "trust region"]
SMALLEST = ["rosenbrock-2", "beale"]  # of two variables


@pytest.mark.serial
def test_a_bound_holds_a_variable_if_a_descent_step_leads_outwards() -> None:
    x, gradient = np.repeat([0.0, 0.5, 1.0], 3), np.tile([1.0, 0.0, -1.0], 3)
    stays = (np.clip(x - 1e-3 * gradient, 0.0, 1.0) == x) & (gradient != 0.0)
    free = Box(np.zeros(9), np.ones(9)).free(x, gradient, 1.0, slice(None))
    np.testing.assert_array_equal(free, ~stays)
    assert stays.sum() == 2


def piece_of(whole: np.ndarray, rank: int, size: int) -> np.ndarray:
    return np.array_split(whole, size)[rank].copy()


def gathered(fun: Any) -> Any:
    """Return a function of this rank's piece, which sees the whole."""
    return lambda x: fun(mpiad.mpi_allgather(x, axis=0))


def solve(fun: Any, whole: Any, rank: int, size: int, **keywords: Any) -> Any:
    return mpiad.minimize(gathered(fun), piece_of(np.asarray(whole), rank, size), method=METHOD, **keywords)


def joined(x: np.ndarray) -> np.ndarray:
    return np.concatenate(MPI.COMM_WORLD.allgather(x))


def spd(rng: np.random.Generator, n: int, smallest: float = 1.0) -> np.ndarray:
    q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return q @ np.diag(np.geomspace(smallest, 100.0, n)) @ q.T


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["logistic", *(pytest.param(n, marks=pytest.mark.one_rank) for n in ("wood", *SMALLEST))])
def test_minima_of_known_problems(name: str, way: str, rank: int, size: int) -> None:
    fun, start, _ = PROBLEMS[name]
    options = {"gtol": 1e-9, "grtol": 0.0, "globalization": way}
    result = solve(fun, start, rank, size, options=options)
    x = joined(result.x)
    expected = scipy.optimize.minimize(autograd.value_and_grad(fun), start, jac=True, options={"gtol": 1e-9})
    assert result.success and np.linalg.norm(autograd.grad(fun)(x)) <= 1e-9
    np.testing.assert_allclose(x, expected.x, atol=1e-5)
    np.testing.assert_allclose(joined(result.jac), autograd.grad(fun)(x), atol=1e-8)
    assert result.nfev == result.evaluations["both"] and result.nhev == result.evaluations["product"] > 0
    assert len(result.history.loss) == result.nit + 1 and np.all(np.diff(result.history.loss) <= 1e-15)


def inner_products(*pairs: tuple[np.ndarray, np.ndarray]) -> list[float]:
    return [float(a @ b) for a, b in pairs]


def test_products_of_cg_for_a_few_large_eigenvalues() -> None:
    """As in exact arithmetic, one product for each eigenvalue; rounding would double their number."""
    rng = np.random.default_rng(6)
    q, c = np.linalg.qr(rng.standard_normal((300, 300)))[0], spd(rng, 300, 10.0)
    factor, products = np.linalg.cholesky(c), []
    eigenvalues = np.concatenate([np.geomspace(1e6, 1e2, 15), np.ones(285)])
    inverse = np.linalg.inv(factor)
    hessian = inverse.T @ (q * eigenvalues) @ q.T @ inverse
    gradient = inverse.T @ q @ np.concatenate([np.ones(16), np.zeros(284)])

    def multiply(v: np.ndarray) -> np.ndarray:
        products.append(1)
        return hessian @ v

    square = float(gradient @ c @ gradient)
    system = System(multiply, lambda r: c @ r, inner_products, lambda: False, square, most_kept=32)
    found = truncated_cg(system, gradient, 1e-8, 200)
    assert found is not None and len(products) == 16
    residual = gradient + hessian @ found.vector
    assert residual @ c @ residual <= 4e-16 * square
    products.clear()
    truncated_cg(system._replace(most_kept=0), gradient, 1e-8, 200)
    assert len(products) > 24


def test_steps_of_cg_are_those_of_the_textbook() -> None:
    """In the preconditioner's norm: the minimiser, the boundary of a region, and the end at negative curvature."""
    rng = np.random.default_rng(5)
    hessian, p = spd(rng, 12), spd(rng, 12, 10.0)
    gradient = rng.standard_normal(12)

    def step(matrix: np.ndarray, radius: float = np.inf, forcing: float = 1e-12) -> Any:
        square = float(gradient @ p @ gradient)
        system = System(lambda v: matrix @ v, lambda r: p @ r, inner_products, lambda: False, square)
        return truncated_cg(system, gradient, forcing, 200, radius)

    def model(way: np.ndarray, matrix: np.ndarray) -> float:
        return gradient @ way + 0.5 * way @ matrix @ way

    found, newton = step(hessian), np.linalg.solve(hessian, -gradient)
    length = np.sqrt(newton @ np.linalg.solve(p, newton))
    np.testing.assert_allclose(found.vector, newton, rtol=1e-8)
    np.testing.assert_allclose([found.decrease, found.length], [-model(newton, hessian), length], rtol=1e-8)
    inside = step(hessian, 0.5 * length)
    np.testing.assert_allclose(inside.vector @ np.linalg.solve(p, inside.vector), (0.5 * length) ** 2, rtol=1e-9)
    np.testing.assert_allclose(inside.decrease, -model(inside.vector, hessian), rtol=1e-9)
    assert inside.on_boundary and not found.on_boundary
    bent = hessian - 20.0 * np.eye(12)
    np.testing.assert_allclose(step(-hessian).vector, -p @ gradient)
    edge = step(bent, 3.0)
    np.testing.assert_allclose(edge.vector @ np.linalg.solve(p, edge.vector), 9.0, rtol=1e-9)
    np.testing.assert_allclose(edge.decrease, -model(edge.vector, bent), rtol=1e-9)
    loose = step(hessian, forcing=0.1).vector
    residual = gradient + hessian @ loose
    assert 1e-9 < residual @ p @ residual <= 0.01 * gradient @ p @ gradient


def test_inner_product_and_preconditioner(rank: int, size: int) -> None:
    """A quadratic: one exact product's worth of CG where the preconditioner is the inverse, and gradients in its norm."""
    rng = np.random.default_rng(3)
    a, b = spd(rng, 8), rng.standard_normal(8)
    inverse = np.linalg.inv(a)

    def product(x: np.ndarray) -> np.ndarray:
        return piece_of(inverse @ joined(x), rank, size)

    def fun(x: Any) -> Any:
        return 0.5 * x @ a @ x - b @ x

    class Prior:
        solve = staticmethod(product)

    expected, first = np.linalg.solve(a, b), np.sqrt(b @ inverse @ b)
    for options in ({"inner_product": Prior()}, {"inner_product": product, "preconditioner": product}):
        result = solve(fun, np.zeros(8), rank, size, options={**options, "gtol": 0.0, "grtol": 1e-7})
        assert result.nit == result.nhev == 1
        np.testing.assert_allclose(joined(result.x), expected, rtol=1e-9)
        assert result.history.gradient_norm[0] == pytest.approx(first)
    plain = solve(fun, np.zeros(8), rank, size, options={"preconditioner": product})
    assert plain.history.gradient_norm[0] == pytest.approx(np.linalg.norm(b)) and plain.nhev == 1


def test_gauss_newton_beside_least_squares(rank: int, size: int) -> None:
    times = np.linspace(0.0, 3.0, 31)
    data = 2.0 * np.exp(-1.3 * times) + 0.4 + 0.05 * np.cos(40 * times)
    mine = slice(rank, None, size)

    def residuals(x: Any, part: Any = slice(None)) -> Any:
        return x[0] * anp.exp(-x[1] * times[part]) + x[2] - data[part]

    def regularizer(x: Any) -> Any:
        return 0.3 * anp.sum((x - 1.0) ** 4)

    def whole(x: Any) -> Any:
        return 0.5 * anp.sum(residuals(x) ** 2) + regularizer(x)

    start, options = np.array([1.0, 0.5, 0.0]), {"product": "gauss-newton", "gtol": 1e-10, "grtol": 0.0}
    known = scipy.optimize.least_squares(residuals, start, xtol=1e-14, gtol=1e-12, ftol=1e-14)
    result = solve(lambda x: residuals(x, mine), start, rank, size, options=options)
    np.testing.assert_allclose(joined(result.x), known.x, rtol=1e-7)
    np.testing.assert_allclose(result.fun, known.cost, rtol=1e-12)
    both = solve(lambda x: residuals(x, mine), start, rank, size, options={**options, "regularizer": gathered(regularizer)})
    expected = scipy.optimize.minimize(autograd.value_and_grad(whole), start, jac=True, options={"gtol": 1e-9})
    np.testing.assert_allclose(joined(both.x), expected.x, rtol=1e-6)
    np.testing.assert_allclose(both.fun, expected.fun, rtol=1e-12)


@pytest.mark.parametrize("loss", ["linear", "huber"])
@pytest.mark.parametrize("of_one_rank", [False, True], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(
    "number",
    [lambda u: u, lambda u: float(mpiad.stop_gradient(u)), lambda u: np.array(mpiad.stop_gradient(u))],
    ids=["traced", "plain", "array"],
)
def test_a_scalar_is_no_residual(number: Any, of_one_rank: bool, loss: str, rank: int, size: int) -> None:
    """The squared sum of all, once for each rank, would be minimized instead of the sum of squares."""
    domain = mpiad.Domain(12)
    data, options = np.sin(np.arange(12.0))[domain.owned], {"product": "gauss-newton", "loss": loss}

    def total(m: Any) -> Any:
        found = domain.sum((m - data) ** 2) + 3.0
        return m - data if of_one_rank and rank < size - 1 else number(found)

    start = np.zeros(domain.local_shape)
    with pytest.raises(TypeError, match="gauss-newton.* must return an array of this rank's residuals, .* the number"):
        domain.minimize(total, start, method=METHOD, options=options)
    result = domain.minimize(lambda m: m - data, start, method=METHOD, options=options)
    np.testing.assert_allclose(result.x, data, atol=1e-6)


@pytest.mark.parametrize("alike", [False, True])
def test_a_regularizer_that_is_not_reduced_is_refused(alike: bool, rank: int, size: int) -> None:
    """With objective="root" the parts of other ranks would be left out."""
    domain = mpiad.Domain(12)
    data = np.sin(np.arange(12.0))[domain.owned]
    start = np.ones(domain.local_shape) if alike else data + 1.0  # 12 cells: parts are equal there on 2 and 3 ranks

    def run(regularizer: Any, objective: str) -> Any:
        options = {"product": "gauss-newton", "regularizer": regularizer, "gtol": 1e-10, "grtol": 0.0}
        return domain.minimize(lambda m: m - data, start, method=METHOD, options=options, objective=objective)

    def part(m: Any) -> Any:
        return 0.5 * anp.sum(m**2)

    if size > 1:
        with pytest.raises(ValueError, match="option regularizer must return the same number on all ranks"):
            run(part, "root")
    for found in (run(part, "sum"), run(lambda m: mpiad.mpi_allreduce(part(m)), "root")):
        np.testing.assert_allclose(found.x, data / 2.0, atol=1e-9)  # of ½|m - data|² + ½|m|²
        assert found.fun == pytest.approx(np.sum(np.sin(np.arange(12.0)) ** 2) / 4.0)


def first_step(a: np.ndarray, p: np.ndarray, represent: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return CG's first iterate with half of the gradient's norm, and all residuals' squared norms in R⁻¹ and in P."""
    x, r, direction, rz = np.zeros(len(b)), -b, np.zeros(len(b)), np.inf
    squares = [[b @ represent @ b, b @ p @ b]]
    while squares[-1][0] > 0.25 * squares[0][0]:
        z = p @ r
        direction, rz = (r @ z) / rz * direction - z, r @ z
        step = rz / (direction @ a @ direction)
        x, r = x + step * direction, r + step * (a @ direction)
        squares.append([r @ represent @ r, r @ p @ r])
    return x, np.array(squares)


def on_pieces(matrix: np.ndarray, rank: int, size: int) -> Any:
    return lambda v: piece_of(matrix @ joined(v), rank, size)


@pytest.mark.parametrize("inner", [False, True], ids=["Euclidean", "inner product"])
def test_the_forcing_term_is_measured_in_the_inner_product(inner: bool, rank: int, size: int) -> None:
    """The first step ends at the first iterate whose residual is half of the gradient in that norm, not in P's."""
    rng = np.random.default_rng(11)
    # P is far from both the Hessian's inverse and the inner product's.
    a, p, b = spd(rng, 20), spd(rng, 20), rng.standard_normal(20)
    represent = spd(rng, 20, 10.0) if inner else np.eye(20)
    x, squares = first_step(a, p, represent, b)
    by_p = squares[:, 1]
    assert len(squares) > 1 + np.argmax(by_p <= 0.25 * by_p[0])  # else the norms agree
    options: dict[str, Any] = {"preconditioner": on_pieces(p, rank, size), "maxiter": 1, "forcing": 0.5}
    options |= {"inner_product": on_pieces(represent, rank, size)} if inner else {}
    result = solve(lambda x: 0.5 * x @ a @ x - b @ x, np.zeros(20), rank, size, options=options)
    assert result.nhev == len(squares) - 1
    np.testing.assert_allclose(joined(result.x), x, rtol=1e-6)


def test_the_norm_of_a_preconditioner_says_nothing_if_the_inner_product_is_another_objects(rank: int, size: int) -> None:
    """The residual is half of the gradient in the inner product's norm at an iterate where it isn't nearly so in P's."""
    rng = np.random.default_rng(17)
    a, p, b = spd(rng, 20), spd(rng, 20), rng.standard_normal(20)
    represent = spd(rng, 20, 10.0)
    x, squares = first_step(a, p, represent, b)
    assert squares[-1, 1] > 1.7 * 0.25 * squares[0, 1]

    class Prior:
        def solve(self, g: np.ndarray) -> np.ndarray:
            return piece_of(represent @ joined(g), rank, size)

    options = {"inner_product": Prior(), "preconditioner": on_pieces(p, rank, size), "maxiter": 1, "forcing": 0.5}
    result = solve(lambda x: 0.5 * x @ a @ x - b @ x, np.zeros(20), rank, size, options=options)
    assert result.nhev == len(squares) - 1
    np.testing.assert_allclose(joined(result.x), x, rtol=1e-6)


def test_the_forcing_terms_are_those_of_eisenstat_and_walker(rank: int, size: int) -> None:
    """Their choice 2 with its safeguard, in a loop of NumPy. At first the Hessian is tripled, so that each case occurs.

    Then it is off by a hundredth, so that the problem isn't recognized as linear.
    """
    rng, factors = np.random.default_rng(0), (3.0, 1.01, 1.01)
    q = np.linalg.qr(rng.standard_normal((30, 30)))[0]
    a, b = q @ np.diag(np.geomspace(1.0, 1e3, 30)) @ q.T, rng.standard_normal(30)
    x, forcing, products, points = np.zeros(30), 0.5, [], []
    for factor in factors:
        r, step, count = a @ x - b, np.zeros(30), 0
        before, direction = np.linalg.norm(r), -r
        while (norm := np.linalg.norm(r)) > forcing * before:
            product, count = factor * (a @ direction), count + 1
            length = norm**2 / (direction @ product)
            step, r = step + length * direction, r + length * product
            direction = (r @ r) / norm**2 * direction - r
        x = x + step
        safeguard, forcing = 0.9 * forcing**2, 0.9 * (np.linalg.norm(a @ x - b) / before) ** 2
        forcing = min(0.5, max(forcing, safeguard) if safeguard > 0.1 else forcing)
        products, points = [*products, count], [*points, x]

    def hessp(x: np.ndarray, v: np.ndarray) -> np.ndarray:
        return piece_of((1.01 if joined(x).any() else 3.0) * (a @ joined(v)), rank, size)

    for k, point in enumerate(points):
        options = {"maxiter": k + 1, "grtol": 0.0}
        result = solve(lambda x: 0.5 * x @ a @ x - b @ x, np.zeros(30), rank, size, hessp=hessp, options=options)
        assert result.nhev == sum(products[: k + 1])
        np.testing.assert_allclose(joined(result.x), point, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_a_linear_problem_with_24_data_takes_about_24_products(way: str, rank: int, size: int) -> None:
    """One outer iteration of one run of CG: the Hessian is the prior's, whose covariance preconditions, plus rank 24."""
    rng = np.random.default_rng(0)
    operator, data = 2.0 * rng.standard_normal((24, 300)), rng.standard_normal(24)
    covariance = spd(rng, 300, 1e-2) / 100.0
    precision = np.linalg.inv(covariance)
    expected = np.linalg.solve(precision + operator.T @ operator / 0.01, operator.T @ data / 0.01)

    class Prior:
        solve = staticmethod(on_pieces(covariance, rank, size))
        cost = staticmethod(gathered(lambda m: 0.5 * anp.dot(m, anp.dot(precision, m))))

    def residuals(m: Any) -> Any:
        return (anp.dot(operator, m) - data)[rank::size] / 0.1

    options = {"product": "gauss-newton", "regularizer": Prior(), "inner_product": Prior(), "gtol": 0.0, "grtol": 1e-8}
    options |= {"globalization": way, "radius": 1e6}
    result = solve(residuals, np.zeros(300), rank, size, options=options)
    assert result.success and result.nit == 1 and result.nfev == 3 and 20 <= result.nhev <= 26
    np.testing.assert_allclose(joined(result.x), expected, atol=1e-7 * np.abs(expected).max())
    fixed = solve(residuals, np.zeros(300), rank, size, options={**options, "forcing": 0.1})
    assert fixed.nit > 5 and fixed.nhev > result.nhev
    np.testing.assert_allclose(joined(fixed.x), expected, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("loss", ["huber", "soft_l1", "cauchy"])
def test_robust_losses_are_those_of_scipy(loss: str, rank: int, size: int) -> None:
    times = np.linspace(0.0, 3.0, 31)
    data = 2.0 * np.exp(-1.3 * times) + 0.4 + 0.05 * np.cos(40 * times)
    data[[4, 11, 23]] += [1.0, -2.0, 0.7]
    mine = slice(rank, None, size)

    def residuals(x: Any, part: Any = slice(None)) -> Any:
        return x[0] * anp.exp(-x[1] * times[part]) + x[2] - data[part]

    def model(x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return SciPy's cost, its gradient, and the matrix of iteratively reweighted least squares."""
        jac, f = autograd.jacobian(residuals)(x), residuals(x)
        z = (f / 0.1) ** 2
        rho, weights = {
            "huber": (np.where(z <= 1, z, 2 * z**0.5 - 1), np.minimum(1.0, z**-0.5)),
            "soft_l1": (2 * ((1 + z) ** 0.5 - 1), (1 + z) ** -0.5),
            "cauchy": (np.log1p(z), 1 / (1 + z)),
        }[loss]
        return 0.5 * 0.01 * np.sum(rho), jac.T @ (weights * f), jac.T @ (weights[:, None] * jac)

    start = np.array([1.0, 0.5, 0.0])
    options = {"product": "gauss-newton", "loss": loss, "f_scale": 0.1, "gtol": 1e-8, "grtol": 0.0}
    known = scipy.optimize.least_squares(
        residuals, start, loss=loss, f_scale=0.1, xtol=1e-14, gtol=1e-12, ftol=1e-14, max_nfev=1000
    )
    result = solve(lambda x: residuals(x, mine), start, rank, size, options=options)
    assert result.success and result.nit < 20
    np.testing.assert_allclose(joined(result.x), known.x, rtol=1e-5)
    np.testing.assert_allclose(result.fun, known.cost, rtol=1e-9)
    first = solve(lambda x: residuals(x, mine), start, rank, size, options={**options, "maxiter": 1, "forcing": 1e-12})
    cost, gradient, matrix = model(start)
    assert first.history.loss[0] == pytest.approx(cost, rel=1e-12)
    assert first.history.gradient_norm[0] == pytest.approx(np.linalg.norm(gradient), rel=1e-12)
    fraction = (joined(first.x) - start) / np.linalg.solve(matrix, -gradient)  # that the line search chose
    assert 0.0 < fraction[0] <= 1.0
    np.testing.assert_allclose(fraction, fraction[0], rtol=1e-8)


@pytest.mark.parametrize("put", [np.asarray, on_device], ids=["host", "device"])
def test_robust_loss_of_arrays(put: Any, rank: int, size: int) -> None:
    """Residuals of any shape, on the host or on a device; the minimizer of Σ huber(m - d) + ½ m² in closed form."""
    data = np.linspace(-3.0, 3.0, 12).reshape(4, 3) + rank
    options = {"product": "gauss-newton", "loss": "huber", "regularizer": lambda m: 0.5 * anp.sum(m**2), "gtol": 1e-9}
    shown = put(data)
    result = mpiad.minimize(
        lambda m: m - shown, put(np.zeros((4, 3))), method=METHOD, objective="sum", options={**options, "grtol": 0.0}
    )
    np.testing.assert_allclose(on_host(result.x), np.where(np.abs(data) <= 2.0, data / 2, np.sign(data)), atol=1e-8)


def test_covariance_of_the_observation_error(rank: int, size: int) -> None:
    """Residuals with correlated errors, by their inverse covariance, compared with a dense solve; as function or object."""
    rng = np.random.default_rng(21)
    operator, data = rng.standard_normal((14, 9)), rng.standard_normal(14)
    precision, prior = spd(rng, 14), spd(rng, 9)
    expected = np.linalg.solve(operator.T @ precision @ operator + prior, operator.T @ precision @ data)
    multiply = on_pieces(precision, rank, size)

    class Noise:
        apply = staticmethod(multiply)

    def residuals(m: Any) -> Any:
        return piece_of(np.arange(14), rank, size), anp.dot(operator, m) - data

    def mine(m: Any) -> Any:
        rows, whole = residuals(m)
        return whole[rows]

    options = {"product": "gauss-newton", "regularizer": gathered(lambda m: 0.5 * anp.dot(m, anp.dot(prior, m)))}
    options |= {"gtol": 1e-10, "grtol": 0.0}
    gap = operator @ expected - data
    for given in (multiply, Noise()):
        result = solve(mine, np.zeros(9), rank, size, options={**options, "noise_precision": given})
        assert result.success and result.nit == 1
        np.testing.assert_allclose(joined(result.x), expected, rtol=1e-8)
        assert result.fun == pytest.approx(0.5 * gap @ precision @ gap + 0.5 * expected @ prior @ expected, rel=1e-10)
    for wrong, kind, words in (
        (lambda r: -r, ValueError, "noise_precision must be symmetric and positive definite, but r"),
        (lambda r: np.append(r, 0.0), TypeError, "noise_precision must return the residuals' shape"),
    ):
        with pytest.raises(kind, match=words):
            solve(mine, np.zeros(9), rank, size, options={**options, "noise_precision": wrong})


def test_what_one_object_approximates_is_measured_exactly_near_the_end(rank: int, size: int) -> None:
    """A prior's `precondition` is near its `solve`: the latter runs when the former's norm has about fallen, not always."""
    rng = np.random.default_rng(12)
    covariance, data = spd(rng, 40), rng.standard_normal((40, 40)) * np.geomspace(1.0, 30.0, 40)
    rough = np.sqrt(np.linspace(0.9, 1.1, 40))
    called = {"solve": 0, "precondition": 0}

    class Prior:
        def solve(self, g: np.ndarray) -> np.ndarray:
            called["solve"] += 1
            return piece_of(covariance @ joined(g), rank, size)

        def precondition(self, g: np.ndarray) -> np.ndarray:
            called["precondition"] += 1
            return piece_of(rough * (covariance @ (rough * joined(g))), rank, size)

    a, b = np.linalg.inv(covariance) + data.T @ data, rng.standard_normal(40)
    options = {"inner_product": Prior(), "maxiter": 1, "forcing": 0.5}
    result = solve(lambda x: 0.5 * x @ a @ x - b @ x, np.zeros(40), rank, size, options=options)
    residual = a @ joined(result.x) - b
    assert residual @ covariance @ residual <= 0.25 * b @ covariance @ b
    assert result.nhev > 8 and called["solve"] < 0.7 * called["precondition"]


@pytest.mark.parametrize("put", [np.asarray, on_device], ids=["host", "device"])
@pytest.mark.parametrize("way", WAYS)
def test_bounds_by_two_metrics(way: str, put: Any, rank: int, size: int) -> None:
    """A quadratic in a box, against SciPy's active sets; few iterations, since the free variables take Newton steps."""
    rng = np.random.default_rng(4)
    a, b = spd(rng, 20), 30.0 * rng.standard_normal(20)
    low, high = -np.abs(rng.standard_normal(20)), np.abs(rng.standard_normal(20))
    root = np.linalg.cholesky(a)
    expected = scipy.optimize.lsq_linear(root.T, np.linalg.solve(root, b), (low, high), method="bvls", tol=1e-14)
    bounds = list(zip(piece_of(low, rank, size), piece_of(high, rank, size)))
    a, b = put(a), put(b)
    result = mpiad.minimize(
        gathered(lambda x: 0.5 * anp.dot(x, anp.dot(a, x)) - anp.dot(b, x)), put(piece_of(np.full(20, 5.0), rank, size)),
        method=METHOD, bounds=bounds, options={"gtol": 1e-8, "grtol": 0.0, "globalization": way},
    )  # fmt: skip
    assert result.success and result.nit < 40
    np.testing.assert_allclose(joined(on_host(result.x)), expected.x, atol=1e-7)
    assert 3 < np.sum(expected.active_mask != 0) < 20


@pytest.mark.parametrize("given", [("jac",), ("hessp",), ("jac", "hessp")], ids="-".join)
def test_derivatives_of_the_users_own(given: tuple[str, ...], rank: int, size: int) -> None:
    start, curvatures = np.linspace(-1.0, 2.0, 6), np.arange(1.0, 7.0)

    def fun(x: Any) -> Any:
        return anp.sum(curvatures * (x**4 / 4 + x**2 / 2 - x)) + anp.sum(x) ** 2

    own: dict[str, Any] = {
        "jac": lambda x: piece_of(autograd.grad(fun)(joined(x)), rank, size),
        "hessp": lambda x, v: piece_of(
            curvatures * (3 * joined(x) ** 2 + 1) * joined(v) + 2 * np.sum(joined(v)), rank, size
        ),
    }
    told: list[str] = []

    def noted(name: str) -> Any:
        return lambda *args: told.append(name) or own[name](*args)

    options = {"gtol": 1e-9, "grtol": 0.0}
    result = solve(fun, start, rank, size, options=options, **{name: noted(name) for name in given})
    expected = scipy.optimize.minimize(autograd.value_and_grad(fun), start, jac=True, options={"gtol": 1e-9})
    assert result.success and set(told) == set(given) and result.nit < 10
    np.testing.assert_allclose(joined(result.x), expected.x, atol=1e-8)
    assert result.nhev == result.evaluations["product"] > 0
    with pytest.raises(ValueError, match="a product with the Hessian isn't finite"):
        solve(fun, start, rank, size, hessp=lambda x, v: v * np.nan)


@pytest.mark.parametrize("way", [*WAYS, None])
def test_a_gradient_of_the_wrong_sign_ends_where_it_began(way: str | None, rank: int, size: int) -> None:
    fun, start, _ = PROBLEMS["wood"]
    options = {} if way is None else {"globalization": way}
    for most, status in ((1000, 2), (2, 1)):
        result = mpiad.minimize(
            gathered(fun), piece_of(start, rank, size), method="L-BFGS-sharded" if way is None else METHOD,
            jac=lambda x: -piece_of(autograd.grad(fun)(joined(x)), rank, size), options={"maxfun": most, **options},
        )  # fmt: skip
        assert result.status == status and not result.success and ("check_grads" in result.message) == (status == 2)
        assert result.nfev <= most and result.fun == fun(start)
        np.testing.assert_array_equal(joined(result.x), start)


@pytest.mark.parametrize("method, way", [*((METHOD, way) for way in WAYS), ("L-BFGS-sharded", None)])
@pytest.mark.parametrize("where", ["value", "solver", "solver of one rank"])
def test_trial_points_that_fail_on_one_rank(where: str, method: str, way: str | None, rank: int, size: int) -> None:
    """Beyond |x| = 2 there is nothing: the step is made shorter on all ranks, and the minimum at 1.9 found."""
    beyond = []

    def fun(x: Any) -> Any:
        out = bool(np.max(np.abs(mpiad.stop_gradient(x))) > 2.0)
        beyond.append(out)
        if out and where == "value":
            return anp.sum(x) * (np.nan if rank == size - 1 else 1.0)
        if out and (where == "solver" or rank == size - 1):
            mpiad.linalg.solve(lambda u: u * np.arange(1.0, 4.0), np.ones(3), maxiter=1, comm=_where(where))
        return anp.sum(anp.sqrt(1.0 + 9.0 * (x - 1.9) ** 2))  # Newton's steps go much too far

    options = {"gtol": 1e-8, "globalization": way, "grtol": 0.0} if method == METHOD else {"gtol": 1e-8, "ftol": 0.0}
    start = piece_of(np.linspace(-1.9, -1.0, 4), rank, size)
    result = mpiad.minimize(gathered(fun), start, method=method, objective="mean", options=options)
    assert result.success and any(beyond)
    np.testing.assert_allclose(joined(result.x), np.full(4, 1.9), atol=1e-6)


def _where(where: str) -> Any:
    return None if where == "solver" else MPI.COMM_SELF


def test_a_solver_that_fails_at_the_start_is_an_error(rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        raise ConvergenceError("it never does")

    with pytest.raises(mpiad.errors.WorkerError, match="it never does"):
        solve(fun, np.ones(4), rank, size)


def test_limits_callback_and_checkpoint(tmp_path: Path, rank: int, size: int) -> None:
    fun, start, _ = PROBLEMS["rosenbrock-2"]
    whole = solve(fun, start, rank, size)
    for limit in (1, 3):
        result = solve(fun, start, rank, size, options={"maxfun": limit})
        assert result.nfev == limit and result.status == 1 and "maxfun" in result.message
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    short = solve(fun, start, rank, size, options={"maxiter": 4}, checkpoint=folder / "state.npz")
    assert short.nit == 4 and short.status == 1
    resumed = solve(fun, start, rank, size, checkpoint=folder / "state.npz")
    np.testing.assert_array_equal(resumed.x, whole.x)
    assert (resumed.nit, resumed.nfev, resumed.nhev) == (whole.nit, whole.nfev, whole.nhev)
    for field in ("loss", "gradient_norm", "step", "evaluations"):
        np.testing.assert_array_equal(getattr(resumed.history, field), getattr(whole.history, field))
    with pytest.raises(ValueError, match="globalization"):
        solve(fun, start, rank, size, options={"globalization": "trust region"}, checkpoint=folder / "state.npz")

    seen: list[np.ndarray] = []

    def stop(x: np.ndarray) -> None:
        seen.append(x)
        if len(seen) == 2:
            raise StopIteration

    result = solve(fun, start, rank, size, callback=stop if rank == size - 1 else None)
    assert result.status == 99 and result.nit == 2


def test_wrong_options_are_refused_on_all_ranks(rank: int, size: int) -> None:
    def refused(kind: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            solve(lambda x: anp.sum((x - 1.0) ** 2 * np.arange(1.0, 5.0)), np.zeros(4), rank, size, options=options)

    last = rank == size - 1
    refused(ValueError, "has the options product", m=3)
    refused(ValueError, "product must be one of", product="newton" if last else "full")
    refused(TypeError, "preconditioner must be callable, or have a method `solve`", preconditioner=3.0 if last else None)
    refused(ValueError, "regularizer is for product='gauss-newton'", regularizer=lambda x: 0.0)
    refused(ValueError, "noise_precision is for product='gauss-newton'", noise_precision=lambda r: r)
    refused(ValueError, "loss is for product='gauss-newton'", loss="huber")
    refused(ValueError, "loss must be one of", product="gauss-newton", loss="hubert" if last else "huber")
    refused(ValueError, "f_scale must be positive", product="gauss-newton", loss="huber", f_scale=0.0)
    refused(ValueError, "forcing must be positive and at most 1", forcing=2.0)
    refused(ValueError, "loss is for independent residuals", product="gauss-newton", loss="huber",
            noise_precision=lambda r: r)  # fmt: skip
    refused(ValueError, "has the options product.* but got 'recycle'", recycle=3)
    refused(ValueError, "preconditioner must be symmetric and positive", preconditioner=lambda r: -r)
    refused(ValueError, "inner product must be symmetric", inner_product=lambda g: -g)
    refused(ValueError, "preconditioner must be symmetric", preconditioner=_turned(rank, size))
    refused(ValueError, "the inner product must be symmetric, but g", inner_product=_turned(rank, size))
    refused(TypeError, "option preconditioner returned", preconditioner=lambda r: np.append(r, 0.0) if last else r)
    with pytest.raises(TypeError, match="real residuals"):
        solve(lambda x: 1j * x, np.zeros(4), rank, size, options={"product": "gauss-newton"})


def _turned(rank: int, size: int) -> Any:
    matrix = np.eye(4) + np.diag([2.0, 2.0, 2.0], 1)
    return lambda r: piece_of(matrix @ joined(r), rank, size)
