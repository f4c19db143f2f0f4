"""Which of NumPy's functions CuPy has, and with which arguments: what the stand-in for device arrays answers.

Read from CuPy's sources (14 and 15): where its signature is shorter than NumPy's, so is the one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

UFUNCS = frozenset(
    """
    absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_or bitwise_xor cbrt ceil conjugate
    copysign cos cosh deg2rad degrees divide equal exp exp2 expm1 fabs float_power floor floor_divide fmax fmin fmod greater
    greater_equal heaviside hypot invert isfinite isinf isnan left_shift less less_equal log log10 log1p log2 logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor matmul maximum minimum multiply negative nextafter not_equal
    positive power rad2deg radians reciprocal remainder right_shift rint sign signbit sin sinh sqrt square subtract tan tanh
    true_divide trunc
    """.split()
)
# CuPy adds atomically; of the others that NumPy has it knows a few only.
UFUNCS_AT = frozenset({"add", "subtract", "maximum", "minimum"})

# The shape of what these return depends on values, which CuPy copies to the host. So it does for x[mask].
COUNTING = frozenset({"nonzero", "flatnonzero", "argwhere", "unique", "bincount"})


def _with(*names: str) -> Callable:
    """A function that takes these arguments only; without names, all of NumPy's."""

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        if names and (len(args) > len(names) or kwargs.keys() - set(names)):
            raise TypeError(f"{func.__name__} takes {', '.join(names)}, but got {len(args)} and {sorted(kwargs)}")
        return func(*args, **kwargs)

    return run


def _in_order(*names: str) -> Callable:
    """The same, for a function whose `order` is a letter; None isn't one for CuPy."""

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        if dict(zip(names, args), **kwargs).get("order", "C") is None:
            raise TypeError("object of type 'NoneType' has no len()")
        return _with(*names)(func, *args, **kwargs)

    return run


def _joining(func: Any, arrays: Any, *args: Any, **kwargs: Any) -> Any:
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError("Only cupy arrays can be concatenated")
    return func(arrays, *args, **kwargs)


def _where(func: Any, condition: Any, *choices: Any) -> Any:
    if not isinstance(condition, np.ndarray):
        raise TypeError(f"where: the condition is a {type(condition).__name__}, which has no astype")
    return func(condition, *choices)


def _of_arrays(func: Any, *args: Any, **kwargs: Any) -> Any:
    arrays = args[1:] if isinstance(args[0], str) else args if func is np.einsum else args[:2]
    for array in arrays:
        if not isinstance(array, np.ndarray) and not (func is np.einsum and isinstance(array, list)):
            raise TypeError(f"{func.__name__}: Unsupported type {type(array)}")
    return func(*args, **kwargs)


_OF_SHAPE = ("shape", "size", "ndim", "result_type", "can_cast", "isscalar", "iscomplexobj", "isrealobj")
_ELEMENTWISE = ("angle", "real", "imag", "nan_to_num", "sinc", "fix", "isreal", "iscomplex", "isposinf", "isneginf")
_LAYOUT = (
    "around", "array_split", "astype", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_arrays", "broadcast_to",
    "copyto",
    "diag",
    "diagonal", "dsplit", "expand_dims", "flip", "fliplr", "flipud", "hsplit", "moveaxis", "repeat", "roll",
    "rollaxis", "rot90", "split", "squeeze", "swapaxes", "tile", "tril", "triu", "vsplit", "pad",
)  # fmt: skip
_NEW = ("empty_like", "full_like", "ones_like", "zeros_like", "linspace")
_SELECTION = ("take", "take_along_axis", "nonzero", "flatnonzero", "argwhere", "count_nonzero", "searchsorted", "unique")
_TESTS = ("all", "any", "allclose", "array_equal", "isclose")
_MATHEMATICS = ("cross", "diff", "gradient", "interp", "trapezoid", "median", "ptp", "bincount", "convolve", "copy")
_ALL = _OF_SHAPE + _ELEMENTWISE + _LAYOUT + _NEW + _SELECTION + _TESTS + _MATHEMATICS

FUNCTIONS: dict[str, Callable] = {
    **{name: _with() for name in (*_ALL, "may_share_memory", "shares_memory")},
    **dict.fromkeys(("concatenate", "stack", "vstack", "hstack", "dstack", "column_stack"), _joining),
    **dict.fromkeys(("dot", "einsum", "inner", "kron", "outer", "tensordot", "vdot"), _of_arrays),
    "where": _where,
    "sum": _with("a", "axis", "dtype", "out", "keepdims"),
    "prod": _with("a", "axis", "dtype", "out", "keepdims"),
    "mean": _with("a", "axis", "dtype", "out", "keepdims"),
    "var": _with("a", "axis", "dtype", "out", "ddof", "keepdims"),
    "std": _with("a", "axis", "dtype", "out", "ddof", "keepdims"),
    **{name: _with("a", "axis", "out", "keepdims") for name in ("max", "min", "amax", "amin")},
    **{name: _with("a", "axis", "dtype", "out") for name in ("cumsum", "cumprod")},
    **{name: _with("a", "axis", "dtype", "out", "keepdims") for name in ("argmax", "argmin")},
    **{name: _with("a", "axis", "kind") for name in ("sort", "argsort")},
    **{name: _with("a", "kth", "axis") for name in ("partition", "argpartition")},
    "clip": _with("a", "a_min", "a_max", "out"),
    "round": _with("a", "decimals", "out"),
    "reshape": _in_order("a", "shape", "order"),
    "ravel": _in_order("a", "order"),
    "transpose": _with("a", "axes"),
    "trace": _with("a", "offset", "axis1", "axis2", "dtype", "out"),
    **{
        f"linalg.{name}": _with()
        for name in ("cholesky", "det", "eigh", "eigvalsh", "inv", "norm", "pinv", "qr", "slogdet", "solve", "svd")
    },
    **{f"fft.{name}": _with("a", "n", "axis", "norm") for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")},
    **{f"fft.{name}": _with("a", "s", "axes", "norm") for name in ("fft2", "ifft2", "fftn", "ifftn", "rfft2", "rfftn")},
    **{f"fft.{name}": _with("a", "s", "axes", "norm") for name in ("irfft2", "irfftn")},
    **{f"fft.{name}": _with("x", "axes") for name in ("fftshift", "ifftshift")},
}
