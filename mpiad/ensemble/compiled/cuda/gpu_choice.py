"""Whether a kernel on a GPU solves an ensemble, and what is said where it can't."""

from __future__ import annotations

import numpy as np
from autograd.core import JVPNode
from autograd.tracer import isbox

from mpiad.compiling.program import Program
from mpiad.ensemble.backends import Compiler
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.cuda.gpu_kernels import Loaded
from mpiad.ensemble.compiled.parameter_layout import layout_of
from mpiad.ensemble.compiled.traced_problem import traced_program
from mpiad.ensemble.settings import Settings

__all__ = ["fits", "is_small", "program_for_gpu"]

# Of each thread. A step then moves about as much memory for what didn't fit into registers as arrays would move.
MOST_LOCAL_BYTES = 8192


def program_for_gpu(compiler: Compiler, given: Batch, host: Batch, settings: Settings) -> Program | None:
    """Return what is compiled; None, and one line in the log, where arrays solve the ensemble.

    Parameters
    ----------
    given : Batch
        With traced values in it.
    host : Batch
        The same, or a few trajectories like it, as plain arrays on the host.

    Raises
    ------
    TypeError, ValueError
        With ``compile=True``, where it can't be.
    """
    if compiler.compile is False:
        return None
    must = compiler.compile is True
    reason = _unsupported(compiler, given, host, settings)
    if reason is None:
        return traced_program(host, must, compiler.warn)
    if must:
        raise ValueError(f"solve: compile=True, but {reason}. Leave compile out, or say compile=False.")
    compiler.warn(given.f, f"EnsembleGPU: {reason}, so EnsembleVectorized solves it by arrays")
    return None


def _unsupported(compiler: Compiler, given: Batch, host: Batch, settings: Settings) -> str | None:
    if host.u0.dtype not in (np.float64, np.float32):
        return f"u0 has dtype {host.u0.dtype}, and kernels on GPUs compute with float64 and float32"
    if any(part.complex for part in layout_of(host.p).parts):
        return "p has complex numbers, and kernels on GPUs compute with real ones"
    if settings.saveat is None:
        return "kernels don't save for save_everystep=True"
    if given.traced and compiler.adjoint != "discrete":
        return f"kernels don't compute adjoint={compiler.adjoint!r}"
    if isbox(given.start) or isbox(given.end):
        return "it is differentiated by tspan, and kernels aren't"
    if len(_traces(given)) > 1:
        return "it is differentiated twice, and kernels are once"
    if settings.events and given.traced and (compiler.gradient == "tangent" or _forwards(given)):
        return "it is differentiated by tangents, and kernels with events= are by an adjoint"
    return None


def _forwards(given: Batch) -> bool:
    """Tell whether a batch is traced in forward mode."""
    return any(isbox(x) and isinstance(x._node, JVPNode) for x in (given.u0, *given.p.leaves))


def _traces(given: Batch) -> set[int]:
    """Return the numbers of the traces around a batch."""
    found = set()
    for x in (given.u0, *given.p.leaves):
        while isbox(x):
            found.add(x._trace)
            x = x._value
    return found


def is_small(loaded: Loaded) -> bool:
    """Tell whether what a kernel keeps beside its registers is little enough."""
    return loaded.kernel.local_bytes <= MOST_LOCAL_BYTES


def fits(loaded: Loaded, batch: Batch, compiler: Compiler) -> bool:
    """Tell whether a kernel is small enough, or must be taken; where it isn't, the log says so."""
    must = compiler.compile is True
    if is_small(loaded):
        return True
    text = (
        f"EnsembleGPU: each thread of the kernel takes {loaded.kernel.local_bytes} bytes of memory beside its "
        f"{loaded.kernel.registers} registers, more than {MOST_LOCAL_BYTES}"
    )
    compiler.warn(batch.f, text if must else f"{text}, so EnsembleVectorized solves it by arrays")
    return must
