"""Evaluate residuals and Jacobian products on all ranks; the residuals themselves stay on their ranks.

For a trial point the root needs the cost. For an iterate with few variables it needs the triangle R of a QR factorization
of [f, J], the residuals first: each rank reduces its own rows to a triangle of (n + 1)² numbers, and the root reduces all
triangles to one. With many variables the root needs products with J and its transpose, for which vectors of residuals are
sent from their ranks to the root and back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array, Comm, Scalar, Tree
from mpiad.device import to_host
from mpiad.differentiation import linearize, make_jvp
from mpiad.optimize.objective_evaluation import Program, StartValues
from mpiad.optimize.packing import Packing
from mpiad.optimize.root_exchange import total_on_root
from mpiad.optimize.root_instructions import COTANGENT, FACTOR, NOT_FINITE, RESIDUALS
from mpiad.primitives.cotangents import spec_like
from mpiad.transport import Channel
from mpiad.transport.user_failures import StageFailures, WrongValueError

# Robust losses: ρ(z) of squared residuals z, with less weight for outliers. SciPy's names and formulas.
#
# References
# ----------
# .. [1] B. Triggs et al., "Bundle adjustment - a modern synthesis" (2000), section 4.3: how ρ changes residuals and
#    Jacobian so that their Gauss-Newton model is that of the robust cost.


@np.errstate(all="ignore")
def _soft_l1(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z
    return [2.0 * (np.sqrt(t) - 1.0), t**-0.5, -0.5 * t**-1.5]


@np.errstate(all="ignore")
def _huber(z: np.ndarray) -> list[np.ndarray]:
    near, root = z <= 1.0, np.sqrt(np.maximum(z, 1.0))
    return [np.where(near, z, 2.0 * root - 1.0), np.where(near, 1.0, 1.0 / root), np.where(near, 0.0, -0.5 / root**3)]


@np.errstate(all="ignore")
def _cauchy(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z
    return [np.log1p(z), 1.0 / t, -1.0 / t**2]


@np.errstate(all="ignore")
def _arctan(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z**2
    return [np.arctan(z), 1.0 / t, -2.0 * z / t**2]


LOSSES: dict[str, Any] = {"linear": None, "soft_l1": _soft_l1, "huber": _huber, "cauchy": _cauchy, "arctan": _arctan}


class Loss:
    """ρ with its scale: residuals beyond `scale` are outliers.

    `rho`: ``rho(z)`` returns ρ and its first two derivatives, shape (3, m).
    """

    def __init__(self, rho: Callable[[np.ndarray], Any], scale: float):
        self._rho, self._scale = rho, scale

    def weighed(self, f: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return twice this rank's cost, the residuals of its Gauss-Newton model, and the factors of its Jacobian rows."""
        # The cost tells the trust region that residuals aren't finite at a trial point: our code doesn't warn. A loss of
        # the user may warn.
        with np.errstate(all="ignore"):
            z = (f / self._scale) ** 2
        rho = np.asarray(self._rho(z), dtype=float)
        if rho.shape != (3, f.size):
            raise ValueError(f"least_squares: loss must return shape {(3, f.size)}, but got {rho.shape}.")
        # If the cost curves downwards, as for far outliers, its model mustn't.
        # The second derivative of ρ(f²)/2 with respect to f, at a scale of one: ρ' + 2 ρ'' f².
        with np.errstate(all="ignore"):
            factors = np.sqrt(np.maximum(rho[1] + 2.0 * rho[2] * z, sys.float_info.epsilon))
            return float(self._scale**2 * np.sum(rho[0])), f * rho[1] / factors, factors


def loss_of(loss: object, scale: Scalar) -> Loss | None:
    """Return the loss with this name, None for the sum of squares; a ValueError for an unknown loss or an invalid scale."""
    if not (callable(loss) or (isinstance(loss, str) and loss in LOSSES)):
        raise ValueError(f"least_squares: loss must be a function or one of {', '.join(LOSSES)}, but got {loss!r}.")
    if not (np.ndim(scale) == 0 and np.isreal(scale) and scale > 0.0):
        raise ValueError(f"least_squares: f_scale must be one positive number, but got {scale!r}.")
    rho = LOSSES[loss] if isinstance(loss, str) else loss
    return None if rho is None else Loss(rho, float(scale))


class ResidualEvaluation:
    """The stages of evaluations: every rank calls the same method with the root's variables.

    - `program`: `jac` returns this rank's rows of the Jacobian.
    - `solver`: {"exact", "lsmr"} or None.
    - `few`: largest number of variables for the "exact" solver by default.
    - `agreement`: of the ranks on each stage.
    - `gathers`: whether the root gets the residuals themselves.
    - `counts`: number of residuals per rank, if they are gathered.
    """

    def __init__(
        self, program: Program, packing: Packing, agreement: StageFailures, used: Channel, comm: Comm,
        loss: Loss | None, solver: str | None, few: int,
    ):  # fmt: skip
        self._program, self._packing, self.agreement = program, packing, agreement
        self._comm = comm
        self._leads = used.rank == program.root
        self.loss = loss
        self.gathers = packing.size > few if solver is None else solver == "lsmr"
        self.gathers &= packing.size > 1  # SciPy needs at least two dimensions
        self.counts: list[int] = []
        self._kept: tuple[bytes, Any, np.ndarray] | None = None
        self._rows: tuple[bytes, np.ndarray] | None = None
        self._at_start = StartValues()

    def carry_out(self, kind: int, vector: np.ndarray, direction: np.ndarray | None) -> Any:
        """Execute an instruction."""
        if kind == RESIDUALS:
            return self.gathered(vector) if self.gathers else self.cost(vector)
        if kind == FACTOR:
            return self.factor(vector)
        if kind == NOT_FINITE:
            return self._at_start.not_finite(self._comm, self._program.args)
        if kind == COTANGENT:
            return self.cotangent(vector)
        return self.tangent(vector, direction)  # type: ignore[arg-type]

    def cost(self, vector: np.ndarray) -> np.ndarray | None:
        """Return on the root the sums over all residuals of twice the cost and of the squares in its model, shape (2,)."""
        f = self._residuals(vector)
        local = np.array(self.agreement.run(lambda: self._weighed(f)[:2]))
        return total_on_root(self._comm, self._program.root, local)

    def _weighed(self, f: np.ndarray) -> tuple[float, float, np.ndarray, np.ndarray | None]:
        twice, model, factors = (0.0, f, None) if self.loss is None else self.loss.weighed(f)
        with np.errstate(over="ignore", invalid="ignore"):  # as in the loss: a trial point may lie anywhere
            square = float(model @ model)
        return square if factors is None else twice, square, model, factors

    def gathered(self, vector: np.ndarray) -> np.ndarray | None:
        """Return the residuals of all ranks, in their order, on the root."""
        f = self._residuals(vector)
        if not self.counts:
            self.counts = self._comm.allgather(f.size)
        return self._gathered(self.agreement.run(lambda: self._counted(f)))

    def _counted(self, found: object, size: int | None = None) -> np.ndarray:
        """Return residuals or their tangents, checked to be `size` many, or by default as many as before."""
        # The root allocates for the previous number: another one would fail inside the gather, with an error of MPI.
        found = np.ascontiguousarray(found, dtype=float).reshape(-1)
        size = self.counts[self._comm.rank] if size is None and self.counts else size
        if size is not None and found.size != size:
            raise WrongValueError(
                f"least_squares: fun must return as many residuals each time, but got {size} and then {found.size}."
            )
        return found

    def _gathered(self, f: np.ndarray) -> np.ndarray | None:
        whole = np.empty(sum(self.counts)) if self._leads else None
        self._comm.Gatherv(f, None if whole is None else (whole, self.counts), self._program.root)
        return whole

    def factor(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return on the root the triangle R of [f, J], shape (n + 1, n + 1), weighted by the loss, and the gradient."""
        f = self._residuals(vector)
        rows = self._jacobian(vector)

        def reduced() -> tuple[np.ndarray, np.ndarray]:
            model, factors = self._weighed(f)[2:]
            weighed = rows if factors is None else rows * factors[:, None]
            # R gives the gradient too, but with only half of the digits if the loss weights far outliers.
            return _triangle(np.column_stack([model, weighed])), model @ weighed

        # QR of stacked triangles has the R of all rows: R'R is the sum of theirs. No rank's rows need be sent.
        pieces = self._comm.gather(self.agreement.run(reduced), self._program.root)
        if pieces is None:
            return None
        return _triangle(np.concatenate([piece[0] for piece in pieces])), np.sum([piece[1] for piece in pieces], axis=0)

    def _jacobian(self, vector: np.ndarray) -> np.ndarray:
        """Return this rank's rows, shape (m_r, n): one column per direction, computed by all ranks together."""
        if self._rows is not None and self._rows[0] == vector.tobytes():
            return self._rows[1]
        x, given, args = self._packing.unpack(vector), self._program.jac, self._program.args
        size = self._residuals(vector).size
        if callable(given):
            # A copy: it serves all products at x, even after `fun` has written later derivatives into the same array.
            rows = self.agreement.run(lambda: self._checked(np.array(to_host(given(x, *args)), dtype=float), size))
        else:
            columns = [self._column(x, unit, size) for unit in np.eye(self._packing.size)]
            rows = np.stack(columns, axis=1)
        self._rows = vector.tobytes(), rows
        return rows

    def _checked(self, rows: np.ndarray, size: int) -> np.ndarray:
        if rows.shape != (size, self._packing.size):
            expected = size, self._packing.size
            raise WrongValueError(f"least_squares: jac must return shape {expected}, but got {rows.shape}.")
        return rows

    def tangent(self, vector: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
        """Return the product of the Jacobian with a direction, on the root."""
        if callable(self._program.jac):
            rows = self._jacobian(vector)
            return self._gathered(self.agreement.run(lambda: rows @ direction))
        self._residuals(vector)
        kept, v = self._kept[1], self._packing.unpack(direction)  # type: ignore[index]
        return self._gathered(self.agreement.run(lambda: self._counted(kept.jvp(v))))

    def _column(self, x: Tree, direction: np.ndarray, size: int | None = None) -> np.ndarray:
        along = make_jvp(lambda x: self.agreement.run(lambda: self._piece(x)))(x)
        return self.agreement.run(lambda: self._counted(along(self._packing.unpack(direction))[1], size))

    def cotangent(self, vector: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray | None:
        """Return the product of the transposed Jacobian with a vector on the root, one weight per residual."""
        own = np.empty(self.counts[self._comm.rank])
        self._comm.Scatterv((weights, self.counts) if self._leads else None, own, self._program.root)
        if callable(self._program.jac):
            rows = self._jacobian(vector)
            return total_on_root(self._comm, self._program.root, self.agreement.run(lambda: rows.T @ own))
        f = self._residuals(vector)
        kept = self._kept[1]  # type: ignore[index]
        part = self.agreement.run(lambda: self._packing.pack_gradient(kept.vjp(own.reshape(f.shape))))
        return total_on_root(self._comm, self._program.root, part)

    def _residuals(self, vector: np.ndarray) -> np.ndarray:
        """Return this rank's residuals, shape (m_r,); those of the last point are kept with their record."""
        # By its bits: SciPy requests residuals, Jacobian and products at one point in separate calls.
        key = vector.tobytes()
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # its memory is freed before the next is allocated
            x = self._packing.unpack(vector)
            if self.gathers and not callable(self._program.jac):
                kept = self.agreement.run(lambda: linearize(lambda x: self.agreement.run(lambda: self._piece(x)))(x))
                f = kept.value
            else:
                kept, f = None, self.agreement.run(lambda: self._piece(x))
            self._kept = key, kept, np.ascontiguousarray(f, dtype=float)
            self._at_start.note("residuals", f)
        return self._kept[2]

    def _piece(self, x: Tree) -> Array:
        out = self._program.fun(x, *self._program.args)
        if out is None:
            return np.zeros(0)
        out = to_host(out)  # rows and columns are assembled on the host
        array = out if type(out) in Box.types else anp.array(out)
        dtype = spec_like(array).dtype
        if dtype.kind not in "fiu":
            raise WrongValueError(f"least_squares: fun must return real residuals or None, but got {dtype} {out!r:.60}.")
        return anp.reshape(array, (-1,))


def _triangle(rows: np.ndarray) -> np.ndarray:
    """Return the triangle of a QR factorization, padded with rows of zeros."""
    found = np.linalg.qr(rows, mode="r")
    # Of one shape on all ranks, whatever their number of rows: triangles are stacked on the root.
    out = np.zeros((rows.shape[1], rows.shape[1]))
    out[: len(found)] = found
    return out
