"""Operations out of balance, executed alone, with their arguments moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.device import to_host
from mpiad.errors import ConvergenceError
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable, map_leaves
from mpiad.testing.derivative_checks import noise_like
from mpiad.testing.diagnosis.runs import Call
from mpiad.testing.diagnosis.vectors import direction_like, eps_of, moved, norm, product, without_autograds_sparse_form
from mpiad.transport.core.random_keys import generator_of

RTOL = 1e-5  # of the error of an adjoint, relative to the larger side
_NEARBY = 3
Directions = dict[int, Tree]  # by the positions of the arguments


class _Interval(NamedTuple):
    """⟨pull(g), d⟩, the range of ⟨g, ∂φ d⟩ near the arguments, and a bound of rounding errors."""

    adjoint: float = 0.0
    low: float = 0.0
    high: float = 0.0
    rounding: float = 0.0

    def error(self) -> float:
        """Return the relative distance of the adjoint from the range of derivatives; 0.0 if within rounding."""
        outside = max(self.adjoint - self.high, self.low - self.adjoint)
        size = max(abs(self.adjoint), abs(self.low), abs(self.high))
        return float(outside / size) if outside > self.rounding + RTOL * size else 0.0


class Execution:
    """A call of an operation, with copies of its arguments and of its result."""

    def __init__(self, call: Call, ans: Array):
        self.call, self.ans = call._replace(args=map_leaves(_copied, call.args)), map_leaves(_copied, ans)
        self.varies = False  # whether the result has depended on the arguments
        self.tolerance, self.is_accurate = 0.0, True  # of a solve

    def solve_accurately(self) -> None:
        """Solve again, if the operation is a linear or nonlinear solve, with a small tolerance of the residual.

        The derivatives of a solution are those of the exact one. That of the program may have a larger error.
        """
        problem: Any = self.call.params.get("problem") if isinstance(self.call.params, dict) else None
        if not hasattr(problem, "with_rtol"):
            return
        rtol = eps_of(self.ans) ** (2 / 3)
        accurate = self.call._replace(params={"problem": problem.with_rtol(rtol)})
        try:
            self.ans, self.call, self.tolerance = map_leaves(_copied, accurate.run(accurate.args)), accurate, rtol
        except ConvergenceError:  # on all ranks, for example since the system is ill-conditioned
            self.tolerance, self.is_accurate = problem.settings.rtol, False

    def interval(self, moving: Sequence[int], rng: np.random.Generator, is_uniform: bool) -> _Interval:
        """Return the interval for a random g, and a direction d that is zero except for the arguments in `moving`."""
        args, argnums = self.call.args, self.call.argnums
        g = map_leaves(lambda leaf: _positive(leaf, rng) if is_variable(leaf) else leaf, self.ans)
        directions = {k: direction_like(args[k], rng, is_uniform) for k in moving}
        nearby = [{k: direction_like(args[k], rng) for k in argnums} for _ in range(_NEARBY)]
        with np.errstate(all="ignore"):
            pulled = self.call.pull(self.ans)(g)
            parts = {k: without_autograds_sparse_form(part) for k, part in zip(argnums, pulled) if part is not None}
            adjoint = sum([product(part, directions[k]) for k, part in parts.items() if k in directions])
            eps = max([self.tolerance, eps_of(self.ans), *[eps_of(args[k]) for k in argnums]])
            step = eps**0.4
            before, here, after = (self._products(g, (t, directions)) for t in (-step, 0.0, step))
            slopes = [(after - here).real / step, (here - before).real / step]
            for shift in nearby:
                before, after = (self._products(g, (4 * step, shift), (t, directions)) for t in (-step, step))
                slopes.append((after - before).real / (2 * step))
            low, high = np.fmin.reduce(slopes), np.fmax.reduce(slopes)
            self.varies |= bool(np.any(low) or np.any(high))
            # The derivatives at some points nearby are a sample of those that a kink has.
            width = np.sum(high - low)
            size = np.sum(np.abs(here.real)) + sum([norm(part) * norm(args[k]) for k, part in parts.items()])
            return _Interval(adjoint, np.sum(low) - width, np.sum(high) + width, 16 * eps * size / step)

    def _products(self, g: Tree, *moves: tuple[float, Directions]) -> Array:
        """Return the products of g with the entries of the result, after some moves of the arguments."""
        args = list(self.call.args)
        for step, directions in moves:
            for k, direction in directions.items():
                args[k] = moved(args[k], step, direction)
        pairs = zip(flatten(g)[0], flatten(self.call.run(args))[0])
        return np.concatenate([np.zeros(0), *[np.ravel(to_host(w) * to_host(leaf)) for w, leaf in pairs if is_variable(w)]])


def _copied(leaf: Array) -> Array:
    return np.copy(leaf)[()] if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _positive(leaf: Array, rng: np.random.Generator) -> Array:
    noise = noise_like(leaf, rng)
    return noise if np.iscomplexobj(noise) else abs(noise) + spec_like(leaf).dtype.type(0.5)


class AdjointError(NamedTuple):
    """The error of an adjoint, on a rank and for an argument; None: for all that take part together."""

    rank: int | None
    argument: int | None
    error: float


def adjoint_errors(
    execution: Execution | None, participants: list[tuple[int, int]], rank: int, gather: Callable[[Any], list], key: int
) -> list[AdjointError]:
    """Return the errors of the adjoint of an operation; nothing for a right adjoint.

    `participants`: the ranks that execute the operation, with the positions of their traced arguments.
    """

    def error(moving: Sequence[tuple[int, int]]) -> float:
        errors = []
        for trial, is_uniform in enumerate((True, False, False)):
            rng, interval = generator_of(key, trial, rank), _Interval()
            if execution is not None:
                interval = execution.interval([k for r, k in moving if r == rank], rng, is_uniform)
            errors.append(_Interval(*np.sum(gather(interval), axis=0)).error())
        return max(errors)

    if execution is not None:
        execution.solve_accurately()
    total = error(participants)
    if total == 0.0:
        return []
    single = [AdjointError(*participant, error([participant])) for participant in participants]
    return [each for each in single if each.error > 0.0] or [AdjointError(None, None, total)]
