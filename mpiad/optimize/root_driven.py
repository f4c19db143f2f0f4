"""One solve with its variables on the root: its duplicate of the communicator, and the parts that talk on it."""

from __future__ import annotations

from typing import Any

import scipy

from mpiad._typing import Tree
from mpiad.optimize.agreement import Agreement
from mpiad.optimize.evaluation import Evaluation, Program
from mpiad.optimize.methods import Method
from mpiad.optimize.points import Points
from mpiad.optimize.protocol import FINISH, Instructions, Refusal, serve
from mpiad.optimize.result import finished, outcome_of
from mpiad.optimize.scipy_methods import Wishes, drive
from mpiad.optimize.variables import Packing
from mpiad.progress_line import ProgressLine
from mpiad.transport import Channel
from mpiad.transport.fault_tolerance import is_interruption

__all__ = ["RootDriven"]


class RootDriven:
    """A solve, made and run by all ranks.

    Parameters
    ----------
    used : Channel
        The user's communicator.
    program : Program
        What to evaluate; checked and agreed on.
    start : nest of arrays
        The starting point, on all ranks.

    Attributes
    ----------
    agreement : Agreement
        Its `error` is what ended the solve on all ranks.
    """

    def __init__(self, used: Channel, program: Program, start: Tree):
        self._start, self._packing = start, Packing(start)
        self._used, self._comm = used, used.derive()
        self._leads = used.rank == program.root
        self.agreement = Agreement(self._comm)
        self._evaluation = Evaluation(program, self._packing, self.agreement, used, self._comm)
        self._instructions = Instructions(self._comm, program.root, self._packing.size)

    def run(self, method: Method, wishes: Wishes, progress: bool) -> scipy.optimize.OptimizeResult:
        """Drive on the root, serve elsewhere; return the outcome, or raise, on all ranks alike."""
        try:
            if self._leads:
                outcome = self._lead(method, wishes, ProgressLine() if progress else None)
            else:
                outcome = serve(self._instructions, self._evaluation)
        except Exception as error:
            # Where ranks are still to be interrupted, they are so on this communicator too; `minimize` gives it up.
            if not self.agreement.broken and not is_interruption(error):
                self._close()
            raise
        self._close()
        return finished(outcome, self._packing)

    def _lead(self, method: Method, wishes: Wishes, progress: ProgressLine | None) -> Any:
        points = Points(self._evaluation, self._instructions, method.together)
        start = self._packing.pack(self._start)
        try:
            result, history = drive(method, points, start, wishes, self._packing, progress)
            outcome = outcome_of(result, history, points.counts)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait on
            if self.agreement.broken or is_interruption(error):
                raise
            if self.agreement.error is not None:
                raise self.agreement.error from error.__cause__
            outcome = Refusal(error)
        finally:
            if progress is not None:
                progress.close()
        self._instructions.give(FINISH)
        return self._instructions.share_outcome(outcome)

    def _close(self) -> None:
        self.agreement.close()
        self._used.drop(self._comm)
