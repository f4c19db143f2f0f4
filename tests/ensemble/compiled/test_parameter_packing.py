"""Parameters as rows of numbers, and back."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.ensemble import RK4, EnsembleProblem, ODEProblem, Rodas5P, solve
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import packing_of
from mpiad.pytrees import flatten

pytestmark = pytest.mark.serial


def test_rows_go_there_and_back():
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": (3, 2.5, "text"), "c": np.arange(8.0).reshape(2, 4)}
    leaves, build = flatten(tree)
    p = Parameters(leaves, [False, False, False, False, True], build)
    packing = packing_of(p)
    assert [part.place for part in packing.parts] == [0, 2, 4] and packing.size == 9
    assert packing.shared == tuple(range(7)) and packing.varying == (7, 8)
    own, common = packing.split(leaves, 4, np.float32)
    np.testing.assert_array_equal(common, [0, 1, 2, 3, 4, 5, 2.5])
    np.testing.assert_array_equal(own, tree["c"])
    assert own.dtype == common.dtype == np.float32
    back = packing.joined(2 * own, 3 * common, 4)
    np.testing.assert_array_equal(back[0], 3 * tree["a"])
    np.testing.assert_array_equal(back[4], 2 * tree["c"])
    assert back[2] == 7.5 and sorted(back) == [0, 2, 4]


def test_complex_numbers_are_two_scalars_each():
    own = np.arange(8.0).reshape(2, 4) * (1 - 2j)
    common = np.array([1 + 2j, 3 + 4j], np.complex64)
    packing = packing_of(Parameters([own, common, 7.0], [True, False, False], tuple))
    assert packing.varying == (0, 1, 2, 3) and packing.shared == (4, 5, 6, 7, 8)
    rows, scalars = packing.split([own, common, 7.0], 4, float)
    np.testing.assert_array_equal(rows, [own[0].real, own[0].imag, own[1].real, own[1].imag])
    np.testing.assert_array_equal(scalars, [1, 2, 3, 4, 7])
    back = packing.joined(rows, scalars, 4)
    np.testing.assert_array_equal(back[0], own)
    np.testing.assert_array_equal(back[1], common)


def test_no_parameters_at_all():
    packing = packing_of(Parameters([None], [False], lambda leaves: leaves[0]))
    own, common = packing.split([None], 5, float)
    assert packing.size == 0 and own.shape == (0, 5) and common.shape == (0,)
    assert packing.joined(own, common, 5) == {}


def test_integers_that_differ_between_trajectories_are_parameters():
    packing = packing_of(Parameters([np.arange(4), np.arange(4)], [True, False], tuple))
    assert packing.varying == (0,) and packing.shared == ()


SWITCHES = np.zeros((7, 2), bool)
SWITCHES[:, 0] = SWITCHES[6] = True  # both switches of the last trajectory only, which no comparison with f sees
WAYS = [{}, {"compile": False}, {"compile": False, "gradient": "tangent"}, {"compile": True}, {"alg": Rodas5P()}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_rows_of_booleans_are_added_as_booleans(way):
    """True + True is True in NumPy: u' = k u for all trajectories."""
    problem = ODEProblem(lambda u, p, t: [(p["on"][0] + p["on"][1]) * p["k"] * u[0]], [1.0], (0.0, 1.0), None)

    def ends(k):
        many = EnsembleProblem(problem, p={"on": SWITCHES, "k": k})
        return solve(many, rtol=1e-9, atol=1e-12, **way).u_end[:, 0]

    k = np.linspace(0.3, 0.9, 7)
    np.testing.assert_allclose(ends(k), np.exp(k), rtol=1e-7)
    np.testing.assert_allclose(mpiad.grad(lambda k: anp.sum(ends(k)))(k), np.exp(k), rtol=1e-7)
    np.testing.assert_allclose(mpiad.jvp(ends, k, np.ones(7))[1], np.exp(k), rtol=1e-7)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trace_for_rows_of_numbers_is_not_that_for_booleans(compiled):
    problem = ODEProblem(lambda u, p, t: [(p["on"][0] + p["on"][1]) * p["k"] * u[0]], [1.0], (0.0, 1.0), None)
    k, ways = np.linspace(0.3, 0.9, 7), {"rtol": 1e-9, "atol": 1e-12, "compile": compiled}
    counts = SWITCHES.sum(axis=1)

    def ends(k, rows):
        return solve(EnsembleProblem(problem, p={"on": rows, "k": k}), **ways).u_end[:, 0]

    for rows, factor in 2 * [(SWITCHES * 1.0, counts), (SWITCHES, 1), (SWITCHES * 1, counts)]:
        np.testing.assert_allclose(ends(k, rows), np.exp(factor * k), rtol=1e-7)
        gradient = mpiad.grad(lambda k, rows=rows: anp.sum(ends(k, rows)))(k)
        np.testing.assert_allclose(gradient, factor * np.exp(factor * k), rtol=1e-7)
    if compiled:
        with pytest.raises(TypeError, match="p has rows of int8, in which"):
            ends(k, SWITCHES.astype(np.int8))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint64])
def test_rows_of_integers_that_wrap_around_are_not_compiled(dtype):
    low = np.array([[3], [4], [200 if dtype == np.uint8 else 100]]).astype(dtype)
    problem = ODEProblem(lambda u, p, t: [(p["n"][0] * p["n"][0]) * p["k"] + 0 * u[0]], [0.0], (0.0, 1.0), None)

    def ends(k, **way):
        return solve(EnsembleProblem(problem, p={"n": low, "k": k}), RK4(), dt=0.1, **way).u_end[:, 0]

    k, squares = np.array([1.0, 2.0, 3.0]), (low[:, 0] * low[:, 0]).astype(float)
    for way in ({}, {"compile": False}, {"compile": False, "gradient": "tangent"}):
        np.testing.assert_allclose(ends(k, **way), squares * k, rtol=1e-12)
        np.testing.assert_allclose(mpiad.grad(lambda k, way=way: anp.sum(ends(k, **way)))(k), squares, rtol=1e-12)
    with pytest.raises(TypeError, match=f"p has rows of {np.dtype(dtype)}, in which"):
        ends(k, compile=True)


BOTH = np.array([True, True])
PRODUCTS = {
    "@": lambda x: BOTH @ x, "dot": lambda x: anp.dot(BOTH, x), "tensordot": lambda x: anp.tensordot(BOTH, x, 1),
    "einsum": lambda x: anp.einsum("i,i...->...", BOTH, x), "array": lambda x: BOTH @ anp.array([x[0], x[1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_conditions_are_conditions(name):
    """u' = [1, 1, p (u[0] > 1/2 or u[1] > 1/2)], so u[2] grows from t = 0.195 on; both conditions hold from 0.5 on.

    A step of RK4 that begins at 0.1 has only its last stage, of weight 1/6, beyond 0.195.
    """

    def f(u, p, t):
        return [1 + 0 * u[0], 1 + 0 * u[1], p[0] * PRODUCTS[name](u[:2] > 0.5)]

    def end(p, **way):
        return solve(ODEProblem(f, [0.305, 0.0, 0.0], (0.0, 1.0), p), RK4(), dt=0.1, **way).u_end[2]

    for way in ({}, {"compile": False}, {"compile": False, "gradient": "tangent"}):
        assert end(np.ones(1), **way) == pytest.approx(0.8 + 0.1 / 6, rel=1e-12)
        assert mpiad.grad(lambda p, way=way: end(p, **way))(np.ones(1)) == pytest.approx(0.8 + 0.1 / 6, rel=1e-12)
    with pytest.raises(TypeError, match="booleans|conditions"):
        end(np.ones(1), compile=True)
