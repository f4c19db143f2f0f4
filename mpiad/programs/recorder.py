"""`Recorder`: the trace of a function. The trace runs the operations of the function, and records them in order.

A trace is a list of steps. A step is a communication, or a call of a NumPy function, an operator or an untraced function;
it refers to traced arrays by number (`Ref`). Arrays that aren't traced become constants. A program of the trace is valid as
long as the function's closure is unchanged (see `closure`).
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from types import TracebackType
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
from autograd.tracer import getval
from numpy.typing import DTypeLike

from mpiad import primitives
from mpiad._typing import Array, Index, Shape
from mpiad.compiling.arguments import aligned
from mpiad.compiling.closure import is_writable, same_bits
from mpiad.differentiation.in_place import CHANGED_ARGUMENT, writes_into_argument
from mpiad.differentiation.objective import OBJECTIVE
from mpiad.primitives.catalogue import ALLREDUCE, ALLTOALL, BARRIER, BCAST, EXCHANGE, RECV, SCAN, SEND, SUM_TO_ROOT
from mpiad.primitives.request import Request
from mpiad.programs.array_program import PRECISIONS
from mpiad.programs.message_numbers import channels_of, envelopes_of
from mpiad.programs.opaque_calls import as_array, opaque_call
from mpiad.programs.playback import logged, message_counts
from mpiad.programs.signature import Arguments
from mpiad.programs.traced_array import (
    CONTROL_FLOW,
    PYTHON_NUMBERS,
    PYTHON_OPERATORS,
    Abandoned,
    Constant,
    Ref,
    Step,
    TracedArray,
    ask_for_integer,
    cast,
    hides_traced,
    is_number_of,
    let_arrays_be_traced,
    mapped,
    on_host,
    plain,
    quotient,
    reason_of_conversion,
    scale_of,
    with_entries,
)
from mpiad.transport import Channel, Spec, channel
from mpiad.transport.core import calls
from mpiad.transport.core.calls import Site
from mpiad.transport.core.channels import Used, communications, report_to_recorders
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import is_device_array

_OBJECT = np.dtype(object)


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


def reason_against(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the reason why a call can't be recorded, as a relative clause; "" if the call can be recorded."""
    further = *args[1:], *kwargs.values()
    repeats = fun is np.repeat and any(isinstance(x, TracedArray) for x in further)
    if fun in _SHAPED_BY_VALUES or fun is np.where and len(args) == 1 or repeats:
        advice = ": give np.where three arguments" if fun is np.where else ""
        return f"whose result has a shape that depends on traced values{advice}"
    if writes_into_argument(fun, args, kwargs):
        return "which writes into an array that it is given: take its result, or set entries by x[i] = ..."
    if fun in (np.ravel, np.reshape) and any(isinstance(x, str) and x in "AaKk" for x in further):
        return "whose result depends on the order of entries in memory: write order='C' or 'F'"
    return ""


_COMPILED_PACKAGES = ("", "domain", "linalg", "redistribution")
_UNRECORDED = {"mpi_finalize", "mpi_init", "mpi_local_rank", "mpi_print"}
# Functions that look up a channel, and communicate by recorded operations only.
_NOTED = {name for name in primitives.__all__ if name.startswith("mpi_")} - _UNRECORDED | set(
    """DistributedFFT.backward DistributedFFT.forward Domain.begin_exchange GhostExchange.accumulate
    GhostExchange.begin_fetch GhostExchange.fetch value_and_grad grad make_vjp make_jvp jvp hvp
    parallel.value_and_grad""".split()
)


_lock = threading.Lock()
_open_recorders: set[Recorder] = set()


def _report_recording(on: bool) -> None:
    """Notify channels and autograd.numpy whether some thread has a trace."""
    report_to_recorders(on)
    let_arrays_be_traced(on)


class Recorder:
    """The trace of a call, and the context that records it, entered again with another `part` for a reverse pass."""

    ended = False  # see `ProgramRecorder`

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact  # whether quotients by scalars aren't products (see `_as_product`)
        self.specs: list[tuple[Shape, np.dtype]] = []  # shape and dtype of each value; the index is the value's number
        self.constants: list[Array] = []  # arrays that aren't traced, as copies if they can change
        # By identity: objects that steps pass on to later steps (pending requests, records of tapes), with their numbers.
        self._objects: dict[int, tuple[Any, int]] = {}
        self._constant_of: dict[int, tuple[Any, int]] = {}
        self._holders: dict[int, WeakSet[Any]] = {}
        self._inputs: dict[int, Array] = {}  # the arrays that own the memory of arguments, by identity
        self.inputs: list[int] = []  # the numbers of the arguments
        self.weak: set[int] = set()  # the numbers of values that are Python scalars
        self.steps: list[Step] = []
        self.open = False  # whether operations are recorded
        self.part = 0  # the part of the program to which steps are appended
        self.combined = False  # see `Step`
        self.refused: Abandoned | None = None  # the exception that ended the trace in failure
        self.failed: BaseException | None = None  # an exception of a communication or another untraced function
        # For playback: the results of communications and other untraced functions, and the message counts before them.
        self.log: list[Any] = []
        self.counts = message_counts()
        # If the trace failed because the function needs the value of a traced integer: the integer's `Ref.number`.
        self.asked: int | None = None
        self.channels: set[Used] = set()
        self._inside = False  # whether an untraced function is running
        self._any_sender = self._any_within = False  # received from any rank or tag; communicated in an opaque call
        self._marks: list[tuple[Any, str, bool]] = []

    def __enter__(self) -> None:
        self.open = True
        self.around, tracing.contexts = tracing.contexts, self
        calls.note(self)  # so that communications of adjoints are attributed to their forward calls
        with _lock:
            _open_recorders.add(self)
            _report_recording(True)
        tracing.recorder = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tracing.recorder = None
        self.end(error, trace)
        tracing.contexts, self.around = self.around, None
        # The exception that ended the trace is raised again, since the function may have caught it, or NumPy replaced it.
        if self.refused is not None and (error is None or isinstance(error, Exception) and error is not self.failed):
            raise self.refused

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop recording; from now on, computations with traced arrays are errors. A second call has no effect."""
        for request in [found for found, _ in self._objects.values() if isinstance(found, Request)]:
            reason = f"it starts a request and doesn't wait for it: {request!r}"
            self.refused = self.refused or Abandoned(reason, "at the end of the jitted function")
        calls.forget(self)
        with _lock:
            if _open_recorders == {self}:
                _report_recording(False)
            _open_recorders.discard(self)
        self.open = False
        for kept in (self._constant_of, self._holders, self._inputs):
            kept.clear()
        if not isinstance(error, (Abandoned, Exception, type(None))):  # KeyboardInterrupt, after which nothing runs again
            self.mark()

    def raise_own(self, error: BaseException) -> None:
        """Raise the exception that ended a trace, unless it is due to the trace: then the function will run again."""
        has_traced = any(isinstance(getval(part), TracedArray) for part in error.args)
        if error is self.failed or not has_traced and calls.is_raised_by_user(error):
            self.mark()
            raise error

    def refuse(self, reason: str) -> NoReturn:
        """End the trace in failure: raise Abandoned."""
        self.refused = self.refused or Abandoned(reason, calls.site_of(sys._getframe(1)).text)
        raise self.refused

    def ask(self, x: Any, reason: str) -> NoReturn:
        """End the trace in failure, since the function needs the value of x; set `asked` for integers and comparisons."""
        step = next((step for step in self.steps if x.number in step.outs and x.dtype == bool), None)
        numbers = [x.number] if step is None else [part.number for part in step.args if type(part) is Ref]
        if all(shape == () and dtype.kind in "iu" for shape, dtype in map(self.specs.__getitem__, numbers)):
            self.asked = next(iter(numbers), None)
        self.refuse(f"{reason}, or leave this part out of the jitted function" if reason is CONTROL_FLOW else reason)

    def plain_array(self, x: Any, dtype: DTypeLike | None) -> Array:
        """Return a traced array as a plain array; in a trace, raise Abandoned."""
        if self.is_noting():
            reason = "it converts traced values to a plain NumPy array (numpy.array, numpy.asarray): join them by"
            found = reason_of_conversion(sys._getframe(2))
            self.ask(x, found or f"{reason} np.concatenate or np.stack of autograd.numpy")
        return np.asarray(x.value, dtype)

    def looked_up(self, call: str) -> None:
        """Handle the lookup of a channel by a function: end the trace if the function can't be recorded."""
        if call not in _NOTED:
            self.refuse(f"it calls {call}, whose communication can't be recorded, and which isn't compiled yet")

    def entered_body(self) -> None:
        """Handle the beginning of an operator's body, which can't be traced: end the trace."""
        self.refuse("it calls an operator whose body isn't compiled yet (a solve, a loop in time, or the like)")

    # A traced array that is written to gets the number of the result. Other traced arrays with the same memory become
    # stale: reading them ends the trace.

    def arguments(self, given: Arguments) -> list[Any]:
        """Return the leaves of a call's arguments, with traced arrays in place of those that are traced."""
        leaves = list(given.leaves)
        for place in given.traced:
            value = getval(leaves[place])
            number = value if isinstance(value, (np.ndarray, np.generic)) else np.asarray(value)[()]
            leaves[place] = self.input(number, type(value) in PYTHON_NUMBERS)
        return leaves

    def input(self, value: Any, weak: bool = False) -> Any:
        """Return a traced array for an argument; `weak`: whether the argument is a Python scalar."""
        made = self._wrapped(value)
        if weak:
            self.weaken(made)
        self.inputs.append(made.number)
        if isinstance(value, np.ndarray):
            root = _root(value)
            self._inputs[id(root)] = root
        return made

    def weaken(self, made: Any) -> Any:
        """Mark a value as a Python scalar, and return it."""
        if isinstance(made, TracedArray) and self.is_noting():
            made.weak = True
            self.weak.add(made.number)
        return made

    def check_numbers(self, ufunc: np.ufunc, args: Sequence[Array]) -> None:
        """End the trace if the operator of Python raises an exception, or returns another kind of number than NumPy."""
        if self.is_noting() and ufunc in PYTHON_OPERATORS:
            given = plain(tuple(args))
            try:
                made = PYTHON_OPERATORS[ufunc](*given)
            except ArithmeticError as error:
                self.refuse(f"it computes with numbers, and Python raises {type(error).__name__}: {error}")
            if not is_number_of(np.result_type(*given, *[1.0] * (ufunc is np.true_divide)).kind, made):
                self.refuse(
                    f"it computes {made!r:.40} from numbers, for which NumPy has another result: use NumPy's numbers"
                )

    def _number(self, value: Any) -> int:
        self.specs.append((value.shape, value.dtype))
        return len(self.specs) - 1

    def _number_of_object(self, found: Any) -> int:
        self.specs.append(((), _OBJECT))
        if found is not None:
            self._objects[id(found)] = found, len(self.specs) - 1
        return len(self.specs) - 1

    def _wrapped(self, value: Any) -> Any:
        made = TracedArray(self, self._number(value), value)
        if isinstance(value, np.ndarray):
            self._holders.setdefault(id(_root(value)), WeakSet()).add(made)
        return made

    def referenced(self, x: Any) -> Any:
        """Return the arguments of a call with `Ref` and `Constant` instead of arrays."""
        if type(x) in (tuple, list, dict, slice):
            return mapped(x, self.referenced)
        if isinstance(x, TracedArray):
            if x.recorder is not self:
                x.recorder.is_noting()
                return self._constant(np.asarray(x.value))  # belongs to another trace
            if x.stale is not None:
                self.refuse("it reads an array whose memory has been changed in place through another name (a view)")
            return Ref(x.number)
        if id(x) in self._objects:
            return Ref(self._objects[id(x)][1])
        if is_device_array(x):
            self.refuse("it computes with an array on a device, and only computations with NumPy arrays are compiled")
        if type(x) is np.ndarray:
            return self._constant(x)
        return self._constant(np.asarray(x)) if isinstance(x, np.ndarray) else x

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
        for other in self._holders.get(id(_root(target.value)), ()):
            if other is not target and other is not part and np.shares_memory(other.value, target.value):
                other.stale = target
        target.number = number

    def call(self, fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a NumPy function, and record it."""
        if not self.is_noting():
            return fun(*plain(tuple(args)), **plain(kwargs))
        if fun in _SHAPED_BY_INTEGERS:
            mapped((args[1:], kwargs), ask_for_integer)
        reason = reason_against(fun, args, kwargs)
        if reason:
            self.refuse(reason_of_conversion(sys._getframe(2)) or f"it calls {fun.__name__}, {reason}")
        fun, args = self._as_product(fun, args)
        references = self.referenced(tuple(args)), self.referenced(kwargs)
        return self._recorded("call", fun, *references, self._computed(fun, plain(tuple(args)), plain(kwargs)))

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
        """Run a communication on plain arrays, and record it."""
        params, rule = on_host(params), _rule()
        envelopes = envelopes_of(params)
        self._any_sender = self._any_sender or any(envelope.number is None for envelope in envelopes)
        if envelopes and self._any_sender and rule is not None and rule[0] == "tangent":
            self.refuse(
                f"{operation.__name__} sends or receives a tangent, and the function has received from any rank or with "
                "any tag before; this combination isn't compiled"
            )
        references = self.referenced(x), params
        if isinstance(params, Request):
            begun = self._objects.pop(id(params), None)
            if begun is None:
                params.done = False  # the function will run again, and wait for the request again
                self.refuse("it waits for a request that was started outside of the jitted function")
            references = references[0], Ref(begun[1])
        made = self._communicated(operation, plain(x), params)
        self.channels |= channels_of(params)
        if made is not None and made is plain(x):  # the result is the sent array
            self._step("communicate", operation, references, ())
            return x
        if isinstance(made, Request):
            self._step("communicate", operation, references, (self._number_of_object(made),))
            return made
        return self._recorded("communicate", operation, references, {}, made)

    def settle(self, fun: Callable, args: tuple) -> Any:
        """Run and record a function whose result determines how a call continues; replays compare their result with it."""
        references = self.referenced(args)
        made = self._run(fun, *plain(args))
        self._step("settle", fun, references, (), {} if made is None else {"expected": made})  # None for what only raises
        return made

    def opaque(self, fun: Callable, args: tuple, specs: Sequence[Spec] | None = None) -> tuple[Any, ...]:
        """Run and record a function that isn't traced, and that returns arrays followed by one other object."""
        # `specs`: those of the arrays, if they are the same in each run.
        references, start = self.referenced(args), next(communications)
        *arrays, rest = self._opaque(fun, plain(args), specs)
        arrays = list(map(as_array, arrays))
        self.channels |= {(x, False) for x in args if isinstance(x, Channel)}
        self._any_within |= next(communications) > start + 1
        for x in arrays:
            if not _is_array(x):
                self.refuse(f"it calls {fun.__name__}, which returns {type(x).__name__} instead of an array")
        results = [self._wrapped(x) for x in arrays]
        kwargs = {} if specs is not None else {"expected": [(x.shape, x.dtype) for x in arrays]}
        self._step("opaque", fun, references, (*[x.number for x in results], self._number_of_object(rest)), kwargs)
        return *results, rest

    call_as_it_is = opaque_call

    def once(self, fun: Callable, args: tuple) -> Any:
        """Run the initialization of a communicator at its first use, without recording it."""
        return self._untraced(fun, *args)

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator of `mpiad.extend` on plain arrays, and record it."""
        if not operator.preserves_spec and _package_of(operator) not in _COMPILED_PACKAGES:
            self.refuse(f"it calls {operator.__name__} of mpiad.{_package_of(operator)}, which isn't compiled yet")
        if any(hides_traced(x) for x in (*args, *kwargs.values())):
            self.refuse(f"{operator.__name__} gets functions or objects that contain traced values")
        tracing.recorder = None
        try:
            used = {channel(x.comm, operator.__name__, collective=False) for x in plain(args) if hasattr(x, "comm")}
        finally:
            tracing.recorder = self
        self.channels |= {(each, False) for each in used}
        references = self.referenced(args), self.referenced(kwargs)
        return self._recorded("operate", operator, *references, self._operated(operator, plain(args), plain(kwargs)))

    def communicated_by_itself(self) -> None:
        """End the trace in failure, since a function communicates by other means than recorded operations."""
        _, called = calls.user_frame(sys._getframe(1))
        name = calls.entry(called) or "a function of mpiad's"
        self.refuse(f"it calls {name}, in which ranks exchange shapes or settings first, and which isn't compiled yet")

    def drop_communications(self) -> None:
        """Drop all communications so far, and the steps that use their results; later steps mustn't use them."""
        steps, dropped = self.steps, set[int]()
        self.steps = []
        for step in steps:
            used: list[Any] = []
            mapped((step.args, step.kwargs), used.append)
            if step.kind == "call" and not any(type(x) is Ref and x.number in dropped for x in used):
                self.steps.append(step)
            else:
                dropped.update(step.outs)

    @property
    def communications(self) -> int:
        """The number of communicating steps."""
        return sum(step.kind in ("communicate", "operate") for step in self.steps)

    @property
    def communicates(self) -> bool:
        """Whether the function has communicated, possibly in an untraced function."""
        return self._any_within or self.communications > 0

    def marked(self, channel: Any, reason: str, messages: bool) -> bool:
        """Remember a channel with pending messages for `mark`."""
        self._marks.append((channel, reason, messages))
        return True

    def mark(self) -> None:
        """Mark the remembered channels as unusable: an exception that isn't due to the trace has left messages pending."""
        for used, *fault in self._marks:
            used.mark(*fault)

    def _opaque(self, fun: Callable, args: tuple, specs: Sequence[Spec] | None) -> tuple[Any, ...]:
        return self._run(fun, *args)

    def _computed(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Squares and roots have the same bits as in loops, unlike those of np.power in some releases of NumPy.
        by_operator = fun is np.power and isinstance(args[0], np.ndarray) and not kwargs
        return args[0] ** args[1] if by_operator else fun(*args, **kwargs)

    def _communicated(self, operation: Any, x: Any, params: Any) -> Any:
        return self._run(operation.forward, x, params, params=params)

    def _operated(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self._run(operator.body, args, kwargs)

    def _run(self, fun: Callable, *args: Any, params: Any = None) -> Any:
        made = self._untraced(fun, *args)
        self.log.append(logged(made, params))
        # The trace is left only after the communication has been completed and logged.
        if self.refused is not None:
            raise self.refused
        return made

    def _untraced(self, fun: Callable, *args: Any) -> Any:
        tracing.recorder, self._inside = None, True
        start = next(communications)
        try:
            return fun(*args)
        except BaseException as error:
            # The exception may be due to a traced value in the closure of `fun`. In that case the trace fails, and the
            # function runs again, unless there were communications since the start of `fun`.
            if self.refused is None or next(communications) > start + 1:
                self.failed = error
            raise
        finally:
            tracing.recorder, self._inside = self, False

    def is_noting(self) -> bool:
        """Return whether operations on traced arrays are recorded; an operation in an untraced function ends the trace."""
        if self._inside:
            reason = "a function that it calls uses a traced value of an enclosing function: pass the value as an argument"
            self.refused = self.refused or Abandoned(reason, calls.site_of(sys._getframe(1)).text)
        self.require_open()
        return self.open and not self._inside

    def require_open(self) -> None:
        """Raise a RuntimeError for arrays that are used after the end of their trace."""
        # These arrays would give wrong results: later calls don't update them, and outer derivatives ignore them.
        if not self.open:
            raise RuntimeError(
                f"jit: {calls.site_of(sys._getframe(1)).text} uses a value that a jitted function has kept (in a list, an "
                "attribute or a variable around it). The value belongs to that function's program, and later calls don't "
                "update it. Return the value from the jitted function, y, kept = f(x), and keep it in the caller of f."
            )

    def _recorded(self, kind: str, fun: Any, args: tuple, kwargs: dict, made: Any) -> Any:
        if made is None and kind != "call":
            self._step(kind, fun, args, (), kwargs)
            return None
        if isinstance(made, (tuple, list)) and all(_is_array(part) for part in made):
            results = [self._wrapped(part) for part in made]
            out: Any = type(made)(results) if type(made) in (tuple, list) else tuple(results)
        elif _is_array(made):
            results = [self._wrapped(made)]
            out = results[0]
        else:
            is_array = isinstance(made, np.ndarray)
            what = f"an array of {made.dtype}s" if is_array else f"{type(made).__name__}, which isn't an array"
            self.refuse(f"{getattr(fun, '__name__', repr(fun))} returns {what} and may depend on traced values")
        self._step(kind, fun, args, tuple([result.number for result in results]), kwargs)
        return out

    def _step(self, kind: str, fun: Any, args: tuple, outs: tuple[int, ...], kwargs: Any = None) -> None:
        site = calls.site_of(sys._getframe(1))
        self.steps.append(Step(kind, fun, args, kwargs or {}, outs, site, self.part, _rule(), self.combined))

    def write(self, target: Array, fun: Callable, args: Sequence[Any]) -> Any:
        """Call a function that writes into an array; the array gets the number of the result."""
        if not self.is_noting():
            fun(*plain(tuple(args)), out=target.value)
            return target
        fun, args = self._as_product(fun, args)
        references = self.referenced(tuple(args))
        self._check_writing(target)
        if fun(*[np.ones((1, 1), np.result_type(plain(x))) for x in args]).dtype != target.dtype:
            args = self.call(fun, args, {}), target.dtype
            fun, references = cast, self.referenced(args)
            np.copyto(target.value, args[0].value, casting="same_kind")
        else:
            fun(*plain(tuple(args)), out=target.value)
        self._written(target, fun, references)
        return target

    def set_entries(self, target: Array, key: Index, value: Array) -> None:
        """Set entries of an array; the array gets the number of the result."""
        place, new = plain(key), plain(value)
        if not self.is_noting():
            target.value[place] = new
            return
        # For total[key] += values, Python first changes the view total[key] in place, and then assigns the view to
        # total[key].
        is_written = target.stale is not None and value is target.stale and isinstance(new, np.ndarray)
        is_written = is_written and target.value[place].__array_interface__ == new.__array_interface__
        if is_written:
            target.stale = None
        references = self.referenced(target), self.referenced(key), self.referenced(value)
        self._check_writing(target)
        if not is_written:
            target.value[place] = new
        self._written(target, with_entries, references, value if is_written else None)


def _rule() -> tuple[str, str, Site] | None:
    """Return "adjoint" or "tangent" if such a rule is running, with name and site of the forward call; None otherwise."""
    call = calls.current()
    if call is None or call.direction == "forward":
        return None
    return call.direction, call.forward_name, call.forward_site  # type: ignore[return-value]


def _package_of(operator: Any) -> str:
    """Return the subpackage of this library that defines an operator; "" for an operator of the user."""
    module = getattr(operator.fun, "__module__", "").split(".")
    return module[1] if module[0] == "mpiad" and len(module) > 1 else ""


def _is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "fciub"


# `ShapeRecorder`: a trace of shapes and dtypes, in which large arrays are neither computed nor communicated.
#
# Untouched memory stands for each large result. So a function of large arrays is compiled before it runs, which takes no
# longer than for small arrays. If an operation needs values of large arrays, or a message from another rank, this trace
# fails before it sends a message, and the function is traced while it runs (see `Recorder`).

_LARGE = 1 << 13  # entries above which computing with an array takes longer than finding the shape of the result


def is_large(x: Any) -> bool:
    """Return whether computing with an array takes long."""
    return isinstance(x, np.ndarray) and x.size > _LARGE


# Functions whose results have a known shape, and whose calls have no side effects if the trace fails.
_KNOWN = frozenset(
    "mpi_allreduce mpi_alltoall mpi_barrier mpi_exchange mpi_exscan mpi_recv mpi_scan mpi_send mpi_sum "
    "parallel.value_and_grad value_and_grad grad make_vjp make_jvp jvp hvp".split()
)
_AS_SENT = frozenset({ALLREDUCE, SCAN, SUM_TO_ROOT})


class ShapeRecorder(Recorder):
    """A trace of shapes and dtypes in progress; it overrides the methods of `Recorder` that compute or communicate."""

    def looked_up(self, call: str) -> None:
        """Handle the lookup of a channel by a function: end the trace if the shape of the function's result is unknown."""
        if call not in _KNOWN:
            self.refuse(f"the result of {call} is known only in a run")

    def check_numbers(self, ufunc: np.ufunc, args: Sequence[Array]) -> None:
        """Do nothing: the values are placeholders, and each call of the program checks its numbers (see `Entry.admits`)."""

    def _computed(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if fun is np.full:
            return _placeholder(args[0], args[2])
        by_entries = isinstance(fun, np.ufunc) and fun.signature is None or fun in (np.where, quotient)
        if by_entries and not kwargs and any(map(is_large, args)):
            shape = np.broadcast_shapes(*[np.shape(x) for x in args])
            made = fun(*[np.ones(1, x.dtype) if isinstance(x, np.ndarray) else x for x in args])
            several = isinstance(made, tuple)
            return tuple([_placeholder(shape, part.dtype) for part in made]) if several else _placeholder(shape, made.dtype)
        made = fun(*args, **kwargs)
        is_own = is_large(made) and made.base is None and not any(made is x for x in args)
        return _placeholder(made.shape, made.dtype) if is_own else made

    def _communicated(self, operation: Any, x: Any, params: Any) -> Any:
        envelopes = envelopes_of(params)
        for envelope in envelopes:
            envelope.give_back()
        if operation in (SEND, BARRIER):
            return x
        # A receive from any rank, whose envelope has no number yet, needs a run.
        needs_run = operation is RECV and any(envelope.number is None for envelope in envelopes)
        if operation in (ALLTOALL, BCAST, EXCHANGE, RECV) and params.spec is not None and not needs_run:
            return like(params.spec)
        if operation in _AS_SENT and hasattr(x, "dtype") and x.dtype.kind in "fc":
            return like(Spec(x.shape, x.dtype))
        if operation is OBJECTIVE and params.problem is None:
            return np.float64(1.0)
        return super()._communicated(operation, x, params)

    def _operated(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if operator.preserves_spec and isinstance(x, np.ndarray):
            return _placeholder(x.shape, x.dtype)
        if operator.in_place is None or kwargs or not isinstance(x, np.ndarray):
            return super()._operated(operator, args, kwargs)
        made = tuple(operator.in_place.made(*args[1:]))
        return _placeholder(x.shape[: x.ndim - len(made)] + made, x.dtype)

    def _opaque(self, fun: Callable, args: tuple, specs: Sequence[Spec] | None) -> tuple[Any, ...]:
        return super()._opaque(fun, args, specs) if specs is None else (*map(like, specs), object())

    def _untraced(self, fun: Callable, *args: Any) -> NoReturn:
        self.refuse(f"the result of {getattr(fun, '__name__', fun)} is known only in a run")


def _placeholder(shape: Shape, dtype: DTypeLike) -> Array:
    """Return an array of arbitrary values; a large one has its own memory mapping, without pages until written."""
    # The heap would take pages that earlier arrays have written, and a trace keeps an array for each of its values.
    dtype, size = np.dtype(dtype), math.prod(shape)
    if dtype.kind in "iu":  # they may be indices
        return np.zeros(shape, dtype)
    pages = mmap(-1, size * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS) if size > _LARGE else None
    return np.ndarray(shape, dtype, pages)


def like(spec: Spec) -> Any:
    """Return a placeholder for a value with this shape and dtype."""
    return _placeholder(spec.shape, spec.dtype) if spec.shape else spec.dtype.type(1)
