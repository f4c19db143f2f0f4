"""The library's exceptions."""

from __future__ import annotations

__all__ = ["CommunicationMismatchError", "CommunicatorError", "DeadlockError", "ForeignTraceError", "MessageMismatchError"]
__all__ += ["RemoteError", "ReplicationError", "RequestError", "UnfinishedMessagesError", "WorkerError"]
__all__ += ["ConvergenceError", "IntegrationError", "NotFiniteError"]
__dir__ = __all__.copy


class CommunicatorError(ValueError):
    """Report a communicator that can't be used: freed, not prepared by `mpi_init`, an intercommunicator, or MPI has ended.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> comm = MPI.COMM_WORLD.Dup()
    >>> mpiad.mpi_init(comm)
    >>> comm.Free()
    >>> try:
    ...     mpiad.mpi_allreduce(1.0, comm=comm)
    ... except mpiad.errors.CommunicatorError as error:
    ...     print("freed")
    freed
    """


class UnfinishedMessagesError(RuntimeError):
    """Report a communicator on which an exception left unfinished messages; `mpiad.reset` makes it usable again."""


class RequestError(RuntimeError):
    """Report a request that was waited for twice, in another trace, or never.

    Examples
    --------
    >>> request = mpiad.mpi_iallreduce(1.0)
    >>> total = mpiad.mpi_wait(request)
    >>> try:
    ...     mpiad.mpi_wait(request)
    ... except mpiad.errors.RequestError as error:
    ...     print("waited for twice")
    waited for twice
    """


class CommunicationMismatchError(RuntimeError):
    """Report ranks whose next communication calls don't match; raised only under ``MPIAD_DEBUG=1``.

    Attributes
    ----------
    table : str
        Each rank's next call and its line in the program; with more than 16 ranks, each distinct call.
    ranks : tuple of int
        The ranks in the table, as ranks of the world.
    """

    def __init__(self, message: str, table: str = "", ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.table, self.ranks = table, tuple(ranks)


class MessageMismatchError(CommunicationMismatchError, ValueError):
    """Report a message that doesn't match its array; without ``MPIAD_DEBUG``, a plain ValueError is raised instead."""


class DeadlockError(RuntimeError):
    """Report a wait that took longer than the limit ``MPIAD_TIMEOUT``.

    Attributes
    ----------
    table : str
        Each rank's current call and its line in the program; with more than 16 ranks, each distinct call.
    ranks : tuple of int
        The ranks that raise this error.
    cycle : tuple of int
        A cycle of ranks, each of which waits for the next rank. The first rank is repeated at the end. Empty if no cycle
        was found.
    """

    def __init__(self, message: str, table: str = "", ranks: tuple[int, ...] = (), cycle: tuple[int, ...] = ()):
        super().__init__(message)
        self.table, self.ranks, self.cycle = table, tuple(ranks), tuple(cycle)


class ForeignTraceError(RuntimeError):
    """Report communication inside a derivative of plain autograd, whose reverse pass changes the order of communications.

    Examples
    --------
    >>> import autograd
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> try:
    ...     autograd.grad(lambda x: mpiad.mpi_exchange(x, dest=(rank + 1) % size, source=(rank - 1) % size))(1.0)
    ... except mpiad.errors.ForeignTraceError as error:
    ...     print("mpiad.grad" in str(error))
    True
    """


class ReplicationError(ValueError):
    """Report, on all ranks, a value that should be the same on all ranks, but isn't.

    Attributes
    ----------
    ranks : list of int
        The ranks whose values differ from the value on most ranks (for `x0` of a solve, from the root's value), as ranks of
        the checked communicator.
    path : str
        The path of the first leaf that differs, on the first rank of `ranks`.
    index : tuple of int
        Index of the first entry of this leaf that differs; empty for numbers, and if shapes or structures differ.
    absolute, relative : float
        The largest absolute and relative difference between entries of this leaf; NaN if no difference can be computed.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> try:
    ...     mpiad.debug.assert_replicated(rank)
    ...     print(size == 1)
    ... except mpiad.errors.ReplicationError as error:
    ...     print(len(error.ranks) == size - 1)
    True
    """

    def __init__(
        self, message: str, ranks: list[int] | None = None, path: str = "", index: tuple[int, ...] = (),
        absolute: float = float("nan"), relative: float = float("nan"),
    ):  # fmt: skip
        super().__init__(message)
        self.ranks, self.path, self.index = [] if ranks is None else list(ranks), path, index
        self.absolute, self.relative = absolute, relative


class ConvergenceError(RuntimeError):
    """Report an iteration that didn't reach its tolerance.

    Attributes
    ----------
    history : list of float
        Norms of the residual: first the initial residual, then the residual after each iteration.

    Examples
    --------
    >>> from mpiad.linalg import solve
    >>> matvec = lambda v: np.array([1.0, 2.0, 3.0]) * v
    >>> try:
    ...     solve(matvec, np.ones(3), method="cg", maxiter=1)
    ... except mpiad.errors.ConvergenceError as error:
    ...     print(len(error.history))
    2
    """

    def __init__(self, message: str, history: list[float] | None = None):
        super().__init__(message)
        self.history = [] if history is None else list(history)


class NotFiniteError(ConvergenceError, ValueError):
    """Report a system that can't be solved, since a coefficient, a right-hand side or a matrix-vector product isn't finite.

    If the objective raises this error at a trial point of `minimize`, for example after an overflow, the step is shortened,
    as for every ConvergenceError.

    Examples
    --------
    >>> from mpiad.linalg import solve
    >>> try:
    ...     solve(lambda v: v, np.array([1.0, np.nan]), method="cg")
    ... except mpiad.errors.NotFiniteError as error:
    ...     print(isinstance(error, mpiad.errors.ConvergenceError))
    True
    """


class IntegrationError(RuntimeError):
    """Report trajectories that failed (see `ReturnCode.failed`); raised by `mpiad.ensemble.solve` with ``throw=True``.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, solve
    >>> blow_up = ODEProblem(lambda u, p, t: [u[0] ** 2], [1.0], (0.0, 2.0))
    >>> try:
    ...     solve(blow_up, throw=True)
    ... except mpiad.errors.IntegrationError as error:
    ...     print("DtLessThanMin" in str(error))
    True
    """


class RemoteError(RuntimeError):
    """Report an exception that was raised on another rank of a collective call.

    Attributes
    ----------
    rank : int
        The rank that raised the exception, as a rank of the call's communicator.
    traceback : str
        The traceback on that rank, which the message also contains; empty if the rank died.
    exit_code : int
        Exit code of the job if this error isn't caught: the argument of `sys.exit` if `rank` called it, otherwise 1.
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = "", exit_code: int = 1):
        shown = f"\n\nThe traceback of rank {rank}:\n{traceback.rstrip()}" if traceback else ""
        super().__init__(message + shown)
        self.rank, self.traceback, self.exit_code = rank, traceback, exit_code


class WorkerError(RemoteError):
    """Report, on all ranks, an exception that one rank raised in `minimize`, `drive`, `mpi_map`, `sum_over` or `VI`.

    Attributes
    ----------
    rank, traceback, exit_code
        As for `RemoteError`.
    index : int or None
        The index of the failed item, in `mpi_map` and `sum_over`.

    Examples
    --------
    >>> try:
    ...     mpiad.mpi_map(lambda x: 1 / x, [1, 2, 0])
    ... except mpiad.errors.WorkerError as error:
    ...     print(error.index, "ZeroDivisionError" in error.traceback)
    2 True
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = "", index: int | None = None, exit_code: int = 1):
        super().__init__(message, rank, traceback, exit_code)
        self.index = index
