"""`mpi_neighbor_allgather` and `mpi_neighbor_alltoall` on grids and graphs, compared with shifts."""

import numpy as np
import pytest
import reference
from against_reference import arrays, check
from jitted import check_jit
from mpi4py import MPI

import mpiad
from mpiad.errors import CommunicatorError

# Axes of one and two ranks are among them: both neighbors along a periodic axis are then the same rank.
GRIDS = [((True,), None), ((False,), None), ((True, False), None), ((True, True), 0), ((True, False), 1)]


@pytest.fixture(params=GRIDS, ids=str)
def grid(request, size):
    """A Cartesian communicator; the ranks are along one axis, or divided between two."""
    periods, along = request.param
    dims = (
        MPI.Compute_dims(size, len(periods)) if along is None else [size if k == along else 1 for k in range(len(periods))]
    )
    comm = MPI.COMM_WORLD.Create_cart(dims, periods)
    yield comm
    comm.Free()


def neighbors(grid, rank):
    """Return the neighbors of a rank by arithmetic of coordinates, None for a missing one."""
    found = []
    for axis, (length, periodic) in enumerate(zip(grid.dims, grid.periods)):
        for step in (-1, 1):
            coordinates = grid.Get_coords(rank)
            coordinates[axis] += step
            inside = periodic or 0 <= coordinates[axis] < length
            coordinates[axis] %= length
            found.append(grid.Get_cart_rank(coordinates) if inside else None)
    return found


def opposite(direction):
    return direction + 1 - 2 * (direction % 2)


def joined(shapes, sources):
    """y_r joins, along the first axis, the entries (rank, slice) of `sources[r]`; an integer stands for so many zeros."""
    x = reference.numbering(shapes)
    parts = [
        [np.full((part, *shapes[0][1:]), -1) if isinstance(part, int) else x[part[0]][part[1]] for part in of]
        for of in sources
    ]
    numbers = [np.concatenate([*of, np.zeros((0, *shapes[0][1:]), int)]).astype(int) for of in parts]
    matrix = np.zeros((sum(each.size for each in numbers), sum(each.size for each in x)))
    flat = np.concatenate([each.ravel() for each in numbers])
    matrix[np.flatnonzero(flat >= 0), flat[flat >= 0]] = 1.0
    return reference.linear(shapes, [each.shape for each in numbers], matrix)


@pytest.mark.parametrize("dtype", ["f8", "c8"])
def test_allgather_of_equal_arrays(rngs, size, grid, dtype):
    shape = (2, 3)
    sources = [[1 if peer is None else (peer, slice(None)) for peer in neighbors(grid, rank)] for rank in range(size)]
    program = joined([(1, *shape)] * size, sources)
    check(lambda x: mpiad.mpi_neighbor_allgather(x[0], comm=grid), program, arrays(rngs, (1, *shape), dtype), rngs)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_allgather_of_different_lengths(rngs, rank, size, grid, axis):
    lengths = [2 * (rank % 3) for rank in range(size)]
    of = [[3 if peer is None else lengths[peer] for peer in neighbors(grid, rank)] for rank in range(size)]
    sources = [[3 if peer is None else (peer, slice(None)) for peer in neighbors(grid, rank)] for rank in range(size)]
    shapes = [(length, 2) for length in lengths]

    def fun(x):
        y = mpiad.mpi_neighbor_allgather(x.T if axis else x, axis, received=of[rank], comm=grid)
        return y.T if axis else y

    check(fun, joined(shapes, sources), arrays(rngs, shapes), rngs)


def test_alltoall_of_single_entries(rngs, size, grid):
    """An entry for a direction arrives in the place of the opposite direction, like a shift along this direction."""
    places = 2 * len(grid.dims)
    sources = [
        [1 if peer is None else (peer, slice(opposite(k), opposite(k) + 1)) for k, peer in enumerate(neighbors(grid, rank))]
        for rank in range(size)
    ]
    shapes = [(places, 2)] * size
    check(lambda x: mpiad.mpi_neighbor_alltoall(x, comm=grid), joined(shapes, sources), arrays(rngs, shapes), rngs)


def test_alltoall_of_blocks(rngs, rank, size, grid):
    places = 2 * len(grid.dims)
    counts = [[(rank + 2 * k) % 4 for k in range(places)] for rank in range(size)]
    sources, received = [], []
    for r in range(size):
        blocks, lengths = [], []
        for k, peer in enumerate(neighbors(grid, r)):
            length = 1 if peer is None else counts[peer][opposite(k)]
            start = 0 if peer is None else sum(counts[peer][: opposite(k)])
            blocks.append(1 if peer is None else (peer, slice(start, start + length)))
            lengths.append(length)
        sources.append(blocks)
        received.append(lengths)
    shapes = [(sum(each), 3) for each in counts]

    def fun(x):
        return mpiad.mpi_neighbor_alltoall(x, counts[rank], received=received[rank], comm=grid)

    xs = arrays(rngs, shapes)
    check(fun, joined(shapes, sources), xs, rngs)
    np.testing.assert_array_equal(
        mpiad.mpi_neighbor_alltoall(xs[rank].T, counts[rank], -1, received=received[rank], comm=grid), fun(xs[rank]).T
    )
    check_jit(lambda x: fun(np.cos(1.0) * x) ** 2, xs[rank])


def test_on_a_graph_with_parallel_edges(rngs, rank, size):
    """Rank r sends to r + 1 twice and to r + 2, and the messages of parallel edges keep their order."""
    steps = (1, 2, 1)
    comm = MPI.COMM_WORLD.Create_dist_graph_adjacent([(rank - k) % size for k in steps], [(rank + k) % size for k in steps])
    counts = [2, 1, 3]
    starts = [0, 2, 3]
    # With one or two ranks, more edges are parallel: the n-th message between two ranks is the n-th of the same pair.
    sources = []
    for r in range(size):
        taken, blocks = {}, []
        for k in steps:
            peer = (r - k) % size
            places = [place for place, step in enumerate(steps) if (peer + step) % size == r]
            place = places[taken.setdefault(peer, 0)]
            taken[peer] += 1
            blocks.append((peer, slice(starts[place], starts[place] + counts[place])))
        sources.append(blocks)
    received = [part.stop - part.start for _, part in sources[rank]]
    shapes = [(6, 2)] * size
    check(
        lambda x: mpiad.mpi_neighbor_alltoall(x, counts, received=received, comm=comm), joined(shapes, sources),
        arrays(rngs, shapes), rngs,
    )  # fmt: skip
    comm.Free()


def test_different_numbers_of_sources_and_destinations(rngs, rank, size):
    """A star: rank 0 sends to all others, which send nothing."""
    others = list(range(1, size))
    comm = MPI.COMM_WORLD.Create_dist_graph_adjacent([0] if rank else [], [] if rank else others)
    sources = [[] if r == 0 else [(0, slice(None))] for r in range(size)]
    shapes = [(1, 3)] * size
    check(lambda x: mpiad.mpi_neighbor_allgather(x[0], comm=comm), joined(shapes, sources), arrays(rngs, shapes), rngs)
    shapes = [((size - 1) if r == 0 else 0, 3) for r in range(size)]
    parts = [[] if r == 0 else [(0, slice(r - 1, r))] for r in range(size)]
    check(lambda x: mpiad.mpi_neighbor_alltoall(x, comm=comm), joined(shapes, parts), arrays(rngs, shapes), rngs)
    comm.Free()


def test_numbers_and_jit(rank, size, grid):
    first = mpiad.mpi_neighbor_allgather(rank + 1, comm=grid)
    assert first.tolist() == [0 if peer is None else peer + 1 for peer in neighbors(grid, rank)]
    check_jit(lambda x: mpiad.mpi_neighbor_allgather(x**2, comm=grid), np.arange(3.0) + rank)


def test_mistakes(size, rank):
    for call in (mpiad.mpi_neighbor_allgather, mpiad.mpi_neighbor_alltoall):
        for comm in (None, MPI.COMM_WORLD):
            with pytest.raises(
                CommunicatorError, match="comm must have a process topology, but got Intracomm.*Create_cart"
            ):
                call(np.ones(2), comm=comm)
    grid = MPI.COMM_WORLD.Create_cart([size], [True])
    with pytest.raises(ValueError, match="received must be 2 integers"):
        mpiad.mpi_neighbor_allgather(np.ones(2), 0, received=[2], comm=grid)
    with pytest.raises(ValueError, match="received needs an axis"):
        mpiad.mpi_neighbor_allgather(np.ones(2), received=[2, 2], comm=grid)
    with pytest.raises(
        ValueError, match=r"for the 2 neighbors, \[1, 1\] \(1 by default\), must add up.*axis 0, but x has shape \(3,\)"
    ):
        mpiad.mpi_neighbor_alltoall(np.ones(3), comm=grid)
    with pytest.raises(ValueError, match=r"\[2, 2\] \(1 by default\), must add up.*axis 1, but x has shape \(2, 3\)"):
        mpiad.mpi_neighbor_alltoall(np.ones((2, 3)), [2, 2], 1, comm=grid)
    with pytest.raises(ValueError, match=r"mpi_neighbor_alltoall: a neighbor .* Pass received.*along axis 0.*rank \d sent"):
        mpiad.mpi_neighbor_alltoall(np.ones(3), [2, 1], received=[2, 2], comm=grid)
    grid.Free()
