"""Mistakes that other halo exchanges are known for, each with what must hold instead."""

import itertools

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from whole_grid import Exchange

import mpiad
from mpiad.domain import Domain
from mpiad.transport import Envelope, channel

each_scheme = pytest.mark.parametrize("in_halves", [False, True], ids=["exchange", "begin and end"])


def exchanged(domain, u, in_halves, boundary="zero"):
    return domain.end_exchange(domain.begin_exchange(u, boundary)) if in_halves else domain.exchange(u, boundary)


@each_scheme
def test_cotangents_of_the_halo_reach_their_owners(in_halves):
    # The derivative of the sum of all blocks with their halos: how often each cell was copied.
    shape, halo, periodic = (11, 8), 2, (True, False)
    domain = Domain(shape, halo=halo, periodic=periodic)
    places = np.concatenate([p.ravel() for p in Exchange(shape, domain.dims, halo, periodic, "edge").places])
    copies = np.bincount(places, minlength=88).reshape(shape)
    gradient = mpiad.grad(lambda u: anp.sum(exchanged(domain, u, in_halves, "edge")), objective="sum")(
        np.ones(domain.local_shape)
    )
    assert copies.max() > 1
    np.testing.assert_array_equal(gradient, copies[domain.owned])


def test_the_adjoint_of_a_send_keeps_the_local_cotangent(rank, size):
    # Each rank uses what it sends, too: J = Σ x² of its own and of what came.
    right, left = (rank + 1) % size, (rank - 1) % size

    def loss(x):
        kept = mpiad.mpi_send(x, right)
        return anp.sum(kept**2) / 2 + 2 * anp.sum(mpiad.mpi_recv(x, left) ** 2)

    x = np.arange(3.0) + rank
    np.testing.assert_allclose(mpiad.grad(loss, objective="sum")(x), x + 4 * x)


def test_reductions_are_zero_off_the_root(rank, size):
    root = size - 1
    total, largest = mpiad.mpi_sum(np.ones(3), root), mpiad.mpi_reduce(np.full(3, 1.0 + rank), MPI.MAX, root)
    for found in (total, largest):
        np.testing.assert_array_equal(found, np.full(3, float(size) if rank == root else 0.0))


@pytest.mark.not_on(4)
def test_tags_stay_below_what_mpi_guarantees(monkeypatch):
    # An MPI with no more tags than that; more messages than there are tags for exchanges in halves.
    used = channel(None, "test")
    monkeypatch.setattr(used, "tag_limit", 32767)
    monkeypatch.setattr(used, "tag_stride", int(32767 * 0.618))
    tags, mpi_tag = [], Envelope.mpi_tag.fget
    monkeypatch.setattr(Envelope, "mpi_tag", property(lambda self: tags.append(mpi_tag(self)) or tags[-1]))
    domain = Domain((12, 10), periodic=True)
    laplacian = domain.laplacian(order=4)
    block = np.ones(domain.local_shape)

    def loss(u):
        for k in range(60):
            if k % 10 == 0:  # what isn't in halves has the same few tags each time
                u = u + 0.01 * laplacian(u) + exchanged(domain, u, False)[domain.interior]
            u = exchanged(domain, u, True)[domain.interior]
        return domain.sum(u)

    for _ in range(4):
        mpiad.grad(loss)(block)
    assert max(tags, default=0) <= 32767
    assert tags or mpiad.mpi_size() == 1


@each_scheme
@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect"])
def test_any_blocks_and_any_width_up_to_the_block(rank, size, rank_rng, boundary, in_halves):
    # Oblong blocks of unequal sizes, and each width from 0 to that of the smallest block.
    for dims in {(size, 1), (1, size)}:
        shape = tuple(4 * p + (p > 1) for p in dims)
        for halo in itertools.product(range(5), repeat=2):
            if boundary == "reflect" and any(p == 1 and h >= n for p, h, n in zip(dims, halo, shape)):
                continue
            domain = Domain(shape, halo=halo, dims=dims, periodic=(False, True))
            reference = Exchange(shape, dims, halo, (False, True), boundary)
            u = rank_rng(100).standard_normal(shape)
            cotangents = [rank_rng(200 + r).standard_normal(p.shape) for r, p in enumerate(reference.places)]
            pull, padded = mpiad.make_vjp(lambda x: exchanged(domain, x, in_halves, boundary))(u[domain.owned])  # noqa: B023
            np.testing.assert_array_equal(padded, reference(u)[rank])
            np.testing.assert_allclose(pull(cotangents[rank]), reference.adjoint(cotangents)[domain.owned], 1e-12, 1e-12)


@pytest.mark.mpi(min_size=4)
@each_scheme
def test_corners_come_from_diagonal_neighbours(rank, size, in_halves):
    shape, dims = (6, 6), (2, 2)
    part = MPI.COMM_WORLD.Split(0 if rank < 4 else MPI.UNDEFINED, rank)
    if rank < 4:
        domain = Domain(shape, dims=dims, comm=part)
        padded = exchanged(domain, np.full(domain.local_shape, float(rank)), in_halves)
        inner = {0: (-1, -1), 1: (-1, 0), 2: (0, -1), 3: (0, 0)}[rank]
        assert padded[inner] == 3 - rank
        gradient = mpiad.grad(lambda u: exchanged(domain, u, in_halves)[inner] * (rank + 1), objective="sum", comm=part)(
            np.zeros(domain.local_shape)
        )
        # The diagonal neighbour's factor, in the one cell that it has a copy of.
        expected = np.zeros(domain.local_shape)
        expected[inner] = 4 - rank
        np.testing.assert_array_equal(gradient, expected)
        part.Free()


def test_a_halo_wider_than_a_block_is_refused(size):
    shape = (3 * size + 1,) if size > 1 else (3,)
    for halo in (4, 5):
        with pytest.raises(ValueError, match=rf"halo of \({halo},\)"):
            Domain(shape, halo=halo)
    with pytest.raises(ValueError, match="have radius 4 along dimension 0"):
        Domain(shape).laplacian(order=8)


def free_communicators(most=4000):
    """Count how many communicators MPI can still make (MPICH has about 2,000 in all)."""
    made = []
    try:
        while len(made) < most:
            made.append(MPI.COMM_SELF.Dup())
    except MPI.Exception:
        pass
    for comm in made:
        comm.Free()
    return len(made)


@pytest.mark.unguarded
def test_exceptions_leave_no_communicators_behind(rank):
    comm = MPI.COMM_WORLD.Dup()
    mpiad.mpi_init(comm)
    domain = Domain((11, 9), comm=comm)
    good = np.ones(domain.local_shape)

    def failing(u):
        domain.exchange(u)
        raise KeyError("of the user's")

    def attempt():
        with pytest.raises(ValueError):
            Domain((1, 0), comm=comm)
        with pytest.raises(ValueError):
            domain.exchange(np.ones(domain.padded_shape))
        with pytest.raises(ValueError):
            domain.laplacian(order=40)
        with pytest.raises(KeyError):
            mpiad.grad(failing, comm=comm)(good)
        mpiad.reset(comm)
        part = comm.Split(rank % 2, rank)
        with pytest.raises(ValueError):
            Domain(9, comm=part).interpolate(np.ones(99), [[0.0]])
        part.Free()

    attempt()
    before = free_communicators()
    for _ in range(5):
        attempt()
    assert free_communicators() == before
    domain.exchange(good)
    comm.Free()
    assert free_communicators() > before or before == 4000
