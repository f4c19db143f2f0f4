"""Differentiable MPI programs: primitives, exact gradients of the whole distributed program, optimisation."""

import os as _os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpiad.differentiation import grad, hvp, jacobian, jvp, linearize, make_hvp, make_jvp, make_vjp, value_and_grad
from mpiad.domain import Domain
from mpiad.optimize import minimize, mpi_optimize
from mpiad.primitives import (
    mpi_allgather,
    mpi_allreduce,
    mpi_alltoall,
    mpi_barrier,
    mpi_bcast,
    mpi_exchange,
    mpi_exscan,
    mpi_finalize,
    mpi_finalized,
    mpi_gather,
    mpi_iallreduce,
    mpi_init,
    mpi_initialized,
    mpi_irecv,
    mpi_isend,
    mpi_local_rank,
    mpi_print,
    mpi_rank,
    mpi_recv,
    mpi_reduce,
    mpi_reduce_scatter,
    mpi_scan,
    mpi_scatter,
    mpi_send,
    mpi_sendrecv,
    mpi_size,
    mpi_sum,
    mpi_wait,
    mpi_waitall,
    reset,
    stop,
)
from mpiad.tasks import mpi_map
from mpiad.transport import world as _world

if TYPE_CHECKING:
    from mpiad.programs import jit

__version__ = "0.1.0"

__all__ = [
    "Domain", "grad", "hvp", "jacobian", "jit", "jvp", "linearize", "make_hvp", "make_jvp", "make_vjp", "minimize",
    "mpi_allgather", "mpi_allreduce", "mpi_alltoall", "mpi_barrier", "mpi_bcast", "mpi_exchange", "mpi_exscan",
    "mpi_finalize", "mpi_finalized", "mpi_gather", "mpi_iallreduce", "mpi_init", "mpi_initialized", "mpi_irecv",
    "mpi_isend", "mpi_local_rank", "mpi_map", "mpi_optimize", "mpi_print", "mpi_rank", "mpi_recv", "mpi_reduce",
    "mpi_reduce_scatter", "mpi_scan", "mpi_scatter", "mpi_send", "mpi_sendrecv", "mpi_size", "mpi_sum", "mpi_wait",
    "mpi_waitall", "reset", "stop", "value_and_grad",
]  # fmt: skip

# Loaded at their first use: `mpiad.debug` after `import mpiad` costs nothing where nobody looks.
_ROOMS = (
    "debug", "device", "ensemble", "errors", "extend", "inverse", "linalg", "parallel", "programs", "testing",
    "timestepping", "vi",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "jit":
        return import_module(f"{__name__}.programs").jit
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})


def _record_where_asked() -> None:
    if _world.any_rank(bool(_os.environ.get("MPIAD_TRACE"))):
        __getattr__("debug").recording.of_the_program()


_world.at_start(_record_where_asked)
