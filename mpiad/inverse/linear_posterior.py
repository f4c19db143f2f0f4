"""`LinearPosterior`: exact Bayesian inversion for a map that doesn't change with time, with data in the order of time.

The prior: m_t - mean = a (m_{t-1} - mean) + ε_t from rest, with independent ε_t of the spatial covariance Γ. Let G be the
map from ε to the data, which is block Toeplitz like F: G_k = a G_{k-1} + F_k. The data have the covariance

    K = G Γ Gᵀ + R,    (K - R)_ij = (K - R)_{i-1,j-1} + G_i Γ G_jᵀ,

one matrix product and a running sum. With K = L Lᵀ and y = L⁻¹ (d - d₀ - F mean), the posterior's mean is
mean + Γ Gᵀ L⁻ᵀ y (by blocks of time), and the forecast of other observations is B L⁻ᵀ y, where B is their covariance with
the data. Data are ordered by time, so the leading block of L is the factor for the data so far: nothing is updated when
further data arrive, and only the rows of y for these data are computed [1]_.

The root stores the lower triangle of K, of ½ (n n_sensors)² numbers, and factors it in place. Every rank stores its columns
of F and G Γ.

References
----------
.. [1] S. Henneking, S. Venkat, V. Dobrev, J. Camier, T. Kolev, M. Fernando, A.-A. Gabriel and O. Ghattas, "Real-time
   Bayesian inference at extreme scale: a digital twin for tsunami early warning applied to the Cascadia subduction zone",
   SC '25 (2025).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from functools import cached_property
from numbers import Real
from typing import NamedTuple, TypeVar

import numpy as np
import threadpoolctl
from numpy.fft import irfft, rfft
from scipy.linalg import cholesky, get_blas_funcs, get_lapack_funcs, solve_triangular

from mpiad._typing import LocalArray, ReplicatedArray, Rng
from mpiad.inverse.gaussian_prior import GaussianPrior
from mpiad.inverse.shift_invariant_map import ShiftInvariantMap
from mpiad.primitives import mpi_allgather, mpi_bcast, mpi_gather, mpi_scatter, mpi_sum
from mpiad.transport import channel
from mpiad.transport.core.agreement import FAILURES, raise_together, raising_together, require_alike, require_same
from mpiad.transport.core.polling import wait_gently
from mpiad.transport.core.random_keys import generator_of, shared_key
from mpiad.transport.resources import cores

T = TypeVar("T")

_trsm, _trsv = get_blas_funcs(("trsm", "trsv"), dtype=float)
(_potrf,) = get_lapack_funcs(("potrf",), dtype=float)
_CALL = "inverse.LinearPosterior"
_MOST_FUNCTIONALS = 4096
_FIELDS = 64  # fields to which the prior's covariance is applied at once
_BLOCK = 1024  # columns that are factored at once
_CELLS = 512  # cells of a rank whose variances are computed at once


class LinearPosterior:
    """The posterior of sources in space and time, for any data: what doesn't depend on the data is computed first.

    Parameters
    ----------
    F : ShiftInvariantMap
        The map from sources to observations.
    prior : GaussianPrior
        The prior of the sources at one time, on the domain of F's sources.
    noise : float, array (n_sensors,), or array (n_sensors, n_sensors)
        Standard deviation of the errors of the data, one per sensor, or the covariance of the errors at one time. Errors at
        different times are independent.
    correlation : float
        The correlation a of sources at successive times, an autoregressive process of order one which starts at the mean;
        0 for independent sources. The variance at late times is the prior's divided by 1 - a².

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid or differs between ranks, if the errors' covariance isn't positive definite,
        or if the covariance of the data doesn't fit into the root's memory.

    Ranks
    -----
    All ranks of the map create it, and call its methods. The root factors the covariance of the data with the threads of
    all ranks on its node, which sleep. Data are those of the root.

    Examples
    --------
    A source that is constant in space, and two observations of a sum:

    >>> from mpiad.inverse import Bilaplacian, LinearPosterior, ShiftInvariantMap
    >>> domain = mpiad.Domain(16)
    >>> zero = np.zeros(domain.local_shape)
    >>> step, at = (lambda u, k, m: u + m), np.array([[3.0], [12.0]])
    >>> F = ShiftInvariantMap(step, lambda u: domain.interpolate(u, at), zero, zero, 4)
    >>> p = LinearPosterior(F, Bilaplacian(domain, correlation_length=4.0), noise=0.1)
    >>> d = np.outer([1.0, 2.0, 3.0, 4.0], [1.0, -1.0])
    >>> print(np.allclose(F(p.condition(d).mean), d, atol=0.05), len(p.condition(d[:2]).mean))
    True 4
    """

    def __init__(self, F: ShiftInvariantMap, prior: GaussianPrior, noise: float | np.ndarray, *, correlation: float = 0.0):
        with raising_together(channel(getattr(F, "comm", None), _CALL)):
            covariance = _checked(F, prior, noise, correlation)
        self._channel = used = channel(F.comm, _CALL)
        require_alike(used, None, _CALL, f"{correlation=}, noise={noise!r:.200}", str(correlation), covariance)
        self.F, self.prior, self.correlation, self._noise = F, prior, float(correlation), covariance
        self._length = F.n * F.n_sensors
        self._expected: np.ndarray = F.offset + F(np.broadcast_to(prior.mean, F.shape))
        # G Γ, of shape (n, n_sensors, size of this rank's block): the covariance of the data and the sources.
        self._gamma = np.empty((F.n, F.n_sensors, math.prod(F.shape[1:])))
        for part in F._panels():
            self._gamma[:, part] = self._colored(self._driven(F, part))
        self._lower = self._factored()
        self._data, self._white = np.empty(0), np.empty(0)  # of the last call: the data's deviation from the mean, and y

    # Before the data.

    def _driven(self, map: ShiftInvariantMap, part: slice) -> np.ndarray:
        """Return the rows of G_0, G_1, ... for some sensors of a map, of shape (n, sensors, size)."""
        return self._filtered(map._rows(part))

    def _filtered(self, x: np.ndarray) -> np.ndarray:
        """Overwrite x by y with y_t = a y_{t-1} + x_t along the first axis, where a is the correlation, and return it."""
        for t in range(1, len(x) if self.correlation else 0):
            x[t] += self.correlation * x[t - 1]
        return x

    def _colored(self, rows: np.ndarray) -> np.ndarray:
        """Return the products of this rank's blocks, along the last axis, with the prior's covariance."""
        flat = rows.reshape(-1, *self.F.shape[1:])
        products = [self.prior.solve(flat[k : k + _FIELDS]) for k in range(0, len(flat), _FIELDS)]
        return np.concatenate(products).reshape(rows.shape)

    def _root_array(self, *shape: int) -> np.ndarray:
        """Return a new array on the root, and an empty one of as many dimensions elsewhere."""
        return np.empty(shape if self._channel.rank == 0 else (0,) * len(shape))

    def _running_sum(self, rows: np.ndarray, columns: np.ndarray, out: np.ndarray, until_row: bool = False) -> None:
        """Write Σ_r A_{i-r} B_{j-r}ᵀ over r ≤ min(i, j) into the root's array, of shape (n, rows, n, columns).

        `rows`, `columns`: the blocks A_k and B_k, of shape (n, rows, size) and (n, columns, size). `until_row`: blocks
        (i, j) with j > i aren't needed, and aren't written.
        """
        n, count, size = rows.shape
        width, flat, chunk = columns.shape[1], columns.reshape(-1, size), max(1, n // 16)
        for first in range(0, n, chunk):
            stop = min(first + chunk, n)
            last = stop if until_row else n
            total = mpi_sum(rows[first:stop].reshape(-1, size) @ flat[: last * width].T, comm=self.F.comm)
            if self._channel.rank:
                continue
            for i, blocks in enumerate(total.reshape(stop - first, count, last, width), first):
                end = i + 1 if until_row else n
                before = out[i - 1, :, : end - 1] if i else 0.0
                out[i, :, 0] = blocks[:, 0]
                np.add(blocks[:, 1:end], before, out=out[i, :, 1:end])

    def _factored(self) -> np.ndarray:
        """Return the Cholesky factor of the data's covariance, in the lower triangle of the root's matrix."""
        n, sensors, _ = self._gamma.shape
        times = n if self._channel.rank == 0 else 0  # whose rows this rank stores
        size = times * sensors
        with raising_together(self._channel):
            memory = mmap.mmap(-1, max(8 * size**2, 1))
            # Only the lower triangle is written, and takes memory; huge pages would contain most of the upper one, too.
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                memory.madvise(mmap.MADV_NOHUGEPAGE)
            lower = np.frombuffer(memory, float, size**2).reshape(size, size)
        blocks = lower.reshape(times, sensors, times, sensors)
        for part in self.F._panels():
            self._running_sum(self._driven(self.F, part), self._gamma, blocks[:, part], until_row=True)

        def factor() -> None:
            for i in range(n):
                blocks[i, :, i] += self._noise
            row = _factor(lower)
            if row is not None:
                raise ValueError(
                    f"{_CALL}: the covariance of the data isn't positive definite to working precision, at sensor "
                    f"{row % sensors} and time {row // sensors}: the noise is too small."
                )

        self.on_root(factor)
        return lower

    def on_root(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work()`` on the root, which has the other ranks' threads meanwhile; None elsewhere."""
        result = error = None
        if self._channel.rank == 0:
            threads = max([pool["num_threads"] for pool in threadpoolctl.threadpool_info()], default=1)
            try:
                with threadpoolctl.threadpool_limits(min(threads * self._channel.size, len(cores()))):
                    result = work()
            except FAILURES as failure:  # the other ranks mustn't wait
                error = failure
        wait_gently(self._channel.data.Ibarrier())
        raise_together(self._channel, error)
        return result

    def solved(self, b: np.ndarray) -> np.ndarray:
        """Return L⁻¹ b for the columns of b, an array in Fortran's order that is overwritten."""
        return _trsm(1.0, self._lower.T, b, lower=0, trans_a=1, overwrite_b=1)

    # With data.

    def condition(self, d: ReplicatedArray) -> Conditioned:
        """Return the posterior for data (k, n_sensors) of the first k times, k ≤ n; collective."""
        return Conditioned(self, self._whitened(d))

    def _whitened(self, d: ReplicatedArray) -> np.ndarray:
        """Return y for data of the first times, on the root; only for times that the last call hadn't are rows computed."""
        d, sensors = np.asarray(d, float), self.F.n_sensors
        with raising_together(self._channel):
            if d.ndim != 2 or d.shape[1] != sensors or len(d) > self.F.n:
                raise ValueError(
                    f"{_CALL}: data must have the shape (k, {sensors}), one row for each of the first k ≤ {self.F.n} "
                    f"times, but got {d.shape}."
                )
            if not np.all(np.isfinite(d)):
                raise ValueError(f"{_CALL}: data must be finite.")
        require_same(self._channel, f"data of shape {d.shape}", _CALL)
        if self._channel.rank:
            return self._white
        deviation = (d - self._expected[: len(d)]).ravel()
        known = min(len(self._data), len(deviation))
        known = known if np.array_equal(self._data[:known], deviation[:known]) else 0
        self._data, self._white = deviation, self._solved_first(deviation, self._white[:known])
        return self._white

    def _pulled(self, y: np.ndarray) -> LocalArray:
        """Return Γ Gᵀ L⁻ᵀ y by blocks of time, the deviation of the posterior's mean; y is that of the root."""
        weights = np.zeros(self._length)
        if self._channel.rank == 0:
            weights[: len(y)] = y
            weights = _trsv(self._lower.T, weights, lower=0, trans=0, overwrite_x=1)
        weights = mpi_bcast(weights.reshape(self.F.offset.shape), comm=self.F.comm)
        # Gᵀ = Cᵀ Fᵀ, where C makes sources from ε; the covariance of sources in time is C Cᵀ.
        field = self._colored(self.F.T(weights).reshape(self.F.n, -1)).reshape(self.F.shape)
        return self._filtered(self._filtered(field[::-1])[::-1])

    def _corrected(self, key: int, number: int, count: int) -> LocalArray:
        """Return a sample of the sources' deviation from the posterior's mean, given the first `count` data."""
        generator = generator_of(key, number)
        errors = generator.standard_normal(self.F.offset.shape)
        fields = [self.prior.sample(generator) - self.prior.mean for _ in range(self.F.n)]
        m = self._filtered(np.stack(fields))
        d = self.F(m) + errors @ cholesky(self._noise, lower=True).T
        return m - self._pulled(self._solved_first(d.ravel()[:count], d[0, :0]) if self._channel.rank == 0 else d)

    def _solved_first(self, b: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the first entries of L⁻¹ b on the root, for the first entries of b; y: those that are known."""
        y, known, sensors = np.concatenate([y, b[len(y) :]]), len(y), self.F.n_sensors
        for first in range(known, len(y), sensors):
            rows = slice(first, first + sensors)
            y[rows] -= self._lower[rows, :first] @ y[:first]
            y[rows] = solve_triangular(self._lower[rows, rows], y[rows], lower=True)
        return y

    def variance(
        self, of: int | np.ndarray | None = None, *, samples: int | None = None, rng: Rng = None
    ) -> LocalArray | tuple[LocalArray, LocalArray]:
        """Return variances of the posterior for all data, which don't depend on the data; collective.

        Parameters
        ----------
        of : int or array of shape (n,), optional
            A time, or the weights of times: for each cell the exact variance of the source at this time, or of the weighted
            sum of the sources at all times. On at most 4,096 cells.
        samples : int, optional
            Without `of`: the number of samples from which the variances at all times are estimated.
        rng : Generator, SeedSequence or int, optional
            The source of the samples, the same on all ranks; None: other ones in each call.

        Returns
        -------
        array of shape source.shape, or a pair of arrays of shape (n, *source.shape)
            With `samples`: the estimates and their standard errors.
        """
        if of is None:
            with raising_together(self._channel):
                if samples is None or samples < 1:
                    raise ValueError(f"{_CALL}.variance: give of=, a time or weights of times, or the number of samples=.")
            key = shared_key(rng, self._channel, f"{_CALL}.variance")
            mean = sum(self._corrected(key, k, self._length) ** 2 for k in range(samples)) / samples
            return mean, mean * math.sqrt(2.0 / samples)
        domain, n = self.prior.domain, self.F.n
        with raising_together(self._channel):
            if math.prod(domain.shape) > _MOST_FUNCTIONALS:
                raise ValueError(
                    f"{_CALL}.variance: exact variances are for at most {_MOST_FUNCTIONALS} cells, but the domain has "
                    f"{math.prod(domain.shape)}. Estimate them: variance(samples=100)."
                )
            weights = np.eye(n)[of] if np.ndim(of) == 0 else np.array(of, float)
            if weights.shape != (n,):
                raise ValueError(f"{_CALL}.variance: of must be a time or {n} weights, but got shape {weights.shape}.")
        weights = self._filtered(weights[::-1])[::-1]  # of ε
        variance = self.prior.variance.ravel() * (weights @ weights) - self._reduction(weights)
        return np.maximum(variance, 0.0).reshape(self.F.shape[1:])

    def _reduction(self, weights: np.ndarray) -> np.ndarray:
        """Return by how much the data reduce the variances of weighted sums of ε, for each of this rank's cells."""
        sizes = mpi_allgather(self._gamma.shape[2], comm=self.F.comm)
        reductions, transform = [], rfft(weights, self.F.n * 2)[:, None, None]
        for first in range(0, max(sizes), _CELLS):
            cells = self._gamma[:, :, first : first + _CELLS]
            mixed = irfft(rfft(cells, self.F.n * 2, axis=0) * transform, self.F.n * 2, axis=0)[: self.F.n]
            rows = mpi_gather(mixed.reshape(self._length, -1).T, axis=0, comm=self.F.comm)
            squares = self.on_root(lambda rows=rows: np.sum(self.solved(rows.T) ** 2, axis=0))
            counts = np.clip(np.subtract(sizes, first), 0, _CELLS).tolist()
            reductions.append(mpi_scatter(squares, axis=0, counts=counts, comm=self.F.comm))
        return np.concatenate(reductions)

    def forecast(self, Q: ShiftInvariantMap) -> Forecast:
        """Return the forecast of other observations of the same loop, for any data; collective.

        Parameters
        ----------
        Q : ShiftInvariantMap
            The map to the observations, with the same sources and the same n.

        Returns
        -------
        Forecast
            A function of the data.
        """
        with raising_together(self._channel):
            if not isinstance(Q, ShiftInvariantMap) or Q.shape != self.F.shape:
                raise ValueError(
                    f"{_CALL}.forecast: Q must be a ShiftInvariantMap of sources of shape {self.F.shape}, like those of F, "
                    f"but got {getattr(Q, 'shape', Q)!r:.60}."
                )
        return Forecast(self, Q)


class Conditioned:
    """The posterior for some data; made by `LinearPosterior.condition`."""

    def __init__(self, posterior: LinearPosterior, white: np.ndarray):
        self._posterior, self._white = posterior, white

    @property
    def mean(self) -> LocalArray:
        """Return this rank's block of the mean at all times, of shape (n, *source.shape); collective at the first use."""
        return self._mean.copy()

    @cached_property
    def _mean(self) -> LocalArray:
        return self._posterior.prior.mean + self._posterior._pulled(self._white)

    def sample(self, rng: Rng = None) -> LocalArray:
        """Return this rank's block of a sample at all times, the same field on any number of ranks; collective.

        `rng` is a Generator, a SeedSequence or an int, the same on all ranks, or None for another sample at each call. A
        sample of the prior is conditioned by Matheron's rule: see
        A. Doucet, "A note on efficient conditional simulation of Gaussian distributions" (2010).
        """
        key = shared_key(rng, self._posterior._channel, f"{_CALL}.sample")
        return self._mean + self._posterior._corrected(key, 0, len(self._white))


class Prediction(NamedTuple):
    """A forecast: mean and standard deviation of the observations at all times, arrays (n, sensors) on all ranks."""

    mean: ReplicatedArray
    std: ReplicatedArray


class Forecast:
    """The forecast of observations for data of the first times; made by `LinearPosterior.forecast`.

    Data that continue those of the last call cost a product with the further rows only.
    """

    def __init__(self, posterior: LinearPosterior, Q: ShiftInvariantMap):
        self._posterior, self.shape = posterior, Q.offset.shape
        n, sensors = self.shape
        rows = posterior._driven(Q, slice(0, sensors))
        covariance = posterior._root_array(n, sensors, n, posterior.F.n_sensors)  # with the data
        posterior._running_sum(rows, posterior._gamma, covariance)
        self._expected = (Q.offset + Q(np.broadcast_to(posterior.prior.mean, Q.shape))).ravel()
        prior = posterior._root_array(n, sensors, n, sensors)
        posterior._running_sum(rows, posterior._colored(rows), prior)
        self._prior = prior.reshape(-1, n * sensors)
        # W, whose products with its transpose are what the data explain.
        self._weights = posterior.on_root(lambda: posterior.solved(covariance.reshape(n * sensors, -1).T).T)
        self._white, self._mean = np.empty(0), np.zeros(n * sensors)  # of the last call: y, and W y
        if self._weights is not None:
            # For each number of times with data: the variances.
            explained = np.add.reduceat(self._weights**2, np.arange(0, posterior._length, posterior.F.n_sensors), axis=1)
            self._variances = np.diagonal(self._prior) - np.cumsum(np.pad(explained, ((0, 0), (1, 0))), axis=1).T

    def __call__(self, d: ReplicatedArray) -> Prediction:
        """Return the forecast for data (k, n_sensors) of the first k times, which are those of the root; collective."""
        y, result = self._posterior._whitened(d), np.empty((2, *self.shape))
        if self._weights is not None:
            known = len(self._white) if np.array_equal(self._white, y[: len(self._white)]) else 0
            self._mean = (self._mean if known else 0.0) + self._weights[:, known : len(y)] @ y[known:]
            self._white = y
            std = np.sqrt(np.maximum(self._variances[len(y) // self._posterior.F.n_sensors], 0.0))
            result[:] = np.reshape([self._expected + self._mean, std], result.shape)
        return Prediction(*mpi_bcast(result, comm=self._posterior.F.comm))

    def covariance(self, times: int) -> ReplicatedArray:
        """Return the covariance of the observations at all times, of shape (n, sensors, n, sensors); collective.

        `times`: the number of times with data.
        """
        result = np.empty(self.shape * 2)
        if self._weights is not None:
            part = self._weights[:, : times * self._posterior.F.n_sensors]
            result[:] = (self._prior - part @ part.T).reshape(result.shape)
        return mpi_bcast(result, comm=self._posterior.F.comm)


def _factor(a: np.ndarray) -> int | None:
    """Overwrite the lower triangle by its Cholesky factor; return the first row that isn't positive definite, or None."""
    # By blocks of columns: LAPACK's function in OpenBLAS 0.3.30 ends with a segmentation fault above about 15,000 rows.
    for first in range(0, len(a), _BLOCK):
        stop = min(first + _BLOCK, len(a))
        a[first:, first:stop] -= a[first:, :first] @ a[first:stop, :first].T
        block, info = _potrf(a[first:stop, first:stop], lower=1)
        if info:
            return first + info - 1
        a[first:stop, first:stop] = block
        a[stop:, first:stop] = _trsm(1.0, block, a[stop:, first:stop].T, lower=1).T
    return None


def _checked(F: ShiftInvariantMap, prior: GaussianPrior, noise: float | np.ndarray, correlation: float) -> np.ndarray:
    """Return the covariance of the errors at one time; raise an error if an argument is invalid."""
    for name, value, kind in (("F", F, ShiftInvariantMap), ("prior", prior, GaussianPrior)):
        if not isinstance(value, kind):
            raise TypeError(f"{_CALL}: {name} must be a {kind.__name__}, but got {type(value).__name__} {value!r:.60}.")
    if prior.domain.local_shape != F.shape[1:]:
        raise ValueError(
            f"{_CALL}: the prior's fields have blocks of shape {prior.domain.local_shape}, but the sources of F have "
            f"blocks of shape {F.shape[1:]}."
        )
    if not isinstance(correlation, Real) or not -1.0 < correlation < 1.0:
        raise ValueError(f"{_CALL}: correlation must be a number between -1 and 1, but got {correlation!r:.60}.")
    errors, count = np.asarray(noise, float), F.n_sensors
    covariance = errors if errors.ndim == 2 else np.diag(np.broadcast_to(errors**2, count) * np.sign(errors))
    if covariance.shape != (count, count) or not np.allclose(covariance, covariance.T):
        raise ValueError(
            f"{_CALL}: noise must be a number, {count} numbers, or a symmetric matrix of shape {(count, count)}, but has "
            f"shape {errors.shape}."
        )
    if not np.all(np.linalg.eigvalsh(covariance) > 0.0):
        raise ValueError(f"{_CALL}: the covariance of the noise must be positive definite.")
    size, installed = 4 * (F.n * count) ** 2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > installed:
        raise ValueError(
            f"{_CALL}: the covariance of {F.n * count} data takes {size / 1e9:.3g} GB, but the machine has "
            f"{installed / 1e9:.3g} GB of memory. Use fewer sensors or longer intervals."
        )
    return covariance
