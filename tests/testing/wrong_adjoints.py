"""Ten operators with the wrong adjoints that libraries have shipped, each called on a line that ends in its name."""

import autograd.numpy as np
import numpy as onp
from autograd.extend import defvjp as define
from autograd.extend import primitive
from mpi4py import MPI

import mpiad
from mpiad.extend import custom_operator, defvjp

WORLD = MPI.COMM_WORLD


# 1. A halo exchange whose adjoint forgets the corner: the ghost at the end of the row from the neighbor.
@custom_operator
def halo(u):
    source, dest = (WORLD.rank - 1) % WORLD.size, (WORLD.rank + 1) % WORLD.size
    return onp.concatenate([WORLD.sendrecv(u[-1:], dest, source=source), u])


def halo_back(ans, u):
    def vjp(g):
        source, dest = (WORLD.rank - 1) % WORLD.size, (WORLD.rank + 1) % WORLD.size
        came = WORLD.sendrecv(g[:1], source, source=dest)
        came[:, -1] = 0.0
        out = g[1:].copy()
        out[-1:] += came
        return out

    return vjp


defvjp(halo, halo_back)


def drops_a_corner(x):
    return np.sum(np.sin(halo(np.reshape(x, (2, 3)))) * (1.0 + np.arange(9.0).reshape(3, 3)))  # drops_a_corner


# 2. A sum over the ranks whose cotangent isn't summed.
total = custom_operator(lambda x: WORLD.allreduce(x))
defvjp(total, lambda ans, x: lambda g: g)


def is_not_summed(x):
    y = total(x)  # is_not_summed
    return np.sum(y**2) * (1.0 + mpiad.mpi_rank())


# 3. A maximum over an axis that gives the whole cotangent to each of several equal entries.
@primitive
def largest(x):
    return onp.max(x, axis=-1)


define(largest, lambda ans, x: lambda g: g[..., None] * (x == ans[..., None]))


def forgets_ties(x):
    y = np.reshape(x, (3, 2))
    return np.sum(largest(np.concatenate([y, y], axis=1)) ** 2)  # forgets_ties


# 4. A copy that returns the same buffer each time, so that the second call overwrites the result of the first.
buffers = {}


@primitive
def copied(x):
    buffer = buffers.setdefault(x.shape, onp.empty_like(x))
    buffer[...] = x
    return buffer


define(copied, lambda ans, x: lambda g: g)


def copies_in_place(x):
    y = copied(x)  # copies_in_place
    return np.sum(y**2) + np.sum(copied(3 * x) ** 3)


# 5. The wrong sign in one branch.
@primitive
def softsign(x):
    return onp.where(x > 0, x / (1 + x), x / (1 - x))


define(softsign, lambda ans, x: lambda g: g * onp.where(x > 0, 1 / (1 + x) ** 2, -1 / (1 - x) ** 2))


def has_a_wrong_sign(x):
    return np.sum(softsign(x) * np.arange(1.0, 7.0))  # has_a_wrong_sign


# 6. A missing conjugate: of the spectrum of a real signal.
@primitive
def power(z):
    return onp.abs(z) ** 2


define(power, lambda ans, z: lambda g: 2 * g * z)


def lacks_a_conjugate(x):
    z = np.fft.fft(x)
    return np.sum(power(z) * np.arange(1.0, 7.0))  # lacks_a_conjugate


# 7. The adjoint of taking elements that overwrites those with a repeated index.
@primitive
def taken(x, index):
    return x[index]


def scatter(ans, x, index):
    def vjp(g):
        out = onp.zeros_like(x)
        out[index] = g
        return out

    return vjp


define(taken, scatter)


def overwrites_duplicates(x):
    return np.sum(np.cos(taken(x, onp.array([0, 2, 2, 5]))))  # overwrites_duplicates


# 8. The derivative of an implicit solution u + c u³ = b at the iterate before the last.
@primitive
def root(b):
    u = b.copy()
    for _ in range(20):
        root.before, u = u, u - (u + 0.1 * u**3 - b) / (1 + 0.3 * u**2)
    root.before = b - 0.1 * u**3 + 0.01
    return u


define(root, lambda ans, b: lambda g: g / (1 + 0.3 * root.before**2))


def has_a_stale_residual(x):
    return np.sum(root(x) ** 2)  # has_a_stale_residual


# 9. A convolution whose transpose is off by one.
@primitive
def convolved(x, kernel):
    return onp.convolve(x, kernel, mode="same")


def transposed(ans, x, kernel):
    return lambda g: onp.roll(onp.convolve(g, kernel[::-1], mode="same"), 1)


define(convolved, transposed)


def is_off_by_one(x):
    return np.sum(convolved(x, onp.array([1.0, 2.0, 4.0])) ** 2)  # is_off_by_one


# 10. A mean over all ranks, whose adjoint divides by the number of this rank's entries.
@custom_operator
def mean(x):
    return WORLD.allreduce(float(onp.sum(x))) / WORLD.allreduce(x.size)


defvjp(mean, lambda ans, x: lambda g: onp.full(x.shape, WORLD.allreduce(float(g)) / x.size))


def divides_by_a_wrong_count(x):
    return mean(np.exp(x)) ** 2  # divides_by_a_wrong_count


LOCAL = (
    forgets_ties, copies_in_place, has_a_wrong_sign, lacks_a_conjugate, overwrites_duplicates, has_a_stale_residual,
    is_off_by_one,
)  # fmt: skip
ON_SEVERAL_RANKS = (is_not_summed, divides_by_a_wrong_count)
OF_NEIGHBORS = (drops_a_corner,)
