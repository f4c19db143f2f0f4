"""How the trajectories of all ranks went, exchanged in two messages of numbers.

The first has a fixed size: whether the share was solved at all, of what kind its states are, and what all its trajectories
have in common. By that all ranks know what the second one needs: the steps of each trajectory in a few bytes, and return
codes and times where they differ. Saved times that differ between ranks, and events, are rare and travel by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.ensemble.batch import same_for_all
from mpiad.ensemble.outcome import came_through, names_of
from mpiad.ensemble.reduction import check_alike, joined_events, joined_times
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.transport import Channel
from mpiad.transport.agreement import fingerprint, raise_first

# Places in the first message.
_WRONG, _COUNT, _KIND, _TIMES, _ACCEPTED, _REJECTED, _CODES, _REACHED = range(8)
_REACHED_DIFFER, _CONVERGED, _COMPILED, _TRACED, _ENDS, _EVENTS, _SAID, _SIZE = range(8, 16)


@lru_cache(64)
def _of_words(*parts: Any) -> int:
    return fingerprint(*parts)


@dataclass(frozen=True)
class RankOutcomes:
    """How the trajectories of all ranks went: the same on all ranks."""

    # `codes`, `reached`: shape (N,). Return codes, and the times that were reached.
    codes: Array
    reached: Array
    # `accepted`, `rejected`: array of unsigned int, shape (N,). Steps, in as few bytes as the largest number needs: most
    # programs never read them.
    accepted: Array
    rejected: Array
    counts: list[int]  # how many trajectories each rank has
    events: dict  # from trajectories to their events
    t: Array  # shape (n_saved,) or (N, n_saved)
    # `converged`, `compiled`, `traced`: whether a reduction ended the solve; whether kernels advanced trajectories; whether
    # derivatives are wanted.
    converged: bool
    compiled: bool
    traced: bool
    ends: bool  # whether initial and final states are all that is saved
    evaluated: Callable[[Array, Array], Array]  # from `naccept` and `nreject` to the calls of f
    said: list[int]  # by ranks, a number for what each has to say of f in the log; the same number for the same words
    # Int, shape (N,), or None. The calls of f where there were events, which may begin steps anew.
    calls: Array | None = None

    @cached_property
    def t_reached(self) -> Array:
        """The times that were reached, shape (N,)."""
        return np.array(self.reached)

    @cached_property
    def naccept(self) -> Array:
        """Accepted steps, array of int, shape (N,)."""
        return self.accepted.astype(np.int64)

    @cached_property
    def nreject(self) -> Array:
        """Rejected steps, array of int, shape (N,)."""
        return self.rejected.astype(np.int64)

    @property
    def tries(self) -> Array:
        """All steps, array of unsigned int, shape (N,)."""
        most = int(self.accepted.max(initial=0)) + int(self.rejected.max(initial=0))
        return np.add(self.accepted, self.rejected, dtype=np.min_scalar_type(most))

    @property
    def width(self) -> int:
        """The number of saved times."""
        return self.t.shape[-1]

    @property
    def survivors(self) -> Array:
        """Which trajectories didn't fail, shape (N,)."""
        return came_through(self.codes)

    @property
    def retcode(self) -> Array:
        """The names of the return codes, shape (N,)."""
        return names_of(self.codes)

    @property
    def nf(self) -> Array:
        """Calls of f, shape (N,)."""
        return self.evaluated(self.naccept, self.nreject) if self.calls is None else self.calls.astype(np.int64)


def outcomes_of_all(
    used: Channel, share: EnsembleSolution | Exception, compiled: bool, traced: bool,
    evaluated: Callable[[Array, Array], Array], said: str = "",
) -> tuple[EnsembleSolution, RankOutcomes]:  # fmt: skip
    """Exchange what the ranks know, and return it with this rank's share; all ranks call it.

    The share is what this rank has solved, or why it couldn't: what went wrong on one is raised on all, and so is it where
    their states aren't of one kind. `evaluated` is as in `RankOutcomes`, `said` what this rank has to say of f in the log.
    """
    every = np.empty((used.size, _SIZE), np.int64)
    used.data.Allgather(_header(share, compiled, traced, said), every)
    if every[:, _WRONG].any():
        raise_first(used, share if isinstance(share, Exception) else None)
    if isinstance(share, Exception):
        raise share
    if (every[:, _KIND] != every[0, _KIND]).any():
        check_alike(used.data.allgather((share.u_end.shape[1:], share.u_end.dtype)), "ranks")
    counts = every[:, _COUNT].tolist()
    converged, compiled, traced, events = (bool(every[:, k].any()) for k in (_CONVERGED, _COMPILED, _TRACED, _EVENTS))
    outcomes = RankOutcomes(
        **_columns(used, share, every), counts=counts, events=_events(used, share, counts) if events else {},
        t=_times(used, share, every), converged=converged, compiled=compiled, traced=traced,
        ends=bool(every[:, _ENDS].all()), evaluated=evaluated, said=every[:, _SAID].tolist(),
    )  # fmt: skip
    return share, outcomes


def _header(share: EnsembleSolution | Exception, compiled: bool, traced: bool, said: str) -> Array:
    mine = np.zeros(_SIZE, np.int64)
    if isinstance(share, Exception):
        mine[_WRONG] = 1
        return mine
    reached = getval(share.t_reached)
    mine[_COUNT], mine[_KIND] = len(share), _of_words(share.u_end.shape[1:], share.u_end.dtype)
    mine[_TIMES] = fingerprint(share.t) if share.t.ndim == 1 else 0  # 0: they travel by themselves
    mine[_ACCEPTED], mine[_REJECTED] = share.naccept.max(initial=0), share.nreject.max(initial=0)
    mine[_CODES] = share.codes.max(initial=0)
    # Where none failed or met an event, all have come to the end that they have in common, and nobody needs to look.
    arrived = not mine[_CODES] and share._start is not None and share.t.ndim == 1
    # The bits of the first, since the message is of integers; 0 where there is none.
    mine[_REACHED], mine[_REACHED_DIFFER] = reached[:1].view(np.int64).sum(), not (arrived or same_for_all(reached))
    mine[_CONVERGED], mine[_COMPILED], mine[_TRACED] = share.converged, compiled, traced
    mine[_ENDS], mine[_EVENTS], mine[_SAID] = share._start is not None, bool(share.events), _of_words(said)
    return mine


def _columns(used: Channel, share: EnsembleSolution, every: Array) -> dict[str, Array]:
    """Return what is known of each trajectory, on all ranks; what is the same for all isn't sent."""
    busy = every[every[:, _COUNT] > 0]
    count, most = int(every[:, _COUNT].sum()), every.max(axis=0)
    sent = [
        ("accepted", share.naccept, np.min_scalar_type(most[_ACCEPTED])),
        ("rejected", share.nreject, np.min_scalar_type(most[_REJECTED])),
    ]
    if most[_CODES]:
        sent.append(("codes", share.codes, np.dtype(np.int8)))
    if most[_REACHED_DIFFER] or (busy[:, _REACHED] != busy[:1, _REACHED]).any():
        sent.append(("reached", getval(share.t_reached), np.dtype(float)))
    if most[_EVENTS]:
        sent.append(("calls", share.nf, np.dtype(np.int64)))
    common = busy[0, _REACHED : _REACHED + 1].view(float)[0] if len(busy) else 0.0
    known = {"codes": np.broadcast_to(np.int8(0), count), "reached": np.broadcast_to(common, count)}
    return known | _gather(used, sent, every[:, _COUNT].tolist())


def _gather(used: Channel, sent: list[tuple[str, Array, np.dtype]], counts: list[int]) -> dict[str, Array]:
    """Return all ranks' columns by their names, the ranks' one after the other; each has its dtype also on the way."""
    made = {name: np.empty(sum(counts), dtype) for name, _, dtype in sent}
    width = sum(dtype.itemsize for _, _, dtype in sent)
    mine = np.concatenate([np.ascontiguousarray(column, dtype).view(np.uint8) for _, column, dtype in sent])
    everything = np.empty(width * sum(counts), np.uint8)
    used.data.Allgatherv(mine, [everything, [width * count for count in counts]])
    first = at = 0  # trajectories, and bytes: each rank's columns lie one after the other
    for count in counts:
        for name, _, dtype in sent:
            made[name][first : first + count] = everything[at : at + count * dtype.itemsize].view(dtype)
            at += count * dtype.itemsize
        first += count
    return made


def _times(used: Channel, share: EnsembleSolution, every: Array) -> Array:
    if every[0, _TIMES] and (every[:, _TIMES] == every[0, _TIMES]).all():
        return share.t
    # A rank without trajectories knows the first one's at most, and is in nobody's way.
    found = [(t, count) for t, count in zip(used.data.allgather(share.t), every[:, _COUNT].tolist())]
    busy = [pair for pair in found if pair[1]] or found[:1]
    return joined_times([t for t, _ in busy], [count for _, count in busy], max(t.shape[-1] for t, _ in busy))


def _events(used: Channel, share: EnsembleSolution, counts: list[int]) -> dict[int, list[tuple[int, float]]]:
    """Return the events of all trajectories, with plain times."""
    mine = {i: [(event, getval(time)) for event, time in found] for i, found in share.events.items()}
    return joined_events(used.data.allgather(mine), counts)
