"""Check primitives, domains, solvers and ensembles on more ranks than cores, in one start, against NumPy in one process.

    python tests/launch.py --ranks 8 16 32 --limit 900 -- tests/many_ranks.py

Each rank computes the reference by itself. The numbers of calls per rank are compared with those on half of the ranks. Rank
0 prints the number of checks, the time and the largest memory of a rank; an error ends the job with the check's name.
"""

import resource
import sys
import time
from collections.abc import Callable

import autograd.numpy as anp
import numpy as np
import reference
from against_reference import arrays, check
from elliptic_matrix import elliptic_matrix
from mpi4py import MPI
from scipy.sparse.linalg import spsolve

import mpiad
from mpiad.debug.recording import Recorder
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, solve
from mpiad.linalg import solve_elliptic
from mpiad.testing import check_adjoint, check_grads

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
AFTER, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
DTYPES = ("f8", "f4", "c16")


def rngs() -> list[np.random.Generator]:
    """All ranks' generators."""
    return [np.random.default_rng([17, rank]) for rank in range(SIZE)]


def uneven(rank: int) -> int:
    """The number of entries of a rank, 0 to 2."""
    return (rank * 2 + 1) % 3


def primitives() -> dict[str, tuple[Callable, reference.Program]]:
    """Functions of one array, each with its reference."""
    same, square = [(3,)] * SIZE, [(SIZE,)] * SIZE
    ragged = [(uneven(rank), 2) for rank in range(SIZE)]
    counts = [uneven(rank) for rank in range(SIZE)]
    whole = [(sum(counts), 2)] * SIZE
    ring = [(rank - 1) % SIZE for rank in range(SIZE)]
    found = {
        "allreduce": (mpiad.mpi_allreduce, reference.allreduce(same)),
        "iallreduce": (lambda x: mpiad.mpi_wait(mpiad.mpi_iallreduce(x)), reference.allreduce(same)),
        "scan": (mpiad.mpi_scan, reference.scan(same)),
        "exscan": (mpiad.mpi_exscan, reference.exscan(same)),
        "allgather": (mpiad.mpi_allgather, reference.allgather(same)),
        "allgather, uneven": (lambda x: mpiad.mpi_allgather(x, 0), reference.allgather(ragged, 0)),
        "alltoall": (lambda x: mpiad.mpi_alltoall(x), reference.alltoall(square)),
        "reduce_scatter": (lambda x: mpiad.mpi_reduce_scatter(x), reference.reduce_scatter(square)),
        "reduce_scatter, uneven": (
            lambda x: mpiad.mpi_reduce_scatter(x, 0, counts), reference.reduce_scatter(whole, 0, counts)
        ),
        "exchange": (lambda x: mpiad.mpi_exchange(x, dest=AFTER, source=BEFORE), reference.move(same, ring)),
        "sendrecv": (
            lambda x: mpiad.mpi_sendrecv(x, SIZE - 1, 0), reference.move(same, [*range(SIZE - 1), 0])
        ),
        "isend and irecv": (nonblocking, reference.move(same, ring)),
    }  # fmt: skip
    for name, op in (("PROD", MPI.PROD), ("MAX", MPI.MAX), ("MIN", MPI.MIN)):
        found[f"allreduce, {name}"] = (lambda x, op=op: mpiad.mpi_allreduce(x, op), reference.reduction(name, same))
    for root in sorted({0, SIZE // 3, SIZE - 1}):
        found |= {
            f"bcast from {root}": (lambda x, root=root: mpiad.mpi_bcast(x, root), reference.bcast(same, root)),
            f"gather to {root}": (lambda x, root=root: mpiad.mpi_gather(x, root), reference.gather(same, root)),
            f"gather to {root}, uneven": (
                lambda x, root=root: mpiad.mpi_gather(x, root, 0), reference.gather(ragged, root, 0)
            ),
            f"scatter from {root}, uneven": (
                lambda x, root=root: mpiad.mpi_scatter(x, root, 0, counts), reference.scatter(whole, root, 0, counts)
            ),
        }  # fmt: skip
    return found


def nonblocking(x):
    sent, received = mpiad.mpi_isend(x, AFTER), mpiad.mpi_irecv(x, BEFORE)
    result, _ = mpiad.mpi_waitall([received, sent])
    return result


def check_primitives() -> int:
    """Values, adjoints, tangents, gradients and Hessian products of all primitives, of each dtype."""
    count = 0
    for name, (fun, program) in primitives().items():
        for dtype in DTYPES:
            if dtype[0] == "c" and name.startswith("allreduce, M"):
                continue  # complex numbers have no order
            with named(f"{name}, {dtype}"):
                check(fun, program, arrays(rngs(), program.in_shapes, dtype), rngs())
            count += 1
    return count


class named:
    """Say which check raised an exception."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            print(f"rank {RANK}: {self.name} failed", file=sys.stderr, flush=True)


def whole_of(domain: mpiad.Domain, block: np.ndarray) -> np.ndarray:
    """The whole array, without the library."""
    out = np.empty(domain.shape, block.dtype)
    for cells, part in COMM.allgather((domain.owned, block)):
        out[cells] = part
    return out


SHAPES = ((131,), (37, 41), (20, 13, 17))
MODES = {"zero": "constant", "edge": "edge", "reflect": "reflect"}


def check_domains() -> int:
    """Halos, stencils and sums of grids in one to three dimensions, with their adjoints."""
    count = 0
    for shape in SHAPES:
        field = np.random.default_rng(3).standard_normal(shape)
        for periodic in (False, True):
            domain = mpiad.Domain(shape, halo=1, periodic=periodic)
            block = np.ascontiguousarray(field[domain.owned])
            for boundary, mode in MODES.items():
                padded = np.pad(field, 1, "wrap" if periodic else mode)
                with named(f"exchange of {shape}, {boundary}, periodic={periodic}"):
                    cells = tuple(slice(cell.start, cell.stop + 2) for cell in domain.owned)
                    np.testing.assert_array_equal(domain.exchange(block, boundary), padded[cells])
                    check_adjoint(lambda u, d=domain, b=boundary: d.exchange(u, b), block)
                with named(f"Laplacian of {shape}, {boundary}, periodic={periodic}"):
                    inside = (slice(1, -1),) * len(shape)
                    expected = -2.0 * len(shape) * field
                    for axis in range(len(shape)):
                        expected = expected + np.roll(padded, 1, axis)[inside] + np.roll(padded, -1, axis)[inside]
                    laplacian = domain.laplacian(boundary=boundary)
                    np.testing.assert_allclose(laplacian(block), expected[domain.owned], atol=1e-12)
                    check_adjoint(laplacian, block)
                count += 4
            with named(f"sums of {shape}"):
                np.testing.assert_allclose(domain.sum(block), field.sum(), atol=1e-11)
                assert domain.max(block) == field.max() and domain.min(block) == field.min()
                gathered = domain.gather(block, SIZE - 1)
                assert RANK != SIZE - 1 or np.array_equal(gathered, field)
                np.testing.assert_array_equal(domain.scatter(field if RANK == 0 else None), block)
                check_grads(lambda u, d=domain: mpiad.mpi_allreduce(anp.sum(anp.sin(d.exchange(u)) ** 2)), block, order=1)
            count += 6
    return count


def check_solvers() -> int:
    """Multigrid, Fourier transforms, ghosts, optimizers, compiled loops and ensembles."""
    random = np.random.default_rng(5)
    domain = mpiad.Domain((33, 31))
    kappa, b = random.uniform(0.5, 2.0, domain.shape), random.standard_normal(domain.shape)
    with named("solve_elliptic"):
        blocks = [np.ascontiguousarray(each[domain.owned]) for each in (kappa, b)]
        expected = spsolve(elliptic_matrix(kappa), b.ravel()).reshape(domain.shape)
        np.testing.assert_allclose(whole_of(domain, solve_elliptic(domain, *blocks, rtol=1e-11)), expected, atol=1e-7)
        # The gradient of J = ½ |u|² with respect to b is A⁻¹ u.
        gradient = mpiad.grad(lambda b: 0.5 * domain.sum(solve_elliptic(domain, blocks[0], b, rtol=1e-11) ** 2))(blocks[1])
        adjoint = spsolve(elliptic_matrix(kappa), expected.ravel()).reshape(domain.shape)
        np.testing.assert_allclose(whole_of(domain, gradient), adjoint, atol=1e-7)
    for shape in ((40, 70), (34, 35, 8)):
        with named(f"FFT of {shape}"):
            fft, field = mpiad.fft.DistributedFFT(shape), random.standard_normal(shape)
            mine = np.ascontiguousarray(field[fft.owned])
            energy = mpiad.mpi_allreduce(np.sum(np.abs(mine) ** 2))
            spectrum = fft.forward(mine)
            np.testing.assert_allclose(fft.backward(spectrum), mine, atol=1e-12)
            np.testing.assert_allclose(energy, np.sum(field**2), rtol=1e-12)
            check_adjoint(lambda u, f=fft: f.backward(f.forward(u)), mine, ulps=64)
    with named("ghosts"):
        n = 7 * SIZE
        values = random.standard_normal(n)
        needed = np.random.default_rng([1, RANK]).integers(0, n, 11)
        ghosts = mpiad.GhostExchange(needed, (7 * RANK, 7 * RANK + 7))
        np.testing.assert_array_equal(ghosts.fetch(values[7 * RANK : 7 * RANK + 7]), values[needed])
        check_adjoint(ghosts.fetch, values[7 * RANK : 7 * RANK + 7])
    with named("minimize"):
        target = np.arange(4.0)
        found = mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum((x - target) ** 2)) / SIZE, np.zeros(4))
        np.testing.assert_allclose(found.x, target, atol=1e-5)
        (x,) = mpiad.Domain(3 * SIZE).coordinates()
        line = mpiad.Domain(3 * SIZE)
        sharded = line.minimize(lambda u: line.sum((u - x) ** 2), np.zeros(line.local_shape))
        np.testing.assert_allclose(sharded.x, x, atol=1e-5)
    with named("a compiled stencil"):
        ring = mpiad.Domain((5 * SIZE,), halo=1, periodic=True)
        (u,) = ring.coordinates()
        step = lambda u: (lambda p: u + 0.1 * (p[2:] - 2.0 * u + p[:-2]))(ring.exchange(u))  # noqa: E731
        loss = lambda u: ring.sum(step(step(u)) ** 2)  # noqa: E731
        (value, gradient), (again, compiled) = (mpiad.value_and_grad(each)(u) for each in (loss, mpiad.jit(loss)))
        np.testing.assert_allclose(again, value, rtol=1e-13)
        np.testing.assert_allclose(compiled, gradient, rtol=1e-12)
    with named("an ensemble"):
        decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
        rates = np.linspace(0.1, 2.0, 3 * SIZE + 1)[:, None]
        ends = lambda p: solve(EnsembleProblem(decay, p=p), ensemblealg=EnsembleMPI(), rtol=1e-10, atol=1e-12).u_end  # noqa: E731
        np.testing.assert_allclose(ends(rates), np.exp(-rates), rtol=1e-8)
        gradient = mpiad.grad(lambda p: anp.sum(ends(p)) / SIZE, objective="sum", shared=True)(rates)
        np.testing.assert_allclose(gradient, -np.exp(-rates), rtol=1e-6)
    return 18


def calls_of(fun: Callable[[], object]) -> int:
    """The number of this rank's communication calls in `fun`, after a first run that sets up."""
    fun()
    recorder = Recorder()
    recorder.start()
    fun()
    recorder.stop()
    return sum(event.innermost for event in recorder.events)


def counted(comm: MPI.Comm) -> dict[str, int]:
    """The largest number of calls of a rank of `comm`, by the name of the program."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    gradient_of = lambda fun, x: lambda: mpiad.value_and_grad(fun, comm=comm)(x)  # noqa: E731
    x = np.arange(3.0)
    line, plane = mpiad.Domain((8 * comm.size,), comm=comm, halo=1, periodic=True), mpiad.Domain((40, 40), comm=comm)
    u, v = np.ones(line.local_shape), np.ones(plane.local_shape)
    programs = {
        "a sum": gradient_of(lambda x: mpiad.mpi_allreduce(anp.sum(x**2), comm=comm), x),
        "a ring": gradient_of(
            lambda x: mpiad.mpi_sum(anp.sum(mpiad.mpi_exchange(x, after, before, comm=comm) ** 2), comm=comm), x
        ),
        "a gather": gradient_of(lambda x: mpiad.mpi_sum(anp.sum(mpiad.mpi_allgather(x, comm=comm) ** 2), comm=comm), x),
        "a halo": gradient_of(lambda u: line.sum(line.laplacian()(u) ** 2), u),
        "a halo, compiled": gradient_of(mpiad.jit(lambda u: line.sum(line.laplacian()(u) ** 2)), u),
        "a root-driven solve": lambda: mpiad.minimize(
            lambda x: mpiad.mpi_allreduce(anp.sum((x - 1.0) ** 2), comm=comm) / comm.size, x, comm=comm
        ),
        "multigrid": gradient_of(lambda v: plane.sum(solve_elliptic(plane, 1.0, v, rtol=1e-8) ** 2), v),
    }
    return {name: comm.allreduce(calls_of(program), MPI.MAX) for name, program in programs.items()}


def check_calls() -> dict[str, tuple[int, int]]:
    """The numbers of calls on half of the ranks and on all; only those of multigrid grow, by its coarse levels."""
    half = COMM.Split(int(RANK < SIZE // 2), RANK)
    few, all_ranks = COMM.bcast(counted(half)), counted(COMM)
    half.Free()
    found = {name: (few[name], all_ranks[name]) for name in few}
    for name, (fewer, more) in found.items():
        with named(f"calls of {name}"):
            assert more <= fewer or name == "multigrid", (name, fewer, more)
    return found


def main() -> None:
    start, counts = time.perf_counter(), {}
    for part in (check_primitives, check_domains, check_solvers):
        began = time.perf_counter()
        counts[part.__name__.removeprefix("check_")] = part(), time.perf_counter() - began
    calls = check_calls() if SIZE >= 8 else {}  # on two ranks both neighbors are one rank
    # The largest memory in MiB: ru_maxrss is in KiB.
    memory = COMM.allreduce(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, MPI.MAX)
    if RANK == 0:
        parts = ", ".join(f"{count} of {name} in {seconds:.0f} s" for name, (count, seconds) in counts.items())
        total = time.perf_counter() - start
        print(f"{SIZE} ranks: all right in {total:.0f} s: {parts}; at most {memory:.0f} MiB per rank")
        grown = ", ".join(f"{name} {fewer} and {more}" for name, (fewer, more) in calls.items())
        if calls:
            print(f"calls per rank on {SIZE // 2} and {SIZE} ranks: {grown}")


if __name__ == "__main__":
    main()
