"""`Comparison`: whether the steps that a reverse pass repeats have the results of the forward run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiad._typing import Array
from mpiad.pytrees import fetched
from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.snapshots import checksum
from mpiad.transport.devices.device_arrays import arrays_of


class Comparison:
    """A comparison of the steps that a reverse pass repeats with the forward run.

    The state after a recorded step is compared with the state from which the following step was recorded, and the last
    state and all observed values with those of the forward run. Nothing is raised before the end of the pass, so that this
    rank makes all communications for which others wait, and so that one copy from a device suffices.
    """

    def __init__(self, schedule: CheckpointSchedule, places: tuple[str, ...], steps: int):
        # `places`: the lines of the step and of the observation.
        self._schedule, self._places, self._last = schedule, places, steps - 1
        self._deviations: list[
            tuple[int, bool, list[float]]
        ] = []  # step, whether it was observed, accuracies of the leaves
        self._sizes: list[Array] = []  # for each of these leaves: the largest difference, and the largest sum

    def add(self, number: int, leaves: Sequence[Array], expected: Sequence[Array], observed: bool = False) -> None:
        """Compare the state after step `number`, or the values observed after it, with checksums."""
        part = self._part(number, observed)
        pairs = [(checksum(leaf, part), sums) for leaf, sums in zip(leaves, expected) if np.size(leaf)]
        if all(same_bits(np.asarray(a) if arrays_of(a) is None else a, b) for a, b in pairs):
            return
        stored = 1e-6 if self._schedule.compress else np.finfo(self._schedule.dtype or float).eps
        precisions = [float(max(stored, np.finfo(getattr(sums, "dtype", float)).eps)) for sums, _ in pairs]
        self._deviations.append((number, observed, precisions))
        with np.errstate(all="ignore"):
            for a, b in pairs:
                self._sizes += np.max(np.abs(a - b)), np.max(np.abs(b))

    def add_values(self, number: int, leaves: Sequence[Array], others: Sequence[Array], observed: bool) -> None:
        """Compare the state after step `number`, or the values observed after it, with those of the forward run."""
        self.add(number, leaves, [checksum(leaf, self._part(number, observed)) for leaf in others], observed)

    def _part(self, number: int, observed: bool) -> int | None:
        return number if observed or number < self._last else None  # the last state is compared as a whole

    def require_same(self) -> None:
        """Raise a RuntimeError if values differ by more than rounding."""
        sizes = iter(fetched(self._sizes))
        for number, observed, precisions in self._deviations:
            differences, scales = np.array([(next(sizes), next(sizes)) for _ in precisions], float).T
            # The last term: a leaf of zeros may contain rounding errors of the others. Compression rounds noise to 5e-5,
            # and steps may compute small values from differences of large ones.
            others = 2.0 if self._schedule.compress else np.power(precisions, 0.25)
            allowed = np.sqrt(precisions) * (scales + others * scales.max())
            if np.any(differences > allowed):
                k, what = int(np.argmax(differences - allowed)), "the observed values" if observed else "the state"
                raise RuntimeError(
                    f"timestepping.scan: the result of the function at {self._places[observed]} doesn't depend on its "
                    f"arguments alone: {what} after step {number} changed by {differences[k]:.1e}, compared with "
                    f"{scales[k]:.1e}, when the gradient repeated the steps. Compute random numbers, times and counts "
                    "before the loop, and pass them as inputs= or params; keep no values in attributes; and leave arrays "
                    "that the steps read as they are until the reverse pass. Or omit checkpoints."
                    + " Or does a step amplify the rounding of compressed checkpoints? Then take dtype='float32'."
                    * self._schedule.compress
                )


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays, or an array and a number, are on the host and have the same bits."""
    return type(a) is np.ndarray and not isinstance(b, list) and a.tobytes() == np.asarray(b).tobytes()
