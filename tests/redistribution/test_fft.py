"""Distributed Fourier transforms against scipy.fft of the whole array; local ones by ducc0 and by scipy.fft."""

from __future__ import annotations

import itertools
import math

import autograd.numpy as anp
import ducc0
import numpy as np
import pytest
import scipy.fft
import scipy.signal

import mpiad
from mpiad.fft import DistributedFFT
from mpiad.programs.replay import Replay
from mpiad.redistribution import fft as implementation
from mpiad.testing import check_adjoint, check_grads
from mpiad.timestepping import scan

NORMS = ("backward", "ortho", "forward")
# shape, axes
CASES = [
    ((72,), None),
    ((60,), None),
    ((8, 12), None),
    ((11, 7), (1, 0)),
    ((7, 6), 0),
    ((12, 9), (-1,)),
    ((6, 7, 9), None),
    ((5, 6, 8), (2, 0, 1)),
    ((2, 6, 8), None),
    ((4, 5, 8), (0, 1)),
    ((6, 4, 7), (2, 1)),
    ((5, 4, 6), (1,)),
]
each_case = pytest.mark.parametrize(("shape", "axes"), CASES, ids=str)
each_kind = pytest.mark.parametrize("real", [True, False], ids=["real", "complex"])
each_norm = pytest.mark.parametrize("norm", NORMS)

pytestmark = pytest.mark.also_on(4)


@pytest.fixture(params=["ducc0", "scipy"])
def library(request, monkeypatch):
    """The library of the local transforms; by default it is ducc0, since this is installed."""
    assert implementation._ducc() is ducc0.fft
    if request.param == "scipy":
        monkeypatch.setattr(implementation, "_ducc", lambda: None)


by_both = pytest.mark.usefixtures("library")


def random(rank_rng, shape, dtype, number=0):
    """Return the same array on all ranks."""
    rng = rank_rng(100 + number)
    array = rng.standard_normal(shape)
    return (array + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else array).astype(dtype)


def transformed_axes(shape, axes):
    return tuple(range(len(shape))) if axes is None else (axes,) if isinstance(axes, int) else axes


def forward(u, real, norm, axes, ndim):
    """Return the modes by scipy.fft; earlier axes are batches."""
    axes = [axis % ndim - ndim for axis in axes]
    return (scipy.fft.rfftn if real else scipy.fft.fftn)(u, axes=axes, norm=norm)


def backward(modes, shape, real, norm, axes):
    lengths, negative = [shape[axis] for axis in axes], [axis % len(shape) - len(shape) for axis in axes]
    if real:
        return scipy.fft.irfftn(modes, lengths, negative, norm)
    return scipy.fft.ifftn(modes, axes=negative, norm=norm)


@pytest.mark.few(24)
@by_both
@each_norm
@each_kind
@each_case
def test_values(rank_rng, shape, axes, real, norm):
    fft = DistributedFFT(shape, axes=axes, real=real, norm=norm)
    among = transformed_axes(shape, axes)
    u = random(rank_rng, (2, *shape), fft.dtype)
    expected = forward(u, real, norm, among, len(shape))
    assert fft.spectral_shape == expected.shape[1:] and fft.physical_shape == shape
    part, spectral = (slice(None), *fft.owned), (slice(None), *fft.owned_spectral)
    modes = fft.forward(u[part])
    assert modes.dtype == fft.spectral_dtype and modes.shape == (2, *fft.local_spectral_shape)
    np.testing.assert_allclose(modes, expected[spectral], 1e-12, 1e-12)
    np.testing.assert_allclose(fft.forward(u[0][fft.owned]), modes[0], 1e-13, 1e-13)  # without a batch
    arbitrary = random(rank_rng, expected.shape, complex, 1)  # not the modes of a real array
    values = fft.backward(arbitrary[spectral])
    assert values.dtype == fft.dtype and values.shape == (2, *fft.local_shape)
    np.testing.assert_allclose(values, backward(arbitrary, shape, real, norm, among)[part], 1e-12, 1e-12)


@pytest.mark.few(12)
@each_kind
@each_case
def test_the_parts_of_the_ranks_are_the_whole(size, shape, axes, real):
    fft = DistributedFFT(shape, axes=axes, real=real)
    for part, whole in (fft.owned, shape), (fft.owned_spectral, fft.spectral_shape):
        count = np.zeros(whole)
        count[part] = 1
        np.testing.assert_array_equal(mpiad.mpi_allreduce(count), 1)
    if len(shape) > 1 and size <= 4:
        assert min(fft.local_shape) > 0


@pytest.mark.not_on(4)
@by_both
@each_kind
def test_single_precision(rank_rng, real):
    for shape in (72,), (9, 10), (6, 7, 8):
        fft = DistributedFFT(shape, real=real, dtype=np.float32)
        u = random(rank_rng, shape, fft.dtype)
        modes = fft.forward(u[fft.owned])
        assert fft.dtype == (np.float32 if real else np.complex64) and modes.dtype == np.complex64
        expected = forward(u.astype(complex if not real else float), real, "backward", range(len(shape)), len(shape))
        np.testing.assert_allclose(modes, expected[fft.owned_spectral], 1e-4, 1e-4)
        values = fft.backward(modes)
        assert values.dtype == fft.dtype
        np.testing.assert_allclose(values, u[fft.owned], 1e-4, 1e-5)
        check_adjoint(fft.forward, u[fft.owned])
        check_adjoint(fft.backward, modes)


def transposes(fft, real, axes):
    """Return the transposes of both transforms of whole arrays, as functions, from dense matrices."""
    shape, modes = fft.shape, fft.spectral_shape
    points, numbers = np.eye(np.prod(shape)).reshape(-1, *shape), np.eye(np.prod(modes)).reshape(-1, *modes)
    to_modes = forward(points, real, "backward", axes, len(shape)).reshape(len(points), -1)
    of_real, of_imaginary = (
        backward(unit * numbers, shape, real, "backward", axes).reshape(len(numbers), -1) for unit in (1, 1j)
    )

    def of_forward(g):
        found = (to_modes @ g.ravel()).reshape(shape)
        return found.real if real else found

    def of_backward(g):
        # The cotangent of a + ib is that of a minus i times that of b.
        g = g.ravel()
        found = of_real @ g - 1j * (of_imaginary @ g) if real else of_real @ g
        return found.reshape(modes)

    return of_forward, of_backward


@pytest.mark.few(12)
@by_both
@each_kind
@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0,)], ids=str)
@pytest.mark.parametrize("lengths", [(10, 12), (11, 13), (12, 11), (13, 10)], ids=str)
def test_adjoints_are_the_dense_transposes(rank_rng, lengths, axes, real):
    fft = DistributedFFT(lengths, axes=axes, real=real)
    of_forward, of_backward = transposes(fft, real, axes)
    u, g = random(rank_rng, lengths, fft.dtype), random(rank_rng, fft.spectral_shape, complex, 1)
    pull, _ = mpiad.make_vjp(fft.forward)(u[fft.owned])
    found = pull(g[fft.owned_spectral])
    assert found.dtype == fft.dtype
    np.testing.assert_allclose(found, of_forward(g)[fft.owned], 1e-12, 1e-12)
    pull, _ = mpiad.make_vjp(fft.backward)(g[fft.owned_spectral])
    found = pull(u[fft.owned])
    assert found.dtype == fft.spectral_dtype
    np.testing.assert_allclose(found, of_backward(u)[fft.owned_spectral], 1e-12, 1e-12)


@pytest.mark.few(9)
@by_both
@each_kind
@pytest.mark.parametrize("padding", [None, 1.5])
@pytest.mark.parametrize("n", range(1, 10))
def test_dot_products_of_each_length(n, padding, real):
    shape = (8, n, 8)
    for axes in (1,), (0, 1), (0, 2, 1):
        fft = DistributedFFT(shape, axes=axes, real=real, padding=padding)
        check_adjoint(fft.forward, np.zeros(fft.local_shape, fft.dtype))
        check_adjoint(fft.backward, np.zeros(fft.local_spectral_shape, fft.spectral_dtype))


@each_kind
@pytest.mark.parametrize("n", [36, 60, 100, 81, 49])
def test_dot_products_of_divided_lines(size, n, real):
    if size > (4 if n > 50 else 3):
        pytest.skip("too few lines")
    fft = DistributedFFT(n, real=real)
    check_adjoint(fft.forward, np.zeros(fft.local_shape, fft.dtype))
    check_adjoint(fft.backward, np.zeros(fft.local_spectral_shape, complex))


@pytest.mark.each_value
@each_kind
@pytest.mark.parametrize("n", [4, 6, 9, 12, 15, 16, 20, 25])
def test_short_divided_lines(rank_rng, size, n, real):
    """Each length that is the product of two factors of at least the number of ranks, even if some ranks have no modes."""
    if size > 1 and not any(n % rows == 0 for rows in range(size, math.isqrt(n) + 1)):
        with pytest.raises(ValueError, match="two factors of at least"):
            DistributedFFT(n, real=real)
        return
    fft = DistributedFFT(n, real=real)
    u, g = random(rank_rng, (n,), fft.dtype), random(rank_rng, fft.spectral_shape, complex, 1)
    modes = forward(u, real, "backward", (0,), 1)
    found = fft.forward(u[fft.owned])
    assert found.shape == fft.local_spectral_shape
    np.testing.assert_allclose(found, modes[fft.owned_spectral], 1e-12, 1e-12)
    np.testing.assert_allclose(fft.backward(found), u[fft.owned], 1e-12, 1e-12)
    np.testing.assert_allclose(mpiad.mpi_allgather(fft.wavenumbers()[0], axis=0), fft_numbers(n, real), 1e-15)
    of_forward, of_backward = transposes(fft, real, (0,))
    pull, _ = mpiad.make_vjp(fft.forward)(u[fft.owned])
    np.testing.assert_allclose(pull(g[fft.owned_spectral]), of_forward(g)[fft.owned], 1e-12, 1e-12)
    pull, _ = mpiad.make_vjp(fft.backward)(g[fft.owned_spectral])
    np.testing.assert_allclose(pull(u[fft.owned]), of_backward(u)[fft.owned_spectral], 1e-12, 1e-12)
    check_adjoint(fft.forward, np.zeros(fft.local_shape, fft.dtype))
    check_adjoint(fft.backward, np.zeros(fft.local_spectral_shape, complex))


def fft_numbers(n, real):
    return (scipy.fft.rfftfreq if real else scipy.fft.fftfreq)(n, 1 / n)


def resampled(u, lengths, axes):
    """Return a periodic array interpolated to, or limited to, other numbers of points along axes."""
    for axis in axes:
        u = scipy.signal.resample(u, lengths[axis], axis=axis)
    return u


@pytest.mark.each_value
@pytest.mark.few(12)
@each_norm
@each_kind
@pytest.mark.parametrize(
    ("shape", "axes"), [((8, 10), (0, 1)), ((11, 6), (1, 0)), ((4, 6, 5), (0, 1, 2)), ((5, 4, 6), (2, 1))], ids=str
)
def test_padding(rank_rng, shape, axes, real, norm):
    fft, plain = (DistributedFFT(shape, axes=axes, real=real, norm=norm, padding=p) for p in (3 / 2, None))
    assert fft.owned_spectral == plain.owned_spectral  # they share their modes
    assert fft.physical_shape == tuple(-(-3 * n // 2) if k in axes else n for k, n in enumerate(shape))
    fine = random(rank_rng, fft.physical_shape, fft.dtype)
    expected = forward(resampled(fine, shape, axes), real, norm, axes, len(shape))
    np.testing.assert_allclose(fft.forward(fine[fft.owned]), expected[fft.owned_spectral], 1e-12, 1e-12)
    coarse = random(rank_rng, shape, fft.dtype, 1)
    modes = plain.forward(coarse[plain.owned])
    # The real axis comes last in the modes, so it is interpolated first.
    interpolated = resampled(coarse, fft.physical_shape, axes[::-1])
    np.testing.assert_allclose(fft.backward(modes), interpolated[fft.owned], 1e-12, 1e-12)
    np.testing.assert_allclose(fft.forward(fft.backward(modes)), modes, 1e-12, 1e-12)


def test_products_without_aliasing():
    """The square of a wave with 3 periods on 8 points has 6, which 8 points can't represent, so it is omitted."""
    fft, plain = (DistributedFFT((10, 8), axes=(1, 0), padding=p) for p in (3 / 2, None))
    x = np.broadcast_to(2 * np.pi * np.arange(8) / 8, (10, 8))
    modes = plain.forward(np.cos(3 * x)[plain.owned])
    square = fft.forward(fft.backward(modes) ** 2)  # (1 + cos 6x) / 2
    np.testing.assert_allclose(plain.backward(square), 0.5, 1e-13)


def spectral_model(shape):
    """Return a nonlinear function of a real field, with transforms in both directions."""
    fft, products = DistributedFFT(shape), DistributedFFT(shape, padding=None if len(shape) == 1 else 3 / 2)
    k = fft.wavenumbers()
    decay = np.exp(-0.02 * sum(each**2 for each in k))

    def step(u, number=0):
        modes = fft.forward(u) * decay
        square = products.forward(products.backward(modes) ** 2)
        return fft.backward(modes - 0.1j * k[0] * square)

    return fft, step


each_model = pytest.mark.parametrize("shape", [(60,), (8, 10), (4, 6, 5)], ids=str)


@pytest.mark.few(3)
@pytest.mark.not_on(4)
@each_model
def test_taylor_rates(rank_rng, shape):
    fft, step = spectral_model(shape)
    u = random(rank_rng, shape, float)[fft.owned]
    check_grads(lambda u: anp.sum(step(u) ** 3), u, order=2, objective="sum")


@pytest.mark.few(2)
@pytest.mark.not_on(4)
@each_model
def test_compiled_derivatives(rank_rng, shape, caplog):
    fft, step = spectral_model(shape)
    u, v = (random(rank_rng, shape, float, k)[fft.owned] for k in (0, 1))

    def cost(u):
        return anp.sum(step(step(u)) ** 3)

    compiled = mpiad.jit(cost)
    for _ in range(2):  # the second call is compiled
        np.testing.assert_allclose(compiled(u), cost(u), 1e-12, 1e-12)
    for product in (
        lambda f: mpiad.grad(f, objective="sum")(u),
        lambda f: mpiad.make_jvp(f)(u)(v)[1],
        lambda f: mpiad.hvp(f, objective="sum")(u, v),
    ):
        expected = product(cost)
        for _ in range(2):
            np.testing.assert_allclose(product(compiled), expected, 1e-11, 1e-11)
    assert "isn't compiled" not in caplog.text


@pytest.mark.few(1)
@pytest.mark.not_on(4)
@pytest.mark.parametrize("jit", [False, True], ids=["interpreted", "jitted"])
def test_loops_with_checkpoints(rank_rng, jit):
    fft, step = spectral_model((8, 10))
    u, v = (random(rank_rng, (8, 10), float, k)[fft.owned] for k in (0, 1))

    def unrolled(u):
        for _ in range(5):
            u = step(u)
        return anp.sum(u**3)

    each = mpiad.jit(step) if jit else step

    def looped(u):
        return anp.sum(scan(each, u, 5, checkpoints=2) ** 3)

    np.testing.assert_allclose(
        mpiad.grad(looped, objective="sum")(u), mpiad.grad(unrolled, objective="sum")(u), 1e-12, 1e-12
    )
    np.testing.assert_allclose(
        mpiad.hvp(looped, objective="sum")(u, v), mpiad.hvp(unrolled, objective="sum")(u, v), 1e-11, 1e-11
    )


@pytest.mark.few(4)
@each_kind
@pytest.mark.parametrize(
    ("shape", "axes"), [((6, 7, 9), None), ((8, 12), None), ((60,), None), ((4, 5, 8), (0, 1))], ids=str
)
@pytest.mark.parametrize("at_once", [1, 4])
def test_large_batches(rank_rng, monkeypatch, shape, axes, real, at_once):
    """Some entries are transformed at a time; arguments stay the same."""
    fft, among = DistributedFFT(shape, axes=axes, real=real), transformed_axes(shape, axes)
    monkeypatch.setattr(implementation, "_AT_ONCE", 0)
    monkeypatch.setattr(implementation, "_PART", at_once * fft._forward.block_bytes)
    u = random(rank_rng, (2, 3, *shape), fft.dtype)
    part, spectral = (..., *fft.owned), (..., *fft.owned_spectral)
    own = u[part].copy()
    modes = fft.forward(own)
    np.testing.assert_allclose(modes, forward(u, real, "backward", among, len(shape))[spectral], 1e-12, 1e-12)
    np.testing.assert_allclose(fft.backward(modes), own, 1e-12, 1e-12)
    assert np.array_equal(own, u[part]) and modes.flags.c_contiguous
    check_adjoint(fft.forward, own)
    check_adjoint(fft.backward, modes)


def test_jacobians_run_all_rows_at_once(size, rank_rng):
    fft = DistributedFFT((2 * size, 2 * size), real=False)  # parts have the same shape on all ranks
    u = random(rank_rng, fft.shape, float)[fft.owned]

    def modes(u):
        return anp.real(fft.forward(u + 0j))

    pull, _ = mpiad.make_vjp(modes)(u)
    units = np.eye(4 * size).reshape(4 * size, *fft.local_spectral_shape)
    expected = np.reshape([pull(unit) for unit in units], fft.local_spectral_shape + fft.local_shape)
    np.testing.assert_allclose(mpiad.jacobian(modes, objective="sum")(u), expected, 1e-13, 1e-13)


@each_kind
def test_wavenumbers(real):
    shape, axes = (8, 6, 9), (2, 0)
    fft = DistributedFFT(shape, axes=axes, real=real)
    found = fft.wavenumbers((np.pi, 10.0))
    lengths = [scipy.fft.fftfreq(9, 1 / 9), (scipy.fft.rfftfreq if real else scipy.fft.fftfreq)(8, 1 / 8)]
    for k, axis, expected, length in zip(found, axes, lengths, (np.pi, 10.0)):
        assert k.ndim == 3 and k.dtype == float
        np.testing.assert_allclose(k.ravel(), 2 * np.pi / length * expected[fft.owned_spectral[axis]], 1e-15)
    assert np.broadcast_shapes(*[k.shape for k in found], fft.local_spectral_shape) == fft.local_spectral_shape


def exchanges(fft):
    """Return the numbers of ranks of the exchanges of a forward transform, and that of the backward transform."""
    return [
        [mpiad.mpi_size(stage.comm) for stage in chain.stages if isinstance(stage, implementation._Exchange)]
        for chain in (fft._forward, fft._backward)
    ]


def test_number_of_messages(size, monkeypatch):
    alone = size == 1
    slabs = [] if alone else [size]
    assert exchanges(DistributedFFT((8, 12, 10))) == [slabs] * 2
    assert exchanges(DistributedFFT((8, 12))) == [slabs] * 2
    assert exchanges(DistributedFFT((8, 12), axes=1)) == [[]] * 2  # the other axis is divided
    assert exchanges(DistributedFFT((12, 3, 12), axes=(1, 2))) == [[]] * 2
    assert exchanges(DistributedFFT(72)) == [[] if alone else [size] * 3] * 2
    if size == 4:
        pencils = DistributedFFT((2, 6, 8))
        assert pencils.dims == (2, 2) and exchanges(pencils) == [[2, 2]] * 2
    counted = []
    alltoall = implementation.mpi_alltoall
    monkeypatch.setattr(
        implementation, "mpi_alltoall", lambda *args, **kwargs: counted.append(args) or alltoall(*args, **kwargs)
    )
    fft = DistributedFFT((8, 12, 10))
    u = np.ones((3, *fft.local_shape))
    mpiad.grad(lambda u: anp.sum(anp.real(fft.forward(u)) ** 2), objective="sum")(u)
    assert len(counted) == (0 if alone else 2)  # one in each direction, for all batches


def test_more_ranks_than_planes(rank_rng):
    """With a number of ranks that isn't a product of suitable factors, some ranks have nothing."""
    fft = DistributedFFT((2, 3, 6))
    u = random(rank_rng, fft.shape, float)
    modes = fft.forward(u[fft.owned])
    np.testing.assert_allclose(modes, scipy.fft.rfftn(u)[fft.owned_spectral], 1e-13, 1e-13)
    np.testing.assert_allclose(fft.backward(modes), u[fft.owned], 1e-13, 1e-13)
    check_adjoint(fft.forward, u[fft.owned])


def test_communicators(rank, size, rank_rng):
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(rank % 2, rank)
    fft = DistributedFFT((6, 8), comm=half)
    u = random(rank_rng, (6, 8), float) * (1 + rank % 2)
    np.testing.assert_allclose(fft.forward(u[fft.owned]), scipy.fft.rfftn(u)[fft.owned_spectral], 1e-13, 1e-13)
    half.Free()


WRONG = [
    ({"shape": (4, 4, 4, 4)}, ValueError, "1, 2 or 3 positive entries"),
    ({"shape": (4, 0)}, ValueError, "positive"),
    ({"shape": (4, 2.5)}, TypeError, "integer"),
    ({"shape": (9, 8), "axes": (0, 0)}, ValueError, "only once"),
    ({"shape": (9, 8), "axes": (0, -2)}, ValueError, "only once"),
    ({"shape": (9, 8), "axes": 2}, ValueError, "from -2 to 1"),
    ({"shape": (9, 8), "axes": ()}, ValueError, "from -2 to 1"),
    ({"shape": (9, 8), "norm": "none"}, ValueError, "'backward', 'ortho' or 'forward'"),
    ({"shape": (9, 8), "dtype": int}, TypeError, "float32 or float64"),
    ({"shape": (9, 8), "dtype": complex}, TypeError, "float32 or float64"),
    ({"shape": (9, 8), "padding": 0.9}, ValueError, "at least 1"),
    ({"shape": (9, 8), "padding": (1, 1, 1)}, ValueError, "each of the 2"),
    ({"shape": (9, 8), "padding": float("nan")}, ValueError, "padding must be a finite number of at least 1, .*nan"),
    ({"shape": (9, 8), "padding": (1.5, float("inf"))}, ValueError, "padding must be a finite number of at least 1, .*inf"),
    ({"shape": (9, 8), "padding": "3/2"}, ValueError, "padding must be a finite number of at least 1, .*'3/2'"),
]


@pytest.mark.not_on(4)
@pytest.mark.parametrize(("arguments", "kind", "text"), WRONG, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_wrong_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        DistributedFFT(**arguments)


@pytest.mark.mpi(min_size=2)
def test_errors_of_all_ranks(rank, size):
    with pytest.raises(ValueError, match=r"can't share the 1 lines along an axis of \(1, 9\)"):
        DistributedFFT((1, 9))
    with pytest.raises(ValueError, match="can't share one line of 13 points"):
        DistributedFFT(13)
    with pytest.raises(ValueError, match="can't be padded"):
        DistributedFFT(64, padding=2)
    with pytest.raises(ValueError, match="must give the same arguments"):
        DistributedFFT((12, 12 + rank))
    with pytest.raises(ValueError, match="norm must be"):
        DistributedFFT((12, 12), norm="wrong" if rank == size - 1 else "ortho")


def test_wrong_arrays():
    fft = DistributedFFT((8, 10))
    wrong = np.ones((fft.local_shape[0] + 1, fft.local_shape[1]))
    with pytest.raises(ValueError, match=r"forward: expected this rank's part, an array of shape"):
        fft.forward(wrong)
    with pytest.raises(TypeError, match="dtype float64, but got an array of dtype float32"):
        fft.forward(np.ones(fft.local_shape, np.float32))
    with pytest.raises(TypeError, match="dtype complex128, but got an array of dtype float64"):
        fft.backward(np.ones(fft.local_spectral_shape))
    with pytest.raises(TypeError, match="but got list"):
        fft.forward([1.0])
    with pytest.raises(ValueError, match="one positive number"):
        fft.wavenumbers((1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="one positive number"):
        fft.wavenumbers(0.0)


@pytest.mark.each_value
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("jit", [False, True], ids=["interpreted", "jitted"])
@pytest.mark.parametrize("shape", [(60,), (8, 10), (6, 7, 9)], ids=str)
def test_arrays_that_differ_between_ranks(rank, size, shape, jit):
    """One error on all ranks before the first exchange: of the last rank's array, or of batches of different lengths."""
    fft = DistributedFFT(shape)
    last = rank == size - 1

    def power(u):
        return anp.sum(abs(fft.forward(u)) ** 2)

    def back(modes):
        return anp.sum(fft.backward(modes) ** 2)

    power, back = (mpiad.jit(power), mpiad.jit(back)) if jit else (power, back)
    u, modes = np.ones(fft.local_shape), np.ones(fft.local_spectral_shape, complex)
    for fun in power, mpiad.grad(power, objective="sum"):
        for _ in range(2):  # the second call is compiled
            fun(u)
        for kind, text, wrong in (
            (ValueError, "same arguments, but rank 0 gave leading axes .* and rank ", np.ones((3, *fft.local_shape))),
            (ValueError, "expected this rank's part", u[1:]),
            (TypeError, "expected an array of dtype float64", u.astype("f4")),
        ):
            with pytest.raises(kind, match=f"DistributedFFT.forward: .*{text}"):
                fun(wrong if last else u)
            assert mpiad.mpi_bcast(rank, 1) == 1
    for fun in back, mpiad.grad(back, objective="sum"):
        with pytest.raises(ValueError, match=r"DistributedFFT.backward: .* rank 0 gave leading axes \(2,\)"):
            fun(np.stack([modes] * (1 if last else 2)))


@pytest.mark.unguarded  # where messages are watched, none are prepared
@pytest.mark.mpi(min_size=2)
def test_programs_that_compare_arrays_keep_prepared_messages(monkeypatch, rank):
    made, init = [], Replay.__init__

    def noted(self, replays, prepared):
        made.append(prepared)
        init(self, replays, prepared)

    monkeypatch.setattr(Replay, "__init__", noted)
    fft = DistributedFFT((8, 10))
    u = np.cos(np.arange(math.prod(fft.local_shape)) + rank).reshape(fft.local_shape)
    jitted = mpiad.jit(lambda u: 2.0 * fft.forward(u), strict=True)
    for scale in (1.0, 3.0):
        np.testing.assert_allclose(jitted(scale * u), 2.0 * scale * fft.forward(u), 1e-13, 1e-13)
    assert made == [True]


def test_arrays_of_transforms_without_messages_may_differ(rank):
    """The other axis is divided, so batches of different lengths need no agreement."""
    fft = DistributedFFT((8, 12), axes=1)
    u = np.ones((rank + 1, *fft.local_shape))
    np.testing.assert_allclose(fft.forward(u), scipy.fft.rfft(u), 1e-13, 1e-13)


def test_arrays_on_devices_are_refused(devices):
    fft = DistributedFFT((8, 10))
    with pytest.raises(TypeError, match="must be on the host"):
        fft.forward(devices.put(np.ones(fft.local_shape)))


def test_arguments_stay_the_same(rank_rng):
    """Stages overwrite intermediate results only."""
    for shape, axes in itertools.product([(8, 6), (64,)], [None, (0,)]):
        fft = DistributedFFT(shape, axes=axes, real=False)
        u = random(rank_rng, shape, complex)[fft.owned].copy()
        before = u.copy()
        fft.backward(fft.forward(u))
        np.testing.assert_array_equal(u, before)


@pytest.mark.mpi(min_size=4)
def test_reset_renews_the_communicators_of_pencils(size):
    fft = DistributedFFT((2, 2, 4))
    assert size != 4 or fft.dims == (2, 2)
    x = np.ones(fft.local_shape)

    def loss(x, fails):
        modes = fft.forward(x)
        if fails:
            raise KeyError("on all ranks")
        return anp.sum(anp.abs(modes) ** 2)

    gradient = mpiad.value_and_grad(loss, objective="sum")
    for _ in range(2):
        with pytest.raises(KeyError):
            gradient(x, True)
        mpiad.reset()
        assert gradient(x, False)[0] == 16.0**2
