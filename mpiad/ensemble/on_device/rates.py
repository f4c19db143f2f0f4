"""The user's f on device arrays: called with columns, looked at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.device.assembly import array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.derivative import COUPLED, Columns
from mpiad.ensemble.trial import MOVED, require_uncoupled
from mpiad.transport.device_arrays import arrays_of

__all__ = ["Rates", "parameters_of", "rates_of"]


class Rates:
    """f of a problem whose state has shape (d,), or is one number; see `rates_of`.

    Parameters
    ----------
    f : callable
    shape : tuple of int
        Of one state.
    """

    def __init__(self, f: Function, shape: Shape):
        self._f, self._number = f, not shape

    def _called(self, u: Array, p: Tree, t: Array) -> Any:
        return [self._f(u[0], p, t)] if self._number else self._f(u, p, t)

    def write(self, out: Array, u: Array, p: Tree, t: Array) -> None:
        """Write the derivative of each column into `out`, both of shape (d, n); t has shape (n,)."""
        value = self._called(u, p, t)
        if isinstance(value, (list, tuple)):
            for i, component in enumerate(value):
                out[i] = component
        else:
            out[...] = value

    def at(self, u: Array, p: Tree, t: Array) -> Array:
        """Return the derivative of each column in new memory."""
        out = np.empty_like(u)
        self.write(out, u, p, t)
        return out

    def check(self, u: Array, p: Tree, t: Array) -> None:
        """Call f once, and a second time with all columns moved but the first.

        Raises
        ------
        NotImplementedError
            Where f uses a traced value from around it.
        TypeError, ValueError
            Where f doesn't return the derivative of columns, or couples them.
        """
        value = self._called(u, p, t)
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(map(isbox, parts)):
            raise NotImplementedError(
                "solve: f uses a traced value from around it, through which no derivative can flow. Pass it as p."
            )
        whole = not isinstance(value, (list, tuple))
        found = value.shape if whole else (len(parts), *u.shape[1:])
        wrong = [part.shape for part in parts if not whole and getattr(part, "shape", ()) not in ((), u.shape[1:])]
        if found != u.shape or wrong:
            raise ValueError(f"solve: f returned shape {(wrong or [found])[0]} for u of shape {u.shape}. {COUPLED}")
        _check_dtypes(parts, u)
        if u.shape[1] > 1:
            self._check_uncoupled(u, p, t)

    def _check_uncoupled(self, u: Array, p: Tree, t: Array) -> None:
        moved = u + MOVED * (1 + np.abs(u))
        moved[:, 0] = u[:, 0]
        alone = self.at(u, p, t)
        try:
            beside = self.at(moved.astype(u.dtype), p, t)
        except Exception:  # noqa: BLE001 the moved states may lie where it isn't defined
            return
        home: Any = arrays_of(u)
        pair = home.to_host(np.stack([alone[:, 0], beside[:, 0], np.max(np.abs(alone), axis=1)]))
        eps = float(np.finfo(pair.dtype).eps)
        largest = float(np.abs(pair[np.isfinite(pair)]).max(initial=0.0))
        require_uncoupled(pair[0], pair[1], largest, eps, "f")


class MatrixRates(Rates):
    """f of a problem whose state is a matrix (or has more axes): it is called for one state after the other."""

    def __init__(self, f: Function, shape: Shape):
        super().__init__(f, shape)
        self._shape = shape

    def write(self, out: Array, u: Array, p: Tree, t: Array) -> None:
        """Write the derivative of each column, a flattened state, into `out`."""
        for j in range(u.shape[1]):
            out[:, j] = self._one(u, p, t, j).reshape(-1)

    def _one(self, u: Array, p: Tree, t: Array, j: int) -> Any:
        value = self._f(u[:, j].reshape(self._shape), p.column(j) if isinstance(p, Columns) else p, t[j])
        return array(value) if isinstance(value, (list, tuple)) else value

    def check(self, u: Array, p: Tree, t: Array) -> None:
        """Call f once.

        Raises
        ------
        NotImplementedError
            Where f uses a traced value from around it.
        TypeError, ValueError
            Where f doesn't return the derivative of a state.
        """
        value = self._one(u, p, t, 0)
        if isbox(value):
            raise NotImplementedError("solve: f uses a traced value from around it. Pass it as p.")
        if np.shape(value) != self._shape:
            raise ValueError(f"solve: f returned shape {np.shape(value)} for u of shape {self._shape}; they must be equal.")
        _check_dtypes([value], u)


def _check_dtypes(parts: list[Any], u: Array) -> None:
    for part in parts:
        dtype = np.result_type(part) if isinstance(part, (bool, int, float, complex)) else part.dtype
        if not np.can_cast(dtype, u.dtype, casting="same_kind") and not isinstance(part, int):
            raise TypeError(f"solve: f returned {dtype} for u of {u.dtype}. Give u0 the dtype that the derivative has.")


def rates_of(f: Function, shape: Shape) -> Rates:
    """Return f as it is called for states of a shape."""
    return MatrixRates(f, shape) if len(shape) > 1 else Rates(f, shape)


def parameters_of(batch: Batch, leaves: list[Any]) -> Tree:
    """Return the parameters of some columns as f takes them, by their leaves."""
    if len(batch.shape) > 1 and any(batch.p.varies):
        return Columns(leaves, batch.p.varies, batch.p.build)
    return batch.p.build(leaves)
