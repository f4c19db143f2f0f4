"""A solution whose states live on a device, or came from there, and how its trajectories went, which stays there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.outcome import came_through, names_of
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.ensemble.tableaus import Algorithm
from mpiad.transport.device_arrays import ArrayModule

_ASKED = ("retcode", "t_reached", "naccept", "nreject", "nf", "events")


class Statistics(NamedTuple):
    """How trajectories went, on a device."""

    arrays: ArrayModule
    # `codes`, `t_reached`, `naccept`, `nreject`: shape (N,).
    codes: Array
    t_reached: Array
    naccept: Array
    nreject: Array
    failed: int  # how many failed: the one number that each solve brings to the host
    evaluations: tuple[int, int]  # how often f was called at the start of a trajectory, and for each step that was tried
    events: Callable[[], dict] = dict  # returns the events, copied to the host

    def on_host(self, name: str) -> Array:
        """Return one of a solution's arrays by its name; each call copies."""
        if name == "events":
            return self.events()
        if name == "retcode":
            return names_of(self.arrays.to_host(self.codes))
        if name == "t_reached":
            return self.arrays.to_host(self.t_reached)
        if name == "nf":
            at_start, each = self.evaluations
            tries = self.arrays.to_host(self.naccept + self.nreject).astype(np.int64)
            return np.where(tries > 0, at_start + each * tries, 0)
        return self.arrays.to_host(getattr(self, name)).astype(np.int64)


def count_failed(arrays: ArrayModule, codes: Array) -> int:
    """Return how many trajectories failed."""
    if not codes.size:
        return 0
    return int(arrays.to_host(np.sum(~came_through(codes))).item())


class DeviceSolution(EnsembleSolution):
    """The solutions of an ensemble on a device.

    As `EnsembleSolution`; return codes, times, counts and events are copied to the host when they are asked for, each once.
    """

    @classmethod
    def of(cls, u: Array, t: Array, u_end: Array, statistics: Statistics, alg: Algorithm) -> DeviceSolution:
        """Return a solution of u, shape (N, n_saved, d), at times (n_saved,) or (N, n_saved), and of u_end, (N, d)."""
        later = {name: partial(statistics.on_host, name) for name in _ASKED}
        return cls.lazy(later, u=u, t=t, u_end=u_end, statistics=statistics, alg=alg)

    @property
    def all_succeeded(self) -> bool:
        """Whether it is known, without a look at any trajectory, that all reached their ends."""
        statistics = self.__dict__.get("statistics")
        return statistics is not None and not statistics.failed

    def _surviving(self) -> Array:
        return self.u if self.all_succeeded else super()._surviving()
