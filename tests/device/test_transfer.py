"""Copies between host and device: what moves, what they are worth, and their derivatives."""

from __future__ import annotations

from typing import NamedTuple

import autograd.numpy as np
import numpy as onp
import pytest

import mpiad
from mpiad.device import to_device, to_host

pytestmark = pytest.mark.serial


class Pair(NamedTuple):
    first: object
    second: object


def test_a_nest_goes_there_and_back(devices):
    pair = Pair(onp.float32(1.5), onp.ones(2, onp.complex64))
    nest = {"w": [onp.arange(3.0), 2.0], "b": pair, "name": "relu", "none": None}
    there = to_device(nest, like=devices.put(0.0))
    assert type(there["w"][0]) is type(there["w"][1]) is type(there["b"].first) is devices.kind
    assert there["name"] == "relu" and there["none"] is None and there["b"].second.dtype == onp.complex64
    back = to_host(there)
    assert type(back["b"]) is Pair and type(back["b"].first) is onp.float32 and back["w"][1] == 2.0
    onp.testing.assert_array_equal(back["w"][0], [0.0, 1.0, 2.0])


def test_what_is_there_already_is_passed_through(devices):
    x, y = devices.put([1.0]), onp.ones(2)
    devices.start_counting()
    assert to_device(x, like=devices.put(0.0)) is x and to_host(y) is y and devices.copies() in (None, (0, 0))


def test_gradients_come_back_across_both_copies(devices, rng):
    x = rng.normal(size=(3, 2))

    def loss(x, there=lambda x: x, back=lambda x: x):
        return np.sum(back(np.sin(there(x**2))) ** 3)

    expected = mpiad.grad(loss)(x)
    devices.start_counting()
    found = mpiad.grad(lambda x: loss(x, lambda x: to_device(x, like=devices.put(0.0)), to_host))(x)
    assert type(found) is onp.ndarray and devices.copies() in (None, (2, 2))
    onp.testing.assert_allclose(found, expected, rtol=1e-14)


def test_a_gradient_by_a_device_array_through_the_host(devices, rng):
    x = rng.normal(size=4).astype(onp.float32)
    found = mpiad.grad(lambda x: np.sum(np.exp(to_host(x))))(devices.put(x))
    assert type(found) is devices.kind and found.dtype == onp.float32
    onp.testing.assert_allclose(devices.look(found), onp.exp(x), rtol=1e-6)


def test_tangents_and_second_derivatives_cross_too(devices, rng):
    x, v = rng.normal(size=3), rng.normal(size=3)

    def loss(x):
        return np.sum(to_host(np.sin(to_device(x, like=devices.put(0.0)))) ** 2)

    def plain(x):
        return np.sum(np.sin(x) ** 2)

    onp.testing.assert_allclose(mpiad.jvp(loss, x, v)[1], mpiad.jvp(plain, x, v)[1], rtol=1e-14)
    onp.testing.assert_allclose(mpiad.hvp(loss)(x, v), mpiad.hvp(plain)(x, v), rtol=1e-13)


def test_what_no_device_takes_is_refused(devices):
    with pytest.raises(TypeError, match="object"):
        to_device(onp.array([None]), like=devices.put(0.0))


@pytest.mark.skipif("cupy" in __import__("sys").modules, reason="CuPy is here")
def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(ImportError, match=r"mpiad\[gpu\]"):
        to_device(onp.ones(2))
    with pytest.raises(ImportError, match=r"mpiad\[gpu\]"):
        mpiad.device.select()
