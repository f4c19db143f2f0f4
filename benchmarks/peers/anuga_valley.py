"""ANUGA's step on a mesh from a file: `anuga_valley.py FILE BEFORE SECONDS ROUNDS` prints the milliseconds of a step.

Of first order in space and time (flow algorithm DE0 without gradients), with Manning's friction and walls all around. The
flood's first `BEFORE` seconds aren't timed, each round is `SECONDS` more. Under `mpiexec`, ANUGA distributes the mesh.
Needs ANUGA and NumPy only, and mpi4py for several ranks.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"

import anuga
import numpy as np


def domain_of(file: str) -> anuga.Domain:
    """Return this rank's part of the flood."""
    domain = None
    if anuga.myid == 0:
        data = np.load(file)
        domain = anuga.Domain(data["points"], data["triangles"])
        domain.set_quantity("elevation", data["bed"], location="centroids")
        domain.set_quantity("stage", data["bed"] + data["depth"], location="centroids")
        domain.set_quantity("friction", 0.05)
    if anuga.numprocs > 1:
        domain = anuga.distribute(domain)
    domain.set_flow_algorithm("DE0")
    for name in ("beta_w", "beta_w_dry", "beta_uh", "beta_uh_dry", "beta_vh", "beta_vh_dry"):
        setattr(domain, name, 0.0)
    domain.set_store(False)
    wall = anuga.Reflective_boundary(domain)
    domain.set_boundary({tag: wall for tag in domain.get_boundary_tags() if tag != "ghost"})
    return domain


def step_seconds(domain: anuga.Domain, duration: float) -> float:
    """Return the mean time of the steps in which the flood goes on for so many seconds."""
    begin = time.perf_counter()
    for _ in domain.evolve(yieldstep=duration, duration=duration):
        pass
    return (time.perf_counter() - begin) / domain.number_of_steps


def main() -> None:
    file, before, duration, rounds = sys.argv[1:]
    domain = domain_of(file)
    step_seconds(domain, float(before))
    times = [step_seconds(domain, float(duration)) for _ in range(int(rounds))]
    if anuga.myid == 0:  # ranks exchange ghosts and the time step in each step, so that all take as long
        print(1e3 * min(times))


if __name__ == "__main__":
    main()
