"""Derivatives of compiled functions as compiled operations: any order and mode, without a call of the function."""

import gc
import sys

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from one_process import assert_close, flat, pieces

import mpiad
from mpiad.programs.operation import CompiledOperation
from mpiad.programs.replay import Replay
from mpiad.timestepping import scan

pytestmark = pytest.mark.unguarded  # watched calls are interpreted


def local(x, y):
    return anp.sum(y**3 * anp.sin(x) + anp.exp(-x * y))


def loss_on(rank, size):
    """Return the loss, a sum over the ranks of a function of the own block and the previous rank's."""

    def loss(x):
        y = mpiad.mpi_exchange(anp.cos(x), (rank + 1) % size, (rank - 1) % size)
        return mpiad.mpi_allreduce(local(x, y))

    return loss


def whole(count):
    """Return the same loss as a function of all ranks' blocks, one after the other, for plain autograd."""

    def loss(x):
        blocks = anp.reshape(x, (count, -1))
        return sum(local(blocks[r], anp.cos(blocks[r - 1])) for r in range(count))

    return loss


def calls_of(fun, call):
    """Return the result of a call, and how often it has called a function."""
    found = []

    def note(frame, event, _):
        if event == "call" and frame.f_code is fun.__code__:
            found.append(frame)

    sys.setprofile(note)
    try:
        made = call()
    finally:
        sys.setprofile(None)
    return made, len(found)


# Each as a function of a loss, its derivatives (`grad`, `hvp`), a point and a direction.
COMPOSITIONS = {
    "gradient": lambda f, grad, hvp, x, v: grad(f)(x),
    "product": lambda f, grad, hvp, x, v: hvp(f)(x, v),
    "gradient of a gradient": lambda f, grad, hvp, x, v: grad(lambda x: anp.sum(anp.sin(grad(f)(x))))(x),
    "gradient of a product": lambda f, grad, hvp, x, v: grad(lambda x: anp.sum(anp.sin(hvp(f)(x, v))))(x),
    "product of a gradient": lambda f, grad, hvp, x, v: hvp(lambda x: anp.sum(anp.sin(grad(f)(x))))(x, v),
    "third": lambda f, grad, hvp, x, v: grad(lambda x: anp.sum(grad(lambda x: anp.sum(grad(f)(x) ** 2))(x) * v))(x),
}


def check_composition(name, loss, reference, xs, vs, rank):
    """Compare a composition of derivatives with that of a reference for all ranks; only the first call may call `loss`."""

    def hvp_by_autograd(f):
        return lambda x, v: autograd.grad(lambda x: anp.sum(autograd.grad(f)(x) * v))(x)

    of, inner = COMPOSITIONS[name], mpiad.jit(loss, strict=True)
    expected = pieces(of(reference, autograd.grad, hvp_by_autograd, flat(xs), flat(vs)), xs)[rank]
    grad = lambda f: mpiad.grad(f, objective="root" if f is inner else "sum")  # noqa: E731
    hvp = lambda f: mpiad.hvp(f, objective="root" if f is inner else "sum")  # noqa: E731
    for number in range(3):
        found, count = calls_of(loss, lambda: of(inner, grad, hvp, xs[rank], vs[rank]))
        assert_close(found, expected, rounding=1e-10)
        assert number == 0 or count == 0


@pytest.mark.few(4)
@pytest.mark.parametrize("length", [3, 1500])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_up_to_order_three(name, length, rank, size, rank_rng):
    xs, vs = ([rank_rng(2 * r + k).standard_normal(length) for r in range(size)] for k in range(2))
    check_composition(name, loss_on(rank, size), whole(size), xs, vs, rank)


@mpiad.extend.custom_operator
def squared(x):
    return np.array(x) ** 2


mpiad.extend.defvjp(squared, lambda ans, x: lambda g: 2.0 * g * x)
mpiad.extend.defjvp(squared, lambda g, ans, x: 2.0 * g * x)


def gathered(x):
    root = mpiad.mpi_size() - 1
    made = mpiad.mpi_gather(x, axis=0, root=root)
    return made if mpiad.mpi_rank() == root else x + anp.sum(made)


# Operations whose results only a run can tell, on some ranks at least, and what they return of all ranks' arrays.
KNOWN_IN_A_RUN = {
    "allgather": (lambda x: mpiad.mpi_allgather(x, axis=0), lambda xs, rank: anp.concatenate(xs)),
    "gather": (gathered, lambda xs, rank: anp.concatenate(xs) if rank == len(xs) - 1 else xs[rank]),
    "bcast": (lambda x: mpiad.mpi_bcast(x, root=mpiad.mpi_size() - 1), lambda xs, rank: xs[-1]),
    "operator": (squared, lambda xs, rank: xs[rank] ** 2),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["product", "gradient of a product", "third"])
@pytest.mark.parametrize("kind", KNOWN_IN_A_RUN)
def test_derivatives_of_what_only_a_run_can_tell(kind, name, rank, size, rank_rng, monkeypatch):
    """The first call is interpreted, and the programs of its derivatives continue as it did."""
    message, whole_message = KNOWN_IN_A_RUN[kind]
    xs, vs = ([rank_rng(2 * r + k).standard_normal(3 + r * (kind != "bcast")) for r in range(size)] for k in range(2))

    def loss(x):
        y = message(anp.cos(x))
        return mpiad.mpi_allreduce(anp.sum(anp.sin(anp.sum(x[:, None] * y, axis=1)) ** 2))

    def reference(z):
        blocks = pieces(z, xs)
        cosines = [anp.cos(block) for block in blocks]
        ys = [whole_message(cosines, r) for r in range(size)]
        return sum(anp.sum(anp.sin(anp.sum(x[:, None] * y, axis=1)) ** 2) for x, y in zip(blocks, ys))

    def refused(*_):
        raise AssertionError("the functions of a program were called one by one")

    monkeypatch.setattr(CompiledOperation, "_evaluated", refused)
    check_composition(name, loss, reference, xs, vs, rank)


@pytest.mark.few(3)
def test_lengths_of_other_ranks_change_between_second_derivatives(rank, size):
    """The program of this rank's shapes doesn't fit; the calls run in Python, with the messages that were made."""

    def loss(x):
        return mpiad.mpi_allreduce(anp.sum(anp.sin(x)[:, None] * anp.cos(mpiad.mpi_allgather(x, axis=0)) ** 2))

    def reference(z, xs):
        return sum(anp.sum(anp.sin(x)[:, None] * anp.cos(z) ** 2) for x in pieces(z, xs))

    compiled = mpiad.jit(loss, strict=True)
    for number, lengths in enumerate(3 * [[3, 4, 5]] + 3 * [[3, 6, 5]] + [[3, 6, 2], [3, 4, 5]]):
        xs = [np.linspace(0.1, 1.0 + r, lengths[r]) for r in range(size)]
        vs = [np.cos(np.arange(lengths[r]) + r) for r in range(size)]
        slope = autograd.grad(lambda z: reference(z, xs))  # noqa: B023
        expected = pieces(autograd.grad(lambda z: anp.sum(slope(z) * flat(vs)))(flat(xs)), xs)[rank]  # noqa: B023
        found, count = calls_of(loss, lambda: mpiad.hvp(compiled)(xs[rank], vs[rank]))  # noqa: B023
        assert_close(found, expected, rounding=1e-10)
        assert number not in (2, 5) or count == 0  # the second call with other lengths was traced again
        linear = mpiad.linearize(mpiad.grad(compiled))(xs[rank])
        assert_close(linear.vjp(vs[rank]), expected, rounding=1e-10)


@pytest.mark.parametrize("length", [3, 1500])
def test_plain_autograd_runs_the_program(length, rank):
    def fun(x):
        return anp.sin(x) ** 2 * x, anp.sum(anp.exp(-x))

    def weighted(of):
        return lambda x: anp.sum(of(x)[0] * np.arange(length)) + 3.0 * of(x)[1]

    compiled = mpiad.jit(fun, strict=True)
    x, v = np.linspace(-1.0, 1.0, length) + rank, np.cos(np.arange(length) + rank)
    weights, sine = np.arange(length), np.sin(x)
    slope = weights * (np.sin(2 * x) * x + sine**2) - 3.0 * np.exp(-x)
    curved = weights * (2.0 * np.cos(2 * x) * x + 2.0 * np.sin(2 * x)) + 3.0 * np.exp(-x)
    derivatives = {
        "reverse": (lambda of: autograd.grad(weighted(of))(x), slope),
        "reverse over reverse": (
            lambda of: autograd.grad(lambda x: anp.sum(autograd.grad(weighted(of))(x) * v))(x),
            curved * v,
        ),
        "forward": (lambda of: autograd.make_jvp(weighted(of))(x)(v)[1], slope @ v),
        "forward over reverse": (lambda of: autograd.make_jvp(autograd.grad(weighted(of)))(x)(v)[1], curved * v),
        "around this library": (
            lambda of: autograd.grad(lambda x: anp.sum(mpiad.grad(weighted(of), objective="sum")(x) * v))(x),
            curved * v,
        ),
    }
    for derivative, expected in derivatives.values():
        for number in range(2):
            found, count = calls_of(fun, lambda: derivative(compiled))  # noqa: B023
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
            assert number == 0 or count == 0


def test_a_cotangent_of_a_later_derivative(rank, size, rank_rng):
    """The reverse pass of a finished trace is differentiated with respect to its cotangent."""
    xs = [rank_rng(r).standard_normal(4) for r in range(size)]
    vjp, _ = mpiad.make_vjp(mpiad.jit(lambda x: mpiad.mpi_allreduce(anp.sin(x)), strict=True))(xs[rank])
    weights, g = np.cos(np.arange(4.0) + rank), np.arange(4.0) + rank
    # x̄ = cos(x) Σ_s g_s, and Σ_r weights_r x̄_r² has the gradient 2 Σ_s weights_s cos(x_s) x̄_s.
    total = sum(np.arange(4.0) + r for r in range(size))
    expected = sum(2 * np.cos(np.arange(4.0) + r) * np.cos(xs[r]) ** 2 * total for r in range(size))
    found = mpiad.grad(lambda g: anp.sum(weights * vjp(g) ** 2), objective="sum")(g)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_residuals_keep_their_memory_until_they_are_dropped(rank):
    """Several calls wait for their reverse passes, which run in another order, and more than once."""
    compiled = mpiad.jit(lambda x: anp.sin(x) * anp.exp(anp.cos(x)), strict=True)
    x, g = np.linspace(0.0, 1.0, 2000), np.cos(np.arange(2000.0))
    slope = lambda x: np.exp(np.cos(x)) * (np.cos(x) - np.sin(x) ** 2)  # noqa: E731
    pulls = [mpiad.make_vjp(compiled)(x + k)[0] for k in range(3)]
    for k in (1, 0, 2, 1):
        np.testing.assert_allclose(pulls[k](g), slope(x + k) * g, rtol=1e-12, atol=1e-13)
    del pulls[1]
    pulls.append(mpiad.make_vjp(compiled)(x + 7)[0])
    for pull, k in zip(pulls, (0, 2, 7)):
        np.testing.assert_allclose(pull(g), slope(x + k) * g, rtol=1e-12, atol=1e-13)
    # Memory is returned without the garbage collector, and one replay serves all later calls.
    pulls.clear()
    gc.collect()
    gc.disable()
    try:
        count = sum(type(x) is Replay for x in gc.get_objects())
        for k in range(20):
            mpiad.make_vjp(compiled)(x + k)[0](g)
        assert sum(type(x) is Replay for x in gc.get_objects()) == count
    finally:
        gc.enable()


def test_results_never_share_the_memory_of_residuals(rank):
    """The caller may change values and cotangents in place."""
    compiled = mpiad.jit(lambda x: anp.exp(x), strict=True)  # the adjoint reads the result
    x = np.linspace(0.0, 1.0, 2000) + rank
    vjp, value = mpiad.make_vjp(compiled)(x)
    value[:] = 0.0
    vjp(np.ones(2000))[:] = 0.0
    np.testing.assert_allclose(vjp(np.ones(2000)), np.exp(x), rtol=1e-14)


def test_results_that_are_lists_or_one_reshaped_array(rank):
    """The reverse pass of np.split has cotangents in a list; np.kron's residuals are views of one array."""
    x, m = np.linspace(0.5, 1.5, 4) + rank, np.arange(4.0).reshape(2, 2) + 1.0 + rank
    split = mpiad.jit(lambda x: anp.split(x, 2)[0] ** 3 * anp.split(x, 2)[1])
    product = mpiad.jit(lambda m: anp.kron(m, m * m))
    a, b = np.split(x, 2)
    gradient = mpiad.grad(lambda x: anp.sum(split(x)), objective="sum")
    for _ in range(2):
        # The gradient is (3 a² b, a³), and the sum of its squares has the gradient (36 a³ b² + 6 a⁵, 18 a⁴ b).
        found = mpiad.grad(lambda x: anp.sum(gradient(x) ** 2), objective="sum")(x)
        np.testing.assert_allclose(found, np.concatenate([36 * a**3 * b**2 + 6 * a**5, 18 * a**4 * b]), rtol=1e-12)
        # The sum is s q with s = Σ m, q = Σ m². Along ones, its gradient q + 2 s m changes by 2 s + 2 s + 8 m.
        along = mpiad.make_hvp(lambda m: anp.sum(product(m)), objective="sum")(m)[2](np.ones((2, 2)))
        np.testing.assert_allclose(along, 4 * m.sum() + 8 * m, rtol=1e-12)


def _slices(u, first):
    """Uses overlapping parts of a variable; some of their cotangents are constant."""
    inner = 0.5 * u[:, 1:-1] + 0.25 * (u[:, 2:] + u[:, :-2])
    f = anp.concatenate([first[None], u, first[None] * u[:1]])
    return anp.concatenate([u[:, :1], inner * f[2:, 1:-1] + f[:-2, 1:-1], u[:, -1:]], axis=1)


@pytest.mark.few(1)
@pytest.mark.one_rank
@pytest.mark.parametrize("loop", [False, True])
def test_derivatives_of_slices_are_compiled(monkeypatch, loop, rng):
    u, v, first = rng.standard_normal((3, 4)), rng.standard_normal((3, 4)), rng.standard_normal(4)

    def evaluated(*args):
        raise AssertionError("an operation of a program is called by itself")

    monkeypatch.setattr(CompiledOperation, "_evaluated", evaluated)

    def total(step):
        if loop:
            return lambda u: anp.sum(anp.tanh(scan(lambda u, k: step(u, first), u, 7)))
        return lambda u: anp.sum(anp.tanh(step(u, first)))

    compiled, plain = total(mpiad.jit(_slices, strict=True)), total(_slices)
    product, other = mpiad.hvp(plain, objective="sum")(u, v), mpiad.linearize(plain)(u)
    for _ in range(3):
        np.testing.assert_allclose(mpiad.hvp(compiled, objective="sum")(u, v), product, rtol=1e-11)
        ours = mpiad.linearize(compiled)(u)
        np.testing.assert_allclose(ours.jvp(v), other.jvp(v), rtol=1e-12)
        np.testing.assert_allclose(ours.vjp(1.5), other.vjp(1.5), rtol=1e-12)
