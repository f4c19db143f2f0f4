"""From the steps of a trace to a program of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpiad._typing import Index, Shape
from mpiad.compiling.ufuncs import scalar_function
from mpiad.programs.array_program import BOOLEAN, COMPUTED, FLOATS, ArrayProgram, Call, Opaque, Slot, Value
from mpiad.programs.index_maps import Axis, axes_of, broadcast, of_key
from mpiad.programs.numpy_functions import REDUCED, RULES, SPLITTING
from mpiad.programs.recorder import Recorder
from mpiad.programs.steps import Constant, Ref, Step, Traced, mapped

_MOST_NUMBERS = 2**53  # up to this number integers are exact as floats
_NAMED: dict[str, Callable] = {}


def program_of(recorder: Recorder, parts: Sequence[Sequence[Any]]) -> ArrayProgram:
    """Return the program of a trace that has ended; its parts return values of the program, or constants."""
    made = Translation(recorder)
    for step in recorder.steps:
        made.step(step)
    made.program.outputs, made.program.logged = made.outputs([x for part in parts for x in part]), recorder.logged
    made.program.ends = list(accumulate(map(len, parts)))[:-1]
    return made.program


class Translation:
    """A program that is built from a trace, step by step; the rules of NumPy's functions append to it."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.program = recorder, ArrayProgram()
        self.nodes: dict[int, int] = {}
        for number in recorder.inputs:
            shape, dtype = recorder.specs[number]
            self.nodes[number] = self.program.input(shape, dtype)
            if number in recorder.weak:
                self.program.weak.add(self.nodes[number])

    def outputs(self, outputs: Sequence[Any]) -> list[int]:
        """Return the nodes of outputs."""
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
        """Append the nodes of a step."""
        program = self.program
        program.site, program.part = step.site, step.part
        args, kwargs = mapped(step.args, self._value), mapped(step.kwargs, self._value)
        specs = [self.recorder.specs[out] for out in step.outs]
        try:
            made = self._taken_apart(step, args, kwargs, specs)
        except Opaque:
            made = self._called(step, args, kwargs, specs)
        for out, number, (shape, dtype) in zip(step.outs, made, specs, strict=True):
            node = program.nodes[number]
            if (node.shape, node.dtype) != (shape, dtype):
                raise AssertionError(f"{step}: {node} is not of shape {shape} and dtype {dtype}")
            self.nodes[out] = number
            if out in self.recorder.weak:
                program.weak.add(number)

    def _taken_apart(self, step: Step, args: tuple, kwargs: dict, specs: list) -> list[int]:
        # Calls with complex or integer arrays are left to NumPy.
        if any(dtype not in COMPUTED for _, dtype in specs):
            raise Opaque
        if step.kind != "call" or len(specs) != 1 and step.fun not in SPLITTING:
            raise Opaque
        shape, dtype = specs[0]
        if isinstance(step.fun, np.ufunc) and scalar_function(step.fun) is not None and not kwargs:
            return [self.computed(step.fun, args, shape, dtype)]
        owner = getattr(step.fun, "__self__", None)
        if isinstance(owner, np.ufunc) and step.fun.__name__ == "reduce":
            return [self.reduce(REDUCED.get(owner), *_first_axis(args, kwargs), shape=shape)]
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

    # ---- operations used by rules

    def of(self, x: Any, dtype: np.dtype) -> Value:
        """Return an argument as a value that loops compute with."""
        if isinstance(x, Value):
            node = self.program.nodes[x.number]
            if node.dtype.kind in "iu" and node.kind == "constant":
                whole = self.program.constants[node.data]
                if np.abs(whole, dtype=float).max(initial=0) > _MOST_NUMBERS:
                    raise Opaque
                return Value(self.program, self.program.constant(whole.astype(np.float64)))
            if node.dtype.kind in "iu" and node.kind == "number":
                return Value(self.program, self.program.number(node.data, node.shape, np.float64))
            # An integer argument is read as the equal float.
            integer = node.kind == "input" and node.dtype.kind == "i" and not node.shape
            if not integer and not self.program.is_float(x.number):
                raise Opaque
            return x
        if isinstance(x, (bool, np.bool_)):
            return Value(self.program, self.program.number(bool(x), (), bool))
        if isinstance(x, (int, float, np.integer, np.floating)) and abs(x) < math.inf or isinstance(x, float):
            # A Python number has the precision of the array that it is combined with.
            kind = x.dtype if isinstance(x, np.floating) else dtype if dtype in FLOATS else np.dtype(np.float64)
            return Value(self.program, self.program.number(float(x), (), kind))
        raise Opaque

    def elementwise(self, name: str, function: Callable, args: Sequence[Any], shape: Shape, dtype: np.dtype) -> int:
        """Append an elementwise function."""
        if dtype not in COMPUTED:
            raise Opaque
        wide = dtype if dtype in FLOATS else np.result_type(*[x.dtype for x in args if isinstance(x, Value)], np.float32)
        given = [self.of(x, wide) for x in args]
        return self.program.elementwise([x.number for x in given], shape, dtype, (name, function))

    def computed(self, ufunc: np.ufunc, args: Sequence[Any], shape: Shape, dtype: np.dtype) -> int:
        """Append a NumPy ufunc."""
        function: Any = scalar_function(ufunc)
        return self.elementwise(ufunc.__name__, function, args, shape, dtype)

    def reduce(
        self, name: str | None, x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False,
        *, shape: Shape,
    ) -> int:  # fmt: skip
        """Append an array folded along axes."""
        if name is None or out is not None or not isinstance(x, Value) or x.dtype not in FLOATS:
            raise Opaque
        if dtype not in (None, x.dtype):
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
        """Append entries by a basic index."""
        if not isinstance(x, Value):
            raise Opaque
        map, made = of_key(x.shape, _in_full(key, len(x.shape)))
        return self.program.view(x.number, map, made)

    def transposed(self, x: Value, axes: Sequence[int]) -> int:
        """Append an array with its axes in another order."""
        place = {old: new for new, old in enumerate(axes)}
        map = tuple([Axis(place[k], 1, 0) for k in range(len(axes))])
        return self.program.view(x.number, map, tuple([x.shape[k] for k in axes]))

    def broadcast_to(self, x: Value, shape: Shape) -> int:
        """Append an array broadcast to a shape."""
        return self.program.view(x.number, broadcast(x.shape, shape), shape)

    def cast(self, shape: Shape, dtype: np.dtype, x: Any, *_: Any) -> int:
        """Append an array in another dtype."""
        if not isinstance(x, Value) or not self.program.is_float(x.number):
            raise Opaque
        if x.dtype == dtype:
            return x.number
        name, function = ("truth", lambda s: s.truth()) if dtype == BOOLEAN else ("cast", lambda s: s.as_number())
        return self.elementwise(name, _NAMED.setdefault(name, function), [x], shape, dtype)

    def join(self, shape: Shape, dtype: np.dtype, arrays: Any, axis: int | None = 0) -> int:
        """Append the concatenation of arrays."""
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
        """Append arrays joined along a new axis."""
        axis %= len(shape)
        parts = [self._array(x, dtype) for x in arrays]
        unit = _one(shape, axis)
        return self.program.join([self.program.reshape(x.number, unit) for x in parts], axis)

    def full(self, shape: Shape, value: Any, dtype: np.dtype) -> int:
        """Append an array of one number."""
        if isinstance(value, Value):
            return self.broadcast_to(self._array(value, np.dtype(dtype)), shape)
        if np.dtype(dtype) not in COMPUTED:
            raise Opaque
        return self.program.number(value, shape, dtype)

    def with_entries(self, x: Any, key: Index, value: Any) -> int:
        """Append an array with entries set by a basic index."""
        program = self.program
        if not self.program.is_float(x.number):
            raise Opaque
        map, made = of_key(x.shape, _in_full(key, len(x.shape)))
        if any(axis.source is not None and axis.stride != 1 and made[axis.source] > 1 for axis in map):
            raise Opaque
        # NumPy broadcasts the values to the entries that are set, and drops leading axes of length 1.
        value = self._array(value, x.dtype)
        while len(value.shape) > len(made) and value.shape[0] == 1:
            value = Value(program, program.reshape(value.number, value.shape[1:]))
        block = self.broadcast_to(value, made)
        unit = tuple([1 if axis.source is None else made[axis.source] for axis in map])
        return program.update(x.number, program.reshape(block, unit), [axis.offset for axis in map])

    def pad(
        self, shape: Shape, dtype: np.dtype, x: Value, widths: Any, mode: str = "constant", constant_values: Any = 0
    ) -> int:
        """Append an array padded with a number."""
        if mode != "constant" or isinstance(constant_values, (list, tuple, Value)) or not isinstance(x, Value):
            raise Opaque
        before = np.broadcast_to(np.asarray(widths), (len(x.shape), 2))[:, 0].tolist()
        return self.program.update(self.full(shape, constant_values, dtype), x.number, before)

    def roll(self, shape: Shape, dtype: np.dtype, x: Value, shift: Any, axis: Any = None) -> int:
        """Append an array whose entries are rolled along axes."""
        if axis is None:
            flat = Value(self.program, self.program.reshape(x.number, (math.prod(x.shape),)))
            return self.program.reshape(self.roll(flat.shape, dtype, flat, shift, 0), shape)
        pairs = np.broadcast(np.asarray(shift), np.asarray(axis))
        for by, along in [(int(a), int(b)) for a, b in pairs]:
            along %= len(shape)
            n = shape[along]
            by = by % n if n else 0
            if by:
                lead = (slice(None),) * along
                ends = [self.take(shape, dtype, x, (*lead, part)) for part in (slice(n - by, None), slice(0, n - by))]
                x = Value(self.program, self.program.join(ends, along))
        return x.number


def _one(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _first_axis(args: tuple, kwargs: dict) -> tuple:
    # ufunc.reduce folds along the first axis if none is given.
    given = dict(zip(("x", "axis", "dtype", "out", "keepdims"), args)) | kwargs
    if given.get("dtype") is not None or given.get("out") is not None or "initial" in given or "where" in given:
        raise Opaque
    return given["x"], given.get("axis", 0), None, None, given.get("keepdims", False)


def _in_full(key: Index, ndim: int) -> list[Any]:
    """Return a basic index with one entry per axis."""
    parts = list(key) if type(key) is tuple else [key]
    if not all(
        part is None or part is Ellipsis or (isinstance(part, (int, np.integer)) and not isinstance(part, bool))
        or (isinstance(part, slice) and all(isinstance(x, (int, np.integer, type(None))) for x in _bounds(part)))
        for part in parts
    ):  # fmt: skip
        raise Opaque
    if Ellipsis not in [part if part is Ellipsis else None for part in parts]:
        parts.append(Ellipsis)
    place = next(k for k, part in enumerate(parts) if part is Ellipsis)
    missing = ndim - sum(part is not None for part in parts) + 1
    return [*parts[:place], *[slice(None)] * missing, *parts[place + 1 :]]


def _bounds(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step
