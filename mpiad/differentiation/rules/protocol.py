"""Definitions that all rules share: types of their signatures, calls of autograd's own rules, and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias

import autograd.numpy
import numpy as np
from autograd.core import primitive_jvps, primitive_vjps, sparse_object_types
from autograd.tracer import Box, getval

from mpiad._typing import Array, Function
from mpiad.device.transfer import array_to_host
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of

Argnums: TypeAlias = tuple[int, ...]
Primitive: TypeAlias = Callable[..., Any]
Vjp: TypeAlias = Callable[[Any], Any]
VjpMaker: TypeAlias = Callable[[Argnums, Any, tuple, dict], Vjp]
JvpMaker: TypeAlias = Callable[[Argnums, Any, Any, tuple, dict], Any]

anp: Any = autograd.numpy
"""Autograd's NumPy, whose functions are created at run time; importing it fills autograd's tables of rules."""

BOX_TYPES = Box.types
"""Autograd's set of the types of traced values, to which other modules add types."""
# In later versions of autograd, `mean` and `where` are plain functions that call these primitives.
primitive_mean: Primitive = getattr(autograd.numpy.numpy_wrapper, "_primitive_mean", anp.mean)
primitive_where: Primitive = getattr(autograd.numpy, "_original_where", anp.where)


# Rules for functions of `autograd.scipy`, by name.
SCIPY_VJPS: dict[str, VjpMaker] = {}
_ASSEMBLY = "it makes a NumPy array. Import mpiad.device.numpy instead of autograd.numpy"
# Functions without a derivative on devices: name and advice.
DEVICE_REFUSALS: dict[Primitive, tuple[str, str]] = {
    anp.concatenate_args: ("concatenate", _ASSEMBLY),
    anp.array_from_args: ("array", _ASSEMBLY),
    anp.make_diagonal: ("make_diagonal", "multiply by a mask, as in x[..., None] * identity"),
    anp.real_if_close: ("real_if_close", "the values are unknown on the host. Use real"),
    anp.linalg.eig: ("linalg.eig", "copy the matrix with mpiad.device.to_host"),
}

# Functions of NumPy, each as a function of traced values that calls functions with rules, and autograd's primitives.
COMPOSITIONS: dict[Function, Function] = {}
COMPOSED: set[Primitive] = set()

_NUMBERS = (float, complex, np.inexact)
# Autograd's own primitives, whose cotangents must have the shapes of the arguments.
_OWN_PRIMITIVES = frozenset(primitive_vjps) | frozenset(primitive_jvps)
# Exceptions that autograd's rules raise for unsupported arguments.
_RULE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, AssertionError, NameError, NotImplementedError)


def inherited_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Make the adjoint by autograd's rule; cotangents get the shapes of the arguments."""
    on_host, (args, kwargs) = _is_on_host(ans), _exact(fun, args, kwargs)
    _require_support(fun, ans, on_host)
    if 0 in argnums and _has_order(fun):
        raise refusal(fun, "with respect to its order: pass a number, or mpiad.stop_gradient(n)")
    rule: VjpMaker = _scipy_rule(fun) or primitive_vjps[fun]
    if fun in _OWN_PRIMITIVES:
        pull = checked(fun, rule, argnums, ans, args, kwargs)
        fitted = partial(_fitted_parts, fun, pull, [_like(args[i]) for i in argnums])
    elif (getattr(fun.fun, "__module__", None) or "").startswith("scipy.stats."):  # for which rules lack loc and scale
        fitted = pull = checked(fun, rule, argnums, ans, args, kwargs)
    else:
        fitted = pull = rule(argnums, ans, args, kwargs)
    if on_host:
        return fitted
    # If the result is on a device, the cotangents of host numbers are copied to the host.
    are_numbers = [isinstance(getval(args[i]), _NUMBERS) for i in argnums]
    if not any(are_numbers):
        return fitted
    return lambda g: tuple([array_to_host(part) if is_number else part for part, is_number in zip(fitted(g), are_numbers)])


@lru_cache(1024)
def _has_order(fun: Primitive) -> bool:
    """Return whether a function has an order, with respect to which autograd's derivative is zero."""
    special = sys.modules.get("autograd.scipy.special")
    return any(getattr(special, name, None) is fun for name in ("iv", "ive", "jn", "yn", "polygamma"))


def exact_integer(x: Array) -> Array:
    """Return a NumPy integer as Python's, and unsigned or narrow ones in an array as int64: rules compute n - 1 from n."""
    if getattr(getattr(x, "dtype", None), "kind", "f") not in "ui":
        return x
    return int(x) if isinstance(x, np.integer) else x.astype(np.int64, copy=False)


def _exact(fun: Primitive, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a function of NumPy or SciPy with exact integers; those of users' primitives are data."""
    if fun not in _OWN_PRIMITIVES:
        module = getattr(fun.fun, "__module__", None) or "numpy"  # universal functions may have none
        if module.partition(".")[0] not in ("autograd", "numpy", "scipy"):
            return args, kwargs
    return tuple(map(exact_integer, args)), kwargs and {name: exact_integer(x) for name, x in kwargs.items()}


@lru_cache(1024)
def _scipy_rule(fun: Primitive) -> VjpMaker | None:
    owner, name = getattr(fun.fun, "__self__", None), fun.__name__
    if owner is not None:  # a distribution
        name = f"{type(owner).__name__.removesuffix('_gen')}.{name}"
    return SCIPY_VJPS[name] if name in SCIPY_VJPS and fun.fun.__module__.startswith("scipy.") else None


def inherited_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Compute the tangent by autograd's own rule."""
    _require_support(fun, ans, _is_on_host(ans))
    return checked_tangent(fun, primitive_jvps[fun], argnums, gs, ans, *_exact(fun, args, kwargs))


def checked_tangent(fun: Primitive, rule: JvpMaker, *call: Any) -> Array:
    """Compute a tangent by a rule; for NumPy functions, convert it to the result's shape, and to real for a real result."""
    return _fitted(fun, checked(fun, rule, *call), _like(call[2])) if fun in _OWN_PRIMITIVES else rule(*call)


def _fitted_parts(fun: Primitive, pull: Vjp, likes: list, g: Array) -> list:
    parts = checked(fun, lambda: list(pull(g)))  # autograd's rule may return a generator
    return [_fitted(fun, part, like) for part, like in zip(parts, likes)]


def checked(fun: Primitive, rule: Callable, *call: Any) -> Any:
    """Call a rule; replace its exception for unsupported arguments by an error that names the function."""
    try:
        return rule(*call)
    except np.linalg.LinAlgError:
        raise
    except _RULE_ERRORS as error:
        if f"{fun.__name__} can't be differentiated" in str(error):
            raise
        text = f"{type(error).__name__}: {error}".removesuffix(".")
        raise refusal(fun, f"with these arguments: its rule raised {text}") from error


def refusal(fun: Primitive, what: str) -> Exception:
    """Return the error for a call that can't be differentiated; the text names the function."""
    # NumPy would replace a NotImplementedError of a ufunc by another error.
    kind = TypeError if isinstance(getattr(fun, "fun", None), np.ufunc) else NotImplementedError
    return kind(f"{getattr(fun, '__name__', repr(fun))} can't be differentiated {what}.")


def _like(x: Array) -> tuple[tuple[int, ...], bool] | None:
    """Return the shape of an array or number, and whether it is real; None for other objects."""
    x = getval(x)
    if type(x) is np.ndarray or arrays_of(x) is not None:
        return x.shape, x.dtype.kind != "c"
    return (np.shape(x), not np.iscomplexobj(x)) if isinstance(x, _NUMBERS) else None


def _fitted(fun: Primitive, part: Array, like: tuple[tuple[int, ...], bool] | None) -> Array:
    if type(part) is np.ndarray and like == (part.shape, part.dtype.kind != "c"):
        return part
    if like is None or type(part) in sparse_object_types or not hasattr(part, "shape"):
        return part
    shape, real = like
    if part.shape != shape:
        if [n for n in part.shape if n != 1] != [n for n in shape if n != 1]:
            raise refusal(fun, f"with these arguments: its rule returned shape {part.shape} instead of {shape}")
        part = anp.reshape(part, shape)
    return anp.real(part) if real and part.dtype.kind == "c" else part


def substitute(fun: Primitive, computed: Callable) -> None:
    """Let a primitive of autograd compute values of plain arrays by another function than NumPy's."""
    cells = dict(zip(fun.__code__.co_freevars, fun.__closure__ or ()))
    cells["f_raw"].cell_contents = computed


def composition(fun: Primitive) -> Callable[[Function], Function]:
    """Let a primitive of autograd compute with traced values by functions that have rules; a decorator."""
    name = fun.__name__

    def decorator(composed: Function) -> Function:
        def function(*args: Any, **kwargs: Any) -> Any:
            return (composed if holds_box((args, *kwargs.values())) else fun)(*args, **kwargs)

        function.__name__, function.__doc__ = name, fun.__doc__
        function.__wrapped__ = fun  # type: ignore[attr-defined]
        COMPOSITIONS[fun.fun] = composed
        COMPOSED.add(fun)
        for module in (anp, anp.numpy_wrapper, anp.linalg):
            if getattr(module, name, None) is fun:
                setattr(module, name, function)
        return composed

    return decorator


def holds_box(x: object) -> bool:
    """Return whether an object, or a list or tuple, holds a traced value."""
    return type(x) in BOX_TYPES or isinstance(x, (list, tuple)) and any(map(holds_box, x))


def recorder_of(*args: Array) -> Any:
    """Return the recorder of the compiled program in whose trace one of the arguments is traced; None if there is none."""
    return next((x.recorder for x in args if hasattr(x, "recorder")), None)


def bound(fun: Primitive, names: str, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a call by name; raise the error of `refusal` for arguments not in `names`."""
    supported = names.split()
    named = {**dict(zip(supported, args)), **kwargs}
    others = [name for name in named if name not in supported and named[name] is not None]
    if others or len(args) > len(supported):
        unknown = " and ".join(others) or f"{len(args)} arguments"
        raise refusal(fun, f"with {unknown}: supported arguments are {names.replace(' ', ', ')}")
    return named


def _is_on_host(ans: Array) -> bool:
    return type(ans) is np.ndarray or _array_module(ans) is None


def _require_support(fun: Primitive, ans: Array, on_host: bool) -> None:
    if not on_host and fun in DEVICE_REFUSALS:
        refuse_on_device(fun, ans)


def _array_module(x: Array) -> ArrayModule | None:
    """Return the array module of a value, or of the first element of a tuple or list; None for the host."""
    x = getval(x)
    if isinstance(x, (tuple, list)) and len(x) > 0:
        x = getval(x[0])
    return arrays_of(x)


def refuse_on_device(fun: Primitive, ans: Array) -> None:
    """Raise a NotImplementedError that names a function without a derivative on devices, with advice."""
    name, advice = DEVICE_REFUSALS[fun]
    arrays = _array_module(ans)
    kind = "device" if arrays is None else arrays.name
    raise NotImplementedError(f"{name} can't be differentiated for {kind} arrays: {advice}.")


def linear_jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Apply a function to the tangent of its first argument, in which the function is linear."""
    return fun(gs[0], *args[1:], **kwargs)


def in_dtype_of(ans: Array, x: Array) -> Array:
    """Return an operand in the dtype of the result. In int8, for example, a rule's arithmetic might overflow."""
    return x if getattr(x, "dtype", ans.dtype) == ans.dtype else x.astype(ans.dtype)


def one_unchanged(g: Array) -> tuple[Array]:
    """Pass the cotangent to the only argument."""
    return (g,)


def one_negated(g: Array) -> tuple[Array]:
    """Negate the cotangent for the only argument."""
    return (-g,)


def two_unchanged(g: Array) -> tuple[Array, Array]:
    """Pass the cotangent to both arguments."""
    return (g, g)


# Constant arrays on the same device as a given array, or on the host.


def arrays_like(x: Array) -> Array:
    """Return the module with `full` and `arange` for the device of `x`, which may be traced."""
    return arrays_of(getval(x)) or np


def identity(like: Array, rows: int, columns: int | None = None, k: int = 0) -> Array:
    """Return a matrix with ones on the k-th diagonal, shape (rows, columns), in the real dtype of `like`."""
    arrays = arrays_like(like)
    i, j = arrays.arange(rows)[:, None], arrays.arange(rows if columns is None else columns)[None, :]
    return (j - i == k).astype(_real(like))


def lower_triangle(like: Array, n: int) -> Array:
    """Return a matrix with ones below the diagonal, shape (n, n), in the real dtype of `like`."""
    i = arrays_like(like).arange(n)
    return (i[None, :] < i[:, None]).astype(_real(like))


def _real(like: Array) -> Array:
    dtype = getval(like).dtype
    return dtype.char.lower() if dtype.kind == "c" else dtype
