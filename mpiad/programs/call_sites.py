"""Calls of communications from a replay, as if from the user's line that made them in the trace.

Reports, time-outs and traces of calls name the innermost frame of the user's. So each communication of a replay is called
from a function of its own, whose code says that it is that line.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from mpiad.transport import calls
from mpiad.transport.calls import Site


def called_at(site: Site | None, kind: str, rule: tuple[str, str, Site] | None = None) -> Callable[..., Any]:
    """Return a function that calls an operation or operator, in a frame of the user's line, where one is known.

    What it is given stands in `_CALLS`; of parts the first is done in "begin", and all that are left in "end".
    """
    made: Any = _CALLS[kind]
    if rule is not None:
        return _within(made, rule)
    if site is None or not site.file:
        return made
    # With the site itself among the constants `site_of` needn't find out which function of ours the user called.
    name, code = site.function, made.__code__
    consts = (*code.co_consts, site)
    code = code.replace(co_filename=site.file, co_firstlineno=site.line, co_name=name, co_qualname=name, co_consts=consts)
    return FunctionType(code, {}, name)


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
    "prepared": lambda prepared: prepared(),
    "begin": lambda parts: next(parts, None),
    "end": lambda parts: list(parts),
    "settle": lambda fun, args: fun(*args),
    "opaque": lambda fun, args: fun(*args),
}
