"""Messages in device memory between the ranks of a node: descriptors, slots, growth, waits that never end, the end itself.

The stand-in's memory is shared between the processes of the ranks; its stream runs behind the program.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, double, on_device, on_host
from device_ways import sharing, travelling
from kernels_on_cpu import COMPILER
from machine_load import slowdown
from mpi4py import MPI

import mpiad
from mpiad.transport.core import lookup
from mpiad.transport.core.channels import base, world_ranks
from mpiad.transport.devices import device_messages, device_settings, node_memory
from mpiad.transport.devices.device_messages import Block
from mpiad.transport.devices.device_settings import DeviceSettings

WORLD = MPI.COMM_WORLD
RIGHT, LEFT = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
several = pytest.mark.mpi(min_size=2)


@contextmanager
def shared(introduced=True):
    before = device_settings.put(DeviceSettings(cuda_aware=False))
    try:
        with sharing(introduced) as memory:
            yield memory
    finally:
        device_settings.put(before)


def values(number, rank=WORLD.rank, length=61):
    return np.arange(float(length)) + 1000 * number + 1e6 * rank


def arena():
    return device_messages.present().arena


def pending():
    """Return the number of this rank's messages that weren't pulled, after all ranks' streams have run."""
    double.synchronize()
    mpiad.mpi_barrier()
    found = device_messages.present()
    return 0 if found is None or found.arena is None else found.arena.slots() - len(found.offered)


def is_one_node():
    found = device_messages.present()
    return found is not None and found.node.comm.size == WORLD.size


@several
@pytest.mark.parametrize("length", [1, 8, 9, 300_000])
def test_descriptors_go_through_mpi_and_hosts_do_not_wait(length):
    """8 bytes, those of a descriptor, and more."""
    with shared() as memory:
        x = on_device(values(0, length=length))
        lookup.channel(None, "test")
        memory.copies = 0
        double.memory.stream.late = 0.001
        mpiad.mpi_send(x, RIGHT)
        came = [mpiad.mpi_recv(x, LEFT)]
        mpiad.mpi_barrier()  # the receiver of this rank's array, another rank than LEFT, has offered a slot
        came.append(mpiad.mpi_exchange(x, RIGHT, LEFT))
        sent = mpiad.mpi_isend(x, RIGHT, tag=3)
        came.append(mpiad.mpi_recv(x, MPI.ANY_SOURCE, tag=3))
        mpiad.mpi_wait(sent)
        if is_one_node():  # three are stored, and three loaded, or used in the slots that were offered
            assert memory.copies == 6 if length < 10 else 4 <= memory.copies < 6
        for y in came:
            np.testing.assert_array_equal(on_host(y), values(0, LEFT, length))
        del y, came
        assert pending() == 0


@several
def test_hosts_read_and_send_through_the_same_calls():
    with shared() as memory:
        x = values(0, length=7)
        y = on_device(x) if WORLD.rank % 2 else x
        copies = memory.copies
        for like in (np.zeros(7), on_device(np.zeros(7))):
            came = mpiad.mpi_exchange(y, RIGHT, LEFT, like=like)
            assert type(came) is type(like)
            np.testing.assert_array_equal(on_host(came), values(0, LEFT, 7))
            request = mpiad.mpi_irecv(like, LEFT, tag=1)
            mpiad.mpi_send(y, RIGHT, tag=1)
            np.testing.assert_array_equal(on_host(mpiad.mpi_wait(request)), values(0, LEFT, 7))
        assert not is_one_node() or memory.copies > copies or not (WORLD.rank % 2 or LEFT % 2)
        assert pending() == 0


@several
def test_the_first_arrays_are_staged_until_each_direction_was_tried():
    with shared(introduced=False) as memory:
        counts = []
        for k in range(4):
            came = mpiad.mpi_exchange(on_device(values(k)), RIGHT, LEFT)
            np.testing.assert_array_equal(on_host(came), values(k, LEFT))
            mpiad.mpi_barrier()
            counts.append(memory.copies)
        if is_one_node():
            node = device_messages.present().node
            assert counts[-1] - counts[-2] == 2 and node.boards[LEFT]["answers"][node.rank] == 1


@several
def test_a_rank_that_never_sends_is_sent_descriptors():
    """It has an arena, too, with which it reads; and one that has sent, but never received, reads nobody's."""
    with shared(introduced=False) as memory:
        x = on_device(values(0))
        for _ in range(4):
            if WORLD.rank == 0:
                mpiad.mpi_send(x, 1)
            if WORLD.rank == 1:
                np.testing.assert_array_equal(on_host(mpiad.mpi_recv(x, 0)), values(0, 0))
            mpiad.mpi_barrier()
        if is_one_node():
            assert (arena() is not None) == (WORLD.rank < 2)
            assert len(memory.opened) == (WORLD.rank == 1)


def refuse_flags(flag, value):
    raise RuntimeError("error 801")


@several
@pytest.mark.parametrize("way", ["broken", "full", "flags", "switched off"])
def test_whatever_is_missing_arrays_are_staged(way, caplog):
    """On the last rank: another reason there must not matter elsewhere."""
    last = WORLD.rank == WORLD.size - 1
    with shared(introduced=False) as memory:
        if last and way == "broken":
            memory.broken = "invalid device context"
        if last and way == "full":
            memory.limit = 0
        if last and way == "flags":
            memory.write = refuse_flags
        if way == "switched off":
            device_settings.put(DeviceSettings(cuda_aware=False, ipc=False))
        for k in range(4):
            x = on_device(values(k))
            np.testing.assert_array_equal(on_host(mpiad.mpi_exchange(x, RIGHT, LEFT)), values(k, LEFT))
            np.testing.assert_array_equal(on_host(mpiad.mpi_exchange(x, LEFT, RIGHT)), values(k, RIGHT))
            mpiad.mpi_barrier()
        if is_one_node():
            if last and way == "broken":
                assert "OSError: invalid device context; the stand-in is broken" in caplog.text
                assert device_messages.present().obstacles
            if last and way == "full":
                assert memory.released and "has no" in caplog.text
            if last and way == "flags":
                assert "RuntimeError: error 801" in caplog.text
            assert (memory.copies > 0) == (way != "switched off" and not (last and way == "flags"))


@several
def test_a_send_never_waits_so_the_arena_grows_and_is_used_again():
    with shared() as memory:
        length, count, used = 40_000, 30, []
        for _ in range(4):
            for k in range(count):
                mpiad.mpi_send(on_device(values(k, length=length)), RIGHT)
            mpiad.mpi_barrier()
            for k in range(count):
                came = mpiad.mpi_recv(on_device(np.zeros(length)), LEFT)
                np.testing.assert_array_equal(on_host(came), values(k, LEFT, length))
            del came
            if is_one_node():
                assert pending() == 0
                used.append(memory.used)
        if is_one_node():
            assert 8 * length * count <= used[0] and used[3] == used[2] <= 4 * 8 * length * count
            assert len(memory.blocks) < 8


@several
def test_blocks_larger_than_any_before_and_more_messages_than_flags():
    with shared():
        for length in (3, 500_000, 5):
            x = on_device(values(0, length=length))
            np.testing.assert_array_equal(on_host(mpiad.mpi_exchange(x, RIGHT, LEFT)), values(0, LEFT, length))
        if is_one_node():
            arena()._flags = arena()._flags[:3]  # a rank may have only so many messages under way
            arena()._numbers[:] = np.where(arena()._numbers, arena()._numbers, 0)
            x = [on_device(values(k)) for k in range(8)]
            for each in x:
                mpiad.mpi_send(each, RIGHT)  # the last five are staged
            for k in range(8):
                np.testing.assert_array_equal(on_host(mpiad.mpi_recv(x[0], LEFT)), values(k, LEFT))


@several
def test_repeated_exchanges_copy_once_into_slots_that_are_offered():
    """The results are arrays of the program, which keeps some; their slots are used again when it drops them."""
    with shared() as memory:
        double.memory.stream.late = 0.001
        kept, length, copies = [], 20_000, memory.copies
        for k in range(30):
            x = on_device(values(k, length=length))
            for there, back in ((RIGHT, LEFT), (LEFT, RIGHT)):
                y = mpiad.mpi_exchange(x, there, back)
                kept += [(y, values(k, back, length))] if k % 7 == 0 else []
                np.testing.assert_array_equal(on_host(y), values(k, back, length))
                y += 1  # it is the program's own
        for y, expected in kept:
            np.testing.assert_array_equal(on_host(y), expected + 1)
        if is_one_node():  # one copy of each array, and a second one if its receiver had offered too few slots
            assert memory.copies - copies <= 60 + 8 and memory.used <= 8 << 20
        del y, kept
        assert pending() == 0


def collectives(x):
    """Return the results of all collectives that know a device, of x with (size, 4) entries."""
    last = WORLD.size - 1
    return [
        mpiad.mpi_allreduce(x), mpiad.mpi_sum(x, last), mpiad.mpi_allgather(x), mpiad.mpi_gather(x, last),
        mpiad.mpi_allgather(x, axis=1), mpiad.mpi_gather(x[: WORLD.rank + 1], 0, axis=0), mpiad.mpi_alltoall(x),
        mpiad.mpi_reduce_scatter(x), mpiad.mpi_bcast(x, last), mpiad.mpi_scatter(x, last),
        mpiad.mpi_scatter(x, 0, axis=1, counts=[4] + [0] * last),
        mpiad.mpi_reduce_scatter(x, axis=1, counts=[0] * last + [4]),
    ]  # fmt: skip


@several
@pytest.mark.parametrize("mixed", [False, True])
def test_collectives_of_one_node_and_their_cotangents(mixed, size):
    """Bit for bit what they are on the host, of numbers whose sums are exact; or one rank's array is on the host."""
    x = np.random.default_rng(WORLD.rank).integers(-9, 9, size=(size, 4)) / 4
    on_host_alone = mixed and WORLD.rank == 0

    def loss(x):
        return sum(mpiad.device.to_host(np.sum(y * y)) if not on_host_alone else np.sum(y * y) for y in collectives(x))

    expected = collectives(x)
    slope = mpiad.grad(lambda x: sum(anp.sum(y * y) for y in collectives(x)), objective="sum")(x)
    with shared() as memory:
        y = x if on_host_alone else on_device(x)
        copies = memory.copies
        for found, right in zip(collectives(y), expected):
            assert on_host(found).tobytes() == np.asarray(right).tobytes()
        if is_one_node():
            assert (memory.copies > copies) is not mixed
        if not mixed:
            found = mpiad.grad(loss, objective="sum")(y)
            np.testing.assert_allclose(on_host(found), slope, rtol=1e-14)
        assert pending() == 0


@several
def test_collectives_introduce_ranks_and_compiled_functions_answer():
    x = np.arange(4000.0) + WORLD.rank
    expected = mpiad.mpi_allreduce(x)

    def fun(x):
        return mpiad.mpi_allreduce(2 * x) + mpiad.mpi_bcast(x) + anp.sum(mpiad.mpi_allgather(x))

    compiled, right = mpiad.jit(fun), fun(x)
    with shared(introduced=False) as memory:
        for _ in range(3):
            np.testing.assert_array_equal(on_host(mpiad.mpi_allreduce(on_device(x))), expected)
            mpiad.mpi_barrier()
        assert not is_one_node() or memory.copies >= 2 * (WORLD.size - 1)
        for _ in range(3):
            found = (compiled if WORLD.rank else fun)(x)  # one rank runs the function as it is
            np.testing.assert_allclose(found, right, rtol=1e-14)


@several
def test_offers_of_many_sizes_and_of_a_reset():
    comm = WORLD.Dup()
    mpiad.mpi_init(comm)
    with shared():
        for turn in range(3):
            for k in range(12):
                length = 5000 + 100 * k
                x = on_device(values(k, length=length))
                mpiad.mpi_send(x, RIGHT, comm=comm)
                if turn == 1:  # sent into a slot that was offered, and never received
                    continue
                came = mpiad.mpi_recv(x, LEFT, comm=comm)
                np.testing.assert_array_equal(on_host(came), values(k, LEFT, length))
                del came
            if turn == 1:
                mpiad.reset(comm)
            assert pending() == 0
    comm.Free()


@several
def test_another_size_is_an_error_and_its_slot_is_free():
    with shared():
        if WORLD.rank == 0:
            mpiad.mpi_send(on_device(values(0)), 1)
            mpiad.mpi_send(on_device(values(1, length=8)), 1)
            mpiad.mpi_send(np.zeros(8), 1)
            mpiad.mpi_send(on_device(values(2)), 1)
        if WORLD.rank == 1:
            with pytest.raises(ValueError, match="sent (488|more) bytes with tag 0"):
                mpiad.mpi_recv(on_device(np.zeros(60)), 0)
            with pytest.raises(ValueError, match="sent 64 bytes with tag 0"):
                mpiad.mpi_recv(on_device(np.zeros(61)), 0)
            with pytest.raises(ValueError, match="sent (64|more) bytes with tag 0"):
                mpiad.mpi_wait(mpiad.mpi_irecv(np.zeros(2), 0))
            np.testing.assert_array_equal(on_host(mpiad.mpi_recv(on_device(np.zeros(61)), 0)), values(2, 0))
        assert pending() == 0


@several
@pytest.mark.unguarded
def test_debug_mode_compares_the_arrays_not_the_descriptors():
    with shared() as memory, mpiad.debug.checked():
        x = on_device(values(0))
        copies = memory.copies
        np.testing.assert_array_equal(on_host(mpiad.mpi_exchange(x, RIGHT, LEFT)), values(0, LEFT))
        request = mpiad.mpi_irecv(x[:1], LEFT)
        mpiad.mpi_send(x[:1], RIGHT)
        np.testing.assert_array_equal(on_host(mpiad.mpi_wait(request)), values(0, LEFT)[:1])
        assert not is_one_node() or memory.copies == copies + 4
        if WORLD.rank == 0:
            mpiad.mpi_send(x, 1)
        if WORLD.rank == 1:
            with pytest.raises(mpiad.errors.MessageMismatchError, match=r"shape \(61,\), dtype float64, 488 bytes"):
                mpiad.mpi_recv(on_device(np.zeros(60)), 0)
        assert pending() == 0


@several
def test_a_reset_frees_the_slots_of_messages_that_nobody_received():
    comm = WORLD.Dup()
    mpiad.mpi_init(comm)
    with shared():
        for _ in range(3):
            mpiad.mpi_send(on_device(values(0)), RIGHT, comm=comm)
        request = mpiad.mpi_irecv(on_device(np.zeros(61)), LEFT, tag=5, comm=comm)
        mpiad.reset(comm)
        assert pending() == 0
        np.testing.assert_array_equal(
            on_host(mpiad.mpi_exchange(on_device(values(1)), RIGHT, LEFT, comm=comm)), values(1, LEFT)
        )
        del request
        assert pending() == 0
    comm.Free()


@several
def test_five_hundred_communicators():
    with shared() as memory:
        x = on_device(values(0))
        for k in range(500):
            comm = WORLD.Dup()
            mpiad.mpi_init(comm)
            if k % 50 == 0:
                np.testing.assert_array_equal(on_host(mpiad.mpi_exchange(x, RIGHT, LEFT, comm=comm)), values(0, LEFT))
            else:
                mpiad.mpi_send(x, RIGHT, comm=comm)
                mpiad.mpi_recv(x, LEFT, comm=comm)
            comm.Free()
        assert pending() == 0
        if is_one_node():
            assert len(memory.blocks) == 1


@several
def test_cotangents_travel_the_same_way():
    def loss(x):
        y = mpiad.mpi_exchange(x**2, RIGHT, LEFT)
        mpiad.mpi_send(y * x, LEFT, tag=1)
        z = mpiad.mpi_recv(x, RIGHT, tag=1)
        return mpiad.device.to_host(np.sum(z * y))

    x = np.linspace(0.5, 1, 70) + WORLD.rank
    with travelling("staged"):
        expected = on_host(mpiad.grad(loss, objective="sum")(on_device(x)))
    with shared() as memory:
        double.memory.stream.late = 0.002
        copies = memory.copies
        found = mpiad.grad(loss, objective="sum")(on_device(x))
        assert on_host(found).tobytes() == expected.tobytes()
        assert not is_one_node() or memory.copies == copies + 8
        assert pending() == 0


@several
def test_domains_exchange_faces_and_ghosts_so():
    domain = mpiad.Domain((8, 8, 6), halo=1, periodic=True)
    u = np.random.default_rng(WORLD.rank).normal(size=domain.local_shape)
    expected = domain.exchange(u)
    with shared() as memory:
        copies = memory.copies
        np.testing.assert_array_equal(on_host(domain.exchange(on_device(u))), expected)
        assert not is_one_node() or memory.copies > copies
        assert pending() == 0


@several
def test_compiled_functions_of_host_arrays_receive_what_they_know():
    """A rank whose compiled function has received from another one never gets its descriptors; or it isn't linked."""
    step = mpiad.jit(lambda x: mpiad.mpi_exchange(2 * x, RIGHT, LEFT) + x)
    with shared(introduced=False) as memory:
        for k in range(3):
            np.testing.assert_array_equal(step(values(k)), 2 * values(k, LEFT) + values(k))
        for _ in range(3):
            assert type(mpiad.mpi_exchange(on_device(values(0)), RIGHT, LEFT)) is DeviceArray
            mpiad.mpi_barrier()
        np.testing.assert_array_equal(step(values(9)), 2 * values(9, LEFT) + values(9))
        assert memory.copies <= WORLD.size
    again = mpiad.jit(lambda x: mpiad.mpi_exchange(3 * x, RIGHT, LEFT) + x)
    with shared():
        for length in (61, 2):
            for k in range(3):
                x = values(k, length=length)
                np.testing.assert_array_equal(again(x), 3 * values(k, LEFT, length) + x)
        # The neighbor sends from its device what this rank's compiled function receives.
        x = values(5, length=2)
        if WORLD.rank % 2 or WORLD.size % 2:
            np.testing.assert_array_equal(again(x), 3 * values(5, LEFT, 2) + x)
        else:
            came = mpiad.mpi_exchange(on_device(3 * x), RIGHT, LEFT, like=np.zeros(2))
            np.testing.assert_array_equal(came, 3 * values(5, LEFT, 2))


@several
@pytest.mark.unguarded
@pytest.mark.parametrize("why", ["dead", "ended", "deadline"])
def test_a_wait_for_what_never_comes_ends_and_the_communicator_raises(why, caplog):
    comm = WORLD.Dup()
    mpiad.mpi_init(comm)
    with shared() as memory:
        if not is_one_node() or WORLD.size != 2:
            comm.Free()
            return
        node = device_messages.present().node
        gate = os.pipe()
        if WORLD.rank == 1:
            memory.stream.put(lambda: os.read(gate[0], 1))  # its device does nothing from now on
            mpiad.mpi_send(on_device(values(0)), 0, comm=comm)
        settings = mpiad.debug.checked(timeout=0.5) if why == "deadline" else shared_nothing()
        if WORLD.rank == 1 and why == "dead":
            fcntl.lockf(node._file, fcntl.LOCK_UN, 1, 1)  # as if its process had ended
        if WORLD.rank == 1 and why == "ended":
            time.sleep(0.2)
            device_messages.release_waits()
        with settings:
            if WORLD.rank == 0:
                x = mpiad.mpi_recv(on_device(np.zeros(61)), 1, comm=comm)
                before = time.monotonic()
                on_host(x)  # waits for the device
                assert time.monotonic() - before < 10
                time.sleep(0.3)
                with pytest.raises(mpiad.errors.UnfinishedMessagesError, match="rank 1"):
                    mpiad.mpi_send(x, 1, comm=comm)
            WORLD.Barrier()
        os.write(gate[1], b" ")
        double.synchronize()
        WORLD.Barrier()
        if why == "ended":
            node.packed[node.rank] = 0
            arena()._reclaim()
        if WORLD.rank == 1 and why == "dead":
            node._lock(1)
        mpiad.reset(comm)
        np.testing.assert_array_equal(
            on_host(mpiad.mpi_exchange(on_device(values(1)), RIGHT, LEFT, comm=comm)), values(1, LEFT)
        )
        if why != "ended":
            assert pending() == 0
    comm.Free()


@contextmanager
def shared_nothing():
    yield


@several
def test_a_host_that_waits_for_what_never_comes_raises():
    with shared() as memory:
        if not is_one_node() or WORLD.size != 2:
            return
        node = device_messages.present().node
        gate = os.pipe()
        if WORLD.rank == 1:
            memory.stream.put(lambda: os.read(gate[0], 1))
            mpiad.mpi_send(on_device(values(0)), 0)
            time.sleep(0.2)
            fcntl.lockf(node._file, fcntl.LOCK_UN, 1, 1)
        else:
            with pytest.raises(mpiad.errors.UnfinishedMessagesError, match="rank 1 has"):
                mpiad.mpi_recv(np.zeros(61), 1)
        WORLD.Barrier()
        os.write(gate[1], b" ")
        double.synchronize()
        WORLD.Barrier()
        if WORLD.rank == 1:
            node._lock(1)
        mpiad.reset()


@several
def test_forks_are_refused():
    with shared():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                mpiad.mpi_send(on_device(values(0)), RIGHT)
            except mpiad.errors.CommunicatorError as error:
                code = 0 if "forked" in str(error) else 2
            os.kill(os.getpid(), signal.SIGSEGV if code else signal.SIGKILL)  # without functions at exit
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL


@several
@pytest.mark.parametrize("way", ["shared", "broken", "off"])
def test_the_report_names_the_way_and_why_it_is_another(way, monkeypatch):
    environment = importlib.import_module("mpiad.debug.environment")
    monkeypatch.setattr(environment, "selected_arrays", lambda: double)
    monkeypatch.setattr(environment, "_LARGE_ARRAY", 1 << 20)
    before = device_settings.put(DeviceSettings(cuda_aware=False, ipc=way != "off"))
    with sharing(introduced=False) as memory:
        memory.broken = "invalid device context" if way == "broken" else ""
        found = environment.device_messages_of(lookup.channel(None, "test"))
    device_settings.put(before)
    one_node = mpiad.mpi_allreduce(int(base().Split_type(MPI.COMM_TYPE_SHARED).size == WORLD.size), op=MPI.MIN)
    expected = {"shared": "CUDA IPC; ", "broken": "staged (OSError: invalid device context; the stand-in is broken); ",
                "off": "staged (MPIAD_CUDA_IPC=0); "}[way]  # fmt: skip
    assert found.startswith(expected) or not one_node
    assert re.search(r"[\d.e+-]+ GB/s, [\d.e+-]+ µs from rank 0 to 1$", found)


@several
@pytest.mark.parametrize("why", ["equal", "folder", "memory"])
def test_a_node_whose_ranks_cannot_share_memory_is_named(why, monkeypatch, tmp_path, caplog):
    if why == "equal":
        monkeypatch.setattr(node_memory.os, "getpid", lambda: 7)
    elif why == "folder":
        monkeypatch.setattr(node_memory, "_FOLDER", tmp_path / "none")
    elif WORLD.rank == WORLD.size - 1:  # another /dev/shm

        def refuse(*args):
            raise FileNotFoundError(2, "No such file or directory")

        monkeypatch.setattr(node_memory.os, "open", refuse)
    node = base().Split_type(MPI.COMM_TYPE_SHARED)
    device_messages.start(node, world_ranks(node), True)
    found = device_messages.present()
    device_messages.close()
    monkeypatch.undo()
    if node.size == WORLD.size:
        text = {"equal": "ranks have equal process numbers (7), in separate PID namespaces", "folder": "has no memory for",
                "memory": "the ranks don't share /dev/shm (No such file or directory)"}[why]  # fmt: skip
        assert found is None and text in caplog.text
    node.Free()


@pytest.mark.serial
def test_extents_are_joined_again():
    rng, block, used = np.random.default_rng(0), Block(0, 1 << 16), []
    for _ in range(3000):
        if used and rng.random() < 0.5:
            block.give_back(*used.pop(int(rng.integers(len(used)))))
        elif (start := block.take(size := 512 * int(rng.integers(1, 9)))) is not None:
            assert all(end <= start or start + size <= begin for begin, end in used)
            used.append((start, start + size))
        taken = sum(end - start for start, end in used)
        assert sum(end - start for start, end in block.unused) + taken == 1 << 16
        assert all(a[1] < b[0] for a, b in zip(block.unused, block.unused[1:]))
    for extent in used:
        block.give_back(*extent)
    assert block.unused == [(0, 1 << 16)]


TESTS = Path(__file__).parents[2]
BESIDE_THE_STAND_IN = {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}
LEFT_ALONE = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import mpiad
from device_double import double, on_device, on_host
from device_ways import sharing
rank, how = MPI.COMM_WORLD.rank, sys.argv[1]
mpiad.mpi_init()
shared = sharing()
memory = shared.__enter__()
x = on_device(np.arange(5000.0))
for _ in range(3):
    x = mpiad.mpi_exchange(x, 1 - rank, 1 - rank)
if rank == 1:
    memory.stream.put(lambda: time.sleep(60))
    mpiad.mpi_send(x, 0)
    time.sleep(0.5)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("on purpose")
y = mpiad.mpi_recv(x, 1)
print("waiting", flush=True)
on_host(y)
mpiad.mpi_recv(x, 1)
"""


@pytest.mark.launches
@pytest.mark.limit(120)
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_is_killed_or_raises_ends_the_job_and_leaves_nothing(mpirun, how):
    before = {path.name for path in Path("/dev/shm").glob("mpiad-*") if path.is_file()}
    start = time.monotonic()
    done = mpirun(2, LEFT_ALONE, how, timeout=60, env=BESIDE_THE_STAND_IN)
    assert done.returncode != 0 and time.monotonic() - start < 30 * slowdown()
    assert how == "killed" or "waiting" in done.stdout
    assert how == "killed" or "ZeroDivisionError: on purpose" in done.stderr
    assert {path.name for path in Path("/dev/shm").glob("mpiad-*") if path.is_file()} <= before


MEASURED = """
import sys
import mpiad
mpiad.mpi_init()
sys.path.insert(0, "benchmarks")
import device_messages
from device_on_cpu import double
from device_ways import sharing
with sharing(introduced=False):
    found = device_messages.measure(double, 1 << 18, 8, 2)
assert len(found) == 15 and all(seconds > 0 for seconds in found.values())
"""


@pytest.mark.launches
@pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++")
def test_the_benchmark_runs(mpirun):
    done = mpirun(2, MEASURED, cwd=Path(__file__).parents[3], env=BESIDE_THE_STAND_IN)
    assert done.returncode == 0 and "mpi_exchange, shared" in done.stdout, done.stdout + done.stderr
