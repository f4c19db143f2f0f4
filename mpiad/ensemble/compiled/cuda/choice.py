"""Whether a kernel on a GPU solves an ensemble, and what is said where it can't."""

from __future__ import annotations

import numpy as np
from autograd.tracer import isbox

from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.choice import tell_once, traced_program
from mpiad.ensemble.compiled.cuda.kernels import Loaded
from mpiad.ensemble.compiled.program import Program
from mpiad.ensemble.settings import Settings

__all__ = ["fits", "program_for_gpu"]

# Of each thread. A step then moves as much memory for what didn't fit into registers as arrays would move.
MOST_LOCAL_BYTES = 8192


def program_for_gpu(compile: str | bool, given: Batch, host: Batch, settings: Settings, adjoint: str) -> Program | None:
    """Return what is compiled; None, and one line in the log, where arrays on the device solve the ensemble.

    Parameters
    ----------
    compile : {"auto", True, False}
    given : Batch
        With traced values in it.
    host : Batch
        The same, or a few trajectories like it, as plain arrays on the host.
    settings : Settings
    adjoint : {"discrete", "continuous"}

    Raises
    ------
    TypeError, ValueError
        With ``compile=True``, where it can't be.
    """
    if compile is False:
        return None
    must = compile is True
    reason = _unsupported(given, host, settings, adjoint)
    if reason is None:
        return traced_program(host, must)
    if must:
        raise ValueError(f"solve: compile=True, but {reason}. Leave compile out, or say compile=False.")
    tell_once(given.f, f"EnsembleGPU: {reason}, so EnsembleVectorized solves it by arrays on the device")
    return None


def _unsupported(given: Batch, host: Batch, settings: Settings, adjoint: str) -> str | None:
    if host.u0.dtype not in (np.float64, np.float32):
        return f"u0 has dtype {host.u0.dtype}, and kernels compute with float64 and float32"
    if settings.events:
        return "events= aren't looked for in kernels"
    if settings.saveat is None:
        return "save_everystep=True isn't for kernels"
    if given.traced and adjoint != "discrete":
        return f"adjoint={adjoint!r} isn't for kernels"
    if isbox(given.start) or isbox(given.end):
        return "it is differentiated by tspan, which kernels aren't"
    return None


def fits(loaded: Loaded, batch: Batch, must: bool) -> bool:
    """Tell whether a kernel is small enough; where it isn't, the log says so."""
    used = loaded.kernel.local_bytes
    if used <= MOST_LOCAL_BYTES:
        return True
    text = (
        f"EnsembleGPU: each thread of the kernel takes {used} bytes of memory beside its {loaded.kernel.registers} "
        f"registers, more than {MOST_LOCAL_BYTES}"
    )
    tell_once(batch.f, text if must else f"{text}, so EnsembleVectorized solves it by arrays on the device")
    return must
