"""Batches of products with functions that every second rank compiles: one program for all directions."""

import autograd.numpy as anp
import numpy as np
import pytest
from one_process import assert_close, directions, flat, hessian, jacobian, pieces

import mpiad
from mpiad.domain import Domain
from mpiad.programs import operation

pytestmark = pytest.mark.unguarded  # watched calls are interpreted
MATRIX = np.random.default_rng(3).standard_normal((2, 4))


def is_compiled(rank):
    return rank % 2 == 0


@pytest.fixture
def programs(monkeypatch):
    """The programs for several directions that were asked for; None if there is none."""
    made, original = [], operation.Batched

    def noted(*args):
        made.append(None)
        made[-1] = original(*args)
        return made[-1]

    monkeypatch.setattr(operation, "Batched", noted)
    return made


def results(u, w, padded, total):
    """Return arrays of one block, given those that need other blocks: u, w = sin(u) u with a halo, and the sum of u²."""
    pair = anp.stack([(padded[2:] - padded[:-2]) * total, anp.exp(u) * w])
    mixed = anp.reshape(anp.transpose(pair), (-1,))
    return [
        mixed,
        MATRIX @ mixed[:4] + anp.max(u),
        anp.sum(pair * u, axis=1),
        anp.pad(w, 1, "constant") * padded,
        total * u[0],
    ]


def program(domain):
    def fun(u):
        w = anp.sin(u) * u
        return results(u, w, domain.exchange(w), domain.sum(u**2))

    return fun


def in_one_process(us):
    """Return the same results of all ranks, one after the other."""
    u = anp.concatenate(us)
    w, ends = anp.sin(u) * u, np.cumsum([0, *map(len, us)])
    padded = anp.concatenate([w[-1:], w, w[:1]])
    blocks = [(w[a:b], padded[a : b + 2]) for a, b in zip(ends, ends[1:])]
    return [part for v, block in zip(us, blocks) for part in results(v, *block, anp.sum(u**2))]


def blocks_of(domain, size, rank_rng):
    """Return the blocks of all ranks, of different lengths."""
    assert size == 1 or 11 % size
    u = rank_rng(0).standard_normal(11)
    lengths = [11 // size + (r < 11 % size) for r in range(size)]
    us = np.split(u, np.cumsum(lengths)[:-1])
    np.testing.assert_array_equal(us[domain.comm.rank if domain.comm else mpiad.mpi_rank()], u[domain.owned])
    return us


def test_products_with_the_jacobian(programs, rank, size, rank_rng):
    domain = Domain(11, periodic=True)
    us = blocks_of(domain, size, rank_rng)
    ys, fun = in_one_process(us), program(domain)
    dense, count = jacobian(in_one_process, us), len(ys) // size
    point = mpiad.linearize(mpiad.jit(fun, strict=True) if is_compiled(rank) else fun)(us[rank])
    for seeds in ((1, 2, 3), (4, 5, 6)):
        vs, ws = ([directions(like, seed) for seed in seeds] for like in (us, ys))
        along = point.jvp(np.stack([v[rank] for v in vs]), batch=True)
        own = slice(count * rank, count * (rank + 1))
        for found, expected in zip(along, zip(*[pieces(dense @ flat(v), ys)[own] for v in vs]), strict=True):
            assert_close(found, np.stack(expected))
        back = point.vjp([np.stack(parts) for parts in zip(*[w[own] for w in ws])], batch=True)
        assert_close(back, np.stack([pieces(dense.T @ flat(w), us)[rank] for w in ws]))
        assert_close(back[0], point.vjp(ws[0][own]))
    assert len(programs) == 2 * is_compiled(rank) and None not in programs


def test_products_with_the_hessian(programs, rank, size, rank_rng):
    domain = Domain(11, periodic=True)
    us, fun = blocks_of(domain, size, rank_rng), program(domain)
    dense = hessian(lambda zs: sum([anp.sum(anp.sin(y)) for y in in_one_process(zs)]), us)
    inner = mpiad.jit(fun, strict=True) if is_compiled(rank) else fun

    def loss(u):
        return sum([anp.sum(anp.sin(y)) for y in inner(u)])

    vs = [directions(us, seed) for seed in (1, 2, 3)]
    product = mpiad.make_hvp(loss, objective="sum")(us[rank]).product
    for _ in range(2):
        found = product(np.stack([v[rank] for v in vs]), batch=True)
        assert_close(found, np.stack([pieces(dense @ flat(v), us)[rank] for v in vs]), rounding=1e-10)
    # The reverse passes of the gradient's reverse pass and of the function.
    assert len(programs) == 2 * is_compiled(rank) and None not in programs


@pytest.mark.parametrize("kind", ["exchange", "send", "isend", "sum", "scan"])
def test_messages_that_are_not_combined(kind, programs, rank, size, rank_rng):
    """Each direction has its own messages, in the order of the interpreted function."""

    after, before = (rank + 1) % size, (rank - 1) % size

    def communicated(cube):
        if kind == "exchange":
            return mpiad.mpi_exchange(cube, after, before)
        if kind == "send":
            mpiad.mpi_send(cube, after)
            return mpiad.mpi_recv(np.zeros(2), before)
        if kind == "isend":
            received, sent = mpiad.mpi_irecv(np.zeros(2), before), mpiad.mpi_isend(cube, after)
            return mpiad.mpi_waitall([received, sent])[0]
        return mpiad.mpi_sum(cube) if kind == "sum" else mpiad.mpi_scan(cube)

    def fun(x):
        y = mpiad.mpi_allreduce(x**2)
        return y * communicated(x**3) + communicated(anp.sin(y) * x)

    def outputs(xs):
        y = sum([x**2 for x in xs])

        def received(sent):
            if kind in ("exchange", "send", "isend"):
                return [sent[r - 1] for r in range(size)]
            return [sum(sent) * (r == 0) if kind == "sum" else sum(sent[: r + 1]) for r in range(size)]

        pairs = zip(received([x**3 for x in xs]), received([anp.sin(y) * x for x in xs]))
        return [y * first + second for first, second in pairs]

    xs = [rank_rng(r).standard_normal(2) for r in range(size)]
    dense, vs = jacobian(outputs, xs), [directions(xs, seed) for seed in (1, 2, 3)]
    mine = np.stack([v[rank] for v in vs])
    point = mpiad.linearize(mpiad.jit(fun, strict=True) if is_compiled(rank) else fun)(xs[rank])
    assert_close(point.jvp(mine, batch=True), np.stack([pieces(dense @ flat(v), xs)[rank] for v in vs]))
    assert_close(point.vjp(mine, batch=True), np.stack([pieces(dense.T @ flat(v), xs)[rank] for v in vs]))
    assert len(programs) == 2 * is_compiled(rank) and None not in programs


def test_sums_on_which_a_rank_does_not_depend(programs, rank, size, rank_rng):
    """Its cotangent of the sum is zero, and its message is as long as those of the others."""

    def fun(x):
        total = mpiad.mpi_allreduce(anp.sum(x**2))
        return x if rank == 0 else x * total

    def outputs(xs):
        total = sum([anp.sum(x**2) for x in xs])
        return [xs[0], *[x * total for x in xs[1:]]]

    xs = [rank_rng(r).standard_normal(2 + r) for r in range(size)]
    dense, vs = jacobian(outputs, xs), [directions(xs, seed) for seed in (1, 2, 3)]
    mine = np.stack([v[rank] for v in vs])
    point = mpiad.linearize(mpiad.jit(fun, strict=True) if is_compiled(rank) else fun)(xs[rank])
    assert_close(point.jvp(mine, batch=True), np.stack([pieces(dense @ flat(v), xs)[rank] for v in vs]))
    assert_close(point.vjp(mine, batch=True), np.stack([pieces(dense.T @ flat(v), xs)[rank] for v in vs]))
    assert None not in programs


@pytest.mark.serial
def test_single_precision(programs):
    x, several = np.linspace(-1.0, 2.0, 5), np.random.default_rng(1).standard_normal((3, 5))
    slope = 2 * (x + np.cos(x)) * (1 - np.sin(x))
    point = mpiad.linearize(mpiad.jit(lambda x: (x + anp.cos(x)) ** 2, strict=True))(x.astype(np.float32))
    for product in (point.jvp, point.vjp):
        assert_close(product(several.astype(np.float32), batch=True), (slope * several).astype(np.float32), 1e-6)
    assert len(programs) == 2 and None not in programs


@pytest.mark.parametrize("entries", [0, 3])
def test_cotangents_that_are_constants(entries, rank, size):
    """Results on which nothing depends: all ranks send a zero per lane, those that are interpreted, too."""

    def fun(x):
        mpiad.mpi_allreduce(x[:entries])
        coming = mpiad.mpi_irecv(x, (rank - 1) % size)
        mpiad.mpi_wait(mpiad.mpi_isend(x**2, (rank + 1) % size))
        return anp.sum(mpiad.mpi_wait(coming) * x)

    x = np.arange(4.0) + rank
    part = mpiad.jit(fun, strict=True) if rank % 2 == 0 else fun
    several = np.stack([x, np.cos(x), np.ones(4)])
    for _ in range(2):
        product, expected = (mpiad.make_hvp(f, objective="sum")(x)[2] for f in (part, fun))
        np.testing.assert_allclose(product(several, batch=True), expected(several, batch=True), rtol=1e-12)


@pytest.mark.parametrize("length, together", [(100, [8]), (40_000, [2]), (200_000, [])])
def test_as_many_directions_run_together_as_fit_into_the_cache(length, together, monkeypatch, rank_rng):
    made, original = [], operation.Batched
    monkeypatch.setattr(operation, "Batched", lambda *args: made.append(args[-1]) or original(*args))
    rng = rank_rng(1)
    x, vs = rng.standard_normal(length), rng.standard_normal((8, length))
    point = mpiad.linearize(mpiad.jit(lambda x: anp.sin(x) * x))(x)
    expected = (np.cos(x) * x + np.sin(x)) * vs
    for _ in range(2):
        np.testing.assert_allclose(point.jvp(vs, batch=True), expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(point.vjp(vs, batch=True), expected, rtol=1e-12, atol=1e-13)
    assert sorted(set(made)) == together
