"""A preconditioner that learns from the conjugate gradients of earlier iterations.

Each solve leaves directions s with products y = H s. They are conjugate, sᵢ·yⱼ = 0, so that with D = diag(sᵢ·yᵢ)

    P⁺ = (1 - S D⁻¹ Yᵀ) P (1 - Y D⁻¹ Sᵀ) + S D⁻¹ Sᵀ

is the BFGS update of the preconditioner P by all of them at once: it inverts the Hessian on what S spans, and is positive
definite whatever rounding has left of the conjugacy. The updates of several iterations are applied one upon another. Where
the Hessian changes little, the next solve hasn't to find again what this one has found. Where it curves down
it changes much: with directions from before the steps after that were poor, and up to twice as many as without. So all are
forgotten there.

References
----------
.. [1] J. L. Morales and J. Nocedal, "Automatic preconditioning by limited memory quasi-Newton updating", SIAM J. Optim. 10
   (2000).
.. [2] J. Nocedal and S. J. Wright, *Numerical Optimization*, 2nd ed., Springer 2006, algorithm 7.4.
"""

from __future__ import annotations

from collections.abc import Callable

from mpiad._typing import Array

Group = list[tuple[Array, Array, float]]  # s, y and s · y over all ranks


class RecycledDirections:
    """The preconditioner of a solve's Newton systems.

    `precondition`: P, on vectors of this rank's piece. `dots`: from pairs of vectors to a list of their products over
    all ranks, the same bits on all; one reduction. `most`: how many directions are kept; 0 for none.
    """

    def __init__(
        self, precondition: Callable[[Array], Array], dots: Callable[[list[tuple[Array, Array]]], list[float]], most: int
    ):
        self._precondition, self._dots, self._most = precondition, dots, most
        self._groups: list[Group] = []
        self._noted: list[tuple[Array, Array]] = []

    def note(self, direction: Array, product: Array) -> None:
        """Note a direction of the solve that is under way, with its product."""
        if self._most:
            self._noted = [*self._noted, (direction, product)][-self._most :]

    def learn(self) -> None:
        """Take what was noted into the preconditioner, and forget the oldest, or all; all ranks call it after a solve."""
        if not self._noted:
            return
        curvatures = self._dots(self._noted)
        if min(curvatures) <= 0.0:
            self._groups, self._noted = [], []
            return
        group = [(s, y, curvature) for (s, y), curvature in zip(self._noted, curvatures)]
        self._noted, room = [], self._most - len(group)
        for older in reversed(self._groups):
            kept = older[-room:] if room > 0 else []
            room -= len(kept)
            older[:] = kept
        self._groups = [each for each in [*self._groups, group] if each]

    def __call__(self, residual: Array) -> Array:
        """Return the product of P⁺ with a vector; collective."""
        residual, first = residual.copy(), []
        for group in reversed(self._groups):
            found = self._dots([(s, residual) for s, _, _ in group])
            first.append([product / curvature for product, (_, _, curvature) in zip(found, group)])
            for (_, y, _), weight in zip(group, first[-1]):
                residual -= weight * y
        result = self._precondition(residual)
        for group in self._groups:
            found, weights = self._dots([(y, result) for _, y, _ in group]), first.pop()
            for (s, _, curvature), product, weight in zip(group, found, weights):
                result = result + (weight - product / curvature) * s
        return result
