"""Translation of the steps of a trace to a program of arrays.

A `_Translation` appends the nodes of each step to the program. `_RULES` and `compiling.numpy_functions` have a rule for
each NumPy function that compiled loops can compute. Other functions, and arguments that a rule doesn't support, become
calls of NumPy on whole arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import numpy as np

from mpiad._typing import Array, Index, Shape
from mpiad.compiling.numpy_functions import Rule, Unsupported, rule_of, scalar_function
from mpiad.compiling.program import Builder
from mpiad.compiling.symbols import Symbol, choose
from mpiad.differentiation.rules.padding import COPYING
from mpiad.differentiation.segment_sum import Segments, summed_by_segment
from mpiad.primitives.catalogue import EXCHANGE, IRECV, RECV, WAIT
from mpiad.programs.absorbed_sums import with_sums_absorbed
from mpiad.programs.array_program import (
    BOOLEAN,
    COMPUTED,
    PRECISIONS,
    SHORT,
    ArrayProgram,
    Axis,
    IndexMap,
    Slot,
    Value,
    of_view,
    without_memory,
)
from mpiad.programs.fusion import LEAST_SHARE, LEAST_UNREAD, unread, working_in_place
from mpiad.programs.number_conditions import MOST_NUMBERS
from mpiad.programs.recorder import Recorder
from mpiad.programs.traced_array import (
    PYTHON_OPERATORS,
    Constant,
    Ref,
    Step,
    TracedArray,
    added_at,
    array_of,
    cast,
    mapped,
    quotient,
    scale_of,
    take,
    with_entries,
)
from mpiad.transport.devices.device_arrays import is_device_array

# Functions of Python's integers that loops compute with floats; see `number_conditions`.
_OF_INTEGERS = PYTHON_OPERATORS.keys() - {np.true_divide, np.power}


def program_of(recorder: Recorder, parts: Sequence[Sequence[Any]], kept: Iterable[int] = ()) -> ArrayProgram:
    """Return the program of a trace; `parts`: the values that each part returns; `kept`: see `ArrayProgram`."""
    made = _Translation(recorder)
    for step in recorder.steps:
        made.step(step)
    outputs = [x for part in parts for x in part]
    made.program.outputs = made.outputs(outputs)
    if recorder.device is None:
        made.program.kept = frozenset(kept)
    else:  # outputs that only other programs read are new arrays, too
        made.program.on_host = {made.nodes[number] for number in recorder.on_host & made.nodes.keys()}
    made.program.ends = list(accumulate(map(len, parts)))[:-1]
    return made.program if recorder.exact else with_sums_absorbed(made.program)


class _Translation:
    """A program that is built from a trace, step by step: the `Translator` of rules, which append nodes to it."""

    kind = Value

    def __init__(self, recorder: Recorder):
        self.recorder, self.program = recorder, ArrayProgram()
        self.program.device = recorder.device
        self.nodes: dict[int, int] = {number: self.program.constant(x) for number, x in recorder.captured.items()}
        self._floats: dict[int, int] = {}  # see `_as_float`
        self._is_single = any(dtype in (np.float32, np.complex64) for _, dtype in recorder.specs)
        for number in recorder.inputs:
            shape, dtype = recorder.specs[number]
            self.nodes[number] = self.program.input(shape, dtype)
            if number in recorder.weak:
                self.program.weak.add(self.nodes[number])
        # Checked indices, by the node of the array, the length of the axis, and the use as in `checked_indices`. Arguments
        # are checked before all loops, and once for all their uses.
        self._indices: dict[tuple[int, int, int | None], int] = {}
        uses: dict[tuple[int, int], list[int | None]] = {}
        for step in recorder.steps:
            number, length, use = self._index_of(step)
            if number in recorder.inputs:
                uses.setdefault((self.nodes[number], length), []).append(use)
        for (n, length), found in uses.items():
            made = self._checked(n, length, *dict.fromkeys(found))
            self._indices |= {(n, length, use): made for use in found}

    def _index_of(self, step: Step) -> tuple[int, int, int | None]:
        """Return the traced array of indices of a step, the length of its axis, and its use; -1, 0, None if none."""
        recorder = self.recorder
        axis, index = None, Ref(-1)
        if step.fun in (take, added_at):
            axis, index = _array_in(step.args[1])
        elif step.fun is summed_by_segment:
            index = step.args[1]
        if type(index) is not Ref or index.number < 0 or not is_index(*recorder.specs[index.number]):
            return -1, 0, None
        x = step.args[0]
        shape = recorder.specs[x.number][0] if type(x) is Ref else recorder.constants[x.number].shape
        return index.number, step.args[2] if axis is None else shape[axis], axis

    def _checked(self, n: int, length: int, *uses: int | None) -> int:
        """Append a call that checks indices; those of a constant are checked now."""
        program, node = self.program, self.program.nodes[n]
        dtype = np.dtype(np.int32 if length < 2**31 else np.int64)
        if node.kind == "constant" and not is_device_array(program.constants[node.data]):
            return program.constant(checked_indices(program.constants[node.data], length, dtype, *uses))
        checked = checked_indices if program.device is None else wrapped_indices
        call = Step("call", checked, (Slot(0), length, dtype, *uses), {}, (), program.site)  # type: ignore[arg-type]
        return program.add("call", [n], node.shape, dtype, call)

    def indices(self, x: Any, length: int, use: int | None) -> int:
        """Return the node of checked indices; raise Unsupported for anything but an array of integers."""
        if not isinstance(x, Value) or not is_index(x.shape, x.dtype):
            raise Unsupported
        key = x.number, length, use
        if key not in self._indices:
            self._indices[key] = self._checked(*key)
        return self._indices[key]

    def outputs(self, outputs: Sequence[Any]) -> list[int]:
        program, found = self.program, []
        for x in outputs:
            if isinstance(x, TracedArray) and x.stale is not None:
                raise TypeError("it returns an array whose memory has been changed in place through another name (a view)")
            found.append(self.nodes[x.number] if isinstance(x, TracedArray) else program.constant(np.asarray(x)))
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
        # Loops don't compute integer arrays.
        if step.kind != "call" or any(dtype not in COMPUTED for _, dtype in specs):
            raise Unsupported
        rule = (_RULES.get(step.fun) or rule_of(step.fun)) if len(specs) == 1 or step.fun in SPLITTING else None
        if rule is None:
            raise Unsupported
        self.shape, self.dtype = specs[0]
        try:
            made = rule(self, *args, **kwargs)
        except TypeError as error:  # arguments that the rule doesn't support
            raise Unsupported from error
        return [x.number for x in made] if isinstance(made, list) else [made.reshape(self.shape).number]

    def _called(self, step: Step, args: tuple, kwargs: dict, specs: list) -> list[int]:
        program, found = self.program, []
        kind = "call" if step.kind == "call" else "communicate"

        def slot(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            found.append(x.number)
            return Slot(len(found) - 1)

        data = step._replace(args=mapped(args, slot), kwargs=mapped(kwargs, slot))
        single = len(specs) == 1 and step.fun not in SPLITTING and step.kind != "opaque"
        shape, dtype = specs[0] if single else ((), np.dtype(bool if specs else object))
        number = program.add(kind, found, shape, dtype, data)
        call: Any = program.nodes[found[0]].data if step.fun is WAIT and found else data
        receives = isinstance(call, Step) and call.fun in (EXCHANGE, IRECV, RECV)
        if receives and single and dtype.kind != "O" and call.args[1].source is None:  # nobody sends an array
            return [program.number(0, shape, dtype) if dtype in COMPUTED else program.constant(np.zeros(shape, dtype))]
        if single or not specs:
            return [self._read_in_place(number)] if specs else []
        return [program.add("item", (number,), shape, dtype, place) for place, (shape, dtype) in enumerate(specs)]

    def _read_in_place(self, n: int) -> int:
        """Return an array with a halo: if the operator only fills the halo of an argument, the rest is that argument."""
        # The schedule decides whether loops read the argument, or a copy within the halo.
        program, node = self.program, self.program.nodes[n]
        operator = working_in_place(node)
        if operator is None or operator.changes_given or program.device is not None:
            return n
        (x,), starts = node.inputs, operator.given(*node.data.args[1:])
        shape, lead = program.nodes[x].shape, len(node.shape) - len(starts)
        entries = math.prod([end - start for start, end in unread(node, shape)])
        if not self._is_argument(x, lead) or entries < max(LEAST_UNREAD, LEAST_SHARE * math.prod(shape)):
            return n
        return program.add("update", (n, x), node.shape, node.dtype, (*[0] * lead, *starts))

    def _is_argument(self, n: int, lead: int) -> bool:
        """Return whether a node is an argument of the program, a view of one, or joins such nodes along a leading axis."""
        node = self.program.nodes[n]
        if node.kind == "join" and node.data < lead:
            return all(self._is_argument(x, 0) for x in node.inputs)
        return node.kind in ("input", "constant") or node.kind == "view" and self._is_argument(node.inputs[0], 0)

    def _value(self, x: Any) -> Any:
        if type(x) is Ref:
            return self.value(self.nodes[x.number])
        if type(x) is Constant:
            return self.value(self.program.constant(self.recorder.constants[x.number]))
        return x

    def of(self, x: Any, dtype: np.dtype) -> Value:
        """Return an argument as a node that loops can read; a Python number gets `dtype` if that is a float dtype."""
        if isinstance(x, Value):
            node = self.program.nodes[x.number]
            if node.dtype.kind in "iu" and node.kind == "constant":
                whole = self.program.constants[node.data]
                if is_device_array(whole):
                    raise Unsupported
                if np.abs(whole, dtype=float).max(initial=0) > MOST_NUMBERS:
                    raise Unsupported
                return self.value(self.program.constant(whole.astype(np.float64)))
            if node.dtype.kind in "iu" and not node.shape:
                return self._as_float(x.number)
            if x.dtype not in COMPUTED:
                raise Unsupported
            return x
        if isinstance(x, (bool, np.bool_)):
            return self.value(self.program.number(bool(x), (), bool))
        if isinstance(x, (int, np.integer, np.inexact)) and abs(x) < math.inf or isinstance(x, (float, complex)):
            # A Python number takes the precision of the other operand.
            real = PRECISIONS.get(dtype, np.dtype(float))
            kind = np.result_type(real, np.complex64) if isinstance(x, complex) else real
            return self.value(self.program.number(x, (), x.dtype if isinstance(x, np.inexact) else kind))
        raise Unsupported

    def _as_float(self, n: int) -> Value:
        """Return an integer as a float, which loops compute if it is a Python number such as that of a later step."""
        program, node = self.program, self.program.nodes[n]
        if node.kind == "input" and node.dtype.kind == "i":  # loops read it as a float
            return self.value(n)
        if n not in self._floats:
            step: Any = node.data
            source = [program.nodes[x] for x in node.inputs]
            if node.kind == "call" and step.fun is take and [(x.kind, x.dtype.kind) for x in source] == [("input", "i")]:
                made = _take(self, self.value(node.inputs[0]), step.args[1])
            elif n in program.weak and node.kind == "call" and step.fun in _OF_INTEGERS and not self._is_single:
                args = [self._as_float(node.inputs[x.place]) if type(x) is Slot else float(x) for x in step.args]
                dtype, self.dtype = self.dtype, np.dtype(float)
                made = self.computed(step.fun, *args)
                self.dtype = dtype
            else:
                call = Step("call", np.add, (Slot(0), 0.0), {}, (), program.site)  # type: ignore[arg-type]
                made = self.value(program.add("call", [n], (), np.dtype(np.float64), call))
            self._floats[n] = made.number
        return self.value(self._floats[n])

    def value(self, number: int) -> Value:
        """Return a node as a value."""
        return Value(self.program, number)

    def elementwise(self, name: str, function: Callable[..., Symbol], *args: Array) -> Value:
        """Append an elementwise function of arguments, which are broadcast."""
        if self.dtype not in COMPUTED:
            raise Unsupported
        dtypes = [self.dtype] if self.dtype in PRECISIONS else [x.dtype for x in args if isinstance(x, Value)]
        given = [self.of(x, np.result_type(*dtypes, np.float32)) for x in args]
        if any(x.dtype.kind == "c" for x in given):  # not all functions are implemented for complex numbers
            symbol = Symbol(builder := Builder(), builder.input("x"))
            function(*[symbol.of_kind(x.dtype.kind) for x in given])
        shape = np.broadcast_shapes(*[x.shape for x in given])
        return self.value(self.program.elementwise([x.number for x in given], shape, self.dtype, (name, function)))

    def computed(self, ufunc: np.ufunc, *args: Array) -> Value:
        """Append a ufunc."""
        function: Any = scalar_function(ufunc)
        return self.elementwise(ufunc.__name__, function, *args)

    def reduce(
        self, name: str, x: Array, axis: Any = None, dtype: object = None, out: None = None, keepdims: bool = False
    ) -> Value:
        """Append a reduction, without the axes of length 1 that `keepdims` adds; see `_translated_by_rule`."""
        # The recorder refuses `out`, and reductions of numbers.
        if name == "add" and x.dtype == BOOLEAN and dtype == self.dtype in PRECISIONS:
            x = self.elementwise("cast", Symbol.as_number, x)
        if x.dtype not in PRECISIONS or dtype not in (None, x.dtype) or x.dtype.kind == "c" and name != "add":
            raise Unsupported
        ndim = len(x.shape)
        axes = tuple(sorted({int(k) % ndim for k in (np.atleast_1d(axis) if ndim and axis is not None else range(ndim))}))
        if name.startswith("logical") or name not in ("add", "multiply") and not math.prod(x.shape):
            raise Unsupported
        if not axes:
            return x
        if not math.prod(x.shape):
            return self.full(float(name == "multiply"))
        left = tuple([n for k, n in enumerate(x.shape) if k not in axes])
        node = self.program.nodes[x.number]
        if node.kind == "join" and axes == (node.data,) and len(node.inputs) == node.shape[node.data] <= SHORT:
            # The reduction of stacked arrays is an elementwise function of them.
            return reduce(partial(self.computed, getattr(np, name)), [self.value(y).reshape(left) for y in node.inputs])
        return self.value(self.program.add("reduce", (x.number,), left, x.dtype, (name, axes)))

    def full(self, value: Array) -> Value:
        """Append an array of equal entries, or a broadcast value."""
        if isinstance(value, Value):
            return self.array(value).broadcast_to(self.shape)
        if self.dtype not in COMPUTED:
            raise Unsupported
        return self.value(self.program.number(value, self.shape, self.dtype))

    def array(self, x: Array) -> Value:
        """Return nested lists of values and numbers as a value with the dtype of the call."""
        if isinstance(x, (list, tuple)):
            return _stack(self, x)
        return _cast(self, self.of(x, self.dtype), self.dtype)

    def join(self, parts: Iterable[Value], axis: int) -> Value:
        """Append the concatenation of arrays along an axis."""
        return self.value(self.program.join([x.number for x in parts], axis))


def is_index(shape: Shape, dtype: np.dtype) -> bool:
    """Return whether an array may be an array of indices."""
    return bool(shape) and dtype.kind in "iu"


def _array_in(key: Any) -> tuple[int, Any]:
    """Return the axis and the index in a key of one index and otherwise full slices; for other keys -1, None."""
    parts = key if type(key) is tuple else (key,)
    found = [pair for pair in enumerate(parts) if not (type(pair[1]) is slice and pair[1] == slice(None))]
    return found[0] if len(found) == 1 else (-1, None)


def checked_indices(indices: Array, length: int, dtype: np.dtype, *uses: int | None) -> Array:
    """Return indices from 0 to length - 1 for loops; `uses`: the axes of gathers, and None for a segment sum."""
    wide = indices if indices.dtype.itemsize >= dtype.itemsize else indices.astype(dtype)
    # As unsigned numbers, negative ones are large.
    if wide.size and wide.view(f"u{wide.dtype.itemsize}").max() >= length:
        for axis in uses:
            if axis is None:
                Segments(wide, length).require_range()
            else:  # NumPy raises its error
                np.broadcast_to(np.int8(0), (*[1] * axis, length))[(*[slice(None)] * axis, indices)]
        wide = np.where(wide < 0, wide + length, wide)
    return wide.astype(dtype)


def wrapped_indices(indices: Array, length: int, dtype: np.dtype, *uses: int | None) -> Array:
    """Return indices on a device from 0 to length - 1; as in CuPy, others are taken modulo the length."""
    return np.remainder(indices, max(length, 1)).astype(dtype)


def _scale(t: _Translation, x: Array, dtype: np.dtype) -> Value:
    small, large = (float(scale_of(number, dtype)) for number in (0.0, math.inf))
    tiny = float(np.finfo(dtype).tiny)

    def scale(x: Symbol) -> Symbol:
        return choose(abs(x) > 1 / tiny, large, choose(abs(x) < tiny, small, 1.0))

    return t.elementwise("scale", scale, x)


def _quotient(t: _Translation, x: Array, inverse: Array) -> Value:
    # Its name makes it as expensive as a quotient in `fusion`, so that it isn't computed again.
    return t.elementwise("divide", scalar_function(np.multiply), x, inverse)  # type: ignore[arg-type]


def _take(t: _Translation, x: Array, key: Index) -> Value:
    axis, index = _array_in(key)
    if isinstance(index, Value) and index.shape:
        return t.value(t.program.gather(_computed(x).number, t.indices(index, x.shape[axis], axis), axis))
    return _value(x).view(*_of_key(x, key))


def _of_key(x: Value, key: Index) -> tuple[IndexMap, Shape]:
    """Return the map of a basic index, and the shape of the result; raise Unsupported for another kind of index."""
    parts: tuple[Any, ...] = key if type(key) is tuple else (key,)
    numbers: list[Any] = []
    for part in parts:
        numbers += [part.start, part.stop, part.step] if isinstance(part, slice) else [None if part is Ellipsis else part]
    if not all(isinstance(k, (int, np.integer, type(None))) and not isinstance(k, bool) for k in numbers):
        raise Unsupported
    whole = without_memory(x.shape)
    part = whole[parts if any(part is Ellipsis for part in parts) else (*parts, ...)]
    map = of_view(whole, part)
    if len(part.shape) == len(map):
        # Along axes of length 1, indices are zero. So ``x[key] += y`` reads x at the index at which it writes.
        map = tuple([Axis(k, 1, axis.offset) if n == 1 else axis for k, (axis, n) in enumerate(zip(map, part.shape))])
    return map, part.shape


def _viewed(function: Callable) -> Rule:
    def rule(t: _Translation, x: Array, *args: Any, **kwargs: Any) -> Any:
        whole = without_memory(_value(x).shape)
        made = function(whole, *args, **kwargs)
        views = [x.view(of_view(whole, part), part.shape) for part in (made if isinstance(made, list) else [made])]
        return views if isinstance(made, list) else views[0]

    return rule


def _cast(t: _Translation, x: Array, dtype: np.dtype) -> Value:
    # If a cast drops imaginary parts, NumPy warns.
    if _value(x).dtype not in COMPUTED or x.dtype.kind == "c" and dtype.kind == "f":
        raise Unsupported
    name, function = ("truth", Symbol.truth) if dtype == BOOLEAN else ("cast", Symbol.as_number)
    return x if x.dtype == dtype else t.elementwise(name, function, x)


def _concatenate(t: _Translation, arrays: Any, axis: int | None = 0) -> Value:
    parts = [t.array(x) for x in arrays]
    if axis is None:
        parts, axis = [x.reshape((math.prod(x.shape),)) for x in parts], 0
    return t.join(parts, axis % len(parts[0].shape))


def _stack(t: _Translation, arrays: Any, axis: int = 0) -> Value:
    parts = [t.array(x) for x in arrays]
    shape = parts[0].shape
    axis %= len(shape) + 1
    return t.join([x.reshape((*shape[:axis], 1, *shape[axis:])) for x in parts], axis)


def _with_entries(t: _Translation, x: Array, key: Index, value: Any) -> Value:
    if x.dtype not in COMPUTED:
        raise Unsupported
    map, made = _of_key(x, key)
    if any(axis.source is not None and axis.stride != 1 for axis in map):
        raise Unsupported
    if not math.prod(made):
        return x
    # As in NumPy, leading axes of length 1 of the value are dropped, and the value is broadcast.
    value = t.array(value)
    while len(value.shape) > len(made) and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    unit = tuple([made[axis.source] if isinstance(axis.source, int) else 1 for axis in map])
    block = value.broadcast_to(made).reshape(unit)
    return t.value(t.program.update(x.number, block.number, [axis.offset for axis in map]))


def _pad(t: _Translation, x: Array, widths: Any, mode: str = "constant", constant_values: Any = 0) -> Value:
    shape, is_constant = _value(x).shape, mode == "constant" and not isinstance(constant_values, (list, tuple, Value))
    if isinstance(widths, dict) or not is_constant and mode not in COPYING:
        raise Unsupported
    pairs = np.broadcast_to(np.asarray(widths), (len(shape), 2)).tolist()
    if is_constant:
        return t.value(t.program.update(t.full(constant_values).number, x.number, [before for before, _ in pairs]))
    for axis, (pair, n) in enumerate(zip(pairs, shape)):
        runs = _runs_of(pair, n, mode)
        if len(runs) > SHORT:
            raise Unsupported
        x = t.join([x.run(axis, *run) for run in runs], axis)
    return x


def _runs_of(width: tuple[int, int], n: int, mode: Any) -> list[tuple[int, int, int]]:
    """Return the sources of the layers along a padded axis as runs: first index, step (-1, 0 or 1) and count."""
    # Padding the array of indices gives the source of each layer. The array itself is one of the runs.
    source = np.pad(np.arange(n), width, mode).tolist()
    return [*_runs(source[: width[0]]), (0, 1, n), *_runs(source[width[0] + n :])]


def _runs(indices: list[int]) -> list[tuple[int, int, int]]:
    found = list[tuple[int, int, int]]()
    for k in indices:
        first, step, count = found[-1] if found else (k, 1, 0)
        step = k - first if count == 1 else step
        if count and abs(step) < 2 and k == first + step * count:
            found[-1] = first, step, count + 1
        else:
            found.append((k, 1, 1))
    return found


def _roll(t: _Translation, x: Value, shift: Any, axis: Any = None) -> Value:
    if axis is None:
        return _roll(t, x.reshape((math.prod(x.shape),)), shift, 0)
    for by, along in [(int(a), int(b)) for a, b in np.broadcast(np.asarray(shift), np.asarray(axis))]:
        along %= len(x.shape)
        n = x.shape[along]
        by = by % n if n else 0
        if by:
            x = t.join([x.slice(along, n - by, n), x.slice(along, 0, n - by)], along)
    return x


def _added_at(t: _Translation, x: Array, key: Index, values: Array) -> Value:
    _require_host(t)
    axis, index = _array_in(key)
    indices = t.indices(index, _computed(x).shape[axis], axis)
    whole = t.array(values).broadcast_to((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))
    sums = t.value(t.program.segment_sum(whole.number, indices, axis, x.shape[axis]))
    node = t.program.nodes[x.number]
    return sums if node.kind == "number" and not node.data else t.computed(np.add, x, sums)


def _require_host(t: _Translation) -> None:
    """Raise Unsupported on a device, where sums of segments in a loop would be atomic; the functions have a fixed order."""
    if t.program.device is not None:
        raise Unsupported


def _segment_sum(t: _Translation, x: Array, index: Value, count: int) -> Value:
    _require_host(t)
    return t.value(t.program.segment_sum(_computed(x).number, t.indices(index, count, None), 0, count))


def _computed(x: Any) -> Value:
    if _value(x).dtype not in PRECISIONS:
        raise Unsupported
    return x


def _value(x: Any) -> Value:
    if not isinstance(x, Value):
        raise Unsupported
    return x


def _product(t: _Translation, x: Array, y: Array) -> Value:
    """Return the inner product of vectors; products of arrays with more axes are calls of NumPy."""
    if not (isinstance(x, Value) and isinstance(y, Value) and x.dtype == y.dtype and len(x.shape) == len(y.shape) == 1):
        raise Unsupported
    return t.reduce("add", t.computed(np.multiply, x, y))


def _matrix_product(t: _Translation, x: Array, y: Array) -> Value:
    """Return `_product`; for an array of matrices and a matrix, one product of two matrices instead of one for each."""
    if not (isinstance(x, Value) and isinstance(y, Value) and t.dtype in PRECISIONS and len(x.shape) > len(y.shape) == 2):
        return _product(t, x, y)
    x, y = t.array(x), t.array(y)  # a matrix may consist of integers
    rows, flat = math.prod(x.shape[:-1]), Step("call", np.matmul, (Slot(0), Slot(1)), {}, (), t.program.site)  # type: ignore[arg-type]
    numbers = x.reshape((rows, x.shape[-1])).number, y.number
    return t.value(t.program.add("call", numbers, (rows, y.shape[1]), t.dtype, flat))


def _reshape(t: _Translation, x: Value, *args: Any, order: Any = "C", **_: Any) -> Value:
    if order not in ("C", None) or any(isinstance(arg, str) and arg != "C" for arg in args):
        raise Unsupported
    return x.reshape(t.shape)


def _conjugate_product(t: _Translation, x: Array, y: Array) -> Value:
    return _product(t, t.computed(np.conjugate, x) if t.dtype.kind == "c" else x, y)


def _diff(t: _Translation, x: Array, n: int = 1, axis: int = -1) -> Value:
    for _ in range(n):
        axis %= len(x.shape)
        length = x.shape[axis]
        x = t.computed(np.subtract, x.slice(axis, min(1, length), length), x.slice(axis, 0, max(length - 1, 0)))
    return x


SPLITTING = frozenset({np.split, np.array_split})
_VIEWING = np.transpose, np.swapaxes, np.moveaxis, np.rollaxis, np.flip, np.flipud, np.fliplr, np.rot90, *SPLITTING
_RESHAPING = np.reshape, np.ravel, np.squeeze, np.expand_dims, np.atleast_1d, np.atleast_2d, np.atleast_3d

_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_RESHAPING, _reshape), **{function: _viewed(function) for function in _VIEWING},
    take: _take, added_at: _added_at, summed_by_segment: _segment_sum, cast: _cast, with_entries: _with_entries,
    scale_of: _scale, quotient: _quotient, array_of: lambda t, x, *_, **__: t.array(x),
    np.dot: _matrix_product, np.matmul: _matrix_product, np.inner: _product, np.vdot: _conjugate_product,
    np.copy: lambda t, x, *_, **__: _value(x), np.broadcast_to: lambda t, x, *_: t.full(x),
    np.concatenate: _concatenate, np.stack: _stack, np.pad: _pad, np.roll: _roll, np.diff: _diff,
}  # fmt: skip
