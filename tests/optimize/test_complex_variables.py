"""Complex variables in all methods, compared with SciPy on the real and imaginary parts."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize

from mpiad.optimize import least_squares, minimize

CENTER = np.array([0.7 - 0.4j, -0.3 + 0.9j, 0.2 + 0.1j])
START = np.array([0.1 - 0.3j, 0.5 + 0.2j, -0.2 + 0.3j])
BOUNDED = ["L-BFGS", "TNC", "SLSQP", "trust-constr"]
PAIRS = [(-1.0, 0.5), (-0.3, 1.0), (-0.2, 1.0), (None, 0.6), (-1.0, None), (-0.5, 0.4)]  # re0, im0, re1, im1, ...


def fun(z: Any, share: float = 1.0) -> Any:
    """Not analytic: the gradient depends on real and imaginary parts in different ways."""
    d = z - CENTER
    square = anp.sum(anp.abs(d) ** 2) + 0.5 * anp.real(anp.sum(d**2)) + 0.1 * anp.sum(anp.abs(d) ** 4)
    return share * (square + 0.3 * anp.real(z[0] * anp.conj(z[1])))


def parts(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag], axis=-1).reshape(-1)


def coupling() -> np.ndarray:
    """Return the Hessian of Re(z0 conj(z1))."""
    found = np.zeros((6, 6))
    found[[0, 1, 2, 3], [2, 3, 0, 1]] = 1.0
    return found


def derivatives(x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Return value, gradient and Hessian with respect to real and imaginary parts."""
    d = x - parts(CENTER)
    a, b = d[0::2], d[1::2]
    square = np.repeat(a**2 + b**2, 2)
    value = np.sum(1.5 * a**2 + 0.5 * b**2 + 0.1 * (a**2 + b**2) ** 2) + 0.15 * x @ coupling() @ x
    gradient = np.tile([3.0, 1.0], 3) * d + 0.4 * square * d + 0.3 * coupling() @ x
    hessian = np.diag(np.tile([3.0, 1.0], 3) + 0.4 * square) + 0.3 * coupling()
    for k in range(3):
        pair = d[2 * k : 2 * k + 2]
        hessian[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] += 0.8 * np.outer(pair, pair)
    return value, gradient, hessian


def in_real_numbers(method: str, **keywords: Any) -> scipy.optimize.OptimizeResult:
    if method in ("Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"):
        keywords["hessp"] = lambda x, v: derivatives(x)[2] @ v
    name = "L-BFGS-B" if method == "L-BFGS" else method
    return scipy.optimize.minimize(lambda x: derivatives(x)[:2], parts(START), jac=True, method=name, **keywords)


def user_gradient(z: Any, share: float) -> np.ndarray:
    found = share * derivatives(parts(z))[1]
    return found[0::2] - 1j * found[1::2]  # the convention of `value_and_grad`


def user_product(z: np.ndarray, v: np.ndarray, share: float) -> np.ndarray:
    found = share * derivatives(parts(z))[2] @ parts(v)
    return found[0::2] - 1j * found[1::2]


@pytest.mark.parametrize("given", [{}, {"jac": user_gradient, "hessp": user_product}])
@pytest.mark.parametrize("bounds", [None, (-0.35, 0.55), PAIRS])
@pytest.mark.parametrize(
    "method", ["L-BFGS", "BFGS", "CG", "TNC", "SLSQP", "Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"]
)
def test_as_scipy_in_real_numbers(method: str, bounds: Any, given: dict, size: int) -> None:
    if bounds is not None and method not in BOUNDED:
        pytest.skip("no bounds")
    options = {"maxfun": 200} if method == "TNC" else {"maxiter": 100}
    got = minimize(fun, START, method=method, objective="sum", args=(1.0 / size,), bounds=bounds, options=options, **given)
    of_all = bounds if bounds is None or bounds is PAIRS else [bounds] * 6
    expected = in_real_numbers(method, bounds=of_all, options=options)
    assert got.x.dtype == complex and abs(got.nit - expected.nit) <= 1
    np.testing.assert_allclose(parts(got.x), expected.x, atol=1e-7)
    value, gradient, _ = derivatives(parts(got.x))
    np.testing.assert_allclose([got.fun, *parts(np.conj(got.jac))], [value, *gradient], rtol=1e-12, atol=1e-12)
    if bounds is not None:  # some are active
        active = np.array([(-np.inf if a is None else a, np.inf if b is None else b) for a, b in of_all])
        distances = np.abs(parts(got.x)[:, None] - active).min(axis=1)
        assert np.sum(distances < 1e-4) >= 2


@pytest.mark.parametrize(
    ("method", "bounds", "options"),
    [
        ("L-BFGS-sharded", PAIRS, {"gtol": 1e-9, "ftol": 0.0}),
        ("Newton-CG-sharded", None, {"gtol": 1e-9, "grtol": 0.0}),
        ("MMA-sharded", (-0.35, 0.55), {"maxiter": 20}),
    ],
)
def test_sharded_variables(method: str, bounds: Any, options: dict, size: int) -> None:
    def in_parts(x: Any) -> Any:
        return fun(x[0::2] + 1j * x[1::2])

    found = [
        minimize(each, start, method=method, objective="sum", bounds=bounds, options=options)
        for each, start in ((fun, START), (in_parts, parts(START)))
    ]
    np.testing.assert_allclose(parts(found[0].x), found[1].x, rtol=1e-12)
    np.testing.assert_allclose(parts(np.conj(found[0].jac)), found[1].jac, rtol=1e-9, atol=1e-12)
    if method != "MMA-sharded":
        expected = in_real_numbers("L-BFGS", bounds=bounds, options={"gtol": 1e-10, "ftol": 0.0})
        np.testing.assert_allclose(parts(found[0].x), expected.x, atol=1e-7)
        np.testing.assert_allclose(found[0].fun, size * expected.fun, rtol=1e-12)


def residuals(z: Any, rank: int, size: int) -> Any:
    products = anp.concatenate([z * z[::-1], 2.0 * (z - CENTER), anp.exp(z)])[rank::size]
    return anp.concatenate([anp.real(products), anp.imag(products)])


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), (-0.35, 0.45), (np.full(6, -0.4), np.linspace(0.2, 0.7, 6))])
def test_least_squares(solver: str, bounds: Any, rank: int, size: int) -> None:
    tolerances = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-12)
    start = np.clip(parts(START), -0.2, 0.15)
    got = least_squares(
        residuals, start[0::2] + 1j * start[1::2], args=(rank, size), bounds=bounds, tr_solver=solver, **tolerances
    )
    expected = scipy.optimize.least_squares(
        lambda x: residuals(x[0::2] + 1j * x[1::2], 0, 1), start, jac="3-point", bounds=bounds,
        **tolerances,
    )  # fmt: skip
    np.testing.assert_allclose(parts(got.x), expected.x, atol=2e-5)
    assert got.x.dtype == complex and got.cost == pytest.approx(expected.cost, rel=1e-9)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([(0.0, 1.0)] * 3, r"each of the 6 variables, but got 3 lower and 3 upper bounds\. A complex number is two var"),
        ([(0.0, 1.0 + 1.0j)] * 6, r"pairs \(low, high\) of real numbers, .* A complex number is two variables"),
        (
            scipy.optimize.Bounds(-1.0 - 1.0j, 1.0 + 1.0j),
            r"pairs \(low, high\) of real numbers, .* A complex number is two",
        ),
    ],
)
def test_mistakes_with_bounds(bounds: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        minimize(fun, START, objective="mean", bounds=bounds)
    with pytest.raises(ValueError, match="real" if isinstance(bounds, scipy.optimize.Bounds) else "pair|each of the 6"):
        pair = bounds if isinstance(bounds, scipy.optimize.Bounds) else tuple(zip(*bounds))
        least_squares(residuals, START, args=(0, 1), bounds=pair)  # type: ignore[arg-type]
