"""The library's exceptions: what was asked, what came, what was expected, what to do."""

from __future__ import annotations

__all__ = [
    "CommunicatorError",
    "ConvergenceError",
    "ForeignTraceError",
    "RequestError",
    "UnfinishedMessagesError",
    "WorkerError",
]


class CommunicatorError(ValueError):
    """Report a communicator that can't be used: freed, not prepared, between groups, or after the end of MPI."""


class UnfinishedMessagesError(RuntimeError):
    """Report a communicator on which an exception left messages under way; `mpiad.reset` renews it."""


class RequestError(RuntimeError):
    """Report a request that was waited for twice, in another trace, or never."""


class ForeignTraceError(RuntimeError):
    """Report communication under a derivative of plain autograd whose order can't be trusted."""


class ConvergenceError(RuntimeError):
    """Report an iteration that stopped short of its tolerance.

    Attributes
    ----------
    history : list of float
        Norm of the residual after each iteration, the initial one first.
    """

    def __init__(self, message: str, history: list[float] | None = None):
        super().__init__(message)
        self.history = [] if history is None else list(history)


class WorkerError(RuntimeError):
    """Report, on all ranks of a collective solve, the exception on one rank that ended it.

    Attributes
    ----------
    rank : int
        Where it happened, in the solve's communicator.
    traceback : str
        That rank's traceback.
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = ""):
        super().__init__(message)
        self.rank, self.traceback = rank, traceback
