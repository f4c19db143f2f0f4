"""Every function of `autograd.numpy`, its `linalg` and `fft`: derivatives of both orders against differences of values.

    python tests/derivative_sweep.py [NAME ...] the cases that are wrong, and the rows of the page
    python tests/derivative_sweep.py --write    write that page, docs/reference/numpy_functions.md

A case is a call, as the text of an expression of x, with the shape and the kind (real or complex) of x. A call that NumPy
itself refuses for an x is no case. For each case there are four outcomes: reverse, forward, reverse over reverse and forward
over reverse. An outcome is right, or refused with a NotImplementedError that names the function, or wrong.
"""

# ruff: noqa: E501 (lists of calls, and a page)

from __future__ import annotations

import copy
import importlib
import inspect
import operator
import pkgutil
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import autograd.numpy as np
import autograd.scipy
import numpy as onp
from autograd.core import VJPNode, primitive_vjps
from autograd.numpy import fft, linalg
from autograd.tracer import notrace_primitives

import mpiad
from mpiad.differentiation.rules import VJP_RULES

MODES = ("reverse", "forward", "reverse over reverse", "forward over reverse")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "numpy_functions.md"
NAMESPACE: dict[str, Any] = {"np": np, "linalg": linalg, "fft": fft, "array": onp.array, "copy": copy}
# Constants of the calls: a positive one, which broadcasts with the last axis of x, a matrix, a mask, a complex one.
NAMESPACE.update(
    a=onp.array([0.7, 1.3, 2.1]), m=onp.array([[1.5, 0.4, -0.3], [0.2, 1.9, 0.6]]), z=onp.array([0.5 + 0.3j, 1.1 - 0.4j, 2 + 1j]),
    mask=onp.array([True, False, True]), column=onp.array([[1.2], [0.8]]),
)  # fmt: skip


class Case(NamedTuple):
    """A call of one function."""

    name: str
    call: str
    shape: tuple[int, ...]
    kind: str
    domain: str = "any"

    def fun(self) -> Callable:
        """Return the function of x."""
        # Copies: some functions write into their arguments.
        names = {name: value.copy() if isinstance(value, onp.ndarray) else value for name, value in NAMESPACE.items()}
        return eval(f"lambda x: {self.call}", names)

    def __str__(self) -> str:
        return f"{self.call} of shape {self.shape}, {self.kind}"


def point(case: Case, seed: int = 0) -> onp.ndarray:
    """Return an x in the domain of the function, no two elements of which are equal."""
    numbers, rng = _apart(seed, case.shape)
    shape, rng = case.shape, copy.deepcopy(rng)
    x = onp.array(numbers, dtype=float).reshape(shape)
    if case.domain == "positive":
        x = 0.4 * onp.abs(x) + 0.5
    elif case.domain == "inside":
        x = 0.7 * onp.tanh(x)
    elif case.domain == "above one":
        x = onp.abs(x) + 1.3
    elif case.domain == "one zero" or case.domain == "two zeros":
        x = onp.asarray(x)
        x.reshape(-1)[: 1 if case.domain == "one zero" else 2] = 0.0
    if case.kind == "complex":
        y = rng.normal(size=shape) * (1.0 if case.domain == "any" else 0.2)
        x = x + 1j * (y * (x != 0) if case.domain.endswith(("zero", "zeros")) else y)
    if case.domain in ("matrix", "spd"):
        n = shape[-1]
        x = 0.4 * x + 2.0 * onp.eye(shape[-2], n)
        if case.domain == "spd":
            x = 0.05 * x @ onp.conj(onp.swapaxes(x, -1, -2)) + onp.diag(onp.arange(1.0, 2 * n, 2))
    return onp.asarray(x) if shape else onp.asarray(x)[()]


@cache
def _apart(seed: int, shape: tuple[int, ...]) -> tuple[list[float], onp.random.Generator]:
    """Return numbers away from each other and from where functions have kinks: 0, bounds and periods of the calls.

    The generator is for further numbers.
    """
    rng, n = onp.random.default_rng([seed, len(shape), *shape]), int(onp.prod(shape))
    kinks = [sign * step * k for step in (0.5, 0.7, 1.3, 2.0, 2.1) for sign in (1, -1) for k in (1, 2, 3, 4)]
    kinks += [sign * step / k for step in (0.7, 1.3, 2.0, 2.1) for sign in (1, -1) for k in range(1, 11)]
    found: list[float] = []
    while len(found) < n:
        value = rng.normal() * 1.4
        if abs(value) > 0.2 and min(abs(value - other) for other in [*kinks, *found]) > 0.016:
            found.append(value)
    return found, rng


# ---- the four derivatives, and differences


def parts(y: Any) -> list[Any]:
    """Return the arrays of a result that may be several."""
    if isinstance(y, (list, tuple)) or type(y).__name__ == "SequenceBox":
        return [part for k in range(len(y)) for part in parts(y[k])]
    return [y]


def loss_of(fun: Callable, weights: list[onp.ndarray]) -> Callable:
    """Return a loss that isn't linear in what the function returns."""

    def loss(x):
        total = 0.0
        for y, w in zip(parts(fun(x)), weights):
            total = total + np.sum(np.sin(np.real(y) + w) * w)
            if np.iscomplexobj(y):
                total = total + np.sum(np.cos(np.imag(y) - w) * w)
        return total

    return loss


def difference(fun: Callable, h: float) -> Any:
    """Return the derivative at 0 of a function of one real number, with an error of the sixth order."""
    terms = [(fun(k * h), fun(-k * h), c) for k, c in ((1, 45.0), (2, -9.0), (3, 1.0))]
    return sum(c * (onp.asarray(up) - down) for up, down, c in terms) / (60.0 * h)


def mixed_difference(fun: Callable, h: float) -> Any:
    """Return ∂²/∂s∂t at 0 of a function of two real numbers, with an error of the sixth order.

    It is a quarter of the difference between the second derivatives along (1, 1) and (1, -1), whose terms at 0 cancel.
    """
    terms = [(k * h, c) for k, c in ((1, 270.0), (2, -27.0), (3, 2.0), (-1, 270.0), (-2, -27.0), (-3, 2.0))]
    return sum(c * (fun(t, t) - fun(t, -t)) for t, c in terms) / (4 * 180.0 * h**2)


def close(found: Any, expected: Any, tolerance: float) -> bool:
    found, expected = onp.asarray(found), onp.asarray(expected)
    if found.shape != expected.shape or (onp.iscomplexobj(found) and not onp.iscomplexobj(expected)):
        return False
    return bool(onp.all(onp.abs(found - expected) <= tolerance * (1.0 + onp.max(onp.abs(expected), initial=0.0))))


def outcomes(case: Case, seed: int = 0, modes: int = 4) -> tuple[str, ...] | None:
    """Return what the four derivatives of a case are: "right", "refused: ..." or "wrong: ..."; None where NumPy refuses."""
    fun, x = case.fun(), point(case, seed)
    try:
        values = [onp.asarray(value) for value in parts(fun(x))]
    except Exception:
        return None
    if any(value.dtype.kind not in "fc" or not onp.all(onp.isfinite(value)) for value in values):
        return None
    rng = onp.random.default_rng(seed + 1)
    weights = [rng.uniform(0.5, 1.5, value.shape) for value in values]
    loss = loss_of(fun, weights)
    v, w = (_direction(x, case, rng) for _ in range(2))

    def pairing(g, direction):
        return np.sum(np.real(g * direction))

    def reverse():
        g = mpiad.grad(loss)(x)
        return pairing(g, v), difference(lambda t: loss(x + t * v), 1e-3), onp.shape(g) == onp.shape(x) and _real_as(g, x)

    def forward():
        found, expected = parts(mpiad.jvp(fun, x, v)[1]), []
        for k in range(len(values)):
            expected.append(difference(lambda t, k=k: parts(fun(x + t * v))[k], 1e-3))
        fits = len(found) == len(values) and all(map(close, found, expected, [1e-7] * len(values)))
        return 0.0, 0.0, fits and all(map(_real_as, found, values))

    @cache
    def curvature():
        return mixed_difference(lambda s, t: loss(x + t * v + s * w), 4e-3)

    def reverse_reverse():
        g = mpiad.grad(lambda x: pairing(mpiad.grad(loss)(x), v))(x)
        return pairing(g, w), curvature(), onp.shape(g) == onp.shape(x)

    def forward_reverse():
        g = mpiad.jvp(mpiad.grad(loss), x, v)[1]
        return pairing(g, w), curvature(), onp.shape(g) == onp.shape(x)

    return tuple([
        _outcome(derivative, case, tolerance)
        for derivative, tolerance in ((reverse, 1e-7), (forward, 1e-7), (reverse_reverse, 1e-5), (forward_reverse, 1e-5))[:modes]
    ])  # fmt: skip


def _direction(x: onp.ndarray, case: Case, rng: onp.random.Generator) -> onp.ndarray:
    v = rng.normal(size=onp.shape(x)) + (1j * rng.normal(size=onp.shape(x)) if case.kind == "complex" else 0.0)
    if case.domain == "spd":
        v = v + onp.conj(onp.swapaxes(v, -1, -2))
    return onp.asarray(0.3 * v)[()] if case.shape == () else 0.3 * v


def _real_as(found: Any, like: Any) -> bool:
    return onp.asarray(found).dtype == onp.asarray(like).dtype


def _outcome(derivative: Callable, case: Case, tolerance: float) -> str:
    try:
        found, expected, fits = derivative()
    except Exception as error:
        # By the name of the function that was called, not of one that its rule uses; a ufunc's is a TypeError.
        if isinstance(error, (NotImplementedError, TypeError)) and any(said in str(error) for said in _refusals(case)):
            return f"refused: {error}"
        return f"wrong: {type(error).__name__}: {error}"
    if not fits:
        return "wrong: shape, dtype or tangent"
    return "right" if close(found, expected, tolerance) else f"wrong: {found} for {expected}"


def _refusals(case: Case) -> list[str]:
    of_space = "." in case.name and case.name not in dict(OPERATORS).values()
    function = eval(case.name, {}, vars(np)) if of_space else getattr(np, case.name, None)
    names = {case.name.rpartition(".")[2], getattr(function, "__name__", case.name)}  # pow is power, acos is arccos
    return [f"{name} can't be differentiated" for name in names]


# ---- the cases: each call is tried with every shape and kind of x that NumPy takes

SHAPES = ((), (0,), (3,), (2, 3), (2, 2, 3))
SQUARES = ((3, 3), (2, 3, 3), (0, 0))
FILLED = {
    "axis": ("None", "0", "-1", "1", "(0, 1)", "(-1, 0)", "(0,)", "(0, 2)"),
    "one": ("None", "0", "-1", "1", "-2"),
    "of": ("0", "-1", "1", "-2"),
    "keep": ("", ", keepdims=True"),
    "norm": ("", ", norm='ortho'", ", norm='forward'"),
    "u": ("x, {}", "{}, x", "x, x * x"),
}

ELEMENTWISE = {
    "any": "abs absolute angle arcsinh arctan asinh atan conj conjugate cos cosh deg2rad degrees exp exp2 expm1 fabs imag nan_to_num "
    "negative positive rad2deg radians real real_if_close reciprocal sin sinh square tanh",
    "positive": "log log10 log1p log2 sqrt",
    "inside": "sinc tan acos arccos arcsin arctanh asin atanh",
    "above one": "acosh arccosh",
}
# Of two operands: x is the first, the second, or both.
BINARY = "add divide fmax fmin maximum minimum multiply pow power subtract true_divide arctan2 atan2 hypot logaddexp logaddexp2 mod remainder copysign heaviside"
CALLS = """
-x; x + 1j; 1j - x; x * (2 + 1j); x / 1j; 1j / x; x - np.float64(1); np.float64(2) / x; x ** 2; x ** 3; x ** -1; x ** 0; x % 0.7; abs(x)
np.sum(x, axis={axis}{keep}); np.mean(x, axis={axis}{keep}); np.prod(x, axis={axis}{keep}); np.var(x, axis={axis}{keep})
np.std(x, axis={axis}{keep}); np.max(x, axis={axis}{keep}); np.min(x, axis={axis}{keep}); np.amax(x, axis={axis}{keep})
np.amin(x, axis={axis}{keep}); np.var(x, axis={one}, ddof=1); np.std(x, axis={one}, ddof=1)
np.sum(x, where=np.real(x) > 0); np.mean(x, where=mask); np.prod(x, where=mask); np.var(x, where=mask); np.std(x, where=mask)
np.max(x, where=mask, initial=-9); np.sum(x, dtype=complex); np.sum(x, initial=2.0); np.prod(x, initial=2.0); np.sum(x, 0); np.prod(x, 0)
np.var(x, 0); np.std(x, -1); np.max(x, 0); np.mean(x, -1)
np.cumsum(x); np.cumsum(x, axis={one}); np.cumsum(x, {one})
np.interp(x, [-1.0, 0.1, 2.0], [1.0, 3.0, 2.0]); np.interp(x, [-0.3, 0.2], [1.0, 3.0], left=0.5)
np.interp([-3.0, 0.1, 0.7], [0.0, 0.5, 1.0], x)
np.array_split(x, 2); np.array_split(x, 2, axis={of}); np.array_split(x, [1, 2], -1); np.split(x, [1]); np.split(x, [1], axis={of})
np.split(x, [1, 2], -1); np.vsplit(x, [1]); np.hsplit(x, [1]); np.dsplit(x, [1]); np.split(x, [1, 1]); np.hsplit(x, 3)
np.astype(x, complex); np.atleast_1d(x); np.atleast_2d(x); np.atleast_3d(x); np.atleast_1d(x, x * x); np.atleast_2d(x, a)
np.broadcast_to(x, np.shape(x)); np.broadcast_to(x, (2, *np.shape(x))); np.broadcast_to(x, (2, 1, 2, 3)); np.broadcast_to(x, 3)
np.broadcast_to(x[:1], (2, 3)); np.broadcast_to(x[..., :1], (*np.shape(x)[:-1], 4)); np.broadcast_to(x[..., None], (*np.shape(x), 0))
np.clip(x, -0.5, 0.5); np.clip(x, None, 0.5); np.clip(x, -0.5, None); np.clip(x, -a, a); np.clip(a, x, 2.0 + abs(x)); np.clip(x, a_min=-0.5, a_max=0.5)
np.clip(x[..., :1], -a, a); np.clip(x, min=-0.5, max=0.5)
np.diag(x); np.diag(x, 1); np.diag(x, -1); np.diag(x, k=2); np.diagonal(x); np.diagonal(x, 1); np.diagonal(x, -1, -2, -1)
np.diagonal(x, offset=1, axis1=1, axis2=0); np.diagonal(x, 0, 0, -1); np.diagonal(x, axis1=-1, axis2=-2); np.trace(x); np.trace(x, 1); np.trace(x, offset=-1)
np.trace(x, 0, -2, -1); np.trace(x, axis1=0, axis2=2)
np.diff(x); np.diff(x, 2); np.diff(x, n=2, axis={of}); np.diff(x, axis={of}); np.diff(x, n=0); np.diff(x, prepend=0.0); np.diff(x, 1, -1, append=x[..., :1])
np.gradient(x); np.gradient(x, axis={of}); np.gradient(x, axis=(0, 1)); np.gradient(x, 0.5); np.gradient(x, a); np.gradient(x, edge_order=2)
np.gradient(x, axis=(-1, 0)); np.gradient(np.concatenate([x, x * x, 2 * x], -1), axis=-1); np.gradient(x, 2.0, axis=-1); np.gradient(x, [0.2, 0.5, 1.1], axis=-1, edge_order=2)
np.gradient(a, x); np.gradient(m, x, axis=-1, edge_order=2); np.gradient(x, 0.3, x * x, axis=(0, -1)); np.gradient([x, x * x], axis=0); np.gradient(x, 0.3, axis={of}, edge_order=2)
np.expand_dims(x, 0); np.expand_dims(x, -1); np.expand_dims(x, (0, -1)); np.squeeze(x); np.squeeze(x[None]); np.squeeze(x[None], 0)
np.squeeze(x[..., None], axis=-1); np.squeeze(x[None, ..., None], axis=(0, -1))
np.flip(x); np.flip(x, axis={axis}); np.flip(x, {one}); np.flipud(x); np.fliplr(x); np.rot90(x); np.rot90(x, 2); np.rot90(x, k=3); np.rot90(x, 1, (-1, 0)); np.rot90(x, axes=(1, 0))
np.full((2, 3), x); np.full(4, x); np.full((2, *np.shape(x)), x); np.full(np.shape(x), x, dtype=complex); np.full(3, x, dtype=float); np.full(4, fill_value=x)
np.full_like(x, x[..., :1] * x); np.full_like(a, x); np.full_like(m, x[..., 0]); np.full_like(x, fill_value=x * x, dtype=complex); np.full_like(x, x[0], shape=(2, *np.shape(x))); np.full_like(x, 2.0) * x; np.full_like([0.0, 1.0], x)
np.linspace(x, 2.0, 5); np.linspace(0.0, x, 5); np.linspace(x, 2 * x, num=5); np.linspace(x, 2.0, 5, endpoint=False); np.linspace(x, 2.0)
np.linspace(x, 2.0, 5, axis=-1); np.linspace(x, 2.0, 1); np.linspace(x, 2.0, 5, False, True)
np.moveaxis(x, 0, -1); np.moveaxis(x, -1, 0); np.moveaxis(x, (0, 1), (-1, 0)); np.rollaxis(x, 0); np.rollaxis(x, 1); np.rollaxis(x, -1); np.rollaxis(x, 0, 2)
np.rollaxis(x, 2, 1); np.rollaxis(x, -1, -2); np.swapaxes(x, 0, 1); np.swapaxes(x, -1, 0); np.transpose(x); np.transpose(x, (1, 0)); np.transpose(x, (-1, 0, 1))
np.transpose(x, axes=[2, 0, 1]); np.permute_dims(x, (1, 0)); np.permute_dims(x, (2, 0, 1))
np.ravel(x); np.ravel(x, "F"); np.ravel(x, order="F"); np.reshape(x, -1); np.reshape(x, (-1, 1)); np.reshape(x, (3, -1), order="F"); np.reshape(x, (3, -1), "F")
np.reshape(x, shape=(-1,)); x.reshape(-1); x.reshape(3, -1); x.flatten(); x.T
np.repeat(x, 2); np.repeat(x, 2, axis={one}); np.repeat(x, 3, {one}); np.repeat(x, [1, 0, 2], axis=-1); np.repeat(x, repeats=2, axis=0); np.repeat(x, 0)
np.repeat(x, array([2]), -1); np.repeat(x[..., :1], [2], axis=-1); np.repeat(x[:1], 3, 0); np.repeat(x, 0, 0)
np.roll(x, 1); np.roll(x, 1, axis={one}); np.roll(x, (1, 2), axis=(0, -1)); np.roll(x, -5, -1); np.roll(x, shift=1, axis=0); np.roll(x, (1, 1), axis=0); np.roll(x, 1, (0, 1))
np.tile(x, 2); np.tile(x, (2, 3)); np.tile(x, (2, 1, 2)); np.tile(x, (2,)); np.tile(x, reps=2); np.tile(x, 0); np.tile(x, (2, 1, 1, 1)); np.tile(x, array([2, 2]))
np.tril(x); np.tril(x, 1); np.tril(x, k=-1); np.triu(x); np.triu(x, 1); np.triu(x, k=-1)
np.sort(x); np.sort(x, axis={one}); np.sort(x, {one}); np.sort(x, kind="stable"); np.partition(x, 1); np.partition(x, 1, axis={one}); np.partition(x, (0, 1), -1)
np.partition(x, -1); np.partition(x, kth=1, axis=0)
np.pad(x, 1, "constant"); np.pad(x, 1); np.pad(x, (1, 2)); np.pad(x, ((1, 0),)); np.pad(x, ((1, 0), (0, 2))); np.pad(x, 1, mode="constant", constant_values=2.0)
np.pad(x, 1, "edge"); np.pad(x, 1, "reflect"); np.pad(x, 2, "symmetric"); np.pad(x, 4, "wrap"); np.pad(x, 1, "reflect", reflect_type="odd"); np.pad(x, 2, "linear_ramp")
np.pad(x, 1, "mean"); np.pad(x, {{-1: (1, 2)}})
np.where(np.real(x) > 0, x, 2 * x); np.where(mask, x, a); np.where(mask, a, x); np.where(np.real(x) > 0, x, 0.5); np.where(column > 1, x, a); np.where(mask, x, 1j)
np.select([np.real(x) > 0], [x * x]); np.select([np.real(x) > 0, np.real(x) < -1], [x, a * x], 2.0); np.select([mask], [a], x); np.select([column > 1, mask], [x, a], 1j); np.select([np.real(x) > 0], [0.5], x * x); np.array(x); np.array([x, 2 * x]); np.array([[x, x * x]])
np.array(x, ndmin=3); np.array([x, x], dtype=complex); np.array((x, a * x)); np.array([x[..., 0], 1.0])
np.append(x, 2.0); np.append(x, x, axis={one}); np.column_stack([x, x * x]); np.column_stack((a, x)); np.concatenate([x, x * x], axis={one}); np.concatenate((x, z))
np.concatenate([x, x], axis=None); np.concatenate([m, x], axis=None); np.concatenate([m, x]); np.concatenate([x[:1], x, x[:0]]); np.hstack([x, x]); np.hstack((x, a))
np.row_stack([x, x]); np.stack([x, a * x], axis={of}); np.stack([x, x * x]); np.vstack([x, x]); np.vstack([x, a]); np.concatenate_args(0, x, x)
np.asarray(x); np.asarray(x, dtype=complex); np.asarray(x, None, "F"); np.asarray([x, 2 * x]); np.asanyarray(x); np.asanyarray([x, a * x]); np.ascontiguousarray(x.T); np.ascontiguousarray(x)
np.asfortranarray(x); np.asfortranarray(x, complex); np.require(x, None, "CO"); np.require(x.T, dtype=complex)
np.dstack([x, x * x]); np.dstack((a, x)); np.dstack([[x, 2 * x], [x * x, x]]); np.block([[x, x * x], [2 * x, x]]); np.block([x, a, 2.0]); np.block([[a], [x]]); np.block(x); np.block([[[x], [a * x]]])
np.choose([0, 1, 0], [x, a * x]); np.choose([[0], [5]], [a, x], mode="wrap"); np.choose(1, [0.5, x * x]); np.choose([0, 1, 1], x); np.choose(-1, (x, 2.0), mode="clip")
np.dot({u:a}); np.dot({u:m.T}); np.dot(x, 2.0); np.dot(m, x); np.dot(x, x.T); np.dot({u:z}); np.inner({u:a}); np.inner({u:m}); np.inner(x, x); np.inner(x, 2.0); np.inner(x, z)
np.vdot(x, x * x); np.vdot(x, a + 0 * x); np.vdot(a + x, z + x); np.vdot({u:2.0}); np.outer({u:a}); np.outer({u:m}); np.outer(x, z); np.outer({u:2.0}); np.kron({u:a}); np.kron({u:m}); np.kron(x, z); np.kron(x, x); np.kron(2.0, x); np.kron(x[None], a)
np.matmul({u:a}); np.matmul({u:m.T}); np.matmul(m, x); np.matmul(x, x.T); np.matmul(x, z); np.matmul(m[:, :2], x); x @ a; m @ x; a @ x; np.matmul(x, np.ones((2, 3, 2)))
np.tensordot({u:m}, 0); np.tensordot({u:a}, 1); np.tensordot(x, m.T, 1); np.tensordot(x, m, 2); np.tensordot(x, m); np.tensordot(m, x, 2)
np.tensordot(x, m, axes=([-1], [1])); np.tensordot(m, x, axes=([1, 0], [-1, -2])); np.tensordot(x, m, ((-1, -2), (1, 0))); np.tensordot(x, z, (-1, 0)); np.tensordot(x, z, 1)
np.cross({u:a}); np.cross(x, a, axis=-1); np.cross(x[..., :2], a[:2]); np.cross(x, a[:2]); np.cross(x, m); np.cross(x.T, a, axisa=0); np.cross(x, z)
np.cross(x, a, -1, 0, 0); np.cross(x[..., :2], a); np.cross(np.stack([x, x * x, 2 * x]), np.stack([x, a + x, x]), axis=0)
np.einsum("...i,...i", x, a); np.einsum("...i,i->...", x, x[..., 0]); np.einsum("i,i->", x, a); np.einsum("ij,j", x, a); np.einsum("ij->j", x); np.einsum("...->...", x)
np.einsum("ij,kj->ik", x, x); np.einsum("ijk,k->ji", x, z); np.einsum("i,j->ij", x, a); np.einsum("i->", x); np.einsum(x, [0, 1], a, [1], [0]); np.einsum(x, [0], x, [0], [])
np.einsum("...ij->...ji", x); np.einsum("ii->i", x); np.einsum("ij,ij->j", x, m, optimize=True); np.einsum(x, [..., 0], a, [0], [...]); np.einsum(",i->i", x, a)
np.einsum("ij,jk,kl->il", x, x.T, x); np.einsum(x, [0, 1], m, [0, 1]); np.einsum("iij->ij", x)
np.nan_to_num(x, nan=1.0); np.nan_to_num(x, True); np.real_if_close(x + 0j); np.sign(np.real(x)) * x; np.floor(np.real(x)) * x; np.ones_like(x) * x
np.divmod(x, 0.7); np.divmod(2.1, x)[1]; np.divmod(x, a); np.divmod(a, x); np.take(x, 1); np.take(x, [0, -1, 0]); np.take(x, [[0, 1], [1, 0]], {of}); np.take(x, array([2, -1]), axis=-1); np.take(x, [5, -2], 0, mode="wrap"); np.take(x, [7, -1, 1], None, None, "clip")
np.take_along_axis(x, array([0, 1, 0]), None); np.take_along_axis(x, np.argsort(np.real(x), {one}), {one}); np.take_along_axis(x, np.argmax(np.real(x), {one}, keepdims=True), axis={one}); np.take_along_axis(x, array([-1, 0, 0]), axis=-1)
np.nansum(x, axis={axis}{keep}); np.nanmean(x, axis={axis}{keep}); np.nansum(np.where(mask, x, np.nan), 0); np.nanmean(np.where(mask, x, np.nan), -1); np.nansum(x, where=mask); np.nanmean(x, where=mask)
np.average(x); np.average(x, axis={axis}{keep}); np.average(x, axis=-1, weights=a[:np.shape(x)[-1]]); np.average(x, weights=1.0 + np.ones(np.shape(x))); np.average(x, weights=np.exp(x)); np.average(a, weights=np.exp(x)); np.average(x, axis={of}, weights=x * x, returned=True); np.average(x, axis=-1, weights=a, returned=True)[1]
np.nansum(np.where(mask, x, np.nan)); np.nanmean(np.where(np.real(x) > 0, x, np.nan)); np.nansum(x, initial=2.0); np.cumprod(0.5 * x); np.cumprod(0.5 * x, axis={one}); np.cumprod(x * (np.real(x) > 0), -1)
np.trapezoid(x); np.trapezoid(x, axis={of}); np.trapezoid(x, dx=0.3); np.trapezoid(x, a); np.trapezoid(x, a, axis=-1); np.trapezoid(a, x); np.trapezoid(m, x); np.trapezoid(x, x * x, 1.0, {of})
np.trapezoid(x[0], x, axis=-1); np.trapezoid(x, np.array([0.1, 0.5]), axis=0); np.copy(x); np.copy(x, "F") * x
x[(0, 1, 0), (2, 2, 1)]; x[:, (0, 2)]; x[..., (1, 0, 1)]; x[(0, 1), 1:]; np.split(x, [2, 1]); np.split(x, [2, 1], -1); np.array_split(x, [1, 0, 2], axis={of}); np.hsplit(x, [2, 1, 1]); np.trace(x, 1, 2, 0)
x[0]; x[-1:]; x[..., 0]; x[[0, 1, 0]]; x[np.real(x) > 0]; x[None]; x[::-1]; x[:, [0, 2]]; x[array([[0, 1], [1, 0]])]; x[[0, 1], [1, 2]]
linalg.norm(x); linalg.norm(x, axis={axis}{keep}); linalg.norm(x, 2, {one}); linalg.norm(x, ord=3, axis={one}{keep}); linalg.norm(x, 2); linalg.norm(x, 1); linalg.norm(x, np.inf)
linalg.norm(x, "fro"); linalg.norm(x, "nuc"); linalg.norm(x, "nuc", (0, 1)); linalg.norm(x, "nuc", axis=(-1, 0)); linalg.norm(x, 0); linalg.norm(x, 3); linalg.norm(x, ord=1, axis=-1)
linalg.norm(x, "fro", (0, 2), True); linalg.norm(x, 2.5, -1); linalg.norm(x, -np.inf, 0); linalg.norm(x, "nuc", (2, 0), keepdims=True); linalg.norm(x, 4, keepdims=True)
linalg.norm(x, None, None, True); linalg.norm(x, -1, -1); linalg.norm([x, 2 * x])
linalg.multi_dot([x, m.T]); linalg.multi_dot([m, x.T, x]); linalg.multi_dot((x, m.T, m, x.T)); linalg.multi_dot([x, m.T @ m, x]); linalg.multi_dot([a, x.T, x, a]); linalg.multi_dot([x, z])
fft.fft(x{norm}); fft.ifft(x{norm}); fft.fft(x, axis={of}); fft.ifft(x, 4, 0); fft.fft(x, 2); fft.fft(x, n=5, axis=-1{norm}); fft.ifft(x, n=2{norm})
fft.rfft(x{norm}); fft.rfft(x, 4{norm}); fft.rfft(x, axis={of}); fft.rfft(x, 2, 0); fft.rfft(x, n=5); fft.rfft(x, n=6, axis=0{norm}); fft.rfft(x, 1)
fft.irfft(x{norm}); fft.irfft(x, 4{norm}); fft.irfft(x, 5{norm}); fft.irfft(x, axis={of}); fft.irfft(x, 2, 0); fft.irfft(x, n=8); fft.irfft(x, n=3, axis=0); fft.irfft(x, 1)
fft.fft2(x{norm}); fft.ifft2(x{norm}); fft.fft2(x, (4, 2)); fft.ifft2(x, s=(3, 5)); fft.fft2(x, axes=(0, 1)); fft.ifft2(x, axes=(-1, 0)); fft.fft2(x, (2, 5), (1, 0))
fft.fftn(x{norm}); fft.ifftn(x{norm}); fft.fftn(x, axes={axis}); fft.fftn(x, (4, 2), (0, -1)); fft.ifftn(x, axes=(0, 0)); fft.fftn(x, s=(2,), axes=(-1,)); fft.ifftn(x, axes=(-1,){norm})
fft.rfft2(x{norm}); fft.rfft2(x, (4, 2)); fft.rfft2(x, s=(3, 5){norm}); fft.rfft2(x, axes=(1, 0)); fft.irfft2(x{norm}); fft.irfft2(x, (4, 2){norm}); fft.irfft2(x, s=(3, 5)); fft.irfft2(x, axes=(1, 0))
fft.rfftn(x{norm}); fft.rfftn(x, (4, 2), (0, -1)); fft.rfftn(x, axes={axis}{norm}); fft.rfftn(x, s=(2, 4), axes=(-1, 0)); fft.rfftn(x, axes=(0, 0)); fft.irfftn(x, axes=(0, 0))
fft.irfftn(x{norm}); fft.irfftn(x, (4, 2), (0, -1)); fft.irfftn(x, axes={axis}{norm}); fft.irfftn(x, s=(2, 3), axes=(-1, 0){norm})
fft.fftshift(x); fft.fftshift(x, axes={axis}); fft.ifftshift(x); fft.ifftshift(x, axes={axis}); fft.fftshift(x, 0); fft.ifftshift(x, 0)
"""
MATRICES = """
linalg.det(x); linalg.inv(x); linalg.slogdet(x)[1]; linalg.slogdet(x)[0]; linalg.slogdet(x); linalg.solve(x, a); linalg.solve(x, m.T); linalg.solve(x, x @ x); linalg.solve(x, z)
linalg.solve(x, x[..., :, :1]); linalg.solve(np.diag(a), x); linalg.solve(np.diag(a), x[..., 0]); linalg.solve(np.diag(z), x); linalg.solve(x, 1j * x)
linalg.pinv(x); linalg.pinv(x[..., :2]); linalg.pinv(x[..., :2, :]); linalg.pinv(x, 1e-10); linalg.pinv(x, rcond=1e-10)
linalg.svd(x, compute_uv=False); linalg.svd(x[..., :2], compute_uv=False); linalg.svd(x, full_matrices=False)[1]; linalg.svd(x[..., :2], full_matrices=False)[1]
abs(linalg.svd(x, full_matrices=False)[0]) ** 2; abs(linalg.svd(x[..., :2], full_matrices=False)[2]) ** 2; abs(linalg.svd(x[..., :2, :], full_matrices=False)[0]) ** 2; linalg.svd(x)[1]
abs(linalg.svd(x[..., :2], False)[0]) ** 2; abs(linalg.svd(x[..., :2, :], False)[2]) ** 2; abs(linalg.svd(x)[0]) ** 2
np.sum(linalg.eig(x)[0] ** 3, -1); np.sum(linalg.eig(x)[0] ** 2); np.sum(abs(linalg.eig(x)[1]) ** 4); np.sum(abs(linalg.eig(x)[1]) ** 4, (-1, -2))
linalg.qr(x); linalg.qr(x[..., :2]); linalg.qr(x, "r"); linalg.qr(x[..., :2, :]); linalg.lstsq(x, a)[0]; linalg.lstsq(x[:, :2], a)[1]; linalg.lstsq(x[:, :2], m.T, None)[3]; linalg.lstsq(m.T, x)[0]
linalg.lstsq(x[:, :2], x, rcond=1e-9)[0]; linalg.lstsq(x[:, :1], 1j * x)[1]; linalg.lstsq(x[:2], a[:2])[0]
linalg.norm(x, "nuc"); linalg.norm(x, 2); linalg.norm(x, -2); np.linalg.norm(x); np.trace(x); np.diagonal(x, axis1=-2, axis2=-1); np.diag(x); np.einsum("...ij,...jk->...ik", x, x)
"""
HERMITIAN = """
linalg.cholesky(x); linalg.cholesky(x, upper=True); linalg.eigh(x)[0]; linalg.eigh(x, "U")[0]; linalg.eigh(x, UPLO="U")[0]; abs(linalg.eigh(x)[1]) ** 2; abs(linalg.eigh(x, "U")[1]) ** 2
linalg.eigvalsh(x); linalg.eigvalsh(x, "U"); linalg.inv(x); linalg.solve(x, a); linalg.eigh(x + 3j * np.triu(x, 1) - 3j * np.tril(x, -1))[0]
"""


def expanded(text: str) -> Iterator[str]:
    """Yield the calls of a text, with each of the values that may be filled in."""
    for call in re.split(r";\s*|\n", text.strip()):
        operands = re.search(r"\{u:(.*?)\}", call)
        if operands:
            for form in FILLED["u"][:2]:
                yield call.replace(operands[0], form.replace("{}", operands[1]))
            continue
        names = [name for name in re.findall(r"\{(\w+)\}", call) if name in FILLED]
        for values in product(*[FILLED[name] for name in names]):
            yield call.format(**dict(zip(names, values)))


OPERATORS = (("**", "power"), ("@", "matmul"), ("%", "mod"), ("abs", "abs"), ("[", "getitem"), (".reshape", "reshape"), (".flatten", "ravel"), (".T", "transpose"),
             ("/", "true_divide"), ("*", "multiply"), ("+", "add"), (" -", "subtract"), ("-", "negative"))  # fmt: skip


def name_of(call: str) -> str:
    """Return the name of the function that a call is about: a factorization, the first one, or the operator."""
    factors = re.search(r"linalg\.(?:eig|eigh|svd|slogdet)\(", call)
    if factors:
        return factors[0][:-1]
    found = re.search(r"\b(?:np|(linalg|fft))\.(\w+)\(", call.replace("np.linalg", "linalg").replace("np.float64", ""))
    if found:
        return f"{found[1]}.{found[2]}" if found[1] else found[2]
    return next(name for text, name in OPERATORS if text in call)


def cases(shapes: tuple = SHAPES, squares: tuple = SQUARES) -> Iterator[Case]:
    """Yield all cases; NumPy refuses some of them."""
    for kind in ("real", "complex"):
        for domain, names in ELEMENTWISE.items():
            for name, shape in product(names.split(), shapes):
                yield Case(name, f"np.{name}(x)", shape, kind, domain)
        operands = ("2.0", "a", "column", "m", "z", "x * x")
        for name, operand, form, shape in product(BINARY.split(), operands, ("{0}, {1}", "{1}, {0}"), shapes):
            if name in ("mod", "remainder") and operand in ("m", "x * x"):
                continue  # discontinuous at too many places
            domain = "positive" if "po" in name else "any"
            yield Case(name, f"np.{name}({form.format('x', operand)})", shape, kind, domain)
        for domain in ("one zero", "two zeros"):
            for call, shape in product(expanded("np.prod(x, axis={axis}{keep})"), shapes):
                yield Case("prod", call, shape, kind, domain)
        for domain, text, those in (("any", CALLS, shapes), ("matrix", MATRICES, squares), ("spd", HERMITIAN, squares)):
            for call, shape in product(expanded(text), those):
                yield Case(name_of(call), call, shape, kind, "positive" if call.startswith("np.prod(") else domain)


# Not called: they read and write files, print, or set how NumPy works.
NOT_CALLED = """test save savez savez_compressed savetxt load loadtxt fromfile genfromtxt fromregex info show_config show_runtime seterr
seterrcall setbufsize set_printoptions printoptions get_include frombuffer from_dlpack fromstring""".split()
WITHOUT_A_RULE = (
    "x",
    "x, x",
    "x, 2",
    "x, a",
    "2, x",
    "x, -1",
    "x, 0.5",
    "a, x",
    "x, a, a",
    "np.real(x) > 0, x",
    "[0, 1], x",
    "lambda y: y, 0, x",
)


def offered() -> Iterator[str]:
    """Yield the names of all functions that are offered, a constant one too."""
    for prefix, space, original in (("", np, onp), ("linalg.", linalg, onp.linalg), ("fft.", fft, onp.fft)):
        for name in sorted(vars(space)):
            if hasattr(original, name) and callable(getattr(space, name)) and not isinstance(getattr(space, name), type):
                if name[0] != "_" and name not in NOT_CALLED:
                    yield prefix + name


def is_constant(name: str) -> bool:
    """Return whether a function has no derivative by definition: its results are integers, booleans or steps."""
    space = {"linalg": linalg, "fft": fft}.get(name.partition(".")[0], np)
    fun = getattr(space, name.rpartition(".")[2])
    return fun in notrace_primitives[VJPNode] or getattr(fun, "_is_primitive", False)


def cases_without_a_rule(shapes: tuple, tested: set[str]) -> Iterator[Case]:
    """Yield calls of all other functions with every list of arguments that NumPy takes."""
    for name, args, shape in product(offered(), WITHOUT_A_RULE, (*shapes, (3, 3))):
        # NumPy before 2.4 has `trapezoid` and `isin` under old names, too.
        if name not in tested and name not in ("trapz", "in1d") and not is_constant(name):
            full = name if "." in name else f"np.{name}"
            yield Case(name, f"{full}({args})", shape, "real", "any")


# ---- methods, attributes and operators of arrays: each name in `dir(numpy.ndarray)`, but for the following

# Protocols of NumPy and Python, and operators that change an array.
PROTOCOLS = re.compile(  # and NumPy's own helpers, whose names begin with one underscore
    r"_[a-z]\w*|__(array\w*|buffer|class_getitem|dlpack\w*|setstate"
    r"|i(add|and|floordiv|lshift|matmul|mod|mul|or|pow|rshift|sub|truediv|xor))__"
)
METHODS = """
T: x.T * x.T; mT: x.mT * 2.0; real: x.real * x; imag: x.imag + x * x; astype: x.astype(complex) ** 2; clip: x.clip(-0.5, 0.5) || x.clip(-0.5) || x.clip(min=-0.5) || x.clip(max=0.5); conj: x.conj() * x
compress: x.compress([True, False, True], -1) || x.compress([False, True]); conjugate: x.conjugate() ** 2; copy: x.copy() * x || x.copy("F"); __copy__: copy.copy(x) * x; __deepcopy__: copy.deepcopy(x) * x; cumprod: x.cumprod() || x.cumprod(-1); cumsum: x.cumsum() || x.cumsum(axis=0)
diagonal: x.diagonal() || x.diagonal(1, 1, 0); dot: x.dot(a) || x.dot(x.T) || x.dot(2.0); flatten: x.flatten() ** 2 || x.flatten("F"); ravel: x.ravel() || x.ravel(order="F"); max: x.max() || x.max(axis=-1, keepdims=True)
mean: x.mean() || x.mean(0) || x.mean(axis=(0, 1)); min: x.min(0); prod: x.prod() || x.prod(-1); sum: x.sum() || x.sum(0, keepdims=True); std: x.std() || x.std(axis=0, ddof=1); var: x.var() || x.var(-1)
repeat: x.repeat(2) || x.repeat(2, 0); reshape: x.reshape(-1) || x.reshape(3, -1) || x.reshape((-1, 1)) || x.reshape(3, -1, order="F"); squeeze: x.squeeze() || x[None].squeeze(0); swapaxes: x.swapaxes(0, -1)
take: x.take(0) || x.take([[0, -1], [1, 1]]) || x.take([0, 1, 0], axis=-1); trace: x.trace() || x.trace(1) || x.trace(0, 2, 1); transpose: x.transpose() * 2 || x.transpose(1, 0) || x.transpose((2, 0, 1)) || x.transpose(-1, 0, 1) || x.transpose(None)
__abs__: abs(x); __add__: x + 2 || x + a; __radd__: a + x; __sub__: x - a; __rsub__: 2.0 - x; __mul__: x * column; __rmul__: z * x; __truediv__: x / a; __rtruediv__: a / x; __pow__: x ** 3; __rpow__: 2.0 ** x
__matmul__: x @ a || x @ x.T; __rmatmul__: m @ x; __mod__: x % 0.7; __rmod__: 2.1 % x; __neg__: -x; __pos__: (+x) * x || +x; __getitem__: x[0] || x[..., -1] || x[x.real > 0]; __iter__: np.array([part * part for part in x])
__divmod__: divmod(x, 0.7)[1] * x; __rdivmod__: divmod(2.1, x)[1] || divmod(a, x)[1]
"""
# Their results are constants: the derivative is that of x, which is a factor.
CONSTANT_METHODS = """
all: x * x.all(); any: x.any() * x; argmax: x * x.argmax(); argmin: x * (1.0 + x.argmin(0)); argpartition: x * x.argpartition(1); argsort: x * x.argsort(); nonzero: x * x.nonzero()[0].sum(); round: x * x.round()
searchsorted: np.array([0.3, 2.1]).searchsorted(x.real) * x || x * x.searchsorted(0.1); shape: x * x.shape[-1]; ndim: x * x.ndim; size: x * x.size; itemsize: x * x.itemsize; nbytes: x * (x.nbytes / 100); strides: x * x.strides[0]; dtype: x * x.dtype.itemsize
flags: x * (1.0 + x.flags.c_contiguous); device: x * len(x.device); __len__: x * len(x); __contains__: x * (1.0 + (0.5 in x))
__floordiv__: x * (x // 0.7); __rfloordiv__: x * (2.1 // x) || a // x * x; __bool__: (x if x.sum() > 0.1 else 2.0 * x) ** 2; __round__: x * round(x, 1) || x * round(x)
__lt__: x * (x < 0.5); __le__: x * (x <= 0.5); __gt__: x * (x > 0.5); __ge__: x * (x >= 0.5); __eq__: x * (x == 0.5); __ne__: x * (x != 0.5)
"""
# What a traced array doesn't have; `&`, `|`, `^`, `~`, `<<`, `>>` and indices are NumPy's errors for floating-point numbers.
NOT_OF_TRACED = """
base: x.base; byteswap: x.byteswap(); choose: x.choose([a, a]); ctypes: x.ctypes; data: x.data; dump: x.dump("x"); dumps: x.dumps(); fill: x.fill(0.0); flat: x.flat; getfield: x.getfield(float)
item: x.item(); partition: x.partition(1); put: x.put(0, 1.0); resize: x.resize(2); setfield: x.setfield(0.0, float); setflags: x.setflags(write=True); sort: x.sort(); to_device: x.to_device("cpu"); tobytes: x.tobytes(); tofile: x.tofile("x")
tolist: x.tolist(); view: x.view(); __setitem__: operator.setitem(x, 0, 1.0); __delitem__: operator.delitem(x, 0); __float__: float(x.sum()); __int__: int(x.sum()); __complex__: complex(x.sum()); __index__: [1, 2][x.sum()]
__and__: x & 1; __rand__: 1 & x; __or__: x | 1; __ror__: 1 | x; __xor__: x ^ 1; __rxor__: 1 ^ x; __invert__: ~x; __lshift__: x << 1; __rlshift__: 1 << x; __rshift__: x >> 1; __rrshift__: 1 >> x
"""


# How the operators are written.
SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "matmul": "@", "mod": "%", "floordiv": "//", "lshift": "<<", "rshift": ">>",
    "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
WRITTEN = {name: f"x {sign} y" for name, sign in SIGNS.items()} | {
    "pos": "+x", "neg": "-x", "invert": "~x", "abs": "abs(x)", "divmod": "divmod(x, y)", "round": "round(x)", "getitem": "x[i]", "setitem": "x[i] = y",
    "delitem": "del x[i]", "iter": "for y in x", "contains": "y in x", "len": "len(x)", "bool": "if x", "copy": "copy.copy(x)",
    "deepcopy": "copy.deepcopy(x)", "float": "float(x)", "int": "int(x)", "complex": "complex(x)", "index": "y[x]",
}  # fmt: skip


def written(name: str) -> str:
    """Return how a method, attribute or operator is written; "" for the reflected form of an operator."""
    inner = name.strip("_")
    return WRITTEN.get(inner, "") if name.startswith("__") else f"x.{name}"


def calls_by_name(text: str) -> dict[str, list[str]]:
    """Return the calls for each name of a text."""
    entries = [entry.partition(": ") for entry in re.split(r";\s*|\n+", text.strip())]
    return {name: calls.split(" || ") for name, _, calls in entries}


def advice_by_name() -> dict[str, str]:
    """Return what the error of each name that a traced array doesn't have says after its first sentence."""
    return {name: refusal_of(calls[0]).partition(". ")[2] for name, calls in calls_by_name(NOT_OF_TRACED).items()}


def attributes() -> set[str]:
    """Return the names of the methods, attributes and operators of arrays, and `__round__`, which scalars have."""
    named = {name for name in dir(onp.ndarray) if not PROTOCOLS.fullmatch(name) and name not in dir(object)}
    # NumPy 2.2 keeps the names of some that it has removed, and an old name of `tobytes`.
    named = {name for name in named - {"tostring"} if hasattr(onp.ones((1, 1)), name)}
    return named | {f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "round")}


def method_cases(text: str, shapes: tuple = SHAPES) -> Iterator[Case]:
    """Yield a call for each name, shape and kind."""
    for name, calls in calls_by_name(text).items():
        for call, shape, kind in product(calls, shapes, ("real", "complex")):
            yield Case(name, call, shape, kind)


def linearized_and_compiled(case: Case) -> tuple[str, str]:
    """Return the outcomes of `linearize`, and of a compiled function and its gradient, compared with the interpreted ones."""
    fun, x = case.fun(), point(case)
    v = _direction(x, case, onp.random.default_rng(1))
    loss = loss_of(fun, [onp.ones(onp.shape(value)) for value in parts(fun(x))])
    compiled = mpiad.jit(loss)

    def linear():
        found, expected = mpiad.linearize(loss)(x).jvp(v), mpiad.jvp(loss, x, v)[1]
        return found, expected, True

    def again():
        found = [compiled(x), compiled(x), *onp.ravel(mpiad.grad(compiled)(x))]
        return onp.array(found), onp.array([loss(x), loss(x), *onp.ravel(mpiad.grad(loss)(x))]), True

    return _outcome(linear, case, 1e-12), _outcome(again, case, 1e-12)


def refusal_of(call: str, derivative: Callable = mpiad.grad) -> str:
    """Return the text of the error that a call with a traced array raises; "" for none."""
    names = {**NAMESPACE, "operator": operator}
    try:
        derivative(eval(f"lambda x: np.sum(1.0 * ({call}))", names))(onp.array([0.3, 1.2]))
    except (AttributeError, TypeError, NotImplementedError) as error:
        return str(error)
    return ""


# ---- the page


Table = dict[str, dict[str, list[tuple[str, Case]]]]


def run(chosen: Iterable[Case], seed: int = 0) -> Table:
    """Return for each function and each of the four derivatives the outcomes with their cases."""
    table: Table = {}
    for case in chosen:
        found = outcomes(case, seed)
        # Next to a pole or a kink differences say little. A rule that is wrong is so at other points, too.
        for other in (seed + 100, seed + 200):
            if found and any(outcome.startswith("wrong") for outcome in found):
                again = outcomes(case, other) or found
                found = tuple([two if one.startswith("wrong") else one for one, two in zip(found, again)])
        for mode, outcome in zip(MODES, found or ()):
            table.setdefault(case.name, {}).setdefault(mode, []).append((outcome, case))
    return table


def wrong(table: Table) -> list[str]:
    """Return what is neither right nor refused."""
    every = [(mode, *each) for row in table.values() for mode, found in row.items() for each in found]
    return [f"{case}, {mode}: {outcome}" for mode, outcome, case in every if outcome.startswith("wrong")]


def rows_of(table: Table) -> dict[str, list[str]]:
    """Return the cells of the page: for each function the four derivatives, and the calls that are refused."""
    rows = {}
    for name in sorted(table, key=str.lower):
        cells, refused = [], {}
        for mode in MODES:
            found = table[name][mode]
            calls = {case.call for outcome, case in found if outcome.startswith("refused")}
            every = all(outcome.startswith("refused") for outcome, _ in found)
            cells.append("no" if every else "in part" if calls else "yes")
            for call in [] if every else sorted(calls):
                axes = {rest: {len(case.shape) for outcome, case in found if case.call == call and outcome.startswith(rest)}
                        for rest in ("right", "refused")}  # fmt: skip
                refused[call] = "" if not axes["right"] else f" ({', '.join(f'{n}-D' for n in sorted(axes['refused']))})"
        rows[name] = [*cells, ", ".join(f"`{call}`{axes}" for call, axes in refused.items())]
    return rows


def rows_of_page() -> dict[str, list[str]]:
    """Return the cells of the page as it is."""
    text = PAGE.read_text()
    complete = text.partition("## All four derivatives\n\n")[2].partition("\n\n")[0]
    functions = text.partition("## Methods, attributes and operators of arrays")[0]
    found = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*) \|$", functions, re.MULTILINE)
    rows = {name: [*_cells_of(available), calls.strip()] for name, available, calls in found}
    return rows | {name: ["yes"] * len(MODES) + [""] for name in re.findall("`(.*?)`", complete)}


def _summary(cells: list[str]) -> str:
    """Return the most frequent one of the four cells, and the derivatives whose cells differ: in part; forward: yes."""
    most = max(cells, key=cells.count)
    return "; ".join([most, *(f"{mode}: {cell}" for mode, cell in zip(MODES, cells) if cell != most)])


def _cells_of(summary: str) -> list[str]:
    most, *others = summary.split("; ")
    differing = dict(other.split(": ") for other in others)
    return [differing.get(mode, most) for mode in MODES]


def against_page(table: Table) -> list[str]:
    """Return what some of the cases say and the page doesn't."""
    page, different = rows_of_page(), []
    for name, row in table.items():
        for k, mode in enumerate(MODES):
            for outcome, case in row[mode]:
                cell, refused = page[name][k], outcome.startswith("refused")
                listed = f"`{case.call}`" in page[name][-1]
                if (
                    refused
                    and cell == "yes"
                    or not refused
                    and cell == "no"
                    or refused
                    and cell == "in part"
                    and not listed
                ):
                    different.append(f"{case}, {mode}: {outcome}, but the page says {cell}")
    return different


def page() -> str:
    """Return the text of the page, from all cases."""
    table = run(cases())
    others = run(cases_without_a_rule(SHAPES, set(table)))
    bad = wrong(table) + wrong(others) + wrong(run(method_cases(METHODS + CONSTANT_METHODS)))
    if bad:
        raise SystemExit("\n".join(bad))
    head = ("Function", "Available", "Unsupported calls")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    rows = rows_of(table)
    complete = [f"`{name}`" for name, cells in rows.items() if set(cells[: len(MODES)]) == {"yes"}]
    lines += [
        f"| `{name}` | {_summary(cells)} | {calls} |"
        for name, (*cells, calls) in rows.items()
        if f"`{name}`" not in complete
    ]
    constant, refused = ([f"`{name}`" for name in names] for names in ([n for n in offered() if is_constant(n)], others))
    text = {"complete": wrapped(complete), "constant": wrapped(constant), "refused": wrapped(refused)}
    return TEXT.format(table="\n".join(lines), **text) + scipy_section() + methods_section()


def wrapped(names: list[str]) -> str:
    unbroken = ", ".join([name.replace(" ", "\0") for name in names])
    return "\n".join(textwrap.wrap(unbroken, 125, break_on_hyphens=False)).replace("\0", " ")


def scipy_section() -> str:
    """Return the section of the page on functions of SciPy: those with a rule, without functions that `stats` imports."""
    names = []
    for module in pkgutil.walk_packages(autograd.scipy.__path__, "autograd.scipy."):
        if module.name == "autograd.scipy.integrate":
            continue
        for name, fun in sorted(vars(importlib.import_module(module.name)).items()):
            primitive = getattr(fun, "__wrapped__", fun)  # of a distribution that takes arguments by keyword
            has_rule = callable(fun) and (primitive in primitive_vjps or primitive in VJP_RULES)
            if has_rule and (".stats." not in module.name or inspect.ismethod(getattr(fun, "fun", None))):
                names.append(f"`{module.name.removeprefix('autograd.scipy.')}.{name}`")
    return SCIPY_TEXT.format(functions=wrapped(names))


def methods_section() -> str:
    """Return the section of the page on methods, attributes and operators."""
    listed = [
        wrapped([f"`{each}`" for each in map(written, sorted(calls_by_name(calls))) if each])
        for calls in (METHODS, CONSTANT_METHODS)
    ]
    by_advice: dict[str, list[str]] = {}
    for name, advice in sorted(advice_by_name().items()):
        if written(name):
            names = by_advice.setdefault(advice.replace(f").{name}.", ").…") or OF_INTEGERS, [])
            names.append(f"`{written(name)}`".replace("|", "\\|"))
    rows = [f"| {', '.join(names)} | {advice} |" for advice, names in by_advice.items()]
    return METHODS_TEXT.format(methods=listed[0], constant_methods=listed[1], advice="\n".join(rows))


OF_INTEGERS = "NumPy has these operators for integers and booleans only."
SCIPY_TEXT = """
## Functions of SciPy

These functions of `autograd.scipy` have derivatives in all modes, by autograd's rules or ours. The order of a Bessel function
or of `polygamma` is a constant for them: a traced one raises an error. Those of `stats.multivariate_normal` read the lower triangle of the
covariance, as SciPy does. The rules of distributions hold inside the support; those of `stats.chi2` need an
integer `df`. Their arguments may be passed by keyword, as in `stats.gamma.logpdf(x, a=a, scale=s)`, and those with a location
and a scale take both. Other functions, such as `linalg.solve`, `inv`, `cholesky` and `cho_factor`, raise a `NotImplementedError` that
says what to call instead, `np.linalg.solve` for example, and so do errors of `scipy` itself. For filters, see
[filters of SciPy](../sharp_bits.md#a-filter-of-scipy), for banded
systems the [page on solves](../linalg.md#systems-within-a-rank), and in place of `odeint` [ensembles](../ensembles.md).

{functions}.
"""
METHODS_TEXT = """
## Methods, attributes and operators of arrays

Traced arrays `x` have all four derivatives of these, with the limits of the functions of the same names; `x.compress` has all
four, unlike `np.compress`. y is an array, traced or not, or a number. {{py:func}}`mpiad.jit` compiles functions that use them,
or interprets them with the same results.

{methods}.

The results of these are constants:

{constant_methods}.

These raise an error in a derivative: an `AttributeError` or a `TypeError` that names the attribute, with this advice:

| Attribute or operator | Advice |
|---|---|
{advice}

Values in traces of plain autograd (`autograd.grad`) have autograd's own methods only.
"""
TEXT = """---
other_names: autograd's
---
# NumPy's functions: which derivatives are available

This page lists the functions of `autograd.numpy`, `autograd.numpy.linalg` and `autograd.numpy.fft`, and which of
four derivatives {{py:func}}`mpiad.value_and_grad` and its family support for each: in reverse mode, in forward mode, and to
second order by reverse over reverse and by forward over reverse. Tests compare each derivative with finite differences, for real and complex arrays of
0 to 3 axes.

- Pass traced arrays by position: `np.linalg.solve(a, x)`, not `np.linalg.solve(a=a, b=x)`. Distributions of `autograd.scipy.stats`
  also take them by keyword.
- `array`, `asarray`, `asanyarray`, `concatenate`, `stack`, `vstack`, `hstack`, `dstack`, `column_stack`, `block`, `append`,
  `select`, `choose`, `linalg.multi_dot` and `linalg.norm` accept lists of traced arrays. Other functions convert a list to an array of objects, for which most functions raise an error,
  as does every operation of such an array with a traced array.
- At points at which the derivative doesn't exist (`abs` at zero, `max` and `sort` of equal elements), mpiad follows
  autograd's convention. The derivatives of `linalg.norm` and `std` at zero are zero, and their second derivatives there
  are NaN; the derivative of `sinc` at zero is NaN. Vectors of `linalg.eigh`, `eig` and `svd` have no derivative if their
  eigenvalues or singular values are [equal](../sharp_bits.md#equal-eigenvalues). As in NumPy, `linalg.cholesky`, `eigh`
  and `eigvalsh` read one triangle of the matrix (`UPLO`, by default the lower one); derivatives of other entries are zero.

## All four derivatives

{complete}.

`getitem` stands for `x[i]`, and `concatenate_args` is autograd's own. Universal functions of two arrays have `outer`, as in
`np.subtract.outer(x, y)`; `reduce` of `add`, `multiply`, `maximum`, `minimum`, `logical_and` and `logical_or`, and `accumulate`
of `add` and `multiply`, are the sums and products along an axis, by default the first.

Functions that are also among the [constants](#constants) have the derivative zero.

## Some of the derivatives

The second column says what holds for most of the four derivatives, and names those that differ, as in *in part; forward: yes*.

- *yes*: the derivative is available.
- *in part*: the calls in the last column raise a `NotImplementedError` that names the function. In these calls, `x` is the
  traced array, and `a` and `mask` are constant arrays. (1-D) or (2-D) after a call means that only arrays `x`
  with this number of axes raise the error.
- *no*: all calls raise this error.

`linalg.lstsq` is for matrices with linearly independent columns, and `linalg.qr` for at least as many rows as columns.

{table}

## Constants

The results of these functions are sizes, indices, booleans, step functions or arrays of constants, so the derivative is zero.

{constant}.

For complex z, NumPy 2's `sign(z)` is z / |z|, with its derivative; at zero the derivative is zero.

## Functions without a derivative

Calls of these functions with a traced array raise a `NotImplementedError` that names the function; for a universal function
(ufunc) such as `cbrt` the error is a `TypeError`.

{refused}.

The errors of `percentile`, `quantile`, `median`, `cov`, `corrcoef`, `convolve`, `ptp`, `piecewise`, `meshgrid`, `delete`,
`insert`, `polyval`, `polyfit`, `vander`, `extract`, `compress`, `ediff1d`, `histogram`, `correlate`, `unwrap`, `nanmax`, `nanmin`,
`nanstd`, `nanvar`, `nanprod`, `nanmedian` and `linalg.matrix_power` say what to write instead, as do those of `linalg.norm` of a matrix.
For a matrix of one column, write `np.sum(np.abs(x))` for `linalg.norm(x, 1)` and `linalg.norm(x)` for `linalg.norm(x, 2)`.
"""


def main() -> None:
    """Write the page, or print what is wrong and what is refused."""
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
        return
    table = run(case for case in cases() if not sys.argv[1:] or case.name in sys.argv[1:])
    print(*wrong(table), sep="\n")
    for name, cells in rows_of(table).items():
        print(f"{name:20}", *cells, sep=" | ")


if __name__ == "__main__":
    main()
