"""Minimization over a block on each rank: `mpiad.minimize` for variables on a divided grid."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from typing import Any

import scipy

from mpiad._typing import Function, LocalArray, Tree
from mpiad.domain.decomposition import Decomposition
from mpiad.pytrees import flatten, is_variable
from mpiad.transport.agreement import raising_together
from mpiad.transport.device_arrays import is_array

_CALL = "Domain.minimize"


class Minimization(Decomposition):
    """Objectives of the whole grid as functions of its blocks."""

    def minimize(
        self,
        fun: Function,
        x0: LocalArray | Tree,
        *,
        method: str = "L-BFGS-sharded",
        jac: Function | bool | None = None,
        hessp: Function | None = None,
        bounds: Sequence | scipy.optimize.Bounds | None = None,
        tol: float | None = None,
        options: dict | None = None,
        callback: Function | None = None,
        objective: str = "root",
        args: tuple = (),
        checkpoint: str | PathLike[str] | tuple | None = None,
        progress: bool = False,
    ) -> scipy.optimize.OptimizeResult:
        """Minimize an objective of the whole grid, whose variables stay in blocks on their ranks.

        This is `mpiad.minimize` with a method that leaves the variables on their ranks. Inner products are sums over the
        whole grid.

        Parameters
        ----------
        fun : callable
            ``fun(u, *args)`` is called on every rank with this rank's block, and returns its L_r, one real number.
        x0 : array of shape (..., *local_shape), or pytree of them
            This rank's block of the starting point.
        method : {"L-BFGS-sharded", "Newton-CG-sharded"}
        jac : callable or True, optional
            ``jac(u, *args)`` returns the gradient of J with respect to this rank's block; True: `fun` returns ``(L_r,
            gradient)``. By default it is computed by `value_and_grad`.
        hessp : callable, optional
            ``hessp(u, v, *args)`` returns this rank's block of the product of the Hessian of J with v, for
            "Newton-CG-sharded". By default it is computed by `make_hvp`.
        bounds : sequence of (low, high) or scipy.optimize.Bounds, optional
            Of this rank's block, flattened.
        tol, options
            As in `minimize`; the same on all ranks.
        callback : callable, optional
            ``callback(u)`` is called on every rank after each iteration.
        objective : {"root", "sum", "mean"}
            Minimize the L_r of rank 0 (for a `fun` that returns `Domain.sum`), the sum of all L_r, or their mean.
        args : tuple
        checkpoint : path or mpiad.optimize.CheckpointFile, optional
            As in `minimize`: each rank writes its own files next to this path. Any number of ranks can resume from them.
        progress : bool
            Whether rank 0 writes its progress to standard error.

        Returns
        -------
        scipy.optimize.OptimizeResult
            As in `minimize` with the same method: `x` and `jac` are this rank's blocks.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if an argument on any of them is invalid: a method without blocks, or an x0 that isn't a block.
        WorkerError
            On all ranks, if an evaluation raises on any.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        None: the result is a constant in every trace.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> result = domain.minimize(lambda u: domain.sum((u - x) ** 2), np.zeros(domain.local_shape))
        >>> print(np.allclose(result.x, x))
        True
        """
        with raising_together(self._channel):
            if not (isinstance(method, str) and method.lower().endswith("-sharded")):
                raise ValueError(
                    f"{_CALL}: method must be 'L-BFGS-sharded' or 'Newton-CG-sharded', which leave each block on its rank, "
                    f"but got {method!r}. "
                    "mpiad.minimize has methods for variables that the root holds, such as a whole grid."
                )
            # Leaves that aren't variables may be anything.
            for leaf in [x0] if is_array(x0) else filter(is_variable, flatten(x0)[0]):
                self._checked(leaf, self.local_shape, _CALL)
        # The optimizers are independent of domains, and a layer above them: they are imported when they are used.
        optimize = import_module("mpiad.optimize")
        kept: Any = optimize.CheckpointFile(checkpoint) if isinstance(checkpoint, (str, PathLike)) else checkpoint
        # So that the file holds the whole grid, and can be read on another number of ranks.
        if isinstance(kept, optimize.CheckpointFile) and kept.blocks is None:
            kept = kept._replace(blocks=self.owned)
        return optimize.minimize(
            fun, x0, method=method, jac=jac, hessp=hessp, bounds=bounds, comm=self.comm, tol=tol, options=options,
            callback=callback, objective=objective, args=args, checkpoint=kept, progress=progress,
        )  # fmt: skip
