"""The memory of one trajectory in a kernel: the fields of a lane, and the layout of the buffers that contain them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import aligned
from mpiad.compiling.folding import Expression, expression
from mpiad.ensemble.compiled.kernel_spec import KernelSpec

# The types of a kernel's arguments.
Reals: TypeAlias = Array
Reals2: TypeAlias = Array
Reals3: TypeAlias = Array
Reals4: TypeAlias = Array
Doubles: TypeAlias = Array
Doubles2: TypeAlias = Array
Doubles3: TypeAlias = Array
Integers: TypeAlias = Array
Integers2: TypeAlias = Array
Words2: TypeAlias = Array
Bytes: TypeAlias = Array
Booleans: TypeAlias = Array
Number: TypeAlias = Array
_DTYPES = {"Doubles": "float64", "Integers": "int64", "Words": "int32", "Bytes": "int8", "Booleans": "boolean"}


def signature_of(arguments: type, dtype: np.dtype) -> str:
    """Return the signature of a kernel for states of a real dtype, given the annotated names of its arguments."""
    kinds = []
    for annotation in arguments.__annotations__.values():
        name = annotation.__forward_arg__
        axes = ", ".join([":"] * (int(name[-1]) - 1 if name[-1].isdigit() else 0) + ["::1"])
        kinds.append("float64" if name == "Number" else f"{_DTYPES.get(name.rstrip('234'), dtype.name)}[{axes}]")
    return f"void({', '.join(kinds)})"


class FieldKind(NamedTuple):
    """The declaration of a field."""

    # The axes of an array, as names of numbers in `sizes_of`; a field without axes is one number.
    axes: tuple[str, ...]
    exact: bool  # whether it is double, also if states are float32
    integer: bool  # whether it is a whole number, which as a double would take more registers of a GPU
    is_sum: bool  # whether it is exact in CPU kernels only


def field(*axes: str, exact: bool = False, integer: bool = False, is_sum: bool = False) -> Array:
    """Declare a field of a lane."""
    return FieldKind(axes, exact, integer, is_sum)


def sizes_of(spec: KernelSpec) -> dict[str, int]:
    """Return the lengths of the axes of fields."""
    return {
        "components": spec.d, "parameters": spec.varying, "stages": spec.stages + 1, "directions": len(spec.directions),
        "events": len(spec.events), "wanted_varying": spec.wanted_varying, "wanted_shared": spec.wanted_shared,
        "inside": (spec.stages + 1) * spec.inside, "timed": (spec.stages + 1) * spec.timed,
        "jacobian": (len(spec.jacobian) + len(spec.slopes)) * spec.timed,
    }  # fmt: skip


class Field:
    """An array with one number, or several, per lane: the entries for one lane."""

    def __init__(self, buffer: Array, offset: int, shape: tuple[int, ...], lanes: int, lane: int):
        self._buffer, self._offset, self._lanes, self._lane = buffer, offset, lanes, lane
        self._strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def _place(self, index: int | tuple[int, ...]) -> int:
        fixed, moving = self._offset, None
        for i, stride in zip(index if isinstance(index, tuple) else (index,), self._strides, strict=True):
            if isinstance(i, Expression):
                scaled = i * stride if stride > 1 else i
                moving = scaled if moving is None else moving + scaled
            else:
                fixed += int(i) * stride
        if moving is None:
            return fixed * self._lanes + self._lane if fixed else self._lane
        return (fixed + moving) * self._lanes + self._lane

    def __getitem__(self, index: int | tuple[int, ...]) -> float:
        return self._buffer[self._place(index)]

    def __setitem__(self, index: int | tuple[int, ...], value: float) -> None:
        self._buffer[self._place(index)] = value

    @property
    def start(self) -> Array:
        """The part of the buffer that begins with the field, for all lanes."""
        return self._buffer[self._offset * self._lanes : self._buffer.size]


class Lane:
    """The fields of one lane. Those without axes are attributes, which can be assigned to.

    `column`: the arguments of f for the place of the trajectory in arrays of parameters. `index`: that of the lane.
    """

    column: Sequence[Array]
    index: int

    def __init__(self, fields: Mapping[str, Array], numbers: Mapping[str, Array], column: Sequence[Array], index: int = 0):
        object.__setattr__(self, "_numbers", numbers)
        vars(self).update(fields, column=column, index=index)

    def __getattribute__(self, name: str) -> Array:
        numbers = object.__getattribute__(self, "_numbers")
        return numbers[name][()] if name in numbers else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: float) -> None:
        self._numbers[name][()] = value


class Layout:
    """The places of the fields of a kernel in its buffers, of which all lanes are at constant offsets."""

    def __init__(self, spec: KernelSpec, lane: type[Lane], reserved: int = 0, sizes: Mapping[str, int] | None = None):
        # `reserved`: the number of entries at the end of the buffer that the lanes use one after the other. `sizes`: the
        # lengths of further axes.
        self.lanes, self._sizes = spec.lanes, {**sizes_of(spec), **(sizes or {})}
        self._places: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        # All fields are at constant offsets in one buffer, so the compiler knows that they don't overlap. Doubles such as
        # times are in a second one, `exact`, if states are float32.
        self.counts = {"b": 0, "exact": 0}
        for name, kind in vars(lane).items():
            if isinstance(kind, FieldKind):
                buffer, shape = "exact" if kind.exact and spec.single else "b", self.shape_of(kind)
                self._places[name] = buffer, self.counts[buffer], shape
                self.counts[buffer] += math.prod(shape)
        self.reserved = self.counts["b"] * spec.lanes
        self.counts["b"] += -(-reserved // spec.lanes)
        self._lane = lane
        # Fields that are integers, annotated as such, are in the array `places`.
        self._integers = [name for name, kind in lane.__annotations__.items() if kind == "int"]

    def shape_of(self, kind: FieldKind) -> tuple[int, ...]:
        """Return the shape of a field."""
        return tuple(self._sizes[axis] for axis in kind.axes)

    def buffers(self, dtype: np.dtype, copies: int = 1) -> tuple[Array, Array]:
        """Return the buffers `b`, of the given dtype, and `exact`, of doubles, each for several copies of all lanes."""
        b, exact = (copies * self.counts[buffer] * self.lanes for buffer in ("b", "exact"))
        return aligned(b, dtype), aligned(exact, np.dtype(float))

    def integers(self) -> tuple[Array, Array]:
        """Return the arrays `ids`, the trajectories of the lanes, or -1, and `places`, the integers of all lanes."""
        return np.full(self.lanes, -1), np.zeros(len(self._integers) * self.lanes, np.int64)

    def lane(self, arrays: Array, l: int, copy: int | None = None) -> Array:
        """Return lane l, given the arguments of a kernel; `copy`: of the copies in the buffers `along`."""
        buffers = {"b": arrays.b, "exact": arrays.exact}
        if copy is not None:
            buffers = {"b": arrays.along, "exact": arrays.along_exact}
        fields, numbers = dict[str, Field](), dict[str, Field]()
        for name, (buffer, offset, shape) in self._places.items():
            place = l if copy is None else l + copy * (self.counts[buffer] * self.lanes)
            entries = Field(buffers[buffer], offset, shape, self.lanes, place)
            (fields if vars(self._lane)[name].axes else numbers)[name] = entries
        numbers |= {name: Field(arrays.places, n * self.lanes, (), 1, l) for n, name in enumerate(self._integers)}
        column = expression("max", arrays.ids[l], 0) if isinstance(l, Expression) else max(arrays.ids[l], 0)
        return self._lane(fields, numbers, [column], l)


class ForwardLane(Lane):
    """The memory of one trajectory. Times, errors and step sizes are double."""

    # The state and the stages of the last step, of which the first one is f at the state; the state after the step.
    u = field("components")
    k = field("stages", "components")
    new = field("components")
    p = field("parameters")
    # Times and sizes are positive in the direction of the solve, whose sign is `sign`.
    now, ahead, sign, size = (field(exact=True) for _ in range(4))
    goal, save_time, least = (field(exact=True) for _ in range(3))
    # 1 if the lane has a trajectory, otherwise 0; whether the last step was accepted, or rejected.
    live, accepted, rejected = (field(exact=True, integer=True) for _ in range(3))
    # The numbers of attempted steps and of accepted steps.
    tries, number = (field(exact=True, integer=True) for _ in range(2))
    # Errors are double, like the step sizes that are computed from them. `event`: whether the lane has output.
    q2, q2_before, next, event = (field(exact=True) for _ in range(4))
    # Tangents of the state, of the state after the step, and of the stages.
    du, dnew = (field("directions", "components") for _ in range(2))
    dk = field("directions", "stages", "components")
    # Tangents of the parameters per trajectory in directions of the kind "seed".
    dp = field("directions", "wanted_varying")
    # Values of the conditions before and after the step, before a root, and the fractions of the step at which roots lie.
    condition, condition_new, crossed, fraction = (field("events", exact=True) for _ in range(4))
    # `last_acted`: per event, the time at which it last acted, or the start. `side`: per event that acts in both
    # directions, the sign with which its condition left the root. `last_root`: the time of the last root of any condition.
    # `short_count`: the number of successive short intervals between roots. `limit`: if in the future, a bound on the next
    # step's end.
    last_acted, side = (field("events", exact=True) for _ in range(2))
    last_root, short_count, limit = (field(exact=True) for _ in range(3))
    # In steps shorter than `unresolved`, rounding may determine the sign of a condition near its root. `begun`: the last
    # given time at which an event acted; `begin_time`, `end_time`: the times of f after it, and at the end of a step to
    # `goal`. `clock`: the root of a condition of p and t at which the step ends.
    unresolved, begun, begin_time, end_time, clock = (field(exact=True) for _ in range(5))
    time_index: int  # the index of the next saved time


class ReverseLane(Lane):
    """The memory of one trajectory. Times are double, and in CPU kernels sums over many steps or trajectories, too."""

    # The cotangent of the state after the step, and the state before it.
    cotangent, u = (field("components") for _ in range(2))
    p = field("parameters")
    t, tn, h, live, begin_time = (field(exact=True) for _ in range(5))
    p_bar = field("wanted_varying", exact=True, is_sum=True)
    s_bar = field("wanted_shared", exact=True, is_sum=True)
    # `size_moves`: 1 if the step ends at the end of tspan or at a given time of an event, which determines its size.
    t_bar, h_bar, size_moves = (field(exact=True) for _ in range(3))
    # Cotangents of states inside the step: of the state before the step, of the stages, and of fractions of the step.
    has_arrivals = field(exact=True)
    value = field("components")
    arrival = field("inside", "components")
    rate, rate_x = (field("inside", "components", exact=True) for _ in range(2))
    # The row of the step in the record, its number, and the index of the next saved time and event.
    row: int
    step: int
    time_index: int
    event: int
    # The next jump (event that acted) of the backward sweep, the last processed jump, and the number of steps before the
    # next jump; -1 if none exists.
    jump: int
    last_jump: int
    jump_step: int


class TangentLane(Lane):
    """The memory of one trajectory that the tangents in all directions share. Times are double."""

    # The state before the step, the stages, their arguments, and the sums of the arguments, dy/dh.
    u = field("components")
    k, y = (field("stages", "components") for _ in range(2))
    slopes = field("timed", "components")
    p = field("parameters")
    t, tn, h, begin_time = (field(exact=True) for _ in range(4))
    # For Rosenbrock methods: the factors of W, the exchanges of rows, and the entries of the Jacobian and of ∂f/∂t.
    factors = field("factors")
    swaps = field("swaps")
    jacobian = field("jacobian")
    # In one direction: the tangents of the state before the step and of the stages, of the time before the step and of the
    # size of the step.
    before = field("components")
    dk = field("inside", "components")
    before_time, dh = (field(exact=True) for _ in range(2))
    has_output = field(exact=True)  # 1 if a state is saved, an event occurs, or the trajectory ends in the step
    # The row of the step in the record, its number, and the indices of the next saved time, event and jump. `goal`: the
    # index of the given time at which the step ends, or another value, see `tangent_kernel`.
    row: int
    step: int
    time_index: int
    event: int
    jump: int
    goal: int


class DirectionLane(Lane):
    """The tangents of one trajectory in one direction: of the state, its parameters and the time."""

    du = field("components")
    dp = field("wanted_varying")
    dt = field(exact=True)
