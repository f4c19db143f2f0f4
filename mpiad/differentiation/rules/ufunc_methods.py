"""Methods of NumPy's universal functions that the functions of `autograd.numpy` lack: outer, reduce and accumulate.

They call functions with rules: `np.subtract.outer(x, y)` broadcasts, and `np.add.reduce(x)` sums along the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from mpiad._typing import Array, Function
from mpiad.differentiation.rules.protocol import anp

_REDUCTIONS = {
    getattr(anp, name): getattr(anp, reduction)
    for name, reduction in zip(
        "add multiply maximum minimum logical_and logical_or".split(), "sum prod max min all any".split()
    )
}


def _outer(fun: Function, x: Array, y: Array, **kwargs: object) -> Array:
    x, y = _array_of(x), _array_of(y)
    return fun(anp.reshape(x, anp.shape(x) + (1,) * anp.ndim(y)), y, **kwargs)


def _along_first_axis(fun: Function, x: Array, axis: int | None = 0, *args: object, **kwargs: object) -> Array:
    return fun(_array_of(x), axis, *args, **kwargs)


def _array_of(x: Array | Sequence[Array]) -> Array:
    return anp.array(x) if isinstance(x, (list, tuple)) else x


for _fun in [*vars(anp).values()]:
    _ufunc = getattr(_fun, "fun", None)
    if isinstance(_ufunc, np.ufunc) and _ufunc.nin == 2 and _ufunc.nout == 1 and _ufunc.signature is None:
        _fun.outer = partial(_outer, _fun)
for _fun, _reduction in _REDUCTIONS.items():
    _fun.reduce = partial(_along_first_axis, _reduction)
for _fun, _sums in ((anp.add, anp.cumsum), (anp.multiply, anp.cumprod)):
    _fun.accumulate = partial(_along_first_axis, _sums)
