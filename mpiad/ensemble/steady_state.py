"""`steady_state`: where the trajectories of an ensemble come to rest."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Integral
from types import SimpleNamespace
from typing import Any, TypeAlias

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.consistent_start import consistent_start
from mpiad.ensemble.damped_newton import Equations, find_roots
from mpiad.ensemble.gpu import EnsembleGPU
from mpiad.ensemble.linearization import Field, check_traceable
from mpiad.ensemble.members import columns_of, master_seed, own_members
from mpiad.ensemble.methods.dormand_prince import RK45
from mpiad.ensemble.outcome import ConvergenceCode, report
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, digests_of
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.reduction import check_alike
from mpiad.ensemble.solve_operator import solve_operator
from mpiad.ensemble.solve_options import SolveOptions, checked_options, settings_of
from mpiad.ensemble.steady_operator import SteadyStates
from mpiad.ensemble.tableaus import Algorithm
from mpiad.primitives.allgather import gather_pieces
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import alike_on_all, raising_together

_RK45, _VECTORIZED = RK45(), EnsembleVectorized()


@dataclass(frozen=True, repr=False)
class SteadyStateSolution:
    """The steady states of N trajectories; of a single problem all without their first axes.

    Attributes
    ----------
    u : array, shape (N, d)
        NaN where none was found.
    retcode : array of str, shape (N,)
        Names of `ConvergenceCode`.
    niter : array of int, shape (N,)
        Newton steps.
    jacobian : array, shape (N, d, d)
        That of f by u, at u. (For states that are matrices, of the flattened ones.)
    indices : array of int, shape (N,)
        The numbers of the trajectories, from 0; this rank's share with ``EnsembleMPI(gather=False)``.

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
        """Which trajectories have a steady state: array of bool, shape (N,)."""
        return self.retcode == "Success"

    def eigenvalues(self) -> Array:
        """Return the eigenvalues of the Jacobians, shape (N, d); NaN where there is no steady state.

        A steady state is stable where all real parts are below zero.
        """
        found = np.full(self.jacobian.shape[:-1], np.nan, complex)
        # At a state that isn't steady they would say nothing of stability.
        found[self.success] = np.linalg.eigvals(self.jacobian[self.success])
        return found


# The arguments of `steady_state`, by its names.
_Given: TypeAlias = SimpleNamespace


def steady_state(
    problem: ODEProblem | EnsembleProblem,
    alg: Algorithm = _RK45,
    ensemblealg: EnsembleAlgorithm = _VECTORIZED,
    *,
    trajectories: int | None = None,
    rtol: float = 1e-8,
    atol: float | Array = 1e-10,
    max_iters: int = 100,
    dt: float | None = None,
    dtmax: float = np.inf,
    max_steps: int = 100_000,
    compile: str | bool = "auto",
) -> SteadyStateSolution:
    """Find the state at which each trajectory comes to rest, f(u, p, t) = 0.

    Each trajectory is solved to the end of its tspan, and from there Newton's method goes on, with a damping and an end of
    its own: the longer tspan, the nearer the start to the steady state that the trajectory tends to. With ``tspan=(t, t)``
    Newton's method begins at u0.

    Parameters
    ----------
    problem : ODEProblem or EnsembleProblem
        Where f depends on time, it is taken at the end of tspan. f is written with the functions of autograd.numpy.
    alg : RK45, Tsit5, BS3, Vern7, RK4, Rosenbrock23 or Rodas5P
    ensemblealg : EnsembleVectorized, EnsembleSerial, EnsembleThreads or EnsembleMPI
    trajectories : int, optional
        As for `solve`.
    rtol, atol : float
        The tolerances of the solve; and the last Newton step is at most ``atol + rtol * abs(u)`` in each component.
    max_iters : int
        Newton steps that are tried.
    dt, dtmax, max_steps, compile
        As for `solve`.

    Returns
    -------
    SteadyStateSolution
        ``u`` is traced where the parameters are. By initial states there is no derivative: it is zero.

    Raises
    ------
    NotImplementedError
        Where tspan is traced, states are complex, or arrays live on a device; and for second derivatives.
    TypeError, ValueError
        Where an argument can't be used.

    Ranks
    -----
    Each rank searches for itself; with `EnsembleMPI`, all ranks of its communicator call it with the same problem, and each
    has its share of the trajectories.

    Adjoint
    -------
    By the implicit function theorem: one solve with the transposed Jacobian for each trajectory.

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
    given = _Given(**locals())  # first of all: nothing but the arguments is there
    if not isinstance(ensemblealg, EnsembleMPI):
        options = _checked(given)
        compiler = Compiler(options, options.trajectories)
        found = _found(given, options, compiler, range(options.trajectories))
        report("steady_state", "trajectories", found.retcode)
        return _first(found) if isinstance(problem, ODEProblem) else found
    return _over_ranks(given, ensemblealg, channel(ensemblealg.comm, "ensemble.steady_state"))


def _over_ranks(given: _Given, mpi: EnsembleMPI, used: Channel) -> SteadyStateSolution:
    options = _checked_together(used, given)
    compiler = Compiler(options, options.trajectories, together=True)
    bounds = mpi.bounds(options.trajectories, used.size)
    with raising_together(used, Exception):
        mine = _found(given, options, compiler, range(bounds[used.rank], bounds[used.rank + 1]))
    # Also of a rank without trajectories: the gathering that follows needs one kind on all.
    kind = mine.u.shape[1:], mine.u.dtype
    parts = used.data.allgather((compiler.warnings, mine.retcode, mine.niter, mine.jacobian, kind))
    said, retcode, niter, jacobian, kinds = zip(*parts)
    check_alike(list(kinds), "ranks")
    compiler.log_warnings(said, used.rank)
    every = np.concatenate(retcode)
    if used.rank == 0:
        report("steady_state", "trajectories", every)
    if not mpi.gather:
        return mine
    u = gather_pieces(mine.u, 0, np.diff(bounds).tolist(), used)
    found = SteadyStateSolution(u, every, np.concatenate(niter), np.concatenate(jacobian), np.arange(len(every)))
    return _first(found) if isinstance(given.problem, ODEProblem) else found


def _found(given: _Given, options: SolveOptions, compiler: Compiler, numbers: range) -> SteadyStateSolution:
    """Search for some trajectories, counted from 0."""
    traced = _batch(options, numbers)
    batch = traced.plain()
    settings = settings_of(options, batch, np.empty(0), record=False, ends=True)
    # Newton's method starts from where the solve ends: near a stable state that the trajectory comes to, and not any
    # other.
    started = consistent_start(batch, settings.mass, settings.rtol, settings.atol).batch
    outcome = compiler.run(started, settings, started)
    # NaN where the solve failed: the search from there ends at once, and finds nothing.
    start = np.where(outcome.failed, np.nan, outcome.u_end)
    if batch.size:
        # Traced once before the search, where an error can still say what is wrong with f; two columns, as everywhere.
        both = np.zeros(2, int)
        leaves, t = Equations(batch).columns(both)
        check_traceable(Field(batch), batch.u0[:, both], leaves, t)
    # Below it rounding is all that a step still sees.
    least = 100 * np.finfo(start.dtype).eps
    roots = find_roots(Equations(batch), start, max(options.rtol, least), settings.atol, given.max_iters)
    found = SteadyStates(batch, roots)
    leaves = traced.p.leaves
    u = solve_operator(*leaves, solved=found) if any(map(isbox, leaves)) else found.vector
    indices = np.arange(numbers.start, numbers.stop)
    u = anp.reshape(u, (len(indices), *batch.shape))
    return SteadyStateSolution(u, ConvergenceCode.names_of(roots.codes), roots.niter, roots.jacobian, indices)


def _batch(options: SolveOptions, numbers: range) -> Batch:
    problem = options.problem
    if isinstance(problem, ODEProblem):
        one = columns_of([problem], [1])
        batch = one if len(numbers) else one.share(slice(0, 0))
    else:
        seed = master_seed(problem.seed) if problem.prob_func else 0
        batch, _ = own_members(problem, range(numbers.start + 1, numbers.stop + 1), 1, seed, options.trajectories)
    if isbox(batch.start) or isbox(batch.end):
        raise NotImplementedError("steady_state: tspan is traced, but has no derivative here. Pass mpiad.stop_gradient(t).")
    if is_on_device(batch.plain()):
        raise NotImplementedError(
            "steady_state: the states or parameters are device arrays, but Newton's method runs on the host. Bring them "
            "there with mpiad.device.to_host."
        )
    if np.iscomplexobj(batch.plain().u0):
        raise NotImplementedError(
            "steady_state: complex states aren't supported. Write real and imaginary parts as components of their own."
        )
    return batch


def _first(found: SteadyStateSolution) -> SteadyStateSolution:
    return replace(found, **{field.name: getattr(found, field.name)[0] for field in fields(found)})


def _checked(given: _Given) -> SolveOptions:
    like_solve = {name: getattr(given, name) for name in SolveOptions._fields if hasattr(given, name)}
    options = checked_options(SolveOptions(**like_solve))
    if not isinstance(given.max_iters, Integral) or given.max_iters < 1:
        raise ValueError(f"steady_state: max_iters must be an integer above zero, but got {given.max_iters!r}.")
    if getattr(given.problem, "output_func", None) is not None or getattr(given.problem, "reduction", None) is not None:
        raise ValueError(
            "steady_state: the ensemble has an output_func or a reduction, but steady states are returned as they are. "
            "Leave them out: remake(ensemble, output_func=None, reduction=None)."
        )
    if isinstance(options.backend, EnsembleGPU):
        raise NotImplementedError("steady_state: EnsembleGPU can't search; take EnsembleVectorized() or EnsembleThreads().")
    return options


def _checked_together(used: Channel, given: _Given) -> SolveOptions:
    """Return `_checked` of the arguments, which must be the same on all ranks; what one finds wrong all raise."""

    def described(options: SolveOptions) -> list[Any]:
        said = ", ".join(f"{name}={getattr(given, name)}" for name in vars(given) if name not in ("problem", "atol"))
        said += f", {type(given.problem).__name__}, {options.trajectories} of them"
        return [f"atol={given.atol!r:.60}, {said}", said, np.asarray(options.atol, float), digests_of(given.problem)]

    return alike_on_all(used, lambda: _checked(given), described, "steady_state")
