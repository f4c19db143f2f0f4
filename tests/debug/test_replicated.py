"""`assert_replicated`: silent where all copies have the same bits; else all ranks say who differs, where, by how much."""

from collections import namedtuple

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.debug import assert_replicated
from mpiad.errors import ReplicationError

WORLD = MPI.COMM_WORLD
Layer = namedtuple("Layer", "weight bias")
several = pytest.mark.mpi(min_size=2)


def nest():
    layers = [Layer(np.arange(6.0).reshape(2, 3), None), Layer(np.zeros((0, 3)), np.float32(2))]
    return {"layers": layers, "step": 10**30, "name": "adam", "rate": 1e-3, "done": False, "nothing": {}, "nan": np.nan}


def raised(x, **keywords):
    """Return this rank's error, after a look at all ranks' being the same."""
    with pytest.raises(ReplicationError) as caught:
        assert_replicated(x, **keywords)
    found = WORLD.allgather((str(caught.value), caught.value.ranks, caught.value.path, caught.value.index))
    assert found == [found[0]] * len(found)
    return caught.value


def differing(base, other, last):
    return other if last else base


@pytest.fixture
def last(rank, size):
    return rank == size - 1


def test_equal_copies():
    assert assert_replicated(nest()) is None


def test_order_of_keys_and_layout_of_arrays_do_not_matter(rank):
    array = np.arange(6.0).reshape(2, 3)
    items = [("a", array if rank % 2 else np.asfortranarray(array)), ("b", 1)]
    assert_replicated(dict(items if rank % 2 else items[::-1]))


@several
def test_who_differs_where_and_by_how_much(last, size):
    x = nest()
    if last:
        x["layers"][0].weight[1, 0] -= 0.75
        x["layers"][0].weight[1, 2] += 2
        x["rate"] = 2e-3
    error = raised(x, name="state")
    assert (error.ranks, error.path, error.index) == ([size - 1], "state['layers'][0].weight", (1, 0))
    assert (error.absolute, error.relative) == (2.0, pytest.approx(2 / 7))
    assert f"rank(s) [{size - 1}] of {size} differ from rank 0" in str(error)
    assert "(shape (2, 3), dtype float64) first at [1, 0] is 2.25 instead of rank 0's 3.0; 2 of 6" in str(error)
    assert "1 more differ" in str(error)


@pytest.mark.mpi(min_size=3)
def test_the_odd_one_out_is_named_whichever_it_is(rank):
    error = raised(1.0 + (rank == 0))
    assert error.ranks == [0] and "differ from rank 1" in str(error)


@pytest.mark.mpi(min_size=3)
def test_each_rank_has_its_own_first_difference(rank, size):
    x = np.zeros((size, 2))
    x[rank, 1] = rank
    error = raised({"a": x, "b": int(rank == 2)})
    assert error.ranks == list(range(1, size)) and error.index == (1, 1) and error.absolute == size - 1
    assert "rank 2: x['a'] (shape" in str(error) and "1 more differ" in str(error)


@several
@pytest.mark.parametrize(
    ("base", "other", "absolute"),
    [
        (0.0, -0.0, 0.0),
        (np.nan, -np.nan, 0.0),
        (np.nan, 1.0, np.nan),
        (np.inf, -np.inf, np.inf),
        (np.array([1, 2**64 - 1], np.uint64), np.array([1, 0], np.uint64), 2.0**64),
        (np.array([-128, 127], np.int8), np.array([127, 127], np.int8), 255.0),
        (np.array([True, False]), np.array([True, True]), 1.0),
        (np.array([1 + 2j]), np.array([4 - 2j]), 5.0),
        (np.float32(1), np.float32(1) + np.finfo(np.float32).eps, np.finfo(np.float32).eps),
        (10**400, 1, 2.0**1023),
        ("a", "b", np.nan),
    ],
    ids=repr,
)
def test_by_how_much(base, other, absolute, last):
    error = raised(differing(base, other, last))
    assert error.absolute == pytest.approx(absolute, abs=0, rel=1e-15, nan_ok=True)
    assert error.relative == 0 if absolute == 0 else not error.relative <= 0


@several
@pytest.mark.parametrize(
    ("base", "other", "path", "said"),
    [
        (np.zeros(3), np.zeros(4), "x", "shape (4,), dtype float64) instead of rank 0's x (shape (3,)"),
        (np.zeros(3), np.zeros(3, np.float32), "x", "dtype float32) instead of rank 0's x (shape (3,), dtype float64)"),
        ([1.0, 2.0], [1.0], "x[1]", "nothing after 1 leaves instead of rank 0's x[1]"),
        ({"a": 1.0}, {"b": 1.0}, "x['b']", "x['b'] (shape (), dtype float64) instead of rank 0's x['a']"),
        ({"a": 1.0}, {"a": 1.0, "b": []}, "x['b']", "instead of rank 0's nothing after 1 leaves"),
        (1.0, None, "x", "x (NoneType) instead of rank 0's x (shape (), dtype float64)"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_shapes_dtypes_and_structures(base, other, path, said, last):
    error = raised(differing(base, other, last))
    assert (error.path, error.index) == (path, ()) and said in str(error)


@several
def test_what_cannot_be_compared_raises_on_all_ranks(last):
    with pytest.raises(TypeError, match=r"x\[0\] is object .* This happened on rank"):
        assert_replicated([differing(1.0, object(), last)])
    with pytest.raises(TypeError, match=r"x\[1\] is object .* This happened on rank 0"):
        assert_replicated([1.0, object()])  # on all of them


def test_on_part_of_the_ranks(rank):
    comm = WORLD.Split(rank % 2)
    mpiad.mpi_init(comm)
    assert_replicated(rank % 2, comm)
    comm.Free()


@several
def test_traced_values_are_compared_and_the_gradient_stays(last):
    def loss(x):
        assert_replicated({"x": x, "square": x**2})
        return mpiad.mpi_sum(anp.sum(x**2))

    np.testing.assert_array_equal(mpiad.grad(loss)(np.ones(2)), [2.0, 2.0])
    with pytest.raises(ReplicationError, match=r"x\['square'\]"):
        mpiad.grad(loss)(np.ones(2) * (1 + last))
    mpiad.reset()


def filled(array, byte):
    """Return a copy of an array in memory that held this byte everywhere before."""
    memory = np.full(array.nbytes, byte, np.uint8)
    copy = memory.view(array.dtype)
    for k, entry in enumerate(array):
        copy[k] = entry
    return copy


def entries(kind):
    return np.array([1.0, 1.0 / 3.0, -0.0]).astype(kind)


GAPS = np.dtype([("flag", np.int8), ("numbers", np.longdouble, (2,))], align=True)


@pytest.mark.parametrize("kind", [np.longdouble, np.clongdouble, GAPS], ids=["long double", "complex", "fields"])
def test_bytes_that_hold_nothing_are_not_compared(kind, rank, last):
    array = np.zeros(2, GAPS) if kind is GAPS else entries(kind)
    if kind is GAPS:
        array["numbers"] = entries(np.longdouble)[:2]
    x = filled(array, rank)
    x.view(np.uint8).reshape(len(x), -1)[:, -1] = rank  # what assignment may have written, too
    assert_replicated(x)


@several
def test_long_doubles_are_compared_to_their_last_bit(last):
    x = np.ones(3, np.longdouble)
    if last:
        x[1] += np.finfo(np.longdouble).eps
    error = raised(x)
    assert error.index == (1,) and error.absolute == np.finfo(np.longdouble).eps
