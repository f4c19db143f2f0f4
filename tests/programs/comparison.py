"""Whether the library differentiates a program as the reference does: value, gradient, tangent and second order."""

from contextlib import contextmanager, suppress

import autograd.numpy as anp
import numpy as np
from programs import arithmetic, in_one_process, jets, on_ranks

import mpiad
from mpiad.compiling.closure import Unknown
from mpiad.compiling.watch import Watch
from mpiad.programs import program_cache

ROUNDING = {False: 1e-9, True: 1e-3}
"""By whether a program is in single precision; relative to the largest number of its kind on any rank, or to one."""


def differences(program):
    """Run and differentiate a program; return what differs on this rank, one line each. All ranks call it.

    None where the reference can't tell.
    """
    rank, (xs, vs) = on_ranks.WORLD.rank, arithmetic.inputs(program)
    on_ranks.communicators()  # a rank that is jitted runs a program several times
    try:
        wanted = expected(program, xs, vs)
    except in_one_process.Undecided:
        return None
    dtype = np.dtype({8: "f4", 16: "c8"}[xs[rank].itemsize]) if program.single else xs[rank].dtype
    x, v = xs[rank].astype(dtype), vs[rank].astype(dtype)
    results = found(program, arithmetic.placed(x), arithmetic.placed(v))
    if arithmetic.ON_DEVICES:
        results = {name: arithmetic.ON_DEVICES[0].on_host(result) for name, result in results.items()}
    dtypes = {"J": np.dtype("f8"), "gradient": dtype, "second order": dtype}
    lines = [compared(name, results[name], wanted[name.strip()], program, dtypes.get(name.strip())) for name in results]
    return [line for line in lines if line]


def found(program, x, v):
    """Return what the library finds on this rank, by name."""

    def run(z):
        return on_ranks.run(program, z)

    def tangent(z, v):
        return mpiad.jvp(run, z, v)[1]

    if program.compiled != "none":
        return _compiled(program, run, tangent, x, v)
    value, gradient = mpiad.value_and_grad(run, **keywords(program))(x)
    results = {"J": value, "gradient": gradient, "tangent": tangent(x, v)}
    if program.second == "forward":
        results["second tangent"] = mpiad.jvp(lambda z: tangent(z, v), x, v)[1]
    elif program.second == "hvp":
        results["second order"] = mpiad.hvp(run, **keywords(program))(x, v)
    else:
        gradient = mpiad.grad(run, **keywords(program))
        # Every rank's product holds the whole gradient where the variable is shared: one of them counts.
        outer = {"objective": "mean" if program.shared else "sum", "shared": program.shared}
        results["second order"] = mpiad.grad(lambda z: anp.real(anp.sum(gradient(z) * v)), **outer)(x)
    return _known(program, results)


def _compiled(program, run, tangent, x, v):
    """Return what the library finds in replays, on ranks where the program is jitted; the traces have other arguments."""
    here = program.compiled == "all" or on_ranks.WORLD.rank % 2 == 0

    def made(fun):
        return mpiad.jit(fun) if here else fun

    inside = mpiad.value_and_grad(made(run), **keywords(program))
    outside = made(mpiad.value_and_grad(run, **keywords(program)))
    along, second = made(tangent), made(mpiad.hvp(run, **keywords(program)))
    kept = mpiad.make_hvp(made(run), **keywords(program))
    with watching_nothing():
        for z, w in ((x * 0.75, v * 0.5), (x, v)):
            (value, gradient), by_both = inside(z), outside(z)
            results = {"J": value, "gradient": gradient, "J ": by_both[0], "gradient ": by_both[1], "tangent": along(z, w)}
            if program.second == "hvp":
                results["second order"] = second(z, w)
                results["second order "] = mpiad.hvp(made(run), **keywords(program))(z, w)
            elif program.second == "reverse":
                product = kept(z).product
                results["second order"], both = product(w), product(np.stack([z, w]), batch=True)
                results["second order "] = both[1]
    return _known(program, results)


@contextmanager
def watching_nothing():
    """A context in which what a function reads beside its arguments needn't be followed: a program never changes."""
    bare = program_cache.watch_of

    def watch(*args):
        with suppress(Unknown):
            bare(*args)  # tells of traced values from around it
        return Watch()

    program_cache.watch_of = watch
    try:
        yield
    finally:
        program_cache.watch_of = bare


def _known(program, results):
    """Return those results that the reference has."""
    if program.losses[on_ranks.WORLD.rank] == "none":
        results = {name: result for name, result in results.items() if "tangent" not in name}
    return results


def keywords(program):
    return {"objective": program.objective, "root": program.root, "shared": program.shared}


def expected(program, xs, vs):
    """Return the same of all ranks, as the reference finds it."""
    losses = in_one_process.run(program, xs, vs)
    weights = np.full(program.size, 1.0 if program.objective == "sum" else 1.0 / program.size)
    if program.objective == "root":
        weights = np.arange(program.size) == program.root
    total = sum(loss * float(weight) for loss, weight in zip(losses, weights))
    gradients, seconds = jets.cut(total.first, xs), jets.cut(total.second, xs)
    if program.shared:
        gradients, seconds = [sum(gradients)] * program.size, [sum(seconds)] * program.size
    curvatures = [sum(np.sum(g * v).real for g, v in zip(jets.cut(loss.second, xs), vs)) for loss in losses]
    return {
        "J": [total.value] * program.size, "gradient": gradients, "second order": seconds,
        "tangent": [loss.along for loss in losses], "second tangent": curvatures,
    }  # fmt: skip


def compared(name, got, everyones, program, dtype=None):
    """Return "" where a result is as expected, else a line that says how it isn't."""
    if hasattr(got, "_trace"):
        return f"{name}: a traced value was returned: {got}"
    wanted = np.asarray(everyones[on_ranks.WORLD.rank])
    got = np.asarray(got)
    if got.shape != wanted.shape or (dtype is not None and got.dtype != dtype):
        return f"{name}: got shape {got.shape}, dtype {got.dtype}, expected {wanted.shape}, {dtype}"
    scale = max(1.0, *(np.max(np.abs(each)) for each in everyones))
    error = np.max(np.abs(got - wanted)) / scale
    if error <= ROUNDING[program.single]:
        return ""
    return f"{name}: off by {error:.1e} of {scale:.3g}\n  got      {got}\n  expected {wanted}"
