"""What every solve has, and how it ends; one with its variables on the root, and the parts that talk on its duplicate."""

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
    """What every solve has: a duplicate of the communicator, and the agreement of its ranks on each stage.

    `used`: the user's communicator. `call`: name of the public function. `agreement`: its `error` is what ended the solve
    on all ranks.
    """

    def __init__(self, used: Channel, call: str):
        # A duplicate of its own: the user's function may communicate on the channel's while instructions are under way, and
        # an interrupted solve leaves no message that the user's next call could take.
        self._used, self._comm, self._call = used, used.derive(), call
        self.agreement = StageFailures(self._comm, call, "mpiad.optimize", explain)

    @contextmanager
    def ending(self, checkpoint: CheckpointFile | None, progress: Progress | None) -> Iterator[None]:
        """Let SIGTERM wait where a state is written; free what the solve has, and renew what an evaluation has left."""
        try:
            # Where no state would be written, SIGTERM does at once what it always does.
            with nullcontext() if checkpoint is None else postponed(checkpoint.patience):
                yield
        except Exception as error:
            if isinstance(error, DeadlockError):
                self.agreement.close()  # which every rank does alone
            # Freeing is collective: where ranks don't come together any more it would wait for ever, and where they are
            # still to be interrupted, they are so on this communicator too.
            elif not self.agreement.broken and not is_interruption(error):
                self._close()
            if self.agreement.error is not None:
                renew(self._used.user, self._call)  # messages may be under way, which would be taken for new ones
            raise
        finally:
            if progress is not None:
                progress.close()
        self._close()

    def _close(self) -> None:
        self.agreement.close()
        self._used.drop(self._comm)


class Leader(NamedTuple):
    """What the root has at hand to drive a method."""

    evaluation: Any  # Evaluation or ResidualEvaluation
    instructions: Instructions
    packing: Packing
    start: Tree
    used: Channel  # the user's communicator
    progress: Progress | None


class RootDriven(Solve):
    """A solve that the root drives, made and run by all ranks.

    `program`: what to evaluate; checked and agreed on. `start`: the starting point, on all ranks. `kind`: what carries out
    the root's instructions.
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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait on
            # After a wait that was too long the others are somewhere else, and raise by themselves.
            if self.agreement.broken or is_interruption(error) or isinstance(error, DeadlockError):
                raise
            if self.agreement.error is not None:
                raise self.agreement.error from error.__cause__
            cause, outcome = error, Refusal(error, self._call)
        # Also after a refusal: the others wait for an instruction, and learn the reason with the outcome.
        self._instructions.give(FINISH)
        return self._instructions.share_outcome(outcome, cause)
