"""Random right programs of plain mpi4py, run under the watch, which must not take any of them for one that hangs.

    python tests/doctors/right_programs.py --programs 100000 --ranks 2 3 4 --seed 5

A program is a sequence of steps that all ranks draw from the same seed, and execute in the same order. So it can't hang,
however MPI buffers messages. Each rank checks what it receives. The watch has doubts at once instead of after some tenths
of a second, and asks again after some milliseconds: so its proofs are tested, not its patience.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
BATCH = 500
PATIENCE = 0.5  # seconds for a program, on average
SIZES = (1, 5, 300, 100_000)  # the last one doesn't fit into MPI's buffers


class Run:
    """One program on one rank: the random numbers that all ranks share, the communicators, and pending requests."""

    def __init__(self, world: Any, seed: int):
        self.random, self.world = random.Random(seed), world
        # Other tags than in the programs before and after, in which other ranks may be.
        self.comms, self.tag, self.pending = [world], 100 * (seed % 50), []

    def execute(self) -> None:
        """Execute all steps, and complete the pending requests."""
        for _ in range(self.random.randint(1, 12)):
            self.random.choice(STEPS)(self)
        self.random.shuffle(self.pending)
        for check in self.pending:
            check()
        for comm in self.comms[1:]:
            comm.Free()

    def new_tag(self) -> int:
        """Return a tag that no earlier step has."""
        self.tag += 1
        return self.tag

    def comm(self) -> Any:
        """Return a communicator, the same on all its ranks."""
        return self.random.choice(self.comms)

    def pair(self) -> tuple[int, int]:
        """Return two ranks of the world, sender and receiver; they differ if there are two."""
        ranks = range(self.world.size)
        return tuple(self.random.sample(ranks, 2)) if len(ranks) > 1 else (0, 0)  # type: ignore[return-value]

    def size(self) -> int:
        """Return a length of arrays, rarely a large one."""
        return SIZES[-1] if self.random.random() < 0.03 else self.random.choice(SIZES[:-1])

    def array(self, *key: int) -> np.ndarray:
        """Return an array of a random length, whose entries depend on the key."""
        return np.full(self.size(), float(hash(key) % 1000))


def equal(found: Any, expected: Any) -> None:
    """Raise an error if two values differ."""
    if not np.array_equal(found, expected):
        raise ValueError(f"received {found!r:.80}, but expected {expected!r:.80}")


def send(run: Run, how: str, x: object, source: int, dest: int, tag: int) -> None:
    """Send by a method of the communicator; a rank sends to itself without waiting."""
    start, wait = ("Isend", "Wait") if how[0].isupper() else ("isend", "wait")
    if run.world.rank == source:
        request = getattr(run.world, start if source == dest else how)(x, dest, tag)
        if request is not None:
            run.pending.append(getattr(request, wait))


def message(run: Run) -> None:
    """Send an array from one rank to another."""
    (source, dest), tag, draw = run.pair(), run.new_tag(), run.random
    x = run.array(source, tag)
    how, by = draw.choice(["Send", "Ssend", "Isend", "Issend"]), draw.choice(["Recv", "any", "Probe", "Mprobe", "Irecv"])
    world, y = run.world, np.zeros(x.size)
    send(run, how, x, source, dest, tag)
    if world.rank == dest:
        if by == "Probe":
            world.Probe(source, tag)
        if by == "Mprobe":
            world.Mprobe(source, tag).Recv(y)
        elif by == "Irecv":
            world.Irecv(y, source, tag).Wait()
        else:
            world.Recv(y, MPI.ANY_SOURCE if by == "any" else source, tag)
        equal(y, x)


def object_message(run: Run) -> None:
    """Send an object from one rank to another."""
    (source, dest), tag, draw = run.pair(), run.new_tag(), run.random
    how, by = draw.choice(["send", "ssend", "isend", "issend"]), draw.choice(["recv", "any", "irecv", "probe"])
    value, world = {"tag": tag, "text": "x" * run.size()}, run.world
    send(run, how, value, source, dest, tag)
    if world.rank == dest:
        if by == "probe":
            world.probe(source, tag)
        room = bytearray(200_000)
        source = MPI.ANY_SOURCE if by == "any" else source
        equal(world.irecv(room, source, tag).wait() if by == "irecv" else world.recv(source=source, tag=tag), value)


def batch(run: Run) -> None:
    """Exchange several arrays by nonblocking calls, and wait for them in some way, possibly later."""
    draw, world = run.random, run.world
    messages = [(*run.pair(), run.new_tag(), run.array(k)) for k in range(draw.randint(1, 6))]
    received = [(np.zeros(x.size), x, source, tag) for source, dest, tag, x in messages if dest == world.rank]
    requests = [world.Irecv(y, source, tag) for y, _, source, tag in received]
    requests += [world.Isend(x, dest, tag) for source, dest, tag, x in messages if source == world.rank]
    wait, is_late = (
        draw.choice([wait_for_all, wait_for_any, wait_for_some, wait_in_turn, test_for_all]),
        draw.random() < 0.3,
    )

    def check() -> None:
        wait(requests)
        for y, x, _, _ in received:
            equal(y, x)

    run.pending.append(check) if is_late else check()


def wait_for_all(requests: list[Any]) -> None:
    MPI.Request.Waitall(requests)


def wait_for_any(requests: list[Any]) -> None:
    while MPI.Request.Waitany(requests) != MPI.UNDEFINED:
        pass


def wait_for_some(requests: list[Any]) -> None:
    while MPI.Request.Waitsome(requests) is not None:
        pass


def wait_in_turn(requests: list[Any]) -> None:
    for request in reversed(requests):
        request.Wait()


def test_for_all(requests: list[Any]) -> None:
    while not MPI.Request.Testall(requests):
        time.sleep(0)


def ring(run: Run) -> None:
    """Exchange around a ring of ranks."""
    comm, shift, draw, tag = run.comm(), run.random.randint(1, 3), run.random, run.new_tag()
    right, left = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
    how, size = draw.choice(["Sendrecv", "sendrecv", "Sendrecv_replace", "Isendrecv"]), run.size()
    x, y = np.full(size, comm.rank + 0.5), np.zeros(size)
    if how == "Sendrecv_replace":
        comm.Sendrecv_replace(x, right, tag, left, tag)
        y = x
    elif how == "sendrecv":
        y = comm.sendrecv(x, right, tag, None, left, tag)
    elif how == "Sendrecv":
        comm.Sendrecv(x, right, tag, y, left, tag)
    else:
        comm.Isendrecv(x, right, tag, y, left, tag).Wait()
    equal(y, np.full(size, left + 0.5))


def collective(run: Run) -> None:
    """Call a blocking or nonblocking collective; the latter possibly ends later."""
    comm, draw = run.comm(), run.random
    number = draw.random()
    root, size = int(number * comm.size), run.size()
    x, ranks = np.full(size, comm.rank + 1.0), np.arange(1.0, comm.size + 1)
    name = draw.choice(["Barrier", "Bcast", "Allreduce", "Reduce", "Gather", "Allgather", "Scan"])
    out = np.zeros((comm.size, size)) if "ather" in name else np.zeros(size)
    arguments = {
        "Barrier": (), "Bcast": (x, root), "Reduce": (x, out, MPI.SUM, root), "Gather": (x, out, root),
    }.get(name, (x, out))  # fmt: skip
    expected = {
        "Bcast": root + 1.0, "Allreduce": ranks.sum(), "Reduce": ranks.sum() if comm.rank == root else 0.0,
        "Scan": ranks[: comm.rank + 1].sum(), "Allgather": ranks[:, None],
        "Gather": ranks[:, None] if comm.rank == root else 0.0,
    }  # fmt: skip

    def check() -> None:
        if name in expected:
            result = x if name == "Bcast" else out
            equal(result, np.broadcast_to(expected[name], result.shape))

    if draw.random() < 0.5:
        getattr(comm, name)(*arguments)
        check()
        return
    request, is_late = getattr(comm, f"I{name.lower()}")(*arguments), draw.random() < 0.5

    def complete() -> None:
        request.Wait()
        check()

    run.pending.append(complete) if is_late else complete()


def object_collective(run: Run) -> None:
    """Call a collective of objects."""
    comm, name = (
        run.comm(),
        run.random.choice(["barrier", "bcast", "allgather", "gather", "allreduce", "alltoall", "scatter"]),
    )
    root = int(run.random.random() * comm.size)
    ranks = list(range(comm.size))
    if name == "barrier":
        comm.barrier()
    elif name == "bcast":
        equal(comm.bcast(comm.rank, root), root)
    elif name == "allgather":
        equal(comm.allgather(comm.rank), ranks)
    elif name == "gather":
        found = comm.gather(comm.rank, root)
        equal(ranks if found is None else found, ranks)
    elif name == "allreduce":
        equal(comm.allreduce(comm.rank), sum(ranks))
    elif name == "alltoall":
        equal(comm.alltoall([comm.rank] * comm.size), ranks)
    else:
        equal(comm.scatter(ranks, root), comm.rank)


def construct(run: Run) -> None:
    """Make a communicator: a duplicate, a part of the ranks, or a grid, on which the neighbors exchange."""
    if len(run.comms) > 3:
        return
    comm, draw = run.comm(), run.random
    kind, number = draw.choice(["Dup", "Split", "Create_cart"]), draw.randint(1, 2)
    if kind == "Dup":
        made = comm.Dup()
    elif kind == "Split":
        made = comm.Split(comm.rank % number, -comm.rank)
    else:
        made = comm.Create_cart([comm.size], [True])
        left, right = made.Shift(0, 1)
        equal(made.neighbor_allgather(made.rank), [left, right])
    run.comms.append(made)


def farm(run: Run) -> None:
    """Let one rank give tasks to the others, in the order in which they ask."""
    world, tag, tasks = run.world, run.new_tag(), run.random.randint(0, 6)
    if world.size == 1:
        return
    if world.rank == 0:
        status, given = MPI.Status(), 0
        for _ in range(tasks + world.size - 1):
            world.recv(source=MPI.ANY_SOURCE, tag=tag, status=status)
            world.send(given if given < tasks else None, status.source, tag)
            given += 1
        return
    while world.sendrecv(world.rank, 0, tag, None, 0, tag) is not None:
        pass


def persistent(run: Run) -> None:
    """Send several times by persistent requests."""
    (source, dest), tag, world = run.pair(), run.new_tag(), run.world
    times, x, y = run.random.randint(1, 3), np.zeros(run.size()), np.zeros(1)
    y = np.zeros_like(x)
    requests = [world.Send_init(x, dest, tag)] if world.rank == source else []
    requests += [world.Recv_init(y, source, tag)] if world.rank == dest else []
    wait = run.random.choice([wait_for_all, wait_for_some, wait_in_turn])
    for k in range(times):
        x[:] = k
        MPI.Prequest.Startall(requests)
        wait(requests)
        if world.rank == dest:
            equal(y, np.full(x.size, float(k)))
    for request in requests:
        request.Free()


def thread(run: Run) -> None:
    """Communicate in a thread, on its own communicator, while the main thread executes another step."""
    if threading.current_thread() is not threading.main_thread():
        return
    comm, expected = run.world.Dup(), list(range(run.world.size))
    found: list[list[int]] = []
    other = threading.Thread(target=lambda: found.append(comm.allgather(comm.rank)))
    other.start()
    message(run)
    other.join()
    equal(found, [expected])
    comm.Free()


def delay(run: Run) -> None:
    """Let one rank come late."""
    rank, seconds, computes = (
        run.random.randrange(run.world.size),
        run.random.choice([1e-3, 5e-3, 2e-2]),
        run.random.random(),
    )
    until = time.perf_counter() + seconds
    if run.world.rank == rank and computes < 0.5:
        time.sleep(seconds)
    while run.world.rank == rank and time.perf_counter() < until:
        pass


STEPS: list[Callable[[Run], None]] = [
    message, message, object_message, batch, batch, ring, collective, collective, object_collective, construct, farm,
    persistent, delay, thread,
]  # fmt: skip


def run_batch(first: int, count: int, file: str) -> None:
    """Run programs on this rank."""
    from mpiad.debug import watch
    from mpiad.transport.watch import status

    status._TICK, status._DOUBTFUL_AFTER, status._SETTLED_AFTER, status._NEXT_DOUBT = 1e-3, 2e-3, 5e-3, 0.0
    world = watch()
    for seed in range(first, first + count):
        if world.rank == 0:
            Path(file).write_text(str(seed))
        Run(world, seed).execute()


def main() -> int:
    """Run all programs in jobs; return 1 if a job fails."""
    import launch
    from machine_load import slowdown

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    start, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mpiad-doctors-") as folder:
        while done < options.programs:
            ranks, count = options.ranks[done // BATCH % len(options.ranks)], min(BATCH, options.programs - done)
            first, file = options.seed * 10_000_000 + done, Path(folder) / "program"
            arguments = [str(Path(__file__)), "--batch", str(first), str(count), str(file)]
            path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
            limit = 60 + PATIENCE * slowdown() * count
            job = launch.run_captured(ranks, arguments, limit=limit, env={"PYTHONPATH": path})
            if job.returncode:
                print(
                    f"program {file.read_text()} on {ranks} ranks FAILED\n{job.stdout}{job.stderr}{job.reports}", flush=True
                )
                return 1
            done += count
            print(f"{done} programs pass ({time.monotonic() - start:.0f} s; the last {count} on {ranks} ranks)", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--batch"]:
        from mpi4py import MPI

        run_batch(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        sys.path.insert(0, str(HERE.parent))
        sys.exit(main())
