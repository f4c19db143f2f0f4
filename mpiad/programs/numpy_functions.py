"""NumPy's functions as nodes of a program: from the arguments of a step to arrays that loops compute.

A function that isn't here, or is called in a way that isn't, becomes a call of NumPy's own on whole arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiad._typing import Shape
from mpiad.compiling.symbols import choose
from mpiad.programs.array_module import array_of
from mpiad.programs.array_program import FLOATS, Opaque, Value
from mpiad.programs.contractions import dot, einsum, inner, matmul, tensordot
from mpiad.programs.index_maps import Axis, axes_of, identity
from mpiad.programs.traced_array import cast, take, with_entries

if TYPE_CHECKING:
    from mpiad.programs.trace_translation import Translation

_Rule = Callable[..., Any]


def _where(t: Translation, shape: Shape, dtype: np.dtype, condition: Any, x: Any, y: Any) -> int:
    return t.elementwise("where", choose, [condition, x, y], shape, dtype)


def _clip(t: Translation, shape: Shape, dtype: np.dtype, x: Any, a_min: Any = None, a_max: Any = None) -> int:
    least, most = a_min, a_max
    if least is None or most is None:
        one = least if most is None else most
        name = "at_least" if most is None else "at_most"
        return t.elementwise(name, _at_least if most is None else _at_most, [x, one], shape, dtype)
    return t.elementwise("clip", _between, [x, least, most], shape, dtype)


def _at_least(x: Any, y: Any) -> Any:
    return choose(x <= y, y, x)


def _at_most(x: Any, y: Any) -> Any:
    return choose(x >= y, y, x)


def _between(x: Any, least: Any, most: Any) -> Any:
    return _at_most(_at_least(x, least), most)


def _reduced(name: str) -> _Rule:
    def rule(t: Translation, shape: Shape, dtype: np.dtype, x: Any, *args: Any, **kwargs: Any) -> int:
        return t.reduce(name, x, *args, shape=shape, **kwargs)

    return rule


def _mean(t: Translation, shape: Shape, dtype: np.dtype, x: Any, axis: Any = None, keepdims: Any = False) -> int:
    total = Value(t.program, t.reduce("add", x, axis, keepdims=keepdims, shape=shape))
    count = math.prod(x.shape) // max(math.prod(shape), 1)
    if not count:
        raise Opaque
    return t.computed(np.divide, [total, float(count)], shape, dtype)


def _product(of_more_axes: _Rule | None = None) -> _Rule:
    def rule(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
        if not (isinstance(x, Value) and isinstance(y, Value) and x.dtype == y.dtype):
            raise Opaque
        if not len(x.shape) == len(y.shape) == 1:
            if of_more_axes is None:
                raise Opaque
            return of_more_axes(t, shape, dtype, x, y)
        made = t.computed(np.multiply, [x, y], x.shape, dtype)
        return t.reduce("add", Value(t.program, made), shape=shape)

    return rule


def _norm(t: Translation, shape: Shape, dtype: np.dtype, x: Any, ord: object = None, axis: Any = None) -> int:  # noqa: A002
    if ord is not None:
        raise Opaque
    square = Value(t.program, t.computed(np.multiply, [x, x], x.shape, dtype))
    total = Value(t.program, t.reduce("add", square, axis, shape=shape))
    return t.computed(np.sqrt, [total], shape, dtype)


def _reshape(t: Translation, shape: Shape, dtype: np.dtype, x: Value, *args: Any, order: str = "C", **_: Any) -> int:
    if order != "C" or any(isinstance(arg, str) and arg != "C" for arg in args):
        raise Opaque
    return t.program.reshape(x.number, shape)


def _transpose(t: Translation, shape: Shape, dtype: np.dtype, x: Any, axes: Any = None) -> int:
    ndim = len(x.shape)
    return t.transposed(x, range(ndim)[::-1] if axes is None else [k % ndim for k in axes])


def _swapaxes(t: Translation, shape: Shape, dtype: np.dtype, x: Any, axis1: int, axis2: int) -> int:
    axes = list(range(len(x.shape)))
    axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
    return t.transposed(x, axes)


def _moveaxis(t: Translation, shape: Shape, dtype: np.dtype, x: Any, source: Any, destination: Any) -> int:
    return t.transposed(x, np.moveaxis(np.empty(tuple(range(len(x.shape)))), source, destination).shape)


def _flip(axis_of: Callable[[int], Any]) -> _Rule:
    def rule(t: Translation, shape: Shape, dtype: np.dtype, x: Any, axis: Any = None) -> int:
        ndim = len(shape)
        chosen = axis_of(ndim)
        along = axes_of(range(ndim) if axis is None else axis, ndim) if chosen is None else {chosen}
        map = tuple([Axis(k, -1, shape[k] - 1) if k in along else own for k, own in enumerate(identity(ndim))])
        return t.program.view(x.number, map, shape)

    return rule


def _same(t: Translation, shape: Shape, dtype: np.dtype, x: Any, *_: Any, **__: Any) -> int:
    if not isinstance(x, Value) or x.shape != shape or x.dtype != dtype:
        raise Opaque
    return x.number


def _broadcast_to(t: Translation, shape: Shape, dtype: np.dtype, x: Any, *_: Any) -> int:
    return t.broadcast_to(x if isinstance(x, Value) else t.of(x, dtype), shape)


def _filled(value: float) -> _Rule:
    def rule(t: Translation, shape: Shape, dtype: np.dtype, *_: Any, **__: Any) -> int:
        return t.full(shape, value, dtype)

    return rule


def _full_like(t: Translation, shape: Shape, dtype: np.dtype, x: Any, value: Any, *_: Any, **__: Any) -> int:
    return t.full(shape, value, dtype)


def _diff(t: Translation, shape: Shape, dtype: np.dtype, x: Any, n: int = 1, axis: int = -1) -> int:
    for _ in range(n):
        lead = (slice(None),) * (axis % len(x.shape))
        ends = [Value(t.program, t.take(shape, dtype, x, (*lead, part))) for part in (slice(1, None), slice(None, -1))]
        x = Value(t.program, t.computed(np.subtract, ends, ends[0].shape, dtype))
    return x.number


def _split(t: Translation, shape: Shape, dtype: np.dtype, x: Any, sections: Any, axis: int = 0) -> list[int]:
    axis %= len(x.shape)
    bounds = np.array_split(np.arange(x.shape[axis]), sections) if isinstance(sections, (int, np.integer)) else np.split(
        np.arange(x.shape[axis]), sections
    )  # fmt: skip
    lead, start, made = (slice(None),) * axis, 0, []
    for part in bounds:
        made.append(t.take(shape, dtype, x, (*lead, slice(start, start + len(part)))))
        start += len(part)
    return made


def _array_of(t: Translation, shape: Shape, dtype: np.dtype, x: Any, *_: Any, **__: Any) -> int:
    made = t._array(x, dtype)
    return t.program.reshape(made.number, shape)


def _imag(t: Translation, shape: Shape, dtype: np.dtype, x: Any) -> int:
    if not isinstance(x, Value) or x.dtype not in FLOATS:
        raise Opaque
    return t.full(shape, 0.0, dtype)


REDUCED = {
    np.add: "add", np.multiply: "multiply", np.maximum: "maximum", np.minimum: "minimum",
}  # fmt: skip


SPLITTING = frozenset({np.split, np.array_split})


RULES: dict[Any, _Rule] = {
    take: lambda t, shape, dtype, x, key: t.take(shape, dtype, x, key),
    cast: lambda t, shape, dtype, x, to: t.cast(shape, dtype, x),
    with_entries: lambda t, shape, dtype, x, key, value: t.with_entries(x, key, value),
    array_of: _array_of,
    np.where: _where,
    np.clip: _clip,
    np.sum: _reduced("add"), np.prod: _reduced("multiply"), np.max: _reduced("maximum"), np.amax: _reduced("maximum"),
    np.min: _reduced("minimum"), np.amin: _reduced("minimum"), np.mean: _mean, np.linalg.norm: _norm,
    np.dot: _product(dot), np.vdot: _product(), np.inner: _product(inner), np.matmul: _product(matmul),
    np.einsum: einsum, np.tensordot: tensordot,
    np.reshape: _reshape, np.ravel: _reshape, np.squeeze: _reshape, np.expand_dims: _reshape, np.atleast_1d: _reshape,
    np.atleast_2d: _reshape, np.atleast_3d: _reshape,
    np.transpose: _transpose, np.swapaxes: _swapaxes, np.moveaxis: _moveaxis,
    np.flip: _flip(lambda ndim: None), np.flipud: _flip(lambda ndim: 0), np.fliplr: _flip(lambda ndim: 1),
    np.copy: _same, np.real: _same, np.imag: _imag, np.broadcast_to: _broadcast_to,
    np.zeros_like: _filled(0.0), np.empty_like: _filled(0.0), np.ones_like: _filled(1.0), np.full_like: _full_like,
    np.full: lambda t, shape, dtype, given, value, to: t.full(shape, value, dtype),
    np.concatenate: lambda t, shape, dtype, arrays, axis=0: t.join(shape, dtype, arrays, axis),
    np.stack: lambda t, shape, dtype, arrays, axis=0: t.stack(shape, dtype, arrays, axis),
    np.pad: lambda t, *args, **kwargs: t.pad(*args, **kwargs),
    np.roll: lambda t, *args, **kwargs: t.roll(*args, **kwargs),
    np.diff: _diff, np.split: _split, np.array_split: _split,
}  # fmt: skip
