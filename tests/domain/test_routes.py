"""The plans of an exchange for more ranks than the tests have: all ranks' messages delivered in one process."""

import numpy as np
import pytest
from whole_grid import Exchange

from mpiad.domain.boundary import sides_of
from mpiad.domain.halo import Halo, fill_local, fold_local
from mpiad.domain.partition import Partition
from mpiad.domain.routes import AT_ONCE, BY_AXIS, FACES_ONLY

pytestmark = pytest.mark.serial

CASES = [
    # shape, ranks along each dimension, halo, periodic
    ((23,), (7,), (3,), (True,)),
    ((11, 13), (3, 4), (2, 3), (False, True)),
    ((9, 8), (4, 2), (2, 1), (True, True)),
    ((7, 8, 9), (3, 3, 3), (2, 1, 2), (False, True, False)),
    ((6, 5, 8), (2, 1, 4), (1, 2, 2), (True, True, True)),
]
each_case = pytest.mark.parametrize(("shape", "dims", "widths", "periodic"), CASES, ids=str)
each_scheme = pytest.mark.parametrize("scheme", [BY_AXIS, AT_ONCE, FACES_ONLY])


def messages(halos, scheme, stage):
    """Yield each pair of ranks with what one sends and where the other puts it."""
    for rank, halo in enumerate(halos):
        peers = [route.peer for route in halo.stages(scheme)[stage].routes]
        assert len(peers) == len(set(peers)) and rank not in peers
        for route in halo.stages(scheme)[stage].routes:
            (back,) = [r for r in halos[route.peer].stages(scheme)[stage].routes if r.peer == rank]
            yield rank, route.peer, route.owned, back.ghosts


def filled(halos, blocks, sides, scheme):
    padded = []
    for halo, block in zip(halos, blocks):
        padded.append(np.full(halo.padded, np.nan))
        padded[-1][halo.interior] = block
    for stage in range(len(halos[0].stages(scheme))):
        for source, dest, owned, ghosts in messages(halos, scheme, stage):
            assert [padded[source][a].shape for a in owned] == [padded[dest][b].shape for b in ghosts]
            for a, b in zip(owned, ghosts):
                padded[dest][b] = padded[source][a]
        for halo, out in zip(halos, padded):
            fill_local(out, halo.local(sides, scheme)[stage], sides)
    return padded


def folded(halos, cotangents, sides, scheme):
    totals = [g.copy() for g in cotangents]
    for stage in reversed(range(len(halos[0].stages(scheme)))):
        for halo, total in zip(halos, totals):
            fold_local(total, halo.local(sides, scheme)[stage], sides, len(halo.shape))
        parts = [
            (source, a, totals[dest][b].copy())
            for source, dest, owned, ghosts in messages(halos, scheme, stage)
            for a, b in zip(owned, ghosts)
        ]
        for owner, where, part in parts:
            totals[owner][where] += part
    return [total[halo.interior] for halo, total in zip(halos, totals)]


@each_scheme
@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect"])
@each_case
def test_all_ranks_together(rng, shape, dims, widths, periodic, boundary, scheme):
    partition, sides = Partition(shape, dims, periodic), sides_of(boundary, len(shape), "test")
    halos = [Halo(partition, rank, widths, None) for rank in range(int(np.prod(dims)))]
    reference = Exchange(shape, dims, widths, periodic, boundary, corners=scheme != FACES_ONLY)
    u = rng.standard_normal(shape)
    blocks = [u[partition.block(rank)] for rank in range(len(halos))]
    for found, expected in zip(filled(halos, blocks, sides, scheme), reference(u)):
        np.testing.assert_array_equal(found, expected)
    cotangents = [rng.standard_normal(p.shape) for p in reference.places]
    whole = reference.adjoint(cotangents)
    for rank, found in enumerate(folded(halos, cotangents, sides, scheme)):
        np.testing.assert_allclose(found, whole[partition.block(rank)], 1e-12, 1e-12)


def test_messages_of_one_rank_do_not_depend_on_how_many_there_are():
    counts = set()
    for side in (4, 40, 320):
        partition = Partition((16 * side,) * 2, (side, side), (False, False))
        halo = Halo(partition, side * (side // 2) + side // 2, (2, 2), None)
        counts.add(tuple(tuple(len(stage.routes) for stage in halo.stages(s)) for s in (BY_AXIS, AT_ONCE, FACES_ONLY)))
    assert counts == {((2, 2), (8,), (4,))}
