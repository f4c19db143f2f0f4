"""Shallow water on triangles: closed-form flows, and one answer for every partition; the roughness is recovered."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from scipy.optimize import brentq
from scipy.spatial import Delaunay

import mpiad
from mpiad.timestepping import scan

WORLD = MPI.COMM_WORLD
Run = Callable[..., CompletedProcess]
PROGRAM = "examples/triangular_shallow_water.py"
NUMBER = r"(\d\.\d{12}e[+-]\d\d)"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(request.config.rootpath / "examples")
    return importlib.import_module("triangular_shallow_water")


def mesh_of(example: ModuleType, size: tuple[float, float], spacing: float, seed: int = 0):
    """Return a mesh of a rectangle by Delaunay's triangulation of a disturbed grid, the same on all ranks."""
    counts = [round(length / spacing) + 1 for length in size]
    points = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), axis=-1).reshape(-1, 2).astype(float)
    last = np.array(counts) - 1
    inside = ((points > 0) & (points < last)).all(axis=1)
    points[inside] += np.random.default_rng(seed).uniform(-0.3, 0.3, (inside.sum(), 2))
    triangles = Delaunay(points).simplices.astype(int)
    return example.Mesh(points * np.array(size) / last, triangles)


def drawn_cells(rng: np.random.Generator, cells: int, ranks: int) -> list[np.ndarray]:
    """Return every rank's cells, in any order; the second of three or more ranks has none."""
    owner = rng.choice(ranks, cells, p=rng.dirichlet(np.ones(ranks)))
    if ranks > 2:
        owner[owner == 1] = 0
    order = rng.permutation(cells)
    return [order[owner[order] == rank] for rank in range(ranks)]


def pond(example: ModuleType):
    """Return a mesh with a rough bed, and water at rest above it, of which some is higher; part of the bed is dry."""
    mesh = mesh_of(example, (100.0, 60.0), 10.0)
    x, y = mesh.centers.T
    bed = 1.5 * np.sin(x / 15) * np.cos(y / 20) + 0.1 * np.random.default_rng(1).standard_normal(len(x))
    return mesh, bed, np.maximum(np.where(x < 30, 2.0, 0.5) - bed, 0)


def at_rest(depth: np.ndarray) -> np.ndarray:
    return np.stack([depth, 0 * depth, 0 * depth], axis=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_partitions_have_one_answer(example: ModuleType, rank: int, size: int, seed: int) -> None:
    mesh, bed, depth = pond(example)
    weights = np.random.default_rng([seed, 7]).standard_normal((len(bed), 3))

    def loss_and_gradient(cells: np.ndarray, comm: MPI.Comm | None):
        model = example.ShallowWater(mesh, bed, cells, 0.3, comm)
        step = mpiad.jit(model.step)

        def loss(start: np.ndarray, roughness: np.ndarray) -> float:
            return anp.sum(weights[cells] * scan(step, start, 15, roughness))

        arguments = at_rest(depth[cells]), np.full(len(cells), 0.05**2)
        return mpiad.value_and_grad(loss, (0, 1), objective="sum", comm=comm)(*arguments)

    cells = drawn_cells(np.random.default_rng([seed, size]), len(bed), size)[rank]
    value, gradients = loss_and_gradient(cells, None)
    expected, wholes = loss_and_gradient(np.arange(len(bed)), MPI.COMM_SELF)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for gradient, whole in zip(gradients, wholes):
        np.testing.assert_allclose(gradient, whole[cells], rtol=1e-12, atol=1e-12 * np.abs(whole).max())


def test_lake_at_rest_and_volume(example: ModuleType, rank: int, size: int) -> None:
    mesh, bed, depth = pond(example)
    cells = drawn_cells(np.random.default_rng(size), len(bed), size)[rank]
    model = example.ShallowWater(mesh, bed, cells, 0.3)
    lake = still = at_rest(np.maximum(0.5 - bed, 0)[cells])
    water = start = at_rest(depth[cells])
    for k in range(30):
        lake, water = model.step(lake, k, 0.04**2), model.step(water, k, 0.04**2)
    np.testing.assert_allclose(lake, still, rtol=0, atol=1e-14)
    before, after = (WORLD.allreduce(np.sum(w[:, 0] * model.areas)) for w in (start, water))
    assert after == pytest.approx(before, rel=1e-14)
    assert WORLD.allreduce(np.abs(water[:, 1:]).max(initial=0), MPI.MAX) > 0.5
    assert WORLD.allreduce(water[:, 0].min(initial=0), MPI.MIN) >= 0


def dam_break(x: np.ndarray, t: float, high: float, low: float) -> np.ndarray:
    """Return the depth behind and in front of a dam at x = 0 (Stoker 1957): rarefaction, middle state and bore."""
    g = 9.81
    c0 = np.sqrt(g * high)

    def speeds(h: float) -> tuple[float, float]:
        """Return the velocity of the middle state behind the bore, and that of the bore."""
        bore = np.sqrt(g * h * (h + low) / (2 * low))
        return bore * (1 - low / h), bore

    h = brentq(lambda h: 2 * (c0 - np.sqrt(g * h)) - speeds(h)[0], low, high)
    (u, bore), s = speeds(h), x / t
    fan = (2 * c0 - s) ** 2 / (9 * g)
    return np.select([s < -c0, s < u - np.sqrt(g * h), s < bore], [high, fan, h], low)


def dam_break_error(example: ModuleType, spacing: float) -> float:
    """Return the mean error of the depth 30 s after a dam break, along a channel."""
    mesh = mesh_of(example, (1000.0, 6 * spacing), spacing)
    cells = np.flatnonzero(example.bisection(mesh.centers, WORLD.size) == WORLD.rank)
    steps = int(np.ceil(30 / (0.9 * mesh.inradius / 12)))
    model = example.ShallowWater(mesh, 0 * mesh.areas, cells, 30 / steps)
    x = mesh.centers[cells, 0] - 500
    water = at_rest(np.where(x < 0, 4.0, 1.0))
    step, smooth = mpiad.jit(model.step), np.zeros(len(cells))
    for k in range(steps):
        water = step(water, k, smooth)
    error = np.abs(water[:, 0] - dam_break(x, 30.0, 4.0, 1.0))
    return WORLD.allreduce(np.sum(error * model.areas)) / mesh.areas.sum()


@pytest.mark.parametrize("spacings", [(50.0, 25.0), pytest.param((12.5, 6.25), marks=pytest.mark.thorough)])
def test_dam_break(example: ModuleType, spacings: tuple[float, float]) -> None:
    """The exact solution has corners and a bore, where a method of first order converges with less than that order."""
    coarse, fine = (dam_break_error(example, spacing) for spacing in spacings)
    assert fine < 0.1 * (spacings[1] / 25) ** 0.7
    assert coarse / fine > 2**0.6


@pytest.mark.thorough
def test_taylor_remainders_in_the_roughness(example: ModuleType, rank: int, size: int) -> None:
    """Water runs over dry ground all the time, and the remainders are of second order."""
    mesh, bed, depth = pond(example)
    cells = np.flatnonzero(example.bisection(mesh.centers, size) == rank)
    step = mpiad.jit(example.ShallowWater(mesh, bed, cells, 0.3).step)
    kinds = np.arange(len(bed))[cells] % 3

    def loss(log_n: np.ndarray) -> float:
        water = scan(step, at_rest(depth[cells]), 40, anp.exp(2 * log_n)[kinds])
        return anp.sum(water[:, 0] ** 2)

    at, direction = np.log([0.03, 0.05, 0.08]), np.array([1.0, -0.5, 0.7])
    value, gradient = mpiad.value_and_grad(loss, objective="sum", shared=True)(at)
    sizes = 0.5 ** np.arange(4, 10)
    changed = [WORLD.allreduce(loss(at + h * direction)) for h in sizes]
    remainders = np.abs(np.array(changed) - value - sizes * (gradient @ direction))
    rates = np.log2(remainders[:-1] / remainders[1:])
    assert rates.min() >= 1.9, rates


@pytest.mark.one_rank
def test_meshes(example: ModuleType) -> None:
    """The normals of each triangle's edges cancel; a refined mesh has the same area and four times the triangles."""
    mesh = mesh_of(example, (100.0, 60.0), 10.0)
    for one in (mesh, mesh.refined()):
        total = np.zeros((len(one.areas), 2))
        outward = one.normal * one.length[:, None]
        np.add.at(total, one.left, outward)
        np.add.at(total, one.right[~one.walls], -outward[~one.walls])
        np.testing.assert_allclose(total, 0, atol=1e-12)
        assert one.areas.sum() == pytest.approx(6000, rel=1e-13)
        assert one.length[one.walls].sum() == pytest.approx(320, rel=1e-13)
    assert len(mesh.refined().areas) == 4 * len(mesh.areas)
    for parts in (1, 3, 5):
        counts = np.bincount(example.bisection(mesh.centers, parts), minlength=parts)
        assert np.ptp(counts) <= parts


def computed(done: CompletedProcess) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "isn't compiled" not in done.stderr
    (pair,) = re.findall(rf"guess {NUMBER}, derivative {NUMBER}", done.stdout)
    return [float(number) for number in pair]


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.limit(400)
def test_roughness_is_recovered(mpirun: Run, tmp_path: Path, rank_counts: tuple) -> None:
    short = ("--seconds", 40, "--iterations", 1, "--most", 9)
    one, *others = (computed(mpirun(n, PROGRAM, *short, timeout=100)) for n in rank_counts)
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-12)
    computed(mpirun(1, PROGRAM, "--picture", tmp_path / "valley.png", timeout=300))
    assert (tmp_path / "valley.png").stat().st_size > 10_000


@pytest.mark.launches
@pytest.mark.thorough
def test_a_roughness_that_is_not_recovered_fails(mpirun: Run) -> None:
    done = mpirun(1, PROGRAM, "--seconds", 10, "--iterations", 1, timeout=50)
    assert done.returncode != 0 and "not recovered" in done.stderr
