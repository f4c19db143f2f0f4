"""One solve with its variables in pieces on their ranks: its duplicate of the communicator, and its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy

from mpiad._typing import Function, Tree
from mpiad.device import to_host
from mpiad.optimize.agreement import Agreement
from mpiad.optimize.checkpoint import Checkpoint, problem_of
from mpiad.optimize.program import Program
from mpiad.optimize.progress import Progress
from mpiad.optimize.sharded.box import Box, box_of
from mpiad.optimize.sharded.descent import Descent
from mpiad.optimize.sharded.device_box import DeviceBox
from mpiad.optimize.sharded.device_memory import DeviceMemory
from mpiad.optimize.sharded.device_packing import DevicePacking, is_on_device
from mpiad.optimize.sharded.device_trials import DeviceTrials
from mpiad.optimize.sharded.ending import Ending
from mpiad.optimize.sharded.keeper import Keeper
from mpiad.optimize.sharded.lending import PiecePacking
from mpiad.optimize.sharded.listener import Listener
from mpiad.optimize.sharded.memory import Memory
from mpiad.optimize.sharded.pieces import OwnParts, PieceEvaluation
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.settings import Settings, settings_of
from mpiad.optimize.sharded.totals import Totals
from mpiad.optimize.sharded.trials import Trials
from mpiad.optimize.variables import Packing
from mpiad.transport import Channel
from mpiad.transport.fault_tolerance import is_interruption

__all__ = ["Piece", "Sharded", "piece_of"]


class Piece(NamedTuple):
    """What a rank brings: its variables, their bounds, the settings of all, where its state is written."""

    start: Tree
    packing: Packing
    box: Box | None
    settings: Settings
    checkpoint: Checkpoint | None

    def problem(self, program: Program, start: np.ndarray, ranks: int) -> dict[str, Any]:
        """Return what a state of this solve belongs to: what its iterates depend on, as far as it can be said."""
        return {
            "method": "L-BFGS-sharded",
            **problem_of(program, self.packing, to_host(start), ranks),
            "m": self.settings.maxcor,
            "maxls": self.settings.maxls,
            "bounds (checksum)": None if self.box is None else self.box.fingerprint,
        }


def piece_of(
    start: Tree, bounds: Any, tol: float | None, options: dict | None, checkpoint: Checkpoint | None = None
) -> Piece:
    """Check this rank's arguments; a ValueError where one can't be."""
    packing = DevicePacking(start) if is_on_device(start) else Packing(start)
    return Piece(start, packing, box_of(bounds, packing.size), settings_of(tol, options), checkpoint)


class Sharded:
    """A solve, made and run by all ranks.

    Parameters
    ----------
    used : Channel
        The user's communicator.
    program : Program
        What to evaluate; checked and agreed on.
    piece : Piece
        This rank's own.

    Attributes
    ----------
    agreement : Agreement
        Its `error` is what ended the solve on all ranks.
    """

    def __init__(self, used: Channel, program: Program, piece: Piece):
        self._program, self._piece, self._used, self._comm = program, piece, used, used.derive()
        self._totals = Totals(self._comm, program.root)
        self.agreement = Agreement(self._comm)
        packing = piece.packing if isinstance(piece.packing, DevicePacking) else PiecePacking(piece.start)
        self._evaluation = PieceEvaluation(program, packing, self.agreement, used, OwnParts())

    def run(self, callback: Function | None, progress: Progress | None) -> scipy.optimize.OptimizeResult:
        """Descend; return the result, or raise, on all ranks alike."""
        line = progress if self._totals.leads else None
        try:
            result = self._run(callback, line)
        except Exception as error:
            if not self.agreement.broken and not is_interruption(error):
                self._close()
            raise
        finally:
            if line is not None:
                line.close()
        self._close()
        return result

    def _run(self, callback: Function | None, line: Progress | None) -> scipy.optimize.OptimizeResult:
        packing, settings = self._piece.packing, self._piece.settings
        start = packing.pack(self._piece.start)
        problem = {} if self._piece.checkpoint is None else self._piece.problem(self._program, start, self._used.size)
        keeper = Keeper(self._piece.checkpoint, problem, self._used, self.agreement)
        keeper.look()
        said = [float(mine) for mine in (self._piece.box is not None, callback is not None)]
        # What one rank has, all must know: bounds and callbacks make further messages.
        bounded, heard = self._totals.of(said, [0.0], [])[:2]
        memory, trials = self._worked_on_by(packing, bool(bounded))
        listener = Listener(packing, self.agreement, callback, bool(heard), line)
        descent = Descent(trials, memory, listener, settings, bool(bounded), keeper)
        point, ending = descent.run(start)
        return self._result(point, memory.gradient(point), ending, trials.count, listener)

    def _worked_on_by(self, packing: Packing, bounded: bool) -> tuple[Memory, Trials]:
        """Return what works on this rank's piece, where it lies."""
        box, maxcor = self._piece.box, self._piece.settings.maxcor
        if bounded and box is None:
            # The ranks exchange other numbers where there are bounds: so one that has none takes infinite ones.
            box = Box(np.full(packing.size, -np.inf), np.full(packing.size, np.inf))
        if not isinstance(packing, DevicePacking):
            memory = Memory(packing.size, maxcor, box, self._totals)
            return memory, Trials(self._evaluation, self._totals, box, memory)
        there = None if box is None else DeviceBox(box, packing.home)
        on_device = DeviceMemory(packing.size, maxcor, there, self._totals, packing.home)
        return on_device, DeviceTrials(self._evaluation, self._totals, there, on_device)

    def _result(
        self, point: Point, gradient: np.ndarray, ending: Ending, count: int, listener: Listener
    ) -> scipy.optimize.OptimizeResult:
        history = listener.record.history()
        return scipy.optimize.OptimizeResult(
            x=self._piece.packing.unpack(point.x),
            fun=point.value,
            jac=self._piece.packing.unpack_gradient(gradient),
            success=ending.status == 0,
            status=ending.status,
            message=ending.message,
            nit=len(history.loss) - 1,
            nfev=count,
            njev=count,
            history=history,
            evaluations={"value": 0, "gradient": 0, "both": count, "product": 0},
        )

    def _close(self) -> None:
        self.agreement.close()
        self._used.drop(self._comm)
