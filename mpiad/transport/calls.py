"""Which call of the user's program a communication belongs to: its name, its line, and backwards that of its forward call.

A thread-local stack of `Call` records, the innermost last. Nothing is noted until it is requested: `note(owner)`
has the registered switches swap the functions of all operations for ones that push and pop a record, and
`forget(owner)` puts the bare ones back, so that there is no cost without owners.

`observers` see every record begin and end: objects with ``began(call)`` and ``ended(call)``. An adjoint's record may
have others inside it (linked by `outer`), since adjoints consist of the same operations.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Hashable
from dis import opmap
from time import perf_counter
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

from mpiad._typing import Array, Shape
from mpiad.transport.device_arrays import is_device_array
from mpiad.transport.tracing import tracing


class Site:
    """A place in the user's program; there is one object for each, so that they are compared by identity.

    `file`: path, as Python knows it. `entry`: the function of this library's that was called there. `text`: as messages
    show it: ``"program.py:12 in main"``.
    """

    __slots__ = ("entry", "file", "function", "line", "text")

    def __init__(self, file: str, line: int, function: str, entry: str):
        self.file, self.line, self.function, self.entry = file, line, function, entry
        where = "" if function == "<module>" else f" in {function}"
        self.text = f"{os.path.basename(file)}:{line}{where}"

    def named(self, operation: str) -> str:
        """Return the public function that the user called, if an operation serves several of them."""
        return self.entry if self.entry.startswith("mpi_") and self.entry not in _COMPOSITES else operation

    def __str__(self) -> str:
        return self.text


# They make many communications, and messages should name the particular one.
_COMPOSITES = ("mpi_optimize", "mpi_map")
# Entries that name no function: another library's, and that of a custom operator, whose name is more informative.
_OPERATORS = ("", "extend")


class Arguments(NamedTuple):
    """The arguments of a call, as far as it has them."""

    communicator: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    shape: Shape | None = None
    dtype: Any = None
    nbytes: int = 0
    reduction: str | None = None
    members: tuple[int, ...] = ()
    envelopes: tuple[Any, ...] = ()


class Call:
    """One communication of the user's program, while it runs.

    - `name`: the public function, as ``"mpi_bcast"``.
    - `direction`: {"forward", "adjoint", "tangent"}.
    - `site`: the user's line being executed: for an adjoint that of the gradient.
    - `forward_site` (or None): for an adjoint: the call that it belongs to, noted when it was recorded.
    - `outer` (or None): the one around it.
    - `began`, `ended`: `time.perf_counter()`; `ended` is 0 until then.
    """

    __slots__ = (
        "_arguments", "_params", "_x", "began", "direction", "ended", "forward_name", "forward_site", "name", "outer",
        "site",
    )  # fmt: skip

    # The reader of an operation's arguments is defined in a higher layer: primitives.noting installs it.
    read: Callable[[Any, Any], Arguments] = staticmethod(lambda x, params: Arguments())

    def __init__(
        self, name: str, direction: str, site: Site, forward_name: str | None, forward_site: Site | None, x: Array,
        params: object,
    ):  # fmt: skip
        self.name, self.direction, self.site = name, direction, site
        self.forward_name, self.forward_site = forward_name, forward_site
        self._x, self._params = x, params
        self._arguments: Arguments | None = None
        self.outer: Call | None = None
        self.ended = 0.0
        self.began = perf_counter()

    @property
    def arguments(self) -> Arguments:
        """The call's arguments; read at the first access."""
        found = self._arguments
        if found is None:
            found = self._arguments = Call.read(self._x, self._params)
        return found

    @property
    def on_device(self) -> bool:
        """Whether its array lies on a device."""
        return self.direction == "forward" and is_device_array(self._x)

    def __repr__(self) -> str:
        return f"<Call {self.described} at {self.forward_site or self.site}>"

    @property
    def described(self) -> str:
        """The call as text: ``"mpi_bcast"``, or ``"adjoint of mpi_bcast"``."""
        return self.name if self.direction == "forward" else f"{self.direction} of {self.forward_name or self.name}"

    @property
    def called(self) -> str:
        """The same by the library's function that the user called: ``"exchange"``, ``"adjoint of exchange"``."""
        entry = (self.forward_site or self.site).entry
        if entry in _OPERATORS:
            return self.described
        return entry if self.direction == "forward" else f"{self.direction} of {entry}"


class Observer(Protocol):
    """The functions called for every call."""

    def began(self, call: Call) -> None:
        """Take note of a call before it communicates."""

    def ended(self, call: Call) -> None:
        """Take note of its end, whether or not by an exception."""


observers: list[Observer] = []


_owners: set[Hashable] = set()
_switches: list[Callable[[bool], None]] = []


def register(switch: Callable[[bool], None]) -> None:
    """Add a function that swaps operations for noting ones, or back; it is called at once if calls are noted."""
    _switches.append(switch)
    if _owners:
        switch(True)


def note(owner: Hashable) -> None:
    """Have all calls noted, until `forget`."""
    _owners.add(owner)
    if len(_owners) == 1:
        for switch in _switches:
            switch(True)


def forget(owner: Hashable) -> None:
    """End the effect of `note`; the last owner switches it off."""
    if owner in _owners:
        if len(_owners) == 1:
            for switch in _switches:
                switch(False)
        _owners.remove(owner)  # last: after an interrupt this can be done again


def is_noting() -> bool:
    """Return whether calls are noted."""
    return bool(_owners)


def current() -> Call | None:
    """Return the innermost call of this thread, None if there is none."""
    return tracing.call


def begin(name: str, x: Array, params: object) -> Call:
    """Note a call; the caller ends it with `end`."""
    outer = tracing.call
    if outer is not None and outer.direction != "forward":
        # Part of an adjoint or tangent: it stands for the same line.
        call = Call(name, outer.direction, outer.site, outer.forward_name, outer.forward_site, x, params)
    else:
        site = site_of(sys._getframe(1))
        call = Call(site.named(name), "forward", site, None, None, x, params)
    return _pushed(call)


def begin_rule(direction: str, name: str, forward_site: Site, x: Array, params: object) -> Call:
    """Note an adjoint or tangent, with the name and site of its forward call; the caller ends it with `end`."""
    return _pushed(Call(name, direction, site_of(sys._getframe(1)), name, forward_site, x, params))


def _pushed(call: Call) -> Call:
    call.outer = tracing.call
    tracing.call = call
    if observers:
        for observer in tuple(observers):
            observer.began(call)
    return call


def end(call: Call) -> None:
    """End a call, with all that an exception left open inside it."""
    tracing.call = call.outer
    call.ended = perf_counter()
    if observers:
        for observer in tuple(observers):
            observer.ended(call)
    call._x = call._params = None  # observers that keep the record mustn't keep the arrays alive


def _folder(path: str) -> str:
    return os.path.join(os.path.realpath(path), "")


_OURS = _folder(os.path.dirname(os.path.dirname(__file__)))
# The runner of a compiled function lies between the user and the called function: the user didn't call it.
_BETWEEN = _folder(os.path.join(_OURS, "programs"))
_STANDARD = tuple({_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("autograd", "scipy", "numpy", "mpi4py"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

# By code object, since the same frames come again and again: 0 the user's, 1 this library's, 2 another library's.
_kinds: dict[CodeType, int] = {}
_sites: dict[tuple[CodeType, int, CodeType | None], Site] = {}


def _kind(code: CodeType) -> int:
    found = _kinds.get(code)
    if found is None:
        found = _kinds[code] = _kind_of_file(code.co_filename)
    return found


def _kind_of_file(name: str) -> int:
    if name.startswith("<frozen"):
        return 2
    path = os.path.realpath(name) if os.path.exists(name) else name
    if path.startswith(_OURS):
        return 2 if path.startswith(_BETWEEN) else 1
    # Any other installed package may be the user's own, or call us on the user's behalf: its line is shown.
    installed = any(mark in path for mark in _INSTALLED)
    if installed:
        return 2 if any(mark in path for mark in _PACKAGES) else 0
    return 2 if path.startswith(_STANDARD) else 0


def user_frame(frame: FrameType | None) -> tuple[FrameType | None, CodeType | None]:
    """Return the innermost frame of the user's, and the code of this library's that it called (None: another's)."""
    called = None
    while frame is not None:
        kind = _kind(frame.f_code)
        if kind == 0:
            return frame, called
        if kind == 1:
            called = frame.f_code
        frame = frame.f_back
    return None, called


def site_of(frame: FrameType | None) -> Site:
    """Return the user's place in a stack of frames, innermost first."""
    found, called = user_frame(frame)
    if found is None:
        return _NOWHERE
    # The line is determined once for each instruction: that takes longer than all the rest.
    key = found.f_code, found.f_lasti, called
    site = _sites.get(key)
    if site is None:
        code = found.f_code
        known = code.co_consts[-1] if code.co_consts else None  # a compiled program's frame, which stands for a line
        if not isinstance(known, Site):
            known = Site(code.co_filename, found.f_lineno or 0, code.co_name, entry(called))
        site = _sites[key] = known
    return site


def site_of_trace(trace: TracebackType | None) -> Site:
    """Return the user's innermost place in a traceback."""
    found = _NOWHERE
    while trace is not None:
        code = trace.tb_frame.f_code
        if _kind(code) == 0:
            found = Site(code.co_filename, trace.tb_lineno, code.co_name, "")
        trace = trace.tb_next
    return found


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether a signal handler has raised an exception, or a `raise` in the user's program.

    Errors by which code refuses an array of another kind than it knows (TypeError and the like) count for a handler only.
    """
    trace = error.__traceback__
    while trace is not None:
        frame, last = trace.tb_frame, trace.tb_lasti
        # Python calls a handler with the frame that it interrupts.
        given = frame.f_locals.values() if _kind(frame.f_code) != 1 else ()
        parts = [part for x in given for part in (x if type(x) is tuple else (x,))]
        if frame.f_back is not None and any(part is frame.f_back for part in parts):
            return True
        trace = trace.tb_next
    if error.__traceback__ is None or isinstance(error, (TypeError, AttributeError, AssertionError, NotImplementedError)):
        return False
    return _kind(frame.f_code) == 0 and frame.f_code.co_code[last] == opmap["RAISE_VARARGS"]


def entry(code: CodeType | None) -> str:
    """Return the name of the library's function that the user called, "" for none."""
    if code is None:
        return ""
    # A function that the library returned (a gradient) is named by its file; gradient.py's by its first function.
    name, file = code.co_name, os.path.basename(code.co_filename)[:-3]
    if name in _NAMES:
        return _NAMES[name]
    if name in ("evaluate", "<lambda>", "vjp", "products", "__call__"):
        return "value_and_grad" if file == "gradient" else file
    return name


_END = "the end of the program"
_ENDS = ("mpi_finalize", "finalize", "_complete_at_exit", "_end_world", "close_at_exit")
_NAMES = {"_freed": "comm.Free"} | dict.fromkeys(_ENDS, _END)
_NOWHERE = Site("", 0, "<module>", "")
_NOWHERE.text = "outside the user's program"
