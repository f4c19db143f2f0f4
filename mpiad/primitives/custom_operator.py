"""Communicating operators made by `mpiad.extend`: each call is one node of the ordered tape or of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array, Function
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import Recorded, apply, note_rules, recorded_call, suspended
from mpiad.transport import Spec
from mpiad.transport.core import calls
from mpiad.transport.core.channels import communications
from mpiad.transport.core.tracing import restoring_state, tracing
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array

_box_types = Box.types
T = TypeVar("T")


class InPlace(NamedTuple):
    """A variant of an operator for compiled programs: its first argument and its result are in the same buffer.

    Each function takes `rest`, the operator's arguments after the first. Shapes and indices omit leading (batch) axes.

    Parameters
    ----------
    shape : callable
        Shape of the buffer.
    given, result : callable
        Index in the buffer of the first entry of the argument before the call, and of the result after the call.
    run : callable
        ``run(buffer, *rest)`` applies the operator.
    prepared : callable
        ``prepared(buffer, *rest)`` returns a function without arguments that applies the operator in a fixed buffer on the
        host, for programs that run repeatedly. That function returns an iterator that yields while messages are active. It
        takes no message numbers, and doesn't report its calls to debugging tools.
    still : callable
        The part of the buffer that doesn't change while messages are active: (start, stop) for each axis, or None if the
        operator doesn't communicate.
    reads : callable
        The number of layers at each end of each axis of the argument that the operator reads; 0 for an axis if only other
        axes matter.
    constant : callable
        Whether the operator does no more than set entries outside of its argument to constants.
    changes_given : bool
        Whether the operator overwrites the argument in the buffer.
    adds : bool
        Whether the operator adds to the entries of its result what depends on the other entries of the buffer only. Then
        another term of the result may be added before the call.
    """

    shape: Callable[..., Sequence[int]]
    given: Callable[..., Sequence[int]]
    result: Callable[..., Sequence[int]]
    run: Callable[..., None]
    prepared: Callable[..., Callable[[], Iterator[None]]]
    still: Callable[..., Sequence[tuple[int, int]] | None]
    reads: Callable[..., Sequence[int]]
    constant: Callable[..., bool]
    changes_given: bool
    adds: bool


class CustomOperator(Recorded):
    """An operator that communicates; made by `custom_operator`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpiad.extend import CustomOperator, custom_operator
    >>> size = mpiad.mpi_size()
    >>> total = custom_operator(lambda x: MPI.COMM_WORLD.allreduce(x))
    >>> print(isinstance(total, CustomOperator), total(1.0) == size)
    True True
    """

    # Whether the spec of the result follows from the specs of the arguments, although only a run can tell it.
    fixes_spec = False

    def __init__(self, fun: Function):
        super().__init__(getattr(fun, "__name__", "operator"))
        self.fun = fun
        self.__doc__ = getattr(fun, "__doc__", None)
        self.backward: Callable | None = None
        self.forward: Callable | None = None
        self.in_place: InPlace | None = None
        # ``spec_of(*args)`` returns the `Spec` of the result, if it follows from the specs of the arguments on this rank:
        # programs then contain the operator without a first run, and don't check its results.
        self.spec_of: Callable[..., Spec] | None = None
        # ``prepared(out, *args)`` returns None, or, for programs that run repeatedly, a function without arguments that
        # applies the operator to arrays `args` of at most 64 KiB, and writes the result to `out`, all contiguous and on the
        # host. It runs on whatever tape is open: it calls no differentiable function, and reports no call to debugging
        # tools.
        self.prepared: Callable[..., Callable[[], object] | None] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Array:
        """Apply the operator, and record it on the current tape and the enclosing tapes."""
        next(communications)
        return apply(self, tracing.tape, args, kwargs)

    def __repr__(self) -> str:
        return f"<communicating operator {self.__name__}>"

    def run(self, args: tuple, params: dict[str, object]) -> Array:
        """Return the result for plain arrays, or record the call in a compiled program."""
        recorder = tracing.recorder
        return self.body(args, params) if recorder is None else recorder.operate(self, args, params)

    def abstract(self, args: tuple, params: dict[str, object]) -> Any:
        """Return the `Spec` of the result, NotImplemented if only a run can tell it."""
        return NotImplemented if self.spec_of is None or params else self.spec_of(*args)

    def body(self, args: tuple, kwargs: dict) -> Array:
        """Run the function on plain arrays, as one node."""
        # The function must not change its arguments, which adjoints and the caller may still use.
        args = tuple([_read_only(arg) for arg in args])
        ans = self._as_one_node(args[0] if args else None, self.fun, *args, **kwargs)
        # A read-only result may share memory with an argument, so it is copied.
        return ans.copy() if type(ans) is np.ndarray and not ans.flags.writeable else _result(ans, self.__name__)

    def run_in_place(self, buffer: Array, *rest: object) -> None:
        """Run the function in a buffer that holds its first argument (see `InPlace`)."""
        self._as_one_node(buffer, self.in_place.run, buffer, *rest)  # type: ignore[union-attr]

    def _as_one_node(self, x: Array, fun: Callable[..., T], *args: object, **kwargs: object) -> T:
        def run() -> T:
            with suspended(operator=True):
                return fun(*args, **kwargs)

        if calls.is_noting():
            return recorded_call(calls.begin, (self.__name__, x, None, True), run)
        with restoring_state():
            return run()

    def vjp(self, ans: Array, args: tuple, params: dict[str, object], argnums: Sequence[int], level: int) -> Callable:
        """Return the function that maps the cotangent of the result to the cotangents of the traced arguments."""
        if self.backward is None:
            raise NotImplementedError(f"{self.__name__} has no adjoint: define one with mpiad.extend.defvjp.")
        rule = self.backward(ans, args, params)
        # Only the specs are kept, so that the arrays' memory can be freed unless the rule needs them.
        specs = [(k, spec_like(args[k])) for k in argnums]
        return partial(_parts, self, rule, specs, len(args), np.ndim(ans) if self.batched_adjoint else None)

    def jvp(self, tangents: dict[int, Array], ans: Array, args: tuple, params: dict[str, object], level: int) -> Array:
        """Return the tangent of the result."""
        if self.forward is None:
            raise NotImplementedError(f"{self.__name__} has no tangent: define one with mpiad.extend.defjvp.")
        return self.forward(tangents, ans, args, params)


note_rules(CustomOperator)


def _read_only(array: Array) -> Array:
    """Return a contiguous array for MPI, read-only on the host."""
    if type(array) is not np.ndarray:
        arrays = arrays_of(array)
        return array if arrays is None else arrays.contiguous(array)
    view = (array if array.flags.c_contiguous else array.copy(order="C")).view()
    view.flags.writeable = False
    return view


def _result(ans: Array, name: str) -> Array | None:
    if isinstance(ans, (np.ndarray, np.generic, bool, int)) or ans is None or is_device_array(ans):
        return ans
    if isinstance(ans, (float, complex)):
        return np.asarray(ans)[()]
    if type(ans) in _box_types:
        raise TypeError(
            f"{name}: its body returned a traced value, so it uses a traced variable of an enclosing function. "
            "Pass all variables to the operator as arguments."
        )
    raise TypeError(f"{name}: an operator must return one array, a number or None, but returned {type(ans).__name__}.")


def _parts(
    operator: CustomOperator,
    rule: Callable,
    specs: Sequence[tuple[int, Spec]],
    count: int,
    ndim: int | None,
    g: Array,
) -> list[Any]:
    """Return the cotangents of some of `count` arguments; `ndim`: the axes of a result whose cotangents are stacked."""
    cotangents, name = rule(g), operator.__name__
    lead = () if ndim is None else np.shape(g)[: -ndim or None]
    if not isinstance(cotangents, (tuple, list)) or len(cotangents) > count:
        raise TypeError(
            f"{name}: its adjoint must return a tuple with the cotangent of each of {count} argument(s), but returned "
            f"{type(cotangents).__name__}{f' of {len(cotangents)}' if isinstance(cotangents, (tuple, list)) else ''}."
        )
    parts: list[Any] = []
    for k, (shape, dtype, arrays) in specs:
        part, shape = cotangents[k] if k < len(cotangents) else None, lead + shape
        # The most common case of `conform`, without calling it.
        if part is not None and not (type(part) is np.ndarray and part.shape == shape and part.dtype == dtype):
            if np.shape(part) != shape:
                text = f"{name}: the cotangent of argument {k} must have its shape, {shape}, but the adjoint returned"
                raise TypeError(f"{text} {np.shape(part)}.")
            part = conform(part, shape, dtype, arrays)
        parts.append(part)
    return parts
