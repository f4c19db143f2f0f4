"""Jitted functions of device arrays, against the same functions of NumPy's: kernels in CUDA C++, compiled for this CPU."""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
import time
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from types import SimpleNamespace

import autograd
import autograd.numpy as plain
import numpy as onp
import pytest
from device_calls import CALLS, INDEXED, MATRICES, OTHERWISE, REVERSE_ONLY, TRANSFORMS, UNARY, make_input
from device_double import DeviceArray, double, on_device, on_host, transfers
from mpi4py import MPI

import mpiad
import mpiad.device.numpy as np
from mpiad import parallel
from mpiad.domain import Domain
from mpiad.linalg import compiled_iteration, newton, solve
from mpiad.programs import device_loops, device_replay, memory_plan
from mpiad.programs.device_loops import LoopKernel, compiled
from mpiad.timestepping import CheckpointSchedule, scan

WORLD = MPI.COMM_WORLD
IS_STAND_IN = os.environ.get("DEVICE_ARRAYS") != "cupy"
ALL = {**UNARY, **CALLS, **INDEXED, **TRANSFORMS, **MATRICES, **REVERSE_ONLY}


@pytest.fixture(autouse=True, scope="module")
def launcher():
    """What compiles and runs kernels on the stand-in, and counts them; None on a GPU."""
    if not IS_STAND_IN:
        return None
    made = importlib.import_module("device_on_cpu")
    if made.COMPILER is None:
        pytest.skip("there is no compiler of C++")
    return made.launcher


def leaves(tree):
    return [x for part in tree for x in leaves(part)] if isinstance(tree, (tuple, list)) else [tree]


def assert_same(found, expected, rtol=1e-11):
    """Compare nested results; arrays are on the device."""
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert isinstance(one, DeviceArray) or onp.ndim(other) == 0
        scale = 1 + onp.max(onp.abs(other), initial=0)
        onp.testing.assert_allclose(on_host(one), other, rtol=rtol, atol=rtol * scale)


def is_compiled(jitted):
    return not jitted.form().jitted.is_interpreted


def loss_of(fun):
    def loss(x):
        return sum(np.sum(np.real(y) * np.sin(0.3 + np.real(y)) + np.imag(y) ** 2) for y in leaves(fun(x)))

    return loss


# A sample in `make test`, since a compiler of C++ takes its time; all of them in `make test-all`.
SAMPLE = ("tanh", "abs", "sort", "cumsum", "matmul", "where", "pad", "max tie", "fft", "take", "solve", "diag")


@pytest.mark.serial
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.thorough) for name in {**ALL, **OTHERWISE}]
)
def test_functions(name, rng):
    fun, reference = OTHERWISE[name] if name in OTHERWISE else 2 * (ALL[name],)
    if name in UNARY:
        fun = reference = getattr(np, name)
    shape = (4, 4) if name in ("diag", "trace", "rot90") else (3, 3) if name in {**MATRICES, **REVERSE_ONLY} else (3, 4)
    x, v = make_input(UNARY[name], shape, rng) if name in UNARY else rng.normal(size=shape), rng.normal(size=shape)
    if name in {**MATRICES, **REVERSE_ONLY}:
        x = x + 3 * onp.eye(3)
    jitted, (loss, expected) = mpiad.jit(fun), map(loss_of, (fun, reference))
    inside, both = mpiad.jit(loss), mpiad.jit(mpiad.value_and_grad(loss))
    there, along = on_device(x), on_device(v)
    for _ in range(2):
        assert_same(jitted(there), reference(x))
        assert_same(mpiad.value_and_grad(inside)(there), mpiad.value_and_grad(expected)(x), 2e-10)
        assert_same(both(there), mpiad.value_and_grad(expected)(x), 2e-10)
        assert_same(mpiad.hvp(inside)(there, along), mpiad.hvp(expected)(x, v), 2e-7 if name == "astype" else 2e-10)
        if name not in REVERSE_ONLY:
            assert_same(mpiad.jvp(jitted, there, along), mpiad.jvp(reference, x, v), 2e-10)
    by_values = name in ("x[mask]",)
    assert by_values or (is_compiled(jitted) and is_compiled(inside) and is_compiled(both))


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_precisions(dtype, rng):
    z = rng.normal(size=(5, 6)).astype(dtype)
    z = z + 1j * rng.normal(size=(5, 6)).astype(z.real.dtype) if z.dtype.kind == "c" else z
    fun = mpiad.jit(lambda z: np.real(z * np.conj(z) * np.exp(-z)) * 0.5)
    assert fun(on_device(z)).dtype == z.real.dtype
    for _ in range(2):
        found = mpiad.grad(lambda z: np.sum(fun(z) ** 2))(on_device(z))
        expected = mpiad.grad(lambda z: np.sum(fun(z) ** 2))(z)
        assert found.dtype == z.dtype
        assert_same(found, expected, 1e-12 if dtype == "complex128" else 1e-5)


@pytest.mark.serial
@pytest.mark.parametrize("axis", [None, 0, 1, 2, (0, 1), (0, 2), (1, 2)])
def test_reductions_have_a_fixed_order(axis, rng):
    x = rng.normal(size=(70, 3, 41))
    fun = mpiad.jit(lambda x: [red(np.sin(x) + 1.5, axis=axis) for red in (np.sum, np.max, np.min, np.mean, np.var)])
    first, second = fun(on_device(x)), fun(on_device(x))
    assert_same(first, fun(x), 1e-12)
    for one, other in zip(first, second):
        onp.testing.assert_array_equal(on_host(one), on_host(other))
    assert_same(mpiad.jit(lambda x: np.prod(x, axis=axis))(on_device(x / 3)), onp.prod(x / 3, axis=axis), 1e-9)


@pytest.mark.serial
@pytest.mark.parametrize(
    "shape, axis", [((300_000,), None), ((3, 100_000), 1), ((100_000, 3), 0), ((70_000, 2), 1), ((0, 3), 0)]
)
def test_reductions_of_long_arrays(shape, axis, rng):
    x = rng.normal(size=shape)
    found = mpiad.jit(lambda x: (np.sum(x**2, axis=axis), x * 2))(on_device(x))
    assert_same(found, (onp.sum(x**2, axis=axis), 2 * x), 1e-12)


@pytest.mark.serial
def test_numbers_stay_on_the_host(rng):
    x = rng.normal(size=(4, 3))
    fun = mpiad.jit(lambda x, a, k: (np.sum(a * x**2) + k, a**2 + 1, x[k] * k))

    def loss(x, a):
        y, z, w = fun(x, a, 2)
        return y * z + np.sum(w**3)

    for _ in range(2):
        y, z, w = fun(on_device(x), 0.7, 2)
        assert isinstance(y, DeviceArray) and type(z) is onp.float64 and isinstance(w, DeviceArray)
        assert_same((y, z, w), fun(x, 0.7, 2))
        found, expected = (mpiad.value_and_grad(loss, (0, 1))(put(x), 0.7) for put in (on_device, lambda x: x))
        assert isinstance(found[1][0], DeviceArray) and not isinstance(found[1][1], DeviceArray)
        assert_same(found, expected)
        assert_same(mpiad.hvp(lambda a: loss(on_device(x), a))(0.7, 1.0), mpiad.hvp(lambda a: loss(x, a))(0.7, 1.0))
    assert_same([fun(on_device(x), 0.5, k) for k in range(4)], [fun(x, 0.5, k) for k in range(4)])
    assert is_compiled(fun)


@pytest.mark.serial
def test_arrays_of_the_closure_are_read_in_each_run(rng):
    class Model:
        pass

    x, model, other = rng.normal(size=(4, 3)), Model(), Model()
    model.k = rng.random((4, 3))
    other.k = on_device(model.k)
    host, there = (mpiad.jit(lambda x, m=m: np.sum(m.k * x**2 + m.k[0])) for m in (model, other))
    for change in range(3):
        assert_same(there(on_device(x)), host(x))
        assert_same(mpiad.grad(there)(on_device(x)), mpiad.grad(host)(x))
        assert_same(mpiad.hvp(there)(on_device(x), on_device(2 * x)), mpiad.hvp(host)(x, 2 * x))
        if change == 0:
            model.k *= 2.0
            other.k *= 2.0
        else:
            model.k = model.k + 1
            other.k = on_device(model.k)
    assert is_compiled(there)


@pytest.mark.serial
def test_functions_that_change_arrays_of_the_closure_are_interpreted(rng, caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    k, x = on_device(onp.ones(3)), on_device(rng.normal(size=3))

    def fun(x):
        k[...] = k * 2.0
        return x * 3.0

    jitted = mpiad.jit(fun)
    for n in range(5):
        jitted(x)
        onp.testing.assert_array_equal(on_host(k), 2.0 ** (n + 1))


@pytest.mark.serial
def test_what_is_computed_from_the_closure_is_no_constant(rng, caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    k, x = on_device(onp.ones(3)), on_device(rng.normal(size=3))
    jitted = mpiad.jit(lambda x: x * (k * 2.0))
    assert_same(jitted(x), 2 * on_host(x))
    k *= 3.0
    assert_same(jitted(x), 6 * on_host(x))
    assert "computes an array on a device without its arguments" in caplog.text


@pytest.mark.serial
def test_constants_that_a_function_copies_to_the_device(rng):
    w, x = rng.normal(size=3), rng.normal(size=3)
    fun = mpiad.jit(lambda x: np.sum(mpiad.device.to_device(w, like=on_device(0.0)) * x**2))
    for _ in range(2):
        assert_same(mpiad.value_and_grad(fun)(on_device(x)), mpiad.value_and_grad(lambda x: np.sum(w * x**2))(x))
    w *= 2
    assert_same(fun(on_device(x)), onp.sum(w * x**2))
    assert is_compiled(fun)


@pytest.mark.serial
def test_arrays_on_the_host_among_those_on_a_device(rng, caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    x = rng.normal(size=3)
    with pytest.raises(TypeError, match="multiply|Unsupported type"):
        mpiad.jit(lambda x, y: x * y)(on_device(x), x)
    with pytest.raises(TypeError, match="multiply|Unsupported type"):
        mpiad.jit(lambda y: y * x)(on_device(x))
    beside = mpiad.jit(lambda x, y: x * y[0])
    for _ in range(2):
        assert_same(beside(on_device(x), x), x * x[0])
    assert "it gets arrays on a device and arrays on the host" in caplog.text
    with pytest.raises(TypeError, match="can't be compiled: .* it gets arrays on a device"):
        mpiad.jit(lambda x, y: x * y[0], strict=True)(on_device(x), x)


@pytest.mark.serial
def test_nothing_is_copied_but_the_words(rng, launcher):
    x = on_device(rng.normal(size=(8, 9)))
    fun = mpiad.jit(lambda x: np.concatenate([x[1:], x[:1]]) * np.exp(-x))
    fun(x)
    fun(x)
    transfers.reset()
    made = fun(x)
    assert transfers.d2h == 0 and transfers.h2d <= 1
    assert launcher is None or transfers.h2d_bytes < 100
    kept = on_host(made)
    fun(on_device(rng.normal(size=(8, 9))))
    onp.testing.assert_array_equal(on_host(made), kept)  # results aren't overwritten
    assert fun.program(x).kernels and "loop over" in fun.program(x).loops


@pytest.mark.serial
@pytest.mark.parametrize("checkpoints", [None, 3])
def test_loops_in_time(checkpoints, rng):
    u, c = rng.normal(size=(7, 6)), rng.random((7, 6))
    step = mpiad.jit(lambda u, k, c, a: u + 0.1 * (np.roll(u, 1, 0) - u) * c * np.sin(a * u) + 0.01 * k)

    def loss(u, c, a):
        options = {"checkpoints": checkpoints, "observe": lambda u, k, c, a: np.sum(u**2 * c)}
        end, seen = scan(step, u, 10, c, a, **options)
        return np.sum(end**3) + np.sum(np.sin(seen))

    for _ in range(2):
        found = mpiad.value_and_grad(loss, (0, 1, 2))(on_device(u), on_device(c), 0.8)
        assert_same(found, mpiad.value_and_grad(loss, (0, 1, 2))(u, c, 0.8))
    along = rng.normal(size=u.shape)
    found = mpiad.hvp(loss)(on_device(u), on_device(c), 0.8, on_device(along))
    assert_same(found, mpiad.hvp(loss)(u, c, 0.8, along), 1e-10)
    assert is_compiled(step)


@pytest.mark.serial
def test_loops_with_inputs_on_the_host(rng, caplog):
    u, c, weights = rng.normal(size=(3, 4)), rng.random((3, 4)), onp.linspace(0.5, 2.0, 8)
    step = mpiad.jit(lambda u, k, w, c: u + 0.1 * w * np.sin(c * u))
    seen = mpiad.jit(lambda u, k, c: u[0] * c[1])

    def loss(u, c):
        schedule = CheckpointSchedule(2, recorded=4)
        end, rows = scan(step, u, 8, c, inputs=weights, observe=seen, checkpoints=schedule)
        return np.sum(end**2) + np.sum(rows**3)

    def by_hand(u, c):
        total = 0.0
        for w in on_host(weights):
            u = u + 0.1 * w * plain.sin(c * u)
            total = total + plain.sum((u[0] * c[1]) ** 3)
        return plain.sum(u**2) + total

    for _ in range(2):
        found = mpiad.value_and_grad(loss, (0, 1))(on_device(u), on_device(c))
        assert_same(found, [by_hand(u, c), autograd.grad(by_hand, 0)(u, c), autograd.grad(by_hand, 1)(u, c)])
    (text,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "test_device_programs.py:" in text and "mpiad.device.to_device(inputs)" in text
    caplog.clear()
    weights = on_device(weights)
    found = mpiad.value_and_grad(loss, (0, 1))(on_device(u), on_device(c))
    assert_same(found, [by_hand(u, c), autograd.grad(by_hand, 0)(u, c), autograd.grad(by_hand, 1)(u, c)])
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.serial
def test_solves_with_compiled_operators(rng):
    b, c = rng.normal(size=(6, 5)), rng.random((6, 5)) + 1
    product = mpiad.jit(lambda u, c: c * u - 0.2 * (np.roll(u, 1, 0) + np.roll(u, -1, 0)))

    def loss(b, c):
        return np.sum(solve(product, b, c, method="cg", rtol=1e-13) ** 2)

    for fun in (loss, mpiad.jit(loss)):
        found = mpiad.value_and_grad(fun, (0, 1))(on_device(b), on_device(c))
        assert_same(found, mpiad.value_and_grad(loss, (0, 1))(b, c), 1e-9)


@pytest.mark.serial
@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_iterations_of_solves_are_programs(method, rng, monkeypatch):
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 5)
    monkeypatch.setattr(compiled_iteration, "_known", [])
    b, c = rng.normal(size=(9, 8)), 4.1 + 0.1 * rng.random((9, 8))

    def product(u, c):
        return c * u - np.roll(u, 1, 0) - np.roll(u, -1, 0) - np.roll(u, 1, 1) - np.roll(u, -1, 1)

    def loss(b, c):
        return np.sum(solve(product, b, c, method=method, rtol=1e-12) ** 2)

    expected = mpiad.value_and_grad(loss, (0, 1))(b, c)
    for _ in range(2):
        assert_same(mpiad.value_and_grad(loss, (0, 1))(on_device(b), on_device(c)), expected, 1e-8)
    assert_same(loss(on_device(2 * b), on_device(c)), 4 * expected[0], 1e-9)
    programs = [each for known in compiled_iteration._known for each in known.programs.values() if each is not None]
    assert sum(program.entry.device is not None for program in programs) >= 2


def all_modes(fun, x, v, a):
    """Return value, gradient, tangent and product with the Hessian, and the gradient in one program."""
    inside = mpiad.jit(fun)
    return [
        inside(x, a), mpiad.value_and_grad(inside, (0, 1))(x, a), mpiad.jvp(lambda p: inside(*p), (x, a), (v, 0.3)),
        mpiad.hvp(inside)(x, a, v), mpiad.jit(mpiad.value_and_grad(fun, (0, 1)))(x, a),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["halo", "messages", "operators"])
def test_messages(name, rng_of_rank):
    rank, size = WORLD.rank, WORLD.size
    domain = Domain((4 * size + 1, 6), halo=1, periodic=(True, False))
    x, v = rng_of_rank.normal(size=(2, *domain.local_shape))

    def halo(u, a):
        for _ in range(3):
            p = domain.exchange(u)
            u = u + a * 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)
        return mpiad.mpi_allreduce(np.sum(u**4 * (1 + rank)))

    def messages(u, a):
        came = mpiad.mpi_exchange(u[0] * a, (rank + 1) % size, (rank - 1) % size)
        total = mpiad.mpi_bcast(np.sum(came) * a if rank == size - 1 else None, root=size - 1)
        request = mpiad.mpi_isend(u[1], (rank + 1) % size)
        other = mpiad.mpi_recv(np.zeros_like(u[0]), (rank - 1) % size)
        mpiad.mpi_wait(request)
        return mpiad.mpi_allreduce(np.sum(came * other)) * total * mpiad.mpi_allreduce(a * 1.5)

    def operators(u, a):
        rows = mpiad.mpi_allgather(u[: 1 + rank % 2], axis=0)
        return mpiad.mpi_allreduce(np.sum(domain.laplacian(0.5)(u) ** 3) * a + np.sum(rows**2) * (1 + rank))

    fun = {"halo": halo, "messages": messages, "operators": operators}[name]
    for _ in range(2):
        found, expected = all_modes(fun, on_device(x), on_device(v), 0.7), all_modes(fun, x, v, 0.7)
        assert_same(found, expected, 1e-10)


def test_ranks_without_arrays_on_a_device_get_some(rng_of_rank):
    rank = WORLD.rank
    x = onp.arange(6.0).reshape(2, 3) + rank
    spread = mpiad.jit(lambda x: mpiad.mpi_bcast(x, root=0) * 2.0)
    parts = mpiad.jit(lambda x: np.sum(mpiad.mpi_scatter(x * 2.0, root=0) ** 2))
    pieces = onp.arange(3.0 * WORLD.size).reshape(WORLD.size, 3) + 1
    for _ in range(3):
        assert_same(spread(on_device(x) if rank == 0 else None), 2 * onp.arange(6.0).reshape(2, 3))
        found = mpiad.value_and_grad(parts, objective="sum")(on_device(pieces))
        assert_same(found, [onp.sum((2 * pieces) ** 2), 8 * pieces * (rank == 0)])


def test_shapes_that_differ_from_the_trace():
    fun = mpiad.jit(lambda x, w: np.sum(mpiad.mpi_bcast(x, root=0) ** 2) * w)
    for length in (2, 2, 3, 3, 2):
        x = on_device(onp.ones(length) * 2) if WORLD.rank == 0 else None
        assert_same(fun(x, on_device(onp.ones(2))), 4.0 * length * onp.ones(2))


@pytest.mark.serial
def test_variables_without_influence(rng):
    b, u = rng.normal(size=4), rng.normal(size=4)

    def fun(b, u):
        return np.sum(newton(lambda u, b: 3 * u + u**3 - b, u, b, rtol=1e-12) ** 2)

    for gradient in (mpiad.grad(mpiad.jit(fun), (0, 1)), mpiad.jit(mpiad.grad(fun, (0, 1)))):
        for _ in range(2):
            assert_same(gradient(on_device(b), on_device(u)), mpiad.grad(fun, (0, 1))(b, u), 1e-9)


@pytest.mark.serial
def test_derivatives_by_numbers_are_numbers(rng):
    x = rng.normal(size=4)
    gradient = mpiad.jit(mpiad.grad(lambda x, a: np.sum(np.sin(a * x)), (0, 1)))
    for _ in range(2):
        found = gradient(on_device(x), 0.7)
        assert isinstance(found[0], DeviceArray) and type(found[1]) is onp.float64
        assert_same(found, [0.7 * onp.cos(0.7 * x), onp.sum(x * onp.cos(0.7 * x))])


def test_training_with_compiled_losses(rng_of_rank):
    w, data = onp.linspace(0.1, 0.5, 5), rng_of_rank.normal(size=(7, 5))

    def loss(p, x):
        return np.mean((x @ p["w"]) ** 2)

    expected = parallel.value_and_grad(loss)({"w": w}, data)
    evaluate = parallel.value_and_grad(mpiad.jit(loss))
    for _ in range(3):
        value, gradient = evaluate({"w": on_device(w)}, on_device(data))
        assert_same([value, gradient["w"]], [expected[0], expected[1]["w"]])


@pytest.mark.serial
@pytest.mark.parametrize(
    "spilled, way",
    [
        ({}, (4, "few")),
        ({(4, "few"): 8}, (4, "traced")),
        ({(4, "few"): 8, (4, "traced"): 16}, (2, "few")),
        ({(4, "few"): 48, (4, "traced"): 40, (2, "few"): 16, (0, "few"): 8}, (0, "few")),
        # Memory that no register replaces.
        (dict.fromkeys([(4, "few"), (4, "traced"), (2, "few"), (0, "few")], 40), (4, "few")),
    ],
)
def test_kernels_that_spill_are_compiled_once_more(spilled, way):
    class Spilling:
        def compiled(self, text, name, options):
            (line,) = [line for line in text.splitlines() if f" {name}(" in line]
            blocks = int(line.partition("BOUNDED(")[2][:1] or 0)
            made = blocks, text.partition(line)[2].partition("order: ")[2].partition(";")[0]
            is_other = text.partition(line)[2].startswith("\nother")
            return SimpleNamespace(local_bytes=0 if is_other else spilled.get(made, 0), way=made)

    kernels = [LoopKernel(f"{head} order: few;", 1, f"{head} order: traced;") for head in ("", "other")]
    assert [kernel.way for kernel in compiled([kernels[1], kernels[0], kernels[0]], Spilling())] == [(4, "few"), way, way]


def test_kernels_with_one_order_do_the_same_in_each_way():
    """Such as those of updates in place, whose statements aren't ordered."""
    kernel = LoopKernel.of(["    double* a = (double*)words[0];"], 3, ["a[thread] = 1.0;"])
    assert "a[thread] = 1.0;" in kernel.traced and kernel.traced == kernel.body


def transported(np, u, a):
    """A program with branches at edges, conditions, arrays that are overwritten, and sums along an axis and of all."""
    before = 0.5 * u
    for k in range(4):
        is_up = (u > 0.1 * k) & (np.roll(u, 1, 0) < a)
        flux = np.where(is_up, np.roll(u, 1, 0) * a, np.sin(u) + np.roll(u, -1, 1))
        padded = np.pad(flux, 1, "constant")
        new = np.maximum(u + 0.1 * flux, 0.2 * padded[2:, 1:-1] - padded[:-2, 1:-1] * u) / (1 + flux**2)
        u, before = np.where(is_up & (new > 0.0), np.cos(new) * before, np.tanh(new) + 0.1 * before), u
    return np.sum(u * np.cos(u) + flux * u**2), np.sum(u * flux + np.cos(u), axis=0), u, u > flux


def leaping(np, u, a):
    """A leapfrog scheme, in which u overwrites what is still read for w."""
    v, w = 0.5 * u, 0.1 * u
    for _ in range(4):
        new = 2 * u - v + a * (np.roll(u, 1, 0) + np.roll(u, -1, 0) - 2 * u)
        w = np.cos(np.roll(w, 1, 0) + np.sin(v * np.tanh(v + np.exp(-np.abs(v))))) * v
        u, v = new, u
    return np.sum(u * w), np.sum(u * v, axis=0), u, w


def rotated(np, u, a):
    """The same with complex numbers."""
    z = 0.3 * u + 1j * np.roll(u, 1, 1)
    for _ in range(2):
        z = z * np.exp(1j * a * z) / (1.5 + z * np.conj(z)) + 0.1 * np.roll(z, 1, 0)
    return np.sum(np.abs(z) ** 2), np.real(z), z


@pytest.mark.serial
@pytest.mark.skipif(not IS_STAND_IN, reason="a GPU reports what it finds")
@pytest.mark.parametrize(
    "fun, dtype, most", [(transported, float, 7), (transported, onp.float32, 11), (leaping, float, 5), (rotated, float, 11)]
)
def test_loops_whose_kernels_spill_are_divided(fun, dtype, most, rng, launcher, monkeypatch, caplog):
    """The compiler reports that each kernel spills that computes more than `most` numbers."""
    compile_one, numbers = launcher.compiled, re.compile(r"^ +auto (?!\w+ = (between|a\d+)\b)", re.MULTILINE)

    def spilling(text, name, options):
        made = copy(compile_one(text, name, options))
        body = text.partition(f"{name}(const long long* words)")[2].partition("\n}\n")[0]
        made.local_bytes, made.registers = (64, 255) if len(numbers.findall(body)) > most else (0, 64)
        return made

    monkeypatch.setattr(launcher, "compiled", spilling)
    monkeypatch.setattr(memory_plan, "SMALL", 0)  # also small arrays are overwritten
    caplog.set_level(logging.INFO, "mpiad")
    u, a = rng.normal(size=(9, 14)).astype(dtype), dtype(0.3)
    x, rtol = on_device(u), 1e-11 if dtype is float else 1e-4
    loss, expected = (lambda u, np=np: sum(np.sum(y) for y in fun(np, u, a)[:2]) for np in (np, plain))
    jitted = mpiad.jit(lambda u, a: fun(np, u, a))
    for each in (u, u[::-1] * 2):
        assert_same(jitted(on_device(each), a), fun(plain, each, a), rtol)
    assert is_compiled(jitted)
    assert_same(mpiad.value_and_grad(mpiad.jit(loss))(x), [expected(u), autograd.grad(expected)(u)], rtol)
    (message,) = {record.getMessage().partition(";")[0] for record in caplog.records if "divided" in record.msg}
    assert message == "jit: kernels need up to 64 bytes per thread beyond their registers"


def paired(jitted):
    """Return the numbers of threads of the kernels whose threads compute two entries, and of all kernels."""
    kernels = [one for replays in divided(jitted) for each in replays.launches for _, one in each]
    return [kernel.threads for kernel in kernels if " next = " in kernel.body], [kernel.threads for kernel in kernels]


@pytest.fixture
def two_entries(monkeypatch):
    """Let threads compute two entries in all loops in single precision."""
    for name, value in {"_MANY": 1, "_LONG": 1, "_LOADS": 1 << 10}.items():
        monkeypatch.setattr(device_loops, name, value)


@pytest.mark.serial
@pytest.mark.parametrize("shape", [(9, 14), (5, 13), (6, 3)])
def test_threads_that_compute_two_entries(shape, two_entries, rng):
    u, a = rng.normal(size=shape).astype(onp.float32), onp.float32(0.3)
    jitted = mpiad.jit(lambda u, a: transported(np, u, a))
    assert_same(jitted(on_device(u), a), transported(plain, u, a), 1e-4)
    loss, expected = (lambda u, np=np: sum(np.sum(y) for y in transported(np, u, a)[:2]) for np in (np, plain))
    gradient = mpiad.value_and_grad(mpiad.jit(loss))(on_device(u))
    assert_same(gradient, [expected(u), autograd.grad(expected)(u)], 1e-4)
    pairs, threads = paired(jitted)
    assert is_compiled(jitted)
    assert max(pairs) == shape[0] * -(-shape[1] // 2)
    assert len(threads) > len(pairs)  # reductions have threads of their own
    # Not in double precision.
    double_precision = mpiad.jit(lambda u: transported(np, u, 0.3))
    double_precision(on_device(u.astype(float)))
    assert not paired(double_precision)[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("axis", [0, 1])
def test_threads_that_compute_two_entries_of_interiors(axis, two_entries, monkeypatch):
    monkeypatch.setattr(device_replay, "_LARGE", 1)
    dims = (1, WORLD.size) if axis else (WORLD.size, 1)
    domain = Domain((16 * dims[0], 21 * dims[1]), periodic=(True, False), dims=dims)
    whole = onp.random.default_rng(31).normal(size=domain.shape).astype(onp.float32)
    fun = mpiad.jit(lambda u: wave(domain, u, onp.float32(0.7)))
    assert_same(fun(on_device(whole[domain.owned])), whole_wave(whole, 0.7)[domain.owned], 1e-4)
    assert any(divided(fun).values()) and len(paired(fun)[0]) < len(paired(fun)[1])


@pytest.mark.serial
def test_halos_without_messages_are_filled_by_kernels(rng, launcher):
    domain = Domain((6, 5), halo=1, periodic=(True, False))
    x = rng.normal(size=(6, 5))
    fun = mpiad.jit(lambda u: np.sum(domain.exchange(u * 2) ** 2))
    assert_same(mpiad.value_and_grad(fun)(on_device(x)), mpiad.value_and_grad(fun)(x))
    if launcher is not None:
        before = len(launcher.launches)
        transfers.reset()
        fun(on_device(x))
        assert len(launcher.launches) - before > 4
        assert transfers.h2d <= 1


@pytest.mark.serial
@pytest.mark.skipif(not IS_STAND_IN, reason="the stand-in's streams are numbers")
def test_streams_share_no_buffers(rng, monkeypatch):
    x = on_device(rng.normal(size=(8, 9)))
    fun = mpiad.jit(lambda x: np.sum(np.exp(-x) * np.roll(x, 1, 0)))
    fun(x)
    replays = next(iter(fun.form().jitted._cache.entries.values())).replays
    first = replays.take()
    replays.give_back(first)
    monkeypatch.setattr(double, "stream", lambda: 1)
    second = replays.take()
    assert second is not first and replays.take() is not second
    monkeypatch.undo()
    assert replays.take() is first


@pytest.mark.serial
@pytest.mark.skipif(not IS_STAND_IN, reason="a device has more memory")
def test_too_little_memory_is_named(rng, monkeypatch):
    x, bare = on_device(rng.normal(size=(40, 50))), double.empty

    def empty(shape, dtype):
        if onp.prod(shape) * onp.dtype(dtype).itemsize > 10_000:
            raise MemoryError("out of memory")
        return bare(shape, dtype)

    fun = mpiad.jit(lambda x: np.exp(x) * 2)
    monkeypatch.setattr(double, "empty", empty)
    with pytest.raises(MemoryError, match="16,000 bytes on stand-in device 0 .*: 1,073,741,824 are free.* checkpoints"):
        fun(x)


# Loops that are divided: their interiors run while an exchange is in progress.


def wave(domain, u, a):
    for boundary in ("zero", "reflect", (1.5, "edge")):
        p = domain.exchange(u * a, boundary=boundary)
        u = u + 0.1 * np.sin(p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] * p[1:-1, :-2] - 4 * u + p[2:, 2:])
    return u


def whole_wave(u, a):
    """The same on the whole grid, periodic along its first axis."""
    for boundary in ("zero", "reflect", "edge"):
        p = plain.concatenate([u[-1:], u, u[:1]]) * a
        sides = {"zero": (0 * p[:, :1], 0 * p[:, :1]), "reflect": (p[:, 1:2], p[:, -2:-1]), "edge": (p[:, :1], p[:, -1:])}
        p = plain.concatenate([sides[boundary][0], p, sides[boundary][1]], axis=1)
        u = u + 0.1 * plain.sin(p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] * p[1:-1, :-2] - 4 * u + p[2:, 2:])
    return u


def divided(jitted):
    """Return the replays of the programs of a function, and the number of divided loops of each."""
    found = [entry.replays for entry in jitted.form().jitted._cache.entries.values() if entry is not None]
    return {each: sum(text is not None and text.interior is not None for text in each.texts) for each in found}


@contextmanager
def late_stream(number, monkeypatch):
    """Let each operation on one stream begin late: the current stream (0), or that of exchanges (1)."""
    put = double._put

    def put_late(operation):
        if double.stream() == number:
            put(lambda: time.sleep(0.002))
        put(operation)

    with monkeypatch.context() as during:
        during.setattr(double, "_put", put_late)
        yield


def ways_and_streams():
    """Return contexts: the ways of device arrays, each with two late streams; on a GPU only its own."""
    if not IS_STAND_IN:
        return [lambda monkeypatch: nullcontext()]
    ways, memory = (importlib.import_module(name) for name in ("device_ways", "device_memory_double"))

    @contextmanager
    def context(way, number, monkeypatch):
        with ways.travelling(way), memory.streams() if way != "shared" else nullcontext():
            with late_stream(number, monkeypatch):
                yield
                double.synchronize()

    return [partial(context, way, number) for way in ("staged", "direct", "shared") for number in (0, 1)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("axis", [0, 1])
def test_divided_loops(axis, monkeypatch):
    monkeypatch.setattr(device_replay, "_LARGE", 1)
    size, drawn = WORLD.size, onp.random.default_rng(31)
    dims = (1, size) if axis else (size, 1)
    domain = Domain((16 * dims[0], 20 * dims[1]), periodic=(True, False), dims=dims)
    whole, weights = drawn.normal(size=(2, *domain.shape))
    x, w = on_device(whole[domain.owned]), on_device(weights[domain.owned])
    fun = mpiad.jit(lambda u, a: wave(domain, u, a))
    inside = mpiad.value_and_grad(lambda u, a: np.sum(fun(u, a) * w), (0, 1), objective="sum")
    both = mpiad.jit(mpiad.value_and_grad(lambda u, a: np.sum(wave(domain, u, a) * w), (0, 1), objective="sum"))
    loss = lambda p: plain.sum(whole_wave(*p) * weights)  # noqa: E731
    expected, (by_field, by_number) = loss((whole, 0.7)), autograd.grad(loss)((whole, 0.7))
    expected = [expected, by_field[domain.owned], by_number]
    for each in (fun, inside, both):
        each(x, 0.5)
    for context in ways_and_streams():
        with context(monkeypatch):
            assert_same(fun(x, 0.7), whole_wave(whole, 0.7)[domain.owned], 1e-12)
            for gradient in (inside, both):
                value, (field, number) = gradient(x, 0.7)
                assert_same([value, field, mpiad.mpi_allreduce(number)], expected, 1e-11)
    assert any(divided(fun).values()) and any(divided(both).values())


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not IS_STAND_IN, reason="a device runs on its own")
def test_the_host_waits_for_packed_faces_only(rng_of_rank, monkeypatch):
    """The interior doesn't begin before the exchange has ended on the host, which it would never do if it waited."""
    monkeypatch.setattr(device_replay, "_LARGE", 1)
    domain = Domain((16 * WORLD.size, 20), periodic=(True, False), dims=(WORLD.size, 1))
    x = rng_of_rank.normal(size=domain.local_shape)

    def step(u):
        p = domain.exchange(u * 2.0)
        return p[2:, 1:-1] + p[:-2, 1:-1] - p[1:-1, 1:-1]

    fun, expected = mpiad.jit(step), step(x)
    there = on_device(x)
    fun(there)
    ((replays, count),) = divided(fun).items()
    assert count == 1
    interior, ended, late, log = replays.launches[-1][0][0], threading.Event(), [], []
    put, wait, copy, side = double._put, double.wait, double.copy_to_host, double.side_stream

    def noted_put(operation):
        kernel = getattr(operation, "func", None)
        log.append(("interior" if kernel is interior else "write" if kernel is None else "kernel", double.stream()))
        if kernel is interior:
            put(lambda: late.append(not ended.wait(20)))
        put(operation)

    @contextmanager
    def noted_side(event):
        with side(event):
            yield
            ended.set()

    noted = lambda name, call: lambda *args: (log.append((name, double.stream())), call(*args))[1]  # noqa: E731
    with importlib.import_module("device_memory_double").streams():
        with monkeypatch.context() as during:
            during.setattr(double, "_put", noted_put)
            during.setattr(double, "wait", noted("wait", wait))
            during.setattr(double, "copy_to_host", noted("copy", copy))
            during.setattr(double, "side_stream", noted_side)
            found = fun(there)
        assert_same(found, expected)
    assert late == [False]
    start = log.index(("interior", 0))
    packed = log.index(("copy", 1))
    assert log[start - 1] == log[-1] == ("kernel", 0) and start < packed < log.index(("wait", 1), packed)
    assert log[-2] == ("write", 1) and {stream for _, stream in log[start + 1 : -1]} == {1}


@pytest.fixture
def rng_of_rank():
    return onp.random.default_rng(17 + WORLD.rank)
