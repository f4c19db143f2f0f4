"""Let the ranks of programs that tests start sleep while they wait inside MPI, so that the cores are there for other tests.

MPI waits by polling and calls `sched_yield` between polls, which gives the core away for no more than a turn: a rank that
waits, for another or for its end, takes as much of the cores as one that computes. Here the C library's `sched_yield`
becomes a sleep of 50 us, and a wait takes a tenth of a core; of MPICH's waits only those for a probe don't yield. The ranks
that run tests themselves poll on: they exchange many short messages, which sleeps would delay, and wait for little else.
The instructions are those of Linux on x86-64; elsewhere, and where code can't be changed, nothing happens.
"""

import ctypes
import mmap
import os
import struct

NAP = 50_000  # ns
PR_SET_TIMERSLACK = 29
WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
# A struct timespec {0, NAP} on the stack; nanosleep of it; return 0.
SLEEP = (
    bytes.fromhex("48 83 ec 18  48 c7 04 24 00 00 00 00  48 c7 44 24 08")
    + struct.pack("<i", NAP)
    + bytes.fromhex("48 89 e7  31 f6  b8 23 00 00 00  0f 05  48 83 c4 18  31 c0  c3")
)
_kept = []  # where `sched_yield` jumps to


def take():
    """Replace `sched_yield` in this process, in which nothing may be calling it."""
    if (os.uname().sysname, os.uname().machine) != ("Linux", "x86_64") or _kept:
        return
    libc = ctypes.CDLL(None)
    entry = ctypes.cast(libc.sched_yield, ctypes.c_void_p).value
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=WRITABLE)
    except OSError:
        return
    page.write(SLEEP)
    # mov rax, page; jmp rax
    jump = b"\x48\xb8" + struct.pack("<Q", ctypes.addressof(ctypes.c_char.from_buffer(page))) + b"\xff\xe0"
    start = entry - entry % mmap.PAGESIZE
    pages = ctypes.c_void_p(start), ctypes.c_size_t(entry + len(jump) - start)
    if libc.mprotect(*pages, WRITABLE) != 0:
        return
    _kept.append(page)
    ctypes.memmove(entry, jump, len(jump))
    libc.mprotect(*pages, mmap.PROT_READ | mmap.PROT_EXEC)
    libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)  # else a sleep of 50 us takes 100
