"""Pieces of source that forward and reverse kernels have in common."""

from __future__ import annotations

from collections.abc import Sequence

from mpiad.compiling.source import number, numbered
from mpiad.ensemble.compiled.kernel_form import Form

__all__ = ["Steps"]


class Steps:
    """Lines on the stages of one step, for forward and reverse kernels.

    Parameters
    ----------
    form : Form
    """

    def __init__(self, form: Form):
        self.form = form
        # Times are double; what a state is multiplied by has its precision.
        self.h, self.rtol = ("h_", "rtol_") if form.single else ("h", "rtol")
        self.parameters = numbered("p", form.varying) + numbered("s", form.shared)

    def number(self, x: float) -> str:
        """Return a number in the states' precision, as source."""
        return f"np.float32({x!r})" if self.form.single else number(x)

    def rounded(self, text: str) -> str:
        """Return a double in the states' precision, as source."""
        return f"np.float32({text})" if self.form.single else text

    def doubled(self, text: str) -> str:
        """Return a number of the states' precision as a double, as source."""
        return f"np.float64({text})" if self.form.single else f"({text})"

    def rounded_step(self) -> list[str]:
        """Return lines that make the step `h` a number of the states' precision."""
        return [f"{self.h} = np.float32(h)"] if self.form.single else []

    def state(self, name: str) -> list[str]:
        """Return the names of the components of a state."""
        return [f"{name}_{c}" for c in range(self.form.d)]

    def weighted(self, weights: Sequence[float], name: str, c: int, fused: bool = False) -> str:
        """Return the sum of the component c of the stages called `name`, as source."""
        terms = [(self.number(w), f"{name}{j}_{c}") for j, w in enumerate(weights) if w]
        text = " * ".join(terms[0])
        for w, stage in terms[1:]:
            text = f"fma({w}, {stage}, {text})" if fused else f"{text} + {w} * {stage}"
        return text

    def argument(self, out: str, i: int, k: str, u: str, slope: str = "", fused: bool = False) -> list[str]:
        """Return lines on the argument of stage i, u + h Σ a_ij k_j, which keep the sums under the name `slope`."""
        lines = []
        for c in range(self.form.d):
            total = self.weighted(self.form.tableau.a[i - 1], k, c, fused)
            if slope:
                lines.append(f"{slope}_{c} = {total}")
                total = f"{slope}_{c}"
            made = f"fma({total}, {self.h}, {u}_{c})" if fused else f"({total}) * {self.h} + {u}_{c}"
            lines.append(f"{out}_{c} = {made}")
        return lines

    def time(self, i: int) -> str:
        """Return the time of stage i, as source."""
        c = self.form.tableau.c[i]
        return self.rounded("t" if c == 0 else "tn" if c == 1 else f"{number(c)} * h + t")

    def call(self, out: str, y: str, i: int, function: str = "f", more: list[str] | None = None) -> str:
        """Return a line that calls f, or its tangent, at the argument y of stage i."""
        given = [*self.state(y), *self.parameters, self.time(i), *(more or [])]
        return f"{', '.join(self.state(out))}, = {function}({', '.join(given)})"
