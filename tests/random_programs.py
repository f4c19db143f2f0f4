"""Random programs of all ranks, each in two forms: with the library's calls, and as one function of all ranks' inputs.

A program is a list of steps on three registers, each a vector of three numbers on every rank. A step has a form for
one rank (`local(registers, rank)`) and one for all (`whole(registers)`, where a register is the list of all ranks'
vectors), written apart from each other. All ranks draw the same program from the seed. `pending` keeps what a rank has
started and not yet waited for; ranks wait at different places and in different orders.
"""

import autograd
import autograd.numpy as anp
import numpy as np
from mpi4py import MPI

import mpiad

REGISTERS, LENGTH = 3, 3


def draw(seed, size, count=12):
    """Return the steps of a random program for `size` ranks."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        make = MAKERS[rng.integers(len(MAKERS))]
        place = len(steps)
        for step in make(rng, size):  # what belongs to one communication comes in this order, others between
            place = int(rng.integers(place, len(steps) + 1))
            steps.insert(place, step)
            place += 1
    return steps


def run_local(steps, x, rank):
    """Run a program on this rank; return its registers."""
    registers, pending = [x[:LENGTH], x[LENGTH:] / 2, anp.cos(x[:LENGTH])], {}
    for local, _ in steps:
        local(registers, rank, pending)
    assert not pending
    return registers


def run_whole(steps, xs):
    """Run a program on all ranks in this process; return all ranks' registers."""
    registers = [[x[:LENGTH] for x in xs], [x[LENGTH:] / 2 for x in xs], [anp.cos(x[:LENGTH]) for x in xs]]
    for _, whole in steps:
        whole(registers)
    return [[register[r] for register in registers] for r in range(len(xs))]


def step(rng, compute_local, compute_whole):
    """Make a step that reads two registers and writes one, kept between -1 and 1."""
    a, b, out = (int(k) for k in rng.integers(REGISTERS, size=3))

    def local(registers, rank, pending):
        registers[out] = anp.tanh(compute_local(registers[a], registers[b], rank))

    def whole(registers):
        registers[out] = [anp.tanh(y) for y in compute_whole(registers[a], registers[b])]

    return local, whole


def padded(piece):
    return anp.concatenate([piece, np.full(LENGTH - len(piece), 0.5)])


def lengths(rng, size):
    """How many entries each rank gives or takes: uneven, some none."""
    found = [int(k) for k in rng.integers(LENGTH + 1, size=size)]
    found[int(rng.integers(size))] = LENGTH
    return found


# ---- local steps


def between(rng, size):
    """Another number of operations on every rank."""
    counts, factors = rng.integers(4, size=size), rng.standard_normal((size, LENGTH))

    def one(a, b, r):
        for _ in range(counts[r]):
            a = anp.sin(a) * factors[r] + b[::-1]
        return a * b

    yield step(rng, one, lambda a, b: [one(a[r], b[r], r) for r in range(size)])


def branch(rng, size):
    """Another operation on every rank."""
    choice = rng.integers(3, size=size)
    forms = [lambda a, b: a * b, lambda a, b: anp.exp(a) - 1, lambda a, b: np.array([0.3, -0.2, 0.1])]
    yield step(
        rng,
        lambda a, b, r: forms[choice[r]](a, b),
        lambda a, b: [forms[choice[r]](a[r], b[r]) for r in range(size)],
    )


# ---- collectives


def reduction(rng, size):
    name = ["SUM", "PROD", "MAX", "MIN"][rng.integers(4)]

    def product(rows):  # autograd's own derivative of a product divides by its factors
        out = 1.0
        for row in rows:
            out = out * row
        return out

    def whole(a, b):
        rows = [x + y / 2 for x, y in zip(a, b)]
        extreme = {"MAX": anp.max, "MIN": anp.min}.get(name)
        if extreme is not None:
            return [extreme(anp.stack(rows), axis=0)] * size
        return [sum(rows) if name == "SUM" else product(rows)] * size

    yield step(rng, lambda a, b, r: mpiad.mpi_allreduce(a + b / 2, op=getattr(MPI, name)), whole)


def broadcast(rng, size):
    root = int(rng.integers(size))
    yield step(
        rng,
        lambda a, b, r: mpiad.mpi_bcast(a if r == root else None, root=root) + b,
        lambda a, b: [a[root] + y for y in b],
    )


def sum_to_root(rng, size):
    root = int(rng.integers(size))
    yield step(
        rng,
        lambda a, b, r: mpiad.mpi_sum(a * (r + 1.0), root=root) + b * a,
        lambda a, b: [
            (sum(x * (s + 1.0) for s, x in enumerate(a)) if r == root else 0.0) + b[r] * a[r] for r in range(size)
        ],
    )


def prefix(rng, size):
    exclusive = bool(rng.integers(2))
    call = mpiad.mpi_exscan if exclusive else mpiad.mpi_scan
    yield step(
        rng,
        lambda a, b, r: call(a) * b,
        lambda a, b: [sum(a[: r + (not exclusive)], np.zeros(LENGTH)) * b[r] for r in range(size)],
    )


def gather_everywhere(rng, size):
    counts = lengths(rng, size)
    mix = rng.standard_normal((LENGTH, sum(counts)))
    yield step(
        rng,
        lambda a, b, r: anp.dot(mix, mpiad.mpi_allgather(a[: counts[r]], axis=0)) * b,
        lambda a, b: [anp.dot(mix, anp.concatenate([x[:n] for x, n in zip(a, counts)])) * y for y in b],
    )


def through_the_root(rng, size):
    """Gather on the root, change there, scatter in other pieces."""
    counts, root = lengths(rng, size), int(rng.integers(size))
    others = counts[1:] + counts[:1]

    def local(a, b, r):
        every = mpiad.mpi_gather(a[: counts[r]], root=root, axis=0)
        changed = anp.sin(every) * b[0] if r == root else None
        return padded(mpiad.mpi_scatter(changed, root=root, axis=0, counts=others))

    def whole(a, b):
        every = anp.sin(anp.concatenate([x[:n] for x, n in zip(a, counts)])) * b[root][0]
        starts = np.concatenate([[0], np.cumsum(others)])
        return [padded(every[starts[r] : starts[r + 1]]) for r in range(size)]

    yield step(rng, local, whole)


def summed_pieces(rng, size):
    counts = lengths(rng, size)
    spread = rng.standard_normal((size, sum(counts), LENGTH))

    def whole(a, b):
        total = sum(anp.dot(spread[r], a[r] * b[r]) for r in range(size))
        starts = np.concatenate([[0], np.cumsum(counts)])
        return [padded(total[starts[r] : starts[r + 1]]) for r in range(size)]

    yield step(
        rng,
        lambda a, b, r: padded(mpiad.mpi_reduce_scatter(anp.dot(spread[r], a * b), axis=0, counts=counts)),
        whole,
    )


def transposition(rng, size):
    weights = rng.standard_normal((size, size, 1))

    def whole(a, b):
        return [sum(anp.sin(weights[s, r] * a[s]) * (s + 1.0) for s in range(size)) * b[r] for r in range(size)]

    def local(a, b, r):
        came = mpiad.mpi_alltoall(weights[r] * a[None, :])
        return anp.sum(anp.sin(came) * np.arange(1.0, size + 1)[:, None], axis=0) * b

    yield step(rng, local, whole)


# ---- messages


def permutation(rng, size):
    """Each rank sends to one other; some pairs are left out."""
    dest = [int(k) for k in rng.permutation(size)]
    kept = rng.random(size) < 0.75
    source = [dest.index(r) for r in range(size)]

    def local(a, b, r):
        there = dest[r] if kept[r] else None
        return mpiad.mpi_exchange(a * 2, there, source[r] if kept[source[r]] else None) + b * a

    def whole(a, b):
        return [(a[source[r]] * 2 if kept[source[r]] else 0.0) + b[r] * a[r] for r in range(size)]

    yield step(rng, local, whole)


def message(rng, size):
    """One rank sends to another; the sender may use the result of the send or not, the rest do something else."""
    first, second = int(rng.integers(size)), int(rng.integers(size))
    tag, used = int(rng.integers(2)), bool(rng.integers(2))

    def local(a, b, r):
        if r == first:
            sent = mpiad.mpi_send(a**2, second, tag=tag)
            b = b + sent if used else b
        if r == second:
            b = b + mpiad.mpi_recv(np.zeros(LENGTH), first, tag=tag)
        return b

    def whole(a, b):
        b = list(b)
        if used:
            b[first] = b[first] + a[first] ** 2
        b[second] = b[second] + a[first] ** 2
        return b

    yield step(rng, local, whole)


def nonblocking(rng, size):
    """Two messages with the same tag and a reduction: started together, waited for apart, used later."""
    key, shift = object(), int(rng.integers(1, size + 1))
    orders = [rng.permutation(5) for _ in range(size)]
    early = rng.random(size) < 0.5
    a, out = int(rng.integers(REGISTERS)), int(rng.integers(REGISTERS))

    def start(registers, rank, pending):
        x, right, left = registers[a], (rank + shift) % size, (rank - shift) % size
        pending[key] = [
            mpiad.mpi_isend(x**2, right), mpiad.mpi_irecv(x, left), mpiad.mpi_iallreduce(anp.sin(x)),
            mpiad.mpi_isend(x[:2] * 3, right), mpiad.mpi_irecv(x[:2], left),
        ]

    def complete(registers, rank, pending):
        requests = pending[key]
        values = {int(k): mpiad.mpi_wait(requests[k]) for k in orders[rank]}
        pending[key] = [values[k] for k in range(5)]

    def use(registers, rank, pending):
        if not early[rank]:
            complete(registers, rank, pending)
        sent, came, total, _, short = pending.pop(key)
        registers[out] = anp.tanh(came * total + sent / 3 + padded(short))

    kept = []

    def start_whole(registers):
        kept[:] = registers[a]

    def use_whole(registers):
        total = sum(anp.sin(x) for x in kept)
        registers[out] = [
            anp.tanh(kept[(r - shift) % size] ** 2 * total + kept[r] ** 2 / 3 + padded(kept[(r - shift) % size][:2] * 3))
            for r in range(size)
        ]

    yield start, start_whole
    yield lambda registers, rank, pending: early[rank] and complete(registers, rank, pending), lambda registers: None
    yield use, use_whole


# ---- derivatives inside the program


def inner_gradient(rng, size):
    def local(a, b, r):
        def energy(w):
            came = mpiad.mpi_exchange(w * b, (r + 1) % size, (r - 1) % size)
            return anp.sum(anp.sin(w) * came)

        return mpiad.grad(energy, objective="sum")(a)

    def whole(a, b):
        return autograd.grad(lambda ws: sum(anp.sum(anp.sin(ws[r]) * ws[r - 1] * b[r - 1]) for r in range(size)))(a)

    yield step(rng, local, whole)


MAKERS = [
    between, branch, reduction, broadcast, sum_to_root, prefix, gather_everywhere, through_the_root, summed_pieces,
    transposition, permutation, message, message, nonblocking, nonblocking, inner_gradient,
]
