"""Attributes, methods and operators of NumPy's arrays that autograd's traced arrays lack, for this library's traces.

Autograd makes a box (a traced value) of the class that is registered for the type of the value, whatever the trace is. A
subclass of `ArrayBox` for arrays would also be the class of values in traces of plain autograd, and `ArrayBox` itself in no
trace, for which autograd and others test. Therefore the attributes are set on `ArrayBox`, as autograd sets its own methods,
but they first look at the node of the box: for a trace of plain autograd, they are autograd's attribute, or none.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.core import JVPNode, VJPNode
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, primitive, register_notrace
from numpy.typing import DTypeLike

from mpiad._typing import Array, Function
from mpiad.device.boxes import DeviceBox
from mpiad.differentiation.advice import NO_COMPLEX_CONVERSION, NO_CONVERSION_BY_ENTRY
from mpiad.differentiation.forward import TangentNode
from mpiad.differentiation.tape import OrderedNode
from mpiad.transport.core import calls
from mpiad.transport.world import level_of_repeats

_NODES = (OrderedNode, TangentNode)
_log = logging.getLogger("mpiad")
_PARTS_OF_NUMBERS = {"real", "imag", "isreal", "iscomplex", "iscomplexobj", "angle"}  # for NumPy, objects are real
_MOST_OBJECTS = 100  # the largest number of entries of a traced array in `jit` that NumPy may convert to objects
_converting: set[str] = set()  # the lines for which a warning was logged


class TracedAttribute:
    """An attribute of values of this library's traces; `read`: the function of a box that returns it."""

    def __init__(self, name: str, read: Function, kind: type = ArrayBox):
        self.name, self.read, self.inherited = name, read, kind.__dict__.get(name)

    def __get__(self, box: ArrayBox | None, kind: type) -> object:
        """Return the attribute of a box, or the inherited one."""
        if box is not None and isinstance(box._node, _NODES):
            return self.read(box)
        if self.inherited is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        return self.inherited.__get__(box, kind)


def _operator(function: Function, swapped: bool = False) -> Function:
    def operator(x: ArrayBox, other: Array) -> Array:
        if not isinstance(x._node, _NODES):
            return NotImplemented
        return function(other, x) if swapped else function(x, other)

    return operator


def _transposed(x: Array, *axes: Any) -> Array:
    return anp.transpose(x, axes[0] if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)) else axes or None)


# As a function of autograd, unlike `getval`, it raises an error for an array that is stale.
@primitive
def _converted(x: Array, dtype: Any) -> Array:
    return x.astype(dtype)


for _kind in (VJPNode, JVPNode):
    register_notrace(_kind, _converted)
_inherited_astype = {kind: kind.astype for kind in (ArrayBox, DeviceBox)}


def _astype(x: Array, dtype: Any, *args: Any, **kwargs: Any) -> Array:
    # Integers and booleans have no derivatives: they are constants, which may be indices.
    is_inexact, inherited = np.dtype(dtype).kind in "fc", _inherited_astype[type(x)]
    return inherited(x, dtype, *args, **kwargs) if is_inexact else _converted(x, dtype)


def _conversion(x: Array) -> Function:
    # NumPy itself makes an array of numbers from an array without entries, and keeps a real number as an object.
    if not x.size or not x.ndim and x.dtype.kind != "c":
        raise AttributeError("only arrays with entries and axes have the attribute '__array__'")
    return partial(_array_of_entries, x)


def _array_of_entries(x: Array, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
    # The array that NumPy itself makes from a sequence of entries. A dtype of numbers is an error, and a caller may ask for
    # objects; but without a dtype NumPy computes with objects, which is slow and can't be noticed otherwise. For NumPy, an
    # array of complex objects is its own real part, so that only functions of autograd may make one.
    caller, takes_objects = sys._getframe(1), dtype is not None and (x.ndim > 0 or np.dtype(dtype).kind == "O")
    if x.dtype.kind == "c" and not takes_objects and not _is_for_autograd(caller):
        raise TypeError(NO_COMPLEX_CONVERSION)
    if not x.ndim:
        number = np.empty((), object)
        number[()] = x
        return number
    if dtype is None:
        value = getval(x)
        if hasattr(value, "recorder"):  # in a trace of `jit`, which refuses conversions by the user's code, and slow ones
            if x.size > _MOST_OBJECTS or calls.user_frame(caller)[0] is caller:
                value.__array__()
        elif (line := calls.site_of(caller).text) not in _converting:
            _converting.add(line)
            _log.log(level_of_repeats(), "%s %s", line, NO_CONVERSION_BY_ENTRY)
    return np.array([*x], object if dtype is None else dtype, copy=copy)


def _is_for_autograd(frame: FrameType | None) -> bool:
    """Return whether autograd's wrappers call a function of plain NumPy, but for those that ask for parts of a list."""
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith("numpy."):
        if frame.f_code.co_name in _PARTS_OF_NUMBERS:
            return False
        frame = frame.f_back
    return frame is not None and name.startswith("autograd.")


# The first argument is the traced array. Like NumPy's methods, `copy` returns a scalar for a scalar, unlike the function.
_METHODS: dict[str, Callable[..., Any]] = {
    "__iter__": lambda x: (x[i] for i in range(len(x))),  # TypeError for a scalar
    "__pos__": anp.positive,
    "__round__": lambda x, *digits: round(getval(x), *digits),
    "astype": _astype,
    # The bounds of the method have other defaults and names than those of the function.
    "clip": lambda x, min=None, max=None, **options: anp.clip(x, min, max, **options),
    "compress": lambda x, condition, axis=None: anp.take(x, np.flatnonzero(condition), axis),
    "conj": anp.conj,
    "conjugate": anp.conj,
    "copy": lambda x, order="C": anp.positive(x),
    "dot": anp.dot,
    "transpose": _transposed,
}
_PARTS: dict[str, Function] = {
    "__array__": _conversion,
    "real": anp.real,
    "imag": anp.imag,
    "mT": lambda x: anp.swapaxes(x, -1, -2),
}

for _name, _function in _METHODS.items():
    setattr(ArrayBox, _name, TracedAttribute(_name, partial(partial, _function)))
DeviceBox.astype = TracedAttribute("astype", partial(partial, _astype), DeviceBox)  # type: ignore[assignment]
for _name in "device flags itemsize nbytes strides".split():
    _PARTS[_name] = lambda x, name=_name: getattr(getval(x), name)
for _name, _function in _PARTS.items():
    setattr(ArrayBox, _name, TracedAttribute(_name, _function))
for _name, _function in {
    "floordiv": anp.floor_divide,
    "divmod": lambda x, y: (anp.floor_divide(x, y), anp.mod(x, y)),
}.items():
    setattr(ArrayBox, f"__{_name}__", _operator(_function))
    setattr(ArrayBox, f"__r{_name}__", _operator(_function, swapped=True))
ArrayBox.__contains__ = lambda x, item: item in (getval(x) if isinstance(x._node, _NODES) else iter(x))
