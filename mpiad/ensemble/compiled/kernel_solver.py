"""Solves by compiled kernels: their forward run, and what derivatives need of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from autograd.tracer import isbox

from mpiad.compiling.arguments import argument
from mpiad.compiling.program import Program
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.forward_sweep import launch
from mpiad.ensemble.compiled.kernel_form import Form, form_of
from mpiad.ensemble.compiled.kernel_texts import forward_text, parameter_names, reverse_text
from mpiad.ensemble.compiled.parameter_packing import ParameterPacking, packing_of
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings

if TYPE_CHECKING:  # a backend makes solvers, and so imports this file
    from mpiad.ensemble.backends import Compiler

__all__ = ["Solver"]

# Up to so many directions a kernel's tangents cost less than its adjoint.
FEW = 4


class Solver:
    """A batch, and the kernels for it.

    Parameters
    ----------
    program : Program
        What f computes.
    conditions : tuple of Program
        What the conditions of the events compute.
    batch : Batch
        Of plain arrays.
    """

    def __init__(
        self, compiler: Compiler, program: Program, conditions: tuple[Program, ...], batch: Batch, settings: Settings,
        threads: int,
    ):  # fmt: skip
        self._compiler, self._program, self._conditions = compiler, program, conditions
        self.batch, self.settings, self.threads = batch, settings, threads
        self.packing: ParameterPacking = packing_of(batch.p)
        self._names = parameter_names(self.packing.varying, self.packing.shared)
        self.every = settings.saveat is None
        self.times = argument(np.atleast_2d(np.empty(0) if settings.saveat is None else settings.saveat))
        self.form = form_of(program, self.packing, batch, settings)
        self.p, self.s = self.packing.split(batch.p.leaves, batch.size, self.form.dtype)
        self.directions: tuple[tuple[str, int], ...] = ()
        self._recorded: Outcome | None = None

    def solved(self, given: Batch) -> Outcome:
        """Solve, and keep what a gradient by the traced parts of `given` will need."""
        self.directions = self._directions(given) if given.traced and not self.every else ()
        # With checkpoints steps are recorded on the way back, of some trajectories after the other.
        record = self.settings.record and not self.directions and self.settings.checkpoints is None
        outcome = self._run(self.form._replace(directions=self.directions, record=record))
        if self.settings.record:
            outcome.solver = self
        return outcome

    def _run(self, form: Form) -> Outcome:
        text = forward_text(self._program, form, self._names, self._conditions)
        return launch(self._compiler.function("forward", text, form), form, self)

    # ---- derivatives

    def _directions(self, given: Batch) -> tuple[tuple[str, int], ...]:
        """Return along which numbers of a trajectory tangents are carried: none, where an adjoint will be wanted."""
        compiler = self._compiler
        # With events the ends move, too.
        moved = isbox(given.start) or isbox(given.end) or self.settings.events or self.settings.restarts is not None
        if compiler.gradient == "adjoint" or compiler.adjoint != "discrete" or moved or self.form.tableau.implicit:
            return ()
        found = [("u", c) for c in range(self.form.d)] if isbox(given.u0) else []
        traced = [place for place, leaf in enumerate(given.p.leaves) if isbox(leaf)]
        found += [direction for place in traced for direction in self.directions_of(place)]
        return tuple(found) if len(found) <= FEW or compiler.gradient == "tangent" else ()

    def directions_of(self, place: int) -> list[tuple[str, int]]:
        """Return the directions of a leaf's numbers."""
        names = [self._names[j] for part in self.packing.parts if part.place == place for j in part.scalars]
        return [(name[0], int(name[1:])) for name in names]

    def recorded(self, outcome: Outcome) -> Outcome:
        """Return an outcome of this solver's with a record of all steps; where tangents were carried, it is made now."""
        # Nothing is kept of one that has its own: a cycle would keep its memory until it is found.
        if outcome.last is not None:
            return outcome
        if self._recorded is None:
            self._recorded = self.record()
        return self._recorded

    def record(self) -> Outcome:
        """Solve once more, and keep all steps."""
        return self._run(self.form._replace(record=True))

    def parts(self) -> Iterator[tuple[slice, Solver]]:
        """Return the trajectories in as many parts as the checkpoints ask for, each with its own solver."""
        count = self.batch.size
        # Parts of fewer trajectories than lanes would leave some empty.
        parts = max(1, min(self.settings.checkpoints or 1, count // self.form.lanes))
        for first, stop in pairwise(count * i // parts for i in range(parts + 1)):
            rows = slice(first, stop)
            batch, settings = self.batch.share(rows), self.settings.share(rows)
            part = Solver(self._compiler, self._program, self._conditions, batch, settings, self.threads)
            part.form = self.form
            yield rows, part

    def reverse(self, wanted: list[int], timed: bool, inside: bool) -> tuple[Any, Form]:
        """Return the reverse kernel's function for some of the program's parameters, and its form."""
        own = [j for j in wanted if self._names[j][0] == "p"]
        common = [j for j in wanted if self._names[j][0] == "s"]
        form = self.form._replace(
            wanted_varying=len(own),
            wanted_shared=len(common),
            timed=timed,
            inside=inside,
            tolerances=False,
            restarts=False,
        )
        text = reverse_text(self._program, form, self._names, (*own, *common))
        return self._compiler.function("reverse", text, form), form
