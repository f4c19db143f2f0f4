"""autograd.numpy's functions on device arrays, against the same on NumPy's: values and derivatives of both orders.

Nothing may be copied but J, and what an index of the host's brings with it.
"""

from __future__ import annotations

import autograd.numpy.numpy_wrapper as wrapped
import numpy as onp
import pytest
from autograd.core import primitive_vjps
from autograd.numpy import fft, linalg
from device_calls import (
    CALLS,
    COMPLEX,
    INDEXED,
    MATRICES,
    OTHERWISE,
    REVERSE_ONLY,
    SQUARE,
    TRANSFORMS,
    UNARY,
    make_input,
)

import mpiad
import mpiad.device.numpy as np
from mpiad.differentiation.rules.protocol import DEVICE_REFUSALS

pytestmark = pytest.mark.serial


def loss_of(fun):
    def loss(x):
        y = fun(x)
        parts = y if isinstance(y, (list, tuple)) else [y]
        return sum(np.sum(np.real(part) * np.sin(0.3 + np.real(part)) + np.imag(part) ** 2) for part in parts)

    return loss


def check(fun, x, v, devices, rtol=2e-11, reference=None):
    loss, fun_there, loss_there = loss_of(reference or fun), fun, loss_of(fun)
    fun = reference or fun
    to, look = devices.put, devices.look
    devices.start_counting()
    found = [
        mpiad.value_and_grad(loss_there)(to(x))[1], mpiad.hvp(loss_there)(to(x), to(v)), mpiad.jvp(fun_there, to(x), to(v)),
        mpiad.grad(lambda x: np.sum(np.real(mpiad.grad(loss_there)(x) * to(v))))(to(x)),
    ]  # fmt: skip
    copies = devices.copies()
    expected = [
        mpiad.value_and_grad(loss)(x)[1], mpiad.hvp(loss)(x, v), mpiad.jvp(fun, x, v),
        mpiad.grad(lambda x: np.sum(np.real(mpiad.grad(loss)(x) * v)))(x),
    ]  # fmt: skip
    for a, b in zip(found, expected):
        pairs = list(zip(a, b)) if isinstance(a, (tuple, list)) else [(a, b)]
        for part, reference in pairs:
            for one, other in zip(part, reference) if isinstance(part, (tuple, list)) else [(part, reference)]:
                assert type(one) is devices.kind and one.dtype == onp.asarray(other).dtype
                onp.testing.assert_allclose(
                    look(one), other, rtol=rtol, atol=rtol * (1 + onp.max(onp.abs(other), initial=0))
                )
    return copies


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_array(name, devices, rng):
    shape = (4, 4) if name in ("diag", "trace", "rot90") else (3, 4)
    x, v = make_input(UNARY[name], shape, rng), rng.normal(size=shape)
    copies = check(getattr(np, name), x, v, devices)
    # One J; J and its tangent in the first product, the J of both gradients in the second. Nothing else.
    assert copies is None or copies[0] == 0 and copies[1] == 5


@pytest.mark.parametrize("name", {**CALLS, **TRANSFORMS})
def test_calls(name, devices, rng):
    x, v = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    copies = check({**CALLS, **TRANSFORMS}[name], x, v, devices)
    # The number of hits of a mask is copied each time that it is used.
    masks = 10 if name == "x[mask]" else 0
    assert copies is None or copies[0] == 0 and copies[1] == 5 + masks


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name, devices, rng):
    copies = check(MATRICES[name], make_input(SQUARE, (3, 3), rng), rng.normal(size=(3, 3)), devices, rtol=1e-9)
    assert copies is None or copies[0] == 0 and copies[1] == 5


@pytest.mark.parametrize("name", REVERSE_ONLY)
def test_functions_of_several_results(name, devices, rng):
    x, loss = make_input(SQUARE, (3, 3), rng), loss_of(REVERSE_ONLY[name])
    devices.start_counting()
    found = mpiad.grad(loss)(devices.put(x))
    assert devices.copies() in (None, (0, 1))
    onp.testing.assert_allclose(devices.look(found), mpiad.grad(loss)(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", OTHERWISE)
def test_against_the_same_written_otherwise(name, devices, rng):
    fun, reference = OTHERWISE[name]
    copies = check(fun, rng.normal(size=(3, 4)), rng.normal(size=(3, 4)), devices, reference=reference)
    assert copies is None or copies[0] == 0 and copies[1] == 5


@pytest.mark.parametrize("name", INDEXED)
def test_indices_of_the_host(name, devices, rng):
    check(INDEXED[name], rng.normal(size=(3, 4)), rng.normal(size=(3, 4)), devices)


COMPLEX_CALLS = (
    "x**2",
    "multiply",
    "divide",
    "3 * x",
    "sum 0",
    "mean 1",
    "dot",
    "dot 3",
    "einsum",
    "x[0]",
    "many",
    "stack",
    "concatenate",
    "matmul",
    "tensordot axes",
    "inner",
    "roll",
    "pad",
    "var 0",
    "prod 0",
)


@pytest.mark.parametrize("name", COMPLEX_CALLS)
def test_complex_arrays(name, devices, rng):
    x, v = make_input(COMPLEX, (3, 4), rng), make_input(COMPLEX, (3, 4), rng)
    check(CALLS[name], x, v, devices)


@pytest.mark.few(84)
@pytest.mark.parametrize("name", [*CALLS, "sin", "tanh", "sqrt", "var", "std", "max"])
def test_single_precision_is_kept(name, devices, rng):
    fun = CALLS.get(name) or (lambda x: getattr(np, name)(np.abs(x) + 1))
    x = rng.normal(size=(3, 4)).astype(onp.float32)
    gradient = mpiad.grad(loss_of(fun))(devices.put(x))
    assert type(gradient) is devices.kind and gradient.dtype == onp.float32
    onp.testing.assert_allclose(devices.look(gradient), mpiad.grad(loss_of(fun))(x), rtol=2e-3, atol=2e-4)


def _differentiable():
    """The names of all functions of autograd.numpy that it knows an adjoint of."""
    for space in (wrapped, linalg, fft):
        for name in vars(space):
            fun = vars(space)[name]
            if getattr(fun, "_is_autograd_primitive", False) and fun in primitive_vjps:
                yield space, name, fun


# A part of the transforms, what makes NumPy's arrays of whatever is given, and methods' functions that were called.
ELSEWHERE = {"truncate_pad", "_array_from_scalar_or_array"}


def test_no_function_is_forgotten():
    calls = {**CALLS, **MATRICES, **REVERSE_ONLY, **TRANSFORMS, **{name: fun for name, (fun, _) in OTHERWISE.items()}}
    called = {word for fun in calls.values() for word in getattr(fun, "__code__", check.__code__).co_names}
    tested = {*UNARY, *called, *" ".join(calls).split()}
    # Several names of one function count once.
    known = {id(fun) for space, name, fun in _differentiable() if name in tested} | {id(fun) for fun in DEVICE_REFUSALS}
    missing = {name for _, name, fun in _differentiable() if id(fun) not in known and not name.startswith("_primitive")}
    assert missing - ELSEWHERE == set()


@pytest.mark.parametrize(("fun", "words"), [
    (lambda x: np.diff(x, prepend=0.0), "diff can't be differentiated with prepend"),
    (lambda x: np.clip(x, x[0], 0.5), "clip can't be differentiated with respect to a bound"),
    (lambda x: np.linspace(x[0], x[1], 5, axis=1), "linspace can't be differentiated with axis"),
    (lambda x: linalg.pinv(x, 1e-3), "pinv can't be differentiated with 2 arguments"),
    (lambda x: linalg.svd(x)[0], "svd can't be differentiated with these arguments: pass full_matrices=False"),
])  # fmt: skip
def test_refused_by_name(fun, words, devices, rng):
    with pytest.raises(NotImplementedError, match=words):
        mpiad.grad(lambda x: np.sum(fun(x)))(devices.put(rng.normal(size=(3, 4))))


@pytest.mark.parametrize("made", [
    np.array, lambda x: np.concatenate([x]), lambda x: np.concatenate([x], None), lambda x: np.vstack([x]),
    lambda x: np.stack([x]), lambda x: np.array([x]),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_what_is_made_of_one_array_is_another(made, shape, devices, rng):
    host = rng.normal(size=shape)
    x = devices.put(host)
    y = made(x)
    y[...] = 7.0
    onp.testing.assert_array_equal(mpiad.device.to_host(x), host)
    assert (mpiad.device.to_host(y) == 7.0).all()
