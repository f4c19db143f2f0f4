"""A parallel heat solver in Fortran, with its adjoint in Fortran, calibrated to measurements.

    mpiexec -n 4 python examples/fortran_heat.py

`examples/fortran/heat.f90` is an MPI program of its own: it knows its communicator, exchanges columns by MPI_Sendrecv, and
computes the adjoint backward in time. mpiad passes it NumPy arrays and a communicator. A plate has two materials with a
wavy boundary between them. Their conductivities and the temperature of the wall above are found from the temperatures at
the end: the model from the parameters to the arrays is written in Python, and the solver runs in Fortran.
"""

import autograd.numpy as np
import numpy
from fortran.build import fortran_library

import mpiad
from mpiad.extend import Communicator, Cotangent, Input, Output, Value
from mpiad.testing import check_adjoint

COLUMNS, ROWS, STEPS = 24, 16, 60
TRUE = numpy.array([0.05, 0.2, 1.5])  # conductivities times the time step, temperature of the wall

heat = fortran_library("heat").function(
    "heat_run", comm=Communicator("C"), nx=Value("int32"), ny=Value("int32"), steps=Value("int32"),
    kappa=Input("nx", "ny"), wall=Input("nx"), u0=Input("nx", "ny"), u=Output("nx", "ny"),
)  # fmt: skip
heat.adjoint(
    "heat_run_b", "comm", "nx", "ny", "steps", "kappa", Cotangent("kappa"), "wall", Cotangent("wall"),
    "u0", Cotangent("u0"), Cotangent("u"),
)  # fmt: skip

domain = mpiad.Domain((COLUMNS, ROWS), dims=(mpiad.mpi_size(), 1))
x, y = domain.coordinates()
lower = y < 6.0 + 3.0 * numpy.sin(x / 3.0)
start = numpy.exp(-0.05 * ((x - 12.0) ** 2 + (y - 10.0) ** 2))


def final(parameters):
    first, second, wall = parameters
    kappa = np.where(lower, first, second)
    return heat(STEPS, kappa, wall * numpy.ones(len(x)), start)


measured = final(TRUE)


def misfit(parameters):
    return domain.sum((final(parameters) - measured) ** 2)


check_adjoint(lambda u: heat(STEPS, numpy.where(lower, 0.1, 0.2), numpy.zeros(len(x)), u), start)
result = mpiad.minimize(misfit, numpy.array([0.1, 0.1, 1.0]), bounds=(0.01, 2.0), tol=1e-16)
if mpiad.mpi_rank() == 0:
    print(f"conductivities {result.x[0]:.6f} and {result.x[1]:.6f}, wall {result.x[2]:.6f}")
assert numpy.allclose(result.x, TRUE, rtol=1e-5), result.x
