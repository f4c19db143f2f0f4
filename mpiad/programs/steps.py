"""What a trace notes: steps with their arguments, in which numbers stand for values; and arrays that have such a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad.transport import Spec
from mpiad.transport.calls import Site

if TYPE_CHECKING:
    from mpiad.programs.recorder import Recorder


class Ref(NamedTuple):
    """The number of a value, among the arguments of a step."""

    number: int


class Constant(NamedTuple):
    """The number of an array that isn't traced, among the arguments of a step."""

    number: int


class Step(NamedTuple):
    """A call that the program makes."""

    kind: str  # "call", "communicate", "operate", "opaque" or "settle"
    fun: Any  # callable or Operation
    # `args`, `kwargs`: with `Ref` and `Constant` for arrays.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]  # numbers of the results, in the order of a tuple or list of them
    site: Site  # the user's line
    part: int = 0  # of the program: the reverse pass of a derivative that is taken outside of it is the second
    # Of a communication that an adjoint or tangent makes: which of both, and the name and site of its forward call.
    rule: tuple[str, str, Site] | None = None


class Abandoned(BaseException):
    """Leave a trace that can't become a program; no exception, so that the function's own handlers let it pass.

    `line`: the user's line that stands in the way.
    """

    def __init__(self, reason: str, line: str):
        super().__init__(f"{line}: {reason}")
        self.reason, self.line = reason, line


class Traced:
    """What arrays of a trace are made of; `TracedArray` has their operations."""

    __slots__ = ("number", "recorder", "stale", "value", "weak")

    def __init__(self, recorder: Recorder, number: int, value: Any):
        self.recorder, self.number, self.value = recorder, number, value
        self.stale: Any = None
        # A number of Python's takes the precision of what it meets; one of NumPy's has its own.
        self.weak = False


def plain(x: Any) -> Any:
    """Return arguments with the values of traced arrays in their places."""
    return mapped(x, _plain)


def _plain(x: Any) -> Any:
    if isinstance(x, Traced):
        return x.value.item() if x.weak else x.value
    return x


def mapped(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return arguments with something else in place of each part that is no tuple, list, dict or slice."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([mapped(part, leaf) for part in x])
    if kind is dict:
        return {key: mapped(part, leaf) for key, part in x.items()}
    if kind is slice:
        return slice(*(mapped(part, leaf) for part in (x.start, x.stop, x.step)))
    return leaf(x)


def hides_traced(x: Any, depth: int = 4) -> bool:
    """Tell whether an object or a function holds traced arrays that `plain` doesn't find."""
    if isinstance(x, (Traced, np.ndarray, np.generic, str, bytes, int, float, complex, type(None), type)) or not depth:
        return False
    if isinstance(x, (tuple, list)):
        parts: Any = x
    elif isinstance(x, dict):
        parts = x.values()
    else:
        cells = getattr(x, "__closure__", None) or ()
        parts = [*getattr(x, "__dict__", {}).values(), *(cell.cell_contents for cell in cells if _is_filled(cell))]
        parts += [getattr(x, name, None) for name in getattr(type(x), "__slots__", ())]
    nest = isinstance(x, (tuple, list, dict))
    # Also one that carries a derivative.
    plain_parts = [getval(part) for part in parts]
    return any(isinstance(part, Traced) and not nest or hides_traced(part, depth - 1) for part in plain_parts)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def on_host(params: Any) -> Any:
    """Return the parameters of an operation with shapes of NumPy's arrays in place of those of traced ones."""
    if isinstance(params, Spec):
        return params._replace(arrays=None)
    named: Any = params
    if isinstance(params, tuple) and hasattr(params, "_replace"):
        changed = {name: part._replace(arrays=None) for name, part in zip(named._fields, named) if isinstance(part, Spec)}
        return named._replace(**changed) if changed else params
    return params
