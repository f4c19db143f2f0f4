"""Two coupled solvers, one in Fortran and one in Python, and the gradient of the coupled system.

    mpiexec -n 4 python examples/fortran_coupled.py

Air flows along the top of a heated plate. The plate is solved in Fortran (`examples/fortran/heat.f90`), the air in Python:
it moves by one cell in three steps, and exchanges heat with the plate. In each step the plate gets the temperature of the
air above each column, and the air gets the heat flux out of the plate. The gradient of the air's temperature at the outlet
contains all dependences, also those that cross the interface several times. A gradient that leaves out the plate's effect
on the air's later temperature, and the air's on the plate, is wrong: the program prints by how much.
"""

import autograd.numpy as np
import numpy
from fortran.build import fortran_library

import mpiad
from mpiad.extend import Communicator, Cotangent, Input, Output, Value

COLUMNS, ROWS, STEPS, SPEED = 24, 8, 60, 1.0 / 3.0

heat = fortran_library("heat").function(
    "heat_run", comm=Communicator("C"), nx=Value("int32"), ny=Value("int32"), steps=Value("int32"),
    kappa=Input("nx", "ny"), wall=Input("nx"), u0=Input("nx", "ny"), u=Output("nx", "ny"),
)  # fmt: skip
heat.adjoint(
    "heat_run_b", "comm", "nx", "ny", "steps", "kappa", Cotangent("kappa"), "wall", Cotangent("wall"),
    "u0", Cotangent("u0"), Cotangent("u"),
)  # fmt: skip

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
domain = mpiad.Domain((COLUMNS, ROWS), dims=(size, 1))
columns, rows = domain.local_shape
x, _ = domain.coordinates()
plate = 1.0 + numpy.sin(x / 4.0) ** 2 + numpy.zeros((columns, ROWS))
upstream, downstream = rank - 1 if rank else None, rank + 1 if rank < size - 1 else None


def outlet(parameters, through_air=lambda x: x, through_plate=lambda x: x):
    """Return the mean temperature of the outgoing air; the two functions of interface values are the identity."""
    kappa, transfer = parameters
    conductivity = kappa * numpy.ones((columns, ROWS))
    u, air, total = plate, numpy.zeros(columns), 0.0
    for _ in range(STEPS):
        flux = transfer * (through_plate(u[:, -1]) - air)
        u = heat(1, conductivity, through_air(air), u)
        before = mpiad.mpi_exchange(air[-1:], dest=downstream, source=upstream)  # zero at the inlet
        air = air - SPEED * (air - np.concatenate([before, air[:-1]])) + flux
        total = total + air[-1]
    return mpiad.mpi_bcast(total / STEPS, root=size - 1)


at = numpy.array([0.1, 0.05])
value, gradient = mpiad.value_and_grad(outlet, shared=True)(at)
_, partial = mpiad.value_and_grad(
    lambda p: outlet(p, through_air=mpiad.stop_gradient, through_plate=mpiad.stop_gradient), shared=True
)(at)
error = numpy.linalg.norm(partial - gradient) / numpy.linalg.norm(gradient)
if rank == 0:
    print(f"outlet {value:.12f}, gradient {gradient[0]:.12f} {gradient[1]:.12f}; without cross terms {error:.0%} off")
step = 1e-6
for k in range(2):
    ends = [outlet(at + sign * step * (numpy.arange(2) == k)) for sign in (-1, 1)]
    assert abs((ends[1] - ends[0]) / (2 * step) - gradient[k]) < 1e-8 * abs(gradient[k])
