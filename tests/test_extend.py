"""Operators of the user's own: bare mpi4py inside, recorded always, at any order."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import ForeignTraceError, UnfinishedMessagesError
from mpiad.extend import custom_operator, defadjoint, defjvp, defjvp_together, defvjp, defvjp_together
from mpiad.testing import check_adjoint, check_grads

COMM = MPI.COMM_WORLD.Dup()
RIGHT, LEFT = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size


def shift(x, dest, source):
    """Send to one neighbour and receive from the other, with mpi4py alone."""
    got = np.empty_like(x)
    MPI.Request.Waitall([COMM.Irecv(got, source, 3), COMM.Isend(x, dest, 3)])
    return got


def shift_operator():
    """Return a ring shift with its adjoint."""
    operator = custom_operator(lambda x: shift(x, RIGHT, LEFT))
    defadjoint(operator, lambda y: shift(y, LEFT, RIGHT))
    return operator


def inputs(rank_rng, size):
    """Return every rank's input."""
    return [rank_rng(r).standard_normal(4) for r in range(size)]


def test_a_linear_operator_is_right_at_any_order(rank_rng, rank, size):
    operator = shift_operator()
    every = inputs(rank_rng, size)
    assert check_adjoint(operator, every[rank]) < 16
    loss = lambda x: mpiad.mpi_sum(anp.sum(operator(x**2) ** 2 * x))  # noqa: E731
    assert min(check_grads(loss, every[rank] + 2.0).values()) > 1.8

    def whole(x):
        x = x.reshape(size, -1)
        return anp.sum(anp.concatenate((x[-1:], x[:-1])) ** 4 * x)

    expected = autograd.grad(whole)(np.concatenate(every)).reshape(size, -1)[rank]
    np.testing.assert_allclose(mpiad.grad(loss)(every[rank]), expected, rtol=1e-12)


def test_it_is_visited_where_nothing_depends_on_it(rank, size):
    operator, x = shift_operator(), np.arange(3.0) + rank

    def loss(x):
        # Only the last rank uses what it received; the others' adjoints must take part all the same.
        y = operator(x)
        return anp.sum(y**2) if rank == size - 1 else 0.0

    expected = 2 * x if rank == (size - 2) % size else np.zeros(3)
    np.testing.assert_array_equal(mpiad.grad(loss, objective="sum")(x), expected)


def test_it_is_visited_where_its_input_is_not_traced(rank, size):
    operator, x = shift_operator(), np.arange(3.0) + rank

    def loss(x):
        y = operator(x if rank == 0 else np.ones(3))
        return anp.sum(y**2 * x)

    g = mpiad.grad(loss, objective="sum")(x)
    received = np.arange(3.0) if LEFT == 0 else np.ones(3)
    expected = received**2
    if rank == 0:
        right = np.arange(3.0) + RIGHT
        expected = expected + 2 * x * right
    np.testing.assert_allclose(g, expected, rtol=1e-14)


def test_rules_for_several_arguments(rng, rank):
    product = custom_operator(lambda a, b, weight=1.0: COMM.allreduce(float(weight * a @ b)))
    total = lambda g: mpiad.mpi_allreduce(g)  # noqa: E731
    defvjp(
        product,
        lambda ans, a, b, weight=1.0: lambda g: total(g) * b * weight,
        lambda ans, a, b, weight=1.0: lambda g: total(g) * a * weight,
    )
    defjvp(
        product,
        lambda g, ans, a, b, weight=1.0: mpiad.mpi_allreduce(anp.sum(g * b)) * weight,
        lambda g, ans, a, b, weight=1.0: mpiad.mpi_allreduce(anp.sum(g * a)) * weight,
    )
    together = custom_operator(lambda a, b: COMM.allreduce(float(a @ b)))
    defvjp_together(together, lambda ans, a, b: lambda g: (lambda s: (s * b, s * a))(total(g)))
    a, b = rng.standard_normal(3), rng.standard_normal(3)
    everything = COMM.allreduce(a @ b)
    for operator, factor in ((product, 2.0), (together, 1.0)):
        options = {"weight": 2.0} if factor == 2.0 else {}
        found = mpiad.grad(lambda a, b, f=operator, o=options: f(a, b, **o) ** 2, (0, 1))(a, b)
        np.testing.assert_allclose(found[0], 2 * factor**2 * everything * b, rtol=1e-13)
        np.testing.assert_allclose(found[1], 2 * factor**2 * everything * a, rtol=1e-13)
    assert min(check_grads(lambda a, b: product(a, b) ** 3, a, b, argnum=(0, 1)).values()) > 1.8


def test_a_body_is_one_node():
    calls = []

    def body(x):
        calls.append(type(x))
        for _ in range(3):
            x = mpiad.mpi_allreduce(x) / COMM.size
        return x

    operator = custom_operator(body)
    defadjoint(operator, body)
    np.testing.assert_allclose(mpiad.grad(lambda x: anp.sum(operator(x) ** 2))(np.ones(2)), np.full(2, 2.0 / COMM.size))
    # Forward once and backward once, both on plain arrays.
    assert calls == [np.ndarray, np.ndarray]


def test_a_traced_variable_from_outside_is_refused():
    def loss(x):
        operator = custom_operator(lambda y: y * x)
        defadjoint(operator, lambda y: y)
        return anp.sum(operator(np.ones(2)))

    with pytest.raises(TypeError, match="uses a traced variable of an enclosing function"):
        mpiad.grad(loss)(np.ones(2))


def test_one_tangent_rule_for_all_arguments(rng):
    product = custom_operator(lambda a, b: COMM.allreduce(float(a @ b)))
    calls = []

    def rule(gs, ans, a, b):
        calls.append([g is None for g in gs])
        parts = [anp.sum(g * other) for g, other in zip(gs, (b, a)) if g is not None]
        return mpiad.mpi_allreduce(sum(parts))

    defjvp_together(product, rule)
    a, b, v = rng.standard_normal((3, 3))
    value, tangent = mpiad.make_jvp(product, (0, 1))(a, b)((v, 2 * v))
    np.testing.assert_allclose(tangent, COMM.allreduce(v @ b + 2 * a @ v), rtol=1e-13)
    assert mpiad.make_jvp(product)(a, b)(v)[1] == pytest.approx(COMM.allreduce(v @ b))
    assert calls == [[False, False], [False, True]]


@pytest.mark.mpi(min_size=2)
def test_an_exception_between_messages_in_a_body_marks_the_communicator(rank, size):
    def body(x):
        mpiad.mpi_send(x, RIGHT)
        raise KeyError("between send and receive")

    operator = custom_operator(body)
    defadjoint(operator, body)
    with pytest.raises(KeyError):
        mpiad.grad(lambda x: anp.sum(operator(x)))(np.ones(2))
    with pytest.raises(UnfinishedMessagesError, match="left an operator in which messages were under way"):
        mpiad.mpi_allreduce(1.0)
    mpiad.reset()
    assert mpiad.mpi_allreduce(1.0) == size


def test_operators_without_rules_and_rules_without_operators():
    operator = custom_operator(lambda x: x)
    assert operator(3.0) == 3.0
    with pytest.raises(NotImplementedError, match="has no adjoint"):
        mpiad.grad(lambda x: anp.sum(operator(x)))(np.ones(2))
    with pytest.raises(NotImplementedError, match="has no tangent"):
        mpiad.jvp(operator, np.ones(2), np.ones(2))
    for rule in (defvjp, defjvp, defvjp_together, defjvp_together, defadjoint):
        with pytest.raises(TypeError, match=f"{rule.__name__}: expected an operator made by"):
            rule(np.sin, lambda *args: None)


def test_plain_autograd_runs_it_in_order_and_is_refused_out_of_order():
    operator, x = shift_operator(), np.arange(3.0) + COMM.rank
    g = autograd.grad(lambda x: anp.sum(operator(operator(x)) ** 2))(x)
    np.testing.assert_allclose(g, 2 * x, rtol=1e-14)

    def crossed(x):
        first = operator(x)
        operator(x)  # its adjoint never runs
        return anp.sum(first**2)

    with pytest.raises(ForeignTraceError, match="mpiad.grad"):
        autograd.grad(crossed)(x)


def test_bodies_get_contiguous_arrays(rank, size):
    # MPI takes contiguous buffers only: a transposed result has a Fortran-ordered cotangent, a sum one without strides.
    def moved(x, dest, source):
        got = np.empty_like(x)
        COMM.Sendrecv(x, dest, 5, got, source, 5)
        return got

    operator = custom_operator(lambda x: moved(x, RIGHT, LEFT))
    defadjoint(operator, lambda y: moved(y, LEFT, RIGHT))
    weights = [np.arange(6.0).reshape(3, 2) * (r + 1) for r in range(size)]
    g = mpiad.grad(lambda x: anp.sum(operator(x).T * weights[rank]), objective="sum")(np.ones((2, 3)))
    np.testing.assert_array_equal(g, weights[RIGHT].T)
    np.testing.assert_array_equal(mpiad.grad(lambda x: anp.sum(operator(x)), objective="sum")(np.ones(3)), np.ones(3))


def test_bodies_cannot_write_to_what_others_hold(rank):
    def in_place(x):
        x += 1.0
        return x

    x = np.arange(3.0)
    with pytest.raises(ValueError, match="read-only"):
        custom_operator(in_place)(x)
    np.testing.assert_array_equal(x, np.arange(3.0))
    same = custom_operator(lambda x: x)
    out = same(x)
    out += 1.0  # the result is the caller's own
    np.testing.assert_array_equal(x, np.arange(3.0))


def test_results_and_cotangents_of_another_form_are_refused():
    with pytest.raises(TypeError, match="must return one array, a number or None, but returned tuple"):
        custom_operator(lambda x: (x, x))(np.ones(2))
    bare, scalar, long = (custom_operator(lambda a, b: a + b) for _ in range(3))
    defvjp_together(bare, lambda ans, a, b: lambda g: g)
    defvjp(scalar, lambda ans, a, b: lambda g: g.sum())
    defvjp_together(long, lambda ans, a, b: lambda g: (g, g, g))
    for operator, text in (
        (bare, "must return a tuple with the cotangent of each of 2 argument.*returned ndarray"),
        (scalar, r"cotangent of argument 0 must have its shape, \(3,\), but the adjoint returned \(\)"),
        (long, r"each of 2 argument.*returned tuple of 3"),
    ):
        with pytest.raises(TypeError, match=text):
            mpiad.grad(lambda x, f=operator: anp.sum(f(x, x)))(np.ones(3))


def test_rules_of_none_give_zeros():
    operator = custom_operator(lambda x: x * 2.0)
    defvjp(operator, None)
    defjvp(operator, None)
    g = mpiad.grad(lambda x: anp.sum(operator(x) + x), objective="sum")(np.ones(2))
    np.testing.assert_array_equal(g, np.ones(2))
    np.testing.assert_array_equal(mpiad.jvp(operator, np.ones(2), np.ones(2))[1], np.zeros(2))
