"""Time mpi4torch's primitives: forward and backward, in double precision.

Run:  .venv-peers/bin/mpiexec -n 2 .venv-peers/bin/python benchmarks/peers/mpi4torch_primitives.py

mpi4torch transposes allreduce as an allreduce: the gradient is that of the losses summed over the ranks. Its
ring needs dummy tensors that tie send, receive and wait together, or the backward pass could deadlock.
"""

from collections.abc import Callable
from functools import partial

import mpi4torch
import torch
from measurement import REPEATS, allreduce_answer, report, ring_answer, sample
from mpi4py import MPI

COMM = MPI.COMM_WORLD
PEER = mpi4torch.comm_from_mpi4py(COMM)


def allreduce(x: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks.

    Parameters
    ----------
    x : Tensor, shape (n,)

    Returns
    -------
    Tensor, shape (n,)

    Ranks
    -----
    Collective.

    Adjoint
    -------
    The cotangents are summed over the ranks.
    """
    return PEER.Allreduce(x, mpi4torch.MPI_SUM)


def ring(x: torch.Tensor) -> torch.Tensor:
    """Send x to the next rank and return what the previous one sent.

    Parameters
    ----------
    x : Tensor, shape (n,)

    Returns
    -------
    Tensor, shape (n,)

    Ranks
    -----
    Collective.

    Adjoint
    -------
    The cotangent travels to the previous rank.
    """
    after, before = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size
    sending = PEER.Isend(x, after, 0)
    # The backward pass sees no link between a send and a receive but these joins.
    into = mpi4torch.JoinDummies(torch.empty_like(x), [sending.dummy])
    received = PEER.Recv(into, before, 0)
    sent = PEER.Wait(mpi4torch.JoinDummiesHandle(sending, [received]))
    return mpi4torch.JoinDummies(received, [sent])


def allreduce_loss(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's ``sum(allreduce(x**2)**2)/2``, 0-d, for x of shape (n,)."""
    return torch.sum(allreduce(x**2) ** 2) / 2


def ring_loss(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's ``sum(ring(x)**2)/2``, 0-d, for x of shape (n,)."""
    return torch.sum(ring(x) ** 2) / 2


def value_and_grad(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate a loss.

    Parameters
    ----------
    loss : callable
        Maps a tensor of shape (n,) to a 0-d one.
    x : Tensor, shape (n,)
        Requires a gradient.

    Returns
    -------
    value : Tensor, 0-d
    gradient : Tensor, shape (n,)

    Ranks
    -----
    Collective.
    """
    value = loss(x)
    (gradient,) = torch.autograd.grad(value, x)
    return value.detach(), gradient


def main() -> None:
    """Print one line per case and size."""
    # The ranks already fill the cores.
    torch.set_num_threads(1)
    for n in REPEATS:
        x = torch.from_numpy(sample(COMM.rank, n)).requires_grad_()
        cases = (
            ("allreduce", allreduce_loss, allreduce_answer(COMM.rank, COMM.size, n, copies=COMM.size)),
            ("ring", ring_loss, ring_answer(COMM.rank, COMM.size, n)),
        )
        for case, loss, expected in cases:
            report(COMM, "mpi4torch", case, n, partial(value_and_grad, loss, x), expected)


if __name__ == "__main__":
    main()
