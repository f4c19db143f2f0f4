# One rank's function returns an array where a number belongs: all ranks raise.
# together: yes
# raises: TypeError
# says: {here}.*TypeError: value_and_grad: .*\(3,\).*rank 1

import autograd.numpy as np

import mpiad


def loss(x):
    return x**2 if mpiad.mpi_rank() == 1 else np.sum(x**2)


mpiad.value_and_grad(loss, objective="sum")(np.ones(3))  # here
