"""Markov chains of fields: `sample`, its result, and the loop over the steps of a chain.

A method is a file with a function ``step(target, state, sizes, draw)``, entered in `_METHODS`. The loop adapts the step
sizes during the warm-up, records misfit, quantities and moments, and writes checkpoints.
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import math
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Comm, Function, LocalArray, Rng
from mpiad.checkpoint_files import read_description
from mpiad.differentiation.objective import check_objective
from mpiad.inverse import crank_nicolson, delayed_rejection, hamiltonian, langevin
from mpiad.inverse.gaussian_prior import GaussianPrior
from mpiad.inverse.laplace_approximation import Posterior
from mpiad.inverse.sampling_target import Draw, MisfitEvaluation, Moves, Slope, State, Target
from mpiad.linalg.eigenpairs import EigenPairs
from mpiad.optimize.checkpoint import CheckpointFile, as_checkpoint, fingerprint
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.packing import local_packing
from mpiad.optimize.root_driven import Solve
from mpiad.optional_packages import optional_package
from mpiad.primitives.operation import suspended
from mpiad.progress import progress_bar
from mpiad.tasks import RankGroups, sum_over
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import agreed, raising_together, require_same
from mpiad.transport.core.random_keys import shared_key
from mpiad.transport.core.rank_files import RankFiles
from mpiad.transport.core.rank_groups import rank_groups
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.exits.signals import requested

_CALL = "inverse.sample"
_FIRST_SIZE = 0.2  # of steps, if the warm-up adapts it
_DECAY = 0.6  # exponent of the weights of the adaptation (Robbins and Monro)
_KEY = "key of rng"  # in the description of a checkpoint
_UNNAMED = ""  # the name of quantities that aren't a dict
_REFRESH = 1.0  # seconds between two updates of the progress bar
_TRIES = 20  # the least number of a stage's proposals for the warning that none was accepted

_log = logging.getLogger("mpiad")


class _Method(NamedTuple):
    step: Callable[..., Moves]
    rates: tuple[float, ...]  # acceptance rate of each stage, to which the warm-up adapts its step size
    slope: Slope | None = None  # the form of gradients, if the method uses them
    informed: bool = False  # whether the reference is the Laplace approximation


_METHODS = {
    "pcn": _Method(crank_nicolson.step, (0.25,)),
    "mala": _Method(langevin.step, (0.6,), langevin.slope),
    "hpcn": _Method(crank_nicolson.step, (0.25,), None, True),
    "hmala": _Method(langevin.step, (0.6,), langevin.slope, True),
    "hhmc": _Method(hamiltonian.step, (0.7,), langevin.slope, True),
    "dr": _Method(delayed_rejection.step, (0.25, 0.25, 0.25), delayed_rejection.slope, True),
}


@dataclasses.dataclass
class Samples:
    """The result of `sample`; ``Samples(draws)`` of another sampler's draws has its method `to_arviz`.

    If `chains` was given, quantities, misfit and the numbers per chain have an additional first axis for the chain.

    Attributes
    ----------
    quantities : array, or dict of arrays
        The quantities of interest at each sample, of shape (n_samples, ...), in the form of the argument.
    misfit : array, shape (n_samples,)
        The misfit Φ at each sample.
    mean, variance : array of shape local_shape
        This rank's blocks of the mean and the variance of the samples of all chains, for each cell.
    acceptance : float, or array
        The fraction of proposals that were accepted after the warm-up. For ``method="dr"`` there is one for the first
        stage, the second stage, and the step of the rest of the field, along the last axis.
    step_size : float, or array
        The step sizes after the warm-up, in the form of `acceptance`.
    solves : dict
        Numbers of evaluations after the warm-up: "misfit", "gradient", and "failed", at which a solver didn't converge or
        a value wasn't finite. Evaluating a gradient includes an evaluation of the misfit; both are counted.
    seconds : float
        The time of the chain after the warm-up.

    Examples
    --------
    >>> from mpiad.inverse import Samples
    >>> draws = np.random.default_rng(0).normal(size=(4, 500))  # four chains
    >>> Samples(draws).to_arviz().posterior["quantities"].shape
    (4, 500)
    """

    quantities: Array
    misfit: Array = None
    mean: Array = None
    variance: Array = None
    acceptance: Array = None
    step_size: Array = None
    solves: dict[str, Array] = dataclasses.field(default_factory=dict)
    seconds: Array = None

    def to_arviz(self) -> Any:
        """Return quantities and misfit as ArviZ's InferenceData, for its diagnostics (``pip install 'mpiad[arviz]'``).

        The quantities are variables of its group `posterior`, and the misfit is in `sample_stats`. Without `chains`, the
        arrays get an axis for the chain. Draws of another sampler must have the shape (chains, draws, ...).
        """
        arviz = optional_package("arviz", "ArviZ", "mpiad[arviz]", "inverse.Samples.to_arviz")
        found = self.quantities if isinstance(self.quantities, dict) else {"quantities": self.quantities}
        single = self.misfit is not None and np.ndim(self.misfit) == 1
        variables = {name: np.asarray(values)[None] if single else np.asarray(values) for name, values in found.items()}
        stats = None if self.misfit is None else {"misfit": np.atleast_2d(self.misfit)}
        return arviz.from_dict(posterior=variables, sample_stats=stats)


class _Settings(NamedTuple):
    """The arguments of `sample` that are the same on all ranks, after the checks; `chains` and `groups` as numbers."""

    method: str
    n_samples: int
    key: int  # of the random numbers
    warmup: int
    step_size: tuple[float, ...] | None
    objective: str
    chains: int | None
    fields: Path | None
    thin: int
    checkpoint: CheckpointFile | None
    progress: bool


class _Problem(NamedTuple):
    """What a group of ranks samples; `quantities`: by name."""

    misfit: Function
    reference: Posterior
    quantities: dict[str, Function]
    start: LocalArray | None


def sample(
    misfit: Function,
    prior: GaussianPrior | None = None,
    *,
    method: str,
    n_samples: int,
    rng: Rng = None,
    start: LocalArray | None = None,
    warmup: int | None = None,
    step_size: float | Sequence[float] | None = None,
    posterior: Posterior | None = None,
    quantities: Function | dict[str, Function] | None = None,
    objective: str = "root",
    chains: int | None = None,
    groups: RankGroups | int | None = None,
    fields: str | os.PathLike[str] | None = None,
    thin: int = 100,
    checkpoint: str | os.PathLike[str] | CheckpointFile | None = None,
    progress: bool = False,
    comm: Comm = None,
) -> Samples:
    """Draw dependent samples of a posterior π ∝ exp(-Φ) μ by Markov chains whose steps don't shrink on finer meshes.

    Parameters
    ----------
    misfit : callable
        ``misfit(m)`` returns the negative log-likelihood Φ at this rank's block m: one real number, which the methods with
        gradients differentiate. With `groups` it is ``build(comm)``, see there.
    prior : GaussianPrior
        The prior μ; its cost isn't part of the misfit.
    method : str
        The proposal, relative to a Gaussian ν, the prior or the Laplace approximation `posterior`. Proposals that leave ν
        invariant are accepted with the chance min(1, exp(Ψ(m) - Ψ(m'))), where Ψ = Φ + log dν/dμ; other proposals have
        further factors.

        - "pcn" and "hpcn": the preconditioned Crank-Nicolson method, relative to the prior and to the approximation.
          It needs values of the misfit only.
        - "mala" and "hmala": semi-implicit Langevin proposals, with the gradient of the misfit.
        - "hhmc": Hamiltonian Monte Carlo relative to the approximation, with 2 to 16 evaluations per sample.
        - "dr": delayed rejection in the space of the approximation's eigenvectors: "hpcn", and if the proposal is rejected
          "hmala"; the rest of the field is changed by a further step of "hpcn". Two to four evaluations per sample.
    n_samples : int
        The number of samples after the warm-up.
    rng : Generator, SeedSequence or int, optional
        The source of a key of 128 bits, the same on all ranks; None: other samples in each call. The random numbers of a
        step depend on the key, the chain and the step only, and not on the number of ranks.
    start : array of shape local_shape, optional
        This rank's block of the field at which all chains start. By default a single chain starts at the mean of the
        Gaussian that `method` refers to, and several chains start at samples of it.
    warmup : int, optional
        The number of steps before the samples, by default a quarter of `n_samples`. They adapt the step sizes.
    step_size : float, or three floats for "dr", optional
        Fixed step sizes β, above 0 and at most 1: a proposal keeps √(1 - β²) of the deviation from the reference's mean.
        Those of "dr" are for its first stage, its second stage and the rest of the field.
        For Hamiltonian Monte Carlo, β is the sine of the angle of a step.
        For Langevin proposals β = √(8δ)/(2 + δ), in which δ is the step in time. By default β begins with 0.2 and is
        adapted during the warm-up, to acceptance rates of 0.25, or 0.6 for "mala" and "hmala", or 0.7 for "hhmc".
    posterior : Posterior, optional
        The result of `laplace_approximation` with this prior, needed by "hpcn", "hmala", "hhmc" and "dr". The chains are
        exact for any approximation, but slow for a bad one: if it is narrower than the posterior, "hpcn" rarely visits the
        tails, even if it accepts many proposals. Compare several chains.
    quantities : callable, or dict of callables, optional
        ``quantities(m)`` returns numbers of interest as an array, the same on all ranks. It is called once for each
        accepted sample.
    objective : {"root", "sum", "mean"}
        The combination of the ranks' results of `misfit`, as in `value_and_grad`.
    chains : int, optional
        The number of independent chains, which share the ranks or are divided among `groups`.
    groups : mpiad.tasks.RankGroups or int, optional
        Groups of ranks, or their number G: group j runs the chains j, j + G, j + 2G and so on. ``build(comm)`` is called
        once per group, and returns (misfit, prior, posterior or None), or in addition the quantities, for a `Domain` on the
        group's communicator `comm`. `mean` and `variance` of the result are of all groups.
    fields : path, optional
        A folder to which ``Domain.save`` writes every `thin`-th sample of each chain, as ``chain0_000100.npy``.
    thin : int
    checkpoint : path or mpiad.optimize.CheckpointFile, optional
        A file for the state of each chain and the key of the random numbers, next to which each rank writes its own files,
        every 10 steps or as set by `CheckpointFile(path, every)`. A call with the same arguments resumes from it, bit for
        bit, on the same number of ranks, also with ``rng=None``. A larger `n_samples`, with the same `warmup`,
        continues a complete chain. After SIGTERM, or a signal of `CheckpointFile.signals`, on any rank, its chain writes a
        checkpoint at the next step and all ranks raise SystemExit; with `groups`, groups whose ranks have no signal first
        complete all of their chains.
    progress : bool
        Whether the root shows the acceptance rate and the effective samples (of the misfit) per minute on standard error.
    comm : mpi4py intracommunicator, optional
        The ranks of all groups, if `groups` is a number.

    Returns
    -------
    Samples

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid on any rank or differs between ranks; if the misfit or its gradient isn't
        finite at the start; if `posterior` belongs to another prior; or if a checkpoint is damaged or belongs to another
        problem. If `prior` isn't a GaussianPrior, only the ranks that passed it raise.
    WorkerError
        On all ranks, if `misfit` or `quantities` raises on any rank; with `groups`, if a chain of any group raises. A
        ConvergenceError of mpiad at a proposal isn't raised: the proposal is rejected, and counted in ``solves["failed"]``.
    SystemExit
        On all ranks, if a signal ended a chain that writes checkpoints; the code is 128 plus the signal's number.

    Warns
    -----
    RuntimeWarning
        If no proposal was accepted after the warm-up, or evaluations failed.

    Ranks
    -----
    All ranks of the prior's domain call it, or with `groups` all ranks of `comm`. Samples, up to rounding, don't depend on
    the number of ranks.

    Adjoint
    -------
    None: the result is a constant in every trace.

    References
    ----------
    S. L. Cotter, G. O. Roberts, A. M. Stuart and D. White, "MCMC methods for functions: modifying old algorithms to make
    them faster", Statistical Science 28 (2013).

    N. Petra, J. Martin, G. Stadler and O. Ghattas, "A computational framework for infinite-dimensional Bayesian inverse
    problems, part II", SIAM J. Sci. Comput. 36 (2014).

    Examples
    --------
    >>> from mpiad.inverse import Bilaplacian, laplace_approximation, sample
    >>> domain = mpiad.Domain(32)
    >>> prior = Bilaplacian(domain, correlation_length=8.0)
    >>> measured = np.arange(32)[domain.owned] == 16
    >>> misfit = lambda m: 0.5 * domain.sum(measured * (m**3 - 1.0) ** 2) / 0.5**2
    >>> product = lambda v: measured * v * 9.0 / 0.5**2
    >>> posterior = laplace_approximation(product, measured * 1.0, prior, k=2)
    >>> result = sample(misfit, prior, method="hpcn", n_samples=200, rng=1, posterior=posterior)
    >>> print(result.misfit.shape, 0.1 < result.acceptance < 0.9)
    (200,) True
    """
    with restoring_state(), suspended():
        division = None if groups is None else rank_groups(groups, comm)
        if division is None and not isinstance(prior, GaussianPrior):
            raise TypeError(f"{_CALL}: prior must be an mpiad.inverse.GaussianPrior, but got {type(prior).__name__}.")
        whole = channel(prior.domain.comm if division is None else division.whole, _CALL)  # type: ignore[union-attr]
        with raising_together(whole, Exception):
            check_objective(objective, _CALL)
            if method not in _METHODS:
                names = ", ".join(map(repr, _METHODS))
                raise ValueError(f"{_CALL}: method must be one of {names}, but got {method!r:.60}.")
            n_samples = _integer("n_samples", n_samples, 1)
            settings = _Settings(
                method=method,
                n_samples=n_samples,
                key=0,
                warmup=n_samples // 4 if warmup is None else _integer("warmup", warmup, 0),
                step_size=None if step_size is None else _step_sizes(method, step_size),
                objective=objective,
                chains=None if chains is None else _integer("chains", chains, 1),
                fields=None if fields is None else _folder(fields),
                thin=_integer("thin", thin, 1),
                checkpoint=as_checkpoint(checkpoint, _CALL),
                progress=progress,
            )
            if division is None:
                problem = _problem(settings.method, start, misfit, prior, posterior, quantities)
            elif prior is not None or posterior is not None:
                raise TypeError(f"{_CALL}: with groups, build(comm) returns prior and posterior; don't pass them.")
            written = None
            if rng is None and whole.rank == 0 and settings.checkpoint is not None:  # the key in files of these chains
                file = settings.checkpoint.file
                stem, suffix = glob.escape(file.stem), glob.escape(file.suffix)
                if files := sorted(file.parent.glob(f"{stem}.chain*.rank*of*.?{suffix}")):
                    written = int(read_description(files[0])[_KEY], 16)
        key = shared_key(rng, whole, _CALL)
        settings = settings._replace(key=whole.data.bcast(key if written is None else written, 0))
        given = settings._replace(checkpoint=settings.checkpoint and settings.checkpoint.every)  # type: ignore[arg-type]
        require_same(whole, f"{', '.join(map(repr, given))}, groups={division and division.count}", _CALL)
        shown = settings.progress and whole.rank == 0
        found: dict[int, _Chain] = {}
        if division is not None:
            found = _run_in_groups(misfit, settings, division, quantities, start, shown)
        else:
            for number in range(settings.chains or 1):
                found[number] = _run(problem, settings, number, shown)
                if found[number].ended_by:
                    break
        ended_by = max(each.ended_by for each in found.values())
        if ended_by:
            if whole.rank == 0:
                _log.warning("%s: stopped by signal %d; the same program continues the chains.", _CALL, ended_by)
            raise SystemExit(128 + ended_by)
        return _result(settings, found)


def _step_sizes(method: str, sizes: float | Sequence[float]) -> tuple[float, ...]:
    stages, numbers = len(_METHODS[method].rates), tuple(np.ravel(np.asarray(sizes, dtype=float)).tolist())
    if len(numbers) != stages or not all(0.0 < number <= 1.0 for number in numbers):
        got = f"method {method!r}, but got {sizes!r:.60}"
        raise ValueError(f"{_CALL}: step_size must be {stages} number(s) above 0 and at most 1 for {got}.")
    return numbers


def _folder(fields: str | os.PathLike[str]) -> Path:
    folder = Path(fields).absolute()
    if not folder.is_dir():
        raise ValueError(f"{_CALL}: the folder fields={str(fields)!r:.200} doesn't exist. Create it.")
    return folder


def _integer(name: str, number: object, least: int) -> int:
    if not (isinstance(number, (int, np.integer)) and least <= number < 2**64):
        raise ValueError(f"{_CALL}: {name} must be an integer of at least {least}, but got {number!r:.60}.")
    return int(number)


def _problem(
    method: str, start: LocalArray | None, misfit: object, prior: object, posterior: object, quantities: object = None
) -> _Problem:
    """Return what is sampled; raise a TypeError or ValueError if a part of it is invalid."""
    if not isinstance(prior, GaussianPrior):
        raise TypeError(f"{_CALL}: build must return an mpiad.inverse.GaussianPrior, but got {type(prior).__name__}.")
    shape, informed = prior.domain.local_shape, _METHODS[method].informed
    by_name = quantities if isinstance(quantities, dict) else {} if quantities is None else {_UNNAMED: quantities}
    for name, fun in [("misfit", misfit), *by_name.items()]:
        if not callable(fun):
            raise TypeError(f"{_CALL}: {name or 'quantities'} must be callable, but got {type(fun).__name__} {fun!r:.60}.")
    if informed and posterior is None:
        advice = "pass posterior=laplace_approximation(...), or use 'pcn' or 'mala'"
        raise ValueError(f"{_CALL}: method {method!r} needs a Laplace approximation: {advice}.")
    if not isinstance(posterior, (Posterior, type(None))):
        raise TypeError(f"{_CALL}: posterior must be an mpiad.inverse.Posterior, but got {type(posterior).__name__}.")
    if posterior is not None and posterior.prior is not prior:
        raise ValueError(f"{_CALL}: posterior belongs to another prior. Pass the prior that laplace_approximation got.")
    if start is not None and np.shape(start) != shape:
        raise ValueError(f"{_CALL}: start must be this rank's block of shape {shape}, but has shape {np.shape(start)}.")
    if not informed:
        posterior = Posterior(prior.mean, prior, EigenPairs(np.zeros(0), np.zeros((0, *shape)), np.zeros(0), 0))
    return _Problem(misfit, posterior, by_name, None if start is None else np.array(start, float))  # type: ignore[arg-type]


def _run_in_groups(
    build: Function, settings: _Settings, division: RankGroups, quantities: object, start: LocalArray | None, shown: bool
) -> dict[int, _Chain]:
    """Run the chains on groups; return all of them, with this rank's blocks of their moments."""
    found: dict[int, _Chain] = {}
    built: list[_Problem] = []

    def run(number: int, comm: Comm) -> float:
        if any(each.ended_by for each in found.values()):
            return 0.0
        if not built:
            with raising_together(channel(comm, _CALL), Exception):
                parts = build(comm)
                most = 4 if quantities is None else 3
                if not isinstance(parts, (tuple, list)) or not 2 <= len(parts) <= most:
                    got = f"{len(parts)} parts" if isinstance(parts, (tuple, list)) else f"{parts!r:.60}"
                    expected = "misfit, prior, and optionally the posterior or None, and the quantities"
                    text = f"build must return {expected}, but returned {got}" + " beside quantities=" * (most == 3)
                    raise TypeError(f"{_CALL}: {text}. Give the quantities in one place.")
                misfit, prior, posterior, own = (*parts, None, None)[:4]
                own = quantities if own is None else own
                built.append(_problem(settings.method, start, misfit, prior, posterior, own))
        found[number] = _run(built[0], settings, number, shown)
        return 0.0

    sum_over(range(settings.chains or 1), run, groups=division)
    for each in found.values():
        del each.state  # needed by this group only
    # One rank per group, with the same blocks; apart from blocks, the ranks of a group have the same numbers.
    parts = channel(division.across, _CALL).data.allgather(found)
    return {number: each for part in parts for number, each in part.items()}


@dataclasses.dataclass
class _Chain:
    """A chain; after the warm-up `rows` gets the misfit and the quantities of each sample, as one vector."""

    state: State
    sizes: np.ndarray  # step sizes of the stages
    tries: np.ndarray  # numbers of proposals of the stages, after the warm-up
    accepted: np.ndarray
    solves: np.ndarray  # as in `Target`
    mean: LocalArray  # of the samples
    squares: LocalArray  # sum of the squared deviations from the mean
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # of the quantities, by name
    seconds: float = 0.0
    written: int = 0  # number of rows in the file of rows, and their checksum
    checksum: int = 0
    ended_by: int = 0  # the signal that has ended it early, or 0

    def row(self, quantities: dict[str, Function]) -> np.ndarray:
        """Return the misfit and the quantities of the state."""
        values = {name: np.array(fun(self.state.field.copy()), dtype=float) for name, fun in quantities.items()}
        shapes = {name: value.shape for name, value in values.items()}
        if self.rows and shapes != self.shapes:
            before, now = (list(each.values()) for each in (self.shapes, shapes))
            raise ValueError(f"{_CALL}: quantities had the shapes {before} before, but now have {now}.")
        self.shapes = shapes
        return np.concatenate([[self.state.misfit], *map(np.ravel, values.values())])

    def add(self, row: np.ndarray) -> None:
        """Record the state as the next sample."""
        self.rows.append(row)
        away = self.state.field - self.mean
        self.mean += away / len(self.rows)
        self.squares += away * (self.state.field - self.mean)

    def arrays(self, path: Path) -> Iterator[tuple[str, np.ndarray]]:
        """Append the new rows to the file of rows, and return the other arrays of a checkpoint."""
        new, size = np.array(self.rows[self.written :]).tobytes(), self.rows[0].nbytes if self.rows else 0
        with open(path, "ab") as file:
            file.truncate(self.written * size)  # without rows that an interrupted job has written after its checkpoint
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        self.written, self.checksum = len(self.rows), zlib.crc32(new, self.checksum)
        yield from ((k, np.array(value)) for k, value in vars(self).items() if isinstance(value, (np.ndarray, float, int)))
        yield from ((f"shape of {name}", np.array(shape, int)) for name, shape in self.shapes.items())
        yield from ((f"state {k}", np.array(value)) for k, value in self.state._asdict().items() if value is not None)

    def restore(self, arrays: dict[str, np.ndarray], path: Path) -> None:
        """Continue with the arrays of a checkpoint; raise an OSError or ValueError if the file of rows is invalid."""
        for name, value in arrays.items():
            if name.startswith("shape of "):
                self.shapes[name.removeprefix("shape of ")] = tuple(value.tolist())
            elif not name.startswith("state "):
                setattr(self, name, value if value.ndim else value.item())
        field, *numbers = (arrays[f"state {name}"] for name in ("field", "misfit", "psi"))
        self.state = State(field, *map(float, numbers), slope=arrays.get("state slope"))
        width = 1 + sum(map(math.prod, self.shapes.values()))
        data = path.read_bytes()[: 8 * width * self.written] if path.exists() else b""
        if zlib.crc32(data) != self.checksum:
            advice = "Restore a copy, or delete all files of the chain to start again"
            raise ValueError(f"{_CALL}: the checkpoint {path} is damaged: its checksum is wrong. {advice}.")
        self.rows = list(np.frombuffer(data).reshape(self.written, width))


def _begin(problem: _Problem, settings: _Settings, number: int, solve: Solve, channel: Channel) -> tuple[Target, _Chain]:
    """Return the target and a chain at its start; collective."""
    reference, method = problem.reference, _METHODS[settings.method]
    start = "None" if problem.start is None else "an array"
    require_same(channel, f"start={start}, quantities={list(problem.quantities)}", _CALL)
    field = reference.mean if problem.start is None else problem.start
    if problem.start is None and settings.chains is not None:
        field = field + reference.narrowed(Draw(reference.prior, settings.key, number, 0).deviation())
    program = Program(problem.misfit, None, None, (), settings.objective, 0)
    evaluation = MisfitEvaluation(program, local_packing(field), solve.agreement, channel)
    target = Target(evaluation, reference, method.slope)
    state = target.at(field, method.slope is not None)
    if not math.isfinite(state.psi):
        text = f"the misfit is {state.misfit:.3g}, or its gradient isn't finite, at the start of chain {number}"
        raise agreed(channel, ValueError(f"{_CALL}: {text}. Pass another start."))
    sizes = np.array(settings.step_size or [_FIRST_SIZE] * len(method.rates))
    tries, accepted, solves = (np.zeros(count, int) for count in (len(sizes), len(sizes), 3))
    return target, _Chain(state, sizes, tries, accepted, solves, np.zeros(field.shape), np.zeros(field.shape))


def _resume(chain: _Chain, files: RankFiles, rows: Path, total: int, checkpoint: CheckpointFile, channel: Channel) -> int:
    """Continue a chain with its checkpoint, if there is one; return the number of steps made; collective."""
    arrays, steps = files.load(), max(files.iteration, 0)
    if steps > total:
        text = f"has {steps} steps, but this call has {total}. Pass a larger n_samples or another file"
        raise agreed(channel, ValueError(f"{_CALL}: the checkpoint {checkpoint.path} {text}."))
    if arrays is not None:
        with raising_together(channel, (OSError, ValueError)):
            chain.restore(arrays, rows)
    return steps


def _run(problem: _Problem, settings: _Settings, number: int, shown: bool) -> _Chain:
    """Run a chain; collective."""
    prior, method, total = problem.reference.prior, _METHODS[settings.method], settings.warmup + settings.n_samples
    used, bar = channel(prior.domain.comm, _CALL), progress_bar("steps", total) if shown else None
    solve, checkpoint, files, first, refreshed = Solve(used, _CALL), settings.checkpoint, None, 0, 0.0
    with solve.ending(checkpoint, bar):
        target, chain = _begin(problem, settings, number, solve, used)
        if checkpoint is not None:
            path = checkpoint.file.with_name(f"{checkpoint.file.stem}.chain{number}{checkpoint.file.suffix}")
            rows = path.with_name(f"{path.name}.rank{used.rank}of{used.size}.rows")
            files = RankFiles(path, used, _identity(problem, settings, number, chain.state), _CALL)
            first = _resume(chain, files, rows, total, checkpoint, used)
        row = partial(chain.row, problem.quantities)
        began = time.perf_counter() - chain.seconds
        for step in range(first + 1, total + 1):
            target.solves[:], before = 0, chain.state.field
            draw, count = Draw(prior, settings.key, number, step), step - settings.warmup
            chain.state, chances, accepted = method.step(target, chain.state, chain.sizes, draw)
            if count > 0:
                chain.tries += np.isfinite(chances)
                chain.accepted += accepted
                chain.solves += target.solves
                if count > 1 and chain.state.field is before:
                    chain.add(chain.rows[-1])
                else:
                    chain.add(solve.agreement.run(row) if problem.quantities else row())
                if settings.fields is not None and count % settings.thin == 0:
                    prior.domain.save(settings.fields / f"chain{number}_{count:06d}.npy", chain.state.field)
                chain.seconds = time.perf_counter() - began
            else:
                if settings.step_size is None:
                    gains = step**-_DECAY * np.nan_to_num(np.array(chances) - method.rates)
                    chain.sizes = np.minimum(1.0, chain.sizes * np.exp(gains))
                began = time.perf_counter()
            ended = step == total or files is not None and solve.agreement.end_requested
            if files is not None and (ended or step % checkpoint.every == 0):  # type: ignore[union-attr]
                files.write(step, {}, chain.arrays(rows))
            if bar is not None and (ended or time.perf_counter() - refreshed > _REFRESH):
                refreshed = time.perf_counter()
                _show(bar, number, step, chain)
            if ended and step < total:
                chain.ended_by = max(used.data.allgather(requested() or 0))
                break
    return chain


def _identity(problem: _Problem, settings: _Settings, number: int, first: State) -> dict[str, object]:
    """Return the description of a chain; a sample of the prior identifies its covariance; collective."""
    reference = problem.reference
    deviation = Draw(reference.prior, 0, 0, 0).deviation()
    return {name: getattr(settings, name) for name in ("method", "warmup", "step_size", "objective")} | {
        "chain": number,
        _KEY: f"{settings.key:#x}",
        "grid": reference.prior.domain.shape,
        "quantities": list(problem.quantities),
        "misfit at the start": f"{first.misfit:.6g}",
        "start (checksum)": fingerprint(first.field),
        "prior (checksum)": fingerprint(reference.prior.mean, deviation),
        "posterior (checksum)": fingerprint(reference.mean, reference.values, reference.vectors),
    }


def _show(bar: Any, number: int, step: int, chain: _Chain) -> None:
    """Update the progress bar; the effective number of samples is that of the misfit, from the means of batches."""
    text, misfit = f"chain {number}", np.array([row[0] for row in chain.rows])
    if (size := math.isqrt(len(misfit))) >= 4:
        means = misfit[: size * size].reshape(size, size).mean(axis=1)
        effective = len(misfit) * min(np.var(misfit) / max(size * np.var(means), 1e-300), 1.0)
        rates = ", ".join(f"{rate:.2f}" for rate in chain.accepted / np.maximum(chain.tries, 1))
        text += f", accepted {rates}, {60.0 * effective / chain.seconds:.3g} effective samples/min"
    bar.set_postfix_str(text, refresh=False)
    bar.update(step - bar.n)


def _result(settings: _Settings, by_number: dict[int, _Chain]) -> Samples:
    """Return the result, and warn of stages that accept nothing and of evaluations that failed."""
    chains, single = [by_number[number] for number in sorted(by_number)], settings.chains is None

    def per_chain(values: Sequence[Array]) -> Array:
        return values[0] if single else np.stack(values)

    def per_stage(values: Sequence[np.ndarray]) -> Array:
        return per_chain([each[0] if len(each) == 1 else each for each in values])

    for number, each in enumerate(chains):
        texts = [
            f"accepted none of {each.tries[stage]} proposals of stage {stage + 1} after the warm-up, with the step size "
            f"{each.sizes[stage]:.2g}. Use a longer warm-up, which reduces the step size, pass a smaller step_size, or use "
            "a method that is informed by a Laplace approximation"
            for stage in np.flatnonzero((each.accepted == 0) & (each.tries >= _TRIES))
        ]
        if each.solves[2]:
            found_at = "a solver in the misfit didn't converge, or the misfit or its gradient wasn't finite"
            texts.append(f"rejected {each.solves[2]} proposals at which {found_at}")
        for text in texts:
            warnings.warn(f"{_CALL}: chain {number} {text}.", RuntimeWarning, stacklevel=3)
    means, count = np.stack([each.mean for each in chains]), settings.n_samples * len(chains)
    between = settings.n_samples * np.sum((means - means.mean(axis=0)) ** 2, axis=0)
    variance = (np.sum([each.squares for each in chains], axis=0) + between) / max(count - 1, 1)
    rows, shapes = per_chain([np.array(each.rows) for each in chains]), chains[0].shapes
    parts = np.split(rows, np.cumsum([1, *map(math.prod, shapes.values())]), axis=-1)[1:]
    quantities = {name: part.reshape(*rows.shape[:-1], *shapes[name]) for name, part in zip(shapes, parts)}
    solves = zip(*(each.solves.tolist() for each in chains))
    return Samples(
        quantities=quantities[_UNNAMED] if list(quantities) == [_UNNAMED] else quantities,
        misfit=rows[..., 0].copy(),
        mean=means.mean(axis=0),
        variance=variance,
        acceptance=per_stage([each.accepted / np.maximum(each.tries, 1) for each in chains]),
        step_size=per_stage([each.sizes for each in chains]),
        solves={name: per_chain(row) for name, row in zip(("misfit", "gradient", "failed"), solves)},
        seconds=per_chain([each.seconds for each in chains]),
    )
