"""Pieces of text that the forward and the reverse kernel have in common."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import numpy as np

from mpiad.compiling.program import Program
from mpiad.compiling.source import lines
from mpiad.ensemble.compiled.cuda.cuda_plan import Plan

__all__ = ["DUE", "PRELUDE", "Pieces", "block", "dense_weights", "numbered"]

# NVRTC has no headers; a compiler for CPUs runs through the trajectories in a loop.
PRELUDE = """\
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define NEXT(count) ((long long)atomicAdd((unsigned long long*)(count), 1ULL))
#define EACH(i, n) \\
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
#ifndef INFINITY
#define INFINITY __longlong_as_double(0x7ff0000000000000LL)
#endif
#ifndef NAN
#define NAN __longlong_as_double(0x7ff8000000000000LL)
#endif
#else
#include <math.h>
#define KERNEL extern "C" void
#define INLINE static inline
#define NEXT(count) ((*(count))++)
#define EACH(i, n) for (long long i = 0; i < n; ++i)
#endif

// NaN where either is.
INLINE double larger(double a, double b) { return a > b || a != a ? a : b; }
INLINE double smaller(double a, double b) { return a < b || a != a ? a : b; }
INLINE bool finite_number(double a) { return a - a == 0; }
// Ten times what time can resolve.
INLINE double least_step(double t) { return 10 * (nextafter(t, (double)INFINITY) - t); }
"""

# When a trajectory's next state is to be saved.
DUE = """\
INLINE double due_at(
    const double* times, long long n_saved, long long by_row, long long i, long long place, double sign
) {
    if (place >= n_saved) return INFINITY;
    return sign * times[by_row ? i * n_saved + place : place];
}"""


def block(text: str, **parts: str | list[str]) -> str:
    """Return a text with parts at their places ``@name``, as deep as those are."""
    out = []
    for line in textwrap.dedent(text).strip("\n").splitlines():
        name = line.strip()[1:]
        if line.strip().startswith("@") and name in parts:
            part = parts[name]
            given = part.splitlines() if isinstance(part, str) else part
            depth = line[: len(line) - len(line.lstrip())]
            out += [depth + inner if inner else inner for inner in given]
        else:
            out.append(line)
    return "\n".join(out)


def numbered(name: str, count: int) -> list[str]:
    """Return the names of scalars."""
    return [f"{name}_{i}" for i in range(count)]


class Pieces:
    """Texts on the stages of one trajectory's step.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan):
        self.plan, self.d = plan, plan.d
        self.single = np.dtype(plan.dtype) == np.float32
        self.parameters = numbered("p", plan.program.groups["parameter"])

    def number(self, x: float) -> str:
        """Return a constant in the precision of the states."""
        text = repr(float(x)) + ("f" if self.single else "")
        return text if x >= 0 else f"({text})"

    def function(self, name: str, program: Program, seeds: int, outputs: int) -> str:
        """Return the text of a program as a function of scalars."""
        states, taken = numbered("u", self.d), numbered("w", seeds)
        made = numbered("out", outputs)
        given = [f"const real {x}" for x in [*states, *self.parameters, "t", *taken]]
        given += [f"real& {x}" for x in made]
        names = {"state": states, "parameter": self.parameters, "time": ["t"], "seed": taken}
        body = lines(program, names, made, "c", self.plan.dtype)
        head = f"INLINE void {name}({', '.join(given)})"
        return "\n".join([head + " {", *("    " + line for line in body), "}"])

    def call(self, name: str, state: str, time: str, outputs: Sequence[str], seeds: Sequence[str] = ()) -> str:
        """Return a call of such a function."""
        return f"{name}({', '.join([*numbered(state, self.d), *self.parameters, time, *seeds, *outputs])});"

    def declared(self, names: Sequence[str]) -> str:
        """Return the declaration of scalars."""
        return f"real {', '.join(names)};"

    def loaded_parameters(self) -> list[str]:
        """Return declarations of this trajectory's parameters."""
        made = [f"const real p_{j} = p[{row} * n + i];" for row, j in enumerate(self.plan.varying)]
        return made + [f"const real p_{j} = s[{row}];" for row, j in enumerate(self.plan.shared)]

    def weighted(self, weights: Sequence[float], k: str, c: int) -> str:
        """Return a sum over the component c of stages, in their order."""
        terms = [f"{self.number(w)} * {k}{j}_{c}" for j, w in enumerate(weights) if w]
        return " + ".join(terms) if terms else "0"

    def argument(self, out: str, i: int, k: str = "k", u: str = "u") -> list[str]:
        """Return declarations of the argument of stage i, u + h Σ a_ij k_j."""
        row = self.plan.tableau.a[i - 1]
        # An event may cut the step short.
        kind = "real" if out == "next" else "const real"
        return [f"{kind} {out}_{c} = ({self.weighted(row, k, c)}) * h + {u}_{c};" for c in range(self.d)]

    def state_of(self, i: int) -> str:
        """Return the name of the argument of stage i."""
        return "u" if i == 0 else "next" if i == self.plan.last else f"y{i}"

    def stages(self, time: Callable[[int], str], upto: int) -> list[str]:
        """Return the arguments and values of stages 1 to `upto`; those of stage 0 are there."""
        made = []
        for i in range(1, upto + 1):
            made += self.argument(self.state_of(i), i)
            made.append(self.declared(numbered(f"k{i}", self.d)))
            made.append(self.call("f", self.state_of(i), time(i), numbered(f"k{i}", self.d)))
        return made


def dense_weights(pieces: Pieces) -> list[str]:
    """Return declarations of the stages' weights at the part x of a step, for those that have one."""
    made = []
    for i, row in enumerate(pieces.plan.tableau.dense):
        if row.any():
            text = f"{float(row[-1])!r} * x"
            for weight in row[-2::-1]:
                text = f"({text} + {float(weight)!r}) * x"
            made.append(f"const real weight{i} = {text};")
    return made
