"""`Recorder`: the trace of a function, which records the operations of the function in order.

A trace is a list of steps. A step is a communication, or a call of a NumPy function, an operator or an untraced function;
it refers to traced arrays by number (`Ref`). Arrays that aren't traced become constants. A program of the trace is valid as
long as the function's closure is unchanged (see `closure`).

A trace is abstract: it computes the shapes and dtypes of results, and never communicates. Each operation of the catalogue
has a rule for the shape of its result (`Operation.abstract`). What only a run can tell, for example the shape of an array
that another rank broadcasts, is in the *notes* of an earlier run of the function (see `interpretation`). Without notes
such an operation ends the trace.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import Any, NoReturn
from weakref import ref

import numpy as np
from autograd.tracer import getval
from numpy.typing import DTypeLike

from mpiad import primitives
from mpiad._typing import Array, Index, Shape
from mpiad.compiling.arguments import aligned
from mpiad.compiling.closure import computes_as_ndarray
from mpiad.compiling.numpy_functions import rule_of
from mpiad.compiling.watch import is_writable, same_bits
from mpiad.differentiation.advice import SUMS
from mpiad.differentiation.in_place import CHANGED_ARGUMENT, writes_into_argument
from mpiad.primitives.request import Request
from mpiad.programs.array_program import PRECISIONS
from mpiad.programs.interpretation import Note, message_counts
from mpiad.programs.message_numbers import channels_of, envelopes_of
from mpiad.programs.number_conditions import is_computed
from mpiad.programs.opaque_calls import opaque_call
from mpiad.programs.signature import Arguments
from mpiad.programs.traced_array import (
    CONTROL_FLOW,
    PYTHON_NUMBERS,
    Abandoned,
    Constant,
    KnownInRun,
    Ref,
    Step,
    TracedArray,
    added_at,
    array_of,
    ask_for_integer,
    cast,
    hides_traced,
    let_arrays_be_traced,
    mapped,
    number_on_host,
    plain,
    quotient,
    reason_of_conversion,
    scale_of,
    take,
    untraced,
    with_entries,
)
from mpiad.transport import Channel, Spec, channel
from mpiad.transport.core import calls
from mpiad.transport.core.calls import Site
from mpiad.transport.core.channels import Used, report_to_recorders
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of, is_device_array

_OBJECT = np.dtype(object)
_AT_END = "at the end of the jitted function"
_MOST_OF_RESULT = 20_000  # the number of objects among which `check_results` looks for traced values, some 50 ms
_NO_OBJECTS = (
    ": in place of lists of traced values write np.where, np.stack or np.select of autograd.numpy, and in place of a "
    "product with a sparse matrix of SciPy mpiad.linalg.sparse_matmul(A, x)"
)
_CONTAINERS_ONLY = (
    ": return a tuple, list or dict of arrays, or an object of a dataclass with the decorator mpiad.pytrees.register"
)
_CATCHES = "it catches exceptions that depend on values: catch them around the jitted function, or leave this part out"


def _root(value: Any) -> Any:
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return value


# NumPy functions that can't be steps of a program.
_SHAPED_BY_VALUES = frozenset(
    getattr(np, name)
    for name in """argwhere bincount compress delete extract flatnonzero intersect1d nonzero setdiff1d trim_zeros union1d
    unique""".split()
)
# Functions whose further arguments, if they are integers, determine the shape of the result.
_SHAPED_BY_INTEGERS = frozenset(
    getattr(np, name)
    for name in "array_split broadcast_to diag expand_dims pad repeat reshape resize split squeeze tile".split()
)

# Functions that raise no exceptions that depend on values, besides those that loops compute (`rule_of`) and ufuncs.
_NEVER_RAISING = frozenset({cast, quotient, scale_of, array_of}) | frozenset(
    getattr(np, name)
    for name in """argmax argmin argsort array_split atleast_1d atleast_2d atleast_3d broadcast_to column_stack concatenate
    copy cross cumprod cumsum diag diagonal diff dot dstack einsum expand_dims flip fliplr flipud hstack inner kron moveaxis
    outer pad ravel repeat reshape roll rollaxis rot90 sort split squeeze stack std swapaxes tensordot tile trace transpose
    tril triu var vdot vstack""".split()
)


def _may_raise(fun: Callable, args: Sequence[Any]) -> bool:
    """Return whether a call may raise an exception that depends on traced values."""
    if fun in (take, with_entries, added_at):  # an index out of range
        return bool(_traced_in(args[1]))
    if fun is np.power:  # a negative power of an integer
        return bool(_traced_in(args[1])) and all(np.result_type(x).kind in "iu" for x in plain(tuple(args[:2])))
    if type(fun) is np.ufunc or fun in _NEVER_RAISING:
        return False
    package = getattr(fun, "__module__", None)
    return package == "numpy.linalg" or package != "numpy.fft" and rule_of(fun) is None


def _traced_in(x: Any) -> list[TracedArray]:
    found: list[Any] = []
    mapped(x, found.append)
    return [part for part in found if isinstance(part, TracedArray)]


def reason_against(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the reason why a call can't be recorded, as a relative clause; "" if the call can be recorded."""
    further = *args[1:], *kwargs.values()
    repeats = fun is np.repeat and any(isinstance(x, TracedArray) for x in further)
    if fun in _SHAPED_BY_VALUES or fun is np.where and len(args) == 1 or repeats:
        advice = ": give np.where three arguments" if fun is np.where else f": {SUMS}" if fun is np.bincount else ""
        return f"whose result has a shape that depends on traced values{advice}"
    if writes_into_argument(fun, args, kwargs):
        parts = "take its result, or join parts by np.stack or np.concatenate (without derivatives, x[i] = ... works, too)"
        return f"which writes into an array that it is given: {SUMS if fun.__name__ == 'at' else parts}"
    if fun in (np.ravel, np.reshape) and any(isinstance(x, str) and x in "AaKk" for x in further):
        return "whose result depends on the order of entries in memory: write order='C' or 'F'"
    return ""


_COMPILED_PACKAGES = ("", "domain", "linalg", "redistribution")
_UNRECORDED = {"mpi_finalize", "mpi_init", "mpi_local_rank", "mpi_print"}
# Functions that look up a channel, and communicate by recorded operations only.
_NOTED = {name for name in primitives.__all__ if name.startswith("mpi_")} - _UNRECORDED | set(
    """DistributedFFT.backward DistributedFFT.forward DistributedMatrix.matvec DistributedMatrix.rmatvec
    Domain.begin_exchange GhostExchange.accumulate GhostExchange.begin_fetch GhostExchange.fetch value_and_grad grad
    make_vjp make_jvp jvp hvp parallel.value_and_grad""".split()
)


_lock = threading.Lock()
_open_recorders: set[Recorder] = set()


def _report_recording(on: bool) -> None:
    """Notify channels and autograd.numpy whether some thread has a trace."""
    report_to_recorders(on)
    let_arrays_be_traced(on)


class Recorder:
    """The trace of a call, and the context that records it; `notes`: those of an earlier run, or None.

    The arrays of a trace are on the host, or all on one device; then numbers may be on the host.
    """

    ended, is_abstract = False, True  # see `ProgramRecorder`

    def __init__(
        self, exact: bool = False, notes: Iterable[Note] | None = None, most: int | None = None,
        device: ArrayModule | None = None,
    ) -> None:  # fmt: skip
        self.device = device  # of the arrays
        self.on_host: set[int] = set()  # the numbers of values that are on the host
        self.captured: dict[int, Array] = {}  # arrays on the device that the function reads besides its arguments
        self.exact = exact  # whether quotients by scalars aren't products (see `_as_product`)
        self._most = most  # the largest number of steps of the first part; None for no limit
        self._notes = None if notes is None else iter(notes)
        self.specs: list[tuple[Shape, np.dtype]] = []  # shape and dtype of each value; the index is the value's number
        self.constants: list[Array] = []  # arrays that aren't traced, as copies if they can change
        # By identity: objects that steps pass on to later steps (pending requests, records of tapes), with their numbers.
        self._objects: dict[int, tuple[Any, int]] = {}
        self._constant_of: dict[int, tuple[Any, int]] = {}
        self._holders: dict[int, list[ref[Any]]] = {}  # traced arrays by the identity of the array that owns the memory
        self._inputs: dict[int, Array] = {}  # the arrays that own the memory of arguments, by identity
        self.inputs: list[int] = []  # the numbers of the arguments
        self.weak: set[int] = set()  # the numbers of values that are Python scalars
        self.steps: list[Step] = []
        self.open = False  # whether operations are recorded
        self.part = 0  # the part of the program to which steps are appended
        self.combined = False  # see `Step`
        self.refused: Abandoned | None = None  # the exception that ended the trace in failure
        # If the trace failed because the function needs the value of a traced integer: the integer's `Ref.number`.
        self.asked: int | None = None
        self.decisions: dict[tuple[int, type], object] = {}  # see `decision`; by the number of the value, and the type
        self.condition: Any = None  # on the arguments, of a program that the trace contains; see `number_conditions`
        self.channels: set[Used] = set()
        self._outermost: FrameType | None = None  # the user's frame around the trace
        self._outcome: Any = NotImplemented  # see `knowing`
        self.readable: Sequence[Array] = ()  # the arrays on devices that the function may read besides its arguments
        self.on_settled: Callable[..., None] | None = None  # called with the arguments and the result of `settle`
        self._any_sender = self._any_within = False  # received from any rank or tag; communicated in an opaque call

    def __enter__(self) -> None:
        # The functions that communicate count messages, which the trace doesn't send.
        self._counts, self.open, self._outermost = message_counts(), True, calls.user_frame(sys._getframe(1))[0]
        self.around, tracing.contexts = tracing.contexts, self
        calls.note(self)  # so that communications of adjoints are attributed to their forward calls
        # A trace that begins within an adjoint rule isn't a part of the rule, since the program may run elsewhere.
        self._call_around, tracing.call = tracing.call, calls.enclosing(tracing.call)
        with _lock:
            _open_recorders.add(self)
            _report_recording(True)
        tracing.recorder = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tracing.recorder, tracing.call, self._call_around = None, self._call_around, None
        self.end(error, trace)
        tracing.contexts, self.around = self.around, None
        # The exception that ended the trace is raised again, since the function may have caught it, or NumPy replaced it.
        if self.refused is not None and (error is None or isinstance(error, Exception)):
            raise self.refused

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop recording; from now on, computations with traced arrays are errors. A second call has no effect."""
        for request in [each for each, _ in self._objects.values() if isinstance(each, Request) and not each.done]:
            reason = f"it starts a request and doesn't wait for it: {request!r}"
            self.refused = self.refused or Abandoned(reason, _AT_END)
        for channel_, counts in self._counts:
            channel_.count_from(counts)
        calls.forget(self)
        with _lock:
            if _open_recorders == {self}:
                _report_recording(False)
            _open_recorders.discard(self)
        self.open, self._counts, self._notes, self._outermost = False, [], None, None
        for kept in (self._constant_of, self._holders, self._inputs):
            kept.clear()

    def refuse(self, reason: str, kind: type[Abandoned] = Abandoned, line: str = "") -> NoReturn:
        """End the trace in failure: raise Abandoned; `line`: by default the user's line."""
        self.refused = self.refused or kind(reason, line or calls.site_of(sys._getframe(1)).text)
        raise self.refused

    def check_results(self, leaves: Iterable[Any]) -> None:
        """End the trace in failure if an object among the leaves of the function's result contains traced values."""
        for x in leaves:
            if not isinstance(getval(x), TracedArray) and hides_traced(x, _MOST_OF_RESULT):
                what, advice = f"an object of type {type(x).__name__}", _CONTAINERS_ONLY
                if isinstance(x, np.ndarray):
                    what, advice = "an array of objects", _NO_OBJECTS
                self.refuse(f"it returns {what} that contains traced values{advice}", line=_AT_END)

    def _noted(self, fun: Any, value: Any = NotImplemented) -> Any:
        """Return `value`, or if it is NotImplemented, what is known of a call from a run; end the trace if nothing is."""
        value = self._outcome if value is NotImplemented else value
        if value is not NotImplemented:
            return value
        name = getattr(fun, "__name__", repr(fun))
        note = None if self._notes is None else next(self._notes, None)
        if note is None or note.name != name:
            self.refuse(f"the result of {name} is known only in a run", KnownInRun if note is None else Abandoned)
        return note.value

    @contextmanager
    def knowing(self, outcome: object) -> Iterator[None]:
        """Open a context in which a transformation repeats a call whose `outcome` only a run could tell."""
        self._outcome = outcome
        try:
            yield
        finally:
            self._outcome = NotImplemented

    def ask(self, x: Any, reason: str) -> NoReturn:
        """End the trace in failure, since the function needs the value of x; set `asked` for integers and comparisons."""
        step = next((step for step in self.steps if x.number in step.outs and x.dtype == bool), None)
        numbers = [x.number] if step is None else [part.number for part in step.args if type(part) is Ref]
        if all(shape == () and dtype.kind in "iu" for shape, dtype in map(self.specs.__getitem__, numbers)):
            self.asked = next(iter(numbers), None)
        self.refuse(f"{reason}, or leave this part out of the jitted function" if reason is CONTROL_FLOW else reason)

    def decision(self, x: TracedArray, kind: type, reason: str) -> int:
        """Return x as a bool or an index if it depends on numbers among the arguments only; else end the trace.

        The program is valid for all numbers that lead to the same value. Of integers, only remainders are indices.
        """
        is_remainder = kind is bool or any(x.number in step.outs and step.fun is np.remainder for step in self.steps)
        if x.shape or not is_remainder or not is_computed(self, x.number):
            self.ask(x, reason)
        made = self.decisions[x.number, kind] = kind(x.value)
        return made

    def plain_array(self, x: Any, dtype: DTypeLike | None) -> NoReturn:
        """End the trace in failure: a traced array has no plain array."""
        self.require_open()
        reason = (
            "it converts traced values to a plain NumPy array (numpy.array, numpy.asarray, a.dot(x) of a plain array or of "
            "a sparse matrix, or code in C such as scipy.spatial.cKDTree): join them by np.concatenate or np.stack of "
            "autograd.numpy; write np.dot(a, x), or mpiad.linalg.sparse_matmul; compute what needs plain values, such as "
            "pairs of neighbors, outside of the jitted function, and pass the index arrays as arguments"
        )
        self.ask(x, reason_of_conversion(sys._getframe(2)) or reason)

    def looked_up(self, call: str) -> None:
        """Handle the lookup of a channel by a function: end the trace if the function can't be recorded."""
        if call not in _NOTED:
            self.refuse(f"it calls {call}, whose communication can't be recorded, and which isn't compiled yet")

    def entered_body(self) -> None:
        """Handle the beginning of an operator's body, which can't be traced: end the trace."""
        self.refuse("it calls an operator whose body isn't compiled yet (a solve, a loop in time, or the like)")

    # A traced array that is written to gets the number of the result. Other traced arrays with the same memory become
    # stale: reading them ends the trace.

    def arguments(self, call: Arguments) -> list[Any]:
        """Return the leaves of a call's arguments, with traced arrays in place of those that are traced."""
        leaves = list(call.leaves)
        for place in call.traced:
            value = getval(leaves[place])
            is_array = is_device_array(value)
            if is_array:
                self._use(arrays_of(value))
                value = like(Spec.of(value))
            number = value if isinstance(value, (np.ndarray, np.generic)) else np.asarray(value)[()]
            leaves[place] = self.input(number, type(value) in PYTHON_NUMBERS, not is_array)
        others = [x for x in map(getval, call.leaves) if isinstance(x, np.ndarray) and x.ndim and x.dtype.kind not in "iu"]
        if self.device is not None and others:
            self.refuse("it gets arrays on a device and arrays on the host")
        return leaves

    def _use(self, arrays: ArrayModule | None) -> None:
        """Let the trace be on a device; end it in failure if it is on another one, or if this one has no kernels."""
        if self.device is None and getattr(arrays, "launcher", None) is not None:
            self.device = arrays
            for step in self.steps:
                self._note_place(step)
        if arrays != self.device:
            what = "arrays on two devices" if self.device is not None else f"an array of {arrays.name}"  # type: ignore[union-attr]
            self.refuse(f"it computes with {what}, and only arrays of NumPy, or of CuPy on one device, are compiled")

    def captured_array(self, x: Array) -> Array:
        """Return a traced array for an array on a device which isn't an argument, and other values as they are.

        A program reads such an array in each run.
        """
        if isinstance(x, TracedArray) or not is_device_array(x):
            return x
        if not any(x is known for known in self.readable):
            self.refuse(
                "it computes an array on a device without its arguments, or reads one that can't be followed: compute it "
                "outside of the jitted function, and pass it as an argument"
            )
        self._use(arrays_of(x))
        return self.capture(x)

    def constant_on_device(self, x: Array) -> Array:
        """Return a traced array for a constant that the function copies to the device; programs copy it once."""
        if self.device is None:
            self.refuse("it copies arrays to a device, and its arguments are on the host")
        return self.capture(np.array(x))

    def _note_place(self, step: Step) -> None:
        """Note whether the results of a step are on the host, since all that it reads is there."""
        found: list[object] = []
        mapped((step.args, step.kwargs), found.append)
        numbers = {x.number for x in found if type(x) is Ref}
        if numbers and numbers <= self.on_host or step.fun is number_on_host:
            self.on_host.update(step.outs)

    def _like(self, made: object) -> Array:
        """Return a placeholder for a result with this spec, which may be the first array on a device."""
        if isinstance(made, Spec) and made.arrays is not None and not made.arrays.takes_host_arrays:
            self._use(made.arrays)
        return like(made)

    def capture(self, x: Array) -> Array:
        """Return a traced array for an array on a device, or a constant that is copied there."""
        number = next((number for number, known in self.captured.items() if known is x), None)
        if number is None:
            made = self._wrapped(like(Spec.of(x)))
            self.captured[made.number] = x
            return made
        return TracedArray(self, number, like(Spec(*self.specs[number])))

    def input(self, value: Array, weak: bool = False, is_on_host: bool = False) -> Array:
        """Return a traced array for an argument; `weak`: whether the argument is a Python scalar."""
        made = self._wrapped(value)
        if is_on_host:
            self.on_host.add(made.number)
        if weak:
            self.weaken(made)
        self.inputs.append(made.number)
        if isinstance(value, np.ndarray):
            root = _root(value)
            self._inputs[id(root)] = root
        return made

    def weaken(self, value: Any) -> Any:
        """Mark a value as a Python scalar, and return it."""
        if isinstance(value, TracedArray):
            value.weak = True
            self.weak.add(value.number)
        return value

    def _number(self, value: Any) -> int:
        self.specs.append((value.shape, value.dtype))
        return len(self.specs) - 1

    def _number_of_object(self, value: Any) -> int:
        self.specs.append(((), _OBJECT))
        if value is not None:
            self._objects[id(value)] = value, len(self.specs) - 1
        return len(self.specs) - 1

    def _wrapped(self, value: Any) -> Any:
        made = TracedArray(self, self._number(value), value)
        if isinstance(value, np.ndarray):
            self._holders.setdefault(id(_root(value)), []).append(ref(made))
        return made

    def referenced(self, x: Any) -> Any:
        """Return the arguments of a call with `Ref` and `Constant` instead of arrays."""
        if type(x) in (tuple, list, dict, slice):
            return mapped(x, self.referenced)
        if isinstance(x, TracedArray):
            if x.recorder is not self:
                x.recorder.require_open()
                self.refuse("it uses a value of another trace")
            if x.stale is not None:
                self.refuse("it reads an array whose memory has been changed in place through another name (a view)")
            return Ref(x.number)
        if id(x) in self._objects:
            return Ref(self._objects[id(x)][1])
        if is_device_array(x):
            return Ref(self.captured_array(x).number)
        if isinstance(x, np.ndarray) and x.ndim and self.device is not None and x.dtype.kind not in "iu":
            if not _is_in_rule(sys._getframe(1)):
                self.refuse("it computes with an array on the host and arrays on a device")
            return Ref(self.capture(x).number)
        if type(x) is np.ndarray:
            return self._constant(x)
        if isinstance(x, np.ndarray):
            if not computes_as_ndarray(type(x)):
                self.refuse(f"it computes with an array of type {type(x).__name__}")
            return self._constant(np.asarray(x))
        return x

    def _constant(self, x: Array) -> Constant:
        known = self._constant_of.get(id(x))
        if known is None or not same_bits(self.constants[known[1]], x):
            stored = x
            if is_writable(x) or not (x.flags.c_contiguous and x.flags.aligned):
                stored = aligned(x.size, x.dtype, np.empty).reshape(x.shape)
                stored[...] = x
                stored.flags.writeable = stored.base.flags.writeable = False  # programs of derivatives share the copy
            self.constants.append(stored)
            known = self._constant_of[id(x)] = x, len(self.constants) - 1
        return Constant(known[1])

    def _check_writing(self, target: Any) -> None:
        if id(_root(target.value)) in self._inputs:
            self.refuse(CHANGED_ARGUMENT)

    def _written(self, target: Any, fun: Callable, references: tuple, part: Any = None) -> None:
        """Record a call that has written into an array; `part`: an array that shares memory with it, and stays valid."""
        number = self._number(target.value)
        self._step("call", fun, references, (number,))
        for holder in self._holders.get(id(_root(target.value)), ()):
            other = holder()
            if other is None or other is target or other is part:
                continue
            if np.shares_memory(other.value, target.value):
                other.stale = target
        target.number = number

    def _check_exceptions(self, args: Any, may_raise: bool) -> None:
        """End the trace if user code handles exceptions that depend on values: a trace doesn't have the values."""
        if not {"raise", "call"}.isdisjoint(np.geterr().values()):  # since traces begin with "ignore"
            self.refuse("it raises FloatingPointError by np.errstate: write np.where, or np.isfinite of the result")
        if may_raise and calls.is_caught(sys._getframe(2), self._outermost):
            for x in _traced_in(args):
                if x.dtype.kind in "iu" and not x.shape:  # the function may be traced for each integer
                    self.ask(x, _CATCHES)
            self.refuse(_CATCHES)

    def call(self, fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a NumPy function, and record it."""
        self.require_open()
        args, kwargs = mapped((tuple(args), kwargs), self.captured_array)
        self._check_exceptions(args, _may_raise(fun, args))
        if fun in _SHAPED_BY_INTEGERS:
            mapped((args[1:], kwargs), ask_for_integer)
        reason = reason_against(fun, args, kwargs)
        if reason:
            self.refuse(reason_of_conversion(sys._getframe(2)) or f"it calls {fun.__name__}, {reason}")
        fun, args = self._as_product(fun, args)
        references = self.referenced(tuple(args)), self.referenced(kwargs)
        return self._recorded("call", fun, *references, _computed(fun, plain(tuple(args)), plain(kwargs)))

    def _as_product(self, fun: Callable, args: Sequence[Array]) -> tuple[Callable, Sequence[Array]]:
        """Return a quotient of an array by a real scalar as a product with the reciprocal, and other calls unchanged."""
        # Loops and NumPy compute the same product, so its bits depend neither on the place of an entry nor on the ranks.
        if fun is not np.true_divide or self.exact:
            return fun, args
        x, c = plain(tuple(args))
        is_by_scalar = np.ndim(x) and not np.ndim(c) and not np.iscomplexobj(c)
        real = PRECISIONS.get(np.result_type(np.asarray(x), c)) if is_by_scalar else None
        if real is None:
            return fun, args
        x, c = args
        if isinstance(c, TracedArray):
            # A power of two keeps the reciprocal of any number in the range of normal numbers.
            scale = self.call(scale_of, (c, real), {})
            x, inverse = scale * x, self.call(np.true_divide, (real.type(1), scale * c), {})
            return quotient, (x, inverse)
        with np.errstate(all="ignore"):
            inverse = real.type(1) / real.type(c)
        return (quotient, (x, inverse)) if np.finfo(real).tiny <= abs(inverse) < math.inf else (fun, args)

    def communicate(self, operation: Any, x: Any, params: Any) -> Any:
        """Record a communication."""
        x, params, rule = mapped(x, self.captured_array), untraced(params, self.device), _rule()
        envelopes = envelopes_of(params)
        self._any_sender = self._any_sender or any(envelope.number is None for envelope in envelopes)
        if envelopes and self._any_sender and rule is not None and rule[0] == "tangent":
            self.refuse(
                f"{operation.__name__} sends or receives a tangent, and the function has received from any rank or with "
                "any tag before; this combination isn't compiled"
            )
        references = self.referenced(x), params
        if isinstance(params, Request):
            if id(params) not in self._objects:
                params.done = False  # the function will run again, and wait for the request again
                self.refuse("it waits for a request that was started outside of the jitted function")
            params.done, references = True, (references[0], self.referenced(params))
        made = self._noted(operation, operation.abstract(plain(x), params))
        self.channels |= channels_of(params)
        if made is not None and made is plain(x):  # the result is the sent array
            self._step("communicate", operation, references, ())
            return x
        if isinstance(made, Request):
            self._step("communicate", operation, references, (self._number_of_object(made),))
            return made
        return self._recorded("communicate", operation, references, {}, self._like(made))

    def settle(self, fun: Callable, args: tuple) -> Any:
        """Record a function whose result determines how a call continues; replays require the noted result."""
        self._check_exceptions((), True)
        outcome = self._noted(fun)
        # None is the result of functions that only raise errors.
        self._step("settle", fun, self.referenced(args), (), {} if outcome is None else {"expected": outcome})
        if self.on_settled is not None:
            self.on_settled(fun, args, outcome)
        return outcome

    def opaque(self, fun: Callable, args: tuple, specs: Sequence[Spec] | None = None) -> tuple[Any, ...]:
        """Record a function that isn't traced, and that returns arrays followed by one other object."""
        # `specs`: those of the arrays, if they are the same in each run.
        self._check_exceptions((), True)
        references = self.referenced(args)
        noted, rest, communicates = self._noted(fun) if specs is None else (specs, object(), True)
        self.channels |= {(x, False) for x in args if isinstance(x, Channel)}
        self._any_within |= communicates
        for other in [x for x in noted if not isinstance(x, Spec)]:
            self.refuse(f"it calls {fun.__name__}, which returns {type(other).__name__} instead of an array")
        results = [self._wrapped(self._like(spec)) for spec in noted]
        kwargs = {} if specs is not None else {"expected": [(spec.shape, spec.dtype) for spec in noted]}
        self._step("opaque", fun, references, (*[x.number for x in results], self._number_of_object(rest)), kwargs)
        return *results, rest

    call_as_it_is = opaque_call

    def once(self, fun: Callable, args: tuple) -> NoReturn:
        """End the trace: the initialization of a communicator at its first use isn't part of a program."""
        self.refuse(f"{getattr(fun, '__name__', 'a function')} prepares a communicator at its first use", KnownInRun)

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record an operator of `mpiad.extend`."""
        self._check_exceptions((), True)
        if operator.spec_of is None and _package_of(operator) not in _COMPILED_PACKAGES:
            self.refuse(f"it calls {operator.__name__} of mpiad.{_package_of(operator)}, which isn't compiled yet")
        if any(map(hides_traced, (operator.fun, *args, *kwargs.values()))):
            self.refuse(
                f"{operator.__name__} is or gets a function or an object that contains traced values: pass the values as "
                "arguments"
            )
        tracing.recorder = None
        try:
            channels = {channel(x.comm, operator.__name__, collective=False) for x in plain(args) if hasattr(x, "comm")}
        finally:
            tracing.recorder = self
        self.channels |= {(each, False) for each in channels}
        references = self.referenced(args), self.referenced(kwargs)
        made = self._noted(operator, operator.abstract(plain(args), plain(kwargs)))
        return self._recorded("operate", operator, *references, self._like(made))

    def communicated_by_itself(self) -> None:
        """End the trace in failure, since a function communicates by other means than recorded operations."""
        _, called = calls.user_frame(sys._getframe(1))
        name = calls.entry(called) or "a function of mpiad's"
        self.refuse(f"it calls {name}, in which ranks exchange shapes or settings first, and which isn't compiled yet")

    def drop_communications(self) -> list[Any]:
        """Drop all communications so far, and the steps that use their results; return the parameters of messages.

        Later steps mustn't use the results.
        """
        steps, dropped, messages = self.steps, set[int](), []
        self.steps = []
        for step in steps:
            used: list[Any] = []
            mapped((step.args, step.kwargs), used.append)
            if step.kind == "call" and not any(type(x) is Ref and x.number in dropped for x in used):
                self.steps.append(step)
            else:
                dropped.update(step.outs)
                messages += step.args[1:] if step.kind == "communicate" else ()
        return messages

    @property
    def communications(self) -> int:
        """The number of communicating steps."""
        return sum(step.kind in ("communicate", "operate") for step in self.steps)

    @property
    def communicates(self) -> bool:
        """Whether the function has communicated, possibly in an untraced function."""
        return self._any_within or self.communications > 0

    def marked(self, channel: Any, reason: str, messages: bool) -> bool:
        """Return True: nothing has been sent, so that an exception leaves no messages."""
        return True

    def require_open(self) -> None:
        """Raise a RuntimeError for arrays that are used after the end of their trace."""
        # These arrays would give wrong results: later calls don't update them, and outer derivatives ignore them.
        if not self.open:
            raise RuntimeError(
                f"jit: {calls.site_of(sys._getframe(1)).text} uses a value that a jitted function has kept (in a list, an "
                "attribute or a variable around it). The value belongs to that function's program, and later calls don't "
                "update it. Return the value from the jitted function, y, kept = f(x), and keep it in the caller of f."
            )

    def _recorded(self, kind: str, fun: Any, args: tuple, kwargs: dict, result: Any) -> Any:
        if result is None and kind != "call":
            self._step(kind, fun, args, (), kwargs)
            return None
        if isinstance(result, (tuple, list)) and all(_is_array(part) for part in result):
            results = [self._wrapped(part) for part in result]
            out: Any = type(result)(results) if type(result) in (tuple, list) else tuple(results)
        elif _is_array(result):
            results = [self._wrapped(result)]
            out = results[0]
        else:
            is_array = isinstance(result, np.ndarray)
            what = f"an array of {result.dtype}s" if is_array else f"{type(result).__name__}, which isn't an array"
            advice = _NO_OBJECTS if what.endswith("objects") else ""
            self.refuse(f"{getattr(fun, '__name__', repr(fun))} returns {what} and may depend on traced values{advice}")
        self._step(kind, fun, args, tuple([result.number for result in results]), kwargs)
        return out

    def _step(self, kind: str, fun: Any, args: tuple, outs: tuple[int, ...], kwargs: Any = None) -> None:
        site = calls.site_of(sys._getframe(1))
        self.steps.append(Step(kind, fun, args, kwargs or {}, outs, site, self.part, _rule(), self.combined))
        if self.device is not None:
            self._note_place(self.steps[-1])
        if self._most is not None and not self.part and len(self.steps) > self._most:
            advice = "Write jit(step) to compile it nevertheless, or a loop in it over equal parts as a scan"
            text = f"has more than {self._most:,} operations, whose compilation would take long. {advice}"
            self.refuse(f"with its calls of jitted functions, it {text}")

    def write(self, target: Array, fun: Callable, args: Sequence[Any]) -> Any:
        """Call a function that writes into an array; the array gets the number of the result."""
        self.require_open()
        args = mapped(tuple(args), self.captured_array)
        self._check_exceptions(args, _may_raise(fun, args))
        fun, args = self._as_product(fun, args)
        references = self.referenced(tuple(args))
        self._check_writing(target)
        if fun(*[np.ones((1, 1), np.result_type(plain(x))) for x in args]).dtype != target.dtype:
            args = self.call(fun, args, {}), target.dtype
            fun, references = cast, self.referenced(args)
            np.copyto(target.value, args[0].value, casting="same_kind")
        elif not (_is_arbitrary(target.value) and np.broadcast_shapes(*map(np.shape, plain(tuple(args)))) == target.shape):
            fun(*plain(tuple(args)), out=target.value)
        self._written(target, fun, references)
        return target

    def set_entries(self, target: Array, key: Index, value: Array) -> None:
        """Set entries of an array; the array gets the number of the result."""
        self.require_open()
        value = self.captured_array(value)
        self._check_exceptions(key, bool(_traced_in(key)))
        place, new = plain(key), plain(value)
        # For total[key] += values, Python first changes the view total[key] in place, and then assigns the view to
        # total[key].
        is_written = target.stale is not None and value is target.stale and isinstance(new, np.ndarray)
        is_written = is_written and target.value[place].__array_interface__ == new.__array_interface__
        if is_written:
            target.stale = None
        references = self.referenced(target), self.referenced(key), self.referenced(value)
        self._check_writing(target)
        if not is_written and not (_is_arbitrary(target.value) and _is_like(new, target.value[place])):
            target.value[place] = new
        self._written(target, with_entries, references, value if is_written else None)


def _rule() -> tuple[str, str, Site] | None:
    """Return "adjoint" or "tangent" if such a rule is running, with name and site of the forward call; None otherwise."""
    call = calls.current()
    if call is None or call.direction == "forward":
        return None
    return call.direction, call.forward_name, call.forward_site  # type: ignore[return-value]


# Modules whose rules and compositions compute with constant arrays, which programs copy to the device.
_RULES = tuple(
    f"autograd.{name}" for name in ("numpy.numpy_vjps", "numpy.numpy_jvps", "numpy.linalg", "numpy.fft", "scipy")
)
_RULES += ("mpiad.differentiation.rules",)


def _is_in_rule(frame: FrameType) -> bool:
    """Return whether a rule of a derivative, or a function that the library composes, is running around a frame."""
    for outer, _ in walk_stack(frame):
        name = outer.f_globals.get("__name__", "")
        if name.startswith(_RULES) or not name.startswith(("mpiad.", "autograd.", "numpy.")):
            return name.startswith(_RULES)
    return False


def _package_of(operator: Any) -> str:
    """Return the subpackage of this library that defines an operator; "" for an operator of the user."""
    module = getattr(operator.fun, "__module__", "").split(".")
    return module[1] if module[0] == "mpiad" and len(module) > 1 else ""


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "fciub"


# The values of a trace.
#
# Untouched memory stands for each large result, and ones for each small result of a communication. Small arrays are
# computed from these values and from the arguments. So a trace takes no longer for large arrays than for small ones.

_BY_ENTRIES = np.where, np.copy, quotient, cast, array_of  # functions like ufuncs
_LARGE = 1 << 13  # entries above which computing with an array takes longer than finding the shape of the result


def _is_large(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.size > _LARGE


def _is_arbitrary(target: Any) -> bool:
    """Return whether an array, into which a function writes, has arbitrary entries, so that nothing need be written."""
    return _is_large(target) and target.dtype.kind in "fc"


def _is_like(new: Any, entries: Any) -> bool:
    """Return whether NumPy would accept `new` for some entries of an array without broadcasting or conversion."""
    return np.shape(new) in ((), entries.shape) and np.result_type(new, entries) == entries.dtype


def _computed(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the result of a function, if it is large with arbitrary entries."""
    if fun is np.full:
        return _placeholder(args[0], args[2])
    if fun is np.concatenate and any(map(_is_large, args[0])):
        return _joined(*args, **kwargs)
    by_entries = fun.signature is None if isinstance(fun, np.ufunc) else fun in _BY_ENTRIES
    if by_entries and not kwargs and any(map(_is_large, args)):
        shape = np.broadcast_shapes(*[np.shape(x) for x in args])
        made = fun(*[np.ones(1, x.dtype) if isinstance(x, np.ndarray) else x for x in args])
        several = isinstance(made, tuple)
        return tuple([_placeholder(shape, part.dtype) for part in made]) if several else _placeholder(shape, made.dtype)
    try:
        made = fun(*args, **kwargs)
    except np.linalg.LinAlgError:  # the entries may not be those of a run
        made = fun(*mapped(args, _identities), **kwargs)
    is_fresh = _is_large(made) and made.base is None and not any(made is x for x in args)
    return _placeholder(made.shape, made.dtype) if is_fresh else made


def _joined(parts: Sequence[Array], axis: int | None = 0, **kwargs: Any) -> Array:
    if axis is None:
        parts, axis = list(map(np.ravel, parts)), 0
    # NumPy compares the shapes of the parts without the entries along the axis.
    rest = np.concatenate([np.moveaxis(x, axis, 0)[:0] for x in parts], **kwargs)
    length = sum([x.shape[axis] for x in parts])
    joined = np.broadcast_to(rest.dtype.type(0), (length, *rest.shape[1:]))
    return _placeholder(np.moveaxis(joined, 0, axis).shape, rest.dtype)


def _identities(x: Any) -> Any:
    """Return identity matrices of the same shape."""
    is_matrix = isinstance(x, np.ndarray) and x.ndim > 1
    return np.broadcast_to(np.eye(*x.shape[-2:], dtype=x.dtype), x.shape) if is_matrix else x


def _placeholder(shape: Shape, dtype: DTypeLike) -> Array:
    """Return an array of arbitrary values; a large one has its own memory mapping, without pages until written."""
    # The heap would take pages that earlier arrays have written, and a trace keeps an array for each of its values.
    dtype, size = np.dtype(dtype), math.prod(shape)
    if dtype.kind in "iu":  # they may be indices
        return np.zeros(shape, dtype)
    if size <= _LARGE:
        return np.ones(shape, dtype)
    return np.ndarray(shape, dtype, mmap(-1, size * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS))


def like(spec: Any) -> Any:
    """Return a placeholder for a value with this shape and dtype; what isn't a spec is returned unchanged."""
    if not isinstance(spec, Spec):
        return spec
    return _placeholder(spec.shape, spec.dtype) if spec.shape else spec.dtype.type(1)
