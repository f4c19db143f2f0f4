"""Programs on the root, and functions that all ranks evaluate for them, compared with closed forms."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
from mpi4py import MPI

import mpiad
from mpiad import drive
from mpiad.errors import ConvergenceError, WorkerError
from mpiad.optimize.root_driven import RootDriven
from mpiad.tasks import RankGroups

WORLD = MPI.COMM_WORLD
X, V, W = np.array([1.0, 2.0, -0.5]), np.array([0.5, -1.0, 2.0]), np.arange(1.0, 7.0)


@pytest.fixture(autouse=True)
def and_drive_again() -> Iterator[None]:
    """Drive once more after each test, which ranks that have disagreed can't."""
    yield
    found = drive(lambda f: f(2.0), lambda x: mpiad.mpi_allreduce(x**2))
    assert found == (4.0 * WORLD.size if WORLD.rank == 0 else None)


def weights(objective: str, size: int) -> np.ndarray:
    """Return the factors of the ranks' terms."""
    return {"root": np.ones(size), "sum": np.ones(size), "mean": np.full(size, 1.0 / size)}[objective] * np.arange(
        1, size + 1
    )


def number(objective: str, rank: int, comm: Any = None) -> Callable[[Any], Any]:
    """Return this rank's term of sum(weights) * sum(x^4), which the root adds if it alone has the objective."""
    if objective == "root":
        return lambda x: mpiad.mpi_allreduce((rank + 1) * anp.sum(x**4), comm=comm)
    return lambda x: (rank + 1) * anp.sum(x**4)


def array(rank: int, comm: Any = None) -> Callable[[Any], Any]:
    """Return a function with the values sum(rank + 1) * (x^3, sin x)."""
    return lambda x: mpiad.mpi_allreduce((rank + 1) * anp.concatenate([x**3, anp.sin(x)]), comm=comm)


def check_number(f: Any, c: float) -> None:
    for _ in range(2):
        np.testing.assert_allclose(f(X), c * np.sum(X**4), rtol=1e-14)
        np.testing.assert_allclose(f.gradient(X), c * 4 * X**3, rtol=1e-14)
    value, gradient = f.value_and_gradient(2.0 * X)
    np.testing.assert_allclose(value, c * 16 * np.sum(X**4), rtol=1e-14)
    np.testing.assert_allclose(gradient, c * 32 * X**3, rtol=1e-14)
    np.testing.assert_allclose(f.gradient(X), c * 4 * X**3, rtol=1e-14)  # of an earlier point
    np.testing.assert_allclose(f.hvp(X, V), c * 12 * X**2 * V, rtol=1e-14)
    np.testing.assert_allclose(f.hvp(X, V, 3.0), c * 36 * X**2 * V, rtol=1e-14)
    np.testing.assert_allclose(f.jvp(X, V), c * 4 * X**3 @ V, rtol=1e-14)
    np.testing.assert_allclose(f.vjp(X, 2.0), c * 8 * X**3, rtol=1e-14)
    np.testing.assert_allclose(f.map([X, 2.0 * X]), c * np.sum(X**4) * np.array([1.0, 16.0]), rtol=1e-14)
    assert f.evaluations == {"value": 4, "gradient": 1, "both": 3, "product": 2, "jvp": 1, "vjp": 1}
    assert all(seconds > 0.0 for seconds in f.seconds.values())


def check_array(g: Any, c: float) -> None:
    def value(x: Any) -> Any:
        return c * np.concatenate([x**3, np.sin(x)])

    slope, curvature = np.concatenate([3 * X**2, np.cos(X)]), np.concatenate([6 * X, -np.sin(X)])
    twice = np.concatenate([V, V])
    np.testing.assert_allclose(g.vjp(X, W), c * (W * slope).reshape(2, 3).sum(axis=0), rtol=1e-13)
    np.testing.assert_allclose(g.vjp(X, 2 * W), 2 * c * (W * slope).reshape(2, 3).sum(axis=0), rtol=1e-13)
    assert g.evaluations["value"] == 1
    np.testing.assert_allclose(g(X), value(X), rtol=1e-14)
    np.testing.assert_allclose(g.jvp(X, V), c * slope * twice, rtol=1e-13)
    for w in (W, W[::-1]):
        np.testing.assert_allclose(g.hvp(X, V, w), c * (w * curvature * twice).reshape(2, 3).sum(axis=0), rtol=1e-13)
    np.testing.assert_allclose(g.map(np.array([X, 2.0 * X, V])), [value(X), value(2.0 * X), value(V)], rtol=1e-14)
    assert g.evaluations == {"value": 5, "gradient": 0, "both": 0, "product": 2, "jvp": 1, "vjp": 2}


@pytest.mark.parametrize("objective", ["root", "sum", "mean"])
def test_values_and_derivatives(objective: str, rank: int, size: int) -> None:
    def program(f: Any, g: Any = None) -> str:
        c = float(np.sum(weights(objective, size)))
        check_number(f, c)
        if g is not None:
            check_array(g, c)
        return "done"

    for root in {0, size - 1}:
        functions = [number(objective, rank)] + [array(rank)] * (objective == "root")
        found = drive(program, *functions, objective=objective, root=root)
        assert found == ("done" if rank == root else None)


@pytest.mark.mpi(min_size=2)
def test_part_of_the_ranks(rank: int, size: int) -> None:
    comm = WORLD.Split(int(rank == 0), -rank)
    root = comm.size - 1
    c = comm.size * (comm.size + 1) / 2

    def program(f: Any, g: Any) -> bool:
        check_number(f, c)
        check_array(g, c)
        return True

    found = drive(program, number("root", comm.rank, comm), array(comm.rank, comm), root=root, comm=comm)
    assert found == (True if comm.rank == root else None)
    comm.Free()


def test_pytrees_and_long_points(rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        return mpiad.mpi_allreduce(x["b"] * anp.sum(x["a"] ** 2) + anp.real(x["c"]) ** 2) / size

    def program(f: Any) -> None:
        x = {"a": np.array([1.0, 2.0]), "b": 3.0, "c": 1.0 + 2.0j}
        value, gradient = f.value_and_gradient(x)
        assert value == pytest.approx(16.0)
        np.testing.assert_allclose(gradient["a"], 6.0 * x["a"])
        assert gradient["b"] == pytest.approx(5.0) and gradient["c"] == pytest.approx(2.0)

    drive(program, fun)
    x, v = np.linspace(0.0, 1.0, 1001), np.sin(np.arange(1001.0))

    def long(f: Any) -> None:
        np.testing.assert_allclose(f.gradient(x), 3 * x**2 * size, rtol=1e-14)
        np.testing.assert_allclose(f.hvp(x, v), 6 * x * v * size, rtol=1e-14)
        np.testing.assert_allclose(f.map([x, v]), size * np.array([np.sum(x**3), np.sum(v**3)]), rtol=1e-12)

    drive(long, lambda x: mpiad.mpi_allreduce(anp.sum(x**3)))


@pytest.mark.parametrize("separate", [False, True])
def test_lbfgs_takes_the_evaluations_of_minimize(separate: bool, rank: int, size: int) -> None:
    calls = [0]

    def rosenbrock(x: Any) -> Any:
        calls[0] += 1
        terms = 100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2
        return mpiad.mpi_allreduce(anp.sum(terms[rank::size]))

    start, options = np.full(10, -1.2), {"maxiter": 200, "ftol": 0.0, "gtol": 1e-8}
    expected = mpiad.minimize(rosenbrock, start, options=options)
    made, calls[0] = calls[0], 0

    def program(f: Any) -> Any:
        arguments: Any = {"fun": f, "jac": f.gradient} if separate else {"fun": f.value_and_gradient, "jac": True}
        found = scipy.optimize.minimize(**arguments, x0=start, method="L-BFGS-B", options=options)
        assert f.evaluations["value" if separate else "both"] == found.nfev
        return found

    found = drive(program, rosenbrock)
    # The first value is plain, since `f` doesn't know that a gradient will follow.
    assert calls[0] == made + separate
    if rank == 0:
        assert (found.nfev, found.nit) == (expected.nfev, expected.nit) and np.array_equal(found.x, expected.x)


def test_values_are_plain_until_a_derivative_follows(rank: int) -> None:
    traced: list[bool] = []

    def fun(x: Any) -> Any:
        traced.append(type(x) is not np.float64)
        return mpiad.mpi_allreduce(x**2)

    def program(f: Any) -> None:
        assert [f(float(k)) for k in range(12)] == [WORLD.size * k**2 for k in range(12)]
        assert f.gradient(5.0) == 10.0 * WORLD.size and f(12.0) == 144.0 * WORLD.size  # not of the last point
        assert f.gradient(12.0) == 24.0 * WORLD.size and f.evaluations["both"] == 2
        for k in (3.0, 4.0):
            assert f(k) == k**2 * WORLD.size and f.gradient(k) == 2.0 * k * WORLD.size
        assert f(1.0) == WORLD.size and f(2.0) == 4.0 * WORLD.size and f.gradient(2.0) == 4.0 * WORLD.size
        assert f.evaluations == {"value": 17, "gradient": 3, "both": 2, "product": 0, "jvp": 0, "vjp": 0}

    drive(program, fun)
    assert traced == [False] * 12 + [True] + [False] + [True] * 5


@pytest.mark.parametrize("divided", [False, True])
def test_functions_that_cannot_be_traced(divided: bool, rank: int, size: int) -> None:
    """Plain Python, SciPy's compiled code, and a function that overwrites its argument."""

    def plain(x: Any, comm: Any = WORLD) -> float:
        return float(comm.allreduce(math.gamma(float(x[0])) + scipy.special.zeta(x[1], 2.0))) / comm.size

    def quadrature(x: Any, comm: Any = WORLD) -> np.ndarray:
        assert type(x) is np.ndarray
        x *= 2.0
        return np.array([scipy.integrate.quad(lambda t, a: a * t, 0.0, 1.0, args=(a,))[0] for a in x])

    def program(f: Any, g: Any) -> None:
        x = np.array([4.0, 3.0])
        for _ in range(3):  # the same value each time, and x stays
            assert f(x) == pytest.approx(6.0 + scipy.special.zeta(3.0) - 1.0, rel=1e-14)
            np.testing.assert_allclose(g(x), [4.0, 3.0])
            assert x.tolist() == [4.0, 3.0]
        np.testing.assert_allclose(g.map([x, 2.0 * x]), [[4.0, 3.0], [8.0, 6.0]])
        found = scipy.optimize.minimize(lambda a: (f([a[0], 3.0]) - 10.0) ** 2, [4.2], method="Nelder-Mead")
        assert math.gamma(found.x[0]) + scipy.special.zeta(3.0) - 1.0 == pytest.approx(10.0, abs=1e-3)

    drive(program, plain, quadrature, groups=size if divided else None)


METHODS = {"CG": 30, "BFGS": 30, "L-BFGS-B": 30, "TNC": 12, "SLSQP": 30, "trust-constr": 30, "Newton-CG": 10}


@pytest.mark.parametrize("method", METHODS)
def test_scipys_methods_evaluate_a_point_once(method: str, size: int) -> None:
    """A gradient at the point of the last value needs no evaluation, apart from the first one."""
    calls = [0]

    def rosenbrock(x: Any) -> Any:
        calls[0] += 1
        return mpiad.mpi_allreduce(anp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)) / size

    def program(f: Any) -> int:
        points: list[tuple[str, bytes]] = []

        def noted(name: str, fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda x: (points.append((name, x.tobytes())), fun(x))[1]

        def solved(fun: Any, jac: Any) -> Any:
            options = {"maxfun" if method == "TNC" else "maxiter": METHODS[method]}
            return scipy.optimize.minimize(fun, np.array([-1.2, 1.0, 0.5]), jac=jac, method=method, options=options)

        found = solved(noted("value", f), noted("gradient", f.gradient))
        known = solved(scipy.optimize.rosen, scipy.optimize.rosen_der)
        np.testing.assert_allclose(found.x, known.x, atol=1e-4)
        values = [x for name, x in points if name == "value"]
        pairs = zip([("", b""), *points], points)
        alone = sum(later[0] == "gradient" and earlier != ("value", later[1]) for earlier, later in pairs)
        gradients = len(points) - len(values)
        assert f.evaluations["value"] == len(values) and f.evaluations["both"] == alone + 1
        assert f.evaluations["gradient"] == gradients - alone - 1
        return len(values) + alone + 1

    made = mpiad.mpi_bcast(drive(program, rosenbrock))
    assert calls[0] == made


@pytest.mark.parametrize("count", [1, 2, 4])
def test_groups_divide_the_points(count: int, rank: int, size: int) -> None:
    if size % count:
        with pytest.raises(ValueError, match="can't form"):
            drive(lambda f: None, lambda x, comm: x, groups=count)
        return
    points, evaluated, root = np.arange(7.0), list[float](), size - 1

    def fun(x: Any, comm: Any) -> Any:
        evaluated.append(float(getattr(x, "_value", x)))
        return mpiad.mpi_allreduce(x**2, comm=comm) / comm.size

    def several(x: Any, comm: Any) -> Any:
        return fun(x, comm) * np.array([1.0, 2.0])

    def program(f: Any, g: Any) -> None:
        np.testing.assert_allclose(f.map(points), points**2)
        np.testing.assert_allclose(g.map(points), np.outer(points**2, [1.0, 2.0]))
        np.testing.assert_allclose(g.map(points[:1]), [[0.0, 0.0]])
        assert f(3.0) == pytest.approx(9.0) and f.gradient(3.0) == pytest.approx(6.0)
        np.testing.assert_allclose(g.vjp(3.0, np.array([1.0, 1.0])), 18.0)

    groups = RankGroups(count)
    drive(program, fun, several, groups=groups, root=root)
    mine = points[groups.index :: count].tolist()
    assert evaluated[: len(mine)] == mine
    groups.free()


@pytest.mark.parametrize("kind", ["value", "values", "gradient", "array"])
def test_exception_on_a_rank(kind: str, rank: int, size: int) -> None:
    for failing in {0, size - 1}:
        caught: list[BaseException] = []

        def fun(x: Any, failing: int = failing) -> Any:
            if rank == failing and getattr(x, "_value", x) == 3.0:
                raise ZeroDivisionError("no way")
            return x**2 * np.ones(2) if kind == "array" else x**2

        def program(f: Any, caught: list = caught) -> str:
            calls = {"value": f, "array": f, "values": lambda x: f.map([1.0, x]), "gradient": f.gradient}
            f(2.0)
            for x in (3.0, 2.0):  # after a failure the other ranks no longer wait
                with pytest.raises(WorkerError) as found:
                    calls[kind](x)
                caught.append(found.value)
            return "caught"

        with pytest.raises(WorkerError, match="ZeroDivisionError: no way") as raised:
            drive(program, fun, objective="root" if kind == "array" else "mean", root=size - 1)
        assert raised.value.rank == failing and "test_drive.py" in raised.value.traceback
        assert len(caught) == 2 * (rank == size - 1) and all(error is raised.value for error in caught)


@pytest.mark.mpi(min_size=2)
def test_exception_in_a_group(rank: int, size: int) -> None:
    if size % 2:
        return

    def fun(x: Any, comm: Any) -> Any:
        total = mpiad.mpi_allreduce(x, comm=comm)
        if rank == size - 1 and x == 3.0:
            raise KeyError("mine")
        return total

    with pytest.raises(WorkerError, match=r"drive: rank \d raised KeyError: 'mine'") as caught:
        drive(lambda f: f.map(np.arange(6.0)), fun, groups=2)
    assert caught.value.rank == size - 1

    with pytest.raises(TypeError, match="arrays must be the same on all ranks, with objective='root'"):
        drive(lambda f: f(1.0), lambda x, comm: np.ones(2), groups=size // 2 if size > 2 else 1, objective="sum")


def test_exceptions_of_the_program(rank: int, size: int) -> None:
    root = size - 1

    def raising(error: BaseException) -> Callable[[Any], None]:
        def program(f: Any) -> None:
            f(1.0)
            raise error

        return program

    with pytest.raises(ValueError, match=r"odd \(raised on the root, rank"):
        drive(raising(ValueError("odd")), lambda x: x, root=root)
    with pytest.raises(WorkerError, match="the root, rank .*, raised EOFError: no data") as caught:
        drive(raising(EOFError("no data")), lambda x: x, root=root)
    assert caught.value.rank == root
    with pytest.raises(WorkerError, match="SystemExit: 4") as caught:
        drive(raising(SystemExit(4)), lambda x: x, root=root)
    assert caught.value.exit_code == 4


def test_interrupt_of_the_program(rank: int, size: int) -> None:
    def program(f: Any) -> None:
        f(1.0)
        raise KeyboardInterrupt

    with pytest.raises(WorkerError, match="the root, rank 0, raised KeyboardInterrupt") as caught:
        drive(program, lambda x: x)
    assert caught.value.exit_code == 130 and isinstance(caught.value.__cause__, KeyboardInterrupt) == (rank == 0)


def test_solver_that_does_not_converge_is_not_a_number(rank: int, size: int) -> None:
    def fun(x: Any) -> Any:
        if rank == size - 1 and getattr(x, "_value", x) == 3.0:
            raise ConvergenceError("no")
        return x**2

    def program(f: Any) -> None:
        assert f(2.0) == 4.0 and np.isnan(f(3.0)) and np.isnan(f.gradient(3.0)) and f.gradient(2.0) == 4.0
        assert np.isnan(f.jvp(3.0, 1.0)) and np.isnan(f.hvp(3.0, 1.0))
        assert np.array_equal(f.map([1.0, 3.0, 2.0]), [1.0, np.nan, 4.0], equal_nan=True)

    def arrays(g: Any) -> None:
        assert np.array_equal(g(2.0), [4.0, 4.0]) and np.array_equal(g(3.0), [np.nan] * 2, equal_nan=True)
        assert np.isnan(g.vjp(3.0, np.ones(2))) and g.vjp(2.0, np.ones(2)) == 8.0

    drive(program, fun, objective="mean")
    drive(arrays, lambda x: fun(x) * np.ones(2))
    with pytest.raises(WorkerError, match="ConvergenceError"):
        drive(lambda f: f(3.0), fun, objective="mean")  # the first point


@pytest.mark.mpi(min_size=2)
def test_a_solver_that_fails_in_one_group(size: int) -> None:
    def fun(x: Any, comm: Any) -> Any:
        if getattr(x, "_value", x) == 3.0:
            raise ConvergenceError("no")
        return x**2

    def program(f: Any) -> None:
        assert (f(2.0), f.gradient(2.0), f(2.0)) == (4.0, 4.0, 4.0)  # from now on, values are traced
        points = np.ones(2 * size)
        points[size - 1] = 3.0  # in the last group, which then evaluates another point
        assert np.isnan(f.map(points)).sum() == 1
        assert f.gradient(2.0) == 4.0 and f.evaluations["gradient"] == 1

    drive(program, fun, groups=size)


def test_constants_of_the_first_point() -> None:
    def program(f: Any, g: Any) -> None:
        for h in (f, g):
            assert h({"a": 1.0, "n": 2}) == 2.0 and h({"n": 2, "a": 3.0}) == 6.0
            with pytest.raises(TypeError, match=r"the first point\['n'\] is 2, but got the first point\['n'\], 3.0."):
                h({"a": 1.0, "n": 3.0})
            with pytest.raises(TypeError, match=r"the first point\['n'\] is 2, but got the first point\['m'\], 2. A point"):
                h.map([{"a": 1.0, "m": 2}])
        assert f.jvp({"a": 1.0, "n": 2}, {"a": 1.0, "n": 2}) == 2.0

    drive(program, *[lambda x: x["a"] * x["n"]] * 2)


def test_wrong_points_can_be_caught(size: int) -> None:
    def program(f: Any, g: Any) -> int:
        f(X), g(X)
        for wrong, text in (
            (lambda: f(np.zeros(2)), r"drive: expected shape \(3,\), as of the first point, but got \(2,\)"),
            (lambda: f([np.zeros(3), 1.0]), "pytree of 1 leaves like the first point, but got 2"),
            (lambda: f("a"), "x must hold real or complex numbers"),
            (lambda: f(1j * X), "expected float64, like the first point, but got complex128"),
            (lambda: f.map([X, X[:2]]), r"but got \(2,\)"),
            (lambda: f.hvp(X, X[:2]), r"but got \(2,\)"),
            (lambda: g.vjp(X, W[:2]), r"the function's values, \(6,\), but got \(2,\)"),
            (lambda: g.hvp(X, V), r"Pass a cotangent: f.hvp\(x, v, w\)"),
            (lambda: pickle.dumps(f), "can't be called in another process"),
            (lambda: copy.deepcopy(f), "can't be called in another process"),
        ):
            with pytest.raises(TypeError, match=text):
                wrong()
        if size > 1:
            with pytest.raises(ValueError, match="the program of drive is evaluated by one rank"):
                mpiad.mpi_allreduce(1.0)
        assert f(X) == np.sum(X**4) and f([1, 2, 3]) == 98.0 and f.jvp([1, 2, 3], [1, 0, 0]) == 4.0
        assert len(f.map([])) == 0
        return 3

    drive(program, lambda x: anp.sum(x**4), lambda x: anp.concatenate([x, x]))


def test_a_hessian_product_of_arrays_as_the_first_call_can_be_caught(rank: int) -> None:
    def program(f: Any, g: Any) -> Any:
        with pytest.raises(TypeError, match=r"Pass a cotangent: f.hvp\(x, v, w\)"):
            f.hvp(X, V)
        return f.hvp(X, V, np.ones(3)), g.hvp(X, V), dict(g.evaluations)

    found = drive(program, lambda x: x**3, lambda x: anp.sum(x**3))
    if rank == 0:
        np.testing.assert_allclose(found[0], 6 * X * V, rtol=1e-14)
        np.testing.assert_allclose(found[1], 6 * X * V, rtol=1e-14)
        assert found[2]["product"] == 1


def test_functions_that_return_something_else(rank: int, size: int) -> None:
    count = [0]

    def changing(x: Any) -> Any:
        count[0] += 1
        return anp.zeros(count[0]) + x

    for fun, call, text in (
        (lambda x: "a", lambda f: f(1.0), "real number"),
        (lambda x: np.array([1j, 2.0]), lambda f: f(1.0), r"real numbers .* returned ndarray of complex128, shape \(2,\)"),
        (lambda x: x * np.ones(2), lambda f: f.gradient(1.0), r"arrays of shape \(2,\). Use f.vjp"),
        (changing, lambda f: (f(1.0), f(1.0)), r"shape \(1,\), as at the first point; .* shape \(2,\)"),
    ):
        with pytest.raises(TypeError, match=text):
            drive(call, fun)
    with pytest.raises(TypeError, match="real number"):
        drive(lambda f: f(1.0), lambda x: "a", objective="mean")
    with pytest.raises(TypeError, match="arrays must be the same on all ranks, with objective='root'"):
        drive(lambda f: f(1.0), lambda x: np.ones(2 + (rank == 1)), objective="sum")


def test_empty_arrays(rank: int) -> None:
    found = drive(lambda f: (f(X), f.vjp(X, []), f.jvp(X, V), f.map([X, X])), lambda x: x[:0])
    if rank == 0:
        assert [part.shape for part in found] == [(0,), (3,), (0,), (2, 0)] and not found[1].any()


def test_traced_values_of_an_enclosing_function(size: int) -> None:
    def outer(y: Any, shape: tuple) -> Any:
        drive(lambda f: f.map([1.0]), lambda x: x * y * np.ones(shape))
        return y

    for shape in ((), (2,)):
        with pytest.raises(TypeError, match="a solve can't be differentiated"):
            mpiad.grad(lambda y, shape=shape: outer(y, shape), comm=WORLD)(2.0)


def test_calls_that_cannot_be(rank: int, size: int) -> None:
    kept: list[Any] = []

    def keep(f: Any) -> None:
        kept.append(f)

    drive(keep, lambda x: x)  # never calls it
    if rank == 0:
        for call in (kept[0], kept[0].gradient):
            with pytest.raises(RuntimeError, match="called after the end of `drive`"):
                call(1.0)

    def nested(x: Any) -> Any:
        return kept[-1](2.0) if rank == 0 else x

    with pytest.raises(WorkerError, match="was called inside an evaluation"):
        drive(lambda f: (keep(f), f(1.0)), nested)

    def forks(f: Any) -> str:
        f(1.0)
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                f(2.0)
            except RuntimeError as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.wait()
        assert b"in another process, such as those of a pool" in os.read(reading, 1000)
        return f(3.0)

    assert drive(forks, lambda x: x) == (3.0 if rank == 0 else None)


def test_calls_from_threads(rank: int, size: int) -> None:
    def program(f: Any) -> list[float]:
        found = np.zeros(8)

        def call(k: int) -> None:
            for _ in range(5):
                found[k] += f.value_and_gradient(float(k))[1]

        threads = [threading.Thread(target=call, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found.tolist()

    found = drive(program, lambda x: mpiad.mpi_allreduce(x**2) / size)
    np.testing.assert_allclose(found if rank == 0 else 10.0 * np.arange(8), 10.0 * np.arange(8))


def test_a_thread_between_the_check_and_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(f: Any) -> None:
        others = list[threading.Thread]()

        def request(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            if method in ("gradient", "vjp"):
                others.append(threading.Thread(target=lambda: f(X + 100.0)))
                others[-1].start()
                others[-1].join(0.2)  # it waits until the derivative is there
            return original(self, method, *args, **kwargs)

        original = RootDriven.request
        with monkeypatch.context() as patch:
            patch.setattr(RootDriven, "request", request)
            f(X)
            for derivative in (lambda: f.gradient(X), lambda: f.vjp(X, np.array(1.0))):
                np.testing.assert_allclose(derivative(), 2.0 * X)
                others[-1].join()

    drive(program, lambda x: anp.sum(x**2))


def test_solves_inside_the_evaluations_of_another_thread(rank: int, size: int) -> None:
    """In debug mode they have the lanes of the main threads of the other ranks, also after the first solve."""

    def fun(x: Any) -> Any:
        goal = float(getattr(x, "_value", x))
        for _ in range(2):
            found = mpiad.minimize(lambda z: mpiad.mpi_allreduce((z[0] - goal) ** 2), np.zeros(1)).x
        return mpiad.mpi_allreduce(x) / size + found[0]

    def program(f: Any) -> float:
        found = list[float]()
        thread = threading.Thread(target=lambda: found.append(f(1.0)))
        thread.start()
        thread.join()
        return found[0]

    outcome = drive(program, fun)
    assert outcome == (pytest.approx(2.0) if rank == 0 else None)


@pytest.mark.mpi(min_size=2)
def test_exception_in_another_thread(rank: int, size: int) -> None:
    def program(f: Any) -> None:
        def call() -> None:
            with pytest.raises(WorkerError):
                f(1.0)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def fun(x: Any) -> Any:
        if rank == size - 1:
            raise LookupError("elsewhere")
        return x

    with pytest.raises(WorkerError, match="elsewhere"):
        drive(program, fun)


def test_arguments(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="at least one function"):
        drive(lambda: None)
    with pytest.raises(TypeError, match="program must be callable on the root, but got int"):
        drive(3 if rank == 0 else None, lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fun must be callable"):
        drive(lambda f: None, "a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="objective must be"):
        drive(lambda f: None, lambda x: x, objective="median")
    with pytest.raises(ValueError, match="root"):
        drive(lambda f: None, lambda x: x, root=size)
    with pytest.raises(TypeError, match="number of groups must be an integer"):
        drive(lambda f: None, lambda x, comm: x, groups="two")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drive: .* real"):
        drive(lambda f: f(1.0), lambda x: 1j)
    if size > 1:
        with pytest.raises(ValueError, match="groups must divide the ranks of comm"):
            drive(lambda f: None, lambda x, comm: x, groups=RankGroups(1, MPI.COMM_SELF))
        functions = [lambda x: x] * (1 + rank % 2)
        with pytest.raises(ValueError, match="1 functions, .* 2 functions"):
            drive(lambda *f: None, *functions)


def test_progress(rank: int, capfd: pytest.CaptureFixture) -> None:
    drive(lambda f: [f(float(k)) for k in range(3)] and f.map([1.0, 2.0]), lambda x: x, progress=True)
    shown = capfd.readouterr().err
    assert ("evaluations: 5" in shown) == (rank == 0)
