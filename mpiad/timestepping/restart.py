"""`restartable`: a time loop whose state is written to files, from which the next job of a series continues.

The ranks must stop after the same step, but a signal may reach only some of them. They agree every k-th step by a small
reduction, and choose k such that this takes place about once per second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path

import numpy as np

from mpiad._typing import Comm, Tree
from mpiad.primitives.checks import positive_count
from mpiad.pytrees import described, leaf_on_device, rebuilt
from mpiad.transport import MAX, Channel, channel
from mpiad.transport.core.agreement import raising_together, require_same
from mpiad.transport.core.rank_files import RankFiles
from mpiad.transport.devices.device_arrays import arrays_of
from mpiad.transport.exits.signals import as_warnings, postponed, requested

_CALL = "timestepping.restartable"
_PERIOD = 1.0  # seconds between agreements, if the steps are shorter
_log = logging.getLogger("mpiad")


def restartable(
    n_steps: int,
    state: dict[str, Tree],
    path: str | PathLike[str],
    *,
    every: int = 100,
    patience: float = 30.0,
    signals: Iterable[int] = (),
    comm: Comm = None,
) -> Iterator[int]:
    """Iterate over the numbers of steps; write the state to files, and continue from them if they exist.

    Parameters
    ----------
    n_steps : int
        Number of steps of the whole loop. Later jobs may pass another number.
    state : dict of str to pytree
        This rank's variables of the loop, which the steps replace or overwrite. The pytrees consist of arrays (also on
        devices), numbers, strings, None and `numpy.random.Generator` in dicts, lists and tuples. If there are files, this
        call replaces the entries by those of the last written state.
    path : path
        Name of the files. Each rank writes two files alternately, with the rank's number in their names.
    every : int
        Number of steps between two written states. The last state is always written.
    patience : float
        Maximum time in seconds from SIGTERM to the end of the current step; then the job ends, without a further state.
    signals : iterable of int
        Signals that end the loop like SIGTERM, but without a limit of time, for example ``[signal.SIGUSR2]``, which batch
        systems can send as a warning. The program mustn't have set another handler, as MPICH has for SIGUSR1.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    iterator of int
        The numbers of the steps that remain, up to ``n_steps - 1``. If a rank has received SIGTERM, the iterator writes the
        state after a step and raises SystemExit on all ranks, within about a second or two steps.

    Raises
    ------
    TypeError, ValueError, OSError
        On all ranks: if an argument is invalid, `n_steps` or `every` differs between ranks, the folder doesn't exist, a
        file is damaged, or the files belong to a state with other keys, shapes or dtypes, or to another number of ranks.
    SystemExit
        In the loop, with the code 128 plus the signal's number, for example 143 after SIGTERM.

    Ranks
    -----
    All ranks of `comm` call it, with the same `n_steps` and `every`, and iterate to the end.

    Examples
    --------
    >>> import tempfile
    >>> state = {"u": np.ones(2)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in mpiad.timestepping.restartable(10, state, f"{folder}/run.npz"):
    ...         state["u"] = 2.0 * state["u"]
    >>> print(state["u"])
    [1024. 1024.]
    """
    used = channel(comm, _CALL)
    with raising_together(used, Exception):
        positive_count(n_steps, f"{_CALL}: n_steps", least=0)
        positive_count(every, f"{_CALL}: every")
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            got = f"{type(state).__name__} {state!r:.60}"
            raise TypeError(f"{_CALL}: state must be a dict with names as keys, but got {got}.")
        warnings, file = as_warnings(signals, _CALL), Path(path).absolute()
        given: dict[str, np.ndarray] = {}
        described(state, "state", given, _CALL)
        if not file.parent.is_dir():
            raise ValueError(f"{_CALL}: the folder of {path!s:.200} doesn't exist: {file.parent}. Create it on all ranks.")
    require_same(used, f"n_steps={n_steps}, every={every}", _CALL)
    files = RankFiles(file, used, {"ranks": used.size, "state": sorted(state)}, _CALL)
    arrays, start = files.load(), _specs(given)
    if arrays is not None:
        if files.iteration > n_steps:
            raise ValueError(
                f"{_CALL}: {path!s:.200} holds the state after {files.iteration} steps, but n_steps is {n_steps}."
            )
        with raising_together(used, ValueError):
            # Lists and arrays may grow in the loop, so the state must be like that with which the first job began.
            passed, start = start, files.description.get("start", {})
            for name, written in _specs(arrays).items():
                if passed.get(name) not in (None, start.get(name), written):
                    raise ValueError(
                        f"{_CALL}: {path!s:.200} holds {name} with {written}, and began with {start.get(name, 'none')}; "
                        f"but the state that was passed has {passed[name]}. Pass a state like that of the job that wrote "
                        "the files, or another path, or delete the files."
                    )
            structure = rebuilt(files.description["structure"], arrays, arrays_of(leaf_on_device(state)))
        state.update(structure)
    return _steps(n_steps, state, start, files, used, every, postponed(patience, warnings))


def _specs(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    return {name: f"dtype {x.dtype} and shape {x.shape}" for name, x in arrays.items()}


def _steps(
    n_steps: int,
    state: dict[str, Tree],
    start: dict[str, str],
    files: RankFiles,
    channel: Channel,
    every: int,
    ending: AbstractContextManager,
) -> Iterator[int]:
    first = max(files.iteration, 0)
    interval, due, last = 1, first + 1, time.perf_counter()
    with ending:
        for done in range(first + 1, n_steps + 1):
            yield done - 1
            number = 0
            if done == due or done == n_steps:
                now, largest = time.perf_counter(), np.empty(2)
                channel.data.Allreduce(np.array([requested() or 0, now - last]), largest, MAX)
                number, seconds = int(largest[0]), largest[1]
                interval = max(1, int(interval * min(2.0, _PERIOD / max(seconds, 1e-9))))
                due, last = done + interval, now
            if number or done == n_steps or done % every == 0:
                arrays: dict[str, np.ndarray] = {}
                with raising_together(channel, Exception):
                    structure = described(state, "state", arrays, _CALL)
                files.write(done, {"structure": structure, "start": start}, arrays.items())
            if number:
                if channel.rank == 0:
                    _log.warning("%s: stopped after %d of %d steps; the same program continues.", _CALL, done, n_steps)
                raise SystemExit(128 + number)
