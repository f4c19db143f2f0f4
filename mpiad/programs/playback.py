"""A function that has left its trace, run once more without a second communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiad.programs.steps import on_host, plain
from mpiad.transport.tracing import tracing

__all__ = ["Playback"]


class Playback:
    """Stands for a recorder where a function that has left its trace is run once more, on plain arrays.

    What it has communicated until then isn't communicated again: the results are those of the first time.

    Parameters
    ----------
    log : list
        Of a recorder.
    """

    def __init__(self, log: Sequence[Any]):
        self._rest = iter(list(log))

    def communicate(self, operation: Any, x: Any, params: Any) -> Any:
        """Return what a communication gave when it was traced, or communicate."""
        return self._next(operation.forward, plain(x), on_host(params))

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what an operator gave when it was traced, or apply it."""
        return self._next(operator.body, plain(args), plain(kwargs))

    def _next(self, fun: Callable, *args: Any) -> Any:
        for made in self._rest:
            return made
        tracing.recorder = None
        try:
            return fun(*args)
        finally:
            tracing.recorder = self

    def refuse(self, reason: str) -> None:
        """Let it do what can't be traced."""

    def looked_up(self, call: str) -> None:
        """Let it look for channels."""

    def entered_body(self) -> None:
        """Let it run bodies: what was traced came before all of them."""
        tracing.recorder = None

    def communicated_by_itself(self) -> None:
        """Let it communicate as it likes."""

    def marked(self, channel: Any, reason: str) -> bool:
        """Let channels be marked."""
        return False
