"""MPI's calls as linked kernels (see `compiling.cache`): machine code that communicates, and runs the next kernel.

A program with small messages spends most of its time between Python and MPI. A linked call reads its arguments from a block
of memory, as kernels do, so that a sequence of kernels and messages is one call from Python, which releases the
interpreter's lock. After an error the next kernel doesn't run, and the block contains what MPI has returned.

MPI's functions are those that a C program would call: first those of the process, among which a profiler's may be, then
those of the library that mpi4py uses. Handles are integers with MPICH, and addresses with Open MPI.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from mpi4py import MPI

from mpiad._typing import Comm, Rank
from mpiad.compiling.cache import Kernel, Source, kernels_of
from mpiad.compiling.strided_updates import StridedUpdate
from mpiad.transport.core.channels import Channel

# The arguments of MPI's functions: p is an address, s that of the status of a receive, i an integer of C, and h a handle.
_PARAMETERS = {
    "Send": "pihiih", "Recv": "pihiihs", "Sendrecv": "pihiipihiihs", "Allreduce": "ppihhh", "Isend": "pihiihp",
    "Irecv": "pihiihp", "Wait": "ps", "Waitall": "ipp",
}  # fmt: skip
# The words of a block: the next kernel and its block; MPI's function; the address of a word at which the number in the
# following word is stored if there is an error; MPI's error code; for receives MPI_Get_count, MPI_BYTE, the expected number
# of bytes, and the address and value of the received number of bytes. The arguments follow, and the memory of a status.
_CODE, _EXPECTED, _RECEIVED, _FIRST, _STATUS = 5, 8, 10, 11, 8


class Tag(NamedTuple):
    """The tag of a message, `envelope.mpi_tag`; those of adjoints change in each call."""

    envelope: Any


Operand: TypeAlias = "int | Tag | MPI.Datatype | MPI.Op | Literal['x', 'out', 'comm', 'status']"


class LinkedCall(NamedTuple):
    """A call of an MPI function for arrays of fixed sizes."""

    name: str  # a key of `_PARAMETERS`
    arguments: Sequence[Operand]  # "x" and "out" are the addresses of the arrays
    channel: Channel
    is_reverse: bool  # whether the communicator is that for messages of adjoints
    nbytes: int  # the number of bytes to be received; 0 if MPI checks it
    fail: Callable[[int, int], object]  # raises the error, given MPI's error code and the received number of bytes
    # The counts of the channel in which a message without an envelope is counted: an attribute, and a key.
    counted: tuple[str, tuple[Rank, int]] | None = None

    @property
    def comm(self) -> Comm:
        """The communicator."""
        return self.channel.reverse if self.is_reverse else self.channel.data

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that makes the call; None if Python must make it."""
        return _kernels().get(self.name) if is_plain(self.comm) else None

    def words(self, address: int, errors: int, number: int) -> list[int]:
        """Return the words of a block at an address; at `errors`, the number is stored if there is an error."""
        functions = _functions()
        words = [0, 0, functions[self.name], errors, number, 0]
        words += [functions["Get_count"], MPI._handleof(MPI.BYTE), self.nbytes, address + 8 * _RECEIVED, 0]
        status = address + 8 * (_FIRST + len(self.arguments))
        known = {"status": status, "comm": handle_of(self.comm)}
        for x in self.arguments:
            if isinstance(x, str):
                words.append(known.get(x, 0))
            elif isinstance(x, Tag):
                words.append(x.envelope.mpi_tag)
            else:
                words.append(x if isinstance(x, int) else MPI._handleof(x))
        return words + [0] * _STATUS

    def places(self, kind: str) -> list[int]:
        """Return the indices of the words that contain "x", "out" or "comm"."""
        return [_FIRST + k for k, x in enumerate(self.arguments) if isinstance(x, str) and x == kind]

    def tags(self) -> list[tuple[int, Any]]:
        """Return the indices of the words of tags, and the envelopes."""
        return [(_FIRST + k, x.envelope) for k, x in enumerate(self.arguments) if isinstance(x, Tag)]

    def raise_error(self, words: Sequence[int]) -> None:
        """Raise the error of a block in which a call has failed."""
        self.fail(words[_CODE], words[_RECEIVED] & 0xFFFFFFFF)


LinkedStep: TypeAlias = LinkedCall | StridedUpdate


class LinkedRun:
    """A function of `InPlace.prepared` that linked kernels can replace."""

    linked: Sequence[LinkedStep] | None = None  # None if Python must run the function
    begun: int = 0  # the number of those before the iterator yields for the first time

    def __call__(self) -> Iterator[None]:
        """Run the function; the iterator yields while messages are in flight."""
        raise NotImplementedError


def is_plain(comm: Comm) -> bool:
    """Return whether a communicator is MPI's, and not one whose calls are watched."""
    return type(comm).__module__ == MPI.__name__


def handle_of(comm: Comm) -> int:
    """Return MPI's handle of a communicator, also of one whose calls are watched."""
    return MPI._handleof(comm if is_plain(comm) else comm.bare)


@cache
def _functions() -> Mapping[str, int]:
    """Return the addresses of MPI's functions by name; empty if they aren't found."""
    libraries = [ctypes.CDLL(None), ctypes.CDLL(MPI.__file__)]
    found: dict[str, int] = {}
    for name in (*_PARAMETERS, "Get_count"):
        functions = [getattr(library, f"MPI_{name}", None) for library in libraries]
        function = next((each for each in functions if each is not None), None)
        if function is None:
            return {}
        found[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return found


@cache
def _kernels() -> Mapping[str, Kernel]:
    """Return the kernels by the name of MPI's function; empty if machine code can't call MPI."""
    # Open MPI writes beyond the end of a buffer if a message is too long, so its messages are probed first.
    if MPI.get_vendor()[0] != "MPICH" or MPI._sizeof(MPI.Status) > 8 * _STATUS or not _functions():
        return {}
    sources = [Source(_text(name, kinds), name.lower(), "linked()") for name, kinds in _PARAMETERS.items()]
    return dict(zip(_PARAMETERS, kernels_of(sources)))


def _text(name: str, parameters: str) -> str:
    """Return the LLVM function of a call."""
    handle = f"i{8 * MPI._sizeof(MPI.Comm)}"
    types = {"p": "ptr", "s": "ptr", "i": "i32", "h": handle}

    def load(value: str, kind: str, word: int) -> str:
        return f"%{value}.p = getelementptr i64, ptr %block, i64 {word}\n  %{value} = load {kind}, ptr %{value}.p"

    loads = [load(f"a{k}", types[kind], _FIRST + k) for k, kind in enumerate(parameters)]
    passed = ", ".join(f"{types[kind]} %a{k}" for k, kind in enumerate(parameters))
    lines = [*loads, load("f", "ptr", 2), f"%code = call i32 %f({passed})", "%failed = icmp ne i32 %code, 0"]
    lines += [
        f"%to = getelementptr i64, ptr %block, i64 {_CODE}",
        "%wide = sext i32 %code to i64",
        "store i64 %wide, ptr %to",
    ]
    received = parameters.endswith("s")
    lines += [f"br i1 %failed, label %error, label %{'check' if received else 'next'}"]
    if received:
        lines += [f"check:\n  {load('g', 'ptr', 6)}", load("byte", handle, 7), load("expected", "i32", _EXPECTED)]
        lines += [load("count", "ptr", 9), f"call i32 %g(ptr %a{len(parameters) - 1}, {handle} %byte, ptr %count)"]
        lines += ["%got = load i32, ptr %count", "%same = icmp eq i32 %got, %expected"]
        lines += ["br i1 %same, label %next, label %error"]
    lines += [f"next:\n  {load('link', 'ptr', 0)}", load("following", "ptr", 1), "%last = icmp eq ptr %link, null"]
    lines += ["br i1 %last, label %end, label %jump", "jump:\n  musttail call void %link(ptr %following)", "ret void"]
    lines += [f"error:\n  {load('errors', 'ptr', 3)}", load("number", "i64", 4), "store i64 %number, ptr %errors"]
    lines += ["br label %end", "end:\n  ret void"]
    body = "\n  ".join(lines)
    return f"define void @{name.lower()}(ptr %block) nounwind {{\n  {body}\n}}\n"
