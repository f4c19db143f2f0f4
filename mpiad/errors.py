"""The library's exceptions: what was asked, what came, what was expected, what to do."""

from __future__ import annotations

__all__ = [
    "CommunicatorError",
    "ConvergenceError",
    "ForeignTraceError",
    "RequestError",
    "UnfinishedMessagesError",
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
