"""A jitted function beside the one that it is made of: values and derivatives, at the trace and in replays."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np

import mpiad
from mpiad.pytrees import flatten


def assert_same(found: Any, expected: Any, rounding: float = 1e-12) -> None:
    """Check that two nests have equal forms and leaves: types, dtypes, shapes, and values to rounding."""
    a, b = flatten(found)[0], flatten(expected)[0]
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        # A program returns numbers of NumPy's where Python's own would be left: they are floats, too.
        assert type(x) is type(y) or type(y) in (float, complex) and isinstance(x, type(y))
        if not isinstance(y, (np.ndarray, np.generic, float, complex)):
            assert x == y
            continue
        y = y if hasattr(y, "dtype") else np.asarray(y)[()]
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        finite = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=1.0) if y.dtype.kind in "fc" else 1.0
        np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding * finite)


def forget_programs(*modules: str) -> None:
    """Let functions be compiled again that are like others; their programs are shared."""
    for name in modules or ("function", "compiled_forms"):
        if module := sys.modules.get(f"mpiad.programs.{name}"):
            module._templates.known.clear()


def further(x: Any) -> Any:
    """Return an argument of the same shape and dtype with other values."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "fc":
        return (x[..., ::-1] * 1.25 + 0.125 if x.ndim else np.asarray(x * 1.25)).astype(x.dtype)
    return type(x)(x * 1.25) if isinstance(x, float) else x


def objective(fun: Callable) -> Callable:
    """Return a real sum over all that a function returns, which weighs entries, and parts of complex ones, differently."""

    def total(*args: Any) -> Any:
        terms = [anp.sum(anp.sin(part)) for part in flatten(fun(*args))[0]]
        return sum([anp.real((0.75 - 1.25j) * term) if anp.iscomplexobj(term) else term for term in terms])

    return total


def check_jit(fun: Callable, *args: Any, rounding: float = 1e-12, derivatives: bool = True, outside: bool = False) -> None:
    """Check that a function compiles, and that replays of its programs and their derivatives agree with it.

    The programs are traced with these arguments and replayed with others: a value that was kept shows. `outside`: also
    where a jitted sum of all is differentiated, whose programs are those of the function and of the sum together.
    """
    calls: Sequence[tuple] = [args, tuple([further(x) for x in args]), args]
    jitted = mpiad.jit(fun, strict=True)
    for given in calls:
        assert_same(jitted(*given), fun(*given), rounding)
    if not derivatives:
        return
    total = objective(fun)
    forms = [mpiad.jit(mpiad.value_and_grad(total), strict=True), mpiad.value_and_grad(objective(jitted))]
    if outside:
        forms.append(mpiad.value_and_grad(mpiad.jit(total, strict=True)))
    for given in calls:
        expected = mpiad.value_and_grad(total)(*given)
        for form in forms:
            assert_same(form(*given), expected, 10 * rounding)
