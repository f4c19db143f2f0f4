"""Discrete Fourier transforms of arrays that are divided among the ranks.

A transform is a chain of linear stages, each of which maps this rank's block to a new array: local transforms along axes
that aren't divided, by ducc0 or scipy.fft, truncations of spectra, and exchanges, after which another axis is divided. In
two dimensions one axis is divided (slabs), in three dimensions one or two (pencils). An exchange is one all-to-all among
the ranks that share an axis. A line of a 1-dimensional array is divided by the four-step algorithm, with the same stages.

Each stage has a transpose, without conjugation, and the transpose of a chain is the chain of the transposed stages in
reverse order. So one operator, `fourier_transform`, is the adjoint of itself with a transposed chain, at any order. Leading
axes of an array are batches. Axes are numbered from the end, so that batches don't change the numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import scipy.fft
from autograd.tracer import getval
from numpy.typing import DTypeLike

from mpiad._typing import Array, Comm, Index, LocalArray, Rank, Shape
from mpiad.extend import custom_operator, defjvp, defvjp
from mpiad.primitives import mpi_alltoall
from mpiad.primitives.checks import integer_of
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import alike_on_all
from mpiad.transport.core.buffers import even_lengths, even_range
from mpiad.transport.core.channels import make_communicator
from mpiad.transport.devices.device_arrays import arrays_of, is_array, named

__all__ = ["DistributedFFT"]

_NORMS = "backward", "ortho", "forward"


class _Stage:
    def __call__(self, x: Array) -> Array:
        raise NotImplementedError

    def transposed(self) -> _Stage:
        """Return the transpose; by default the stage is symmetric."""
        return self

    def inverse(self) -> _Stage:
        """Return the stage of the transform in the other direction; by default it is the transpose, as of permutations."""
        return self.transposed()


def _at(axis: int, index: Index) -> Index:
    """Return the index of entries along an axis with a negative number."""
    return (..., index, *[slice(None)] * (-axis - 1))


@cache
def _ducc() -> ModuleType | None:
    """Return ducc0's transforms, which take about half of the time of SciPy's, if it is installed."""
    with suppress(ImportError):
        return import_module("ducc0").fft
    return None


@dataclass(frozen=True)
class _Transform(_Stage):
    """The transform of complex numbers, whose matrix exp(∓2πi jk / n) is symmetric; its inverse, or the transpose of one.

    If `n` is given, it is that of n real numbers along the last axis, to n // 2 + 1 modes.
    """

    axes: tuple[int, ...]
    norm: str
    n: int | None = None
    is_inverse: bool = False
    is_transposed: bool = False

    def __call__(self, x: Array) -> Array:
        if self.n is None:
            return self._transformed("c2c", x)
        # The transposes are sums over the n // 2 + 1 modes with the same sign, but in c2r interior modes count twice.
        interior = _at(self.axes[-1], slice(1, (self.n + 1) // 2))
        if self.is_inverse == self.is_transposed:
            modes = self._transformed("r2c", x)
            if self.is_transposed:
                modes[interior] *= 2
            return modes
        if self.is_transposed:
            x = x if x.flags.writeable else x.copy()
            x[interior] *= 0.5
        return self._transformed("c2r", x)

    def _transformed(self, kind: Literal["c2c", "r2c", "c2r"], x: Array) -> Array:
        """Return the transform of complex numbers, of real numbers to half of the modes, or back; x may be overwritten.

        An argument of the operator is read-only; results of stages aren't. In place, strided lines take less time.
        """
        axes, norm, forward, may_overwrite = self.axes, self.norm, not self.is_inverse, x.flags.writeable
        if x.size and (ducc := _ducc()):  # which refuses empty arrays
            inorm = _NORMS.index(norm) if forward else 2 - _NORMS.index(norm)
            if kind == "c2c":
                return ducc.c2c(x, axes, forward, inorm, x if may_overwrite else None)
            if kind == "r2c":
                return ducc.r2c(x, axes, forward, inorm)
            return ducc.c2r(x, axes, self.n, forward, inorm, allow_overwriting_input=may_overwrite)
        if kind == "c2c":
            transform = scipy.fft.fftn if forward else scipy.fft.ifftn
            return transform(x if may_overwrite else x.copy(), axes=axes, norm=norm, overwrite_x=True)
        if kind == "r2c":
            return (scipy.fft.rfftn if forward else scipy.fft.ihfftn)(x, axes=axes, norm=norm)
        shape = [*[x.shape[axis] for axis in axes[:-1]], self.n]
        return (scipy.fft.hfftn if forward else scipy.fft.irfftn)(x, shape, axes, norm)

    def transposed(self) -> _Transform:
        return replace(self, is_transposed=not self.is_transposed)

    def inverse(self) -> _Transform:
        return replace(self, is_inverse=True)


@dataclass(frozen=True)
class _Truncation(_Stage):
    """The first `low` and the last `high` of `length` entries, times `scale`; if `pads`, the transpose: padding by zeros.

    If `nyquist` is a number, the truncated spectrum also has the mode n / 2, after the first `low` entries: this number
    times the sum of the modes n / 2 and -n / 2 or, if `is_half`, times the real part of the mode n / 2.
    """

    axis: int
    length: int
    low: int
    high: int = 0
    nyquist: float | None = None
    is_half: bool = False
    scale: float = 1.0
    pads: bool = False

    def __call__(self, x: Array) -> Array:
        axis, low, n = self.axis, self.low, x.shape[self.axis]
        if low == self.length:
            return x
        if not (self.pads or self.high) and self.nyquist is None and self.scale == 1:
            return x[_at(axis, slice(low))]
        shape = list(x.shape)
        shape[axis] = m = self.length if self.pads else low + (self.nyquist is not None) + self.high
        out = np.zeros(shape, x.dtype) if self.pads else np.empty(shape, x.dtype)
        for before, after in (slice(low), slice(low)), (slice(n - self.high, n), slice(m - self.high, m)):
            out[_at(axis, after)] = x[_at(axis, before)] if self.scale == 1 else x[_at(axis, before)] * self.scale
        if self.nyquist is None:
            return out
        factor, first, last = self.scale * self.nyquist, _at(axis, low), _at(axis, self.length - low)
        if self.is_half:
            out[first] = factor * x[first].real
        elif self.pads:
            out[first] = out[last] = factor * x[first]
        else:
            out[first] = factor * (x[first] + x[last])
        return out

    def transposed(self) -> _Truncation:
        return replace(self, pads=not self.pads)

    def inverse(self) -> _Truncation:
        # The modes n / 2 and -n / 2 get one half each.
        nyquist = None if self.nyquist is None else 0.5
        return replace(self, pads=True, scale=1 / self.scale, nyquist=nyquist)


@dataclass(frozen=True)
class _Exchange(_Stage):
    """A redistribution: afterwards the axis `divided` is divided among the ranks of `comm`, instead of `joined`."""

    comm: Comm
    rank: Rank  # in `comm`
    joined: int
    joined_lengths: Sequence[int]  # of the ranks' parts
    divided: int
    divided_lengths: Sequence[int]

    def __call__(self, x: Array) -> Array:
        shape = list(x.shape)
        shape[self.joined], shape[self.divided] = sum(self.joined_lengths), self.divided_lengths[self.rank]
        out = np.empty(shape, x.dtype)
        sent, received = _parts(x, self.divided, self.divided_lengths), _parts(out, self.joined, self.joined_lengths)
        received[self.rank][...] = sent[self.rank]
        counts, arriving = ([part.size * (r != self.rank) for r, part in enumerate(parts)] for parts in (sent, received))
        packed = np.empty(sum(counts), x.dtype)
        for entries, part in _of_others(packed, sent, self.rank):
            entries[...] = part
        packed = mpi_alltoall(packed, counts, comm=self.comm, received=arriving)
        for entries, part in _of_others(packed, received, self.rank):
            part[...] = entries
        return out

    def transposed(self) -> _Exchange:
        joined, divided = (self.joined, self.joined_lengths), (self.divided, self.divided_lengths)
        return _Exchange(self.comm, self.rank, *divided, *joined)  # the inverse of a permutation


def _parts(x: np.ndarray, axis: int, lengths: Sequence[int]) -> list[np.ndarray]:
    return [x[_at(axis, slice(*ends))] for ends in itertools.pairwise(itertools.accumulate(lengths, initial=0))]


def _of_others(flat: np.ndarray, parts: list[np.ndarray], rank: Rank) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the entries of the parts of all ranks but this one in a flat array, and the parts."""
    start = 0
    for part in parts[:rank] + parts[rank + 1 :]:
        yield flat[start : start + part.size].reshape(part.shape), part
        start += part.size


@dataclass(frozen=True, eq=False)
class _Product(_Stage):
    """The elementwise product with a table."""

    table: np.ndarray

    def __call__(self, x: Array) -> Array:
        return x * self.table

    def inverse(self) -> _Product:
        return _Product(np.conj(self.table))  # the factors have modulus 1


@dataclass(frozen=True)
class _Reshape(_Stage):
    """The last axes in another shape."""

    before: Shape
    after: Shape

    def __call__(self, x: Array) -> Array:
        return x.reshape(*x.shape[: x.ndim - len(self.before)], *self.after)

    def transposed(self) -> _Reshape:
        return _Reshape(self.after, self.before)


class _Swap(_Stage):
    """The two last axes interchanged."""

    def __call__(self, x: Array) -> Array:
        return x.swapaxes(-1, -2)


@dataclass(frozen=True)
class _RealPart(_Stage):
    """The real part, or its transpose: the conversion of real numbers to complex ones."""

    is_transposed: bool = False

    def __call__(self, x: Array) -> Array:
        return x.astype(np.result_type(x, np.complex64)) if self.is_transposed else x.real

    def transposed(self) -> _RealPart:
        return _RealPart(not self.is_transposed)


@dataclass(frozen=True, eq=False)
class _Chain:
    """The stages of a transform on this rank, in the order of their application."""

    stages: tuple[_Stage, ...]
    comm: Comm
    ndim: int  # without batches
    block_bytes: int  # size of an entry of a batch, about; the same on all ranks

    def applied(self, x: np.ndarray) -> np.ndarray:
        for stage in self.stages:
            x = stage(x)
        return x

    @cached_property
    def transposed(self) -> _Chain:
        return _Chain(tuple(stage.transposed() for stage in reversed(self.stages)), self.comm, self.ndim, self.block_bytes)


@custom_operator
def fourier_transform(x: LocalArray, chain: _Chain) -> LocalArray:
    """Apply the stages of a chain."""
    if arrays_of(x) is not None:
        raise TypeError(
            f"DistributedFFT: the array must be on the host, but is {named(x)}. mpiad.device.to_host(x) copies it."
        )
    lead = x.shape[: x.ndim - chain.ndim]
    count, at_once = math.prod(lead), max(_PART // chain.block_bytes, 1)
    if count * chain.block_bytes <= _AT_ONCE or count <= at_once:
        return np.ascontiguousarray(chain.applied(x))
    x = x.reshape(count, *x.shape[len(lead) :])
    out: Any = None
    for start in range(0, count, at_once):
        part = chain.applied(x[start : start + at_once])
        out = np.empty((count, *part.shape[1:]), part.dtype) if out is None else out
        out[start : start + at_once] = part
    return out.reshape(*lead, *out.shape[1:])


# Larger batches (in bytes per rank) are transformed in parts, since the caches save more time than longer messages do.
_AT_ONCE, _PART = 5 << 20, 1 << 20


defvjp(fourier_transform, lambda ans, x, chain: lambda g: fourier_transform(g, chain.transposed))
defjvp(fourier_transform, lambda g, ans, x, chain: fourier_transform(g, chain))
fourier_transform.batched_adjoint = fourier_transform.fixes_spec = True


@dataclass(frozen=True)
class _Problem:
    """A transform, without its division among the ranks; axes have negative numbers."""

    shape: Shape
    axes: tuple[int, ...]
    is_real: bool
    norm: str
    dtype: np.dtype  # of one real number
    physical: Shape  # shape of the physical array

    @classmethod
    def of(cls, shape: object, axes: object, real: bool, norm: str, dtype: DTypeLike, padding: Any) -> _Problem:
        """Check the arguments of `DistributedFFT`."""
        lengths = _integers(shape, "shape")
        if not 1 <= len(lengths) <= 3 or min(lengths) < 1:
            raise ValueError(f"DistributedFFT: shape must have 1, 2 or 3 positive entries, but got {shape!r}.")
        ndim = len(lengths)
        chosen = tuple(range(ndim)) if axes is None else _integers(axes, "axes")
        if not chosen or min(chosen) < -ndim or max(chosen) >= ndim:
            raise ValueError(f"DistributedFFT: axes must be numbers from {-ndim} to {ndim - 1}, but got {axes!r}.")
        chosen = tuple(axis % ndim - ndim for axis in chosen)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"DistributedFFT: an axis is transformed only once, but got axes={axes!r}.")
        if norm not in _NORMS:
            raise ValueError(f"DistributedFFT: norm must be 'backward', 'ortho' or 'forward', but got {norm!r}.")
        kind = np.dtype(dtype)
        if kind.char not in ("fd" if real else "fdFD"):
            allowed = "float32 or float64" if real else "float32, float64, complex64 or complex128"
            raise TypeError(f"DistributedFFT: dtype must be {allowed} for real={real}, but got {kind}.")
        factors = [1.0 if padding is None else padding] * len(chosen) if np.ndim(padding) == 0 else list(padding)
        is_real = np.asarray(factors).dtype.kind in "fiu"
        if len(factors) != len(chosen) or not (is_real and all(1 <= factor < math.inf for factor in factors)):
            raise ValueError(
                "DistributedFFT: padding must be a finite number of at least 1, or one such number for each of the "
                f"{len(chosen)} transformed axes, but got {padding!r}."
            )
        physical = list(lengths)
        for axis, factor in zip(chosen, factors):
            physical[axis] = math.ceil(lengths[axis] * factor * (1 - 1e-12))
        return cls(lengths, chosen, bool(real), norm, np.empty(0, kind).real.dtype, tuple(physical))

    def spectral(self) -> Shape:
        """Return the shape of the array of modes."""
        shape = list(self.shape)
        if self.is_real:
            shape[self.axes[-1]] = shape[self.axes[-1]] // 2 + 1
        return tuple(shape)


def _integers(values: object, argument: str) -> tuple[int, ...]:
    given = values if isinstance(values, Sequence) else [values]
    return tuple(integer_of(value, "DistributedFFT", argument, "an integer or a tuple") for value in given)


class _WholeLines:
    """A transform in which, at any time, at least one axis isn't divided; the same on all ranks.

    - `dims`: the shape of the grid of ranks.
    - `divisions`: for each transform, in their order, the axes that are divided along the dimensions of the grid.
    - `shapes`: the shape of the whole array before each transform, and after the last one.
    """

    def __init__(self, problem: _Problem, size: int):
        self.problem, self.order, ndim = problem, problem.axes[::-1], len(problem.shape)
        self.shapes = self._shapes(problem.physical)
        # The division doesn't depend on padding, so that transforms with and without padding have the same modes.
        unpadded = self._shapes(problem.shape)
        lines = min(math.prod(shape) // shape[axis] for axis, shape in zip(self.order, unpadded))
        if size > lines:
            raise ValueError(
                f"DistributedFFT: {size} ranks can't share the {lines} lines along an axis of {problem.shape} points with "
                f"{problem.spectral()} modes. Use fewer ranks."
            )
        # Axes that aren't transformed are divided first, since no exchange joins them.
        first = [a for a in range(-ndim, 0) if a not in problem.axes] + list(problem.axes)
        self.divisions = [tuple(first[: ndim - 1])]
        for before, axis in itertools.pairwise(self.order):
            # The axis that has just been transformed is divided instead.
            self.divisions.append(tuple(before if a == axis else a for a in self.divisions[-1]))
        grids: list[tuple[int, ...]] = [(size,)[: ndim - 1]]
        if ndim == 3:
            grids = [(p, size // p) for p in range(size, 0, -1) if size % p == 0]
        self.dims = min(grids, key=lambda dims: self._cost(dims, unpadded))

    def _shapes(self, points: Shape) -> list[Shape]:
        modes, axes = self.problem.spectral(), range(-len(points), 0)
        done = [self.order[:k] for k in range(len(self.order) + 1)]
        return [tuple(modes[a] if a in transformed else points[a] for a in axes) for transformed in done]

    def _cost(self, dims: tuple[int, ...], shapes: list[Shape]) -> tuple[int, int]:
        """Return the size of the largest block, and the number of exchanges."""
        largest = 0
        for division, shape in zip([*self.divisions, self.divisions[-1]], shapes):
            parts = dict(zip(division, dims))
            lengths = [-(-n // parts.get(axis, 1)) for axis, n in zip(range(-len(shape), 0), shape)]
            largest = max(largest, math.prod(lengths))
        moves = [zip(dims, *pair) for pair in itertools.pairwise(self.divisions)]
        return largest, sum(p > 1 and a != b for move in moves for p, a, b in move)

    def block(self, spectral: bool, rank: Rank) -> tuple[slice, ...]:
        """Return a rank's part of the physical or the spectral array."""
        number = -1 if spectral else 0
        shape, division = self.shapes[number], self.divisions[number]
        block = [slice(0, n) for n in shape]
        for axis, p, position in zip(division, self.dims, np.unravel_index(rank, self.dims) if self.dims else ()):
            block[axis] = slice(*even_range(shape[axis], p, int(position)))
        return tuple(block)

    def stages(self, group: Channel, comm: Comm) -> tuple[list[_Stage], list[_Stage]]:
        """Return the stages of the forward and the backward transform; collective."""
        comms = _subcommunicators(group, comm, self.dims)
        position = [int(k) for k in np.unravel_index(group.rank, self.dims)] if self.dims else []
        stages: list[_Stage] = []
        for k, axis in enumerate(self.order):
            for g, p in enumerate(self.dims):
                divided = self.divisions[k][g]
                if k and p > 1 and divided != self.divisions[k - 1][g]:
                    lengths = [even_lengths(self.shapes[k][a], p) for a in (axis, divided)]
                    stages.append(_Exchange(comms[g], position[g], axis, lengths[0], divided, lengths[1]))
            transform, *truncation = self._along(axis, self.problem.is_real and k == 0)
            if stages and isinstance(stages[-1], _Transform):
                stages[-1] = replace(stages[-1], axes=(axis, *stages[-1].axes))  # transforms along all axes in one call
            else:
                stages.append(transform)
            stages += truncation
        truncated = [k for k, stage in enumerate(stages) if isinstance(stage, _Truncation)]
        if truncated:
            # The modes are those of the unpadded array, so sums over more points are scaled; at the end, on the least data.
            factor = math.prod(self.problem.shape) / math.prod(self.problem.physical)
            scale = {"backward": factor, "ortho": math.sqrt(factor), "forward": 1.0}[self.problem.norm]
            stages[truncated[-1]] = replace(stages[truncated[-1]], scale=scale)  # type: ignore[type-var]
        return stages, [stage.inverse() for stage in reversed(stages)]

    def _along(self, axis: int, real: bool) -> list[_Stage]:
        """Return the transform along an axis, and the truncation to the modes of the unpadded array."""
        norm, n, modes = self.problem.norm, self.problem.physical[axis], self.problem.shape[axis]
        transform = _Transform((axis,), norm, n if real else None)
        if n == modes:
            return [transform]
        low, high, nyquist = (modes + 1) // 2, 0 if real else (modes - 1) // 2, None if modes % 2 else 2.0 if real else 1.0
        return [transform, _Truncation(axis, n // 2 + 1 if real else n, low, high, nyquist, real)]


_comms: WeakKeyDictionary[Channel, dict[tuple[int, ...], list[Comm]]] = WeakKeyDictionary()


def _subcommunicators(group: Channel, comm: Comm, dims: tuple[int, ...]) -> list[Comm]:
    """Return, for each dimension of a grid of ranks, the communicator of the ranks along it; collective."""
    made = _comms.setdefault(group, {})
    if dims not in made:
        numbers, made[dims] = np.arange(group.size).reshape(dims), []
        for g, p in enumerate(dims):
            if p in (1, group.size):
                made[dims].append(comm)  # all ranks exchange along this dimension, or none
                continue
            # The ranks that share a line of the grid are numbered by its first rank.
            line = np.broadcast_to(numbers.take([0], axis=g), dims).reshape(-1)
            made[dims].append(make_communicator(group.user.Split, int(line[group.rank]), group.rank))
            channel(made[dims][-1], "DistributedFFT")
            group.divisions.append(made[dims][-1])
    return made[dims]


class _FourSteps:
    """A 1-dimensional transform on several ranks: n = rows · columns, and the line is a matrix in row-major order.

    With j = j₁ columns + j₂ and k = k₂ rows + k₁, the transform is a transform along the columns, over j₁, a product with
    exp(-2πi j₂ k₁ / n), and a transform along the rows, over j₂. The result is transposed.
    """

    def __init__(self, problem: _Problem, size: int):
        (n,), (self.modes,) = problem.shape, problem.spectral()
        self.problem, self.size = problem, size
        if problem.physical != problem.shape:
            raise ValueError("DistributedFFT: a 1-dimensional transform on several ranks can't be padded. Use one rank.")
        # The rows and the columns of the matrix are divided, and the rows of the matrix of modes.
        divisors = [rows for rows in range(size, math.isqrt(n) + 1) if n % rows == 0]
        if not divisors:
            raise ValueError(
                f"DistributedFFT: {size} ranks can't share one line of {n} points: the length must be a product of two "
                f"factors of at least {size}. Use fewer ranks or another length."
            )
        self.rows = max(divisors, key=lambda rows: min(rows, -(-self.modes // rows)))
        self.columns = n // self.rows

    def block(self, spectral: bool, rank: Rank) -> tuple[slice, ...]:
        """Return a rank's part of the points or the modes."""
        if spectral:
            # Half of the modes of real numbers may have fewer rows than there are ranks; then some parts are empty.
            bounds = even_range(-(-self.modes // self.rows), self.size, rank)
            return (slice(*(min(row * self.rows, self.modes) for row in bounds)),)
        start, stop = even_range(self.rows, self.size, rank)
        return (slice(start * self.columns, stop * self.columns),)

    def stages(self, group: Channel, comm: Comm) -> tuple[list[_Stage], list[_Stage]]:
        """Return the stages of the forward and the backward transform."""
        rank, norm, n, (modes,) = group.rank, self.problem.norm, self.problem.shape[0], self.block(True, group.rank)
        needed = -(-self.modes // self.rows)
        rows, columns, spectral = (even_lengths(length, self.size) for length in (self.rows, self.columns, needed))
        angles = np.outer(np.arange(self.rows), np.arange(*even_range(self.columns, self.size, rank))) % n
        table = np.exp(-2j * np.pi / n * angles).astype(np.result_type(self.problem.dtype, np.complex64))
        stages = [
            _Reshape((rows[rank] * self.columns,), (rows[rank], self.columns)),
            _Exchange(comm, rank, -2, rows, -1, columns),
            _Transform((-2,), norm),
            _Product(table),
            _Exchange(comm, rank, -1, columns, -2, rows),
            _Transform((-1,), norm),
            _Truncation(-1, self.columns, needed),
            _Exchange(comm, rank, -2, rows, -1, spectral),
            _Swap(),
            _Reshape((spectral[rank], self.rows), (spectral[rank] * self.rows,)),
            _Truncation(-1, spectral[rank] * self.rows, modes.stop - modes.start),
        ]
        backward = [stage.inverse() for stage in reversed(stages)]
        if not self.problem.is_real:
            return stages, backward
        # The real part of a sum over half of the modes, in which interior modes count twice.
        k = np.arange(modes.start, modes.stop)
        weights = np.where((k == 0) | (2 * k == n), 1, 2).astype(self.problem.dtype)
        return [_RealPart(True), *stages], [_Product(weights), *backward, _RealPart()]


class DistributedFFT:
    """Create a discrete Fourier transform of an array that is divided among the ranks.

    Parameters
    ----------
    shape : int or tuple of int
        Shape of the whole array, with 1 to 3 axes.
    axes : int or tuple of int, optional
        The transformed axes, by default all. The last one is transformed first, and with `real` it has n // 2 + 1 modes.
    real : bool
        Whether arrays are real, as in `scipy.fft.rfftn`, or complex, as in `scipy.fft.fftn`.
    norm : {"backward", "ortho", "forward"}
        Factors of the transforms, as in `scipy.fft`.
    dtype : dtype
        float64 or float32, also for the precision of complex arrays.
    padding : float, or one per transformed axis, optional
        Length of an axis of the physical array, divided by that of `shape`, rounded up; 3/2 avoids the aliasing of products
        of two fields. The modes are those of an array of this `shape`: `backward` interpolates trigonometrically, and
        `forward` omits the modes of smaller wavelengths, as `scipy.signal.resample` does. If the length n is even, the
        modes n/2 and -n/2 of the physical array get one half each of the mode n/2, and are added.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    shape, physical_shape, spectral_shape : tuple of int
        The argument, and the shapes of the whole physical array and of its modes.
    owned, owned_spectral : tuple of slice
        This rank's parts of the physical array and of the modes.
    local_shape, local_spectral_shape : tuple of int
        Shapes of these parts.
    dtype, spectral_dtype : numpy.dtype
        Of the physical array and of its modes.
    dims : tuple of int
        Numbers of ranks that share each of the divided axes: two numbers for arrays with 3 axes, one of them 1 for slabs.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid or differs between ranks, or if there are more ranks than lines of points or
        of modes along an axis.

    Ranks
    -----
    All ranks of `comm` call it, with the same arguments, and all of them call `forward` and `backward`. The division with
    the smallest largest block is chosen, slabs if possible; parts are even, and the first may be longer by one. Slabs need
    one all-to-all for each transform, pencils two, each among the ranks that share a plane. No message is needed if an axis
    that isn't transformed has enough entries for the ranks.

    A 1-dimensional array on several ranks is transformed by Bailey's four-step algorithm. It takes three all-to-alls, each
    rank stores its part only, and real arrays cost as much as complex ones. The length must be the product of two factors,
    each at least the number of ranks. It can't be padded. Ranks may have no modes of a short real array.

    Adjoint
    -------
    The transposed stages in reverse order, with one all-to-all for each one of the forward pass, and without conjugation.

    References
    ----------
    D. H. Bailey, FFTs in external or hierarchical memory, J. Supercomputing 4 (1990), 23-35.

    Examples
    --------
    The derivative of a field on a periodic grid:

    >>> fft = mpiad.fft.DistributedFFT((8, 10))
    >>> x = np.arange(8)[:, None] * 2 * np.pi / 8 * np.ones(10)
    >>> kx, ky = fft.wavenumbers()
    >>> u = np.sin(x)[fft.owned]
    >>> print(np.allclose(fft.backward(1j * kx * fft.forward(u)), np.cos(x)[fft.owned]))
    True
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        axes: int | Sequence[int] | None = None,
        real: bool = True,
        norm: Literal["backward", "ortho", "forward"] = "backward",
        dtype: DTypeLike = float,
        padding: float | Sequence[float] | None = None,
        comm: Comm = None,
    ):
        group = channel(comm, "DistributedFFT")

        def planned() -> _WholeLines | _FourSteps:
            problem = _Problem.of(shape, axes, real, norm, dtype, padding)
            return (_FourSteps if len(problem.shape) == 1 and group.size > 1 else _WholeLines)(problem, group.size)

        described = f"{shape=}, {axes=}, {real=}, {norm=}, {dtype=}, {padding=}"
        plan = alike_on_all(group, planned, lambda _: [described], "DistributedFFT")
        problem, self.comm = plan.problem, comm
        self.shape, self.physical_shape, self.spectral_shape = problem.shape, problem.physical, problem.spectral()
        self.spectral_dtype = np.result_type(problem.dtype, np.complex64)
        self.dtype = problem.dtype if problem.is_real else self.spectral_dtype
        self.dims = plan.dims if isinstance(plan, _WholeLines) else (group.size,)
        self.owned, self.owned_spectral = (plan.block(spectral, group.rank) for spectral in (False, True))
        self.local_shape, self.local_spectral_shape = (
            tuple(part.stop - part.start for part in block) for block in (self.owned, self.owned_spectral)
        )
        self._axes = problem.axes
        block_bytes = math.prod(problem.physical) * self.dtype.itemsize // group.size or 1
        chains = (_Chain(tuple(stages), comm, len(self.shape), block_bytes) for stages in plan.stages(group, comm))
        self._forward, self._backward = chains
        self._exchanges = any(isinstance(stage, _Exchange) for stage in self._forward.stages)

    def forward(self, u: LocalArray) -> LocalArray:
        """Return the modes of an array.

        Parameters
        ----------
        u : array of shape (..., *local_shape) and of dtype `dtype`
            This rank's part of the array. Leading axes are batches; they are transformed with the same number of messages,
            or, if they are larger than 5 MB per rank, in parts of about 1 MB.

        Returns
        -------
        array of shape (..., *local_spectral_shape) and of dtype `spectral_dtype`
            This rank's part of the modes.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if `u` isn't an array of that dtype or shape, on the host, or if leading axes differ.

        Ranks
        -----
        All ranks call it, with the same leading axes. They compare these before the transform if they exchange parts.

        Adjoint
        -------
        The transposed transform: for complex arrays the transform with the same sign of the exponent.
        """
        return fourier_transform(self._checked(u, "forward", self.local_shape, self.dtype), self._forward)

    def backward(self, modes: LocalArray) -> LocalArray:
        """Return the array with the given modes.

        Parameters
        ----------
        modes : array of shape (..., *local_spectral_shape) and of dtype `spectral_dtype`
            This rank's part of the modes. With `real`, imaginary parts are ignored as in `scipy.fft.irfftn`.

        Returns
        -------
        array of shape (..., *local_shape) and of dtype `dtype`
            This rank's part of the array.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if `modes` isn't an array of that dtype or shape, on the host, or if leading axes differ.

        Ranks
        -----
        All ranks call it, with the same leading axes, as in `forward`.

        Adjoint
        -------
        The transposed transform.
        """
        return fourier_transform(
            self._checked(modes, "backward", self.local_spectral_shape, self.spectral_dtype), self._backward
        )

    def wavenumbers(self, lengths: float | Sequence[float] = 2 * math.pi) -> tuple[LocalArray, ...]:
        """Return the wavenumbers of this rank's modes.

        Parameters
        ----------
        lengths : float, or one per transformed axis, optional
            Lengths L of the periodic box; by default 2π, so that wavenumbers are integers.

        Returns
        -------
        tuple of array
            2π k / L for the integers k of each transformed axis, in the order of `axes`. The arrays broadcast to
            `local_spectral_shape`. If the number n of points is even, the mode k = n/2 has the wavenumber -n/2, or n/2
            along the axis with half of the modes; its derivatives of odd order vanish on the grid.

        Raises
        ------
        ValueError
            If `lengths` doesn't have one entry per transformed axis, or isn't positive.
        """
        axes, given = self._axes, np.asarray(lengths, float)
        if given.shape not in ((), (len(axes),)) or not np.all(given > 0):
            raise ValueError(
                f"DistributedFFT.wavenumbers: lengths must be one positive number for each of the {len(axes)} transformed "
                f"axes, but got {lengths!r}."
            )
        found = []
        for axis, length in zip(axes, np.broadcast_to(given, len(axes))):
            n = self.shape[axis]
            half = self.dtype.kind == "f" and axis == axes[-1]
            k = (scipy.fft.rfftfreq if half else scipy.fft.fftfreq)(n, 1 / n).round()[self.owned_spectral[axis]]
            scaled = (k * (2 * np.pi / length)).astype(self.spectral_dtype.char.lower())
            found.append(scaled.reshape(*[1] * (len(self.shape) + axis), -1, *[1] * (-axis - 1)))
        return tuple(found)

    def _checked(self, x: Array, call: str, shape: Shape, dtype: np.dtype) -> LocalArray:
        """Return x; raise an error of one rank, or different leading axes, on all ranks that exchange parts."""
        call = f"DistributedFFT.{call}"

        def leading_axes() -> Shape:
            block = getval(x)
            if not is_array(block) or block.dtype != dtype:
                given = f"an array of dtype {block.dtype}" if is_array(block) else type(block).__name__
                raise TypeError(f"{call}: expected an array of dtype {dtype}, but got {given}.")
            lead = max(0, block.ndim - len(shape))
            if block.shape[lead:] != shape:
                raise ValueError(
                    f"{call}: expected this rank's part, an array of shape (..., {', '.join(map(str, shape))}), but got "
                    f"{block.shape}."
                )
            return block.shape[:lead]

        if self._exchanges:
            # MPI doesn't detect shorter messages, and the number of messages depends on the batch.
            alike_on_all(channel(self.comm, call), leading_axes, lambda lead: [f"leading axes {lead}"], call)
        else:
            leading_axes()
        return x

    def __repr__(self) -> str:
        return f"DistributedFFT({self.shape}, axes={self._axes}, dtype={self.dtype}, physical_shape={self.physical_shape})"
