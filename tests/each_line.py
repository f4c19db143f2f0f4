"""Programs that are interrupted before each of their lines."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator


def interrupted_before_each_line(folder: str) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield functions that run a program up to the first line in a folder that it comes to, up to the second, and so on.

    The first one and the last one run it to its end: its first run may have more lines than others.
    """
    yield Lines(folder, 0).run
    for line in itertools.count(1):
        lines = Lines(folder, line)
        yield lines.run
        if lines.met < line:
            break


class Lines:
    """Interrupts a program at the n-th of the lines in a folder that it comes to."""

    def __init__(self, folder: str, last: int):
        self.folder, self.last, self.met = folder, last, 0

    def run(self, program: Callable[[], object]) -> None:
        """Run a program up to that line."""
        sys.settrace(self._called)
        try:
            # An AttributeError where what never ends is waited for, as by an exception of a signal handler.
            with contextlib.suppress(KeyboardInterrupt, AttributeError):
                program()
        finally:
            sys.settrace(None)

    def _called(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        self.met += event == "line"
        if self.met == self.last:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._called
