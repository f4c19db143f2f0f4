"""GMRES on blocks, restarted, with one reduction in each iteration.

Orthogonalisation is classical Gram-Schmidt, done twice in one reduction: beside the products of the basis with the new
vector it takes those with the newest vector of the basis, which complete the Gram matrix G of the basis. What a second
pass would subtract, s - G s for the products s of the first one, then needs no message of its own. The norm of the rest
follows from the same numbers; where too much of it cancels, it is asked for, and with it a pass of the usual kind.

The basis need not be orthonormal but for rounding: A V = V H holds for any that is made in this way.

References
----------
Y. Saad and M. H. Schultz, GMRES, SIAM Journal on Scientific and Statistical Computing 7 (1986), algorithm 4.
K. Swirydowicz, J. Langou, S. Ananthan, U. Yang and S. Thomas, Low synchronization Gram-Schmidt and generalized minimal
residual algorithms, Numerical Linear Algebra with Applications 28 (2021), section 3.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.diagnosis import require_iterations
from mpiad.linalg.system import System, preconditioned_product, preconditioned_start
from mpiad.linalg.vectors import column, combined, on_host, products


class _Basis:
    """The Krylov spaces of k systems: bases V, Hessenberg matrices H and Gram matrices G of V."""

    def __init__(self, first: LocalArray, norms: np.ndarray, length: int):
        k, n = first.shape
        self.vectors = np.empty_like(first, order="C", shape=(k, length + 1, n))
        self.hessenberg = np.zeros((k, length + 1, length), first.dtype)
        self.gram = np.zeros((k, length + 1, length + 1), first.dtype)
        self.norms = norms
        self.steps, self.complete = np.zeros(k, int), np.zeros(k, bool)
        self.vectors[:, 0] = first / column(first, np.where(norms > 0.0, norms, 1.0))

    def extend(self, system: System, j: int, w: LocalArray, active: np.ndarray) -> None:
        """Add what is left of w, the product with vector j, beside the basis."""
        known = self.vectors[:, : j + 1]
        last = known[:, j]
        s, square = self._products(system, known, last, w)
        # Two passes of Gram-Schmidt in one: s - (G s - s), by the Gram matrix of the basis instead of a second product.
        h = 2.0 * s - np.einsum("kij,kj->ki", self.gram[:, : j + 1, : j + 1], s)
        w = w - combined(known, h)
        seen = np.einsum("kij,kj->ki", self.gram[:, : j + 1, : j + 1], h)
        # |w - V h|² by Pythagoras, from sums that are there already.
        rest = square - 2.0 * np.sum(h.conj() * s, axis=1).real + np.sum(h.conj() * seen, axis=1).real
        # Below this part of the square what Pythagoras leaves has lost half of its digits.
        if (active & (rest <= np.sqrt(np.finfo(w.dtype).eps) * square)).any():
            w, h, rest = self._again(system, known, w, h, square)
        norm = np.sqrt(np.maximum(rest, 0.0))
        self.hessenberg[:, : j + 1, j] = np.where(active[:, None], h, 0.0)
        self.hessenberg[:, j + 1, j] = np.where(active, norm, 0.0)
        inverse = np.where(active & (norm > 0.0), 1.0 / np.where(norm > 0.0, norm, 1.0), 0.0)
        self.vectors[:, j + 1] = w * column(w, inverse)
        self.steps[active] = j + 1
        # Without a rest the space can't grow; the true residual shows whether it held the solution.
        self.complete |= active & (norm == 0.0)

    def _products(self, system: System, known: LocalArray, last: LocalArray, w: LocalArray) -> tuple:
        squares = np.einsum("kn,kn->k", w.conj(), w)
        local = [products(known, v).ravel() for v in (last, w)]
        total = system.sums(on_host(np.concatenate([*local, squares])))
        if not np.isfinite(total).all():
            system.require_finite(complex(total.sum()), w, "a product with matvec or preconditioner")
        column, s = total[: -len(w)].reshape(2, len(w), -1)
        j = column.shape[1] - 1
        self.gram[:, : j + 1, j] = column
        self.gram[:, j, : j + 1] = column.conj()
        return s, np.real(total[-len(w) :])

    def _again(self, system: System, known: LocalArray, w: LocalArray, h: np.ndarray, square: np.ndarray) -> tuple:
        total = system.sums(on_host(np.concatenate([products(known, w).ravel(), np.einsum("kn,kn->k", w.conj(), w)])))
        s, left = total[: -len(w)].reshape(len(w), -1), np.real(total[-len(w) :])
        w = w - combined(known, s)
        rest = left - np.sum(np.abs(s) ** 2, axis=1)
        # Nothing but rounding is left where the space holds the solution.
        floor = (10.0 * np.finfo(w.dtype).eps) ** 2 * square
        return w, h + s, np.where(rest > floor, rest, 0.0)

    def residuals(self, j: int, active: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return the least norm of each residual after step j: of those that stand still, as before."""
        found = before.copy()
        # The last column of Q is orthogonal to all of H's, so what the first unit vector has along it can't be removed.
        q = np.linalg.qr(self.hessenberg[active, : j + 2, : j + 1], mode="complete")[0]
        found[active] = np.abs(q[:, 0, -1]) * self.norms[active]
        for c in np.flatnonzero(active & self.complete).tolist():
            # Of a singular operator the columns may be dependent now, and Q says nothing.
            found[c] = self._least(c)[1]
        return found

    def _least(self, c: int) -> tuple[np.ndarray, float]:
        steps = self.steps[c]
        known, right = self.hessenberg[c, : steps + 1, :steps], np.zeros(steps + 1, self.hessenberg.dtype)
        right[:1] = self.norms[c]
        # By singular values, since the columns are dependent where the space could grow no further.
        y = np.linalg.lstsq(known, right, rcond=None)[0]
        return y, float(np.linalg.norm(right - known @ y))

    def combination(self) -> LocalArray:
        """Return the vectors with the least residuals, of shape (k, n)."""
        out = np.zeros_like(self.vectors[:, 0])
        for c, steps in enumerate(self.steps):
            out[c] = combined(self.vectors[c : c + 1, :steps], self._least(c)[0].astype(out.dtype)[None])[0]
        return out


def gmres(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Improve the solution of any nonsingular systems by one cycle: a `Method`."""
    require_iterations(system, targets)
    first, norms, scale = preconditioned_start(system, r, norms)
    targets = targets * scale
    length = max(1, min(system.settings.restart, system.limit - system.iterations, system.unknowns))
    basis = _Basis(first, norms, length)
    for j in range(length):
        # Those that have arrived, or whose space can't grow, stand still while the others go on.
        active = (norms > targets) & (basis.steps == j) & ~basis.complete
        if not active.any():
            break
        _, product = preconditioned_product(system, basis.vectors[:, j])
        basis.extend(system, j, product, active)
        norms = basis.residuals(j, active, norms)
        system.note(norms / scale)
    step = basis.combination()
    # From the right the basis is of vectors to which the preconditioner is still to be applied.
    x += step if system.settings.side == "left" else system.precondition(step)
    return bool((norms <= targets).all())
