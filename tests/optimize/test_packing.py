"""Nests of variables as vectors of doubles, and back."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

from mpiad import minimize
from mpiad.optimize.packing import Packing, as_variables


def test_packing_keeps_every_value() -> None:
    tree = {
        "b": [np.arange(6.0).reshape(2, 3).T, np.float32(0.5)], "a": (np.array([1 + 2j, 3 - 4j]), 7, "text"),
        "empty": np.zeros((0, 2)), "c": 1.25, "half": np.arange(3, dtype=np.float32),
    }  # fmt: skip
    packing = Packing(tree)
    vector = packing.pack(tree)
    assert vector.shape == (packing.size,) == (6 + 1 + 4 + 0 + 1 + 3,) and vector.dtype == float
    back = packing.unpack(vector)
    assert list(back) == list(tree) and back["a"][1:] == (7, "text")
    assert np.array_equal(back["a"][0], tree["a"][0]) and back["a"][0].dtype == complex
    assert np.array_equal(back["b"][0], tree["b"][0]) and isinstance(back["b"], list)
    assert back["empty"].shape == (0, 2) and back["c"] == 1.25
    assert back["half"].dtype == np.float32 and back["b"][1].dtype == np.float32
    vector[:] = 0.0
    assert back["b"][0][0, 1] == 3.0  # new memory


def test_gradient_by_complex_variables() -> None:
    z = np.array([0.3 - 0.7j, 1.1 + 0.2j])
    packing = Packing(z)

    def fun(z):
        return anp.sum(anp.real(z**3) + anp.abs(z) ** 2 * anp.imag(z))

    packed = packing.pack_gradient(autograd.grad(fun)(z))
    x, step = packing.pack(z), 1e-6
    differences = [(fun(packing.unpack(x + step * e)) - fun(packing.unpack(x - step * e))) / (2 * step) for e in np.eye(4)]
    np.testing.assert_allclose(packed, differences, rtol=1e-7)
    assert np.array_equal(packing.unpack_gradient(packed), autograd.grad(fun)(z))


def test_other_nests_are_refused() -> None:
    packing = Packing([np.zeros(2), 1.0])
    with pytest.raises(TypeError, match=r"2 leaves like x0, but got 1"):
        packing.pack_gradient([np.zeros(2)])
    with pytest.raises(TypeError, match=r"expected shape \(2,\), as of x0\[0\], but got \(3,\)"):
        packing.pack_gradient([np.zeros(3), 1.0])


@pytest.mark.parametrize(
    "x0, expected",
    [
        ([1, 2.5], np.array([1.0, 2.5])),
        ((1, 2), np.array([1.0, 2.0])),
        (3, 3.0),
        (np.array([1, 2]), np.array([1.0, 2.0])),
        (np.float32(2), 2.0),
    ],
)
def test_numbers_are_doubles(x0, expected) -> None:
    got = as_variables(x0)
    assert np.array_equal(got, expected) and np.result_type(got) == np.float64 and type(got) is type(expected)


def test_nests_stay() -> None:
    nest = [np.zeros(2, np.float32), [1.0, 2.0]]
    assert as_variables(nest) is nest


class Point:
    def __init__(self, x: float):
        self.x = x


def test_an_object_inside_x0_is_refused_by_its_path() -> None:
    """Its number stayed as it was, and the minimum was one of the others alone."""
    with pytest.raises(TypeError, match=r"minimize: x0\[1\]\['p'\] is Point"):
        minimize(lambda x: (x[1]["p"].x - 1) ** 2 + x[0] ** 2, (2.0, {"p": Point(3.0)}))
