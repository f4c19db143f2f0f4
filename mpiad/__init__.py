"""Differentiable MPI programs: communication, exact gradients of the whole distributed program, and optimization."""

from importlib import import_module
from os import environ, getcwd
from typing import TYPE_CHECKING, Any

from mpiad import higher_layers as _higher_layers
from mpiad.differentiation import (
    grad,
    hessian,
    hvp,
    jacobian,
    jvp,
    linearize,
    make_hvp,
    make_jvp,
    make_vjp,
    segment_sum,
    value_and_grad,
)
from mpiad.environment_variables import path as _path
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
    mpi_neighbor_allgather,
    mpi_neighbor_alltoall,
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
    stop_gradient,
)
from mpiad.transport import world as _world
from mpiad.transport.core import channels as _channels

if TYPE_CHECKING:
    from mpiad.domain import Domain
    from mpiad.optimize import drive, minimize, mpi_optimize
    from mpiad.programs import jit
    from mpiad.redistribution import GhostExchange
    from mpiad.tasks import mpi_map

__version__ = "0.1.0"

__all__ = [
    "Domain", "GhostExchange", "drive", "grad", "hessian", "hvp", "jacobian", "jit", "jvp", "linearize", "make_hvp",
    "make_jvp", "make_vjp", "minimize", "mpi_allgather", "mpi_allreduce", "mpi_alltoall", "mpi_barrier", "mpi_bcast",
    "mpi_exchange", "mpi_exscan", "mpi_finalize", "mpi_finalized", "mpi_gather", "mpi_iallreduce", "mpi_init",
    "mpi_initialized", "mpi_irecv", "mpi_isend", "mpi_local_rank", "mpi_map", "mpi_neighbor_allgather",
    "mpi_neighbor_alltoall", "mpi_optimize", "mpi_print", "mpi_rank", "mpi_recv", "mpi_reduce", "mpi_reduce_scatter",
    "mpi_scan", "mpi_scatter", "mpi_send", "mpi_sendrecv", "mpi_size", "mpi_sum", "mpi_wait", "mpi_waitall", "reset",
    "segment_sum", "stop_gradient", "value_and_grad",
]  # fmt: skip

# Imported at first use, since these packages would double the import time of the library.
_PACKAGES = (
    "debug device domain ensemble errors extend fft interop inverse linalg optimize parallel programs pytrees "
    "redistribution tasks testing timestepping vi"
).split()
_FROM_PACKAGES = {"Domain": "domain", "GhostExchange": "redistribution", "jit": "programs", "mpi_map": "tasks"}
_FROM_PACKAGES |= dict.fromkeys(("drive", "minimize", "mpi_optimize"), "optimize")


def __getattr__(name: str) -> Any:
    if name in _FROM_PACKAGES:
        # Cached, so that the next access doesn't call this function.
        globals()[name] = value = getattr(import_module(f"{__name__}.{_FROM_PACKAGES[name]}"), name)
        return value
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    text = f"module {__name__!r} has no attribute {name!r}"
    if not name.startswith("_"):
        homes = [package for package in _PACKAGES if name in import_module(f"{__name__}.{package}").__all__]
        text += f"; did you mean {' or '.join(f'{__name__}.{package}.{name}' for package in homes)}?" if homes else ""
    raise AttributeError(text)


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]


def _minimize_field(*arguments: Any, **keywords: Any) -> Any:
    from mpiad.optimize.minimize import minimize_field  # at first use, like the packages above

    return minimize_field(*arguments, **keywords)


_higher_layers.minimize_field = _minimize_field

# Relative paths in MPIAD_TRACE are relative to this folder, although the program may change its working directory.
_folder = getcwd() if environ.get("MPIAD_TRACE") else ""


def _record_on_request() -> None:
    # A launcher may not pass the variable on to all ranks.
    if _channels.on_any_rank(_channels.base(), bool(_path("MPIAD_TRACE"))):
        __getattr__("debug").recording.record_program(_folder)


_world.at_start(_record_on_request)
