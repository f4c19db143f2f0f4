"""`petsc.solve`: linear systems by PETSc's Krylov methods and preconditioners, with the derivatives of `linalg.solve`.

The driver of the library's own methods (see `iteration`) also calls PETSc. PETSc solves for a correction, and is called
again until the true residual meets the tolerance. petsc4py is imported when `solve` is first called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.linalg.distributed_matrix import DistributedMatrix
from mpiad.linalg.iteration import Method
from mpiad.linalg.solve import Problem, solution
from mpiad.linalg.system import Settings, System, agree_on, check_settings
from mpiad.optional_packages import optional_package
from mpiad.primitives import stop_gradient
from mpiad.pytrees import flatten
from mpiad.transport import Channel, channel
from mpiad.transport.devices.device_arrays import is_device_array, named
from mpiad.transport.exits.recovery import recoverable

__all__ = ["solve"]
__dir__ = __all__.copy

_CALL = "linalg.petsc.solve"
_prefixes = itertools.count()  # prefixes of option names, one per solve, since PETSc has one table of options per process


@recoverable(_CALL)
def solve(
    operator: Function | DistributedMatrix,
    b: LocalArray,
    *params: Tree,
    options: dict[str, object] | None = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int | None = None,
    x0: LocalArray | None = None,
    verify: bool = True,
    comm: Comm = None,
) -> LocalArray:
    """Solve A(params) u = b with PETSc, with blocks of u and b on each rank; derivatives as in `mpiad.linalg.solve`.

    Parameters
    ----------
    operator : callable or DistributedMatrix
        A function ``operator(u, *params)``, like the `matvec` of `linalg.solve`, which PETSc uses as a shell matrix; or a
        sparse matrix, which PETSc's preconditioners accept.
    b : array
        This rank's block of the right-hand side. Its dtype is PETSc's scalar type, float64 or complex128.
    *params : pytree of arrays
        Arguments of the operator; none for a DistributedMatrix. Derivatives flow to the params, or to the matrix's values.
    options : dict, optional
        Command line options of PETSc, without dashes, such as ``{"ksp_type": "gmres", "pc_type": "gamg"}``.
    rtol, atol, maxiter, x0, verify, comm
        As in `solve`.

    Returns
    -------
    array of the shape and dtype of `b`

    Raises
    ------
    ImportError
        If petsc4py isn't installed.
    Exception
        On all ranks, if `operator` raises it on any rank, as in `solve`.
    TypeError, ValueError, ConvergenceError
        On all ranks, as in `solve`. If PETSc fails, the message contains PETSc's name of the reason.

    Ranks
    -----
    All ranks of `comm` call it, with the same options.

    Adjoint
    -------
    One solve with the transposed operator and the same options.
    """
    petsc = optional_package("petsc4py.PETSc", "petsc4py for the MPI of mpi4py", "petsc4py", _CALL)
    matrix = operator if isinstance(operator, DistributedMatrix) else None
    comm = matrix.comm if matrix is not None else comm
    group = channel(comm, _CALL)
    settings = Settings("petsc", rtol, atol, maxiter, comm, None, verify=verify, call=_CALL)
    settings = agree_on(settings, lambda: _checked(petsc, operator, stop_gradient(b), params, settings))
    matvec: Any = operator if matrix is None else matrix.operator()
    leaves, build = flatten(params if matrix is None else (matrix.values,))
    method = _method(petsc, group, matrix, dict(options or {}))
    start = None if x0 is None else stop_gradient(x0)
    return solution(b, *leaves, problem=Problem(matvec, None, build, settings, start, solver=method))


def _checked(petsc: ModuleType, operator: object, b: LocalArray, params: tuple, settings: Settings) -> dict[str, object]:
    scalar = np.dtype(petsc.ScalarType)
    if not callable(operator) and not isinstance(operator, DistributedMatrix):
        raise TypeError(f"{_CALL}: operator must be a function or a DistributedMatrix, but got {type(operator).__name__}.")
    if isinstance(operator, DistributedMatrix) and params:
        raise ValueError(f"{_CALL}: a DistributedMatrix takes no params, but got {len(params)}.")
    arrays: list[Any] = [b, *([stop_gradient(operator.values)] if isinstance(operator, DistributedMatrix) else [])]
    for array in arrays:
        if is_device_array(array):
            raise TypeError(
                f"{_CALL} works on the host, but got {named(array)} of shape {array.shape}. Copy it with "
                "mpiad.device.to_host, and the result back with mpiad.device.to_device; linalg.solve runs on devices."
            )
    if not isinstance(b, np.ndarray) or b.dtype != scalar:
        dtype = b.dtype if isinstance(b, np.ndarray) else type(b).__name__
        raise TypeError(f"{_CALL}: b must be an array of {scalar}, as this PETSc was built for, but got {dtype}.")
    check_settings(settings, ("petsc",), b.ndim)
    return {}


def _method(
    petsc: ModuleType, group: Channel, matrix: DistributedMatrix | None, options: dict[str, object]
) -> Callable[..., Method]:
    """Return a function that creates the method for a system, given its parameters and whether it is transposed."""

    def of_system(params: tuple, transposed: bool) -> Method:
        def method(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
            if matrix is None:
                operator = _shell(petsc, group, system)
            else:
                rows, kind = matrix.with_values(params[0]).local_rows(), petsc.IntType
                csr = rows.indptr.astype(kind), rows.indices.astype(kind), rows.data.astype(petsc.ScalarType)
                operator = petsc.Mat().createAIJ(tuple(zip(matrix.local_shape, matrix.shape)), csr=csr, comm=group.user)
                operator = operator.transpose() if transposed else operator
            # The tolerance is relative, since PETSc may use the norms of preconditioned residuals.
            rtol = max(0.5 * float(targets[0] / norms[0]), 1e-13)
            prefix, database = f"mpiad_{next(_prefixes)}_", petsc.Options()
            for name, value in options.items():
                database[prefix + name] = value
            ksp = petsc.KSP().create(comm=group.user)
            try:
                ksp.setOptionsPrefix(prefix)
                ksp.setOperators(operator)
                ksp.setTolerances(rtol=rtol, atol=0.0, max_it=system.limit)
                ksp.setConvergenceHistory()
                ksp.setFromOptions()
                # The right-hand side is copied, since PETSc's vector uses the memory of the array.
                rhs = petsc.Vec().createWithArray(np.array(r[0]), comm=group.user)
                step = rhs.duplicate()
                ksp.solve(rhs, step)
                x[0] += step.getArray()
                reason, history = int(ksp.getConvergedReason()), [float(norm) for norm in ksp.getConvergenceHistory()]
            finally:
                for name in options:
                    database.delValue(prefix + name)
                ksp.destroy()
                operator.destroy()
            for norm in history[1:]:
                system.note(np.array([norm]))
            if reason < 0:
                system.settle()  # raises if the operator raised on any rank, in which case PETSc got NaN
                names = [
                    name for name, value in vars(petsc.KSP.ConvergedReason).items() if value == reason and name[0] != "_"
                ]
                system.fail(f"PETSc failed: {names[0] if names else f'reason {reason}'}. Its options were {options}")
            return True

        return method

    return of_system


def _shell(petsc: ModuleType, group: Channel, system: System) -> Any:
    class Context:
        def mult(self, matrix: Array, x: Array, y: Array) -> None:
            # The vector is copied, since PETSc owns its memory, and the user's operator may store its argument.
            y.setArray(system.apply(np.array(x.getArray())[None])[0])

    size = system.length, None
    # PETSc duplicates the user's communicator; it doesn't accept this library's wrapper of a communicator.
    return petsc.Mat().createPython((size, size), Context(), comm=group.user)
