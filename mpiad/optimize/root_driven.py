"""The common part of all solves, and their end; a solve with its variables on the root, and its communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import scipy

from mpiad._typing import Tree
from mpiad.differentiation.refusals import explain
from mpiad.domain.root_copies import of_root_copies
from mpiad.errors import DeadlockError
from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.conclusion import finished
from mpiad.optimize.history import Progress
from mpiad.optimize.objective_evaluation import Evaluation, Program
from mpiad.optimize.packing import Packing
from mpiad.optimize.root_instructions import FINISH, Instructions, Refusal, serve
from mpiad.transport import Channel, renew
from mpiad.transport.fault_tolerance import is_interruption
from mpiad.transport.signals import postponed
from mpiad.transport.user_failures import StageFailures


class Solve:
    """The common part of all solves: a duplicate of the communicator, and the agreement of its ranks on each stage.

    `used`: the user's communicator. `call`: name of the public function. `agreement`: its `error` is the exception that
    ended the solve on all ranks.
    """

    def __init__(self, used: Channel, call: str):
        # Its own duplicate: the user's function may communicate on the channel's while instructions are pending, and an
        # interrupted solve leaves no message that the user's next call could receive.
        self._used, self._comm, self._call = used, used.derive(), call
        self.agreement = StageFailures(self._comm, call, "mpiad.optimize", explain)

    @contextmanager
    def ending(self, checkpoint: CheckpointFile | None, progress: Progress | None) -> Iterator[None]:
        """Postpone SIGTERM if states are written; free the solve's resources, and renew the channel after a failure."""
        try:
            # If no state would be written, SIGTERM has its usual immediate effect.
            with nullcontext() if checkpoint is None else postponed(checkpoint.patience):
                yield
        except Exception as error:
            if isinstance(error, DeadlockError):
                self.agreement.close()  # which every rank does alone
            # Freeing is collective: if ranks don't meet any more it would wait forever, and ranks still to be interrupted
            # are interrupted on this communicator too.
            elif not self.agreement.broken and not is_interruption(error):
                self._close()
            if self.agreement.error is not None:
                renew(self._used.user, self._call)  # pending messages could be received as new ones
            raise
        finally:
            if progress is not None:
                progress.close()
        self._close()

    def _close(self) -> None:
        self.agreement.close()
        self._used.drop(self._comm)


class Leader(NamedTuple):
    """The root's objects for driving a method."""

    evaluation: Any  # Evaluation or ResidualEvaluation
    instructions: Instructions
    packing: Packing
    start: Tree
    used: Channel  # the user's communicator
    progress: Progress | None


class RootDriven(Solve):
    """A solve that the root drives, made and run by all ranks.

    `program`: the functions to evaluate; checked and agreed on. `start`: the starting point, on all ranks. `kind`: class
    that executes the root's instructions.
    """

    def __init__(
        self, used: Channel, program: Program, start: Tree, kind: Callable[..., Any] = Evaluation, call: str = "minimize"
    ):
        super().__init__(used, call)
        self._start, self._packing, self._leads = start, Packing(start), used.rank == program.root
        # On one rank the root's copy is the only one, and may be anything.
        program = program if used.size == 1 else program._replace(fun=of_root_copies(program.fun))
        self._evaluation = kind(program, self._packing, self.agreement, used, self._comm)
        self._instructions = Instructions(self._comm, program.root, self._packing.size)

    def run(self, drive: Callable[[Leader], dict[str, Any]], progress: Progress | None) -> scipy.optimize.OptimizeResult:
        """Drive on the root, serve elsewhere; return the outcome, or raise, on all ranks alike."""
        outcome = self._lead(drive, progress) if self._leads else serve(self._instructions, self._evaluation.carry_out)
        return finished(outcome, self._packing)

    def _lead(self, drive: Callable[[Leader], dict[str, Any]], progress: Progress | None) -> Any:
        cause: BaseException | None = None
        leader = Leader(self._evaluation, self._instructions, self._packing, self._start, self._used, progress)
        try:
            outcome: Any = drive(leader)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait
            # After a timeout the others are elsewhere in the program, and raise by themselves.
            if self.agreement.broken or is_interruption(error) or isinstance(error, DeadlockError):
                raise
            if self.agreement.error is not None:
                raise self.agreement.error from error.__cause__
            cause, outcome = error, Refusal(error, self._call)
        # Also after a refusal: the others wait for an instruction, and get the reason with the outcome.
        self._instructions.give(FINISH)
        return self._instructions.share_outcome(outcome, cause)
