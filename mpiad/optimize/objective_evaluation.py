"""The collective evaluation of the objective and its derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Comm, Function, Rank, Scalar, Tree
from mpiad.device import to_host
from mpiad.differentiation import SecondOrder, make_hvp
from mpiad.differentiation.gradient import cotangents_of_variables, seeds_of_term
from mpiad.differentiation.objective import check_objective, problem_with, weight_of
from mpiad.differentiation.trace import Traced, Variables, trace_backwards, unfinished, variables_of
from mpiad.optimize.packing import Packing
from mpiad.optimize.totals import reduced_on_root
from mpiad.primitives import stop_gradient
from mpiad.primitives.checks import root_of
from mpiad.pytrees import named_leaves
from mpiad.transport import Channel
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.transport.exits.user_failures import NotConverged, StageFailures, WrongValueError

T = TypeVar("T")


class Evaluation:
    """Values and derivatives of the objective; `comm` sums gradients over the ranks, None if each has its own variables."""

    call = "minimize"  # for errors

    def __init__(
        self, program: Program, packing: Packing, agreement: StageFailures, channel: Channel, comm: Comm | None = None
    ):
        self._program, self.packing, self.agreement = program, packing, agreement
        self._channel, self._comm = channel, comm
        self._weight = weight_of(program.objective, channel, program.root)
        # The weight of the result of `jac`. Without `comm`, this is the gradient of the whole objective.
        self._gradient_weight = 1.0 if comm is None else self._weight
        self._zeros = np.zeros(packing.size if self._gradient_weight == 0.0 else 0)
        self._forward: tuple[Traced, Variables] | None = None  # the last forward pass, until its reverse pass
        self._hessian: tuple[bytes, Callable] | None = None
        self._objective = math.nan  # of the last forward pass
        self._evaluated_once = self._not_converged = False
        self.at_start = StartValues()
        # Whether `fun` returns value and gradient together, and whether `jac` returns the gradient without a forward pass.
        self.only_both, self.separate = program.jac is True, callable(program.jac)

    def not_finite(self, vector: np.ndarray) -> str:
        """Return a sentence about the values that aren't finite at the first point, and their ranks, or ""; collective."""
        return self.at_start.not_finite(self._channel.data, self._program.args)

    def value(self, vector: np.ndarray) -> float:
        """Return the objective, NaN if an inner solver fails after the start; store the forward pass for `gradient`."""
        return self.attempted(lambda: self._value(vector), lambda: math.nan)

    def attempted(self, evaluate: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Return ``evaluate()``, or ``otherwise()`` on all ranks if a solver inside it doesn't converge on some rank."""
        self.agreement.tolerates = self._evaluated_once  # at the start there is no step to shorten
        try:
            found = evaluate()
        except NotConverged:
            self._forward, self._not_converged = None, True
            self.agreement.clear(self._channel.members)
            return otherwise()
        finally:
            self.agreement.tolerates = False
        self._evaluated_once, self._not_converged = True, False
        return found

    def _value(self, vector: np.ndarray) -> float:
        if self.separate:
            return self._untraced(vector)
        x = self.packing.unpack(vector)
        self._forward = None  # frees the memory before the next forward pass
        # The ranks agree on failures before the reverse pass, in which they communicate.
        variables = variables_of((x,), 0, self.call)
        traced = trace_backwards(self._forward_pass, variables)
        self._forward = traced, variables
        return self._reduced(traced.build(traced.values))

    def _untraced(self, vector: np.ndarray) -> Array:
        x = self.packing.unpack(vector)
        value, self._objective = self.agreement.summed(lambda: self.value_at(x), self._term)
        return self._reduced(value)

    def _forward_pass(self, x: Tree) -> Array:
        """Return this rank's value in a trace, and store the objective; the ranks agree that the function has succeeded."""

        def finished() -> Array:
            value, problem = self.value_at(x), unfinished(tracing.tape)
            if problem is not None:
                raise problem.kind(problem.text)
            return value

        value, self._objective = self.agreement.summed(finished, lambda value: self._term(getval(value)))
        return value

    def _reduced(self, value: Array) -> Array:
        """Return the objective of the last forward pass."""
        return self._objective

    def gradient(self, vector: np.ndarray) -> np.ndarray | None:
        """Return the gradient, on the root; without `jac` it is the gradient at the point of the last call of `value`."""
        if self._forward is None and self._not_converged and not self.separate:
            return vector * math.nan
        return self.attempted(lambda: self._gradient(vector), lambda: vector * math.nan)

    def _gradient(self, vector: np.ndarray) -> np.ndarray | None:
        if self.separate:
            x = self.packing.unpack(vector)
            jac, args = self._program.jac, self._program.args
            return self._total(self.agreement.run(lambda: self._weighted(jac(x, *args), "jac")))  # type: ignore[operator]
        return self._total(self.agreement.run(self._backward))

    def _backward(self, cotangent: Array = 1.0, keep: bool = False) -> np.ndarray:
        traced, variables = self._forward  # type: ignore[misc]
        self._forward = self._forward if keep else None
        # Ranks with weight zero participate, too, since cotangents of other ranks pass through them.
        found = cotangents_of_variables(traced, seeds_of_term(traced, self._weight * cotangent), variables, keep)
        return self._packed_gradient(variables.filled(found, lambda leaf: None))

    def _packed_gradient(self, gradient: Tree) -> np.ndarray:
        """Return this rank's part of a gradient as a new vector."""
        flat = self.packing.pack_gradient(gradient)
        self.at_start.note("entries of the gradient", flat)
        return flat

    def both(self, vector: np.ndarray) -> tuple[float, np.ndarray | None]:
        """Return the objective, on all ranks, and its gradient, on the root."""
        return self.attempted(lambda: self._both(vector), lambda: (math.nan, vector * math.nan))

    def _both(self, vector: np.ndarray) -> tuple[float, np.ndarray | None]:
        if not self.only_both:
            return self._value(vector), self._gradient(vector)
        x = self.packing.unpack(vector)

        def pair() -> tuple[Scalar, np.ndarray]:
            out = self._program.fun(x, *self._program.args)
            if out is None and self._gradient_weight == 0.0:
                return None, self._zeros
            if not isinstance(out, tuple) or len(out) != 2:
                raise WrongValueError(f"minimize: with jac=True fun must return (value, gradient), but got {out!r:.60}.")
            return self._checked(out[0]), self._weighted(out[1], "fun")

        (_, local), value = self.agreement.summed(pair, lambda result: self._term(result[0]))
        return value, self._total(local)

    def product(self, vector: np.ndarray, direction: np.ndarray) -> np.ndarray | None:
        """Return, on the root, the product of the Hessian with a direction; store the traced program for this point."""
        if self._hessian is None or self._hessian[0] != vector.tobytes():
            self._hessian = None  # frees the memory before the program is traced again
            self._hessian = vector.tobytes(), self.hessian(vector)
        return self._hessian[1](direction)

    def hessian(self, vector: np.ndarray) -> Callable[[np.ndarray], np.ndarray | None]:
        """Return a function that returns, on the root, the product of the Hessian at a point with a direction."""
        x, hessp, args = self.packing.unpack(vector), self._program.hessp, self._program.args
        if hessp is not None:
            return lambda v: self._total_product(lambda v: self._weighted(hessp(x, v, *args), "hessp"), v)
        # The product for the shared variables is the sum of the products for all ranks' copies of them.
        product = self.differentiated(self.value_at, x).product
        return lambda v: self._total_product(lambda v: self.packing.pack_gradient(product(v)), v)

    def differentiated(self, fun: Callable[[Tree], Scalar], x: Tree) -> SecondOrder:
        """Return value, gradient and Hessian products of the objective at x, with `fun` as the user's function."""
        objective, root = self._program.objective, self._program.root
        evaluate = make_hvp(
            lambda x: self.agreement.run(lambda: fun(x)), objective=objective, root=root, comm=self._channel.user
        )
        return self.agreement.run(lambda: evaluate(x))

    def _total_product(self, multiply: Callable[[Tree], np.ndarray], direction: np.ndarray) -> np.ndarray | None:
        return self._total(self.agreement.run(partial(multiply, self.packing.unpack(direction))))

    def _total(self, part: np.ndarray) -> np.ndarray | None:
        return part if self._comm is None else reduced_on_root(self._comm, self._program.root, part)

    def value_at(self, x: Tree) -> Scalar:
        """Return this rank's value of `fun`, without a check for failures on other ranks."""
        out = self._program.fun(x, *self._program.args)
        return self._checked(out[0] if self.only_both and isinstance(out, tuple) else out)

    def _checked(self, value: Scalar) -> Scalar:
        problem = problem_with(value, self._weight, self.call)
        if problem is not None:
            raise WrongValueError(problem.text)
        if self._weight != 0.0:
            self.at_start.note("values of fun", value)
        return value

    def _weighted(self, local: Tree, source: str) -> np.ndarray:
        """Return this rank's part of a gradient, given the result of a user's function."""
        if self._gradient_weight == 0.0:
            return self._zeros
        try:
            return self._packed_gradient(local) * self._gradient_weight
        except TypeError as error:
            raise WrongValueError(f"{error} It was returned by {source}.") from None

    def _term(self, value: Scalar) -> float:
        """Return the contribution of this rank's value to the objective."""
        if self._weight == 0.0:
            return 0.0
        if type(value) in Box.types:
            raise WrongValueError(
                f"{self.call}: fun returned a traced value, but a solve can't be differentiated. Apply mpiad.stop_gradient "
                "to traced values that fun reads from the enclosing function."
            )
        value = to_host(value)
        return float(value if np.ndim(value) == 0 else np.reshape(value, ())) * self._weight


class StartValues:
    """Counts of this rank's values that aren't finite at the start of a solve."""

    def __init__(self):
        self._counts: dict[str, tuple[int, int]] = {}

    def note(self, name: str, values: object) -> None:
        """Count values that aren't finite in the first call for a name; do nothing in later calls and for device arrays."""
        if name not in self._counts and not is_device_array(values := stop_gradient(values)):
            array = np.asarray(values)
            self._counts[name] = int(np.sum(~np.isfinite(array))), array.size

    def not_finite(self, comm: Comm, args: tuple) -> str:
        """Return a sentence about the ranks whose values or `args` aren't finite; collective."""
        for path, leaf in named_leaves(args, "args"):
            if getattr(getattr(leaf, "dtype", None), "kind", None) in ("f", "c"):
                self.note(f"values of {path}", leaf)
        text = ", ".join(f"{bad} of {size} {name}" for name, (bad, size) in self._counts.items() if bad)
        ranks = [f"on rank {rank} {each}" for rank, each in enumerate(comm.allgather(text)) if each]
        return f" NaN or infinite at x0: {'; '.join(ranks)}." if ranks else ""


class Program(NamedTuple):
    """The functions that a rank evaluates."""

    fun: Function
    jac: Function | bool | None  # the gradient; True if `fun` returns it with its value, None to differentiate `fun`
    hessp: Function | None
    args: tuple
    objective: str  # {"root", "sum", "mean"}: the combination of the ranks' results of `fun`, `jac` and `hessp`
    root: Rank


def check_program(program: Program, channel: Channel, call: str) -> None:
    """Raise if an argument of this rank is invalid."""
    root_of(program.root, channel, call)
    check_objective(program.objective, call)
    for name, value, allowed in (
        ("fun", program.fun, callable(program.fun)),
        ("jac", program.jac, callable(program.jac) or program.jac is None or program.jac is True),
        ("hessp", program.hessp, program.hessp is None or callable(program.hessp)),
    ):
        if not allowed:
            raise TypeError(f"{call}: {name} must be callable, but got {type(value).__name__} {value!r:.60}.")
