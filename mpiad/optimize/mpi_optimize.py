"""`mpi_optimize`: `minimize` with the objective and its gradient as two functions."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import scipy

from mpiad._typing import Comm, Function, Rank, Tree
from mpiad.optimize.checkpoint import Checkpoint
from mpiad.optimize.minimize import minimize

__all__ = ["mpi_optimize"]


def mpi_optimize(
    f: Function,
    g: Function,
    x0: Tree = None,
    method: str = "L-BFGS",
    *,
    bounds: Sequence | scipy.optimize.Bounds | None = None,
    constraints: Sequence | dict | scipy.optimize.LinearConstraint | scipy.optimize.NonlinearConstraint = (),
    root: Rank = 0,
    comm: Comm = None,
    tol: float | None = None,
    options: dict | None = None,
    callback: Function | None = None,
    objective: str = "root",
    args: tuple = (),
    checkpoint: str | PathLike[str] | Checkpoint | None = None,
    progress: bool = False,
) -> scipy.optimize.OptimizeResult:
    """Minimise f with its gradient g, evaluated by all ranks when the root asks for one or the other.

    Parameters
    ----------
    f : callable
        ``f(x, *args)`` returns this rank's L_r, one real number.
    g : callable
        ``g(x, *args)`` returns the gradient of this rank's L_r, in the form of x. Under ``objective="root"`` only the
        root's counts: there `mpiad.grad(f, shared=True)`, which all ranks call, is the gradient of what the root has
        put together.
    x0 : nest of arrays
        The starting point. Counts on the root only: other ranks give None or the same.
    method, bounds, constraints, root, comm, tol, options, callback, objective, checkpoint, progress
        As in `minimize`.
    args : tuple
        Further arguments of f and g: this rank's own.

    Returns
    -------
    scipy.optimize.OptimizeResult
        That of `minimize`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, where an argument on any of them is wrong, or x0 isn't the root's.
    WorkerError
        On all ranks, where f or g raises on any.

    Ranks
    -----
    All ranks of `comm` call it, and then f or g whenever the root's method wants one: together, in the same order. The
    result is the same on all, bit for bit.

    Adjoint
    -------
    None: the result is a constant in every trace.

    Examples
    --------
    >>> result = mpiad.mpi_optimize(lambda x: np.sum((x - 3.0) ** 2), lambda x: 2 * (x - 3.0), np.zeros(2))
    >>> print(np.round(result.x, 4))
    [3. 3.]
    """
    # None and True mean something else to `minimize`, which refuses a text on all ranks alike.
    jac: Any = repr(g) if g is None or isinstance(g, bool) else g
    return minimize(
        f, x0, method=method, jac=jac, bounds=bounds, constraints=constraints, root=root, comm=comm, tol=tol,
        options=options, callback=callback, objective=objective, args=args, checkpoint=checkpoint, progress=progress,
    )  # fmt: skip
