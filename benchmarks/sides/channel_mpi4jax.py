"""mpi4jax's side, jitted: the same step in jax.numpy, the loop over the steps a `lax.scan`.

What is sent to a neighbour is one message for all fields of an exchange, as on mpiad's side. `sendrecv` can be
differentiated where the template of what is received has a tangent: it is what is sent. On one rank nothing is sent.
"""

from __future__ import annotations

import os

# Each rank has a core.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import channel
import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import timing
from channel import CELL, COMM, DEPTH, FRICTION, GRAVITY, STEP

options = channel.arguments()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", options.dtype == np.float64)
given = channel.Start(*[jnp.asarray(field) for field in channel.start(options.north, options.east, options.dtype)])
after, before_us = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size


def travelled(columns, dest, source):
    """Return what the neighbour has sent, of columns of all fields."""
    return columns if COMM.size == 1 else mpi4jax.sendrecv(columns, columns, source=source, dest=dest, comm=COMM)


def exchange(fields, beyond):
    """Return the fields with their halos."""
    p = jnp.stack([jnp.pad(field, ((1, 1), (0, 0)), mode=beyond) for field in fields])
    from_west = travelled(p[:, :, -1:], after, before_us)
    from_east = travelled(p[:, :, :1], before_us, after)
    return jnp.concatenate([from_west, p, from_east], axis=2)


def at(p, rows, columns):
    """Return the neighbours at an offset."""
    n, m = p.shape
    return p[1 + rows : n - 1 + rows, 1 + columns : m - 1 + columns]


def spread(p):
    around = at(p, 0, 1) + at(p, 0, -1) + at(p, 1, 0) + at(p, -1, 0)
    return FRICTION * (around - 4 * at(p, 0, 0))


def step(state, weights):
    """Return height, winds and their rates, one step later."""
    (h, u, v, *rates), (now, before) = state, weights
    hp, up, vp = exchange((h, u, v), "edge")
    flux_east, flux_north = u * (h + at(hp, 0, 1)) / 2, v * (h + at(hp, 1, 0)) / 2
    depth = (h + at(hp, 0, 1) + at(hp, 1, 0) + at(hp, 1, 1)) / 4
    potential = (given.coriolis + (at(vp, 0, 1) - v - at(up, 1, 0) + u) / CELL) / depth
    energy = (u**2 + at(up, 0, -1) ** 2 + v**2 + at(vp, -1, 0) ** 2) / 4
    fe, fn, q, k = exchange((flux_east, flux_north, potential, energy), "constant")
    turned_u = potential * (flux_north + at(fn, 0, 1)) + at(q, -1, 0) * (at(fn, -1, 0) + at(fn, -1, 1))
    turned_v = potential * (flux_east + at(fe, 1, 0)) + at(q, 0, -1) * (at(fe, 0, -1) + at(fe, 1, -1))
    new = (
        (at(fe, 0, -1) - flux_east + at(fn, -1, 0) - flux_north) / CELL,
        turned_u / 4 - (GRAVITY * (at(hp, 0, 1) - h) + at(k, 0, 1) - energy) / CELL,
        -turned_v / 4 - (GRAVITY * (at(hp, 1, 0) - h) + at(k, 1, 0) - energy) / CELL,
    )
    h, u, v = (x + STEP * (now * rate + before * old) for x, rate, old in zip((h, u, v), new, rates))
    v = v * given.open
    up, vp = exchange((u, v), "edge")
    return (h, u + spread(up), (v + spread(vp)) * given.open, *new), None


def run(h):
    zero = jnp.zeros_like(h)
    weights = channel.weights(options.steps, options.dtype)
    return jax.lax.scan(step, (h, given.u, given.v, zero, zero, zero), (weights[:, 0], weights[:, 1]))[0]


forward = jax.jit(run)
gradient = jax.jit(jax.value_and_grad(lambda h: jnp.sum((run(h)[0] - DEPTH) ** 2)))


def check():
    """Return J and the gradient's norm."""
    value, slope = gradient(given.h)
    return timing.total(value), timing.total(np.sum(np.asarray(slope, float) ** 2)) ** 0.5


cases = {
    "forward": lambda: jax.block_until_ready(forward(given.h)),
    "gradient": lambda: jax.block_until_ready(gradient(given.h)),
}
timing.measure("mpi4jax", options, cases, check)
