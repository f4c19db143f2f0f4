"""Solves with variables that are distributed over the ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

from mpiad._typing import Array, Function, Tree
from mpiad.device import to_host
from mpiad.optimize.checkpoint import CheckpointFile, fingerprint, problem_of
from mpiad.optimize.constraints import Box, UserConstraint, box_of
from mpiad.optimize.evaluated_points import Ending
from mpiad.optimize.history import Progress, Record
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.objective_evaluation import Evaluation, Program
from mpiad.optimize.packing import DevicePacking, Packing, local_packing
from mpiad.optimize.root_driven import Solve
from mpiad.optimize.scipy_methods import MethodArguments
from mpiad.optimize.sharded.constraint_values import ConstraintValues, LinearEquality, local_constraints
from mpiad.optimize.sharded.convergence import (
    NOT_FINITE,
    AnySettings,
    MMASettings,
    NewtonSettings,
    identity_of,
    settings_of,
)
from mpiad.optimize.sharded.lbfgs import LBFGS
from mpiad.optimize.sharded.limited_memory import LimitedMemory, Point
from mpiad.optimize.sharded.mma import MMA, MMAPoint
from mpiad.optimize.sharded.newton_cg import NewtonCG, NewtonPoint
from mpiad.optimize.sharded.second_order import SecondOrderEvaluation
from mpiad.optimize.sharded.sharded_method import OF_RANKS, Identity, StateFiles, global_checksum, layout_of
from mpiad.optimize.sharded.vectors import DeviceVectors, HostVectors, Ring
from mpiad.optimize.totals import Totals
from mpiad.transport import Channel


class LocalArguments(NamedTuple):
    """A rank's arguments: its variables, their bounds, the settings of the method, and its checkpoint."""

    start: Tree
    packing: Packing
    box: Box | None
    constraints: list[UserConstraint]
    settings: AnySettings
    checkpoint: CheckpointFile | None


def check_local_arguments(method: str, start: Tree, arguments: MethodArguments) -> LocalArguments:
    """Check this rank's arguments; raise a TypeError or ValueError if one is invalid."""
    packing = local_packing(start)
    settings, box = settings_of(method, arguments.tol, arguments.options), box_of(arguments.bounds, packing)
    constraints = local_constraints(arguments.constraints, packing.size, settings.method)
    if isinstance(settings, MMASettings) and not (box is not None and np.all(np.isfinite(box))) and packing.size:
        raise ValueError(
            "minimize: method 'MMA-sharded' needs a finite lower and upper bound for each variable, but got "
            f"bounds={arguments.bounds!r:.80}."
        )
    return LocalArguments(start, packing, box, constraints, settings, arguments.checkpoint)


class Sharded(Solve):
    """A solve with distributed variables; collective."""

    def __init__(self, user_channel: Channel, program: Program, arguments: LocalArguments):
        super().__init__(user_channel, "minimize")
        self._program, self._arguments, self._totals = program, arguments, Totals(self._comm, program.root)
        self._evaluation = Evaluation(program, arguments.packing, self.agreement, user_channel)

    def run(self, callback: Function | None, progress: Progress | None) -> scipy.optimize.OptimizeResult:
        """Return the result on all ranks, or raise an exception on all ranks."""
        packing, settings = self._arguments.packing, self._arguments.settings
        files = StateFiles(self._arguments.checkpoint, self._identity(self._start()), self.channel, self.agreement)
        # If any rank has bounds or a callback, all ranks exchange additional messages.
        bounded, with_callback = self._totals.sums(np.array([self._arguments.box is not None, callback is not None], float))
        record = Record(progress if self._totals.is_root else None)
        iterates = ShardedIterates(packing, self.agreement, callback, bool(with_callback), record, self._totals)
        box = self._box(bool(bounded))
        if box is not None and isinstance(packing, DevicePacking):
            box = Box(*map(packing.xp.to_device, box))
        if isinstance(settings, MMASettings):
            return self._by_mma(settings, self._start(), iterates, files, box or Box(self._start(), self._start()))
        if isinstance(settings, NewtonSettings):
            derivatives = SecondOrderEvaluation(self._evaluation, self._program, self._totals, settings)
            solve = NewtonCG(derivatives, iterates, files, box)
            point, ending = solve.run(self._start())
            result = self._result(point, point.gradient, ending, solve.count, iterates)
            result.nhev = result.evaluations["product"] = derivatives.products
            return result
        ring = Ring(settings.maxcor)
        if isinstance(packing, DevicePacking):
            vectors = DeviceVectors(ring.height, packing.size, box, packing.xp)
        else:
            vectors = HostVectors(ring.height, packing.size, box)
        memory = LimitedMemory(ring, vectors, self._totals)
        evaluation: Evaluation | LinearEquality = self._evaluation
        if self._arguments.constraints:
            if box is not None:
                raise ValueError(
                    "minimize: method 'L-BFGS-sharded' supports either bounds or constraints, but got both. Use "
                    "'MMA-sharded' with an inequality that is active at the solution."
                )
            evaluation = LinearEquality(self._arguments.constraints, self._evaluation, self._totals, self._start())
        lbfgs = LBFGS(evaluation, memory, iterates, settings, files)
        is_free = isinstance(evaluation, Evaluation)
        # Only the method refers to the start, so that its memory is released after the first step.
        point, ending = lbfgs.run(self._start() if is_free else evaluation.start(self._start()))
        return self._result(point, memory.gradient(point), ending, lbfgs.count, iterates)

    def _start(self) -> Array:
        """Return this rank's variables at the start as a new vector."""
        return self._arguments.packing.pack(self._arguments.start)

    def _by_mma(
        self, settings: MMASettings, start: Array, iterates: ShardedIterates, files: StateFiles, box: Box
    ) -> scipy.optimize.OptimizeResult:
        constraints = ConstraintValues(self._arguments.constraints, self._evaluation, self._totals, self.channel)
        mma = MMA(constraints, iterates, settings, files, box)
        point, ending = mma.run(start)
        result = self._result(point, point.slopes[0], ending, mma.count, iterates)
        result.constr, result.v = constraints.by_constraint(mma.multipliers)
        result.constr_violation = point.violation
        if not np.all(np.isfinite(point.constraints)):
            result.message += " A constraint isn't finite."
        elif ending.status and point.violation > settings.catol:
            result.message += f" The largest violation of a constraint is {point.violation:.3e}."
        return result

    def _identity(self, start: Array) -> Identity:
        arguments, comm = self._arguments, self.channel.data
        if arguments.checkpoint is None:
            return Identity({})
        problem = problem_of(self._program, arguments.packing, to_host(start), self.channel.size)
        problem |= identity_of(arguments.settings)
        problem["bounds (checksum)"] = None if arguments.box is None else fingerprint(*arguments.box)
        if arguments.constraints:
            problem["limits of constraints"] = [[each.low.tolist(), each.high.tolist()] for each in arguments.constraints]
        layout = layout_of(arguments.packing.specs, arguments.checkpoint, comm)
        # The mean over the ranks depends on their number, so such a solve can't resume on another number of ranks.
        if layout is None or self._program.objective == "mean":
            return Identity(problem)
        any_ranks = {name: value for name, value in problem.items() if name not in OF_RANKS}
        any_ranks["whole arrays"] = [layout.shapes, [str(dtype) for _, dtype in arguments.packing.specs]]
        any_ranks["x0 of all ranks (checksum)"] = global_checksum(to_host(start), layout, comm)
        if any(comm.allgather(arguments.box is not None)):
            box: Box = self._box(True)  # type: ignore[assignment]
            any_ranks["bounds of all ranks (checksum)"] = [global_checksum(limit, layout, comm) for limit in box]
        return Identity(problem, any_ranks, layout)

    def _box(self, bounded: bool) -> Box | None:
        """Return this rank's bounds; infinite bounds if only other ranks have bounds."""
        size, box = self._arguments.packing.size, self._arguments.box
        return Box(np.full(size, -np.inf), np.full(size, np.inf)) if bounded and box is None else box

    def _result(
        self, point: Point | NewtonPoint | MMAPoint, gradient: Array, ending: Ending, count: int, iterates: ShardedIterates
    ) -> scipy.optimize.OptimizeResult:
        history, message = iterates.record.history(), ending.message
        if ending is NOT_FINITE:
            self._evaluation.at_start.note("entries of the gradient", to_host(gradient))
            message += self._evaluation.not_finite(point.x)
        return scipy.optimize.OptimizeResult(
            x=self._arguments.packing.unpack(point.x),
            fun=point.value,
            jac=self._arguments.packing.unpack_gradient(gradient),
            success=ending.status == 0,
            status=ending.status,
            message=message,
            nit=len(history.loss) - 1,
            nfev=count,
            njev=count,
            history=history,
            evaluations={"value": 0, "gradient": 0, "both": count, "product": 0},
        )
