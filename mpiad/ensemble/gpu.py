"""`EnsembleGPU`: an ensemble on a GPU, each trajectory a thread of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass

from mpiad.device.selection import own_device
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings
from mpiad.transport.device_arrays import ArrayModule, arrays_of
from mpiad.transport.device_kernels import selected_arrays

_BLOCKS = (None, 32, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class EnsembleGPU(EnsembleAlgorithm):
    """All trajectories on a GPU, each in a thread that runs its whole solve in registers.

    The kernel is generated from f and compiled at the first solve. Where f can't be traced `EnsembleVectorized` computes
    with arrays on the device; the log says once why.
    Initial states or parameters on a device give results there; host arrays give results on the host, and only they travel.

    Parameters
    ----------
    block : {32, 64, 96, 128, 192, 256}, optional
        Threads of a block. By default 128, and 64 or 32 where so many would leave multiprocessors without work.
    tape_bytes : int, optional
        Device memory for the steps of trajectories while an adjoint gradient is computed; by default half of what is free.
        Trajectories whose steps don't fit go one share after the other.
    contract : bool
        Whether products and sums may be contracted to one operation with one rounding, as on CPUs with FMA.
    fast_math : bool
        Whether to allow functions and divisions that are less exact than their dtype, which changes values.

    Raises
    ------
    ValueError
        Where `block` or `tape_bytes` can't be.

    Ranks
    -----
    As the inner backend of `EnsembleMPI`, each rank uses the device that is its own: see `mpiad.device.select`.
    """

    block: int | None = None
    tape_bytes: int | None = None
    contract: bool = True
    fast_math: bool = False

    def __post_init__(self) -> None:
        if self.block not in _BLOCKS:
            known = ", ".join(map(str, _BLOCKS[1:]))
            raise ValueError(f"EnsembleGPU: block must be one of {known}, but got {self.block!r}.")
        if self.tape_bytes is not None and self.tape_bytes < 1:
            raise ValueError(f"EnsembleGPU: tape_bytes must be above zero, but got {self.tape_bytes!r}.")

    @property
    def options(self) -> tuple[str, ...]:
        """What NVRTC is told."""
        exact = ("--std=c++14", f"--fmad={str(self.contract).lower()}")
        return (*exact, "--use_fast_math") if self.fast_math else exact

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of a batch by arrays: where kernels can't."""
        return EnsembleVectorized().run(batch, settings)


def device_for(batch: Batch, together: bool) -> ArrayModule:
    """Return the device that solves a batch of plain arrays: where they live, else this rank's where ranks solve together.

    An ImportError without CuPy, a RuntimeError without a GPU.
    """
    for x in (batch.u0, *batch.p.leaves):
        arrays = arrays_of(x)
        if arrays is not None:
            return arrays
    try:
        # Ranks of one node must not meet on its first device; one that works alone takes what is current.
        return selected_arrays(own_device() if together else None)
    except (ImportError, RuntimeError) as error:
        why = str(error).rstrip(".")
        raise type(error)(
            f"EnsembleGPU: {why}. On the CPU EnsembleVectorized() with compile=True runs the same solve as a kernel."
        ) from error
