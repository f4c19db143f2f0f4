"""A wave that is driven by sources: as a distributed loop of equal steps, and as a dense matrix made by NumPy alone."""

from functools import lru_cache

import numpy as np
from elliptic_matrix import elliptic_matrix

import mpiad

SHAPE, N, INTERVAL, LENGTH, STD, MEAN = (7, 6), 5, 2, 0.5, 1.3, 0.2
CELLS, H = SHAPE[0] * SHAPE[1], 0.1
SENSORS, HARBOR = np.array([(2, 3), (5, 4), (0, 1)]), np.array([(6, 5), (1, 1)])


def start():
    """Return the whole fields at the start, now and before."""
    return np.random.default_rng(7).standard_normal((2, *SHAPE))


def laplacian(p):
    """Return the sum of the neighbors' differences for a field with a frame of one cell."""
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4.0 * p[1:-1, 1:-1]


def following(u, before, p, m):
    """Return the next field of a damped wave with a constant force; p: the field u with its frame."""
    return 1.9 * u - 0.9 * before + 0.2 * laplacian(p) + m + 0.05


@lru_cache(maxsize=1)  # so that several maps of one domain have one program
def step_on(domain):
    """Return the jitted step of the wave on this rank."""

    @mpiad.jit
    def step(state, k, m):
        u, before = state
        return following(u, before, domain.exchange(u, "zero", corners=False), m), u

    return step


def distributed(points, domain, interval=INTERVAL):
    """Return the arguments of `ShiftInvariantMap` on this rank."""
    u, before = (field[domain.owned] for field in start())
    return (
        step_on(domain),
        lambda state: domain.interpolate(state[0], points.astype(float)),
        (u, before),
        np.zeros(domain.local_shape),
        N,
    )


def observed(m, points):
    """Return the observations (N, sensors) of the whole wave in one process, for sources (N, *SHAPE)."""
    (u, before), rows = start(), []
    for k in range(N):
        for _ in range(INTERVAL):
            u, before = following(u, before, np.pad(u, 1), m[k]), u
        rows.append(u[tuple(points.T)])
    return np.array(rows)


def matrix(points):
    """Return the matrix of the map, and the observations without sources, as vectors."""
    offset = observed(np.zeros((N, *SHAPE)), points).ravel()
    units = np.eye(N * CELLS).reshape(-1, N, *SHAPE)
    return np.array([observed(m, points).ravel() - offset for m in units]).T, offset


def covariance(correlation):
    """Return the covariance of all sources: an autoregressive process in time, and a Bilaplacian in space."""
    smooth = np.eye(CELLS) + LENGTH**2 / 8.0 * elliptic_matrix(np.ones(SHAPE), 0.0, (H, H), fixed=False).toarray()
    space = np.linalg.inv(smooth @ smooth)
    space *= STD**2 / np.sqrt(np.outer(np.diag(space), np.diag(space)))
    factor = np.array([[correlation ** (i - j) if i >= j else 0.0 for j in range(N)] for i in range(N)])
    return np.kron(factor @ factor.T, space)


def whole(domain, block):
    """Return blocks (..., *local_shape) as whole fields on all ranks."""
    field = np.zeros((*np.shape(block)[:-2], *SHAPE))
    field[(Ellipsis, *domain.owned)] = block
    return mpiad.mpi_allreduce(field)
