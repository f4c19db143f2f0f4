"""Exponax's side: its stepper in Fourier space inside `lax.scan`; the gradient saves all intermediate results, or steps.

All 48³ modes are stored and advanced; those above the cutoff stay zero. One core.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import exponax
import jax
import jax.numpy as jnp
import timing
import vortex

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # with these flags, XLA still computes in a second thread
jax.config.update("jax_enable_x64", True)
options = vortex.arguments()
start = jnp.asarray(vortex.start())
stepper = exponax.stepper.NavierStokesVelocity(
    3, 2 * jnp.pi, vortex.POINTS, vortex.STEP, diffusivity=vortex.VISCOSITY, order=4
)


def energy(step):
    """Return the mean energy after the steps as a function of the velocity."""

    def of(u):
        modes, _ = jax.lax.scan(lambda m, _: (step(m), None), exponax.fft(u), length=options.steps)
        return jnp.sum(exponax.ifft(modes, num_spatial_dims=3, num_points=vortex.POINTS) ** 2) / (2 * vortex.POINTS**3)

    return of


forward = jax.jit(energy(stepper.step_fourier))
gradients = {
    "gradient": jax.jit(jax.value_and_grad(energy(stepper.step_fourier))),
    "gradient, steps again": jax.jit(jax.value_and_grad(energy(jax.checkpoint(lambda m: stepper.step_fourier(m))))),
}


def check():
    """Return J and the gradient's norm."""
    return vortex.check(*gradients["gradient, steps again"](start))


cases = {"forward": lambda: forward(start).block_until_ready()}
cases |= {name: lambda fun=fun: jax.block_until_ready(fun(start)) for name, fun in gradients.items()}
timing.measure("exponax", options, cases, check)
