"""Which memory arrays of a program share, how they lie in it, and which arrays needn't stay."""

import weakref

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.tracer import getval
from jitted import assert_same
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain
from mpiad.extend import custom_operator, defadjoint
from mpiad.programs.memory_plan import Scratch


def replays_of(fun, *args):
    """Return what runs a function: of its only signature."""
    jitted = mpiad.jit(fun, strict=True)
    jitted(*args)
    (entry,) = jitted._cache.entries.values()
    return entry.replays


def wave(domain, last, u, s):
    before, u = u * 0.5, anp.cos(u)
    for _ in range(7):
        p = domain.exchange(u)
        around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        u, before = 2 * u - last(before) + s * (around - 4 * u), u
    return u, domain.sum(u)


@pytest.mark.one_rank
def test_fields_overwrite_those_that_are_not_needed_any_more(size):
    """Two fields of a wave in turn; three if the field before the last is also read at other indices."""
    domain, rng = Domain((9 * size, 150), periodic=True, dims=(size, 1)), np.random.default_rng(3)
    u, s = rng.standard_normal((2, *domain.shape))
    expected, before = np.cos(u), u * 0.5
    for _ in range(7):
        around = sum(np.roll(expected, by, axis) for axis in (0, 1) for by in (1, -1))
        expected, before = 2 * expected - before + s * (around - 4 * expected), expected
    given = u[domain.owned].copy(), s[domain.owned].copy()
    for last, fields in ((lambda x: x, 2), (lambda x: x[::-1], 3)):
        plain = lambda u, s, last=last: wave(domain, last, u, s)  # noqa: E731
        replays = replays_of(plain, *given)
        padded = {b for b, found in enumerate(replays.schedule.buffers) if found.shape[:1] == (11,)}
        places = {allocation[:2] for b, allocation in replays.allocations.items() if b in padded}
        assert len({(is_scratch, start // 64) for is_scratch, start in places}) == fields
        jitted = mpiad.jit(plain, strict=True)
        pair = [mpiad.value_and_grad(lambda u, s, f=f: f(u, s)[1]) for f in (jitted, plain)]
        for factor in (1.0, 0.5):
            again = given[0] * factor, given[1]
            assert_same(jitted(*again), plain(*again), 1e-11)
            assert_same(pair[0](*again), pair[1](*again), 1e-10)
        if fields == 2:
            assert_same(jitted(*given)[0], expected[domain.owned], 1e-10)


@pytest.mark.few(1)
@pytest.mark.one_rank
@pytest.mark.parametrize("length", [40, 150])
def test_loops_that_overwrite_several_arrays(size, length):
    """In the reverse pass of two fields a loop makes two arrays, and ends the use of two others."""
    domain = Domain((9 * size, length), periodic=True, dims=(size, 1))
    u = np.random.default_rng(3).standard_normal(domain.shape)[domain.owned]

    def loss(u):
        fields, before = [anp.cos(u), anp.cos(2 * u)], [0.5 * u, 1.5 * u]
        for _ in range(4):
            halos = [domain.exchange(field) for field in fields]
            around = [halos[0][2:, 1:-1] + 0.3 * halos[0][:-2, 1:-1], halos[1][2:, 1:-1] + 0.4 * halos[1][1:-1, 2:]]
            new = [anp.where(a > b, 0.3 * a, 0.2 * b + field) for a, b, field in zip(around, before, fields)]
            fields, before = new, fields
        return domain.sum(anp.sin(fields[0]) + fields[1] * before[0] + anp.sin(before[1]) * u)

    pair = [mpiad.value_and_grad(f) for f in (mpiad.jit(loss, strict=True), loss)]
    for factor in (1.0, 0.5, 2.0):
        assert_same(pair[0](factor * u), pair[1](factor * u), 1e-11)


def test_rows_begin_at_lines_of_the_cache():
    """Where a loop writes into the interior of a padded array; and rows don't all begin at the same place of a page."""

    def fun(u):
        p = domain.exchange(anp.sin(u))
        return p[2:, 1:-1] * p[:-2, 1:-1] * p[1:-1, 2:]

    for length in (200, 510):
        domain = Domain((9, length), dims=(1, 1), comm=MPI.COMM_SELF)
        allocations = replays_of(fun, np.ones((9, length))).allocations.values()
        (allocation,) = {one for one in allocations if one.pitch > length}
        assert (allocation.start % 64, allocation.pitch % 8, allocation.pitch % 512 > 0) == (56, 0, True)


@pytest.mark.one_rank
def test_fields_that_the_reverse_pass_reads_no_more_are_let_go_of(rank, size):
    """One is read in the buffer of its exchange, of one nothing but its shape is needed, and one is read."""
    domain, rng = Domain((9 * size, 150), periodic=True, dims=(size, 1)), np.random.default_rng(5)
    start = rng.standard_normal((3, *domain.shape))[(slice(None), *domain.owned)].copy()

    def step(u, rate, s):
        p = domain.exchange(u)
        around = p[2:, 1:-1] * p[:-2, 1:-1] + p[1:-1, 2:]
        return u * around + anp.cos(s * u) + 0.3 * rate

    def gradient(step, left):
        def loss(x):
            given = [x[k] * (1.0 + k) for k in range(3)]
            left[:] = [weakref.ref(getval(field)) for field in given]
            made = step(*given)
            del given
            left[:] = [field() is None for field in left]
            return anp.sum(made**2 * (1.0 + rank))

        return mpiad.value_and_grad(loss, objective="sum")

    jitted, left = mpiad.jit(step, strict=True), []
    for factor in (1.0, -0.5):  # traced, then compiled
        assert_same(gradient(jitted, left)(factor * start), gradient(step, [])(factor * start), 1e-11)
    assert left == [True, True, False]
    (entry,) = jitted._cache.entries.values()
    assert entry.replays.read_later == {2, 3}


VIEWS = {
    "rot90": np.rot90,
    "rollaxis": lambda x: np.rollaxis(x, 1),
    "Fortran order": lambda x: np.reshape(x, x.shape[::-1], order="F"),
    "default order": lambda x: np.reshape(x, x.shape[::-1], order=None),
    "diagonal": lambda x: np.broadcast_to(np.diagonal(x[: min(x.shape), : min(x.shape)])[:, None], x.shape[::-1]),
    "operator": lambda x: same(x).T,
    "operator's view": lambda x: transposed(x),
}
same = custom_operator(lambda x: x)
transposed = custom_operator(lambda x: x.T)
defadjoint(same, lambda g: g)
defadjoint(transposed, lambda g: g.T)


@pytest.mark.parametrize("shape", [(3, 2), (40, 30)])
@pytest.mark.parametrize("name", VIEWS)
def test_calls_that_return_views_of_reused_memory(name, shape, rank_rng):
    """NumPy's functions and operators may return views of their arguments: of temporary arrays of the program."""
    view, rng = VIEWS[name], rank_rng(31)
    x = rng.standard_normal(shape)

    def scaled(x):
        return view(3.0 * x**2) if name != "diagonal" else view(x) + 0.0 * x.T

    def written(x):
        out = np.zeros_like(x.T)
        out[::-1] = scaled(x)
        return out

    for fun in (scaled, written, lambda x: view(x)):
        jitted = mpiad.jit(fun, strict=True)
        expected = [fun(x * factor) for factor in (1.0, 2.0, -0.5)]
        found = [jitted(x * factor) for factor in (1.0, 2.0, -0.5)]
        for a, b in zip(found, expected):  # after all calls: a later one mustn't change an earlier result
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["operator", "operator's view"])
def test_gradients_of_operators_that_return_views(name, rank_rng):
    view, x = VIEWS[name], rank_rng(32).standard_normal((4, 3))
    weights = np.arange(4.0)
    jitted = mpiad.jit(lambda x: anp.sum(anp.sin(view(x**2)[::-1]) ** 2 * weights) + anp.sum(anp.exp(x)), strict=True)
    for factor in (1.0, 0.3, -2.0):
        y = factor * x
        s = np.sin(y**2)
        slope = 2.0 * s * np.cos(y**2) * 2.0 * y * weights[:, None] + np.exp(y)
        np.testing.assert_allclose(mpiad.grad(jitted, objective="sum")(y), slope, 1e-12)


def test_programs_share_scratch_memory(monkeypatch):
    """As long as one of them has it; not the memory of one that is much larger, nor what is in use."""
    monkeypatch.setattr(Scratch, "_free", [])  # without memory of the programs of other tests
    fields, two, small = map(Scratch, (171_200, 150_000, 9_999))
    memory = fields.take()
    assert len(memory) >= 171_200 and memory.ctypes.data % 64 == 0
    assert two.take() is not memory
    fields.give_back(memory)
    little = small.take()
    assert not np.shares_memory(little, memory)
    assert two.take() is memory and fields.take() is not memory
    two.give_back(memory)
    other = two.take()
    more = two.take()
    for each in (other, more):
        two.give_back(each)
    assert two.take(other) is other and two.take(other) is more  # what a replay has had before, if it's free
    gone = weakref.ref(memory)
    del memory, each, other, more
    assert gone() is None and len(two.take()) >= 150_000
