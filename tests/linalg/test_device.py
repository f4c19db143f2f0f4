"""Linear and nonlinear systems on devices: what they give on the host, and a few numbers copied in each iteration."""

from __future__ import annotations

import importlib
import os

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse.linalg
from device_double import DeviceArray, on_device, on_host, transfers

import mpiad
from mpiad import Domain
from mpiad.errors import ConvergenceError
from mpiad.linalg import compiled_iteration, krylov, newton, solve, system

_RANK, _SIZE = mpiad.mpi_rank(), mpiad.mpi_size()
_N = 13


def _problem(put, dtype=float, convection=0.0, lead=()):
    """A chain of cells over all ranks: a diffusion, with a convection where it isn't to be symmetric."""
    domain = Domain((_N * _SIZE,), halo=1)
    rng = np.random.default_rng(_RANK)
    kappa, b = 1 + rng.random(domain.local_shape), rng.normal(size=(*lead, *domain.local_shape))

    def matvec(u, kappa):
        around = domain.exchange(u)
        left, right = around[..., :-2], around[..., 2:]
        return (2.0 + kappa) * u - (1.0 + convection) * left - (1.0 - convection) * right

    return matvec, put(b.astype(dtype)), put(kappa.astype(np.zeros(0, dtype).real.dtype))


def _loss(put, method, **settings):
    matvec, b, kappa = _problem(put, settings.pop("dtype", float), 0.0 if method == "cg" else 0.3, settings.pop("lead", ()))

    def loss(b, kappa):
        u = solve(matvec, b, kappa, method=method, rtol=1e-11, **settings)
        return anp.sum(anp.abs(u) ** 2)

    return loss, b, kappa


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
@pytest.mark.parametrize("settings", [{}, {"lead": (3,), "batch": 1}, {"dtype": complex}, {"restart": 4}])
def test_solutions_and_derivatives_are_those_of_the_host(method, settings):
    loss, *host = _loss(np.asarray, method, **settings)
    value, gradient = mpiad.value_and_grad(loss, (0, 1), objective="sum")(*host)
    loss, *there = _loss(on_device, method, **settings)
    found, of_device = mpiad.value_and_grad(loss, (0, 1), objective="sum")(*there)
    np.testing.assert_allclose(found, value, rtol=1e-8)
    for mine, known in zip(of_device, gradient):
        assert type(mine) is DeviceArray and mine.dtype == known.dtype
        np.testing.assert_allclose(on_host(mine), known, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_tangents_preconditioners_and_starts(method):
    def moved(put, along):
        matvec, b, kappa = _problem(put, convection=0.0 if method == "cg" else 0.3)
        diagonal = 2.0 + kappa
        x0 = b / diagonal

        def solution(kappa):
            return solve(
                matvec, b, kappa, method=method, rtol=1e-11, x0=x0, preconditioner=lambda r, kappa: r / (2.0 + kappa)
            )

        return mpiad.jvp(solution, kappa, put(along))

    along = np.cos(np.arange(1.0 * _N))
    for found, known in zip(moved(on_device, along), moved(np.asarray, along)):
        np.testing.assert_allclose(on_host(found), known, rtol=1e-7, atol=1e-10)


def test_single_precision_and_sizes_beyond_its_squares():
    matvec, b, kappa = _problem(on_device, np.float32)
    for size in (1.0, 1e-25, 1e25):
        u = solve(matvec, b * np.float32(size), kappa, rtol=1e-5)
        assert u.dtype == np.float32
        gap = on_host(matvec(u, kappa)).astype(float) - on_host(b).astype(float) * size
        assert np.linalg.norm(gap) <= 1e-4 * np.linalg.norm(on_host(b).astype(float) * size) + 1e-7 * size


@pytest.mark.serial
def test_an_iteration_copies_a_few_numbers(monkeypatch):
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 10**9)  # interpreted, also beside kernels for the stand-in
    rng = np.random.default_rng(0)
    matrix = on_device(np.diag(1 + 10 * rng.random(40)))
    b, norms = on_device(rng.normal(size=40)), []
    transfers.reset()
    solve(lambda u, a: a @ u, b, matrix, rtol=1e-10, callback=norms.append)
    assert len(norms) > 10
    assert transfers.h2d == 0 and transfers.d2h <= 2 * len(norms) + 6
    assert transfers.d2h_bytes <= 24 * transfers.d2h


def test_roots():
    def root(put, kappa):
        domain = Domain((_N * _SIZE,), halo=1)

        def residual(u, kappa):
            around = domain.exchange(u)
            return 2.5 * u - around[:-2] - around[2:] + kappa * u**3 - 1.0

        return anp.sum(newton(residual, put(np.zeros(_N)), kappa, rtol=1e-12, method="gmres") ** 2)

    kappa = 0.5 + np.random.default_rng(_RANK).random(_N)
    known = mpiad.value_and_grad(lambda k: root(np.asarray, k), objective="sum")(kappa)
    found = mpiad.value_and_grad(lambda k: root(on_device, k), objective="sum")(on_device(kappa))
    np.testing.assert_allclose(found[0], known[0], rtol=1e-9)
    np.testing.assert_allclose(on_host(found[1]), known[1], rtol=1e-6)


def test_arrays_in_two_places_are_refused_by_name():
    matvec, b, kappa = _problem(on_device)
    with pytest.raises(TypeError, match="matvec must return an array on the device of b, but returned ndarray"):
        solve(lambda u: on_host(u), b)
    with pytest.raises(TypeError, match="return an array on the host, as b is, but returned .* on device 0"):
        solve(lambda u: on_device(u), on_host(b))
    with pytest.raises(TypeError, match="x0 and b must be on one device"):
        solve(matvec, b, kappa, x0=on_host(b))


# Iterations that run ahead of the host.


cycles = []  # of all solves in a test; None if the host looks after each iteration
AHEAD = pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])


@pytest.fixture(params=[1, 3, 32])
def looks(request, monkeypatch):
    """The number of iterations between two looks of the host, in solves whose iterations are compiled from the first on."""
    if os.environ.get("DEVICE_ARRAYS") != "cupy" and importlib.import_module("device_on_cpu").COMPILER is None:
        pytest.skip("there is no compiler of C++")
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 0)
    monkeypatch.setattr(compiled_iteration, "_known", [])
    monkeypatch.setattr(system.System, "until_look", lambda self: request.param)
    cycles.clear()
    original = system.System.agreed_cycle
    monkeypatch.setattr(system.System, "agreed_cycle", lambda *args: cycles.append(original(*args)) or cycles[-1])
    return request.param


def _solved(put, looks, rows=6, columns=5, lead=(), dtype=float, **settings):
    """Return the solution on the host, and the norms of all residuals, of a diffusion on the blocks of all ranks."""
    domain, convection = Domain((rows * _SIZE, columns), halo=1), 0.0 if settings.get("method", "cg") == "cg" else 0.3
    rng, norms = np.random.default_rng(_RANK), []
    kappa, b = 0.1 + rng.random(domain.local_shape), rng.normal(size=(*lead, *domain.local_shape))
    b[1:2] *= 0.0 if lead else 1.0
    if np.dtype(dtype).kind == "c":
        kappa, b = kappa + 1j * rng.normal(size=kappa.shape), b * (1 + 0.3j) + 1j * np.roll(b, 1, -1)

    def matvec(u, kappa):
        p = domain.exchange(u)
        beside = (1 + convection) * p[..., 2:, 1:-1] + (1 - convection) * p[..., :-2, 1:-1]
        return (4.0 + kappa) * u - beside - p[..., 1:-1, 2:] - p[..., 1:-1, :-2]

    given = put(b.astype(dtype)), put(kappa.astype(dtype))
    u = solve(matvec, *given, **{"rtol": 1e-10, "callback": norms.append, "batch": len(lead), **settings})
    assert type(u) is type(given[0]) and u.dtype == dtype
    return on_host(u), norms


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lead": (3,)},
        {"dtype": np.float32, "rtol": 1e-4},
        {"preconditioner": lambda r, kappa: r / (4 + kappa)},
        {"restart": 5},
    ],
)
@AHEAD
@pytest.mark.unguarded
def test_solutions_do_not_depend_on_when_the_host_looks(looks, monkeypatch, method, settings):
    settings = {**settings, "method": method}
    u, norms = _solved(on_device, looks, **settings)
    assert cycles and None not in cycles
    known, of_host = _solved(np.asarray, looks, **settings)
    rtol = 1e-3 if settings.get("dtype") in (np.float32, np.complex64) else 1e-8
    np.testing.assert_allclose(u, known, rtol=rtol, atol=rtol)
    assert len(norms) == len(of_host)
    np.testing.assert_allclose(norms[:10], of_host[:10], rtol=rtol)
    monkeypatch.setattr(system.System, "until_look", lambda self: 1 + self.iterations % 5)
    again, same = _solved(on_device, looks, **settings)
    np.testing.assert_array_equal(again, u)
    assert same == norms


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lead": (3,)},
        {"dtype": np.complex64, "rtol": 1e-4},
        {"preconditioner": lambda r, kappa: r / (4 + kappa), "side": "left", "restart": 5},
    ],
)
@pytest.mark.unguarded
def test_complex_spaces_do_not_depend_on_when_the_host_looks(looks, monkeypatch, settings):
    test_solutions_do_not_depend_on_when_the_host_looks(looks, monkeypatch, "gmres", {"dtype": complex, **settings})


@pytest.mark.serial
@pytest.mark.unguarded
def test_complex_iterations_are_those_of_scipy(looks):
    """SciPy's GMRES, of the matrix of the operator: the same residuals, and the same number of iterations."""
    rng, norms, known = np.random.default_rng(2), [], []
    a, b = rng.normal(size=(2, 20, 20)), rng.normal(size=(2, 20))
    matrix, right = np.eye(20) * (3 + 4j) + 0.5 * (a[0] + 1j * a[1]), b[0] + 1j * b[1]
    u = solve(lambda u, m: m @ u, on_device(right), on_device(matrix), method="gmres", rtol=1e-9, callback=norms.append)
    assert cycles and None not in cycles
    x, _ = scipy.sparse.linalg.gmres(
        matrix, right, rtol=1e-9, restart=30, maxiter=30, callback=known.append, callback_type="pr_norm"
    )
    np.testing.assert_allclose(on_host(u), x, rtol=1e-7)
    assert len(norms) == len(known)
    np.testing.assert_allclose(norms, np.array(known) * np.linalg.norm(right), rtol=1e-8, atol=1e-12)


@pytest.mark.serial
def test_iterations_are_those_of_scipy(looks):
    """SciPy's conjugate gradients: the same residuals, and the same number of iterations."""
    u, norms = _solved(on_device, looks, 9, 8)
    rng = np.random.default_rng(0)
    kappa, b = 0.1 + rng.random((9, 8)), rng.normal(size=(9, 8))
    line = lambda n: np.eye(n, k=1) + np.eye(n, k=-1)  # noqa: E731
    matrix = np.diag(4 + kappa.ravel()) - np.kron(line(9), np.eye(8)) - np.kron(np.eye(9), line(8))
    known = []
    x, _ = scipy.sparse.linalg.cg(
        matrix, b.ravel(), rtol=1e-10, callback=lambda x: known.append(np.linalg.norm(b.ravel() - matrix @ x))
    )
    np.testing.assert_allclose(u.ravel(), x, rtol=1e-8)
    assert len(norms) == len(known)
    np.testing.assert_allclose(norms[:20], known[:20], rtol=1e-6)


@AHEAD
@pytest.mark.unguarded
def test_between_looks_nothing_is_copied_but_messages(looks, monkeypatch, method):
    copies = []
    kind, name = (krylov.DeviceArnoldi, "advance") if method == "gmres" else (system.Iterations, "_run_ahead")
    original = getattr(kind, name)

    def counted(*args):
        before = transfers.h2d, transfers.d2h
        made = [*(original(*args) or ())]
        copies.append((transfers.h2d - before[0], transfers.d2h - before[1]))
        return made

    monkeypatch.setattr(kind, name, counted)
    norms = _solved(on_device, looks, method=method, restart=500)[1]
    assert len(copies) == -(-(len(norms) + (method == "cg")) // looks)
    # Two sums and two products in an iteration of BiCGStab, and one in the others. Each product has an exchange.
    neighbors = (_RANK > 0) + (_RANK < _SIZE - 1)
    in_iteration = (neighbors + (_SIZE > 1)) * (1 + (method == "bicgstab"))
    for k, (to_device, to_host) in enumerate(copies):
        # A Krylov space has as many dimensions as there are unknowns.
        messages = in_iteration * (min(looks, 30 * _SIZE - k * looks) if method == "gmres" else looks)
        assert to_host == messages + 1
        # The addresses of arrays are copied before the first uses of both replays.
        assert to_device == messages or k * looks < 2 and to_device <= messages + 10


@pytest.mark.serial
@pytest.mark.parametrize("factor", [1.0, np.exp(0.7j)])
@pytest.mark.unguarded
def test_spaces_in_which_digits_cancel(looks, factor):
    """Steps that the host takes between those of the device, and a space that can't grow; dense solves."""
    rng = np.random.default_rng(1)
    q, _ = np.linalg.qr(rng.standard_normal((30, 30)))
    b = rng.standard_normal((2, 30))
    b[1] = np.where(np.arange(30) < 20, 1.0, 2.0)
    blocks = np.stack([q @ np.diag(np.logspace(0, 7, 30)) @ q.T, np.diag(np.where(np.arange(30) < 20, 2.0, 3.0))])
    b, blocks, norms = b * factor, blocks * factor, []
    for put in (on_device, np.asarray):
        of_solve = []
        x = on_host(
            solve(
                lambda u, a: (a @ u[:, :, None])[:, :, 0], put(b), put(blocks), batch=1, method="gmres", rtol=1e-9,
                callback=of_solve.append,
            )
        )  # fmt: skip
        norms.append(of_solve)
        gap = np.linalg.norm(np.einsum("kij,kj->ki", blocks, x) - b, axis=1)
        assert np.all(gap <= 1e-8 * np.linalg.norm(b, axis=1))
    assert len(norms[0]) == len(norms[1]) > 20 and cycles and None not in cycles
    np.testing.assert_allclose(norms[0][:20], norms[1][:20], rtol=1e-4)


@AHEAD
@pytest.mark.parametrize("case", ["zero", "solved", "one step"])
def test_nothing_to_do(looks, method, case):
    b = {"zero": np.zeros(4), "solved": np.arange(1.0, 5.0), "one step": np.arange(1.0, 5.0)}[case]
    norms = []
    x0 = on_device(b / 2) if case == "solved" else None
    u = solve(lambda u: 2.0 * u, on_device(b), method=method, x0=x0, callback=norms.append)
    np.testing.assert_allclose(on_host(u), b / 2, rtol=1e-15)
    assert len(norms) == (case == "one step")


@pytest.mark.parametrize("maxiter", [1, 4, 6, 7])
@AHEAD
def test_failures_are_those_of_the_host(looks, method, maxiter):
    """The number of iterations is exceeded between two looks."""
    errors = []
    for put in (on_device, np.asarray):
        with pytest.raises(ConvergenceError, match=f"within maxiter={maxiter} iterations") as raised:
            _solved(put, looks, method=method, maxiter=maxiter)
        errors.append(raised.value)
    assert len(errors[0].history) == len(errors[1].history) == maxiter + 1
    np.testing.assert_allclose(errors[0].history, errors[1].history, rtol=1e-10)


@pytest.mark.serial
@pytest.mark.unguarded
def test_operators_that_a_method_cannot_solve(looks):
    """Indefinite, singular and unsymmetric operators, a breakdown, NaN and overflow: the errors and results of the host."""
    d = np.linspace(-1.0, 3.0, 8)
    skew = np.kron(np.eye(4), np.array([[0.0, 1.0], [-1.0, 0.0]]))
    zero = np.diag(np.arange(8.0))
    products = {
        "singular in gmres": (lambda u, a: a @ u, zero, "gmres"),
        "indefinite": (lambda u, a: a * u, d, "cg"), "singular": (lambda u, a: a @ u, zero, "cg"),
        "skew": (lambda u, a: a @ u, skew, "bicgstab"), "unsymmetric": (lambda u, a: u + 3 * (a @ u), skew + zero, "cg"),
        "nan": (lambda u, a: anp.sqrt(a) * u, d, "bicgstab"),
        "nan in gmres": (lambda u, a: anp.sqrt(a) * u, d, "gmres"),
        "huge": (lambda u, a: (a * 1e200) * (u * 1e200), d, "bicgstab"),
    }  # fmt: skip
    for name, (matvec, a, method) in products.items():
        outcomes = []
        for put in (on_device, np.asarray):
            try:
                with np.errstate(all="ignore"):
                    outcomes.append(on_host(solve(matvec, put(np.ones(8)), put(a), method=method)).round(6).tolist())
            except Exception as error:  # noqa: BLE001
                outcomes.append(str(error).partition("After")[0])  # then it states numbers that depend on rounding
        assert outcomes[0] == outcomes[1], name
    assert cycles and None not in cycles


@pytest.mark.parametrize("kind", ["host", "interpreted"])
@AHEAD
def test_ranks_without_programs(looks, method, kind):
    """The last rank has its arrays on the host, or its operator can't be compiled."""
    is_last = _RANK == _SIZE - 1
    read = iter(()) if is_last and kind == "interpreted" else ()
    put = np.asarray if is_last and kind == "host" else on_device
    matvec, b, kappa = _problem(put)
    u = solve(lambda u, kappa: matvec(u, kappa) + len([*read]), b, kappa, method=method, rtol=1e-11)
    matvec, b, kappa = _problem(np.asarray)
    np.testing.assert_allclose(on_host(u), solve(matvec, b, kappa, method=method, rtol=1e-11), rtol=1e-8)
    assert cycles == [] or None in cycles
