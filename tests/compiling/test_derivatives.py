"""Derivatives of programs, against autograd's, differences, complex numbers, and each other."""

from __future__ import annotations

import autograd
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_right_hand_sides import FOR_AUTOGRAD, SYSTEMS

from mpiad.compiling.derivatives import PARTIALS, jvp, vjp
from mpiad.compiling.program import OPERATIONS, Builder, evaluated, simplify
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import packing_of, trace
from mpiad.ensemble.problem import ODEProblem
from mpiad.pytrees import flatten

pytestmark = pytest.mark.serial


def traced(system):
    leaves, build = flatten(ODEProblem(system.f, [0.0], (0, 1), system.p).p)
    p = Parameters(leaves, [False] * len(leaves), build)
    return trace(system.f, (system.states,), p, float), p


def autograds_jacobian(system, p, u, t):
    """Return the derivatives of f by the state, the scalars of the parameters, and time."""
    packing = packing_of(p)

    def flat(x):
        leaves = list(p.leaves)
        scalars = x[system.states : -1]
        for part in packing.parts:
            leaves[part.place] = autograd.numpy.reshape(scalars[part.first : part.scalars.stop], part.shape)
        value = system.f(x[: system.states, None], p.build(leaves), x[-1:])
        if isinstance(value, (list, tuple)):
            return autograd.numpy.concatenate([autograd.numpy.reshape(part, (1,)) for part in value])
        return autograd.numpy.reshape(value, (-1,))

    shared = np.concatenate([np.ravel(p.leaves[part.place]) for part in packing.parts])
    return autograd.jacobian(flat)(np.concatenate([u, shared, [t]])), shared


def rows_of_vjp(program, u, p, t):
    derived = vjp(program)
    d = len(program.outputs)
    return np.array([evaluated(derived, u, p, [t], seed) for seed in np.eye(d)], float)


def columns_of_jvp(program, u, p, t):
    derived = jvp(program)
    return np.array([evaluated(derived, u, p, [t], seed) for seed in np.eye(len(u) + len(p) + 1)], float).T


@pytest.mark.parametrize("name", FOR_AUTOGRAD)
def test_both_agree_with_autograd(name):
    system = SYSTEMS[name]
    program, p = traced(system)
    rng = np.random.default_rng(3)
    u, t = rng.normal(size=system.states), 0.4
    expected, scalars = autograds_jacobian(system, p, u, t)
    np.testing.assert_allclose(rows_of_vjp(program, u, scalars, t), expected, rtol=2e-13, atol=1e-13)
    np.testing.assert_allclose(columns_of_jvp(program, u, scalars, t), expected, rtol=2e-13, atol=1e-13)


def groups(states, parameters=0):
    return {"state": states, "parameter": parameters, "time": 1}


def one(operation):
    """Return the program of one operation on states; conditions come from a comparison."""
    builder = Builder()
    states = [builder.input("state", i) for i in range(OPERATIONS[operation].arity)]
    if operation == "where":
        states[0] = builder.call("less", states[1], states[2])
    return builder.program(groups(len(states)), [builder.call(operation, *states)])


ABOVE_ONE = {"arccosh"}
ROUNDING = {"floor", "ceil", "trunc", "rint", "sign"}
STEPS = {name for name, entry in OPERATIONS.items() if entry.boolean} | ROUNDING | {"stop_gradient"}


@pytest.mark.parametrize("places", [(0, 1, 2), (1, 2, 0)])
@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - STEPS))
def test_each_rule_against_differences(operation, places):
    program = one(operation)
    u = np.array([0.43, 0.71, 0.35])[list(places)][: program.groups["state"]] + (operation in ABOVE_ONE)
    if operation == "copysign":
        u[1] = -0.7
    if operation == "fmod":
        u = np.array([2.9, 0.71])
    h, expected = 1e-3, []
    for e in np.eye(len(u)) * h:
        # Differences of sixth order.
        weights = {1: 3 / 4, -1: -3 / 4, 2: -3 / 20, -2: 3 / 20, 3: 1 / 60, -3: -1 / 60}
        expected.append(sum(w * evaluated(program, u + k * e, [], [0])[0] for k, w in weights.items()) / h)
    assert operation in PARTIALS
    np.testing.assert_allclose(rows_of_vjp(program, u, [], 0.0)[0][: len(u)], expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(columns_of_jvp(program, u, [], 0.0)[0][: len(u)], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1.0])
def test_the_angle_of_huge_and_tiny_numbers(scale):
    """The squares would overflow, or vanish."""
    y, x = 3.0, -2.0
    expected = np.array([[x, -y]]) / (x**2 + y**2) / scale
    for derived in (rows_of_vjp, columns_of_jvp):
        found = derived(one("arctan2"), np.array([y, x]) * scale, np.zeros(0), 0.0)
        np.testing.assert_allclose(found[:, :2], expected, rtol=1e-14)


@pytest.mark.parametrize("operation", sorted(STEPS))
def test_steps_have_no_derivative(operation):
    builder = Builder()
    states = [builder.input("state", i) for i in range(OPERATIONS[operation].arity)]
    made = builder.call(operation, *states)
    if OPERATIONS[operation].boolean:
        made = builder.call("where", made, builder.constant(2.0), builder.constant(3.0))
    program = builder.program(groups(len(states)), [made])
    np.testing.assert_array_equal(rows_of_vjp(program, np.full(len(states), 0.3), [], 0.0), 0)


@pytest.mark.parametrize("operation, u, expected", [
    ("maximum", [0.5, 0.5], [0.5, 0.5]),
    ("minimum", [0.5, 0.5], [0.5, 0.5]),
    ("absolute", [0.0], [0.0]),
])  # fmt: skip
def test_ties_and_kinks_are_autograds(operation, u, expected):
    np.testing.assert_array_equal(rows_of_vjp(one(operation), u, [], 0.0)[0][:-1], expected)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, None), (None, 1.0)])
def test_clip_at_its_bounds_is_autograds(bounds):
    clip = autograd.numpy.clip
    u = np.array([-1.0, 0.0, 0.5, 1.0, 2.0])
    program = trace(lambda u, p, t: clip(u, *bounds), (5,), Parameters([], [], lambda leaves: None), float)
    np.testing.assert_array_equal(evaluated(program, u, [], [0.0]), np.clip(u, *bounds))
    expected = np.diag(autograd.elementwise_grad(lambda u: clip(u, *bounds))(u))
    np.testing.assert_array_equal(rows_of_vjp(program, u, [], 0.0)[:, :-1], expected)


@pytest.mark.parametrize("exponent", [0.5, 1.5, 2.5, 7.5, 2.0])
def test_powers_at_zero_are_autograds(exponent):
    u = np.array([0.0, 1e-300, 0.3, 4.0])
    program = trace(lambda u, p, t: u**exponent, (4,), Parameters([], [], lambda leaves: None), float)
    np.testing.assert_allclose(np.array(evaluated(program, u, [], [0.0])), u**exponent, rtol=1e-15, atol=0)
    with np.errstate(divide="ignore"):
        expected = autograd.elementwise_grad(lambda u: u**exponent)(u)
    along = evaluated(jvp(program, {"state": None}), u, [], [0.0], np.ones(4))
    np.testing.assert_allclose(along, expected, rtol=1e-14, atol=0)
    for i, row in enumerate(rows_of_vjp(program, u, [], 0.0)[1:, 1:-1], 1):
        np.testing.assert_allclose(row, np.where(np.arange(1, 4) == i, expected[1:], 0), rtol=1e-14, atol=0)
    at_zero = evaluated(vjp(program, {"state": None}), u, [], [0.0], np.eye(4)[0])[0]
    np.testing.assert_array_equal(at_zero, expected[0])


# ---- Programs that are drawn -----------------------------------------------------------------------------------------
# Analytic ones, so that a step along the imaginary axis gives the derivative without cancellation.
ANALYTIC = ["add", "subtract", "multiply", "divide", "negative", "sqrt", "exp", "log", "sin", "cos", "tanh", "sinh"]


@st.composite
def programs(draw):
    builder = Builder()
    values = [builder.input("state", i) for i in range(2)] + [builder.input("parameter", 0), builder.input("time")]
    values.append(builder.constant(draw(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]))))
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.integers(0, 5)) == 0:
            exponent = builder.constant(draw(st.sampled_from([-2.0, -1.0, 0.5, 1.0, 1.5, 2.0, 3.0, 2.3])))
            values.append(builder.call("power", draw(st.sampled_from(values)), exponent))
            continue
        name = draw(st.sampled_from(ANALYTIC))
        values.append(builder.call(name, *(draw(st.sampled_from(values)) for _ in range(OPERATIONS[name].arity))))
    return builder.program(groups(2, 1), [draw(st.sampled_from(values)), values[-1]])


@given(programs(), st.lists(st.floats(0.2, 2.0), min_size=4, max_size=4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_drawn_programs_against_a_complex_step(program, x):
    h = 1e-200
    expected = np.empty((2, 4))
    for i in range(4):
        z = np.array(x, complex)
        z[i] += 1j * h
        expected[:, i] = [np.imag(value) / h for value in evaluated(program, z[:2], z[2:3], z[3:])]
    primal = np.array(evaluated(program, x[:2], x[2:3], x[3:]), float)
    # Outside of where a program is defined, or where rounding is all that is left, there is nothing to compare.
    if not (np.isfinite(primal).all() and np.isfinite(expected).all() and np.abs(expected).max() < 1e6):
        return
    scale = 1 + np.abs(expected).max()
    for found in (rows_of_vjp(program, x[:2], x[2:3], x[3]), columns_of_jvp(program, x[:2], x[2:3], x[3])):
        if np.isfinite(found).all():
            np.testing.assert_allclose(found / scale, expected / scale, rtol=1e-9, atol=1e-11)


# ---- What isn't asked for --------------------------------------------------------------------------------------------
def test_inputs_that_are_not_asked_for_are_left_out():
    program, p = traced(SYSTEMS["lorenz_array"])
    u, scalars = np.array([1.0, 2.0, 3.0]), np.array(p.leaves, float)
    whole, some = vjp(program), vjp(program, {"state": None, "parameter": [2, 0]})
    seeds = [0.3, -0.7, 1.1]
    every = evaluated(whole, u, scalars, [0.0], seeds)
    assert evaluated(some, u, scalars, [0.0], seeds) == [*every[:3], every[5], every[3]]
    assert vjp(program, {"state": None}).cost < some.cost < whole.cost + 1


def test_known_seeds_are_constants():
    program, _ = traced(SYSTEMS["lorenz_array"])
    along = jvp(program, {"state": None, "parameter": [0]})
    fixed = simplify(along, {("seed", 3): 1.0})
    u, p = [1.0, 2.0, 3.0], [10.0, 28.0, 2.0]
    assert evaluated(fixed, u, p, [0.0], [0.1, 0.2, 0.3, np.nan]) == evaluated(along, u, p, [0.0], [0.1, 0.2, 0.3, 1.0])
    assert ("seed", 3) not in [instruction.value for instruction in fixed.instructions]


def test_groups_of_any_names_and_derivatives_of_derivatives():
    # f = a₀² b exp(a₁), by hand; b comes first where it is asked for first.
    builder = Builder()
    a0, a1, b = builder.input("a", 0), builder.input("a", 1), builder.input("b")
    f = builder.call("multiply", builder.call("multiply", builder.call("multiply", a0, a0), b), builder.call("exp", a1))
    program = builder.program({"a": 2, "b": 1}, [f])
    e, a, g = np.exp(0.3), [1.5, 0.3], 0.7
    gradient = vjp(program, {"b": None, "a": [0]}, seeds="g")
    assert gradient.groups == {"a": 2, "b": 1, "g": 1}
    np.testing.assert_allclose(evaluated(gradient, a, [2.0], [g]), [g * 2.25 * e, g * 2 * 1.5 * 2.0 * e], rtol=1e-15)
    # The derivative of both along b and the cotangent.
    second = jvp(gradient, {"b": None, "g": None}, seeds="along")
    expected = [0.2 * 2.25 * e, 0.5 * g * 3.0 * e + 0.2 * 6.0 * e]
    np.testing.assert_allclose(evaluated(second, a, [2.0], [g], [0.5, 0.2]), expected, rtol=1e-15)
