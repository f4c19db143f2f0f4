"""Whether an ensemble is solved by compiled kernels: what they can't do, and when they are worth their compilation.

By ``compile="auto"`` the choice is made by what all ranks and all batches of a solve have in common, so all of an ensemble
is solved one way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from mpiad._typing import Function
from mpiad.compiling.complex_parts import is_complex
from mpiad.compiling.program import Program
from mpiad.compiling.trace_errors import Untraceable
from mpiad.compiling.tracing import identity_of
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleSerial
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.trace import trace
from mpiad.ensemble.compiled.trace_check import verify

__all__ = ["MOST_OPERATIONS", "Tell", "changes", "is_wanted", "tell_once", "traced_program"]

_log = logging.getLogger("mpiad")

# What hears why an f isn't compiled.
Tell: TypeAlias = "Callable[[Function, str], None]"

# Fewer trajectories are solved in less time than a kernel is loaded or compiled in.
LEAST_TRAJECTORIES = 1000
MOST_COMPONENTS = 100
# Of f: a step has four to eleven, and each is a few machine instructions for all lanes.
MOST_OPERATIONS = 1500
# An f whose constants change from solve to solve would be compiled in each.
_MOST_PROGRAMS = 8

_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
_programs: WeakKeyDictionary[Any, set[Program]] = WeakKeyDictionary()


def is_wanted(compile: str | bool, count: int, backend: EnsembleAlgorithm) -> bool:
    """Tell whether an ensemble is to be compiled, where it can be.

    Parameters
    ----------
    compile : {"auto", True, False}
    count : int
        How many trajectories the whole ensemble has; 0 for a single problem.
    backend : EnsembleAlgorithm

    Raises
    ------
    ImportError
        With ``compile=True``, without llvmlite.
    """
    if compile is True and not _has_llvm():
        raise ImportError("solve: compile=True needs llvmlite, which isn't installed: pip install mpiad[fast].")
    if compile == "auto":
        return count >= LEAST_TRAJECTORIES and not isinstance(backend, EnsembleSerial) and _has_llvm()
    return compile is True


@cache
def _has_llvm() -> bool:
    return find_spec("llvmlite") is not None


def traced_program(batch: Batch, must: bool, tell: Tell) -> Program | None:
    """Return what f computes; None, and a word about it, where it can't be traced or is too large.

    Parameters
    ----------
    batch : Batch
        Of plain arrays on the host.
    must : bool
        Whether to raise instead: by ``compile=True``.
    tell : callable
        Is told an f and why the vectorised path solves it.

    Raises
    ------
    TypeError
        Where it must be compiled, and can't be.
    """
    try:
        program = trace(batch.f, batch.shape, batch.p, batch.u0.dtype)
        verify(program, batch)
    except Untraceable as error:
        if must:
            raise TypeError(f"solve: compile=True, but f can't be compiled: {error}.") from error
        tell(batch.f, f"f can't be compiled ({error}), so it is called with arrays instead")
        return None
    d = program.groups["state"]
    if d > MOST_COMPONENTS or program.cost > MOST_OPERATIONS:
        kind = "real and imaginary parts" if is_complex(batch.u0) else "components"
        what = f"a state has {d} {kind} and f {program.cost} operations"
        limits = f"up to {MOST_COMPONENTS} and {MOST_OPERATIONS} fit into a kernel that is fast and soon compiled"
        tell(batch.f, f"{what}; {limits}" + ("" if must else ", so f is called with arrays instead"))
        return program if must else None
    return None if not must and changes(batch.f, program, tell) else program


def changes(f: Function, program: Program, tell: Tell, name: str = "f") -> bool:
    """Tell whether a function is another one in each solve: by numbers that it closes over.

    Parameters
    ----------
    f : callable
    program : Program
        What it computes in this solve.
    tell : callable
        See `traced_program`.
    name : str
        What it is, for the log.
    """
    known = _programs.setdefault(identity_of(f), set())
    known.add(program)
    if len(known) <= _MOST_PROGRAMS:
        return False
    known.discard(program)
    tell(
        f, f"{name} has had other constants in each of {len(known)} solves, and was compiled in each; now f is called "
        "with arrays instead. Pass what changes as p"
    )  # fmt: skip
    return True


def tell_once(f: Function, text: str, logs: bool = True) -> None:
    """Log a warning about an f, once for each text; `logs` is false where another rank says the same."""
    told = _told.setdefault(identity_of(f), set())
    if text not in told:
        told.add(text)
        if logs:
            _log.warning("solve: %s.", text)
