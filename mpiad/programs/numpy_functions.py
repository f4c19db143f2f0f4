"""NumPy's functions as nodes of a program: from the arguments of a step to arrays that loops compute.

Functions and signatures that are not supported here become calls of NumPy's functions on whole arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial, reduce
from itertools import product
from typing import TYPE_CHECKING, Any

import autograd.numpy.numpy_wrapper
import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Index, Shape
from mpiad.compiling.symbols import choose
from mpiad.differentiation.rules.einsum import letters_of
from mpiad.programs.array_program import FLOATS, SHORT, Opaque, Value
from mpiad.programs.index_maps import Axis, axes_of, identity
from mpiad.programs.recorder import Recorder
from mpiad.programs.steps import Traced
from mpiad.programs.traced_array import TracedArray, cast, take, with_entries
from mpiad.transport.device_arrays import register_arrays

if TYPE_CHECKING:
    from mpiad.programs.trace_translation import Translation


# Support for traced arrays that the library and autograd need beyond NumPy's protocols.
#
# The library needs `ArrayModule`. autograd.numpy's `array`, and with it `stack`, call numpy.array, which dispatches on
# no protocol. So while there are traces, the name `numpy` in that module of autograd refers to an object whose `array`
# handles traced arrays, and which is NumPy otherwise.


numpy_wrapper: Any = autograd.numpy.numpy_wrapper


class TracedArrays:
    """Creates arrays of one trace, which has no other memory to copy them to."""

    name, kind, device, takes_host_arrays = "traced", TracedArray, 0, True

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedArrays) and other.recorder is self.recorder

    def __hash__(self) -> int:
        return id(self.recorder)

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Return an array to be filled; its values are zeros here."""
        return self.full(shape, 0, dtype)

    def full(self, shape: Shape, value: Array | float, dtype: DTypeLike) -> Array:
        """Return an array of one number."""
        return self.recorder.call(np.full, (tuple(shape), value, np.dtype(dtype)), {})

    def arange(self, stop: int) -> Array:
        """Return an array of the integers from 0 on."""
        return np.arange(stop)

    def add_at(self, x: Any, idx: Index, values: Any) -> None:
        """Add values to the elements at an index, in place."""
        total = x.recorder.call(added_at, (x, idx, values), {})
        x[...] = total

    def contiguous(self, x: Array) -> Array:
        """Return the array itself: its layout is decided when the program is compiled."""
        return x

    def copy(self, x: Array) -> Array:
        """Return a copy."""
        return x.recorder.call(np.copy, (x,), {})

    def to_host(self, x: Array) -> Array:
        """Return the array itself."""
        return x

    def to_device(self, host: Array) -> Array:
        """Return the array itself, a constant of the trace."""
        return host


def added_at(x: Array, idx: Index, values: Array) -> Array:
    """Return a copy of x with values added at an index that may hold repeated entries."""
    total = x.copy()
    np.add.at(total, idx, values)
    return total


def _arrays_of(x: Any) -> Any:
    x.recorder.require_open()
    return TracedArrays(x.recorder)


# The protocol's methods for copies between host and device are missing: a trace is given up before they are called.
register_arrays(TracedArray, _arrays_of)


class _NumPy:
    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def array(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = _traced(x)
        if found is None or not found.recorder.is_noting():
            return np.array(x, *args, **kwargs)
        return found.recorder.call(array_of, (x, *args), kwargs)


def array_of(x: Any, *args: Any, **kwargs: Any) -> Array:
    """Return numpy.array of an argument that may hold traced arrays."""
    return np.array(x, *args, **kwargs)


def _traced(x: Any) -> Any:
    if isinstance(x, Traced):
        return x
    if isinstance(x, (list, tuple)):
        return next((found for part in x if (found := _traced(part)) is not None), None)
    return None


def let_arrays_be_traced(on: bool) -> None:
    """Switch support for traced arrays in autograd.numpy's `array` on or off."""
    numpy_wrapper._np = _NumPy() if on else np


# Contractions over a few components as parts of loops: a 3 x 3 matrix times the components of a field, entry by entry.
#
# NumPy's products are calls on whole arrays, which need their operands and results in memory. A sum over a short axis is
# written out instead, term by term; so are the components of the result along axes that the field among the operands
# doesn't have. These are separate arrays that are joined, so that all components are computed in one loop over the field,
# in which each entry of a contracted array is computed once. Long contractions stay calls: there BLAS is faster.


# Maximum number of products that are written out. Arrays of at most this size may be read again in each loop iteration.
_MOST_TERMS = _SMALL = 64


def einsum(t: Translation, shape: Shape, dtype: np.dtype, subscripts: Any, *operands: Any, optimize: Any = None) -> int:
    """Append the operations of np.einsum with given subscripts."""
    if not isinstance(subscripts, str):
        raise Opaque
    inputs, out = letters_of(subscripts, [len(_value(x).shape) for x in operands])
    return _Contraction(t, dtype, operands, inputs, list(out)).made()


def matmul(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    """Append x @ y."""
    labels = [_of_matrix(_value(x), "ik"), _of_matrix(_value(y), "kj" if len(_value(y).shape) > 1 else "jk")]
    batch = range(2 - max(2, len(x.shape), len(y.shape)), 0)
    out = [*batch, *[label for found, label in zip(labels, "ij") if label in found]]
    return _Contraction(t, dtype, (x, y), labels, out).made()


def _of_matrix(x: Value, last: str) -> list[Hashable]:
    ndim = len(x.shape)
    if not ndim:
        raise Opaque
    return [*range(2 - ndim, 0), *last] if ndim > 1 else [last[1]]


def dot(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    """Append np.dot of arrays, one of which has more than one axis."""
    ndim = len(_value(y).shape)
    return tensordot(t, shape, dtype, x, y, (len(_value(x).shape) - 1, max(ndim - 2, 0)) if x.shape and ndim else 0)


def inner(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    """Append np.inner of arrays, one of which has more than one axis."""
    return tensordot(t, shape, dtype, x, y, (-1, -1) if _value(x).shape and _value(y).shape else 0)


def tensordot(t: Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any, axes: Any = 2) -> int:
    """Append np.tensordot."""
    m, n = len(_value(x).shape), len(_value(y).shape)
    axes = _numbers(t, axes)
    pair = (range(m - axes, m), range(axes)) if isinstance(axes, int) else axes
    of_x, of_y = [(k,) if isinstance(k, int) else k for k in pair]
    first: list[Hashable] = [("x", k) for k in range(m)]
    second: list[Hashable] = [("y", k) for k in range(n)]
    for k, j in zip(of_x, of_y, strict=True):
        second[j] = first[k]
    out = [label for label in (*first, *second) if (label in first) != (label in second)]
    return _Contraction(t, dtype, (x, y), [first, second], out).made()


def _numbers(t: Translation, x: Any) -> Any:
    """Return integers given as arrays, or lists of them, as Python integers."""
    if isinstance(x, Value):
        node = t.program.nodes[x.number]
        if node.kind != "constant":
            raise Opaque
        return t.program.constants[node.data].tolist()
    return [_numbers(t, part) for part in x] if isinstance(x, Iterable) else int(x)


def _value(x: Any) -> Value:
    if not isinstance(x, Value):
        raise Opaque
    return x


class _Contraction:
    """A sum of products.

    `labels`: a label per axis of each operand, as in Einstein notation. `out`: labels of the result's axes.
    """

    def __init__(self, t: Translation, dtype: np.dtype, operands: Sequence[Value], labels: Any, out: list[Hashable]):
        self.t, self.dtype, self.labels, self.out = t, dtype, labels, out
        self.operands = [t.of(x, dtype) for x in operands]
        self.lengths: dict[Hashable, int] = {}
        for x, found in zip(self.operands, labels):
            for label, n in zip(found, x.shape):
                self.lengths[label] = max(n, self.lengths.get(label, 1))
        self.written, self.folded = self._parted([math.prod(x.shape) for x in self.operands])

    def _parted(self, sizes: Sequence[int]) -> tuple[set[Hashable], list[Hashable]]:
        """Return the labels whose indices are written out, and those over which loops sum; the others are axes of loops."""
        lengths = self.lengths
        fields = [set(found) for found, size in zip(self.labels, sizes) if size > _SMALL]
        of_fields = set(lengths).intersection(*fields)
        summed = [label for label in lengths if label not in self.out]
        folded = [label for label in summed if all(label in found for found in self.labels)]
        if max((lengths[label] for label in folded), default=0) <= SHORT:
            folded = []
        loops = {label for label in self.out if label in of_fields}
        written = lengths.keys() - loops - set(folded)
        terms = [lengths[label] for label in written]
        if folded and loops or 0 in sizes or max(terms, default=0) > SHORT or math.prod(terms) > _MOST_TERMS:
            raise Opaque
        return written, folded

    def made(self) -> int:
        """Return the node of the result."""
        self.t.program.contracts = True
        return self._put_together(0, {})

    def _put_together(self, axis: int, at: dict[Hashable, int]) -> int:
        """Return the part of the result at given indices of the axes before `axis`."""
        if axis == len(self.out):
            return self._summed(at)
        label = self.out[axis]
        if label not in self.written:
            return self._put_together(axis + 1, at)
        parts = [self._put_together(axis + 1, {**at, label: k}) for k in range(self.lengths[label])]
        return self.t.program.components(parts, axis)

    def _summed(self, at: dict[Hashable, int]) -> int:
        """Return the sum of products at given indices of the axes of the result that are written out."""
        labels = [label for label in self.lengths if label in self.written and label not in self.out]
        places = product(*[range(self.lengths[label]) for label in labels])
        terms = [self._product(at | dict(zip(labels, place))) for place in places]
        total = reduce(partial(self._combined, np.add), terms)
        left, axes = total.shape[: len(self.out)], tuple(range(len(self.out), len(total.shape)))
        return self.t.reduce("add", total, axes, shape=left) if self.folded else total.number

    def _product(self, at: dict[Hashable, int]) -> Value:
        """Return the product of one entry, or one array, of each operand."""
        factors = [self._part(x, labels, at) for x, labels in zip(self.operands, self.labels)]
        return reduce(partial(self._combined, np.multiply), factors)

    def _part(self, x: Value, labels: Sequence[Hashable], at: dict[Hashable, int]) -> Value:
        """Return an operand at the given indices, with the axes of the loops in order."""
        axes = [*self.out, *self.folded]
        map, shape = [], [1] * len(axes)
        for label, n in zip(labels, x.shape):
            if label in at or n == 1:  # axes of length 1 are broadcast
                map.append(Axis(None, 0, min(at.get(label, 0), n - 1)))
            else:
                place = axes.index(label)
                shape[place] = n
                map.append(Axis(place, 1, 0))
        return Value(self.t.program, self.t.program.view(x.number, tuple(map), tuple(shape)))

    def _combined(self, ufunc: np.ufunc, x: Value, y: Value) -> Value:
        shape = np.broadcast_shapes(x.shape, y.shape)
        return Value(self.t.program, self.t.computed(ufunc, [x, y], shape, self.dtype))


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
