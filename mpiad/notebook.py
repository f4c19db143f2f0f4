"""`%%mpiad -n 4`: run a cell of a notebook on several ranks, the engines of ipyparallel (``mpiad[notebook]``).

``%load_ext mpiad.notebook`` defines the magic. The first cell starts the ranks, which keep their variables until another
number of ranks is asked for, ``%mpiad_stop`` is called, or the kernel ends. The ranks have ``MPIAD_TIMEOUT``: if they wait
for each other, all of them raise an error with a table of their calls. After an exception or an interrupt the library's
communicators are renewed; if the ranks don't answer, they are started again at the next cell.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import publish_display_data

from mpiad.optional_packages import optional_package

_START, _ANSWER = 120.0, 15.0  # seconds that ranks have to start, and to answer after a failure


def _rank() -> int:
    """Return the rank of an engine, which has mpiad then."""
    import mpiad

    return mpiad.mpi_rank()


def _reset() -> None:
    import mpiad

    mpiad.reset()


@magics_class
class MpiadMagics(Magics):
    """The magics `%%mpiad` and `%mpiad_stop`."""

    _cluster: Any = None
    _view: Any = None  # of the engines, in the order of their ranks

    def _started(self, ranks: int, timeout: float) -> Any:
        """Return the view of as many engines as there should be ranks, which are started if others run."""
        if self._view is not None and len(self._view.targets) == ranks:
            return self._view
        self._stop()
        ipyparallel = optional_package("ipyparallel", "ipyparallel", "mpiad[notebook]", "%%mpiad")
        from traitlets.config import Config

        here = Path(sys.executable).with_name("mpiexec")
        config = Config()
        config.MPILauncher.mpi_cmd = [str(here) if here.exists() else shutil.which("mpiexec") or "mpiexec"]
        config.EngineLauncher.environment = {"MPIAD_TIMEOUT": f"{timeout:g}"}
        config.Cluster.engine_timeout = int(_START)
        self._cluster = ipyparallel.Cluster(engines="mpi", n=ranks, config=config, log_level=50)
        client = self._cluster.start_and_connect_sync(activate=False)
        engines = sorted(zip(client[:].apply_sync(_rank), client.ids))
        self._view = client[[engine for _, engine in engines]]
        return self._view

    def _stop(self) -> None:
        cluster, self._cluster, self._view = self._cluster, None, None
        if cluster is not None:
            cluster.stop_cluster_sync()

    @line_magic
    def mpiad_stop(self, line: str) -> None:
        """End the ranks; their variables are lost."""
        self._stop()

    @magic_arguments()
    @argument("-n", "--ranks", type=int, default=2, help="the number of ranks")
    @argument("-t", "--timeout", type=float, default=60.0, help="MPIAD_TIMEOUT of the ranks, in seconds, when they start")
    @cell_magic
    def mpiad(self, line: str, cell: str) -> None:
        """Run the cell on all ranks; show what each prints and draws, and the value of the last line on rank 0."""
        options = parse_argstring(self.mpiad, line)
        view, interrupt = self._started(options.ranks, options.timeout), None
        result = view.execute(cell, silent=False, block=False)
        try:
            result.wait()
        except KeyboardInterrupt as error:
            interrupt = error
            view.client.send_signal(signal.SIGINT, targets=view.targets, block=False)
            result.wait(_ANSWER)
        if result.done():
            self._show(result)
        errors: list[Any] = result.get(return_exceptions=True) if result.done() else [interrupt]
        failed: list[tuple[int, Any]] = [
            (rank, error) for rank, error in enumerate(errors) if isinstance(error, BaseException)
        ]
        if failed or interrupt is not None:
            renewed = view.apply_async(_reset) if result.done() else None
            if renewed is None or not renewed.wait(_ANSWER) or not renewed.successful():
                self._stop()
                sys.stderr.write("%%mpiad: the ranks don't answer and were ended; their variables are lost.\n")
        if interrupt is not None:
            raise interrupt
        for rank, error in failed[1:]:
            sys.stderr.write(f"[rank {rank}] {error.ename}: {error.evalue.partition(chr(10))[0]}\n")
        if failed:
            sys.stderr.write(f"[rank {failed[0][0]}]\n")
            raise failed[0][1]

    @staticmethod
    def _show(result: Any) -> None:
        """Show the prints and pictures of all ranks, and rank 0's value."""
        result.wait_for_output(1.0)
        for rank, (out, err, pictures) in enumerate(zip(result.stdout, result.stderr, result.outputs)):
            for text, file in ((out, sys.stdout), (err, sys.stderr)):
                for each in text.splitlines():
                    file.write(f"[rank {rank}] {each}\n")
            for picture in pictures:
                publish_display_data(picture["data"], picture["metadata"])
        if value := result.execute_result[0]:
            publish_display_data(value["data"], value["metadata"])


def load_ipython_extension(shell: Any) -> None:
    """Define the magics; called by ``%load_ext mpiad.notebook``."""
    shell.register_magics(MpiadMagics)
