"""What refuses a traced value says what to do instead, and stays the exception that it was."""

from __future__ import annotations

import copy
import logging
import math
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autograd
import autograd.numpy as anp
import autograd.scipy.special
import autograd.scipy.stats
import numpy as np
import pytest
import scipy.linalg
from autograd.scipy.linalg import solve_triangular
from autograd.scipy.signal import convolve
from mpi4py import MPI
from scipy import ndimage, signal
from scipy.sparse import csr_matrix, diags
from scipy.spatial.distance import cdist, pdist

import mpiad
from mpiad.errors import WorkerError

pytestmark = pytest.mark.serial

COMM = MPI.COMM_SELF
NEW_ARRAY = r"np\.concatenate, np\.stack, np\.array or np\.where of autograd\.numpy"
AUTOGRAD = r"call the functions of autograd\.numpy .*mpiad\.stop"
FILTER = AUTOGRAD + r".*sum of slices or of np\.roll\(x, 1, axis=0\), or call autograd\.scipy\.signal\.convolve\("
PRIMITIVE = r"call mpiad's, such as mpi_allreduce\(x\)"


def assigned(x: Any) -> Any:
    y = x * 2.0
    y[0] = 0.0
    return anp.sum(y)


def filled(x: Any) -> Any:
    y = np.zeros(3)
    y[:] = x
    return anp.sum(y)


def added_in_place(x: Any) -> Any:
    y = np.zeros(3)
    y += x
    return anp.sum(y)


def added_at(x: Any) -> Any:
    y = np.zeros(3)
    np.add.at(y, [0, 1, 1], x)
    return anp.sum(y)


def added_by_autograd(x: Any) -> Any:
    y = np.zeros(3)
    anp.add.at(y, [0, 1, 1], x)
    return anp.sum(y)


def deposited(x: Any) -> Any:
    y = np.zeros(2)
    y[[0, 1, 1]] += x
    return anp.sum(y**2)


def deposited_in_a_loop(x: Any) -> Any:
    y = np.zeros(2)
    for k, i in enumerate([0, 1, 1]):
        y[i] += x[k]
    return anp.sum(y**2)


def assigned_sums(x: Any) -> Any:
    y = np.zeros(2)
    y[[0, 1, 1]] = y[[0, 1, 1]] + x
    return anp.sum(y**2)


def counted(x: Any) -> Any:
    return anp.sum(np.bincount([0, 1, 1], weights=x) ** 2)


def counted_by_autograd(x: Any) -> Any:
    return anp.sum(anp.bincount(np.array([0, 1, 1]), x) ** 2)


DEPOSITS = [deposited, deposited_in_a_loop, assigned_sums, counted, counted_by_autograd, added_at, added_by_autograd]


@pytest.mark.parametrize("loss", DEPOSITS)
def test_sums_by_index_are_named(loss: Callable) -> None:
    cure = "a + mpiad.segment_sum(x, i, len(a))"
    with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError), match=re.escape(cure)):
        mpiad.grad(loss)(np.array([1.0, 2.0, 4.0]))
    if loss is not added_by_autograd:  # NumPy's functions have no such method, outside of jit, too
        with pytest.raises(TypeError, match=f"jit: {loss.__name__} can't be compiled.*{re.escape(cure)}"):
            mpiad.jit(loss, strict=True)(np.array([1.0, 2.0, 4.0]))


def test_the_advice_for_sums_by_index_is_right() -> None:
    scope = {"mpiad": mpiad, "a": np.array([8.0, 16.0]), "i": np.array([0, 1, 1])}
    advised = lambda x: eval("a + mpiad.segment_sum(x, i, len(a))", scope, {"x": x})  # noqa: E731
    gradient = mpiad.grad(lambda x: anp.sum(advised(x) ** 2))(np.array([1.0, 2.0, 4.0]))
    np.testing.assert_array_equal(gradient, [18.0, 44.0, 44.0])  # 2 (8 + 1), 2 (16 + 2 + 4)


OTHER_FUNCTIONS: dict[str, tuple[Callable, tuple[str, ...], Callable]] = {
    "percentile": (
        lambda x: anp.percentile(x[0], 30.0),
        ("s = np.sort(x)", "k = q * (len(x) - 1)", "i = min(int(k), len(x) - 2)", "s[i] + (k - i) * (s[i + 1] - s[i])"),
        lambda x: quantile(x[0], 0.3),
    ),
    "median": (lambda x: anp.median(x[0]), ("s = np.sort(x)",), lambda x: quantile(x[0], 0.5)),
    "cov": (
        lambda x: anp.cov(x)[0, 1],
        ("d = x - np.mean(x, axis=1, keepdims=True)", "np.dot(d, d.T) / (x.shape[1] - 1)"),
        lambda x: covariances(x)[0, 1],
    ),
    "corrcoef": (
        lambda x: anp.corrcoef(x)[0, 1],
        ("e = d / np.sqrt(np.sum(d**2, axis=1, keepdims=True))", "np.dot(e, e.T)"),
        lambda x: correlations(x)[0, 1],
    ),
    "convolve": (
        lambda x: anp.sum(anp.convolve(x[0], x[1]) ** 2),
        ('autograd.scipy.signal.convolve(x, y, mode="full")',),
        lambda x: anp.sum(convolve(x[0], x[1], mode="full") ** 2),
    ),
    "correlate": (
        lambda x: anp.sum(anp.correlate(x[0], x[1, :2]) ** 2),
        ('autograd.scipy.signal.convolve(x, np.conj(y)[::-1], mode="valid")',),
        lambda x: anp.sum(convolve(x[0], anp.conj(x[1, :2])[::-1], mode="valid") ** 2),
    ),
    "unwrap": (
        lambda x: anp.sum(anp.unwrap(9.0 * x[0]) * np.arange(5)),
        ("x + (np.unwrap(v) - v)", "v = mpiad.stop_gradient(x)"),
        lambda x: anp.sum((9.0 * x[0] + (np.unwrap(v := mpiad.stop_gradient(9.0 * x[0])) - v)) * np.arange(5)),
    ),
    "polyfit": (
        lambda x: anp.sum(anp.polyfit(np.arange(5.0), x[0], 2) ** 2),
        ("np.linalg.lstsq(x[:, None] ** np.arange(degree, -1, -1), y, rcond=None)[0]",),
        lambda x: anp.sum(anp.linalg.lstsq(np.arange(5.0)[:, None] ** np.arange(2, -1, -1), x[0], rcond=None)[0] ** 2),
    ),
    "nanmax": (
        lambda x: anp.nanmax(anp.where(MASK, x, np.nan), 0)[1],
        ("np.max(np.where(np.isnan(x), -np.inf, x), axis)",),
        lambda x: anp.max(anp.where(MASK, x, -np.inf), 0)[1],
    ),
    "nanstd": (
        lambda x: anp.nanstd(anp.where(MASK, x, np.nan)),
        ("without nan of x[~np.isnan(x)]",),
        lambda x: anp.std(x[MASK]),
    ),
    "ptp": (
        lambda x: anp.ptp(x, 0)[0],
        ("np.max(x, axis) - np.min(x, axis)",),
        lambda x: (anp.max(x, 0) - anp.min(x, 0))[0],
    ),
    "piecewise": (
        lambda x: anp.sum(anp.piecewise(x, [x < 0], [lambda x: x**2, lambda x: x**3])),
        ("np.where(x < 0, f(x), g(x))", "np.select(conditions, [f(x), g(x)], default)"),
        lambda x: anp.sum(anp.where(x < 0, x**2, x**3) + anp.select([x < 0], [x**2], x**3)) / 2,
    ),
    "meshgrid": (
        lambda x: anp.sum(anp.meshgrid(x[0], x[1])[0] ** 2 * anp.meshgrid(x[0], x[1])[1]),
        ("x[None, :] and y[:, None]",),
        lambda x: anp.sum(x[0][None, :] ** 2 * x[1][:, None]),
    ),
    "matrix_power": (
        lambda x: anp.linalg.matrix_power(anp.dot(x, x.T), 3)[0, 1],
        ("np.dot(a, np.dot(a, a))",),
        lambda x: anp.dot(a := anp.dot(x, x.T), anp.dot(a, a))[0, 1],
    ),
    "delete": (
        lambda x: anp.sum(anp.delete(x[0], 2) ** 2),
        ("x[k]", "k = np.delete(np.arange(len(x)), i)"),
        lambda x: anp.sum(x[0][np.delete(np.arange(len(x[0])), 2)] ** 2),
    ),
    "insert": (
        lambda x: anp.sum(anp.insert(x[0], 2, x[1, 0]) ** 2 * np.arange(6)),
        ("np.concatenate([x[:i], np.array([value]), x[i:]])",),
        lambda x: anp.sum(anp.concatenate([x[0, :2], anp.array([x[1, 0]]), x[0, 2:]]) ** 2 * np.arange(6)),
    ),
    "polyval": (
        lambda x: anp.polyval(x[0], x[1, 2]),
        ("y = 0.0", "for c in p: y = y * x + c"),
        lambda x: horner(x[0], x[1, 2]),
    ),
    "vander": (
        lambda x: anp.sum(anp.vander(x[0], 3) * np.arange(3)),
        ("x[:, None] ** np.arange(n)[::-1]",),
        lambda x: anp.sum(x[0][:, None] ** np.arange(3)[::-1] * np.arange(3)),
    ),
    "extract": (lambda x: anp.sum(anp.extract(MASK, x) ** 2), ("x[mask]",), lambda x: anp.sum(x[MASK] ** 2)),
    "compress": (
        lambda x: anp.sum(anp.compress(MASK[0], x, 1) ** 2),
        ("x[mask]", "x[:, mask]"),
        lambda x: anp.sum(x[:, MASK[0]] ** 2),
    ),
    "ediff1d": (
        lambda x: anp.sum(anp.ediff1d(x) ** 2),
        ("np.diff(np.ravel(x))",),
        lambda x: anp.sum(anp.diff(anp.ravel(x)) ** 2),
    ),
    "histogram": (
        lambda x: anp.sum(anp.histogram(x, [-9.0, -5.0, 9.0])[0] ** 2) * anp.sum(x),
        ("mpiad.stop_gradient(x)", "weights=y"),
        lambda x: anp.sum(anp.histogram(mpiad.stop_gradient(x), [-9.0, -5.0, 9.0])[0] ** 2) * anp.sum(x),
    ),
    "interp": (
        lambda x: anp.sum(anp.interp(3.0 * x, NODES[:-1], VALUES[:-1], period=1.5) ** 2),
        ("x % period",),
        lambda x: anp.sum(anp.interp(3.0 * x % 1.5, NODES, VALUES) ** 2),
    ),
}
MASK = np.arange(15).reshape(3, 5) % 3 > 0
NODES, VALUES = np.array([0.0, 0.4, 0.9, 1.5]), np.array([1.0, 3.0, -2.0, 1.0])


def horner(p: Any, x: Any) -> Any:
    y = 0.0
    for c in p:
        y = y * x + c
    return y


def quantile(x: Any, q: float) -> Any:
    s, k = anp.sort(x), q * (len(x) - 1)
    i = min(int(k), len(x) - 2)
    return s[i] + (k - i) * (s[i + 1] - s[i])


def covariances(x: Any) -> Any:
    d = x - anp.mean(x, axis=1, keepdims=True)
    return anp.dot(d, d.T) / (x.shape[1] - 1)


def correlations(x: Any) -> Any:
    d = x - anp.mean(x, axis=1, keepdims=True)
    e = d / anp.sqrt(anp.sum(d**2, axis=1, keepdims=True))
    return anp.dot(e, e.T)


@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_what_to_write_for_a_function_without_a_derivative(name: str) -> None:
    refused, formulas, advised = OTHER_FUNCTIONS[name]
    x = np.sin(np.arange(15.0)).reshape(3, 5)
    np.testing.assert_allclose(advised(x), refused(x), rtol=1e-13)
    for derive in (mpiad.grad(refused), lambda x: mpiad.jvp(refused, x, x), lambda x: mpiad.hvp(refused)(x, x)):
        with pytest.raises(NotImplementedError, match=f"{name} can't be differentiated") as found:
            derive(x)
        assert all(formula in str(found.value) for formula in formulas), found.value
    assert mpiad.testing.check_grads(advised, x, comm=COMM)


@pytest.mark.parametrize("name", ["iv", "ive", "jn", "yn", "polygamma"])
def test_a_traced_order_is_refused(name: str) -> None:
    """Autograd's derivative is zero."""
    fun = getattr(autograd.scipy.special, name)
    of_order = lambda n: fun(n, 2.0)  # noqa: E731
    for derive in (
        mpiad.grad(of_order), lambda n: mpiad.jvp(of_order, n, 1.0), lambda n: mpiad.hvp(of_order)(n, 1.0),
        mpiad.grad(mpiad.jit(of_order)), mpiad.jit(mpiad.grad(of_order)),
    ):  # fmt: skip
        with pytest.raises((NotImplementedError, TypeError), match=r"with respect to its order: .*stop_gradient\(n\)"):
            derive(1.0)
    slope = mpiad.grad(lambda x: fun(mpiad.stop_gradient(x) * 0.0 + 1.0, x))(2.0)
    assert slope == pytest.approx((fun(1, 2.0 + 1e-6) - fun(1, 2.0 - 1e-6)) / 2e-6, rel=1e-7)


def test_arguments_of_distributions_without_rules_are_named() -> None:
    calls = [
        ("cdf", lambda x: autograd.scipy.stats.t.cdf(x, 4.0 + x)),
        ("cdf", lambda x: autograd.scipy.stats.gamma.cdf(x, a=2.0 + x, loc=-1.0)),
        ("logpdf", lambda x: autograd.scipy.stats.chi2.logpdf(x, x + 1)),
    ]
    for name, fun in calls:
        for derive in (mpiad.grad(fun), lambda x, fun=fun: mpiad.jvp(fun, x, 1.0), mpiad.grad(mpiad.jit(fun))):
            with pytest.raises(
                NotImplementedError, match=f"^{name} can't be differentiated with these arguments: its rule"
            ):
                derive(0.7)


def positive(x: Any) -> Any:
    return anp.outer(x, x) + np.diag([2.0, 3.0, 4.0])


def solved_by_cholesky(a: Any, b: Any) -> Any:
    lower = anp.linalg.cholesky(a)
    return solve_triangular(lower.T, solve_triangular(lower, b, lower=True))


B, I, J = np.array([1.0, 2.0, 4.0]), *np.triu_indices(3, 1)
# The functions of plain SciPy and of autograd.scipy, the advice, and a function that follows it.
OF_SCIPY: dict[str, tuple[Callable, str, Callable]] = {
    "solve": (lambda linalg, a: linalg.solve(a, B), "np.linalg.solve(a, b)", lambda a: anp.linalg.solve(a, B)),
    "inv": (lambda linalg, a: linalg.inv(a), "np.linalg.inv(a)", anp.linalg.inv),
    "det": (lambda linalg, a: linalg.det(a), "np.linalg.det(a)", anp.linalg.det),
    "lstsq": (
        lambda linalg, a: linalg.lstsq(a[:, :2], B)[0],
        "np.linalg.lstsq(a, b, rcond=None)",
        lambda a: anp.linalg.lstsq(a[:, :2], B, rcond=None)[0],
    ),
    "cholesky": (
        lambda linalg, a: linalg.cholesky(a),
        "np.linalg.cholesky(a), which is the lower triangle L (the upper one is its transpose)",
        lambda a: anp.linalg.cholesky(a).T,
    ),
    "cho_factor": (
        lambda linalg, a: linalg.cho_solve(linalg.cho_factor(a), B),
        "np.linalg.cholesky(a), which is the lower triangle L, and for L y = b autograd.scipy.linalg.solve_triangular(L, b",
        lambda a: solved_by_cholesky(a, B),
    ),
    "lu_factor": (
        lambda linalg, a: linalg.lu_solve(linalg.lu_factor(a), B),
        "np.linalg.solve(a, b)",
        lambda a: anp.linalg.solve(a, B),
    ),
    "eigvalsh": (lambda linalg, a: linalg.eigvalsh(a), "np.linalg.eigvalsh(a)", anp.linalg.eigvalsh),
    "eigvals": (
        lambda linalg, a: np.sort(linalg.eigvals(a).real),
        "np.linalg.eig(a)[0]",
        lambda a: anp.sort(anp.real(anp.linalg.eig(a)[0])),
    ),
    "svdvals": (
        lambda linalg, a: linalg.svdvals(a),
        "np.linalg.svd(a, compute_uv=False)",
        lambda a: anp.linalg.svd(a, compute_uv=False),
    ),
    "expm": (
        lambda linalg, a: linalg.expm(a),
        "v, V = np.linalg.eigh(a), and np.dot(V * f(v), V.T) with the function f",
        lambda a: anp.dot((v := anp.linalg.eigh(a))[1] * anp.exp(v[0]), v[1].T),
    ),
    "pdist": (
        lambda linalg, a: pdist(a),
        "np.sqrt(np.sum((x[i] - x[j]) ** 2, axis=-1)) with i, j = np.triu_indices(len(x), 1)",
        lambda a: anp.sqrt(anp.sum((a[I] - a[J]) ** 2, axis=-1)),
    ),
}


@pytest.mark.parametrize("name", OF_SCIPY)
def test_what_to_call_in_place_of_a_function_of_scipy(name: str) -> None:
    fun, advice, advised = OF_SCIPY[name]
    x, a = np.array([0.3, -1.2, 0.7]), positive(np.array([0.3, -1.2, 0.7]))
    np.testing.assert_allclose(advised(a), fun(scipy.linalg, a), rtol=1e-12)
    if name != "eigvals":
        assert mpiad.testing.check_grads(lambda x: anp.sum(anp.sin(advised(positive(x)))), x, comm=COMM)
    for linalg in (scipy.linalg,) if name == "pdist" else (scipy.linalg, autograd.scipy.linalg):
        refused = lambda x, linalg=linalg: anp.sum(fun(linalg, positive(x)))  # noqa: E731
        derivatives: list[Callable] = [
            mpiad.grad(refused),
            lambda x, f=refused: mpiad.jvp(f, x, x),
            mpiad.jit(mpiad.grad(refused)),
        ]
        for derive in derivatives:
            with pytest.raises((ValueError, TypeError, NotImplementedError), match=re.escape(advice)) as found:
                derive(x)
            assert name in str(found.value)


def test_forward_mode_through_eig_is_refused_with_advice() -> None:
    with pytest.raises(NotImplementedError, match=r"eig can't .* forwards.* mpiad\.make_vjp, or .* np\.linalg\.eigh\(a\)"):
        mpiad.hvp(lambda x: anp.sum(anp.abs(anp.linalg.eig(positive(x))[0])))(np.ones(3), np.ones(3))


OTHER_ARGUMENTS: list[Callable] = [
    lambda x: mpiad.mpi_gather(x, np.empty(3), root=0),
    lambda x: mpiad.mpi_scatter(x, np.empty(3), root=0),
    lambda x: mpiad.mpi_allreduce(x, np.empty(3), MPI.SUM),
    lambda x: mpiad.mpi_exchange(x, 0, 0, x, 0),
    lambda x: mpiad.mpi_isend(x, 0, 3),
    lambda x: mpiad.mpi_allreduce(x, recvbuf=x),
    lambda x: mpiad.mpi_bcast(buf=x),
]


@pytest.mark.parametrize("call", OTHER_ARGUMENTS)
def test_arguments_of_mpi4py(call: Callable) -> None:
    with pytest.raises(TypeError, match="return their results and take no receive buffers.*passed by name"):
        mpiad.grad(call)(np.ones(3))


def complex_entry(x: Any) -> Any:
    z = np.zeros(3, complex)
    z[0] = x[0]
    return anp.real(z[0])


def assigned_by_indices(x: Any) -> Any:
    y = x * 2.0
    y[np.array([0, 1])] = 0.0
    return anp.sum(y)


def received(x: Any) -> Any:
    y = np.zeros(3)
    COMM.Allreduce(x, y)
    return anp.sum(y)


def repeated(x: Any) -> Any:
    y = np.ones((2, 3))
    y *= 2.0 / np.tile(np.asanyarray(x), (2, 1))  # as numpy.matlib.repmat(x, 2, 1)
    return anp.sum(y)


WRONG: dict[str, tuple[Callable, type[Exception], str, str]] = {
    "assigned": (assigned, TypeError, "item assignment", NEW_ARRAY),
    "filled": (filled, ValueError, "array element with a sequence", NEW_ARRAY),
    "added in place": (added_in_place, TypeError, "add", r"write a = a \+ x instead of a \+= x"),
    "assigned by indices": (assigned_by_indices, TypeError, "only integer scalar arrays", NEW_ARRAY),
    "converted": (lambda x: np.sum(np.asarray(x, float)), ValueError, "array element with a sequence", NEW_ARRAY),
    "random choice": (
        lambda x: x[np.random.default_rng(0).choice(3, p=x / anp.sum(x))],
        ValueError,
        "array element with a sequence",
        r"plain NumPy pass mpiad\.stop_gradient",
    ),
    "sparse matrix of SciPy": (
        lambda x: anp.sum(csr_matrix(np.eye(3)).dot(x)),
        TypeError,
        "no supported conversion",
        r"mpiad\.linalg\.sparse_matmul\(A, x\)",
    ),
    "sparse matrix, by dot": (
        lambda x: anp.sum(anp.dot(csr_matrix(np.eye(3)), x)),
        TypeError,
        "scipy.sparse",
        r"mpiad\.linalg\.sparse_matmul\(A, x\)",
    ),
    "traced entries": (
        lambda x: anp.sum(csr_matrix((x, ([0, 1, 1], [0, 1, 2]))) @ np.ones(3)),
        ValueError,
        "does not support dtype object",
        r"mpiad\.segment_sum\(entries \* x\[columns\], rows, number_of_rows\)",
    ),
    "traced entries of given rows": (
        lambda x: anp.sum(csr_matrix((x, np.arange(3), np.arange(4))) @ np.ones(3)),
        TypeError,
        "no supported conversion",
        r"mpiad\.segment_sum\(entries",
    ),
    "product of a traced array and a sparse matrix": (
        lambda x: anp.sum(x @ csr_matrix(np.eye(3))),
        ValueError,
        "enough dimensions",
        r"x @ A with .* mpiad\.linalg\.sparse_matmul\(A\.T, x\.T\)\.T",
    ),
    "sum with a sparse matrix": (
        lambda x: anp.sum(csr_matrix(np.eye(3)) + anp.outer(x, x)),
        NotImplementedError,
        "nonzero scalar",
        r"write A\.toarray\(\) \+ x",
    ),
    "only a traced diagonal": (
        lambda x: anp.sum(diags(x) @ np.ones(3)),
        ValueError,
        "diagonals and offsets",
        r"mpiad\.segment_sum\(entries",
    ),
    "matrix": (lambda x: anp.sum(x * np.matrix(np.eye(3))), TypeError, "numpy.matrix", r"a = np\.asarray\(a\)"),
    "masked array": (
        lambda x: anp.sum(x * np.ma.masked_array(np.ones(3), np.eye(3)[0])),
        TypeError,
        "MaskedArray",
        r"np\.where\(a\.mask, 0\.0, a\.data\)",
    ),
    "singular matrix": (
        lambda x: anp.sum(anp.linalg.inv(0.0 * anp.outer(x, x))),
        np.linalg.LinAlgError,
        "Singular matrix",
        r"a \+ 1e-8 \* np\.eye\(n\).*np\.linalg\.pinv\(a\)",
    ),
    "keyword": (
        lambda x: anp.sum(anp.interp([0.5, 1.5], [0.0, 1.0, 2.0], fp=x)),
        TypeError,
        "Cannot cast",
        r"interp got a traced value by keyword, fp=: only positional arguments have derivatives",
    ),
    "two keywords": (
        lambda x: anp.sum(anp.linalg.solve(a=anp.outer(x, x) + np.eye(3), b=x)),
        TypeError,
        "Cannot cast",
        r"solve got a traced value by keyword, a= and b=:",
    ),
    "list": (
        lambda x: anp.sum(anp.exp([x[0], x[1]])),
        TypeError,
        "no callable exp method",
        AUTOGRAD + r".*lists.*np\.array",
    ),
    "traced diagonal": (
        lambda x: anp.sum(diags([x], [0]) @ np.ones(3)),
        TypeError,
        "non-numeric array",
        AUTOGRAD,
    ),
    "distances of SciPy": (
        lambda x: cdist(x[:, None], np.ones((2, 1)))[0, 0],
        ValueError,
        "dtype object",
        r"SciPy's cdist .* call np\.sqrt\(np\.sum\(\(x\[:, None\] - y\) \*\* 2, axis=-1\)\).*mpiad\.stop",
    ),
    "ufunc of objects": (lambda x: np.sum(np.sin(np.array(x))), TypeError, "no callable sin method", AUTOGRAD),
    "ufunc of objects of several kinds": (
        lambda x: np.sum(np.sqrt(np.where(x > 1.5, x, 1.0))),
        TypeError,
        "float which has no callable sqrt method",
        AUTOGRAD,
    ),
    "filter of SciPy": (lambda x: anp.sum(ndimage.laplace(x)), RuntimeError, r"array type dtype\('O'\)", FILTER),
    "weights of a filter": (lambda x: anp.sum(ndimage.convolve(x, np.ones(3))), RuntimeError, "array type not", FILTER),
    "filter of signals": (
        lambda x: anp.sum(signal.convolve2d(x[:, None], np.ones((2, 2)))),
        ValueError,
        "convolve2d not available",
        FILTER,
    ),
    "convolution of SciPy": (
        lambda x: anp.sum(signal.convolve(x[:, None], np.ones((2, 2)))),
        ValueError,
        "Unsupported type",
        FILTER,
    ),
    "recursive filter": (lambda x: anp.sum(signal.lfilter([1.0], [1.0, 0.5], x)), NotImplementedError, "input", AUTOGRAD),
    "median filter": (lambda x: anp.sum(signal.medfilt(x)), ValueError, "dtype=object is not supported", AUTOGRAD),
    "repeated rows": (repeated, TypeError, "Cannot cast ufunc 'multiply' output", AUTOGRAD + r".*np\.tile\(x, \(m, n\)\)"),
    "cast": (lambda x: np.linalg.det(anp.outer(x, x)), TypeError, "Cannot cast ufunc 'det'", AUTOGRAD),
    "not supported": (lambda x: np.abs(np.fft.fft(x)).sum(), TypeError, "'fft' not supported", AUTOGRAD),
    "math": (lambda x: math.sin(x[0]), TypeError, "must be real number", AUTOGRAD + r"(?!.*can't be assigned)"),
    "complex entry": (complex_entry, TypeError, "must be real number", r"Elements of traced arrays can't be assigned"),
    "float": (lambda x: float(x[0]), TypeError, r"float\(\) argument", AUTOGRAD),
    "index": (lambda x: sum(x[0] for _ in range(x[1])), TypeError, "as an integer", AUTOGRAD),
    "sent objects": (lambda x: mpiad.mpi_sum(np.array(x)), TypeError, r"mpi_sum: .*dtype\('O'\)", AUTOGRAD),
    "sent list": (
        lambda x: mpiad.mpi_sum(np.concatenate([[[x[0], 1.0]], np.ones((1, 2))])),
        TypeError,
        r"mpi_sum: .*dtype\('O'\)",
        AUTOGRAD + r".*lists.*np\.array",
    ),
    "pickled": (lambda x: COMM.allreduce(anp.sum(x)), TypeError, "can't be pickled", PRIMITIVE),
    "buffer": (received, TypeError, "expecting buffer", PRIMITIVE),
    "buffer and type": (lambda x: COMM.Bcast([x, MPI.DOUBLE]), TypeError, "bytes-like object", PRIMITIVE),
    "buffer of objects": (lambda x: COMM.Bcast(np.array(x)), KeyError, "cannot map 'O'", PRIMITIVE),
    "diagonal": (
        lambda x: np.fill_diagonal(anp.outer(x, x), 1.0),
        AttributeError,
        "no attribute 'flat'",
        r"np\.where of autograd\.numpy, for the diagonal np\.where\(np\.eye\(n\) == 1, value, x\)",
    ),
    "masked": (lambda x: np.putmask(x * 1.0, x < 2, 1.0), TypeError, "putmask", r"np\.where of autograd\.numpy"),
    "placed": (lambda x: np.place(x * 1.0, x < 2, [1.0]), TypeError, "place", r"np\.where of autograd\.numpy"),
    "copied": (lambda x: np.copyto(x * 1.0, 1.0), TypeError, "copyto", r"np\.where of autograd\.numpy"),
    "method": (lambda x: x.sort(), AttributeError, "no attribute 'sort'", r"np\.sort\(x"),
    "method of plain values": (
        lambda x: x.tolist()[0],
        AttributeError,
        "no attribute 'tolist'",
        r"stop_gradient\(x\)\.tolist",
    ),
}


# Before SciPy 1.17 these functions accept arrays of objects.
OF_OBJECTS = (
    {"convolution of SciPy", "recursive filter"} if tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 17) else set()
)


@pytest.mark.parametrize("name", WRONG)
def test_the_cure_is_named(name: str) -> None:
    loss, kind, text, cure = WRONG[name]
    if name in OF_OBJECTS:
        with pytest.warns(DeprecationWarning, match="dtype=object is not supported"):
            mpiad.testing.check_grads(loss, np.array([1.0, 2.0, 3.0]))
        return
    with pytest.raises(kind) as found:
        mpiad.value_and_grad(loss)(np.array([1.0, 2.0, 3.0]))
    # With notes, as Python shows it, and as repr does in Python 3.10: casting errors make their text themselves.
    shown = "".join(traceback.format_exception_only(type(found.value), found.value)) + repr(found.value)
    assert re.search(f"{text}.*{cure}", shown, re.DOTALL), shown
    assert loss.__code__ in [entry.frame.code.raw for entry in found.traceback]


def test_once_whatever_the_trace() -> None:
    def loss(x: Any) -> Any:
        return anp.sum(mpiad.grad(lambda y: math.exp(y[0]), comm=COMM)(x))

    x = np.ones(3)
    for derive in (mpiad.grad(loss), lambda x: mpiad.hvp(loss)(x, x), lambda x: mpiad.jvp(loss, x, x)):
        with pytest.raises(TypeError) as found:
            derive(x)
        assert str(found.value).count("autograd.scipy") == 1


def test_all_ranks_of_a_solve_are_told() -> None:
    with pytest.raises(WorkerError, match=AUTOGRAD):
        mpiad.minimize(lambda x: math.exp(x[0]), np.ones(3))


def test_errors_of_plain_values_stay_as_they_are() -> None:
    def loss(x: Any) -> Any:
        y = np.zeros(3)
        y[0] = np.ones(2)  # a mistake that has nothing to do with traces
        return anp.sum(x)

    with pytest.raises(ValueError) as plain:
        loss(np.ones(3))
    with pytest.raises(ValueError) as traced:
        mpiad.grad(loss)(np.ones(3))
    assert str(traced.value) == str(plain.value)


def test_a_deep_copy_is_differentiated() -> None:
    x = np.array([1.0, -2.0, 3.0])

    def cubes(p: Any) -> Any:
        return anp.sum(copy.deepcopy(p)["a"] ** 3)

    np.testing.assert_allclose(mpiad.grad(cubes)({"a": x})["a"], 3 * x**2, rtol=1e-14)
    np.testing.assert_allclose(mpiad.hvp(cubes)({"a": x}, {"a": x})["a"], 6 * x**2, rtol=1e-14)


@pytest.mark.interpreted  # jitted functions are refused
@pytest.mark.parametrize("conversion", ["array", "stack", "dot", "outer", "real", "imag", "isreal"])
def test_arrays_of_complex_objects_are_refused(conversion: str) -> None:
    """NumPy takes them as their own real parts."""

    def loss(t: Any) -> Any:
        entries = [anp.cos(t), 1j * anp.sin(t) + 0.3]
        psi = {
            "array": lambda: np.array(entries),
            "stack": lambda: np.stack(entries),
            "dot": lambda: np.eye(2).dot(anp.array(entries)),
            "outer": lambda: np.outer(np.ones(1), anp.array(entries))[0],
            "real": lambda: anp.real(entries),
            "imag": lambda: anp.imag([1j * x for x in entries]),
            "isreal": lambda: anp.real(anp.array(entries)) + 0 * anp.isreal(entries),
        }[conversion]()
        return anp.sum(psi.real**2)

    np.testing.assert_allclose(loss(0.7), np.cos(0.7) ** 2 + 0.09, rtol=1e-14)
    for derive in (mpiad.grad(loss), lambda t: mpiad.hvp(loss)(t, t), lambda t: mpiad.jvp(loss, t, t)):
        with pytest.raises(TypeError, match=r"Plain NumPy can't convert traced complex values: .*np\.stack, np\.array"):
            derive(0.7)


def test_an_assignment_to_an_entry_of_a_complex_array_names_concatenate() -> None:
    def loss(x: Any, dtype: type) -> Any:
        y = np.zeros(4, dtype)
        y[:2] = x
        return anp.sum(anp.abs(y) ** 2)

    for dtype, x in ((float, np.ones(2)), (complex, np.ones(2)), (complex, np.ones(2) + 1j)):
        with pytest.raises((TypeError, ValueError), match="make a new array by np.concatenate, np.stack, np.array"):
            mpiad.grad(loss)(x, dtype)


@pytest.mark.interpreted  # jitted functions are refused
def test_objects_in_place_of_a_traced_array_are_warned_of_once_per_line(caplog: pytest.LogCaptureFixture) -> None:
    a, x = np.arange(9.0).reshape(3, 3), np.array([1.0, -2.0, 3.0])

    def loss(x: Any) -> Any:
        return np.sum(a.dot(x) ** 2)

    def einsum(x: Any) -> Any:
        rows = np.einsum("ij,j->i", a, anp.outer(x, x)[1])
        return np.sum(rows) + np.zeros((3, 0)).dot(x[:0])[0] + np.array([x[0], x[1]])[0] + np.asarray(x, object)[0]

    caplog.set_level(logging.WARNING, "mpiad")
    for _ in range(2):
        np.testing.assert_allclose(mpiad.grad(loss)(x), 2 * a.T @ (a @ x), rtol=1e-14)
        np.testing.assert_allclose(mpiad.jvp(loss, x, x)[1], 2 * x @ a.T @ (a @ x), rtol=1e-14)
        expected = x[1] * a.sum(axis=0) + np.array([2.0, a.sum(axis=0) @ x, 0.0])
        np.testing.assert_allclose(mpiad.grad(einsum)(x), expected, rtol=1e-14)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(" makes")[0] for message in messages] == [
        f"{Path(__file__).name}:{fun.__code__.co_firstlineno + 1} in {fun.__name__}" for fun in (loss, einsum)
    ]
    assert all(re.search(r"np\.dot\(a, x\) instead of a\.dot\(x\), .* autograd\.numpy", message) for message in messages)
    np.testing.assert_allclose(autograd.grad(lambda x: np.sum(a.dot(x) ** 2))(x), mpiad.grad(loss)(x), rtol=1e-14)
    assert len(caplog.records) == 2  # traces of plain autograd are as without the library
