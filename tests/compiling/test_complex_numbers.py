"""Complex arithmetic and functions as traced: NumPy's values, and autograd's derivatives, on the axes too."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from kernels_on_cpu import parameters_of

from mpiad.compiling.derivatives import vjp
from mpiad.compiling.program import evaluated
from mpiad.ensemble.compiled.trace import trace

pytestmark = [pytest.mark.serial, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

PAULI = np.array([[0, -1j], [1j, 0]])
# In all quadrants and on the axes, where signs of zeros and absolute values have their kinks.
POINTS = [1.2 + 0.7j, -0.8 + 1.1j, -0.5 - 0.3j, 0.9 - 2.1j, -1.5 + 0j, 2j, -0.7j, 0.6 + 0j, complex(-1.5, -0.0), 30 - 1j]
W = 0.7 - 1.3j

ONE = {name: getattr(anp, name) for name in "exp log log2 log10 sqrt sin cos tan sinh cosh tanh abs angle conj real imag "
       "negative square reciprocal".split()}  # fmt: skip
ONE |= {f"z ** {n}": lambda z, n=n: z**n for n in (-3, -1, 0, 1, 2, 5, 0.5, -1.5, 2.0, W)}
ONE |= {
    "2 ** z": lambda z: 2.0**z,
    "W / z": lambda z: W / z,
    "z / W": lambda z: z / W,
    "where": lambda z: anp.where(anp.real(z) > 0.7, z * W, anp.conj(z)),
    "equal": lambda z: anp.where(z == 2j, z, 1j * z),
    "modulus": lambda z: z * anp.abs(z) ** 2 + anp.imag(z) * 1j,
}


def program_of(f, d, p=None):
    return trace(f, (d,), parameters_of(p, False), complex)


def values(program, u, p=()):
    made = evaluated(program, np.array(u).view(float), np.array(p, complex).view(float), [0.25])
    return np.array(made, float).view(complex)


def convention(program, u, seed):
    """Return the cotangents of the states by autograd's convention, which conjugates."""
    made = evaluated(vjp(program), np.array(u).view(float), [], [0.25], np.conj(seed).view(float))
    return np.conj(np.array(made, float)[: 2 * len(u)].view(complex))


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_number(name):
    function, program = ONE[name], program_of(lambda u, p, t: [ONE[name](u[0])], 1)
    for z in POINTS:
        with np.errstate(all="ignore"):
            expected = complex(function(np.complex128(z)))
            made = values(program, [z])
            np.testing.assert_allclose(made, expected, rtol=1e-14, atol=1e-15 * abs(expected), err_msg=f"{z}")
            if name == "exp" or abs(z) < 10:
                g = autograd.grad(lambda z: anp.real(W * function(z)))(np.complex128(z))
                found = convention(program, [z], np.array([W]))
                np.testing.assert_allclose(found, g, rtol=1e-13, atol=1e-14 * abs(g), err_msg=f"{z}")


BINARY = {
    "multiply": lambda z, w: z * w - w,
    "divide": lambda z, w: z / w,
    "power": lambda z, w: z**w,
    "mixed": lambda z, w: anp.conj(z) * anp.real(w) + 1j * anp.abs(w) / z,
}


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name):
    function, program = BINARY[name], program_of(lambda u, p, t: [BINARY[name](u[0], u[1]), u[0]], 2)
    for z in POINTS[:-1]:
        for w in POINTS[:-1]:
            expected = function(np.complex128(z), np.complex128(w))
            np.testing.assert_allclose(values(program, [z, w])[0], expected, rtol=1e-13, err_msg=f"{z}, {w}")
            g = autograd.grad(lambda zw: anp.real(W * function(zw[0], zw[1])))(np.array([z, w]))
            found = convention(program, [z, w], np.array([W, 0]))
            np.testing.assert_allclose(found, g, rtol=1e-12, atol=1e-14 * np.abs(g).max(), err_msg=f"{z}, {w}")


def test_large_and_small_numbers():
    divide, modulus = (program_of(lambda u, p, t, f=f: [f(u[0], u[1]), u[0]], 2) for f in (
        lambda z, w: z / w, lambda z, w: anp.abs(z * w)))  # fmt: skip
    for z, w in [(1e-200 + 3e-200j, 2e-210 - 1e-210j), (1e300 + 2e300j, 5e299j), (0j, 1e-300 + 1e-300j)]:
        np.testing.assert_allclose(values(divide, [z, w])[0], np.complex128(z) / np.complex128(w), rtol=1e-14)
    for z in (3e300 + 4e300j, 3e-300 - 4e-300j, 0j):
        np.testing.assert_allclose(values(modulus, [z, 1 + 0j])[0], abs(z), rtol=1e-14)
    power = program_of(lambda u, p, t: [u[0] ** u[1], u[0]], 2)
    for w in (2 + 1j, 0.5 + 0j, 0j, 1j, -1 + 0j, -0.5 + 2j):
        np.testing.assert_array_equal(values(power, [0j, w])[0], np.complex128(0) ** np.complex128(w), f"{w}")
    # The derivative of the absolute value at 0 is 0, and powers that aren't whole are 0 there.
    np.testing.assert_array_equal(convention(modulus, [0j, 1 + 0j], np.array([1, 0j])), 0)
    np.testing.assert_array_equal(values(program_of(lambda u, p, t: [u[0] ** 1.5], 1), [0j]), 0)
    np.testing.assert_allclose(values(program_of(lambda u, p, t: anp.tanh(u), 2), [500 + 1j, -500 - 1j]), [1, -1])


def dot(u, p, t):
    return anp.dot(-1j * PAULI, u) * p[0] + t


def operator(u, p, t):
    return PAULI @ u + p[1].real * u


def stacked(u, p, t):
    return anp.stack([u[1] * p[0], anp.einsum("i...,i...->...", np.conj(u), u)])


def in_place(u, p, t):
    made = np.zeros_like(u)
    assert np.iscomplexobj(made) and made.dtype == u.dtype == complex and u.real.dtype == float
    made[0] = 1j * u[1].conj()
    made[1] = np.sum(u, axis=0).imag + np.linalg.norm(u, axis=0) * p[1]
    return made


def joined(u, p, t):
    both = anp.array([u[0] * 1j, anp.mean(u, axis=0)])
    return anp.concatenate([both[1:], both[:1]]) + np.interp(t, [0.0, 1.0], [1j, 2.0])


@pytest.mark.parametrize("f", [dot, operator, stacked, in_place, joined])
def test_arrays(f):
    u, p = np.array(POINTS[:2]), np.array([0.3 - 0.2j, 1.1 + 0.4j])
    expected = f(u[:, None], p, np.array([0.25]))[:, 0]
    np.testing.assert_allclose(values(program_of(f, 2, p), u, p), expected, rtol=1e-14)


def test_a_state_that_is_a_matrix():
    def commutator(u, p, t):
        return -1j * (np.dot(PAULI, u) - np.dot(u, PAULI)) * t

    u = np.array(POINTS[:4]).reshape(2, 2)
    program = trace(commutator, (2, 2), parameters_of(None, False), complex)
    np.testing.assert_allclose(values(program, u.ravel()).reshape(2, 2), commutator(u, None, 0.25), rtol=1e-14)


def test_products_with_known_zeros_are_left_out():
    # -i σ u is (-Im, Re) of two components.
    program = program_of(lambda u, p, t: anp.dot(-1j * np.array([[0, 1], [1, 0]]), u), 2)
    assert [instruction.operation for instruction in program.instructions].count("multiply") <= 4
    # An imaginary part that is zero is still there: the root of -1 is i.
    np.testing.assert_array_equal(values(program_of(lambda u, p, t: [np.sqrt(0 * u[0] - 1)], 1), [2j]), 1j)
