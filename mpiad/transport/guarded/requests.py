"""Requests whose wait has a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpiad._typing import Request, Status
from mpiad.transport.guarded.timed_waits import Awaited, poll

__all__ = ["GuardedRequest", "keep_for_ever"]

_abandoned: list[Any] = []  # never emptied: nobody knows when MPI is done with it


def keep_for_ever(*buffers: Any) -> None:
    """Hold what MPI may still use: the request that it belongs to was given up."""
    _abandoned.append(buffers)


class GuardedRequest:
    """A request of mpi4py's, waited for by polling.

    Parameters
    ----------
    request : mpi4py request
    make : callable
        Describes the wait.
    held : object
        Its buffers.
    receives : bool
        Whether it can be taken back.
    """

    def __init__(self, request: Request, make: Callable[[], Awaited], held: object = None, receives: bool = False):
        self.request, self._make = request, make
        self._held, self._receives = held, receives

    def Test(self, status: Status = None) -> bool:
        """Tell whether it is complete."""
        return self.request.Test(status)

    def Wait(self, status: Status = None) -> None:
        """Wait until it is complete."""
        try:
            poll(lambda: self.Test(status), self._make)
        except MPI.Exception:  # it is complete
            raise
        except BaseException:  # the deadline, or a Ctrl-C between two looks
            self._give_up()
            raise

    def _give_up(self) -> None:
        # The caller drops the buffers. A receive must not take a later message into them either.
        if self._receives:
            self.Cancel()
            self.request.Wait()
        else:
            keep_for_ever(self.request, self._held)

    def Cancel(self) -> None:
        """Cancel it."""
        self.request.Cancel()
