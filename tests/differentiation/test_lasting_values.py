"""A traced value that outlives its trace is a constant: in a log, in later traces at any level, and outside."""

import gc
import weakref

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from one_process import assert_close, gradients, inputs

import mpiad

# What a function does beside returning a value happens at a trace only, and on traced arrays, where it is compiled.
pytestmark = pytest.mark.interpreted


def grad(fun):
    """Each rank's own loss counts."""
    return mpiad.grad(fun, objective="sum")


def logging_loss(log):
    """A loss that keeps itself, and an array and a received value on the way."""

    def loss(x):
        size = mpiad.mpi_size()
        right, left = (mpiad.mpi_rank() + 1) % size, (mpiad.mpi_rank() - 1) % size
        y = anp.sin(x)
        came = mpiad.mpi_exchange(y[:2], right, left)
        value = mpiad.mpi_allreduce(anp.sum(y**2))
        log.extend([value, y, came])
        return value

    return loss


@pytest.fixture
def logged(rank, size, rank_rng):
    """Values of an ended trace, and what they are as plain numbers."""
    xs, log = inputs(rank_rng, size), []
    mpiad.grad(logging_loss(log))(xs[rank])
    plain = [sum(np.sum(np.sin(x) ** 2) for x in xs), np.sin(xs[rank]), np.sin(xs[rank - 1][:2])]
    return log, plain


def test_outside_they_are_numbers(logged):
    log, plain = logged
    for kept, number in zip(log, plain):
        assert_close(mpiad.stop_gradient(kept), number)
        assert_close(mpiad.stop_gradient(kept * 2 + anp.sum(kept)), number * 2 + np.sum(number))
        assert_close(mpiad.mpi_exchange(kept, None, None), number * 0)
    assert_close(mpiad.mpi_allreduce(log[0]), plain[0] * mpiad.mpi_size())


@pytest.mark.interpreted
def test_a_log_of_losses_over_many_gradients(rank, size, rank_rng):
    """As in a training loop: each is kept, their sum is printed."""
    xs, log, x = inputs(rank_rng, size), [], None
    x = xs[rank]
    values = []
    for _ in range(5):
        log.append([])
        value, g = mpiad.value_and_grad(logging_loss(log[-1]))(x)
        values.append(value)
        x = x - 0.1 * g
    assert_close(np.array([mpiad.stop_gradient(kept[0]) for kept in log]), np.array(values))
    assert_close(mpiad.stop_gradient(sum(kept[0] for kept in log)), np.float64(sum(values)))


USES = {
    "first operand": lambda x, k: anp.sum(k * x[:2]),
    "second operand": lambda x, k: anp.sum(x[:2] * k),
    "in a sequence": lambda x, k: anp.sum(anp.concatenate([x[:2], k * anp.ones(2)]) ** 2),
    "stacked": lambda x, k: anp.sum(anp.stack([k * anp.ones(2), x[:2]]) ** 3),
    "alone": lambda x, k: anp.sum(anp.exp(k)) + anp.sum(x),
    "as exponent": lambda x, k: anp.sum((x[:2] ** 2) ** k),
    "communicated": lambda x, k: mpiad.mpi_allreduce(k * anp.sum(x)),
    "communicated alone": lambda x, k: mpiad.mpi_allreduce(k) * anp.sum(x),
    "as template": lambda x, k: anp.sum(mpiad.mpi_exchange(x[:2], None, None, like=k) * k) + anp.sum(x),
    "chosen": lambda x, k: anp.sum(anp.where(x[:2] > 0, k, x[:2] ** 2)),
    "compared": lambda x, k: anp.sum(x) if k > 1e6 else anp.sum(x**2),
}


def check_use(use, x, kept, number, differentiate):
    assert_close(differentiate(lambda z: USES[use](z, kept))(x), differentiate(lambda z: USES[use](z, number))(x))


@pytest.mark.parametrize("use", USES)
def test_in_a_later_trace(use, logged, rng):
    log, plain = logged
    check_use(use, rng.standard_normal(3), log[0], plain[0], grad)


@pytest.mark.parametrize("use", USES)
def test_in_a_later_tangent(use, logged, rng):
    log, plain = logged
    v = rng.standard_normal(3)
    check_use(use, rng.standard_normal(3), log[0], plain[0], lambda f: lambda x: mpiad.jvp(f, x, v)[1])


@pytest.mark.parametrize("use", USES)
def test_in_later_nested_traces(use, logged, rng):
    """At a level that its own trace didn't have, and below it."""
    log, plain = logged
    v = rng.standard_normal(3)
    check_use(use, rng.standard_normal(3), log[0], plain[0], lambda f: lambda x: mpiad.hvp(f, objective="sum")(x, v))

    def nested(f):
        return grad(lambda y: anp.sum(grad(lambda z: f(z) ** 2)(y) * v))

    check_use(use, rng.standard_normal(3), log[0], plain[0], nested)


@pytest.mark.parametrize("use", USES)
def test_of_an_inner_trace_in_the_outer(use, rank, size, rng):
    """The inner trace has ended while the outer one is open: a constant, also where it depends on the outer variable.

    Its own level is then one that no open trace has, or that a later inner trace has.
    """
    x, v = rng.standard_normal(3), rng.standard_normal(3)

    def outer(z, plain):
        log = []
        mpiad.grad(logging_loss(log))(mpiad.stop_gradient(z))
        kept = mpiad.stop_gradient(log[0]) if plain else log[0]
        later = grad(lambda w: USES[use](w, kept))(z)
        return USES[use](z, kept) + anp.sum(later * v)

    assert_close(grad(lambda z: outer(z, False))(x), grad(lambda z: outer(z, True))(x))


def test_of_an_inner_trace_that_follows_the_outer_variable(rank, size, rank_rng):
    """What the inner trace computed is constant to it, but the outer variable's part is still traced by the outer."""
    xs = inputs(rank_rng, size)

    def program(x):
        log = []
        g = mpiad.grad(logging_loss(log))(x)
        return mpiad.mpi_allreduce(anp.sum(log[1] * x)) * log[0] + anp.sum(g)

    def whole(zs):
        total = sum(anp.sum(anp.sin(z) ** 2) for z in zs)
        return sum(anp.sum(anp.sin(z) * z) for z in zs) * total + anp.sum(2 * anp.sin(zs[0]) * anp.cos(zs[0]))

    value, g = mpiad.value_and_grad(program)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])


@pytest.mark.parametrize("use", [use for use in USES if "communicated" not in use and use != "as template"])
def test_in_a_later_trace_of_plain_autograd(use, logged, rng):
    log, plain = logged
    check_use(use, rng.standard_normal(3), log[0], plain[0], autograd.grad)


def test_a_later_result_may_be_a_lasting_value(logged):
    """Returned from a later trace as it is."""
    log, plain = logged
    value, g = mpiad.value_and_grad(lambda x: log[0])(np.ones(3))
    assert_close(value, plain[0])
    assert_close(g, np.zeros(3))
    value, tangent = mpiad.jvp(lambda x: log[1], np.ones(3), np.ones(3))
    assert_close(value, plain[1])
    assert_close(tangent, np.zeros_like(plain[1]))


def test_a_later_variable_may_be_a_lasting_value(logged):
    log, plain = logged
    assert_close(grad(lambda y: anp.sum(y**2))(log[1]), 2 * plain[1])
    g = grad(lambda tree: anp.sum(tree["y"] ** 2 * tree["k"]))({"y": log[1], "k": log[0]})
    assert_close(g["y"], 2 * plain[1] * plain[0])
    assert_close(g["k"], np.sum(plain[1] ** 2))


@pytest.mark.unguarded
def test_a_kept_loss_holds_no_part_of_the_graph():
    """A training run that logs its losses must not keep its arrays, on no rank."""

    log, gone = [], []

    def loss(x):
        big = x * 2.0
        gone.append(weakref.ref(mpiad.stop_gradient(big)))
        log.append(anp.dot(big, big))
        log.append(anp.dot(big, np.ones(1000)))  # nothing depends on this one
        return log[0]

    gc.disable()
    try:
        mpiad.grad(loss)(np.ones(1000))
        assert gone[0]() is None
    finally:
        gc.enable()
    assert_close(mpiad.stop_gradient(log[0]), np.float64(4000.0))
