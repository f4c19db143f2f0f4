"""A traced f computes what f computes; what can't be traced is refused with its line."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import count

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.special
from autograd.extend import primitive
from traced_right_hand_sides import MATRIX, SYSTEMS

import mpiad
from mpiad.compiling.derivatives import vjp
from mpiad.compiling.program import Untraceable, evaluated
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import packing_of, trace
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.problem import ODEProblem
from mpiad.extend import custom_operator
from mpiad.programs import scalar_recorder
from mpiad.pytrees import flatten

pytestmark = pytest.mark.serial


def shared(p):
    leaves, build = flatten(ODEProblem(lambda u, p, t: u, [0.0], (0, 1), p).p)
    return Parameters(leaves, [False] * len(leaves), build)


def varying(p, n, rng):
    """Return parameters of which each trajectory has its own, near p."""
    same = shared(p)
    leaves = [np.asarray(leaf)[..., None] * (1 + 0.2 * rng.random(n)) for leaf in same.leaves]
    return Parameters(leaves, [True] * len(leaves), same.build)


def values(program, p, u, t):
    own, common = packing_of(p).split(p.leaves, u.shape[1], u.dtype)
    rows = dict(zip(packing_of(p).varying, own)) | dict(zip(packing_of(p).shared, common))
    made = evaluated(program, u, [rows[j] for j in range(len(rows))], [t])
    return np.stack(np.broadcast_arrays(*made, u[0])[:-1])


# The f of two systems takes numbers that all trajectories share.
CASES = [(name, own) for name in sorted(SYSTEMS) for own in (False, True) if not (own and name in ("counted", "network"))]


@pytest.mark.parametrize("name, own", CASES)
def test_the_program_computes_what_f_does(name, own):
    rng = np.random.default_rng(len(name))
    system, n = SYSTEMS[name], 6
    p = varying(system.p, n, rng) if own else shared(system.p)
    u, t = rng.normal(size=(system.states, n)), rng.random(n)
    program = trace(system.f, (system.states,), p, float)
    expected = np.empty_like(u)
    derivative_of(system.f, (system.states,)).write(expected, u, p.columns(np.arange(n)), t)
    np.testing.assert_allclose(values(program, p, u, t), expected, rtol=1e-14, atol=1e-14)


def test_a_state_that_is_one_number():
    program = trace(lambda u, p, t: p * anp.sin(u) + t, (), shared(2.0), float)
    assert evaluated(program, [0.5], [2.0], [0.25]) == [2 * np.sin(0.5) + 0.25]


def test_derivatives_of_stopped_values_are_zero():
    def f(u, p, t):
        z, parts = (
            mpiad.stop_gradient(u[0] + 1j * u[1]),
            mpiad.stop_gradient({"above": u > 0.3, "u": anp.array([u[0], u[1]])}),
        )
        return np.stack([u[0] * z.real * z.imag, np.where(parts["above"], parts["u"], p * u)[1]])

    program, u = trace(f, (2,), shared(2.0), float), [0.5, 0.25]
    assert evaluated(program, u, [2.0], [0.0]) == [0.5 * 0.5 * 0.25, 0.5]
    gradient = vjp(program, {"state": None})
    assert evaluated(gradient, u, [2.0], [0.0], [1.0, 0.0]) == [0.5 * 0.25, 0.0]
    assert evaluated(gradient, u, [2.0], [0.0], [0.0, 1.0]) == [0.0, 2.0]


def test_a_state_that_is_a_matrix():
    def f(u, p, t):
        return MATRIX @ u * p[0] - anp.trace(u) * u.T + t

    p = Parameters([np.array([[0.4, 0.7]])], [True], lambda leaves: leaves[0])
    u = np.arange(9.0).reshape(3, 3) / 7
    program = trace(f, (3, 3), p, float)
    made = np.reshape(evaluated(program, u.ravel(), [0.7], [0.3]), (3, 3))
    np.testing.assert_allclose(made, f(u, np.array([0.7]), 0.3), rtol=1e-14)


def test_one_text_makes_one_program_and_another_constant_another():
    def scaled(factor):
        return lambda u, p, t: [factor * u[0]]

    made = [trace(scaled(c), (1,), shared(None), float) for c in (2.0, 2.0, 3.0)]
    assert made[0] == made[1] != made[2] and hash(made[0]) == hash(made[1])


def test_what_is_computed_twice_is_computed_once():
    program = trace(lambda u, p, t: [anp.sin(u[0] * u[1]), 2.0 * anp.sin(u[0] * u[1])], (2,), shared(None), float)
    assert program.cost == 3


def test_nothing_is_left_that_is_not_needed():
    def f(u, p, t):
        anp.exp(u[0])  # is thrown away
        return [u[0] * p[1], -u[1]]

    program = trace(f, (2,), shared(np.ones(3)), float)
    assert sorted(instruction.operation for instruction in program.instructions) == sorted(
        ["input", "input", "input", "multiply", "negative"]
    )
    assert program.groups["parameter"] == 3


def line_of(f, offset):
    return f"test_trace.py:{f.__code__.co_firstlineno + offset}"


def branches(u, p, t):
    x = u[0] * 2
    if x > 1:
        return [x]
    return [-x]


def calls_scipy(u, p, t):
    return [scipy.special.jv(0.5, u[0])]


def of_math(u, p, t):
    return [math.sin(u[0])]


def makes_a_number(u, p, t):
    y = u[0] + 1
    return [float(y)]


def fills_an_array(u, p, t):
    du = np.zeros(u.shape)
    du[0] = u[0]
    return du


def within_a_function(u, p, t):
    return [half_of(u[0])]


def half_of(x):
    while x < 10:
        x = 2 * x
    return x


def looks_up(u, p, t):
    return [np.array([1.0, 2.0])[int(p)] * u[0]]


def masks(u, p, t):
    return [u[0][u[0] > 0]]


def compares_complex_numbers(u, p, t):
    z = u[0] * 1j
    return [anp.where(z > 0, 1.0, 0.0)]


def complex_arcsine(u, p, t):
    return [anp.real(anp.arcsin(1j * u[0]))]


def returns_complex_numbers(u, p, t):
    return [1j * u[0]]


def drops_the_imaginary_part(u, p, t):
    return [(1j * u[0]).astype(float)]


def interpolates(u, p, t):
    return np.interp(u[0], [0.0, 1.0], np.append(u[0], 1.0))


def compares_an_array(u, p, t):
    made = anp.array([u[0]])
    return np.where(made > 0, made, 0.0)


def swallows(u, p, t):
    try:
        return [float(u[0])]
    except TypeError:
        return [u[0]]


def writes_at_a_mask(u, p, t):
    du = np.zeros_like(u)
    du[u > 0] = 1.0
    return du


def communicates(u, p, t):
    return mpiad.mpi_allreduce(u)


doubled = custom_operator(lambda x: 2.0 * x)
copied = primitive(np.copy)


def calls_an_operator(u, p, t):
    return doubled(u)


def calls_a_primitive(u, p, t):
    return copied(u)


@pytest.mark.parametrize("f, offset, reason", [
    (branches, 2, "np.where"),
    (calls_scipy, 1, "jv"),
    (of_math, 1, "math.sin"),
    (makes_a_number, 2, "float"),
    (fills_an_array, 2, "zeros_like"),
    (within_a_function, 5, "control flow depends on a traced value"),
    (looks_up, 1, "int"),
    (masks, 1, "np.where"),
    (compares_complex_numbers, 2, "greater of complex numbers"),
    (complex_arcsine, 1, "arcsin of complex numbers"),
    (returns_complex_numbers, 0, "returned a complex number"),
    (drops_the_imaginary_part, 1, "float64 of traced values that are complex"),
    (interpolates, 1, "computed values in the table"),
    (compares_an_array, 2, "np.concatenate"),
    (swallows, 0, "float"),
    (writes_at_a_mask, 2, "traced values as an index: write np.where"),
    (communicates, 1, "it calls mpi_allreduce, which communicates"),
    (calls_an_operator, 1, "it calls the operator <lambda>, whose derivative rules can't be compiled"),
    (calls_a_primitive, 1, "it calls the autograd primitive copy, whose derivative rules can't be compiled"),
    (lambda u, p, t: np.std(u), 0, "numpy.std, which isn't among the functions"),
    (lambda u, p, t: np.where(u > 0)[0], 0, "give np.where three arguments"),
    (lambda u, p, t: np.sum(u, axis=0, initial=True), 0, "numpy.sum, whose rule got an unexpected keyword"),
    (lambda u, p, t: np.max(u[1:], axis=0), 0, "zero-size array to reduction operation maximum"),
    (lambda u, p, t: np.clip(u, -1.0, 1.0, out=np.zeros(1)), 0, "numpy.clip, which writes into an array that it is given"),
    (lambda u, p, t: np.cumsum(u, axis=0, out=np.zeros(1)), 0, "numpy.cumsum, which writes into an array that it is given"),
    (lambda u, p, t: np.sin(u, out=np.zeros(1)), 0, "writes traced values into an array of numbers"),
    (lambda u, p, t: np.sin(u, dtype=float), 0, "numpy.sin, whose rule got an unexpected keyword argument 'dtype'"),
    (lambda u, p, t: np.round(u, 2), 0, "numpy.round with decimals=2"),
    (lambda u, p, t: np.linalg.norm(u, 1, axis=0), 0, "numpy.linalg.norm with ord=1"),
    (lambda u, p, t: np.linalg.norm(u[None], 2, axis=(0, 1)), 0, "numpy.linalg.norm with ord=2"),
    (lambda u, p, t: u * "one", 0, "ufunc 'multiply' did not contain a loop"),
    (lambda u, p, t: u * np.array([Fraction(1, 3)]), 0, "it computes with Fraction Fraction(1, 3), which isn't a number"),
    (lambda u, p, t: u.view(np.int64), 0, "views traced values as <class 'numpy.int64'>"),
])  # fmt: skip
def test_what_cannot_be_traced_is_refused_with_its_line(f, offset, reason):
    with pytest.raises(Untraceable) as caught:
        trace(f, (1,), shared(1.0), float)
    assert reason in caught.value.reason
    assert caught.value.place.endswith(line_of(f, offset))


def test_random_numbers_are_refused():
    numbers = count()
    with pytest.raises(Untraceable, match="called again"):
        trace(lambda u, p, t: [u[0] * next(numbers)], (1,), shared(None), float)


def test_too_large_a_program_is_refused(monkeypatch):
    monkeypatch.setattr(scalar_recorder, "_MAX_OPERATIONS", 300)

    def f(u, p, t):
        for i in range(200):
            u = u * p + i
        return u

    with pytest.raises(Untraceable, match="more than 300 operations"):
        trace(f, (1,), shared(1.0), float)
