"""diffrax's gradient of the hybrid models of `systems.py`: the least time, compiled, as a line of JSON."""

from __future__ import annotations

import json
import sys
import time

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)


def hybrid(t: jax.Array, u: jax.Array, p: dict) -> jax.Array:
    hidden = jnp.tanh(p["inner"] @ u + p["shift"][:, 0])
    met = p["outer"] @ (jnp.tanh(p["middle"] @ hidden) if "middle" in p else hidden)
    return jnp.stack([p["birth"] * u[0] + met[0], met[1] - p["death"] * u[1]])


def main() -> None:
    """Print the seconds of one gradient."""
    width, layers, count, rounds = map(int, sys.argv[1:])
    rng = np.random.default_rng(0)
    shapes = {"inner": (width, 2), "shift": (width, 1), "outer": (2, width)}
    p = {name: jnp.array(0.2 * rng.normal(size=shape)) for name, shape in shapes.items()} | {"birth": 1.3, "death": 1.8}
    if layers > 1:
        p["middle"] = jnp.array(rng.normal(size=(width, width)) / np.sqrt(width))
    starts = jnp.array(np.random.default_rng(1).uniform(0.5, 1.5, (count, 2)))
    term, controller = diffrax.ODETerm(hybrid), diffrax.PIDController(rtol=1e-3, atol=1e-6)

    def end(u0: jax.Array, p: dict) -> jax.Array:
        found = diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 3.0, None, u0, p, stepsize_controller=controller, max_steps=256
        )
        return found.ys[-1]

    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jax.vmap(end, (0, None))(starts, p) ** 2)))
    jax.block_until_ready(gradient(p))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(gradient(p))
        times.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": min(times)}))


main()
