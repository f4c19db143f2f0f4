"""The timeline: a file that tracing tools open, with all that happened in its place, on every rank."""

import json
import os
import threading
from collections import defaultdict

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.debug import recording, traced
from mpiad.differentiation import backward
from mpiad.differentiation.tape import OrderedTape
from mpiad.transport.core import calls

WORLD = MPI.COMM_WORLD
HERE = os.path.basename(__file__)


@pytest.fixture
def path(tmp_path):
    """A path that all ranks agree on."""
    return WORLD.bcast(str(tmp_path / "trace.json"), 0)


def loss(x, rank, size):
    received = mpiad.mpi_irecv(x, (rank - 1) % size, tag=3)
    sent = mpiad.mpi_isend(x, (rank + 1) % size, tag=3)
    y = mpiad.mpi_wait(received)
    mpiad.mpi_wait(sent)
    z = mpiad.mpi_exchange(y, (rank + 1) % size, (rank - 1) % size)
    if size > 1 and rank == 0:
        mpiad.mpi_send(z, 1, tag=5)
    if rank == 1:
        z = mpiad.mpi_recv(z, 0, tag=5)
    return mpiad.mpi_allreduce(anp.sum(mpiad.mpi_bcast(z, root=size - 1) ** 2))


def run(rank, size, path):
    with traced(path):
        mpiad.value_and_grad(loss)(np.ones(4) * rank, rank, size)
    return read(path)


def read(path):
    """Read a trace and check its format, by what Chrome's description of it says; return its events."""
    with open(path) as file:
        whole = json.load(file)
    assert isinstance(whole["traceEvents"], list)
    for event in whole["traceEvents"]:
        assert event["ph"] in "XMsf"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name") and len(event["args"]) == 1
            continue
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0 and event["cat"]
        if event["ph"] == "X":
            assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0 and isinstance(event["args"], dict)
        else:
            assert isinstance(event["id"], int) and 0 < event["id"] < 2**53
            assert event["ph"] == "s" or event["bp"] == "e"
    check_nesting(whole["traceEvents"])
    return whole["traceEvents"]


def nanoseconds(event):
    """Return start and end as integers: thousandths of the file's microseconds."""
    start, length = round(1000 * event["ts"]), round(1000 * event["dur"])
    return start, start + length


def check_nesting(events):
    """Check that of each thread's events two are apart, or one is inside the other; and that the computation is nowhere
    inside a communication."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((*nanoseconds(event), event))
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1], span[2]["cat"] != "phase"))
        opened = []
        for start, end, event in spans:
            while opened and opened[-1][0] <= start:
                opened.pop()
            if opened:
                assert end <= opened[-1][0], (event, opened[-1])
                assert event["cat"] != "computation" or opened[-1][1]["cat"] == "phase"
            opened.append((end, event))


def of_rank(events, rank, category=None):
    chosen = [e for e in events if e["pid"] == rank and e["ph"] == "X" and category in (None, e["cat"])]
    return sorted(chosen, key=lambda e: (e["ts"], -e["dur"]))


def outermost(events):
    """Return the events that are inside no other of the list."""
    found, end = [], -1
    for event in events:
        if nanoseconds(event)[0] >= end:
            found.append(event)
            end = nanoseconds(event)[1]
    return found


def test_every_rank_is_a_process_with_its_phases(rank, size, path):
    events = run(rank, size, path)
    assert {e["pid"] for e in events} == set(range(size))
    for r in range(size):
        assert [e["name"] for e in of_rank(events, r, "phase")] == ["forward", "backward"]
        names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["pid"] == r and e["name"] == "process_name"]
        assert len(names) == 1 and names[0].startswith(f"rank {r} (")


def test_backwards_is_the_reverse_of_forwards(rank, size, path):
    events = run(rank, size, path)
    for r in range(size):
        forwards = [e for e in of_rank(events, r, "forward") if e["name"] != "value_and_grad"]
        backwards = outermost(of_rank(events, r, "adjoint"))
        assert len(forwards) >= 7
        assert [e["name"] for e in backwards] == [f"adjoint of {e['name']}" for e in forwards[::-1]]
        assert [e["args"]["forward site"] for e in backwards] == [e["args"]["site"] for e in forwards[::-1]]
        assert all(e["args"]["site"].startswith(HERE) for e in forwards)
        phases = {e["name"]: nanoseconds(e) for e in of_rank(events, r, "phase")}
        for phase, inside in (("forward", forwards), ("backward", backwards)):
            assert all(phases[phase][0] <= nanoseconds(e)[0] and nanoseconds(e)[1] <= phases[phase][1] for e in inside)


def test_what_an_event_tells(rank, size, path):
    events = run(rank, size, path)
    (bcast,) = [e for e in of_rank(events, size - 1, "forward") if e["name"] == "mpi_bcast"]
    told = {"communicator": "world", "root": size - 1, "shape": [4], "dtype": "float64", "bytes": 32}
    assert told.items() <= bcast["args"].items()
    assert bcast["args"]["site"].endswith(" in loss")
    (inside,) = [e for e in of_rank(events, 0, "adjoint") if e["name"] == "mpi_sum"]
    assert inside["args"]["root"] == size - 1  # the adjoint of a copy is a sum, to the same root


def test_computation_fills_the_gaps(rank, size, path):
    events = run(rank, size, path)
    for r in range(size):
        whole = of_rank(events, r)
        covered = sum(np.subtract(*nanoseconds(e)[::-1]) for e in outermost(whole))
        assert covered > 0.9 * (max(nanoseconds(e)[1] for e in whole) - min(nanoseconds(e)[0] for e in whole))
        assert len([e for e in whole if e["cat"] == "computation"]) > 3


@pytest.mark.mpi(min_size=2)
def test_arrows_from_sends_to_receives(rank, size, path):
    # On one clock no message comes before it was sent.
    check_arrows(run(rank, size, path), size, late=0.0)


def check_arrows(events, size, late):
    ends = {kind: {e["id"]: e for e in events if e["ph"] == kind} for kind in "sf"}
    assert len(ends["s"]) == sum(e["ph"] == "s" for e in events)  # each of its own number
    assert set(ends["s"]) == set(ends["f"])
    assert len(ends["s"]) == 2 * (2 * size + 1)  # to the neighbour twice and one more, there and back
    apart = [ends["f"][k]["pid"] - ends["s"][k]["pid"] for k in ends["s"]]
    assert sorted(x % size for x in apart) == sorted([1] * (2 * size + 1) + [size - 1] * (2 * size + 1))
    assert all(ends["f"][k]["ts"] > ends["s"][k]["ts"] - late for k in ends["s"])


@pytest.mark.mpi(min_size=2)
def test_clocks_that_differ_are_aligned(rank, size, path, monkeypatch):
    """As on several machines: each rank's clock is hours away from the others'."""
    import time

    from mpiad.debug import recording

    shifted = lambda: time.perf_counter() + 3600.0 * rank  # noqa: E731
    for module in (recording, calls):
        monkeypatch.setattr(module, "perf_counter", shifted)
    # As exactly as messages are fast, which on a busy machine is milliseconds.
    check_arrows(run(rank, size, path), size, late=1e4)
    assert max(e["ts"] for e in read(path) if e["ph"] == "X") < 60e6


def test_threads_have_their_own_lines(rank, path):
    with traced(path):
        thread = threading.Thread(target=lambda: mpiad.grad(lambda x: mpiad.mpi_sum(x))(1.0), name="another")
        thread.start()
        thread.join()
        mpiad.mpi_barrier()
    events = [e for e in read(path) if e["pid"] == rank]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[1] == "another" and len(names) == 2
    assert {e["tid"] for e in events if e["name"] in ("mpi_sum", "backward")} == {1}


def test_afterwards_nothing_is_left(rank, size, path):
    bare = mpiad.mpi_bcast.__globals__["BCAST"].forward, backward.sweep, OrderedTape.__enter__, OrderedTape.__exit__
    observers, noting = list(calls.observers), calls.is_noting()  # of debug mode
    with traced(path):
        assert len(calls.observers) == len(observers) + 1 and calls.is_noting()
        assert noting or backward.sweep is not bare[1]
    now = mpiad.mpi_bcast.__globals__["BCAST"].forward, backward.sweep, OrderedTape.__enter__, OrderedTape.__exit__
    assert (now, calls.observers, calls.is_noting()) == (bare, observers, noting)


def test_a_phase_that_began_before_is_not_noted(rank, path):
    def loss(x):
        with traced(path):
            y = mpiad.mpi_sum(x)
        return y

    mpiad.grad(loss)(1.0)
    assert [e["name"] for e in of_rank(read(path), rank) if e["cat"] != "computation"] == ["mpi_sum"]


def test_an_exception_leaves_the_parts(rank, size, path):
    def loss(x):
        mpiad.mpi_sum(x)
        raise ArithmeticError("spoilt")

    with pytest.raises(ArithmeticError), traced(path):
        mpiad.grad(loss)(1.0)
    mpiad.reset()
    WORLD.Barrier()
    assert not os.path.exists(path)
    events = read(f"{path}.rank{rank}")
    assert {e["pid"] for e in events} == {rank}
    assert [e["name"] for e in of_rank(events, rank) if e["cat"] != "computation"] == ["forward", "mpi_sum"]


def test_a_file_that_cannot_be_written_raises_on_all_ranks(path):
    with pytest.raises(OSError, match="can't be written"), traced(os.path.join(path, "no", "folder")):
        mpiad.mpi_barrier()
    assert mpiad.mpi_allreduce(1.0) == WORLD.size


def test_an_old_file_stays_whole_until_the_new_one_is(path, rank):
    for _ in range(2):
        with traced(path):
            mpiad.mpi_barrier()
    WORLD.Barrier()
    assert os.listdir(os.path.dirname(path)) == ["trace.json"]
    read(path)


def test_too_many_events_are_counted(rank, size, path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_EVENTS", 3)
    with traced(path):
        for _ in range(5):
            mpiad.mpi_barrier()
    assert len([e for e in of_rank(read(path), rank) if e["name"] == "mpi_barrier"]) == 3
    with open(path) as file:
        assert json.load(file)["otherData"] == {"ranks": size, "events that were too many": 2 * size}


RANK = "int(os.environ.get('PMI_RANK') or os.environ['PMIX_RANK'])"
PROGRAM = """
import os, sys, autograd.numpy as np, mpiad
os.chdir(sys.argv[1])
mpiad.mpi_init()
x = mpiad.grad(lambda x: mpiad.mpi_sum(np.sin(x)))(1.0)
if sys.argv[2] == "fails" and mpiad.mpi_rank() == 1:
    raise ArithmeticError("spoilt")
mpiad.mpi_barrier()
if sys.argv[2] == "finalizes":
    mpiad.mpi_finalize()
"""


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize(("ranks", "end"), [
    (1, "finalizes"), (3, "exits"),
    pytest.param(1, "exits", marks=pytest.mark.thorough), pytest.param(3, "finalizes", marks=pytest.mark.thorough),
])  # fmt: skip
def test_of_the_whole_program(ranks, end, mpirun, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = mpirun(ranks, PROGRAM, tmp_path / "elsewhere", end, env={"MPIAD_TRACE": "t.json"}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    events = read(tmp_path / "t.json")
    for rank in range(ranks):
        names = [e["name"] for e in of_rank(events, rank) if e["cat"] in ("forward", "phase")]
        assert names == ["forward", "mpi_sum", "value_and_grad", "backward", "mpi_barrier"]


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize("entries", [3, 20_000])  # a function of a large array is compiled before it runs
def test_of_a_program_whose_first_call_is_in_a_compiled_function(entries, mpirun, tmp_path):
    program = f"""
import autograd.numpy as np, mpiad
f = mpiad.jit(lambda x: mpiad.mpi_allreduce(np.sum(np.sin(x))), strict=True)
for _ in range(3):
    f(np.ones({entries}))
"""
    done = mpirun(2, program, env={"MPIAD_TRACE": "t.json"}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(2):
        names = [e["name"] for e in of_rank(read(tmp_path / "t.json"), rank) if e["cat"] == "forward"]
        assert names == ["mpi_allreduce"] * 3


@pytest.mark.launches
def test_of_a_program_that_fails(mpirun, tmp_path):
    done = mpirun(2, PROGRAM, tmp_path, "fails", env={"MPIAD_TRACE": "t.json"}, cwd=tmp_path)
    assert done.returncode != 0 and "spoilt" in done.stderr
    assert not (tmp_path / "t.json").exists()
    events = read(tmp_path / "t.json.rank1")
    assert "backward" in [e["name"] for e in events]


@pytest.mark.launches
def test_where_one_rank_asks_all_record(mpirun, tmp_path):
    """A launcher may pass its variables on to some nodes only."""
    for rank in (0, 1):
        asked = f"import os\nif {RANK} == {rank}: os.environ['MPIAD_TRACE'] = 't.json'\n"
        done = mpirun(2, asked + PROGRAM, tmp_path, "exits", env={"MPIAD_TRACE": None}, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert {event["pid"] for event in read(tmp_path / "t.json")} == {0, 1}
        os.remove(tmp_path / "t.json")


@pytest.mark.launches
def test_a_program_whose_trace_cannot_be_written_ends_well(mpirun, tmp_path):
    done = mpirun(2, PROGRAM, tmp_path, "exits", env={"MPIAD_TRACE": "no/t.json"}, cwd=tmp_path)
    assert done.returncode == 0
    assert "there will be no trace" in done.stderr and "can't be written to" in done.stderr


@pytest.mark.serial
def test_a_planted_link_is_not_followed_and_a_pipe_not_replaced(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "trace.json"
    victim.write_text("mine")
    (tmp_path / "trace.json.unfinished").symlink_to(victim)
    assert recording._write_atomically(path, "[", iter(["1", "2"])) is None
    assert path.read_text() == "[1,\n2\n]}\n" and victim.read_text() == "mine"
    os.mkfifo(tmp_path / "pipe")
    assert "isn't a regular file" in recording._write_atomically(tmp_path / "pipe", "[", iter([]))
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 4
