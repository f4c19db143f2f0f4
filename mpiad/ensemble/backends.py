"""How the trajectories of a batch are run by columns: one after the other, all together, or by threads."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mpiad.ensemble import on_device
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.working_set import integrate
from mpiad.transport.threads import cores

_log = logging.getLogger("mpiad")


class EnsembleAlgorithm:
    """A way to run an ensemble; results don't depend on it, bit for bit."""

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
        count = max(1, min(self.threads or len(cores()), batch.size))
        bounds = [batch.size * i // count for i in range(count + 1)]
        with ThreadPoolExecutor(count) as executor:
            return _by_shares(batch, settings, [slice(a, b) for a, b in zip(bounds, bounds[1:])], executor.map)


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
