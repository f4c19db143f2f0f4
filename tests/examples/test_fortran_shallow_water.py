"""The shallow-water model in Fortran: gradients compared with complex steps of one NumPy program, and conservation."""

from pathlib import Path
from types import SimpleNamespace

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from shared_libraries import compiled

import mpiad
from mpiad.extend import Communicator, Cotangent, Input, Output, Value, library
from mpiad.testing import check_adjoint

FOLDER = Path(__file__).parents[2] / "examples" / "fortran"
CELLS, STEPS = (7, 5), 5  # uneven blocks on 2 to 4 ranks; two segments between checkpoints, of three steps and of two
DT, DX, F, GRAVITY, SLOW = 5.0, 100.0, 2e-3, 9.81, 1e-3
NAMES = ("b", "r", "h0", "u0", "v0")
ENDS = (0.0, 2.0), (1e-3, 2e-2), (4.0, 5.0), (-1.0, 1.0), (-1.0, 1.0)
RNG = np.random.default_rng(3)
FIELDS = {name: RNG.uniform(*ends, CELLS) for name, ends in zip(NAMES, ENDS)}

pytestmark = pytest.mark.skipif(MPI._sizeof(MPI.Comm) != 4, reason="the declarations of MPI in Fortran are those of MPICH")


@pytest.fixture(scope="module")
def water(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("water")
    source = "".join((FOLDER / name).read_text() for name in ("mpi_of_c.f90", "shallow_water.f90"))
    fortran = library(compiled(source, ".f90", folder, f"-J{folder}", "-O0", "-fcheck=bounds"))
    ranks = {"comm": Communicator("C")} | {name: Value("int32") for name in ("px", "py", "nx", "ny")}
    numbers = {"steps": Value("int32"), "dt": Value(), "dx": Value(), "f": Value()}
    run = fortran.function(
        "shallow_water_run", **ranks, **numbers, **{name: Input("ny", "nx") for name in NAMES},
        h=Output("ny", "nx"), u=Output("ny", "nx"), v=Output("ny", "nx"),
    )  # fmt: skip
    inputs = [each for name in NAMES for each in (name, Cotangent(name))]
    run.adjoint("shallow_water_run_b", *ranks, *numbers, *inputs, Cotangent("h"), Cotangent("u"), Cotangent("v"))
    halo = fortran.function("shallow_water_halo", **ranks, a=Input("ny", "nx"), p=Output("ny + 2", "nx + 2"))
    halo.adjoint("shallow_water_halo_b", *ranks, Cotangent("a"), Cotangent("p"))
    totals = fortran.function(
        "shallow_water_totals", **ranks, dx=Value(), b=Input("ny", "nx"), h=Input("ny", "nx"), u=Input("ny", "nx"),
        v=Input("ny", "nx"), volume=Output(), energy=Output(),
    )  # fmt: skip
    return SimpleNamespace(run=run, halo=halo, totals=totals)


def domains() -> list[mpiad.Domain]:
    """Return the basin divided in all ways."""
    size = mpiad.mpi_size()
    return [mpiad.Domain(CELLS, dims=(size // columns, columns)) for columns in (4, 3, 2, 1) if size % columns == 0]


def own(domain: mpiad.Domain) -> list[np.ndarray]:
    return [field[domain.owned].copy() for field in FIELDS.values()]


def means(a: np.ndarray, axis: int) -> np.ndarray:
    """Return the means of neighbors along an axis, which has one entry less then."""
    return (np.delete(a, 0, axis) + np.delete(a, -1, axis)) / 2


def walled(a: np.ndarray, axis: int) -> np.ndarray:
    """Return an array with zeros before and after the entries along an axis."""
    wall = 0 * np.take(a, [0], axis)
    return np.concatenate([wall, a, wall], axis)


def rates(b: np.ndarray, r: np.ndarray, h: np.ndarray, u: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Return the time derivatives in the whole basin; u and v (..., y, x) are those between cells. All may be complex."""
    y, x = -2, -1
    flux_x, flux_y = means(h, x) * u, means(h, y) * v
    head = GRAVITY * (h + b) + (means(walled(u, x) ** 2, x) + means(walled(v, y) ** 2, y)) / 2
    # At the corners between four cells. At the others, on the walls, the fluxes that q multiplies are zero.
    q = (F + (np.diff(v, axis=x) - np.diff(u, axis=y)) / DX) / means(means(h, x), y)
    turned_x, turned_y = means(walled(q * means(flux_y, x), y), y), means(walled(q * means(flux_x, y), x), x)
    across_x, across_y = means(means(walled(v, y), y), x), means(means(walled(u, x), x), y)
    drag_x = means(r, x) * np.sqrt(u**2 + across_x**2 + SLOW**2) * u / means(h, x)
    drag_y = means(r, y) * np.sqrt(v**2 + across_y**2 + SLOW**2) * v / means(h, y)
    h_rate = -(np.diff(walled(flux_x, x), axis=x) + np.diff(walled(flux_y, y), axis=y)) / DX
    return [h_rate, turned_x - np.diff(head, axis=x) / DX - drag_x, -turned_y - np.diff(head, axis=y) / DX - drag_y]


def whole(b: np.ndarray, r: np.ndarray, h: np.ndarray, u: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Return the final state of the whole basin, in the solver's layout."""
    state = [h, u[..., :, :-1], v[..., :-1, :]]
    for _ in range(STEPS):
        first = state
        for part in (1 / 3, 1 / 2, 1):
            state = [a + part * DT * rate for a, rate in zip(first, rates(b, r, *state))]
    h, u, v = state
    return [h, np.concatenate([u, 0 * u[..., :1]], -1), np.concatenate([v, 0 * v[..., :1, :]], -2)]


def owners(domain: mpiad.Domain) -> np.ndarray:
    """Return the rank of each cell of the basin."""
    ranks = np.empty(CELLS)
    for rank, block in enumerate(MPI.COMM_WORLD.allgather(domain.owned)):
        ranks[block] = rank
    return ranks


def on_all_ranks(condition: bool) -> bool:
    """Return whether a condition holds on all ranks, so that none waits for one that has left the test."""
    return MPI.COMM_WORLD.allreduce(bool(condition), MPI.LAND)


def terms(xp, rank, h, u, v):
    """Return the terms of a loss that isn't quadratic, and differs between ranks; xp is NumPy or autograd's NumPy."""
    return (1 + rank) * (xp.sin(h + rank) * u + xp.exp(v) * (h - 5) ** 2 + u * v)


@pytest.mark.thorough
def test_gradient_of_the_solver(water: SimpleNamespace, rank: int) -> None:
    arguments = dict(zip(("b", "r", "h", "u", "v"), FIELDS.values()))
    for domain in domains():
        ranks = owners(domain)

        def loss(*blocks, domain=domain):
            return domain.sum(terms(anp, rank, *water.run(*reversed(domain.dims), STEPS, DT, DX, F, *blocks)))

        def loss_of_basin(ranks=ranks, **fields):
            return terms(np, ranks, *whole(**fields)).sum((-2, -1))

        blocks, all_fields = own(domain), tuple(range(5))
        value, gradients = mpiad.value_and_grad(loss, all_fields)(*blocks)
        assert value == pytest.approx(loss_of_basin(**arguments), rel=1e-13)
        compiled_value, compiled_gradients = mpiad.value_and_grad(mpiad.jit(loss), all_fields)(*blocks)
        assert compiled_value == pytest.approx(value, rel=1e-14)
        for name, *both in zip(arguments, gradients, compiled_gradients):
            steps = 1e-30j * np.eye(arguments[name].size).reshape(-1, *CELLS)
            derivatives = loss_of_basin(**arguments | {name: arguments[name] + steps}).imag.reshape(CELLS) / 1e-30
            for gradient in both:
                error = np.abs(gradient - derivatives[domain.owned]).max() / np.abs(derivatives).max()
                assert on_all_ranks(error < 1e-12), (name, domain.dims, error)


def test_the_exchange_of_halos(water: SimpleNamespace) -> None:
    for domain in domains():
        (b, *_), (rows, columns) = own(domain), domain.owned
        expected = np.pad(FIELDS["b"], 1)[rows.start : rows.stop + 2, columns.start : columns.stop + 2]
        assert on_all_ranks(np.array_equal(water.halo(*reversed(domain.dims), b), expected)), domain.dims
        check_adjoint(lambda a, domain=domain: water.halo(*reversed(domain.dims), a), b)


def test_volume_and_energy(water: SimpleNamespace) -> None:
    """No water is lost, energy is lost to the drag only, and a lake at rest over any bottom remains at rest."""
    domain = mpiad.Domain(CELLS)
    p = tuple(reversed(domain.dims))
    b, r, *state = own(domain)
    _, start = water.totals(*p, DX, b, *state)
    changes = []
    for drag, parts in ((r, 4), (0 * r, 4), (0 * r, 8)):
        volume, energy = water.totals(*p, DX, b, *water.run(*p, 20 * parts, DT / parts, DX, F, b, drag, *state))
        assert volume == pytest.approx(FIELDS["h0"].sum() * DX**2, rel=1e-14)
        changes.append(energy / start - 1)
    # Sadourny's scheme conserves energy, but for an error of the time steps, of third order.
    assert changes[0] < -5e-3 and abs(changes[1]) < 2e-4 and abs(changes[2]) < abs(changes[1]) / 6
    h, u, v = water.run(*p, 40, DT, DX, F, b, r, 6.0 - b, 0 * b, 0 * b)
    np.testing.assert_allclose(h + b, 6.0, rtol=1e-14)
    assert max(np.abs(u).max(), np.abs(v).max()) < 1e-13
