"""mpi4jax's side, jitted: the same step in jax.numpy, the loop over the steps a `lax.scan`."""

from __future__ import annotations

import os

# Each rank has a core.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import heat
import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import timing
from heat import COMM, DIFFUSION

options = heat.arguments()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)
start = jnp.asarray(heat.start(options.cells))
after, before = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size


def received(row, dest, source, outside):
    """Return the neighbor's row. Messages go round a ring: `sendrecv` has no null process. Zero beyond the edges."""
    row = row if COMM.size == 1 else mpi4jax.sendrecv(row, row, source=source, dest=dest, comm=COMM)
    # A product: the transpose of `sendrecv` accepts no cotangent that is zero by structure.
    return row * (0.0 if outside else 1.0)


def step(u, _):
    above = received(u[-1], after, before, COMM.rank == 0)
    below = received(u[0], before, after, COMM.rank == COMM.size - 1)
    f = jnp.pad(jnp.concatenate([above[None], u, below[None]]), ((0, 0), (1, 1)))
    return u + DIFFUSION * (f[2:, 1:-1] + f[:-2, 1:-1] + f[1:-1, 2:] + f[1:-1, :-2] - 4.0 * u), None


def term(u):
    return jnp.sum(jnp.tanh(jax.lax.scan(step, u, None, options.steps)[0]) ** 2)


forward, gradient = jax.jit(term), jax.jit(jax.value_and_grad(term))


def check():
    """Return J and the gradient's norm."""
    value, slope = gradient(start)
    return timing.total(value), timing.total(np.sum(np.asarray(slope) ** 2)) ** 0.5


cases = {
    "forward": lambda: jax.block_until_ready(forward(start)),
    "gradient": lambda: jax.block_until_ready(gradient(start)),
}
timing.measure("mpi4jax", options, cases, check)
