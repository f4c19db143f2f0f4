"""A function that has left its trace, run once more without a second communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiad.primitives.request import Request
from mpiad.programs.message_numbers import Answer, envelopes_of
from mpiad.programs.opaque_calls import opaque_call
from mpiad.programs.steps import on_host, plain
from mpiad.transport.tracing import tracing


class Playback:
    """Stands for a recorder where a function that has left its trace is run once more, on plain arrays.

    What it has communicated until then isn't communicated again: the results are those of the first time.

    `log`: of a recorder, or of a replay that couldn't go on.
    """

    def __init__(self, log: Sequence[Any]):
        self._rest = list(log)[::-1]

    @property
    def ended(self) -> bool:
        """Whether all of it has been played back."""
        return not self._rest

    def communicate(self, operation: Any, x: Any, params: Any) -> Any:
        """Return what a communication gave when it was traced, or communicate."""
        params = on_host(params)
        made = self._next(operation.forward, plain(x), params)
        if isinstance(made, Answer):
            envelopes_of(params)[0].answered_from(made.peer, made.tag)
            return made.value
        return made.again() if isinstance(made, Request) else made

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what an operator gave when it was traced, or apply it."""
        return self._next(operator.body, plain(args), plain(kwargs))

    def settle(self, fun: Callable, args: tuple) -> Any:
        """Return what came out in the trace, or run it."""
        return self._next(fun, *plain(args))

    opaque, call_as_it_is = settle, opaque_call

    def once(self, fun: Callable, args: tuple) -> Any:
        """Run what is done once: in the trace it was done then."""
        return self._untold(fun, *args)

    def _next(self, fun: Callable, *args: Any) -> Any:
        if self._rest:
            return self._rest.pop()
        return self._untold(fun, *args)

    def _untold(self, fun: Callable, *args: Any) -> Any:
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

    def marked(self, channel: Any, reason: str, messages: bool) -> bool:
        """Let channels be marked."""
        return False
