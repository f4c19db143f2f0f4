"""Samples divided among ranks: each seen once, whatever the numbers."""

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse
from mpi4py import MPI
from random_streams import generator

import mpiad.parallel.data as module
from mpiad.parallel import DistributedDataContainer, value_and_grad

COMM = MPI.COMM_WORLD


def seen(items):
    return [sample for part in COMM.allgather(items) for sample in part]


@pytest.mark.parametrize("count", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_is_seen_once_per_epoch(count, shuffle):
    """Each once, so that shares differ by one where the samples can't be divided."""
    data = DistributedDataContainer(np.arange(count) * 10, shuffle=shuffle, rng=1)
    lengths = COMM.allgather(len(data))
    assert sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1
    orders = []
    for epoch in range(2):
        data.set_epoch(epoch)
        orders.append(seen([int(x) for x in data]))
        assert sorted(orders[-1]) == [10 * k for k in range(count)]
    if count > 5:  # few samples may come in the same order twice
        assert (orders[0] == orders[1]) is (not shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_are_integers_from_zero(shuffle):
    data = DistributedDataContainer(np.arange(4.0), 2, shuffle=shuffle, rng=1)
    for epoch in (-1, 2.0, "1", None):
        with pytest.raises(ValueError, match=rf"set_epoch: epoch must be an integer, zero or more, but got {epoch!r}"):
            data.set_epoch(epoch)
    assert data.epoch == 0


@pytest.mark.parametrize("count, batch", [(3, 8), (10, 4), (33, 5)])
def test_batches_hold_the_same_samples_on_any_number_of_ranks(count, batch):
    data = DistributedDataContainer({"x": np.arange(count), "y": [np.arange(count) ** 2]}, batch, shuffle=True, rng=2)
    data.set_epoch(3)
    order = generator(2, 3).permutation(count)
    assert len(data) == -(-count // batch)
    for k, part in enumerate(data):
        assert seen(part["x"].tolist()) == order[k * batch : (k + 1) * batch].tolist()
        shares = COMM.allgather(len(part["x"]))
        assert max(shares) - min(shares) <= 1  # of the last, smaller one too
        np.testing.assert_array_equal(part["y"][0], part["x"] ** 2)


@pytest.mark.serial
@pytest.mark.parametrize("batch_size", [None, 1, 3, 8])
def test_every_sample_is_seen_once_on_any_number_of_ranks(monkeypatch, batch_size):
    """More ranks than can be started here."""
    for size in (1, 2, 3, 7, 16, 40):
        monkeypatch.setattr(module, "mpi_size", lambda comm, size=size: size)
        for count in (1, 2, 15, 16, 17, 39):
            found, lengths = [], []
            for rank in range(size):
                monkeypatch.setattr(module, "mpi_rank", lambda comm, rank=rank: rank)
                data = DistributedDataContainer(np.arange(count), batch_size, shuffle=True, rng=0)
                lengths.append(len(data))
                found += [int(x) for item in data for x in np.ravel(item)]
            assert sorted(found) == list(range(count))
            assert max(lengths) - min(lengths) <= (batch_size is None)


def test_batches_are_as_many_on_all_ranks_where_shares_are_not():
    """A loop that communicates for each item must end on all ranks at once: 1 sample too many, and too few for all."""
    for count in (COMM.size + 1, max(COMM.size - 1, 1)):
        total = 0
        for x in DistributedDataContainer(np.arange(count), batch_size=COMM.size):
            total += COMM.allreduce(int(x.sum()))
        assert total == count * (count - 1) // 2


def test_items_of_a_list_come_as_they_are():
    items = ["a", "bb", "ccc", "dddd", "eeeee"]
    assert seen(list(DistributedDataContainer(items))) == items
    assert [seen(part) for part in DistributedDataContainer(items, batch_size=3)] == [items[:3], items[3:]]


def test_a_list_holds_samples_also_where_they_are_arrays():
    images = [np.full((5, 4), float(k)) for k in range(7)]
    data = DistributedDataContainer(images, batch_size=4)
    assert len(data) == 2
    assert [[image[0, 0] for image in seen(part)] for part in data] == [[0, 1, 2, 3], [4, 5, 6]]


def test_objects_count_as_the_samples_that_they_are():
    """Neither the length of the first array inside one of them, nor one for the whole list."""
    pairs = [(np.full(6, float(k)), k) for k in range(5)]

    def loss(p, items):
        return sum(p * x[0] + 0 * y for x, y in items) / len(items)

    for part, total in zip(DistributedDataContainer(pairs, batch_size=3), (0 + 1 + 2, 3 + 4)):
        mean, g = value_and_grad(loss)(2.0, part)
        count = COMM.allreduce(len(part))
        assert (mean, g) == pytest.approx((2 * total / count, total / count), rel=1e-14)


@pytest.mark.serial
def test_sparse_rows_count_as_samples():
    rows = scipy.sparse.eye(3, 4, format="csr")
    _, g = value_and_grad(lambda p, x: anp.sum(x.toarray() @ p) / 3)(np.ones(4), rows)
    assert g.tolist() == [1 / 3, 1 / 3, 1 / 3, 0.0]


def test_items_are_indexed_as_those_of_a_list():
    data = DistributedDataContainer(np.arange(20), batch_size=7)
    np.testing.assert_array_equal(data[-1], data[len(data) - 1])
    with pytest.raises(IndexError, match="no item 3 of 3"):
        data[3]


@pytest.mark.parametrize(
    "args, kind, text",
    [
        (((np.ones(3), np.ones(4)),), ValueError, r"\[3, 4\]"),
        ((np.ones(3), 0), ValueError, "batch_size.*0"),
        ((np.ones(3), 2.0), ValueError, "2.0"),
        ((np.ones(3), True), ValueError, "True"),
        ((5,), TypeError, "int 5"),
        ((np.ones((0, 3)),), ValueError, "no sample in the data"),
        (([],), ValueError, "no sample in the data"),
        (((np.ones(3), [1, 2, 3]),), TypeError, "must hold arrays .* holds int"),
        (({"x": [1, 2]},), TypeError, "must hold arrays .* holds int"),
    ],
)
def test_what_cannot_be_used_is_refused(args, kind, text):
    with pytest.raises(kind, match=text):
        DistributedDataContainer(*args)
