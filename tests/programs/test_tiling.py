"""Loops in tiles: the results are those of whole loops, to the last bit, and those of the interpreted function."""

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same, forget_programs
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain
from mpiad.programs import overlap, tiling
from mpiad.programs.overlap import actions_of
from mpiad.programs.replay import Replay


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch):
    """Divide small loops, too; the tiles have one plane each unless a test sets `tiling._TILE`."""
    monkeypatch.setattr(overlap, "LARGE", 1)
    monkeypatch.setattr(overlap, "_SMALL", 1)
    monkeypatch.setattr(tiling, "_TILE", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def wave(domain, boundary: float | str = 0.0):
    """Return five steps of a wave, each of which exchanges a halo."""

    def fun(u, s):
        before = u
        for _ in range(5):
            p = domain.exchange(u, boundary=boundary)
            around = p[2:, 1:-1, 1:-1] + p[:-2, 1:-1, 1:-1] + p[1:-1, 2:, 1:-1] + p[1:-1, 1:-1, :-2]
            u, before = 2 * u - before + s * (around - 4 * u), u
        return u

    return fun


def ahead(domain):
    """Return loops that read and overwrite at distances of up to five planes, and backwards."""

    def fun(u, s):
        for _ in range(3):
            v = anp.sin(anp.concatenate([u[5:], u[:5]]) * s)
            w = anp.concatenate([v[-3:], v[:-3]]) - anp.cumsum(v, axis=2)
            u = anp.cos(w[::-1]) + 0.5 * v[:, ::-1] + anp.pad(w[2:], ((0, 2), (0, 0), (0, 0))) + w[4]
        return u

    return fun


def constants(domain):
    """Return exchanges of several fields with different constants beyond the grid, which share memory."""

    def fun(u, s):
        for value in (0.0, 1.5, 0.0, -2.0):
            a = domain.exchange(u, boundary=value)
            b = domain.exchange(a[2:, 1:-1, 1:-1] * s, boundary=value)
            u = 0.5 * (a[:-2, 2:, 1:-1] + b[1:-1, :-2, 2:]) - anp.tanh(b[2:, 1:-1, 1:-1])
        return u

    return fun


def signed_zeros(domain):
    """Return exchanges with zeros of both signs beyond the grid, which share memory."""

    def fun(u, s):
        for value in (0.0, 0.0, -0.0, -0.0):
            a = domain.exchange(u, boundary=value)
            u = anp.arctan2(a[2:, 1:-1, 1:-1], -1.0) * s + anp.arctan2(a[:-2, 1:-1, 1:-1], -1.0)
        return u

    return fun


def behind(u, planes):
    return anp.pad(u[:-planes], ((planes, 0), (0, 0), (0, 0)))


def shrinking(domain):
    """Return loops that read planes behind, and whose results, which have fewer and fewer planes, share memory."""

    def fun(u, s):
        for _ in range(3):
            v = anp.sin(behind(u, 2) * behind(u, 1))
            u = anp.cos(behind(v, 2) + behind(v, 1) * s[: len(v)])[:-1]
        return anp.pad(u, ((3, 0), (0, 0), (0, 0)))

    return fun


def whole_blocks(domain):
    """Return exchanges in memory in which other loops write at the edges, too."""
    wide = Domain(domain.shape, halo=(1, 1, 8), dims=domain.dims)

    def fun(u, s):
        for _ in range(3):
            p = anp.sin(wide.exchange(u, boundary=1.5))
            v = anp.tanh(p[:-2] * p[2:] + p[1:-1])
            u = s * (v[:, 1:-1, :8] * v[:, 2:, 16:] - v[:, :-2, 8:-8])
        return u

    return fun


PROGRAMS = {
    "wave": wave,
    "wave, a constant": lambda domain: wave(domain, 0.7),
    "wave, copies": lambda domain: wave(domain, "edge"),
    "ahead": ahead,
    "constants": constants,
    "signed zeros": signed_zeros,
    "shrinking": shrinking,
    "whole blocks": whole_blocks,
}


@pytest.mark.few(2)
@pytest.mark.unguarded  # under a watch nothing is prepared
@pytest.mark.parametrize("name", PROGRAMS)
def test_tiles_compute_the_same_bits(name, rank, rank_rng, size, monkeypatch):
    domain = Domain((14 * size, 7, 8), dims=(size, 1, 1))
    whole, speeds, weights = rank_rng(120).standard_normal((3, *domain.shape))
    u, s, mine = whole[domain.owned], 0.2 * speeds[domain.owned], weights[domain.owned]
    fun = PROGRAMS[name](domain)
    loss = mpiad.value_and_grad(lambda u, s: anp.sum(fun(u, s) * mine), (0, 1), objective="sum")
    for planes, cache in ((1, 1 << 30), (3, 50_000)):
        monkeypatch.setattr(tiling, "_TILE", planes * 56)
        monkeypatch.setattr(tiling, "_CACHE", cache)
        for program in (fun, loss):
            jitted = mpiad.jit(program, strict=True)
            jitted(u, s)
            assert_same(jitted(u, s), program(u, s), 1e-11)
            (entry,) = jitted._cache.entries.values()
            whole, tiles = (Replay(entry.replays, prepared).first(u, s) for prepared in (False, True))
            for x, y in zip(whole, tiles, strict=True):
                np.testing.assert_array_equal(x, y)


def tiles_of(fun, *args):
    """Return the numbers of the loops in the order of their tiles, and the number of all loops."""
    forget_programs()
    jitted = mpiad.jit(fun, strict=True)
    jitted(*args)
    (entry,) = jitted._cache.entries.values()
    replays = entry.replays
    plain = actions_of(replays.schedule, replays.texts, True)
    return [x.at for x in replays.actions[True] if x.kind == "loop"], sum(x.kind == "loop" for x in plain)


@pytest.mark.one_rank
def test_time_steps_run_in_one_pass_if_no_message_separates_them(monkeypatch):
    """Each loop begins a plane after the loop before; with less memory, or halos that copy cells, all wait."""
    domain, u = Domain((14, 7, 8), comm=MPI.COMM_SELF), np.ones((14, 7, 8))
    order, loops = tiles_of(wave(domain), u, u)
    copy, *steps = sorted(set(order))
    assert (order[:6], len(steps)) == ([copy, copy, steps[0], copy, *steps[:2]], loops - 1)
    monkeypatch.setattr(tiling, "_CACHE", 1)
    order, loops = tiles_of(wave(domain), u, u)
    assert order == sorted(order) and len(order) == loops
    monkeypatch.setattr(tiling, "_CACHE", 1 << 30)
    order, _ = tiles_of(wave(domain, "edge"), u, u)
    assert order == sorted(order)


@pytest.mark.one_rank
def test_second_derivatives_play_back_the_results_of_exchanges():
    """The function runs again with logged results of its communications if the reverse pass is differentiated."""
    domain = Domain((14, 7, 8), comm=MPI.COMM_SELF)
    u, s, seeds = np.random.default_rng(121).standard_normal((3, *domain.shape))
    waves = wave(domain, 0.7)

    def fun(u, s):
        return anp.sin(waves(anp.sin(u), s))

    def gradient(fun):
        pull, _ = mpiad.make_vjp(fun)(u, s)
        return mpiad.grad(lambda g: anp.sum(pull(g) ** 2), objective="sum", comm=MPI.COMM_SELF)(seeds)

    assert_same(gradient(mpiad.jit(fun, strict=True)), gradient(fun), 1e-11)


@pytest.mark.one_rank
def test_vectors_that_are_read_as_a_whole_take_little_memory(monkeypatch):
    def fun(u, x):
        for _ in range(2):
            u = anp.sin(u[1:] - u[:-1]) * x
        return u

    monkeypatch.setattr(tiling, "_CACHE", 100_000)
    order, loops = tiles_of(fun, np.ones((14, 400)), np.ones(400))
    assert len(order) > loops == 2
