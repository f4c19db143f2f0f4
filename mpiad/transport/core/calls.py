"""Records of communications, and of the user's calls that caused them, for debugging, error messages and tracing.

Each thread has a stack of `Call` records, linked by `outer`. Nothing is recorded until an owner requests it by
`note(owner)`: then all operations push and pop a record, until `forget(owner)`. `observers` are notified when a call begins
and ends. The record of an adjoint may contain others, since adjoints consist of the same operations.
"""

from __future__ import annotations

import dis
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from dis import opmap
from functools import cache, lru_cache
from time import perf_counter
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import is_device_array

T = TypeVar("T")


class Site:
    """A line of the user's program, one object each. `entry`: the called function; `text`: ``"program.py:12 in main"``.

    `drops_result`: whether the line drops an array that the called function returns.
    """

    def __init__(self, file: str, line: int, function: str, entry: str, drops_result: bool = False):
        self.file, self.line, self.function, self.entry, self.drops_result = file, line, function, entry, drops_result
        where = "" if function == "<module>" else f" in {function}"
        self.text = f"{os.path.basename(file)}:{line}{where}"

    def named(self, operation: str) -> str:
        """Return the name of the public function that the user called, or of the operation if that is more specific."""
        return self.entry if self.entry.startswith("mpi_") and self.entry not in _COMPOSITES else operation

    def __str__(self) -> str:
        return self.text


_COMPOSITES = ("mpi_optimize", "mpi_map")  # communicate many times: messages name the single operation instead
# Values of `Site.entry` that messages don't show: "" for other libraries; "extend" for operators, which have names.
_HIDDEN_ENTRIES = ("", "extend")


class Arguments(NamedTuple):
    """The arguments of a call; None or empty for those that the call doesn't have."""

    communicator: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    shape: Shape | None = None
    dtype: np.dtype | None = None
    nbytes: int = 0
    reduction: str | None = None
    members: tuple[int, ...] = ()
    envelopes: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One communication of the user's program, while it runs."""

    name: str
    direction: str  # {"forward", "adjoint", "tangent"}
    site: Site  # the user's line; for an adjoint the line that computes the gradient
    forward_name: str | None
    forward_site: Site | None
    _x: Array
    _params: object
    _arguments: Arguments | None = None
    outer: Call | None = None
    ended: float = 0.0  # like `began`, of `time.perf_counter()`; 0 until the end
    began: float = field(default_factory=lambda: perf_counter())
    is_operator: bool = False  # whether it runs a function, whose calls have lines of their own
    # The reader of an operation's arguments; installed by primitives.operation, in a higher layer.
    read: ClassVar[Callable[[Array, Any], Arguments]] = staticmethod(lambda x, params: Arguments())

    @property
    def arguments(self) -> Arguments:
        """The call's arguments; read at the first access."""
        found = self._arguments
        if found is None:
            found = self._arguments = Call.read(self._x, self._params)
        return found

    @property
    def on_device(self) -> bool:
        """Whether the array of a forward call is on a device."""
        return self.direction == "forward" and is_device_array(self._x)

    def __repr__(self) -> str:
        return f"<Call {self.described} at {self.forward_site or self.site}>"

    @property
    def described(self) -> str:
        """The call as text: ``"mpi_bcast"``, or ``"adjoint of mpi_bcast"``."""
        return self.name if self.direction == "forward" else f"{self.direction} of {self.forward_name or self.name}"

    @property
    def called(self) -> str:
        """The library's function that the user called, as text: ``"exchange"``, or ``"adjoint of exchange"``."""
        entry = (self.forward_site or self.site).entry
        if entry in _HIDDEN_ENTRIES:
            return self.described
        return entry if self.direction == "forward" else f"{self.direction} of {entry}"


class Observer(Protocol):
    """An object that is notified of calls."""

    def began(self, call: Call) -> None:
        """Handle the beginning of a call."""

    def ended(self, call: Call) -> None:
        """Handle the end of a call."""


observers: list[Observer] = []
_owners: set[Hashable] = set()
_switches: list[Callable[[bool], None]] = []


def register(switch: Callable[[bool], None]) -> None:
    """Register a function that turns the recording of calls on or off; it is called at once if they are recorded."""
    _switches.append(switch)
    if _owners:
        switch(True)


def note(owner: Hashable) -> None:
    """Record all calls until ``forget(owner)``."""
    _owners.add(owner)
    if len(_owners) == 1:
        for switch in _switches:
            switch(True)


def forget(owner: Hashable) -> None:
    """End the effect of ``note(owner)``; recording stops with the last owner."""
    if owner in _owners:
        if len(_owners) == 1:
            for switch in _switches:
                switch(False)
        _owners.remove(owner)  # at the end, so that this can be repeated after an interrupt


def is_noting() -> bool:
    """Return whether calls are recorded."""
    return bool(_owners)


def current() -> Call | None:
    """Return the innermost call of this thread, None if there is none."""
    return tracing.call


def enclosing(call: Call | None) -> Call | None:
    """Return the call that encloses a function of the user: none, if it is an adjoint or tangent rule that runs it."""
    return None if call is None or call.direction != "forward" else call


def begin(name: str, x: Array, params: object, is_operator: bool = False) -> Call:
    """Record a call; the caller ends it with `end`."""
    outer = tracing.call
    if outer is not None and outer.direction != "forward" and not outer.is_operator:
        # An operation inside an adjoint or tangent gets the line of the latter.
        call = Call(name, outer.direction, outer.site, outer.forward_name, outer.forward_site, x, params)
    else:
        site = site_of(sys._getframe(1))
        call = Call(site.named(name), "forward", site, None, None, x, params)
    call.is_operator = is_operator
    return _pushed(call)


def begin_rule(direction: str, name: str, forward_site: Site, x: Array, params: object) -> Call:
    """Record an adjoint or tangent; the caller ends it with `end`. `name`, `forward_site`: those of the forward call."""
    return _pushed(Call(name, direction, site_of(sys._getframe(1)), name, forward_site, x, params))


def _pushed(call: Call) -> Call:
    call.outer = tracing.call
    tracing.call = call
    for observer in reported_to(observers):
        observer.began(call)
    return call


def reported_to(owners: Sequence[T]) -> Sequence[T]:
    """Return the objects that are notified of this thread's calls: none in an abstract trace, which doesn't communicate."""
    return () if tracing.is_abstract else tuple(owners)


def end(call: Call) -> None:
    """End a call, and calls inside it that an exception has left open."""
    tracing.call = call.outer
    call.ended = perf_counter()
    for observer in reported_to(observers):
        observer.ended(call)
    call._x = call._params = None  # the record may outlive the arrays


def _folder(path: str) -> str:
    return os.path.join(os.path.realpath(path), "")


_OURS = _folder(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
# Frames of compiled programs aren't functions called by the user.
_PROGRAMS = _folder(os.path.join(_OURS, "programs"))
_STANDARD = tuple({_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("autograd", "scipy", "numpy", "mpi4py", "llvmlite"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_sites: dict[tuple[CodeType, int, CodeType | None], Site] = {}


@cache
def _kind(code: CodeType) -> int:
    """Return 0 for the user's code, 1 for this library, 2 for other libraries, 3 for `jit` and compiled programs."""
    return _kind_of_file(code.co_filename)


def _kind_of_file(name: str) -> int:
    if name.startswith("<frozen"):
        return 2
    path = os.path.realpath(name) if os.path.exists(name) else name
    if path.startswith(_OURS):
        return 3 if path.startswith(_PROGRAMS) else 1
    # Other installed packages may be the user's own.
    installed = any(mark in path for mark in _INSTALLED)
    return 2 if (any(mark in path for mark in _PACKAGES) if installed else path.startswith(_STANDARD)) else 0


def user_frame(frame: FrameType | None) -> tuple[FrameType | None, CodeType | None]:
    """Return the innermost frame of user code, and the code of this library that was called from it, or None."""
    called = None
    while frame is not None:
        kind = _kind(frame.f_code)
        # Python generates the code of named tuples and dataclasses, which has no file.
        generated = frame.f_code.co_filename == "<string>" and frame.f_globals.get("__name__", "")
        if kind == 0 and not (generated and generated.startswith(("mpiad", "namedtuple_"))):
            return frame, called
        if kind == 1:
            called = frame.f_code
        frame = frame.f_back
    return None, called


def site_of(frame: FrameType | None) -> Site:
    """Return the innermost line of user code in a stack of frames; `tracing.site` if it is set."""
    if tracing.site is not None:
        return tracing.site
    found, called = user_frame(frame)
    if found is None:
        return _NOWHERE
    key = found.f_code, found.f_lasti, called
    site = _sites.get(key)
    if site is None:
        code = found.f_code
        known = code.co_consts[-1] if code.co_consts else None  # a Site if the frame is generated: see programs.replay
        if not isinstance(known, Site):
            known = Site(code.co_filename, found.f_lineno or 0, code.co_name, entry(called), _drops_result(found, frame))
        site = _sites[key] = known
    return site


# The functions whose result is an array: those in these folders whose names don't end with "_", as constructors, operators
# (`__call__`) and functions that write into their argument (`allreduce_`) do.
_RETURNING = tuple(
    os.path.join(_OURS, name) for name in ("primitives/", "domain/", "redistribution/", "parallel/synchronize")
)


def _drops_result(caller: FrameType, frame: FrameType | None) -> bool:
    """Return whether a frame of user code drops the array that the function returns which it has called directly."""
    while frame is not None and frame.f_back is not caller:
        frame = frame.f_back
    if frame is None or not os.path.realpath(frame.f_code.co_filename).startswith(_RETURNING):
        return False
    code, position = caller.f_code.co_code, caller.f_lasti + 2
    while code[position] == 0:  # since Python 3.11, the cache of the call
        position += 2
    return code[position] == opmap["POP_TOP"] and not frame.f_code.co_name.endswith(("_", "minimize"))


def site_of_trace(trace: TracebackType | None) -> Site:
    """Return the innermost line of user code in a traceback; its `entry` is the library's function that has called it."""
    found, called, before = _NOWHERE, "", 0
    while trace is not None:
        code = trace.tb_frame.f_code
        kind = _kind(code)
        if kind == 0:
            found = Site(code.co_filename, trace.tb_lineno, code.co_name, called)
        elif kind != 2 and before in (0, 2) and found is not _NOWHERE:
            called = entry(code) if kind == 1 else "jit"
        trace, before = trace.tb_next, kind
    return found


def place_in_dump(stack: str) -> str:
    """Return the innermost line of user code in a thread's stack that `faulthandler` has written; "" if there is none."""
    for file, line, function in re.findall(
        r'^  File "(.*)", line (\d+) in (.*)$', stack.partition("\n\n")[0], re.MULTILINE
    ):
        if _kind_of_file(file) == 0:
            return Site(file, int(line), function, "").text
    return ""


def is_raised_by_handler(error: BaseException) -> bool:
    """Return whether an exception was raised by a signal handler."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        # Python passes the interrupted frame to a signal handler.
        given = frame.f_locals.values() if _kind(frame.f_code) != 1 else ()
        parts = [part for x in given for part in (x if type(x) is tuple else (x,))]
        if frame.f_back is not None and any(part is frame.f_back for part in parts):
            return True
        trace = trace.tb_next
    return False


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether an exception was raised by a signal handler, or by a `raise` statement in user code."""
    if is_raised_by_handler(error):
        return True
    # User code may raise one of these because a traced array has an unexpected type.
    if error.__traceback__ is None or isinstance(error, (TypeError, AttributeError, AssertionError, NotImplementedError)):
        return False
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return _kind(code) == 0 and code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]


def is_caught(frame: FrameType | None, outermost: FrameType | None) -> bool:
    """Return whether user code, between a frame and its caller `outermost`, catches exceptions by an `except`."""
    while frame is not None and frame is not outermost:
        if _kind(frame.f_code) == 0 and _is_in_try(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


# The first of these instructions distinguishes an `except` from `with` and `finally`, which raise the exception again.
_DECIDING = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH", "POP_EXCEPT", "RERAISE"}


@lru_cache(maxsize=1000)
def _is_in_try(code: CodeType, at: int) -> bool:
    """Return whether an instruction is in the body of a `try` with an `except`."""
    handlers: list[int] = []
    if sys.version_info >= (3, 11):
        table = dis.Bytecode(code).exception_entries
        while found := [entry.target for entry in table if entry.start <= at < entry.end and entry.target not in handlers]:
            at = found[0]
            handlers.append(at)
    else:
        begun = [x for x in dis.get_instructions(code) if x.opname in ("SETUP_FINALLY", "SETUP_WITH") and x.offset <= at]
        handlers += [x.argval for x in begun if at < x.argval]
    for handler in handlers:
        names = [x.opname for x in dis.get_instructions(code) if x.offset >= handler]
        if sys.version_info >= (3, 11) and names.pop(0) != "PUSH_EXC_INFO":
            continue  # it cleans up after another handler
        if names[0] == "POP_TOP" or next((x for x in names if x in _DECIDING), "") != "RERAISE":
            return True
    return False


def entry(code: CodeType | None) -> str:
    """Return the name of the library's function that the user called, from its code; "" for None."""
    if code is None:
        return ""
    # A function that the library has returned, such as a gradient, is named after its file.
    name, file = code.co_name, os.path.basename(code.co_filename)[:-3]
    if name in _NAMES:
        return _NAMES[name]
    if name in ("evaluate", "<lambda>", "vjp", "products", "__call__"):
        return "value_and_grad" if file == "gradient" else file
    return name


_END = "the end of the program"
_ENDS = ("mpi_finalize", "finalize", "_complete_at_exit", "_end_world", "_close")
_NAMES = {"_freed": "comm.Free", "kernels_of": "the compilation of a kernel"} | dict.fromkeys(_ENDS, _END)
_NOWHERE = Site("", 0, "<module>", "")
_NOWHERE.text = "outside the user's program"
