"""A solver in bare mpi4py, and a model in mpiad that is calibrated to its results, in one job.

    mpiexec -n 3 python examples/coupled_solvers.py

Rank 0 simulates a heated room and its wall with NumPy alone. The room's temperature follows a thermostat, and heat flows
through the wall, u_t = κ u_xx, to the outside at zero degrees. Rank 0 doesn't import mpiad. The other ranks divide the
wall among them, receive the room's temperature of each step and the final profile of the wall through the program's own
intercommunicator, and send back the κ that reproduces this profile.
"""

import numpy
from mpi4py import MPI

WALL, STEPS, KAPPA = 24, 60, 0.35  # cells; time steps; κ in units of spacing² per time step


def simulate_room():
    """Return the room's temperature before each step, and the final profile of the wall."""
    room, wall, history = 15.0, numpy.zeros(WALL), []
    for _ in range(STEPS):
        history.append(room)
        padded = numpy.concatenate([[room], wall, [0.0]])
        wall = wall + KAPPA * (padded[:-2] - 2.0 * wall + padded[2:])
        room += (1.5 if room < 20.0 else 0.0) - 0.04 * (room - padded[1])
    return numpy.array(history), wall


def run_solver(model):
    """Send results to the ranks of the model; return the κ that its first rank sends."""
    history, wall = simulate_room()
    for rank in range(model.remote_size):
        model.Send(history, rank)
        model.Send(wall, rank)
    kappa = model.recv(source=0)
    print(f"the solver's kappa {KAPPA:.6f}, the model's {kappa:.6f}")
    assert abs(kappa - KAPPA) < 1e-6, kappa


def run_model(part, solver):
    """Fit κ on the ranks of `part`."""
    import autograd.numpy as np

    import mpiad

    mpiad.mpi_init(world=part)  # from here on, comm=None means these ranks
    domain = mpiad.Domain(WALL)
    history, wall = numpy.empty(STEPS), numpy.empty(WALL)
    solver.Recv(history)
    solver.Recv(wall)
    at_room = domain.owned[0].start == 0
    at_outside = domain.owned[0].stop == WALL

    def loss(kappa):
        u = numpy.zeros(domain.local_shape)
        for room in history:
            padded = domain.exchange(u, "edge")
            left = room if at_room else padded[0]
            right = 0.0 if at_outside else padded[-1]
            padded = np.concatenate([np.reshape(left, 1), u, np.reshape(right, 1)])
            u = u + kappa * (padded[:-2] - 2.0 * u + padded[2:])
        return domain.sum((u - wall[domain.owned[0]]) ** 2)

    fit = mpiad.minimize(loss, 0.1, bounds=[(0.0, 0.5)], tol=1e-14)
    if mpiad.mpi_rank() == 0:
        solver.send(float(fit.x), 0)


world = MPI.COMM_WORLD
if world.size < 2:
    raise SystemExit("Start at least two ranks: one for the solver, and one for the model.")
is_solver = world.rank == 0
part = world.Split(0 if is_solver else 1)
other = part.Create_intercomm(0, world, 1 if is_solver else 0)
if is_solver:
    run_solver(other)
else:
    run_model(part, other)
