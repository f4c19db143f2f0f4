"""`fit`: least squares for each trajectory of an ensemble by itself, all of them at once."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Function, Tree
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import is_on_device, save_times
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.fit_options import FitArguments, FitPlan, planned, planned_together
from mpiad.ensemble.fit_result import FitResult, fits_of, joined_fits
from mpiad.ensemble.levenberg_marquardt import Evaluation, minimize_each
from mpiad.ensemble.members import master_seed, members
from mpiad.ensemble.methods.dormand_prince import RK45
from mpiad.ensemble.outcome import report
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.residuals import Residuals
from mpiad.ensemble.sensitivity import Generator, SensitivitySolve
from mpiad.ensemble.solve_options import settings_of
from mpiad.ensemble.tableaus import Algorithm
from mpiad.pytrees import flatten
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import raising_together

_RK45, _VECTORIZED = RK45(), EnsembleVectorized()


def fit(
    ensemble: ODEProblem | EnsembleProblem,
    residuals: Function,
    p0: Array,
    alg: Algorithm = _RK45,
    ensemblealg: EnsembleAlgorithm = _VECTORIZED,
    *,
    data: Tree = None,
    saveat: float | Array | None = None,
    prob_generator: Generator | None = None,
    bounds: tuple[Array, Array] = (-np.inf, np.inf),
    ftol: float = 1e-8,
    xtol: float = 1e-8,
    gtol: float = 1e-8,
    x_scale: Array | str = "jac",
    max_nfev: int | None = None,
    rtol: float = 1e-6,
    atol: float | Array = 1e-9,
    dt: float | None = None,
    dtmax: float = np.inf,
    max_steps: int = 10_000,
    batch_size: int | None = None,
    compile: str | bool = "auto",
) -> FitResult:
    """Fit each trajectory of an ensemble to its own data by least squares, many fits at once.

    Each fit is a Levenberg-Marquardt iteration with a damping, an end and a return code of its own. In each round the
    trajectories that are still under way are solved together, with the derivatives by their variables.

    Parameters
    ----------
    ensemble : ODEProblem or EnsembleProblem
        One problem for all fits, or an ensemble whose trajectories differ in u0, tspan or what isn't sought.
    residuals : callable
        ``residuals(u, p, data)`` returns an array of real numbers, or a list of them, of which half the sum of squares is
        minimised. It is written for one trajectory with the functions of autograd.numpy: u of shape (n_saved, d), p of
        shape (m,), `data` as one row of it; and called with columns, as f is: all have the trajectories as one more axis at
        the end.
    p0 : array, shape (N, m)
        Where to start; a trajectory's number is its row.
    alg : RK45, Tsit5, BS3, Vern7, RK4, Rosenbrock23 or Rodas5P
        The last two are for stiff problems.
    ensemblealg : EnsembleVectorized, EnsembleSerial, EnsembleThreads or EnsembleMPI
        With `EnsembleMPI` each rank fits its share, and nothing is communicated until all are done.
    data : pytree of arrays, optional
        Each with one row for each trajectory.
    saveat : number, list of numbers, or array of shape (N, n_saved), optional
        The times of u, as for `solve`.
    prob_generator : callable, optional
        ``prob_generator(problem, x)`` returns the problem with variables x in it, as ``remake(problem, u0=x[:2],
        p=x[2:])``; written for one trajectory, called with columns, with the functions of autograd.numpy. By default x
        are the parameters p.
    bounds : tuple of two arrays
        Lower and upper ones, numbers or of shape (m,) or (N, m).
    ftol, xtol, gtol : float
        A fit is done where the cost changes by less than ``ftol * cost``, and the model foresaw no more; where a step is
        shorter than ``xtol`` times x, both scaled; or where no entry of the gradient, but for variables held by a bound,
        is larger than `gtol`.
    x_scale : array or "jac"
        The sizes of the variables, numbers or of shape (m,) or (N, m); by default from the columns of the Jacobian.
    max_nfev : int, optional
        Solves of each trajectory; 100 m by default.
    rtol, atol, dt, dtmax, max_steps
        Of the solves, as for `solve`. A try far from the data may need any number of steps; one that needs more than
        `max_steps` is refused, as one that fails.
    batch_size : int, optional
        How many fits are under way at once, which bounds memory; all by default.
    compile : {"auto", True, False}
        As for `solve`; "auto" compiles where N (m + 1) is at least 1,000.

    Raises
    ------
    NotImplementedError
        Where an argument is traced, or lives on a device.
    TypeError, ValueError
        Where an argument can't be used.

    Ranks
    -----
    Each rank fits for itself; with `EnsembleMPI`, all ranks of its communicator call it with the same arguments.

    Notes
    -----
    The derivatives are those of the solves' accepted steps, exact to rounding. A step minimises the damped quadratic model
    in the box of the bounds. One to where a solve fails is refused, and the next one is shorter.
    A fit's numbers don't depend on the others, nor on the ranks, bit for bit, under the conditions of `solve`.

    Examples
    --------
    >>> import autograd.numpy as np
    >>> from mpiad.ensemble import ODEProblem, fit
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 2.0), [1.0])
    >>> times, rates = np.linspace(0.0, 2.0, 9), np.array([[0.5], [1.0], [1.5]])
    >>> measured = np.exp(-rates * times)
    >>> found = fit(decay, lambda u, p, data: u[:, 0] - data, np.ones((3, 1)), data=measured, saveat=times)
    >>> print(found.p.ravel().round(4), found.retcode)
    [0.5 1.  1.5] ['Success' 'Success' 'Success']
    """
    given = FitArguments(**locals())  # first of all: nothing but the arguments is there
    if not isinstance(ensemblealg, EnsembleMPI):
        plan = planned(given)
        compiler = _compiler(plan)
        found = _share(given, plan, compiler, range(len(plan.start)))
        report("fit", "fits", found.retcode)
        return found
    used = channel(ensemblealg.comm, "ensemble.fit")
    return _over_ranks(given, ensemblealg, used)


def _compiler(plan: FitPlan, together: bool = False) -> Compiler:
    count, m = plan.start.shape
    # As many columns as the states and their m tangents: by that "auto" weighs a kernel's compilation.
    return Compiler(plan.options, count * (1 + m), together)


def _over_ranks(given: FitArguments, mpi: EnsembleMPI, used: Channel) -> FitResult:
    plan = planned_together(used, given)
    compiler, count = _compiler(plan, together=True), len(plan.start)
    bounds = mpi.bounds(count, used.size)
    with raising_together(used, Exception):
        mine = _share(given, plan, compiler, range(bounds[used.rank], bounds[used.rank + 1]))
    said, parts = zip(*used.data.allgather((compiler.warnings, mine)))
    compiler.log_warnings(said, used.rank)
    every = joined_fits(parts)
    # A trajectory's fit takes many solves: all of their steps are its cost the next time.
    mpi.remember(every._tries, 1, bool(compiler.kernels), traced=True)
    if used.rank == 0:
        report("fit", "fits", every.retcode)
    return every if mpi.gather else mine


def _share(given: FitArguments, plan: FitPlan, compiler: Compiler, numbers: range) -> FitResult:
    """Fit some trajectories, counted from 0, some after the others."""
    size = max(1, given.batch_size or len(numbers))
    batches = [numbers[i : i + size] for i in range(0, len(numbers), size)] or [numbers]
    return joined_fits([_fitted(given, plan, compiler, numbers) for numbers in batches])


def _fitted(given: FitArguments, plan: FitPlan, compiler: Compiler, numbers: range) -> FitResult:
    ensemble, options, rows = plan.options.problem, plan.options, slice(numbers.start, numbers.stop)
    seed = master_seed(ensemble.seed) if ensemble.prob_func else 0
    batch = members(ensemble, range(numbers.start + 1, numbers.stop + 1), 1, seed, len(plan.start))
    if batch.traced or is_on_device(batch):
        raise NotImplementedError(
            "fit: the ensemble has traced values or device arrays, through which nothing can be differentiated or solved "
            "here. Pass mpiad.stop_gradient(x), or bring them to the host with mpiad.device.to_host."
        )
    settings = settings_of(options, batch, save_times(options.saveat, batch, numbers.start), record=True)
    solves = SensitivitySolve(compiler, batch, settings, given.prob_generator)
    misfit = Residuals(given.residuals, _rows_of(given.data, rows), batch.shape)
    tries = np.zeros(len(numbers), int)

    def evaluate(x: Array, ids: Array) -> Evaluation:
        states = solves.states(x, ids)
        tries[ids] += states.tries
        return misfit.evaluated(x, states, ids)

    scale = None if plan.scale is None else plan.scale[rows]
    found = minimize_each(evaluate, plan.start[rows], plan.lower[rows], plan.upper[rows], scale, plan.stopping)
    return fits_of(found, np.arange(numbers.start, numbers.stop), misfit.count, tries)


def _rows_of(data: Tree, rows: slice) -> Tree:
    leaves, build = flatten(data)
    return build([None if leaf is None else np.asarray(leaf)[rows] for leaf in leaves])
