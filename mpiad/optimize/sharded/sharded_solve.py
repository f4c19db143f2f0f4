"""Solves with variables that are distributed over the ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

from mpiad._typing import Array, Function, Tree
from mpiad.device import to_host
from mpiad.optimize.checkpoint import CheckpointFile, problem_of
from mpiad.optimize.constraints import Box, box_of
from mpiad.optimize.evaluated_points import Ending
from mpiad.optimize.history import Progress, Record
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.objective_evaluation import Evaluation, Program
from mpiad.optimize.packing import DevicePacking, LocalPacking, local_packing
from mpiad.optimize.root_driven import Solve
from mpiad.optimize.root_protocol import Totals
from mpiad.optimize.scipy_methods import MethodArguments
from mpiad.optimize.sharded.convergence import NOT_FINITE, NewtonSettings, Settings, settings_of
from mpiad.optimize.sharded.device_vectors import DeviceVectors
from mpiad.optimize.sharded.host_vectors import HostVectors, Ring
from mpiad.optimize.sharded.lbfgs import LBFGS
from mpiad.optimize.sharded.limited_memory import LimitedMemory
from mpiad.optimize.sharded.newton_cg import NewtonCG, NewtonPoint
from mpiad.optimize.sharded.redistribution import global_checksum, layout_of
from mpiad.optimize.sharded.second_order import SecondOrderEvaluation
from mpiad.optimize.sharded.solver_state import OF_RANKS, Identity, Point, StateFiles
from mpiad.transport import Channel


class LocalArguments(NamedTuple):
    """A rank's arguments: its variables, their bounds, the settings of the method, and its checkpoint."""

    start: Tree
    packing: LocalPacking
    box: Box | None
    settings: Settings | NewtonSettings
    checkpoint: CheckpointFile | None


def check_local_arguments(method: str, start: Tree, given: MethodArguments) -> LocalArguments:
    """Check this rank's arguments; raise a TypeError or ValueError if one is invalid."""
    packing = local_packing(start)
    settings = settings_of(method, given.tol, given.options)
    return LocalArguments(start, packing, box_of(given.bounds, packing.size), settings, given.checkpoint)


class Sharded(Solve):
    """A solve with distributed variables; collective."""

    def __init__(self, used: Channel, program: Program, arguments: LocalArguments):
        super().__init__(used, "minimize")
        self._program, self._arguments, self._totals = program, arguments, Totals(self._comm, program.root)
        self._evaluation = Evaluation(program, arguments.packing, self.agreement, used)

    def run(self, callback: Function | None, progress: Progress | None) -> scipy.optimize.OptimizeResult:
        """Return the result on all ranks, or raise an exception on all ranks."""
        packing, settings = self._arguments.packing, self._arguments.settings
        start = packing.pack(self._arguments.start)
        files = StateFiles(self._arguments.checkpoint, self._identity(start), self._used, self.agreement)
        # If any rank has bounds or a callback, all ranks exchange additional messages.
        own = [float(given) for given in (self._arguments.box is not None, callback is not None)]
        bounded, with_callback = self._totals.reduce(own, [0.0], [])[:2]
        record = Record(progress if self._totals.is_root else None)
        iterates = ShardedIterates(packing, self.agreement, callback, bool(with_callback), record)
        box = self._box(bool(bounded))
        if isinstance(settings, NewtonSettings):
            derivatives = SecondOrderEvaluation(self._evaluation, self._program, packing, self._totals, settings)
            if box is not None and isinstance(packing, DevicePacking):
                box = Box(*map(packing.xp.to_device, box))
            solve = NewtonCG(derivatives, iterates, files, box)
            point, ending = solve.run(start)
            result = self._result(point, point.gradient, ending, solve.count, iterates)
            result.nhev = result.evaluations["product"] = derivatives.products
            return result
        ring = Ring(settings.maxcor)
        if isinstance(packing, DevicePacking):
            vectors = DeviceVectors(ring.height, packing.size, box, packing.xp)
        else:
            vectors = HostVectors(ring.height, packing.size, box)
        memory = LimitedMemory(ring, vectors, self._totals)
        lbfgs = LBFGS(self._evaluation, memory, iterates, settings, files)
        point, ending = lbfgs.run(start)
        return self._result(point, memory.gradient(point), ending, lbfgs.count, iterates)

    def _identity(self, start: Array) -> Identity:
        arguments, comm = self._arguments, self._used.data
        if arguments.checkpoint is None:
            return Identity({})
        problem = (
            problem_of(self._program, arguments.packing, to_host(start), self._used.size) | arguments.settings.identity
        )
        problem["bounds (checksum)"] = None if arguments.box is None else arguments.box.fingerprint
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
        self, point: Point | NewtonPoint, gradient: Array, ending: Ending, count: int, iterates: ShardedIterates
    ) -> scipy.optimize.OptimizeResult:
        history, message = iterates.record.history(), ending.message
        if ending is NOT_FINITE:
            self._evaluation.at_start.note("entries of the gradient", to_host(gradient))
            message += self._evaluation.not_finite_at_start()
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
