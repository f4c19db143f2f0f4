"""The Fortran solver of the examples, alone and coupled: gradients compared with complex steps of one NumPy program."""

from pathlib import Path

import autograd.numpy as anp
import numpy as np
import pytest
from shared_libraries import compiled

import mpiad
from mpiad.extend import Communicator, Cotangent, Input, LibraryFunction, Output, Value, library

FOLDER = Path(__file__).parents[2] / "examples" / "fortran"
COLUMNS, ROWS, STEPS = 8, 5, 12
ALL = np.random.default_rng(0).uniform(0.5, 1.0, (3, COLUMNS, ROWS))


@pytest.fixture(scope="module")
def heat(tmp_path_factory: pytest.TempPathFactory) -> LibraryFunction:
    folder = tmp_path_factory.mktemp("heat")
    source = "".join((FOLDER / name).read_text() for name in ("mpi_of_c.f90", "heat.f90"))
    path = compiled(source, ".f90", folder, f"-J{folder}")
    heat = library(path).function(
        "heat_run", comm=Communicator("C"), nx=Value("int32"), ny=Value("int32"), steps=Value("int32"),
        kappa=Input("nx", "ny"), wall=Input("nx"), u0=Input("nx", "ny"), u=Output("nx", "ny"),
    )  # fmt: skip
    heat.adjoint(
        "heat_run_b", "comm", "nx", "ny", "steps", "kappa", Cotangent("kappa"), "wall", Cotangent("wall"),
        "u0", Cotangent("u0"), Cotangent("u"),
    )  # fmt: skip
    return heat


def reference_step(kappa: np.ndarray, wall: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the temperatures of the whole plate after a step; the arrays may be complex."""
    new = u.astype(np.result_type(kappa, wall, u))
    for axis in (0, 1):
        k, v = np.moveaxis(kappa, axis, 0), np.moveaxis(u, axis, 0)
        flux = (k[1:] + k[:-1]) / 2 * (v[1:] - v[:-1])
        changed = np.moveaxis(new, axis, 0)
        changed[:-1] += flux
        changed[1:] -= flux
    new[:, 0] -= 2 * kappa[:, 0] * u[:, 0]
    new[:, -1] += 2 * kappa[:, -1] * (wall - u[:, -1])
    return new


def complex_step(fun, x: np.ndarray) -> np.ndarray:
    gradient = np.empty(x.shape)
    for index in np.ndindex(x.shape):
        moved = x.astype(complex)
        moved[index] += 1e-30j
        gradient[index] = fun(moved).imag / 1e-30
    return gradient


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_gradient_of_the_solver(heat: LibraryFunction) -> None:
    domain = mpiad.Domain((COLUMNS, ROWS), dims=(mpiad.mpi_size(), 1))
    own = domain.owned[0]
    kappa, start, weights = 0.2 * ALL[0], ALL[1], ALL[2]
    wall = ALL[1, :, 2].copy()

    def loss(kappa, wall, start):
        return domain.sum(weights[own] * heat(STEPS, kappa, wall, start) ** 2)

    def whole(kappa, wall, start):
        for _ in range(STEPS):
            start = reference_step(kappa, wall, start)
        return np.sum(weights * start**2)

    arguments = [kappa[own], wall[own], start[own]]
    value, gradients = mpiad.value_and_grad(loss, (0, 1, 2))(*arguments)
    assert value == pytest.approx(whole(kappa, wall, start), rel=1e-13)
    assert_close(gradients[0], complex_step(lambda x: whole(x, wall, start), kappa)[own])
    assert_close(gradients[1], complex_step(lambda x: whole(kappa, x, start), wall)[own])
    assert_close(gradients[2], complex_step(lambda x: whole(kappa, wall, x), start)[own])
    compiled_gradients = mpiad.value_and_grad(mpiad.jit(loss), (0, 1, 2))(*arguments)[1]
    for a, b in zip(compiled_gradients, gradients):
        assert_close(a, b)


def test_gradient_of_two_coupled_solvers(heat: LibraryFunction, rank: int, size: int) -> None:
    """Air above the plate, solved in Python, exchanges heat with it in every step."""
    domain = mpiad.Domain((COLUMNS, ROWS), dims=(size, 1))
    own, ones = domain.owned[0], np.ones((COLUMNS, ROWS))
    upstream, downstream = rank - 1 if rank else None, rank + 1 if rank < size - 1 else None

    def outlet(parameters):
        u, air, total = ALL[1, own], np.zeros(own.stop - own.start), 0.0
        for _ in range(STEPS):
            flux = parameters[1] * (u[:, -1] - air)
            u = heat(1, parameters[0] * ones[own], air, u)
            before = mpiad.mpi_exchange(air[-1:], downstream, upstream)
            air = air - 0.3 * (air - anp.concatenate([before, air[:-1]])) + flux
            total = total + air[-1]
        return mpiad.mpi_bcast(total, size - 1)

    def whole(parameters):
        u, air, total = ALL[1], np.zeros(COLUMNS), 0.0
        for _ in range(STEPS):
            flux = parameters[1] * (u[:, -1] - air)
            u = reference_step(parameters[0] * ones, air, u)
            air = air - 0.3 * (air - np.concatenate([[0.0], air[:-1]])) + flux
            total = total + air[-1]
        return total

    at = np.array([0.15, 0.1])
    value, gradient = mpiad.value_and_grad(outlet, shared=True)(at)
    assert value == pytest.approx(whole(at), rel=1e-13)
    assert_close(gradient, complex_step(whole, at))


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.parametrize(
    "program, lines",
    [
        (
            "examples/fortran_shallow_water.py",
            ["sill 5.946 m, drag 0.00257 of mud and 0.0304 of reeds", "misfit 7.3915 of 24 readings"],
        ),
        (
            "examples/fortran_coupled.py",
            ["outlet 0.505885045141, gradient -1.849622289552 7.251673237254; without cross terms 51% off"],
        ),
    ],
)
def test_examples(mpirun, program: str, lines: list[str]) -> None:
    done = mpirun(2, program)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("This example needs"):
        pytest.skip(done.stdout.strip())
    assert done.stdout.splitlines() == lines


@pytest.mark.launches
def test_a_stop_in_fortran_ends_the_job(mpirun, tmp_path: Path) -> None:
    source = "subroutine halt(x) bind(c)\n  use iso_c_binding\n  real(c_double) :: x\n  if (x > 0) stop\nend subroutine\n"
    path = compiled(source, ".f90", tmp_path, mpi=False)
    program = f"""
import mpiad
from mpiad.extend import InOut, library
halt = library({str(path)!r}).function("halt", x=InOut())
halt(float(mpiad.mpi_rank()))
mpiad.mpi_barrier()
"""
    done = mpirun(2, program)
    assert done.returncode != 0
    assert f"mpiad: rank 1: halt of {path} ended the process, as by Fortran's stop" in done.stderr
