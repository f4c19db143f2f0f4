"""The systems of `ensemble_choice.py`: what is solved, and how; SciPy's method where one solve is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import autograd.numpy as np
from stiff.systems import SMOG, pollu

import mpiad
from mpiad.ensemble import EnsembleProblem, ODEProblem, Rodas5P, Tsit5, remake, solve


class Case(NamedTuple):
    """A problem; `gradient`: whether its gradient by p is computed, too."""

    problem: ODEProblem | EnsembleProblem
    alg: Any
    rtol: float
    atol: float
    scipy: str = ""  # the method of `solve_ivp`
    gradient: bool = False


def lotka_volterra(u: Any, p: Any, t: Any) -> list:
    """Return the growth of prey and predators."""
    return [p[0] * u[0] - p[1] * u[0] * u[1], p[3] * u[0] * u[1] - p[2] * u[1]]


def robertson(u: Any, p: Any, t: Any) -> list:
    """Return the rates of three reactions, with constants of nine orders of magnitude."""
    first, second, third = p[0] * u[0], p[1] * u[1] ** 2, p[2] * u[1] * u[2]
    return [third - first, first - third - second, second]


def pleiades(u: Any, p: Any, t: Any) -> Any:
    """Return velocities and accelerations of seven stars in a plane."""
    x, y, masses = u[:7], u[7:14], np.arange(1.0, 8.0).reshape(7, 1, *[1] * (np.ndim(u) - 1))
    dx, dy = x[:, None] - x[None], y[:, None] - y[None]
    apart = (dx**2 + dy**2 + np.eye(7).reshape(7, 7, *[1] * (np.ndim(u) - 1))) ** 1.5
    return np.concatenate([u[14:], np.sum(masses * dx / apart, axis=0), np.sum(masses * dy / apart, axis=0)])


def van_der_pol(u: Any, p: Any, t: Any) -> list:
    """Return the rates of a stiff oscillator, whose number of steps is proportional to tspan."""
    return [u[1], p[0] * (1 - u[0] ** 2) * u[1] - u[0]]


STARS = [3, 3, -1, -3, 2, -2, 2, 3, -3, 2, 0, 0, -4, 4, 0, 0, 0, 0, 0, 1.75, -1.5, 0, 0, 0, -1.25, 1, 0, 0]


def hybrid(u: Any, p: Any, t: Any) -> list:
    """Return Lotka and Volterra's growth, with the interaction by a network."""
    hidden = np.tanh(np.dot(p["inner"], u) + p["shift"])
    met = np.dot(p["outer"], hidden)
    return [p["birth"] * u[0] + met[0], met[1] - p["death"] * u[1]]


def deep(u: Any, p: Any, t: Any) -> list:
    """Return Lotka and Volterra's growth, with the interaction by a network of two layers."""
    hidden = np.tanh(np.dot(p["middle"], np.tanh(np.dot(p["inner"], u) + p["shift"])))
    met = np.dot(p["outer"], hidden)
    return [p["birth"] * u[0] + met[0], met[1] - p["death"] * u[1]]


def network(width: int, layers: int = 1) -> dict[str, Any]:
    """Return the parameters of `hybrid`, or of `deep`."""
    rng = np.random.default_rng(0)
    shapes = {"inner": (width, 2), "shift": (width, 1), "outer": (2, width)}
    p = {name: 0.2 * rng.normal(size=shape) for name, shape in shapes.items()} | {"birth": 1.3, "death": 1.8}
    return p | ({"middle": rng.normal(size=(width, width)) / np.sqrt(width)} if layers > 1 else {})


def reactions(count: int) -> Callable:
    """Return the rates of a chain of reactions among some species."""
    rng = np.random.default_rng(count)
    first, second, third = rng.integers(0, count, (3, 2 * count))

    def f(u: Any, p: Any, t: Any) -> list:
        rates = [0 * u[0] for _ in range(count)]
        for k, (i, j, n) in enumerate(zip(first, second, third)):
            rate = p[k % 4] * u[i] * u[j]
            rates[i], rates[n] = rates[i] - rate, rates[n] + rate
        return rates

    return f


def fed(u: Any, p: Any, t: Any) -> list:
    """Return the rates of two tanks in a row, of which the first is fed by a table of 1,000 flows."""
    inflow = np.interp(t, HOURS, FLOWS)
    return [inflow - p[0] * u[0], p[0] * u[0] - p[1] * u[1]]


def many(problem: ODEProblem, count: int, by_states: bool = False) -> EnsembleProblem:
    """Return an ensemble over initial states, if p is a dict or with `by_states`, or else over parameters."""
    rng = np.random.default_rng(1)
    if by_states:
        return EnsembleProblem(problem, u0=problem.u0 * rng.uniform(0.9, 1.1, (count, len(problem.u0))))
    if isinstance(problem.p, dict):
        return EnsembleProblem(problem, u0=rng.uniform(0.5, 1.5, (count, len(problem.u0))))
    return EnsembleProblem(problem, p=problem.p * rng.uniform(0.8, 1.25, (count, len(problem.p))))


PREY = ODEProblem(lotka_volterra, [1.0, 1.0], (0.0, 10.0), [1.5, 1.0, 3.0, 1.0])
NEURAL = {width: ODEProblem(hybrid, [1.0, 1.0], (0.0, 3.0), network(width)) for width in (8, 24)}
DEEP = {width: ODEProblem(deep, [1.0, 1.0], (0.0, 3.0), network(width, 2)) for width in (24, 64)}
STIFF = ODEProblem(robertson, [1.0, 0.0, 0.0], (0.0, 1e5), [0.04, 3e7, 1e4])
OSCILLATOR = ODEProblem(van_der_pol, [2.0, 0.0], (0.0, 400.0), np.array([5.0]))
SPECIES = {n: ODEProblem(reactions(n), np.ones(n), (0.0, 2.0), [0.1, 0.2, 0.3, 0.4]) for n in (30, 60, 100)}
HOURS, FLOWS = np.linspace(0.0, 10.0, 1000), 1.0 + np.sin(np.linspace(0.0, 9.0, 1000)) ** 2
TANKS = ODEProblem(fed, [1.0, 1.0], (0.0, 10.0), [0.5, 0.8])
POLLUTED = many(ODEProblem(pollu, SMOG, (0.0, 60.0), [1.0]), 100, by_states=True)
CASES = {
    "one Lotka-Volterra solve": Case(PREY, Tsit5(), 1e-6, 1e-6, "RK45"),
    "one stiff solve": Case(STIFF, Rodas5P(), 1e-6, 1e-9, "LSODA"),
    "Pleiades, one solve": Case(ODEProblem(pleiades, STARS, (0.0, 3.0)), Tsit5(), 1e-6, 1e-6, "RK45"),
    "van der Pol": Case(OSCILLATOR, Rodas5P(), 1e-8, 1e-8),
    "van der Pol, gradient": Case(remake(OSCILLATOR, tspan=(0.0, 50.0)), Rodas5P(), 1e-8, 1e-8, gradient=True),
    "N = 999": Case(many(PREY, 999), Tsit5(), 1e-3, 1e-6),
    "N = 1,000": Case(many(PREY, 1000), Tsit5(), 1e-3, 1e-6),
    "hybrid, 12, gradient": Case(many(NEURAL[8], 12), Tsit5(), 1e-3, 1e-6, gradient=True),
    "hybrid, 200, gradient": Case(many(NEURAL[8], 200), Tsit5(), 1e-3, 1e-6, gradient=True),
    "MLP of width 24, gradient": Case(many(NEURAL[24], 1000), Tsit5(), 1e-3, 1e-6, gradient=True),
    "two layers of width 24, gradient": Case(many(DEEP[24], 1000), Tsit5(), 1e-3, 1e-6, gradient=True),
    "two layers of width 64, gradient": Case(many(DEEP[64], 1000), Tsit5(), 1e-3, 1e-6, gradient=True),
    "30 species": Case(many(SPECIES[30], 100), Tsit5(), 1e-3, 1e-6),
    "60 species": Case(many(SPECIES[60], 100), Tsit5(), 1e-3, 1e-6),
    "100 species": Case(many(SPECIES[100], 100), Tsit5(), 1e-3, 1e-6),
    "100 species, gradient": Case(many(SPECIES[100], 100, by_states=True), Tsit5(), 1e-3, 1e-6, gradient=True),
    "100 species, Rodas5P": Case(many(SPECIES[100], 100), Rodas5P(), 1e-3, 1e-6),
    "100 species, Rodas5P, gradient": Case(many(SPECIES[100], 100, by_states=True), Rodas5P(), 1e-3, 1e-6, gradient=True),
    "POLLU": Case(POLLUTED, Rodas5P(), 1e-4, 1e-8),
    "POLLU, gradient": Case(POLLUTED, Rodas5P(), 1e-4, 1e-8, gradient=True),
    "np.interp": Case(many(TANKS, 1000), Tsit5(), 1e-3, 1e-6),
}  # fmt: skip


def run(case: Case, compile: str | bool) -> tuple[Any, str]:
    """Return final states, or the gradient of the sum of their squares by p, and `execution` of the solution."""
    execution = ""

    def ends(p: Any) -> Any:
        nonlocal execution
        problem: Any = case.problem
        if case.gradient:
            problem = remake(problem if isinstance(problem, ODEProblem) else problem.problem, p=p)
            problem = problem if isinstance(case.problem, ODEProblem) else EnsembleProblem(problem, u0=case.problem.u0)
        sol = solve(problem, case.alg, rtol=case.rtol, atol=case.atol, compile=compile)
        execution = sol.execution
        return sol.u_end

    p = (case.problem if isinstance(case.problem, ODEProblem) else case.problem.problem).p if case.gradient else None
    found = mpiad.grad(lambda p: np.sum(ends(p) ** 2))(p) if case.gradient else ends(p)
    return found, execution
