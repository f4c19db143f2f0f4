"""`KernelSpec`: the sizes and options of a kernel.

A CPU kernel solves several trajectories at a time; the memory of each one is called a lane (see `forward_kernel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from mpiad.compiling.arguments import is_complex, real_dtype
from mpiad.ensemble.batch import Batch, same_for_all
from mpiad.ensemble.column_lu import Places, entries_of
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.controller import PIController
from mpiad.ensemble.field_jacobian import jacobian_program
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.sparsity import given_pattern, refuse_missing
from mpiad.ensemble.tableaus import RosenbrockTableau, Tableau

# The number of columns of the table of events that CPU kernels write: the trajectory, the event, the step (from 0), the
# fraction of the step at which the event lies, and its time. If events act in a recorded solve, the components of the state
# at the event follow; in a solve with tangents, the tangents of the time.
EVENT_COLUMNS = 5
# Up to this number, CPU kernels pass parameters to f, and get cotangents of parameters from it, as scalars; parameters per
# trajectory in any number, if states are scalars or f reads tables.
MOST_SCALARS = 64
# States of CPU kernels with more components are arrays on the stack, processed by loops; others are scalars. Loops compile
# faster, but scalars remain in registers. The second number is that of Rosenbrock methods.
MOST_UNROLLED = (32, 16)
# Loops over more components aren't unrolled. With 40 components that would take up to 5 % more time, with 94 hardly any.
LONG_LOOPS = 64


class KernelSpec(NamedTuple):
    """The sizes and options of one kernel."""

    d: int  # number of real components of a state; a complex number has two
    # Numbers of parameters per trajectory (p0, p1, ...) and of shared parameters (s0, s1, ...).
    varying: int
    shared: int
    tableau: Tableau
    controller: PIController
    single: bool = False  # whether states are float32
    lanes: int = 16  # number of trajectories that are solved at a time; 0 in kernels for GPUs
    inside: bool = False  # whether states inside steps are interpolated: at saved times, or to locate events
    record: bool = False  # whether all accepted steps can be recorded
    tolerances: bool = False  # whether each component has its own absolute tolerance
    # Whether each component has its own relative tolerance, too; these follow the absolute ones in the kernel's argument.
    relative: bool = False
    # Directions of tangents: ("u", i) for component i of the initial state; ("p", i), ("s", i) for parameters; ("seed", i)
    # for tangents of the initial state and of parameters that are arguments.
    directions: tuple[tuple[str, int], ...] = ()
    # Numbers of parameters, per trajectory and shared, with respect to which an adjoint or a direction differentiates.
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
    jumps: tuple[int, ...] | None = None  # in derivatives of a solve in which events act: these events
    # Parameters that are entries of tables, as in `TracedProblem.tables`; they are read from arrays at computed indices.
    tables: tuple[tuple[str, int, int], ...] = ()

    def loaded(self, kind: str) -> list[int]:
        """Return the indices of the parameters "p" or "s" that are loaded as scalars."""
        read = {i for name, first, count in self.tables if name == kind for i in range(first, first + count)}
        return [i for i in range(self.varying if kind == "p" else self.shared) if i not in read]

    def real(self, x: float) -> float:
        """Return a number in the precision of states."""
        return np.float32(x) if self.single else float(x)  # type: ignore[return-value]

    @property
    def scalars_shared(self) -> list[int]:
        """The indices of the shared parameters that are passed to f as numbers."""
        return [] if self.shares_array else self.loaded("s")

    @property
    def on_gpu(self) -> bool:
        """Whether the kernel is for GPUs: one thread solves one trajectory."""
        return not self.lanes

    @property
    def vectorized(self) -> bool:
        """Whether vector instructions process the lanes; vectors have no indices of different lanes."""
        return not self.tables

    @property
    def error(self) -> Sequence[float]:
        """The weights of the stages in the error."""
        return self.tableau.error or ()

    @property
    def adaptive(self) -> bool:
        """Whether errors determine the sizes of steps."""
        return self.tableau.error is not None

    @property
    def affected(self) -> bool:
        """Whether any event acts."""
        return self.affects is not None

    @property
    def limited(self) -> bool:
        """Whether steps may end at times at which f jumps."""
        return self.affected or bool(self.clocks)

    @property
    def rosenbrock(self) -> RosenbrockTableau:
        """The table of a Rosenbrock method."""
        return cast(RosenbrockTableau, self.tableau)

    @property
    def components(self) -> Sequence[int]:
        """The indices of the components; a range, for which loops aren't unrolled, if states are arrays."""
        return range(self.d) if self.rolled else tuple(range(self.d))

    @property
    def interpolating(self) -> list[int]:
        """The stages with nonzero weights in the interpolant."""
        return [i for i, row in enumerate(self.tableau.dense) if row.any()]

    @property
    def dtype(self) -> np.dtype:
        """The real dtype of the states."""
        return np.dtype(np.float32 if self.single else float)

    @property
    def rolled(self) -> bool:
        """Whether states are arrays in CPU kernels."""
        return self.d > MOST_UNROLLED[self.tableau.implicit] and not self.in_pairs and not self.on_gpu

    @property
    def has_long_loops(self) -> bool:
        """Whether loops over components gain nothing from being unrolled, which would double the compile time."""
        return self.rolled and self.d > LONG_LOOPS

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
    def entries(self) -> Sequence[int]:
        """The indices of the first component of each entry of the state: see `parts`; a range as `components`."""
        return self.components[:: 2 if self.in_pairs else 1]

    def parts(self, c: int) -> tuple[int, ...]:
        """Return the component of an entry, or its real and imaginary parts, given the first one."""
        return (c, c + 1) if self.in_pairs else (c,)

    @property
    def stages(self) -> int:
        """The number of stages of a step, without the last, which is the first stage of the next step."""
        return len(self.tableau.a)

    @property
    def shares_array(self) -> bool:
        """Whether CPU kernels pass the shared parameters as an array."""
        return len(self.loaded("s")) > MOST_SCALARS and not self.on_gpu

    @property
    def varying_array(self) -> bool:
        """Whether kernels pass the parameters per trajectory as an array."""
        return self.rolled and not self.tables and self.varying > MOST_SCALARS

    @property
    def varying_indices(self) -> Sequence[int]:
        """The indices of the parameters in a lane; a range, for which loops aren't unrolled, if they are an array."""
        return range(self.varying) if self.varying_array else tuple(self.loaded("p"))

    @property
    def seeds_array(self) -> bool:
        """Whether CPU kernels pass the tangents of the shared parameters as an array."""
        return self.wanted_shared > MOST_SCALARS and not self.on_gpu

    @property
    def accumulates(self) -> bool:
        """Whether the derivatives in CPU kernels add the cotangents of parameters to arrays."""
        return self.wanted_varying + self.wanted_shared > MOST_SCALARS and not self.on_gpu


def kernel_spec_of(traced: TracedProblem, batch: Batch, settings: Settings) -> KernelSpec:
    """Return the spec of a batch's kernels without derivatives."""
    program, varying = traced.program, len(traced.packing.varying)
    events, acting = tuple((event.stops, event.direction) for event in settings.events), settings.acting
    options: dict[str, Any] = {"tables": traced.tables}
    if settings.alg.tableau.implicit:
        # The sparsity pattern is part of the spec, since elimination is generated for the nonzero entries.
        _, options["jacobian"], options["slopes"] = jacobian_program(program)
        if batch.sparsity is not None:
            pattern, entries = given_pattern(batch.sparsity, program.groups["state"]), np.array(options["jacobian"], int)
            refuse_missing(pattern, Places(*entries.reshape(-1, 2).T), program.groups["state"])
    if acting is not None:
        options["affects"] = tuple(e for e, event in enumerate(acting.events) if event.times is not None)
        options["acting"] = tuple(e if event.acts else -1 for e, event in zip(acting.conditions, settings.events))
        options["ending"] = tuple(e for e, event in enumerate(acting.events) if event.acts and event.terminal)
    sizes = program.groups["state"], varying, len(traced.names) - varying
    options |= {"single": real_dtype(batch.u0.dtype) == np.float32, "in_pairs": is_complex(batch.u0), "events": events}
    options |= {"inside": interpolates(batch, settings), "relative": np.ndim(settings.rtol) > 0}
    options["points"] = max([event.interior_points for event in settings.events], default=0)
    inputs = [x.value for g in traced.conditions for x in g.instructions if x.operation == "input"]
    options["reads"] = tuple(sorted({value[1] for value in inputs if value[0] == "state"}))  # type: ignore[index]
    enumerated = enumerate(zip(events, traced.conditions))
    options["clocks"] = tuple(e for e, ((stops, _), g) in enumerated if stops and not g.reads("state"))
    options["tolerances"] = options["relative"] or np.ndim(settings.atol) > 0
    options["mass"] = None if settings.mass is None else entries_of(settings.mass)
    return KernelSpec(*sizes, settings.alg.tableau, settings.alg.controller, **options)


def interpolates(batch: Batch, settings: Settings) -> bool:
    """Return whether states inside steps are interpolated, see `KernelSpec.inside`."""
    times, start, end = settings.saveat, batch.start, batch.end
    if settings.events or times is None or not times.size:
        return bool(settings.events)
    # One row is enough if all trajectories have the same tspan.
    rows = slice(1 if same_for_all(start) and same_for_all(end) else None)
    return not ((times == start[rows, None]) | (times == end[rows, None])).all()
