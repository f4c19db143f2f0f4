"""`System`: a linear system during its solution, with checked calls of the user's operator, and sums over all ranks.

The iterative methods work on k systems at once, as the rows of arrays of shape (k, n); user functions get arrays of the
shape of b. If the operator fails on a rank (it raises an exception, or returns NaN or another shape), this rank adds NaN
to the next sum, so that the sum is NaN on all ranks. Then the ranks exchange the exceptions: see
`transport.exits.user_failures`.
"""

from __future__ import annotations

import cmath
import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from numbers import Integral
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Comm, Function, LocalArray
from mpiad.errors import ConvergenceError, NotFiniteError
from mpiad.linalg.compiled_iteration import COUNTS, RECORDED, Cycle, Iteration, Operator, TracedSystem, ahead
from mpiad.linalg.vectors import are_finite, column, inner, lengths, on_host
from mpiad.primitives import mpi_allreduce
from mpiad.primitives.checks import positive_count
from mpiad.programs.function import Jitted
from mpiad.programs.replay import Changed
from mpiad.transport import MAX, channel
from mpiad.transport.core.agreement import FAILURES, agreed, raise_first, raise_together, require_same
from mpiad.transport.devices.device_arrays import arrays_of, contiguous, is_array, is_device_array, named
from mpiad.transport.exits.user_failures import DeferredFailures

# As a map of all copies, an operator is neither symmetric nor regular.
ADVICE_FOR_COPIES = (
    "If each rank has a copy of u instead of a block, average the copies: u = mpi_allreduce(u) / mpi_size()."
)


class Settings(NamedTuple):
    """Settings of a solve; the same on all ranks."""

    method: str
    # The iteration ends when the norm of the residual is at most ``max(rtol * norm(b), atol)``.
    rtol: float
    atol: float
    maxiter: int | None
    comm: Comm
    callback: Callable[[float], object] | None
    restart: int = 30  # number of iterations of GMRES between restarts
    side: str | None = None  # side of the preconditioner: "left", "right" or None
    batch: int = 0  # number of leading axes of b that index systems
    verify: bool = True  # whether to check the result by additional products
    call: str = "linalg.solve"  # name of the public function, for error messages
    probe: bool = True  # whether to check if the null space contains constants; False in solves of derivatives
    advice: str = ""  # a sentence on a likely cause if an operator is singular, for error messages
    # `reported`, `preconditioned`: whether any rank has a callback or a preconditioner, which may raise; set by `agree_on`.
    reported: bool = False
    preconditioned: bool = False


def agree_on(
    settings: Settings, check: Callable[[], dict[str, object]], preconditioner: Function | None = None
) -> Settings:
    """Return the settings with `reported` and `preconditioned`; raise on all ranks if they differ, or if `check` raises.

    ``check()`` returns further arguments that must be the same on all ranks, by name.
    """
    group, error, further = channel(settings.comm, settings.call), None, {}
    try:
        further = check()
    except FAILURES as found:  # the other ranks mustn't wait
        error = found
    failed, reported, preconditioned = error is not None, settings.callback is not None, preconditioner is not None
    if group.size > 1:
        # `comm` and `callback`, the fields 4 and 5, are excluded, since their `repr` differs between processes.
        checksum = zlib.crc32(repr((settings[:4], settings[6:], further)).encode())
        # The maxima of a checksum and of its negative add up to zero only if the checksum is the same on all ranks.
        local, largest = np.array([failed, checksum, -checksum, reported, preconditioned], np.int64), np.empty(5, np.int64)
        group.data.Allreduce(local, largest, MAX)
        failed, above, below, reported, preconditioned = largest.tolist()
        if not failed and above != -below:
            compared = settings._replace(comm=None, callback=None)._asdict() | further
            require_same(group, ", ".join(f"{name}={value!r}" for name, value in compared.items()), settings.call)
    if failed:
        raise_first(group, error)
    return settings._replace(reported=bool(reported), preconditioned=bool(preconditioned))


def check_settings(s: Settings, methods: Collection[str], ndim: int) -> None:
    """Raise a ValueError if the settings are invalid for a right-hand side with `ndim` axes."""
    if s.method not in methods:
        raise ValueError(f"{s.call}: method must be one of {', '.join(map(repr, methods))}, but got {s.method!r}.")
    if s.side is not None and (s.method == "cg" or s.side not in ("left", "right")):
        sides = "None for 'cg', which is preconditioned symmetrically" if s.method == "cg" else "'left' or 'right'"
        raise ValueError(f"{s.call}: side must be {sides}, but got {s.side!r}.")
    if not (0 <= s.rtol < math.inf and 0 <= s.atol < math.inf and s.rtol + s.atol > 0):
        problem = f"rtol and atol must be zero or more, and one above zero, but got {s.rtol!r} and {s.atol!r}."
        raise ValueError(f"{s.call}: {problem}")
    if s.maxiter is not None and not (isinstance(s.maxiter, Integral) and int(s.maxiter) > 0):
        raise ValueError(f"{s.call}: maxiter must be None or an integer above zero, but got {s.maxiter!r}.")
    positive_count(s.restart, f"{s.call}: restart")
    if not (isinstance(s.batch, Integral) and 0 <= int(s.batch) <= ndim):
        raise ValueError(f"{s.call}: batch must count leading axes of b, which has {ndim}, but got {s.batch!r}.")


_MAX_ITERATIONS = 10_000


class System:
    """The operator and the preconditioner of a solve, with bound parameters, for right-hand sides like `like`."""

    def __init__(
        self, apply: Function, precondition: Function | None, like: LocalArray, settings: Settings, name: str = "matvec",
        failures: DeferredFailures | None = None, operator: Operator | None = None,
        diagnose: Callable[[], str] | None = None,
    ):  # fmt: skip
        self.settings, self.side = settings, settings.side
        # The failures of this rank's user functions in the enclosing call.
        self.failures = failures or DeferredFailures(settings.comm, settings.call)
        self.usable: LocalArray | None = None  # argument for repeating a failed call of a user function; None: zeros
        self.history: list[float] = []
        self._apply, self._precondition = apply, precondition
        self.may_run_ahead = False  # whether all ranks have arrays on devices, and operators whose iterations are compiled
        self.has_inverse = False  # whether the preconditioner is the inverse, the start of an iteration
        self.diagnose = diagnose  # explains failures instead of `iteration.diagnosis`; collective
        self._programs: dict[tuple, Iteration] = {}  # by iteration and shape
        self._shape, self.dtype = like.shape, like.dtype
        self._xp: Any = arrays_of(like)
        # From which iterations are compiled; None if they are interpreted.
        has_kernels = self._xp is None or getattr(self._xp, "launcher", None) is not None
        # Complex numbers only in GMRES on devices: the other methods' iterations are written for real ones.
        is_supported = self.dtype.kind == "f" or settings.method == "gmres" and self._xp is not None
        self.operator = operator if has_kernels and is_supported else None
        self.count = math.prod(like.shape[: settings.batch])
        self.length = math.prod(like.shape[settings.batch :])
        self.limit = self.unknowns = 0
        # The powers of two by which the rows of b were divided: one number per row, and as an array for rows.
        self.units: np.ndarray | float = 1.0
        self.units_of_rows: Array = 1.0
        self._name = name
        self._is_in_iteration = False  # ranks with a program of the iteration see failures of others at its end
        self._may_have_raised = False  # whether a user function was called since the last sum; the same on all ranks

    @property
    def iterations(self) -> int:
        """The number of iterations so far."""
        return max(0, len(self.history) - 1)

    def until_look(self) -> int:
        """Return the number of iterations until the host looks, if they run ahead."""
        # Iterations after the last one cost as much as others.
        return min(1 + self.iterations // 8, RECORDED)

    def rows(self, block: LocalArray) -> LocalArray:
        """Return a copy of a block as rows, one per system."""
        if self._xp is not None:
            return self._xp.copy(block.astype(self.dtype)).reshape(self.count, self.length)
        return np.array(block, self.dtype, order="C").reshape(self.count, self.length)

    def block(self, rows: LocalArray) -> LocalArray:
        """Return rows in the shape of b."""
        return rows.reshape(self._shape)

    def apply(self, u: LocalArray) -> LocalArray:
        """Return the operator's product with this rank's rows; NaN if the operator fails."""
        self._may_have_raised = True
        return self._called(self._apply, u, self._name)

    def precondition(self, r: LocalArray) -> LocalArray:
        """Return the preconditioned residual, or `r` itself without a preconditioner."""
        self._may_have_raised |= self.settings.preconditioned
        return r if self._precondition is None else self._called(self._precondition, r, "preconditioner")

    def _called(self, fun: Function, rows: LocalArray, name: str) -> LocalArray:
        again = lambda: self.block(self.full(0.0)) if self.usable is None else self.usable  # noqa: E731
        out = self.failures.attempt(name, fun, rows.reshape(self._shape), again=again)
        error = self._problem_with(out, name)
        if error is None:
            return contiguous(out.astype(self.dtype, copy=False)).reshape(self.count, self.length)
        self.failures.note(error)  # ignored if the function has raised an exception
        return self.full(np.nan)

    def _problem_with(self, out: Array, name: str) -> Exception | None:
        """Return an error if the result of a user function isn't an array like b."""
        is_like_b = is_array(out) and arrays_of(out) == self._xp
        # A complex product of a real system is an error, since its imaginary part would be lost.
        if is_like_b and out.shape == self._shape and (out.dtype.kind == "f" or out.dtype.kind == self.dtype.kind == "c"):
            return None
        subject, on_device = f"{self.settings.call}: {name}", self._xp is not None
        if isbox(out):
            return TypeError(
                f"{subject} uses a traced variable of an enclosing function (it returned a {type(out).__name__}), "
                "through which no derivative can flow. Pass it to solve among the params, and take it as an argument; "
                "mpiad.stop_gradient(x) returns its plain value if no derivative is needed."
            )
        if not is_like_b:
            expected, advice = "an array", ""
            if on_device or is_device_array(out):
                expected += " on the device of b" if on_device else " on the host, as b is"
                advice = " Copies are never implicit: see mpiad.device.to_device and to_host."
            return TypeError(f"{subject} must return {expected}, but returned {named(out)}.{advice}")
        if out.shape != self._shape:
            shape = f"the shape of b, {self._shape} on this rank"
            return ValueError(f"{subject} must return an array of {shape}, but returned {out.shape}.")
        if out.dtype.kind == "c":
            return TypeError(
                f"{subject} must return real floats, as b is {self.dtype}, but returned dtype {out.dtype}. For a complex "
                "system make b complex."
            )
        return TypeError(f"{subject} must return floats, but returned dtype {out.dtype}.")

    def run(self, iteration: Iteration, *state: LocalArray) -> Sequence[Array]:
        """Return ``iteration(self, *state)``, by a program if the iteration can be compiled.

        If an iteration reduces, its last results are its sums, and an array whose first number is the number of systems
        with invalid sums; no communication follows these. If sums aren't finite since a user function has failed on
        any rank, all ranks raise after the iteration. The shape of the first array determines the others.
        """
        key = iteration, state[0].shape
        program = self._programs.get(key)
        if program is None and self.operator is not None:
            program = self.operator.program(iteration, state)
            if program is not None:
                self._programs[key] = program
        try:
            made = self._interpreted(iteration, state) if program is None else program(*state)
        except Changed as change:  # for example, other ranks have other numbers of rows than in the last solve
            self._programs.clear()
            made = self._interpreted(iteration, state, change)
        if len(made) > 1:
            self._may_have_raised = False
            if made[-1][0]:
                self.require_no_failure(made[-2])
        return made

    def _interpreted(self, iteration: Iteration, state: tuple, change: Changed | None = None) -> Sequence[Array]:
        self._is_in_iteration = True
        try:
            if self.operator is None:
                return iteration(self, *state)
            if change is not None:
                return self.operator.continued(iteration, self, state, change)
            return self.operator.interpreted(iteration, self, state)
        finally:
            self._is_in_iteration = False

    def updated(
        self, update: Jitted, vectors: tuple[LocalArray, ...], numbers: tuple[np.ndarray, ...]
    ) -> Sequence[LocalArray]:
        """Return ``update(*vectors, *numbers)`` for rows and one number per row; on the host, by one compiled loop."""
        columns = [column(vectors[0], a.astype(self.dtype)) for a in numbers]
        return (update.fun if self._xp is not None or self.dtype.kind == "c" else update)(*vectors, *columns)

    def agreed_cycle(self, iteration: Iteration, state: tuple | None, constants: tuple = ()) -> Cycle | None:
        """Return repeated runs of an iteration if all ranks have a state and a program; collective, if `may_run_ahead`."""
        group, operator = channel(self.settings.comm, self.settings.call), cast(Operator, self.operator)
        cycle = None if state is None else operator.cycle(iteration, state, constants)
        lacking = np.array([cycle is None], np.int64)
        group.data.Allreduce(lacking.copy(), lacking, MAX)
        if cycle is not None and lacking[0]:
            cycle.close()
        return None if lacking[0] else cycle

    def full(self, value: float) -> LocalArray:
        """Return rows filled with one number, on the device of b."""
        shape = self.count, self.length
        return np.full(shape, value, self.dtype) if self._xp is None else self._xp.full(shape, value, self.dtype)

    def dots(self, *pairs: tuple[LocalArray, LocalArray]) -> Array:
        """Return inner products x* y, over all ranks, of pairs (x, y) of rows, shape (pairs, k). For errors see `sums`."""
        if self.dtype.char in "dD":
            return self.sums(inner(*pairs))
        # Norms are computed in double precision, since in single precision the square of a number below 1e-23 is zero.
        return self.sums(np.array([np.square(lengths(x)) if x is y else inner((x, y))[0] for x, y in pairs]))

    def sums(self, local: np.ndarray) -> np.ndarray:
        """Return sums over all ranks, in double precision; raise on all ranks if a user function has failed on any rank."""
        doubles = np.array(local, np.complex128 if local.dtype.kind == "c" else np.float64)
        # A failure makes the sum NaN, so the ranks exchange further messages only after a failure.
        if self.failures.error is not None:
            doubles[...] = np.nan
        with self.failures:
            sums = mpi_allreduce(doubles, comm=self.settings.comm)
        self._may_have_raised = False
        if not self._is_in_iteration:
            self.require_no_failure(sums)
        return sums

    def require_no_failure(self, sums: np.ndarray) -> None:
        """Raise on all ranks if sums aren't finite since a user function has failed on any rank."""
        if sums.size and not cmath.isfinite(sums.item(-1)):  # after a failure, all sums are NaN
            self.failures.raise_together()

    def settle(self) -> None:
        """Raise on all ranks if a user function has failed on any rank since the last sum."""
        if self._may_have_raised:
            self.failures.raise_together()

    def norms(self, rows: LocalArray) -> np.ndarray:
        """Return the norm of each row over all ranks."""
        return np.sqrt(self.dots((rows, rows))[0].real)

    def start(self, b: LocalArray) -> tuple[np.ndarray, np.ndarray]:
        """Return the residuals' target norms, and the norms of `b`; `b` may be scaled in place. Set the iteration limit."""
        local, k, s = lengths(b), self.count, self.settings
        has_programs = self._xp is not None and self.operator is not None
        sums = self.sums(np.array([*[x * x for x in local], *local, self.length, has_programs]))
        norms, size, self.unknowns = np.sqrt(sums[:k]), sums[k:-2], int(sums[-2])
        ranks = channel(s.comm, s.call).size
        self.may_run_ahead, self.is_alone = sums[-1] == ranks, ranks == 1
        self.require_finite(size, b, "the right-hand side (b, or a cotangent)")
        self.limit = min(10 * self.unknowns * k, _MAX_ITERATIONS) if s.maxiter is None else s.maxiter
        # If squares of a row of b or of its residuals would overflow or underflow, each row is divided by a power of two,
        # which causes no rounding errors. `iterate` multiplies the solutions by these powers.
        bound = float(np.finfo(self.dtype).tiny) ** 0.25
        if not all(bound <= x <= 1.0 / bound or x == 0.0 for x in size.tolist()):
            self.units = 2.0 ** np.round(np.log2(np.where(size > 0.0, size, 1.0)))
            self.units_of_rows = column(b, self.units.astype(b.real.dtype))
            b /= self.units_of_rows
            norms = self.norms(b)
        targets = s.rtol * norms
        if s.atol > 0.0:
            targets = np.where(norms > 0.0, np.maximum(targets, s.atol / self.units), 0.0)
        return targets, norms

    def note(self, norms: np.ndarray) -> None:
        """Append the joint norm of all systems' residuals to the history; after the first, call the user's callback."""
        norm = math.hypot(*(norms * self.units).tolist())
        self.history.append(norm)
        if len(self.history) > 1:
            self._may_have_raised |= self.settings.reported
            if self.settings.callback is not None:
                self.failures.attempt("callback", self.settings.callback, norm)

    def require_finite(self, sums: np.ndarray, array: LocalArray, name: str) -> None:
        """Raise on all ranks if sums over an array aren't finite; the error names a rank with NaN or infinities."""
        if are_finite(sums):
            return
        # The sums are the same on all ranks, so all ranks raise.
        group = channel(self.settings.comm, self.settings.call)
        bad = int(array.size - on_host(np.sum(np.isfinite(array))))
        text = f"{self.settings.call}: {name} is not finite: {bad} entries on rank {group.rank} are NaN or infinite."
        raise_together(group, NotFiniteError(text) if bad else None)
        self.fail(f"a sum over {name} overflows")

    def fail(self, problem: str) -> NoReturn:
        """Raise a ConvergenceError with the history of residuals; all ranks call it."""
        problem = problem if problem.endswith("?") else problem.rstrip(".") + "."
        start = f"{self.history[0]:.3e}" if self.history else "unknown"
        last = f"{self.history[-1]:.3e}" if self.history else "unknown"
        error = ConvergenceError(
            f"{self.settings.call}: {self.settings.method}: {problem} After {self.iterations} iterations "
            f"the norm of the residual is {last}, from {start} at the start (`history` of this error contains all norms).",
            self.history,
        )
        raise agreed(channel(self.settings.comm, self.settings.call), error)


class Iterations:
    """The iterations of a method from a state, whose numbers are returned one by one.

    On devices, iterations run ahead of the host as soon as all ranks have their programs (see `compiled_iteration.ahead`).
    The last array of the state contains the numbers; `constants` are further arguments, which don't change; `sums` is the
    number of sums in an iteration.
    """

    def __init__(self, system: System, iteration: Iteration, state: tuple, sums: int, constants: tuple = ()):
        self._system, self._iteration, self._sums, self._constants = system, iteration, sums, constants
        self._state = self._before = state
        self._count, self._shape = len(state), state[-1].shape
        self._cycle: Cycle | None = None
        self._records, self._next_row = deque[tuple[np.ndarray, np.ndarray, list[float]]](), 0
        self._until_request = 0  # iterations until the ranks ask each other again whether they have programs

    @property
    def is_ahead(self) -> bool:
        """Whether the state may be that of a later iteration than the last one that was returned."""
        return self._cycle is not None

    @property
    def state(self) -> Sequence[LocalArray]:
        """The arrays of the state after the last iteration, on the device if there is one."""
        return self._state if self._cycle is None else self._cycle.state[: self._count]

    @property
    def before(self) -> list[LocalArray]:
        """The state before an iteration with invalid sums, with numbers on the host."""
        *rows, numbers = self._before if self._cycle is None else self.state
        return [*rows, on_host(numbers)]

    def following(self) -> tuple[np.ndarray, np.ndarray, list[float]]:
        """Return the numbers, sums and counts of the next iteration, on the host."""
        system = self._system
        if system.may_run_ahead:
            if not self._records:
                self._look(system.until_look())
            if self._records:
                return self._records.popleft()
        self._before = self._state
        made = system.run(self._iteration, *self._state, *self._constants)
        self._state = made[:-2]
        return made[-3], made[-2], made[-1].tolist()

    def _look(self, count: int) -> None:
        """Run iterations ahead, if all ranks have programs."""
        if self._cycle is None and not self._until_request:
            size, systems = math.prod(self._shape), self._shape[-1]
            record = np.zeros((RECORDED, size + self._sums * systems + COUNTS))
            state = *self._state, np.eye(2, 1 + RECORDED).sum(axis=0), record
            self._cycle = self._system.agreed_cycle(ahead(self._iteration, self._count), state, self._constants)
            self._until_request = count
        self._until_request -= 1
        if self._cycle is not None:
            self._run_ahead(self._cycle, count)

    def _run_ahead(self, cycle: Cycle, count: int) -> None:
        for _ in range(count):
            cycle.run()
        record, size = np.roll(on_host(cycle.state[-1]), -self._next_row, axis=0)[:count], math.prod(self._shape)
        self._next_row = (self._next_row + count) % RECORDED
        for row in record:
            sums = row[size:-COUNTS].reshape(self._sums, -1)
            self._records.append((row[:size].reshape(self._shape), sums, row[-COUNTS:].tolist()))

    def end(self) -> Sequence[LocalArray]:
        """Return the state after the last iteration; there are no further ones."""
        state = self.state
        if self._cycle is not None:
            self._cycle.close()
        return state


AnySystem: TypeAlias = System | TracedSystem

# The operator of methods for nonsymmetric systems is A M if the preconditioner M is on the right side (the default), and
# M A if M is on the left side. With the right side, the iteration computes the true residual r. With the left side, it
# computes M r; the target is scaled by the initial ratio of the norms of M r and r, and r is checked at the end.


def preconditioned_product(system: AnySystem, v: LocalArray) -> tuple[LocalArray, LocalArray]:
    """Return the change of the solution along v, and the product A M v (right side) or M A v (left side)."""
    if system.side == "left":
        return v, system.precondition(system.apply(v))
    z = system.precondition(v)
    return z, system.apply(z)


def preconditioned_start(system: System, r: LocalArray, norms: np.ndarray) -> tuple[LocalArray, np.ndarray, np.ndarray]:
    """Return the residual that the method uses, its norms, and their ratios to the norms of the true residual."""
    if system.side != "left" or not system.settings.preconditioned:
        return r, norms, np.ones_like(norms)
    z = system.precondition(r)
    z_norms = system.norms(z)
    system.require_finite(z_norms, z, "the result of preconditioner")
    return z, z_norms, np.where((norms > 0.0) & (z_norms > 0.0), z_norms / np.where(norms > 0.0, norms, 1.0), 1.0)
