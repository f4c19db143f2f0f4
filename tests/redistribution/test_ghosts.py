"""Ghosts by number: compared with the whole vector in one process, for every kind of ownership."""

import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import contiguous, strided
from device_ways import beside, each_way, through_device, travelling
from jitted import check_jit
from mpi4py import MPI

import mpiad
from mpiad.debug import checked
from mpiad.testing import check_adjoint

WORLD = MPI.COMM_WORLD


class Case:
    """All ranks' owned and needed numbers, the same on all ranks; rank 1 owns nothing, and the last one needs nothing."""

    def __init__(self, kind, size, total=23, seed=0):
        rng = np.random.default_rng([seed, size])
        counts = np.bincount(rng.integers(0, size, total), minlength=size)
        if size > 1:
            counts[0], counts[1] = counts[0] + counts[1], 0
        numbers = {
            "ranges": np.arange(total), "numbers": rng.permutation(total), "runs": np.roll(np.arange(total), 5),
            "sparse": np.sort(rng.choice(10**12, total, replace=False)),
        }  # fmt: skip
        self.every = numbers[kind]
        parts = np.split(self.every, np.cumsum(counts)[:-1])
        stops = np.cumsum(counts)
        self.owned = [(int(stop - n), int(stop)) for stop, n in zip(stops, counts)] if kind == "ranges" else parts
        needs = [int(n) for n in rng.integers(5, 12, size)]
        if size > 2:
            needs[-1] = 0
        self.needed = [rng.choice(self.every, n) for n in needs]
        # The places in the ranks' joined vectors.
        self.places = [np.array([int(np.flatnonzero(self.every == g)[0]) for g in needed], int) for needed in self.needed]
        self.counts, self.needs = counts.tolist(), needs

    def exchange(self, comm=WORLD):
        return mpiad.GhostExchange(self.needed[comm.rank], self.owned[comm.rank], comm if comm is not WORLD else None)

    def program(self, rest=()):
        """Return the fetch as a reference."""
        shapes = [(n, *rest) for n in self.counts]
        rows = np.concatenate(reference.numbering(shapes))
        return reference.sums_of(shapes, [[rows[places]] for places in self.places], shapes)

    def transposed(self, rest=()):
        program = self.program(rest)
        return reference.linear(program.out_shapes, program.in_shapes, program.jacobian(None).T)


each_kind = pytest.mark.parametrize("kind", ["ranges", "numbers", "runs", "sparse"])


@each_kind
@pytest.mark.parametrize("dtype, rest, layout", [("f8", (), contiguous), ("c8", (2,), strided), ("f4", (2, 1), contiguous)])
def test_against_reference(rngs, size, kind, dtype, rest, layout):
    """Value, adjoint, tangent, gradient and Hessian products of `fetch`, `accumulate` and `begin_fetch`."""
    case = Case(kind, size)
    ghosts = case.exchange()
    for fun, program in (
        (ghosts.fetch, case.program(rest)),
        (ghosts.accumulate, case.transposed(rest)),
        (lambda x: mpiad.mpi_wait(ghosts.begin_fetch(x)), case.program(rest)),
    ):
        check(fun, program, arrays(rngs, program.in_shapes, dtype, layout), rngs)


def test_many_patterns(rank, size):
    """Values and sums of patterns of many sizes, some with more numbers than ranks, some with fewer."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        kind, total = ["ranges", "numbers", "runs", "sparse"][seed % 4], int(rng.integers(1, 60))
        case = Case(kind, size, total, seed)
        ghosts, whole = case.exchange(), rng.standard_normal(total)
        own = slice(sum(case.counts[:rank]), sum(case.counts[: rank + 1]))
        np.testing.assert_array_equal(ghosts.fetch(whole[own]), whole[case.places[rank]])
        uses = np.bincount(np.concatenate(case.places), minlength=total)
        np.testing.assert_array_equal(ghosts.accumulate(np.ones(case.needs[rank])), uses[own])


@each_kind
def test_the_transpose(rank, size, kind):
    case = Case(kind, size, seed=1)
    ghosts = case.exchange()
    check_adjoint(ghosts.fetch, np.ones((case.counts[rank], 3)))
    check_adjoint(ghosts.accumulate, np.ones(case.needs[rank]))


def test_sums_are_added_in_a_fixed_order(rank, size):
    """Bit for bit: on each rank in the order of `needed`, then in the order of ranks."""
    case = Case("numbers", size, total=7)
    values = [np.random.default_rng(r).standard_normal((n, 2)) for r, n in enumerate(case.needs)]
    expected = np.zeros((7, 2))
    for places, array in zip(case.places, values):
        sums = np.zeros((7, 2))
        np.add.at(sums, places, array)
        expected += sums
    start = sum(case.counts[:rank])
    for _ in range(2):
        found = case.exchange().accumulate(values[rank])
        np.testing.assert_array_equal(found, expected[start : start + case.counts[rank]])


def test_integers_and_booleans(rngs, size):
    case = Case("numbers", size)
    check_exact(case.exchange().fetch, case.program((2,)), rngs)


def test_nothing_needed_and_nothing_owned(rank, size):
    ghosts = mpiad.GhostExchange([], (0, 0))
    assert ghosts.fetch(np.zeros((0, 2))).shape == (0, 2)
    assert mpiad.mpi_wait(ghosts.begin_fetch(np.zeros(0))).shape == (0,)
    last = mpiad.GhostExchange([3, 3, 0], [3, 0, 9] if rank == size - 1 else [])
    x = np.array([1.0, 2.0, 3.0]) if rank == size - 1 else np.zeros(0)
    np.testing.assert_array_equal(last.fetch(x), [1, 1, 2])
    total = last.accumulate(np.array([1.0, 10.0, 100.0]))
    np.testing.assert_array_equal(total, [11 * size, 100 * size, 0] if rank == size - 1 else [])
    assert "3 needed" in repr(last)


def test_new_memory(rank, size):
    """Also if the ghosts are this rank's own entries, in their order."""
    own = mpiad.GhostExchange([2 * rank, 2 * rank + 1], (2 * rank, 2 * rank + 2))
    x = np.array([rank, 0.5])
    for fun in (own.fetch, own.accumulate, lambda x: mpiad.mpi_wait(own.begin_fetch(x))):
        np.testing.assert_array_equal(fun(x), x)
        check_new_memory(fun, x)


def test_another_communicator(rngs, size):
    comm = WORLD.Split(0, -WORLD.rank)
    case = Case("numbers", size)
    ghosts = case.exchange(comm)
    check(ghosts.fetch, case.program(), arrays(rngs, case.program().in_shapes), rngs, comm)
    comm.Free()


def test_messages_go_to_neighbors_only(rank, size):
    """In a ring each rank sends to two others, and the directory is used in the constructor only."""
    ghosts = mpiad.GhostExchange([(3 * rank - 1) % (3 * size), 3 * (rank + 1) % (3 * size)], (3 * rank, 3 * rank + 3))
    partners = {(rank - 1) % size, (rank + 1) % size}
    assert {peer for peer, _ in ghosts.sources} == partners == {peer for peer, _ in ghosts.destinations}
    used = mpiad.transport.channel(None, "test")
    before = dict(used.sent)
    ghosts.fetch(np.ones(3))
    assert {peer for peer, _ in used.sent if used.sent[peer, _] != before.get((peer, _))} == partners - {rank}


def test_several_fetches_at_once(rank, size):
    """Waited for in another order than begun, here and in the reverse pass."""
    case = Case("numbers", size)
    ghosts, total = case.exchange(), sum(case.counts)
    whole = np.random.default_rng(3).standard_normal((2, total))
    own = slice(sum(case.counts[:rank]), sum(case.counts[: rank + 1]))

    def fun(x, y):
        requests = [ghosts.begin_fetch(x), ghosts.begin_fetch(y)]
        first, second = [mpiad.mpi_wait(request) for request in requests[:: 1 if rank % 2 else -1]][
            :: 1 if rank % 2 else -1
        ]
        return anp.sum(first * second)

    found = mpiad.grad(fun, (0, 1), objective="sum")(whole[0][own], whole[1][own])
    uses = np.bincount(np.concatenate(case.places), minlength=total)
    np.testing.assert_allclose(found[0], (uses * whole[1])[own], rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(found[1], (uses * whole[0])[own], rtol=1e-13, atol=1e-14)
    with pytest.raises(mpiad.errors.RequestError) if size > 1 else pytest.raises(Exception):
        request = ghosts.begin_fetch(whole[0][own])
        mpiad.mpi_wait(request)
        mpiad.mpi_wait(request)
        assert size > 1 or not request.parts
        raise mpiad.errors.RequestError("on one rank there is nothing to wait for")


@pytest.mark.parametrize("kind", ["ranges", "numbers"])
def test_in_compiled_functions(rank, size, kind):
    case = Case(kind, size)
    ghosts = case.exchange()
    x = np.random.default_rng(rank).uniform(0.5, 1.5, (case.counts[rank], 2))

    def fun(x):
        request = ghosts.begin_fetch(x * x)
        y = ghosts.fetch(anp.sin(x))
        return anp.sum(ghosts.accumulate(y**3 * mpiad.mpi_wait(request)) * x)

    check_jit(lambda x: mpiad.mpi_allreduce(fun(x)), x, rounding=1e-11)


@each_way
def test_on_devices(rngs, size, way):
    case = Case("numbers", size)
    ghosts = case.exchange()
    with travelling(way):
        for place in (through_device, beside):
            for fun, program in (
                (ghosts.fetch, case.program((3,))),
                (ghosts.accumulate, case.transposed((3,))),
                (lambda x: mpiad.mpi_wait(ghosts.begin_fetch(x)), case.program((3,))),
            ):
                check(place(fun), program, arrays(rngs, program.in_shapes), rngs)


def test_in_debug_mode(rngs, size):
    case = Case("numbers", size)
    with checked():
        ghosts = case.exchange()
        check(ghosts.fetch, case.program(), arrays(rngs, case.program().in_shapes), rngs)


@pytest.mark.parametrize("prepared", [False, True])
def test_compiled_in_debug_mode(prepared, rank, size):
    """Also beside ranks that interpret: all compare their arrays in each call. Entry k is on the rank k // 2."""
    ghosts = mpiad.GhostExchange([2 * ((rank + 1) % size)], (2 * rank, 2 * rank + 2))

    def fun(x):
        return ghosts.accumulate(anp.sin(ghosts.fetch(x))) * x

    with checked():
        if prepared:
            ghosts.fetch(np.ones(2))
        compiled = mpiad.jit(fun, strict=True) if rank == 0 else fun
        for k in range(3):
            x = np.array([0.3 + k + rank, 2.0])
            value, gradient = mpiad.value_and_grad(lambda x: anp.sum(compiled(x)), objective="sum")(x)
            np.testing.assert_allclose(value, sum(np.sin(0.3 + k + r) * (0.3 + k + r) for r in range(size)), rtol=1e-13)
            np.testing.assert_allclose(gradient, [np.sin(x[0]) + x[0] * np.cos(x[0]), 0.0], rtol=1e-13)


# ---- Errors, of one rank, on all ranks


def raised(kind, text, rank, wrong, fun):
    with pytest.raises(kind, match=text) as found:
        fun()
    assert ("raised on rank" in str(found.value)) == (rank != wrong)
    assert mpiad.mpi_bcast(rank, wrong) == wrong


def test_invalid_numbers(rank, size):
    wrong = size - 1
    for kind, text, needed, owned in (
        (TypeError, "needed must be an array of integers .*float64", [1.0], (0, 0)),
        (TypeError, r"needed must be an array of integers .*shape \(1, 2\)", [[0, 0]], (0, 0)),
        (ValueError, "needed must not be negative, but got number -2", [0, -2], (0, 0)),
        (TypeError, "owned must be an array of integers .*shape ()", [0], 7),
        (ValueError, "owned must not be negative, but got number -7", [0], [3, -7]),
        (ValueError, f"needed must be at most {2**62}, but got number {2**63 - 1}", [0, 2**63 - 1], (0, 0)),
        (
            ValueError,
            f"needed must be at most {2**62}, but got number {2**64 - 2}",
            np.array([2**64 - 2], np.uint64),
            (0, 0),
        ),
        (ValueError, r"owned as a tuple must be a range .*got \(3, 2\)", [0], (3, 2)),
        (ValueError, r"owned as a tuple must be a range .*got \(-1, 2\)", [0], (-1, 2)),
        (ValueError, r"owned as a tuple must be a range .*got \(1, 2, 3\)", [0], (1, 2, 3)),
    ):
        given = (needed, owned) if rank == wrong else ([], (10 * rank, 10 * rank + 1))
        raised(kind, f"GhostExchange: {text}", rank, wrong, lambda given=given: mpiad.GhostExchange(*given))


def test_numbers_without_an_owner(rank, size):
    for wrong in {0, size - 1}:
        for number in (2 * size, 10**9):
            needed = [0, number] if rank == wrong else [0]
            text = f"GhostExchange: rank {wrong} needs number {number}, which no rank owns"
            raised(
                ValueError, text, rank, wrong, lambda needed=needed: mpiad.GhostExchange(needed, (2 * rank, 2 * rank + 2))
            )


def test_numbers_with_two_owners(rank, size):
    if size == 1:
        with pytest.raises(ValueError, match="number 4 is owned by rank 0 and by rank 0"):
            mpiad.GhostExchange([], [4, 7, 4])
        return
    ranges = (2 * rank, 2 * rank + 2 + (rank == 0))
    for owned in (ranges, np.arange(*ranges)[::-1]):
        with pytest.raises(ValueError, match="number 2 is owned by rank (0 and by rank 1|1 and by rank 0)"):
            mpiad.GhostExchange([], owned)


def test_arrays_of_another_length(rank, size):
    wrong = size - 1
    owned = (2 * rank, 2 * rank + 2)
    for method, length, argument in (("fetch", 2, "owned"), ("begin_fetch", 2, "owned"), ("accumulate", 1, "needed")):
        ghosts = mpiad.GhostExchange([0], owned)
        x = np.ones((length + (rank == wrong), 2))
        text = rf"GhostExchange.{method}: the first axis .*{length} {argument} numbers .*got shape \({length + 1}, 2\)"
        call = getattr(ghosts, method)
        raised(ValueError, text, rank, wrong, lambda call=call, x=x: call(x))
        call(np.ones((length, 2)))


def test_what_is_no_array(rank, size):
    wrong = size - 1
    ghosts = mpiad.GhostExchange([0], (2 * rank, 2 * rank + 2))
    raised(
        TypeError, "GhostExchange.fetch: x must be", rank, wrong, lambda: ghosts.fetch("x" if rank == wrong else np.ones(2))
    )
    raised(ValueError, r"got shape \(\)", rank, wrong, lambda: ghosts.fetch(1.0 if rank == wrong else np.ones(2)))


def test_dtypes_and_shapes_that_differ(rank, size):
    """In the first call, and in debug mode in each one."""
    if size == 1:
        return
    ghosts = mpiad.GhostExchange([0], (2 * rank, 2 * rank + 2))
    given = np.ones(2, "f4" if rank == 1 else "f8")
    text = r"GhostExchange.fetch: shapes and dtypes may differ along axis 0 only, .* rank 0: .*float64, rank 1: .*float32"
    with pytest.raises(ValueError, match=text):
        ghosts.fetch(given)
    ghosts.fetch(np.ones(2))
    with checked(), pytest.raises(ValueError, match=text):
        ghosts.fetch(given)
