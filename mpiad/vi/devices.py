"""Which device a rank's model runs on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpiad.device import select
from mpiad.transport import Channel
from mpiad.transport.agreement import raising_together

__all__ = ["device_of"]


def device_of(names: Sequence[str] | None, used: Channel, call: str) -> int | None:
    """Make this rank's GPU the current one, and return its number; None on the cpu.

    Parameters
    ----------
    names : sequence of str or None
        One for each rank: "cpu", or "cuda:0" and so on.
    used : Channel
    call : str

    Raises
    ------
    TypeError, ValueError
        On all ranks, where there are more names or fewer than ranks, or one has no such device.

    Ranks
    -----
    All ranks of the channel call it.
    """
    if names is None:
        return None
    with raising_together(used):
        return _number(_own_name(names, used, call), used, call)


def _own_name(names: object, used: Channel, call: str) -> str:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{call}: devices must be a list of names, one for each rank, as ['cpu', 'cuda:0'], not {names!r}.")
    if len(names) != used.size:
        raise ValueError(f"{call}: devices has {len(names)} names, but there are {used.size} ranks: give one for each.")
    return names[used.rank]


def _number(name: str, used: Channel, call: str) -> int | None:
    if name == "cpu":
        return None
    found = re.fullmatch(r"cuda:(\d+)", name)
    if found is None:
        raise ValueError(f"{call}: rank {used.rank} has no device {name!r}: names are 'cpu', 'cuda:0', 'cuda:1' and so on.")
    try:
        return select(int(found[1]))
    except (ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"{call}: rank {used.rank} has no device {name!r}: {error}") from error
