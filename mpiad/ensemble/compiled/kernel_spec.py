"""`KernelSpec`, the sizes and options of a kernel; `Fields`, the layout of its memory; templates of kernel sources.

A CPU kernel solves several trajectories at a time; the memory of each one is called a lane (see `forward_kernel`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import aligned, is_complex, real_dtype
from mpiad.compiling.c_translation import c_lines
from mpiad.ensemble.batch import Batch, same_for_all
from mpiad.ensemble.column_lu import Places, entries_of
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.controller import PIController
from mpiad.ensemble.field_jacobian import jacobian_program
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.sparsity import given_pattern, refuse_missing
from mpiad.ensemble.tableaus import Tableau

# The number of columns of the table of events that CPU kernels write: the trajectory, the event, the step (from 0), the
# fraction of the step at which the event lies, and its time. If events act in a recorded solve, the components of the state
# at the event follow.
EVENT_COLUMNS = 5
# Up to this number, CPU kernels pass shared parameters to f, and get cotangents of parameters from it, as scalars.
MOST_SCALARS = 64
# States of CPU kernels with more components are arrays on the stack, processed by loops; others are scalars. Loops compile
# faster, but scalars remain in registers. The second number is that of Rosenbrock methods.
MOST_UNROLLED = (32, 16)


class KernelSpec(NamedTuple):
    """The sizes and options of one kernel."""

    d: int  # number of real components of a state; a complex number has two
    # Numbers of parameters per trajectory (p0, p1, ...) and of shared parameters (s0, s1, ...).
    varying: int
    shared: int
    tableau: Tableau
    controller: PIController
    single: bool = False  # whether states are float32
    lanes: int = 16  # number of trajectories that are solved at a time
    inside: bool = False  # whether states inside steps are interpolated: at saved times, or to locate events
    record: bool = False  # whether all accepted steps are recorded
    tolerances: bool = False  # whether each component has its own absolute tolerance
    # Whether each component has its own relative tolerance, too; these follow the absolute ones in the kernel's argument.
    relative: bool = False
    # Directions of tangents: ("u", i) for component i of the initial state; ("p", i), ("s", i) for parameters.
    directions: tuple[tuple[str, int], ...] = ()
    # Numbers of parameters, per trajectory and shared, with respect to which an adjoint differentiates.
    wanted_varying: int = 0
    wanted_shared: int = 0
    timed: bool = False  # whether an adjoint differentiates with respect to the start and end of tspan
    events: tuple[tuple[bool, int], ...] = ()  # per event with a condition: whether it ends steps, and its direction
    points: int = 0  # number of points inside a step at which conditions are tested
    reads: tuple[int, ...] = ()  # the components that conditions read
    clocks: tuple[int, ...] = ()  # those of `events` that end steps and whose conditions read only p and t
    in_pairs: bool = False  # whether states are complex: components alternate between real and imaginary parts
    jacobian: tuple[tuple[int, int], ...] = ()  # for Rosenbrock methods: indices of the Jacobian's structural nonzeros
    slopes: tuple[int, ...] = ()  # for Rosenbrock methods: the components of f that depend explicitly on time
    # The nonzero entries of the mass matrix; None for the identity.
    mass: tuple[tuple[int, int, float], ...] | None = None
    # An event *acts* if it has an affect. The event indices below refer to the solve's list of all events.
    affects: tuple[int, ...] | None = None  # the events that act at given times; None if no event acts
    acting: tuple[int, ...] = ()  # for each of `events`: its index if it acts, otherwise -1
    ending: tuple[int, ...] = ()  # the events that act and end the trajectory
    # In the adjoint of a solve in which events act: these events, and whether each one occurs at given times.
    jumps: tuple[tuple[int, bool], ...] | None = None
    # Parameters that are entries of tables, as in `TracedProblem.tables`; they are read from arrays at computed indices.
    tables: tuple[tuple[str, int, int], ...] = ()

    def loaded(self, kind: str) -> list[int]:
        """Return the indices of the parameters "p" or "s" that are loaded as scalars."""
        read = {i for name, first, count in self.tables if name == kind for i in range(first, first + count)}
        return [i for i in range(self.varying if kind == "p" else self.shared) if i not in read]

    @property
    def dtype(self) -> np.dtype:
        """The real dtype of the states."""
        return np.dtype(np.float32 if self.single else float)

    @property
    def rolled(self) -> bool:
        """Whether states are arrays in CPU kernels."""
        return self.d > MOST_UNROLLED[self.tableau.implicit] and not self.in_pairs

    @property
    def sided(self) -> list[int]:
        """Indices of the `events` that act in both directions; kernels store the sign of their conditions after a root."""
        return [e for e, acts in enumerate(self.acting) if acts >= 0 and not self.events[e][1]]

    @property
    def acts(self) -> bool:
        """Whether any event with a condition acts."""
        return any(acts >= 0 for acts in self.acting)

    @property
    def remembers(self) -> bool:
        """Whether the size of a step depends on the errors of the two steps before it."""
        return self.tableau.error is not None and self.controller.remembers

    @property
    def numbers(self) -> list[tuple[int, ...]]:
        """For each entry of the state: the index of its component, or the indices of its real and imaginary parts."""
        width = 2 if self.in_pairs else 1
        return [tuple(range(c, c + width)) for c in range(0, self.d, width)]

    @property
    def stages(self) -> int:
        """The number of stages of a step, without the last, which is the first stage of the next step."""
        return len(self.tableau.a)

    @property
    def shares_array(self) -> bool:
        """Whether CPU kernels pass the shared parameters as an array."""
        return len(self.loaded("s")) > MOST_SCALARS

    @property
    def accumulates(self) -> bool:
        """Whether the derivatives in CPU kernels add the cotangents of parameters to arrays."""
        return self.wanted_varying + self.wanted_shared > MOST_SCALARS


def kernel_spec_of(traced: TracedProblem, batch: Batch, settings: Settings) -> KernelSpec:
    """Return the spec of a batch's kernels without derivatives."""
    program, varying = traced.program, len(traced.packing.varying)
    events, acting = tuple((event.stops, event.direction) for event in settings.events), settings.acting
    options: dict[str, Any] = {"tables": traced.tables}
    if settings.alg.tableau.implicit:
        # The sparsity pattern is part of the spec, since elimination is generated for the nonzero entries.
        _, options["jacobian"], options["slopes"] = jacobian_program(program)
        if batch.sparsity is not None:
            given, found = given_pattern(batch.sparsity, program.groups["state"]), np.array(options["jacobian"], int)
            refuse_missing(given, Places(*found.reshape(-1, 2).T), program.groups["state"])
    if acting is not None:
        options["affects"] = tuple(e for e, event in enumerate(acting.events) if event.times is not None)
        options["acting"] = tuple(e if event.acts else -1 for e, event in zip(acting.conditions, settings.events))
        options["ending"] = tuple(e for e, event in enumerate(acting.events) if event.acts and event.terminal)
    sizes = program.groups["state"], varying, len(traced.names) - varying
    options |= {"single": real_dtype(batch.u0.dtype) == np.float32, "in_pairs": is_complex(batch.u0), "events": events}
    times, start, end = settings.saveat, batch.start, batch.end
    options |= {"inside": bool(events), "relative": np.ndim(settings.rtol) > 0}
    if times is not None and times.size and not events:
        # One row is enough if all trajectories have the same tspan.
        rows = slice(1 if same_for_all(start) and same_for_all(end) else None)
        options["inside"] = not ((times == start[rows, None]) | (times == end[rows, None])).all()
    options["points"] = max([event.interior_points for event in settings.events], default=0)
    inputs = [x.value for g in traced.conditions for x in g.instructions if x.operation == "input"]
    options["reads"] = tuple(sorted({value[1] for value in inputs if value[0] == "state"}))  # type: ignore[index]
    enumerated = enumerate(zip(events, traced.conditions))
    options["clocks"] = tuple(e for e, ((stops, _), g) in enumerated if stops and not g.reads("state"))
    options["tolerances"] = options["relative"] or np.ndim(settings.atol) > 0
    options["mass"] = None if settings.mass is None else entries_of(settings.mass)
    return KernelSpec(*sizes, settings.alg.tableau, settings.alg.controller, **options)


class Fields:
    """The layout of a kernel's buffers. A field is a variable with one number, or one array, per lane."""

    def __init__(self, spec: KernelSpec):
        self._lanes, self._double_times = spec.lanes, spec.single
        # All fields are at constant offsets in one buffer, so the compiler knows that they don't overlap.
        self._offsets: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        self.counts = {"b": 0, "exact": 0}  # doubles such as times are in `exact` if states are float32

    def add(self, lines: list[str]) -> None:
        """Add fields, written as ``name``, or ``name[2, 3]`` for an array; lines that begin with `exact` add doubles."""
        for line in lines:
            if line.startswith("#"):
                continue
            buffer = "exact" if line.startswith("exact ") and self._double_times else "b"
            for name, shape in re.findall(r"(\w+)(?:\[(.+?)\])?", line.removeprefix("exact ")):
                lengths = tuple(map(int, shape.split(", "))) if shape else ()
                self._offsets[name] = buffer, self.counts[buffer], lengths
                self.counts[buffer] += math.prod(lengths)

    def reserve(self, name: str, size: int) -> int:
        """Reserve `size` numbers that the lanes use one after the other, and return their offset."""
        self.add([f"{name}[{-(-size // self._lanes)}]"])
        return self._offsets[name][1] * self._lanes

    def buffers(self, dtype: np.dtype) -> tuple[Array, Array]:
        """Return the buffers `b`, of the given dtype, and `exact`, of doubles."""
        b, exact = (self.counts[buffer] * self._lanes for buffer in ("b", "exact"))
        return aligned(b, dtype), aligned(exact, np.dtype(float))

    def resolved(self, lines: list[str]) -> str:
        """Return a text in which ``$name[0]`` is replaced by the field's element for lane l; an index may be a variable.

        ``$$name`` is the part of the buffer that begins with the field.
        """
        lines = [re.sub(r"\$\$(\w+)", self._view, line) if "$$" in line else line for line in lines]
        return re.sub(r"\$(\w+)(?:\[([\w, ]+)\])?", self._element, "\n".join(lines) + "\n")

    def _view(self, field: re.Match[str]) -> str:
        buffer, offset, _ = self._offsets[field[1]]
        return f"{buffer}[{offset * self._lanes} : {buffer}.size]"

    def _element(self, field: re.Match[str]) -> str:
        buffer, offset, shape = self._offsets[field[1]]
        variables = ""
        for axis, i in enumerate((field[2] or "").split(", ") if shape else []):
            stride = math.prod(shape[axis + 1 :])
            if i.isdigit():
                offset += int(i) * stride
            else:
                variables += f" + {i}{f' * {stride}' if stride > 1 else ''}"
        if variables:
            return f"{buffer}[({offset}{variables}) * {self._lanes} + l]"
        return f"{buffer}[{offset * self._lanes} + l]" if offset else f"{buffer}[l]"


class Registers(Fields):
    """The fields as variables of a GPU thread, which processes one trajectory: ``$name[0, 1]`` is the variable name_0_1."""

    # Fields that are whole numbers; as doubles they would take more registers.
    _WHOLE = ("live", "accepted", "rejected", "tries", "number")

    @property
    def declarations(self) -> list[str]:
        """The lines of the kernel language that declare the variables."""
        lines = []
        for name, (buffer, _, shape) in self._offsets.items():
            kind = "int" if name in self._WHOLE else "real" if buffer == "b" else "double"
            lines += [f"{'_'.join([name, *map(str, index)])} = {kind}(0)" for index in np.ndindex(*shape)]
        return lines

    def translated(self, lines: list[str]) -> list[str]:
        """Return lines of the kernel language in C."""
        lines = self.resolved(lines).replace("[l]", "").splitlines()
        # A field with the name of a local variable is this variable.
        return c_lines([line for line in lines if not re.fullmatch(r"\s*(\w+) = \1", line)])

    def _element(self, field: re.Match[str]) -> str:
        return "_".join([field[1], *re.findall(r"\w+", field[2] or "")])


# A template is the text of a kernel, in a subset of Python or in C, with these placeholders:
#
# - ``@name``, alone on a line: the lines of this name.
# - ``{name}``: a text or a number; ``{name+other}``, ``{name-1}``: a sum or a difference of numbers.
# - ``each name:``: repeat the rest of the line, or the indented lines below, for each value of `name`. If it is a text,
#   such as ``range(7)``, print them once, as the body of a loop.
# - ``when name:``, ``when not name:``: include the rest of the line, or the indented lines below, if `name` is (not) true.
# - ``$name``, ``$name[0, 1]``: a field of a lane, replaced last, by `Fields.resolved`.
_NAME = re.compile(r"\{(\w+)(?:([+-])(\w+))?\}")


def filled(template: str, names: Mapping[str, Any]) -> list[str]:
    """Return the lines of a template, given the values of its placeholders."""
    return _filled(textwrap.dedent(template).strip("\n").splitlines(), names)


def _filled(lines: list[str], names: Mapping[str, Any]) -> list[str]:
    result, n = [], 0
    while n < len(lines):
        line, depth = lines[n], _depth(lines[n])
        word, _, rest = line.strip().partition(" ")
        n += 1
        if word in ("each", "when"):
            name, _, inline = rest.partition(":")
            body = [" " * depth + inline.strip()] if inline else []
            while line.endswith(":") and n < len(lines) and _depth(lines[n]) > depth:
                body.append(lines[n] if inline else lines[n][4:])
                n += 1
            if word == "each" and isinstance(names[name], str):
                result.append(f"{' ' * depth}for {name} in {names[name]}:")
                result += ["    " + one for one in _filled(body, {**names, name: name})]
            elif word == "each":
                result += [one for value in names[name] for one in _filled(body, {**names, name: value})]
            elif bool(names[name.removeprefix("not ")]) != name.startswith("not "):
                result += _filled(body, names)
        elif word.startswith("@"):
            result += [" " * depth + one for one in names[word[1:]]]
        else:
            result.append(_NAME.sub(lambda match: _value(match, names), line) if "{" in line else line)
    return result


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _value(match: re.Match[str], names: Mapping[str, Any]) -> str:
    value, sign, other = names[match[1]], match[2], match[3]
    if sign:
        other = int(other) if other.isdigit() else names[other]
        if isinstance(value, str) or isinstance(other, str):  # the variable of a loop
            return f"{value} {sign} {other}"
        value = value + other if sign == "+" else value - other
    return str(value)
