"""The root's part of a run: draws, updates, and whether another epoch follows."""

from __future__ import annotations

import math
import pickle
import time
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpiad._typing import Array, Function, Tree
from mpiad.device import to_host
from mpiad.errors import WorkerError
from mpiad.pytrees import flatten, is_variable, map_leaves
from mpiad.transport.device_arrays import is_array, is_device_array
from mpiad.vi.elbo_gradient import Objective, on_device, placed
from mpiad.vi.model_evaluation import Evaluations


class Optimizer(Protocol):
    """What a run needs of an optimizer, of the user's or of `mpiad.parallel`."""

    def setup(self, params: Tree) -> Any:
        """Return the state before the first update."""

    def update(self, state: Any, params: Tree, gradient: Tree) -> tuple[Any, Tree]:
        """Return the state and the parameters after an update."""
        ...


class Verdict(NamedTuple):
    """What the root tells all ranks after an epoch; an exception in a form that can be sent."""

    ends: bool
    error: Exception | None


class Ended(NamedTuple):
    """What the root tells all ranks after the last epoch."""

    # `params`, `best`: what is reported, and what had the lowest objective; on the host.
    params: Tree
    best: Tree
    away: bool  # whether they lie on a device on the root
    history: dict[str, list]
    epochs: int
    best_epoch: int
    message: str


class Training:
    """Variational parameters on their way, and what is known of it.

    - `params`: on the host or on a device: where they are updated.
    - `patience`: epochs without improvement after which the run ends.
    - `average`: whether the average over the last epochs is reported, or the last one.
    - `failure` (or None): what ended the run.
    """

    def __init__(
        self, objective: Objective, optimizer: Optimizer, params: Tree, patience: int | None, callback: Function | None,
        average: bool,
    ):  # fmt: skip
        self._objective, self._optimizer, self._patience, self._callback = objective, optimizer, patience, callback
        # Copies, because an optimizer of the user's may overwrite the parameters that it gets.
        self._params, self._best = _copied(params), params
        self._average = Average() if average else None
        self._state = optimizer.setup(self._params)
        self._lowest, self._best_epoch, self._message = math.inf, 0, ""
        self._start = time.perf_counter()
        self.history: dict[str, list] = {name: [] for name in ("objective", "loss", "divergence", "dropped", "seconds")}
        self.verdict = Verdict(False, None)
        self.failure: Exception | None = None

    @property
    def found(self) -> tuple[Tree, Tree]:
        """Return the parameters that are reported and the best, where they lie."""
        return self._params if self._average is None else self._average.params, self._best

    def draws(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """Return noise and the draws that are made of it; draws that aren't finite are left for `learn` to find.

        The noise lies where the parameters do, the draws on the host, from where all ranks get theirs. An exception is
        left, too: the other ranks already wait for their share, and get NaN.
        """
        noise = rng.standard_normal((count, self._objective.posterior.dim))
        try:
            with np.errstate(all="ignore"):
                noise = placed(noise, self._params)
                found = to_host(self._objective.posterior.draw(self._params, noise)[0])
                theta = np.ascontiguousarray(found, dtype=float)
            if theta.shape != noise.shape:
                raise ValueError(
                    f"VI: the posterior's draw must return draws of shape {noise.shape}, as the noise, but they have shape "
                    f"{theta.shape}."
                )
        except Exception as error:  # noqa: BLE001  told to all ranks, which raise it together
            self._fail(error)
            return noise, np.full(noise.shape, np.nan)
        return noise, theta

    def learn(self, noise: Array, theta: Array, found: Evaluations) -> None:
        """Make an update, or find what ends the run."""
        if self.failure is not None:
            return
        try:
            self._learn(noise, theta, found)
        except StopIteration:
            self._end("ended by the callback")
        except Exception as error:  # noqa: BLE001  told to all ranks, which raise it together
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  classes made in a function, or with arguments that their base doesn't know
            error = RuntimeError(f"{type(error).__name__}: {error} (raised on the root)")
        self.verdict = Verdict(True, error)

    def _learn(self, noise: Array, theta: Array, found: Evaluations) -> None:
        epoch = len(self.history["objective"])
        if not np.isfinite(theta).all():
            raise FloatingPointError(
                f"VI: in epoch {epoch} draws of the posterior aren't finite. The learning rate may be too large, or a "
                "gradient of the model infinite."
            )
        # Some draws may fail, and the mean of the others stands for all; of none there is no mean.
        if not found.kept.any():
            raise WorkerError(
                f"VI: the model failed for all {len(theta)} draws of epoch {epoch}: it raised for {found.raised}, and "
                f"returned NaN or infinity for {found.not_finite}.", 0, "",
            )  # fmt: skip
        terms, gradient = self._objective.value_and_gradient(self._params, noise, found)
        value = terms.loss + (self._objective.w * terms.divergence if self._objective.w else 0.0)  # it may be infinite
        self._note(value, terms.loss, terms.divergence, found.raised + found.not_finite)
        # The value is that of the parameters which the draws came from, before this epoch's update.
        if value < self._lowest:
            self._lowest, self._best, self._best_epoch = value, _copied(self._params), epoch
        elif self._patience is not None and epoch - self._best_epoch >= self._patience:
            self._end(f"no improvement in {self._patience} epochs")
        self._state, self._params = self._optimizer.update(self._state, self._params, gradient)
        if not _all_finite(self._params):
            if math.isfinite(value) and not _all_finite(gradient):
                raise FloatingPointError(
                    f"VI: in epoch {epoch} the gradient isn't finite, but draws, objective and the model's gradients are. "
                    "Correct the derivative of the log density of the prior, or of the posterior."
                )
            raise FloatingPointError(
                f"VI: after epoch {epoch} variational parameters aren't finite. Lower the learning rate."
            )
        if self._average is not None:
            self._average.add(self._params)
        if self._callback is not None:
            self._callback(epoch, value, self._params)

    def _note(self, objective: float, loss: float, divergence: float, dropped: int) -> None:
        row = (objective, loss, divergence, dropped, time.perf_counter() - self._start)
        for column, entry in zip(self.history.values(), row):
            column.append(entry)

    def _end(self, message: str) -> None:
        self._message, self.verdict = message, Verdict(True, None)

    def ended(self, n_epochs: int) -> Ended:
        """Return what all ranks are told at the end."""
        epochs = len(self.history["objective"])
        message = self._message or f"all {n_epochs} epochs were made"
        away = on_device(self._params) is not None
        params, best = map(to_host, self.found)
        return Ended(params, best, away, self.history, epochs, self._best_epoch, message)


_ETA = 8


class Average:
    """The average of the variational parameters over the last part of a run, made on the way.

    At a constant learning rate the draws of each epoch push the parameters about, and they never come to rest: the mean of
    many epochs lies nearer to the optimum than any one of them (Polyak and Juditsky, 1992; for variational inference, Dhaka
    et al., 2020). The first epochs are still on their way there and mustn't count. So after epoch k the average goes the
    part (η + 1) / (k + η) of the way to the newest parameters, which weighs epoch j by about j^η ("polynomial-decay
    averaging", Shamir and Zhang, 2013). It needs one copy, and it doesn't need to know when the run ends.

    With η = 8 it is as old and as steady as the plain mean of the last fifth of the epochs: the weights' mean age is the
    part 1 / (η + 2) = 1/10 of the run, and the sum of their squares (η + 1)² / (2η + 1) ≈ 5 by the number of epochs.

    `params`: the mean, where the parameters lie. Leaves that aren't floats are the newest.
    """

    def __init__(self) -> None:
        self.params: Tree = None
        self._count = 0

    def add(self, params: Tree) -> None:
        """Let the mean go its part of the way to further parameters; these may be overwritten afterwards."""
        self._count += 1
        if self._count == 1:
            self.params = _copied(params)
            return
        part = (_ETA + 1) / (self._count + _ETA)
        means, build = flatten(self.params)
        for k, leaf in enumerate(flatten(params)[0]):
            if is_variable(leaf):
                means[k] += part * (leaf - means[k])  # in memory of its own; a scalar is replaced
            else:
                means[k] = leaf
        self.params = build(means)


def _copied(params: Tree) -> Tree:
    """Return variational parameters in memory of their own."""
    return map_leaves(lambda leaf: leaf.copy() if is_array(leaf) else leaf, params)


def _all_finite(params: Tree) -> bool:
    """Return whether all variational parameters are finite: on a device by one number that is copied."""
    flags: list[Any] = [np.all(np.isfinite(leaf)) for leaf in flatten(params)[0] if is_variable(leaf)]
    there = [flag for flag in flags if is_device_array(flag)]
    here = all(bool(flag) for flag in flags if not is_device_array(flag))
    # One flag for all leaves of a device: each copy to the host waits.
    return here and (not there or bool(to_host(np.all(np.stack(there)))))
