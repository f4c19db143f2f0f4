"""Complex numbers in loops: values of NumPy, derivatives of autograd's convention, at the trace and in replays."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same, check_jit

import mpiad

pytestmark = pytest.mark.serial

X = np.linspace(-1, 2, 7)
Z, W = (X + 0.25) * np.exp(1j * np.arange(7.0)), (2 - X) * np.exp(-2j * X) + 0.5
A = np.outer(Z[:4], W[:5])


def arithmetic(z, w, x):
    return z * w + x, z / w, x / w, -z, z - 1j, 2 * w, z**2, w**-1, (0.5 - 1j) ** x, anp.square(z), anp.reciprocal(w)


def functions(z, w, x):
    parts = anp.real(z * w), anp.imag(z) + x, anp.abs(z) * w, anp.conj(z) * w, anp.angle(z * w)
    return *parts, anp.exp(z), anp.exp(1j * x) * z, anp.sqrt(w), anp.log(w), anp.sin(z) * anp.cos(w), anp.tanh(0.5 * z)


def choices(z, w, x):
    mixed = anp.where(x > 0, z, x), anp.where(anp.abs(z) > 1, z, w), anp.where(z == w, z, 1j)
    return *mixed, anp.concatenate([z, x, w[1:3]]) ** 2, anp.stack([z, x], axis=1) * 1j, anp.array([z[0], x[1] * w[2]])


def reductions(z, w, x):
    return anp.sum(z * w), anp.mean(z), anp.dot(z, w), anp.linalg.norm(z), anp.sum(z) * x


def fields(a):
    sums = anp.sum(a, axis=0), anp.sum(a * 1j, axis=1), anp.sum(a, axis=(0, 1))
    moved = a.T * 2, a[1:] - a[:-1], anp.roll(a, 1, axis=1) * a, anp.reshape(a[:, ::-1], (2, 10)) * 2
    return *sums, *moved, anp.pad(a, ((1, 0), (0, 2)), "constant") * 1j, anp.diff(a, axis=1)


CASES = [(fun, (Z, W, X)) for fun in (arithmetic, functions, choices, reductions)] + [(fields, (A,))]


@pytest.mark.few(2)
@pytest.mark.parametrize(("fun", "args"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_values_and_derivatives(fun, args):
    check_jit(fun, *args, outside=True)
    steps = mpiad.jit(fun).program(*args).loops.splitlines()
    assert all(step.startswith("loop over") for step in steps)  # NumPy runs none of it


def test_single_precision():
    single = [x.astype(np.result_type(x, np.complex64).char.lower() if x.dtype.kind == "f" else "c8") for x in (Z, W)]
    check_jit(arithmetic, *single, X.astype("f4"), rounding=4e-6)
    check_jit(lambda z, x: (z * x, z * np.float32(2), z + 2j, anp.real(z) * x, z * 0.1), single[0], X, rounding=1e-6)


def test_numbers_among_the_arguments():
    """A Python number takes the precision of the array, and a number of NumPy's keeps its own."""

    def fun(x, c, s):
        return x * c, c * 2, x * s, x + 1j * s

    jitted = mpiad.jit(fun, strict=True)
    for c in (1j, 2.5 - 1j, np.complex64(1 - 1j), np.complex128(2j)):
        for s in (0.5, 0.25):
            for _ in range(2):
                assert_same(jitted(X.astype("f4"), c, s), fun(X.astype("f4"), c, s), 1e-6)


def test_functions_that_numpy_runs():
    """Those that aren't defined by real and imaginary parts, beside others that are."""
    special = np.array([complex(np.inf, np.nan), 0, complex(1e308, 1e308), complex(0, -np.inf), np.nan, 1, 2j])

    def fun(z):
        compared = z == z, z != 1, np.isnan(z), np.isfinite(z), np.isinf(z), z.astype(bool)
        return *compared, np.maximum(z, 1j), z > 0, np.vdot(z, z), np.prod(z * 0.5), z.astype(np.complex64), np.sort(z) + z

    jitted = mpiad.jit(fun, strict=True)
    with np.errstate(all="ignore"):
        for z in (Z, W, special):
            assert_same(jitted(z), fun(z), 1e-6)


def test_empty_arrays_and_numbers():
    check_jit(lambda z: (z * 1j, anp.sum(z), anp.conj(z) + 1), Z[:0])
    check_jit(lambda z: (z * 1j, anp.real(z**2), anp.abs(z)), np.array(1 - 2j))


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [7, 20_000], ids=["small", "large"])
def test_second_derivatives(n):
    z, v = (np.exp(1j * np.arange(n) * k) * np.linspace(1, 2, n) for k in (1, 2))

    def fun(z):
        return anp.sum(anp.real(z**3 * (1 + 2j) * anp.conj(z)) + anp.abs(anp.exp(z)))

    jitted, expected = mpiad.jit(fun, strict=True), mpiad.hvp(fun)(z, v)
    for _ in range(2):
        assert_same(mpiad.jit(mpiad.hvp(fun), strict=True)(z, v), expected)
        assert_same(mpiad.hvp(jitted)(z, v), expected)
        assert_same(mpiad.jvp(jitted, z, v), mpiad.jvp(fun, z, v))
        assert_same(mpiad.make_hvp(jitted)(z).product(np.stack([v, z]), batch=True)[0], expected)
    assert_same(mpiad.grad(jitted)(z), autograd.grad(fun)(z))


def test_transposes_by_dot_products(rng):
    """⟨w, J v⟩ = ⟨Jᵀ w, v⟩ without conjugation, for functions that aren't holomorphic too."""
    u, v, w = (rng.standard_normal(9) + 1j * rng.standard_normal(9) for _ in range(3))
    jitted = mpiad.jit(lambda z: z * anp.conj(z[::-1]) * 1j + anp.abs(z) * z, strict=True)
    for z in (u, 2 * u):
        pull, _ = mpiad.make_vjp(jitted)(z)
        forward = np.sum(w * mpiad.jvp(jitted, z, v)[1]).real
        assert abs(forward - np.sum(pull(w) * v).real) <= 1e-13 * np.sum(np.abs(w)) * 10


def test_large_sums_in_lanes(rng):
    z = rng.standard_normal(100_003) + 1j * rng.standard_normal(100_003)
    total = mpiad.jit(lambda z: anp.sum(z), strict=True)
    total(Z)
    assert abs(total(z) - np.sum(z)) <= 1e-12 * np.sum(np.abs(z))
    assert total(z) == total(z.copy())
