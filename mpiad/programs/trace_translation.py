"""Translation of the steps of a trace to a program of arrays.

A `_Translation` appends the nodes of each step to the program. `RULES` has a rule for each NumPy function that compiled
loops can compute; a rule returns the number of a node. Other functions, and arguments that a rule doesn't support, become
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

from mpiad._typing import Index, Shape
from mpiad.compiling.symbolic_arrays import scalar_function
from mpiad.compiling.symbols import choose
from mpiad.differentiation.rules.einsum import letters_of
from mpiad.programs.array_program import BOOLEAN, COMPUTED, FLOATS, SHORT, ArrayProgram, Call, Opaque, Slot, Value
from mpiad.programs.index_maps import Axis, axes_of, broadcast, identity, of_key
from mpiad.programs.recorder import Recorder
from mpiad.programs.steps import Constant, Ref, Step, Traced, mapped
from mpiad.programs.traced_array import array_of, cast, take, with_entries

_MOST_NUMBERS = 2**53  # up to this limit, integers are exact as floats
_NAMED: dict[str, Callable] = {}


def program_of(recorder: Recorder, parts: Sequence[Sequence[Any]]) -> ArrayProgram:
    """Return the program of a trace; `parts`: the values that each part of the program returns."""
    made = _Translation(recorder)
    for step in recorder.steps:
        made.step(step)
    made.program.outputs, made.program.logged = made.outputs([x for part in parts for x in part]), recorder.logged
    made.program.ends = list(accumulate(map(len, parts)))[:-1]
    return made.program


class _Translation:
    """A program that is built from a trace, step by step; the rules append nodes to it."""

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
        except Opaque:
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
            raise Opaque
        if step.kind != "call" or len(specs) != 1 and step.fun not in SPLITTING:
            raise Opaque
        shape, dtype = specs[0]
        if isinstance(step.fun, np.ufunc) and scalar_function(step.fun) is not None and not kwargs:
            return [self.computed(step.fun, args, shape, dtype)]
        owner = getattr(step.fun, "__self__", None)
        if isinstance(owner, np.ufunc) and owner in REDUCED and step.fun.__name__ == "reduce":
            given = dict(zip(("x", "axis", "dtype", "out", "keepdims"), args)) | kwargs
            if given.get("dtype") is not None or given.get("out") is not None or "initial" in given or "where" in given:
                raise Opaque
            # By default ufunc.reduce reduces along the first axis.
            return [self.reduce(REDUCED[owner], shape, given["x"], given.get("axis", 0))]
        rule = RULES.get(step.fun)
        if rule is None:
            raise Opaque
        try:
            made = rule(self, shape, dtype, *args, **kwargs)
        except TypeError as error:  # arguments that the rule doesn't support
            raise Opaque from error
        return list(made) if isinstance(made, list) else [made]

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
            return Value(self.program, self.nodes[x.number])
        if type(x) is Constant:
            return Value(self.program, self.program.constant(self.recorder.constants[x.number]))
        return x

    def of(self, x: Any, dtype: np.dtype) -> Value:
        """Return an argument as a node that loops can read; a Python number gets the given dtype, if it is a float's."""
        if isinstance(x, Value):
            node = self.program.nodes[x.number]
            if node.dtype.kind in "iu" and node.kind == "constant":
                whole = self.program.constants[node.data]
                if np.abs(whole, dtype=float).max(initial=0) > _MOST_NUMBERS:
                    raise Opaque
                return Value(self.program, self.program.constant(whole.astype(np.float64)))
            if node.dtype.kind in "iu" and node.kind == "number":
                return Value(self.program, self.program.number(node.data, node.shape, np.float64))
            # An integer argument is read as a float.
            integer = node.kind == "input" and node.dtype.kind == "i" and not node.shape
            if not integer and not self.program.is_float(x.number):
                raise Opaque
            return x
        if isinstance(x, (bool, np.bool_)):
            return Value(self.program, self.program.number(bool(x), (), bool))
        if isinstance(x, (int, float, np.integer, np.floating)) and abs(x) < math.inf or isinstance(x, float):
            # A Python number takes the precision of the other operand.
            kind = x.dtype if isinstance(x, np.floating) else dtype if dtype in FLOATS else np.dtype(np.float64)
            return Value(self.program, self.program.number(float(x), (), kind))
        raise Opaque

    def elementwise(self, name: str, function: Callable, args: Sequence[Any], shape: Shape, dtype: np.dtype) -> int:
        if dtype not in COMPUTED:
            raise Opaque
        wide = dtype if dtype in FLOATS else np.result_type(*[x.dtype for x in args if isinstance(x, Value)], np.float32)
        given = [self.of(x, wide) for x in args]
        return self.program.elementwise([x.number for x in given], shape, dtype, (name, function))

    def computed(self, ufunc: np.ufunc, args: Sequence[Any], shape: Shape, dtype: np.dtype) -> int:
        function: Any = scalar_function(ufunc)
        return self.elementwise(ufunc.__name__, function, args, shape, dtype)

    def reduce(
        self, name: str, shape: Shape, x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False
    ) -> int:
        if out is not None or not isinstance(x, Value) or x.dtype not in FLOATS or dtype not in (None, x.dtype):
            raise Opaque
        ndim = len(x.shape)
        axes = tuple(range(ndim)) if axis is None else tuple(sorted(axes_of(axis, ndim)))
        if not axes:
            return x.number
        if not math.prod(x.shape):
            if name not in ("add", "multiply"):
                raise Opaque
            return self.program.number(float(name == "multiply"), shape, x.dtype)
        return self.program.reshape(self._folded(name, x.number, axes), shape)

    def _folded(self, name: str, x: int, axes: tuple[int, ...]) -> int:
        program, node = self.program, self.program.nodes[x]
        left = tuple([n for k, n in enumerate(node.shape) if k not in axes])
        if x not in program.componentwise or node.kind != "join" or len(node.inputs) != node.shape[node.data]:
            return program.add("reduce", (x,), left, node.dtype, (name, axes))
        if node.data not in axes:
            place = node.data - sum(k < node.data for k in axes)
            parts = [program.reshape(self._folded(name, part, axes), _one(left, place)) for part in node.inputs]
            return program.components(parts, place)
        total, *others = node.inputs
        for part in others:
            both = [Value(program, total), Value(program, part)]
            total = self.computed(getattr(np, name), both, program.nodes[part].shape, node.dtype)
        return program.reshape(total, left) if axes == (node.data,) else self._folded(name, total, axes)

    def take(self, shape: Shape, dtype: np.dtype, x: Any, key: Index) -> int:
        if not isinstance(x, Value):
            raise Opaque
        map, made = of_key(x.shape, _in_full(key, len(x.shape)))
        return self.program.view(x.number, map, made)

    def broadcast_to(self, x: Value, shape: Shape) -> int:
        return self.program.view(x.number, broadcast(x.shape, shape), shape)

    def cast(self, shape: Shape, dtype: np.dtype, x: Any, *_: Any) -> int:
        if not isinstance(x, Value) or not self.program.is_float(x.number):
            raise Opaque
        if x.dtype == dtype:
            return x.number
        name, function = ("truth", lambda s: s.truth()) if dtype == BOOLEAN else ("cast", lambda s: s.as_number())
        return self.elementwise(name, _NAMED.setdefault(name, function), [x], shape, dtype)

    def join(self, shape: Shape, dtype: np.dtype, arrays: Any, axis: int | None = 0) -> int:
        parts = [self._array(x, dtype) for x in arrays]
        if axis is None:
            parts, axis = [Value(self.program, self.program.reshape(x.number, (math.prod(x.shape),))) for x in parts], 0
        return self.program.join([x.number for x in parts], axis % len(shape))

    def _array(self, x: Any, dtype: np.dtype) -> Value:
        if not isinstance(x, Value):
            if isinstance(x, (list, tuple)):
                parts = [self._array(part, dtype) for part in x]
                shape = (len(parts), *parts[0].shape)
                return Value(self.program, self.stack(shape, dtype, parts))
            x = self.of(x, dtype)
        if x.dtype != dtype:
            return Value(self.program, self.cast(x.shape, dtype, x))
        return x

    def stack(self, shape: Shape, dtype: np.dtype, arrays: Any, axis: int = 0) -> int:
        axis %= len(shape)
        parts = [self._array(x, dtype) for x in arrays]
        unit = _one(shape, axis)
        return self.program.join([self.program.reshape(x.number, unit) for x in parts], axis)

    def full(self, shape: Shape, value: Any, dtype: np.dtype) -> int:
        if isinstance(value, Value):
            return self.broadcast_to(self._array(value, np.dtype(dtype)), shape)
        if np.dtype(dtype) not in COMPUTED:
            raise Opaque
        return self.program.number(value, shape, dtype)

    def with_entries(self, shape: Shape, dtype: np.dtype, x: Any, key: Index, value: Any) -> int:
        program = self.program
        if not self.program.is_float(x.number):
            raise Opaque
        map, made = of_key(x.shape, _in_full(key, len(x.shape)))
        if any(axis.source is not None and axis.stride != 1 and made[axis.source] > 1 for axis in map):
            raise Opaque
        # As in NumPy, leading axes of length 1 of the value are dropped, and the value is broadcast.
        value = self._array(value, x.dtype)
        while len(value.shape) > len(made) and value.shape[0] == 1:
            value = Value(program, program.reshape(value.number, value.shape[1:]))
        block = self.broadcast_to(value, made)
        unit = tuple([1 if axis.source is None else made[axis.source] for axis in map])
        return program.update(x.number, program.reshape(block, unit), [axis.offset for axis in map])

    def pad(
        self, shape: Shape, dtype: np.dtype, x: Value, widths: Any, mode: str = "constant", constant_values: Any = 0
    ) -> int:
        if mode != "constant" or isinstance(constant_values, (list, tuple, Value)) or not isinstance(x, Value):
            raise Opaque
        before = np.broadcast_to(np.asarray(widths), (len(x.shape), 2))[:, 0].tolist()
        return self.program.update(self.full(shape, constant_values, dtype), x.number, before)

    def roll(self, shape: Shape, dtype: np.dtype, x: Value, shift: Any, axis: Any = None) -> int:
        if axis is None:
            flat = Value(self.program, self.program.reshape(x.number, (math.prod(x.shape),)))
            return self.program.reshape(self.roll(flat.shape, dtype, flat, shift, 0), shape)
        pairs = np.broadcast(np.asarray(shift), np.asarray(axis))
        for by, along in [(int(a), int(b)) for a, b in pairs]:
            along %= len(shape)
            n = shape[along]
            by = by % n if n else 0
            if by:
                ends = [self.program.slice(x.number, along, *pair) for pair in ((n - by, n), (0, n - by))]
                x = Value(self.program, self.program.join(ends, along))
        return x.number


def _one(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _in_full(key: Index, ndim: int) -> list[Any]:
    """Return a basic index with an entry for each axis; raise Opaque for another kind of index."""
    parts: list[Any] = list(key) if type(key) is tuple else [key]
    numbers: list[Any] = []
    for part in parts:
        numbers += [part.start, part.stop, part.step] if isinstance(part, slice) else [None if part is Ellipsis else part]
    if not all(isinstance(x, (int, np.integer, type(None))) for x in numbers) or any(isinstance(x, bool) for x in parts):
        raise Opaque
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    place = next(k for k, part in enumerate(parts) if part is Ellipsis)
    missing = ndim - sum(part is not None for part in parts) + 1
    return [*parts[:place], *[slice(None)] * missing, *parts[place + 1 :]]


# Contractions over a few components, such as a 3 x 3 matrix times the components of a field at each point.
#
# A call of NumPy reads its operands from memory, and writes its result to memory. Short contractions are unrolled instead,
# so that loops can compute them together with other operations: a sum over a short axis becomes a sum of terms, and if the
# result has an axis that the fields (the large operands) don't have, its entries along this axis become separate arrays,
# which are joined. Thus one loop over the points of the fields computes all components. Long contractions remain calls,
# since BLAS is faster.

_MOST_TERMS = 64  # maximum number of terms of an unrolled contraction
_SMALL = 64  # maximum size of an operand that isn't a field


def _einsum(t: _Translation, shape: Shape, dtype: np.dtype, subscripts: Any, *operands: Any, optimize: Any = None) -> int:
    if not isinstance(subscripts, str):
        raise Opaque
    inputs, out = letters_of(subscripts, [len(_value(x).shape) for x in operands])
    return _Contraction(t, dtype, operands, inputs, list(out)).made()


def _matmul(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    labels = [_of_matrix(_value(x), "ik"), _of_matrix(_value(y), "kj" if len(_value(y).shape) > 1 else "jk")]
    batch = range(2 - max(2, len(x.shape), len(y.shape)), 0)
    out = [*batch, *[label for found, label in zip(labels, "ij") if label in found]]
    return _Contraction(t, dtype, (x, y), labels, out).made()


def _of_matrix(x: Value, last: str) -> list[Hashable]:
    ndim = len(x.shape)
    if not ndim:
        raise Opaque
    return [*range(2 - ndim, 0), *last] if ndim > 1 else [last[1]]


def _dot(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    ndim = len(_value(y).shape)
    return _tensordot(t, shape, dtype, x, y, (len(_value(x).shape) - 1, max(ndim - 2, 0)) if x.shape and ndim else 0)


def _inner(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
    return _tensordot(t, shape, dtype, x, y, (-1, -1) if _value(x).shape and _value(y).shape else 0)


def _tensordot(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any, axes: Any = 2) -> int:
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
            raise Opaque
        return t.program.constants[node.data].tolist()
    return [_numbers(t, part) for part in x] if isinstance(x, Iterable) else int(x)


def _value(x: Any) -> Value:
    if not isinstance(x, Value):
        raise Opaque
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
            raise Opaque
        return unrolled, folded

    def made(self) -> int:
        self.t.program.contracts = True
        return self._assembled(0, {})

    def _assembled(self, axis: int, at: dict[Hashable, int]) -> int:
        """Return the part of the result at given indices of the unrolled axes before `axis`."""
        if axis == len(self.out):
            return self._summed(at)
        label = self.out[axis]
        if label not in self.unrolled:
            return self._assembled(axis + 1, at)
        parts = [self._assembled(axis + 1, {**at, label: k}) for k in range(self.lengths[label])]
        return self.t.program.components(parts, axis)

    def _summed(self, at: dict[Hashable, int]) -> int:
        """Return the sum of products at given indices of the unrolled axes of the result."""
        labels = [label for label in self.lengths if label in self.unrolled and label not in self.out]
        places = product(*[range(self.lengths[label]) for label in labels])
        terms = [self._product(at | dict(zip(labels, place))) for place in places]
        total = reduce(partial(self._combined, np.add), terms)
        left, axes = total.shape[: len(self.out)], tuple(range(len(self.out), len(total.shape)))
        return self.t.reduce("add", left, total, axes) if self.folded else total.number

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
        return Value(self.t.program, self.t.program.view(x.number, tuple(map), tuple(shape)))

    def _combined(self, ufunc: np.ufunc, x: Value, y: Value) -> Value:
        shape = np.broadcast_shapes(x.shape, y.shape)
        return Value(self.t.program, self.t.computed(ufunc, [x, y], shape, self.dtype))


_Rule = Callable[..., Any]


def _where(t: _Translation, shape: Shape, dtype: np.dtype, condition: Any, x: Any, y: Any) -> int:
    return t.elementwise("where", choose, [condition, x, y], shape, dtype)


def _clip(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, a_min: Any = None, a_max: Any = None) -> int:
    for name, function, bound in (("at_least", _at_least, a_min), ("at_most", _at_most, a_max)):
        if bound is not None:
            x = Value(t.program, t.elementwise(name, function, [x, bound], shape, dtype))
    return x.number


def _at_least(x: Any, y: Any) -> Any:
    return choose(x <= y, y, x)


def _at_most(x: Any, y: Any) -> Any:
    return choose(x >= y, y, x)


def _reduced(name: str) -> _Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, *args: Any, **kwargs: Any) -> int:
        return t.reduce(name, shape, x, *args, **kwargs)

    return rule


def _mean(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, axis: Any = None, keepdims: Any = False) -> int:
    total = Value(t.program, t.reduce("add", shape, x, axis))
    count = math.prod(x.shape) // max(math.prod(shape), 1)
    if not count:
        raise Opaque
    return t.computed(np.divide, [total, float(count)], shape, dtype)


def _product(of_more_axes: _Rule | None = None) -> _Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, y: Any) -> int:
        if not (isinstance(x, Value) and isinstance(y, Value) and x.dtype == y.dtype):
            raise Opaque
        if not len(x.shape) == len(y.shape) == 1:
            if of_more_axes is None:
                raise Opaque
            return of_more_axes(t, shape, dtype, x, y)
        made = t.computed(np.multiply, [x, y], x.shape, dtype)
        return t.reduce("add", shape, Value(t.program, made))

    return rule


def _norm(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, ord: object = None, axis: Any = None) -> int:  # noqa: A002
    if ord is not None:
        raise Opaque
    square = Value(t.program, t.computed(np.multiply, [x, x], x.shape, dtype))
    total = Value(t.program, t.reduce("add", shape, square, axis))
    return t.computed(np.sqrt, [total], shape, dtype)


def _reshape(t: _Translation, shape: Shape, dtype: np.dtype, x: Value, *args: Any, order: Any = "C", **_: Any) -> int:
    if order not in ("C", None) or any(isinstance(arg, str) and arg != "C" for arg in args):
        raise Opaque
    return t.program.reshape(x.number, shape)


def _permuted(function: Callable) -> _Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, *args: Any, **kwargs: Any) -> int:
        ndim = len(x.shape)
        # In this array the stride of each axis is its number, so the strides of the result are its axes' former numbers.
        order = function(as_strided(np.empty(1), (1,) * ndim, range(ndim)), *args, **kwargs).strides
        return t.program.view(x.number, tuple([Axis(order.index(k), 1, 0) for k in range(ndim)]), shape)

    return rule


def _flip(along: int | None = None) -> _Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, axis: Any = along) -> int:
        ndim = len(shape)
        flipped = set(range(ndim)) if axis is None else axes_of(axis, ndim)
        map = tuple([Axis(k, -1, shape[k] - 1) if k in flipped else own for k, own in enumerate(identity(ndim))])
        return t.program.view(x.number, map, shape)

    return rule


def _same(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, *_: Any, **__: Any) -> int:
    if not isinstance(x, Value) or x.shape != shape or x.dtype != dtype:
        raise Opaque
    return x.number


def _filled(value: float) -> _Rule:
    def rule(t: _Translation, shape: Shape, dtype: np.dtype, *_: Any, **__: Any) -> int:
        return t.full(shape, value, dtype)

    return rule


def _diff(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, n: int = 1, axis: int = -1) -> int:
    for _ in range(n):
        lead = (slice(None),) * (axis % len(x.shape))
        ends = [Value(t.program, t.take(shape, dtype, x, (*lead, part))) for part in (slice(1, None), slice(None, -1))]
        x = Value(t.program, t.computed(np.subtract, ends, ends[0].shape, dtype))
    return x.number


def _split(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, sections: Any, axis: int = 0) -> list[int]:
    axis %= len(x.shape)
    split = np.array_split if isinstance(sections, (int, np.integer)) else np.split
    lengths = map(len, split(np.arange(x.shape[axis]), sections))
    return [t.program.slice(x.number, axis, *ends) for ends in pairwise(accumulate(lengths, initial=0))]


def _array_of(t: _Translation, shape: Shape, dtype: np.dtype, x: Any, *_: Any, **__: Any) -> int:
    made = t._array(x, dtype)
    return t.program.reshape(made.number, shape)


def _imag(t: _Translation, shape: Shape, dtype: np.dtype, x: Any) -> int:
    if not isinstance(x, Value) or x.dtype not in FLOATS:
        raise Opaque
    return t.full(shape, 0.0, dtype)


REDUCED = {np.add: "add", np.multiply: "multiply", np.maximum: "maximum", np.minimum: "minimum"}


SPLITTING = frozenset({np.split, np.array_split})


RULES: dict[Any, _Rule] = {
    take: _Translation.take, cast: _Translation.cast, with_entries: _Translation.with_entries, array_of: _array_of,
    np.where: _where, np.clip: _clip,
    np.sum: _reduced("add"), np.prod: _reduced("multiply"), np.max: _reduced("maximum"), np.amax: _reduced("maximum"),
    np.min: _reduced("minimum"), np.amin: _reduced("minimum"), np.mean: _mean, np.linalg.norm: _norm,
    np.dot: _product(_dot), np.vdot: _product(), np.inner: _product(_inner), np.matmul: _product(_matmul),
    np.einsum: _einsum, np.tensordot: _tensordot,
    np.reshape: _reshape, np.ravel: _reshape, np.squeeze: _reshape, np.expand_dims: _reshape, np.atleast_1d: _reshape,
    np.atleast_2d: _reshape, np.atleast_3d: _reshape,
    **{function: _permuted(function) for function in (np.transpose, np.swapaxes, np.moveaxis)},
    np.flip: _flip(), np.flipud: _flip(0), np.fliplr: _flip(1),
    np.copy: _same, np.real: _same, np.imag: _imag,
    np.broadcast_to: lambda t, shape, dtype, x, *_: t.broadcast_to(t.of(x, dtype), shape),
    np.zeros_like: _filled(0.0), np.empty_like: _filled(0.0), np.ones_like: _filled(1.0),
    np.full_like: lambda t, shape, dtype, x, value, *_, **__: t.full(shape, value, dtype),
    np.full: lambda t, shape, dtype, given, value, to: t.full(shape, value, dtype),
    np.concatenate: _Translation.join, np.stack: _Translation.stack, np.pad: _Translation.pad, np.roll: _Translation.roll,
    np.diff: _diff, np.split: _split, np.array_split: _split,
}  # fmt: skip
