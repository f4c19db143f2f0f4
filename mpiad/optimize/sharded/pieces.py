"""Evaluations where each rank has its own piece of the variables, and of the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Tree
from mpiad.optimize.agreement import WrongValueError
from mpiad.optimize.evaluation import Evaluation
from mpiad.optimize.sharded.device_packing import DevicePacking
from mpiad.optimize.sharded.lending import PiecePacking

__all__ = ["OwnParts", "PieceEvaluation"]


class OwnParts:
    """Each rank's part of the gradient is its own."""

    def hand_in(self, part: np.ndarray) -> np.ndarray:
        """Return the part."""
        return part

    def total(self, part: np.ndarray) -> np.ndarray:
        """Return the part."""
        return part


class PieceEvaluation(Evaluation):
    """As `Evaluation`, but every rank passes its own variables and gets dJ/dx_r, which nobody adds up."""

    _packing: PiecePacking | DevicePacking

    def lend(self) -> np.ndarray | None:
        """Return where the next variables may be written for the function, shape (n,); None where they are packed."""
        return self._packing.lend()

    def _flat(self, gradient: Tree) -> np.ndarray:
        return self._packing.pack_gradient(gradient)

    def _weighted(self, local: Tree, source: str) -> np.ndarray:
        """Return a gradient that the user computes: that of J already, whatever J is made of."""
        try:
            return self._packing.pack_gradient(local)
        except TypeError as error:
            raise WrongValueError(f"{error} It was returned by {source}.") from None

    def _pair_at(self, x: Tree) -> tuple[Any, np.ndarray]:
        out = self._program.fun(x, *self._program.args)
        if not isinstance(out, tuple) or len(out) != 2:
            raise WrongValueError(f"minimize: with jac=True fun must return (value, gradient), but got {out!r:.60}.")
        return self._checked(out[0]), self._weighted(out[1], "fun")
