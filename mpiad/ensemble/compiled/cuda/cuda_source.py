"""`cuda_source`: the text of an f's kernels."""

from __future__ import annotations

from typing import Any

from mpiad.compiling.builder import simplify
from mpiad.compiling.derivatives import jvp, vjp
from mpiad.compiling.program import Program
from mpiad.ensemble.compiled.cuda.cuda_events import condition_texts
from mpiad.ensemble.compiled.cuda.cuda_forward import forward_text
from mpiad.ensemble.compiled.cuda.cuda_pieces import DUE, PRELUDE, Pieces
from mpiad.ensemble.compiled.cuda.cuda_plan import Plan
from mpiad.ensemble.compiled.cuda.cuda_reverse import reverse_text

__all__ = ["cuda_source"]

_MOST_TEXTS = 32
_ANY: Any = None
_texts: dict[Any, tuple[Plan, str]] = {}


def cuda_source(plan: Plan, kernel: str = "both") -> str:
    """Return CUDA C of the kernels ``forward`` and, where steps are recorded, ``reverse``.

    Parameters
    ----------
    plan : Plan
    kernel : {"forward", "reverse", "both"}
        One of them alone is compiled when it is needed.

    Returns
    -------
    str
        Complete for NVRTC and nvcc; for a compiler of C++ the kernels are functions that loop over the trajectories. What
        the arguments are stands before each kernel; all rows are contiguous along the trajectories.
    """
    # A tableau has arrays in it: it is told by its identity, and kept so that no other one takes its place in memory.
    key = id(plan.tableau), plan._replace(tableau=_ANY, dtype=str(plan.dtype)), kernel
    if key not in _texts:
        if len(_texts) >= _MOST_TEXTS:
            _texts.pop(next(iter(_texts)))
        _texts[key] = plan, _written(plan, kernel)
    return _texts[key][1]


def _written(plan: Plan, kernel: str) -> str:
    pieces, program, d = Pieces(plan), plan.program, plan.d
    parts = [PRELUDE + f"typedef {'float' if pieces.single else 'double'} real;", DUE]
    parts.append(pieces.function("f", program, 0, d))
    parts += condition_texts(plan, pieces, kernel)
    if kernel != "reverse":
        parts += [pieces.function(f"df{j}", along, d, d) for j, along in enumerate(_tangents(plan))]
        parts.append(forward_text(plan))
    if kernel != "forward" and plan.record:
        wanted = [*plan.wanted_varying, *plan.wanted_shared]
        parts.append(pieces.function("g", vjp(program, {"state": None, "parameter": wanted}), d, d + len(wanted)))
        parts.append(reverse_text(plan))
    return "\n\n".join(parts) + "\n"


def _tangents(plan: Plan) -> list[Program]:
    """Return for each direction the tangents of f as a program of those of the state; the parameter's own is 1."""
    made, d = [], plan.d
    for kind, place in plan.directions:
        along = [place] if kind == "parameter" else []
        tangent = jvp(plan.program, 1, {"state": None, "parameter": along})
        made.append(simplify(tangent, {("seed", d): 1.0} if along else {}, range(d, 2 * d)))
    return made
