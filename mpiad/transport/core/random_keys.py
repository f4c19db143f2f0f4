"""Random numbers that are the same on all ranks, from an argument `rng` as in SPEC 7 of Scientific Python.

A call draws 128 bits from `rng`, its key, and derives all of its random numbers from the key. A Generator therefore
advances by the same amount in each call and on each rank, and the numbers don't depend on the number of ranks.
"""

from __future__ import annotations

import copy
import secrets

import numpy as np

from mpiad._typing import Rng
from mpiad.transport.core.agreement import alike_on_all
from mpiad.transport.core.channels import Channel

_BITS = 128


def entropy() -> int:
    """Return random bits of the operating system."""
    return secrets.randbits(_BITS)


def generator_from(rng: Rng, call: str) -> np.random.Generator:
    """Return the generator that `rng` is or seeds; raise a TypeError or ValueError if it is none of the types of `Rng`."""
    try:
        return np.random.default_rng(entropy() if rng is None else rng)
    except (TypeError, ValueError):
        text = f"{call}: rng must be a Generator, a SeedSequence, an integer of at least 0, or None, but got {rng!r:.60}."
        raise (ValueError if isinstance(rng, (int, np.integer)) else TypeError)(text) from None


def random_key(rng: Rng, call: str) -> int:
    """Return 128 bits drawn from `rng`."""
    return int.from_bytes(generator_from(rng, call).bytes(_BITS // 8), "little")


def text_of_rng(rng: Rng, call: str, draws: bool = True) -> str:
    """Return a text by which ranks compare `rng`; if the call draws a key, with the key, which isn't drawn here."""
    key = f" ({random_key(copy.deepcopy(rng), call):#x})" if draws and rng is not None else ""
    return f"rng={rng if rng is None or isinstance(rng, (int, np.integer)) else type(rng).__name__}{key}"


def shared_key(rng: Rng, channel: Channel | None, call: str, compare: bool = True) -> int:
    """Return the key that a call draws from `rng`, the same on all ranks; for None the root draws it.

    It is collective for None, or with `compare`: then all ranks raise an error if `rng` is invalid on any rank, or differs
    between ranks. Without a channel it concerns this rank only.
    """
    if channel is None:
        return random_key(rng, call)
    if compare:
        alike_on_all(channel, lambda: text_of_rng(rng, call), lambda text: [text], call)
    if rng is None:
        return channel.data.bcast(random_key(None, call) if channel.rank == 0 else None, 0)
    return random_key(rng, call)


def generator_of(key: int, *numbers: int) -> np.random.Generator:
    """Return the generator with some numbers, for example those of a chain and a step, among the generators of a key."""
    return np.random.default_rng(np.random.SeedSequence(key, spawn_key=numbers))
