"""Loops over several threads: the same bits as on one, and never more threads than the rank has cores."""

import threading

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import forget_programs
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain
from mpiad.programs import overlap, replay
from mpiad.transport import resources

SHAPE = (620, 510)


def loss_on(domain):
    """Return a loss with exchanges, loops with edges, and sums."""

    def loss(u):
        for boundary in ("edge", "zero"):
            v = domain.exchange(u, boundary=boundary)
            u = u + 0.1 * anp.sin(v[2:, 1:-1] * v[:-2, 1:-1] - v[1:-1, 2:]) + anp.pad(u[1:] / 3, ((0, 1), (0, 0)))
        return anp.sum(u * u)

    return loss


@pytest.fixture
def as_if_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for module in (overlap, overlap):
        monkeypatch.setattr(module, "LARGE", 1 << 18)
    return lambda count: monkeypatch.setattr(resources, "_share", count)


@pytest.mark.serial
def test_the_number_of_threads_changes_no_bit(as_if_threads, monkeypatch):
    domain, seen = Domain(SHAPE, periodic=(True, False)), []
    loss = mpiad.value_and_grad(loss_on(domain))
    together = overlap.run_together

    def run(kernel, blocks):
        seen.append(len(blocks))
        together(kernel, blocks)

    monkeypatch.setattr(replay, "run_together", run)
    u = np.random.default_rng(5).standard_normal(SHAPE)
    found = {}
    for count in (1, 2, 3, 5):
        as_if_threads(count)
        forget_programs()
        jitted = mpiad.jit(loss, strict=True)
        jitted(u)
        found[count] = jitted(u)
        assert set(seen) == ({count} if count > 1 else set())
        seen.clear()
    value, gradient = loss(u)
    np.testing.assert_allclose(found[1][0], value, rtol=1e-12)
    np.testing.assert_allclose(found[1][1], gradient, rtol=1e-11, atol=1e-11)
    for made in found.values():
        assert made[0] == found[1][0]
        np.testing.assert_array_equal(made[1], found[1][1])


@pytest.mark.serial
def test_threads_of_the_user_that_compute_at_the_same_time(as_if_threads):
    as_if_threads(2)
    jitted = mpiad.jit(lambda u: anp.sqrt(u) * 2.0 + u, strict=True)
    arrays = [np.full(SHAPE, float(k * k)) for k in range(1, 5)]
    jitted(arrays[0])
    wrong = []

    def work(k):
        for _ in range(20):
            if not (jitted(arrays[k - 1]) == 2 * k + k * k).all():
                wrong.append(k)

    users = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong


@pytest.mark.serial
@pytest.mark.parametrize(
    ("ranks", "wanted", "expected"), [(1, None, 8), (3, None, 2), (16, None, 1), (2, "2", 2), (4, "6", 2), (2, "1", 1)]
)
def test_a_rank_takes_its_share_of_the_cores(ranks, wanted, expected, monkeypatch):
    monkeypatch.setattr(resources, "_share", 1)
    monkeypatch.setattr(resources, "cores", lambda: set(range(8)))
    monkeypatch.setattr(resources, "_limited", lambda ranks: None)
    if wanted is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert resources.loop_threads() == 1  # before it is known who shares the node
    resources.limit_threads(MPI.COMM_SELF, ranks)
    assert resources.loop_threads() == expected
