import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, assert_close, check
from arrays import each_array
from mpi4py import MPI

import mpiad


def around(size):
    """Return the rank that each rank of a ring receives from."""
    return [(rank - 1) % size for rank in range(size)]


@each_array
def test_arrays(rngs, rank, size, dtype, shape, layout):
    def fun(x):
        mpiad.mpi_send(x, (rank + 1) % size)
        return mpiad.mpi_recv(x, (rank - 1) % size)

    check(fun, reference.move([shape] * size, around(size)), arrays(rngs, shape, dtype, layout), rngs)


def test_ranks_with_shapes_of_their_own(rngs, rank, size):
    shapes = [(r + 1, 2) for r in range(size)]
    source = (rank - 1) % size

    def fun(x):
        mpiad.mpi_send(x, (rank + 1) % size)
        return mpiad.mpi_recv(np.empty(shapes[source]), source)

    check(fun, reference.move(shapes, around(size)), arrays(rngs, shapes), rngs)


def test_values_of_the_template_do_not_count(rank, size):
    def fun(x, like):
        mpiad.mpi_send(x, (rank + 1) % size)
        return mpiad.mpi_recv(like, (rank - 1) % size) ** 2

    like = np.array([np.nan, np.inf])
    gradients = mpiad.make_vjp(fun, (0, 1))(np.full(2, 1.0 + rank), like)[0](np.ones(2))
    assert_close(gradients[0], np.full(2, 2.0 + 2 * rank), "f8")
    assert_close(gradients[1], np.zeros(2), "f8")


def test_result_is_new_memory(rank, size):
    x = np.ones(3)
    mpiad.mpi_send(x, (rank + 1) % size)
    assert not np.shares_memory(mpiad.mpi_recv(x, (rank - 1) % size), x)


@pytest.mark.parametrize("nobody", [None, MPI.PROC_NULL], ids=["none", "proc-null"])
def test_no_sender(rngs, rank, size, nobody):
    program = reference.move([(2, 3)] * size, [None] * size)
    check(lambda x: mpiad.mpi_recv(x, nobody), program, arrays(rngs, (2, 3)), rngs)
    assert mpiad.mpi_recv(np.int32(5), nobody).dtype == "i4"


def test_any_source(rngs, rank, size):
    """The loss is the same whoever comes first; each cotangent must go back to the rank that it belongs to."""
    xs, vs = arrays(rngs, (3,)), arrays(rngs, (3,))

    def fun(x):
        mpiad.mpi_send(x, 0, tag=5)
        if rank == 0:
            return sum(anp.sum(mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=5) ** 3) for _ in range(size))

    value, gradient = mpiad.value_and_grad(fun)(xs[rank])
    assert value == pytest.approx(sum(np.sum(x**3) for x in xs), rel=1e-14)
    assert_close(gradient, 3 * xs[rank] ** 2, "f8")
    assert_close(mpiad.hvp(fun)(xs[rank], vs[rank]), 6 * xs[rank] * vs[rank], "f8")


def test_tangents_from_any_source(rngs, rank, size):
    xs, vs = arrays(rngs, (3,)), arrays(rngs, (3,))

    def fun(x):
        mpiad.mpi_send(x, size - 1, tag=5)
        mpiad.mpi_send(2 * x, size - 1, tag=5)
        if rank == size - 1:
            return sum(mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=5) ** 2 for _ in range(2 * size))
        return x

    value, tangent = mpiad.make_jvp(fun)(xs[rank])(vs[rank])
    last = rank == size - 1
    assert_close(value, sum(5 * x**2 for x in xs) if last else xs[rank], "f8")
    assert_close(tangent, sum(10 * x * v for x, v in zip(xs, vs)) if last else vs[rank], "f8")


def test_any_tag(rngs, rank, size):
    """In the order sent, between receives of named tags; the replies are told apart by tag and number."""
    xs, ws = arrays(rngs, (5,)), arrays(rngs, (5,))
    after, before = (rank + 1) % size, (rank - 1) % size

    def fun(x):
        for entry, tag in zip(x, (4, 9, 4, 9, 4)):
            mpiad.mpi_send(entry, after, tag=tag)
        got = [mpiad.mpi_recv(0.0, before, tag=tag) for tag in (MPI.ANY_TAG, 4, MPI.ANY_TAG, MPI.ANY_TAG, 4)]
        # Messages 1, 3, 2, 4, 5: the second receive takes the next with tag 4.
        return sum(w * y**2 for w, y in zip(ws[rank], got))

    order = np.argsort([0, 2, 1, 3, 4])
    assert_close(mpiad.grad(fun, objective="sum")(xs[rank]), 2 * ws[after][order] * xs[rank], "f8")


def test_any_source_and_any_tag(rngs, rank, size):
    xs = arrays(rngs, (2,))

    def fun(x):
        for entry in x:
            mpiad.mpi_send(entry, size - 1, tag=10 + rank)
        if rank == size - 1:
            return sum(mpiad.mpi_recv(0.0, MPI.ANY_SOURCE, tag=MPI.ANY_TAG) ** 3 for _ in range(2 * size))

    assert_close(mpiad.grad(fun, root=size - 1)(xs[rank]), 3 * xs[rank] ** 2, "f8")


@pytest.mark.parametrize(
    "sent, like, dtype",
    # Three singles and one byte are no whole number of doubles.
    [((2,), (3,), "f8"), ((0,), (2,), "f8"), ((3,), (3,), "f4"), ((1,), (2,), "?")]
    + [((length,), (2,), "f8") for length in (3, 50_000)],
    ids=str,
)
def test_template_of_another_size(rank, size, sent, like, dtype):
    mpiad.mpi_send(np.ones(sent, dtype), (rank + 1) % size, tag=4)
    text = rf"mpi_recv: rank {(rank - 1) % size} sent .* bytes with tag 4, but .*shape \({like[0]},\) and dtype float64"
    with pytest.raises(ValueError, match=text):
        mpiad.mpi_recv(np.ones(like), (rank - 1) % size, tag=4)
    mpiad.mpi_barrier()
    mpiad.mpi_send(1.0 * rank, (rank + 1) % size, tag=4)
    assert mpiad.mpi_recv(0.0, (rank - 1) % size, tag=4) == (rank - 1) % size


def test_traced_template_of_another_dtype(rank, size):
    def fun(x):
        mpiad.mpi_send(np.ones(2, "f4"), (rank + 1) % size)
        return mpiad.mpi_recv(x, (rank - 1) % size)

    with pytest.raises(ValueError, match=r"mpi_recv: rank \d sent .*shape \(2,\) and dtype float64: 16 bytes"):
        mpiad.make_vjp(fun)(np.ones(2))
    mpiad.reset()


def test_missing_template():
    wrong = [(None, "NoneType"), ([1.0], "list"), ("a", "str"), (np.array(["a"]), "<U1"), (np.float16(1), "float16")]
    for like, got in wrong:
        with pytest.raises(TypeError, match=f"mpi_recv: like .*an array or number of dtype.*got .*{got}"):
            mpiad.mpi_recv(like, 0)


def test_sender_that_is_not_there(size):
    allowed = rf"a rank from 0 to {size - 1} or MPI.PROC_NULL or MPI.ANY_SOURCE"
    for source in (size, -7):
        with pytest.raises(ValueError, match=f"mpi_recv: source must be {allowed}.*, but got {source}"):
            mpiad.mpi_recv(1.0, source)
    with pytest.raises(TypeError, match=f"mpi_recv: source must be {allowed}, but got float 0.0"):
        mpiad.mpi_recv(1.0, 0.0)
    with pytest.raises(ValueError, match="mpi_recv: tag must be .* or MPI.ANY_TAG, but got -9"):
        mpiad.mpi_recv(1.0, 0, tag=-9)


@pytest.mark.mpi(min_size=2)
def test_a_refused_message_from_anyone_is_counted(rank, size):
    def fun(x):
        mpiad.mpi_send(x, (rank + 1) % size, tag=6)
        return anp.sum(mpiad.mpi_recv(x, (rank - 1) % size, tag=6) ** 2)

    mpiad.mpi_send(np.ones(5), (rank + 1) % size, tag=6)
    with pytest.raises(ValueError, match=rf"rank {(rank - 1) % size} sent"):
        mpiad.mpi_recv(np.ones(2), MPI.ANY_SOURCE, tag=6)
    # Without the count its adjoint would wait for another message's answer.
    x = np.arange(2.0) + rank
    assert_close(mpiad.grad(fun, objective="sum")(x), 2 * x, "f8")
