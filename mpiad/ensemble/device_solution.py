"""A solution whose states live on a device, or came from there, and how its trajectories went, which stays there."""

from __future__ import annotations

from mpiad._typing import Array
from mpiad.ensemble.solution import EnsembleSolution


class DeviceSolution(EnsembleSolution):
    """The solutions of an ensemble on a device.

    As `EnsembleSolution`; return codes, times, counts and events are copied to the host when they are asked for, each once.
    `failed`: how many failed, the one number that each solve brings to the host.
    """

    failed: int

    @property
    def all_succeeded(self) -> bool:
        """Whether it is known, without a look at any trajectory, that all reached their ends."""
        return self.__dict__.get("failed") == 0

    def _surviving(self) -> Array:
        return self.u if self.all_succeeded else super()._surviving()
