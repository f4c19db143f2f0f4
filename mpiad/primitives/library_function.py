"""Functions of shared libraries, in Fortran or C, as operators with derivatives.

A function is described by its arguments, in its own order: numbers by value, arrays and numbers by reference, and a
communicator. An integer argument whose name is the length of an axis of an input is taken from the array. The call is one
node of the tape, as for every custom operator. The outputs are consecutive parts of one new array, the result of the node;
so a call copies nothing. An adjoint or a tangent is a function of a library as well, described by the names of the
function's arguments and by their cotangents or tangents; it may have derivatives of its own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array, Comm, Shape
from mpiad.primitives.cotangents import conformed, spec_like
from mpiad.primitives.custom_operator import CustomOperator
from mpiad.primitives.operation import apply, recorded_call
from mpiad.transport import Spec, member
from mpiad.transport.core import calls
from mpiad.transport.core.channels import communications
from mpiad.transport.core.tracing import tracing
from mpiad.transport.shared_library import SharedLibrary, communicator_argument, in_progress

_box_types = Box.types
_LENGTH = re.compile(r"([^\W\d]\w*)(?:\s*([+-]\s*\d+))?|(\d+)")


class _Length(NamedTuple):
    """The length of an axis: an integer argument plus a constant, or the constant alone."""

    name: str | None
    offset: int

    @classmethod
    def of(cls, text: int | str) -> _Length:
        match = _LENGTH.fullmatch(str(text).strip())
        if match is None:
            raise ValueError(f"The length of an axis must be an integer, a name, or 'name + integer', but got {text!r}.")
        return cls(match[1], int((match[2] or match[3] or "0").replace(" ", "")))

    def value(self, sizes: Mapping[str, int]) -> int:
        return self.offset + (0 if self.name is None else sizes[self.name])


class Argument:
    """An argument of a function of a library: an array, or without lengths a number.

    Parameters
    ----------
    *shape : int or str
        The length of each axis: an integer, the name of an integer argument, or its sum with an integer, as in
        ``Input("ny", "nx + 2")``. Lengths and the integers in them are zero or more. A number has no axes.
    dtype : str
    order : str
        "C" or "F". A Fortran array ``u(nx, ny)`` is ``Input("nx", "ny", order="F")``, or in the order of C
        ``Input("ny", "nx")``, which compiled programs pass without a copy.
    overwritten : bool
        Whether the function overwrites an input that isn't a result; it then gets a copy.
    """

    reads = writes = by_value = False

    def __init__(
        self, *shape: int | str, dtype: str = "float64", order: Literal["C", "F"] = "C", overwritten: bool = False
    ):
        if order not in ("C", "F"):
            raise ValueError(f'order must be "C" or "F", but got {order!r}.')
        self.order: Literal["C", "F"] = order
        self.shape, self.dtype, self.overwritten = shape, np.dtype(dtype), overwritten
        self.range = np.iinfo(self.dtype) if self.dtype.kind in "iu" else None
        self.lengths = [_Length.of(length) for length in shape]

    def turned(self, kind: type[Argument], overwritten: bool = False) -> Argument:
        """Return an argument of another kind with the same shape, dtype and order."""
        return kind(*self.shape, dtype=self.dtype.str, order=self.order, overwritten=overwritten)

    def is_passed(self, x: Array) -> bool:
        """Return whether an array is passed without a copy."""
        if type(x) is not np.ndarray or x.dtype is not self.dtype and x.dtype != self.dtype:
            return False
        flags = x.flags
        return (flags.c_contiguous if self.order == "C" else flags.f_contiguous) and flags.aligned

    def accepts(self, x: Array) -> bool:
        """Return whether an array has the dtype and the layout, or a number can be converted."""
        if type(x) is np.ndarray:
            return x.ndim == len(self.shape) and self.is_passed(x)
        if isinstance(x, (bool, int, float, complex, np.generic)):
            kinds = [_KINDS.get(np.asarray(x).dtype.kind, 9), _KINDS[self.dtype.kind]]
            fits = self.range is None or kinds[0] <= 1 and self.range.min <= x.real <= self.range.max
            return fits and not self.shape and kinds[0] <= kinds[1]
        # An array of a compiled program, which has no layout of its own.
        traced = hasattr(x, "shape") and hasattr(x, "dtype") and not hasattr(type(x), "__cuda_array_interface__")
        return traced and not isinstance(x, np.ndarray) and x.dtype == self.dtype and len(x.shape) == len(self.shape)

    def __str__(self) -> str:
        if not self.shape:
            return f"a number of {self.dtype.name}" + (f" from {self.range.min} to {self.range.max}" if self.range else "")
        return f"a contiguous {self.dtype.name} array of shape ({', '.join(map(str, self.shape))}) in {self.order} order"


_KINDS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}


class Input(Argument):
    """An array that the function reads, or a number that it reads by reference; see `Argument`."""

    reads = True


class Output(Argument):
    """An array that the function writes, or a number that it writes by reference; see `Argument`."""

    writes = True


class InOut(Argument):
    """An array that the function changes: it gets a copy of the input, which is a result; see `Argument`."""

    reads = writes = True


class Value(Argument):
    """A real or integer number that is passed by value.

    Parameters
    ----------
    dtype : str
    """

    reads = by_value = True

    def __init__(self, dtype: str = "float64"):
        super().__init__(dtype=dtype)
        if self.dtype.kind not in "fiu":
            raise ValueError(f"A number that is passed by value must be real or an integer, but got {dtype!r}.")


class Communicator(Argument):
    """The communicator of a function of a library.

    Parameters
    ----------
    language : str
        "Fortran" for its integer, "C" for an ``MPI_Comm``.
    by_value : bool
        False for Fortran's arguments without ``value``.
    """

    def __init__(self, language: str = "Fortran", by_value: bool = True):
        super().__init__(dtype="int32")
        if language not in ("Fortran", "C"):
            raise ValueError(f'language must be "Fortran" or "C", but got {language!r}.')
        self.language, self.by_value = language, by_value


class Cotangent(NamedTuple):
    """The cotangent of an argument, among the arguments of an adjoint, which reads those of outputs and writes the others.

    Parameters
    ----------
    name : str
        An argument of the differentiated function. The cotangents of inputs are zero before the call.
    overwritten : bool
        Whether the adjoint overwrites the cotangent of an output; it then gets a copy.
    """

    name: str
    overwritten: bool = False


class Tangent(NamedTuple):
    """The tangent of an argument, among the arguments of a tangent, which reads those of inputs and writes the others.

    Parameters
    ----------
    name : str
        An argument of the differentiated function.
    overwritten : bool
        Whether the function overwrites the tangent of an input; it then gets a copy.
    """

    name: str
    overwritten: bool = False


class _Part(NamedTuple):
    """An output as a part of the result."""

    order: Literal["C", "F"]
    shape: Shape
    index: int | slice


class _Layout(NamedTuple):
    """All that the shapes and the integers among the arguments determine."""

    sizes: dict[str, int]
    values: list[Any]  # the arguments of the call, as far as they are known
    parts: dict[str, _Part]
    offsets: list[tuple[int, int]]  # the place of each output among the arguments, and its bytes after the result's begin
    result: Spec
    new_result: Callable[[], np.ndarray]


class LibraryFunction(CustomOperator):
    """A function of a shared library, as an operator; made by `Library.function`.

    It takes the inputs in the function's order, by position or name, without the integers that are lengths of inputs. It
    returns the output, or a tuple of several outputs. `adjoint` and `tangent` define derivatives in a library, and for a
    function with one output, `defvjp`, `defjvp` and their variants define derivatives in Python, for example by JAX.
    """

    def __init__(
        self, library: SharedLibrary, symbol: str, arguments: Mapping[str, Argument], comm: Comm, is_adjoint: bool = False
    ):
        super().__init__(library.symbol(symbol))
        self.arguments, self._library, self._comm = dict(arguments), library, member(comm, symbol)
        items = self.arguments.items()
        lengths = {length.name for _, a in items for length in a.lengths if length.name is not None}
        integers = {name for name, a in items if a.reads and not a.shape and a.dtype.kind in "iu"}
        self._outputs = [name for name, a in items if a.writes]
        # The function gets a copy of an integer that it changes, in the result.
        self._inferred = {length.name for _, a in items if a.reads for length in a.lengths} & integers - set(self._outputs)
        self._inputs = [(k, name, a) for k, (name, a) in enumerate(items) if a.reads and name not in self._inferred]
        self._names = [name for _, name, _ in self._inputs]
        self._arrays = [k for k, (_, _, a) in enumerate(self._inputs) if a.shape]
        self._integers = [k for k, name in enumerate(self._names) if name in integers & lengths]
        if lengths - integers:
            raise ValueError(f"{symbol}: the lengths {sorted(lengths - integers)} aren't integers among the arguments.")
        if len({self.arguments[name].dtype for name in self._outputs}) != 1:
            raise ValueError(f"{symbol}: a function must have at least one output, and all outputs the same dtype.")
        self._template: list[Any] = [None] * len(self.arguments)
        for place, argument in enumerate(self.arguments.values()):
            if isinstance(argument, Communicator):
                self._template[place] = communicator_argument(self._comm, argument.language, argument.by_value)
        self._text = f"{symbol} of {library.path}"
        self.fun.restype = None
        kinds = [np.ctypeslib.as_ctypes_type(a.dtype) if a.by_value else ctypes.c_void_p for _, a in items]
        self.fun.argtypes = [kind if x is None else type(x) for kind, x in zip(kinds, self._template)]
        self._layouts: dict[tuple, _Layout] = {}
        # Adjoints add to the cotangents of inputs.
        self.is_adjoint, self._allocate = is_adjoint, np.zeros if is_adjoint else np.empty
        self.prepared, self.spec_of = self._prepared, lambda *args: self._layout(args).result

    def _call(self, values: list[Any]) -> None:
        in_progress.text = self._text
        self.fun(*values)
        in_progress.text = None

    def __repr__(self) -> str:
        return f"<{self.__name__}({', '.join(self._names)}) of {self._library.path}>"

    def __call__(self, *args: Array, **kwargs: Array) -> Array | tuple[Array, ...]:
        """Check the arguments, call the function, and record the call on the current tape and the enclosing tapes."""
        if kwargs:
            named = dict(zip(self._names, args)) | kwargs
            args = tuple(named[name] for name in self._names if name in named) if len(named) == len(self._names) else ()
        if len(args) != len(self._names):
            raise TypeError(f"{self.__name__} takes the arguments ({', '.join(self._names)}), and each of them once.")
        for x, (_, name, argument) in zip(args, self._inputs):
            while type(x) in _box_types:
                x = x._value
            if not argument.accepts(x):
                self._refuse(name, argument, x)
        result = self._recorded(args)
        return result if len(self._outputs) == 1 else self._splitting(args)(result)

    def _refuse(self, name: str, argument: Argument, x: Array) -> None:
        got, advice = f"{type(x).__name__} {x!r:.40}", ""
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            got = f"{x.dtype} of shape {x.shape}" + (f" with strides {x.strides}" if isinstance(x, np.ndarray) else "")
            if x.dtype == argument.dtype and len(x.shape) == len(argument.shape):
                advice = f" Pass np.{'ascontiguousarray' if argument.order == 'C' else 'asfortranarray'}({name})."
        raise TypeError(f"{self.__name__}: {name} must be {argument}, but got {got}.{advice}")

    def _recorded(self, args: tuple) -> Array:
        if self._integers:
            self._layout(args)  # a length that varies between the runs of a compiled program ends its trace
        next(communications)
        return apply(self, tracing.tape, args, {})

    def _splitting(self, args: tuple) -> Callable[[Array], tuple[Array, ...]]:
        """Return the function that splits a result, or its cotangent, into the outputs."""
        return (lambda whole: (whole,)) if len(self._outputs) == 1 else partial(_split, self._layout(args).parts)

    def _joined(self, parts: Sequence[Array]) -> Array:
        """Return the result of which these are the outputs."""
        if len(parts) == 1:
            return parts[0]
        turned = [part.T if self.arguments[name].order == "F" else part for name, part in zip(self._outputs, parts)]
        return anp.concatenate([anp.ravel(part) for part in turned])

    def _layout(self, args: tuple) -> _Layout:
        key = tuple([args[k].shape for k in self._arrays])
        if self._integers:
            key += tuple([int(args[k]) for k in self._integers])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._new_layout(args)
        return layout

    def _new_layout(self, args: tuple) -> _Layout:
        member(self._comm, self.__name__)  # it may have been freed
        sizes = {self._names[k]: int(args[k]) for k in self._integers}
        for name, n in sizes.items():
            if n < 0:
                raise ValueError(
                    f"{self.__name__}: {name} is the length of an axis, and must be zero or more, but got {n}."
                )
        sources = dict[str | None, str]()  # the arrays that have determined lengths
        for k in self._arrays:
            name = self._names[k]
            for axis, (length, n) in enumerate(zip(self.arguments[name].lengths, args[k].shape)):
                if length.name is not None and length.name not in sizes:
                    sizes[length.name], sources[length.name] = n - length.offset, f" from {name}"
                    if n < length.offset:
                        expected = f"{self.arguments[name].shape[axis]} with {length.name} ≥ 0"
                        raise ValueError(
                            f"{self.__name__}: axis {axis} of {name} must have length {expected}, but has {n}."
                        )
                if length.value(sizes) != n:
                    expected = f"{self.arguments[name].shape[axis]} = {length.value(sizes)}{sources.get(length.name, '')}"
                    raise ValueError(f"{self.__name__}: axis {axis} of {name} must have length {expected}, but has {n}.")
        values, parts, offsets, stop = self._template.copy(), dict[str, _Part](), [], 0
        for place, (name, argument) in enumerate(self.arguments.items()):
            if name in self._inferred:
                if not argument.accepts(sizes[name]):
                    self._refuse(name, argument, sizes[name])
                number = np.ctypeslib.as_ctypes_type(argument.dtype)(sizes[name])
                values[place] = number if argument.by_value else ctypes.pointer(number)
            if argument.writes:
                shape = tuple([length.value(sizes) for length in argument.lengths])
                for n, text, length in zip(shape, argument.shape, argument.lengths):
                    if n < 0:
                        got = f"{text} = {n}{sources.get(length.name, '')}"
                        raise ValueError(f"{self.__name__}: the lengths of {name} must be zero or more, but one is {got}.")
                begin, stop = stop, stop + prod(shape)
                offsets.append((place, begin * argument.dtype.itemsize))
                parts[name] = _Part(argument.order, shape, slice(begin, stop) if shape else begin)
        (name, first), is_one = next(iter(parts.items())), len(parts) == 1
        result = Spec(first.shape if is_one else (stop,), self.arguments[name].dtype)
        new_result = partial(self._allocate, result.shape, result.dtype, first.order if is_one else "C")
        return _Layout(sizes, values, parts, offsets, result, new_result)

    def body(self, args: tuple, kwargs: dict) -> Array:
        """Call the function with plain arrays, as one node."""
        layout = self._layout(args)
        out = layout.new_result()
        values, _copies = self._values(layout, out, args)
        if calls.is_noting():
            recorded_call(calls.begin, (self.__name__, args[0] if args else None, None), self._call, values)
        else:
            self._call(values)
        return out if out.ndim else out[()]

    def _values(self, layout: _Layout, out: np.ndarray, args: tuple) -> tuple[list[Any], list[np.ndarray]]:
        """Return the arguments of the call, and those arrays to which they point that are copies."""
        values, copies, address = layout.values.copy(), [], _pointer(id(out) + _DATA).value or 0
        for place, offset in layout.offsets:
            values[place] = address + offset
        for x, (place, name, argument) in zip(args, self._inputs):
            if argument.by_value:
                values[place] = x.item() if isinstance(x, np.generic) else x
            elif argument.writes:
                part = layout.parts[name]
                out.reshape(-1, order=part.order)[part.index] = np.ravel(x, part.order) if part.shape else x
            else:
                if argument.overwritten or not argument.is_passed(x):
                    x = np.array(x, argument.dtype, order=argument.order)
                    copies.append(x)
                values[place] = _pointer(id(x) + _DATA)
        return values, copies

    def _prepared(self, out: np.ndarray, *args: Array) -> Callable[[], None] | None:
        """Return a function that calls the library's function with fixed arrays; see `CustomOperator.prepared`."""
        layout = self._layout(args)
        values, copies = self._values(layout, out, args)
        # The copies would have to be made in each call.
        if copies or any(a.writes for _, _, a in self._inputs) or out.strides != layout.new_result().strides:
            return None
        for x, (place, _, argument) in zip(args, self._inputs):
            if argument.by_value and isinstance(x, np.ndarray):  # it is read in each call
                if x.dtype != argument.dtype:
                    return None
                values[place] = self.fun.argtypes[place].from_address(_pointer(id(x) + _DATA).value)

        def run(_arrays: tuple = args) -> None:  # the addresses are read from these objects
            if self.is_adjoint:
                out.fill(0)
            self._call(values)

        return run

    def adjoint(self, symbol: str, *arguments: str | Cotangent, library: Library | None = None) -> LibraryFunction:
        """Define the adjoint of this function: the transposed Jacobian times the cotangents of the outputs.

        Parameters
        ----------
        symbol : str
            The name of the adjoint in its library.
        *arguments : str or Cotangent
            The arguments of the adjoint, in its order. The name of an argument stands for its value, or for the result if
            it is an output; it is passed in the same way as to this function. A `Cotangent` is passed by its address.
            There must be one for each output; inputs without one have no derivative.
        library : Library, optional
            The library of the adjoint; by default that of this function.

        Returns
        -------
        LibraryFunction
            The adjoint, whose own derivatives may be defined.

        Raises
        ------
        ValueError
            If the library has no such function, or an argument doesn't belong to this function.

        Ranks
        -----
        All ranks that call this function call the adjoint, which is the transpose over all of them.
        """
        function, derivative = self._derivative(symbol, arguments, Cotangent, library)
        self.backward = lambda ans, args, kwargs: derivative(ans, args, self._splitting(args))
        return function

    def tangent(self, symbol: str, *arguments: str | Tangent, library: Library | None = None) -> LibraryFunction:
        """Define the tangent of this function: the Jacobian times the tangents of the inputs.

        Parameters
        ----------
        symbol, *arguments, library
            As in `adjoint`, with a `Tangent` for each differentiated input and each output.

        Returns
        -------
        LibraryFunction
            The tangent, whose own derivatives may be defined.
        """
        function, derivative = self._derivative(symbol, arguments, Tangent, library)

        def forward(tangents: dict[int, Array], ans: Array, args: tuple, kwargs: dict) -> Array:
            directions = [conformed(tangents.get(k), spec_like(x)) for k, x in enumerate(args)]
            return self._joined(derivative(ans, args, tuple)(directions))

        self.forward = forward
        return function

    def _derivative(
        self, symbol: str, arguments: Sequence[Any], marker: type[Cotangent | Tangent], library: Library | None
    ) -> tuple[LibraryFunction, Callable]:
        """Return a derivative, and ``derivative(ans, args, split)``, which binds it to a call.

        The result maps the cotangent of the result to those of the inputs, or the tangents of the inputs to those of the
        outputs; None for an argument without one. ``split`` makes a sequence of the former.
        """
        described: dict[str, Argument] = {}
        kind, is_adjoint = marker.__name__, marker is Cotangent
        for each in arguments:
            name = getattr(each, "name", each)
            if name not in self.arguments or not isinstance(each, (str, marker)):
                names = ", ".join(self.arguments)
                raise ValueError(f"{symbol}: expected an argument among {names}, or its {kind}, but got {each!r}.")
            argument = self.arguments[name]
            if isinstance(each, str):
                described[name] = argument.turned(Input) if argument.writes else argument
                continue
            reads, writes = (argument.writes, argument.reads) if is_adjoint else (argument.reads, argument.writes)
            role = InOut if reads and writes else Input if reads else Output
            described[f"{kind} of {name}"] = argument.turned(role, each.overwritten)
        missing = [name for name in self._outputs if f"{kind} of {name}" not in described]
        if missing:
            raise ValueError(
                f"{symbol}: the arguments must contain the {kind} of each output; {', '.join(missing)} has none."
            )
        function = LibraryFunction(library or self._library, symbol, described, self._comm, is_adjoint)
        given, made = (self._outputs, self._names) if is_adjoint else (self._names, self._outputs)
        lengths = [name for name in function._names if name in self._inferred]
        inputs, outputs = ({name: k for k, name in enumerate(names)} for names in (function._names, function._outputs))
        slots = [inputs.get(f"{kind} of {name}") for name in given]
        results = [outputs.get(f"{kind} of {name}") for name in made]
        names = [*self._names, *self._outputs, *lengths, *[f"{kind} of {name}" for name in given]]
        places = [names.index(name) for name in function._names]

        def derivative(ans: Array, args: tuple, split: Callable[[Any], Sequence[Array]]) -> Callable[[Any], list]:
            sizes = [self._layout(args).sizes[name] for name in lengths] if lengths else lengths
            values = [*args, *self._splitting(args)(ans), *sizes, *slots]
            bound = [values[k] for k in places]

            def run(directions: Any) -> list[Array | None]:
                values = bound.copy()
                for slot, direction in zip(slots, split(directions)):
                    if slot is not None:
                        values[slot] = direction
                inputs = tuple(values)
                parts = function._splitting(inputs)(function._recorded(inputs))
                return [None if k is None else parts[k] for k in results]

            return run

        return function, derivative


def _split(parts: Mapping[str, _Part], result: Array) -> tuple[Array, ...]:
    outputs = []
    for part in parts.values():
        array = result[part.index]
        if len(part.shape) > 1:
            array = array.reshape(part.shape[::-1]).T if part.order == "F" else array.reshape(part.shape)
        outputs.append(array)
    return tuple(outputs)


class Library(SharedLibrary):
    """A shared library; made by `library`."""

    def function(self, symbol: str, /, *, communicator: Comm = None, **arguments: Argument) -> LibraryFunction:
        """Describe a function of the library.

        Parameters
        ----------
        symbol : str
            Its name in the library; compilers append an underscore to the names of Fortran routines without ``bind(C)``.
        communicator : mpi4py intracommunicator, optional
            The communicator that is passed for an argument `Communicator`; by default the world.
        **arguments : Argument
            The arguments by name, in the order of the function: `Input`, `Output`, `InOut`, `Value` or `Communicator`. An
            integer whose name is a length of an input is taken from the shape of the array, unless the function changes it.
            The value that the function returns isn't used.

        Returns
        -------
        LibraryFunction

        Raises
        ------
        ValueError
            If the library has no such function, a length isn't an integer argument, or outputs differ in dtype.
        """
        return LibraryFunction(self, symbol, arguments, communicator)


# The place of the address of the entries in an array object, which NumPy's C interface fixes. `x.ctypes.data` takes ten
# times as long.
_DATA = object.__basicsize__
_pointer = ctypes.c_void_p.from_address
