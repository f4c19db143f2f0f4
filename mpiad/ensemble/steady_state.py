"""`steady_state`: the steady states of an ensemble's trajectories."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import autograd.numpy as anp
import numpy as np
import scipy.sparse
from autograd.tracer import isbox
from scipy.sparse.linalg import LinearOperator, onenormest

from mpiad._typing import Array
from mpiad.differentiation.products import jvp
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import Batch, is_on_device, not_finite_entries, two_at_least
from mpiad.ensemble.column_lu import Mass
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.consistent_start import consistent_start
from mpiad.ensemble.differentiable import solve_operator
from mpiad.ensemble.field_jacobian import jacobian_of
from mpiad.ensemble.linearization import Field, check_traceable, pulled, with_leaves
from mpiad.ensemble.members import master_seed, own_members
from mpiad.ensemble.methods.dormand_prince import RK45
from mpiad.ensemble.outcome import ConvergenceCode, report
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, digests_of
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.reduction import check_alike
from mpiad.ensemble.solve_options import SolveOptions, options_of_states, refuse_unknown, settings_of
from mpiad.ensemble.sparse_lu import StepMatrices
from mpiad.ensemble.tableaus import Algorithm
from mpiad.primitives.allgather import gather_pieces
from mpiad.primitives.checks import positive_count
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import alike_on_all, raising_together

# Newton's method for the roots of f of many trajectories at once, each damped by its own pseudo-time step.
#
# A step Δ solves (1/τ - J) Δ = f: it is a step of the linearly implicit Euler method of length τ, and for large τ a step of
# Newton's method. A step is accepted if the estimated contraction factor of Newton's method for the implicit Euler equation
# is small enough. The factor determines the next τ; it doesn't depend on the scaling of components. In each round every
# active trajectory tries one step. After an accepted step the Jacobian is computed again.
#
# References
# ----------
# Deuflhard, "Newton methods for nonlinear problems" (2004), section 6.4.


# The largest contraction factor of an accepted step, and the factor for which the next step size is chosen.
_MOST_CONTRACTION, _TARGET_CONTRACTION = 0.5, 0.25
_MOST_GROWTH = 10.0
# The first step size, relative to the ratio of the largest components of u and f.
_FIRST = 0.1
# Scaled matrices count as singular up to this ratio of the smallest to the largest singular value.
_SINGULAR = 1e-13

_ACTIVE = -1
_LARGEST = 1e200  # limit of 1/τ


class Equations:
    """The function f of a batch of plain arrays, at the end of tspan, and its Jacobian.

    Jacobians have the shape (n, m): their entries at `places`. If this takes less work, `sparse_lu` factorizes them.
    """

    def __init__(self, batch: Batch):
        self._batch, self._field, self._jacobian = batch, Field(batch), jacobian_of(batch)
        self.places = self._jacobian.places
        matrices = StepMatrices(self.places, Mass(None, 1.0), len(batch.u0))
        self._sparse = matrices if matrices.elimination else None

    def columns(self, ids: Array) -> tuple[list, Array]:
        """Return the leaves of the parameters and the times of some trajectories."""
        return self._batch.p.taken(ids), self._batch.end[ids].astype(self._batch.u0.dtype)

    def values(self, u: Array, ids: Array) -> Array:
        """Return f at the states u, shape (d, n)."""
        columns = two_at_least(len(ids))
        return np.asarray(self._field.array(u[:, columns], *self.columns(ids[columns])), u.dtype)[:, : len(ids)]

    def linearized(self, u: Array, ids: Array) -> tuple[Array, Array]:
        """Return f, shape (d, n), and its Jacobian with respect to the states."""
        columns = two_at_least(len(ids))
        at = u[:, columns], self._batch.parameters(ids[columns]), self._batch.end[ids[columns]].astype(u.dtype)
        return self.values(u, ids), self._jacobian.entries(*at)[0][:, : len(ids)].T

    def solver(self, jacobians: Array, rates: Array | None = None, transposed: bool = False) -> Callable[[Array], Array]:
        """Return a function that solves J x = b, or (rate - J) x = b, for right-hand sides b of shape (d, n)."""
        if self._sparse is None:
            matrices = self.dense(jacobians)
            matrices = matrices if rates is None else rates[:, None, None] * np.eye(matrices.shape[-1]) - matrices
            matrices = np.swapaxes(matrices, 1, 2) if transposed else matrices
            return lambda right: solved_each(matrices, right.T).T
        entries, scale = (jacobians.T, 0.0) if rates is None else (-jacobians.T, rates)
        lu = self._sparse.factorized(entries, scale)

        def solved(right: Array) -> Array:
            x = np.array(right, entries.dtype, order="C")  # rates are doubles
            lu.solve(x, transposed)
            x[:, ~right.any(axis=0)] = 0.0  # also if the matrix is singular
            return x

        return solved

    def singular(self, jacobians: Array, weight: Array) -> Array:
        """Return a mask of the singular Jacobians, shape (n,), independent of the units of components."""
        if self._sparse is None:
            scaled = self.dense(jacobians) * weight.T[:, None]
            rows = np.abs(scaled).max(axis=2, keepdims=True)
            rows[rows == 0] = 1.0
            values = np.linalg.svd(scaled / rows, compute_uv=False)
            return values[:, -1] <= _SINGULAR * values[:, 0]
        return np.array([self._singular(*one) for one in zip(jacobians, weight.T)], bool)

    def _singular(self, entries: Array, weight: Array) -> bool:
        d, (rows, columns) = len(weight), self.places
        scaled: Any = scipy.sparse.csr_array((entries * weight[columns], (rows, columns)), (d, d))
        size = abs(scaled).max(axis=1).toarray().ravel()
        size[size == 0] = 1.0
        solve, transposed = (self.solver(entries[None], transposed=along) for along in (False, True))
        operator: Any = LinearOperator
        inverse = operator(
            (d, d),
            dtype=entries.dtype,
            matvec=lambda x: solve((size * x.ravel())[:, None])[:, 0] / weight,
            rmatvec=lambda x: transposed((x.ravel() / weight)[:, None])[:, 0] * size,
        )
        if not np.isfinite(inverse.matvec(np.ones(d))).all():
            return True
        norm: Any = onenormest(inverse)
        return bool(_SINGULAR * norm * abs(scaled / size[:, None]).sum(axis=0).max() >= 1)

    def dense(self, jacobians: Array) -> Array:
        """Return the Jacobians as an array of shape (n, d, d)."""
        d = len(self._batch.u0)
        matrices = np.zeros((len(jacobians), d, d), jacobians.dtype)
        matrices[:, self.places.rows, self.places.columns] = jacobians
        matrices[np.isnan(jacobians).any(axis=1)] = np.nan  # if no steady state was found
        return matrices


def solved_each(matrices: Array, right: Array) -> Array:
    """Return the solutions of n small systems, (n, d); for singular systems, least-squares solutions of minimum norm."""
    # Rows are scaled, since they may differ by powers of ten, for example in reaction networks.
    rows = np.abs(matrices).max(axis=2, keepdims=True, initial=0.0)
    rows[rows == 0] = 1.0
    matrices, right = matrices / rows, right[..., None] / rows
    try:
        return np.linalg.solve(matrices, right)[..., 0]
    except np.linalg.LinAlgError:
        # The systems are solved one by one, so that a singular system doesn't affect the others.
        return np.array([_solved_best(*system) for system in zip(matrices, right[..., 0])]).reshape(right.shape[:2])


def _solved_best(matrix: Array, right: Array) -> Array:
    try:
        return np.linalg.solve(matrix, right)
    except np.linalg.LinAlgError:
        return np.linalg.pinv(matrix, rcond=_SINGULAR) @ right


class _Search:
    """The searches for a root of f for each trajectory by Newton's method from u0, shape (d, N)."""

    def __init__(self, equations: Equations, u0: Array, rtol: Array | float, atol: Array | float):
        count, self._equations = u0.shape[1], equations
        # A search succeeds if a Newton step is at most ``atol + rtol * abs(u)``, and the Jacobian there is nonsingular.
        self._u, self._rtol, self._atol = u0.copy(), rtol, atol
        self._codes, self._niter = np.full(count, _ACTIVE), np.zeros(count, int)
        self._f, self._rate = np.zeros_like(u0), np.zeros(count)
        self._codes[~np.isfinite(u0).all(axis=0)] = ConvergenceCode.InitialFailure.code
        self._jacobian = np.full((count, len(equations.places.rows)), np.nan, u0.dtype)
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
            solved = self._equations.solver(self._jacobian[ids], rate)
            step = solved(f)
            new = self._equations.values(u + step, ids)
            good = np.isfinite(new).all(axis=0)
            # Natural monotonicity test: the ratio of the next simplified Newton step, with the same matrix, to this step.
            following = solved(np.where(good, new - rate * step, 0.0))
            contraction = np.where(good, self._size(following, u) / self._size(step, u), np.inf)
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
            codes[ids[self._equations.singular(jacobian[ids], self._weight(self._u[:, ids]))]] = (
                ConvergenceCode.Singular.code
            )
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
            step = self._equations.solver(jacobian)(-f)
        self._jacobian[ids], self._f[:, ids] = jacobian, f
        last = self._size(step, self._u[:, ids]) <= 1
        self._u[:, ids[last]] += step[:, last]
        self._codes[ids[last]] = ConvergenceCode.Success.code

    def _weight(self, u: Array) -> Array:
        return np.maximum(self._atol + self._rtol * np.abs(u), np.finfo(u.dtype).tiny)

    def _size(self, step: Array, u: Array) -> Array:
        """Return the largest component of each step, relative to its tolerance."""
        return (np.abs(step) / self._weight(u)).max(axis=0)


# Derivatives of steady states, by the implicit function theorem.
#
# If f(u, p) = 0 and J = ∂f/∂u is nonsingular, then du = -J⁻¹ ∂f/∂p dp. So a tangent takes one linear solve with J per
# trajectory, and a cotangent takes one with Jᵀ. If a trajectory has no steady state, its derivative is zero.


class SteadyStates:
    """The steady states, shape (N, d), NaN if not found, as a function of parameters' leaves (see `solve_operator`)."""

    def __init__(self, batch: Batch, equations: Equations, u: Array, jacobian: Array):
        self._batch, self._equations, self._jacobian = batch, equations, jacobian
        self.vector = np.ascontiguousarray(u.T)
        self._ids = np.flatnonzero(np.isfinite(self.vector).all(axis=1))

    def pull(self, argnums: Sequence[int], args: Sequence[Array], g: Array) -> dict[int, Array]:
        """Return the cotangents of leaves of the parameters, given the cotangents g of the states, shape (N, d)."""
        p, ids = self._batch.p, self._ids
        cotangents = {place: np.zeros_like(args[place]) for place in argnums}
        if not ids.size:
            return cotangents
        # p̄ = (∂f/∂p)ᵀ (-J⁻ᵀ ū), the transpose of du = -J⁻¹ ∂f/∂p dp.
        bars = -self._equations.solver(self._jacobian[ids], transposed=True)(g[ids].T)
        u, leaves, t = self._at_steady_states(ids[two_at_least(len(ids))])

        def results(variables: list[Array]) -> list[tuple[Array, Array]]:
            return [(Field(self._batch).array(u, with_leaves(leaves, argnums, variables), t)[:, : len(ids)], bars)]

        parts = pulled(results, [leaves[place] for place in argnums])
        parts = [x[..., : len(ids)] if p.varies[k] and x is not None else x for k, x in zip(argnums, parts)]
        p.add_cotangents(cotangents, dict(zip(argnums, parts)), ids)
        return cotangents

    def push(self, args: Sequence[Array], tangents: Mapping[int, Array]) -> Array:
        """Return the tangents of the states, given the tangents of leaves of the parameters."""
        result, ids, varies = np.zeros_like(self.vector), self._ids, self._batch.p.varies
        if not ids.size:
            return result
        columns = ids[two_at_least(len(ids))]
        u, leaves, t = self._at_steady_states(columns)
        variables = [leaves[place] for place in tangents]
        along = [np.take(g, columns, axis=-1) if varies[place] else g for place, g in tangents.items()]
        value = lambda x: Field(self._batch).array(u, with_leaves(leaves, tangents, x), t)  # noqa: E731
        result[ids] = -self._equations.solver(self._jacobian[ids])(jvp(value, variables, along)[1][:, : len(ids)]).T
        return result

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({np.count_nonzero(self.success)} of {np.size(self.niter)} Success)"

    @property
    def success(self) -> Array:
        """Whether a steady state was found: array of bool, shape (N,)."""
        return self.retcode == "Success"

    def eigenvalues(self) -> Array:
        """Return the eigenvalues of the Jacobians, shape (N, d); NaN if no steady state was found.

        A steady state is stable if all real parts are negative.
        """
        values = np.full(self.jacobian.shape[:-1], np.nan, complex)
        values[self.success] = np.linalg.eigvals(self.jacobian[self.success])
        return values


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
        ``u`` is traced if the parameters are. Its derivative with respect to initial states is zero.

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
    By the implicit function theorem, a cotangent takes one solve with the transposed Jacobian per trajectory.

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
    refuse_unknown(steady_state, others)
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
    )
    if isinstance(ensemblealg, EnsembleMPI):
        solution = _over_ranks(arguments, max_iters, ensemblealg, channel(ensemblealg.comm, "ensemble.steady_state"))
    else:
        options = _checked(arguments, max_iters)
        compiler = Compiler(options.compile, options.backend, options.count)
        solution = _find(options, max_iters, compiler, range(options.count))
        report("steady_state", "trajectories", solution.retcode, compiler.not_finite)
    if not isinstance(problem, ODEProblem):
        return solution
    return replace(solution, **{field.name: getattr(solution, field.name)[0] for field in fields(solution)})


def _over_ranks(arguments: SolveOptions, max_iters: int, mpi: EnsembleMPI, channel: Channel) -> SteadyStateSolution:
    options = _checked_together(channel, arguments, max_iters)
    compiler = Compiler(options.compile, options.backend, options.count, channel)
    bounds = mpi.bounds(options.count, channel.size)
    with raising_together(channel, Exception), compiler:
        share = _find(options, max_iters, compiler, range(bounds[channel.rank], bounds[channel.rank + 1]))
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
    return SteadyStateSolution(u, retcodes, np.concatenate(niter), np.concatenate(jacobian), np.arange(len(retcodes)))


def _find(options: SolveOptions, max_iters: int, compiler: Compiler, numbers: range) -> SteadyStateSolution:
    """Search for the steady states of some trajectories, numbered from 0."""
    traced = _batch(options, numbers)
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
        check_traceable(Field(batch), batch.u0[:, columns], batch.p.taken(columns), t)
    # If the tolerance were smaller, a step of this size would consist of rounding errors.
    least = 100 * np.finfo(start.dtype).eps
    equations = Equations(batch)
    search = _Search(equations, start, np.maximum(settings.rtol, least), settings.atol)
    roots, jacobian, codes, niter = search.roots(max_iters)
    initial = np.flatnonzero(codes == ConvergenceCode.InitialFailure.code)
    compiler.not_finite |= not_finite_entries(batch, initial, numbers.start)
    states = SteadyStates(batch.snapshot(), equations, roots, jacobian)
    leaves = traced.p.leaves
    u = solve_operator(*leaves, solved=states) if any(map(isbox, leaves)) else states.vector
    indices = np.arange(numbers.start, numbers.stop)
    u = anp.reshape(u, (len(indices), *batch.shape))
    return SteadyStateSolution(u, ConvergenceCode.names_of(codes), niter, equations.dense(jacobian), indices)


def _batch(options: SolveOptions, numbers: range) -> Batch:
    ensemble = options.ensemble
    seed = master_seed(ensemble.seed) if ensemble.prob_func else 0
    batch, _ = own_members(ensemble, range(numbers.start + 1, numbers.stop + 1), 1, seed, options.count)
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
        tolerances = [np.asarray(tolerance, float) for tolerance in (options.rtol, options.atol)]
        return [f"atol={arguments.atol!r:.60}, {shown}", shown, *tolerances, digests_of(arguments.problem)]

    return alike_on_all(channel, lambda: _checked(arguments, max_iters), described, "steady_state")
