"""`steady_state`: the steady states of an ensemble's trajectories."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple, NoReturn

import autograd.numpy as anp
import numpy as np
import scipy
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Tree
from mpiad.differentiation.forward import Bundle
from mpiad.differentiation.products import jvp
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import Batch, Parameters, is_on_device, not_finite_entries, two_at_least
from mpiad.ensemble.column_lu import Mass, Places
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.consistent_start import consistent_start
from mpiad.ensemble.differentiable import solve_operator
from mpiad.ensemble.field_jacobian import jacobian_of
from mpiad.ensemble.linearization import Field, check_traceable, pulled, with_leaves
from mpiad.ensemble.members import key_of, own_members, refuse_in_trace, rng_of
from mpiad.ensemble.methods.dormand_prince import RK45
from mpiad.ensemble.methods.steinebach import Rodas5P
from mpiad.ensemble.outcome import ConvergenceCode, report
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, digest_of, remake
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.reduction import check_alike
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.ensemble.solve import solved_batch
from mpiad.ensemble.solve_options import SolveOptions, error_of_unknown, options_of_states, settings_of
from mpiad.ensemble.sparse_lu import Matrices
from mpiad.ensemble.tableaus import Algorithm
from mpiad.primitives import stop_gradient
from mpiad.primitives.allgather import gather_pieces
from mpiad.primitives.checks import positive_count
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import alike_on_all, raising_together
from mpiad.transport.core.tracing import restoring_state

# Newton's method for the roots of f of many trajectories at once, each damped by its own pseudo-time step.
#
# A step Δ solves (M/τ - J) Δ = f, where M is the mass matrix: it is a step of the linearly implicit Euler method of length
# τ, and for large τ a step of Newton's method. A step is accepted if the estimated contraction factor of Newton's method
# for the implicit Euler equation is small enough. The factor determines the next τ; it doesn't depend on the scaling of
# components. In each round every active trajectory tries one step. After an accepted step the Jacobian is computed again.
#
# If f conserves totals, J is singular. Steps of finite length keep the totals; for the last step, and for derivatives, some
# equations are replaced by those of the totals (see below). If J is singular at the root for another reason,
# for example because what is conserved isn't linear, the steady state is the end of a long solve (see `_integrated`).
#
# References
# ----------
# Deuflhard, "Newton methods for nonlinear problems" (2004), section 6.4.


# The largest contraction factor of an accepted step, and the factor for which the next step size is chosen.
_MOST_CONTRACTION, _TARGET_CONTRACTION = 0.5, 0.25
_MOST_GROWTH = 10.0
# The first step size, relative to the ratio of the largest components of u and f.
_FIRST = 0.1

# The factor by which a long solve is repeated longer, and the maximum number of such solves.
_LONGER, _MOST_SOLVES = 10.0, 12
# Eigenvalues of Jacobians count as zero up to this ratio to the largest one.
_ZERO_RATE = 1e-6
# The final state of a long solve is near the steady state if a step of Newton's method changes it by no more than this.
_NEAR = 1e-3

_ACTIVE = -1
_LARGEST = 1e200  # limit of 1/τ


class Equations:
    """The equations of steady states for a batch of plain arrays: f = 0 at the end of tspan, and those of the totals.

    Jacobians of f have the shape (n, m): their entries at the places of `jacobians`. In `matrices` the rows of equations
    that follow from the others are replaced.
    """

    def __init__(self, batch: Batch, mass: Array | None):
        self._batch, self._field, self._jacobian, self._matrix = batch, Field(batch), jacobian_of(batch), mass
        self.mass, self.transposed_mass = Mass(mass, 1.0), Mass(None if mass is None else mass.T, 1.0)
        self.jacobians = self.matrices = Matrices(self._jacobian.places, len(batch.u0), mass)
        self._totals: dict[int, Totals] = {}  # by the indices of trajectories

    def find_totals(self, u: Array) -> None:
        """Find the conserved totals of each trajectory, given states of shape (d, N)."""
        d = len(u)
        with np.errstate(all="ignore"):
            states = random_states(np.where(u == 0, self._batch.u0, u))
            ids = np.flatnonzero(np.isfinite(states).all(axis=(0, 1)))
            if not ids.size:
                return
            f, jacobians = self.linearized(states[0][:, ids], ids)
            finite = np.isfinite(jacobians).all(axis=1) & np.isfinite(f).all(axis=0)
            ids, f, jacobians = ids[finite], f[:, finite], jacobians[finite]
            singular = self.jacobians.singular(jacobians, np.abs(states[0][:, ids]))
            ids, columns = ids[singular], [f[:, singular]]
            if not ids.size:
                return
            blocks = [self.jacobians.dense(jacobians[singular]) * np.abs(states[0][:, ids]).T[:, None]]
            for x in states[1:, :, ids]:
                f, jacobians = self.linearized(x, ids)
                columns.append(f)
                blocks.append(self.jacobians.dense(jacobians) * np.abs(x).T[:, None])
            start, end = self._batch.start[ids], self._batch.end[ids]
            # Totals are conserved from the start to the end.
            columns += [self.values(states[0][:, ids], ids, start + part * (end - start)) for part in (0.0, 0.5)]
        for k, i in enumerate(ids):
            matrix = np.concatenate([*(block[k] for block in blocks), *(f[:, k : k + 1] for f in columns)], axis=1)
            if (totals := totals_of(matrix)) is not None:
                self._totals[int(i)] = totals
        if not self._totals:
            return
        replaced = [np.nonzero(self._rows_of(totals)) for totals in self._totals.values()]
        numbers = [rows * d + columns for rows, columns in (self._jacobian.places, *replaced)]
        self.matrices = Matrices(Places(*np.divmod(np.unique(np.concatenate(numbers)), d)), d, self._matrix)

    def _rows_of(self, totals: Totals) -> Array:
        """Return the rows Lᵀ M in a matrix of zeros, shape (d, d)."""
        rows = np.zeros((len(totals.vectors),) * 2, totals.vectors.dtype)
        rows[totals.equations] = self.transposed_mass.times(totals.vectors).T
        return rows

    def replaced(self, jacobians: Array, ids: Array) -> Array:
        """Return the entries of `matrices`: the Jacobians of some trajectories, with the rows of totals."""
        if not self._totals:
            return jacobians
        d, (rows, columns) = len(self._batch.u0), self.matrices.places
        entries = np.zeros((len(ids), len(rows)), jacobians.dtype)
        places = np.searchsorted(rows * d + columns, self._jacobian.places.rows * d + self._jacobian.places.columns)
        entries[:, places] = jacobians
        for k, totals in self.totals(ids):
            chosen = np.isin(rows, totals.equations)
            entries[k, chosen] = self._rows_of(totals)[rows[chosen], columns[chosen]]
        return entries

    def totals(self, ids: Array) -> Iterator[tuple[int, Totals]]:
        """Iterate over the indices in `ids` of the trajectories with conserved totals, and these."""
        return ((k, self._totals[int(i)]) for k, i in enumerate(ids) if int(i) in self._totals)

    @property
    def has_totals(self) -> bool:
        """Whether any trajectory has conserved totals."""
        return bool(self._totals)

    def combined(self, f: Array, change: Array, ids: Array) -> Array:
        """Return an array like f, shape (d, n), with Lᵀ times another array in the rows of the totals' equations."""
        f = f.copy() if self._totals else f
        for k, totals in self.totals(ids):
            f[totals.equations, k] = totals.vectors.T @ change[:, k]
        return f

    def divided(self, bars: Array, ids: Array) -> tuple[Array, Array]:
        """Return the cotangents of both arrays of `combined`, its transpose."""
        of_f, of_change = bars.copy(), np.zeros_like(bars)
        for k, totals in self.totals(ids):
            of_f[totals.equations, k] = 0.0
            of_change[:, k] = totals.vectors @ bars[totals.equations, k]
        return of_f, of_change

    def residuals(self, f: Array, u: Array, ids: Array) -> Array:
        """Return the values of the equations of some trajectories, shape (d, n), given f at the states u."""
        return self.combined(f, self.mass.times(u - self._batch.u0[:, ids]), ids)

    def columns(self, ids: Array) -> tuple[list, Array]:
        """Return the leaves of the parameters and the times of some trajectories."""
        return self._batch.p.taken(ids), self._batch.end[ids].astype(self._batch.u0.dtype)

    def values(self, u: Array, ids: Array, t: Array | None = None) -> Array:
        """Return f at the states u, shape (d, n), and times t, by default the ends of tspan."""
        columns = two_at_least(len(ids))
        leaves, end = self.columns(ids[columns])
        time = end if t is None else t[columns].astype(end.dtype)
        return np.asarray(self._field.array(u[:, columns], leaves, time), u.dtype)[:, : len(ids)]

    def linearized(self, u: Array, ids: Array) -> tuple[Array, Array]:
        """Return f, shape (d, n), and its Jacobian with respect to the states."""
        columns = two_at_least(len(ids))
        at = u[:, columns], self._batch.parameters(ids[columns]), self._batch.end[ids[columns]].astype(u.dtype)
        return self.values(u, ids), self._jacobian.entries(*at)[0][:, : len(ids)].T


class _Search:
    """The searches for a root of f for each trajectory by Newton's method from u0, shape (d, N)."""

    def __init__(self, equations: Equations, u0: Array, rtol: Array | float, atol: Array | float):
        count, self._equations = u0.shape[1], equations
        # A search succeeds if a Newton step is at most ``atol + rtol * abs(u)``, and the Jacobian there is nonsingular.
        self._u, self._rtol, self._atol = u0.copy(), rtol, atol
        self._codes, self._niter = np.full(count, _ACTIVE), np.zeros(count, int)
        self._f, self._rate = np.zeros_like(u0), np.zeros(count)
        self._codes[~np.isfinite(u0).all(axis=0)] = ConvergenceCode.InitialFailure.code
        self._jacobian = np.full((count, len(equations.jacobians.places.rows)), np.nan, u0.dtype)
        self._linearize(self.active, ConvergenceCode.InitialFailure)
        ids = self.active
        size, change = (np.abs(x[:, ids]).max(axis=0, initial=0.0).astype(float) for x in (u0, self._f))
        size[size == 0] = 1.0
        self._rate[ids] = np.minimum(change / (_FIRST * size), _LARGEST)

    @property
    def active(self) -> Array:
        return np.flatnonzero(self._codes == _ACTIVE)

    def try_step(self) -> None:
        ids = self.active
        u, f, rate = self._u[:, ids], self._f[:, ids], self._rate[ids]
        with np.errstate(all="ignore"):
            # A step of the linearly implicit Euler method, of length 1 / rate.
            solved = self._equations.jacobians.solver(self._jacobian[ids], rate)
            step = solved(f)
            new = self._equations.values(u + step, ids)
            good = np.isfinite(new).all(axis=0)
            # Natural monotonicity test: the ratio of the next simplified Newton step, with the same matrix, to this step.
            following = solved(np.where(good, new - rate * self._equations.mass.times(step), 0.0))
            contraction = np.where(good, self.size(following, u) / self.size(step, u), np.inf)
        better = contraction <= _MOST_CONTRACTION
        self._u[:, ids[better]] += step[:, better]
        self._niter[ids[better]] += 1
        with np.errstate(divide="ignore"):
            growth = np.clip(_TARGET_CONTRACTION / contraction, 1 / _MOST_GROWTH, _MOST_GROWTH)
        self._rate[ids] = rate / growth
        self._codes[ids[self._rate[ids] > _LARGEST]] = ConvergenceCode.ConvergenceFailure.code
        self._linearize(ids[better], ConvergenceCode.ConvergenceFailure)

    def roots(self, max_iters: int) -> tuple[Array, Array, Array, Array]:
        """Return roots, (d, N), NaN if not found, their Jacobians, codes, and numbers of accepted steps."""
        for _ in range(max_iters):
            if not self.active.size:
                break
            self.try_step()
        codes = np.where(self._codes == _ACTIVE, ConvergenceCode.MaxIters.code, self._codes)
        ids = np.flatnonzero(codes == ConvergenceCode.Success.code)
        jacobian, u = np.full_like(self._jacobian, np.nan), np.full_like(self._u, np.nan)
        if ids.size:
            _, jacobian[ids] = self._equations.linearized(self._u[:, ids], ids)
            replaced = self._equations.replaced(jacobian[ids], ids)
            singular = self._equations.matrices.singular(replaced, self._weight(self._u[:, ids]))
            codes[ids[singular]] = ConvergenceCode.Singular.code
            ids = ids[codes[ids] == ConvergenceCode.Success.code]
        u[:, ids] = self._u[:, ids]
        return u, jacobian, codes, self._niter

    def _linearize(self, ids: Array, failure: ConvergenceCode) -> None:
        """Compute f and its Jacobian; take the undamped Newton step as the last step if it is short enough."""
        if not ids.size:
            return
        with np.errstate(all="ignore"):
            f, jacobian = self._equations.linearized(self._u[:, ids], ids)
            finite = np.isfinite(f).all(axis=0) & np.isfinite(jacobian).reshape(len(ids), -1).all(axis=1)
            self._codes[ids[~finite]] = failure.code
            ids, f, jacobian = ids[finite], f[:, finite], jacobian[finite]
            solved = self._equations.matrices.solver(self._equations.replaced(jacobian, ids))
            step = solved(-self._equations.residuals(f, self._u[:, ids], ids))
        self._jacobian[ids], self._f[:, ids] = jacobian, f
        last = self.size(step, self._u[:, ids]) <= 1
        self._u[:, ids[last]] += step[:, last]
        self._codes[ids[last]] = ConvergenceCode.Success.code

    def _weight(self, u: Array) -> Array:
        return np.maximum(self._atol + self._rtol * np.abs(u), np.finfo(u.dtype).tiny)

    def size(self, step: Array, u: Array) -> Array:
        """Return the largest component of each step, relative to its tolerance."""
        return (np.abs(step) / self._weight(u)).max(axis=0)


# Derivatives of steady states, by the implicit function theorem.
#
# Let A be the Jacobian of the equations of steady states: without totals, f = 0, A = ∂f/∂u = J, and du = -A⁻¹ ∂f/∂p dp. If
# equations are replaced by those of totals, their right-hand sides are Lᵀ M du0 + Lᵀ d(J(x) v), see below.
# So a tangent takes one linear solve with A per trajectory, and a cotangent takes one with Aᵀ. If a trajectory has no
# steady state, its derivative is zero.

# The place of the initial states among the arguments; the leaves of the parameters follow.
_U0 = 0


class SteadyStates:
    """The steady states, shape (N, d), NaN if not found, as a function of u0 and parameters (see `solve_operator`)."""

    def __init__(self, batch: Batch, equations: Equations, u: Array, jacobian: Array):
        self._batch, self._equations, self._jacobian = batch, equations, jacobian
        self.vector = np.ascontiguousarray(u.T)
        self._ids = np.flatnonzero(np.isfinite(self.vector).all(axis=1))

    def pull(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> dict[int, Array]:
        """Return the cotangents of arguments, given the cotangents g of the states, shape (N, d)."""
        p, ids, equations = self._batch.p, self._ids, self._equations
        cotangents = {k: np.zeros_like(args[k]) for k in argnums}
        if not ids.size:
            return cotangents
        # The transpose of du = A⁻¹ (-∂f/∂p dp, Lᵀ M du0 + Lᵀ d(J(x) v)): ū is multiplied by A⁻ᵀ, then by the transposes of
        # both parts.
        of_f, of_totals = equations.divided(self._solver(transposed=True)(g[ids].T), ids)
        if _U0 in argnums:
            cotangents[_U0][:, ids] = equations.transposed_mass.times(of_totals)
        places = [k - 1 for k in argnums if k != _U0]
        if places:
            u, leaves, t = self._at_steady_states(ids[two_at_least(len(ids))])

            def results(variables: list[Array]) -> Iterator[tuple[Array, Array]]:
                filled = with_leaves(leaves, places, variables)
                yield Field(self._batch).array(u, filled, t)[:, : len(ids)], -of_f
                if of_totals.any():
                    yield self._along(filled, t)[:, : len(ids)], of_totals

            parts = pulled(results, [leaves[place] for place in places])
            parts = [x[..., : len(ids)] if p.varies[k] and x is not None else x for k, x in zip(places, parts)]
            totals = {place: cotangents[place + 1] for place in places}
            p.add_cotangents(totals, dict(zip(places, parts)), ids)
            cotangents |= {place + 1: total for place, total in totals.items()}
        return cotangents

    def push(self, args: Sequence[Array], tangents: Mapping[int, Array]) -> Array:
        """Return the tangents of the states, given the tangents of arguments."""
        result, ids, varies, equations = np.zeros_like(self.vector), self._ids, self._batch.p.varies, self._equations
        if not ids.size:
            return result
        columns = ids[two_at_least(len(ids))]
        u, leaves, t = self._at_steady_states(columns)
        of_f, of_totals = np.zeros((2, *u.shape))[:, :, : len(ids)]
        if _U0 in tangents:
            of_totals = equations.mass.times(tangents[_U0][:, ids])
        along = {k - 1: np.take(g, columns, axis=-1) if varies[k - 1] else g for k, g in tangents.items() if k != _U0}
        if along:
            variables, gs = [leaves[place] for place in along], list(along.values())
            value = lambda x: Field(self._batch).array(u, with_leaves(leaves, along, x), t)  # noqa: E731
            of_f = -jvp(value, variables, gs)[1][:, : len(ids)]
            if equations.has_totals:
                product = lambda x: self._along(with_leaves(leaves, along, x), t)  # noqa: E731
                of_totals = of_totals + jvp(product, variables, gs)[1][:, : len(ids)]
        result[ids] = self._solver()(equations.combined(of_f, of_totals, ids)).T
        return result

    def _solver(self, transposed: bool = False) -> Callable[[Array], Array]:
        """Return a function that solves linear systems with the Jacobians of the equations."""
        entries = self._equations.replaced(self._jacobian[self._ids], self._ids)
        return self._equations.matrices.solver(entries, transposed=transposed)

    def _along(self, leaves: Sequence[Any], t: Array) -> Array:
        """Return J(x) v of the conserved totals for the steady states, as columns, given traced leaves."""
        x, v = self._direction
        columns = two_at_least(len(self._ids))
        with restoring_state(), Bundle() as bundle:
            state = bundle.variable(x[:, columns], [v[:, columns]])
            _, tangents = bundle.parts(Field(self._batch).array(state, leaves, t))
        return np.zeros_like(x[:, columns]) if tangents is None or tangents[0] is None else tangents[0]

    @cached_property
    def _direction(self) -> tuple[Array, Array]:
        """Random states x, and v with J(x) v = M (u - u0), shape (d, n); v is zero for trajectories without totals."""
        ids, equations = self._ids, self._equations
        u = self.vector[ids].T
        x = random_states(u)[0]
        change = equations.mass.times(u - self._batch.u0[:, ids])
        _, jacobian = equations.linearized(x, ids)
        v = equations.matrices.solver(equations.replaced(jacobian, ids))(
            equations.combined(change, np.zeros_like(change), ids)
        )
        having = np.zeros(len(ids), bool)
        having[[k for k, _ in equations.totals(ids)]] = True
        return x, np.where(having, v, 0.0)

    def _at_steady_states(self, ids: Array) -> tuple[Array, list[Any], Array]:
        """Return the steady states of some trajectories, and their leaves and times, as columns."""
        return np.ascontiguousarray(self.vector[ids].T), *self._equations.columns(ids)

    def pull_traced(self, *_: Any) -> NoReturn:
        """Raise a NotImplementedError, since second derivatives aren't supported."""
        raise NotImplementedError(
            "steady_state: second derivatives of steady states aren't supported. Differentiate f at sol.u yourself, or "
            "take the final state of a long solve, which has derivatives of any order."
        )

    push_traced = pull_traced


_RK45, _VECTORIZED = RK45(), EnsembleVectorized()


@dataclass(frozen=True, repr=False)
class SteadyStateSolution:
    """The steady states of N trajectories; for a single problem the attributes have no first axis.

    Attributes
    ----------
    u : array, shape (N, d)
        The steady states; NaN if none was found.
    retcode : array of str, shape (N,)
        Names of `ConvergenceCode`.
    niter : array of int, shape (N,)
        Number of accepted damped Newton steps, without the final undamped step.
    jacobian : array, shape (N, d, d)
        Jacobian of f with respect to u, at u; states that are matrices are flattened.
    indices : array of int, shape (N,)
        The numbers of the trajectories, from 0; with ``EnsembleMPI(gather=False)``, those of this rank's share.

    Examples
    --------
    >>> from mpiad.ensemble import EnsembleProblem, ODEProblem, steady_state
    >>> growth = ODEProblem(lambda u, p, t: [u[0] * (p[0] - u[0])], [0.5], (0.0, 1.0), [1.0])
    >>> found = steady_state(EnsembleProblem(growth, p=np.array([[1.0], [2.0]])))
    >>> print(found.u.ravel(), found.success, found.jacobian.ravel())
    [1. 2.] [ True  True] [-1. -2.]
    """

    u: Array
    retcode: Array
    niter: Array
    jacobian: Array
    indices: Array
    _problem: ODEProblem | EnsembleProblem | None = None  # None for a rank's share

    def __repr__(self) -> str:
        return f"{type(self).__name__}({np.count_nonzero(self.success)} of {np.size(self.niter)} Success)"

    @property
    def success(self) -> Array:
        """Whether a steady state was found: array of bool, shape (N,)."""
        return self.retcode == "Success"

    def eigenvalues(self) -> Array:
        """Return the eigenvalues of the Jacobians, shape (N, d); NaN if no steady state was found.

        A steady state is stable if all real parts are negative, except those of the conserved combinations, one zero each.
        """
        values = np.full(self.jacobian.shape[:-1], np.nan, complex)
        values[self.success] = np.linalg.eigvals(self.jacobian[self.success])
        return values

    def continued(self, tspan: tuple[Any, Any] | Array, p: Tree = None) -> Any:
        """Return the problem that starts at the steady states, for example of the conditions before an experiment.

        Parameters
        ----------
        tspan : tuple of two float, or array of shape (N, 2)
            Start and end times: for all trajectories, or one row per trajectory of an ensemble.
        p : pytree of arrays, optional
            Other parameters, as those of the problem: with a row per trajectory for an ensemble.

        Returns
        -------
        ODEProblem or EnsembleProblem
            A trajectory without a steady state starts at NaN: its solve fails, and has no derivatives.

        Raises
        ------
        ValueError
            If p is given for an ensemble with a `prob_func`, or the solution is a rank's share.

        Adjoint
        -------
        Cotangents of a solution of this problem flow back through the steady states to the parameters before.

        Examples
        --------
        >>> from mpiad.ensemble import EnsembleProblem, ODEProblem, solve, steady_state
        >>> growth = ODEProblem(lambda u, p, t: [u[0] * (p[0] - u[0])], [0.5], (0.0, 1.0), [1.0])
        >>> before = EnsembleProblem(growth, p=np.array([[1.0], [2.0]]))
        >>> after = steady_state(before).continued((0.0, 20.0), p=np.array([[2.0], [1.0]]))
        >>> print(after.u0.ravel(), solve(after, rtol=1e-8).u_end.ravel().round(6))
        [1. 2.] [2. 1.]
        """
        problem, changes = self._problem, {} if p is None else {"p": p}
        if problem is None:
            text = "this is a rank's share of the steady states. Find them with EnsembleMPI(gather=True)"
            raise ValueError(f"SteadyStateSolution.continued: {text}.")
        if isinstance(problem, ODEProblem):
            return remake(problem, u0=self.u, tspan=tspan, **changes)
        if problem.prob_func is not None:
            if changes:
                text = "the ensemble has a prob_func, which determines p. Continue an ensemble with rows of p instead"
                raise ValueError(f"SteadyStateSolution.continued: {text}.")
            return remake(problem, prob_func=_started_at(problem.prob_func, self.u, tspan))
        if isinstance(tspan, tuple):
            return remake(problem, problem=remake(problem.problem, tspan=tspan), tspan=None, u0=self.u, **changes)
        return remake(problem, tspan=tspan, u0=self.u, **changes)


def _started_at(prob_func: Function, states: Array, tspan: tuple[Any, Any] | Array) -> Function:
    """Return a `prob_func` that starts each problem at its state."""

    @wraps(prob_func)
    def started(problem: ODEProblem, i: int, repeat: int, **keywords: Any) -> ODEProblem:
        span = tspan if isinstance(tspan, tuple) else tspan[i - 1]
        return remake(prob_func(problem, i, repeat, **keywords), u0=states[i - 1], tspan=span)

    return started


def steady_state(
    problem: ODEProblem | EnsembleProblem,
    alg: Algorithm = _RK45,
    ensemblealg: EnsembleAlgorithm = _VECTORIZED,
    *,
    trajectories: int | None = None,
    rtol: float | Array = 1e-8,
    atol: float | Array = 1e-10,
    max_iters: int = 100,
    dt: float | None = None,
    dtmax: float = np.inf,
    max_steps: int = 100_000,
    compile: str | bool = "auto",
    **others: Any,
) -> SteadyStateSolution:
    """Find the steady state of each trajectory, f(u, p, t) = 0.

    Each trajectory is solved to the end of its tspan. Newton's method continues from this state, with damping and
    termination per trajectory. With a longer tspan, it begins closer to the steady state; with ``tspan=(t, t)``, at u0.

    If f conserves linear combinations of the components (of M u, if there is a mass matrix), such as the amount of an
    enzyme, free and bound, the steady state is the one that has their values at u0.

    If the steady state isn't isolated for another reason, it is the final state of a solve, which is repeated for ten times
    the time until its final state stays the same, by `alg` if it is a Rosenbrock method, otherwise by `Rodas5P`.

    Parameters
    ----------
    problem : ODEProblem or EnsembleProblem
        If f depends on time, it is evaluated at the end of tspan. f must use the functions of autograd.numpy.
    alg : Runge-Kutta or Rosenbrock method
        As for `solve`.
    ensemblealg : EnsembleVectorized, EnsembleSerial, EnsembleThreads or EnsembleMPI
    trajectories : int, optional
        As for `solve`.
    rtol, atol : float
        Tolerances of the solve and of the last Newton step, which is at most ``atol + rtol * abs(u)`` in each component.
    max_iters : int
        Maximum number of damped Newton steps, rejected steps included.
    dt, dtmax, max_steps, compile
        As for `solve`.

    Returns
    -------
    SteadyStateSolution
        ``u`` is traced if the parameters or initial states are. Its derivative with respect to initial states is zero
        except for conserved combinations.

    Raises
    ------
    NotImplementedError
        If tspan is traced, states are complex, arrays are on a device, or with EnsembleGPU; and for second derivatives.
    TypeError, ValueError
        If an argument is invalid.

    Ranks
    -----
    Each rank searches independently; with `EnsembleMPI`, all ranks of its communicator call `steady_state` with the same
    problem, and each rank computes its share of the trajectories.

    Adjoint
    -------
    By the implicit function theorem, a cotangent takes one solve with the transposed Jacobian per trajectory, in which the
    equations of conserved combinations replace those that follow from others. The derivative of a steady state that is the
    final state of a solve is that of the solve.

    Examples
    --------
    >>> from mpiad.ensemble import EnsembleProblem, ODEProblem, steady_state
    >>> growth = ODEProblem(lambda u, p, t: [u[0] * (p[0] - u[0])], [0.1], (0.0, 2.0), [1.0])
    >>> capacity = lambda p: steady_state(EnsembleProblem(growth, p=p)).u
    >>> print(capacity(np.array([[1.0], [2.0]])).ravel())
    [1. 2.]
    >>> print(mpiad.grad(lambda p: np.sum(capacity(p) ** 2), objective="sum")(np.array([[1.0], [2.0]])).ravel())
    [2. 4.]
    """
    refuse_in_trace(problem, "ensemble.steady_state")
    arguments = SolveOptions(
        problem=problem,
        alg=alg,
        ensemblealg=ensemblealg,
        trajectories=trajectories,
        rtol=rtol,
        atol=atol,
        dt=dt,
        dtmax=dtmax,
        max_steps=max_steps,
        compile=compile,
        unknown=error_of_unknown(steady_state, others),
    )
    if isinstance(ensemblealg, EnsembleMPI):
        solution = _over_ranks(arguments, max_iters, ensemblealg, channel(ensemblealg.comm, "ensemble.steady_state"))
    else:
        options = _checked(arguments, max_iters)
        compiler = Compiler(options.compile, options.backend, options.count)
        key = key_of(problem, None, "ensemble.steady_state")
        solution = _find(options, max_iters, compiler, range(options.count), key)
        solution = replace(solution, _problem=problem)
        report("steady_state", "trajectories", solution.retcode, compiler.not_finite)
    if not isinstance(problem, ODEProblem):
        return solution
    names = [field.name for field in fields(solution) if field.name != "_problem"]
    return replace(solution, **{name: getattr(solution, name)[0] for name in names})


def _over_ranks(arguments: SolveOptions, max_iters: int, mpi: EnsembleMPI, channel: Channel) -> SteadyStateSolution:
    options = _checked_together(channel, arguments, max_iters)
    compiler = Compiler(options.compile, options.backend, options.count, channel)
    bounds, key = mpi.bounds(options.count, channel.size), key_of(arguments.problem, channel, "ensemble.steady_state")
    with raising_together(channel, Exception), compiler:
        share = _find(options, max_iters, compiler, range(bounds[channel.rank], bounds[channel.rank + 1]), key)
    # Gathering requires the same shape and dtype on all ranks, including those without trajectories.
    kind = share.u.shape[1:], share.u.dtype
    texts = compiler.warnings, compiler.not_finite
    parts = channel.data.allgather((*texts, share.retcode, share.niter, share.jacobian, kind))
    warnings, not_finite, retcode, niter, jacobian, kinds = zip(*parts)
    check_alike(list(kinds), "ranks")
    compiler.log_warnings(warnings, channel.rank)
    retcodes = np.concatenate(retcode)
    if channel.rank == 0:
        report("steady_state", "trajectories", retcodes, dict(ChainMap(*not_finite)))
    if not mpi.gather and not isinstance(arguments.problem, ODEProblem):
        return share
    u = gather_pieces(share.u, 0, np.diff(bounds).tolist(), channel)
    rest = np.concatenate(niter), np.concatenate(jacobian), np.arange(len(retcodes))
    return SteadyStateSolution(u, retcodes, *rest, arguments.problem)


def _find(options: SolveOptions, max_iters: int, compiler: Compiler, numbers: range, key: int) -> SteadyStateSolution:
    """Search for the steady states of some trajectories, numbered from 0."""
    traced = _batch(options, numbers, key)
    batch = traced.plain()
    settings = settings_of(options, batch, np.empty(0), record=False, ends=True)
    started, _ = consistent_start(batch, settings.mass, settings.rtol, settings.atol)
    outcome = compiler.run_planned(compiler.plan(started, settings, started), started, settings, started)
    # NaN ends the search in trajectories whose solve failed.
    start = np.where(outcome.failed, np.nan, outcome.u_end)
    if batch.size:
        # f is traced once before the search, for a better error message.
        columns = np.zeros(2, int)
        t = batch.end[columns].astype(batch.u0.dtype)
        check_traceable(batch, batch.u0[:, columns], batch.p.taken(columns), t)
    # If the tolerance were smaller, a step of this size would consist of rounding errors.
    least = 100 * np.finfo(start.dtype).eps
    equations = Equations(batch, settings.mass)
    equations.find_totals(start)
    search = _Search(equations, start, np.maximum(settings.rtol, least), settings.atol)
    roots, jacobian, codes, niter = search.roots(max_iters)
    initial = np.flatnonzero(codes == ConvergenceCode.InitialFailure.code)
    compiler.not_finite |= not_finite_entries(batch, initial, numbers.start)
    states = SteadyStates(batch.snapshot(), equations, roots, jacobian)
    variables = traced.u0, *traced.p.leaves
    u = solve_operator(*variables, solved=states) if any(map(isbox, variables)) else states.vector
    singular = np.flatnonzero(codes == ConvergenceCode.Singular.code)
    if singular.size:
        ids, ends, jacobian[singular] = _integrated(options, traced, singular, equations, search)
        order = np.arange(batch.size)
        codes[ids], order[ids] = ConvergenceCode.Success.code, batch.size + np.arange(len(ids))
        u = anp.concatenate([u, ends])[order]
    indices = np.arange(numbers.start, numbers.stop)
    u = anp.reshape(u, (len(indices), *batch.shape))
    return SteadyStateSolution(u, ConvergenceCode.names_of(codes), niter, equations.jacobians.dense(jacobian), indices)


def _integrated(
    options: SolveOptions, traced: Batch, ids: Array, equations: Equations, search: _Search
) -> tuple[Array, Array, Array]:
    """Return those of the trajectories `ids` that approach a steady state, these states, (m, d), and Jacobians of all.

    A solve is repeated for ten times the time until this changes its final state by no more than the tolerance; f keeps the
    values that it has at the end of tspan. The last solve of traced inputs has derivatives.
    """
    f = equations.values(traced.plain().u0[:, ids], ids)
    traced = _continuing(traced.snapshot()).share(ids)
    batch = traced.plain()
    if not options.alg.tableau.implicit:
        # The length of explicit steps is limited by rates at which the state has settled; errors of derivatives would grow.
        options = options._replace(alg=Rodas5P(), dt=None)
    size, change = (np.abs(x).max(axis=0, initial=0.0) for x in (batch.u0, f))
    rates = np.where((change > 0) & np.isfinite(change), change / np.where(size > 0, size, 1.0), 1.0)
    length = np.where(batch.start == batch.end, 1 / rates, batch.end - batch.start)
    u, settled, active = np.full(batch.u0.shape, np.nan, batch.u0.dtype), np.zeros(batch.size, bool), np.arange(batch.size)

    def solved(batch: Batch, ids: Array) -> EnsembleSolution:
        part = batch.share(ids)._replace(end=batch.start[ids] + length[ids])
        compiler = Compiler(options.compile, options.backend, len(ids))
        return solved_batch(options, compiler, part._replace(start=np.array(part.start)))

    for _ in range(_MOST_SOLVES):
        sol = solved(batch, active)
        ends = sol.u_end.reshape(len(active), -1).T
        settled[active] = search.size(ends - u[:, active], ends) <= 1
        u[:, active] = ends
        active = active[sol.survivors & ~settled[active]]
        if not active.size:
            break
        length[active] *= _LONGER
    with np.errstate(all="ignore"):
        _, jacobian = equations.linearized(u, ids)
    dense = equations.jacobians.dense(jacobian)
    rows = np.array([k for k in np.flatnonzero(settled) if not _is_unstable(dense[k], options.mass)], int)
    if not rows.size:
        return ids[rows], u[:, rows].T, jacobian
    ends = anp.reshape(solved(traced, rows).u_end, (len(rows), -1)) if traced.traced else u[:, rows].T
    return ids[rows], _in_the_limit(ends, traced.share(rows), dense[rows], options.mass), jacobian


def _in_the_limit(ends: Array, batch: Batch, jacobians: Array, mass: Array | None) -> Array:
    """Return final states of long solves, (m, d), with the first derivatives of the limit of infinite time.

    A solve that starts near the steady state ends before its tangents have settled. The limit u̇ of the tangents satisfies
    J u̇ = -∂f/∂p ṗ, and Wᴴ M u̇ is that of the final state, where W are the left null vectors of J. With the right ones, V,
    and K = J + s M V (Wᴴ M V)⁻¹ Wᴴ M, for any s, a step u - K⁻¹ f(u, p) with constant K has this tangent.
    """
    columns = two_at_least(len(ends))
    part, inverses = batch.share(columns), np.array([_inverse(x, mass) for x in jacobians])[columns]
    u = anp.transpose(ends)[:, columns]

    def step(u: Array, inverses: Array) -> Array:
        return anp.einsum("nij,jn->in", inverses, Field(part).array(u, part.p.leaves, part.end.astype(jacobians.dtype)))

    plain = stop_gradient(u)
    is_near = np.abs(stop_gradient(step(plain, inverses))) <= _NEAR * np.abs(plain).max(axis=0)
    inverses = np.where(is_near.all(axis=0)[:, None, None], inverses, 0.0)
    return anp.transpose((u - step(u, inverses))[:, : len(ends)])


def _inverse(jacobian: Array, mass: Array | None) -> Array:
    """Return the inverse of K in `_in_the_limit`; zeros if zero is an eigenvalue of J with too few eigenvectors."""
    m = np.eye(len(jacobian)) if mass is None else mass
    left, singular, right = np.linalg.svd(jacobian)
    zero = singular <= _ZERO_RATE * singular.max()
    w, v = left[:, zero], right[zero].conj().T
    between = w.conj().T @ m @ v
    if zero.any() and np.linalg.cond(between) > 1 / _ZERO_RATE:
        return np.zeros_like(jacobian)
    return np.linalg.inv(jacobian + (singular.max() or 1.0) * m @ v @ np.linalg.solve(between, w.conj().T @ m))


def _is_unstable(jacobian: Array, mass: Array | None) -> bool:
    """Return whether perturbations of a steady state grow, so that a solve can start at it but not approach it."""
    rates: Array = scipy.linalg.eigvals(jacobian, mass)
    rates = rates[np.isfinite(rates)]
    return bool(rates.real.max(initial=0.0) > _ZERO_RATE * np.abs(rates).max(initial=0.0))


def _continuing(batch: Batch) -> Batch:
    """Return a batch whose f takes times after the end of tspan as the end; the bounds of tspan are further parameters."""
    f, p, (start, end) = batch.f, batch.p, (np.array(t, float) for t in (batch.start, batch.end))

    @wraps(f)
    def within_tspan(u: Array, p: tuple[Tree, Array, Array], t: Array) -> Array:
        parameters, earliest, latest = p
        return f(u, parameters, anp.minimum(anp.maximum(t, earliest), latest))

    leaves = [*p.leaves, np.minimum(start, end), np.maximum(start, end)]
    build = lambda leaves: (p.build(leaves[:-2]), *leaves[-2:])  # noqa: E731
    return batch._replace(f=within_tspan, p=Parameters(leaves, [*p.varies, True, True], build))


def _batch(options: SolveOptions, numbers: range, key: int) -> Batch:
    ensemble = options.ensemble
    batch, _ = own_members(ensemble, range(numbers.start + 1, numbers.stop + 1), 1, key, options.count)
    if isbox(batch.start) or isbox(batch.end):
        raise NotImplementedError("steady_state: tspan is traced, which isn't supported. Pass mpiad.stop_gradient(t).")
    if is_on_device(batch.plain()):
        raise NotImplementedError(
            "steady_state: the states or parameters are device arrays, but Newton's method runs on the host. Apply "
            "mpiad.device.to_host to them."
        )
    if np.iscomplexobj(batch.plain().u0):
        raise NotImplementedError(
            "steady_state: complex states aren't supported. Give real and imaginary parts as separate components."
        )
    return batch


def _checked(arguments: SolveOptions, max_iters: int) -> SolveOptions:
    positive_count(max_iters, "steady_state: max_iters")
    return options_of_states("steady_state", arguments)


# Arguments that ranks compare by their texts.
_COMPARED = ("alg", "ensemblealg", "trajectories", "rtol", "dt", "dtmax", "max_steps", "compile")


def _checked_together(channel: Channel, arguments: SolveOptions, max_iters: int) -> SolveOptions:
    """Return the result of `_checked`; raise errors, also about differences between ranks, on all ranks."""

    def described(options: SolveOptions) -> list[object]:
        shown = ", ".join(f"{name}={getattr(arguments, name)}" for name in _COMPARED)
        shown += f", max_iters={max_iters}, {type(arguments.problem).__name__}, {options.trajectories} of them"
        shown += f", {rng_of(arguments.problem, 'ensemble.steady_state')}"
        tolerances = [np.asarray(tolerance, float) for tolerance in (options.rtol, options.atol)]
        return [f"atol={arguments.atol!r:.60}, {shown}", shown, *tolerances, digest_of(arguments.problem)]

    return alike_on_all(channel, lambda: _checked(arguments, max_iters), described, "steady_state")


# Conserved totals: linear combinations of the components that no trajectory changes, such as an enzyme, free and bound.
#
# A vector l with lᵀ f(u, p, t) = 0 for all u and t also has lᵀ J = 0, where J = ∂f/∂u. So J is singular at every state,
# and f = 0 has a family of solutions, one for each value of lᵀu. Let the columns of L be a basis of such vectors. In
# reduced form, L is the identity in some rows, one for each vector. These equations of f = 0 follow from the others, and
# are replaced by Lᵀ M (u - u0) = 0, where M is the mass matrix.
#
# L is the left null space of the matrix that consists of J and f at several random states, and at several times.
#
# L depends on the parameters if a trajectory's compartments have parameters as volumes. Lᵀ J(x) = 0 holds for all p, so
# dLᵀ J(x) = -Lᵀ dJ(x). Where J(x) v = M (u - u0), the derivative of the replaced equations with respect to p is dLᵀ M (u
# - u0) = -Lᵀ d(J(x) v).

# The number of random states, and the range of factors by which they differ from a given one.
_STATES = 2
_LEAST, _MOST = 0.5, 2.0
# Singular values of matrices with scaled rows are zero up to this ratio to the largest one, and entries of L up to another.
_SINGULAR, _ZERO = 1e-13, 1e-12


class Totals(NamedTuple):
    """The c conserved totals of a trajectory."""

    vectors: Array  # the matrix L, shape (d, c)
    equations: Array  # the rows, int of shape (c,), in which L is the identity


def random_states(u: Array) -> Array:
    """Return states of the same signs and sizes as u, shape (d, n), without zeros: shape (_STATES, d, n)."""
    # Random numbers don't depend on the other trajectories.
    factors = np.random.default_rng(0).uniform(np.log(_LEAST), np.log(_MOST), (_STATES, len(u), 1))
    size = np.abs(u)
    largest = size.max(axis=0, initial=0.0)
    size = np.where(size == 0, np.where(largest == 0, 1.0, largest), size)
    return (np.exp(factors) * np.where(u < 0, -size, size)).astype(u.dtype)


def totals_of(matrix: Array) -> Totals | None:
    """Return the conserved totals, given a matrix of shape (d, m) with columns of J, scaled by sizes, and f; or None."""
    if not np.isfinite(matrix).all():
        return None
    rows = np.abs(matrix).max(axis=1)
    rows[rows == 0] = 1.0
    left, values, _ = np.linalg.svd(matrix / rows[:, None], full_matrices=False)
    basis = left[:, values <= _SINGULAR * values.max(initial=0.0)]
    if not basis.shape[1]:
        return None
    *_, pivots = scipy.linalg.qr(basis.T, mode="economic", pivoting=True)
    equations = np.sort(pivots[: basis.shape[1]])
    vectors = np.linalg.solve(basis[equations].T, basis.T).T
    vectors[np.abs(vectors) < _ZERO * np.abs(vectors).max(axis=0)] = 0.0
    return Totals(vectors * rows[equations] / rows[:, None], equations)
