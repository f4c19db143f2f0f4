"""Backends: algorithms that solve the trajectories of a batch one after the other, together, in threads, or on a GPU."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mpiad.device.transfer import own_device
from mpiad.ensemble.batch import Batch, is_on_device
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.working_set import integrate
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of, selected_arrays
from mpiad.transport.resources import cores

_log = logging.getLogger("mpiad")


class EnsembleAlgorithm:
    """A backend of `solve`. On the host, results are bitwise equal if either all or none of the backends use a kernel."""

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class EnsembleSerial(EnsembleAlgorithm):
    """Solve one trajectory after the other: for comparison, or if f computes with numbers instead of columns.

    If f can't be called with columns (for example, it calls ``math.sin(u[0])``, or branches on a component), f is called
    with one trajectory: u of shape (d,), p without an axis of trajectories, and a number t. Such an f isn't compiled.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, EnsembleProblem, EnsembleSerial, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ensemble = EnsembleProblem(decay, p=np.array([[1.0], [2.0]]))
    >>> print(np.array_equal(solve(ensemble, RK45(), EnsembleSerial()).u, solve(ensemble).u))
    True
    >>> switch = ODEProblem(lambda u, p, t: [-u[0] if u[0] > 0.5 else 0.0], [1.0], (0.0, 5.0))
    >>> print(solve(switch, RK45(), EnsembleSerial(), rtol=1e-8).u_end.round(2))
    [0.5]
    """

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch, one after the other."""
        _require_host(self, batch)
        return _by_shares(batch, settings, [slice(i, i + 1) for i in range(batch.size)], map)


@dataclass(frozen=True)
class EnsembleVectorized(EnsembleAlgorithm):
    """Solve all trajectories together, each with its own time, step and error control: the default.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, EnsembleProblem, EnsembleVectorized, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ensemble = EnsembleProblem(decay, p=np.array([[1.0], [2.0]]))
    >>> print(solve(ensemble, RK45(), EnsembleVectorized()).u_end.ravel().round(3))
    [0.368 0.135]
    """

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        return integrate(batch, settings)


@dataclass(frozen=True)
class EnsembleThreads(EnsembleAlgorithm):
    """Solve contiguous shares of the trajectories in threads, each like `EnsembleVectorized`; f must be thread-safe.

    Parameters
    ----------
    threads : int, optional
        Number of threads; by default the number of cores.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, EnsembleProblem, EnsembleThreads, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ensemble = EnsembleProblem(decay, p=np.array([[1.0], [2.0]]))
    >>> print(np.array_equal(solve(ensemble, RK45(), EnsembleThreads(2)).u, solve(ensemble).u))
    True
    """

    threads: int | None = None

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch."""
        _require_host(self, batch)
        count = max(1, min(self.threads or len(cores()), batch.size))
        bounds = [batch.size * i // count for i in range(count + 1)]
        with ThreadPoolExecutor(count) as executor:
            return _by_shares(batch, settings, [slice(a, b) for a, b in zip(bounds, bounds[1:])], executor.map)


def _require_host(backend: EnsembleAlgorithm, batch: Batch) -> None:
    # A single trajectory is solved by `EnsembleVectorized`, on the device of its arrays.
    if is_on_device(batch) and batch.size > 1:
        raise NotImplementedError(
            f"solve: {type(backend).__name__} runs on the host, but the states or parameters are device arrays. Take "
            "EnsembleVectorized(), or apply mpiad.device.to_host to u0 and p."
        )


def _by_shares(batch: Batch, settings: Settings, shares: list[slice], each) -> Outcome:
    if len(shares) < 2:
        return EnsembleVectorized().run(batch, settings)
    parts = each(lambda rows: integrate(batch.share(rows), settings.share(rows)), shares)
    return Outcome.joined(list(parts))


_BLOCKS = (None, 32, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class EnsembleGPU(EnsembleVectorized):
    """Solve all trajectories on a GPU, each in a thread that runs its whole solve in registers.

    The kernel is generated from f and compiled at the first solve. If f can't be traced, `EnsembleVectorized` computes with
    arrays on the device, and the reason is logged once. If initial states or parameters are on a device, the results are on
    that device; otherwise they are on the host, and only inputs and results are transferred.

    Parameters
    ----------
    block : {32, 64, 96, 128, 192, 256}, optional
        Number of threads per block; by default 128, or fewer if there would be fewer than two blocks per multiprocessor.
    tape_bytes : int, optional
        Device memory in bytes for the steps of trajectories in an adjoint gradient; by default half of the free memory. If
        the steps don't fit, the trajectories are processed in several shares.
    contract : bool
        Whether a product and a sum may be contracted to one operation with one rounding (fused multiply-add).
    fast_math : bool
        Whether to allow less exact functions and divisions, by the option ``--use_fast_math`` of NVRTC.

    Raises
    ------
    ValueError
        If `block` or `tape_bytes` is invalid.

    Ranks
    -----
    If it is the inner backend of `EnsembleMPI`, each rank uses its own device: see `mpiad.device.select`.
    """

    block: int | None = None
    tape_bytes: int | None = None
    contract: bool = True
    fast_math: bool = False

    def __post_init__(self) -> None:
        if self.block not in _BLOCKS:
            allowed = ", ".join(map(str, _BLOCKS[1:]))
            raise ValueError(f"EnsembleGPU: block must be one of {allowed}, but got {self.block!r}.")
        if self.tape_bytes is not None and self.tape_bytes < 1:
            raise ValueError(f"EnsembleGPU: tape_bytes must be above zero, but got {self.tape_bytes!r}.")

    @property
    def options(self) -> tuple[str, ...]:
        """The options of NVRTC."""
        exact = ("--std=c++14", f"--fmad={str(self.contract).lower()}")
        return (*exact, "--use_fast_math") if self.fast_math else exact


def device_for(batch: Batch, together: bool) -> ArrayModule:
    """Return the device of a batch's arrays; for host arrays the current one, or this rank's if ranks solve `together`."""
    for x in (batch.u0, *batch.p.leaves):
        arrays = arrays_of(x)
        if arrays is not None:
            return arrays
    try:
        # Ranks of one node must not share its first device; a single rank uses the current one.
        return selected_arrays(own_device() if together else None)
    except (ImportError, RuntimeError) as error:
        why = str(error).rstrip(".")
        raise type(error)(
            f"EnsembleGPU: {why}. On the CPU EnsembleVectorized() with compile=True runs the same solve as a kernel."
        ) from error
