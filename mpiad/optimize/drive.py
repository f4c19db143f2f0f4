"""`drive`: a program on the root, such as a sampler or an optimizer, calls functions that all ranks evaluate."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import autograd.numpy as anp
import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Comm, Function, Rank, Scalar, Shape, Tree
from mpiad.device import to_host
from mpiad.differentiation import SecondOrder, make_jvp
from mpiad.optimize.objective_evaluation import Evaluation, Program, check_program
from mpiad.optimize.packing import as_variables, sendable_variables
from mpiad.optimize.root_driven import ELSEWHERE, RootDriven
from mpiad.primitives.operation import suspended
from mpiad.progress import progress_bar
from mpiad.transport import channel
from mpiad.transport.core.agreement import raising_together, require_same
from mpiad.transport.core.calls import site_of
from mpiad.transport.core.rank_groups import RankGroups, rank_groups
from mpiad.transport.core.tracing import restoring_state, tracing
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.exits.user_failures import WrongValueError, common_error

if TYPE_CHECKING:
    from tqdm import tqdm

_CALL = "drive"


class DrivenEvaluation(Evaluation):
    """Values and derivatives of a function that returns numbers or, on the root, arrays."""

    call = _CALL
    shape: Shape | None = None  # on the root: of the values, () for numbers; None before the first evaluation
    _cotangent = np.zeros(0)  # of the stored Hessian
    _point = b""  # of the last value

    def value(self, vector: np.ndarray) -> Scalar | np.ndarray:
        """Return the value, an array on the root only; store the forward pass for `gradient` and `vjp`."""
        self._point = vector.tobytes()
        return self.attempted(lambda: self._value(vector), self._not_a_number)

    def is_ready(self, vector: np.ndarray) -> bool:
        """Return whether the forward pass at this point is stored."""
        return self._forward is not None and self._point == vector.tobytes()

    def gradient(self, vector: np.ndarray) -> np.ndarray | None:
        """Return the gradient, on the root, from the stored forward pass if it is at this point."""
        return super().gradient(vector) if self.is_ready(vector) else self.both(vector)[1]

    def plain(self, vector: np.ndarray) -> Scalar | np.ndarray:
        """Return the value, an array on the root only, of a run on plain values."""
        forward = self._forward
        found = self.attempted(partial(self._untraced, vector), self._not_a_number)
        # Kept if a solver doesn't converge: with groups this may happen on some ranks, and all use the pass, or none does.
        self._forward = forward
        return found

    def values(self, points: np.ndarray) -> np.ndarray:
        """Return the values at several points, on the root if they are arrays; no forward pass is stored."""
        return np.array(list(map(self.plain, points.reshape(-1, self.packing.size))))

    def _not_a_number(self) -> np.ndarray | float:
        return np.full(self.shape or (), math.nan)[()]

    def value_at(self, x: Tree) -> Array:
        """Return this rank's number or array; report the function's communication at its own lines, not at `drive`'s."""
        around, tracing.site = tracing.site, None
        try:
            out = self._program.fun(x, *self._program.args)
        finally:
            tracing.site = around
        if self._weight == 0.0:
            return out
        shape, dtype = getattr(out, "shape", ()), getattr(out, "dtype", None)
        if self.shape is None:
            self.shape = shape
        if shape == self.shape == ():
            return self._checked(out)
        if getattr(dtype, "kind", "") not in ("f", "i", "u") or shape != self.shape or self._program.objective != "root":
            got = f"{type(out).__name__} of {dtype}, shape {shape}, with objective={self._program.objective!r}"
            raise WrongValueError(
                f"{_CALL}: a function must return real numbers of shape {self.shape}, as at the first point; arrays must "
                f"be the same on all ranks, with objective='root'; but it returned {got}."
            )
        return to_host(out)

    def _term(self, value: Array) -> float:
        return 0.0 if np.ndim(value) and type(value) not in Box.types else super()._term(value)

    def _reduced(self, value: Array) -> float | np.ndarray:
        return np.array(getval(value), dtype=float) if self.shape else self._objective

    def _backward(self, cotangent: Array = None, keep: bool = False) -> np.ndarray:
        if self.shape and cotangent is None:
            raise WrongValueError(f"{_CALL}: the function returns arrays of shape {self.shape}. Use f.vjp(x, w) or f.jvp.")
        return super()._backward(1.0 if cotangent is None else cotangent, keep)

    def vjp(self, vector: np.ndarray, cotangent: np.ndarray) -> np.ndarray | None:
        """Return, on the root, the product of the transposed Jacobian with a cotangent; store the forward pass."""
        if not self.is_ready(vector):
            self.value(vector)
        if self._forward is None:  # a solver hasn't converged
            return vector * math.nan

        cotangent = cotangent.reshape(self.shape) if self._weight else np.zeros(())
        pulled = partial(self._backward, cotangent, keep=True)
        return self.attempted(lambda: self._total(self.agreement.run(pulled)), lambda: vector * math.nan)

    def jvp(self, vector: np.ndarray, direction: np.ndarray) -> Scalar | np.ndarray:
        """Return the product of the Jacobian with a direction, on the root if it is an array."""
        x, v = self.packing.unpack(vector), self.packing.unpack(direction)

        def pushed() -> float | np.ndarray:
            tangent, self._objective = self.agreement.summed(lambda: make_jvp(self._forward_pass)(x)(v)[1], self._term)
            return self._reduced(tangent)

        return self.attempted(pushed, self._not_a_number)

    def product(self, vector: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
        """Return, on the root, the product with the Hessian of ``f``, or of ``sum(w * f)`` if w follows the direction."""
        v, w = direction[: self.packing.size], direction[self.packing.size :]
        if not np.array_equal(w, self._cotangent):
            self._hessian, self._cotangent = None, w.copy()
        return self.attempted(lambda: super(DrivenEvaluation, self).product(vector, v), lambda: v * math.nan)

    def differentiated(self, fun: Function, x: Tree) -> SecondOrder:
        """Return value, gradient and Hessian products of the function, or of its product with the cotangent."""
        if not self._cotangent.size:
            return super().differentiated(fun, x)

        def scalar(x: Tree) -> Scalar | None:
            value = fun(x)
            return anp.sum(self._cotangent.reshape(self.shape or ()) * value) if self._weight else None

        return super().differentiated(scalar, x)


class DrivenFunction:
    """A function that all ranks evaluate when `program` calls it on the root; `drive` makes it.

    Points x are pytrees of arrays of one structure, that of the first point, in which integers and strings in dicts, lists
    and tuples are constants. Directions v have this structure, too, and cotangents w the shape of the function's values.
    ``f(x)`` runs the function on plain values, so that it may be one that can't be differentiated, until `gradient` or
    `vjp` is called at the point of the last ``f(x)``; from then on values are traced for derivatives at the same point.
    Calls from several threads are executed one after the other.

    Attributes
    ----------
    evaluations : dict
        Numbers of evaluations on all ranks: "value", "gradient" (after a value at the same point), "both", "product"
        (with the Hessian), "jvp" and "vjp" (with the value, unless it has been computed at the same point). A point of
        `map` counts as a "value".
    seconds : dict
        Time of these evaluations on the root, in seconds.

    Raises
    ------
    TypeError
        On the root, before anything is sent, if a point, direction or cotangent has another structure or shape, or a point
        other constants. `program` may catch this error and continue.
    RuntimeError
        If a method is called after `drive` has ended, in a forked process, or while the same thread evaluates a function.
    WorkerError
        On all ranks, if the evaluation raises on any rank. Further calls then raise it again. After the first evaluation, a
        `ConvergenceError` isn't raised; values and derivatives are NaN instead.

    Ranks
    -----
    The root calls the methods, inside `program`; all ranks evaluate the function.

    Adjoint
    -------
    None: the results are constants in every trace.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> def program(f):
    ...     x = np.array([1.0, 2.0])
    ...     return np.array([f(x), *f.gradient(x), *f.hvp(x, np.ones(2))]) / size
    >>> result = mpiad.drive(program, lambda x: mpiad.mpi_sum(np.sum(x**2)))
    >>> print(mpiad.mpi_bcast(result))
    [5. 2. 4. 2. 2.]
    """

    def __init__(self, driver: RootDriven, number: int, bar: tqdm | None):
        self._driver, self._number, self._bar = driver, number, bar
        self.evaluations: dict[str, int] = dict.fromkeys(("value", "gradient", "both", "product", "jvp", "vjp"), 0)
        self.seconds: dict[str, float] = dict.fromkeys(self.evaluations, 0.0)
        # Whether values are traced, for a derivative at the same point. The function may be one that can't be traced, and
        # tracing takes longer than a short function. So values are plain until a derivative is requested at the last point.
        self._traces, self._last = False, b""

    def __call__(self, x: Tree) -> Scalar | np.ndarray:
        """Return the function's value at x, a number or an array."""
        vector = self._vector(x)
        self._last = vector.tobytes()
        return self._evaluated("value" if self._traces else "plain", vector, kind="value")

    def gradient(self, x: Tree) -> Tree:
        """Return the gradient at x, in the structure of x; after ``f(x)`` at this point without another evaluation."""
        vector = self._vector(x)
        self._traces |= self._last == vector.tobytes()
        kind = "gradient" if self._evaluation.is_ready(vector) else "both"
        return self._like_x(self._evaluated("gradient", vector, kind=kind))

    def value_and_gradient(self, x: Tree) -> tuple[float, Tree]:
        """Return value and gradient at x."""
        value, gradient = self._evaluated("both", self._vector(x))
        return value, self._like_x(gradient)

    def hvp(self, x: Tree, v: Tree, w: Array | None = None) -> Tree:
        """Return the product of the Hessian at x with v; with w, the Hessian is that of ``sum(w * f(x))``."""
        vector = self._vector(x)
        direction = self._evaluation.packing.pack(as_variables(v, _CALL, "v"))
        if w is not None:
            direction = np.concatenate([direction, self._cotangent(w, vector)])
        elif self._shape(vector):
            raise TypeError(f"{_CALL}: the function returns arrays. Pass a cotangent: f.hvp(x, v, w).")
        return self._like_x(self._evaluated("product", vector, direction))

    def jvp(self, x: Tree, v: Tree) -> Scalar | np.ndarray:
        """Return the product of the Jacobian at x with v, in the shape of the function's values."""
        return self._evaluated("jvp", self._vector(x), self._evaluation.packing.pack(as_variables(v, _CALL, "v")))

    def vjp(self, x: Tree, w: Array) -> Tree:
        """Return the product of the transposed Jacobian at x with w; products at the same point need one evaluation."""
        vector = self._vector(x)
        self._traces |= self._last == vector.tobytes()
        return self._like_x(self._evaluated("vjp", vector, self._cotangent(w, vector)))

    def map(self, points: Sequence[Tree]) -> np.ndarray:
        """Return the values at points, shape (k,) or (k, ...); with groups, several points at a time.

        The root sends one message for all points. No gradients can be computed from these evaluations.
        """
        if not len(points):
            return np.zeros(0)
        vectors = np.concatenate([self._vector(x) for x in points])
        return self._evaluated("values", vectors, kind="value", count=len(points))

    @property
    def _evaluation(self) -> DrivenEvaluation:
        return self._driver.evaluations[self._number]

    def _vector(self, x: Tree) -> np.ndarray:
        if self._evaluation is None:
            self._driver.request("start", function=self._number, start=sendable_variables(x, _CALL, "x"))
        is_array = type(x) is np.ndarray and x.dtype == float
        packing = self._evaluation.packing
        return packing.pack(x) if is_array else packing.pack_point(as_variables(x, _CALL, "x"))

    def _shape(self, vector: np.ndarray) -> Shape:
        if self._evaluation.shape is None:
            self._evaluated("value", vector)
        return self._evaluation.shape or ()

    def _cotangent(self, w: Array, vector: np.ndarray) -> np.ndarray:
        array, shape = np.asarray(w, dtype=float), self._shape(vector)
        if array.shape != shape:
            raise TypeError(f"{_CALL}: w must have the shape of the function's values, {shape}, but got {array.shape}.")
        return array.reshape(-1)

    def _like_x(self, vector: np.ndarray) -> Tree:
        return self._evaluation.packing.unpack_gradient(vector)

    def _evaluated(self, method: str, *vectors: np.ndarray, kind: str = "", count: int = 1) -> Any:
        kind, start = kind or method, time.perf_counter()
        found = self._driver.request(method, *vectors, function=self._number)
        self.seconds[kind] += time.perf_counter() - start
        self.evaluations[kind] += count
        if self._bar is not None:
            self._bar.update(count)
        return found

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{_CALL}: {ELSEWHERE}")


@recoverable(_CALL, make_error=partial(common_error, call=_CALL))
def drive(
    program: Function,
    *functions: Function,
    objective: str = "root",
    root: Rank = 0,
    comm: Comm = None,
    groups: RankGroups | int | None = None,
    progress: bool = False,
) -> Any:
    """Run a program on the root, for example a sampler, an optimizer or a server, and evaluate its functions on all ranks.

    Parameters
    ----------
    program : callable
        ``program(f, g, ...)`` runs on the root only, with a `mpiad.optimize.DrivenFunction` for each of `functions`. Other
        communication on `comm` inside it raises an error.
    *functions : callable
        ``fun(x)`` is called on every rank with a copy of the root's x whenever `program` requests a value or derivative.
        It returns this rank's term L_r, one real number or an array of them. With `groups` it is ``fun(x, comm)``, and
        communicates on the communicator `comm` of the rank's group.
    objective : {"root", "sum", "mean"}
        The value of a function: L_root, the sum of all L_r, or their mean. Arrays need "root".
    root : int
    comm : mpi4py intracommunicator, optional
    groups : mpiad.tasks.RankGroups or int, optional
        Groups of ranks, or their number, which evaluate the points of ``f.map(points)`` at the same time: for G groups,
        group g the points g, g + G, g + 2 G and so on. In other evaluations all groups compute the same.
    progress : bool
        Whether the root shows the number of evaluations on standard error.

    Returns
    -------
    object
        The result of `program` on the root, None on the other ranks.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid or differs between ranks, `groups` divides other ranks than those of `comm`,
        `program` raises one of these, or a function returns no real numbers.
    WorkerError
        On all ranks, if a function raises on any rank, even if `program` catches the error; or if `program` raises,
        including a KeyboardInterrupt. Inside of an evaluation a KeyboardInterrupt ends the job.

    Ranks
    -----
    All ranks of `comm` call it, with the same functions, objective, root and number of groups. `program` is used on the
    root only.

    Adjoint
    -------
    None: the result is a constant in every trace. Gradients are those with ``shared=True``.

    Examples
    --------
    >>> import scipy.optimize
    >>> def program(f):
    ...     return scipy.optimize.minimize(f.value_and_gradient, np.zeros(2), jac=True).x
    >>> x = mpiad.drive(program, lambda x: np.sum((x - 3.0) ** 2))
    >>> print(mpiad.mpi_bcast(x).round(4))
    [3. 3.]
    """
    used = channel(comm, _CALL)
    with restoring_state(), suspended():
        with raising_together(used, Exception):
            if not functions:
                raise TypeError(f"{_CALL}: expected program and at least one function, but got no function.")
            if used.rank == root and not callable(program):
                raise TypeError(f"{_CALL}: program must be callable on the root, but got {type(program).__name__}.")
            programs = [Program(fun, None, None, (), objective, root) for fun in functions]
            for each in programs:
                check_program(each, used, _CALL)
            if isinstance(groups, RankGroups) and channel(groups.whole, _CALL).members != used.members:
                raise ValueError(f"{_CALL}: groups must divide the ranks of comm, but divides those of groups.whole.")
        count = groups.count if isinstance(groups, RankGroups) else groups
        require_same(used, f"{len(functions)} functions, objective={objective!r}, root={root}, groups={count!r:.60}", _CALL)
        division = None if groups is None else rank_groups(groups, comm)
        if division is not None:
            programs = [each._replace(args=(division.comm,), root=root % division.comm.size) for each in programs]
        driver = RootDriven(used, root, programs, DrivenEvaluation, _CALL, division)
        driver.site = site_of(sys._getframe())  # on the other ranks, too, this is the innermost line of the user's
        bar = progress_bar("evaluations") if progress and used.rank == root else None

        def run(driver: RootDriven) -> Any:
            with used.evaluating(f"the program of {_CALL}"):
                return program(*(DrivenFunction(driver, number, bar) for number in range(len(functions))))

        with driver.ending(None, bar):
            return driver.run(run, everywhere=False)
