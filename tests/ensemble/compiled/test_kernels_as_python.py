"""Kernels are Python functions: run as such, they make the steps of the machine code, which are those made by hand."""

from __future__ import annotations

import ctypes
import math

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.compiling import kernel_language
from mpiad.compiling.translation import has_fma_instruction
from mpiad.ensemble import BS3, RK4, EnsembleProblem, Event, ODEProblem, PIController, Rodas5P, Rosenbrock23, Tsit5, solve
from mpiad.ensemble.compiled import (
    event_kernel,
    forward_kernel,
    kernel_solver,
    kernel_texts,
    reverse_kernel,
    rosenbrock_kernel,
    step_kernel,
    tangent_kernel,
)

pytestmark = pytest.mark.serial
MODULES = {"forward": forward_kernel, "reverse": reverse_kernel, "tangent": tangent_kernel}


_fma = ctypes.CDLL(None).fma
_fma.restype, _fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3


def rounded_once(x, y, z):
    """Return x y + z as an instruction computes it, by C's function."""
    return np.float64(_fma(x, y, z)) if has_fma_instruction() else x * y + z


def called_by(functions):
    """Return the function `Kernel.call` for the texts of functions, which are Python, too."""
    names = {"np": np, "math": math, "where": kernel_language.where}
    exec(functions, names)  # noqa: S102 the language is a part of Python

    def call(name, outputs, *inputs):
        several = list | tuple | np.ndarray | kernel_language.Row
        flat = [x for one in inputs for x in (one if isinstance(one, several) else [one])]
        results = iter(names[name](*flat))
        for out in outputs:
            for c in range(len(out)):
                out[c] = next(results)

    return call


@pytest.fixture
def as_python(monkeypatch):
    """Return a context in which kernels run as Python."""

    def function(self, name, spec, wanted=()):
        code = self._kernels[name] = kernel_texts.kernel_code(name, self.traced, spec, wanted)
        module = MODULES[name]
        kernel, arguments = getattr(module, name), getattr(module, f"{name.capitalize()}Arrays")

        def run(*arrays):
            with np.errstate(all="ignore"):
                kernel(spec, called_by(code.functions), module.layout_of(spec), arguments(*arrays), False)

        return run

    def both(make):
        compiled = make()
        with monkeypatch.context() as context:
            for module in (step_kernel, event_kernel, rosenbrock_kernel, forward_kernel, reverse_kernel):
                context.setattr(module, "fma", rounded_once)
            context.setattr(kernel_solver.Solver, "function", function)
            return compiled, make()

    return both


def forced(u, p, t):
    return [p[0] * u[1] + anp.sin(3 * t), -p[1] * u[0] - p[2] * u[1] * u[2], anp.cos(t) * u[0] - u[2]]


N = 2
P = np.array([1.0, 2.0, 0.3]) * (1 + 0.1 * np.arange(N)[:, None])
U0 = np.array([1.0, 0.1, -0.2]) + 0.1 * np.arange(N)[:, None]
HALVED = Event(times=[0.3, 0.7], affect=lambda u, p, t: u * 0.5 + p[0])
TURNED = Event(lambda u, p, t: u[0] - 0.3, affect=lambda u, p, t: anp.stack([u[0], -u[1], u[2] * 0.9]))
EVENTS = {
    "none": (),
    "seen": Event(lambda u, p, t: u[0] - 0.3),
    "ending": (Event(lambda u, p, t: u[0] - 0.3, direction=-1), Event(lambda u, p, t: u[1] + 0.2, terminal=True)),
    "clock": (Event(lambda u, p, t: anp.sin(5 * t) - 0.2, terminal=True), Event(lambda u, p, t: u[1])),
    "given": HALVED,
    "acting": (TURNED, HALVED, Event(lambda u, p, t: u[1] - 0.1)),
}
ALGORITHMS = (Tsit5(), BS3(controller=PIController()), RK4(), Rosenbrock23(), Rodas5P())


def ensemble(u0, p, span=(0.0, 1.0)):
    return EnsembleProblem(ODEProblem(forced, U0[0], span, P[0]), u0=u0, p=p)


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", ALGORITHMS, ids=lambda alg: type(alg).__name__)
@pytest.mark.parametrize("name", EVENTS)
def test_the_forward_kernel(as_python, alg, name):
    options = {"dt": 0.04} if isinstance(alg, RK4) else {}

    def make():
        return solve(ensemble(U0, P), alg, events=EVENTS[name], saveat=[0.0, 0.25, 0.7, 1.0], compile=True, **options)

    compiled, python = as_python(make)
    for field in ("u", "u_end", "t_reached", "naccept", "nreject"):
        np.testing.assert_array_equal(getattr(python, field), getattr(compiled, field))
    assert list(python.retcode) == list(compiled.retcode)


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P()], ids=lambda alg: type(alg).__name__)
@pytest.mark.parametrize("name", EVENTS)
def test_the_reverse_kernel(as_python, alg, name):
    def objective(u0, p):
        sol = solve(ensemble(u0, p), alg, events=EVENTS[name], compile=True, gradient="adjoint")
        return anp.sum(sol.u_end * np.arange(1.0, 4.0)) + anp.sum(sol.t_reached)

    compiled, python = as_python(lambda: mpiad.grad(objective, (0, 1), objective="sum")(U0, P))
    for x, y in zip(python, compiled):
        np.testing.assert_array_equal(x, y)


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P()], ids=lambda alg: type(alg).__name__)
@pytest.mark.parametrize("name", EVENTS)
def test_the_tangent_kernel(as_python, alg, name):
    def results(x):
        sol = solve(
            ensemble(x[0], x[1], (0.0, x[2])),
            alg,
            events=EVENTS[name],
            saveat=[0.25, 0.7],
            compile=True,
            gradient="adjoint",
        )
        return anp.concatenate([anp.ravel(sol.u), anp.ravel(sol.u_end), anp.ravel(sol.t_reached)])

    x = U0, P, 1.0
    compiled, python = as_python(lambda: mpiad.jvp(results, x, (np.cos(U0), np.sin(P), 0.3))[1])
    np.testing.assert_array_equal(python, compiled)


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P(), Rosenbrock23()], ids=lambda alg: type(alg).__name__)
@pytest.mark.parametrize("name", ["none", "ending"])
def test_tangents_with_the_solve(as_python, alg, name):
    def results(x):
        sol = solve(ensemble(x[0], x[1]), alg, events=EVENTS[name], saveat=[0.25, 0.7], compile=True)
        return anp.concatenate([anp.ravel(sol.u), anp.ravel(sol.u_end), anp.ravel(sol.t_reached)])

    compiled, python = as_python(lambda: mpiad.jvp(results, (U0, P), (np.cos(U0), np.sin(P)))[1])
    np.testing.assert_array_equal(python, compiled)


def test_tangents(as_python):
    def objective(p):
        sol = solve(ensemble(U0, p), Tsit5(), saveat=[0.25, 1.0], compile=True, gradient="tangent")
        return anp.sum(sol.u**2)

    compiled, python = as_python(lambda: mpiad.grad(objective, objective="sum")(P))
    np.testing.assert_array_equal(python, compiled)


# ---- steps by hand


def rates(u, p, t):
    return np.array([
        p[0] * u[1] + np.sin(t * 3.0), -p[1] * u[0] - p[2] * u[1] * u[2], np.cos(t) * u[0] - u[2],
    ])  # fmt: skip


def step_by_hand(tableau, u, p, t, tn):
    """Return the state after a step of an explicit method."""
    h, k = tn - t, [rates(u, p, t)]
    for row, c in zip(tableau.a, tableau.c[1:]):
        weighted = sum(w * stage for w, stage in zip(row, k) if w)
        y = weighted * h + u
        k.append(rates(y, p, tn if c == 1 else c * h + t))
    return y


@pytest.mark.parametrize("alg", [Tsit5(), BS3(), RK4()], ids=lambda alg: type(alg).__name__)
def test_steps_are_those_by_hand(alg):
    options = {"dt": 0.04} if isinstance(alg, RK4) else {}
    sol = solve(ensemble(U0, P), alg, save_everystep=True, compile=True, **options)
    for i in range(N):
        times, states = sol.t[i][np.isfinite(sol.t[i])], sol.u[i]
        assert len(times) > 3
        for n in range(len(times) - 1):
            after = step_by_hand(alg.tableau, states[n], P[i], times[n], times[n + 1])
            np.testing.assert_array_equal(states[n + 1], after)
