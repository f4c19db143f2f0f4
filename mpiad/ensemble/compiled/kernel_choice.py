"""The choice between a CPU kernel and array operations, for one call of `solve`.

With ``compile="auto"`` the choice depends only on properties that are the same on all ranks and in all batches of a solve.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpiad._typing import Function
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleSerial, EnsembleThreads
from mpiad.ensemble.batch import Batch, check_place, is_on_device
from mpiad.ensemble.compiled.kernel_solver import Solver
from mpiad.ensemble.compiled.traced_problem import TracedProblem, problem_of, remembered, warn_once
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.trial import try_once
from mpiad.transport.resources import cores

# Solving fewer trajectories takes less time than loading or compiling a kernel.
LEAST_TRAJECTORIES = 1000


def refuse_mass_on_device(settings: Settings) -> None:
    """Raise NotImplementedError for an implicit method with a mass matrix, in a solve by arrays on a device."""
    if settings.alg.tableau.implicit and settings.mass is not None:
        raise NotImplementedError(
            f"solve: {type(settings.alg).__name__} supports a mass matrix on the host only, but this solve runs on a "
            "device. Copy u0 and p to the host with mpiad.device.to_host, and use EnsembleVectorized()."
        )


class Compiler:
    """The kernels that one call of `solve` compiles; `count`: the size of the whole ensemble, or 0 for a single problem."""

    def __init__(self, compile: str | bool, backend: EnsembleAlgorithm, count: int, together: bool = False):
        self.compile, self.backend, self._count, self.together = compile, backend, count, together
        self.kernels: dict[str, str] = {}  # their texts, by the names "forward" and "reverse"
        # Warnings about f, which are stored until `log_warnings` if several ranks solve the ensemble (`together`).
        self._pending: list[tuple[Function, str]] = []

    def run(self, batch: Batch, settings: Settings, given: Batch) -> Outcome:
        """Solve all trajectories of a batch, by a kernel if `plan` chooses one."""
        return self.run_planned(self.plan(batch, settings, given), batch, settings, given)

    def run_planned(self, plan: TracedProblem | None, batch: Batch, settings: Settings, given: Batch) -> Outcome:
        """Solve all trajectories of a batch, given the result of `plan` for this batch or a similar one."""
        if plan is None:
            return self.backend.run(batch, settings)
        threads = 1
        if isinstance(self.backend, EnsembleThreads):
            threads = len(cores()) if self.backend.threads is None else max(1, self.backend.threads)
        return Solver(self.kernels, plan, batch, settings, threads).solved(given)

    def plan(self, batch: Batch, settings: Settings, given: Batch) -> TracedProblem | None:
        """Check f and the events by a first call; return the traced problem if a CPU kernel will solve the batch."""

        def make(known: bool = False) -> TracedProblem | None:
            # If a cached trace differs only by numbers, f has been checked before, and `problem_of` will call it anyway.
            if not known:
                try_once(batch, settings.events, given.traced)
            found = problem_of(batch, settings.events, must, self.warn) if wanted else None
            if known and found is None:
                try_once(batch, settings.events, given.traced)
            return found

        if is_on_device(batch):
            self._check_on_device(batch, settings)
            try_once(batch, settings.events, False)
            return None
        must = wanted = self.compile is True
        if self.compile == "auto":
            vectorized = self.together or not isinstance(self.backend, EnsembleSerial)
            wanted = self._count >= LEAST_TRAJECTORIES and vectorized
        wanted = wanted and batch.size > 0
        if wanted and settings.mass is not None and any(event.acts and event.times is None for event in settings.events):
            # The side to which a condition leaves its root depends on u', and kernels don't solve M u' = f for u'.
            if must:
                raise NotImplementedError(
                    "solve: compile=True isn't supported for a mass_matrix together with an event whose affect acts at the "
                    "root of a condition. Leave compile out, or give times= instead of the condition."
                )
            wanted = False
        return remembered(make, batch, settings.events, given.traced, must) if wanted else make()

    def _check_on_device(self, batch: Batch, settings: Settings) -> None:
        if self.compile is True:
            raise NotImplementedError(
                "solve: compile=True generates machine code for the host, but u0 or p contains device arrays. "
                "Leave compile out, or copy the arrays to the host with mpiad.device.to_host."
            )
        refuse_mass_on_device(settings)
        # For mixed host and device arrays f itself would raise a less helpful error.
        check_place(batch)

    def warn(self, f: Function, text: str) -> None:
        """Log a warning about f, or if `together` store it for `log_warnings`."""
        if not self.together:
            warn_once(f, text)
        # Several batches may cause the same warning.
        elif (f, text) not in self._pending:
            self._pending.append((f, text))

    @property
    def warnings(self) -> str:
        """The texts that `log_warnings` will log."""
        return "\n".join(text for _, text in self._pending)

    def log_warnings(self, all_warnings: Sequence[str], rank: int) -> None:
        """Log the stored warnings on the first rank with the same warnings; `all_warnings`: the `warnings` of all ranks."""
        for f, text in self._pending:
            warn_once(f, text, logs=all_warnings.index(all_warnings[rank]) == rank)
