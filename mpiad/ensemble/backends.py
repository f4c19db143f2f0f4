"""How the trajectories of a batch are run: one after the other, all together or by threads, as columns or compiled.

By ``compile="auto"`` kernels are chosen by what all ranks and all batches of a solve have in common, so all of an ensemble
is solved one way.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mpiad._typing import Function
from mpiad.compiling.complex_parts import is_complex
from mpiad.ensemble import on_device
from mpiad.ensemble.batch import Batch, check_place, is_on_device
from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.kernel_solver import Solver
from mpiad.ensemble.compiled.kernel_texts import compiled
from mpiad.ensemble.compiled.traced_problem import TracedProblem, conditions_of, remembered, traced_program, warn_once
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.trial import try_once
from mpiad.ensemble.working_set import integrate

if TYPE_CHECKING:  # which are checked to name one of these
    from mpiad.ensemble.solve_options import SolveOptions

__all__ = ["Compiler", "EnsembleAlgorithm", "EnsembleSerial", "EnsembleThreads", "EnsembleVectorized"]

_log = logging.getLogger("mpiad")

# Fewer trajectories are solved in less time than a kernel is loaded or compiled in.
LEAST_TRAJECTORIES = 1000


class EnsembleAlgorithm:
    """A way to run an ensemble; results don't depend on it, bit for bit."""

    @property
    def local(self) -> EnsembleAlgorithm:
        """How a rank runs its share."""
        return self

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class EnsembleSerial(EnsembleAlgorithm):
    """One trajectory after the other: the reference, and where f can't be called for many at once.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, EnsembleProblem, EnsembleSerial, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ensemble = EnsembleProblem(decay, p=np.array([[1.0], [2.0]]))
    >>> print(np.array_equal(solve(ensemble, RK45(), EnsembleSerial()).u, solve(ensemble).u))
    True
    """

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        _require_host(self, batch)
        return _by_shares(batch, settings, [slice(i, i + 1) for i in range(batch.size)], map)


@dataclass(frozen=True)
class EnsembleVectorized(EnsembleAlgorithm):
    """All trajectories together, each with its own time, step and error control: the default.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, EnsembleProblem, EnsembleVectorized, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ensemble = EnsembleProblem(decay, p=np.array([[1.0], [2.0]]))
    >>> print(solve(ensemble, RK45(), EnsembleVectorized()).u_end.ravel().round(3))
    [0.368 0.135]
    """

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        return on_device.integrate(batch, settings) if is_on_device(batch) else integrate(batch, settings)


@dataclass(frozen=True)
class EnsembleThreads(EnsembleAlgorithm):
    """Contiguous shares, each as by EnsembleVectorized in a thread of its own; f must allow for that.

    Parameters
    ----------
    threads : int, optional
        As many as there are cores by default.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, EnsembleProblem, EnsembleThreads, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ensemble = EnsembleProblem(decay, p=np.array([[1.0], [2.0]]))
    >>> print(np.array_equal(solve(ensemble, RK45(), EnsembleThreads(2)).u, solve(ensemble).u))
    True
    """

    threads: int | None = None

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        _require_host(self, batch)
        count = max(1, min(self.threads or len(_cores()), batch.size))
        bounds = [batch.size * i // count for i in range(count + 1)]
        with ThreadPoolExecutor(count) as executor:
            return _by_shares(batch, settings, [slice(a, b) for a, b in zip(bounds, bounds[1:])], executor.map)


def _cores() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return set(range(os.cpu_count() or 1))


def _require_host(backend: EnsembleAlgorithm, batch: Batch) -> None:
    # A single one is one share, which is solved where it lives.
    if is_on_device(batch) and batch.size > 1:
        raise NotImplementedError(
            f"solve: {type(backend).__name__} runs on the host, but the states or parameters are device arrays. Take "
            "EnsembleVectorized(), or bring them to the host with mpiad.device.to_host."
        )


def _by_shares(batch: Batch, settings: Settings, shares: list[slice], each) -> Outcome:
    if len(shares) < 2:
        return EnsembleVectorized().run(batch, settings)
    parts = each(lambda rows: integrate(batch.share(rows), settings.share(rows)), shares)
    return Outcome.joined(list(parts))


def _threads_of(backend: EnsembleAlgorithm) -> int:
    """Return by how many threads a kernel runs."""
    if not isinstance(backend, EnsembleThreads):
        return 1
    return len(_cores()) if backend.threads is None else max(1, backend.threads)


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
        self.gradient, self.adjoint = options.gradient, options.adjoint
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
        return Solver(self, *plan, batch, settings, _threads_of(backend.local)).solved(given)

    def plan(self, backend: EnsembleAlgorithm, batch: Batch, settings: Settings, given: Batch) -> TracedProblem | None:
        """Try out f and the events, and return what a kernel computes where one is chosen.

        Parameters
        ----------
        given : Batch
            The batch before what is traced was made plain.
        """
        conditions = [event for event in settings.events if event.condition is not None]

        def made() -> TracedProblem | None:
            try_once(batch, settings.events, given.traced)
            if not wanted:
                return None
            program = traced_program(batch, must, self.warn)
            found = program and conditions_of(batch, conditions, must, self.warn)
            return None if program is None or found is None else TracedProblem(program, found)

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
        kernel = compiled(text, name, form)
        if name not in self.kernels or self.kernels[name].text != text:
            how = "compiled" if kernel.origin == "compiled" else "loaded"
            _log.info("solve: the %s kernel was %s in %.2f s.", name, how, kernel.seconds)
        self.kernels[name] = kernel
        return kernel.function
