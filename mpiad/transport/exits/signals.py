"""End the job after SIGTERM, or after a SIGINT that Python can't raise, and report the line that the rank was executing.

Python runs signal handlers only between instructions of the main thread, not while it waits inside MPI. But Python also
writes the signals' numbers to a wakeup file (`signal.set_wakeup_fd`). A second thread reads it, finds the line, and ends
the job. A process has only one such file, and asyncio uses it, too. So the second thread forwards the numbers to a file
that other code sets. The program's own handlers stay in effect. SIGINT remains a KeyboardInterrupt; the job ends only if
the main thread then stays at one instruction for a second, or for ten seconds outside this library.

Code that must end in good order (write a checkpoint, then return) runs inside `postponed` and checks `requested`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType

from mpi4py import MPI

from mpiad.transport.core.calls import site_of
from mpiad.transport.exits.abort import at, end_job, is_rank

_RAISED_WITHIN = 1.0
# In user code, a communication by bare mpi4py looks like a long computation.
_RAISED_WITHIN_FOREIGN = 10.0

_log = logging.getLogger("mpiad")
_set_wakeup_fd = signal.set_wakeup_fd
_mask = threading.local()
_write_end = -1
_others = -1  # the wakeup file that other code has set
_forwarding = threading.RLock()  # reentrant: a signal handler may set the file while it is being set
_requested: int | None = None
# Which of the two, the handler (True) or the second thread (False), has yet to come with the signal that is `_requested`.
_twin: bool | None = None
_patience: list[float] = []  # of the open `postponed` contexts, the innermost last


def requested() -> int | None:
    """Return the signal that requests this rank's end inside `postponed`, None if there is none; ranks may differ."""
    return _requested


def as_warnings(signals: Iterable[int], call: str) -> tuple[int, ...]:
    """Return the numbers of signals; raise a ValueError if one of them can't request an end."""
    for number in (numbers := tuple(signals)):
        if number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}:
            raise ValueError(
                f"{call}: signals may contain signal.SIGUSR2 or another catchable one, but not {number!r:.60}."
            )
    return numbers


@contextlib.contextmanager
def postponed(patience: float = 30.0, warnings: tuple[int, ...] = ()) -> Iterator[None]:
    """Postpone the job's end by `patience` seconds after SIGTERM, while the caller checks `requested` and returns.

    `warnings`: signals after which `requested` returns them, without a limit of time, unless they have other handlers.
    """
    _patience.append(patience)
    # In a job of one rank, or with MPIAD_ABORT=0, `install_signal_handlers` hasn't been called.
    in_main = threading.current_thread() is threading.main_thread()
    alone = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if alone:
        signal.signal(signal.SIGTERM, _on_sigterm)
    for number in {*warnings} - {signal.SIGTERM} if in_main else ():
        # They stay in effect, since ranks receive a warning at different times, some of them after this context.
        if _has_default_handler(number):
            signal.signal(number, _on_warning)
        elif signal.getsignal(number) is not _on_warning:
            _log.warning("%s doesn't request an end: the program or MPI has another handler.", signal.Signals(number).name)
    try:
        yield
    finally:
        _patience.pop()
        if alone:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _has_default_handler(number: int) -> bool:
    caught = "0"
    # Handlers of C code, such as faulthandler's, are unknown to Python.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt")), caught)
    return signal.getsignal(number) is signal.SIG_DFL and not int(caught, 16) >> (number - 1) & 1


def _on_warning(number: int, frame: FrameType | None) -> None:
    global _requested
    _requested = _requested or number


def install_signal_handlers() -> None:
    """Make SIGTERM end all ranks with code 143, and SIGINT during a wait with 130, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # required by Python
    global _write_end, _others
    _write_end, _others = write_end, _set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.set_wakeup_fd = _set_others
    arguments = read_end, threading.get_ident()
    threading.Thread(target=_read_signals, args=arguments, name="mpiad-signals", daemon=True).start()
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_forget_in_child)


def _set_others(fd: int, *, warn_on_full_buffer: bool = True) -> int:
    """Forward signals to the file `fd`, and return the previous file; other code calls this as `signal.set_wakeup_fd`."""
    global _others
    if _write_end == -1:  # in a fork, where a thread of the parent may hold the lock
        return _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
    with _forwarding:  # the caller may then close the previous file, so the second thread mustn't still write to it
        try:
            _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)  # refuses an invalid one
        finally:
            _set_wakeup_fd(_write_end, warn_on_full_buffer=False)
        before, _others = _others, fd
    return before


def _block_signals() -> None:
    # Until the child of a fork stops using the wakeup file, its signals would be read by the parent.
    _mask.held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.held)


def _forget_in_child() -> None:
    global _write_end
    _write_end, signal.set_wakeup_fd = -1, _set_wakeup_fd
    _set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_signals()


def _read_signals(read_end: int, main: int) -> None:
    while True:
        numbers = os.read(read_end, 64)
        with _forwarding, contextlib.suppress(OSError):  # it is full, or closed
            if _others != -1:
                os.write(_others, numbers)
        for number in numbers:
            if number == signal.SIGTERM and signal.getsignal(number) is _on_sigterm:
                frame = sys._current_frames().get(main)
                # If the main thread is already in the handler, the program's line is in the interrupted frame.
                frames = [] if frame is None else traceback.walk_stack(frame)
                handler = _on_sigterm.__code__
                _end_or_request(next((inner.f_back for inner, _ in frames if inner.f_code is handler), frame), False)
            elif number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
                threading.Thread(target=_end_if_blocked, args=(main,), daemon=True).start()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if is_rank():
        _end_or_request(frame, True)
    else:  # a fork, or after the end of MPI
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_or_request(frame: FrameType | None, by_handler: bool) -> None:
    global _requested, _twin
    if _twin is by_handler:  # maybe after the end of `postponed`
        _twin = None
    elif not _patience:
        _end("received SIGTERM", frame, signal.SIGTERM)
    elif _requested != signal.SIGTERM:
        _requested, _twin = int(signal.SIGTERM), not by_handler
        threading.Thread(target=_end_later, args=(_patience[-1], len(_patience)), daemon=True).start()


def _end_later(patience: float, depth: int) -> None:
    ends = time.monotonic() + patience
    while len(_patience) >= depth:
        if time.monotonic() > ends:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            _end(f"received SIGTERM {patience:g} s ago, and has not ended since", frame, signal.SIGTERM)
        time.sleep(min(0.1, patience))


def _end_if_blocked(main: int) -> None:
    start, before = time.monotonic(), _instruction(main)
    while (now := _instruction(main)) is not None and now == before:
        ours = now[0].f_globals.get("__name__", "").startswith("mpiad.")
        if time.monotonic() - start > (_RAISED_WITHIN if ours else _RAISED_WITHIN_FOREIGN):
            _end("was interrupted by SIGINT while it waited inside MPI", now[0], signal.SIGINT)
        time.sleep(0.1)


def _instruction(thread: int) -> tuple[FrameType, int] | None:
    frame = sys._current_frames().get(thread)
    return None if frame is None else (frame, frame.f_lasti)


def _end(why: str, frame: FrameType | None, number: int) -> None:
    if is_rank():  # nobody waits after the end of MPI
        end_job(f"mpiad: rank {MPI.COMM_WORLD.rank} {why}{at(site_of(frame))}. The job ends.\n", 128 + number)
