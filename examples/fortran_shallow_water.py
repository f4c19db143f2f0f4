"""A shallow-water model in Fortran, with its adjoint in Fortran, calibrated to water levels.

    mpiexec -n 4 python examples/fortran_shallow_water.py

`examples/fortran/shallow_water.f90` is an MPI program of its own: it divides the basin in both directions, exchanges halos
by MPI_Sendrecv, and computes the adjoint backward in time from checkpoints. mpiad passes it arrays and a communicator.
Wind has piled up water in the west of a lake. When it stops, the water swings back over a sill, and through reeds in the
east. The height of the sill and the drag coefficients of mud and reeds are found from noisy water levels at three gauges.
The model from these numbers to arrays is written in Python, as are the gauges, which are read between runs in Fortran.
"""

import autograd.numpy as np
import numpy
from fortran.build import fortran_library

import mpiad
from mpiad.extend import Communicator, Cotangent, Input, Output, Value
from mpiad.testing import check_adjoint, check_grads

ROWS, COLUMNS, CELL, DEPTH, CORIOLIS = 12, 18, 800.0, 10.0, 1e-4
READINGS, STEPS, STEP, NOISE = 8, 5, 40.0, 0.005  # steps between readings, their length in seconds; noise in meters
UNITS = numpy.array([1.0, 1e-3, 1e-2])  # height of the sill in meters, drag coefficients of mud and reeds
TRUE = numpy.array([6.0, 2.5, 3.0])

fortran = fortran_library("shallow_water")
ranks = {"comm": Communicator("C")} | {name: Value("int32") for name in ("px", "py", "nx", "ny")}
field, result = Input("ny", "nx"), Output("ny", "nx")
run = fortran.function(
    "shallow_water_run", **ranks, steps=Value("int32"), dt=Value(), dx=Value(), f=Value(),
    b=field, r=field, h0=field, u0=field, v0=field, h=result, u=result, v=result,
)  # fmt: skip
run.adjoint(
    "shallow_water_run_b", *ranks, "steps", "dt", "dx", "f", "b", Cotangent("b"), "r", Cotangent("r"),
    "h0", Cotangent("h0"), "u0", Cotangent("u0"), "v0", Cotangent("v0"), Cotangent("h"), Cotangent("u"), Cotangent("v"),
)  # fmt: skip
halo = fortran.function("shallow_water_halo", **ranks, a=field, p=Output("ny + 2", "nx + 2"))
halo.adjoint("shallow_water_halo_b", *ranks, Cotangent("a"), Cotangent("p"))

domain = mpiad.Domain((ROWS, COLUMNS))
py, px = domain.dims
y, x = domain.coordinates(CELL)
gauges = CELL * numpy.array([[2.2, 1.5], [8.6, 9.8], [4.3, 15.4]])
level = DEPTH + numpy.tanh((4000.0 - x) / 2000.0) + 0.0 * y  # at the start
rest = numpy.zeros(domain.local_shape)


def readings(parameters, count=READINGS):
    sill, mud, reeds = parameters * UNITS
    bottom = sill * numpy.exp(-(((x - 5000.0) / 1500.0) ** 2)) + rest
    drag = np.where(x + 0.5 * y > 10000.0, reeds, mud)
    h, u, v, levels = level - bottom, rest, rest, []
    for _ in range(count):
        h, u, v = run(px, py, STEPS, STEP, CELL, CORIOLIS, bottom, drag, h, u, v)
        levels.append(domain.interpolate(h + bottom, gauges, CELL))
    return np.stack(levels)


def misfit(parameters):
    return np.sum((readings(parameters) - measured) ** 2) / (2 * NOISE**2)


measured = readings(TRUE) + NOISE * numpy.random.default_rng(0).standard_normal((READINGS, len(gauges)))
guess = numpy.array([3.0, 1.0, 1.0])
check_adjoint(lambda a: halo(px, py, a), rest)  # the exchange of the halo is linear: the dot-product test
check_grads(lambda p: np.sum(readings(p, 2) ** 2), guess, order=1, modes=("rev",), shared=True)
found = mpiad.minimize(misfit, guess, bounds=(0.1, 9.0), tol=1e-9)
if mpiad.mpi_rank() == 0:
    print("sill {:.3f} m, drag {:.5f} of mud and {:.4f} of reeds".format(*found.x * UNITS))
    print(f"misfit {found.fun:.4f} of {measured.size} readings")
assert numpy.allclose(found.x, TRUE, rtol=0.05), found.x
