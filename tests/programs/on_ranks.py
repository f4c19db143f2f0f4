"""Run a random program on this rank, with the library's calls."""

from functools import lru_cache

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from mpi4py import MPI
from neighbors import sum_of_neighbors
from programs import arithmetic
from programs.agenda import Agenda
from programs.steps import (
    LENGTH,
    Barrier,
    Combine,
    Decide,
    Exchange,
    Gather,
    Inner,
    Integers,
    Local,
    Loop,
    Message,
    Operator,
    Pair,
    Ragged,
    Scatter,
    Solve,
    Start,
    Transpose,
    groupings,
    number_of_tag,
    offset,
    part_of_tag,
)

import mpiad
from mpiad.domain import Domain
from mpiad.extend import custom_operator, defadjoint
from mpiad.linalg import newton, solve
from mpiad.timestepping import scan

WORLD = MPI.COMM_WORLD
PARTS_OF_A_WAIT = 2  # a request, and what to do with its value


@lru_cache
def communicators():
    """Return for each grouping this rank's communicator and its group; made once, by all ranks together."""
    found = []
    for number, groups in enumerate(groupings(WORLD.size)):
        color = next(k for k, group in enumerate(groups) if WORLD.rank in group)
        comm = WORLD.Split(color, groups[color].index(WORLD.rank)) if number else None
        mpiad.mpi_init(comm)
        found.append((comm, groups[color]))
    return found


def run(program, x):
    """Return this rank's loss."""
    state = State(program, x)
    for place, step in enumerate(program.steps):
        state.place = place
        STEPS[type(step)](state, step)
        state.finish(place)
    state.finish(float("inf"))
    if program.losses[WORLD.rank] == "all":
        return arithmetic.loss(state.num, state.registers, WORLD.rank)
    return {"constant": 0.75, "none": None}[program.losses[WORLD.rank]]


class State:
    """This rank's registers, and what it has put off."""

    def __init__(self, program, x):
        self.program, self.num, self.place = program, arithmetic.on_arrays(program.single), 0
        self.registers = arithmetic.begin(self.num, x, program.complex_registers)
        self.agenda = Agenda()

    def put(self, out, y):
        """Write a register; its dtype must come out right by itself."""
        real = np.float32 if self.program.single else np.float64
        kept = arithmetic.store(self.num, y, self.program.complex_registers[out])
        expected = np.result_type(real, np.complex64) if self.program.complex_registers[out] else np.dtype(real)
        assert kept.shape == (LENGTH,) and kept.dtype == expected, (kept.shape, kept.dtype, expected)
        self.registers[out] = kept

    def part(self, step):
        return arithmetic.take(self.num, self.registers[step.a], step.part)

    def message(self, step):
        """Return what a step sends, how to add what it receives to its register, and the tag."""
        part = part_of_tag(step.tag)

        def receive(y, factor=1.0):
            self.put(step.out, self.registers[step.out] + arithmetic.fill(self.num, y, part) * factor)

        x = arithmetic.take(self.num, self.registers[step.a], part)
        return x * 2, receive, number_of_tag(step, self.program)

    def finish(self, place):
        """Do what is due; waits that follow each other go into one `mpi_waitall` where the program says so."""
        while ready := self.agenda.due(place):
            waits = [item for item in ready if len(item) == PARTS_OF_A_WAIT]
            values = mpiad.mpi_waitall(request for request, _ in waits) if self.program.waitall else []
            done = dict(zip(map(id, waits), values))
            for item in ready:
                if len(item) != PARTS_OF_A_WAIT:
                    item[0]()
                else:
                    item[1](done[id(item)] if self.program.waitall else mpiad.mpi_wait(item[0]))


def local(state, step):
    form = arithmetic.FORMS[step.forms[WORLD.rank]]
    state.put(step.out, form(state.num, state.registers[step.a], state.registers[step.b]))


def combine(state, step):
    comm, group = communicators()[step.group]
    root, rank = step.root % len(group), group.index(WORLD.rank)
    x, op = state.part(step), getattr(MPI, step.op)
    if step.call in ("allreduce", "reduce") and step.op != "SUM":
        x = twisted(state.num, x, step, comm, root, rank)
    calls = {
        "allreduce": lambda: mpiad.mpi_allreduce(x, op=op, comm=comm),
        "reduce": lambda: mpiad.mpi_reduce(x, op=op, root=root, comm=comm),
        "sum": lambda: mpiad.mpi_sum(x, root=root, comm=comm),
        "scan": lambda: mpiad.mpi_scan(x, comm=comm),
        "exscan": lambda: mpiad.mpi_exscan(x, comm=comm),
        "bcast": lambda: mpiad.mpi_bcast(None if step.twist and rank != root else x, root=root, comm=comm),
    }
    state.put(step.out, arithmetic.fill(state.num, calls[step.call](), step.part) + state.registers[step.b])


def twisted(num, x, step, comm, root, rank):
    if step.op == "PROD":
        return x - num.stop(x) if step.twist and rank == root else x
    x = num.real(x)
    if not step.twist:
        return x + num.constant(offset(rank))
    return mpiad.mpi_bcast(x, root=root, comm=comm) - num.constant(rank % 3 == 2)


def gather(state, step):
    comm, group = communicators()[step.group]
    piece = piece_of(state.num, state.registers[step.a], step.axis, step.lengths, WORLD.rank)
    if step.call == "gather":
        y = mpiad.mpi_gather(piece, root=step.root % len(group), axis=step.axis, comm=comm)
    else:
        y = mpiad.mpi_allgather(piece, axis=step.axis, comm=comm)
    state.put(step.out, arithmetic.mix(state.num, y) + state.registers[step.b])


def piece_of(num, a, axis, lengths, rank):
    """Return what a rank gives to a gather: alike on all ranks where they are stacked."""
    if axis is None:
        return a[: lengths[0]]
    part = a[: lengths[rank]]
    return part if axis == 0 else num.stack([part, part * part])


def scatter(state, step):
    comm, group = communicators()[step.group]
    counts = None if step.lengths is None else [step.lengths[rank] for rank in group]
    whole = {None: (len(group), 2), 0: (sum(counts or [5]),)}.get(step.axis, (2, sum(counts or [5])))
    counts = None if step.axis is None else counts
    if step.call == "scatter":
        root = step.root % len(group)
        x = arithmetic.spread(state.num, state.registers[step.a], whole) if WORLD.rank == group[root] else None
        y = mpiad.mpi_scatter(x, root=root, axis=step.axis, counts=counts, comm=comm)
    else:
        x = arithmetic.spread(state.num, state.registers[step.a], whole)
        y = mpiad.mpi_reduce_scatter(x, axis=step.axis, counts=counts, comm=comm)
    state.put(step.out, arithmetic.mix(state.num, y) + state.registers[step.b])


def transpose(state, step):
    comm, group = communicators()[step.group]
    x, own, size = state.part(step), group.index(WORLD.rank), len(group)
    blocks = [x * (1 + k / 2 + copy / 4) for k in range(size) for copy in range(arithmetic.copies(step.blocks, own, k))]
    counts, received = [
        [arithmetic.copies(step.blocks, *pair) for pair in pairs]
        for pairs in ([(own, k) for k in range(size)], [(k, own) for k in range(size)])
    ]
    lengths = {"equal": {}, "learned": {"counts": counts}, "given": {"counts": counts, "received": received}}[step.blocks]
    y = state.num.sin(mpiad.mpi_alltoall(state.num.stack(blocks), comm=comm, **lengths))
    state.put(step.out, arithmetic.mix(state.num, y) * state.registers[step.b])


def exchange(state, step):
    comm, group = communicators()[step.group]
    before, after = [(group.index(WORLD.rank) + shift) % len(group) for shift in (-step.shift, step.shift)]
    is_silent, (x, receive, tag) = step.silent[WORLD.rank], state.message(step)
    sources = [rank for rank in ((before, after) if step.both else (before,)) if not step.silent[group[rank]]]
    if step.both:
        receive(sum_of_neighbors(x, [] if is_silent else [after, before], sources, tag, comm))
    else:
        dest, source = MPI.PROC_NULL if is_silent else after, next(iter(sources), None)
        receive(mpiad.mpi_exchange(x, dest, source, tag=tag, comm=comm))


def pair(state, step):
    comm, group = communicators()[step.group]
    x, receive, tag = state.message(step)
    receive(mpiad.mpi_sendrecv(x, step.dest % len(group), step.source % len(group), tag=tag, comm=comm))


def message(state, step):
    comm, group = communicators()[step.group]
    source, dest = step.source % len(group), step.dest % len(group)
    if WORLD.rank == group[source]:
        send(state, step, comm, MPI.PROC_NULL if step.partner == "none" else dest)
    if WORLD.rank == group[dest]:
        place = state.place
        state.agenda.add(place + step.late, (lambda: recv(state, step, comm, source, place),))


def tag_of(state, step, place, tag):
    # From any rank: under a tag that no other message has, since another sender's may come first.
    return 100 + place if step.partner == "any" else tag


def send(state, step, comm, dest):
    x, receive, tag = state.message(step)
    tag = tag_of(state, step, state.place, tag)

    def use(sent):
        if step.used:
            receive(sent, 0.5)

    if step.send == "send":
        use(mpiad.mpi_send(x, dest, tag=tag, comm=comm))
    else:
        state.agenda.add(state.place + step.waits[0], (mpiad.mpi_isend(x, dest, tag=tag, comm=comm), use))


def recv(state, step, comm, source, place):
    like, receive, tag = state.message(step)
    tag = tag_of(state, step, place, tag)
    source = {"rank": source, "none": None, "any": MPI.ANY_SOURCE}[step.partner]

    def use(came):
        if not step.dropped:
            receive(came)

    if step.recv == "recv" or step.partner == "any":  # mpi_irecv wants its sender named
        use(mpiad.mpi_recv(like, source, tag=tag, comm=comm))
    else:
        request = mpiad.mpi_irecv(mpiad.stop_gradient(like), source, tag=tag, comm=comm)
        state.agenda.add(place + step.late + step.waits[1], (request, use))


def start(state, step):
    comm, _ = communicators()[step.group]

    def use(y):
        state.put(step.out, arithmetic.fill(state.num, y, step.part) + state.registers[step.out])

    request = mpiad.mpi_iallreduce(state.part(step), comm=comm)
    state.agenda.add(state.place + step.waits[WORLD.rank], (request, use))


def integers(state, step):
    comm, group = communicators()[step.group]
    n, rank, root = step.values[WORLD.rank], group.index(WORLD.rank), step.root % len(group)
    calls = {
        "SUM": lambda: mpiad.mpi_allreduce(n, comm=comm),
        "MAX": lambda: mpiad.mpi_allreduce(n, op=MPI.MAX, comm=comm),
        "BXOR": lambda: mpiad.mpi_reduce(n, op=MPI.BXOR, root=root, comm=comm),
        "bcast": lambda: mpiad.mpi_bcast(n if rank == root else None, root=root, comm=comm),
        "exscan": lambda: mpiad.mpi_exscan(np.array([n]), comm=comm)[0],
        "ring": lambda: mpiad.mpi_exchange(n, (rank + 1) % len(group), (rank - 1) % len(group), tag=50, comm=comm),
        "gather": lambda: mpiad.mpi_gather(np.array([n]), root=root, axis=0, comm=comm).sum(),
        "iallreduce": lambda: mpiad.mpi_wait(mpiad.mpi_iallreduce(n, comm=comm)),
    }
    y = state.registers[step.a]
    for _ in range(int(calls[step.call]()) % 3):
        y = state.num.sin(y) * 1.5
    state.put(step.out, y)


def barrier(state, step):
    mpiad.mpi_barrier(comm=communicators()[step.group][0])


def inner(state, step):
    comm, group = communicators()[step.group]
    rank, root, b = group.index(WORLD.rank), step.root % len(group), state.registers[step.b]

    def energy(w):
        came = mpiad.mpi_exchange(w * b, (rank + 1) % len(group), (rank - 1) % len(group), tag=60, comm=comm)
        return anp.real(anp.sum(anp.sin(w) * came))

    keywords = {"objective": step.objective, "root": root, "comm": comm}
    value, g = mpiad.value_and_grad(energy, **keywords)(state.registers[step.a])
    state.put(step.out, g + value.astype(state.num.constant(0).dtype) / 2)


def loop(state, step):
    comm, group = communicators()[step.group]
    kind, num = state.program.complex_registers[step.a], state.num

    def advance(u, k, w):
        if step.decides[WORLD.rank]:
            decide(u)
        return arithmetic.store(num, u * w + mpiad.mpi_allreduce(u, comm=comm) / len(group), kind)

    u, w = state.registers[step.a], state.registers[step.b]
    made = scan(advance, u, step.count, w, checkpoints=step.checkpoints)
    if step.used[WORLD.rank]:
        state.put(step.out, made)


def solve_system(state, step):
    comm, _ = communicators()[step.group]
    num, b = state.num, state.num.real(state.registers[step.a])
    diagonal = 1.5 + num.tanh(num.real(state.registers[step.b]))

    def product(u, c):
        return c * u + 0.25 * mpiad.mpi_allreduce(u, comm=comm)

    rtol = 1e-5 if state.program.single else 1e-13
    if step.call == "solve":
        u = solve(product, b, diagonal, rtol=rtol, comm=comm)
    else:
        u = newton(lambda u, c, b: product(u, c) + u**3 - b, 0 * mpiad.stop_gradient(b), diagonal, b, rtol=rtol, comm=comm)
    if step.used[WORLD.rank]:
        state.put(step.out, u)


@lru_cache
def domain():
    return Domain(LENGTH * WORLD.size, periodic=True)


total = custom_operator(lambda x: WORLD.allreduce(x))
defadjoint(total, total)


def operator(state, step):
    x = state.registers[step.a]
    if step.call == "halo":
        padded = domain().exchange(x)
        y = padded[2:] * 2 - padded[:-2]
    else:
        y = total(x)
    if step.used[WORLD.rank]:
        state.put(step.out, y)


def ragged(state, step):
    comm, _ = communicators()[step.group]
    a = state.registers[step.a]
    length = 1 + int(bool(anp.real(a)[0] > 0) if step.decides[WORLD.rank] else 1)
    y = mpiad.mpi_allgather(a[:length], axis=0, comm=comm)
    state.put(step.out, arithmetic.mix(state.num, y) + state.registers[step.b])


def decide(x):
    """Leave the trace: which way to go, only a value tells."""
    if anp.sum(anp.real(x)) > 1e6:
        raise OverflowError
    return x


@primitive
def decided_backwards(x):
    return 1 * x


defvjp(decided_backwards, lambda ans, x: decide)
defjvp(decided_backwards, lambda g, ans, x: decide(g))


def decision(state, step):
    kind = step.kinds[WORLD.rank]
    if kind == "forwards":
        decide(state.registers[step.a])
    if kind == "backwards":
        state.registers[step.a] = decided_backwards(state.registers[step.a])


STEPS = {
    Local: local, Combine: combine, Gather: gather, Scatter: scatter, Transpose: transpose, Exchange: exchange, Pair: pair,
    Message: message, Start: start, Integers: integers, Barrier: barrier, Inner: inner,
    Loop: loop, Solve: solve_system, Operator: operator, Ragged: ragged, Decide: decision,
}  # fmt: skip
