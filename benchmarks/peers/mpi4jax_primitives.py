"""Time mpi4jax's primitives: forward and backward, jitted, in double precision.

Run:  .venv-peers/bin/mpiexec -n 2 .venv-peers/bin/python benchmarks/peers/mpi4jax_primitives.py

mpi4jax transposes allreduce as the identity: its backward pass sends nothing and the gradient is that of one
rank's copy of the loss. That is the case `allreduce`. The case `allreduce_summed` gives it the true
transpose through `jax.custom_vjp`: the same work as the other libraries' `allreduce`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import mpi4jax
from measurement import REPEATS, allreduce_answer, report, ring_answer, sample
from mpi4py import MPI

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

COMM = MPI.COMM_WORLD


def identity_allreduce(x: jax.Array) -> jax.Array:
    """Sum over the ranks, with the transpose that mpi4jax ships.

    Parameters
    ----------
    x : Array, shape (n,)

    Returns
    -------
    Array, shape (n,)

    Ranks
    -----
    Collective.

    Adjoint
    -------
    The identity, without communication.
    """
    return mpi4jax.allreduce(x, op=MPI.SUM, comm=COMM)


@jax.custom_vjp
def summed_allreduce(x: jax.Array) -> jax.Array:
    """Sum over the ranks, with its true transpose.

    Parameters
    ----------
    x : Array, shape (n,)

    Returns
    -------
    Array, shape (n,)

    Ranks
    -----
    Collective.

    Adjoint
    -------
    The cotangents are summed over the ranks.
    """
    return identity_allreduce(x)


def _summed_allreduce_adjoint(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # Every rank's output depends on every rank's input with derivative one.
    return (identity_allreduce(cotangent),)


summed_allreduce.defvjp(lambda x: (identity_allreduce(x), None), _summed_allreduce_adjoint)


def ring(x: jax.Array) -> jax.Array:
    """Send x to the next rank and return what the previous one sent.

    Parameters
    ----------
    x : Array, shape (n,)

    Returns
    -------
    Array, shape (n,)

    Ranks
    -----
    Collective.

    Adjoint
    -------
    The cotangent travels to the previous rank.
    """
    after, before = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size
    return mpi4jax.sendrecv(x, x, source=before, dest=after, comm=COMM)


LOSSES = {
    "allreduce": lambda x: jnp.sum(identity_allreduce(x**2) ** 2) / 2,
    "allreduce_summed": lambda x: jnp.sum(summed_allreduce(x**2) ** 2) / 2,
    "ring": lambda x: jnp.sum(ring(x) ** 2) / 2,
}


def complete(compiled: Callable, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Call a compiled function and wait for its results, which JAX computes asynchronously.

    Parameters
    ----------
    compiled : callable
        Returns (value, gradient).
    x : Array, shape (n,)
        Its argument.

    Returns
    -------
    value : Array, 0-d
    gradient : Array, shape (n,)

    Ranks
    -----
    Collective.
    """
    return jax.block_until_ready(compiled(x))


def main() -> None:
    """Print one line per case and size."""
    for n in REPEATS:
        x = jnp.asarray(sample(COMM.rank, n))
        expected = {
            "allreduce": allreduce_answer(COMM.rank, COMM.size, n, copies=1),
            "allreduce_summed": allreduce_answer(COMM.rank, COMM.size, n, copies=COMM.size),
            "ring": ring_answer(COMM.rank, COMM.size, n),
        }
        for case, loss in LOSSES.items():
            # Compiled by the check of its answer, before the timing.
            compiled = jax.jit(jax.value_and_grad(loss))
            report(COMM, "mpi4jax", case, n, partial(complete, compiled, x), expected[case])


if __name__ == "__main__":
    main()
