"""Interrupt gradients, traces, replays and solves before each of their lines, and look at what is left.

    python tests/interrupts.py --interrupts 10000 --seed 5
    mpiexec -n 2 python tests/interrupts.py --interrupts 500 --alone 1

Each program runs once to count the lines of the library that it comes to. Then it runs again and again, and a
KeyboardInterrupt comes before a line, or at the entry of a function; all ranks are interrupted at the same one. Afterwards
the thread's state is that of before, communications work, or a single error of the library's asks for `mpiad.reset`, and
the same program and another gradient have their known values.

With `--alone` only one rank is interrupted, in debug mode: the others come to their end, or wait for it until the limit and
raise a DeadlockError. Then all ranks reset, whatever they raised, and the same holds. Without a limit they would wait in
MPI, from which no reset of another rank frees them.

No interrupt comes between the body of a `with` and the call of `__exit__`: there Python doesn't look for signals.
"""

import argparse
import contextlib
import dis
import inspect
import logging
import random
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from autograd.tracer import isbox, trace_stack
from mpi4py import MPI

import mpiad
from mpiad import errors
from mpiad.differentiation import backward, forward, tape, trace
from mpiad.differentiation.tape import OrderedTape
from mpiad.ensemble import RK45, EnsembleMPI, EnsembleProblem, ODEProblem, Rosenbrock23, solve
from mpiad.extend import custom_operator, defadjoint, defvjp_together
from mpiad.linalg import solve as linear_solve
from mpiad.primitives import custom_operator as custom_operators
from mpiad.primitives import operation
from mpiad.programs import calls_on_tape, function, interpretation, program_cache, recorder, traced_array, transforms
from mpiad.programs import operation as operations
from mpiad.transport import channel
from mpiad.transport.core import calls, channels, collectives, messages, tracing
from mpiad.transport.exits import signals
from mpiad.transport.watch import timed_waits

WORLD = MPI.COMM_WORLD
OURS = str(Path(mpiad.__file__).parent)
FILES = (OURS, contextlib.__file__)
X = np.array([0.3, -0.7, 1.1])
MINE = X * (WORLD.rank + 1)
TOTAL = X * WORLD.size * (WORLD.size + 1) / 2


@custom_operator
def summed(x):
    return WORLD.allreduce(x)


defadjoint(summed, lambda g: summed(g))


def of_total(x):
    return anp.sum(anp.sin(mpiad.mpi_allreduce(x)))


def gradient_of(f):
    """Return the gradient of Σ sin(Σ_r x_r), by a function that computes this, and its closed form."""
    return lambda: mpiad.grad(f)(MINE), np.cos(TOTAL)


def gradient():
    return gradient_of(of_total)


def operator():
    return gradient_of(lambda x: anp.sum(anp.sin(summed(x))))


def product():
    """Return a product with the Hessian, and its closed form."""
    return lambda: mpiad.hvp(of_total)(MINE, MINE), -np.sin(TOTAL) * TOTAL


def rows():
    """Return a Jacobian, whose rows are computed together, and its closed form."""
    return lambda: mpiad.jacobian(lambda x: anp.sin(mpiad.mpi_allreduce(x)))(MINE), np.diag(np.cos(TOTAL))


def called_twice(jitted):
    """Return a function that calls a compiled one twice: it is traced, then replayed or interpreted."""

    def run():
        jitted(MINE)
        return jitted(MINE)

    return run


def compiled():
    """Return a compiled function, traced and then replayed, and its closed form."""
    return called_twice(mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)))), np.sin(TOTAL)


def compiled_on_tape():
    """Return the gradient of a compiled function, traced and then replayed, and its closed form."""
    return called_twice(mpiad.grad(mpiad.jit(of_total))), np.cos(TOTAL)


def compiled_gradient():
    """Return a compiled gradient, traced and then replayed, and its closed form."""
    return called_twice(mpiad.jit(mpiad.grad(of_total))), np.cos(TOTAL)


def deciding(x):
    total = mpiad.mpi_allreduce(x)
    return anp.sin(total) if float(mpiad.stop_gradient(anp.sum(total))) < 1e9 else total


def interpreted():
    """Return a function that leaves its trace, and runs once more, and its closed form."""
    return lambda: mpiad.jit(deciding)(MINE), np.sin(TOTAL)


def interpreted_on_tape():
    return gradient_of(mpiad.jit(lambda x: anp.sum(deciding(x))))


def ensemble(method, f, rtol=1e-6, **more):
    """Return the gradient of a solve by each trajectory's rate p, u(t) = exp(-p t), and its closed form."""
    p = np.array([[0.5], [1.5]])
    problem = EnsembleProblem(ODEProblem(f, np.ones(1), (0.0, 1.0)), p=p)

    def total(p):
        return anp.sum(solve(remade(problem, p), method, rtol=rtol, atol=1e-9, compile=False, **more).u_end)

    return lambda: mpiad.grad(total, comm=MPI.COMM_SELF)(p), -np.exp(-p)


def remade(problem, p):
    return mpiad.ensemble.remake(problem, p=p)


def explicit_ensemble():
    return ensemble(RK45(), lambda u, p, t: -p * u)


def implicit_ensemble():
    return ensemble(Rosenbrock23(), lambda u, p, t: [-p[0] * u[0]], rtol=1e-5)


def tangents_of_ensemble():
    return ensemble(RK45(), lambda u, p, t: [-p[0] * u[0]], gradient="tangent")


def linear_system():
    """Return the gradient of Σ u of all ranks, (D + 11ᵀ) u = b, by b, and its closed form."""
    diagonal = 2.0 + np.arange(3.0)
    inverse = np.linalg.inv(np.diag(np.tile(diagonal, WORLD.size)) + 1.0)

    def matvec(u, d):
        return d * u + mpiad.mpi_allreduce(anp.sum(u))

    def total(b):
        return mpiad.mpi_allreduce(anp.sum(linear_solve(matvec, b, diagonal, rtol=1e-12)))

    return lambda: mpiad.grad(total)(MINE), inverse.sum(0)[3 * WORLD.rank : 3 * WORLD.rank + 3]


interrupts_one = False
expire = None  # the function that makes an error of a wait that takes too long; not called outside of interrupted programs
LIMIT = 0.3  # seconds that other ranks wait for an interrupted one
ERRORS = (
    errors.DeadlockError, errors.CommunicationMismatchError, errors.UnfinishedMessagesError, errors.RequestError,
)  # fmt: skip
NEXT, LAST = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size


def exchanged():
    """Return the gradient of the sum over a ring of sin(x of the rank before), and its closed form."""

    def total(x):
        return anp.sum(anp.sin(mpiad.mpi_exchange(x, NEXT, source=LAST)))

    return lambda: mpiad.grad(total, objective="sum")(MINE), np.cos(MINE)


def sent():
    """Return the same by sends and receives."""

    def total(x):
        mpiad.mpi_send(x, NEXT)
        return anp.sum(anp.sin(mpiad.mpi_recv(x, LAST)))

    return lambda: mpiad.grad(total, objective="sum")(MINE), np.cos(MINE)


def begun():
    """Return the same by messages that are under way while others are begun; long ones, which wait for their receiver."""
    mine = np.tile(MINE, 8000)

    def total(x):
        sends = [mpiad.mpi_isend(x, NEXT, tag=tag) for tag in (1, 2)]
        receives = [mpiad.mpi_irecv(x, LAST, tag=tag) for tag in (2, 1)]
        found = mpiad.mpi_waitall([*receives, *sends])
        return anp.sum(anp.sin(found[0])) + anp.sum(anp.cos(found[1]))

    return lambda: mpiad.grad(total, objective="sum")(mine), np.cos(mine) - np.sin(mine)


def summed_later():
    """Return the gradient of Σ sin(Σ_r x_r) by a reduction that is waited for later, and its closed form."""
    return gradient_of(lambda x: anp.sum(anp.sin(mpiad.mpi_wait(mpiad.mpi_iallreduce(x)))))


def reset():
    """Reset; a rank that is interrupted alone isn't interrupted here, since the others can't repeat their part."""
    traced = sys.gettrace()
    if interrupts_one:
        sys.settrace(None)
    mpiad.reset()
    sys.settrace(traced)


class Failed(Exception):
    pass


class Left(BaseException):
    pass


@primitive
def failing_backwards(x):
    return x * 1.0


def fail(g):
    raise Failed


defvjp(failing_backwards, lambda ans, x: fail)


@primitive
def deciding_backwards(x):
    return x * 1.0


defvjp(deciding_backwards, lambda ans, x: lambda g: g if float(anp.sum(g)) else 0 * g)


@custom_operator
def failing_operator(x):
    mpiad.mpi_allreduce(x)
    raise Failed


def failing(f, call=mpiad.grad):
    """Return a program in which a derivative fails, and ranks go on to another one."""

    def run():
        with contextlib.suppress(Failed, Left):
            call(f)(MINE)
        reset()
        return mpiad.grad(of_total)(MINE)

    return run, np.cos(TOTAL)


def failing_trace():
    return failing(lambda x: fail(mpiad.mpi_allreduce(x)))


def failing_body():
    return failing(lambda x: anp.sum(failing_operator(x)))


def failing_pass():
    return failing(lambda x: anp.sum(mpiad.mpi_allreduce(failing_backwards(x))))


def failing_compiled():
    return failing(mpiad.jit(lambda x: fail(mpiad.mpi_allreduce(x))))


def twice_on_tape():
    """Return the gradient of a compiled function of itself, traced by its first call alone, and its closed form."""
    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)))
    evaluate = mpiad.grad(lambda x: anp.sum(jitted(jitted(x))))
    total = WORLD.size * np.sin(TOTAL)
    return lambda: evaluate(MINE), np.cos(total) * WORLD.size * np.cos(TOTAL)


def interpreted_backwards():
    """Return a gradient whose reverse pass leaves its trace, and its closed form."""
    jitted = mpiad.jit(lambda x: anp.sum(anp.sin(mpiad.mpi_allreduce(deciding_backwards(x)))))
    return called_twice(mpiad.grad(jitted)), np.cos(TOTAL)


def interpreted_twice():
    """Return a function that leaves its trace and communicates then, called twice, and its closed form."""
    jitted = mpiad.jit(lambda x: mpiad.mpi_allreduce(deciding(x)))

    def run():
        jitted(MINE)
        return jitted(MINE)

    return run, WORLD.size * np.sin(TOTAL)


def short():
    """Return a compiled function that doesn't communicate, called often, and its closed form."""
    jitted = mpiad.jit(lambda x: anp.sin(x) * 2.0)

    def run():
        return [jitted(MINE) for _ in range(4)][3] / 2

    return run, np.sin(MINE)


def pulled_together():
    """Return a function's transposed Jacobian times several cotangents, and its closed form."""

    def run():
        pull, _ = mpiad.make_vjp(lambda x: anp.sin(mpiad.mpi_allreduce(x)))(MINE)
        return pull(np.eye(3), batch=True) / WORLD.size

    return run, np.diag(np.cos(TOTAL))


def pulled_in_lanes():
    """Return the same of an operator that takes one cotangent at a time."""

    def run():
        pull, _ = mpiad.make_vjp(lambda x: anp.sin(summed(x)))(MINE)
        return pull(np.eye(3), batch=True) / WORLD.size

    return run, np.diag(np.cos(TOTAL))


def failing_lanes():
    def pulled(f):
        return lambda x: mpiad.make_vjp(f)(x)[0](np.eye(3), batch=True)

    return failing(lambda x: mpiad.mpi_allreduce(failing_backwards(x)), pulled)


def failing_compiled_body():
    return failing(mpiad.jit(lambda x: anp.sum(failing_operator(x))))


def failing_tangent():
    return failing(lambda x: fail(mpiad.mpi_allreduce(x)), lambda f: lambda x: mpiad.jvp(f, x, x))


def within_compiled():
    """Return the gradient of a compiled function that calls another one, also in an operator, and its closed form."""
    inner = mpiad.jit(lambda x: anp.sin(x) * 1.0)
    inner(MINE), inner(MINE)
    body = custom_operator(lambda x: WORLD.allreduce(inner(x)))
    defadjoint(body, lambda g: summed(g))
    outer = mpiad.jit(lambda x: anp.sum(inner(mpiad.mpi_allreduce(x))))

    def run():
        body(MINE)
        return mpiad.grad(outer)(MINE)

    return run, np.cos(TOTAL)


def kept_values():
    """Return a gradient that uses values kept of an ended trace, and integers, and its closed form."""
    kept = []

    def run():
        kept.clear()
        mpiad.grad(lambda x: kept.append(x) or of_total(x))(MINE)

        def f(x):
            mpiad.mpi_allreduce(kept[0])
            mpiad.mpi_allreduce(anp.argmax(x))
            return of_total(x) + 0 * anp.sum(kept[0])

        return mpiad.grad(f)(MINE)

    return run, np.cos(TOTAL)


def catching():
    """Return a compiled function that catches what ends its trace, and its closed form."""

    def f(x):
        y = anp.sin(mpiad.mpi_allreduce(x))
        try:
            float(y[0])
        except BaseException:
            return y
        return y

    jitted = mpiad.jit(f)
    return lambda: jitted(MINE), np.sin(TOTAL)


class Observer:
    def began(self, call):
        """Take note of nothing."""

    ended = began


def noted():
    """Return a gradient whose calls are noted and observed, and its closed form."""

    def run():
        # Whoever has calls noted ends it twice: an interrupt may come before the first is done.
        try:
            try:
                calls.observers.append(Observer())
                calls.note("test")
                return mpiad.grad(lambda x: anp.sum(anp.sin(summed(x))) + 0 * of_total(x))(MINE)
            finally:
                calls.forget("test")
        finally:
            calls.forget("test")
            calls.observers.clear()

    return run, np.cos(TOTAL)


def single_solve():
    p = np.array([0.5])

    def total(p):
        return anp.sum(solve(ODEProblem(lambda u, p, t: -p * u, np.ones(1), (0.0, 1.0), p), compile=False).u_end)

    return lambda: mpiad.grad(total, comm=MPI.COMM_SELF)(p), -np.exp(-p)


def solve_over_ranks():
    return ensemble(RK45(), lambda u, p, t: -p * u, ensemblealg=EnsembleMPI(comm=MPI.COMM_SELF))


def left_compiled():
    def leave(x):
        raise Left

    return failing(mpiad.jit(lambda x: leave(mpiad.mpi_allreduce(x))))


def rows_compiled():
    """Return the Jacobian of a compiled function, which is traced once and run backwards three times."""
    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)))
    return lambda: mpiad.jacobian(jitted)(MINE), np.diag(np.cos(TOTAL))


class Unhashable:
    __hash__ = None


def unhashable():
    """Return a compiled function of an argument that can't be compared, and its closed form."""
    jitted = mpiad.jit(lambda x, other: anp.sin(mpiad.mpi_allreduce(x)))
    return lambda: jitted(MINE, Unhashable()), np.sin(TOTAL)


def strict():
    """Return a program in which a function can't be compiled and must be, and a gradient with its closed form."""
    jitted = mpiad.jit(deciding, strict=True)

    def run():
        for _ in range(2):
            with contextlib.suppress(TypeError):
                jitted(MINE)
        return mpiad.grad(of_total)(MINE)

    return run, np.cos(TOTAL)


def inner_values():
    """Return a gradient that uses and returns values of a trace inside it that has ended, and its closed form."""

    def f(x):
        kept = []
        mpiad.grad(lambda y: kept.append(anp.sum(y) * 0.0) or of_total(y))(np.ones(3))
        mpiad.mpi_allreduce(kept[0])
        x = x + kept[0]
        kept.append(of_total(x))
        mpiad.grad(lambda y: kept.append(kept[1] + anp.sum(y) * 0.0) or of_total(y))(np.ones(3))
        return kept[2]

    return lambda: mpiad.grad(f)(MINE), np.cos(TOTAL)


def compiled_within():
    """Return an operator that calls a compiled function that communicates, and its closed form."""
    inner = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)))
    inner(MINE)
    body = custom_operator(lambda x: inner(x))
    return lambda: body(MINE), np.sin(TOTAL)


def compiled_solve():
    """Return a compiled function that solves a system, and so is interpreted, and its closed form."""

    def matvec(u, d):
        return d * u + mpiad.mpi_allreduce(anp.sum(u))

    jitted = mpiad.jit(lambda b: linear_solve(matvec, b, 2.0 + np.arange(3.0), rtol=1e-12))
    right = matvec(MINE, 2.0 + np.arange(3.0))
    return lambda: jitted(right), MINE


def too_long():
    return mismatched(2)


def too_short():
    return mismatched(0.5)


def mismatched(factor):
    """Return a program that receives a message of another length, and a gradient with its closed form."""

    def f(x):
        mpiad.mpi_send(np.ones(int(6 * factor)), NEXT, tag=5)
        try:
            return anp.sum(x * mpiad.mpi_recv(np.ones(6), LAST, tag=5)[:3])
        except ValueError:
            raise Failed from None

    return failing(f)


def from_any_rank():
    """Return the gradient of the sum over a ring of sin(x of the rank before), of any that sends, and its closed form."""

    def total(x):
        mpiad.mpi_send(x, NEXT)
        return anp.sum(anp.sin(mpiad.mpi_recv(x, MPI.ANY_SOURCE)))

    return lambda: mpiad.grad(total, objective="sum")(MINE), np.cos(MINE)


def interpreted_messages():
    """Return the gradient of a function that leaves its trace after messages, some of them in an operator."""

    @custom_operator
    def shifted(x):
        mpiad.mpi_send(x, NEXT)
        return mpiad.mpi_recv(x, LAST)

    @custom_operator
    def shifted_back(x):
        mpiad.mpi_send(x, LAST)
        return mpiad.mpi_recv(x, NEXT)

    defadjoint(shifted, shifted_back)

    def f(x):
        mpiad.mpi_send(shifted(x), NEXT)
        return anp.sum(deciding(mpiad.mpi_recv(x, MPI.ANY_SOURCE)))

    return gradient_of(mpiad.jit(f))


def closing_over():
    """Return a compiled function that closes over a number, which changes, and its closed form."""
    scale = 1.0
    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)) * scale)

    def run():
        nonlocal scale
        for scale in (1.0, 2.0, 3.0):
            found = jitted(MINE) / scale
        return found

    return run, np.sin(TOTAL)


def unfinished_tangent():
    def f(x):
        mpiad.mpi_iallreduce(x)
        return anp.sum(x)

    def tangent(f):
        def run(x):
            try:
                return mpiad.jvp(f, x, x)
            except errors.RequestError:
                raise Failed from None

        return run

    return failing(f, tangent)


def rows_of_system():
    """Return the Jacobian of a solution by its right-hand side, and its closed form."""
    diagonal = 2.0 + np.arange(3.0)

    def solved(b):
        return linear_solve(lambda u, d: d * u, b, diagonal, rtol=1e-12, comm=MPI.COMM_SELF)

    return lambda: mpiad.jacobian(solved, comm=MPI.COMM_SELF)(MINE), np.diag(1 / diagonal)


def refused():
    """Return a program that calls a compiled function before a reset, and a gradient with its closed form."""
    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)))

    def f(x):
        mpiad.mpi_send(x, NEXT)
        raise Failed

    def run():
        jitted(MINE)
        with contextlib.suppress(Failed):
            mpiad.grad(f)(MINE)
        with contextlib.suppress(errors.UnfinishedMessagesError):
            jitted(MINE)
        reset()
        return mpiad.grad(of_total)(MINE)

    return run, np.cos(TOTAL)


def failing_field():
    """Return a program in which a derivative of an ensemble's equations fails, and a gradient with its closed form."""

    def field(u, p, t):
        if isbox(u):
            raise Failed
        return -p * u

    evaluate, _ = ensemble(RK45(), field)
    return failing(None, lambda _: lambda x: evaluate())


class Unreadable(list):
    """A list of one entry that can't be read."""

    def __init__(self, error):
        super().__init__([error])

    def __getitem__(self, place):
        raise super().__getitem__(place)


def failing_result():
    """Return a program in which a trace fails after its end, and a gradient with its closed form."""
    return failing(lambda x: Unreadable(Failed(mpiad.mpi_allreduce(x))))


def unreadable_argument():
    """Return a compiled function of an argument that can't be flattened, and its closed form."""
    jitted = mpiad.jit(lambda x, other: anp.sin(mpiad.mpi_allreduce(x)))
    return lambda: jitted(MINE, Unreadable(TypeError("unreadable"))), np.sin(TOTAL)


def tapes_left_open(f):
    """Return a program that fails with two tapes open, as an interrupt before the first line of an exit leaves them."""

    def g(x):
        OrderedTape().__enter__()
        OrderedTape().__enter__()
        fail(x)

    return failing(f(g))


def tapes_left_in_compiled():
    return tapes_left_open(mpiad.jit)


def tapes_left_in_trace():
    return tapes_left_open(lambda g: lambda x: g(mpiad.mpi_allreduce(x)))


def constant_result():
    """Return a gradient computed next to a constant result, and its closed form."""

    def run():
        pull, _ = mpiad.make_vjp(lambda x: (of_total(x), 1.0))(MINE)
        return pull((1.0, 0.0)) / WORLD.size

    return run, np.cos(TOTAL)


def training():
    """Return the gradient of a mean over all ranks' samples, whose sums start during the pass, and its closed form."""
    evaluate = mpiad.parallel.value_and_grad(lambda w, x: anp.sum(anp.sin(w[0]) * x) + w[1], bucket_bytes=8)
    return lambda: evaluate([0.5, 0.2], np.ones(4))[1], [4 * np.cos(0.5), 1.0]


def second_derivatives_compiled():
    """Return the Hessian of a compiled function, whose rows are computed together, and its closed form."""
    jitted = mpiad.jit(of_total)
    return called_twice(mpiad.jacobian(mpiad.grad(jitted))), -np.diag(np.sin(TOTAL))


def pulled_together_compiled():
    """Return the transposed Jacobian of a compiled function times several cotangents, and its closed form."""
    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)))

    def pulled(x):
        pull, _ = mpiad.make_vjp(jitted)(x)
        return pull(np.eye(3), batch=True) / WORLD.size

    return called_twice(pulled), np.diag(np.cos(TOTAL))


def pulled_with_constant():
    """Return the same of an operator whose adjoint takes all cotangents at once, and depends on one of two arguments."""
    operator = custom_operator(lambda x, y: WORLD.allreduce(x))
    defvjp_together(operator, lambda ans, x, y: lambda g: [summed(g), None])
    operator.batched_adjoint = True

    def run():
        pull, _ = mpiad.make_vjp(lambda x: anp.sin(operator(x, x)))(MINE)
        return pull(np.eye(3), batch=True) / WORLD.size

    return run, np.diag(np.cos(TOTAL))


def synchronized_in_compiled():
    """Return a compiled function that calls one that communicates by itself, and its closed form."""
    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)) * mpiad.parallel.synchronize(np.ones(1)))
    return lambda: jitted(MINE), np.sin(TOTAL)


def changing():
    """Return a compiled function that calls an operator whose result has another shape each time, and its closed form."""
    lengths = iter(())

    @custom_operator
    def cut(x):
        return x[: next(lengths)] * 1.0

    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(cut(x))))

    def run():
        nonlocal lengths
        lengths = iter((2, 3, 3, 3))
        jitted(MINE)
        return jitted(MINE)

    return run, np.sin(TOTAL)


def compiled_by_shapes():
    """Return a function of a large array, compiled before it is run, and its closed form."""
    large = np.tile(MINE, 3000)
    jitted = mpiad.jit(lambda x: anp.sin(mpiad.mpi_allreduce(x)))

    def run():
        jitted(large)
        return jitted(large)

    return run, np.tile(np.sin(TOTAL), 3000)


def unsupported_call():
    """Return a function that calls what can't be compiled, and its closed form."""
    jitted = mpiad.jit(lambda x: anp.sin(anp.reshape(mpiad.mpi_allreduce(x), (3,), order="A")))
    return lambda: jitted(MINE), np.sin(TOTAL)


def closing_over_traced():
    """Return a function whose operator uses a traced value from outside, and its closed form."""

    def f(x):
        inner = custom_operator(lambda y: y + 0 * anp.sum(x))
        return anp.sin(mpiad.mpi_allreduce(inner(x)))

    jitted = mpiad.jit(f)
    return lambda: jitted(MINE), np.sin(TOTAL)


def exchanged_too_long():
    """Return a program that receives a longer message by an exchange than expected, and a gradient with its closed form."""

    def f(x):
        try:
            return anp.sum(mpiad.mpi_exchange(x, NEXT, source=LAST, like=np.zeros(2)))
        except ValueError:
            raise Failed from None

    return failing(f)


class Refusing:
    """A communicator that starts no reduction."""

    def Iallreduce(self, *_):
        raise MPI.Exception(MPI.ERR_OTHER)


def refused_by_mpi():
    """Return a program in which MPI refuses to start a reduction, and a gradient with its closed form."""

    def f(x):
        used = channel(None, "test")
        used.data, kept = Refusing(), used.data
        try:
            return mpiad.mpi_iallreduce(x)
        except MPI.Exception:
            raise Failed from None
        finally:
            used.data = kept

    return failing(f)


PROGRAMS = ( exchanged, sent, begun, summed_later, left_compiled,
    rows_compiled, unhashable, strict, inner_values, compiled_within, compiled_solve,
    pulled_in_lanes, failing_lanes, failing_compiled_body, failing_tangent, within_compiled, kept_values, catching, noted,
    single_solve, solve_over_ranks,
    gradient, operator, product, rows, compiled, compiled_on_tape, compiled_gradient, interpreted, interpreted_on_tape,
    failing_trace, failing_body, failing_pass, failing_compiled, twice_on_tape, interpreted_backwards, interpreted_twice,
    too_long, too_short, from_any_rank, interpreted_messages, closing_over, unfinished_tangent, rows_of_system, refused,
    short, pulled_together, explicit_ensemble, implicit_ensemble, tangents_of_ensemble, linear_system,
    failing_field, failing_result, unreadable_argument, tapes_left_in_compiled, tapes_left_in_trace, constant_result,
    training, second_derivatives_compiled, changing, compiled_by_shapes, unsupported_call, closing_over_traced,
    exchanged_too_long, refused_by_mpi, pulled_together_compiled, pulled_with_constant,
    synchronized_in_compiled,
)  # fmt: skip
# Waits in bare mpi4py have no limit.
BARE = (operator, pulled_in_lanes, within_compiled, noted, pulled_with_constant)
CLOSE = {
    "compiled_solve": 1e-8,
    "single_solve": 1e-2,
    "solve_over_ranks": 1e-5,
    "explicit_ensemble": 1e-5,
    "implicit_ensemble": 1e-3,
    "tangents_of_ensemble": 1e-5,
    "linear_system": 1e-8,
    "rows_of_system": 1e-8,
}

# The functions of which the lines are counted: those that trace, run backwards, trace for jit, replay and solve.
NAMED = {
    trace: "trace_backwards trace_forwards",
    tape: "LibraryTape.__enter__ LibraryTape.__exit__ LibraryTape.close LibraryTape.end OrderedTape.end_values "
    "OrderedTape.communicated trace_list unboxed _open_number _close_number",
    forward: "TangentTape.communicated Bundle.__enter__ Bundle.__exit__ Bundle.variable",
    operation: "suspended.__enter__ suspended.__exit__ communicate apply Operation.run",
    custom_operators: "CustomOperator.__call__ CustomOperator.run CustomOperator.body CustomOperator._as_one_node",
    backward: "run_backward run_backward_together sweep sweep_together",
    tracing: "restoring_state.__enter__ restoring_state.__exit__ restore_state",
    interpretation: "Interpretation.__enter__ Interpretation.__exit__ Interpretation.end message_counts "
    "Interpretation.communicate Interpretation._logged Interpretation._run",
    function: "Jitted.__call__ Jitted._replayed",
    program_cache: "ProgramCache.entry ProgramCache.compiled ProgramCache.program "
    "ProgramCache.fail ProgramCache.interpreted Entry.called Entry.is_current Entry.__init__ count "
    "optional_program traced_parts",
    calls_on_tape: "_traced_on_tape _noted _run",
    operations: "CompiledOperation.__call__ CompiledOperation._run CompiledOperation._derive",
    transforms: "Evaluation.run Evaluation.called recorded vjp jvp linearized",
    recorder: "Recorder.__enter__ Recorder.__exit__ Recorder.end Recorder.arguments Recorder.call "
    "Recorder.communicate Recorder._noted Recorder._step _report_recording",
    calls: "begin begin_rule _pushed end note forget",
    traced_array: "let_arrays_be_traced",
    channels: "report_to_recorders Channel.begin Channel.leave Channel._drop_sent",
    messages: "post_send Receipt.__init__ finish_receive receive send",
    collectives: "start_allreduce Summation.finish",
    "mpiad.ensemble.solve": "solve",
    "mpiad.linalg.solve": "solve",
    "mpiad.linalg.compiled_iteration": "Operator.program Operator._arguments Operator._known",
}  # fmt: skip


@cache
def named_lines():
    """Return the lines of the named functions, by file and line."""
    found = {}
    for module, names in NAMED.items():
        module = sys.modules[module] if isinstance(module, str) else module
        for name in names.split():
            target = module
            for part in name.split("."):
                target = inspect.getattr_static(target, part)
            target = inspect.unwrap(getattr(target, "func", target))  # "func" of a cached property
            found[f"{module.__name__}.{name}"] = set(_lines_of(target.__code__))
    return found


def _lines_of(code):
    first = code.co_firstlineno
    instructions = list(dis.get_instructions(code))
    for k, each in enumerate(instructions):
        line = each.starts_line and getattr(each, "line_number", each.starts_line)  # a bool from Python 3.13 on
        if line and line > first and each.opname != "RESUME" and not _ends_with(instructions, k):
            yield code.co_filename, line
    for const in code.co_consts:
        if hasattr(const, "co_code") and const.co_name not in ("<listcomp>", "<genexpr>", "<lambda>", "<setcomp>"):
            yield from _lines_of(const)


def _ends_with(instructions, k):
    """Return whether the call of `__exit__` after the body of a `with` begins at an instruction."""
    three = instructions[k : k + 3]
    none = three[0].opname == "LOAD_CONST" and three[0].argval is None
    same = all(each.opname in ("LOAD_CONST", "DUP_TOP", "COPY") and each.argval in (None, 1) for each in three[1:])
    return (
        none and same and len(instructions) > k + 3 and instructions[k + 3].opname in ("PRECALL", "CALL", "CALL_FUNCTION")
    )


@cache
def _exits(code):
    instructions = list(dis.get_instructions(code))
    return {each.offset for k, each in enumerate(instructions) if _ends_with(instructions, k)}


class Lines:
    """Notes the lines that a program comes to, or interrupts it before one of them, the n-th time that it comes there."""

    def __init__(self, line=None, times=1):
        self.line, self.left, self.met, self.has_come = line, times, [], False

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        self._reached(frame, frame.f_code.co_firstlineno)
        return self._at_line

    def _at_line(self, frame, event, arg):
        if event == "line" and frame.f_lasti not in _exits(frame.f_code):
            self._reached(frame, frame.f_lineno)
        return self._at_line

    def _reached(self, frame, line):
        place = frame.f_code.co_filename, line
        if self.line is None:
            self.met.append(place)
        elif place == self.line:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.has_come = True
                raise KeyboardInterrupt


def lines_of(make, alone=None):
    """Return how often a program comes to each line, on all ranks or on one `alone`."""
    for _ in range(2):  # what is done at the first use of anything is done before
        run, _ = make()
        run()
    several = []
    for _ in range(3):
        run, _ = make()
        with Lines() as lines:
            run()
        several.append(Counter(lines.met))
    # How often a program comes to lines that wait for messages depends on when these arrive. A rank that doesn't come to
    # the line at which others are interrupted waits for them.
    counts = Counter({line: times for line, times in several[0].items() if all(found[line] == times for found in several)})
    # All ranks are interrupted at the same place: at lines to which they come equally often.
    every = WORLD.allgather(counts)
    if alone is not None:
        return every[alone]
    return {line: times for line, times in every[0].items() if all(each[line] == times for each in every)}


def state():
    """Return what an interrupt must leave as it was, with what it must be."""
    used = channel(None, "state")
    return {
        "thread": dict(tracing.tracing.__dict__), "open traces": dict(tape._open), "counter": trace_stack.top,
        "recorders": set(recorder._open_recorders), "noting": calls.is_noting(), "told": "data" in vars(channels.Channel),
        "forward": operation.communicate.__module__, "waits": timed_waits.present_waits(),
        "patience": list(signals._patience), "alone": used.alone, "looking": used._test_lock._is_owned(),
        "started": [kind for kind, _, _ in used.started.values() if kind != "background send"],
        "deadline": timed_waits._expire, "derived": len(used.derived),
    }  # fmt: skip


def interrupt(make, line, times, before, alone=None):
    """Interrupt a program, and return whether the interrupt came; raise an AssertionError if it leaves anything."""
    run, expected = make()
    close = CLOSE.get(make.__name__, 1e-12)
    place = f"{make.__name__}, interrupted at {line} ({times})"
    if alone is None:
        has_come = interrupted(run, line, times)
        if mpiad_fails():
            mpiad.reset()
    else:
        has_come = interrupted_alone(run, line, times, alone)
        WORLD.Barrier()
        mpiad.reset()
    after = state()
    assert after == before, (place, {key: (before[key], after[key]) for key in before if before[key] != after[key]})
    ours = mpiad.mpi_allreduce(1.0)
    assert type(ours) is np.float64 and ours == WORLD.size, (place, ours)
    np.testing.assert_allclose(mpiad.grad(of_total)(MINE), np.cos(TOTAL), rtol=1e-12, err_msg=place)
    np.testing.assert_allclose(run(), expected, rtol=close, err_msg=place)
    return has_come


def interrupted(run, line, times):
    """Run a program up to a line; return whether it has come there."""
    with contextlib.suppress(KeyboardInterrupt), Lines(line, times) as lines:
        run()
    return lines.has_come


def interrupted_alone(run, line, times, alone):
    """Run a program, on one rank up to a line; return whether that has come there."""
    has_come = True
    timed_waits._expire = expire
    try:
        if WORLD.rank == alone:
            has_come = interrupted(run, line, times)
        else:
            run()
    except ERRORS:
        pass
    finally:
        timed_waits._expire = None
    return has_come


def mpiad_fails():
    """Return whether a communication is refused by an error of the library's."""
    try:
        mpiad.mpi_allreduce(1.0)
    except errors.UnfinishedMessagesError:
        return True
    return False


def campaign(number, seed, programs=PROGRAMS, alone=None):
    """Interrupt programs so many times, on all ranks or on one `alone`; return the lines before which an interrupt came.

    Each line that a program comes to is interrupted at its first time, as far as the number suffices; further times are
    drawn.
    """
    if alone is None:
        return _campaign(number, seed, programs, None)
    global interrupts_one, expire
    interrupts_one = True
    with mpiad.debug.checked(timeout=LIMIT), pytest.MonkeyPatch.context() as patched:
        expire = timed_waits._expire
        patched.setattr(timed_waits, "_expire", None)
        found = _campaign(number, seed, [make for make in programs if make not in BARE], alone)
    interrupts_one = False
    return found


def _campaign(number, seed, programs, alone):
    rng = random.Random(seed)
    met = {make: lines_of(make, alone) for make in programs}
    mpiad.mpi_allreduce(1.0)
    before, named = state(), set().union(*named_lines().values())
    first = [(make, line, 1) for make, lines in met.items() for line in sorted(lines)]
    rng.shuffle(first)
    first.sort(key=lambda one: one[1] not in named)
    every, hit = [(make, line) for make, line, _ in first], []
    while len(hit) < number:
        make, line, times = first.pop(0) if first else drawn(rng, every, met)
        # The interrupt doesn't come where what is run depends on what was run before.
        if all(WORLD.allgather(interrupt(make, line, times, before, alone))):
            hit.append(line)
    return hit


def drawn(rng, every, met):
    make, line = rng.choice(every)
    return make, line, rng.randint(1, met[make][line])


def main():
    logging.getLogger("mpiad").setLevel(logging.ERROR)  # of what is interpreted it is said each time
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--alone", type=int, metavar="RANK", help="interrupt only this rank, in debug mode")
    given = parser.parse_args()
    start = time.monotonic()
    found = campaign(given.interrupts, given.seed, alone=given.alone)
    if WORLD.rank:
        return
    hit, wanted = set(found), named_lines()
    for name, lines in wanted.items():
        missed = sorted(line for _, line in lines - hit)
        print(f"{name}: {len(lines & hit)} of {len(lines)} lines" + (f", not {missed}" if missed else ""))
    every = set().union(*wanted.values())
    share = len(every & hit) / len(every)
    print(f"{len(every & hit)} of {len(every)} lines of these functions were interrupted: {100 * share:.1f} %")
    print(f"{len(found)} interrupts at {len(hit)} lines, no state was left, {time.monotonic() - start:.0f} s")
    sys.exit(share < 0.95)


if __name__ == "__main__":
    main()
