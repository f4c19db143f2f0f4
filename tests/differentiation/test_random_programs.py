"""120 random programs on several ranks, 30 on one: value, gradient, tangent and second order against one process.

A few of them are jitted. `make fuzz` runs more, and finds the smallest that fails.
"""

import pytest
from agreement import poll
from device_ways import travelling
from mpi4py import MPI
from programs import on_devices, on_ranks
from programs.comparison import differences
from programs.drawing import drawn
from programs.steps import script

from mpiad.primitives import catalogue
from mpiad.primitives.operation import communicate

BATCHES, EACH = 8, 15


def programs(size, seed, count=EACH, compiled=("none",), falling_back=False):
    """Return the same programs on all ranks: rank 0 draws them."""
    world = MPI.COMM_WORLD
    found = drawn(size, count, seed, compiled, falling_back) if world.rank == 0 else None
    poll(world.Ibarrier(), None)  # the others leave the cores to rank 0
    return world.bcast(found)


def checked(program):
    try:
        return differences(program)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n\n{script(program)}") from error


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(BATCHES))
def test_random_programs(seed, size):
    if size == 1 and seed > 1:
        return  # messages to oneself
    found = [(program, checked(program)) for program in programs(size, seed)]
    wrong = [f"{script(program)}\n" + "\n".join(lines) for program, lines in found if lines]
    assert not wrong, "\n\n".join(wrong)
    assert sum(lines is None for _, lines in found) <= EACH // 5, "too many programs that the reference can't decide"


@pytest.mark.one_rank
@pytest.mark.interpreted  # but for what they jit: some ranks would evaluate twice, and others once
def test_random_programs_that_are_jitted(size, request):
    """On all ranks, and on some among others that aren't; `make fuzz` runs many more."""
    count = 25 if request.config.getoption("thorough") else 4
    found = [(program, checked(program)) for program in programs(size, BATCHES + 3, count, ("some", "all"))]
    wrong = [f"{script(program)}\n" + "\n".join(lines) for program, lines in found if lines]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.thorough
@pytest.mark.interpreted
def test_random_programs_in_which_ranks_leave_their_traces(size, request):
    """At any place, after whatever communicates: they make all communications of the others, backwards too."""
    count = 60 if request.config.getoption("thorough") else 2
    found = [(program, checked(program)) for program in programs(size, BATCHES + 4, count, ("some", "all"), True)]
    wrong = [f"{script(program)}\n" + "\n".join(lines) for program, lines in found if lines]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("seed, way", [(BATCHES, "staged"), (BATCHES + 2, "direct"), (BATCHES + 5, "shared")])
def test_random_programs_on_devices(seed, way, size, monkeypatch):
    """What is communicated lies on devices; the same programs, against the same reference."""
    monkeypatch.setattr(on_ranks, "mpiad", on_devices.calls())
    with travelling(way):
        found = [(program, checked(program)) for program in programs(size, seed, EACH // 2)]
    wrong = [f"{script(program)}\n" + "\n".join(lines) for program, lines in found if lines]
    assert not wrong, "\n\n".join(wrong)


def is_found(size):
    """Whether some program, of those above, comes out differently on some rank."""
    for seed in range(BATCHES):
        wrong = [bool(checked(program)) for program in programs(size, seed)]
        if any(map(any, MPI.COMM_WORLD.allgather(wrong))):
            return True
    return False


@pytest.mark.few(1)
@pytest.mark.one_rank
@pytest.mark.parametrize("name", ["REDUCE_SCATTER", "ALLTOALL"])
def test_a_wrong_adjoint_is_found(name, size, monkeypatch):
    operation = getattr(catalogue, name)
    right = operation.adjoint

    def adjoint(*args):
        vjp = right(*args)
        return lambda g: 2 * vjp(g)

    monkeypatch.setattr(operation, "adjoint", adjoint)
    assert is_found(size)


def test_a_cotangent_that_is_lost_on_the_way_back_is_found(size, monkeypatch):
    def adjoint(ans, x, p):
        return lambda g: g if p is None else g + 0 * communicate(catalogue.RECV, None, received(ans, p))

    def received(ans, p):
        return catalogue.Receiving(catalogue.Spec(ans.shape, ans.dtype), p.back())

    monkeypatch.setattr(catalogue.SEND, "adjoint", adjoint)
    assert is_found(size)
