"""Arrays of symbols, which NumPy hands its functions to.

An array holds the numbers of its values in the program, so whatever only moves values about is done by NumPy itself on
those numbers, views included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Index, Shape
from mpiad.compiling.array_functions import FUNCTIONS, METHODS
from mpiad.compiling.builder import Builder
from mpiad.compiling.symbols import BRANCHES, Symbol, numbers_of
from mpiad.compiling.ufuncs import of_ufunc


class SymbolicArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of values that aren't known yet.

    `builder`: of the program that they belong to. `numbers`: of the values. `dtype`: of the states; arrays of
    conditions say that they are boolean, and those of real numbers that they are real.
    """

    def __init__(self, builder: Builder, numbers: Array, dtype: DTypeLike):
        self.builder, self.numbers, self._dtype = builder, np.asarray(numbers), np.dtype(dtype)

    @property
    def dtype(self) -> np.dtype:
        """The dtype that such an array would have."""
        flat = self.numbers.ravel().tolist()
        if flat and all(map(self.builder.is_boolean, flat)):
            return np.dtype(bool)
        if any(self.builder.parts(number) for number in flat):
            return np.result_type(self._dtype, np.complex64)
        return self._dtype.type(0).real.dtype

    @property
    def shape(self) -> Shape:
        """The lengths of its axes."""
        return self.numbers.shape

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self.numbers.ndim

    @property
    def size(self) -> int:
        """How many entries it has."""
        return self.numbers.size

    @property
    def T(self) -> SymbolicArray:
        """The transposed array."""
        return self.like(self.numbers.T)

    @property
    def real(self) -> SymbolicArray:
        """The real parts."""
        return self._each(lambda symbol: symbol.real)

    @property
    def imag(self) -> SymbolicArray:
        """The imaginary parts."""
        return self._each(lambda symbol: symbol.imag)

    def _each(self, function: Callable[[Symbol], Symbol]) -> SymbolicArray:
        made = [function(symbol).number for symbol in self.objects().ravel()]
        return self.like(np.array(made, int).reshape(self.shape))

    def like(self, numbers: Array) -> SymbolicArray:
        """Return an array of other values of the same program."""
        return SymbolicArray(self.builder, numbers, self._dtype)

    def objects(self) -> Array:
        """Return NumPy's array of its symbols."""
        # Filled as one row, or NumPy would look into the symbols for sequences.
        made = np.empty(self.numbers.shape, object)
        made.reshape(-1)[:] = [Symbol(self.builder, number) for number in self.numbers.ravel().tolist()]
        return made

    def astype(self, dtype: DTypeLike, **_: Any) -> SymbolicArray:
        """Return itself as real or complex numbers; other kinds are refused."""
        kind, own = np.dtype(dtype).kind, self.dtype
        if kind not in "fc" or (kind == "f" and own.kind == "c"):
            self.builder.refuse(f"it makes {np.dtype(dtype)} of traced values{' that are complex' * (own.kind == 'c')}")
        return self._each(Symbol.as_number if kind == "f" else lambda symbol: symbol.real.plus_i(symbol.imag))

    def view(self, dtype: DTypeLike | None = None) -> SymbolicArray:
        """Return itself, as autograd asks of what it has put together."""
        if dtype not in (None, np.ndarray):
            self.builder.refuse(f"it looks at the bits of traced values as {dtype}")
        return self

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        # np.array([u[0], u[1]]) asks for this: there is no other way to take part in it.
        if dtype is not None and np.dtype(dtype) != object:
            self.builder.refuse(
                f"it puts traced values into an array of {np.dtype(dtype)}: return a list of the components, or begin with "
                "np.zeros_like(u)"
            )
        return self.objects()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))
        if kwargs and method == "__call__":
            self.builder.refuse(f"it calls numpy.{ufunc.__name__} with {', '.join(kwargs)}=")
        made = of_ufunc(self, ufunc, method, inputs, kwargs)
        if out[0] is None:
            return made
        return self._written(out, made)

    def _written(self, out: tuple[Any, ...], made: SymbolicArray) -> SymbolicArray:
        if not isinstance(out[0], SymbolicArray):
            self.builder.refuse("it writes traced values into an array of numbers (out=, +=)")
        # Views of it see the new values, and an argument of f's is read-only, as in the vectorised path.
        out[0].numbers[...] = made.numbers
        return out[0]

    def __array_function__(self, function: Callable, types: object, args: tuple, kwargs: dict) -> Any:
        made = FUNCTIONS.get(function)
        if made is None:
            name = f"{function.__module__}.{function.__name__}"
            self.builder.refuse(f"it calls {name}, which isn't among the functions that can be compiled")
        return made(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in METHODS:
            raise AttributeError(f"traced values have no {name!r}")
        return partial(METHODS[name], self)

    def __getitem__(self, key: Index) -> SymbolicArray:
        self._check_key(key)
        return self.like(self.numbers[key])

    def __setitem__(self, key: Index, value: Array) -> None:
        self._check_key(key)
        self.numbers[key] = numbers_of(self.builder, value)

    # Which entries are meant must be known now.
    def _check_key(self, key: object) -> None:
        if any(isinstance(part, SymbolicArray) for part in (key if isinstance(key, tuple) else (key,))):
            self.builder.refuse("it looks up places that depend on traced values: write np.where(u > 0, ...) instead")

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self.numbers)))

    def __bool__(self) -> NoReturn:
        self.builder.refuse(BRANCHES)

    def __float__(self) -> NoReturn:
        Symbol(self.builder, 0).__float__()

    __int__ = __index__ = __complex__ = __float__
