"""Products over a few components are part of the loops around them; all others are NumPy's."""

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import check_jit

import mpiad
from mpiad.programs.fusion import Loop, Run

pytestmark = pytest.mark.serial

RNG = np.random.default_rng(7)
A, U = RNG.standard_normal((3, 3)), RNG.standard_normal((3, 9, 10))
M, W = RNG.standard_normal((9, 10, 2, 3)), RNG.standard_normal((9, 10, 3))


def products(a, u, w):
    flat = anp.reshape(u, (3, 90))
    return (
        anp.tensordot(a, u, axes=1), anp.tensordot(u, a, axes=([0], [1])), anp.dot(a, flat), anp.dot(w, a), w @ a[0],
        anp.inner(w, a), a @ flat, anp.matmul(M, w[..., None]), 2 * anp.tensordot(u, w, axes=([1, 2, 0], [0, 1, 2])),
    )  # fmt: skip


def notations(a, u, w):
    return (
        anp.einsum("ij,jxy->ixy", a, u), anp.einsum("i...,ji", u, a), anp.einsum("ab, ...b -> ...a", a, w),
        anp.einsum("ii,ixy->yx", A, u), anp.einsum("ixy,jxy->ij", u, u), anp.einsum("ij,ixy,xyj->xy", a, u, w),
        anp.einsum("xyij,xyj->xyi", M, w), anp.einsum("xyi->iyx", w), anp.einsum("ij,kj", a, a[:1]),
    )  # fmt: skip


@pytest.mark.parametrize("fun", [products, notations])
def test_values_and_gradients_are_numpys(fun):
    check_jit(fun, A, U, W, rounding=1e-12)


def test_single_precision_stays_single():
    check_jit(lambda u: anp.einsum("ij,jxy->ixy", np.float32(A), u) * 2, np.float32(U), rounding=2e-6, derivatives=False)


def steps_of(fun, *args):
    """Return the index spaces of a program's loops, and how many calls it makes."""
    jitted = mpiad.jit(fun, strict=True)
    np.testing.assert_allclose(jitted(*args), fun(*args), rtol=1e-12, atol=1e-13)
    (entry,) = jitted._cache.entries.values()
    steps = entry.replays.schedule.steps
    return [step.shape for step in steps if isinstance(step, Loop)], sum(isinstance(step, Run) for step in steps)


def turned(u, angle):
    c, s = anp.cos(angle), anp.sin(angle)
    return anp.sin(anp.tensordot(anp.array([[c, -s], [s, c]]), anp.exp(-(u**2)), axes=1)) + u


def test_what_comes_before_and_after_is_in_the_same_loop():
    """Each component of the field is computed once, though each one of the result is made of all."""
    assert steps_of(lambda u: anp.sin(anp.einsum("ij,jxy->ixy", A, anp.exp(-(u**2)))) + u, U) == ([(9, 10)], 0)
    assert steps_of(turned, U[:2], 0.3) == ([(9, 10)], 0)


def test_sums_over_components_and_over_all_are_in_the_same_loop():
    speed = lambda u: anp.max(anp.sqrt(anp.sum(anp.tensordot(A, u, axes=1) ** 2, axis=0)))  # noqa: E731
    assert steps_of(speed, U) == ([(9, 10)], 0)
    assert steps_of(lambda u: anp.sum(anp.tensordot(A, u, axes=1) ** 2, axis=(1, 2)), U) == ([(9, 10), ()], 0)


def test_the_reverse_pass_is_one_loop_more():
    loss = lambda a, u: anp.sum(anp.sin(anp.einsum("ij,jxy->ixy", a, u)))  # noqa: E731
    gradient = mpiad.jit(mpiad.grad(loss, (0, 1)), strict=True)
    for found, expected in zip(gradient(A, U), mpiad.grad(loss, (0, 1))(A, U), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    (entry,) = gradient._cache.entries.values()
    large = [step for step in entry.replays.schedule.steps if isinstance(step, Loop) and np.prod(step.shape) > 9]
    assert len(large) <= 2


def test_steps_of_a_small_system_have_loops_of_one_length():
    """A cotangent that steps add to isn't added up from the start in each of them."""

    def end(a, x):
        for _ in range(30):
            x = x + anp.tanh(a @ x)
        return anp.sum(x**2)

    gradient = mpiad.jit(mpiad.grad(end, (0, 1)), strict=True)
    for found, expected in zip(gradient(A / 9, U[:, 0, 0]), mpiad.grad(end, (0, 1))(A / 9, U[:, 0, 0]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    (entry,) = gradient._cache.entries.values()
    lengths = [text.text.count("\n") for text in entry.replays.texts if text is not None and len(text.boxes) == 0]
    assert np.median(lengths) < 100 and max(lengths) < 150


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [("ij,jx->ix", [(3, 9), (9, 90)]), ("xi,iy->xy", [(50, 3), (3, 50)]), ("ij,jx->ix", [(9, 3), (3, 90)])],
    ids=["a long sum", "no field", "many components"],
)
def test_long_products_stay_calls(subscripts, shapes):
    loops, calls = steps_of(lambda x, y: anp.einsum(subscripts, x, y) * 2, *[np.cos(np.ones(shape)) for shape in shapes])
    assert calls == 1 and len(loops) == 1
