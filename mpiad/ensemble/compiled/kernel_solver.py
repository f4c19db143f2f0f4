"""Solves by compiled kernels: whether there is one, its forward run, and what derivatives need of it.

By ``compile="auto"`` kernels are chosen by what all ranks and all batches of a solve have in common, so all of an ensemble
is solved one way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Function
from mpiad.compiling.arguments import argument, is_complex
from mpiad.compiling.cache import kernel_of
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleSerial, EnsembleThreads, cores
from mpiad.ensemble.batch import Batch, check_place
from mpiad.ensemble.compiled.forward_sweep import launch
from mpiad.ensemble.compiled.kernel_form import Form, form_of
from mpiad.ensemble.compiled.kernel_texts import forward_text, reverse_text, signature_of
from mpiad.ensemble.compiled.traced_problem import TracedProblem, problem_of, remembered, warn_once
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.trial import try_once

if TYPE_CHECKING:  # which are checked to name a backend
    from mpiad.ensemble.solve_options import SolveOptions

__all__ = ["Compiler", "Solver"]

_log = logging.getLogger("mpiad")

# Fewer trajectories are solved in less time than a kernel is loaded or compiled in.
LEAST_TRAJECTORIES = 1000


def _threads_of(backend: EnsembleAlgorithm) -> int:
    """Return by how many threads a kernel runs."""
    if not isinstance(backend, EnsembleThreads):
        return 1
    return len(cores()) if backend.threads is None else max(1, backend.threads)


@cache
def _has_llvm() -> bool:
    return find_spec("llvmlite") is not None


class Compiler:
    """What one call of `solve` compiles.

    Parameters
    ----------
    count : int
        How many trajectories the whole ensemble has; 0 for a single problem.
    together : bool
        Whether ranks solve together: what there is to say of f is then kept until they know who says it.

    Attributes
    ----------
    kernels : dict of str to Kernel or Loaded
        By their names, forward and reverse, those that were used.
    """

    def __init__(self, options: SolveOptions, count: int, together: bool = False):
        self.compile, self._count = options.compile, count
        self.kernels: dict[str, Any] = {}
        self._together = together
        self._kept: list[tuple[Function, str]] = []

    def _is_wanted(self, backend: EnsembleAlgorithm) -> bool:
        """Tell whether an ensemble is to be compiled, where it can be: by what all ranks and batches of it have in common.

        Raises
        ------
        ImportError
            With ``compile=True``, without llvmlite.
        """
        if self.compile is True and not _has_llvm():
            raise ImportError("solve: compile=True needs llvmlite, which isn't installed: pip install mpiad[fast].")
        if self.compile == "auto":
            return self._count >= LEAST_TRAJECTORIES and not isinstance(backend, EnsembleSerial) and _has_llvm()
        return self.compile is True

    def run(self, backend: EnsembleAlgorithm, batch: Batch, settings: Settings, given: Batch) -> Outcome:
        """Solve all trajectories of a batch, by a kernel where that is chosen; `given` is as for `plan`."""
        return self.run_planned(backend, self.plan(backend, batch, settings, given), batch, settings, given)

    def run_planned(
        self, backend: EnsembleAlgorithm, plan: TracedProblem | None, batch: Batch, settings: Settings, given: Batch
    ) -> Outcome:
        """Solve all trajectories of a batch by a plan that was made for it or one like it."""
        if plan is None:
            return backend.run(batch, settings)
        return Solver(self, plan, batch, settings, _threads_of(backend.local)).solved(given)

    def plan(self, backend: EnsembleAlgorithm, batch: Batch, settings: Settings, given: Batch) -> TracedProblem | None:
        """Try out f and the events, and return what a kernel computes where one is chosen.

        `given` is the batch before what is traced was made plain.
        """
        conditions = [event for event in settings.events if event.condition is not None]

        def made() -> TracedProblem | None:
            try_once(batch, settings.events, given.traced)
            return problem_of(batch, conditions, must, self.warn) if wanted else None

        if settings.alg.tableau.implicit and is_complex(batch.u0):
            raise NotImplementedError(
                f"solve: {type(settings.alg).__name__} takes real states, but u0 is {batch.u0.dtype}. Give real and "
                "imaginary parts as components."
            )
        must = self.compile is True
        wanted = batch.size > 0 and self._is_wanted(backend)
        return remembered(made, batch, settings.events, given.traced, must) if wanted else made()

    def run_on_device(self, backend: EnsembleAlgorithm, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch of device arrays.

        Raises
        ------
        NotImplementedError
            Where a kernel of the host's is asked for.
        """
        if self.compile is True:
            raise NotImplementedError(
                "solve: compile=True makes machine code for the host, but the states or parameters are device arrays. "
                "Leave it out, or bring them to the host with mpiad.device.to_host."
            )
        if settings.alg.tableau.implicit:
            raise NotImplementedError(
                f"solve: {type(settings.alg).__name__} runs on the host, but u0 or p are device arrays. Bring them to the "
                "host with mpiad.device.to_host."
            )
        check_place(batch)
        try_once(batch, settings.events, False)
        return backend.run(batch, settings)

    def warn(self, f: Function, text: str) -> None:
        """Log a warning about f, now or by `log_warnings`."""
        if not self._together:
            warn_once(f, text)
        elif (f, text) not in self._kept:
            self._kept.append((f, text))

    @property
    def warnings(self) -> str:
        """What `log_warnings` will log."""
        return "\n".join(text for _, text in self._kept)

    def log_warnings(self, logs: bool) -> None:
        """Log what was kept; `logs` is false where another rank says the same."""
        for f, text in self._kept:
            warn_once(f, text, logs)

    def used(self, name: str, kernel: object) -> None:
        """Note which kernel was used."""
        self.kernels[name] = kernel

    def function(self, name: str, text: str, form: Form) -> Any:
        """Return a kernel's function, and tell how long it took to compile."""
        more = (form.restarts, bool(form.events)) if name == "forward" else ()
        kernel = kernel_of(text, name, signature_of(name, form.dtype, *more))
        if name not in self.kernels or self.kernels[name].text != text:
            how = "compiled" if kernel.origin == "compiled" else "loaded"
            _log.info("solve: the %s kernel was %s in %.2f s.", name, how, kernel.seconds)
        self.kernels[name] = kernel
        return kernel.function


class Solver:
    """A batch, and the kernels for it.

    Parameters
    ----------
    batch : Batch
        Of plain arrays.
    """

    def __init__(self, compiler: Compiler, traced: TracedProblem, batch: Batch, settings: Settings, threads: int):
        self._compiler, self.traced = compiler, traced
        self.batch, self.settings, self.threads = batch, settings, threads
        self.every = settings.saveat is None
        self.times = argument(np.atleast_2d(np.empty(0) if settings.saveat is None else settings.saveat))
        self.form = form_of(traced.program, traced.packing, batch, settings)
        self.p, self.s = traced.packing.split(batch.p.leaves, batch.size, self.form.dtype)
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
        text = forward_text(self.traced.program, form, self.traced.names, self.traced.conditions)
        return launch(self._compiler.function("forward", text, form), form, self)

    # ---- derivatives

    def _directions(self, given: Batch) -> tuple[tuple[str, int], ...]:
        """Return along which numbers of a trajectory tangents are carried: none, where an adjoint will be wanted."""
        asked = self.settings
        # With events the ends move, too.
        moved = isbox(given.start) or isbox(given.end) or asked.events or asked.restarts is not None
        if asked.adjoint != "discrete" or moved or self.form.tableau.implicit:
            return ()
        return self.traced.carried(given, asked.gradient)

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
            part = Solver(self._compiler, self.traced, batch, settings, self.threads)
            part.form = self.form
            yield rows, part

    def reverse(self, wanted: list[int], timed: bool, inside: bool) -> tuple[Any, Form]:
        """Return the reverse kernel's function for some of the program's parameters, and its form."""
        names = self.traced.names
        own, common = ([j for j in wanted if names[j][0] == kind] for kind in "ps")
        form = self.form._replace(
            wanted_varying=len(own),
            wanted_shared=len(common),
            timed=timed,
            inside=inside,
            tolerances=False,
            restarts=False,
        )
        text = reverse_text(self.traced.program, form, names, (*own, *common))
        return self._compiler.function("reverse", text, form), form
