"""Settings of a linear solve, and their checks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, Function
from mpiad.transport import MAX, channel
from mpiad.transport.agreement import raise_first, require_same

SIDES = ("left", "right")


class Settings(NamedTuple):
    """Settings of a solve; the same on all ranks."""

    method: str
    # `rtol`, `atol`: the residual's norm must fall to ``max(rtol * norm(b), atol)``.
    rtol: float
    atol: float
    maxiter: int | None
    comm: Comm
    callback: Callable[[float], Any] | None
    restart: int = 30  # length of a cycle of GMRES
    side: str | None = None  # {"left", "right"} or None; side of the preconditioner
    batch: int = 0  # number of leading axes of b that count systems
    verify: bool = True  # whether to spend products on checks at the end
    call: str = "linalg.solve"  # start of error messages
    probe: bool = True  # whether to check for constants in the operator's null space: not in the systems of derivatives
    with_x0: bool = False  # whether there is an x0: its residual takes a collective product
    # `reported`, `preconditioned`: whether any rank has a callback, or a preconditioner, that may raise: known after
    # `agree_on`.
    reported: bool = False
    preconditioned: bool = False


def agree_on(settings: Settings, error: Exception | None, preconditioner: Function | None = None) -> Settings:
    """Return the settings, completed by those of other ranks' functions; one reduction.

    Raises this rank's `error`, or one like another's; a ValueError if ranks would solve in different ways, and wait for
    each other.
    """
    used = channel(settings.comm, settings.call)
    # The `repr` of communicators and functions differs between processes.
    given = settings._replace(comm=None, callback=None)
    number = zlib.crc32(repr(given).encode())
    # The maximum of the negative is minus the minimum: if maximum and minimum are equal, so are all numbers.
    functions = settings.callback is not None, preconditioner is not None
    mine, most = np.array([error is not None, number, -number, *functions], np.int64), np.empty(5, np.int64)
    used.data.Allreduce(mine, most, MAX)
    if most[0]:
        raise_first(used, error)
    if most[1] != -most[2]:
        require_same(used, ", ".join(f"{name}={value!r}" for name, value in given._asdict().items()), settings.call)
    return settings._replace(reported=bool(most[3]), preconditioned=bool(most[4]))


def mistake_in(s: Settings, methods: Collection[str], ndim: int) -> Exception | None:
    """Return the error in the settings, for a right-hand side of `ndim` axes; None if there is none."""
    if s.method not in methods:
        listed = ", ".join(map(repr, methods))
        return ValueError(f"{s.call}: method must be one of {listed}, but got {s.method!r}.")
    if s.side is not None and (s.side not in SIDES or s.method == "cg"):
        allowed = "None for 'cg', which is preconditioned symmetrically" if s.method == "cg" else "'left' or 'right'"
        return ValueError(f"{s.call}: side must be {allowed}, but got {s.side!r}.")
    if not (0 <= s.rtol < math.inf and 0 <= s.atol < math.inf and s.rtol + s.atol > 0):
        shown = f"{s.rtol!r} and {s.atol!r}"
        return ValueError(f"{s.call}: rtol and atol must be zero or more, and one above zero, but got {shown}.")
    return _wrong_number(s, ndim)


def unfit_preconditioner(functions: Iterable[Any], b: object) -> Exception | None:
    """Return why a preconditioner doesn't fit blocks like `b`; None if each does, or is the user's own function.

    Checked here and not in its call: if it fits on some ranks, those would wait in it for the others.
    """
    refusals = [fun.refusal(b) for fun in functions if hasattr(fun, "refusal")]
    return next((error for error in refusals if error is not None), None)


def _wrong_number(s: Settings, ndim: int) -> Exception | None:
    if s.maxiter is not None and (not isinstance(s.maxiter, Integral) or s.maxiter < 1):
        return ValueError(f"{s.call}: maxiter must be None or an integer above zero, but got {s.maxiter!r}.")
    if not isinstance(s.restart, Integral) or s.restart < 1:
        return ValueError(f"{s.call}: restart must be an integer above zero, but got {s.restart!r}.")
    if not isinstance(s.batch, Integral) or not 0 <= s.batch <= ndim:
        return ValueError(f"{s.call}: batch must count leading axes of b, which has {ndim}, but got {s.batch!r}.")
    return None
