"""Translation of the steps of a trace to a program of arrays.

A `_Translation` appends the nodes of each step to the program. `_RULES` and `compiling.numpy_functions` have a rule for
each NumPy function that compiled loops can compute. Other functions, and arguments that a rule doesn't support, become
calls of NumPy on whole arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial, reduce
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike

from mpiad._typing import Index, Shape
from mpiad.compiling.numpy_functions import Rule, Unsupported, rule_of, scalar_function
from mpiad.compiling.symbols import Symbol
from mpiad.differentiation.rules.einsum import letters_of
from mpiad.programs.array_program import BOOLEAN, COMPUTED, FLOATS, SHORT, ArrayProgram, Call, Slot, Value
from mpiad.programs.index_maps import Axis, axes_of, identity, of_key
from mpiad.programs.recorder import Recorder
from mpiad.programs.steps import Constant, Ref, Step, Traced, mapped
from mpiad.programs.traced_array import array_of, cast, take, with_entries

_MOST_NUMBERS = 2**53  # up to this limit, integers are exact as floats


def program_of(recorder: Recorder, parts: Sequence[Sequence[Any]]) -> ArrayProgram:
    """Return the program of a trace; `parts`: the values that each part of the program returns."""
    made = _Translation(recorder)
    for step in recorder.steps:
        made.step(step)
    made.program.outputs, made.program.logged = made.outputs([x for part in parts for x in part]), recorder.logged
    made.program.ends = list(accumulate(map(len, parts)))[:-1]
    return made.program


class _Translation:
    """A program that is built from a trace, step by step: the `Translator` of rules, which append nodes to it."""

    kind = Value

    def __init__(self, recorder: Recorder):
        self.recorder, self.program = recorder, ArrayProgram()
        self.nodes: dict[int, int] = {}
        for number in recorder.inputs:
            shape, dtype = recorder.specs[number]
            self.nodes[number] = self.program.input(shape, dtype)
            if number in recorder.weak:
                self.program.weak.add(self.nodes[number])

    def outputs(self, outputs: Sequence[Any]) -> list[int]:
        program, found = self.program, []
        for x in outputs:
            number = self.nodes[x.number] if isinstance(x, Traced) else program.constant(np.asarray(x))
            node = program.nodes[number]
            if not program.is_float(number) and (node.kind in ("input", "constant") or number in found):
                data = Call("call", np.array, (Slot(0),), {})
                number = program.add("call", [number], node.shape, node.dtype, data)
            found.append(number)
        return found

    def step(self, step: Step) -> None:
        program = self.program
        program.site, program.part = step.site, step.part
        args, kwargs = mapped(step.args, self._value), mapped(step.kwargs, self._value)
        specs = [self.recorder.specs[out] for out in step.outs]
        try:
            made = self._translated_by_rule(step, args, kwargs, specs)
        except Unsupported:
            made = self._called(step, args, kwargs, specs)
        for out, number, (shape, dtype) in zip(step.outs, made, specs, strict=True):
            node = program.nodes[number]
            if (node.shape, node.dtype) != (shape, dtype):
                raise AssertionError(f"{step}: {node} is not of shape {shape} and dtype {dtype}")
            self.nodes[out] = number
            if out in self.recorder.weak:
                program.weak.add(number)

    def _translated_by_rule(self, step: Step, args: tuple, kwargs: dict, specs: list) -> list[int]:
        # Loops don't compute complex or integer arrays.
        if any(dtype not in COMPUTED for _, dtype in specs):
            raise Unsupported
        if step.kind != "call" or len(specs) != 1 and step.fun not in SPLITTING:
            raise Unsupported
        shape, dtype = specs[0]
        rule = _RULES.get(step.fun) or rule_of(step.fun)
        if rule is None:
            raise Unsupported
        try:
            made = rule(self, shape, dtype, *args, **kwargs)
        except TypeError as error:  # arguments that the rule doesn't support
            raise Unsupported from error
        return [x.number for x in (made if isinstance(made, list) else [made])]

    def _called(self, step: Step, args: tuple, kwargs: dict, specs: list) -> list[int]:
        program, found = self.program, []
        kind = "call" if step.kind == "call" else "communicate"

        def slot(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            found.append(x.number)
            return Slot(len(found) - 1)

        given = mapped(args, slot), mapped(kwargs, slot)
        data = Call(step.kind, step.fun, *given, step.rule)
        single = len(specs) == 1 and step.fun not in SPLITTING and step.kind != "opaque"
        shape, dtype = specs[0] if single else ((), np.dtype(bool if specs else object))
        number = program.add(kind, found, shape, dtype, data)
        if single or not specs:
            return [number] if specs else []
        return [program.add("item", (number,), shape, dtype, place) for place, (shape, dtype) in enumerate(specs)]

    def _value(self, x: Any) -> Any:
        if type(x) is Ref:
            return self.value(self.nodes[x.number])
        if type(x) is Constant:
            return self.value(self.program.constant(self.recorder.constants[x.number]))
        return x

    def of(self, x: Any, dtype: np.dtype) -> Value:
        """Return an argument as a node that loops can read; a Python number gets the given dtype, if it is a float's."""
        if isinstance(x, Value):
            node = self.program.nodes[x.number]
            if node.dtype.kind in "iu" and node.kind == "constant":
                whole = self.program.constants[node.data]
                if np.abs(whole, dtype=float).max(initial=0) > _MOST_NUMBERS:
                    raise Unsupported
                return self.value(self.program.constant(whole.astype(np.float64)))
            if node.dtype.kind in "iu" and node.kind == "number":
                return self.value(self.program.number(node.data, node.shape, np.float64))
            # An integer argument is read as a float.
            integer = node.kind == "input" and node.dtype.kind == "i" and not node.shape
            if not integer and not self.program.is_float(x.number):
                raise Unsupported
            return x
        if isinstance(x, (bool, np.bool_)):
            return self.value(self.program.number(bool(x), (), bool))
        if isinstance(x, (int, float, np.integer, np.floating)) and abs(x) < math.inf or isinstance(x, float):
            # A Python number takes the precision of the other operand.
            kind = x.dtype if isinstance(x, np.floating) else dtype if dtype in FLOATS else np.dtype(np.float64)
            return self.value(self.program.number(float(x), (), kind))
        raise Unsupported

    def value(self, number: int) -> Value:
        """Return a node as a value."""
        return Value(self.program, number)

    def elementwise(
        self, name: str, function: Callable[..., Symbol], args: Sequence[Any], shape: Shape, dtype: np.dtype
    ) -> Value:
        """Append an elementwise function of arguments, which are broadcast."""
        if dtype not in COMPUTED:
            raise Unsupported
        wide = dtype if dtype in FLOATS else np.result_type(*[x.dtype for x in args if isinstance(x, Value)], np.float32)
        given = [self.of(x, wide).number for x in args]
        return self.value(self.program.elementwise(given, shape, dtype, (name, function)))

    def computed(self, ufunc: np.ufunc, args: Sequence[Any], shape: Shape, dtype: np.dtype) -> Value:
        """Append a ufunc."""
        function: Any = scalar_function(ufunc)
        return self.elementwise(ufunc.__name__, function, args, shape, dtype)

    def reduce(
        self, name: str, shape: Shape, x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False
    ) -> Value:
        """Append a reduction."""
        if out is not None or not isinstance(x, Value) or x.dtype not in FLOATS or dtype not in (None, x.dtype):
            raise Unsupported
        ndim = len(x.shape)
        axes = tuple(range(ndim)) if axis is None else tuple(sorted(axes_of(axis, ndim)))
        if name.startswith("logical") or name not in ("add", "multiply") and not math.prod(x.shape):
            raise Unsupported
        if not axes:
            return x
        if not math.prod(x.shape):
            return self.full(shape, float(name == "multiply"), x.dtype)
        return self._folded(name, x, axes).reshape(shape)

    def _folded(self, name: str, x: Value, axes: tuple[int, ...]) -> Value:
        program, node = self.program, self.program.nodes[x.number]
        left = tuple([n for k, n in enumerate(node.shape) if k not in axes])
        if x.number not in program.componentwise or node.kind != "join" or len(node.inputs) != node.shape[node.data]:
            return self.value(program.add("reduce", (x.number,), left, node.dtype, (name, axes)))
        parts = [self.value(part) for part in node.inputs]
        if node.data not in axes:
            place = node.data - sum(k < node.data for k in axes)
            folded = [self._folded(name, part, axes).reshape(_one(left, place)).number for part in parts]
            return self.value(program.components(folded, place))
        total = reduce(lambda x, y: self.computed(getattr(np, name), [x, y], y.shape, node.dtype), parts)
        return total.reshape(left) if axes == (node.data,) else self._folded(name, total, axes)

    def full(self, shape: Shape, value: Any, dtype: DTypeLike) -> Value:
        """Append an array of equal entries, or a broadcast value."""
        dtype = np.dtype(dtype)
        if isinstance(value, Value):
            return self.array(value, dtype).broadcast_to(shape)
        if dtype not in COMPUTED:
            raise Unsupported
        return self.value(self.program.number(value, shape, dtype))

    def array(self, x: Any, dtype: np.dtype) -> Value:
        """Return nested lists of values and numbers as a value with the given dtype."""
        if isinstance(x, (list, tuple)):
            parts = [self.array(part, dtype) for part in x]
            return _stack(self, (len(parts), *parts[0].shape), dtype, parts)
        x = x if isinstance(x, Value) else self.of(x, dtype)
        return x if x.dtype == dtype else _cast(self, x.shape, dtype, x)

    def join(self, parts: Iterable[Value], axis: int) -> Value:
        """Append the concatenation of arrays along an axis."""
        return self.value(self.program.join([x.number for x in parts], axis))


def _one(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _in_full(key: Index, ndim: int) -> list[Any]:
    """Return a basic index with an entry for each axis; raise Unsupported for another kind of index."""
    parts: list[Any] = list(key) if type(key) is tuple else [key]
    numbers: list[Any] = []
    for part in parts:
        numbers += [part.start, part.stop, part.step] if isinstance(part, slice) else [None if part is Ellipsis else part]
    if not all(isinstance(x, (int, np.integer, type(None))) for x in numbers) or any(isinstance(x, bool) for x in parts):
        raise Unsupported
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    place = next(k for k, part in enumerate(parts) if part is Ellipsis)
    missing = ndim - sum(part is not None for part in parts) + 1
    return [*parts[:place], *[slice(None)] * missing, *parts[place + 1 :]]


def _take(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, key: Index) -> Value:
    return _value(x).view(*of_key(x.shape, _in_full(key, len(x.shape))))


def _cast(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, *_: Any) -> Value:
    if not t.program.is_float(_value(x).number):
        raise Unsupported
    name, function = ("truth", Symbol.truth) if dtype == BOOLEAN else ("cast", Symbol.as_number)
    return x if x.dtype == dtype else t.elementwise(name, function, [x], shape, dtype)


def _concatenate(t: _Translation, shape: Shape, dtype: np.dtype, arrays: Any, axis: int | None = 0) -> Value:
    parts = [t.array(x, dtype) for x in arrays]
    if axis is None:
        parts, axis = [x.reshape((math.prod(x.shape),)) for x in parts], 0
    return t.join(parts, axis % len(shape))


def _stack(t: _Translation, shape: Shape, dtype: np.dtype, arrays: Any, axis: int = 0) -> Value:
    axis %= len(shape)
    return t.join([t.array(x, dtype).reshape(_one(shape, axis)) for x in arrays], axis)


def _with_entries(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, key: Index, value: Any) -> Value:
    if not t.program.is_float(x.number):
        raise Unsupported
    map, made = of_key(x.shape, _in_full(key, len(x.shape)))
    if any(axis.source is not None and axis.stride != 1 and made[axis.source] > 1 for axis in map):
        raise Unsupported
    # As in NumPy, leading axes of length 1 of the value are dropped, and the value is broadcast.
    value = t.array(value, x.dtype)
    while len(value.shape) > len(made) and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    unit = tuple([1 if axis.source is None else made[axis.source] for axis in map])
    block = value.broadcast_to(made).reshape(unit)
    return t.value(t.program.update(x.number, block.number, [axis.offset for axis in map]))


def _pad(
    t: _Translation, shape: Shape, dtype: np.dtype, x: Any, widths: Any, mode: str = "constant", constant_values: Any = 0
) -> Value:
    if mode != "constant" or isinstance(constant_values, (list, tuple, Value)):
        raise Unsupported
    before = np.broadcast_to(np.asarray(widths), (len(_value(x).shape), 2))[:, 0].tolist()
    return t.value(t.program.update(t.full(shape, constant_values, dtype).number, x.number, before))


def _roll(t: _Translation, shape: Shape, dtype: np.dtype, x: Value, shift: Any, axis: Any = None) -> Value:
    if axis is None:
        flat = x.reshape((math.prod(x.shape),))
        return _roll(t, flat.shape, dtype, flat, shift, 0).reshape(shape)
    for by, along in [(int(a), int(b)) for a, b in np.broadcast(np.asarray(shift), np.asarray(axis))]:
        along %= len(shape)
        n = shape[along]
        by = by % n if n else 0
        if by:
            x = t.join([x.slice(along, n - by, n), x.slice(along, 0, n - by)], along)
    return x


# Contractions over a few components, such as a 3 x 3 matrix times the components of a field at each point.
#
# A call of NumPy reads its operands from memory, and writes its result to memory. Short contractions are unrolled instead,
# so that loops can compute them together with other operations: a sum over a short axis becomes a sum of terms, and if the
# result has an axis that the fields (the large operands) don't have, its entries along this axis become separate arrays,
# which are joined. Thus one loop over the points of the fields computes all components. Long contractions remain calls,
# since BLAS is faster.

_MOST_TERMS = 64  # maximum number of terms of an unrolled contraction
_SMALL = 64  # maximum size of an operand that isn't a field


def _einsum(t: _Translation, shape: Shape, dtype: np.dtype, subscripts: Any, *operands: Any, optimize: Any = None) -> Value:
    if not isinstance(subscripts, str):
        raise Unsupported
    inputs, out = letters_of(subscripts, [len(_value(x).shape) for x in operands])
    return _Contraction(t, dtype, operands, inputs, list(out)).made()


def _matmul(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> Value:
    labels = [_of_matrix(_value(x), "ik"), _of_matrix(_value(y), "kj" if len(_value(y).shape) > 1 else "jk")]
    batch = range(2 - max(2, len(x.shape), len(y.shape)), 0)
    out = [*batch, *[label for found, label in zip(labels, "ij") if label in found]]
    return _Contraction(t, dtype, (x, y), labels, out).made()


def _of_matrix(x: Value, last: str) -> list[Hashable]:
    ndim = len(x.shape)
    if not ndim:
        raise Unsupported
    return [*range(2 - ndim, 0), *last] if ndim > 1 else [last[1]]


def _dot(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> Value:
    ndim = len(_value(y).shape)
    return _tensordot(t, shape, dtype, x, y, (len(_value(x).shape) - 1, max(ndim - 2, 0)) if x.shape and ndim else 0)


def _inner(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> Value:
    return _tensordot(t, shape, dtype, x, y, (-1, -1) if _value(x).shape and _value(y).shape else 0)


def _tensordot(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any, axes: Any = 2) -> Value:
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


def _numbers(t: _Translation, x: Any) -> Any:
    """Return Python integers, in nested lists, for integers given as numbers, arrays or lists."""
    if isinstance(x, Value):
        node = t.program.nodes[x.number]
        if node.kind != "constant":
            raise Unsupported
        return t.program.constants[node.data].tolist()
    return [_numbers(t, part) for part in x] if isinstance(x, Iterable) else int(x)


def _value(x: Any) -> Value:
    if not isinstance(x, Value):
        raise Unsupported
    return x


class _Contraction:
    """A contraction in Einstein notation; `labels`: for each operand the labels of its axes; `out`: those of the result."""

    def __init__(self, t: _Translation, dtype: np.dtype, operands: Sequence[Value], labels: Any, out: list[Hashable]):
        self.t, self.dtype, self.labels, self.out = t, dtype, labels, out
        self.operands = [t.of(x, dtype) for x in operands]
        self.lengths: dict[Hashable, int] = {}
        for x, found in zip(self.operands, labels):
            for label, n in zip(found, x.shape):
                self.lengths[label] = max(n, self.lengths.get(label, 1))
        self.unrolled, self.folded = self._classified_labels([math.prod(x.shape) for x in self.operands])

    def _classified_labels(self, sizes: Sequence[int]) -> tuple[set[Hashable], list[Hashable]]:
        """Return the labels of unrolled axes, and those of axes that loops sum over; all fields have the other axes."""
        lengths = self.lengths
        fields = [set(found) for found, size in zip(self.labels, sizes) if size > _SMALL]
        of_fields = set(lengths).intersection(*fields)
        summed = [label for label in lengths if label not in self.out]
        folded = [label for label in summed if all(label in found for found in self.labels)]
        if max((lengths[label] for label in folded), default=0) <= SHORT:
            folded = []
        loops = {label for label in self.out if label in of_fields}
        unrolled = lengths.keys() - loops - set(folded)
        terms = [lengths[label] for label in unrolled]
        if folded and loops or 0 in sizes or max(terms, default=0) > SHORT or math.prod(terms) > _MOST_TERMS:
            raise Unsupported
        return unrolled, folded

    def made(self) -> Value:
        self.t.program.contracts = True
        return self._assembled(0, {})

    def _assembled(self, axis: int, at: dict[Hashable, int]) -> Value:
        """Return the part of the result at given indices of the unrolled axes before `axis`."""
        if axis == len(self.out):
            return self._summed(at)
        label = self.out[axis]
        if label not in self.unrolled:
            return self._assembled(axis + 1, at)
        parts = [self._assembled(axis + 1, {**at, label: k}).number for k in range(self.lengths[label])]
        return self.t.value(self.t.program.components(parts, axis))

    def _summed(self, at: dict[Hashable, int]) -> Value:
        """Return the sum of products at given indices of the unrolled axes of the result."""
        labels = [label for label in self.lengths if label in self.unrolled and label not in self.out]
        places = product(*[range(self.lengths[label]) for label in labels])
        terms = [self._product(at | dict(zip(labels, place))) for place in places]
        total = reduce(partial(self._combined, np.add), terms)
        left, axes = total.shape[: len(self.out)], tuple(range(len(self.out), len(total.shape)))
        return self.t.reduce("add", left, total, axes) if self.folded else total

    def _product(self, at: dict[Hashable, int]) -> Value:
        """Return the product of the operands at the given indices."""
        factors = [self._part(x, labels, at) for x, labels in zip(self.operands, self.labels)]
        return reduce(partial(self._combined, np.multiply), factors)

    def _part(self, x: Value, labels: Sequence[Hashable], at: dict[Hashable, int]) -> Value:
        """Return an operand at the given indices, with the axes of the result followed by the axes that loops sum over."""
        axes = [*self.out, *self.folded]
        map, shape = [], [1] * len(axes)
        for label, n in zip(labels, x.shape):
            if label in at or n == 1:  # axes of length 1 are broadcast
                map.append(Axis(None, 0, min(at.get(label, 0), n - 1)))
            else:
                place = axes.index(label)
                shape[place] = n
                map.append(Axis(place, 1, 0))
        return x.view(tuple(map), tuple(shape))

    def _combined(self, ufunc: np.ufunc, x: Value, y: Value) -> Value:
        return self.t.computed(ufunc, [x, y], np.broadcast_shapes(x.shape, y.shape), self.dtype)


def _product(of_more_axes: Rule | None = None) -> Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> Value:
        if not (isinstance(x, Value) and isinstance(y, Value) and x.dtype == y.dtype):
            raise Unsupported
        if not len(x.shape) == len(y.shape) == 1:
            if of_more_axes is None:
                raise Unsupported
            return of_more_axes(t, shape, dtype, x, y)
        return t.reduce("add", shape, t.computed(np.multiply, [x, y], x.shape, dtype))

    return rule


def _reshape(t: _Translation, shape: Shape, dtype: np.dtype, x: Value, *args: Any, order: Any = "C", **_: Any) -> Value:
    if order not in ("C", None) or any(isinstance(arg, str) and arg != "C" for arg in args):
        raise Unsupported
    return x.reshape(shape)


def _permuted(function: Callable) -> Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, *args: Any, **kwargs: Any) -> Value:
        ndim = len(x.shape)
        # In this array the stride of each axis is its number, so the strides of the result are its axes' former numbers.
        order = function(as_strided(np.empty(1), (1,) * ndim, range(ndim)), *args, **kwargs).strides
        return x.view(tuple([Axis(order.index(k), 1, 0) for k in range(ndim)]), shape)

    return rule


def _flip(along: int | None = None) -> Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, axis: Any = along) -> Value:
        ndim = len(shape)
        flipped = set(range(ndim)) if axis is None else axes_of(axis, ndim)
        return x.view(
            tuple([Axis(k, -1, shape[k] - 1) if k in flipped else own for k, own in enumerate(identity(ndim))]), shape
        )

    return rule


def _same(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, *_: Any, **__: Any) -> Value:
    if not isinstance(x, Value) or x.shape != shape or x.dtype != dtype:
        raise Unsupported
    return x


def _diff(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, n: int = 1, axis: int = -1) -> Value:
    for _ in range(n):
        axis %= len(x.shape)
        length = x.shape[axis]
        ends = [x.slice(axis, min(1, length), length), x.slice(axis, 0, max(length - 1, 0))]
        x = t.computed(np.subtract, ends, ends[0].shape, dtype)
    return x


def _split(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, sections: Any, axis: int = 0) -> list[Value]:
    axis %= len(x.shape)
    split = np.array_split if isinstance(sections, (int, np.integer)) else np.split
    lengths = map(len, split(np.arange(x.shape[axis]), sections))
    return [x.slice(axis, *ends) for ends in pairwise(accumulate(lengths, initial=0))]


def _imag(t: _Translation, shape: Shape, dtype: np.dtype, x: Any) -> Value:
    if _value(x).dtype not in FLOATS:
        raise Unsupported
    return t.full(shape, 0.0, dtype)


SPLITTING = frozenset({np.split, np.array_split})


_RULES: dict[Any, Rule] = {
    take: _take, cast: _cast, with_entries: _with_entries,
    array_of: lambda t, shape, dtype, x, *_, **__: t.array(x, dtype).reshape(shape),
    np.dot: _product(_dot), np.vdot: _product(), np.inner: _product(_inner), np.matmul: _product(_matmul),
    np.einsum: _einsum, np.tensordot: _tensordot,
    np.reshape: _reshape, np.ravel: _reshape, np.squeeze: _reshape, np.expand_dims: _reshape, np.atleast_1d: _reshape,
    np.atleast_2d: _reshape, np.atleast_3d: _reshape,
    **{function: _permuted(function) for function in (np.transpose, np.swapaxes, np.moveaxis)},
    np.flip: _flip(), np.flipud: _flip(0), np.fliplr: _flip(1),
    np.copy: _same, np.real: _same, np.imag: _imag,
    np.broadcast_to: lambda t, shape, dtype, x, *_: t.of(x, dtype).broadcast_to(shape),
    np.concatenate: _concatenate, np.stack: _stack, np.pad: _pad, np.roll: _roll,
    np.diff: _diff, np.split: _split, np.array_split: _split,
}  # fmt: skip
