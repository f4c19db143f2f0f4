"""Calls of communications from a replay, as if from the user's line that made them in the trace.

Reports, time-outs and traces of calls name the innermost frame of the user's. So each communication of a replay is called
from a function of its own, whose code says that it is that line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from mpiad.transport import calls
from mpiad.transport.calls import Site

__all__ = ["called_at"]


def called_at(site: Site | None, kind: str, rule: tuple[str, str, Site] | None = None) -> Callable[..., Any]:
    """Return a function that calls an operation or operator, in a frame of the user's line.

    Parameters
    ----------
    site : Site or None
    kind : {"communicate", "operate", "in place", "begin", "prepared", "end", "opaque", "settle"}

    Returns
    -------
    callable
        ``(operation, x, params)``, ``(operator, args, kwargs)``, ``(operator, buffer, *rest)`` twice, ``(prepared,)``,
        ``(begun,)`` or ``(fun, args)``.
    """
    made: Any = _CALLS[kind]
    inner = None
    if site is not None and site.entry:
        # Reports name the function of ours that the user called.
        name, file = site.entry, Path(calls.__file__).with_name(f"{site.entry}.py")
        inner = FunctionType(made.__code__.replace(co_filename=str(file), co_name=name, co_qualname=name), {})
        made = _THROUGH
    if rule is not None:
        return _within(inner or made, rule)
    if site is None or not site.file:
        return inner or made
    name = site.function
    code = made.__code__.replace(co_filename=site.file, co_firstlineno=site.line, co_name=name, co_qualname=name)
    called = FunctionType(code, {}, name)
    called.__kwdefaults__ = {"inner": inner} if inner else None
    return called


def _within(made: Callable[..., Any], rule: tuple[str, str, Site]) -> Callable[..., Any]:
    """Return a call that is part of an adjoint or tangent, where calls are noted: the line is that of the gradient."""

    def call(operation: Any, x: Any, *rest: Any) -> Any:
        if not calls.is_noting():
            return made(operation, x, *rest)
        first = (x[0] if x else None) if isinstance(x, tuple) else x
        noted = calls.begin_rule(*rule, first, None if isinstance(x, tuple) or not rest else rest[0])
        try:
            return made(operation, x, *rest)
        finally:
            calls.end(noted)

    return call


# Each in one line, since code knows its lines as distances from the first.
_CALLS: dict[str, Any] = {
    "communicate": lambda operation, x, params: operation.forward(x, params),
    "operate": lambda operator, args, kwargs: operator.body(args, kwargs),
    "in place": lambda operator, buffer, *rest: operator.run_in_place(buffer, *rest),
    "begin": lambda operator, buffer, *rest: operator.begin_in_place(buffer, *rest),
    "prepared": lambda prepared: prepared(),
    "end": lambda begun: begun.end(),
    "settle": lambda fun, args: fun(*args),
    "opaque": lambda fun, args: fun(*args),
}
_THROUGH: Any = lambda *given, inner=None: inner(*given)  # type: ignore[misc]  # noqa: E731
