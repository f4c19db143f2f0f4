"""The report: what was communicated where, by rank, and how long was waited for whom."""

import io
import time

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.debug import recorded, recording, report
from mpiad.debug.recording import Computation, Place
from mpiad.debug.report import Report, Row, advice
from mpiad.extend import custom_operator

WORLD = MPI.COMM_WORLD
LATE = 0.03  # seconds at least; a busy machine makes it more
several = pytest.mark.mpi(min_size=2)


def rows(found):
    return {row.operation: row for row in found.rows}


def silent():
    """Return the report, which rank 0 would print."""
    return report(io.StringIO())


@several
def test_calls_messages_and_bytes(rank, size):
    def loss(x):
        y = mpiad.mpi_bcast(x)
        if rank == 0:
            mpiad.mpi_send(y[:3], 1)
        elif rank == 1:
            mpiad.mpi_recv(y[:3], 0)
        return mpiad.mpi_allreduce(anp.sum(mpiad.mpi_exchange(y, (rank + 1) % size, (rank - 1) % size)))

    with recorded():
        for _ in range(2):
            mpiad.grad(loss)(np.ones(5))
    found = rows(silent())
    ones = np.ones(size, int)
    ends = [ones * (np.arange(size) == r) for r in range(size)]
    for name, calls, messages, nbytes in [
        ("mpi_bcast", ones, 0 * ones, 40 * ones), ("adjoint of mpi_bcast", ones, 0 * ones, 40 * ones),
        ("mpi_send", ends[0], ends[0], 24 * ends[0]), ("adjoint of mpi_send", ends[0], ends[0], 24 * ends[0]),
        ("mpi_recv", ends[1], ends[1], 24 * ends[1]), ("adjoint of mpi_recv", ends[1], ends[1], 24 * ends[1]),
        ("mpi_exchange", ones, 2 * ones, 40 * ones), ("adjoint of mpi_exchange", ones, 2 * ones, 40 * ones),
        ("mpi_allreduce", ones, 0 * ones, 8 * ones), ("adjoint of mpi_allreduce", ones, 0 * ones, 8 * ones),
    ]:  # fmt: skip
        row = found[name]
        np.testing.assert_array_equal([row.calls, row.messages, row.nbytes], 2 * np.array([calls, messages, nbytes]))
        assert row.site.startswith("test_report.py:") and row.site.endswith(" in loss")
    assert set(found) - {"value_and_grad"} == {name for name in found if "mpi_" in name} and len(found) == 11


@several
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_go_by_the_functions_that_the_program_calls(compiled, rank):
    domain = mpiad.Domain(8)

    def loss(u):
        for _ in range(3):
            u = domain.exchange(u)[1:-1] ** 2
        return domain.sum(u)

    program = mpiad.value_and_grad(mpiad.jit(loss) if compiled else loss)
    program(np.ones(domain.local_shape))
    with recorded():
        program(np.ones(domain.local_shape))
    found = rows(silent())
    calls = {"exchange": 3, "adjoint of exchange": 3, "sum": 1, "adjoint of sum": 1, "value_and_grad": 1}
    assert {name: row.calls[rank] for name, row in found.items()} == calls
    assert all(row.site.endswith(" in loss") == (name != "value_and_grad") for name, row in found.items())


def test_computing_by_line(rank, size):
    def loss(x):
        x = mpiad.mpi_allreduce(x)
        if rank == size - 1:
            time.sleep(LATE)
        return mpiad.mpi_allreduce(x**2)

    with recorded():
        mpiad.value_and_grad(loss)(1.0)
    found = silent()
    (phase, after, until), seconds = found.computing[0]
    assert phase == "forward" and after.endswith(" in loss") and until.endswith(" in loss")
    assert int(until.split(":")[1].split()[0]) - int(after.split(":")[1].split()[0]) == 3
    assert seconds[size - 1] >= LATE
    spent = sum(each.seconds for each in found.computing) + sum(row.seconds for row in found.rows)
    np.testing.assert_allclose(spent, found.elapsed, rtol=1e-6)
    assert {each.place.phase for each in found.computing} == {"forward", "backward", "outside"}


def test_what_an_operator_differentiates_counts_once(rank):
    @custom_operator
    def slope(x):
        time.sleep(LATE * (1 + rank) / 4)
        return mpiad.grad(lambda x: mpiad.mpi_allreduce(x**2))(x)

    with recorded():
        slope(2.0)
    found = silent()
    spent = sum(each.seconds for each in found.computing) + sum(row.seconds for row in found.rows)
    np.testing.assert_allclose(spent, found.elapsed, rtol=1e-6)


ONES = np.ones(2)
ADVICE = {
    # Seconds of one in communication, of these waiting, bytes of ten calls, computing forward, backward: what is said.
    "imbalance": ([0.8, 0.0], [0.8, 0.0], 80, [0.2, 1.0], [0.0, 0.0], "load imbalance: rank 1 computes 1.7 times"),
    "turns": (0.5 * ONES, 0.4 * ONES, 80, 0.3 * ONES, 0.2 * ONES, "wait 40% of the time, most of it in sum at b.py"),
    "latency": (0.6 * ONES, 0 * ONES, 80, 0.2 * ONES, 0.2 * ONES, "exchange at a.py:1: 10 calls of 8 bytes. Latency"),
    "bandwidth": (0.6 * ONES, 0 * ONES, 1e7, 0.2 * ONES, 0.2 * ONES, "10 calls of 1000000 bytes. Bandwidth"),
    "computing": (0.1 * ONES, 0 * ONES, 80, 0.6 * ONES, 0.3 * ONES, "computing takes 90% of the time, 60% in the loop"),
    "backward": (0.1 * ONES, 0 * ONES, 80, 0.1 * ONES, 0.8 * ONES, "the backward pass computes 8 times as long"),
    "nothing": (0.6 * ONES, 0 * ONES, 0, 0.2 * ONES, 0.2 * ONES, "nothing stands out"),
}


@pytest.mark.serial
@pytest.mark.parametrize("name", ADVICE)
def test_advice(name):
    communicating, waiting, nbytes, forward, backward, said = ADVICE[name]
    calls = np.array([10 if nbytes else 0, *np.zeros(len(ONES) - 1)])
    rows = [
        Row("sum", "b.py:2", 0 * calls, 0 * calls, 0 * calls, np.array(waiting), np.array(waiting)),
        Row("exchange", "a.py:1", calls, 0 * calls, calls * nbytes / 10, np.array(communicating) - waiting, 0 * ONES),
    ]
    places = (Place(phase, "a.py:1", "a.py:1") for phase in ("forward", "backward"))
    computations = [Computation(*each) for each in zip(places, np.array([forward, backward]))]
    given = advice(Report(rows, ONES, 0, computations))
    assert any(said in line for line in given), given


def test_the_same_on_all_ranks(size):
    with recorded():
        mpiad.mpi_barrier()
    texts = WORLD.allgather(str(silent()))
    assert texts == [texts[0]] * size and "mpi_barrier" in texts[0]


def waits_by_hand(came, awaited):
    """Return every rank's wait, from when it came (on one clock: all ranks run on this machine) and for whom it waits.

    The ranks' own readings, not the lengths of the sleeps: nobody knows how late a busy machine wakes them up.
    """
    came = WORLD.allgather(came)
    for_whom = WORLD.allgather(awaited)
    return [max([0.0, *(came[other] - came[rank] for other in others)]) for rank, others in enumerate(for_whom)]


def agree(measure, atol):
    """Compare two measures of the same waits, which all ranks know.

    Up to five times: a busy machine may stop a rank between its own look at the clock and the library's.
    """
    for _ in range(4):
        if np.allclose(*measure(), rtol=1e-7, atol=atol):
            return
    np.testing.assert_allclose(*measure(), atol=atol)


WAITS = {
    # What is called, and for whom a rank waits in it.
    "all": (lambda rank, size: mpiad.mpi_allreduce(1.0), lambda rank, size: range(size)),
    "barrier": (lambda rank, size: mpiad.mpi_barrier(), lambda rank, size: range(size)),
    "root that gives": (lambda rank, size: mpiad.mpi_bcast(np.ones(2), root=1), lambda rank, size: [1]),
    "root that takes": (
        lambda rank, size: mpiad.mpi_sum(np.ones(2), root=1),
        lambda rank, size: range(size) if rank == 1 else [],
    ),
    "neighbour": (
        lambda rank, size: mpiad.mpi_exchange(np.ones(2), (rank + 1) % size, (rank - 1) % size),
        lambda rank, size: [(rank - 1) % size],
    ),
}


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", WAITS)
def test_who_waits_for_whom(name, late, rank, size):
    call, awaited = WAITS[name]

    def waits():
        with recorded():
            WORLD.Barrier()
            if rank == late:
                time.sleep(LATE)
            came = time.perf_counter()
            call(rank, size)
        (row,) = silent().rows
        assert (row.waited <= row.seconds).all()
        return row.waited, waits_by_hand(came, awaited(rank, size))

    agree(waits, LATE / 2)


@several
def test_a_wait_for_a_message_started_before(rank):
    def waits():
        came = 0.0
        with recorded():
            WORLD.Barrier()
            if rank == 0:
                time.sleep(LATE)
                came = time.perf_counter()
                mpiad.mpi_send(np.ones(2), 1)
            elif rank == 1:
                request = mpiad.mpi_irecv(np.ones(2), 0)
                time.sleep(LATE / 2)
                came = time.perf_counter()
                mpiad.mpi_wait(request)
        found = rows(silent())
        assert found["mpi_wait"].nbytes[1] == 0 and found["mpi_irecv"].nbytes[1] == 16
        assert not found["mpi_send"].waited.any() and not found["mpi_irecv"].waited.any()
        return found["mpi_wait"].waited, waits_by_hand(came, [0] if rank == 1 else [])

    agree(waits, LATE / 3)


@pytest.mark.also_on(4)
@pytest.mark.mpi(min_size=4)
def test_ranks_that_do_not_take_part_are_not_waited_for(rank, size):
    comm = WORLD.Split(rank % 2)
    mpiad.mpi_init(comm)

    def waits():
        with recorded():
            WORLD.Barrier()
            if rank == 1:
                time.sleep(LATE)
            came = time.perf_counter()
            mpiad.mpi_barrier(comm=comm)
        (row,) = silent().rows
        return row.waited, waits_by_hand(came, range(rank % 2, size, 2))

    agree(waits, LATE / 2)
    comm.Free()


@several
def test_imbalance(size):
    row = Row("", "", *np.zeros((4, size)), np.arange(size) * 1.0)
    assert row.imbalance == pytest.approx(2.0 * (size - 1) / (size - 1) if size > 1 else 0)
    assert row._replace(waited=np.zeros(size)).imbalance == 0


def test_rank_0_prints(rank, capsys):
    with recorded():
        mpiad.mpi_barrier()
    WORLD.Barrier()
    capsys.readouterr()
    found = report()
    assert capsys.readouterr().out == (f"{found}\n" if rank == 0 else "")


def test_where_nothing_was_recorded(rank, capsys, monkeypatch):
    monkeypatch.setattr(recording, "_latest", None)
    found = report()
    assert found.rows == [] and ("nothing was recorded. Run the program" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize("setting", [
    {"MPIAD_DEBUG": "1"}, {"MPIAD_TRACE": "t.json"}, pytest.param({}, marks=pytest.mark.thorough),
])  # fmt: skip
def test_of_the_whole_program(setting, mpirun, tmp_path):
    program = "import mpiad\nmpiad.mpi_barrier()\nmpiad.debug.report()\n"
    done = mpirun(2, program, env={"MPIAD_DEBUG": None, "MPIAD_TRACE": None} | setting, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("mpi_barrier" in done.stdout) == ("MPIAD_TRACE" in setting)
    assert ("nothing was recorded" in done.stdout) == ("MPIAD_TRACE" not in setting)


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize("call", ["mpiad.debug.report()", "mpiad.debug.recorded().__enter__()"])
def test_a_rank_that_does_not_take_part_is_named_in_debug_mode(call, mpirun, tmp_path):
    program = f"import mpiad\nif mpiad.mpi_rank():\n    mpiad.mpi_allreduce(1.0)\nelse:\n    {call}\n"
    done = mpirun(2, program, env={"MPIAD_DEBUG": "1", "MPIAD_TRACE": "t.json"}, cwd=tmp_path)
    assert done.returncode != 0 and "CommunicationMismatchError" in done.stderr
    assert any(line.split()[:2] == ["0", call.split(".")[2].partition("(")[0]] for line in done.stderr.splitlines())
