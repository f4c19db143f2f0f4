"""The map from sources to observations, beside a dense matrix that one process makes by stepping in NumPy."""

import autograd.numpy as anp
import numpy as np
import pytest
from driven_wave import CELLS, SENSORS, SHAPE, N, distributed, matrix, observed, whole

import mpiad
from mpiad.inverse import ShiftInvariantMap
from mpiad.testing import check_adjoint, check_grads

PRODUCT = 1e-12  # relative error of products


@pytest.fixture(scope="module")
def wave():
    domain = mpiad.Domain(SHAPE)
    return domain, ShiftInvariantMap(*distributed(SENSORS, domain), interval=2), *matrix(SENSORS)


def sources(seed, *lead):
    return np.random.default_rng(seed).standard_normal((*lead, N, *SHAPE))


def test_products(wave):
    domain, F, dense, offset = wave
    m = sources(1, 2)
    expected = (m.reshape(2, -1) @ dense.T).reshape(2, N, 3)
    np.testing.assert_allclose(F(m[(..., *domain.owned)]), expected, rtol=0, atol=PRODUCT * np.abs(expected).max())
    np.testing.assert_allclose(F.offset.ravel(), offset, rtol=0, atol=PRODUCT * np.abs(offset).max())
    d = np.random.default_rng(2).standard_normal((3, N, 3))
    expected = (d.reshape(3, -1) @ dense).reshape(3, N, *SHAPE)
    np.testing.assert_allclose(whole(domain, F.T(d)), expected, rtol=0, atol=PRODUCT * np.abs(expected).max())


def test_observations_are_those_of_the_loop(wave):
    domain, F, *_ = wave
    m = sources(3)
    np.testing.assert_allclose(F(m[(..., *domain.owned)]) + F.offset, observed(m, SENSORS), rtol=0, atol=1e-11)


def test_source_at_the_start_is_not_part_of_the_offset():
    domain = mpiad.Domain(SHAPE)
    step, observe, u0, source, n = distributed(SENSORS, domain)
    F = ShiftInvariantMap(step, observe, u0, source + 2.0, n, interval=2)
    np.testing.assert_allclose(F.offset, observed(0.0 * sources(1), SENSORS), rtol=0, atol=1e-11)


def test_derivatives(wave, rank):
    domain, F, dense, _ = wave
    m = sources(4)
    check_adjoint(F, m[(..., *domain.owned)])
    check_grads(lambda m: anp.sum(anp.tanh(F(m)) ** 2) * (1.0 + rank), 0.1 * m[(..., *domain.owned)])
    d = np.random.default_rng(5).standard_normal((N, 3))
    gradient = mpiad.grad(lambda m: anp.sum(anp.sin(F(m)) * d), objective="root")(m[(..., *domain.owned)])
    expected = (dense.T @ (np.cos(dense @ m.ravel()) * d.ravel())).reshape(N, *SHAPE)
    np.testing.assert_allclose(whole(domain, gradient), expected, rtol=0, atol=1e-10)
    local = mpiad.grad(lambda d: domain.sum(F.T(d) ** 2 / 2), objective="root")(d)
    expected = (dense @ (dense.T @ d.ravel())).reshape(N, 3)
    total = mpiad.mpi_allreduce(local)  # of all copies of d
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_panels_of_sensors(wave, monkeypatch):
    domain, F, *_ = wave
    monkeypatch.setattr("mpiad.inverse.shift_invariant_map._PANEL_BYTES", 8 * N * CELLS)
    one_by_one = ShiftInvariantMap(*distributed(SENSORS, domain), interval=2)
    m = sources(6)[(..., *domain.owned)]
    np.testing.assert_allclose(one_by_one(m), F(m), rtol=0, atol=1e-13 * np.abs(F(m)).max())


@pytest.mark.parametrize(
    ("step", "observe"),
    [
        (lambda u, k, m: anp.sin(u) + m, lambda u: mpiad.mpi_bcast(u)),
        (lambda u, k, m: 0.5 * u + m * (1.0 + 0.1 * k), lambda u: mpiad.mpi_bcast(u)),
        (lambda u, k, m: 0.5 * u + m * m, lambda u: mpiad.mpi_bcast(u)),
        (lambda u, k, m: 0.5 * u + m, lambda u: mpiad.mpi_bcast(u) ** 2),
        (lambda u, k, m: u / anp.abs(m), lambda u: mpiad.mpi_bcast(u)),
    ],
    ids=["state", "time", "source", "observation", "not a number"],
)
def test_maps_that_are_not_linear(step, observe):
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=r"deviates from F m \+ d₀ by .* must be linear"):
        ShiftInvariantMap(step, observe, np.ones(1), np.zeros(1), 3)


def test_terms_that_do_not_depend_on_state_and_source():
    F = ShiftInvariantMap(lambda u, k, m: 0.5 * u + m + k, lambda u: mpiad.mpi_bcast(u) + 3.0, np.ones(1), np.zeros(1), 3)
    np.testing.assert_allclose(F.offset[:, 0], [3.5, 4.25, 5.625])


@pytest.mark.parametrize(("state", "source"), [("f4", "f4"), ("f8", "f4"), ("f4", "f8")])
@pytest.mark.parametrize("size_of_start", [0.0, 100.0])
def test_single_precision(state, source, size_of_start, rank, size):
    """Against a dense matrix in double precision; each rank has a source, and a copy of the whole state."""
    n, rng = 60, np.random.default_rng(8)
    a = np.linalg.qr(rng.standard_normal((3, 3)))[0].astype("f4")
    b, start = rng.standard_normal((3, size)).astype("f4"), (size_of_start * rng.standard_normal(3)).astype(state)

    def step(u, k, m):
        assert mpiad.stop_gradient(m).dtype == source
        return (anp.dot(a.astype(state), u) + mpiad.mpi_allreduce(b[:, rank] * m)).astype(state)

    make = lambda step: ShiftInvariantMap(step, lambda u: mpiad.mpi_bcast(u[:2]), start, np.zeros(1, source), n)  # noqa: E731
    F = make(step)
    powers = [np.linalg.matrix_power(a.astype(float), k) @ b for k in range(n)]
    zero = np.zeros((2, size))
    dense = np.block([[powers[i - j][:2] if i >= j else zero for j in range(n)] for i in range(n)])
    m = rng.standard_normal((n, size)).astype(source)
    expected = (dense @ m.ravel()).reshape(n, 2)
    np.testing.assert_allclose(F(m[:, rank : rank + 1]), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    d = rng.standard_normal((n, 2))
    expected = (dense.T @ d.ravel()).reshape(n, size)
    np.testing.assert_allclose(F.T(d)[:, 0], expected[:, rank], rtol=0, atol=2e-5 * np.abs(expected).max())
    with pytest.raises(ValueError, match=r"deviates from F m \+ d₀ by .* must be linear"):
        make(lambda u, k, m: step(u, k, m + np.float32(0.2) * anp.abs(m)))


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("is_jitted", [True, False])
def test_many_maps_in_one_process(interval, is_jitted, rank, caplog):
    """Each has functions of its own: jitted steps are compiled in all maps, and messages name the user's functions."""
    with caplog.at_level("INFO", "mpiad"):
        for factor in np.arange(10.0) / 10:
            jitted = mpiad.jit(lambda u, k, m, factor=factor: factor * u + m)
            used = jitted if is_jitted else lambda u, k, m, jitted=jitted: jitted(u, k, m)
            F = ShiftInvariantMap(used, lambda u: mpiad.mpi_bcast(u), np.ones(1), np.zeros(1), 20, interval=interval)
            impulse = np.zeros((20, 1))
            impulse[0] = rank == 0
            total = sum(factor**k for k in range(interval))
            np.testing.assert_allclose(F(impulse)[:, 0], total * factor ** (interval * np.arange(20.0)), atol=1e-12)
    texts = [record.getMessage() for record in caplog.records if "isn't compiled" in record.getMessage()]
    assert not is_jitted or not texts
    for text in texts:
        assert "shift_invariant_map.py" not in text.replace("test_shift_invariant_map.py", "")


def test_invalid_arguments(rank, size):
    step, observe, zero = (lambda u, k, m: u + m), (lambda u: mpiad.mpi_bcast(u)), np.zeros(1)
    for n, interval in ((0, 1), (2.0, 1), (True, 1), (2, 0)):
        with pytest.raises(ValueError, match="must be an integer above zero"):
            ShiftInvariantMap(step, observe, zero, zero, n, interval=interval)
    with pytest.raises(TypeError, match="source must be an array of real floats"):
        ShiftInvariantMap(step, observe, zero, np.zeros(1, int if rank == size - 1 else complex), 2)
    with pytest.raises(ValueError, match="a vector of the sensors' values"):
        ShiftInvariantMap(step, lambda u: mpiad.mpi_bcast(u[0]), zero, zero, 2)
    F = ShiftInvariantMap(step, observe, zero, zero, 2)
    with pytest.raises(ValueError, match=r"m must be an array of shape \(\.\.\., \*\(2, 1\)\), but got shape \(3, 1\)"):
        F(np.zeros((3 if rank == size - 1 else 2, 1)) if size > 1 else np.zeros((3, 1)))
    with pytest.raises(ValueError, match="d must be an array"):
        F.T(np.zeros((2, 2)))
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            ShiftInvariantMap(step, observe, zero, zero, 2 + rank)
        with pytest.raises(ValueError, match="sensors"):
            ShiftInvariantMap(step, lambda u: np.concatenate([u] * (1 + rank)), zero, zero, 2)
