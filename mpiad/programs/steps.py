"""The data of a trace: its steps, and traced arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad.transport import Spec
from mpiad.transport.core.calls import Site


class Ref(NamedTuple):
    """A reference to a traced value, by number, among the arguments of a step."""

    number: int


class Constant(NamedTuple):
    """A reference to an array that isn't traced, by its index in `Recorder.constants`, among the arguments of a step."""

    number: int


class Step(NamedTuple):
    """A step of a trace: a call of a function or a communication."""

    kind: str  # "call", "communicate", "operate", "opaque" or "settle"
    fun: Any  # callable or Operation
    # Arrays in `args` and `kwargs` are replaced by `Ref` and `Constant`.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]  # numbers of the results
    site: Site  # the user's line
    part: int = 0  # part of the program: 0 is the function, and later parts are reverse passes
    # For a communication in an adjoint or tangent rule: "adjoint" or "tangent", and name and site of the forward call.
    rule: tuple[str, str, Site] | None = None


class Abandoned(BaseException):
    """Raised to leave a trace if the operation in the user's `line` can't be compiled.

    It isn't an Exception, so handlers in the user's function don't catch it.
    """

    def __init__(self, reason: str, line: str):
        super().__init__(f"{line}: {reason}")
        self.reason, self.line = reason, line


class Traced:
    """The data of a traced array; see the subclass `TracedArray`.

    `number`: its number in the trace; in a trace of scalars (`ScalarRecorder`), the array of its symbols.
    """

    __slots__ = ("number", "recorder", "stale", "value", "weak")

    def __init__(self, recorder: Any, number: Any, value: Any):
        self.recorder, self.number, self.value = recorder, number, value
        self.stale: Any = None  # the array through which its memory was overwritten, if any
        self.weak = False  # whether it is a Python number, which takes the precision of the other operand


def plain(x: Any) -> Any:
    """Return arguments with traced arrays replaced by their values."""
    return mapped(x, _plain)


def _plain(x: Any) -> Any:
    if isinstance(x, Traced):
        return x.value.item() if x.weak else x.value
    return x


def mapped(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply a function to each leaf of nested tuples, lists, dicts and slices."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([mapped(part, leaf) for part in x])
    if kind is dict:
        return {key: mapped(part, leaf) for key, part in x.items()}
    if kind is slice:
        return slice(*(mapped(part, leaf) for part in (x.start, x.stop, x.step)))
    return leaf(x)


def hides_traced(x: Any, depth: int = 4) -> bool:
    """Return whether an object, or the closure of a function, holds traced arrays that `plain` doesn't replace."""
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
    plain_parts = [getval(part) for part in parts]
    return any(isinstance(part, Traced) and not nest or hides_traced(part, depth - 1) for part in plain_parts)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def on_host(params: Any) -> Any:
    """Return the parameters of an operation with specs of NumPy arrays instead of specs of traced arrays."""
    if isinstance(params, Spec):
        return params._replace(arrays=None)
    named: Any = params
    if isinstance(params, tuple) and hasattr(params, "_replace"):
        changed = {name: part._replace(arrays=None) for name, part in zip(named._fields, named) if isinstance(part, Spec)}
        return named._replace(**changed) if changed else params
    return params
