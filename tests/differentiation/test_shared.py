"""`shared=True`: one variable of which every rank holds a copy gets the whole derivative, whatever is done with it."""

import re

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from one_process import assert_close, gradients, inputs, objective

import mpiad
from mpiad.pytrees import flatten
from mpiad.testing import check_grads
from mpiad.transport.watch import switch, watch_settings
from mpiad.transport.watch.watch_settings import Settings

THETA = np.array([0.3, -1.1, 0.7])
KINDS = ["root", "sum", "mean"]


def model(theta, x):
    return anp.sum(anp.sin(theta * anp.sum(x)) ** 2 + theta[0] * theta[1:2])


def broadcasts(theta, x, rank, size):
    theta = mpiad.mpi_bcast(theta, root=size - 1)
    return mpiad.mpi_allreduce(model(theta, x)) ** 2 * (rank + 1.0)


def uses_directly(theta, x, rank, size):
    return mpiad.mpi_allreduce(model(theta, x)) ** 2 * (rank + 1.0)


def uses_on_some_ranks(theta, x, rank, size):
    here = model(theta, x) if rank % 2 == 0 else anp.sum(x)
    return mpiad.mpi_allreduce(here) ** 2 * (rank + 1.0)


def sends_from_one_rank(theta, x, rank, size):
    """The last rank's copy goes round the others; theirs serve as templates only."""
    theta = theta if rank == size - 1 else mpiad.mpi_recv(theta, rank + 1, tag=3)
    if rank > 0:
        mpiad.mpi_send(theta, rank - 1, tag=3)
    return mpiad.mpi_allreduce(model(theta, x)) ** 2 * (rank + 1.0)


def whole(theta, xs, kind, root, used):
    total = sum(model(theta, x) if used(r) else anp.sum(x) for r, x in enumerate(xs)) ** 2
    return objective([total * (r + 1.0) for r in range(len(xs))], kind, root)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", [broadcasts, uses_directly, uses_on_some_ranks, sends_from_one_rank])
def test_the_whole_derivative_on_every_rank(program, kind, rank, size, rank_rng):
    xs, root = inputs(rank_rng, size), size // 2
    used = (lambda r: r % 2 == 0) if program is uses_on_some_ranks else (lambda r: True)

    evaluate = mpiad.value_and_grad(program, objective=kind, shared=True, root=root)
    value, g = evaluate(THETA.copy(), xs[rank], rank, size)

    assert_close(value, whole(THETA, xs, kind, root, used))
    assert_close(g, gradients(lambda one: whole(one[0], xs, kind, root, used), [THETA])[0])
    assert len(set(MPI.COMM_WORLD.allgather(g.tobytes()))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_on_each_rank(kind, rank, size, rank_rng):
    """Nothing is reduced by the function: the usual form of training."""
    xs = inputs(rank_rng, size)
    g = mpiad.grad(model, objective=kind, shared=True)(THETA, xs[rank])
    expected = gradients(lambda one: objective([model(one[0], x) for x in xs], kind), [THETA])[0]
    assert_close(g, expected)


def test_nests_of_several_dtypes(rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (4,))
    parameters = {
        "weights": [np.linspace(0, 1, 8).reshape(2, 4), np.array([0.5, 2.0])],
        "bias": np.array([1.5, -0.5], np.float32),
        "rotation": np.array([0.3 + 0.4j]),
        "scale": 2.0,
        "layers": 2,
    }

    def loss(p, x):
        hidden = anp.tanh(anp.dot(p["weights"][0], x) + p["bias"])
        turned = anp.real(anp.sum(p["rotation"] ** p["layers"] * hidden))
        return p["scale"] * anp.sum(hidden * p["weights"][1]) ** 2 + turned

    def whole(zs):
        w, v, bias, rotation, scale = zs
        p = {"weights": [w, v], "bias": bias, "rotation": rotation, "scale": scale, "layers": 2}
        return sum(loss(p, x) for x in xs)

    g = mpiad.grad(loss, objective="sum", shared=True)(parameters, xs[rank])
    names = ("bias", "rotation", "scale")
    expected = gradients(whole, [*parameters["weights"], *(parameters[name] for name in names)])
    expected = {"weights": expected[:2], **dict(zip(names, expected[2:]))}

    assert_close(g["weights"][0], expected["weights"][0])
    assert_close(g["weights"][1], expected["weights"][1])
    assert_close(g["rotation"], expected["rotation"])
    assert_close(g["scale"], np.float64(expected["scale"]))
    assert g["bias"].dtype == np.float32
    assert_close(g["bias"], expected["bias"].astype(np.float32), rounding=1e-6)
    assert g["layers"] == 0


def test_shared_over_a_part_of_the_ranks(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    part = MPI.COMM_WORLD.Split(rank % 2, rank)
    g = mpiad.grad(model, objective="sum", shared=True, comm=part)(THETA, xs[rank])
    expected = gradients(lambda one: sum(model(one[0], x) for x in xs[rank % 2 :: 2]), [THETA])[0]
    assert_close(g, expected)
    part.Free()


def test_shared_beside_an_argument_of_each_rank(rank, size, rank_rng):
    """Two derivatives of one function: by the shared parameters, and by each rank's own data."""
    xs = inputs(rank_rng, size)
    by_theta = mpiad.grad(uses_directly, 0, shared=True)(THETA, xs[rank], rank, size)
    by_x = mpiad.grad(uses_directly, 1)(THETA, xs[rank], rank, size)
    expected = gradients(lambda zs: sum(model(zs[0], x) for x in zs[1:]) ** 2, [THETA, *xs])
    assert_close(by_theta, expected[0])
    assert_close(by_x, expected[1 + rank])


def energy(x):
    return sum(anp.sum(leaf**3) for leaf in flatten(x)[0])


DIFFERENT = {
    "lengths": lambda rank: np.ones(3 + rank),
    "dtypes": lambda rank: np.ones(2, np.float32 if rank else np.float64),
    "equal numbers of entries": lambda rank: np.ones((2, 3) if rank else (3, 2)),
    "one leaf of two": lambda rank: {"a": np.ones(2), "b": np.ones(5 - rank)},
    "equal sums of entries": lambda rank: [np.ones(1 + 2 * (rank % 2)), np.ones(3 - 2 * (rank % 2))],
    "forms": lambda rank: [np.ones(2)] * (1 + rank % 2),
}
SHARED = {"shared": True, "objective": "sum"}
CALLS = {
    "value_and_grad": lambda x: mpiad.value_and_grad(energy, **SHARED)(x),
    "jitted inside": lambda x: mpiad.grad(mpiad.jit(energy), **SHARED)(x),
    "jitted": lambda x: mpiad.jit(mpiad.value_and_grad(energy, **SHARED))(x),
    "hvp": lambda x: mpiad.hvp(energy, **SHARED)(x, x),
    "make_hvp": lambda x: mpiad.make_hvp(energy, **SHARED)(x),
    "jacobian": lambda x: mpiad.jacobian(energy, **SHARED)(x),
}


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize("different", DIFFERENT)
@pytest.mark.unguarded
def test_copies_of_different_shapes_raise_on_all_ranks(different, timeout, rank, size):
    before = watch_settings.present()
    if timeout:
        switch.apply(Settings(timeout=timeout))
    for name, call in CALLS.items():
        try:
            call(DIFFERENT[different](rank))
        except ValueError as error:
            assert re.search(r"on rank 0 .* rank 1|rank 0 gave .* rank 1 gave", str(error)), (name, error)
        else:
            pytest.fail(f"{name} raises nothing")
        assert mpiad.mpi_allreduce(1.0) == size, name
    switch.restore(before)


@pytest.mark.interpreted
def test_copies_are_compared_in_replays_too(size):
    evaluate = mpiad.jit(mpiad.value_and_grad(energy, **SHARED), strict=True)
    for x in (np.array([1.0, 2.0]), np.array([0.5, -1.0]), np.ones(3), np.array([3.0, 1.0])):
        value, g = evaluate(x)
        assert_close(value, size * np.sum(x**3))
        assert_close(g, 3 * size * x**2)


def arguments(theta, x, rank):
    """Return a mixed program: parameters of all ranks, one of them constant, and numbers of each rank's own."""
    parameters = {"theta": theta, "factor": 1.5, "power": 2}
    return parameters, {"x": x, "bias": 0.5 + rank}


def mixed(parameters, own):
    total = anp.sum(anp.sin(parameters["theta"] * anp.sum(own["x"])) * own["bias"]) ** parameters["power"]
    return mpiad.mpi_allreduce(total * parameters["factor"]) ** 2


def mixed_of(xs):
    def whole(zs):
        theta, factor, own = zs[0], zs[1], zip(zs[2 : 2 + len(xs)], zs[2 + len(xs) :])
        return sum(factor * anp.sum(anp.sin(theta * anp.sum(x)) * bias) ** 2 for x, bias in own) ** 2

    return whole


@pytest.mark.unguarded
def test_a_tuple_says_which_arguments_are_shared(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    args = arguments(THETA, xs[rank], rank)
    everything = [THETA, 1.5, *xs, *(0.5 + r for r in range(size))]
    value = mixed_of(xs)(everything)
    by_theta, by_factor, *by_own = gradients(mixed_of(xs), everything)
    for f in (mixed, mpiad.jit(mixed)):
        found, (shared, own) = mpiad.value_and_grad(f, (0, 1), shared=(True, False))(*args)
        assert_close(found, value)
        assert_close(shared["theta"], by_theta)
        assert_close(shared["factor"], np.float64(by_factor))
        assert shared["power"] == 0
        assert_close(own["x"], by_own[rank])
        assert_close(own["bias"], np.float64(by_own[size + rank]))
    args = arguments(THETA, rank + np.ones(2), rank)
    one, two = mpiad.grad(mixed, (0, 1), shared=(True, True))(*args), mpiad.grad(mixed, (0, 1), shared=True)(*args)
    assert all(np.array_equal(a, b) for a, b in zip(flatten(one)[0], flatten(two)[0]))
    one, two = mpiad.grad(mixed, (0, 1), shared=(False, False))(*args), mpiad.grad(mixed, (0, 1))(*args)
    assert all(np.array_equal(a, b) for a, b in zip(flatten(one)[0], flatten(two)[0]))


def test_products_of_partly_shared_arguments(rank, size, rank_rng):
    """Each rank's own argument may have another shape."""
    x = rank_rng(rank).normal(size=3 + rank)

    def loss(theta, x):
        return mpiad.mpi_allreduce(anp.sum(anp.sin(theta * anp.sum(x))) * anp.sum(x**2))

    rates = check_grads(loss, THETA, x, argnum=(0, 1), shared=(True, False))
    assert min(rates.values()) > 1.8
    v = THETA**2, np.cos(x)
    expected = mpiad.hvp(loss, (0, 1), shared=(True, False))(THETA, x, v)
    found = mpiad.make_hvp(loss, (0, 1), shared=(True, False))(THETA, x)[2](v)
    for a, b in zip(found, expected):
        assert_close(a, b)
    rows = mpiad.jacobian(lambda theta, x: mpiad.mpi_allreduce(theta * anp.sum(x)), (0, 1), shared=(True, False))(THETA, x)
    total = sum(MPI.COMM_WORLD.allgather(np.sum(x)))
    assert_close(rows[0], total * np.eye(3))
    assert_close(rows[1], np.outer(THETA, np.ones(3 + rank)))


def test_tuples_that_do_not_fit_are_refused(rank):
    for derivative in (mpiad.value_and_grad, mpiad.grad, mpiad.make_hvp, mpiad.jacobian):
        for argnum, shared in (
            ((0, 1), (True,)),
            (0, (True,)),
            ((0, 1), (True, False, True)),
            (0, ()),
            ((0, 1), ((True, False), True)),
        ):
            with pytest.raises(ValueError, match=r"a tuple with a boolean for each of several arguments, but got \("):
                derivative(lambda x, y: x * y, argnum, shared=shared)(1.0, 2.0)


@pytest.mark.unguarded
def test_only_shared_arguments_are_compared(rank, size):
    loss = mpiad.grad(lambda x, y: mpiad.mpi_allreduce(anp.sum(x) * anp.sum(y)), (0, 1), shared=(True, False))
    before = watch_settings.present()
    switch.apply(Settings(debug=True))
    try:
        loss(np.ones(2), np.ones(1 + rank))
        if size > 1:
            with pytest.raises(mpiad.errors.ReplicationError, match=r"x\[0\]"):
                loss(np.ones(2) + rank, np.ones(1 + rank))
    finally:
        switch.restore(before)
    if size > 1:
        with pytest.raises(ValueError, match="with shared=True all ranks must hold copies"):
            loss(np.ones(2 + rank), np.ones(2))
