"""Run a random program of all ranks in this process, on jets: the reference, which knows nothing of MPI.

A register is held for each rank. Within a group, what all its ranks give is a list, in the order of the group, and so is
what they get.
"""

from collections import defaultdict
from functools import reduce

import numpy as np
from programs import arithmetic, jets
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

NEARLY = 1e-4


class Undecided(Exception):
    """The largest of some numbers hangs on how they were rounded, so the program has no certain derivative."""


def run(program, xs, vs):
    """Return all ranks' losses as jets."""
    model = Model(program, jets.variables(xs, vs))
    for place, step in enumerate(program.steps):
        model.place = place
        if isinstance(step, Local):
            local(model, step)
        elif not isinstance(step, Decide):
            for group in groupings(program.size)[getattr(step, "group", 0)]:
                STEPS[type(step)](model, step, group)
        model.finish(place)
    model.finish(float("inf"))
    like = model.registers[0][0]
    return [
        arithmetic.loss(jets, model.registers[rank], rank) if kind == "all" else jets.lifted(0.75, like)
        for rank, kind in enumerate(program.losses)
    ]


class Model:
    """All ranks' registers, what each has put off, and the messages under way."""

    def __init__(self, program, inputs):
        self.program, self.place = program, 0
        self.registers = [arithmetic.begin(jets, x, program.complex_registers) for x in inputs]
        self.agendas = [Agenda() for _ in inputs]
        self.sent = defaultdict(list)

    def put(self, rank, out, y):
        self.registers[rank][out] = arithmetic.store(jets, y, self.program.complex_registers[out])

    def add(self, rank, out, y):
        self.put(rank, out, y + self.registers[rank][out])

    def parts(self, step, group):
        return [arithmetic.take(jets, self.registers[rank][step.a], step.part) for rank in group]

    def finish(self, place):
        for agenda in self.agendas:
            while ready := agenda.due(place):
                for act in ready:
                    act()

    def post(self, step, source, dest, number=None):
        """Send the part of a register that the tag says; return it."""
        x = arithmetic.take(jets, self.registers[source][step.a], part_of_tag(step.tag)) * 2
        self.sent[self.key(step, source, dest, number)].append(x)
        return x

    def receive(self, step, source, dest, number=None):
        """Return the oldest of a sender's messages under a tag: messages don't overtake each other."""
        return self.sent[self.key(step, source, dest, number)].pop(0)

    def key(self, step, source, dest, number):
        return step.group, source, dest, number_of_tag(step, self.program) if number is None else number


def local(model, step):
    before = [(registers[step.a], registers[step.b]) for registers in model.registers]
    for rank, (a, b) in enumerate(before):
        model.put(rank, step.out, jets.lifted(arithmetic.FORMS[step.forms[rank]](jets, a, b), a))


def combine(model, step, group):
    root = step.root % len(group)
    xs = model.parts(step, group)
    if step.call in ("allreduce", "reduce") and step.op != "SUM":
        everywhere = product(xs, step, root) if step.op == "PROD" else extreme(xs, step, root)
    else:
        everywhere = sum(xs[1:], xs[0])
    zeros = everywhere * 0
    results = {
        "allreduce": lambda k: everywhere,
        "reduce": lambda k: everywhere if k == root else zeros,
        "sum": lambda k: everywhere if k == root else zeros,
        "scan": lambda k: sum(xs[: k + 1], zeros),
        "exscan": lambda k: sum(xs[:k], zeros),
        "bcast": lambda k: xs[root],
    }
    for k, rank in enumerate(group):
        y = arithmetic.fill(jets, results[step.call](k), step.part)
        model.put(rank, step.out, y + model.registers[rank][step.b])


def product(xs, step, root):
    if step.twist:
        xs = [x - jets.stop(x) if k == root else x for k, x in enumerate(xs)]
    return reduce(lambda x, y: x * y, xs)


def extreme(xs, step, root):
    """Return the mean of those that are the largest or smallest, entry by entry: each has an equal share."""
    xs = [jets.real(x) for x in xs]
    if step.twist:
        xs = [xs[root] - float(k % 3 == 2) for k in range(len(xs))]
    else:
        xs = [x + offset(k) for k, x in enumerate(xs)]
    stacked = np.stack([x.coefficients for x in xs])
    values = stacked[..., 0, 0]
    best = values.max(0) if step.op == "MAX" else values.min(0)
    chosen = np.abs(values - best) < NEARLY
    if not step.twist and np.any(chosen.sum(0) > 1):
        raise Undecided
    share = chosen / np.maximum(chosen.sum(0), 1)
    return jets.Jet((share[..., None, None] * stacked).sum(0))


def gather(model, step, group):
    pieces = []
    for rank in group:
        a = model.registers[rank][step.a]
        piece = a[: step.lengths[rank if step.axis is not None else 0]]
        pieces.append(jets.stack([piece, piece * piece]) if step.axis in (1, -1) else piece)
    whole = jets.stack(pieces) if step.axis is None else jets.concatenate(pieces, 1 if step.axis else 0)
    mixed = arithmetic.mix(jets, whole)
    for k, rank in enumerate(group):
        has_it = step.call == "allgather" or k == step.root % len(group)
        model.put(rank, step.out, mixed * float(has_it) + model.registers[rank][step.b])


def scatter(model, step, group):
    counts = [len(part) for part in np.array_split(range(5), len(group))]
    if step.lengths is not None:
        counts = [step.lengths[rank] for rank in group]
    shape = (len(group), 2) if step.axis is None else (sum(counts),) if step.axis == 0 else (2, sum(counts))
    wholes = [arithmetic.spread(jets, model.registers[rank][step.a], shape) for rank in group]
    whole = wholes[step.root % len(group)] if step.call == "scatter" else sum(wholes[1:], wholes[0])
    for k, rank in enumerate(group):
        own = slice(sum(counts[:k]), sum(counts[: k + 1]))
        piece = whole[k] if step.axis is None else whole[own] if step.axis == 0 else whole[:, own]
        model.put(rank, step.out, arithmetic.mix(jets, piece) + model.registers[rank][step.b])


def transpose(model, step, group):
    xs = model.parts(step, group)
    for k, rank in enumerate(group):
        copies = [arithmetic.copies(step.blocks, sender, k) for sender in range(len(group))]
        came = jets.sin(jets.stack([x * (1 + k / 2 + copy / 4) for x, n in zip(xs, copies) for copy in range(n)]))
        model.put(rank, step.out, arithmetic.mix(jets, came) * model.registers[rank][step.b])


def exchange(model, step, group):
    size, shifts = len(group), (step.shift, -step.shift)[: 1 + step.both]
    for k, rank in enumerate(group):
        for shift in shifts if not step.silent[rank] else ():
            model.post(step, rank, group[(k + shift) % size])
    came = {}
    for k, rank in enumerate(group):
        came[rank] = arithmetic.take(jets, model.registers[rank][step.a], part_of_tag(step.tag)) * 0
        for back in [group[(k - shift) % size] for shift in shifts]:
            if not step.silent[back]:
                came[rank] = came[rank] + model.receive(step, back, rank)
    for rank, y in came.items():
        model.add(rank, step.out, arithmetic.fill(jets, y, part_of_tag(step.tag)))


def pair(model, step, group):
    source, dest = group[step.source % len(group)], group[step.dest % len(group)]
    part = part_of_tag(step.tag)
    results = {rank: arithmetic.take(jets, model.registers[rank][step.a], part) * 2 for rank in group}
    if source != dest:
        model.post(step, source, dest)
        results[dest] = model.receive(step, source, dest)
    for rank, y in results.items():
        model.add(rank, step.out, arithmetic.fill(jets, y, part))


def message(model, step, group):
    source, dest = group[step.source % len(group)], group[step.dest % len(group)]
    number = 100 + model.place if step.partner == "any" else None
    place, part = model.place, part_of_tag(step.tag)
    x = arithmetic.take(jets, model.registers[source][step.a], part) * 2
    if step.partner != "none":
        model.post(step, source, dest, number)

    def use_sent():
        if step.used:
            model.add(source, step.out, arithmetic.fill(jets, x, part) * 0.5)

    def use_received(y):
        if not step.dropped:
            model.add(dest, step.out, arithmetic.fill(jets, y, part))

    def receive():
        y = x * 0 if step.partner == "none" else model.receive(step, source, dest, number)
        if step.recv == "recv" or step.partner == "any":
            use_received(y)
        else:
            model.agendas[dest].add(place + step.late + step.waits[1], lambda: use_received(y))

    if step.send == "send":
        use_sent()
    else:
        model.agendas[source].add(place + step.waits[0], use_sent)
    model.agendas[dest].add(place + step.late, receive)


def start(model, step, group):
    xs = model.parts(step, group)
    total = arithmetic.fill(jets, sum(xs[1:], xs[0]), step.part)
    for rank in group:
        model.agendas[rank].add(model.place + step.waits[rank], lambda rank=rank: model.add(rank, step.out, total))


def integers(model, step, group):
    values, root = [step.values[rank] for rank in group], step.root % len(group)
    results = {
        "SUM": lambda k: sum(values),
        "MAX": lambda k: max(values),
        "BXOR": lambda k: reduce(lambda x, y: x ^ y, values) if k == root else 0,
        "bcast": lambda k: values[root],
        "exscan": lambda k: sum(values[:k]),
        "ring": lambda k: values[k - 1],
        "gather": lambda k: sum(values) if k == root else 0,
        "iallreduce": lambda k: sum(values),
    }
    for k, rank in enumerate(group):
        y = model.registers[rank][step.a]
        for _ in range(results[step.call](k) % 3):
            y = jets.sin(y) * 1.5
        model.put(rank, step.out, y)


def barrier(model, step, group):
    pass


def inner(model, step, group):
    """Put in the gradient by hand: the rank's energy is E_k = Re Σ sin(w_k) w_{k-1} b_{k-1}."""
    size, root = len(group), step.root % len(group)
    w = [model.registers[rank][step.a] for rank in group]
    b = [model.registers[rank][step.b] for rank in group]
    energies = [jets.real(jets.total(jets.sin(w[k]) * w[k - 1] * b[k - 1])) for k in range(size)]
    weights = [float(k == root) for k in range(size)]
    if step.objective != "root":
        weights = [1.0 if step.objective == "sum" else 1.0 / size] * size
    value = sum(energies[k] * weights[k] for k in range(size))
    for k, rank in enumerate(group):
        after = (k + 1) % size
        g = jets.cos(w[k]) * w[k - 1] * b[k - 1] * weights[k] + jets.sin(w[after]) * b[k] * weights[after]
        if model.program.complex_registers[step.a] is False:
            g = jets.real(g)
        model.put(rank, step.out, g + value / 2)


def loop(model, step, group):
    states = [model.registers[rank][step.a] for rank in group]
    weights = [model.registers[rank][step.b] for rank in group]
    for _ in range(step.count):
        mean = sum(states[1:], states[0]) / len(group)
        kind = model.program.complex_registers[step.a]
        states = [arithmetic.store(jets, u * w + mean, kind) for u, w in zip(states, weights)]
    put_where_used(model, step, group, states)


def put_where_used(model, step, group, results):
    for rank, y in zip(group, results):
        if step.used[rank]:
            model.put(rank, step.out, y)


def solve(model, step, group):
    """Newton's method, whose systems, of a diagonal and 1/4 between all ranks, are solved by Sherman and Morrison."""
    bs = [jets.real(model.registers[rank][step.a]) for rank in group]
    diagonals = [1.5 + jets.tanh(jets.real(model.registers[rank][step.b])) for rank in group]
    cubed = float(step.call == "newton")
    us = [b * 0 for b in bs]
    for _ in range(12):
        total = sum(us[1:], us[0]) * 0.25
        residuals = [c * u + u * u * u * cubed + total - b for c, u, b in zip(diagonals, us, bs)]
        inverses = [jets.reciprocal(c + u * u * (3 * cubed)) for c, u in zip(diagonals, us)]
        parts = [d * r for d, r in zip(inverses, residuals)]
        common = sum(parts[1:], parts[0]) * jets.reciprocal(4 + sum(inverses[1:], inverses[0]))
        us = [u - part + d * common for u, part, d in zip(us, parts, inverses)]
    put_where_used(model, step, group, us)


def operator(model, step, group):
    xs = [model.registers[rank][step.a] for rank in group]
    if step.call == "total":
        put_where_used(model, step, group, [sum(xs[1:], xs[0])] * len(xs))
        return
    whole = jets.concatenate(xs)
    n = whole.shape[0]
    result = whole[[(k + 1) % n for k in range(n)]] * 2 - whole[[k - 1 for k in range(n)]]
    put_where_used(model, step, group, [result[LENGTH * k : LENGTH * (k + 1)] for k in range(len(xs))])


def ragged(model, step, group):
    pieces = []
    for rank in group:
        a, sign = model.registers[rank][step.a], model.registers[rank][step.a].value[0].real
        if step.decides[rank] and abs(sign) < NEARLY:
            raise Undecided
        pieces.append(a[: 1 + (sign > 0 if step.decides[rank] else 1)])
    mixed = arithmetic.mix(jets, jets.concatenate(pieces))
    for rank in group:
        model.put(rank, step.out, mixed + model.registers[rank][step.b])


STEPS = {
    Combine: combine, Gather: gather, Scatter: scatter, Transpose: transpose, Exchange: exchange, Pair: pair,
    Message: message, Start: start, Integers: integers, Barrier: barrier, Inner: inner,
    Loop: loop, Solve: solve, Operator: operator, Ragged: ragged,
}  # fmt: skip
