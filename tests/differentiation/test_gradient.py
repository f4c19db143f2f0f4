"""`value_and_grad`, `grad`: the three objectives, arguments of every form, and J the same on all ranks."""

from collections import namedtuple
from dataclasses import dataclass
from fractions import Fraction

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from one_process import assert_close, gradients, inputs, objective

import mpiad

Point = namedtuple("Point", "place weight")


def loss(x, rank, size):
    """Differs on every rank, uses three primitives, and is nonlinear."""
    total = mpiad.mpi_allreduce(anp.sum(anp.sin(x)) * (rank + 1.0))
    first = mpiad.mpi_bcast(x[:2] ** 2, root=size - 1)
    before = mpiad.mpi_exscan(anp.prod(x))
    return total**2 * anp.sum(anp.cos(x)) + anp.sum(first * x[1:3]) * (rank + 2.0) + anp.tanh(before) * total


def losses(xs):
    total = sum(anp.sum(anp.sin(x)) * (r + 1.0) for r, x in enumerate(xs))
    first = xs[-1][:2] ** 2
    before = [sum([anp.prod(y) for y in xs[:r]], 0.0) for r in range(len(xs))]
    return [
        total**2 * anp.sum(anp.cos(x)) + anp.sum(first * x[1:3]) * (r + 2.0) + anp.tanh(before[r]) * total
        for r, x in enumerate(xs)
    ]


@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
@pytest.mark.parametrize("last", [False, True], ids=["root 0", "last root"])
def test_the_three_objectives(kind, last, rank, size, rank_rng):
    root = size - 1 if last else 0
    xs = inputs(rank_rng, size)

    value, g = mpiad.value_and_grad(loss, objective=kind, root=root)(xs[rank], rank, size)

    assert_close(value, objective(losses(xs), kind, root))
    assert_close(g, gradients(lambda zs: objective(losses(zs), kind, root), xs)[rank])
    assert_close(mpiad.grad(loss, objective=kind, root=root)(xs[rank], rank, size), g)


def test_the_default_is_the_loss_of_rank_0(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    value, g = mpiad.value_and_grad(loss)(xs[rank], rank, size)
    assert_close(value, losses(xs)[0])
    assert_close(g, gradients(lambda zs: losses(zs)[0], xs)[rank])


@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
def test_j_is_the_same_bit_for_bit_on_all_ranks(kind, rank, size, rng):
    value, _ = mpiad.value_and_grad(loss, objective=kind)(rng.standard_normal(50) / 3, rank, size)
    assert len(set(MPI.COMM_WORLD.allgather(np.float64(value).tobytes()))) == 1


def test_other_ranks_than_the_root_may_return_nothing(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    root = size // 2

    def program(x):
        total = mpiad.mpi_sum(anp.sum(x**3), root=root)
        return total**2 if rank == root else None

    value, g = mpiad.value_and_grad(program, root=root)(xs[rank])

    total = sum(np.sum(x**3) for x in xs)
    assert_close(value, total**2)
    assert_close(g, 2 * total * 3 * xs[rank] ** 2)


@pytest.mark.parametrize("number", [2, np.int64(3), np.float32(0.5), np.array(1.5), np.array([2.5])])
def test_j_may_be_any_real_number(number):
    value, g = mpiad.value_and_grad(lambda x: number)(np.ones(3))
    assert value == float(np.reshape(number, ()))
    assert_close(g, np.zeros(3))


def test_argnum_as_a_tuple_and_keywords(rank, size, rank_rng):
    xs, ys = inputs(rank_rng, size), inputs(rank_rng, size, lambda r: (2, r + 1))

    def program(x, scale, y, *, power):
        return mpiad.mpi_allreduce(anp.sum(x**power) * scale + anp.sum(anp.exp(y)) ** 2)

    def whole(zs):
        return sum(anp.sum(x**3) * (r + 2.0) + anp.sum(anp.exp(y)) ** 2 for r, (x, y) in enumerate(zs))

    arguments = (xs[rank], rank + 2.0, ys[rank])
    both = mpiad.grad(program, argnum=(2, 0))(*arguments, power=3)
    expected = gradients(whole, list(zip(xs, ys)))[rank]

    assert isinstance(both, tuple)
    assert_close(both[0], expected[1])
    assert_close(both[1], expected[0])
    assert_close(mpiad.grad(program, argnum=2)(*arguments, power=3), expected[1])
    assert_close(mpiad.grad(program, argnum=-1)(*arguments, power=3), expected[1])
    assert_close(mpiad.grad(program, argnum=np.int64(2))(*arguments, power=3), expected[1])
    assert_close(mpiad.grad(program, 1)(*arguments, power=3), np.sum(xs[rank] ** 3))


@pytest.mark.parametrize("number", [1, True, np.int64(2), np.array([1, 2, 3]), [2, 1]], ids=repr)
@pytest.mark.parametrize("jit", [False, True])
def test_an_integer_among_several_arguments_is_refused_like_a_single_one(number, jit):
    x, v = np.array([1.0, -2.0, 3.0]), np.array([0.5, 1.0, -1.5])
    compiled = mpiad.jit if jit else lambda fun: fun
    loss = lambda x, a: mpiad.mpi_sum(anp.sum(x**2 * (a[0] if isinstance(a, (list, tuple)) else a)))  # noqa: E731
    products = mpiad.jacobian, mpiad.make_vjp, mpiad.make_jvp, mpiad.make_hvp, mpiad.linearize
    for derivative in (mpiad.grad, mpiad.value_and_grad, *(() if jit else products)):
        for argnum in (1, (0, 1), (1, 0)):
            with pytest.raises(TypeError, match=r"argument 1 holds .*Pass floats \(3\.0 instead of 3\)"):
                compiled(derivative(loss, argnum))(x, number)
    with pytest.raises(TypeError, match="hvp: argument 1 holds"):
        compiled(mpiad.hvp(loss, (0, 1)))(x, number, (v, number))
    # Among the floats of an argument, or in an argument that is no number, nothing is refused.
    for more in ({"n": number, "f": 1.0}, None, ()):
        found = mpiad.grad(lambda x, more: mpiad.mpi_sum(anp.sum(x**2)), (0, 1))(x, more)
        assert_close(found[0], 2 * x)


def nest(rank, rng):
    """A container of containers, of another form on every rank."""
    return {
        "layers": [(rng.standard_normal((2, rank + 1)), 0.5 + rank), [rng.standard_normal(3)] * (rank + 1)],
        "point": Point(place=rng.standard_normal(2), weight=np.float64(1.5 - rank)),
        "count": 3,
        "mask": np.array([1, 0, 1]),
        "name": "terrain",
        "nothing": None,
        "flag": True,
        "empty": (),
    }


def nested_loss(tree, reduced):
    (a, b), more = tree["layers"]
    total = reduced(anp.sum(a**2) * b + sum([anp.sum(anp.sin(z)) for z in more], 0.0))
    here = anp.sum(tree["point"].place ** tree["count"] * tree["point"].weight) + anp.sum(tree["mask"])
    return total**2 + reduced(here * b)


def test_nests_keep_their_form(rank, size, rank_rng):
    tree = nest(rank, rank_rng(rank))
    value, g = mpiad.value_and_grad(nested_loss)(tree, mpiad.mpi_allreduce)

    assert type(g) is dict and list(g) == list(tree)
    assert type(g["layers"]) is list and type(g["layers"][0]) is tuple and type(g["layers"][1]) is list
    assert type(g["point"]) is Point
    assert g["count"] == 0 and not g["flag"] and g["name"] is None and g["nothing"] is None and g["empty"] == ()
    assert not np.any(g["mask"])
    assert g["mask"].dtype == tree["mask"].dtype
    assert np.shape(g["layers"][0][1]) == () and np.shape(g["point"].weight) == ()


def test_gradients_of_nests(rank, size, rank_rng):
    trees = [nest(r, rank_rng(r)) for r in range(size)]

    def variables(tree):
        (a, b), more = tree["layers"]
        return [a, b, *more, tree["point"].place, tree["point"].weight]

    def whole(every):
        first, second = [], []
        for a, b, *more, place, weight in every:
            first.append(anp.sum(a**2) * b + sum([anp.sum(anp.sin(z)) for z in more], 0.0))
            second.append((anp.sum(place**3 * weight) + 2) * b)
        return sum(first) ** 2 + sum(second)

    value, g = mpiad.value_and_grad(nested_loss)(trees[rank], mpiad.mpi_allreduce)
    every = [variables(tree) for tree in trees]
    expected = gradients(whole, every)[rank]

    assert_close(value, whole(every))
    found = variables(g)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert_close(one, other)


def test_an_array_that_stands_twice_in_a_nest_is_two_variables(size):
    x = np.array([1.0, 2.0])
    g = mpiad.grad(lambda pair: mpiad.mpi_allreduce(anp.sum(pair[0] ** 2 * pair[1])))([x, x])
    assert_close(g[0], 2 * x * x)
    assert_close(g[1], x**2)


def test_complex_variables_as_in_autograd(rank, size, rank_rng):
    xs = [rank_rng(r).standard_normal((2, 3 + r)) for r in range(size)]
    xs = [x[0] + 1j * x[1] for x in xs]

    def whole(zs):
        total = sum(anp.sum(z**2) * (r + 1j) for r, z in enumerate(zs))
        return anp.real(total * anp.conj(total)) + anp.imag(total) ** 2

    def program(z):
        total = mpiad.mpi_allreduce(anp.sum(z**2) * (rank + 1j))
        return anp.real(total * anp.conj(total)) + anp.imag(total) ** 2

    assert_close(mpiad.grad(program)(xs[rank]), gradients(whole, xs)[rank])


def test_gradients_can_be_written_to(rank):
    x = np.ones((3, 2)) * (rank + 1)
    g = mpiad.grad(lambda x: mpiad.mpi_allreduce(anp.sum(x)))(x)
    g += 1.0
    assert_close(g, np.full((3, 2), 2.0))
    h = mpiad.grad(lambda pair: anp.sum(pair[0] + pair[1]))([x, x])
    h[0][...] = 7.0
    assert not np.shares_memory(h[0], x)


def test_variables_that_nothing_depends_on_have_zero_gradients(rank):
    value, g = mpiad.value_and_grad(lambda x, y: mpiad.mpi_allreduce(anp.sum(y**2)), argnum=(0, 1))(
        np.ones((2, rank)), np.full(2, rank + 1.0)
    )
    assert_close(g[0], np.zeros((2, rank)))
    assert_close(g[1], np.full(2, 2.0 * (rank + 1)))


@pytest.mark.parametrize("given", [3, "text", None, np.arange(3), [], {"n": 1}])
def test_arguments_without_a_variable_are_refused(given):
    with pytest.raises(TypeError, match="float64"):
        mpiad.grad(lambda x: 1.0)(given)


def test_missing_arguments_are_refused():
    with pytest.raises(TypeError, match="argnum=2.*positional arguments, but only 2"):
        mpiad.grad(lambda x, y: 1.0, argnum=2)(1.0, 2.0)


def test_unknown_objectives_and_roots_are_refused(size):
    with pytest.raises(ValueError, match="'total'"):
        mpiad.value_and_grad(lambda x: x, objective="total")
    for root in (size, -1):
        with pytest.raises(ValueError, match=f"root .*{root}"):
            mpiad.value_and_grad(lambda x: x, root=root)(1.0)


def test_the_objective_of_a_part_of_the_ranks(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    part = MPI.COMM_WORLD.Split(rank % 2, -rank)  # ranks in reverse order
    mine = [r for r in reversed(range(size)) if r % 2 == rank % 2]

    def program(x):
        return mpiad.mpi_allreduce(anp.sum(x**3), comm=part) ** 2 * (part.rank + 1.0)

    def whole(zs):
        return sum(anp.sum(zs[r] ** 3) for r in mine) ** 2 * len(mine)

    value, g = mpiad.value_and_grad(program, root=part.size - 1, comm=part)(xs[rank])
    assert_close(value, whole(xs))
    assert_close(g, gradients(whole, xs)[rank])
    part.Free()


@pytest.mark.serial
def test_numbers_of_python_and_nests_of_every_kind():
    """z² is 2 z in autograd's convention, conjugated; plain autograd around it makes nests of its own."""
    assert mpiad.grad(lambda z: anp.real(z * z))(1 + 2j) == 2 + 4j
    assert mpiad.grad(lambda p: p["a"] ** 2 * p[1])({"a": 2.0, 1: 3.0}) == {"a": 12.0, 1: 4.0}
    inner = mpiad.grad(lambda pair: pair[0] ** 2 * pair[1])
    for made in (tuple, list):
        assert autograd.grad(lambda pair: inner(pair)[0])(made([2.0, 3.0])) == made([6.0, 4.0])
    cube = lambda z: mpiad.grad(lambda z: anp.real(z**3))(z)  # noqa: E731 (conjugated: 3 z̄²)
    slope = autograd.grad(lambda x: anp.real(cube(x + 1j)))(2.0)
    np.testing.assert_allclose(slope, 12.0, rtol=1e-15)


@pytest.mark.serial
def test_an_array_of_traced_numbers_that_plain_numpy_has_made_is_told_of():
    with pytest.raises(
        TypeError, match=r"an array of object, shape \(2,\) .plain NumPy's, made of traced values\? Use autograd"
    ):
        mpiad.grad(lambda x: np.array([x[0], x[1]]))(np.ones(2))


@dataclass
class Layer:
    w: object


@pytest.mark.serial
@pytest.mark.parametrize("call", [mpiad.grad, mpiad.make_vjp, mpiad.make_jvp, mpiad.make_hvp])
def test_an_object_inside_a_pytree_is_refused_by_its_path(call):
    """Its numbers had no derivative, without a word: {"m": Layer, "c": ...} had one with respect to c only."""
    loss = lambda p: anp.sum((p["m"].w - 1) ** 2) + p["c"] ** 2  # noqa: E731
    with pytest.raises(TypeError, match=r"argument 0\['m'\] is Layer .*dataclasses.asdict"):
        call(loss)({"m": Layer(np.ones(2)), "c": 3.0})
    for other in (np.tanh, np.array([1.0, None]), {1.0}):
        with pytest.raises(TypeError, match=r"argument \(0, 1\)\[1\]\[0\] is (ufunc|ndarray|set)"):
            call(lambda c, x: c**2, argnum=(0, 1))(3.0, [other])


@pytest.mark.serial
def test_numbers_strings_and_none_are_constants_of_a_pytree():
    x = {"c": 3.0, "n": 2, "yes": True, "s": "name", "none": None, "i": np.arange(2), "np": np.int8(1), "f": Fraction(1, 2)}
    found = mpiad.grad(lambda x: x["c"] ** x["n"] * x["i"][1])(x)
    assert (found["c"], found["n"], found["s"], found["none"]) == (6.0, 0, None, None)
