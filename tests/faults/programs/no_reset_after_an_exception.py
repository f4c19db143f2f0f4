# An exception left messages under way, and the program goes on as if nothing had happened.
# together: yes
# raises: mpiad.errors.UnfinishedMessagesError
# says: {here}.*UnfinishedMessagesError: grad: ValueError left a trace in which messages were under way.*mpiad.reset

import autograd.numpy as np

import mpiad

other = 1 - mpiad.mpi_rank()


def loss(x, factor):
    mpiad.mpi_send(x, dest=other)
    if factor < 0.0:
        raise ValueError(f"factor {factor} is negative")
    return factor * np.sum(mpiad.mpi_recv(x, source=other))


try:
    mpiad.grad(loss, objective="sum")(np.ones(3), -1.0)
except ValueError:
    pass
mpiad.grad(loss, objective="sum")(np.ones(3), 1.0)  # here
