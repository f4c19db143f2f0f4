"""diffrax: Kvaerno's methods with a step for each trajectory, jitted and mapped over the parameters.

    python side_diffrax.py SYSTEM CASE SOLVER N --rtol 1e-4 1e-6 [--budget 3]

One program is compiled for all tolerances, which isn't counted. `gradient` goes back through checkpointed steps (diffrax's
default). Prints a line of JSON for each tolerance: seconds, and the ends or gradients of the first few trajectories, NaN
where a solve came to no end.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import systems

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # `ensemble_gpu.py` asks for its GPU
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

MAX_STEPS = 4096
SOLVERS = {"Kvaerno3": diffrax.Kvaerno3, "Kvaerno5": diffrax.Kvaerno5}


def brusselator(t: jax.Array, u: jax.Array, p: jax.Array) -> jax.Array:
    """Return what `systems.brusselator` does, by slices instead of 40 numbers, as one writes it for arrays."""
    x, y = u.reshape(-1, 2).T
    spread = p[0] * (len(x) + 1) ** 2

    def second(values: jax.Array, edge: float) -> jax.Array:
        wide = jnp.pad(values, 1, constant_values=edge)
        return spread * (wide[:-2] - 2 * values + wide[2:])

    return jnp.stack([1 + x * x * y - 4 * x + second(x, 1.0), 3 * x - x * x * y + second(y, 3.0)], axis=1).ravel()


def main() -> None:
    """Measure one case of one system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=systems.SYSTEMS)
    parser.add_argument("case", choices=("forward", "gradient"))
    parser.add_argument("solver", choices=SOLVERS)
    parser.add_argument("n", type=int)
    parser.add_argument("--rtol", type=float, nargs="+", required=True)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of calls that are timed, for each tolerance")
    parser.add_argument("--limit", type=float, default=10.0, help="where a call takes more, finer tolerances are left out")
    options = parser.parse_args()
    system = systems.SYSTEMS[options.system]
    rate = brusselator if options.system == "brusselator" else lambda t, u, p: jnp.stack(system.f(u, p, t))

    def end(p: jax.Array, rtol: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rate), SOLVERS[options.solver](), 0.0, system.end, None, jnp.asarray(system.u0), args=p,
            stepsize_controller=diffrax.PIDController(rtol=rtol, atol=systems.atol(rtol)), throw=False,
            saveat=diffrax.SaveAt(t1=True), max_steps=MAX_STEPS,
        )  # fmt: skip
        return jnp.where(solution.result == diffrax.RESULTS.successful, solution.ys[-1], jnp.nan)

    ends = jax.vmap(end, in_axes=(0, None))
    gradient = jax.grad(lambda p, rtol: jnp.sum(ends(p, rtol) ** 2))
    compiled = jax.jit(ends if options.case == "forward" else gradient)
    p = jnp.asarray(systems.parameters(options.system, options.n))
    clock = time.process_time if os.environ["JAX_PLATFORMS"] == "cpu" else time.perf_counter
    times = []
    for rtol in options.rtol:
        if times and min(times) > options.limit:
            return
        answer, times = np.asarray(compiled(p, rtol)), []  # compiled here
        while not times or (sum(times) < options.budget and len(times) < 10):
            begin = clock()
            answer = jax.block_until_ready(compiled(p, rtol))
            times.append(clock() - begin)
        print(json.dumps({"rtol": rtol, "s": min(times), "found": np.asarray(answer)[: systems.FEW].tolist()}), flush=True)


main()
