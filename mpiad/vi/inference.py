"""`VI`: variational inference with the model's evaluations distributed over the ranks."""

from __future__ import annotations

import logging
import math
import pickle
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np

from mpiad._typing import Array, Comm, Function, Rank, Rng, Tree
from mpiad.device import select, to_host
from mpiad.errors import WorkerError
from mpiad.parallel import DistributedOptimizer
from mpiad.parallel.parameters import Optimizer
from mpiad.primitives.checks import positive_count, root_of
from mpiad.primitives.operation import suspended
from mpiad.progress import progress_bar
from mpiad.pytrees import fetched, flatten, is_variable, map_leaves, refuse_objects
from mpiad.tasks import mpi_map
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import FAILURES, agreed, raising_together, require_same
from mpiad.transport.core.random_keys import generator_from, generator_of, shared_key
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import arrays_of, is_array
from mpiad.vi.elbo import (
    Evaluations,
    Model,
    Objective,
    evaluations_of,
    has_closed_form,
    parameter_on_device,
    to_device_of,
)
from mpiad.vi.posterior import Posterior
from mpiad.vi.prior import log_prior, prior_of
from mpiad.vi.result import VIResult

# Numbers of the generators for the initial parameters, the epochs, the result's samples and the bound.
_INITIAL, _EPOCH, _RESULT, _BOUND = range(4)


class Training:
    """The state of a fit, on the root: variational parameters and their history."""

    def __init__(
        self, objective: Objective, optimizer: Optimizer, params: Tree, patience: int | None, callback: Function | None,
        average: bool,
    ):  # fmt: skip
        self._objective, self._optimizer, self._patience, self._callback = objective, optimizer, patience, callback
        # Copies, because a user's optimizer may overwrite its arguments.
        self._params, self._best = _copied(params), params
        self._averages, self._reported = average, None  # whether to report an average, and the reported parameters
        self._state = optimizer.setup(self._params)
        self._lowest, self._best_epoch = math.inf, 0
        self._start = time.perf_counter()
        self.history: dict[str, list] = {name: [] for name in ("objective", "loss", "divergence", "dropped", "seconds")}
        self.failure: Exception | None = None
        # Sent to all ranks after each epoch: None to continue, or the reason for the end, possibly a picklable exception.
        self.end_reason: str | Exception | None = None

    def draws(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """Return noise on the parameters' device, and draws on the host; after an exception, store it and return NaN."""
        noise = rng.standard_normal((count, self._objective.posterior.dim))
        theta = np.full(noise.shape, math.nan)
        with self.failing(), np.errstate(all="ignore"):
            noise = to_device_of(noise, self._params)
            found = to_host(self._objective.posterior.draw(self._params, noise)[0])
            if np.shape(found) != theta.shape:
                text = f"draw must return shape {theta.shape}, but returned {np.shape(found)}."
                raise ValueError(f"VI: the posterior's {text}")
            theta[...] = found
        return noise, theta

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Return a context whose exception is stored, to be sent to all ranks, which raise it together."""
        try:
            yield
        except FAILURES as found:
            error = found if isinstance(found, Exception) else RuntimeError(f"VI: the root raised {found!r}.")
            self.failure = self.end_reason = error
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # noqa: BLE001  not all exceptions can be pickled
                self.end_reason = RuntimeError(f"{type(error).__name__}: {error} (raised on the root)")

    def learn(self, noise: Array, theta: Array, evaluations: Evaluations) -> None:
        """Update the variational parameters, unless an exception was stored; if the run ends, store the reason."""
        if self.failure is not None:
            return
        epoch = len(self.history["objective"])
        if not np.isfinite(theta).all():
            raise FloatingPointError(
                f"VI: in epoch {epoch} draws of the posterior aren't finite. The learning rate may be too large, or a "
                "gradient of the model infinite."
            )
        if evaluations.problem is not None:
            raise WorkerError(f"VI: in epoch {epoch} {evaluations.problem}.", 0, "")
        if epoch == 0:
            self._objective.require_dependence(evaluations)
        loss, divergence, gradient = self._objective.value_and_gradient(self._params, noise, evaluations)
        if epoch == 0 and self._objective.w and not math.isfinite(divergence):
            raise FloatingPointError(f"VI: at the start KL(q‖prior) is {divergence}. Correct prior or initial posterior.")
        value = loss + (self._objective.w * divergence if self._objective.w else 0.0)  # may be infinite
        row = (
            value,
            loss,
            divergence,
            evaluations.not_converged + evaluations.not_finite,
            time.perf_counter() - self._start,
        )
        for column, entry in zip(self.history.values(), row):
            column.append(entry)
        # `value` is the objective before the update.
        if value < self._lowest:
            self._lowest, self._best, self._best_epoch = value, _copied(self._params), epoch
        elif self._patience is not None and epoch - self._best_epoch >= self._patience:
            self.end_reason = f"no improvement in {self._patience} epochs"
        self._state, self._params = self._optimizer.update(self._state, self._params, gradient)
        if not _all_finite(self._params):
            if math.isfinite(value) and not _all_finite(gradient):
                raise FloatingPointError(
                    f"VI: in epoch {epoch} the gradient isn't finite, but draws, objective and the model's gradients are. "
                    "Correct the derivative of the log density of the prior, or of the posterior."
                )
            text = "variational parameters aren't finite. Lower the learning rate."
            raise FloatingPointError(f"VI: after epoch {epoch} {text}")
        self._reported = averaged(self._reported, self._params, epoch + 1) if self._averages else self._params
        if self._callback is not None:
            try:
                self._callback(epoch, value, self._params)
            except StopIteration:
                self.end_reason = "ended by the callback"

    def result_fields(self, n_epochs: int) -> dict[str, Any]:
        """Return fields of `VIResult`."""
        epochs, message = len(self.history["objective"]), self.end_reason or f"all {n_epochs} epochs were completed"
        fields = {"history": self.history, "epochs": epochs, "best_epoch": self._best_epoch, "message": message}
        return {"params": self._reported, "best_params": self._best, **fields}


_ETA = 8


def averaged(average: Tree, params: Tree, count: int) -> Tree:
    """Update the average of the variational parameters over the last part of a run, after `count` epochs.

    At a constant learning rate the noise of the draws keeps the parameters from converging, and the mean of the parameters
    of many epochs is closer to the optimum than those of any single epoch (Polyak and Juditsky, 1992; for variational
    inference, Dhaka et al., 2020). The first epochs, far from the optimum, must have small weights. So after epoch k the
    average moves towards the newest parameters by the fraction (η + 1) / (k + η), which weights epoch j by about j^η
    ("polynomial-decay averaging", Shamir and Zhang, 2013). This needs one copy of the parameters, but not the total number
    n of epochs. For η = 8, the mean age and the variance are those of the plain mean of the last fifth of the epochs: the
    mean age is n / (η + 2) = n / 10, and the sum of the squared weights (η + 1)² / (2η + 1) / n ≈ 5 / n.

    Leaves that aren't floating-point variables are the newest ones, and so are all after the first epoch, when `average`
    is None. The parameters may be overwritten afterwards.
    """
    part = (_ETA + 1) / (count + _ETA)
    leaves, build = flatten(_copied(params))
    for k, mean in enumerate(flatten(average)[0]):
        if is_variable(mean):
            leaves[k] = mean + part * (leaves[k] - mean)
    return build(leaves)


def _copied(params: Tree) -> Tree:
    return map_leaves(lambda leaf: leaf.copy() if is_array(leaf) else leaf, params)


def _all_finite(params: Tree) -> bool:
    # One copy for all flags on a device, since each copy to the host waits for the device.
    return all(fetched([np.all(np.isfinite(leaf)) for leaf in flatten(params)[0] if is_variable(leaf)]))


_log = logging.getLogger("mpiad")


class VI:
    """Fit a posterior: minimize E_q[loss(θ, data)] + w·KL(q‖prior); evaluations of the loss are distributed over the ranks.

    Parameters
    ----------
    loss : callable
        ``loss(theta, data)`` returns one real number for parameters of shape (dim,). For the Bayesian posterior it is the
        negative log likelihood, with ``w=1``. A draw is dropped if the loss or its gradient isn't finite, or if the loss
        raises a ConvergenceError; other exceptions end the run. Each draw is evaluated on one rank, so communication on
        `comm` inside `loss` ends the run with a WorkerError; use MPI.COMM_SELF instead
        (``Domain(..., comm=MPI.COMM_SELF)``). For pathwise gradients the loss must be differentiable, that is, written
        with autograd.numpy.
    posterior : MeanFieldGaussian, FullRankGaussian, Flow, or an object with `dim`, `initial`, `draw` and `log_prob`
    prior : frozen distribution of scipy.stats, (name, *arguments), a sequence of them, or an object with `log_prob`
        The prior, as the argument of `Prior`.
    optimizer : object
        An object with ``setup(params) -> state`` and ``update(state, params, gradient) -> (state, params)``, such as
        `mpiad.parallel.Adam`; not a `DistributedOptimizer`, since only the root makes updates.
    w : float
        The weight of KL(q‖prior), not negative.
    n_samples_per_epoch : int
        The number of draws per epoch, on all ranks together.
    gradient : {"pathwise", "score"}
        The estimator of the gradient. "pathwise": uses derivatives of the loss. "score": the score-function estimator,
        which needs more draws, for losses that can't be differentiated.
    divergence : {"auto", "closed", "draws", "path"}
        The computation of KL. "closed": in closed form. "draws": estimated from the epoch's draws. "path": like "draws",
        but the gradient omits a part whose mean is zero, so that its noise vanishes as q approaches the exact posterior.
        "auto": "closed" if posterior and prior are normal, else "draws".
    schedule : {"even", "dynamic"}
        "even": all ranks, including the root, get equal shares of the draws. "dynamic": a free rank other than the root
        gets the next draw, for models whose evaluations take different times.
    devices : sequence of str, optional
        A name per rank: "cpu", or "cuda:0" and so on. On a rank with a GPU, `theta` is on this GPU, and `loss` may return a
        value on this GPU; `loss` must copy `data` to the GPU itself.
    rng : Generator, SeedSequence or int, optional
        The source of all draws, the same on all ranks. Each call of `run` and of `elbo` draws a key of 128 bits from it, so
        that an int gives the same draws in each call; None gives other ones.
    root : int
        The rank that draws parameters and updates the posterior.
    comm : mpi4py intracommunicator, optional

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.

    Notes
    -----
    In each epoch the root computes the draws from noise that it generates on the host, with a new generator per epoch. The
    draws don't depend on the number of ranks, and depend on devices only through rounding.

    Examples
    --------
    >>> from mpiad.parallel import Adam
    >>> from mpiad.vi import VI, MeanFieldGaussian
    >>> loss = lambda theta, data: np.sum((theta[0] - data) ** 2) / 2
    >>> inference = VI(loss, MeanFieldGaussian(1), ("norm", 0.0, 1.0), Adam(0.1), divergence="path", rng=0)
    >>> result = inference.run(np.array([1.0, 2.0, 3.0]), n_epochs=80)
    >>> print(np.round(result.mean(), 1), np.round(result.sd(), 1))  # exactly 6/4, and the square root of 1/4
    [1.5] [0.5]
    """

    def __init__(
        self,
        loss: Function,
        posterior: Posterior,
        prior: object,
        optimizer: Optimizer,
        w: float = 1.0,
        n_samples_per_epoch: int = 10,
        *,
        gradient: str = "pathwise",
        divergence: str = "auto",
        schedule: str = "even",
        devices: Sequence[str] | None = None,
        rng: Rng = None,
        root: Rank = 0,
        comm: Comm = None,
    ):
        _check_arguments(loss, posterior, optimizer, gradient=gradient, divergence=divergence, schedule=schedule)
        if not isinstance(w, Real) or not 0 <= w < math.inf:
            raise ValueError(f"VI: w must be zero or more, but got {w!r}.")
        count = positive_count(n_samples_per_epoch, "VI: n_samples_per_epoch")
        generator_from(rng, "VI")
        self.loss, self.posterior, self.prior = loss, posterior, prior_of(prior, posterior.dim)
        self.optimizer, self.w, self.n_samples_per_epoch = optimizer, float(w), count
        self.gradient, self.schedule, self.rng, self.root, self.comm = gradient, schedule, rng, root, comm
        self.devices = devices
        has_formula = has_closed_form(posterior, self.prior)
        if divergence == "closed" and not has_formula:
            raise ValueError(
                "VI: divergence='closed' needs a Gaussian posterior and a normal prior with finite inverse covariance, but "
                f"got {type(posterior).__name__} and {prior!r:.60}."
            )
        self.divergence = ("closed" if has_formula else "draws") if divergence == "auto" else divergence

    def run(
        self,
        data: Tree = None,
        n_epochs: int = 100,
        max_epochs_without_improvement: int | None = None,
        *,
        params: Tree = None,
        n_samples: int = 1000,
        callback: Function | None = None,
        average: bool = True,
        importance_weights: bool = False,
        progress: bool = False,
    ) -> VIResult:
        """Fit the posterior.

        Parameters
        ----------
        data : object
            The whole data, the same on all ranks: the loss of a draw gets the data of the rank that evaluates it. If they
            contain device arrays, `theta` is on the same device.
        n_epochs : int
            Maximum number of updates.
        max_epochs_without_improvement : int, optional
            End the run after this number of epochs without a new lowest objective. Since the objective is noisy, a small
            number ends the run too early: use several tens.
        params : pytree of arrays, optional
            Initial variational parameters; by default those of `posterior.initial`. Used on the root only. If they are on a
            device, then draws, densities, updates and the result's parameters are on this device, too.
        n_samples : int
            The number of draws in the result.
        callback : callable, optional
            ``callback(epoch, objective, params)`` is called on the root after each epoch. It mustn't communicate. If it
            raises StopIteration, the run ends on all ranks.
        average : bool
            Whether to report the average of the variational parameters over about the last fifth of the epochs. With
            False the parameters after the last epoch are reported; use it if means have no meaning, as for angles.
        importance_weights : bool
            Whether to evaluate the model at the draws of the result, too (`n_samples` evaluations without derivatives,
            distributed over the ranks), for `log_weights` and `k_hat` of the result.
        progress : bool
            Whether the root shows on standard error the number of completed epochs and the remaining time.

        Returns
        -------
        VIResult
            The same on all ranks.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if an argument is invalid, or arguments differ between ranks; or if the loss doesn't depend on its
            parameters (in the first epoch all gradients are zero while values differ, or ten or more values are equal).
        WorkerError
            On all ranks, if the model raised another exception than a ConvergenceError at any draw, or if each draw of an
            epoch was dropped. The text contains a traceback, or the first draw at which the model wasn't finite, and the
            rank.
        FloatingPointError
            On all ranks, if variational parameters or draws aren't finite (the learning rate may be too large), or if the
            prior's density at a draw is zero or isn't finite, or KL(q‖prior) isn't finite at the start.

        Ranks
        -----
        All ranks of `comm` call it.

        Notes
        -----
        The root logs each text in `warnings` of the result as a warning.
        """
        used, call = channel(self.comm, "VI.run"), "VI.run"
        root = root_of(self.root, used, call)
        flags = {"average": average, "importance_weights": importance_weights}
        self._agree(used, data, n_epochs, max_epochs_without_improvement, n_samples, **flags)
        key = shared_key(self.rng, used, call)
        model = Model(self.loss, data, self.gradient == "pathwise", _device_of(self.devices, used, call))
        objective = Objective(self.posterior, self.prior, self.w, self.gradient, self.divergence)
        training = None
        with raising_together(used, Exception):
            if used.rank == root:
                start = self.posterior.initial(generator_of(key, _INITIAL)) if params is None else params
                _require_one_device(start, model.device, call)
                training = Training(objective, self.optimizer, start, max_epochs_without_improvement, callback, average)
        with restoring_state(), suspended():
            bar = progress_bar("epochs", n_epochs) if progress and training else None
            self._epochs(used, root, model, training, n_epochs, key, bar)
            own = {} if training is None else training.result_fields(n_epochs)
            is_on_device = parameter_on_device(own.get("params")) is not None
            fields, is_on_device = used.data.bcast((to_host(own), is_on_device), root)
        noise = generator_of(key, _RESULT).standard_normal((n_samples, self.posterior.dim))
        draws = [np.asarray(part) for part in self.posterior.draw(fields["params"], noise)]
        if importance_weights:
            terms, valid = self._log_weights(used, root, Model(self.loss, data, False, model.device), draws, call, self.w)
            fields["log_weights"] = np.where(valid, terms, np.nan)
        # The root returns its own arrays; other ranks copy them to the device of their model, if it uses one.
        if is_on_device and training is None:
            fields["params"], fields["best_params"] = model.to_device(fields["params"], fields["best_params"])
        fields |= own
        rank, trace = _first_failure(used, model) if any(fields["history"]["dropped"]) else (root, "")
        fields["failure"] = trace and f"rank {rank}: {trace.rstrip().splitlines()[-1]}"
        result = VIResult(self.posterior, **fields, samples=draws[0], average=average, w=self.w)
        with raising_together(used, Exception):
            for text in result.warnings if training is not None else ():
                _log.warning("VI: %s", text)
        return result

    def _epochs(
        self, channel: Channel, root: Rank, model: Model, training: Training | None, n_epochs: int, key: int, bar: Any
    ) -> None:
        for epoch in range(n_epochs):
            noise = theta = None
            if training is not None:
                with channel.evaluating("an update of VI"):
                    noise, theta = training.draws(generator_of(key, _EPOCH, epoch), self.n_samples_per_epoch)
            if self.schedule == "dynamic":
                rows = mpi_map(model.row, None if theta is None else list(theta), root=root, comm=self.comm)
            else:
                rows = model.evenly(theta, self.posterior.dim, root, self.comm)
            if training is not None:
                with channel.evaluating("an update of VI"), training.failing():
                    training.learn(noise, theta, evaluations_of(np.asarray(rows)))
                if bar is not None:
                    bar.set_postfix_str(f"objective {training.history['objective'][-1]:.6g}", refresh=False)
                    bar.update()
            end_reason = channel.data.bcast(None if training is None else training.end_reason, root)
            if isinstance(end_reason, Exception):
                # The root raises the original exception, which can't always be sent.
                self._fail(channel, model, end_reason if training is None or training.failure is None else training.failure)
            if end_reason is not None:
                break
        if bar is not None:
            bar.close()

    def _fail(self, channel: Channel, model: Model, error: Exception) -> None:
        """Raise the run's exception on all ranks; a WorkerError gets the text on the model's first failure."""
        if isinstance(error, WorkerError):
            rank, trace = _first_failure(channel, model)
            error = WorkerError(f"{error} The first was on rank {rank}:\n{trace}", rank, trace)
        raise agreed(channel, error)

    def _agree(
        self, channel: Channel, data: Tree, n_epochs: object, patience: object, n_samples: object, **flags: object
    ) -> None:
        with raising_together(channel):
            if hasattr(data, "__len__") and len(data) == 0:
                raise ValueError(f"VI.run: data is empty ({type(data).__name__} of length 0) on rank {channel.rank}.")
            positive_count(n_epochs, "VI: n_epochs")
            draws = positive_count(n_samples, "VI: n_samples")
            if patience is not None:
                positive_count(patience, "VI: max_epochs_without_improvement")
            for name, flag in flags.items():
                if not isinstance(flag, bool):
                    raise TypeError(f"VI.run: {name} must be True or False, but got {flag!r}.")
            if flags["importance_weights"] and (not self.w or draws < _MIN_WEIGHTS):
                needed = f"w above zero and n_samples of {_MIN_WEIGHTS} or more"
                raise ValueError(f"VI.run: importance weights need {needed}, but got w={self.w} and n_samples={draws}.")
        # These arguments determine the collective calls and the draws.
        names = ("n_samples_per_epoch", "gradient", "divergence", "schedule", "w", "root", "devices")
        settings = {name: getattr(self, name) for name in names} | {"dim": self.posterior.dim}
        settings |= {"n_epochs": n_epochs, "n_samples": n_samples, **flags}
        require_same(channel, ", ".join(f"{name}={value}" for name, value in settings.items()), "VI.run")
        count, idle = self.n_samples_per_epoch, channel.size - self.n_samples_per_epoch
        if channel.rank == self.root and idle > 0:
            _log.warning("VI: with %d draws per epoch, %d of %d ranks have none.", count, idle, channel.size)

    def elbo(self, params: Tree, data: Tree = None, n_samples: int = 1000) -> tuple[float, float]:
        """Estimate the evidence lower bound E_q[-loss + log prior - log q], and the standard error of the estimate.

        If q is the exact posterior, and the loss the negative log likelihood, this is the log evidence.

        Parameters
        ----------
        params : pytree of arrays
            Variational parameters; those on a device are copied to the host.
        data : object
            The whole data, the same on all ranks.
        n_samples : int
            The number of draws.

        Returns
        -------
        (float, float)
            The estimate and its standard error, the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if `n_samples` isn't a positive integer, or `n_samples`, rng or root differs between ranks.
        WorkerError
            On all ranks, as in `run`.

        Ranks
        -----
        All ranks of `comm` call it.
        """
        used = channel(self.comm, "VI.elbo")
        root = root_of(self.root, used, "VI.elbo")
        with raising_together(used):
            positive_count(n_samples, "VI: n_samples")
        require_same(used, f"n_samples={n_samples}, root={self.root}", "VI.elbo")
        noise = generator_of(shared_key(self.rng, used, "VI.elbo"), _BOUND).standard_normal((n_samples, self.posterior.dim))
        # On the host, so that results are the same on all ranks.
        draws = [np.asarray(part) for part in self.posterior.draw(to_host(params), noise)]
        model = Model(self.loss, data, False, _device_of(self.devices, used, "VI.elbo"))
        terms, valid = self._log_weights(used, root, model, draws, "VI.elbo", 1.0)
        terms = terms[valid]
        return float(terms.mean()), float(terms.std(ddof=1) / len(terms) ** 0.5) if len(terms) > 1 else math.inf

    def _log_weights(
        self, channel: Channel, root: Rank, model: Model, draws: Sequence[Array], call: str, w: float
    ) -> tuple[Array, Array]:
        """Return -loss/w + log prior - log q at draws, given with log q, and whether the model succeeded; collective."""
        theta, log_q = draws
        with restoring_state(), suspended():
            rows = model.evenly(theta if channel.rank == root else None, self.posterior.dim, root, self.comm)
            evaluations: Evaluations = evaluations_of(channel.data.bcast(rows, root))
        if evaluations.problem is not None:
            self._fail(channel, model, WorkerError(f"{call}: {evaluations.problem}.", root, ""))
        return -evaluations.values / w + np.asarray(log_prior(self.prior, theta)) - log_q, evaluations.valid


_MIN_WEIGHTS = 100  # minimum number of importance weights for k-hat


def _first_failure(channel: Channel, model: Model) -> tuple[int, str]:
    """Return the lowest rank on which the model raised, or a draw was dropped, and the text on it; collective."""
    found = enumerate(channel.data.allgather((model.raised, model.trace)))
    return min(((not raised, rank, trace) for rank, (raised, trace) in found if trace), default=(True, 0, ""))[1:]


def _check_arguments(loss: object, posterior: object, optimizer: object, **chosen: str) -> None:
    if not callable(loss):
        raise TypeError(f"VI: loss must be a function, but got {type(loss).__name__} {loss!r:.60}.")
    required = [(posterior, "posterior", ("initial", "draw", "log_prob")), (optimizer, "optimizer", ("setup", "update"))]
    for value, kind, names in required:
        if isinstance(value, type):
            raise TypeError(f"VI: the {kind} must be an object, but got a class: write {value.__name__}(...).")
        if not all(callable(getattr(value, name, None)) for name in names):
            raise TypeError(f"VI: the {kind} must have {', '.join(names)}, but got {type(value).__name__} {value!r:.60}.")
    if isinstance(optimizer, DistributedOptimizer):
        inner = type(optimizer.optimizer).__name__
        raise TypeError(f"VI: only the root makes updates, so pass the {inner} of the DistributedOptimizer instead.")
    choices = {
        "gradient": ("pathwise", "score"),
        "divergence": ("auto", "closed", "draws", "path"),
        "schedule": ("even", "dynamic"),
    }
    for name, value in chosen.items():
        if value not in choices[name]:
            raise ValueError(f"VI: {name} must be one of {', '.join(map(repr, choices[name]))}, but got {value!r}.")


def _require_one_device(params: Tree, device: int | None, call: str) -> None:
    """Raise if a leaf has an unsupported type, or if variables are in several places or on a GPU other than `device`."""
    refuse_objects(params, "params", call)
    namespaces = [arrays_of(leaf) for leaf in flatten(params)[0] if is_variable(leaf)]
    places = ["on the host" if each is None else f"on device {each.device}" for each in namespaces]
    if len(set(places)) > 1:
        raise TypeError(
            f"{call}: variational parameters must all be on the host or on one device, but they are "
            f"{', '.join(places)}. Copy them with mpiad.device.to_device or mpiad.device.to_host."
        )
    if device is not None and not {*places} <= {"on the host", f"on device {device}"}:
        raise ValueError(
            f"{call}: variational parameters are {places[0]}, but the root's device in devices= is "
            f"cuda:{device}. Pass mpiad.device.to_device(params, {device})."
        )


def _device_of(names: Sequence[str] | None, channel: Channel, call: str) -> int | None:
    """Make this rank's GPU among `names` ("cpu", "cuda:0" and so on) current; return its number or None; collective."""
    if names is None:
        return None
    with raising_together(channel):
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            listed = "a list of names, one for each rank, such as ['cpu', 'cuda:0']"
            raise TypeError(f"{call}: devices must be {listed}, but got {names!r}.")
        if len(names) != channel.size:
            raise ValueError(
                f"{call}: devices has {len(names)} names, but there are {channel.size} ranks: give one for each."
            )
        name = str(names[channel.rank])
        if name == "cpu":
            return None
        prefix = f"{call}: rank {channel.rank} has no device {name!r}: "
        found = re.fullmatch(r"cuda:(\d+)", name)
        if found is None:
            raise ValueError(f"{prefix}valid names are 'cpu', 'cuda:0', 'cuda:1' and so on.")
        try:
            return select(int(found[1]))
        except (ImportError, RuntimeError, ValueError) as error:
            raise ValueError(f"{prefix}{error}") from error
