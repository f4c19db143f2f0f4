"""diffrax: Dopri5 with a step for each trajectory, jitted and mapped over ρ; compilation isn't counted.

`gradient` goes back through checkpointed steps (diffrax's default); `gradient, tangent` carries the derivative along;
`gradient, continuous` integrates the adjoint equation backwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import problem

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # `ensemble_gpu.py` asks for its GPU

import diffrax
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)

MAX_STEPS = 256
CONTROLLER = diffrax.PIDController(rtol=problem.RTOL, atol=problem.ATOL)


def lorenz(t: jax.Array, u: jax.Array, rho: jax.Array) -> jax.Array:
    x, y, z = u
    return jnp.stack([problem.SIGMA * (y - x), x * (rho - z) - y, x * y - problem.BETA * z])


def solve_one(rho: jax.Array, adjoint: diffrax.AbstractAdjoint) -> tuple[jax.Array, jax.Array]:
    """Return the state at the end and the number of accepted steps."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lorenz), diffrax.Dopri5(), problem.T0, problem.T1, None, jnp.array(problem.START), args=rho,
        stepsize_controller=CONTROLLER, saveat=diffrax.SaveAt(t1=True), adjoint=adjoint, max_steps=MAX_STEPS,
    )  # fmt: skip
    return solution.ys[-1], solution.stats["num_accepted_steps"]


def complete(compiled: Callable, n: int, *names: str) -> Callable[[], problem.Answer]:
    """Return a call that waits for its results, which JAX computes asynchronously."""
    rho = jnp.asarray(problem.parameters(n))
    return lambda: dict(zip(names, jax.block_until_ready(compiled(rho))))


def forward(n: int) -> Callable[[], problem.Answer]:
    solver = jax.vmap(lambda rho: solve_one(rho, diffrax.RecursiveCheckpointAdjoint()))
    return complete(jax.jit(solver), n, "end", "steps")


def reverse(adjoint: diffrax.AbstractAdjoint) -> Callable[[int], Callable[[], problem.Answer]]:
    """Return the case of a gradient in reverse mode."""

    def loss(rho: jax.Array) -> tuple[jax.Array, jax.Array]:
        end, _ = jax.vmap(lambda one: solve_one(one, adjoint))(rho)
        return jnp.sum(end**2), end

    compiled = jax.jit(jax.grad(loss, has_aux=True))
    return lambda n: complete(compiled, n, "gradient", "end")


def tangent(n: int) -> Callable[[], problem.Answer]:
    def slope(rho: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.jvp(lambda one: solve_one(one, diffrax.ForwardMode())[0], (rho,), (jnp.ones_like(rho),))

    def both(rho: jax.Array) -> tuple[jax.Array, jax.Array]:
        end, derivative = jax.vmap(slope)(rho)
        return 2 * jnp.sum(end * derivative, axis=1), end

    return complete(jax.jit(both), n, "gradient", "end")


problem.main(
    {
        "forward": forward,
        "gradient": reverse(diffrax.RecursiveCheckpointAdjoint()),
        "gradient, tangent": tangent,
        "gradient, continuous": reverse(diffrax.BacksolveAdjoint()),
    }
)
