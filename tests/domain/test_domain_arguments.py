"""What `Domain` refuses, on all ranks alike."""

import pytest

import mpiad
from mpiad.domain import Domain


def test_chosen_and_given(rank, size):
    domain = Domain(4 * size, halo=2, periodic=True)
    assert (domain.shape, domain.dims, domain.halo, domain.periodic) == ((4 * size,), (size,), (2,), (True,))
    assert domain.neighbours == (((rank - 1) % size, (rank + 1) % size),)
    assert domain.local_shape == (4,) and domain.padded_shape == (8,)
    by_hand = Domain((3, 4 * size), dims=(1, size))
    assert by_hand.position == (0, rank) and by_hand.owned == (slice(0, 3), slice(4 * rank, 4 * rank + 4))
    assert repr(by_hand) == f"Domain((3, {4 * size}), halo=(1, 1), periodic=(False, False), dims=(1, {size}))"


@pytest.mark.mpi(min_size=2)
def test_ranks_that_would_own_nothing(size):
    with pytest.raises(ValueError, match=rf"\({size - 1},\) cells can't be divided among {size} ranks"):
        Domain((size - 1,), halo=0)
    with pytest.raises(ValueError, match=rf"{size - 1} cells along dimension 1 can't be divided among {size} ranks"):
        Domain((9, size - 1), halo=0, dims=(1, size))


def test_halo_wider_than_a_block(size):
    with pytest.raises(ValueError, match=r"no smaller than the halo of \(4,\)"):
        Domain((4 * size - 1,), halo=4)
    with pytest.raises(ValueError, match=rf"dimension 0 .* {size} ranks: .* would have 3, but needs 4"):
        Domain((4 * size - 1, 9), halo=4, dims=(size, 1))
    assert Domain((4 * size,), halo=4).halo == (4,)


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (TypeError, r"shape must be an integer or a tuple of integers, but got float 2.5", {"shape": 2.5}),
        (ValueError, r"shape must be 1 or more along each dimension, but got \(8, 0\)", {"shape": (8, 0)}),
        (ValueError, r"1, 2 or 3 dimensions, but got \(2, 2, 2, 2\)", {"shape": (2, 2, 2, 2)}),
        (ValueError, r"1, 2 or 3 dimensions, but got \(\)", {"shape": ()}),
        (ValueError, r"halo must be 0 or more", {"halo": -1}),
        (TypeError, r"halo must be an integer", {"halo": "1"}),
        (ValueError, r"halo must have one entry for each of 2 dimensions, but got \(1, 1, 1\)", {"halo": (1, 1, 1)}),
        (ValueError, r"periodic must have one entry for each of 2", {"periodic": (True,)}),
        (ValueError, r"dims \(7, 3\) make 21 blocks, but the communicator has \d ranks", {"dims": (7, 3)}),
        (ValueError, r"dims must be 1 or more along each dimension", {"dims": (0, 3)}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_are_refused(error, match, args):
    with pytest.raises(error, match=match):
        Domain(**{"shape": (40, 40), **args})


@pytest.mark.mpi(min_size=2)
def test_mistakes_of_one_rank_are_raised_on_all(rank, size):
    with pytest.raises(ValueError, match="Domain: shape must be 1 or more"):
        Domain((40, 0 if rank == size - 1 else 40))
    with pytest.raises(ValueError, match=r"rank 0 gave shape=\(40, 40\), .* and rank 1 gave shape=\(40, 41\)"):
        Domain((40, 41 if rank == 1 else 40))
    assert mpiad.mpi_allreduce(1) == size
