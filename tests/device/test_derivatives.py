"""The library's derivatives on device arrays: forms of arguments and results, numbers of the host's, refusals."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as onp
import pytest
from autograd.extend import vspace
from autograd.test_util import scalar_close

import mpiad
import mpiad.device.numpy as np
from mpiad.testing import check_adjoint, check_grads

pytestmark = pytest.mark.serial


def test_a_nest_with_both_memories(devices, rng):
    w, b = rng.normal(size=(3, 2)), rng.normal(size=2).astype(onp.float32)

    def loss(p):
        return np.sum(np.tanh(p["w"] @ p["b"][0]) * p["s"]) + p["s"] ** 2

    J, found = mpiad.value_and_grad(loss)({"w": devices.put(w), "b": [devices.put(b)], "s": 0.7})
    expected_J, expected = mpiad.value_and_grad(loss)({"w": w, "b": [b], "s": 0.7})
    assert type(J) is onp.float64 and type(found["w"]) is type(found["b"][0]) is devices.kind
    assert found["b"][0].dtype == onp.float32 and isinstance(found["s"], float)
    onp.testing.assert_allclose(J, expected_J, rtol=1e-12)
    onp.testing.assert_allclose(devices.look(found["w"]), expected["w"], rtol=1e-12)
    onp.testing.assert_allclose(devices.look(found["b"][0]), expected["b"][0], rtol=1e-5)
    onp.testing.assert_allclose(found["s"], expected["s"], rtol=1e-6)


@pytest.mark.parametrize(
    "fun",
    [
        lambda s, x: np.sum(s * x**2), lambda s, x: np.sum((x - s) / (x * x + s)), lambda s, x: np.sum(s / (x * x + 1)),
        lambda s, x: np.sum(np.where(x > 0, x, s)), lambda s, x: np.sum(np.maximum(s, x) ** 2),
        lambda s, x: np.sum((x * x + 1) ** s), lambda s, x: np.sum(s**x), lambda s, x: np.sum(np.arctan2(x, s)),
        lambda s, x: np.sum(np.logaddexp(s, x)), lambda s, x: np.sum(x) * s + s**3, lambda s, x: (np.sum(x) - s) ** 2,
        lambda s, x: np.sum(np.array([x[0], s * x[1], s**2])),
    ],
)  # fmt: skip
def test_numbers_of_the_host_get_their_derivatives_there(fun, devices, rng):
    s, x = 0.8, rng.normal(size=4)
    found, expected = mpiad.grad(fun, (0, 1))(s, devices.put(x)), mpiad.grad(fun, (0, 1))(s, x)
    assert isinstance(found[0], onp.float64) and type(found[1]) is devices.kind
    onp.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    onp.testing.assert_allclose(devices.look(found[1]), expected[1], rtol=1e-12)
    second = mpiad.hvp(lambda s: fun(s, devices.put(x)))(s, 1.0)
    onp.testing.assert_allclose(second, mpiad.hvp(lambda s: fun(s, x))(s, 1.0), rtol=1e-11)
    onp.testing.assert_allclose(
        devices.look(mpiad.jvp(lambda s: fun(s, devices.put(x)), s, 1.0)[1]), expected[0], rtol=1e-12
    )


def test_elements_of_a_host_array_beside_a_device_array(devices, rng):
    p, x = rng.normal(size=3), rng.normal(size=5)

    def loss(p, x):
        return np.sum((p[0] + p[1] * x + p[2] * x**2) ** 2)

    found = mpiad.grad(loss)(p, devices.put(x))
    assert type(found) is onp.ndarray
    onp.testing.assert_allclose(found, mpiad.grad(loss)(p, x), rtol=1e-12)


def test_constants_may_be_device_arrays(devices, rng):
    x, s = rng.normal(size=4), onp.float64(0.4)
    there = devices.put(x)
    onp.testing.assert_allclose(mpiad.grad(lambda s: np.sum(there * s**2))(s), 2 * s * x.sum(), rtol=1e-13)
    onp.testing.assert_allclose(mpiad.grad(lambda s: np.sum(s**2 * there))(s), 2 * s * x.sum(), rtol=1e-13)


def test_vjp_and_jvp(devices, rng):
    x, y = rng.normal(size=(2, 3)), rng.normal(size=3)

    def fun(x):
        return np.sum(x, axis=0) ** 2, x[0]

    vjp, value = mpiad.make_vjp(fun)(devices.put(x))
    found = vjp((devices.put(y), devices.put(y)))
    expected = mpiad.make_vjp(fun)(x)[0]((y, y))
    onp.testing.assert_allclose(devices.look(found), expected, rtol=1e-13)
    with pytest.raises(TypeError, match="on the host for an array on"):
        vjp((y, y))
    found, expected = mpiad.make_jvp(fun)(devices.put(x))(devices.put(x)), mpiad.make_jvp(fun)(x)(x)
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1])):
        onp.testing.assert_allclose(devices.look(a), b, rtol=1e-13)


def test_jacobian(devices, rng):
    x = rng.normal(size=(2, 3))

    def fun(x):
        return np.sin(x) @ x.T

    found = mpiad.jacobian(fun)(devices.put(x))
    assert type(found) is devices.kind and found.shape == (2, 2, 2, 3)
    onp.testing.assert_allclose(devices.look(found), mpiad.jacobian(fun)(x), rtol=1e-12)
    onp.testing.assert_allclose(devices.look(mpiad.jacobian(lambda x: np.sum(x**3))(devices.put(x))), 3 * x**2, rtol=1e-13)


def test_gradients_can_be_written_to_and_are_no_views_of_one_number(devices):
    x = devices.put(onp.ones(3))
    found = mpiad.grad(np.sum)(x)
    found[0] = 5.0
    onp.testing.assert_array_equal(devices.look(found), [5.0, 1.0, 1.0])
    onp.testing.assert_array_equal(devices.look(x), [1.0, 1.0, 1.0])


def test_a_variable_that_nothing_depends_on(devices):
    found = mpiad.grad(lambda x: 3.0)(devices.put(onp.ones((2, 2), onp.float32)))
    assert type(found) is devices.kind and found.dtype == onp.float32
    onp.testing.assert_array_equal(devices.look(found), onp.zeros((2, 2)))


def test_integers_carry_no_derivative(devices, rng):
    x, k = rng.normal(size=4), onp.array([2, 0])
    found = mpiad.grad(lambda p: np.sum(p["x"][p["k"]] ** 2))({"x": devices.put(x), "k": devices.put(k)})
    onp.testing.assert_allclose(devices.look(found["x"]), [2 * x[0], 0, 2 * x[2], 0], rtol=1e-14)
    onp.testing.assert_array_equal(devices.look(found["k"]), [0, 0])


def test_many_uses_are_added_up_without_copies(devices, rng):
    x = rng.normal(size=(20, 3))

    def loss(x):
        return sum(np.sum(x[i] * x[i - 1]) for i in range(20)) + np.sum(x) + np.sum(x**2)

    devices.start_counting()
    found = mpiad.grad(loss)(devices.put(x))
    assert devices.copies() in (None, (0, 1))
    onp.testing.assert_allclose(devices.look(found), mpiad.grad(loss)(x), rtol=1e-13)


def test_check_grads_and_check_adjoint(devices, rng):
    x = devices.put(rng.normal(size=(2, 3)))
    rates = check_grads(lambda x: np.sum(np.exp(x) * x[0]), x)
    assert all(rate > 1.8 for rate in rates.values())
    assert check_adjoint(lambda x: np.cumsum(x, axis=1)[:, ::2], x) <= 16


def test_third_derivatives(devices, rng):
    x = rng.normal(size=3)

    def third(x):
        def slope(x):
            return np.sum(mpiad.grad(lambda x: np.sum(np.sin(x) * x[::-1] ** 2))(x))

        return np.sum(mpiad.grad(slope)(x) ** 2)

    onp.testing.assert_allclose(devices.look(mpiad.grad(third)(devices.put(x))), mpiad.grad(third)(x), rtol=1e-11)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_vector_space(dtype, devices, rng):
    there, here = vspace(devices.put(onp.zeros((2, 3), dtype))), vspace(onp.zeros((2, 3), dtype))
    x = rng.normal(size=(2, 3)).astype(dtype) * (1 + 2j if "c" in dtype else 1)
    y = rng.normal(size=(2, 3)).astype(dtype)
    put, look = devices.put, devices.look
    assert there.size == here.size and there.iscomplex == here.iscomplex and there == vspace(put(y))
    for found, expected in [
        (there.zeros(), here.zeros()), (there.ones(), here.ones()), (there.add(put(x), put(y)), x + y),
        (there.mut_add(None, put(x)), x), (there.mut_add(put(x), put(y)), x + y), (there.covector(put(x)), onp.conj(x)),
        (there.scalar_mul(put(x), 3.0), 3 * x),
    ]:  # fmt: skip
        assert type(found) is devices.kind and found.dtype == onp.dtype(dtype)
        onp.testing.assert_array_equal(look(found), expected)
    assert scalar_close(float(look(there.inner_prod(put(x), put(y)))), float(here.inner_prod(x, y)))
    assert len(list(there.standard_basis())) == here.size
    assert there.randn().dtype == onp.dtype(dtype)


def test_what_autograd_makes_of_numpys_arrays_is_refused_by_name(devices, rng):
    x = devices.put(rng.normal(size=(3, 4)))
    with pytest.raises(NotImplementedError, match=r"concatenate can't be .* mpiad.device.numpy"):
        mpiad.grad(lambda x: anp.sum(anp.concatenate([x, x])))(x)
    for name, call in [("stack", lambda x: anp.stack([x, x])), ("array", lambda x: anp.array([x[0], x[1]]))]:
        said = rf"autograd.numpy.{name} makes NumPy arrays.* mpiad.device.numpy.{name} .*Implicit conversion"
        for trace in (mpiad.grad, mpiad.hvp):
            with pytest.raises(TypeError, match=said):
                trace(lambda x, call=call: anp.sum(call(x)))(*[x] * (1 + (trace is mpiad.hvp)))
    with pytest.raises(TypeError, match="^Implicit conversion"):
        mpiad.grad(lambda x: anp.sum(onp.asarray(mpiad.stop_gradient(x)) + x))(x)
    with pytest.raises(TypeError, match="array 1 is a ndarray on the host"):
        np.concatenate([x, onp.ones((3, 4))])


def test_functions_that_the_device_lacks_are_named(devices, rng):
    x = devices.put(rng.normal(size=4))
    with pytest.raises(TypeError, match="Unsupported type|ndarray"):
        mpiad.grad(lambda x: np.sum(x * onp.ones(4)))(x)
