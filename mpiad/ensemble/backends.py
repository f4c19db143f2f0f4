"""How the trajectories of a batch are run: one after the other, all together, or by several threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mpiad.ensemble import on_device
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.pool import integrate
from mpiad.ensemble.settings import Settings

__all__ = ["EnsembleAlgorithm", "EnsembleSerial", "EnsembleThreads", "EnsembleVectorized"]


class EnsembleAlgorithm:
    """A way to run an ensemble; results don't depend on it, bit for bit."""

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class EnsembleSerial(EnsembleAlgorithm):
    """One trajectory after the other: the reference, and where f can't be called for many at once."""

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        _require_host(self, batch)
        return _by_shares(batch, settings, [slice(i, i + 1) for i in range(batch.size)], map)


@dataclass(frozen=True)
class EnsembleVectorized(EnsembleAlgorithm):
    """All trajectories together, each with its own time, step and error control: the default."""

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
