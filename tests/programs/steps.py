"""The vocabulary of random programs, as data: drawn by Hypothesis, printed, and run by two interpreters.

A program works on three registers of three numbers each, real or complex, on every rank. A step reads registers `a` and
`b` and writes `out`. What follows `group` happens within each group of one of the `groupings` of the ranks; roots and
partners count modulo the size of the group, so that every step is a right one on any number of ranks. A tuple with
one item for each rank is indexed by the rank in the world.
"""

import math
from typing import NamedTuple

LENGTH = 3


class Local(NamedTuple):
    """Each rank applies a function of its own, by its number in `arithmetic.FORMS`."""

    a: int
    b: int
    out: int
    forms: tuple[int, ...]


class Combine(NamedTuple):
    """`allreduce`, `reduce`, `sum`, `scan`, `exscan` or `bcast` of a part of the register.

    `twist` makes what is multiplied zero on the root, its derivative apart (PROD), or the largest exactly equal on some
    ranks (MAX, MIN).
    """

    call: str
    op: str
    a: int
    b: int
    out: int
    part: int
    root: int
    twist: bool
    group: int


class Gather(NamedTuple):
    """`gather` or `allgather`, stacked (axis None) or along an axis in lengths that differ."""

    call: str
    a: int
    b: int
    out: int
    axis: int | None
    lengths: tuple[int, ...]
    root: int
    group: int


class Scatter(NamedTuple):
    """`scatter` or `reduce_scatter`, in blocks (axis None), even shares (`lengths` None) or given lengths."""

    call: str
    a: int
    b: int
    out: int
    axis: int | None
    lengths: tuple[int, ...] | None
    root: int
    group: int


class Transpose(NamedTuple):
    """`alltoall` of equal blocks, or of blocks whose lengths the receivers learn or are given."""

    a: int
    b: int
    out: int
    part: int
    group: int
    blocks: str


class Exchange(NamedTuple):
    """Each rank sends to the one `shift` further on, and to the one before it if `both`; those in `silent` send to none."""

    a: int
    b: int
    out: int
    shift: int
    both: bool
    silent: tuple[bool, ...]
    tag: int
    group: int


class Pair(NamedTuple):
    """`sendrecv`: all ranks name the pair."""

    a: int
    out: int
    source: int
    dest: int
    tag: int
    group: int


class Message(NamedTuple):
    """A message of one rank to another, of the kinds given by `send` and `recv`.

    It is received `late` steps after it was sent. What is nonblocking is waited for at another place: `waits` steps
    later on the sender and on the receiver. The receiver may not use what came (`dropped`), the sender may use what
    the send returns (`used`). `partner` is "rank", "none" (no message at all) or "any" (source).
    """

    send: str
    recv: str
    a: int
    out: int
    source: int
    dest: int
    tag: int
    late: int
    waits: tuple[int, int]
    used: bool
    dropped: bool
    partner: str
    group: int


class Start(NamedTuple):
    """`iallreduce`; each rank waits for it after as many steps as `waits` says."""

    a: int
    out: int
    part: int
    waits: tuple[int, ...]
    group: int


class Integers(NamedTuple):
    """Untraced numbers, one for each rank, combined by `call`, which decide how often a loop runs."""

    call: str
    a: int
    out: int
    values: tuple[int, ...]
    root: int
    group: int


class Barrier(NamedTuple):
    """`barrier`."""

    group: int


class Inner(NamedTuple):
    """The gradient of an objective of the group, which communicates, taken inside the program."""

    a: int
    b: int
    out: int
    objective: str
    root: int
    group: int


class Loop(NamedTuple):
    """`timestepping.scan` of `count` steps that reduce, with `checkpoints` (None: on the tape).

    Ranks in `decides` leave the trace of the step; those that aren't in `used` drop the result.
    """

    a: int
    b: int
    out: int
    count: int
    checkpoints: int | None
    decides: tuple[bool, ...]
    used: tuple[bool, ...]
    group: int


class Solve(NamedTuple):
    """`linalg.solve` or `linalg.newton` of a system of the whole group; ranks that aren't in `used` drop the result."""

    call: str
    a: int
    b: int
    out: int
    used: tuple[bool, ...]
    group: int


class Operator(NamedTuple):
    """`Domain.exchange` ("halo") or an operator of `mpiad.extend` ("total"), of all ranks."""

    call: str
    a: int
    out: int
    used: tuple[bool, ...]


class Ragged(NamedTuple):
    """`allgather` of pieces whose length hangs on a value on those ranks that are in `decides`."""

    a: int
    b: int
    out: int
    decides: tuple[bool, ...]
    group: int


class Decide(NamedTuple):
    """Each rank goes on in its trace ("on"), or leaves it here ("forwards") or in its derivative ("backwards")."""

    a: int
    kinds: tuple[str, ...]


class Program(NamedTuple):
    """A program and how it is differentiated.

    `losses` says what each rank returns: a number that depends on all registers ("all"), one that doesn't depend on
    anything ("constant"), or nothing where that is allowed ("none"). `second` is "hvp" (forward over reverse), "reverse" or
    "forward" (each over itself). `compiled` says on which ranks it is jitted: "none", "all" or "some".
    """

    size: int
    seed: int
    single: bool
    complex_input: bool
    complex_registers: tuple[bool, bool, bool]
    objective: str
    root: int
    shared: bool
    losses: tuple[str, ...]
    second: str
    waitall: bool
    steps: tuple
    compiled: str = "none"


def groupings(size):
    """Return the ways of dividing the ranks into groups, each in the order of its communicator; the world first."""
    ranks = list(range(size))
    return [
        [ranks],
        [ranks[::-1]],
        [part for part in (ranks[::2], ranks[1::2]) if part],
        [part for part in (ranks[:1], ranks[:0:-1]) if part],
        [[rank] for rank in ranks],
    ]


def part_of_tag(tag):
    """Return which part of a register travels under a tag: messages that can be mistaken for each other are alike."""
    return (3, 2, 0, -1)[tag]


def number_of_tag(step, program):
    """Return the tag for MPI."""
    # An exchange waits for its receiver, who mustn't have to receive another message first.
    return step.tag + 4 * program.complex_registers[step.a] + 8 * isinstance(step, Exchange)


def offset(rank):
    """Return what keeps the ranks' numbers apart before the largest is taken."""
    return 0.3 * math.sin(1.0 + 5 * rank)


DRAWN_ALWAYS = Local, Combine, Gather, Scatter, Transpose, Exchange, Pair, Message, Start, Integers, Barrier, Inner
KINDS = (*DRAWN_ALWAYS, Loop, Solve, Operator, Ragged, Decide, Program)


def read(text):
    """Return the program of its printed form."""
    return eval(text, {kind.__name__: kind for kind in KINDS})


def written(program):
    """Return the printed form of a program, a line for each step."""
    head = repr(program._replace(steps=()))
    body = "".join(f"    {step!r},\n" for step in program.steps)
    return head.replace("steps=()", f"steps=(\n{body})")


def script(program):
    """Return a program that runs and checks a random program by itself."""
    names = ", ".join(sorted({"Program", *(type(step).__name__ for step in program.steps)}))
    return (
        f"# PYTHONPATH=tests python tests/launch.py --ranks {program.size} -- failing.py\n"
        f"from programs.batch import run\nfrom programs.steps import {names}\n\nrun([{written(program)}])\n"
    )
