"""ANUGA's step on a mesh from a file: `anuga_valley.py FILE BEFORE SECONDS ROUNDS` prints the milliseconds of a step.

Of first order in space and time (flow algorithm DE0 without gradients), with Manning's friction and walls all around. The
flood's first `BEFORE` seconds aren't timed, each round is `SECONDS` more. Needs ANUGA and NumPy only.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"

import anuga
import numpy as np


def domain_of(file: str) -> anuga.Domain:
    data = np.load(file)
    domain = anuga.Domain(data["points"], data["triangles"])
    domain.set_flow_algorithm("DE0")
    for name in ("beta_w", "beta_w_dry", "beta_uh", "beta_uh_dry", "beta_vh", "beta_vh_dry"):
        setattr(domain, name, 0.0)
    domain.set_store(False)
    domain.set_quantity("elevation", data["bed"], location="centroids")
    domain.set_quantity("stage", data["bed"] + data["depth"], location="centroids")
    domain.set_quantity("friction", 0.05)
    wall = anuga.Reflective_boundary(domain)
    domain.set_boundary(dict.fromkeys(domain.get_boundary_tags(), wall))
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
    print(1e3 * min(step_seconds(domain, float(duration)) for _ in range(int(rounds))))


if __name__ == "__main__":
    main()
