"""`ShiftInvariantMap`: the map from sources to observations of a linear time loop whose steps are all the same.

If neither a step nor the observation depends on time, the effect of a source on an observation depends on the time between
them only. So the matrix of the map from all sources to all observations is block Toeplitz: its block (i, j) is F_{i-j}, and
zero for j > i. The rows of F_0, F_1, ... that belong to a sensor are the sensitivities of this sensor's last observation to
the sources at the last, second last, ... time: one adjoint run of the loop. A product is a convolution in time, and
so one small matrix product for each frequency [1]_.

References
----------
.. [1] S. Henneking, S. Venkat, V. Dobrev, J. Camier, T. Kolev, M. Fernando, A.-A. Gabriel and O. Ghattas, "Real-time
   Bayesian inference at extreme scale: a digital twin for tsunami early warning applied to the Cascadia subduction zone",
   SC '25 (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps

import numpy as np
from numpy.fft import irfft, rfft

from mpiad._typing import Array, Comm, Function, LocalArray, ReplicatedArray, Shape, Tree
from mpiad.differentiation import Linearization, linearize
from mpiad.extend import custom_operator, defadjoint
from mpiad.primitives import mpi_allreduce, stop_gradient
from mpiad.primitives.checks import positive_count
from mpiad.primitives.cotangents import spec_like
from mpiad.programs.function import Jitted, shared
from mpiad.pytrees import is_variable, named_leaves
from mpiad.timestepping import scan
from mpiad.transport import channel
from mpiad.transport.core.agreement import agreed, raising_together, require_same

_CALL = "inverse.ShiftInvariantMap"
_PANEL_BYTES = 1 << 27  # of the rows of some sensors: their adjoint runs are made together
_INTERVALS = 8  # of the loop whose adjoint is repeated: what a call takes is shared by them
# The deviation of the two random runs from the map, relative to the largest observation without the offset; and their
# rounding errors, relative to the largest observation, in the precision of state and sources.
_DEVIATION, _ROUNDING = 1e-8, 1e4


class ShiftInvariantMap:
    """The linear map F from sources in space and time to observations, d = F m + d₀, of a loop of equal steps.

    Parameters
    ----------
    step : callable
        ``step(u, k, m)`` returns the next state, as in `scan`; it may be compiled by `jit`, and communicate. It is linear
        in (u, m) up to terms that depend on neither, and its linear part is the same for all k.
    observe : callable
        ``observe(u)`` returns the values of all sensors, an array of shape (n_sensors,), the same on all ranks, such as
        `Domain.interpolate` does. It is linear in u up to a constant.
    u0 : pytree of arrays of floats
        The state before the first step.
    source : array
        A source of one interval, this rank's block, at which the step is linearized; usually zeros. It has the shape of m.
    n : int
        The number of intervals. The state is observed after each interval.
    interval : int
        The number of steps in an interval, in which m is constant.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    n, interval, n_sensors : int
    shape : tuple of int
        The shape of this rank's sources at all times, (n, *source.shape).
    offset : array, shape (n, n_sensors)
        The observations d₀ without a source.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid, if numbers differ between ranks, or if the observations of a loop with
        random sources aren't F m + d₀, since the step isn't linear, or depends on k.

    Ranks
    -----
    All ranks of `comm` create it and call it. The construction makes as many adjoint runs as there are sensors, several
    at a time, and three forward runs. The map takes 32 bytes for each number of a source, each time and each sensor.

    Examples
    --------
    A number decays and is driven by a source:

    >>> from mpiad.inverse import ShiftInvariantMap
    >>> from mpi4py import MPI
    >>> step, zero = (lambda u, k, m: 0.5 * u + m), np.zeros(1)
    >>> F = ShiftInvariantMap(step, lambda u: u, zero, zero, 3, comm=MPI.COMM_SELF)
    >>> print(F(np.array([[1.0], [0.0], [0.0]]))[:, 0].round(12), F.T(np.array([[0.0], [0.0], [1.0]]))[:, 0].round(12))
    [1.   0.5  0.25] [0.25 0.5  1.  ]
    """

    def __init__(
        self,
        step: Function,
        observe: Function,
        u0: Tree,
        source: LocalArray,
        n: int,
        *,
        interval: int = 1,
        comm: Comm | None = None,
    ):
        self._channel = used = channel(comm, _CALL)
        with raising_together(used):
            self.n, self.interval = positive_count(n, f"{_CALL}: n"), positive_count(interval, f"{_CALL}: interval")
            leaves = *named_leaves(u0, "u0"), ("source", source)
            for name, leaf in leaves:
                if not is_variable(leaf) or np.iscomplexobj(leaf):
                    raise TypeError(f"{_CALL}: {name} must be an array of real floats, but got {leaf!r:.60}.")
        epsilon = max(float(np.finfo(spec_like(leaf).dtype).eps) for _, leaf in leaves)
        require_same(used, f"n={n}, interval={interval}, precision={epsilon:.1e}", _CALL)

        advance = _interval_of(step, self.interval)
        self.comm, self.shape = comm, (self.n, *np.shape(source))
        self.offset = self._observations(advance, observe, u0, np.broadcast_to(source, self.shape))
        self.n_sensors = self.offset.shape[1]
        self._length = 2 * self.n  # of the transforms, so that the last sources don't act on the first observations
        self._spectrum = np.empty((self._length // 2 + 1, self.n_sensors, math.prod(self.shape[1:])), complex)
        count, observation = min(self.n, _INTERVALS), linearize(observe)(u0)
        adjoint = linearize(lambda u, m: scan(advance, u, count, inputs=m), (0, 1))(u0, np.stack([source] * count))
        for part in self._panels():
            self._spectrum[:, part] = rfft(self._sensitivities(adjoint, observation, part), self._length, axis=0)
        self._require_linear(advance, observe, u0, np.asarray(source), max(_DEVIATION * 1e-3, _ROUNDING * epsilon))

    def __call__(self, m: LocalArray) -> ReplicatedArray:
        """Return F m; collective, and differentiable.

        Parameters
        ----------
        m : array, shape (..., n, *source.shape)
            This rank's block of the sources; leading axes are those of a batch.

        Returns
        -------
        array, shape (..., n, n_sensors)
            The same on all ranks.
        """
        m = self._checked(m, self.shape, "m")
        return mpi_allreduce(_forward(m, self), comm=self.comm)

    @property
    def T(self) -> Callable[[ReplicatedArray], LocalArray]:  # as NumPy's name
        """The transposed map, from arrays (..., n, n_sensors), which are the same on all ranks, to this rank's blocks."""
        return lambda d: _backward(self._checked(d, self.offset.shape, "d"), self)

    def _checked(self, x: Array, shape: Shape, name: str) -> Array:
        with raising_together(self._channel):
            given = np.shape(stop_gradient(x))
            if given[len(given) - len(shape) :] != shape:
                raise ValueError(f"{_CALL}: {name} must be an array of shape (..., *{shape}), but got shape {given}.")
        return x

    def _observations(self, advance: Function, observe: Function, u: Tree, m: LocalArray) -> np.ndarray:
        rows = scan(advance, u, self.n, inputs=m, observe=wraps(observe, updated=())(lambda u, k: observe(u)))[1]
        with raising_together(self._channel):
            if np.ndim(rows) != 2 or not np.size(rows):
                raise ValueError(f"{_CALL}: observe must return a vector of the sensors' values, but got {rows[0]!r:.60}.")
        require_same(self._channel, f"{rows.shape[1]} sensors", _CALL)
        return rows

    def _sensitivities(self, adjoint: Linearization, observation: Linearization, part: slice) -> np.ndarray:
        """Return the rows of F_0, F_1, ... for some sensors, of shape (n, sensors, size of a source)."""
        # All ranks have copies of the observations: the cotangent of the root's copy is that of the values.
        seeds = np.eye(self.n_sensors)[part] * (self._channel.rank == 0)
        cotangent, rows = observation.vjp(seeds, batch=True), []
        while len(rows) < self.n:
            cotangent, of_sources = adjoint.vjp(cotangent, batch=True)
            rows += [np.reshape(of_source, (len(seeds), -1)) for of_source in np.moveaxis(of_sources, 1, 0)[::-1]]
        return np.stack(rows[: self.n])

    def _require_linear(self, advance: Function, observe: Function, u0: Tree, source: LocalArray, rounding: float) -> None:
        self.offset = self.offset - self(np.broadcast_to(source, self.shape))
        random = np.random.default_rng([self._channel.rank, self.n])
        for scale in (1.0, -3.0):
            m = (scale * random.standard_normal(self.shape)).astype(source.dtype)
            seen, expected = self._observations(advance, observe, u0, m), self(m)
            error = np.abs(seen - self.offset - expected)
            i = int(np.argmax(error.max(axis=1)))
            largest = float(np.abs(expected).max())
            if not error.max() <= max(_DEVIATION * largest, rounding * float(np.abs(seen).max())):
                text = (
                    f"{_CALL}: with random sources, the observation after interval {i} deviates from F m + d₀ by "
                    f"{error.max():.1e}, compared with {largest:.1e}: step must be linear in (u, m) up to a constant, "
                    "observe linear in u up to a constant, and neither may depend on k. Linearize the step, or use scan "
                    "and laplace_approximation."
                )
                raise agreed(self._channel, ValueError(text))

    # Private to `LinearPosterior`: the blocks F_k themselves.

    def _panels(self) -> Iterator[slice]:
        """Yield ranges of sensors whose rows take limited memory."""
        # All ranks must make the same adjoint runs, although their blocks may have different sizes.
        size = int(mpi_allreduce(float(math.prod(self.shape)), comm=self.comm))
        count = max(1, _PANEL_BYTES * self._channel.size // (8 * size))
        for first in range(0, self.n_sensors, count):
            yield slice(first, min(first + count, self.n_sensors))

    def _rows(self, part: slice) -> np.ndarray:
        """Return the rows of F_0, F_1, ... for some sensors, of shape (n, sensors, size of a source)."""
        return irfft(self._spectrum[:, part], self._length, axis=0)[: self.n]


def _interval_of(step: Function, interval: int) -> Function:
    """Return the function that makes the steps of interval k, compiled if the step is; warnings name the step."""
    if interval == 1:
        return step
    step = shared(step)
    one = step.fun if isinstance(step, Jitted) else step

    @wraps(one, updated=())
    def advance(u: Tree, k: int, m: LocalArray) -> Tree:
        for j in range(interval):
            u = one(u, k * interval + j, m)
        return u

    return step.derived((_CALL, interval), lambda: advance, calls=interval) if isinstance(step, Jitted) else advance


def _frequencies(x: np.ndarray, length: int) -> np.ndarray:
    """Return the transforms along time of arrays (batch, n, size), of shape (frequencies, size, batch)."""
    return np.moveaxis(rfft(x, length, axis=1), 0, -1)


def _times(x: np.ndarray, length: int, n: int) -> np.ndarray:
    """Return the inverse of `_frequencies`, for the first n times."""
    return irfft(np.moveaxis(x, -1, 0), length, axis=1)[:, :n]


@custom_operator
def _forward(m: LocalArray, map: ShiftInvariantMap) -> np.ndarray:
    """Return this rank's term of F m."""
    lead = m.shape[: m.ndim - len(map.shape)]
    product = map._spectrum @ _frequencies(m.reshape(-1, map.n, math.prod(map.shape[1:])), map._length)
    return _times(product, map._length, map.n).reshape(*lead, *map.offset.shape)


@custom_operator
def _backward(d: np.ndarray, map: ShiftInvariantMap) -> LocalArray:
    """Return this rank's block of the product of the transposed F with d."""
    lead = d.shape[: d.ndim - 2]
    # The conjugate is that of the product, not of the large factor, which would be copied.
    conjugate = np.conj(_frequencies(d.reshape(-1, *map.offset.shape), map._length))
    product = np.conj(np.swapaxes(map._spectrum, 1, 2) @ conjugate)
    return _times(product, map._length, map.n).reshape(*lead, *map.shape)


defadjoint(_forward, _backward)
defadjoint(_backward, _forward)
