"""What a report advises: a rule for each of the usual reasons why ranks are slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpiad.debug.computing import Stretch

# Shares of the time, and ratios, from which on something is worth a line.
_WAITING, _TRANSFER, _COMPUTING, _UNEVEN, _BACKWARD = 0.1, 0.2, 0.5, 1.2, 5.0
_SMALL = 10_000  # bytes: below, a message takes about as long as an empty one


class Totals(NamedTuple):
    """A report's numbers, which have an entry for each rank, and where most of the transfer is."""

    # `elapsed`, `communicating`, `waiting`: shape (P,). Seconds.
    elapsed: np.ndarray
    communicating: np.ndarray
    waiting: np.ndarray
    busiest: str  # the call that transfers longest, and its line
    waited_in: str  # that in which the ranks wait longest
    calls: int  # how often the busiest is called, on all ranks
    nbytes: int  # how much it is given
    dropped: int  # communications that were too many to be recorded


def advice(totals: Totals, stretches: Sequence[Stretch]) -> list[str]:
    """Return what to do about what takes the time; a line that says so where nothing stands out."""
    found = [*_waits(totals, stretches), *_transfer(totals), *_computing(totals, stretches)]
    if totals.dropped:
        found.append(f"{totals.dropped} communications were too many to be recorded: record fewer iterations.")
    return found or ["nothing stands out: the ranks compute alike, and neither wait long nor communicate much."]


def _waits(totals: Totals, stretches: Sequence[Stretch]) -> Iterator[str]:
    share = _share(totals.waiting, totals)
    if share < _WAITING:
        return
    computing = totals.elapsed - totals.communicating
    slow, uneven = int(computing.argmax()), over_mean(computing)
    if uneven < _UNEVEN:
        yield (
            f"the ranks wait {share:.0%} of the time, most of it in {totals.waited_in}, though all compute for about as "
            "long: they take turns at being late. Give each rank a core of its own and bind it (`python -m mpiad` tells)."
        )
        return
    more = max(stretches, key=lambda each: each.seconds[slow] - each.seconds.mean(), default=None)
    where = "" if more is None else f", above all {_at(more)}"
    yield (
        f"load imbalance: rank {slow} computes {uneven:.1f} times as long as the mean{where}, and the ranks wait "
        f"{share:.0%} of the time. Divide the work anew."
    )


def _transfer(totals: Totals) -> Iterator[str]:
    share = _share(totals.communicating - totals.waiting, totals)
    if share < _TRANSFER or not totals.calls:
        return
    size = totals.nbytes / totals.calls
    remedy = (
        "Latency: send several arrays in one message, and less often (wider halos, a vector instead of numbers)"
        if size < _SMALL
        else "Bandwidth: send less, or let it overlap with computing (`begin_exchange`, `mpi_isend`, `mpi_iallreduce`)"
    )
    yield (
        f"communication without waits takes {share:.0%} of the time, most of it in {totals.busiest}: {totals.calls} "
        f"calls of {size:.0f} bytes. {remedy}."
    )


def _computing(totals: Totals, stretches: Sequence[Stretch]) -> Iterator[str]:
    seconds = {phase: sum(each.seconds.mean() for each in stretches if each.place.phase == phase) for phase in _PHASES}
    share = _share(totals.elapsed - totals.communicating, totals)
    if share >= _COMPUTING and stretches:
        longest = max(stretches, key=lambda each: each.seconds.mean())
        part = longest.seconds.mean() / totals.elapsed.mean()
        yield f"computing takes {share:.0%} of the time, {part:.0%} {_at(longest)}. If it isn't compiled yet: `mpiad.jit`."
    forward, backward = (seconds[phase] for phase in _PHASES)
    if backward > _BACKWARD * forward and backward > 0.1 * totals.elapsed.mean():
        yield (
            f"the backward pass computes {backward / forward if forward else np.inf:.0f} times as long as the forward one: "
            "more checkpoints in `scan`, `scan(jit(step))`, or a solve of the library's in the place of its iterations."
        )


_PHASES = ("forward", "backward")


def _at(stretch: Stretch) -> str:
    phase, after, until = stretch.place
    where = after if after.startswith("inside") else f"in the loop around {after}" if after == until else ""
    return f"{where or f'from {after} to {until}'} ({phase})"


def _share(seconds: np.ndarray, totals: Totals) -> float:
    whole = totals.elapsed.mean()
    return float(seconds.mean() / whole) if whole > 0 else 0.0


def over_mean(values: np.ndarray) -> float:
    """Return the largest value over the mean; 0 where there is none above zero."""
    mean = values.mean() if values.size else 0.0
    return float(values.max() / mean) if mean > 0 else 0.0
